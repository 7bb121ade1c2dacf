//! netperf's server, which a stock netperf drives, so that figures can be laid beside thirty years
//! of others.
//!
//! ```text
//!   netperf ─ control connection (messages of 656 bytes) ─ server::Server
//!     │                                                      │ job: what was asked
//!     └────────── data: transfer's loops over socket ────────┘ pace: when it ends; meter: CPU
//! ```
//! [`message`] is the codec. Nothing of the other side is trusted: see [`server`].
//!
//! Source: netperf 2.7.1, its manual, and what it sends and prints.

mod control;
mod job;
pub mod message;
mod meter;
mod pace;
mod ring;
pub mod server;
mod socket;
mod transfer;

/// The port of the control connection.
pub const CONTROL_PORT: u16 = 12_865;

#[cfg(test)]
mod tests;
