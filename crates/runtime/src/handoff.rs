//! The rings between the shards of one stack, for what a shard says is for another ([`HandOff`]).
//!
//! ```text
//!   queue 0 ─► shard 0 ──ring of 1──► shard 1 ◄─ queue 1
//!              ring of 0 ◄────────────┘
//! ```
//!
//! Each shard has one bounded ring, into which the others write under their own locks and from which it
//! takes at each step. Nothing else is shared on the way of a packet: a packet on the right queue touches
//! neither ring nor any lock but its shard's. What finds the ring full is dropped and counted
//! (`HandOffFull`). Mbufs that cross go home to the pool of the shard that received them.

use std::sync::Arc;

use fulmar_netdev::Peek;

use crate::sync::{AtomicIsize, Ordering, Receiver, SyncSender, TrySendError, fence, sync_channel};
use fulmar_shard::{HandOff, MAX_SHARDS, Ports};

/// What waits in a ring at most: several full receive bursts, and 200 KiB of memory.
const RING: usize = 512;

/// As long as more wait, nothing is overheard: a flood of answers leaves room for packets.
const OVERHEARING: isize = RING as isize / 4;

/// The way into one shard's ring.
#[derive(Clone)]
struct Door {
    ring: SyncSender<HandOff>,
    waiting: Arc<Waiting>,
}

/// How many wait in a ring, as counted by those who have put something in: below 0 while what somebody has
/// just put in is taken already. So whoever sees a count finds something in the ring.
#[derive(Default)]
struct Waiting(AtomicIsize);

impl Waiting {
    fn is_empty(&self, order: Ordering) -> bool {
        self.0.load(order) <= 0
    }
}

/// One shard's end: its ring, and the doors of the others.
pub struct Handoff {
    ring: Receiver<HandOff>,
    waiting: Arc<Waiting>,
    doors: Vec<Door>,
    /// Shards to which something went since somebody last looked.
    told: u32,
    ports: Arc<Ports>,
}

/// The ends for a stack of so many shards, in their order; at most [`MAX_SHARDS`].
pub fn handoffs(shards: usize) -> Vec<Handoff> {
    let rings: Vec<_> = (0..shards.min(MAX_SHARDS)).map(|_| sync_channel(RING)).collect();
    let door =
        |(ring, _): &(SyncSender<HandOff>, _)| Door { ring: ring.clone(), waiting: Arc::default() };
    let doors: Vec<Door> = rings.iter().map(door).collect();
    let ports = Arc::new(Ports::default());
    let end = |((_, ring), own): ((_, Receiver<HandOff>), &Door)| Handoff {
        ring,
        waiting: Arc::clone(&own.waiting),
        doors: doors.clone(),
        told: 0,
        ports: Arc::clone(&ports),
    };
    rings.into_iter().zip(&doors).map(end).collect()
}

impl Handoff {
    /// Hands something to another shard, or back if its ring is full. [`Handoff::take_told`] says
    /// afterwards who may have to be woken.
    #[allow(clippy::result_large_err, reason = "it comes back as it went: no heap per packet")]
    pub fn hand(&mut self, to: u16, what: HandOff) -> Result<(), HandOff> {
        let Some(door) = self.doors.get(usize::from(to)) else { return Err(what) };
        if matches!(what, HandOff::NeighbourUpdate(_))
            && door.waiting.0.load(Ordering::Relaxed) >= OVERHEARING
        {
            return Err(what);
        }
        door.ring.try_send(what).map_err(|e| match e {
            TrySendError::Full(what) | TrySendError::Disconnected(what) => what,
        })?;
        door.waiting.0.fetch_add(1, Ordering::SeqCst);
        self.told |= 1 << to;
        Ok(())
    }

    /// What came first of what waits.
    pub fn take(&mut self) -> Option<HandOff> {
        if self.is_empty() {
            return None;
        }
        let what = self.ring.try_recv().ok()?;
        self.waiting.0.fetch_sub(1, Ordering::SeqCst);
        Some(what)
    }

    /// Whether nothing waits.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty(Ordering::SeqCst)
    }

    /// Whether something went to another shard since [`Handoff::take_told`] was called.
    pub fn has_told(&self) -> bool {
        self.told != 0
    }

    /// The shards to which something went since the last call, a bit each.
    pub fn take_told(&mut self) -> u32 {
        std::mem::take(&mut self.told)
    }

    /// Which shards have which ports.
    pub fn ports(&self) -> Arc<Ports> {
        Arc::clone(&self.ports)
    }

    /// Looks at a device and at the ring beside it.
    pub fn peek_beside(&self, device: Arc<dyn Peek>) -> Arc<dyn Peek> {
        Arc::new(Beside { device, waiting: Arc::clone(&self.waiting) })
    }
}

struct Beside {
    device: Arc<dyn Peek>,
    waiting: Arc<Waiting>,
}

impl Peek for Beside {
    fn is_pending(&self) -> bool {
        !self.waiting.is_empty(Ordering::Relaxed) || self.device.is_pending()
    }
}

/// Between the look at a ring and a sleep, and between the filling of a ring and the look at who sleeps:
/// of the two, one sees what the other did.
pub fn before_looking() {
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
        assert_eq!(ends[0].take_told(), 0b100);
        assert_eq!(ends[0].take_told(), 0);
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
