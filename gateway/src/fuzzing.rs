//! The readers of hostile messages that no public item reaches, for the fuzzers.

use crate::names::messages::{Reply, half_of, question, reply, reversed};
use crate::names::pins::Half;
use crate::pesto;
use crate::relay::dns::message;
use crate::upstream::{Handshake, Kind, Target, Upstream};

/// Reads bytes as a guest's DNS question and as a server's answer.
///
/// # Panics
/// A property is broken.
pub fn dns(bytes: &[u8]) {
    let asked = message::parse_question(bytes);
    for code in [message::Code::REFUSED, message::Code::FORMAT_ERROR] {
        if let Some(answer) = message::answer_with(code, bytes) {
            assert!(message::is_response(&answer) && message::id(&answer) == message::id(bytes));
        }
    }
    if let Some(question) = message::question(bytes) {
        assert!(question.end <= bytes.len());
        let _ = message::addresses(bytes, &question);
    }
    for is_v4 in [true, false] {
        if let Half::Addresses(list, _) = half_of(bytes, is_v4) {
            assert!(!list.is_empty() && list.len() <= 32);
        }
    }
    if let Ok(asked) = asked {
        own_question(&asked.name);
        let _ = reversed(&asked.name);
        replies(bytes, &asked);
    }
}

/// The gateway asks for the name that the policy has seen.
fn own_question(name: &str) {
    for is_v4 in [true, false] {
        if let Some(own) = question(name, is_v4) {
            let read = message::parse_question(&own).expect("a question");
            assert_eq!(read.name, name);
        }
    }
}

fn replies(bytes: &[u8], asked: &message::Question) {
    let address = [198, 18, 0, 2].into();
    let name = Reply::Name("www.example.org".into(), 60);
    for with in [Reply::Address(address, 60), name, Reply::Nothing, Reply::NoName, Reply::Blocked] {
        let has_address = with == Reply::Address(address, 60);
        let Some(answer) = reply(bytes, with) else { continue };
        assert!(message::is_response(&answer) && message::id(&answer) == message::id(bytes));
        let read = message::question(&answer).expect("a question");
        assert_eq!((&read.name, read.kind), (&asked.name, asked.kind));
        if has_address && asked.kind == message::TYPE_A && asked.class == message::CLASS_IN {
            assert_eq!(message::addresses(&answer, &read), [address]);
        }
    }
}

/// Reads bytes as the answers of a proxy, in pieces of any length.
///
/// # Panics
/// A property is broken.
pub fn proxy(bytes: &[u8]) {
    let Some((options, bytes)) = bytes.split_first() else { return };
    let kind = if options & 1 == 0 { Kind::Http } else { Kind::Socks5 };
    let credentials = (options & 2 != 0).then(|| ("me".to_owned(), "pw".to_owned()));
    let upstream = Upstream { kind, address: ([127, 0, 0, 1], 1).into(), credentials };
    let (mut handshake, _) = Handshake::begin(&upstream, Target::Name("example.org".into(), 443));
    let mut held = Vec::new();
    for piece in bytes.chunks(usize::from(options >> 2) + 1) {
        held.extend_from_slice(piece);
        let (consumed, _) = handshake.read(&held);
        assert!(consumed <= held.len());
        held.drain(..consumed);
    }
}

/// Reads bytes as a message of pesto(1).
///
/// # Panics
/// A property is broken.
pub fn pesto(bytes: &[u8]) {
    if let Ok(read) = pesto::read(bytes) {
        let Some(tables) = read else {
            assert!(bytes.len() < pesto::MOST_BYTES, "it waits for more than a message can have");
            return;
        };
        let (host, guest) = (tables.host.len(), tables.guest.len());
        assert!(host.max(guest) <= pesto::MOST_RULES);
        assert!(
            tables.host.iter().flat_map(|rule| rule.forwards()).all(|f| f.from > 0 && f.to > 0)
        );
        assert_eq!(pesto::read(&pesto::update(&tables)), Ok(Some(tables)));
    }
}
