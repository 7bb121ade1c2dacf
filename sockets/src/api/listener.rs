//! The TCP listener: one socket in each shard that serves its port.

use std::fmt;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use crate::runtime::{Limit, PollSetCore, WatchedShard};
use fulmar_stack::base::SlotId;
use fulmar_stack::shard::{ListenOptions, ListenerStat, SocketOptions};
use fulmar_stack::socket::{Ready, SocketError};

use crate::api::error::invalid;
use crate::api::pending::PendingConnection;
use crate::api::poll::wait_for_candidates;
use crate::api::socket::{Socket, each_address, stack_of, to_io};
use crate::api::stack::Stack;
use crate::api::tcp::{DEFAULT_TTL, TcpStream, valid_options, valid_ttl};

/// A TCP listener.
///
/// With several shards it listens in all of them: the shard that owns a flow sets its connection up and queues
/// it. A listener bound by a handle of one shard ([`Stack::on_shard`]) accepts the connections of that shard
/// alone: with one such listener per thread, threads share nothing.
///
/// ```
/// # use std::io::{Read, Write};
/// # use fulmar::{Stack, TcpListener, TcpStream, devices};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let (a, b) = devices::link_pair()?;
/// # let server = Stack::builder().device(a).address("10.0.0.1/24".parse()?).unlisted().build()?;
/// # let stack = Stack::builder().device(b).address("10.0.0.2/24".parse()?).unlisted().build()?;
/// let listener = TcpListener::bind(&server, "0.0.0.0:7")?;
/// # let mut client = TcpStream::connect(&stack, "10.0.0.1:7")?;
/// # client.write_all(b"hello")?;
/// # client.shutdown(std::net::Shutdown::Write)?;
/// for stream in listener.incoming() {
///     let mut stream = stream?;
///     let mut bytes = Vec::new();
///     stream.read_to_end(&mut bytes)?;
///     stream.write_all(&bytes)?;
/// #   break;
/// }
/// # let mut echo = [0; 5];
/// # client.read_exact(&mut echo)?;
/// # Ok(())
/// # }
/// ```
pub struct TcpListener {
    parts: Arc<Parts>,
}

/// A listener's sockets.
struct Parts {
    /// One per shard that it serves; the first keeps the options of the calls.
    sockets: Vec<Arc<Socket>>,
    /// Reports the sockets with a queued connection; `None` for a single socket.
    ready: Option<Arc<PollSetCore>>,
}

/// The result of a step of a shard.
type Stepped<T> = Result<Poll<T>, SocketError>;

/// The accepted connection, and its listening socket.
type Took<'a, T> = io::Result<(&'a Arc<Socket>, T)>;

/// Times that a port chosen in one shard may be taken in another before the search ends.
const PORT_CHOICES: usize = 16;

impl TcpListener {
    /// Listens on the first address that can be bound, with the default options.
    ///
    /// # Errors
    /// `AddrInUse`, `AddrNotAvailable`; `NetworkDown` if the device is gone for good, as one of
    /// [`devices::link_pair`](crate::devices::link_pair) is after the stack on the other.
    pub fn bind(stack: &Stack, addr: impl ToSocketAddrs) -> io::Result<TcpListener> {
        TcpListener::bind_with(stack, addr, ListenOptions::default())
    }

    /// Listens with options: backlog, reuse-address, IPv6 only, and the options that its connections inherit.
    ///
    /// # Errors
    /// As [`TcpListener::bind`], and as [`TcpListener::set_options`] for the options that connections inherit.
    pub fn bind_with(
        stack: &Stack,
        addr: impl ToSocketAddrs,
        options: ListenOptions,
    ) -> io::Result<TcpListener> {
        valid_options(options.socket)?;
        each_address(addr, |a| {
            let parts = if stack.shards() == 1 || stack.home.is_some() {
                let socket = stack.new_socket(|shard| shard.tcp_listen(a, options))?;
                Parts { sockets: vec![socket], ready: None }
            } else {
                listen_everywhere(stack, a, options)?
            };
            Ok(TcpListener { parts: Arc::new(parts) })
        })
    }

    pub(crate) fn sockets(&self) -> &[Arc<Socket>] {
        &self.parts.sockets
    }

    fn first(&self) -> &Arc<Socket> {
        self.sockets().first().expect("invariant: a listener is made with at least one socket")
    }

