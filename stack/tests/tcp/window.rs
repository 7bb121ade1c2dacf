//! The receive window: its right edge moves only with cause, and every byte inside it is accepted.

use super::support::*;
use fulmar_stack::base::{DropReason, Instant};
use fulmar_stack::tcp::*;
use proptest::prelude::*;

/// An established connection, with window scale on both sides if `scaled`.
fn open(cfg: Config, scaled: bool) -> Trace {
    open_on(path(), cfg, scaled)
}

fn open_on(path: PathInfo, cfg: Config, scaled: bool) -> Trace {
    let now = Instant::from_millis(1000);
    let mut t = Trace::with(Tcb::connect(&cfg, key(), OUR_ISS, 0, path, now));
    t.path = path;
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

/// The right edge of the window that the last segments advertised.
fn edge(t: &mut Trace, scale: u8) -> Option<u64> {
    let s = t.out.segs.drain(..).next_back()?;
    Some(u64::from(s.ack) + (u64::from(s.win) << scale))
}

#[test]
fn small_segments_to_a_slow_reader_fill_the_window_and_none_is_refused() {
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
    // The rest of the window is less than a unit of the scale: the field says closed.
    recv!(t, "A", seq = seq - 1, ack = 1);
    send!(t, "A", ack = seq, win = 0);
    // Reading sends a window update.
    assert_eq!(t.read(unread), unread);
    send!(t, "A", ack = seq, win = 2048);
    assert_eq!(t.drops(DropReason::TcpReassemblyFull), 0);
}

#[test]
fn an_ack_has_the_next_position_where_the_peers_window_only_seems_to_shrink() {
    let mut t = open(scaled(), true);
    // Eight segments of 1000 bytes fill the window, in units of 128 bytes.
    recv!(t, "A", seq = 1, ack = 1, win = 63);
    t.write(20_000);
    let next = 1 + t.tcb.info().in_flight_bytes as u32;
    assert!(next > 7001 && next <= 1 + 63 * 128, "{next}");
    t.out.segs.clear();
    // The edge moves left by less than a unit: the peer has rounded down, and has received everything.
    let units = (next - 1001) / 128;
    recv!(t, "A", seq = 1, ack = 1001, win = units as u16);
    t.out.segs.clear();
    t.input(seg!("A", seq = 1, ack = 1001, win = units as u16, len = 10));
    t.wait(50);
    send!(t, "A", seq = next, ack = 11);
    // By a whole unit it has shrunk.
    let (units, edge) = (units - 1, 1001 + 128 * (units - 1));
    recv!(t, "A", seq = 11, ack = 1001, win = units as u16);
    t.out.segs.clear();
    t.input(seg!("A", seq = 11, ack = 1001, win = units as u16, len = 10));
    t.wait(50);
    send!(t, "A", seq = edge, ack = 21);
}

#[test]
fn a_read_sends_no_ack_that_says_what_the_last_one_said() {
    let path = PathInfo { mtu: 65_535, route_mtu: 65_535, ..path() };
    for buffer in (2048..16_384).step_by(256) {
        let mut t = open_on(path, scaled(), true);
        t.tcb.set_recv_buffer(buffer);
        let mut said = t.out.segs.pop_back().map(|s| (s.ack, s.win)).unwrap();
        let mut seq = 1;
        for eighths in (0..200).map(|n| n % 8) {
            let left = said.0 + (u32::from(said.1) << 9) - seq;
            let bytes = left as usize * eighths / 8;
            t.input(seg!("A", seq = seq, ack = 1, len = bytes));
            t.output();
            seq += bytes as u32;
            said = t.out.segs.drain(..).next_back().map_or(said, |s| (s.ack, s.win));
            while t.read(33) > 0 {
                for s in t.out.segs.drain(..) {
                    assert_ne!((s.ack, s.win), said, "buffer {buffer}");
                    said = (s.ack, s.win);
                }
            }
        }
    }
}

#[test]
fn no_update_is_sent_for_a_window_that_the_unscaled_field_cannot_express() {
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
    let mut t = open(Config { recv_buffer_bytes: 20_000, ..plain() }, false);
    for i in 0..20 {
        recv!(t, "A", seq = 1 + 1000 * i, ack = 1, len = 1000);
    }
    assert_eq!(edge(&mut t, 0), Some(20_001), "the buffer is full");
    let last = |t: &mut Trace| t.out.segs.drain(..).next_back().map(|s| s.win);
    assert_eq!((t.read(1000), last(&mut t)), (1000, None), "too little for an update");
    assert_eq!((t.read(19_000), last(&mut t)), (19_000, Some(20_000)));
}

#[test]
fn an_unscaled_window_that_was_never_small_needs_no_update() {
    let mut t = open(scaled(), false);
    for i in 0..66 {
        t.input(seg!("A", seq = 1 + 1000 * i, ack = 1, len = 993));
        t.input(seg!("A", seq = 994 + 1000 * i, ack = 1, len = 7));
        let _ = t.pass();
    }
    t.out.segs.clear();
    let n = t.tcb.recv_queue().readable();
    assert_eq!(t.read(n), n);
    t.expect_silence();
}

#[test]
fn the_window_of_a_syn_is_not_rounded_to_the_scale() {
    let mut t = Trace::passive(scaled(), seg!("S", seq = 0, mss = Some(1000), scale = Some(7)));
    t.window = WindowBudget::new(10_000);
    t.output();
    send!(t, "SA", win = 10_000, scale = Some(9));
    recv!(t, "A", seq = 1, ack = 1, len = 10_000);
    assert_eq!(t.read(20_000), 10_000);
}

#[derive(Clone, Debug)]
enum Op {
    /// A segment of this many bytes, trimmed to the window as a sender would.
    Segment(usize),
    /// Several segments of one size.
    Run(usize, u8),
    /// A segment behind a gap of this many bytes.
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

/// A sender that uses the advertised window, and its record of the window.
struct Peer {
    t: Trace,
    scale: u8,
    buffer: u64,
    /// Next sequence number, and the largest right edge advertised.
    next: u64,
    edge: u64,
    read: u64,
}

impl Peer {
    /// Checks that the edge advances only as bytes are read, and seems to move left by less than a
    /// unit of the scale.
    fn look(&mut self) {
        for s in self.t.out.segs.drain(..) {
            let now = u64::from(s.ack) + (u64::from(s.win) << self.scale);
            assert!(now + (1 << self.scale) > self.edge, "moved left from {} to {now}", self.edge);
            let cause = now <= self.edge || now <= 1 + self.read + self.buffer;
            assert!(cause, "{} to {now} when {} were read", self.edge, self.read);
            self.edge = self.edge.max(now);
        }
    }

    /// Sends the next bytes within the window; all must be accepted.
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
        // The window advertised before the buffer was reduced counts too, plus one block.
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

/// Runs `ops` on a connection with a receive buffer of `buffer` bytes.
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
fn a_buffer_set_below_the_advertised_window_accepts_the_advertised_window() {
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
    fn the_advertised_window_is_accepted_and_its_right_edge_moves_only_with_cause(
        is_scaled in any::<bool>(),
        buffer in prop_oneof![Just(2048usize), 2048usize..20_000, 20_000usize..300_000],
        ops in proptest::collection::vec(op(), 1..200),
    ) {
        let mut peer = play(is_scaled, buffer, &ops);
        // Reading reopens the window for a waiting peer.
        peer.step(&Op::Read(usize::MAX));
        prop_assert!(peer.edge - peer.next >= (buffer as u64 / 8).min(1000), "the window stays closed");
    }
}
