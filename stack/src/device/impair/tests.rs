use proptest::prelude::*;

use super::*;
use crate::device::testing::{frame, packet, pool};

const MS: Duration = Duration::from_millis(1);

struct Rig {
    path: Path,
    pool: Pool,
    counters: Counters,
}

impl Rig {
    fn new(how: &Impairments) -> Rig {
        let path = Path::new(7, how, 100_000, Cuts::Shared);
        Rig { path, pool: pool(), counters: Counters::default() }
    }

    /// Sends one frame of `bytes` bytes.
    fn send(&mut self, at: Instant, bytes: usize) {
        let p = packet(&mut self.pool, &vec![0; bytes]);
        self.path.send(at, p, &mut self.pool, &mut self.counters);
    }

    /// What arrives until `at`, one microsecond after the other where something is due.
    fn arrivals(&mut self, until: Instant) -> Vec<Instant> {
        let mut times = Vec::new();
        while let Some(due) = self.path.next_due().filter(|due| *due <= until) {
            let p = self.path.pop_due(due, &mut self.pool, &mut self.counters).unwrap();
            self.pool.free(p.chain);
            times.push(due);
        }
        times
    }
}

fn at(ms: u64) -> Instant {
    Instant::from_millis(ms)
}

#[test]
fn a_bottleneck_spaces_packets_by_its_rate_and_drops_what_its_queue_does_not_take() {
    // 1,226 bytes and 24 of the wire at 10 Mb/s: one millisecond each.
    let rate =
        Impairments { rate_bps: Some(10_000_000), queue_bytes: 5 * 1250, ..Default::default() };
    let mut rig = Rig::new(&rate);
    (0..10).for_each(|_| rig.send(at(0), 1226));
    let times = rig.arrivals(at(1000));
    assert_eq!(times, (1..=6).map(at).collect::<Vec<_>>());
    assert_eq!(rig.path.counts().queue_drops, 4);
    assert_eq!(rig.counters.drops(DropReason::TxQueueFull), 4);
    assert_eq!(rig.path.counts().passed_ns, (1..=6).sum::<u64>() * 1_000_000);
}

#[test]
fn codel_lets_a_burst_pass_and_shortens_a_standing_queue_by_drops_that_come_ever_sooner() {
    let how = Impairments {
        rate_bps: Some(10_000_000),
        queue_bytes: 1 << 20,
        aqm: Aqm::CODEL,
        ..Default::default()
    };
    let mut rig = Rig::new(&how);
    (0..90).for_each(|_| rig.send(at(0), 1226));
    assert_eq!(rig.path.counts().queue_drops, 0, "a burst that is gone within the interval");

    // 20 milliseconds of standing queue, at the rate of the link from then on.
    let mut rig = Rig::new(&how);
    (0..20).for_each(|_| rig.send(at(0), 1226));
    let mut drops = Vec::new();
    for ms in 1..1000 {
        let before = rig.path.counts().queue_drops;
        rig.send(at(ms), 1226);
        if rig.path.counts().queue_drops > before {
            drops.push(ms);
        }
    }
    // RFC 8289 section 5: after an interval, then interval / sqrt(count) apart until the delay is below the target.
    // The first is dequeued 100 ms after the packet that was dequeued at 5 ms, and was enqueued 19 ms before.
    assert_eq!(drops[0], 86);
    let gaps: Vec<u64> = drops.windows(2).map(|w| w[1] - w[0]).collect();
    assert!((99..=102).contains(&gaps[0]) && (70..=73).contains(&gaps[1]), "{gaps:?}");
    assert!((57..=60).contains(&gaps[2]), "{gaps:?}");
    let waits = rig.path.counts();
    assert!(waits.queue_drops >= 14, "{waits:?}");
}

