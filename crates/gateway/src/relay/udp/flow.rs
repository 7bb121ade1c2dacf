//! One UDP flow: datagrams between a port of the guest and one peer.

use std::io::IoSlice;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
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

/// Idle time-out of a flow with several datagrams in both directions, as Linux's conntrack has it for streams
/// (nf_conntrack_udp_timeout_stream was 180 s, and is 120 s today).
const STREAM_TIMEOUT: Duration = Duration::from_secs(180);
/// Idle time-out of any other flow: that of Linux (nf_conntrack_udp_timeout). RFC 4787 section 4.3 asks for 2 min, but
/// for well-known services.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Idle time-out of a flow to a DNS server that has answered.
const DNS_TIMEOUT: Duration = Duration::from_secs(5);
/// Pieces of memory that one call names at most.
const MOST_PARTS: usize = 128;

/// A client of a published port: its address, the one that it wrote to, and the socket of the port, which its flow
/// keeps open.
pub type ClientKey = (SocketAddr, Option<IpAddr>, RawFd);

/// The socket that a flow sends by.
pub enum HostSocket {
    /// Its own, connected to the peer.
    Own(OwnedFd),
    /// That of a published port; with the client, and the address that the client wrote to.
    Published { socket: Arc<OwnedFd>, client: SocketAddr, local: Option<IpAddr> },
}

impl HostSocket {
    /// Which client of which published port it leads to.
    pub fn client_key(&self) -> Option<ClientKey> {
        match self {
            HostSocket::Own(_) => None,
            HostSocket::Published { socket, client, local } => {
                Some((*client, *local, socket.as_raw_fd()))
            }
        }
    }

    /// Whether it is that of a published port.
    pub fn is_published(&self) -> bool {
        matches!(self, HostSocket::Published { .. })
    }
}

/// How many datagrams of a call to send were sent.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Sent {
    /// Datagrams that have left.
    pub datagrams: usize,
    /// Their payload.
    pub bytes: usize,
    /// Calls that it took.
    pub calls: usize,
    /// Why the others have not left.
    pub failed: Option<Errno>,
}

impl Sent {
    /// The sum with what was sent next.
    fn and(self, next: &Sent) -> Sent {
        Sent {
            datagrams: self.datagrams + next.datagrams,
            bytes: self.bytes + next.bytes,
            calls: self.calls + next.calls,
            failed: next.failed,
        }
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
    /// The guest asks a DNS server by it: the answers tell the policy names.
    pub is_dns: bool,
    /// The host's path takes runs (UDP_SEGMENT) of datagrams below this length; bytes.
    pub gso_limit: u16,
    pub is_queued: bool,
    /// Calls in a row that failed with an error which the error queue does not have.
    pub failures: usize,
    /// The last turn in which datagrams came from the host.
    pub last_receive_turn: u64,
    pub datagrams_out: u64,
    pub datagrams_in: u64,
    pub bytes_out: u64,
    pub bytes_in: u64,
    pub began: Instant,
    pub moved: Instant,
}

impl Flow {
    /// When it ends if no datagram passes.
    pub fn expires(&self) -> Instant {
        // What the guest sends to a port that stands for a client's would go to a stranger later.
        let is_substitute = self.host.is_published() && self.peer.port() != self.host_addr.port();
        let is_stream = is_substitute || (self.datagrams_out > 1 && self.datagrams_in > 1);
        let is_answered = self.datagrams_in >= self.datagrams_out && self.datagrams_in > 0;
        self.moved
            + match () {
                () if self.is_dns && is_answered => DNS_TIMEOUT,
                () if is_stream => STREAM_TIMEOUT,
                () => TIMEOUT,
            }
    }

