//! Requests of HTTP/1.

use super::{NAME, all_of, reason, refused, verdict_on};
use crate::first::{Expected, Reason, Stream, Verdict};

const GOOD: &[u8] = b"GET / HTTP/1.1\r\nHost: allowed.example\r\n\r\n";
const EVIL: &[u8] = b"GET / HTTP/1.1\r\nHost: evil.test\r\n\r\n";

/// A request with these lines behind the request line.
fn request(line: &str, fields: &[&str]) -> Vec<u8> {
    let fields: String = fields.iter().map(|f| format!("{f}\r\n")).collect();
    format!("{line}\r\n{fields}\r\n").into_bytes()
}

fn get(fields: &[&str]) -> Vec<u8> {
    request("GET / HTTP/1.1", fields)
}

fn post(fields: &[&str], body: &[u8]) -> Vec<u8> {
    let fields = [&["Host: allowed.example"], fields].concat();
    [&*request("POST / HTTP/1.1", &fields), body].concat()
}

#[test]
fn requests_for_the_name_pass() {
    let requests = [
        get(&["Host: allowed.example"]),
        get(&["host:ALLOWED.example:80"]),
        get(&["User-Agent: curl/7.88.1", "HOST: \t allowed.example \t", "Accept: */*"]),
        get(&["Host: allowed.example", "Cookie: \u{e9}"]),
        request("GET http://allowed.example/x HTTP/1.1", &["Host: allowed.example"]),
        request("GET HTTP://ALLOWED.example:80?x HTTP/1.1", &["Host: allowed.example"]),
        request("OPTIONS * HTTP/1.1", &["Host: allowed.example"]),
        request("PROPFIND //x HTTP/1.1", &["Host: allowed.example"]),
        request("GET / HTTP/1.0", &[]),
        request("GET / HTTP/1.0", &["Host: allowed.example"]),
        [b"\r\n\r\n", GOOD].concat(),
        post(&["Content-Length: 5"], b"hello"),
        post(&["Content-Length: 0"], b""),
        post(&["Transfer-Encoding: Chunked"], b"5\r\nhello\r\n00a\r\n0123456789\r\n0\r\n\r\n"),
        post(&["Transfer-Encoding: chunked"], b"0\r\nDigest: x\r\n\r\n"),
    ];
    for sent in requests {
        let twice = [&sent[..], GOOD].concat();
        assert_eq!(verdict_on(&sent), all_of(&sent), "{}", sent.escape_ascii());
        assert_eq!(verdict_on(&twice), all_of(&twice), "{}", sent.escape_ascii());
    }
}

#[test]
fn requests_for_another_host_are_refused() {
    let own = "Host: allowed.example";
    let of = Reason::HttpOtherHost;
    let table = [
        (get(&["Host: evil.test"]), of),
        (get(&["Host: allowed.example:81"]), of),
        (get(&["Host: allowed.example:080"]), of),
        (get(&["Host: allowed.example:"]), of),
        (get(&["Host: allowed.example."]), of),
        (get(&["Host: allowed.example, evil.test"]), of),
        (get(&["Host: evil.test@allowed.example"]), of),
        (get(&["Host: allowed.example@evil.test"]), of),
        (get(&["Host:"]), of),
        (request("GET / HTTP/1.0", &["Host: evil.test"]), of),
        (request("GET http://evil.test/ HTTP/1.1", &[own]), of),
        (request("GET http://evil.test/ HTTP/1.0", &[]), of),
        (request("GET http://allowed.example@evil.test/ HTTP/1.1", &[own]), of),
        (request("GET http://allowed.example:81/ HTTP/1.1", &[own]), of),
        (request("GET https:///evil.test HTTP/1.1", &[own]), of),
        (request("GET ftp://allowed.example/ HTTP/1.1", &[own]), Reason::HttpUnreadable),
        (request("GET * HTTP/1.1", &[own]), Reason::HttpUnreadable),
        (get(&[]), Reason::HttpNoHost),
        (get(&[own, own]), Reason::HttpManyHosts),
        (get(&[own, "hOST: evil.test"]), Reason::HttpManyHosts),
        (request("GET / HTTP/1.0", &[own, own]), Reason::HttpManyHosts),
        (request("CONNECT allowed.example:80 HTTP/1.1", &[own]), Reason::HttpConnect),
        (request("Connect allowed.example:80 HTTP/1.1", &[own]), Reason::HttpConnect),
    ];
    for (sent, expected) in table {
        assert_eq!(refused(&sent), Some(expected), "{}", sent.escape_ascii());
        assert_eq!(refused(&[GOOD, &sent].concat()), Some(expected), "{}", sent.escape_ascii());
    }
}

