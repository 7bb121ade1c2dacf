//! The driver of a program: its own thread runs the stack, in the turns of its event loop.
//!
//! ```text
//!   turn ─► send what the turn before deferred ─► receive, timers ─► wake tasks
//!     │ nothing came
//!     ▼
//!   rest ─► busy-poll ─► turn
//!     └──► arm the device, set the timer ─► the event loop sleeps on the driver's descriptor ─► turn
//! ```
//!
//! The service thread waits for the driver's descriptor, too. If the driver does not turn for [`PATIENCE`], though that was
//! readable or it has not rested, its thread is busy or its event loop does not run: the service thread stands in until the
//! next turn. Threads in blocking calls follow the driver, and poll the device themselves after the same time.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;

use fulmar_stack::base::{Counter, Duration, Instant};
use fulmar_stack::device::{Interest, WakeFd};
use fulmar_stack::socket::SocketError;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags};

use super::{Guard, Host, POLL_BUDGET};
use crate::runtime::leader::Role;
use crate::runtime::sleep::{LONG_SLEEP, POLL_PERIOD, arm};
use crate::runtime::sync::{AtomicU64, Ordering, lock};
use crate::runtime::sys;

/// How long a driver may leave its descriptor readable.
pub(super) const PATIENCE: Duration = Duration::from_millis(100);

/// What others see of a driver.
pub(crate) struct Driven {
    /// The device, the kick and the timer.
    descriptors: Epoll,
    /// Twice the number of its turns; one more while it rests, when the descriptor tells that there is something to do.
    state: AtomicU64,
}

impl Driven {
    /// Its state, and whether it rests.
    fn state(&self) -> (u64, bool) {
        let state = self.state.load(Ordering::Acquire);
        (state, state & 1 == 1)
    }
}

/// See the module's header. The service thread runs the stack again when it is dropped.
pub(crate) struct Driving {
    host: Arc<Host>,
    driven: Arc<Driven>,
    turns: u64,
    /// It sleeps, or may: the device is armed.
    is_armed: bool,
    /// Nothing has come since a rest began.
    is_waiting: bool,
}

impl Driving {
    /// The driver of a shard with this device. `None`: it has one.
    ///
    /// # Errors
    /// Too many descriptors; a device that epoll cannot watch.
    pub(crate) fn new(
        host: &Arc<Host>,
        device: Option<WakeFd>,
    ) -> std::io::Result<Option<Driving>> {
        let descriptors = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        let readable = WakeFd::readable;
        let (kick, timer) = (host.leader.kick_fd(Role::Driver), host.leader.timer_fd(Role::Driver));
        for WakeFd { fd, interest } in device.into_iter().chain([readable(kick), readable(timer)]) {
            let flags = match interest {
                Interest::Readable => EpollFlags::EPOLLIN,
                Interest::ReadableOrWritable => EpollFlags::EPOLLIN | EpollFlags::EPOLLOUT,
            };
            descriptors.add(sys::borrowed(fd), EpollEvent::new(flags, 0))?;
        }
        if !host.leader.add_driver() {
            return Ok(None);
        }
        let driven = Arc::new(Driven { descriptors, state: AtomicU64::new(0) });
        *lock(&host.driver) = Some(Arc::clone(&driven));
        host.service.unpark();
        let host = Arc::clone(host);
        Ok(Some(Driving { host, driven, turns: 0, is_armed: false, is_waiting: false }))
    }

    /// One turn: sends, receives, runs timers, wakes tasks. True if there was anything to do.
    ///
    /// # Errors
    /// As [`Host::lock`].
    pub(crate) fn turn(&mut self) -> Result<bool, SocketError> {
        self.turns = self.turns.wrapping_add(1);
        self.driven.state.store(2 * self.turns, Ordering::Release);
        let mut guard = self.host.lock()?;
        let now = sys::now();
        self.host.give_lead_to_driver();
        if std::mem::take(&mut self.is_armed) {
            self.host.leader.awake(Role::Driver);
            self.host.leader.clear_kick(Role::Driver);
            guard.device().disarm();
            guard.moderation().slept();
        }
        let came = guard.next_turn(now, POLL_BUDGET);
        let has_worked = came > 0 || guard.has_pending_kicks();
        self.is_waiting &= !has_worked;
        Ok(has_worked)
    }

