//! Sendfile calls: the steps of `crate::socket::sendfile` on a socket of
//! the table, each with what the stack adds (counters, output, retries).

use core::task::Poll;

use crate::base::{Counter, Instant, SlotId, Stage};
use crate::socket::sendfile::{self, LowWater, Piece, Rest};
use crate::socket::sosend::{self, Appended};
use crate::socket::{Reservation, SocketError};
use crate::tcp::State;

use crate::shard::send_calls::MoreData;
use crate::shard::sockets::{Socket, TcpEntry};
use crate::shard::world::Shard;

/// The calls of sendfile on one connection.
pub struct SendFileCalls<'a> {
    shard: &'a mut Shard,
    id: SlotId,
}

impl Shard {
    /// Sendfile on a connection.
    pub fn sendfile(&mut self, id: SlotId) -> SendFileCalls<'_> {
        SendFileCalls { shard: self, id }
    }
}

impl SendFileCalls<'_> {
    /// First step of a turn: space and storage for as much of `rest` as fits. Wait for
    /// `WRITABLE` and repeat. Between [`TcpEntry::lock_send`](crate::shard::TcpEntry::lock_send) and [`SendFileCalls::end`].
    ///
    /// # Errors
    /// The error of the connection; [`SocketError::BrokenPipe`] after a shutdown.
    pub fn reserve(
        &mut self,
        now: Instant,
        rest: &Rest,
        worth: LowWater,
    ) -> Result<Poll<(Reservation, Piece)>, SocketError> {
        let core = &mut self.shard.core;
        core.sockets.check_error(self.id)?;
        core.net.pass(Stage::SendChecked);
        let Some(Socket::Tcp(entry)) = core.sockets.get_mut(self.id) else {
            return Err(SocketError::BadHandle);
        };
        let step = sendfile::reserve(&mut entry.tcb, &mut core.net.pool, rest, worth)?;
        match &step {
            Poll::Ready(_) => {
                entry.blocked.is_blocked = false;
                core.net.pass(Stage::SendReserved);
            }
            Poll::Pending => {
                if sendfile::has_space(&entry.tcb, rest, worth) {
                    core.wait_to_send(now, self.id, SocketError::NoBuffer);
                }
            }
        }
        Ok(step)
    }

    /// Last step of a turn: appends the first `filled` bytes and runs the output once. Before more data a part that
    /// does not fill a segment waits for it.
    ///
    /// # Errors
    /// The connection has ended since the first step: its error. Nothing of the turn was accepted.
    pub fn commit(
        &mut self,
        now: Instant,
        mut r: Reservation,
        filled: usize,
        more: MoreData,
    ) -> Result<(), SocketError> {
        let Some(Socket::Tcp(entry)) = self.shard.core.sockets.get_mut(self.id) else {
            self.shard.sosend(self.id).give_back(r);
            return Err(SocketError::BadHandle);
        };
        if let Some(e) = take_send_error(entry) {
            self.shard.sosend(self.id).give_back(r);
            return Err(e);
        }
        let taken = Appended { bytes: filled, mbufs: r.chain.segs() };
        r.keep(filled);
        sosend::commit(&mut entry.tcb, &mut self.shard.core.net.pool, r);
        entry.tcb.set_more_announced(more == MoreData::Follows);
        self.shard.core.net.count_copied(filled);
        self.send(now, taken);
        Ok(())
    }

    /// The output of a turn.
    fn send(&mut self, now: Instant, taken: Appended) {
        let net = &mut self.shard.core.net;
        net.count_write(taken.bytes, taken.mbufs);
        net.counters.count(Counter::SendFilePieces);
        net.counters.add(Counter::SendFileBytes, taken.bytes as u64);
        net.pass(Stage::SendCommitted);
        self.shard.send_written(now, self.id);
        self.shard.tcp.defer_tail(now, self.id, &mut self.shard.core);
    }

    /// Ends the call: restores the low-water mark and unlocks the send side.
    pub fn end(&mut self) {
        if let Some(Socket::Tcp(entry)) = self.shard.core.sockets.get_mut(self.id) {
            sendfile::restore(&mut entry.tcb);
        }
        self.shard.sosend(self.id).unlock();
    }

    /// Accepted bytes cannot be read from the file: the stream has a hole, so the connection is reset with an
    /// error.
    pub fn fail(&mut self, now: Instant, r: Reservation) {
        self.shard.sosend(self.id).give_back(r);
        let Some(Socket::Tcp(entry)) = self.shard.core.sockets.get_mut(self.id) else { return };
        if entry.tcb.state() == State::Closed {
            return;
        }
        entry.error.get_or_insert(SocketError::InputOutput);
        entry.tcb.abort();
        self.shard.output_and_finish(now, self.id);
        self.shard.notify(self.id);
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
