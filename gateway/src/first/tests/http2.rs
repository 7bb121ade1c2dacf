//! Frames of HTTP/2.

use super::{all_of, reason, refused, verdict_on};
use crate::first::http2::PREFACE;
use crate::first::{Expected, Reason, Verdict};

const SETTINGS: [u8; 9] = [0, 0, 0, 4, 0, 0, 0, 0, 0];

fn frame(kind: u8, flags: u8, stream: u32, content: &[u8]) -> Vec<u8> {
    let [_, length @ ..] = (content.len() as u32).to_be_bytes();
    [&length[..], &[kind, flags], &stream.to_be_bytes(), content].concat()
}

/// A literal that is not indexed.
fn field(name: &str, value: &str) -> Vec<u8> {
    let string = |s: &str| [&[s.len() as u8], s.as_bytes()].concat();
    assert!(name.len() < 127 && value.len() < 127);
    [&[0], &*string(name), &*string(value)].concat()
}

fn list(fields: &[(&str, &str)]) -> Vec<u8> {
    fields.iter().flat_map(|(name, value)| field(name, value)).collect()
}

const FRONT: [(&str, &str); 3] = [(":method", "GET"), (":scheme", "http"), (":path", "/")];

fn with(more: &[(&str, &str)]) -> Vec<u8> {
    list(&[&FRONT, more].concat())
}

/// The header list of a request.
pub(super) fn request(authority: &str) -> Vec<u8> {
    with(&[(":authority", authority)])
}

/// A connection whose first request has this header list.
pub(super) fn connection(block: &[u8]) -> Vec<u8> {
    begun(&[frame(1, 5, 1, block)])
}

fn begun(frames: &[Vec<u8>]) -> Vec<u8> {
    [PREFACE, &SETTINGS, &frames.concat()].concat()
}

#[test]
fn requests_for_the_name_pass() {
    let good = request("allowed.example");
    let data = vec![7; 300_000];
    let connections = [
        begun(&[]),
        connection(&good),
        connection(&request("ALLOWED.example:80")),
        connection(&with(&[("host", "allowed.example")])),
        connection(&with(&[(":authority", "allowed.example"), ("host", "allowed.example")])),
        connection(&list(&[
            (":method", "CONNECT"),
            (":protocol", "websocket"),
            (":scheme", "http"),
            (":path", "/chat"),
            (":authority", "allowed.example"),
        ])),
        begun(&[frame(1, 0x2d, 1, &[&[3, 0, 0, 0, 0, 9][..], &good, &[0; 3]].concat())]),
        begun(&[frame(1, 1, 1, &good[..9]), frame(9, 0, 1, &[]), frame(9, 4, 1, &good[9..])]),
        begun(&[frame(1, 4, 1, &good), frame(0, 0, 1, &data), frame(1, 5, 1, &field("x", "y"))]),
        begun(&[frame(4, 1, 0, &[]), frame(6, 0, 0, &[0; 8]), frame(8, 0, 0, &[0, 0, 1, 0])]),
        begun(&[
            frame(0x10, 0, 0, b"\0\0\0\x01u=1"),
            frame(3, 0, 1, &[0; 4]),
            frame(2, 0, 3, &[0; 5]),
        ]),
    ];
    for sent in connections {
        assert_eq!(verdict_on(&sent), all_of(&sent), "{}", sent.escape_ascii());
    }
}

