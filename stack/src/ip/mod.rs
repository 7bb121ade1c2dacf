//! IPv4 and IPv6 input and output, ICMP, ARP, neighbour discovery, path MTU.
//!
//! Inputs: Ethernet frames from the device ([`Ip::input`]), transport packets from the engines
//! ([`Ip::output`]), time. Outputs: a [`Verdict`] for every frame, and frames through a
//! [`FrameSink`].
//!
//! ```text
//!  frame:   | Ethernet 14 | IPv4 20-60 or IPv6 40 + extensions | transport header | payload |
//!  Deliver:                                                    ^ the chain starts here, and the
//!                                                                transport header is contiguous
//!  output:  | headroom >= 54              | transport header | payload |   the chain starts at
//!                                         ^ the transport header; both lower headers are
//!                                           prepended, contiguous
//! ```
//!
//! Memory: a chain passed in is owned by this room until it leaves in a verdict or through the
//! sink. Dropped chains are freed to the pool and counted here. The queue of packets waiting for
//! neighbour resolution is bounded.
//!
//! Fragments are reassembled before delivery; the reassembly table is bounded in number, storage
//! and time. Packets larger than the path MTU are fragmented if the sender permits it. TCP never
//! does.
//!
//! Not implemented: forwarding, multicast group membership, duplicate address detection and SLAAC
//! (RFC 4862; addresses are configured, and an address conflict is counted), router advertisements
//! and redirects (ignored).
//!
//! Cost: a packet to a cached destination costs one look-up in a small direct-mapped cache. Route,
//! neighbour and path MTU tables are consulted once per destination and change.
//!
//! Sources: RFC 791, 792, 826, 1122, 1191, 4291, 4443, 4861, 5722, 5927, 6724, 6946, 6980,
//! 8200, 8201.

#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

mod address;
mod arp;
mod config;
mod destination;
mod engine;
mod fragment;
mod frame;
mod icmp;
mod input;
mod invoking;
mod ndp;
mod neighbour;
mod output;
mod pmtu;
mod quote;
mod reassembly;
mod routing;
mod source;
mod template;
mod types;
mod waiting;

pub use crate::route::NeighbourConfig;
pub use crate::route::RouteError;
pub use crate::route::{
    Neighbour, NeighbourState, NextHop, ParsePrefixError, Prefix, Route, Traffic,
};
pub use config::{Config, ConfigError, IfAddr};
pub use engine::Ip;
pub use frame::Context;
pub use input::Origin;
pub use invoking::{InvokingPacket, SentError};
pub use template::{Flow, Template};
pub use types::PathChoice;
pub use types::{
    Delivered, EchoId, EchoReply, EchoRequest, Egress, ErrorKind, FrameSink, NoRoute, Outgoing,
    OutputError, QuotedError, SavedHeader, Verdict,
};
