//! Simulation of two engines and a lossy, reordering, duplicating network on virtual time, over
//! many seeds: every byte arrives in order, both sides close, every buffer is freed.
//!
//! Failing seeds are printed. `FULMAR_TCP_SEED=n cargo test -p fulmar-tcp --test pair` replays one,
//! `FULMAR_TCP_SEEDS=n` runs `n` seeds.

use fulmar_base::{Counter, Counters, Duration, FlowKey, Instant, SeqNum};
use fulmar_mbuf::{Chain, Pool, PoolConfig, Purpose};
use fulmar_tcp::*;
use fulmar_wire::tcp::{Flags, Header};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// xorshift64*.
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }
    fn below(&mut self, n: u64) -> u64 {
        if n == 0 { 0 } else { (self.next() >> 11) % n }
    }
    fn chance(&mut self, per_mille: u64) -> bool {
        self.below(1000) < per_mille
    }
    fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len() as u64) as usize]
    }
}

fn pattern(side: usize, offset: u64) -> u8 {
    (offset ^ (offset >> 8).wrapping_mul(31) ^ (side as u64 * 91)) as u8
}

/// Behaviour of the network.
#[derive(Clone, Copy, Debug)]
struct Net {
    one_way: Duration,
    loss: u64,
    duplicate: u64,
    reorder: u64,
    /// Super-segments arrive unsegmented, as with GRO.
    whole: bool,
}

/// Collects what a Tcb emits as bytes.
struct Out {
    packets: Vec<(Vec<u8>, Option<u16>)>,
    room: usize,
}

impl Emit for Out {
    fn emit(
        &mut self,
        pool: &mut Pool,
        _: &mut Counters,
        seg: SegmentOut,
    ) -> Result<(), EmitError> {
        let bytes = seg.chain.to_vec();
        pool.free(seg.chain);
        if self.room == 0 {
            return Err(EmitError::Full);
        }
        self.room -= 1;
        self.packets.push((bytes, seg.offload.gso.map(|g| g.segment_bytes)));
        Ok(())
    }
    fn space(&self) -> usize {
        self.room
    }
}

struct Side {
    index: usize,
    tcb: Tcb,
    pool: Pool,
    counters: Counters,
    window: WindowBudget,
    path: PathInfo,
    to_send: u64,
    written: u64,
    got: u64,
    /// Size of the largest read, and pause between reads.
    read_bytes: usize,
    pause: Duration,
    read_at: Option<Instant>,
    retry_at: Option<Instant>,
    shut: bool,
    closed: bool,
    connected: bool,
}

impl Side {
    fn env<R>(&mut self, now: Instant, f: impl FnOnce(&mut Tcb, &mut Env) -> R) -> R {
        let mut env = Env {
            now,
            pool: &mut self.pool,
            counters: &mut self.counters,
            window: &mut self.window,
        };
        f(&mut self.tcb, &mut env)
    }

    fn write_some(&mut self, now: Instant, rng: &mut Rng) {
        while self.connected && self.written < self.to_send && self.tcb.can_send() {
            let space = self.tcb.send_queue().space() as u64;
            let most = (self.to_send - self.written).min(space);
            let n = most.min(1 + rng.below(70_000));
            if n == 0 {
                return;
            }
            let Ok(mut chain) = self.pool.alloc_chain(n as usize, 0, Purpose::Send) else {
                self.retry_at = Some(now + Duration::from_millis(5));
                return;
            };
            let bytes: Vec<u8> = (0..n).map(|i| pattern(self.index, self.written + i)).collect();
            chain.copy_from(0, &bytes).unwrap();
            self.tcb.send_queue().append(chain, &mut self.pool).unwrap();
            self.written += n;
        }
        if self.connected && self.written == self.to_send && !self.shut {
            self.shut = true;
            self.tcb.shutdown_write(now);
        }
    }

    fn read_some(&mut self, now: Instant) {
        if self.read_at.is_some_and(|at| at > now) {
            return;
        }
        self.read_at = None;
        if self.tcb.recv_queue().readable() == 0 {
            return;
        }
        let chain = self.tcb.recv_queue().take(self.read_bytes, &mut self.pool);
        for b in chain.slices().flatten() {
            assert_eq!(*b, pattern(1 - self.index, self.got), "byte {}", self.got);
            self.got += 1;
        }
        self.pool.free(chain);
        self.env(now, |t, env| t.after_read(env));
        if self.tcb.recv_queue().readable() > 0 || !self.pause.is_zero() {
            self.read_at = Some(now + self.pause);
        }
    }

