//! Readiness: the operations that would not block (`poll` events).

use core::ops::{BitOr, BitOrAssign};

/// A set of readiness events of a socket, or of events that a poll set is interested in.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Ready(u8);

/// The names of a set's members, as a constant of the source would be written.
pub fn fmt_flags(
    f: &mut core::fmt::Formatter<'_>,
    names: impl Iterator<Item = &'static str>,
) -> core::fmt::Result {
    let mut is_empty = true;
    for name in names {
        f.write_str(if is_empty { "" } else { " | " })?;
        f.write_str(name)?;
        is_empty = false;
    }
    if is_empty { f.write_str("NONE") } else { Ok(()) }
}

/// `READABLE | WRITABLE`.
impl core::fmt::Debug for Ready {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let all = [
            (Ready::READABLE, "READABLE"),
            (Ready::WRITABLE, "WRITABLE"),
            (Ready::PEER_CLOSED, "PEER_CLOSED"),
            (Ready::ERROR, "ERROR"),
            (Ready::CLOSED, "CLOSED"),
            (Ready::EDGE, "EDGE"),
            (Ready::SOME, "SOME"),
        ];
        fmt_flags(f, all.into_iter().filter(|(flag, _)| self.contains(*flag)).map(|(_, n)| n))
    }
}

impl Ready {
    /// The empty set.
    pub const NONE: Ready = Ready(0);
    /// A read does not block (`EPOLLIN`): it returns data, the end of the stream (0 bytes) or an error; an
    /// accept returns a connection. A socket that is ready for [`Ready::PEER_CLOSED`], [`Ready::ERROR`] or
    /// [`Ready::CLOSED`] is readable too.
    pub const READABLE: Ready = Ready(1);
    /// A write does not block (`EPOLLOUT`): it accepts at least one byte or fails. A socket with an error is
    /// writable too.
    pub const WRITABLE: Ready = Ready(2);
    /// The next read returns 0 bytes: the peer has sent a FIN and everything before it is read, or
    /// receiving was shut down (`EPOLLRDHUP`, which does not wait for the reader).
    pub const PEER_CLOSED: Ready = Ready(4);
    /// An error is pending, which the next call returns (`EPOLLERR`). Reported whatever the interest.
    pub const ERROR: Ready = Ready(8);
    /// The connection is over (`EPOLLHUP`): both FINs are acknowledged, as in TIME-WAIT, or it was reset. Linux says so
    /// as soon as both are sent. Reported whatever the interest.
    pub const CLOSED: Ready = Ready(16);
    /// Only of an interest: edge-triggered (`EPOLLET`). The socket is reported when its readiness changes,
    /// and not again until it changes once more: read or write it until `WouldBlock`.
    pub const EDGE: Ready = Ready(64);
    /// At least one byte is readable, regardless of the low-water mark: for blocked readers, which check
    /// the mark themselves.
    pub const SOME: Ready = Ready(32);
    /// The events that wake a blocked reader.
    pub const READER: Ready = Ready(1 | 32);

    /// The union of two sets, for constants.
    #[must_use]
    pub const fn with(self, other: Ready) -> Ready {
        Ready(self.0 | other.0)
    }

    /// The set without the events of `other`.
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

    /// The events reported for an `interest`: those in it, and always errors and `CLOSED`.
    #[must_use]
    pub const fn seen_by(self, interest: Ready) -> Ready {
        Ready(self.0 & (interest.0 | Ready::ERROR.0 | Ready::CLOSED.0))
    }

    /// Whether a read (or an accept) does not block: [`Ready::READABLE`].
    pub const fn is_readable(self) -> bool {
        self.contains(Ready::READABLE)
    }

    /// Whether a write does not block: [`Ready::WRITABLE`].
    pub const fn is_writable(self) -> bool {
        self.contains(Ready::WRITABLE)
    }

    /// Whether the next read returns the end of the stream: [`Ready::PEER_CLOSED`].
    pub const fn is_peer_closed(self) -> bool {
        self.contains(Ready::PEER_CLOSED)
    }

    /// Whether an error is pending: [`Ready::ERROR`].
    pub const fn is_error(self) -> bool {
        self.contains(Ready::ERROR)
    }

    /// Whether the connection is over in both directions: [`Ready::CLOSED`].
    pub const fn is_closed(self) -> bool {
        self.contains(Ready::CLOSED)
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
