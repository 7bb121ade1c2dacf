//! A wake-up between two threads: an eventfd that is written only when the other side sleeps.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
#[cfg(not(fulmar_loom))]
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};

#[cfg(fulmar_loom)]
use fulmar_stack::models::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};

/// Wakes one sleeper. The sleeper arms the bell and then polls once more; a producer
/// publishes its work first and then rings. With sequentially consistent accesses one of the two sees
/// the other, so no wake-up is lost.
///
/// On one CPU the sleeper often runs before the `write` that has woken it returns. So the ring is
/// counted before the write: otherwise the descriptor would stay readable, and the sleeper would not
/// sleep again until the producer's `write` has returned.
pub struct Bell {
    fd: File,
    armed: AtomicBool,
    /// Rings counted ahead of their write, less those read from the descriptor.
    due: AtomicU64,
}

impl Bell {
    /// A bell that is not armed.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn new() -> io::Result<Bell> {
        let fd = File::from(crate::drivers::sys::eventfd()?);
        Ok(Bell { fd, armed: AtomicBool::new(false), due: AtomicU64::new(0) })
    }

    /// The next [`Bell::ring`] makes the descriptor readable.
    pub fn arm(&self) {
        self.armed.store(true, SeqCst);
    }

    /// Rings if the bell is armed. Returns whether it did.
    pub fn ring(&self) -> bool {
        if !self.armed.load(SeqCst) || !self.armed.swap(false, SeqCst) {
            return false;
        }
        self.announce();
        self.wake();
        true
    }

    /// Counts a ring before its write. A sleeper that disarms in between reads it the next time.
    fn announce(&self) {
        self.due.fetch_add(1, SeqCst);
    }

    /// The last step of a ring. The count cannot overflow: it is written once per arming.
    fn wake(&self) {
        let _ = (&self.fd).write(&1u64.to_ne_bytes());
    }

    /// Makes the descriptor unreadable again.
    pub fn disarm(&self) {
        self.armed.store(false, SeqCst);
        if self.due.load(SeqCst) > 0 {
            let mut rings = [0; 8];
            // Nothing, if the one announced has not been written yet. Each that is read was announced.
            if (&self.fd).read(&mut rings).is_ok() {
                self.due.fetch_sub(u64::from_ne_bytes(rings), SeqCst);
            }
        }
    }

    /// The descriptor, borrowed.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// The descriptor that the sleeper polls for readability.
    pub fn fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::drivers::sys::is_readable;

    #[test]
    fn a_sleeper_that_runs_before_its_waker_continues_can_sleep_again() {
        let bell = Bell::new().unwrap();
        for _ in 0..3 {
            bell.arm();
            assert!(bell.ring());
            assert!(is_readable(bell.fd()));
            bell.disarm();
            assert!(!is_readable(bell.fd()));
        }
        assert_eq!(bell.due.load(SeqCst), 0);
    }

    #[test]
    fn a_ring_that_comes_after_the_sleeper_has_gone_wakes_once_in_vain() {
        let bell = Bell::new().unwrap();
        bell.arm();
        bell.announce();
        bell.disarm();
        bell.arm();
        bell.wake();
        assert!(is_readable(bell.fd()));
        bell.disarm();
        assert!(!is_readable(bell.fd()));
    }

    proptest! {
        /// Rings of several threads, each in two steps, and a sleeper that arms and disarms, in any
        /// order: the descriptor is readable while rings that were written have not been read, and no
        /// longer after a disarming.
        #[test]
        fn the_descriptor_shows_what_was_rung_since_the_last_disarming(
            steps in proptest::collection::vec(0u8..3, 1..200),
        ) {
            let bell = Bell::new().unwrap();
            let (mut announced, mut written) = (0, 0);
            for step in steps {
                match step {
                    0 => { bell.announce(); announced += 1; }
                    1 if announced > 0 => { bell.wake(); announced -= 1; written += 1; }
                    1 => {}
                    _ => { bell.disarm(); written = 0; }
                }
                prop_assert_eq!(is_readable(bell.fd()), written > 0);
                prop_assert_eq!(bell.due.load(SeqCst), announced + written);
            }
        }
    }
}

/// In every order of its steps (`make loom`).
#[cfg(fulmar_loom)]
pub(crate) mod models {
    use std::sync::Arc;

    use fulmar_stack::models::{Model, model, spawn};

    use super::*;
    use crate::drivers::sys::is_readable;

    /// The models of this file.
    pub const MODELS: &[Model] = fulmar_stack::models![a_sleeper_sees_the_work_or_is_rung_for];

    fn a_sleeper_sees_the_work_or_is_rung_for() {
        model(4, || {
            let (bell, work) = (Arc::new(Bell::new().unwrap()), Arc::new(AtomicU64::new(0)));
            let (rung, brought) = (Arc::clone(&bell), Arc::clone(&work));
            let other = spawn(move || {
                for _ in 0..2 {
                    brought.fetch_add(1, SeqCst);
                    rung.ring();
                }
            });
            let mut done = 0;
            let sleeps = loop {
                bell.arm();
                let there = work.load(SeqCst);
                if there == done {
                    break done < 2;
                }
                done = there;
                bell.disarm();
            };
            other.join().unwrap();
            assert!(!sleeps || is_readable(bell.fd()));
        });
    }
}
