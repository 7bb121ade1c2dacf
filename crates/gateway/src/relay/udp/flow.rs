//! One UDP flow: datagrams between a port of the guest and one peer.

use std::io::IoSlice;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use fulmar_base::{Duration, Instant};
use fulmar_udp::Datagram;
use nix::errno::Errno;
use nix::sys::socket::{
    ControlMessage, MsgFlags, SockType, SockaddrStorage, sendmsg, setsockopt, sockopt,
};
use smallvec::SmallVec;

use super::super::host;
use crate::config::Outbound;
use crate::stat::Direction;

/// How long a flow may rest that went both ways more than once, as Linux's net.netfilter has it for streams
/// (nf_conntrack_udp_timeout_stream was 180 s, and is 120 s today).
const STREAM_REST: Duration = Duration::from_secs(180);
/// The same of any other flow (RFC 4787 section 4.3 asks for 2 min, but for well-known services; Linux has 30 s).
const ONE_SHOT_REST: Duration = Duration::from_secs(30);
/// The same of a question to a resolver that was answered.
const DNS_REST: Duration = Duration::from_secs(5);
/// Pieces of memory that one call names at most.
const MOST_PARTS: usize = 128;

/// The socket that a flow sends by.
pub enum HostSocket {
    /// Its own, connected to the peer.
    Own(OwnedFd),
    /// That of a published port; with the client, and the address that the client wrote to.
    Published { socket: Arc<OwnedFd>, client: SocketAddr, local: Option<std::net::IpAddr> },
}

impl HostSocket {
    /// Whether it is that of a published port.
    pub fn is_published(&self) -> bool {
        matches!(self, HostSocket::Published { .. })
    }
}

/// A flow.
pub struct Flow {
    pub host: HostSocket,
    pub direction: Direction,
    pub guest: SocketAddr,
    /// The other end as the guest knows it.
    pub peer: SocketAddr,
    /// The other end as the host knows it.
    pub host_addr: SocketAddr,
    pub is_dns: bool,
    /// The host's path does not take runs (UDP_SEGMENT).
    pub lacks_runs: bool,
    pub is_queued: bool,
    /// The last turn in which something came from the host.
    pub received_in: u64,
    pub datagrams_out: u64,
    pub datagrams_in: u64,
    pub bytes_out: u64,
    pub bytes_in: u64,
    pub began: Instant,
    pub moved: Instant,
}

impl Flow {
    /// When it is given up if nothing moves.
    pub fn expires(&self) -> Instant {
        let is_stream = self.datagrams_out > 1 && self.datagrams_in > 1;
        let is_answered = self.datagrams_in >= self.datagrams_out && self.datagrams_in > 0;
        self.moved
            + match () {
                () if self.is_dns && is_answered => DNS_REST,
                () if is_stream => STREAM_REST,
                () => ONE_SHOT_REST,
            }
    }

    /// Sends datagrams of equal length, of which the last one may be shorter, or one run.
    pub fn send(&mut self, datagrams: &[Datagram], now: Instant) -> nix::Result<()> {
        let Some(first) = datagrams.first() else { return Ok(()) };
        let bytes: usize = datagrams.iter().map(|d| d.payload.len()).sum();
        let run = match datagrams.len() {
            1 => first.segment_bytes,
            _ => u16::try_from(first.payload.len()).ok(),
        };
        let mut parts: SmallVec<[IoSlice<'_>; 8]> = SmallVec::new();
        for d in datagrams {
            parts.extend(d.payload.slices().filter(|s| !s.is_empty()).map(IoSlice::new));
        }
        self.send_parts(&parts, run)?;
        let count = run.map_or(1, |each| bytes.div_ceil(usize::from(each).max(1)) as u64);
        self.datagrams_out += count.max(datagrams.len() as u64);
        self.bytes_out += bytes as u64;
        self.moved = now;
        Ok(())
    }

    fn send_parts(&self, parts: &[IoSlice<'_>], run: Option<u16>) -> nix::Result<usize> {
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
        let segments = run.as_ref().map(ControlMessage::UdpGsoSegments);
        match &self.host {
            HostSocket::Own(fd) => {
                let control: SmallVec<[ControlMessage<'_>; 2]> = segments.into_iter().collect();
                sendmsg::<()>(fd.as_raw_fd(), parts, &control, flags, None)
            }
            HostSocket::Published { socket, client, local } => {
                let (v4, v6) = super::publish::packet_info(*local);
                let mut control: SmallVec<[ControlMessage<'_>; 2]> = segments.into_iter().collect();
                control.extend(v4.as_ref().map(ControlMessage::Ipv4PacketInfo));
                control.extend(v6.as_ref().map(ControlMessage::Ipv6PacketInfo));
                let to = SockaddrStorage::from(*client);
                sendmsg(socket.as_raw_fd(), parts, &control, flags, Some(&to))
            }
        }
    }

    /// Pieces of memory that a datagram takes of one call.
    pub fn parts_of(d: &Datagram) -> usize {
        d.payload.segs()
    }

    /// Whether so many pieces are too many.
    pub fn is_full(parts: usize) -> bool {
        parts > MOST_PARTS
    }
}

/// A socket of the host for a flow of the guest's.
pub fn open(to: SocketAddr, outbound: &Outbound) -> nix::Result<OwnedFd> {
    let fd = host::open(to.is_ipv4(), SockType::Datagram, None)?;
    host::bind_outbound(&fd, to, outbound)?;
    match to {
        SocketAddr::V4(_) => setsockopt(&fd, sockopt::Ipv4RecvErr, &true)?,
        SocketAddr::V6(_) => setsockopt(&fd, sockopt::Ipv6RecvErr, &true)?,
    }
    // Older kernels hand over each datagram by itself.
    let _ = setsockopt(&fd, sockopt::UdpGroSegment, &true);
    host::connect_to(&fd, to)?;
    Ok(fd)
}

/// Whether a run was refused for being one, so that its datagrams may go one by one.
pub fn refuses_runs(errno: Errno) -> bool {
    matches!(errno, Errno::EINVAL | Errno::EIO | Errno::EMSGSIZE | Errno::EOPNOTSUPP)
}

/// Whether a failed call may mean that the host has lost the flow's address, so that another socket can send. With
/// `segment_bytes` it was a run of the guest's: older Linux has EINVAL where its segments exceed the path's MTU
/// (net/ipv4/udp.c, udp_send_skb), and another socket would change the flow's port for nothing.
pub fn wants_another_socket(errno: Errno, segment_bytes: Option<u16>) -> bool {
    host::may_be_of_lost_address(errno) && (errno != Errno::EINVAL || segment_bytes.is_none())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flow_keeps_its_port_where_a_run_of_the_guest_is_refused() {
        for (errno, segment_bytes, wants_it) in [
            (Errno::EINVAL, None, true),
            (Errno::EINVAL, Some(1400), false),
            (Errno::ENETUNREACH, None, true),
            (Errno::ENETUNREACH, Some(1400), true),
            (Errno::ECONNREFUSED, None, false),
        ] {
            assert_eq!(wants_another_socket(errno, segment_bytes), wants_it, "{errno}");
        }
    }
}