    /// Closes once both directions are complete.
    fn close_if_done(&mut self, now: Instant) {
        if self.shut && self.tcb.at_eof() && !self.closed {
            self.closed = true;
            self.env(now, |t, env| t.close(env));
        }
    }

    fn done(&self) -> bool {
        self.closed && matches!(self.tcb.state(), State::TimeWait | State::Closed)
    }

    fn deadline(&self) -> Option<Instant> {
        [self.tcb.next_deadline(), self.read_at, self.retry_at].into_iter().flatten().min()
    }
}

type Event = Reverse<(Instant, u64, usize, Vec<u8>)>;

struct World {
    now: Instant,
    sides: [Side; 2],
    events: BinaryHeap<Event>,
    count: u64,
    net: Net,
    rng: Rng,
    /// The passive side's Tcb is created by the first SYN, as a listener would.
    passive_ready: bool,
    passive_cfg: Config,
}

fn keys() -> [FlowKey; 2] {
    let (a, b) = ("10.0.0.1:80".parse().unwrap(), "10.0.0.2:4000".parse().unwrap());
    [FlowKey::new(a, b), FlowKey::new(b, a)]
}

impl World {
    fn pump(&mut self, i: usize) {
        let (now, rng) = (self.now, &mut self.rng);
        let s = &mut self.sides[i];
        s.retry_at = None;
        s.read_some(now);
        s.write_some(now, rng);
        s.close_if_done(now);
        let room = if rng.chance(20) { rng.below(3) as usize } else { usize::MAX };
        let mut out = Out { packets: Vec::new(), room };
        let path = s.path;
        let sent = s.env(now, |t, env| t.output(env, &path, &mut out));
        if sent != Sent::Done {
            s.retry_at = Some(now + Duration::from_millis(1));
        } else {
            assert!(!s.tcb.wants_output(), "output left something unsent");
        }
        for (bytes, gso) in out.packets {
            self.carry(i, bytes, gso);
        }
    }

    fn carry(&mut self, from: usize, bytes: Vec<u8>, gso: Option<u16>) {
        match gso {
            Some(n) if !self.net.whole => {
                for piece in cut(&bytes, usize::from(n)) {
                    self.carry_packet(from, piece);
                }
            }
            _ => self.carry_packet(from, bytes),
        }
    }

    fn carry_packet(&mut self, from: usize, bytes: Vec<u8>) {
        if self.rng.chance(self.net.loss) {
            return;
        }
        let copies = if self.rng.chance(self.net.duplicate) { 2 } else { 1 };
        for _ in 0..copies {
            let late =
                if self.rng.chance(self.net.reorder) { self.rng.below(20_000_000) } else { 0 };
            let at = self.now + self.net.one_way + Duration::from_nanos(late);
            self.count += 1;
            self.events.push(Reverse((at, self.count, 1 - from, bytes.clone())));
        }
    }

    fn deliver(&mut self, to: usize, bytes: &[u8]) {
        let now = self.now;
        let (hdr, n) = Header::parse(bytes).unwrap();
        if to == 1 && !self.passive_ready {
            if hdr.flags != Flags::SYN {
                return;
            }
            let path = self.sides[1].path;
            let iss = SeqNum(self.rng.next() as u32);
            self.sides[1].tcb =
                Tcb::passive(&self.passive_cfg, keys()[1], iss, 77, path, now, &hdr);
            self.passive_ready = true;
            return;
        }
        let s = &mut self.sides[to];
        let payload = if bytes.len() > n {
            let Ok(mut c) = s.pool.alloc_chain(bytes.len() - n, 0, Purpose::Receive) else {
                return;
            };
            c.copy_from(0, &bytes[n..]).unwrap();
            c
        } else {
            Chain::new()
        };
        let events = s.env(now, |t, env| t.input(env, &hdr, payload));
        if events.contains(Events::CONNECTED) {
            s.connected = true;
        }
        assert!(!events.contains(Events::ERROR), "{:?}", s.tcb.take_error());
    }

