//! Threads around shards: the lock, leader and followers, and all waiting.
//!
//! ```text
//!   caller ─► Host: lock ─► WatchedShard ─► Shard::step, calls of sockets
//!                │               └─ events ─► waiters: threads, poll sets, tickets
//!                └─ would wait ─► leader and followers: one polls for all, the others sleep
//! ```
//!
//! A [`Host`] puts a shard under a lock and adds threads, clocks and sleep. Unsafe code lives in `sys.rs`.

#![deny(unsafe_code)]

pub mod account;
mod completion;
mod contain;
mod entropy;
pub mod file;
mod handoff;
mod host;
mod inbox;
mod leader;
mod limit;
#[cfg(fulmar_loom)]
mod models;
mod poll_set;
mod reentry;
mod service;
mod service_thread;
mod sleep;
mod spin;
mod start;
mod sync;
#[cfg_attr(fulmar_loom, path = "models/sys.rs")]
#[allow(unsafe_code)]
mod sys;
mod ticket;
mod waiter;
mod watch;
mod watched;

pub use account::{Account, Ledger};
pub use completion::Completion;
pub use entropy::draw as draw_secrets;
pub use handoff::{Handoff, handoffs};
pub(crate) use host::Driving;
pub use host::{Guard, Host};
pub use inbox::Request;
pub use limit::Limit;
#[cfg(fulmar_loom)]
pub use models::MODELS;
pub use poll_set::PollSetCore;
pub use service_thread::start as start_service;
pub use spin::Spin;
pub use start::StartError;
pub use start::{hosts as start_hosts, shard_config};
pub(crate) use sys::at_exit;
pub(crate) use sys::block_signals;
pub(crate) use sys::fork_generation;
pub use sys::{now, thread_number, ticks};
pub(crate) use ticket::SoleTicket;
pub use ticket::{Post, Received, RecvTicket};
pub(crate) use watch::Side;
pub use watched::WatchedShard;
