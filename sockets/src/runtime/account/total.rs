//! The CPU time of the threads by the kernel, against which the sum of the stages is checked.
//!
//! At the beginning of a measured visit, once in many, a thread reads its CPU time; the difference to its last reading
//! belongs to all visits in between, measured or not. The total does not depend on stages or on their calibration.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::runtime::sys;

/// Measured visits between two readings of a thread: the call costs about as much as the readings of one visit.
const MEASURED: u32 = 64;
/// Cycles (a tenth of a second or so) after which the next measured visit reads it in any case.
const LONG_CYCLES: u64 = 1 << 28;

/// All threads together.
#[derive(Debug)]
pub(super) struct Total {
    /// Changes at a reset: intervals that began before it do not count.
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
    /// Resets the sums.
    pub(super) fn clear(&self) {
        self.id.store(NEXT.fetch_add(1, Relaxed), Relaxed);
        self.visits.store(0, Relaxed);
        self.cpu_ns.store(0, Relaxed);
    }

    /// Mean CPU time of a visit; `None` without visits.
    pub(crate) fn ns_per_visit(&self) -> Option<f64> {
        let visits = self.visits.load(Relaxed);
        (visits > 0).then(|| self.cpu_ns.load(Relaxed) as f64 / visits as f64)
    }
}

/// The visits of a thread since it last read its CPU time.
pub(super) struct Stretch {
    /// The `id` of the total; 0: no reading yet.
    id: Cell<u64>,
    cpu_ns: Cell<u64>,
    ticks: Cell<u64>,
    visits: Cell<u64>,
    measured: Cell<u32>,
}

impl Stretch {
    pub(super) const fn new() -> Stretch {
        Stretch {
            id: Cell::new(0),
            cpu_ns: Cell::new(0),
            ticks: Cell::new(0),
            visits: Cell::new(0),
            measured: Cell::new(0),
        }
    }

    /// A measured visit begins, `visits` after the one before.
    pub(super) fn add(&self, total: &Total, visits: u64) {
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
        // The first visit only reads the CPU time.
        stretch.add(&one, 1000);
        for _ in 1..MEASURED {
            stretch.add(&one, 10);
        }
        stretch.ticks.set(sys::ticks());
        assert_eq!(one.visits.load(Relaxed), 0);
        stretch.add(&one, 10);
        assert_eq!(one.visits.load(Relaxed), 10 * u64::from(MEASURED));
        // A visit of another ledger ends the stretch.
        stretch.add(&one, 10);
        stretch.add(&other, 10);
        stretch.ticks.set(0);
        stretch.add(&other, 7);
        assert_eq!((one.visits.load(Relaxed), other.visits.load(Relaxed)), (640, 7));
        // So does a reset.
        other.clear();
        stretch.ticks.set(0);
        stretch.add(&other, 7);
        assert_eq!(other.ns_per_visit(), None);
    }
}
