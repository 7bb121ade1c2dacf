//! Receiving: which frames are asked for together, and where they land.

use std::fs::File;
use std::io::{IoSliceMut, Read};
use std::os::fd::AsFd;

use fulmar_base::{Counters, DropReason, FlowKey, Instant};
use fulmar_mbuf::Pool;
use fulmar_netdev::{Burst, Packet, Tally};

use super::flow_queues::FlowQueues;
use super::{ETHER_BYTES, Tap, vector};
use crate::placing::{Aim, Outcome};
use crate::vnet;

impl Tap {
    /// Reads one frame from a queue. `None`: there is none.
    fn read(&mut self, queue: Queue, pool: &mut Pool) -> Option<Result<Packet, DropReason>> {
        self.landing.prepare(pool);
        let aim = match queue {
            Queue::Main => self.placer.aim(),
            Queue::Of((_, flow)) => self.placer.aim_at(&flow),
        };
        if !self.placer.is_idle() && self.placer.parts(aim, &mut self.landing).is_some() {
            return self.read_placed(queue, aim, pool);
        }
        let mut header = [0; vnet::HEADER_BYTES];
        let [small, large] = self.landing.parts(&mut self.scratch);
        let mut parts =
            [IoSliceMut::new(&mut header), IoSliceMut::new(small), IoSliceMut::new(large)];
        let bytes = match file_of(&self.file, self.flow_queues.as_deref(), queue)
            .read_vectored(&mut parts)
        {
            Ok(bytes) => bytes,
            Err(e) => {
                self.after_read_error(e.raw_os_error().unwrap_or(0));
                return None;
            }
        };
        self.is_down = false;
        let frame_bytes = bytes.saturating_sub(vnet::HEADER_BYTES);
        if frame_bytes < ETHER_BYTES {
            return Some(Err(DropReason::Truncated));
        }
        let [front, _] = self.landing.parts(&mut self.scratch);
        let front = front.get(..frame_bytes).unwrap_or(front);
        let offload = vnet::understand(&header, frame_bytes, front);
        let frame = offload.and_then(|offload| {
            let chain = self.landing.take(frame_bytes, &mut self.scratch, pool)?;
            Ok(Packet { chain, offload })
        });
        Some(frame)
    }

    /// As [`Tap::read`], into the rooms of the flow that is aimed at. The pool has the buffers.
    fn read_placed(
        &mut self,
        queue: Queue,
        aim: Option<Aim>,
        pool: &mut Pool,
    ) -> Option<Result<Packet, DropReason>> {
        let mut header = [0; vnet::HEADER_BYTES];
        let [head, a, b, rest] = self.placer.parts(aim, &mut self.landing)?;
        let mut parts = [&mut header, head, a, b, rest].map(IoSliceMut::new);
        let bytes = match file_of(&self.file, self.flow_queues.as_deref(), queue)
            .read_vectored(&mut parts)
        {
            Ok(bytes) => bytes.saturating_sub(vnet::HEADER_BYTES),
            Err(e) => {
                let errno = e.raw_os_error().unwrap_or(0);
                if errno != libc::EAGAIN {
                    self.placer.discard(aim);
                }
                self.after_read_error(errno);
                return None;
            }
        };
        self.is_down = false;
        Some(self.placer.packet(aim, &header, bytes, &mut self.landing, pool))
    }

    /// How many frames to ask for at once after `run` short ones, where there is room for `left`; 0: the
    /// next one alone. The first is always asked for alone: most polls find nothing, or one frame.
    fn ask(&self, run: usize, left: usize) -> usize {
        match &self.vector {
            Some(vector) if run > 0 && self.placer.is_idle() => {
                vector.ask(run.max(self.last_run.saturating_sub(run)), left)
            }
            _ => 0,
        }
    }

    /// Reads one frame, by itself; how many came, and whether all were short.
    fn read_one(
        &mut self,
        pool: &mut Pool,
        mut keep: impl FnMut(Result<Packet, DropReason>),
    ) -> (usize, bool) {
        let Some(frame) = self.read(Queue::Main, pool) else {
            self.is_drained = true;
            return (0, true);
        };
        let short = frame.as_ref().is_ok_and(|p| vector::is_short(p.chain.len()));
        keep(frame);
        (1, short)
    }

