//! The owner's side of a pool: free lists, counts, slabs, external storage, and the end.
//!
//! The words *alive*, *counts at home*, *coverage* and *initialised* are explained in `raw.rs` of
//! the room; so is who owns what.

#![allow(unsafe_code)]

use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ptr::{self, NonNull};
use core::sync::atomic::Ordering;

use fulmar_wire::checksum::{UNIT_BYTES, UnitSum};

use super::kernel_only::shared_piece;
use super::ready::Ready;
use super::slab::raw::Slab;
use crate::Mbuf;
use crate::posted::raw::Memory as PostedMemory;
use crate::raw::{Desc, Link, List, Shared, Storage, closed, first_of};
use crate::storage::{
    CLASSES, EXTERNAL, External, KERNEL_ONLY, LENT, Lender, Purpose, SLAB_BYTES, SharedBytes,
    ZEROES,
};
use crate::sync::{AtomicIsize, AtomicPtr, AtomicU32, UnsafeCell};
use crate::sys::{Backing, Region};
use crate::volatile::VolatileSlice;

/// Descriptors of one chunk: 16 KiB.
pub(crate) const CHUNK_DESCS: usize = if cfg!(miri) { 16 } else { 256 };

/// "No slab" in the lists of slabs; never an index, because a pool has fewer.
pub(super) const NO_SLAB: u16 = u16::MAX;

/// The most slabs of one pool.
pub(crate) const MAX_SLABS: usize = NO_SLAB as usize;

/// No byte of a storage: none has as many.
pub(super) const FOUND: u32 = u32::MAX;

/// Storage that the pool does not own. `storage` is first, so a pointer to it is a pointer to this.
#[repr(C)]
pub(super) struct ExternalStorage {
    storage: Storage,
    pub(super) owner: Owner,
    /// Where the bytes are, of storage that shows zeroes; never behind a reference.
    pub(super) address: *const u8,
    /// The first byte of a frame that the kernel could not send, since it did not find all of it;
    /// `FOUND` if there was none.
    pub(super) vanished: AtomicU32,
}

/// Whom to tell when storage that the pool does not own is no longer used.
#[derive(Default)]
pub(crate) enum Owner {
    #[default]
    None,
    /// It keeps the bytes; to be dropped.
    Boxed(NonNull<dyn External>),
    /// It wants to know which loan has ended.
    Lender(Arc<dyn Lender>, u32),
    /// It keeps the bytes, and is let go by the shard.
    Shared(Arc<dyn SharedBytes>),
    /// The posted buffer that the bytes lie in.
    Posted(Arc<PostedMemory>),
}

/// Everything that mbufs point into.
#[derive(Default)]
pub(crate) struct Memory {
    slabs: Vec<Slab>,
    chunks: Vec<*mut [Desc]>,
    externals: Vec<NonNull<ExternalStorage>>,
}

pub(crate) struct Freed {
    pub(crate) purpose: Purpose,
    pub(crate) bytes: usize,
}

/// The owner's side of a pool: free lists and memory. All counts change here.
pub(crate) struct Home {
    pub(super) shared: NonNull<Shared>,
    pub(super) free_descs: Link,
    pub(super) ready: Ready,
    /// Per class, the first slab that has a free block.
    partial: [u16; CLASSES],
    /// Descriptors out: held by mbufs and lists, or on the remote-free list.
    pub(super) out: usize,
    /// Descriptors that exist.
    descs: usize,
    /// Slabs of which every block is free.
    empty_slabs: usize,
    free_externals: *mut Storage,
    /// Parts of shared bytes that are out.
    shared_parts: usize,
    /// Those of them that the kernel alone may read.
    kernel_parts: usize,
    /// Owners of shared bytes of which a part has come home, until the shard lets go of them.
    returned: Vec<Arc<dyn SharedBytes>>,
    /// Where slabs come from before the system is asked.
    backing: Option<Backing>,
    memory: Memory,
}

// SAFETY: a Home is used by one thread at a time (`&mut`); everything it points to is either its
// own or shared as described above.
unsafe impl Send for Home {}

