//! The table against queues that are lists, and a kernel that is a map.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::Ipv4Addr;

use proptest::prelude::*;

use super::*;

const FLOWS: usize = 4;
const QUEUES: usize = 2;

#[derive(Clone, Copy, Debug)]
struct Frame {
    flow: usize,
    number: usize,
    bytes: usize,
}

/// The kernel's side.
#[derive(Default)]
struct Sim {
    map: BTreeMap<usize, usize>,
    watched: BTreeSet<usize>,
    main: VecDeque<Frame>,
    queues: [VecDeque<Frame>; QUEUES],
}

impl Kernel for Sim {
    fn watch(&mut self, queue: usize) -> bool {
        assert!(self.watched.insert(queue), "EPOLL_CTL_ADD fails with EEXIST");
        true
    }

    fn unwatch(&mut self, queue: usize) -> bool {
        assert!(self.watched.remove(&queue), "EPOLL_CTL_DEL fails with ENOENT");
        true
    }

    fn steer(&mut self, flow: &FlowKey, queue: Option<usize>) -> std::io::Result<()> {
        let flow = usize::from(flow.remote_port);
        match queue {
            Some(queue) => self.map.insert(flow, queue),
            None => self.map.remove(&flow),
        };
        Ok(())
    }
}

impl Sim {
    fn queue(&mut self, queue: Option<usize>) -> &mut VecDeque<Frame> {
        match queue {
            Some(queue) => &mut self.queues[queue],
            None => &mut self.main,
        }
    }
}

fn key(flow: usize) -> FlowKey {
    let end = |host, port| (Ipv4Addr::new(10, 0, 0, host), port).into();
    FlowKey::new(end(2, 80), end(1, flow as u16))
}

/// A TAP with flows that are sent and received.
#[derive(Default)]
struct Model {
    table: Table,
    kernel: Sim,
    now: Instant,
    /// Bytes of posted buffers, and what was sent and received, by flow.
    ranges: [usize; FLOWS],
    sent: [usize; FLOWS],
    received: [Vec<usize>; FLOWS],
    /// Frames whose sender has chosen their queue and not put them there yet.
    late: Vec<(Option<usize>, Frame)>,
    /// Flows of which there were such: those may overtake themselves.
    has_hurried: [bool; FLOWS],
    left: usize,
}

impl Model {
    fn new() -> Model {
        let mut model = Model::default();
        (0..QUEUES).for_each(|_| model.table.add());
        model
    }

    fn frame(&mut self, flow: usize, bytes: usize) -> (Option<usize>, Frame) {
        let number = self.sent[flow];
        self.sent[flow] += 1;
        (self.kernel.map.get(&flow).copied(), Frame { flow, number, bytes })
    }

    fn send(&mut self, flow: usize, bytes: usize) {
        let (queue, frame) = self.frame(flow, bytes);
        self.kernel.queue(queue).push_back(frame);
    }

    fn arrive(&mut self) {
        for (queue, frame) in std::mem::take(&mut self.late) {
            self.kernel.queue(queue).push_back(frame);
        }
    }

    fn place(&mut self, flow: usize, bytes: usize) {
        self.ranges[flow] = bytes;
        self.table.placed(&key(flow), &mut self.kernel);
    }

    fn give(&mut self, flow: usize) -> bool {
        !self.table.has(&key(flow)) && self.table.give(&key(flow), &mut self.kernel).unwrap()
    }

    fn wait(&mut self, time: Duration) {
        self.arrive();
        self.now = self.now + time;
    }

    /// As the TAP: reads at most so many frames; whether nothing is left that should not wait.
    fn poll(&mut self, budget: usize) -> bool {
        let before = self.received.iter().map(Vec::len).sum::<usize>();
        self.left = budget;
        let is_drained = read_round_robin(self);
        let ranges = self.ranges;
        let has_ranges = |f: &FlowKey| ranges[usize::from(f.remote_port)] > 0;
        self.table.reclaim_idle(self.now, &mut self.kernel, has_ranges);
        assert!(self.received.iter().map(Vec::len).sum::<usize>() - before <= budget);
        self.check(is_drained);
        is_drained
    }

    fn check(&self, is_drained: bool) {
        let used = self.table.queues.iter().filter(|q| q.state != State::Free);
        assert_eq!(used.count(), self.table.in_use);
        assert!(self.kernel.map.len() <= QUEUES);
        if is_drained {
            assert!(self.kernel.main.is_empty());
            for (n, frames) in self.kernel.queues.iter().enumerate() {
                let is_masked = !self.kernel.watched.contains(&n);
                let is_due = self.table.next_deadline().is_some_and(|at| at <= self.now + BACK_OFF);
                assert!(frames.is_empty() || is_masked && is_due, "queue {n} is forgotten");
            }
        }
    }

    /// Takes a frame; whether a buffer is full with it.
    fn receive(&mut self, frame: Frame) -> bool {
        let Frame { flow, number, bytes } = frame;
        let received = &mut self.received[flow];
        let is_next = number == received.len();
        assert!(is_next || self.has_hurried[flow], "{frame:?} out of order");
        received.push(number);
        self.left -= 1;
        let had_rooms = self.ranges[flow] > 0;
        self.ranges[flow] = self.ranges[flow].saturating_sub(bytes);
        had_rooms && self.ranges[flow] == 0
    }

    fn end(mut self) {
        for flow in 0..FLOWS {
            self.place(flow, usize::MAX);
        }
        for _ in 0..1000 {
            self.wait(LINGER);
            self.poll(64);
        }
        for (received, sent) in self.received.iter_mut().zip(self.sent) {
            received.sort_unstable();
            assert!((0..sent).eq(received.iter().copied()), "lost, or there twice");
        }
        self.ranges = [0; FLOWS];
        for _ in 0..4 {
            self.wait(IDLE_TIMEOUT);
            self.poll(64);
        }
        assert!(!self.table.is_in_use() && self.kernel.map.is_empty());
        assert!(self.kernel.watched.is_empty());
    }
}

