//! Which first bytes are a request, and which are another protocol.

use super::{NAME, refused, verdict_on};
use crate::first::{Expected, Reason, Stream, Verdict};

#[test]
fn protocols_without_a_name_pass() {
    let firsts: [&[u8]; 22] = [
        b"SSH-2.0-OpenSSH_9.2p1 Debian-2+deb12u3\r\n",
        b"SSH-2.0-Go\r\n",
        b"*1\r\n$4\r\nPING\r\n",
        b"PING\r\n",
        b"get key\r\n",
        b"set key 0 0 5\r\nhello\r\n",
        b"stats\r\n",
        b"NICK guest\r\nUSER guest 0 * :Real Name\r\n",
        b"EHLO guest.example\r\n",
        b"a001 CAPABILITY\r\n",
        b"USER anonymous\r\n",
        b"CONNECT\naccept-version:1.2\nhost:stomp\n\n\0",
        b"\0\0\0\x20\0\x03\0\0user\0guest\0",
        b"\x10\x0c\0\x04MQTT\x04\x02\0\x3c\0\0",
        b"AMQP\0\0\x09\x01",
        b"\x30\x0c\x02\x01\x01\x60\x07\x02\x01\x03\x04\0\x80\0",
        b"\x03\0\0\x13\x0e\xe0\0\0\0\0\0\x01\0\x08\0\x03\0\0\0",
        b"\x80\0\0\x28abcd",
        b"{\"id\":1}\n",
        b"<stream:stream xmlns:stream='http://etherx.jabber.org/streams'>\n",
        b"\xff\xfd\x18",
        b"example.com\r\n",
    ];
    for sent in firsts {
        assert_eq!(verdict_on(sent), Verdict::ALL, "{}", sent.escape_ascii());
    }
}

#[test]
fn requests_that_a_lenient_server_accepts_are_refused() {
    let firsts: [&[u8]; 42] = [
        b"get / HTTP/1.1\nHost: evil.test\n\n",
        b"GET\t/\tHTTP/1.1\r\nHost: evil.test\r\n\r\n",
        b"GET  / HTTP/1.1\r\nHost: evil.test\r\n\r\n",
        b" GET / HTTP/1.1\r\nHost: evil.test\r\n\r\n",
        b"\tGET / HTTP/1.1\r\nHost: evil.test\r\n\r\n",
        b"\nGET / HTTP/1.1\r\nHost: allowed.example\r\n\r\n",
        b"\x0cGET / HTTP/1.1\r\nHost: evil.test\r\n\r\n",
        b"\xa0GET / HTTP/1.1\r\nHost: evil.test\r\n\r\n",
        b"GET\xa0/ HTTP/1.1\r\nHost: evil.test\r\n\r\n",
        b"GET\x0b/ HTTP/1.1\r\nHost: evil.test\r\n\r\n",
        b"GET /\r\n",
        b"GET /\r\nHost: evil.test\r\n\r\n",
        b"GET foo\r\nHost: evil.test\r\n\r\n",
        b"get http://evil.test/\r\n\r\n",
        b"GET / http/1.1\r\nHost: evil.test\r\n\r\n",
        b"GET / HTTP/1.1 \r\nHost: evil.test\r\n\r\n",
        b"GET / HTTP/1.2\r\nHost: evil.test\r\n\r\n",
        b"GET / HTTP/2.0\r\nHost: evil.test\r\n\r\n",
        b"GET / HTTP/01.1\r\nHost: evil.test\r\n\r\n",
        b"FOO / HTTP/1.1\r\nHost: evil.test\r\n\r\n",
        b"foo bar HTTP/1.1\r\nHost: evil.test\r\n\r\n",
        b"foo bar hTtP/1.1\r\nHost: evil.test\r\n\r\n",
        b"SSH-2.0-x / HTTP/1.1\r\nHost: evil.test\r\n\r\n",
        b"OPTIONS rtsp://evil.test/ RTSP/1.0\r\n\r\n",
        b"CONNECT evil.test:443 HTTP/1.1\r\n\r\n",
        b"connect evil.test:443 HTTP/1.1\r\n\r\n",
        b"CONNECT evil.test:443\r\n\r\n",
        b"PROXY TCP4 1.1.1.1 2.2.2.2 1 2\r\nGET / HTTP/1.1\r\nHost: evil.test\r\n\r\n",
        b"\r\n\r\n\0\r\nQUIT\n\x21\x11\0\x0c\x7f\0\0\x01",
        b"\r\n\r\n\r\n\r\n\r\nGET / HTTP/1.1\r\nHost: allowed.example\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nXX",
        b"PRI * HTTP/1.1\r\nHost: evil.test\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost : allowed.example\r\n\r\n",
        b"*  / HTTP/1.1\r\nHost: evil.test\r\n\r\n",
        b"DESCRIBE * RTSP/1.0\r\nHost: evil.test\r\n\r\n",
        b"SOURCE * ice/1.0\r\nHost: evil.test\r\n\r\n",
        b"\"GET /x HTTP/1.1\r\nHost: evil.test\r\n\r\n",
        b"<GET x HTTP/1.1\r\nHost: evil.test\r\n\r\n",
        b"GET\revil.test \r\nHost: evil.test\r\n\r\n",
        b"foo http+x://evil.test\r\n\r\n",
        b"\x15\x03\x01\0\x02\x01\x5a\x16\x03\x01",
        b"\x17\x03\x03\0\x01\0",
    ];
    for sent in firsts {
        assert!(refused(sent).is_some(), "{}", sent.escape_ascii());
    }
    assert_eq!(refused(firsts[27]), Some(Reason::ProxyProtocol));
}

