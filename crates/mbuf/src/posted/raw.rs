//! The memory of a posted buffer, and who may touch which part of it.
//!
//! ```text
//!             high                     bytes
//!   ├── mbufs ──┼────── room ────────────┤      one Memory, counted by an Arc
//! ```
//!
//! Invariants, named in the SAFETY sentences:
//! - *unique*: a `RecvBuf` holds the only reference to its memory. It is turned into a `Hold` by value,
//!   and made from one only when the count is 1 again (`Arc::get_mut`, which acquires what the others
//!   released).
//! - *one room*: at most one [`Room`] exists per memory; only `&mut Hold` makes one, `has_room` says
//!   whether one is out, and only a room's end clears it.
//! - *behind the mbufs*: mbufs cover only bytes before `high`; a room begins at or behind `high`, which
//!   only its holder moves. So what a room may write is covered by nobody, and what an mbuf covers is
//!   written by nobody. `high` goes back to 0 only at count 1, when no mbuf exists.
//! - *initialised*: all bytes are, from the start.
//! - *back*: whoever may touch the bytes (a buffer, a hold, a room, bytes on their way, an mbuf) keeps a
//!   reference to the memory; the last of them to go drops it, and only then its [`Lease`] says that it is
//!   back.

#![allow(unsafe_code)]

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::mem::ManuallyDrop;
use core::ops::Range;
use core::ptr::NonNull;
use core::slice;
use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::{BufId, Hold, RecvBuf};
use crate::home::{Home, Owner};
use crate::storage::{LENT, Purpose};
use crate::sys::Pages;
use crate::{Chain, Mbuf, NoBuffer, Pool};

/// Memory that is filled by whoever has its room and read through mbufs.
pub(crate) struct Memory {
    base: NonNull<u8>,
    bytes: usize,
    generation: u64,
    /// Whether a room is out.
    has_room: AtomicBool,
    /// Where mbufs end.
    high: AtomicUsize,
    origin: Origin,
}

/// What the memory goes back to.
enum Origin {
    /// Its own pages, given back when these go.
    Pages(#[allow(dead_code)] Pages),
    /// A vector of this capacity.
    Vec(usize),
    /// Whoever registered it.
    Foreign,
    /// Whoever lent it, who is told by this that it is back.
    Lent(Arc<AtomicBool>),
}

// SAFETY: plain bytes, owned or registered for this use; who touches which is said above.
unsafe impl Send for Memory {}
// SAFETY: as above; a shared reference alone gives access to no byte.
unsafe impl Sync for Memory {}

/// Tells buffers at the same place apart.
fn next_generation() -> u64 {
    static NEXT: AtomicUsize = AtomicUsize::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed) as u64
}

impl Memory {
    fn new(base: NonNull<u8>, bytes: usize, generation: u64, origin: Origin) -> Memory {
        let (has_room, high) = (AtomicBool::new(false), AtomicUsize::new(0));
        Memory { base, bytes, generation, has_room, high, origin }
    }

    /// Zeroed pages; `None` if the system has none.
    pub(super) fn pages(bytes: usize) -> Option<Memory> {
        let pages = Pages::map(bytes)?;
        let base = pages.base();
        Some(Memory::new(base, bytes, next_generation(), Origin::Pages(pages)))
    }

    /// The whole capacity of a vector.
    pub(super) fn vec(mut v: Vec<u8>) -> Memory {
        v.resize(v.capacity(), 0);
        let mut v = ManuallyDrop::new(v);
        let base = NonNull::new(v.as_mut_ptr()).unwrap_or(NonNull::dangling());
        Memory::new(base, v.len(), next_generation(), Origin::Vec(v.capacity()))
    }

