//! Pure tables: forwarding table, next hops, neighbour states.
//!
//! Enters: destinations, time, what neighbours said. Leaves: a route, an Ethernet address, a list
//! of things to ask. The tables own their entries and nothing else: no packet ever waits here.
//!
//! Invariants: both tables are bounded by configuration, iterate in a fixed order, and count every
//! change that could make a remembered answer wrong in `generation()`.
//!
//! Not here: sending anything, queues of packets, path MTU (all in room `ip`).
//!
//! Sources: RFC 1812 section 5.2.4.3 (longest match), RFC 4861 section 7.3 (neighbour states).

#![cfg_attr(not(test), no_std)]
#![deny(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

extern crate alloc;

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
    Action, Advert, Learned, Neighbour, NeighbourConfig, NeighbourState, Neighbours, Resolution,
    Traffic,
};
pub use next_hop::{Group, GroupError, MAX_MEMBERS, NextHop, NextHops, SourcePolicy};
pub use table::{Advice, Prefix, Route, RouteError, Table};
