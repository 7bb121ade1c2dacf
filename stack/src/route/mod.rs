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
mod sync;
mod table;

#[cfg(fulmar_loom)]
pub use fib::MODELS;
pub use fib::{Fib, FibBytes, FibError, FibReader, Key, MAX_ANSWER};
pub use neighbour::{
    Action, Advertisement, Learned, Neighbour, NeighbourConfig, NeighbourState, Neighbours,
    Resolution, Traffic,
};
pub use next_hop::{Group, GroupError, MAX_MEMBERS, NextHop, NextHops, SourcePolicy};
pub use table::{MemoryHook, ParsePrefixError, Prefix, Route, RouteError, Table};
