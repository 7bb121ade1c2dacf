//! A wrapper that writes every frame to a capture file (pcapng).
//!
//! Frames pass unchanged. Each is written with its direction and its time in nanoseconds, as it crosses the device
//! interface: a super-frame is one long frame, and a checksum that the device is to complete is partial, as in any
//! capture on Linux. (Readers do not verify transport checksums by default.) A sent frame is written if the device
//! accepted it.
//!
//! The capture is buffered, and written to the file when the buffer is full, before a sleep ([`Device::arm`]) and at
//! the end. If the file cannot be written, the capture stops and the traffic continues; [`PcapWriter::error`] returns
//! the error.
//!
//! ```text
//! section header | interface description | packet | packet | ...
//! block: type u32, length u32, body padded to 4, length u32 again; in the writer's byte order
//! ```
//!
//! Source: draft-ietf-opsawg-pcapng sections 4.1, 4.2, 4.3.

use std::io::{self, Write};

use crate::base::{Counters, Duration, Instant};
use crate::mbuf::Pool;

use crate::device::{Burst, Caps, Device, DeviceStats, Medium, Packet, forward_device, plain_ip};

const SECTION_HEADER: u32 = 0x0a0d_0d0a;
const BYTE_ORDER_MAGIC: u32 = 0x1a2b_3c4d;
const INTERFACE_DESCRIPTION: u32 = 1;
const ENHANCED_PACKET: u32 = 6;
const LINKTYPE_ETHERNET: u16 = 1;
/// IP packets without a link layer.
const LINKTYPE_RAW: u16 = 101;
const OPT_IF_NAME: u16 = 2;
const OPT_IF_TSRESOL: u16 = 9;
const OPT_EPB_FLAGS: u16 = 2;
/// Size from which on the buffer is written to the file.
const BUFFER_BYTES: usize = 256 << 10;

/// The direction of a frame; the two lowest bits of the flags word (section 4.3.1).
#[derive(Clone, Copy)]
enum Direction {
    Inbound = 1,
    Outbound = 2,
}

/// Encodes a capture into memory.
struct Encoder {
    buffer: Vec<u8>,
    /// Time of day at the origin of the clock that the stack is driven by.
    origin: Duration,
    /// Bytes of each frame that are captured at most.
    snap_bytes: usize,
    /// Bytes in front of each frame that are not on the wire.
    hidden_bytes: usize,
}

impl Encoder {
    /// Starts a capture: section header and interface description.
    fn new(name: &str, medium: Medium, origin: Duration, snap_bytes: usize) -> Encoder {
        let (link_type, hidden_bytes) = match medium {
            Medium::Ethernet => (LINKTYPE_ETHERNET, 0),
            Medium::Ip => (LINKTYPE_RAW, plain_ip::HEADER_BYTES),
        };
        let buffer = Vec::with_capacity(BUFFER_BYTES);
        let mut e = Encoder { buffer, origin, snap_bytes, hidden_bytes };
        e.block(SECTION_HEADER, |b| {
            put(b, &BYTE_ORDER_MAGIC.to_ne_bytes());
            put(b, &1u16.to_ne_bytes());
            put(b, &0u16.to_ne_bytes());
            // Length of the section: unspecified.
            put(b, &u64::MAX.to_ne_bytes());
        });
        e.block(INTERFACE_DESCRIPTION, |b| {
            put(b, &link_type.to_ne_bytes());
            put(b, &0u16.to_ne_bytes());
            put(b, &u32::try_from(snap_bytes).unwrap_or(u32::MAX).to_ne_bytes());
            option(b, OPT_IF_NAME, name.as_bytes());
            // Timestamps have a resolution of 10^-9 s.
            option(b, OPT_IF_TSRESOL, &[9]);
            option(b, 0, &[]);
        });
        e
    }

    /// Appends a block, with its length before and after the body.
    fn block(&mut self, kind: u32, body: impl FnOnce(&mut Vec<u8>)) {
        let start = self.buffer.len();
        put(&mut self.buffer, &kind.to_ne_bytes());
        put(&mut self.buffer, &[0; 4]);
        body(&mut self.buffer);
        let length = ((self.buffer.len() + 4 - start) as u32).to_ne_bytes();
        put(&mut self.buffer, &length);
        self.buffer[start + 4..start + 8].copy_from_slice(&length);
    }

    fn packet(&mut self, now: Instant, direction: Direction, p: &Packet) {
        let time_ns = (self.origin.as_nanos() as u64).wrapping_add(now.as_nanos());
        let hidden_bytes = self.hidden_bytes;
        let frame_bytes = p.chain.len().saturating_sub(hidden_bytes);
        let kept_bytes = frame_bytes.min(self.snap_bytes);
        self.block(ENHANCED_PACKET, |b| {
            put(b, &0u32.to_ne_bytes());
            put(b, &((time_ns >> 32) as u32).to_ne_bytes());
            put(b, &(time_ns as u32).to_ne_bytes());
            put(b, &(kept_bytes as u32).to_ne_bytes());
            put(b, &(frame_bytes as u32).to_ne_bytes());
            let start = b.len();
            b.resize(start + kept_bytes, 0);
            p.chain.copy_to(hidden_bytes, &mut b[start..]);
            pad(b, kept_bytes);
            option(b, OPT_EPB_FLAGS, &(direction as u32).to_ne_bytes());
            option(b, 0, &[]);
        });
    }
}

