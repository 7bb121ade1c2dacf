//! Two stacks of two shards each on a virtual clock, over a wire with every kind of trouble and with
//! queues that steer well, as a TAP does, or not at all. Connections go both ways and both send.

use std::net::SocketAddr;

use fulmar::internals::drivers::link::{Impairments, LinkConfig, sim_pair};
use fulmar::internals::drivers::queues::{Steering, split};
use fulmar::internals::runtime::{WatchedShard, handoffs};
use fulmar_stack::base::{Counter, DropReason, Duration, Instant, Secrets, SlotId};
use fulmar_stack::ip::IfAddr;
use fulmar_stack::mbuf::{PoolConfig, Purpose};
use fulmar_stack::shard::{ListenOptions, MoreData, Shard, StackConfig};
use fulmar_stack::udp::BindOptions;
use std::task::Poll;

const START: Instant = Instant::from_millis(1000);
const SHARDS: u16 = 2;
const CONNECTIONS: usize = 6;
/// Bytes that each end of a connection sends.
const LEN: usize = 40_000;
const CHUNK: usize = 3_000;
/// Steps of a millisecond after which a run has failed.
const PATIENCE_MS: usize = 300_000;

fn at(station: u8, port: u16) -> SocketAddr {
    SocketAddr::from(([10, 0, 0, station], port))
}

fn byte(seed: usize, at: usize) -> u8 {
    (at.wrapping_mul(31) ^ (at >> 8) ^ seed.wrapping_mul(97)) as u8
}

/// One end of a connection.
struct End {
    shard: usize,
    id: SlotId,
    /// Seeds of the bytes that it sends and of the bytes that it receives.
    seeds: (usize, usize),
    sent: usize,
    got: usize,
}

impl End {
    fn new(shard: usize, id: SlotId, seeds: (usize, usize)) -> End {
        End { shard, id, seeds, sent: 0, got: 0 }
    }

    fn is_done(&self) -> bool {
        self.sent == LEN && self.got == LEN
    }

    fn work(&mut self, s: &mut WatchedShard, now: Instant) {
        let n = CHUNK.min(LEN - self.sent);
        if n > 0
            && s.sosend(self.id).space().unwrap() >= n
            && let Ok(mut chain) = s.pool().alloc_chain(n, 0, Purpose::Send)
        {
            let bytes: Vec<u8> =
                (self.sent..self.sent + n).map(|i| byte(self.seeds.0, i)).collect();
            chain.fill([&bytes[..]]);
            match s.sosend(self.id).append(now, &mut chain, MoreData::None) {
                Ok(Poll::Ready(())) => self.sent += n,
                Ok(_) => s.pool().free(chain),
                Err(e) => panic!("{e:?}"),
            }
        }
        while let Ok(Poll::Ready(chain)) = s.tcp_take(self.id, usize::MAX) {
            for b in chain.to_vec() {
                assert_eq!(b, byte(self.seeds.1, self.got), "byte {}", self.got);
                self.got += 1;
            }
            s.tcp_read_done(now, self.id, chain);
        }
    }
}

struct World {
    now: Instant,
    sides: [Vec<WatchedShard>; 2],
    listeners: [Vec<SlotId>; 2],
    ends: [Vec<End>; 2],
}

