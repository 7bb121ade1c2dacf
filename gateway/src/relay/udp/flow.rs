//! One UDP flow: datagrams between a port of the guest and one peer.

use std::io::IoSlice;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use fulmar_stack::base::{Duration, Instant, SlotId};
use fulmar_stack::shard::TimerId;
use fulmar_stack::udp::Datagram;
use nix::errno::Errno;
use nix::sys::socket::{ControlMessage, MsgFlags, SockaddrStorage, sendmsg};
use smallvec::SmallVec;

use super::super::way::Grant;
use super::super::{Endpoints, host_socket};
use super::first_bytes::FirstBytes;
use super::table::{Class, HostKey};
use crate::stat::Direction;

/// Idle time-out of a flow with one datagram or none in one of the directions (RFC 4787 REQ-5: at least 2 min).
pub(super) const TIMEOUT: Duration = Duration::from_secs(120);
/// Idle time-out of a flow of a published port, whose socket stays.
const PUBLISHED_TIMEOUT: Duration = Duration::from_secs(300);
/// Idle time-out of a flow with several datagrams in both directions. RFC 4787 REQ-5 recommends 5 min and more: a VPN
/// without keepalives is silent for longer, and its peer may speak first.
pub(crate) const STREAM_TIMEOUT: Duration = Duration::from_secs(900);
/// Idle time-outs of a flow to a DNS server that has not answered, and of one that has.
const DNS_TIMEOUTS: [Duration; 2] = [Duration::from_secs(30), Duration::from_secs(5)];
/// Most pieces of memory in one call.
const MOST_PARTS: usize = 128;
/// Calls for one datagram or run: each may fail by the pending error of an earlier one.
const TRIES: usize = 3;
/// The hop limit that a datagram has without being asked for (net.ipv4.ip_default_ttl).
const DEFAULT_HOP_LIMIT: u8 = 64;

/// The socket that a flow sends by. It is not connected.
pub(super) struct HostSocket {
    /// The socket, which other flows share.
    pub fd: Arc<OwnedFd>,
    /// The address of the host that a client of a published port wrote to: its answers come from there.
    pub local: Option<IpAddr>,
    /// The port of the guest for which it was opened; `None`: it is that of a published port.
    pub port: Option<SlotId>,
}

/// How many datagrams of a call to send were sent.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(super) struct Sent {
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
    pub(super) fn and(self, next: &Sent) -> Sent {
        Sent {
            datagrams: self.datagrams + next.datagrams,
            bytes: self.bytes + next.bytes,
            calls: self.calls + next.calls,
            failed: next.failed,
        }
    }
}

/// A flow.
pub(super) struct Flow {
    /// Its number, since it was added.
    pub id: u64,
    pub host: HostSocket,
    pub direction: Direction,
    pub guest: SocketAddr,
    /// The other end as the guest knows it.
    pub peer: SocketAddr,
    /// The other end as the host knows it.
    pub host_addr: SocketAddr,
    /// The name that it leads to.
    pub name: Option<Arc<str>>,
    /// The reader of the guest's datagrams to a name.
    pub first_bytes: Option<Box<FirstBytes>>,
    /// Its rule and bounds.
    pub grant: Grant,
    /// The guest asks a DNS server by it: the answers tell the policy names.
    pub is_dns: bool,
    /// The host's path takes runs (UDP_SEGMENT) of datagrams below this length; bytes.
    pub gso_limit: u16,
    pub datagrams_out: u64,
    pub datagrams_in: u64,
    pub bytes_out: u64,
    pub bytes_in: u64,
    pub began: Instant,
    /// When a datagram last passed. Those of a stranger do not count.
    pub moved: Instant,
    /// The class as which the table has it, and its time-out; the table's own.
    pub entered_as: Class,
    pub timer: Option<TimerId>,
}

impl Flow {
    /// A flow that begins.
    pub(super) fn new(
        host: HostSocket,
        direction: Direction,
        Endpoints { guest, peer, host: host_addr }: Endpoints,
        now: Instant,
    ) -> Flow {
        Flow {
            id: 0,
            host,
            direction,
            guest,
            peer,
            host_addr,
            name: None,
            first_bytes: None,
            grant: Grant::default(),
            is_dns: false,
            gso_limit: u16::MAX,
            datagrams_out: 0,
            datagrams_in: 0,
            bytes_out: 0,
            bytes_in: 0,
            began: now,
            moved: now,
            entered_as: Class::Stranger,
            timer: None,
        }
    }

    /// Its end of the host.
    pub(crate) fn host_key(&self) -> HostKey {
        (self.host.fd.as_raw_fd(), self.host_addr, self.host.local)
    }

    /// Whether it leaves by the socket of a published port.
    pub(crate) fn is_published(&self) -> bool {
        self.host.port.is_none()
    }

    /// Whether it is that of a client of a published port.
    pub(super) fn is_of_client(&self) -> bool {
        self.is_published() && self.direction == Direction::In
    }

    /// The side that began it, and whether the guest takes part.
    pub(super) fn class(&self) -> Class {
        match self.direction {
            Direction::Out => Class::Out,
            Direction::In if self.datagrams_out > 0 => Class::Answered,
            Direction::In => Class::Stranger,
        }
    }

    /// When it ends if no datagram passes.
    pub(super) fn expires(&self) -> Instant {
        // Datagrams of the guest to a port that represents a client's would go to another host later.
        let is_substitute = self.peer.port() != self.host_addr.port();
        let is_stream = is_substitute || (self.datagrams_out > 1 && self.datagrams_in > 1);
        let is_answered = self.datagrams_in >= self.datagrams_out && self.datagrams_in > 0;
        self.moved
            + match () {
                () if self.is_dns => DNS_TIMEOUTS[usize::from(is_answered)],
                () if is_stream => STREAM_TIMEOUT,
                () if self.is_published() => PUBLISHED_TIMEOUT,
                () => TIMEOUT,
            }
    }

