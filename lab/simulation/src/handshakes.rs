//! The handshakes that a station's gate sees. A connection comes of a SYN or of a SYN cookie, so what arrived bounds
//! what a listener may hand to its program.

use std::collections::HashMap;
use std::net::SocketAddr;

use fulmar_stack::device::Packet;
use fulmar_stack::shard::ListenerStat;
use fulmar_stack::socket::SocketError;
use fulmar_stack::wire::dissect::Network;
use fulmar_stack::wire::protocol;
use fulmar_stack::wire::tcp::{Flags, Header};

use super::app::End;
use super::attack::AttackKind;
use super::gate::lock;
use super::oracle::Violation;
use super::world::{SERVER_PORT, START, World};

const HEAD_BYTES: usize = 160;
/// The acknowledgement number lies here in the header (RFC 9293 section 3.1).
const ACK_NUMBER: std::ops::Range<usize> = 8..12;

/// Handshakes between the listener of a station and one peer.
#[derive(Clone, Default, Debug)]
pub struct Handshake {
    /// SYNs that arrived, copies included.
    syns: u64,
    /// SYNs that may open a connection by Fast Open.
    early_syns: u64,
    /// Segments that arrived and could bring back a SYN cookie, copies included.
    cookie_acks: u64,
    /// Connections that the program has got.
    accepted: u64,
    /// Initial sequence numbers of the peer.
    irs: Vec<u32>,
    /// Initial sequence numbers of the SYN,ACKs that were sent.
    iss: Vec<u32>,
    /// Members of `iss` that the peer acknowledged.
    acked: Vec<u32>,
    /// Other numbers that were acknowledged. A replayed ACK may meet by chance the number of a SYN,ACK that still
    /// waits for the device: the numbers of a flow advance by one each 4 us (RFC 6528).
    strays: Vec<u32>,
}

impl Handshake {
    /// Connections that may be open or have been: one for each SYN,ACK that was acknowledged, one more for each ACK
    /// with a SYN cookie, and one for each SYN that Fast Open may have taken.
    fn proofs(&self, stat: &ListenerStat) -> u64 {
        let of_cookies = if stat.cookies_sent > 0 { self.cookie_acks } else { 0 };
        let early = if stat.fast_opens > 0 { self.early_syns } else { 0 };
        self.acked.len() as u64 + of_cookies + early
    }

    /// Checks that all connections of `peer` came from its handshakes, except for `but`.
    fn check(&self, peer: SocketAddr, stat: &ListenerStat, but: u64) -> Result<(), String> {
        if self.accepted > self.proofs(stat) + but {
            return Err(format!("more connections from {peer} than handshakes: {self:?}"));
        }
        Ok(())
    }
}

/// Handshakes of the listener of a station.
#[derive(Default, Debug)]
pub struct Handshakes {
    peers: HashMap<SocketAddr, Handshake>,
    syns: u64,
    accepted: u64,
    /// Connections that the program has decided about while they were pending.
    decided: u64,
    /// Connections that it accepted while pending and whose handshake failed.
    pub forgotten: u64,
}

/// A segment of a handshake.
struct Segment {
    from: SocketAddr,
    to: SocketAddr,
    seq: u32,
    ack: u32,
    flags: Flags,
    /// Fast Open may take it: it has data or the option.
    is_early: bool,
}

impl Segment {
    fn parse(p: &Packet) -> Option<Segment> {
        let mut head = [0; HEAD_BYTES];
        let n = p.chain.copy_to(0, &mut head);
        let network = Network::parse(&head[..n], p.chain.len())?;
        let tcp = head[..n].get(network.l4..).filter(|_| network.protocol == protocol::TCP)?;
        let (seq, flags, _) = Header::peek(tcp)?;
        let (header, header_bytes) = Header::parse(tcp).ok()?;
        let is_early =
            header.options.fast_open.is_some() || p.chain.len() > network.l4 + header_bytes;
        let port = |at: usize| u16::from_be_bytes([tcp[at], tcp[at + 1]]);
        let ack = u32::from_be_bytes(tcp[ACK_NUMBER].try_into().ok()?);
        let (from, to) =
            (SocketAddr::new(network.src, port(0)), SocketAddr::new(network.dst, port(2)));
        Some(Segment { from, to, seq: seq.0, ack, flags, is_early })
    }
}

