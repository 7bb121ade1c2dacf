//! Sendfile calls: the steps of `crate::socket::sendfile` on a socket of the table, each with the stack's additions
//! (counters, output, retries).

use core::task::Poll;

use crate::base::{Counter, Instant, SlotId, Stage};
use crate::socket::sendfile::{self, LowWater, Piece, Rest};
use crate::socket::sosend;
use crate::socket::{Reservation, SocketError};
use crate::tcp::State;

use crate::shard::conn::send_calls::MoreData;
use crate::shard::conn::{Conn, Policy};
use crate::shard::sockets::TcpEntry;
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
        let conn = self.shard.core.conn(self.id)?;
        conn.check()?;
        let Conn { entry, net, .. } = conn;
        net.pass(Stage::SendChecked);
        let step = sendfile::reserve(&mut entry.tcb, &mut net.pool, rest, worth)?;
        if step.is_ready() {
            entry.blocked.is_blocked = false;
            net.pass(Stage::SendReserved);
        } else if sendfile::has_space(&entry.tcb, rest, worth) {
            self.shard.core.wait_to_send(now, self.id, SocketError::NoBuffer);
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
        let Shard { core, tcp, .. } = &mut *self.shard;
        let conn = match core.conn(self.id) {
            Ok(conn) => take_send_error(conn.entry).map_or(Ok(conn), Err),
            Err(e) => Err(e),
        };
        let mut conn = match conn {
            Ok(conn) => conn,
            Err(e) => {
                self.shard.sosend(self.id).give_back(r);
                return Err(e);
            }
        };
        let mbufs = r.chain.segs();
        r.keep(filled);
        sosend::commit(&mut conn.entry.tcb, &mut conn.net.pool, r);
        conn.net.count_copied(filled);
        conn.net.count_write(filled, mbufs);
        conn.net.counters.count(Counter::SendFilePieces);
        conn.net.counters.add(Counter::SendFileBytes, filled as u64);
        conn.net.pass(Stage::SendCommitted);
        let policy = Policy { tail_waits: more == MoreData::Follows, leaves_acks: false };
        let end = conn.output(tcp, now, policy);
        self.shard.end_call(now, self.id, end);
        Ok(())
    }

    /// Ends the call: restores the low-water mark and unlocks the send side.
    pub fn end(&mut self) {
        if let Ok(mut conn) = self.shard.core.conn(self.id) {
            sendfile::restore(&mut conn.entry.tcb);
            conn.unlock_send();
        }
    }

    /// Accepted bytes cannot be read from the file: the stream has a hole, so the connection is reset with an
    /// error.
    pub fn fail(&mut self, now: Instant, r: Reservation) {
        self.shard.sosend(self.id).give_back(r);
        let Ok(mut conn) = self.shard.core.conn(self.id) else { return };
        if conn.entry.tcb.state() == State::Closed {
            return;
        }
        conn.entry.error.get_or_insert(SocketError::InputOutput);
        conn.entry.tcb.abort();
        conn.notify();
        self.shard.output_and_finish(now, self.id);
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
