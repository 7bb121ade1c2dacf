//! ClientHellos over TCP.

use super::fixtures::{self, bytes};
use super::{NAME, all_of, refused, verdict_on};
use crate::first::server_hello::tests::server_hello;
use crate::first::{EncryptedHello, Expected, Reason, Stream, Verdict};

const SERVER_NAME: u16 = 0;
const ENCRYPTED: u16 = 0xfe0d;

fn vec16(content: &[u8]) -> Vec<u8> {
    [&(content.len() as u16).to_be_bytes(), content].concat()
}

/// A server name list with one name.
pub(super) fn list(kind: u8, name: &[u8]) -> Vec<u8> {
    vec16(&[&[kind], &*vec16(name)].concat())
}

/// A ClientHello with these extensions, from its handshake type on.
pub(super) fn hello(extensions: &[(u16, Vec<u8>)]) -> Vec<u8> {
    let mut all = Vec::new();
    for (kind, content) in extensions {
        all.extend(kind.to_be_bytes());
        all.extend(vec16(content));
    }
    let mut body = [&[3, 3][..], &[7; 32], &[0], &[0, 2, 0x13, 1], &[1, 0]].concat();
    body.extend(vec16(&all));
    handshake(1, &body)
}

pub(super) fn named(name: &str) -> Vec<u8> {
    hello(&[(SERVER_NAME, list(0, name.as_bytes()))])
}

/// Whether all of the bytes pass.
fn passes(verdict: &Verdict, bytes: &[u8]) -> bool {
    *verdict == all_of(bytes) || *verdict == Verdict::ALL
}

fn handshake(kind: u8, body: &[u8]) -> Vec<u8> {
    let [_, length @ ..] = (body.len() as u32).to_be_bytes();
    [&[kind], &length[..], body].concat()
}

pub(super) fn record(kind: u8, content: &[u8]) -> Vec<u8> {
    [&[kind, 3, 1], &*vec16(content)].concat()
}

/// The message in records of `each` bytes.
fn in_records(message: &[u8], each: usize) -> Vec<u8> {
    message.chunks(each).flat_map(|part| record(22, part)).collect()
}

#[test]
fn hellos_of_real_programs_pass_for_their_name_alone() {
    for digits in [
        fixtures::OPENSSL,
        fixtures::OPENSSL_TLS12,
        fixtures::CURL,
        fixtures::PYTHON,
        fixtures::NODE,
        fixtures::GO,
    ] {
        let sent = bytes(digits);
        assert!(passes(&verdict_on(&sent), &sent));
        let mut stream = Stream::new(Expected::new(["ALLOWED.Example."], 443));
        assert!(passes(&stream.read(&sent), &sent));
        for other in ["allowed.exampl", "xallowed.example", "example", ""] {
            let Verdict::Refuse(refusal) = Stream::new(Expected::new([other], 443)).read(&sent)
            else {
                panic!()
            };
            assert_eq!(refusal.reason, Reason::TlsOtherName);
            assert_eq!(refusal.seen(), Some(NAME));
        }
    }
}

#[test]
fn a_hello_without_a_name_is_refused() {
    assert_eq!(refused(&bytes(fixtures::OPENSSL_NONAME)), Some(Reason::TlsNoName));
    let bare = handshake(1, &[&[3, 3][..], &[7; 32], &[0], &[0, 2, 0x13, 1], &[1, 0]].concat());
    assert_eq!(refused(&record(22, &bare)), Some(Reason::TlsNoName));
}

#[test]
fn nothing_passes_before_the_last_byte_of_a_hello() {
    let sent = bytes(fixtures::CURL);
    for cut in 0..sent.len() {
        let mut stream = Stream::new(Expected::new([NAME], 443));
        assert_eq!(stream.read(&sent[..cut]), Verdict::Pass(0), "{cut} bytes");
        assert_eq!(stream.held_bytes(), cut as u64);
        assert!(!stream.is_decided());
        assert_eq!(stream.read(&sent[cut..]), all_of(&sent));
    }
}

#[test]
fn a_hello_in_a_thousand_pieces_is_read() {
    let padded = hello(&[(21, vec![0; 1000]), (SERVER_NAME, list(0, NAME.as_bytes()))]);
    for each in [1, 2, 3, 7, 100, 16_384] {
        let sent = in_records(&padded, each);
        assert!(passes(&verdict_on(&sent), &sent), "records of {each}");
        let mut stream = Stream::new(Expected::new([NAME], 443));
        let last = sent.iter().map(|byte| stream.read(&[*byte])).last();
        assert!(last.is_some_and(|last| passes(&last, &sent)));
    }
}

