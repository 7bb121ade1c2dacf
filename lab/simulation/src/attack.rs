//! A third station on the wire. It injects frames towards one of the two and sees the frames that these send, but
//! removes and changes none.
//!
//! It sends only frames that TCP can withstand. TCP cannot distinguish a segment with an acceptable sequence number, an
//! acceptable acknowledgement and an acceptable timestamp from the peer's, nor a RST with exactly the next sequence
//! number. The attacker does not send such frames, not even by chance: numbers meant to be wrong are wrong by more than
//! a window ([`FAR`]).

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use fulmar_stack::base::{Duration, EtherAddr, Instant, SeqNum};
use fulmar_stack::wire::checksum::Sum;
use fulmar_stack::wire::tcp::{Flags, Options, Timestamps};
use fulmar_stack::wire::{arp, eth, icmpv4, icmpv6, ipv4, ipv6, protocol, tcp};

use super::scenario::Draw;

/// Beyond any window, and any progress that a connection makes while a frame is under way.
const FAR: u32 = 1 << 26;
/// The third station's own address.
const OWN_ETHER: EtherAddr = EtherAddr([2, 0, 0, 0, 0, 0x66]);
/// Frames of a station that are kept for replays.
const MOST_CAPTURED: usize = 48;
/// Bytes of a frame that is kept, at most.
const MOST_CAPTURED_BYTES: usize = 2_000;

/// The kind of injected frames.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AttackKind {
    /// SYNs to the listener, from addresses that do not answer.
    SynFlood,
    /// ICMP errors that quote live connections.
    Icmp,
    /// Segments of live connections, with numbers that are partly right.
    Segments,
    /// ARP and neighbour discovery with the peer's address.
    Neighbours,
    /// Frames that were sent before.
    Replays,
    /// Packets for no socket.
    Garbage,
}

/// Frames of one kind towards one station.
#[derive(Clone, Copy, Debug)]
pub struct Attack {
    /// What.
    pub kind: AttackKind,
    /// To which station.
    pub victim: usize,
    /// From when.
    pub from: Duration,
    /// Between two bursts.
    pub every: Duration,
    /// Frames at once.
    pub burst: u32,
    /// Frames in all.
    pub frames: u32,
}

impl Attack {
    /// How long it lasts.
    pub fn end(&self) -> Duration {
        self.from + self.every * self.frames.div_ceil(self.burst)
    }
}

/// A frame on its way to a station.
#[derive(Clone, Debug)]
pub struct Injected {
    /// When it arrives.
    pub at: Instant,
    /// The frame.
    pub frame: Vec<u8>,
    /// Made for the state at that moment: if it cannot be taken then it is lost.
    pub is_strict: bool,
}

/// A station as the attacker knows it.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// Its IP address.
    pub ip: IpAddr,
    /// Its Ethernet address.
    pub ether: EtherAddr,
    /// The port of its listener.
    pub port: u16,
}

/// A live connection of the victim.
#[derive(Clone, Copy, Debug)]
pub struct Flow {
    /// The victim's end.
    pub local: SocketAddr,
    /// The peer's.
    pub remote: SocketAddr,
    /// Its sequence numbers; `None`: not established.
    pub numbers: Option<Numbers>,
}

/// Sequence numbers of a connection (RFC 9293 section 3.4), from the victim's side.
#[derive(Clone, Copy, Debug)]
pub struct Numbers {
    /// The next byte that it expects.
    pub rcv_nxt: SeqNum,
    /// The window that it offers.
    pub rcv_wnd: u32,
    /// The next byte that the peer expects of it.
    pub peer_nxt: SeqNum,
    /// Timestamps were negotiated (RFC 7323).
    pub timestamps: bool,
}

/// The state that an attacker sees when it makes a frame.
pub struct View<'a> {
    /// Whom it attacks.
    pub victim: Target,
    /// The station that it impersonates.
    pub peer: Target,
    /// Connections of the victim.
    pub flows: &'a [Flow],
    /// Frames that the peer has sent to the victim.
    pub captured: &'a VecDeque<Vec<u8>>,
}

/// An attack under way.
pub struct Attacker {
    attack: Attack,
    left: u32,
    next_at: Instant,
    draw: Draw,
}

