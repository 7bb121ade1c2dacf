//! The instructions that select a byte by a population count.
//!
//! Invariants: *asked*: `has_bmi2` is the result of CPUID. *Bounds*: a block starts in a line that is not
//! the last one, so the 15 words after its first are in the lines.

#![allow(unsafe_code)]

/// Words of a cache line.
pub(crate) const LINE_WORDS: usize = 8;

/// A cache line of words.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Line(pub(crate) [u64; LINE_WORDS]);

/// Which version selects bytes.
pub(crate) struct Select {
    /// Whether the processor has BZHI and POPCNT.
    #[cfg_attr(not(all(target_arch = "x86_64", not(miri))), allow(dead_code))]
    has_bmi2: bool,
}

impl Select {
    pub(crate) fn new() -> Select {
        Select { has_bmi2: has_bmi2() }
    }

    /// The byte after word number `offset` whose index is the population count of the word's lowest
    /// `bits` bits (less than 64). 0 if the word is not in a line before the last.
    ///
    /// On x86-64 three instructions depend on the load of the word, instead of a dozen of the
    /// compiler's. The reorder buffer then holds more look-ups at a time.
    #[inline(always)]
    pub(crate) fn byte_by_popcount(&self, lines: &[Line], offset: usize, bits: u32) -> u8 {
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        if self.has_bmi2 {
            return byte_bmi2(lines, offset, bits);
        }
        byte_portable(lines, offset, bits)
    }
}

/// The word at an offset; 0 out of bounds.
#[inline(always)]
pub(crate) fn word(lines: &[Line], offset: usize) -> u64 {
    let word = lines.get(offset / LINE_WORDS).and_then(|line| line.0.get(offset % LINE_WORDS));
    word.copied().unwrap_or(0)
}

/// Portable version; out of line, so that it uses no registers of the fast path.
#[inline(never)]
fn byte_portable(lines: &[Line], offset: usize, bits: u32) -> u8 {
    if offset / LINE_WORDS >= lines.len().saturating_sub(1) {
        return 0;
    }
    let below = 1u64.wrapping_shl(bits).wrapping_sub(1);
    let at = ((word(lines, offset) & below).count_ones() as usize).wrapping_add(8);
    (word(lines, offset.wrapping_add(at >> 3)) >> ((at & 7) << 3)) as u8
}

/// Version with BZHI and POPCNT.
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[inline(always)]
fn byte_bmi2(lines: &[Line], offset: usize, bits: u32) -> u8 {
    if offset / LINE_WORDS >= lines.len().saturating_sub(1) {
        return 0;
    }
    let byte: u32;
    // SAFETY: *asked*; *bounds*, by the check above: the word at `offset` is loaded, and then a byte at
    // most 8 words further.
    unsafe {
        core::arch::asm!(
            "bzhi {ones}, qword ptr [{at}], {bits}",
            "popcnt {ones}, {ones}",
            "movzx {byte:e}, byte ptr [{at} + {ones} + 8]",
            at = in(reg) lines.as_ptr().cast::<u64>().add(offset),
            bits = in(reg) u64::from(bits),
            ones = out(reg) _,
            byte = lateout(reg) byte,
            options(readonly, nostack),
        );
    }
    byte as u8
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
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn both_versions_find_the_byte_selected_by_the_population_count(
            words in prop::collection::vec(any::<u64>(), 40),
            offset in 0usize..50,
            bits in 0u32..64,
        ) {
            let lines: Vec<Line> =
                words.chunks_exact(8).map(|line| Line(line.try_into().unwrap())).collect();
            let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
            let expected = match words[..32].get(offset) {
                None => 0,
                Some(word) => {
                    let ones = (0..bits).filter(|bit| word >> bit & 1 == 1).count();
                    bytes[offset * 8 + 8 + ones]
                }
            };
            prop_assert_eq!(word(&lines, offset), words.get(offset).copied().unwrap_or(0));
            let mut select = Select::new();
            prop_assert_eq!(select.byte_by_popcount(&lines, offset, bits), expected);
            select.has_bmi2 = false;
            prop_assert_eq!(select.byte_by_popcount(&lines, offset, bits), expected);
        }
    }

    #[test]
    fn without_lines_the_byte_is_0() {
        assert_eq!(Select::new().byte_by_popcount(&[], usize::MAX, 3), 0);
    }
}