#[test]
fn names_that_differ_in_any_way_are_refused() {
    let of = |list: Vec<u8>| refused(&record(22, &hello(&[(SERVER_NAME, list)])));
    for name in [
        "evil.test",
        "allowed.example.",
        "allowed.example\0",
        "allowed.example\0.evil.test",
        "evil.test\0allowed.example",
        " allowed.example",
        "allowed.example:443",
        "allowed%2eexample",
        "\u{430}llowed.example",
        "xn--llowed-qwf.example",
        "",
    ] {
        assert_eq!(of(list(0, name.as_bytes())), Some(Reason::TlsOtherName), "{name:?}");
    }
    let two = vec16(&[&[0], &*vec16(NAME.as_bytes()), &[0], &*vec16(b"evil.test")].concat());
    assert_eq!(of(two), Some(Reason::TlsUnreadable));
    assert_eq!(of(list(1, NAME.as_bytes())), Some(Reason::TlsUnreadable));
    assert_eq!(of(vec![]), Some(Reason::TlsUnreadable));
    assert_eq!(of([list(0, NAME.as_bytes()), vec![0]].concat()), Some(Reason::TlsUnreadable));
    assert_eq!(of(list(0, b"ALLOWED.EXAMPLE")), None);
}

#[test]
fn two_server_name_extensions_are_refused() {
    let (own, evil) = (list(0, NAME.as_bytes()), list(0, b"evil.test"));
    for pair in [[own.clone(), evil.clone()], [evil, own]] {
        let both = hello(&pair.map(|list| (SERVER_NAME, list)));
        assert!(refused(&record(22, &both)).is_some());
    }
}

#[test]
fn an_encrypted_hello_is_refused_unless_it_is_set_to_pass() {
    for kind in [ENCRYPTED, 0xffce] {
        let sent = record(22, &hello(&[(0, list(0, NAME.as_bytes())), (kind, vec![0; 40])]));
        assert_eq!(refused(&sent), Some(Reason::TlsEncryptedHello));
        let mut stream =
            Stream::new(Expected::new([NAME], 443).with_encrypted_hello(EncryptedHello::Pass));
        assert!(passes(&stream.read(&sent), &sent));
    }
    let evil = record(22, &hello(&[(0, list(0, b"evil.test")), (ENCRYPTED, vec![0; 40])]));
    let mut stream =
        Stream::new(Expected::new([NAME], 443).with_encrypted_hello(EncryptedHello::Pass));
    assert!(matches!(stream.read(&evil), Verdict::Refuse(_)));
}

#[test]
fn hellos_of_ssl_2_and_broken_records_are_refused() {
    let ssl2 = [0x80, 0x2e, 1, 3, 1, 0, 0x15, 0, 0, 0, 0x10, 1, 0, 0x80];
    assert_eq!(refused(&ssl2), Some(Reason::TlsSsl2));
    assert_eq!(refused(&[0x80, 0x2e, 1, 0, 2, 0, 0x15]), Some(Reason::TlsSsl2));
    let good = named(NAME);
    let unreadable = [
        vec![22, 2],
        record(22, &[]),
        record(22, &[good.clone(), good.clone()].concat()),
        record(22, &[good.clone(), vec![0]].concat()),
        record(22, &handshake(2, &[0; 40])),
        record(22, &handshake(1, &[0; 40])),
        [record(22, &good[..9]), record(21, &[1, 0])].concat(),
        [record(22, &good[..9]), record(20, &[1])].concat(),
        vec![22, 3, 1, 0x40, 1],
    ];
    for sent in unreadable {
        assert_eq!(refused(&sent), Some(Reason::TlsUnreadable), "{sent:?}");
    }
    assert_eq!(refused(&record(22, &[1, 1, 0, 1])), Some(Reason::TlsTooLong));
}

#[test]
fn every_wrong_length_is_refused_or_waited_for() {
    let good = record(22, &named(NAME));
    for at in 0..good.len() {
        for change in [1_u8, 0x80, 0xff] {
            let mut sent = good.clone();
            sent[at] = sent[at].wrapping_add(change);
            // Random, version and cipher may have any value; the name may not.
            let passed = verdict_on(&sent) == all_of(&sent);
            let name_at = good.len() - NAME.len();
            let is_case = sent[at..].starts_with(&[good[at] ^ 0x20]);
            assert!(!passed || at < name_at || is_case, "byte {at} + {change}");
        }
    }
}

/// A hello that offers TLS 1.3.
fn modern(name: &str) -> Vec<u8> {
    hello(&[(43, vec![2, 3, 4]), (SERVER_NAME, list(0, name.as_bytes()))])
}

