//! Which flow has which queue, and in which order queues are read: no descriptors, no system calls.
//!
//! Invariants: a flow has one queue at most; the kernel sends a flow's packets to a queue from when it
//! [joins](State::Joining) it until it [leaves](State::Leaving); `in_use` queues are not [free](State::Free);
//! the sleeper is woken for each queue that is not free, or knows when what is held there is due.

use fulmar_base::{Duration, FlowKey, Instant};

/// How long a flow without rooms keeps its queue.
pub const BARE: Duration = Duration::from_millis(100);
/// How long frames wait for rooms.
pub const HOLD: Duration = Duration::from_millis(1);
/// Bytes that a flow without rooms gets between two holds: what its reader surely takes in that time.
pub const SIP: usize = 256 << 10;
/// How long a queue is read that no flow has any more.
pub const GRACE: Duration = Duration::from_millis(10);
/// Frames that a queue holds, unless `txqueuelen` was set.
pub const QUEUE_FRAMES: usize = 1000;
/// What a mixed frame weighs against one that was placed: a flow gets a queue if more than every
/// sixteenth is mixed, some time after the fourth.
const MIXED_WEIGHT: u64 = 16;
const ENOUGH: u64 = 4 * MIXED_WEIGHT;
const MOST_NEED: u64 = 16 * ENOUGH;

/// What a table asks of the kernel. Queues are counted from 0; the main one is none of them.
pub trait Kernel {
    /// Has a queue wake the sleeper, or not. False: it could not be changed.
    fn watch(&mut self, queue: usize, is_watched: bool) -> bool;

    /// Sends the packets of a flow to a queue of its own from now on, or to the main one again.
    ///
    /// # Errors
    /// Nothing has changed.
    fn steer(&mut self, flow: &FlowKey, queue: Option<usize>) -> std::io::Result<()>;
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// Of no flow; not read.
    Free,
    /// The main queue may have earlier frames: so many at most.
    Joining { ahead: usize },
    /// The flow's, and for how long it has had no rooms.
    Own { bare: Option<Bare> },
    /// No longer the flow's, since then.
    Leaving { since: Instant },
}

/// A flow without rooms.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Bare {
    since: Instant,
    /// When the last hold began.
    held_from: Instant,
    /// Bytes read since it ended.
    sipped_bytes: usize,
}

impl Bare {
    fn new(now: Instant) -> Bare {
        Bare { since: now, held_from: now, sipped_bytes: 0 }
    }

    fn is_held(&self, now: Instant) -> bool {
        now.since(self.held_from) < HOLD
    }
}

/// One queue.
#[derive(Debug)]
struct Entry {
    flow: Option<FlowKey>,
    state: State,
    /// It does not wake the sleeper.
    is_held: bool,
}

impl Entry {
    /// Stops it from waking the sleeper, or has it do so again.
    fn hold(&mut self, queue: usize, kernel: &mut impl Kernel, is_held: bool) {
        // If it fails it is tried again at the next look, which a deadline brings.
        if self.is_held != is_held && kernel.watch(queue, !is_held) {
            self.is_held = is_held;
        }
    }
}

/// See the module's header.
#[derive(Default)]
pub struct Table {
    queues: Vec<Entry>,
    in_use: usize,
    need: u64,
    turn: usize,
}

impl Table {
    /// One more queue, free.
    pub fn add(&mut self) {
        self.queues.push(Entry { flow: None, state: State::Free, is_held: false });
    }

    /// Whether any queue is to be read.
    pub fn is_in_use(&self) -> bool {
        self.in_use > 0
    }

    /// Whether a queue is free.
    pub fn has_free(&self) -> bool {
        self.queues.iter().any(|q| q.state == State::Free)
    }

    /// The flow that has this queue.
    pub fn flow(&self, queue: usize) -> Option<FlowKey> {
        self.queues.get(queue)?.flow
    }

    /// Whether a flow has a queue.
    pub fn has(&self, flow: &FlowKey) -> bool {
        self.queues.iter().any(|q| q.flow == Some(*flow))
    }

    /// Gives a flow a queue that is free; false: none is.
    ///
    /// # Errors
    /// The kernel's; the flow may have the queue all the same, in which nothing comes then.
    pub fn give(&mut self, flow: &FlowKey, kernel: &mut impl Kernel) -> std::io::Result<bool> {
        self.need = 0;
        let free = self.queues.iter_mut().enumerate().find(|(_, q)| q.state == State::Free);
        let Some((queue, q)) = free else { return Ok(false) };
        // Before the first frame comes.
        if !kernel.watch(queue, true) {
            return Ok(false);
        }
        (q.flow, q.state) = (Some(*flow), State::Joining { ahead: QUEUE_FRAMES });
        self.in_use += 1;
        kernel.steer(flow, Some(queue))?;
        Ok(true)
    }

    /// Whether a queue is to be read in its turn. If not, it wakes no thread.
    pub fn is_due(
        &mut self,
        queue: usize,
        now: Instant,
        kernel: &mut impl Kernel,
        has_rooms: impl Fn(&FlowKey) -> bool,
    ) -> bool {
        let Some(q) = self.queues.get_mut(queue) else { return false };
        let State::Own { bare } = q.state else { return false };
        let is_held = bare.is_some_and(|b| b.is_held(now));
        let is_due = !is_held || q.flow.is_some_and(|flow| has_rooms(&flow));
        q.hold(queue, kernel, !is_due);
        is_due
    }

