//! What the sum of the stages is held against: the CPU time of the threads, by the kernel's account.
//!
//! A thread asks for it at the beginning of a measured visit, once in many; the difference to the time
//! before belongs to all visits in between, measured or not. So the total knows nothing of stages, of
//! readings, or of what was taken off for them.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::sys;

/// Measured visits after which a thread asks: the call costs about as much as the readings of one visit.
const MEASURED: u32 = 64;
/// Cycles after which it asks all the same, a tenth of a second or so.
const LONG_CYCLES: u64 = 1 << 28;

/// All threads together.
#[derive(Debug)]
pub(super) struct Total {
    /// Changes when it begins anew: what a thread has begun before does not count.
    id: AtomicU64,
    visits: AtomicU64,
    cpu_ns: AtomicU64,
}

/// The next number of a total.
static NEXT: AtomicU64 = AtomicU64::new(1);

impl Default for Total {
    fn default() -> Total {
        let id = AtomicU64::new(NEXT.fetch_add(1, Relaxed));
        Total { id, visits: AtomicU64::new(0), cpu_ns: AtomicU64::new(0) }
    }
}

impl Total {
    /// Begins anew.
    pub fn clear(&self) {
        self.id.store(NEXT.fetch_add(1, Relaxed), Relaxed);
        self.visits.store(0, Relaxed);
        self.cpu_ns.store(0, Relaxed);
    }

    /// Of a visit, in the mean.
    pub fn ns_per_visit(&self) -> Option<f64> {
        let visits = self.visits.load(Relaxed);
        (visits > 0).then(|| self.cpu_ns.load(Relaxed) as f64 / visits as f64)
    }
}

/// What one thread has done since it asked last.
pub(super) struct Stretch {
    /// For which total; 0: it has never asked.
    id: Cell<u64>,
    cpu_ns: Cell<u64>,
    ticks: Cell<u64>,
    visits: Cell<u64>,
    measured: Cell<u32>,
}

impl Stretch {
    pub const fn new() -> Stretch {
        Stretch {
            id: Cell::new(0),
            cpu_ns: Cell::new(0),
            ticks: Cell::new(0),
            visits: Cell::new(0),
            measured: Cell::new(0),
        }
    }

    /// A measured visit begins, `visits` after the one before.
    pub fn add(&self, total: &Total, visits: u64) {
        let id = total.id.load(Relaxed);
        if self.id.get() != id {
            self.id.set(id);
            return self.begin(sys::thread_cpu_ns());
        }
        self.visits.set(self.visits.get() + visits);
        self.measured.set(self.measured.get() + 1);
        let is_long = sys::ticks().saturating_sub(self.ticks.get()) > LONG_CYCLES;
        if self.measured.get() >= MEASURED || is_long {
            let now = sys::thread_cpu_ns();
            total.visits.fetch_add(self.visits.get(), Relaxed);
            total.cpu_ns.fetch_add(now.saturating_sub(self.cpu_ns.get()), Relaxed);
            self.begin(now);
        }
    }

    fn begin(&self, cpu_ns: u64) {
        self.cpu_ns.set(cpu_ns);
        self.ticks.set(sys::ticks());
        self.visits.set(0);
        self.measured.set(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stretch_counts_once_it_is_long_enough_and_only_for_its_own_total() {
        let (one, other, stretch) = (Total::default(), Total::default(), Stretch::new());
        // The first begins it; what lay before nobody knows.
        stretch.add(&one, 1000);
        for _ in 1..MEASURED {
            stretch.add(&one, 10);
        }
        stretch.ticks.set(sys::ticks());
        assert_eq!(one.visits.load(Relaxed), 0);
        stretch.add(&one, 10);
        assert_eq!(one.visits.load(Relaxed), 10 * u64::from(MEASURED));
        // Somebody else's visit ends it.
        stretch.add(&one, 10);
        stretch.add(&other, 10);
        stretch.ticks.set(0);
        stretch.add(&other, 7);
        assert_eq!((one.visits.load(Relaxed), other.visits.load(Relaxed)), (640, 7));
        // So does a new beginning.
        other.clear();
        stretch.ticks.set(0);
        stretch.add(&other, 7);
        assert_eq!(other.ns_per_visit(), None);
    }
}
