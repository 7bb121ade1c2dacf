//! Arbitrary segments to a Tcb in every state: no panic, the invariants hold, a segment is counted
//! as at most one drop, memory stays bounded, and every buffer is freed.

use super::support::*;
use fulmar_stack::base::{Duration, SeqNum};
use fulmar_stack::tcp::*;
use fulmar_stack::wire::tcp::{Flags, Header, Timestamps};
use proptest::prelude::*;

#[derive(Clone, Debug)]
enum Op {
    Segment(Seg),
    Wait(u64),
    Write(usize),
    Read(usize),
    Shutdown,
    ShutdownRead,
    Close,
    Abort,
    Icmp(bool, u32),
    Room(usize),
}

/// Sequence numbers near the windows, sometimes arbitrary ones.
fn near() -> impl Strategy<Value = u32> {
    prop_oneof![
        6 => 0u32..5000,
        3 => 0u32..80_000,
        1 => any::<u32>(),
        1 => (0u32..5000).prop_map(|n| 0u32.wrapping_sub(n)),
    ]
}

fn segment() -> impl Strategy<Value = Seg> {
    let flags = prop_oneof![
        8 => Just(0x10u16), 8 => (0u16..8).prop_map(|ace| ace << 6 | 0x10), 1 => Just(0x152), 1 => Just(0x1c2), 3 => Just(0x18), 2 => Just(0x11), 1 => Just(0x02), 1 => Just(0x12),
        1 => Just(0x04), 1 => Just(0x14), 3 => 0u16..0x200,
    ];
    let len =
        prop_oneof![3 => Just(0usize), 2 => 1usize..50, 2 => 1usize..1500, 1 => 1usize..60_000];
    let ts = proptest::option::of((0u32..3000, 0u32..5000));
    let sack = proptest::collection::vec((near(), near()), 0..4);
    let counters = proptest::option::weighted(0.2, (near(), near(), near()));
    let mss = proptest::option::of(any::<u16>());
    let options = (ts, sack, mss, proptest::option::of(any::<u8>()), counters);
    (flags, near(), near(), any::<u16>(), len, options, any::<u16>()).prop_map(
        |(f, seq, ack, win, len, (ts, sack, mss, scale, counters), urgent)| Seg {
            flags: Flags(f),
            seq,
            ack,
            win,
            len,
            mss,
            scale,
            sack_ok: win % 2 == 0,
            ts,
            sack,
            fo: (mss.unwrap_or(0) % 3 == 0).then(|| fast_open(&[7; 8])).flatten(),
            urgent,
            gso: None,
            ecn: EcnField::of_bits((win >> 4) as u8),
            counters,
        },
    )
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        20 => segment().prop_map(Op::Segment),
        3 => (0u64..500).prop_map(Op::Wait),
        1 => (0u64..200_000).prop_map(Op::Wait),
        3 => (1usize..20_000).prop_map(Op::Write),
        3 => (1usize..20_000).prop_map(Op::Read),
        1 => Just(Op::Shutdown),
        1 => Just(Op::ShutdownRead),
        1 => Just(Op::Close),
        1 => Just(Op::Abort),
        1 => (any::<bool>(), near()).prop_map(|(b, n)| Op::Icmp(b, n)),
        1 => (0usize..5).prop_map(Op::Room),
    ]
}

const FAST_OPEN_CLIENT: u8 = 16;
const FAST_OPEN_SERVER: u8 = 17;

/// A Tcb in the initial state `kind`.
fn start(kind: u8, cfg: Config) -> Trace {
    let syn = Seg { ts: Some((500, 0)), ..seg!("S", sack_ok = true, mss = Some(1000)) };
    match kind {
        0 => Trace::connect(cfg),
        1 => Trace::passive(cfg, syn),
        FAST_OPEN_CLIENT => {
            let mut t = Trace::connect(cfg);
            t.queue(2000);
            t.tcb.set_fast_open(FastOpenSyn::WithoutCookie);
            t
        }
        FAST_OPEN_SERVER => Trace::passive_fast_open(cfg, Seg { len: 500, ..syn }),
        _ => {
            let mut t = Trace::established_with(cfg);
            let ts = cfg.timestamps.then_some((600, 1000));
            if kind & 1 != 0 {
                t.shutdown();
            }
            if kind & 2 != 0 {
                t.recv(Seg { ts, ..seg!("FA", seq = 1, ack = 1) });
            }
            if kind & 4 != 0 {
                t.recv(Seg { ts, ..seg!("A", seq = 1, ack = 2) });
            }
            t
        }
    }
}

