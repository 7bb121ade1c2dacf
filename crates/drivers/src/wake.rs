//! A wake-up between two threads: an eventfd that is written only when the other side sleeps.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

/// One sleeper's bell. The sleeper arms it and then looks once more for work; whoever brings work
/// makes it visible first and then rings. With sequentially consistent accesses one of the two sees
/// the other, so no wake-up is lost.
pub struct Bell {
    fd: File,
    armed: AtomicBool,
    rung: AtomicBool,
}

impl Bell {
    pub fn new() -> io::Result<Bell> {
        let fd = File::from(crate::sys::eventfd()?);
        Ok(Bell { fd, armed: AtomicBool::new(false), rung: AtomicBool::new(false) })
    }

    /// The next [`Bell::ring`] makes the descriptor readable.
    pub fn arm(&self) {
        self.armed.store(true, SeqCst);
    }

    /// Rings if the sleeper is armed; answers whether it did.
    pub fn ring(&self) -> bool {
        if !self.armed.load(SeqCst) || !self.armed.swap(false, SeqCst) {
            return false;
        }
        // The count cannot overflow: it is written once per arming. `rung` is set after the write,
        // so that a sleeper which disarms in between finds the mark later and not never.
        let _ = (&self.fd).write(&1u64.to_ne_bytes());
        self.rung.store(true, SeqCst);
        true
    }

    /// Makes the descriptor unreadable again.
    pub fn disarm(&self) {
        self.armed.store(false, SeqCst);
        if self.rung.swap(false, SeqCst) {
            let _ = (&self.fd).read(&mut [0; 8]);
        }
    }

    pub fn fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}