impl Handshakes {
    /// A frame arrives at the station.
    pub fn arrives(&mut self, p: &Packet) {
        let Some(s) = Segment::parse(p).filter(|s| s.to.port() == SERVER_PORT) else { return };
        if s.flags.contains(Flags::RST) {
            return;
        }
        if s.flags.contains(Flags::SYN) && !s.flags.contains(Flags::ACK) {
            let peer = self.peers.entry(s.from).or_default();
            peer.syns += 1;
            peer.early_syns += u64::from(s.is_early);
            self.syns += 1;
            note(&mut peer.irs, s.seq);
        } else if s.flags.contains(Flags::ACK)
            && let Some(peer) = self.peers.get_mut(&s.from)
        {
            let iss = s.ack.wrapping_sub(1);
            if peer.iss.contains(&iss) {
                note(&mut peer.acked, iss);
                peer.cookie_acks += u64::from(peer.irs.contains(&s.seq.wrapping_sub(1)));
            } else {
                note(&mut peer.strays, iss);
            }
        }
    }

    /// The station sends a frame.
    pub fn leaves(&mut self, p: &Packet) {
        let Some(s) = Segment::parse(p).filter(|s| s.from.port() == SERVER_PORT) else { return };
        if s.flags.contains(Flags::SYN | Flags::ACK)
            && let Some(peer) = self.peers.get_mut(&s.to)
        {
            note(&mut peer.iss, s.seq);
            if peer.strays.contains(&s.seq) {
                note(&mut peer.acked, s.seq);
            }
        }
    }

    /// The program gets a connection; fails with what more than that came of the handshakes with its peer. One more
    /// may come of a SYN,ACK that was acknowledged before it left, which [`Handshakes::check`] asks for.
    fn accept(&mut self, peer: SocketAddr, stat: &ListenerStat) -> Result<(), String> {
        let of_peer = self.peers.entry(peer).or_default();
        of_peer.accepted += 1;
        self.accepted += 1;
        let in_advance = u64::from(!of_peer.strays.is_empty());
        of_peer.check(peer, stat, in_advance)
    }

    /// The program has decided about a pending connection.
    pub fn decide(&mut self) {
        self.decided += 1;
    }

    /// Each SYN is dropped, answered with a cookie, decided about, or becomes one connection; each returned cookie
    /// becomes another. `own_syns`: an upper bound of the SYNs that the station sent to itself.
    fn check(&self, stat: &ListenerStat, own_syns: u64) -> Result<(), String> {
        self.peers.iter().try_for_each(|(peer, h)| h.check(*peer, stat, 0))?;
        let queued = (stat.accept_queue + stat.embryos + stat.pending) as u64;
        let given_up = stat.embryos_expired + stat.embryos_replaced;
        let pending = stat.pending_expired + stat.pending_reset;
        // Embryos of connections that were accepted while pending were decided about.
        let taken = match stat.pending_limit > 0 {
            true => self.decided + pending,
            false => self.accepted + given_up,
        };
        let out = taken + queued + stat.cookies_sent + stat.syns_dropped;
        if out > self.syns + own_syns + stat.cookies_valid {
            let Handshakes { syns, accepted, decided, .. } = self;
            return Err(format!(
                "{accepted} accepted, {decided} decided of {syns} and {own_syns} SYNs, {stat:?}"
            ));
        }
        Ok(())
    }
}

/// Adds a number unless the list has it.
fn note(numbers: &mut Vec<u32>, n: u32) {
    if !numbers.contains(&n) {
        numbers.push(n);
    }
}

impl World {
    /// Whether station `i` has seen of the handshakes with a peer what is asked for; so with those to itself, which no
    /// gate sees.
    fn has_seen(&self, i: usize, peer: SocketAddr, asked: impl Fn(&Handshake) -> bool) -> bool {
        lock(&self.network).handshakes[i].peers.get(&peer).is_some_and(asked) || self.is_own(peer)
    }

    fn is_own(&self, peer: SocketAddr) -> bool {
        let flows = self.scenario.flows.iter().zip(self.ends.chunks_exact(2));
        flows.filter(|(f, _)| f.to_self).any(|(_, e)| e[0].connects.is_some_and(|c| c.0 == peer))
    }

