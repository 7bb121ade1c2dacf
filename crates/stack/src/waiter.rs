//! How a thread sleeps: parked, or (while it holds the poll baton) on the device's descriptor. Both
//! are woken through the same [`Waiter`].

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::thread::Thread;
use std::time::Duration;

use crate::sys;

const NOT_ON_DEVICE: i32 = -1;

/// One thread that may sleep. A thread has one for its life.
pub struct Waiter {
    thread: Thread,
    woken: AtomicBool,
    /// The eventfd beside which the thread sleeps, if it sleeps on the device.
    kick_fd: AtomicI32,
}

impl Waiter {
    /// The waiter of the calling thread.
    pub fn current() -> Arc<Waiter> {
        thread_local! {
            static MINE: RefCell<Option<Arc<Waiter>>> = const { RefCell::new(None) };
        }
        MINE.with(|mine| {
            let mut mine = mine.borrow_mut();
            let w = mine.get_or_insert_with(|| {
                Arc::new(Waiter {
                    thread: std::thread::current(),
                    woken: AtomicBool::new(false),
                    kick_fd: AtomicI32::new(NOT_ON_DEVICE),
                })
            });
            Arc::clone(w)
        })
    }

    /// Forgets earlier wake-ups; to be called under the shard lock before registering anywhere.
    pub fn reset(&self) {
        self.woken.store(false, Ordering::Relaxed);
    }

    /// The thread will sleep on the device, beside this eventfd. Under the shard lock.
    pub fn on_device(&self, kick_fd: i32) {
        self.kick_fd.store(kick_fd, Ordering::Release);
    }

    /// The thread no longer sleeps on the device.
    pub fn off_device(&self) {
        self.kick_fd.store(NOT_ON_DEVICE, Ordering::Release);
    }

    /// Whether somebody has woken it since [`Waiter::reset`].
    pub fn is_woken(&self) -> bool {
        self.woken.load(Ordering::Acquire)
    }

    /// Wakes the thread, once.
    pub fn wake(&self) {
        if self.woken.swap(true, Ordering::AcqRel) {
            return;
        }
        match self.kick_fd.load(Ordering::Acquire) {
            NOT_ON_DEVICE => self.thread.unpark(),
            fd => sys::signal_event(fd),
        }
    }

    /// Sleeps until woken or until the time is over. Only for the thread that owns the waiter.
    pub fn park(&self, timeout: Option<Duration>) {
        let give_up = timeout.map(|t| std::time::Instant::now() + t);
        while !self.is_woken() {
            match give_up {
                None => std::thread::park(),
                Some(at) => {
                    let left = at.saturating_duration_since(std::time::Instant::now());
                    if left.is_zero() {
                        return;
                    }
                    std::thread::park_timeout(left);
                }
            }
        }
    }
}
