//! The arena's side of the remote-free list.

#![allow(unsafe_code)]

use alloc::sync::Arc;
use core::ptr;
use core::sync::atomic::Ordering;

use crate::mbuf::arena::Arena;
use crate::mbuf::raw::{List, awaited, first_of};
use crate::mbuf::storage::Kick;

impl Arena {
    /// Takes all descriptors off the remote-free list.
    pub(crate) fn take_remote(&mut self) -> List {
        // SAFETY: `Shared` exists as long as the arena.
        let remote = unsafe { &(*self.shared.as_ptr()).remote };
        if first_of(remote.load(Ordering::Relaxed)).is_none() {
            return List::default();
        }
        // Acquire: accesses through the mbufs happened before their drop.
        let head = first_of(remote.swap(ptr::null_mut(), Ordering::Acquire));
        // SAFETY: the owners of the descriptors on the list gave them up.
        unsafe { List::from_head(head) }
    }

    /// Whether the remote-free list is not empty.
    pub(crate) fn has_remote(&self) -> bool {
        // SAFETY: `Shared` exists as long as the arena.
        let remote = unsafe { &(*self.shared.as_ptr()).remote };
        first_of(remote.load(Ordering::Acquire)).is_some()
    }

    /// Sets the kick of remote frees. Only the first call has an effect.
    pub(crate) fn set_kick(&mut self, kick: Arc<dyn Kick>) {
        // SAFETY: `Shared` exists as long as the arena. Other threads read `kick` only after `await_remote`
        // has found it set, and it is not written again.
        unsafe {
            let slot = &(*self.shared.as_ptr()).kick;
            if slot.with(|slot| (*slot).is_none()) {
                slot.with_mut(|slot| *slot = Some(kick));
            }
        }
    }

    /// Requests a kick on the next remote free. False if the list is not empty.
    pub(crate) fn await_remote(&mut self) -> bool {
        // SAFETY: `Shared` exists as long as the arena.
        let shared = unsafe { &*self.shared.as_ptr() };
        // SAFETY: as in `set_kick`; only the arena, which is borrowed, writes it.
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