impl Home {
    pub(crate) fn new(backing: Option<Backing>) -> Home {
        let shared = Box::new(Shared {
            remote: AtomicPtr::new(ptr::null_mut()),
            owed: AtomicIsize::new(0),
            kick: UnsafeCell::new(None),
            memory: UnsafeCell::default(),
        });
        Home {
            shared: NonNull::from(Box::leak(shared)),
            free_descs: None,
            ready: Ready::default(),
            partial: [NO_SLAB; CLASSES],
            out: 0,
            descs: 0,
            empty_slabs: 0,
            free_externals: ptr::null_mut(),
            shared_parts: 0,
            kernel_parts: 0,
            returned: Vec::new(),
            backing,
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

    /// Whether the count of entirely free slabs is right.
    #[cfg(test)]
    pub(crate) fn counts_empty_slabs(&self) -> bool {
        let empty = self.memory.slabs.iter().filter(|s| s.free == s.total);
        empty.count() == self.empty_slabs
    }

    #[inline]
    pub(crate) fn owns(&self, m: &Mbuf) -> bool {
        m.desc().home == self.shared
    }

    /// Whether a descriptor is at hand.
    pub(crate) fn has_desc(&self) -> bool {
        self.free_descs.is_some()
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
            Some(self.reference(d, s, at, len as u32, m.desc().sums))
        }
    }

    /// Makes the first free descriptor `d` a reference to a range of `s`.
    ///
    /// # Safety
    /// `d` is `free_descs`; `s` has a count for it; the range is inside the storage; `sums` are
    /// those of the storage, or null.
    #[inline]
    unsafe fn reference(
        &mut self,
        d: NonNull<Desc>,
        s: *mut Storage,
        off: u32,
        len: u32,
        sums: *mut Option<UnitSum>,
    ) -> Mbuf {
        // SAFETY: descriptors on the free list are this home's alone.
        unsafe {
            let desc = d.as_ptr();
            self.free_descs = (*desc).next;
            (*desc).storage = s;
            (*desc).data = (*s).data;
            (*desc).off = off;
            (*desc).len = len;
            (*desc).room = (*s).room;
            (*desc).sums = sums;
        }
        self.out += 1;
        // SAFETY: out from now on, and the caller's.
        unsafe { Mbuf::from_raw(d) }
    }

    /// Keeps sums of a block that was just taken; none is known yet.
    pub(crate) fn keep_sums(&mut self, m: &mut Mbuf) {
        assert!(self.owns(m) && m.is_unique() && !m.is_external(), "sums of another's bytes");
        // SAFETY: alive; `slab` never changes while a reference is out.
        let index = unsafe { (*m.desc().storage).slab };
        let slab = &mut self.memory.slabs[index as usize];
        let first = (m.desc().data.addr() - slab.region.base().addr()) / UNIT_BYTES;
        let units = m.storage_bytes() / UNIT_BYTES;
        if slab.sums.is_empty() {
            let none = core::iter::repeat_n(None, SLAB_BYTES / UNIT_BYTES);
            slab.sums = Box::into_raw(none.collect::<Box<[_]>>());
        }
        assert!(first + units <= slab.sums.len(), "a block outside of its slab");
        let entries = slab.sums.cast::<Option<UnitSum>>().wrapping_add(first);
        // SAFETY: the entries of this block, checked to be inside, initialised when they were made;
        // only references to the block lead to them, and there is none but `m`.
        unsafe { core::slice::from_raw_parts_mut(entries, units) }.fill(None);
        m.desc_mut().sums = entries;
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
            self.out -= 1;
            let refs = (*s).refs.load(Ordering::Relaxed);
            (*s).refs.store(refs - 1, Ordering::Release);
            let freed = Freed { purpose: (*s).purpose, bytes: (*s).room as usize };
            let class = (*s).class;
            if refs == 1 && class < EXTERNAL {
                self.park(d, class as usize);
                return Some(freed);
            }
            (*d.as_ptr()).next = self.free_descs;
            self.free_descs = Some(d);
            if refs > 1 {
                return None;
            }
            self.push_external(s);
            (class != LENT).then_some(freed)
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
        // exists, or none reaches behind `end`, and ours from now on is the furthest. Sums: no unit
        // touched has one afterwards.
        unsafe {
            if (*s).refs.load(Ordering::Relaxed) > 1 {
                if (*s).high_water as usize != end || knows_sums(m, end, n) {
                    return 0;
                }
                (*s).high_water = (end + n) as u32;
            } else {
                m.forget_sums(end, n);
            }
            m.bytes_mut(end, n).copy_from_slice(&bytes[..n]);
        }
        m.desc_mut().len += n as u32;
        n
    }
}

/// Whether the sum of a unit that the bytes [from, from + n) of the storage touch is known.
fn knows_sums(m: &Mbuf, from: usize, n: usize) -> bool {
    let touched = from / UNIT_BYTES..(from + n).div_ceil(UNIT_BYTES);
    m.keeps_sums() && touched.into_iter().any(|unit| m.known_unit(unit).is_some())
}

impl Home {
    #[inline]
    pub(super) fn pop_block(&mut self, class: usize) -> Option<*mut Storage> {
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
    pub(super) unsafe fn push_block(&mut self, s: *mut Storage) {
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
        let backed = self.backing.as_mut().and_then(|b| b.slab(huge));
        let Some(region) = backed.or_else(|| Region::map(SLAB_BYTES, huge)) else { return false };
        let slab = Slab::cut(region, class, index as u16);
        self.memory.slabs.push(slab);
        self.link_slab(index as u16);
        true
    }

    /// Cuts a slab that is entirely free for another class. `false` if there is none.
    pub(crate) fn recut_slab(&mut self, class: usize) -> bool {
        self.spill();
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
            sums: ptr::null_mut(),
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
            (*s).owner = NonNull::new(owner).map_or(Owner::None, Owner::Boxed);
            Some(self.borrowed(d, s, len, EXTERNAL, purpose))
        }
    }

