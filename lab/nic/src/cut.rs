//! Segmentation and checksums as the hardware does them: a frame of the host becomes packets on the
//! wire, each a copy. Source of the layout: RFC 9293 section 3.1, RFC 768, RFC 791, RFC 8200.

use std::net::IpAddr;

use fulmar_stack::base::{Gso, GsoKind};
use fulmar_stack::device::Packet;
use fulmar_stack::wire::checksum::{Sum, checksum};
use fulmar_stack::wire::{eth, protocol, tcp, udp};

use super::frame::{Headers, Transport, WireFrame};

/// Longest headers in front of a payload that is cut.
const MAX_HEADER_BYTES: usize = 256;
// Fields of IP headers, from the start of the frame.
const V4_TOTAL: usize = eth::HEADER_BYTES + 2;
const V4_IDENT: usize = eth::HEADER_BYTES + 4;
const V4_FLAGS: usize = eth::HEADER_BYTES + 6;
const DONT_FRAGMENT: u8 = 0x40;
const V4_CHECKSUM: usize = eth::HEADER_BYTES + 10;
const V6_PAYLOAD: usize = eth::HEADER_BYTES + 4;
// Fields of transport headers, from their start.
const TCP_SEQ: usize = 4;
const TCP_FLAGS: usize = 13;
const UDP_LENGTH: usize = 4;

/// Memory for frames on the wire, which goes round.
#[derive(Default)]
pub struct Spare(Vec<Vec<u8>>);

/// Pieces of memory that are kept for later frames.
const SPARES: usize = 1024;

impl Spare {
    fn take(&mut self) -> Vec<u8> {
        self.0.pop().unwrap_or_default()
    }

    /// Takes over what another has, as far as there is space.
    pub fn take_all(&mut self, other: &mut Spare) {
        if self.0.is_empty() {
            std::mem::swap(&mut self.0, &mut other.0);
        } else {
            let space = SPARES.saturating_sub(self.0.len()).min(other.0.len());
            self.0.extend(other.0.drain(other.0.len() - space..));
        }
    }

    pub fn put(&mut self, mut v: Vec<u8>) {
        if self.0.len() < SPARES {
            v.clear();
            self.0.push(v);
        }
    }
}

/// Makes packets of a frame; false if its request does not fit its headers.
pub fn cut(p: &Packet, spare: &mut Spare, mut each: impl FnMut(WireFrame)) -> bool {
    let Some(gso) = p.offload.gso else {
        each(single(p, spare));
        return true;
    };
    let Some(template) = Template::of(p, gso) else { return false };
    let mut rest = Cursor::new(p, template.header_bytes);
    let payload = p.chain.len() - template.header_bytes;
    let mss = usize::from(gso.segment_bytes);
    let mut done = 0;
    while done < payload {
        let n = mss.min(payload - done);
        let mut bytes = spare.take();
        bytes.extend_from_slice(template.headers());
        rest.copy(n, &mut bytes);
        template.patch(&mut bytes, done, done + n == payload);
        each(WireFrame::whole(bytes, true));
        done += n;
    }
    true
}

/// A frame that is a packet already, with its checksum completed if the host left that to us.
fn single(p: &Packet, spare: &mut Spare) -> WireFrame {
    let mut bytes = spare.take();
    p.chain.slices().for_each(|s| bytes.extend_from_slice(s));
    let o = &p.offload;
    let (start, at) = (usize::from(o.csum_start), usize::from(o.csum_start + o.csum_offset));
    let is_covered = o.needs_csum && at + 2 <= bytes.len();
    if is_covered {
        let sum = checksum(&bytes[start..]);
        store(&mut bytes, at, usize::from(o.csum_offset), sum);
    }
    let is_sound = is_covered || is_sound(&bytes);
    WireFrame::whole(bytes, is_sound)
}

/// A computed UDP checksum of zero is sent as all ones (RFC 768).
fn store(bytes: &mut [u8], at: usize, offset: usize, sum: u16) {
    let sum = if sum == 0 && offset == udp::CHECKSUM_OFFSET { 0xffff } else { sum };
    put(bytes, at, sum);
}

fn put(bytes: &mut [u8], at: usize, v: u16) {
    if let Some(field) = bytes.get_mut(at..at + 2) {
        field.copy_from_slice(&v.to_be_bytes());
    }
}

/// Reads the payload of a chain from front to back.
struct Cursor<'a> {
    slices: Box<dyn Iterator<Item = &'a [u8]> + 'a>,
    now: &'a [u8],
}

