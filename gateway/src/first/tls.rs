//! The records of TLS over TCP (RFC 8446 section 5.1) up to the last ClientHello.
//!
//! ```text
//!   guest ──► ClientHello ──► checked ──► what else comes waits for the host's answer ──┬─ ServerHello ──► opaque
//!             in records              (but change_cipher_spec, early data and alerts)   │
//!                                                                                       └─ HelloRetryRequest
//!                                            second ClientHello ──► checked ──► opaque  ◄─┘
//! ```
//!
//! A server that asks for another key by HelloRetryRequest gets a second ClientHello in the clear, and there are servers
//! that take the name of the second. So the host's answer is read. Renegotiation is encrypted, and a client that offers
//! no TLS 1.3 has no second ClientHello.

use super::hello;
use super::reason::{Reason, Refusal};
use super::server_hello::{Answer, Answered};
use super::{Expected, Then};

const CHANGE_CIPHER_SPEC: u8 = 20;
const ALERT: u8 = 21;
pub(super) const HANDSHAKE: u8 = 22;
const APPLICATION_DATA: u8 = 23;
const RECORD_HEADER_BYTES: usize = 5;
/// Most bytes of a record in the clear.
const MOST_RECORD_BYTES: usize = 1 << 14;
/// Most bytes of one ClientHello with the headers of its records.
const MOST_HELD_BYTES: usize = 2 * hello::MOST_BYTES;
/// Most bytes of 0-RTT data before a second ClientHello. Servers skip far less.
const MOST_EARLY_BYTES: usize = 16 << 20;
/// Clients send at most one record of this kind for middleboxes.
const MOST_CHANGE_CIPHER_SPECS: u8 = 2;

/// Where in the records.
enum At {
    /// In a header, with the number of bytes that have come.
    Header([u8; RECORD_HEADER_BYTES], usize),
    /// In a record of the ClientHello, with the number of missing bytes.
    Hello(usize),
    /// In a record that passes, with the number of missing bytes.
    Passing(usize),
    /// In what waits for the host's answer.
    Waiting,
}

/// Which ClientHello comes next.
enum Phase {
    First,
    /// The host has not answered the first one.
    Between(Answer),
    /// The host has asked for a second one.
    Second,
}

/// Reads the guest's records.
pub(super) struct Reader {
    at: At,
    /// The ClientHello so far, without the headers of records.
    hello: Vec<u8>,
    held_bytes: usize,
    phase: Phase,
    /// What waits for the host's answer.
    waiting: Vec<u8>,
    change_cipher_specs: u8,
    /// 0-RTT data that may still come.
    early_bytes: usize,
    /// PostgreSQL's questions before the ClientHello.
    questions: u8,
}

impl Reader {
    /// Behind questions of PostgreSQL, which the host answers first.
    pub(super) fn behind(questions: u8) -> Self {
        Reader {
            at: At::Header([0; RECORD_HEADER_BYTES], 0),
            hello: Vec::new(),
            held_bytes: 0,
            phase: Phase::First,
            waiting: Vec::new(),
            change_cipher_specs: 0,
            early_bytes: 0,
            questions,
        }
    }

    pub(super) fn read(
        &mut self,
        expected: &Expected,
        bytes: &[u8],
    ) -> Result<(usize, Then), Refusal> {
        match self.at {
            At::Header(header, there) => self.read_header(header, there, bytes),
            At::Hello(missing) => self.read_hello(expected, missing, bytes),
            At::Passing(missing) => {
                let n = missing.min(bytes.len());
                self.at = At::Passing(missing - n);
                if n == missing {
                    self.at = At::Header([0; RECORD_HEADER_BYTES], 0);
                }
                Ok((n, Then::Pass))
            }
            At::Waiting => self.wait(bytes).map(|n| (n, Then::Hold)),
        }
    }

    /// Keeps bytes until the host has answered.
    fn wait(&mut self, bytes: &[u8]) -> Result<usize, Refusal> {
        self.at = At::Waiting;
        self.waiting.extend_from_slice(bytes);
        if self.waiting.len() > MOST_HELD_BYTES {
            return Err(Reason::TlsTooLong.into());
        }
        Ok(bytes.len())
    }

    /// Whether the host's answer has to be read.
    pub(super) fn wants_answer(&self) -> bool {
        matches!(self.phase, Phase::Between(_))
    }

