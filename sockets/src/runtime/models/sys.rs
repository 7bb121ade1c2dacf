//! The operating system under the models: [`kernel`] in place of all that threads wait by.

#[path = "../sys.rs"]
#[allow(dead_code)]
mod real;

use std::os::fd::RawFd;
use std::time::Duration;

use fulmar_stack::base::Instant;
use fulmar_stack::device::WakeFd;
use fulmar_stack::models::kernel;
pub(crate) use fulmar_stack::models::kernel::{clear as clear_event, signal as signal_event};

pub use real::thread_number;
pub(crate) use real::*;

use crate::runtime::sync::AtomicU32;

/// As of the machine: always the same.
pub fn now() -> Instant {
    Instant::from_millis(1)
}

/// As [`now`].
pub(crate) fn coarse_now() -> Instant {
    now()
}

/// As [`now`].
pub fn ticks() -> u64 {
    now().as_nanos()
}

/// Lets others run.
pub fn sleep(_: Duration) {
    fulmar_stack::models::yield_now();
}

/// There are no signals.
pub(crate) fn block_signals() {}

/// A timer that never fires.
pub fn set_timer(_: RawFd, _: Instant) {}

/// As of the machine, but for the timer.
pub fn sleep_on(device: Option<WakeFd>, kick: RawFd, _: RawFd) -> bool {
    kernel::sleep_on(device.map(|device| device.fd), kick)
}

/// As of the machine, but for the time.
pub fn futex_wait(word: &AtomicU32, expected: u32, _: Option<Duration>) {
    kernel::futex_wait(word, expected);
}

/// As of the machine.
pub fn futex_wake(_: &AtomicU32) {
    kernel::futex_wake();
}