    /// Before a sleep on the descriptor. False: there is work, or it is worth while to poll for a few microseconds more
    /// ([`ModerationConfig`](fulmar_stack::device::moderation::ModerationConfig)).
    ///
    /// # Errors
    /// As [`Host::lock`].
    pub(crate) fn rest(&mut self) -> Result<bool, SocketError> {
        let (host, mut guard) = (&self.host, self.host.lock()?);
        let now = sys::now();
        if !std::mem::replace(&mut self.is_waiting, true) {
            guard.moderation().start_waiting(now);
        }
        guard.end_turn(now);
        if !host.give_lead_to_driver() {
            // A caller leads still. It runs the stack, and kicks the driver at its end.
            return Ok(!guard.has_pending_kicks());
        }
        if guard.polls_on(now) {
            return Ok(false);
        }
        self.is_armed = arm_for(host, &mut guard, now);
        self.driven.state.store(2 * self.turns + u64::from(self.is_armed), Ordering::Release);
        Ok(self.is_armed)
    }
}

/// Arms device and timer for the sleep of a driver. False: there is work.
fn arm_for(host: &Host, guard: &mut Guard<'_>, now: Instant) -> bool {
    if !arm(guard, now, || false) {
        return false;
    }
    let longest = if guard.device().wake_fd().is_some() { LONG_SLEEP } else { POLL_PERIOD };
    let until = guard.next_deadline().unwrap_or(Instant::FAR_FUTURE).min(now + longest);
    host.leader.timer_by(Role::Driver, now, until);
    host.leader.will_sleep(Role::Driver, until);
    if until <= now || guard.has_pending_kicks() || host.has_hand_offs(guard) {
        host.leader.awake(Role::Driver);
        guard.device().disarm();
        return false;
    }
    guard.count(Counter::Sleeps, 1);
    true
}

impl Host {
    /// The driver takes the lead, also back from the service thread, which then waits for the driver again. False: a caller
    /// leads.
    fn give_lead_to_driver(&self) -> bool {
        if self.leader.is_held_by(Role::Driver) {
            return true;
        }
        let has_taken = self.leader.try_take(Role::Driver);
        if let (true, Some(kick)) = (has_taken, self.leader.sleeping(Role::Service)) {
            sys::signal_event(kick);
        }
        has_taken
    }

    /// The service thread waits until the driver is stuck; then it leads in its place. False: it is not, or is gone.
    pub(crate) fn is_driver_stuck(&self) -> bool {
        let Some(driven) = self.driven() else { return false };
        let before = driven.state();
        let wait = |device, until| {
            let timer = self.leader.timer_at(Role::Service, until);
            let was_kicked = sys::sleep_on(device, self.leader.kick_fd(Role::Service), timer);
            if was_kicked {
                self.leader.clear_kick(Role::Service);
            }
            was_kicked
        };
        let descriptor = WakeFd::readable(driven.descriptors.0.as_raw_fd());
        if before.1 && wait(Some(descriptor), Instant::FAR_FUTURE) {
            return false;
        }
        let was_kicked = wait(None, sys::now() + PATIENCE);
        !was_kicked
            && driven.state() == before
            && self.leader.has_driver()
            && self.leader.stand_in()
    }
}

impl AsFd for Driving {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.driven.descriptors.0.as_fd()
    }
}

impl Drop for Driving {
    fn drop(&mut self) {
        if !self.host.is_ours() {
            return;
        }
        if let Ok(mut guard) = self.host.lock() {
            guard.end_turn(sys::now());
            if self.is_armed {
                guard.device().disarm();
            }
        }
        // Waking another thread takes locks that a signal handler must not meet.
        let _mark = self.host.bit.enter();
        *lock(&self.host.driver) = None;
        self.host.leader.remove_driver();
        // The service thread may wait for the driver.
        sys::signal_event(self.host.leader.kick_fd(Role::Service));
        self.host.promote_follower();
    }
}
