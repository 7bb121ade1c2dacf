//! The swarm: a bad network, and on top of it a random subset of hostile and short-handed features.
//!
//! A scenario of the swarm begins as that of [`Scenario::new`], with less to carry. Each feature draws
//! from a number of its own, so that leaving one out leaves the others as they were.

use fulmar_stack::base::Duration;
use fulmar_stack::shard::FastOpenOptions;

use super::attack::{Attack, AttackKind};
use super::case::{Case, Feature, Features};
use super::deciding::DecidePlan;
use super::middlebox::Middlebox;
use super::options::SocketPlan;
use super::scenario::{Draw, EndPlan, FlowKind, FlowPlan, Leave, Scenario, Trouble};

const MS: Duration = Duration::from_millis(1);
/// Long enough that chance, a pause and an attack together do not end an honest connection.
const PATIENT_USER_TIMEOUT: Duration = Duration::from_secs(1800);
/// Likewise.
const PATIENT_SYN_RETRIES: u32 = 30;

/// What a scenario has beside its bad network.
#[derive(Clone, Debug, Default)]
pub struct Swarm {
    /// The features.
    pub features: Features,
    /// The MSS option of SYNs that arrive at a station is at most this.
    pub clamp_mss: [Option<u16>; 2],
    /// Middleboxes in front of a station, in order.
    pub middleboxes: [Vec<Middlebox>; 2],
    /// Fast Open of the listeners.
    pub fast_open: [Option<FastOpenOptions>; 2],
    /// Listeners whose programs decide.
    pub decides: [Option<DecidePlan>; 2],
    /// The station that answers for every address.
    pub any_address: Option<usize>,
    /// Frames that a third station injects.
    pub attacks: Vec<Attack>,
    /// When the clock jumps forward, and how far.
    pub jumps: Vec<(Duration, Duration)>,
}

/// The shortest time in which an attempt to connect gives up: six repetitions, or the user time-out.
const LEAST_CONNECT_TIMEOUT: Duration = Duration::from_secs(120);
/// The SYNs of such an attempt, at the least.
const LEAST_TURNS: usize = 6;

impl Swarm {
    /// Whether the program of a station drops SYNs, and the clock jumps over most of the time in which they are
    /// repeated.
    fn drops_a_connect(&self, station: usize) -> bool {
        let drops = self.decides[station].is_some_and(|plan| plan.drops > 0);
        let jumped: Duration = self.jumps.iter().map(|(_, by)| *by).sum();
        drops && jumped > LEAST_CONNECT_TIMEOUT / 2
    }
}

impl Scenario {
    /// Whether SYNs to a station may be dropped until their openers give up: by its program, or because openers that
    /// began at the same instant repeat them at the same instants, and few of one source may be pending.
    pub fn loses_a_connect(&self, station: usize) -> bool {
        let at_once = |plan: DecidePlan| plan.limits.backlog.min(plan.limits.per_source);
        let are_many = |plan| self.flows.len() > LEAST_TURNS * at_once(plan);
        self.swarm.drops_a_connect(station) || self.swarm.decides[station].is_some_and(are_many)
    }

    /// The scenario of a case.
    pub fn of(case: Case) -> Scenario {
        let mut s = Scenario::new(case.seed);
        if case.is_swarm {
            s.case = case;
            s.draw_swarm();
        }
        s
    }

    fn draw_swarm(&mut self) {
        let d = &mut Draw::new(self.seed ^ 0x5a4a_0000);
        let percent = d.pick(&[8, 20, 20, 40]);
        let apart = &mut Draw::new(self.seed ^ 0x0f7e_0000);
        let is_drawn = |f: &Feature| {
            if f.is_drawn_apart() { apart.percent(percent) } else { d.percent(percent) }
        };
        let drawn: Features = Feature::ALL.into_iter().filter(is_drawn).collect();
        if d.percent(60) {
            self.trouble = Trouble::None;
        }
        let most_bytes = d.log(4_000, 400_000);
        self.flows.iter_mut().for_each(|f| limit_bytes(f, most_bytes));
        if !self.trouble.excuses_errors() {
            for s in &mut self.stations {
                s.tcp.user_timeout = PATIENT_USER_TIMEOUT;
                s.tcp.syn_retries = PATIENT_SYN_RETRIES;
            }
        } else {
            // What a station sends to itself may not fail; a slow reader would reach the user time-out.
            let own = self.flows.iter_mut().filter(|f| f.to_self).flat_map(|f| &mut f.ends);
            own.for_each(|e| e.read_pause = Duration::ZERO);
        }
        let kept = drawn.iter().filter(|f| !self.case.without.has(*f));
        self.swarm.features = kept.collect();
        for f in self.swarm.features.iter() {
            let d = &mut Draw::new(self.seed ^ 0x5a4a_0001 << (f as u32));
            self.add(f, d);
        }
        self.flows.iter_mut().for_each(limit_reads);
    }

