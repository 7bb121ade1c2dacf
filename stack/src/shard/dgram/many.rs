//! Many datagrams in one call: one lock, one pass through the protocols, one crossing per burst.
//!
//! Datagrams that follow each other, to the same destination and of equal size, leave as one super-frame where the
//! device cuts such (UDP segmentation): one buffer, one set of headers, one frame. On the wire they are unchanged.

use core::net::SocketAddr;
use core::task::Poll;

use crate::base::{Counter, Instant, SlotId, Stage};
use crate::socket::SocketError;

use crate::shard::dgram::calls::{UdpSockets, udp_error};
use crate::shard::dgram::layer::Udp;
use crate::shard::dgram::output::{PendingError, SendRequest};
use crate::shard::layers::Core;
use crate::shard::link::net::Net;
use crate::shard::sockets::Socket;

/// Messages that go or come under the lock at a time, so that it is never held long.
const MOST_MESSAGES: usize = 64;
/// Bytes copied under the lock at a time, beyond the message that passes it.
const MOST_BYTES: usize = 128 << 10;
/// Most datagrams that are joined to one super-frame: Linux's limit before 6.9.
const MOST_JOINED: usize = 64;
/// Payload of a super-frame at most, whatever the IP version.
const MOST_JOINED_BYTES: usize = 65_000;
/// The longest headers of a datagram: IPv6 and UDP.
const HEADERS_BYTES: usize = 48;

/// One datagram to be sent, or a run of datagrams: an entry of what `sendmmsg(2)` takes.
#[derive(Clone, Copy, Debug)]
pub struct SendMessage<'a> {
    payload: &'a [u8],
    to: Option<SocketAddr>,
    from: Option<SocketAddr>,
    segment_bytes: Option<u16>,
    tos: Option<u8>,
}

impl<'a> SendMessage<'a> {
    /// A datagram to the connected peer.
    pub const fn new(payload: &'a [u8]) -> SendMessage<'a> {
        SendMessage { payload, to: None, from: None, segment_bytes: None, tos: None }
    }

    /// The same to another destination.
    #[must_use]
    pub const fn to(self, remote: SocketAddr) -> SendMessage<'a> {
        SendMessage { to: Some(remote), ..self }
    }

    /// The same from another source address (IP_PKTINFO): one of the stack, or with
    /// [`StackConfig::any_ip`](crate::shard::StackConfig::any_ip) any (IP_TRANSPARENT). The port is that of the socket
    /// or 0; a socket that is bound to every port has to give it.
    #[must_use]
    pub const fn from(self, source: SocketAddr) -> SendMessage<'a> {
        SendMessage { from: Some(source), ..self }
    }

    /// The payload is a run of at most 128 datagrams of this number of bytes each; the last one has the remainder
    /// (Linux's UDP_SEGMENT). The device segments the run, or software before the device does. 0: one datagram.
    #[must_use]
    pub const fn segmented(self, segment_bytes: u16) -> SendMessage<'a> {
        SendMessage { segment_bytes: Some(segment_bytes), ..self }
    }

    /// The same with another TOS or traffic class than the socket has (a control message IP_TOS or IPV6_TCLASS): the
    /// lower two bits are ECN.
    #[must_use]
    pub const fn tos(self, tos: u8) -> SendMessage<'a> {
        SendMessage { tos: Some(tos), ..self }
    }
}

/// Space for one received datagram: an entry of what `recvmmsg(2)` takes.
pub struct RecvMessage<'a> {
    buffer: &'a mut [u8],
    len: usize,
    sent_len: usize,
    from: Option<SocketAddr>,
    to: Option<SocketAddr>,
    segment_bytes: Option<u16>,
    tos: u8,
}

/// Without the bytes.
impl core::fmt::Debug for RecvMessage<'_> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("RecvMessage")
            .field("buffer_bytes", &self.buffer.len())
            .field("len", &self.len)
            .field("sent_len", &self.sent_len)
            .field("from", &self.from)
            .field("to", &self.to)
            .field("segment_bytes", &self.segment_bytes)
            .field("tos", &self.tos)
            .finish()
    }
}

