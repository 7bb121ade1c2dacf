//! Posted receive over a model of a stream: whatever the device, the network and the application do, each
//! byte is delivered once, in order, to the right buffer.

use crate::mbuf::{Chain, Mbuf, PoolConfig, Purpose};
use proptest::prelude::*;

use super::*;

fn byte(at: u64) -> u8 {
    (at.wrapping_mul(0x9e37_79b9) >> 13) as u8 ^ at as u8
}

fn pattern(at: u64, n: usize) -> Vec<u8> {
    (at..at + n as u64).map(byte).collect()
}

/// A device that places bytes in the posted ranges.
#[derive(Default)]
struct Device {
    expects: Option<(u64, WritableRange, Option<WritableRange>)>,
    places: bool,
    has_syscall_per_frame: bool,
    known: Vec<BufId>,
    /// Number of revocations.
    unplaced: usize,
}

impl Placer for Device {
    fn place(&mut self, next: u64, first: WritableRange, second: Option<WritableRange>) -> bool {
        assert!(self.known.contains(&first.buffer()), "not registered");
        let has_bytes = !first.is_empty() && second.as_ref().is_none_or(|r| !r.is_empty());
        assert!(has_bytes, "an empty range");
        if self.places {
            self.expects = Some((next, first, second));
        }
        self.places
    }
    fn place_next(&mut self, room: WritableRange) -> bool {
        assert!(self.known.contains(&room.buffer()), "not registered");
        assert!(!room.is_empty(), "an empty range");
        match &mut self.expects {
            Some((_, _, second @ None)) => *second = Some(room),
            _ => return false,
        }
        true
    }
    fn revoke(&mut self) {
        self.expects = None;
        self.unplaced += 1;
    }
    fn register(&mut self, b: BufId) {
        assert!(!self.known.contains(&b), "registered twice");
        self.known.push(b);
        assert!(self.known.len() <= 2, "too many registrations");
    }
    fn release(&mut self, b: BufId) {
        assert!(self.known.contains(&b));
        self.known.retain(|k| *k != b);
    }
    fn has_syscall_per_frame(&self) -> bool {
        self.has_syscall_per_frame
    }
}

struct World {
    machine: Posted<usize>,
    recv: RecvQueue,
    pool: Pool,
    device: Device,
    now: Instant,
    /// Bytes sent by the peer.
    sent: u64,
    /// Bytes received by the application.
    got: u64,
    /// Delayed packets: offset and bytes.
    late: Vec<(u64, Chain)>,
    posted: usize,
    finished: Vec<(usize, usize, Option<SocketError>)>,
    /// Updates of the device are deferred if `may_wait` allows it.
    is_lazy: bool,
}

impl World {
    fn new(places: bool) -> World {
        let config = PoolConfig { huge_pages: false, ..PoolConfig::with_budget(8 << 20) };
        World {
            machine: Posted::default(),
            recv: RecvQueue::new(),
            pool: Pool::new(config).expect("a pool"),
            device: Device { places, ..Device::default() },
            now: Instant::from_millis(1),
            sent: 0,
            got: 0,
            late: Vec::new(),
            posted: 0,
            finished: Vec::new(),
            is_lazy: false,
        }
    }

    /// A buffer with 30 bytes is abandoned while the pool is empty. Returns the memory of the pool.
    fn abandon_without_memory(&mut self) -> Vec<Mbuf> {
        let first = self.post(100, WHOLE);
        self.send(30);
        self.deliver();
        let all = std::iter::from_fn(|| self.pool.alloc(1, 0, Purpose::Receive).ok()).collect();
        self.with(|m, io| m.abandon(io, |t| *t == first));
        all
    }

