//! The frames of a script.

use std::net::{IpAddr, SocketAddr};

use fulmar_stack::base::{EtherAddr, Gso, GsoKind, Instant, Offload, SeqNum};
use fulmar_stack::wire::tcp::{Flags, Header, Options, SackBlocks, Timestamps};
use fulmar_stack::wire::{arp, eth, icmpv4, ipv4, ipv6, protocol};

use super::{PORT, UDP_PORT, World};
use crate::frames::{
    PEERS, complete, ethernet, ip_frame, ipv4_header, our_ip, peer_ip, tcp_segment, udp_datagram,
};
use crate::peer::Flow;
use crate::script::{self, Landing, Step};
use fulmar_stack::device::memory::Arrival;

/// The address of a host on the peer's side.
pub(super) fn peer(v6: bool, host: u8, port: u16) -> SocketAddr {
    SocketAddr::new(peer_ip(v6, host), port)
}

/// A frame that lands as it is.
fn plain(bytes: Vec<u8>) -> Arrival {
    Arrival { bytes, offload: Offload::default(), pieces: Vec::new() }
}

/// The options in an ordinary peer's SYN.
pub(super) fn usual_options(now: Instant) -> Options {
    Options {
        mss: Some(1460),
        window_scale: Some(7),
        sack_permitted: true,
        timestamps: Some(Timestamps { value: now.as_millis_u32(), echo: 0 }),
        ..Options::default()
    }
}

/// A SYN to the listener.
pub(super) fn syn(v6: bool, host: u8, port: u16, options: &Options, bits: u8) -> Arrival {
    let (from, to) = (peer(v6, host, port), SocketAddr::new(our_ip(v6), PORT));
    let header = Header {
        src_port: port,
        dst_port: PORT,
        seq: SeqNum(1_000_000 * u32::from(port)),
        flags: Flags(bits.into()),
        window: 60_000,
        options: *options,
        ..Header::default()
    };
    let segment = tcp_segment(from, to, &header, &[]);
    plain(ip_frame(from.ip(), to.ip(), protocol::TCP, &segment))
}

/// The frame as the script wants it to land: in pieces, damaged, cut short, aggregated.
fn landed(mut bytes: Vec<u8>, how: &Landing, v6: bool, is_tcp: bool) -> Arrival {
    let mut offload = Offload { csum_valid: how.is_verified, ..Offload::default() };
    if let Some((at, bits)) = how.damage {
        let at = usize::from(at) % bytes.len().max(1);
        if let Some(byte) = bytes.get_mut(at) {
            *byte ^= bits;
        }
    }
    if let Some(n) = how.cut_short {
        bytes.truncate(bytes.len().saturating_sub(usize::from(n)).max(1));
    }
    if let (Some(segment_bytes), true) = (how.segment_bytes, is_tcp) {
        let kind = if v6 { GsoKind::TcpV6 } else { GsoKind::TcpV4 };
        let header_bytes = if v6 { 74 } else { 54 };
        offload.gso = Some(Gso { kind, segment_bytes, header_bytes, ecn: false });
    }
    let pieces = how.pieces.iter().take(4).map(|n| usize::from(*n).max(1)).collect();
    Arrival { bytes, offload, pieces }
}

impl World {
    /// Makes a neighbour known.
    pub(super) fn teach_neighbour(&mut self, v6: bool, host: u8) {
        let frame = if v6 {
            neighbour_message(136, 0x60, host, 2, PEERS)
        } else {
            arp_frame(true, host, 1, PEERS)
        };
        // The stack accepts the advertisement once it has sent a solicitation; an ARP request updates the cache at
        // once.
        self.arrive(plain(frame));
        self.settle();
        if v6 {
            let _ =
                self.shard.icmp().send_request(self.now, self.ping, peer(true, host, 0), 1, &[1]);
            self.settle();
            self.arrive(plain(neighbour_message(136, 0x60, host, 2, PEERS)));
            self.settle();
        }
    }

