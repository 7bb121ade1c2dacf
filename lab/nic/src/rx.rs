//! The receiving half of the hardware: frames from the wire into posted buffers.
//!
//! Frames in flight wait in a lane, with the time at which their last bit arrives. Frames that are due go into buffers
//! that the host has posted; each frame starts a buffer and takes the buffers that it needs. Consecutive segments of
//! one stream are aggregated on the way ([`lro`]). The payload of a flow whose reader has posted memory goes there
//! ([`super::table`]). Where no buffer is posted, the wire pauses (IEEE 802.3 annex 31B) or the frame is lost, as
//! configured.

pub mod lro;

use std::collections::VecDeque;
use std::sync::Arc;

use fulmar_stack::base::{Instant, Offload};
use fulmar_stack::mbuf::Mbuf;
use fulmar_stack::wire::checksum::Sum;
use fulmar_stack::wire::{protocol, tcp, udp};

use super::cut::Spare;
use super::frame::{Headers, Rest, Transport, WireFrame};
use super::meter::{Board, bump};
use super::ring::Ring;
use super::table::{FlowTable, Placing, Plan, Table};
use super::{Coalesce, SimConfig, pattern};
use fulmar::internals::drivers::placing::flows::{Filling, Segment};

/// Frames on their way to one NIC at most; beyond that the far end holds back.
pub const LANE_PKTS: usize = 4096;

/// Space of a small buffer: a packet of MTU 1500.
const SMALL_BYTES: usize = 2048;

/// A posted buffer. The hardware writes into the spare space of the mbuf.
pub struct Buffer {
    pub m: Mbuf,
    /// What was placed behind these bytes of the frame, if anything was.
    pub placed: Option<Filling>,
    /// Set with the last buffer of a frame: what the hardware found out about it.
    pub end: Option<Offload>,
}

impl Buffer {
    /// A buffer to be filled.
    pub fn empty(m: Mbuf) -> Buffer {
        Buffer { m, placed: None, end: None }
    }
}

/// The receive rings with what the hardware says about them: one of small buffers, one of large
/// ones. The hardware takes the smaller kind that a frame fits, so that a packet does not keep the
/// memory of an aggregate; the completions tell in which order the frames came.
pub struct RxRing {
    rings: [Ring<Buffer>; 2],
    /// Space of a small buffer.
    small_bytes: usize,
    /// Space of a large buffer.
    large_bytes: usize,
    /// The ring of each completed buffer, in order.
    completions: VecDeque<Kind>,
    /// Frames in the rings that the host has not taken.
    pub pending: usize,
    /// When the first of them came.
    pub first_pending: Option<Instant>,
}

/// One of the receive rings.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    Small,
    Large,
}

impl Kind {
    pub const ALL: [Kind; 2] = [Kind::Small, Kind::Large];
}

impl RxRing {
    pub fn new(config: &SimConfig) -> RxRing {
        let small =
            if config.rx_buffer_bytes > 2 * SMALL_BYTES { config.rx_small_buffers } else { 1 };
        let rings = [Ring::new(small), Ring::new(config.rx_buffers)];
        let total = rings.iter().map(Ring::capacity).sum();
        RxRing {
            rings,
            small_bytes: SMALL_BYTES,
            large_bytes: config.rx_buffer_bytes,
            completions: VecDeque::with_capacity(total),
            pending: 0,
            first_pending: None,
        }
    }

    pub fn ring(&mut self, kind: Kind) -> &mut Ring<Buffer> {
        &mut self.rings[kind as usize]
    }

    /// Space of a buffer of this kind.
    pub fn buffer_bytes(&self, kind: Kind) -> usize {
        match kind {
            Kind::Small => self.small_bytes,
            Kind::Large => self.large_bytes,
        }
    }

    /// Buffers in the ring of this kind.
    pub fn posted(&self, kind: Kind) -> usize {
        let ring = &self.rings[kind as usize];
        ring.capacity() - ring.space()
    }

    /// Bytes of all buffers in the rings.
    pub fn posted_bytes(&self) -> usize {
        Kind::ALL.into_iter().map(|k| self.posted(k) * self.buffer_bytes(k)).sum()
    }

    /// The kind of buffer for a frame of `bytes` bytes. `None` while buffers are missing.
    fn kind_for(&self, bytes: usize) -> Option<Kind> {
        let has = |kind: Kind, need: usize| {
            self.rings[kind as usize].waiting() * self.buffer_bytes(kind) >= need
        };
        if bytes <= self.small_bytes && has(Kind::Small, bytes.max(1)) {
            return Some(Kind::Small);
        }
        has(Kind::Large, bytes.max(1)).then_some(Kind::Large)
    }

