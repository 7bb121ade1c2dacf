//! Counting the frames of one burst, so that the counters are touched once per burst.

use fulmar_base::{Counter, Counters};

use crate::{DeviceStats, Packet};

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

    /// Counts one frame of a medium without a link layer: the bytes of its IP packet.
    #[inline]
    pub fn add_plain_ip(&mut self, p: &Packet) {
        self.add(p);
        self.bytes -= (p.chain.len() as u64).min(crate::plain_ip::HEADER_BYTES as u64);
    }

    /// Adds the burst to what was sent.
    pub fn sent(self, counters: &mut Counters, stats: &mut DeviceStats) {
        counters.add(Counter::TxFrames, self.frames);
        counters.add(Counter::TxPackets, self.packets);
        counters.add(Counter::TxBytes, self.bytes);
        stats.tx_frames += self.frames;
        stats.tx_bytes += self.bytes;
    }

    /// Adds the burst to what was received.
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
