//! Posted buffers in a shard, on a virtual clock: two flows whose packets alternate, over a device that
//! guesses whose packet comes next and is wrong as often as not.

mod device;

use std::sync::{Arc, Mutex};
use std::task::Poll;

use fulmar::internals::drivers::link::{Impairments, LinkConfig, sim_pair};
use fulmar::internals::runtime::{RecvTicket, WatchedShard};
use fulmar_stack::base::{Counter, Duration, Instant, SlotId};
use fulmar_stack::device::Burst;
use fulmar_stack::mbuf::RecvBuf;
use fulmar_stack::shard::Shard;
use fulmar_stack::socket::SocketError;
use fulmar_stack::socket::posted::CompletionPolicy;
use fulmar_testbed::stations::{self, config};
use fulmar_testbed::world::World;

use device::{Guesser, Notes};

struct Pair {
    world: World,
    notes: Arc<Mutex<Notes>>,
}

impl Pair {
    fn over(how: Impairments) -> Pair {
        let (near, far) = sim_pair(1, &how, &LinkConfig::default());
        let notes = Arc::new(Mutex::new(Notes::default()));
        let devices = [near, far].map(|inner| {
            let notes = Arc::clone(&notes);
            let fresh = Burst::with_capacity(256);
            Box::new(Guesser { inner, flows: Vec::new(), turn: 0, fresh, held: None, notes }) as _
        });
        Pair { world: World::new(devices, |n| config(n, 16 << 20)), notes }
    }

    /// Lets time pass up to the next thing to do.
    fn go_on(&mut self) {
        self.world.advance(Duration::from_millis(10));
        self.deliver();
    }

    /// Completes the buffers that are over.
    fn deliver(&mut self) {
        self.world.shards.iter_mut().for_each(|s| drop(s.take_received()));
    }

    /// A connection from station 0 to station 1: the ends.
    fn connected(&mut self, port: u16) -> (SlotId, SlotId) {
        let listener = self.world.listen(port);
        let [client, server] = self.world.connect(listener);
        let World { now, shards } = &mut self.world;
        shards[0].with_tcb(*now, client, |t| t.tcb.set_nodelay(true)).unwrap();
        (client, server)
    }

    fn write(&mut self, id: SlotId, bytes: &[u8]) -> usize {
        let World { now, shards } = &mut self.world;
        stations::write(&mut shards[0], *now, id, bytes).unwrap_or(0)
    }
}

/// Full, or a pause: messages end nothing here.
const RULE: CompletionPolicy = CompletionPolicy {
    low_water_bytes: usize::MAX,
    on_push: false,
    idle: Some(Duration::from_millis(1)),
};

/// One flow: bytes of one value only, so that a byte of the other shows wherever it lies.
struct Flow {
    value: u8,
    ends: (SlotId, SlotId),
    sent: usize,
    got: usize,
    away: Vec<Arc<RecvTicket>>,
}

impl Flow {
    fn post(&mut self, pair: &mut Pair, buf: RecvBuf) {
        let ticket = Arc::new(RecvTicket::default());
        let id = self.ends.1;
        pair.world.shards[1].tcp_post(pair.world.now, id, buf, RULE, &ticket).expect("posted");
        self.away.push(ticket);
    }

    fn collect(&mut self, pair: &mut Pair) {
        while self.away.first().is_some_and(|t| t.is_over()) {
            let outcome = self.away.remove(0).take().expect("once");
            let mut buf = outcome.buf.expect("its stack is there");
            self.got += buf.len();
            assert!(buf.iter().all(|b| *b == self.value), "a byte of the other flow");
            let is_own = |b: &u8| *b == self.value || *b == 0;
            assert!(
                buf.memory_mut().iter().all(is_own),
                "a byte of the other flow was left behind"
            );
            buf.memory_mut().fill(0);
            self.post(pair, buf);
        }
    }
}

