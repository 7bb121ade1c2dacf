//! The handle of a host to its service thread: unparks, wakes and stops it.

use std::os::fd::RawFd;
use std::sync::Arc;
use std::thread::JoinHandle;

use crate::runtime::sync::{AtomicBool, Mutex, Ordering, lock};
use crate::runtime::sys;
use crate::runtime::waiter::Waiter;

/// The handle of a host to its service thread.
#[derive(Default)]
pub(crate) struct Service {
    /// Set by the thread that starts it.
    pub thread: Mutex<Option<JoinHandle<()>>>,
    /// Set by the thread itself.
    pub waiter: Mutex<Option<Arc<Waiter>>>,
    /// It sleeps until [`Service::unpark`].
    pub is_parked: AtomicBool,
    is_stopping: AtomicBool,
}

impl Service {
    /// No caller leads any more: ends the parking.
    pub(crate) fn unpark(&self) {
        if self.is_parked.load(Ordering::SeqCst) && self.is_parked.swap(false, Ordering::SeqCst) {
            self.wake();
        }
    }

    /// Ends any sleep but one on the device.
    pub(crate) fn wake(&self) {
        if let Some(w) = &*lock(&self.waiter) {
            w.wake();
        }
    }

    /// Ends the thread and waits for it.
    pub(crate) fn stop(&self, kick: RawFd) {
        self.is_stopping.store(true, Ordering::SeqCst);
        sys::signal_event(kick);
        self.wake();
        let handle = lock(&self.thread).take();
        if let Some(h) = handle
            && h.thread().id() != std::thread::current().id()
        {
            // If it panicked, the panic has been printed already.
            let _ = h.join();
        }
    }

    /// Whether the thread is to end.
    pub(crate) fn is_stopping(&self) -> bool {
        self.is_stopping.load(Ordering::SeqCst)
    }
}