    /// # Safety
    /// As [`RecvBuf::from_raw`].
    unsafe fn foreign(base: NonNull<u8>, bytes: usize, generation: u64) -> Memory {
        Memory::new(base, bytes, generation, Origin::Foreign)
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Nobody else holds it: no room is out, and no mbuf covers a byte.
    #[inline]
    pub(super) fn free(&mut self) {
        *self.high.get_mut() = 0;
        *self.has_room.get_mut() = false;
    }

    pub(crate) fn id(&self) -> BufId {
        let address = self.base.as_ptr().addr();
        BufId { address, bytes: self.bytes, generation: self.generation }
    }

    /// The vector that the memory was, `len` bytes long; the memory back if it was none.
    pub(super) fn into_vec(self, len: usize) -> Result<Vec<u8>, Memory> {
        let Origin::Vec(capacity) = self.origin else { return Err(self) };
        let len = len.min(self.bytes);
        let this = ManuallyDrop::new(self);
        // SAFETY: made from a vector of this capacity in `vec`, taken apart once (`ManuallyDrop`; the
        // caller owns the memory); initialised.
        Ok(unsafe { Vec::from_raw_parts(this.base.as_ptr(), len, capacity) })
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        match &self.origin {
            Origin::Vec(capacity) => {
                // SAFETY: made from a vector of this capacity in `vec`; nobody holds the memory any more.
                drop(unsafe { Vec::from_raw_parts(self.base.as_ptr(), 0, *capacity) });
            }
            // Release: what was written, by whomever, happened before its owner sees that it is back.
            Origin::Lent(is_away) => is_away.store(false, Ordering::Release),
            Origin::Pages(_) | Origin::Foreign => {}
        }
    }
}

/// Memory that somebody lends for a while: it says when nobody refers to it any more. One at a time; used
/// again it allocates nothing but what every buffer needs.
#[derive(Debug, Default)]
pub struct Lease {
    is_away: Arc<AtomicBool>,
}

/// The generation of memory that is lent: that of none of our own.
const LENT_GENERATION: u64 = 0;

impl Lease {
    /// Whether the memory that was lent last has still to come back.
    #[inline]
    pub fn is_away(&self) -> bool {
        // Acquire: what others wrote there.
        self.is_away.load(Ordering::Acquire)
    }

    /// A buffer over memory that its owner lends. The same memory lent again is the same to whoever
    /// remembers it ([`RecvBuf::id`]), so it is not for devices that have to prepare memory.
    ///
    /// # Panics
    /// If what was lent before is still away.
    ///
    /// # Safety
    /// From now on until [`Lease::is_away`] says no, `bytes` bytes from `base` on are initialised, readable
    /// and writable, and nobody else touches them. If the lease is forgotten before, for ever.
    pub unsafe fn lend(&mut self, base: NonNull<u8>, bytes: usize) -> RecvBuf {
        assert!(!self.is_away(), "a lease of memory that is away");
        self.is_away.store(true, Ordering::Relaxed);
        let origin = Origin::Lent(Arc::clone(&self.is_away));
        let memory = Arc::new(Memory::new(base, bytes, LENT_GENERATION, origin));
        RecvBuf { memory, filled: 0 }
    }
}

impl RecvBuf {
    /// A buffer over memory that stays the caller's. `generation` tells it apart from memory that was
    /// at the same place before; a caller that never unmaps may always give the same.
    ///
    /// # Safety
    /// From now on until this buffer is dropped, `bytes` bytes from `base` on are initialised, readable
    /// and writable, and nobody else touches them. Once it is given away to be filled that holds until
    /// it has come back and is dropped; for a buffer that does not come back, for ever.
    pub unsafe fn from_raw(base: NonNull<u8>, bytes: usize, generation: u64) -> RecvBuf {
        // SAFETY: as the caller promises.
        let memory = unsafe { Memory::foreign(base, bytes, generation) };
        RecvBuf { memory: Arc::new(memory), filled: 0 }
    }
}

/// The bytes of a memory that nobody else holds.
pub(super) fn unique_bytes(memory: &Arc<Memory>, range: Range<usize>) -> &[u8] {
    assert!(range.start <= range.end && range.end <= memory.bytes, "bytes beyond the buffer");
    // SAFETY: inside the memory, initialised; unique: the only caller is `RecvBuf`, and a borrow of it
    // keeps it from being posted.
    unsafe { slice::from_raw_parts(memory.base.as_ptr().add(range.start), range.len()) }
}

/// The bytes of a memory that nobody else holds, for writing; `None` if somebody does.
pub(super) fn unique_bytes_mut(memory: &mut Arc<Memory>) -> Option<&mut [u8]> {
    let memory = Arc::get_mut(memory)?;
    // SAFETY: all of the memory, initialised; count 1 was checked and `&mut` keeps it.
    Some(unsafe { slice::from_raw_parts_mut(memory.base.as_ptr(), memory.bytes) })
}

/// The exclusive right to write the end of a posted buffer, from the first byte that is not filled.
///
/// Dropping it gives the right back to the [`super::Hold`].
pub struct Room {
    memory: Arc<Memory>,
    /// First byte that may be written. `high <= from <= bytes`.
    from: usize,
}

impl Room {
    /// A room from `from` on, if there is none and no mbuf reaches behind `from`.
    pub(super) fn make(memory: &mut Arc<Memory>, from: usize) -> Option<Room> {
        if from > memory.bytes {
            return None;
        }
        // Acquire: what the last room wrote, and where it ended.
        if memory.has_room.load(Ordering::Acquire) || from < memory.high.load(Ordering::Relaxed) {
            Arc::get_mut(memory)?.free();
        }
        memory.has_room.store(true, Ordering::Relaxed);
        Some(Room { memory: Arc::clone(memory), from })
    }

