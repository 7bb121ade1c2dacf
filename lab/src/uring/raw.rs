//! The rings and the memory that the kernel writes to. Unsafe, since the kernel gets addresses.
//!
//! **Invariant.** Memory whose address was submitted stays allocated and untouched by us until the
//! completion that returns it: each receiver owns its ring and its buffers, lends out the bytes of a
//! buffer only between its completion and the next call (by `&mut self`), and when it is dropped with
//! a receive still under way it leaks that memory rather than free what the kernel may write to.

use io_uring::{IoUring, cqueue, opcode, squeue, types};
use std::alloc::{self, Layout};
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU16, Ordering};

/// Entries of the rings: far more than what is ever under way.
const ENTRIES: u32 = 16;
const GROUP: u16 = 1;
/// Page size, to which the kernel wants the ring of buffers aligned.
const PAGE: usize = 4096;

fn ring() -> io::Result<IoUring> {
    // Completions are looked for by the one thread that submits: no interrupt to tell it of them.
    IoUring::builder().setup_single_issuer().setup_coop_taskrun().build(ENTRIES)
}

/// Submits `entry`.
///
/// # Safety
/// The memory that the entry names stays valid and untouched until its completion is taken.
unsafe fn push(ring: &mut IoUring, entry: &squeue::Entry) -> io::Result<()> {
    // SAFETY: the caller promises what `push` asks for.
    unsafe { ring.submission().push(entry) }
        .map_err(|_| io::Error::other("invariant: few entries are under way"))?;
    ring.submit().map(drop)
}

/// The next completion, waited for.
fn completion(ring: &mut IoUring) -> io::Result<cqueue::Entry> {
    loop {
        if let Some(entry) = ring.completion().next() {
            return Ok(entry);
        }
        match ring.submit_and_wait(1) {
            Err(e) if e.kind() != io::ErrorKind::Interrupted => return Err(e),
            _ => {}
        }
    }
}

fn received(result: i32) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::from_raw_os_error(-result))
}

fn buffers(count: usize, bytes: usize) -> ManuallyDrop<Vec<Box<[u8]>>> {
    // Touched, so that no page fault is measured.
    ManuallyDrop::new((0..count.max(1)).map(|_| vec![1; bytes].into_boxed_slice()).collect())
}

/// Receives into buffers in turn: while the program has one, the next is under way.
pub struct PingPong {
    ring: IoUring,
    fd: OwnedFd,
    buffers: ManuallyDrop<Vec<Box<[u8]>>>,
    /// The buffer that is under way.
    under_way: Option<usize>,
    flags: i32,
}

impl PingPong {
    /// `wait_all`: a receive completes when its buffer is full (or at the end), as a posted buffer
    /// does; else with what is there.
    pub fn new(
        fd: BorrowedFd<'_>,
        count: usize,
        bytes: usize,
        wait_all: bool,
    ) -> io::Result<PingPong> {
        let mut new = PingPong {
            ring: ring()?,
            fd: fd.try_clone_to_owned()?,
            buffers: buffers(count, bytes),
            under_way: None,
            flags: if wait_all { libc::MSG_WAITALL } else { 0 },
        };
        new.post(0)?;
        Ok(new)
    }

    fn post(&mut self, which: usize) -> io::Result<()> {
        let buffer = &mut self.buffers[which];
        let (at, bytes) = (buffer.as_mut_ptr(), buffer.len() as u32);
        let fd = types::Fd(self.fd.as_raw_fd());
        let entry = opcode::Recv::new(fd, at, bytes).flags(self.flags).build();
        // Before: whatever happens to the submission, the memory is not freed by us.
        self.under_way = Some(which);
        // SAFETY: the buffer belongs to `self` and is not lent out: `next` lends the one before it;
        // `Drop` keeps it while it is under way.
        unsafe { push(&mut self.ring, &entry) }
    }

    /// The next bytes; none at the end of the stream.
    pub fn next(&mut self) -> io::Result<&[u8]> {
        let Some(which) = self.under_way else { return Ok(&[]) };
        let result = completion(&mut self.ring)?.result();
        self.under_way = None;
        let n = received(result)?.min(self.buffers[which].len());
        if n > 0 {
            self.post((which + 1) % self.buffers.len())?;
        }
        Ok(&self.buffers[which][..n])
    }
}

impl Drop for PingPong {
    fn drop(&mut self) {
        if self.under_way.is_none() {
            // SAFETY: dropped once, here, and not used after; nothing is under way.
            unsafe { ManuallyDrop::drop(&mut self.buffers) };
        }
    }
}

/// A page for the ring of buffers that the kernel reads.
struct Page(NonNull<u8>);

impl Page {
    const LAYOUT: Layout = match Layout::from_size_align(PAGE, PAGE) {
        Ok(layout) => layout,
        Err(_) => panic!("invariant: a page is aligned to its size"),
    };

    fn new() -> Page {
        // SAFETY: the layout has a size. All-zero is a value of every entry.
        let at = unsafe { alloc::alloc_zeroed(Page::LAYOUT) };
        Page(NonNull::new(at).unwrap_or_else(|| alloc::handle_alloc_error(Page::LAYOUT)))
    }

    fn entries(&self) -> *mut types::BufRingEntry {
        self.0.as_ptr().cast()
    }

    /// The kernel's word for how many entries were given.
    fn tail(&self) -> &AtomicU16 {
        // SAFETY: the page holds initialised entries (zeroes at least), the first of which has the
        // tail in its last field, aligned; the kernel only reads it, and we write it atomically.
        unsafe { AtomicU16::from_ptr(types::BufRingEntry::tail(self.entries()).cast_mut()) }
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        // SAFETY: allocated by `new` with this layout.
        unsafe { alloc::dealloc(self.0.as_ptr(), Page::LAYOUT) };
    }
}

