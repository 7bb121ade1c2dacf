//! Adaptive busy-polling and interrupt mitigation: when a waiting thread busy-polls its device, when it holds, and when
//! it arms the device and sleeps. One policy for all devices.
//!
//! A wake-up costs 2 µs on the own CPU and 24 µs across CPUs, a poll 2 ns to 0.3 µs. A waiting thread does
//! one of three things ([`Next`]):
//!
//! ```text
//!   busy-poll   frames have lately come within the time of a wake-up: poll for about that long
//!   hold        frames come in a flood: sleep for a fixed time, then receive what has arrived, so that
//!               neither the sender nor the device wakes a thread
//!   arm         otherwise: arm the device, poll once more, sleep
//! ```
//!
//! **Busy-polling** is bounded by [`ModerationConfig::max_spin`] and adapts: a wait that ended within that
//! time makes the next busy-poll longer, every other wait halves it. An idle device is armed after a poll or
//! two and uses no CPU.
//!
//! **Holding** (interrupt mitigation) begins at [`ModerationConfig::flood_pps`], and only where frames are not
//! replies: a client that waits for an answer would be delayed once per request. An ACK without data is no
//! answer: a bulk reader that is not held acknowledges nearly every frame. Nor where waiting costs little CPU: a
//! reader that yields to a sender on its own CPU finds a burst each time. The length is a step of a ladder from
//! nothing to [`ModerationConfig::max_hold`], found as Linux's dynamic interrupt moderation finds its profile:
//! windows of traffic are compared, first by bytes per second, then by frames per second, then by the CPU that
//! waiting takes (wake-ups and busy-polling); differences under a tenth do not count. Windows of a step and of the
//! next one alternate. A higher step is taken if it is better, a lower one unless it is worse. After a failed attempt
//! the ladder rests before it tries the other direction (`moderation/ladder.rs`).
//!
//! A device with coalescing registers of its own is given the step ([`Profile`]) and holds by itself.
//!
//! No clock and no sleep here: time is an argument, and the caller does what [`Next`] says. Cost:
//! a few additions per poll. Sources: Linux's lib/dim, net/core/dev.c (napi_defer_hard_irqs,
//! gro_flush_timeout); Karlin et al., Competitive randomized algorithms for non-uniform problems
//! (1990), for polling as long as a wake-up costs.

mod ladder;
#[cfg(test)]
mod tests;

use crate::base::{Duration, Instant};

use ladder::{Ladder, Window};

/// A pair of coalescing registers: when hardware raises an interrupt.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Coalesce {
    /// Frames after which the device raises an interrupt.
    pub packets: usize,
    /// Time after the first frame at which the device raises an interrupt.
    pub delay: Duration,
}

/// The registers of a device for one step of the ladder.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Profile {
    /// For received frames.
    pub receive: Coalesce,
    /// For completed transmissions.
    pub transmit: Coalesce,
}

/// Whether a thread that waits may busy-poll.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BusyPoll {
    /// It has nothing else to do, and its CPU is free.
    Allowed,
    /// It sleeps.
    Forbidden,
}

/// What to do while waiting for a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Next {
    /// Poll again at once.
    BusyPoll {
        /// When busy-polling ends at the latest.
        until: Instant,
    },
    /// Sleep until then without arming the device, then poll.
    Hold {
        /// When the sleep ends.
        until: Instant,
    },
    /// Arm the device, poll once more, sleep.
    Arm,
}

/// How a stack waits: bounds of the policy. [`ModerationConfig::ADAPTIVE`] and the other constants are what
/// most programs need.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ModerationConfig {
    /// A wait busy-polls for at least this long before it sleeps.
    pub min_spin: Duration,
    /// And for at most this long, if frames have lately come in time.
    pub max_spin: Duration,
    /// Longest hold in a flood; zero: never hold.
    pub max_hold: Duration,
    /// Frames that may accumulate in a hold, estimated from their rate: the space of the device while it is not polled.
    pub max_hold_frames: usize,
    /// Frames per second from which a one-way stream is a flood.
    pub flood_pps: u32,
}

impl ModerationConfig {
    /// The default. Busy-polls for up to 60 µs, twice the cost of a wake-up across CPUs and the response time of a peer
    /// that sleeps on another CPU. Holds for up to 64 µs (72 with the latency of the timer), so that a hold adds less
    /// than 100 µs to any latency.
    pub const ADAPTIVE: ModerationConfig = ModerationConfig {
        min_spin: Duration::from_micros(2),
        max_spin: Duration::from_micros(60),
        max_hold: Duration::from_micros(64),
        max_hold_frames: 256,
        flood_pps: 20_000,
    };