    /// Advances to the next event. False when both sides are done.
    fn step(&mut self) -> bool {
        if self.sides.iter().all(Side::done) {
            return false;
        }
        let arrival = self.events.peek().map(|Reverse(e)| e.0);
        let timers = [self.sides[0].deadline(), self.sides[1].deadline()];
        let next = timers.into_iter().chain([arrival]).flatten().min();
        let next = next.expect("a stall: nothing in flight, no timer runs");
        self.now = self.now.max(next);
        // A batch of segments, then one output, as in a shard.
        let mut touched = [false; 2];
        while let Some(Reverse(e)) = self.events.peek()
            && e.0 <= self.now
        {
            let Reverse((_, _, to, bytes)) = self.events.pop().unwrap();
            self.deliver(to, &bytes);
            touched[to] = true;
        }
        for (i, touched) in touched.into_iter().enumerate() {
            let now = self.now;
            let due = self.sides[i].deadline().is_some_and(|d| d <= now);
            if due {
                let events = self.sides[i].env(now, |t, env| t.on_timer(env));
                assert!(!events.contains(Events::ERROR), "{:?}", self.sides[i].tcb.take_error());
            }
            if (due || touched) && (i == 0 || self.passive_ready) {
                self.pump(i);
            }
        }
        true
    }
}

/// Segmentation of a super-segment.
fn cut(bytes: &[u8], mss: usize) -> Vec<Vec<u8>> {
    let (hdr, n) = Header::parse(bytes).unwrap();
    let pieces: Vec<_> = bytes[n..].chunks(mss).collect();
    let last = pieces.len() - 1;
    let mut out = Vec::new();
    for (i, piece) in pieces.into_iter().enumerate() {
        let mut h = hdr;
        h.seq = hdr.seq + (i * mss) as u32;
        if i != last {
            h.flags = h.flags.without(Flags::PSH | Flags::FIN);
        }
        let mut packet = vec![0; n];
        h.emit(&mut packet).unwrap();
        packet.extend_from_slice(piece);
        out.push(packet);
    }
    out
}

fn side(index: usize, cfg: &Config, path: PathInfo, rng: &mut Rng, to_send: u64) -> Side {
    let now = Instant::from_millis(50_000);
    let budget = rng.pick(&[8usize << 20, 32 << 20]);
    let slow = rng.chance(200);
    Side {
        index,
        tcb: Tcb::connect(cfg, keys()[index], SeqNum(rng.next() as u32), 12_345, path, now),
        pool: Pool::new(PoolConfig::with_budget(budget)).unwrap(),
        counters: Counters::default(),
        window: WindowBudget::new(budget / 4),
        path,
        to_send,
        written: 0,
        got: 0,
        read_bytes: if slow { 1 + rng.below(20_000) as usize } else { usize::MAX },
        pause: if slow { Duration::from_millis(1 + rng.below(50)) } else { Duration::ZERO },
        read_at: None,
        retry_at: None,
        shut: false,
        closed: false,
        connected: false,
    }
}

fn config(rng: &mut Rng) -> Config {
    Config {
        send_buffer_bytes: rng.pick(&[4096, 30_000, 1 << 20]),
        recv_buffer_bytes: rng.pick(&[4096, 30_000, 1 << 20]),
        max_buffer_bytes: rng.pick(&[1 << 20, 16 << 20]),
        timestamps: !rng.chance(300),
        sack: !rng.chance(300),
        nodelay: rng.chance(300),
        ..Config::default()
    }
}

