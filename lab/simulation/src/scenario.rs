//! The events of a simulation: drawn from one seed, and readable.

use fulmar::internals::drivers::link::Impairments;
use fulmar_stack::base::Duration;
use fulmar_stack::device::Rng;
use fulmar_stack::tcp::CongestionControl;

use super::case::Case;
use super::describe;
use super::options::SocketPlan;
use super::swarm::Swarm;
use super::waiting::WaitPlan;

/// Draws from a seed.
pub(super) struct Draw(Rng);

impl Draw {
    pub fn new(seed: u64) -> Draw {
        // Neighbouring seeds must not have neighbouring draws.
        Draw(Rng::new(Rng::new(seed).number()))
    }

    pub fn below(&mut self, n: u64) -> u64 {
        self.0.below(n)
    }

    pub fn percent(&mut self, p: u64) -> bool {
        self.0.below(100) < p
    }

    pub fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.0.below(of.len() as u64) as usize]
    }

    /// Evenly over the orders of magnitude from `low` (at least 1) to `high`.
    pub fn log(&mut self, low: u64, high: u64) -> u64 {
        let (low, high) = (low.max(1) as f64, high.max(1) as f64);
        let part = self.0.below(1 << 32) as f64 / (1u64 << 32) as f64;
        (low * (high / low).powf(part)) as u64
    }
}

/// A scenario: two stations, a wire, what they do and what befalls them.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// Its case.
    pub case: Case,
    /// Where it comes from.
    pub seed: u64,
    /// IPv6, or else IPv4.
    pub v6: bool,
    /// Largest IP packet, bytes.
    pub mtu: usize,
    /// Largest super-frame, bytes; `None`: none.
    pub tso: Option<usize>,
    /// The devices complete checksums.
    pub csum: bool,
    /// What happens to frames from station 0, and from station 1.
    pub paths: [Impairments; 2],
    /// The two ends.
    pub stations: [Station; 2],
    /// The connections.
    pub flows: Vec<FlowPlan>,
    /// Datagrams from each station to the other, beside the connections.
    pub datagrams: [u32; 2],
    /// Echo requests from each station to the other.
    pub pings: [u32; 2],
    /// What befalls them.
    pub trouble: Trouble,
    /// What the swarm adds.
    pub swarm: Swarm,
}

/// How a station is built.
#[derive(Clone, Debug)]
pub struct Station {
    /// Bytes of its pool.
    pub pool_bytes: usize,
    /// Tunables of TCP.
    pub tcp: fulmar_stack::tcp::Config,
    /// Applications act only when their poll set names their socket, else after every step.
    pub by_edges: bool,
    /// Received frames are copied into its own pool, as from a kernel device; else they are the
    /// sender's mbufs.
    pub copies: bool,
    /// Its device puts payload straight into posted buffers.
    pub places: bool,
    /// Frames that its device takes before it is full for a while; `None`: any number.
    pub takes_pkts: Option<u32>,
    /// Frames per step.
    pub budget: usize,
    /// Its steps run in a reader's call, after which the reader soon reads again.
    pub as_reader: bool,
    /// Connections that wait to be accepted, at most.
    pub backlog: usize,
    /// When it starts to accept.
    pub accepts_after: Duration,
    /// The longest preemption of the thread between the two steps of a write or a read.
    pub preempted: Duration,
    /// The share of the segments to it that are marked as urgent.
    pub urgent_percent: u64,
    /// How it waits for its device; `None`: it sees every frame as it comes.
    pub waits: Option<WaitPlan>,
}

/// How two ends of a connection behave towards each other.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FlowKind {
    /// Both write, half-close, read to the end, close.
    Plain,
    /// Both connect to each other at the same time.
    SimultaneousOpen,
    /// The end with this number (0: the opener) resets the connection once it has written this many bytes.
    Abort(usize, u64),
    /// One end closes with received bytes unread.
    UnreadClose(usize),
    /// One end closes as soon as everything is written, without reading.
    EarlyClose(usize),
    /// One end shuts reading down while the other goes on writing.
    Deaf(usize),
    /// One end never reads, never writes and never closes: its window stays shut.
    Stuck(usize),
}

/// How an end finishes sending.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Leave {
    /// Shuts down writing when everything is written, closes when everything is read.
    HalfClose,
    /// Waits for the other's end of stream, then closes.
    WaitForEof,
}

