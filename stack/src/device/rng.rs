//! Reproducible random numbers for simulations. Not for secrets.

/// A probability as an integer threshold.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Chance(u64);

impl Chance {
    /// The probability `p`, limited to 0 to 1.
    pub fn new(p: f64) -> Chance {
        // A float-to-integer cast saturates, and turns NaN into 0.
        Chance((p * u64::MAX as f64) as u64)
    }

    /// Whether it is not 0.
    pub const fn is_possible(self) -> bool {
        self.0 != 0
    }
}

/// The generator splitmix64: an addition and a mix per number; any seed is good.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// A generator whose numbers follow from `seed` alone.
    pub const fn new(seed: u64) -> Rng {
        Rng(seed)
    }

    /// The next number, uniform over all 64-bit numbers.
    pub fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let a = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let b = (a ^ (a >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        b ^ (b >> 31)
    }

    /// A number below `n`; 0 if `n` is 0.
    pub fn below(&mut self, n: u64) -> u64 {
        ((u128::from(self.number()) * u128::from(n)) >> 64) as u64
    }

    /// Whether something of this probability happens now. Draws a number only if it can happen, so
    /// that switching one kind of trouble off leaves the others' sequence alone.
    pub fn happens(&mut self, c: Chance) -> bool {
        c.is_possible() && self.number() <= c.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chances_come_true_as_often_as_they_say() {
        let mut rng = Rng::new(7);
        for p in [0.0, 0.01, 0.5, 1.0] {
            let hits = (0..100_000).filter(|_| rng.happens(Chance::new(p))).count();
            let (expected, deviation) = (p * 1e5, (1e5 * p * (1.0 - p)).sqrt());
            assert!((hits as f64 - expected).abs() <= 4.0 * deviation, "{p}: {hits}");
        }
    }

    #[test]
    fn numbers_below_a_bound_reach_every_value() {
        let mut rng = Rng::new(1);
        let mut seen = [0u32; 10];
        (0..10_000).for_each(|_| seen[rng.below(10) as usize] += 1);
        assert!(seen.iter().all(|n| (850..1150).contains(n)), "{seen:?}");
        assert_eq!(rng.below(0), 0);
    }
}
