//! Loans: received bytes that the application keeps by reference and returns.

use crate::base::{Instant, SlotId};
use crate::mbuf::Chain;
use crate::socket::{Least, SocketError, soreceive};
use crate::tcp::LoanCharge;
use core::task::Poll;

use crate::shard::conn::Conn;
use crate::shard::world::Shard;

impl Shard {
    /// Detaches up to `max` received bytes for an application that keeps the mbufs themselves; an empty chain
    /// is the end of the stream. [`Least::LowWater`] waits for the low-water mark. Give them back with
    /// [`Shard::take_back`].
    ///
    /// # Errors
    /// As [`Shard::tcp_take`]. [`SocketError::NoBuffer`]: bytes in the pool's reserve cannot be
    /// lent, and there is no other memory; a read that copies works.
    pub fn tcp_lend(
        &mut self,
        now: Instant,
        id: SlotId,
        max: usize,
        least: Least,
    ) -> Result<Poll<(Chain, LoanCharge)>, SocketError> {
        let Conn { entry, net, .. } = self.core.conn(id)?;
        if entry.has_posted() {
            return Ok(Poll::Pending);
        }
        let least = entry.least(max, least);
        let step = soreceive::lend(&mut entry.tcb, &mut net.env(now), max, least)?;
        match (&step, entry.error) {
            (Poll::Pending, Some(e)) => return Err(e),
            (Poll::Ready((chain, _)), _) => net.count_loan(chain.len()),
            _ => {}
        }
        Ok(step)
    }

    /// A loan is returned: opens the window if that is worth a packet. The socket may be gone.
    pub fn take_back(&mut self, now: Instant, id: SlotId, chain: Chain, lent: LoanCharge) {
        self.core.net.pool.free(chain);
        self.core.net.window.take_back(lent.storage_bytes);
        if let Ok(mut conn) = self.core.conn(id) {
            if conn.entry.tcb.take_back(lent, &mut conn.net.env(now)) {
                conn.output_after_read(&mut self.tcp, now);
            }
        } else if let Ok(entry) = self.core.sockets.udp(id) {
            entry.socket.take_back(lent.storage_bytes);
        }
    }
}
