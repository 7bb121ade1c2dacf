//! The bytes that the modelled peer sends and expects, where it is asked to care: each tells its
//! place in the stream, so that a byte that is lost, repeated or moved shows.

/// Byte `offset` of every stream: a period of 251, prime to every power of two, and a change every
/// 65,536 bytes.
pub fn byte(offset: u64) -> u8 {
    (offset % 251) as u8 ^ (offset >> 16) as u8
}

/// Fills memory with the stream from `offset` on.
pub fn fill(offset: u64, to: &mut [u8]) {
    let mut phase = (offset % 251) as u8;
    for (i, b) in to.iter_mut().enumerate() {
        *b = phase ^ ((offset + i as u64) >> 16) as u8;
        phase = if phase == 250 { 0 } else { phase + 1 };
    }
}

/// How many bytes differ from the stream from `offset` on.
pub fn wrong_bytes(offset: u64, bytes: &[u8]) -> u64 {
    let mut phase = (offset % 251) as u8;
    let mut wrong = 0;
    for (i, b) in bytes.iter().enumerate() {
        wrong += u64::from(*b != phase ^ ((offset + i as u64) >> 16) as u8);
        phase = if phase == 250 { 0 } else { phase + 1 };
    }
    wrong
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_of_the_pattern_is_made_of_its_bytes() {
        for from in [0, 1, 250, 251, 65_500, 1 << 40] {
            let mut run = [0; 1000];
            fill(from, &mut run);
            assert!(run.iter().enumerate().all(|(i, b)| *b == byte(from + i as u64)));
            assert_eq!(wrong_bytes(from, &run), 0);
            run[999] ^= 1;
            assert_eq!(wrong_bytes(from, &run), 1);
        }
    }
}
