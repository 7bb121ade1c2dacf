//! The types of the engine's interface.

use core::net::{IpAddr, SocketAddr};

use crate::base::{Counters, FlowKey, MtuDiscovery, Offload, Stage, Zone};
use crate::mbuf::{Chain, Pool};
use crate::route::Traffic;

/// Where an outgoing frame leaves the IP layer to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Egress {
    /// The device.
    Device,
    /// The loopback queue: the destination is an address of this host.
    Loopback,
}

/// Accepts outgoing frames. The stack implements it on its transmit burst.
pub trait FrameSink {
    /// Queues an Ethernet frame for the device.
    ///
    /// # Errors
    /// Returns the chain if the sink is full.
    fn frame(
        &mut self,
        pool: &mut Pool,
        counters: &mut Counters,
        chain: Chain,
        offload: Offload,
    ) -> Result<(), Chain>;

    /// Whether the sink can accept `frames` more frames now, or its whole capacity if that is less. Called before a
    /// datagram is fragmented, because a partial set of fragments is useless.
    fn has_space(
        &mut self,
        pool: &mut Pool,
        counters: &mut Counters,
        frames: usize,
        egress: Egress,
    ) -> bool {
        let _ = (pool, counters, frames, egress);
        true
    }

    /// The current packet has reached `stage`.
    #[inline(always)]
    fn pass(&self, stage: Stage) {
        let _ = stage;
    }

    /// Queues an Ethernet frame from this stack to itself, with its own address as source and destination. The
    /// implementation passes it to [`Ip::input`](crate::ip::Ip::input)
    /// ([`Origin::Loopback`](crate::ip::Origin::Loopback)) later, not from within this call.
    ///
    /// # Errors
    /// Returns the chain if the sink is full.
    fn loopback(
        &mut self,
        counters: &mut Counters,
        chain: Chain,
        offload: Offload,
    ) -> Result<(), Chain>;
}

/// The result of input. Drops are already counted and freed.
#[derive(Debug)]
pub enum Verdict {
    /// A packet for a transport.
    Deliver(Delivered),
    /// An ICMP error about a packet of this host.
    IcmpError(QuotedError),
    /// A reply to an echo request of this host.
    EchoReply(EchoReply),
    /// An echo request to an address that is not assigned ([`Config::any_ip`](crate::ip::Config::any_ip)).
    EchoRequest(EchoRequest),
    /// The frame needs no further processing.
    Consumed,
}

/// A packet for a transport.
#[derive(Debug)]
pub struct Delivered {
    /// Source address, always unicast.
    pub src: IpAddr,
    /// Destination: an own address, or a group.
    pub dst: IpAddr,
    /// The interface, if one of the addresses is link-local; else 0.
    pub zone: Zone,
    /// TCP or UDP. TCP is delivered only if unicast.
    pub protocol: u8,
    /// Transport header and payload, without Ethernet padding. The transport header is contiguous
    /// in the first mbuf, TCP's with its options, unless the packet is truncated.
    pub chain: Chain,
    /// Offload state; offsets count from the start of `chain`.
    pub offload: Offload,
    /// The header that an ICMP error quotes. Empty for TCP, which answers with a reset.
    pub ip_header: SavedHeader,
    /// The IP or Ethernet destination is a group.
    pub is_group: bool,
    /// TOS or traffic class as received: differentiated services (upper 6 bits) and ECN (lower 2).
    pub dscp_ecn: u8,
    /// TTL or hop limit as received.
    pub hop_limit: u8,
}

/// The start of a received packet, saved for an ICMP error to quote: its IP header and, if they
/// fit, the next 8 bytes (RFC 792).
#[derive(Clone, Copy)]
pub struct SavedHeader {
    pub(crate) bytes: [u8; SavedHeader::BYTES],
    pub(crate) len: u8,
    /// Whether an error may be sent about the packet (RFC 1122 section 3.2.2).
    pub(crate) answerable: bool,
}

impl SavedHeader {
    /// The longest IPv4 header (60) and 8 bytes, rounded up.
    pub(crate) const BYTES: usize = 72;
    /// Empty: no error can be sent.
    pub const EMPTY: SavedHeader =
        SavedHeader { bytes: [0; SavedHeader::BYTES], len: 0, answerable: false };

    /// The saved bytes, from the start of the IP header.
    pub fn as_slice(&self) -> &[u8] {
        self.bytes.get(..usize::from(self.len)).unwrap_or(&[])
    }
}

impl core::fmt::Debug for SavedHeader {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "SavedHeader({} bytes, answerable: {})", self.len, self.answerable)
    }
}

/// Identifier and sequence number of an echo request (RFC 792).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct EchoId {
    /// Identifier.
    pub ident: u16,
    /// Sequence number.
    pub seq: u16,
}

/// An echo reply.
#[derive(Debug)]
pub struct EchoReply {
    /// Source address of the reply.
    pub from: IpAddr,
    /// As in the request.
    pub ident: u16,
    /// As in the request.
    pub seq: u16,
    /// TTL or hop limit as received.
    pub hop_limit: u8,
    /// The echoed bytes.
    pub payload: Chain,
}

