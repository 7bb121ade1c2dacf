//! Sendfile calls: the steps of `fulmar_socket::sendfile` on a socket of
//! the table, each with what the stack adds (counters, output, retries).

use alloc::sync::Arc;

use fulmar_base::{Counter, Instant, Probe, SlotId, Stage};
use fulmar_mbuf::SharedBytes;
use fulmar_socket::sendfile::{self, LowWater, Piece, Rest};
use fulmar_socket::{Reservation, SocketError, Step, sosend};
use fulmar_tcp::State;

use crate::layers::Core;
use crate::shard::Shard;
use crate::sockets::{Socket, TcpEntry};
use crate::tcp::Tcp;

impl<P: Probe> Shard<P> {
    /// First step of a turn: space and storage for as much of `rest` as fits. Wait for
    /// `WRITABLE` and repeat. Between [`TcpEntry::lock_send`](crate::TcpEntry::lock_send) and [`Shard::sendfile_end`].
    ///
    /// # Errors
    /// Why the connection takes no more.
    pub fn sendfile_reserve(
        &mut self,
        now: Instant,
        id: SlotId,
        rest: &Rest,
        worth: LowWater,
    ) -> Result<Step<(Reservation, Piece)>, SocketError> {
        self.core.sockets.check_down(id)?;
        self.pass(Stage::SendChecked);
        let Some(Socket::Tcp(entry)) = self.core.sockets.get_mut(id) else {
            return Err(SocketError::BadHandle);
        };
        let step = sendfile::reserve(&mut entry.tcb, &mut self.core.net.pool, rest, worth)?;
        match &step {
            Step::Done(_) => {
                entry.blocked.is_blocked = false;
                self.pass(Stage::SendReserved);
            }
            Step::WaitSpace(_) | Step::WaitData(_) => {
                if sendfile::has_space(&entry.tcb, rest, worth) {
                    self.core.memory.wait(now, id, &mut self.core.sockets, &mut self.core.net);
                }
            }
        }
        Ok(step)
    }

    /// Last step of a turn: the first `filled` bytes are there; one output for all of them. `more`:
    /// others follow at once, so what does not fill a frame waits for them.
    ///
    /// # Errors
    /// Why the connection ended meanwhile: nothing of the turn was accepted.
    pub fn sendfile_commit(
        &mut self,
        now: Instant,
        id: SlotId,
        mut r: Reservation,
        filled: usize,
        more: bool,
    ) -> Result<(), SocketError> {
        let Some(Socket::Tcp(entry)) = self.core.sockets.get_mut(id) else {
            self.tcp_abandon(id, r);
            return Err(SocketError::BadHandle);
        };
        if let Some(e) = take_send_error(entry) {
            self.tcp_abandon(id, r);
            return Err(e);
        }
        let mbufs = r.chain.segs();
        r.keep(filled);
        sosend::commit(&mut entry.tcb, &mut self.core.net.pool, r);
        entry.tcb.set_more(more);
        self.core.net.count_write(filled, mbufs);
        self.core.net.count_copied(filled);
        let counters = &mut self.core.net.counters;
        counters.count(Counter::SendFilePieces);
        counters.add(Counter::SendFileBytes, filled as u64);
        self.pass(Stage::SendCommitted);
        self.send_written(now, id);
        self.tcp.defer_tail(now, id, &mut self.core);
        Ok(())
    }

