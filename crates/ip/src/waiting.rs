//! Packets that wait for a neighbour's address.
//!
//! Bounded in packets per neighbour, in packets, and in bytes. Where there are too many the oldest gives
//! way (RFC 4861 section 7.2.2), a reply before a packet of the host's own traffic: who forges source
//! addresses can make the stack reply to neighbours that do not exist.

use alloc::collections::VecDeque;
use core::net::IpAddr;

use fulmar_base::{Counters, DropReason, Offload};
use fulmar_mbuf::{Chain, Pool};

/// Packets that wait for one neighbour at most: an initial window and some (RFC 4861 section 7.2.2
/// asks for one or more).
const MAX_PER_NEIGHBOUR: usize = 16;
/// Packets that wait in all.
const MAX_PACKETS: usize = 256;

/// A frame that is complete but for its Ethernet destination.
#[derive(Debug)]
pub(crate) struct Held {
    pub(crate) next_hop: IpAddr,
    pub(crate) chain: Chain,
    pub(crate) offload: Offload,
    /// To be sent in fragments for a path of this MTU.
    pub(crate) cut_to: Option<usize>,
    /// The stack replies by itself.
    pub(crate) is_reply: bool,
}

impl Held {
    fn cost(&self) -> Load {
        Load { pkts: 1, bytes: self.chain.held_bytes().max(self.chain.len()) }
    }
}

/// So much waits.
#[derive(Clone, Copy, Debug, Default)]
struct Load {
    pkts: usize,
    bytes: usize,
}

impl Load {
    fn add(&mut self, other: Load) {
        self.pkts = self.pkts.saturating_add(other.pkts);
        self.bytes = self.bytes.saturating_add(other.bytes);
    }

    fn remove(&mut self, other: Load) {
        self.pkts = self.pkts.saturating_sub(other.pkts);
        self.bytes = self.bytes.saturating_sub(other.bytes);
    }

    /// Whether it is no more than one part of so many of a limit.
    fn fits(&self, limit: &Load, parts: usize) -> bool {
        self.pkts.saturating_mul(parts) <= limit.pkts
            && self.bytes.saturating_mul(parts) <= limit.bytes
    }
}

/// The packets that wait, oldest first.
#[derive(Debug)]
pub(crate) struct Waiting {
    packets: VecDeque<Held>,
    limit: Load,
    /// All of them.
    all: Load,
    /// Those that are replies, at most half of the limit.
    replies: Load,
}

impl Waiting {
    /// For so many bytes of packets.
    pub(crate) fn new(max_bytes: usize) -> Waiting {
        Waiting {
            packets: VecDeque::new(),
            limit: Load { pkts: MAX_PACKETS, bytes: max_bytes },
            all: Load::default(),
            replies: Load::default(),
        }
    }

    /// Keeps a frame until its next hop is known. Those that give way for it are dropped; it may be
    /// itself.
    pub(crate) fn push(&mut self, held: Held, pool: &mut Pool, counters: &mut Counters) {
        let next_hop = held.next_hop;
        self.load(held.cost(), held.is_reply);
        self.packets.push_back(held);
        let of_neighbour = self.packets.iter().filter(|h| h.next_hop == next_hop).count();
        if of_neighbour > MAX_PER_NEIGHBOUR {
            self.drop_oldest(|h| h.next_hop == next_hop, pool, counters);
        }
        while !self.replies.fits(&self.limit, 2) {
            self.drop_oldest(|h| h.is_reply, pool, counters);
        }
        while !self.all.fits(&self.limit, 1) {
            self.drop_oldest(|_| true, pool, counters);
        }
    }

    /// Drops the oldest of some frames, of replies if there are any among them.
    fn drop_oldest(
        &mut self,
        which: impl Fn(&Held) -> bool,
        pool: &mut Pool,
        counters: &mut Counters,
    ) {
        let reply = self.packets.iter().position(|h| h.is_reply && which(h));
        let oldest = reply.or_else(|| self.packets.iter().position(which));
        if let Some(held) = oldest.and_then(|i| self.take(i)) {
            counters.drop_packet(DropReason::NeighbourQueueFull);
            pool.free(held.chain);
        }
    }

    /// Drops what waits for a neighbour that is no longer asked for.
    pub(crate) fn discard(&mut self, next_hop: IpAddr, pool: &mut Pool, counters: &mut Counters) {
        while let Some(held) = self.pop(next_hop) {
            counters.drop_packet(DropReason::NeighbourQueueFull);
            pool.free(held.chain);
        }
    }

    /// Whether a frame waits for a neighbour.
    pub(crate) fn holds(&self, next_hop: IpAddr) -> bool {
        self.packets.iter().any(|h| h.next_hop == next_hop)
    }

