//! The words that every room of fulmar shares: time, sequence numbers, addresses and flow keys,
//! ids, the index of flows, the one list of drop reasons, the one list of counters, the one list of stages, token buckets.
//!
//! No I/O, no clock; nothing allocates but the index of flows.

#![cfg_attr(not(test), no_std)]
#![forbid(unsafe_code)]

extern crate alloc;

mod counters;
mod drops;
mod flow;
mod flow_index;
mod limit;
mod offload;
mod probe;
mod seq;
mod time;

pub use counters::{Counter, Counters};
pub use drops::DropReason;
pub use flow::{EtherAddr, FlowKey, SlotId, SocketHandle, Zone, with_zone, zone_of};
pub use flow_index::{FlowHasher, FlowIndex};
pub use limit::TokenBucket;
pub use offload::{Gso, GsoKind, Offload};
pub use probe::{NoProbe, Outside, Probe, Stage, Variation};
pub use seq::SeqNum;
pub use time::{Duration, Instant};