impl Attacker {
    pub fn new(attack: Attack, start: Instant, seed: u64) -> Attacker {
        let draw = Draw::new(seed ^ 0xa77a_c000 ^ (attack.kind as u64) << 1 ^ attack.victim as u64);
        Attacker { attack, left: attack.frames, next_at: start + attack.from, draw }
    }

    pub fn victim(&self) -> usize {
        self.attack.victim
    }

    /// When the next burst is due.
    pub fn deadline(&self) -> Option<Instant> {
        (self.left > 0).then_some(self.next_at)
    }

    /// Nothing more is injected.
    pub fn stop(&mut self) {
        self.left = 0;
    }

    /// The frames of the burst that is due.
    pub fn burst(&mut self, now: Instant, view: &View) -> Vec<Injected> {
        let count = self.attack.burst.min(self.left);
        self.left -= count;
        self.next_at = now + self.attack.every;
        (0..count).filter_map(|_| self.frame(now, view)).collect()
    }

    fn frame(&mut self, at: Instant, view: &View) -> Option<Injected> {
        let d = &mut self.draw;
        let (frame, is_strict) = match self.attack.kind {
            AttackKind::SynFlood => (syn(d, view), false),
            AttackKind::Icmp => (icmp_error(d, view)?, false),
            AttackKind::Segments => segment(d, view)?,
            AttackKind::Neighbours => (neighbour(d, view), false),
            AttackKind::Replays => (replay(d, view)?, false),
            AttackKind::Garbage => (garbage(d, view), false),
        };
        Some(Injected { at, frame, is_strict })
    }
}

/// Keeps a frame of a station.
pub fn capture(captured: &mut VecDeque<Vec<u8>>, frame: Vec<u8>) {
    if frame.len() > MOST_CAPTURED_BYTES {
        return;
    }
    if captured.len() >= MOST_CAPTURED {
        captured.pop_front();
    }
    captured.push_back(frame);
}

/// A source that does not answer: on the link, or elsewhere.
fn spoofed(d: &mut Draw, like: IpAddr) -> IpAddr {
    let (far, n) = (d.percent(30), d.below(1 << 32));
    match like {
        IpAddr::V4(_) if far => Ipv4Addr::from(0x0b00_0000 | n as u32 & 0x00ff_ffff).into(),
        IpAddr::V4(_) => Ipv4Addr::new(10, 0, 0, 3 + (n % 250) as u8).into(),
        IpAddr::V6(_) => {
            let net = if far { 0x2001_0db8 } else { 0xfd00_0000 };
            Ipv6Addr::from(net << 96 | u128::from(n) << 8 | 0xff).into()
        }
    }
}

fn syn(d: &mut Draw, view: &View) -> Vec<u8> {
    let header = tcp::Header {
        src_port: 1_024 + d.below(60_000) as u16,
        dst_port: view.victim.port,
        seq: SeqNum(d.below(1 << 32) as u32),
        ack: SeqNum(0),
        flags: Flags::SYN,
        window: d.below(65_536) as u16,
        urgent: 0,
        options: Options {
            mss: d.percent(80).then(|| d.pick(&[0, 1, 536, 1_460, 65_535])),
            window_scale: d.percent(60).then(|| d.below(16) as u8),
            sack_permitted: d.percent(60),
            timestamps: d.percent(60).then_some(Timestamps { value: 1, echo: 0 }),
            ..Options::default()
        },
    };
    let from = spoofed(d, view.victim.ip);
    tcp_packet(view, from, &header, &[])
}