    /// Waits for a connection.
    ///
    /// # Errors
    /// `WouldBlock` if non-blocking. `InvalidInput`: its connections are pending first
    /// ([`TcpListener::pending`]).
    pub fn accept(&self) -> io::Result<(TcpStream, SocketAddr)> {
        let (listener, (id, peer)) = self.take(|shard, id| shard.tcp_accept(id)).map_err(|e| {
            explain_invalid(e, "the listener accepts conditionally: use TcpListener::pending")
        })?;
        let socket = Socket::new(Arc::clone(&listener.stack), listener.shard, id);
        Ok((TcpStream { socket }, peer))
    }

    /// Waits for a SYN that the program is to answer or reject, of a listener with
    /// [`ListenOptions::conditional_accept`]. In a poll set the listener is readable while one is pending.
    ///
    /// # Errors
    /// `WouldBlock` if non-blocking. `InvalidInput`: a listener that accepts by itself.
    pub fn pending(&self) -> io::Result<PendingConnection> {
        let (s, pending) = self.take(|shard, id| shard.tcp_pending(id)).map_err(|e| {
            explain_invalid(
                e,
                "the listener accepts connections itself: see ListenOptions::conditional_accept",
            )
        })?;
        Ok(PendingConnection::new(s, pending))
    }

    /// Waits until `step` is done on one of its sockets.
    fn take<T>(&self, step: impl Fn(&mut WatchedShard, SlotId) -> Stepped<T>) -> Took<'_, T> {
        let s = self.first();
        if let Some(ready) = &self.parts.ready {
            return self.take_from_any(ready, s.read_limit().started(), step);
        }
        let taken = s.wait(Ready::READABLE, s.read_limit(), |shard, _| step(shard, s.id))?;
        Ok((s, taken))
    }

    fn take_from_any<T>(
        &self,
        ready: &Arc<PollSetCore>,
        limit: Limit,
        step: impl Fn(&mut WatchedShard, SlotId) -> Stepped<T>,
    ) -> Took<'_, T> {
        let stack = stack_of(self.first());
        loop {
            if let Some(taken) = self.try_take(stack.shard_of_thread(), &step)? {
                return Ok(taken);
            }
            if limit == Limit::DoNotWait {
                self.sockets().iter().try_for_each(|s| s.host().poll().map(drop)).map_err(to_io)?;
                let taken = self.try_take(stack.shard_of_thread(), &step)?;
                return taken.ok_or_else(|| io::ErrorKind::WouldBlock.into());
            }
            if !wait_for_candidates(&stack, ready, limit)? {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            // Those that are ready stay in the list; the others leave it.
            for s in self.sockets() {
                s.call(|shard, _| Ok(shard.collect_set(ready, 1, |_, _| {})))?;
            }
        }
    }

    /// Takes a queued connection of any shard, of this thread's shard first.
    fn try_take<T>(
        &self,
        own: u16,
        step: impl Fn(&mut WatchedShard, SlotId) -> Stepped<T>,
    ) -> io::Result<Option<(&Arc<Socket>, T)>> {
        let (before, from_own) = self.sockets().split_at(usize::from(own));
        for s in from_own.iter().chain(before) {
            if let Poll::Ready(taken) = s.call(|shard, _| step(shard, s.id))? {
                return Ok(Some((s, taken)));
            }
        }
        Ok(None)
    }

    /// An iterator over accepted connections that never ends.
    pub fn incoming(&self) -> impl Iterator<Item = io::Result<TcpStream>> + '_ {
        std::iter::repeat_with(|| self.accept().map(|(s, _)| s))
    }

    /// The state of queues, limits and SYN cookies, summed over all shards.
    ///
    /// # Errors
    /// The socket is gone.
    pub fn stat(&self) -> io::Result<ListenerStat> {
        self.sockets().iter().try_fold(ListenerStat::default(), |all, s| {
            Ok(all.with(s.call(|shard, _| shard.listener(s.id).map(|l| l.stat()))?))
        })
    }

    /// The local address.
    ///
    /// # Errors
    /// The socket is gone.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.first().addresses()?.0.ok_or_else(|| to_io(SocketError::Invalid))
    }

    /// Another handle to the same listener.
    ///
    /// # Errors
    /// Never.
    pub fn try_clone(&self) -> io::Result<TcpListener> {
        Ok(TcpListener { parts: Arc::clone(&self.parts) })
    }

    /// `accept` returns `WouldBlock` instead of waiting.
    ///
    /// # Errors
    /// Never.
    pub fn set_nonblocking(&self, on: bool) -> io::Result<()> {
        self.first().set_nonblocking(on);
        Ok(())
    }

    /// Sets the time-out of `accept`: it fails with `WouldBlock` after it. `None`: no limit.
    ///
    /// # Errors
    /// `InvalidInput` for zero.
    pub fn set_accept_timeout(&self, t: Option<Duration>) -> io::Result<()> {
        self.first().set_read_timeout(t)
    }

    /// Time to live of the packets of future connections.
    ///
    /// # Errors
    /// The socket is gone; `InvalidInput` outside 1 to 255.
    pub fn set_ttl(&self, ttl: u32) -> io::Result<()> {
        let ttl = valid_ttl(ttl)?;
        self.with_options(|o| o.ttl = Some(ttl))
    }

    /// Time to live of the packets of future connections.
    ///
    /// # Errors
    /// The socket is gone.
    pub fn ttl(&self) -> io::Result<u32> {
        Ok(u32::from(self.options()?.ttl.unwrap_or(DEFAULT_TTL)))
    }

    /// Options that future connections inherit, from their SYN,ACK on.
    ///
    /// # Errors
    /// The socket is gone.
    pub fn options(&self) -> io::Result<SocketOptions> {
        let s = self.first();
        s.call(|shard, _| shard.listener(s.id).map(|l| l.options))
    }

    /// Sets the options that future connections inherit: see [`ListenOptions::socket`].
    ///
    /// # Errors
    /// The socket is gone; `InvalidInput` for a time to live of 0, or a segment outside 88 to 32,767 bytes.
    pub fn set_options(&self, options: SocketOptions) -> io::Result<()> {
        let options = valid_options(options)?;
        self.with_options(|o| *o = options)
    }

    fn with_options(&self, f: impl Fn(&mut SocketOptions)) -> io::Result<()> {
        let set =
            |s: &Arc<Socket>| s.call(|shard, _| shard.listener(s.id).map(|l| f(&mut l.options)));
        self.sockets().iter().try_for_each(set)
    }

    /// Takes the pending error (SO_ERROR), of the first shard that has one.
    ///
    /// # Errors
    /// The socket is gone.
    pub fn take_error(&self) -> io::Result<Option<io::Error>> {
        let mut errors = self.sockets().iter().map(|s| s.take_error());
        errors.find(|e| !matches!(e, Ok(None))).unwrap_or(Ok(None))
    }
}

