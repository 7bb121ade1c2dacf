//! Connections that are reset when send memory is scarce or when too many connections are orphans: those
//! whose peers acknowledge nothing, by the rules of [`Class`], the longest without progress first.
//! Each is reset, counted by its class and, if it has a user, fails with a time-out.
//!
//! Scarce means that a writer whose peer takes its bytes was refused some; urgent, that it was refused
//! its minimum, or a datagram its buffer. Writers whose own peers acknowledge nothing do not trigger a reclaim.
//!
//! Cost: one walk over the sockets, at most once per [`URGENT_PAUSE`], and none while memory suffices.

use alloc::vec::Vec;

use crate::base::{Counter, Duration, Instant, SlotId};
use crate::mbuf::FairShare;
use crate::tcp::State;

use crate::shard::memory::send_wait::SendWaiters;
use crate::shard::slab::Slab;
use crate::shard::sockets::{Socket, TcpEntry};

/// Between two walks.
const PAUSE: Duration = Duration::from_secs(1);
const URGENT_PAUSE: Duration = Duration::from_millis(100);

/// A connection that made progress within this time is never given up for memory: a few retransmissions.
const LEAST_PATIENCE: Duration = Duration::from_secs(1);

/// How long progress is awaited of an orphan while memory is scarce.
const ORPHAN_PATIENCE: Duration = Duration::from_secs(10);

/// The same time for a connection with a user: a person may pause for this time.
const PATIENCE: Duration = Duration::from_secs(60);

/// Surplus orphans are reset until they are 1/16 below their limit, so that the next ones need no walk.
const ORPHAN_BATCH: usize = 16;

/// The order in which connections are reset.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Class {
    /// Closed by its user.
    Orphan,
    /// Its peer takes nothing, and it holds more than its minimum.
    Stalled,
    /// Its peer takes nothing; goes only where others lack their minimum.
    StalledAtMinimum,
}

/// A connection that may be reset.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Candidate {
    class: Class,
    /// When it last made progress.
    since: Instant,
    pub id: SlotId,
    truesize: usize,
}

impl Candidate {
    fn of(id: SlotId, entry: &TcpEntry) -> Option<Candidate> {
        let (tcb, truesize) = (&entry.tcb, entry.tcb.send_queue_ref().truesize());
        let is_over = matches!(tcb.state(), State::Closed | State::TimeWait);
        let class = match truesize {
            _ if is_over => return None,
            _ if entry.is_orphan => Class::Orphan,
            0 => return None,
            _ if !tcb.is_stalled() => return None,
            1..=FairShare::MIN_BYTES => Class::StalledAtMinimum,
            _ => Class::Stalled,
        };
        Some(Candidate { class, since: tcb.last_progress(), id, truesize })
    }

    /// When it may be reset.
    fn due(&self, need: Need) -> Instant {
        let patience = match (need, self.class) {
            (Need::Urgent, _) => LEAST_PATIENCE,
            (Need::OrphansAboveShare, Class::Orphan) => LEAST_PATIENCE,
            (_, Class::Orphan) => ORPHAN_PATIENCE,
            (_, Class::Stalled) => PATIENCE,
            (_, Class::StalledAtMinimum) => return Instant::FAR_FUTURE,
        };
        self.since + patience
    }
}

/// How much memory is needed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Need {
    /// A writer was refused memory above its minimum.
    Scarce,
    /// As `Scarce`, and orphans hold more than a quarter of the send share.
    OrphansAboveShare,
    /// A writer was refused its minimum, or a datagram its buffer.
    Urgent,
}

/// The time of the next walk, and the number of orphans.
#[derive(Default)]
pub(crate) struct Reclaim {
    at: Option<Instant>,
    last: Instant,
    orphans: usize,
}