    /// Where the headers of a frame go whose payload is placed but for the last `rest_bytes`; nothing
    /// while buffers are missing.
    fn kind_for_placed(&self, header_bytes: usize, rest_bytes: usize) -> Option<Kind> {
        let kind = self.kind_for(header_bytes)?;
        let headers = usize::from(kind == Kind::Large);
        let rest = rest_bytes.div_ceil(self.large_bytes);
        (self.rings[Kind::Large as usize].waiting() >= headers + rest).then_some(kind)
    }

    /// Whether any buffer is posted.
    pub fn has_buffers(&self) -> bool {
        self.rings.iter().any(|r| r.waiting() > 0)
    }

    fn complete(&mut self, kind: Kind, b: Buffer) {
        self.ring(kind).complete(b);
        self.completions.push_back(kind);
    }

    /// Buffers that the hardware has filled and the host has not taken back.
    pub fn done(&self) -> usize {
        self.completions.len()
    }

    /// The next filled buffer, still in its slot.
    #[inline]
    pub fn next_done(&self) -> Option<(Kind, &Buffer)> {
        let kind = *self.completions.front()?;
        Some((kind, self.rings[kind as usize].oldest_done()?))
    }

    /// The host takes back the next filled buffer.
    #[inline]
    pub fn reap(&mut self) -> Option<(Kind, Buffer)> {
        let kind = self.completions.pop_front()?;
        let b = self.ring(kind).reap()?;
        Some((kind, b))
    }

    /// Moves the buffers that the host has posted to the rings of the hardware.
    pub fn take_posted(&mut self, host: &mut RxRing) {
        for kind in Kind::ALL {
            self.ring(kind).take_posted(host.ring(kind));
        }
    }

    /// Gives filled buffers to the host.
    pub fn give_done(&mut self, host: &mut RxRing) {
        for kind in Kind::ALL {
            self.ring(kind).give_done(host.ring(kind));
        }
        host.completions.append(&mut self.completions);
        host.pending += self.pending;
        host.first_pending = host.first_pending.or(self.first_pending);
        self.taken(0);
    }

    /// The host has taken frames; `left` frames are left.
    pub fn taken(&mut self, left: usize) {
        self.pending = left;
        if left == 0 {
            self.first_pending = None;
        }
    }
}

/// See the module's header.
pub struct Rx {
    pub lane: VecDeque<(Instant, WireFrame)>,
    /// It verifies checksums, so that the host need not.
    csum: bool,
    /// Longest aggregated frame in bytes of IP packet. `None`: no aggregation.
    lro: Option<usize>,
    flow_control: bool,
    pub spare: Spare,
    table: Arc<FlowTable>,
}

impl Rx {
    pub fn new(config: &SimConfig, table: Arc<FlowTable>) -> Rx {
        Rx {
            table,
            lane: VecDeque::with_capacity(64),
            csum: config.csum,
            lro: config.lro.filter(|_| config.csum),
            flow_control: config.flow_control,
            spare: Spare::default(),
        }
    }

    /// Whether the far end may put another frame on the wire.
    pub fn has_space(&self) -> bool {
        self.lane.len() < LANE_PKTS
    }

    /// The largest train that may arrive as it is, in bytes of IP packet.
    pub fn takes_trains(&self) -> Option<usize> {
        self.lro
    }

    fn first_due(&self) -> Option<Instant> {
        self.lane.front().map(|(due, _)| *due)
    }

    /// When the next frame is due, or when its hold ends.
    pub fn next_due(&self) -> Option<Instant> {
        self.first_due().map(|due| due.max(self.table.paused_until()))
    }

    /// When the hardware raises an interrupt: after `packets` frames, or `delay` after the first.
    pub fn interrupt_at(&self, rx: &RxRing, after: Coalesce) -> Option<Instant> {
        let first = rx.first_pending.or_else(|| self.next_due())?;
        let by_time = first + after.delay;
        let more = after.packets.max(1).saturating_sub(rx.pending);
        if more == 0 {
            return Some(first);
        }
        let by_count =
            self.lane.get(more - 1).map(|(due, _)| (*due).max(self.table.paused_until()));
        Some(by_count.map_or(by_time, |at| at.min(by_time)))
    }

    /// Moves due frames into posted buffers; returns the bytes moved.
    pub fn run(&mut self, now: Instant, rx: &mut RxRing, board: &Board) -> u64 {
        if self.lane.is_empty() {
            return 0;
        }
        let mut moved = 0;
        let shared = Arc::clone(&self.table);
        let mut table = shared.lock();
        while self.first_due().is_some_and(|due| due <= now) && !shared.is_paused(now) {
            let of = self.placed_flow(now, &mut table);
            if let Some((run, plan)) = of.as_ref().and_then(|of| self.plan(of, now, rx, &table)) {
                let placing = Some(Placing::new(&plan, &mut table, &shared));
                let to = BufferPair { rx, kind: plan.kind, current: None, touched: 0, placing };
                moved += self.land(run, to, board);
            } else if self.flow_control
                && of
                    .as_ref()
                    .is_some_and(|(_, slot, s)| shared.holds_back(now, *slot, s, &mut table))
            {
                break;
            } else if let Some((run, kind)) = self.next_run(now, rx) {
                let to = BufferPair { rx, kind, current: None, touched: 0, placing: None };
                moved += self.land(&run, to, board);
                of.into_iter().for_each(|_| shared.miss());
            } else if self.flow_control {
                break;
            } else {
                self.miss(board);
            }
        }
        moved
    }

