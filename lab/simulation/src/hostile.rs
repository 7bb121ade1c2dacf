//! The world's part in attacks and in the promise of service: what an attacker sees, and which honest
//! connection is late.

use std::net::SocketAddr;

use fulmar::internals::drivers::link::{Impairments, LinkConfig};
use fulmar_stack::base::{Counter, Duration, EtherAddr, SlotId};
use fulmar_stack::tcp::State;

use super::app::End;
use super::attack::{AttackKind, Attacker, Flow, Numbers, Target, View};
use super::case::Feature;
use super::gate::lock;
use super::oracle::Violation;
use super::scenario::{Scenario, Trouble};
use super::world::{SERVER_PORT, START, World, address};

/// Between two looks at the storage in use, steps.
const BUDGET_STEPS: u64 = 64;

/// The attackers of a scenario.
pub fn attackers(s: &Scenario) -> Vec<Attacker> {
    s.swarm.attacks.iter().map(|a| Attacker::new(*a, START, s.seed)).collect()
}

impl World {
    /// The third station's turn.
    pub(super) fn inject(&mut self) {
        for i in 0..self.attackers.len() {
            if self.attackers[i].deadline().is_none_or(|at| at > self.now) {
                continue;
            }
            let victim = self.attackers[i].victim();
            let flows = self.flows_of(victim);
            let network = &mut *lock(&self.network);
            let none = Default::default();
            let view = View {
                victim: self.target(victim),
                peer: self.target(1 - victim),
                flows: &flows,
                captured: network.captured.as_ref().map_or(&none, |c| &c[1 - victim]),
            };
            let frames = self.attackers[i].burst(self.now, &view);
            network.injected[victim].extend(frames);
        }
    }

    fn target(&self, station: usize) -> Target {
        let ether: [EtherAddr; 2] = LinkConfig::default().ether;
        Target { ip: address(self.scenario.v6, station), ether: ether[station], port: SERVER_PORT }
    }

    /// Connections that have an end at a station.
    fn flows_of(&mut self, victim: usize) -> Vec<Flow> {
        let mut flows = Vec::new();
        for k in 0..2 * self.open.len() {
            let e = 2 * self.open[k / 2] + k % 2;
            let is_of_victim = self.ends[e].station == victim;
            if !is_of_victim || self.ends[e ^ 1].station == victim || self.ends[e].is_done() {
                continue;
            }
            let opener = self.ends[e & !1].connects.map(|(from, to, _)| (from, to));
            let Some((from, to)) = opener else { continue };
            let (local, remote) = if e & 1 == 0 { (from, to) } else { (to, from) };
            let numbers = self.numbers(e, local, remote);
            flows.push(Flow { local, remote, numbers });
        }
        flows
    }

    /// The numbers of an end whose connection is synchronised on both sides.
    fn numbers(&mut self, e: usize, local: SocketAddr, remote: SocketAddr) -> Option<Numbers> {
        let mut next = |e: usize| {
            let side = &mut self.sides[self.ends[e].station];
            let tcb = &side.shard.tcp_entry(self.ends[e].id?).ok()?.tcb;
            let open = [State::Established, State::FinWait1, State::FinWait2, State::CloseWait];
            let info = tcb.info();
            open.contains(&info.state).then(|| (tcb.recv_seq(tcb.recv_queue_ref().next()), info))
        };
        let ((rcv_nxt, info), (peer_nxt, _)) = (next(e)?, next(e ^ 1)?);
        debug_assert!(local != remote);
        let rcv_wnd = info.rcv_wnd_bytes as u32;
        Some(Numbers { rcv_nxt, rcv_wnd, peer_nxt, timestamps: info.timestamps })
    }

    /// Honest connections are through in time.
    pub(super) fn watch_service(&mut self) -> Result<(), Violation> {
        for n in 0..self.open.len() {
            let flow = self.open[n];
            let Some(within) = self.bounds[flow] else { continue };
            let Some(since) = self.ends[2 * flow].began_at else { continue };
            if self.ends[2 * flow].may_fail {
                continue;
            }
            let is_open = self.ends[2 * flow..][..2].iter().any(|e| !e.is_done());
            let took = self.now.since(since);
            if !is_open {
                let permille = took.as_nanos() * 1_000 / within.as_nanos().max(1);
                self.slowest_permille = self.slowest_permille.max(permille as u64);
                self.bounds[flow] = None;
            } else if took > within {
                return Err(Violation::Unserved { flow, within });
            }
        }
        Ok(())
    }

