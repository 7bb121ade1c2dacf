//! Model test: the scoreboard against a bitmap.

use super::*;
use proptest::prelude::*;

const SPAN: usize = 400;

/// One flag per byte of the stream.
struct Model {
    reported: [bool; SPAN],
}

impl Model {
    fn ranges(&self) -> Vec<(u64, u64)> {
        let mut out = Vec::new();
        let mut start = None;
        for i in 0..=SPAN {
            let set = self.reported.get(i).copied().unwrap_or(false);
            match (set, start) {
                (true, None) => start = Some(i),
                (false, Some(s)) => {
                    out.push((s as u64, i as u64));
                    start = None;
                }
                _ => {}
            }
        }
        out
    }

    /// RFC 6675 section 4, IsLost, byte by byte.
    fn is_lost(&self, at: usize, mss: u64) -> bool {
        let above: Vec<_> = self.ranges().into_iter().filter(|r| r.1 > at as u64).collect();
        let bytes: u64 = above.iter().map(|r| r.1 - r.0.max(at as u64)).sum();
        !self.reported[at] && (above.len() >= DUP_THRESH || bytes > 2 * mss)
    }

    fn holes(&self, from: usize, to: usize) -> Vec<(u64, u64)> {
        let inverse = Model {
            reported: core::array::from_fn(|i| (from..to).contains(&i) && !self.reported[i]),
        };
        inverse.ranges()
    }
}

#[derive(Clone, Debug)]
enum Op {
    Insert(usize, usize),
    Ack(usize),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        8 => (0..SPAN, 0..60usize).prop_map(|(s, n)| Op::Insert(s, (s + n).min(SPAN))),
        1 => (0..SPAN).prop_map(Op::Ack),
    ]
}

fn check(board: &Scoreboard, model: &Model, mss: u64, from: usize, to: usize) {
    let ranges: Vec<_> = board.ranges.iter().map(|r| (r.start, r.end)).collect();
    assert_eq!(ranges, model.ranges());
    assert_eq!(board.bytes(), model.reported.iter().filter(|b| **b).count() as u64);
    let edge = board.lost_edge(mss);
    for at in 0..SPAN {
        let lost = !model.reported[at] && (at as u64) < edge;
        assert_eq!(lost, model.is_lost(at, mss), "byte {at}, edge {edge}");
    }
    let inside = (from..to).filter(|i| model.reported[*i]).count() as u64;
    assert_eq!(board.bytes_within(from as u64, to as u64), inside);
    let holes = model.holes(from, to);
    assert_eq!(board.first_hole(from as u64, to as u64), holes.first().copied());
    assert_eq!(board.last_hole(from as u64, to as u64), holes.last().copied());
}

proptest! {
    #[test]
    fn the_scoreboard_agrees_with_a_bitmap(
        ops in proptest::collection::vec(op(), 1..60),
        mss in 1u64..40,
        a in 0..SPAN,
        b in 0..SPAN,
    ) {
        let mut board = Scoreboard::new();
        let mut model = Model { reported: [false; SPAN] };
        for op in ops {
            match op {
                Op::Insert(s, e) => {
                    let before = model.reported.iter().filter(|b| **b).count();
                    model.reported[s..e.max(s)].fill(true);
                    let after = model.reported.iter().filter(|b| **b).count();
                    prop_assert_eq!(board.insert(s as u64, e as u64), (after - before) as u64);
                }
                Op::Ack(to) => {
                    model.reported[..to].fill(false);
                    board.acked_to(to as u64);
                }
            }
            check(&board, &model, mss, a.min(b), a.max(b));
        }
    }
}

#[test]
fn a_range_beyond_the_maximum_is_ignored() {
    let mut board = Scoreboard::new();
    for i in 0..MAX_RANGES as u64 {
        assert_eq!(board.insert(i * 10, i * 10 + 5), 5);
    }
    assert_eq!(board.insert(100_000, 100_005), 0);
    assert_eq!(board.ranges.len(), MAX_RANGES);
    // A range that merges two others is still recorded.
    assert_eq!(board.insert(5, 10), 5);
    assert_eq!(board.ranges.len(), MAX_RANGES - 1);
}
