//! One wait of a thread: it busy-polls, holds or sleeps until its target is ready, and promotes a follower when it
//! ends.

use std::sync::Arc;

use fulmar_stack::base::{Duration, Instant, SlotId, Stage};
use fulmar_stack::device::moderation::{BusyPoll, Next};
use fulmar_stack::socket::{Ready, SocketError};

use super::{Guard, Host};
use crate::runtime::completion::Completion;
use crate::runtime::leader::Role;
use crate::runtime::poll_set::PollSetCore;
use crate::runtime::reentry::Waiting;
use crate::runtime::sys;
use crate::runtime::waiter::Waiter;
use crate::runtime::watched::WatchedShard;

/// The target of a wait.
pub(super) enum WaitTarget<'a> {
    Socket(SlotId, Ready),
    Set(&'a Arc<PollSetCore>),
    Completion(&'a Completion, Ready),
    /// Everything sent is acknowledged, which wakes no thread: it is checked each [`DRAIN_PERIOD`].
    Acknowledgements,
}

impl WaitTarget<'_> {
    /// The readiness of the target that ends the wait.
    pub(super) fn interest(&self) -> Ready {
        match self {
            WaitTarget::Socket(_, interest) | WaitTarget::Completion(_, interest) => *interest,
            WaitTarget::Set(_) | WaitTarget::Acknowledgements => Ready::NONE,
        }
    }
}

/// Longest busy poll between two checks of the timers, which another thread may have armed meanwhile.
const SPIN_PERIOD: Duration = Duration::from_millis(1);
/// How often a drain checks whether it is done.
const DRAIN_PERIOD: Duration = Duration::from_millis(5);

/// One wait. When it is dropped, also by a panic, a follower becomes leader.
pub(super) struct WaitGuard<'a, 'f> {
    host: &'a Host,
    waiter: Arc<Waiter>,
    target: WaitTarget<'f>,
    is_leader: bool,
    was_panicking: bool,
    _mark: Waiting,
}

impl<'a, 'f> WaitGuard<'a, 'f> {
    /// `WouldBlock` in a signal handler that interrupted a wait of this thread.
    pub(super) fn new(
        host: &'a Host,
        shard: &mut WatchedShard,
        now: Instant,
        target: WaitTarget<'f>,
    ) -> Result<Self, SocketError> {
        let mark = host.bit.start_waiting().ok_or(SocketError::WouldBlock)?;
        shard.moderation().start_waiting(now);
        let waiter = Waiter::of(&mark);
        Ok(WaitGuard {
            host,
            waiter,
            target,
            is_leader: false,
            was_panicking: std::thread::panicking(),
            _mark: mark,
        })
    }

    /// Whether the wait is that of an event loop, of which a turn follows.
    pub(crate) fn is_of_event_loop(&self) -> bool {
        matches!(self.target, WaitTarget::Set(set) if set.begins_turns())
    }

