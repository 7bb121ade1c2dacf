//! HTTP/1 (RFC 9112): every request of a connection.
//!
//! ```text
//!   guest ──► head ──► checked ──► body ──► head ──► ...
//!                          │
//!                          └─ the first request has Upgrade ──► body ──► waits ──► the host answered 101 ──► opaque, HTTP/2
//!                                                                         └─ another answer ──► head ──► ...
//! ```
//!
//! httparse reads the fields. What it tolerates and servers read differently is refused before it: line feeds and
//! carriage returns alone, control characters, continued lines, many empty lines before a request. The length of a body
//! must be certain (RFC 9112 section 6.3), since otherwise a part of a body is a request for the server: one
//! Content-Length, or the one transfer coding `chunked`, without chunk extensions.
//!
//! Only the first request of a connection changes the protocol. A later one with Upgrade passes, and what follows it is
//! read as HTTP/1: if the host switches, the guest's next bytes are refused, unless they are a request all the same.

use super::answer::{Answer, Answered};
use super::body::{Body, Chunks, Progress};
use super::lines::{Lines, MOST_FIELDS};
use super::reason::{Reason, Refusal};
use super::sniff::Sniff;
use super::{Expected, State, Then, http2};

/// Most bytes of a head.
const MOST_HEAD_BYTES: usize = 65_536;
/// Most bytes that wait for the answer to an Upgrade.
const MOST_WAITING_BYTES: usize = 65_536;

/// Where in a request.
enum At {
    Head,
    Length(u64),
    Chunks(Box<Chunks>),
    /// The host has to answer an Upgrade.
    Waiting,
}

/// Reads the guest's requests.
pub(super) struct Reader {
    at: At,
    head: Lines,
    is_first: bool,
    /// The answer to an Upgrade, while it is awaited.
    answer: Option<Answer>,
    waiting: Vec<u8>,
}

impl Reader {
    pub(super) fn new() -> Self {
        Reader {
            at: At::Head,
            head: Lines::of_request(),
            is_first: true,
            answer: None,
            waiting: Vec::new(),
        }
    }

    pub(super) fn read(
        &mut self,
        expected: &Expected,
        bytes: &[u8],
    ) -> Result<(usize, Then), Refusal> {
        let (n, progress) = match &mut self.at {
            At::Head => return self.read_head(expected, bytes),
            At::Length(left) => {
                let n = usize::try_from(*left).unwrap_or(usize::MAX).min(bytes.len());
                *left -= n as u64;
                (n, if *left == 0 { Progress::End } else { Progress::Within })
            }
            At::Chunks(chunks) => chunks.read(bytes)?,
            At::Waiting => {
                self.waiting.extend_from_slice(bytes);
                if self.waiting.len() > MOST_WAITING_BYTES {
                    return Err(Reason::HttpBeforeAnswer.into());
                }
                return Ok((bytes.len(), Then::Hold));
            }
        };
        match progress {
            Progress::Trailers => return Ok((n, Then::Hold)),
            Progress::Within => {}
            Progress::End => self.begin_next(),
        }
        Ok((n, Then::Pass))
    }

    /// Passes over the rest of a body whose length is known. Returns the length of the rest.
    pub(super) fn pass_body(&mut self) -> u64 {
        let At::Length(left) = self.at else { return 0 };
        if self.wants_answer() {
            return 0;
        }
        self.begin_next();
        left
    }

    /// The request is over.
    fn begin_next(&mut self) {
        self.at = if self.answer.is_some() { At::Waiting } else { At::Head };
    }

    fn read_head(&mut self, expected: &Expected, bytes: &[u8]) -> Result<(usize, Then), Refusal> {
        let (n, is_end) = self.head.read(bytes, MOST_HEAD_BYTES)?;
        if !is_end {
            return Ok((n, Then::Hold));
        }
        if self.head.is_empty_line() {
            self.head.drop_empty_line()?;
            return Ok((n, Then::Hold));
        }
        let request = check(expected, &self.head.held)?;
        self.head = Lines::of_request();
        if self.is_first && request.has_upgrade {
            self.answer = Some(Answer::default());
        }
        self.is_first = false;
        match request.body {
            Body::None => self.begin_next(),
            Body::Length(n) => self.at = At::Length(n),
            Body::Chunked => self.at = At::Chunks(Box::default()),
        }
        Ok((n, Then::Pass))
    }

