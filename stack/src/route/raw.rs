//! The memory of slots and blocks, written by one writer while readers read.
//!
//! ```text
//!   │ not used │ SLOTS slots : 32 each │ N block words : 64 each │ spare │
//!              └ `start`: aligned to a cache line, large memories to a huge page
//! ```
//!
//! Invariants: *same shape*: an atomic has the size, alignment and bit validity of its integer
//! (documented for all of them; alignment is checked below). *Owner*: `memory` is a leaked box that
//! this value owns and frees; it is accessed through atomics only; `start` points into it. *Parts*:
//! from `start` on there are `SLOT_WORDS` words, accessed as 32-bit halves only, then `N`, then
//! `SPARE_WORDS`. *Offsets*: every slot of [`BlockSlots`] holds a number below `N`; it is initially 0,
//! and `set` asserts it. *Asked*: `has_bmi2` is the result of CPUID.

#![allow(unsafe_code)]

use alloc::boxed::Box;
use alloc::vec;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

const _: () = assert!(align_of::<AtomicU64>() == align_of::<u64>());
const _: () = assert!(align_of::<AtomicU32>() == align_of::<u32>());
const _: () = assert!(size_of::<AtomicU32>() * 2 == size_of::<AtomicU64>());

/// Words after the last offset: a byte is read up to 8 + 64 bytes beyond an offset.
const SPARE_WORDS: usize = 16;
/// Words of a cache line.
pub(crate) const LINE_WORDS: usize = 8;
/// Words of a huge page: the alignment of large memories, so that the operating system can use huge
/// pages.
const PAGE_WORDS: usize = (2 << 20) / size_of::<u64>();

/// `SLOTS` slots, `N` words (a power of two) and spare words, zeroed. Sized for the largest table;
/// the operating system allocates only touched pages.
pub(crate) struct Blocks<const SLOTS: usize, const N: usize> {
    memory: NonNull<[AtomicU64]>,
    start: NonNull<AtomicU64>,
}

// SAFETY: *owner*, and all that is shared are atomics.
unsafe impl<const SLOTS: usize, const N: usize> Send for Blocks<SLOTS, N> {}
// SAFETY: as above.
unsafe impl<const SLOTS: usize, const N: usize> Sync for Blocks<SLOTS, N> {}

impl<const SLOTS: usize, const N: usize> Drop for Blocks<SLOTS, N> {
    fn drop(&mut self) {
        // SAFETY: *owner*: `new` leaked the box, and only this call reclaims it.
        drop(unsafe { Box::from_raw(self.memory.as_ptr()) });
    }
}

impl<const SLOTS: usize, const N: usize> Blocks<SLOTS, N> {
    /// Words of the slots: whole cache lines, so that the block words start at one.
    const SLOT_WORDS: usize = SLOTS.div_ceil(2 * LINE_WORDS) * LINE_WORDS;
    /// Words in use.
    const WORDS: usize = Self::SLOT_WORDS + N + SPARE_WORDS;
    /// Alignment of the memory, words.
    const ALIGN: usize = if N < PAGE_WORDS { LINE_WORDS } else { PAGE_WORDS };

    /// `advise` is called with the address and length of the memory before its first use.
    pub(crate) fn new(advise: impl FnOnce(*const u8, usize)) -> Blocks<SLOTS, N> {
        const { assert!(N.is_power_of_two() && SLOTS > 0) }
        // A zeroed allocation with this alignment would touch all pages.
        let zeroes = vec![0u64; Self::WORDS.saturating_add(Self::ALIGN)].into_boxed_slice();
        let memory = NonNull::from(Box::leak(zeroes));
        // SAFETY: *same shape*; the pointer is to the same words.
        let memory = unsafe { NonNull::new_unchecked(memory.as_ptr() as *mut [AtomicU64]) };
        let first = memory.cast::<AtomicU64>();
        let bytes = const { Self::ALIGN * size_of::<u64>() };
        let address = first.addr().get();
        let unused = address.next_multiple_of(bytes).wrapping_sub(address)
            >> size_of::<u64>().trailing_zeros();
        // SAFETY: fewer than `ALIGN` of the additional words are skipped.
        let start = unsafe { first.add(unused) };
        advise(start.as_ptr().cast(), Self::WORDS.saturating_mul(size_of::<u64>()));
        Blocks { memory, start }
    }

    /// A slot; an index beyond the last slot gives the last.
    #[inline(always)]
    pub(crate) fn slot(&self, slot: usize) -> &AtomicU32 {
        let slot = slot.min(const { SLOTS - 1 });
        // SAFETY: *owner*, *same shape*, *parts*: the halves of `SLOT_WORDS` words are at least `SLOTS`.
        unsafe { self.start.cast::<AtomicU32>().add(slot).as_ref() }
    }

