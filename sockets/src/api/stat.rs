//! Snapshots of a running stack.

use std::io;
use std::sync::{Arc, Weak};

use fulmar_stack::base::{Counter, DropReason};
use fulmar_stack::device::DeviceStats;
use fulmar_stack::socket::SocketError;

use crate::api::error::to_io;
use crate::api::inner::Inner;
use crate::runtime::Account;
#[cfg(feature = "stat")]
use crate::stat::Document;
use fulmar_stack::shard::SocketStat;

/// A snapshot of a stack.
///
/// ```
/// # use fulmar::{Stack, devices};
/// use fulmar::stat::Counter;
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let (device, _peer) = devices::link_pair()?;
/// # let stack = Stack::builder().device(device).address("10.0.0.1/24".parse()?).unlisted().build()?;
/// let stat = stack.stat()?;
/// println!("{}: {} sockets", stat.name, stat.sockets().len());
/// println!("{} bytes retransmitted", stat.count(Counter::TcpRetransmitBytes));
/// println!("{} frames received by {}", stat.device().rx_frames, stat.device().name);
/// # Ok(())
/// # }
/// ```
///
/// [`Stat::document`] has everything else: addresses, memory, neighbours, routes.
#[derive(Clone, Debug)]
pub struct Stat {
    /// Its name.
    pub name: String,
    /// The network namespace in which it was built, as the kernel numbers it (the inode of
    /// `/proc/PID/ns/net`).
    pub network_namespace: Option<u64>,
    /// Shards that it consists of: one per queue of its device.
    pub shards: usize,
    /// All shards together, for packages that are released together with this one.
    #[cfg(feature = "internals")]
    #[doc(hidden)]
    pub shard: fulmar_stack::shard::Stat,
    #[cfg(not(feature = "internals"))]
    pub(crate) shard: fulmar_stack::shard::Stat,
    /// Its account, if it keeps one.
    pub account: Option<Account>,
}

impl Stat {
    pub(crate) fn of(inner: &Inner) -> io::Result<Stat> {
        // The snapshots of the shards are visits, too.
        let times = inner.host(0).ledger().account();
        let mut each = inner.hosts().map(|host| host.call(|shard, now| Ok(shard.stat_at(now))));
        let first = each.next().unwrap_or(Err(SocketError::BadHandle)).map_err(to_io)?;
        let shard = each.try_fold(first, |all, one| one.map(|one| all.with(one))).map_err(to_io)?;
        let account = times.map(|times| times.with_work(&shard));
        let shards = inner.hosts().count();
        let (name, network_namespace) = (inner.name().to_owned(), inner.network_namespace);
        Ok(Stat { name, network_namespace, shards, shard, account })
    }

    /// How often something happened.
    pub fn count(&self, c: Counter) -> u64 {
        self.shard.counters.value(c)
    }

    /// How many packets were dropped for a reason.
    pub fn drops(&self, r: DropReason) -> u64 {
        self.shard.counters.drops(r)
    }

    /// The sockets.
    pub fn sockets(&self) -> &[SocketStat] {
        &self.shard.sockets
    }

    /// The counters of the device, of all its queues together.
    pub fn device(&self) -> &DeviceStats {
        &self.shard.device
    }

    /// The document that `fulmar stat` reads.
    #[cfg(feature = "stat")]
    pub fn document(&self) -> Document {
        Document::from(self)
    }
}

/// Takes snapshots of a stack: [`Stack::observer`](crate::Stack::observer).
///
/// ```
/// # use fulmar::{Stack, devices};
/// use fulmar::stat::Counter;
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let (device, _peer) = devices::link_pair()?;
/// # let stack = Stack::builder().device(device).address("10.0.0.1/24".parse()?).unlisted().build()?;
/// let observer = stack.observer();
/// let watcher = std::thread::spawn(move || {
///     while let Some(stat) = observer.stat() {
///         println!("{} frames received", stat.count(Counter::RxFrames));
///         std::thread::sleep(std::time::Duration::from_millis(10));
///     }
/// });
/// drop(stack); // the stack ends, and the watcher with it
/// # watcher.join().unwrap();
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Observer(Weak<Inner>);

impl Observer {
    pub(crate) fn of(inner: &Arc<Inner>) -> Observer {
        Observer(Arc::downgrade(inner))
    }

    /// A snapshot. `None`: the stack has ended.
    pub fn stat(&self) -> Option<Stat> {
        Stat::of(&*self.0.upgrade()?).ok()
    }
}
