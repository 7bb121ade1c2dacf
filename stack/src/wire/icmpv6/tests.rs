use super::*;
use crate::base::EtherAddr;
use crate::wire::testing::{needs_exactly, refuses_every_prefix};
use proptest::prelude::*;

fn target() -> Ipv6Addr {
    "fe80::1:2:3".parse().unwrap()
}

/// Each type of message with its type, its code and the four bytes behind the checksum.
fn samples() -> Vec<([u8; 2], [u8; 4], Message)> {
    let (target, destination) = (target(), "2001:db8::9".parse().unwrap());
    vec![
        ([1, 4], [0; 4], Message::Unreachable { code: 4 }),
        ([2, 0], [0, 0, 5, 0], Message::PacketTooBig { mtu: 1280 }),
        ([3, 1], [0; 4], Message::TimeExceeded { code: 1 }),
        ([4, 2], [0, 1, 0, 42], Message::ParameterProblem { code: 2, pointer: 0x1_002a }),
        ([128, 0], [1, 2, 3, 4], Message::EchoRequest { ident: 0x0102, seq: 0x0304 }),
        ([129, 0], [1, 2, 3, 4], Message::EchoReply { ident: 0x0102, seq: 0x0304 }),
        ([133, 0], [0; 4], Message::RouterSolicitation),
        ([134, 0], [64, 0x80, 7, 8], advertisement(true, false)),
        ([134, 0], [64, 0x40, 7, 8], advertisement(false, true)),
        ([135, 0], [0; 4], Message::NeighbourSolicitation { target }),
        ([136, 0], [0x80, 0, 0, 0], neighbour(true, false, false)),
        ([136, 0], [0x40, 0, 0, 0], neighbour(false, true, false)),
        ([136, 0], [0x20, 0, 0, 0], neighbour(false, false, true)),
        ([137, 0], [0; 4], Message::Redirect { target, destination }),
        ([143, 7], [0; 4], Message::Other { kind: 143, code: 7 }),
        ([100, 0], [0; 4], Message::Other { kind: 100, code: 0 }),
    ]
}

fn advertisement(managed: bool, other: bool) -> Message {
    Message::RouterAdvertisement {
        hop_limit: 64,
        managed,
        other,
        router_lifetime_s: 0x0708,
        reachable_ms: 0x0102_0304,
        retrans_ms: 0x0506_0708,
    }
}

fn neighbour(router: bool, solicited: bool, override_: bool) -> Message {
    Message::NeighbourAdvertisement { target: target(), router, solicited, override_ }
}

#[test]
fn each_message_round_trips() {
    for (lead, word, message) in samples() {
        let bytes = needs_exactly(message.header_bytes(), |b| message.emit(b));
        assert_eq!((&bytes[0..2], &bytes[2..4]), (&lead[..], &[0, 0][..]));
        assert_eq!(bytes[4..8], word, "{message:?}");
        assert_eq!(Message::parse(&bytes), Ok(message));
        refuses_every_prefix(&bytes, Message::parse);
    }
}

#[test]
fn fields_have_the_offsets_of_rfc_4861() {
    let bytes = needs_exactly(16, |b| advertisement(false, false).emit(b));
    assert_eq!(bytes[8..16], [1, 2, 3, 4, 5, 6, 7, 8]);
    for message in
        [neighbour(true, true, true), Message::NeighbourSolicitation { target: target() }]
    {
        let bytes = needs_exactly(24, |b| message.emit(b));
        assert_eq!(bytes[8..24], target().octets());
    }
    let destination: Ipv6Addr = "2001:db8::9".parse().unwrap();
    let redirect = Message::Redirect { target: target(), destination };
    let bytes = needs_exactly(40, |b| redirect.emit(b));
    assert_eq!(
        (&bytes[8..24], &bytes[24..40]),
        (&target().octets()[..], &destination.octets()[..])
    );
}

#[test]
fn neighbour_discovery_with_a_nonzero_code_is_malformed() {
    for (lead, _, message) in samples() {
        let mut bytes = needs_exactly(message.header_bytes(), |b| message.emit(b));
        bytes[1] = 1;
        let malformed = Message::parse(&bytes) == Err(WireError::Malformed);
        assert_eq!(malformed, (133..=137).contains(&lead[0]), "{message:?}");
    }
}

