//! The flow table of the hardware: which flows have posted memory, what is expected next of each, and
//! the pages that the hardware may write.
//!
//! The host writes *page pods* (a record of 64 bytes tells the hardware where four pages lie) when the stack makes a
//! buffer known (`DirectPlacement::register`), and a tag with an offset whenever it posts one; both are the host's
//! work. The hardware finds whether a segment is the next one of a flow, and where its payload goes.
//!
//! If the host is late, the hardware waits for it; else a sender that is always ahead would never be placed. A hint is
//! outdated if it has no space or is below the bytes that have landed. Frames of a flow with an outdated hint stay on
//! the wire, and so do all later frames, until the host has taken the landed bytes. Then they wait for a moment
//! ([`PAUSE`]) for a new hint; once per hint. Frames wait in the same way when a buffer became full.
//!
//! Source: the page pods and tags of Chelsio's T4/T5/T6 (public driver sources).

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};

use fulmar_stack::base::{Duration, FlowKey, Instant, Offload};
use fulmar_stack::device::{Unsupported, WritableRanges};
use fulmar_stack::mbuf::BufId;

use super::meter::bump;
use super::rx::Kind;
use fulmar::internals::drivers::placing::flows::{self, Filling, Flows, Place, Segment};

/// How long a frame waits at most for a reader who has just got a buffer back: about the longest that
/// one pause frame holds a line of 40 Gbit/s (IEEE 802.3 annex 31B: 65,535 times 512 bits).
const PAUSE: Duration = Duration::from_micros(800);

/// The state that hardware and host share.
pub struct FlowTable {
    table: Mutex<Table>,
    /// Frames that the hardware has landed, and those that the host has taken.
    landed: AtomicU64,
    taken: AtomicU64,
    /// Until when frames are held back, in nanoseconds.
    paused_until_ns: AtomicU64,
    /// Frames of placed flows that went elsewhere since the host asked last.
    misses: AtomicU64,
}

/// The table itself.
pub struct Table {
    flows: Flows,
    /// Whether any flow was ever placed.
    is_used: bool,
}

impl FlowTable {
    pub fn new() -> FlowTable {
        let table = Table { flows: Flows::default(), is_used: false };
        FlowTable {
            table: Mutex::new(table),
            landed: AtomicU64::new(0),
            taken: AtomicU64::new(0),
            paused_until_ns: AtomicU64::new(0),
            misses: AtomicU64::new(0),
        }
    }

    pub fn lock(&self) -> MutexGuard<'_, Table> {
        // A panic elsewhere cannot leave the table half changed.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets or changes the hint of a flow.
    ///
    /// # Errors
    /// The table is full, or the flow has no range that another can follow.
    pub fn set(&self, change: impl FnOnce(&mut Flows) -> Option<Place>) -> Result<(), Unsupported> {
        let mut table = self.lock();
        change(&mut table.flows).ok_or(Unsupported)?;
        table.is_used = true;
        self.paused_until_ns.store(0, Relaxed);
        Ok(())
    }

    /// The hardware has landed a frame.
    pub fn landed(&self) {
        bump(&self.landed, 1);
    }

    /// The host has taken frames.
    pub fn taken(&self, frames: u64) {
        bump(&self.taken, frames);
    }

    /// A frame of a placed flow goes elsewhere.
    pub fn miss(&self) {
        self.misses.fetch_add(1, Relaxed);
    }

    /// How many did since this was asked last.
    pub fn take_misses(&self) -> u64 {
        if self.misses.load(Relaxed) == 0 { 0 } else { self.misses.swap(0, Relaxed) }
    }

    /// Whether a frame that comes too early for its flow waits on the wire.
    pub fn holds_back(&self, now: Instant, slot: usize, s: &Segment, table: &mut Table) -> bool {
        let Some(flow) = table.flows.get_mut(slot) else { return false };
        if flow.has_waited || !flow.is_outdated(s) {
            return false;
        }
        if self.landed.load(Relaxed) == self.taken.load(Relaxed) {
            flow.has_waited = true;
            self.pause(now);
        }
        true
    }

    fn pause(&self, now: Instant) {
        self.paused_until_ns.store((now + PAUSE).as_nanos(), Relaxed);
    }

    /// Until when frames are held back for a reader.
    pub fn paused_until(&self) -> Instant {
        Instant::from_nanos(self.paused_until_ns.load(Relaxed))
    }

    pub fn is_paused(&self, now: Instant) -> bool {
        now < self.paused_until()
    }
}

/// Where the payload of the next frame goes.
pub struct Plan {
    pub slot: usize,
    pub segment: Segment,
    /// Bytes of the payload for which there is space.
    pub fits: usize,
    /// The ring in which the headers go.
    pub kind: Kind,
    pub now: Instant,
}

