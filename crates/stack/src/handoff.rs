//! What passes between the shards of one stack: packets that came on another's queue, and what all of
//! them should hear.
//!
//! ```text
//!   queue 0 ─► shard 0 ──ring of 1──► shard 1 ◄─ queue 1
//!              ring of 0 ◄────────────┘
//! ```
//!
//! Each shard has one bounded ring, into which the others write under their own locks and from which it
//! takes at each step. Nothing else is shared on the way of a packet: a packet on the right queue touches
//! neither ring nor any lock but its shard's. What finds the ring full is dropped and counted
//! (`WrongQueueFull`). Mbufs that cross go home to the pool of the shard that received them.
//!
//! [`Ports`] says which shards have a datagram socket on a port, since datagram sockets belong to no flow.
//! It is read and written without a lock.

use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use fulmar_ip::{Delivered, EchoReply, QuotedError};
use fulmar_netdev::Peek;

use crate::sync::{AtomicIsize, Ordering, Receiver, SyncSender, TrySendError, fence, sync_channel};

/// Shards of one stack at most: as many as a word has bits.
pub const MAX_SHARDS: usize = 32;

/// What waits in a ring at most: several full receive bursts, and 200 KiB of memory.
const RING: usize = 512;

/// As long as more wait, nothing is overheard: a flood of answers leaves room for packets.
const OVERHEARING: isize = RING as isize / 4;

/// Frames that are heard by all are answers of neighbours, which are short.
pub const OVERHEARD_BYTES: usize = 128;

/// A frame that arrived on another queue and is news for every shard.
pub struct Overheard {
    bytes: [u8; OVERHEARD_BYTES],
    len: usize,
}

impl Overheard {
    /// A copy of a short frame.
    pub fn of(frame: &[u8]) -> Option<Overheard> {
        let mut bytes = [0; OVERHEARD_BYTES];
        bytes.get_mut(..frame.len())?.copy_from_slice(frame);
        Some(Overheard { bytes, len: frame.len() })
    }

    /// The frame.
    pub fn as_slice(&self) -> &[u8] {
        self.bytes.get(..self.len).unwrap_or_default()
    }
}

/// What crosses.
#[allow(clippy::large_enum_variant, reason = "it lies in the ring's own slots: no heap per packet")]
pub enum Handed {
    /// A packet of a flow that the receiver owns, as ip delivered it.
    Packet(Delivered),
    /// An error about such a flow.
    Error(QuotedError),
    /// An answer for a ping socket.
    Echo(EchoReply),
    /// What a neighbour said.
    Overheard(Overheard),
}

/// The way into one shard's ring.
#[derive(Clone)]
struct Door {
    ring: SyncSender<Handed>,
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

/// Which shards have a datagram socket on which port.
pub struct Ports(Box<[AtomicU32]>);

impl Default for Ports {
    fn default() -> Self {
        Ports((0..=u16::MAX).map(|_| AtomicU32::new(0)).collect())
    }
}

impl Ports {
    fn word(&self, port: u16) -> &AtomicU32 {
        &self.0[usize::from(port)]
    }

    /// A bit for each shard that has the port.
    #[inline]
    pub fn owners(&self, port: u16) -> u32 {
        self.word(port).load(Ordering::Relaxed)
    }

    /// The shard has a socket on the port.
    pub fn add(&self, port: u16, shard: u16) {
        self.word(port).fetch_or(1 << shard, Ordering::Relaxed);
    }

    /// The shard has none any more.
    pub fn remove(&self, port: u16, shard: u16) {
        self.word(port).fetch_and(!(1 << shard), Ordering::Relaxed);
    }

    /// Takes a port that no other shard has.
    pub fn claim(&self, port: u16, shard: u16) -> bool {
        let own = 1 << shard;
        let taken = self.word(port).compare_exchange(0, own, Ordering::Relaxed, Ordering::Relaxed);
        taken.is_ok() || taken == Err(own)
    }
}

/// One shard's end: its ring, and the doors of the others.
pub struct Handoff {
    ring: Receiver<Handed>,
    waiting: Arc<Waiting>,
    doors: Vec<Door>,
    /// Shards to which something went since somebody last looked.
    told: u32,
    pub(crate) ports: Arc<Ports>,
}

/// The ends for a stack of so many shards, in their order; at most [`MAX_SHARDS`].
pub fn handoffs(shards: usize) -> Vec<Handoff> {
    let rings: Vec<_> = (0..shards.min(MAX_SHARDS)).map(|_| sync_channel(RING)).collect();
    let door =
        |(ring, _): &(SyncSender<Handed>, _)| Door { ring: ring.clone(), waiting: Arc::default() };
    let doors: Vec<Door> = rings.iter().map(door).collect();
    let ports = Arc::new(Ports::default());
    let end = |((_, ring), own): ((_, Receiver<Handed>), &Door)| Handoff {
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
    pub fn hand(&mut self, to: u16, what: Handed) -> Result<(), Handed> {
        let Some(door) = self.doors.get(usize::from(to)) else { return Err(what) };
        if matches!(what, Handed::Overheard(_))
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
    pub fn take(&mut self) -> Option<Handed> {
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

    /// How many shards there are.
    pub fn shards(&self) -> u16 {
        self.doors.len() as u16
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
    use fulmar_mbuf::Chain;

    use super::*;

    fn overheard(n: u8) -> Handed {
        Handed::Overheard(Overheard::of(&[n; 60]).unwrap())
    }

    fn number(h: Handed) -> u8 {
        match h {
            Handed::Overheard(o) => o.as_slice()[0],
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

    fn echo() -> Handed {
        Handed::Echo(EchoReply {
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
        assert!(matches!(ends[0].hand(1, echo()), Err(Handed::Echo(_))));
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

    #[test]
    fn a_frame_too_long_to_be_overheard_is_left_alone() {
        assert!(Overheard::of(&[0; OVERHEARD_BYTES + 1]).is_none());
    }

    #[test]
    fn a_port_that_a_shard_has_is_claimed_by_no_other() {
        let ports = Ports::default();
        assert!(ports.claim(53, 1));
        assert!(ports.claim(53, 1));
        assert!(!ports.claim(53, 0));
        ports.add(53, 0);
        assert_eq!(ports.owners(53), 0b11);
        ports.remove(53, 1);
        ports.remove(53, 0);
        assert!(ports.claim(53, 0));
    }
}