fn interleaved(how: Impairments, total: usize, message: usize) -> Notes {
    let mut pair = Pair::over(how);
    let mut flows = [(0xaa, 80), (0xbb, 81)].map(|(value, port)| {
        let ends = pair.connected(port);
        Flow { value, ends, sent: 0, got: 0, away: Vec::new() }
    });
    for f in &mut flows {
        (0..2).for_each(|_| f.post(&mut pair, RecvBuf::from(vec![0; 5000])));
    }
    for _ in 0..1_000_000 {
        if flows.iter().all(|f| f.got == total) {
            break;
        }
        for f in &mut flows {
            let n = message.min(total - f.sent);
            f.sent += if n > 0 { pair.write(f.ends.0, &vec![f.value; n]) } else { 0 };
        }
        pair.go_on();
        flows.iter_mut().for_each(|f| f.collect(&mut pair));
    }
    assert_eq!(flows.each_ref().map(|f| f.got), [total; 2]);
    for f in &flows {
        pair.world.shards[1].close(pair.world.now, f.ends.1);
        pair.world.shards[1].dispatch();
        for t in &f.away {
            let ended = t.take().expect("closing ends it");
            assert_eq!(ended.error, Some(SocketError::Cancelled));
        }
    }
    std::mem::take(&mut pair.notes.lock().unwrap())
}

#[test]
fn two_flows_packet_by_packet_leave_no_byte_in_each_others_buffers() {
    let delay = Duration::from_micros(50);
    let guesses = interleaved(Impairments { delay, ..Impairments::default() }, 400_000, 700);
    assert!(guesses.right > 50 && guesses.wrong > 50, "{} {}", guesses.right, guesses.wrong);
}

#[test]
fn nor_do_they_where_packets_are_lost_doubled_and_reordered() {
    let how = Impairments {
        delay: Duration::from_micros(200),
        loss: 0.02,
        reorder: 0.05,
        reorder_delay: Duration::from_micros(500),
        duplicate: 0.03,
        ..Impairments::default()
    };
    interleaved(how, 200_000, 1300);
}

#[test]
fn the_answer_to_a_full_buffer_waits_until_its_reader_looks_again_or_stays_away() {
    let mut pair = Pair::over(Impairments::default());
    let (client, server) = pair.connected(80);
    let sent = |pair: &Pair| pair.world.shards[1].counters().value(Counter::TxFrames);
    let one_buffer = |pair: &mut Pair| {
        let ticket = Arc::new(RecvTicket::default());
        let buf = RecvBuf::from(vec![0; 5000]);
        pair.world.shards[1].tcp_post(pair.world.now, server, buf, RULE, &ticket).expect("posted");
        let before = sent(pair);
        assert_eq!(pair.write(client, &[7; 5000]), 5000);
        pair.world.now = pair.world.now + Duration::from_micros(1);
        pair.world.shards[0].step(pair.world.now, 64);
        pair.world.shards[1].step_for_reader(pair.world.now);
        drop(pair.world.shards[1].take_received());
        assert!(ticket.is_over());
        assert_eq!(sent(pair), before, "its reader is about to come back");
        before
    };
    let before = one_buffer(&mut pair);
    pair.world.shards[1].step_for_reader(pair.world.now);
    assert_eq!(sent(&pair), before + 1, "there is nothing more");

    let before = one_buffer(&mut pair);
    let by = pair.world.shards[1].next_deadline().expect("the answer waits");
    assert!(by <= pair.world.now + Duration::from_millis(2));
    pair.world.shards[1].step(by, 64);
    assert_eq!(sent(&pair), before + 1, "nobody came");
}

/// Bytes per step, the median, into a buffer for which a sender sends as much as it may.
fn stride(step: impl Fn(&mut WatchedShard, Instant, &RecvTicket)) -> u64 {
    let mut line = Line::new();
    let ticket = line.post(4 << 20, PATIENT);
    let taken = |shard: &Shard| shard.counters().value(Counter::ReceiveBytes);
    let mut strides = Vec::new();
    while !ticket.is_over() {
        let World { shards, now } = &mut line.pair.world;
        *now = *now + Duration::from_micros(20);
        let before = taken(&shards[1]);
        step(&mut shards[1], *now, &ticket);
        strides.push(taken(&shards[1]) - before);
        (0..16).for_each(|_| _ = line.pair.write(line.client, &[7; 64 << 10]));
        line.pair.world.shards[0].step(line.pair.world.now, 64);
    }
    strides.retain(|n| *n > 0);
    strides.sort_unstable();
    strides[strides.len() / 2]
}

