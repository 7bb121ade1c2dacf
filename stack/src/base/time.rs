//! Time, which callers pass to the engines as an argument: no engine reads a clock.
//!
//! An [`Instant`] counts nanoseconds since boot in a live stack, and since the start of the run in a
//! simulation.

pub use core::time::Duration;

/// A point in time: nanoseconds since an origin that the caller of the stack defines.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Instant(u64);

impl Instant {
    /// The origin.
    pub const ZERO: Instant = Instant(0);
    /// The end of time, 584 years after the origin.
    pub const FAR_FUTURE: Instant = Instant(u64::MAX);

    /// The instant `ns` nanoseconds after the origin.
    pub const fn from_nanos(ns: u64) -> Self {
        Instant(ns)
    }

    /// The instant `ms` milliseconds after the origin.
    pub const fn from_millis(ms: u64) -> Self {
        Instant(ms.saturating_mul(1_000_000))
    }

    /// Nanoseconds since the origin.
    pub const fn as_nanos(self) -> u64 {
        self.0
    }

    /// Milliseconds since the origin modulo 2^32: the timestamp clock of TCP (RFC 7323 section 5.4
    /// requires a tick between 1 ms and 1 s).
    pub const fn as_millis_u32(self) -> u32 {
        (self.0 / 1_000_000) as u32
    }

    /// Time since `earlier`, zero if `earlier` is later.
    pub const fn since(self, earlier: Instant) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

impl core::ops::Add<Duration> for Instant {
    type Output = Instant;
    /// Saturates at [`Instant::FAR_FUTURE`].
    fn add(self, rhs: Duration) -> Instant {
        let ns = u64::try_from(rhs.as_nanos()).unwrap_or(u64::MAX);
        Instant(self.0.saturating_add(ns))
    }
}

impl core::ops::Sub<Instant> for Instant {
    type Output = Duration;
    /// Zero if `rhs` is later.
    fn sub(self, rhs: Instant) -> Duration {
        self.since(rhs)
    }
}
