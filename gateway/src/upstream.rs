//! A proxy through which the guest's connections leave: HTTP CONNECT (RFC 9110 section 9.3.6) or SOCKS 5 (RFC 1928),
//! with a user and a password (RFC 7617, RFC 1929).
//!
//! ```text
//!   HTTP      CONNECT host:port ──► 200
//!   SOCKS 5   methods ──► method ──► user, password ──► accepted ──► connect to host:port ──► succeeded
//! ```
//!
//! The engine reads no byte behind the proxy's last answer: those are the destination's.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

use data_encoding::BASE64;

/// Most bytes of an answer of an HTTP proxy.
const MOST_HEAD_BYTES: usize = 16 << 10;
/// Most header fields of it.
const MOST_FIELDS: usize = 64;
/// Most bytes of a user, a password, or a name in SOCKS 5: the length is one byte.
const MOST_SOCKS_BYTES: usize = 255;

/// The language of a proxy.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Kind {
    /// HTTP CONNECT.
    Http,
    /// SOCKS 5.
    Socks5,
}

/// A proxy.
#[derive(Clone, PartialEq, Eq)]
pub struct Upstream {
    /// Its language.
    pub kind: Kind,
    /// Where it listens.
    pub address: SocketAddr,
    /// A user and a password, of at most 255 bytes each.
    pub credentials: Option<(String, String)>,
}

impl fmt::Debug for Upstream {
    /// Without the password.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let user = self.credentials.as_ref().map(|(user, _)| user);
        let Upstream { kind, address, .. } = self;
        f.debug_struct("Upstream")
            .field("kind", kind)
            .field("address", address)
            .field("user", &user)
            .finish_non_exhaustive()
    }
}

/// The target of a request to the proxy.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Target {
    Name(Arc<str>, u16),
    Address(SocketAddr),
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Target::Name(name, port) => write!(f, "{name}:{port}"),
            Target::Address(address) => address.fmt(f),
        }
    }
}

/// What to do next.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Step {
    /// Send these bytes, and then read.
    Send(Vec<u8>),
    /// Wait for more bytes.
    Read,
    /// The tunnel is there.
    Done,
    /// The proxy refuses, or does not speak its language.
    Refused,
}

enum State {
    Http,
    SocksMethod,
    SocksUser,
    SocksConnect,
}

/// The exchange with a proxy that opens one tunnel.
pub(crate) struct Handshake {
    state: State,
    target: Target,
    credentials: Option<(String, String)>,
}

impl Handshake {
    /// An exchange, and its first bytes.
    pub(crate) fn begin(upstream: &Upstream, target: Target) -> (Handshake, Vec<u8>) {
        let credentials = upstream.credentials.clone();
        let (state, bytes) = match upstream.kind {
            Kind::Http => (State::Http, http_request(&target, credentials.as_ref())),
            Kind::Socks5 => {
                let methods: &[u8] = if credentials.is_some() { &[5, 2, 0, 2] } else { &[5, 1, 0] };
                (State::SocksMethod, methods.to_vec())
            }
        };
        (Handshake { state, target, credentials }, bytes)
    }

    /// Reads all that the proxy has sent and that was not consumed before. Returns how many bytes it consumes.
    pub(crate) fn read(&mut self, bytes: &[u8]) -> (usize, Step) {
        match self.state {
            State::Http => read_http(bytes),
            State::SocksMethod => self.read_method(bytes),
            State::SocksUser => match bytes {
                [_, 0, ..] => self.ask_for_connection(),
                [_, _, ..] => (0, Step::Refused),
                _ => (0, Step::Read),
            },
            State::SocksConnect => read_connected(bytes),
        }
    }

    fn read_method(&mut self, bytes: &[u8]) -> (usize, Step) {
        match (bytes, &self.credentials) {
            ([5, 0, ..], _) => self.ask_for_connection(),
            ([5, 2, ..], Some((user, password))) => {
                self.state = State::SocksUser;
                let mut sent = vec![1];
                for text in [user, password] {
                    let text = text.as_bytes().get(..MOST_SOCKS_BYTES).unwrap_or(text.as_bytes());
                    sent.push(text.len() as u8);
                    sent.extend_from_slice(text);
                }
                (2, Step::Send(sent))
            }
            ([5] | [], _) => (0, Step::Read),
            _ => (0, Step::Refused),
        }
    }

    /// The request behind an answer of two bytes.
    fn ask_for_connection(&mut self) -> (usize, Step) {
        self.state = State::SocksConnect;
        let mut sent = vec![5, 1, 0];
        let port = match &self.target {
            Target::Name(name, _) if name.len() > MOST_SOCKS_BYTES => return (0, Step::Refused),
            Target::Name(name, port) => {
                sent.extend([3, name.len() as u8]);
                sent.extend_from_slice(name.as_bytes());
                *port
            }
            Target::Address(SocketAddr::V4(v4)) => {
                sent.push(1);
                sent.extend(v4.ip().octets());
                v4.port()
            }
            Target::Address(SocketAddr::V6(v6)) => {
                sent.push(4);
                sent.extend(v6.ip().octets());
                v6.port()
            }
        };
        sent.extend(port.to_be_bytes());
        (2, Step::Send(sent))
    }
}

fn http_request(target: &Target, credentials: Option<&(String, String)>) -> Vec<u8> {
    let authorization = credentials.map(|(user, password)| {
        let encoded = BASE64.encode(format!("{user}:{password}").as_bytes());
        format!("Proxy-Authorization: Basic {encoded}\r\n")
    });
    let authorization = authorization.unwrap_or_default();
    format!("CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n{authorization}\r\n").into_bytes()
}

