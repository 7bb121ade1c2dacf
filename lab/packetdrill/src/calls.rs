//! Calls with their flags, as a program makes them: which of them wait, and what a partial transfer returns.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use crate::fast_open;
use crate::interface::{Interface, Wait};
use crate::sockets::{Answer, File, Follows, Machine, Refusal};
use fulmar_stack::socket::Attempt;

/// How far and for what a call may wait.
fn waits(interface: &Interface, fd: i32, flags: i32) -> Result<Wait, i32> {
    let nonblocking = interface.call(Wait::Never, |m| match m.file(fd)? {
        File::Socket(s) => Ok(s.nonblocking),
        File::Epoll(_) => Ok(false),
    })?;
    let never = nonblocking || flags & libc::MSG_DONTWAIT != 0;
    Ok(if never { Wait::Never } else { Wait::Forever })
}

/// A socket address in the form of C: its family, then port and address in network order.
///
/// # Errors
/// EINVAL: too short. EAFNOSUPPORT: not an Internet address.
pub fn parse_address(bytes: &[u8]) -> Result<SocketAddr, i32> {
    let family = bytes.first_chunk().map(|b| i32::from(u16::from_ne_bytes(*b)));
    let port = bytes.get(2..).and_then(|b| b.first_chunk()).map(|b| u16::from_be_bytes(*b));
    let (Some(family), Some(port)) = (family, port) else { return Err(libc::EINVAL) };
    let ip: IpAddr = match family {
        libc::AF_INET => {
            let octets = bytes.get(4..).and_then(|b| b.first_chunk::<4>()).ok_or(libc::EINVAL)?;
            Ipv4Addr::from(*octets).into()
        }
        libc::AF_INET6 => {
            let octets = bytes.get(8..).and_then(|b| b.first_chunk::<16>()).ok_or(libc::EINVAL)?;
            IpAddr::from(Ipv6Addr::from(*octets)).to_canonical()
        }
        _ => return Err(libc::EAFNOSUPPORT),
    };
    Ok(SocketAddr::new(ip, port))
}

/// The inverse of [`parse_address`].
pub fn emit_address(at: SocketAddr) -> Vec<u8> {
    let mut bytes = Vec::new();
    let family = if at.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    bytes.extend((family as u16).to_ne_bytes());
    bytes.extend(at.port().to_be_bytes());
    match at.ip() {
        IpAddr::V4(ip) => {
            bytes.extend(ip.octets());
            bytes.extend([0; 8]);
        }
        IpAddr::V6(ip) => {
            bytes.extend([0; 4]);
            bytes.extend(ip.octets());
            bytes.extend([0; 4]);
        }
    }
    bytes
}

/// connect(2).
///
/// # Errors
/// An errno.
pub fn connect(interface: &Interface, fd: i32, address: &[u8]) -> Result<(), i32> {
    if address.first_chunk().map(|b| u16::from_ne_bytes(*b)) == Some(libc::AF_UNSPEC as u16) {
        return interface.call(Wait::Never, |m| m.disconnect(fd));
    }
    let remote = parse_address(address)?;
    let was_connecting = interface.call(Wait::Never, |m| Ok(m.is_connecting(fd)))?;
    let mut has_begun = false;
    let answer = interface.call(waits(interface, fd, 0)?, |m| {
        if std::mem::replace(&mut has_begun, true) {
            return m.connected(fd);
        }
        m.connect(fd, remote)
    });
    match answer {
        Err(libc::EAGAIN) if was_connecting => Err(libc::EALREADY),
        Err(libc::EAGAIN) => Err(libc::EINPROGRESS),
        answer => answer,
    }
}

/// accept(2).
///
/// # Errors
/// An errno.
pub fn accept(interface: &Interface, fd: i32) -> Result<(i32, SocketAddr), i32> {
    interface.call(waits(interface, fd, 0)?, |m| m.accept(fd))
}

/// Flags of a send that fulmar has; others that only give hints are ignored.
const REFUSED_TO_SEND: i32 = libc::MSG_OOB;

