//! Datagrams and errors of a host's sockets: received as one batch, in memory that all flows of a queue share.

use std::io::IoSliceMut;
use std::net::{IpAddr, SocketAddr, SocketAddrV6};
use std::os::fd::{AsRawFd, BorrowedFd};

use fulmar_stack::ip::SentError;
use nix::sys::socket::{ControlMessageOwned, MsgFlags, SockaddrStorage, recvmsg};

use super::host_socket::{DatagramError, datagram_error_of};

/// Bytes of the longest datagram, or run of datagrams.
const LONGEST: usize = 65_536;
/// Bytes that are received before they go to the guest.
const BATCH_BYTES: usize = 4 * LONGEST;
/// Datagrams or runs that are received before they go to the guest.
const BATCH: usize = 64;
/// Errors that are passed on in one turn of a socket.
pub(crate) const ERRORS_PER_TURN: usize = 16;
/// Room for the control messages of one datagram.
const CONTROL_BYTES: usize = 256;

/// A datagram, or a run of them, in the memory of a batch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Received {
    at: usize,
    len: usize,
    /// Of a run: the length of each datagram but the last.
    pub segment_bytes: Option<u16>,
    /// The sender, for a socket that is not connected.
    pub from: Option<SocketAddr>,
    /// To which address it was sent, if the socket says so.
    pub to: Option<IpAddr>,
}

/// Datagrams that were received together, and their memory.
pub(crate) struct Batch {
    memory: Box<[u8]>,
    control: [u8; CONTROL_BYTES],
    list: Vec<Received>,
}

impl Default for Batch {
    fn default() -> Self {
        let memory = vec![0; BATCH_BYTES].into_boxed_slice();
        Batch { memory, control: [0; CONTROL_BYTES], list: Vec::new() }
    }
}

impl Batch {
    /// Receives until nothing is left, or as much as one batch takes. True: there may be more.
    pub(crate) fn fill(&mut self, fd: BorrowedFd<'_>) -> Result<bool, DatagramError> {
        self.fill_up_to(fd, BATCH)
    }

    /// The same of `most` datagrams or runs at most.
    pub(crate) fn fill_up_to(
        &mut self,
        fd: BorrowedFd<'_>,
        most: usize,
    ) -> Result<bool, DatagramError> {
        self.list.clear();
        let mut at = 0;
        while self.list.len() < most.min(BATCH) && at + LONGEST <= self.memory.len() {
            match self.receive(fd, at) {
                Ok(received) => {
                    at += received.len;
                    self.list.push(received);
                }
                Err(errno) => match datagram_error_of(errno) {
                    DatagramError::NotReady => return Ok(false),
                    DatagramError::Interrupted => {}
                    _ if !self.list.is_empty() => return Ok(true),
                    error => return Err(error),
                },
            }
        }
        Ok(true)
    }

    fn receive(&mut self, fd: BorrowedFd<'_>, at: usize) -> nix::Result<Received> {
        let memory = self.memory.get_mut(at..at + LONGEST).unwrap_or(&mut []);
        let mut parts = [IoSliceMut::new(memory)];
        let flags = MsgFlags::MSG_DONTWAIT;
        let control = Some(&mut self.control[..]);
        let message = recvmsg::<SockaddrStorage>(fd.as_raw_fd(), &mut parts, control, flags)?;
        let mut received = Received {
            at,
            len: message.bytes,
            segment_bytes: None,
            from: message.address.and_then(|a| socket_addr(&a)),
            to: None,
        };
        for c in message.cmsgs()? {
            match c {
                ControlMessageOwned::UdpGroSegments(bytes) => {
                    let bytes = u16::try_from(bytes).ok();
                    received.segment_bytes =
                        bytes.filter(|n| usize::from(*n) < received.len && *n > 0);
                }
                ControlMessageOwned::Ipv4PacketInfo(info) => {
                    received.to = Some(IpAddr::V4(u32::from_be(info.ipi_addr.s_addr).into()));
                }
                ControlMessageOwned::Ipv6PacketInfo(info) => {
                    received.to = Some(IpAddr::V6(info.ipi6_addr.s6_addr.into()));
                }
                _ => {}
            }
        }
        Ok(received)
    }

