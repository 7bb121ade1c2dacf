//! How the holder of the baton sleeps: on the device's descriptor, beside the eventfd by which others
//! wake it and a timer.
//!
//! The timer is a descriptor of its own and stays set from sleep to sleep as long as it ends no later
//! than the sleep is to: a time-out of the sleep itself would be set and taken back each time, which
//! costs as much as a look at the device. It may end a sleep early, once.

use fulmar_base::{Counter, Duration, Instant, Outside, Probe, Stage};
use fulmar_netdev::Wake;
use fulmar_socket::SocketError;

use crate::handoff::before_looking;
use crate::host::{Guard, Host};
use crate::leader::Role;
use crate::sys;
use crate::waiter::Waiter;
use crate::watched::WatchedShard;

/// Longest sleep without looking at the clock again.
const LONG_SLEEP: Duration = Duration::from_secs(3600);
/// Longest sleep on a device without a descriptor, which cannot say that frames have come.
const POLL_PERIOD: Duration = Duration::from_millis(1);

impl<P: Probe> Host<P> {
    /// Arms the device and sleeps on it, unless something came meanwhile; or, with a `hold`, sleeps
    /// until then whatever comes. For the baton's holder.
    pub(crate) fn sleep_on_device<'a>(
        &'a self,
        mut guard: Guard<'a, P>,
        role: Role,
        waiter: &Waiter,
        give_up: Option<Instant>,
        hold: Option<Instant>,
    ) -> Result<Guard<'a, P>, SocketError> {
        let now = sys::now();
        if hold.is_none() && !arm(&mut guard, now, waiter) {
            return Ok(guard);
        }
        let until = [guard.next_deadline(), give_up, hold].into_iter().flatten().min();
        let device = guard.device().wake_fd();
        let longest = if device.is_some() { LONG_SLEEP } else { POLL_PERIOD };
        let until = until.unwrap_or(Instant::FAR_FUTURE).min(now + longest);
        // A device that is gone stays readable for ever.
        let is_watched = hold.is_none() && guard.down().is_none();
        let device = device.filter(|_| is_watched);
        let kick = self.baton.kick_fd(role);
        self.baton.will_sleep(role, until);
        if self.has_news(&guard) {
            self.baton.awake(role, false);
            guard.device().disarm();
            return Ok(guard);
        }
        waiter.on_device(kick);
        guard.count(Counter::Sleeps, 1);
        guard.count(Counter::Holds, u64::from(hold.is_some()));
        drop(guard);
        let mut was_kicked = false;
        if until > now && !waiter.is_woken() && self.baton.is_held_by(role) {
            let timer = match hold {
                Some(_) => self.baton.timer_at(role, until),
                None => self.baton.timer_by(role, now, until),
            };
            was_kicked = sys::sleep_on(device, kick, timer);
        }
        waiter.off_device();
        self.baton.awake(role, was_kicked);
        let _ = self.outside().stage(Stage::Slept);
        let mut guard = self.lock_quietly()?;
        guard.moderation().slept();
        // Whoever has taken the baton meanwhile may sleep on the armed device.
        if hold.is_none() && self.baton.is_held_by(role) {
            guard.device().disarm();
        }
        Ok(guard)
    }

    /// Whether another shard has handed something over. For who is about to sleep and has said so.
    fn has_news(&self, shard: &WatchedShard<P>) -> bool {
        if !self.has_shards_beside() {
            return false;
        }
        before_looking();
        shard.has_handed()
    }
}

/// Asks the device for a wake-up and polls once more; false if there is no need to sleep. There is
/// nothing to poll for where the descriptor shows what waits.
fn arm<P: Probe>(shard: &mut WatchedShard<P>, now: Instant, waiter: &Waiter) -> bool {
    let is_sure = shard.device().caps().wake == Wake::Level && !shard.has_backlog();
    let is_armed = shard.device().arm() || shard.down().is_some() || is_sure;
    let may_sleep = is_armed && (is_sure || shard.step_for_reader(now) == 0) && !waiter.is_woken();
    if !may_sleep {
        shard.device().disarm();
    }
    may_sleep
}
