//! Two engines and a network between them on virtual time: loss, reordering, duplication, and a
//! bottleneck with a queue.
#![allow(dead_code)]

use fulmar_stack::base::{Counters, Duration, FlowKey, Instant, SeqNum};
use fulmar_stack::mbuf::{Chain, Pool, PoolConfig, Purpose};
use fulmar_stack::tcp::*;
use fulmar_stack::wire::tcp::{Flags, Header};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// xorshift64*.
#[derive(Clone, Debug)]
pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }
    pub fn below(&mut self, n: u64) -> u64 {
        if n == 0 { 0 } else { (self.next() >> 11) % n }
    }
    pub fn chance(&mut self, per_mille: u64) -> bool {
        self.below(1000) < per_mille
    }
    pub fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len() as u64) as usize]
    }
}

pub fn pattern(side: usize, offset: u64) -> u8 {
    (offset ^ (offset >> 8).wrapping_mul(31) ^ (side as u64 * 91)) as u8
}

/// Behaviour of the network.
#[derive(Clone, Copy, Debug)]
pub struct Net {
    pub one_way: Duration,
    pub loss: u64,
    pub duplicate: u64,
    pub reorder: u64,
    /// Super-segments arrive unsegmented, as GRO delivers them.
    pub whole: bool,
    /// Larger packets are lost without a word, bytes.
    pub mtu: usize,
    /// The narrowest link on the way from the first side to the second.
    pub bottleneck: Option<Bottleneck>,
}

impl Net {
    /// Neither loss nor reordering nor a bottleneck.
    pub fn clean(one_way: Duration) -> Net {
        Net {
            one_way,
            loss: 0,
            duplicate: 0,
            reorder: 0,
            whole: false,
            mtu: usize::MAX,
            bottleneck: None,
        }
    }
}

/// A link with a drop-tail queue.
#[derive(Clone, Copy, Debug)]
pub struct Bottleneck {
    pub bytes_per_s: u64,
    pub queue_bytes: u64,
}

/// What the bottleneck has done.
#[derive(Clone, Copy, Debug, Default)]
pub struct Link {
    /// When it has sent what is queued.
    pub free_at: Instant,
    pub dropped: u64,
    pub longest_queue_bytes: u64,
    /// Sum and number of the queues that packets found.
    pub queues_bytes: u64,
    pub packets: u64,
}

impl Link {
    /// When a packet of `len` bytes has left; `None` if the queue was full.
    fn pass(&mut self, of: &Bottleneck, len: usize, now: Instant) -> Option<Instant> {
        let ns_of = |bytes: u64| bytes * 1_000_000_000 / of.bytes_per_s;
        let wait = self.free_at.since(now).as_nanos() as u64;
        let queue = wait * of.bytes_per_s / 1_000_000_000;
        if queue + len as u64 > of.queue_bytes {
            self.dropped += 1;
            return None;
        }
        self.longest_queue_bytes = self.longest_queue_bytes.max(queue);
        self.queues_bytes += queue;
        self.packets += 1;
        self.free_at = self.free_at.max(now) + Duration::from_nanos(ns_of(len as u64));
        Some(self.free_at)
    }

    /// The mean queue that packets found, bytes.
    pub fn mean_queue_bytes(&self) -> u64 {
        self.queues_bytes / self.packets.max(1)
    }
}

/// What the network does to ECN, with random numbers of its own.
#[derive(Clone, Debug)]
pub struct Marks {
    pub rng: Rng,
    /// ECN-capable packets that are marked, in a thousand.
    pub marked: u64,
    /// The bottleneck marks packets that arrive when this number of bytes is queued.
    pub above_bytes: u64,
    pub mangles: Mangles,
    /// Packets that were marked.
    pub count: u64,
}

