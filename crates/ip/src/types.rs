//! What passes through the doors of this room.

use core::net::{IpAddr, SocketAddr};
use core::ops::ControlFlow;

use fulmar_base::{Counters, FlowKey, Offload, Stage, Variation, Zone};
use fulmar_mbuf::{Chain, Pool};
use fulmar_route::Traffic;

/// Takes the frames that leave. The stack implements it on its transmit burst.
pub trait FrameSink {
    /// A whole Ethernet frame for the device.
    ///
    /// # Errors
    /// The chain comes back if there is no room.
    fn frame(
        &mut self,
        pool: &mut Pool,
        counters: &mut Counters,
        chain: Chain,
        offload: Offload,
    ) -> Result<(), Chain>;

    /// Whether `frames` more frames would be taken now, as many as the sink can hold at the least. To
    /// be asked before a datagram is sent in fragments, of which one alone is worth nothing.
    fn has_room(
        &mut self,
        pool: &mut Pool,
        counters: &mut Counters,
        frames: usize,
        is_loopback: bool,
    ) -> bool {
        let _ = (pool, counters, frames, is_loopback);
        true
    }

    /// The packet in hand has reached `stage`; `Break`: it is to go no further, and is freed as if it
    /// had been sent, or had been for nobody.
    #[inline(always)]
    fn stage(&mut self, stage: Stage) -> ControlFlow<()> {
        let _ = stage;
        ControlFlow::Continue(())
    }

    /// Whether a step is to be done in another way than usual, by a measurement's wish.
    #[inline(always)]
    fn varies(&self, variation: Variation) -> bool {
        let _ = variation;
        false
    }

    /// A whole Ethernet frame from this stack to itself, with its own Ethernet address at both
    /// ends: to be passed to [`crate::Ip::input`] as it is, but never from within this call.
    ///
    /// # Errors
    /// The chain comes back if there is no room.
    fn loopback(
        &mut self,
        pool: &mut Pool,
        counters: &mut Counters,
        chain: Chain,
        offload: Offload,
    ) -> Result<(), Chain>;
}

/// What became of a received frame. What was dropped is counted and freed already.
#[derive(Debug)]
pub enum Verdict {
    /// A packet for a transport.
    Deliver(Delivered),
    /// Another node says that a packet of this stack met with an error.
    IcmpError(QuotedError),
    /// An answer to an echo request of this stack.
    EchoReply(EchoReply),
    /// Nothing is left to do.
    Consumed,
}

/// A packet for a transport.
#[derive(Debug)]
pub struct Delivered {
    /// Who sent it: always one host's address.
    pub src: IpAddr,
    /// To which address of ours, or to which group.
    pub dst: IpAddr,
    /// The interface, if one of the addresses is link-local; else 0.
    pub zone: Zone,
    /// TCP or UDP. TCP is never delivered from broadcast or multicast.
    pub protocol: u8,
    /// Transport header and payload, without Ethernet padding. The transport header lies in the
    /// first mbuf as a whole, TCP's with its options, if the packet is as long as it says.
    pub chain: Chain,
    /// What the device did or left undone, counted from the start of `chain`.
    pub offload: Offload,
    /// Enough to answer with an ICMP error. Empty for TCP, which answers with a reset.
    pub ip_header: SavedHeader,
    /// It was sent to more than one station.
    pub broadcast_or_multicast: bool,
    /// The two ECN bits (RFC 3168 section 5).
    pub ecn: u8,
    /// Time to live or hop limit as received.
    pub hop_limit: u8,
}

/// The first bytes of a received packet, kept so that an ICMP error can quote them: its IP header
/// and, if they fit, the 8 bytes behind it, which RFC 792 asks for.
#[derive(Clone, Copy)]
pub struct SavedHeader {
    pub(crate) bytes: [u8; SavedHeader::BYTES],
    pub(crate) len: u8,
    /// Whether an error may be sent about the packet at all (RFC 1122 section 3.2.2).
    pub(crate) answerable: bool,
}

impl SavedHeader {
    /// Room for the longest IPv4 header (60) and 8 bytes, rounded up.
    pub(crate) const BYTES: usize = 72;
    /// Nothing: no error can be sent.
    pub(crate) const EMPTY: SavedHeader =
        SavedHeader { bytes: [0; SavedHeader::BYTES], len: 0, answerable: false };

    /// The bytes, from the start of the IP header.
    pub fn as_slice(&self) -> &[u8] {
        self.bytes.get(..usize::from(self.len)).unwrap_or(&[])
    }
}

impl core::fmt::Debug for SavedHeader {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "SavedHeader({} bytes, answerable: {})", self.len, self.answerable)
    }
}

/// An answer to an echo request.
#[derive(Debug)]
pub struct EchoReply {
    /// Who answered.
    pub from: IpAddr,
    /// As in the request.
    pub ident: u16,
    /// As in the request.
    pub seq: u16,
    /// Time to live or hop limit as received.
    pub hop_limit: u8,
    /// The echoed bytes.
    pub payload: Chain,
}

