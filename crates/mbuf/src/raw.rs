//! The unsafe heart: descriptors, storage, slabs, the remote-free list, and the end of a pool.
//!
//! Who owns what:
//! - A [`Mbuf`] owns one descriptor: it alone reads and writes the descriptor's fields. A [`List`]
//!   owns the descriptors that hang together by `next`.
//! - A descriptor that is out (held by a `Mbuf`, a `List` or the remote-free list) holds one count
//!   of its storage. Descriptors at home hang on `Home::free_descs` and hold nothing, or wait in
//!   `Home::ready`, joined to a block without references.
//! - Storage whose count is 0 hangs on the free list of its slab, or waits in `Home::ready`.
//! - [`Memory`] owns slabs, chunks of descriptors and external owners. It is dropped when no
//!   descriptor is out: by `Home` itself, or, if the pool goes first, by whoever drops the last.
//!
//! Invariants, named in the SAFETY sentences:
//! - *alive*: while a descriptor is out, its `Shared`, its own chunk and its storage exist.
//! - *counts at home*: `refs` and `high_water` are written only through `&mut Home`. A load of
//!   `refs` elsewhere (Acquire) that yields 1 is exact, because the holder's own reference is that
//!   one and new references are made from existing ones only; the Release store that brought it to
//!   1 happened after the other references' last reads.
//! - *coverage*: while `refs` > 1, every reference ends at or before `high_water`; bytes behind it
//!   are covered by nobody and may be written at home.
//! - *sums*: an entry of `Desc::sums` that is `Some` is the sum of its unit's bytes as they are. It
//!   is written only through `&mut` to the one reference; whoever writes bytes of such storage
//!   forgets or renews the entries of the units touched, and nobody writes into a unit whose sum is
//!   known while `refs` > 1, not even behind `high_water`. So a known unit may be read whole through
//!   any reference that covers a part of it.
//! - *initialised*: storage of the pool is zeroed when mapped and only ever overwritten with bytes.

#![allow(unsafe_code)]

use alloc::boxed::Box;
use alloc::sync::Arc;
use core::marker::PhantomData;
use core::mem::ManuallyDrop;
use core::ops::{Deref, DerefMut};
use core::ptr::{self, NonNull};
use core::slice;
use core::sync::atomic::Ordering;

use fulmar_wire::checksum::{UNIT_BYTES, UnitSum};

use crate::home::Memory;
use crate::storage::{EXTERNAL, Kick, Purpose, ZEROES};
use crate::sync::{AtomicIsize, AtomicPtr, AtomicU32, UnsafeCell, fence};

pub(crate) type Link = Option<NonNull<Desc>>;

/// One reference to a range of one storage. One cache line.
#[repr(C, align(64))]
pub(crate) struct Desc {
    pub(crate) next: Link,
    pub(crate) storage: *mut Storage,
    /// First byte of the storage.
    pub(crate) data: *mut u8,
    /// The pool that the descriptor belongs to. Never changes.
    pub(crate) home: NonNull<Shared>,
    /// Where the range starts, from `data`. `off + len <= room`.
    pub(crate) off: u32,
    /// Bytes of the range.
    pub(crate) len: u32,
    /// Bytes of the storage.
    pub(crate) room: u32,
    /// What is known about the sums of the storage, one entry per unit; null if nothing is kept.
    pub(crate) sums: *mut Option<UnitSum>,
}

const _: () = assert!(size_of::<Desc>() == 64);

/// What is known about one block, kept apart from its bytes.
#[repr(C)]
pub(crate) struct Storage {
    pub(crate) next_free: *mut Storage,
    pub(crate) data: *mut u8,
    /// References that are out. Written at home only.
    pub(crate) refs: AtomicU32,
    /// While `refs` > 1: the end of the furthest range. Written at home only.
    pub(crate) high_water: u32,
    /// Bytes of the storage.
    pub(crate) room: u32,
    pub(crate) slab: u16,
    pub(crate) class: u8,
    pub(crate) purpose: Purpose,
}

#[cfg(not(fulmar_loom))]
const _: () = assert!(size_of::<Storage>() == 32);

