//! The verdict does not depend on the cut of the stream.

use proptest::prelude::*;

use super::fixtures::{self, bytes};
use super::{NAME, http2, tls};
use crate::first::{Expected, Stream, Verdict};

/// The verdict after all of the bytes, in pieces that end at these places.
fn in_pieces(bytes: &[u8], cuts: impl IntoIterator<Item = usize>) -> Verdict {
    let mut stream = Stream::new(Expected::new([NAME], 80));
    let mut from = 0;
    let mut last = Verdict::Pass(0);
    for cut in cuts.into_iter().chain([bytes.len()]) {
        let cut = cut.clamp(from, bytes.len());
        let next = stream.read(&bytes[from..cut]);
        if let (Verdict::Pass(before), Verdict::Pass(after)) = (&last, &next) {
            assert!(before <= after, "the number fell");
        }
        (last, from) = (next, cut);
    }
    last
}

/// The same, but the rests of bodies are not read.
fn past_bodies(bytes: &[u8], cuts: impl IntoIterator<Item = usize>) -> Verdict {
    let mut stream = Stream::new(Expected::new([NAME], 80));
    let (mut from, mut last) = (0, Verdict::Pass(0));
    for cut in cuts.into_iter().chain([bytes.len()]) {
        while from < cut.min(bytes.len()) {
            last = stream.read(&bytes[from..cut.min(bytes.len())]);
            from = cut.min(bytes.len());
            let body = stream.pass_body();
            if body > 0 {
                from = bytes.len().min(from.saturating_add(body as usize));
                last = Verdict::Pass(from as u64);
            }
        }
    }
    last
}

/// A verdict on these bytes alone.
fn within(verdict: Verdict, bytes: &[u8]) -> Verdict {
    match verdict {
        Verdict::Pass(to) => Verdict::Pass(to.min(bytes.len() as u64)),
        refused => refused,
    }
}

fn assert_same(bytes: &[u8], cuts: &[usize]) {
    let at_once = in_pieces(bytes, []);
    for cuts in [cuts.to_vec(), (0..bytes.len()).collect()] {
        let seen = within(past_bodies(bytes, cuts), bytes);
        assert_eq!(seen, within(at_once.clone(), bytes), "{}", bytes.escape_ascii());
    }
    assert_eq!(in_pieces(bytes, cuts.iter().copied()), at_once, "{}", bytes.escape_ascii());
    assert_eq!(in_pieces(bytes, 0..bytes.len()), at_once, "{}", bytes.escape_ascii());
}

/// Streams that get far into the readers.
fn seeds() -> Vec<Vec<u8>> {
    let get = b"GET / HTTP/1.1\r\nHost: allowed.example\r\n\r\n".to_vec();
    let chunked = b"POST / HTTP/1.1\r\nHost: allowed.example\r\nTransfer-Encoding: chunked\r\n\r\n\
        5\r\nhello\r\n0\r\nX: y\r\n\r\n";
    let length = b"POST / HTTP/1.1\r\nContent-Length: 5\r\nHost: allowed.example\r\n\r\nhello";
    let early = tls::hello(&[(42, vec![]), (0, tls::list(0, NAME.as_bytes()))]);
    let hello = tls::record(22, &early);
    vec![
        bytes(fixtures::CURL),
        bytes(fixtures::OPENSSL_TLS12),
        [hello.clone(), tls::record(20, &[1]), tls::record(23, &[2; 30]), hello].concat(),
        [&chunked[..], &get, &length[..], &get].concat(),
        [&b"\r\n"[..], &length[..], &chunked[..]].concat(),
        http2::connection(&http2::request(NAME)),
        [b"\0\0\0\x08\x04\xd2\x16\x2f".to_vec(), bytes(fixtures::CURL)].concat(),
        b"SSH-2.0-OpenSSH_9.2p1 Debian\r\n\0\0\0\x01".to_vec(),
        b"\x80\x2e\x01\x03\x01".to_vec(),
    ]
}

#[test]
fn the_seeds_pass_or_are_refused_in_any_two_pieces() {
    for seed in seeds() {
        for cut in 0..=seed.len() {
            assert_same(&seed[..cut], &[cut / 2]);
            assert_same(&seed, &[cut]);
        }
    }
}

/// The letters of the readers' decisions.
fn any_text() -> impl Strategy<Value = Vec<u8>> {
    let part = prop_oneof![
        prop::sample::select(vec![
            "GET",
            "get",
            "POST",
            " ",
            "\t",
            "/",
            "*",
            "HTTP/1.1",
            "HTTP/1.0",
            "\r\n",
            "\n",
            "\r",
            "Host: allowed.example",
            "Host: evil.test",
            "host:",
            "allowed.example",
            ":80",
            "://",
            "Content-Length: 3",
            "Transfer-Encoding: chunked",
            "0\r\n",
            "3\r\nabc\r\n",
            "\0",
            "\u{16}",
            "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            "PROXY ",
            "Upgrade: websocket",
            "x",
        ])
        .prop_map(|text| text.as_bytes().to_vec()),
        prop::collection::vec(any::<u8>(), 0..3),
    ];
    prop::collection::vec(part, 0..24).prop_map(|parts| parts.concat())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn texts_have_one_verdict(text in any_text(), cuts in prop::collection::vec(0..300_usize, 0..6)) {
        let mut cuts = cuts;
        cuts.sort_unstable();
        assert_same(&text, &cuts);
    }

    #[test]
    fn streams_with_changed_bytes_have_one_verdict(
        nth in 0..9_usize,
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
        cuts in prop::collection::vec(0..700_usize, 0..6),
    ) {
        let mut stream = seeds().swap_remove(nth);
        for (at, byte) in changes {
            let at = at.index(stream.len());
            stream[at] = byte;
        }
        let mut cuts = cuts;
        cuts.sort_unstable();
        assert_same(&stream, &cuts);
    }

    /// The oracle: where a request passes, a plain reading of its lines finds the name and no other.
    #[test]
    fn a_request_that_passes_has_the_name(text in any_text()) {
        let stream = [b"GET / HTTP/1.1\r\n".to_vec(), text].concat();
        let Verdict::Pass(passed) = in_pieces(&stream, []) else { return Ok(()) };
        let Some(end) = stream.windows(4).position(|w| w == b"\r\n\r\n") else { return Ok(()) };
        // The method has passed before it was known as one.
        if passed <= 3 {
            return Ok(());
        }
        let head = String::from_utf8_lossy(&stream[..end]).to_lowercase();
        prop_assert!(head.contains("host: allowed.example") || head.contains("host:allowed.example"));
        prop_assert!(!head.contains("evil.test"));
    }
}
