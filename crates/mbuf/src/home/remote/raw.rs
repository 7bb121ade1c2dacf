//! The owner's side of the remote-free list.

#![allow(unsafe_code)]

use alloc::sync::Arc;
use core::ptr;
use core::sync::atomic::Ordering;

use crate::home::Home;
use crate::raw::{List, awaited, first_of};
use crate::storage::Kick;

impl Home {
    /// Everything that was dropped elsewhere since the last time.
    pub(crate) fn take_remote(&mut self) -> List {
        // SAFETY: the home's `Shared` exists as long as the home does.
        let remote = unsafe { &(*self.shared.as_ptr()).remote };
        if first_of(remote.load(Ordering::Relaxed)).is_none() {
            return List::default();
        }
        // Acquire: what was done with the mbufs before they were dropped happened before.
        let head = first_of(remote.swap(ptr::null_mut(), Ordering::Acquire));
        // SAFETY: what hangs on the list was given up by its owners.
        unsafe { List::from_head(head) }
    }

    /// Whether something lies on the remote-free list.
    pub(crate) fn has_remote(&self) -> bool {
        // SAFETY: the home's `Shared` exists as long as the home does.
        let remote = unsafe { &(*self.shared.as_ptr()).remote };
        first_of(remote.load(Ordering::Acquire)).is_some()
    }

    /// Names who is told of remote frees; only the first call counts.
    pub(crate) fn set_kick(&mut self, kick: Arc<dyn Kick>) {
        // SAFETY: the home's `Shared` exists as long as the home does. Others read `kick` only once
        // `await_remote` has found it set, and from then on it is not written.
        unsafe {
            let slot = &(*self.shared.as_ptr()).kick;
            if slot.with(|slot| (*slot).is_none()) {
                slot.with_mut(|slot| *slot = Some(kick));
            }
        }
    }

    /// Asks for a kick with the next remote free. False: something lies on the list already.
    pub(crate) fn await_remote(&mut self) -> bool {
        // SAFETY: the home's `Shared` exists as long as the home does.
        let shared = unsafe { &*self.shared.as_ptr() };
        // SAFETY: as in `set_kick`; only the home, which is borrowed, writes it.
        if shared.kick.with(|kick| unsafe { (*kick).is_none() }) {
            return !self.has_remote();
        }
        // Release: `kick` was written before.
        let (empty, awaited) = (ptr::null_mut(), awaited());
        match shared.remote.compare_exchange(empty, awaited, Ordering::Release, Ordering::Relaxed) {
            Ok(_) => true,
            Err(head) => head == awaited,
        }
    }
}
