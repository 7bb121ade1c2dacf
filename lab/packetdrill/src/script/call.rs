//! Calls of a script, and what they are to return.

use std::net::{IpAddr, SocketAddr};

use crate::calls;
use crate::interface::{Interface, Wait};

/// A call: `name(arguments) = result [ERRNO]`.
#[derive(Clone, PartialEq, Debug)]
pub struct Call {
    /// Its name.
    pub name: String,
    /// Its arguments, as in the script.
    pub arguments: Vec<String>,
    /// What it returns.
    pub result: i64,
    /// The errno of a call that fails.
    pub errno: Option<String>,
}

/// Names of C, of which scripts use these.
const NAMES: &[(&str, i32)] = &[
    ("SOL_SOCKET", libc::SOL_SOCKET),
    ("SOL_TCP", libc::IPPROTO_TCP),
    ("IPPROTO_TCP", libc::IPPROTO_TCP),
    ("SO_REUSEADDR", libc::SO_REUSEADDR),
    ("SO_KEEPALIVE", libc::SO_KEEPALIVE),
    ("SO_SNDBUF", libc::SO_SNDBUF),
    ("SO_RCVBUF", libc::SO_RCVBUF),
    ("SO_ERROR", libc::SO_ERROR),
    ("TCP_NODELAY", libc::TCP_NODELAY),
    ("TCP_CORK", libc::TCP_CORK),
    ("TCP_KEEPIDLE", libc::TCP_KEEPIDLE),
    ("TCP_KEEPINTVL", libc::TCP_KEEPINTVL),
    ("TCP_KEEPCNT", libc::TCP_KEEPCNT),
    ("TCP_USER_TIMEOUT", libc::TCP_USER_TIMEOUT),
    ("TCP_FASTOPEN", libc::TCP_FASTOPEN),
    ("TCP_FASTOPEN_CONNECT", libc::TCP_FASTOPEN_CONNECT),
    ("SHUT_RD", libc::SHUT_RD),
    ("SHUT_WR", libc::SHUT_WR),
    ("SHUT_RDWR", libc::SHUT_RDWR),
    ("F_SETFL", libc::F_SETFL),
    ("O_RDWR", libc::O_RDWR),
    ("O_NONBLOCK", libc::O_NONBLOCK),
    ("MSG_MORE", libc::MSG_MORE),
    ("MSG_EOR", libc::MSG_EOR),
    ("MSG_PEEK", libc::MSG_PEEK),
    ("MSG_DONTWAIT", libc::MSG_DONTWAIT),
    ("EAGAIN", libc::EAGAIN),
    ("EPIPE", libc::EPIPE),
    ("EINPROGRESS", libc::EINPROGRESS),
    ("ETIMEDOUT", libc::ETIMEDOUT),
    ("ECONNRESET", libc::ECONNRESET),
    ("ECONNREFUSED", libc::ECONNREFUSED),
    ("EHOSTUNREACH", libc::EHOSTUNREACH),
    ("ENOPROTOOPT", libc::ENOPROTOOPT),
];

/// A number, a name, or names joined by `|`; brackets around a value are left out.
pub fn constant(text: &str) -> Result<i32, String> {
    text.trim_matches(['[', ']']).split('|').map(str::trim).try_fold(0, |all, word| {
        let named = NAMES.iter().find(|(name, _)| *name == word).map(|(_, n)| *n);
        let value = named.or_else(|| word.parse().ok());
        value.map(|n| all | n).ok_or_else(|| format!("unknown name `{word}`"))
    })
}

/// Where the stack and the peer of a script are.
#[derive(Clone, Copy, Debug)]
pub struct Places {
    /// The stack's address and port of its listener.
    pub own: (IpAddr, u16),
    /// The peer's address and port of its listener.
    pub peer: (IpAddr, u16),
}

impl Call {
    fn at(&self, at: usize) -> Result<i32, String> {
        constant(self.arguments.get(at).ok_or("too few arguments")?)
    }

    /// Makes the call with the descriptors of the script mapped by `fds`.
    ///
    /// # Errors
    /// The outer one: a call that the runner does not know. The inner one: an errno.
    pub fn make(&self, interface: &Interface, places: &Places) -> Result<Result<i64, i32>, String> {
        let fd = if self.name == "socket" { 0 } else { self.at(0)? };
        let unit = |answer: Result<(), i32>| answer.map(|()| 0);
        let socket = |a: (IpAddr, u16)| calls::emit_address(SocketAddr::from(a));
        let size = |n: i32| usize::try_from(n).unwrap_or(0);
        Ok(match self.name.as_str() {
            "socket" => {
                let family = if places.own.0.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
                interface
                    .call(Wait::Never, |m| m.socket(family, libc::SOCK_STREAM, 0))
                    .map(i64::from)
            }
            "bind" => {
                unit(interface.call(Wait::Never, |m| m.bind(fd, SocketAddr::from(places.own))))
            }
            "listen" => {
                let backlog = self.at(1)?;
                unit(interface.call(Wait::Never, |m| m.listen(fd, backlog)))
            }
            "accept" => calls::accept(interface, fd).map(|(fd, _)| i64::from(fd)),
            "connect" => unit(calls::connect(interface, fd, &socket(places.peer))),
            "read" | "recv" => {
                let flags = if self.name == "recv" { self.at(3)? } else { 0 };
                calls::recv(interface, fd, size(self.at(2)?), flags).map(|b| b.len() as i64)
            }
            "write" | "send" => {
                let flags = if self.name == "send" { self.at(3)? } else { 0 };
                let bytes = vec![0; size(self.at(2)?)];
                calls::send(interface, fd, &bytes, flags).map(|n| n as i64)
            }
            "close" => unit(interface.call(Wait::Never, |m| m.close(fd))),
            "shutdown" => {
                let how = self.at(1)?;
                unit(interface.call(Wait::Never, |m| m.shutdown(fd, how)))
            }
            "fcntl" => calls::fcntl(interface, fd, self.at(1)?, self.at(2)?).map(i64::from),
            "setsockopt" => {
                let (level, name, value) = (self.at(1)?, self.at(2)?, self.at(3)?.to_ne_bytes());
                unit(interface.call(Wait::Never, |m| m.set_option(fd, level, name, &value)))
            }
            "getsockopt" => self.get_option(interface, fd)?,
            name => return Err(format!("unknown call `{name}`")),
        })
    }

    /// getsockopt: 0 if the value is the script's, else EINVAL.
    fn get_option(&self, interface: &Interface, fd: i32) -> Result<Result<i64, i32>, String> {
        let (level, name, value) = (self.at(1)?, self.at(2)?, self.at(3)?.to_ne_bytes());
        let told = interface.call(Wait::Never, |m| m.option(fd, level, name));
        Ok(told.and_then(|told| if told == value { Ok(0) } else { Err(libc::EINVAL) }))
    }

    /// What is wrong with an answer, if anything is.
    pub fn difference(&self, answer: Result<i64, i32>) -> Result<Option<String>, String> {
        let errno = self.errno.as_deref().map(constant).transpose()?;
        let is_right = match (answer, errno) {
            (Ok(n), None) => n == self.result,
            (Err(e), Some(expected)) => e == expected,
            (Err(_), None) => self.result < 0,
            (Ok(_), Some(_)) => false,
        };
        Ok((!is_right).then(|| format!("{} returned {answer:?}", self.name)))
    }
}
