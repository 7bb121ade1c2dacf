//! The assignment of flows to queues, and the order in which queues are read. No descriptors, no system
//! calls.
//!
//! Invariants: a flow has one queue at most; the kernel sends a flow's packets to a queue from when it
//! [joins](State::Joining) it until it [leaves](State::Leaving); `in_use` counts the queues that are not
//! [free](State::Free); a queue that is not free wakes the sleeper, or [`Table::next_deadline`] covers it.

use fulmar_stack::base::{Duration, FlowKey, Instant};

/// A flow that posts nothing for this long loses its queue.
pub const IDLE_TIMEOUT: Duration = Duration::from_millis(100);
/// A queue is not read for this long after its flow has filled its posted ranges.
pub const BACK_OFF: Duration = Duration::from_millis(1);
/// Bytes read between two back-offs for a flow without posted ranges: less than a reader consumes in
/// [`BACK_OFF`].
pub const READ_QUANTUM: usize = 256 << 10;
/// A queue is still read for this long after its flow has left it.
pub const LINGER: Duration = Duration::from_millis(10);
/// Capacity of a TAP queue in frames (default `txqueuelen`).
pub const QUEUE_FRAMES: usize = 1000;
/// Weight of an interleaved frame against a placed one: a flow gets a queue if more than one frame in 16
/// is interleaved, after four such frames at the earliest.
const MIXED_WEIGHT: u64 = 16;
const DEMAND_THRESHOLD: u64 = 4 * MIXED_WEIGHT;
const MAX_DEMAND: u64 = 16 * DEMAND_THRESHOLD;

/// The kernel's operations on queues. Queues are numbered from 0; the main queue is not among them.
pub trait Kernel {
    /// Adds a queue to those that wake the sleeper. False: it failed.
    fn watch(&mut self, queue: usize) -> bool;

    /// Removes a queue from those that wake the sleeper. False: it failed.
    fn unwatch(&mut self, queue: usize) -> bool;

    /// Steers the packets of a flow to a queue; `None`: to the main queue.
    ///
    /// # Errors
    /// Those of `bpf(2)`. The map is unchanged.
    fn steer(&mut self, flow: &FlowKey, queue: Option<usize>) -> std::io::Result<()>;
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// Assigned to no flow; not read.
    Free,
    /// The main queue may still have earlier frames of the flow, at most `ahead`.
    Joining { ahead: usize },
    /// Assigned and read. `unposted`: the flow has no posted ranges.
    Own { unposted: Option<Unposted> },
    /// The flow is steered to the main queue again, since then.
    Leaving { since: Instant },
}

/// Reading for a flow without posted ranges.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Unposted {
    since: Instant,
    /// When the last back-off began.
    backed_off_at: Instant,
    /// Bytes read since it ended.
    read_bytes: usize,
}

impl Unposted {
    fn new(now: Instant) -> Unposted {
        Unposted { since: now, backed_off_at: now, read_bytes: 0 }
    }

    fn is_backed_off(&self, now: Instant) -> bool {
        now.since(self.backed_off_at) < BACK_OFF
    }
}

/// One queue.
#[derive(Debug)]
struct Entry {
    flow: Option<FlowKey>,
    state: State,
    /// The queue does not wake the sleeper.
    is_masked: bool,
}

impl Entry {
    // A failed `mask` or `unmask` is repeated by the next poll, for which `next_deadline` provides.

    fn mask(&mut self, queue: usize, kernel: &mut impl Kernel) {
        self.is_masked = self.is_masked || kernel.unwatch(queue);
    }

    fn unmask(&mut self, queue: usize, kernel: &mut impl Kernel) {
        self.is_masked = self.is_masked && !kernel.watch(queue);
    }
}

/// See the module's header.
#[derive(Default)]
pub struct Table {
    queues: Vec<Entry>,
    in_use: usize,
    demand: u64,
    turn: usize,
}

impl Table {
    /// Adds a free queue.
    pub fn add(&mut self) {
        self.queues.push(Entry { flow: None, state: State::Free, is_masked: false });
    }

    /// Whether any queue has to be read.
    pub fn is_in_use(&self) -> bool {
        self.in_use > 0
    }