#[test]
fn an_aqm_marks_what_is_ecn_capable_and_drops_the_rest() {
    let above = Duration::ZERO;
    let how = Impairments {
        rate_bps: Some(10_000_000),
        aqm: Aqm::Step { above },
        ecn: true,
        ..Default::default()
    };
    for v6 in [false, true] {
        for ect in [0, 1, 2] {
            let mut rig = Rig::new(&how);
            for _ in 0..2 {
                let mut p = frame(&mut rig.pool, v6, false, &[5; 900], 1000);
                offload::finish_checksum(&mut p, &mut rig.pool).unwrap();
                set_ecn(&mut p, ect, v6);
                rig.path.send(at(0), p, &mut rig.pool, &mut rig.counters);
            }
            let mut got = Vec::new();
            while let Some(p) = rig.path.pop_due(at(1000), &mut rig.pool, &mut rig.counters) {
                got.push(p);
            }
            let counts = rig.path.counts();
            if ect == 0 {
                assert_eq!((got.len(), counts.queue_drops, counts.marked), (1, 1, 0));
                continue;
            }
            assert_eq!((got.len(), counts.queue_drops, counts.marked), (2, 0, 1));
            assert_eq!((ecn_of(&got[0], v6), ecn_of(&got[1], v6)), (ect, 3));
            assert!(got.iter().all(offload::verify), "the header checksum follows the mark");
        }
    }
}

fn ecn_of(p: &Packet, v6: bool) -> u8 {
    let bytes = p.chain.to_vec();
    if v6 { (bytes[15] >> 4) & 3 } else { bytes[15] & 3 }
}

fn set_ecn(p: &mut Packet, ect: u8, v6: bool) {
    let mut bytes = p.chain.to_vec();
    if v6 {
        bytes[15] |= ect << 4;
    } else {
        bytes[15] |= ect;
        bytes[24..26].fill(0);
        let sum = crate::wire::checksum::checksum(&bytes[14..34]);
        bytes[24..26].copy_from_slice(&sum.to_be_bytes());
    }
    p.chain.copy_from(0, &bytes);
}

#[test]
fn a_dropped_packet_takes_no_time_of_the_link() {
    let how = Impairments {
        rate_bps: Some(10_000_000),
        aqm: Aqm::Step { above: MS + MS / 2 },
        ..Default::default()
    };
    let mut rig = Rig::new(&how);
    (0..5).for_each(|_| rig.send(at(0), 1226));
    rig.send(at(1), 1226);
    assert_eq!(rig.arrivals(at(100)), [at(1), at(2), at(3)]);
    assert_eq!(rig.path.counts().queue_drops, 3);
}

#[test]
fn a_policer_lets_its_burst_pass_and_then_its_rate() {
    let policer = Policer { rate_bps: 10_000_000, burst_bytes: 10 * 1250 };
    let how = Impairments { policer: Some(policer), ..Default::default() };
    let mut rig = Rig::new(&how);
    (0..15).for_each(|_| rig.send(at(0), 1226));
    assert_eq!(rig.arrivals(at(0)).len(), 10);
    for ms in 1..=100 {
        (0..2).for_each(|_| rig.send(at(ms), 1226));
    }
    assert_eq!(rig.arrivals(at(100)).len(), 100);
    assert_eq!(rig.path.counts().queue_drops, 5 + 100);
}

/// Sends `packets` packets with the interval `apart`. Returns the share of lost packets and the mean length of a run of
/// losses.
fn losses(how: &Impairments, packets: u64, apart: Duration) -> (f64, f64) {
    let mut rig = Rig::new(how);
    let (mut runs, mut was_lost) = (0u32, false);
    for n in 0..packets {
        let (now, before) = (at(0) + apart * n as u32, rig.path.counts().lost);
        rig.send(now, 100);
        let is_lost = rig.path.counts().lost > before;
        runs += u32::from(is_lost && !was_lost);
        was_lost = is_lost;
        rig.arrivals(now);
    }
    let lost = rig.path.counts().lost as f64;
    (lost / packets as f64, lost / f64::from(runs.max(1)))
}

