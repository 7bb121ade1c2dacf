//! What a step or a call leaves for whoever runs the shard: which sockets became ready, and which posted
//! buffers are over. Nothing is left of sockets that nobody watches.

use alloc::sync::Arc;

use fulmar_base::SlotId;
use fulmar_mbuf::RecvBuf;
use fulmar_socket::{Ready, SocketError};

use crate::sync::{AtomicUsize, Ordering};

/// Something that those who watch a socket are to be told.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event {
    /// It became ready for this; the socket may be gone since.
    Ready(SlotId, Ready),
    /// Its user let go of it.
    Closed(SlotId),
}

/// What a socket knows of those who watch it.
#[derive(Clone, Copy, Default, Debug)]
pub struct Watched {
    /// What they want to be told of, errors and ends apart; `None`: nobody watches.
    pub interest: Option<Ready>,
    /// Of that, what the list has already.
    told: Ready,
}

impl Watched {
    /// What is new of this to those who watch, until [`Watched::was_told`]; empty if nobody does.
    pub fn news(&mut self, ready: Ready) -> Ready {
        let Some(interest) = self.interest else { return Ready::NONE };
        let news = ready.seen_by(interest).without(self.told);
        self.told |= news;
        news
    }

    /// What was told was taken.
    pub fn was_told(&mut self) {
        self.told = Ready::NONE;
    }
}

/// What stands for a posted buffer: a number that whoever posts it chooses, and gets back with it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PostToken(pub u64);

/// How a posted buffer ended.
#[derive(Debug)]
pub struct RecvOutcome {
    /// The buffer with what it received; `None` if its stack went away with it.
    pub buf: Option<RecvBuf>,
    /// Why it has nothing, if that is not the end of the stream.
    pub error: Option<SocketError>,
}

/// A posted buffer that is over.
#[derive(Debug)]
pub struct PostOver {
    /// What stands for it.
    pub token: PostToken,
    /// The buffer.
    pub outcome: RecvOutcome,
    /// As long as this exists the socket is readable: there is a buffer to be taken.
    pub untaken: Untaken,
}

/// Counts a buffer of a connection that is over and that nobody has taken.
#[derive(Debug)]
pub struct Untaken(Arc<AtomicUsize>);

impl Untaken {
    /// One more.
    pub fn of(count: &Arc<AtomicUsize>) -> Untaken {
        count.fetch_add(1, Ordering::Relaxed);
        Untaken(Arc::clone(count))
    }
}

impl Drop for Untaken {
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
        let both = [Untaken::of(&count), Untaken::of(&count)];
        assert_eq!(count.load(Ordering::Relaxed), 2);
        drop(both);
        assert_eq!(count.load(Ordering::Relaxed), 0);
    }
}