    /// The frames in front, put together, if they are of a flow whose reader has posted memory, and
    /// that flow.
    fn placed_flow(&self, now: Instant, table: &mut Table) -> Option<(lro::Run, usize, Segment)> {
        if !self.csum || table.is_empty() {
            return None;
        }
        let (_, first) = self.lane.front()?;
        let merged = self.lro.and_then(|limit| lro::run(&self.lane, now, limit));
        let run = merged.unwrap_or_else(|| lro::Run::of_one(first));
        let front = if run.head().is_empty() { first.front() } else { run.head() };
        let (slot, segment) = table.find(front, run.frame_bytes).filter(|_| first.is_sound)?;
        Some((run, slot, segment))
    }

    /// Where they go, if that is posted memory and there are buffers for the rest.
    fn plan<'a>(
        &self,
        (run, slot, segment): &'a (lro::Run, usize, Segment),
        now: Instant,
        rx: &RxRing,
        table: &Table,
    ) -> Option<(&'a lro::Run, Plan)> {
        if !table.expects(*slot, segment) {
            return None;
        }
        let fits = table.space(*slot).min(segment.payload_bytes);
        let kind = rx.kind_for_placed(segment.header_bytes, segment.payload_bytes - fits)?;
        Some((run, Plan { slot: *slot, segment: *segment, fits, kind, now }))
    }

    /// The frames in front that are put together, if there are buffers for them; less of them, or
    /// nothing, if there are not.
    fn next_run(&self, now: Instant, rx: &RxRing) -> Option<(lro::Run, Kind)> {
        let merged = self.lro.and_then(|limit| lro::run(&self.lane, now, limit));
        let placed = |run: lro::Run| {
            let kind = rx.kind_for(run.frame_bytes)?;
            Some((run, kind))
        };
        merged.and_then(placed).or_else(|| {
            let (_, first) = self.lane.front()?;
            placed(lro::Run::of_one(first))
        })
    }

    fn miss(&mut self, board: &Board) {
        if let Some((_, frame)) = self.lane.pop_front() {
            bump(&board.counts.rx_missed, frame.packets() as u64);
            self.recycle(frame);
        }
    }

    fn recycle(&mut self, frame: WireFrame) {
        if let Rest::Bytes(v) = frame.rest {
            self.spare.put(v);
        }
    }

    /// Writes the frames of one run into the next buffers, of which there are enough.
    fn land(&mut self, run: &lro::Run, mut to: BufferPair<'_>, board: &Board) -> u64 {
        let mut packets = 0;
        let mut offload = Offload::default();
        for i in 0..run.frames {
            let Some((due, frame)) = self.lane.pop_front() else { break };
            packets += frame.packets() as u64;
            if i == 0 {
                to.rx.first_pending.get_or_insert(due);
                offload = self.offload(&frame, run);
                to.set_offload(offload);
                to.put(run.head());
            }
            let at = if i == 0 { run.head().len() } else { run.headers };
            to.put_rest(&frame, at);
            self.recycle(frame);
        }
        if !self.csum {
            to.finish_checksum();
        }
        to.rx.pending += 1;
        self.table.landed();
        let touched = to.finish(offload);
        bump(&board.counts.rx_frames, 1);
        bump(&board.counts.rx_packets, packets);
        bump(&board.counts.rx_bytes, run.frame_bytes as u64);
        touched
    }

    /// The offload state of a frame that the host receives.
    fn offload(&self, frame: &WireFrame, run: &lro::Run) -> Offload {
        if !self.csum {
            return Offload::default();
        }
        let Some((csum_start, csum_offset)) = run.partial_csum.or(frame.partial_csum) else {
            return Offload { csum_valid: frame.is_sound, ..Offload::default() };
        };
        let gso = run.gso.or(frame.gso);
        Offload { needs_csum: true, csum_start, csum_offset, csum_valid: false, gso }
    }
}

/// A frame that is being written into buffers.
struct BufferPair<'a> {
    rx: &'a mut RxRing,
    kind: Kind,
    current: Option<Mbuf>,
    touched: u64,
    /// Until the payload that is placed has been written.
    placing: Option<Placing<'a>>,
}

