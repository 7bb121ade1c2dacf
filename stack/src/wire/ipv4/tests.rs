use super::*;
use crate::wire::testing::{needs_exactly, refuses_every_prefix};
use proptest::prelude::*;

fn sample() -> Header {
    Header {
        src: Ipv4Addr::new(192, 0, 2, 1),
        dst: Ipv4Addr::new(198, 51, 100, 2),
        protocol: 6,
        ttl: 64,
        dscp_ecn: 0xb9,
        ident: 0x1234,
        dont_fragment: true,
        more_fragments: false,
        fragment_offset: 0,
        header_bytes: 20,
        total_bytes: 0x0203,
    }
}

#[rustfmt::skip]
const SAMPLE: [u8; 20] = [
    0x45, 0xb9, 0x02, 0x03, 0x12, 0x34, 0x40, 0x00, 64, 6, 0x39, 0xd1,
    192, 0, 2, 1, 198, 51, 100, 2,
];

fn parse(bytes: &[u8]) -> Result<Header, WireError> {
    Header::parse(bytes, 0x0203)
}

/// The sample with a header of `words` words and NOP options.
fn with_options(words: u8) -> Vec<u8> {
    let mut bytes = SAMPLE.to_vec();
    bytes[0] = 0x40 | words;
    bytes.resize(usize::from(words) * 4, 1);
    bytes
}

#[test]
fn header_round_trips() {
    assert_eq!(parse(&SAMPLE), Ok(sample()));
    assert_eq!(needs_exactly(HEADER_BYTES, |b| sample().emit(b)), SAMPLE);
    assert!(checksum_ok(&SAMPLE, 20));
}

#[test]
fn truncated_header_is_rejected() {
    refuses_every_prefix(&SAMPLE, parse);
    refuses_every_prefix(&with_options(15), parse);
}

#[test]
fn options_are_ignored_and_covered_by_the_checksum() {
    for words in 6..=15 {
        let mut bytes = with_options(words);
        let header = parse(&bytes).unwrap();
        let header_bytes = usize::from(words) * 4;
        assert_eq!(header, Header { header_bytes, ..sample() });
        assert_eq!(header.payload_bytes(), 0x0203 - header_bytes);
        assert!(!checksum_ok(&bytes, header_bytes));
        bytes[10..12].copy_from_slice(&[0, 0]);
        let sum = checksum::checksum(&bytes);
        bytes[10..12].copy_from_slice(&sum.to_be_bytes());
        assert!(checksum_ok(&bytes, header_bytes));
        assert!(!checksum_ok(&bytes[..header_bytes - 1], header_bytes));
    }
}

#[test]
fn ihl_below_five_is_malformed() {
    for words in 0..5 {
        let mut bytes = SAMPLE;
        bytes[0] = 0x40 | words;
        assert_eq!(parse(&bytes), Err(WireError::Malformed));
    }
}

#[test]
fn other_versions_are_malformed() {
    for version in (0..16).filter(|v| *v != 4) {
        let mut bytes = SAMPLE;
        bytes[0] = version << 4 | 5;
        assert_eq!(parse(&bytes), Err(WireError::Malformed));
    }
}

#[test]
fn total_length_is_between_the_header_and_the_packet_length() {
    assert_eq!(Header::parse(&SAMPLE, 0x0202), Err(WireError::Truncated));
    assert_eq!(Header::parse(&SAMPLE, 0x0204), Ok(sample()), "Ethernet padding");
    let mut bytes = with_options(6);
    bytes[2..4].copy_from_slice(&[0, 23]);
    assert_eq!(Header::parse(&bytes, 100), Err(WireError::Malformed));
    bytes[2..4].copy_from_slice(&[0, 24]);
    assert_eq!(Header::parse(&bytes, 100).map(|h| h.payload_bytes()), Ok(0));
}

#[test]
fn fragments_are_distinguished_from_whole_datagrams() {
    assert!(!sample().is_fragment());
    assert!(Header { more_fragments: true, ..sample() }.is_fragment());
    assert!(Header { fragment_offset: 8, ..sample() }.is_fragment());
}

#[test]
fn fields_that_cannot_be_encoded_are_malformed() {
    let refused = |h: Header| assert_eq!(h.emit(&mut [0; 20]), Err(WireError::Malformed));
    refused(Header { total_bytes: 65_536, ..sample() });
    refused(Header { total_bytes: 19, ..sample() });
    refused(Header { fragment_offset: 7, ..sample() });
    let largest = Header { total_bytes: 65_535, fragment_offset: 65_528, ..sample() };
    let bytes = needs_exactly(HEADER_BYTES, |b| largest.emit(b));
    assert_eq!(Header::parse(&bytes, 65_535), Ok(largest));
}

proptest! {
    #[test]
    fn any_header_round_trips(
        addresses: (u32, u32),
        bytes: (u8, u8, u8),
        ident: u16,
        flags: (bool, bool),
        eighths in 0..0x2000u16,
        total_bytes in 20..65_536usize,
    ) {
        let header = Header {
            src: addresses.0.into(),
            dst: addresses.1.into(),
            protocol: bytes.0,
            ttl: bytes.1,
            dscp_ecn: bytes.2,
            ident,
            dont_fragment: flags.0,
            more_fragments: flags.1,
            fragment_offset: eighths * 8,
            header_bytes: 20,
            total_bytes,
        };
        let mut out = [0; 20];
        header.emit(&mut out).unwrap();
        prop_assert_eq!(Header::parse(&out, total_bytes), Ok(header));
        prop_assert!(checksum_ok(&out, 20));
    }

    #[test]
    fn any_flipped_bit_invalidates_the_checksum(bit in 0..160usize) {
        let mut bytes = SAMPLE;
        bytes[bit / 8] ^= 1 << (bit % 8);
        prop_assert!(!checksum_ok(&bytes, 20));
    }
}
