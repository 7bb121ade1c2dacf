//! One request of rtnetlink: how many queues of a TAP or TUN are attached. Source: rtnetlink(7), linux/if_link.h.

use std::fs::File;
use std::io::{self, Read, Write};

use crate::drivers::sys;

const HEADER_BYTES: usize = 16;
/// `struct ifinfomsg`.
const LINK_BYTES: usize = 16;
/// More than the answer about one interface has.
const ANSWER_BYTES: usize = 32 << 10;

/// The queues of an interface.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Queues {
    /// Created without IFF_MULTI_QUEUE.
    One,
    /// Created with IFF_MULTI_QUEUE; the number of attached queues.
    Several(u32),
}

/// The queues of an interface in the network namespace of this thread. `None`: it is not of the kind (IFF_TAP, IFF_TUN)
/// in `flags`.
///
/// # Errors
/// ENODEV: the interface does not exist. Other errors come from the system calls.
pub(super) fn queues(name: &str, flags: libc::c_int) -> io::Result<Option<Queues>> {
    let name: Vec<u8> = name.bytes().chain([0]).collect();
    let request = Request::new(libc::RTM_GETLINK, 0, &[0; LINK_BYTES]);
    Ok(parse(&request.attribute(libc::IFLA_IFNAME, &name).exchange()?, flags))
}

/// A message to the kernel.
struct Request(Vec<u8>);

impl Request {
    fn new(kind: u16, flags: libc::c_int, message: &[u8]) -> Request {
        let flags = (libc::NLM_F_REQUEST | libc::NLM_F_ACK | flags) as u16;
        let mut bytes = vec![0; HEADER_BYTES];
        bytes[4..6].copy_from_slice(&kind.to_ne_bytes());
        bytes[6..8].copy_from_slice(&flags.to_ne_bytes());
        bytes.extend(message);
        Request(bytes)
    }

    /// Appends an attribute, padded to four bytes.
    fn attribute(mut self, kind: u16, value: &[u8]) -> Request {
        self.0.extend((value.len() as u16 + 4).to_ne_bytes());
        self.0.extend(kind.to_ne_bytes());
        self.0.extend(value);
        self.0.resize(self.0.len().next_multiple_of(4), 0);
        self
    }

    /// Sends the request and receives the answer, which the kernel queues before `send` returns.
    fn exchange(mut self) -> io::Result<Vec<u8>> {
        let bytes = self.0.len() as u32;
        self.0[..4].copy_from_slice(&bytes.to_ne_bytes());
        let socket = sys::socket(libc::AF_NETLINK, libc::SOCK_RAW, libc::NETLINK_ROUTE)?;
        let mut socket = File::from(socket);
        socket.write_all(&self.0)?;
        let mut answer = vec![0; ANSWER_BYTES];
        let n = socket.read(&mut answer)?;
        answer.truncate(n);
        match errno(&answer) {
            Some(errno) if errno != 0 => Err(io::Error::from_raw_os_error(errno)),
            _ => Ok(answer),
        }
    }
}

/// The errno of an acknowledgement.
fn errno(answer: &[u8]) -> Option<i32> {
    let is_error = half(answer, 4)? == libc::NLMSG_ERROR as u16;
    is_error.then(|| word(answer, HEADER_BYTES).map(i32::wrapping_neg)).flatten()
}

fn parse(answer: &[u8], flags: libc::c_int) -> Option<Queues> {
    // linux/if_link.h; linux/if_tun.h for the types.
    const TYPE: u16 = 3;
    const SEVERAL: u16 = 7;
    const QUEUES: u16 = 8;
    const DISABLED: u16 = 9;
    let info = find(answer.get(HEADER_BYTES + LINK_BYTES..)?, libc::IFLA_LINKINFO);
    let is_tun =
        |info: &&[u8]| find(info, libc::IFLA_INFO_KIND).is_some_and(|k| k.starts_with(b"tun\0"));
    let tun = info.filter(is_tun).and_then(|info| find(info, libc::IFLA_INFO_DATA));
    let kind = flags & (libc::IFF_TAP | libc::IFF_TUN);
    let is_kind = |tun: &&[u8]| byte(tun, TYPE).map(libc::c_int::from) == Some(kind);
    let count = |tun, kind| find(tun, kind).and_then(|v| word(v, 0)).unwrap_or(0) as u32;
    tun.filter(is_kind).map(|tun| match byte(tun, SEVERAL) {
        Some(1) => Queues::Several(count(tun, QUEUES).saturating_add(count(tun, DISABLED))),
        _ => Queues::One,
    })
}

/// The value of the first attribute of this kind.
fn find(mut row: &[u8], kind: u16) -> Option<&[u8]> {
    loop {
        let (bytes, this) = (usize::from(half(row, 0)?), half(row, 2)?);
        let value = row.get(4..bytes)?;
        // The two highest bits are flags (NLA_F_NESTED, NLA_F_NET_BYTEORDER).
        if this & 0x3fff == kind {
            return Some(value);
        }
        row = row.get(bytes.next_multiple_of(4)..)?;
    }
}

fn byte(row: &[u8], kind: u16) -> Option<u8> {
    find(row, kind)?.first().copied()
}

fn half(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

fn word(bytes: &[u8], at: usize) -> Option<i32> {
    Some(i32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(tun: &[(u16, &[u8])]) -> Vec<u8> {
        let row = |attributes: &[(u16, &[u8])]| {
            let all = attributes.iter().fold(Request(Vec::new()), |r, (k, v)| r.attribute(*k, v));
            all.0
        };
        let info = row(&[(libc::IFLA_INFO_KIND, b"tun\0"), (libc::IFLA_INFO_DATA, &row(tun))]);
        Request::new(libc::RTM_NEWLINK, 0, &[0; LINK_BYTES])
            .attribute(libc::IFLA_IFNAME, b"tap0\0")
            .attribute(libc::IFLA_LINKINFO, &info)
            .0
    }

    #[test]
    fn the_kernels_answer_about_an_interface_is_parsed() {
        let several: [(u16, &[u8]); 4] =
            [(3, &[2]), (7, &[1]), (8, &3u32.to_ne_bytes()), (9, &1u32.to_ne_bytes())];
        let tap = |tun: &[(u16, &[u8])]| parse(&answer(tun), libc::IFF_TAP);
        assert_eq!(tap(&several), Some(Queues::Several(4)));
        assert_eq!(tap(&several[..2]), Some(Queues::Several(0)));
        assert_eq!(tap(&several[..1]), Some(Queues::One));
        assert_eq!(tap(&[(3, &[1])]), None, "a TUN");
        assert_eq!(parse(&answer(&[(3, &[1])]), libc::IFF_TUN), Some(Queues::One));
        assert_eq!(parse(&answer(&several), libc::IFF_TUN), None, "a TAP");
    }

    #[test]
    fn short_and_malformed_answers_do_not_panic() {
        let whole = answer(&[(3, &[2]), (7, &[1])]);
        for n in 0..whole.len() {
            let _ = parse(&whole[..n], libc::IFF_TAP);
            let mut wrong = whole.clone();
            wrong[n] = !wrong[n];
            let _ = parse(&wrong, libc::IFF_TAP);
        }
        assert_eq!(find(&[0, 0, 0, 0, 0, 0, 0, 0], 1), None, "an attribute of no length");
    }

    #[test]
    fn an_interface_that_is_not_there_is_an_error() {
        let e = queues("none0", libc::IFF_TAP).unwrap_err();
        assert_eq!(e.raw_os_error(), Some(libc::ENODEV));
    }
}
