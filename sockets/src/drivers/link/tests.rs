use std::collections::VecDeque;

use fulmar_stack::base::{
    Counter, Counters, DropReason, Duration, Gso, GsoKind, Instant, Offload, OwnerKey,
};
use fulmar_stack::device::{Burst, Device, Packet, offload};
use fulmar_stack::mbuf::{Pool, PoolConfig, Purpose};
use fulmar_stack::wire::checksum::{Sum, checksum};
use proptest::prelude::*;

use super::*;
use crate::drivers::sys::{is_readable, wait_readable};

const NOW: Instant = Instant::ZERO;

fn pool() -> Pool {
    Pool::new(PoolConfig::with_budget(32 << 20)).unwrap()
}

fn packet(pool: &mut Pool, bytes: &[u8]) -> Packet {
    let mut chain = pool.alloc_chain(bytes.len(), 0, Purpose::Send).unwrap();
    chain.copy_from(0, bytes);
    Packet::new(chain)
}

/// A whole host as far as a device is concerned.
struct Host {
    pool: Pool,
    burst: Burst,
    counters: Counters,
}

impl Host {
    fn new() -> Host {
        Host { pool: pool(), burst: Burst::with_capacity(64), counters: Counters::default() }
    }

    fn send(&mut self, d: &mut impl Device, now: Instant, p: Packet) -> usize {
        self.burst.push(p).unwrap();
        let taken = d.tx_burst(now, &mut self.pool, &mut self.burst, &mut self.counters);
        self.burst.clear(&mut self.pool);
        taken
    }

    fn send_bytes(&mut self, d: &mut impl Device, now: Instant, bytes: &[u8]) -> usize {
        let p = packet(&mut self.pool, bytes);
        self.send(d, now, p)
    }

    fn receive(&mut self, d: &mut impl Device, now: Instant) -> Vec<Packet> {
        d.rx_burst(now, &mut self.pool, &mut self.burst, 64, &mut self.counters);
        std::iter::from_fn(|| self.burst.pop_front()).collect()
    }
}

