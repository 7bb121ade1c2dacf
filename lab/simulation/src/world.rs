//! The two stations, the wire between them, and the clock.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::task::Poll;

use fulmar::internals::drivers::link::{LinkConfig, sim_pair_each_way};
use fulmar::internals::runtime::{PollSetCore, WatchedShard};
use fulmar_stack::base::{Duration, Instant, Secrets, SlotId};
use fulmar_stack::ip::IfAddr;
use fulmar_stack::mbuf::PoolConfig;
use fulmar_stack::route::Prefix;
use fulmar_stack::shard::{ListenOptions, Shard, StackConfig};
use fulmar_stack::socket::Ready;

use super::app::{Cx, End, Quirk, SentStream};
use super::attack::{AttackKind, Attacker};
use super::deciding::Decider;
use super::gate::{Gate, Log, NetworkState, SharedNetwork, lock};
use super::hostile::attackers;
use super::moves::StationAddress;
use super::oracle::{self, Report, Violation};
use super::scenario::{FlowKind, Scenario};
use super::script;
use super::side_traffic::SideTraffic;
use super::waiting::{self, Attention};

pub(super) const SERVER_PORT: u16 = 7_000;
const OPENER_PORT: u16 = 20_000;
const OTHER_PORT: u16 = 30_000;
const DATAGRAM_PORT: u16 = 5_000;
/// Virtual time after which an honest scenario must be through: many times what the slowest rate
/// and the longest pauses make.
const LONGEST: Duration = Duration::from_secs(6 * 3600);
/// Steps after which a scenario is taken for one that never ends.
const MOST_STEPS: u64 = 4_000_000;
/// Steps without frame, byte or passing time that are taken for a livelock.
const MOST_IDLE_STEPS: u64 = 3_000;
/// Rounds of the applications of one station in one instant.
const MOST_ROUNDS: usize = 10_000;
/// The listener's name in a poll set.
const LISTENER: usize = usize::MAX;
/// What the clock of the simulation says at first: not zero, as on no machine.
pub(super) const START: Instant = Instant::from_millis(100_000);

pub(super) struct Side {
    pub(super) shard: WatchedShard,
    pub(super) listener: Option<SlotId>,
    pub(super) set: Option<Arc<PollSetCore>>,
    traffic: SideTraffic,
    accepts_at: Instant,
    /// The program behind the listener, if it decides.
    pub(super) decider: Option<Decider>,
    /// Connections that were reset for their memory.
    pub(super) reclaimed: [u64; 3],
}

/// See the module's header.
pub struct World {
    pub(super) scenario: Scenario,
    pub(super) network: SharedNetwork,
    pub(super) sides: [Side; 2],
    /// Ends of flow `f`: `2 f` (the opener's) and `2 f + 1`.
    pub(super) ends: Vec<End>,
    /// Flows of which an end is not done, in order.
    pub(super) open: Vec<usize>,
    /// Bytes that the ends of the other flows wrote and read.
    closed_bytes: u64,
    /// When the first end of a flow was done.
    half_done: Vec<Option<Instant>>,
    pub(super) script: Vec<(Instant, script::Change)>,
    pub(super) attackers: Vec<Attacker>,
    /// Within what each flow must be through; `None`: no bound, or it was.
    pub(super) bounds: Vec<Option<Duration>>,
    pub(super) slowest_permille: u64,
    pub(super) now: Instant,
    pub(super) steps: u64,
    /// Steps that moved neither frame nor byte.
    pub(super) idle_in_all: u64,
    idle_steps: u64,
    seen: u64,
}

pub(super) fn address(v6: bool, station: usize) -> IpAddr {
    let n = station as u8 + 1;
    if v6 {
        IpAddr::V6(Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, u16::from(n)))
    } else {
        IpAddr::V4(Ipv4Addr::new(10, 0, 0, n))
    }
}

pub(super) fn own_address(v6: bool, station: usize) -> IfAddr {
    IfAddr { addr: address(v6, station), prefix_len: if v6 { 64 } else { 24 } }
}

pub(super) fn link_prefix(v6: bool) -> Prefix {
    let len = if v6 { 64 } else { 24 };
    Prefix::new(address(v6, 0), len).expect("invariant: a short prefix")
}

pub(super) fn host_prefix(v6: bool, station: usize) -> Prefix {
    let len = if v6 { 128 } else { 32 };
    Prefix::new(address(v6, station), len).expect("invariant: a whole address")
}

