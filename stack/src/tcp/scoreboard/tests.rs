//! Model test: the scoreboard against one record per byte; and its bound.

use super::*;
use alloc::vec::Vec;
use proptest::prelude::*;

#[derive(Clone, Copy, Debug, PartialEq)]
struct Byte {
    sent_at: u64,
    sacked: bool,
    lost: bool,
    retransmitted: bool,
}

/// One record per byte in flight.
#[derive(Default)]
struct Model {
    una: u64,
    bytes: Vec<Byte>,
    fack: u64,
}

impl Model {
    fn end(&self) -> u64 {
        self.una + self.bytes.len() as u64
    }

    fn deliver(&mut self, from: u64, to: u64) -> (u64, bool) {
        let (mut count, mut reordered, fack) = (0, false, self.fack);
        for pos in from..to {
            let b = self.bytes[(pos - self.una) as usize];
            if !b.sacked {
                count += 1;
                reordered |= !b.retransmitted && pos + 1 < fack;
                self.fack = self.fack.max(pos + 1);
            }
        }
        (count, reordered)
    }

    fn lost(&self) -> Option<u64> {
        self.bytes.iter().position(|b| b.lost).map(|i| self.una + i as u64)
    }
}

#[derive(Clone, Debug)]
enum Op {
    Send(u64, u64),
    Ack(u64),
    Sack(u64, u64),
    Lose { newer_than: u64, window: u64 },
    Retransmit(u64),
    LoseTo(u64),
    LoseAll,
    Undo,
    Renege,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        8 => (1u64..60, 0u64..4).prop_map(|(n, wait)| Op::Send(n, wait)),
        3 => (0u64..80).prop_map(Op::Ack),
        8 => (0u64..400, 1u64..60).prop_map(|(at, n)| Op::Sack(at, n)),
        4 => (0u64..30, 0u64..10).prop_map(|(newer_than, window)| Op::Lose { newer_than, window }),
        5 => (1u64..30).prop_map(Op::Retransmit),
        1 => (0u64..200).prop_map(Op::LoseTo),
        1 => Just(Op::LoseAll),
        1 => Just(Op::Undo),
        1 => Just(Op::Renege),
    ]
}

fn apply(board: &mut Scoreboard, model: &mut Model, now: &mut u64, op: &Op) {
    let at = |ms: u64| Instant::from_millis(ms);
    let mut delivered = Delivered::default();
    match *op {
        Op::Send(n, wait) => {
            *now += wait;
            board.sent(model.end() + n, at(*now), Duration::ZERO);
            let byte = Byte { sent_at: *now, sacked: false, lost: false, retransmitted: false };
            model.bytes.extend((0..n).map(|_| byte));
        }
        Op::Ack(n) => {
            let una = (model.una + n).min(model.end());
            let (count, reordered) = model.deliver(model.una, una);
            model.bytes.drain(..(una - model.una) as usize);
            (model.una, model.fack) = (una, model.fack.max(una));
            board.acked_to(una, &mut delivered);
            assert_eq!((delivered.bytes, delivered.reordered), (count, reordered));
        }
        Op::Sack(from, n) => {
            let start = (model.una + from).min(model.end());
            let end = (start + n).min(model.end());
            let (count, reordered) = model.deliver(start, end);
            for pos in start..end {
                let b = &mut model.bytes[(pos - model.una) as usize];
                (b.sacked, b.lost) = (true, false);
            }
            board.sack(start, end, &mut delivered);
            assert_eq!(delivered.bytes, count);
            assert!(reordered || !delivered.reordered || count > 0);
        }
        Op::Lose { newer_than, window } => {
            let rack = Transmission { sent_at: at(newer_than), end: 0 };
            for b in model.bytes.iter_mut().filter(|b| !b.sacked) {
                // A retransmission is not lost at the instant it is sent.
                let window = window.max(u64::from(b.retransmitted));
                b.lost |= b.sent_at < newer_than && b.sent_at + window <= *now;
            }
            board.mark_lost(rack, Duration::from_millis(window), at(*now), |_| {});
        }
        Op::Retransmit(n) => {
            let Some((start, end)) = board.first_lost(0) else { return };
            let end = end.min(start + n);
            *now += 1;
            for pos in start..end {
                let b = &mut model.bytes[(pos - model.una) as usize];
                *b = Byte { sent_at: *now, sacked: false, lost: false, retransmitted: true };
            }
            board.retransmitted(start, end, at(*now));
        }
        Op::LoseTo(n) => {
            let end = (model.una + n).min(model.end());
            let bytes = model.bytes.iter_mut().take((end - model.una) as usize);
            bytes.filter(|b| !b.sacked).for_each(|b| b.lost = true);
            board.mark_lost_to(end, |_| {});
        }
        Op::LoseAll => {
            model.bytes.iter_mut().filter(|b| !b.sacked).for_each(|b| b.lost = true);
            board.mark_all_lost(|_| {});
        }
        Op::Undo => {
            model.bytes.iter_mut().for_each(|b| b.lost = false);
            board.clear_lost();
        }
        Op::Renege => {
            model.bytes.iter_mut().filter(|b| b.sacked).for_each(|b| b.sent_at = u64::MAX);
            model.bytes.iter_mut().for_each(|b| b.sacked = false);
            model.fack = model.una;
            board.clear_sacked();
        }
    }
}

