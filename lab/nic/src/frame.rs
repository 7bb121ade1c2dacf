//! Frames on the simulated wire.

use std::net::IpAddr;

use fulmar_stack::base::{EtherAddr, Gso, GsoKind};
use fulmar_stack::wire::{eth, ipv4, ipv6, protocol};

pub use fulmar_stack::wire::dissect::{Headers, Transport};

/// Bytes at the front of a frame that lie in the descriptor of the wire: the headers of nearly
/// everything (Ethernet, IPv6 and the longest TCP header are 114).
pub const HEAD_BYTES: usize = 128;

/// The bytes after the front of a frame.
pub enum Rest {
    /// Nothing.
    None,
    /// These bytes; the memory goes round.
    Bytes(Vec<u8>),
    /// Bytes of [`super::pattern`]: their offset and their number.
    Pattern(u64, usize),
    /// This number of arbitrary bytes: the buffer keeps its contents.
    Untouched(usize),
}

impl Rest {
    pub fn len(&self) -> usize {
        match self {
            Rest::None => 0,
            Rest::Bytes(b) => b.len(),
            Rest::Pattern(_, n) | Rest::Untouched(n) => *n,
        }
    }
}

/// A frame on the wire. With `gso` it stands for a train of packets; the headers describe the whole train.
pub struct WireFrame {
    head: [u8; HEAD_BYTES],
    head_bytes: usize,
    pub rest: Rest,
    pub gso: Option<Gso>,
    /// The transport checksum holds the sum of the pseudo header only, which is as good as a right
    /// one: what it covers is not read on this wire. Where it begins, and its place from there.
    pub partial_csum: Option<(u16, u16)>,
    /// The transport checksum is known to be right.
    pub is_sound: bool,
}

impl WireFrame {
    /// A frame that begins with `head`, of which at most [`HEAD_BYTES`] are taken.
    pub fn new(head: &[u8], rest: Rest) -> WireFrame {
        let head_bytes = head.len().min(HEAD_BYTES);
        let mut front = [0; HEAD_BYTES];
        for (to, from) in front.iter_mut().zip(head) {
            *to = *from;
        }
        let is_sound = true;
        WireFrame { head: front, head_bytes, rest, gso: None, partial_csum: None, is_sound }
    }

    /// A linear frame.
    pub fn whole(bytes: Vec<u8>, is_sound: bool) -> WireFrame {
        WireFrame { is_sound, ..WireFrame::new(&[], Rest::Bytes(bytes)) }
    }

    pub fn head(&self) -> &[u8] {
        self.head.get(..self.head_bytes).unwrap_or(&[])
    }

    /// The front of the frame, headers at the least.
    pub fn front(&self) -> &[u8] {
        match &self.rest {
            Rest::Bytes(b) if self.head_bytes == 0 => b,
            _ => self.head(),
        }
    }

    /// Bytes of the frame.
    pub fn len(&self) -> usize {
        self.head_bytes + self.rest.len()
    }

    /// Packets that it stands for.
    pub fn packets(&self) -> usize {
        packets(self.len(), self.gso)
    }
}

/// Packets that a frame of `frame_bytes` bytes stands for, at least 1.
pub fn packets(frame_bytes: usize, gso: Option<Gso>) -> usize {
    let Some(g) = gso else { return 1 };
    let payload = frame_bytes.saturating_sub(usize::from(g.header_bytes));
    payload.div_ceil(usize::from(g.segment_bytes).max(1)).max(1)
}

/// Ethernet and IP addresses of a packet of the modelled peer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Addresses {
    pub ether_src: EtherAddr,
    pub ether_dst: EtherAddr,
    pub src: IpAddr,
    pub dst: IpAddr,
}

/// Headers under construction, from the Ethernet header to the transport's.
pub struct HeaderBuf {
    bytes: [u8; HEAD_BYTES],
    len: usize,
}

impl HeaderBuf {
    /// Ethernet and IP headers for a packet with `l4_bytes` after them. `None` if the addresses are of different
    /// versions, or if the packet is longer than IP allows.
    pub fn ip(ends: &Addresses, kind: u8, l4_bytes: usize) -> Option<HeaderBuf> {
        let mut buf = HeaderBuf { bytes: [0; HEAD_BYTES], len: 0 };
        let ethertype = if ends.src.is_ipv4() { eth::IPV4 } else { eth::IPV6 };
        let ether = eth::Header { dst: ends.ether_dst, src: ends.ether_src, ethertype };
        ether.emit(&mut buf.bytes).ok()?;
        let l3 = buf.bytes.get_mut(eth::HEADER_BYTES..)?;
        let l3_bytes = match (ends.src, ends.dst) {
            (IpAddr::V4(src), IpAddr::V4(dst)) => {
                let h = ipv4::Header {
                    src,
                    dst,
                    protocol: kind,
                    ttl: 64,
                    dscp_ecn: 0,
                    ident: 0,
                    dont_fragment: true,
                    more_fragments: false,
                    fragment_offset: 0,
                    header_bytes: ipv4::HEADER_BYTES,
                    total_bytes: ipv4::HEADER_BYTES + l4_bytes,
                };
                h.emit(l3).ok()?;
                ipv4::HEADER_BYTES
            }
            (IpAddr::V6(src), IpAddr::V6(dst)) => {
                let h = ipv6::Header {
                    src,
                    dst,
                    next_header: kind,
                    hop_limit: if kind == protocol::ICMPV6 { 255 } else { 64 },
                    traffic_class: 0,
                    flow_label: 0,
                    payload_bytes: l4_bytes,
                };
                h.emit(l3).ok()?;
                ipv6::HEADER_BYTES
            }
            _ => return None,
        };
        buf.len = eth::HEADER_BYTES + l3_bytes;
        Some(buf)
    }

    /// Appends space for the transport header.
    pub fn l4_mut(&mut self) -> &mut [u8] {
        self.bytes.get_mut(self.len..).unwrap_or(&mut [])
    }

    /// Where the transport header begins.
    pub fn l4(&self) -> usize {
        self.len
    }

    /// All of it, with `l4_bytes` of transport.
    pub fn with_l4(&self, l4_bytes: usize) -> &[u8] {
        self.bytes.get(..self.len + l4_bytes).unwrap_or(&[])
    }
}

/// The kind of train that packets between these addresses make.
pub fn tcp_kind(address: IpAddr) -> GsoKind {
    if address.is_ipv4() { GsoKind::TcpV4 } else { GsoKind::TcpV6 }
}
