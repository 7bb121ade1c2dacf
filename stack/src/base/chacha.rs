//! The block function of ChaCha20 (RFC 8439 section 2.3), four blocks at a time.
//!
//! A block is a pseudo-random function of key, counter and nonce. It derives keys and generates random
//! numbers.

/// Blocks computed in parallel, in a layout that the compiler vectorizes.
pub(crate) const LANES: usize = 4;
/// 32-bit words of a block.
pub(crate) const WORDS: usize = 16;

/// "expand 32-byte k".
const CONSTANTS: [u32; 4] = [0x6170_7865, 0x3320_646e, 0x7962_2d32, 0x6b20_6574];
const DOUBLE_ROUNDS: usize = 10;

type Lanes = [u32; LANES];

/// Blocks `counter` to `counter + 3`: word `w` of block `l` is `[w][l]`.
pub(crate) fn blocks(key: &[u32; 8], counter: u32, nonce: [u32; 3]) -> [Lanes; WORDS] {
    let [k0, k1, k2, k3, k4, k5, k6, k7] = *key;
    let [c0, c1, c2, c3] = CONSTANTS;
    let [n0, n1, n2] = nonce;
    let words = [c0, c1, c2, c3, k0, k1, k2, k3, k4, k5, k6, k7, counter, n0, n1, n2];
    let mut start = words.map(|word| [word; LANES]);
    let [.., counters, _, _, _] = &mut start;
    for (lane, n) in counters.iter_mut().zip(0u32..) {
        *lane = lane.wrapping_add(n);
    }
    let mut x = start;
    for _ in 0..DOUBLE_ROUNDS {
        double_round(&mut x);
    }
    for (word, first) in x.iter_mut().zip(&start) {
        *word = add(*word, *first);
    }
    x
}

#[inline(always)]
fn double_round(x: &mut [Lanes; WORDS]) {
    let [a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3] = x;
    quarter_round(a0, b0, c0, d0);
    quarter_round(a1, b1, c1, d1);
    quarter_round(a2, b2, c2, d2);
    quarter_round(a3, b3, c3, d3);
    quarter_round(a0, b1, c2, d3);
    quarter_round(a1, b2, c3, d0);
    quarter_round(a2, b3, c0, d1);
    quarter_round(a3, b0, c1, d2);
}

#[inline(always)]
fn quarter_round(a: &mut Lanes, b: &mut Lanes, c: &mut Lanes, d: &mut Lanes) {
    *a = add(*a, *b);
    *d = xor_rotate::<16>(*d, *a);
    *c = add(*c, *d);
    *b = xor_rotate::<12>(*b, *c);
    *a = add(*a, *b);
    *d = xor_rotate::<8>(*d, *a);
    *c = add(*c, *d);
    *b = xor_rotate::<7>(*b, *c);
}

#[inline(always)]
fn add(a: Lanes, b: Lanes) -> Lanes {
    let ([a0, a1, a2, a3], [b0, b1, b2, b3]) = (a, b);
    [a0.wrapping_add(b0), a1.wrapping_add(b1), a2.wrapping_add(b2), a3.wrapping_add(b3)]
}

#[inline(always)]
fn xor_rotate<const N: u32>(a: Lanes, b: Lanes) -> Lanes {
    let ([a0, a1, a2, a3], [b0, b1, b2, b3]) = (a, b);
    [
        (a0 ^ b0).rotate_left(N),
        (a1 ^ b1).rotate_left(N),
        (a2 ^ b2).rotate_left(N),
        (a3 ^ b3).rotate_left(N),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_lane_computes_the_test_vector_of_rfc_8439() {
        // Section 2.3.2: key 00 01 .. 1f, counter 1.
        let key: [u32; 8] = std::array::from_fn(|n| {
            let first = 4 * n as u8;
            u32::from_le_bytes([first, first + 1, first + 2, first + 3])
        });
        let expected = [
            0xe4e7_f110,
            0x1559_3bd1,
            0x1fdd_0f50,
            0xc471_20a3,
            0xc7f4_d1c7,
            0x0368_c033,
            0x9aaa_2204,
            0x4e6c_d4c3,
            0x4664_82d2,
            0x09aa_9f07,
            0x05d7_c214,
            0xa202_8bd9,
            0xd19c_12b5,
            0xb94e_16de,
            0xe883_d0cb,
            0x4e3c_50a2,
        ];
        for lane in 0..LANES {
            let first = 1u32.wrapping_sub(lane as u32);
            let x = blocks(&key, first, [0x0900_0000, 0x4a00_0000, 0]);
            assert_eq!(x.map(|word| word[lane]), expected, "lane {lane}");
        }
    }
}
