//! Types that all crates of fulmar share: time, sequence numbers, addresses, flow keys, handles, the
//! flow hash table, secrets and random numbers, token buckets, offload descriptors, and the lists of drop
//! reasons, counters and stages.
//!
//! No I/O and no clock. Only `FlowIndex` allocates.

#![forbid(unsafe_code)]

mod chacha;
mod counters;
mod drops;
mod flow;
mod flow_index;
mod ip_version;
mod limit;
mod medium;
mod mtu_discovery;
mod offload;
mod owner;
mod ports;
mod random;
mod secrets;
mod seq;
mod stage;
mod time;

pub use counters::{Counter, Counters};
pub use drops::DropReason;
pub(crate) use flow::Zone;
pub use flow::{EtherAddr, FlowKey, SlotId, SocketHandle, with_zone, zone_of};
pub(crate) use flow_index::FlowHasher;
pub(crate) use flow_index::FlowIndex;
pub(crate) use ip_version::IpVersion;
pub(crate) use limit::TokenBucket;
pub use medium::Medium;
pub use mtu_discovery::MtuDiscovery;
pub use offload::{Gso, GsoKind, Offload};
pub use owner::OwnerKey;
pub(crate) use ports::ephemeral_ports;
pub use random::Random;
pub use secrets::{Key, KeyUse, Secrets};
pub use seq::SeqNum;
pub use stage::{Observer, Stage, Stages};
#[doc(no_inline)]
pub use time::Duration;
pub use time::Instant;