    fn add(&mut self, f: Feature, d: &mut Draw) {
        match f {
            Feature::SmallPools => self.draw_small_pools(d),
            Feature::SmallSegments => self.draw_small_segments(d),
            Feature::PausedReaders => self.draw_paused_readers(d),
            Feature::ManyFlows => self.draw_many_flows(d),
            Feature::ZeroWindows => self.draw_zero_windows(d),
            Feature::SynFlood => self.attack(d, AttackKind::SynFlood, 3_000),
            Feature::ForgedIcmp => self.attack(d, AttackKind::Icmp, 300),
            Feature::ForgedSegments => self.attack(d, AttackKind::Segments, 600),
            Feature::ForgedNeighbours => self.attack(d, AttackKind::Neighbours, 20),
            Feature::Replays => {
                // A port that is used again would be open to its own past.
                self.flows.iter_mut().for_each(|f| f.again = None);
                // What is replayed must be as it was on a wire.
                (self.csum, self.tso) = (false, None);
                self.attack(d, AttackKind::Replays, 300);
            }
            Feature::Garbage => self.attack(d, AttackKind::Garbage, 1_000),
            Feature::ClockJumps => {
                for _ in 0..=d.below(4) {
                    let at = MS * d.log(1, 20_000) as u32;
                    self.swarm.jumps.push((at, MS * d.log(10, 100_000) as u32));
                }
                self.swarm.jumps.sort_by_key(|j| j.0);
            }
            Feature::Options => self.draw_options(d),
            Feature::FastOpen => self.draw_fast_open(d),
            Feature::EcnManglers => self.draw_ecn_manglers(d),
            Feature::PathOptions => self.draw_path_options(d),
            Feature::Pending => self.draw_pending(d),
            Feature::AnyAddress => self.draw_any_address(d),
            Feature::Files => self.draw_files(d),
        }
    }

    fn draw_small_pools(&mut self, d: &mut Draw) {
        let most = 1 << 20;
        let both = d.percent(50);
        let one = d.below(2) as usize;
        // The smallest holds a few segments of each direction.
        let least = if self.mtu > 4_000 { 512 << 10 } else { 128 << 10 };
        for (i, s) in self.stations.iter_mut().enumerate() {
            if both || i == one {
                s.pool_bytes = d.log(least, most) as usize;
            }
        }
    }

    fn draw_small_segments(&mut self, d: &mut Draw) {
        let (both, one) = (d.percent(50), d.below(2) as usize);
        for i in 0..2 {
            if both || i == one {
                self.swarm.clamp_mss[i] = Some(d.log(1, 300) as u16);
            }
        }
        self.flows.iter_mut().for_each(|f| limit_bytes(f, 20_000));
    }

    fn draw_paused_readers(&mut self, d: &mut Draw) {
        for f in &mut self.flows {
            if f.kind != FlowKind::Plain || d.percent(50) {
                continue;
            }
            let writer = d.below(2) as usize;
            f.ends[1 - writer].read_after = MS * d.log(1_000, 200_000) as u32;
            let w = &mut f.ends[writer];
            w.write_bytes = d.log(1, 400) as usize;
            w.bytes = (w.write_bytes as u64) * d.log(10, 2_000);
            w.write_pause = MS * d.log(1, 100) as u32;
            (w.ragged, w.cork) = (false, false);
            let station = f.station(writer);
            self.stations[station].tcp.nodelay = true;
        }
    }

