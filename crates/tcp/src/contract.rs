//! The words between the engine and whoever drives it: what goes in, what comes out.

use fulmar_base::{Counters, Instant, Offload};
use fulmar_mbuf::{Chain, FairShare, Pool};

/// What the layers below say about the way to this peer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PathInfo {
    /// Bytes of the largest IP packet to this peer.
    pub mtu: usize,
    /// The same by the route alone, whatever was learned about the path to the peer: the way back may
    /// take more, so the MSS option follows this.
    pub route_mtu: usize,
    /// Bytes of the IP header: 20 or 40.
    pub ip_header_bytes: usize,
    /// Bytes of the largest super-segment, IP header included, that the way down takes; `None` if
    /// every packet must fit the MTU.
    pub tso_bytes: Option<usize>,
}

/// The receive share of a pool, divided among connections: the sum over all of them of advertised
/// window and stored receive bytes stays within `limit_bytes`.
///
/// A connection charges its own part and never takes back what it advertised. Each may always
/// have a minimum ([`WindowBudget::minimum`]), so that none is starved; minima are the only way in which
/// `granted_bytes` may exceed the limit.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct WindowBudget {
    /// Bytes that may be granted.
    pub limit_bytes: usize,
    /// Bytes granted now.
    pub granted_bytes: usize,
}

impl WindowBudget {
    /// Segments of window that every connection may have as long as the limit is not reached.
    pub const MIN_SEGMENTS: usize = 4;
    /// Bytes of window that every connection may have whatever the others hold, unless those segments are
    /// smaller: a page, as `tcp_rmem[0]` of Linux.
    pub const MIN_BYTES: usize = FairShare::MIN_BYTES;

    const FIRST_FLIGHT_SEGMENTS: usize = 10;

    /// A budget of `limit_bytes`, nothing granted.
    pub const fn new(limit_bytes: usize) -> WindowBudget {
        WindowBudget { limit_bytes, granted_bytes: 0 }
    }

    /// Bytes of window and storage that a connection may have which is charged with `own`: what the others
    /// leave; once half of the limit is granted an eighth of what is left, or what it has, so that those
    /// who come first do not take all.
    pub fn fair_part(&self, own: usize, others: usize) -> usize {
        let left = self.limit_bytes.saturating_sub(others);
        if self.granted_bytes < self.limit_bytes / 2 {
            return left;
        }
        (self.limit_bytes.saturating_sub(self.granted_bytes) / 8).max(own).min(left)
    }

    /// Bytes of window that a connection with this MSS may have however much is granted: beyond the limit
    /// no more than a page, so that what a share has beyond the limit serves as many connections as it
    /// has pages.
    pub fn minimum(&self, mss: usize) -> usize {
        let segments = mss.saturating_mul(Self::MIN_SEGMENTS);
        if self.granted_bytes < self.limit_bytes { segments } else { segments.min(Self::MIN_BYTES) }
    }

    /// Whether so many bytes more than are granted stay within the limit.
    #[inline]
    pub fn has_room_for(&self, bytes: usize) -> bool {
        self.granted_bytes.saturating_add(bytes) <= self.limit_bytes
    }

    /// Bytes of window that a SYN,ACK offers: what a peer sends in its first flight (RFC 6928). They are not
    /// charged before the handshake is complete, and there may be thousands of embryos.
    pub fn for_embryo(&self, mss: usize) -> usize {
        let flight = mss.saturating_mul(Self::FIRST_FLIGHT_SEGMENTS);
        self.fair_part(0, self.granted_bytes).min(flight).max(self.minimum(mss))
    }

    /// Storage that arrived went to a user by reference, and is charged until it comes back, even if
    /// its connection is gone by then.
    pub fn lend(&mut self, storage_bytes: usize) {
        self.granted_bytes = self.granted_bytes.saturating_add(storage_bytes);
    }

    /// It came back.
    pub fn take_back(&mut self, storage_bytes: usize) {
        self.granted_bytes = self.granted_bytes.saturating_sub(storage_bytes);
    }
}

/// What the engine borrows from the shard for one call.
pub struct Env<'a> {
    /// The time of this call.
    pub now: Instant,
    /// The shard's buffers.
    pub pool: &'a mut Pool,
    /// The shard's counters.
    pub counters: &'a mut Counters,
    /// The shard's receive windows.
    pub window: &'a mut WindowBudget,
}