impl Table {
    pub fn is_empty(&self) -> bool {
        !self.is_used
    }

    pub fn clear(&mut self, flow: &FlowKey) -> WritableRanges {
        self.flows.clear(flow)
    }

    /// The flow of a frame, if the flow was ever placed.
    pub fn find(&mut self, front: &[u8], frame_bytes: usize) -> Option<(usize, Segment)> {
        let segment = Segment::of(front, frame_bytes).filter(|s| s.payload_bytes > 0)?;
        Some((self.flows.find(&segment)?, segment))
    }

    /// Whether this is the next segment of the flow and there is space for its beginning.
    pub fn expects(&self, slot: usize, segment: &Segment) -> bool {
        self.flows.get(slot).is_some_and(|f| f.expects(segment))
    }

    /// Bytes that fit into the posted memory of a flow.
    pub fn space(&self, slot: usize) -> usize {
        self.flows.get(slot).map_or(0, |f| f.ranges.bytes())
    }
}

/// Payload that is being written into posted memory.
pub struct Placing<'a> {
    plan: &'a Plan,
    table: &'a mut Table,
    shared: &'a FlowTable,
    done: usize,
    /// The hardware's description of the frame.
    pub offload: Offload,
}

impl<'a> Placing<'a> {
    pub fn new(plan: &'a Plan, table: &'a mut Table, shared: &'a FlowTable) -> Placing<'a> {
        Placing { plan, table, shared, done: 0, offload: Offload::default() }
    }

    /// Bytes that are not placed but go in front.
    pub fn header_bytes(&self) -> usize {
        self.plan.segment.header_bytes
    }

    /// Bytes that are still to be placed.
    pub fn left(&self) -> usize {
        self.plan.fits - self.done
    }

    /// The next run of space, at most `n` bytes.
    pub fn space(&mut self, n: usize) -> Option<&mut [u8]> {
        let (from, fits) = (self.done, self.plan.fits);
        let flow = self.table.flows.get_mut(self.plan.slot)?;
        let [a, b] = flows::parts(&mut flow.ranges, fits);
        let (part, from) = if from < a.len() { (a, from) } else { (b, from - a.len()) };
        let n = n.min(part.len() - from);
        self.done += n;
        part.get_mut(from..from + n)
    }

    /// What was placed, and the end of the frame if that is all of it.
    pub fn finish(self) -> (Filling, Option<Offload>) {
        let plan = self.plan;
        let flow = self.table.flows.get_mut(plan.slot);
        let filling = flow.map(|f| f.fill(&plan.segment)).unwrap_or_default();
        if filling.is_full {
            self.shared.pause(plan.now);
        }
        let is_all = plan.fits == plan.segment.payload_bytes;
        (filling, is_all.then_some(self.offload))
    }
}

/// Page pods in the memory of the hardware, where the host writes them.
pub struct Pods {
    pods: Box<[Pod]>,
    next: usize,
}

/// The descriptor of four pages, and of the first of the next four.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Pod {
    flags: u64,
    bytes: u32,
    offset: u32,
    reserved: u64,
    pages: [u64; 5],
}
const _: () = assert!(size_of::<Pod>() == 64);

/// Records that the hardware has space for: 256 MiB in pages of 4 KiB.
const PODS: usize = 16_384;
const PAGES_PER_POD: usize = 4;
const PAGE_BYTES: usize = 4096;

impl Pods {
    pub fn new() -> Pods {
        Pods { pods: Box::default(), next: 0 }
    }

    /// Tells the hardware where the pages of a buffer are; returns how many records that took.
    pub fn write(&mut self, buffer: BufId) -> usize {
        if self.pods.is_empty() {
            self.pods = vec![Pod::default(); PODS].into();
        }
        let first = buffer.address / PAGE_BYTES;
        let end = buffer.address.saturating_add(buffer.bytes).div_ceil(PAGE_BYTES);
        let (mut page, mut count) = (first, 0);
        while page < end && count < PODS {
            let pages = std::array::from_fn(|i| ((page + i) * PAGE_BYTES) as u64);
            // The remainder keeps the index inside.
            self.pods[self.next % PODS] = Pod {
                flags: 1 << 63 | buffer.generation,
                bytes: buffer.bytes as u32,
                offset: (buffer.address % PAGE_BYTES) as u32,
                reserved: 0,
                pages,
            };
            self.next = self.next.wrapping_add(1);
            page += PAGES_PER_POD;
            count += 1;
        }
        count
    }
}

#[cfg(test)]
mod tests;
