//! The random number generator for values that peers can observe: identifications, ports, rate limits.

use crate::base::chacha::{LANES, WORDS, blocks};

/// Output words of a refill; the other words are the next key.
const OUTPUT_WORDS: usize = LANES * WORDS - KEY_WORDS;
const KEY_WORDS: usize = 8;

/// A cryptographic generator: ChaCha20 with fast key erasure. Each refill replaces the key by output, so
/// the state does not reveal earlier numbers (Bernstein, *Fast-key-erasure random-number generators*,
/// 2017).
///
/// Cost: four blocks of ChaCha20 per 56 numbers.
#[derive(Clone)]
pub struct Random {
    key: [u32; KEY_WORDS],
    output: [u32; OUTPUT_WORDS],
    /// Unused words at the front of `output`; the used words after them are zeroed.
    left: usize,
}

impl core::fmt::Debug for Random {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("Random(secret)")
    }
}

impl Random {
    pub(crate) fn new(key: [u32; KEY_WORDS]) -> Random {
        Random { key, output: [0; OUTPUT_WORDS], left: 0 }
    }

    /// The next number.
    #[inline]
    pub fn number(&mut self) -> u32 {
        if self.left == 0 {
            self.refill();
        }
        self.left = self.left.saturating_sub(1);
        self.output.get_mut(self.left).map_or(0, core::mem::take)
    }

    /// A number in `0..end`, 0 if `end` is 0. The relative bias is at most 2^-16 for `end` up to 2^16.
    #[inline]
    pub fn below(&mut self, end: u32) -> u32 {
        (u64::from(self.number()).wrapping_mul(end.into()) >> 32) as u32
    }

    #[cold]
    fn refill(&mut self) {
        let mut words = [0; LANES * WORDS];
        for (to, from) in words.iter_mut().zip(blocks(&self.key, 0, [0; 3]).as_flattened()) {
            *to = *from;
        }
        let [k0, k1, k2, k3, k4, k5, k6, k7, output @ ..] = words;
        self.key = [k0, k1, k2, k3, k4, k5, k6, k7];
        self.output = output;
        self.left = OUTPUT_WORDS;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn output_is_a_function_of_the_key_and_does_not_repeat_over_refills() {
        let draw = |key| {
            let mut r = Random::new([key; 8]);
            (0..10 * OUTPUT_WORDS).map(|_| r.number()).collect::<Vec<u32>>()
        };
        let numbers = draw(1);
        let distinct = numbers.iter().collect::<BTreeSet<_>>().len();
        assert!(distinct >= numbers.len() - 1, "{distinct} of {}", numbers.len());
        assert_eq!(numbers, draw(1));
        assert_ne!(numbers, draw(2));
    }

    #[test]
    fn output_is_erased_from_the_state() {
        let mut r = Random::new([7; 8]);
        let drawn: Vec<u32> = (0..20).map(|_| r.number()).collect();
        assert!(!r.output.iter().chain(&r.key).any(|word| drawn.contains(word)));
    }

    #[test]
    fn below_is_uniform_and_stays_below_its_bound() {
        let mut r = Random::new([3; 8]);
        let mut seen = [0u32; 10];
        (0..10_000).for_each(|_| seen[r.below(10) as usize] += 1);
        assert!(seen.iter().all(|n| (800..1200).contains(n)), "{seen:?}");
        assert_eq!(r.below(0), 0);
    }
}
