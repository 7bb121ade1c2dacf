//! The first bytes of a guest's connection may not contradict its address.
//!
//! An address that the gateway gives for a name means that name. A server at its real address may serve a thousand others,
//! and the guest chooses among them by what it sends. So these engines read what the guest sends first, and hold it until
//! it is known to ask for the name of the address. They do no I/O and read no clock.
//!
//! ```text
//!   guest ──► Stream::read ──► Pass(n): the first n bytes of the stream may go to the host
//!                              Refuse(why): the connection ends
//!   host ───► Stream::answered, while `wants_answers`
//!
//!   guest ──► Datagrams::read ──► Pass, Hold, Refuse
//! ```
//!
//! | first bytes | read | the name |
//! |---|---|---|
//! | TLS over TCP | ClientHello, and a second one if the host asks for it (`tls`) | the one server name; without it refused |
//! | PostgreSQL's question for TLS | passes, then as TLS | |
//! | HTTP/1 | every request (`http1`) | Host, and the target's authority |
//! | HTTP/1 with Upgrade | until the host has answered (`answer`) | |
//! | HTTP/2 in the clear | every header list (`http2`) | `:authority` and `host` |
//! | QUIC | the ClientHello of every connection (`datagrams`) | as TLS |
//! | the host's, before any of the guest's | not | an SSH, mail or MySQL server speaks first |
//! | anything else (`sniff`) | not | passes by its address |
//!
//! What is not read: the inside of TLS and QUIC (a request there may name another host than the ClientHello, which is
//! called domain fronting), TLS that begins within a protocol other than PostgreSQL's and HTTP's (STARTTLS), DTLS, and
//! names in protocols that are not listed (XMPP, SIP, git's own).
//!
//! An encrypted ClientHello looks like the imitation of one (GREASE) that Chrome and Firefox send by default, and its inner
//! name may be any name of the same operator. It is refused, unless [`EncryptedHello::Pass`] is set: then the
//! outer name counts, and the address is exact only for hosts without encrypted ClientHello.
//!
//! Bounds of a connection: a first line, head, header block, or ClientHello of 64 KiB is held here, and as much in the
//! caller's hands; work is linear in the bytes, whatever their cut.

#![cfg_attr(not(test), deny(clippy::indexing_slicing))]

mod answer;
mod body;
mod datagrams;
mod hello;
mod hpack;
mod http1;
mod http2;
mod huffman;
mod lines;
mod quic;
mod reason;
mod server_hello;
mod sniff;
mod tls;
mod walk;

pub use datagrams::{Datagrams, Decision, MOST_HELD, MOST_HELD_BYTES};
pub use reason::{Reason, Refusal};

use sniff::Sniff;

/// What an encrypted ClientHello is (RFC 9849).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum EncryptedHello {
    /// Refused.
    #[default]
    Refuse,
    /// The name outside the encrypted part counts.
    Pass,
}

/// What may be asked for at the address.
#[derive(Clone, Debug)]
pub struct Expected {
    names: Vec<Box<[u8]>>,
    port: u16,
    encrypted_hello: EncryptedHello,
    is_shared: bool,
}

impl Expected {
    /// One of these names, at this port.
    pub fn new<'a>(names: impl IntoIterator<Item = &'a str>, port: u16) -> Self {
        let name = |name: &'a str| name.strip_suffix('.').unwrap_or(name).as_bytes().into();
        let names = names.into_iter().map(name).collect();
        Expected { names, port, encrypted_hello: EncryptedHello::default(), is_shared: false }
    }

    /// What a ClientHello with an encrypted part is. By default it is refused.
    pub fn with_encrypted_hello(mut self, encrypted_hello: EncryptedHello) -> Self {
        self.encrypted_hello = encrypted_hello;
        self
    }

    /// Whether other names have the address, too: then a protocol that carries no name is refused. By default it passes.
    pub fn shared(mut self, is_shared: bool) -> Self {
        self.is_shared = is_shared;
        self
    }

    fn is_name(&self, name: &[u8]) -> bool {
        !name.is_empty() && self.names.iter().any(|own| own.eq_ignore_ascii_case(name))
    }

    /// Whether it is one of the names, alone or with the port.
    fn is_authority(&self, authority: &[u8]) -> bool {
        self.names.iter().any(|own| {
            let Some((name, rest)) = authority.split_at_checked(own.len()) else { return false };
            let port = rest.split_first();
            let is_port = port.is_none_or(|(colon, port)| *colon == b':' && self.is_port(port));
            !name.is_empty() && own.eq_ignore_ascii_case(name) && is_port
        })
    }

    fn is_port(&self, digits: &[u8]) -> bool {
        let is_canonical = digits.iter().all(u8::is_ascii_digit) && digits.first() != Some(&b'0');
        let text = std::str::from_utf8(digits).unwrap_or_default();
        is_canonical && text.parse() == Ok(self.port)
    }
}