    /// Pointer to the word at an offset.
    ///
    /// # Safety
    /// The offset is at most `N + SPARE_WORDS`.
    #[inline(always)]
    unsafe fn at(&self, offset: usize) -> NonNull<AtomicU64> {
        // SAFETY: *parts*, by the caller's promise.
        unsafe { self.start.add(Self::SLOT_WORDS).add(offset) }
    }

    /// An offset reduced modulo `N`.
    #[inline(always)]
    const fn wrap(offset: usize) -> usize {
        offset & N.wrapping_sub(1)
    }

    /// The words of a block; empty if it is out of bounds.
    pub(crate) fn block(&self, offset: usize, count: usize) -> &[AtomicU64] {
        match offset.checked_add(count) {
            // SAFETY: *owner*, *parts*: they end at `N` or before.
            Some(end) if end <= N => unsafe {
                NonNull::slice_from_raw_parts(self.at(offset), count).as_ref()
            },
            _ => &[],
        }
    }

    /// The word at an offset. The offset wraps modulo `N`, which is cheaper than a bounds check.
    #[inline(always)]
    pub(crate) fn word(&self, offset: usize) -> u64 {
        // SAFETY: *owner*, *parts*: a wrapped offset is less than `N`.
        unsafe { self.at(Self::wrap(offset)).as_ref() }.load(Ordering::Relaxed)
    }

    /// Prefetches the cache line of an offset.
    #[inline(always)]
    pub(crate) fn prefetch(&self, offset: usize) {
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        {
            use core::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            // SAFETY: a wrapped offset is less than `N`; and a hint reads nothing.
            unsafe {
                _mm_prefetch::<_MM_HINT_T0>(
                    self.at(Self::wrap(offset)).as_ptr().cast_const().cast(),
                )
            };
        }
        #[cfg(not(all(target_arch = "x86_64", not(miri))))]
        core::hint::black_box(self.word(offset));
    }
}

/// Slots that hold offsets of blocks. A block is a word of bits followed by bytes.
pub(crate) struct BlockSlots<const SLOTS: usize, const N: usize> {
    blocks: Blocks<SLOTS, N>,
    /// Whether the processor has BZHI and POPCNT.
    #[cfg_attr(not(all(target_arch = "x86_64", not(miri))), allow(dead_code))]
    has_bmi2: bool,
}

impl<const SLOTS: usize, const N: usize> BlockSlots<SLOTS, N> {
    /// As [`Blocks::new`]; every slot holds offset 0.
    pub(crate) fn new(advise: impl FnOnce(*const u8, usize)) -> BlockSlots<SLOTS, N> {
        BlockSlots { blocks: Blocks::new(advise), has_bmi2: has_bmi2() }
    }

    /// As [`Blocks::block`].
    #[inline(always)]
    pub(crate) fn block(&self, offset: usize, count: usize) -> &[AtomicU64] {
        self.blocks.block(offset, count)
    }

    /// As [`Blocks::word`].
    #[inline(always)]
    pub(crate) fn word(&self, offset: usize) -> u64 {
        self.blocks.word(offset)
    }

    /// The offset in a slot; an index beyond the last slot gives the last.
    #[inline(always)]
    pub(crate) fn offset(&self, slot: usize) -> Offset {
        Offset(self.blocks.slot(slot).load(Ordering::Acquire))
    }

    /// Stores an offset in a slot. Returns the previous offset.
    ///
    /// # Panics
    /// The offset is out of bounds.
    pub(crate) fn set(&self, slot: usize, offset: usize) -> usize {
        assert!(offset < N, "the offset is in bounds");
        self.blocks.slot(slot).swap(offset as u32, Ordering::Release) as usize
    }

    /// Prefetches the cache line of an offset.
    #[inline(always)]
    pub(crate) fn prefetch(&self, offset: Offset) {
        self.blocks.prefetch(offset.number());
    }

    /// The byte after the word at an offset whose index is the population count of the word's lowest
    /// `bits` bits (less than 64).
    ///
    /// On x86-64 three instructions depend on the load of the block, instead of a dozen of the
    /// compiler's. The reorder buffer then holds more look-ups at a time.
    #[inline(always)]
    pub(crate) fn byte_by_popcount(&self, offset: Offset, bits: u32) -> usize {
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        if self.has_bmi2 {
            return self.byte_bmi2(offset, bits);
        }
        self.byte_portable(offset, bits)
    }

    /// Portable version; out of line, so that it uses no registers of the fast path.
    #[inline(never)]
    fn byte_portable(&self, offset: Offset, bits: u32) -> usize {
        let below = 1u64.wrapping_shl(bits).wrapping_sub(1);
        let ones = (self.word(offset.number()) & below).count_ones() as usize;
        let at = ones.wrapping_add(8);
        // SAFETY: *offsets*, *parts*: at most 9 words after an offset.
        let word = unsafe { self.blocks.at(offset.number().wrapping_add(at >> 3)).as_ref() };
        (word.load(Ordering::Relaxed) >> ((at & 7) << 3)) as usize & 0xff
    }

