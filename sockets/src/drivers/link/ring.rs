//! The link on real time: one bounded queue of frames in each direction, under a lock. The receiver swaps
//! the whole queue for an empty one.

use std::collections::VecDeque;
use std::sync::atomic::{
    AtomicBool, AtomicU64,
    Ordering::{Relaxed, SeqCst},
};
use std::sync::{Arc, Mutex, PoisonError};

use fulmar_stack::base::{Counters, DropReason, Instant, OwnerKey};
use fulmar_stack::device::{
    Attachment, Burst, Caps, Device, DeviceStats, Packet, Peek, Tally, WakeFd, offload,
};
use fulmar_stack::mbuf::Pool;

use super::LinkConfig;
use crate::drivers::OpenError;
use crate::drivers::wake::Bell;

/// The fill level of a channel: bytes in the lowest 40 bits, frames above them, so that one atomic addition
/// updates both. A channel never has 2^40 bytes, since pools do not.
#[derive(Clone, Copy)]
struct Load(u64);

impl Load {
    const BYTE_BITS: u32 = 40;

    fn of(tally: &Tally) -> Load {
        Load(tally.frames << Load::BYTE_BITS | tally.bytes)
    }

    fn pkts(self) -> u64 {
        self.0 >> Load::BYTE_BITS
    }

    fn bytes(self) -> u64 {
        self.0 & ((1 << Load::BYTE_BITS) - 1)
    }
}

/// Frames towards one side. `load` covers the queue and what the receiver took from it but did not
/// hand out yet; it grows under the lock, so it never falls below zero.
struct Channel {
    queue: Mutex<VecDeque<Packet>>,
    load: AtomicU64,
    /// The sender waits for space.
    is_blocked: AtomicBool,
    max_pkts: u64,
    max_bytes: u64,
}

impl Channel {
    fn new(config: &LinkConfig) -> Channel {
        Channel {
            queue: Mutex::new(VecDeque::with_capacity(config.ring_pkts)),
            load: AtomicU64::new(0),
            is_blocked: AtomicBool::new(false),
            max_pkts: config.ring_pkts.max(1) as u64,
            max_bytes: config.ring_bytes as u64,
        }
    }

    fn load(&self) -> Load {
        Load(self.load.load(SeqCst))
    }

    fn fits(&self, load: Load, frame_bytes: u64) -> bool {
        let pkts = load.pkts();
        pkts < self.max_pkts && (pkts == 0 || load.bytes() + frame_bytes <= self.max_bytes)
    }

    /// Whether a blocked sender is to be woken.
    fn is_half_empty(&self) -> bool {
        let load = self.load();
        load.pkts() <= self.max_pkts / 2 && load.bytes() <= self.max_bytes / 2
    }

    fn queue(&self) -> std::sync::MutexGuard<'_, VecDeque<Packet>> {
        // No code that panics runs under the lock.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub(super) struct Shared {
    /// Towards side 0, towards side 1.
    channels: [Channel; 2],
    /// Rung when frames come to a side.
    bells: [Arc<Bell>; 2],
    /// Rung when a side can send again.
    pub(super) spaces: [Arc<Bell>; 2],
    is_alive: [AtomicBool; 2],
    /// The side's last burst was not sent completely.
    wants_space: [AtomicBool; 2],
}

impl Shared {
    /// With one bell on each side for both purposes.
    pub(super) fn new(config: &LinkConfig) -> Result<Shared, OpenError> {
        let bells = [bell()?, bell()?];
        Ok(Shared {
            channels: [Channel::new(config), Channel::new(config)],
            spaces: bells.clone(),
            bells,
            is_alive: [AtomicBool::new(true), AtomicBool::new(true)],
            wants_space: [AtomicBool::new(false), AtomicBool::new(false)],
        })
    }
}

/// A bell of a side.
pub(super) fn bell() -> Result<Arc<Bell>, OpenError> {
    let hint = "raise the limit on open files (ulimit -n)";
    Bell::new().map(Arc::new).map_err(|e| OpenError::new("cannot create an eventfd", e, hint))
}

/// Whether one side of a link has work, without a lock.
struct LinkPeek {
    shared: Arc<Shared>,
    side: usize,
}

