//! Unsafe code of mbufs: descriptors, storage, the remote-free list, and the release of a pool's memory.
//!
//! Ownership:
//! - An [`Mbuf`] owns one descriptor and has exclusive access to its fields. A [`List`] owns the descriptors
//!   linked by `next`.
//! - A descriptor in use (in an `Mbuf`, a `List` or the remote-free list) is one reference of its storage. A
//!   free descriptor is on `Arena::free_descs` without storage, or in `Arena::magazines`, bound to a free
//!   block.
//! - Storage without references is on the free list of its slab, or in `Arena::magazines`.
//! - [`Memory`] owns slabs, chunks of descriptors and records of external storage. It is dropped when no
//!   descriptor is in use: by `Arena`, or, if the pool was dropped before, with the last descriptor.
//!
//! Invariants, cited by name in the SAFETY comments:
//! - *alive*: while a descriptor is in use, its `Shared`, its chunk and its storage exist.
//! - *arena counts*: `refs` and `high_water` are written only through `&mut Arena`. A load of `refs` in any
//!   thread (Acquire) that returns 1 is exact: the one reference is the caller's own, and new references
//!   are only made from existing ones. The Release store of 1 happened after the last reads through the
//!   other references.
//! - *coverage*: while `refs` > 1, every reference ends at or before `high_water`. No reference covers the bytes after
//!   `high_water`, and they may be written through `&mut Arena`.
//! - *sums*: an entry of `Desc::sums` that is `Some` is the sum of the present bytes of its unit. Entries are written
//!   only through the single reference. A write to such storage clears or updates the entries of the units it touches,
//!   and never touches a unit with a known sum while `refs` > 1, not even after `high_water`. Therefore a unit with a
//!   known sum may be read whole through any reference that covers a part of it.
//! - *initialised*: blocks are zeroed when mapped, and only bytes are written to them.

#![allow(unsafe_code)]

use alloc::boxed::Box;
use alloc::sync::Arc;
use core::marker::PhantomData;
use core::mem::ManuallyDrop;
use core::ops::{Deref, DerefMut};
use core::ptr::{self, NonNull};
use core::slice;
use core::sync::atomic::Ordering;

use crate::wire::checksum::{UNIT_BYTES, UnitSum};

use crate::mbuf::arena::Memory;
use crate::mbuf::storage::{EXTERNAL, Kick, Purpose, ZEROES};
use crate::mbuf::sync::{AtomicIsize, AtomicPtr, AtomicU32, UnsafeCell, fence};

pub(crate) type Link = Option<NonNull<Desc>>;

/// A reference to a range of storage. One cache line.
#[repr(C, align(64))]
pub(crate) struct Desc {
    pub(crate) next: Link,
    pub(crate) storage: *mut Storage,
    /// First byte of the storage.
    pub(crate) data: *mut u8,
    /// The pool that the descriptor belongs to. Constant.
    pub(crate) shared: NonNull<Shared>,
    /// Offset of the range from `data`. `off + len <= capacity`.
    pub(crate) off: u32,
    /// Length of the range.
    pub(crate) len: u32,
    /// Bytes of the storage.
    pub(crate) capacity: u32,
    /// The known sums of the storage, one entry per unit; null if sums are not kept.
    pub(crate) sums: *mut Option<UnitSum>,
}

const _: () = assert!(size_of::<Desc>() == 64);

/// The record of a block, separate from its bytes.
#[repr(C)]
pub(crate) struct Storage {
    pub(crate) next_free: *mut Storage,
    pub(crate) data: *mut u8,
    /// References in use. Written through `&mut Arena` only.
    pub(crate) refs: AtomicU32,
    /// While `refs` > 1: the largest end of a range. Written through `&mut Arena` only.
    pub(crate) high_water: u32,
    /// Bytes of the storage.
    pub(crate) capacity: u32,
    pub(crate) slab: u16,
    pub(crate) class: u8,
    pub(crate) purpose: Purpose,
}

#[cfg(not(fulmar_loom))]
const _: () = assert!(size_of::<Storage>() == 32);

/// State shared by a pool and its mbufs in other threads.
pub(crate) struct Shared {
    /// The remote-free list: a stack of descriptors, or `awaited()` (empty), or `closed()`.
    pub(crate) remote: AtomicPtr<Desc>,
    /// After the drop of the pool: descriptors in use. Before it added its count: minus the descriptors
    /// freed after the list was closed.
    pub(crate) outstanding: AtomicIsize,
    /// Called on a remote free, once per `Arena::await_remote`.
    pub(crate) kick: UnsafeCell<Option<Arc<dyn Kick>>>,
    /// The memory of a pool that was dropped while descriptors were in use.
    pub(crate) memory: UnsafeCell<Memory>,
}

