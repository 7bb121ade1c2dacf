//! What tests of several crates share. Its scenarios are servers under attack on a virtual clock: a test of
//! `shard` asserts what a scenario shows, and `fulmar-lab bench trust` prints it, so both play the same one.
//!
//! [`slow_peers`]: clients that offer no window, fall silent or do not read.
//! [`listener`]: SYN floods and forged segments.
//! [`stations`]: two stations and what their programs do.
//! [`tamper`], [`placing`]: devices that frames are changed by, or placed by.
//! [`namespace`]: tests against the kernel. What cannot be set up panics: it is a test.

#![forbid(unsafe_code)]

pub mod listener;
pub mod namespace;
pub mod placing;
pub mod slow_peers;
pub mod stations;
pub mod tamper;
