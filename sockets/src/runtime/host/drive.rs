//! The driver of a program: its own thread runs the stack, in the turns of its event loop.
//!
//! ```text
//!   turn ─► send what the turn before deferred ─► receive, timers ─► wake tasks
//!     │ nothing came
//!     ▼
//!   arm the device, set the timer ─► the event loop sleeps on the driver's descriptor ─► turn
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
        Ok(Some(Driving { host: Arc::clone(host), descriptors, is_armed: false }))
    }

    /// One turn: true if something came, or tasks were woken. False: the descriptor is readable when the next turn has
    /// something to do.
    ///
    /// # Errors
    /// As [`Host::lock`].
    pub(crate) fn turn(&mut self) -> Result<bool, SocketError> {
        let host = Arc::clone(&self.host);
        let mut guard = host.lock()?;
        let now = sys::now();
        let leads = host.leader.is_held_by(Role::Driver) || host.leader.try_take(Role::Driver);
        if std::mem::take(&mut self.is_armed) {
            host.leader.awake(Role::Driver);
            host.leader.clear_kick(Role::Driver);
            guard.device().disarm();
        }
        let came = guard.next_turn(now, POLL_BUDGET);
        if came > 0 || guard.has_pending_kicks() {
            return Ok(true);
        }
        guard.end_turn(now);
        // Beside a caller that leads still: it runs the stack, and kicks the driver at its end.
        Ok(leads && !self.rest(&mut guard, now))
    }

    /// Prepares the sleep. False: there is work.
    fn rest(&mut self, guard: &mut Guard<'_>, now: Instant) -> bool {
        let leader = &self.host.leader;
        if !arm(guard, now, || false) {
            return false;
        }
        let longest = if guard.device().wake_fd().is_some() { LONG_SLEEP } else { POLL_PERIOD };
        let until = guard.next_deadline().unwrap_or(Instant::FAR_FUTURE).min(now + longest);
        leader.timer_by(Role::Driver, now, until);
        leader.will_sleep(Role::Driver, until);
        if until <= now || guard.has_pending_kicks() || self.host.has_hand_offs(guard) {
            leader.awake(Role::Driver);
            guard.device().disarm();
            return false;
        }
        guard.count(Counter::Sleeps, 1);
        self.is_armed = true;
        true
    }
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
