//! How long a call may wait.

use fulmar_stack::base::{Duration, Instant};

use crate::runtime::sys;

/// How long a call may wait.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(clippy::exhaustive_enums, reason = "internal: its users are released with it")]
pub enum Limit {
    /// Not at all.
    DoNotWait,
    /// At most this time.
    For(Duration),
    /// At most this number of nanoseconds, as a socket stores it. It is converted when the call has to wait.
    ForNanos(u64),
    /// Until this time: for a call that waits several times.
    Until(Instant),
    /// Until it is done.
    Forever,
}

impl Limit {
    /// The same limit with its end fixed, for a call that waits several times.
    #[must_use]
    pub(crate) fn started(self) -> Limit {
        match self {
            Limit::For(d) => Limit::Until(sys::now() + d),
            Limit::ForNanos(ns) => Limit::Until(sys::now() + Duration::from_nanos(ns)),
            other => other,
        }
    }

    /// When the wait ends: `Some(None)` is never; `None`: the call does not wait.
    pub(crate) fn end(self, now: Instant) -> Option<Option<Instant>> {
        match self {
            Limit::DoNotWait => None,
            Limit::Forever => Some(None),
            Limit::For(d) => Some(Some(now + d)),
            Limit::ForNanos(ns) => Some(Some(now + Duration::from_nanos(ns))),
            Limit::Until(at) => Some(Some(at)),
        }
    }
}
