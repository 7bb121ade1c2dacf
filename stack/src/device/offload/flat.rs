//! Frames as the packets that they stand for, complete and in contiguous memory: for a device whose other side takes
//! bytes.

use alloc::vec::Vec;

use crate::base::DropReason;
use crate::device::Packet;
use crate::wire::checksum::Sum;

use super::{Template, put_u16, stored};

/// Packets one after the other in one buffer, which is used again.
#[derive(Clone, Debug, Default)]
pub struct Packets {
    /// Longer than the packets: memory is initialized once.
    bytes: Vec<u8>,
    /// Where each packet ends.
    ends: Vec<usize>,
}

impl Packets {
    /// No packets.
    pub fn new() -> Packets {
        Packets::default()
    }

    /// Removes the packets, and keeps the memory.
    pub fn clear(&mut self) {
        self.ends.clear();
    }

    /// The number of packets.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// The bytes of all packets.
    pub fn total_bytes(&self) -> usize {
        self.ends.last().copied().unwrap_or(0)
    }

    /// Packet number `i`.
    pub fn get(&self, i: usize) -> Option<&[u8]> {
        let end = *self.ends.get(i)?;
        let start = i.checked_sub(1).and_then(|before| self.ends.get(before)).copied();
        self.bytes.get(start.unwrap_or(0)..end)
    }

    /// The packets in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &[u8]> {
        (0..self.len()).map(|i| self.get(i).unwrap_or_default())
    }

    /// Appends a copy of each packet that a frame stands for, with complete checksums, each without its first `skip` bytes
    /// (its link header, or nothing of it).
    ///
    /// # Errors
    /// [`DropReason::BadOffload`]: the headers do not match the offload request. Nothing was appended.
    pub fn append(&mut self, frame: &Packet, skip: usize) -> Result<(), DropReason> {
        if frame.offload.gso.is_none() {
            return self.append_single(frame, skip);
        }
        let template = Template::of(frame).ok_or(DropReason::BadOffload)?;
        let mut payload = frame.chain.reader();
        payload.skip(template.header_bytes);
        let segment_bytes = usize::from(template.gso.segment_bytes);
        let all = frame.chain.len() - template.header_bytes;
        for start in (0..all).step_by(segment_bytes) {
            let range = start..all.min(start + segment_bytes);
            let mut headers = template.headers;
            template.fix(&mut headers, &range, range.end == all);
            let packet = self.extend(template.header_bytes - skip + range.len());
            let (front, rest) = packet.split_at_mut(template.header_bytes - skip);
            front.copy_from_slice(&headers[skip..template.header_bytes]);
            payload.read(rest);
            let l4 = template.l4 - skip;
            complete(packet, l4, template.checksum_offset());
        }
        Ok(())
    }

    fn append_single(&mut self, frame: &Packet, skip: usize) -> Result<(), DropReason> {
        let o = frame.offload;
        let bytes = frame.chain.len().checked_sub(skip).ok_or(DropReason::Truncated)?;
        let start = usize::from(o.csum_start);
        let field_end = start + usize::from(o.csum_offset) + 2;
        if o.needs_csum && (start < skip || field_end > frame.chain.len()) {
            return Err(DropReason::BadOffload);
        }
        let packet = self.extend(bytes);
        frame.chain.copy_to(skip, packet);
        if o.needs_csum {
            complete(packet, start - skip, o.csum_offset.into());
        }
        Ok(())
    }

    /// Appends a packet of unspecified bytes.
    fn extend(&mut self, bytes: usize) -> &mut [u8] {
        let start = self.total_bytes();
        let end = start + bytes;
        if self.bytes.len() < end {
            self.bytes.resize(end.next_power_of_two(), 0);
        }
        self.ends.push(end);
        &mut self.bytes[start..end]
    }
}

/// Stores the checksum of the bytes from `l4` on, whose field has the sum of the pseudo-header.
fn complete(packet: &mut [u8], l4: usize, offset: usize) {
    let mut sum = Sum::new();
    sum.add_bytes(&packet[l4..]);
    put_u16(packet, l4 + offset, stored(sum.finish(), offset));
}
