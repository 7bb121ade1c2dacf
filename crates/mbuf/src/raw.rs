//! The unsafe heart: descriptors, storage, slabs, the remote-free list, and the end of a pool.
//!
//! Who owns what:
//! - A [`Mbuf`] owns one descriptor: it alone reads and writes the descriptor's fields. A [`List`]
//!   owns the descriptors that hang together by `next`.
//! - A descriptor that is out (held by a `Mbuf`, a `List` or the remote-free list) holds one count
//!   of its storage. Descriptors at home hang on `Home::free_descs` and hold nothing.
//! - Storage whose count is 0 hangs on the free list of its slab.
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
//! - *initialised*: storage of the pool is zeroed when mapped and only ever overwritten with bytes.

#![allow(unsafe_code)]

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::cell::UnsafeCell;
use core::marker::PhantomData;
use core::mem::ManuallyDrop;
use core::ops::{Deref, DerefMut};
use core::ptr::{self, NonNull};
use core::slice;
use core::sync::atomic::{AtomicIsize, AtomicPtr, AtomicU32, Ordering};

use crate::storage::{CLASS_BYTES, CLASSES, EXTERNAL, External, Purpose, SLAB_BYTES};
use crate::sys::Region;

/// Descriptors of one chunk: 16 KiB.
pub(crate) const CHUNK_DESCS: usize = if cfg!(miri) { 16 } else { 256 };

/// "No slab" in the lists of slabs; never an index, because a pool has fewer.
const NO_SLAB: u16 = u16::MAX;

/// The most slabs of one pool.
pub(crate) const MAX_SLABS: usize = NO_SLAB as usize;

type Link = Option<NonNull<Desc>>;

/// One reference to a range of one storage. One cache line.
#[repr(C, align(64))]
struct Desc {
    next: Link,
    storage: *mut Storage,
    /// First byte of the storage.
    data: *mut u8,
    /// The pool that the descriptor belongs to. Never changes.
    home: NonNull<Shared>,
    /// Where the range starts, from `data`. `off + len <= room`.
    off: u32,
    /// Bytes of the range.
    len: u32,
    /// Bytes of the storage.
    room: u32,
}

const _: () = assert!(size_of::<Desc>() == 64);

/// What is known about one block, kept apart from its bytes.
#[repr(C)]
struct Storage {
    next_free: *mut Storage,
    data: *mut u8,
    /// References that are out. Written at home only.
    refs: AtomicU32,
    /// While `refs` > 1: the end of the furthest range. Written at home only.
    high_water: u32,
    /// Bytes of the storage.
    room: u32,
    slab: u16,
    class: u8,
    purpose: Purpose,
}

const _: () = assert!(size_of::<Storage>() == 32);

/// Storage that the pool does not own. `storage` is first, so a pointer to it is a pointer to this.
#[repr(C)]
struct ExternalStorage {
    storage: Storage,
    owner: Option<NonNull<dyn External>>,
}

/// 2 MiB cut into blocks of one class.
struct Slab {
    region: Region,
    blocks: *mut [Storage],
    free_list: *mut Storage,
    free: u32,
    total: u32,
    class: u8,
    /// The next slab of this class that has a free block.
    next: u16,
}

/// Everything that mbufs point into.
#[derive(Default)]
struct Memory {
    slabs: Vec<Slab>,
    chunks: Vec<*mut [Desc]>,
    externals: Vec<NonNull<ExternalStorage>>,
}

/// What a pool and its mbufs on other threads have in common.
struct Shared {
    /// The remote-free list: a stack of descriptors, or `closed()`.
    remote: AtomicPtr<Desc>,
    /// After the pool is gone: descriptors still out. Before: minus those that came too late for
    /// the list.
    owed: AtomicIsize,
    /// Set by a pool that goes while descriptors are out.
    memory: UnsafeCell<Memory>,
}

/// The end of a remote-free list whose pool is gone. No descriptor has this address.
fn closed() -> *mut Desc {
    ptr::without_provenance_mut(1)
}

