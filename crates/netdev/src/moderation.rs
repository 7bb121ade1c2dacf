//! When to look at a device again, when to hold, and when to ask to be woken: one policy for all
//! devices.
//!
//! A wake-up costs 2 µs on the own CPU and 24 µs across CPUs, a look at a device 2 ns to 0.3 µs. So a
//! thread that waits does one of three things ([`Next`]):
//!
//! ```text
//!   look      frames have lately come within the time of a wake-up: look for about as long as that
//!   hold      frames come in a flood: sleep for a fixed time and take what has gathered, so that
//!             neither the sender nor the device wakes a thread
//!   arm       otherwise: ask to be woken, look once more, sleep
//! ```
//!
//! **Looking** is bounded by [`ModerationConfig::max_spin`] and adapts: every wait that ended within
//! reach of a look makes the next look longer, every other one halves it, so that an idle device is
//! armed after a look or two and uses no CPU.
//!
//! **Holding** begins at [`ModerationConfig::flood_pps`], and only where frames do not come in answer
//! to ours: a client that waits for an answer would be delayed once per request. Nor where waiting costs next to
//! nothing: a reader who lets the sender run on its own CPU finds a burst each time, and neither sleeps
//! nor looks in vain. How long is a step of a ladder from nothing to [`ModerationConfig::max_hold`],
//! found as Linux's dynamic interrupt moderation finds its profile: windows of traffic are compared, first
//! by bytes per second, then by frames per second, then by the attention that they cost (wake-ups and
//! looking); differences under a tenth do not count. Windows of a step and of the next one take turns;
//! a higher one is taken if it is better, a lower one unless it is worse, and after an attempt in vain
//! the ladder rests before it tries the other direction (`moderation/ladder.rs`).
//!
//! A device with coalescing registers of its own is told the step ([`Profile`]) and holds by itself.
//!
//! No clock and no sleep here: time is an argument, and the caller does what the answer says. Cost:
//! a few additions per poll. Sources: Linux's lib/dim, net/core/dev.c (napi_defer_hard_irqs,
//! gro_flush_timeout); Karlin et al., Competitive randomized algorithms for non-uniform problems
//! (1990), for looking as long as a wake-up costs.

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

/// What to do while waiting for a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Next {
    /// Poll again, at once; nothing else before then, unless work is seen.
    Look {
        /// When looking ends at the latest.
        until: Instant,
    },
    /// Sleep until then without asking to be woken by the device, then poll.
    Hold {
        /// When the sleep ends.
        until: Instant,
    },
    /// Arm the device, poll once more, sleep.
    Arm,
}

/// How a stack waits: bounds of the policy. The four constants are what most programs need.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ModerationConfig {
    /// A wait looks at least so long before it sleeps.
    pub min_spin: Duration,
    /// And at most so long, when looking has lately paid.
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
    /// The default. Looks for up to 60 µs, twice the price of a wake-up across CPUs and what a peer
    /// that sleeps on another CPU takes to answer; holds up to 64 µs (72 with the timer's own
    /// latency), so that a hold adds less than 100 µs to any latency.
    pub const ADAPTIVE: ModerationConfig = ModerationConfig {
        min_spin: Duration::from_micros(2),
        max_spin: Duration::from_micros(60),
        max_hold: Duration::from_micros(64),
        max_hold_frames: 256,
        flood_pps: 20_000,
    };

    /// Latency first: always looks for 50 µs, up to 1 ms where that pays, and never holds.
    pub const LATENCY: ModerationConfig = ModerationConfig {
        min_spin: Duration::from_micros(50),
        max_spin: Duration::from_millis(1),
        max_hold: Duration::ZERO,
        ..ModerationConfig::ADAPTIVE
    };

    /// CPU first: hardly looks, and holds up to 256 µs.
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
    /// How long the next wait looks; within the bounds of the configuration.
    spin: Duration,
    /// Since when polls have found nothing, or a thread has waited.
    waiting_since: Option<Instant>,
    /// Since when that wait looks.
    looking_since: Option<Instant>,
    /// How long other threads ran meanwhile, on the polling thread's CPU.
    yielded_for: Duration,
    /// How long looks took that have ended since the last query.
    looked: Option<Duration>,
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
    /// Starts with the shortest look and without a hold.
    pub fn new(config: ModerationConfig) -> Moderation {
        Moderation {
            config,
            spin: config.min_spin,
            waiting_since: None,
            looking_since: None,
            yielded_for: Duration::ZERO,
            looked: None,
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

    /// How long the next wait looks, as of now.
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
        self.stop_looking(now);
        self.waiting_since = Some(now);
        self.has_slept = false;
    }

    /// Notes what a poll brought. `sent` counts all frames that were ever sent.
    pub fn polled(&mut self, now: Instant, frames: usize, bytes: usize, sent: u64) {
        if frames == 0 {
            self.held_in_vain |= self.is_holding;
            self.is_holding = false;
            self.waiting_since.get_or_insert(now);
            return;
        }
        self.stop_looking(now);
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

    /// What to do after a poll that found nothing. `may_look`: the caller has a thread to look with.
    pub fn next(&mut self, now: Instant, may_look: bool) -> Next {
        self.choose(now, may_look, true)
    }

    /// The same where frames may lie in the device, which are not to wait for the end of a hold.
    pub fn next_unheld(&mut self, now: Instant, may_look: bool) -> Next {
        self.choose(now, may_look, false)
    }

    fn choose(&mut self, now: Instant, may_look: bool, may_hold: bool) -> Next {
        if self.window.is_stale(now) {
            self.judge(now, self.window.sent());
        }
        let hold = self.hold();
        if may_hold && !hold.is_zero() && !self.held_in_vain {
            self.stop_looking(now);
            self.is_holding = true;
            return Next::Hold { until: now + hold };
        }
        let since = *self.waiting_since.get_or_insert(now);
        let until = since + self.spin;
        if may_look && now < until && !self.has_slept {
            self.looking_since.get_or_insert(now);
            return Next::Look { until };
        }
        self.stop_looking(now);
        Next::Arm
    }

    /// Of the look that goes on, the thread has let others run for so long: that cost nothing.
    pub fn yielded(&mut self, time: Duration) {
        self.yielded_for = self.yielded_for.saturating_add(time);
    }

    /// Notes that a sleep has ended, a hold or another.
    pub fn slept(&mut self) {
        self.has_slept = true;
        self.window.attend(WAKE_COST);
    }

    /// How long a look took that has ended since this was asked last.
    pub fn take_looked(&mut self) -> Option<Duration> {
        self.looked.take()
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
        // A wait that only just fits would often be looked for in vain.
        let spin = if waited <= max_spin - max_spin / 4 {
            self.spin.saturating_mul(2).max(waited.saturating_mul(2))
        } else {
            self.spin / 2
        };
        self.spin = spin.clamp(min_spin, max_spin.max(min_spin));
    }

    fn stop_looking(&mut self, now: Instant) {
        if let Some(since) = self.looking_since.take() {
            let took = now.since(since).saturating_sub(self.yielded_for);
            self.yielded_for = Duration::ZERO;
            self.window.attend(took);
            self.looked = Some(self.looked.unwrap_or_default().saturating_add(took));
        }
    }

    /// Ends the window and lets the ladder move.
    fn judge(&mut self, now: Instant, sent: u64) {
        let rates = self.window.close(now, sent);
        let is_flood = !self.config.max_hold.is_zero() && rates.is_flood(self.config.flood_pps);
        self.ladder.judge(is_flood.then_some(rates));
    }
}