/// A segment that the victim must not accept, and whether it was made for this moment alone.
fn segment(d: &mut Draw, view: &View) -> Option<(Vec<u8>, bool)> {
    let flow = view.flows.get(d.below(view.flows.len().max(1) as u64) as usize)?;
    let mut header = tcp::Header {
        src_port: flow.remote.port(),
        dst_port: flow.local.port(),
        seq: SeqNum(d.below(1 << 32) as u32),
        ack: SeqNum(d.below(1 << 32) as u32),
        flags: Flags::RST,
        window: d.pick(&[0, 1, 1_000, 65_535]),
        urgent: 0,
        options: Options::default(),
    };
    let Some(n) = flow.numbers else {
        // Blind: only a RST with the one right number would do harm.
        return Some((tcp_packet(view, flow.remote.ip(), &header, &[]), false));
    };
    let stamp = Timestamps { value: d.below(1 << 32) as u32, echo: d.below(1 << 32) as u32 };
    header.options.timestamps = (n.timestamps && d.percent(70)).then_some(stamp);
    let len = d.pick(&[0, 0, 1, 100, 536]);
    let far_seq = n.rcv_nxt + FAR + d.below(1 << 30) as u32;
    let old_seq = n.rcv_nxt - len as u32 - d.log(1, 1 << 20) as u32;
    let near_seq = n.rcv_nxt + 2 + d.below(u64::from(n.rcv_wnd) + 2) as u32;
    let right_seq = d.pick(&[n.rcv_nxt, near_seq]);
    let distance = FAR + d.below(1 << 30) as u32;
    let wrong_ack = d.pick(&[n.peer_nxt + distance, n.peer_nxt - distance]);
    let right_ack = n.peer_nxt;
    let plain = d.pick(&[Flags::ACK, Flags::ACK | Flags::PSH, Flags::ACK | Flags::FIN]);
    let mut is_strict = false;
    match d.below(6) {
        0 => {
            header.seq = d.pick(&[far_seq, old_seq, near_seq]);
            header.flags = d.pick(&[Flags::RST, Flags::RST | Flags::ACK]);
            is_strict = true;
        }
        1 => {
            header.seq = d.pick(&[far_seq, old_seq, near_seq, n.rcv_nxt]);
            header.flags = d.pick(&[Flags::SYN, Flags::SYN | Flags::ACK]);
            header.ack = d.pick(&[right_ack, wrong_ack]);
        }
        2 => (header.seq, header.ack, header.flags) = (far_seq, right_ack, plain),
        3 => (header.seq, header.ack, header.flags) = (old_seq, wrong_ack, plain),
        4 => (header.seq, header.ack, header.flags) = (right_seq, wrong_ack, plain),
        // Without ACK nothing counts.
        _ => (header.seq, header.flags) = (right_seq, d.pick(&[Flags(0), Flags::FIN, Flags::PSH])),
    }
    let body = vec![0xa5; len];
    Some((tcp_packet(view, flow.remote.ip(), &header, &body), is_strict))
}

fn icmp_error(d: &mut Draw, view: &View) -> Option<Vec<u8>> {
    let flow = view.flows.get(d.below(view.flows.len().max(1) as u64) as usize)?;
    let random = SeqNum(d.below(1 << 32) as u32);
    let seq = match flow.numbers {
        Some(n) => d.pick(&[n.peer_nxt, n.peer_nxt - 1, n.peer_nxt + FAR, random]),
        None => random,
    };
    let quoted = tcp::Header {
        src_port: flow.local.port(),
        dst_port: flow.remote.port(),
        seq,
        ack: random,
        flags: Flags::ACK,
        window: 1_000,
        urgent: 0,
        options: Options::default(),
    };
    let mut tcp_bytes = vec![0; quoted.header_bytes()];
    quoted.emit(&mut tcp_bytes).ok()?;
    let (from, to) = (flow.local.ip(), flow.remote.ip());
    let whole = d.pick(&[40, 500, 1_480]);
    let mut quote = ip_packet(from, to, protocol::TCP, &tcp_bytes, 40);
    if let Some(total) = quote.get_mut(2..4).filter(|_| from.is_ipv4()) {
        total.copy_from_slice(&(whole as u16).to_be_bytes());
    }
    let mtu = d.pick(&[0, 68, 296, 576, 1_280, 1_400, 1_500, 9_000]);
    let router = if d.percent(50) { to } else { spoofed(d, to) };
    let mut bytes = vec![0; 8];
    match view.victim.ip {
        IpAddr::V4(_) => {
            let message = match d.below(5) {
                0 | 1 => icmpv4::Message::Unreachable {
                    code: icmpv4::unreachable::FRAGMENTATION_NEEDED,
                    next_hop_mtu: mtu as u16,
                },
                2 => icmpv4::Message::Unreachable { code: d.below(16) as u8, next_hop_mtu: 0 },
                3 => icmpv4::Message::TimeExceeded { code: d.below(2) as u8 },
                _ => icmpv4::Message::ParameterProblem { code: 0, pointer: 9 },
            };
            message.emit(&mut bytes).ok()?;
        }
        IpAddr::V6(_) => {
            let message = match d.below(5) {
                0 | 1 => icmpv6::Message::PacketTooBig { mtu },
                2 => icmpv6::Message::Unreachable { code: d.below(7) as u8 },
                3 => icmpv6::Message::TimeExceeded { code: d.below(2) as u8 },
                _ => icmpv6::Message::ParameterProblem { code: d.below(3) as u8, pointer: 6 },
            };
            message.emit(&mut bytes).ok()?;
        }
    }
    bytes.extend_from_slice(&quote);
    Some(icmp_packet(view, router, bytes, 64))
}