    /// Whether the passive end's station has answered a SYN of a flow.
    pub(super) fn is_answered(&self, flow: usize) -> bool {
        let (peer, station) = (self.ends[2 * flow].connects, self.ends[2 * flow + 1].station);
        peer.is_some_and(|(peer, ..)| self.has_seen(station, peer, |h| !h.iss.is_empty()))
    }

    /// Whether a SYN of a flow has come to the passive end's station more than once.
    pub(super) fn has_come_twice(&self, flow: usize) -> bool {
        let (peer, station) = (self.ends[2 * flow].connects, self.ends[2 * flow + 1].station);
        peer.is_some_and(|(peer, ..)| self.has_seen(station, peer, |h| h.syns > 1))
    }

    fn listener_stat(&mut self, i: usize) -> Option<ListenerStat> {
        let side = &mut self.sides[i];
        side.listener.and_then(|id| side.shard.listener(id).ok()).map(|l| l.stat())
    }

    /// A connection that the program gets has come of a handshake of its own; of a station to itself, of an attempt.
    pub(super) fn check_accepted(&mut self, i: usize, peer: SocketAddr) -> Result<(), Violation> {
        let failed = |what| Violation::Handshakes { station: i, what };
        let Some(stat) = self.listener_stat(i) else { return Ok(()) };
        let of_peer = |e: &&mut End| e.connects.is_some_and(|c| c.0 == peer);
        if !self.is_own(peer) {
            return lock(&self.network).handshakes[i].accept(peer, &stat).map_err(failed);
        }
        lock(&self.network).handshakes[i].accepted += 1;
        let Some(opener) = self.ends.iter_mut().step_by(2).find(of_peer) else { return Ok(()) };
        opener.attempts.accepted += 1;
        let attempts = match stat.fast_opens {
            0 => opener.attempts.calls,
            // A SYN that comes again may be taken again (RFC 7413 section 2.1).
            _ => opener.attempts.syns + opener.syns_of_attempt(&mut self.sides[i].shard),
        };
        if opener.attempts.accepted > attempts {
            return Err(failed(format!("more connections from {peer} than attempts")));
        }
        Ok(())
    }

    /// Whether frames of a kind have been injected to station `i` by now.
    pub(super) fn is_attacked(&self, i: usize, kind: AttackKind) -> bool {
        let mut attacks = self.scenario.swarm.attacks.iter();
        attacks.any(|a| a.kind == kind && a.victim == i && START + a.from <= self.now)
    }

    /// Runs when all connections are through. Checks that each connection came from a SYN or a cookie. Also checks that
    /// the openers that failed unseen by the other end are no more than the embryos and cookies that the listener gave
    /// up.
    pub(super) fn check_listeners(&mut self) -> Result<(), Violation> {
        for i in 0..2 {
            let Some(stat) = self.listener_stat(i) else { continue };
            let failed = |what| Violation::Handshakes { station: i, what };
            let is_own = |e: &&End| e.station == i && self.scenario.flows[e.name.0].to_self;
            let own_syns =
                self.ends.iter().step_by(2).filter(is_own).map(|e| e.attempts.syns).sum();
            let network = lock(&self.network);
            network.handshakes[i].check(&stat, own_syns).map_err(failed)?;
            let forgotten = stat.embryos_expired
                + stat.cookies_sent.saturating_sub(stat.cookies_valid)
                + stat.cookies_failed
                + network.handshakes[i].forgotten;
            drop(network);
            let unseen =
                (0..self.scenario.flows.len()).filter(|f| self.is_unseen(*f, i)).count() as u64;
            if unseen > forgotten {
                return Err(failed(format!("{unseen} failed unseen, {forgotten} forgotten")));
            }
        }
        Ok(())
    }

    /// Whether a flow failed at its opener, without a cause in the scenario, before station `i` accepted it.
    fn is_unseen(&self, flow: usize, i: usize) -> bool {
        let (opener, passive) = (&self.ends[2 * flow], &self.ends[2 * flow + 1]);
        // Its SYN waited for an Ethernet address in vain.
        let is_absent = opener.may_be_absent && opener.error == Some(SocketError::HostUnreachable);
        let has_cause = self.scenario.may_fail(flow)
            || is_absent
            || opener.is_reclaimed
            || passive.is_reclaimed
            || opener.is_refused
            || opener.opens_early
            || opener.has_reconnected;
        passive.station == i && passive.is_unconnected() && opener.error.is_some() && !has_cause
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PEER: SocketAddr =
        SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 20_000);

