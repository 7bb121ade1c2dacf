use super::*;
use crate::wire::testing::{needs_exactly, refuses_every_prefix};
use proptest::prelude::*;

fn sample() -> Header {
    Header {
        src: "2001:db8::1".parse().unwrap(),
        dst: "fe80::2".parse().unwrap(),
        next_header: 6,
        hop_limit: 64,
        traffic_class: 0xb9,
        flow_label: 0x1_2345,
        payload_bytes: 0x0203,
    }
}

#[rustfmt::skip]
const SAMPLE: [u8; 40] = [
    0x6b, 0x91, 0x23, 0x45, 0x02, 0x03, 6, 64,
    0x20, 0x01, 0x0d, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1,
    0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2,
];

/// Processes the extension headers of a packet with Next Header `first`.
fn walk_from(first: u8, extensions: &[u8]) -> Result<Upper, ExtensionError> {
    let header = Header { next_header: first, payload_bytes: extensions.len(), ..sample() };
    let mut packet = vec![0; HEADER_BYTES];
    header.emit(&mut packet).unwrap();
    packet.extend_from_slice(extensions);
    walk_extensions(&packet, &header)
}

/// Destination options or hop-by-hop options of 8 bytes: one PadN.
fn padding(next: u8) -> [u8; 8] {
    [next, 0, 1, 4, 0, 0, 0, 0]
}

fn upper(protocol: u8, offset: usize, next_header_at: usize) -> Upper {
    Upper { protocol, offset, next_header_at, fragment: None, fragment_at: 0 }
}

#[test]
fn header_round_trips() {
    assert_eq!(Header::parse(&SAMPLE, 40 + 0x0203), Ok(sample()));
    assert_eq!(needs_exactly(HEADER_BYTES, |b| sample().emit(b)), SAMPLE);
}

#[test]
fn truncated_header_or_packet_is_rejected() {
    refuses_every_prefix(&SAMPLE, |b| Header::parse(b, 40 + 0x0203));
    assert_eq!(Header::parse(&SAMPLE, 40 + 0x0202), Err(WireError::Truncated));
    assert_eq!(Header::parse(&SAMPLE, 40 + 0x0204), Ok(sample()), "Ethernet padding");
}

#[test]
fn other_versions_are_malformed() {
    for version in (0..16).filter(|v| *v != 6) {
        let mut bytes = SAMPLE;
        bytes[0] = version << 4;
        assert_eq!(Header::parse(&bytes, 65_535), Err(WireError::Malformed));
    }
}

#[test]
fn payload_over_65_535_is_malformed() {
    let header = Header { payload_bytes: 65_536, ..sample() };
    assert_eq!(header.emit(&mut [0; 40]), Err(WireError::Malformed));
}

#[test]
fn high_bits_of_the_flow_label_are_ignored() {
    let bytes = needs_exactly(40, |b| Header { flow_label: u32::MAX, ..sample() }.emit(b));
    let parsed = Header::parse(&bytes, 65_535).unwrap();
    assert_eq!((parsed.flow_label, parsed.traffic_class), (0xf_ffff, 0xb9));
}

#[test]
fn a_packet_without_extension_headers_is_not_read() {
    for p in [protocol::TCP, protocol::UDP, protocol::ICMPV6, protocol::NO_NEXT_HEADER, 200] {
        let header = Header { next_header: p, ..sample() };
        assert_eq!(walk_extensions(&[], &header), Ok(upper(p, 40, 6)));
    }
}

#[test]
fn extension_headers_are_accepted_in_any_order() {
    let routing_used_up = [protocol::DESTINATION_OPTIONS, 1, 0, 0, 1, 2, 3, 4];
    let chain = [
        &padding(protocol::ROUTING)[..],
        &routing_used_up,
        &[9; 8],
        &padding(protocol::DESTINATION_OPTIONS),
        &padding(protocol::UDP),
        &[0; 8],
    ]
    .concat();
    assert_eq!(walk_from(protocol::HOP_BY_HOP, &chain), Ok(upper(protocol::UDP, 80, 72)));
}

