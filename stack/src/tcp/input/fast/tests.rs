//! Differential test of header prediction against the general steps: two connections with the same
//! history, one with header prediction and one without, have the same observable state.

use crate::base::{Counter, Counters, DropReason, Duration, FlowKey, Instant, SeqNum};
use crate::mbuf::{Chain, Pool, PoolConfig, Purpose};
use crate::tcp::CongestionControl;
use crate::tcp::*;
use crate::wire::tcp::{EcnCounters, EcnOrder, Flags, Header, Timestamps};
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use proptest::prelude::*;

#[derive(Default)]
struct Out(Vec<Vec<u8>>);

impl Emit for Out {
    fn emit(
        &mut self,
        pool: &mut Pool,
        _: &mut Counters,
        seg: SegmentOut,
    ) -> Result<(), EmitError> {
        self.0.push(seg.chain.to_vec());
        pool.free(seg.chain);
        Ok(())
    }

    fn space(&self) -> usize {
        1000
    }
}

/// A segment, relative to the receiver's state.
#[derive(Clone, Debug)]
struct Seg {
    flags: u16,
    /// ACE beyond the expected value.
    ace: u8,
    field: EcnField,
    /// Growth of the peer's count of marked bytes, in an option.
    counters: Option<i32>,
    seq: i32,
    /// Acknowledgement: thousandths of the bytes in flight, and an offset to that.
    ack: (u64, i32),
    window: u16,
    len: usize,
    stamp: i32,
    sack: Option<(u32, u32)>,
    urgent: u16,
}

#[derive(Clone, Debug)]
enum Op {
    Segment(Seg),
    Write(usize),
    Read(usize),
    Output,
    Wait(u64),
    ShutdownWrite,
    ShutdownRead,
    Close,
}

fn segment() -> impl Strategy<Value = Seg> {
    let flags = prop_oneof![
        30 => Just(Flags::ACK.0), 15 => Just((Flags::ACK | Flags::PSH).0),
        1 => Just((Flags::ACK | Flags::FIN).0), 1 => Just((Flags::ACK | Flags::URG).0),
    ];
    let seq = prop_oneof![50 => Just(0), 1 => -3000..3000, 1 => Just(-1), 2 => Just(1000)];
    let thousandths = prop_oneof![3 => Just(0u64), 3 => Just(1000u64), 3 => 0u64..1000];
    let ack = (thousandths, prop_oneof![40 => Just(0), 1 => -2..3]);
    let window =
        prop_oneof![6 => Just(50_000u16), 2 => Just(0), 2 => 1u16..3000, 1 => any::<u16>()];
    let len =
        prop_oneof![4 => Just(0usize), 4 => Just(1000usize), 2 => 1usize..300, 1 => 1usize..20_000];
    let stamp = prop_oneof![30 => 0..3, 1 => -2..0];
    let sack = proptest::option::weighted(0.03, (0u32..5000, 1u32..3000));
    let field = prop_oneof![
        30 => Just(EcnField::Ect0), 2 => Just(EcnField::Ce), 1 => Just(EcnField::Ect1),
        1 => Just(EcnField::NotEct),
    ];
    let ace = prop_oneof![30 => Just(0u8), 1 => 0u8..8];
    let counters = proptest::option::weighted(0.05, -2000i32..5000);
    (flags, seq, ack, window, len, stamp, sack, 0u16..3, (ace, field, counters)).prop_map(
        |(flags, seq, ack, window, len, stamp, sack, urgent, (ace, field, counters))| Seg {
            flags,
            ace,
            field,
            counters,
            seq,
            ack,
            window,
            len,
            stamp,
            sack,
            urgent,
        },
    )
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        60 => segment().prop_map(Op::Segment),
        12 => (1usize..10_000).prop_map(Op::Write),
        4 => (1usize..20_000).prop_map(Op::Read),
        16 => Just(Op::Output),
        4 => (0u64..300).prop_map(Op::Wait),
        1 => (0u64..100_000).prop_map(Op::Wait),
        1 => prop_oneof![3 => Just(Op::ShutdownWrite), 1 => Just(Op::ShutdownRead), 1 => Just(Op::Close)],
    ]
}

struct Endpoint {
    tcb: Tcb,
    pool: Pool,
    counters: Counters,
    window: WindowBudget,
    now: Instant,
    out: Out,
    may_predict: bool,
    predicted: usize,
}

const PATH: PathInfo =
    PathInfo { mtu: 1540, route_mtu: 1540, ip_header_bytes: 20, tso_bytes: Some(20_000) };

