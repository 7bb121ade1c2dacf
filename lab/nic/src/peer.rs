//! The far end as a model: a station that answers as a good host would, in hardware's time.
//!
//! Enters: every frame that the NIC puts on the wire, with the time at which its last bit arrives. Leaves: frames for
//! the NIC's lane. It answers ARP and neighbour solicitations for any address, counts datagrams, sends datagrams when
//! asked, and keeps TCP connections ([`conn`]). Other frames are only counted. All of it is bounded: connections by
//! [`FarEnd::max_connections`], sent bytes by the peer's window and the lane.
//!
//! It is not a full stack: it has no congestion control (the wire is its own), no urgent data and no lingering close.
//! It does not read received payload unless it is configured to verify it.

mod conn;
mod neighbour;
mod source;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::net::IpAddr;

use fulmar_stack::base::{Duration, EtherAddr, Gso, Instant};
use fulmar_stack::mbuf::Chain;
use fulmar_stack::wire::{eth, protocol, tcp};

pub use super::far_end::{Command, FarEnd, Service};
use super::frame::{Addresses, Headers, Transport, WireFrame};
use super::line::Line;
use super::meter::{Board, bump};
use super::pattern;
use super::rx::Rx;
use conn::{Conn, Key, Set};
use source::{STAMP_BYTES, Source};

/// Requests for datagrams that are under way at once.
const MAX_SOURCES: usize = 64;

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

    pub fn has_space(&self) -> bool {
        self.rx.has_space()
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
        let seen = Headers::parse(a.front, a.chain.len())?;
        match seen.transport {
            Transport::Tcp(h) => self.tcp_input(a, &seen, &h, out),
            Transport::Udp(_) => {
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
        seen: &Headers,
        h: &tcp::Header,
        out: &mut Out<'_>,
    ) -> Option<()> {
        bump(
            &out.board.counts.peer_segments_in,
            super::frame::packets(a.chain.len(), a.gso) as u64,
        );
        let key =
            Key { local: (seen.network.dst, h.dst_port), remote: (seen.network.src, h.src_port) };
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
            Some((_, service)) if is_syn && self.conns.has_space(&key) => {
                self.iss = self.iss.wrapping_add(0x0001_0003);
                let ends = self.ends(seen.network.dst, seen.network.src);
                let c = Conn::accept(ends, key, h, *service, self.iss, out.mtu, &self.config);
                self.conns.insert(key, c);
                bump(&out.board.counts.peer_connections, 1);
                if let Some(c) = self.conns.get_mut(&key) {
                    c.start(a.at, &self.config, out);
                }
                self.conns.touch(&key);
            }
            _ => conn::refuse(&self.ends(seen.network.dst, seen.network.src), a.at, h, seen, out),
        }
        Some(())
    }

    fn ends(&self, src: IpAddr, dst: IpAddr) -> Addresses {
        Addresses { ether_src: self.config.ether, ether_dst: self.host_ether, src, dst }
    }

    /// The end of a burst: everything that waited for more is answered.
    pub fn end_of_burst(&mut self, out: &mut Out<'_>) {
        self.conns.answer(&self.config, out);
    }

    /// Timers, requests, and whatever waited for space in the lane.
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
    /// everything, `has_space` whether the lane takes more.
    pub fn next_event(&self, free: Instant, has_space: bool) -> Option<Instant> {
        let hungry = (has_space && self.conns.is_hungry()).then_some(Instant::ZERO);
        let source = self.sources.iter().map(|s| s.next_event(free)).min().filter(|_| has_space);
        [self.conns.next_deadline(), hungry, source].into_iter().flatten().min()
    }

    fn command(&mut self, now: Instant, c: Command, out: &mut Out<'_>) {
        match c {
            Command::Connect { from, to, service } => {
                let key = Key { local: (from.ip(), from.port()), remote: (to.ip(), to.port()) };
                if !self.conns.has_space(&key) {
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
            s.run(now, &Addresses { ether_src, ether_dst, src, dst }, out);
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
