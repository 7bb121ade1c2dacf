//! fulmar under packetdrill: one [`fulmar_stack::shard::Shard`] on a virtual clock, behind the socket calls of Linux.
//!
//! ```text
//!   packetdrill ── packetdrill_interface ──► boundary.rs
//!        │ getsockopt of %{ }% blocks            │ threads
//!        └────────── preload.rs ──────────► interface.rs
//!                                                └──► sockets.rs, options.rs, poll.rs: calls as steps
//!                                                          └──► world.rs: the shard, its clock, its packets
//!                                                                    └──► cable.rs: an Ethernet
//! ```
//!
//! `libfulmar_packetdrill.so` is for `packetdrill --so_filename`; loaded by `LD_PRELOAD` as well it answers what
//! packetdrill asks the C library for although it plays against a shared object. docs/conformance.md tells how to
//! run the public suites, and what fulmar does where RFCs and Linux disagree.
//!
//! Cost: a script takes as long as its events, some milliseconds. Unsafe code is in `boundary.rs` and
//! `preload.rs`, the two sides that speak C.

#![deny(unsafe_code)]

#[allow(unsafe_code)]
mod boundary;
mod cable;
pub mod calls;
mod dialect;
pub mod fast_open;
pub mod interface;
pub mod options;
pub mod poll;
#[allow(unsafe_code)]
mod preload;
pub mod settings;
pub mod sockets;
pub mod suite;
mod tcp_info;
pub mod world;
