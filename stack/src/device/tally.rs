//! Counts the frames of one burst, so that the counters are updated once per burst.

use crate::base::{Counter, Counters};
use crate::mbuf::Pool;

use crate::device::{Burst, DeviceStats, Packet};

/// Frames, packets and bytes of one burst.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Tally {
    /// Frames; a super-frame counts once.
    pub frames: u64,
    /// Packets on the wire that they stand for.
    pub packets: u64,
    /// Bytes of the frames.
    pub bytes: u64,
}

impl Tally {
    /// Counts one frame.
    #[inline]
    pub fn add(&mut self, p: &Packet) {
        self.frames += 1;
        self.packets += p.wire_packets() as u64;
        self.bytes += p.chain.len() as u64;
    }

    /// The burst on a medium without a link layer: only the bytes of its IP packets count.
    #[must_use]
    pub fn of_plain_ip(self) -> Tally {
        let link_bytes = self.frames.saturating_mul(crate::device::plain_ip::HEADER_BYTES as u64);
        Tally { bytes: self.bytes.saturating_sub(link_bytes), ..self }
    }

    /// Counts a sent frame and frees it.
    #[inline]
    pub fn complete(&mut self, p: Packet, pool: &mut Pool) {
        self.add(&p);
        pool.free(p.chain);
    }

    /// Counts a received frame and appends it to `out`, which has space: a receive burst is bounded by it.
    #[inline]
    pub fn receive(&mut self, p: Packet, out: &mut Burst) {
        self.add(&p);
        let _ = out.push(p);
    }

    /// Adds the burst to the transmit counts.
    pub fn sent(self, counters: &mut Counters, stats: &mut DeviceStats) {
        counters.add(Counter::TxFrames, self.frames);
        counters.add(Counter::TxPackets, self.packets);
        counters.add(Counter::TxBytes, self.bytes);
        stats.tx_frames += self.frames;
        stats.tx_bytes += self.bytes;
    }

    /// Adds the burst to the receive counts.
    pub fn received(self, counters: &mut Counters, stats: &mut DeviceStats) {
        counters.add(Counter::RxFrames, self.frames);
        counters.add(Counter::RxPackets, self.packets);
        counters.add(Counter::RxBytes, self.bytes);
        stats.rx_frames += self.frames;
        stats.rx_bytes += self.bytes;
    }
}

impl core::ops::AddAssign for Tally {
    fn add_assign(&mut self, other: Tally) {
        self.frames += other.frames;
        self.packets += other.packets;
        self.bytes += other.bytes;
    }
}
