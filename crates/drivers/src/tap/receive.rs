//! Receiving: which frames are asked for together, and where they land.

use std::fs::File;
use std::io::{IoSliceMut, Read};
use std::os::fd::AsFd;

use fulmar_base::{Counters, DropReason, FlowKey, Instant};
use fulmar_mbuf::Pool;
use fulmar_netdev::{Burst, Packet, Tally};

use super::flow_queues::FlowQueues;
use super::flow_queues::table::{Lines, Table, Taken, take_in_turn};
use super::{ETHER_BYTES, Tap, vector};
use crate::placing::{Aim, Outcome};
use crate::vnet;

impl Tap {
    /// Reads one frame from a queue. `None`: there is none.
    fn read(&mut self, source: Source<'_>, pool: &mut Pool) -> Option<Result<Packet, DropReason>> {
        let is_whole = self.landing.prepare(pool);
        let aim = match source {
            Source::Main => self.placer.aim(),
            Source::Of(_, flow) => self.placer.aim_at(&flow),
        };
        let places = !self.placer.is_idle()
            && (is_whole || self.placer.parts(aim, &mut self.landing).is_some());
        match places {
            true => self.read_placed(source, aim, pool),
            false => self.read_plain(source, pool),
        }
    }

    /// As [`Tap::read`], into the pair of buffers that lies ready.
    #[inline(never)]
    fn read_plain(
        &mut self,
        source: Source<'_>,
        pool: &mut Pool,
    ) -> Option<Result<Packet, DropReason>> {
        let mut header = [0; vnet::HEADER_BYTES];
        let [small, large] = self.landing.parts(&mut self.scratch);
        let mut parts =
            [IoSliceMut::new(&mut header), IoSliceMut::new(small), IoSliceMut::new(large)];
        let bytes = match source.file(&self.file).read_vectored(&mut parts) {
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
        source: Source<'_>,
        aim: Option<Aim>,
        pool: &mut Pool,
    ) -> Option<Result<Packet, DropReason>> {
        let mut header = [0; vnet::HEADER_BYTES];
        let [head, a, b, rest] = self.placer.parts(aim, &mut self.landing)?;
        let mut parts = [&mut header, head, a, b, rest].map(IoSliceMut::new);
        let bytes = match source.file(&self.file).read_vectored(&mut parts) {
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
        let Some(frame) = self.read(Source::Main, pool) else {
            self.is_drained = true;
            return (0, true);
        };
        let short = frame.as_ref().is_ok_and(|p| vector::is_short(p.chain.len()));
        keep(frame);
        (1, short)
    }

    /// Asks for `ask` frames in one crossing; how many came, and whether all were short.
    #[inline(never)]
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
        let left = budget.min(out.space());
        let mut taking =
            Taking { pool, out, counters, tally: Tally::default(), left, from_main: 0 };
        self.is_drained = false;
        if self.flow_queues.as_ref().is_some_and(|q| q.table.is_in_use()) {
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

    /// Takes frames from every queue; see `flow_queues.rs` for the order.
    #[inline(never)]
    fn take_from_all(&mut self, now: Instant, taking: &mut Taking<'_>) {
        let Some(mut queues) = self.flow_queues.take() else { return };
        let all_empty =
            take_in_turn(&mut AllQueues { tap: self, queues: &mut queues, taking, now });
        self.flow_queues = Some(queues);
        self.is_drained = all_empty;
    }

    /// Gives a flow a queue of its own if flows come mixed, and takes those back that are not used.
    fn spread_flows(&mut self, now: Instant, outcome: Outcome, from_main: usize) {
        let Some(queues) = &mut self.flow_queues else { return };
        let is_usual = !queues.table.is_in_use() && outcome.misses == 0 && !queues.is_begun();
        if is_usual {
            return queues.table.note(outcome.hits, 0);
        }
        self.look_after_queues(now, outcome, from_main);
    }

    #[inline(never)]
    fn look_after_queues(&mut self, now: Instant, outcome: Outcome, from_main: usize) {
        let Some(queues) = &mut self.flow_queues else { return };
        let is_shared = outcome.starved > 0 && self.placer.is_shared();
        let starved = if is_shared { outcome.starved } else { 0 };
        queues.table.note(outcome.hits, outcome.mixed.saturating_add(starved));
        if queues.table.is_in_use() {
            queues.look_after(now, |flow| self.placer.has_rooms(flow));
        } else {
            queues.main_gave(from_main, false);
        }
        if !queues.is_needed() {
            return;
        }
        let Some(flow) = self.placer.find_wanting(|flow| !queues.table.has(flow)) else {
            return queues.table.not_now();
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
enum Source<'a> {
    Main,
    /// A queue that a flow has to itself.
    Of(&'a File, FlowKey),
}

impl<'a> Source<'a> {
    fn file(self, main: &'a File) -> &'a File {
        match self {
            Source::Main => main,
            Source::Of(file, _) => file,
        }
    }
}

/// All queues of a TAP, of which frames are taken.
struct AllQueues<'a, 'b> {
    tap: &'a mut Tap,
    queues: &'a mut FlowQueues,
    taking: &'a mut Taking<'b>,
    now: Instant,
}

impl AllQueues<'_, '_> {
    /// Reads one frame from the queue of a flow: whether there was one, and whether the next one may be
    /// read, too.
    fn take_one(&mut self, queue: usize, flow: FlowKey) -> (bool, bool) {
        let AllQueues { tap, queues, taking, now } = self;
        let Some(file) = queues.file(queue) else { return (false, false) };
        tap.stats.rx_crossings += 1;
        let (pool, mut keep) = taking.split();
        let Some(frame) = tap.read(Source::Of(file, flow), pool) else { return (false, true) };
        let bytes = frame.as_ref().map_or(0, |p| p.chain.len());
        keep(frame);
        drop(keep);
        taking.left -= 1;
        let has_rooms = tap.placer.has_rooms(&flow);
        (true, has_rooms || queues.table.sipped(queue, *now, bytes))
    }
}

impl Lines for AllQueues<'_, '_> {
    fn table(&mut self) -> &mut Table {
        &mut self.queues.table
    }

    fn take_main(&mut self) -> Taken {
        self.tap.is_drained = false;
        let before = self.taking.from_main;
        let goes_on = self.tap.take_from_main(self.taking);
        let is_empty = self.tap.is_drained;
        self.queues.main_gave(self.taking.from_main - before, is_empty);
        Taken::new(goes_on, is_empty)
    }

    fn is_due(&mut self, queue: usize) -> bool {
        let placer = &self.tap.placer;
        self.queues.is_due(queue, self.now, |flow| placer.has_rooms(flow))
    }

    fn take(&mut self, queue: usize) -> Taken {
        let Some(flow) = self.queues.table.flow(queue) else { return Taken::Empty };
        self.tap.placer.set_alone(true);
        let (mut goes_on, mut is_full, mut is_empty) = (true, false, false);
        while goes_on && self.taking.left > 0 && self.tap.lost.is_none() {
            let (came, may_go_on) = self.take_one(queue, flow);
            is_full = self.tap.placer.take_full();
            is_empty = !came;
            goes_on = came && may_go_on && !is_full;
        }
        self.tap.placer.set_alone(false);
        if is_empty {
            self.queues.was_empty(queue, self.now);
        }
        Taken::new(!is_full, is_empty)
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
