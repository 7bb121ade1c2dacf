//! What tests of several crates share. Its scenarios are servers under attack on a virtual clock: a test of
//! `shard` asserts what a scenario shows, and `fulmar-lab bench trust` prints it, so both play the same one.
//!
//! [`slow_peers`]: clients that offer no window, fall silent or do not read.
//! [`listener`]: SYN floods and forged segments.
//! [`world`], [`connection`], [`stations`]: two stations on a virtual clock, and a connection between them.
//! [`tamper`], [`placing`]: a device that holds back, changes and copies frames, and one that places them.
//! [`namespace`]: tests against the kernel. What cannot be set up panics: it is a test.

#![forbid(unsafe_code)]

pub mod connection;
pub mod listener;
pub mod namespace;
pub mod placing;
pub mod slow_peers;
pub mod stations;
pub mod tamper;
pub mod world;
