//! Routing and neighbour tables: forwarding table, next hops, neighbour states. Pure data
//! structures.
//!
//! Inputs: destinations, time, received adverts. Outputs: a route, an Ethernet address, a list of
//! solicitations to send. The tables own their entries only; no packet is queued here.
//!
//! Invariants: both tables are bounded by configuration and iterate in a fixed order. Every change
//! that could invalidate a cached result advances `generation()`.
//!
//! Not here: sending, packet queues, path MTU (all in `ip`).
//!
//! Sources: RFC 1812 section 5.2.4.3 (longest match), RFC 4861 section 7.3 (neighbour states).

#![deny(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

mod fib;
mod neighbour;
mod next_hop;
mod ranges;
mod raw;
mod table;

pub(crate) use fib::MAX_ANSWER;
pub(crate) use neighbour::Advertisement;
pub(crate) use neighbour::Learned;
pub use neighbour::NeighbourConfig;
pub use neighbour::{Action, Neighbour, NeighbourState, Neighbours, Resolution, Traffic};
pub use next_hop::GroupError;
pub(crate) use next_hop::SourcePolicy;
pub use next_hop::{Group, NextHop, NextHops};
pub use table::RouteError;
pub use table::{ParsePrefixError, Prefix, Route, Table};