impl Peek for LinkPeek {
    fn is_pending(&self) -> bool {
        let Shared { channels, wants_space, .. } = &*self.shared;
        let has_space = || !channels[1 - self.side].is_blocked.load(Relaxed);
        channels[self.side].load.load(Relaxed) > 0
            || (wants_space[self.side].load(Relaxed) && has_space())
    }
}

/// One end of a link.
pub struct Link {
    shared: Arc<Shared>,
    side: usize,
    /// Frames taken from the channel in one exchange of queues.
    stash: VecDeque<Packet>,
    /// Whether frames that come to its side are for this end.
    receives: bool,
    caps: Caps,
    stats: DeviceStats,
}

/// Joins two stacks. Each end is the device of one stack; any thread may use it.
///
/// # Errors
/// EMFILE, ENFILE: no descriptor for the eventfds.
pub fn pair(config: &LinkConfig) -> Result<(Link, Link), OpenError> {
    let shared = Arc::new(Shared::new(config)?);
    let end = |side| Link::new(&shared, side, true, config.caps(side), &format!("link{side}"));
    Ok((end(0), end(1)))
}

impl Link {
    /// One end. The receiving of a side may be left to another end of it.
    pub(super) fn new(
        shared: &Arc<Shared>,
        side: usize,
        receives: bool,
        caps: Caps,
        name: &str,
    ) -> Link {
        let most = if receives { shared.channels[side].max_pkts as usize } else { 0 };
        Link {
            shared: Arc::clone(shared),
            side,
            stash: VecDeque::with_capacity(most),
            receives,
            caps,
            stats: DeviceStats { name: name.to_owned(), ..DeviceStats::default() },
        }
    }

    /// Whether an end of either side is gone.
    pub(super) fn is_over(&self) -> bool {
        !self.shared.is_alive.iter().all(|is_alive| is_alive.load(SeqCst))
    }

    /// Whether the last burst was not sent completely, and no space has become free since.
    pub(super) fn is_blocked(&self) -> bool {
        self.outward().is_blocked.load(SeqCst)
    }

    /// The bell of arriving frames.
    pub(super) fn arrivals(&self) -> &Bell {
        &self.shared.bells[self.side]
    }

    /// The bell of free space.
    pub(super) fn space(&self) -> &Bell {
        &self.shared.spaces[self.side]
    }

    fn inward(&self) -> &Channel {
        &self.shared.channels[self.side]
    }

    fn outward(&self) -> &Channel {
        &self.shared.channels[1 - self.side]
    }

    fn has_peer(&self) -> bool {
        self.shared.is_alive[1 - self.side].load(SeqCst)
    }

    fn wants_space(&self) -> bool {
        self.shared.wants_space[self.side].load(Relaxed)
    }

    /// Only this side writes the flag. An unchanged flag is not written, to keep its cache line shared.
    fn set_wants_space(&self, wants: bool) {
        if self.wants_space() != wants {
            self.shared.wants_space[self.side].store(wants, Relaxed);
        }
    }

    /// Moves frames into the channel while there is space. Drops and counts frames that the link cannot carry.
    fn move_out(&self, pool: &mut Pool, burst: &mut Burst, counters: &mut Counters) -> Moved {
        let channel = self.outward();
        let mut moved = Moved::default();
        let mut queue = channel.queue();
        let before = channel.load();
        while let Some(p) = burst.front() {
            let verdict = offload::check(p, &self.caps);
            let load = Load(before.0 + Load::of(&moved.tally).0);
            if verdict.is_ok() && !channel.fits(load, p.chain.len() as u64) {
                break;
            }
            let Some(p) = burst.pop_front() else { break };
            moved.taken += 1;
            if let Err(reason) = verdict {
                p.discard(reason, pool, counters);
                continue;
            }
            moved.tally.add(&p);
            queue.push_back(p);
        }
        // Before the lock is released: the receiver subtracts the frames that it finds in the queue.
        channel.load.fetch_add(Load::of(&moved.tally).0, SeqCst);
        moved
    }

