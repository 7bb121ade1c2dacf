//! The hardware on a thread of its own. It works on rings of its own and exchanges what lies in them
//! with the host's under a short lock, so that neither waits for the other's work. While there is
//! something to do now and then it spins, as real hardware would be there at once; after [`SPIN`] it
//! sleeps until the doorbell or the next event.

use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

use fulmar_stack::base::{Duration, Instant};

use super::engine::Shared;
use super::hardware::{Hardware, Rings};
use super::meter::bump;
use fulmar::internals::runtime::{now, ticks};

/// How long the thread looks for work in vain before it sleeps: many times the pause between two
/// bursts of a busy host.
const SPIN: Duration = Duration::from_micros(200);
/// How long before the next event a sleep ends: timers of threads are late by 50 µs and a wake-up, which
/// hardware is not.
const EARLY: Duration = Duration::from_micros(150);
/// Longest sleep without looking again.
const NAP: Duration = Duration::from_millis(500);

/// See the module's header.
pub struct Worker {
    shared: Arc<Shared>,
    hardware: Hardware,
    rings: Rings,
    /// The host's posted count at the last check.
    seen: u64,
    /// When the host is notified of frames that wait.
    alarm: Option<Instant>,
}

impl Worker {
    pub fn new(shared: Arc<Shared>, hardware: Hardware, rings: Rings) -> Worker {
        Worker { shared, hardware, rings, seen: 0, alarm: None }
    }

    /// Works until the host is gone.
    pub fn run(mut self) {
        self.shared.board.set_thread();
        let mut idle_since: Option<Instant> = None;
        while !self.shared.is_stopping() {
            let (at, start) = (now(), ticks());
            let worked = self.turn(at);
            self.account(start, worked);
            if worked {
                idle_since = None;
                continue;
            }
            if at.since(*idle_since.get_or_insert(at)) < SPIN {
                std::hint::spin_loop();
                continue;
            }
            self.sleep();
            idle_since = None;
        }
    }

    fn account(&self, start: u64, worked: bool) {
        let counts = &self.shared.board.counts;
        let ns = self.shared.board.ns_between(start, ticks());
        bump(if worked { &counts.own_thread_ns } else { &counts.idle_spin_ns }, ns);
    }

    /// Does the pending work; false if there was none.
    fn turn(&mut self, at: Instant) -> bool {
        let posted = self.shared.posted();
        let is_news = posted != self.seen;
        if is_news {
            self.seen = posted;
            let mut host = self.shared.rings();
            self.rings.tx.take_posted(&mut host.tx);
            self.rings.rx.take_posted(&mut host.rx);
        }
        let is_due = self.hardware.is_due(at, &self.rings);
        if is_due {
            self.hardware.run(at, &mut self.rings);
            self.give_back();
        }
        if self.alarm.is_some_and(|alarm| alarm <= at) {
            self.alarm = None;
            self.interrupt();
        }
        is_news || is_due
    }

    /// Returns completions to the host, and sets the alarm for received frames.
    fn give_back(&mut self) {
        let is_tx_done = self.rings.tx.done() > 0;
        let mut host = self.shared.rings();
        self.rings.tx.give_done(&mut host.tx);
        self.rings.rx.give_done(&mut host.rx);
        self.alarm = self.hardware.interrupt_at(&host.rx).filter(|_| host.rx.pending > 0);
        drop(host);
        let has_carrier = self.hardware.has_carrier();
        self.shared.has_carrier.store(has_carrier, SeqCst);
        if is_tx_done && self.shared.is_host_blocked.load(SeqCst) {
            self.interrupt();
        }
    }

    fn interrupt(&self) {
        if self.shared.board.bell.ring() {
            bump(&self.shared.board.counts.interrupts, 1);
        }
    }

    /// Sleeps until there is something to do, at most [`NAP`].
    fn sleep(&mut self) {
        let board = &self.shared.board;
        board.fall_asleep();
        let at = now();
        let is_news = self.shared.posted() != self.seen || self.shared.is_stopping();
        if !is_news && !self.hardware.is_due(at, &self.rings) {
            let events = [self.alarm, self.hardware.next_event(), self.hardware.next_due()];
            let next = events.into_iter().flatten().min();
            let sleep = next.map_or(NAP, |t| t.since(at).saturating_sub(EARLY).min(NAP));
            if !sleep.is_zero() {
                std::thread::park_timeout(sleep);
            }
        }
        board.wake_up();
        let has_carrier = self.hardware.has_carrier();
        if self.shared.has_carrier.swap(has_carrier, SeqCst) != has_carrier {
            self.shared.board.bell.ring();
        }
    }
}
