//! The interface between a stack and a device, and devices that wrap a device.
//!
//! Packets are sent and received as whole Ethernet frames in chains of mbufs ([`Packet`]), many at a time ([`Burst`]).
//! A frame may stand for many packets (a *super-frame*: TSO, USO, GRO) and may lack its transport checksum
//! ([`Offload`]). Offloads that a device lacks are done in software before it ([`offload::fit`]). [`Device`] is the
//! contract; it defines who owns a frame when.
//!
//! This room makes no system call and reads no clock; with the feature `std` it writes captures to a file.

#![forbid(unsafe_code)]

mod burst;
mod contract;
pub mod delay;
mod forward;
pub mod gro;
pub mod impair;
pub mod impaired;
#[cfg(feature = "std")]
pub mod memory;
pub mod moderation;
pub mod offload;
mod packet;
#[cfg(feature = "std")]
pub mod pcap;
mod placement;
pub mod plain_ip;
mod rng;
mod tally;
#[cfg(test)]
mod testing;
pub mod uso;

pub use crate::base::{Gso, GsoKind, Medium, Offload};
pub use crate::forward_device;
pub use burst::Burst;
pub use contract::{
    Attachment, Caps, Device, DeviceStats, DirectPlacement, Interest, LinkState, Peek, RawFd,
    TxTime, Unsupported, Wake, WakeFd,
};
pub use packet::Packet;
pub use placement::WritableRanges;
pub use rng::{Chance, Rng};
pub use tally::Tally;
