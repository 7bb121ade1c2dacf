//! A small language for traces: one Tcb, explicit time, segments with relative sequence numbers.
//!
//! On both sides position 0 is the SYN and the stream starts at 1. The initial sequence numbers are
//! close to 2^32, so that every trace wraps. Payload is a pattern over the stream, verified in both
//! directions.
#![allow(dead_code)]

use fulmar::internals::drivers::link::{Impairments, LinkConfig};
use fulmar_stack::base::{Counter, Counters, DropReason, Duration, FlowKey, Instant, SeqNum};
use fulmar_stack::mbuf::{Chain, Pool, PoolConfig, Purpose};
use fulmar_stack::shard::StackConfig;
use fulmar_stack::tcp::*;
use fulmar_stack::wire::tcp::{
    EcnCounters, EcnOrder, FastOpen, FastOpenCookie, Flags, Header, Timestamps,
};
use fulmar_testbed::connection::Connection;
use fulmar_testbed::stations;
use std::collections::VecDeque;

pub const OUR_ISS: SeqNum = SeqNum(u32::MAX - 300);
pub const PEER_ISS: SeqNum = SeqNum(u32::MAX - 700);

/// The payload byte at a stream offset.
pub fn pattern(offset: u64) -> u8 {
    (offset ^ (offset >> 8).wrapping_mul(31)) as u8
}

/// A segment of a trace.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Seg {
    pub flags: Flags,
    pub seq: u32,
    pub ack: u32,
    pub win: u16,
    pub len: usize,
    pub mss: Option<u16>,
    pub scale: Option<u8>,
    pub sack_ok: bool,
    pub ts: Option<(u32, u32)>,
    pub sack: Vec<(u32, u32)>,
    /// The Fast Open option.
    pub fo: Option<FastOpen>,
    pub urgent: u16,
    /// Payload of each packet, for a super-segment.
    pub gso: Option<u16>,
    /// The ECN field of its IP packet.
    pub ecn: EcnField,
    /// AccECN counters: bytes with ECT(0), CE, ECT(1).
    pub counters: Option<(u32, u32, u32)>,
}

pub fn flags(letters: &str) -> Flags {
    letters.chars().fold(Flags::default(), |f, c| {
        f | match c {
            'S' => Flags::SYN,
            'F' => Flags::FIN,
            'R' => Flags::RST,
            'P' => Flags::PSH,
            'A' => Flags::ACK,
            'U' => Flags::URG,
            'E' => Flags::ECE,
            'W' => Flags::CWR,
            'e' => Flags::AE,
            c => panic!("no flag {c}"),
        }
    })
}

/// The stream offset of the first byte of a segment: behind its SYN, if it has one.
fn first_byte(flags: Flags, seq: u32) -> u64 {
    u64::from(seq).wrapping_sub(u64::from(!flags.contains(Flags::SYN)))
}

/// A Fast Open option with a cookie of these bytes; a request without.
pub fn fast_open(cookie: &[u8]) -> Option<FastOpen> {
    Some(FastOpen { cookie: FastOpenCookie::new(cookie), is_experimental: false })
}

/// Collects emitted segments.
pub struct Out {
    pub segs: VecDeque<Seg>,
    pub room: usize,
}

impl Emit for Out {
    fn emit(
        &mut self,
        pool: &mut Pool,
        _: &mut Counters,
        seg: SegmentOut,
    ) -> Result<(), EmitError> {
        if self.room == 0 {
            pool.free(seg.chain);
            return Err(EmitError::Full);
        }
        self.room -= 1;
        assert!(seg.chain.front().unwrap().headroom() >= 80);
        assert!(seg.offload.needs_csum);
        let bytes = seg.chain.to_vec();
        pool.free(seg.chain);
        let (h, n) = Header::parse(&bytes).expect("a header that parses");
        let rel = |s: SeqNum, base: SeqNum| s.0.wrapping_sub(base.0);
        let payload = &bytes[n..];
        let seq = rel(h.seq, OUR_ISS);
        for (i, b) in payload.iter().enumerate() {
            let offset = first_byte(h.flags, seq) + i as u64;
            assert_eq!(*b, pattern(offset), "byte {offset} of the stream");
        }
        if let Some(g) = seg.offload.gso {
            assert!(payload.len() > usize::from(g.segment_bytes));
            assert_eq!(usize::from(g.header_bytes), n);
        }
        self.segs.push_back(Seg {
            flags: h.flags,
            seq,
            ack: if h.flags.contains(Flags::ACK) { rel(h.ack, PEER_ISS) } else { 0 },
            win: h.window,
            len: payload.len(),
            mss: h.options.mss,
            scale: h.options.window_scale,
            sack_ok: h.options.sack_permitted,
            ts: h.options.timestamps.map(|t| (t.value, t.echo)),
            sack: h.options.sack.iter().map(|b| (rel(b.0, PEER_ISS), rel(b.1, PEER_ISS))).collect(),
            fo: h.options.fast_open,
            urgent: h.urgent,
            gso: seg.offload.gso.map(|g| g.segment_bytes),
            ecn: if seg.ecn_capable { EcnField::Ect0 } else { EcnField::NotEct },
            counters: h
                .options
                .ecn
                .map(|o| (o.ect0().unwrap_or(0), o.ce().unwrap_or(0), o.ect1().unwrap_or(0))),
        });
        Ok(())
    }

