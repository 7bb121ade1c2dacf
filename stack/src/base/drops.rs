//! Drop reasons. The enum, the names, the sentences and the indices of the drop counters are generated
//! from this one list.

macro_rules! drop_reasons {
    ($($(#[doc = $doc:literal])* $variant:ident, $layer:literal, $name:literal;)*) => {
        /// Why a packet was dropped. Each drop is counted once, where it is decided.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        #[repr(u8)]
        #[non_exhaustive]
        pub enum DropReason {
            $($(#[doc = $doc])* $variant,)*
        }

        impl DropReason {
            /// All reasons, in the order of the drop counters.
            pub const ALL: &'static [DropReason] = &[$(DropReason::$variant,)*];
            /// Number of reasons.
            pub const COUNT: usize = Self::ALL.len();

            /// The name in tables and JSON.
            pub const fn name(self) -> &'static str {
                match self { $(DropReason::$variant => $name,)* }
            }

            /// The layer that drops the packet.
            pub const fn layer(self) -> &'static str {
                match self { $(DropReason::$variant => $layer,)* }
            }

            /// A one-sentence description.
            pub const fn sentence(self) -> &'static str {
                match self { $(DropReason::$variant => concat!($($doc,)*),)* }
            }
        }
    };
}

drop_reasons! {
    /// The frame is shorter than its headers claim.
    Truncated, "wire", "truncated";
    /// The frame is addressed to another station.
    NotForUs, "ether", "not_for_us";
    /// The EtherType is not supported.
    UnknownEtherType, "ether", "unknown_ethertype";
    /// A received frame has the interface's own Ethernet address as its source.
    EtherSource, "ether", "ether_source";
    /// The ARP packet is malformed or asks for another host's address.
    ArpInvalid, "arp", "arp_invalid";
    /// Another station claims one of this host's addresses (RFC 5227).
    DuplicateAddress, "arp", "duplicate_address";
    /// An unsolicited packet announces another Ethernet address for a neighbour in use: the cached
    /// address is probed first.
    NeighbourClaim, "arp", "neighbour_claim";
    /// The packet that a stack sends on a medium without a link layer is neither IPv4 nor IPv6.
    NotIp, "ether", "not_ip";
    /// The IP header is malformed: version, header length or total length.
    IpHeader, "ip", "ip_header";
    /// The IPv4 header checksum is wrong.
    IpChecksum, "ip", "ip_checksum";
    /// The source address is not a valid source (multicast, broadcast, unspecified or loopback).
    IpSource, "ip", "ip_source";
    /// The destination address is not local, and this stack does not forward.
    IpDestination, "ip", "ip_destination";
    /// The destination is a multicast group that this host has not joined.
    IpGroup, "ip", "ip_group";
    /// The fragment has an impossible offset or length, contradicts other fragments about the end of
    /// the datagram, or exceeds the number of fragments per datagram.
    FragmentInvalid, "ip", "fragment_invalid";
    /// The fragment overlaps another one: the whole datagram is discarded (RFC 5722).
    FragmentOverlap, "ip", "fragment_overlap";
    /// The fragment was already received.
    FragmentDuplicate, "ip", "fragment_duplicate";
    /// The reassembly time-out expired before all fragments of the datagram had arrived.
    FragmentTimeout, "ip", "fragment_timeout";
    /// An incomplete datagram was evicted because the reassembly table was full.
    FragmentTableFull, "ip", "fragment_table_full";
    /// An IPv6 extension header is malformed, or one of its options requires a discard (RFC 8200
    /// section 4.2).
    ExtensionHeader, "ip", "extension_header";
    /// The transport protocol is not supported.
    UnknownProtocol, "ip", "unknown_protocol";
    /// There is no route to the destination.
    NoRoute, "ip", "no_route";
    /// The queue of packets awaiting address resolution was full.
    NeighbourQueueFull, "ip", "neighbour_queue_full";
    /// Address resolution failed: the neighbour did not answer.
    NeighbourUnreachable, "ip", "neighbour_unreachable";
    /// The packet exceeds the path MTU and may not be fragmented.
    PacketTooBig, "ip", "packet_too_big";
    /// The ICMP message is malformed.
    IcmpInvalid, "icmp", "icmp_invalid";
    /// The ICMP checksum is wrong.
    IcmpChecksum, "icmp", "icmp_checksum";
    /// The ICMP message matches no flow, or quotes a sequence number outside the send window.
    IcmpNoFlow, "icmp", "icmp_no_flow";
    /// The ICMP error quotes a packet that this stack cannot have sent: of the other IP version, to a
    /// multicast address, not a first fragment, or no larger than the reported path MTU.
    IcmpQuote, "icmp", "icmp_quote";
    /// The ICMP error reports a path MTU that is already known.
    IcmpMtuKnown, "icmp", "icmp_mtu_known";
    /// The ICMP message is ignored: a redirect, or an unknown type.
    IcmpIgnored, "icmp", "icmp_ignored";
    /// A reply was suppressed by its rate limit.
    RateLimited, "icmp", "rate_limited";
    /// The queue of received echo requests or replies was full.
    EchoBufferFull, "icmp", "echo_buffer_full";
    /// The neighbour discovery message failed validation (RFC 4861 sections 6.1 and 7.1).
    NdpInvalid, "ndp", "ndp_invalid";
    /// The UDP header is malformed.
    UdpHeader, "udp", "udp_header";
    /// The UDP checksum is wrong.
    UdpChecksum, "udp", "udp_checksum";
    /// No UDP socket is bound to the port.
    UdpNoSocket, "udp", "udp_no_socket";
    /// The receive buffer of the UDP socket was full.
    UdpBufferFull, "udp", "udp_buffer_full";
    /// A flow of a UDP forwarder had its limit of waiting datagrams.
    ForwardQueueFull, "udp", "forward_queue_full";
    /// The waiting datagrams of a peer had taken the peer's share of the memory of a UDP forwarder.
    ForwardPeerShare, "udp", "forward_peer_share";
    /// The waiting datagrams of all peers had taken the memory of a UDP forwarder.
    ForwardMemoryFull, "udp", "forward_memory_full";
    /// A peer had its limit of flows in a UDP forwarder.
    ForwardPeerFlows, "udp", "forward_peer_flows";
    /// A UDP forwarder had its limit of flows.
    ForwardFlowsFull, "udp", "forward_flows_full";
    /// The task of a flow of a UDP forwarder ended before it had passed the datagram on.
    ForwardFlowEnded, "udp", "forward_flow_ended";
    /// The stack did not send a datagram that a UDP forwarder returned to a peer.
    ForwardReturn, "udp", "forward_return";
    /// The TCP header is malformed.
    TcpHeader, "tcp", "tcp_header";
    /// The TCP checksum is wrong.
    TcpChecksum, "tcp", "tcp_checksum";
    /// No TCP connection or listener matches the segment.
    TcpNoSocket, "tcp", "tcp_no_socket";
    /// The segment is outside the receive window.
    TcpOutOfWindow, "tcp", "tcp_out_of_window";
    /// The acknowledgement number is above SND.NXT or too old (RFC 5961 section 5).
    TcpBadAck, "tcp", "tcp_bad_ack";
    /// The timestamp is older than the last one accepted (PAWS, RFC 7323 section 5).
    TcpPaws, "tcp", "tcp_paws";
    /// The segment's flags are invalid in this state.
    TcpBadFlags, "tcp", "tcp_bad_flags";
    /// Data arrived after the peer's FIN, or after the socket was closed.
    TcpAfterClose, "tcp", "tcp_after_close";
    /// The segment's data was already received.
    TcpDuplicate, "tcp", "tcp_duplicate";
    /// The out-of-order queue was full.
    TcpReassemblyFull, "tcp", "tcp_reassembly_full";
    /// The listener's accept queue was full when a SYN or the last ACK of a handshake arrived.
    AcceptQueueFull, "tcp", "accept_queue_full";
    /// The ACK carries an invalid or expired SYN cookie.
    SynCookieFailed, "tcp", "syncookie_failed";
    /// The source address has reached its limit of connections or embryonic connections.
    SourceLimit, "tcp", "source_limit";
    /// No socket was free for an incoming connection.
    ListenBacklog, "tcp", "listen_backlog";
    /// The listener's queue of pending connections was full when a SYN arrived.
    PendingQueueFull, "tcp", "pending_queue_full";
    /// The SYN repeats that of a pending connection, which the program has not decided yet.
    SynPending, "tcp", "syn_pending";
    /// The sequence number of an RST is not RCV.NXT: a challenge ACK was sent (RFC 5961 section 3).
    TcpBlindReset, "tcp", "tcp_blind_reset";
    /// A SYN arrived on an established connection: a challenge ACK was sent (RFC 5961 section 4).
    TcpBlindSyn, "tcp", "tcp_blind_syn";
    /// The buffer pool had no memory left in the share that the packet is charged to.
    NoBuffer, "mbuf", "no_buffer";
    /// The device rejected the frame.
    DeviceRefused, "device", "device_refused";
    /// The device's transmit queue stayed full for too long.
    TxQueueFull, "device", "tx_queue_full";
    /// The frame exceeds the limit of the device or the receive buffer.
    FrameTooBig, "device", "frame_too_big";
    /// The virtio-net header requests an impossible offload.
    BadOffload, "device", "bad_offload";
    /// The peer process posted an invalid frame descriptor.
    ShmInvalid, "device", "shm_invalid";
    /// The device is gone.
    DeviceGone, "device", "device_gone";
    /// The fault injector dropped the packet.
    Injected, "fault", "injected";
    /// The hand-off ring to the shard that owns the flow was full.
    HandOffFull, "stack", "wrong_queue_full";
    /// The loopback queue was full.
    LoopbackFull, "stack", "loopback_full";
}
