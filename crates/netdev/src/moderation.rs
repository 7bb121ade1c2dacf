//! When to busy-poll a device, when to hold, and when to arm it and sleep: one policy for all devices.
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
//! answer: a bulk reader that is not held acknowledges nearly every frame. Nor where waiting costs
//! little: a reader that yields to a sender on its own CPU finds a burst each time, and neither sleeps nor
//! polls in vain. The length is a step of a ladder from nothing to [`ModerationConfig::max_hold`],
//! found as Linux's dynamic interrupt moderation finds its profile: windows of traffic are compared, first
//! by bytes per second, then by frames per second, then by the CPU that waiting takes (wake-ups and
//! busy-polling); differences under a tenth do not count. Windows of a step and of the next one take turns.
//! A higher step is taken if it is better, a lower one unless it is worse. After a failed attempt
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

use fulmar_base::{Duration, Instant};

use ladder::{Ladder, Window};

/// A coalescing register pair: when hardware asks for attention.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Coalesce {
    /// After so many frames.
    pub packets: usize,
    /// So long after the first of them.
    pub delay: Duration,
}

/// One step of the ladder, as a device with registers is told it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Profile {
    /// When to wake for received frames.
    pub receive: Coalesce,
    /// When to take back sent frames.
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
    /// Frames for which a hold waits at most, reckoned from their rate: what the device has room for
    /// while it is not polled.
    pub max_hold_frames: usize,
    /// Frames per second from which a one-way stream is a flood.
    pub flood_pps: u32,
}

impl ModerationConfig {
    /// The default. Busy-polls for up to 60 µs, twice the price of a wake-up across CPUs and what a peer
    /// that sleeps on another CPU takes to answer; holds up to 64 µs (72 with the timer's own
    /// latency), so that a hold adds less than 100 µs to any latency.
    pub const ADAPTIVE: ModerationConfig = ModerationConfig {
        min_spin: Duration::from_micros(2),
        max_spin: Duration::from_micros(60),
        max_hold: Duration::from_micros(64),
        max_hold_frames: 256,
        flood_pps: 20_000,
    };

    /// Latency first: always busy-polls for 50 µs, up to 1 ms where frames come in time, and never holds.
    pub const LATENCY: ModerationConfig = ModerationConfig {
        min_spin: Duration::from_micros(50),
        max_spin: Duration::from_millis(1),
        max_hold: Duration::ZERO,
        ..ModerationConfig::ADAPTIVE
    };

    /// CPU first: busy-polls for 4 µs at most, and holds up to 256 µs.
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

    /// Never sleeps while a thread waits: a CPU per waiting stack, for who has one to give.
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

/// CPU time of one wake-up, both ends of it.
const WAKE_COST: Duration = Duration::from_micros(9);

/// What a sleep adds to the time until frames are seen, across CPUs.
const WAKE_LATENCY: Duration = Duration::from_micros(20);

/// The state of the policy for one queue.
#[derive(Clone, Debug)]
pub struct Moderation {
    config: ModerationConfig,
    /// How long the next wait busy-polls; within the bounds of the configuration.
    spin: Duration,
    /// Since when polls have found nothing, or a thread has waited.
    waiting_since: Option<Instant>,
    /// Since when that wait busy-polls.
    polling_since: Option<Instant>,
    /// How long other threads ran meanwhile, on the polling thread's CPU.
    yielded_for: Duration,
    /// How long busy-polls took that have ended since the last query.
    busy_polled: Option<Duration>,
    /// The wait has slept.
    has_slept: bool,
    /// The last hold brought nothing.
    held_in_vain: bool,
    is_holding: bool,
    window: Window,
    ladder: Ladder,
    /// The step that was told last.
    told: usize,
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
            told: 0,
        }
    }

    /// The bounds.
    pub fn config(&self) -> &ModerationConfig {
        &self.config
    }

    /// Other bounds from now on; what was learnt is forgotten, but not which step a device was told.
    pub fn set_config(&mut self, config: ModerationConfig) {
        let told = self.told;
        *self = Moderation { told, ..Moderation::new(config) };
    }

    /// How long the next wait busy-polls, as of now.
    pub fn spin(&self) -> Duration {
        self.spin
    }

    /// How long frames are held, as of now.
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

    /// Notes what a poll brought. `sent` counts all frames that were ever sent, but those that only acknowledge.
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
        // How long a hold lasts says nothing about when frames come.
        if let Some(since) = self.waiting_since.take()
            && !has_held
        {
            self.learn(now.since(since));
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

    /// The same where the device may have frames, which are not to wait for the end of a hold.
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

    /// During this busy-poll other threads ran for `time`: that cost nothing.
    pub fn yielded(&mut self, time: Duration) {
        self.yielded_for = self.yielded_for.saturating_add(time);
    }

    /// Notes that a sleep has ended, a hold or another.
    pub fn slept(&mut self) {
        self.has_slept = true;
        self.window.attend(WAKE_COST);
    }

    /// How long busy-polls took that have ended since the last query.
    pub fn take_busy_polled(&mut self) -> Option<Duration> {
        self.busy_polled.take()
    }

    /// The step of the ladder if it has changed since it was last told; for a device with registers.
    /// `None` within: as the device was set up.
    pub fn take_change(&mut self) -> Option<Option<Profile>> {
        let step = if self.config.max_hold.is_zero() { 0 } else { self.ladder.step() };
        if step == self.told {
            return None;
        }
        self.told = step;
        Some((step > 0).then(|| self.profile()))
    }

    fn profile(&self) -> Profile {
        let both = Coalesce { packets: self.config.max_hold_frames.max(1), delay: self.hold() };
        // Sent frames keep memory that is warm: half as many of them.
        Profile { receive: both, transmit: Coalesce { packets: both.packets.div_ceil(2), ..both } }
    }

    /// A wait took so long. One that slept would have been shorter without the wake-up.
    fn learn(&mut self, waited: Duration) {
        let ModerationConfig { min_spin, max_spin, .. } = self.config;
        let waited = if self.has_slept { waited.saturating_sub(WAKE_LATENCY) } else { waited };
        // A wait that only just fits would often be polled for in vain.
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
            self.window.attend(took);
            self.busy_polled = Some(self.busy_polled.unwrap_or_default().saturating_add(took));
        }
    }

    /// Ends the window and lets the ladder move.
    fn judge(&mut self, now: Instant, sent: u64) {
        let rates = self.window.close(now, sent);
        let is_flood = !self.config.max_hold.is_zero() && rates.is_flood(self.config.flood_pps);
        self.ladder.judge(is_flood.then_some(rates));
    }
}