    /// Lowest latency: always busy-polls for 50 µs, up to 1 ms where frames come in time, and never holds.
    pub const LATENCY: ModerationConfig = ModerationConfig {
        min_spin: Duration::from_micros(50),
        max_spin: Duration::from_millis(1),
        max_hold: Duration::ZERO,
        ..ModerationConfig::ADAPTIVE
    };

    /// Lowest CPU use: busy-polls for 4 µs at most, and holds for up to 256 µs.
    pub const THROUGHPUT: ModerationConfig = ModerationConfig {
        max_spin: Duration::from_micros(4),
        max_hold: Duration::from_micros(256),
        ..ModerationConfig::ADAPTIVE
    };

    /// No moderation: sleeps whenever there is nothing, and is woken by every frame.
    pub const NONE: ModerationConfig = ModerationConfig {
        min_spin: Duration::ZERO,
        max_spin: Duration::ZERO,
        max_hold: Duration::ZERO,
        ..ModerationConfig::ADAPTIVE
    };

    /// Never sleeps while a thread waits: each waiting stack uses a whole CPU.
    pub const POLLING: ModerationConfig = ModerationConfig {
        min_spin: Duration::MAX,
        max_spin: Duration::MAX,
        max_hold: Duration::ZERO,
        ..ModerationConfig::ADAPTIVE
    };
}

impl Default for ModerationConfig {
    fn default() -> ModerationConfig {
        ModerationConfig::ADAPTIVE
    }
}

/// CPU time of one wake-up, of the waking and of the woken side.
const WAKE_COST: Duration = Duration::from_micros(9);

/// Latency that a sleep adds across CPUs.
const WAKE_LATENCY: Duration = Duration::from_micros(20);

/// The state of the policy for one queue.
#[derive(Clone, Debug)]
pub struct Moderation {
    config: ModerationConfig,
    /// How long the next wait busy-polls; within the bounds of the configuration.
    spin: Duration,
    /// When polls began to find nothing, or a thread began to wait.
    waiting_since: Option<Instant>,
    /// When that wait began to busy-poll.
    polling_since: Option<Instant>,
    /// How long other threads ran on its CPU since.
    yielded_for: Duration,
    /// How long busy-polls took that have ended since the last query.
    busy_polled: Option<Duration>,
    /// The wait has slept.
    has_slept: bool,
    /// No frame arrived in the last hold.
    held_in_vain: bool,
    is_holding: bool,
    window: Window,
    ladder: Ladder,
    /// The step last returned by [`Moderation::take_change`].
    reported_step: usize,
}

impl Moderation {
    /// Starts with the shortest busy-poll and without a hold.
    pub fn new(config: ModerationConfig) -> Moderation {
        Moderation {
            config,
            spin: config.min_spin,
            waiting_since: None,
            polling_since: None,
            yielded_for: Duration::ZERO,
            busy_polled: None,
            has_slept: false,
            held_in_vain: false,
            is_holding: false,
            window: Window::default(),
            ladder: Ladder::default(),
            reported_step: 0,
        }
    }

    /// The bounds.
    pub fn config(&self) -> &ModerationConfig {
        &self.config
    }

    /// Sets other bounds and resets the state, except for the step of the device's registers.
    pub fn set_config(&mut self, config: ModerationConfig) {
        let reported_step = self.reported_step;
        *self = Moderation { reported_step, ..Moderation::new(config) };
    }

    /// How long the next wait busy-polls.
    pub fn spin(&self) -> Duration {
        self.spin
    }

    /// The current length of a hold; zero: none.
    pub fn hold(&self) -> Duration {
        let wanted = self.config.max_hold * self.ladder.step() as u32 / ladder::TOP as u32;
        wanted.min(self.window.time_of(self.config.max_hold_frames))
    }

    /// Whether the last wait was a hold, and no poll has followed.
    pub fn is_holding(&self) -> bool {
        self.is_holding
    }

    /// A thread begins to wait.
    pub fn start_waiting(&mut self, now: Instant) {
        self.stop_polling(now);
        self.waiting_since = Some(now);
        self.has_slept = false;
    }