/// send(2).
///
/// # Errors
/// An errno.
pub fn send(interface: &Interface, fd: i32, bytes: &[u8], flags: i32) -> Result<usize, i32> {
    send_to(interface, fd, bytes, flags, &[])
}

/// sendto(2): the address, if there is one, is that of a connection which begins with these bytes.
///
/// # Errors
/// An errno.
pub fn send_to(
    interface: &Interface,
    fd: i32,
    bytes: &[u8],
    flags: i32,
    address: &[u8],
) -> Result<usize, i32> {
    let connects = interface.call(Wait::Never, |m| m.connects_at_send(fd))?;
    let is_open = interface.call(Wait::Never, |m| m.is_connected(fd))?;
    let asks = flags & libc::MSG_FASTOPEN != 0 && !is_open;
    if !asks && connects.is_none() {
        return send_open(interface, fd, bytes, flags);
    }
    let remote = match connects.flatten() {
        Some(remote) => remote,
        None => parse_address(address).map_err(|_| libc::EOPNOTSUPP)?,
    };
    let wait = waits(interface, fd, flags)?;
    let (taken, goes_on) = fast_open::connect_and_send(interface, fd, bytes, remote, wait)?;
    if !goes_on || taken == bytes.len() {
        return Ok(taken);
    }
    send_open(interface, fd, &bytes[taken..], flags & !libc::MSG_FASTOPEN).map(|n| taken + n)
}

fn send_open(interface: &Interface, fd: i32, bytes: &[u8], flags: i32) -> Result<usize, i32> {
    if flags & REFUSED_TO_SEND != 0 {
        return Err(libc::EOPNOTSUPP);
    }
    let follows = match flags {
        _ if flags & libc::MSG_MORE != 0 => Follows::More,
        _ if flags & libc::MSG_EOR != 0 => Follows::Record,
        _ => Follows::Nothing,
    };
    let wait = waits(interface, fd, flags)?;
    let (mut done, mut attempt) = (0, Attempt::First);
    let step = |m: &mut Machine| -> Answer<usize> {
        loop {
            match m.send(fd, &bytes[done..], follows, attempt) {
                Ok(n) => done += n,
                Err(Refusal::WouldBlock) if done > 0 && wait == Wait::Never => return Ok(done),
                Err(Refusal::Errno(_)) if done > 0 => return Ok(done),
                Err(refusal) => {
                    attempt = Attempt::Retry;
                    return Err(refusal);
                }
            }
            if done == bytes.len() {
                return Ok(done);
            }
        }
    };
    interface.call(wait, step)
}

/// recv(2): the bytes.
///
/// # Errors
/// An errno.
pub fn recv(interface: &Interface, fd: i32, max: usize, flags: i32) -> Result<Vec<u8>, i32> {
    if flags & libc::MSG_OOB != 0 {
        return Err(libc::EINVAL);
    }
    if flags & libc::MSG_ERRQUEUE != 0 {
        return Err(libc::EAGAIN);
    }
    let wait = waits(interface, fd, flags)?;
    if flags & libc::MSG_PEEK != 0 {
        return interface.call(wait, |m| m.peek(fd, max));
    }
    let waits_for_all = flags & libc::MSG_WAITALL != 0 && wait != Wait::Never;
    interface.call(wait, |m| {
        let low_water = m.socket_of(fd)?.options.recv_low_water;
        m.recv(fd, max, if waits_for_all { max } else { low_water.min(max) })
    })
}

/// fcntl(2): F_GETFL and F_SETFL.
///
/// # Errors
/// An errno.
pub fn fcntl(interface: &Interface, fd: i32, command: i32, argument: i32) -> Result<i32, i32> {
    interface.call(Wait::Never, |m| {
        let socket = m.socket_of(fd)?;
        match command {
            libc::F_GETFL if socket.nonblocking => Ok(libc::O_RDWR | libc::O_NONBLOCK),
            libc::F_GETFL => Ok(libc::O_RDWR),
            libc::F_SETFL => {
                socket.nonblocking = argument & libc::O_NONBLOCK != 0;
                Ok(0)
            }
            _ => Err(Refusal::Errno(libc::EINVAL)),
        }
    })
}