#[test]
fn lengths_that_servers_read_differently_are_refused() {
    let of = Reason::HttpFraming;
    let table = [
        (post(&["Content-Length: 5", "Content-Length: 5"], b"hello"), of),
        (post(&["Content-Length: 5, 5"], b"hello"), of),
        (post(&["Content-Length: +5"], b"hello"), of),
        (post(&["Content-Length: 0x5"], b"hello"), of),
        (post(&["Content-Length:"], b"hello"), of),
        (post(&["Content-Length: -1"], b"hello"), of),
        (post(&["Content-Length: 18446744073709551621"], b"hello"), of),
        (post(&["Content-Length: 5", "Transfer-Encoding: chunked"], b"0\r\n\r\n"), of),
        (post(&["Transfer-Encoding: chunked", "Transfer-Encoding: chunked"], b""), of),
        (post(&["Transfer-Encoding: gzip, chunked"], b""), of),
        (post(&["Transfer-Encoding: chunked, identity"], b""), of),
        (post(&["Transfer-Encoding: identity"], b""), of),
        (post(&["Transfer-Encoding: xchunked"], b""), of),
        (post(&["Transfer-Encoding: \x0bchunked"], b""), Reason::HttpUnreadable),
        (request("POST / HTTP/1.0", &["Transfer-Encoding: chunked"]), of),
        (post(&["Transfer-Encoding: chunked"], b"5;x=y\r\nhello\r\n0\r\n\r\n"), of),
        (post(&["Transfer-Encoding: chunked"], b"5 \r\nhello\r\n0\r\n\r\n"), of),
        (post(&["Transfer-Encoding: chunked"], b"5\nhello\r\n0\r\n\r\n"), of),
        (post(&["Transfer-Encoding: chunked"], b"0x5\r\nhello\r\n0\r\n\r\n"), of),
        (post(&["Transfer-Encoding: chunked"], b"\r\nhello\r\n0\r\n\r\n"), of),
        (post(&["Transfer-Encoding: chunked"], b"5\r\nhelloo\r\n0\r\n\r\n"), of),
        (post(&["Transfer-Encoding: chunked"], b"ffffffffffffffff\r\n"), of),
        (post(&["Transfer-Encoding: chunked"], b"0\r\nHost: evil.test\r\n\r\n"), of),
        (post(&["Transfer-Encoding: chunked"], b"0\r\n\nX"), Reason::HttpUnreadable),
    ];
    for (sent, expected) in table {
        assert_eq!(refused(&sent), Some(expected), "{}", sent.escape_ascii());
    }
}

#[test]
fn heads_that_servers_read_differently_are_refused() {
    let heads: [&[u8]; 12] = [
        b"GET / HTTP/1.1\nHost: allowed.example\n\n",
        b"GET / HTTP/1.1\r\nHost: allowed.example\n\r\n",
        b"GET / HTTP/1.1\r\nHost: allowed.example\r\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: a\rHost: evil.test\r\nHost: allowed.example\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: a\r\n Host: evil.test\r\nHost: allowed.example\r\n\r\n",
        b"GET / HTTP/1.1\r\n\tHost: allowed.example\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: allowed.example\0\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost\t: allowed.example\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost allowed.example\r\n\r\n",
        b"GET / HTTP/1.1\r\n: x\r\nHost: allowed.example\r\n\r\n",
        b"GET / HTTP/1.1\r\nX(: x\r\nHost: allowed.example\r\n\r\n",
        b"GET /\x7f HTTP/1.1\r\nHost: allowed.example\r\n\r\n",
    ];
    for sent in heads {
        assert_eq!(refused(sent), Some(Reason::HttpUnreadable), "{}", sent.escape_ascii());
    }
}

#[test]
fn heads_are_bounded_in_bytes_and_fields() {
    let fields: Vec<String> = (0..127).map(|n| format!("X-{n}: y")).collect();
    let mut fields: Vec<&str> = fields.iter().map(String::as_str).collect();
    fields.push("Host: allowed.example");
    let most = get(&fields);
    assert_eq!(verdict_on(&most), all_of(&most));
    fields.push("X: y");
    assert_eq!(refused(&get(&fields)), Some(Reason::HttpTooLong));
    let long = [b"GET / HTTP/1.1\r\nX: ", &*vec![b'y'; 1 << 20]].concat();
    assert_eq!(refused(&long), Some(Reason::HttpTooLong));
    let path = [b"GET /", &*vec![b'y'; 1 << 20]].concat();
    assert_eq!(refused(&path), Some(Reason::HttpTooLong));
}

#[test]
fn a_body_passes_as_it_comes_and_the_next_request_is_read() {
    let mut stream = Stream::new(Expected::new([NAME], 80));
    let head = post(&["Content-Length: 1000"], b"");
    let body = EVIL.repeat(40);
    assert_eq!(stream.read(&head), all_of(&head));
    assert_eq!(stream.read(&body[..900]), Verdict::Pass(head.len() as u64 + 900));
    assert_eq!(stream.read(&[b'x'; 100]), Verdict::Pass(head.len() as u64 + 1000));
    assert_eq!(reason(&stream.read(EVIL)), Some(Reason::HttpOtherHost));
}