    /// A listener that answers with SYN cookies keeps nothing of a connection. Where the ACK that carries the
    /// cookie back is lost or finds the accept queue full, and whatever else the peer sends until the cookie is too
    /// old, the peer waits or is reset, without a fault of either end. So with an embryo that was not reached until it
    /// was given up, in a SYN queue more than half full 7 s after its SYN, as on Linux: a forged neighbour, a station that
    /// pauses or left, or the full queue of a narrow link can stand in the way for longer.
    pub(super) fn watch_handshakes(&mut self) {
        let s = &self.scenario;
        let queue_secs =
            |w: &Impairments| w.queue_bytes as u64 * 8 / w.rate_bps.unwrap_or(u64::MAX);
        let is_cut_off = (0..2).any(|i| self.is_attacked(i, AttackKind::Neighbours))
            || s.trouble != Trouble::None
            || s.paths.iter().any(|w| queue_secs(w) >= 2);
        let has = |f| s.swarm.features.has(f);
        let is_hard = has(Feature::SmallPools) || has(Feature::ClockJumps);
        let loses = s.may_be_absent() || is_cut_off || is_hard;
        let may_expire = s.case.is_swarm || loses;
        let forgets = self.sides.each_mut().map(|side| {
            let Some(listener) = side.listener.and_then(|id| side.shard.listener(id).ok()) else {
                return false;
            };
            let l = listener.stat();
            // A copy of an ACK with a cookie is valid, too, so that a cookie may be outstanding although the counts are
            // equal.
            let is_cookie_out = l.cookies_sent > l.cookies_valid || l.cookies_failed > 0;
            (l.embryos_expired > 0 && may_expire) || is_cookie_out && (loses || l.acks_dropped > 0)
        });
        let has_counted =
            |counter| self.sides.each_ref().map(|side| side.shard.counters().value(counter) > 0);
        let sends_cookies = has_counted(Counter::TcpSynCookiesSent);
        let opens_early = has_counted(Counter::TcpFastOpensPassive);
        for n in 0..self.open.len() {
            let flow = self.open[n];
            let (opener, passive) = (&self.ends[2 * flow], &self.ends[2 * flow + 1]);
            // After a SYN cookie a late copy of a SYN of Fast Open opens a second connection of these addresses,
            // which is accepted, and resets the first when that comes with its cookie.
            let opens_twice = opener.plan.options.first.is_some()
                && sends_cookies[passive.station]
                && self.has_come_twice(flow);
            // What an attempt that failed has opened is reset by the SYN of the next one, which has another initial
            // sequence number.
            let outlived = opener.has_reconnected && opens_early[passive.station];
            if opens_twice || outlived && !passive.is_unconnected() {
                (self.ends[2 * flow].may_fail, self.ends[2 * flow + 1].may_fail) = (true, true);
            }
            if self.ends[2 * flow].error.is_none() {
                let passive = &self.ends[2 * flow + 1];
                // An unanswered opener does not count as forgotten.
                let is_lost =
                    passive.is_unconnected() && forgets[passive.station] && self.is_answered(flow);
                self.ends[2 * flow].may_fail = passive.may_fail || is_lost;
            }
        }
    }