fn put(b: &mut Vec<u8>, bytes: &[u8]) {
    b.extend_from_slice(bytes);
}

/// Zeros up to a multiple of four.
fn pad(b: &mut Vec<u8>, bytes: usize) {
    put(b, &[0; 3][..bytes.next_multiple_of(4) - bytes]);
}

fn option(b: &mut Vec<u8>, code: u16, value: &[u8]) {
    put(b, &code.to_ne_bytes());
    put(b, &(value.len() as u16).to_ne_bytes());
    put(b, value);
    pad(b, value.len());
}

/// A device whose traffic is captured.
pub struct PcapWriter<D: Device, W: Write + Send> {
    inner: D,
    caps: Caps,
    encoder: Encoder,
    out: W,
    error: Option<io::Error>,
    /// The end of each frame of the burst in the buffer.
    ends: Vec<usize>,
}

impl<D: Device, W: Write + Send> PcapWriter<D, W> {
    /// Captures the traffic of `inner` to `out`, whole frames. `origin` is the time of day (since
    /// 1970) at the origin of the clock that the stack is driven by.
    pub fn new(inner: D, out: W, origin: Duration) -> PcapWriter<D, W> {
        PcapWriter::with_snap(inner, out, origin, 1 << 18)
    }

    /// The same, but keeps at most `snap_bytes` of each frame.
    pub fn with_snap(inner: D, out: W, origin: Duration, snap_bytes: usize) -> PcapWriter<D, W> {
        let medium = inner.caps().medium;
        let encoder = Encoder::new(&inner.stats().name, medium, origin, snap_bytes);
        let caps = inner.caps().exact_time();
        PcapWriter { inner, caps, encoder, out, error: None, ends: Vec::new() }
    }

    /// The error that ended the capture.
    pub fn error(&self) -> Option<&io::Error> {
        self.error.as_ref()
    }

    /// The inner device.
    pub fn inner_mut(&mut self) -> &mut D {
        &mut self.inner
    }

    /// Writes the buffer to the file; the first error ends the capture.
    pub fn flush(&mut self) {
        if self.error.is_none() && !self.encoder.buffer.is_empty() {
            let written = self.out.write_all(&self.encoder.buffer);
            self.error = written.and_then(|()| self.out.flush()).err();
        }
        self.encoder.buffer.clear();
    }

    fn flush_if_full(&mut self) {
        if self.encoder.buffer.len() >= BUFFER_BYTES {
            self.flush();
        }
    }

    /// Encodes a burst before the device takes its frames.
    fn encode_burst(&mut self, now: Instant, burst: &Burst) {
        self.ends.clear();
        self.ends.push(self.encoder.buffer.len());
        for p in burst {
            self.encoder.packet(now, Direction::Outbound, p);
            self.ends.push(self.encoder.buffer.len());
        }
    }
}

impl<D: Device, W: Write + Send> Device for PcapWriter<D, W> {
    forward_device!(self => self.inner, except caps, tx_burst, rx_burst, arm, stats);

    fn caps(&self) -> &Caps {
        &self.caps
    }

    fn tx_burst(
        &mut self,
        now: Instant,
        pool: &mut Pool,
        burst: &mut Burst,
        counters: &mut Counters,
    ) -> usize {
        if self.error.is_some() {
            return self.inner.tx_burst(now, pool, burst, counters);
        }
        self.encode_burst(now, burst);
        let taken = self.inner.tx_burst(now, pool, burst, counters);
        // Frames that the device refused are captured when they are offered again.
        self.encoder.buffer.truncate(self.ends.get(taken).copied().unwrap_or(usize::MAX));
        self.flush_if_full();
        taken
    }

    fn rx_burst(
        &mut self,
        now: Instant,
        pool: &mut Pool,
        out: &mut Burst,
        budget: usize,
        counters: &mut Counters,
    ) -> usize {
        let before = out.len();
        let count = self.inner.rx_burst(now, pool, out, budget, counters);
        if self.error.is_none() {
            for p in out.iter().skip(before) {
                self.encoder.packet(now, Direction::Inbound, p);
            }
            self.flush_if_full();
        }
        count
    }

    fn arm(&mut self) -> bool {
        let may_sleep = self.inner.arm();
        if may_sleep {
            self.flush();
        }
        may_sleep
    }

    fn stats(&self) -> DeviceStats {
        let stats = self.inner.stats();
        DeviceStats { name: format!("pcap({})", stats.name), ..stats }
    }
}

impl<D: Device, W: Write + Send> Drop for PcapWriter<D, W> {
    fn drop(&mut self) {
        self.flush();
    }
}

#[cfg(test)]
mod tests;
