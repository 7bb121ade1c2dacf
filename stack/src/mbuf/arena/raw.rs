//! The arena of a pool: free lists, reference counts, slabs, external storage, and the release of its
//! memory.
//!
//! `raw.rs` of the crate describes ownership and the invariants *alive*, *arena counts*, *coverage* and
//! *initialised*.

#![allow(unsafe_code)]

use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ptr::{self, NonNull};
use core::sync::atomic::Ordering;

use crate::wire::checksum::{UNIT_BYTES, UnitSum};

use super::magazine::Magazines;
use super::slab::raw::Slab;
use crate::mbuf::Mbuf;
use crate::mbuf::posted::raw::Memory as PostedMemory;
use crate::mbuf::raw::{Desc, Link, List, Shared, Storage, closed, first_of};
use crate::mbuf::storage::{
    CLASSES, EXTERNAL, External, LENT, Lender, Purpose, SLAB_BYTES, SharedBytes, ZEROES,
};
use crate::mbuf::sync::{AtomicIsize, AtomicPtr, AtomicU32, UnsafeCell};
use crate::mbuf::sys::{Backing, PageSize, Region};
use crate::mbuf::volatile::VolatileSlice;

/// Descriptors of one chunk: 16 KiB.
pub(crate) const CHUNK_DESCS: usize = if cfg!(miri) { 16 } else { 256 };

/// The end of a list of slabs; not a valid index.
pub(super) const NO_SLAB: u16 = u16::MAX;

/// Maximum slabs of a pool.
pub(crate) const MAX_SLABS: usize = NO_SLAB as usize;

/// The record of external storage. `storage` is the first field, so a pointer to it is also a pointer to
/// the record.
#[repr(C)]
pub(super) struct ExternalStorage {
    storage: Storage,
    pub(super) owner: Owner,
    /// The address of volatile bytes; never made a reference.
    address: *const u8,
}

/// The owner of external storage, which is released with the last reference.
#[derive(Default)]
pub(crate) enum Owner {
    #[default]
    None,
    /// Owns the bytes; dropped by the arena.
    Boxed(NonNull<dyn External>),
    /// The lender and the tag of the loan.
    Lender(Arc<dyn Lender>, u32),
    /// Owns the bytes; dropped by the shard ([`Arena::pop_returned`]).
    Shared(Arc<dyn SharedBytes>),
    /// The posted buffer that contains the bytes.
    Posted(Arc<PostedMemory>),
}

/// All memory that mbufs point to.
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

/// The memory of a pool and its free lists. All reference counts change here.
pub(crate) struct Arena {
    pub(super) shared: NonNull<Shared>,
    pub(super) free_descs: Link,
    pub(super) magazines: Magazines,
    /// Per class, the first slab that has a free block.
    partial: [u16; CLASSES],
    /// Descriptors in use: of mbufs and lists, or on the remote-free list.
    pub(super) in_use: usize,
    /// Descriptors allocated.
    descs: usize,
    /// Slabs whose blocks are all free.
    empty_slabs: usize,
    free_externals: *mut Storage,
    /// Storages over shared bytes in use.
    shared_storages: usize,
    /// Owners of shared bytes whose storage was freed, to be dropped by the shard.
    returned: Vec<Arc<dyn SharedBytes>>,
    /// Memory for slabs that is used before anonymous mappings.
    backing: Option<Backing>,
    /// The pages of new slabs.
    pages: PageSize,
    memory: Memory,
}

// SAFETY: an Arena is used by one thread at a time (`&mut`); everything it points to is its own or shared
// as described above.
unsafe impl Send for Arena {}

impl Arena {
    pub(crate) fn new(backing: Option<Backing>, pages: PageSize) -> Arena {
        let shared = Box::new(Shared {
            remote: AtomicPtr::new(ptr::null_mut()),
            outstanding: AtomicIsize::new(0),
            kick: UnsafeCell::new(None),
            memory: UnsafeCell::default(),
        });
        Arena {
            shared: NonNull::from(Box::leak(shared)),
            free_descs: None,
            magazines: Magazines::default(),
            partial: [NO_SLAB; CLASSES],
            in_use: 0,
            descs: 0,
            empty_slabs: 0,
            free_externals: ptr::null_mut(),
            shared_storages: 0,
            returned: Vec::new(),
            backing,
            pages,
            memory: Memory::default(),
        }
    }

