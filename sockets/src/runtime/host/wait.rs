//! Waiting: a step of a socket is repeated until it is done, and the thread runs the stack meanwhile.
//!
//! ```text
//!   call: the step ──done──► return
//!           │ would wait
//!           ▼
//!   poll the device, the step again ──done──► return
//!           │ would wait
//!           ▼
//!   wait_until: WaitGuard::sleep ─► poll ─► the step ──done──► return
//!                     ▲                        │ would wait
//!                     └────────────────────────┘
//! ```

use std::sync::Arc;
use std::task::Poll;

use fulmar_stack::base::{Duration, Instant, SlotId, Stage};
use fulmar_stack::socket::{Ready, SocketError};

use super::wait_guard::{WaitGuard, WaitTarget};
use super::{Clock, Guard, Host, POLL_BUDGET};
use crate::runtime::completion::Completion;
use crate::runtime::limit::Limit;
use crate::runtime::poll_set::PollSetCore;
use crate::runtime::sys;
use crate::runtime::watched::WatchedShard;

impl Host {
    /// Repeats a step until it is done, and sleeps in between.
    ///
    /// # Errors
    /// The step's own; [`SocketError::WouldBlock`] when `limit` allows no waiting or is over.
    pub fn wait<R>(
        &self,
        socket: SlotId,
        interest: Ready,
        limit: Limit,
        step: impl FnMut(&mut WatchedShard, Instant) -> Result<Poll<R>, SocketError>,
    ) -> Result<R, SocketError> {
        self.wait_for(WaitTarget::Socket(socket, interest), || limit, Clock::Exact, step)
    }

    /// As [`Host::wait`], with a coarse clock: the step may see a time that is a few milliseconds old, of the
    /// service thread's last tick or of the kernel's. Devices that need the exact time of a crossing get it.
    /// `limit` is evaluated when the step has to wait.
    ///
    /// # Errors
    /// As [`Host::wait`].
    #[inline]
    pub(crate) fn wait_coarse<R>(
        &self,
        socket: SlotId,
        interest: Ready,
        limit: impl FnOnce() -> Limit,
        step: impl FnMut(&mut WatchedShard, Instant) -> Result<Poll<R>, SocketError>,
    ) -> Result<R, SocketError> {
        let clock = if self.takes_coarse_time { Clock::Coarse } else { Clock::Exact };
        self.wait_for(WaitTarget::Socket(socket, interest), limit, clock, step)
    }

    #[inline]
    pub(super) fn wait_for<R>(
        &self,
        target: WaitTarget<'_>,
        limit: impl FnOnce() -> Limit,
        clock: Clock,
        mut step: impl FnMut(&mut WatchedShard, Instant) -> Result<Poll<R>, SocketError>,
    ) -> Result<R, SocketError> {
        match self.call_at(clock, &mut step)? {
            Poll::Ready(r) => Ok(r),
            _ => self.wait_slow(target, limit(), step),
        }
    }

    /// The step has to wait: polls the device and repeats the step, then sleeps.
    #[inline(never)]
    fn wait_slow<R>(
        &self,
        target: WaitTarget<'_>,
        limit: Limit,
        mut step: impl FnMut(&mut WatchedShard, Instant) -> Result<Poll<R>, SocketError>,
    ) -> Result<R, SocketError> {
        let mut guard = self.lock()?;
        let now = sys::now();
        guard.pass(Stage::Locked);
        let end = limit.end(now);
        if end.is_none() && guard.is_in_turn(now) {
            return Err(SocketError::WouldBlock);
        }
        // Callers that cannot wait run the stack too; else no thread might.
        advance(&mut guard, now, target.interest());
        if let Poll::Ready(r) = step(&mut guard, now)? {
            return Ok(r);
        }
        let give_up = end.ok_or(SocketError::WouldBlock)?;
        let done = self.wait_until(guard, now, target, give_up, step)?;
        done.ok_or(SocketError::WouldBlock)
    }

