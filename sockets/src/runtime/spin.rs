//! Busy-polling a device before a sleep.
//!
//! Where the device's memory shows work ([`Peek`]) the thread reads it here, without the shard lock. Elsewhere the
//! caller polls, and this is the yield between two polls. [`moderation`](fulmar_stack::device::moderation) bounds the time.
//!
//! The thread yields between polls, so that a peer on the same CPU runs. A yield that lasts [`LONG_YIELD`] let a
//! CPU-bound thread run. The next waits then sleep at once: a thread that is woken preempts the CPU-bound thread, but a
//! thread that has yielded waits for the end of its time slice.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};

use fulmar_stack::base::{Duration, Instant};
use fulmar_stack::device::Peek;

use crate::runtime::sys;
use crate::runtime::waiter::Waiter;

/// Peeks between two yields and readings of the clock: about half a microsecond.
const PEEKS: u32 = 16;

/// A yield takes 0.2 to 0.5 us, and a few microseconds if a peer on this CPU runs and replies.
const LONG_YIELD: Duration = Duration::from_micros(100);

/// Waits that do not busy-poll after a long yield: from the first to the second number, doubled from one long yield to
/// the next.
const BACK_OFF_WAITS: (u32, u32) = (64, 4096);

/// How many fewer there are for each wait that busy-polls. A long yield costs a time slice, milliseconds; a busy-poll
/// that finds frames saves some ten microseconds.
const RECOVERY_WAITS: u32 = 8;

/// How the threads of one host busy-poll its device.
pub struct Spin {
    peek: Option<Arc<dyn Peek>>,
    /// Waits left that do not busy-poll.
    back_off: AtomicU32,
    /// How many there are after the next long yield.
    next_back_off: AtomicU32,
    /// The stack has failed: no more busy-polling.
    is_over: AtomicBool,
}

impl Spin {
    /// For a device, with its peek if it has one.
    pub fn new(peek: Option<Arc<dyn Peek>>) -> Spin {
        Spin {
            peek,
            back_off: AtomicU32::new(0),
            next_back_off: AtomicU32::new(BACK_OFF_WAITS.0),
            is_over: AtomicBool::new(false),
        }
    }

    /// Whether this wait may busy-poll. Called once per wait by the leader.
    pub fn may_poll(&self) -> bool {
        let left = self.back_off.load(Relaxed);
        if left > 0 {
            self.back_off.store(left - 1, Relaxed);
            return false;
        }
        let next = self.next_back_off.load(Relaxed).saturating_sub(RECOVERY_WAITS);
        self.next_back_off.store(next.max(BACK_OFF_WAITS.0), Relaxed);
        true
    }

    /// Whether the device can be peeked at without the lock.
    pub(crate) fn has_peek(&self) -> bool {
        self.peek.is_some()
    }

    /// Peeks until there may be work, the waiter is woken, or the time is over; without a peek it yields once.
    /// Returns how long a yield let another thread run, if that was long.
    pub fn run(&self, waiter: &Waiter, until: Instant) -> Duration {
        loop {
            let others_ran = self.yield_now();
            let Some(peek) = &self.peek else { return others_ran };
            for _ in 0..PEEKS {
                if peek.is_pending() || waiter.is_woken() {
                    return others_ran;
                }
                std::hint::spin_loop();
            }
            if !others_ran.is_zero() || sys::now() >= until || self.is_over.load(Relaxed) {
                return others_ran;
            }
        }
    }

    /// Ends busy-polling, now and for ever.
    pub fn end(&self) {
        self.is_over.store(true, Relaxed);
    }

    /// Yields. Returns the time if it was long; the next waits do not busy-poll then.
    pub fn yield_now(&self) -> Duration {
        let start = sys::now();
        std::thread::yield_now();
        self.note_yield(sys::now().since(start))
    }

    fn note_yield(&self, took: Duration) -> Duration {
        if took < LONG_YIELD {
            return Duration::ZERO;
        }
        let waits = self.next_back_off.load(Relaxed);
        self.back_off.store(waits, Relaxed);
        self.next_back_off.store((2 * waits).min(BACK_OFF_WAITS.1), Relaxed);
        took
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    /// Has work at the n-th peek.
    struct Nth(AtomicUsize, usize);

    impl Peek for Nth {
        fn is_pending(&self) -> bool {
            self.0.fetch_add(1, Relaxed) + 1 >= self.1
        }
    }

    /// Peeks until the n-th peek finds work. Long yields divide the peeks among several calls.
    fn peeks(nth: usize, until: Instant) -> usize {
        let peek = Arc::new(Nth(AtomicUsize::new(0), nth));
        let spin = Spin::new(Some(Arc::clone(&peek) as Arc<dyn Peek>));
        let waiter = Waiter::current();
        waiter.reset();
        while !spin.run(&waiter, until).is_zero() && peek.0.load(Relaxed) < nth {}
        peek.0.load(Relaxed)
    }

    #[test]
    fn busy_polling_ends_with_the_work_or_the_time() {
        assert_eq!(peeks(1, Instant::FAR_FUTURE), 1);
        assert_eq!(peeks(20, Instant::FAR_FUTURE), 20);
        assert!(peeks(usize::MAX, Instant::ZERO).is_multiple_of(PEEKS as usize));
    }

    #[test]
    fn busy_polling_ends_when_the_thread_is_woken() {
        let waiter = Waiter::current();
        waiter.reset();
        waiter.wake();
        let peek = Arc::new(Nth(AtomicUsize::new(0), usize::MAX));
        let spin = Spin::new(Some(Arc::clone(&peek) as Arc<dyn Peek>));
        spin.run(&waiter, Instant::FAR_FUTURE);
        assert_eq!(peek.0.load(Relaxed), 1);
    }

    fn waits_without_polls(spin: &Spin) -> u32 {
        (0..).take_while(|_| !spin.may_poll()).count() as u32
    }

    #[test]
    fn waits_sleep_at_once_for_a_while_after_a_long_yield() {
        let spin = Spin::new(None);
        assert_eq!(waits_without_polls(&spin), 0);
        assert_eq!(spin.note_yield(Duration::from_micros(99)), Duration::ZERO);
        assert_eq!(waits_without_polls(&spin), 0);
        assert_eq!(spin.note_yield(LONG_YIELD), LONG_YIELD);
        assert_eq!(waits_without_polls(&spin), BACK_OFF_WAITS.0);
    }

    #[test]
    fn a_busy_cpu_is_yielded_ever_less_often_and_an_idle_one_is_polled_again() {
        let spin = Spin::new(None);
        let after_long_yield = |polled_waits: usize| {
            (0..polled_waits).for_each(|_| assert!(spin.may_poll()));
            spin.note_yield(LONG_YIELD);
            waits_without_polls(&spin)
        };
        let waits: Vec<u32> = (0..12).map(|_| after_long_yield(2)).collect();
        assert!(waits.is_sorted(), "{waits:?}");
        let (first, last) = (waits[0], waits[waits.len() - 1]);
        assert!(first == BACK_OFF_WAITS.0 && last > BACK_OFF_WAITS.1 * 9 / 10, "{waits:?}");
        assert_eq!(after_long_yield(1_000), BACK_OFF_WAITS.0);
    }
}
