//! Packets that wait for a neighbour's address.

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
}

/// The packets that wait, oldest first.
#[derive(Debug, Default)]
pub(crate) struct Waiting {
    packets: VecDeque<Held>,
}

impl Waiting {
    /// Keeps a frame until its next hop is known. If that makes too many, the oldest one gives way
    /// (RFC 4861 section 7.2.2): of the same neighbour, or of all.
    pub(crate) fn push(&mut self, held: Held, pool: &mut Pool, counters: &mut Counters) {
        let next_hop = held.next_hop;
        let same = self.packets.iter().filter(|h| h.next_hop == next_hop).count();
        let surplus = if same >= MAX_PER_NEIGHBOUR {
            self.pop(next_hop)
        } else if self.packets.len() >= MAX_PACKETS {
            self.packets.pop_front()
        } else {
            None
        };
        if let Some(surplus) = surplus {
            counters.drop_packet(DropReason::NeighbourQueueFull);
            pool.free(surplus.chain);
        }
        self.packets.push_back(held);
    }

    /// Whether a frame waits for a neighbour.
    pub(crate) fn holds(&self, next_hop: IpAddr) -> bool {
        self.packets.iter().any(|h| h.next_hop == next_hop)
    }

    /// The oldest frame for a neighbour.
    pub(crate) fn pop(&mut self, next_hop: IpAddr) -> Option<Held> {
        let i = self.packets.iter().position(|h| h.next_hop == next_hop)?;
        self.packets.remove(i)
    }

    pub(crate) fn len(&self) -> usize {
        self.packets.len()
    }

    /// Frees everything.
    pub(crate) fn release(&mut self, pool: &mut Pool) {
        self.packets.drain(..).for_each(|h| pool.free(h.chain));
    }
}
