//! The common part of all sockets: a handle to a slot of a shard, with its time-outs.

use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::Poll;
use std::time::Duration;

use crate::runtime::{Host, Limit, Request, WatchedShard};
use fulmar_stack::base::{DropReason, Instant, SlotId};
use fulmar_stack::socket::{Least, Ready, Shutdown, SocketError};

use crate::api::error::invalid;
pub(super) use crate::api::error::to_io;
use crate::api::exit;
use crate::api::inner::Inner;
use crate::api::stack::Stack;

/// A socket that several handles may share (`try_clone`). The last one closes it.
pub(crate) struct Socket {
    /// That of `stack` and `shard`, to save two dereferences per call.
    host: Arc<Host>,
    pub stack: Arc<Inner>,
    /// The shard of the socket.
    pub shard: u16,
    pub id: SlotId,
    nonblocking: AtomicBool,
    /// Nanoseconds; 0 for no limit.
    read_timeout: AtomicU64,
    write_timeout: AtomicU64,
    linger: AtomicU64,
}

/// No linger is set.
const NO_LINGER: u64 = u64::MAX;

impl Socket {
    pub(crate) fn new(stack: Arc<Inner>, shard: u16, id: SlotId) -> Arc<Socket> {
        Arc::new(Socket {
            host: stack.host(shard).clone(),
            stack,
            shard,
            id,
            nonblocking: AtomicBool::new(false),
            read_timeout: AtomicU64::new(0),
            write_timeout: AtomicU64::new(0),
            linger: AtomicU64::new(NO_LINGER),
        })
    }

    #[inline(always)]
    pub(crate) fn host(&self) -> &Arc<Host> {
        &self.host
    }

    pub(crate) fn set_nonblocking(&self, on: bool) {
        self.nonblocking.store(on, Ordering::Relaxed);
    }

    #[inline]
    fn limit(&self, timeout: &AtomicU64) -> Limit {
        if self.nonblocking.load(Ordering::Relaxed) {
            return Limit::DoNotWait;
        }
        match timeout.load(Ordering::Relaxed) {
            0 => Limit::Forever,
            ns => Limit::ForNanos(ns),
        }
    }

    pub(crate) fn read_limit(&self) -> Limit {
        self.limit(&self.read_timeout)
    }

    pub(crate) fn write_limit(&self) -> Limit {
        self.limit(&self.write_timeout)
    }

    pub(crate) fn set_read_timeout(&self, t: Option<Duration>) -> io::Result<()> {
        store_timeout(&self.read_timeout, t)
    }

    pub(crate) fn set_write_timeout(&self, t: Option<Duration>) -> io::Result<()> {
        store_timeout(&self.write_timeout, t)
    }

    pub(crate) fn read_timeout(&self) -> Option<Duration> {
        load_timeout(&self.read_timeout)
    }

    pub(crate) fn write_timeout(&self) -> Option<Duration> {
        load_timeout(&self.write_timeout)
    }

    pub(crate) fn set_linger(&self, t: Option<Duration>) {
        let ns = t.map_or(NO_LINGER, |t| u64::try_from(t.as_nanos()).unwrap_or(NO_LINGER - 1));
        self.linger.store(ns, Ordering::Relaxed);
        // The end of the process closes sockets without this handle, and resets those with a linger time of zero. An
        // error: the connection has ended, and there is nothing to reset.
        let zero = t.filter(Duration::is_zero);
        let _ = self.call(|shard, _| shard.tcp_entry(self.id).map(|entry| entry.linger = zero));
    }

    pub(crate) fn linger(&self) -> Option<Duration> {
        match self.linger.load(Ordering::Relaxed) {
            NO_LINGER => None,
            ns => Some(Duration::from_nanos(ns)),
        }
    }

    /// Runs a step that cannot wait.
    pub(crate) fn call<R>(
        &self,
        f: impl FnOnce(&mut WatchedShard, Instant) -> Result<R, SocketError>,
    ) -> io::Result<R> {
        self.host().call(f).map_err(to_io)
    }

    /// Waits until a step is done.
    pub(crate) fn wait<R>(
        &self,
        interest: Ready,
        limit: Limit,
        step: impl FnMut(&mut WatchedShard, Instant) -> Result<Poll<R>, SocketError>,
    ) -> io::Result<R> {
        self.host().wait(self.id, interest, limit, step).map_err(to_io)
    }