    /// A shard that lacks memory resets connections that make no progress or are not read. Their ends are
    /// told, or wait if the reset is lost, without a fault of either end. One may not have been accepted yet.
    pub(super) fn watch_reclaim(&mut self, i: usize) {
        let reset = [Counter::TcpOrphansReset, Counter::TcpStalledReset, Counter::TcpUnreadReset];
        let counters = self.sides[i].shard.counters();
        let reclaimed = reset.map(|c| counters.value(c));
        let before = std::mem::replace(&mut self.sides[i].reclaimed, reclaimed);
        if before == reclaimed {
            return;
        }
        // In TIME-WAIT it may have lost bytes that were not read, and so before it was accepted.
        let is_unread = before[2] != reclaimed[2];
        let is_over = |state| state == State::Closed || is_unread && state == State::TimeWait;
        let alive: Vec<_> = self.sides[i]
            .shard
            .stat()
            .sockets
            .into_iter()
            .filter(|s| s.tcp.as_ref().is_some_and(|info| !is_over(info.state)))
            .map(|s| (s.local, s.remote))
            .collect();
        for e in 0..self.ends.len() {
            let begun = self.ends[e & !1].began_at.is_some();
            let Some((from, to, _)) = self.ends[e & !1].connects.filter(|_| begun) else {
                continue;
            };
            let addresses = if e & 1 == 0 { (from, to) } else { (to, from) };
            let is_alive = alive.contains(&(Some(addresses.0), Some(addresses.1)));
            let may_be_waiting = is_unread && e & 1 == 1 && self.is_answered(e / 2);
            let was_there = !self.ends[e].is_unconnected() || may_be_waiting;
            if self.ends[e].station == i && was_there && !is_alive {
                self.ends[e].is_reclaimed |= !self.ends[e].is_done();
                (self.ends[e].may_fail, self.ends[e ^ 1].may_fail) = (true, true);
            }
        }
    }

    /// Whether an end at station `i` has had a connection from `peer` before. Another may come of a SYN that was late,
    /// doubled, forged or replayed, with data (RFC 7413 sections 2.1 and 4.1.3) or with the ACK that TIME-WAIT answers
    /// the SYN,ACK with, where the new initial sequence number is by chance the last one of the first connection: their
    /// clock (RFC 6528 section 3) makes a step each 4 us. So with an ACK that repeats a SYN cookie. That it has come of
    /// such a handshake is what [`World::check_accepted`] has seen.
    pub(super) fn may_repeat(&self, i: usize, peer: SocketAddr) -> bool {
        self.ends.chunks_exact(2).any(|pair| {
            let from = pair[0].connects.map(|c| c.0);
            from == Some(peer) && pair[1].station == i && !pair[1].is_unconnected()
        })
    }

    /// Closes such a connection: by a reset where that is what its peer waits for, since a FIN would end a
    /// stream whose bytes were thrown away.
    pub(super) fn refuse_repeated(&mut self, i: usize, id: SlotId, peer: SocketAddr) {
        let is_of = |pair: &&[End]| pair[0].connects.is_some_and(|c| c.0 == peer);
        let expects_reset = self.ends.chunks_exact(2).find(is_of).is_some_and(|p| p[0].may_fail);
        let shard = &mut self.sides[i].shard;
        if expects_reset && let Ok(entry) = shard.tcp_entry(id) {
            entry.linger = Some(Duration::ZERO);
        }
        shard.close(self.now, id);
    }

    /// Storage in use stays within the budget.
    pub(super) fn watch_budget(&mut self) -> Result<(), Violation> {
        if !self.steps.is_multiple_of(BUDGET_STEPS) {
            return Ok(());
        }
        for (station, side) in self.sides.iter_mut().enumerate() {
            let stats = side.shard.pool().stats();
            let (used, budget) = (stats.used_bytes.iter().sum(), stats.budget_bytes);
            if used > budget {
                return Err(Violation::OverBudget { station, used, budget });
            }
        }
        Ok(())
    }

    /// Checks that the steps without a frame or byte are bounded by the timers of the scenario.
    pub(super) fn watch_polls(&mut self, frames: u64) -> Result<(), Violation> {
        let within: Duration = self.now.since(START);
        let limit = self.scenario.idle_steps(within, frames);
        if self.idle_in_all > limit {
            let (n, state) = (self.idle_in_all, self.state());
            return Err(Violation::Polls(format!(
                "{n} steps without effect, {limit} allowed; {state}"
            )));
        }
        Ok(())
    }

    /// Peers that never read are let go when all others are through.
    pub(super) fn release_stuck(&mut self) {
        let flows = &self.scenario.flows;
        let is_over = |f: &usize| flows[*f].is_stuck() || self.pair_is_done(*f);
        if !self.open.iter().all(is_over) {
            return;
        }
        for e in 0..self.ends.len() {
            if self.scenario.flows[e / 2].is_stuck() && !self.ends[e].is_done() {
                self.abort(e);
            }
        }
    }
}
