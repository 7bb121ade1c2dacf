//! Listeners that decide about pending connections before the SYN is answered, and stations that answer for every
//! address.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::task::Poll;

use fulmar_stack::base::{Duration, Instant, SlotId};
use fulmar_stack::shard::{ConditionalAccept, Decision, Pending};
use fulmar_stack::socket::SocketError;

use super::app::{Cx, End, Phase};
use super::gate::lock;
use super::oracle::Violation;
use super::scenario::{Draw, Scenario};
use super::world::{World, address};

const MS: Duration = Duration::from_millis(1);
/// A SYN of an opener that has tried for this long is not dropped: the next one comes after the double time, and the
/// opener's user time-out may pass first.
const PATIENCE: Duration = Duration::from_secs(20);
/// The time until a decision that found no memory or no route is tried again.
const AGAIN: Duration = Duration::from_millis(200);
/// Administratively prohibited, in ICMP (RFC 1812 section 5.2.7.1) and ICMPv6 (RFC 4443 section 3.1).
const PROHIBITED: [u8; 2] = [13, 1];

/// How a program decides.
#[derive(Clone, Copy, Debug)]
pub struct DecidePlan {
    /// Limits of the listener.
    pub limits: ConditionalAccept,
    /// The longest that it takes to decide.
    pub thinks: Duration,
    /// The share of openers that are refused.
    pub refuses_percent: u64,
    /// The SYNs that are dropped, and come again.
    pub drops: u32,
}

/// The program.
pub struct Decider {
    plan: DecidePlan,
    draw: Draw,
    drops_left: u32,
    /// The pending connections that it thinks about, each until a time.
    held: Vec<(Instant, Pending)>,
}

impl Decider {
    /// A program that has seen nothing yet.
    pub fn new(plan: DecidePlan, seed: u64) -> Decider {
        Decider { plan, draw: Draw::new(seed), drops_left: plan.drops, held: Vec::new() }
    }

    /// When it decides next.
    pub fn deadline(&self) -> Option<Instant> {
        self.held.iter().map(|held| held.0).min()
    }

    fn hold(&mut self, now: Instant, pending: Pending) {
        // Longer thoughts come too late each time.
        let most = self.plan.thinks.min(self.plan.limits.timeout / 2);
        let us = u64::try_from(most.as_nanos() / 1_000).unwrap_or(0);
        let thinks = Duration::from_micros(self.draw.below(us + 1));
        let thinks = if self.draw.percent(50) { Duration::ZERO } else { thinks };
        self.held.push((now + thinks, pending));
    }

    fn next_due(&mut self, now: Instant) -> Option<Pending> {
        let at = self.held.iter().position(|held| held.0 <= now)?;
        Some(self.held.remove(at).1)
    }

    /// About a connection that the program waits for, with how long its opener has tried, or any other.
    fn decide(&mut self, tries_for: Option<Duration>, v6: bool) -> Decision {
        let no = Decision::Unreachable(PROHIBITED[usize::from(v6)]);
        let Some(tries_for) = tries_for else {
            return self.draw.pick(&[Decision::Drop, Decision::Drop, Decision::Refuse, no]);
        };
        if self.draw.percent(self.plan.refuses_percent) {
            return self.draw.pick(&[Decision::Refuse, no]);
        }
        if self.drops_left > 0 && self.draw.percent(50) && tries_for < PATIENCE {
            self.drops_left -= 1;
            return Decision::Drop;
        }
        Decision::Accept
    }
}

impl Scenario {
    pub(super) fn draw_pending(&mut self, d: &mut Draw) {
        let (both, one) = (d.percent(50), d.below(2) as usize);
        for i in 0..2 {
            let limits = ConditionalAccept {
                backlog: d.pick(&[4, 64, 1024]),
                per_source: d.pick(&[4, 256]),
                timeout: Duration::from_secs(d.pick(&[2, 75])),
            };
            let plan = DecidePlan {
                limits,
                thinks: MS * d.log(1, 4_000) as u32,
                refuses_percent: d.pick(&[0, 0, 10, 40]),
                drops: d.below(6) as u32,
            };
            if both || i == one {
                self.swarm.decides[i] = Some(plan);
            }
        }
    }

    pub(super) fn draw_any_address(&mut self, d: &mut Draw) {
        self.swarm.any_address = Some(d.below(2) as usize);
    }