    /// The received datagrams.
    pub(crate) fn list(&self) -> &[Received] {
        &self.list
    }

    /// The bytes of one of them.
    pub(crate) fn bytes(&self, received: &Received) -> &[u8] {
        self.memory.get(received.at..received.at + received.len).unwrap_or(&[])
    }

    /// The next error that came back for something the socket has sent, with the start of its payload.
    pub(crate) fn receive_error(&mut self, fd: BorrowedFd<'_>) -> Option<(HostError, &[u8])> {
        let memory = self.memory.get_mut(..LONGEST).unwrap_or(&mut []);
        let mut parts = [IoSliceMut::new(memory)];
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_ERRQUEUE;
        let control = Some(&mut self.control[..]);
        let message =
            recvmsg::<SockaddrStorage>(fd.as_raw_fd(), &mut parts, control, flags).ok()?;
        let bytes = message.bytes;
        let about = message.address.and_then(|a| socket_addr(&a));
        let mut error = HostError { error: None, from: None, about, local: None };
        for c in message.cmsgs().ok()? {
            match c {
                ControlMessageOwned::Ipv4RecvErr(e, from) => {
                    error.error = meaning(&e);
                    error.from = from.map(|a| IpAddr::V4(u32::from_be(a.sin_addr.s_addr).into()));
                }
                ControlMessageOwned::Ipv6RecvErr(e, from) => {
                    error.error = meaning(&e);
                    error.from = from.map(|a| IpAddr::V6(a.sin6_addr.s6_addr.into()));
                }
                // The packet with the error came to the address from which the datagram was sent.
                ControlMessageOwned::Ipv4PacketInfo(info) => {
                    error.local = Some(IpAddr::V4(u32::from_be(info.ipi_addr.s_addr).into()));
                }
                ControlMessageOwned::Ipv6PacketInfo(info) => {
                    error.local = Some(IpAddr::V6(info.ipi6_addr.s6_addr.into()));
                }
                _ => {}
            }
        }
        Some((error, self.memory.get(..bytes).unwrap_or(&[])))
    }
}

/// An error of the host's network.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HostError {
    /// The error that is sent to the guest; `None`: nothing is sent.
    pub error: Option<SentError>,
    /// The sender of the error.
    pub from: Option<IpAddr>,
    /// The destination of the datagram that it is about.
    pub about: Option<SocketAddr>,
    /// The address of the host that the datagram came from, if the socket says so.
    pub local: Option<IpAddr>,
}

/// SO_EE_ORIGIN_* of linux/errqueue.h.
const LOCAL: u8 = 1;
const ICMP: u8 = 2;
const ICMP6: u8 = 3;

/// The meaning of an entry of the error queue, in ICMP's terms (RFC 792, RFC 4443).
fn meaning(e: &libc::sock_extended_err) -> Option<SentError> {
    match (e.ee_origin, e.ee_type, e.ee_code) {
        (ICMP, 3, 3) | (ICMP6, 1, 4) => Some(SentError::PortUnreachable),
        (ICMP, 3, 4) | (ICMP6, 2, _) => Some(SentError::TooBig { mtu: e.ee_info as usize }),
        (ICMP, 3, code) | (ICMP6, 1, code) => Some(SentError::Unreachable { code }),
        (ICMP, 11, code) | (ICMP6, 3, code) => Some(SentError::TimeExceeded { code }),
        (LOCAL, ..) if e.ee_errno == libc::EMSGSIZE as u32 => {
            Some(SentError::TooBig { mtu: e.ee_info as usize })
        }
        _ => None,
    }
}

/// An address of the kernel's as std has it, with the interface of a link-local one.
pub(crate) fn socket_addr(a: &SockaddrStorage) -> Option<SocketAddr> {
    if let Some(v4) = a.as_sockaddr_in() {
        return Some(SocketAddr::from((v4.ip(), v4.port())));
    }
    let v6 = a.as_sockaddr_in6()?;
    Some(SocketAddrV6::new(v6.ip(), v6.port(), 0, v6.scope_id()).into())
}
