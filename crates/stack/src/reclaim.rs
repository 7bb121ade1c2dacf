//! What a shard gives up when send memory is scarce, or when too many connections without a user remain:
//! connections whose peers take nothing, by the rules of [`Class`], the longest without progress first.
//! Each is reset, counted by its class and, if it has a user, fails with a time-out.
//!
//! Scarce means that a writer whose peer takes its bytes was refused some; urgent, that it was refused
//! its minimum, or a datagram its buffer. Writers whose own peers take nothing ask for nothing here.
//!
//! Cost: one walk over the sockets, at most once per [`URGENT_PAUSE`], and none while memory suffices.

use fulmar_base::{Counter, Duration, Instant, Probe, SlotId};
use fulmar_mbuf::{FairShare, Purpose};
use fulmar_tcp::{ConnError, Events, State};

use crate::shard::Shard;
use crate::sockets::{Socket, TcpEntry};

/// Between two walks.
const PAUSE: Duration = Duration::from_secs(1);
const URGENT_PAUSE: Duration = Duration::from_millis(100);

/// A connection that made progress within this time is never given up: a few retransmissions.
const LEAST_PATIENCE: Duration = Duration::from_secs(1);

/// How long progress is awaited of an orphan while memory is scarce.
const ORPHAN_PATIENCE: Duration = Duration::from_secs(10);

/// The same of a connection with a user: a person may pause so long.
const PATIENCE: Duration = Duration::from_secs(60);

/// Of too many orphans this part goes at once, so that a walk pays for many.
const ORPHAN_BATCH: usize = 16;

/// Who goes first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Class {
    /// Closed by its user.
    Orphan,
    /// Its peer takes nothing, and it holds more than its minimum.
    Stalled,
    /// Its peer takes nothing; goes only where others lack their minimum.
    StalledAtMinimum,
}

#[derive(Clone, Copy, Debug)]
struct Candidate {
    class: Class,
    /// When it last made progress.
    since: Instant,
    id: SlotId,
    held_bytes: usize,
}

impl Candidate {
    fn of(id: SlotId, entry: &TcpEntry) -> Option<Candidate> {
        let (tcb, held_bytes) = (&entry.tcb, entry.tcb.send_queue_ref().held_bytes());
        let is_over = matches!(tcb.state(), State::Closed | State::TimeWait);
        let class = match held_bytes {
            _ if is_over => return None,
            _ if entry.is_orphan => Class::Orphan,
            0 => return None,
            _ if !tcb.is_stalled() => return None,
            1..=FairShare::MIN_BYTES => Class::StalledAtMinimum,
            _ => Class::Stalled,
        };
        Some(Candidate { class, since: tcb.progress_at(), id, held_bytes })
    }

    /// When it may be given up. `is_crowded`: orphans hold more than their part.
    fn due(&self, is_urgent: bool, is_crowded: bool) -> Instant {
        let patience = match self.class {
            _ if is_urgent => LEAST_PATIENCE,
            Class::Orphan if is_crowded => LEAST_PATIENCE,
            Class::Orphan => ORPHAN_PATIENCE,
            Class::Stalled => PATIENCE,
            Class::StalledAtMinimum => return Instant::FAR_FUTURE,
        };
        self.since + patience
    }
}

/// When to walk next, and how many orphans there are.
#[derive(Default)]
pub struct Reclaim {
    at: Option<Instant>,
    is_urgent: bool,
    last: Instant,
    orphans: usize,
}

impl Reclaim {
    pub fn next_deadline(&self) -> Option<Instant> {
        self.at
    }

    pub fn orphan_gone(&mut self) {
        self.orphans = self.orphans.saturating_sub(1);
    }

    fn ask(&mut self, now: Instant, is_urgent: bool) {
        let pause = if is_urgent { URGENT_PAUSE } else { PAUSE };
        let at = now.max(self.last + pause);
        self.is_urgent |= is_urgent;
        self.at = Some(self.at.map_or(at, |earlier| earlier.min(at)));
    }
}