    /// Asks for `ask` frames in one crossing; how many came, and whether all were short.
    fn read_run(
        &mut self,
        ask: usize,
        pool: &mut Pool,
        keep: impl FnMut(Result<Packet, DropReason>),
    ) -> (usize, bool) {
        let Some(vector) = &mut self.vector else { return (0, true) };
        let came = vector.receive(ask, pool, keep);
        if came.frames > 0 {
            self.is_down = false;
        }
        if let Some(errno) = came.errno {
            self.is_drained = true;
            self.after_read_error(errno);
        }
        (came.frames, came.all_short)
    }

    fn after_read_error(&mut self, errno: i32) {
        match errno {
            libc::EAGAIN | libc::EINTR => {}
            // Unlike on write, EIO says that the interface is being removed.
            _ => self.lost = Some(errno),
        }
    }

    /// See [`fulmar_netdev::Device::rx_burst`].
    pub(super) fn take_burst(
        &mut self,
        now: Instant,
        pool: &mut Pool,
        out: &mut Burst,
        budget: usize,
        counters: &mut Counters,
    ) -> usize {
        let left = budget.min(out.room());
        let mut taking =
            Taking { pool, out, counters, tally: Tally::default(), left, from_main: 0 };
        self.is_drained = false;
        if self.flow_queues.as_ref().is_some_and(|q| q.is_in_use()) {
            self.take_from_all(now, &mut taking);
        } else {
            self.take_from_main(&mut taking);
        }
        let Taking { tally, counters, from_main, .. } = taking;
        tally.received(counters, &mut self.stats);
        let outcome = self.placer.take_outcome();
        outcome.count(counters, &mut self.stats);
        self.spread_flows(now, outcome, from_main);
        tally.frames as usize
    }

    /// Takes frames from the main queue until it is empty, no more may be taken, or a buffer is full;
    /// false in the last case.
    fn take_from_main(&mut self, taking: &mut Taking<'_>) -> bool {
        let (mut run, mut all_short, mut goes_on) = (0, true, true);
        while goes_on && taking.left > 0 && self.lost.is_none() && !self.is_drained {
            self.stats.rx_crossings += 1;
            let ask = if all_short { self.ask(run, taking.left) } else { 0 };
            let (pool, keep) = taking.split();
            let (came, short) = match ask {
                0 => self.read_one(pool, keep),
                _ => self.read_run(ask, pool, keep),
            };
            taking.left -= came;
            (run, all_short) = (run + came, all_short && short);
            goes_on = !self.placer.take_full();
        }
        if run > 0 {
            self.last_run = if all_short { run } else { 0 };
        }
        taking.from_main += run;
        goes_on
    }

    /// Takes frames of flows that leave their queues, then from every queue in turn; see
    /// `flow_queues.rs` for the order.
    fn take_from_all(&mut self, now: Instant, taking: &mut Taking<'_>) {
        let Some(queues) = &mut self.flow_queues else { return };
        let (count, turn) = (queues.len(), queues.next_turn());
        for queue in 0..count {
            let is_leaving = self.flow_queues.as_ref().is_some_and(|q| q.is_leaving(queue));
            if is_leaving && self.take_from_flow(queue, now, taking) != Taken::Empty {
                return;
            }
        }
        let mut all_empty = true;
        for at in 0..=count {
            let taken = match (turn + at) % (count + 1) {
                0 => self.take_from_main_in_turn(taking),
                n => self.take_from_flow_in_turn(n - 1, now, taking),
            };
            all_empty &= taken == Taken::Empty;
            if taken == Taken::Full {
                break;
            }
        }
        let has_joining = self.flow_queues.as_ref().is_some_and(|q| q.has_joining());
        self.is_drained = all_empty && !has_joining;
    }

    fn take_from_main_in_turn(&mut self, taking: &mut Taking<'_>) -> Taken {
        self.is_drained = false;
        let before = taking.from_main;
        let goes_on = self.take_from_main(taking);
        if let Some(queues) = &mut self.flow_queues {
            queues.main_gave(taking.from_main - before, self.is_drained);
        }
        Taken::new(goes_on, self.is_drained)
    }

    fn take_from_flow_in_turn(&mut self, n: usize, now: Instant, taking: &mut Taking<'_>) -> Taken {
        let Some(queues) = &mut self.flow_queues else { return Taken::Empty };
        let is_due = queues.is_due(n, now, |flow| self.placer.has_rooms(flow));
        if is_due { self.take_from_flow(n, now, taking) } else { Taken::Empty }
    }

