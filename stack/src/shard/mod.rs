//! A shard: one core's whole world, from its device to its sockets.
//!
//! ```text
//!   down:  conn::send_calls ─ sosend ─► conn::output ─ tcp::output ─► link::net ─ ip::output ─► Link ─► Device
//!   up:    Device ─► Shard::step ─ link::input ─ ip::input ─► conn::input ─ tcp::input ─► Event (readiness)
//! ```
//!
//! - `conn`: TCP connections: calls, input, output, posted buffers, TIME-WAIT;
//! - `listen`: connections from the SYN until they are accepted; `fast_open`: cookies, and data on the SYN;
//! - `dgram`: datagram sockets; `icmp`: echo requests and their answers;
//! - `link`: frames in bursts, between the layers and the device;
//! - `memory`: what waits, and who is reset, when memory is scarce.
//!
//! A [`Shard`] is deterministic: it advances by [`Shard::step`] with the time as an argument, and returns its results
//! as data: readiness ([`Event`]), completed posted buffers ([`PostCompletion`]) and packets for other shards
//! ([`Outgoing`]). It makes no call of an operating system except through its device. Unsafe code lives in `raw.rs`.

#![deny(unsafe_code)]

mod config;
mod conn;
mod demux;
mod dgram;
mod error;
mod events;
mod fast_open;
mod icmp;
mod layers;
mod link;
mod listen;
mod memory;
mod outcome;
mod parts;
#[allow(unsafe_code)]
mod raw;
mod secret;
mod slab;
mod sockets;
mod stat;
mod sync;
mod watch_calls;
mod wheel;
mod world;

pub use config::{MIN_BUDGET_BYTES, StackConfig};
pub use conn::posted::{Post, RecvEntry};
pub use conn::recv_calls::PostedBuffers;
pub use conn::send_calls::{MoreData, Reserved, SendCalls};
pub use conn::sendfile::SendFileCalls;
pub use conn::socket_options::SocketOptions;
pub use dgram::calls::{TakenDatagram, UdpSockets};
pub use dgram::many::{RecvMessage, SendMessage, SentMany};
pub use dgram::output::PendingError;
pub use error::SetupError;
pub use fast_open::calls::FirstData;
pub use fast_open::keys::FastOpenKeys;
pub use fast_open::queue::FastOpenOptions;
pub use icmp::echo::queue::EchoListener;
pub use icmp::ping::IcmpSockets;
pub use link::siblings::{HandOff, MAX_SHARDS, NeighbourUpdate, Outgoing, Ports, Siblings};
pub use listen::pending::{Decision, Pending, PendingId, SynOptions};
pub use listen::sources::SourceLimits;
pub use listen::syn_queue::{ConditionalAccept, ListenOptions, ListenerStat, SynCookies};
pub use outcome::{Event, PostCompletion, PostToken, RecvOutcome, Unclaimed, Watched};
pub use parts::ShardParts;
pub use slab::Slab;
pub use sockets::{Echo, Listener, TcpEntry};
pub use stat::{SocketStat, Stat};
pub use wheel::{TimerId, TimerKey, Wheel};
pub use world::Shard;