impl BufferPair<'_> {
    /// The next run of space, at most `n` bytes; nothing if buffers are missing.
    fn space(&mut self, n: usize) -> Option<&mut [u8]> {
        let head_bytes = self.current.as_ref().map_or(0, Mbuf::len);
        let n = match &self.placing {
            Some(p) if head_bytes < p.header_bytes() => n.min(p.header_bytes() - head_bytes),
            Some(p) if p.left() == 0 => {
                self.end_placing();
                n
            }
            _ => n,
        };
        if self.placing.as_ref().is_some_and(|p| head_bytes == p.header_bytes()) {
            return self.placing.as_mut()?.space(n);
        }
        self.buffer_room(n)
    }

    fn set_offload(&mut self, offload: Offload) {
        if let Some(p) = &mut self.placing {
            p.offload = offload;
        }
    }

    /// The headers and the placed payload after them are one buffer; the rest goes into further buffers.
    fn end_placing(&mut self) {
        let Some(p) = self.placing.take() else { return };
        let Some(m) = self.current.take() else { return };
        let (placed, end) = p.finish();
        self.rx.complete(self.kind, Buffer { m, placed: Some(placed), end });
        self.kind = Kind::Large;
    }

    /// The next run of space in posted buffers of the ring.
    fn buffer_room(&mut self, n: usize) -> Option<&mut [u8]> {
        if self.current.as_ref().is_some_and(|m| m.tailroom() == 0)
            && let Some(m) = self.current.take()
        {
            self.rx.complete(self.kind, Buffer::empty(m));
        }
        if self.current.is_none() {
            self.current = Some(self.rx.ring(self.kind).fetch()?.m);
        }
        let m = self.current.as_mut()?;
        let n = n.min(m.tailroom());
        m.append(n)
    }

    /// Writes `bytes` bytes that `fill` makes. Its first argument is the number of bytes written before.
    fn write(&mut self, bytes: usize, mut fill: impl FnMut(usize, &mut [u8])) {
        let mut done = 0;
        while done < bytes {
            let Some(space) = self.space(bytes - done) else { return };
            fill(done, space);
            done += space.len();
        }
    }

    fn put(&mut self, bytes: &[u8]) {
        self.touched += bytes.len() as u64;
        self.write(bytes.len(), |done, space| {
            if let Some(from) = bytes.get(done..done + space.len()) {
                space.copy_from_slice(from);
            }
        });
    }

    /// Writes a frame from byte `at` on.
    fn put_rest(&mut self, frame: &WireFrame, at: usize) {
        let head = frame.head();
        if let Some(h) = head.get(at..) {
            self.put(h);
        }
        let skip = at.saturating_sub(head.len());
        match &frame.rest {
            Rest::None => {}
            Rest::Bytes(b) => self.put(b.get(skip..).unwrap_or(&[])),
            Rest::Untouched(n) => self.write(n.saturating_sub(skip), |_, _| {}),
            Rest::Pattern(from, n) => {
                let (from, n) = (from + skip as u64, n.saturating_sub(skip));
                // A byte at a time: several times as slow as a copy.
                self.touched += 4 * n as u64;
                self.write(n, |done, space| pattern::fill(from + done as u64, space));
            }
        }
    }

    /// Stores the transport checksum of a packet whose sender left it to the wire; a right one
    /// comes out the same. A packet in several buffers stays as it is: without checksum offload
    /// every packet fits into one.
    fn finish_checksum(&mut self) {
        let Some(bytes) = self.current.as_mut().and_then(Mbuf::as_mut_slice) else { return };
        let Some(seen) = Headers::parse(bytes, bytes.len()) else { return };
        let (kind, offset) = match seen.transport {
            Transport::Tcp(_) => (protocol::TCP, tcp::CHECKSUM_OFFSET),
            Transport::Udp(_) => (protocol::UDP, udp::CHECKSUM_OFFSET),
            Transport::Other(_) => return,
        };
        let end = seen.payload_at + seen.payload_bytes;
        let Some(l4) = bytes.get_mut(seen.network.l4..end) else { return };
        let Some(field) = l4.get_mut(offset..offset + 2) else { return };
        field.fill(0);
        let mut sum = Sum::new();
        sum.add_pseudo(seen.network.src, seen.network.dst, kind, l4.len() as u32);
        sum.add_bytes(l4);
        let sum = if kind == protocol::UDP { sum.finish_udp() } else { sum.finish() };
        if let Some(field) = l4.get_mut(offset..offset + 2) {
            field.copy_from_slice(&sum.to_be_bytes());
        }
    }

    /// The frame is complete; returns how many bytes of memory were touched.
    fn finish(mut self, offload: Offload) -> u64 {
        self.end_placing();
        if let Some(m) = self.current {
            self.rx.complete(self.kind, Buffer { m, placed: None, end: Some(offload) });
        }
        self.touched
    }
}
