//! Receiving: how many frames one system call reads, and into which memory.

use std::io::{IoSliceMut, Read};

use fulmar_stack::base::{Counters, DropReason, Medium};
use fulmar_stack::device::{Burst, Packet, plain_ip};
use fulmar_stack::mbuf::Pool;
use fulmar_stack::wire::eth;

use super::{Tap, vector};
use crate::drivers::batch::Receiving;
use crate::drivers::placing::Prediction;
use crate::drivers::vnet;

impl Tap {
    /// Reads one frame. `None`: the queue is empty.
    fn read(&mut self, pool: &mut Pool) -> Option<Result<Packet, DropReason>> {
        let is_whole = self.pair.prepare(pool);
        let prediction = self.placer.prediction();
        let places = !self.placer.is_idle()
            && (is_whole || self.placer.parts(prediction, &mut self.pair).is_some());
        match places {
            true => self.read_placed(prediction, pool),
            false => self.read_into_pair(pool),
        }
    }

    /// As [`Tap::read`], into the buffer pair, which was prepared.
    fn read_into_pair(&mut self, pool: &mut Pool) -> Option<Result<Packet, DropReason>> {
        let mut header = [0; vnet::HEADER_BYTES];
        let link_bytes = self.link_bytes();
        let [small, large] = self.pair.parts(&mut self.scratch);
        let (_, first) = small.split_at_mut_checked(link_bytes)?;
        let mut parts =
            [IoSliceMut::new(&mut header), IoSliceMut::new(first), IoSliceMut::new(large)];
        match self.file.read_vectored(&mut parts) {
            Ok(bytes) => {
                self.health.is_down = false;
                Some(self.received(&header, bytes.checked_sub(vnet::HEADER_BYTES), pool))
            }
            Err(e) => {
                self.health.on_read_error(e.raw_os_error().unwrap_or(0));
                None
            }
        }
    }

    /// The frame of `bytes` bytes that crossed into the buffer pair. `None`: not even a virtio-net header did.
    fn received(
        &mut self,
        header: &[u8; vnet::HEADER_BYTES],
        bytes: Option<usize>,
        pool: &mut Pool,
    ) -> Result<Packet, DropReason> {
        let bytes = bytes.ok_or(DropReason::Truncated)?;
        let link_bytes = self.link_bytes();
        let [small, _] = self.pair.parts(&mut self.scratch);
        let (link, first) = small.split_at_mut_checked(link_bytes).ok_or(DropReason::NoBuffer)?;
        let first = first.get(..bytes).unwrap_or(first);
        match self.caps.medium {
            Medium::Ethernet if bytes < eth::HEADER_BYTES => return Err(DropReason::Truncated),
            Medium::Ethernet => {}
            Medium::Ip => link.copy_from_slice(&plain_ip::link_header(first, bytes)?),
        }
        let offload = vnet::parse(header, bytes, first)?.shift(link_bytes as u16);
        let chain = self.pair.take(bytes + link_bytes, &mut self.scratch, pool)?;
        Ok(Packet { chain, offload })
    }

    /// As [`Tap::read`], into the ranges of the flow that is aimed at. The pool has the buffers.
    fn read_placed(
        &mut self,
        prediction: Option<Prediction>,
        pool: &mut Pool,
    ) -> Option<Result<Packet, DropReason>> {
        let mut header = [0; vnet::HEADER_BYTES];
        let [head, a, b, rest] = self.placer.parts(prediction, &mut self.pair)?;
        let mut parts = [&mut header, head, a, b, rest].map(IoSliceMut::new);
        let bytes = match self.file.read_vectored(&mut parts) {
            Ok(bytes) => bytes.saturating_sub(vnet::HEADER_BYTES),
            Err(e) => {
                let errno = e.raw_os_error().unwrap_or(0);
                if errno != libc::EAGAIN {
                    self.placer.discard(prediction);
                }
                self.health.on_read_error(errno);
                return None;
            }
        };
        self.health.is_down = false;
        Some(self.placer.packet(prediction, &header, bytes, &mut self.pair, pool))
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
            self.is_drained = true;
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
            self.health.is_down = false;
        }
        if let Some(errno) = came.errno {
            self.is_drained = true;
            self.health.on_read_error(errno);
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
        self.tally(tally).received(counters, &mut self.stats);
        self.placer.take_outcome().count(counters, &mut self.stats);
        tally.frames as usize
    }

    fn take_frames(&mut self, taking: &mut Taking<'_>) {
        self.is_drained = false;
        let (mut run, mut all_short, mut is_full) = (0, true, false);
        while !is_full && taking.left > 0 && self.health.lost.is_none() && !self.is_drained {
            self.stats.rx_crossings += 1;
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
