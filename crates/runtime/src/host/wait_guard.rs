//! A thread that has to wait: how it polls, looks, holds or sleeps until its socket is ready, and what it
//! leaves behind for the others.

use std::sync::Arc;

use fulmar_base::{Duration, Instant, Outside, Probe, SlotId, Stage};
use fulmar_netdev::moderation::Next;
use fulmar_socket::{Ready, SocketError};

use super::{Guard, Host};
use crate::completion::Completion;
use crate::leader::Role;
use crate::poll_set::PollSetCore;
use crate::reentry::Waiting;
use crate::sys;
use crate::waiter::Waiter;
use crate::watched::WatchedShard;

/// What a thread waits for.
pub(super) enum For<'a> {
    Socket(SlotId, Ready),
    Set(&'a Arc<PollSetCore>),
    Completion(&'a Completion),
    Time,
}

/// One thread's turn of waiting; passes the baton on when it ends, however it ends.
pub(super) struct Turn<'a, 'f, P: Probe> {
    host: &'a Host<P>,
    waiter: Arc<Waiter>,
    waits_for: For<'f>,
    has_baton: bool,
    /// The last wait was a breath between two polls.
    has_breathed: bool,
    was_panicking: bool,
    _mark: Waiting,
}

impl<'a, 'f, P: Probe> Turn<'a, 'f, P> {
    /// `WouldBlock` in a signal handler that interrupted a wait of this thread.
    pub fn new(
        host: &'a Host<P>,
        shard: &mut WatchedShard<P>,
        now: Instant,
        waits_for: For<'f>,
    ) -> Result<Self, SocketError> {
        let mark = host.bit.start_waiting().ok_or(SocketError::WouldBlock)?;
        shard.moderation().start_waiting(now);
        let waiter = Waiter::current();
        Ok(Turn {
            host,
            waiter,
            waits_for,
            has_baton: false,
            has_breathed: false,
            was_panicking: std::thread::panicking(),
            _mark: mark,
        })
    }

    /// The poll after the last wait brought so many frames.
    pub fn polled(&self, frames: usize) {
        if self.has_breathed {
            self.host.spin.polled(frames > 0);
        }
    }

    /// Waits once, in the way that the policy says: looks, holds or sleeps. Readiness, the device or
    /// the end of `give_up` ends it. May return early.
    pub fn sleep(
        &mut self,
        mut guard: Guard<'a, P>,
        now: Instant,
        give_up: Option<Instant>,
    ) -> Result<Guard<'a, P>, SocketError> {
        self.has_baton = self.has_baton || self.host.baton.try_take(Role::Caller);
        let next = match self.has_baton {
            true => {
                // Whoever was told never to sleep looks, whoever else may want the CPU.
                let never_sleeps = guard.moderation().config().min_spin == Duration::MAX;
                let may_look = self.host.spin.may_look() || never_sleeps;
                guard.next_wait(now, may_look)
            }
            false => Next::Arm,
        };
        self.has_breathed = matches!(next, Next::Look { .. }) && !self.host.spin.has_peek();
        if self.has_breathed {
            drop(guard);
            return self.spin(now);
        }
        self.waiter.reset();
        self.register(&mut guard);
        if let For::Set(set) = self.waits_for
            && set.has_candidates()
        {
            // A socket of another shard, whose lock is not ours, has become ready meanwhile.
            self.unregister(&mut guard);
            return Ok(guard);
        }
        let mut guard = match next {
            _ if !self.has_baton => self.park(guard, give_up)?,
            Next::Look { until } => self.look(guard, until, give_up)?,
            Next::Hold { until } => self.on_device(guard, give_up, Some(until))?,
            Next::Arm => self.on_device(guard, give_up, None)?,
        };
        self.unregister(&mut guard);
        Ok(guard)
    }

    fn on_device(
        &self,
        guard: Guard<'a, P>,
        give_up: Option<Instant>,
        hold: Option<Instant>,
    ) -> Result<Guard<'a, P>, SocketError> {
        self.host.sleep_on_device(guard, Role::Caller, &self.waiter, give_up, hold)
    }

    /// Looks at the device without the lock.
    fn look(
        &self,
        guard: Guard<'a, P>,
        until: Instant,
        give_up: Option<Instant>,
    ) -> Result<Guard<'a, P>, SocketError> {
        let ends = [guard.next_deadline(), give_up, Some(until)];
        drop(guard);
        self.spin(ends.into_iter().flatten().min().unwrap_or(until))
    }

    fn spin(&self, until: Instant) -> Result<Guard<'a, P>, SocketError> {
        let others_ran = self.host.spin.run(&self.waiter, until);
        let _ = self.host.outside.stage(Stage::Spun);
        let mut guard = self.host.lock()?;
        guard.moderation().yielded(others_ran);
        Ok(guard)
    }

    fn register(&self, shard: &mut WatchedShard<P>) {
        match self.waits_for {
            For::Socket(id, interest) => shard.watch_thread(id, &self.waiter, interest),
            For::Set(set) => set.add_sleeper(&self.waiter),
            For::Completion(c) => c.add_sleeper(&self.waiter),
            For::Time => {}
        }
    }

    fn unregister(&self, shard: &mut WatchedShard<P>) {
        match self.waits_for {
            For::Socket(id, _) => shard.unwatch_thread(id, &self.waiter),
            For::Set(set) => set.remove_sleeper(&self.waiter),
            For::Completion(c) => c.remove_sleeper(&self.waiter),
            For::Time => {}
        }
    }

    fn park(
        &self,
        guard: Guard<'a, P>,
        give_up: Option<Instant>,
    ) -> Result<Guard<'a, P>, SocketError> {
        self.host.baton.follow(&self.waiter);
        drop(guard);
        // The baton may have been left free between the failed attempt and the registration.
        if self.host.baton.is_held_by(Role::Caller) {
            self.waiter.park(give_up.map(|at| at.since(sys::now())));
        }
        let _ = self.host.outside.stage(Stage::Slept);
        // Inside again, since a signal handler must not find the list's lock taken by its own thread:
        // it may wait for the shard's lock, whose holder may wait for the list.
        let guard = self.host.lock()?;
        self.host.baton.unfollow(&self.waiter);
        Ok(guard)
    }
}

impl<P: Probe> Drop for Turn<'_, '_, P> {
    fn drop(&mut self) {
        // The wake-up of another thread takes locks that a signal handler must not meet.
        let _mark = self.host.bit.enter();
        if std::thread::panicking() && !self.was_panicking {
            // It is still on the lists of those who wait.
            self.host.fail();
        }
        if self.has_baton {
            self.host.baton.leave(Role::Caller);
        }
        self.host.pass_baton();
    }
}
