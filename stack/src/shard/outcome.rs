//! The results of a step or a call as data: readiness events of watched sockets, and completions of posted buffers.

use alloc::sync::Arc;

use crate::base::SlotId;
use crate::mbuf::RecvBuf;
use crate::socket::{Ready, SocketError};

use crate::shard::sync::{AtomicUsize, Ordering};

/// An event of a watched socket.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event {
    /// The socket became ready for this; it may be gone since.
    Ready(SlotId, Ready),
    /// The application closed the socket.
    Closed(SlotId),
    /// The device is lost: every call fails. Once, whatever is watched.
    Down,
}

/// The watch of a socket.
#[derive(Clone, Copy, Default, Debug)]
pub struct Watched {
    /// Readiness to report beside errors and end of stream; `None`: the socket is not watched.
    pub interest: Option<Ready>,
    /// Readiness that is in the list of events already.
    reported: Ready,
}

impl Watched {
    /// Whether events of the socket are reported.
    #[inline]
    pub fn is_watched(&self) -> bool {
        self.interest.is_some()
    }

    /// The part of `ready` not reported yet, which counts as reported until [`Watched::rearm`]; empty if the
    /// socket is not watched.
    pub fn unreported(&mut self, ready: Ready) -> Ready {
        let Some(interest) = self.interest else { return Ready::NONE };
        let unreported = ready.seen_by(interest).without(self.reported);
        self.reported |= unreported;
        unreported
    }

    /// The events were taken: the same readiness may be reported again.
    pub fn rearm(&mut self) {
        self.reported = Ready::NONE;
    }
}

/// Identifies a posted buffer: a number chosen by its owner, returned with its completion.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PostToken(pub u64);

/// The completion of a posted buffer.
#[derive(Debug)]
pub struct RecvOutcome {
    /// The buffer with the bytes received; `None` if it was lost with its stack.
    pub buf: Option<RecvBuf>,
    /// Why the buffer is empty; `None` for data or the end of the stream.
    pub error: Option<SocketError>,
}

/// A posted buffer that is complete.
#[derive(Debug)]
pub struct PostCompletion {
    /// The token with which it was posted.
    pub token: PostToken,
    /// The buffer.
    pub outcome: RecvOutcome,
    /// While this exists the socket is readable: a completion waits to be claimed.
    pub unclaimed: Unclaimed,
}

/// Counts a completion of a connection that is not claimed yet, until it is dropped.
#[derive(Debug)]
pub struct Unclaimed(Arc<AtomicUsize>);

impl Unclaimed {
    /// Counts one more.
    pub fn of(count: &Arc<AtomicUsize>) -> Unclaimed {
        count.fetch_add(1, Ordering::Relaxed);
        Unclaimed(Arc::clone(count))
    }
}

impl Drop for Unclaimed {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_counts_until_it_is_taken() {
        let count = Arc::new(AtomicUsize::new(0));
        let both = [Unclaimed::of(&count), Unclaimed::of(&count)];
        assert_eq!(count.load(Ordering::Relaxed), 2);
        drop(both);
        assert_eq!(count.load(Ordering::Relaxed), 0);
    }
}
