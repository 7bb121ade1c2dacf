//! Event counters, generated from one list, and the counter table of a shard.

use core::fmt;

use crate::base::DropReason;

macro_rules! counters {
    ($($(#[doc = $doc:literal])* $variant:ident, $name:literal;)*) => {
        /// An event that a shard counts.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        #[repr(u8)]
        #[non_exhaustive]
        pub enum Counter {
            $($(#[doc = $doc])* $variant,)*
        }

        impl Counter {
            /// All counters, in the order of the table.
            pub const ALL: &'static [Counter] = &[$(Counter::$variant,)*];
            /// Number of counters.
            pub const COUNT: usize = Self::ALL.len();

            /// The name in tables and JSON.
            pub const fn name(self) -> &'static str {
                match self { $(Counter::$variant => $name,)* }
            }

            /// A one-sentence description.
            pub const fn sentence(self) -> &'static str {
                match self { $(Counter::$variant => concat!($($doc,)*),)* }
            }
        }
    };
}

counters! {
    /// Frames passed to the device (a super-frame counts once).
    TxFrames, "tx_frames";
    /// MTU-sized packets in the frames sent.
    TxPackets, "tx_packets";
    /// Bytes of the frames sent.
    TxBytes, "tx_bytes";
    /// Frames received from the device (a super-frame counts once).
    RxFrames, "rx_frames";
    /// MTU-sized packets in the frames received.
    RxPackets, "rx_packets";
    /// Bytes of the frames received.
    RxBytes, "rx_bytes";
    /// TCP segments merged into the preceding segment by receive offload (GRO).
    GroJoined, "gro_joined";
    /// Datagrams merged into the preceding datagram by transmit offload (UDP GSO).
    UsoJoined, "uso_joined";
    /// Bursts passed to the device.
    TxBursts, "tx_bursts";
    /// Receive polls of the device.
    RxPolls, "rx_polls";
    /// Receive polls that returned no frame.
    RxEmptyPolls, "rx_empty_polls";
    /// Times a thread slept on the device; each sleep ends with a wake-up.
    Sleeps, "sleeps";
    /// Sleeps of fixed length for interrupt mitigation, in which frames accumulate.
    Holds, "holds";
    /// Waits that busy-polled the device.
    BusyPolls, "busy_polls";
    /// Nanoseconds of busy-polling.
    BusyPollNs, "busy_poll_ns";
    /// Changes of the interrupt mitigation delay.
    MitigationChanges, "mitigation_changes";
    /// Wake-ups of sleeping threads and poll sets.
    Wakeups, "wakeups";
    /// Requests queued in the shard's inbox because its lock was taken.
    InboxPosts, "inbox_posts";
    /// Frames of BIG TCP received: super-frames above 64 KiB, which a device hands up in pieces.
    BigTcpFrames, "big_tcp_frames";
    /// Packets received on a queue of another shard than the owner of their flow.
    WrongQueue, "wrong_queue";
    /// Calls that took the shard lock after a call of another thread, with several shards: 0 where each
    /// thread uses its own shard.
    SharedLocks, "shared_locks";
    /// Packets that this stack sent to itself.
    Loopback, "loopback";
    /// Writes accepted (sosend calls).
    Sends, "sends";
    /// Calls of tcp_output made by writes: one per chain committed.
    SendOutputs, "send_outputs";
    /// Frames sent by those calls (a super-segment counts once).
    SendFrames, "send_frames";
    /// MTU-sized packets in those frames.
    SendPackets, "send_packets";
    /// Mbufs allocated for the bytes of writes.
    SendMbufs, "send_mbufs";
    /// Bytes accepted from writers.
    SendBytes, "send_bytes";
    /// Writes that waited for memory of the send share although their send buffer had space.
    SendWaits, "send_waits";
    /// Wake-ups of such writes because memory became free.
    SendWakes, "send_wakes";
    /// Ranges of files accepted by sendfile (each followed by one call of tcp_output).
    SendFilePieces, "sendfile_pieces";
    /// Bytes of those ranges, headers and trailers included.
    SendFileBytes, "sendfile_bytes";
    /// Ranges of files queued before they were read because they were not in the page cache.
    SendFileDeferred, "sendfile_deferred";
    /// Reads that returned data (soreceive calls).
    Receives, "receives";
    /// Bytes returned to readers.
    ReceiveBytes, "receive_bytes";
    /// Frames whose payload the device placed directly in a posted buffer.
    PlacedFrames, "placed_frames";
    /// Payload bytes that devices placed directly.
    PlacedBytes, "placed_bytes";
    /// Placement hints given to devices: where the next bytes of a flow belong.
    PlaceHints, "place_hints";
    /// Posted buffers registered with a device.
    PlaceRegistrations, "place_registrations";
    /// Frames that a device had predicted wrongly for direct placement.
    PlaceMisses, "place_misses";
    /// Bytes that a device copied after a wrong prediction.
    PlaceMissBytes, "place_miss_bytes";
    /// Bytes that readers took by reference.
    LoanedBytes, "loaned_bytes";
    /// Bytes copied by this stack in both directions.
    CopiedBytes, "copied_bytes";
    /// Buffers allocated from the pool's magazine.
    BufferFast, "buffer_fast";
    /// Buffers allocated from the free lists or a new slab because the magazine was empty.
    BufferSlow, "buffer_slow";
    /// Buffer allocations that failed.
    BufferEmpty, "buffer_empty";
    /// Batches of free buffers loaded into the magazine.
    BufferRefill, "buffer_refill";
    /// Bytes read to compute checksums that the device does not compute.
    SummedBytes, "summed_bytes";
    /// Calls of tcp_output.
    TcpOutputs, "tcp_outputs";
    /// TCP segments sent (a super-segment counts once).
    TcpSegmentsOut, "tcp_segments_out";
    /// TCP segments sent that only acknowledge: no data, no SYN, FIN or RST.
    TcpAcksOut, "tcp_acks_out";
    /// MTU-sized packets in the TCP segments sent.
    TcpPacketsOut, "tcp_packets_out";
    /// TCP segments received (a super-segment counts once).
    TcpSegmentsIn, "tcp_segments_in";
    /// TCP bytes retransmitted.
    TcpRetransmitBytes, "tcp_retransmit_bytes";
    /// Fast retransmissions entered.
    TcpFastRetransmits, "tcp_fast_retransmits";
    /// Retransmission time-outs.
    TcpTimeouts, "tcp_timeouts";
    /// Tail loss probes (RFC 8985).
    TcpTailLossProbes, "tcp_tail_loss_probes";
    /// Detections of lost retransmissions (RFC 8985).
    TcpLostRetransmits, "tcp_lost_retransmits";
    /// Recoveries found spurious and undone (RFC 3522, RFC 3708, RFC 5682).
    TcpSpuriousRecoveries, "tcp_spurious_recoveries";
    /// Probes for a larger path MTU sent (RFC 4821).
    TcpMtuProbes, "tcp_mtu_probes";
    /// Probes for a larger path MTU acknowledged.
    TcpMtuProbesAcked, "tcp_mtu_probes_acked";
    /// Probes for a larger path MTU lost.
    TcpMtuProbesLost, "tcp_mtu_probes_lost";
    /// Segments made smaller because a black hole was suspected (RFC 4821 section 7.7).
    TcpBlackHoles, "tcp_black_holes";
    /// DSACK blocks received: bytes that the peer received twice (RFC 2883).
    TcpDsacksIn, "tcp_dsacks_in";
    /// DSACK blocks sent.
    TcpDsacksOut, "tcp_dsacks_out";
    /// Packets received with a CE mark (RFC 3168, RFC 9768).
    TcpEcnMarksIn, "tcp_ecn_marks_in";
    /// Segments received that report CE marks, by ECE or by accurate feedback.
    TcpEcnEchoesIn, "tcp_ecn_echoes_in";
    /// Reductions of a congestion window because of such reports.
    TcpEcnReductions, "tcp_ecn_reductions";
    /// Bytes that peers have reported as marked, by accurate feedback (RFC 9768).
    TcpEcnMarkedBytes, "tcp_ecn_marked_bytes";
    /// Connections with accurate ECN feedback.
    TcpAccurateEcnOpens, "tcp_accurate_ecn_opens";
    /// Connections that stopped using ECN because the path or the peer has falsified marks or feedback.
    TcpEcnDistrusted, "tcp_ecn_distrusted";
    /// Bytes that arrived out of order.
    TcpOutOfOrderBytes, "tcp_out_of_order_bytes";
    /// Bytes behind gaps that were discarded because others needed their memory: the peer sends them again.
    TcpOutOfOrderDiscarded, "tcp_out_of_order_discarded";
    /// Received bytes copied together because their buffers would waste storage that other windows need.
    TcpCollapsedBytes, "tcp_collapsed_bytes";
    /// Zero-window probes sent.
    TcpWindowProbes, "tcp_window_probes";
    /// Challenge ACKs sent (RFC 5961).
    TcpChallengeAcks, "tcp_challenge_acks";
    /// Connections opened by this stack.
    TcpActiveOpens, "tcp_active_opens";
    /// Connections accepted by a listener.
    TcpPassiveOpens, "tcp_passive_opens";
    /// SYN cookies sent.
    TcpSynCookiesSent, "tcp_syncookies_sent";
    /// Connections established by a valid SYN cookie.
    TcpSynCookiesValid, "tcp_syncookies_valid";
    /// Connections whose first data a server took with the SYN (RFC 7413).
    TcpFastOpensActive, "tcp_fast_opens_active";
    /// SYNs with a Fast Open option that a server refused or that were lost.
    TcpFastOpensFailed, "tcp_fast_opens_failed";
    /// Connections accepted with the SYN, before their handshake was complete.
    TcpFastOpensPassive, "tcp_fast_opens_passive";
    /// Fast Open cookies sent.
    TcpFastOpenCookiesSent, "tcp_fast_open_cookies_sent";
    /// SYNs with an invalid Fast Open cookie.
    TcpFastOpenCookiesInvalid, "tcp_fast_open_cookies_invalid";
    /// SYNs whose data was ignored because the listener was at its limit of Fast Open connections.
    TcpFastOpenOverflows, "tcp_fast_open_overflows";
    /// Embryonic connections evicted by a later SYN.
    TcpEmbryosReplaced, "tcp_embryos_replaced";
    /// Embryonic connections given up because no answer to their SYN,ACK came.
    TcpEmbryosExpired, "tcp_embryos_expired";
    /// Resets sent.
    TcpResetsOut, "tcp_resets_out";
    /// Resets in reply to segments without a connection that the rate limit suppressed.
    TcpResetsLimited, "tcp_resets_limited";
    /// Orphaned connections reset because they exceeded the limit on their number or memory.
    TcpOrphansReset, "tcp_orphans_reset";
    /// Stalled connections reset because others needed their send memory.
    TcpStalledReset, "tcp_stalled_reset";
    /// Connections, most of them reset by that, whose unread bytes were discarded because others needed the memory.
    TcpUnreadReset, "tcp_unread_reset";
    /// Connections aborted by the user time-out (RFC 5482): nothing was acknowledged.
    TcpUserTimeouts, "tcp_user_timeouts";
    /// Keepalive probes sent.
    TcpKeepaliveProbes, "tcp_keepalive_probes";
    /// Connections aborted because keepalive probes were not answered.
    TcpKeepaliveTimeouts, "tcp_keepalive_timeouts";
    /// Resets accepted.
    TcpResetsIn, "tcp_resets_in";
    /// Fragments received.
    FragmentsIn, "fragments_in";
    /// Datagrams reassembled from fragments.
    Reassembled, "reassembled";
    /// Fragments sent.
    FragmentsOut, "fragments_out";
    /// UDP datagrams sent.
    UdpOut, "udp_out";
    /// UDP datagrams delivered to sockets.
    UdpIn, "udp_in";
    /// ICMP messages sent.
    IcmpOut, "icmp_out";
    /// ICMP messages received.
    IcmpIn, "icmp_in";
    /// Timers that expired.
    TimersFired, "timers_fired";
}

/// The event and drop counters of one shard. Only the shard writes them.
#[derive(Clone)]
pub struct Counters {
    counts: [u64; Counter::COUNT],
    drops: [u64; DropReason::COUNT],
}

/// The names and values of those that are not zero.
impl fmt::Debug for Counters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let counts = Counter::ALL.iter().map(|c| (c.name(), self.value(*c)));
        let drops = DropReason::ALL.iter().map(|r| (r.name(), self.drops(*r)));
        f.debug_map().entries(counts.chain(drops).filter(|(_, n)| *n > 0)).finish()
    }
}

