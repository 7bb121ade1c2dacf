//! The sleep of a leader: ppoll(2) on the device's descriptor, an eventfd and a timerfd.
//!
//! The timer stays set from sleep to sleep as long as it expires no later than the sleep is to end: a time-out of
//! ppoll itself would be armed and cancelled each time, which costs as much as a poll of the device. It may end one
//! sleep early.

use fulmar_stack::base::{Counter, Duration, Instant, Stage};
use fulmar_stack::device::Wake;
use fulmar_stack::socket::SocketError;

use crate::runtime::handoff::handoff_fence;
use crate::runtime::host::{Guard, Host};
use crate::runtime::leader::Role;
use crate::runtime::sys;
use crate::runtime::waiter::Waiter;
use crate::runtime::watched::WatchedShard;

/// Longest sleep without reading the clock.
pub(super) const LONG_SLEEP: Duration = Duration::from_secs(3600);
/// Longest sleep on a device without a descriptor, which cannot signal frames.
pub(super) const POLL_PERIOD: Duration = Duration::from_millis(1);

impl Host {
    /// Arms the device and sleeps until frames arrive; does not sleep if they have arrived before it was armed. With a
    /// `hold` it sleeps until that time, frames or not. For the leader.
    pub(crate) fn sleep_on_device<'a>(
        &'a self,
        mut guard: Guard<'a>,
        role: Role,
        waiter: &Waiter,
        give_up: Option<Instant>,
        hold: Option<Instant>,
    ) -> Result<Guard<'a>, SocketError> {
        let now = sys::now();
        if hold.is_none() && !arm(&mut guard, now, || waiter.is_woken()) {
            return Ok(guard);
        }
        let until = [guard.next_deadline(), give_up, hold].into_iter().flatten().min();
        let device = guard.device().wake_fd();
        let longest = if device.is_some() { LONG_SLEEP } else { POLL_PERIOD };
        let until = until.unwrap_or(Instant::FAR_FUTURE).min(now + longest);
        // A lost device stays readable.
        let is_watched = hold.is_none() && guard.down().is_none();
        let device = device.filter(|_| is_watched);
        let kick = self.leader.kick_fd(role);
        self.leader.will_sleep(role, until);
        if self.has_hand_offs(&guard) {
            self.leader.awake(role);
            guard.device().disarm();
            return Ok(guard);
        }
        waiter.on_device(kick);
        guard.count(Counter::Sleeps, 1);
        guard.count(Counter::Holds, u64::from(hold.is_some()));
        drop(guard);
        let mut was_kicked = false;
        if until > now && !waiter.is_woken() && self.leader.is_held_by(role) {
            let timer = match hold {
                Some(_) => self.leader.timer_at(role, until),
                None => self.leader.timer_by(role, now, until),
            };
            was_kicked = sys::sleep_on(device, kick, timer);
        }
        waiter.off_device();
        self.leader.awake(role);
        if was_kicked {
            self.leader.clear_kick(role);
        }
        self.pass(Stage::Slept);
        // A program did not call at the end of a sleep, so it does not count as activity.
        let mut guard = self.lock_as(Role::Service)?;
        guard.moderation().slept();
        // If a caller has become the leader, it may sleep on the armed device.
        if hold.is_none() && self.leader.is_held_by(role) {
            guard.device().disarm();
        }
        Ok(guard)
    }

    /// Whether siblings have handed packets off; checked after [`Leader::will_sleep`](crate::runtime::leader::Leader).
    pub(super) fn has_hand_offs(&self, shard: &WatchedShard) -> bool {
        if !self.has_siblings() {
            return false;
        }
        handoff_fence();
        shard.has_hand_offs()
    }
}

/// Arms the device and polls once more; false if there is work. A level-triggered descriptor needs no poll.
pub(super) fn arm(shard: &mut WatchedShard, now: Instant, is_woken: impl Fn() -> bool) -> bool {
    let is_sure = shard.device().caps().wake == Wake::Level && !shard.has_unsent_frames();
    let is_armed = shard.device().arm() || shard.down().is_some() || is_sure;
    let may_sleep = is_armed && (is_sure || shard.step_for_reader(now) == 0) && !is_woken();
    if !may_sleep {
        shard.device().disarm();
    }
    may_sleep
}