/// What a pool and its mbufs on other threads have in common.
pub(crate) struct Shared {
    /// The remote-free list: a stack of descriptors, or `awaited()` (empty), or `closed()`.
    pub(crate) remote: AtomicPtr<Desc>,
    /// After the pool is gone: descriptors still out. Before: minus those that came too late for
    /// the list.
    pub(crate) owed: AtomicIsize,
    /// Who is told of a remote free, once each time that the pool asks for it.
    pub(crate) kick: UnsafeCell<Option<Arc<dyn Kick>>>,
    /// Set by a pool that goes while descriptors are out.
    pub(crate) memory: UnsafeCell<Memory>,
}

/// The end of a remote-free list whose pool is gone. No descriptor has this address.
pub(crate) fn closed() -> *mut Desc {
    ptr::without_provenance_mut(1)
}

/// An empty remote-free list whose pool wants to be told of what comes. No descriptor has this address.
pub(crate) fn awaited() -> *mut Desc {
    ptr::without_provenance_mut(2)
}

/// What hangs on a remote-free list with this head.
pub(crate) fn first_of(head: *mut Desc) -> Link {
    if head == awaited() { None } else { NonNull::new(head) }
}

impl Shared {
    /// Gives `count` linked descriptors, `first` to `last`, back to their pool.
    ///
    /// # Safety
    /// The caller owns these descriptors, all of this home, and gives them up.
    unsafe fn give_back(
        home: NonNull<Shared>,
        first: NonNull<Desc>,
        last: NonNull<Desc>,
        n: usize,
    ) {
        // SAFETY: alive: the descriptors are still out, so `home` exists until the exchange or the
        // subtraction has succeeded; nothing of it is touched after that. The descriptors are ours
        // until then. Release hands our reads and writes of the storage to the pool.
        unsafe {
            let remote = &(*home.as_ptr()).remote;
            let mut head = remote.load(Ordering::Relaxed);
            while head != closed() {
                (*last.as_ptr()).next = first_of(head);
                let kick = if head == awaited() { Shared::kick_of(home) } else { None };
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
            Shared::settle(home, -(n as isize));
        }
    }

    /// Who is to be told. Cloned, since `home` may be gone when it is.
    ///
    /// # Safety
    /// The caller owns a descriptor of this home and has seen `awaited()` at the head of its list.
    #[cold]
    unsafe fn kick_of(home: NonNull<Shared>) -> Option<Arc<dyn Kick>> {
        // Acquire: `kick` was written before `awaited()` was stored for the first time (Release), and
        // is never written again.
        fence(Ordering::Acquire);
        // SAFETY: alive: a descriptor is out; nobody writes `kick` any more.
        unsafe { (*home.as_ptr()).kick.with(|kick| (*kick).clone()) }
    }

    /// Adds to what is owed and frees everything when nothing is.
    ///
    /// # Safety
    /// The remote list is closed; the caller either is the pool, which has put its memory here, or
    /// owned `-n` descriptors that it never touches again.
    pub(crate) unsafe fn settle(home: NonNull<Shared>, n: isize) {
        // SAFETY: alive: what the caller brings is counted only now. The sum is 0 only after the
        // pool has added its count, thus after `memory` was set (AcqRel), and only once: by the
        // last one, who is alone then.
        unsafe {
            let before = (*home.as_ptr()).owed.fetch_add(n, Ordering::AcqRel);
            if before.wrapping_add(n) == 0 {
                let memory = (*home.as_ptr()).memory.with_mut(|m| core::mem::take(&mut *m));
                drop(Box::from_raw(home.as_ptr()));
                drop(memory);
            }
        }
    }
}

/// One reference to a range of one storage: a segment of a packet or of a stream.
///
/// Dropping it is always safe and sends it home over the remote-free list; on the data path give
/// it to [`crate::Pool::free_mbuf`], which is cheaper.
///
/// ```text
///      headroom        len         tailroom
///   ┌────────────┬──────────────┬────────────┐ storage_bytes()
///   └────────────┴──────────────┴────────────┘
///                as_slice()
/// ```
#[repr(transparent)]
pub struct Mbuf(NonNull<Desc>);

// SAFETY: a Mbuf owns its descriptor; storage may be freed at home only (counts at home), and the
// bytes are plain bytes. An external owner is `Send`.
unsafe impl Send for Mbuf {}
// SAFETY: `&Mbuf` only reads: the descriptor, which is written through `&mut Mbuf` only; `refs`,
// which is atomic; and bytes, which are written only while unique (needs `&mut Mbuf`) or where no
// reference covers them (coverage).
unsafe impl Sync for Mbuf {}

impl Mbuf {
    #[inline]
    pub(crate) fn desc(&self) -> &Desc {
        // SAFETY: alive; a Mbuf owns its descriptor, and `&self` allows reading it.
        unsafe { self.0.as_ref() }
    }