impl World {
    /// Builds everything; nothing has happened yet. Keeps the last `lines` events as lines.
    pub fn new(scenario: Scenario, lines: usize) -> World {
        let link = LinkConfig {
            mtu: scenario.mtu,
            tso: scenario.tso,
            csum: scenario.csum,
            ..LinkConfig::default()
        };
        let network = Arc::new(Mutex::new(NetworkState {
            log: Log::new(lines),
            dead: [false; 2],
            mute: [false; 2],
            gone: [false; 2],
            frames: 0,
            swallowed: 0,
            attention: [Attention::default(); 2],
            station_addresses: link.ether.map(StationAddress::new),
            injected: Default::default(),
            handshakes: Default::default(),
            idents: Default::default(),
            captured: scenario.has_attack(AttackKind::Replays).then(Default::default),
        }));
        let paths = [&scenario.paths[0], &scenario.paths[1]];
        let (a, b) = sim_pair_each_way(scenario.seed, paths, &link);
        let gate = |inner, i: usize| {
            Gate::new(inner, i, &network, &scenario, scenario.seed ^ (0xface << i))
        };
        let (a, b) = (gate(a, 0), gate(b, 1));
        let sides = [side(&scenario, 0, a), side(&scenario, 1, b)];
        let ends = ends(&scenario);
        World {
            open: (0..scenario.flows.len()).collect(),
            closed_bytes: 0,
            half_done: vec![None; scenario.flows.len()],
            bounds: (0..scenario.flows.len()).map(|f| scenario.service_bound(f)).collect(),
            slowest_permille: 0,
            script: script::plan(&scenario),
            attackers: attackers(&scenario),
            ends,
            scenario,
            network,
            sides,
            now: START,
            steps: 0,
            idle_in_all: 0,
            idle_steps: 0,
            seen: 0,
        }
    }

    /// What breaks stays broken, whatever the scenario says: for tests of the oracle.
    #[cfg(test)]
    pub fn never_mend(&mut self) {
        self.script.truncate(1);
    }

    /// No station accepts, whatever the scenario says.
    #[cfg(test)]
    pub fn never_accept(&mut self) {
        self.sides.iter_mut().for_each(|s| s.accepts_at = START + LONGEST);
    }

    /// What the stacks have counted.
    #[cfg(test)]
    pub fn counters(&self) -> [fulmar_stack::base::Counters; 2] {
        self.sides.each_ref().map(|s| s.shard.counters().clone())
    }

    /// The digest over everything, and the lines that were kept.
    pub fn take_log(&self) -> (u64, Vec<String>) {
        lock(&self.network).log.take()
    }

    /// Plays to the end.
    pub fn play(&mut self) -> Result<Report, Violation> {
        self.open_listeners()?;
        while !self.is_done() {
            self.advance()?;
            self.run_script();
            self.inject();
            for i in 0..2 {
                self.turn(i)?;
            }
            self.watch_flows()?;
            self.watch_handshakes();
            self.watch_service()?;
            self.watch_budget()?;
            self.forget_closed();
        }
        self.check_listeners()?;
        self.attackers.iter_mut().for_each(Attacker::stop);
        self.close_rest();
        self.settle()?;
        self.report()
    }

    pub(super) fn open_listeners(&mut self) -> Result<(), Violation> {
        for i in 0..2 {
            let at = SocketAddr::new(self.scenario.listens_at(i), SERVER_PORT);
            let options = ListenOptions {
                backlog: self.scenario.stations[i].backlog,
                fast_open: self.scenario.swarm.fast_open[i],
                conditional_accept: self.scenario.swarm.decides[i].map(|plan| plan.limits),
                ..Default::default()
            };
            let side = &mut self.sides[i];
            let failed = |e| Violation::Call("tcp_listen", e);
            let id = side.shard.tcp_listen(at, options).map_err(failed)?;
            side.listener = Some(id);
            if let Some(set) = &side.set {
                side.shard.join_set(id, set, LISTENER, Ready::READABLE).map_err(failed)?;
            }
        }
        Ok(())
    }

    fn is_done(&self) -> bool {
        self.open.iter().all(|f| self.pair_is_done(*f))
    }

    /// Ends that are done stay so.
    fn forget_closed(&mut self) {
        let ends = &self.ends;
        self.open.retain(|f| {
            let pair = &ends[2 * f..][..2];
            let is_open = pair.iter().any(|e| !e.is_done());
            if !is_open {
                self.closed_bytes += pair.iter().map(|e| e.written + e.read).sum::<u64>();
            }
            is_open
        });
    }