impl Queues for Model {
    fn table(&mut self) -> &mut Table {
        &mut self.table
    }

    fn take_main(&mut self) -> ReadEnd {
        let (mut frames, mut end) = (0, ReadEnd::Limit);
        while self.left > 0 && end == ReadEnd::Limit {
            end = match self.kernel.main.pop_front() {
                Some(frame) => {
                    frames += 1;
                    if self.receive(frame) { ReadEnd::BufferFull } else { ReadEnd::Limit }
                }
                None => ReadEnd::Empty,
            }
        }
        self.table.on_main_read(frames, end);
        end
    }

    fn is_due(&mut self, queue: usize) -> bool {
        let ranges = self.ranges;
        let has_ranges = |f: &FlowKey| ranges[usize::from(f.remote_port)] > 0;
        self.table.is_due(queue, self.now, &mut self.kernel, has_ranges)
    }

    fn take(&mut self, queue: usize) -> ReadEnd {
        while self.left > 0 {
            let Some(frame) = self.kernel.queues[queue].pop_front() else {
                self.table.on_empty(queue, self.now, &mut self.kernel);
                return ReadEnd::Empty;
            };
            let is_full = self.receive(frame);
            let may_go_on =
                self.ranges[frame.flow] > 0 || self.table.on_unplaced(queue, self.now, frame.bytes);
            if is_full {
                return ReadEnd::BufferFull;
            }
            if !may_go_on {
                break;
            }
        }
        ReadEnd::Limit
    }
}

#[derive(Clone, Debug)]
enum Op {
    Send(usize, usize),
    /// A sender chooses the queue, and puts the frame there later.
    Choose(usize),
    Arrive,
    Place(usize, usize),
    Unplace(usize),
    Give(usize),
    Poll(usize),
    Wait(u64),
}

fn op() -> impl Strategy<Value = Op> {
    let flow = 0..FLOWS;
    prop_oneof![
        4 => (flow.clone(), 1..70_000usize).prop_map(|(f, n)| Op::Send(f, n)),
        1 => flow.clone().prop_map(Op::Choose),
        1 => Just(Op::Arrive),
        2 => (flow.clone(), 1..300_000usize).prop_map(|(f, n)| Op::Place(f, n)),
        1 => flow.clone().prop_map(Op::Unplace),
        2 => flow.prop_map(Op::Give),
        4 => (1..40usize).prop_map(Op::Poll),
        2 => (0..120_000u64).prop_map(Op::Wait),
        1 => (0..2000u64).prop_map(Op::Wait),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn no_frame_is_lost_or_overtaken_whatever_flows_get_and_give_back(
        ops in prop::collection::vec(op(), 1..200)
    ) {
        let mut model = Model::new();
        for op in ops {
            match op {
                Op::Send(flow, bytes) => model.send(flow, bytes),
                Op::Choose(flow) => {
                    let late = model.frame(flow, 1000);
                    model.has_hurried[flow] = true;
                    model.late.push(late);
                }
                Op::Arrive => model.arrive(),
                Op::Place(flow, bytes) => model.place(flow, bytes),
                Op::Unplace(flow) => model.ranges[flow] = 0,
                Op::Give(flow) => _ = model.give(flow),
                Op::Poll(budget) => _ = model.poll(budget),
                Op::Wait(us) => model.wait(Duration::from_micros(us)),
            }
        }
        model.end();
    }
}

/// A flow with its own queue and no posted ranges.
fn unposted() -> Model {
    let mut model = Model::new();
    model.place(0, 1000);
    assert!(model.give(0));
    model.send(0, 1000);
    // Joins, is read, is found unposted.
    while !model.poll(64) {}
    model
}

#[test]
fn an_unposted_flow_backs_off_and_wakes_no_thread() {
    let mut model = unposted();
    let began = model.now;
    model.wait(Duration::from_micros(300));
    model.send(0, 1000);
    assert!(model.poll(64));
    assert_eq!(model.received[0].len(), 1);
    assert!(model.kernel.watched.is_empty());
    assert_eq!(model.table.next_deadline(), Some(began + BACK_OFF));
    model.wait(Duration::from_micros(700));
    model.poll(64);
    assert_eq!(model.received[0].len(), 2);
    assert_eq!(model.table.next_deadline(), None);
    model.end();
}

#[test]
fn posting_ends_the_back_off() {
    let mut model = unposted();
    model.send(0, 1000);
    assert!(model.poll(64));
    model.place(0, 5000);
    assert!(model.kernel.watched.contains(&0), "the sleeper is woken");
    model.poll(64);
    assert_eq!(model.received[0].len(), 2);
    model.end();
}

#[test]
fn an_unposted_flow_gets_the_read_quantum_between_two_back_offs() {
    const FRAME: usize = 64 << 10;
    let mut model = unposted();
    (0..100).for_each(|_| model.send(0, FRAME));
    for round in 1..=10 {
        model.wait(BACK_OFF);
        while !model.poll(64) {}
        assert_eq!(model.received[0].len(), 1 + round * READ_QUANTUM / FRAME);
    }
    model.end();
}

#[test]
fn a_flow_gets_a_queue_if_more_than_every_sixteenth_frame_is_mixed() {
    let mut table = Table::default();
    for _ in 0..100 {
        table.note(16, 1);
    }
    assert!(!table.is_needed());
    for _ in 0..64 {
        table.note(15, 1);
    }
    assert!(table.is_needed());
    table.reset_demand();
    assert!(!table.is_needed());
}
