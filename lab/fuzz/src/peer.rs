//! The state of the stack's connections that an on-path station reads from its frames. From this the script makes
//! segments that are right, nearly right, or wrong on purpose.

use std::net::{IpAddr, SocketAddr};

use fulmar_stack::base::SeqNum;
use fulmar_stack::wire::tcp::FastOpenCookie;
use fulmar_stack::wire::{eth, ipv4, ipv6, protocol, tcp};

/// One connection as seen from outside.
#[derive(Clone, Copy, Debug)]
pub struct Flow {
    /// The stack's end.
    pub local: SocketAddr,
    /// The other end.
    pub remote: SocketAddr,
    /// The next sequence number that the stack expects.
    pub peer_next: SeqNum,
    /// Behind the last byte that the stack has sent.
    pub stack_next: SeqNum,
    /// The stack's last timestamp.
    pub stamp: u32,
    /// Flags of the stack's last segment.
    pub last_flags: tcp::Flags,
}

/// Connections known at most: the oldest is forgotten.
const MAX_FLOWS: usize = 12;

/// The connections seen so far.
#[derive(Default)]
pub struct Observer {
    flows: Vec<Flow>,
    /// Fast Open cookies, and the addresses that the stack gave them to.
    cookies: Vec<(IpAddr, FastOpenCookie)>,
}

/// A TCP segment.
struct Segment {
    src: IpAddr,
    dst: IpAddr,
    header: tcp::Header,
    payload_bytes: usize,
}

impl Segment {
    /// Frames that a host may never send, whatever the script does.
    fn check(&self, ecn: u8) {
        assert!(!self.src.is_unspecified() && !self.src.is_multicast(), "from {}", self.src);
        let is_broadcast = |ip: IpAddr| matches!(ip, IpAddr::V4(ip) if ip.is_broadcast());
        assert!(!is_broadcast(self.src) && !is_broadcast(self.dst), "to {}", self.dst);
        assert!(!self.dst.is_unspecified() && !self.dst.is_multicast(), "to {}", self.dst);
        // RFC 3168 section 6.1.1, 6.1.4 and 6.1.5: only data is ECN-capable.
        let is_control = self.header.flags.intersects(tcp::Flags::SYN | tcp::Flags::RST);
        assert!(ecn == 0 || (self.payload_bytes > 0 && !is_control), "ECN-capable control");
    }
}

/// The TCP segment in a frame.
fn segment_in(frame: &[u8]) -> Option<Segment> {
    let e = eth::Header::parse(frame).ok()?;
    let packet = frame.get(eth::HEADER_BYTES..)?;
    let (src, dst, proto, at, ecn): (IpAddr, IpAddr, u8, usize, u8) = match e.ethertype {
        eth::IPV4 => {
            let h = ipv4::Header::parse(packet, packet.len()).expect("the stack sends valid IPv4");
            assert!(ipv4::checksum_ok(packet, h.header_bytes), "a wrong IPv4 checksum was sent");
            assert_eq!(h.total_bytes, packet.len(), "the IPv4 length is not the frame's");
            if h.fragment_offset != 0 || h.more_fragments {
                return None;
            }
            (h.src.into(), h.dst.into(), h.protocol, h.header_bytes, h.dscp_ecn & 3)
        }
        eth::IPV6 => {
            let h = ipv6::Header::parse(packet, packet.len()).expect("the stack sends valid IPv6");
            assert_eq!(h.payload_bytes + ipv6::HEADER_BYTES, packet.len());
            let header_bytes = ipv6::HEADER_BYTES;
            (h.src.into(), h.dst.into(), h.next_header, header_bytes, h.traffic_class & 3)
        }
        _ => return None,
    };
    if proto != protocol::TCP {
        return None;
    }
    let bytes = packet.get(at..)?;
    let (header, header_bytes) = tcp::Header::parse(bytes).expect("the stack sends valid TCP");
    let segment = Segment { src, dst, header, payload_bytes: bytes.len() - header_bytes };
    segment.check(ecn);
    Some(segment)
}

impl Observer {
    /// Takes note of a frame of the stack; panics if it is not well formed.
    pub fn see(&mut self, frame: &[u8]) {
        let Some(Segment { src, dst, header: h, payload_bytes }) = segment_in(frame) else {
            return;
        };
        if let Some(cookie) = h.options.fast_open.and_then(|option| option.cookie)
            && h.flags.contains(tcp::Flags::SYN | tcp::Flags::ACK)
        {
            self.cookies.retain(|c| c.0 != dst);
            self.cookies.push((dst, cookie));
        }
        let (local, remote) = (SocketAddr::new(src, h.src_port), SocketAddr::new(dst, h.dst_port));
        let syn_or_fin = |f| u32::from(h.flags.contains(f));
        let span = payload_bytes as u32 + syn_or_fin(tcp::Flags::SYN) + syn_or_fin(tcp::Flags::FIN);
        let end = SeqNum(h.seq.0.wrapping_add(span));
        let at = self.flows.iter().position(|f| f.local == local && f.remote == remote);
        let i = at.unwrap_or_else(|| {
            if self.flows.len() == MAX_FLOWS {
                self.flows.remove(0);
            }
            self.flows.push(Flow {
                local,
                remote,
                peer_next: h.ack,
                stack_next: end,
                stamp: 0,
                last_flags: h.flags,
            });
            self.flows.len() - 1
        });
        let f = &mut self.flows[i];
        if h.flags.contains(tcp::Flags::SYN) || end.distance(f.stack_next) > 0 {
            f.stack_next = end;
        }
        if h.flags.contains(tcp::Flags::ACK) {
            f.peer_next = h.ack;
        }
        if let Some(ts) = h.options.timestamps {
            f.stamp = ts.value;
        }
        f.last_flags = h.flags;
    }

    /// The Fast Open cookie that the stack last gave to an address.
    pub fn cookie(&self, of: IpAddr) -> Option<FastOpenCookie> {
        self.cookies.iter().find(|c| c.0 == of).map(|c| c.1)
    }

    /// The connections, oldest first.
    pub fn flows(&self) -> &[Flow] {
        &self.flows
    }

    /// A connection by a number of the script's.
    pub fn flow(&self, n: u8) -> Option<Flow> {
        let i = usize::from(n).checked_rem(self.flows.len())?;
        self.flows.get(i).copied()
    }
}