/// How a path falsifies ECN.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mangles {
    Nothing,
    /// The IP field of everything becomes Not-ECT, or any value.
    ClearsField,
    ForgesField,
    /// The flags of everything are cleared, or one packet in ten has any.
    ClearsFlags,
    ForgesFlags,
    /// AccECN options become padding, or one in ten has any counters.
    StripsOptions,
    ForgesOptions,
}

impl Marks {
    pub fn new(marked: u64, mangles: Mangles) -> Marks {
        Marks { rng: Rng(0x5eed), marked, above_bytes: u64::MAX, mangles, count: 0 }
    }

    /// The ECN field with which a packet arrives; its flags and options may change.
    fn pass(&mut self, bytes: &mut [u8], capable: bool, queue_bytes: u64) -> u8 {
        let is_marked = self.rng.chance(self.marked) || queue_bytes > self.above_bytes;
        let is_hit = self.rng.chance(100);
        let any = self.rng.next();
        self.count += u64::from(capable && is_marked);
        match self.mangles {
            Mangles::ClearsFlags => Marks::set_flags(bytes, 0),
            Mangles::ForgesFlags if is_hit => Marks::set_flags(bytes, any as u8),
            Mangles::StripsOptions => Marks::change_options(bytes, |option| option.fill(1)),
            Mangles::ForgesOptions if is_hit => Marks::change_options(bytes, |option| {
                let noise = any.to_le_bytes();
                option[2..].iter_mut().zip(noise).for_each(|(b, n)| *b = n);
            }),
            _ => {}
        }
        match self.mangles {
            Mangles::ClearsField => 0,
            Mangles::ForgesField => any as u8 & 3,
            _ if !capable => 0,
            _ => 2 | u8::from(is_marked),
        }
    }

    fn set_flags(bytes: &mut [u8], ace: u8) {
        bytes[12] = bytes[12] & !1 | ace >> 2 & 1;
        bytes[13] = bytes[13] & 0x3f | ace << 6;
    }

    fn change_options(bytes: &mut [u8], change: impl Fn(&mut [u8])) {
        let end = usize::from(bytes[12] >> 4) * 4;
        let mut at = 20;
        while at < end {
            let length = if bytes[at] < 2 { 1 } else { usize::from(bytes[at + 1]) };
            if matches!(bytes[at], 172 | 174) {
                change(&mut bytes[at..at + length]);
            }
            at += length;
        }
    }
}

/// Collects what a Tcb emits as bytes.
struct Out {
    packets: Vec<(Vec<u8>, Option<u16>, bool)>,
    room: usize,
}

impl Emit for Out {
    fn emit(
        &mut self,
        pool: &mut Pool,
        _: &mut Counters,
        seg: SegmentOut,
    ) -> Result<(), EmitError> {
        let bytes = seg.chain.to_vec();
        pool.free(seg.chain);
        if self.room == 0 {
            return Err(EmitError::Full);
        }
        self.room -= 1;
        let gso = seg.offload.gso.map(|g| g.segment_bytes);
        self.packets.push((bytes, gso, seg.ecn_capable));
        Ok(())
    }
    fn space(&self) -> usize {
        self.room
    }
}

pub struct Side {
    pub index: usize,
    pub tcb: Tcb,
    pub pool: Pool,
    pub counters: Counters,
    pub window: WindowBudget,
    pub path: PathInfo,
    pub to_send: u64,
    pub written: u64,
    pub got: u64,
    /// Size of the largest read, and pause between reads.
    pub read_bytes: usize,
    pub pause: Duration,
    pub read_at: Option<Instant>,
    pub retry_at: Option<Instant>,
    /// Sending is not shut down when everything is written.
    pub stays_open: bool,
    pub shut: bool,
    pub closed: bool,
    pub connected: bool,
}

impl Side {
    pub fn env<R>(&mut self, now: Instant, f: impl FnOnce(&mut Tcb, &mut Env) -> R) -> R {
        let mut env = Env {
            now,
            pool: &mut self.pool,
            counters: &mut self.counters,
            window: &mut self.window,
        };
        f(&mut self.tcb, &mut env)
    }

