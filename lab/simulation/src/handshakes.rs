//! The handshakes that a station's gate sees. A connection comes of a SYN or of a SYN cookie, so what arrived bounds
//! what a listener may hand to its program.

use std::collections::HashMap;
use std::net::SocketAddr;

use fulmar_netdev::Packet;
use fulmar_shard::ListenerStat;
use fulmar_socket::SocketError;
use fulmar_wire::dissect::Network;
use fulmar_wire::protocol;
use fulmar_wire::tcp::{Flags, Header};

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
    pub syns: u64,
    /// Segments that arrived and could bring back a SYN cookie, copies included.
    pub cookie_acks: u64,
    /// Connections that the program has accepted.
    pub accepted: u64,
    /// Initial sequence numbers of the peer.
    irs: Vec<u32>,
    /// Initial sequence numbers of the SYN,ACKs that were sent.
    iss: Vec<u32>,
}

impl Handshake {
    /// The station has answered a SYN.
    pub fn is_answered(&self) -> bool {
        !self.iss.is_empty()
    }
}

/// Handshakes of the listener of a station.
#[derive(Default, Debug)]
pub struct Handshakes {
    peers: HashMap<SocketAddr, Handshake>,
    syns: u64,
    accepted: u64,
}

/// A segment of a handshake.
struct Segment {
    from: SocketAddr,
    to: SocketAddr,
    seq: u32,
    ack: u32,
    flags: Flags,
}

impl Segment {
    fn parse(p: &Packet) -> Option<Segment> {
        let mut head = [0; HEAD_BYTES];
        let n = p.chain.copy_to(0, &mut head);
        let network = Network::parse(&head[..n], p.chain.len())?;
        let tcp = head[..n].get(network.l4..).filter(|_| network.protocol == protocol::TCP)?;
        let (seq, flags, _) = Header::peek(tcp)?;
        let port = |at: usize| u16::from_be_bytes([tcp[at], tcp[at + 1]]);
        let ack = u32::from_be_bytes(tcp[ACK_NUMBER].try_into().ok()?);
        let (from, to) =
            (SocketAddr::new(network.src, port(0)), SocketAddr::new(network.dst, port(2)));
        Some(Segment { from, to, seq: seq.0, ack, flags })
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
            self.syns += 1;
            note(&mut peer.irs, s.seq);
        } else if s.flags.contains(Flags::ACK)
            && let Some(peer) = self.peers.get_mut(&s.from)
        {
            let is_first = peer.irs.contains(&s.seq.wrapping_sub(1));
            peer.cookie_acks += u64::from(is_first && peer.iss.contains(&s.ack.wrapping_sub(1)));
        }
    }

    /// The station sends a frame.
    pub fn leaves(&mut self, p: &Packet) {
        let Some(s) = Segment::parse(p).filter(|s| s.from.port() == SERVER_PORT) else { return };
        if s.flags.contains(Flags::SYN | Flags::ACK)
            && let Some(peer) = self.peers.get_mut(&s.to)
        {
            note(&mut peer.iss, s.seq);
        }
    }

    /// Those with a peer.
    pub fn with(&self, peer: SocketAddr) -> Handshake {
        self.peers.get(&peer).cloned().unwrap_or_default()
    }

    /// The program accepts a connection; fails with what more than that came of the SYNs and cookies that arrived.
    fn accept(&mut self, peer: SocketAddr, stat: Option<&ListenerStat>) -> Result<(), String> {
        let of_peer = self.peers.entry(peer).or_default();
        of_peer.accepted += 1;
        self.accepted += 1;
        let Handshake { syns, cookie_acks, accepted, .. } = *of_peer;
        let Some(stat) = stat else { return Ok(()) };
        let of_cookies = if stat.cookies_sent > 0 { cookie_acks } else { 0 };
        if accepted > syns + of_cookies {
            return Err(format!("{accepted} from {peer} of {syns} SYNs, {of_cookies} cookies"));
        }
        Ok(())
    }

    /// Each SYN is dropped, answered with a cookie, or becomes one connection; each cookie that comes back another.
    fn check(&self, stat: &ListenerStat) -> Result<(), String> {
        let queued = (stat.accept_queue + stat.embryos) as u64;
        let given_up = stat.embryos_expired + stat.embryos_replaced;
        let out = self.accepted + queued + given_up + stat.cookies_sent + stat.syns_dropped;
        if out > self.syns + stat.cookies_valid {
            return Err(format!("{} accepted of {} SYNs, {stat:?}", self.accepted, self.syns));
        }
        Ok(())
    }
}

/// Adds a number if it is not there.
fn note(numbers: &mut Vec<u32>, n: u32) {
    if !numbers.contains(&n) {
        numbers.push(n);
    }
}

impl World {
    /// What station `i` has seen of handshakes with a peer; `None` for one of its own connections to itself, which
    /// no gate sees.
    pub(super) fn handshake(&self, i: usize, peer: SocketAddr) -> Option<Handshake> {
        (!self.is_own(peer)).then(|| lock(&self.ground).handshakes[i].with(peer))
    }

