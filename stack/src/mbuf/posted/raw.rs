//! The memory of a posted buffer and the access to its parts.
//!
//! ```text
//!             high                     bytes
//!   ├── mbufs ──┼── writable range ──────┤      one Memory, counted by an Arc
//! ```
//!
//! Invariants, cited by name in the SAFETY comments:
//! - *unique*: a `RecvBuf` has the only reference to its memory. It is converted to a `PostedBuf` by value, and a
//!   `PostedBuf` back to it only when the reference count is 1 (`Arc::get_mut`, which acquires the accesses of
//!   the dropped references).
//! - *one writer*: at most one writable range ([`WritableRange`]) exists per memory. Only `&mut PostedBuf` makes one;
//!   `has_writer` is set while it exists and cleared by its end.
//! - *behind the mbufs*: mbufs cover only bytes before `high`. A writable range starts at or behind `high`,
//!   which only the range moves. Therefore no mbuf covers writable bytes. `high` is reset to 0 only at
//!   reference count 1, when there is no mbuf.
//! - *initialised*: all bytes are initialised from the start.
//! - *returned*: each object with access to the bytes (`RecvBuf`, `PostedBuf`, `WritableRange`, `Filled`, `Mbuf`) has a
//!   reference to the memory. The memory is dropped with the last of them.

#![allow(unsafe_code)]

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::mem::ManuallyDrop;
use core::ops::Range;
use core::ptr::NonNull;
use core::slice;
use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::{BufId, PostedBuf};
use crate::mbuf::arena::{Arena, Owner};
use crate::mbuf::storage::{LENT, Purpose};
use crate::mbuf::sys::Pages;
use crate::mbuf::{Chain, Mbuf, NoBuffer, Pool};

/// Memory that is written through a writable range and read through mbufs.
pub(crate) struct Memory {
    base: NonNull<u8>,
    bytes: usize,
    generation: u64,
    /// Whether a writable range exists.
    has_writer: AtomicBool,
    /// The high-water mark: mbufs cover only bytes before it.
    high: AtomicUsize,
    origin: Origin,
}

/// The owner of the memory.
enum Origin {
    /// Pages that are unmapped with the memory.
    Pages(#[allow(dead_code)] Pages),
    /// A vector of this capacity.
    Vec(usize),
}

// SAFETY: plain bytes, owned or lent for this use; the module documentation describes the access.
unsafe impl Send for Memory {}
// SAFETY: as above; a shared reference alone gives access to no byte.
unsafe impl Sync for Memory {}

/// Distinguishes buffers at the same address.
fn next_generation() -> u64 {
    static NEXT: AtomicUsize = AtomicUsize::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed) as u64
}

impl Memory {
    fn new(base: NonNull<u8>, bytes: usize, origin: Origin) -> Memory {
        let (has_writer, high) = (AtomicBool::new(false), AtomicUsize::new(0));
        Memory { base, bytes, generation: next_generation(), has_writer, high, origin }
    }

    /// Zeroed pages. `None` if the system is out of memory.
    pub(super) fn pages(bytes: usize) -> Option<Memory> {
        let pages = Pages::map(bytes)?;
        let base = pages.base();
        Some(Memory::new(base, bytes, Origin::Pages(pages)))
    }