/// One connection.
#[derive(Clone, Debug)]
pub struct FlowPlan {
    /// Which station connects.
    pub opener: usize,
    /// Whether it connects to its own address, through its own stack.
    pub to_self: bool,
    /// When it connects.
    pub at: Duration,
    /// An earlier flow whose port it uses again once that is over, in its TIME-WAIT.
    pub again: Option<usize>,
    /// How its ends behave.
    pub kind: FlowKind,
    /// The opener's end, and the other.
    pub ends: [EndPlan; 2],
}

/// What one end of a connection does.
#[derive(Clone, Debug)]
pub struct EndPlan {
    /// Bytes to write.
    pub bytes: u64,
    /// Bytes per write at most; drawn anew for each if `ragged`.
    pub write_bytes: usize,
    /// The pause between two writes.
    pub write_pause: Duration,
    /// Bytes per read at most.
    pub read_bytes: usize,
    /// The pause between two reads.
    pub read_pause: Duration,
    /// The pause before the first read.
    pub read_after: Duration,
    /// Sizes of writes and reads vary.
    pub ragged: bool,
    /// How it finishes.
    pub leave: Leave,
    /// Holds partial segments back.
    pub cork: bool,
    /// Receives into posted buffers; `None`: reads.
    pub posts: Option<PostPlan>,
    /// Further options of its socket.
    pub options: SocketPlan,
}

/// How an end posts buffers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PostPlan {
    /// Buffers that are posted at once.
    pub buffers: usize,
    /// The most bytes of one.
    pub most_bytes: usize,
    /// Also reads, between posted buffers.
    pub mixed: bool,
    /// How often it cancels one, or drops its handle, in percent of its turns.
    pub meddles_percent: u64,
}

/// A change of the routes of a station, or of where it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RouteChange {
    /// A route to the other station alone, with an MTU.
    Host(usize),
    /// The route of `Host` is withdrawn.
    NoHost,
    /// The route to the link is withdrawn.
    Cut,
    /// The route of `Cut` is back.
    Mend,
    /// A router reports a smaller path MTU.
    PathMtu(usize),
    /// The station has another Ethernet address, and says so or not.
    Move {
        /// Whether it says so.
        is_announced: bool,
    },
    /// The station's own address is removed.
    Leave,
    /// The address of `Leave` is back.
    Return,
}

/// What befalls the stations.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Trouble {
    /// Nothing beside the wire.
    None,
    /// No frame passes for a while.
    Pause {
        /// From when.
        at: Duration,
        /// How long.
        lasts: Duration,
    },
    /// No frame of these stations passes any more.
    Death {
        /// From when.
        at: Duration,
        /// Which stations' frames.
        of: [bool; 2],
    },
    /// The device of a station is gone.
    Gone {
        /// From when.
        at: Duration,
        /// Which station's.
        station: usize,
    },
    /// A station stops answering questions for its Ethernet address.
    Mute {
        /// From when.
        at: Duration,
        /// How long.
        lasts: Duration,
        /// Which station.
        station: usize,
    },
    /// The routes of stations change: when, whose, how.
    Routes(Vec<(Duration, usize, RouteChange)>),
}

impl Trouble {
    /// Connections may fail of it.
    pub fn excuses_errors(&self) -> bool {
        match self {
            Trouble::None | Trouble::Routes(_) => false,
            Trouble::Pause { lasts, .. } | Trouble::Mute { lasts, .. } => {
                *lasts > Duration::from_secs(30)
            }
            Trouble::Death { .. } | Trouble::Gone { .. } => true,
        }
    }

    /// From when on frames of a station never arrive again.
    pub fn death(&self) -> Option<Duration> {
        match self {
            Trouble::Death { at, .. } | Trouble::Gone { at, .. } => Some(*at),
            _ => None,
        }
    }
}

impl FlowPlan {
    /// The station of the opener's end (0) or of the other.
    pub fn station(&self, end: usize) -> usize {
        if self.to_self { self.opener } else { self.opener ^ end }
    }

    /// Whether the flow itself is a cause for errors.
    pub fn excuses_errors(&self) -> bool {
        !matches!(self.kind, FlowKind::Plain | FlowKind::SimultaneousOpen | FlowKind::Deaf(_))
    }

    /// Whether it goes on for as long as the others do.
    pub fn is_stuck(&self) -> bool {
        matches!(self.kind, FlowKind::Stuck(_))
    }
}

