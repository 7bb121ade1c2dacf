//! The state of a UDP socket.

use alloc::collections::VecDeque;
use core::net::SocketAddr;

use crate::base::{Counter, Counters, DropReason, MtuDiscovery};
use crate::mbuf::Pool;

use crate::udp::{Datagram, charge};

/// Maximum length of a receive queue, datagrams. Empty datagrams are charged nothing, so bytes
/// alone would not bound the queue.
const MAX_DATAGRAMS: usize = 4096;
/// Default SO_RCVBUF: 256 KiB, or 256 tiny datagrams. Linux's default is 212,992 bytes of truesize.
const DEFAULT_RECV_LIMIT_BYTES: usize = 256 * 1024;
/// Capacity to which an empty queue shrinks after a burst, datagrams.
const IDLE_CAPACITY: usize = 64;

/// A pending error caused by an earlier datagram (ICMP).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum UdpError {
    /// Port unreachable (ECONNREFUSED).
    ConnectionRefused,
    /// Host unreachable (EHOSTUNREACH).
    HostUnreachable,
    /// The datagram exceeded the path MTU (EMSGSIZE).
    MessageTooLong,
}

/// The state of a UDP socket: addresses, options, receive queue, pending error. The stack's socket
/// table owns it.
#[derive(Debug, Default)]
pub struct UdpSocket {
    /// Local address and port; `None` before the first bind or send.
    pub local: Option<SocketAddr>,
    /// The peer of a connected socket.
    pub remote: Option<SocketAddr>,
    /// Allows sending to broadcast addresses (SO_BROADCAST).
    pub broadcast: bool,
    /// TTL or hop limit; `None`: the interface's default.
    pub ttl: Option<u8>,
    /// TOS or traffic class.
    pub dscp_ecn: u8,
    /// The treatment of datagrams that exceed the path MTU.
    pub mtu_discovery: MtuDiscovery,
    /// Receives a run of datagrams that came as one super-frame as one ([`Datagram::segment_bytes`];
    /// UDP_GRO). The receive queue needs space for runs of 64 KiB.
    pub gro: bool,
    queue: VecDeque<Datagram>,
    /// Sum of the [`charge`]s in `queue`, bytes.
    queued_bytes: usize,
    /// Storage of datagrams loaned to the user by reference, bytes.
    loaned_bytes: usize,
    recv_limit_bytes: RecvLimit,
    error: Option<UdpError>,
    /// Receiving was shut down: arriving datagrams are dropped.
    is_recv_shutdown: bool,
}

#[derive(Clone, Copy, Debug)]
struct RecvLimit(usize);

impl Default for RecvLimit {
    fn default() -> Self {
        RecvLimit(DEFAULT_RECV_LIMIT_BYTES)
    }
}

impl UdpSocket {
    /// An unbound socket.
    pub fn new() -> UdpSocket {
        UdpSocket::default()
    }

    /// Sets the bound of the receive queue (SO_RCVBUF), bytes of [`charge`].
    pub fn set_recv_limit(&mut self, bytes: usize) {
        self.recv_limit_bytes = RecvLimit(bytes);
    }

    /// The bound of the receive queue, bytes of [`charge`].
    pub fn recv_limit(&self) -> usize {
        self.recv_limit_bytes.0
    }

    /// Appends a datagram to the receive queue. Returns true if the queue was empty, so that a
    /// reader must be woken.
    ///
    /// Drops: `UdpBufferFull` if the queue is full (an empty queue always accepts one datagram,
    /// unless loans have used up the bound), `UdpNoSocket` if receiving was shut down.
    pub fn deliver(&mut self, d: Datagram, pool: &mut Pool, counters: &mut Counters) -> bool {
        let charge = charge(&d.payload);
        let was_empty = self.queue.is_empty();
        if let Some(reason) = self.drop_reason(charge) {
            counters.drop_packet(reason);
            pool.free(d.payload);
            return false;
        }
        counters.count(Counter::UdpIn);
        self.queued_bytes = self.queued_bytes.saturating_add(charge);
        self.queue.push_back(d);
        was_empty
    }

