//! Datagrams of QUIC.

use aes_gcm::Nonce;
use aes_gcm::aead::AeadInPlace;
use aes_gcm::aes::cipher::BlockEncrypt;
use proptest::prelude::*;

use super::NAME;
use super::fixtures::{self, bytes};
use super::tls::{hello, list, named};
use crate::first::quic::{Keys, Kind, Packet, Version, crypto_frames};
use crate::first::{
    Datagrams, Decision, EncryptedHello, Expected, MOST_HELD, MOST_HELD_BYTES, Reason,
};

const ID: &[u8] = b"\x83\x94\xc8\xf0\x3e\x51\x57\x08";

/// A packet to send.
struct Initial<'a> {
    version: Version,
    dcid: &'a [u8],
    /// The ID that its keys follow from.
    keys_of: &'a [u8],
    number: u32,
    /// Of one byte, or else of four.
    is_short: bool,
}

impl Initial<'_> {
    /// Protects the frames.
    fn seal(&self, frames: &[u8]) -> Vec<u8> {
        let keys = Keys::derive(self.version, self.keys_of).unwrap();
        let (first, version) = match self.version {
            Version::V1 => (0xc0, 1_u32),
            Version::V2 => (0xd0, 0x6b33_43cf),
        };
        let number = self.number.to_be_bytes();
        let number = if self.is_short { &number[3..] } else { &number };
        let length = 0x4000 | (number.len() as u16 + frames.len() as u16 + 16);
        let first: u8 = first | (number.len() as u8 - 1);
        let mut header = [&[first], &version.to_be_bytes()[..]].concat();
        header.extend([&[self.dcid.len() as u8], self.dcid, &[0, 0]].concat());
        header.extend(length.to_be_bytes());
        let number_at = header.len();
        header.extend(number);
        let nonce = keys.nonce(self.number.into());
        let mut payload = frames.to_vec();
        let tag = keys
            .aead
            .encrypt_in_place_detached(Nonce::from_slice(&nonce), &header, &mut payload)
            .unwrap();
        payload.extend_from_slice(&tag);
        // The sample begins four bytes behind the number's begin (RFC 9001 section 5.4.2).
        let sample = 4 - number.len();
        let mut mask = aes_gcm::aes::Block::clone_from_slice(&payload[sample..sample + 16]);
        keys.header.encrypt_block(&mut mask);
        header[0] ^= mask[0] & 0x0f;
        for (at, byte) in header[number_at..].iter_mut().enumerate() {
            *byte ^= mask[1 + at];
        }
        [header, payload].concat()
    }
}

/// A packet of version 1 that begins the connection with this ID.
fn initial(dcid: &[u8], frames: &[u8]) -> Vec<u8> {
    numbered(dcid, 0, frames)
}

fn numbered(dcid: &[u8], number: u32, frames: &[u8]) -> Vec<u8> {
    padded(
        Initial { version: Version::V1, dcid, keys_of: dcid, number, is_short: false }.seal(frames),
    )
}

/// A datagram that is large enough for an Initial packet.
fn padded(mut datagram: Vec<u8>) -> Vec<u8> {
    datagram.resize(datagram.len().max(1200), 0);
    datagram
}

fn varint(n: usize) -> [u8; 4] {
    (0x8000_0000 | n as u32).to_be_bytes()
}

fn crypto(offset: usize, part: &[u8]) -> Vec<u8> {
    [&[6][..], &varint(offset), &varint(part.len()), part].concat()
}

/// One packet with all of a message.
fn whole(dcid: &[u8], message: &[u8]) -> Vec<u8> {
    initial(dcid, &[crypto(0, message), vec![0; 40]].concat())
}

fn web() -> Datagrams {
    Datagrams::new(Expected::new([NAME], 443))
}

fn reason(decision: &Decision) -> Option<Reason> {
    match decision {
        Decision::Refuse(refusal) => Some(refusal.reason),
        _ => None,
    }
}

const SHORT: &[u8] = &[0x40; 40];