impl<'a> RecvMessage<'a> {
    /// Space for as much as `buffer` holds; a longer datagram is truncated.
    pub fn new(buffer: &'a mut [u8]) -> RecvMessage<'a> {
        RecvMessage {
            buffer,
            len: 0,
            sent_len: 0,
            from: None,
            to: None,
            segment_bytes: None,
            tos: 0,
        }
    }

    /// The received bytes.
    pub fn payload(&self) -> &[u8] {
        self.buffer.get(..self.len).unwrap_or(&[])
    }

    /// The sender; `None` before a datagram was received.
    pub fn from(&self) -> Option<SocketAddr> {
        self.from
    }

    /// Its destination (IP_PKTINFO); `None` before something came.
    pub fn to(&self) -> Option<SocketAddr> {
        self.to
    }

    /// The length of each datagram, if it is a run of several: the last one has the rest. Only of a socket
    /// that receives runs (UDP_GRO).
    pub fn segment_bytes(&self) -> Option<u16> {
        self.segment_bytes
    }

    /// Its TOS or traffic class (IP_RECVTOS, IPV6_RECVTCLASS): the lower two bits are ECN. 0 before something came.
    pub fn tos(&self) -> u8 {
        self.tos
    }

    /// Whether it was longer than the buffer.
    pub fn is_truncated(&self) -> bool {
        self.sent_len > self.len
    }

    /// How long the datagram was.
    pub fn sent_len(&self) -> usize {
        self.sent_len
    }
}

/// Result of a call for many messages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SentMany {
    /// How many went, the first ones.
    pub messages: usize,
    /// The next one cannot go: the call is over.
    pub is_over: bool,
}

