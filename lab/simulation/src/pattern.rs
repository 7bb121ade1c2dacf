//! The bytes of the streams: they tell their stream and their place, and cost a comparison.

use std::sync::OnceLock;

use fulmar_stack::device::Rng;

/// The period of the pattern, in bytes: a prime, so that no buffer, window or wrap of a
/// sequence number divides it.
const PERIOD: usize = 999_983;
/// The longest piece that is looked at in one go.
pub const PIECE: usize = 1 << 20;

fn table() -> &'static [u8] {
    static TABLE: OnceLock<Vec<u8>> = OnceLock::new();
    TABLE.get_or_init(|| {
        let mut rng = Rng::new(0x1234_5678);
        let mut bytes: Vec<u8> = (0..PERIOD).map(|_| rng.number() as u8).collect();
        bytes.extend_from_within(..);
        bytes.extend_from_within(..PIECE - PERIOD);
        bytes
    })
}

/// `len` bytes (at most [`PIECE`]) of stream `stream` from `offset`.
pub fn piece(stream: u64, offset: u64, len: usize) -> &'static [u8] {
    let place = stream.wrapping_mul(77_777).wrapping_add(offset) % PERIOD as u64;
    &table()[place as usize..][..len]
}

/// The first place at which `bytes` differs from the stream at `offset`.
pub fn first_difference(stream: u64, offset: u64, bytes: &[u8]) -> Option<usize> {
    let mut at = 0;
    for part in bytes.chunks(PIECE) {
        let expected = piece(stream, offset + at as u64, part.len());
        if part != expected {
            let within = part.iter().zip(expected).position(|(a, b)| a != b)?;
            return Some(at + within);
        }
        at += part.len();
    }
    None
}