#[test]
fn the_packets_of_the_appendices_are_opened() {
    for (digits, version) in [(fixtures::QUIC_V1, Version::V1), (fixtures::QUIC_V2, Version::V2)] {
        let datagram = bytes(digits);
        let mut rest = &datagram[..];
        let packet = Packet::take(&mut rest).unwrap();
        assert!(rest.is_empty());
        assert_eq!((packet.version, packet.kind, packet.dcid), (version, Kind::Initial, ID));
        let (number, payload) = Keys::derive(version, ID).unwrap().open(&packet, None).unwrap();
        assert_eq!((number, payload.len()), (2, 1162));
        assert_eq!(crypto_frames(&payload).unwrap().len(), 1);
        assert_eq!(
            Datagrams::new(Expected::new(["example.com"], 443)).read(&datagram),
            Decision::Pass
        );
        let Decision::Refuse(refusal) = web().read(&datagram) else { panic!() };
        assert_eq!(refusal.reason, Reason::TlsOtherName);
        assert_eq!(refusal.seen(), Some("example.com"));
    }
}

#[test]
fn a_datagram_that_was_changed_or_cut_never_passes() {
    let datagram = bytes(fixtures::QUIC_V1);
    for at in 0..datagram.len() {
        let mut changed = datagram.clone();
        changed[at] ^= 0x40;
        let mut flow = Datagrams::new(Expected::new(["example.com"], 443));
        assert!(reason(&flow.read(&changed)).is_some() || at == 0, "byte {at}");
        assert!(
            reason(&Datagrams::new(Expected::new(["example.com"], 443)).read(&datagram[..at]))
                .is_some()
        );
    }
}

#[test]
fn short_headers_pass_behind_an_accepted_hello_on_the_web_port() {
    let mut flow = web();
    assert_eq!(reason(&flow.read(SHORT)), Some(Reason::QuicNotBegun));
    assert_eq!(flow.read(&whole(ID, &named(NAME))), Decision::Pass);
    assert_eq!(flow.read(SHORT), Decision::Pass);
    assert_eq!(Datagrams::new(Expected::new([NAME], 5000)).read(SHORT), Decision::Pass);
    assert_eq!(Datagrams::new(Expected::new([NAME], 5000)).read(b""), Decision::Pass);
}

#[test]
fn versions_that_are_not_read_are_refused() {
    let long = |version: u32| [&[0xc0], &version.to_be_bytes()[..], &[0; 40]].concat();
    for (version, elsewhere) in [
        (0, None),
        (0x1234_5678, None),
        (0xff00_001d, Some(Reason::QuicVersion)),
        (0x5130_3433, Some(Reason::QuicVersion)),
        (0x1a2a_3a4a, Some(Reason::QuicVersion)),
        (0xface_b002, Some(Reason::QuicVersion)),
    ] {
        assert_eq!(reason(&web().read(&long(version))), Some(Reason::QuicVersion));
        assert_eq!(
            reason(&Datagrams::new(Expected::new([NAME], 5000)).read(&long(version))),
            elsewhere
        );
    }
    let mut flow = Datagrams::new(Expected::new([NAME], 5000));
    assert_eq!(flow.read(&whole(ID, &named(NAME))), Decision::Pass);
    assert_eq!(reason(&flow.read(&long(0x1234_5678))), Some(Reason::QuicVersion));
}

#[test]
fn handshake_and_early_packets_need_a_connection() {
    let of = |kind: u8| [&[kind], &[0, 0, 0, 1, 0, 0, 0x10][..], &[0; 16]].concat();
    for kind in [0xd0, 0xe0] {
        let mut flow = web();
        assert_eq!(reason(&flow.read(&of(kind))), Some(Reason::QuicNotBegun));
        let frames = [crypto(0, &named(NAME)), vec![0; 1200]].concat();
        assert_eq!(flow.read(&[initial(ID, &frames), of(kind)].concat()), Decision::Pass);
        assert_eq!(flow.read(&of(kind)), Decision::Pass);
    }
    assert_eq!(reason(&web().read(&of(0xf0))), Some(Reason::QuicUnreadable));
}

#[test]
fn a_hello_over_several_datagrams_is_held_until_it_is_whole() {
    let message = hello(&[(51, vec![7; 1800]), (0, list(0, NAME.as_bytes()))]);
    let parts: Vec<_> = message.chunks(700).enumerate().collect();
    for order in [[0, 1, 2], [2, 1, 0], [1, 2, 0]] {
        let mut flow = web();
        for (nth, at) in order.into_iter().enumerate() {
            let (at, part) = parts[at];
            let decision = flow.read(&numbered(ID, nth as u32, &crypto(700 * at, part)));
            assert_eq!(decision, if nth == 2 { Decision::Pass } else { Decision::Hold });
            if nth < 2 {
                assert_eq!(flow.read(SHORT), Decision::Hold);
            }
        }
    }
}

