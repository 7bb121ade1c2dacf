//! Which protocol the guest's first bytes begin.
//!
//! ```text
//!   0x14..0x18, 3                         ──► TLS, whose reader refuses all but 0x16
//!   0x80.. length 0x01 version            ──► SSL 2: refused
//!   00 00 00 08 04 d2 16 2f|30            ──► passes; PostgreSQL asked for TLS, and what follows is sniffed anew
//!   PRI * HTTP/2.0                        ──► HTTP/2
//!   word blank, then a sign of a request  ──► HTTP/1, whose reader is strict
//!   PROXY ..., and its binary form        ──► refused
//!   anything else                         ──► opaque
//! ```
//!
//! A request that a lenient server would accept must not pass as unknown text. So a first line is text until it ends, and
//! these are signs of a request: the methods of RFC 9110 in upper case before a blank; a target that begins with `/` or
//! has `scheme://`; `HTTP/`, `RTSP/` or `ICE/` in any case anywhere in the line. A blank is any byte that some server takes
//! for one, also in front of the line. Without a sign the line is not a request for any server known to us: a method
//! alone is none, a target without `/` needs a version. A first word may have any byte but control characters, since
//! some servers take it for a method.
//!
//! What has no sign yet passes: a server that answers a word without an end of line has to see it, and the begin of a
//! request is none. The byte that completes a sign is held with all that follows.

use super::reason::{Reason, Refusal};
use super::{State, Then, http1, http2, tls};

/// Most bytes of a first line, with what precedes it, that are kept for the reader of requests. A request whose first sign
/// comes later is refused.
const MOST_KEPT_BYTES: usize = 4096;
/// Bytes that are kept of a longer line: the longest sign.
const LAST_BYTES: usize = 5;
/// The PROXY protocol says who the client is. A guest is not the one to say it, and a request follows.
const PROXY_1: &[u8] = b"PROXY ";
/// The signature of its version 2 begins like empty lines before a request.
const PROXY_2: &[u8] = b"\r\n\r\n\0";
/// The bytes by which SSL 2 is recognized.
const SSL2_BYTES: usize = 5;
/// What llhttp takes for a version, up to its number.
const VERSIONS: [&[u8]; 3] = [b"HTTP/", b"RTSP/", b"ICE/"];
const METHODS: [&[u8]; 9] =
    [b"GET", b"HEAD", b"POST", b"PUT", b"DELETE", b"CONNECT", b"OPTIONS", b"TRACE", b"PATCH"];
/// PostgreSQL's SSLRequest and GSSENCRequest, but for the last byte.
const POSTGRES: &[u8; 7] = &[0, 0, 0, 8, 0x04, 0xd2, 0x16];
const POSTGRES_LAST: [u8; 2] = [0x2f, 0x30];

/// Where in the first line.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    /// In blanks and line ends before it.
    Before,
    /// In the first word.
    Word,
    /// Behind a method and a carriage return.
    MethodAndReturn,
    /// Between the first word and the second.
    Gap,
    /// In the second word.
    Target,
    Rest,
}

/// What the bytes are.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Tls,
    Request,
    Opaque,
    /// PostgreSQL's question whether the server has TLS.
    AsksForTls,
}

/// Reads the first bytes.
pub(super) struct Sniff {
    held: Vec<u8>,
    place: Place,
    /// Where the word of the place begins.
    word_at: usize,
    /// It is not a line of text. It may be SSL 2, or PostgreSQL's question.
    is_no_text: bool,
    /// The line is longer than what is kept.
    is_long: bool,
    /// PostgreSQL's questions that came before.
    questions: u8,
}

impl Sniff {
    pub(super) fn new() -> Self {
        Sniff::behind(0)
    }

    /// Behind questions of PostgreSQL.
    fn behind(questions: u8) -> Self {
        Sniff {
            held: Vec::new(),
            place: Place::Before,
            word_at: 0,
            is_no_text: false,
            is_long: false,
            questions,
        }
    }

    pub(super) fn read(&mut self, bytes: &[u8]) -> Result<(usize, Then), Refusal> {
        for (at, byte) in bytes.iter().enumerate() {
            self.held.push(*byte);
            if let Some(kind) = self.decide(*byte)? {
                if self.is_long && kind != Kind::Opaque {
                    return Err(Reason::TextTooLong.into());
                }
                return Ok((at + 1, self.become_reader(kind)));
            }
            if self.held.len() >= MOST_KEPT_BYTES {
                self.forget_most();
            }
        }
        Ok((bytes.len(), Then::Pass))
    }

    /// Keeps what a sign may need.
    fn forget_most(&mut self) {
        self.is_long = true;
        self.word_at = self.held.len() - self.held.len().min(LAST_BYTES);
        self.held.drain(..self.word_at);
        self.word_at = 0;
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.held.capacity()
    }

    fn become_reader(&mut self, kind: Kind) -> Then {
        let held = std::mem::take(&mut self.held);
        let state = match kind {
            Kind::Tls => State::Tls(tls::Reader::behind(self.questions)),
            Kind::Request if http2::PREFACE.starts_with(&held) => {
                State::Http2(Box::new(http2::Reader::new()))
            }
            Kind::Request => State::Http1(Box::new(http1::Reader::new())),
            Kind::Opaque => State::Opaque,
            Kind::AsksForTls => {
                let next = Sniff::behind(self.questions.saturating_add(1));
                return Then::Become(State::First(next), Vec::new());
            }
        };
        Then::Become(state, held)
    }