impl Default for Counters {
    fn default() -> Self {
        Counters { counts: [0; Counter::COUNT], drops: [0; DropReason::COUNT] }
    }
}

impl Counters {
    /// Adds `n` to a counter.
    #[inline]
    pub fn add(&mut self, c: Counter, n: u64) {
        if let Some(slot) = self.counts.get_mut(c as usize) {
            *slot = slot.wrapping_add(n);
        }
    }

    /// Adds one to a counter.
    #[inline]
    pub fn count(&mut self, c: Counter) {
        self.add(c, 1);
    }

    /// Counts one dropped packet.
    #[inline]
    pub fn drop_packet(&mut self, r: DropReason) {
        if let Some(slot) = self.drops.get_mut(r as usize) {
            *slot = slot.wrapping_add(1);
        }
    }

    /// The value of a counter.
    pub fn value(&self, c: Counter) -> u64 {
        self.counts.get(c as usize).copied().unwrap_or(0)
    }

    /// Packets dropped for a reason.
    pub fn drops(&self, r: DropReason) -> u64 {
        self.drops.get(r as usize).copied().unwrap_or(0)
    }

    /// Packets dropped for any reason.
    pub fn total_drops(&self) -> u64 {
        self.drops.iter().sum()
    }

    /// Adds the counts of another shard.
    pub fn merge(&mut self, other: &Counters) {
        for (a, b) in self.counts.iter_mut().zip(other.counts) {
            *a = a.wrapping_add(b);
        }
        for (a, b) in self.drops.iter_mut().zip(other.drops) {
            *a = a.wrapping_add(b);
        }
    }
}