// ---------------------------------------------------------------------------------------------
// Remote free

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
                (*last.as_ptr()).next = NonNull::new(head);
                match remote.compare_exchange_weak(
                    head,
                    first.as_ptr(),
                    Ordering::Release,
                    Ordering::Relaxed,
                ) {
                    Ok(_) => return,
                    Err(now) => head = now,
                }
            }
            Shared::settle(home, -(n as isize));
        }
    }

    /// Adds to what is owed and frees everything when nothing is.
    ///
    /// # Safety
    /// The remote list is closed; the caller either is the pool, which has put its memory here, or
    /// owned `-n` descriptors that it never touches again.
    unsafe fn settle(home: NonNull<Shared>, n: isize) {
        // SAFETY: alive: what the caller brings is counted only now. The sum is 0 only after the
        // pool has added its count, thus after `memory` was set (AcqRel), and only once: by the
        // last one, who is alone then.
        unsafe {
            let before = (*home.as_ptr()).owed.fetch_add(n, Ordering::AcqRel);
            if before.wrapping_add(n) == 0 {
                drop(Box::from_raw(home.as_ptr()));
            }
        }
    }
}

// ---------------------------------------------------------------------------------------------
// Mbuf

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
    fn desc(&self) -> &Desc {
        // SAFETY: alive; a Mbuf owns its descriptor, and `&self` allows reading it.
        unsafe { self.0.as_ref() }
    }

    #[inline]
    fn desc_mut(&mut self) -> &mut Desc {
        // SAFETY: alive; a Mbuf owns its descriptor, and `&mut self` allows writing it.
        unsafe { self.0.as_mut() }
    }

    #[inline]
    fn into_raw(self) -> NonNull<Desc> {
        ManuallyDrop::new(self).0
    }

    /// Bytes of the range.
    #[inline]
    pub fn len(&self) -> usize {
        self.desc().len as usize
    }

    /// Whether the range has no bytes.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.desc().len == 0
    }

    /// Bytes of storage before the range. They can be used only if the storage is unique.
    #[inline]
    pub fn headroom(&self) -> usize {
        self.desc().off as usize
    }

    /// Bytes of storage behind the range. They can be used only if the storage is unique, or by
    /// [`crate::Pool::append_tail`].
    #[inline]
    pub fn tailroom(&self) -> usize {
        let d = self.desc();
        (d.room - d.off - d.len) as usize
    }

    /// Bytes of the whole storage: what the pool charges while any reference to it exists.
    #[inline]
    pub fn storage_bytes(&self) -> usize {
        self.desc().room as usize
    }

    /// What the storage is charged to.
    #[inline]
    pub fn purpose(&self) -> Purpose {
        // SAFETY: alive; `purpose` is written only before the first reference exists.
        unsafe { (*self.desc().storage).purpose }
    }

    /// Whether the memory belongs to someone else ([`crate::Pool::external`]); it is never written.
    #[inline]
    pub fn is_external(&self) -> bool {
        // SAFETY: alive; `class` is written only while no reference exists.
        unsafe { (*self.desc().storage).class == EXTERNAL }
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

    /// The bytes.
    #[inline]
    pub fn as_slice(&self) -> &[u8] {
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
    unsafe fn bytes_mut(&mut self, from: usize, n: usize) -> &mut [u8] {
        // SAFETY: inside the storage and initialised; exclusive by what the caller promises.
        unsafe { slice::from_raw_parts_mut(self.desc().data.add(from), n) }
    }

    /// The bytes for writing, or `None` if the storage is shared or external.
    #[inline]
    pub fn as_mut_slice(&mut self) -> Option<&mut [u8]> {
        if !self.is_writable() {
            return None;
        }
        let (off, len) = (self.headroom(), self.len());
        // SAFETY: `off + len <= room`; writable was checked, and `&mut self` keeps it so.
        Some(unsafe { self.bytes_mut(off, len) })
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
        Some(unsafe { self.bytes_mut(off, n) })
    }

    /// Takes `n` bytes of tailroom into the range and returns them to be written. `None`, and
    /// nothing changes, if the storage is shared or external or the tailroom is shorter.
    #[inline]
    pub fn append(&mut self, n: usize) -> Option<&mut [u8]> {
        if n > self.tailroom() || !self.is_writable() {
            return None;
        }
        let d = self.desc_mut();
        let end = (d.off + d.len) as usize;
        d.len += n as u32;
        // SAFETY: the new range lies inside the storage; writable was checked.
        Some(unsafe { self.bytes_mut(end, n) })
    }

    /// The tailroom, for a device or a copy to fill before [`Mbuf::set_len`]. Empty if the storage
    /// is shared or external.
    #[inline]
    pub fn spare_mut(&mut self) -> &mut [u8] {
        let spare = if self.is_writable() { self.tailroom() } else { 0 };
        let end = self.headroom() + self.len();
        // SAFETY: `end + tailroom == room`; writable was checked, or the slice is empty.
        unsafe { self.bytes_mut(end, spare) }
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

    /// Removes up to `n` bytes from the front.
    #[inline]
    pub fn trim_front(&mut self, n: usize) {
        let d = self.desc_mut();
        let n = n.min(d.len as usize) as u32;
        d.off += n;
        d.len -= n;
    }

    /// Removes up to `n` bytes from the back.
    #[inline]
    pub fn trim_back(&mut self, n: usize) {
        let d = self.desc_mut();
        d.len -= n.min(d.len as usize) as u32;
    }

    /// Keeps at most the first `len` bytes.
    #[inline]
    pub fn truncate(&mut self, len: usize) {
        let d = self.desc_mut();
        d.len = len.min(d.len as usize) as u32;
    }
}

impl Drop for Mbuf {
    fn drop(&mut self) {
        let home = self.desc().home;
        // SAFETY: this Mbuf owns the descriptor and is going.
        unsafe { Shared::give_back(home, self.0, self.0, 1) }
    }
}

impl core::fmt::Debug for Mbuf {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Mbuf")
            .field("off", &self.headroom())
            .field("len", &self.len())
            .field("storage", &self.storage_bytes())
            .field("unique", &self.is_unique())
            .finish()
    }
}

// ---------------------------------------------------------------------------------------------
// List

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
    #[inline]
    pub(crate) fn push_back(&mut self, m: Mbuf) {
        let d = m.into_raw();
        self.append(List { head: Some(d), tail: Some(d) }.ending());
    }

    /// A list whose last descriptor ends it.
    #[inline]
    fn ending(self) -> List {
        if let Some(tail) = self.tail {
            // SAFETY: alive; the list owns its descriptors.
            unsafe { (*tail.as_ptr()).next = None };
        }
        self
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
        let tail = core::mem::replace(&mut self.tail, Some(d));
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

// ---------------------------------------------------------------------------------------------
// Home

/// Storage that has come back: what to take off the accounts.
pub(crate) struct Freed {
    pub(crate) purpose: Purpose,
    pub(crate) bytes: usize,
}

/// The owner's side of a pool: free lists and memory. All counts change here.
pub(crate) struct Home {
    shared: NonNull<Shared>,
    free_descs: Link,
    /// Per class, the first slab that has a free block.
    partial: [u16; CLASSES],
    /// Descriptors out: held by mbufs and lists, or on the remote-free list.
    out: usize,
    /// Descriptors that exist.
    descs: usize,
    /// Slabs of which every block is free.
    empty_slabs: usize,
    free_externals: *mut Storage,
    memory: Memory,
}

// SAFETY: a Home is used by one thread at a time (`&mut`); everything it points to is either its
// own or shared as described above.
unsafe impl Send for Home {}

impl Home {
    pub(crate) fn new() -> Home {
        let shared = Box::new(Shared {
            remote: AtomicPtr::new(ptr::null_mut()),
            owed: AtomicIsize::new(0),
            memory: UnsafeCell::default(),
        });
        Home {
            shared: NonNull::from(Box::leak(shared)),
            free_descs: None,
            partial: [NO_SLAB; CLASSES],
            out: 0,
            descs: 0,
            empty_slabs: 0,
            free_externals: ptr::null_mut(),
            memory: Memory::default(),
        }
    }

    #[inline]
    pub(crate) fn out(&self) -> usize {
        self.out
    }

    pub(crate) fn descs(&self) -> usize {
        self.descs
    }

    pub(crate) fn slabs(&self) -> usize {
        self.memory.slabs.len()
    }

    #[inline]
    pub(crate) fn owns(&self, m: &Mbuf) -> bool {
        m.desc().home == self.shared
    }

    /// Whether a descriptor is at hand.
    pub(crate) fn has_desc(&self) -> bool {
        self.free_descs.is_some()
    }

    /// An empty mbuf at the start of a block of this class; `None` if descriptors or blocks of the
    /// class are not at hand.
    #[inline]
    pub(crate) fn take(&mut self, class: usize, purpose: Purpose) -> Option<Mbuf> {
        let d = self.free_descs?;
        let s = self.pop_block(class)?;
        // SAFETY: the block was free, so nobody else looks at it.
        unsafe {
            (*s).purpose = purpose;
            (*s).refs.store(1, Ordering::Release);
            Some(self.reference(d, s, 0, 0))
        }
    }

    /// A new reference to a part of a mbuf of this home; `None` if no descriptor is at hand.
    ///
    /// # Panics
    /// If the part is not inside the mbuf.
    #[inline]
    pub(crate) fn clone_part(&mut self, m: &Mbuf, off: usize, len: usize) -> Option<Mbuf> {
        let d = self.free_descs?;
        let (at, s) = (m.desc().off + off as u32, m.desc().storage);
        assert!(off <= m.len() && len <= m.len() - off, "a clone of bytes that are not there");
        assert!(self.owns(m), "a count changes only at home");
        // SAFETY: alive; counts at home. At the step from one reference to two, `high_water` is
        // the end of the only one; later references are parts of existing ones.
        unsafe {
            let refs = (*s).refs.load(Ordering::Relaxed);
            if refs == 1 {
                (*s).high_water = m.desc().off + m.desc().len;
            }
            (*s).refs.store(refs + 1, Ordering::Release);
            Some(self.reference(d, s, at, len as u32))
        }
    }

    /// Makes the first free descriptor `d` a reference to a range of `s`.
    ///
    /// # Safety
    /// `d` is `free_descs`; `s` has a count for it; the range is inside the storage.
    #[inline]
    unsafe fn reference(&mut self, d: NonNull<Desc>, s: *mut Storage, off: u32, len: u32) -> Mbuf {
        // SAFETY: descriptors on the free list are this home's alone.
        unsafe {
            let desc = d.as_ptr();
            self.free_descs = (*desc).next;
            (*desc).storage = s;
            (*desc).data = (*s).data;
            (*desc).off = off;
            (*desc).len = len;
            (*desc).room = (*s).room;
        }
        self.out += 1;
        Mbuf(d)
    }

    /// Moves the start of an empty mbuf that was just taken, to leave headroom.
    #[inline]
    pub(crate) fn set_headroom(&self, m: &mut Mbuf, headroom: usize) {
        assert!(m.is_empty() && headroom <= m.storage_bytes(), "headroom beyond the storage");
        m.desc_mut().off = headroom as u32;
    }

    /// Takes a mbuf of this home back; what became free is returned.
    #[inline]
    pub(crate) fn release(&mut self, m: Mbuf) -> Option<Freed> {
        assert!(self.owns(&m), "a count changes only at home");
        let d = m.into_raw();
        // SAFETY: alive; we owned the descriptor, now the free list does. Counts at home.
        unsafe {
            let s = (*d.as_ptr()).storage;
            (*d.as_ptr()).next = self.free_descs;
            self.free_descs = Some(d);
            self.out -= 1;
            let refs = (*s).refs.load(Ordering::Relaxed);
            (*s).refs.store(refs - 1, Ordering::Release);
            if refs > 1 {
                return None;
            }
            let freed = Freed { purpose: (*s).purpose, bytes: (*s).room as usize };
            match (*s).class {
                EXTERNAL => self.push_external(s),
                _ => self.push_block(s),
            }
            Some(freed)
        }
    }

    /// Copies bytes behind the end of a mbuf, as many as fit; 0 if that is not allowed.
    pub(crate) fn append_tail(&mut self, m: &mut Mbuf, bytes: &[u8]) -> usize {
        if !self.owns(m) || m.is_external() {
            return 0;
        }
        let (s, end) = (m.desc().storage, m.headroom() + m.len());
        let n = bytes.len().min(m.tailroom());
        // SAFETY: alive; counts at home, so the load is exact. Coverage: either no other reference
        // exists, or none reaches behind `end`, and ours from now on is the furthest.
        unsafe {
            if (*s).refs.load(Ordering::Relaxed) > 1 {
                if (*s).high_water as usize != end {
                    return 0;
                }
                (*s).high_water = (end + n) as u32;
            }
            m.bytes_mut(end, n).copy_from_slice(&bytes[..n]);
        }
        m.desc_mut().len += n as u32;
        n
    }

    /// Everything that was dropped elsewhere since the last time.
    pub(crate) fn take_remote(&mut self) -> List {
        // SAFETY: the home's `Shared` exists as long as the home does.
        let remote = unsafe { &(*self.shared.as_ptr()).remote };
        if remote.load(Ordering::Relaxed).is_null() {
            return List::default();
        }
        // Acquire: what was done with the mbufs before they were dropped happened before.
        let head = NonNull::new(remote.swap(ptr::null_mut(), Ordering::Acquire));
        // Only popped from the front: the tail is not known, and not needed.
        List { head, tail: head }
    }
}

// ---------------------------------------------------------------------------------------------
// Blocks and slabs

impl Home {
    #[inline]
    fn pop_block(&mut self, class: usize) -> Option<*mut Storage> {
        let first = self.partial.get_mut(class)?;
        // `NO_SLAB` is no index.
        let slab = self.memory.slabs.get_mut(*first as usize)?;
        let s = slab.free_list;
        // SAFETY: a slab on the `partial` list has a free block.
        slab.free_list = unsafe { (*s).next_free };
        self.empty_slabs -= usize::from(slab.free == slab.total);
        slab.free -= 1;
        if slab.free == 0 {
            *first = slab.next;
        }
        Some(s)
    }

    /// # Safety
    /// `s` is a block of this home that has no reference left.
    #[inline]
    unsafe fn push_block(&mut self, s: *mut Storage) {
        // SAFETY: a block without references is this home's alone.
        let (index, class) = unsafe { ((*s).slab, (*s).class) };
        let slab = &mut self.memory.slabs[index as usize];
        // SAFETY: as above.
        unsafe { (*s).next_free = slab.free_list };
        slab.free_list = s;
        if slab.free == 0 {
            slab.next = self.partial[class as usize];
            self.partial[class as usize] = index;
        }
        slab.free += 1;
        self.empty_slabs += usize::from(slab.free == slab.total);
    }

    /// Maps one more slab for a class. `false` if the system has no memory or the pool too many.
    pub(crate) fn add_slab(&mut self, class: usize, huge: bool) -> bool {
        let index = self.memory.slabs.len();
        if index >= MAX_SLABS {
            return false;
        }
        let Some(region) = Region::map(SLAB_BYTES, huge) else { return false };
        let slab = Slab::cut(region, class, index as u16);
        self.memory.slabs.push(slab);
        self.link_slab(index as u16);
        true
    }

    /// Cuts a slab that is entirely free for another class. `false` if there is none.
    pub(crate) fn recut_slab(&mut self, class: usize) -> bool {
        let empty = |s: &Slab| s.free == s.total && s.class as usize != class;
        if self.empty_slabs == 0 {
            return false;
        }
        let Some(index) = self.memory.slabs.iter().position(empty) else { return false };
        self.unlink_slab(index as u16);
        // None of its blocks is out, so nothing points to the old block records.
        self.memory.slabs[index].recut(class, index as u16);
        self.link_slab(index as u16);
        true
    }

    /// Puts a slab whose blocks are all free at the front of its class.
    fn link_slab(&mut self, index: u16) {
        let slab = &mut self.memory.slabs[index as usize];
        slab.next = self.partial[slab.class as usize];
        self.partial[slab.class as usize] = index;
        self.empty_slabs += 1;
    }

    /// Takes a slab whose blocks are all free off the list of its class.
    fn unlink_slab(&mut self, index: u16) {
        let Slab { class, next, .. } = self.memory.slabs[index as usize];
        let mut at = self.partial[class as usize];
        if at == index {
            self.partial[class as usize] = next;
        }
        while let Some(slab) = self.memory.slabs.get_mut(at as usize) {
            at = slab.next;
            if at == index {
                slab.next = next;
            }
        }
        self.empty_slabs -= 1;
    }

    /// Makes one more chunk of descriptors.
    pub(crate) fn add_descs(&mut self) {
        let home = self.shared;
        let empty = || Desc {
            next: None,
            storage: ptr::null_mut(),
            data: ptr::null_mut(),
            home,
            off: 0,
            len: 0,
            room: 0,
        };
        let chunk: Box<[Desc]> = core::iter::repeat_with(empty).take(CHUNK_DESCS).collect();
        let chunk = Box::into_raw(chunk);
        self.memory.chunks.push(chunk);
        for i in 0..CHUNK_DESCS {
            // SAFETY: inside the chunk just made, which nobody else knows.
            let d = unsafe { NonNull::new_unchecked(chunk.cast::<Desc>().add(i)) };
            // SAFETY: as above.
            unsafe { (*d.as_ptr()).next = self.free_descs };
            self.free_descs = Some(d);
        }
        self.descs += CHUNK_DESCS;
    }
}

impl Slab {
    fn cut(region: Region, class: usize, index: u16) -> Slab {
        let none = ptr::slice_from_raw_parts_mut(NonNull::dangling().as_ptr(), 0);
        let (free_list, next) = (ptr::null_mut(), NO_SLAB);
        let mut slab = Slab { region, blocks: none, free_list, free: 0, total: 0, class: 0, next };
        slab.recut(class, index);
        slab
    }

    /// Replaces the block records by those of another class. All blocks are free.
    fn recut(&mut self, class: usize, index: u16) {
        let (bytes, base) = (CLASS_BYTES[class], self.region.base());
        let total = SLAB_BYTES / bytes;
        let record = |i: usize| Storage {
            next_free: ptr::null_mut(),
            data: base.wrapping_add(i * bytes),
            refs: AtomicU32::new(0),
            high_water: 0,
            room: bytes as u32,
            slab: index,
            class: class as u8,
            purpose: Purpose::Control,
        };
        self.free_blocks();
        self.blocks = Box::into_raw((0..total).map(record).collect::<Box<[Storage]>>());
        self.free_list = ptr::null_mut();
        for i in (0..total).rev() {
            let s = self.blocks.cast::<Storage>().wrapping_add(i);
            // SAFETY: inside the records just made, which nobody else knows.
            unsafe { (*s).next_free = self.free_list };
            self.free_list = s;
        }
        (self.free, self.total, self.class) = (total as u32, total as u32, class as u8);
    }

    fn free_blocks(&mut self) {
        let none = ptr::slice_from_raw_parts_mut(NonNull::dangling().as_ptr(), 0);
        let blocks = core::mem::replace(&mut self.blocks, none);
        // SAFETY: made by `Box::into_raw` in `recut`, or the empty slice that needs no memory; no
        // descriptor points to a record (recut: all free; drop: see `Memory`).
        drop(unsafe { Box::from_raw(blocks) });
    }
}

impl Drop for Slab {
    fn drop(&mut self) {
        self.free_blocks();
    }
}

// ---------------------------------------------------------------------------------------------
// External storage

impl Home {
    /// A mbuf over memory that someone else owns; `None` (and the owner is dropped) if it is
    /// larger than 4 GiB or no descriptor is at hand.
    pub(crate) fn external(&mut self, owner: Box<dyn External>, purpose: Purpose) -> Option<Mbuf> {
        let d = self.free_descs?;
        let len = u32::try_from(owner.bytes().len()).ok()?;
        let s = self.pop_external();
        let owner = Box::into_raw(owner);
        // SAFETY: `owner` is alive and stays where it is until `push_external`; the slice is a
        // borrow of it that lasts as long, since nothing but `drop` is done with the owner. The
        // record is free, so it is this home's alone.
        unsafe {
            let bytes = (*owner).bytes();
            assert!(bytes.len() == len as usize, "the bytes of an owner changed");
            (*s).storage.data = bytes.as_ptr().cast_mut();
            (*s).storage.room = len;
            (*s).storage.purpose = purpose;
            (*s).storage.refs.store(1, Ordering::Release);
            (*s).owner = NonNull::new(owner);
            Some(self.reference(d, s.cast(), 0, len))
        }
    }

    fn pop_external(&mut self) -> *mut ExternalStorage {
        let s = self.free_externals;
        if !s.is_null() {
            // SAFETY: records on the free list are this home's alone.
            self.free_externals = unsafe { (*s).next_free };
            return s.cast();
        }
        let storage = Storage {
            next_free: ptr::null_mut(),
            data: ptr::null_mut(),
            refs: AtomicU32::new(0),
            high_water: 0,
            room: 0,
            slab: NO_SLAB,
            class: EXTERNAL,
            purpose: Purpose::Control,
        };
        let record = Box::leak(Box::new(ExternalStorage { storage, owner: None }));
        let record = NonNull::from(record);
        self.memory.externals.push(record);
        record.as_ptr()
    }

    /// Releases the owner.
    ///
    /// # Safety
    /// `s` is the storage of an external record of this home that has no reference left.
    #[cold]
    unsafe fn push_external(&mut self, s: *mut Storage) {
        // SAFETY: a record without references is this home's alone; `EXTERNAL` storage is the
        // first field of one, and the pointer was made from a pointer to the whole.
        let owner = unsafe {
            (*s).next_free = self.free_externals;
            (*s.cast::<ExternalStorage>()).owner.take()
        };
        self.free_externals = s;
        drop_owner(owner);
    }
}

fn drop_owner(owner: Option<NonNull<dyn External>>) {
    if let Some(owner) = owner {
        // SAFETY: made by `Box::into_raw` in `external` and taken out of its record, so once.
        drop(unsafe { Box::from_raw(owner.as_ptr()) });
    }
}

// ---------------------------------------------------------------------------------------------
// The end

impl Drop for Memory {
    fn drop(&mut self) {
        for record in self.externals.drain(..) {
            // SAFETY: made by `Box::leak`; no descriptor is out, so nothing points to it.
            let record = unsafe { Box::from_raw(record.as_ptr()) };
            drop_owner(record.owner);
        }
        for chunk in self.chunks.drain(..) {
            // SAFETY: made by `Box::into_raw` in `add_descs`; no descriptor is out.
            drop(unsafe { Box::from_raw(chunk) });
        }
    }
}

impl Drop for Home {
    /// Closes the remote-free list. If mbufs are still out, the memory is left to the last of them.
    fn drop(&mut self) {
        // SAFETY: the home's `Shared` exists as long as the home does.
        let remote = unsafe { &(*self.shared.as_ptr()).remote };
        let head = NonNull::new(remote.swap(closed(), Ordering::Acquire));
        let mut late = List { head, tail: head };
        while let Some(m) = late.pop_front() {
            self.release(m);
        }
        // SAFETY: nobody reads `memory` before the count below is settled. The list is closed, so
        // descriptors that are still out settle for themselves; if none is, we are the last.
        unsafe {
            *(*self.shared.as_ptr()).memory.get() = core::mem::take(&mut self.memory);
            Shared::settle(self.shared, self.out as isize);
        }
    }
}