    fn write_some(&mut self, now: Instant, rng: &mut Rng) {
        while self.connected && self.written < self.to_send && self.tcb.can_send() {
            let space = self.tcb.send_queue().space() as u64;
            let most = (self.to_send - self.written).min(space);
            let n = most.min(1 + rng.below(70_000));
            if n == 0 {
                return;
            }
            let Ok(mut chain) = self.pool.alloc_chain(n as usize, 0, Purpose::Send) else {
                self.retry_at = Some(now + Duration::from_millis(5));
                return;
            };
            let bytes: Vec<u8> = (0..n).map(|i| pattern(self.index, self.written + i)).collect();
            chain.copy_from(0, &bytes).unwrap();
            self.tcb.send_queue().append(chain, &mut self.pool).unwrap();
            self.written += n;
        }
        if self.connected && self.written == self.to_send && !self.shut && !self.stays_open {
            self.shut = true;
            self.tcb.shutdown_write(now);
        }
    }

    fn read_some(&mut self, now: Instant) {
        if self.read_at.is_some_and(|at| at > now) {
            return;
        }
        self.read_at = None;
        if self.tcb.recv_queue().readable() == 0 {
            return;
        }
        let chain = self.tcb.recv_queue().take(self.read_bytes, &mut self.pool);
        for b in chain.slices().flatten() {
            assert_eq!(*b, pattern(1 - self.index, self.got), "byte {}", self.got);
            self.got += 1;
        }
        self.pool.free(chain);
        self.env(now, |t, env| t.after_read(env));
        if self.tcb.recv_queue().readable() > 0 || !self.pause.is_zero() {
            self.read_at = Some(now + self.pause);
        }
    }

    /// Closes once both directions are complete.
    fn close_if_done(&mut self, now: Instant) {
        if self.shut && self.tcb.at_eof() && !self.closed {
            self.closed = true;
            self.env(now, |t, env| t.close(env));
        }
    }

    pub fn done(&self) -> bool {
        self.closed && matches!(self.tcb.state(), State::TimeWait | State::Closed)
    }

    pub fn deadline(&self) -> Option<Instant> {
        [self.tcb.next_deadline(), self.read_at, self.retry_at].into_iter().flatten().min()
    }
}

type Event = Reverse<(Instant, u64, usize, Vec<u8>, u8)>;

pub struct World {
    pub now: Instant,
    pub sides: [Side; 2],
    pub events: BinaryHeap<Event>,
    pub count: u64,
    pub net: Net,
    pub link: Link,
    /// `None`: no router marks, and nothing is falsified.
    pub marks: Option<Marks>,
    pub rng: Rng,
    /// The passive side's Tcb is created by the first SYN, as a listener would.
    pub passive_ready: bool,
    pub passive_cfg: Config,
}

pub fn keys() -> [FlowKey; 2] {
    let (a, b) = ("10.0.0.1:80".parse().unwrap(), "10.0.0.2:4000".parse().unwrap());
    [FlowKey::new(a, b), FlowKey::new(b, a)]
}

impl World {
    pub fn new(net: Net, sides: [Side; 2], passive_cfg: Config, rng: Rng) -> World {
        World {
            now: Instant::from_millis(50_000),
            sides,
            events: BinaryHeap::new(),
            count: 0,
            net,
            link: Link::default(),
            marks: None,
            rng,
            passive_ready: false,
            passive_cfg,
        }
    }

