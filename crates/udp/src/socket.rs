//! What a UDP socket keeps.

use alloc::collections::VecDeque;
use core::net::SocketAddr;

use fulmar_base::{Counter, Counters, DropReason};
use fulmar_mbuf::Pool;

use crate::{Datagram, charge};

/// Datagrams that one socket keeps at most: an empty datagram is charged nothing, so that bytes alone
/// would not bound the queue.
const MAX_DATAGRAMS: usize = 4096;
/// What is charged to one socket's queue at most: 256 KiB, of Linux's order (212,992 bytes, with its own
/// overhead charged); 256 tiny datagrams.
const DEFAULT_RECV_LIMIT_BYTES: usize = 256 * 1024;
/// An idle queue gives back what a burst made it grow to beyond this.
const IDLE_CAPACITY: usize = 64;

/// An error that came back for an earlier datagram.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum UdpError {
    /// Nobody has the port (ECONNREFUSED).
    ConnectionRefused,
    /// The host cannot be reached (EHOSTUNREACH).
    HostUnreachable,
    /// The datagram was larger than the path allows (EMSGSIZE).
    MessageTooLong,
}

/// The state of a UDP socket: addresses, options, queue, pending error. The stack's socket tables
/// own it.
#[derive(Debug, Default)]
pub struct UdpSocket {
    /// Address and port that it is bound to; `None` before the first bind or send.
    pub local: Option<SocketAddr>,
    /// The only peer it talks to, if it is connected.
    pub remote: Option<SocketAddr>,
    /// It may send to broadcast addresses (SO_BROADCAST).
    pub broadcast: bool,
    /// Time to live or hop limit; `None`: as the interface says.
    pub ttl: Option<u8>,
    /// Type of service or traffic class.
    pub dscp_ecn: u8,
    /// Datagrams larger than the path are refused (EMSGSIZE), and IPv4 routers may not fragment
    /// (IP_MTU_DISCOVER with IP_PMTUDISC_DO, IPV6_DONTFRAG). Else they are sent in fragments.
    pub dont_fragment: bool,
    queue: VecDeque<Datagram>,
    /// What the datagrams in `queue` are charged ([`charge`]), in bytes.
    queued_bytes: usize,
    /// Storage of datagrams that the user holds by reference, in bytes.
    lent_bytes: usize,
    recv_limit_bytes: RecvLimit,
    error: Option<UdpError>,
    /// Reading was shut down: what arrives is dropped.
    is_shut: bool,
}

#[derive(Clone, Copy, Debug)]
struct RecvLimit(usize);

impl Default for RecvLimit {
    fn default() -> Self {
        RecvLimit(DEFAULT_RECV_LIMIT_BYTES)
    }
}

impl UdpSocket {
    /// A socket that is not bound.
    pub fn new() -> UdpSocket {
        UdpSocket::default()
    }

    /// Bounds the receive queue (SO_RCVBUF), in bytes of [`charge`].
    pub fn set_recv_limit(&mut self, bytes: usize) {
        self.recv_limit_bytes = RecvLimit(bytes);
    }

    /// The bound of the receive queue, in bytes of [`charge`].
    pub fn recv_limit(&self) -> usize {
        self.recv_limit_bytes.0
    }

    /// Puts a datagram in the receive queue. Returns whether the queue was empty before, that is,
    /// whether a reader is to be told.
    ///
    /// Dropped and counted: `UdpBufferFull` if the queue is full (one datagram always fits, unless
    /// those that the user holds have used up the bound), `UdpNoSocket` if reading was shut down.
    pub fn deliver(&mut self, d: Datagram, pool: &mut Pool, counters: &mut Counters) -> bool {
        let charge = charge(&d.payload);
        let was_empty = self.queue.is_empty();
        if let Some(reason) = self.refusal(charge) {
            counters.drop_packet(reason);
            pool.free(d.payload);
            return false;
        }
        counters.count(Counter::UdpIn);
        self.queued_bytes = self.queued_bytes.saturating_add(charge);
        self.queue.push_back(d);
        was_empty
    }

    /// Why a datagram that is charged so much would be dropped now, if it would: for whoever can save
    /// work by knowing early.
    #[inline]
    pub fn refusal(&self, charge: usize) -> Option<DropReason> {
        let limit = self.recv_limit_bytes.0;
        let is_over = self.held_bytes().saturating_add(charge) > limit;
        let may_always = self.queue.is_empty() && self.lent_bytes < limit.max(1);
        if self.is_shut {
            return Some(DropReason::UdpNoSocket);
        }
        let is_full = is_over || self.queue.len() >= MAX_DATAGRAMS;
        (is_full && !may_always).then_some(DropReason::UdpBufferFull)
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

    /// A datagram that was received stays with the user for now: its storage counts as if it were
    /// still in the queue.
    pub fn lend(&mut self, storage_bytes: usize) {
        self.lent_bytes = self.lent_bytes.saturating_add(storage_bytes);
    }

    /// The user has given it back.
    pub fn take_back(&mut self, storage_bytes: usize) {
        self.lent_bytes = self.lent_bytes.saturating_sub(storage_bytes);
    }

    /// Storage of what the user holds by reference, in bytes.
    pub fn lent_bytes(&self) -> usize {
        self.lent_bytes
    }

    /// Looks at the oldest datagram.
    pub fn peek(&self) -> Option<&Datagram> {
        self.queue.front()
    }

    /// Datagrams in the queue.
    pub fn queued(&self) -> usize {
        self.queue.len()
    }

    /// What the queue and what the user holds by reference are charged, in bytes.
    #[inline]
    pub fn held_bytes(&self) -> usize {
        self.queued_bytes.saturating_add(self.lent_bytes)
    }

    /// What the queue is charged, in bytes.
    pub fn queued_bytes(&self) -> usize {
        self.queued_bytes
    }

    /// Whether [`UdpSocket::receive`] or [`UdpSocket::take_error`] would return something.
    pub fn is_readable(&self) -> bool {
        !self.queue.is_empty() || self.error.is_some() || self.is_shut
    }

    /// An error came back for a datagram to `remote`. Only a connected socket is told: on another
    /// one nobody could say whose error it is (as on Linux). Returns whether it was taken.
    pub fn on_error(&mut self, remote: SocketAddr, error: UdpError) -> bool {
        let is_ours = self.remote == Some(remote);
        if is_ours {
            self.error = Some(error);
        }
        is_ours
    }

    /// Whether an error is pending.
    #[inline]
    pub fn has_error(&self) -> bool {
        self.error.is_some()
    }

    /// The pending error, once.
    pub fn take_error(&mut self) -> Option<UdpError> {
        self.error.take()
    }

    /// Stops reading: what is queued stays, what arrives is dropped.
    pub fn shutdown_read(&mut self) {
        self.is_shut = true;
    }

    /// Whether reading was shut down.
    pub fn is_shut(&self) -> bool {
        self.is_shut
    }

    /// Frees the queue, before the socket is dropped.
    pub fn release(&mut self, pool: &mut Pool) {
        while let Some(d) = self.receive() {
            pool.free(d.payload);
        }
    }
}

#[cfg(test)]
mod tests;