/// An error about a packet that this stack sent, found in an ICMP message or decided here because
/// a neighbour does not answer.
///
/// Nothing proves that an ICMP message is honest: the receiver must find the flow, and for TCP
/// check `seq` against what is in flight (RFC 5927 section 4).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QuotedError {
    /// Our end of the flow, as sent. For an echo request the port is its ident.
    pub local: SocketAddr,
    /// The other end. For an echo request the port is 0.
    pub remote: SocketAddr,
    /// TCP, UDP, or ICMP (of either version) for an echo request.
    pub protocol: u8,
    /// TCP: the sequence number of the packet. Echo request: its number. UDP: 0.
    pub seq: u32,
    /// Length of the IP packet, as sent.
    pub packet_bytes: usize,
    /// What is wrong.
    pub kind: ErrorKind,
}

impl QuotedError {
    /// The key of the flow.
    pub fn flow(&self) -> FlowKey {
        FlowKey::new(self.local, self.remote)
    }
}

/// What an ICMP error says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ErrorKind {
    /// The destination cannot be reached.
    Unreachable {
        /// A condition that will last (RFC 1122 section 4.2.3.9): an attempt to connect fails at
        /// once. An established connection still should go on (RFC 5927 section 5.2).
        hard: bool,
        /// The ICMP code, of the version of the flow's addresses.
        code: u8,
    },
    /// Nobody on the link answers for the next hop. This stack has found it out by itself, so that
    /// it cannot be forged: an attempt to connect fails at once, as on Linux.
    NoNeighbour,
    /// Nobody has the port.
    PortUnreachable,
    /// The packet was larger than `mtu`, the largest IP packet that passes. If the flow exists and
    /// `seq` is right, call [`crate::Ip::lower_path_mtu`]; for a datagram that may have been sent,
    /// [`crate::Ip::lower_datagram_mtu`].
    TooBig {
        /// In bytes, less than the packet had.
        mtu: usize,
    },
    /// The hops ran out on the way.
    TimeExceeded,
    /// A header field was not understood.
    ParameterProblem,
}

/// A transport packet to send.
#[derive(Debug)]
pub struct Outgoing {
    /// From which address of ours, normally [`PathChoice::src`].
    pub src: IpAddr,
    /// To whom; the same IP version as `src`.
    pub dst: IpAddr,
    /// The interface of a link-local `dst`; 0: the only one.
    pub zone: Zone,
    /// What `chain` starts with.
    pub protocol: u8,
    /// Time to live or hop limit; `None`: as configured.
    pub ttl: Option<u8>,
    /// Differentiated services (upper 6 bits) and ECN (lower 2).
    pub dscp_ecn: u8,
    /// The transport header in front, with 54 bytes of headroom or more, so that the lower headers
    /// need no mbuf of their own.
    pub chain: Chain,
    /// What is asked of the device, counted from the start of `chain`.
    pub offload: Offload,
    /// Whose packet it is, if its neighbour has to be asked for.
    pub traffic: Traffic,
    /// The packet may not be fragmented, neither here nor (IPv4) by a router: set for TCP, and for
    /// UDP that discovers its path MTU. Else a packet that is too large for its path is sent in
    /// fragments, but not a super-segment.
    pub dont_fragment: bool,
}

/// Why a packet was not sent. The packet is freed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OutputError {
    /// No route, or the addresses are of different IP versions. Counted as a drop.
    NoRoute,
    /// The packet may not be fragmented and is larger than `mtu`, or a segment of the super-segment
    /// is; or it is longer than any packet can be. Counted as a drop.
    TooBig {
        /// Largest IP packet of the path, in bytes.
        mtu: usize,
    },
    /// No mbuf for the header. Counted as a drop.
    NoBuffer,
    /// The neighbour does not answer. Counted as a drop.
    HostUnreachable,
    /// The sink had no room. Not counted: the caller may send the same again.
    Full,
}

/// There is no route to the destination.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NoRoute;

/// The way to a destination.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PathChoice {
    /// The source address to use.
    pub src: IpAddr,
    /// The neighbour that takes the packets: the destination itself if it is on the link.
    pub next_hop: IpAddr,
    /// Largest IP packet of TCP, in bytes, as far as is known (path MTU discovery).
    pub mtu: usize,
    /// The same for what is not TCP; never more.
    pub datagram_mtu: usize,
    /// Largest IP packet by the route alone, whatever path MTU discovery found.
    pub route_mtu: usize,
    /// [`crate::Ip::generation`] when this was chosen.
    pub generation: u64,
    /// The destination is this stack.
    pub is_local: bool,
    /// The destination is a broadcast address, which a socket must have asked for.
    pub is_broadcast: bool,
}
