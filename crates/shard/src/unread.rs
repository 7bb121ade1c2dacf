//! Connections that are reset when the receive share is nearly used up: those whose received bytes are not read, or stay
//! behind a gap, the longest first. Each is reset and counted, and fails with a time-out; its bytes are discarded.
//!
//! Only minima push the bytes of all connections beyond their part of the share ([`WindowBudget`]). While they hold
//! no more than that, none is reset, whatever else has filled the share.
//!
//! Cost: one walk over the sockets, at most once per [`PAUSE`], and none while an eighth of the share is free.
//!
//! [`WindowBudget`]: fulmar_tcp::WindowBudget

use alloc::vec::Vec;

use fulmar_base::{Duration, Instant, SlotId};
use fulmar_mbuf::{FairShare, Pool, Purpose};

use crate::slab::Slab;
use crate::sockets::Socket;

/// Between two walks.
const PAUSE: Duration = Duration::from_millis(100);

/// A connection whose user has read within this time, or whose first unread byte is not older, is never reset.
const PATIENCE: Duration = Duration::from_secs(1);

/// A connection with bytes in its receive queue.
struct Unread {
    since: Instant,
    id: SlotId,
    storage_bytes: usize,
}

/// The time of the last walk, and of the next one if it must not wait for a frame.
#[derive(Default)]
pub struct UnreadReclaim {
    at: Option<Instant>,
    last: Instant,
}

impl UnreadReclaim {
    pub fn next_deadline(&self) -> Option<Instant> {
        self.at
    }

    /// Whether the receive share is nearly used up and the next walk is due.
    #[inline]
    pub fn is_due(&mut self, now: Instant, pool: &Pool) -> bool {
        if !pool.is_nearly_used(Purpose::Receive) {
            self.at = None;
            return false;
        }
        now >= self.last + PAUSE
    }

    /// The connections to reset, in order, until three sixteenths of the share are free or all connections hold no more
    /// than `part` bytes of it.
    #[cold]
    pub fn choose(
        &mut self,
        now: Instant,
        share: FairShare,
        part: usize,
        sockets: &Slab<Socket>,
    ) -> Vec<SlotId> {
        self.last = now;
        let mut unread = unread(sockets);
        let held: usize = unread.iter().map(|u| u.storage_bytes).sum();
        let above = share.used.saturating_sub(share.limit / 16 * 13);
        let mut surplus = above.min(held.saturating_sub(part));
        unread.sort_unstable_by_key(|u| u.since);
        unread.retain(|u| {
            let is_chosen = surplus > 0 && now >= u.since + PATIENCE;
            if is_chosen {
                surplus = surplus.saturating_sub(u.storage_bytes);
            }
            is_chosen
        });
        self.at = (surplus > 0).then_some(now + PAUSE);
        unread.into_iter().map(|u| u.id).collect()
    }
}

fn unread(sockets: &Slab<Socket>) -> Vec<Unread> {
    let of = |(id, s): (SlotId, &Socket)| match s {
        Socket::Tcp(entry) => {
            let storage_bytes = entry.tcb.recv_queue_ref().storage_bytes();
            let since = entry.tcb.unread_since();
            (storage_bytes > 0).then_some(Unread { since, id, storage_bytes })
        }
        _ => None,
    };
    sockets.iter().filter_map(of).collect()
}
