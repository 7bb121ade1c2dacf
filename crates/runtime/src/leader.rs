//! The poll baton of a shard: who polls the device for all, and how the sleeper is woken.
//!
//! ```text
//!            take                 take (steal)
//!   FREE ───────────► CALLER ◄──────────────── SERVICE
//!    ▲                  │                         ▲
//!    └───── leave ──────┘        stand in         │
//!    └────────────────────────────────────────────┘
//! ```
//!
//! A caller steals the baton from the service thread without waking it: at the next frame the
//! service thread wakes once in vain, sees that it has lost the baton and stays away. If it sleeps
//! still when the last caller leaves, it is kicked: it may have slept through a deadline.

use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::{Arc, PoisonError};

use fulmar_base::Instant;

use crate::sync::{AtomicU8, AtomicU64, Mutex, MutexGuard, Ordering};
use crate::sys;
use crate::waiter::Waiter;

/// Who may hold the baton.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Role {
    /// A thread in a blocking call.
    Caller = 1,
    /// The service thread.
    Service = 2,
}

const FREE: u8 = 0;

/// The baton, and the threads that sleep without it.
pub struct Baton {
    holder: AtomicU8,
    /// Wake the sleeper of each role. Two, so that one never swallows the other's wake-up.
    kicks: [OwnedFd; 2],
    /// End the holds and the sleeps of each role.
    timers: [OwnedFd; 2],
    /// For when they are set, in nanoseconds; written by whoever sleeps in that role.
    timers_at: [AtomicU64; 2],
    /// When the sleeper of each role wakes by itself, in nanoseconds; 0 if it does not sleep.
    sleeps_until: [AtomicU64; 2],
    followers: Mutex<Vec<Arc<Waiter>>>,
}

impl Baton {
    /// A free baton.
    ///
    /// # Errors
    /// The errno of `eventfd` or `timerfd_create`.
    pub fn new() -> std::io::Result<Baton> {
        Ok(Baton {
            holder: AtomicU8::new(FREE),
            kicks: [sys::event_fd()?, sys::event_fd()?],
            timers: [sys::timer_fd()?, sys::timer_fd()?],
            timers_at: [AtomicU64::new(0), AtomicU64::new(0)],
            sleeps_until: [AtomicU64::new(0), AtomicU64::new(0)],
            followers: Mutex::new(Vec::new()),
        })
    }

    /// Takes the baton. A caller gets it unless another caller has it; the service thread only if
    /// it is free.
    pub fn try_take(&self, role: Role) -> bool {
        let swap = |from| {
            self.holder
                .compare_exchange(from, role as u8, Ordering::SeqCst, Ordering::SeqCst)
                .is_ok()
        };
        swap(FREE) || (role == Role::Caller && swap(Role::Service as u8))
    }

    /// Whether a thread of this role has it.
    pub fn is_held_by(&self, role: Role) -> bool {
        self.holder.load(Ordering::SeqCst) == role as u8
    }

    /// Gives it up, if it was not stolen.
    pub fn leave(&self, role: Role) {
        let _ = self.holder.compare_exchange(role as u8, FREE, Ordering::SeqCst, Ordering::SeqCst);
    }

    /// Wakes a thread that sleeps without the baton, so that it takes it. False if there is none.
    pub fn wake_follower(&self) -> bool {
        let next = self.followers().pop();
        next.is_some_and(|w| {
            w.wake();
            true
        })
    }

    /// Wakes every thread that sleeps, with or without it, and those that are about to.
    pub fn wake_all(&self) {
        while self.wake_follower() {}
        self.kicks.iter().for_each(|kick| sys::signal_event(kick.as_raw_fd()));
    }

    /// Enters the list of those who may be given the baton.
    pub fn follow(&self, w: &Arc<Waiter>) {
        self.followers().push(Arc::clone(w));
    }

    /// Leaves that list.
    pub fn unfollow(&self, w: &Arc<Waiter>) {
        self.followers().retain(|f| !Arc::ptr_eq(f, w));
    }

    /// The descriptor beside which a holder of this role sleeps.
    pub fn kick_fd(&self, role: Role) -> RawFd {
        self.kicks[slot(role)].as_raw_fd()
    }

