//! Poll sets: readiness of many sockets (as epoll(7)).

mod descriptors;
mod waker;

use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crate::runtime::{Host, Limit, PollSetCore};
use fulmar_stack::base::SocketHandle;

use fulmar_stack::socket::SocketError;

use crate::api::socket::{Socket, to_io};
use crate::api::stack::Stack;
use crate::icmp::EchoSocket;
use crate::{Ready, TcpListener, TcpStream, UdpSocket};
use descriptors::Descriptors;
pub use waker::Waker;
use waker::Woken;

/// Something that a poll set can watch. Implemented by the sockets of this crate.
///
/// ```
/// # use fulmar::{Stack, UdpSocket, devices};
/// use fulmar::{PollSet, Ready, Source};
///
/// fn watch(set: &PollSet, sockets: &[impl Source]) -> std::io::Result<()> {
///     sockets.iter().enumerate().try_for_each(|(token, socket)| set.add(socket, token, Ready::READABLE))
/// }
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let (device, _peer) = devices::link_pair()?;
/// # let stack = Stack::builder().device(device).address("10.0.0.1/24".parse()?).unlisted().build()?;
/// # watch(&stack.poll_set()?, &[UdpSocket::bind(&stack, "10.0.0.1:53")?])?;
/// # Ok(())
/// # }
/// ```
pub trait Source: sealed::Sealed {}

pub(crate) mod sealed {
    pub trait Sealed {
        fn slots(&self) -> (Vec<fulmar_stack::base::SocketHandle>, *const ());
    }
}

/// The handles of sockets of one stack, and the identity of the stack.
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

source!(TcpStream, UdpSocket, EchoSocket);

/// A listener has a socket in each shard that it serves.
impl sealed::Sealed for TcpListener {
    fn slots(&self) -> Slots {
        slots_of(self.sockets())
    }
}
impl Source for TcpListener {}

/// A ready socket, a ready descriptor of the host, or a [`Waker`] that was used.
///
/// ```
/// # use fulmar::{Ready, Stack, UdpSocket, devices};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let (device, _peer) = devices::link_pair()?;
/// # let stack = Stack::builder().device(device).address("10.0.0.1/24".parse()?).unlisted().build()?;
/// # let socket = UdpSocket::bind(&stack, "10.0.0.1:53")?;
/// let set = stack.poll_set()?;
/// set.add(&socket, 7, Ready::READABLE | Ready::WRITABLE)?;
/// let mut events = Vec::new();
/// set.wait(&mut events, None)?;
/// for event in &events {
///     println!("socket {}: readable {}", event.token, event.ready.is_readable());
/// }
/// # assert_eq!((events[0].token, events[0].ready.is_writable()), (7, true));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Event {
    /// The token under which it was added.
    pub token: usize,
    /// Its readiness: of its interest, and errors and hang-ups in any case.
    pub ready: Ready,
}

/// A set of sockets of one stack, level-triggered like `epoll`: a socket is reported as long as it is ready. With
/// [`Ready::EDGE`] in its interest it is reported once for each change of readiness.
///
/// [`PollSet::wait`] runs the stack itself while it waits. It also returns for [wakers](Waker) of other
/// threads and for [descriptors of the host](PollSet::add_fd).
///
/// Between a wait that returns events and the next one the calling thread is in a *turn* of its event loop: frames of
/// its calls are sent as one burst by the next wait, or when the burst is full. They are sent earlier if another thread
/// calls the stack, if the thread waits for anything else in the stack, and after two milliseconds; from then on each
/// call of the turn sends its own frames. Waits with a zero time-out begin no turn.
///
/// The descriptor of the set can be watched by another event loop instead: it is readable while a member may be ready;
/// then call `wait` with a zero time-out. The service thread of the stack polls the device in that case.
///
/// ```
/// # use fulmar::{Ready, Stack, TcpListener, devices};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let (device, _peer) = devices::link_pair()?;
/// # let stack = Stack::builder().device(device).address("10.0.0.1/24".parse()?).build()?;
/// const LISTENER: usize = 0;
/// const STOP: usize = 1;
/// let listener = TcpListener::bind(&stack, "10.0.0.1:80")?;
/// listener.set_nonblocking(true)?;
/// let set = stack.poll_set()?;
/// set.add(&listener, LISTENER, Ready::READABLE)?;
/// let waker = set.waker(STOP);
/// std::thread::spawn(move || waker.wake());
/// let mut events = Vec::new();
/// 'serve: loop {
///     set.wait(&mut events, None)?;
///     for event in &events {
///         match event.token {
///             LISTENER => drop(listener.accept()),
///             _ => break 'serve,
///         }
///     }
/// }
/// # Ok(())
/// # }
/// ```
///
/// With several shards `wait` runs the shard of its thread ([`Stack::on_shard`]); service threads run the others. A
/// listener that several shards serve may be reported once by each.
pub struct PollSet {
    stack: Stack,
    core: Arc<PollSetCore>,
    woken: Arc<Woken>,
    /// Created with the first descriptor.
    descriptors: Mutex<Option<Descriptors>>,
}