    fn with<R>(&mut self, f: impl FnOnce(&mut Posted<usize>, &mut IoContext<'_>) -> R) -> R {
        let World { machine, recv, pool, device, .. } = self;
        let r = f(machine, &mut IoContext { recv, pool, placer: device, may_place: true });
        while let Some(done) = self.machine.pop_finished() {
            assert_eq!(done.buf[..], pattern(self.got, done.buf.len())[..], "after {}", self.got);
            self.got += done.buf.len() as u64;
            self.finished.push((done.token, done.buf.len(), done.error));
        }
        r
    }

    /// A packet with bytes of the stream, placed by the device if it expects them.
    fn packet(&mut self, at: u64, n: usize) -> Chain {
        let bytes = pattern(at, n);
        let (mut chain, mut done) = (Chain::new(), 0);
        if let Some((next, room, second)) = &mut self.device.expects
            && *next == at
        {
            while done < n {
                let part = room.len().min(n - done);
                room.bytes()[..part].copy_from_slice(&bytes[done..done + part]);
                chain.push_back(room.split(part, &mut self.pool).expect("a descriptor"));
                done += part;
                if room.is_empty() {
                    match second.take() {
                        Some(other) => *room = other,
                        None => break,
                    }
                }
            }
            *next += done as u64;
            if room.is_empty() {
                self.device.expects = None;
            }
        }
        if done < n {
            let mut rest = self.pool.alloc_chain(n - done, 0, Purpose::Receive).expect("memory");
            rest.copy_from(0, &bytes[done..]);
            chain.append(rest);
        }
        chain
    }

    fn send(&mut self, n: usize) {
        let at = self.sent;
        self.sent += n as u64;
        let chain = self.packet(at, n);
        self.recv.insert(at, chain, &mut self.pool);
    }

    fn deliver(&mut self) -> Delivered {
        let now = self.now;
        self.with(|m, io| m.deliver(now, io))
    }

    fn notify_device(&mut self) {
        let now = self.now;
        self.with(|m, io| m.notify_device(now, io));
    }

    fn end_burst(&mut self, is_pushed: bool, ended: Option<Result<(), SocketError>>) -> bool {
        let stream = StreamState { now: self.now, is_pushed, sent: 0, ended };
        self.with(|m, io| m.end_burst(&stream, io))
    }

    fn post(&mut self, bytes: usize, policy: CompletionPolicy) -> usize {
        let token = self.posted;
        if self.machine.post(RecvBuf::from(vec![0; bytes]), policy, token).is_ok() {
            self.posted += 1;
        }
        if !(self.is_lazy && self.machine.may_wait(&self.recv)) {
            self.deliver();
        }
        token
    }

    fn read(&mut self, n: usize) {
        if self.machine.is_waiting() {
            return;
        }
        let chain = self.recv.take(n, &mut self.pool);
        assert_eq!(chain.to_vec(), pattern(self.got, chain.len()));
        self.got += chain.len() as u64;
        self.pool.free(chain);
    }

    /// Delivers all bytes, ends the stream, and asserts that nothing is left.
    fn finish(mut self) {
        for (at, chain) in std::mem::take(&mut self.late) {
            self.recv.insert(at, chain, &mut self.pool);
            self.deliver();
        }
        // Lost bytes are retransmitted.
        while self.recv.next() < self.sent {
            let (at, n) = (self.recv.next(), (self.sent - self.recv.next()).min(700) as usize);
            let chain = self.packet(at, n);
            self.recv.insert(at, chain, &mut self.pool);
            self.deliver();
        }
        for _ in 0..100 {
            self.deliver();
            self.end_burst(false, Some(Ok(())));
        }
        assert!(!self.machine.is_waiting() && !self.machine.is_draining());
        self.read(usize::MAX);
        assert_eq!(self.got, self.sent);
        self.with(|m, io| m.cancel_all(io));
        assert!(self.device.known.is_empty() && self.device.expects.is_none());
        self.recv.clear(&mut self.pool);
        self.pool.drain_remote();
        assert_eq!(self.pool.outstanding(), 0);
    }
}

const WHOLE: CompletionPolicy =
    CompletionPolicy { low_water_bytes: usize::MAX, on_push: false, idle: None };

#[test]
fn bytes_received_before_the_post_are_copied_and_later_ones_are_placed() {
    let mut w = World::new(true);
    w.send(100);
    w.post(1000, WHOLE);
    w.send(500);
    assert_eq!(w.deliver(), Delivered { bytes: 500, ..Delivered::default() });
    w.send(400);
    w.deliver();
    assert_eq!(w.finished, [(0, 1000, None)]);
    w.finish();
}

#[test]
fn a_packet_continues_in_the_second_buffer_and_the_third_is_not_registered_yet() {
    let mut w = World::new(true);
    (0..3).for_each(|_| _ = w.post(100, WHOLE));
    assert_eq!(w.device.known.len(), 2);
    w.send(150);
    assert_eq!(w.deliver().copied, 0);
    w.send(150);
    // The third buffer was posted to the device when the first was full.
    assert_eq!(w.deliver().copied, 0);
    assert_eq!(w.finished, [(0, 100, None), (1, 100, None), (2, 100, None)]);
    w.finish();
}

#[test]
fn bytes_are_copied_on_a_device_without_placement_which_is_retried_later() {
    let mut w = World::new(false);
    w.post(1000, WHOLE);
    w.send(300);
    assert_eq!(w.deliver().copied, 300);
    w.device.places = true;
    w.send(100);
    assert_eq!(w.deliver().copied, 100);
    w.now = w.now + Duration::from_secs(1);
    w.send(100);
    assert_eq!(w.deliver().copied, 100);
    w.send(100);
    assert_eq!(w.deliver().copied, 0);
    w.finish();
}

/// Bytes copied into `n` buffers of 64 KiB that arrive in packets of `piece` bytes.
fn copied_of(w: &mut World, n: usize, piece: usize) -> usize {
    let mut copied = 0;
    for _ in 0..n {
        w.post(64 << 10, WHOLE);
        for _ in 0..(64 << 10) / piece {
            w.send(piece);
            copied += w.deliver().copied;
        }
    }
    copied
}

#[test]
fn placement_of_short_packets_pays_off_only_without_a_call_per_packet() {
    let mut w = World::new(true);
    assert_eq!(copied_of(&mut w, 20, 1024), 0);
    w.finish();
    let mut w = World::new(true);
    w.device.has_syscall_per_frame = true;
    assert_eq!(copied_of(&mut w, 20, 16 << 10), 0, "long packets pay off");
    assert_eq!(copied_of(&mut w, 20, 1024), 12 * (64 << 10), "suspended after eight buffers");
    w.now = w.now + Duration::from_secs(1);
    assert_eq!(copied_of(&mut w, 20, 16 << 10), 0, "retried after the suspension");
    w.finish();
}

#[test]
fn low_water_mark_push_idle_time_and_urgent_data_complete_a_buffer_when_the_device_is_empty() {
    let mut w = World::new(true);
    w.post(1000, CompletionPolicy { low_water_bytes: 10, ..WHOLE });
    w.send(9);
    w.deliver();
    w.end_burst(true, None);
    assert!(w.finished.is_empty());
    w.send(5);
    w.deliver();
    assert!(w.finished.is_empty(), "not while the device has frames");
    w.end_burst(false, None);
    w.post(1000, CompletionPolicy { on_push: true, ..WHOLE });
    w.send(20);
    w.deliver();
    w.end_burst(false, None);
    w.end_burst(true, None);
    w.post(1000, CompletionPolicy { idle: Some(Duration::from_millis(1)), ..WHOLE });
    w.send(30);
    w.deliver();
    assert_eq!(w.machine.next_deadline(), Some(w.now + Duration::from_millis(1)));
    w.end_burst(true, None);
    assert_eq!(w.finished.len(), 2);
    w.now = w.now + Duration::from_millis(1);
    w.end_burst(false, None);
    w.post(1000, WHOLE);
    w.send(40);
    w.deliver();
    w.machine.flush(w.sent);
    w.end_burst(false, None);
    let lens: Vec<usize> = w.finished.iter().map(|f| f.1).collect();
    assert_eq!(lens, [14, 20, 30, 40]);
    w.finish();
}

#[test]
fn an_error_is_reported_by_empty_buffers_and_a_partly_filled_one_completes_short() {
    let mut w = World::new(true);
    w.post(100, WHOLE);
    w.send(10);
    w.deliver();
    let reset = Some(Err(SocketError::ConnectionReset));
    assert!(!w.end_burst(false, reset), "no buffer was empty: the error is left for the next call");
    (0..2).for_each(|_| _ = w.post(100, WHOLE));
    assert!(w.end_burst(false, reset));
    let error = Some(SocketError::ConnectionReset);
    assert_eq!(w.finished, [(0, 10, None), (1, 0, error), (2, 0, error)]);
    w.finish();
}

#[test]
fn a_cancelled_buffer_has_its_bytes_and_waits_for_mbufs_in_flight() {
    let mut w = World::new(true);
    let first = w.post(100, WHOLE);
    let second = w.post(100, WHOLE);
    w.send(30);
    w.deliver();
    // Placed, but not in the receive queue yet.
    let chain = w.packet(30, 20);
    w.sent += 20;
    w.with(|m, io| m.cancel(io, |t| *t == second));
    assert_eq!(w.finished, [(second, 0, Some(SocketError::Cancelled))]);
    w.with(|m, io| m.cancel(io, |t| *t == first));
    assert!(w.machine.is_draining());
    w.recv.insert(30, chain, &mut w.pool);
    w.deliver();
    assert_eq!(w.finished[1], (first, 30, None), "later bytes are read by the next call");
    w.read(100);
    w.finish();
}

/// A state, the token that is cancelled in it, and the completions expected after that.
type State = (World, usize, Vec<(usize, usize, Option<SocketError>)>);

/// Three buffers of 100 bytes, two of them registered, with `filled` bytes in the first.
fn three(filled: usize) -> World {
    let mut w = World::new(true);
    (0..3).for_each(|_| _ = w.post(100, WHOLE));
    if filled > 0 {
        w.send(filled);
        w.deliver();
    }
    w
}

const CANCELLED: Option<SocketError> = Some(SocketError::Cancelled);

/// The states of a buffer that has not ended, in order.
fn waiting_states() -> Vec<(&'static str, State)> {
    let mut copied = World::new(false);
    copied.post(100, WHOLE);
    copied.send(60);
    copied.deliver();
    let mut gap = three(40);
    let behind = gap.packet(50, 20);
    gap.sent = 70;
    gap.recv.insert(50, behind, &mut gap.pool);
    vec![
        ("queued, not registered", (three(30), 2, vec![(2, 0, CANCELLED)])),
        ("registered, behind another", (three(30), 1, vec![(1, 0, CANCELLED)])),
        ("active and empty", (three(0), 0, vec![(0, 0, CANCELLED)])),
        ("active and partly filled, placed", (three(30), 0, vec![(0, 30, None)])),
        ("active and partly filled, copied", (copied, 0, vec![(0, 60, None)])),
        ("active, with bytes behind a gap", (gap, 0, vec![(0, 40, None)])),
    ]
}

/// The states of a buffer that has ended, in which there is nothing to cancel.
fn ending_states() -> Vec<(&'static str, State)> {
    let mut fin = three(30);
    fin.end_burst(false, Some(Ok(())));
    let at_fin = vec![(0, 30, None), (1, 0, None), (2, 0, None)];
    let reset = Some(SocketError::ConnectionReset);
    let mut dead = three(30);
    dead.end_burst(false, Some(Err(SocketError::ConnectionReset)));
    let at_reset = vec![(0, 30, None), (1, 0, reset), (2, 0, reset)];
    let mut closed = three(30);
    closed.with(|m, io| m.cancel_all(io));
    let at_close = vec![(0, 30, None), (1, 0, CANCELLED), (2, 0, CANCELLED)];
    vec![
        ("completed full, still registered", (three(100), 0, vec![(0, 100, None)])),
        ("at the end of the stream", (fin, 1, at_fin)),
        ("after a reset", (dead, 1, at_reset)),
        ("after the close", (closed, 1, at_close)),
    ]
}

#[test]
fn a_cancelled_buffer_completes_once_with_its_exact_length_in_every_state() {
    for (what, (mut w, token, back)) in waiting_states() {
        assert!(w.with(|m, io| m.cancel(io, |t| *t == token)), "{what}");
        assert_eq!(w.finished, back, "{what}");
        assert!(!w.with(|m, io| m.cancel(io, |t| *t == token)), "{what}: a second time");
        w.send(150);
        w.finish();
    }
    for (what, (mut w, token, back)) in ending_states() {
        assert!(!w.with(|m, io| m.cancel(io, |t| *t == token)), "{what}");
        assert_eq!(w.finished, back, "{what}");
        w.finish();
    }
}

#[test]
fn a_full_buffer_with_mbufs_in_use_cannot_be_cancelled_and_completes_when_they_are_freed() {
    let mut w = three(0);
    w.send(100);
    let kept = w.recv.front().map(|m| w.pool.clone_ref(m, 0, 100));
    let kept = kept.expect("placed bytes").expect("a count");
    w.deliver();
    assert_eq!(w.finished, []);
    assert!(w.machine.is_draining());
    assert!(!w.with(|m, io| m.cancel(io, |t| *t == 0)));
    // The next buffer is empty and does not wait for it.
    assert!(w.with(|m, io| m.cancel(io, |t| *t == 1)));
    assert_eq!(w.finished, [(1, 0, CANCELLED)]);
    w.pool.free(Chain::from(kept));
    w.deliver();
    assert_eq!(w.finished, [(1, 0, CANCELLED), (0, 100, None)]);
    w.finish();
}

#[test]
fn bytes_of_an_abandoned_buffer_return_to_the_stream() {
    let mut w = World::new(true);
    let first = w.post(100, WHOLE);
    w.send(30);
    w.deliver();
    w.with(|m, io| m.abandon(io, |t| *t == first));
    assert!(!w.machine.is_waiting());
    w.post(10, WHOLE);
    w.read(5);
    assert_eq!(w.got, 15);
    w.finish();
}

#[test]
fn abandoned_buffers_that_are_empty_leave_although_the_bytes_of_another_cannot_be_returned() {
    let mut w = World::new(false);
    let all = w.abandon_without_memory();
    assert!(w.machine.is_draining(), "there is no memory for its 30 bytes");
    for n in 0..2 * MAX_POSTED {
        let token = w.post(100, WHOLE);
        assert_eq!(w.posted, token + 1, "post {n} is refused");
        assert!(w.with(|m, io| m.abandon(io, |t| *t == token)));
    }
    all.into_iter().for_each(|m| w.pool.free_mbuf(m));
    w.post(20, WHOLE);
    assert_eq!(w.finished, [(w.posted - 1, 20, None)], "the bytes are delivered in order");
    w.read(10);
    w.finish();
}

#[test]
fn the_end_of_the_stream_waits_for_abandoned_bytes_that_cannot_be_returned() {
    let mut w = World::new(false);
    let all = w.abandon_without_memory();
    let second = w.post(100, WHOLE);
    assert!(!w.end_burst(false, Some(Ok(()))));
    assert_eq!(w.finished, [], "30 bytes come before the end");
    all.into_iter().for_each(|m| w.pool.free_mbuf(m));
    w.deliver();
    w.end_burst(false, Some(Ok(())));
    assert_eq!(w.finished, [(second, 30, None)]);
    w.finish();
}

#[test]
fn a_buffer_that_reports_an_error_cannot_be_abandoned_before_it_completes() {
    let mut w = three(0);
    w.send(100);
    let kept = w.recv.front().map(|m| w.pool.clone_ref(m, 0, 100));
    let kept = kept.expect("placed bytes").expect("a count");
    w.deliver();
    assert!(
        w.end_burst(false, Some(Err(SocketError::ConnectionReset))),
        "no later call reports it"
    );
    assert_eq!(w.finished, [], "all wait for the first, whose memory is in use");
    assert!(!w.with(|m, io| m.abandon(io, |t| *t == 1)));
    assert!(!w.with(|m, io| m.abandon(io, |t| *t == 2)));
    w.pool.free(Chain::from(kept));
    w.deliver();
    let error = Some(SocketError::ConnectionReset);
    assert_eq!(w.finished, [(0, 100, None), (1, 0, error), (2, 0, error)]);
    w.finish();
}

#[test]
fn a_buffer_of_length_zero_completes_with_the_one_before_it() {
    let mut w = World::new(true);
    for bytes in [2, 0, 3] {
        w.post(bytes, CompletionPolicy::default());
    }
    w.deliver();
    w.send(1);
    w.deliver();
    w.end_burst(true, None);
    assert_eq!(w.finished, [(0, 1, None), (1, 0, None)]);
    assert!(w.device.expects.is_some(), "the third is posted to the device");
    w.end_burst(false, Some(Ok(())));
    assert_eq!(w.finished.len(), 3);
}

#[test]
fn two_buffers_used_alternately_are_posted_without_a_revocation() {
    let mut w = World { is_lazy: true, ..World::new(true) };
    w.post(1000, WHOLE);
    for _ in 0..10 {
        w.post(1000, WHOLE);
        w.notify_device();
        // The end of one buffer and the start of the other.
        w.send(600);
        w.deliver();
        w.send(400);
        let taken = w.deliver();
        assert_eq!((taken.copied, taken.has_filled), (0, true));
        w.end_burst(false, None);
    }
    assert_eq!((w.finished.len(), w.device.unplaced), (10, 0));
    w.finish();
}

#[test]
fn posted_buffers_are_bounded() {
    let mut w = World::new(true);
    (0..MAX_POSTED).for_each(|_| _ = w.post(1, WHOLE));
    assert!(w.machine.post(RecvBuf::with_capacity(1), WHOLE, 0).is_err());
    w.finish();
}

#[derive(Clone, Debug)]
enum Op {
    Post(usize, u8),
    Send(usize),
    /// Sent, and inserted by `Arrive` or at the end.
    Delay(usize),
    Arrive(usize),
    /// Sent and lost; retransmitted by `Resend` or at the end.
    Lose(usize),
    Resend,
    TakeIn,
    Announce,
    Settle(bool),
    Pass(u64),
    Cancel(usize),
    Abandon(usize),
    Read(usize),
    Flush,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => (0usize..3000, 0u8..4).prop_map(|(n, r)| Op::Post(n, r)),
        8 => (1usize..1500).prop_map(Op::Send),
        2 => (1usize..1500).prop_map(Op::Delay),
        2 => (0usize..8).prop_map(Op::Arrive),
        1 => (1usize..1500).prop_map(Op::Lose),
        2 => Just(Op::Resend),
        6 => Just(Op::TakeIn),
        2 => Just(Op::Announce),
        3 => any::<bool>().prop_map(Op::Settle),
        1 => (1u64..400).prop_map(Op::Pass),
        1 => (0usize..40).prop_map(Op::Cancel),
        1 => (0usize..40).prop_map(Op::Abandon),
        2 => (1usize..4000).prop_map(Op::Read),
        1 => Just(Op::Flush),
    ]
}