    /// The frame of a step; `None` if it has none.
    pub(super) fn build(&mut self, step: Step) -> Option<Arrival> {
        match step {
            Step::Segment(s) => self.segment(&s),
            Step::Honest { flow, payload_bytes, window } => {
                self.honest(self.observer.flow(flow)?, payload_bytes, window)
            }
            Step::Syn { v6, host, port, options, bits } => {
                let options =
                    options.map_or_else(|| usual_options(self.now), |o| self.options(&o, None));
                let bits = if bits < 128 { 0x02 } else { bits };
                Some(syn(v6, host, 1000 + u16::from(port), &options, bits))
            }
            Step::Answer { flow, options, resets } => {
                self.answer(self.observer.flow(flow)?, options, resets)
            }
            Step::Udp { v6, host, port, bytes, landing } => {
                let to = SocketAddr::new(our_ip(v6), UDP_PORT + u16::from(port % 3));
                let from = peer(v6, host, 53);
                let data = vec![3; usize::from(bytes)];
                let datagram = udp_datagram(from, to, &data);
                let frame = ip_frame(from.ip(), to.ip(), protocol::UDP, &datagram);
                Some(landed(frame, &landing, v6, false))
            }
            Step::Icmp(i) => self.icmp(&i),
            Step::Echo { v6, reply, ident, bytes } => Some(plain(echo(v6, reply, ident, bytes))),
            Step::Arp { request, sender, target, ether } => {
                let ether = EtherAddr([2, 0, 0, 0, 0, ether]);
                Some(plain(arp_frame(request, sender, target, ether)))
            }
            Step::Neighbour { kind, flags, target, option, ether } => {
                let ether = EtherAddr([2, 0, 0, 0, 0, ether]);
                Some(plain(neighbour_message(133 + kind % 5, flags, target, option, ether)))
            }
            Step::Fragment { v6, ident, offset, more, bytes, proto } => {
                let n = usize::from(bytes % 1480);
                Some(plain(fragment(v6, ident, offset, more, n, proto)))
            }
            Step::Extensions { chain, options, proto } => {
                Some(plain(extensions(&chain, &options, proto)))
            }
            Step::Raw { ethertype, bytes, landing } => {
                let mut frame = ethernet(ethertype);
                frame.extend_from_slice(&bytes);
                Some(landed(frame, &landing, false, false))
            }
            Step::Wait { .. } | Step::LongWait { .. } | Step::Device { .. } => None,
            Step::Call(_) | Step::Extra(_) => None,
        }
    }

    fn options(&self, o: &script::Options, flow: Option<&Flow>) -> Options {
        let (stack_next, stamp) = flow.map_or((0, 0), |f| (f.stack_next.0, f.stamp));
        let mut sack = SackBlocks::default();
        for (left, right) in o.sack.iter().take(SackBlocks::MAX) {
            sack.push(SeqNum(left.to(stack_next)), SeqNum(right.to(stack_next)));
        }
        let now = self.now.as_millis_u32();
        Options {
            mss: o.mss,
            window_scale: o.scale,
            sack_permitted: o.sack_permitted,
            timestamps: o
                .stamp
                .map(|(value, echo)| Timestamps { value: value.to(now), echo: echo.to(stamp) }),
            sack,
            ..Options::default()
        }
    }

    pub(super) fn in_order(&self, f: &Flow, flags: Flags) -> Header {
        Header {
            src_port: f.remote.port(),
            dst_port: f.local.port(),
            seq: f.peer_next,
            ack: f.stack_next,
            flags,
            window: 512,
            urgent: 0,
            options: Options {
                timestamps: Some(Timestamps { value: self.now.as_millis_u32(), echo: f.stamp }),
                ..Options::default()
            },
        }
    }

    fn frame_of(&self, f: &Flow, header: &Header, payload_bytes: usize) -> Vec<u8> {
        let data = vec![1; payload_bytes];
        let segment = tcp_segment(f.remote, f.local, header, &data);
        ip_frame(f.remote.ip(), f.local.ip(), protocol::TCP, &segment)
    }

    fn honest(&self, f: Flow, payload_bytes: u16, window: u16) -> Option<Arrival> {
        let header = Header { window, ..self.in_order(&f, Flags::ACK) };
        let n = usize::from(payload_bytes % 1449);
        Some(plain(self.frame_of(&f, &header, n)))
    }

