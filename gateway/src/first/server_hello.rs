//! The host's answer to a ClientHello over TCP: whether it asks for a second one (RFC 8446 section 4.1.4).

const ALERT: u8 = 21;
const HANDSHAKE: u8 = 22;
const SERVER_HELLO: u8 = 2;
const RECORD_HEADER_BYTES: usize = 5;
/// The bytes of a ServerHello up to the end of its random: type, length, version, random.
const UP_TO_RANDOM: usize = 4 + 2 + 32;
/// The random of a HelloRetryRequest (RFC 8446 section 4.1.3).
const RETRY: [u8; 32] = [
    0xcf, 0x21, 0xad, 0x74, 0xe5, 0x9a, 0x61, 0x11, 0xbe, 0x1d, 0x8c, 0x02, 0x1e, 0x65, 0xb8, 0x91,
    0xc2, 0xa2, 0x11, 0x16, 0x7a, 0xbb, 0x8c, 0x5e, 0x07, 0x9e, 0x09, 0xe2, 0xc8, 0xa8, 0x33, 0x9c,
];
/// PostgreSQL's answers to the questions for TLS and GSSAPI, which may come behind the ClientHello.
const OF_POSTGRES: [u8; 3] = [b'S', b'N', b'G'];
/// The types of records of TLS.
const TYPES: std::ops::RangeInclusive<u8> = 20..=23;

/// What the host answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Answered {
    /// It asks for a second ClientHello.
    Retry,
    /// The handshake goes on, or ends.
    Other,
}

/// The answer so far.
#[derive(Default)]
pub(super) struct Answer {
    /// Answers of PostgreSQL that may come first.
    questions: u8,
    /// It is not TLS: the guest's next bytes wait, and are refused if the guest does not give up.
    is_other: bool,
    /// Of a record.
    header: Vec<u8>,
    /// Bytes of the record that have not come.
    missing: usize,
    message: Vec<u8>,
}

impl Answer {
    /// Behind questions of PostgreSQL.
    pub(super) fn behind(questions: u8) -> Self {
        Answer { questions, ..Answer::default() }
    }

    /// Takes bytes of the host.
    pub(super) fn read(&mut self, bytes: &[u8]) -> Option<Answered> {
        bytes.iter().find_map(|byte| self.take(*byte))
    }

    fn take(&mut self, byte: u8) -> Option<Answered> {
        if self.is_other {
            return None;
        }
        let is_first = self.header.is_empty() && self.message.is_empty() && self.missing == 0;
        if is_first && self.questions > 0 && OF_POSTGRES.contains(&byte) {
            self.questions -= 1;
            return None;
        }
        if self.missing > 0 {
            self.missing -= 1;
            // Warnings may come first.
            if self.header.first() != Some(&HANDSHAKE) {
                self.end_record();
                return None;
            }
            self.message.push(byte);
            self.end_record();
            return self.decide();
        }
        self.header.push(byte);
        match self.header.first() {
            Some(&ALERT | &HANDSHAKE) => {}
            Some(kind) if TYPES.contains(kind) => return Some(Answered::Other),
            _ => {
                self.is_other = true;
                return None;
            }
        }
        if let [_, _, _, a, b] = *self.header {
            self.missing = usize::from(u16::from_be_bytes([a, b]));
            self.end_record();
        }
        None
    }

    fn end_record(&mut self) {
        if self.missing == 0 && self.header.len() == RECORD_HEADER_BYTES {
            self.header.clear();
        }
    }

    fn decide(&self) -> Option<Answered> {
        if self.message.first() != Some(&SERVER_HELLO) {
            return Some(Answered::Other);
        }
        if self.message.len() < UP_TO_RANDOM {
            return None;
        }
        Some(if self.message.ends_with(&RETRY) { Answered::Retry } else { Answered::Other })
    }
}

#[cfg(test)]
pub(in crate::first) mod tests {
    use super::*;

    /// The begin of a ServerHello in one record.
    pub(in crate::first) fn server_hello(is_retry: bool) -> Vec<u8> {
        let random = if is_retry { RETRY } else { [9; 32] };
        let message = [&[SERVER_HELLO, 0, 0, 60, 3, 3][..], &random, &[7; 26]].concat();
        [&[HANDSHAKE, 3, 3, 0, message.len() as u8][..], &message].concat()
    }

    fn read(parts: &[&[u8]]) -> Option<Answered> {
        read_behind(0, parts)
    }

    fn read_behind(questions: u8, parts: &[&[u8]]) -> Option<Answered> {
        let mut answer = Answer::behind(questions);
        parts.concat().iter().find_map(|byte| answer.read(&[*byte]))
    }

    #[test]
    fn a_retry_is_known_by_its_random_in_any_records() {
        let (retry, other) = (server_hello(true), server_hello(false));
        assert_eq!(
            (read(&[&retry]), read(&[&other])),
            (Some(Answered::Retry), Some(Answered::Other))
        );
        assert_eq!(Answer::default().read(&retry), Some(Answered::Retry));
        let warning = [ALERT, 3, 3, 0, 2, 1, 112];
        assert_eq!(read(&[&warning, &warning, &retry]), Some(Answered::Retry));
        assert_eq!(read_behind(1, &[b"S", &retry]), Some(Answered::Retry));
        assert_eq!(read_behind(2, &[b"NS", &retry]), Some(Answered::Retry));
        let in_pieces: Vec<u8> =
            retry[5..].iter().flat_map(|byte| [HANDSHAKE, 3, 3, 0, 1, *byte]).collect();
        assert_eq!(read(&[&in_pieces]), Some(Answered::Retry));
        assert_eq!(read(&[&retry[..42]]), None);
        for other in [&b"\x17\x03\x03"[..], b"\x16\x03\x03\0\x02\x0b\0"] {
            assert_eq!(read(&[other]), Some(Answered::Other));
        }
        for clear in [&b"HTTP/1.1 400"[..], b"S", b"NSS"] {
            assert_eq!(read_behind(1, &[clear, b"x", &retry]), None, "it is not TLS");
        }
    }
}
