//! Snapshots of a running stack.

use std::io;

use fulmar_stack::base::{Counter, DropReason};
use fulmar_stack::socket::SocketError;

use crate::api::error::to_io;
use crate::api::inner::Inner;
use crate::runtime::Account;
#[cfg(feature = "stat")]
use crate::stat::Document;
use fulmar_stack::shard::SocketStat;

/// A snapshot of a stack.
#[derive(Clone, Debug)]
pub struct Stat {
    /// Its name.
    pub name: String,
    /// The network namespace in which it was built, as the kernel numbers it (the inode of
    /// `/proc/PID/ns/net`).
    pub network_namespace: Option<u64>,
    /// Shards that it consists of: one per queue of its device.
    pub shards: usize,
    /// Sockets, counters, drops, buffers, device, neighbours, routes: of all shards together.
    pub shard: fulmar_stack::shard::Stat,
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

    /// The document that `fulmar stat` reads.
    #[cfg(feature = "stat")]
    pub fn document(&self) -> Document {
        Document::from(self)
    }
}
