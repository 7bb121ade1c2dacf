//! The far end as a model: a station that answers as a good host would, in hardware's time.
//!
//! Enters: every frame that the NIC puts on the wire, with the time at which its last bit arrives.
//! Leaves: frames for the NIC's lane. It answers ARP and neighbour solicitations for any address,
//! counts datagrams, sends datagrams when asked, and keeps TCP connections ([`conn`]). Odd frames
//! are counted and nothing else. All of it is bounded: connections by [`FarEnd::max_connections`],
//! what it sends by the peer's window and the lane.
//!
//! It is no second stack: no congestion control (the wire is its own), no urgent data, no close that
//! lingers. Payload that it takes is not read unless it is asked to verify it.

mod conn;
mod neighbour;
mod source;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;

use fulmar_base::{Duration, EtherAddr, Gso, Instant};
use fulmar_mbuf::Chain;
use fulmar_wire::{eth, protocol, tcp};

use super::frame::{Ends, Seen, Transport, WireFrame};
use super::line::Line;
use super::meter::{Board, bump};
use super::pattern;
use super::rx::Rx;
use conn::{Conn, Key, Set};
use source::{STAMP_BYTES, Source};

/// Requests for datagrams that are under way at once.
const MAX_SOURCES: usize = 64;

/// What the peer does with a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Service {
    /// Takes everything and closes when the other side does.
    Discard,
    /// As [`Service::Discard`], and sends so many bytes, as fast as line and window allow; then it
    /// closes its side.
    Generate {
        /// Bytes of the stream, `u64::MAX` for no end.
        bytes: u64,
    },
    /// Sends `response` bytes for every `request` bytes that it takes.
    Respond {
        /// Bytes of a request, at least 1.
        request: u32,
        /// Bytes of the answer.
        response: u32,
    },
}

/// When the peer acknowledges. It also does at gaps, at repetitions, at the end of the stream, and at
/// the end of every burst unless it is told to wait there for more.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AckRule {
    /// After so many packets (0: whatever their number).
    pub packets: u32,
    /// After so many bytes (0: whatever their number).
    pub bytes: u32,
    /// What is left at the end of a burst waits so long for more at the most, as a delayed ACK does
    /// (RFC 1122 section 4.2.3.2); zero: it is acknowledged there, so that a sender never waits.
    pub wait: Duration,
}

impl Default for AckRule {
    /// After 64 KiB, as a receiver does that aggregates in hardware and takes what it is given.
    fn default() -> AckRule {
        AckRule { packets: 0, bytes: 64 << 10, wait: Duration::ZERO }
    }
}

/// What stands at the other end of the wire of [`super::with_peer`].
#[derive(Clone, Debug)]
pub struct FarEnd {
    /// Its station address.
    pub ether: EtherAddr,
    /// The receive window that it keeps open, in bytes; scaled as far as needed.
    pub window_bytes: u32,
    /// When it acknowledges.
    pub ack: AckRule,
    /// It offers timestamps (RFC 7323).
    pub timestamps: bool,
    /// It offers and sends SACK (RFC 2018).
    pub sack: bool,
    /// It compares all stream bytes that it takes with [`super::pattern`], and sends that pattern.
    /// Otherwise it neither reads nor writes payload, as DMA that passes the CPU's caches: what
    /// arrives is what lay in the buffer before.
    pub verify: bool,
    /// What it does with connections to these ports, the first that matches.
    pub services: Vec<(RangeInclusive<u16>, Service)>,
    /// Connections that it keeps at once; further ones are reset.
    pub max_connections: usize,
}

impl Default for FarEnd {
    /// Generates without end on port 19, as RFC 864 has it, and discards on all others; a window of
    /// 4 MiB, timestamps and SACK.
    fn default() -> FarEnd {
        let generate = Service::Generate { bytes: u64::MAX };
        FarEnd {
            ether: EtherAddr([2, 0, 0, 0, 0, 0xfe]),
            window_bytes: 4 << 20,
            ack: AckRule::default(),
            timestamps: true,
            sack: true,
            verify: false,
            services: vec![(19..=19, generate), (0..=u16::MAX, Service::Discard)],
            max_connections: 1024,
        }
    }
}

