//! The memory of blocks that a writer writes while readers read.
//!
//! Invariants: *same shape*: an atomic has the size, alignment and every bit pattern of its integer
//! (documented for all of them; alignment is checked below), and the box is the only owner.
//! *Spare*: there are `SPARE_WORDS` words behind the `N` that have places. *Asked*: `has_popcnt` is
//! what the processor said of itself.

#![allow(unsafe_code)]

use alloc::boxed::Box;
use alloc::vec;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

const _: () = assert!(align_of::<AtomicU64>() == align_of::<u64>());

/// Words behind the last place: a byte is looked for up to 7 + 64 bytes behind a place.
const SPARE_WORDS: usize = 16;

/// `N` words (a power of two) and some to spare, all zero and most of them not there yet: room for the
/// largest table, of which an operating system gives only what is touched.
pub(crate) struct Blocks<const N: usize> {
    words: Box<[AtomicU64]>,
    #[cfg_attr(not(all(target_arch = "x86_64", not(miri))), allow(dead_code))]
    has_popcnt: bool,
}

impl<const N: usize> Blocks<N> {
    pub(crate) fn new() -> Blocks<N> {
        const { assert!(N.is_power_of_two()) }
        let zeroes = Box::into_raw(vec![0u64; N.saturating_add(SPARE_WORDS)].into_boxed_slice());
        // SAFETY: *same shape*; the box was taken apart in the line above.
        let words = unsafe { Box::from_raw(zeroes as *mut [AtomicU64]) };
        Blocks { words, has_popcnt: has_popcnt() }
    }

    /// A place within the room: of as many leading bits as it has.
    #[inline(always)]
    const fn within(place: usize) -> usize {
        place & N.wrapping_sub(1)
    }

    /// The words of a block; none if it does not lie in the room.
    pub(crate) fn room(&self, place: usize, count: usize) -> &[AtomicU64] {
        let end = place.checked_add(count).filter(|end| *end <= N);
        end.and_then(|end| self.words.get(place..end)).unwrap_or_default()
    }

    /// The word at a place. Places behind the room begin anew, which costs less than to compare.
    #[inline(always)]
    pub(crate) fn word(&self, place: usize) -> u64 {
        // SAFETY: *spare*: what is within the room is less than the number of words.
        unsafe { self.words.get_unchecked(Self::within(place)) }.load(Relaxed)
    }

    /// The byte that the word at `place` chooses among the bytes behind it: the first if one of its
    /// bits in `mask` is set, the second if two are; if none is, its own last byte.
    ///
    /// On x86-64 this is four instructions that wait for the block where the compiler's are a dozen:
    /// what a core can hold of instructions that wait decides how many look-ups are under way at a
    /// time.
    #[inline(always)]
    pub(crate) fn byte_by_ones(&self, place: usize, mask: u64) -> usize {
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        if self.has_popcnt {
            return self.byte_by_popcnt(place, mask);
        }
        let at = (self.word(place) & mask).count_ones() as usize;
        let at = at.wrapping_add(7);
        let word = self.word(Self::within(place).wrapping_add(at >> 3));
        (word >> ((at & 7) << 3)) as usize & 0xff
    }

    /// The same, if the processor has the instruction that counts bits.
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    #[inline(always)]
    fn byte_by_popcnt(&self, place: usize, mask: u64) -> usize {
        let at = self.words.as_ptr().wrapping_add(Self::within(place));
        let byte: usize;
        // SAFETY: *asked*; *spare*: `at` is one of N words, of which the first is loaded, and then a
        // byte less than 9 words further. A byte of an aligned word is what the load of that word and
        // a shift give, which is what the other way does with atomic loads.
        unsafe {
            core::arch::asm!(
                "and {ones}, qword ptr [{at}]",
                "popcnt {ones}, {ones}",
                "movzx {byte:e}, byte ptr [{at} + {ones} + 7]",
                at = in(reg) at,
                ones = inout(reg) mask => _,
                byte = lateout(reg) byte,
                options(readonly, nostack),
            );
        }
        byte
    }
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
fn has_popcnt() -> bool {
    const POPCNT: u32 = 1 << 23;
    #[allow(unused_unsafe)] // Newer compilers call this safe.
    // SAFETY: every x86-64 has this instruction and this leaf.
    let features = unsafe { core::arch::x86_64::__cpuid(1) };
    features.ecx & POPCNT != 0
}

#[cfg(not(all(target_arch = "x86_64", not(miri))))]
fn has_popcnt() -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn both_ways_find_the_byte_that_the_bits_count_to(
            words in prop::collection::vec(any::<u64>(), 32),
            place in 0usize..32,
            mask: u64,
        ) {
            let mut blocks = Blocks::<32>::new();
            for (word, value) in blocks.room(0, 32).iter().zip(&words) {
                word.store(*value, Relaxed);
            }
            let mut bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
            bytes.resize(bytes.len() + SPARE_WORDS * 8, 0);
            let at = (words[place] & mask).count_ones() as usize;
            let expected = usize::from(bytes[place * 8 + 7 + at]);
            prop_assert_eq!(blocks.byte_by_ones(place, mask), expected);
            prop_assert_eq!(blocks.byte_by_ones(place + 32, mask), expected);
            blocks.has_popcnt = false;
            // Behind the room this way begins anew; no block lies across its end.
            if place * 8 + 7 + at < 32 * 8 {
                prop_assert_eq!(blocks.byte_by_ones(place, mask), expected);
            }
        }
    }

    #[test]
    fn a_block_that_is_not_in_the_room_is_empty() {
        let blocks = Blocks::<8>::new();
        assert_eq!(blocks.room(6, 2).len(), 2);
        assert!(blocks.room(6, 3).is_empty() && blocks.room(usize::MAX, 2).is_empty());
    }
}