    /// The loop of every wait: sleeps, polls, and repeats the step until it is done. `None`: `give_up` is past.
    #[inline(never)]
    pub(super) fn wait_until<'a, R>(
        &'a self,
        mut guard: Guard<'a>,
        mut now: Instant,
        target: WaitTarget<'_>,
        give_up: Option<Instant>,
        mut step: impl FnMut(&mut WatchedShard, Instant) -> Result<Poll<R>, SocketError>,
    ) -> Result<Option<R>, SocketError> {
        let interest = target.interest();
        let mut wait = WaitGuard::new(self, &mut guard, now, target)?;
        loop {
            guard = wait.sleep(guard, now, give_up)?;
            now = sys::now();
            guard.pass(Stage::Locked);
            match wait.is_of_event_loop() {
                true => drop(guard.next_turn(now, POLL_BUDGET)),
                false => advance(&mut guard, now, interest),
            }
            if let Poll::Ready(r) = step(&mut guard, now)? {
                return Ok(Some(r));
            }
            if give_up.is_some_and(|at| now >= at) {
                return Ok(None);
            }
        }
    }

    /// Waits until `collect` finds ready members of a poll set; returns how many. 0: the time is over. A call that may
    /// wait begins a turn of the set's event loop (`turn.rs`).
    ///
    /// # Errors
    /// As [`Host::lock`]; [`SocketError::WouldBlock`] if a signal handler would have to wait.
    pub(crate) fn wait_set(
        &self,
        set: &Arc<PollSetCore>,
        limit: Limit,
        mut collect: impl FnMut(&mut WatchedShard) -> usize,
    ) -> Result<usize, SocketError> {
        let mut guard = self.lock()?;
        let now = sys::now();
        let end = limit.end(now);
        let is_event_loop = end.is_some() && set.begins_turns();
        match is_event_loop {
            true => guard.next_turn(now, POLL_BUDGET),
            false => guard.step(now, POLL_BUDGET),
        };
        let mut collect = |shard: &mut WatchedShard, now| match collect(shard) {
            0 => {
                // A thread that goes to sleep leaves nothing unsent.
                shard.end_turn(now);
                None
            }
            found => Some(found),
        };
        let found = collect(&mut guard, now);
        let (None, Some(give_up)) = (found, end) else { return Ok(found.unwrap_or(0)) };
        let found = self.wait_until(guard, now, WaitTarget::Set(set), give_up, |shard, now| {
            Ok(collect(shard, now).map_or(Poll::Pending, Poll::Ready))
        });
        Ok(found?.unwrap_or(0))
    }

    /// Waits until `c` is done, and runs the stack meanwhile. False: the time is over.
    ///
    /// # Errors
    /// As [`Host::wait_set`]; [`SocketError::NetworkDown`] or [`SocketError::Protocol`] if the device is gone:
    /// what is pending will only end when the socket is closed.
    pub(crate) fn wait_completion(
        &self,
        c: &Completion,
        limit: Limit,
    ) -> Result<bool, SocketError> {
        if c.is_done() {
            return Ok(true);
        }
        let mut guard = self.lock()?;
        let now = sys::now();
        guard.step(now, POLL_BUDGET);
        let Some(give_up) = limit.end(now) else {
            // A completion is done outside of the lock.
            drop(guard);
            return Ok(c.is_done());
        };
        let target = WaitTarget::Completion(c, Ready::NONE);
        let is_done = |shard: &mut WatchedShard, _| match (c.is_done(), shard.down()) {
            (true, _) => Ok(Poll::Ready(())),
            (false, Some(e)) => Err(e),
            (false, None) => Ok(Poll::Pending),
        };
        // A loss of the device wakes only threads that wait already.
        if let Poll::Ready(()) = is_done(&mut guard, now)? {
            return Ok(true);
        }
        Ok(self.wait_until(guard, now, target, give_up, is_done)?.is_some())
    }

    /// Waits until everything that was accepted for sending is acknowledged, and for the whole stack until the device
    /// holds back no frame: a reset is not acknowledged. True if so.
    pub fn drain(&self, socket: Option<SlotId>, limit: Duration) -> bool {
        self.in_destructor(|| self.try_drain(socket, limit).unwrap_or(false))
    }

    fn try_drain(&self, socket: Option<SlotId>, limit: Duration) -> Result<bool, SocketError> {
        let drained = |shard: &mut WatchedShard, _| {
            let is_drained = shard.is_drained(socket)
                && (socket.is_some() || shard.device().stats().tx_held == 0);
            Ok(if is_drained || shard.down().is_some() {
                Poll::Ready(is_drained)
            } else {
                Poll::Pending
            })
        };
        let mut guard = self.lock()?;
        let now = sys::now();
        guard.step(now, POLL_BUDGET);
        if let Poll::Ready(is_drained) = drained(&mut guard, now)? {
            return Ok(is_drained);
        }
        let give_up = Some(now + limit);
        let target = WaitTarget::Acknowledgements;
        Ok(self.wait_until(guard, now, target, give_up, drained)?.unwrap_or(false))
    }
}

/// Runs the stack for a thread that waits for `interest`.
fn advance(shard: &mut WatchedShard, now: Instant, interest: Ready) {
    if interest.intersects(Ready::READER) {
        shard.step_for_reader(now);
    } else {
        shard.step(now, POLL_BUDGET);
    }
}