/// The error for a socket that is not in the set.
fn not_a_member(e: SocketError) -> io::Error {
    match e {
        SocketError::Invalid => {
            io::Error::new(io::ErrorKind::NotFound, "the socket is not in the poll set")
        }
        e => to_io(e),
    }
}

/// Most events that one wait returns.
const EVENTS_PER_WAIT: usize = 1024;

impl PollSet {
    pub(crate) fn new(stack: &Stack) -> io::Result<PollSet> {
        let core = Arc::new(PollSetCore::of_event_loop()?);
        let woken = Arc::new(Woken::new(&core));
        Ok(PollSet { stack: stack.clone(), core, woken, descriptors: Mutex::default() })
    }

    /// Adds a socket with a token; for a socket in the set, as [`PollSet::modify`]. A dropped socket is removed from
    /// the set.
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

    /// Changes token and interest of a socket in the set.
    ///
    /// # Errors
    /// `NotFound` if it is not in the set; `InvalidInput` for a socket of another stack.
    pub fn modify(&self, source: &impl Source, token: usize, interest: Ready) -> io::Result<()> {
        self.own(source)?.into_iter().try_for_each(|s| {
            let host = self.host(s.shard);
            host.call(|shard, _| shard.rejoin_set(s.slot, &self.core, token, interest))
                .map_err(not_a_member)
        })
    }

    /// A handle with which other threads end a wait of this set, which then reports `token`.
    pub fn waker(&self, token: usize) -> Waker {
        Waker::new(&self.woken, token)
    }

    /// Adds a descriptor of the host: a kernel socket, a pipe, a timer, another poll set; for a descriptor in the set,
    /// changes its token and interest. A closed descriptor is removed from the set. The first one starts a thread,
    /// which sleeps on the descriptors while none is ready.
    ///
    /// # Errors
    /// Those of `epoll_ctl(2)`: `EPERM` for a regular file, which is always ready.
    pub fn add_fd(&self, fd: impl AsFd, token: usize, interest: Ready) -> io::Result<()> {
        let mut descriptors = self.descriptors();
        if descriptors.is_none() {
            *descriptors = Some(Descriptors::new(&self.core)?);
        }
        descriptors.as_ref().map_or(Ok(()), |d| d.add(fd, token, interest))
    }

    /// Removes a descriptor.
    ///
    /// # Errors
    /// `NotFound` if it was not in the set.
    pub fn remove_fd(&self, fd: impl AsFd) -> io::Result<()> {
        match &*self.descriptors() {
            Some(d) => d.remove(fd),
            None => Err(not_a_member(SocketError::Invalid)),
        }
    }

    fn descriptors(&self) -> std::sync::MutexGuard<'_, Option<Descriptors>> {
        self.descriptors.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Removes a socket.
    ///
    /// # Errors
    /// `NotFound` if it was not in the set; `InvalidInput` for a socket of another stack.
    pub fn remove(&self, source: &impl Source) -> io::Result<()> {
        self.own(source)?.into_iter().try_for_each(|s| {
            let leave = self.host(s.shard).call(|shard, _| shard.leave_set(s.slot, &self.core));
            leave.map_err(not_a_member)
        })
    }

    fn own(&self, source: &impl Source) -> io::Result<Vec<SocketHandle>> {
        let (names, stack) = source.slots();
        if stack == Arc::as_ptr(&self.stack.inner).cast() {
            return Ok(names);
        }
        Err(io::Error::new(io::ErrorKind::InvalidInput, "the socket belongs to another stack"))
    }