/// The remote-free list of a dropped pool. Not the address of any descriptor.
pub(crate) fn closed() -> *mut Desc {
    ptr::without_provenance_mut(1)
}

/// An empty remote-free list whose pool awaits a kick. Not the address of any descriptor.
pub(crate) fn awaited() -> *mut Desc {
    ptr::without_provenance_mut(2)
}

/// The first descriptor of a remote-free list.
pub(crate) fn first_of(head: *mut Desc) -> Link {
    if head == awaited() { None } else { NonNull::new(head) }
}

impl Shared {
    /// Pushes `n` linked descriptors, `first` to `last`, on the remote-free list of their pool.
    ///
    /// # Safety
    /// The caller passes ownership of these descriptors, which all belong to this pool.
    unsafe fn free_remote(
        shared: NonNull<Shared>,
        first: NonNull<Desc>,
        last: NonNull<Desc>,
        n: usize,
    ) {
        // SAFETY: alive: the descriptors are in use, so `shared` exists until the exchange or the
        // subtraction has succeeded, and is not accessed after it. The caller owns the descriptors until
        // then. Release orders the accesses to the storage before the pool's.
        unsafe {
            let remote = &(*shared.as_ptr()).remote;
            let mut head = remote.load(Ordering::Relaxed);
            while head != closed() {
                (*last.as_ptr()).next = first_of(head);
                let kick = if head == awaited() { Shared::load_kick(shared) } else { None };
                match remote.compare_exchange_weak(
                    head,
                    first.as_ptr(),
                    Ordering::Release,
                    Ordering::Relaxed,
                ) {
                    Ok(_) => return kick.iter().for_each(|k| k.kick()),
                    Err(now) => head = now,
                }
            }
            Shared::add_outstanding(shared, -(n as isize));
        }
    }

    /// Clones the kick, since `shared` may be freed before it is called.
    ///
    /// # Safety
    /// The caller owns a descriptor of this pool and has read `awaited()` from the head of its list.
    #[cold]
    unsafe fn load_kick(shared: NonNull<Shared>) -> Option<Arc<dyn Kick>> {
        // Acquire: `kick` was written before `awaited()` was stored for the first time (Release), and
        // is never written again.
        fence(Ordering::Acquire);
        // SAFETY: alive: a descriptor is in use; `kick` is not written again.
        unsafe { (*shared.as_ptr()).kick.with(|kick| (*kick).clone()) }
    }

    /// Adds `n` to the outstanding descriptors, and frees all memory when none is left.
    ///
    /// # Safety
    /// The remote-free list is closed. The caller either is the pool, which has stored its memory here, or
    /// gives up `-n` descriptors and never accesses them again.
    pub(crate) unsafe fn add_outstanding(shared: NonNull<Shared>, n: isize) {
        // SAFETY: alive: the caller's descriptors are not subtracted yet. The sum is 0 only after the pool
        // has added its count, so after `memory` was set (AcqRel), and only once; no other thread has
        // access then.
        unsafe {
            let before = (*shared.as_ptr()).outstanding.fetch_add(n, Ordering::AcqRel);
            if before.wrapping_add(n) == 0 {
                let memory = (*shared.as_ptr()).memory.with_mut(|m| core::mem::take(&mut *m));
                drop(Box::from_raw(shared.as_ptr()));
                drop(memory);
            }
        }
    }
}

/// A reference to a range of storage: a segment of a packet or of a stream.
///
/// Dropping it is always safe and pushes it on the remote-free list; [`Pool::free_mbuf`](crate::mbuf::Pool::free_mbuf)
/// is cheaper and is used on the data path.
///
/// ```text
///      headroom        len         tailroom
///   ┌────────────┬──────────────┬────────────┐ storage_bytes()
///   └────────────┴──────────────┴────────────┘
///                as_slice()
/// ```
#[repr(transparent)]
pub struct Mbuf(NonNull<Desc>);