    pub fn has_free(&self) -> bool {
        self.queues.iter().any(|q| q.state == State::Free)
    }

    /// The flow that a queue is assigned to.
    pub fn flow(&self, queue: usize) -> Option<FlowKey> {
        self.queues.get(queue)?.flow
    }

    /// Whether a flow has a queue.
    pub fn has(&self, flow: &FlowKey) -> bool {
        self.queues.iter().any(|q| q.flow == Some(*flow))
    }

    /// Assigns a free queue to a flow. False: no queue is free.
    ///
    /// # Errors
    /// Those of [`Kernel::steer`]. The queue may be assigned; it then receives nothing.
    pub fn give(&mut self, flow: &FlowKey, kernel: &mut impl Kernel) -> std::io::Result<bool> {
        self.demand = 0;
        let free = self.queues.iter_mut().enumerate().find(|(_, q)| q.state == State::Free);
        let Some((queue, q)) = free else { return Ok(false) };
        // Before the first frame comes.
        if !kernel.watch(queue) {
            return Ok(false);
        }
        (q.flow, q.state) = (Some(*flow), State::Joining { ahead: QUEUE_FRAMES });
        self.in_use += 1;
        kernel.steer(flow, Some(queue))?;
        Ok(true)
    }

    /// Whether a queue is to be read. A queue that is backed off is masked.
    pub fn is_due(
        &mut self,
        queue: usize,
        now: Instant,
        kernel: &mut impl Kernel,
        has_ranges: impl Fn(&FlowKey) -> bool,
    ) -> bool {
        let Some(q) = self.queues.get_mut(queue) else { return false };
        let State::Own { unposted } = q.state else { return false };
        let is_backed_off = unposted.is_some_and(|u| u.is_backed_off(now));
        let is_due = !is_backed_off || q.flow.is_some_and(|flow| has_ranges(&flow));
        match is_due {
            true => q.unmask(queue, kernel),
            false => q.mask(queue, kernel),
        }
        is_due
    }

    /// Counts bytes read while the flow has no posted ranges. Returns whether reading may continue.
    pub fn on_unplaced(&mut self, queue: usize, now: Instant, bytes: usize) -> bool {
        let Some(State::Own { unposted }) = self.queues.get_mut(queue).map(|q| &mut q.state) else {
            return true;
        };
        let unposted = unposted.get_or_insert_with(|| Unposted::new(now));
        unposted.read_bytes = unposted.read_bytes.saturating_add(bytes);
        if unposted.read_bytes >= READ_QUANTUM {
            (unposted.backed_off_at, unposted.read_bytes) = (now, 0);
        }
        !unposted.is_backed_off(now)
    }

    /// Unmasks the queue of a flow that has posted ranges again.
    pub fn placed(&mut self, flow: &FlowKey, kernel: &mut impl Kernel) {
        for (queue, q) in self.queues.iter_mut().enumerate() {
            if q.flow == Some(*flow) {
                q.unmask(queue, kernel);
            }
        }
    }

    /// The end of the first back-off.
    pub fn next_deadline(&self) -> Option<Instant> {
        let masked = self.queues.iter().filter(|q| q.is_masked);
        masked
            .filter_map(|q| match q.state {
                State::Own { unposted } => unposted.map(|b| b.backed_off_at + BACK_OFF),
                _ => None,
            })
            .min()
    }

    /// Counts frames read from the main queue down from the `ahead` of joining flows.
    pub fn on_main_read(&mut self, frames: usize, end: ReadEnd) {
        for q in &mut self.queues {
            if let State::Joining { ahead } = &mut q.state {
                *ahead = if end == ReadEnd::Empty { 0 } else { ahead.saturating_sub(frames) };
                if *ahead == 0 {
                    q.state = State::Own { unposted: None };
                }
            }
        }
    }

    /// Frees an empty queue that its flow left [`LINGER`] ago.
    pub fn on_empty(&mut self, queue: usize, now: Instant, kernel: &mut impl Kernel) {
        let Some(q) = self.queues.get_mut(queue) else { return };
        let State::Leaving { since } = q.state else { return };
        if now.since(since) < LINGER {
            return;
        }
        // A later frame stays in the queue until it is assigned again, and wakes no thread.
        q.mask(queue, kernel);
        *q = Entry { flow: None, state: State::Free, is_masked: false };
        self.in_use -= 1;
    }