    /// Sends datagrams of equal length, of which the last one may be shorter, or one run of the guest's: with one call,
    /// or with one each where the host's path takes no such run.
    pub fn send(&mut self, datagrams: &[Datagram], now: Instant) -> Sent {
        let Some(first) = datagrams.first() else { return Sent::default() };
        let run = match datagrams.len() {
            1 => first.segment_bytes,
            _ => u16::try_from(first.payload.len()).ok(),
        };
        let mut parts: SmallVec<[IoSlice<'_>; 8]> = SmallVec::new();
        for d in datagrams {
            parts.extend(d.payload.slices().filter(|s| !s.is_empty()).map(IoSlice::new));
        }
        let sent = match run {
            Some(each) => self.send_run(&parts, each.max(1)),
            None => self.send_one(&parts),
        };
        if sent.datagrams > 0 {
            self.datagrams_out += sent.datagrams as u64;
            self.bytes_out += sent.bytes as u64;
            self.moved = now;
        }
        sent
    }

    fn send_run(&mut self, parts: &[IoSlice<'_>], each: u16) -> Sent {
        if each < self.gso_limit {
            match self.send_parts(parts, Some(each)) {
                Err(e) => match gso_limit_after(e, each) {
                    Some(limit) => self.gso_limit = limit,
                    None => return Sent { calls: 1, failed: Some(e), ..Sent::default() },
                },
                Ok(bytes) => {
                    let datagrams = count_of(bytes, Some(each));
                    return Sent { datagrams, bytes, calls: 1, failed: None };
                }
            }
        }
        let mut all = Sent::default();
        for piece in pieces(parts, each.into()) {
            let sent = self.send_one(&piece);
            all = all.and(&sent);
            if sent.failed.is_some() {
                break;
            }
        }
        all
    }

    fn send_one(&self, parts: &[IoSlice<'_>]) -> Sent {
        match self.send_parts(parts, None) {
            Ok(bytes) => Sent { datagrams: 1, bytes, calls: 1, failed: None },
            Err(e) => Sent { calls: 1, failed: Some(e), ..Sent::default() },
        }
    }

    /// One call, and a second one where the error of an earlier datagram has ended the first.
    fn send_parts(&self, parts: &[IoSlice<'_>], run: Option<u16>) -> nix::Result<usize> {
        match self.call(parts, run) {
            Err(e) if host::may_be_pending(e) => self.call(parts, run),
            sent => sent,
        }
    }

    fn call(&self, parts: &[IoSlice<'_>], run: Option<u16>) -> nix::Result<usize> {
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

    /// Whether `parts` are more than one sendmsg(2) takes.
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

/// The new [`Flow::gso_limit`] after an errno of a run whose datagrams have a length (net/ipv4/udp.c, udp_send_skb):
/// that length where it exceeds the path's MTU (EMSGSIZE, of older Linux EINVAL), 0 where the device computes no
/// checksums or the packets are encrypted (EIO). `None`: the errno is about something else, or about each datagram.
fn gso_limit_after(errno: Errno, each: u16) -> Option<u16> {
    match errno {
        Errno::EMSGSIZE | Errno::EINVAL => Some(each),
        Errno::EIO | Errno::EOPNOTSUPP => Some(0),
        _ => None,
    }
}

/// How many datagrams `bytes` are: `each` bytes long but for the last (udp(7), UDP_GRO), or one if `each` is `None`.
pub fn count_of(bytes: usize, each: Option<u16>) -> usize {
    each.map_or(1, |each| bytes.div_ceil(usize::from(each).max(1)).max(1))
}

/// Cuts bytes that lie in several places into pieces of a length, the last of which may be shorter.
fn pieces<'a>(parts: &'a [IoSlice<'_>], each: usize) -> Vec<SmallVec<[IoSlice<'a>; 4]>> {
    let (mut pieces, mut piece, mut space) = (Vec::new(), SmallVec::new(), each);
    for part in parts {
        let mut rest: &[u8] = part;
        while !rest.is_empty() {
            let (head, tail) = rest.split_at(rest.len().min(space));
            piece.push(IoSlice::new(head));
            (rest, space) = (tail, space - head.len());
            if space == 0 {
                pieces.push(std::mem::take(&mut piece));
                space = each;
            }
        }
    }
    if !piece.is_empty() {
        pieces.push(piece);
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_length_from_which_on_runs_are_refused_follows_the_errno() {
        for (errno, refused) in [
            (Errno::EMSGSIZE, Some(1400)),
            (Errno::EINVAL, Some(1400)),
            (Errno::EIO, Some(0)),
            (Errno::EOPNOTSUPP, Some(0)),
            (Errno::EAGAIN, None),
            (Errno::ENETUNREACH, None),
            (Errno::ECONNREFUSED, None),
        ] {
            assert_eq!(gso_limit_after(errno, 1400), refused, "{errno}");
        }
    }

    #[test]
    fn a_run_is_cut_into_its_datagrams_wherever_its_bytes_lie() {
        let bytes: Vec<u8> = (0..100).collect();
        for cuts in [vec![], vec![1], vec![10, 20], vec![5, 6, 7, 95], vec![30]] {
            let mut places = Vec::new();
            let mut from = 0;
            for to in cuts.into_iter().chain([bytes.len()]) {
                places.push(IoSlice::new(&bytes[from..to]));
                from = to;
            }
            for each in [1, 7, 10, 33, 100, 200] {
                let cut = pieces(&places, each);
                let whole: Vec<Vec<u8>> =
                    cut.iter().map(|p| p.iter().flat_map(|s| s.to_vec()).collect()).collect();
                let wanted: Vec<Vec<u8>> = bytes.chunks(each).map(<[u8]>::to_vec).collect();
                assert_eq!(whole, wanted, "{each}");
                assert_eq!(whole.len(), count_of(bytes.len(), Some(each as u16)));
            }
        }
    }
}