const MS: Duration = Duration::from_millis(1);

impl Scenario {
    /// The scenario of a seed.
    pub fn new(seed: u64) -> Scenario {
        let d = &mut Draw::new(seed);
        let v6 = d.percent(50);
        let mtu = match d.below(10) {
            0 if !v6 => 576,
            0 | 1 => 1280,
            2 | 3 => 9000,
            4 => 1280 + d.below(7720) as usize,
            _ => 1500,
        };
        let csum = d.percent(60);
        let tso = (csum && d.percent(70)).then(|| d.pick(&[65_535, 65_535, 16_384]));
        let paths = draw_paths(d);
        let trouble = draw_trouble(d, mtu);
        let patient = is_patient(&paths, &trouble);
        let mut stations = [draw_station(d, mtu, patient), draw_station(d, mtu, patient)];
        if stations.iter().any(|s| s.backlog < 8) && !trouble.excuses_errors() {
            // With so little room SYNs may lose to each other again and again.
            stations.iter_mut().for_each(|s| s.tcp.syn_retries = PATIENT_SYN_RETRIES);
        }
        let mut s = Scenario {
            case: Case::network(seed),
            seed,
            v6,
            mtu,
            tso,
            csum,
            paths,
            stations,
            flows: Vec::new(),
            datagrams: [0; 2],
            pings: [0; 2],
            trouble,
            swarm: Swarm::default(),
        };
        s.draw_traffic(d);
        s.draw_posts();
        s.draw_waits();
        s.draw_moves();
        s.draw_urgency();
        s.draw_congestion();
        s.draw_black_hole();
        s
    }

    fn draw_traffic(&mut self, d: &mut Draw) {
        let most = self.most_bytes(d);
        let count = d.pick(&[1, 1, 2, 2, 3, 4, 6, 8]);
        self.flows = (0..count).map(|_| draw_flow(d, most, count)).collect();
        let no_distance = self.paths.iter().any(|w| w.delay.is_zero());
        for i in 0..self.flows.len() {
            let f = &mut self.flows[i];
            if f.kind == FlowKind::SimultaneousOpen && (no_distance || f.to_self) {
                // Nothing is simultaneous without a distance: the first SYN finds no listener.
                f.kind = FlowKind::Plain;
            }
            if i > 0 && d.percent(10) && !self.may_fail(i - 1) && !self.may_fail(i) {
                self.follow(i);
            }
        }
        for i in 0..2 {
            if d.percent(25) {
                self.datagrams[i] = d.log(1, 200) as u32;
            }
            if d.percent(20) {
                self.pings[i] = d.log(1, 30) as u32;
            }
        }
    }

    /// Which ends post buffers, and which devices place payload in them. Drawn from a generator of their own, so that
    /// the rest of a seed's scenario does not depend on them.
    fn draw_posts(&mut self) {
        let d = &mut Draw::new(self.seed ^ 0x9057_ed00);
        for station in &mut self.stations {
            station.places = d.percent(60);
        }
        for f in &mut self.flows {
            for i in 0..2 {
                let other = f.ends[1 - i].bytes;
                f.ends[i].posts = d.percent(40).then(|| draw_post(d, other));
            }
        }
    }

    /// How stations wait, drawn apart for the same reason.
    fn draw_waits(&mut self) {
        let d = &mut Draw::new(self.seed ^ 0x3a17_0000);
        self.stations.iter_mut().for_each(|s| s.waits = WaitPlan::draw(d));
    }

    /// Where paths change stations may move as well, and lose their addresses for a while; apart too.
    fn draw_moves(&mut self) {
        let d = &mut Draw::new(self.seed ^ 0x0de5_0000);
        let Trouble::Routes(changes) = &mut self.trouble else { return };
        let mut at = Duration::ZERO;
        for _ in 0..d.below(6) {
            at += MS * d.log(1, 4_000) as u32;
            let station = d.below(2) as usize;
            if d.percent(70) {
                changes.push((at, station, RouteChange::Move { is_announced: d.percent(70) }));
                continue;
            }
            changes.push((at, station, RouteChange::Leave));
            at += MS * d.log(1, 8_000) as u32;
            changes.push((at, station, RouteChange::Return));
        }
        changes.sort_by_key(|c| c.0);
    }