    /// Busy-polls, holds or sleeps once, as the policy says, until the target is ready, frames arrive or `give_up`
    /// is past. May return early.
    pub(super) fn sleep(
        &mut self,
        mut guard: Guard<'a>,
        now: Instant,
        give_up: Option<Instant>,
    ) -> Result<Guard<'a>, SocketError> {
        let give_up = match self.target {
            WaitTarget::Acknowledgements => {
                [give_up, Some(now + DRAIN_PERIOD)].into_iter().flatten().min()
            }
            _ => give_up,
        };
        self.is_leader = self.is_leader || self.host.leader.try_take(Role::Caller);
        let next = match self.is_leader {
            true => {
                // `ModerationConfig::POLLING` polls also on a contended CPU.
                let never_sleeps = guard.moderation().config().min_spin == Duration::MAX;
                let busy_poll = match self.host.spin.may_poll() || never_sleeps {
                    true => BusyPoll::Allowed,
                    false => BusyPoll::Forbidden,
                };
                guard.next_wait(now, busy_poll)
            }
            false => Next::Arm,
        };
        if matches!(next, Next::BusyPoll { .. }) && !self.host.spin.has_peek() {
            // The caller polls again.
            drop(guard);
            return self.spin(now);
        }
        self.waiter.reset();
        self.register(&mut guard);
        if let WaitTarget::Set(set) = self.target
            && set.has_candidates()
        {
            // A member in another shard became ready meanwhile: its lock is another one.
            self.unregister(&mut guard);
            return Ok(guard);
        }
        let mut guard = match next {
            _ if !self.is_leader => self.park(guard, give_up)?,
            Next::BusyPoll { until } => {
                self.busy_poll(guard, until.min(now + SPIN_PERIOD), give_up)?
            }
            Next::Hold { until } => self.on_device(guard, give_up, Some(until))?,
            Next::Arm => self.on_device(guard, give_up, None)?,
        };
        self.unregister(&mut guard);
        Ok(guard)
    }

    fn on_device(
        &self,
        guard: Guard<'a>,
        give_up: Option<Instant>,
        hold: Option<Instant>,
    ) -> Result<Guard<'a>, SocketError> {
        self.host.sleep_on_device(guard, Role::Caller, &self.waiter, give_up, hold)
    }

    /// Busy-polls the device without the lock.
    fn busy_poll(
        &self,
        guard: Guard<'a>,
        until: Instant,
        give_up: Option<Instant>,
    ) -> Result<Guard<'a>, SocketError> {
        let ends = [guard.next_deadline(), give_up, Some(until)];
        drop(guard);
        self.spin(ends.into_iter().flatten().min().unwrap_or(until))
    }

    fn spin(&self, until: Instant) -> Result<Guard<'a>, SocketError> {
        let others_ran = self.host.spin.run(&self.waiter, until);
        self.host.pass(Stage::Spun);
        let mut guard = self.host.lock()?;
        guard.moderation().yielded(others_ran);
        Ok(guard)
    }

    fn register(&self, shard: &mut WatchedShard) {
        match self.target {
            WaitTarget::Socket(id, interest) => shard.watch_thread(id, &self.waiter, interest),
            WaitTarget::Set(set) => set.add_sleeper(&self.waiter),
            WaitTarget::Completion(c, _) => c.add_sleeper(&self.waiter),
            WaitTarget::Acknowledgements => {}
        }
    }

    fn unregister(&self, shard: &mut WatchedShard) {
        match self.target {
            WaitTarget::Socket(id, _) => shard.unwatch_thread(id, &self.waiter),
            WaitTarget::Set(set) => set.remove_sleeper(&self.waiter),
            WaitTarget::Completion(c, _) => c.remove_sleeper(&self.waiter),
            WaitTarget::Acknowledgements => {}
        }
    }

    fn park(&self, guard: Guard<'a>, give_up: Option<Instant>) -> Result<Guard<'a>, SocketError> {
        self.host.leader.add_follower(&self.waiter);
        drop(guard);
        // The leader may have left between the failed attempt and the registration.
        if self.host.leader.is_led() {
            let left = give_up.map(|at| at.since(sys::now()));
            let patience = self.host.leader.has_driver().then_some(super::drive::PATIENCE);
            self.waiter.park(left.into_iter().chain(patience).min());
        }
        self.host.pass(Stage::Slept);
        // Under the lock, so that the thread counts as inside: a signal handler must not find the list's lock
        // taken by its own thread.
        let guard = self.host.lock()?;
        self.host.leader.remove_follower(&self.waiter);
        Ok(guard)
    }
}

impl Drop for WaitGuard<'_, '_> {
    fn drop(&mut self) {
        // Waking another thread takes locks that a signal handler must not meet.
        let _mark = self.host.bit.enter();
        if std::thread::panicking() && !self.was_panicking {
            // The waiter is still registered.
            self.host.fail();
        }
        if self.is_leader {
            self.host.leader.resign(Role::Caller);
        }
        self.host.promote_follower();
    }
}
