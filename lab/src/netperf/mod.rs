//! netperf's two ends over any stack: the server that a stock netperf drives, and the client that
//! drives a stock netserver. Definitions and tables are netperf's, so that figures can be laid
//! beside thirty years of others.
//!
//! ```text
//!   client ─ control connection (messages of 656 bytes) ─ server::Server
//!     │                                                      │ job: what was asked
//!     └────────── data: transfer's loops over socket ────────┘ pace: when it ends; meter: CPU
//! ```
//! [`message`] is the codec; [`socket`] the sockets of any stack; `transfer` holds the loops of both
//! ends. Nothing of the other side is trusted: see [`server`].
//!
//! Source: netperf 2.7.1, its manual, and what it sends and prints.

pub mod client;
pub mod confidence;
mod control;
mod job;
pub mod message;
pub mod meter;
mod on_fulmar;
mod on_kernel;
pub mod pace;
mod ring;
pub mod server;
pub mod socket;
pub mod tables;
mod transfer;

/// The port of the control connection.
pub const CONTROL_PORT: u16 = 12_865;

#[cfg(test)]
mod tests;