    fn host(&self, shard: u16) -> &Arc<Host> {
        self.stack.inner.host(shard)
    }

    /// Waits until at least one member is ready or the time is over (`None`: for ever), and replaces the contents of
    /// `events`. Returns how many there are, at most 1,024; further ready members are reported by the next call.
    ///
    /// # Errors
    /// `EBADF` in a forked child.
    pub fn wait(&self, events: &mut Vec<Event>, timeout: Option<Duration>) -> io::Result<usize> {
        events.clear();
        let limit = match timeout {
            None => Limit::Forever,
            Some(Duration::ZERO) => Limit::DoNotWait,
            Some(t) => Limit::For(t).started(),
        };
        loop {
            let may_be_ready = match self.stack.shards() {
                1 => self.wait_for_sockets(events, limit)?,
                _ => self.wait_over_shards(events, limit)?,
            };
            // After the sockets, since this clears the descriptor of the set.
            if self.core.take_others() {
                self.collect_others(events)?;
            }
            if !events.is_empty() || !may_be_ready {
                return Ok(events.len());
            }
        }
    }

    /// Appends the ready sockets. False: the time is over.
    fn wait_for_sockets(&self, events: &mut Vec<Event>, limit: Limit) -> io::Result<bool> {
        let found = self.host(0).wait_set(&self.core, limit, |shard| {
            let sockets = shard.collect_set(&self.core, EVENTS_PER_WAIT, |token, ready| {
                events.push(Event { token, ready });
            });
            sockets + usize::from(self.core.has_others())
        });
        Ok(found.map_err(to_io)? > 0)
    }

    fn wait_over_shards(&self, events: &mut Vec<Event>, limit: Limit) -> io::Result<bool> {
        let may_be_ready = wait_for_candidates(&self.stack, &self.core, limit)?;
        for host in self.stack.inner.hosts() {
            let space = EVENTS_PER_WAIT - events.len();
            let collect = host.call(|shard, _| {
                Ok(shard.collect_set(&self.core, space, |token, ready| {
                    events.push(Event { token, ready });
                }))
            });
            collect.map_err(to_io)?;
        }
        Ok(may_be_ready)
    }

    /// Appends the wakers that were used and the descriptors that are ready.
    fn collect_others(&self, events: &mut Vec<Event>) -> io::Result<()> {
        let woken = self.woken.take().into_iter();
        events.extend(woken.map(|token| Event { token, ready: Ready::READABLE }));
        let space = EVENTS_PER_WAIT.saturating_sub(events.len());
        if let Some(descriptors) = &*self.descriptors()
            && (space == 0 || descriptors.collect(events, space)?)
        {
            // Level-triggered: the next wait checks them again.
            self.core.signal_others();
        }
        Ok(())
    }
}

/// Waits until sockets of any shard may be ready, and runs the shard of this thread meanwhile. False: the time is over.
pub(crate) fn wait_for_candidates(
    stack: &Stack,
    set: &Arc<PollSetCore>,
    limit: Limit,
) -> io::Result<bool> {
    let host = stack.inner.host(stack.shard_of_thread());
    let found = host.wait_set(set, limit, |_| usize::from(set.has_candidates()));
    Ok(found.map_err(to_io)? > 0)
}

impl AsFd for PollSet {
    /// Readable while a member may be ready. From the first call on the service thread polls for
    /// this set.
    fn as_fd(&self) -> BorrowedFd<'_> {
        let is_new = !self.core.is_exposed();
        self.host(0).expose_set(&self.core);
        if is_new {
            self.stack.inner.hosts().skip(1).for_each(|host| host.poll_for_sets());
        }
        self.core.as_fd()
    }
}

impl AsRawFd for PollSet {
    /// As [`PollSet::as_fd`].
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

impl Drop for PollSet {
    fn drop(&mut self) {
        if !self.stack.inner.is_ours()
            && let Some(descriptors) = self.descriptors().take()
        {
            descriptors.forget();
        }
        self.stack.inner.hosts().for_each(|host| host.forget_set(&self.core));
    }
}

impl fmt::Debug for PollSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PollSet").finish_non_exhaustive()
    }
}
