//! Starts a stack: its shards, each with its part of the memory and of the tables, their hosts, and their service
//! threads.

use std::sync::Arc;
use std::{fmt, io};

use fulmar_stack::device::Device;
use fulmar_stack::mbuf::PoolConfig;

use crate::runtime::account::Ledger;
use crate::runtime::handoff::handoffs;
use crate::runtime::host::Host;
use crate::runtime::watched::WatchedShard;
use crate::runtime::{entropy, service_thread, sys};
use fulmar_stack::shard::{SetupError, Shard, StackConfig};

/// Why a stack could not be started. `Display` says what to do.
#[derive(Debug)]
#[non_exhaustive]
pub enum StartError {
    /// The configuration cannot be used: addresses, routes, MTU or memory.
    Shard(SetupError),
    /// getrandom(2) failed.
    Random(io::Error),
    /// An eventfd, a timerfd or a thread could not be created.
    Host(io::Error),
}

impl fmt::Display for StartError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StartError::Shard(e) => e.fmt(f),
            StartError::Random(e) => write!(
                f,
                "cannot read random bytes for the stack's secrets: {e}; allow the process to call getrandom(2)"
            ),
            StartError::Host(e) => {
                write!(
                    f,
                    "cannot create a thread or a descriptor: {e}; check `ulimit -n` and `ulimit -u`"
                )
            }
        }
    }
}

impl std::error::Error for StartError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            StartError::Shard(e) => e.source(),
            StartError::Random(e) | StartError::Host(e) => Some(e),
        }
    }
}

/// The configuration of one of `shards` shards: its part of the memory and of the limits of the stack.
pub fn shard_config(config: &StackConfig, shards: usize) -> StackConfig {
    let pool = match shards {
        1 => config.pool,
        n => PoolConfig {
            huge_pages: config.pool.huge_pages,
            ..PoolConfig::with_budget(config.pool.budget_bytes / n)
        },
    };
    StackConfig {
        pool,
        max_sockets: config.max_sockets.div_ceil(shards),
        max_time_wait: config.max_time_wait.div_ceil(shards),
        max_orphans: config.max_orphans.div_ceil(shards),
        resets_per_s: config.resets_per_s.div_ceil(shards as u32),
        ..config.clone()
    }
}

/// The hosts of a stack, in the order of their shards.
pub(super) type Hosts = Vec<Arc<Host>>;

/// Starts a host with its service thread for each device. The devices are the queues of one interface; `name` is that
/// of the threads.
///
/// # Errors
/// [`StartError`].
pub fn hosts(
    config: &StackConfig,
    devices: Vec<Box<dyn Device>>,
    name: &str,
    ledger: &Arc<Ledger>,
) -> Result<Hosts, StartError> {
    let (now, count) = (sys::now(), devices.len());
    // The shards of a stack share its secrets: each has to know which of them owns a flow.
    let secrets = config.secrets.clone().map_or_else(entropy::draw, Ok);
    let secrets = secrets.map_err(StartError::Random)?;
    let config = &StackConfig { secrets: Some(secrets), ..config.clone() };
    let mut handoffs = handoffs(count).into_iter();
    let mut all = Vec::with_capacity(count);
    for (device, id) in devices.into_iter().zip(0u16..) {
        let config = shard_config(config, count);
        let shard = Shard::of_several(config, device, now, id, count as u16);
        let mut shard = WatchedShard::new(shard.map_err(StartError::Shard)?);
        if let (2.., Some(handoff)) = (count, handoffs.next()) {
            shard.join(handoff);
        }
        all.push(Arc::new(Host::new(shard, Arc::clone(ledger)).map_err(StartError::Host)?));
    }
    if count > 1 {
        all.iter().for_each(|host| host.set_siblings(all.iter().map(Arc::downgrade).collect()));
    }
    for host in &all {
        if let Err(e) = service_thread::start(host, name) {
            all.iter().for_each(|host| host.stop());
            return Err(StartError::Host(e));
        }
    }
    Ok(all)
}
