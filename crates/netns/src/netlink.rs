//! Just enough rtnetlink to set up a namespace: links up, veth pairs, addresses, a route, removal.
//!
//! A request is built in a `Vec<u8>`, written to a netlink socket and answered by one
//! acknowledgement; [`Netlink`] belongs to the network namespace in which it was opened, whatever
//! thread uses it later. It is written by hand because the crates for it either need an
//! asynchronous runtime or bring a dozen dependencies for these six messages.
//!
//! Sources: rtnetlink(7), linux/rtnetlink.h, linux/if_link.h, linux/veth.h.

use crate::sys;
use std::fs::File;
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::{AsRawFd, BorrowedFd};

const NLMSG_HEADER_BYTES: usize = 16;
const IFLA_INFO_KIND: u16 = 1;
const IFLA_INFO_DATA: u16 = 2;
const VETH_INFO_PEER: u16 = 1;
/// Address flag: usable at once, without duplicate address detection (RFC 4862 section 5.4).
const IFA_F_NODAD: u8 = 0x02;

/// One end of a veth pair.
#[derive(Clone, Debug)]
pub struct VethEnd<'a> {
    /// Interface name, at most 15 bytes.
    pub name: &'a str,
    /// Its hardware address.
    pub mac: [u8; 6],
    /// Its MTU in bytes.
    pub mtu: u32,
}

/// An rtnetlink socket.
pub struct Netlink {
    socket: File,
    sequence: u32,
}

/// A request under construction.
struct Request(Vec<u8>);

impl Request {
    fn new(kind: u16, flags: i32) -> Request {
        let flags = (libc::NLM_F_REQUEST | libc::NLM_F_ACK | flags) as u16;
        let mut bytes = vec![0; NLMSG_HEADER_BYTES];
        bytes[4..6].copy_from_slice(&kind.to_ne_bytes());
        bytes[6..8].copy_from_slice(&flags.to_ne_bytes());
        Request(bytes)
    }

    /// Appends an `ifinfomsg`.
    fn interface(mut self, index: u32, flags: u32, change: u32) -> Request {
        self.0.extend_from_slice(&[0; 4]);
        for word in [index, flags, change] {
            self.0.extend_from_slice(&word.to_ne_bytes());
        }
        self
    }

    /// Appends an attribute, padded to four bytes.
    fn attribute(mut self, kind: u16, value: &[u8]) -> Request {
        let len = (value.len() + 4) as u16;
        self.0.extend_from_slice(&len.to_ne_bytes());
        self.0.extend_from_slice(&kind.to_ne_bytes());
        self.0.extend_from_slice(value);
        self.0.resize(self.0.len().next_multiple_of(4), 0);
        self
    }

    /// Appends an attribute that holds what `fill` appends.
    fn nested(mut self, kind: u16, fill: impl FnOnce(Request) -> Request) -> Request {
        let at = self.0.len();
        self.0.extend_from_slice(&[0, 0]);
        self.0.extend_from_slice(&kind.to_ne_bytes());
        let mut filled = fill(self);
        let len = (filled.0.len() - at) as u16;
        filled.0[at..at + 2].copy_from_slice(&len.to_ne_bytes());
        filled
    }

    fn link(self, end: &VethEnd<'_>) -> Request {
        let name: Vec<u8> = end.name.bytes().chain([0]).collect();
        self.attribute(libc::IFLA_IFNAME, &name)
            .attribute(libc::IFLA_ADDRESS, &end.mac)
            .attribute(libc::IFLA_MTU, &end.mtu.to_ne_bytes())
    }

    fn finish(mut self, sequence: u32) -> Vec<u8> {
        let len = self.0.len() as u32;
        self.0[0..4].copy_from_slice(&len.to_ne_bytes());
        self.0[8..12].copy_from_slice(&sequence.to_ne_bytes());
        self.0
    }
}

impl Netlink {
    /// Opens a socket in the calling thread's network namespace.
    pub fn open() -> io::Result<Netlink> {
        let fd = sys::socket(libc::AF_NETLINK, libc::SOCK_RAW, libc::NETLINK_ROUTE)?;
        Ok(Netlink { socket: File::from(fd), sequence: 0 })
    }

    /// Makes a veth pair: `near` here, `far` in the namespace behind `far_netns`.
    pub fn add_veth(
        &mut self,
        near: &VethEnd<'_>,
        far: &VethEnd<'_>,
        far_netns: BorrowedFd<'_>,
    ) -> io::Result<()> {
        let netns = far_netns.as_raw_fd().to_ne_bytes();
        let peer = |data: Request| {
            data.nested(VETH_INFO_PEER, |p| {
                p.interface(0, 0, 0).link(far).attribute(libc::IFLA_NET_NS_FD, &netns)
            })
        };
        let request = Request::new(libc::RTM_NEWLINK, libc::NLM_F_CREATE | libc::NLM_F_EXCL)
            .interface(0, 0, 0)
            .link(near)
            .nested(libc::IFLA_LINKINFO, |info| {
                info.attribute(IFLA_INFO_KIND, b"veth\0").nested(IFLA_INFO_DATA, peer)
            });
        self.transact(request)
    }