#[test]
fn trailers_wait_until_they_are_whole() {
    let mut stream = Stream::new(Expected::new([NAME], 80));
    let head = post(&["Transfer-Encoding: chunked"], b"3\r\nabc\r\n0\r\n");
    assert_eq!(stream.read(&head), all_of(&head));
    assert_eq!(stream.read(b"Digest: x\r\n"), all_of(&head));
    assert_eq!(stream.read(b"\r"), all_of(&head));
    assert_eq!(stream.read(b"\n"), Verdict::Pass(head.len() as u64 + 13));
}

fn upgrade(to: &str) -> Vec<u8> {
    get(&["Host: allowed.example", "Connection: Upgrade", &format!("Upgrade: {to}")])
}

/// A stream whose first request asks for a protocol, with more bytes after it.
fn upgrading(to: &str, more: &[u8]) -> (Stream, Verdict) {
    let mut stream = Stream::new(Expected::new([NAME], 80));
    let request = upgrade(to);
    let passed = all_of(&request);
    assert_eq!(stream.read(&request), passed);
    assert!(stream.wants_answers());
    assert_eq!(stream.read(more), passed, "bytes behind an Upgrade wait");
    (stream, passed)
}

#[test]
fn a_websocket_is_opaque_once_the_host_has_agreed() {
    let (mut stream, passed) = upgrading("websocket", b"\x81\x85abcd");
    assert_eq!(stream.answered(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 10"), passed);
    let rest = b"1 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n\x81";
    assert_eq!(stream.answered(rest), Verdict::ALL);
    assert!(stream.is_decided() && !stream.wants_answers());
}

#[test]
fn an_upgrade_that_the_host_declines_stays_with_http() {
    for answer in [
        &b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"[..],
        b"HTTP/1.1 426 Upgrade Required\r\n\r\n",
        b"HTTP/1.1 1010 X\r\n\r\n",
        b"nonsense\r\n\r\n",
    ] {
        let (mut stream, _) = upgrading("websocket", EVIL);
        let refused = stream.answered(answer);
        assert_eq!(reason(&refused), Some(Reason::HttpOtherHost), "{}", answer.escape_ascii());
        let (mut stream, _) = upgrading("websocket", GOOD);
        let request_bytes = upgrade("websocket").len() + GOOD.len();
        assert_eq!(stream.answered(answer), Verdict::Pass(request_bytes as u64));
        assert!(!stream.wants_answers());
    }
}

#[test]
fn an_upgrade_to_http_2_is_read_on() {
    let agreed = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n";
    let (mut stream, _) = upgrading("h2c", b"");
    stream.answered(agreed);
    let refused = stream.read(&super::http2::connection(&super::http2::request("evil.test")));
    assert_eq!(reason(&refused), Some(Reason::Http2OtherHost));
    let (mut stream, passed) = upgrading("h2c", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r");
    assert_eq!(stream.answered(agreed), passed);
    assert_eq!(stream.read(b"\n"), Verdict::Pass(upgrade("h2c").len() as u64 + 24));
}

#[test]
fn an_upgrade_to_tls_is_read_on() {
    let agreed = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: TLS/1.2, HTTP/1.1\r\n\r\n";
    let (mut stream, _) = upgrading("TLS/1.2", b"");
    stream.answered(agreed);
    let evil = super::tls::record(22, &super::tls::named("evil.test"));
    assert_eq!(reason(&stream.read(&evil)), Some(Reason::TlsOtherName));
}

#[test]
fn a_later_upgrade_is_an_ordinary_request() {
    let mut stream = Stream::new(Expected::new([NAME], 80));
    stream.read(GOOD);
    let request = upgrade("websocket");
    assert_eq!(stream.read(&request), Verdict::Pass((GOOD.len() + request.len()) as u64));
    assert!(!stream.wants_answers());
    stream.answered(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n\r\n");
    assert!(matches!(stream.read(b"\x81\x85abcd\r\n"), Verdict::Refuse(_)));
}

#[test]
fn an_answer_before_the_end_of_the_body_changes_nothing() {
    let mut stream = Stream::new(Expected::new([NAME], 80));
    let fields = ["Upgrade: websocket", "Content-Length: 10"];
    stream.read(&post(&fields, b"01234"));
    stream.answered(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n\r\n");
    stream.read(b"56789");
    assert_eq!(reason(&stream.read(EVIL)), Some(Reason::HttpOtherHost));
}

#[test]
fn bytes_behind_an_upgrade_are_bounded() {
    let (mut stream, passed) = upgrading("websocket", &vec![0; 65_536]);
    assert_eq!(stream.end(), passed, "the end waits, too");
    assert_eq!(reason(&stream.read(b"x")), Some(Reason::HttpBeforeAnswer));
}
