//! Readiness: what a socket can do now without waiting.

use core::ops::{BitOr, BitOrAssign};

/// A set of things that a socket is ready for, or that a poll set is interested in.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Ready(u8);

impl Ready {
    /// Nothing.
    pub const NONE: Ready = Ready(0);
    /// A read returns data, the end of the stream or an error; an accept returns a connection.
    pub const READABLE: Ready = Ready(1);
    /// A write takes at least one byte, or fails.
    pub const WRITABLE: Ready = Ready(2);
    /// The peer has closed its side.
    pub const PEER_CLOSED: Ready = Ready(4);
    /// An error is pending.
    pub const ERROR: Ready = Ready(8);
    /// The connection is over in both directions.
    pub const CLOSED: Ready = Ready(16);
    /// There is at least one byte, whatever the low-water mark says: for readers that are blocked,
    /// which count by themselves.
    #[doc(hidden)]
    pub const SOME: Ready = Ready(32);
    /// What a blocked reader waits for.
    #[doc(hidden)]
    pub const READER: Ready = Ready(1 | 32);

    /// Both sets together; `|` where a constant is wanted.
    #[must_use]
    pub const fn with(self, other: Ready) -> Ready {
        Ready(self.0 | other.0)
    }

    /// What is left without `other`.
    #[must_use]
    pub const fn without(self, other: Ready) -> Ready {
        Ready(self.0 & !other.0)
    }

    /// Whether all of `other` is in `self`.
    pub const fn contains(self, other: Ready) -> bool {
        self.0 & other.0 == other.0
    }

    /// Whether any of `other` is in `self`.
    pub const fn intersects(self, other: Ready) -> bool {
        self.0 & other.0 != 0
    }

    /// What of `self` a watcher of `interest` is told: errors and ends are always told.
    #[must_use]
    pub const fn seen_by(self, interest: Ready) -> Ready {
        Ready(self.0 & (interest.0 | Ready::ERROR.0 | Ready::CLOSED.0))
    }

    /// Whether the set is empty.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }
}

impl BitOr for Ready {
    type Output = Ready;
    fn bitor(self, rhs: Ready) -> Ready {
        Ready(self.0 | rhs.0)
    }
}

impl BitOrAssign for Ready {
    fn bitor_assign(&mut self, rhs: Ready) {
        self.0 |= rhs.0;
    }
}