    #[inline]
    pub(crate) fn desc_mut(&mut self) -> &mut Desc {
        // SAFETY: alive; a Mbuf owns its descriptor, and `&mut self` allows writing it.
        unsafe { self.0.as_mut() }
    }

    #[inline]
    pub(crate) fn into_raw(self) -> NonNull<Desc> {
        ManuallyDrop::new(self).0
    }

    /// Makes the handle of a descriptor.
    ///
    /// # Safety
    /// The descriptor is out, and the caller, who owns it, gives it up.
    #[inline]
    pub(crate) unsafe fn from_raw(d: NonNull<Desc>) -> Mbuf {
        Mbuf(d)
    }

    /// What the storage is charged to.
    #[inline]
    pub fn purpose(&self) -> Purpose {
        // SAFETY: alive; `purpose` is written only before the first reference exists.
        unsafe { (*self.desc().storage).purpose }
    }

    /// Whether the memory belongs to someone else ([`crate::Pool::external`], [`crate::Pool::lent`]);
    /// it is never written.
    #[inline]
    pub fn is_external(&self) -> bool {
        // SAFETY: alive; `class` is written only while no reference exists.
        unsafe { (*self.desc().storage).class >= EXTERNAL }
    }

    /// Whether this is the only reference to its storage.
    #[inline]
    pub fn is_unique(&self) -> bool {
        // SAFETY: alive; `refs` is atomic. Acquire: see "counts at home".
        unsafe { (*self.desc().storage).refs.load(Ordering::Acquire) == 1 }
    }

    #[inline]
    fn is_writable(&self) -> bool {
        self.is_unique() && !self.is_external()
    }

    /// Whether [`Mbuf::as_slice`] shows zeroes in place of the bytes: the kernel alone may read them, or
    /// another process may write them.
    #[inline]
    pub fn is_opaque(&self) -> bool {
        ptr::eq(self.desc().data, ZEROES.as_ptr())
    }

    /// The bytes; not for those that another process may write ([`Mbuf::is_volatile`]), which show zeroes.
    #[inline]
    pub fn as_slice(&self) -> &[u8] {
        debug_assert!(!self.is_volatile(), "volatile bytes are copied, not borrowed");
        let d = self.desc();
        // SAFETY: `off + len <= room`, alive and initialised. Nobody writes bytes that a reference
        // covers while it can be read (see `Sync`).
        unsafe { slice::from_raw_parts(d.data.add(d.off as usize), d.len as usize) }
    }

    /// The bytes [from, from + n) of the storage, for writing.
    ///
    /// # Safety
    /// `from + n <= room` and the storage is writable, or the bytes are behind `high_water` and
    /// the caller holds the home.
    #[inline]
    pub(crate) unsafe fn bytes_mut(&mut self, from: usize, n: usize) -> &mut [u8] {
        // SAFETY: inside the storage and initialised; exclusive by what the caller promises.
        unsafe { slice::from_raw_parts_mut(self.desc().data.add(from), n) }
    }

    /// As [`Mbuf::bytes_mut`], and forgets the sums of the units touched.
    ///
    /// # Safety
    /// `from + n <= room` and the storage is writable.
    #[inline]
    unsafe fn unsummed_mut(&mut self, from: usize, n: usize) -> &mut [u8] {
        // SAFETY: as the caller promises.
        unsafe {
            self.forget_sums(from, n);
            self.bytes_mut(from, n)
        }
    }

    /// Forgets the sums of the units that the bytes [from, from + n) of the storage touch.
    ///
    /// # Safety
    /// `from + n <= room`, and this is the only reference to the storage.
    #[inline]
    pub(crate) unsafe fn forget_sums(&mut self, from: usize, n: usize) {
        if !self.desc().sums.is_null() {
            // SAFETY: as the caller promises; sums are kept.
            unsafe { self.entries_mut(from, n) }.fill(None);
        }
    }

