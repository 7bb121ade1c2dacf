//! Servers under attack on a virtual clock. A test of `shard` asserts what a scenario shows, and
//! `fulmar-lab bench trust` prints it: both play the same one.
//!
//! [`slow_peers`]: clients that offer no window, fall silent or do not read.
//! [`listener`]: SYN floods and forged segments. A scenario that cannot be set up panics: it is a test.

#![forbid(unsafe_code)]

pub mod listener;
pub mod slow_peers;
