//! Benchmark of the engine alone, per super-segment: `cargo test --release -p fulmar-tcp --test
//! speed -- --ignored --nocapture`.

use fulmar_base::{Counters, Duration, FlowKey, Instant, SeqNum};
use fulmar_mbuf::{Chain, Pool, PoolConfig, Purpose};
use fulmar_tcp::*;
use fulmar_wire::tcp::Header;
use std::time::Instant as Clock;

struct Wire(Vec<Chain>);

impl Emit for Wire {
    fn emit(&mut self, _: &mut Pool, _: &mut Counters, seg: SegmentOut) -> Result<(), EmitError> {
        self.0.push(seg.chain);
        Ok(())
    }
    fn space(&self) -> usize {
        64 - self.0.len()
    }
}

/// The steps of a round, in order.
const STEPS: [&str; 7] = ["commit", "output", "parse", "data in", "read", "ack out", "ack in"];

/// Nanoseconds of every round, per step. The median is robust against other load.
#[derive(Default)]
struct Cost {
    steps: [Vec<u32>; 7],
    rounds: u64,
    segments: u64,
}

impl Cost {
    fn median(&mut self, step: usize) -> u32 {
        let v = &mut self.steps[step];
        v.sort_unstable();
        v[v.len() / 2]
    }
}

struct Bench {
    a: Tcb,
    b: Tcb,
    pool: Pool,
    counters: Counters,
    windows: [WindowBudget; 2],
    now: Instant,
    path: PathInfo,
}

macro_rules! env {
    ($s:ident, $i:literal) => {
        &mut Env {
            now: $s.now,
            pool: &mut $s.pool,
            counters: &mut $s.counters,
            window: &mut $s.windows[$i],
        }
    };
}

/// Parses and strips the header, as `ip` and `shard` do.
fn parse(pool: &mut Pool, mut chain: Chain) -> (Header, Chain) {
    let (hdr, n) = Header::parse(chain.front().unwrap().as_slice()).unwrap();
    chain.trim_front(n, pool);
    (hdr, chain)
}

impl Bench {
    fn new() -> Bench {
        let (x, y) = ("10.0.0.1:80".parse().unwrap(), "10.0.0.2:4000".parse().unwrap());
        let path =
            PathInfo { mtu: 1500, route_mtu: 1500, ip_header_bytes: 20, tso_bytes: Some(65_535) };
        let now = Instant::from_millis(1000);
        let cfg = Config::default();
        let a = Tcb::connect(&cfg, FlowKey::new(x, y), SeqNum(1), 0, path, now);
        let b = Tcb::connect(&cfg, FlowKey::new(y, x), SeqNum(9), 0, path, now);
        let pool = Pool::new(PoolConfig::default()).unwrap();
        let windows = [WindowBudget::new(64 << 20); 2];
        let mut s = Bench { a, b, pool, counters: Counters::default(), windows, now, path };
        let mut wire = Wire(Vec::new());
        let _ = s.a.output(env!(s, 0), &s.path, &mut wire);
        let (syn, _) = parse(&mut s.pool, wire.0.pop().unwrap());
        s.b = Tcb::passive(&cfg, FlowKey::new(y, x), SeqNum(9), 0, path, now, &syn);
        let mut c = Cost::default();
        for _ in 0..3 {
            s.round(0, &mut c);
        }
        s
    }

    /// A writes, B receives, reads and acknowledges, A receives the ACK.
    fn round(&mut self, bytes: usize, c: &mut Cost) {
        let s = self;
        s.now = s.now + Duration::from_micros(20);
        let t0 = Clock::now();
        if bytes > 0 {
            let chain = s.pool.alloc_chain(bytes, 0, Purpose::Send).unwrap();
            s.a.send_queue().append(chain, &mut s.pool).unwrap();
        }
        let t1 = Clock::now();
        let mut wire = Wire(Vec::with_capacity(64));
        let _ = s.a.output(env!(s, 0), &s.path, &mut wire);
        c.segments += wire.0.len() as u64;
        let t2 = Clock::now();
        let parsed: Vec<_> = wire.0.drain(..).map(|w| parse(&mut s.pool, w)).collect();
        let t3 = Clock::now();
        for (h, p) in parsed {
            let _ = s.b.input(env!(s, 1), &h, p);
        }
        let t4 = Clock::now();
        let got = s.b.recv_queue().take(usize::MAX, &mut s.pool);
        s.pool.free(got);
        s.b.after_read(env!(s, 1));
        let t5 = Clock::now();
        let _ = s.b.output(env!(s, 1), &s.path, &mut wire);
        let t6 = Clock::now();
        for w in wire.0.drain(..) {
            let (h, p) = parse(&mut s.pool, w);
            let _ = s.a.input(env!(s, 0), &h, p);
        }
        let t7 = Clock::now();
        let times = [t0, t1, t2, t3, t4, t5, t6, t7];
        for (step, pair) in c.steps.iter_mut().zip(times.windows(2)) {
            step.push((pair[1] - pair[0]).as_nanos() as u32);
        }
        c.rounds += 1;
    }
}

#[test]
#[ignore = "a measurement"]
fn nanoseconds_per_round() {
    println!("Tcb: {} bytes", size_of::<Tcb>());
    for bytes in [65_160usize, 131_072, 1448, 100] {
        let mut b = Bench::new();
        let mut warm = Cost::default();
        (0..20_000).for_each(|_| b.round(bytes, &mut warm));
        let mut c = Cost::default();
        (0..100_000).for_each(|_| b.round(bytes, &mut c));
        let medians: Vec<_> = (0..7).map(|i| format!("{} {}", STEPS[i], c.median(i))).collect();
        println!(
            "{bytes:>7} bytes: {} | {:.2} segments a round (23 ns of each step are the clock)",
            medians.join(", "),
            c.segments as f64 / c.rounds as f64,
        );
    }
}