    /// The entries of the units that the bytes [from, from + n) of the storage touch.
    ///
    /// # Safety
    /// `from + n <= room`, sums are kept, and this is the only reference to the storage.
    unsafe fn entries_mut(&mut self, from: usize, n: usize) -> &mut [Option<UnitSum>] {
        let first = from / UNIT_BYTES;
        let count = if n == 0 { 0 } else { (from + n).div_ceil(UNIT_BYTES) - first };
        // SAFETY: a storage has an entry for each of its units, initialised when they were first
        // kept; alive; exclusive by what the caller promises.
        unsafe { slice::from_raw_parts_mut(self.desc().sums.add(first), count) }
    }

    /// The whole storage with the entries of its sums, for a writer who keeps them right. `None` if
    /// the storage is shared or external or keeps no sums.
    pub(crate) fn summed_mut(&mut self) -> Option<(&mut [u8], &mut [Option<UnitSum>])> {
        if self.desc().sums.is_null() || !self.is_writable() {
            return None;
        }
        let room = self.storage_bytes();
        // SAFETY: all of the storage, and all of its entries, which are other memory; writable was
        // checked, and `&mut self` keeps it so.
        unsafe {
            let entries: *mut [Option<UnitSum>] = self.entries_mut(0, room);
            Some((self.bytes_mut(0, room), &mut *entries))
        }
    }

    /// Whether sums may be known.
    #[inline]
    pub(crate) fn keeps_sums(&self) -> bool {
        !self.desc().sums.is_null()
    }

    /// The sum and the bytes of unit `index` of the storage, if the sum is known. A part of the unit
    /// may lie outside of the range.
    #[inline]
    pub(crate) fn known_unit(&self, index: usize) -> Option<(UnitSum, &[u8; UNIT_BYTES])> {
        let d = self.desc();
        if d.sums.is_null() || index >= d.room as usize / UNIT_BYTES {
            return None;
        }
        // SAFETY: sums: a storage has an entry for each of its units, and nobody writes entries
        // while this reference can be read. Bytes of a known unit are not written meanwhile.
        unsafe {
            let sum = (*d.sums.add(index))?;
            Some((sum, &*d.data.add(index * UNIT_BYTES).cast()))
        }
    }

    /// The bytes for writing, or `None` if the storage is shared or external.
    #[inline]
    pub fn as_mut_slice(&mut self) -> Option<&mut [u8]> {
        if !self.is_writable() {
            return None;
        }
        let (off, len) = (self.headroom(), self.len());
        // SAFETY: `off + len <= room`; writable was checked, and `&mut self` keeps it so.
        Some(unsafe { self.unsummed_mut(off, len) })
    }

    /// Takes `n` bytes of headroom into the range and returns them to be written. `None`, and
    /// nothing changes, if the storage is shared or external or the headroom is shorter.
    #[inline]
    pub fn prepend(&mut self, n: usize) -> Option<&mut [u8]> {
        if n > self.headroom() || !self.is_writable() {
            return None;
        }
        let d = self.desc_mut();
        d.off -= n as u32;
        d.len += n as u32;
        let off = d.off as usize;
        // SAFETY: the new range lies inside the storage; writable was checked.
        Some(unsafe { self.unsummed_mut(off, n) })
    }

    /// Takes `n` bytes of tailroom into the range and returns them to be written. `None`, and
    /// nothing changes, if the storage is shared or external or the tailroom is shorter.
    #[inline(always)]
    pub fn append(&mut self, n: usize) -> Option<&mut [u8]> {
        if n > self.tailroom() || !self.is_writable() {
            return None;
        }
        let d = self.desc_mut();
        let end = (d.off + d.len) as usize;
        d.len += n as u32;
        // SAFETY: the new range lies inside the storage; writable was checked.
        Some(unsafe { self.unsummed_mut(end, n) })
    }

    /// The tailroom, for a device or a copy to fill before [`Mbuf::set_len`]. Empty if the storage
    /// is shared or external.
    #[inline]
    pub fn spare_mut(&mut self) -> &mut [u8] {
        let spare = if self.is_writable() { self.tailroom() } else { 0 };
        let end = self.headroom() + self.len();
        // SAFETY: `end + tailroom == room`; writable was checked, or the slice is empty.
        unsafe { self.unsummed_mut(end, spare) }
    }

