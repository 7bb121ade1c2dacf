//! Leader and followers of a shard: at most one thread polls the device for all, the others sleep.
//!
//! ```text
//!            try_take              try_take
//!   NONE ───────────► CALLER ◄──────────────── SERVICE
//!    ▲                  │                        ▲ │
//!    │      resign      │        try_take        │ │
//!    ├──────────────────┘ ┌──────────────────────┘ │
//!    └────────────────────┴────────── resign ──────┘
//! ```
//!
//! A driver ([`Role::Driver`]) runs the stack in the thread of the program's event loop, and sleeps where that sleeps. No
//! other thread takes the lead while it lives. A caller that leads already keeps the lead to its end.
//!
//! A caller takes the lead from the service thread without waking it. The next frame wakes the service thread once
//! more; it has lost the lead and backs off. If it still sleeps when the last caller returns, it is kicked, because
//! a deadline may have passed.
//!
//! The pattern's name: Schmidt et al., Leader/Followers (PLoP 2000).

use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::{Arc, PoisonError};

use fulmar_stack::base::Instant;

use crate::runtime::sync::{AtomicBool, AtomicU8, AtomicU64, Mutex, MutexGuard, Ordering};
use crate::runtime::sys;
use crate::runtime::waiter::Waiter;

/// The role of a leader.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(crate) enum Role {
    /// A thread in a blocking call.
    Caller = 1,
    /// The service thread.
    Service = 2,
    /// The driver of a program. It uses the kick and the timer of callers, since no caller takes the lead meanwhile.
    Driver = 3,
}

const NONE: u8 = 0;

/// The leader of a shard, how it is woken, and its followers.
pub(crate) struct Leader {
    role: AtomicU8,
    /// A program drives the shard.
    has_driver: AtomicBool,
    /// Eventfds that wake the sleeper of each role. Two, so that neither consumes the other's wake-up.
    kicks: [OwnedFd; 2],
    /// Timers that end the holds and the sleeps of each role.
    timers: [OwnedFd; 2],
    /// When the timers expire, in nanoseconds; written by the sleeper of that role.
    timers_at: [AtomicU64; 2],
    /// When the sleeper of each role wakes by itself, in nanoseconds; 0 if it does not sleep.
    sleeps_until: [AtomicU64; 2],
    followers: Mutex<Vec<Arc<Waiter>>>,
}

impl Leader {
    /// No leader.
    ///
    /// # Errors
    /// The errno of `eventfd` or `timerfd_create`.
    pub(crate) fn new() -> std::io::Result<Leader> {
        Ok(Leader {
            role: AtomicU8::new(NONE),
            has_driver: AtomicBool::new(false),
            kicks: [sys::event_fd()?, sys::event_fd()?],
            timers: [sys::timer_fd()?, sys::timer_fd()?],
            timers_at: [AtomicU64::new(0), AtomicU64::new(0)],
            sleeps_until: [AtomicU64::new(0), AtomicU64::new(0)],
            followers: Mutex::new(Vec::new()),
        })
    }

    /// Takes the lead. A caller and the driver get it unless a caller leads, or beside a driver; the service thread only
    /// if there is no leader.
    pub(crate) fn try_take(&self, role: Role) -> bool {
        let swap = |from| {
            self.role.compare_exchange(from, role as u8, Ordering::SeqCst, Ordering::SeqCst).is_ok()
        };
        let may = role == Role::Driver || !self.has_driver();
        may && (swap(NONE) || (role != Role::Service && swap(Role::Service as u8)))
    }

    /// The service thread takes the lead in the place of a driver that is stuck, which takes it back with its next turn.
    /// False: a caller leads.
    pub(crate) fn stand_in(&self) -> bool {
        let swap = |from| {
            let to = Role::Service as u8;
            self.role.compare_exchange(from, to, Ordering::SeqCst, Ordering::SeqCst).is_ok()
        };
        swap(NONE) || swap(Role::Driver as u8)
    }

    /// A driver comes; false: there is one.
    pub(crate) fn add_driver(&self) -> bool {
        !self.has_driver.swap(true, Ordering::SeqCst)
    }

    /// The driver is gone.
    pub(crate) fn remove_driver(&self) {
        self.has_driver.store(false, Ordering::SeqCst);
        self.awake(Role::Driver);
        self.resign(Role::Driver);
    }

    /// Whether a program drives the shard.
    pub(crate) fn has_driver(&self) -> bool {
        self.has_driver.load(Ordering::SeqCst)
    }

    /// Whether the service thread has nothing to do: a caller or a driver runs the stack.
    pub(crate) fn is_led(&self) -> bool {
        self.is_held_by(Role::Caller) || self.has_driver()
    }

    /// Whether a thread of this role leads.
    pub(crate) fn is_held_by(&self, role: Role) -> bool {
        self.role.load(Ordering::SeqCst) == role as u8
    }

    /// Gives up the lead, if no caller has taken it.
    pub(crate) fn resign(&self, role: Role) {
        let _ = self.role.compare_exchange(role as u8, NONE, Ordering::SeqCst, Ordering::SeqCst);
    }

    /// Wakes a follower, which takes the lead. False if there is none.
    pub(crate) fn wake_follower(&self) -> bool {
        let next = self.followers().pop();
        next.is_some_and(|w| {
            w.wake();
            true
        })
    }

    /// Wakes the leader and all followers, and those about to sleep.
    pub(crate) fn wake_all(&self) {
        while self.wake_follower() {}
        self.kicks.iter().for_each(|kick| sys::signal_event(kick.as_raw_fd()));
    }