impl Reclaim {
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        self.at
    }

    /// An orphan is in CLOSED or TIME-WAIT.
    pub(crate) fn remove_orphan(&mut self) {
        self.orphans = self.orphans.saturating_sub(1);
    }

    /// A sender was refused memory that it could use.
    pub(crate) fn ask(&mut self, now: Instant) {
        self.walk_by(now.max(self.last + PAUSE));
    }

    /// A sender was refused its minimum.
    pub(crate) fn ask_urgently(&mut self, now: Instant) {
        self.walk_by(now.max(self.last + URGENT_PAUSE));
    }

    fn walk_by(&mut self, at: Instant) {
        self.at = Some(self.at.map_or(at, |earlier| earlier.min(at)));
    }

    /// Counts a connection that its user has closed before it was in CLOSED or TIME-WAIT. Returns the orphans to reset,
    /// if there are more than `most`.
    pub(crate) fn add_orphan(&mut self, most: usize, sockets: &Slab<Socket>) -> Vec<Candidate> {
        self.orphans += 1;
        if self.orphans <= most { Vec::new() } else { surplus_orphans(most, sockets) }
    }

    /// Whether memory was asked for and the next walk is due.
    #[inline]
    pub(crate) fn is_due(&self, now: Instant) -> bool {
        self.at.is_some_and(|at| now >= at)
    }

    /// The connections to reset, in order. While a writer waits whose peer acknowledges, the next walk is scheduled.
    #[cold]
    pub(crate) fn choose(
        &mut self,
        now: Instant,
        share: FairShare,
        sockets: &Slab<Socket>,
        waiters: &SendWaiters,
    ) -> Vec<Candidate> {
        let is_urgent = waiters.lack_minimum(sockets);
        self.last = now;
        let enough = if is_urgent { share.limit / 16 * 13 } else { share.limit / 2 };
        let mut surplus = (share.used + 1).saturating_sub(enough);
        let mut next = Instant::FAR_FUTURE;
        let mut candidates = if surplus > 0 { candidates(sockets) } else { Vec::new() };
        let mut orphan_bytes: usize = candidates.iter().map(Candidate::orphan_bytes).sum();
        candidates.retain(|c| {
            if surplus == 0 || c.truesize == 0 {
                return false;
            }
            let due = c.due(match is_urgent {
                true => Need::Urgent,
                false if orphan_bytes > share.limit / 4 => Need::OrphansAboveShare,
                false => Need::Scarce,
            });
            if now < due {
                next = next.min(due);
                return false;
            }
            surplus = surplus.saturating_sub(c.truesize);
            orphan_bytes -= c.orphan_bytes();
            true
        });
        // A waiting writer does not ask again: what is reset now may serve those that came before it, and others may
        // be reset later.
        let (least, most) =
            if is_urgent { (URGENT_PAUSE, LEAST_PATIENCE) } else { (PAUSE, ORPHAN_PATIENCE) };
        self.at = waiters.has_active().then(|| next.clamp(now + least, now + most));
        candidates
    }
}

/// Connections that may be reset, in order.
fn candidates(sockets: &Slab<Socket>) -> Vec<Candidate> {
    let of = |(id, s): (SlotId, &Socket)| match s {
        Socket::Tcp(entry) => Candidate::of(id, entry),
        _ => None,
    };
    let mut candidates: Vec<Candidate> = sockets.iter().filter_map(of).collect();
    candidates.sort_unstable_by_key(|c| (c.class, c.since));
    candidates
}

#[cold]
fn surplus_orphans(most: usize, sockets: &Slab<Socket>) -> Vec<Candidate> {
    let mut orphans = candidates(sockets);
    orphans.retain(|c| c.class == Class::Orphan);
    orphans.truncate(orphans.len().saturating_sub(most - most / ORPHAN_BATCH));
    orphans
}

impl Candidate {
    /// The counter of such resets.
    pub(crate) fn counter(&self) -> Counter {
        match self.class {
            Class::Orphan => Counter::TcpOrphansReset,
            Class::Stalled | Class::StalledAtMinimum => Counter::TcpStalledReset,
        }
    }

    fn orphan_bytes(&self) -> usize {
        if self.class == Class::Orphan { self.truesize } else { 0 }
    }
}