// SAFETY: an Mbuf owns its descriptor; storage is freed through `&mut Arena` only (arena counts), and the
// bytes are plain bytes. An external owner is `Send`.
unsafe impl Send for Mbuf {}
// SAFETY: `&Mbuf` only reads: the descriptor, which is written through `&mut Mbuf` only; `refs`,
// which is atomic; and bytes, which are written only through the single reference (`&mut Mbuf`) or where
// no reference covers them (coverage).
unsafe impl Sync for Mbuf {}

impl Mbuf {
    #[inline]
    pub(crate) fn desc(&self) -> &Desc {
        // SAFETY: alive; an Mbuf owns its descriptor, and `&self` allows reading it.
        unsafe { self.0.as_ref() }
    }

    #[inline]
    pub(crate) fn desc_mut(&mut self) -> &mut Desc {
        // SAFETY: alive; an Mbuf owns its descriptor, and `&mut self` allows writing it.
        unsafe { self.0.as_mut() }
    }

    #[inline]
    pub(crate) fn into_raw(self) -> NonNull<Desc> {
        ManuallyDrop::new(self).0
    }

    /// The mbuf of a descriptor.
    ///
    /// # Safety
    /// The descriptor is in use, and the caller passes its ownership.
    #[inline]
    pub(crate) unsafe fn from_raw(d: NonNull<Desc>) -> Mbuf {
        Mbuf(d)
    }

    /// The purpose that the storage is charged to.
    #[inline]
    pub fn purpose(&self) -> Purpose {
        // SAFETY: alive; `purpose` is written only before the first reference exists.
        unsafe { (*self.desc().storage).purpose }
    }

    /// Whether the storage does not belong to the pool ([`Pool::external`](crate::mbuf::Pool::external),
    /// [`Pool::lent`](crate::mbuf::Pool::lent), [`Pool::share`](crate::mbuf::Pool::share)). External storage is never
    /// written.
    #[inline]
    pub fn is_external(&self) -> bool {
        // SAFETY: alive; `class` is written only while no reference exists.
        unsafe { (*self.desc().storage).class >= EXTERNAL }
    }

    /// Whether this is the only reference to its storage.
    #[inline]
    pub fn is_unique(&self) -> bool {
        // SAFETY: alive; `refs` is atomic. Acquire: see "arena counts".
        unsafe { (*self.desc().storage).refs.load(Ordering::Acquire) == 1 }
    }

    #[inline]
    fn is_writable(&self) -> bool {
        self.is_unique() && !self.is_external()
    }

    /// Whether another process may write the bytes ([`Lender`](crate::mbuf::Lender)). They can be copied out, but not
    /// borrowed.
    #[inline]
    pub fn is_volatile(&self) -> bool {
        ptr::eq(self.desc().data, ZEROES.as_ptr())
    }

    /// The bytes of the range. Must not be called if the mbuf is volatile ([`Mbuf::is_volatile`]).
    #[inline]
    pub fn as_slice(&self) -> &[u8] {
        debug_assert!(!self.is_volatile(), "volatile bytes are copied, not borrowed");
        let d = self.desc();
        // SAFETY: `off + len <= capacity`, alive and initialised. Bytes that a reference covers are not
        // written while it can be read (see `Sync`).
        unsafe { slice::from_raw_parts(d.data.add(d.off as usize), d.len as usize) }
    }

    /// The bytes [from, from + n) of the storage, for writing.
    ///
    /// # Safety
    /// `from + n <= capacity`, and the storage is writable, or the bytes are behind `high_water` and the
    /// caller has `&mut Arena`.
    #[inline]
    pub(crate) unsafe fn bytes_mut(&mut self, from: usize, n: usize) -> &mut [u8] {
        // SAFETY: inside the storage and initialised; exclusive by the caller's contract.
        unsafe { slice::from_raw_parts_mut(self.desc().data.add(from), n) }
    }

    /// As [`Mbuf::bytes_mut`], and clears the sums of the units touched.
    ///
    /// # Safety
    /// `from + n <= capacity` and the storage is writable.
    #[inline]
    unsafe fn unsummed_mut(&mut self, from: usize, n: usize) -> &mut [u8] {
        // SAFETY: the caller's contract.
        unsafe {
            self.forget_sums(from, n);
            self.bytes_mut(from, n)
        }
    }

    /// Clears the sums of the units that the bytes [from, from + n) of the storage touch.
    ///
    /// # Safety
    /// `from + n <= capacity`, and this is the only reference to the storage.
    #[inline]
    pub(crate) unsafe fn forget_sums(&mut self, from: usize, n: usize) {
        if !self.desc().sums.is_null() {
            // SAFETY: the caller's contract; sums are kept.
            unsafe { self.entries_mut(from, n) }.fill(None);
        }
    }