    fn draw_many_flows(&mut self, d: &mut Draw) {
        let count = d.log(8, 120) as usize;
        let most_bytes = 4_000_000 / (count as u64).pow(2);
        self.flows.iter_mut().for_each(|f| limit_bytes(f, most_bytes));
        let spread = d.log(1, 5_000);
        while self.flows.len() < count {
            let ends = [0; 2].map(|_| plain_end(d.log(1, most_bytes)));
            self.flows.push(FlowPlan {
                opener: d.below(2) as usize,
                to_self: false,
                at: MS * d.below(spread) as u32,
                again: None,
                kind: FlowKind::Plain,
                ends,
            });
        }
        self.stations.iter_mut().for_each(|s| s.backlog = s.backlog.max(16));
    }

    fn draw_zero_windows(&mut self, d: &mut Draw) {
        // What a reader of references leaves unread is storage of the other station for ever.
        self.stations.iter_mut().for_each(|s| s.copies = true);
        for _ in 0..d.log(1, 30) {
            let who = d.below(2) as usize;
            let ends = [0; 2].map(|_| plain_end(d.log(1_000, 4 << 20)));
            self.flows.push(FlowPlan {
                opener: d.below(2) as usize,
                to_self: false,
                at: MS * d.log(1, 3_000) as u32,
                again: None,
                kind: FlowKind::Stuck(who),
                ends,
            });
        }
        // The least window of each connection has its storage beside what others leave unread.
        let least = self.flows.len() * (32 << 10);
        self.stations.iter_mut().for_each(|s| s.pool_bytes = s.pool_bytes.max(least));
    }

    fn attack(&mut self, d: &mut Draw, kind: AttackKind, most_frames: u64) {
        let (both, one) = (d.percent(25), d.below(2) as usize);
        for victim in 0..2 {
            let attack = Attack {
                kind,
                victim,
                from: MS * d.log(1, 5_000) as u32,
                every: Duration::from_micros(d.log(10, 50_000)),
                burst: d.pick(&[1, 1, 4, 32]),
                frames: d.log(1, most_frames) as u32,
            };
            if both || victim == one {
                self.swarm.attacks.push(attack);
            }
        }
    }

    /// Whether frames may arrive that neither station has sent: an attacker's, or the announcement of one that
    /// moves.
    pub fn has_injected(&self) -> bool {
        !self.swarm.attacks.is_empty() || matches!(self.trouble, Trouble::Routes(_))
    }

    /// Whether a third station injects frames of a kind.
    pub fn has_attack(&self, kind: AttackKind) -> bool {
        self.swarm.attacks.iter().any(|a| a.kind == kind)
    }
}

pub(super) fn limit_bytes(f: &mut FlowPlan, most: u64) {
    for e in &mut f.ends {
        e.bytes = e.bytes.min(most);
        // Pauses multiply with the number of writes and reads.
        e.write_bytes = e.write_bytes.max((e.bytes / 1_000) as usize);
    }
    if let FlowKind::Abort(who, after) = &mut f.kind {
        *after = (*after).min(f.ends[*who].bytes);
    }
}

/// Reads that end: a reader that has paused finds everything at once, and one that pauses each time is done, and opens
/// its window, long before its peer gives up.
fn limit_reads(f: &mut FlowPlan) {
    for (i, other) in [(0, 1), (1, 0)] {
        let (bytes, reader) = (f.ends[other].bytes, &mut f.ends[i]);
        if let Some(post) = &mut reader.posts {
            post.most_bytes = post.most_bytes.max((bytes / 50_000) as usize);
        }
        let most = PATIENT_USER_TIMEOUT / 4;
        let pauses = (most.as_nanos() / reader.read_pause.as_nanos().max(1_000_000)) as u64;
        reader.read_bytes = reader.read_bytes.max((bytes / pauses) as usize);
    }
}

pub(super) fn plain_end(bytes: u64) -> EndPlan {
    EndPlan {
        bytes,
        write_bytes: 16 << 10,
        write_pause: Duration::ZERO,
        read_bytes: 64 << 10,
        read_pause: Duration::ZERO,
        read_after: Duration::ZERO,
        ragged: false,
        leave: Leave::HalfClose,
        cork: false,
        posts: None,
        options: SocketPlan::default(),
    }
}
