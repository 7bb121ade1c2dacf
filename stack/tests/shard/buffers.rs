//! The sizes of send and receive buffer over simulated paths: they follow the path, and not the queue in it.

use fulmar::internals::drivers::link::Impairments;
use fulmar_stack::base::Duration;
use fulmar_stack::shard::{Reserved, StackConfig};
use fulmar_stack::socket::Attempt;
use fulmar_testbed::connection::Connection;
use fulmar_testbed::stations::{self, config};
use std::task::Poll;

const START: usize = 1 << 20;
const TICK: Duration = Duration::from_millis(1);
const LONG_PATH: (u64, Duration) = (200_000_000, Duration::from_millis(50));

/// A connection over a path with the given bit rate, the given delay each way, and a large queue.
fn over((rate_bps, delay): (u64, Duration), config: impl Fn(u8) -> StackConfig) -> Connection {
    let rate_bps = Some(rate_bps);
    let how = Impairments { rate_bps, queue_bytes: 32 << 20, delay, ..Impairments::default() };
    Connection::new(1, &how, config)
}

/// A connection to a receiver with a pool of `budget` bytes, and its tick.
fn to_receiver(path: (u64, Duration), budget: usize) -> (Connection, Duration) {
    let tick = (path.1 / 50).max(Duration::from_micros(10));
    let config = |station| {
        let mut config = config(station, if station == 1 { budget } else { 256 << 20 });
        config.tcp.send_buffer_bytes = 16 << 20;
        config
    };
    (over(path, config), tick)
}

/// The sender fills its send buffer; the receiver takes so much each time, for so long. The receive buffer at
/// the end.
fn receive(
    (mut c, tick): (Connection, Duration),
    time: Duration,
    per_step: usize,
) -> (usize, Connection) {
    let end = c.world.now + time;
    while c.world.now < end {
        c.fill_send_buffer();
        c.world.step(tick);
        stations::read(&mut c.world.shards[1], c.world.now, c.server, per_step);
    }
    (c.tcb(1).recv_buffer(), c)
}

#[test]
fn on_a_long_path_the_receive_buffer_grows_until_the_path_is_full_and_no_further() {
    // 25 MB/s for 100 ms: the path holds 2.5 MB, the queue in it 32 MiB more.
    let c = to_receiver(LONG_PATH, 256 << 20);
    let (buffer, c) = receive(c, Duration::from_secs(4), usize::MAX);
    assert!(buffer >= 2_500_000, "{buffer} bytes do not fill the path");
    assert!(buffer <= 5_000_000, "{buffer} bytes feed the queue");
    assert_eq!(c.world.shards[1].counters().total_drops(), 0);
}

#[test]
fn on_a_local_path_the_receive_buffer_stays_in_the_cache() {
    // 5 GB/s for 40 microseconds: 200 kB.
    let c = to_receiver((40_000_000_000, Duration::from_micros(20)), 256 << 20);
    assert_eq!(receive(c, Duration::from_millis(40), usize::MAX).0, START);
}

#[test]
fn the_receive_buffer_does_not_grow_for_a_slow_reader_nor_when_it_is_set_nor_without_memory() {
    let slow = to_receiver(LONG_PATH, 256 << 20);
    // 4 KiB per millisecond: less than half of the window in a round trip.
    assert_eq!(receive(slow, Duration::from_secs(2), 4 << 10).0, START);
    let (mut set, tick) = to_receiver(LONG_PATH, 256 << 20);
    set.tcb(1).set_recv_buffer(START);
    assert_eq!(receive((set, tick), Duration::from_secs(2), usize::MAX).0, START);
    let poor = to_receiver(LONG_PATH, 4 << 20);
    assert_eq!(receive(poor, Duration::from_secs(2), usize::MAX).0, START);
}

/// A connection from a sender, over a path of 25 MB/s.
fn from_sender(one_way: Duration) -> Connection {
    over((200_000_000, one_way), |station| {
        let mut config = config(station, 256 << 20);
        config.tcp.recv_buffer_bytes = 16 << 20;
        config.tcp.send_buffer_bytes = START;
        config
    })
}

fn send_buffer(c: &mut Connection) -> usize {
    c.tcb(0).send_queue_ref().limit()
}

/// Writes whatever fits, for so long; returns the largest send buffer meanwhile.
fn write_greedily(c: &mut Connection, time: Duration) -> usize {
    let (end, mut largest) = (c.world.now + time, 0);
    while c.world.now < end {
        c.fill_send_buffer();
        c.world.step(TICK);
        c.take_all(1 << 20);
        largest = largest.max(send_buffer(c));
    }
    largest
}

#[test]
fn on_a_long_path_the_send_buffer_grows_to_about_twice_what_the_path_holds_and_no_further() {
    // 25 MB/s for 100 ms: the path holds 2.5 MB, the queue in it 32 MiB more.
    let mut c = from_sender(Duration::from_millis(50));
    let largest = write_greedily(&mut c, Duration::from_secs(4));
    assert!(largest >= 3_500_000, "{largest} bytes do not fill the path");
    assert!(largest <= 6_000_000, "{largest} bytes feed the queue");
    let info = c.tcb(0).info();
    assert_eq!(info.retransmits, 0);
    assert!(info.rtt < Duration::from_millis(260), "{:?} of queue", info.rtt);
}

#[test]
fn on_a_short_path_the_send_buffer_stays_as_it_was() {
    let mut c = from_sender(Duration::from_millis(2));
    assert_eq!(write_greedily(&mut c, Duration::from_secs(1)), START);
}

#[test]
fn a_send_buffer_that_the_user_has_set_stays_as_it_was() {
    let mut c = from_sender(Duration::from_millis(50));
    let set = c.tcb(0).set_send_buffer(START);
    assert_eq!(write_greedily(&mut c, Duration::from_secs(2)), set);
}

#[test]
fn a_writer_who_is_not_held_back_by_the_send_buffer_does_not_make_it_grow() {
    let mut c = from_sender(Duration::from_millis(50));
    for _ in 0..2000 {
        // 1 MB/s, less than the path takes and than the buffer allows.
        let step =
            c.world.shards[0].sosend(c.client).reserve(c.world.now, &[], 1000, Attempt::First);
        if let Ok(Poll::Ready(Reserved::Space(r))) = step {
            c.world.shards[0].sosend(c.client).commit(c.world.now, r);
        }
        c.world.step(TICK);
        c.take_all(1 << 20);
    }
    assert_eq!(send_buffer(&mut c), START);
}
