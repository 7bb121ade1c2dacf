//! The one list of reasons for which a packet is dropped. The enum, its name, its sentence and its
//! place in every counter table come from this list.

macro_rules! drop_reasons {
    ($($(#[doc = $doc:literal])* $variant:ident, $room:literal, $name:literal;)*) => {
        /// Why a packet was dropped. Every drop is counted once, where it is decided.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        #[repr(u8)]
        pub enum DropReason {
            $($(#[doc = $doc])* $variant,)*
        }

        impl DropReason {
            /// Every reason, in the order of the counters.
            pub const ALL: &'static [DropReason] = &[$(DropReason::$variant,)*];
            /// How many reasons there are.
            pub const COUNT: usize = Self::ALL.len();

            /// The name in tables and JSON.
            pub const fn name(self) -> &'static str {
                match self { $(DropReason::$variant => $name,)* }
            }

            /// The room that decides it.
            pub const fn room(self) -> &'static str {
                match self { $(DropReason::$variant => $room,)* }
            }

            /// One sentence for a person.
            pub const fn sentence(self) -> &'static str {
                match self { $(DropReason::$variant => concat!($($doc,)*),)* }
            }
        }
    };
}

drop_reasons! {
    /// The frame is shorter than its headers say.
    Truncated, "wire", "truncated";
    /// The frame is addressed to another station.
    NotForUs, "ether", "not_for_us";
    /// The Ethernet type is not one that this stack speaks.
    UnknownEtherType, "ether", "unknown_ethertype";
    /// A frame from the device has this interface's own Ethernet address as its source.
    EtherSource, "ether", "ether_source";
    /// An ARP packet that is malformed or asks about another address.
    ArpInvalid, "arp", "arp_invalid";
    /// Another station claims one of our addresses.
    DuplicateAddress, "arp", "duplicate_address";
    /// An unsolicited claim of another Ethernet address for a neighbour that is in use: the known
    /// address is asked first.
    NeighbourClaim, "arp", "neighbour_claim";
    /// An IP header that is malformed: version, header length or total length.
    IpHeader, "ip", "ip_header";
    /// The IPv4 header checksum is wrong.
    IpChecksum, "ip", "ip_checksum";
    /// The source address may not be a source (multicast, broadcast, unspecified, loopback).
    IpSource, "ip", "ip_source";
    /// The destination address is not one of ours, and this stack does not forward.
    IpDestination, "ip", "ip_destination";
    /// A fragment that cannot be one: its length or place is impossible, it contradicts the others
    /// about where the datagram ends, or there are too many of them.
    FragmentInvalid, "ip", "fragment_invalid";
    /// A fragment overlaps another one: all of the datagram is dropped (RFC 5722).
    FragmentOverlap, "ip", "fragment_overlap";
    /// A fragment that is here already.
    FragmentDuplicate, "ip", "fragment_duplicate";
    /// A datagram of which fragments were still missing when its time was over.
    FragmentTimeout, "ip", "fragment_timeout";
    /// A datagram in fragments gave way to a later one: too many were incomplete.
    FragmentTableFull, "ip", "fragment_table_full";
    /// An IPv6 extension header that is malformed or asks for a drop.
    ExtensionHeader, "ip", "extension_header";
    /// The transport protocol is not one that this stack speaks.
    UnknownProtocol, "ip", "unknown_protocol";
    /// No route to the destination.
    NoRoute, "ip", "no_route";
    /// The queue of packets waiting for a neighbour's address was full.
    NeighbourQueueFull, "ip", "neighbour_queue_full";
    /// The neighbour did not answer.
    NeighbourUnreachable, "ip", "neighbour_unreachable";
    /// The packet is larger than the path and may not be fragmented.
    PacketTooBig, "ip", "packet_too_big";
    /// An ICMP message that is malformed.
    IcmpInvalid, "icmp", "icmp_invalid";
    /// The ICMP checksum is wrong.
    IcmpChecksum, "icmp", "icmp_checksum";
    /// An ICMP error about a flow that does not exist or that is out of window.
    IcmpNoFlow, "icmp", "icmp_no_flow";
    /// An ICMP error that quotes a packet which this stack cannot have sent: of the other IP version,
    /// to a group, a later fragment, or no larger than the path MTU that is reported.
    IcmpQuote, "icmp", "icmp_quote";
    /// An ICMP report of a path MTU that is known already.
    IcmpMtuKnown, "icmp", "icmp_mtu_known";
    /// An ICMP message that this stack does not act on: a redirect, or one of an unknown type.
    IcmpIgnored, "icmp", "icmp_ignored";
    /// A reply was not sent because replies of this kind are limited in rate.
    RateLimited, "icmp", "rate_limited";
    /// The queue of answers to echo requests was full: the oldest one, or the one that came.
    EchoBufferFull, "icmp", "echo_buffer_full";
    /// A neighbour discovery message that fails the checks of RFC 4861.
    NdpInvalid, "ndp", "ndp_invalid";
    /// A UDP header that is malformed.
    UdpHeader, "udp", "udp_header";
    /// The UDP checksum is wrong.
    UdpChecksum, "udp", "udp_checksum";
    /// No UDP socket is bound to the port.
    UdpNoSocket, "udp", "udp_no_socket";
    /// The receive buffer of the UDP socket is full.
    UdpBufferFull, "udp", "udp_buffer_full";
    /// A TCP header that is malformed.
    TcpHeader, "tcp", "tcp_header";
    /// The TCP checksum is wrong.
    TcpChecksum, "tcp", "tcp_checksum";
    /// No TCP connection or listener for the segment.
    TcpNoSocket, "tcp", "tcp_no_socket";
    /// The segment lies outside the receive window.
    TcpOutOfWindow, "tcp", "tcp_out_of_window";
    /// The acknowledgement is for data never sent, or too old.
    TcpBadAck, "tcp", "tcp_bad_ack";
    /// The timestamp is older than the last one seen (PAWS, RFC 7323 section 5).
    TcpPaws, "tcp", "tcp_paws";
    /// The segment's flags make no sense in this state.
    TcpBadFlags, "tcp", "tcp_bad_flags";
    /// Data after the connection was closed for receiving.
    TcpAfterClose, "tcp", "tcp_after_close";
    /// The bytes were received before.
    TcpDuplicate, "tcp", "tcp_duplicate";
    /// The queue of out-of-order data was full.
    TcpReassemblyFull, "tcp", "tcp_reassembly_full";
    /// The accept queue of the listener was full: a SYN, or the ACK that ends a handshake.
    AcceptQueueFull, "tcp", "accept_queue_full";
    /// An ACK at a listener that sends SYN cookies brought back a wrong or an old one.
    SynCookieFailed, "tcp", "syncookie_failed";
    /// The source address has as many connections, or embryos, as it may have.
    SourceLimit, "tcp", "source_limit";
    /// No socket was left for a connection that came in.
    ListenBacklog, "tcp", "listen_backlog";
    /// A reset that was not exactly in place (RFC 5961): a challenge ACK was sent instead.
    TcpBlindReset, "tcp", "tcp_blind_reset";
    /// A SYN on an established connection (RFC 5961): a challenge ACK was sent instead.
    TcpBlindSyn, "tcp", "tcp_blind_syn";
    /// The buffer pool had no memory left in the share that the packet needs.
    NoBuffer, "mbuf", "no_buffer";
    /// The device refused the frame.
    DeviceRefused, "device", "device_refused";
    /// The device's transmit queue was full for too long.
    TxQueueFull, "device", "tx_queue_full";
    /// A page of a file that was to be sent from where it is was gone: the file was cut, or cannot
    /// be read.
    PageVanished, "device", "page_vanished";
    /// Bytes that the kernel alone may read met something else that had to read them.
    KernelOnly, "stack", "kernel_only";
    /// The frame is larger than the device or the receive buffer can hold.
    FrameTooBig, "device", "frame_too_big";
    /// The virtio-net header asks for something impossible.
    BadOffload, "device", "bad_offload";
    /// The other process described a frame that cannot be.
    ShmInvalid, "device", "shm_invalid";
    /// The device is gone.
    DeviceGone, "device", "device_gone";
    /// The fault injector dropped it.
    Injected, "fault", "injected";
    /// The ring that carries packets to their owner's shard was full.
    WrongQueueFull, "stack", "wrong_queue_full";
    /// The queue of packets from this stack to itself was full.
    LoopbackFull, "stack", "loopback_full";
}