impl<P: Probe> Shard<P> {
    /// A sender was refused memory that it could use.
    pub(crate) fn ask_for_reclaim(&mut self, now: Instant, id: SlotId) {
        let lacks_minimum = match self.sockets.get(id) {
            Some(Socket::Tcp(s)) => s.tcb.send_queue_ref().held_bytes() == 0,
            _ => true,
        };
        self.reclaim.ask(now, lacks_minimum);
    }

    /// A connection lost its user. Too many of these are reset.
    pub(crate) fn note_orphan(&mut self, now: Instant, id: SlotId) {
        let Some(Socket::Tcp(entry)) = self.sockets.get_mut(id) else { return };
        entry.is_orphan = true;
        self.reclaim.orphans += 1;
        if self.reclaim.orphans > self.config.max_orphans {
            self.reset_surplus_orphans(now);
        }
    }

    #[cold]
    fn reset_surplus_orphans(&mut self, now: Instant) {
        let mut orphans = self.candidates();
        orphans.retain(|c| c.class == Class::Orphan);
        let kept = self.config.max_orphans - self.config.max_orphans / ORPHAN_BATCH;
        let surplus = orphans.len().saturating_sub(kept);
        for c in orphans.into_iter().take(surplus) {
            self.give_up(now, c);
        }
        self.run_output(now);
        self.flush();
    }

    /// Those who may be given up, in the order of the rules.
    fn candidates(&self) -> Vec<Candidate> {
        let of = |(id, s): (SlotId, &Socket)| match s {
            Socket::Tcp(entry) => Candidate::of(id, entry),
            _ => None,
        };
        let mut candidates: Vec<Candidate> = self.sockets.iter().filter_map(of).collect();
        candidates.sort_unstable_by_key(|c| (c.class, c.since));
        candidates
    }

    /// Gives up what the rules say, if somebody asked for memory and it is time.
    #[inline]
    pub(crate) fn reclaim_memory(&mut self, now: Instant) {
        if self.reclaim.at.is_some_and(|at| now >= at) {
            self.reclaim_now(now);
        }
    }

    #[cold]
    fn reclaim_now(&mut self, now: Instant) {
        let is_urgent = std::mem::take(&mut self.reclaim.is_urgent);
        self.reclaim.at = None;
        self.reclaim.last = now;
        let share = self.net.pool.share_of(Purpose::Send);
        let enough = if is_urgent { share.limit / 16 * 13 } else { share.limit / 2 };
        let mut surplus = (share.used + 1).saturating_sub(enough);
        if surplus == 0 {
            return;
        }
        let candidates = self.candidates();
        let mut orphan_bytes: usize = candidates.iter().map(Candidate::orphan_bytes).sum();
        let mut next = Instant::FAR_FUTURE;
        for c in candidates {
            if surplus == 0 {
                break;
            }
            if c.held_bytes == 0 {
                continue;
            }
            let due = c.due(is_urgent, orphan_bytes > share.limit / 4);
            if now < due {
                next = next.min(due);
                continue;
            }
            surplus = surplus.saturating_sub(c.held_bytes);
            orphan_bytes -= c.orphan_bytes();
            self.give_up(now, c);
        }
        if self.send_waiters.has_active() {
            // Others may be given up later, and who waits does not ask again.
            self.reclaim.is_urgent |= is_urgent && surplus > 0;
            let pause = if self.reclaim.is_urgent { URGENT_PAUSE } else { PAUSE };
            self.reclaim.at = Some(next.clamp(now + pause, now + ORPHAN_PATIENCE));
        }
    }

    /// Resets a connection; its memory is free at once, or when the device is done with it.
    fn give_up(&mut self, now: Instant, c: Candidate) {
        let Some(Socket::Tcp(entry)) = self.sockets.get_mut(c.id) else { return };
        entry.tcb.abort_because(ConnError::TimedOut);
        self.posted.list(c.id, entry);
        self.net.counters.count(match c.class {
            Class::Orphan => Counter::TcpOrphansReset,
            Class::Stalled | Class::StalledAtMinimum => Counter::TcpStalledReset,
        });
        self.queue_output(c.id);
        self.follow(now, c.id, Events::ERROR | Events::CLOSED);
    }
}

impl Candidate {
    fn orphan_bytes(&self) -> usize {
        if self.class == Class::Orphan { self.held_bytes } else { 0 }
    }
}