    /// The ends of open flows, in order.
    fn open_ends(&self) -> impl Iterator<Item = &End> {
        self.open.iter().flat_map(|f| &self.ends[2 * f..][..2])
    }

    pub(super) fn pair_is_done(&self, flow: usize) -> bool {
        let pair = &self.ends[2 * flow..][..2];
        let excused = pair[0].may_fail && pair[0].is_done() && pair[1].is_unconnected();
        // It does not begin while the far end of the flow before it, of the same addresses, may still be accepted.
        let is_barred = || {
            let before = self.scenario.flows[flow].again;
            before.is_some_and(|b| self.pair_is_done(b) && !self.ends[2 * b + 1].is_done())
        };
        excused || pair.iter().all(End::is_done) || (pair[0].is_idle() && is_barred())
    }

    /// Moves the clock to the next event.
    fn advance(&mut self) -> Result<(), Violation> {
        let due = self.sides.iter().filter_map(|s| s.shard.next_deadline()).min();
        let Some(next) = self.next_event(due) else { return Err(Violation::Stall(self.state())) };
        self.steps += 1;
        let frames = lock(&self.network).frames;
        let bytes = self.open_ends().map(|e| e.written + e.read).sum::<u64>() + self.closed_bytes;
        let seen = frames + bytes;
        let moves = next > self.now || seen != self.seen;
        self.idle_in_all += u64::from(seen == self.seen && due.is_some_and(|due| due <= next));
        self.idle_steps = if moves { 0 } else { self.idle_steps + 1 };
        self.seen = seen;
        self.now = self.now.max(next);
        if self.idle_steps > MOST_IDLE_STEPS || self.steps > MOST_STEPS {
            return Err(Violation::Livelock(self.state()));
        }
        if self.now > START + LONGEST {
            return Err(Violation::TooLong(self.state()));
        }
        self.watch_polls(frames)
    }

    /// The next event, where the shards are due at `due`.
    fn next_event(&self, due: Option<Instant>) -> Option<Instant> {
        let sides = self.sides.iter().flat_map(|s| {
            let accepts = s.listener.map(|_| s.accepts_at).filter(|at| *at > self.now);
            [s.traffic.deadline(), accepts, s.decider.as_ref().and_then(Decider::deadline)]
        });
        let ends = self.open_ends().map(End::deadline);
        let limits = self.open.iter().map(|f| self.give_up_at(*f));
        let script = self.script.first().map(|s| s.0);
        let attacks = self.attackers.iter().map(Attacker::deadline);
        sides.chain(ends).chain(limits).chain(attacks).chain([script, due]).flatten().min()
    }

    /// Where everything stands, in words.
    pub(super) fn state(&self) -> String {
        let pending = self.ends.iter().filter(|e| !e.is_done());
        let told: Vec<String> = pending.map(End::describe).collect();
        let deadlines =
            self.sides.each_ref().map(|s| s.shard.next_deadline().map(Instant::as_nanos));
        format!("at {}: {}; deadlines {deadlines:?}", oracle::seconds(self.now), told.join("; "))
    }

    /// What the stacks counted, at the end of a trace.
    pub fn note_counters(&mut self) {
        for side in &mut self.sides {
            let stat = side.shard.stat();
            let mut network = lock(&self.network);
            network.log.line(self.now, || oracle::counters(&stat));
            stat.sockets.iter().for_each(|s| network.log.line(self.now, || oracle::socket(s)));
        }
    }

    /// A station's turn: the stack, then its applications until none comes further.
    fn turn(&mut self, i: usize) -> Result<(), Violation> {
        let now = self.now;
        let budget = self.scenario.stations[i].budget;
        let side = &mut self.sides[i];
        if side.shard.next_deadline().is_some_and(|at| at <= now) {
            if self.scenario.stations[i].as_reader {
                side.shard.step_for_reader(now);
            } else {
                side.shard.step(now, budget);
            }
        }
        let side = &mut self.sides[i];
        side.traffic.drive(&mut side.shard, now)?;
        self.accept(i)?;
        let mut first = true;
        for _ in 0..MOST_ROUNDS {
            // Buffers that are over are in their tickets before their ends look.
            self.sides[i].shard.dispatch();
            let named = self.named(i);
            let mut moved = false;
            for k in 0..2 * self.open.len() {
                let e = 2 * self.open[k / 2] + k % 2;
                let end = &self.ends[e];
                if end.station != i {
                    continue;
                }
                let asked = named.as_ref().map_or(first || moved, |ends| ends.contains(&e));
                if asked || end.deadline().is_some_and(|at| at <= now) {
                    // What the step, a datagram or another end's write without a buffer gave up.
                    self.watch_reclaim(i);
                    moved |= self.drive(e)?;
                }
            }
            first = moved;
            drop(self.sides[i].shard.take_wakes());
            if !moved {
                self.watch_reclaim(i);
                return self.wait(i);
            }
        }
        Err(Violation::Livelock(self.state()))
    }