    /// A mbuf over a range that a lender wants back; `None` (and there is no loan) if the lender
    /// does not have the range, it is longer than 64 KiB, or no descriptor is at hand.
    pub(crate) fn lent(
        &mut self,
        lender: &Arc<dyn Lender>,
        offset: usize,
        len: u32,
        tag: u32,
    ) -> Option<Mbuf> {
        let bytes = lender.bytes(offset, len as usize)?;
        assert!(bytes.len() == len as usize, "a lender gave another range");
        let owner = Owner::Lender(Arc::clone(lender), tag);
        let seen = ZEROES.get(..bytes.len())?.as_ptr().cast_mut();
        // SAFETY: a static, which nobody writes. An mbuf out has a record, which is not free: its
        // address is written before anybody else has the mbuf.
        unsafe {
            let m = self.adopt(seen, len, owner, LENT, Purpose::Send)?;
            (*m.desc().storage.cast::<ExternalStorage>()).address = bytes.as_ptr();
            Some(m)
        }
    }

    /// The first reference to `len` bytes at `data`; `None` if no descriptor is at hand.
    ///
    /// # Safety
    /// The bytes are initialised and nobody writes them, or moves them, until `owner` is dropped, which
    /// happens when the last reference has come home.
    #[inline]
    pub(crate) unsafe fn adopt(
        &mut self,
        data: *mut u8,
        len: u32,
        owner: Owner,
        class: u8,
        purpose: Purpose,
    ) -> Option<Mbuf> {
        let d = self.free_descs?;
        let s = self.pop_external();
        // SAFETY: the record is free, so it is this home's alone.
        unsafe {
            (*s).storage.data = data;
            (*s).owner = owner;
            Some(self.borrowed(d, s, len, class, purpose))
        }
    }

    /// A mbuf over at most `max` of the bytes that lie together from `at` on; `None` if no
    /// descriptor is at hand.
    pub(crate) fn share(
        &mut self,
        owner: &Arc<dyn SharedBytes>,
        at: usize,
        max: usize,
        purpose: Purpose,
    ) -> Option<Mbuf> {
        let d = self.free_descs?;
        let (bytes, kernel) = shared_piece(owner, at);
        let class = if kernel.is_some() { KERNEL_ONLY } else { EXTERNAL };
        let len = bytes.len().min(max).min(u32::MAX as usize) as u32;
        let data = bytes.as_ptr().cast_mut();
        let s = self.pop_external();
        self.shared_parts += 1;
        self.kernel_parts += usize::from(kernel.is_some());
        // SAFETY: the slice is a borrow of what the `Arc` holds, which the record keeps until
        // `push_external`, or of the static zeroes; nobody can have a `&mut` to it meanwhile. The
        // record is free, so it is this home's alone.
        unsafe {
            (*s).storage.data = data;
            (*s).owner = Owner::Shared(Arc::clone(owner));
            (*s).address = kernel.unwrap_or(ptr::null());
            (*s).vanished.store(FOUND, Ordering::Relaxed);
            Some(self.borrowed(d, s, len, class, purpose))
        }
    }

    /// Parts out that the kernel alone may read.
    #[inline]
    pub(crate) fn kernel_parts(&self) -> usize {
        self.kernel_parts
    }

    /// Parts of shared bytes that are out.
    #[inline]
    pub(crate) fn shared_parts(&self) -> usize {
        self.shared_parts
    }

    /// Whether [`Home::pop_returned`] has an owner to hand out.
    #[inline]
    pub(crate) fn has_returned(&self) -> bool {
        !self.returned.is_empty()
    }

    /// The owner of shared bytes of which a part has come home.
    #[inline]
    pub(crate) fn pop_returned(&mut self) -> Option<Arc<dyn SharedBytes>> {
        self.returned.pop()
    }