impl UdpSockets<'_> {
    /// Sends the first of some messages, up to the limit for one hold of the lock. With [`PendingError::Leave`], for
    /// the further steps of a call, no error is returned.
    ///
    /// # Errors
    /// As [`UdpSockets::send`], for the first message. An error of a later message ends the call there; the next call,
    /// which begins with that message, returns the error.
    pub fn send_many(
        self,
        now: Instant,
        id: SlotId,
        messages: &[SendMessage<'_>],
        error: PendingError,
    ) -> Result<Poll<SentMany>, SocketError> {
        let UdpSockets { shard } = self;
        let (mut done, mut bytes, mut joins, mut failed) = (0, 0, true, None);
        while done < messages.len().min(MOST_MESSAGES) && bytes < MOST_BYTES {
            let rest = messages.get(done..).unwrap_or(&[]);
            let alike = if joins { shard.core.net.run_of(rest) } else { 1 };
            let run = rest.get(..alike).unwrap_or(rest);
            let error = if done == 0 { error } else { PendingError::Leave };
            match shard.udp.send_run(now, id, run, error, &mut shard.core) {
                Ok(sent) => (done, bytes) = (done + run.len(), bytes + sent),
                // The path MTU is below the MTU of the link: each datagram is sent by itself, in fragments if need be.
                Err(SocketError::MessageTooLong) if run.len() > 1 => joins = false,
                Err(e) => {
                    failed = Some(e);
                    break;
                }
            }
        }
        shard.core.net.link.set_now(now);
        shard.finish_datagrams(now);
        match failed {
            Some(e @ (SocketError::NoBuffer | SocketError::WouldBlock)) if done == 0 => {
                shard.core.wait_to_send(now, id, e);
                Ok(Poll::Pending)
            }
            Some(SocketError::NoBuffer | SocketError::WouldBlock) | None => {
                Ok(Poll::Ready(SentMany { messages: done, is_over: false }))
            }
            Some(e) if error == PendingError::Return && done == 0 => Err(e),
            Some(_) => Ok(Poll::Ready(SentMany { messages: done, is_over: true })),
        }
    }

    /// Copies the oldest queued datagrams into `into`, up to the limit for one hold of the lock.
    ///
    /// # Errors
    /// An error that came back for an earlier datagram.
    pub fn receive_many(
        &mut self,
        id: SlotId,
        into: &mut [RecvMessage<'_>],
    ) -> Result<Poll<usize>, SocketError> {
        let Core { sockets, net, events, .. } = &mut self.shard.core;
        let down = events.down;
        let entry = match sockets.get_mut(id) {
            Some(Socket::Udp(s)) => s,
            Some(_) => return Err(SocketError::NotSupported),
            None => return Err(SocketError::BadHandle),
        };
        if let Some(e) = entry.socket.take_error() {
            return Err(udp_error(e));
        }
        let (mut came, mut bytes) = (0, 0);
        for message in into.iter_mut().take(MOST_MESSAGES) {
            if bytes >= MOST_BYTES {
                break;
            }
            let Some(d) = entry.socket.receive() else { break };
            message.len = d.payload.copy_to(0, message.buffer);
            message.sent_len = d.payload.len();
            (message.from, message.to) = (Some(d.src), Some(d.dst));
            (message.segment_bytes, message.tos) = (d.segment_bytes, d.dscp_ecn);
            (came, bytes) = (came + 1, bytes + message.len);
            net.pool.free(d.payload);
        }
        net.counters.add(Counter::CopiedBytes, bytes as u64);
        net.pass(Stage::ReceiveCopied);
        match (came, down) {
            (0, Some(e)) => Err(e),
            (0, None) if !into.is_empty() => Ok(Poll::Pending),
            (n, _) => Ok(Poll::Ready(n)),
        }
    }
}

impl Net {
    /// How many of the first messages leave as one frame, at least 1.
    fn run_of(&self, messages: &[SendMessage<'_>]) -> usize {
        let Some((first, rest)) = messages.split_first() else { return 0 };
        let (caps, bytes) = (self.link.caps(), first.payload.len());
        let fits = bytes > 0 && bytes.saturating_add(HEADERS_BYTES) <= self.ip.mtu();
        let may_join = caps.udp_gso && caps.tx_csum && first.segment_bytes.is_none();
        if !(may_join && fits) {
            return 1;
        }
        let device_bytes = caps.tso.unwrap_or(usize::MAX).saturating_sub(HEADERS_BYTES);
        let most = MOST_JOINED_BYTES.min(device_bytes) / bytes;
        let most = most.clamp(1, MOST_JOINED);
        let is_same = |m: &SendMessage<'_>| {
            (m.to, m.from, m.tos) == (first.to, first.from, first.tos) && m.segment_bytes.is_none()
        };
        let is_like = |m: &&SendMessage<'_>| is_same(m) && m.payload.len() == bytes;
        let alike = 1 + rest.iter().take(most - 1).take_while(is_like).count();
        // The last one of a run may be shorter, but not empty.
        let may_end = |m: &SendMessage<'_>| {
            let len = m.payload.len();
            is_same(m) && (1..bytes).contains(&len)
        };
        let has_end = alike < most && messages.get(alike).is_some_and(may_end);
        alike + usize::from(has_end)
    }
}

impl Udp {
    /// Sends one message, or several as one run; returns the bytes.
    fn send_run(
        &mut self,
        now: Instant,
        id: SlotId,
        run: &[SendMessage<'_>],
        error: PendingError,
        core: &mut Core,
    ) -> Result<usize, SocketError> {
        let Some(first) = run.first() else { return Ok(0) };
        let bytes = run.iter().map(|m| m.payload.len()).sum();
        let parts = run.iter().map(|m| m.payload);
        let joined = (run.len() > 1).then_some(first.payload.len() as u16);
        let segment_bytes = joined.or(first.segment_bytes);
        let SendMessage { to, from, tos: dscp_ecn, .. } = *first;
        let request = SendRequest { parts, bytes, to, from, segment_bytes, dscp_ecn, error };
        self.output(now, id, &request, core).map(|_| bytes)
    }
}