    /// A station that has nothing to do waits for its device.
    fn wait(&mut self, i: usize) -> Result<(), Violation> {
        let Some(plan) = self.scenario.stations[i].waits else { return Ok(()) };
        let attention = lock(&self.network).attention[i];
        if attention.longest > plan.config.max_hold {
            return Err(Violation::Late { station: i, by: attention.longest });
        }
        let shard = &mut self.sides[i].shard;
        let has_work = shard.next_deadline().is_some_and(|at| at <= self.now);
        if !has_work && !attention.is_holding(self.now) {
            if attention.has_held() {
                shard.moderation().slept();
            }
            let until = waiting::wait(shard, self.now);
            lock(&self.network).attention[i].hold(until);
        }
        Ok(())
    }

    /// The ends that the station's poll set names; `None` if its applications go by steps.
    fn named(&mut self, i: usize) -> Option<Vec<usize>> {
        let side = &mut self.sides[i];
        let mut named = Vec::new();
        let set = side.set.as_ref()?;
        side.shard.collect_set(set, usize::MAX, |token, _| named.push(token));
        Some(named)
    }

    /// What the other end of an end has sent.
    pub(super) fn sent(&self, e: usize) -> SentStream {
        self.ends[e ^ 1].sent()
    }

    /// An end, and the context of its turn.
    fn end_and_context(&mut self, e: usize) -> (&mut End, Cx<'_>) {
        let other = self.sent(e);
        let World { ends, sides, network, now, .. } = self;
        let end = &mut ends[e];
        let side = &mut sides[end.station];
        let set = side.set.as_ref();
        (end, Cx { shard: &mut side.shard, now: *now, network, set, other })
    }

    pub(super) fn drive(&mut self, e: usize) -> Result<bool, Violation> {
        let was_pending = self.ends[e].is_pending();
        let (end, mut cx) = self.end_and_context(e);
        let moved = end.drive(&mut cx)?;
        let is_complete =
            was_pending && !self.ends[e].is_pending() && !self.ends[e].is_unconnected();
        if let Some((peer, ..)) = self.ends[e ^ 1].connects.filter(|_| is_complete) {
            self.check_accepted(self.ends[e].station, peer)?;
        }
        if self.ends[e].has_failed_early() {
            self.ends[e ^ 1].may_fail = true;
        }
        Ok(moved)
    }

    /// The passive end at station `i` to which a peer has connected.
    pub(super) fn expected(&self, i: usize, peer: SocketAddr) -> Option<usize> {
        (0..self.scenario.flows.len()).map(|f| 2 * f + 1).find(|e| {
            let opener = &self.ends[e - 1];
            // Before it has its port again a connection from there repeats an earlier one.
            let begun = opener.began_at.is_some() && !opener.is_idle();
            let is_of_peer = opener.connects.is_some_and(|c| c.0 == peer);
            self.ends[*e].station == i && self.ends[*e].is_unconnected() && begun && is_of_peer
        })
    }

    fn accept(&mut self, i: usize) -> Result<(), Violation> {
        let now = self.now;
        if self.sides[i].decider.is_some() {
            let accepts = now >= self.sides[i].accepts_at;
            return if accepts { self.decide(i) } else { Ok(()) };
        }
        let side = &mut self.sides[i];
        let Some(listener) = side.listener.filter(|_| now >= side.accepts_at) else {
            return Ok(());
        };
        // A device that is gone ends all waiting; each of its connections gets the error one by one.
        while let Ok(Poll::Ready((id, peer))) = self.sides[i].shard.tcp_accept(listener) {
            self.check_accepted(i, peer)?;
            let Some(e) = self.expected(i, peer) else {
                if self.may_repeat(i, peer) {
                    self.refuse_repeated(i, id, peer);
                    continue;
                }
                return Err(Violation::ForgedDatagram(format!("a connection from {peer}")));
            };
            // What the step gave up before it was accepted.
            self.watch_reclaim(i);
            let (end, mut cx) = self.end_and_context(e);
            end.adopt(&mut cx, id)?;
            self.drive(e)?;
        }
        Ok(())
    }

