//! Receiving: which frames are asked for together, and where they land.

use std::io::{IoSliceMut, Read};

use fulmar_base::{Counters, DropReason};
use fulmar_mbuf::Pool;
use fulmar_netdev::{Burst, Packet, Tally};

use super::{ETHER_BYTES, Tap, vector};
use crate::placing::Aim;
use crate::vnet;

impl Tap {
    /// Reads one frame. `None`: there is none.
    fn read(&mut self, pool: &mut Pool) -> Option<Result<Packet, DropReason>> {
        self.landing.prepare(pool);
        let aim = self.placer.aim();
        if !self.placer.is_idle() && self.placer.parts(aim, &mut self.landing).is_some() {
            return self.read_placed(aim, pool);
        }
        let mut header = [0; vnet::HEADER_BYTES];
        let [small, large] = self.landing.parts(&mut self.scratch);
        let mut parts =
            [IoSliceMut::new(&mut header), IoSliceMut::new(small), IoSliceMut::new(large)];
        let bytes = match (&self.file).read_vectored(&mut parts) {
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
        aim: Option<Aim>,
        pool: &mut Pool,
    ) -> Option<Result<Packet, DropReason>> {
        let mut header = [0; vnet::HEADER_BYTES];
        let [head, a, b, rest] = self.placer.parts(aim, &mut self.landing)?;
        let mut parts = [&mut header, head, a, b, rest].map(IoSliceMut::new);
        let bytes = match (&self.file).read_vectored(&mut parts) {
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
        let Some(frame) = self.read(pool) else {
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
        pool: &mut Pool,
        out: &mut Burst,
        budget: usize,
        counters: &mut Counters,
    ) -> usize {
        let mut tally = Tally::default();
        let mut left = budget.min(out.room());
        let (mut run, mut all_short) = (0, true);
        self.is_drained = false;
        while left > 0 && self.lost.is_none() && !self.is_drained {
            self.stats.rx_crossings += 1;
            let ask = if all_short { self.ask(run, left) } else { 0 };
            let keep = |frame: Result<Packet, DropReason>| match frame {
                Err(reason) => counters.drop_packet(reason),
                Ok(p) => {
                    tally.add(&p);
                    // There is room: the number of rounds was bounded by it.
                    let _ = out.push(p);
                }
            };
            let (came, short) = match ask {
                0 => self.read_one(pool, keep),
                _ => self.read_run(ask, pool, keep),
            };
            (left, run, all_short) = (left - came, run + came, all_short && short);
            if self.placer.take_full() {
                break;
            }
        }
        if run > 0 {
            self.last_run = if all_short { run } else { 0 };
        }
        tally.received(counters, &mut self.stats);
        self.placer.take_outcome().count(counters, &mut self.stats);
        tally.frames as usize
    }
}