    /// A descriptor that becomes readable then, for a holder of this role.
    pub fn timer_at(&self, role: Role, at: Instant) -> RawFd {
        let fd = self.timers[slot(role)].as_raw_fd();
        self.timers_at[slot(role)].store(at.as_nanos(), Ordering::Relaxed);
        sys::set_timer(fd, at);
        fd
    }

    /// A descriptor that becomes readable then at the latest, for a holder of this role: as it is, if it
    /// is set for a time between `now` and then.
    pub fn timer_by(&self, role: Role, now: Instant, at: Instant) -> RawFd {
        let is_set_for = self.timers_at[slot(role)].load(Ordering::Relaxed);
        if is_set_for > now.as_nanos() && is_set_for <= at.as_nanos() {
            return self.timers[slot(role)].as_raw_fd();
        }
        self.timer_at(role, at)
    }

    /// A holder of this role will sleep until then.
    pub fn will_sleep(&self, role: Role, until: Instant) {
        self.sleeps_until[slot(role)].store(until.as_nanos().max(1), Ordering::SeqCst);
    }

    /// It no longer sleeps. A kick that was not seen stays, and ends the next sleep at once.
    pub fn awake(&self, role: Role, was_kicked: bool) {
        self.sleeps_until[slot(role)].store(0, Ordering::SeqCst);
        if was_kicked {
            sys::clear_event(self.kick_fd(role));
        }
    }

    /// How to wake a thread of this role, if one sleeps on the device, with or without the baton.
    pub fn sleeping(&self, role: Role) -> Option<RawFd> {
        let sleeps = self.sleeps_until[slot(role)].load(Ordering::SeqCst) != 0;
        sleeps.then(|| self.kick_fd(role))
    }

    /// The sleeper that must be told of a deadline earlier than `until`, if anybody sleeps.
    #[inline]
    pub fn sleeper(&self) -> Option<(RawFd, Instant)> {
        let role = match self.holder.load(Ordering::Acquire) {
            FREE => return None,
            1 => Role::Caller,
            _ => Role::Service,
        };
        let until = self.sleeps_until[slot(role)].load(Ordering::Acquire);
        (until != 0).then(|| (self.kick_fd(role), Instant::from_nanos(until)))
    }

    /// Wakes whoever sleeps as a holder of the baton, from anywhere; a thread that is awake does not sleep
    /// the next time. For memory that comes home while a writer waits for it.
    pub fn kick(&self) -> std::io::Result<impl fulmar_mbuf::Kick> {
        let [caller, service] = &self.kicks;
        Ok(BatonKick([caller.try_clone()?, service.try_clone()?]))
    }

    fn followers(&self) -> MutexGuard<'_, Vec<Arc<Waiter>>> {
        self.followers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Descriptors of its own, since it may outlive the baton.
struct BatonKick([OwnedFd; 2]);

impl fulmar_mbuf::Kick for BatonKick {
    fn kick(&self) {
        self.0.iter().for_each(|fd| sys::signal_event(fd.as_raw_fd()));
    }
}

fn slot(role: Role) -> usize {
    match role {
        Role::Caller => 0,
        Role::Service => 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_caller_steals_from_the_service_thread_but_not_from_a_caller() {
        let b = Baton::new().unwrap();
        assert!(b.try_take(Role::Service));
        assert!(!b.try_take(Role::Service));
        assert!(b.try_take(Role::Caller));
        assert!(!b.try_take(Role::Caller));
        b.leave(Role::Service);
        assert!(b.is_held_by(Role::Caller));
        b.leave(Role::Caller);
        assert!(b.try_take(Role::Service));
    }

    #[test]
    fn only_the_holder_that_sleeps_is_told_of_deadlines() {
        let b = Baton::new().unwrap();
        assert!(b.try_take(Role::Service));
        b.will_sleep(Role::Service, Instant::from_millis(5));
        assert_eq!(b.sleeper(), Some((b.kick_fd(Role::Service), Instant::from_millis(5))));
        assert!(b.try_take(Role::Caller));
        assert_eq!(b.sleeper(), None);
    }
}