    /// So many bytes came from a flow's queue while it had no rooms; whether it may be read on.
    pub fn sipped(&mut self, queue: usize, now: Instant, bytes: usize) -> bool {
        let Some(State::Own { bare }) = self.queues.get_mut(queue).map(|q| &mut q.state) else {
            return true;
        };
        let bare = bare.get_or_insert_with(|| Bare::new(now));
        bare.sipped_bytes = bare.sipped_bytes.saturating_add(bytes);
        if bare.sipped_bytes >= SIP {
            (bare.held_from, bare.sipped_bytes) = (now, 0);
        }
        !bare.is_held(now)
    }

    /// A flow has rooms again: the sleeper may read what is held.
    pub fn placed(&mut self, flow: &FlowKey, kernel: &mut impl Kernel) {
        for (queue, q) in self.queues.iter_mut().enumerate() {
            if q.flow == Some(*flow) {
                q.hold(queue, kernel, false);
            }
        }
    }

    /// When what is held is due.
    pub fn next_deadline(&self) -> Option<Instant> {
        let held = self.queues.iter().filter(|q| q.is_held);
        held.filter_map(|q| match q.state {
            State::Own { bare } => bare.map(|b| b.held_from + HOLD),
            _ => None,
        })
        .min()
    }

    /// So many frames came by the main queue; it was found empty behind them, or not.
    pub fn main_gave(&mut self, frames: usize, is_empty: bool) {
        for q in &mut self.queues {
            if let State::Joining { ahead } = &mut q.state {
                *ahead = if is_empty { 0 } else { ahead.saturating_sub(frames) };
                if *ahead == 0 {
                    q.state = State::Own { bare: None };
                }
            }
        }
    }

    /// A queue was found empty.
    pub fn was_empty(&mut self, queue: usize, now: Instant, kernel: &mut impl Kernel) {
        let Some(q) = self.queues.get_mut(queue) else { return };
        let State::Leaving { since } = q.state else { return };
        if now.since(since) < GRACE {
            return;
        }
        // What may come yet lies there until the queue is used again, and wakes no thread.
        q.hold(queue, kernel, true);
        *q = Entry { flow: None, state: State::Free, is_held: false };
        self.in_use -= 1;
    }

    /// Takes queues from flows that have had no rooms for a while.
    pub fn look_after(
        &mut self,
        now: Instant,
        kernel: &mut impl Kernel,
        has_rooms: impl Fn(&FlowKey) -> bool,
    ) {
        for (queue, q) in self.queues.iter_mut().enumerate() {
            let (State::Own { bare }, Some(flow)) = (&mut q.state, q.flow) else { continue };
            if has_rooms(&flow) {
                *bare = None;
                continue;
            }
            let since = bare.get_or_insert_with(|| Bare::new(now)).since;
            // Where the kernel refuses it stays as it is: that is not worth losing frames for.
            if now.since(since) >= BARE && kernel.steer(&flow, None).is_ok() {
                q.hold(queue, kernel, false);
                q.state = State::Leaving { since: now };
            }
        }
    }

    /// What came: frames that were placed, and frames that were not because flows come mixed.
    pub fn note(&mut self, placed: u64, mixed: u64) {
        let more = self.need.saturating_add(mixed.saturating_mul(MIXED_WEIGHT)).min(MOST_NEED);
        self.need = more.saturating_sub(placed);
    }

    /// Whether flows come so mixed that one should get a queue.
    pub fn is_needed(&self) -> bool {
        self.need >= ENOUGH
    }

    /// No flow can use a queue, or none is left: to be tried again later.
    pub fn not_now(&mut self) {
        self.need = 0;
    }

    fn is_leaving(&self, queue: usize) -> bool {
        self.queues.get(queue).is_some_and(|q| matches!(q.state, State::Leaving { .. }))
    }

    /// Whether a queue may have frames that are not to be read yet.
    fn has_joining(&self) -> bool {
        self.queues.iter().any(|q| matches!(q.state, State::Joining { .. }))
    }

    /// How many queues there are, and where to begin reading this time, so that each is the first in its
    /// turn.
    fn next_turn(&mut self) -> (usize, usize) {
        self.turn = self.turn.wrapping_add(1);
        (self.queues.len(), self.turn)
    }
}

/// What became of reading a queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Taken {
    /// Nothing more is there, or not yet to be read.
    Empty,
    /// No more may be taken.
    Enough,
    /// A buffer is full.
    Full,
}

impl Taken {
    pub fn new(goes_on: bool, is_empty: bool) -> Taken {
        match (goes_on, is_empty) {
            (false, _) => Taken::Full,
            (true, true) => Taken::Empty,
            (true, false) => Taken::Enough,
        }
    }
}

/// All queues, to be read.
pub trait Lines {
    fn table(&mut self) -> &mut Table;
    /// Reads the main queue, and says so by [`Table::main_gave`].
    fn take_main(&mut self) -> Taken;
    /// As [`Table::is_due`].
    fn is_due(&mut self, queue: usize) -> bool;
    /// Reads the queue of a flow, and says by [`Table::was_empty`] when nothing is left.
    fn take(&mut self, queue: usize) -> Taken;
}

/// Reads the queues of flows that leave them, then every queue in turn. True: nothing is left but what is
/// held.
pub fn take_in_turn(lines: &mut impl Lines) -> bool {
    let (count, turn) = lines.table().next_turn();
    // Those are not read this time, even if they may be by the end of it.
    let has_joining = lines.table().has_joining();
    for queue in 0..count {
        if lines.table().is_leaving(queue) && lines.take(queue) != Taken::Empty {
            return false;
        }
    }
    let mut all_empty = true;
    for at in 0..=count {
        let taken = match (turn + at) % (count + 1) {
            0 => lines.take_main(),
            n if lines.is_due(n - 1) => lines.take(n - 1),
            _ => Taken::Empty,
        };
        all_empty &= taken == Taken::Empty;
        if taken == Taken::Full {
            break;
        }
    }
    all_empty && !has_joining
}

#[cfg(test)]
mod tests;
