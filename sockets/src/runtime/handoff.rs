//! The rings between the shards of one stack, for packets that belong to another shard ([`HandOff`]).
//!
//! ```text
//!   queue 0 ─► shard 0 ──ring of 1──► shard 1 ◄─ queue 1
//!              ring of 0 ◄────────────┘
//! ```
//!
//! Each shard has one bounded ring. Its siblings write into it under their own locks; the shard drains it in each
//! step. A packet on the right queue touches neither a ring nor another shard's lock. A packet that finds the ring
//! full is dropped and counted (`HandOffFull`). Mbufs that cross are freed to the pool of the shard that received
//! them.

use std::sync::Arc;

use fulmar_stack::base::Counter;
use fulmar_stack::device::Peek;

use crate::runtime::sync::{
    AtomicIsize, Ordering, Receiver, SyncSender, TrySendError, fence, sync_channel,
};
use fulmar_stack::shard::{HandOff, MAX_SHARDS, Ports, Shard};

/// Entries of a ring: several full receive bursts, and 200 KiB of memory.
const RING: usize = 512;

/// Neighbour updates are refused while a ring has this number of entries: a flood of neighbour advertisements leaves
/// space for packets.
const NEIGHBOUR_UPDATE_LIMIT: isize = RING as isize / 4;

/// The sending end of one shard's ring.
#[derive(Clone)]
struct Sender {
    ring: SyncSender<HandOff>,
    waiting: Arc<Waiting>,
}

/// The length of a ring. A writer counts an entry after it has written it, so a count above 0 guarantees an entry;
/// below 0 an entry was taken before it was counted.
#[derive(Default)]
struct Waiting(AtomicIsize);

impl Waiting {
    fn is_empty(&self, order: Ordering) -> bool {
        self.0.load(order) <= 0
    }
}

/// One shard's end: its ring, and the sending ends of its siblings' rings.
pub struct Handoff {
    ring: Receiver<HandOff>,
    waiting: Arc<Waiting>,
    senders: Vec<Sender>,
    /// Siblings to kick: one bit for each ring written since the last [`Handoff::take_kicks`].
    kicks: u32,
    ports: Arc<Ports>,
}

/// The ends for the shards of a stack, by shard number; at most [`MAX_SHARDS`].
pub fn handoffs(shards: usize) -> Vec<Handoff> {
    let rings: Vec<_> = (0..shards.min(MAX_SHARDS)).map(|_| sync_channel(RING)).collect();
    let sender = |(ring, _): &(SyncSender<HandOff>, _)| Sender {
        ring: ring.clone(),
        waiting: Arc::default(),
    };
    let senders: Vec<Sender> = rings.iter().map(sender).collect();
    let ports = Arc::new(Ports::default());
    let end = |((_, ring), own): ((_, Receiver<HandOff>), &Sender)| Handoff {
        ring,
        waiting: Arc::clone(&own.waiting),
        senders: senders.clone(),
        kicks: 0,
        ports: Arc::clone(&ports),
    };
    rings.into_iter().zip(&senders).map(end).collect()
}

impl Handoff {
    /// Queues a packet for a sibling; returns it if the ring is full. [`Handoff::take_kicks`] returns the siblings to
    /// wake afterwards.
    #[allow(clippy::result_large_err, reason = "no heap per packet")]
    fn send(&mut self, to: u16, what: HandOff) -> Result<(), HandOff> {
        let Some(sender) = self.senders.get(usize::from(to)) else { return Err(what) };
        if matches!(what, HandOff::NeighbourUpdate(_))
            && sender.waiting.0.load(Ordering::Relaxed) >= NEIGHBOUR_UPDATE_LIMIT
        {
            return Err(what);
        }
        sender.ring.try_send(what).map_err(|e| match e {
            TrySendError::Full(what) | TrySendError::Disconnected(what) => what,
        })?;
        sender.waiting.0.fetch_add(1, Ordering::SeqCst);
        self.kicks |= 1 << to;
        Ok(())
    }

    /// Takes the first entry.
    fn take(&mut self) -> Option<HandOff> {
        if self.is_empty() {
            return None;
        }
        let what = self.ring.try_recv().ok()?;
        self.waiting.0.fetch_sub(1, Ordering::SeqCst);
        Some(what)
    }

    /// Gives the shard its siblings' entries, as far as it has space. Returns whether there were any.
    pub fn deliver_to(&mut self, shard: &mut Shard) -> bool {
        let mut has_come = false;
        while shard.siblings().has_hand_off_space()
            && let Some(what) = self.take()
        {
            // Cannot fail: there is space.
            let _ = shard.siblings().receive_hand_off(what);
            has_come = true;
        }
        has_come
    }