/// An echo request to an address that is not assigned to the interface.
#[derive(Debug)]
pub struct EchoRequest {
    /// Source address.
    pub src: IpAddr,
    /// Destination address.
    pub dst: IpAddr,
    /// Identifier.
    pub ident: u16,
    /// Sequence number.
    pub seq: u16,
    /// TTL or hop limit as received.
    pub hop_limit: u8,
    /// The bytes to echo.
    pub payload: Chain,
}

/// An error about a packet that this host sent, from an ICMP message or from failed neighbour
/// resolution.
///
/// An ICMP message may be forged: the receiver must look up the flow and, for TCP, check that `seq`
/// is in flight (RFC 5927 section 4).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QuotedError {
    /// Local address of the flow. For an echo request the port is its identifier.
    pub local: SocketAddr,
    /// Remote address of the flow. For an echo request the port is 0.
    pub remote: SocketAddr,
    /// TCP, UDP, or ICMP (of either version) for an echo request.
    pub protocol: u8,
    /// TCP: the sequence number of the segment. Echo request: its sequence number. UDP: 0.
    pub seq: u32,
    /// Length of the IP packet as sent.
    pub packet_bytes: usize,
    /// The error.
    pub kind: ErrorKind,
}

impl QuotedError {
    /// The flow key.
    pub fn flow(&self) -> FlowKey {
        FlowKey::new(self.local, self.remote)
    }
}

/// The kind of an error.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ErrorKind {
    /// Destination unreachable.
    Unreachable {
        /// A hard error (RFC 1122 section 4.2.3.9): a connection attempt fails immediately. An
        /// established connection should continue (RFC 5927 section 5.2).
        hard: bool,
        /// The ICMP code; its meaning depends on the IP version of the flow.
        code: u8,
    },
    /// Neighbour resolution of the next hop failed. Generated locally, so it cannot be forged: a
    /// connection attempt fails immediately, as on Linux.
    ResolutionFailed,
    /// Port unreachable.
    PortUnreachable,
    /// Fragmentation needed or packet too big. If the flow exists and `seq` is in flight, call
    /// [`Ip::lower_path_mtu`](crate::ip::Ip::lower_path_mtu); for a datagram of an existing socket,
    /// [`Ip::lower_datagram_mtu`](crate::ip::Ip::lower_datagram_mtu).
    TooBig {
        /// The path MTU, bytes; less than the packet's length.
        mtu: usize,
    },
    /// Time exceeded.
    TimeExceeded,
    /// Parameter problem.
    ParameterProblem,
}

/// A transport packet to send.
#[derive(Debug)]
pub struct Outgoing {
    /// Source address, normally [`PathChoice::src`].
    pub src: IpAddr,
    /// Destination address, of the same IP version.
    pub dst: IpAddr,
    /// The interface of a link-local `dst`; 0: the only interface.
    pub zone: Zone,
    /// The transport protocol of `chain`.
    pub protocol: u8,
    /// TTL or hop limit; `None`: the configured default.
    pub ttl: Option<u8>,
    /// Differentiated services (upper 6 bits) and ECN (lower 2).
    pub dscp_ecn: u8,
    /// The packet from its transport header on. With at least 54 bytes of headroom the lower
    /// headers need no extra mbuf.
    pub chain: Chain,
    /// Offload request; offsets count from the start of `chain`.
    pub offload: Offload,
    /// Whether the packet is own traffic or a reply, for limits of neighbour resolution.
    pub traffic: Traffic,
    /// The treatment of a packet that exceeds the path MTU. Super-segments are never fragmented.
    pub mtu_discovery: MtuDiscovery,
}

/// Why a packet was not sent. The packet is freed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OutputError {
    /// No route, or the addresses are of different IP versions. Counted as a drop.
    NoRoute,
    /// The packet, or a segment of the super-segment, exceeds `mtu` and may not be fragmented; or
    /// it exceeds the maximum packet length. Counted as a drop.
    TooBig {
        /// Path MTU, bytes.
        mtu: usize,
    },
    /// No mbuf for the header. Counted as a drop.
    NoBuffer,
    /// Neighbour resolution failed. Counted as a drop.
    HostUnreachable,
    /// The sink is full. Not counted: the caller may retry.
    Full,
}

/// No route to the destination.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NoRoute;

/// The path to a destination.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PathChoice {
    /// The selected source address.
    pub src: IpAddr,
    /// The next hop; the destination itself if it is on-link.
    pub next_hop: IpAddr,
    /// Path MTU for TCP, bytes.
    pub mtu: usize,
    /// Path MTU for other protocols, bytes; never more than `mtu`.
    pub datagram_mtu: usize,
    /// MTU of the route, without path MTU discovery, bytes.
    pub route_mtu: usize,
    /// MTU of the interface, the limit of probes, bytes.
    pub link_mtu: usize,
    /// [`Ip::generation`](crate::ip::Ip::generation) at the time of the look-up.
    pub generation: u64,
    /// The destination is this host.
    pub is_local: bool,
    /// The destination is a broadcast address, which requires SO_BROADCAST.
    pub is_broadcast: bool,
}