/// An answer of status 2xx opens the tunnel; its end is that of the head.
fn read_http(bytes: &[u8]) -> (usize, Step) {
    let mut fields = [httparse::EMPTY_HEADER; MOST_FIELDS];
    let mut response = httparse::Response::new(&mut fields);
    match (response.parse(bytes), response.code) {
        (Ok(httparse::Status::Complete(n)), Some(200..=299)) => (n, Step::Done),
        (Ok(httparse::Status::Partial), _) if bytes.len() < MOST_HEAD_BYTES => (0, Step::Read),
        _ => (0, Step::Refused),
    }
}

/// The answer has the address by which the proxy connects.
fn read_connected(bytes: &[u8]) -> (usize, Step) {
    let address_bytes = match bytes {
        [5, 0, 0, 1, ..] => 4,
        [5, 0, 0, 4, ..] => 16,
        [5, 0, 0, 3, length, ..] => 1 + usize::from(*length),
        [] | [5] | [5, 0] | [5, 0, 0] | [5, 0, 0, 3] => return (0, Step::Read),
        _ => return (0, Step::Refused),
    };
    let whole = 4 + address_bytes + 2;
    if bytes.len() < whole { (0, Step::Read) } else { (whole, Step::Done) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn upstream(kind: Kind, has_credentials: bool) -> Upstream {
        let credentials = has_credentials.then(|| ("me".to_owned(), "pw".to_owned()));
        Upstream { kind, address: SocketAddr::from(([127, 0, 0, 1], 3128)), credentials }
    }

    fn name() -> Target {
        Target::Name("example.org".into(), 443)
    }

    /// What a proxy's whole answers, one after another, lead to; byte by byte.
    fn exchange(upstream: &Upstream, target: Target, answers: &[&[u8]]) -> (Vec<Vec<u8>>, Step) {
        let (mut handshake, first) = Handshake::begin(upstream, target);
        let (mut sent, mut held) = (vec![first], Vec::new());
        for byte in answers.concat() {
            held.push(byte);
            let (consumed, step) = handshake.read(&held);
            held.drain(..consumed);
            match step {
                Step::Send(bytes) => sent.push(bytes),
                Step::Read => {}
                over => {
                    assert!(over == Step::Refused || held.is_empty());
                    return (sent, over);
                }
            }
        }
        (sent, Step::Read)
    }

    #[test]
    fn an_http_proxy_is_asked_for_a_tunnel_and_its_head_is_consumed_whole() {
        let to = upstream(Kind::Http, true);
        let (sent, over) = exchange(&to, name(), &[b"HTTP/1.1 200 OK\r\nVia: x\r\n\r\n"]);
        assert_eq!(over, Step::Done);
        let request = "CONNECT example.org:443 HTTP/1.1\r\nHost: example.org:443\r\n\
            Proxy-Authorization: Basic bWU6cHc=\r\n\r\n";
        assert_eq!(sent, [request.as_bytes()]);
        let v6 = Target::Address("[2001:db8::1]:22".parse().unwrap());
        let (sent, _) = exchange(&upstream(Kind::Http, false), v6, &[]);
        assert!(sent[0].starts_with(b"CONNECT [2001:db8::1]:22 HTTP/1.1\r\n"));
        assert!(!sent[0].windows(5).any(|w| w == b"Basic"));
        for refused in ["HTTP/1.1 407 No\r\n\r\n", "HTTP/1.1 100 Go on\r\n\r\n", "SSH-2.0-x\r\n"] {
            assert_eq!(exchange(&to, name(), &[refused.as_bytes()]).1, Step::Refused, "{refused}");
        }
        let long = [&b"HTTP/1.1 200 OK\r\nX: "[..], &[b'x'; MOST_HEAD_BYTES]].concat();
        assert_eq!(exchange(&to, name(), &[&long]).1, Step::Refused);
    }

    #[test]
    fn a_socks_proxy_gets_the_name_and_the_password_that_it_asks_for() {
        let connected = &[5, 0, 0, 1, 10, 0, 0, 1, 0, 80][..];
        let request = [&[5, 1, 0, 3, 11][..], b"example.org", &[1, 187]].concat();
        let (sent, over) = exchange(&upstream(Kind::Socks5, false), name(), &[&[5, 0], connected]);
        assert_eq!((sent, over), (vec![vec![5, 1, 0], request.clone()], Step::Done));
        let to = upstream(Kind::Socks5, true);
        let by_name = [&[5, 0, 0, 3, 2][..], b"ab", &[0, 80]].concat();
        let (sent, over) = exchange(&to, name(), &[&[5, 2], &[1, 0], &by_name]);
        let login = [&[1, 2][..], b"me", &[2], b"pw"].concat();
        assert_eq!((sent, over), (vec![vec![5, 2, 0, 2], login, request], Step::Done));
        let v6 = Target::Address("[2001:db8::1]:22".parse().unwrap());
        let (sent, _) = exchange(&to, v6, &[&[5, 0]]);
        assert_eq!((sent[1].len(), &sent[1][..6]), (22, &[5, 1, 0, 4, 0x20, 1][..]));
        for refused in
            [&[&[4, 0][..]][..], &[&[5, 255]], &[&[5, 2], &[1, 1]], &[&[5, 0], &[5, 5, 0, 1]]]
        {
            assert_eq!(exchange(&to, name(), refused).1, Step::Refused, "{refused:?}");
        }
    }

    #[test]
    fn the_password_is_not_in_a_debug_text() {
        let text = format!("{:?}", upstream(Kind::Http, true));
        assert!(text.contains("me") && !text.contains("pw"), "{text}");
    }
}