impl World {
    fn new(seed: u64, how: &Impairments, steering: [Steering; 2]) -> World {
        let (near, far) = sim_pair(seed, how, &LinkConfig::default());
        let side = |n: u8, device| {
            let queues = split(Box::new(device), SHARDS, steering[usize::from(n)]);
            let config = StackConfig {
                addresses: vec![IfAddr { addr: at(n + 1, 0).ip(), prefix_len: 24 }],
                pool: PoolConfig::with_budget(16 << 20),
                secrets: Some(Secrets::for_simulation(seed ^ u64::from(n))),
                ..StackConfig::default()
            };
            let mut shards = Vec::new();
            for ((queue, handoff), id) in queues.into_iter().zip(handoffs(2)).zip(0u16..) {
                let (config, queue) = (config.clone(), Box::new(queue));
                let shard = Shard::of_several(config, queue, START, id, SHARDS);
                let mut shard = WatchedShard::new(shard.unwrap());
                shard.join(handoff);
                shards.push(shard);
            }
            shards
        };
        let mut sides: [Vec<WatchedShard>; 2] = [side(0, near), side(1, far)];
        let listen =
            |n: u8, s: &mut WatchedShard| s.tcp_listen(at(n + 1, 80), ListenOptions::default());
        let [a, b] = &mut sides;
        let listeners = [
            a.iter_mut().map(|s| listen(0, s).unwrap()).collect(),
            b.iter_mut().map(|s| listen(1, s).unwrap()).collect(),
        ];
        World { now: START, sides, listeners, ends: [vec![], vec![]] }
    }

    fn step(&mut self) {
        self.now = self.now + Duration::from_millis(1);
        for s in self.sides.iter_mut().flatten() {
            s.step(self.now, 64);
        }
    }

    /// A connection from one side; the seeds of its two ends add_follower from its port.
    fn connect(&mut self, from: usize, shard: usize) {
        let to = at(2 - from as u8, 80);
        let s = &mut self.sides[from][shard];
        let id = s.tcp_connect(self.now, to, None).unwrap();
        let port = usize::from(s.addresses(id).unwrap().0.unwrap().port());
        self.ends[from].push(End::new(shard, id, (port, port + 1)));
    }

    fn accept(&mut self) {
        for (side, shards) in self.sides.iter_mut().enumerate() {
            for (n, s) in shards.iter_mut().enumerate() {
                while let Ok(Poll::Ready((id, peer))) = s.tcp_accept(self.listeners[side][n]) {
                    let port = usize::from(peer.port());
                    self.ends[side].push(End::new(n, id, (port + 1, port)));
                }
            }
        }
    }

    fn exchange(&mut self) {
        for n in 0..CONNECTIONS {
            self.connect(n % 2, n / 2 % 2);
        }
        for _ in 0..PATIENCE_MS {
            self.step();
            self.accept();
            for (side, ends) in self.ends.iter_mut().enumerate() {
                for e in ends {
                    e.work(&mut self.sides[side][e.shard], self.now);
                }
            }
            let all = self.ends.iter().flatten();
            if all.clone().count() == 2 * CONNECTIONS && all.clone().all(End::is_done) {
                return;
            }
        }
        panic!("not done after {PATIENCE_MS} ms");
    }

    /// Closes everything, and looks whether all buffers came home.
    fn end(&mut self) {
        for (side, ends) in self.ends.iter().enumerate() {
            for e in ends {
                self.sides[side][e.shard].close(self.now, e.id);
            }
        }
        // Longer than TIME-WAIT, and than a FIN that is lost again and again.
        for _ in 0..PATIENCE_MS / 2 {
            self.step();
        }
        for s in self.sides.iter_mut().flatten() {
            s.pool().drain_remote();
            assert_eq!(s.pool().outstanding(), 0);
        }
    }

    fn total(&self, c: Counter) -> u64 {
        self.sides.iter().flatten().map(|s| s.counters().value(c)).sum()
    }
}

fn trouble() -> Impairments {
    Impairments {
        delay: Duration::from_millis(3),
        jitter: Duration::from_millis(2),
        loss: 0.02,
        reorder: 0.02,
        duplicate: 0.02,
        corrupt: 0.01,
        ..Impairments::default()
    }
}

fn wire() -> Impairments {
    Impairments { delay: Duration::from_millis(1), ..Impairments::default() }
}

