//! The receive window: its right edge moves only with cause, and what it offers is taken.

mod support;

use fulmar_base::{Counter, DropReason};
use fulmar_tcp::*;
use proptest::prelude::*;
use support::*;

/// Established, the peer's and our windows scaled if `scaled`; its next number is 1.
fn open(cfg: Config, scaled: bool) -> Trace {
    let mut t = Trace::connect(cfg);
    t.out.room = usize::MAX;
    t.output();
    t.out.segs.clear();
    let scale = scaled.then_some(7);
    recv!(t, "SA", seq = 0, ack = 1, mss = Some(1000), sack_ok = true, scale = scale);
    t
}

/// 1 MiB of receive buffer and windows in units of 512 bytes.
fn scaled() -> Config {
    Config { recv_buffer_bytes: 1 << 20, max_buffer_bytes: 16 << 20, ..plain() }
}

/// The right edge of the window that the segments sent last have offered.
fn edge(t: &mut Trace, scale: u8) -> Option<u64> {
    let s = t.out.segs.drain(..).next_back()?;
    Some(u64::from(s.ack) + (u64::from(s.win) << scale))
}

#[test]
fn small_segments_to_a_reader_who_pauses_fill_the_window_and_none_is_refused() {
    let mut t = open(scaled(), true);
    let first = edge(&mut t, 9).unwrap();
    let mut seq = 1;
    while u64::from(seq) + 100 <= first {
        recv!(t, "A", seq = seq, ack = 1, len = 100);
        seq += 100;
        let now = edge(&mut t, 9).unwrap_or(first);
        assert!(now <= first && now + 512 > first, "{now} of {first} at {seq}");
        t.wait(8);
    }
    assert_eq!(t.drops(DropReason::TcpReassemblyFull), 0);
    let unread = seq as usize - 1;
    assert_eq!(t.tcb.recv_queue().readable(), unread);
    t.out.segs.clear();
    // What is left of the window is too little for its field: it says closed.
    recv!(t, "A", seq = seq - 1, ack = 1);
    send!(t, "A", ack = seq, win = 0);
    // A reader who comes back is told to the peer.
    assert_eq!(t.read(unread), unread);
    send!(t, "A", ack = seq, win = 2048);
    assert_eq!(t.drops(DropReason::TcpReassemblyFull), 0);
}

#[test]
fn a_peer_that_does_not_scale_hears_of_no_window_that_its_field_cannot_say() {
    let mut t = open(scaled(), false);
    t.out.segs.clear();
    let mut updates = 0;
    for i in 0..200 {
        t.input(seg!("A", seq = 1 + 1000 * i, ack = 1, len = 1000));
        t.output();
        t.out.segs.clear();
        t.read(1000);
        updates += t.out.segs.len();
        t.out.segs.clear();
    }
    assert_eq!(updates, 0, "acknowledgements with a window that did not change");
}

#[test]
fn a_closed_unscaled_window_is_opened_by_an_update() {
    let mut t = open(scaled(), false);
    for i in 0..66 {
        t.input(seg!("A", seq = 1 + 1000 * i, ack = 1, len = 993));
        t.input(seg!("A", seq = 994 + 1000 * i, ack = 1, len = 7));
        let _ = t.pass();
    }
    t.out.segs.clear();
    let n = t.tcb.recv_queue().readable();
    assert_eq!(t.read(n), n);
    t.silent(); // a megabyte of buffer: the window was never small
    assert!(t.count(Counter::TcpSegmentsOut) > 2);
}

#[test]
fn the_window_of_a_syn_is_not_cut_to_units_of_the_scale() {
    let mut t = Trace::passive(scaled(), seg!("S", seq = 0, mss = Some(1000), scale = Some(7)));
    t.window = WindowBudget::new(10_000);
    t.output();
    send!(t, "SA", win = 10_000, scale = Some(9));
    recv!(t, "A", seq = 1, ack = 1, len = 10_000);
    assert_eq!(t.read(20_000), 10_000);
}

#[derive(Clone, Debug)]
enum Op {
    /// A segment of so many bytes, cut to the window as a sender would.
    Segment(usize),
    /// So many of one size.
    Run(usize, u8),
    /// A segment behind a gap of so many bytes.
    Ahead(usize, usize),
    Read(usize),
    Wait(u64),
}

