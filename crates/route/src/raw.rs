//! The memory of slots and blocks that a writer writes while readers read.
//!
//! ```text
//!   │ not used │ SLOTS slots : 32 each │ N words that have places : 64 each │ to spare │
//!              └ `start`: a cache line, of large rooms a large page
//! ```
//!
//! Invariants: *same shape*: an atomic has the size, alignment and every bit pattern of its integer
//! (documented for all of them; alignment is checked below). *Owner*: `memory` is a box that was taken
//! apart, goes with this value and is never written but through atomics; `start` points into it.
//! *Parts*: from `start` on there are `SLOT_WORDS` words, in which halves are looked at and never words,
//! then `N`, then `SPARE_WORDS`. *Places*: every slot of [`Places`] holds a number below `N`; they begin
//! as 0, and `set` asserts it. *Asked*: `has_bits` is what the processor said of itself.

#![allow(unsafe_code)]

use alloc::boxed::Box;
use alloc::vec;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

const _: () = assert!(align_of::<AtomicU64>() == align_of::<u64>());
const _: () = assert!(align_of::<AtomicU32>() == align_of::<u32>());
const _: () = assert!(size_of::<AtomicU32>() * 2 == size_of::<AtomicU64>());

/// Words behind the last place: a byte is looked for up to 8 + 64 bytes behind one.
const SPARE_WORDS: usize = 16;
/// Words of a cache line.
pub(crate) const LINE_WORDS: usize = 8;
/// Words of a large page: where large rooms begin, so that an operating system can give large pages.
const PAGE_WORDS: usize = (2 << 20) / size_of::<u64>();

/// `SLOTS` slots, `N` words (a power of two) and some to spare, all zero and most of them not there yet:
/// room for the largest table, of which an operating system gives only what is touched.
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
        // SAFETY: *owner*: `new` took it apart, and nobody else puts it together.
        drop(unsafe { Box::from_raw(self.memory.as_ptr()) });
    }
}

impl<const SLOTS: usize, const N: usize> Blocks<SLOTS, N> {
    /// Words of the slots: whole lines, so that the words behind begin with one.
    const SLOT_WORDS: usize = SLOTS.div_ceil(2 * LINE_WORDS) * LINE_WORDS;
    /// Words that are used.
    const WORDS: usize = Self::SLOT_WORDS + N + SPARE_WORDS;
    /// What the place of the first word in memory is a multiple of, in words.
    const ALIGN: usize = if N < PAGE_WORDS { LINE_WORDS } else { PAGE_WORDS };

    /// `advise` is told where the memory is and of how many bytes, before anything is in it.
    pub(crate) fn new(advise: impl FnOnce(*const u8, usize)) -> Blocks<SLOTS, N> {
        const { assert!(N.is_power_of_two() && SLOTS > 0) }
        // An allocation that asked for the alignment itself would be zeroed by touching all of it.
        let zeroes = vec![0u64; Self::WORDS.saturating_add(Self::ALIGN)].into_boxed_slice();
        let memory = NonNull::from(Box::leak(zeroes));
        // SAFETY: *same shape*; the pointer is to the same words.
        let memory = unsafe { NonNull::new_unchecked(memory.as_ptr() as *mut [AtomicU64]) };
        let first = memory.cast::<AtomicU64>();
        let bytes = const { Self::ALIGN * size_of::<u64>() };
        let address = first.addr().get();
        let unused = address.next_multiple_of(bytes).wrapping_sub(address)
            >> size_of::<u64>().trailing_zeros();
        // SAFETY: less than `ALIGN` words are left out of those that were asked for beyond `WORDS`.
        let start = unsafe { first.add(unused) };
        advise(start.as_ptr().cast(), Self::WORDS.saturating_mul(size_of::<u64>()));
        Blocks { memory, start }
    }

    /// A slot; beyond the last one, the last.
    #[inline(always)]
    pub(crate) fn slot(&self, slot: usize) -> &AtomicU32 {
        let slot = slot.min(const { SLOTS - 1 });
        // SAFETY: *owner*, *same shape*, *parts*: the halves of `SLOT_WORDS` words are at least `SLOTS`.
        unsafe { self.start.cast::<AtomicU32>().add(slot).as_ref() }
    }

    /// Where the word at a place is.
    ///
    /// # Safety
    /// The place is at most `N + SPARE_WORDS`.
    #[inline(always)]
    unsafe fn at(&self, place: usize) -> NonNull<AtomicU64> {
        // SAFETY: *parts*, by the caller's promise.
        unsafe { self.start.add(Self::SLOT_WORDS).add(place) }
    }