    /// Sets hardware address and MTU of an interface that is down.
    pub fn configure(&mut self, index: u32, mac: [u8; 6], mtu: u32) -> io::Result<()> {
        let request = Request::new(libc::RTM_NEWLINK, 0)
            .interface(index, 0, 0)
            .attribute(libc::IFLA_ADDRESS, &mac)
            .attribute(libc::IFLA_MTU, &mtu.to_ne_bytes());
        self.transact(request)
    }

    /// Brings an interface up.
    pub fn set_up(&mut self, index: u32) -> io::Result<()> {
        let up = libc::IFF_UP as u32;
        self.transact(Request::new(libc::RTM_NEWLINK, 0).interface(index, up, up))
    }

    /// Removes an interface; both ends of a veth pair go together.
    pub fn delete(&mut self, index: u32) -> io::Result<()> {
        self.transact(Request::new(libc::RTM_DELLINK, 0).interface(index, 0, 0))
    }

    /// Gives an interface an address, and with it a route to its prefix.
    pub fn add_address(&mut self, index: u32, address: IpAddr, prefix: u8) -> io::Result<()> {
        let (family, bytes) = match address {
            IpAddr::V4(a) => (libc::AF_INET as u8, a.octets().to_vec()),
            IpAddr::V6(a) => (libc::AF_INET6 as u8, a.octets().to_vec()),
        };
        let flags = if address.is_ipv6() { IFA_F_NODAD } else { 0 };
        let mut request = Request::new(libc::RTM_NEWADDR, libc::NLM_F_CREATE | libc::NLM_F_REPLACE);
        request.0.extend_from_slice(&[family, prefix, flags, 0]);
        request.0.extend_from_slice(&index.to_ne_bytes());
        let request =
            request.attribute(libc::IFA_LOCAL, &bytes).attribute(libc::IFA_ADDRESS, &bytes);
        self.transact(request)
    }

    /// Sends everything for which there is no other route by a router on the link of an interface.
    pub fn add_default_route(&mut self, index: u32, router: Ipv4Addr) -> io::Result<()> {
        let mut request = Request::new(libc::RTM_NEWROUTE, libc::NLM_F_CREATE | libc::NLM_F_EXCL);
        // struct rtmsg: a destination of no bits, in the main table.
        let (table, protocol) = (libc::RT_TABLE_MAIN, libc::RTPROT_STATIC);
        let (scope, kind) = (libc::RT_SCOPE_UNIVERSE, libc::RTN_UNICAST);
        let family = libc::AF_INET as u8;
        request.0.extend_from_slice(&[family, 0, 0, 0, table, protocol, scope, kind, 0, 0, 0, 0]);
        let request = request
            .attribute(libc::RTA_GATEWAY, &router.octets())
            .attribute(libc::RTA_OIF, &index.to_ne_bytes());
        self.transact(request)
    }

    /// Sends a request and waits for its acknowledgement.
    fn transact(&mut self, request: Request) -> io::Result<()> {
        self.sequence = self.sequence.wrapping_add(1);
        self.socket.write_all(&request.finish(self.sequence))?;
        let mut answer = [0; 4096];
        loop {
            let n = self.socket.read(&mut answer)?;
            if let Some(errno) = acknowledgement(answer.get(..n).unwrap_or_default(), self.sequence)
            {
                return if errno == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(errno)) };
            }
        }
    }
}

/// The error number (0: done) with which the kernel answered request `sequence`, if this is it.
fn acknowledgement(message: &[u8], sequence: u32) -> Option<i32> {
    let word = |at: usize| message.get(at..at + 4)?.try_into().ok().map(u32::from_ne_bytes);
    let kind = u16::from_ne_bytes(message.get(4..6)?.try_into().ok()?);
    if kind != libc::NLMSG_ERROR as u16 || word(8)? != sequence {
        return None;
    }
    Some((word(NLMSG_HEADER_BYTES)? as i32).wrapping_neg())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_are_padded_to_four_bytes_and_lengths_are_not() {
        let bytes = Request::new(16, 0).attribute(3, b"ab\0").finish(7);
        assert_eq!(bytes.len(), 24);
        assert_eq!(bytes[0..4], 24u32.to_ne_bytes());
        assert_eq!(bytes[8..12], 7u32.to_ne_bytes());
        assert_eq!(bytes[16..18], 7u16.to_ne_bytes());
        assert_eq!(bytes[20..24], *b"ab\0\0");
    }

    #[test]
    fn a_nested_attribute_spans_what_it_holds() {
        let bytes = Request::new(16, 0).nested(18, |r| r.attribute(1, b"veth\0")).finish(1);
        assert_eq!(bytes[16..18], 16u16.to_ne_bytes());
        assert_eq!(bytes[20..22], 9u16.to_ne_bytes());
    }

    #[test]
    fn only_the_answer_to_our_own_request_counts() {
        let mut message = vec![0; 36];
        message[4..6].copy_from_slice(&2u16.to_ne_bytes());
        message[8..12].copy_from_slice(&5u32.to_ne_bytes());
        message[16..20].copy_from_slice(&(-17i32).to_ne_bytes());
        assert_eq!(acknowledgement(&message, 5), Some(17));
        assert_eq!(acknowledgement(&message, 6), None);
        assert_eq!(acknowledgement(&message[..10], 5), None);
    }
}
