//! Payload that the hardware places is the payload that was sent, in memory of its own flow.

use std::net::SocketAddr;

use fulmar_stack::base::{EtherAddr, SeqNum};
use fulmar_stack::device::{Device, DirectPlacement};
use fulmar_stack::mbuf::{PostedBuf, RecvBuf};
use proptest::prelude::*;

use super::*;
use crate::frame::{Headers, Transport};
use crate::tests::{Host, Spec};
use crate::{SimConfig, pair, pattern};

const START: Instant = Instant::from_millis(1000);

fn flow(port: u16) -> FlowKey {
    let at = |host: u8, port: u16| SocketAddr::from(([10, 9, 0, host], port));
    FlowKey::new(at(2, 80), at(1, port))
}

fn hosts(change: impl Fn(SimConfig) -> SimConfig) -> (Host, Host) {
    let config =
        |n| change(SimConfig { ether: EtherAddr([2, 0, 0, 0, 0, n]), ..SimConfig::default() });
    let [(a, _), (b, _)] = pair(config(0x51), config(0x52)).unwrap();
    (Host::new(a), Host::new(b))
}

fn post(b: &mut Host, port: u16, next_seq: u32, sizes: [usize; 2]) -> Vec<PostedBuf> {
    let mut ranges = WritableRanges::default();
    let mut holds = Vec::new();
    for bytes in sizes {
        let mut hold = RecvBuf::with_capacity(bytes).post();
        ranges.push(hold.writable_range(0).unwrap()).unwrap();
        holds.push(hold);
    }
    drop(b.nic.revoke(&flow(port)));
    b.nic.place(flow(port), SeqNum(next_seq), ranges).unwrap();
    holds
}

/// What the stack sees of a frame: its flow's port, its number, its payload and how much of that is
/// placed.
fn read(b: &mut Host, now: Instant) -> Vec<(u16, u32, Vec<u8>, usize)> {
    let mut seen = Vec::new();
    for p in b.receive(now) {
        let bytes = p.chain.to_vec();
        let s = Headers::parse(&bytes, bytes.len()).unwrap();
        let Transport::Tcp(h) = s.transport else { panic!("not TCP") };
        assert!(p.is_checksum_trusted());
        let placed = p.chain.iter().filter(|m| m.placed().is_some()).map(|m| m.len()).sum();
        seen.push((h.src_port, h.seq.0, bytes[s.payload_at..].to_vec(), placed));
        b.pool.free(p.chain);
    }
    seen
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// The model: the stream. Flows, gaps, pushes, full buffers and new ones as they come.
    #[test]
    fn every_byte_comes_once_whether_it_was_placed_or_not(
        aggregates in any::<bool>(),
        small_buffers in any::<bool>(),
        segments in proptest::collection::vec((1usize..1400, 0u8..10), 1..60),
        sizes in proptest::array::uniform2(1usize..9000),
    ) {
        let rx_buffer_bytes = if small_buffers { 2048 } else { 65_536 };
        let (mut a, mut b) = hosts(|c| SimConfig {
            tso: None, lro: c.lro.filter(|_| aggregates), rx_buffer_bytes, ..c
        });
        let mut now = START;
        let mut holds = post(&mut b, 1000, 0, sizes);
        let (mut seq, mut expected, mut placed) = (0u32, 0u32, 0);
        for (bytes, odd) in segments {
            let flags = if odd == 1 { 0x18 } else { 0x10 };
            let ports = if odd == 2 { (1001, 80) } else { (1000, 80) };
            let spec = Spec { flags, ports, ..Spec::tcp(seq) };
            let mut payload = vec![0; bytes];
            pattern::fill(u64::from(seq), &mut payload);
            let p = spec.packet(&mut a.pool, &payload, 2000);
            a.send(now, p);
            if ports.0 == 1000 {
                seq += bytes as u32;
            }
            if odd < 5 {
                continue;
            }
            now = now + PAUSE;
            for (port, at, payload, n) in read(&mut b, now) {
                prop_assert_eq!(pattern::wrong_bytes(u64::from(at), &payload), 0);
                prop_assert!(port == 1000 || n == 0);
                if port == 1000 {
                    prop_assert_eq!(at, expected);
                    expected += payload.len() as u32;
                    placed += n;
                }
            }
            // All that has landed was read, so this is what comes next.
            if odd == 9 {
                holds = post(&mut b, 1000, expected, sizes);
            }
        }
        while expected < seq {
            now = now + PAUSE;
            for (port, at, payload, n) in read(&mut b, now) {
                if port == 1000 {
                    prop_assert_eq!((at, pattern::wrong_bytes(u64::from(at), &payload)), (expected, 0));
                    expected += payload.len() as u32;
                }
                placed += n;
            }
        }
        let ranges = b.nic.revoke(&flow(1000)).bytes();
        prop_assert!(ranges <= sizes[0] + sizes[1]);
        prop_assert_eq!(b.nic.stats().placed_bytes, placed as u64);
        drop(holds);
        drop(read(&mut b, now + PAUSE));
        prop_assert!(a.comes_home() && b.comes_home());
    }
}