    /// The whole capacity of a vector.
    pub(super) fn vec(mut v: Vec<u8>) -> Memory {
        v.resize(v.capacity(), 0);
        let mut v = ManuallyDrop::new(v);
        let base = NonNull::new(v.as_mut_ptr()).unwrap_or(NonNull::dangling());
        Memory::new(base, v.len(), Origin::Vec(v.capacity()))
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Resets the state of memory without a writable range and without mbufs.
    #[inline]
    pub(super) fn free(&mut self) {
        *self.high.get_mut() = 0;
        *self.has_writer.get_mut() = false;
    }

    pub(crate) fn id(&self) -> BufId {
        let address = self.base.as_ptr().addr();
        BufId { address, bytes: self.bytes, generation: self.generation }
    }

    /// The vector that the memory was made from, `len` bytes long. Returns the memory if there was none.
    pub(super) fn into_vec(self, len: usize) -> Result<Vec<u8>, Memory> {
        let Origin::Vec(capacity) = self.origin else { return Err(self) };
        let len = len.min(self.bytes);
        let this = ManuallyDrop::new(self);
        // SAFETY: made from a vector of this capacity in `vec`; converted back once (`ManuallyDrop`; the
        // caller owns the memory); initialised.
        Ok(unsafe { Vec::from_raw_parts(this.base.as_ptr(), len, capacity) })
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let Origin::Vec(capacity) = self.origin {
            // SAFETY: made from a vector of this capacity in `vec`; no reference to the memory is left.
            drop(unsafe { Vec::from_raw_parts(self.base.as_ptr(), 0, capacity) });
        }
    }
}

/// The bytes of memory without other references.
pub(super) fn unique_bytes(memory: &Arc<Memory>, range: Range<usize>) -> &[u8] {
    assert!(range.start <= range.end && range.end <= memory.bytes, "bytes beyond the buffer");
    // SAFETY: inside the memory, initialised; unique: the only caller is `RecvBuf`, which cannot be posted
    // while it is borrowed.
    unsafe { slice::from_raw_parts(memory.base.as_ptr().add(range.start), range.len()) }
}

/// The bytes of memory for writing. `None` if there are other references.
pub(super) fn unique_bytes_mut(memory: &mut Arc<Memory>) -> Option<&mut [u8]> {
    let memory = Arc::get_mut(memory)?;
    // SAFETY: all of the memory, initialised; count 1 was checked and `&mut` keeps it.
    Some(unsafe { slice::from_raw_parts_mut(memory.base.as_ptr(), memory.bytes) })
}

/// The writable range of a posted buffer: exclusive access from the first byte that is not filled to the
/// end.
///
/// After its drop the [`PostedBuf`](super::PostedBuf) can make another one.
pub struct WritableRange {
    memory: Arc<Memory>,
    /// Offset of the first writable byte. `high <= from <= bytes`.
    from: usize,
}

impl WritableRange {
    /// A writable range from `from` on, if there is no other and no mbuf covers bytes behind `from`.
    pub(super) fn make(memory: &mut Arc<Memory>, from: usize) -> Option<WritableRange> {
        if from > memory.bytes {
            return None;
        }
        // Acquire: the writes through the last range, and its `high`.
        if memory.has_writer.load(Ordering::Acquire) || from < memory.high.load(Ordering::Relaxed) {
            Arc::get_mut(memory)?.free();
        }
        memory.has_writer.store(true, Ordering::Relaxed);
        Some(WritableRange { memory: Arc::clone(memory), from })
    }

    /// The identity of the buffer.
    #[inline]
    pub fn buffer(&self) -> BufId {
        self.memory.id()
    }

    /// Offset of the range in the buffer.
    #[inline]
    pub fn offset(&self) -> usize {
        self.from
    }

    /// Length of the range.
    #[inline]
    pub fn len(&self) -> usize {
        self.memory.bytes - self.from
    }

    /// Whether the buffer is full.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The bytes, for writing. Their contents are unspecified.
    #[inline]
    pub fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: inside the memory, initialised; exclusive: one writer, behind the mbufs, `&mut self`.
        unsafe { slice::from_raw_parts_mut(self.memory.base.as_ptr().add(self.from), self.len()) }
    }

    /// Splits the first `n` bytes off as an immutable mbuf, which is not charged. Error, without a change: no
    /// descriptor is left.
    ///
    /// # Panics
    /// If the range is shorter.
    #[inline]
    pub fn split(&mut self, n: usize, pool: &mut Pool) -> Result<Mbuf, NoBuffer> {
        assert!(n <= self.len(), "a split beyond the writable range");
        let len = u32::try_from(n).map_err(|_| NoBuffer)?;
        let arena = pool.arena_with_desc(Purpose::Receive)?;
        // SAFETY: inside the range, which starts behind these bytes from now on (behind the mbufs).
        let m =
            unsafe { arena.placed(Arc::clone(&self.memory), self.from, len) }.ok_or(NoBuffer)?;
        self.advance(n);
        Ok(m)
    }

    /// As [`WritableRange::split`] of the whole range.
    ///
    /// # Errors
    /// No descriptor is left; the range is dropped with its bytes.
    #[inline]
    pub fn into_mbuf(self, pool: &mut Pool) -> Result<Mbuf, NoBuffer> {
        let len = u32::try_from(self.len()).map_err(|_| NoBuffer)?;
        let arena = pool.arena_with_desc(Purpose::Receive)?;
        let (memory, from) = self.end();
        // SAFETY: inside the memory; the bytes were in this range, and later ranges start after them.
        unsafe { arena.placed(memory, from, len) }.ok_or(NoBuffer)
    }

    /// Ends the range with all its bytes written. Returns the memory and the offset of the bytes.
    #[inline]
    fn end(self) -> (Arc<Memory>, usize) {
        let (from, bytes) = (self.from, self.memory.bytes);
        self.memory.high.store(bytes, Ordering::Relaxed);
        let range = ManuallyDrop::new(self);
        // SAFETY: moved out once, since the range is never dropped.
        let memory = unsafe { core::ptr::read(&raw const range.memory) };
        // Release: as in `drop`.
        memory.has_writer.store(false, Ordering::Release);
        (memory, from)
    }

