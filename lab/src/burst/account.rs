//! What a stack spends per frame where it sends them one by one, and many at once.
//!
//! The rigs of this bench are devices without a stack. Its page shows beside them what a whole stack
//! makes of bursts, stage by stage: datagrams of the same length, one in a call and 64 in a call.

use std::io;

use super::rig::HEADER_BYTES;
use super::{Device, FRAME_BYTES, Options};
use crate::account::Figures;
use crate::udp::{self, Method};

/// One by one, and together.
const CALLS: [Method; 4] =
    [Method::Connected, Method::Many, Method::Received, Method::ReceivedMany];

/// The accounts of a stack over those of the options' devices that datagrams are sent over.
///
/// # Errors
/// No CPU to run on; a device that fails.
pub fn accounts(options: &Options) -> io::Result<Vec<Figures>> {
    if !options.fulmar {
        return Ok(Vec::new());
    }
    let of = |d: &Device| match d {
        Device::Sim => Some(udp::Device::Sim),
        Device::Tap => Some(udp::Device::Tap),
        Device::Packet | Device::Shm | Device::Link => None,
    };
    let devices: Vec<udp::Device> = options.devices.iter().filter_map(of).collect();
    let frame_bytes = options.frame_bytes.iter().copied().min().unwrap_or(FRAME_BYTES[0]);
    udp::of_calls(&devices, &CALLS, frame_bytes.saturating_sub(HEADER_BYTES).max(1))
}