#[test]
fn the_next_header_59_ends_the_walk() {
    let end = walk_from(protocol::DESTINATION_OPTIONS, &padding(protocol::NO_NEXT_HEADER));
    assert_eq!(end, Ok(upper(protocol::NO_NEXT_HEADER, 48, 40)));
}

#[test]
fn a_hop_by_hop_header_that_is_not_first_is_unrecognised() {
    let chain = [padding(protocol::HOP_BY_HOP), padding(protocol::UDP)].concat();
    let error = Err(ExtensionError::UnrecognisedNextHeader { pointer: 40 });
    assert_eq!(walk_from(protocol::DESTINATION_OPTIONS, &chain), error);
    let chain = [padding(59), padding(protocol::HOP_BY_HOP), padding(6)].concat();
    assert_eq!(walk_from(0, &chain).map(|u| u.protocol), Ok(59));
}

#[test]
fn an_unrecognised_option_is_reported_with_its_pointer_and_action() {
    for (kind, action) in [
        (0x7e, OptionAction::Discard),
        (0x9e, OptionAction::DiscardAndReport),
        (0xc2, OptionAction::ReportUnlessMulticast),
    ] {
        // A Pad1 and a skippable option precede it.
        let chain = [protocol::UDP, 1, 0, 0x1e, 2, 7, 7, kind, 3, 1, 2, 3, 1, 2, 0, 0];
        let error = Err(ExtensionError::UnrecognisedOption { pointer: 47, action });
        assert_eq!(walk_from(protocol::DESTINATION_OPTIONS, &chain), error);
        assert_eq!(walk_from(protocol::HOP_BY_HOP, &chain), error);
    }
}

#[test]
fn a_skippable_unrecognised_option_is_skipped() {
    let chain = [protocol::UDP, 0, 0x3e, 4, 1, 2, 3, 4];
    assert_eq!(walk_from(protocol::DESTINATION_OPTIONS, &chain), Ok(upper(17, 48, 40)));
}

#[test]
fn an_option_that_exceeds_its_header_is_malformed() {
    for option in [[1, 5, 0, 0, 0, 0], [1, 3, 0, 0, 0, 1]] {
        let chain = [&[protocol::UDP, 0][..], &option, &[0; 8]].concat();
        let walked = walk_from(protocol::DESTINATION_OPTIONS, &chain);
        assert_eq!(walked, Err(ExtensionError::Malformed), "{option:?}");
    }
}

#[test]
fn options_are_bounded() {
    let pad1 = |units: u8| {
        let mut header = vec![0; 8 + usize::from(units) * 8];
        header[0..2].copy_from_slice(&[protocol::UDP, units]);
        header
    };
    assert!(walk_from(protocol::DESTINATION_OPTIONS, &pad1(3)).is_ok(), "30 options");
    let many = walk_from(protocol::DESTINATION_OPTIONS, &pad1(4));
    assert_eq!(many, Err(ExtensionError::Malformed), "38 options");
    let exactly = [&[protocol::UDP, 4][..], &[1, 4, 0, 0, 0, 0], &[1, 1, 0], &[0; 29]].concat();
    assert!(walk_from(protocol::DESTINATION_OPTIONS, &exactly).is_ok(), "31 options");
}

#[test]
fn exactly_32_options_are_accepted() {
    // 38 bytes of options: PadN of 7 bytes and 31 Pad1.
    let exactly = [&[protocol::UDP, 4][..], &[1, 5, 0, 0, 0, 0, 0], &[0; 31]].concat();
    assert!(walk_from(protocol::DESTINATION_OPTIONS, &exactly).is_ok());
    let one_more = [&[protocol::UDP, 4][..], &[1, 4, 0, 0, 0, 0], &[0; 32]].concat();
    let walked = walk_from(protocol::DESTINATION_OPTIONS, &one_more);
    assert_eq!(walked, Err(ExtensionError::Malformed));
}