    fn is_own(&self, peer: SocketAddr) -> bool {
        let flows = self.scenario.flows.iter().zip(self.ends.chunks_exact(2));
        flows.filter(|(f, _)| f.to_self).any(|(_, e)| e[0].connects.is_some_and(|c| c.0 == peer))
    }

    /// Whether the passive end's station has answered a SYN of a flow.
    pub(super) fn is_answered(&self, flow: usize) -> bool {
        let peer = self.ends[2 * flow].connects.map(|c| c.0);
        let station = self.ends[2 * flow + 1].station;
        peer.is_some_and(|peer| self.handshake(station, peer).is_none_or(|h| h.is_answered()))
    }

    fn listener_stat(&mut self, i: usize) -> Option<ListenerStat> {
        let side = &mut self.sides[i];
        side.listener.and_then(|id| side.shard.listener(id).ok()).map(|l| l.stat())
    }

    /// A connection that is accepted has come of a SYN or a cookie of its own.
    pub(super) fn check_accepted(&mut self, i: usize, peer: SocketAddr) -> Result<(), Violation> {
        let stat = self.listener_stat(i).filter(|_| !self.is_own(peer));
        let told = lock(&self.ground).handshakes[i].accept(peer, stat.as_ref());
        told.map_err(|what| Violation::Handshakes { station: i, what })
    }

    /// Whether frames of a kind have been injected to station `i` by now.
    pub(super) fn is_attacked(&self, i: usize, kind: AttackKind) -> bool {
        let mut attacks = self.scenario.swarm.attacks.iter();
        attacks.any(|a| a.kind == kind && a.victim == i && START + a.from <= self.now)
    }

    /// When all connections are through: as many SYNs and cookies came as connections of them, and openers failed
    /// that the other end never saw no more than the listener gave up, or had cookies out.
    pub(super) fn check_listeners(&mut self) -> Result<(), Violation> {
        for i in 0..2 {
            let Some(stat) = self.listener_stat(i).filter(|_| self.sides[i].decider.is_none())
            else {
                continue;
            };
            let failed = |what| Violation::Handshakes { station: i, what };
            if !self.scenario.flows.iter().any(|f| f.to_self && f.opener == i) {
                lock(&self.ground).handshakes[i].check(&stat).map_err(failed)?;
            }
            let forgotten = stat.embryos_expired
                + stat.cookies_sent.saturating_sub(stat.cookies_valid)
                + stat.cookies_failed;
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
        // A shard that lacks memory resets connections that wait to be accepted, too.
        let is_reclaimed = self.sides.iter().any(|s| s.reclaimed > 0);
        // Its SYN waited for an Ethernet address in vain.
        let is_absent = opener.may_be_absent && opener.error == Some(SocketError::HostUnreachable);
        let has_cause = self.scenario.may_fail(flow)
            || is_reclaimed
            || is_absent
            || opener.opens_early
            || opener.has_reconnected;
        passive.station == i && passive.is_unborn() && opener.error.is_some() && !has_cause
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PEER: SocketAddr =
        SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 20_000);

    /// What a gate saw of one peer.
    fn seen(syns: u64, cookie_acks: u64) -> Handshakes {
        let peer = Handshake { syns, cookie_acks, ..Default::default() };
        Handshakes { peers: [(PEER, peer)].into(), syns, accepted: 0 }
    }

    #[test]
    fn a_peer_has_no_more_connections_than_its_syns_and_cookies() {
        let (plain, cookies) =
            (ListenerStat::default(), ListenerStat { cookies_sent: 1, ..Default::default() });
        for (mut handshakes, stat) in [(seen(2, 5), plain), (seen(1, 1), cookies)] {
            assert_eq!(handshakes.accept(PEER, Some(&stat)), Ok(()));
            assert_eq!(handshakes.accept(PEER, Some(&stat)), Ok(()));
            assert!(handshakes.accept(PEER, Some(&stat)).is_err());
        }
    }

    #[test]
    fn each_syn_of_a_listener_ends_in_one_way() {
        let mut handshakes = seen(6, 1);
        assert_eq!(handshakes.accept(PEER, None), Ok(()));
        let stat = ListenerStat {
            embryos: 1,
            accept_queue: 1,
            embryos_expired: 1,
            cookies_sent: 2,
            cookies_valid: 1,
            syns_dropped: 1,
            ..Default::default()
        };
        assert_eq!(handshakes.check(&stat), Ok(()));
        assert!(handshakes.check(&ListenerStat { cookies_valid: 0, ..stat }).is_err());
        assert!(handshakes.check(&ListenerStat { embryos_expired: 2, ..stat }).is_err());
        assert!(handshakes.check(&ListenerStat { embryos: 2, ..stat }).is_err());
    }
}
