//! The inside of a poll set: which of its sockets may be ready, and one eventfd for all of them.
//!
//! Level-triggered like `epoll`: a socket stays in the list of candidates until a wait finds it not
//! ready. The eventfd is written only once per drain, and only if somebody outside sleeps on it, so
//! a busy set costs no system calls. The list holds each socket at most once, so it is bounded by the set's members.

use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use fulmar_base::SlotId;

use crate::sys;
use crate::waiter::Waiter;

/// A poll set, shared by its owner and its sockets.
pub struct PollSetCore {
    candidates: Mutex<Vec<SlotId>>,
    event: OwnedFd,
    /// Somebody was told already that there are candidates.
    signalled: AtomicBool,
    /// Somebody outside sleeps on the descriptor, so that it must be written.
    is_exposed: AtomicBool,
    /// The thread that waits inside the stack, if one does.
    sleeper: Mutex<Option<Arc<Waiter>>>,
}

impl PollSetCore {
    /// An empty set.
    ///
    /// # Errors
    /// The errno of `eventfd` (too many descriptors).
    pub fn new() -> std::io::Result<PollSetCore> {
        Ok(PollSetCore {
            candidates: Mutex::new(Vec::new()),
            event: sys::event_fd()?,
            signalled: AtomicBool::new(false),
            is_exposed: AtomicBool::new(false),
            sleeper: Mutex::new(None),
        })
    }

    /// Readable while a member may be ready.
    pub fn raw_fd(&self) -> RawFd {
        self.event.as_raw_fd()
    }

    /// A member may be ready. True: [`PollSetCore::signal`] is to be called.
    pub fn mark(&self, socket: SlotId) -> bool {
        let mut list = self.list();
        if !list.contains(&socket) {
            list.push(socket);
        }
        !self.signalled.swap(true, Ordering::AcqRel)
    }

    /// A member is still ready: the next wait looks at it again, and the descriptor is readable.
    pub fn keep(&self, socket: SlotId) {
        if self.mark(socket) {
            self.signal();
        }
    }

    /// Wakes whoever waits for the set: inside the stack, or on the descriptor.
    pub fn signal(&self) {
        if self.is_exposed.load(Ordering::Acquire) {
            sys::signal_event(self.raw_fd());
        }
        let sleeper = self.sleeper.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(w) = sleeper {
            w.wake();
        }
    }

    /// From now on somebody may sleep on the descriptor. True the first time.
    pub fn expose(&self) -> bool {
        let first = !self.is_exposed.swap(true, Ordering::AcqRel);
        if first && self.signalled.load(Ordering::Acquire) {
            sys::signal_event(self.raw_fd());
        }
        first
    }

    /// Whether [`PollSetCore::expose`] was called.
    pub fn is_exposed(&self) -> bool {
        self.is_exposed.load(Ordering::Acquire)
    }

    /// The thread that is about to wait inside the stack, or none any more.
    pub fn set_sleeper(&self, w: Option<Arc<Waiter>>) {
        *self.sleeper.lock().unwrap_or_else(PoisonError::into_inner) = w;
    }

    /// Takes the candidates; the descriptor is no longer readable.
    pub fn drain(&self) -> Vec<SlotId> {
        if self.signalled.swap(false, Ordering::AcqRel) && self.is_exposed() {
            sys::clear_event(self.raw_fd());
        }
        std::mem::take(&mut *self.list())
    }

    fn list(&self) -> std::sync::MutexGuard<'_, Vec<SlotId>> {
        self.candidates.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
