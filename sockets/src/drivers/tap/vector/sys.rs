//! Several reads or writes of one descriptor with one system call, by io_uring(7).
//!
//! Memory: [`Slots`] owns a mapping that is divided into slots, and operations refer to slots only. So no operation
//! outlives a buffer of a frame.
//!
//! Invariant *quiet*: outside of [`Slots::write`] and [`Slots::read`] no operation is in flight. They wait for every
//! completion. If the kernel does not return one (`is_broken`), the slots are never touched again and never unmapped.
//!
//! A forked child has neither the rings nor the slots. An unregistration by it would act on the ring of the parent, so
//! a drop in the child does nothing.
//!
//! Threads use the ring one at a time, so it is set up without flags that bind it to one thread. Operations never wait
//! (`RWF_NOWAIT`), so they complete within the submission.

use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::{self, NonNull};
use std::slice;

use io_uring::{IoUring, opcode, squeue, types};

/// The registered descriptor: the only one.
const FILE: types::Fixed = types::Fixed(0);
/// The result of a slot before its operation is complete; not an errno.
const PENDING: i32 = i32::MIN;
/// Calls in a row without a completion, after which the ring counts as broken.
const MAX_IDLE_CALLS: u32 = 1000;

/// Whether the slots are registered with the ring, if that is allowed. Registered pages are pinned, and the kernel need
/// not look them up.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Buffers {
    Registered,
    Unregistered,
}

/// See the module's header.
pub(super) struct Slots {
    ring: ManuallyDrop<IoUring>,
    base: NonNull<u8>,
    slot_bytes: usize,
    /// The slots are registered with the ring.
    is_registered: bool,
    /// Operations submitted and not complete.
    in_flight: usize,
    results: Box<[i32]>,
    /// The process that has the ring and the slots.
    pid: u32,
}

// SAFETY: the mapping at `base` belongs to this struct, and any thread may use it.
unsafe impl Send for Slots {}

impl Slots {
    /// `count` slots of `slot_bytes` bytes for operations on `fd`, zeroed.
    ///
    /// # Errors
    /// The kernel has no io_uring, or does not allow it.
    pub(super) fn open(
        fd: BorrowedFd<'_>,
        count: usize,
        slot_bytes: usize,
        buffers: Buffers,
    ) -> io::Result<Slots> {
        let ring = IoUring::builder().dontfork().build(count as u32)?;
        ring.submitter().register_files(&[fd.as_raw_fd()])?;
        let bytes = count * slot_bytes;
        let base = map(bytes)?;
        let memory = libc::iovec { iov_base: base.as_ptr().cast(), iov_len: bytes };
        // SAFETY: the mapping lives as long as the ring works on it (quiet; see `drop`).
        let known = || unsafe { ring.submitter().register_buffers(&[memory]) };
        let is_registered = buffers == Buffers::Registered && known().is_ok();
        Ok(Slots {
            ring: ManuallyDrop::new(ring),
            base,
            slot_bytes,
            is_registered,
            in_flight: 0,
            results: vec![PENDING; count].into(),
            pid: std::process::id(),
        })
    }

    /// How many slots there are.
    pub(super) fn count(&self) -> usize {
        self.results.len()
    }

    /// Bytes of the mapping.
    fn bytes(&self) -> usize {
        self.count() * self.slot_bytes
    }

    /// An operation has not completed.
    pub(super) fn is_broken(&self) -> bool {
        self.in_flight > 0
    }

    fn at(&self, slot: usize) -> *mut u8 {
        assert!(slot < self.count() && !self.is_broken(), "a slot that must not be touched");
        self.base.as_ptr().wrapping_add(slot * self.slot_bytes)
    }

    /// The bytes of a slot.
    ///
    /// # Panics
    /// If there is no such slot, or the ring is broken.
    #[inline]
    pub(super) fn slot(&mut self, slot: usize) -> &mut [u8] {
        let start = self.at(slot);
        // SAFETY: inside the mapping, which is initialised (zeroes at first) and borrowed with `self`;
        // the kernel does not touch it (quiet).
        unsafe { slice::from_raw_parts_mut(start, self.slot_bytes) }
    }

    /// Writes the first `lengths[i]` bytes of slot i, in order. Results are in the same order: bytes
    /// written, a negative errno, or `None` without a completion.
    pub(super) fn write(&mut self, lengths: &[u32]) -> impl Iterator<Item = Option<i32>> {
        for (slot, &bytes) in lengths.iter().enumerate() {
            let from = self.at(slot).cast_const();
            assert!(bytes as usize <= self.slot_bytes, "more bytes than a slot has");
            let operation = if self.is_registered {
                opcode::WriteFixed::new(FILE, from, bytes, 0).rw_flags(libc::RWF_NOWAIT).build()
            } else {
                opcode::Write::new(FILE, from, bytes).rw_flags(libc::RWF_NOWAIT).build()
            };
            self.push(slot, operation);
        }
        self.run(lengths.len())
    }