    pub(super) fn memory_bytes(&self) -> usize {
        let answer = self.answer.as_ref().map_or(0, Answer::memory_bytes);
        let trailers = match &self.at {
            At::Chunks(chunks) => chunks.memory_bytes(),
            At::Head | At::Length(_) | At::Waiting => 0,
        };
        self.head.held.capacity() + self.waiting.capacity() + answer + trailers
    }

    /// Whether the host's answer has to be read.
    pub(super) fn wants_answer(&self) -> bool {
        self.answer.is_some()
    }

    /// Reads the host's bytes while an Upgrade waits. `None`: the answer is not whole.
    pub(super) fn answered(&mut self, bytes: &[u8]) -> Option<Then> {
        let answered = self.answer.as_mut()?.read(bytes)?;
        self.answer = None;
        // A body that the guest still sends belongs to the request.
        let is_over = matches!(self.at, At::Waiting);
        let waiting = std::mem::take(&mut self.waiting);
        let next = match answered {
            Answered::Http2 => State::Http2(Box::new(http2::Reader::new())),
            Answered::Tls => State::First(Sniff::new()),
            Answered::Other => State::Opaque,
            Answered::Refused if is_over => {
                self.at = At::Head;
                return Some(Then::Again(waiting));
            }
            Answered::Refused => return Some(Then::Hold),
        };
        // An answer before the end of the body leaves open what the host takes the body for: the guest goes on with
        // HTTP/1.
        Some(if is_over { Then::Become(next, waiting) } else { Then::Hold })
    }
}

/// A request whose host is the expected one.
struct Request {
    body: Body,
    has_upgrade: bool,
}

fn check(expected: &Expected, head: &[u8]) -> Result<Request, Refusal> {
    let mut fields = [httparse::EMPTY_HEADER; MOST_FIELDS];
    let mut request = httparse::Request::new(&mut fields);
    match request.parse(head) {
        Ok(httparse::Status::Complete(n)) if n == head.len() => {}
        Err(httparse::Error::TooManyHeaders) => return Err(Reason::HttpTooLong.into()),
        _ => return Err(Reason::HttpUnreadable.into()),
    }
    let (Some(method), Some(target), Some(minor)) = (request.method, request.path, request.version)
    else {
        return Err(Reason::HttpUnreadable.into());
    };
    if method.eq_ignore_ascii_case("CONNECT") {
        return Err(Refusal::with_name(Reason::HttpConnect, target.as_bytes()));
    }
    check_target(expected, method, target)?;
    check_host(expected, request.headers, minor)?;
    let body = Body::of(request.headers, minor)?;
    let has_upgrade = request.headers.iter().any(|f| f.name.eq_ignore_ascii_case("upgrade"));
    Ok(Request { body, has_upgrade })
}

/// The request target is a path, `*`, or has the expected host (RFC 9112 section 3.2).
fn check_target(expected: &Expected, method: &str, target: &str) -> Result<(), Refusal> {
    if target.starts_with('/') || target == "*" && method == "OPTIONS" {
        return Ok(());
    }
    let after = |scheme: &str| {
        let (front, rest) = target.split_at_checked(scheme.len())?;
        front.eq_ignore_ascii_case(scheme).then_some(rest)
    };
    let rest = after("http://").or_else(|| after("https://")).ok_or(Reason::HttpUnreadable)?;
    let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
    if !expected.is_authority(authority.as_bytes()) {
        return Err(Refusal::with_name(Reason::HttpOtherHost, authority.as_bytes()));
    }
    Ok(())
}

fn check_host(
    expected: &Expected,
    fields: &[httparse::Header<'_>],
    minor: u8,
) -> Result<(), Refusal> {
    let mut hosts = fields.iter().filter(|f| f.name.eq_ignore_ascii_case("host"));
    let host = match (hosts.next(), hosts.next()) {
        (Some(host), None) => host.value,
        // Nothing contradicts the address (RFC 9112 section 3.2: HTTP/1.1 needs the header).
        (None, _) if minor == 0 => return Ok(()),
        (None, _) => return Err(Reason::HttpNoHost.into()),
        (Some(_), Some(_)) => return Err(Reason::HttpManyHosts.into()),
    };
    if !expected.is_authority(host.trim_ascii()) {
        return Err(Refusal::with_name(Reason::HttpOtherHost, host));
    }
    Ok(())
}