    fn segment(&self, s: &script::Segment) -> Option<Arrival> {
        let f = self.observer.flow(s.flow)?;
        let usual = self.in_order(&f, Flags(s.bits.value().into()));
        let options = s.options.as_ref().map_or(usual.options, |o| self.options(o, Some(&f)));
        let header = Header {
            seq: SeqNum(s.seq.to(f.peer_next.0)),
            ack: SeqNum(s.ack.to(f.stack_next.0)),
            window: s.window,
            urgent: s.urgent,
            options,
            ..usual
        };
        // An IP packet holds 65,535 bytes with its headers.
        let frame = self.frame_of(&f, &header, usize::from(s.payload_bytes).min(65_400));
        Some(landed(frame, &s.landing, f.local.is_ipv6(), true))
    }

    /// The frame that completes a handshake: an ACK for the stack's SYN,ACK, a SYN,ACK for its SYN.
    fn answer(&self, f: Flow, options: Option<script::Options>, resets: bool) -> Option<Arrival> {
        let opens = f.last_flags.contains(Flags::SYN) && !f.last_flags.contains(Flags::ACK);
        let mut header = if opens {
            let options =
                options.map_or_else(|| usual_options(self.now), |o| self.options(&o, Some(&f)));
            let seq = SeqNum(77_000);
            Header { seq, options, ..self.in_order(&f, Flags::SYN | Flags::ACK) }
        } else {
            self.in_order(&f, Flags::ACK)
        };
        if opens && let Some(ts) = &mut header.options.timestamps {
            ts.echo = f.stamp;
        }
        if resets {
            header.flags = Flags::RST | Flags::ACK;
        }
        Some(plain(self.frame_of(&f, &header, 0)))
    }

    fn icmp(&self, i: &script::Icmp) -> Option<Arrival> {
        let f = self.observer.flow(i.flow)?;
        let v6 = f.local.is_ipv6() != i.crosses;
        let (local, remote) = if i.crosses {
            (SocketAddr::new(our_ip(v6), f.local.port()), peer(v6, 2, f.remote.port()))
        } else {
            (f.local, f.remote)
        };
        let quoted = if i.is_of_udp {
            let from = SocketAddr::new(our_ip(v6), UDP_PORT);
            udp_datagram(from, peer(v6, 2, 53), &[4; 64])
        } else {
            let header = Header {
                src_port: local.port(),
                dst_port: remote.port(),
                seq: SeqNum(i.seq.to(f.stack_next.0)),
                flags: Flags::ACK,
                ..Header::default()
            };
            tcp_segment(local, remote, &header, &[6; 40])
        };
        let proto = if i.is_of_udp { protocol::UDP } else { protocol::TCP };
        let packet = ip_frame(local.ip(), remote.ip(), proto, &quoted);
        let packet = packet.get(eth::HEADER_BYTES..)?;
        let n = packet.len().min(usize::from(i.quoted_bytes));
        let mut message = vec![i.kind, i.code, 0, 0];
        message.extend_from_slice(&i.word.to_be_bytes());
        message.extend_from_slice(packet.get(..n)?);
        // The message itself comes in the version of the flow, whatever it quotes.
        let v6 = f.local.is_ipv6();
        let (from, to) = (peer_ip(v6, 9), our_ip(v6));
        let proto = if v6 { protocol::ICMPV6 } else { protocol::ICMP };
        complete(&mut message, icmpv4::CHECKSUM_OFFSET, (from, to), proto);
        Some(landed(ip_frame(from, to, proto, &message), &i.landing, v6, false))
    }
}

fn arp_frame(request: bool, sender: u8, target: u8, ether: EtherAddr) -> Vec<u8> {
    let v4 = |host: u8| std::net::Ipv4Addr::new(10, 0, 0, host);
    let packet = arp::Packet {
        operation: if request { arp::Operation::Request } else { arp::Operation::Reply },
        sender_ether: ether,
        sender_ip: v4(sender),
        target_ether: EtherAddr([0; 6]),
        target_ip: v4(target),
    };
    let mut frame = ethernet(eth::ARP);
    let mut bytes = [0; arp::BYTES];
    packet.emit(&mut bytes).expect("28 bytes");
    frame.extend_from_slice(&bytes);
    frame
}

