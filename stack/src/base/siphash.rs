//! SipHash (Aumasson and Bernstein, *SipHash: a fast short-input PRF*, 2012) over 64-bit words.
//!
//! SipHash-2-4 where the output is sent; SipHash-1-3 for hash tables, whose hashes are never sent.

use crate::base::Key;

/// SipHash-`C`-`D`: `C` rounds per word and `D` final rounds. Each word is eight bytes of the input in
/// little-endian order.
#[inline(always)]
pub(crate) fn sip<const C: usize, const D: usize>(key: &Key, words: &[u64]) -> u64 {
    let [k0, k1] = key.halves();
    let mut v = [
        k0 ^ 0x736f_6d65_7073_6575,
        k1 ^ 0x646f_7261_6e64_6f6d,
        k0 ^ 0x6c79_6765_6e65_7261,
        k1 ^ 0x7465_6462_7974_6573,
    ];
    for word in words {
        absorb::<C>(&mut v, *word);
    }
    absorb::<C>(&mut v, (words.len() as u64) << 59);
    let [a, b, c, d] = v;
    v = [a, b, c ^ 0xff, d];
    (0..D).for_each(|_| round(&mut v));
    v.iter().fold(0, |all, x| all ^ x)
}

#[inline(always)]
fn absorb<const C: usize>(v: &mut [u64; 4], word: u64) {
    let [a, b, c, d] = *v;
    *v = [a, b, c, d ^ word];
    (0..C).for_each(|_| round(v));
    let [a, b, c, d] = *v;
    *v = [a ^ word, b, c, d];
}

#[inline(always)]
fn round(v: &mut [u64; 4]) {
    let [mut a, mut b, mut c, mut d] = *v;
    a = a.wrapping_add(b);
    b = b.rotate_left(13) ^ a;
    a = a.rotate_left(32);
    c = c.wrapping_add(d);
    d = d.rotate_left(16) ^ c;
    a = a.wrapping_add(d);
    d = d.rotate_left(21) ^ a;
    c = c.wrapping_add(b);
    b = b.rotate_left(17) ^ c;
    c = c.rotate_left(32);
    *v = [a, b, c, d];
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::hash::Hasher;

    #[test]
    fn siphash_1_3_agrees_with_the_standard_library() {
        // `DefaultHasher` is SipHash-1-3 with a key of zero.
        for words in [&[1u64, 2][..], &[0x0102_0304_0506_0708, 9, 10, 11, u64::MAX]] {
            #[allow(deprecated)]
            let mut reference = std::hash::DefaultHasher::new();
            words.iter().for_each(|w| reference.write(&w.to_le_bytes()));
            assert_eq!(sip::<1, 3>(&Key::new(0, 0), words), reference.finish());
        }
    }

    #[test]
    fn siphash_2_4_gives_the_reference_test_vectors() {
        // Key 00 01 .. 0f; the inputs of 0 and 8 bytes 00 01 .. (`vectors.h` of the reference code).
        let key = Key::new(0x0706_0504_0302_0100, 0x0f0e_0d0c_0b0a_0908);
        assert_eq!(sip::<2, 4>(&key, &[]), 0x726f_db47_dd0e_0e31);
        assert_eq!(sip::<2, 4>(&key, &[0x0706_0504_0302_0100]), 0x93f5_f579_9a93_2462);
    }
}