#[test]
fn extensions_are_bounded() {
    let chain = |n: usize| {
        let mut chain = padding(protocol::DESTINATION_OPTIONS).repeat(n);
        chain[n * 8 - 8] = protocol::UDP;
        chain
    };
    let walked = walk_from(protocol::DESTINATION_OPTIONS, &chain(MAX_EXTENSIONS));
    assert_eq!(walked.map(|u| u.offset), Ok(40 + 64));
    let walked = walk_from(protocol::DESTINATION_OPTIONS, &chain(MAX_EXTENSIONS + 1));
    assert_eq!(walked, Err(ExtensionError::Malformed));
}

#[test]
fn a_routing_header_with_segments_left_is_rejected() {
    for kind in [0, 2, 3, 4, 253] {
        let chain = [protocol::UDP, 0, kind, 1, 0, 0, 0, 0];
        let error = Err(ExtensionError::BadRoutingHeader { pointer: 42 });
        assert_eq!(walk_from(protocol::ROUTING, &chain), error);
    }
}

#[test]
fn a_fragment_header_is_parsed_and_ends_the_walk_in_a_later_fragment() {
    let header = [protocol::DESTINATION_OPTIONS, 0, 0x12, 0x39, 1, 2, 3, 4];
    let fragment = Fragment { offset: 0x1238, more: true, ident: 0x0102_0304 };
    assert!(!fragment.is_atomic());
    // The bytes behind the header of a later fragment are payload.
    let later = walk_from(protocol::FRAGMENT, &[header, [0xff; 8]].concat()).unwrap();
    let expected = Upper { fragment: Some(fragment), fragment_at: 40, ..upper(60, 48, 40) };
    assert_eq!(later, expected);
}

#[test]
fn fragment_header_round_trips() {
    for (offset, more) in [(0, true), (8, false), (65_528, true)] {
        let fragment = Fragment { offset, more, ident: 0xfedc_ba98 };
        let bytes = needs_exactly(FRAGMENT_BYTES, |b| fragment.emit(protocol::UDP, b));
        let read = walk_from(protocol::FRAGMENT, &bytes).unwrap();
        assert_eq!((read.fragment, read.protocol), (Some(fragment), protocol::UDP));
    }
    let crooked = Fragment { offset: 4, more: true, ident: 0 };
    assert_eq!(crooked.emit(protocol::UDP, &mut [0; 8]), Err(WireError::Malformed));
}

#[test]
fn the_walk_continues_behind_a_first_or_atomic_fragment_header() {
    for more in [0, 1] {
        let header = [protocol::DESTINATION_OPTIONS, 0, 0, more, 0, 0, 0, 9];
        let chain = [header, padding(protocol::UDP)].concat();
        let fragment = Fragment { offset: 0, more: more == 1, ident: 9 };
        let expected = Upper { fragment: Some(fragment), fragment_at: 40, ..upper(17, 56, 48) };
        assert_eq!(walk_from(protocol::FRAGMENT, &chain), Ok(expected));
        assert_eq!(fragment.is_atomic(), more == 0);
    }
}

#[test]
fn fragment_of_a_fragment_is_malformed() {
    let chain = [[protocol::FRAGMENT, 0, 0, 0, 0, 0, 0, 1], [6, 0, 0, 0, 0, 0, 0, 2]].concat();
    assert_eq!(walk_from(protocol::FRAGMENT, &chain), Err(ExtensionError::Malformed));
}

