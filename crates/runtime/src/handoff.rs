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

use fulmar_netdev::Peek;

use crate::sync::{AtomicIsize, Ordering, Receiver, SyncSender, TrySendError, fence, sync_channel};
use fulmar_shard::{HandOff, MAX_SHARDS, Ports};

/// Slots of a ring: several full receive bursts, and 200 KiB of memory.
const RING: usize = 512;

/// While more are queued, broadcast neighbour updates are refused: a flood of replies leaves space for packets.
const OVERHEARING: isize = RING as isize / 4;

/// The sending end of one shard's ring.
#[derive(Clone)]
struct Sender {
    ring: SyncSender<HandOff>,
    waiting: Arc<Waiting>,
}

/// The length of a ring, as counted by its writers after each write: below 0 while an entry is taken before it is
/// counted. So a reader that sees a count above 0 finds an entry.
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
    /// Siblings to kick: a bit per ring written since [`Handoff::take_kicks`].
    kicks: u32,
    ports: Arc<Ports>,
}

/// The ends for a stack of so many shards, by number; at most [`MAX_SHARDS`].
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
    /// Hands a packet over to a sibling; returns it if the ring is full. [`Handoff::take_kicks`] has the siblings to
    /// wake afterwards.
    #[allow(clippy::result_large_err, reason = "no heap per packet")]
    pub fn hand(&mut self, to: u16, what: HandOff) -> Result<(), HandOff> {
        let Some(sender) = self.senders.get(usize::from(to)) else { return Err(what) };
        if matches!(what, HandOff::NeighbourUpdate(_))
            && sender.waiting.0.load(Ordering::Relaxed) >= OVERHEARING
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
    pub fn take(&mut self) -> Option<HandOff> {
        if self.is_empty() {
            return None;
        }
        let what = self.ring.try_recv().ok()?;
        self.waiting.0.fetch_sub(1, Ordering::SeqCst);
        Some(what)
    }

    /// Whether the ring is empty.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty(Ordering::SeqCst)
    }

    /// Whether siblings are to be kicked.
    pub fn has_kicks(&self) -> bool {
        self.kicks != 0
    }

    /// The siblings to kick, a bit each; clears them.
    pub fn take_kicks(&mut self) -> u32 {
        std::mem::take(&mut self.kicks)
    }

    /// The ports of each shard.
    pub fn ports(&self) -> Arc<Ports> {
        Arc::clone(&self.ports)
    }

    /// A peek at a device that also sees entries of the ring.
    pub fn peek_with_ring(&self, device: Arc<dyn Peek>) -> Arc<dyn Peek> {
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
pub fn handoff_fence() {
    fence(Ordering::SeqCst);
}

#[cfg(test)]
mod tests {
    use fulmar_ip::EchoReply;
    use fulmar_mbuf::Chain;

    use super::*;
    use fulmar_shard::NeighbourUpdate;

    fn overheard(n: u8) -> HandOff {
        HandOff::NeighbourUpdate(NeighbourUpdate::of(&[n; 60]).unwrap())
    }

    fn number(h: HandOff) -> u8 {
        match h {
            HandOff::NeighbourUpdate(o) => o.as_slice()[0],
            _ => panic!("nothing else was handed over"),
        }
    }

    #[test]
    fn what_is_handed_over_comes_out_in_order_at_the_right_shard() {
        let mut ends = handoffs(3);
        for n in 0..10 {
            assert!(ends[0].hand(2, overheard(n)).is_ok());
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
    fn a_full_ring_gives_back_what_does_not_fit() {
        let mut ends = handoffs(2);
        (0..RING).for_each(|_| assert!(ends[0].hand(1, echo()).is_ok()));
        assert!(matches!(ends[0].hand(1, echo()), Err(HandOff::Echo(_))));
        assert!(ends[1].take().is_some());
        assert!(ends[0].hand(1, echo()).is_ok());
    }

    #[test]
    fn a_flood_of_what_neighbours_answer_leaves_room_for_packets() {
        let mut ends = handoffs(2);
        let heard = (0..RING).filter(|_| ends[0].hand(1, overheard(1)).is_ok()).count();
        assert_eq!(heard as isize, OVERHEARING);
        (heard..RING).for_each(|_| assert!(ends[0].hand(1, echo()).is_ok()));
        assert_eq!(ends[0].hand(1, overheard(7)).map_err(number), Err(7));
        (0..RING).for_each(|_| assert!(ends[1].take().is_some()));
        assert!(ends[0].hand(1, overheard(8)).is_ok());
    }

    #[test]
    fn a_shard_that_does_not_exist_or_is_gone_takes_nothing() {
        let mut ends = handoffs(2);
        assert!(ends[0].hand(9, overheard(1)).is_err());
        drop(ends.pop());
        assert!(ends[0].hand(1, overheard(1)).is_err());
    }
}
