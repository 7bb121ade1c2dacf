//! The size of the receive buffer, over simulated paths: it follows the path, and no further.

use fulmar_base::{Duration, Instant, SlotId};
use fulmar_drivers::link::{Impairments, LinkConfig, sim_pair};
use fulmar_shard::{ListenOptions, Reserved, Shard};
use fulmar_socket::{Attempt, Step};
use fulmar_testbed::stations::{at, config};

const START: usize = 1 << 20;
const LONG_PATH: (u64, Duration) = (200_000_000, Duration::from_millis(50));

struct World {
    now: Instant,
    tick: Duration,
    shards: [Shard; 2],
    client: SlotId,
    server: SlotId,
}

/// A connection over a path of so many bits per second and so much delay each way.
fn world((rate_bps, one_way): (u64, Duration), budget: usize) -> World {
    let how = Impairments {
        rate_bps: Some(rate_bps),
        queue_bytes: 32 << 20,
        delay: one_way,
        ..Impairments::default()
    };
    let (a, b) = sim_pair(1, &how, &LinkConfig::default());
    let now = Instant::from_millis(1000);
    let shard = |station, device, budget| {
        let mut config = config(station, budget);
        config.tcp.send_buffer_bytes = 16 << 20;
        Shard::new(config, Box::new(device), now).unwrap()
    };
    let mut shards = [shard(0, a, 256 << 20), shard(1, b, budget)];
    let listener = shards[1].tcp_listen(at(1, 80), ListenOptions::default()).unwrap();
    let client = shards[0].tcp_connect(now, at(1, 80), None).unwrap();
    let tick = (one_way / 50).max(Duration::from_micros(10));
    let mut w = World { now, tick, shards, client, server: client };
    for _ in 0..10_000 {
        w.step();
        if let Step::Done((id, _)) = w.shards[1].tcp_accept(listener).unwrap() {
            w.server = id;
            return w;
        }
    }
    panic!("not connected");
}

impl World {
    fn step(&mut self) {
        self.now = self.now + self.tick;
        for s in &mut self.shards {
            s.step(self.now, 1000);
        }
    }

    fn buffer(&mut self) -> usize {
        self.shards[1].tcp_entry(self.server).unwrap().tcb.recv_buffer()
    }

    /// The writer writes whatever fits; the reader takes so much each time, for so long. The buffer at
    /// the end.
    fn run(&mut self, time: Duration, per_step: usize) -> usize {
        let end = self.now + time;
        while self.now < end {
            while let Ok(Step::Done(Reserved::Space(r))) =
                self.shards[0].tcp_reserve(self.now, self.client, &[], 64 << 10, Attempt::Retry)
            {
                self.shards[0].tcp_commit(self.now, self.client, r);
            }
            self.step();
            if let Ok(Step::Done(chain)) = self.shards[1].tcp_take(self.server, per_step) {
                self.shards[1].tcp_read_done(self.now, self.server, chain);
            }
        }
        self.buffer()
    }
}

#[test]
fn on_a_long_path_it_grows_until_the_path_is_full_and_no_further() {
    // 25 MB/s for 100 ms: the path holds 2.5 MB, the queue in it 32 MiB more.
    let mut w = world(LONG_PATH, 256 << 20);
    let buffer = w.run(Duration::from_secs(4), usize::MAX);
    assert!(buffer >= 2_500_000, "{buffer} bytes do not fill the path");
    assert!(buffer <= 5_000_000, "{buffer} bytes feed the queue");
    let drops = w.shards[1].counters().total_drops();
    assert_eq!(drops, 0);
}

#[test]
fn on_a_local_path_it_stays_in_the_cache() {
    // 5 GB/s for 40 microseconds: 200 kB.
    let mut w = world((40_000_000_000, Duration::from_micros(20)), 256 << 20);
    assert_eq!(w.run(Duration::from_millis(40), usize::MAX), START);
}

#[test]
fn it_does_not_grow_for_a_slow_reader_nor_beyond_the_users_word_nor_without_memory() {
    let mut slow = world(LONG_PATH, 256 << 20);
    // 4 KiB per millisecond: less than half of the window in a round trip.
    assert_eq!(slow.run(Duration::from_secs(2), 4 << 10), START);
    let mut set = world(LONG_PATH, 256 << 20);
    let server = set.server;
    set.shards[1].tcp_entry(server).unwrap().tcb.set_recv_buffer(START);
    assert_eq!(set.run(Duration::from_secs(2), usize::MAX), START);
    let mut poor = world(LONG_PATH, 4 << 20);
    assert_eq!(poor.run(Duration::from_secs(2), usize::MAX), START);
}
