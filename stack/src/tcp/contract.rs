//! The types of the engine's interface: its inputs and outputs.

use crate::base::{Counters, Instant, Offload};
use crate::mbuf::{Chain, FairShare, Pool};

/// Properties of the path to the peer, from routing and the device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PathInfo {
    /// Path MTU to the peer, bytes of IP packet.
    pub mtu: usize,
    /// MTU of the route, without path MTU discovery. The MSS option is derived from it: a learned
    /// path MTU holds for the forward direction only.
    pub route_mtu: usize,
    /// IP header, bytes: 20 or 40.
    pub ip_header_bytes: usize,
    /// Largest super-segment for segmentation offload, IP header included, bytes. `None`: no
    /// segmentation offload.
    pub tso_bytes: Option<usize>,
}

/// The receive memory of a pool, divided among connections: the sum of all advertised windows and
/// all stored receive bytes stays within `limit_bytes`.
///
/// A connection charges its own part and never shrinks an advertised window. Every connection is
/// entitled to a minimum ([`WindowBudget::minimum`]), so that none is starved. Only minima can push
/// `granted_bytes` beyond the limit.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct WindowBudget {
    /// Upper bound of `granted_bytes`.
    pub limit_bytes: usize,
    /// Bytes charged now by all connections, loans included.
    pub granted_bytes: usize,
}

impl WindowBudget {
    /// Minimum window of a connection below the limit, segments.
    pub(crate) const MIN_SEGMENTS: usize = 4;
    /// Minimum window of a connection beyond the limit, bytes, unless `MIN_SEGMENTS` is less: a
    /// page, as Linux's `tcp_rmem[0]`.
    pub const MIN_BYTES: usize = FairShare::MIN_BYTES;

    const FIRST_FLIGHT_SEGMENTS: usize = 10;

    /// An empty budget of `limit_bytes`.
    pub const fn new(limit_bytes: usize) -> WindowBudget {
        WindowBudget { limit_bytes, granted_bytes: 0 }
    }

    /// The fair share of a connection that is charged with `own`: bytes of window and storage. Up
    /// to half of the limit, a connection may take all that `others` leave. Beyond half, it may
    /// take an eighth of the free part, or keep what it has (`own`: with half of what its reader has freed), so that
    /// early connections cannot exhaust the budget.
    pub(crate) fn fair_share(&self, own: usize, others: usize) -> usize {
        let left = self.limit_bytes.saturating_sub(others);
        if self.granted_bytes < self.limit_bytes / 2 {
            return left;
        }
        (self.limit_bytes.saturating_sub(self.granted_bytes) / 8).max(own).min(left)
    }

    /// The guaranteed window of a connection with this MSS, bytes. Beyond the limit it is at most a
    /// page, so that the overcommit grows by one page per connection.
    pub fn minimum(&self, mss: usize) -> usize {
        let segments = mss.saturating_mul(Self::MIN_SEGMENTS);
        if self.granted_bytes < self.limit_bytes { segments } else { segments.min(Self::MIN_BYTES) }
    }

    /// The window of a SYN,ACK, bytes: a peer's initial window (RFC 6928). It is charged only when
    /// the handshake completes; until then thousands of embryonic connections may exist.
    pub(crate) fn syn_ack_window(&self, mss: usize) -> usize {
        let flight = mss.saturating_mul(Self::FIRST_FLIGHT_SEGMENTS);
        self.fair_share(0, self.granted_bytes).min(flight).max(self.minimum(mss))
    }

    /// Charges received storage that is loaned to the user. The charge outlives the connection.
    pub fn lend(&mut self, storage_bytes: usize) {
        self.granted_bytes = self.granted_bytes.saturating_add(storage_bytes);
    }

    /// Ends the charge of [`WindowBudget::lend`].
    pub fn take_back(&mut self, storage_bytes: usize) {
        self.granted_bytes = self.granted_bytes.saturating_sub(storage_bytes);
    }
}