    /// Takes queues from flows that have posted nothing for [`IDLE_TIMEOUT`].
    pub fn reclaim_idle(
        &mut self,
        now: Instant,
        kernel: &mut impl Kernel,
        has_ranges: impl Fn(&FlowKey) -> bool,
    ) {
        for (queue, q) in self.queues.iter_mut().enumerate() {
            let (State::Own { unposted }, Some(flow)) = (&mut q.state, q.flow) else { continue };
            if has_ranges(&flow) {
                *unposted = None;
                continue;
            }
            let since = unposted.get_or_insert_with(|| Unposted::new(now)).since;
            // If the kernel refuses, the flow keeps its queue: no frame may be lost for this.
            if now.since(since) >= IDLE_TIMEOUT && kernel.steer(&flow, None).is_ok() {
                q.unmask(queue, kernel);
                q.state = State::Leaving { since: now };
            }
        }
    }

    /// Updates the demand for queues: frames that were placed, and frames that were misplaced because flows
    /// are interleaved.
    pub fn note(&mut self, placed: u64, mixed: u64) {
        let more = self.demand.saturating_add(mixed.saturating_mul(MIXED_WEIGHT)).min(MAX_DEMAND);
        self.demand = more.saturating_sub(placed);
    }

    /// Whether flows are interleaved enough for one to get a queue.
    pub fn is_needed(&self) -> bool {
        self.demand >= DEMAND_THRESHOLD
    }

    /// No flow can use a queue, or no queue is free: demand is counted anew.
    pub fn reset_demand(&mut self) {
        self.demand = 0;
    }

    fn is_leaving(&self, queue: usize) -> bool {
        self.queues.get(queue).is_some_and(|q| matches!(q.state, State::Leaving { .. }))
    }

    /// Whether a queue may have frames that must not be read yet.
    fn has_joining(&self) -> bool {
        self.queues.iter().any(|q| matches!(q.state, State::Joining { .. }))
    }

    /// The number of queues, and the one to read first: round-robin.
    fn next_turn(&mut self) -> (usize, usize) {
        self.turn = self.turn.wrapping_add(1);
        (self.queues.len(), self.turn)
    }
}

/// Why reading a queue ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReadEnd {
    /// The queue is empty, or backed off.
    Empty,
    /// The burst is full, or the flow's read quantum is used up.
    Limit,
    /// A posted buffer is full: its owner is notified first.
    BufferFull,
}

/// Reading of the queues.
pub trait Queues {
    fn table(&mut self) -> &mut Table;
    /// Reads the main queue, and calls [`Table::on_main_read`].
    fn take_main(&mut self) -> ReadEnd;
    /// As [`Table::is_due`].
    fn is_due(&mut self, queue: usize) -> bool;
    /// Reads the queue of a flow, and calls [`Table::on_empty`] when it is empty.
    fn take(&mut self, queue: usize) -> ReadEnd;
}

/// Reads the queues that their flows leave, then every queue round-robin. True: all are empty or backed
/// off.
pub fn read_round_robin(lines: &mut impl Queues) -> bool {
    let (count, turn) = lines.table().next_turn();
    // A joining queue is not read in this round, even if the main queue is empty by its end.
    let has_joining = lines.table().has_joining();
    for queue in 0..count {
        if lines.table().is_leaving(queue) && lines.take(queue) != ReadEnd::Empty {
            return false;
        }
    }
    let mut all_empty = true;
    for at in 0..=count {
        let taken = match (turn + at) % (count + 1) {
            0 => lines.take_main(),
            n if lines.is_due(n - 1) => lines.take(n - 1),
            _ => ReadEnd::Empty,
        };
        all_empty &= taken == ReadEnd::Empty;
        if taken == ReadEnd::BufferFull {
            break;
        }
    }
    all_empty && !has_joining
}

#[cfg(test)]
mod tests;