    /// The entries of the units that the bytes [from, from + n) of the storage touch.
    ///
    /// # Safety
    /// `from + n <= capacity`, sums are kept, and this is the only reference to the storage.
    unsafe fn entries_mut(&mut self, from: usize, n: usize) -> &mut [Option<UnitSum>] {
        let first = from / UNIT_BYTES;
        let count = if n == 0 { 0 } else { (from + n).div_ceil(UNIT_BYTES) - first };
        // SAFETY: storage has an entry for each of its units, initialised when sums were first kept;
        // alive; exclusive by the caller's contract.
        unsafe { slice::from_raw_parts_mut(self.desc().sums.add(first), count) }
    }

    /// The whole storage with the entries of its sums, which the caller has to update. `None` if the
    /// storage is shared or external, or sums are not kept.
    pub(crate) fn summed_mut(&mut self) -> Option<(&mut [u8], &mut [Option<UnitSum>])> {
        if self.desc().sums.is_null() || !self.is_writable() {
            return None;
        }
        let capacity = self.storage_bytes();
        // SAFETY: all of the storage, and all of its entries, which are separate memory; writable was
        // checked, and `&mut self` keeps it so.
        unsafe {
            let entries: *mut [Option<UnitSum>] = self.entries_mut(0, capacity);
            Some((self.bytes_mut(0, capacity), &mut *entries))
        }
    }

    /// Whether sums of the storage are kept.
    #[inline]
    pub(crate) fn keeps_sums(&self) -> bool {
        !self.desc().sums.is_null()
    }

    /// The sum and the bytes of unit `index` of the storage, if the sum is known. The unit may extend
    /// beyond the range.
    #[inline]
    pub(crate) fn known_unit(&self, index: usize) -> Option<(UnitSum, &[u8; UNIT_BYTES])> {
        let d = self.desc();
        if d.sums.is_null() || index >= d.capacity as usize / UNIT_BYTES {
            return None;
        }
        // SAFETY: sums: storage has an entry for each of its units, and entries are not written while
        // this reference can be read, nor are the bytes of a unit with a known sum.
        unsafe {
            let sum = (*d.sums.add(index))?;
            Some((sum, &*d.data.add(index * UNIT_BYTES).cast()))
        }
    }

    /// The bytes of the range for writing. `None` if the storage is shared or external.
    #[inline]
    pub fn as_mut_slice(&mut self) -> Option<&mut [u8]> {
        if !self.is_writable() {
            return None;
        }
        let (off, len) = (self.headroom(), self.len());
        // SAFETY: `off + len <= capacity`; writable was checked, and `&mut self` keeps it so.
        Some(unsafe { self.unsummed_mut(off, len) })
    }

    /// Extends the range by `n` bytes of headroom and returns them for writing. `None`, without a change,
    /// if the storage is shared or external or the headroom is too short.
    #[inline]
    pub fn prepend(&mut self, n: usize) -> Option<&mut [u8]> {
        if n > self.headroom() || !self.is_writable() {
            return None;
        }
        let d = self.desc_mut();
        d.off -= n as u32;
        d.len += n as u32;
        let off = d.off as usize;
        // SAFETY: the new range is inside the storage; writable was checked.
        Some(unsafe { self.unsummed_mut(off, n) })
    }

    /// Extends the range by `n` bytes of tailroom and returns them for writing. `None`, without a change,
    /// if the storage is shared or external or the tailroom is too short.
    #[inline(always)]
    pub fn append(&mut self, n: usize) -> Option<&mut [u8]> {
        if n > self.tailroom() || !self.is_writable() {
            return None;
        }
        let d = self.desc_mut();
        let end = (d.off + d.len) as usize;
        d.len += n as u32;
        // SAFETY: the new range is inside the storage; writable was checked.
        Some(unsafe { self.unsummed_mut(end, n) })
    }

    /// The tailroom, for a device or a copy to fill before [`Mbuf::set_len`]. Empty if the storage
    /// is shared or external.
    #[inline]
    pub fn spare_mut(&mut self) -> &mut [u8] {
        let spare = if self.is_writable() { self.tailroom() } else { 0 };
        let end = self.headroom() + self.len();
        // SAFETY: `end + tailroom == capacity`; writable was checked, or the slice is empty.
        unsafe { self.unsummed_mut(end, spare) }
    }