    /// A whole turn for a file whose pages go by reference: queues as many bytes from `rest.file_at`
    /// on as have space, at most `most`, and runs the output once; returns how many,
    /// 0 if they are better copied (`sendfile::MIN_SHARED_BYTES`). Nothing stands in front of the file. Only if [`Shard::sends_pages`]. `more` as in
    /// [`Shard::sendfile_commit`], if all of `most` goes.
    ///
    /// # Errors
    /// Why the connection takes no more.
    pub fn sendfile_share(
        &mut self,
        now: Instant,
        id: SlotId,
        pages: &Arc<dyn SharedBytes>,
        (rest, most): (&Rest, usize),
        worth: LowWater,
    ) -> Result<Step<usize>, SocketError> {
        self.core.sockets.check_down(id)?;
        self.pass(Stage::SendChecked);
        let Some(Socket::Tcp(entry)) = self.core.sockets.get_mut(id) else {
            return Err(SocketError::BadHandle);
        };
        let pool = &mut self.core.net.pool;
        let Step::Done(taken) = sendfile::share(&mut entry.tcb, pool, pages, (rest, most), worth)?
        else {
            if sendfile::has_space(&entry.tcb, rest, worth) {
                self.core.memory.wait(now, id, &mut self.core.sockets, &mut self.core.net);
            }
            return Ok(Step::WaitSpace(1));
        };
        if taken.bytes == 0 {
            return Ok(Step::Done(0));
        }
        entry.blocked.is_blocked = false;
        entry.tcb.set_more(rest.bytes() > taken.bytes as u64);
        self.core.net.count_write(taken.bytes, taken.mbufs);
        let counters = &mut self.core.net.counters;
        counters.count(Counter::SendFilePieces);
        counters.add(Counter::SendFileBytes, taken.bytes as u64);
        counters.add(Counter::SendFileMappedBytes, taken.bytes as u64);
        self.pass(Stage::SendCommitted);
        self.send_written(now, id);
        self.tcp.defer_tail(now, id, &mut self.core);
        Ok(Step::Done(taken.bytes))
    }

    /// Whether pages of a file may go down this connection by reference: the kernel alone reads what
    /// its device sends, and it does not lead to this very stack.
    pub fn sends_pages(&self, id: SlotId) -> bool {
        let Some(Socket::Tcp(entry)) = self.core.sockets.get(id) else { return false };
        let remote = entry.tcb.key().remote_ip();
        self.core.net.link.gathers_in_kernel() && !self.core.net.ip.is_local(remote)
    }

    /// Ends the call: restores the low-water mark and unlocks the send side.
    pub fn sendfile_end(&mut self, id: SlotId) {
        if let Some(Socket::Tcp(entry)) = self.core.sockets.get_mut(id) {
            sendfile::restore(&mut entry.tcb);
        }
        self.tcp_unlock_send(id);
    }

    /// Accepted bytes cannot be read from the file: the stream has a hole, so the connection is reset with an
    /// error.
    pub fn sendfile_fail(&mut self, now: Instant, id: SlotId, r: Reservation) {
        self.tcp_abandon(id, r);
        let Some(Socket::Tcp(entry)) = self.core.sockets.get_mut(id) else { return };
        if entry.tcb.state() == State::Closed {
            return;
        }
        entry.error.get_or_insert(SocketError::InputOutput);
        entry.tcb.abort();
        self.core.net.link.set_now(now);
        self.tcp.output_now(now, id, &mut self.core);
        self.finish_call(now);
        self.notify(id);
    }
}

impl Tcp {
    /// The kernel did not find bytes that it was to send: the connections that hold them are reset with an
    /// error.
    #[cold]
    pub fn fail_vanished<P: Probe>(&mut self, now: Instant, core: &mut Core<P>) {
        core.net.pool.take_fault();
        for id in core.sockets.ids() {
            let Ok(entry) = core.sockets.tcp(id) else { continue };
            let Some(at) = entry.tcb.send_queue_ref().faulted_at() else { continue };
            entry.error.get_or_insert(SocketError::InputOutput);
            entry.tcb.abort_at(at);
            entry.tcb.discard_send_buffer(&mut core.net.pool);
            let key = *entry.tcb.key();
            self.output_now(now, id, core);
            // If the peer lacks more of what was sent, the reset is not exactly in its place, and it
            // asks back (RFC 5961 section 3.2). A peer without the connection answers that by a reset.
            self.flows.remove(&key, id);
            core.notify(id);
        }
        core.net.flush();
    }
}

/// The error for which a connection accepts no more, now that bytes are ready for it; cleared, as by a write.
fn take_send_error(entry: &mut TcpEntry) -> Option<SocketError> {
    let TcpEntry { error, tcb, .. } = entry;
    if error.is_some() || tcb.state() != State::Closed {
        return *error;
    }
    Some(tcb.take_error().map_or(SocketError::BrokenPipe, Into::into))
}