    /// The stations that receive urgent data.
    fn draw_urgency(&mut self) {
        let d = &mut Draw::new(self.seed ^ 0x0c9e_0000);
        for station in &mut self.stations {
            station.urgent_percent = if d.percent(20) { d.pick(&[1, 10, 60]) } else { 0 };
        }
    }

    /// Congestion control and, now and then, a limit of the rate; apart too.
    fn draw_congestion(&mut self) {
        let d = &mut Draw::new(self.seed ^ 0x0bb3_0000);
        for station in &mut self.stations {
            let all = CongestionControl::ALL;
            let slow = d.log(20_000, 50_000_000);
            let tcp = &mut station.tcp;
            tcp.congestion = if d.percent(40) { tcp.congestion } else { d.pick(all) };
            tcp.max_pacing_rate = d.percent(15).then_some(slow);
        }
    }

    /// Makes a flow come from the port of the one before.
    fn follow(&mut self, i: usize) {
        let before = self.flows[i - 1].clone();
        let plain = |f: &FlowPlan| f.kind == FlowKind::Plain && !f.to_self;
        if plain(&before) && plain(&self.flows[i]) {
            let f = &mut self.flows[i];
            (f.again, f.opener) = (Some(i - 1), before.opener);
        }
    }

    /// The flow whose port a flow has: its own, or that of the first that it follows.
    pub fn port_of(&self, flow: usize) -> usize {
        self.flows[flow].again.map_or(flow, |before| self.port_of(before))
    }

    /// Bytes of one direction at most: what a bad wire carries in a few thousand packets.
    fn most_bytes(&self, d: &mut Draw) -> u64 {
        let worst = self.paths.iter().map(|w| w.loss + w.corrupt).fold(0.0, f64::max);
        let slow = self.paths.iter().any(|w| w.rate_bps.is_some_and(|r| r < 1_000_000));
        let most = match worst {
            _ if slow => 200_000,
            w if w > 0.03 => 400_000,
            w if w > 0.0 => 1_500_000,
            _ if d.percent(4) => 16_000_000,
            _ => 4_000_000,
        };
        if self.mtu < 1000 { most / 3 } else { most }
    }

    /// The wire does nothing to frames but carry them, and both sides have room.
    pub fn is_clean(&self) -> bool {
        let clean = |w: &Impairments| {
            w.rate_bps.is_none()
                && w.loss + w.reorder + w.duplicate + w.corrupt == 0.0
                && w.mtu.is_none()
                && w.jitter < MS * 100
        };
        self.paths.iter().all(clean)
            && self.trouble == Trouble::None
            && self.swarm.features.is_empty()
            && self.stations.iter().all(|s| s.pool_bytes >= 64 << 20)
    }

    /// Whether several frames in a row may fail to arrive.
    pub fn may_be_absent(&self) -> bool {
        let loses =
            |w: &Impairments| w.loss + w.corrupt > 0.0 || w.rate_bps.is_some() || w.mtu.is_some();
        // Each flow to another address of a station asks for it, at the same time as others.
        let asks_many = self.swarm.any_address.is_some()
            && self.stations.iter().any(|s| s.takes_pkts.is_some());
        self.paths.iter().any(loses) || self.trouble != Trouble::None || asks_many
    }

    /// Whether a connection may report an error. One of a station to itself sees nothing of the wire, but goes
    /// with the device.
    pub fn may_fail(&self, flow: usize) -> bool {
        let f = &self.flows[flow];
        let is_gone = |i| matches!(self.trouble, Trouble::Gone { station, .. } if station == i);
        let is_hit = if f.to_self { is_gone(f.opener) } else { self.trouble.excuses_errors() };
        let listens = if f.to_self { f.opener } else { 1 - f.opener };
        is_hit || f.excuses_errors() || self.loses_a_connect(listens)
    }
}

impl std::fmt::Display for Scenario {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        describe::scenario(self, f)
    }
}

fn draw_paths(d: &mut Draw) -> [Impairments; 2] {
    let delay = Duration::from_micros(match d.below(10) {
        0 | 1 => 0,
        2..=5 => d.log(10, 5_000),
        _ => d.log(1_000, 150_000),
    });
    if d.percent(12) {
        let perfect = Impairments { delay, ..Impairments::default() };
        return [perfect.clone(), perfect];
    }
    let way = draw_path(d, delay);
    let back = if d.percent(70) { way.clone() } else { draw_path(d, delay) };
    [way, back]
}

