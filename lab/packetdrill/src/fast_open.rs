//! TCP Fast Open (RFC 7413) as Linux has it in its calls: MSG_FASTOPEN, TCP_FASTOPEN_CONNECT, TCP_FASTOPEN,
//! TCP_FASTOPEN_KEY and the bits of `net.ipv4.tcp_fastopen`. In the dialect of FreeBSD a sendto of a socket with
//! TCP_FASTOPEN connects, and takes all bytes.

use std::net::SocketAddr;

use fulmar_stack::shard::{FastOpenKeys, FastOpenOptions, FirstData};

use crate::interface::{Interface, Wait};
use crate::settings::{Dialect, Settings};
use crate::sockets::{Answer, Machine, Refusal, Role};

/// Bits of `net.ipv4.tcp_fastopen` (Documentation/networking/ip-sysctl.rst).
const CLIENT: u64 = 1;
const SERVER: u64 = 2;
const CLIENT_WITHOUT_COOKIE: u64 = 4;
const SERVER_WITHOUT_COOKIE: u64 = 0x200;
/// Every listener has Fast Open.
const EVERY_LISTENER: u64 = 0x400;

/// Pending connections of a listener that set no limit (`net.core.somaxconn`).
const BACKLOG: usize = 4096;

impl Settings {
    /// `net.ipv4.tcp_fastopen`; Linux's default is the client's bit.
    fn fast_open_bits(&self) -> u64 {
        let text = self.text("net.ipv4.tcp_fastopen").unwrap_or("1");
        let hex = text.strip_prefix("0x").map(|digits| u64::from_str_radix(digits, 16));
        hex.unwrap_or_else(|| text.parse()).unwrap_or(0)
    }

    pub(crate) fn has_fast_open_client(&self) -> bool {
        self.dialect() == Dialect::FreeBsd || self.fast_open_bits() & CLIENT != 0
    }

    /// `net.ipv4.tcp_fastopen_key`: four words in hexadecimal.
    fn fast_open_keys(&self) -> Option<FastOpenKeys> {
        let words = self.text("net.ipv4.tcp_fastopen_key")?.split('-');
        let mut key = [0; 16];
        for (place, word) in key.as_chunks_mut::<4>().0.iter_mut().zip(words) {
            *place = u32::from_str_radix(word, 16).ok()?.to_le_bytes();
        }
        Some(FastOpenKeys::from_bytes(key, None))
    }

    /// Fast Open of a listener with these options.
    pub fn fast_open(&self, own: &FastOpenSocket) -> Option<FastOpenOptions> {
        let bits = self.fast_open_bits();
        let is_on = own.backlog.is_some() || bits & EVERY_LISTENER != 0;
        (is_on && bits & SERVER != 0).then(|| FastOpenOptions {
            backlog: own.backlog.unwrap_or(BACKLOG),
            without_cookie: bits & SERVER_WITHOUT_COOKIE != 0,
            keys: own.keys.or_else(|| self.fast_open_keys()),
        })
    }
}

/// Options of a socket.
#[derive(Clone, Default, Debug)]
pub struct FastOpenSocket {
    /// TCP_FASTOPEN: of a listener the pending connections at most; of a socket of FreeBSD's that it may be used.
    pub backlog: Option<usize>,
    /// TCP_FASTOPEN_KEY.
    pub keys: Option<FastOpenKeys>,
    /// TCP_FASTOPEN_CONNECT: `connect` waits for the first write.
    pub connect: bool,
}

impl FastOpenSocket {
    /// Sets TCP_FASTOPEN_KEY: one key, or two of which the second is still taken.
    pub fn set_keys(&mut self, value: &[u8]) -> Result<(), i32> {
        let (keys, rest) = value.as_chunks::<16>();
        self.keys = match (keys, rest) {
            ([key], []) => Some(FastOpenKeys::from_bytes(*key, None)),
            ([key, previous], []) => Some(FastOpenKeys::from_bytes(*key, Some(*previous))),
            _ => return Err(libc::EINVAL),
        };
        Ok(())
    }
}

/// How a connection with first data has begun.
enum Begun {
    /// So many bytes are on their way or queued.
    Taken(usize),
    /// The handshake comes first.
    Connecting,
}