    /// Sets the length of the range.
    ///
    /// # Panics
    /// If `n` exceeds the storage, or the present length while the storage is shared or external.
    #[inline]
    pub fn set_len(&mut self, n: usize) {
        if n > self.len() {
            assert!(n - self.len() <= self.tailroom(), "set_len beyond the storage");
            assert!(self.is_writable(), "set_len grows shared storage");
        }
        self.desc_mut().len = n as u32;
    }
}

impl Drop for Mbuf {
    fn drop(&mut self) {
        let shared = self.desc().shared;
        // SAFETY: this Mbuf owns the descriptor and is being dropped.
        unsafe { Shared::free_remote(shared, self.0, self.0, 1) }
    }
}

/// A linked list of descriptors, which it owns: the segments of a chain.
#[derive(Default)]
pub(crate) struct List {
    head: Link,
    tail: Link,
}

// SAFETY: a list owns its descriptors as an Mbuf owns one.
unsafe impl Send for List {}
// SAFETY: as for Mbuf; `next` is written through `&mut List` only.
unsafe impl Sync for List {}

/// Mutable access to a segment of a list. Unlike a `&mut Mbuf` it cannot be used to swap the segment.
pub(crate) struct MbufMut<'a>(ManuallyDrop<Mbuf>, PhantomData<&'a mut List>);

impl Deref for MbufMut<'_> {
    type Target = Mbuf;
    fn deref(&self) -> &Mbuf {
        &self.0
    }
}

impl DerefMut for MbufMut<'_> {
    fn deref_mut(&mut self) -> &mut Mbuf {
        &mut self.0
    }
}

impl<'a> MbufMut<'a> {
    fn new(d: NonNull<Desc>) -> MbufMut<'a> {
        MbufMut(ManuallyDrop::new(Mbuf(d)), PhantomData)
    }

    /// [`Mbuf::as_mut_slice`] with the lifetime of the list.
    #[inline]
    pub(crate) fn into_slice(mut self) -> Option<&'a mut [u8]> {
        let bytes: *mut [u8] = self.as_mut_slice()?;
        // SAFETY: the list that owns the segment is borrowed for 'a, and this handle, which could
        // make a second reference, is consumed.
        Some(unsafe { &mut *bytes })
    }

    /// [`Mbuf::prepend`] with the lifetime of the list.
    #[inline]
    pub(crate) fn into_prepended(mut self, n: usize) -> Option<&'a mut [u8]> {
        let front: *mut [u8] = self.prepend(n)?;
        // SAFETY: the list that owns the segment is borrowed for 'a, and this handle, which could
        // make a second reference, is consumed.
        Some(unsafe { &mut *front })
    }
}

/// The segment of a link.
#[inline]
fn as_mbuf(d: &NonNull<Desc>) -> &Mbuf {
    // SAFETY: Mbuf is a transparent NonNull<Desc>; callers pass links of a borrowed list, which owns the
    // descriptor.
    unsafe { &*ptr::from_ref(d).cast::<Mbuf>() }
}

impl List {
    /// A list of linked descriptors. Its tail is unknown, so it can only be popped from the front.
    ///
    /// # Safety
    /// The caller passes ownership of the descriptors linked from `head` on.
    pub(crate) unsafe fn from_head(head: Link) -> List {
        List { head, tail: head }
    }

    /// A list of one segment.
    #[inline]
    pub(crate) fn single(m: Mbuf) -> List {
        let d = m.into_raw();
        // SAFETY: alive; the Mbuf owned its descriptor, now the list does.
        unsafe { (*d.as_ptr()).next = None };
        List { head: Some(d), tail: Some(d) }
    }

    #[inline]
    pub(crate) fn push_back(&mut self, m: Mbuf) {
        self.append(List::single(m));
    }

    /// Removes the segments one by one. Segments that are not removed leak: there is no drop code, for the
    /// benefit of loops that remove all.
    #[inline]
    pub(crate) fn drain(self) -> Drain {
        Drain { next: ManuallyDrop::new(self).head }
    }

    #[inline]
    pub(crate) fn push_front(&mut self, m: Mbuf) {
        let d = m.into_raw();
        // SAFETY: alive; the Mbuf owned its descriptor, now the list does.
        unsafe { (*d.as_ptr()).next = self.head };
        self.head = Some(d);
        self.tail = self.tail.or(self.head);
    }

