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
//! The service thread is parked meanwhile. Threads in blocking calls follow the driver; one that waits for longer than
//! [`DRIVER_PATIENCE`](super::wait_guard) polls the device itself, since the driver's thread may be busy.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use fulmar_stack::base::{Counter, Instant};
use fulmar_stack::device::{Interest, WakeFd};
use fulmar_stack::socket::SocketError;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags};

use super::{Guard, Host, POLL_BUDGET};
use crate::runtime::leader::Role;
use crate::runtime::sleep::{LONG_SLEEP, POLL_PERIOD, arm};
use crate::runtime::sys;

/// See the module's header. The service thread runs the stack again when it is dropped.
pub(crate) struct Driving {
    host: Arc<Host>,
    /// The device, the kick and the timer.
    descriptors: Epoll,
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
        Ok(Some(Driving {
            host: Arc::clone(host),
            descriptors,
            is_armed: false,
            is_waiting: false,
        }))
    }

    /// One turn: sends, receives, runs timers, wakes tasks. True if there was anything to do.
    ///
    /// # Errors
    /// As [`Host::lock`].
    pub(crate) fn turn(&mut self) -> Result<bool, SocketError> {
        let mut guard = self.host.lock()?;
        let now = sys::now();
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
        if !host.leader.is_held_by(Role::Driver) && !host.leader.try_take(Role::Driver) {
            // A caller leads still. It runs the stack, and kicks the driver at its end.
            return Ok(!guard.has_pending_kicks());
        }
        if guard.polls_on(now) {
            return Ok(false);
        }
        self.is_armed = arm_for(host, &mut guard, now);
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

impl AsFd for Driving {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptors.0.as_fd()
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
        self.host.leader.remove_driver();
        self.host.promote_follower();
    }
}
