//! Shards on simulated NICs, on a virtual clock: nothing here waits or reads a clock, and every
//! buffer is freed.

use std::net::SocketAddr;

use fulmar_nic::{FarEnd, SimConfig, SimHandle, SimNic, pair, pattern, with_peer};
use fulmar_stack::base::{Counter, Duration, Instant, SlotId};
use fulmar_stack::mbuf::Purpose;
use fulmar_stack::shard::Shard;
use fulmar_testbed::stations::{self, ether};
use fulmar_testbed::world::{START, World};
use std::task::Poll;

const WRITE_BYTES: usize = 64 << 10;

fn shard(nic: SimNic) -> Shard {
    Shard::new(stations::config(0, 256 << 20), Box::new(nic), START).unwrap()
}

/// The port of the modelled peer.
fn peer() -> SocketAddr {
    stations::at(1, 9)
}

/// Writes up to 64 KiB of the pattern from `at` on; nothing while the send buffer is full.
fn write(shard: &mut Shard, now: Instant, id: SlotId, at: usize, total: usize) -> usize {
    let n = WRITE_BYTES.min(total - at);
    let mut bytes = vec![0; n];
    pattern::fill(at as u64, &mut bytes);
    stations::write(shard, now, id, &bytes).unwrap_or(0)
}

/// The next deadline; a little later if there is none.
fn next(now: Instant, shard: &Shard) -> Instant {
    shard
        .next_deadline()
        .unwrap_or(now)
        .max(now + Duration::from_micros(1))
        .min(now + Duration::from_millis(1))
}

fn used(shard: &mut Shard, p: Purpose) -> usize {
    shard.pool().drain_remote();
    shard.pool().stats().used_bytes[p as usize]
}

/// Sends to the modelled peer until it has everything; returns the handle and the time it took.
fn to_peer(config: SimConfig, total: usize) -> (SimHandle, Duration) {
    let far_end = FarEnd { verify: true, ..FarEnd::default() };
    let (nic, handle) = with_peer(SimConfig { far_end, ..config }).unwrap();
    let mut a = shard(nic);
    let (mut now, mut at) = (START, 0);
    let c = a.tcp_connect(now, peer(), None).unwrap();
    while handle.counts().peer_bytes_in < total as u64 {
        a.step(now, 1000);
        while handle.counts().peer_connections > 0 && at < total {
            match write(&mut a, now, c, at, total) {
                0 => break,
                n => at += n,
            }
        }
        now = next(now, &a);
        assert!(now < START + Duration::from_secs(60), "stuck at {at}");
    }
    let took = now.since(START);
    a.close(now, c);
    for _ in 0..100 {
        now = now + Duration::from_millis(10);
        a.step(now, 1000);
    }
    let left = [Purpose::Send, Purpose::Control].map(|p| used(&mut a, p));
    assert_eq!(left, [0, 0], "buffers are out");
    (handle, took)
}

#[test]
fn a_hundred_megabytes_reach_the_peer_and_every_buffer_comes_home() {
    const TOTAL: usize = 100 << 20;
    let (handle, _) = to_peer(SimConfig::default(), TOTAL);
    let c = handle.counts();
    assert_eq!(
        (c.peer_bytes_in, c.peer_wrong_bytes, c.peer_repeated_bytes_in),
        (TOTAL as u64, 0, 0)
    );
    assert_eq!(c.completions, c.tx_frames);
    // One crossing carries many packets.
    assert!(c.tx_packets > 20 * c.doorbells, "{c:?}");
}

#[test]
fn a_line_rate_is_kept_and_the_same_run_is_the_same_again() {
    const TOTAL: usize = 10 << 20;
    let config = || SimConfig {
        line_rate_bps: 10_000_000_000,
        delay: Duration::from_micros(10),
        ..SimConfig::default()
    };
    let (first, took) = to_peer(config(), TOTAL);
    // 1448 of 1538 bytes are payload: 10 MiB take 8.9 ms on the line.
    let least = Duration::from_nanos(TOTAL as u64 * 8 / 10 * 1538 / 1448);
    assert!(took >= least && took < least * 3, "{took:?} for at least {least:?}");
    let (again, took_again) = to_peer(config(), TOTAL);
    let (a, b) = (first.counts(), again.counts());
    assert_eq!(took, took_again);
    assert_eq!(
        (a.doorbells, a.tx_packets, a.peer_acks_out),
        (b.doorbells, b.tx_packets, b.peer_acks_out)
    );
}

#[test]
fn two_shards_with_small_rings_exchange_a_stream() {
    const TOTAL: usize = 8 << 20;
    let small = |last| SimConfig {
        ether: ether(last),
        tx_descriptors: 128,
        rx_buffers: 4,
        rx_small_buffers: 4,
        line_rate_bps: 40_000_000_000,
        ..SimConfig::default()
    };
    let [(near, _), (far, _)] = pair(small(1), small(2)).unwrap();
    let devices = [Box::new(near) as _, Box::new(far) as _];
    let mut w = World::new(devices, |n| stations::config(n, 256 << 20));
    let listener = w.listen(9);
    let [client, server] = w.connect(listener);
    let (mut at, mut got) = (0, 0);
    while got < TOTAL {
        at += write(&mut w.shards[0], w.now, client, at, TOTAL);
        w.advance(Duration::from_millis(1));
        while let Poll::Ready(chain) = w.shards[1].tcp_take(server, usize::MAX).unwrap() {
            for part in chain.slices() {
                assert_eq!(pattern::wrong_bytes(got as u64, part), 0, "after {got}");
                got += part.len();
            }
            w.shards[1].tcp_read_done(w.now, server, chain);
        }
        assert!(w.now < START + Duration::from_secs(60), "stuck at {at}, {got}");
    }
    (0..100).for_each(|_| w.step(Duration::from_millis(10)));
    let left = w.shards.each_mut().map(|s| used(s, Purpose::Send) + used(s, Purpose::Control));
    assert_eq!(left, [0, 0], "buffers are out");
}

#[test]
fn large_writes_leave_the_answers_until_a_quarter_of_the_buffer_is_in_use() {
    let (nic, handle) = with_peer(SimConfig::default()).unwrap();
    let (mut a, mut now) = (shard(nic), START);
    let c = a.tcp_connect(now, peer(), None).unwrap();
    // A connection that its congestion window does not limit, and whose buffer is empty again.
    let warm = 8 << 20;
    let mut at = 0;
    while handle.counts().peer_bytes_in < warm as u64 {
        a.step(now, 1000);
        while handle.counts().peer_connections > 0 && at < warm {
            match write(&mut a, now, c, at, warm) {
                0 => break,
                n => at += n,
            }
        }
        now = next(now, &a);
        assert!(now < START + Duration::from_secs(10), "stuck at {at}");
    }
    now = now + Duration::from_millis(1);
    a.step(now, 1000);
    let polls = |a: &Shard| a.counters().value(Counter::RxPolls);
    let (before, limit) = (polls(&a), a.sosend(c).space().unwrap());
    let end = at + limit / 4;
    while at + WRITE_BYTES <= end {
        at += write(&mut a, now, c, at, usize::MAX);
        assert_eq!(polls(&a), before, "a look at the device with {at} of {limit} bytes in use");
    }
    write(&mut a, now, c, at, usize::MAX);
    assert!(polls(&a) > before, "more than a quarter is in use");
}
