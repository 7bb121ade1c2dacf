//! Completions: a caller waits, blocking or not, until bytes that it gave away are sent. Created above the shard,
//! which only wakes the waiters.

use std::sync::{Arc, PoisonError};
use std::task::Waker;

use crate::runtime::contain::contain;
use crate::runtime::limit::Limit;
use crate::runtime::sync::{AtomicBool, AtomicU8, Mutex, Ordering, lock};
use crate::runtime::sys;
use crate::runtime::waiter::Waiter;

/// Completes once, with success or a failure.
#[derive(Default)]
pub struct Completion {
    is_done: AtomicBool,
    /// The reason of a failure; 0: none. Written before `is_done`.
    why: AtomicU8,
    watchers: Mutex<Watchers>,
}

/// The waiters.
#[derive(Default)]
struct Watchers {
    threads: Vec<Arc<Waiter>>,
    waker: Option<Waker>,
}

impl Completion {
    /// Resets it for reuse.
    pub(crate) fn renew(&mut self) {
        self.is_done = AtomicBool::default();
        self.why = AtomicU8::default();
        let watchers = self.watchers.get_mut().unwrap_or_else(PoisonError::into_inner);
        watchers.threads.clear();
        watchers.waker = None;
    }

    /// Whether it is complete.
    #[inline]
    pub fn is_done(&self) -> bool {
        self.is_done.load(Ordering::Acquire)
    }

    /// The reason of the failure; `None` while it is not complete or if it succeeded.
    pub fn failure(&self) -> Option<u8> {
        let why = self.why.load(Ordering::Acquire);
        (self.is_done() && why != 0).then_some(why)
    }

    /// Records a failure, for this reason (not 0); the first one counts.
    pub fn fail(&self, why: u8) {
        let _ = self.why.compare_exchange(0, why, Ordering::AcqRel, Ordering::Relaxed);
    }

    /// Completes it, and wakes the waiters. Not to be called under the shard lock: it runs wakers of futures.
    pub fn finish(&self) {
        let mut watchers = lock(&self.watchers);
        self.is_done.store(true, Ordering::Release);
        let waker = watchers.waker.take();
        watchers.threads.iter().for_each(|w| w.wake());
        drop(watchers);
        if let Some(w) = waker {
            // The program's own code: its panic is not one of the stack, nor of the thread that runs it.
            contain(|| w.wake());
        }
    }

    /// Completes it without a wake-up: its only holder has the outcome already.
    pub(crate) fn end_unwatched(&self) {
        self.is_done.store(true, Ordering::Release);
    }

    /// Sets the task to wake, in place of the last one. True: it is complete already, and no task is woken.
    ///
    /// A waker's clone and drop are the program's own code, which may call the stack: they run without
    /// the lock.
    pub fn watch(&self, waker: &Waker) -> bool {
        if lock(&self.watchers).waker.as_ref().is_some_and(|w| w.will_wake(waker)) {
            return self.is_done();
        }
        let mut waker = Some(waker.clone());
        let mut watchers = lock(&self.watchers);
        let is_done = self.is_done();
        if !is_done {
            std::mem::swap(&mut watchers.waker, &mut waker);
        }
        drop(watchers);
        drop(waker);
        is_done
    }

    /// Waits until it is over or the time is, without running any stack: when there is none any more.
    pub fn wait(&self, limit: Limit) -> bool {
        let now = sys::now();
        let Some(give_up) = limit.end(now) else { return self.is_done() };
        let waiter = Waiter::current();
        waiter.reset();
        self.add_sleeper(&waiter);
        waiter.park(give_up.map(|at| at.since(now)));
        self.remove_sleeper(&waiter);
        self.is_done()
    }

    /// A thread is about to wait inside the stack. If it is over already the thread is woken.
    pub(crate) fn add_sleeper(&self, w: &Arc<Waiter>) {
        let mut watchers = lock(&self.watchers);
        if self.is_done() {
            return w.wake();
        }
        watchers.threads.push(Arc::clone(w));
    }

    /// It no longer waits.
    pub(crate) fn remove_sleeper(&self, w: &Arc<Waiter>) {
        lock(&self.watchers).threads.retain(|s| !Arc::ptr_eq(s, w));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Weak;
    use std::sync::atomic::AtomicUsize;
    use std::task::Wake;

    #[test]
    fn a_wait_that_begins_late_returns_at_once() {
        let c = Completion::default();
        let w = Waiter::current();
        w.reset();
        c.add_sleeper(&w);
        assert!(!w.is_woken() && !c.watch(Waker::noop()));
        c.finish();
        assert!(w.is_woken() && c.is_done() && c.watch(Waker::noop()));
        c.remove_sleeper(&w);
        w.reset();
        c.add_sleeper(&w);
        assert!(w.is_woken());
        w.reset();
    }

    /// A task that reads the completion when its last waker is dropped.
    struct Task(Weak<Completion>, Arc<AtomicUsize>);

    impl Wake for Task {
        fn wake(self: Arc<Self>) {}
    }

    impl Drop for Task {
        fn drop(&mut self) {
            let Some(c) = self.0.upgrade() else { return };
            let is_free = c.watchers.try_lock().is_ok();
            self.1.fetch_add(usize::from(is_free), Ordering::Relaxed);
        }
    }

    #[test]
    fn wakers_are_dropped_without_the_lock() {
        let (c, free) = (Arc::new(Completion::default()), Arc::new(AtomicUsize::new(0)));
        let task = || Waker::from(Arc::new(Task(Arc::downgrade(&c), Arc::clone(&free))));
        for _ in 0..3 {
            assert!(!c.watch(&task()));
        }
        assert_eq!(free.load(Ordering::Relaxed), 2, "each replaces the one before");
        c.finish();
        assert_eq!(free.load(Ordering::Relaxed), 3);
        assert!(c.watch(&task()));
        assert_eq!(free.load(Ordering::Relaxed), 4);
    }

    #[test]
    fn the_first_reason_is_reported_at_the_end() {
        let c = Completion::default();
        c.fail(3);
        c.fail(5);
        assert_eq!(c.failure(), None);
        c.finish();
        assert_eq!(c.failure(), Some(3));
    }
}