    /// Adds a follower.
    pub(crate) fn add_follower(&self, w: &Arc<Waiter>) {
        self.followers().push(Arc::clone(w));
    }

    /// Removes a follower.
    pub(crate) fn remove_follower(&self, w: &Arc<Waiter>) {
        self.followers().retain(|f| !Arc::ptr_eq(f, w));
    }

    /// The eventfd that wakes a sleeper of this role.
    pub(crate) fn kick_fd(&self, role: Role) -> RawFd {
        self.kicks[slot(role)].as_raw_fd()
    }

    /// The timer of this role.
    pub(crate) fn timer_fd(&self, role: Role) -> RawFd {
        self.timers[slot(role)].as_raw_fd()
    }

    /// The timer of this role, set to expire at `at`.
    pub(crate) fn timer_at(&self, role: Role, at: Instant) -> RawFd {
        let fd = self.timers[slot(role)].as_raw_fd();
        self.timers_at[slot(role)].store(at.as_nanos(), Ordering::Relaxed);
        sys::set_timer(fd, at);
        fd
    }

    /// The timer of this role, set to expire at `at` at the latest: left alone if it expires between `now` and
    /// `at`.
    pub(crate) fn timer_by(&self, role: Role, now: Instant, at: Instant) -> RawFd {
        let is_set_for = self.timers_at[slot(role)].load(Ordering::Relaxed);
        if is_set_for > now.as_nanos() && is_set_for <= at.as_nanos() {
            return self.timers[slot(role)].as_raw_fd();
        }
        self.timer_at(role, at)
    }

    /// The thread of this role will sleep until then.
    pub(crate) fn will_sleep(&self, role: Role, until: Instant) {
        self.sleeps_until[slot(role)].store(until.as_nanos().max(1), Ordering::SeqCst);
    }

    /// It no longer sleeps. A kick that it has not seen stays, and ends the next sleep.
    pub(crate) fn awake(&self, role: Role) {
        self.sleeps_until[slot(role)].store(0, Ordering::SeqCst);
    }

    /// The kick that has ended a sleep is consumed.
    pub(crate) fn clear_kick(&self, role: Role) {
        sys::clear_event(self.kick_fd(role));
    }

    /// The eventfd of a thread of this role that sleeps on the device, leader or not.
    pub(crate) fn sleeping(&self, role: Role) -> Option<RawFd> {
        let sleeps = self.sleeps_until[slot(role)].load(Ordering::SeqCst) != 0;
        sleeps.then(|| self.kick_fd(role))
    }

    /// The leader's eventfd and the end of its sleep, if it sleeps.
    #[inline]
    pub(crate) fn sleeper(&self) -> Option<(RawFd, Instant)> {
        let role = match self.role.load(Ordering::Acquire) {
            NONE => return None,
            2 => Role::Service,
            _ => Role::Caller,
        };
        let until = self.sleeps_until[slot(role)].load(Ordering::Acquire);
        (until != 0).then(|| (self.kick_fd(role), Instant::from_nanos(until)))
    }

    /// Wakes the sleepers of both roles, from any thread; one that is awake skips its next sleep. For memory that is
    /// freed while a writer waits for it.
    pub(crate) fn kick(&self) -> std::io::Result<impl fulmar_stack::mbuf::Kick> {
        let [caller, service] = &self.kicks;
        Ok(LeaderKick([caller.try_clone()?, service.try_clone()?]))
    }

    fn followers(&self) -> MutexGuard<'_, Vec<Arc<Waiter>>> {
        self.followers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Its own descriptors, because it may outlive the leader.
struct LeaderKick([OwnedFd; 2]);

impl fulmar_stack::mbuf::Kick for LeaderKick {
    fn kick(&self) {
        self.0.iter().for_each(|fd| sys::signal_event(fd.as_raw_fd()));
    }
}

fn slot(role: Role) -> usize {
    match role {
        Role::Caller | Role::Driver => 0,
        Role::Service => 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_caller_takes_the_lead_from_the_service_thread_but_not_from_a_caller() {
        let b = Leader::new().unwrap();
        assert!(b.try_take(Role::Service));
        assert!(!b.try_take(Role::Service));
        assert!(b.try_take(Role::Caller));
        assert!(!b.try_take(Role::Caller));
        b.resign(Role::Service);
        assert!(b.is_held_by(Role::Caller));
        b.resign(Role::Caller);
        assert!(b.try_take(Role::Service));
    }

    #[test]
    fn beside_a_driver_nobody_takes_the_lead_and_a_caller_keeps_it_to_its_end() {
        let b = Leader::new().unwrap();
        assert!(b.try_take(Role::Caller) && b.add_driver() && !b.add_driver());
        assert!(!b.try_take(Role::Driver) && b.is_led());
        b.resign(Role::Caller);
        assert!(!b.try_take(Role::Caller) && !b.try_take(Role::Service) && b.is_led());
        assert!(b.try_take(Role::Driver));
        b.remove_driver();
        assert!(!b.is_led() && b.try_take(Role::Service) && b.add_driver());
        assert!(b.try_take(Role::Driver), "from the service thread");
        assert!(b.stand_in() && b.is_held_by(Role::Service));
        assert!(b.try_take(Role::Driver), "back with the next turn");
    }

    #[test]
    fn only_a_sleeping_leader_is_notified_of_deadlines() {
        let b = Leader::new().unwrap();
        assert!(b.try_take(Role::Service));
        b.will_sleep(Role::Service, Instant::from_millis(5));
        assert_eq!(b.sleeper(), Some((b.kick_fd(Role::Service), Instant::from_millis(5))));
        assert!(b.try_take(Role::Caller));
        assert_eq!(b.sleeper(), None);
    }
}
