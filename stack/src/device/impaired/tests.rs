use crate::base::{Counter, DropReason};

use super::*;
use crate::device::Packet;
use crate::device::testing::{Mirror, frame, packet, place, pool};

struct Rig {
    device: Impaired<Mirror>,
    pool: Pool,
    burst: Burst,
    counters: Counters,
}

impl Rig {
    fn new(seed: u64, tx: &Impairments, rx: &Impairments) -> Rig {
        Rig {
            device: Impaired::new(Mirror::new(), seed, tx, rx),
            pool: pool(),
            burst: Burst::with_capacity(256),
            counters: Counters::default(),
        }
    }

    fn send(&mut self, ms: u64, p: Packet) {
        self.burst.push(p).unwrap();
        let now = Instant::from_millis(ms);
        let n = self.device.tx_burst(now, &mut self.pool, &mut self.burst, &mut self.counters);
        assert_eq!(n, 1);
    }

    fn receive(&mut self, ms: u64) -> Vec<Packet> {
        let now = Instant::from_millis(ms);
        let (pool, counters) = (&mut self.pool, &mut self.counters);
        self.device.rx_burst(now, pool, &mut self.burst, 256, counters);
        std::iter::from_fn(|| self.burst.pop_front()).collect()
    }
}

fn rough() -> Impairments {
    Impairments {
        loss: 0.1,
        duplicate: 0.1,
        reorder: 0.2,
        reorder_pkts: 4,
        reorder_delay: Duration::from_millis(5),
        delay: Duration::from_millis(3),
        ..Impairments::default()
    }
}

/// Sends numbered frames, one per millisecond, and returns the outgoing frames with their times.
fn run(seed: u64, tx: &Impairments, rx: &Impairments) -> (Vec<(u64, u16)>, Rig) {
    let mut rig = Rig::new(seed, tx, rx);
    let mut log = Vec::new();
    for ms in 0..600u64 {
        if ms < 500 {
            let p = packet(&mut rig.pool, &(ms as u16).to_be_bytes());
            rig.send(ms, p);
        }
        for p in rig.receive(ms) {
            let bytes = p.chain.to_vec();
            log.push((ms, u16::from_be_bytes([bytes[0], bytes[1]])));
            rig.pool.free(p.chain);
        }
    }
    (log, rig)
}

#[test]
fn the_same_seed_gives_the_same_trouble_and_another_seed_another() {
    let log = run(1, &rough(), &rough()).0;
    assert_eq!(log, run(1, &rough(), &rough()).0);
    assert_ne!(log, run(2, &rough(), &rough()).0);
}

#[test]
fn without_rates_frames_pass_untouched_and_in_order() {
    let (log, rig) = run(1, &Impairments::default(), &Impairments::default());
    assert_eq!(log, (0..500).map(|n| (u64::from(n), n)).collect::<Vec<_>>());
    let untouched = PathCounts { passed: 500, ..PathCounts::default() };
    assert_eq!(rig.device.counts(), (untouched, untouched));
    assert_eq!(rig.device.next_deadline(), None);
}

#[test]
fn every_packet_is_delivered_lost_or_duplicated_and_counted() {
    let (log, rig) = run(5, &rough(), &Impairments::default());
    let (tx, rx) = rig.device.counts();
    assert_eq!(log.len() as u64, 500 - tx.lost + tx.duplicated);
    assert_eq!(rig.counters.drops(DropReason::Injected), tx.lost);
    assert_eq!(rx, PathCounts { passed: rx.passed, ..PathCounts::default() });
    assert!((25..80).contains(&tx.lost) && (25..80).contains(&tx.duplicated), "{tx:?}");
    assert!((60..140).contains(&tx.reordered), "{tx:?}");
    assert!(log.windows(2).any(|w| w[1].1 < w[0].1));
    let (pool, drained) = (rig.pool, rig.device);
    drop(drained);
    assert_eq!(pool.outstanding(), 0);
}

#[test]
fn a_held_packet_leaves_in_time_when_nothing_overtakes_it() {
    let held = Duration::from_millis(5);
    let rates = Impairments {
        reorder: 1.0,
        reorder_pkts: 4,
        reorder_delay: held,
        ..Impairments::default()
    };
    let mut rig = Rig::new(1, &rates, &Impairments::default());
    let p = packet(&mut rig.pool, &[1, 2]);
    rig.send(10, p);
    assert_eq!(rig.device.next_deadline(), Some(Instant::from_millis(15)));
    assert!(rig.receive(14).is_empty());
    assert_eq!(rig.receive(15).len(), 1);
    assert_eq!(rig.device.next_deadline(), None);
}