/// An EINVAL with its reason.
fn explain_invalid(e: io::Error, why: &str) -> io::Error {
    if e.kind() == io::ErrorKind::InvalidInput { invalid(why) } else { e }
}

/// The same port in every shard.
fn listen_everywhere(stack: &Stack, addr: SocketAddr, options: ListenOptions) -> io::Result<Parts> {
    let is_chosen = addr.port() == 0 && !options.any_port;
    let mut choices = if is_chosen { PORT_CHOICES } else { 1 };
    let sockets = loop {
        choices -= 1;
        match listen_with(stack, addr, options) {
            Err(e) if e.kind() == io::ErrorKind::AddrInUse && choices > 0 => {}
            sockets => break sockets?,
        }
    };
    let ready = Arc::new(PollSetCore::new()?);
    for s in &sockets {
        s.call(|shard, _| shard.join_set(s.id, &ready, 0, Ready::READABLE))?;
    }
    Ok(Parts { sockets, ready: Some(ready) })
}

fn listen_with(
    stack: &Stack,
    addr: SocketAddr,
    options: ListenOptions,
) -> io::Result<Vec<Arc<Socket>>> {
    let mut addr = addr;
    let mut sockets = Vec::new();
    for n in 0..stack.shards() {
        let socket = stack.new_socket_on(n, |shard| shard.tcp_listen(addr, options))?;
        // The other shards use the address and port that the first shard has chosen.
        addr = socket.addresses()?.0.unwrap_or(addr);
        sockets.push(socket);
    }
    Ok(sockets)
}

impl fmt::Debug for TcpListener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TcpListener").field("local", &self.local_addr().ok()).finish()
    }
}