    /// Notes the result of a poll. `sent`: frames sent since the start, without those that only acknowledge.
    pub fn polled(&mut self, now: Instant, frames: usize, bytes: usize, sent: u64) {
        if frames == 0 {
            self.held_in_vain |= self.is_holding;
            self.is_holding = false;
            self.waiting_since.get_or_insert(now);
            return;
        }
        self.stop_polling(now);
        let has_held = self.is_holding || self.held_in_vain;
        (self.is_holding, self.held_in_vain) = (false, false);
        // The length of a hold is not the time until frames come.
        if let Some(since) = self.waiting_since.take()
            && !has_held
        {
            self.adapt_spin(now.since(since));
        }
        self.has_slept = false;
        self.window.add(now, frames, bytes, sent);
        if self.window.is_full(now) {
            self.judge(now, sent);
        }
    }

    /// What to do after a poll that found nothing.
    pub fn next(&mut self, now: Instant, busy_poll: BusyPoll) -> Next {
        self.judge_if_stale(now);
        let hold = self.hold();
        if !hold.is_zero() && !self.held_in_vain {
            self.stop_polling(now);
            self.is_holding = true;
            return Next::Hold { until: now + hold };
        }
        self.poll_or_arm(now, busy_poll)
    }

    /// As [`Moderation::next`] without a hold: the device may have frames already.
    pub fn next_unheld(&mut self, now: Instant, busy_poll: BusyPoll) -> Next {
        self.judge_if_stale(now);
        self.poll_or_arm(now, busy_poll)
    }

    fn judge_if_stale(&mut self, now: Instant) {
        if self.window.is_stale(now) {
            self.judge(now, self.window.sent());
        }
    }

    fn poll_or_arm(&mut self, now: Instant, busy_poll: BusyPoll) -> Next {
        let since = *self.waiting_since.get_or_insert(now);
        let until = since + self.spin;
        if busy_poll == BusyPoll::Allowed && now < until && !self.has_slept {
            self.polling_since.get_or_insert(now);
            return Next::BusyPoll { until };
        }
        self.stop_polling(now);
        Next::Arm
    }

    /// During this busy-poll other threads ran for `time`, which is not CPU time of the wait.
    pub fn yielded(&mut self, time: Duration) {
        self.yielded_for = self.yielded_for.saturating_add(time);
    }

    /// Notes the end of a sleep, hold or not.
    pub fn slept(&mut self) {
        self.has_slept = true;
        self.window.add_wait_time(WAKE_COST);
    }

    /// How long busy-polls took that have ended since the last query.
    pub fn take_busy_polled(&mut self) -> Option<Duration> {
        self.busy_polled.take()
    }

    /// The registers of the current step if it has changed since the last call; `Some(None)`: the initial setting. For
    /// a device with registers.
    pub fn take_change(&mut self) -> Option<Option<Profile>> {
        let step = if self.config.max_hold.is_zero() { 0 } else { self.ladder.step() };
        if step == self.reported_step {
            return None;
        }
        self.reported_step = step;
        Some((step > 0).then(|| self.profile()))
    }

    fn profile(&self) -> Profile {
        let both = Coalesce { packets: self.config.max_hold_frames.max(1), delay: self.hold() };
        // Completions return cache-warm memory: they are handled twice as often.
        Profile { receive: both, transmit: Coalesce { packets: both.packets.div_ceil(2), ..both } }
    }

    /// Adapts the busy-poll time to the duration of a wait, from which the latency of a wake-up is subtracted.
    fn adapt_spin(&mut self, waited: Duration) {
        let ModerationConfig { min_spin, max_spin, .. } = self.config;
        let waited = if self.has_slept { waited.saturating_sub(WAKE_LATENCY) } else { waited };
        // With a wait close to the limit busy-polling would often fail.
        let spin = if waited <= max_spin - max_spin / 4 {
            self.spin.saturating_mul(2).max(waited.saturating_mul(2))
        } else {
            self.spin / 2
        };
        self.spin = spin.clamp(min_spin, max_spin.max(min_spin));
    }

    fn stop_polling(&mut self, now: Instant) {
        if let Some(since) = self.polling_since.take() {
            let took = now.since(since).saturating_sub(self.yielded_for);
            self.yielded_for = Duration::ZERO;
            self.window.add_wait_time(took);
            self.busy_polled = Some(self.busy_polled.unwrap_or_default().saturating_add(took));
        }
    }

    /// Ends the window and updates the ladder.
    fn judge(&mut self, now: Instant, sent: u64) {
        let rates = self.window.close(now, sent);
        let is_flood = !self.config.max_hold.is_zero() && rates.is_flood(self.config.flood_pps);
        self.ladder.judge(is_flood.then_some(rates));
    }
}
