//! The engines of fulmar, without I/O, threads and clocks: packets in, packets out, time as an argument (`no_std` and
//! `alloc`).
//!
//! One module per room; `ARCHITECTURE.md` has the rooms that each may name, and `ip`, `udp` and `tcp` never name each
//! other.
//! A [`shard::Shard`] is the whole stack as a value: see the example `two_shards`.

#![cfg_attr(not(any(test, feature = "std")), no_std)]
// For the pages of crates that show its types.
#![doc(html_root_url = "https://docs.rs/fulmar-stack/0.1.0")]
#![deny(unsafe_code)]
#![warn(unreachable_pub)]

extern crate alloc;

pub mod base;
pub mod device;
pub mod ip;
pub mod mbuf;
#[cfg(fulmar_loom)]
pub mod models;
pub mod route;
pub mod shard;
pub mod socket;
pub mod tcp;
pub mod udp;
pub mod wire;
