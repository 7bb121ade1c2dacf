//! The receiving half of the hardware: frames from the wire into posted buffers.
//!
//! What is on its way waits in a lane, with the time at which its last bit arrives. Frames that are
//! due go into buffers that the host has posted, each frame from the start of a buffer on, as many
//! as it needs. Where no buffer is posted, the wire pauses (IEEE 802.3 annex 31B) or the frame is
//! lost, as configured.

use std::collections::VecDeque;

use fulmar_base::{Instant, Offload};
use fulmar_mbuf::Mbuf;
use fulmar_wire::checksum::Sum;
use fulmar_wire::{eth, protocol, tcp, udp};

use super::Coalesce;
use super::frame::{Rest, Seen, Transport, WireFrame};
use super::meter::{Board, bump};
use super::pattern;
use super::ring::Ring;

/// Frames on their way to one NIC at most; beyond that the far end holds back.
pub const LANE_PKTS: usize = 4096;

/// A posted buffer. The hardware writes into the spare room of the mbuf.
pub struct Buffer {
    pub m: Mbuf,
    /// Set with the last buffer of a frame: what the hardware found out about it.
    pub end: Option<Offload>,
}

/// See the module's header.
pub struct Rx {
    pub lane: VecDeque<(Instant, WireFrame)>,
    /// It verifies checksums, so that the host need not.
    csum: bool,
    /// It aggregates: frames of up to so many bytes.
    lro: Option<usize>,
    flow_control: bool,
    /// Room of a posted buffer at the least.
    buffer_bytes: usize,
    coalesce: Coalesce,
    /// When the oldest frame came that the host has not taken.
    pub first_pending: Option<Instant>,
    /// Frames that the host has not taken.
    pub pending: usize,
}

impl Rx {
    pub fn new(config: &super::SimConfig) -> Rx {
        Rx {
            lane: VecDeque::with_capacity(64),
            csum: config.csum,
            lro: config.lro.filter(|_| config.csum),
            flow_control: config.flow_control,
            buffer_bytes: config.rx_buffer_bytes,
            coalesce: config.rx_coalesce,
            first_pending: None,
            pending: 0,
        }
    }

    /// Whether the far end may put another frame on the wire.
    pub fn has_room(&self) -> bool {
        self.lane.len() < LANE_PKTS
    }

    /// The largest train that may arrive as it is, in bytes of IP packet.
    pub fn takes_trains(&self) -> Option<usize> {
        self.lro
    }

    /// When the next frame is due.
    pub fn next_due(&self) -> Option<Instant> {
        self.lane.front().map(|(due, _)| *due)
    }

    /// When the hardware asks for attention: after so many frames, or so long after the first.
    pub fn interrupt_at(&self) -> Option<Instant> {
        let first = self.first_pending.or_else(|| self.next_due())?;
        let by_time = first + self.coalesce.delay;
        let more = self.coalesce.packets.max(1).saturating_sub(self.pending);
        if more == 0 {
            return Some(first);
        }
        let by_count = self.lane.get(more - 1).map(|(due, _)| *due);
        Some(by_count.map_or(by_time, |at| at.min(by_time)))
    }

    /// The host has taken frames; so many are left.
    pub fn taken(&mut self, left: usize, now: Instant) {
        self.pending = left;
        self.first_pending = (left > 0).then(|| self.first_pending.unwrap_or(now));
    }

    /// Moves what is due into posted buffers; returns the bytes moved.
    pub fn run(&mut self, now: Instant, ring: &mut Ring<Buffer>, board: &Board) -> u64 {
        let mut bytes = 0;
        while self.next_due().is_some_and(|due| due <= now) {
            let fits = self.lane.front().is_some_and(|(_, f)| self.fits(f, ring));
            if !fits && self.flow_control {
                break;
            }
            let Some((due, frame)) = self.lane.pop_front() else { break };
            let packets = frame.packets() as u64;
            match fits.then(|| self.land(&frame, ring)).flatten() {
                Some(written) => {
                    bytes += written;
                    self.pending += 1;
                    self.first_pending.get_or_insert(due);
                    bump(&board.counts.rx_frames, 1);
                    bump(&board.counts.rx_packets, packets);
                    bump(&board.counts.rx_bytes, frame.len() as u64);
                }
                None => bump(&board.counts.rx_missed, packets),
            }
        }
        bytes
    }