    /// Lets go of ends that nothing will ever reach, where the scenario has a cause for it.
    fn watch_flows(&mut self) -> Result<(), Violation> {
        for n in 0..self.open.len() {
            let f = self.open[n];
            let pair = [2 * f, 2 * f + 1];
            let any_done = pair.iter().any(|e| self.ends[*e].is_done());
            if any_done && self.half_done[f].is_none() {
                self.half_done[f] = Some(self.now);
            }
            let before = self.scenario.flows[f].again;
            if before.is_some_and(|b| self.ends[2 * b].is_done() && self.ends[2 * b + 1].is_done())
            {
                self.ends[2 * f].start(self.now);
            }
            if self.give_up_at(f).is_some_and(|at| at <= self.now) {
                pair.into_iter().try_for_each(|e| self.give_up(e))?;
            }
        }
        self.release_stuck();
        Ok(())
    }

    /// The longest time after which a stack must have given up on a silent peer: the user time-out
    /// on either side (a window that is closed may be probed for as long as the other still talks),
    /// and the longest time between two looks at the clock.
    fn patience(&self) -> Duration {
        let longest = self.scenario.stations.iter().map(|s| s.tcp.user_timeout + s.tcp.max_rto);
        longest.sum::<Duration>() + Duration::from_secs(20)
    }

    /// When the ends of a flow stop waiting for each other; `None` if they do not or need not.
    fn give_up_at(&self, f: usize) -> Option<Instant> {
        let pair = [&self.ends[2 * f], &self.ends[2 * f + 1]];
        let open = pair.iter().any(|e| !e.is_done() && !e.is_unconnected());
        if !pair[0].may_fail || !open {
            return None;
        }
        let dead = self.scenario.trouble.death().map(|at| START + at).filter(|at| *at <= self.now);
        // The other end may have given up before it was ever accepted.
        let alone = pair[1].is_unconnected().then_some(START);
        let from = [self.half_done[f], dead, alone].into_iter().flatten().min()?;
        let asked = pair.iter().filter(|e| !e.is_done()).map(|e| e.asked_at).max()?;
        Some(from.max(asked) + self.patience())
    }

    fn give_up(&mut self, e: usize) -> Result<(), Violation> {
        if self.ends[e].is_done() || self.ends[e].is_unconnected() {
            return Ok(());
        }
        let died = self.scenario.trouble.death().is_some_and(|at| START + at <= self.now);
        let dead = died && !self.scenario.flows[e / 2].to_self;
        let side = &mut self.sides[self.ends[e].station];
        if dead && self.ends[e].has_pending(&mut side.shard) {
            return Err(Violation::NoError { end: self.ends[e].name });
        }
        self.abort(e);
        Ok(())
    }

    pub(super) fn abort(&mut self, e: usize) {
        let (end, mut cx) = self.end_and_context(e);
        end.abort(&mut cx);
    }

    fn close_rest(&mut self) {
        let now = self.now;
        for side in &mut self.sides {
            side.traffic.close(&mut side.shard, now);
            side.decider = None;
            if let Some(id) = side.listener.take() {
                side.shard.close(now, id);
            }
        }
    }

    /// Lets time run until both stacks are empty.
    fn settle(&mut self) -> Result<(), Violation> {
        let linger = Duration::from_secs(120);
        let end = self.now + self.patience() + linger;
        loop {
            let left = self.sides.each_mut().map(|s| oracle::leftover(&s.shard.stat()));
            let Some((station, what)) =
                left.into_iter().enumerate().find_map(|(i, l)| l.map(|what| (i, what)))
            else {
                return Ok(());
            };
            let next = self.sides.iter().filter_map(|s| s.shard.next_deadline()).min();
            if next.is_none_or(|at| at > end) {
                return Err(Violation::Leak { station, what });
            }
            self.advance()?;
            self.run_script();
            for side in &mut self.sides {
                if side.shard.next_deadline().is_some_and(|at| at <= self.now) {
                    side.shard.step(self.now, 64);
                }
                drop(side.shard.take_wakes());
            }
        }
    }