/// What a [`super::SimHandle`] asks of the peer.
#[derive(Clone, Debug)]
pub enum Command {
    /// Opens a connection to the stack.
    Connect {
        /// Address and port that the peer takes.
        from: SocketAddr,
        /// Where the stack listens.
        to: SocketAddr,
        /// What it does once connected.
        service: Service,
    },
    /// Sends datagrams, as fast as the line allows.
    Datagrams {
        /// Address and port that the peer takes.
        from: SocketAddr,
        /// Where they go.
        to: SocketAddr,
        /// Bytes of payload each.
        bytes: usize,
        /// How many.
        count: u64,
    },
    /// Sends datagrams at a rate for a while. Each begins with `mark`, followed by the time at which it
    /// arrives in nanoseconds, both in the byte order of the machine: so a receiver can tell flows apart
    /// and knows how late it is.
    Flow {
        /// Address and port that the peer takes.
        from: SocketAddr,
        /// Where they go.
        to: SocketAddr,
        /// Bytes of payload each, at least 16.
        bytes: usize,
        /// Datagrams per second; 0: as fast as the line allows.
        pps: u64,
        /// For so long.
        time: Duration,
        /// The first eight bytes of each.
        mark: u64,
    },
    /// Resets every connection.
    ResetAll,
}

/// A frame that the peer receives.
pub struct Arrival<'a> {
    /// When its last bit arrives.
    pub at: Instant,
    /// The front of the frame, headers at the least.
    pub front: &'a [u8],
    /// All of it.
    pub chain: &'a Chain,
    /// The train that it is.
    pub gso: Option<Gso>,
}

/// The way to the NIC.
pub struct Out<'a> {
    pub rx: &'a mut Rx,
    pub line: &'a mut Line,
    pub delay: Duration,
    pub board: &'a Board,
    /// Largest IP packet.
    pub mtu: usize,
    /// Bytes of payload that were read or written.
    pub moved_bytes: u64,
}

impl Out<'_> {
    /// Puts a frame on the wire, not before `at`.
    pub fn send(&mut self, at: Instant, frame: WireFrame) {
        let left = self.line.transmit(at, frame.len(), frame.packets(), header_bytes(&frame));
        self.rx.lane.push_back((left + self.delay, frame));
    }

    pub fn has_room(&self) -> bool {
        self.rx.has_room()
    }
}

fn header_bytes(frame: &WireFrame) -> usize {
    frame.gso.map_or(0, |g| usize::from(g.header_bytes))
}

/// See the module's header.
pub struct Peer {
    config: FarEnd,
    /// The station at the other end of the wire.
    host_ether: EtherAddr,
    conns: Set,
    sources: Vec<Source>,
    iss: u32,
}

impl Peer {
    pub fn new(config: FarEnd, host_ether: EtherAddr) -> Peer {
        let conns = Set::new(config.max_connections);
        Peer { config, host_ether, conns, sources: Vec::new(), iss: 0x5eed_0001 }
    }

    /// Takes one frame.
    pub fn input(&mut self, a: &Arrival<'_>, out: &mut Out<'_>) {
        let taken = match eth::Header::parse(a.front) {
            Ok(h) if h.dst != self.config.ether && !h.dst.is_multicast() => None,
            Ok(h) if h.ethertype == eth::ARP => self.arp(a, out),
            Ok(_) => self.ip_input(a, out),
            Err(_) => None,
        };
        if taken.is_none() {
            bump(&out.board.counts.peer_odd_frames, 1);
        }
    }

    fn ip_input(&mut self, a: &Arrival<'_>, out: &mut Out<'_>) -> Option<()> {
        let seen = Seen::of(a.front, a.chain.len())?;
        match seen.transport {
            Transport::Tcp(h) => self.tcp_input(a, &seen, &h, out),
            Transport::Udp => {
                let payload = seen.payload_bytes as u64;
                let each = a.gso.map_or(0, |g| u64::from(g.segment_bytes));
                let datagrams = if each == 0 { 1 } else { payload.div_ceil(each).max(1) };
                bump(&out.board.counts.peer_datagrams_in, datagrams);
                bump(&out.board.counts.peer_datagram_bytes_in, payload);
                Some(())
            }
            Transport::Other(protocol::ICMP) => self.icmpv4(a, &seen, out),
            Transport::Other(protocol::ICMPV6) => self.icmpv6(a, &seen, out),
            Transport::Other(_) => None,
        }
    }