#[test]
fn every_later_connection_of_a_flow_is_checked() {
    let mut flow = web();
    assert_eq!(flow.read(&whole(ID, &named(NAME))), Decision::Pass);
    let other = b"another ID";
    assert_eq!(reason(&flow.read(&whole(other, &named("evil.test")))), Some(Reason::TlsOtherName));
    assert_eq!(flow.read(SHORT), Decision::Pass, "the first connection goes on");
    assert_eq!(flow.read(&whole(other, &named(NAME))), Decision::Pass);
    let frames = [crypto(0, &named(NAME)), vec![0; 1200]].concat();
    let both = [initial(b"third ID", &frames), whole(b"fourth ID", &named("evil.test"))];
    assert_eq!(reason(&flow.read(&both.concat())), Some(Reason::TlsOtherName));
}

#[test]
fn later_packets_of_a_connection_are_read_with_its_first_keys() {
    let mut flow = web();
    assert_eq!(flow.read(&whole(ID, &named(NAME))), Decision::Pass);
    let mut number = 0;
    let mut next = |version, frames: &[u8]| {
        number += 1;
        padded(
            Initial { version, dcid: b"server's", keys_of: ID, number, is_short: false }
                .seal(frames),
        )
    };
    let ack = [&[2, 0, 0, 0, 0][..], &[0; 40]].concat();
    assert_eq!(flow.read(&next(Version::V1, &ack)), Decision::Pass);
    assert_eq!(flow.read(&next(Version::V2, &ack)), Decision::Pass);
    let second = crypto(named(NAME).len(), &named("evil.test"));
    let refused = flow.read(&next(Version::V1, &second));
    assert_eq!(reason(&refused), Some(Reason::TlsOtherName), "a second ClientHello");
    let second = crypto(named(NAME).len(), &named(NAME));
    assert_eq!(flow.read(&next(Version::V1, &second)), Decision::Pass);
    let third = crypto(2 * named(NAME).len(), &named(NAME));
    assert_eq!(reason(&flow.read(&next(Version::V1, &third))), Some(Reason::TlsUnreadable));
}

#[test]
fn other_bytes_at_the_same_place_are_refused() {
    let (own, evil) = (named(NAME), named("evil.test123456"));
    assert_eq!(own.len(), evil.len());
    let mut flow = web();
    assert_eq!(flow.read(&whole(ID, &own)), Decision::Pass);
    let evil = crypto(0, &evil);
    assert_eq!(reason(&flow.read(&numbered(ID, 1, &evil))), Some(Reason::QuicConflict));
    let own = crypto(0, &own);
    assert_eq!(flow.read(&numbered(ID, 2, &own)), Decision::Pass, "a retransmission");
    assert_eq!(reason(&flow.read(&numbered(ID, 2, &own))), Some(Reason::QuicConflict), "a number");
}

#[test]
fn a_second_connection_of_one_id_is_refused() {
    let own = crypto(0, &named(NAME));
    let mut flow = web();
    assert_eq!(flow.read(&numbered(ID, 0x4000_0000, &own)), Decision::Pass);
    // A server may not have seen the first packet, and reads the short number otherwise.
    let frames = [own, vec![0; 40]].concat();
    let second = Initial { version: Version::V1, dcid: ID, keys_of: ID, number: 7, is_short: true };
    let second = padded(second.seal(&frames));
    assert_eq!(reason(&flow.read(&second)), Some(Reason::QuicConflict));
    assert_eq!(web().read(&second), Decision::Pass, "on its own it is a connection");
}

#[test]
fn what_was_dropped_is_forgotten() {
    let (own, evil) = (named(NAME), named("evil.test123456"));
    let mut flow = web();
    assert_eq!(flow.read(&initial(ID, &crypto(20, &evil[20..]))), Decision::Hold);
    let refused = flow.read(&numbered(ID, 1, &crypto(0, &own)));
    assert_eq!(reason(&refused), Some(Reason::QuicConflict));
    assert_eq!(flow.read(&whole(ID, &own)), Decision::Pass, "nothing of the first went out");
}

#[test]
fn datagrams_that_a_server_drops_are_refused() {
    let small = Initial { version: Version::V1, dcid: ID, keys_of: ID, number: 0, is_short: false };
    let small = small.seal(&[crypto(0, &named(NAME)), vec![0; 40]].concat());
    assert_eq!(reason(&web().read(&small)), Some(Reason::QuicUnreadable));
}