    /// The reason for which [`UdpSocket::deliver`] would drop a datagram of this [`charge`] now, if
    /// any. Callers use it to drop early.
    #[inline]
    pub(crate) fn drop_reason(&self, charge: usize) -> Option<DropReason> {
        let limit = self.recv_limit_bytes.0;
        let exceeds_limit = self.truesize().saturating_add(charge) > limit;
        let always_accepts = self.queue.is_empty() && self.loaned_bytes < limit.max(1);
        if self.is_recv_shutdown {
            return Some(DropReason::UdpNoSocket);
        }
        let is_full = exceeds_limit || self.queue.len() >= MAX_DATAGRAMS;
        (is_full && !always_accepts).then_some(DropReason::UdpBufferFull)
    }

    /// Takes the oldest datagram.
    pub fn receive(&mut self) -> Option<Datagram> {
        let d = self.queue.pop_front()?;
        self.queued_bytes = self.queued_bytes.saturating_sub(charge(&d.payload));
        if self.queue.is_empty() {
            self.queued_bytes = 0;
            if self.queue.capacity() > IDLE_CAPACITY {
                self.queue.shrink_to(IDLE_CAPACITY);
            }
        }
        Some(d)
    }

    /// Records a loan of a received datagram: its storage counts as if it were still in the queue.
    pub fn lend(&mut self, storage_bytes: usize) {
        self.loaned_bytes = self.loaned_bytes.saturating_add(storage_bytes);
    }

    /// Ends a loan.
    pub fn take_back(&mut self, storage_bytes: usize) {
        self.loaned_bytes = self.loaned_bytes.saturating_sub(storage_bytes);
    }

    /// Storage loaned to the user, bytes.
    pub fn loaned_bytes(&self) -> usize {
        self.loaned_bytes
    }

    /// Returns the oldest datagram without removing it.
    pub fn peek(&self) -> Option<&Datagram> {
        self.queue.front()
    }

    /// Datagrams in the queue.
    pub fn queued(&self) -> usize {
        self.queue.len()
    }

    /// Charge of the queue and of loans, bytes.
    #[inline]
    pub fn truesize(&self) -> usize {
        self.queued_bytes.saturating_add(self.loaned_bytes)
    }

    /// Charge of the queue, bytes.
    pub(crate) fn queued_bytes(&self) -> usize {
        self.queued_bytes
    }

    /// Whether a read does not block: a datagram or an error is pending, or receiving was shut
    /// down.
    pub fn is_readable(&self) -> bool {
        !self.queue.is_empty() || self.error.is_some() || self.is_recv_shutdown
    }

    /// Records an error for a datagram to `remote`. Only a connected socket accepts it, as on
    /// Linux: an unconnected one could not tell which datagram failed. Returns whether it was
    /// accepted.
    pub(crate) fn on_error(&mut self, remote: SocketAddr, error: UdpError) -> bool {
        let is_peer = self.remote == Some(remote);
        if is_peer {
            self.error = Some(error);
        }
        is_peer
    }

    /// Whether an error is pending.
    #[inline]
    pub fn has_error(&self) -> bool {
        self.error.is_some()
    }

    /// Takes the pending error (SO_ERROR).
    pub fn take_error(&mut self) -> Option<UdpError> {
        self.error.take()
    }

    /// Shuts down receiving: queued datagrams stay readable, arriving ones are dropped.
    pub fn shutdown_read(&mut self) {
        self.is_recv_shutdown = true;
    }

    /// Frees the queue. Call it before the socket is dropped.
    pub fn release(&mut self, pool: &mut Pool) {
        while let Some(d) = self.receive() {
            pool.free(d.payload);
        }
    }
}

#[cfg(test)]
mod tests;