    /// As [`Socket::wait`], with a clock that may be a few milliseconds old. `limit` is called only if the step has to
    /// wait.
    #[inline]
    pub(crate) fn wait_coarse<R>(
        &self,
        interest: Ready,
        limit: impl FnOnce() -> Limit,
        step: impl FnMut(&mut WatchedShard, Instant) -> Result<Poll<R>, SocketError>,
    ) -> io::Result<R> {
        self.host().wait_coarse(self.id, interest, limit, step).map_err(to_io)
    }

    /// Waits until a step of a reader is done. The step waits for the low-water mark; after the time-out it takes any
    /// bytes.
    pub(crate) fn wait_for_data<R>(
        &self,
        limit: Limit,
        mut step: impl FnMut(&mut WatchedShard, Instant, Least) -> Result<Poll<R>, SocketError>,
    ) -> io::Result<R> {
        if limit == Limit::DoNotWait {
            return self.wait(Ready::READER, limit, |shard, now| step(shard, now, Least::OneByte));
        }
        match self.wait(Ready::READER, limit, |shard, now| step(shard, now, Least::LowWater)) {
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                self.wait_for_data(Limit::DoNotWait, step)
            }
            other => other,
        }
    }

    pub(crate) fn addresses(&self) -> io::Result<(Option<SocketAddr>, Option<SocketAddr>)> {
        self.call(|shard, _| shard.addresses(self.id))
    }

    pub(crate) fn take_error(&self) -> io::Result<Option<io::Error>> {
        Ok(self.call(|shard, _| shard.take_error(self.id))?.map(to_io))
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        let host = self.host();
        if !host.is_ours() {
            return;
        }
        match self.linger() {
            None => host.post(Request::Close(self.id)),
            Some(limit) => host.in_destructor(|| self.close_lingering(limit)),
        }
    }
}

impl Socket {
    fn close_lingering(&self, limit: Duration) {
        let host = self.host();
        match limit {
            Duration::ZERO => {
                let _ = host.call(|shard, now| {
                    if let Ok(entry) = shard.tcp_entry(self.id) {
                        entry.linger = Some(Duration::ZERO);
                    }
                    shard.close(now, self.id);
                    Ok(())
                });
            }
            limit => {
                let _ = host.call(|shard, now| shard.tcp_shutdown(now, self.id, Shutdown::Write));
                host.drain(Some(self.id), limit);
                host.post(Request::Close(self.id));
            }
        }
    }
}

/// Rejects a zero time-out, as `std::net` does.
pub(crate) fn check_timeout(t: Duration) -> io::Result<()> {
    if t.is_zero() { Err(invalid("cannot set a 0 duration timeout")) } else { Ok(()) }
}

fn store_timeout(slot: &AtomicU64, t: Option<Duration>) -> io::Result<()> {
    let ns = match t {
        None => 0,
        Some(t) => {
            check_timeout(t)?;
            u64::try_from(t.as_nanos()).unwrap_or(u64::MAX)
        }
    };
    slot.store(ns, Ordering::Relaxed);
    Ok(())
}

fn load_timeout(slot: &AtomicU64) -> Option<Duration> {
    match slot.load(Ordering::Relaxed) {
        0 => None,
        ns => Some(Duration::from_nanos(ns)),
    }
}

/// Adds an explanation to `HostUnreachable` if a stack of this process has dropped frames with its own source address.
pub(crate) fn explain_unreachable(e: io::Error) -> io::Error {
    let drops_own = |inner: &Inner| {
        let count = |host: &Arc<Host>| {
            host.call(|shard, _| Ok(shard.counters().drops(DropReason::EtherSource)))
        };
        inner.hosts().any(|host| count(host).is_ok_and(|n| n > 0))
    };
    if e.kind() != io::ErrorKind::HostUnreachable || !exit::is_any(drops_own) {
        return e;
    }
    let why = "no neighbour answers: two stations on the network have the same Ethernet address (drop reason \
        ether_source); give each device a unique one (Caps::ether)";
    io::Error::new(io::ErrorKind::HostUnreachable, why)
}

/// Tries each address in turn, as `std::net` does.
pub(crate) fn each_address<R>(
    addresses: impl ToSocketAddrs,
    mut f: impl FnMut(SocketAddr) -> io::Result<R>,
) -> io::Result<R> {
    let mut last = None;
    for a in addresses.to_socket_addrs()? {
        match f(a) {
            Ok(r) => return Ok(r),
            Err(e) => last = Some(e),
        }
    }
    Err(last.unwrap_or_else(|| {
        io::Error::new(io::ErrorKind::InvalidInput, "could not resolve to any addresses")
    }))
}

/// A handle to a stack from a socket.
pub(crate) fn stack_of(s: &Socket) -> Stack {
    Stack { inner: Arc::clone(&s.stack), home: None }
}