#[test]
fn queues_that_know_the_owner_let_nothing_cross() {
    for seed in 0..3 {
        let mut w = World::new(seed, &wire(), [Steering::Owner; 2]);
        w.exchange();
        assert_eq!(w.total(Counter::WrongQueue), 0);
        for s in w.sides.iter().flatten() {
            let opened = s.counters().value(Counter::TcpActiveOpens);
            assert!(opened > 0 && s.counters().value(Counter::TcpSegmentsIn) > 0);
        }
        w.end();
    }
}

#[test]
fn queues_that_follow_the_sender_misplace_only_what_opens_a_connection() {
    for seed in 0..3 {
        let mut w = World::new(seed, &wire(), [Steering::Sender { seed }; 2]);
        w.exchange();
        let wrong = w.total(Counter::WrongQueue);
        assert!(wrong <= CONNECTIONS as u64, "{wrong}");
        w.end();
    }
}

#[test]
fn every_byte_arrives_whatever_queue_its_packets_come_on_and_whatever_happens_on_the_way() {
    for seed in 0..12 {
        let steering = [Steering::Any { seed }, Steering::Sender { seed: seed + 100 }];
        let mut w = World::new(seed, &trouble(), steering);
        w.exchange();
        assert!(w.total(Counter::WrongQueue) > 2 * CONNECTIONS as u64, "seed {seed}");
        let full = |s: &WatchedShard| s.counters().drops(DropReason::HandOffFull);
        assert_eq!(w.sides.iter().flatten().map(full).sum::<u64>(), 0, "seed {seed}");
        w.end();
    }
}

#[test]
fn unread_bytes_are_in_the_memory_of_the_readers_own_shard() {
    for seed in 0..4 {
        let mut w = World::new(seed, &wire(), [Steering::Any { seed }; 2]);
        w.connect(0, 0);
        for _ in 0..100 {
            w.step();
            w.accept();
        }
        let from = &mut w.ends[0][0];
        for _ in 0..5 {
            from.work(&mut w.sides[0][0], w.now);
        }
        for _ in 0..100 {
            w.step();
        }
        assert!(w.total(Counter::WrongQueue) > 2, "seed {seed}");
        // The link lends buffers of the sender: what the shard of the reader holds, it has copied.
        let owner = w.ends[1][0].shard;
        let used = |s: &mut WatchedShard| s.pool().share_of(Purpose::Receive).used;
        let used: Vec<usize> = w.sides[1].iter_mut().map(used).collect();
        assert!(used[owner] > 3000 && used[1 - owner] == 0, "seed {seed}: {used:?}, {owner}");
    }
}

#[test]
fn datagrams_that_wait_lie_in_the_memory_of_the_shard_that_has_their_socket() {
    for seed in 0..4 {
        let mut w = World::new(seed, &wire(), [Steering::Any { seed }; 2]);
        let there = at(2, 90);
        w.sides[1][1].udp().bind(there, BindOptions::default()).unwrap();
        let here = w.sides[0][0].udp().open(there).unwrap();
        for _ in 0..50 {
            w.sides[0][0].udp().send(w.now, here, &[&[7; 1000]], None).unwrap();
            w.step();
        }
        for _ in 0..10 {
            w.step();
        }
        assert!(w.total(Counter::WrongQueue) > 2, "seed {seed}");
        let used = |s: &mut WatchedShard| s.pool().share_of(Purpose::Receive).used;
        let used: Vec<usize> = w.sides[1].iter_mut().map(used).collect();
        assert!(used[0] == 0 && used[1] > 10_000, "seed {seed}: {used:?}");
    }
}

#[test]
fn the_same_seed_gives_the_same_run() {
    let run = |seed| {
        let mut w = World::new(seed, &trouble(), [Steering::Any { seed }; 2]);
        w.exchange();
        let counters = w.sides.iter().flatten().map(|s| format!("{:?}", s.counters()));
        (w.now, counters.collect::<Vec<_>>())
    };
    assert_eq!(run(7), run(7));
    assert_ne!(run(7).1, run(8).1);
}
