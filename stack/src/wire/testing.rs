//! Checks that the unit tests of all headers share.

use crate::wire::WireError;
use std::fmt::Debug;

/// Asserts that every proper prefix of a header is rejected as truncated.
pub(crate) fn refuses_every_prefix<T: Debug + PartialEq>(
    bytes: &[u8],
    parse: impl Fn(&[u8]) -> Result<T, WireError>,
) {
    assert!(parse(bytes).is_ok());
    for kept in 0..bytes.len() {
        assert_eq!(parse(&bytes[..kept]), Err(WireError::Truncated), "{kept} bytes kept");
    }
}

/// Asserts that `emit` writes exactly `bytes` bytes and rejects shorter buffers. Returns the bytes.
pub(crate) fn needs_exactly<T: Debug + PartialEq>(
    bytes: usize,
    emit: impl Fn(&mut [u8]) -> Result<T, WireError>,
) -> Vec<u8> {
    for given in 0..bytes {
        assert_eq!(emit(&mut vec![0; given]), Err(WireError::Truncated), "{given} bytes given");
    }
    let (mut clear, mut set) = (vec![0x00; bytes + 3], vec![0xff; bytes + 3]);
    assert!(emit(&mut clear).is_ok() && emit(&mut set).is_ok());
    assert_eq!(clear[..bytes], set[..bytes], "every byte is written");
    assert_eq!((&clear[bytes..], &set[bytes..]), (&[0; 3][..], &[0xff; 3][..]), "and no other");
    clear.truncate(bytes);
    clear
}