    /// The oldest frame for a neighbour.
    pub(crate) fn pop(&mut self, next_hop: IpAddr) -> Option<Held> {
        let i = self.packets.iter().position(|h| h.next_hop == next_hop)?;
        self.take(i)
    }

    pub(crate) fn len(&self) -> usize {
        self.packets.len()
    }

    /// Frees everything.
    pub(crate) fn release(&mut self, pool: &mut Pool) {
        self.packets.drain(..).for_each(|h| pool.free(h.chain));
        (self.all, self.replies) = (Load::default(), Load::default());
    }

    fn load(&mut self, cost: Load, is_reply: bool) {
        self.all.add(cost);
        if is_reply {
            self.replies.add(cost);
        }
    }

    fn take(&mut self, i: usize) -> Option<Held> {
        let held = self.packets.remove(i)?;
        self.all.remove(held.cost());
        if held.is_reply {
            self.replies.remove(held.cost());
        }
        Some(held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fulmar_mbuf::{PoolConfig, Purpose};

    struct Rig {
        waiting: Waiting,
        pool: Pool,
        counters: Counters,
    }

    fn ip(n: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, n])
    }

    impl Rig {
        fn new(max_bytes: usize) -> Rig {
            Rig {
                waiting: Waiting::new(max_bytes),
                pool: Pool::new(PoolConfig::with_budget(32 << 20)).unwrap(),
                counters: Counters::default(),
            }
        }

        fn push(&mut self, n: u8, bytes: usize, is_reply: bool) {
            let purpose = if is_reply { Purpose::Receive } else { Purpose::Send };
            let chain = self.pool.alloc_chain(bytes, 0, purpose).unwrap();
            let held = Held {
                next_hop: ip(n),
                chain,
                offload: Offload::default(),
                cut_to: None,
                is_reply,
            };
            self.waiting.push(held, &mut self.pool, &mut self.counters);
            let sum = |w: &Waiting, of: fn(&Held) -> bool| {
                w.packets.iter().filter(|h| of(h)).map(|h| h.cost().bytes).sum::<usize>()
            };
            assert_eq!(self.waiting.all.bytes, sum(&self.waiting, |_| true));
            assert_eq!(self.waiting.replies.bytes, sum(&self.waiting, |h| h.is_reply));
        }

        fn kept(&self, is_reply: bool) -> usize {
            self.waiting.packets.iter().filter(|h| h.is_reply == is_reply).count()
        }

        fn end(mut self, pushed: usize) {
            let drops = self.counters.drops(DropReason::NeighbourQueueFull) as usize;
            assert_eq!(drops + self.waiting.len(), pushed);
            self.waiting.release(&mut self.pool);
            assert_eq!(self.pool.outstanding(), 0);
        }
    }

    #[test]
    fn replies_fill_half_of_the_queue_and_displace_only_each_other() {
        let mut rig = Rig::new(1 << 20);
        (0..128).for_each(|n| rig.push(n, 100, false));
        (0..250).for_each(|n| rig.push(n, 40, true));
        assert_eq!((rig.kept(false), rig.kept(true)), (128, 128));
        (0..128).for_each(|n| rig.push(n, 100, false));
        assert_eq!((rig.kept(false), rig.kept(true)), (256, 0));
        rig.push(9, 40, true);
        assert_eq!((rig.kept(false), rig.kept(true)), (256, 0));
        rig.end(128 + 250 + 128 + 1);
    }

    #[test]
    fn large_replies_pin_half_of_the_bytes() {
        let mut rig = Rig::new(1 << 20);
        rig.push(1, 60_000, false);
        (0..100).for_each(|n| rig.push(n, 60_000, true));
        assert!(rig.waiting.replies.bytes <= 512 << 10 && rig.kept(true) >= 6);
        assert_eq!(rig.kept(false), 1);
        rig.end(101);
    }

    #[test]
    fn one_neighbour_has_16_packets_and_replies_give_way_to_own_ones() {
        let mut rig = Rig::new(1 << 20);
        (0..10).for_each(|_| rig.push(1, 40, true));
        (0..10).for_each(|_| rig.push(1, 100, false));
        assert_eq!((rig.kept(false), rig.kept(true)), (10, 6));
        (0..20).for_each(|_| rig.push(1, 100, false));
        assert_eq!((rig.kept(false), rig.kept(true)), (16, 0));
        rig.push(2, 100, false);
        assert_eq!(rig.waiting.len(), 17);
        rig.end(41);
    }

    #[test]
    fn a_packet_that_is_larger_than_the_limit_does_not_wait() {
        let mut rig = Rig::new(32 << 10);
        rig.push(1, 60_000, false);
        assert_eq!(rig.waiting.len(), 0);
        rig.end(1);
    }
}