impl<'a> Cursor<'a> {
    fn new(p: &'a Packet, skip: usize) -> Cursor<'a> {
        let mut slices = Box::new(p.chain.slices());
        let (mut now, mut left) = (slices.next().unwrap_or(&[]), skip);
        while left >= now.len() && !now.is_empty() {
            left -= now.len();
            now = slices.next().unwrap_or(&[]);
        }
        Cursor { slices, now: now.get(left..).unwrap_or(&[]) }
    }

    fn copy(&mut self, n: usize, to: &mut Vec<u8>) {
        let mut left = n;
        while left > 0 {
            if self.now.is_empty() {
                let Some(next) = self.slices.next() else { return };
                self.now = next;
            }
            let (front, back) = self.now.split_at(left.min(self.now.len()));
            to.extend_from_slice(front);
            left -= front.len();
            self.now = back;
        }
    }
}

/// The headers of a super-frame, and the offsets of their fields.
struct Template {
    bytes: [u8; MAX_HEADER_BYTES],
    header_bytes: usize,
    l4: usize,
    src: IpAddr,
    dst: IpAddr,
    gso: Gso,
}

impl Template {
    fn of(p: &Packet, gso: Gso) -> Option<Template> {
        let header_bytes = usize::from(gso.header_bytes);
        let mut bytes = [0; MAX_HEADER_BYTES];
        let known = bytes.get_mut(..header_bytes)?;
        if p.chain.len() <= header_bytes || gso.segment_bytes == 0 {
            return None;
        }
        p.chain.copy_to(0, known);
        let seen = Headers::parse(known, p.chain.len())?;
        let is_fit = match (gso.kind, seen.transport) {
            (GsoKind::TcpV4, Transport::Tcp(_)) => seen.network.src.is_ipv4(),
            (GsoKind::TcpV6, Transport::Tcp(_)) => seen.network.src.is_ipv6(),
            (GsoKind::Udp, Transport::Udp(_)) => true,
            _ => false,
        };
        let is_fit = is_fit && seen.payload_at == header_bytes;
        let (src, dst, l4) = (seen.network.src, seen.network.dst, seen.network.l4);
        is_fit.then_some(Template { bytes, header_bytes, l4, src, dst, gso })
    }

    fn headers(&self) -> &[u8] {
        self.bytes.get(..self.header_bytes).unwrap_or(&[])
    }

    /// Rewrites the headers for the packet whose payload begins `done` bytes into the super-frame.
    fn patch(&self, b: &mut [u8], done: usize, is_last: bool) {
        let l3_bytes = b.len() - eth::HEADER_BYTES;
        if self.src.is_ipv4() {
            let packets_before = (done / usize::from(self.gso.segment_bytes)) as u16;
            let ident = u16::from_be_bytes([self.bytes[V4_IDENT], self.bytes[V4_IDENT + 1]]);
            put(b, V4_TOTAL, l3_bytes as u16);
            if self.bytes[V4_FLAGS] & DONT_FRAGMENT == 0 {
                put(b, V4_IDENT, ident.wrapping_add(packets_before));
            }
            put(b, V4_CHECKSUM, 0);
            let sum = checksum(b.get(eth::HEADER_BYTES..self.l4).unwrap_or(&[]));
            put(b, V4_CHECKSUM, sum);
        } else {
            put(b, V6_PAYLOAD, (l3_bytes - 40) as u16);
        }
        let l4_bytes = b.len() - self.l4;
        let (kind, offset) = match self.gso.kind {
            GsoKind::Udp => {
                put(b, self.l4 + UDP_LENGTH, l4_bytes as u16);
                (protocol::UDP, udp::CHECKSUM_OFFSET)
            }
            GsoKind::TcpV4 | GsoKind::TcpV6 => {
                self.patch_tcp(b, done, is_last);
                (protocol::TCP, tcp::CHECKSUM_OFFSET)
            }
        };
        put(b, self.l4 + offset, 0);
        let mut sum = Sum::new();
        sum.add_pseudo(self.src, self.dst, kind, l4_bytes as u32);
        sum.add_bytes(b.get(self.l4..).unwrap_or(&[]));
        store(b, self.l4 + offset, offset, sum.finish());
    }

    /// FIN and PSH stay with the last packet, CWR with the first.
    fn patch_tcp(&self, b: &mut [u8], done: usize, is_last: bool) {
        let Some(h) = b.get_mut(self.l4..).and_then(|l4| l4.first_chunk_mut::<20>()) else {
            return;
        };
        let seq = u32::from_be_bytes([h[4], h[5], h[6], h[7]]).wrapping_add(done as u32);
        h[TCP_SEQ..TCP_SEQ + 4].copy_from_slice(&seq.to_be_bytes());
        let mut flags = tcp::Flags(h[TCP_FLAGS].into());
        if !is_last {
            flags = flags.without(tcp::Flags::FIN | tcp::Flags::PSH);
        }
        if done > 0 {
            flags = flags.without(tcp::Flags::CWR);
        }
        h[TCP_FLAGS] = flags.0 as u8;
    }
}

/// Whether the transport checksum of a packet is right; false for one that carries none.
pub fn is_sound(bytes: &[u8]) -> bool {
    let Some(seen) = Headers::parse(bytes, bytes.len()) else { return false };
    let kind = match seen.transport {
        Transport::Tcp(_) => protocol::TCP,
        Transport::Udp(_) => protocol::UDP,
        Transport::Other(_) => return false,
    };
    let Some(l4) = bytes.get(seen.network.l4..seen.payload_at + seen.payload_bytes) else {
        return false;
    };
    let mut sum = Sum::new();
    sum.add_pseudo(seen.network.src, seen.network.dst, kind, l4.len() as u32);
    sum.add_bytes(l4);
    sum.is_valid()
}