/// One receive for ever, into buffers that the kernel chooses from those that it was given.
pub struct Multishot {
    ring: IoUring,
    fd: OwnedFd,
    page: ManuallyDrop<Page>,
    buffers: ManuallyDrop<Vec<Box<[u8]>>>,
    /// Buffers given so far.
    given: u16,
    is_armed: bool,
    /// The buffer that the program has.
    lent: Option<u16>,
}

impl Multishot {
    /// Gives the kernel `count` buffers (a power of two, at most 256).
    pub fn new(fd: BorrowedFd<'_>, count: usize, bytes: usize) -> io::Result<Multishot> {
        let count = count.clamp(1, PAGE / size_of::<types::BufRingEntry>()).next_power_of_two();
        let ring = ring()?;
        let page = ManuallyDrop::new(Page::new());
        let at = page.entries() as u64;
        // SAFETY: the page has room for `count` entries and lives as long as the ring (`Drop`).
        unsafe { ring.submitter().register_buf_ring_with_flags(at, count as u16, GROUP, 0)? };
        let mut new = Multishot {
            ring,
            fd: fd.try_clone_to_owned()?,
            page,
            buffers: buffers(count, bytes),
            given: 0,
            is_armed: false,
            lent: None,
        };
        (0..count).for_each(|which| new.give(which as u16));
        Ok(new)
    }

    /// Gives a buffer to the kernel.
    fn give(&mut self, which: u16) {
        let slot = usize::from(self.given) & (self.buffers.len() - 1);
        let buffer = &mut self.buffers[usize::from(which)];
        let (at, bytes) = (buffer.as_mut_ptr() as u64, buffer.len() as u32);
        // SAFETY: the slot lies within the page (`new` bounds the count), and the kernel does not
        // read it before the tail says so. The fields are set one by one, which leaves the tail,
        // that shares the first slot, alone.
        unsafe {
            let entry = &mut *self.page.entries().add(slot);
            entry.set_addr(at);
            entry.set_len(bytes);
            entry.set_bid(which);
        }
        self.given = self.given.wrapping_add(1);
        self.page.tail().store(self.given, Ordering::Release);
    }

    fn arm(&mut self) -> io::Result<()> {
        let entry = opcode::RecvMulti::new(types::Fd(self.fd.as_raw_fd()), GROUP).build();
        self.is_armed = true;
        // SAFETY: the entry names no memory; that of the group is kept by `self`.
        unsafe { push(&mut self.ring, &entry) }
    }

    /// The next bytes; none at the end of the stream.
    pub fn next(&mut self) -> io::Result<&[u8]> {
        if let Some(which) = self.lent.take() {
            self.give(which);
        }
        loop {
            if !self.is_armed {
                self.arm()?;
            }
            let entry = completion(&mut self.ring)?;
            self.is_armed = cqueue::more(entry.flags());
            let n = match entry.result() {
                // All buffers were full: those are given again, and it is asked for anew.
                e if e == -libc::ENOBUFS => continue,
                result => received(result)?,
            };
            let Some(which) = cqueue::buffer_select(entry.flags()) else { return Ok(&[]) };
            self.lent = Some(which);
            let buffer = self.buffers.get(usize::from(which)).map_or(&[][..], |b| b);
            return Ok(&buffer[..n.min(buffer.len())]);
        }
    }
}

impl Drop for Multishot {
    fn drop(&mut self) {
        if !self.is_armed {
            // SAFETY: dropped once, here, and not used after; no receive is under way, so the kernel
            // takes no buffer of the group any more.
            unsafe {
                ManuallyDrop::drop(&mut self.buffers);
                ManuallyDrop::drop(&mut self.page);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd;
    use std::thread;

    /// What a receiver makes of a stream of numbered bytes.
    fn check(mut next: impl FnMut() -> io::Result<Vec<u8>>, expected: &[u8]) {
        let mut got = Vec::new();
        loop {
            let bytes = next().expect("no error");
            if bytes.is_empty() {
                break;
            }
            got.extend(bytes);
        }
        assert!(got == expected, "{} of {} bytes, or others", got.len(), expected.len());
    }

    fn source(bytes: &[u8]) -> (TcpStream, thread::JoinHandle<()>) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
        let to = listener.local_addr().expect("bound");
        let bytes = bytes.to_vec();
        let sender = thread::spawn(move || {
            TcpStream::connect(to).expect("it listens").write_all(&bytes).expect("it reads");
        });
        (listener.accept().expect("it connects").0, sender)
    }

    fn numbered() -> Vec<u8> {
        (0..1_000_003u32).map(|i| (i % 251) as u8).collect()
    }

    #[test]
    fn every_byte_arrives_once_and_in_order_with_both_kinds_of_buffers() {
        let bytes = numbered();
        for wait_all in [false, true] {
            let (stream, sender) = source(&bytes);
            let Ok(mut ring) = PingPong::new(stream.as_fd(), 2, 65_536, wait_all) else {
                eprintln!("skipped: this kernel gives no io_uring");
                return sender.join().expect("no panic");
            };
            check(|| ring.next().map(<[u8]>::to_vec), &bytes);
            sender.join().expect("no panic");
        }
        let (stream, sender) = source(&bytes);
        let mut ring = Multishot::new(stream.as_fd(), 2, 4096).expect("buffers can be given");
        check(|| ring.next().map(<[u8]>::to_vec), &bytes);
        sender.join().expect("no panic");
    }
}
