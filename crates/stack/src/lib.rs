//! A shard and who runs it: demultiplexing, the timer wheel, the glue that joins tcp to ip to a
//! device, and all waiting.
//!
//! ```text
//!   down:  tcp_calls ─ sosend ─► tcp_output ─ tcp::output ─► net (ip::output) ─► Link ─► Device
//!   up:    Device ─► Shard::step ─ ip::input ─► tcp_input ─ tcp::input ─► watch (who waits)
//!   host:  the lock around a shard, the inbox, the poll baton, the one loop that waits
//! ```
//!
//! A [`Shard`] is deterministic: it advances by [`Shard::step`] with the time as an argument. A
//! [`Host`] puts it under a lock and adds threads, clocks and sleep. Unsafe code lives in `sys.rs`.

#![deny(unsafe_code)]

pub mod account;
mod baton;
mod completion;
mod config;
mod demux;
mod error;
mod exit;
mod familiar;
pub mod file;
mod form;
mod handoff;
mod host;
mod inbox;
mod limit;
mod listen;
mod loan_calls;
#[cfg(fulmar_loom)]
mod models;
mod net;
mod ping_calls;
mod poll_set;
mod reclaim;
mod recv_calls;
mod reentry;
mod remains;
mod returns;
mod secret;
mod send_calls;
mod send_wait;
mod sendfile;
mod service;
mod shard;
mod shortage;
mod slab;
mod sleep;
mod sockets;
mod sources;
mod spin;
mod stat;
mod steer;
mod stock;
mod sync;
#[cfg_attr(fulmar_loom, path = "models/sys.rs")]
#[allow(unsafe_code)]
mod sys;
mod tcp_calls;
mod tcp_input;
mod tcp_output;
mod templates;
mod ticket;
mod time_wait;
mod udp_at_once;
mod udp_calls;
mod udp_many;
mod udp_output;
mod wait;
mod waiter;
mod watch;
mod watch_calls;
mod wheel;

pub use account::{Account, Balance, Ledger, StageCost};
pub use completion::Completion;
pub use config::StackConfig;
pub use error::SetupError;
pub use exit::{Exit, ExitPoint};
pub use form::{AnyGuard, AnyHost, AnyShard, Form, Probing, WeakHost};
pub use handoff::{Handoff, MAX_SHARDS, handoffs};
pub use host::{Guard, Host, Limit, PostedRead};
pub use inbox::Request;
pub use listen::{ListenOptions, ListenerStat, SynCookies};
#[cfg(fulmar_loom)]
pub use models::MODELS;
pub use poll_set::PollSetCore;
pub use recv_calls::{Received, RecvEntry};
pub use returns::Returned;
pub use send_calls::Reserved;
pub use service::start as start_service;
pub use shard::{Shard, TimerKey};
pub use sockets::{Echo, TcpEntry};
pub use sources::SourceLimits;
pub use stat::{SocketStat, Stat};
pub use sys::{
    ask_for_large_pages, at_exit, block_signals, fork_generation, now, thread_number, ticks,
};
pub use ticket::{Post, RecvOutcome, RecvTicket, SoleTicket};
pub use udp_calls::TakenDatagram;
pub use udp_many::{RecvMessage, SendMessage, SentMany};
pub use wheel::{TimerId, Wheel};