    /// A place within the room: of as many leading bits as it has.
    #[inline(always)]
    const fn within(place: usize) -> usize {
        place & N.wrapping_sub(1)
    }

    /// The words of a block; none if it does not lie in the room.
    pub(crate) fn room(&self, place: usize, count: usize) -> &[AtomicU64] {
        match place.checked_add(count) {
            // SAFETY: *owner*, *parts*: they end at `N` or before.
            Some(end) if end <= N => unsafe {
                NonNull::slice_from_raw_parts(self.at(place), count).as_ref()
            },
            _ => &[],
        }
    }

    /// The word at a place. Places behind the room begin anew, which costs less than to compare.
    #[inline(always)]
    pub(crate) fn word(&self, place: usize) -> u64 {
        // SAFETY: *owner*, *parts*: what is within the room is less than `N`.
        unsafe { self.at(Self::within(place)).as_ref() }.load(Ordering::Relaxed)
    }

    /// Asks for the line of a place to be brought near.
    #[inline(always)]
    pub(crate) fn prefetch(&self, place: usize) {
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        {
            use core::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            // SAFETY: what is within the room is less than `N`; and a hint reads nothing.
            unsafe {
                _mm_prefetch::<_MM_HINT_T0>(
                    self.at(Self::within(place)).as_ptr().cast_const().cast(),
                )
            };
        }
        #[cfg(not(all(target_arch = "x86_64", not(miri))))]
        core::hint::black_box(self.word(place));
    }
}

/// Slots that hold places, of blocks that are a word of bits and bytes behind it.
pub(crate) struct Places<const SLOTS: usize, const N: usize> {
    blocks: Blocks<SLOTS, N>,
    /// Whether the processor has the instructions that cut and count bits.
    #[cfg_attr(not(all(target_arch = "x86_64", not(miri))), allow(dead_code))]
    has_bits: bool,
}

impl<const SLOTS: usize, const N: usize> Places<SLOTS, N> {
    /// As [`Blocks::new`]; every slot holds place 0.
    pub(crate) fn new(advise: impl FnOnce(*const u8, usize)) -> Places<SLOTS, N> {
        Places { blocks: Blocks::new(advise), has_bits: has_bits() }
    }

    /// What slots and places are in, but for changes of slots.
    #[inline(always)]
    pub(crate) fn room(&self, place: usize, count: usize) -> &[AtomicU64] {
        self.blocks.room(place, count)
    }

    /// As [`Blocks::word`].
    #[inline(always)]
    pub(crate) fn word(&self, place: usize) -> u64 {
        self.blocks.word(place)
    }

    /// The place in a slot; beyond the last one, in the last.
    #[inline(always)]
    pub(crate) fn place(&self, slot: usize) -> Place {
        Place(self.blocks.slot(slot).load(Ordering::Acquire))
    }

    /// Puts a place into a slot; the place that it held.
    ///
    /// # Panics
    /// The place is not in the room.
    pub(crate) fn set(&self, slot: usize, place: usize) -> usize {
        assert!(place < N, "a block is in the room");
        self.blocks.slot(slot).swap(place as u32, Ordering::Release) as usize
    }

    /// Asks for the line of a place to be brought near.
    #[inline(always)]
    pub(crate) fn prefetch(&self, place: Place) {
        self.blocks.prefetch(place.number());
    }

    /// The byte that the word at a place chooses among those behind it: the first if none of its lowest
    /// `bits` bits (less than 64) is set, the second if one is, and so on.
    ///
    /// On x86-64 this is three instructions that wait for the block where the compiler's are a dozen:
    /// how many instructions a core can hold decides how many look-ups are under way at a time.
    #[inline(always)]
    pub(crate) fn byte_by_ones(&self, place: Place, bits: u32) -> usize {
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        if self.has_bits {
            return self.byte_by_instructions(place, bits);
        }
        self.byte_by_words(place, bits)
    }

    /// The same on any processor; apart, so that it takes no registers of the way above.
    #[inline(never)]
    fn byte_by_words(&self, place: Place, bits: u32) -> usize {
        let below = 1u64.wrapping_shl(bits).wrapping_sub(1);
        let ones = (self.word(place.number()) & below).count_ones() as usize;
        let at = ones.wrapping_add(8);
        // SAFETY: *places*, *parts*: at most 9 words behind a place.
        let word = unsafe { self.blocks.at(place.number().wrapping_add(at >> 3)).as_ref() };
        (word.load(Ordering::Relaxed) >> ((at & 7) << 3)) as usize & 0xff
    }

