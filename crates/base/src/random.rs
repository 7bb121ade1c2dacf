//! Random numbers for what strangers see: identifications, ports, budgets.

use crate::chacha::{LANES, WORDS, blocks};

/// Words of one refill that are given out; the others are the next key.
const GIVEN: usize = LANES * WORDS - KEY_WORDS;
const KEY_WORDS: usize = 8;

/// A generator whose numbers tell nothing about each other: ChaCha20, whose key is replaced by its own
/// output at each refill, so that a state read later does not tell what was drawn before (Bernstein,
/// *Fast-key-erasure random-number generators*, 2017).
///
/// Cost: four blocks of ChaCha20 for 56 numbers.
#[derive(Clone)]
pub struct Random {
    key: [u32; KEY_WORDS],
    given: [u32; GIVEN],
    /// How many of `given` are left; those behind are zero.
    left: usize,
}

impl core::fmt::Debug for Random {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("Random(secret)")
    }
}

impl Random {
    pub(crate) fn new(key: [u32; KEY_WORDS]) -> Random {
        Random { key, given: [0; GIVEN], left: 0 }
    }

    /// The next number.
    #[inline]
    pub fn number(&mut self) -> u32 {
        if self.left == 0 {
            self.refill();
        }
        self.left = self.left.saturating_sub(1);
        self.given.get_mut(self.left).map_or(0, core::mem::take)
    }

    /// A number from 0 to `end - 1`, 0 for an `end` of 0. Of `end` up to 2^16 no number is preferred by
    /// more than 2^-16.
    #[inline]
    pub fn below(&mut self, end: u32) -> u32 {
        (u64::from(self.number()).wrapping_mul(end.into()) >> 32) as u32
    }

    #[cold]
    fn refill(&mut self) {
        let [k0, k1, k2, k3, k4, k5, k6, k7, given @ ..] = flat(&blocks(&self.key, 0, [0; 3]));
        self.key = [k0, k1, k2, k3, k4, k5, k6, k7];
        self.given = given;
        self.left = GIVEN;
    }
}

fn flat(x: &[[u32; LANES]; WORDS]) -> [u32; LANES * WORDS] {
    let mut all = [0; LANES * WORDS];
    for (to, from) in all.iter_mut().zip(x.as_flattened()) {
        *to = *from;
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn numbers_do_not_repeat_over_many_refills_and_follow_from_the_key() {
        let draw = |key| {
            let mut r = Random::new([key; 8]);
            (0..10 * GIVEN).map(|_| r.number()).collect::<Vec<u32>>()
        };
        let numbers = draw(1);
        let distinct = numbers.iter().collect::<BTreeSet<_>>().len();
        assert!(distinct >= numbers.len() - 1, "{distinct} of {}", numbers.len());
        assert_eq!(numbers, draw(1));
        assert_ne!(numbers, draw(2));
    }

    #[test]
    fn what_was_given_out_is_not_in_the_state_any_more() {
        let mut r = Random::new([7; 8]);
        let drawn: Vec<u32> = (0..20).map(|_| r.number()).collect();
        assert!(!r.given.iter().chain(&r.key).any(|word| drawn.contains(word)));
    }

    #[test]
    fn below_meets_every_number_and_stays_below() {
        let mut r = Random::new([3; 8]);
        let mut seen = [0u32; 10];
        (0..10_000).for_each(|_| seen[r.below(10) as usize] += 1);
        assert!(seen.iter().all(|n| (800..1200).contains(n)), "{seen:?}");
        assert_eq!(r.below(0), 0);
    }
}
