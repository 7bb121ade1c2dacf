//! A stack behind software aggregation gives its readers the same bytes as without, whatever the
//! network does.

use fulmar::internals::drivers::link::{Impairments, LinkConfig, sim_pair};
use fulmar_stack::base::{Counter, Duration, Instant, Secrets, SlotId};
use fulmar_stack::shard::{ListenOptions, Shard, StackConfig};
use fulmar_testbed::stations::{self, at, config};
use std::task::Poll;

const START: Instant = Instant::from_millis(1000);
const TOTAL: usize = 200_000;
const PORTS: [u16; 3] = [80, 81, 82];

fn byte(port: u16, offset: usize) -> u8 {
    (offset ^ (offset >> 8) ^ (offset >> 16) ^ usize::from(port)) as u8
}

/// Everything that may happen to a packet, more of it with each seed.
fn trouble(seed: u64) -> Impairments {
    let part = (seed % 5) as f64 / 100.0;
    Impairments {
        rate_bps: Some(100_000_000 << (seed % 4)),
        queue_bytes: 64 << 10,
        delay: Duration::from_micros(50 + 400 * (seed % 7)),
        jitter: Duration::from_micros(100 * (seed % 3)),
        loss: part,
        reorder: part,
        duplicate: part,
        corrupt: part / 2.0,
        ..Impairments::default()
    }
}

struct Flow {
    port: u16,
    client: SlotId,
    server: Option<SlotId>,
    listener: SlotId,
    written: usize,
    read: usize,
}

struct World {
    now: Instant,
    shards: [Shard; 2],
    flows: Vec<Flow>,
}

fn world(seed: u64, gro: bool) -> World {
    let plain = LinkConfig { tso: None, csum: false, ..LinkConfig::default() };
    let (a, b) = sim_pair(seed, &trouble(seed), &plain);
    let shard = |station: u8, device| {
        let secrets = Some(Secrets::for_simulation(seed + u64::from(station)));
        let config = StackConfig { secrets, gro, ..config(station, 64 << 20) };
        Shard::new(config, Box::new(device), START).unwrap()
    };
    let mut shards = [shard(0, a), shard(1, b)];
    let open = |port| {
        let listener = shards[1].tcp_listen(at(1, port), ListenOptions::default()).unwrap();
        let client = shards[0].tcp_connect(START, at(1, port), None).unwrap();
        Flow { port, client, server: None, listener, written: 0, read: 0 }
    };
    let flows = PORTS.map(open).into();
    World { now: START, shards, flows }
}

impl World {
    fn write(&mut self, i: usize) {
        let (f, shard) = (&mut self.flows[i], &mut self.shards[0]);
        while f.written < TOTAL {
            let n = 40_000.min(TOTAL - f.written);
            let bytes: Vec<u8> = (f.written..f.written + n).map(|o| byte(f.port, o)).collect();
            match stations::write(shard, self.now, f.client, &bytes) {
                Some(n) => f.written += n,
                None => return,
            }
        }
    }

    fn read(&mut self, i: usize) {
        let (f, shard) = (&mut self.flows[i], &mut self.shards[1]);
        if f.server.is_none()
            && let Poll::Ready((id, _)) = shard.tcp_accept(f.listener).unwrap()
        {
            f.server = Some(id);
        }
        let Some(id) = f.server else { return };
        while let Ok(Poll::Ready(chain)) = shard.tcp_take(id, usize::MAX) {
            for part in chain.slices() {
                for b in part {
                    assert_eq!(*b, byte(f.port, f.read), "byte {} of port {}", f.read, f.port);
                    f.read += 1;
                }
            }
            shard.tcp_read_done(self.now, id, chain);
        }
    }

    /// Until every byte was read; the segments that were joined, and the segments that tcp saw.
    fn run(mut self) -> (u64, u64) {
        while self.flows.iter().any(|f| f.read < TOTAL) {
            // Frames of a while come in one burst.
            self.now = self.now + Duration::from_micros(500);
            for s in &mut self.shards {
                s.step(self.now, 1000);
            }
            for i in 0..self.flows.len() {
                self.write(i);
                self.read(i);
            }
            assert!(self.now < START + Duration::from_secs(300), "stuck");
        }
        let count = |c| self.shards[1].counters().value(c);
        (count(Counter::GroJoined), count(Counter::TcpSegmentsIn))
    }
}

#[test]
fn joined_or_not_every_stream_arrives_byte_for_byte() {
    let (mut joined, mut seen, mut apart) = (0, 0, 0);
    for seed in 0..60 {
        let (j, s) = world(seed, true).run();
        let (none, a) = world(seed, false).run();
        assert_eq!(none, 0);
        (joined, seen, apart) = (joined + j, seen + s, apart + a);
    }
    assert!(joined > seen, "{joined} joined of {apart}, {seen} seen");
}