#[test]
fn a_reader_of_placed_bytes_takes_more_at_once_than_a_reader_of_copies() {
    let copying = stride(|shard, now, _| _ = shard.step_for_reader(now));
    let placing = stride(|shard, now, ticket| {
        _ = shard.step_for_ticket(now, ticket);
        drop(shard.take_received());
    });
    assert!(copying <= 192 << 10, "{copying}");
    assert!(placing > copying * 3 / 2, "{placing}, copying {copying}");
}

/// A flow whose bytes count up, and what its reader has of it.
struct Line {
    pair: Pair,
    client: SlotId,
    server: SlotId,
    written: usize,
    got: Vec<u8>,
}

/// Only what fills it ends a buffer: no mark, no push, no pause.
const PATIENT: CompletionPolicy =
    CompletionPolicy { low_water_bytes: usize::MAX, on_push: false, idle: None };

fn counting(bytes: std::ops::Range<usize>) -> Vec<u8> {
    bytes.map(|i| (i / 3 + i / 251) as u8).collect()
}

impl Line {
    fn new() -> Line {
        let mut pair = Pair::over(Impairments::default());
        let (client, server) = pair.connected(80);
        Line { pair, client, server, written: 0, got: Vec::new() }
    }

    fn post(&mut self, capacity: usize, rule: CompletionPolicy) -> Arc<RecvTicket> {
        let ticket = Arc::new(RecvTicket::default());
        let buf = RecvBuf::from(vec![0; capacity]);
        let World { shards, now } = &mut self.pair.world;
        shards[1].tcp_post(*now, self.server, buf, rule, &ticket).expect("posted");
        ticket
    }

    /// Sends `bytes` bytes as one segment and settles.
    fn send(&mut self, bytes: usize) {
        let bytes = counting(self.written..self.written + bytes);
        assert_eq!(self.pair.write(self.client, &bytes), bytes.len());
        self.written += bytes.len();
        self.settle();
    }

    /// The same, and the segment says that all of it is urgent.
    fn send_urgent(&mut self, bytes: usize) {
        self.note(|n| n.urgent = Some(bytes as u16));
        self.send(bytes);
        self.note(|n| assert_eq!(n.urgent, None, "nothing carried the flag"));
    }

    fn note<R>(&self, f: impl FnOnce(&mut Notes) -> R) -> R {
        f(&mut self.pair.notes.lock().unwrap())
    }

    /// Runs both shards for 100 µs: frames are exchanged, and no timer fires.
    fn settle(&mut self) {
        for _ in 0..5 {
            self.pair.world.step(Duration::from_micros(20));
            self.pair.deliver();
        }
    }

    /// A buffer that is over: how many bytes it has, which are the next of the stream.
    fn collect(&mut self, ticket: &RecvTicket) -> usize {
        assert!(ticket.is_over(), "it is still away");
        let outcome = ticket.take().expect("once");
        assert_eq!(outcome.error, None);
        self.have(&outcome.buf.expect("its stack is there"))
    }

    /// Reads what there is, and how many bytes that was.
    fn read(&mut self) -> usize {
        let shard = &mut self.pair.world.shards[1];
        let Ok(Poll::Ready(chain)) = shard.tcp_take(self.server, usize::MAX) else { return 0 };
        let bytes = chain.to_vec();
        shard.tcp_read_done(self.pair.world.now, self.server, chain);
        self.have(&bytes)
    }

    fn have(&mut self, bytes: &[u8]) -> usize {
        let from = self.got.len();
        assert!(bytes == counting(from..from + bytes.len()), "other bytes than came after {from}");
        self.got.extend(bytes);
        bytes.len()
    }
}

#[test]
fn the_bytes_of_a_buffer_that_is_given_up_are_as_young_as_that() {
    for is_revoked in [true, false] {
        let mut line = Line::new();
        let ticket = line.post(1000, PATIENT);
        line.send(100);
        line.pair.world.now = line.pair.world.now + Duration::from_secs(5);
        let World { shards, now } = &mut line.pair.world;
        if is_revoked {
            assert!(shards[1].tcp_abandon_post(*now, line.server, &ticket));
        } else {
            shards[1].tcp_cancel_post(*now, line.server, &ticket);
        }
        let entry = shards[1].tcp_entry(line.server).unwrap();
        assert_eq!(entry.tcb.unread_since(), *now);
        let taken = if is_revoked { line.read() } else { line.collect(&ticket) };
        assert_eq!(taken, 100);
    }
}