/// The verdict after a first hello, what the guest sends at once, the host's answer, and what the guest sends then.
fn after(first: &[u8], at_once: &[u8], is_retry: bool, then: &[u8]) -> Verdict {
    let mut stream = Stream::new(Expected::new([NAME], 443));
    stream.read(first);
    stream.read(at_once);
    assert!(stream.wants_answers());
    for byte in server_hello(is_retry) {
        stream.answered(&[byte]);
    }
    stream.read(then)
}

#[test]
fn a_second_hello_is_checked_too() {
    let first = record(22, &modern(NAME));
    let evil = record(22, &modern("evil.test"));
    let (change, warning) = (record(20, &[1]), record(21, &[1, 90]));
    for between in [
        vec![],
        change.clone(),
        [&change[..], &change].concat(),
        warning.clone(),
        [&warning[..], &change, &warning].concat(),
    ] {
        for (at_once, then) in [(&between[..], &[][..]), (&[], &between)] {
            let evil = [then, &evil].concat();
            let refused = after(&first, at_once, true, &evil);
            assert_eq!(super::reason(&refused), Some(Reason::TlsOtherName), "{between:?}");
            assert_eq!(after(&first, at_once, true, &[then, &first].concat()), Verdict::ALL);
        }
        // Before the host has answered it waits.
        let pipelined = [&between[..], &evil].concat();
        let refused = after(&first, &pipelined, true, &[]);
        assert_eq!(super::reason(&refused), Some(Reason::TlsOtherName));
        assert_eq!(after(&first, &pipelined, false, &[]), Verdict::ALL, "it is none");
    }
    let changes = [&change[..], &change, &change, &evil].concat();
    for odd in [changes, [record(24, &[1; 9]), evil].concat(), record(23, &[7; 9])] {
        let refused = after(&first, &[], true, &odd);
        assert_eq!(super::reason(&refused), Some(Reason::TlsUnreadable), "{odd:?}");
    }
}

#[test]
fn a_second_hello_behind_early_data_is_checked() {
    let early = hello(&[(42, vec![]), (43, vec![2, 3, 4]), (0, list(0, NAME.as_bytes()))]);
    let front = [record(22, &early), record(23, &[9; 500]), record(23, &[9; 500])].concat();
    assert_eq!(verdict_on(&front), all_of(&front));
    let evil = record(22, &modern("evil.test"));
    let refused = after(&front, &[], true, &evil);
    assert_eq!(super::reason(&refused), Some(Reason::TlsOtherName));
}

#[test]
fn the_rest_of_a_handshake_is_opaque() {
    let first = record(22, &modern(NAME));
    let finished = [record(20, &[1]), record(22, &[1, 2, 3, 4, 5, 6, 7, 8])].concat();
    let nexts = [record(22, &handshake(16, &[1; 40])), record(23, &[1; 4]), finished];
    for next in nexts {
        assert_eq!(after(&first, &[], false, &next), Verdict::ALL);
        assert_eq!(after(&first, &next, false, b"anything"), Verdict::ALL);
        let mut stream = Stream::new(Expected::new([NAME], 443));
        stream.read(&first);
        assert!(matches!(stream.read(&next), Verdict::Pass(n) if n < 1000), "it waits");
        assert!(!stream.is_decided());
        assert!(matches!(stream.end(), Verdict::Pass(n) if n < 1000), "so does the end");
        assert_eq!(stream.answered(&server_hello(false)), Verdict::ALL);
        assert!(stream.is_decided());
    }
    // A client of TLS 1.2 has no second hello.
    assert_eq!(verdict_on(&record(22, &named(NAME))), Verdict::ALL);
}

#[test]
fn a_refused_stream_stays_refused() {
    let mut stream = Stream::new(Expected::new([NAME], 443));
    let refused = stream.read(&record(22, &named("evil.test")));
    assert!(matches!(refused, Verdict::Refuse(_)));
    assert_eq!(stream.read(&record(22, &named(NAME))), refused);
    assert!(stream.is_decided());
}

#[test]
fn postgres_asks_for_tls_first() {
    for asks in [b"\0\0\0\x08\x04\xd2\x16\x2f", b"\0\0\0\x08\x04\xd2\x16\x30"] {
        assert_eq!(verdict_on(asks), Verdict::Pass(8));
        let good = [&asks[..], &record(22, &named(NAME))].concat();
        assert!(passes(&verdict_on(&good), &good));
        let evil = [&asks[..], &record(22, &named("evil.test"))].concat();
        assert_eq!(refused(&evil), Some(Reason::TlsOtherName));
        let plain = [&asks[..], b"\0\0\0\x20\0\x03\0\0user\0"].concat();
        assert_eq!(verdict_on(&plain), Verdict::ALL);
    }
}