fn world(seed: u64) -> World {
    let mut rng = Rng(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let mtu = rng.pick(&[576, 1500, 1500, 9000]);
    let tso_bytes = rng.pick(&[None, Some(65_535), Some(16_384)]);
    let path = PathInfo { mtu, route_mtu: mtu, ip_header_bytes: 20, tso_bytes };
    let net = Net {
        one_way: Duration::from_micros(rng.pick(&[0, 20, 5_000, 150_000])),
        loss: rng.pick(&[0, 0, 10, 50, 100]),
        duplicate: rng.pick(&[0, 0, 20]),
        reorder: rng.pick(&[0, 0, 30, 200]),
        whole: rng.chance(500),
    };
    let most = if net.loss > 10 { 150_000 } else { 700_000 };
    let (a, b) = (config(&mut rng), config(&mut rng));
    let lengths = [rng.below(most), if rng.chance(500) { rng.below(most) } else { 0 }];
    let sides = [side(0, &a, path, &mut rng, lengths[0]), side(1, &b, path, &mut rng, lengths[1])];
    let now = Instant::from_millis(50_000);
    World {
        now,
        sides,
        events: BinaryHeap::new(),
        count: 0,
        net,
        rng,
        passive_ready: false,
        passive_cfg: b,
    }
}

fn run(seed: u64) -> World {
    let mut w = world(seed);
    w.pump(0);
    let mut steps = 0u64;
    let end = w.now + Duration::from_secs(3000);
    while w.step() {
        steps += 1;
        assert!(steps < 2_000_000, "does not terminate");
        assert!(w.now < end, "takes too long");
    }
    for i in 0..2 {
        assert_eq!(w.sides[i].got, w.sides[1 - i].to_send, "bytes missing");
        let now = w.now;
        let s = &mut w.sides[i];
        s.env(now, |t, env| t.release(env));
        assert_eq!(s.pool.outstanding(), 0, "mbufs leaked");
        assert_eq!(s.window.granted_bytes, 0, "budget leaked");
    }
    w
}

#[test]
fn every_byte_arrives_whatever_the_network_does() {
    let read = |name: &str| std::env::var(name).ok().and_then(|v| v.parse::<u64>().ok());
    if let Some(seed) = read("FULMAR_TCP_SEED") {
        let w = run(seed);
        println!("{:?} {:?}", w.net, w.now);
        return;
    }
    let seeds = read("FULMAR_TCP_SEEDS").unwrap_or(500);
    let mut failed = Vec::new();
    for seed in 1..=seeds {
        if std::panic::catch_unwind(|| run(seed)).is_err() {
            println!("seed {seed} failed");
            failed.push(seed);
        }
    }
    assert!(failed.is_empty(), "seeds {failed:?}");
}

#[test]
fn a_clean_path_needs_no_retransmission() {
    let mut clean = 0;
    for seed in 1..200 {
        let w = world(seed);
        if w.net.loss + w.net.reorder + w.net.duplicate > 0 {
            continue;
        }
        let w = run(seed);
        for s in &w.sides {
            assert_eq!(s.counters.value(Counter::TcpRetransmitBytes), 0, "seed {seed}");
            assert_eq!(s.counters.value(Counter::TcpTimeouts), 0, "seed {seed}");
        }
        clean += 1;
    }
    assert!(clean > 10);
}

/// Goodput of a stream of 60 virtual seconds, Mb/s.
fn goodput(net: Net, congestion: CongestionControl, seed: u64) -> (f64, u64) {
    let mut rng = Rng(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let path =
        PathInfo { mtu: 1500, route_mtu: 1500, ip_header_bytes: 20, tso_bytes: Some(65_535) };
    let cfg = Config { congestion, ..Config::default() };
    let mut sides = [side(0, &cfg, path, &mut rng, u64::MAX / 2), side(1, &cfg, path, &mut rng, 0)];
    for s in &mut sides {
        s.pool = Pool::new(PoolConfig::with_budget(256 << 20)).unwrap();
        s.window = WindowBudget::new(64 << 20);
        s.read_bytes = usize::MAX;
        s.pause = Duration::ZERO;
    }
    let now = Instant::from_millis(50_000);
    let mut w = World {
        now,
        sides,
        events: BinaryHeap::new(),
        count: 0,
        net,
        rng,
        passive_ready: false,
        passive_cfg: cfg,
    };
    w.pump(0);
    let seconds = 60;
    while w.now < now + Duration::from_secs(seconds) {
        assert!(w.step());
    }
    let rate = w.sides[1].got as f64 * 8.0 / seconds as f64 / 1e6;
    (rate, w.sides[0].counters.value(Counter::TcpTimeouts))
}

#[test]
#[ignore = "prints figures"]
fn goodput_over_lossy_paths() {
    for (ms, loss, reorder) in [(20, 1, 0), (20, 10, 0), (1, 10, 0), (1, 0, 10), (50, 10, 0)] {
        let net =
            Net { one_way: Duration::from_millis(ms), loss, duplicate: 0, reorder, whole: false };
        for c in CongestionControl::ALL {
            let runs: Vec<_> = (1..=3).map(|seed| goodput(net, *c, seed)).collect();
            println!("{ms} ms, loss {loss} per mille, reorder {reorder}: {c} {runs:.1?}");
        }
    }
}