    /// Version with BZHI and POPCNT.
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    #[inline(always)]
    fn byte_bmi2(&self, offset: Offset, bits: u32) -> usize {
        let byte: usize;
        // SAFETY: *asked*; *offsets*, *parts*: the word at an offset is loaded, and then a byte less than 9
        // words further. A byte of an aligned word is what the load of that word and a shift give, which
        // is what the portable version does with atomic loads.
        unsafe {
            core::arch::asm!(
                "bzhi {ones}, qword ptr [{at}], {bits}",
                "popcnt {ones}, {ones}",
                "movzx {byte:e}, byte ptr [{at} + {ones} + 8]",
                at = in(reg) self.blocks.at(offset.number()).as_ptr(),
                bits = in(reg) u64::from(bits),
                ones = out(reg) _,
                byte = lateout(reg) byte,
                options(readonly, nostack),
            );
        }
        byte
    }
}

/// An offset held by a slot.
#[derive(Clone, Copy, Default)]
pub(crate) struct Offset(u32);

impl Offset {
    #[inline(always)]
    pub(crate) fn number(self) -> usize {
        self.0 as usize
    }
}

/// Whether the processor has POPCNT (leaf 1) and BZHI (leaf 7, BMI2).
#[cfg(all(target_arch = "x86_64", not(miri)))]
fn has_bmi2() -> bool {
    const POPCNT: u32 = 1 << 23;
    const BMI2: u32 = 1 << 8;
    #[allow(unused_unsafe)] // Newer compilers call this safe.
    // SAFETY: every x86-64 has CPUID; a leaf beyond the last returns other data, which `last` excludes.
    let (last, one, seven) = unsafe {
        use core::arch::x86_64::{__cpuid, __cpuid_count};
        (__cpuid(0).eax, __cpuid(1).ecx, __cpuid_count(7, 0).ebx)
    };
    last >= 7 && one & POPCNT != 0 && seven & BMI2 != 0
}

#[cfg(not(all(target_arch = "x86_64", not(miri))))]
fn has_bmi2() -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::sync::atomic::Ordering::Relaxed;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn both_versions_find_the_byte_selected_by_the_population_count(
            words in prop::collection::vec(any::<u64>(), 32),
            offset in 0usize..32,
            bits in 0u32..64,
        ) {
            let mut offsets = BlockSlots::<3, 32>::new(|_, _| ());
            for (word, value) in offsets.block(0, 32).iter().zip(&words) {
                word.store(*value, Relaxed);
            }
            let mut bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
            bytes.resize(bytes.len() + SPARE_WORDS * 8, 0);
            let ones = (0..bits).filter(|bit| words[offset] >> bit & 1 == 1).count();
            let expected = usize::from(bytes[offset * 8 + 8 + ones]);
            prop_assert_eq!(offsets.set(1, offset), 0);
            let offset = offsets.offset(1);
            prop_assert_eq!(offsets.byte_by_popcount(offset, bits), expected);
            offsets.has_bmi2 = false;
            prop_assert_eq!(offsets.byte_by_popcount(offset, bits), expected);
        }
    }

    #[test]
    fn a_block_out_of_bounds_is_empty() {
        let blocks = Blocks::<3, 8>::new(|_, _| ());
        assert_eq!(blocks.block(6, 2).len(), 2);
        assert!(blocks.block(6, 3).is_empty() && blocks.block(usize::MAX, 2).is_empty());
    }

    #[test]
    #[should_panic = "the offset is in bounds"]
    fn an_offset_out_of_bounds_is_refused() {
        BlockSlots::<3, 8>::new(|_, _| ()).set(0, 8);
    }

    #[test]
    fn slots_and_words_are_disjoint_and_start_at_a_cache_line() {
        let mut advised = (0, 0);
        let blocks = Blocks::<17, 16>::new(|start, bytes| advised = (start.addr(), bytes));
        assert_eq!((advised.0 % 64, advised.1), (0, (16 + 16 + SPARE_WORDS) * 8));
        (0..20).for_each(|n| blocks.slot(n).store(u32::MAX, Relaxed));
        assert!((0..16).all(|offset| blocks.word(offset) == 0));
        assert_eq!(blocks.block(0, 1).as_ptr().addr() % 64, 0);
        blocks.block(0, 16).iter().for_each(|word| word.store(7, Relaxed));
        assert!((0..20).all(|n| blocks.slot(n).load(Relaxed) == u32::MAX));
        blocks.prefetch(usize::MAX);
    }

    #[test]
    fn a_large_memory_starts_at_a_huge_page() {
        let mut at = 1;
        let _blocks = Blocks::<1, PAGE_WORDS>::new(|start, _| at = start.addr());
        assert_eq!(at % (2 << 20), 0);
    }
}