/// What the guest's bytes are so far.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums, reason = "a caller has to handle each answer")]
pub enum Verdict {
    /// The number of bytes from the begin of the stream that may go to the host, as far as they have come. It never falls;
    /// [`Verdict::ALL`] is all that will ever come.
    Pass(u64),
    /// The connection ends. Bytes that were not passed before never go to the host.
    Refuse(Refusal),
}

impl Verdict {
    /// The stream needs no reading any more.
    pub const ALL: Verdict = Verdict::Pass(u64::MAX);
}

/// What reads the stream now.
enum State {
    First(Sniff),
    Tls(tls::Reader),
    Http1(Box<http1::Reader>),
    Http2(Box<http2::Reader>),
    /// Nothing.
    Opaque,
    Refused(Refusal),
}

/// What a reader says after it took bytes.
enum Then {
    /// They wait.
    Hold,
    /// They and all before them pass.
    Pass,
    /// Another reader goes on, which reads these last bytes again.
    Become(State, Vec<u8>),
    /// The reader goes on, and reads these last bytes again.
    Again(Vec<u8>),
}

impl Then {
    fn opaque() -> Self {
        Then::Become(State::Opaque, Vec::new())
    }
}

/// The reader of one connection's bytes from the guest to the host.
pub struct Stream {
    expected: Expected,
    state: State,
    read: u64,
    pass: u64,
    host: HostBefore,
    has_ended: bool,
}

/// What the host sent before any byte of the guest.
struct HostBefore {
    bytes: Vec<u8>,
    /// The guest has sent a byte, or the host's bytes do not show a protocol that is read.
    is_over: bool,
}

impl Stream {
    /// For a connection that may ask for this.
    pub fn new(expected: Expected) -> Self {
        Stream {
            expected,
            state: State::First(Sniff::new()),
            read: 0,
            pass: 0,
            host: HostBefore { bytes: Vec::new(), is_over: false },
            has_ended: false,
        }
    }

    /// Reads the guest's next bytes, in their order and each once. The verdict does not depend on the cut: what may pass
    /// after all of some bytes is the same in any number of calls.
    pub fn read(&mut self, bytes: &[u8]) -> Verdict {
        if !bytes.is_empty() {
            self.host.is_over = true;
        }
        let stepped = self.step(bytes);
        self.settle(stepped)
    }

    /// Passes over the rest of a body whose length is known, as if its bytes had been read: they may pass, whatever they
    /// are. Returns how many they are. The next byte to read is the one after them.
    pub fn pass_body(&mut self) -> u64 {
        let State::Http1(reader) = &mut self.state else { return 0 };
        let bytes = reader.pass_body();
        if bytes > 0 {
            self.read += bytes;
            self.pass = self.read;
        }
        bytes
    }

    /// Reads bytes of the host to the guest, while [`Stream::wants_answers`]; at other times they change nothing. All
    /// bytes go to the guest in any case.
    pub fn answered(&mut self, bytes: &[u8]) -> Verdict {
        let stepped = match &mut self.state {
            State::First(_) if !self.host.is_over => {
                self.host.read(bytes).map_or(Ok(()), |()| self.proceed(Then::opaque()))
            }
            State::Http1(reader) => {
                let answered = reader.answered(bytes);
                answered.map_or(Ok(()), |then| self.proceed(then))
            }
            State::Tls(reader) => {
                let answered = reader.answered(bytes);
                answered.map_or(Ok(()), |then| self.proceed(then))
            }
            _ => Ok(()),
        };
        self.settle(stepped)
    }

    /// The guest closed its direction. Its end may go to the host when all bytes pass.
    pub fn end(&mut self) -> Verdict {
        self.has_ended = true;
        self.settle(Ok(()))
    }

    /// Whether the host's bytes have to be read now.
    pub fn wants_answers(&self) -> bool {
        match &self.state {
            State::First(_) => !self.host.is_over,
            State::Http1(reader) => reader.wants_answer(),
            State::Tls(reader) => reader.wants_answer(),
            _ => false,
        }
    }

    /// Whether no byte of either direction has to be read any more.
    pub fn is_decided(&self) -> bool {
        matches!(self.state, State::Opaque | State::Refused(_))
    }

    /// Bytes that were read and may not pass yet.
    pub fn held_bytes(&self) -> u64 {
        self.read.saturating_sub(self.pass)
    }

