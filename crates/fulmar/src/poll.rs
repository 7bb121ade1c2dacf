//! Poll sets: which of many sockets are ready.

use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use fulmar_base::SocketHandle;
use fulmar_stack::{AnyHost, Limit, PollSetCore};

use crate::socket::{Socket, to_io};
use crate::stack::Stack;
use crate::{Ready, TcpListener, TcpStream, UdpSocket};

/// Something that a poll set can watch. Implemented by the sockets of this crate.
pub trait Source: sealed::Sealed {}

pub(crate) mod sealed {
    pub trait Sealed {
        #[doc(hidden)]
        fn slots(&self) -> (Vec<fulmar_base::SocketHandle>, *const ());
    }
}

/// The names of sockets of one stack, and that.
fn slots_of<'a>(sockets: impl IntoIterator<Item = &'a Arc<Socket>>) -> Slots {
    let mut stack = std::ptr::null();
    let name = |s: &'a Arc<Socket>| {
        stack = Arc::as_ptr(&s.stack).cast();
        SocketHandle { shard: s.shard, slot: s.id }
    };
    let names = sockets.into_iter().map(name).collect();
    (names, stack)
}

type Slots = (Vec<SocketHandle>, *const ());

macro_rules! source {
    ($($t:ty),*) => {$(
        impl sealed::Sealed for $t {
            fn slots(&self) -> Slots {
                slots_of([&self.socket])
            }
        }
        impl Source for $t {}
    )*};
}

source!(TcpStream, UdpSocket);

/// A listener has a socket in each shard that it serves.
impl sealed::Sealed for TcpListener {
    fn slots(&self) -> Slots {
        slots_of(self.sockets())
    }
}
impl Source for TcpListener {}

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
///
/// With several shards `wait` runs the one of its thread ([`Stack::on_shard`]), and the service threads of
/// the others run those. A listener that several shards serve may be reported once by each.
pub struct PollSet {
    stack: Stack,
    core: Arc<PollSetCore>,
}

/// Events that one wait returns at most.
const EVENTS_PER_WAIT: usize = 1024;

impl PollSet {
    pub(crate) fn new(stack: &Stack) -> io::Result<PollSet> {
        Ok(PollSet { stack: stack.clone(), core: Arc::new(PollSetCore::new()?) })
    }

    /// Watches a socket, under a token of choice; again to change token or interest. A socket that
    /// is dropped leaves the set.
    ///
    /// # Errors
    /// `InvalidInput` for a socket of another stack.
    pub fn add(&self, source: &impl Source, token: usize, interest: Ready) -> io::Result<()> {
        self.own(source)?.into_iter().try_for_each(|s| {
            let join = self
                .host(s.shard)
                .call(|shard, _| shard.join_set(s.slot, &self.core, token, interest));
            join.map_err(to_io)
        })
    }

    /// No longer watches a socket.
    ///
    /// # Errors
    /// `InvalidInput` if it was not in the set.
    pub fn remove(&self, source: &impl Source) -> io::Result<()> {
        self.own(source)?.into_iter().try_for_each(|s| {
            let leave = self.host(s.shard).call(|shard, _| shard.leave_set(s.slot, &self.core));
            leave.map_err(to_io)
        })
    }

    fn own(&self, source: &impl Source) -> io::Result<Vec<SocketHandle>> {
        let (names, stack) = source.slots();
        if stack == Arc::as_ptr(&self.stack.inner).cast() {
            return Ok(names);
        }
        Err(io::Error::new(io::ErrorKind::InvalidInput, "the socket belongs to another stack"))
    }

    fn host(&self, shard: u16) -> &AnyHost {
        self.stack.inner.host(shard)
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
        if self.stack.shards() > 1 {
            return self.wait_over_shards(events, limit);
        }
        let done = self.host(0).wait_set(&self.core, limit, |shard| {
            shard.collect_set(&self.core, EVENTS_PER_WAIT, |token, ready| {
                events.push(Event { token, ready });
            })
        });
        done.map_err(to_io)?;
        Ok(events.len())
    }

    fn wait_over_shards(&self, events: &mut Vec<Event>, limit: Limit) -> io::Result<usize> {
        let limit = limit.from_now();
        loop {
            let may_be_ready = wait_for_candidates(&self.stack, &self.core, limit)?;
            for host in self.stack.inner.hosts() {
                let room = EVENTS_PER_WAIT - events.len();
                let collect = host.call(|shard, _| {
                    Ok(shard.collect_set(&self.core, room, |token, ready| {
                        events.push(Event { token, ready });
                    }))
                });
                collect.map_err(to_io)?;
            }
            if !events.is_empty() || !may_be_ready {
                return Ok(events.len());
            }
        }
    }
}

/// Waits until sockets of any shard may be ready, running this thread's shard meanwhile. False: the time
/// is over.
pub(crate) fn wait_for_candidates(
    stack: &Stack,
    set: &Arc<PollSetCore>,
    limit: Limit,
) -> io::Result<bool> {
    let host = stack.inner.host(stack.shard_of_thread());
    let found = host.wait_set(set, limit, |_| usize::from(set.has_candidates()));
    Ok(found.map_err(to_io)? > 0)
}

impl AsRawFd for PollSet {
    /// Readable while a member may be ready. From the first call on the service thread polls for
    /// this set.
    fn as_raw_fd(&self) -> RawFd {
        let is_new = !self.core.is_exposed();
        let fd = self.host(0).expose_set(&self.core);
        if is_new {
            self.stack.inner.hosts().skip(1).for_each(AnyHost::poll_for_sets);
        }
        fd
    }
}

impl Drop for PollSet {
    fn drop(&mut self) {
        self.stack.inner.hosts().for_each(|host| host.forget_set(&self.core));
    }
}

impl fmt::Debug for PollSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PollSet").finish_non_exhaustive()
    }
}