#[test]
fn losses_in_runs_are_as_many_and_as_long_as_asked_for() {
    for (loss, run) in [(0.02, 5.0), (0.3, 2.0), (0.5, 4.0)] {
        let how = Impairments { loss, loss_run_pkts: run, ..Default::default() };
        let (share, mean) = losses(&how, 200_000, Duration::ZERO);
        assert!((share / loss - 1.0).abs() < 0.08, "{loss} {run}: {share}");
        assert!((mean / run - 1.0).abs() < 0.08, "{loss} {run}: {mean}");
    }
    let all = Impairments { loss: 1.0, loss_run_pkts: 4.0, ..Default::default() };
    assert_eq!(losses(&all, 1000, Duration::ZERO).0, 1.0);
}

#[test]
fn a_run_of_losses_ends_after_ten_milliseconds() {
    let how = Impairments { loss: 0.2, loss_run_pkts: 4.0, ..Default::default() };
    let (share, mean) = losses(&how, 50_000, MS * 20);
    assert!((0.05..0.08).contains(&share) && mean < 1.2, "{share} {mean}");
}

#[test]
fn an_overtaken_packet_is_late_by_the_reordering_delay_at_the_most() {
    let how = Impairments {
        delay: MS * 150,
        reorder: 1.0,
        reorder_pkts: 1,
        reorder_delay: MS * 5,
        ..Default::default()
    };
    let mut rig = Rig::new(&how);
    rig.send(at(0), 100);
    rig.path.reorder = Chance::default();
    // The packet that overtakes it is sent long after.
    rig.send(at(100), 100);
    assert_eq!(rig.arrivals(at(1000)), [at(155), at(250)]);
}

#[test]
fn packets_that_wait_to_be_overtaken_count_as_held() {
    let how = Impairments { reorder: 1.0, reorder_pkts: 1000, ..Default::default() };
    let mut rig = Rig::new(&how);
    rig.path = Path::new(7, &how, 10, Cuts::Shared);
    (0..20).for_each(|_| rig.send(at(0), 100));
    assert_eq!((rig.path.held_frames(), rig.counters.drops(DropReason::TxQueueFull)), (10, 10));
}

#[test]
fn codel_does_not_strike_where_a_packet_takes_longer_than_its_target() {
    let aqm = Aqm::CODEL;
    let how =
        Impairments { rate_bps: Some(1_000_000), aqm, queue_bytes: 1 << 20, ..Default::default() };
    let mut rig = Rig::new(&how);
    // 12 ms each, and a second one always behind the one that is being sent.
    (0..500).for_each(|n| rig.send(at(n * 13), 1476));
    assert_eq!(rig.path.counts().queue_drops, 0);
}

#[test]
fn a_rate_beyond_all_sense_and_one_of_a_bit_do_not_overflow() {
    for rate_bps in [1, u64::MAX] {
        for aqm in [Aqm::DropTail, Aqm::CODEL] {
            let policer = Some(Policer { rate_bps, burst_bytes: u64::MAX });
            let queue_bytes = usize::MAX;
            let how = Impairments {
                rate_bps: Some(rate_bps),
                aqm,
                policer,
                queue_bytes,
                ..Default::default()
            };
            let mut rig = Rig::new(&how);
            (0..50).for_each(|n| rig.send(at(n * 1000), 1500));
            rig.arrivals(at(1_000_000));
        }
    }
}

#[test]
fn a_black_hole_swallows_large_packets_and_lets_small_ones_pass() {
    let mut rig = Rig::new(&Impairments { mtu: Some(1300), ..Default::default() });
    for bytes in [1314, 1315, 60] {
        rig.send(at(0), bytes);
    }
    assert_eq!(rig.arrivals(at(1)).len(), 2);
    assert_eq!((rig.path.counts().oversized, rig.counters.drops(DropReason::Injected)), (1, 1));
}