fn draw_path(d: &mut Draw, delay: Duration) -> Impairments {
    let part = |d: &mut Draw, chance: u64, most: f64| {
        if d.percent(chance) { most * d.below(1000) as f64 / 1000.0 } else { 0.0 }
    };
    let rate_bps = d.percent(40).then(|| d.log(256_000, 1_000_000_000));
    let jitter_us = if d.percent(30) { d.log(1, 20_000) } else { 0 };
    let loss_most = d.pick(&[0.005, 0.02, 0.1]);
    let reorder_most = d.pick(&[0.02, 0.3]);
    Impairments {
        rate_bps,
        queue_bytes: d.pick(&[16 << 10, 64 << 10, 256 << 10]),
        delay,
        jitter: Duration::from_micros(jitter_us),
        loss: part(d, 45, loss_most),
        reorder: part(d, 30, reorder_most),
        reorder_delay: Duration::from_micros(d.log(10, 50_000)),
        duplicate: part(d, 25, 0.05),
        corrupt: part(d, 25, 0.02),
        cut: d.pick(&[0.0, 0.1, 1.0]),
        ..Impairments::default()
    }
}

/// A wire so bad that with the default limits an honest connection could run into them by chance
/// (in one of a million seeds) gets limits out of reach; whether limits are kept is asked where the
/// link dies, and there the defaults hold.
fn is_patient(paths: &[Impairments; 2], trouble: &Trouble) -> bool {
    let bad = paths.iter().any(|w| w.loss + w.corrupt > 0.002);
    let passing =
        matches!(trouble, Trouble::Pause { .. } | Trouble::Mute { .. } | Trouble::Routes(_));
    (bad || passing) && !trouble.excuses_errors()
}

fn draw_station(d: &mut Draw, mtu: usize, patient: bool) -> Station {
    let least = if mtu > 4000 { 4 << 20 } else { 1 << 20 };
    let pool_bytes = if d.percent(25) { d.log(least, 8 << 20) as usize } else { 64 << 20 };
    Station {
        pool_bytes,
        tcp: draw_tcp(d, patient),
        by_edges: d.percent(50),
        copies: d.percent(50),
        places: false,
        takes_pkts: d.percent(15).then(|| d.log(1, 64) as u32),
        budget: d.pick(&[1, 16, 64, 256, 256]),
        as_reader: d.percent(40),
        backlog: d.pick(&[1, 2, 16, 128]),
        accepts_after: if d.percent(15) { MS * d.log(1, 20_000) as u32 } else { Duration::ZERO },
        preempted: if d.percent(20) { MS * d.below(20) as u32 } else { Duration::ZERO },
        urgent_percent: 0,
        waits: None,
    }
}

/// Enough that random loss does not use them up.
const PATIENT_SYN_RETRIES: u32 = 30;

fn draw_tcp(d: &mut Draw, patient: bool) -> fulmar_stack::tcp::Config {
    let buffer = |d: &mut Draw| match d.below(4) {
        0 => d.log(4 << 10, 64 << 10) as usize,
        1 => d.log(64 << 10, 16 << 20) as usize,
        _ => 1 << 20,
    };
    let defaults = fulmar_stack::tcp::Config::default();
    let (user_timeout, syn_retries) = if patient {
        (Duration::from_secs(1800), PATIENT_SYN_RETRIES)
    } else {
        (defaults.user_timeout, defaults.syn_retries)
    };
    fulmar_stack::tcp::Config {
        send_buffer_bytes: buffer(d),
        recv_buffer_bytes: buffer(d),
        max_buffer_bytes: d.pick(&[1 << 20, 16 << 20, 16 << 20]).max(1 << 16),
        nodelay: d.percent(30),
        timestamps: !d.percent(25),
        sack: !d.percent(25),
        user_timeout,
        syn_retries,
        ..defaults
    }
}

fn draw_trouble(d: &mut Draw, mtu: usize) -> Trouble {
    let at = MS * d.log(1, 20_000) as u32;
    match d.below(40) {
        0..=3 => Trouble::Pause { at, lasts: MS * d.log(10, 30_000) as u32 },
        4 => Trouble::Pause { at, lasts: MS * d.log(30_000, 400_000) as u32 },
        5 => Trouble::Death { at, of: [true, true] },
        6 => Trouble::Death { at, of: d.pick(&[[true, false], [false, true]]) },
        7 => Trouble::Gone { at, station: d.below(2) as usize },
        8 | 9 => Trouble::Mute {
            at,
            lasts: MS * d.pick(&[5_000, 25_000, 90_000, 1_000_000]),
            station: d.below(2) as usize,
        },
        10..=13 => Trouble::Routes(draw_routes(d, mtu)),
        _ => Trouble::None,
    }
}