    fn report(&mut self) -> Result<Report, Violation> {
        let mut report = Report {
            seed: self.scenario.seed,
            digest: 0,
            virtual_ns: self.now.since(START).as_nanos() as u64,
            steps: self.steps,
            bytes: self.ends.iter().map(|e| e.read).sum(),
            connections: self.scenario.flows.len() as u64,
            slowest_permille: self.slowest_permille,
            idle_steps: self.idle_in_all,
            errors: self.ends.iter().filter(|e| e.error.is_some()).count() as u64,
            ..Report::default()
        };
        let stats = self.sides.each_mut().map(|side| side.shard.stat());
        for (i, stat) in stats.iter().enumerate() {
            let mixed = lock(&self.network).idents[1 - i].met();
            oracle::check_counters(&self.scenario, i, &stats, mixed)?;
            oracle::add_counters(&mut report, stat);
        }
        let mut network = lock(&self.network);
        network.log.mix(report.virtual_ns);
        network.log.mix(report.bytes);
        report.digest = network.log.digest();
        Ok(report)
    }
}

fn side(s: &Scenario, i: usize, gate: Gate) -> Side {
    let how = &s.stations[i];
    let config = StackConfig {
        addresses: vec![own_address(s.v6, i)],
        pool: PoolConfig { huge_pages: false, ..PoolConfig::with_budget(how.pool_bytes) },
        tcp: how.tcp,
        secrets: Some(Secrets::for_simulation(s.seed ^ (0x5eed << (8 * i)))),
        // Without a draw of its own, so that a seed stays the scenario that it was.
        gro: (s.seed >> i) & 1 == 0,
        any_ip: s.swarm.any_address == Some(i),
        moderation: how.waits.map(|w| w.config).unwrap_or_default(),
        ..StackConfig::default()
    };
    let shard =
        Shard::new(config, Box::new(gate), START).expect("invariant: a sound configuration");
    let mut shard = WatchedShard::new(shard);
    let at = |i: usize| SocketAddr::new(address(s.v6, i), DATAGRAM_PORT);
    let traffic = SideTraffic::new(i, &mut shard, (at(i), at(1 - i)), s)
        .expect("invariant: the first sockets of a stack");
    let set = how.by_edges.then(|| Arc::new(PollSetCore::new().expect("an eventfd")));
    Side {
        shard,
        listener: None,
        set,
        traffic,
        accepts_at: START + how.accepts_after,
        decider: s.swarm.decides[i].map(|plan| Decider::new(plan, s.seed ^ (0xdec1 << i))),
        reclaimed: [0; 3],
    }
}

fn ends(s: &Scenario) -> Vec<End> {
    let mut ends = Vec::new();
    for (f, plan) in s.flows.iter().enumerate() {
        for (n, end) in plan.ends.iter().enumerate() {
            let station = plan.station(n);
            let preempted = s.stations[station].preempted;
            let mut e = End::new((f, n), station, end, quirk(plan.kind, n), preempted, s.seed);
            e.may_fail = s.may_fail(f);
            e.may_be_absent = s.may_be_absent();
            e.lingers = plan.ends[1 - n].read_after > Duration::from_secs(60);
            e.connects = connects(s, f, n);
            e.both_connect = plan.kind == FlowKind::SimultaneousOpen;
            ends.push(e);
        }
    }
    ends
}

fn quirk(kind: FlowKind, n: usize) -> Quirk {
    match kind {
        FlowKind::Abort(who, after) if who == n => Quirk::Abort(after),
        FlowKind::UnreadClose(who) if who == n => Quirk::UnreadClose,
        FlowKind::EarlyClose(who) if who == n => Quirk::EarlyClose,
        FlowKind::Deaf(who) if who == n => Quirk::Deaf,
        FlowKind::Stuck(who) if who == n => Quirk::Stuck,
        _ => Quirk::None,
    }
}

/// From where, to where and when an end connects; `None` for one that is accepted.
fn connects(s: &Scenario, f: usize, n: usize) -> Option<(SocketAddr, SocketAddr, Instant)> {
    let plan = &s.flows[f];
    let both = plan.kind == FlowKind::SimultaneousOpen;
    if n == 1 && !both {
        return None;
    }
    let (opener, other) = (OPENER_PORT + s.port_of(f) as u16, OTHER_PORT + f as u16);
    let (from, to) = match (n, both) {
        (0, false) => (opener, SERVER_PORT),
        (0, true) => (opener, other),
        _ => (other, opener),
    };
    let at = |end, port| SocketAddr::new(s.address_of(f, end), port);
    let start = if plan.again.is_some() { Instant::FAR_FUTURE } else { START + plan.at };
    Some((at(n, from), at(1 - n, to), start))
}
