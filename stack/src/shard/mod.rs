//! A shard: one core's whole world, from its device to its sockets.
//!
//! ```text
//!   down:  tcp_calls ─ sosend ─► tcp_output ─ tcp::output ─► net (ip::output) ─► Link ─► Device
//!   up:    Device ─► Shard::step ─ ip::input ─► tcp_input ─ tcp::input ─► Event (readiness)
//! ```
//!
//! A [`Shard`] is deterministic: it advances by [`Shard::step`] with the time as an argument, and returns its results
//! as data: readiness ([`Event`]), completed posted buffers ([`PostCompletion`]) and packets for other shards
//! ([`Outgoing`]). It makes no call of an operating system except through its device. Unsafe code lives in `raw.rs`.

#![deny(unsafe_code)]

mod completion_polls;
mod config;
mod conn;
mod demux;
mod echo;
mod error;
mod events;
mod fast_open;
mod flow_cache;
mod input;
mod layers;
mod listen;
mod loan_calls;
mod memory;
mod net;
mod outcome;
mod parts;
mod ping;
mod posted;
#[allow(unsafe_code)]
mod raw;
mod receive_reclaim;
mod reclaim;
mod recv_calls;
mod retries;
mod rx;
mod secret;
mod send_calls;
mod send_wait;
mod sendfile;
mod siblings;
mod slab;
mod socket_options;
mod sockets;
mod sources;
mod stat;
mod syn_queue;
mod sync;
mod tcp;
mod tcp_calls;
mod tcp_events;
mod tcp_input;
mod tcp_output;
mod tcp_reclaim;
mod templates;
mod time_wait;
mod udp;
mod udp_calls;
mod udp_input;
mod udp_many;
mod udp_output;
mod wait;
mod watch_calls;
mod wheel;
mod world;

pub use config::{MIN_BUDGET_BYTES, StackConfig};
pub use echo::queue::EchoListener;
pub use error::SetupError;
pub use fast_open::calls::FirstData;
pub use fast_open::keys::FastOpenKeys;
pub use fast_open::queue::FastOpenOptions;
pub use listen::pending::{Decision, Pending, PendingId, SynOptions};
pub use outcome::{Event, PostCompletion, PostToken, RecvOutcome, Unclaimed, Watched};
pub use parts::ShardParts;
pub use ping::IcmpSockets;
pub use posted::{Post, RecvEntry};
pub use recv_calls::PostedBuffers;
pub use send_calls::{MoreData, Reserved, SendCalls};
pub use sendfile::SendFileCalls;
pub use siblings::{HandOff, MAX_SHARDS, NeighbourUpdate, Outgoing, Ports, Siblings};
pub use slab::Slab;
pub use socket_options::SocketOptions;
pub use sockets::{Echo, Listener, TcpEntry};
pub use sources::SourceLimits;
pub use stat::{SocketStat, Stat};
pub use syn_queue::{ConditionalAccept, ListenOptions, ListenerStat, SynCookies};
pub use udp_calls::{TakenDatagram, UdpSockets};
pub use udp_many::{RecvMessage, SendMessage, SentMany};
pub use udp_output::PendingError;
pub use wheel::{TimerId, TimerKey, Wheel};
pub use world::Shard;