    /// As [`WritableRange::split`], for a device without access to the pool: the first `n` bytes are converted to an
    /// mbuf later.
    ///
    /// # Panics
    /// If the range is shorter.
    #[inline]
    pub fn fill(&mut self, n: usize) -> Filled {
        assert!(n <= self.len(), "a fill beyond the writable range");
        let filled = Filled { memory: Arc::clone(&self.memory), from: self.from, bytes: n };
        self.advance(n);
        filled
    }

    /// Copies bytes to the front of the range until the range or `from` ends, removes them from the range, and returns
    /// their number.
    #[inline]
    pub fn write(&mut self, bytes: &[u8]) -> usize {
        let n = bytes.len().min(self.len());
        if let (Some(to), Some(from)) = (self.bytes().get_mut(..n), bytes.get(..n)) {
            to.copy_from_slice(from);
        }
        self.advance(n);
        n
    }

    /// As [`WritableRange::write`], with the bytes of `m`.
    #[inline]
    pub fn write_mbuf(&mut self, m: &Mbuf) -> usize {
        let n = m.copy_to(0, self.bytes());
        self.advance(n);
        n
    }

    /// Zeroes the first `n` bytes (at most all): bytes that a device placed here belong to another flow.
    pub fn scrub(&mut self, n: usize) {
        let n = n.min(self.len());
        self.bytes().iter_mut().take(n).for_each(|b| *b = 0);
    }

    fn advance(&mut self, n: usize) {
        self.from += n;
        // Written by the range only; the end of the range releases it.
        self.memory.high.store(self.from, Ordering::Relaxed);
    }
}

impl Drop for WritableRange {
    fn drop(&mut self) {
        // Release: the writes to the range happened before the next range, or accesses of the owner.
        self.memory.has_writer.store(false, Ordering::Release);
    }
}

impl core::fmt::Debug for WritableRange {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("WritableRange")
            .field("offset", &self.from)
            .field("len", &self.len())
            .finish()
    }
}

impl PostedBuf {
    /// A reference to bytes that were written to the buffer, which keeps them from being written while it exists.
    /// Errors: no descriptor is left, or a writable range exists.
    ///
    /// # Panics
    /// If the range is not inside the buffer.
    pub fn written(&mut self, bytes: Range<usize>, pool: &mut Pool) -> Result<Chain, NoBuffer> {
        let memory = &self.memory;
        assert!(bytes.start <= bytes.end && bytes.end <= memory.bytes, "bytes beyond the buffer");
        if memory.has_writer.load(Ordering::Acquire) {
            return Err(NoBuffer);
        }
        let len = u32::try_from(bytes.len()).map_err(|_| NoBuffer)?;
        let arena = pool.arena_with_desc(Purpose::Receive)?;
        // SAFETY: checked to be inside; there is no writer, only `&mut self` makes one, and from now on writable ranges
        // start behind these bytes.
        let m = unsafe { arena.placed(Arc::clone(memory), bytes.start, len) }.ok_or(NoBuffer)?;
        memory.high.fetch_max(bytes.end, Ordering::Relaxed);
        Ok(Chain::from(m))
    }
}

/// Bytes of a posted buffer that a device has written ([`WritableRange::fill`]), to be converted to an mbuf. They are
/// immutable. If it is dropped, the bytes are lost and leave a hole in the buffer.
pub struct Filled {
    memory: Arc<Memory>,
    from: usize,
    /// `from + bytes <= high`.
    bytes: usize,
}

impl Filled {
    /// Number of bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Converts the bytes to an immutable mbuf, which is not charged.
    ///
    /// # Errors
    /// No descriptor is left; the bytes are lost.
    #[inline]
    pub fn into_mbuf(self, pool: &mut Pool) -> Result<Mbuf, NoBuffer> {
        let len = u32::try_from(self.bytes).map_err(|_| NoBuffer)?;
        let arena = pool.arena_with_desc(Purpose::Receive)?;
        // SAFETY: the bytes were in a writable range until `WritableRange::fill`, which moved its start past them.
        unsafe { arena.placed(self.memory, self.from, len) }.ok_or(NoBuffer)
    }
}

impl core::fmt::Debug for Filled {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Filled").field("offset", &self.from).field("len", &self.bytes).finish()
    }
}

impl Arena {
    /// The first reference to a range of posted memory. `None` if no descriptor is free.
    ///
    /// # Safety
    /// The bytes are inside the memory, and not in a writable range while the mbuf exists.
    unsafe fn placed(&mut self, memory: Arc<Memory>, from: usize, len: u32) -> Option<Mbuf> {
        // SAFETY: inside the memory, which the record keeps until its last reference is freed; the bytes are
        // not written, by the caller's contract.
        unsafe {
            let data = memory.base.as_ptr().add(from);
            self.adopt(data, len, Owner::Posted(memory), LENT, Purpose::Send)
        }
    }
}