    /// Queues what the shard hands off for its siblings. A full ring drops it.
    pub fn collect_from(&mut self, shard: &mut Shard) {
        while let Some(out) = shard.siblings().pop_outgoing() {
            let is_packet = !matches!(out.what, HandOff::NeighbourUpdate(_));
            match self.send(out.to, out.what) {
                Ok(()) => shard.count(Counter::WrongQueue, u64::from(is_packet)),
                Err(what) => shard.drop_hand_off(what),
            }
        }
    }

    /// Whether the ring is empty.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty(Ordering::SeqCst)
    }

    /// The siblings to kick, one bit each; clears them.
    pub fn take_kicks(&mut self) -> u32 {
        std::mem::take(&mut self.kicks)
    }

    /// The ports of each shard.
    pub fn ports(&self) -> Arc<Ports> {
        Arc::clone(&self.ports)
    }

    /// A peek at a device that also sees entries of the ring.
    pub(crate) fn peek_with_ring(&self, device: Arc<dyn Peek>) -> Arc<dyn Peek> {
        Arc::new(PeekWithRing { device, waiting: Arc::clone(&self.waiting) })
    }
}

struct PeekWithRing {
    device: Arc<dyn Peek>,
    waiting: Arc<Waiting>,
}

impl Peek for PeekWithRing {
    fn is_pending(&self) -> bool {
        !self.waiting.is_empty(Ordering::Relaxed) || self.device.is_pending()
    }
}

/// The fence of a hand-off (Dekker): the owner announces its sleep, then reads the ring; the writer fills the ring,
/// then reads whether the owner sleeps. At least one of them sees the other's write.
pub(crate) fn handoff_fence() {
    fence(Ordering::SeqCst);
}

#[cfg(test)]
mod tests {
    use fulmar_stack::ip::EchoReply;
    use fulmar_stack::mbuf::Chain;

    use super::*;
    use fulmar_stack::shard::NeighbourUpdate;

    fn update(n: u8) -> HandOff {
        HandOff::NeighbourUpdate(NeighbourUpdate::of(&[n; 60]).unwrap())
    }

    fn number(h: HandOff) -> u8 {
        match h {
            HandOff::NeighbourUpdate(o) => o.as_slice()[0],
            _ => panic!("only updates were queued"),
        }
    }

    #[test]
    fn entries_arrive_in_order_at_their_shard() {
        let mut ends = handoffs(3);
        for n in 0..10 {
            assert!(ends[0].send(2, update(n)).is_ok());
        }
        assert!(ends[1].take().is_none());
        assert_eq!(ends[0].take_kicks(), 0b100);
        assert_eq!(ends[0].take_kicks(), 0);
        let got: Vec<u8> = std::iter::from_fn(|| ends[2].take()).map(number).collect();
        assert_eq!(got, (0..10).collect::<Vec<_>>());
        assert!(ends[2].is_empty());
    }

    fn echo() -> HandOff {
        HandOff::Echo(EchoReply {
            ident: 1,
            seq: 1,
            hop_limit: 64,
            from: std::net::Ipv4Addr::LOCALHOST.into(),
            payload: Chain::new(),
        })
    }

    #[test]
    fn a_full_ring_returns_the_entry() {
        let mut ends = handoffs(2);
        (0..RING).for_each(|_| assert!(ends[0].send(1, echo()).is_ok()));
        assert!(matches!(ends[0].send(1, echo()), Err(HandOff::Echo(_))));
        assert!(ends[1].take().is_some());
        assert!(ends[0].send(1, echo()).is_ok());
    }

    #[test]
    fn a_flood_of_neighbour_updates_leaves_space_for_packets() {
        let mut ends = handoffs(2);
        let queued = (0..RING).filter(|_| ends[0].send(1, update(1)).is_ok()).count();
        assert_eq!(queued as isize, NEIGHBOUR_UPDATE_LIMIT);
        (queued..RING).for_each(|_| assert!(ends[0].send(1, echo()).is_ok()));
        assert_eq!(ends[0].send(1, update(7)).map_err(number), Err(7));
        (0..RING).for_each(|_| assert!(ends[1].take().is_some()));
        assert!(ends[0].send(1, update(8)).is_ok());
    }

    #[test]
    fn entries_for_an_unknown_or_closed_shard_are_returned() {
        let mut ends = handoffs(2);
        assert!(ends[0].send(9, update(1)).is_err());
        drop(ends.pop());
        assert!(ends[0].send(1, update(1)).is_err());
    }
}