fn check(t: &mut Trace) {
    let i = t.tcb.info();
    assert!(i.in_flight_bytes <= 1 << 30, "snd_una <= snd_nxt");
    assert!(i.sacked_bytes <= i.in_flight_bytes);
    assert!(i.rcv_wnd_bytes <= 1 << 30, "rcv_nxt <= rcv_adv");
    assert!(i.cwnd_bytes >= 1 && i.mss_bytes >= 40);
    assert!(t.tcb.recv_queue().storage_bytes() <= 2 * i.recv_buffer_bytes + 3 * 65_536);
    assert!(i.recv_queue_bytes <= 2 * i.recv_buffer_bytes + 3 * 65_536);
    // With data in flight or unsent, a timer is running.
    let owed = i.in_flight_bytes > 0 && i.state != State::Closed && i.state != State::TimeWait;
    assert!(!owed || t.tcb.next_deadline().is_some(), "{i:?}");
}

/// Arbitrary segments carry arbitrary bytes, so reads do not verify the pattern.
fn apply(t: &mut Trace, op: Op) {
    match op {
        Op::Segment(s) => {
            let before = t.counters.total_drops();
            t.input(s);
            assert!(t.counters.total_drops() - before <= 1, "one segment, one drop");
            let _ = t.pass();
        }
        Op::Wait(ms) => {
            t.out.room = 100_000;
            t.wait(ms);
        }
        Op::Write(n) if t.tcb.can_send() && t.tcb.send_queue().space() >= n => {
            t.queue(n);
            let _ = t.pass();
        }
        Op::Write(_) => {}
        Op::Read(n) => {
            let got = t.tcb.recv_queue().take(n, &mut t.pool);
            t.pool.free(got);
            let _ = t.pass();
        }
        Op::Shutdown => t.tcb.shutdown_write(t.now),
        Op::ShutdownRead => t.shutdown_read(),
        Op::Close => {
            t.out.room = 100_000;
            t.close();
        }
        Op::Abort => t.tcb.abort(),
        Op::Icmp(big, seq) => {
            t.out.room = 100_000;
            let mtu = 100 + seq as usize % 2000;
            let what =
                if big { IcmpError::TooBig { mtu } } else { IcmpError::Unreachable { hard: true } };
            t.icmp(what, seq);
        }
        Op::Room(n) => t.out.room = n,
    }
    t.out.segs.clear();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, ..ProptestConfig::default() })]

    #[test]
    fn arbitrary_segments_do_not_break_a_connection(
        kind in 0u8..18,
        timestamps in any::<bool>(),
        sack in any::<bool>(),
        ops in proptest::collection::vec(op(), 1..80),
    ) {
        let cfg = Config { timestamps, sack, user_timeout: Duration::from_secs(600), ..plain() };
        let mut t = start(kind, cfg);
        t.out.room = 100_000;
        for op in ops {
            apply(&mut t, op);
            check(&mut t);
        }
    }

    #[test]
    fn arbitrary_segments_do_not_break_time_wait(
        flags in 0u16..0x200,
        seq in any::<u32>(),
        ts in proptest::option::of(any::<u32>()),
        len in 0usize..3000,
    ) {
        let mut t = Trace::established();
        t.shutdown();
        t.recv(seg!("FA", seq = 1, ack = 2));
        let mut entry = t.tcb.time_wait_entry(t.now);
        let mut h = Header { seq: SeqNum(seq), flags: Flags(flags), ..Header::default() };
        h.options.timestamps = ts.map(|value| Timestamps { value, echo: 0 });
        let verdict = entry.on_segment(t.now, &h, len);
        if h.flags.contains(Flags::RST) {
            prop_assert!(matches!(verdict, TimeWaitVerdict::Drop(_)));
        }
    }
}