/// The shard's state that the engine borrows for one call.
pub struct Env<'a> {
    /// The time of this call.
    pub now: Instant,
    /// The shard's mbuf pool.
    pub pool: &'a mut Pool,
    /// The shard's counters.
    pub counters: &'a mut Counters,
    /// The shard's receive window budget.
    pub window: &'a mut WindowBudget,
}

/// The ECN field of an IP header (RFC 3168 section 5).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum EcnField {
    /// Not-ECT: routers drop instead of marking.
    #[default]
    NotEct,
    /// ECT(1).
    Ect1,
    /// ECT(0).
    Ect0,
    /// CE: a router was congested.
    Ce,
}

impl EcnField {
    /// The lower two bits of type of service or traffic class.
    pub const fn of_bits(bits: u8) -> EcnField {
        match bits & 3 {
            0 => EcnField::NotEct,
            1 => EcnField::Ect1,
            2 => EcnField::Ect0,
            _ => EcnField::Ce,
        }
    }
}

/// A SYN as it was received.
#[derive(Clone, Copy, Debug)]
pub struct Syn<'a> {
    /// Its header.
    pub header: &'a crate::wire::tcp::Header,
    /// The ECN field of its IP packet.
    pub ecn: EcnField,
}

/// An outgoing segment.
pub struct SegmentOut {
    /// The TCP header in an mbuf of its own, with `HEADROOM` bytes in front of it, then
    /// references into the send buffer.
    pub chain: Chain,
    /// `needs_csum` is always set, and the checksum field holds the folded pseudo-header sum: the
    /// device, or software in its place, completes it. `gso` is set for a super-segment; the
    /// pseudo-header length is then that of the super-segment, as in virtio-net. Offsets count from
    /// the TCP header.
    pub offload: Offload,
    /// Sent with ECT(0).
    pub ecn_capable: bool,
}

/// Headroom in front of the TCP header, bytes: virtio-net (12), Ethernet (14), IPv6 (40) and slack.
pub(crate) const HEADROOM: usize = 96;

/// Passes segments to the IP layer.
pub trait Emit {
    /// Transmits one segment. The segment is consumed in every case. After [`EmitError::Full`] the
    /// engine builds it again later; after any other error it counts as lost in the network.
    fn emit(
        &mut self,
        pool: &mut Pool,
        counters: &mut Counters,
        seg: SegmentOut,
    ) -> Result<(), EmitError>;

    /// Number of segments that [`Emit::emit`] can still accept.
    fn space(&self) -> usize;
}

/// Why a segment was not transmitted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EmitError {
    /// The transmit queue is full: call output again when it has space.
    Full,
    /// No route to the peer.
    NoRoute,
    /// The device is gone, or the pool had no buffer for a lower header.
    Lost,
}

/// The result of [`Tcb::output`](crate::tcp::Tcb::output).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum Sent {
    /// Everything that could be sent was sent.
    Done,
    /// The transmit queue is full: call again when it has space.
    More,
    /// The pool has no buffer for a header or a reference: call again soon.
    Starved,
}

/// The states of RFC 9293 section 3.3.2. LISTEN is a state of the listener, not of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum State {
    /// SYN sent, waiting for the peer's SYN.
    SynSent,
    /// Both SYNs exchanged, waiting for the acknowledgement of ours.
    SynReceived,
    /// Data flows.
    Established,
    /// FIN sent, not acknowledged.
    FinWait1,
    /// FIN sent and acknowledged; the peer may still send.
    FinWait2,
    /// The peer's FIN received; this side may still send.
    CloseWait,
    /// Simultaneous close: both FINs sent, ours not acknowledged.
    Closing,
    /// The peer's FIN received, then our FIN sent; ours not acknowledged.
    LastAck,
    /// Both FINs acknowledged; waiting for old duplicates to expire.
    TimeWait,
    /// No connection.
    Closed,
}

/// Events for the user of a connection, returned by a call: a bit set.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
#[must_use]
pub struct Events(u16);