impl Endpoint {
    fn new(cfg: &Config, syn_ack_ace: u8, may_predict: bool) -> Endpoint {
        let key = FlowKey::new("10.0.0.1:80".parse().unwrap(), "10.0.0.2:4000".parse().unwrap());
        let now = Instant::from_millis(1000);
        let mut end = Endpoint {
            tcb: Tcb::connect(cfg, key, SeqNum(u32::MAX - 3000), 7, PATH, now),
            pool: Pool::new(PoolConfig::with_budget(8 << 20)).unwrap(),
            counters: Counters::default(),
            window: WindowBudget::new(4 << 20),
            now,
            out: Out::default(),
            may_predict,
            predicted: 0,
        };
        end.output();
        let mut syn_ack = Header {
            seq: SeqNum(u32::MAX - 5000),
            ack: end.tcb.seq_of(1),
            flags: Flags::SYN | Flags::ACK | Flags::of_ace(syn_ack_ace),
            window: 50_000,
            ..Header::default()
        };
        syn_ack.options.mss = Some(1400);
        syn_ack.options.window_scale = Some(2);
        syn_ack.options.sack_permitted = true;
        syn_ack.options.timestamps = Some(Timestamps { value: 500, echo: 1007 });
        let _ = end.input(&syn_ack, EcnField::NotEct, 0);
        end.output();
        end
    }

    fn env<R>(&mut self, f: impl FnOnce(&mut Tcb, &mut Env, &mut Out) -> R) -> R {
        let mut env = Env {
            now: self.now,
            pool: &mut self.pool,
            counters: &mut self.counters,
            window: &mut self.window,
        };
        f(&mut self.tcb, &mut env, &mut self.out)
    }

    fn output(&mut self) {
        let sent = self.env(|tcb, env, out| tcb.output(env, &PATH, out));
        assert_eq!(sent, Sent::Done);
    }

    fn chain(&mut self, len: usize, purpose: Purpose) -> Chain {
        let mut chain = self.pool.alloc_chain(len, 0, purpose).unwrap();
        let bytes: Vec<u8> = (0..len).map(|i| (i * 7) as u8).collect();
        chain.copy_from(0, &bytes);
        chain
    }

    fn input(&mut self, hdr: &Header, field: EcnField, len: usize) -> Events {
        let payload = if len == 0 { Chain::new() } else { self.chain(len, Purpose::Receive) };
        let may_predict = self.may_predict;
        let is_predicted =
            self.tcb.is_predicted_field(field, len) && self.tcb.is_predicted(hdr, len);
        self.predicted += usize::from(is_predicted);
        self.env(|tcb, env, _| {
            if may_predict {
                return tcb.input(env, hdr, field, payload);
            }
            env.counters.count(Counter::TcpSegmentsIn);
            tcb.pacing.update_hold(env.now);
            let events = tcb.input_general(env, hdr, field, payload);
            tcb.rearm(env.now);
            events
        })
    }

    fn header(&self, s: &Seg) -> Header {
        let t = &self.tcb;
        let ack = t.snd.una + t.flight() * s.ack.0 / 1000;
        let seq = t.peer_seq_of(t.rcv.nxt).0.wrapping_add(s.seq as u32);
        let mut h = Header {
            seq: SeqNum(seq),
            ack: SeqNum(t.seq_of(ack).0.wrapping_add(s.ack.1 as u32)),
            flags: Flags(s.flags) | self.ecn_flags(s),
            window: s.window,
            urgent: s.urgent,
            ..Header::default()
        };
        if t.ts.on {
            let value = t.ts.recent.wrapping_add(s.stamp as u32);
            let echo = t.ts_clock(self.now).wrapping_sub(3);
            h.options.timestamps = Some(Timestamps { value, echo });
        }
        if let Some(more) = s.counters.filter(|_| t.ecn.is_accurate()) {
            let bytes = (t.ecn.reported.marked_bytes as i32 + more) as u32;
            h.options.ecn = Some(EcnCounters::full(EcnOrder::Ect0First, 7, bytes, 1));
        }
        if let Some((from, bytes)) = s.sack {
            let from = t.seq_of(t.snd.una) + from;
            h.options.sack.push(from, from + bytes);
        }
        h
    }

    fn ecn_flags(&self, s: &Seg) -> Flags {
        match self.tcb.ecn.mode {
            EcnMode::Accurate => Flags::of_ace(self.tcb.ecn.reported.ace() + s.ace),
            _ => Flags::of_ace(s.ace),
        }
    }

    /// Executes `op`; returns what the caller observes.
    fn step(&mut self, op: &Op) -> String {
        match op {
            Op::Segment(s) => {
                let hdr = self.header(s);
                let events = self.input(&hdr, s.field, s.len);
                return format!("{events:?}");
            }
            Op::Write(n) => {
                let n = (*n).min(self.tcb.send.space());
                if n > 0 && self.tcb.can_send() {
                    let chain = self.chain(n, Purpose::Send);
                    self.tcb.send.append(chain, &mut self.pool).unwrap();
                }
            }
            Op::Read(n) => {
                let got = self.tcb.recv.take(*n, &mut self.pool);
                let bytes = got.to_vec();
                self.pool.free(got);
                let wants = self.env(|tcb, env, _| tcb.after_read(env));
                return format!("{wants} {bytes:?}");
            }
            Op::Output => self.output(),
            Op::Wait(ms) => {
                self.now = self.now + Duration::from_millis(*ms);
                let due = self.tcb.next_deadline().is_some_and(|at| at <= self.now);
                if due {
                    let events = self.env(|tcb, env, _| tcb.on_timer(env));
                    return format!("{events:?}");
                }
            }
            Op::ShutdownWrite => self.tcb.shutdown_write(self.now),
            Op::ShutdownRead => self.env(|tcb, env, _| tcb.shutdown_read(env)),
            Op::Close => self.env(|tcb, env, _| tcb.close(env)),
        }
        String::new()
    }