/// Ethernet, IPv4, TCP with timestamps; the checksum still partial.
fn super_frame(pool: &mut Pool, payload: usize) -> Packet {
    let mut b = vec![0u8; 12];
    b.extend([0x08, 0x00, 0x45, 0]);
    b.extend(((52 + payload) as u16).to_be_bytes());
    b.extend([0, 1, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
    let sum = checksum(&b[14..34]);
    b[24..26].copy_from_slice(&sum.to_be_bytes());
    b.extend([0, 80, 0, 90, 0, 0, 0, 1, 0, 0, 0, 1, 0x80, 0x18, 1, 0, 0, 0, 0, 0]);
    b.extend([1, 1, 8, 10, 0, 0, 0, 1, 0, 0, 0, 2]);
    let mut pseudo = Sum::new();
    let ip = |last| std::net::Ipv4Addr::new(10, 0, 0, last).into();
    pseudo.add_pseudo(ip(1), ip(2), 6, (32 + payload) as u32);
    b[50..52].copy_from_slice(&pseudo.fold().to_be_bytes());
    b.extend((0..payload).map(|i| i as u8));
    let gso = Gso { kind: GsoKind::TcpV4, segment_bytes: 1000, header_bytes: 66, ecn: false };
    let offload = Offload {
        needs_csum: true,
        csum_start: 34,
        csum_offset: 16,
        csum_valid: false,
        gso: (payload > 1000).then_some(gso),
    };
    Packet { offload, ..packet(pool, &b) }
}

#[test]
fn frames_pass_by_ownership_and_their_memory_returns_to_its_pool() {
    let (mut a, mut b) = pair(&LinkConfig::default()).unwrap();
    let (mut left, mut right) = (Host::new(), Host::new());
    let p = super_frame(&mut left.pool, 20_000);
    let (address, sent) = (p.chain.front().unwrap().as_slice().as_ptr(), p.chain.to_vec());
    assert_eq!(left.send(&mut a, NOW, p), 1);
    let got = right.receive(&mut b, NOW).remove(0);
    assert_eq!(got.chain.front().unwrap().as_slice().as_ptr(), address);
    assert!(got.chain.to_vec() == sent && got.is_checksum_trusted());
    assert_eq!(got.wire_packets(), 20);
    right.pool.free(got.chain);
    left.pool.drain_remote();
    assert_eq!(left.pool.outstanding(), 0);
    assert_eq!(left.counters.value(Counter::TxPackets), 20);
    assert_eq!(right.counters.value(Counter::RxFrames), 1);
}

proptest! {
    #[test]
    fn the_ring_agrees_with_a_bounded_queue(
        ops in proptest::collection::vec((any::<bool>(), 1usize..6, 20usize..1500), 1..120),
    ) {
        let config = LinkConfig { ring_pkts: 8, ring_bytes: 6000, ..LinkConfig::default() };
        let (mut a, mut b) = pair(&config).unwrap();
        let (mut left, mut right) = (Host::new(), Host::new());
        let mut model: VecDeque<Vec<u8>> = VecDeque::new();
        for (serial, (is_send, count, bytes)) in ops.into_iter().enumerate() {
            if is_send {
                let frame = |i: usize| vec![(serial * 7 + i) as u8; bytes];
                for i in 0..count {
                    let p = packet(&mut left.pool, &frame(i));
                    left.burst.push(p).unwrap();
                }
                let taken = a.tx_burst(NOW, &mut left.pool, &mut left.burst, &mut left.counters);
                let mut expected = 0;
                let mut held: usize = model.iter().map(Vec::len).sum();
                while expected < count && model.len() < 8 && (model.is_empty() || held + bytes <= 6000) {
                    model.push_back(frame(expected));
                    held += bytes;
                    expected += 1;
                }
                prop_assert_eq!(taken, expected);
                prop_assert_eq!(left.burst.len(), count - taken);
                left.burst.clear(&mut left.pool);
            } else {
                b.rx_burst(NOW, &mut right.pool, &mut right.burst, count, &mut right.counters);
                prop_assert_eq!(right.burst.len(), count.min(model.len()));
                while let Some(p) = right.burst.pop_front() {
                    prop_assert_eq!(Some(p.chain.to_vec()), model.pop_front());
                    right.pool.free(p.chain);
                }
            }
        }
    }
}

#[test]
fn a_sleeper_is_woken_once_and_only_when_armed() {
    let (mut a, mut b) = pair(&LinkConfig::default()).unwrap();
    let (mut left, mut right) = (Host::new(), Host::new());
    let fd = b.wake_fd().unwrap().fd;
    left.send_bytes(&mut a, NOW, &[0; 60]);
    assert!(!is_readable(fd), "not armed");
    assert!(!b.arm(), "a frame waits already");
    right.receive(&mut b, NOW);
    assert!(b.arm());
    left.send_bytes(&mut a, NOW, &[0; 60]);
    left.send_bytes(&mut a, NOW, &[0; 60]);
    assert!(is_readable(fd));
    assert_eq!(a.stats().wakes, 1);
    b.disarm();
    assert!(!is_readable(fd));
}

#[test]
fn a_blocked_sender_is_woken_when_the_ring_is_half_empty() {
    let config = LinkConfig { ring_pkts: 4, ..LinkConfig::default() };
    let (mut a, mut b) = pair(&config).unwrap();
    let (mut left, mut right) = (Host::new(), Host::new());
    let taken: usize = (0..6).map(|_| left.send_bytes(&mut a, NOW, &[0; 60])).sum();
    assert_eq!(taken, 4);
    assert!(a.arm(), "nothing to receive and no space to send");
    b.rx_burst(NOW, &mut right.pool, &mut right.burst, 1, &mut right.counters);
    assert!(!is_readable(a.wake_fd().unwrap().fd));
    b.rx_burst(NOW, &mut right.pool, &mut right.burst, 1, &mut right.counters);
    assert!(is_readable(a.wake_fd().unwrap().fd));
    a.disarm();
    assert_eq!(left.send_bytes(&mut a, NOW, &[0; 60]), 1);
}

#[test]
fn the_readiness_check_sees_frames_and_space_for_a_blocked_sender() {
    let config = LinkConfig { ring_pkts: 4, ..LinkConfig::default() };
    let (mut a, mut b) = pair(&config).unwrap();
    let (mut here, mut there) = (Host::new(), Host::new());
    let owner = OwnerKey::new([0; OwnerKey::WORDS]);
    let [sender, receiver] = [&mut a, &mut b].map(|end| end.attach(&owner).peek.unwrap());
    assert!(!receiver.is_pending());
    for _ in 0..4 {
        assert_eq!(here.send_bytes(&mut a, NOW, &[1; 60]), 1);
    }
    assert!(receiver.is_pending());
    assert!(!sender.is_pending(), "it is not blocked yet");
    assert_eq!(here.send_bytes(&mut a, NOW, &[1; 60]), 0);
    assert!(!sender.is_pending(), "there is no space");
    for p in there.receive(&mut b, NOW) {
        there.pool.free(p.chain);
    }
    assert!(!receiver.is_pending());
    assert!(sender.is_pending());
    assert_eq!(here.send_bytes(&mut a, NOW, &[1; 60]), 1);
    assert!(!sender.is_pending(), "it has sent what had no space");
}

#[test]
fn a_sender_whose_peer_went_away_before_it_armed_does_not_sleep() {
    let (mut a, b) = pair(&LinkConfig { ring_pkts: 1, ..LinkConfig::default() }).unwrap();
    let mut left = Host::new();
    let taken: usize = (0..2).map(|_| left.send_bytes(&mut a, NOW, &[0; 60])).sum();
    assert_eq!(taken, 1);
    drop(b);
    assert!(!a.arm());
    assert_eq!(left.send_bytes(&mut a, NOW, &[0; 60]), 1);
    assert!(a.arm());
}

#[test]
fn frames_to_a_stack_that_is_gone_are_counted() {
    let (mut a, b) = pair(&LinkConfig::default()).unwrap();
    let mut left = Host::new();
    assert_eq!(a.lost(), None);
    left.send_bytes(&mut a, NOW, &[0; 60]);
    assert!(a.arm());
    drop(b);
    assert!(is_readable(a.wake_fd().unwrap().fd));
    a.disarm();
    assert!(a.arm(), "an idle stack may sleep although its peer is gone");
    assert_eq!(a.lost(), Some(libc::EPIPE));
    assert_eq!(left.send_bytes(&mut a, NOW, &[0; 60]), 1);
    assert_eq!(left.counters.drops(DropReason::DeviceGone), 1);
    left.pool.drain_remote();
    assert_eq!(left.pool.outstanding(), 0);
}

#[test]
fn a_frame_above_the_mtu_is_dropped_and_counted() {
    let (mut a, mut b) = pair(&LinkConfig::default()).unwrap();
    let (mut left, mut right) = (Host::new(), Host::new());
    assert_eq!(left.send_bytes(&mut a, NOW, &[0; 1515]), 1);
    assert!(right.receive(&mut b, NOW).is_empty());
    assert_eq!(left.counters.drops(DropReason::FrameTooBig), 1);
}

#[test]
fn two_threads_lose_and_reorder_nothing() {
    exchange(&LinkConfig { ring_pkts: 16, ..LinkConfig::default() });
    exchange(&LinkConfig { ring_bytes: 64, ..LinkConfig::default() });
}

fn exchange(config: &LinkConfig) {
    const FRAMES: u32 = 20_000;
    let (mut a, mut b) = pair(config).unwrap();
    let sender = std::thread::spawn(move || {
        let mut left = Host::new();
        let mut next = 0;
        while next < FRAMES || !left.burst.is_empty() {
            while next < FRAMES && !left.burst.is_full() {
                let p = packet(&mut left.pool, &next.to_be_bytes());
                left.burst.push(p).unwrap();
                next += 1;
            }
            a.tx_burst(NOW, &mut left.pool, &mut left.burst, &mut left.counters);
            if !left.burst.is_empty() && a.arm() {
                wait_readable(a.wake_fd().unwrap().fd);
            }
            a.disarm();
            left.pool.drain_remote();
        }
        (a, left)
    });
    let mut right = Host::new();
    let mut expected = 0;
    while expected < FRAMES {
        let frames = right.receive(&mut b, NOW);
        if frames.is_empty() && b.arm() {
            wait_readable(b.wake_fd().unwrap().fd);
        }
        b.disarm();
        for p in frames {
            assert_eq!(p.chain.to_vec(), expected.to_be_bytes());
            right.pool.free(p.chain);
            expected += 1;
        }
    }
    let (_a, mut left) = sender.join().unwrap();
    left.pool.drain_remote();
    assert_eq!(left.pool.outstanding(), 0);
}

/// Sends `count` numbered frames, one per millisecond, and lists the arriving frames with their times.
fn run(seed: u64, how: &Impairments, count: u16) -> (Vec<(u64, Vec<u8>)>, Counters) {
    let (mut a, mut b) = sim_pair(seed, how, &LinkConfig::default());
    let (mut left, mut right) = (Host::new(), Host::new());
    let mut arrivals = Vec::new();
    let mut drain = |now: Instant, b: &mut SimLink| {
        while let Some(due) = b.next_deadline().filter(|d| *d <= now) {
            for p in right.receive(b, due) {
                arrivals.push((due.as_nanos(), p.chain.to_vec()));
                right.pool.free(p.chain);
            }
        }
    };
    for i in 0..count {
        let now = Instant::from_millis(u64::from(i));
        drain(now, &mut b);
        left.send_bytes(&mut a, now, &[&i.to_be_bytes()[..], &[0; 100]].concat());
    }
    drain(Instant::FAR_FUTURE, &mut b);
    (arrivals, left.counters)
}

fn rough() -> Impairments {
    Impairments {
        delay: Duration::from_millis(5),
        jitter: Duration::from_micros(300),
        loss: 0.1,
        reorder: 0.1,
        reorder_delay: Duration::from_millis(3),
        duplicate: 0.1,
        ..Impairments::default()
    }
}

#[test]
fn the_same_seed_gives_the_same_run_and_another_seed_another() {
    let (first, again) = (run(1, &rough(), 500), run(1, &rough(), 500));
    assert_eq!(first.0, again.0);
    assert_ne!(first.0, run(2, &rough(), 500).0);
}

#[test]
fn losses_duplicates_and_reordering_happen_about_as_often_as_asked() {
    let (arrivals, counters) = run(3, &rough(), 2000);
    let lost = counters.drops(DropReason::Injected);
    assert!((120..280).contains(&lost), "{lost}");
    let number = |f: &[u8]| u16::from_be_bytes([f[0], f[1]]);
    let mut seen = std::collections::BTreeMap::new();
    arrivals.iter().for_each(|(_, f)| *seen.entry(number(f)).or_insert(0) += 1);
    assert_eq!(seen.len() as u64, 2000 - lost);
    let twice = seen.values().filter(|n| **n == 2).count();
    assert!((110..260).contains(&twice), "{twice}");
    let late = arrivals.windows(2).filter(|w| number(&w[1].1) < number(&w[0].1)).count();
    assert!(late > 50, "{late}");
}

#[test]
fn a_perfect_wire_delivers_in_order_after_the_delay() {
    let delay = Duration::from_millis(7);
    let (arrivals, counters) = run(4, &Impairments { delay, ..Impairments::default() }, 100);
    let times: Vec<u64> = arrivals.iter().map(|a| a.0).collect();
    assert_eq!(times, (0..100).map(|i| (i + 7) * 1_000_000).collect::<Vec<u64>>());
    assert_eq!(counters.total_drops(), 0);
}

#[test]
fn a_limited_rate_spaces_frames_and_its_queue_overflows() {
    let how =
        Impairments { rate_bps: Some(8_000_000), queue_bytes: 1000, ..Impairments::default() };
    let (mut a, mut b) = sim_pair(5, &how, &LinkConfig::default());
    let (mut left, mut right) = (Host::new(), Host::new());
    // 476 bytes and 24 of overhead take 500 µs at one byte per microsecond.
    let taken: usize = (0..5).map(|_| left.send_bytes(&mut a, NOW, &[0; 476])).sum();
    assert_eq!(taken, 5);
    let mut times = Vec::new();
    while let Some(due) = b.next_deadline() {
        times.push(due.as_nanos() / 1000);
        assert_eq!(right.receive(&mut b, due).len(), 1);
    }
    assert_eq!(times, [500, 1000, 1500]);
    assert_eq!(left.counters.drops(DropReason::TxQueueFull), 2);
}

#[test]
fn one_packet_of_a_corrupted_super_frame_fails_its_checksum() {
    let how = Impairments { corrupt: 1.0, ..Impairments::default() };
    for seed in 0..40 {
        let (mut a, mut b) = sim_pair(seed, &how, &LinkConfig::default());
        let (mut left, mut right) = (Host::new(), Host::new());
        let p = super_frame(&mut left.pool, 10_000);
        let held = left.pool.clone_range(&p.chain, 0, p.chain.len()).unwrap();
        let before = held.to_vec();
        left.send(&mut a, NOW, p);
        let got = right.receive(&mut b, NOW);
        assert_eq!(got.len(), 10);
        assert!(got.iter().all(|p| p.offload == Offload::default()));
        assert_eq!(got.iter().filter(|p| !offload::verify(p)).count(), 1, "seed {seed}");
        assert!(held.to_vec() == before, "the sender's own bytes were changed");
    }
}

#[test]
fn super_frames_are_cut_as_often_as_asked() {
    let how = Impairments { cut: 0.5, ..Impairments::default() };
    let (mut a, mut b) = sim_pair(9, &how, &LinkConfig::default());
    let (mut left, mut right) = (Host::new(), Host::new());
    let mut whole = 0;
    for _ in 0..200 {
        let p = super_frame(&mut left.pool, 3000);
        left.send(&mut a, NOW, p);
        let got = right.receive(&mut b, NOW);
        assert!(got.len() == 1 || got.len() == 3);
        assert!(got.iter().all(offload::verify));
        whole += usize::from(got.len() == 1);
        got.into_iter().for_each(|p| right.pool.free(p.chain));
    }
    assert!((70..130).contains(&whole), "{whole}");
}
