//! Poll sets: which of many sockets are ready.

use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use fulmar_base::SlotId;
use fulmar_stack::{Limit, PollSetCore};

use crate::socket::{Socket, to_io};
use crate::stack::{Inner, Stack};
use crate::{Ready, TcpListener, TcpStream, UdpSocket};

/// Something that a poll set can watch. Implemented by the sockets of this crate.
pub trait Source: sealed::Sealed {}

pub(crate) mod sealed {
    pub trait Sealed {
        #[doc(hidden)]
        fn slot(&self) -> (fulmar_base::SlotId, *const ());
    }
}

fn slot_of(s: &Socket) -> (SlotId, *const ()) {
    (s.id, Arc::as_ptr(&s.stack).cast())
}

macro_rules! source {
    ($($t:ty),*) => {$(
        impl sealed::Sealed for $t {
            fn slot(&self) -> (SlotId, *const ()) {
                slot_of(&self.socket)
            }
        }
        impl Source for $t {}
    )*};
}

source!(TcpStream, TcpListener, UdpSocket);

/// A socket that is ready.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Event {
    /// The token under which it was added.
    pub token: usize,
    /// What it is ready for.
    pub ready: Ready,
}

/// A set of sockets of one stack, level-triggered like `epoll`: a socket is reported as long as it
/// is ready.
///
/// [`PollSet::wait`] runs the stack itself while it waits. Its descriptor can be handed to any
/// event loop instead: it is readable while a member may be ready; then call `wait` with a zero
/// time-out. In that case the stack's service thread does the polling.
pub struct PollSet {
    stack: Arc<Inner>,
    core: Arc<PollSetCore>,
}

/// Events that one wait returns at most.
const EVENTS_PER_WAIT: usize = 1024;

impl PollSet {
    pub(crate) fn new(stack: &Stack) -> io::Result<PollSet> {
        Ok(PollSet { stack: Arc::clone(&stack.inner), core: Arc::new(PollSetCore::new()?) })
    }

    /// Watches a socket, under a token of choice; again to change token or interest. A socket that
    /// is dropped leaves the set.
    ///
    /// # Errors
    /// `InvalidInput` for a socket of another stack.
    pub fn add(&self, source: &impl Source, token: usize, interest: Ready) -> io::Result<()> {
        let id = self.own(source)?;
        let done = self.stack.host.call(|shard, _| shard.join_set(id, &self.core, token, interest));
        done.map_err(to_io)
    }

    /// No longer watches a socket.
    ///
    /// # Errors
    /// `InvalidInput` if it was not in the set.
    pub fn remove(&self, source: &impl Source) -> io::Result<()> {
        let id = self.own(source)?;
        self.stack.host.call(|shard, _| shard.leave_set(id, &self.core)).map_err(to_io)
    }

    fn own(&self, source: &impl Source) -> io::Result<SlotId> {
        let (id, stack) = source.slot();
        if stack == Arc::as_ptr(&self.stack).cast() {
            return Ok(id);
        }
        Err(io::Error::new(io::ErrorKind::InvalidInput, "the socket belongs to another stack"))
    }

    /// Waits until at least one socket is ready or the time is over (`None`: for ever), and replaces
    /// the contents of `events`. Returns how many there are.
    ///
    /// # Errors
    /// `EBADF` in a forked child.
    pub fn wait(&self, events: &mut Vec<Event>, timeout: Option<Duration>) -> io::Result<usize> {
        events.clear();
        let limit = match timeout {
            None => Limit::Forever,
            Some(Duration::ZERO) => Limit::DoNotWait,
            Some(t) => Limit::For(t),
        };
        let done = self.stack.host.wait_set(&self.core, limit, |shard| {
            shard.collect_set(&self.core, EVENTS_PER_WAIT, |token, ready| {
                events.push(Event { token, ready });
            })
        });
        done.map_err(to_io)?;
        Ok(events.len())
    }
}

impl AsRawFd for PollSet {
    /// Readable while a member may be ready. From the first call on the service thread polls for
    /// this set.
    fn as_raw_fd(&self) -> RawFd {
        self.stack.host.expose_set(&self.core)
    }
}

impl Drop for PollSet {
    fn drop(&mut self) {
        self.stack.host.forget_set(&self.core);
    }
}

impl fmt::Debug for PollSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PollSet").finish_non_exhaustive()
    }
}
