//! Shared bytes on their way home. Whoever drops the last reference to them elsewhere (a reader on
//! another stack, a device) tells nobody, so while some are out the shard looks for them now and
//! then; and their owners are let go after the lock is released.

use std::sync::Arc;

use fulmar_base::{Duration, Instant, Probe};
use fulmar_mbuf::SharedBytes;

use crate::shard::Shard;

/// The first look after something has moved, well below what a person notices, and the longest pause
/// between two looks: then nothing has moved for so long that an idle stack should stay idle.
const FIRST_LOOK: Duration = Duration::from_millis(5);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

/// Owners that a guard lets go; rarely many, so that they need no heap.
pub type Returned = smallvec::SmallVec<[Arc<dyn SharedBytes>; 4]>;

/// When to look next.
#[derive(Default)]
pub struct Returns {
    look_at: Option<Instant>,
    pause: Duration,
    /// Parts that were out at the last look.
    out: usize,
}

impl Returns {
    /// When to look at the latest, if anything is out.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.look_at
    }
}

impl<P: Probe> Shard<P> {
    /// To be called after the remote-free list was drained.
    #[inline]
    pub(crate) fn plan_look(&mut self, now: Instant) {
        let out = self.net.pool.shared_parts();
        if out > 0 || self.returns.look_at.is_some() {
            self.plan_next_look(now, out);
        }
    }

    #[inline(never)]
    fn plan_next_look(&mut self, now: Instant, out: usize) {
        let r = &mut self.returns;
        if out == 0 {
            *r = Returns::default();
        } else if out != r.out {
            *r = Returns { look_at: Some(now + FIRST_LOOK), pause: FIRST_LOOK, out };
        } else if r.look_at.is_none_or(|at| now >= at) {
            r.pause = (r.pause + r.pause).min(LONGEST_PAUSE);
            r.look_at = Some(now + r.pause);
        }
    }

    /// The owners of shared bytes that have come home, to be dropped once the lock is released.
    pub fn take_returned(&mut self, into: &mut Returned) {
        while let Some(owner) = self.net.pool.pop_returned() {
            into.push(owner);
        }
    }
}