#[test]
fn a_connection_that_gave_way_may_not_begin_again() {
    let mut flow = web();
    for n in 0..260_u16 {
        let id = [&b"connection"[..], &n.to_be_bytes()].concat();
        assert_eq!(flow.read(&whole(&id, &named(NAME))), Decision::Pass, "{n}");
    }
    let first = whole(b"connection\0\0", &named(NAME));
    assert_eq!(reason(&flow.read(&first)), Some(Reason::QuicTooMany));
    let new = whole(b"connection\xff\xff", &named(NAME));
    assert_eq!(reason(&flow.read(&new)), Some(Reason::QuicTooMany));
    assert_eq!(flow.read(SHORT), Decision::Pass);
}

#[test]
fn what_is_held_is_bounded() {
    let part = |number| numbered(ID, number, &crypto(0, &named(NAME)[..20]));
    let mut flow = web();
    for number in 0..MOST_HELD as u32 {
        assert_eq!(flow.read(&part(number)), Decision::Hold);
    }
    assert_eq!(reason(&flow.read(&part(99))), Some(Reason::QuicTooMuch));
    assert_eq!(flow.read(&whole(ID, &named(NAME))), Decision::Pass);
    let mut flow = web();
    assert_eq!(flow.read(&part(0)), Decision::Hold);
    assert_eq!(reason(&flow.read(&vec![0; MOST_HELD_BYTES])), Some(Reason::QuicTooMuch));
    let far = initial(ID, &crypto(10_000, b"x"));
    assert_eq!(reason(&web().read(&far)), Some(Reason::TlsTooLong));
}

#[test]
fn frames_that_no_initial_packet_has_are_refused() {
    let wrong: [&[u8]; 6] =
        [&[4, 0, 0], &[0x1d, 0, 0], &[6, 0, 0x44], &[8, 0], &[2, 0, 0, 0x3f], &[0x40]];
    for frames in wrong {
        let padded = [&[0; 40], frames].concat();
        assert_eq!(reason(&web().read(&initial(ID, &padded))), Some(Reason::QuicUnreadable));
    }
    let close = [&[0x1c, 0, 6, 2][..], b"no", &[0; 40]].concat();
    assert_eq!(web().read(&initial(ID, &close)), Decision::Hold);
}

#[test]
fn an_encrypted_hello_is_refused_unless_it_is_set_to_pass() {
    let message = hello(&[(0, list(0, NAME.as_bytes())), (0xfe0d, vec![0; 40])]);
    let datagram = whole(ID, &message);
    assert_eq!(reason(&web().read(&datagram)), Some(Reason::TlsEncryptedHello));
    let expected = Expected::new([NAME], 443).with_encrypted_hello(EncryptedHello::Pass);
    let mut flow = Datagrams::new(expected);
    assert_eq!(flow.read(&datagram), Decision::Pass);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn a_hello_passes_in_any_order_of_any_parts(
        cuts in prop::collection::btree_set(1..190_usize, 0..10),
        seed in any::<u64>(),
        is_evil in any::<bool>(),
    ) {
        let name = if is_evil { "evil.test" } else { NAME };
        let message = hello(&[(21, vec![0; 100]), (0, list(0, name.as_bytes()))]);
        let ends = cuts.iter().copied().filter(|cut| *cut < message.len()).chain([message.len()]);
        let mut parts = Vec::new();
        let mut from = 0;
        for end in ends {
            parts.push((from, &message[from..end]));
            from = end;
        }
        // Any order, which the seed chooses.
        parts.sort_by_key(|(at, _)| (*at as u64 + 1).wrapping_mul(seed | 1));
        let mut flow = web();
        let mut passed = 0;
        for (number, (at, part)) in (0..).zip(&parts) {
            match flow.read(&numbered(ID, number, &[crypto(*at, part), vec![1; 20]].concat())) {
                Decision::Pass => passed += 1,
                Decision::Hold => {}
                Decision::Refuse(refusal) => {
                    prop_assert!(is_evil);
                    prop_assert_eq!(refusal.reason, Reason::TlsOtherName);
                }
            }
        }
        prop_assert_eq!(passed, usize::from(!is_evil));
    }

    #[test]
    fn arbitrary_datagrams_never_pass_on_the_web_port(
        datagrams in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..100), 0..10),
    ) {
        let mut flow = web();
        for datagram in datagrams {
            prop_assert!(reason(&flow.read(&datagram)).is_some());
        }
    }
}
