//! Receiving: how many frames one system call reads, and into which memory.

use std::fs::File;
use std::io::{IoSliceMut, Read};
use std::os::fd::AsFd;

use fulmar_stack::base::{Counters, DropReason, FlowKey, Instant};
use fulmar_stack::device::{Burst, Packet};
use fulmar_stack::mbuf::Pool;

use super::flow_queues::FlowQueues;
use super::flow_queues::table::{Queues, ReadEnd, Table, read_round_robin};
use super::{Tap, vector};
use crate::drivers::batch::Receiving;
use crate::drivers::placing::{Outcome, Prediction};
use crate::drivers::vnet;

impl Tap {
    /// Reads one frame from a queue. `None`: the queue is empty.
    fn read(&mut self, source: Source<'_>, pool: &mut Pool) -> Option<Result<Packet, DropReason>> {
        let is_whole = self.queue.pair.prepare(pool);
        let prediction = match source {
            Source::Main => self.placer.prediction(),
            Source::Of(_, flow) => self.placer.predict_flow(&flow),
        };
        let places = !self.placer.is_idle()
            && (is_whole || self.placer.parts(prediction, &mut self.queue.pair).is_some());
        match places {
            true => self.read_placed(source, prediction, pool),
            false => self.queue.read(source.flow_queue(), pool),
        }
    }

    /// As [`Tap::read`], into the ranges of the flow that is aimed at. The pool has the buffers.
    fn read_placed(
        &mut self,
        source: Source<'_>,
        prediction: Option<Prediction>,
        pool: &mut Pool,
    ) -> Option<Result<Packet, DropReason>> {
        let mut header = [0; vnet::HEADER_BYTES];
        let [head, a, b, rest] = self.placer.parts(prediction, &mut self.queue.pair)?;
        let mut parts = [&mut header, head, a, b, rest].map(IoSliceMut::new);
        let bytes = match source.flow_queue().unwrap_or(&self.queue.file).read_vectored(&mut parts)
        {
            Ok(bytes) => bytes.saturating_sub(vnet::HEADER_BYTES),
            Err(e) => {
                let errno = e.raw_os_error().unwrap_or(0);
                if errno != libc::EAGAIN {
                    self.placer.discard(prediction);
                }
                self.queue.health.on_read_error(errno);
                return None;
            }
        };
        self.queue.health.is_down = false;
        Some(self.placer.packet(prediction, &header, bytes, &mut self.queue.pair, pool))
    }

    /// How many frames to read with one call after `run` short ones; at most `left`. 0: a plain `readv`.
    /// The first frame of a poll is read alone: most polls find nothing, or one frame.
    fn read_count(&self, run: usize, left: usize) -> usize {
        match &self.vector {
            Some(vector) if run > 0 && self.placer.is_idle() => {
                vector.read_count(run.max(self.last_run.saturating_sub(run)), left)
            }
            _ => 0,
        }
    }

    /// Reads one frame with `readv`.
    fn read_one(&mut self, taking: &mut Taking<'_>) -> (usize, bool) {
        let Some(frame) = self.read(Source::Main, taking.pool) else {
            self.queue.is_drained = true;
            return (0, true);
        };
        let short = frame.as_ref().is_ok_and(|p| vector::is_short(p.chain.len()));
        taking.frames.deliver(frame);
        (1, short)
    }

    /// Reads up to `count` frames with one call of io_uring.
    #[inline(never)]
    fn read_run(&mut self, count: usize, taking: &mut Taking<'_>) -> (usize, bool) {
        let Some(vector) = &mut self.vector else { return (0, true) };
        let came = vector.receive(count, taking.pool, |frame| taking.frames.deliver(frame));
        if came.frames > 0 {
            self.queue.health.is_down = false;
        }
        if let Some(errno) = came.errno {
            self.queue.is_drained = true;
            self.queue.health.on_read_error(errno);
        }
        (came.frames, came.all_short)
    }

    /// See [`fulmar_stack::device::Device::rx_burst`].
    pub(super) fn take_burst(
        &mut self,
        now: Instant,
        pool: &mut Pool,
        out: &mut Burst,
        budget: usize,
        counters: &mut Counters,
    ) -> usize {
        let left = budget.min(out.space());
        let frames = Receiving::new(out, counters);
        let mut taking = Taking { pool, frames, left, from_main: 0 };
        self.queue.is_drained = false;
        if self.flow_queues.as_ref().is_some_and(|q| q.table.is_in_use()) {
            self.take_from_all(now, &mut taking);
        } else {
            self.take_from_main(&mut taking);
        }
        let Taking { frames: Receiving { tally, counters, .. }, from_main, .. } = taking;
        tally.received(counters, &mut self.queue.stats);
        let outcome = self.placer.take_outcome();
        outcome.count(counters, &mut self.queue.stats);
        self.steer_flows(now, outcome, from_main);
        tally.frames as usize
    }

    /// Reads the main queue.
    fn take_from_main(&mut self, taking: &mut Taking<'_>) -> ReadEnd {
        let (mut run, mut all_short, mut is_full) = (0, true, false);
        while !is_full
            && taking.left > 0
            && self.queue.health.lost.is_none()
            && !self.queue.is_drained
        {
            self.queue.stats.rx_crossings += 1;
            let count = if all_short { self.read_count(run, taking.left) } else { 0 };
            let (came, short) = match count {
                0 => self.read_one(taking),
                _ => self.read_run(count, taking),
            };
            taking.left -= came;
            (run, all_short) = (run + came, all_short && short);
            is_full = self.placer.take_full();
        }
        if run > 0 {
            self.last_run = if all_short { run } else { 0 };
        }
        taking.from_main += run;
        match is_full {
            true => ReadEnd::BufferFull,
            false if self.queue.is_drained => ReadEnd::Empty,
            false => ReadEnd::Limit,
        }
    }