    /// The whole state that determines the connection's behaviour.
    fn observable_state(&self) -> String {
        let t = &self.tcb;
        let send = (t.iss, t.snd.una, t.snd.nxt, t.snd.wnd, t.snd.wl1, t.snd.max_wnd, t.send_marks);
        let fin = (t.fin.queued, t.fin.sent, t.fin.peer_at, t.fin.received);
        let receive = (t.rcv.nxt, t.rcv.adv, t.rcv.last_ack_sent, t.rcv_mss, &t.space);
        let pushed = (
            t.recv_marks.pushed_to,
            t.recv_marks.pushed_behind,
            t.recv_marks.urgent_to,
            t.quick_acks,
            t.dialogue,
        );
        let mut readable = alloc::vec![0; t.recv.readable()];
        t.recv.peek(0, &mut readable);
        let queues = (
            t.recv.next(),
            t.recv.storage_bytes(),
            t.recv.out_of_order_bytes(),
            t.send.head(),
            t.send.ready_end(),
            t.send.limit(),
        );
        let times = (t.times, t.timers, t.persisting, t.ts, t.rtt, t.challenge, t.probe_answers);
        let windows = (
            &t.congestion,
            &t.sacked,
            &t.delivery,
            t.pacing,
            t.recovery,
            t.tuning,
            t.recv_tuning,
            self.window,
        );
        let segments = (t.mss, t.super_bytes, t.mtu_search);
        let asked = (t.due, t.user, t.errors, t.retransmits, segments, t.ecn);
        format!(
            "{:?} {send:?} {fin:?} {receive:?} {pushed:?} {queues:?} {times:?} {windows:?} {asked:?} \
             {readable:?} {:?} {:?}",
            t.state,
            self.counts(),
            self.out.0,
        )
    }

    fn counts(&self) -> Vec<u64> {
        let counts = Counter::ALL.iter().map(|c| self.counters.value(*c));
        counts.chain(DropReason::ALL.iter().map(|r| self.counters.drops(*r))).collect()
    }

    fn release(mut self) {
        self.env(|tcb, env, _| tcb.release(env));
        assert_eq!((self.pool.outstanding(), self.window.granted_bytes), (0, 0));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn a_predicted_segment_does_what_the_general_steps_do(
        timestamps in any::<bool>(),
        sack in any::<bool>(),
        congestion in proptest::sample::select(CongestionControl::ALL),
        probes in any::<bool>(),
        ace in proptest::sample::select(&[0u8, 1, 2, 3]),
        ops in proptest::collection::vec(op(), 1..120),
    ) {
        let cfg = Config {
            timestamps,
            sack,
            congestion,
            mtu_probing: if probes { MtuProbing::Always } else { MtuProbing::BlackHole },
            ecn: EcnPolicy::Ask,
            send_buffer_bytes: 60_000,
            recv_buffer_bytes: 60_000,
            ..Config::default()
        };
        let (mut fast, mut full) = (Endpoint::new(&cfg, ace, true), Endpoint::new(&cfg, ace, false));
        for op in &ops {
            let told = (fast.step(op), full.step(op));
            prop_assert_eq!(told.0, told.1, "{:?}", op);
            prop_assert_eq!(fast.observable_state(), full.observable_state(), "{:?}", op);
            if fast.tcb.recovery.is_quiet() && fast.tcb.sacked.is_clean() {
                // `pipe` returns `flight` without computing it.
                prop_assert_eq!(fast.tcb.pipe_in_recovery(), fast.tcb.flight());
            }
            fast.out.0.clear();
            full.out.0.clear();
        }
        fast.release();
        full.release();
    }
}

#[test]
fn the_differential_test_predicts_at_least_a_sixth_of_its_segments() {
    use proptest::strategy::ValueTree;
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let (mut predicted, mut all) = (0, 0);
    for ace in [0, 2].into_iter().cycle().take(100) {
        let ops = proptest::collection::vec(op(), 60).new_tree(&mut runner).unwrap().current();
        let mut end =
            Endpoint::new(&Config { ecn: EcnPolicy::Ask, ..Config::default() }, ace, true);
        for op in &ops {
            all += usize::from(matches!(op, Op::Segment(_)));
            let _ = end.step(op);
        }
        predicted += end.predicted;
        end.release();
    }
    assert!(predicted * 6 > all, "{predicted} of {all}");
}