/// Super-frames sent over a path, cut in one of two ways: when each packet is due, its bytes, and the counters; also the
/// number of frames that arrived.
fn packets_of(
    (seed, how, cuts): (u64, &Impairments, Cuts),
    frames: &[(u64, usize, bool)],
) -> (Vec<(Instant, Vec<u8>)>, PathCounts, usize) {
    let mut rig = Rig::new(how);
    rig.path = Path::new(seed, how, 100_000, cuts);
    for (n, (us, bytes, v6)) in frames.iter().enumerate() {
        let p = frame(&mut rig.pool, *v6, false, &vec![n as u8; *bytes], 1000);
        rig.path.send(Instant::from_nanos(us * 1000), p, &mut rig.pool, &mut rig.counters);
    }
    let (mut all, mut arrived) = (Vec::new(), 0);
    let mut out = Burst::with_capacity(128);
    while let Some(due) = rig.path.next_due() {
        let p = rig.path.pop_due(due, &mut rig.pool, &mut rig.counters).unwrap();
        arrived += 1;
        offload::segment(p, &mut rig.pool, &mut out, &mut rig.counters).unwrap();
        while let Some(p) = out.pop_front() {
            all.push((due, p.chain.to_vec()));
            rig.pool.free(p.chain);
        }
    }
    assert_eq!(rig.pool.outstanding(), 0);
    (all, rig.path.counts(), arrived)
}

proptest! {
    #[test]
    fn packets_in_runs_meet_what_they_meet_one_by_one(
        seed: u64,
        rates in proptest::array::uniform4(prop_oneof![Just(0.0), 0.0..0.05, 0.0..0.9]),
        loss_run_pkts in prop_oneof![Just(1.0), 1.0..5.0],
        reorder_pkts in 0u32..60,
        delay_us in prop_oneof![Just(0u64), 0u64..3000],
        frames in proptest::collection::vec((0u64..3000, 1usize..60_000, any::<bool>()), 1..8),
    ) {
        let [loss, duplicate, reorder, corrupt] = rates;
        let delay = Duration::from_micros(delay_us);
        let how = Impairments {
            loss, loss_run_pkts, duplicate, reorder, reorder_pkts, corrupt, delay, cut: 1.0, ..Default::default()
        };
        let mut frames = frames;
        frames.sort_by_key(|f| f.0);
        let one_by_one = packets_of((seed, &how, Cuts::Own), &frames);
        let in_runs = packets_of((seed, &how, Cuts::Runs), &frames);
        prop_assert_eq!(one_by_one.1, in_runs.1);
        prop_assert!(one_by_one.0 == in_runs.0, "{} and {} packets", one_by_one.0.len(), in_runs.0.len());
        prop_assert!(in_runs.2 <= one_by_one.2);
    }
}

#[test]
fn a_super_frame_that_nothing_befalls_stays_whole_and_one_loss_cuts_it_in_two() {
    let sent = [(0, 40_000, false)];
    let how = Impairments { loss: 1e-9, cut: 1.0, ..Default::default() };
    let (packets, _, frames) = packets_of((1, &how, Cuts::Runs), &sent);
    assert_eq!((packets.len(), frames), (40, 1));
    let how = Impairments { loss: 0.02, ..how };
    let runs = (0..100).map(|seed| packets_of((seed, &how, Cuts::Runs), &sent));
    let (packets, _, frames) = runs.into_iter().find(|r| r.1.lost == 1).unwrap();
    assert_eq!((packets.len(), frames), (39, 2));
}

#[test]
fn behind_a_bottleneck_every_packet_is_a_frame() {
    let how = Impairments { rate_bps: Some(1_000_000_000), cut: 1.0, ..Default::default() };
    let (packets, _, frames) = packets_of((1, &how, Cuts::Runs), &[(0, 40_000, true)]);
    assert_eq!((packets.len(), frames), (40, 40));
}
