//! How a thread sleeps: a follower on a futex, the leader on the device's descriptor. Both are woken through the
//! same [`Waiter`].

use std::cell::RefCell;
use std::sync::Arc;
use std::time::Duration;

use crate::runtime::reentry::Waiting;
use crate::runtime::sync::{AtomicI32, AtomicU32, Ordering, per_thread};
use crate::runtime::sys;

const NOT_ON_DEVICE: i32 = -1;

const AWAKE: u32 = 0;
const PARKED: u32 = 1;
const WOKEN: u32 = 2;

/// A thread that may sleep; one for the life of the thread, and one more for each wait within a wait.
///
/// It takes no lock, so that a signal handler on that thread may wake it. It uses no thread-local storage, so that it
/// works at the end of the process, when destructors have run.
#[derive(Debug)]
pub struct Waiter {
    state: AtomicU32,
    /// The eventfd that the thread polls together with the device's descriptor, if it sleeps on the device.
    kick_fd: AtomicI32,
}

impl Waiter {
    /// The waiter of the calling thread.
    pub fn current() -> Arc<Waiter> {
        per_thread! {
            static MINE: RefCell<Option<Arc<Waiter>>> = const { RefCell::new(None) };
        }
        let mine = MINE.try_with(|mine| {
            Arc::clone(mine.borrow_mut().get_or_insert_with(|| Arc::new(Waiter::new())))
        });
        // A thread that ends may close a socket after its thread-locals are destroyed.
        mine.unwrap_or_else(|_| Arc::new(Waiter::new()))
    }

    /// The waiter for a wait of the calling thread: another one than that of a wait which it interrupts.
    pub fn of(wait: &Waiting) -> Arc<Waiter> {
        if wait.is_nested() { Arc::new(Waiter::new()) } else { Waiter::current() }
    }

    fn new() -> Waiter {
        Waiter { state: AtomicU32::new(AWAKE), kick_fd: AtomicI32::new(NOT_ON_DEVICE) }
    }

    /// Clears earlier wake-ups. Called under the shard lock, before the waiter is registered.
    pub fn reset(&self) {
        self.state.store(AWAKE, Ordering::SeqCst);
    }

    /// The thread will sleep on the device, beside this eventfd. Under the shard lock.
    pub(crate) fn on_device(&self, kick_fd: i32) {
        self.kick_fd.store(kick_fd, Ordering::SeqCst);
    }

    /// The thread no longer sleeps on the device.
    pub(crate) fn off_device(&self) {
        self.kick_fd.store(NOT_ON_DEVICE, Ordering::SeqCst);
    }

    /// Whether it was woken since [`Waiter::reset`].
    pub(crate) fn is_woken(&self) -> bool {
        self.state.load(Ordering::SeqCst) == WOKEN
    }

    /// Wakes the thread, once.
    pub fn wake(&self) {
        let before = self.state.swap(WOKEN, Ordering::SeqCst);
        if before == PARKED {
            sys::futex_wake(&self.state);
        }
        if before == AWAKE {
            match self.kick_fd.load(Ordering::SeqCst) {
                NOT_ON_DEVICE => {}
                fd => sys::signal_event(fd),
            }
        }
    }

    /// Sleeps until woken or until the time is over. Called by the owning thread only.
    pub fn park(&self, timeout: Option<Duration>) {
        let give_up = timeout.and_then(|t| std::time::Instant::now().checked_add(t));
        let park = |from| {
            self.state.compare_exchange(from, PARKED, Ordering::SeqCst, Ordering::SeqCst).is_ok()
        };
        while park(AWAKE) || park(PARKED) {
            let left = give_up.map(|at| at.saturating_duration_since(std::time::Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                let _ =
                    self.state.compare_exchange(PARKED, AWAKE, Ordering::SeqCst, Ordering::SeqCst);
                return;
            }
            sys::futex_wait(&self.state, PARKED, left);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::reentry::HostBit;
    use std::thread;

    #[test]
    fn a_wait_within_a_wait_takes_no_wake_up_of_the_outer_one() {
        let (outer, inner) = (HostBit::next(), HostBit::next());
        let outer_wait = outer.start_waiting().unwrap();
        let w = Waiter::of(&outer_wait);
        w.reset();
        w.wake();
        let inner_wait = inner.start_waiting().unwrap();
        Waiter::of(&inner_wait).reset();
        assert!(w.is_woken());
        drop((inner_wait, outer_wait));
        let again = outer.start_waiting().unwrap();
        assert!(Arc::ptr_eq(&Waiter::of(&again), &w));
    }

    #[test]
    fn a_wake_up_before_the_sleep_is_not_lost() {
        let w = Waiter::current();
        w.reset();
        w.wake();
        w.park(None);
        assert!(w.is_woken());
    }

    #[test]
    fn a_sleeper_is_woken_by_another_thread_every_time() {
        let (to, back) = (Waiter::current(), Arc::new(Waiter::new()));
        let (there, here) = (Arc::clone(&back), Arc::clone(&to));
        let other = thread::spawn(move || {
            for _ in 0..500 {
                there.park(None);
                there.reset();
                here.wake();
            }
        });
        for _ in 0..500 {
            to.reset();
            back.wake();
            to.park(None);
        }
        other.join().unwrap();
    }

    #[test]
    fn a_sleep_ends_with_its_time() {
        let w = Waiter::current();
        w.reset();
        w.park(Some(Duration::from_millis(1)));
        assert!(!w.is_woken());
    }
}