    /// Sets the length of the range; its start stays.
    ///
    /// # Panics
    /// If `n` reaches behind the storage, or beyond the present length of a storage that is shared
    /// or external (its bytes there may be another's).
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
        let home = self.desc().home;
        // SAFETY: this Mbuf owns the descriptor and is going.
        unsafe { Shared::give_back(home, self.0, self.0, 1) }
    }
}

/// Descriptors linked by `next`: the skeleton of a chain. Owns them.
#[derive(Default)]
pub(crate) struct List {
    head: Link,
    tail: Link,
}

// SAFETY: a list owns its descriptors as a Mbuf owns one.
unsafe impl Send for List {}
// SAFETY: as for Mbuf; `next` is written through `&mut List` only.
unsafe impl Sync for List {}

/// `&mut Mbuf` for a segment inside a list: it cannot be replaced by another.
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

    /// [`Mbuf::as_mut_slice`], returning bytes that outlive this handle.
    #[inline]
    pub(crate) fn into_slice(mut self) -> Option<&'a mut [u8]> {
        let bytes: *mut [u8] = self.as_mut_slice()?;
        // SAFETY: the list that owns the segment is borrowed for 'a, and this handle, which could
        // make a second reference, is gone.
        Some(unsafe { &mut *bytes })
    }

    /// [`Mbuf::prepend`], returning bytes that outlive this handle.
    #[inline]
    pub(crate) fn into_prepended(mut self, n: usize) -> Option<&'a mut [u8]> {
        let front: *mut [u8] = self.prepend(n)?;
        // SAFETY: the list that owns the segment is borrowed for 'a, and this handle, which could
        // make a second reference, is gone.
        Some(unsafe { &mut *front })
    }
}

/// The handle in a link, seen as the segment that it stands for.
#[inline]
fn as_mbuf(d: &NonNull<Desc>) -> &Mbuf {
    // SAFETY: Mbuf is a transparent NonNull<Desc>; callers pass links of a list that they borrow,
    // which owns the descriptor.
    unsafe { &*ptr::from_ref(d).cast::<Mbuf>() }
}

impl List {
    /// A list that can only be popped from the front: its end is not known.
    ///
    /// # Safety
    /// The caller owns the descriptors that hang together from `head` on, and gives them up.
    pub(crate) unsafe fn from_head(head: Link) -> List {
        List { head, tail: head }
    }

    /// A list of one.
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

    /// The segments, taken one by one. What is not taken leaks, which spares the loops that take
    /// all of them the bookkeeping of a drop.
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
            // SAFETY: alive; both lists own their descriptors, from now on this one all.
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
            // SAFETY: alive; the list owns its descriptors and is borrowed for the iterator. The
            // link is read before the segment is handed out.
            next = unsafe { (*d.as_ptr()).next };
            Some(MbufMut::new(d))
        })
    }
}

/// The segments of a list, taken off.
pub(crate) struct Drain {
    next: Link,
}

impl Drain {
    /// The segments that were not taken, as a list.
    pub(crate) fn rest(self) -> List {
        // SAFETY: what hangs together here belonged to the list that was drained.
        unsafe { List::from_head(self.next) }
    }
}

impl Iterator for Drain {
    type Item = Mbuf;
    #[inline]
    fn next(&mut self) -> Option<Mbuf> {
        let d = self.next?;
        // SAFETY: alive; the descriptors belonged to the list. The link is read before the segment
        // is handed out.
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
    /// Sends runs of descriptors of one home back in one push each.
    fn drop(&mut self) {
        let mut rest = self.head.take();
        while let Some(first) = rest {
            // SAFETY: alive; the list owned its descriptors. The link behind the run is read
            // before the run is given up.
            unsafe {
                let home = (*first.as_ptr()).home;
                let (mut last, mut n) = (first, 1);
                rest = (*last.as_ptr()).next;
                while let Some(d) = rest
                    && (*d.as_ptr()).home == home
                {
                    (last, n) = (d, n + 1);
                    rest = (*d.as_ptr()).next;
                }
                Shared::give_back(home, first, last, n);
            }
        }
    }
}
