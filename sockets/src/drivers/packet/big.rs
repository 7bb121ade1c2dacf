//! Receiving while frames of BIG TCP arrive: into buffers of a pool where the last one was cut.
//!
//! ```text
//!             256          front                 unit                  unit
//! frame   | headers | rest of the first piece | second piece       | third piece ...
//! buffer  | small   | large                   | large              | large
//! ```

use std::io::{self, IoSliceMut};
use std::os::fd::AsFd;

use fulmar_stack::base::DropReason;
use fulmar_stack::device::Packet;
use fulmar_stack::mbuf::{Chain, Pool};

use super::PacketSocket;
use crate::drivers::batch::Receiving;
use crate::drivers::big_tcp::{self, BATCH, Layout, TAILS};
use crate::drivers::buffer_pair::SMALL_BYTES;
use crate::drivers::sys::{self, MANY, Received};
use crate::drivers::vnet;

/// Header of the kernel, buffer pair, further pieces.
const PARTS: usize = 3 + TAILS;

type Headers = [[u8; vnet::HEADER_BYTES]; BATCH];

impl PacketSocket {
    /// Receives frames where ones of BIG TCP are expected; returns how many. `None`: nothing was received, for another way
    /// of receiving to try.
    pub(super) fn receive_expected(
        &mut self,
        limit: usize,
        pool: &mut Pool,
        taking: &mut Receiving<'_>,
    ) -> Option<usize> {
        if !self.big.is_expected() {
            return None;
        }
        let layout = self.big.prepare(pool)?;
        let limit = limit.min(BATCH);
        let mut pairs = self.pairs.iter_mut().take(limit);
        if !pairs.all(|p| p.prepare(pool)) {
            return None;
        }
        let (count, received, headers) = match self.receive_pieces(limit, layout) {
            Ok(batch) => batch,
            // As in `rx_burst`: the frame is gone.
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {
                self.big.queue(Err(DropReason::BadOffload), pool, taking.counters);
                return Some(1);
            }
            Err(_) => return None,
        };
        for (at, (received, header)) in received.iter().zip(&headers).take(count).enumerate() {
            let frame = self.take_pieces(at, layout, header, *received, pool);
            self.big.queue(frame, pool, taking.counters);
        }
        Some(count)
    }

    fn receive_pieces(
        &mut self,
        limit: usize,
        layout: Layout,
    ) -> io::Result<(usize, [Received; MANY], Headers)> {
        let mut headers: Headers = [[0; vnet::HEADER_BYTES]; BATCH];
        let (n, large_bytes) = (self.header_bytes, layout.front_bytes.saturating_sub(SMALL_BYTES));
        let pairs = self.pairs.iter_mut().zip(self.big.tails(layout.unit));
        let mut parts = headers.iter_mut().zip(pairs).map(|(h, (pair, tails))| {
            let [small, large] = pair.own_parts().unwrap_or_default();
            let large_bytes = large_bytes.min(large.len());
            let mut all: [&mut [u8]; PARTS] = std::array::from_fn(|_| &mut [][..]);
            (all[0], all[1], all[2]) = (&mut h[..n], small, &mut large[..large_bytes]);
            all[3..].iter_mut().zip(tails).for_each(|(part, tail)| *part = tail);
            all.map(IoSliceMut::new)
        });
        let none = || [(); PARTS].map(|()| IoSliceMut::new(&mut []));
        let mut many: [_; BATCH] = std::array::from_fn(|_| parts.next().unwrap_or_else(none));
        drop(parts);
        let (count, received) = sys::receive_many(self.socket.as_fd(), &mut many[..limit])?;
        Ok((count, received, headers))
    }

    /// The frame that was received into pair `at` and the tails of that frame.
    fn take_pieces(
        &mut self,
        at: usize,
        layout: Layout,
        header: &[u8; vnet::HEADER_BYTES],
        received: Received,
        pool: &mut Pool,
    ) -> Result<Packet, DropReason> {
        let bytes = received.bytes.saturating_sub(self.header_bytes);
        if received.is_cut {
            return Err(DropReason::FrameTooBig);
        }
        if bytes < super::ETHER_BYTES {
            return Err(DropReason::Truncated);
        }
        let mut chain = self.pairs[at].take_own(bytes.min(layout.front_bytes), pool)?;
        self.big.take_tails(at, layout.unit, bytes.saturating_sub(layout.front_bytes), &mut chain);
        if big_tcp::is_big(bytes) {
            let frame = big_tcp::received(chain, header, pool);
            return self.big.learned(frame);
        }
        self.big.miss(pool);
        plain(chain, header, pool)
    }
}

/// The packet of a frame that is none of BIG TCP.
fn plain(
    chain: Chain,
    header: &[u8; vnet::HEADER_BYTES],
    pool: &mut Pool,
) -> Result<Packet, DropReason> {
    let front = chain.front().map_or(&[][..], |m| m.as_slice());
    match vnet::parse(header, chain.len(), front) {
        Ok(offload) => Ok(Packet { chain, offload }),
        Err(reason) => {
            pool.free(chain);
            Err(reason)
        }
    }
}
