//! A kernel of one lock, in which descriptors become readable and words are slept on, and where no time passes.
//! So nothing but a wake-up ends a sleep, and a wake-up that is lost is a deadlock, which loom finds.

use std::collections::BTreeSet;
use std::os::fd::RawFd;

use loom::sync::{Condvar, Mutex};

use crate::models::atomic::{AtomicU32, Ordering};

#[derive(Default)]
struct Kernel {
    readable: Mutex<BTreeSet<RawFd>>,
    changed: Condvar,
}

loom::lazy_static! {
    static ref KERNEL: Kernel = Kernel::default();
}

/// Makes a descriptor readable.
pub fn signal(fd: RawFd) {
    KERNEL.readable.lock().unwrap().insert(fd);
    KERNEL.changed.notify_all();
}

/// Makes a descriptor unreadable.
pub fn clear(fd: RawFd) {
    KERNEL.readable.lock().unwrap().remove(&fd);
}

/// Sleeps until one of the descriptors is readable; whether the second is.
pub fn sleep_on(first: Option<RawFd>, second: RawFd) -> bool {
    let mut readable = KERNEL.readable.lock().unwrap();
    while !readable.contains(&second) && !first.is_some_and(|fd| readable.contains(&fd)) {
        readable = KERNEL.changed.wait(readable).unwrap();
    }
    readable.contains(&second)
}

/// Sleeps until [`futex_wake`], if the word is as expected.
pub fn futex_wait(word: &AtomicU32, expected: u32) {
    let kernel = KERNEL.readable.lock().unwrap();
    if word.load(Ordering::Relaxed) == expected {
        drop(KERNEL.changed.wait(kernel).unwrap());
    }
}

/// Wakes all that sleep on words.
pub fn futex_wake() {
    let kernel = KERNEL.readable.lock().unwrap();
    KERNEL.changed.notify_all();
    drop(kernel);
}