#[test]
fn a_binary_protocol_is_decided_by_its_first_bytes() {
    for (sent, at_most) in [
        (&b"\x04\0\0\0"[..], 1),
        (b"\x80\0\0\x28abcd", 3),
        (b"\x85\x01\x01\x07", 4),
        (b"AMQP\0", 5),
        (b"\0\0\0\x20", 4),
    ] {
        let mut stream = Stream::new(Expected::new([NAME], 5000));
        let at = sent.iter().position(|byte| stream.read(&[*byte]) == Verdict::ALL);
        assert!(at.is_some_and(|at| at < at_most), "{}", sent.escape_ascii());
    }
}

#[test]
fn a_long_first_line_passes_and_a_sign_far_behind_is_refused() {
    for part in [&b"a"[..], b"a b ", b" ", b"\n"] {
        let long = part.repeat(70_000 / part.len());
        let mut stream = Stream::new(Expected::new([NAME], 80));
        assert_eq!(stream.read(&long), super::all_of(&long));
        assert!(stream.memory_bytes() <= 8192, "{}", stream.memory_bytes());
        let refused = stream.read(b"word word HTTP/1.1\r\nHost: allowed.example\r\n\r\n");
        assert_eq!(super::reason(&refused), Some(Reason::TextTooLong));
        let mut stream = Stream::new(Expected::new([NAME], 80));
        stream.read(&long);
        assert_eq!(stream.read(b"word\n"), Verdict::ALL);
    }
}

#[test]
fn the_end_of_the_stream_ends_a_first_line() {
    for sent in [&b""[..], b"hello", b"hello there", b"\0", b"GET"] {
        let mut stream = Stream::new(Expected::new([NAME], 80));
        assert_eq!(stream.read(sent), Verdict::Pass(sent.len() as u64));
        assert_eq!(stream.end(), Verdict::ALL, "{}", sent.escape_ascii());
    }
    let request = &b"GET / HTTP/1.1\r\nHost: allowed.example\r\n"[..];
    for (sent, passed) in [(request, 3), (b"\x16\x03\x01", 0), (b"GET /", 3)] {
        let mut stream = Stream::new(Expected::new([NAME], 80));
        assert_eq!(stream.read(sent), Verdict::Pass(passed));
        assert_eq!(super::reason(&stream.end()), Some(Reason::Cut), "{}", sent.escape_ascii());
    }
}

#[test]
fn a_host_that_speaks_first_has_a_protocol_without_a_name() {
    for greeting in [&b"220 mail"[..], b"SSH-2.0-x\r\n", b"J\0\0\0\x0a8.0", b"Hello", b"\0\0\0\x07"]
    {
        let mut stream = Stream::new(Expected::new([NAME], 25));
        let verdicts: Vec<_> = greeting.iter().map(|byte| stream.answered(&[*byte])).collect();
        assert_eq!(verdicts.last(), Some(&Verdict::ALL), "{}", greeting.escape_ascii());
        assert_eq!(stream.read(b"GET / HTTP/1.1\r\nHost: evil.test\r\n\r\n"), Verdict::ALL);
    }
}

#[test]
fn a_web_server_that_speaks_first_is_still_one() {
    for greeting in [
        &b"HTTP/1.1 408 Request Timeout\r\n\r\n"[..],
        b"HTT",
        b"\0\0\x12\x04\0\0\0\0\0\0\x03",
        b"\0\0",
        b"",
    ] {
        let mut stream = Stream::new(Expected::new([NAME], 80));
        assert!(stream.wants_answers());
        assert_eq!(stream.answered(greeting), Verdict::Pass(0));
        let refused = stream.read(b"GET / HTTP/1.1\r\nHost: evil.test\r\n\r\n");
        assert_eq!(super::reason(&refused), Some(Reason::HttpOtherHost));
    }
    // The guest was first.
    let mut stream = Stream::new(Expected::new([NAME], 80));
    stream.read(b"G");
    assert!(!stream.wants_answers());
    assert_eq!(stream.answered(b"220 mail"), Verdict::Pass(1));
}

#[test]
fn one_of_several_names_is_enough_and_a_protocol_without_a_name_is_not_where_others_share_the_address()
 {
    let expected = || Expected::new([NAME, "other.example."], 80).shared(true);
    for host in [NAME, "other.example", "OTHER.example:80"] {
        let request = format!("GET / HTTP/1.1\r\nHost: {host}\r\n\r\n");
        let verdict = Stream::new(expected()).read(request.as_bytes());
        assert_eq!(verdict, super::all_of(request.as_bytes()), "{host}");
    }
    let evil = b"GET / HTTP/1.1\r\nHost: evil.test\r\n\r\n";
    let refused = Stream::new(expected()).read(evil);
    assert_eq!(super::reason(&refused), Some(Reason::HttpOtherHost));
    for opaque in [&b"SSH-2.0-x\r\n"[..], b"\0\0\0\x01\x02\x03"] {
        let refused = Stream::new(expected()).read(opaque);
        assert_eq!(super::reason(&refused), Some(Reason::NoName), "{}", opaque.escape_ascii());
    }
    let mut greeted = Stream::new(expected());
    assert_eq!(super::reason(&greeted.answered(b"220 mail")), Some(Reason::NoName));
    let mut ended = Stream::new(expected());
    assert_eq!(super::reason(&ended.end()), Some(Reason::NoName));
}