    fn tcp_input(
        &mut self,
        a: &Arrival<'_>,
        seen: &Seen,
        h: &tcp::Header,
        out: &mut Out<'_>,
    ) -> Option<()> {
        bump(
            &out.board.counts.peer_segments_in,
            super::frame::packets(a.chain.len(), a.gso) as u64,
        );
        let key = Key { local: (seen.dst, h.dst_port), remote: (seen.src, h.src_port) };
        let config = &self.config;
        let is_syn = h.flags.contains(tcp::Flags::SYN) && !h.flags.contains(tcp::Flags::ACK);
        if let Some(c) = self.conns.get_mut(&key)
            && !(is_syn && c.is_replaced_by(h))
        {
            c.input(a, seen, h, config, out);
            self.conns.touch(&key);
            return Some(());
        }
        let service = config.services.iter().find(|(ports, _)| ports.contains(&h.dst_port));
        match service {
            Some((_, service)) if is_syn && self.conns.has_room(&key) => {
                self.iss = self.iss.wrapping_add(0x0001_0003);
                let ends = self.ends(seen.dst, seen.src);
                let c = Conn::accept(ends, key, h, *service, self.iss, out.mtu, &self.config);
                self.conns.insert(key, c);
                bump(&out.board.counts.peer_connections, 1);
                if let Some(c) = self.conns.get_mut(&key) {
                    c.start(a.at, &self.config, out);
                }
                self.conns.touch(&key);
            }
            _ => conn::refuse(&self.ends(seen.dst, seen.src), a.at, h, seen, out),
        }
        Some(())
    }

    fn ends(&self, src: IpAddr, dst: IpAddr) -> Ends {
        Ends { ether_src: self.config.ether, ether_dst: self.host_ether, src, dst }
    }

    /// The end of a burst: everything that waited for more is answered.
    pub fn end_of_burst(&mut self, out: &mut Out<'_>) {
        self.conns.answer(&self.config, out);
    }

    /// Timers, requests, and whatever waited for room in the lane.
    pub fn run(&mut self, now: Instant, out: &mut Out<'_>) {
        if out.board.has_commands() {
            for c in out.board.take_commands() {
                self.command(now, c, out);
            }
        }
        self.conns.run(now, &self.config, out);
        self.send_datagrams(now, out);
    }

    /// When [`Peer::run`] has something to do by itself: `free` is when the line has sent
    /// everything, `has_room` whether the lane takes more.
    pub fn next_event(&self, free: Instant, has_room: bool) -> Option<Instant> {
        let hungry = (has_room && self.conns.is_hungry()).then_some(Instant::ZERO);
        let source = self.sources.iter().map(|s| s.next_event(free)).min().filter(|_| has_room);
        [self.conns.next_deadline(), hungry, source].into_iter().flatten().min()
    }

    fn command(&mut self, now: Instant, c: Command, out: &mut Out<'_>) {
        match c {
            Command::Connect { from, to, service } => {
                let key = Key { local: (from.ip(), from.port()), remote: (to.ip(), to.port()) };
                if !self.conns.has_room(&key) {
                    return;
                }
                self.iss = self.iss.wrapping_add(0x0001_0003);
                let ends = self.ends(from.ip(), to.ip());
                let c = Conn::connect(ends, key, service, self.iss, out.mtu, &self.config);
                self.conns.insert(key, c);
                bump(&out.board.counts.peer_connections, 1);
                if let Some(c) = self.conns.get_mut(&key) {
                    c.start(now, &self.config, out);
                }
                self.conns.touch(&key);
            }
            Command::Datagrams { from, to, bytes, count } => {
                self.add_source(Source::counted(from, to, bytes, count, now));
            }
            Command::Flow { from, to, bytes, pps, time, mark } => {
                let flow = Source::counted(from, to, bytes.max(STAMP_BYTES), u64::MAX, now);
                self.add_source(flow.at_rate(pps, time, mark));
            }
            Command::ResetAll => self.conns.reset_all(now, &self.config, out),
        }
    }

    fn add_source(&mut self, source: Source) {
        if self.sources.len() < MAX_SOURCES {
            self.sources.push(source);
        }
    }

    /// Datagrams up to now.
    fn send_datagrams(&mut self, now: Instant, out: &mut Out<'_>) {
        let (ether_src, ether_dst) = (self.config.ether, self.host_ether);
        for s in &mut self.sources {
            let (src, dst) = s.addresses();
            s.run(now, &Ends { ether_src, ether_dst, src, dst }, out);
        }
        self.sources.retain(|s| !s.is_over(now));
    }
}

/// Connections by address, for [`conn::Set`].
type Index = BTreeMap<Key, usize>;

/// Compares payload with the pattern of a stream.
fn verify(a: &Arrival<'_>, from: usize, bytes: usize, offset: u64, out: &mut Out<'_>) {
    // A byte at a time: several times as slow as a copy.
    out.moved_bytes += 4 * bytes as u64;
    let (mut skip, mut left, mut at) = (from, bytes, offset);
    for s in a.chain.slices() {
        let part = s.get(skip.min(s.len())..).unwrap_or(&[]);
        skip = skip.saturating_sub(s.len());
        let part = part.get(..left.min(part.len())).unwrap_or(&[]);
        bump(&out.board.counts.peer_wrong_bytes, pattern::wrong_bytes(at, part));
        at += part.len() as u64;
        left -= part.len();
    }
}