fn policy(kind: u8) -> CompletionPolicy {
    match kind {
        0 => WHOLE,
        1 => CompletionPolicy { low_water_bytes: 700, ..WHOLE },
        _ => CompletionPolicy::default(),
    }
}

fn run(w: &mut World, op: Op) {
    match op {
        Op::Post(n, kind) => _ = w.post(n, policy(kind)),
        Op::Send(n) => w.send(n),
        Op::Delay(n) => {
            let (at, chain) = (w.sent, w.packet(w.sent, n));
            w.sent += n as u64;
            w.late.push((at, chain));
        }
        Op::Arrive(i) if i < w.late.len() => {
            let (at, chain) = w.late.swap_remove(i);
            w.recv.insert(at, chain, &mut w.pool);
        }
        Op::Arrive(_) => {}
        Op::Lose(n) => {
            let chain = w.packet(w.sent, n);
            w.sent += n as u64;
            w.pool.free(chain);
        }
        Op::Resend => {
            let (at, n) = (w.recv.next(), (w.sent - w.recv.next()).min(900) as usize);
            if n > 0 {
                let chain = w.packet(at, n);
                w.recv.insert(at, chain, &mut w.pool);
            }
        }
        Op::TakeIn => _ = w.deliver(),
        Op::Announce => w.notify_device(),
        Op::Settle(pushed) => {
            w.deliver();
            w.end_burst(pushed, None);
        }
        Op::Pass(ms) => w.now = w.now + Duration::from_millis(ms),
        Op::Cancel(t) => _ = w.with(|m, io| m.cancel(io, |u| *u == t)),
        Op::Abandon(t) => _ = w.with(|m, io| m.abandon(io, |u| *u == t)),
        Op::Read(n) => w.read(n),
        Op::Flush => w.machine.flush(w.sent),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn every_byte_is_delivered_once_and_in_order(
        places in any::<bool>(),
        is_lazy in any::<bool>(),
        ops in proptest::collection::vec(op(), 1..120),
    ) {
        let mut w = World { is_lazy, ..World::new(places) };
        ops.into_iter().for_each(|op| run(&mut w, op));
        w.finish();
    }
}