/// The peer's address at the attacker's station.
fn neighbour(d: &mut Draw, view: &View) -> Vec<u8> {
    let group = EtherAddr([0xff; 6]);
    match (view.peer.ip, view.victim.ip) {
        (IpAddr::V4(peer), IpAddr::V4(victim)) => {
            let packet = arp::Packet {
                operation: d.pick(&[arp::Operation::Request, arp::Operation::Reply]),
                sender_ether: OWN_ETHER,
                sender_ip: peer,
                target_ether: view.victim.ether,
                target_ip: d.pick(&[peer, victim]),
            };
            let mut bytes = vec![0; arp::BYTES];
            packet.emit(&mut bytes).expect("invariant: room");
            frame(d.pick(&[group, view.victim.ether]), eth::ARP, &bytes)
        }
        (IpAddr::V6(peer), _) => {
            let is_question = d.percent(30);
            let message = if is_question {
                icmpv6::Message::NeighbourSolicitation { target: octets(view.victim.ip).into() }
            } else {
                icmpv6::Message::NeighbourAdvertisement {
                    target: peer,
                    router: false,
                    solicited: d.percent(50),
                    override_: d.percent(70),
                }
            };
            let mut bytes = vec![0; message.header_bytes()];
            message.emit(&mut bytes).expect("invariant: room");
            // Source link-layer address, or target link-layer address (RFC 4861 section 4.6.1).
            bytes.extend_from_slice(&[if is_question { 1 } else { 2 }, 1]);
            bytes.extend_from_slice(&OWN_ETHER.0);
            icmp_packet(view, view.peer.ip, bytes, 255)
        }
        _ => Vec::new(),
    }
}

fn octets(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
        IpAddr::V6(ip) => ip.octets(),
    }
}

fn replay(d: &mut Draw, view: &View) -> Option<Vec<u8>> {
    view.captured.get(d.below(view.captured.len().max(1) as u64) as usize).cloned()
}

/// Sound lengths and checksums, anything else.
fn garbage(d: &mut Draw, view: &View) -> Vec<u8> {
    let len = d.below(200) as usize;
    let mut body: Vec<u8> = (0..len).map(|_| d.below(256) as u8).collect();
    let from = if d.percent(70) { spoofed(d, view.victim.ip) } else { view.peer.ip };
    // Ports below the scenario's.
    let mut ports = |body: &mut [u8]| {
        if let Some(ports) = body.first_chunk_mut::<4>() {
            *ports = [d.below(4) as u8, ports[1], d.below(4) as u8, ports[3]];
        }
    };
    match body.first().map_or(0, |b| b % 5) {
        0 | 1 if len >= 20 => {
            ports(&mut body);
            // Mostly a header without options.
            body[12] = if body[12] > 200 { body[12] } else { 5 << 4 };
            let sum = transport_sum(&mut body, from, view.victim.ip, protocol::TCP, 16);
            body[16..18].copy_from_slice(&sum.to_be_bytes());
            packet(view, from, protocol::TCP, &body, 64)
        }
        2 if len >= 8 => {
            ports(&mut body);
            body[4..6].copy_from_slice(&(len as u16).to_be_bytes());
            let sum = transport_sum(&mut body, from, view.victim.ip, protocol::UDP, 6);
            body[6..8].copy_from_slice(&sum.to_be_bytes());
            packet(view, from, protocol::UDP, &body, 64)
        }
        3 => {
            // A fragment, the first or another, of a datagram that never becomes whole.
            let mut bytes = ip_packet(from, view.victim.ip, protocol::UDP, &body, 64);
            if from.is_ipv4() {
                let offset = d.below(100) as u8;
                bytes[6..8].copy_from_slice(&[0x20, offset]);
                bytes[10..12].copy_from_slice(&[0, 0]);
                let sum = fulmar_stack::wire::checksum::checksum(&bytes[..20]);
                bytes[10..12].copy_from_slice(&sum.to_be_bytes());
            } else if body.len() >= 8 {
                bytes[6] = protocol::FRAGMENT;
            }
            frame(view.victim.ether, ethertype(from), &bytes)
        }
        _ => packet(view, from, d.below(256) as u8 | 0x80, &body, 1),
    }
}