    fn space(&self) -> usize {
        self.room
    }
}

/// A Tcb driven by a trace.
pub struct Trace {
    pub tcb: Tcb,
    pub pool: Pool,
    pub counters: Counters,
    pub window: WindowBudget,
    pub now: Instant,
    pub path: PathInfo,
    pub out: Out,
    /// Path MTUs adopted by the connection.
    pub adopted: Vec<usize>,
    pub events: Events,
    recv_purpose: Purpose,
    /// Pool of received segments if it differs from the receiver's, as for device `link`.
    pub sender: Option<Pool>,
    written: u64,
    read: u64,
}

pub fn key() -> FlowKey {
    FlowKey::new("10.0.0.1:80".parse().unwrap(), "10.0.0.2:4000".parse().unwrap())
}

/// Without timestamps and window scale, for readable traces.
pub fn plain() -> Config {
    Config {
        timestamps: false,
        max_buffer_bytes: 65_535,
        recv_buffer_bytes: 65_535,
        send_buffer_bytes: 65_535,
        ..Config::default()
    }
}

pub fn path() -> PathInfo {
    PathInfo { mtu: 1040, route_mtu: 1040, ip_header_bytes: 20, tso_bytes: None }
}

impl Trace {
    pub fn with(tcb: Tcb) -> Trace {
        Trace {
            tcb,
            pool: Pool::new(PoolConfig::with_budget(32 << 20)).unwrap(),
            counters: Counters::default(),
            window: WindowBudget::new(64 << 20),
            now: Instant::from_millis(1000),
            path: path(),
            out: Out { segs: VecDeque::new(), room: 1000 },
            events: Events::NONE,
            adopted: Vec::new(),
            recv_purpose: Purpose::Receive,
            sender: None,
            written: 0,
            read: 0,
        }
    }

    /// Active open; the SYN is not sent yet.
    pub fn connect(cfg: Config) -> Trace {
        let now = Instant::from_millis(1000);
        Trace::with(Tcb::connect(&cfg, key(), OUR_ISS, 0, path(), now))
    }

    /// Passive open on `syn`; the SYN,ACK is not sent yet.
    pub fn passive(cfg: Config, syn: Seg) -> Trace {
        let now = Instant::from_millis(1000);
        let syn = header(&syn);
        Trace::with(Tcb::passive(&cfg, key(), OUR_ISS, 0, path(), now, &syn))
    }

    /// Passive open on a `syn` with a valid Fast Open cookie; the SYN,ACK is not sent yet.
    pub fn passive_fast_open(cfg: Config, syn: Seg) -> Trace {
        let len = syn.len;
        let mut t = Trace::passive(cfg, syn);
        let payload = t.payload(0, len);
        t.env(|tcb, env, _, _| tcb.accept_syn_data(env, payload));
        t
    }

    /// Established by an active open, both MSS 1000, the peer's window 50000.
    pub fn established_with(cfg: Config) -> Trace {
        Trace::established_after(cfg, 0)
    }

    /// As `established_with`, with a round-trip time of `ms`.
    pub fn established_after(cfg: Config, ms: u64) -> Trace {
        let mut t = Trace::connect(cfg);
        t.output();
        t.out.segs.clear();
        t.wait(ms);
        let ts = cfg.timestamps.then_some((500, 1000));
        let syn_ack = Seg {
            flags: flags("SA"),
            ack: 1,
            win: 50_000,
            mss: Some(1000),
            sack_ok: cfg.sack,
            ts,
            ..Seg::default()
        };
        t.recv(syn_ack);
        t.output();
        t.out.segs.clear();
        t
    }

    pub fn established() -> Trace {
        Trace::established_with(plain())
    }

    fn env<R>(&mut self, f: impl FnOnce(&mut Tcb, &mut Env, &PathInfo, &mut Out) -> R) -> R {
        let mut env = Env {
            now: self.now,
            pool: &mut self.pool,
            counters: &mut self.counters,
            window: &mut self.window,
        };
        f(&mut self.tcb, &mut env, &self.path, &mut self.out)
    }

    /// Runs output once.
    pub fn pass(&mut self) -> Sent {
        self.env(|tcb, env, path, out| tcb.output(env, path, out))
    }