    /// Memory that it keeps, but for its own size.
    pub fn memory_bytes(&self) -> usize {
        match &self.state {
            State::First(reader) => reader.memory_bytes(),
            State::Tls(reader) => reader.memory_bytes(),
            State::Http1(reader) => reader.memory_bytes(),
            State::Http2(reader) => reader.memory_bytes(),
            State::Opaque | State::Refused(_) => 0,
        }
    }

    fn step(&mut self, mut bytes: &[u8]) -> Result<(), Refusal> {
        while !bytes.is_empty() {
            let expected = &self.expected;
            let (n, then) = match &mut self.state {
                State::First(reader) => reader.read(bytes),
                State::Tls(reader) => reader.read(expected, bytes),
                State::Http1(reader) => reader.read(expected, bytes),
                State::Http2(reader) => reader.read(expected, bytes),
                State::Opaque | State::Refused(_) => return Ok(()),
            }?;
            bytes = bytes.get(n..).unwrap_or_default();
            self.read += n as u64;
            self.proceed(then)?;
        }
        Ok(())
    }

    fn proceed(&mut self, then: Then) -> Result<(), Refusal> {
        let again = match then {
            Then::Hold => return Ok(()),
            Then::Pass => {
                self.pass = self.read;
                return Ok(());
            }
            Then::Become(State::Opaque, _) if self.carries_no_name() => {
                return Err(Reason::NoName.into());
            }
            Then::Become(State::Opaque, _) => {
                self.state = State::Opaque;
                self.pass = u64::MAX;
                return Ok(());
            }
            Then::Become(state, again) => {
                if let State::First(_) = self.state {
                    // What precedes the last byte, which completed the sign of a request, is not a request.
                    self.pass = self.pass.max(self.read.saturating_sub(1));
                }
                self.state = state;
                again
            }
            Then::Again(again) => again,
        };
        // The bytes before these were accepted.
        self.read -= again.len() as u64;
        self.pass = self.pass.max(self.read);
        self.step(&again)
    }

    /// Whether what cannot be read any more has shown no name, although other names have the address.
    fn carries_no_name(&self) -> bool {
        self.expected.is_shared && matches!(self.state, State::First(_))
    }

    fn settle(&mut self, stepped: Result<(), Refusal>) -> Verdict {
        if let Err(refusal) = stepped {
            self.state = State::Refused(refusal);
        }
        if self.has_ended {
            self.settle_end();
        }
        match &self.state {
            State::Refused(refusal) => Verdict::Refuse(refusal.clone()),
            _ => Verdict::Pass(self.pass),
        }
    }

    /// The guest's last byte was read.
    fn settle_end(&mut self) {
        match &self.state {
            // Without an end of line there is no request, and an end of the stream is as good as one: nothing in the line
            // is the sign of a request.
            State::First(_) if self.carries_no_name() => {
                self.state = State::Refused(Reason::NoName.into());
            }
            State::First(_) => {
                self.state = State::Opaque;
                self.pass = u64::MAX;
            }
            State::Http1(reader) if reader.wants_answer() => {}
            State::Tls(reader) if reader.is_waiting() => {}
            State::Tls(_) | State::Http1(_) | State::Http2(_) if self.held_bytes() > 0 => {
                self.state = State::Refused(Reason::Cut.into());
            }
            _ => {}
        }
    }
}

impl HostBefore {
    /// Takes bytes. `Some`: they begin a protocol in which the host speaks first, and which carries no name.
    ///
    /// Servers that are read here may speak first, too: one of HTTP/1 that gives up waiting, and one of HTTP/2 that sends
    /// its SETTINGS at once.
    fn read(&mut self, bytes: &[u8]) -> Option<()> {
        const MOST_BYTES: usize = 16;
        let room = MOST_BYTES.saturating_sub(self.bytes.len());
        self.bytes.extend(bytes.iter().take(room));
        let (is_settings, is_whole) = is_http2_settings(&self.bytes);
        let status = b"HTTP/";
        let is_status = self.bytes.starts_with(status) || status.starts_with(&self.bytes);
        if self.bytes.is_empty() {
            return None;
        }
        self.is_over = is_settings && is_whole || self.bytes.starts_with(status);
        (!is_settings && !is_status).then_some(())
    }
}

/// Whether bytes may begin a SETTINGS frame of HTTP/2, and whether enough are there.
fn is_http2_settings(bytes: &[u8]) -> (bool, bool) {
    // Length, type, flags, stream.
    let fixed = bytes.iter().skip(3).zip([4, 0, 0, 0, 0, 0]);
    let is_short = bytes.first().is_none_or(|high| *high == 0);
    let is_settings = is_short && fixed.clone().all(|(byte, expected)| *byte == expected);
    (is_settings, fixed.count() == 6)
}

#[cfg(test)]
mod tests;