    /// Counts datagrams to the guest.
    pub(crate) fn count_in(&mut self, datagrams: u64, bytes: u64, now: Instant) {
        self.datagrams_in += datagrams;
        self.bytes_in += bytes;
        // A host that the guest does not answer keeps nothing alive.
        if self.class() != Class::Stranger {
            self.moved = now;
        }
    }

    /// Sends datagrams of equal length, of which the last one may be shorter, or one run of the guest's: with one call,
    /// or with one each where the host's path takes no such run.
    pub(super) fn send(&mut self, datagrams: &[Datagram], now: Instant) -> Sent {
        let Some(first) = datagrams.first() else { return Sent::default() };
        let run = match datagrams.len() {
            1 => first.segment_bytes,
            _ => u16::try_from(first.payload.len()).ok(),
        };
        let mut parts: SmallVec<[IoSlice<'_>; 8]> = SmallVec::new();
        for d in datagrams {
            parts.extend(d.payload.slices().filter(|s| !s.is_empty()).map(IoSlice::new));
        }
        let hops = first.hop_limit;
        let sent = match run {
            Some(each) => self.send_run(&parts, each.max(1), hops),
            None => self.send_one(&parts, hops),
        };
        self.count_out(sent, now)
    }

    /// Sends one datagram.
    pub(super) fn send_bytes(&mut self, bytes: &[u8], hops: u8, now: Instant) -> Sent {
        let sent = self.send_one(&[IoSlice::new(bytes)], hops);
        self.count_out(sent, now)
    }

    fn count_out(&mut self, sent: Sent, now: Instant) -> Sent {
        if sent.datagrams > 0 {
            self.datagrams_out += sent.datagrams as u64;
            self.bytes_out += sent.bytes as u64;
            self.moved = now;
        }
        sent
    }

    fn send_run(&mut self, parts: &[IoSlice<'_>], each: u16, hops: u8) -> Sent {
        if each < self.gso_limit {
            match self.send_parts(parts, Some(each), hops) {
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
            let sent = self.send_one(&piece, hops);
            all = all.and(&sent);
            if sent.failed.is_some() {
                break;
            }
        }
        all
    }

    fn send_one(&self, parts: &[IoSlice<'_>], hops: u8) -> Sent {
        match self.send_parts(parts, None, hops) {
            Ok(bytes) => Sent { datagrams: 1, bytes, calls: 1, failed: None },
            Err(e) => Sent { calls: 1, failed: Some(e), ..Sent::default() },
        }
    }

    /// One call, and others where the error of an earlier datagram, perhaps to another peer, has ended it.
    fn send_parts(&self, parts: &[IoSlice<'_>], run: Option<u16>, hops: u8) -> nix::Result<usize> {
        let mut sent = self.call(parts, run, hops);
        for _ in 1..TRIES {
            match sent {
                Err(e) if host_socket::may_be_pending(e) => sent = self.call(parts, run, hops),
                _ => break,
            }
        }
        sent
    }

    fn call(&self, parts: &[IoSlice<'_>], run: Option<u16>, hops: u8) -> nix::Result<usize> {
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
        let (v4, v6) = super::publish::packet_info(self.host.local);
        let limit = i32::from(hops);
        let mut control: SmallVec<[ControlMessage<'_>; 3]> = SmallVec::new();
        control.extend(run.as_ref().map(ControlMessage::UdpGsoSegments));
        control.extend(v4.as_ref().map(ControlMessage::Ipv4PacketInfo));
        control.extend(v6.as_ref().map(ControlMessage::Ipv6PacketInfo));
        if hops != DEFAULT_HOP_LIMIT {
            control.push(host_socket::hop_limit(self.host_addr.is_ipv4(), &limit));
        }
        let to = SockaddrStorage::from(self.host_addr);
        sendmsg(self.host.fd.as_raw_fd(), parts, &control, flags, Some(&to))
    }

    /// Pieces of memory that a datagram takes of one call.
    pub(crate) fn parts_of(d: &Datagram) -> usize {
        d.payload.segs()
    }

    /// Whether `parts` are more than one sendmsg(2) takes.
    pub(super) fn is_full(parts: usize) -> bool {
        parts > MOST_PARTS
    }
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
pub(crate) fn count_of(bytes: usize, each: Option<u16>) -> usize {
    each.map_or(1, |each| bytes.div_ceil(usize::from(each).max(1)).max(1))
}

/// Divides scattered bytes into pieces of one length; the last piece may be shorter.
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
    fn a_flow_lives_as_long_as_its_kind_is_silent() {
        let socket: OwnedFd = std::fs::File::open("/dev/null").unwrap().into();
        let (fd, at) = (Arc::new(socket), SocketAddr::from(([192, 0, 2, 1], 9)));
        let ends = Endpoints { guest: at, peer: at, host: at };
        let idle = |port, is_dns, datagrams_out, datagrams_in| {
            let host = HostSocket { fd: Arc::clone(&fd), local: None, port };
            let flow = Flow::new(host, Direction::Out, ends, Instant::ZERO);
            let flow = Flow { is_dns, datagrams_out, datagrams_in, ..flow };
            flow.expires().since(Instant::ZERO).as_secs()
        };
        let own = Some(SlotId { index: 0, generation: 0 });
        assert_eq!([idle(own, false, 1, 0), idle(own, false, 1, 1)], [120, 120]);
        assert_eq!(idle(own, false, 2, 2), 900);
        assert_eq!([idle(own, true, 1, 0), idle(own, true, 1, 1)], [30, 5]);
        assert_eq!(idle(None, false, 1, 1), 300, "of a published port");
    }

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