    /// Runs output once and expects it to complete.
    pub fn output(&mut self) {
        assert_eq!(self.pass(), Sent::Done);
    }

    /// A segment arrives, and output runs.
    pub fn recv(&mut self, seg: Seg) {
        self.input(seg);
        self.output();
    }

    /// A segment arrives, without output.
    pub fn input(&mut self, seg: Seg) {
        let payload = self.payload(first_byte(seg.flags, seg.seq), seg.len);
        self.input_chain(seg, payload);
    }

    /// As `input`, with this payload.
    pub fn input_chain(&mut self, seg: Seg, payload: Chain) {
        let hdr = header(&seg);
        self.events = self.env(|tcb, env, _, _| tcb.input(env, &hdr, seg.ecn, payload));
    }

    /// Whether received segments use the control reserve, as small ones do when the receive share
    /// is exhausted.
    pub fn reserve(&mut self, on: bool) {
        self.recv_purpose = if on { Purpose::Control } else { Purpose::Receive };
    }

    fn payload(&mut self, first: u64, len: usize) -> Chain {
        if len == 0 {
            return Chain::new();
        }
        let pool = self.sender.as_mut().unwrap_or(&mut self.pool);
        let mut chain = pool.alloc_chain(len, 0, self.recv_purpose).unwrap();
        let bytes: Vec<u8> = (0..len as u64).map(|i| pattern(first.wrapping_add(i))).collect();
        chain.copy_from(0, &bytes).unwrap();
        chain
    }

    /// `segs` payloads of `len` bytes each from sequence number `seq` on, joined as by GRO: each in a buffer for a
    /// frame of MTU 1500.
    pub fn joined(&mut self, seq: u32, segs: usize, len: usize) -> Chain {
        let mut at = first_byte(flags("A"), seq);
        let mut block = || {
            let mut m = self.pool.alloc(1500, 66, Purpose::Receive).unwrap();
            let space = m.append(len).unwrap();
            space.iter_mut().zip(at..).for_each(|(to, at)| *to = pattern(at));
            at += len as u64;
            m
        };
        (0..segs).map(|_| block()).collect()
    }

    /// Commits `len` bytes to the send queue, without output.
    pub fn queue(&mut self, len: usize) {
        let mut chain = self.pool.alloc_chain(len, 0, Purpose::Send).unwrap();
        let bytes: Vec<u8> = (0..len as u64).map(|i| pattern(self.written + i)).collect();
        chain.copy_from(0, &bytes).unwrap();
        self.tcb.send_queue().append(chain, &mut self.pool).unwrap();
        self.written += len as u64;
    }

    /// A write: queue and output.
    pub fn write(&mut self, len: usize) {
        self.queue(len);
        self.output();
    }

    /// Reads up to `max` bytes, checks them, and sends a window update if one is due.
    pub fn read(&mut self, max: usize) -> usize {
        let got = self.tcb.recv_queue().take(max, &mut self.pool);
        for b in got.to_vec() {
            assert_eq!(b, pattern(self.read), "byte {} read", self.read);
            self.read += 1;
        }
        let n = got.len();
        self.pool.free(got);
        if self.env(|tcb, env, _, _| tcb.after_read(env)) {
            self.output();
        }
        n
    }

    /// Advances the clock. Each timer runs at its deadline, followed by output.
    pub fn wait(&mut self, ms: u64) {
        self.wait_us(ms * 1000);
    }

    /// Advances the clock without running timers.
    pub fn sleep_us(&mut self, us: u64) {
        self.now = self.now + Duration::from_micros(us);
    }

    /// As `wait`, in microseconds.
    pub fn wait_us(&mut self, us: u64) {
        let end = self.now + Duration::from_micros(us);
        self.events = Events::NONE;
        while let Some(at) = self.tcb.next_deadline().filter(|d| *d <= end) {
            self.now = self.now.max(at);
            let events = self.env(|tcb, env, _, _| tcb.on_timer(env));
            self.events |= events;
            self.apply_path_mtu();
            self.output();
        }
        self.now = end;
    }

    pub fn close(&mut self) {
        self.env(|tcb, env, _, _| tcb.close(env));
        self.output();
    }

    pub fn shutdown_read(&mut self) {
        self.env(|tcb, env, _, _| tcb.shutdown_read(env));
    }

    pub fn shutdown(&mut self) {
        let now = self.now;
        self.tcb.shutdown_write(now);
        self.output();
    }

    pub fn abort(&mut self) {
        self.tcb.abort();
        self.output();
    }

    pub fn discard_out_of_order(&mut self) -> usize {
        self.env(|tcb, env, _, _| tcb.discard_out_of_order(env))
    }