impl Events {
    /// Nothing happened.
    pub const NONE: Events = Events(0);
    /// New bytes are readable.
    pub const READABLE: Events = Events(1);
    /// Acknowledged bytes left the send buffer, and at least a third of it, or the low-water mark,
    /// is free. Reported with every such acknowledgement, so that a waiter for any amount can check
    /// again.
    pub const WRITABLE: Events = Events(1 << 1);
    /// The three-way handshake is complete.
    pub const CONNECTED: Events = Events(1 << 2);
    /// The peer's FIN was received: end of file after the readable bytes.
    pub const PEER_CLOSED: Events = Events(1 << 3);
    /// The connection failed: see [`Tcb::take_error`](crate::tcp::Tcb::take_error).
    pub const ERROR: Events = Events(1 << 4);
    /// The connection entered CLOSED or TIME-WAIT.
    pub const CLOSED: Events = Events(1 << 5);
    /// Urgent data was received; it stays in line.
    pub const URGENT: Events = Events(1 << 6);

    /// Whether all of `other` are set.
    pub const fn contains(self, other: Events) -> bool {
        self.0 & other.0 == other.0
    }

    /// Whether at least one of `other` is set.
    pub const fn intersects(self, other: Events) -> bool {
        self.0 & other.0 != 0
    }

    /// Whether no event is set.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }
}

impl core::ops::BitOr for Events {
    type Output = Events;
    fn bitor(self, other: Events) -> Events {
        Events(self.0 | other.0)
    }
}

impl core::ops::BitOrAssign for Events {
    fn bitor_assign(&mut self, other: Events) {
        self.0 |= other.0;
    }
}

impl core::fmt::Debug for Events {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let names = [
            (Events::READABLE, "readable"),
            (Events::WRITABLE, "writable"),
            (Events::CONNECTED, "connected"),
            (Events::PEER_CLOSED, "peer_closed"),
            (Events::ERROR, "error"),
            (Events::CLOSED, "closed"),
            (Events::URGENT, "urgent"),
        ];
        f.debug_set()
            .entries(names.iter().filter(|(e, _)| self.contains(*e)).map(|(_, n)| n))
            .finish()
    }
}

/// Why a connection failed. `socket` maps it to errno.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum ConnError {
    /// The peer answered our SYN with a reset or with ICMP port unreachable.
    Refused,
    /// The peer reset the connection.
    Reset,
    /// The peer did not answer: the user time-out expired, or the keepalive probes or the
    /// retransmissions of the SYN are used up.
    TimedOut,
    /// As `TimedOut`, after ICMP host unreachable; or neighbour resolution failed while the
    /// connection was opened.
    HostUnreachable,
    /// As `TimedOut`, and there was no route.
    NetUnreachable,
    /// This side aborted the connection.
    Aborted,
    /// The connection is closed for sending.
    BrokenPipe,
}

impl ConnError {
    const ALL: [ConnError; 7] = [
        ConnError::Refused,
        ConnError::Reset,
        ConnError::TimedOut,
        ConnError::HostUnreachable,
        ConnError::NetUnreachable,
        ConnError::Aborted,
        ConnError::BrokenPipe,
    ];

    /// The error as a number, for crates that do not depend on this one. Never 0.
    pub fn code(self) -> u8 {
        (self as u8).saturating_add(1)
    }

    /// The inverse of [`ConnError::code`]. Unknown numbers and 0 give `Aborted`.
    pub fn from_code(code: u8) -> ConnError {
        let at = usize::from(code).checked_sub(1);
        at.and_then(|i| Self::ALL.get(i)).copied().unwrap_or(ConnError::Aborted)
    }
}

/// An ICMP error about a segment of this connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum IcmpError {
    /// Destination unreachable.
    Unreachable {
        /// Protocol unreachable, port unreachable or administratively prohibited: hard errors in
        /// RFC 9293 section 3.9.2.2.
        hard: bool,
    },
    /// Neighbour resolution of the next hop failed. Generated locally, not by a router.
    ResolutionFailed,
    /// Fragmentation needed, or packet too big.
    TooBig {
        /// The next-hop MTU in the message, bytes of IP packet.
        mtu: usize,
    },
}
