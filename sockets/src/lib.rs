//! fulmar: a user-space TCP/IP stack for Linux, with sockets shaped like `std::net`'s.
//!
//! A [`Stack`] is built from a device and addresses. Its sockets block with time-outs, or not; they
//! are usable from many threads, and the calling thread itself runs the stack: there is no thread
//! to hand data to.
//!
//! ```no_run
//! use std::io::{Read, Write};
//! use fulmar::{Stack, TcpStream, devices};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let stack = Stack::builder()
//!     .device(devices::open("fulmar0")?)
//!     .address("10.77.0.2/24".parse()?)
//!     .gateway("10.77.0.1".parse()?)
//!     .build()?;
//! let mut stream = TcpStream::connect(&stack, "10.77.0.1:8000")?;
//! stream.write_all(b"GET / HTTP/1.0\r\n\r\n")?;
//! let mut page = String::new();
//! stream.read_to_string(&mut page)?;
//! # Ok(())
//! # }
//! ```
//!
//! It runs as it is in a shell of `fulmar sandbox`, where `fulmar0` is an interface and the kernel has
//! 10.77.0.1: start a server there with `python3 -m http.server 8000 &`.
//!
//! - **Devices**: [`devices::open`] takes a name; [`devices`] opens a TAP, any Ethernet interface, memory
//!   shared with another process, or joins two stacks in one process; [`device::Device`] is the contract for a
//!   device of your own.
//! - **Event loops**: [`PollSet`] waits for many sockets, or lends its descriptor to any loop.
//! - **async**: a [`Driver`] runs the stack in the thread of an event loop, and sockets have poll functions
//!   ([`TcpStream::poll_read`]). The crate `fulmar-tokio` has sockets for tokio.
//! - **Without threads or an operating system**: the crate `fulmar-stack` is the whole stack as a value that is given
//!   packets and the time (`no_std`); its example `two_shards` feeds two of them from memory.
//! - **Not as in std**: 127.0.0.1 and `localhost` are the host's, not the stack's; two stacks reach each
//!   other over [`devices::link_pair`] or [`devices::shm`], a stack reaches its own addresses. Names go to
//!   the host's resolver over the host's network. There are no multicast groups.
//! - **Options**: `set_nodelay` and others of `std` are methods, the rest are fields of [`SocketOptions`]:
//!   [`TcpStream::set_options`], [`ListenOptions::socket`], [`ConnectOptions::socket`].
//! - **Without a copy**: [`zero_copy`] lends received bytes, posts buffers before their bytes have come, sends memory that
//!   you give away, and files.
//! - **Looking inside**: [`Stack::stat`], `fulmar stat` from another terminal (its document is [`stat::Document`]), and
//!   [`devices::capture`] for Wireshark.
//! - **Memory** is bounded by one byte budget per stack ([`Builder::budget_bytes`]): a writer waits
//!   and windows close when it is used up; nothing that was accepted is lost.
//! - **The end**: what a socket accepted is delivered when it is closed, when its stack is dropped
//!   and when the process ends, for at most [`Builder::exit_drain`].
//! - **Signals**: a handler may read and write. If it has interrupted the stack's own work it gets
//!   `WouldBlock`, and so it does if it would have to wait while the interrupted thread waits. A
//!   socket should not be dropped there, since that frees memory.
//! - **fork**: a child process gets an error (`EBADF`) from every call on its parent's stacks.

// For the pages of crates that show its types.
#![doc(html_root_url = "https://docs.rs/fulmar/0.1.0")]
// docs.rs says of each item which feature it needs.
#![cfg_attr(docsrs, feature(doc_cfg))]
#![deny(unsafe_code)]
#![warn(unreachable_pub, clippy::exhaustive_enums)]
#![cfg_attr(not(feature = "internals"), allow(dead_code, unreachable_pub, unused_imports))]

mod api;
pub mod config;
mod drivers;
pub mod guide;
pub mod icmp;
mod runtime;
pub mod stat;
pub mod tcp;
pub mod udp;