/// SIOCOUTQNSD (include/uapi/linux/sockios.h): bytes not sent.
const SIOCOUTQNSD: u64 = 0x894b;

/// ioctl(2): the lengths of the queues.
///
/// # Errors
/// An errno.
pub fn ioctl(interface: &Interface, fd: i32, request: u64) -> Result<i32, i32> {
    interface.call(Wait::Never, |m| {
        let id = m.socket_of(fd)?.stream().ok_or(Refusal::Errno(libc::EINVAL))?;
        let info = m.world.shard().tcp_entry(id)?.tcb.info();
        match request {
            libc::FIONREAD => Ok(info.recv_queue_bytes as i32),
            libc::TIOCOUTQ => Ok(info.send_queue_bytes as i32),
            SIOCOUTQNSD => Ok(info.unsent_bytes as i32),
            _ => Err(Refusal::Errno(libc::ENOTTY)),
        }
    })
}

/// A time-out in milliseconds, negative for none.
fn until(interface: &Interface, timeout_ms: i32) -> Wait {
    match u64::try_from(timeout_ms) {
        Ok(0) => Wait::Never,
        Ok(ms) => Wait::Until(interface.now() + std::time::Duration::from_millis(ms)),
        Err(_) => Wait::Forever,
    }
}

/// poll(2): the events of each of `asked`, which are descriptors with the events of interest.
///
/// # Errors
/// An errno.
pub fn poll(interface: &Interface, asked: &[(i32, i16)], timeout_ms: i32) -> Result<Vec<i16>, i32> {
    let answer = interface.call(until(interface, timeout_ms), |m| {
        let found: Vec<i16> = asked.iter().map(|(fd, events)| polled(m, *fd, *events)).collect();
        if found.iter().any(|events| *events != 0) { Ok(found) } else { Err(Refusal::WouldBlock) }
    });
    match answer {
        Err(libc::EAGAIN) => Ok(vec![0; asked.len()]),
        answer => answer,
    }
}

fn polled(machine: &mut Machine, fd: i32, events: i16) -> i16 {
    let always = libc::POLLERR | libc::POLLHUP;
    match machine.readiness(fd) {
        _ if fd < 0 => 0,
        Ok(ready) => ready.events & (events | always),
        Err(_) => libc::POLLNVAL,
    }
}

/// epoll_wait(2).
///
/// # Errors
/// An errno.
pub fn epoll_wait(
    interface: &Interface,
    fd: i32,
    max: usize,
    timeout_ms: i32,
) -> Result<Vec<(u32, u64)>, i32> {
    let answer = interface.call(until(interface, timeout_ms), |m| {
        m.note_edges();
        let told = m.with_epoll(fd, |epoll, _| epoll.take(max))?;
        if told.is_empty() { Err(Refusal::WouldBlock) } else { Ok(told) }
    });
    match answer {
        Err(libc::EAGAIN) => Ok(Vec::new()),
        answer => answer,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_keeps_its_form() {
        for text in ["192.0.2.1:8080", "[2001:db8::1]:8080"] {
            let at: SocketAddr = text.parse().unwrap();
            assert_eq!(parse_address(&emit_address(at)), Ok(at));
        }
        assert_eq!(parse_address(&[2, 0, 0]), Err(libc::EINVAL));
    }

    #[test]
    fn poll_ends_after_its_time_out_on_the_virtual_clock() {
        let interface = Interface::new(Machine::default());
        let fd = interface.call(Wait::Never, |m| m.socket(libc::AF_INET, libc::SOCK_STREAM, 0));
        let fd = fd.unwrap();
        let address = emit_address("192.0.2.1:80".parse().unwrap());
        fcntl(&interface, fd, libc::F_SETFL, libc::O_NONBLOCK).unwrap();
        assert_eq!(connect(&interface, fd, &address), Err(libc::EINPROGRESS));
        assert_eq!(connect(&interface, fd, &address), Err(libc::EALREADY));
        let before = interface.clock_us();
        assert_eq!(poll(&interface, &[(fd, libc::POLLOUT)], 2500), Ok(vec![0]));
        assert_eq!(interface.clock_us() - before, 2_500_000);
    }
}
