//! The API of [netstack-smoltcp](https://docs.rs/netstack-smoltcp/0.2.4) over [fulmar], for a program that wants another
//! stack and not another line:
//!
//! ```toml
//! [patch.crates-io]
//! netstack-smoltcp = { git = "https://github.com/fulmar-net/fulmar" }
//! ```
//!
//! [docs/compat.md](https://github.com/fulmar-net/fulmar/blob/main/docs/compat.md) lists the differences.

#![forbid(unsafe_code)]

mod filter;
mod inward;
pub mod stack;
pub mod tcp;
pub mod udp;

pub use filter::{IpFilter, IpFilters};
pub use inward::Runner;
/// Of the original's API. The stack is fulmar's.
pub use smoltcp;
pub use stack::{Stack, StackBuilder};
pub use tcp::{TcpListener, TcpStream};
pub use udp::UdpSocket;

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

/// An IP packet.
pub type AnyIpPktFrame = Vec<u8>;

/// Every address and port of both IP versions.
pub(crate) const EVERY: SocketAddr = SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), 0);