    fn fits(&self, frame: &WireFrame, ring: &Ring<Buffer>) -> bool {
        ring.waiting() * self.buffer_bytes >= frame.len()
    }

    /// Writes one frame into the next buffers, of which there are enough.
    fn land(&self, frame: &WireFrame, ring: &mut Ring<Buffer>) -> Option<u64> {
        let mut offload = self.offload(frame);
        let mut left = Source { frame, at: 0 };
        let mut first = true;
        let mut written = 0;
        while first || left.remaining() > 0 {
            let mut b = ring.fetch()?;
            let (n, touched) = left.write(b.m.spare_mut());
            if n == 0 && left.remaining() > 0 {
                ring.complete(b);
                return None;
            }
            b.m.set_len(n);
            written += touched;
            if !self.csum {
                finish_checksum(&mut b.m);
            }
            b.end = (left.remaining() == 0).then_some(std::mem::take(&mut offload));
            ring.complete(b);
            first = false;
        }
        Some(written)
    }

    /// What the host is told about a frame.
    fn offload(&self, frame: &WireFrame) -> Offload {
        if !self.csum {
            return Offload::default();
        }
        let Some((csum_start, csum_offset)) = frame.partial_csum else {
            return Offload { csum_valid: true, ..Offload::default() };
        };
        Offload { needs_csum: true, csum_start, csum_offset, csum_valid: false, gso: frame.gso }
    }
}

/// A frame that is being written.
struct Source<'a> {
    frame: &'a WireFrame,
    at: usize,
}

impl Source<'_> {
    fn remaining(&self) -> usize {
        self.frame.len() - self.at
    }

    /// Writes as much as fits; returns how much that was and how much of it was touched.
    fn write(&mut self, to: &mut [u8]) -> (usize, u64) {
        let head = self.frame.head().get(self.at..).unwrap_or(&[]);
        let n = head.len().min(to.len());
        let (front, back) = to.split_at_mut(n);
        front.copy_from_slice(head.get(..n).unwrap_or(&[]));
        self.at += n;
        let from = self.at.saturating_sub(self.frame.head().len());
        let rest = self.remaining().min(back.len());
        let room = back.get_mut(..rest).unwrap_or(&mut []);
        let mut touched = n as u64;
        match &self.frame.rest {
            Rest::None | Rest::Untouched(_) => {}
            Rest::Bytes(b) => {
                room.copy_from_slice(b.get(from..from + rest).unwrap_or(&[]));
                touched += rest as u64;
            }
            Rest::Pattern(start, _) => {
                pattern::fill(start + from as u64, room);
                touched += rest as u64;
            }
        }
        self.at += rest;
        (n + rest, touched)
    }
}

/// Stores the transport checksum of a single packet that the far end made, for a host that sums for
/// itself. A sum that was there already comes out the same.
fn finish_checksum(m: &mut Mbuf) {
    let len = m.len();
    let Some(bytes) = m.as_mut_slice() else { return };
    let Some(seen) = Seen::of(bytes, len) else { return };
    let (kind, offset) = match seen.transport {
        Transport::Tcp(_) => (protocol::TCP, tcp::CHECKSUM_OFFSET),
        Transport::Udp(_) => (protocol::UDP, udp::CHECKSUM_OFFSET),
        Transport::Other(_) => return,
    };
    let end = seen.payload_at + seen.payload_bytes;
    let at = seen.l4 + offset;
    if at + 2 > end || end > len || seen.l4 < eth::HEADER_BYTES {
        return;
    }
    bytes[at..at + 2].fill(0);
    let mut sum = Sum::new();
    sum.add_pseudo(seen.src, seen.dst, kind, (end - seen.l4) as u32);
    sum.add_bytes(&bytes[seen.l4..end]);
    let sum = if kind == protocol::UDP { sum.finish_udp() } else { sum.finish() };
    bytes[at..at + 2].copy_from_slice(&sum.to_be_bytes());
}