    /// Lends bytes, which are freed at once.
    pub fn lend(&mut self, max: usize) -> LoanCharge {
        let chain = self.tcb.recv_queue().take(max, &mut self.pool);
        let lent = LoanCharge::of(&chain);
        self.pool.free(chain);
        self.env(|tcb, env, _, _| {
            env.window.lend(lent.storage_bytes);
            tcb.lend(lent, env);
        });
        lent
    }

    /// Returns a loan, and output runs.
    pub fn take_back(&mut self, lent: LoanCharge) {
        self.window.take_back(lent.storage_bytes);
        if self.env(|tcb, env, _, _| tcb.take_back(lent, env)) {
            self.output();
        }
    }

    pub fn abort_unread(&mut self) {
        self.env(|tcb, env, _, _| tcb.abort_unread(env));
        self.output();
    }

    pub fn icmp(&mut self, what: IcmpError, seq: u32) {
        let quoted = OUR_ISS + seq;
        self.events = self.env(|tcb, env, _, _| tcb.on_icmp(env, what, quoted));
        self.apply_path_mtu();
        self.output();
    }

    /// Enters an adopted path MTU into the path, as the path MTU cache would.
    fn apply_path_mtu(&mut self) {
        if let Some(mtu) = self.tcb.take_path_mtu() {
            self.adopted.push(mtu);
            self.path.mtu = self.path.mtu.min(mtu.max(576));
        }
    }

    #[track_caller]
    pub fn sent(&mut self) -> Seg {
        self.out.segs.pop_front().expect("nothing was sent")
    }

    #[track_caller]
    pub fn expect_silence(&self) {
        assert!(self.out.segs.is_empty(), "sent {:?}", self.out.segs);
    }

    pub fn drops(&self, r: DropReason) -> u64 {
        self.counters.drops(r)
    }

    pub fn count(&self, c: Counter) -> u64 {
        self.counters.value(c)
    }
}

impl Drop for Trace {
    /// Every buffer is freed and the budget balances, whatever the trace did.
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        self.env(|tcb, env, _, _| tcb.release(env));
        assert_eq!(self.pool.outstanding(), 0, "mbufs leaked");
        assert_eq!(self.window.granted_bytes, 0, "window budget leaked");
    }
}

pub fn header(s: &Seg) -> Header {
    let mut h = Header {
        src_port: 4000,
        dst_port: 80,
        seq: PEER_ISS + s.seq,
        ack: if s.flags.contains(Flags::ACK) { OUR_ISS + s.ack } else { SeqNum(0) },
        flags: s.flags,
        window: s.win,
        urgent: s.urgent,
        ..Header::default()
    };
    h.options.mss = s.mss;
    h.options.window_scale = s.scale;
    h.options.sack_permitted = s.sack_ok;
    h.options.fast_open = s.fo;
    h.options.timestamps = s.ts.map(|(value, echo)| Timestamps { value, echo });
    h.options.ecn =
        s.counters.map(|(ect0, ce, ect1)| EcnCounters::full(EcnOrder::Ect0First, ect0, ce, ect1));
    for b in &s.sack {
        h.options.sack.push(OUR_ISS + b.0, OUR_ISS + b.1);
    }
    h
}

/// `seg!("PA", seq = 1, len = 10)`: a segment. Fields not named are zero, the window is 50000.
#[macro_export]
macro_rules! seg {
    ($flags:literal $(, $field:ident = $value:expr)* $(,)?) => {
        $crate::tcp::support::Seg {
            flags: $crate::tcp::support::flags($flags),
            $($field: $value,)*
            ..$crate::tcp::support::Seg { win: 50_000, ..Default::default() }
        }
    };
}

/// A segment from the peer arrives, and output runs.
#[macro_export]
macro_rules! recv {
    ($t:expr, $($seg:tt)*) => { $t.recv($crate::seg!($($seg)*)) };
}

/// Asserts the flags and the named fields of the next segment sent.
#[macro_export]
macro_rules! send {
    ($t:expr, $flags:literal $(, $field:ident = $value:expr)* $(,)?) => {{
        let s = $t.sent();
        assert_eq!(s.flags, $crate::tcp::support::flags($flags), "{s:?}");
        $(assert_eq!(s.$field, $value, concat!(stringify!($field), " of {:?}"), s);)*
    }};
}

/// A path with a limited rate and a queue, and this delay in each direction.
pub fn bottleneck(rate_bps: u64, queue_bytes: usize, delay: Duration) -> Impairments {
    Impairments { rate_bps: Some(rate_bps), queue_bytes, delay, ..Impairments::default() }
}

/// A connection between two stacks over such a path.
pub fn stream_over(seed: u64, how: &Impairments, tcp: Config) -> Connection {
    let config = |station| StackConfig { tcp, ..stations::config(station, 256 << 20) };
    let link = LinkConfig::default();
    Connection::over(seed, how, &link, config, |end| Box::new(end))
}