    /// The same, if the processor has the instructions.
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    #[inline(always)]
    fn byte_by_instructions(&self, place: Place, bits: u32) -> usize {
        let byte: usize;
        // SAFETY: *asked*; *places*, *parts*: the word at a place is loaded, and then a byte less than 9
        // words further. A byte of an aligned word is what the load of that word and a shift give, which
        // is what the other way does with atomic loads.
        unsafe {
            core::arch::asm!(
                "bzhi {ones}, qword ptr [{at}], {bits}",
                "popcnt {ones}, {ones}",
                "movzx {byte:e}, byte ptr [{at} + {ones} + 8]",
                at = in(reg) self.blocks.at(place.number()).as_ptr(),
                bits = in(reg) u64::from(bits),
                ones = out(reg) _,
                byte = lateout(reg) byte,
                options(readonly, nostack),
            );
        }
        byte
    }
}

/// A place that a slot holds.
#[derive(Clone, Copy, Default)]
pub(crate) struct Place(u32);

impl Place {
    #[inline(always)]
    pub(crate) fn number(self) -> usize {
        self.0 as usize
    }
}

/// Whether the processor has POPCNT (leaf 1) and BZHI (leaf 7, BMI2).
#[cfg(all(target_arch = "x86_64", not(miri)))]
fn has_bits() -> bool {
    const POPCNT: u32 = 1 << 23;
    const BMI2: u32 = 1 << 8;
    #[allow(unused_unsafe)] // Newer compilers call this safe.
    // SAFETY: every x86-64 has this instruction; leaves are asked for up to the last.
    let (last, one, seven) = unsafe {
        use core::arch::x86_64::{__cpuid, __cpuid_count};
        (__cpuid(0).eax, __cpuid(1).ecx, __cpuid_count(7, 0).ebx)
    };
    last >= 7 && one & POPCNT != 0 && seven & BMI2 != 0
}

#[cfg(not(all(target_arch = "x86_64", not(miri))))]
fn has_bits() -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::sync::atomic::Ordering::Relaxed;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn both_ways_find_the_byte_that_the_bits_count_to(
            words in prop::collection::vec(any::<u64>(), 32),
            place in 0usize..32,
            bits in 0u32..64,
        ) {
            let mut places = Places::<3, 32>::new(|_, _| ());
            for (word, value) in places.room(0, 32).iter().zip(&words) {
                word.store(*value, Relaxed);
            }
            let mut bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
            bytes.resize(bytes.len() + SPARE_WORDS * 8, 0);
            let ones = (0..bits).filter(|bit| words[place] >> bit & 1 == 1).count();
            let expected = usize::from(bytes[place * 8 + 8 + ones]);
            prop_assert_eq!(places.set(1, place), 0);
            let place = places.place(1);
            prop_assert_eq!(places.byte_by_ones(place, bits), expected);
            places.has_bits = false;
            prop_assert_eq!(places.byte_by_ones(place, bits), expected);
        }
    }

    #[test]
    fn a_block_that_is_not_in_the_room_is_empty() {
        let blocks = Blocks::<3, 8>::new(|_, _| ());
        assert_eq!(blocks.room(6, 2).len(), 2);
        assert!(blocks.room(6, 3).is_empty() && blocks.room(usize::MAX, 2).is_empty());
    }

    #[test]
    #[should_panic = "a block is in the room"]
    fn a_slot_holds_no_place_that_is_not_in_the_room() {
        Places::<3, 8>::new(|_, _| ()).set(0, 8);
    }

    #[test]
    fn slots_and_words_share_nothing_and_begin_with_a_line() {
        let mut told = (0, 0);
        let blocks = Blocks::<17, 16>::new(|start, bytes| told = (start.addr(), bytes));
        assert_eq!((told.0 % 64, told.1), (0, (16 + 16 + SPARE_WORDS) * 8));
        (0..20).for_each(|n| blocks.slot(n).store(u32::MAX, Relaxed));
        assert!((0..16).all(|place| blocks.word(place) == 0));
        assert_eq!(blocks.room(0, 1).as_ptr().addr() % 64, 0);
        blocks.room(0, 16).iter().for_each(|word| word.store(7, Relaxed));
        assert!((0..20).all(|n| blocks.slot(n).load(Relaxed) == u32::MAX));
        blocks.prefetch(usize::MAX);
    }

    #[test]
    fn a_large_room_begins_with_a_large_page() {
        let mut at = 1;
        let _blocks = Blocks::<1, PAGE_WORDS>::new(|start, _| at = start.addr());
        assert_eq!(at % (2 << 20), 0);
    }
}