    #[inline]
    pub(crate) fn append(&mut self, other: List) {
        let other = ManuallyDrop::new(other);
        match self.tail {
            // SAFETY: alive; both lists own their descriptors, and this one owns all from now on.
            Some(tail) => unsafe { (*tail.as_ptr()).next = other.head },
            None => self.head = other.head,
        }
        self.tail = other.tail.or(self.tail);
    }

    #[inline]
    pub(crate) fn pop_front(&mut self) -> Option<Mbuf> {
        let d = self.head?;
        // SAFETY: alive; the list owns its descriptors.
        self.head = unsafe { (*d.as_ptr()).next };
        if self.head.is_none() {
            self.tail = None;
        }
        Some(Mbuf(d))
    }

    /// Keeps the first `n` segments and returns the others.
    pub(crate) fn split_after(&mut self, n: usize) -> List {
        let Some(last) = n.checked_sub(1) else {
            return core::mem::take(self);
        };
        let mut link = self.head;
        for _ in 0..last {
            // SAFETY: alive; the list owns its descriptors.
            link = link.and_then(|d| unsafe { (*d.as_ptr()).next });
        }
        let Some(d) = link else { return List::default() };
        // SAFETY: as above.
        let head = unsafe { (*d.as_ptr()).next.take() };
        let tail = self.tail.replace(d);
        List { head, tail: head.and(tail) }
    }

    #[inline]
    pub(crate) fn front(&self) -> Option<&Mbuf> {
        self.head.as_ref().map(as_mbuf)
    }

    #[inline]
    pub(crate) fn back(&self) -> Option<&Mbuf> {
        self.tail.as_ref().map(as_mbuf)
    }

    #[inline]
    pub(crate) fn front_mut(&mut self) -> Option<MbufMut<'_>> {
        self.head.map(MbufMut::new)
    }

    #[inline]
    pub(crate) fn back_mut(&mut self) -> Option<MbufMut<'_>> {
        self.tail.map(MbufMut::new)
    }

    #[inline]
    pub(crate) fn iter(&self) -> RawIter<'_> {
        RawIter { next: self.head.as_ref() }
    }

    #[inline]
    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = MbufMut<'_>> {
        let mut next = self.head;
        core::iter::from_fn(move || {
            let d = next?;
            // SAFETY: alive; the list owns its descriptors and is borrowed for the iterator. The link is
            // read before the segment is returned.
            next = unsafe { (*d.as_ptr()).next };
            Some(MbufMut::new(d))
        })
    }
}

/// Iterator that removes the segments of a list.
pub(crate) struct Drain {
    next: Link,
}

impl Drain {
    /// The remaining segments.
    pub(crate) fn rest(self) -> List {
        // SAFETY: these linked descriptors belonged to the drained list.
        unsafe { List::from_head(self.next) }
    }
}

impl Iterator for Drain {
    type Item = Mbuf;
    #[inline]
    fn next(&mut self) -> Option<Mbuf> {
        let d = self.next?;
        // SAFETY: alive; the descriptors belonged to the list. The link is read before the segment is
        // returned.
        self.next = unsafe { (*d.as_ptr()).next };
        Some(Mbuf(d))
    }
}

/// The segments of a list, in order.
#[derive(Clone)]
pub(crate) struct RawIter<'a> {
    next: Option<&'a NonNull<Desc>>,
}

impl<'a> Iterator for RawIter<'a> {
    type Item = &'a Mbuf;
    #[inline]
    fn next(&mut self) -> Option<&'a Mbuf> {
        let d = self.next?;
        // SAFETY: alive; the list owns its descriptors and is borrowed for 'a.
        self.next = unsafe { (*d.as_ptr()).next.as_ref() };
        Some(as_mbuf(d))
    }
}

impl Drop for List {
    /// Frees each run of descriptors of one pool by one push on its remote-free list.
    fn drop(&mut self) {
        let mut rest = self.head.take();
        while let Some(first) = rest {
            // SAFETY: alive; the list owned its descriptors. The link behind the run is read before the
            // run is freed.
            unsafe {
                let shared = (*first.as_ptr()).shared;
                let (mut last, mut n) = (first, 1);
                rest = (*last.as_ptr()).next;
                while let Some(d) = rest
                    && (*d.as_ptr()).shared == shared
                {
                    (last, n) = (d, n + 1);
                    rest = (*d.as_ptr()).next;
                }
                Shared::free_remote(shared, first, last, n);
            }
        }
    }
}
