//! The size of the send buffer, over simulated paths: it follows the path and not the queue in it.

use fulmar_base::{Duration, Instant, SlotId};
use fulmar_drivers::link::{Impairments, LinkConfig, sim_pair};
use fulmar_shard::{ListenOptions, Reserved, Shard};
use fulmar_socket::{Attempt, Step};
use fulmar_testbed::stations::{at, config};

const START: usize = 1 << 20;
const TICK: Duration = Duration::from_millis(1);

struct World {
    now: Instant,
    shards: [Shard; 2],
    client: SlotId,
    server: SlotId,
}

/// A connection over a path of 200 Mbit/s (25 MB/s), with a queue that holds a great deal.
fn world(one_way: Duration) -> World {
    let how = Impairments {
        rate_bps: Some(200_000_000),
        queue_bytes: 32 << 20,
        delay: one_way,
        ..Impairments::default()
    };
    let (a, b) = sim_pair(1, &how, &LinkConfig::default());
    let now = Instant::from_millis(1000);
    let shard = |station, device| {
        let mut config = config(station, 256 << 20);
        config.tcp.recv_buffer_bytes = 16 << 20;
        config.tcp.send_buffer_bytes = START;
        Shard::new(config, Box::new(device), now).unwrap()
    };
    let mut shards = [shard(0, a), shard(1, b)];
    let listener = shards[1].tcp_listen(at(1, 80), ListenOptions::default()).unwrap();
    let client = shards[0].tcp_connect(now, at(1, 80), None).unwrap();
    let mut w = World { now, shards, client, server: client };
    for _ in 0..1000 {
        w.tick();
        if let Step::Done((id, _)) = w.shards[1].tcp_accept(listener).unwrap() {
            w.server = id;
            return w;
        }
    }
    panic!("not connected");
}

impl World {
    fn tick(&mut self) {
        self.now = self.now + TICK;
        for s in &mut self.shards {
            s.step(self.now, 1000);
        }
    }

    fn buffer(&mut self) -> usize {
        let entry = self.shards[0].tcp_entry(self.client).unwrap();
        entry.tcb.send_queue_ref().limit()
    }

    /// Writes whatever fits, for so long; returns the largest buffer meanwhile.
    fn write_greedily(&mut self, time: Duration) -> usize {
        let (end, mut largest) = (self.now + time, 0);
        while self.now < end {
            while let Ok(Step::Done(Reserved::Space(r))) =
                self.shards[0].tcp_reserve(self.now, self.client, &[], 64 << 10, Attempt::Retry)
            {
                self.shards[0].tcp_commit(self.now, self.client, r);
            }
            self.tick();
            while let Ok(Step::Done(chain)) = self.shards[1].tcp_take(self.server, 1 << 20) {
                self.shards[1].tcp_read_done(self.now, self.server, chain);
            }
            largest = largest.max(self.buffer());
        }
        largest
    }
}

#[test]
fn on_a_long_path_the_buffer_grows_to_about_twice_what_the_path_holds_and_no_further() {
    // 25 MB/s for 100 ms: the path holds 2.5 MB, the queue in it 32 MiB more.
    let mut w = world(Duration::from_millis(50));
    let largest = w.write_greedily(Duration::from_secs(4));
    assert!(largest >= 3_500_000, "{largest} bytes do not fill the path");
    assert!(largest <= 6_000_000, "{largest} bytes feed the queue");
    let info = w.shards[0].tcp_entry(w.client).unwrap().tcb.info();
    assert_eq!(info.retransmits, 0);
    assert!(info.rtt < Duration::from_millis(260), "{:?} of queue", info.rtt);
}

#[test]
fn on_a_short_path_the_buffer_stays_as_it_was() {
    let mut w = world(Duration::from_millis(2));
    assert_eq!(w.write_greedily(Duration::from_secs(1)), START);
}

#[test]
fn a_buffer_that_the_user_has_set_stays_as_it_was() {
    let mut w = world(Duration::from_millis(50));
    let set = w.shards[0].tcp_entry(w.client).unwrap().tcb.set_send_buffer(START);
    assert_eq!(w.write_greedily(Duration::from_secs(2)), set);
}

#[test]
fn a_writer_who_is_not_held_back_by_the_buffer_does_not_make_it_grow() {
    let mut w = world(Duration::from_millis(50));
    for _ in 0..2000 {
        // 1 MB/s, less than the path takes and than the buffer allows.
        let step = w.shards[0].tcp_reserve(w.now, w.client, &[], 1000, Attempt::First);
        if let Ok(Step::Done(Reserved::Space(r))) = step {
            w.shards[0].tcp_commit(w.now, w.client, r);
        }
        w.tick();
        while let Ok(Step::Done(chain)) = w.shards[1].tcp_take(w.server, 1 << 20) {
            w.shards[1].tcp_read_done(w.now, w.server, chain);
        }
    }
    assert_eq!(w.buffer(), START);
}