/// A segment on its way down.
pub struct SegmentOut {
    /// The TCP header in an mbuf of its own, with [`HEADROOM`] bytes in front of it, then
    /// references into the send buffer.
    pub chain: Chain,
    /// Always `needs_csum`, the checksum field holding the folded sum of the pseudo header: the
    /// device or its software stand-in finishes it. `gso` for a super-segment; with it the length
    /// in the pseudo header is that of the super-segment, as virtio-net has it. Offsets count from
    /// the TCP header.
    pub offload: Offload,
}

/// Room in front of the TCP header: virtio-net (12), Ethernet (14), IPv6 (40) and slack.
pub const HEADROOM: usize = 96;

/// Takes segments down.
pub trait Emit {
    /// Takes one segment. It is consumed in every case; on [`EmitError::Full`] the engine will
    /// build it again later, after any other error it counts as lost on the way.
    fn emit(
        &mut self,
        pool: &mut Pool,
        counters: &mut Counters,
        seg: SegmentOut,
    ) -> Result<(), EmitError>;

    /// How many segments [`Emit::emit`] will still take.
    fn room(&self) -> usize;
}

/// Why a segment was not taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EmitError {
    /// No room now: call output again when there is.
    Full,
    /// No route to the peer.
    NoRoute,
    /// The device is gone, or no buffer was left for a header below.
    Lost,
}

/// How far [`crate::Tcb::output`] came.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum Sent {
    /// All that may go now has gone.
    Done,
    /// The way down is full: call again when it has room.
    More,
    /// No buffers for a header or a reference: call again soon.
    Starved,
}

/// The states of RFC 9293 section 3.3.2. LISTEN is the listener's, not a connection's.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum State {
    /// We asked for a connection.
    SynSent,
    /// Both have asked, the peer has not acknowledged ours.
    SynReceived,
    /// Data flows.
    Established,
    /// We closed, the peer has not acknowledged that.
    FinWait1,
    /// We closed, the peer may still send.
    FinWait2,
    /// The peer closed, we may still send.
    CloseWait,
    /// Both closed at the same time; the peer has not acknowledged ours.
    Closing,
    /// The peer closed, then we; the peer has not acknowledged ours.
    LastAck,
    /// Both closed and acknowledged; waiting for old duplicates to die.
    TimeWait,
    /// No connection.
    Closed,
}

/// What the user of a connection should learn from a call: a set of bits.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
#[must_use]
pub struct Events(u16);

impl Events {
    /// Nothing happened.
    pub const NONE: Events = Events(0);
    /// There are new bytes to read.
    pub const READABLE: Events = Events(1);
    /// Acknowledged bytes left the send buffer, and at least a third of it is free. It is reported
    /// with every such acknowledgement, so that a waiter for any amount is asked again.
    pub const WRITABLE: Events = Events(1 << 1);
    /// The three-way handshake is complete.
    pub const CONNECTED: Events = Events(1 << 2);
    /// The peer sent its FIN: end of file after what is readable.
    pub const PEER_CLOSED: Events = Events(1 << 3);
    /// The connection failed: see [`crate::Tcb::take_error`].
    pub const ERROR: Events = Events(1 << 4);
    /// The state has become CLOSED or TIME-WAIT.
    pub const CLOSED: Events = Events(1 << 5);
    /// The peer's urgent pointer moved; the byte is in line.
    pub const URGENT: Events = Events(1 << 6);

    /// Whether all of `other` are set.
    pub const fn contains(self, other: Events) -> bool {
        self.0 & other.0 == other.0
    }

    /// Whether at least one of `other` is set.
    pub const fn intersects(self, other: Events) -> bool {
        self.0 & other.0 != 0
    }

    /// Whether nothing happened.
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

/// Why a connection failed. The mapping to errno is the socket room's.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum ConnError {
    /// The peer answered our SYN with a reset, or its host with port unreachable.
    Refused,
    /// The peer reset the connection.
    Reset,
    /// Nothing was acknowledged for too long.
    TimedOut,
    /// As `TimedOut`, and routers said that the host cannot be reached; or nobody on the link answered
    /// for it when a connection was opened.
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

    /// A number for whoever must not know this room; never 0.
    pub fn code(self) -> u8 {
        (self as u8).saturating_add(1)
    }

    /// The error of a number; that of an unknown one, and of 0, is `Aborted`.
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
        /// Protocol or port unreachable, or administratively prohibited: RFC 9293 section 3.9.2.2
        /// says hard.
        hard: bool,
    },
    /// Nobody on the link answers for the next hop: this stack's own finding.
    NoNeighbour,
    /// A router could not pass the packet on.
    TooBig {
        /// Bytes of IP packet that it would pass on.
        mtu: usize,
    },
}
