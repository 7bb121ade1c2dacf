//! What a device that looks into frames reads from their headers.

use std::net::IpAddr;

use fulmar_wire::{eth, ipv4, ipv6, protocol, tcp, udp};

/// What a transport header says.
#[derive(Clone, Copy, Debug)]
pub enum Transport {
    Tcp(tcp::Header),
    Udp,
    Other(u8),
}

/// The headers of an IP packet in a frame, and where its payload lies.
#[derive(Clone, Copy, Debug)]
pub struct Seen {
    pub ether: eth::Header,
    pub src: IpAddr,
    pub dst: IpAddr,
    /// Where the transport header begins in the frame.
    pub l4: usize,
    pub transport: Transport,
    /// Where the transport's payload begins in the frame, and its length.
    pub payload_at: usize,
    pub payload_bytes: usize,
}

impl Seen {
    /// Reads the headers at the front of a frame of `frame_bytes`; nothing if it is no whole IP
    /// packet, or headers and lengths contradict each other.
    pub fn of(front: &[u8], frame_bytes: usize) -> Option<Seen> {
        let ether = eth::Header::parse(front).ok()?;
        let l3 = front.get(eth::HEADER_BYTES..)?;
        let room = frame_bytes.checked_sub(eth::HEADER_BYTES)?;
        let (src, dst, kind, l3_bytes, end) = match ether.ethertype {
            eth::IPV4 => {
                let h = ipv4::Header::parse(l3, room).ok()?;
                if h.more_fragments || h.fragment_offset != 0 {
                    return None;
                }
                (h.src.into(), h.dst.into(), h.protocol, h.header_bytes, h.total_bytes)
            }
            eth::IPV6 => {
                let h = ipv6::Header::parse(l3, room).ok()?;
                let upper = ipv6::walk_extensions(l3, &h).ok()?;
                if upper.fragment.is_some_and(|f| !f.is_atomic()) {
                    return None;
                }
                let end = ipv6::HEADER_BYTES + h.payload_bytes;
                (IpAddr::from(h.src), IpAddr::from(h.dst), upper.protocol, upper.offset, end)
            }
            _ => return None,
        };
        let l4 = eth::HEADER_BYTES + l3_bytes;
        let (transport, l4_bytes) = transport(kind, front.get(l4..)?)?;
        let payload_at = l4 + l4_bytes;
        let payload_bytes = (eth::HEADER_BYTES + end).checked_sub(payload_at)?;
        Some(Seen { ether, src, dst, l4, transport, payload_at, payload_bytes })
    }
}

fn transport(kind: u8, bytes: &[u8]) -> Option<(Transport, usize)> {
    match kind {
        protocol::TCP => {
            let (h, bytes) = tcp::Header::parse(bytes).ok()?;
            Some((Transport::Tcp(h), bytes))
        }
        protocol::UDP => {
            udp::Header::parse(bytes).ok()?;
            Some((Transport::Udp, udp::HEADER_BYTES))
        }
        other => Some((Transport::Other(other), 0)),
    }
}