    /// Reads every queue, in the order of `flow_queues.rs`.
    #[inline(never)]
    fn take_from_all(&mut self, now: Instant, taking: &mut Taking<'_>) {
        let Some(mut queues) = self.flow_queues.take() else { return };
        let all_empty =
            read_round_robin(&mut AllQueues { tap: self, queues: &mut queues, taking, now });
        self.flow_queues = Some(queues);
        self.queue.is_drained = all_empty;
    }

    /// Assigns a queue to a flow if flows are interleaved, and reclaims idle queues.
    fn steer_flows(&mut self, now: Instant, outcome: Outcome, from_main: usize) {
        let Some(queues) = &mut self.flow_queues else { return };
        let is_usual = !queues.table.is_in_use() && outcome.misses == 0 && !queues.is_steering();
        if is_usual {
            return queues.table.note(outcome.hits, 0);
        }
        self.update_flow_queues(now, outcome, from_main);
    }

    #[inline(never)]
    fn update_flow_queues(&mut self, now: Instant, outcome: Outcome, from_main: usize) {
        let Some(queues) = &mut self.flow_queues else { return };
        let is_shared = outcome.starved > 0 && self.placer.is_shared();
        let starved = if is_shared { outcome.starved } else { 0 };
        queues.table.note(outcome.hits, outcome.mixed.saturating_add(starved));
        if queues.table.is_in_use() {
            queues.reclaim_idle(now, |flow| self.placer.has_ranges(flow));
        } else {
            queues.on_main_read(from_main, ReadEnd::Limit);
        }
        if !queues.is_needed() {
            return;
        }
        let Some(flow) = self.placer.find_unplaced(|flow| !queues.table.has(flow)) else {
            return queues.table.reset_demand();
        };
        if queues.give(&flow, self.queue.file.as_fd()) {
            self.placer.exclude_from_prediction(&flow);
            self.queue.stats.flows_steered += 1;
        }
        queues.watch_for_space(self.queue.file.as_fd(), self.queue.is_blocked);
    }
}

/// The queue that a frame is read from.
#[derive(Clone, Copy)]
enum Source<'a> {
    Main,
    /// The queue of one flow.
    Of(&'a File, FlowKey),
}

impl<'a> Source<'a> {
    fn flow_queue(self) -> Option<&'a File> {
        match self {
            Source::Main => None,
            Source::Of(file, _) => Some(file),
        }
    }
}

/// All queues of a TAP during one receive burst.
struct AllQueues<'a, 'b> {
    tap: &'a mut Tap,
    queues: &'a mut FlowQueues,
    taking: &'a mut Taking<'b>,
    now: Instant,
}

/// One read from the queue of a flow.
#[derive(Clone, Copy, PartialEq, Eq)]
enum OneRead {
    Empty,
    /// A frame; the next one may be read.
    Frame,
    /// A frame, and the flow's read quantum is used up.
    LastFrame,
}

impl AllQueues<'_, '_> {
    /// Reads one frame from the queue of a flow.
    fn take_one(&mut self, queue: usize, flow: FlowKey) -> OneRead {
        let AllQueues { tap, queues, taking, now } = self;
        let Some(file) = queues.file(queue) else { return OneRead::Empty };
        tap.queue.stats.rx_crossings += 1;
        let frame = tap.read(Source::Of(file, flow), taking.pool);
        let Some(frame) = frame else { return OneRead::Empty };
        let bytes = frame.as_ref().map_or(0, |p| p.chain.len());
        taking.frames.deliver(frame);
        taking.left -= 1;
        let has_ranges = tap.placer.has_ranges(&flow);
        match has_ranges || queues.table.on_unplaced(queue, *now, bytes) {
            true => OneRead::Frame,
            false => OneRead::LastFrame,
        }
    }
}

impl Queues for AllQueues<'_, '_> {
    fn table(&mut self) -> &mut Table {
        &mut self.queues.table
    }

    fn take_main(&mut self) -> ReadEnd {
        self.tap.queue.is_drained = false;
        let before = self.taking.from_main;
        let end = self.tap.take_from_main(self.taking);
        self.queues.on_main_read(self.taking.from_main - before, end);
        end
    }

    fn is_due(&mut self, queue: usize) -> bool {
        let placer = &self.tap.placer;
        self.queues.is_due(queue, self.now, |flow| placer.has_ranges(flow))
    }

    fn take(&mut self, queue: usize) -> ReadEnd {
        let Some(flow) = self.queues.table.flow(queue) else { return ReadEnd::Empty };
        self.tap.placer.set_dedicated(true);
        let mut end = ReadEnd::Limit;
        while self.taking.left > 0 && self.tap.queue.health.lost.is_none() {
            let read = self.take_one(queue, flow);
            let is_full = self.tap.placer.take_full();
            end = match read {
                _ if is_full => ReadEnd::BufferFull,
                OneRead::Empty => ReadEnd::Empty,
                OneRead::Frame | OneRead::LastFrame => ReadEnd::Limit,
            };
            if end != ReadEnd::Limit || read == OneRead::LastFrame {
                break;
            }
        }
        self.tap.placer.set_dedicated(false);
        if end == ReadEnd::Empty {
            self.queues.on_empty(queue, self.now);
        }
        end
    }
}

/// The state of one receive burst.
struct Taking<'a> {
    pool: &'a mut Pool,
    frames: Receiving<'a>,
    /// Frames that may still be taken.
    left: usize,
    /// Frames received from the main queue.
    from_main: usize,
}