    /// Which buffer it belongs to.
    #[inline]
    pub fn buffer(&self) -> BufId {
        self.memory.id()
    }

    /// Where it begins, from the start of the buffer.
    #[inline]
    pub fn offset(&self) -> usize {
        self.from
    }

    /// Bytes that fit.
    #[inline]
    pub fn len(&self) -> usize {
        self.memory.bytes - self.from
    }

    /// Whether nothing fits any more.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The bytes, to be written. They are whatever was there before.
    #[inline]
    pub fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: inside the memory, initialised; exclusive: one room, behind the mbufs, `&mut self`.
        unsafe { slice::from_raw_parts_mut(self.memory.base.as_ptr().add(self.from), self.len()) }
    }

    /// Makes the first `n` bytes an immutable mbuf, charged to nobody; the room begins behind them.
    /// Nothing changes on an error: no descriptor is left.
    ///
    /// # Panics
    /// If the room has fewer bytes.
    #[inline]
    pub fn split(&mut self, n: usize, pool: &mut Pool) -> Result<Mbuf, NoBuffer> {
        assert!(n <= self.len(), "a split beyond the room");
        let len = u32::try_from(n).map_err(|_| NoBuffer)?;
        let home = pool.home_with_desc(Purpose::Receive)?;
        // SAFETY: inside the room, which begins behind them from now on (behind the mbufs).
        let m = unsafe { home.placed(Arc::clone(&self.memory), self.from, len) }.ok_or(NoBuffer)?;
        self.advance(n);
        Ok(m)
    }

    /// As [`Room::split`] of all that is left of the room.
    ///
    /// # Errors
    /// No descriptor is left; the bytes are lost, and the room is gone.
    #[inline]
    pub fn into_mbuf(self, pool: &mut Pool) -> Result<Mbuf, NoBuffer> {
        let len = u32::try_from(self.len()).map_err(|_| NoBuffer)?;
        let home = pool.home_with_desc(Purpose::Receive)?;
        let (memory, from) = self.end();
        // SAFETY: inside the memory; they were a room's, and whatever becomes a room begins behind them.
        unsafe { home.placed(memory, from, len) }.ok_or(NoBuffer)
    }

    /// The room is over, all of it written: its memory, and where it began.
    #[inline]
    fn end(self) -> (Arc<Memory>, usize) {
        let (from, bytes) = (self.from, self.memory.bytes);
        self.memory.high.store(bytes, Ordering::Relaxed);
        let room = ManuallyDrop::new(self);
        // SAFETY: taken out once, since the room is never dropped.
        let memory = unsafe { core::ptr::read(&raw const room.memory) };
        // Release: as in the drop of a room.
        memory.has_room.store(false, Ordering::Release);
        (memory, from)
    }

    /// As [`Room::split`], for a device that has no pool at hand where it writes: the first `n` bytes
    /// are filled, and become an mbuf later.
    ///
    /// # Panics
    /// If the room has fewer bytes.
    #[inline]
    pub fn fill(&mut self, n: usize) -> Filled {
        assert!(n <= self.len(), "filled beyond the room");
        let filled = Filled { memory: Arc::clone(&self.memory), from: self.from, bytes: n };
        self.advance(n);
        filled
    }

    /// Copies as many bytes as fit to the front; the room begins behind them. Returns how many.
    #[inline]
    pub fn write(&mut self, bytes: &[u8]) -> usize {
        let n = bytes.len().min(self.len());
        if let (Some(to), Some(from)) = (self.bytes().get_mut(..n), bytes.get(..n)) {
            to.copy_from_slice(from);
        }
        self.advance(n);
        n
    }