/// A message of neighbour discovery with one option of the given kind.
fn neighbour_message(kind: u8, flags: u8, target: u8, option: u8, ether: EtherAddr) -> Vec<u8> {
    let mut m = vec![kind, 0, 0, 0, flags, 0, 0, 0];
    if let IpAddr::V6(ip) = peer_ip(true, target) {
        m.extend_from_slice(&ip.octets());
    }
    m.extend_from_slice(&[option, 1]);
    m.extend_from_slice(&ether.0);
    let (from, to) = (peer_ip(true, target.max(2)), our_ip(true));
    complete(&mut m, icmpv4::CHECKSUM_OFFSET, (from, to), protocol::ICMPV6);
    ip_frame(from, to, protocol::ICMPV6, &m)
}

fn echo(v6: bool, reply: bool, ident: u16, bytes: u16) -> Vec<u8> {
    let ends = (peer_ip(v6, 2), our_ip(v6));
    let (proto, message) = echo_message(ends, reply, ident, bytes);
    ip_frame(ends.0, ends.1, proto, &message)
}

/// An echo request or reply, and its protocol.
pub(super) fn echo_message(
    ends: (IpAddr, IpAddr),
    reply: bool,
    ident: u16,
    bytes: u16,
) -> (u8, Vec<u8>) {
    let v6 = ends.0.is_ipv6();
    let kind = match (v6, reply) {
        (false, false) => 8,
        (false, true) => 0,
        (true, false) => 128,
        (true, true) => 129,
    };
    let mut m = vec![kind, 0, 0, 0];
    m.extend_from_slice(&ident.to_be_bytes());
    m.extend_from_slice(&[0, 1]);
    m.resize(8 + usize::from(bytes % 1400), 2);
    let proto = if v6 { protocol::ICMPV6 } else { protocol::ICMP };
    complete(&mut m, icmpv4::CHECKSUM_OFFSET, ends, proto);
    (proto, m)
}

fn fragment(v6: bool, ident: u8, offset: u16, more: bool, n: usize, proto: u8) -> Vec<u8> {
    let (from, to, data) = (peer_ip(v6, 2), our_ip(v6), vec![8; n]);
    let proto = match proto % 4 {
        0 => protocol::UDP,
        1 => protocol::TCP,
        2 if v6 => protocol::ICMPV6,
        2 => protocol::ICMP,
        _ => proto,
    };
    let offset = offset & 0xfff8;
    if v6 {
        let mut bytes = vec![0; 8];
        let header = ipv6::Fragment { offset, more, ident: ident.into() };
        header.emit(proto, &mut bytes).expect("8 bytes");
        bytes.extend_from_slice(&data);
        return ip_frame(from, to, protocol::FRAGMENT, &bytes);
    }
    let (IpAddr::V4(src), IpAddr::V4(dst)) = (from, to) else {
        return Vec::new();
    };
    let mut h = ipv4_header(src, dst, proto, ipv4::HEADER_BYTES + n);
    (h.ident, h.more_fragments, h.fragment_offset) = (ident.into(), more, offset);
    let mut frame = ethernet(eth::IPV4);
    let mut bytes = [0; ipv4::HEADER_BYTES];
    h.emit(&mut bytes).expect("20 bytes");
    frame.extend_from_slice(&bytes);
    frame.extend_from_slice(&data);
    frame
}

/// IPv6 with a chain of extension headers, each of 8 bytes filled from `options`.
fn extensions(chain: &[u8], options: &[u8], proto: u8) -> Vec<u8> {
    const KINDS: [u8; 4] = [
        protocol::HOP_BY_HOP,
        protocol::ROUTING,
        protocol::FRAGMENT,
        protocol::DESTINATION_OPTIONS,
    ];
    let kinds: Vec<u8> = chain.iter().take(16).map(|n| KINDS[usize::from(n % 4)]).collect();
    let mut bytes = Vec::new();
    let mut filling = options.iter().copied().cycle();
    for i in 0..kinds.len() {
        let next = kinds.get(i + 1).copied().unwrap_or(proto);
        bytes.extend_from_slice(&[next, 0]);
        bytes.extend((0..6).map(|_| filling.next().unwrap_or(0)));
    }
    bytes.extend_from_slice(&[0; 24]);
    let first = kinds.first().copied().unwrap_or(proto);
    ip_frame(peer_ip(true, 2), our_ip(true), first, &bytes)
}