#[test]
fn urgent_data_gives_the_buffer_back_with_exactly_what_came() {
    let mut line = Line::new();
    let tickets = [(); 3].map(|()| line.post(5000, PATIENT));
    line.send(700);
    assert!(!tickets[0].is_over());
    line.send_urgent(300);
    assert_eq!(line.collect(&tickets[0]), 1000);
    // Only what had come: the next one waits for its own.
    line.send(200);
    assert!(!tickets[1].is_over());
    line.send_urgent(1);
    assert_eq!(line.collect(&tickets[1]), 201);
    line.send_urgent(7);
    assert_eq!(line.collect(&tickets[2]), 7);
}

#[test]
fn behind_urgent_data_reads_go_on_and_so_do_posted_buffers() {
    let mut line = Line::new();
    let ticket = line.post(5000, PATIENT);
    line.send_urgent(300);
    assert_eq!(line.collect(&ticket), 300);
    line.send_urgent(400);
    line.send(50);
    assert_eq!(line.read(), 450);
    // What was urgent for a reader is not urgent for the buffer behind.
    let tickets = [(); 2].map(|()| line.post(600, PATIENT));
    line.send(599);
    assert!(!tickets[0].is_over());
    line.send(2);
    assert_eq!(line.collect(&tickets[0]), 600);
    line.send_urgent(10);
    assert_eq!(line.collect(&tickets[1]), 11);
    assert_eq!((line.got.len(), line.read()), (line.written, 0));
}

#[test]
fn urgent_data_that_overtakes_gives_the_buffer_back_when_the_gap_is_closed() {
    let mut line = Line::new();
    let ticket = line.post(5000, PATIENT);
    line.note(|n| n.holds_next = true);
    line.send(500);
    line.send_urgent(100);
    assert!(!ticket.is_over(), "nothing of it can be given yet");
    line.note(|n| n.lets_go = true);
    line.settle();
    assert_eq!(line.collect(&ticket), 600);
    let ticket = line.post(5000, PATIENT);
    line.send(10);
    assert!(!ticket.is_over(), "that is over");
}

#[test]
fn bytes_before_the_gap_wait_for_the_urgent_data_after_it() {
    let mut line = Line::new();
    let ticket = line.post(5000, PATIENT);
    line.send(50);
    line.note(|n| n.holds_next = true);
    line.send(500);
    line.send_urgent(100);
    assert!(!ticket.is_over(), "the urgent byte is not there yet");
    line.note(|n| n.lets_go = true);
    line.settle();
    assert_eq!(line.collect(&ticket), 650);
}

impl Line {
    /// One poll of a reader that waits for this ticket, without other polls. Returns whether the poll completed the
    /// ticket.
    fn look(&mut self, ticket: &RecvTicket) -> bool {
        self.pair.world.now = self.pair.world.now + Duration::from_micros(20);
        let outcome = self.pair.world.shards[1].step_for_ticket(self.pair.world.now, ticket).1;
        let Some(buf) = outcome.and_then(|o| o.buf) else { return false };
        self.have(&buf);
        true
    }

    /// Sends `bytes` bytes, which wait in the device.
    fn write(&mut self, bytes: usize) {
        let bytes = counting(self.written..self.written + bytes);
        assert_eq!(self.pair.write(self.client, &bytes), bytes.len());
        self.written += bytes.len();
        self.pair.world.now = self.pair.world.now + Duration::from_micros(20);
        self.pair.world.shards[0].step(self.pair.world.now, 64);
    }

    /// Posts two buffers. The first is full and its reader has it. The second has 100 bytes that came with the first
    /// one's. `rule` completes the second, but no poll has checked it.
    fn resting(rule: CompletionPolicy) -> (Line, Arc<RecvTicket>) {
        let mut line = Line::new();
        // A first round trip, so that nothing about the connection is news.
        line.send(1);
        assert_eq!(line.read(), 1);
        let (full, behind) = (line.post(1000, PATIENT), line.post(5000, rule));
        line.write(1100);
        assert!(line.look(&full), "it is full");
        (line, behind)
    }
}

