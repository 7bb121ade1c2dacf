//! What a stack asks of a device, and devices that wrap a device.
//!
//! Packets leave and enter as whole Ethernet frames in chains of mbufs ([`Packet`]), many at a time
//! ([`Burst`]). A frame may stand for many packets (a *super-frame*) and may lack its transport
//! checksum ([`Offload`]); what a device cannot do about that is done in software, once, on the way
//! to it ([`offload::fit`]). [`Device`] is the contract, and says who owns a frame when.
//!
//! This room does no system call and reads no clock.

#![forbid(unsafe_code)]

mod burst;
pub mod delay;
mod device;
pub mod fault;
pub mod gro;
pub mod moderation;
pub mod offload;
mod packet;
pub mod pcap;
mod placement;
mod rng;
mod tally;
#[cfg(test)]
mod testing;
pub mod uso;

pub use burst::Burst;
pub use device::{Caps, Device, DeviceStats, Gather, LinkState, Peek, Scatter, Unsupported};
pub use fulmar_base::{Gso, GsoKind, Offload};
pub use packet::Packet;
pub use placement::{FrameParser, Placement, PlacementHint, Rooms, TagBuffers};
pub use rng::{Chance, Rng};
pub use tally::Tally;