    /// A stream without end from the first side to the second, connected and under way.
    pub fn bulk(net: Net, cfg: &Config, seed: u64) -> World {
        let mut rng = Rng(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        let path =
            PathInfo { mtu: 1500, route_mtu: 1500, ip_header_bytes: 20, tso_bytes: Some(65_535) };
        let mut sides =
            [side(0, cfg, path, &mut rng, u64::MAX / 2), side(1, cfg, path, &mut rng, 0)];
        for s in &mut sides {
            s.pool = Pool::new(PoolConfig::with_budget(256 << 20)).unwrap();
            s.window = WindowBudget::new(64 << 20);
            s.read_bytes = usize::MAX;
            s.pause = Duration::ZERO;
            s.stays_open = s.index == 0;
        }
        let mut w = World::new(net, sides, *cfg, rng);
        w.pump(0);
        w
    }

    /// Runs for a time. Returns what the second side has received in it, Mb/s.
    pub fn goodput(&mut self, time: Duration) -> f64 {
        let (end, before) = (self.now + time, self.sides[1].got);
        while self.now < end {
            // An idle connection has no events.
            match self.next_event().filter(|at| *at <= end) {
                Some(_) => assert!(self.step()),
                None => self.now = end,
            }
        }
        (self.sides[1].got - before) as f64 * 8.0 / time.as_secs_f64() / 1e6
    }

    pub fn pump(&mut self, i: usize) {
        let (now, rng) = (self.now, &mut self.rng);
        let s = &mut self.sides[i];
        s.retry_at = None;
        s.read_some(now);
        s.write_some(now, rng);
        s.close_if_done(now);
        let room = if rng.chance(20) { rng.below(3) as usize } else { usize::MAX };
        let mut out = Out { packets: Vec::new(), room };
        let path = s.path;
        let sent = s.env(now, |t, env| t.output(env, &path, &mut out));
        if sent != Sent::Done {
            s.retry_at = Some(now + Duration::from_millis(1));
        } else {
            assert!(!s.tcb.wants_output(), "output left something unsent");
        }
        for (bytes, gso, capable) in out.packets {
            self.carry(i, bytes, gso, capable);
        }
    }

    fn carry(&mut self, from: usize, bytes: Vec<u8>, gso: Option<u16>, capable: bool) {
        match gso {
            Some(n) if !self.net.whole => {
                for piece in cut(&bytes, usize::from(n)) {
                    self.carry_packet(from, piece, capable);
                }
            }
            _ => self.carry_packet(from, bytes, capable),
        }
    }

    fn carry_packet(&mut self, from: usize, mut bytes: Vec<u8>, capable: bool) {
        if self.rng.chance(self.net.loss) || bytes.len() + 20 > self.net.mtu {
            return;
        }
        let mut leaves = self.now;
        if let Some(bottleneck) = self.net.bottleneck.filter(|_| from == 0) {
            let Some(at) = self.link.pass(&bottleneck, bytes.len() + 20, self.now) else { return };
            leaves = at;
        }
        let queue_bytes = self.net.bottleneck.filter(|_| from == 0).map_or(0, |b| {
            leaves.since(self.now).as_nanos() as u64 * b.bytes_per_s / 1_000_000_000
        });
        let field = self.marks.as_mut().map_or(0, |m| m.pass(&mut bytes, capable, queue_bytes));
        let copies = if self.rng.chance(self.net.duplicate) { 2 } else { 1 };
        for _ in 0..copies {
            let late =
                if self.rng.chance(self.net.reorder) { self.rng.below(20_000_000) } else { 0 };
            let at = leaves + self.net.one_way + Duration::from_nanos(late);
            self.count += 1;
            self.events.push(Reverse((at, self.count, 1 - from, bytes.clone(), field)));
        }
    }

    fn deliver(&mut self, to: usize, bytes: &[u8], field: u8) {
        let now = self.now;
        let (hdr, n) = Header::parse(bytes).unwrap();
        if to == 1 && !self.passive_ready {
            if hdr.flags.without(Flags::ECN) != Flags::SYN {
                return;
            }
            let path = self.sides[1].path;
            let iss = SeqNum(self.rng.next() as u32);
            self.sides[1].tcb =
                Tcb::passive(&self.passive_cfg, keys()[1], iss, 77, path, now, &hdr);
            self.sides[1].tcb.set_syn_ecn(EcnField::of_bits(field));
            self.passive_ready = true;
            return;
        }
        let s = &mut self.sides[to];
        let payload = if bytes.len() > n {
            let Ok(mut c) = s.pool.alloc_chain(bytes.len() - n, 0, Purpose::Receive) else {
                return;
            };
            c.copy_from(0, &bytes[n..]).unwrap();
            c
        } else {
            Chain::new()
        };
        let field = EcnField::of_bits(field);
        let events = s.env(now, |t, env| t.input(env, &hdr, field, payload));
        if events.contains(Events::CONNECTED) {
            s.connected = true;
        }
        assert!(!events.contains(Events::ERROR), "{:?}", s.tcb.take_error());
    }

    fn next_event(&self) -> Option<Instant> {
        let arrival = self.events.peek().map(|Reverse(e)| e.0);
        let timers = [self.sides[0].deadline(), self.sides[1].deadline()];
        timers.into_iter().chain([arrival]).flatten().min()
    }

    /// Advances to the next event. False when both sides are done.
    pub fn step(&mut self) -> bool {
        if self.sides.iter().all(Side::done) {
            return false;
        }
        let next = self.next_event().expect("a stall: nothing in flight, no timer runs");
        self.now = self.now.max(next);
        // A batch of segments, then one output, as in a shard.
        let mut touched = [false; 2];
        while let Some(Reverse(e)) = self.events.peek()
            && e.0 <= self.now
        {
            let Reverse((_, _, to, bytes, field)) = self.events.pop().unwrap();
            self.deliver(to, &bytes, field);
            touched[to] = true;
        }
        for (i, touched) in touched.into_iter().enumerate() {
            let now = self.now;
            let due = self.sides[i].deadline().is_some_and(|d| d <= now);
            if due {
                let events = self.sides[i].env(now, |t, env| t.on_timer(env));
                assert!(!events.contains(Events::ERROR), "{:?}", self.sides[i].tcb.take_error());
            }
            if (due || touched) && (i == 0 || self.passive_ready) {
                self.pump(i);
            }
        }
        true
    }
}

/// Segmentation of a super-segment.
fn cut(bytes: &[u8], mss: usize) -> Vec<Vec<u8>> {
    let (hdr, n) = Header::parse(bytes).unwrap();
    let pieces: Vec<_> = bytes[n..].chunks(mss).collect();
    let last = pieces.len() - 1;
    let mut out = Vec::new();
    for (i, piece) in pieces.into_iter().enumerate() {
        let mut h = hdr;
        h.seq = hdr.seq + (i * mss) as u32;
        if i != last {
            h.flags = h.flags.without(Flags::PSH | Flags::FIN);
        }
        let mut packet = vec![0; n];
        h.emit(&mut packet).unwrap();
        packet.extend_from_slice(piece);
        out.push(packet);
    }
    out
}

pub fn side(index: usize, cfg: &Config, path: PathInfo, rng: &mut Rng, to_send: u64) -> Side {
    let now = Instant::from_millis(50_000);
    let budget = rng.pick(&[8usize << 20, 32 << 20]);
    let slow = rng.chance(200);
    Side {
        index,
        tcb: Tcb::connect(cfg, keys()[index], SeqNum(rng.next() as u32), 12_345, path, now),
        pool: Pool::new(PoolConfig::with_budget(budget)).unwrap(),
        counters: Counters::default(),
        window: WindowBudget::new(budget / 4),
        path,
        to_send,
        written: 0,
        got: 0,
        read_bytes: if slow { 1 + rng.below(20_000) as usize } else { usize::MAX },
        pause: if slow { Duration::from_millis(1 + rng.below(50)) } else { Duration::ZERO },
        read_at: None,
        retry_at: None,
        stays_open: false,
        shut: false,
        closed: false,
        connected: false,
    }
}