fn transport_sum(bytes: &mut [u8], from: IpAddr, to: IpAddr, number: u8, at: usize) -> u16 {
    bytes[at..at + 2].copy_from_slice(&[0, 0]);
    let mut sum = Sum::new();
    sum.add_pseudo(from, to, number, bytes.len() as u32);
    sum.add_bytes(bytes);
    sum.finish()
}

fn tcp_packet(view: &View, from: IpAddr, header: &tcp::Header, body: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; header.header_bytes()];
    header.emit(&mut bytes).expect("invariant: room");
    bytes.extend_from_slice(body);
    let sum = transport_sum(&mut bytes, from, view.victim.ip, protocol::TCP, 16);
    bytes[16..18].copy_from_slice(&sum.to_be_bytes());
    packet(view, from, protocol::TCP, &bytes, 64)
}

fn icmp_packet(view: &View, from: IpAddr, mut bytes: Vec<u8>, hops: u8) -> Vec<u8> {
    let (number, sum) = if from.is_ipv4() {
        (protocol::ICMP, fulmar_stack::wire::checksum::checksum(&bytes))
    } else {
        let number = protocol::ICMPV6;
        (number, transport_sum(&mut bytes, from, view.victim.ip, number, 2))
    };
    bytes[2..4].copy_from_slice(&sum.to_be_bytes());
    packet(view, from, number, &bytes, hops)
}

fn packet(view: &View, from: IpAddr, number: u8, body: &[u8], hops: u8) -> Vec<u8> {
    let bytes = ip_packet(from, view.victim.ip, number, body, hops);
    frame(view.victim.ether, ethertype(from), &bytes)
}

fn ethertype(ip: IpAddr) -> u16 {
    if ip.is_ipv4() { eth::IPV4 } else { eth::IPV6 }
}

fn ip_packet(from: IpAddr, to: IpAddr, number: u8, body: &[u8], hops: u8) -> Vec<u8> {
    let mut bytes = Vec::new();
    match (from, to) {
        (IpAddr::V4(src), IpAddr::V4(dst)) => {
            let header = ipv4::Header {
                src,
                dst,
                protocol: number,
                ttl: hops,
                dscp_ecn: 0,
                ident: 7,
                dont_fragment: number == protocol::TCP,
                more_fragments: false,
                fragment_offset: 0,
                header_bytes: ipv4::HEADER_BYTES,
                total_bytes: ipv4::HEADER_BYTES + body.len(),
            };
            bytes.resize(ipv4::HEADER_BYTES, 0);
            header.emit(&mut bytes).expect("invariant: a sound header");
        }
        (src, dst) => {
            let header = ipv6::Header {
                src: octets(src).into(),
                dst: octets(dst).into(),
                next_header: number,
                hop_limit: hops,
                traffic_class: 0,
                flow_label: 0,
                payload_bytes: body.len(),
            };
            bytes.resize(ipv6::HEADER_BYTES, 0);
            header.emit(&mut bytes).expect("invariant: a sound header");
        }
    }
    bytes.extend_from_slice(body);
    bytes
}

fn frame(dst: EtherAddr, ethertype: u16, packet: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; eth::HEADER_BYTES];
    eth::Header { dst, src: OWN_ETHER, ethertype }.emit(&mut bytes).expect("invariant: room");
    bytes.extend_from_slice(packet);
    bytes
}
