//! The host's answer to the first request of a connection, when that asked for another protocol.

/// Most bytes of the head of an answer.
const MOST_BYTES: usize = 65_536;
const SWITCHING_PROTOCOLS: u16 = 101;

/// What the host answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Answered {
    /// The connection goes on with HTTP/2.
    Http2,
    /// With TLS (RFC 2817).
    Tls,
    /// With a protocol that carries no name, like WebSocket.
    Other,
    /// The connection stays with HTTP/1. So does one whose answer cannot be read.
    Refused,
}

/// The answer so far.
#[derive(Default)]
pub(super) struct Answer {
    head: Vec<u8>,
    line_bytes: usize,
}

impl Answer {
    pub(super) fn memory_bytes(&self) -> usize {
        self.head.capacity()
    }

    /// Takes bytes of the host.
    pub(super) fn read(&mut self, bytes: &[u8]) -> Option<Answered> {
        for byte in bytes {
            if self.head.len() >= MOST_BYTES {
                return Some(Answered::Refused);
            }
            self.head.push(*byte);
            match byte {
                b'\n' if self.line_bytes == 0 => {
                    let answered = parse(&self.head);
                    // An interim answer precedes the one that counts.
                    self.head.clear();
                    if answered.is_some() {
                        return answered;
                    }
                }
                b'\n' => self.line_bytes = 0,
                b'\r' => {}
                _ => self.line_bytes += 1,
            }
        }
        None
    }
}

/// `None`: an interim answer.
fn parse(head: &[u8]) -> Option<Answered> {
    let mut fields = [httparse::EMPTY_HEADER; super::lines::MOST_FIELDS];
    let mut response = httparse::Response::new(&mut fields);
    let is_whole = response.parse(head).is_ok_and(|status| status.is_complete());
    match response.code {
        Some(SWITCHING_PROTOCOLS) if is_whole => {
            let value = |f: &httparse::Header<'_>| f.value.trim_ascii().to_ascii_lowercase();
            let mut upgrades =
                response.headers.iter().filter(|f| f.name.eq_ignore_ascii_case("upgrade"));
            Some(match upgrades.next().map(value) {
                Some(to) if to == b"h2c" => Answered::Http2,
                Some(to) if to.starts_with(b"tls") => Answered::Tls,
                _ => Answered::Other,
            })
        }
        Some(100..200) if is_whole => None,
        _ => Some(Answered::Refused),
    }
}
