//! Receiving: how many frames one system call reads, and into which memory.

use std::io::{IoSliceMut, Read};

use fulmar_stack::base::{Counters, DropReason};
use fulmar_stack::device::{Burst, Packet};
use fulmar_stack::mbuf::Pool;

use super::{Tap, vector};
use crate::drivers::batch::Receiving;
use crate::drivers::placing::Prediction;
use crate::drivers::vnet;

impl Tap {
    /// Reads one frame. `None`: the queue is empty.
    fn read(&mut self, pool: &mut Pool) -> Option<Result<Packet, DropReason>> {
        let is_whole = self.queue.pair.prepare(pool);
        let prediction = self.placer.prediction();
        let places = !self.placer.is_idle()
            && (is_whole || self.placer.parts(prediction, &mut self.queue.pair).is_some());
        match places {
            true => self.read_placed(prediction, pool),
            false => self.queue.read(pool),
        }
    }

    /// As [`Tap::read`], into the ranges of the flow that is aimed at. The pool has the buffers.
    fn read_placed(
        &mut self,
        prediction: Option<Prediction>,
        pool: &mut Pool,
    ) -> Option<Result<Packet, DropReason>> {
        let mut header = [0; vnet::HEADER_BYTES];
        let [head, a, b, rest] = self.placer.parts(prediction, &mut self.queue.pair)?;
        let mut parts = [&mut header, head, a, b, rest].map(IoSliceMut::new);
        let bytes = match self.queue.file.read_vectored(&mut parts) {
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
        let Some(frame) = self.read(taking.pool) else {
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
        pool: &mut Pool,
        out: &mut Burst,
        budget: usize,
        counters: &mut Counters,
    ) -> usize {
        let left = budget.min(out.space());
        let mut taking = Taking { pool, frames: Receiving::new(out, counters), left };
        self.take_frames(&mut taking);
        let Receiving { tally, counters, .. } = taking.frames;
        tally.received(counters, &mut self.queue.stats);
        self.placer.take_outcome().count(counters, &mut self.queue.stats);
        tally.frames as usize
    }

    fn take_frames(&mut self, taking: &mut Taking<'_>) {
        self.queue.is_drained = false;
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
    }
}

/// The state of one receive burst.
struct Taking<'a> {
    pool: &'a mut Pool,
    frames: Receiving<'a>,
    /// Frames that may still be taken.
    left: usize,
}