    /// Decides after one more byte, which is the last of those held.
    fn decide(&mut self, byte: u8) -> Result<Option<Kind>, Refusal> {
        if self.is_long {
            return Ok(self.text(byte));
        }
        match *self.held {
            [tls::HANDSHAKE, ..] => return Ok(Some(Kind::Tls)),
            [0x14..=0x18] => return Ok(None),
            // An alert or the like in front of a ClientHello, which some servers skip.
            [0x14..=0x18, 3] => return Ok(Some(Kind::Tls)),
            _ => {}
        }
        if let Some(is_whole) = self.asks_for_tls() {
            self.is_no_text = true;
            return Ok(is_whole.then_some(Kind::AsksForTls));
        }
        if is_ssl2(&self.held) {
            return Err(Reason::TlsSsl2.into());
        }
        if self.held.starts_with(PROXY_1) {
            return Err(Reason::ProxyProtocol.into());
        }
        let kind = if self.is_no_text { Some(Kind::Opaque) } else { self.text(byte) };
        if kind != Some(Kind::Opaque) {
            return Ok(kind);
        }
        if self.held.starts_with(PROXY_2) {
            return Err(Reason::ProxyProtocol.into());
        }
        self.is_no_text = true;
        let is_undecided = self.held.len() < SSL2_BYTES && may_be_ssl2(&self.held);
        Ok((!is_undecided).then_some(Kind::Opaque))
    }

    /// PostgreSQL's question: true when it is whole, false while it may become it.
    fn asks_for_tls(&self) -> Option<bool> {
        match self.held.strip_prefix(POSTGRES) {
            Some(last) => match last.first() {
                None => Some(false),
                Some(last) => POSTGRES_LAST.contains(last).then_some(true),
            },
            None => POSTGRES.starts_with(&self.held).then_some(false),
        }
    }

    /// Reads one more byte of the first line.
    fn text(&mut self, byte: u8) -> Option<Kind> {
        match self.place {
            Place::Before if is_blank(byte) || byte == b'\n' => {}
            Place::Before if byte.is_ascii_control() => return Some(Kind::Opaque),
            Place::Before => self.enter(Place::Word),
            _ if byte == b'\n' => return Some(Kind::Opaque),
            // `CONNECT` and an end of line begin STOMP.
            Place::MethodAndReturn => return Some(Kind::Request),
            Place::Word if is_blank(byte) => {
                let is_method = self.word_is_method();
                if is_method && byte != b'\r' {
                    return Some(Kind::Request);
                }
                self.place = if is_method { Place::MethodAndReturn } else { Place::Gap };
            }
            Place::Word if byte.is_ascii_control() => return Some(Kind::Opaque),
            Place::Word => {}
            Place::Gap if is_blank(byte) => {}
            Place::Gap if byte == b'/' => return Some(Kind::Request),
            // No target begins with a control character. LDAP begins with `0`, a length that may be a blank, and 2.
            Place::Gap if byte.is_ascii_control() => return Some(Kind::Opaque),
            Place::Gap => self.enter(Place::Target),
            Place::Target if is_blank(byte) => self.place = Place::Rest,
            Place::Target | Place::Rest => {}
        }
        let is_line = matches!(self.place, Place::Target | Place::Rest);
        (is_line && self.ends_with_sign()).then_some(Kind::Request)
    }

    fn enter(&mut self, place: Place) {
        self.place = place;
        self.word_at = self.held.len().saturating_sub(1);
    }

    fn word_is_method(&self) -> bool {
        let end = self.held.len().saturating_sub(1);
        let word = self.held.get(self.word_at..end).unwrap_or_default();
        METHODS.contains(&word)
    }

    fn ends_with_sign(&self) -> bool {
        let ends_with = |sign: &[u8]| {
            let at = self.held.len().checked_sub(sign.len());
            at.and_then(|at| self.held.get(at..)).is_some_and(|end| end.eq_ignore_ascii_case(sign))
        };
        if VERSIONS.iter().any(|version| ends_with(version)) {
            return true;
        }
        let scheme = self.held.get(self.word_at..).and_then(|word| word.strip_suffix(b"://"));
        let is_of_scheme = |b: &u8| b.is_ascii_alphanumeric() || b"+-.".contains(b);
        self.place == Place::Target
            && scheme.is_some_and(|scheme| self.is_long || scheme.iter().all(is_of_scheme))
    }
}

/// Whether a ClientHello in the format of SSL 2 (RFC 5246 appendix E.2) may begin so: a length, the type, a version.
fn may_be_ssl2(bytes: &[u8]) -> bool {
    let is = |at: usize, fits: fn(u8) -> bool| bytes.get(at).is_none_or(|byte| fits(*byte));
    is(0, |b| b & 0x80 != 0) && is(2, |b| b == 1) && is(3, |b| b == 0 || b == 3)
}

/// Whether one has begun.
fn is_ssl2(bytes: &[u8]) -> bool {
    let Some([_, _, _, major, minor]) = bytes.first_chunk::<SSL2_BYTES>() else { return false };
    may_be_ssl2(bytes) && (*major == 3 && *minor <= 4 || *major == 0 && *minor == 2)
}

/// What some server takes for a blank: Python's `split` takes all of these.
fn is_blank(byte: u8) -> bool {
    matches!(byte, b'\t' | 0x0b | 0x0c | b'\r' | b' ' | 0x1c..=0x1f | 0x85 | 0xa0)
}
