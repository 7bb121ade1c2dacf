//! The Huffman code of HPACK (RFC 7541 appendix B).
//!
//! The code is canonical, so that the lengths of its symbols determine it: symbols are numbered by length, then by value.

/// Bits of each symbol; the last is the end of the string (EOS).
#[rustfmt::skip]
const BITS: [u8; 257] = [
    13, 23, 28, 28, 28, 28, 28, 28, 28, 24, 30, 28, 28, 30, 28, 28, 28, 28, 28, 28, 28, 28, 30, 28,
    28, 28, 28, 28, 28, 28, 28, 28, 6, 10, 10, 12, 13, 6, 8, 11, 10, 10, 8, 11, 8, 6, 6, 6,
    5, 5, 5, 6, 6, 6, 6, 6, 6, 6, 7, 8, 15, 6, 12, 10, 13, 6, 7, 7, 7, 7, 7, 7,
    7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 8, 7, 8, 13, 19, 13, 14, 6,
    15, 5, 6, 5, 6, 5, 6, 6, 6, 5, 7, 7, 6, 6, 6, 5, 6, 7, 6, 5, 5, 6, 7, 7,
    7, 7, 7, 15, 11, 14, 13, 28, 20, 22, 20, 20, 22, 22, 22, 23, 22, 23, 23, 23, 23, 23, 24, 23,
    24, 24, 22, 23, 24, 23, 23, 23, 23, 21, 22, 23, 22, 23, 23, 24, 22, 21, 20, 22, 22, 23, 23, 21,
    23, 22, 22, 24, 21, 22, 23, 23, 21, 21, 22, 21, 23, 22, 23, 23, 20, 22, 22, 22, 23, 22, 22, 23,
    26, 26, 20, 19, 22, 23, 22, 25, 26, 26, 26, 27, 27, 26, 24, 25, 19, 21, 26, 27, 27, 26, 27, 24,
    21, 21, 26, 26, 28, 27, 27, 27, 20, 24, 20, 21, 22, 21, 21, 23, 22, 22, 25, 25, 24, 24, 26, 23,
    26, 27, 26, 26, 27, 27, 27, 27, 27, 28, 27, 27, 27, 27, 27, 26, 30,
];
const MOST_BITS: usize = 30;
const EOS: u16 = 256;

/// The first code of a length, the number of codes, and where its symbols begin in [`Code::symbols`].
#[derive(Clone, Copy)]
struct Length {
    first: u32,
    count: u32,
    at: u32,
}

struct Code {
    lengths: [Length; MOST_BITS + 1],
    symbols: [u16; 257],
}

static CODE: Code = code();

#[allow(clippy::indexing_slicing, reason = "evaluated by the compiler")]
const fn code() -> Code {
    let mut lengths = [Length { first: 0, count: 0, at: 0 }; MOST_BITS + 1];
    let mut symbols = [0; 257];
    let (mut bits, mut next, mut taken) = (1, 0, 0);
    while bits <= MOST_BITS {
        next <<= 1;
        lengths[bits] = Length { first: next, count: 0, at: taken };
        let mut symbol = 0;
        while symbol < BITS.len() {
            if BITS[symbol] as usize == bits {
                symbols[taken as usize] = symbol as u16;
                lengths[bits].count += 1;
                taken += 1;
            }
            symbol += 1;
        }
        next += lengths[bits].count;
        bits += 1;
    }
    Code { lengths, symbols }
}

/// Decodes a string. `None`: it has a wrong end, or more than `most` bytes.
pub(super) fn decode(bytes: &[u8], most: usize) -> Option<Vec<u8>> {
    let mut decoded = Vec::with_capacity(bytes.len().saturating_mul(2).min(most));
    let (mut code, mut bits) = (0_u32, 0_usize);
    for byte in bytes {
        for shift in (0..8).rev() {
            code = code << 1 | u32::from(byte >> shift & 1);
            bits += 1;
            let length = CODE.lengths.get(bits)?;
            let Some(nth) = code.checked_sub(length.first).filter(|n| *n < length.count) else {
                continue;
            };
            match *CODE.symbols.get((length.at + nth) as usize)? {
                EOS => return None,
                _ if decoded.len() >= most => return None,
                symbol => decoded.push(symbol as u8),
            }
            (code, bits) = (0, 0);
        }
    }
    // Section 5.2: the padding is shorter than a byte, and the beginning of EOS, which is all ones.
    let is_padding = bits < 8 && code == (1 << bits) - 1;
    is_padding.then_some(decoded)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_codes_of_the_appendix_come_out() {
        let code_of = |symbol: u16| {
            let bits = usize::from(BITS[usize::from(symbol)]);
            let length = CODE.lengths[bits];
            let at = length.at as usize;
            let of_length = &CODE.symbols[at..at + length.count as usize];
            length.first + of_length.iter().position(|s| *s == symbol).unwrap() as u32
        };
        assert_eq!(code_of(u16::from(b'0')), 0);
        assert_eq!(code_of(u16::from(b'a')), 0x3);
        assert_eq!(code_of(0), 0x1ff8);
        assert_eq!(code_of(249), 0xffffffe);
        assert_eq!(code_of(EOS), 0x3fff_ffff);
    }

    #[test]
    fn strings_of_the_appendix_are_decoded() {
        let text = [0xf1, 0xe3, 0xc2, 0xe5, 0xf2, 0x3a, 0x6b, 0xa0, 0xab, 0x90, 0xf4, 0xff];
        assert_eq!(decode(&text, 100).as_deref(), Some(&b"www.example.com"[..]));
        assert_eq!(decode(&text, 14), None);
        assert_eq!(decode(b"", 0).as_deref(), Some(&b""[..]));
    }

    #[test]
    fn wrong_padding_and_the_end_symbol_are_refused() {
        // `0` has five zeros; zeros, a whole byte of ones, and EOS are not padding.
        assert_eq!(decode(&[0b0000_0111], 9).as_deref(), Some(&b"0"[..]));
        assert_eq!(decode(&[0b0000_0110], 9), None);
        assert_eq!(decode(&[0b0000_0111, 0xff], 9), None);
        assert_eq!(decode(&[0xff, 0xff, 0xff, 0xff], 9), None);
    }
}
