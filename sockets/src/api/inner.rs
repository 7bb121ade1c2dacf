//! The shared state of the handles of a stack and of its sockets.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant as StdInstant};

use crate::runtime::{Host, WatchedShard};
use fulmar_stack::socket::SocketError;

use crate::api::control::Control;
use crate::api::error::to_io;
use crate::api::sendfile::reader::Reader;

/// See the module's header.
pub(crate) struct Inner {
    /// One per shard, at least one.
    pub hosts: Vec<Arc<Host>>,
    pub name: String,
    pub exit_drain: Duration,
    /// [`Stack::close`](crate::Stack::close) was called: the drop does not drain again.
    pub is_closed: AtomicBool,
    /// The inode of the network namespace in which it was built.
    pub network_namespace: Option<u64>,
    pub control: Mutex<Option<Control>>,
    /// Reads files for non-blocking sockets.
    pub reader: Arc<Reader>,
}

impl Inner {
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// The host of a shard that exists.
    #[inline]
    pub(crate) fn host(&self, shard: u16) -> &Arc<Host> {
        &self.hosts[usize::from(shard)]
    }

    /// The hosts of all shards, in their order.
    pub(crate) fn hosts(&self) -> impl Iterator<Item = &Arc<Host>> {
        self.hosts.iter()
    }

    /// Whether this process made the stack.
    pub(crate) fn is_ours(&self) -> bool {
        self.hosts.iter().all(|host| host.is_ours())
    }

    /// Calls `f` in every shard; returns the last result, or the first error.
    pub(crate) fn in_each<R>(
        &self,
        f: impl Fn(&mut WatchedShard, fulmar_stack::base::Instant) -> R,
    ) -> io::Result<R> {
        let mut last = Err(SocketError::BadHandle);
        for host in &self.hosts {
            last = Ok(host.call(|shard, now| Ok(f(shard, now))).map_err(to_io)?);
        }
        last.map_err(to_io)
    }

    /// As [`Inner::close`], at the end of the stack or of the process: for `exit_drain`, or not at all after a close.
    pub(crate) fn drain(&self) {
        let is_closed = self.is_closed.load(Ordering::Relaxed);
        self.close(if is_closed { Duration::ZERO } else { self.exit_drain });
    }

    /// Closes the control socket and every socket, and waits until accepted bytes are delivered. False: the time is
    /// over.
    pub(crate) fn close(&self, limit: Duration) -> bool {
        self.is_closed.store(true, Ordering::Relaxed);
        drop(self.control.lock().unwrap_or_else(PoisonError::into_inner).take());
        let _ = self.in_each(|shard, now| shard.close_all(now));
        let until = StdInstant::now().checked_add(limit);
        let left = || until.map_or(limit, |t| t.saturating_duration_since(StdInstant::now()));
        self.hosts.iter().filter(|host| !host.drain(None, left())).count() == 0
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.is_ours() {
            self.host(0).in_destructor(|| self.drain());
            return self.hosts.iter().for_each(|host| host.stop());
        }
        // A forked child has neither the buffers nor the threads, and the control socket is the parent's.
        std::mem::forget(self.hosts.clone());
        std::mem::forget(Arc::clone(&self.reader));
        if let Ok(mut control) = self.control.try_lock() {
            std::mem::forget(control.take());
        }
    }
}