#[test]
fn requests_for_another_host_are_refused() {
    let own = (":authority", "allowed.example");
    let table = [
        (request("evil.test"), Reason::Http2OtherHost),
        (request("allowed.example:81"), Reason::Http2OtherHost),
        (request("user@allowed.example"), Reason::Http2OtherHost),
        (request(""), Reason::Http2OtherHost),
        (with(&[("host", "evil.test")]), Reason::Http2OtherHost),
        (with(&[own, ("host", "evil.test")]), Reason::Http2OtherHost),
        (field("host", "evil.test"), Reason::Http2OtherHost),
        (with(&[]), Reason::Http2NoHost),
        (with(&[("host", own.1), ("host", own.1)]), Reason::HttpManyHosts),
        (list(&[(":method", "CONNECT"), own]), Reason::Http2Connect),
        (with(&[own, own]), Reason::Http2Unreadable),
        (with(&[("x", "y"), own]), Reason::Http2Unreadable),
        (with(&[own, ("Host", "evil.test")]), Reason::Http2Unreadable),
        (with(&[own, ("x", "a\r\nHost: evil.test")]), Reason::Http2Unreadable),
        (with(&[own, ("x\r\nhost", "evil.test")]), Reason::Http2Unreadable),
        (with(&[own, ("transfer-encoding", "chunked")]), Reason::Http2Unreadable),
        (with(&[own, (":other", "x")]), Reason::Http2Unreadable),
        (with(&[own, ("", "x")]), Reason::Http2Unreadable),
        (
            list(&[(":method", "GET"), (":scheme", "http"), (":path", "http://evil.test/"), own]),
            Reason::Http2Unreadable,
        ),
        (list(&[(":path", "/"), own]), Reason::Http2Unreadable),
    ];
    for (block, expected) in table {
        let sent = connection(&block);
        assert_eq!(refused(&sent), Some(expected), "{}", block.escape_ascii());
    }
}

#[test]
fn every_later_request_is_checked() {
    let (good, evil) = (request("allowed.example"), request("evil.test"));
    let sent = begun(&[frame(1, 5, 1, &good), frame(1, 5, 3, &good), frame(1, 5, 5, &evil)]);
    let Verdict::Refuse(refusal) = verdict_on(&sent) else { panic!() };
    assert_eq!(refusal.seen(), Some("evil.test"));
}

#[test]
fn frames_out_of_order_are_refused() {
    let good = request("allowed.example");
    let whole = frame(1, 5, 1, &good);
    let connections = [
        [PREFACE, &whole].concat(),
        [PREFACE, &frame(4, 1, 0, &[])].concat(),
        begun(&[frame(1, 1, 1, &good), frame(0, 0, 1, b"x")]),
        begun(&[frame(1, 1, 1, &good), frame(9, 4, 3, b"")]),
        begun(&[frame(1, 1, 1, &good), frame(1, 5, 3, &good)]),
        begun(&[frame(9, 4, 1, &good)]),
        begun(&[frame(5, 4, 1, &good)]),
        begun(&[frame(1, 5, 2, &good)]),
        begun(&[frame(1, 5, 0, &good)]),
        begun(&[frame(6, 0, 0, &[0; 16_385])]),
        begun(&[frame(1, 0xd, 1, &[200, 1, 2])]),
        begun(&[frame(1, 0x25, 1, &[0; 4])]),
        begun(&[frame(1, 0xd, 1, &[])]),
    ];
    for sent in connections {
        assert_eq!(refused(&sent), Some(Reason::Http2Unreadable), "{}", sent.escape_ascii());
    }
}

#[test]
fn header_blocks_are_bounded() {
    let long = begun(&[vec![1, 0, 1, 1, 4, 0, 0, 0, 1]]);
    assert_eq!(refused(&long), Some(Reason::Http2TooLong));
    let mut flood = vec![frame(1, 0, 1, b"")];
    flood.resize(70, frame(9, 0, 1, b""));
    assert_eq!(refused(&begun(&flood)), Some(Reason::Http2TooLong));
    // An entry of 4,000 bytes, and 20 references to it.
    let entry = [&[0x40, 1, b'x', 0x7f, 0xa1, 0x1e][..], &[b'y'; 4000]].concat();
    let bomb = [entry, vec![0xbe; 20]].concat();
    assert_eq!(refused(&connection(&bomb)), Some(Reason::Http2TooLong));
    let many = vec![0x82; 300];
    assert!(refused(&connection(&many)).is_some());
}

#[test]
fn a_header_block_waits_until_it_is_whole() {
    let good = request("allowed.example");
    let sent = begun(&[frame(1, 1, 1, &good), frame(9, 4, 1, &[])]);
    let before = begun(&[]).len() as u64;
    for cut in begun(&[]).len()..sent.len() {
        assert_eq!(verdict_on(&sent[..cut]), Verdict::Pass(before));
    }
    let mut stream = crate::first::Stream::new(Expected::new([super::NAME], 80));
    stream.read(&sent[..sent.len() - 1]);
    assert_eq!(reason(&stream.end()), Some(Reason::Cut));
}