#[test]
fn errors_are_distinguished_from_informational_messages() {
    for (lead, _, message) in samples() {
        assert_eq!(message.is_error(), lead[0] < 128 || lead[0] == 137, "{message:?}");
    }
}

const ETHER: EtherAddr = EtherAddr([2, 3, 4, 5, 6, 7]);

fn prefix() -> NdpOption {
    NdpOption::Prefix {
        prefix: "2001:db8::".parse().unwrap(),
        prefix_bits: 64,
        on_link: true,
        autonomous: false,
        valid_s: 0x0102_0304,
        preferred_s: 0x0506_0708,
    }
}

fn emitted(option: NdpOption) -> Vec<u8> {
    needs_exactly(option.bytes(), |b| option.emit(b))
}

#[test]
fn options_round_trip() {
    assert_eq!(emitted(NdpOption::SourceLinkLayer(ETHER)), [1, 1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(emitted(NdpOption::TargetLinkLayer(ETHER)), [2, 1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(emitted(NdpOption::Mtu(1500)), [5, 1, 0, 0, 0, 0, 5, 0xdc]);
    assert_eq!(
        emitted(prefix())[..18],
        [3, 4, 64, 0x80, 1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 0, 0x20, 0x01]
    );
    let all = [
        NdpOption::SourceLinkLayer(ETHER),
        prefix(),
        NdpOption::Mtu(9000),
        NdpOption::TargetLinkLayer(ETHER),
    ];
    let bytes: Vec<u8> = all.into_iter().flat_map(emitted).collect();
    assert_eq!(ndp_options(&bytes).collect::<Result<Vec<_>, _>>(), Ok(all.to_vec()));
}

#[test]
fn unknown_options_are_skipped() {
    let nonce = [14, 2, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14];
    let bytes = [&nonce[..], &emitted(NdpOption::Mtu(1280))].concat();
    let options: Vec<_> = ndp_options(&bytes).collect();
    assert_eq!(options, [Ok(NdpOption::Unknown), Ok(NdpOption::Mtu(1280))]);
    assert_eq!(NdpOption::Unknown.emit(&mut [0; 64]), Err(WireError::Malformed));
}

#[test]
fn an_option_of_length_zero_is_malformed_and_ends_the_iteration() {
    let bytes = [&emitted(NdpOption::Mtu(1280))[..], &[14, 0, 0, 0, 0, 0, 0, 0]].concat();
    let bytes = [bytes, emitted(NdpOption::Mtu(1280))].concat();
    let options: Vec<_> = ndp_options(&bytes).collect();
    assert_eq!(options, [Ok(NdpOption::Mtu(1280)), Err(WireError::Malformed)]);
}

#[test]
fn an_option_beyond_the_end_is_truncated() {
    for option in [prefix(), NdpOption::Mtu(1), NdpOption::SourceLinkLayer(ETHER)] {
        let bytes = emitted(option);
        assert_eq!(ndp_options(&[]).next(), None);
        for kept in 1..bytes.len() {
            let mut options = ndp_options(&bytes[..kept]);
            assert_eq!(options.next(), Some(Err(WireError::Truncated)), "{kept} bytes kept");
            assert_eq!(options.next(), None);
        }
    }
}

#[test]
fn an_option_of_the_wrong_length_for_its_type_is_malformed() {
    for (kind, units) in [(1, 2), (2, 2), (5, 2), (3, 1), (3, 3), (3, 5)] {
        let mut bytes = vec![0; usize::from(units) * 8];
        bytes[0..2].copy_from_slice(&[kind, units]);
        let mut options = ndp_options(&bytes);
        assert_eq!(options.next(), Some(Err(WireError::Malformed)), "kind {kind}, length {units}");
        assert_eq!(options.next(), None);
    }
}

#[test]
fn prefix_over_128_bits_is_malformed() {
    let mut bytes = emitted(prefix());
    bytes[2] = 129;
    assert_eq!(ndp_options(&bytes).next(), Some(Err(WireError::Malformed)));
}

proptest! {
    #[test]
    fn iteration_over_any_bytes_ends(bytes in proptest::collection::vec(0..12u8, 0..200)) {
        let options: Vec<_> = ndp_options(&bytes).collect();
        prop_assert!(options.len() <= bytes.len() / 8 + 1);
        let errors = options.iter().filter(|o| o.is_err()).count();
        prop_assert!(errors == 0 || errors == 1 && options.last().unwrap().is_err());
    }
}