impl Machine {
    /// Whether a call that sends on this socket has to connect first, and to which address if that is known.
    pub fn connects_at_send(&mut self, fd: i32) -> Answer<Option<Option<SocketAddr>>> {
        let is_bsd = self.world.settings().dialect() == Dialect::FreeBsd;
        let socket = self.socket_of(fd)?;
        Ok(match socket.role {
            Role::Deferred(remote) => Some(Some(remote)),
            Role::Fresh if is_bsd && socket.options.fast_open.backlog.is_some() => Some(None),
            _ => None,
        })
    }

    /// A connect with TCP_FASTOPEN_CONNECT: deferred if the SYN could carry data.
    pub fn connect_lazily(&mut self, fd: i32, remote: SocketAddr) -> Answer<()> {
        if self.fast_open_space(fd, remote)?.is_some() {
            self.socket_of(fd)?.role = Role::Deferred(remote);
            return Ok(());
        }
        match self.open_with(fd, remote, &[])? {
            Begun::Taken(_) => Ok(()),
            Begun::Connecting => Err(Refusal::WouldBlock),
        }
    }

    fn fast_open_space(&mut self, fd: i32, remote: SocketAddr) -> Answer<Option<usize>> {
        let without_cookie = self.world.settings().fast_open_bits() & CLIENT_WITHOUT_COOKIE != 0;
        let socket = self.socket_of(fd)?;
        let (local, options) = (socket.bound, socket.options.clone());
        let set = |entry: &mut _| options.apply(entry);
        Ok(self.world.call(|shard, now| {
            let first = FirstData { bytes: &[], without_cookie };
            shard.fast_open_space(now, remote, local, first, set)
        })?)
    }

    /// Begins a connection with first data: those bytes that go with the SYN, as on Linux.
    fn open_with(&mut self, fd: i32, remote: SocketAddr, bytes: &[u8]) -> Answer<Begun> {
        if !self.world.settings().has_fast_open_client() {
            return Err(Refusal::Errno(libc::EOPNOTSUPP));
        }
        match self.socket_of(fd)?.role {
            Role::Fresh | Role::Over | Role::Deferred(_) => {}
            Role::Connecting(_) => return Err(Refusal::Errno(libc::EALREADY)),
            _ => return Err(Refusal::Errno(libc::EISCONN)),
        }
        let is_bsd = self.world.settings().dialect() == Dialect::FreeBsd;
        let without_cookie = self.world.settings().fast_open_bits() & CLIENT_WITHOUT_COOKIE != 0;
        let space = match self.fast_open_space(fd, remote)? {
            _ if is_bsd => Some(bytes.len()),
            space => space,
        };
        let taken = space.map_or(0, |space| space.min(bytes.len()));
        let socket = self.socket_of(fd)?;
        let (local, options) = (socket.bound, socket.options.clone());
        let first = FirstData { bytes: &bytes[..taken], without_cookie };
        let (id, taken) = self.world.call(|shard, now| {
            shard.tcp_connect_fast(now, remote, local, first, |entry| options.apply(entry))
        })?;
        self.socket_of(fd)?.role = Role::Connecting(id);
        Ok(if taken > 0 { Begun::Taken(taken) } else { Begun::Connecting })
    }
}

/// sendto(2) with MSG_FASTOPEN, or the first write after a deferred connect: how much of `bytes` was taken, and whether
/// the rest may follow.
///
/// # Errors
/// An errno.
pub fn connect_and_send(
    interface: &Interface,
    fd: i32,
    bytes: &[u8],
    remote: SocketAddr,
    wait: Wait,
) -> Result<(usize, bool), i32> {
    let mut taken = None;
    let answer = interface.call(wait, |m| {
        let is_bsd = m.world.settings().dialect() == Dialect::FreeBsd;
        if taken.is_none() {
            match m.open_with(fd, remote, bytes)? {
                Begun::Taken(n) => {
                    taken = Some(n);
                    if is_bsd || wait == Wait::Never {
                        return Ok(false);
                    }
                }
                Begun::Connecting => taken = Some(0),
            }
            return Err(Refusal::WouldBlock);
        }
        m.connected(fd).map(|()| true)
    });
    match answer {
        Ok(goes_on) => Ok((taken.unwrap_or(0), goes_on)),
        Err(libc::EAGAIN) => Err(libc::EINPROGRESS),
        Err(errno) => Err(errno),
    }
}