    /// As [`Tap::take_from_main`], from the queue of a flow.
    fn take_from_flow(&mut self, n: usize, now: Instant, taking: &mut Taking<'_>) -> Taken {
        let Some(flow) = self.flow_queues.as_ref().and_then(|q| q.flow(n)) else {
            return Taken::Empty;
        };
        self.placer.set_alone(true);
        let (mut goes_on, mut is_empty) = (true, false);
        while goes_on && taking.left > 0 && self.lost.is_none() && !is_empty {
            self.stats.rx_crossings += 1;
            let (pool, mut keep) = taking.split();
            let frame = self.read(Queue::Of((n, flow)), pool);
            is_empty = frame.is_none();
            let bytes = frame.as_ref().map_or(0, |f| f.as_ref().map_or(0, |p| p.chain.len()));
            frame.into_iter().for_each(&mut keep);
            drop(keep);
            taking.left -= usize::from(!is_empty);
            goes_on = !self.placer.take_full();
            if !is_empty && !self.may_go_on(n, &flow, now, bytes) {
                break;
            }
        }
        self.placer.set_alone(false);
        if let Some(queues) = self.flow_queues.as_mut().filter(|_| is_empty) {
            queues.was_empty(n, now);
        }
        Taken::new(goes_on, is_empty)
    }

    /// After a frame from the queue of a flow: whether the next one may be read, too.
    fn may_go_on(&mut self, n: usize, flow: &FlowKey, now: Instant, bytes: usize) -> bool {
        let Some(queues) = &mut self.flow_queues else { return true };
        self.placer.has_rooms(flow) || queues.sipped(n, now, bytes)
    }

    /// Gives a flow a queue of its own if flows come mixed, and takes those back that are not used.
    fn spread_flows(&mut self, now: Instant, outcome: Outcome, from_main: usize) {
        let Some(queues) = &mut self.flow_queues else { return };
        let is_shared = outcome.starved > 0 && self.placer.is_shared();
        let starved = if is_shared { outcome.starved } else { 0 };
        queues.note(outcome.hits, outcome.mixed.saturating_add(starved));
        if queues.is_in_use() {
            queues.look_after(now, |flow| self.placer.has_rooms(flow));
        } else {
            queues.main_gave(from_main, false);
        }
        if !queues.is_needed() {
            return;
        }
        let Some(flow) = self.placer.find_wanting(|flow| !queues.has(flow)) else {
            return queues.not_now();
        };
        if queues.give(&flow, self.file.as_fd()) {
            self.placer.leave_guesses(&flow);
            self.stats.flows_steered += 1;
        }
        queues.want_room(self.file.as_fd(), self.is_blocked);
    }
}

/// Where a frame is read from.
#[derive(Clone, Copy)]
enum Queue {
    Main,
    /// A queue of a flow's own, by number.
    Of((usize, FlowKey)),
}

fn file_of<'a>(main: &'a File, queues: Option<&'a FlowQueues>, queue: Queue) -> &'a File {
    match (queue, queues) {
        (Queue::Of((n, _)), Some(queues)) => queues.file(n).unwrap_or(main),
        _ => main,
    }
}

/// What became of reading a queue.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Taken {
    /// Nothing more is there.
    Empty,
    /// No more may be taken.
    Enough,
    /// A buffer is full.
    Full,
}

impl Taken {
    fn new(goes_on: bool, is_empty: bool) -> Taken {
        match (goes_on, is_empty) {
            (false, _) => Taken::Full,
            (true, true) => Taken::Empty,
            (true, false) => Taken::Enough,
        }
    }
}

/// A burst on its way up.
struct Taking<'a> {
    pool: &'a mut Pool,
    out: &'a mut Burst,
    counters: &'a mut Counters,
    tally: Tally,
    /// Frames that may still be taken.
    left: usize,
    /// Frames that came by the main queue.
    from_main: usize,
}

impl Taking<'_> {
    /// The pool, and what to do with each frame.
    fn split(&mut self) -> (&mut Pool, impl FnMut(Result<Packet, DropReason>)) {
        let (pool, out, counters, tally) =
            (&mut *self.pool, &mut *self.out, &mut *self.counters, &mut self.tally);
        let keep = move |frame: Result<Packet, DropReason>| match frame {
            Err(reason) => counters.drop_packet(reason),
            Ok(p) => {
                tally.add(&p);
                // There is room: the number of rounds was bounded by it.
                let _ = out.push(p);
            }
        };
        (pool, keep)
    }
}