pub use api::cidr::{Cidr, ParseCidrError};
pub use api::connect::ConnectOptions;
pub use api::driver::Driver;
pub use api::error::SetupError;
pub use api::listener::TcpListener;
pub use api::pending::PendingConnection;
pub use api::poll::{Event, PollSet, Source, Waker};
pub use api::stack::{Builder, Stack};
pub use api::tcp::TcpStream;
pub use api::udp::UdpSocket;
pub use api::{device, devices, zero_copy};
/// The next hop of a route: see [`Stack::add_route`].
///
/// ```
/// # use fulmar::{NextHop, Stack, devices};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let (device, _peer) = devices::link_pair()?;
/// # let stack = Stack::builder().device(device).address("10.0.0.1/24".parse()?).unlisted().build()?;
/// let hop = NextHop { mtu: Some(1400), ..NextHop::from("10.0.0.9".parse::<std::net::IpAddr>()?) };
/// stack.add_route("192.168.0.0/16".parse()?, hop)?;
/// # Ok(())
/// # }
/// ```
pub use fulmar_stack::ip::NextHop;
/// Options of a listener: see [`TcpListener::bind_with`].
///
/// ```
/// # use fulmar::{Keepalive, ListenOptions, SocketOptions, Stack, TcpListener, devices};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let (device, _peer) = devices::link_pair()?;
/// # let stack = Stack::builder().device(device).address("10.0.0.1/24".parse()?).unlisted().build()?;
/// let socket = SocketOptions { keepalive: Some(Keepalive::default()), ..SocketOptions::default() };
/// let options = ListenOptions { backlog: 64, socket, ..ListenOptions::default() };
/// let listener = TcpListener::bind_with(&stack, "10.0.0.1:80", options)?;
/// # drop(listener);
/// # Ok(())
/// # }
/// ```
///
/// Fields are added in minor versions: end a literal with `..ListenOptions::default()`.
pub use fulmar_stack::shard::ListenOptions;
/// Options of a connection: set before it is opened ([`ConnectOptions::socket`]), while it is open
/// ([`TcpStream::set_options`]), or for all connections of a listener ([`ListenOptions::socket`]).
///
/// ```
/// # use fulmar::{CongestionControl, SocketOptions};
/// let options = SocketOptions {
///     congestion: Some(CongestionControl::Bbr),
///     tos: 46 << 2,
///     ..SocketOptions::default()
/// };
/// # assert!(!options.nodelay);
/// ```
pub use fulmar_stack::shard::SocketOptions;
/// The operations that do not wait: see [`PollSet::add`].
///
/// ```
/// # use fulmar::Ready;
/// let interest = Ready::READABLE | Ready::WRITABLE;
/// assert!(interest.contains(Ready::READABLE));
/// ```
pub use fulmar_stack::socket::Ready;
/// The congestion control of a connection: see [`SocketOptions::congestion`].
///
/// ```
/// # use fulmar::CongestionControl;
/// assert_eq!("cubic".parse::<CongestionControl>()?, CongestionControl::Cubic);
/// # Ok::<(), fulmar::tcp::UnknownCongestionControl>(())
/// ```
pub use fulmar_stack::tcp::CongestionControl;
/// Probes of an idle peer: see [`SocketOptions::keepalive`].
///
/// ```
/// # use std::time::Duration;
/// # use fulmar::Keepalive;
/// let keepalive = Keepalive { idle: Duration::from_secs(60), ..Keepalive::default() };
/// # assert_eq!(keepalive.count, 9);
/// ```
pub use fulmar_stack::tcp::Keepalive;
/// Options of a UDP socket: see [`UdpSocket::bind_with`].
///
/// ```
/// # use fulmar::{Stack, UdpBindOptions, UdpSocket, devices};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let (device, _peer) = devices::link_pair()?;
/// # let stack = Stack::builder().device(device).address("10.0.0.1/24".parse()?).unlisted().build()?;
/// let options = UdpBindOptions { only_v6: true, ..UdpBindOptions::default() };
/// let socket = UdpSocket::bind_with(&stack, "[::]:53", options)?;
/// # drop(socket);
/// # Ok(())
/// # }
/// ```
///
/// Fields are added in minor versions: end a literal with `..UdpBindOptions::default()`.
pub use fulmar_stack::udp::BindOptions as UdpBindOptions;

/// What lies below the sockets, for `fulmar-gateway` and the laboratory, which are released together with this
/// crate. It changes without notice.
#[cfg(feature = "internals")]
#[doc(hidden)]
pub mod internals {
    /// The devices as types.
    pub mod drivers {
        pub use crate::drivers::*;
    }
    /// The lock around a shard, its threads and all waiting.
    pub mod runtime {
        pub use crate::runtime::*;
    }
    pub use fulmar_stack::socket;
}