    /// Whether bytes wait for the host's answer.
    pub(super) fn is_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Reads the host's bytes behind the first ClientHello. `None`: the answer is not whole.
    pub(super) fn answered(&mut self, bytes: &[u8]) -> Option<Then> {
        let Phase::Between(answer) = &mut self.phase else { return None };
        match answer.read(bytes)? {
            Answered::Other => Some(Then::opaque()),
            Answered::Retry => {
                self.phase = Phase::Second;
                if let At::Waiting = self.at {
                    self.at = At::Header([0; RECORD_HEADER_BYTES], 0);
                }
                Some(Then::Again(std::mem::take(&mut self.waiting)))
            }
        }
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.hello.capacity() + self.waiting.capacity()
    }

    fn read_header(
        &mut self,
        mut header: [u8; RECORD_HEADER_BYTES],
        mut there: usize,
        bytes: &[u8],
    ) -> Result<(usize, Then), Refusal> {
        let mut n = 0;
        for (to, from) in header.iter_mut().skip(there).zip(bytes) {
            *to = *from;
            n += 1;
        }
        there += n;
        self.at = At::Header(header, there);
        self.held_bytes += n;
        let [kind, major, _, a, b] = header;
        let is_first = matches!(self.phase, Phase::First);
        if is_first && (kind != HANDSHAKE || there > 1 && major != 3) {
            return Err(Reason::TlsUnreadable.into());
        }
        if there < RECORD_HEADER_BYTES {
            return Ok((n, Then::Hold));
        }
        let length = usize::from(u16::from_be_bytes([a, b]));
        let is_between = matches!(self.phase, Phase::Between(_));
        if kind == HANDSHAKE && !is_between || !self.hello.is_empty() {
            return self.begin_handshake_record(kind, length).map(|()| (n, Then::Hold));
        }
        if self.begin_other_record(kind, length) {
            return Ok((n, Then::Pass));
        }
        if is_between {
            return self.wait(&header).map(|_| (n, Then::Hold));
        }
        Err(Reason::TlsUnreadable.into())
    }

    fn begin_handshake_record(&mut self, kind: u8, length: usize) -> Result<(), Refusal> {
        // RFC 8446 section 5.1: no empty fragments, nothing between the fragments of a message.
        if kind != HANDSHAKE || length == 0 || length > MOST_RECORD_BYTES {
            return Err(Reason::TlsUnreadable.into());
        }
        if self.held_bytes + length > MOST_HELD_BYTES {
            return Err(Reason::TlsTooLong.into());
        }
        self.at = At::Hello(length);
        Ok(())
    }

    /// A record behind a ClientHello that was accepted. True: it may come before a second one.
    fn begin_other_record(&mut self, kind: u8, length: usize) -> bool {
        let passes = match kind {
            CHANGE_CIPHER_SPEC => self.change_cipher_specs < MOST_CHANGE_CIPHER_SPECS,
            APPLICATION_DATA => length <= self.early_bytes,
            ALERT => true,
            _ => false,
        };
        if !passes {
            return false;
        }
        match kind {
            CHANGE_CIPHER_SPEC => self.change_cipher_specs += 1,
            APPLICATION_DATA => self.early_bytes -= length,
            _ => {}
        }
        self.held_bytes = 0;
        self.at = match length {
            0 => At::Header([0; RECORD_HEADER_BYTES], 0),
            _ => At::Passing(length),
        };
        true
    }

    fn read_hello(
        &mut self,
        expected: &Expected,
        missing: usize,
        bytes: &[u8],
    ) -> Result<(usize, Then), Refusal> {
        let n = missing.min(bytes.len());
        let fragment = bytes.get(..n).unwrap_or_default();
        self.hello.extend_from_slice(fragment);
        self.held_bytes += n;
        self.at = At::Hello(missing - n);
        if n == missing {
            self.at = At::Header([0; RECORD_HEADER_BYTES], 0);
        }
        let Some(whole) = hello::message_bytes(&self.hello)? else { return Ok((n, Then::Hold)) };
        if self.hello.len() < whole {
            return Ok((n, Then::Hold));
        }
        // Nothing may follow in the same record: a server could read it as a second ClientHello.
        if self.hello.len() > whole || n < missing {
            return Err(Reason::TlsUnreadable.into());
        }
        let hello = hello::check(expected, &self.hello)?;
        self.hello = Vec::new();
        self.held_bytes = 0;
        if matches!(self.phase, Phase::Second) || !hello.may_be_repeated {
            return Ok((n, Then::opaque()));
        }
        self.phase = Phase::Between(Answer::behind(self.questions));
        self.early_bytes = if hello.offers_early_data { MOST_EARLY_BYTES } else { 0 };
        Ok((n, Then::Pass))
    }
}