    /// Takes the whole channel by swapping queues: one lock per batch. `taken` of the counted frames were
    /// handed up already.
    fn refill(&mut self, taken: u64) {
        let shared = Arc::clone(&self.shared);
        let channel = &shared.channels[self.side];
        // An empty poll costs one load.
        if channel.load().pkts() > taken {
            self.stats.rx_crossings += 1;
            // The empty queue restarts at its first slot, which is in the cache.
            self.stash.clear();
            std::mem::swap(&mut *channel.queue(), &mut self.stash);
        }
    }

    /// Takes up to `budget` frames that have come.
    pub(super) fn take_in(&mut self, out: &mut Burst, budget: usize) -> Tally {
        let mut tally = Tally::default();
        for _ in 0..budget.min(out.space()) {
            if self.stash.is_empty() {
                self.refill(tally.frames);
            }
            let Some(p) = self.stash.pop_front() else { break };
            tally.receive(p, out);
        }
        if tally.frames > 0 {
            self.release(tally);
        }
        tally
    }

    /// Frees the space of received frames for the sender.
    fn release(&mut self, tally: Tally) {
        let channel = self.inward();
        channel.load.fetch_sub(Load::of(&tally).0, SeqCst);
        let wakes = channel.is_blocked.load(SeqCst)
            && channel.is_half_empty()
            && channel.is_blocked.swap(false, SeqCst)
            && self.shared.spaces[1 - self.side].ring();
        self.stats.wakes += u64::from(wakes);
    }
}

#[derive(Default)]
struct Moved {
    taken: usize,
    tally: Tally,
}

impl Device for Link {
    fn caps(&self) -> &Caps {
        &self.caps
    }

    fn attach(&mut self, _owner: &OwnerKey) -> Attachment {
        let peek = LinkPeek { shared: Arc::clone(&self.shared), side: self.side };
        Attachment { peek: Some(Arc::new(peek)), ..Attachment::default() }
    }

    fn tx_burst(
        &mut self,
        _now: Instant,
        pool: &mut Pool,
        burst: &mut Burst,
        counters: &mut Counters,
    ) -> usize {
        self.set_wants_space(false);
        if burst.is_empty() {
            return 0;
        }
        if !self.has_peer() {
            return burst.discard(DropReason::DeviceGone, pool, counters);
        }
        let mut moved = self.move_out(pool, burst, counters);
        self.stats.tx_crossings += 1;
        if !burst.is_empty() {
            self.stats.tx_refusals += 1;
            self.outward().is_blocked.store(true, SeqCst);
            // The receiver may have made space before it could see the mark.
            let again = self.move_out(pool, burst, counters);
            moved.taken += again.taken;
            moved.tally += again.tally;
        }
        self.set_wants_space(!burst.is_empty());
        moved.tally.sent(counters, &mut self.stats);
        if moved.tally.frames > 0 && self.shared.bells[1 - self.side].ring() {
            self.stats.wakes += 1;
        }
        moved.taken
    }

    fn rx_burst(
        &mut self,
        _now: Instant,
        _pool: &mut Pool,
        out: &mut Burst,
        budget: usize,
        counters: &mut Counters,
    ) -> usize {
        let tally = self.take_in(out, budget);
        if tally.frames > 0 {
            tally.received(counters, &mut self.stats);
        }
        tally.frames as usize
    }

    fn arm(&mut self) -> bool {
        self.shared.bells[self.side].arm();
        // A cleared mark means that the receiver freed space before this bell was armed; a peer that was
        // dropped clears it too.
        let is_marked = self.outward().is_blocked.load(SeqCst) && self.has_peer();
        self.inward().load().pkts() == 0 && (is_marked || !self.wants_space())
    }

    fn disarm(&mut self) {
        self.shared.bells[self.side].disarm();
    }

    fn wake_fd(&self) -> Option<WakeFd> {
        Some(WakeFd::readable(self.shared.bells[self.side].fd()))
    }

    fn lost(&self) -> Option<i32> {
        if self.has_peer() { None } else { Some(libc::EPIPE) }
    }

    fn stats(&self) -> DeviceStats {
        self.stats.clone()
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.shared.is_alive[self.side].store(false, SeqCst);
        // Frees the frames in flight, and wakes all sleepers.
        if self.receives {
            self.inward().queue().clear();
        }
        for bell in self.shared.bells.iter().chain(&self.shared.spaces) {
            bell.ring();
        }
    }
}