    /// The handshakes that a gate saw of one peer: the SYNs, the acknowledged answers, and the ACKs with cookies.
    fn seen(syns: u64, acked: u32, cookie_acks: u64) -> Handshakes {
        let acked = (0..acked).collect();
        let peer = Handshake { syns, acked, cookie_acks, ..Default::default() };
        Handshakes { peers: [(PEER, peer)].into(), syns, ..Default::default() }
    }

    #[test]
    fn a_peer_has_no_more_connections_than_its_handshakes_and_cookies() {
        let plain = ListenerStat::default();
        let cookies = ListenerStat { cookies_sent: 1, ..plain };
        for (mut handshakes, stat) in [(seen(3, 2, 5), plain), (seen(1, 1, 1), cookies)] {
            assert_eq!(handshakes.accept(PEER, &stat), Ok(()));
            assert_eq!(handshakes.accept(PEER, &stat), Ok(()));
            assert!(handshakes.accept(PEER, &stat).is_err());
        }
    }

    #[test]
    fn an_ack_that_comes_before_its_syn_ack_has_left_is_a_handshake_once_that_has() {
        let plain = ListenerStat::default();
        let mut handshakes = seen(2, 1, 0);
        handshakes.peers.entry(PEER).or_default().strays = vec![7];
        assert_eq!(handshakes.accept(PEER, &plain), Ok(()));
        assert_eq!(handshakes.accept(PEER, &plain), Ok(()));
        assert!(handshakes.check(&plain, 0).is_err(), "no SYN,ACK has this number");
        handshakes.peers.entry(PEER).or_default().acked.push(7);
        assert_eq!(handshakes.check(&plain, 0), Ok(()));
        handshakes.peers.entry(PEER).or_default().strays.clear();
        assert!(handshakes.accept(PEER, &plain).is_err());
    }

    #[test]
    fn fast_open_takes_only_syns_with_data_or_an_option() {
        let early = ListenerStat { fast_opens: 1, ..Default::default() };
        let mut handshakes = seen(5, 0, 0);
        handshakes.peers.entry(PEER).or_default().early_syns = 1;
        assert_eq!(handshakes.accept(PEER, &early), Ok(()));
        assert!(handshakes.accept(PEER, &early).is_err());
        assert!(seen(5, 0, 0).accept(PEER, &early).is_err());
    }

    #[test]
    fn each_syn_of_a_listener_ends_in_one_way() {
        let mut handshakes = seen(6, 1, 1);
        let stat = ListenerStat {
            embryos: 1,
            accept_queue: 1,
            embryos_expired: 1,
            cookies_sent: 2,
            cookies_valid: 1,
            syns_dropped: 1,
            ..Default::default()
        };
        assert_eq!(handshakes.accept(PEER, &stat), Ok(()));
        assert_eq!(handshakes.check(&stat, 0), Ok(()));
        assert!(handshakes.check(&ListenerStat { cookies_valid: 0, ..stat }, 0).is_err());
        assert_eq!(handshakes.check(&ListenerStat { cookies_valid: 0, ..stat }, 1), Ok(()));
        assert!(handshakes.check(&ListenerStat { embryos_expired: 2, ..stat }, 0).is_err());
        assert!(handshakes.check(&ListenerStat { embryos: 2, ..stat }, 0).is_err());
    }

    #[test]
    fn each_syn_is_pending_once() {
        let mut handshakes = seen(4, 0, 0);
        handshakes.decide();
        let stat = ListenerStat {
            pending_limit: 4,
            pending: 1,
            pending_expired: 1,
            pending_reset: 1,
            ..Default::default()
        };
        assert_eq!(handshakes.check(&stat, 0), Ok(()));
        assert!(handshakes.check(&ListenerStat { syns_dropped: 1, ..stat }, 0).is_err());
        handshakes.decide();
        assert!(handshakes.check(&stat, 0).is_err());
    }
}