    /// As [`Room::write`], from the front of `m`.
    #[inline]
    pub fn write_mbuf(&mut self, m: &Mbuf) -> usize {
        let n = m.copy_to(0, self.bytes());
        self.advance(n);
        n
    }

    /// Overwrites the first `n` bytes (at most all) with zeroes: what landed here was not for the
    /// owner of this buffer.
    pub fn scrub(&mut self, n: usize) {
        let n = n.min(self.len());
        self.bytes().iter_mut().take(n).for_each(|b| *b = 0);
    }

    fn advance(&mut self, n: usize) {
        self.from += n;
        // Only the holder of the room writes it; its end releases it.
        self.memory.high.store(self.from, Ordering::Relaxed);
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        // Release: what was written through the room happened before the next one, or the owner.
        self.memory.has_room.store(false, Ordering::Release);
    }
}

impl core::fmt::Debug for Room {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Room").field("offset", &self.from).field("len", &self.len()).finish()
    }
}

impl Hold {
    /// Bytes that were written through rooms that are gone, to be read like those of any packet: by
    /// reference, so that they are never written again while it exists, or copied if the memory is only
    /// registered and so must not be referred to any longer than the hold exists. Errors: no descriptor
    /// or no memory is left, or a room is out.
    ///
    /// # Panics
    /// If the bytes are not in the buffer.
    pub fn written(&mut self, bytes: Range<usize>, pool: &mut Pool) -> Result<Chain, NoBuffer> {
        let memory = &self.memory;
        assert!(bytes.start <= bytes.end && bytes.end <= memory.bytes, "bytes beyond the buffer");
        if memory.has_room.load(Ordering::Acquire) {
            return Err(NoBuffer);
        }
        // SAFETY: checked to be inside, initialised; no room is out, and only `&mut self` makes one.
        let slice =
            unsafe { slice::from_raw_parts(memory.base.as_ptr().add(bytes.start), bytes.len()) };
        if matches!(memory.origin, Origin::Foreign | Origin::Lent(_)) {
            let copy = pool.alloc_chain(slice.len(), 0, Purpose::Receive);
            let mut copy = copy.or_else(|_| pool.alloc_chain(slice.len(), 0, Purpose::Control))?;
            copy.copy_from(0, slice);
            return Ok(copy);
        }
        let len = u32::try_from(slice.len()).map_err(|_| NoBuffer)?;
        let home = pool.home_with_desc(Purpose::Receive)?;
        // SAFETY: as above; from now on a room begins behind these bytes.
        let m = unsafe { home.placed(Arc::clone(memory), bytes.start, len) }.ok_or(NoBuffer)?;
        memory.high.fetch_max(bytes.end, Ordering::Relaxed);
        Ok(Chain::from(m))
    }
}

/// Bytes of a posted buffer that a device has filled ([`Room::fill`]), on their way to a packet. Nobody
/// writes them any more. Dropped, they are lost: a hole in the buffer.
pub struct Filled {
    memory: Arc<Memory>,
    from: usize,
    /// `from + bytes <= high`.
    bytes: usize,
}

impl Filled {
    /// How many.
    #[inline]
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// The bytes as an immutable mbuf, charged to nobody.
    ///
    /// # Errors
    /// No descriptor is left; the bytes are lost.
    #[inline]
    pub fn into_mbuf(self, pool: &mut Pool) -> Result<Mbuf, NoBuffer> {
        let len = u32::try_from(self.bytes).map_err(|_| NoBuffer)?;
        let home = pool.home_with_desc(Purpose::Receive)?;
        // SAFETY: the bytes were a room's until `Room::fill`, which made it begin behind them.
        unsafe { home.placed(self.memory, self.from, len) }.ok_or(NoBuffer)
    }
}

impl core::fmt::Debug for Filled {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Filled").field("offset", &self.from).field("len", &self.bytes).finish()
    }
}

impl Home {
    /// The first reference to a range of posted memory; `None` if no descriptor is at hand.
    ///
    /// # Safety
    /// The bytes are inside the memory, and no room covers them or will while the mbuf exists.
    unsafe fn placed(&mut self, memory: Arc<Memory>, from: usize, len: u32) -> Option<Mbuf> {
        // SAFETY: inside the memory, which the record keeps until its last reference is home; nobody
        // writes the bytes, as the caller promises.
        unsafe {
            let data = memory.base.as_ptr().add(from);
            self.adopt(data, len, Owner::Posted(memory), LENT, Purpose::Send)
        }
    }
}