const MARKED: CompletionPolicy = CompletionPolicy { low_water_bytes: 100, ..PATIENT };
const PUSHED: CompletionPolicy = CompletionPolicy { on_push: true, ..PATIENT };

#[test]
fn a_partial_completion_is_deferred_until_the_reader_of_a_full_buffer_polls_again() {
    for rule in [MARKED, PUSHED] {
        let (mut line, behind) = Line::resting(rule);
        assert!(!behind.is_over(), "its reader is about to look");
        assert!(line.look(&behind), "{rule:?}");
        assert_eq!(line.got.len(), 1101);
    }
}

#[test]
fn a_deferred_completion_completes_after_two_milliseconds_without_a_poll() {
    for rule in [MARKED, PUSHED] {
        let (mut line, behind) = Line::resting(rule);
        let by = line.pair.world.shards[1].next_deadline().expect("the shard has to look again");
        assert!(by <= line.pair.world.now + Duration::from_millis(2), "{rule:?}");
        line.pair.world.now = by;
        line.pair.world.shards[1].step(by, 64);
        drop(line.pair.world.shards[1].take_received());
        assert_eq!(line.collect(&behind), 100, "{rule:?}");
    }
}

#[test]
fn urgent_data_the_end_of_the_stream_and_its_failure_rest_no_longer_than_others() {
    type Happens = fn(&mut Line);
    let urgent: Happens = |line| line.send_urgent(20);
    let end: Happens = |line| line.pair.world.shards[0].close(line.pair.world.now, line.client);
    let failure: Happens = |line| {
        let linger = Some(Duration::ZERO);
        let World { shards, now } = &mut line.pair.world;
        shards[0].with_tcb(*now, line.client, |t| t.linger = linger).unwrap();
        shards[0].close(*now, line.client);
    };
    for (happens, bytes) in [(urgent, 120), (end, 100), (failure, 100)] {
        let (mut line, behind) = Line::resting(PATIENT);
        assert!(!line.look(&behind), "nothing ends it");
        happens(&mut line);
        line.settle();
        assert_eq!(line.collect(&behind), bytes);
    }
}

#[test]
fn completions_are_not_deferred_while_other_connections_have_buffers() {
    let mut line = Line::new();
    let other = line.pair.connected(81).1;
    let (full, behind) = (line.post(1000, PATIENT), line.post(5000, MARKED));
    let elsewhere = Arc::new(RecvTicket::default());
    let World { shards, now } = &mut line.pair.world;
    let buf = RecvBuf::from(vec![0; 10]);
    shards[1].tcp_post(*now, other, buf, PATIENT, &elsewhere).expect("posted");
    line.write(1100);
    assert!(line.look(&full));
    assert_eq!(line.collect(&behind), 100, "who waits for it may be somebody else");
    drop(line.pair.world.shards[1].take_received());
}

/// Sends a message of `bytes` bytes into a buffer of 5000. Returns the number of requests to place that the device got
/// meanwhile.
fn message(line: &mut Line, bytes: usize) -> usize {
    let before = line.note(|n| n.asked);
    let ticket = line.post(5000, RULE);
    line.send(bytes);
    // The pause that ends a message.
    line.pair.world.now = line.pair.world.now + Duration::from_millis(4);
    line.settle();
    assert_eq!(line.collect(&ticket), bytes);
    line.note(|n| n.asked) - before
}

#[test]
fn a_flow_that_never_fills_its_buffers_stops_asking_the_device_until_it_fills_them_again() {
    let mut line = Line::new();
    let rests = |line: &mut Line| {
        let started = line.pair.world.now;
        for _ in 0..4 {
            assert_eq!(message(line, 100), 0, "it should rest");
        }
        assert!(line.pair.world.now < started + Duration::from_millis(200), "that took too long");
        line.pair.world.now = started + Duration::from_millis(260);
        line.settle();
    };
    // As many are forgiven at first, and fewer after a rest.
    for forgiven in [8, 2, 2] {
        for _ in 0..forgiven {
            assert!(message(&mut line, 100) > 0, "it should ask");
        }
        rests(&mut line);
    }
    assert!(message(&mut line, 5000) > 0, "filled again");
    for _ in 0..8 {
        assert!(message(&mut line, 100) > 0, "it has earned as many as at first");
    }
    rests(&mut line);
}
