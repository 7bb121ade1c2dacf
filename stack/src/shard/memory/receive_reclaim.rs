//! What is discarded where the receive share is used up: bytes behind gaps, which the peer sends again, then the
//! unread bytes of connections, the longest unread first. Each of these is counted, is reset unless it is over
//! already, and fails with a time-out.
//!
//! Used up means that an allocation was refused, in most cases that of a received frame, and that memory is short a
//! moment later, too: a shard that has not run for a while finds bytes that no program could have read.
//! While the queues of connections hold no more than a sixteenth of the share nothing is discarded, whatever else has
//! filled it: windows and datagrams are granted three quarters at most, so that the minima have the last quarter, less
//! what is to be free.
//!
//! Cost: one walk over the sockets and their bytes behind gaps, at most once per [`PAUSE`], and none while memory
//! suffices.

use alloc::vec::Vec;

use crate::base::{Duration, Instant, SlotId};
use crate::mbuf::{Pool, Purpose};

use crate::shard::slab::Slab;
use crate::shard::sockets::{Socket, TcpEntry};

/// From a refusal to the walk.
const PAUSE: Duration = Duration::from_millis(100);

/// A connection is not reset within this time after a read, after the first of its unread bytes was there, or after
/// its peer has acknowledged data.
const PATIENCE: Duration = Duration::from_secs(1);

/// The order in which bytes are discarded.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Class {
    /// Bytes behind gaps.
    OutOfOrder,
    /// Bytes that are not read; the connection is reset.
    Unread,
}

/// A connection of which bytes of a class may be discarded.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Candidate {
    pub class: Class,
    /// When it may be; bytes behind gaps always may.
    due: Instant,
    pub id: SlotId,
    truesize: usize,
}

/// The time of the next walk.
#[derive(Default)]
pub(crate) struct ReceiveReclaim {
    at: Option<Instant>,
    /// The shard did not run when the walk was due: it has been put off once.
    is_late: bool,
}

impl ReceiveReclaim {
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        self.at
    }

    /// An allocation for received bytes was refused.
    pub(crate) fn ask(&mut self, now: Instant) {
        self.at.get_or_insert(now + PAUSE);
    }

    #[inline]
    pub(crate) fn is_due(&self, now: Instant) -> bool {
        self.at.is_some_and(|at| now >= at)
    }

    /// What to discard, in order, until three sixteenths of the share are free or connections hold no more than one.
    #[cold]
    pub(crate) fn choose(
        &mut self,
        now: Instant,
        pool: &Pool,
        sockets: &Slab<Socket>,
    ) -> Vec<Candidate> {
        let was_late = core::mem::replace(&mut self.is_late, false);
        if !was_late && self.at.is_some_and(|at| now >= at + PAUSE) {
            self.is_late = true;
            self.at = Some(now + PAUSE);
            return Vec::new();
        }
        self.at = None;
        let share = pool.share_of(Purpose::Receive);
        let free = pool.available(Purpose::Receive).min(share.limit - share.used);
        let lack = (share.limit / 16 * 3).saturating_sub(free);
        if lack == 0 {
            return Vec::new();
        }
        let (mut candidates, held) = candidates(sockets);
        let mut surplus = lack.min(held.saturating_sub(share.limit / 16));
        if surplus == 0 {
            return Vec::new();
        }
        candidates.sort_unstable_by_key(|c| (c.class, c.due));
        candidates.retain(|c| {
            let is_chosen = surplus > 0 && now >= c.due;
            if is_chosen {
                surplus = surplus.saturating_sub(c.truesize);
            }
            is_chosen
        });
        candidates
    }
}

/// The connections with received bytes, and the storage of these.
fn candidates(sockets: &Slab<Socket>) -> (Vec<Candidate>, usize) {
    let (mut candidates, mut held) = (Vec::new(), 0);
    for (id, socket) in sockets.iter() {
        let Socket::Tcp(entry) = socket else { continue };
        let TcpEntry { tcb, .. } = &**entry;
        let queue = tcb.recv_queue_ref();
        let (unread, out_of_order) = (queue.in_order_truesize(), queue.out_of_order_truesize());
        held += unread + out_of_order;
        // The gap of a connection that goes on is as young as its last read.
        let since = tcb.unread_since();
        let of_both = [
            (Class::OutOfOrder, since, out_of_order),
            (Class::Unread, since.max(tcb.last_progress()) + PATIENCE, unread),
        ];
        let holding = of_both.into_iter().filter(|(_, _, truesize)| *truesize > 0);
        candidates.extend(holding.map(|(class, due, truesize)| Candidate {
            class,
            due,
            id,
            truesize,
        }));
    }
    (candidates, held)
}