    /// The first reference to storage that the pool does not own.
    ///
    /// # Safety
    /// `d` is `free_descs`; the record is free, and its data and owner are set.
    unsafe fn borrowed(
        &mut self,
        d: NonNull<Desc>,
        s: *mut ExternalStorage,
        len: u32,
        class: u8,
        purpose: Purpose,
    ) -> Mbuf {
        // SAFETY: the record is this home's alone until the reference exists.
        unsafe {
            (*s).storage.room = len;
            (*s).storage.class = class;
            (*s).storage.purpose = purpose;
            (*s).storage.refs.store(1, Ordering::Release);
            self.reference(d, s.cast(), 0, len, ptr::null_mut())
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
        let record = Box::leak(Box::new(ExternalStorage {
            storage,
            owner: Owner::None,
            address: ptr::null(),
            vanished: AtomicU32::new(FOUND),
        }));
        let record = NonNull::from(record);
        self.memory.externals.push(record);
        record.as_ptr()
    }

    /// Releases the owner.
    ///
    /// # Safety
    /// `s` is the storage of an external record of this home that has no reference left.
    unsafe fn push_external(&mut self, s: *mut Storage) {
        // SAFETY: a record without references is this home's alone; storage of class `EXTERNAL` or
        // above is the first field of one, and the pointer was made from a pointer to the whole.
        let owner = unsafe {
            self.kernel_parts -= usize::from((*s).class == KERNEL_ONLY);
            (*s).next_free = self.free_externals;
            core::mem::take(&mut (*s.cast::<ExternalStorage>()).owner)
        };
        self.free_externals = s;
        if let Owner::Shared(owner) = owner {
            self.shared_parts -= 1;
            return self.returned.push(owner);
        }
        drop_owner(owner);
    }
}

impl Mbuf {
    /// The record of storage that the pool does not own.
    #[inline]
    pub(super) fn record(&self) -> Option<&ExternalStorage> {
        let s = self.desc().storage.cast::<ExternalStorage>();
        // SAFETY: alive; storage of class `EXTERNAL` or above is the first field of a record, and the
        // pointer was made from a pointer to the whole. Nothing of it but atomics is written while
        // a reference exists (counts at home: through atomics and before the first reference).
        self.is_external().then(|| unsafe { &*s })
    }

    /// Whether the kernel alone may read the bytes ([`SharedBytes::kernel_part`]): to everybody else
    /// they look like zeroes, which must not be sent for them.
    #[inline]
    pub fn is_kernel_only(&self) -> bool {
        // SAFETY: alive; `class` is written only while no reference exists.
        unsafe { (*self.desc().storage).class == KERNEL_ONLY }
    }

    /// Whether another process may write the bytes ([`Lender`]): they can be copied out, and are never
    /// behind a reference.
    #[inline]
    pub fn is_volatile(&self) -> bool {
        self.is_opaque() && !self.is_kernel_only()
    }

    /// The bytes, if another process may write them.
    #[inline]
    pub fn volatile(&self) -> Option<VolatileSlice<'_>> {
        let record = self.record().filter(|_| self.is_volatile())?;
        // SAFETY: the lender, which the record keeps, has these bytes at this address; `off + len <= room`,
        // which is the length that it gave. No reference to them is ever made.
        Some(unsafe { VolatileSlice::new(record.address.add(self.headroom()), self.len()) })
    }
}

fn drop_owner(owner: Owner) {
    match owner {
        Owner::None | Owner::Shared(_) | Owner::Posted(_) => {}
        // SAFETY: made by `Box::into_raw` in `external` and taken out of its record, so once.
        Owner::Boxed(owner) => drop(unsafe { Box::from_raw(owner.as_ptr()) }),
        Owner::Lender(lender, tag) => lender.give_back(tag),
    }
}

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
        let head = first_of(remote.swap(closed(), Ordering::Acquire));
        // SAFETY: what hangs on the list was given up by its owners.
        let mut late = unsafe { List::from_head(head) };
        let end = End(self);
        while let Some(m) = late.pop_front() {
            end.0.release(m);
        }
    }
}

/// Leaves the memory to the last descriptor that is out, also where the drop of an owner panics.
struct End<'a>(&'a mut Home);

impl Drop for End<'_> {
    fn drop(&mut self) {
        let home = &mut *self.0;
        // SAFETY: nobody reads `memory` before the count below is settled. The list is closed, so
        // descriptors that are still out settle for themselves; if none is, we are the last.
        unsafe {
            let memory = core::mem::take(&mut home.memory);
            (*home.shared.as_ptr()).memory.with_mut(|place| *place = memory);
            Shared::settle(home.shared, home.out as isize);
        }
    }
}