    #[inline]
    pub(crate) fn in_use(&self) -> usize {
        self.in_use
    }

    pub(crate) fn descs(&self) -> usize {
        self.descs
    }

    pub(crate) fn slabs(&self) -> usize {
        self.memory.slabs.len()
    }

    /// Whether `empty_slabs` is correct.
    #[cfg(test)]
    pub(crate) fn counts_empty_slabs(&self) -> bool {
        let empty = self.memory.slabs.iter().filter(|s| s.free == s.total);
        empty.count() == self.empty_slabs
    }

    #[inline]
    pub(crate) fn owns(&self, m: &Mbuf) -> bool {
        m.desc().shared == self.shared
    }

    /// Whether the free list has a descriptor.
    pub(crate) fn has_desc(&self) -> bool {
        self.free_descs.is_some()
    }

    /// A new reference to a part of an mbuf of this arena. `None` if no descriptor is free.
    ///
    /// # Panics
    /// If the part is not inside the mbuf.
    #[inline]
    pub(crate) fn clone_part(&mut self, m: &Mbuf, off: usize, len: usize) -> Option<Mbuf> {
        let d = self.free_descs?;
        let (at, s) = (m.desc().off + off as u32, m.desc().storage);
        assert!(off <= m.len() && len <= m.len() - off, "a clone beyond the end of the mbuf");
        assert!(self.owns(m), "a clone of another pool's mbuf");
        // SAFETY: alive; arena counts. When the second reference is made, `high_water` is the end of the
        // first; later references are parts of existing ones.
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
    /// `d` is `free_descs`; `refs` of `s` counts the reference; the range is inside the storage; `sums` points to the
    /// storage's sums, or is null.
    #[inline]
    unsafe fn reference(
        &mut self,
        d: NonNull<Desc>,
        s: *mut Storage,
        off: u32,
        len: u32,
        sums: *mut Option<UnitSum>,
    ) -> Mbuf {
        // SAFETY: a descriptor on the free list belongs to this arena alone.
        unsafe {
            let desc = d.as_ptr();
            self.free_descs = (*desc).next;
            (*desc).storage = s;
            (*desc).data = (*s).data;
            (*desc).off = off;
            (*desc).len = len;
            (*desc).capacity = (*s).capacity;
            (*desc).sums = sums;
        }
        self.in_use += 1;
        // SAFETY: in use from now on, and owned by the caller.
        unsafe { Mbuf::from_raw(d) }
    }

    /// Starts keeping sums for a newly allocated block; none is known yet.
    pub(crate) fn keep_sums(&mut self, m: &mut Mbuf) {
        assert!(self.owns(m) && m.is_unique() && !m.is_external(), "sums of a block in use");
        // SAFETY: alive; `slab` does not change while a reference is in use.
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
        // SAFETY: the entries of this block, checked to be in bounds, initialised when allocated;
        // reachable only through references to the block, and `m` is the only one.
        unsafe { core::slice::from_raw_parts_mut(entries, units) }.fill(None);
        m.desc_mut().sums = entries;
    }

    /// Reserves headroom in a newly allocated mbuf.
    #[inline]
    pub(crate) fn set_headroom(&self, m: &mut Mbuf, headroom: usize) {
        assert!(m.is_empty() && headroom <= m.storage_bytes(), "headroom beyond the storage");
        m.desc_mut().off = headroom as u32;
    }

    /// Frees an mbuf of this arena. Returns its storage to be uncharged if this was the last reference.
    #[inline]
    pub(crate) fn release(&mut self, m: Mbuf) -> Option<Freed> {
        assert!(self.owns(&m), "a release of another pool's mbuf");
        let d = m.into_raw();
        // SAFETY: alive; the descriptor moves from the mbuf to the free list. Arena counts.
        unsafe {
            let s = (*d.as_ptr()).storage;
            self.in_use -= 1;
            let refs = (*s).refs.load(Ordering::Relaxed);
            (*s).refs.store(refs - 1, Ordering::Release);
            let freed = Freed { purpose: (*s).purpose, bytes: (*s).capacity as usize };
            let class = (*s).class;
            if refs == 1 && class < EXTERNAL {
                self.put(d, class as usize);
                return Some(freed);
            }
            (*d.as_ptr()).next = self.free_descs;
            self.free_descs = Some(d);
            if refs > 1 {
                return None;
            }
            self.free_external(s);
            (class != LENT).then_some(freed)
        }
    }

    /// Appends the bytes that fit into an mbuf; see [`Pool::append_tail`](crate::mbuf::Pool::append_tail).
    pub(crate) fn append_tail(&mut self, m: &mut Mbuf, bytes: &[u8]) -> usize {
        if !self.owns(m) || m.is_external() {
            return 0;
        }
        let (s, end) = (m.desc().storage, m.headroom() + m.len());
        let n = bytes.len().min(m.tailroom());
        // SAFETY: alive; arena counts, so the load is exact. Coverage: either this is the only reference,
        // or none ends behind `end`, and `high_water` follows this one. Sums: no unit touched has a
        // known sum afterwards.
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

/// Whether the bytes [from, from + n) of the storage touch a unit with a known sum.
fn knows_sums(m: &Mbuf, from: usize, n: usize) -> bool {
    let touched = from / UNIT_BYTES..(from + n).div_ceil(UNIT_BYTES);
    m.keeps_sums() && touched.into_iter().any(|unit| m.known_unit(unit).is_some())
}

impl Arena {
    #[inline]
    pub(super) fn pop_block(&mut self, class: usize) -> Option<*mut Storage> {
        let first = self.partial.get_mut(class)?;
        // `NO_SLAB` is out of bounds.
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
    /// `s` is a block of this arena without references.
    #[inline]
    pub(super) unsafe fn push_block(&mut self, s: *mut Storage) {
        // SAFETY: a block without references belongs to this arena alone.
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

    /// Maps a slab for a class. False if the system is out of memory or the pool has `MAX_SLABS`.
    pub(crate) fn add_slab(&mut self, class: usize) -> bool {
        let index = self.memory.slabs.len();
        if index >= MAX_SLABS {
            return false;
        }
        let backed = self.backing.as_mut().and_then(|b| b.slab(self.pages));
        let region = backed.or_else(|| Region::map(SLAB_BYTES, self.pages));
        let Some(region) = region else { return false };
        let slab = Slab::new(region, class, index as u16);
        self.memory.slabs.push(slab);
        self.link_slab(index as u16);
        true
    }

    /// Reassigns an entirely free slab to a class. False if there is none.
    pub(crate) fn reassign_slab(&mut self, class: usize) -> bool {
        self.flush_magazines();
        let empty = |s: &Slab| s.free == s.total && s.class as usize != class;
        if self.empty_slabs == 0 {
            return false;
        }
        let Some(index) = self.memory.slabs.iter().position(empty) else { return false };
        self.unlink_slab(index as u16);
        // All its blocks are free, so nothing points to the old block records.
        self.memory.slabs[index].set_class(class, index as u16);
        self.link_slab(index as u16);
        true
    }

    /// Links an entirely free slab into the list of its class.
    fn link_slab(&mut self, index: u16) {
        let slab = &mut self.memory.slabs[index as usize];
        slab.next = self.partial[slab.class as usize];
        self.partial[slab.class as usize] = index;
        self.empty_slabs += 1;
    }

    /// Unlinks an entirely free slab from the list of its class.
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

    /// Allocates a chunk of descriptors.
    pub(crate) fn add_descs(&mut self) {
        let shared = self.shared;
        let empty = || Desc {
            next: None,
            storage: ptr::null_mut(),
            data: ptr::null_mut(),
            shared,
            off: 0,
            len: 0,
            capacity: 0,
            sums: ptr::null_mut(),
        };
        let chunk: Box<[Desc]> = core::iter::repeat_with(empty).take(CHUNK_DESCS).collect();
        let chunk = Box::into_raw(chunk);
        self.memory.chunks.push(chunk);
        for i in 0..CHUNK_DESCS {
            // SAFETY: inside the new chunk, to which there is no other pointer.
            let d = unsafe { NonNull::new_unchecked(chunk.cast::<Desc>().add(i)) };
            // SAFETY: as above.
            unsafe { (*d.as_ptr()).next = self.free_descs };
            self.free_descs = Some(d);
        }
        self.descs += CHUNK_DESCS;
    }
}

impl Arena {
    /// An mbuf over the memory of `owner`. `None`, and the owner is dropped, if the memory is larger than
    /// 4 GiB or no descriptor is free.
    pub(crate) fn external(&mut self, owner: Box<dyn External>, purpose: Purpose) -> Option<Mbuf> {
        let d = self.free_descs?;
        let len = u32::try_from(owner.bytes().len()).ok()?;
        let s = self.alloc_external();
        let owner = Box::into_raw(owner);
        // SAFETY: `owner` is alive and does not move until `free_external`; the slice borrows it until
        // then, since the owner is only dropped. The record is free, so it belongs to this arena alone.
        unsafe {
            let bytes = (*owner).bytes();
            assert!(bytes.len() == len as usize, "the bytes of an owner changed");
            (*s).storage.data = bytes.as_ptr().cast_mut();
            (*s).owner = NonNull::new(owner).map_or(Owner::None, Owner::Boxed);
            Some(self.first_reference(d, s, len, EXTERNAL, purpose))
        }
    }

    /// An mbuf over a range of a lender's memory. `None`, without a loan, if the range is outside the
    /// memory or longer than 64 KiB, or no descriptor is free.
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
        // SAFETY: a static, which is never written. The record of the new mbuf is in use; its address is
        // written before the mbuf is returned.
        unsafe {
            let m = self.adopt(seen, len, owner, LENT, Purpose::Send)?;
            (*m.desc().storage.cast::<ExternalStorage>()).address = bytes.as_ptr();
            Some(m)
        }
    }

    /// The first reference to `len` external bytes at `data`. `None` if no descriptor is free.
    ///
    /// # Safety
    /// The bytes are initialised, and are neither written nor moved until `owner` is dropped, which happens
    /// when the last reference is freed.
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
        let s = self.alloc_external();
        // SAFETY: the record is free, so it belongs to this arena alone.
        unsafe {
            (*s).storage.data = data;
            (*s).owner = owner;
            Some(self.first_reference(d, s, len, class, purpose))
        }
    }

    /// An mbuf over at most `max` of the contiguous bytes at `at`. `None` if no descriptor is free.
    pub(crate) fn share(
        &mut self,
        owner: &Arc<dyn SharedBytes>,
        at: usize,
        max: usize,
        purpose: Purpose,
    ) -> Option<Mbuf> {
        let d = self.free_descs?;
        let bytes = owner.piece(at);
        let len = bytes.len().min(max).min(u32::MAX as usize) as u32;
        let data = bytes.as_ptr().cast_mut();
        let s = self.alloc_external();
        self.shared_storages += 1;
        // SAFETY: the slice borrows what the `Arc` holds, which the record keeps until `free_external`; no
        // `&mut` to it can exist meanwhile. The record is free, so it belongs to this arena alone.
        unsafe {
            (*s).storage.data = data;
            (*s).owner = Owner::Shared(Arc::clone(owner));
            Some(self.first_reference(d, s, len, EXTERNAL, purpose))
        }
    }

    /// Storages over shared bytes in use.
    #[inline]
    pub(crate) fn shared_storages(&self) -> usize {
        self.shared_storages
    }

    /// Whether [`Arena::pop_returned`] has an owner to return.
    #[inline]
    pub(crate) fn has_returned(&self) -> bool {
        !self.returned.is_empty()
    }

    /// The owner of shared bytes whose storage was freed.
    #[inline]
    pub(crate) fn pop_returned(&mut self) -> Option<Arc<dyn SharedBytes>> {
        self.returned.pop()
    }

    /// The first reference to external storage.
    ///
    /// # Safety
    /// `d` is `free_descs`; the record is free, and its data and owner are set.
    unsafe fn first_reference(
        &mut self,
        d: NonNull<Desc>,
        s: *mut ExternalStorage,
        len: u32,
        class: u8,
        purpose: Purpose,
    ) -> Mbuf {
        // SAFETY: the record belongs to this arena alone until the reference exists.
        unsafe {
            (*s).storage.capacity = len;
            (*s).storage.class = class;
            (*s).storage.purpose = purpose;
            (*s).storage.refs.store(1, Ordering::Release);
            self.reference(d, s.cast(), 0, len, ptr::null_mut())
        }
    }

    fn alloc_external(&mut self) -> *mut ExternalStorage {
        let s = self.free_externals;
        if !s.is_null() {
            // SAFETY: records on the free list belong to this arena alone.
            self.free_externals = unsafe { (*s).next_free };
            return s.cast();
        }
        let storage = Storage {
            next_free: ptr::null_mut(),
            data: ptr::null_mut(),
            refs: AtomicU32::new(0),
            high_water: 0,
            capacity: 0,
            slab: NO_SLAB,
            class: EXTERNAL,
            purpose: Purpose::Control,
        };
        let record = Box::leak(Box::new(ExternalStorage {
            storage,
            owner: Owner::None,
            address: ptr::null(),
        }));
        let record = NonNull::from(record);
        self.memory.externals.push(record);
        record.as_ptr()
    }

    /// Frees a record and releases its owner.
    ///
    /// # Safety
    /// `s` is the storage of an external record of this arena without references.
    unsafe fn free_external(&mut self, s: *mut Storage) {
        // SAFETY: a record without references belongs to this arena alone; storage of class `EXTERNAL` or
        // above is the first field of a record, and the pointer was made from a pointer to the record.
        let owner = unsafe {
            (*s).next_free = self.free_externals;
            core::mem::take(&mut (*s.cast::<ExternalStorage>()).owner)
        };
        self.free_externals = s;
        if let Owner::Shared(owner) = owner {
            self.shared_storages -= 1;
            return self.returned.push(owner);
        }
        drop_owner(owner);
    }
}

impl Mbuf {
    /// The record of external storage.
    #[inline]
    pub(super) fn record(&self) -> Option<&ExternalStorage> {
        let s = self.desc().storage.cast::<ExternalStorage>();
        // SAFETY: alive; storage of class `EXTERNAL` or above is the first field of a record, and the
        // pointer was made from a pointer to the record. While a reference exists only its atomics are
        // written.
        self.is_external().then(|| unsafe { &*s })
    }

    /// The bytes, if they are volatile.
    #[inline]
    pub fn volatile(&self) -> Option<VolatileSlice<'_>> {
        let record = self.record().filter(|_| self.is_volatile())?;
        // SAFETY: the lender, which the record keeps alive, has these bytes at this address;
        // `off + len <= capacity`, the length of the loan. No reference to them is ever made.
        Some(unsafe { VolatileSlice::new(record.address.add(self.headroom()), self.len()) })
    }
}

fn drop_owner(owner: Owner) {
    match owner {
        Owner::None | Owner::Shared(_) | Owner::Posted(_) => {}
        // SAFETY: made by `Box::into_raw` in `external`; taken out of its record, so dropped once.
        Owner::Boxed(owner) => drop(unsafe { Box::from_raw(owner.as_ptr()) }),
        Owner::Lender(lender, tag) => lender.give_back(tag),
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        for record in self.externals.drain(..) {
            // SAFETY: made by `Box::leak`; no descriptor is in use, so nothing points to it.
            let record = unsafe { Box::from_raw(record.as_ptr()) };
            drop_owner(record.owner);
        }
        for chunk in self.chunks.drain(..) {
            // SAFETY: made by `Box::into_raw` in `add_descs`; no descriptor is in use.
            drop(unsafe { Box::from_raw(chunk) });
        }
    }
}

impl Drop for Arena {
    /// Closes the remote-free list. If mbufs are in use, the memory is freed with the last of them.
    fn drop(&mut self) {
        // SAFETY: `Shared` exists as long as the arena.
        let remote = unsafe { &(*self.shared.as_ptr()).remote };
        let head = first_of(remote.swap(closed(), Ordering::Acquire));
        // SAFETY: the owners of the descriptors on the list gave them up.
        let mut late = unsafe { List::from_head(head) };
        let end = LeaveMemory(self);
        while let Some(m) = late.pop_front() {
            end.0.release(m);
        }
    }
}

/// Passes the memory to the last descriptor in use, even if the drop of an owner panics.
struct LeaveMemory<'a>(&'a mut Arena);

impl Drop for LeaveMemory<'_> {
    fn drop(&mut self) {
        let arena = &mut *self.0;
        // SAFETY: `memory` is not read before the count below is added. The list is closed, so each
        // descriptor in use subtracts itself; if there is none, the memory is freed here.
        unsafe {
            let memory = core::mem::take(&mut arena.memory);
            (*arena.shared.as_ptr()).memory.with_mut(|place| *place = memory);
            Shared::add_outstanding(arena.shared, arena.in_use as isize);
        }
    }
}
