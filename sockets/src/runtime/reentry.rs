//! Re-entry: a signal handler that interrupts a call and calls the same stack gets `WouldBlock` instead of a
//! deadlock.
//!
//! A thread is *inside* a host from before it takes one of the host's locks until after it has
//! released all of them and delivered the wake-ups: a call from a handler then must touch nothing. It is *waiting*
//! while it sleeps for readiness: a handler's call may then poll, but must not wait, since the interrupted thread
//! would have to wake it.
//!
//! Each host has a bit in both words of a thread. Hosts 64 apart share one, which matters only for a
//! device that is itself built on such a stack: its calls answer `WouldBlock`.

use std::cell::Cell;
use std::marker::PhantomData;
use std::num::NonZeroU64;
use std::sync::atomic::{AtomicU32, Ordering, compiler_fence};

use crate::runtime::sync::per_thread;

per_thread! {
    // Without destructors, so that both outlive the thread's other locals: stacks are drained at exit.
    static INSIDE: Cell<u64> = const { Cell::new(0) };
    static WAITING: Cell<u64> = const { Cell::new(0) };
}

/// A host's bit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HostBit(NonZeroU64);

impl HostBit {
    /// The bit of a new host.
    pub(super) fn next() -> HostBit {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let bit = 1 << (NEXT.fetch_add(1, Ordering::Relaxed) % 64);
        HostBit(NonZeroU64::new(bit).unwrap_or(NonZeroU64::MIN))
    }

    /// The thread is inside until the mark is dropped. `None`: it is inside already.
    #[inline(always)]
    pub(super) fn enter(self) -> Option<Inside> {
        let held = INSIDE.with(Cell::get);
        if held & self.0.get() != 0 {
            return None;
        }
        INSIDE.with(|inside| inside.set(held | self.0.get()));
        // A handler on this thread must not see the locks taken before the mark.
        compiler_fence(Ordering::SeqCst);
        Some(Inside { bit: self.0, not_send: PhantomData })
    }

    /// The thread waits until the mark is dropped. `None`: it waits already.
    pub(super) fn start_waiting(self) -> Option<Waiting> {
        let held = WAITING.with(Cell::get);
        if held & self.0.get() != 0 {
            return None;
        }
        WAITING.with(|waiting| waiting.set(held | self.0.get()));
        compiler_fence(Ordering::SeqCst);
        Some(Waiting { bit: self.0, is_nested: held != 0, not_send: PhantomData })
    }
}

/// Identifies the calling thread among all that live.
#[inline]
pub(crate) fn this_thread() -> usize {
    INSIDE.with(|inside| std::ptr::from_ref(inside) as usize)
}

/// The calling thread is inside a host, until this is dropped. One word, since every call has one.
pub(super) struct Inside {
    bit: NonZeroU64,
    /// The bit belongs to the thread that set it.
    not_send: PhantomData<*const ()>,
}

impl Drop for Inside {
    #[inline(always)]
    fn drop(&mut self) {
        compiler_fence(Ordering::SeqCst);
        INSIDE.with(|inside| inside.set(inside.get() & !self.bit.get()));
    }
}

/// The calling thread waits in a host, until this is dropped.
pub struct Waiting {
    bit: NonZeroU64,
    is_nested: bool,
    not_send: PhantomData<*const ()>,
}

impl Waiting {
    /// Whether the thread waits in another host, too: a signal handler has interrupted that wait.
    pub(crate) fn is_nested(&self) -> bool {
        self.is_nested
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        compiler_fence(Ordering::SeqCst);
        WAITING.with(|waiting| waiting.set(waiting.get() & !self.bit.get()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_enters_a_host_once_and_another_host_or_thread_is_independent() {
        let (a, b) = (HostBit::next(), HostBit::next());
        let mark = a.enter().unwrap();
        assert!(a.enter().is_none());
        assert!(b.enter().is_some());
        assert!(a.start_waiting().is_some());
        std::thread::spawn(move || assert!(a.enter().is_some())).join().unwrap();
        drop(mark);
        assert!(a.enter().is_some());
    }
}