#[test]
fn a_chain_truncated_at_any_byte_is_truncated() {
    let chain = [
        &padding(protocol::ROUTING)[..],
        &[protocol::FRAGMENT, 0, 0, 0, 0, 0, 0, 0],
        &[protocol::DESTINATION_OPTIONS, 0, 0, 1, 0, 0, 0, 0],
        &[protocol::UDP, 1, 1, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    ]
    .concat();
    assert_eq!(walk_from(0, &chain).map(|u| u.offset), Ok(80));
    for kept in 0..24 {
        assert_eq!(walk_from(0, &chain[..kept]), Err(ExtensionError::Truncated), "{kept} kept");
    }
    // From here on it is a first fragment.
    for kept in 24..chain.len() {
        let walked = walk_from(0, &chain[..kept]);
        assert_eq!(walked, Err(ExtensionError::IncompleteChain), "{kept} kept");
    }
}

#[test]
fn a_partly_available_first_fragment_is_truncated() {
    let chain = [[protocol::DESTINATION_OPTIONS, 0, 0, 1, 0, 0, 0, 0], padding(protocol::UDP)];
    let header = Header { next_header: protocol::FRAGMENT, payload_bytes: 16, ..sample() };
    let packet = [&SAMPLE[..], &chain.concat()].concat();
    assert!(walk_extensions(&packet, &header).is_ok());
    assert_eq!(walk_extensions(&packet[..52], &header), Err(ExtensionError::Truncated));
}

#[test]
fn an_atomic_fragment_with_an_incomplete_chain_is_truncated() {
    let chain = [protocol::DESTINATION_OPTIONS, 0, 0, 0, 0, 0, 0, 9];
    assert_eq!(walk_from(protocol::FRAGMENT, &chain), Err(ExtensionError::Truncated));
}

#[test]
fn extension_headers_beyond_the_payload_are_truncated() {
    let header = Header { next_header: 60, payload_bytes: 7, ..sample() };
    let packet = [&SAMPLE[..], &padding(protocol::UDP)].concat();
    assert_eq!(walk_extensions(&packet, &header), Err(ExtensionError::Truncated));
    let header = Header { payload_bytes: 8, ..header };
    assert!(walk_extensions(&packet, &header).is_ok());
}

fn bytes_of_extensions() -> impl Strategy<Value = Vec<u8>> {
    let likely = prop::sample::select(vec![0u8, 1, 2, 4, 6, 43, 44, 60]);
    proptest::collection::vec(prop_oneof![3 => likely, 1 => any::<u8>()], 0..160)
}

proptest! {
    #[test]
    fn any_header_round_trips(
        addresses: (u128, u128),
        bytes: (u8, u8, u8),
        flow_label in 0..1u32 << 20,
        payload_bytes in 0..65_536usize,
    ) {
        let header = Header {
            src: addresses.0.into(),
            dst: addresses.1.into(),
            next_header: bytes.0,
            hop_limit: bytes.1,
            traffic_class: bytes.2,
            flow_label,
            payload_bytes,
        };
        let mut out = [0; 40];
        header.emit(&mut out).unwrap();
        prop_assert_eq!(Header::parse(&out, 40 + payload_bytes), Ok(header));
    }

    /// Over bytes that resemble extension headers, the walk ends inside the packet and its pointers are
    /// inside it.
    #[test]
    fn the_walk_stays_inside_the_packet(
        first in prop::sample::select(vec![0u8, 43, 44, 60]),
        bytes in bytes_of_extensions(),
    ) {
        let packet_bytes = (40 + bytes.len()) as u32;
        match walk_from(first, &bytes) {
            Ok(upper) => {
                prop_assert!(upper.offset <= packet_bytes as usize);
                prop_assert!(upper.next_header_at < upper.offset);
            }
            Err(ExtensionError::UnrecognisedNextHeader { pointer })
            | Err(ExtensionError::UnrecognisedOption { pointer, .. })
            | Err(ExtensionError::BadRoutingHeader { pointer }) => {
                prop_assert!(pointer < packet_bytes);
            }
            Err(
                ExtensionError::Truncated
                | ExtensionError::IncompleteChain
                | ExtensionError::Malformed,
            ) => {}
        }
    }
}
