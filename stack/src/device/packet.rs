//! A frame with its offload request.

use crate::base::{Counters, DropReason, Offload};
use crate::mbuf::{Chain, Pool};

/// A whole Ethernet frame, without FCS, with its offload request.
#[derive(Debug)]
pub struct Packet {
    /// The bytes. All headers of a frame to be sent are in its first mbuf.
    pub chain: Chain,
    /// The offload request, or the device's verification. Offsets count from the Ethernet header.
    pub offload: Offload,
}

impl Packet {
    /// A frame without an offload request.
    pub fn new(chain: Chain) -> Packet {
        Packet { chain, offload: Offload::default() }
    }

    /// Whether a receiver need not verify the transport checksum: the device has, or the frame was never on a wire.
    pub const fn is_checksum_trusted(&self) -> bool {
        self.offload.needs_csum || self.offload.csum_valid
    }

    /// Drops the frame: counts `reason` and frees its memory.
    pub fn discard(self, reason: DropReason, pool: &mut Pool, counters: &mut Counters) {
        counters.drop_packet(reason);
        pool.free(self.chain);
    }

    /// The number of packets on the wire that the frame represents; at least 1.
    pub fn wire_packets(&self) -> usize {
        let Some(gso) = self.offload.gso else { return 1 };
        let payload = self.chain.len().saturating_sub(usize::from(gso.header_bytes));
        payload.div_ceil(usize::from(gso.segment_bytes).max(1)).max(1)
    }
}