#[test]
fn bytes_that_do_not_fit_the_posted_memory_follow_it() {
    let (mut a, mut b) = hosts(|c| c);
    let mut payload = vec![0; 40_000];
    pattern::fill(0, &mut payload);
    let holds = post(&mut b, 1000, 0, [10_000, 5_000]);
    let p = Spec::tcp(0).packet(&mut a.pool, &payload, 1448);
    a.send(START, p);
    let seen = read(&mut b, START);
    assert!(matches!(&seen[..], [(1000, 0, all, 15_000)] if *all == payload));
    let filled: Vec<RecvBuf> =
        holds.into_iter().map(|h| h.release(usize::MAX).expect("nobody reads it")).collect();
    assert!(filled[0][..] == payload[..10_000] && filled[1][..] == payload[10_000..15_000]);
    let stats = b.nic.stats();
    assert_eq!((stats.place_hits, stats.placed_bytes, stats.place_misses), (1, 15_000, 0));
}

#[test]
fn the_next_frame_waits_a_moment_for_a_new_buffer_and_no_longer() {
    let (mut a, mut b) = hosts(|c| c);
    for round in 0..2 {
        let at = START + PAUSE * 10 * round;
        let first = 20_000 * round;
        let holds = post(&mut b, 1000, first, [5_000, 5_000]);
        for i in 0..4 {
            let p = Spec::tcp(first + 5000 * i).packet(&mut a.pool, &[7; 5000], 1448);
            a.send(at, p);
        }
        assert_eq!(read(&mut b, at).len(), 1, "the first buffer is full");
        let early = b.nic.next_deadline().expect("frames wait");
        assert!(early > at && early <= at + PAUSE);
        assert_eq!(read(&mut b, at + PAUSE / 2).len(), 0);
        if round == 0 {
            // The host posts nothing: the second buffer is filled, and the rest arrives without placement.
            let placed =
                |s: Vec<(u16, u32, Vec<u8>, usize)>| s.iter().map(|s| s.3).collect::<Vec<_>>();
            assert_eq!(placed(read(&mut b, at + PAUSE)), [5000]);
            assert_eq!(placed(read(&mut b, at + PAUSE * 2)), [0, 0]);
        } else {
            drop(post(&mut b, 1000, first + 5000, [20_000, 1]));
            let seen = read(&mut b, at + PAUSE / 2);
            assert_eq!(seen.iter().map(|s| s.3).collect::<Vec<_>>(), [5000; 3]);
        }
        drop(holds);
    }
}

#[test]
fn a_sender_ahead_of_the_hint_waits_until_the_host_has_caught_up() {
    let (mut a, mut b) = hosts(|c| SimConfig { lro: None, ..c });
    let send = |a: &mut Host, i: u32| {
        let p = Spec::tcp(1000 * i).packet(&mut a.pool, &[7; 1000], 1448);
        a.send(START, p);
    };
    (0..3).for_each(|i| send(&mut a, i));
    // The frames land before anybody posts anything; the host takes one of them.
    let one = |b: &mut Host| {
        let Host { pool, burst, counters, nic } = b;
        nic.rx_burst(START, pool, burst, 1, counters);
        burst.clear(pool);
    };
    one(&mut b);
    let early = post(&mut b, 1000, 1000, [10_000, 10_000]);
    (3..6).for_each(|i| send(&mut a, i));
    one(&mut b);
    one(&mut b);
    assert_eq!(read(&mut b, START).len(), 0, "what came later waits on the wire");
    assert!(b.nic.next_deadline().is_some_and(|at| at == START + PAUSE));
    drop(early);
    let _holds = post(&mut b, 1000, 3000, [10_000, 10_000]);
    let seen = read(&mut b, START);
    assert_eq!(
        seen.iter().map(|s| (s.1, s.3)).collect::<Vec<_>>(),
        [(3000, 1000), (4000, 1000), (5000, 1000)]
    );
    // After a gap the hardware does not wait twice for the same hint.
    (7..9).for_each(|i| send(&mut a, i));
    assert_eq!(read(&mut b, START).len(), 0);
    assert_eq!(read(&mut b, START + PAUSE).len(), 2);
}

#[test]
fn a_nic_without_placement_has_none() {
    let (_, mut b) = hosts(|c| SimConfig { placement: false, ..c });
    assert!(b.nic.placement().is_none());
}

#[test]
fn four_pages_take_a_record() {
    let mut pods = Pods::new();
    let mut write = |address, bytes| pods.write(BufId { address, bytes, generation: 1 });
    // 64 KiB: 4 records, 1 MiB: 64, as in the published figures.
    assert_eq!((write(0x10000, 1 << 16), write(0x10000, 1 << 20)), (4, 64));
    assert_eq!((write(0x10800, 0x1000), write(0x10000, 1), write(0, 0)), (1, 1, 0));
    assert_eq!(write(0x10000, 1 << 40), PODS);
}
