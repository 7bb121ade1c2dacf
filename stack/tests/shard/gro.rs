//! A stack behind software aggregation gives its readers the same bytes as without, whatever the
//! network does.

use fulmar::internals::drivers::link::{Impairments, LinkConfig, sim_pair};
use fulmar_stack::base::{Counter, Duration, Secrets, SlotId};
use fulmar_stack::shard::StackConfig;
use fulmar_testbed::stations::{self, at, config};
use fulmar_testbed::world::{START, World};
use std::task::Poll;

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

struct Flows {
    world: World,
    flows: Vec<Flow>,
}

fn flows(seed: u64, gro: bool) -> Flows {
    let plain = LinkConfig { tso: None, csum: false, ..LinkConfig::default() };
    let (near, far) = sim_pair(seed, &trouble(seed), &plain);
    let mut world = World::new([Box::new(near), Box::new(far)], |station| {
        let secrets = Some(Secrets::for_simulation(seed + u64::from(station)));
        StackConfig { secrets, gro, ..config(station, 64 << 20) }
    });
    let open = |port| {
        let listener = world.listen(port);
        let client = world.shards[0].tcp_connect(world.now, at(1, port), None).unwrap();
        Flow { port, client, server: None, listener, written: 0, read: 0 }
    };
    let flows = PORTS.map(open).into();
    Flows { world, flows }
}

impl Flows {
    fn write(&mut self, i: usize) {
        let (f, shard) = (&mut self.flows[i], &mut self.world.shards[0]);
        while f.written < TOTAL {
            let n = 40_000.min(TOTAL - f.written);
            let bytes: Vec<u8> = (f.written..f.written + n).map(|o| byte(f.port, o)).collect();
            match stations::write(shard, self.world.now, f.client, &bytes) {
                Some(n) => f.written += n,
                None => return,
            }
        }
    }

    fn read(&mut self, i: usize) {
        let f = &mut self.flows[i];
        f.server = f.server.or_else(|| self.world.accept(f.listener));
        let (Some(id), shard) = (f.server, &mut self.world.shards[1]) else { return };
        while let Ok(Poll::Ready(chain)) = shard.tcp_take(id, usize::MAX) {
            for part in chain.slices() {
                for b in part {
                    assert_eq!(*b, byte(f.port, f.read), "byte {} of port {}", f.read, f.port);
                    f.read += 1;
                }
            }
            shard.tcp_read_done(self.world.now, id, chain);
        }
    }

    /// Until every byte was read; the segments that were joined, and the segments that tcp saw.
    fn run(mut self) -> (u64, u64) {
        while self.flows.iter().any(|f| f.read < TOTAL) {
            // Frames of a while come in one burst.
            self.world.step(Duration::from_micros(500));
            for i in 0..self.flows.len() {
                self.write(i);
                self.read(i);
            }
            assert!(self.world.now < START + Duration::from_secs(300), "stuck");
        }
        let count = |c| self.world.shards[1].counters().value(c);
        (count(Counter::GroJoined), count(Counter::TcpSegmentsIn))
    }
}

#[test]
fn joined_or_not_every_stream_arrives_byte_for_byte() {
    let (mut joined, mut seen, mut apart) = (0, 0, 0);
    for seed in 0..60 {
        let (j, s) = flows(seed, true).run();
        let (none, a) = flows(seed, false).run();
        assert_eq!(none, 0);
        (joined, seen, apart) = (joined + j, seen + s, apart + a);
    }
    assert!(joined > seen, "{joined} joined of {apart}, {seen} seen");
}