fn draw_routes(d: &mut Draw, mtu: usize) -> Vec<(Duration, usize, RouteChange)> {
    let mut changes = Vec::new();
    let mut at = Duration::ZERO;
    for _ in 0..d.log(1, 12) {
        at += MS * d.log(1, 3_000) as u32;
        let station = d.below(2) as usize;
        let smaller = 1280.max(mtu.saturating_sub(d.below(3000) as usize)).min(mtu);
        match d.below(5) {
            0 => changes.push((at, station, RouteChange::PathMtu(smaller))),
            1 => changes.push((at, station, RouteChange::NoHost)),
            2 => {
                changes.push((at, station, RouteChange::Cut));
                at += MS * d.log(1, 8_000) as u32;
                changes.push((at, station, RouteChange::Mend));
            }
            _ => changes.push((at, station, RouteChange::Host(smaller))),
        }
    }
    changes
}

fn draw_flow(d: &mut Draw, most: u64, count: u64) -> FlowPlan {
    let opener = d.below(2) as usize;
    let at = if d.percent(50) { Duration::ZERO } else { MS * d.log(1, 10_000) as u32 };
    let mut ends = [draw_end(d, most / count.min(4)), draw_end(d, most / count.min(4))];
    if d.percent(35) {
        ends[d.below(2) as usize].bytes = 0;
    }
    for i in 0..2 {
        let other = ends[1 - i].bytes;
        ends[i].read_bytes = ends[i].read_bytes.max((other / 2_000) as usize);
        let (whole, bytes) = (ends[i].write_bytes, ends[i].bytes);
        ends[i].write_bytes = whole.max((bytes / 3_000) as usize);
    }
    let kind = draw_kind(d, &mut ends);
    if matches!(kind, FlowKind::Plain) && d.percent(25) {
        ends[d.below(2) as usize].leave = Leave::WaitForEof;
    }
    FlowPlan { opener, to_self: d.percent(6), at, again: None, kind, ends }
}

fn draw_kind(d: &mut Draw, ends: &mut [EndPlan; 2]) -> FlowKind {
    let who = d.below(2) as usize;
    match d.below(50) {
        0..=3 => FlowKind::SimultaneousOpen,
        4..=6 => FlowKind::Abort(who, d.below(ends[who].bytes + 1)),
        7 | 8 => FlowKind::UnreadClose(who),
        9 | 10 => FlowKind::EarlyClose(who),
        11 => FlowKind::Deaf(who),
        _ => FlowKind::Plain,
    }
}

fn draw_end(d: &mut Draw, most: u64) -> EndPlan {
    let bytes = if d.percent(10) { d.below(4) } else { d.log(1, most) };
    let write_bytes = match d.below(4) {
        0 => d.log(1, 1_500) as usize,
        1 => d.log(1_000, 1 << 20) as usize,
        2 => 128 << 10,
        _ => 16 << 10,
    };
    let read_bytes = match d.below(4) {
        0 => d.log(1, 4_000) as usize,
        _ => d.log(4_000, 1 << 20) as usize,
    };
    EndPlan {
        bytes,
        write_bytes,
        write_pause: if d.percent(20) { MS * d.log(1, 100) as u32 } else { Duration::ZERO },
        read_bytes,
        read_pause: if d.percent(20) { MS * d.log(1, 100) as u32 } else { Duration::ZERO },
        read_after: if d.percent(8) { MS * d.log(1, 300_000) as u32 } else { Duration::ZERO },
        ragged: d.percent(50),
        leave: Leave::HalfClose,
        cork: d.percent(8),
        posts: None,
        options: SocketPlan::default(),
    }
}

/// Buffers that a stream of `bytes` fills at least some of, but not too many.
fn draw_post(d: &mut Draw, bytes: u64) -> PostPlan {
    let least = (bytes / 2_000) as usize;
    PostPlan {
        buffers: d.pick(&[1, 2, 2, 2, 3, 8]),
        most_bytes: least.max(d.log(1, 128 << 10) as usize),
        mixed: d.percent(40),
        meddles_percent: d.pick(&[0, 0, 2, 20]),
    }
}