#[test]
fn delay_is_kept_in_both_directions() {
    let delay = |ms| Impairments { delay: Duration::from_millis(ms), ..Impairments::default() };
    let mut rig = Rig::new(1, &delay(4), &delay(6));
    let p = packet(&mut rig.pool, &[1, 2]);
    rig.send(0, p);
    assert!(rig.receive(3).is_empty());
    assert!(rig.receive(4).is_empty());
    assert_eq!(rig.device.next_deadline(), Some(Instant::from_millis(10)));
    assert_eq!(rig.receive(10).len(), 1);
}

#[test]
fn a_corrupted_packet_fails_its_checksum_and_shared_bytes_stay_whole() {
    for (v6, udp) in [(false, false), (false, true), (true, false), (true, true)] {
        for seed in 0..50 {
            let rates = Impairments { corrupt: 1.0, ..Impairments::default() };
            let mut rig = Rig::new(seed, &rates, &Impairments::default());
            let p = frame(&mut rig.pool, v6, udp, &[9; 300], 1000);
            let held = rig.pool.clone_range(&p.chain, 0, p.chain.len()).unwrap();
            let before = held.to_vec();
            rig.send(0, p);
            let got = rig.receive(0).remove(0);
            assert!(held.to_vec() == before);
            let after = got.chain.to_vec();
            let whole = {
                let mut copy = packet(&mut rig.pool, &before);
                copy.offload = frame(&mut rig.pool, v6, udp, &[9; 300], 1000).offload;
                offload::finish_checksum(&mut copy, &mut rig.pool).unwrap();
                copy.chain.to_vec()
            };
            let flipped: u32 = after.iter().zip(&whole).map(|(a, b)| (a ^ b).count_ones()).sum();
            assert_eq!(flipped, 1);
            assert!(!got.is_checksum_trusted());
            // IPv6 has fields that no checksum covers: version to hop limit without the length.
            let at = after.iter().zip(&whole).position(|(a, b)| a != b).unwrap();
            let is_covered = !v6 || !(14..22).contains(&at) || (18..21).contains(&at);
            assert!(!is_covered || !offload::verify(&got), "{v6} {udp} {seed} byte {at}");
        }
    }
}

#[test]
fn trouble_strikes_the_packets_of_received_super_frames() {
    let rates = Impairments { loss: 0.5, cut: 1.0, ..Impairments::default() };
    let mut rig = Rig::new(3, &Impairments::default(), &rates);
    let p = frame(&mut rig.pool, false, false, &[1; 40_000], 1000);
    rig.send(0, p);
    let got = rig.receive(0);
    let packets: usize = got.iter().map(Packet::wire_packets).sum();
    assert!((8..33).contains(&packets) && got.len() < packets, "{packets} in {}", got.len());
    assert!(got.iter().all(offload::verify));
    assert_eq!(rig.counters.drops(DropReason::Injected) as usize + packets, 40);
}

#[test]
fn arp_is_never_corrupted() {
    let rates = Impairments { corrupt: 1.0, ..Impairments::default() };
    let mut rig = Rig::new(3, &rates, &Impairments::default());
    let mut bytes = [0; 42];
    bytes[12..14].copy_from_slice(&[0x08, 0x06]);
    let p = packet(&mut rig.pool, &bytes);
    rig.send(0, p);
    assert_eq!(rig.receive(0)[0].chain.to_vec(), bytes);
}

#[test]
fn frames_that_the_device_behind_refuses_are_offered_again() {
    let mut rig = Rig::new(3, &Impairments::default(), &Impairments::default());
    rig.device.inner_mut().limit = 0;
    let p = packet(&mut rig.pool, &[1, 2]);
    rig.send(0, p);
    assert_eq!(rig.device.next_deadline(), Some(Instant::from_millis(1)));
    assert!(rig.receive(0).is_empty());
    rig.device.inner_mut().limit = 1;
    assert_eq!(rig.receive(1).len(), 1);
    assert_eq!(rig.counters.value(Counter::TxFrames), 1);
    assert_eq!(rig.device.next_deadline(), None);
}

#[test]
fn placement_is_refused_whatever_the_device_behind_says() {
    let mut rig = Rig::new(1, &Impairments::default(), &Impairments::default());
    assert_eq!(place(&mut Mirror::new(), 10), Some(Ok(())));
    assert_eq!(place(&mut rig.device, 10), None);
}

#[test]
fn a_path_without_a_limited_rate_holds_what_a_cable_sends_during_its_delay() {
    let held =
        |ms| held_pkts(&Impairments { delay: Duration::from_millis(ms), ..Default::default() });
    // 10 Gb/s in packets of 1,500 bytes.
    let sent = |ms: usize| ms * 10_000_000 / 8 / 1500;
    assert!(held(0) >= HELD_PKTS && held(5) > sent(5) && held(50) > sent(50));
    assert_eq!(held(3_600_000), MOST_HELD_PKTS);
}
