//! When to stop polling and ask to be woken: one policy for all devices.
//!
//! Spinning costs CPU, sleeping costs a wake-up (2 to 24 µs). While sleeps turn out short, traffic
//! is dense and spinning longer would have been cheaper, so the spin grows; after long sleeps it
//! shrinks. An idle device is armed after few polls and uses no CPU.

use fulmar_base::Duration;

/// What to do after a poll.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Next {
    /// Poll again.
    Poll,
    /// Arm the device, poll once more, sleep.
    Arm,
}

/// Bounds of the spin.
#[derive(Clone, Copy, Debug)]
pub struct ModerationConfig {
    /// Empty polls before sleeping when traffic is sparse.
    pub min_empty_polls: u32,
    /// Empty polls before sleeping when traffic is dense.
    pub max_empty_polls: u32,
    /// A sleep shorter than this was not worth it.
    pub short_sleep: Duration,
}

impl Default for ModerationConfig {
    /// 1 to 64 empty polls (an empty read of a TAP takes 0.27 µs); a sleep under 50 µs, twice the
    /// price of a wake-up across CPUs, was not worth it.
    fn default() -> ModerationConfig {
        ModerationConfig {
            min_empty_polls: 1,
            max_empty_polls: 64,
            short_sleep: Duration::from_micros(50),
        }
    }
}

/// The state of the policy for one queue.
#[derive(Clone, Debug)]
pub struct Moderation {
    config: ModerationConfig,
    /// `min_empty_polls <= limit <= max_empty_polls`.
    limit: u32,
    empty_polls: u32,
}

impl Moderation {
    /// Starts with the shortest spin.
    pub fn new(config: ModerationConfig) -> Moderation {
        Moderation { config, limit: config.min_empty_polls, empty_polls: 0 }
    }

    /// Empty polls before sleeping, as of now.
    pub fn limit(&self) -> u32 {
        self.limit
    }

    /// Notes what a poll brought.
    pub fn after_poll(&mut self, frames: usize) -> Next {
        self.empty_polls = if frames > 0 { 0 } else { self.empty_polls.saturating_add(1) };
        if self.empty_polls > 0 && self.empty_polls >= self.limit { Next::Arm } else { Next::Poll }
    }

    /// Notes how long a sleep lasted.
    pub fn after_sleep(&mut self, slept: Duration) {
        self.empty_polls = 0;
        let limit = if slept < self.config.short_sleep {
            self.limit.saturating_mul(2)
        } else {
            self.limit / 2
        };
        self.limit = limit.clamp(
            self.config.min_empty_polls,
            self.config.max_empty_polls.max(self.config.min_empty_polls),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn polls_until_arm(m: &mut Moderation) -> u32 {
        (1..).find(|_| m.after_poll(0) == Next::Arm).unwrap()
    }

    #[test]
    fn the_spin_grows_while_sleeps_are_short_and_shrinks_when_they_are_long() {
        let mut m = Moderation::new(ModerationConfig::default());
        assert_eq!(polls_until_arm(&mut m), 1);
        (0..3).for_each(|_| m.after_sleep(Duration::from_micros(10)));
        assert_eq!(polls_until_arm(&mut m), 8);
        (0..20).for_each(|_| m.after_sleep(Duration::from_micros(10)));
        assert_eq!(polls_until_arm(&mut m), 64);
        (0..20).for_each(|_| m.after_sleep(Duration::from_millis(1)));
        assert_eq!(polls_until_arm(&mut m), 1);
    }

    #[test]
    fn a_frame_starts_the_count_again() {
        let config = ModerationConfig { min_empty_polls: 3, ..ModerationConfig::default() };
        let mut m = Moderation::new(config);
        assert_eq!([0, 0, 1, 0, 0].map(|n| m.after_poll(n)), [Next::Poll; 5]);
        assert_eq!(m.after_poll(0), Next::Arm);
    }
}
