//! Loans: received bytes that the application keeps by reference and returns.

use crate::base::{Instant, SlotId};
use crate::mbuf::Chain;
use crate::socket::{Least, SocketError, soreceive};
use crate::tcp::LoanCharge;
use core::task::Poll;

use crate::shard::sockets::Socket;
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
        let Some(Socket::Tcp(entry)) = self.core.sockets.get_mut(id) else {
            return Err(SocketError::BadHandle);
        };
        if entry.has_posted() {
            return Ok(Poll::Pending);
        }
        let least = entry.least(max, least);
        let mut env = self.core.net.env(now);
        let step = soreceive::lend(&mut entry.tcb, &mut env, max, least)?;
        match (&step, entry.error) {
            (Poll::Pending, Some(e)) => return Err(e),
            (Poll::Ready((chain, _)), _) => self.core.net.count_loan(chain.len()),
            _ => {}
        }
        Ok(step)
    }

    /// A loan is returned: opens the window if that is worth a packet. The socket may be gone.
    pub fn take_back(&mut self, now: Instant, id: SlotId, chain: Chain, lent: LoanCharge) {
        self.core.net.pool.free(chain);
        self.core.net.window.take_back(lent.storage_bytes);
        match self.core.sockets.get_mut(id) {
            Some(Socket::Tcp(entry)) => {
                let opens = entry.tcb.take_back(lent, &mut self.core.net.env(now));
                if opens {
                    self.tcp.output_after_read(now, id, &mut self.core);
                }
            }
            Some(Socket::Udp(entry)) => entry.socket.take_back(lent.storage_bytes),
            _ => {}
        }
    }
}