    /// Reads into the slots from the first on, `count` of them, in order. Results as of
    /// [`Slots::write`].
    pub(super) fn read(&mut self, count: usize) -> impl Iterator<Item = Option<i32>> {
        let bytes = self.slot_bytes as u32;
        for slot in 0..count {
            let to = self.at(slot);
            let operation = if self.is_registered {
                opcode::ReadFixed::new(FILE, to, bytes, 0).rw_flags(libc::RWF_NOWAIT).build()
            } else {
                opcode::Read::new(FILE, to, bytes).rw_flags(libc::RWF_NOWAIT).build()
            };
            self.push(slot, operation);
        }
        self.run(count)
    }

    #[inline]
    fn push(&mut self, slot: usize, operation: squeue::Entry) {
        let operation = operation.user_data(slot as u64);
        // SAFETY: the operation names one slot, which is mapped until no operation is under way, and
        // it is not read or written until the operation is complete (quiet).
        let pushed = unsafe { self.ring.submission().push(&operation) };
        assert!(pushed.is_ok(), "the ring has an entry for every slot");
        self.results[slot] = PENDING;
    }

    /// Submits the operations and waits for all completions.
    fn run(&mut self, count: usize) -> impl Iterator<Item = Option<i32>> {
        self.in_flight = count;
        let mut idle = 0;
        while self.in_flight > 0 && idle < MAX_IDLE_CALLS {
            let entered = self.ring.submit_and_wait(self.in_flight);
            let before = self.in_flight;
            for completion in self.ring.completion() {
                if let Some(result) = self.results.get_mut(completion.user_data() as usize) {
                    *result = completion.result();
                }
                self.in_flight = self.in_flight.saturating_sub(1);
            }
            idle = if self.in_flight < before { 0 } else { idle + 1 };
            let retry = [libc::EINTR, libc::EAGAIN, libc::EBUSY];
            match entered.map_err(|e| e.raw_os_error()) {
                Err(Some(errno)) if retry.contains(&errno) => {}
                Err(_) => break,
                Ok(_) => {}
            }
        }
        self.results[..count].iter().map(|r| (*r != PENDING).then_some(*r))
    }
}

impl Drop for Slots {
    fn drop(&mut self) {
        if std::process::id() != self.pid {
            return;
        }
        // The kernel closes the files of a dropped ring some time later, and an interface that is not persistent exists
        // while one of its descriptors is open. So the descriptor is unregistered here.
        let _ = self.ring.submitter().unregister_files();
        if !self.is_broken() {
            let bytes = self.bytes();
            // SAFETY: the whole mapping made in `open`. No operation is in flight (quiet), and registered pages are
            // referenced by the kernel itself.
            unsafe { libc::munmap(self.base.as_ptr().cast(), bytes) };
        }
        // SAFETY: dropped once, here, and not used after.
        unsafe { ManuallyDrop::drop(&mut self.ring) };
    }
}

/// Zeroed memory that a forked child does not get (MADV_DONTFORK): copy-on-write would move pages that the kernel uses.
fn map(bytes: usize) -> io::Result<NonNull<u8>> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping at an address of the kernel's choice touches no memory that exists.
    let base = unsafe { libc::mmap(ptr::null_mut(), bytes, access, flags, -1, 0) };
    if base == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the mapping just made; the advice changes no byte.
    unsafe { libc::madvise(base, bytes, libc::MADV_DONTFORK) };
    NonNull::new(base.cast()).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixDatagram;

    #[test]
    fn a_forked_child_that_lets_go_of_the_slots_takes_nothing_from_its_parent() {
        let (ours, theirs) = UnixDatagram::pair().unwrap();
        let slots = match Slots::open(ours.as_fd(), 2, 64, Buffers::Registered) {
            Ok(slots) => slots,
            Err(e) => {
                let required = std::env::var_os("FULMAR_REQUIRE_KERNEL_TESTS").is_some();
                assert!(!required, "no io_uring: {e}");
                // Not `eprintln`: the test harness hides what a passing test prints by it.
                return writeln!(std::io::stderr(), "SKIPPED a test of io_uring: {e}").unwrap();
            }
        };
        let mut slots = ManuallyDrop::new(slots);
        // SAFETY: the child drops the slots, which takes no lock but the allocator's (which forking
        // leaves usable), and ends without running anything else.
        let child = unsafe {
            let child = libc::fork();
            if child == 0 {
                ManuallyDrop::drop(&mut slots);
                libc::_exit(0);
            }
            child
        };
        assert!(child > 0, "{}", io::Error::last_os_error());
        let mut status = -1;
        // SAFETY: writes one integer, a local.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0);
        slots.slot(1)[..3].copy_from_slice(b"all");
        assert_eq!(slots.write(&[2, 3]).collect::<Vec<_>>(), [Some(2), Some(3)]);
        let mut got = [0; 8];
        assert_eq!((theirs.recv(&mut got).unwrap(), theirs.recv(&mut got).unwrap()), (2, 3));
        assert_eq!(got[..3], *b"all");
        // SAFETY: dropped once in this process, here.
        unsafe { ManuallyDrop::drop(&mut slots) };
    }
}