fn check(board: &Scoreboard, model: &mut Model) {
    let mut pos = model.una;
    for (i, run) in board.runs.iter().enumerate() {
        assert!(run.end > pos, "an empty run");
        for at in pos..run.end {
            let b = &mut model.bytes[(at - model.una) as usize];
            if b.sent_at == u64::MAX && !b.sacked {
                // The peer has reneged: merged runs had forgotten their own times.
                b.sent_at = run.sent_at.as_nanos() / 1_000_000;
                b.retransmitted = run.retransmitted;
            }
            assert_eq!((run.sacked, run.lost), (b.sacked, b.lost), "byte {at} of run {i}");
            if !b.sacked {
                assert_eq!(run.sent_at, Instant::from_millis(b.sent_at), "byte {at}");
                assert_eq!(run.retransmitted, b.retransmitted, "byte {at}");
            }
        }
        pos = run.end;
    }
    assert_eq!(pos, model.end());
    let count = |f: fn(&Byte) -> bool| model.bytes.iter().filter(|b| f(b)).count() as u64;
    assert_eq!(board.sacked_bytes(), count(|b| b.sacked));
    assert_eq!(board.lost_bytes(), count(|b| b.lost));
    assert_eq!(board.first_lost(0).map(|r| r.0), model.lost());
}

proptest! {
    #[test]
    fn the_scoreboard_agrees_with_a_record_per_byte(ops in proptest::collection::vec(op(), 1..80)) {
        let (mut board, mut model, mut now) = (Scoreboard::new(), Model::default(), 0);
        for op in &ops {
            apply(&mut board, &mut model, &mut now, op);
            check(&board, &mut model);
        }
    }
}

fn board(segments: u64) -> Scoreboard {
    let mut b = Scoreboard::new();
    for i in 1..=segments {
        b.sent(i * 1000, Instant::from_millis(i), Duration::ZERO);
    }
    b
}

#[test]
fn segments_sent_together_share_a_run() {
    let mut b = Scoreboard::new();
    for i in 1..=1000 {
        b.sent(i * 1000, Instant::from_nanos(i), Duration::from_millis(1));
    }
    assert_eq!(b.len(), 1);
}

#[test]
fn a_peer_that_sacks_every_other_byte_cannot_make_it_grow() {
    let mut b = Scoreboard::new();
    let mut delivered = Delivered::default();
    for i in 1..20_000u64 {
        b.sent(i * 10, Instant::from_millis(i), Duration::ZERO);
        b.sack(i * 10 - 5, i * 10 - 4, &mut delivered);
        b.sack(i * 10 - 2, i * 10, &mut delivered);
        assert!(b.len() <= MAX_RUNS);
    }
    b.mark_all_lost(|_| {});
    while let Some((start, _)) = b.first_lost(0) {
        let before = b.lost_bytes();
        b.retransmitted(start, start + 1, Instant::from_millis(30_000));
        assert!(b.len() <= MAX_RUNS && b.lost_bytes() < before);
    }
    b.acked_to(19_999 * 10, &mut delivered);
    assert_eq!((b.len(), b.sacked_bytes(), b.lost_bytes()), (0, 0, 0));
}

#[test]
fn a_segment_is_lost_once_a_later_one_is_delivered_and_the_window_has_passed() {
    let mut b = board(4);
    let mut delivered = Delivered::default();
    b.sack(2000, 3000, &mut delivered);
    let rack = delivered.original.unwrap();
    assert_eq!(rack, Transmission { sent_at: Instant::from_millis(3), end: 3000 });
    let at = Instant::from_millis(11);
    let losses = b.mark_lost(rack, Duration::from_millis(10), at, |_| {});
    // The first was sent at 1, the second at 2, the fourth after the delivered third.
    assert_eq!((losses.bytes, losses.next), (1000, Some(Instant::from_millis(12))));
    assert_eq!(b.first_lost(0), Some((0, 1000)));
}

#[test]
fn lost_runs_next_to_each_other_are_one_range_until_it_is_long_enough() {
    let mut b = board(4);
    b.mark_lost_to(3000, |_| {});
    assert_eq!(b.first_lost(0), Some((0, 1000)));
    assert_eq!(b.first_lost(1500), Some((0, 2000)));
    assert_eq!(b.first_lost(10_000), Some((0, 3000)));
    b.retransmitted(0, 1500, Instant::from_millis(10));
    assert_eq!(b.first_lost(10_000), Some((1500, 3000)));
}

#[test]
fn a_lost_retransmission_is_lost_again() {
    let mut b = board(4);
    let mut delivered = Delivered::default();
    b.mark_lost_to(1000, |_| {});
    b.retransmitted(0, 1000, Instant::from_millis(10));
    b.sent(5000, Instant::from_millis(11), Duration::ZERO);
    b.sack(4000, 5000, &mut delivered);
    let rack = delivered.original.unwrap();
    let losses = b.mark_lost(rack, Duration::ZERO, Instant::from_millis(20), |_| {});
    assert!(losses.retransmission);
    assert_eq!(b.lost_bytes(), 4000);
}

#[test]
fn bytes_delivered_below_delivered_ones_were_reordered_unless_retransmitted() {
    for again in [false, true] {
        let mut b = board(3);
        let mut delivered = Delivered::default();
        b.sack(1000, 2000, &mut delivered);
        assert!(!delivered.reordered);
        if again {
            b.mark_lost_to(1000, |_| {});
            b.retransmitted(0, 1000, Instant::from_millis(10));
        }
        b.acked_to(2000, &mut delivered);
        assert_eq!(delivered.reordered, !again);
    }
}