    /// The address of an end of a flow: of a station that answers for every one, another for each port.
    pub(super) fn address_of(&self, flow: usize, end: usize) -> IpAddr {
        let f = &self.flows[flow];
        let station = f.station(end);
        let n = self.port_of(flow) as u16;
        match self.swarm.any_address {
            Some(any) if any == station && !f.to_self && self.v6 => {
                IpAddr::V6(Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 0x1000 + n))
            }
            Some(any) if any == station && !f.to_self => {
                IpAddr::V4(Ipv4Addr::new(10, 0, 0, 20 + (n % 200) as u8))
            }
            _ => address(self.v6, station),
        }
    }

    /// Where the listener of a station is bound.
    pub(super) fn listens_at(&self, station: usize) -> IpAddr {
        match (self.swarm.any_address == Some(station), self.v6) {
            (true, true) => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
            (true, false) => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
            (false, v6) => address(v6, station),
        }
    }

    /// The longest time for which listeners keep an opener waiting: for the decision of their programs, and for their
    /// turn. Openers that began at the same instant repeat their SYNs at the same instants, in the end once per maximum
    /// RTO. Each time the listener takes SYNs up to its limit of pending connections. The same holds for SYN,ACKs and
    /// the accept queue.
    pub(super) fn decisions(&self) -> Duration {
        let max_rto = self.stations.iter().map(|s| s.tcp.max_rto).max().unwrap_or_default();
        let turns = |at_once: usize| max_rto * (self.flows.len() / at_once.max(1)) as u32;
        let decision = |p: &DecidePlan| {
            let at_once = p.limits.backlog.min(p.limits.per_source);
            p.thinks * 4 + MS * 20_000 * (p.drops + 1) + turns(at_once)
        };
        let decisions = self.swarm.decides.iter().flatten().map(decision);
        let accepts = self.stations.iter().map(|s| turns(s.backlog));
        decisions.chain(accepts).max().unwrap_or_default()
    }
}

impl End {
    /// The connection was accepted before its handshake.
    pub fn adopt_pending(&mut self, cx: &Cx, id: SlotId) {
        (self.id, self.phase) = (Some(id), Phase::Connecting);
        self.note(cx, || "accepted while pending".into());
    }

    /// Whether it was accepted before its handshake, which is still incomplete.
    pub(super) fn is_pending(&self) -> bool {
        self.phase == Phase::Connecting && self.connects.is_none()
    }

    /// The handshake failed of a connection that was accepted before it: another may come.
    pub(super) fn forget(&mut self, cx: &mut Cx, id: SlotId) {
        lock(cx.network).handshakes[self.station].forgotten += 1;
        cx.shard.close(cx.now, id);
        (self.id, self.phase, self.told) = (None, Phase::Idle, None);
        // The opener may hold it for open, and reset what comes.
        self.may_fail = true;
    }
}

impl World {
    /// Decides about what is pending at a station.
    pub(super) fn decide(&mut self, i: usize) -> Result<(), Violation> {
        let now = self.now;
        let side = &mut self.sides[i];
        let (Some(listener), Some(decider)) = (side.listener, &mut side.decider) else {
            return Ok(());
        };
        while let Ok(Poll::Ready(pending)) = side.shard.tcp_pending(listener) {
            decider.hold(now, pending);
        }
        while let Some(pending) = self.sides[i].decider.as_mut().and_then(|d| d.next_due(now)) {
            self.decide_about(i, pending)?;
        }
        Ok(())
    }

    fn decide_about(&mut self, i: usize, pending: Pending) -> Result<(), Violation> {
        let (now, v6) = (self.now, self.scenario.v6);
        let expected = self.expected(i, pending.remote);
        let began_at = expected.and_then(|e| self.ends[e - 1].began_at);
        let side = &mut self.sides[i];
        let Some(decider) = &mut side.decider else { return Ok(()) };
        // A known peer's repeated SYN may belong to an open connection, which a refusal could end.
        let is_known = self.ends.iter().any(|e| e.connects.is_some_and(|c| c.0 == pending.remote));
        let decision = match expected {
            None if is_known => Decision::Drop,
            _ => decider.decide(began_at.map(|at| now.since(at)), v6),
        };
        let decided = side.shard.tcp_decide(now, pending.id, decision);
        if decided.is_ok() {
            lock(&self.network).handshakes[i].decide();
        }
        match (decided, expected) {
            (Ok(Some(id)), Some(e)) => {
                let other = self.sent(e);
                let side = &mut self.sides[i];
                let set = side.set.as_ref();
                let cx = Cx { shard: &mut side.shard, now, network: &self.network, set, other };
                self.ends[e].adopt_pending(&cx, id);
                self.drive(e)?;
            }
            (Ok(None), Some(e)) if decision != Decision::Drop => {
                (self.ends[e].may_fail, self.ends[e ^ 1].may_fail) = (true, true);
                self.ends[e ^ 1].is_refused = true;
            }
            (Ok(_), _) | (Err(SocketError::ConnectionAborted), _) => {}
            (Err(SocketError::NoBuffer | SocketError::NetworkUnreachable), _)
            | (Err(SocketError::AddressInUse | SocketError::AddressNotAvailable), _) => {
                if let Some(decider) = &mut self.sides[i].decider {
                    decider.held.push((now + AGAIN, pending));
                }
            }
            (Err(e), _) => return Err(Violation::Call("tcp_decide", e)),
        }
        Ok(())
    }
}