fn op() -> impl Strategy<Value = Op> {
    let len = || prop_oneof![4 => 1usize..300, 3 => 1usize..1461, 1 => 1usize..30_000];
    prop_oneof![
        6 => len().prop_map(Op::Segment),
        3 => (len(), 1u8..60).prop_map(|(n, times)| Op::Run(n, times)),
        2 => (1usize..3000, len()).prop_map(|(gap, n)| Op::Ahead(gap, n)),
        2 => (1usize..40_000).prop_map(Op::Read),
        1 => (1u64..300).prop_map(Op::Wait),
    ]
}

/// A sender that uses the offered window, and what was seen of it.
struct Peer {
    t: Trace,
    scale: u8,
    buffer: u64,
    /// Next number to send, and the largest right edge that was offered.
    next: u64,
    edge: u64,
    read: u64,
}

impl Peer {
    /// The edge moves right only as bytes are read; it only seems to move left, by less than a unit.
    fn look(&mut self) {
        for s in self.t.out.segs.drain(..) {
            let now = u64::from(s.ack) + (u64::from(s.win) << self.scale);
            assert!(now + (1 << self.scale) > self.edge, "moved left from {} to {now}", self.edge);
            let cause = now <= self.edge || now <= 1 + self.read + self.buffer;
            assert!(cause, "{} to {now} when {} were read", self.edge, self.read);
            self.edge = self.edge.max(now);
        }
    }

    /// Sends the next bytes that the window takes; all of them must be taken.
    fn segment(&mut self, len: usize) {
        let len = (len as u64).min(self.edge - self.next) as usize;
        if len == 0 {
            return;
        }
        self.t.recv(seg!("A", seq = self.next as u32, ack = 1, len = len));
        self.next += len as u64;
        let got = self.t.tcb.recv_queue_ref().next() + 1;
        assert!(got >= self.next, "{} of {} were refused", self.next - got, len);
        self.next = got;
        // What stood offered when the buffer was set to less is kept too, the last of it in a block.
        let most = 2 * self.buffer.max(65_535) as usize + (16 << 10);
        let storage = self.t.tcb.recv_queue_ref().storage_bytes();
        assert!(storage <= most, "{storage} bytes of storage, {most} at most");
        self.look();
    }

    fn step(&mut self, op: &Op) {
        match *op {
            Op::Segment(len) => self.segment(len),
            Op::Run(len, times) => (0..times).for_each(|_| self.segment(len)),
            Op::Ahead(gap, len) => {
                let start = self.next + gap as u64;
                let len = len.min(self.edge.saturating_sub(start) as usize);
                if len > 0 {
                    self.t.recv(seg!("A", seq = start as u32, ack = 1, len = len));
                    self.look();
                }
            }
            Op::Read(n) => {
                self.read += self.t.read(n) as u64;
                self.look();
            }
            Op::Wait(ms) => {
                self.t.wait(ms);
                self.look();
            }
        }
    }
}

/// Plays `ops` on a connection with so large a receive buffer.
fn play(is_scaled: bool, buffer: usize, ops: &[Op]) -> Peer {
    let cfg = Config { recv_buffer_bytes: buffer, ..scaled() };
    let mut t = open(cfg, is_scaled);
    t.tcb.set_recv_buffer(buffer);
    let scale = if is_scaled { 9 } else { 0 };
    let edge = edge(&mut t, scale).unwrap();
    let mut peer = Peer { t, scale, buffer: buffer as u64, next: 1, edge, read: 0 };
    ops.iter().for_each(|op| peer.step(op));
    peer
}

#[test]
fn a_buffer_set_below_the_offered_window_takes_all_that_was_offered() {
    let ops = [
        Op::Run(2682, 24),
        Op::Read(15_197),
        Op::Segment(66),
        Op::Read(22_424),
        Op::Read(19_398),
        Op::Run(289, 50),
        Op::Segment(977),
        Op::Segment(544),
        Op::Run(15_421, 3),
    ];
    play(false, 64_351, &ops);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn what_is_offered_is_taken_and_the_right_edge_moves_only_with_cause(
        is_scaled in any::<bool>(),
        buffer in prop_oneof![Just(2048usize), 2048usize..20_000, 20_000usize..300_000],
        ops in proptest::collection::vec(op(), 1..200),
    ) {
        let mut peer = play(is_scaled, buffer, &ops);
        // The reader comes back: a peer that waits hears of it.
        peer.step(&Op::Read(usize::MAX));
        prop_assert!(peer.edge - peer.next >= (buffer as u64 / 8).min(1000), "the window stays shut");
    }
}
