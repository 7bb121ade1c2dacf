//! The one list of counters, and the table that a shard keeps of them.

use crate::DropReason;

macro_rules! counters {
    ($($(#[doc = $doc:literal])* $variant:ident, $name:literal;)*) => {
        /// Something that a shard counts.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        #[repr(u8)]
        pub enum Counter {
            $($(#[doc = $doc])* $variant,)*
        }

        impl Counter {
            /// Every counter, in order.
            pub const ALL: &'static [Counter] = &[$(Counter::$variant,)*];
            /// How many counters there are.
            pub const COUNT: usize = Self::ALL.len();

            /// The name in tables and JSON.
            pub const fn name(self) -> &'static str {
                match self { $(Counter::$variant => $name,)* }
            }

            /// One sentence for a person.
            pub const fn sentence(self) -> &'static str {
                match self { $(Counter::$variant => concat!($($doc,)*),)* }
            }
        }
    };
}

counters! {
    /// Frames given to the device (a super-frame counts once).
    TxFrames, "tx_frames";
    /// Packets of MTU size that those frames stand for.
    TxPackets, "tx_packets";
    /// Bytes of frames given to the device.
    TxBytes, "tx_bytes";
    /// Frames taken from the device.
    RxFrames, "rx_frames";
    /// Packets of MTU size that those frames stand for.
    RxPackets, "rx_packets";
    /// Bytes of frames taken from the device.
    RxBytes, "rx_bytes";
    /// TCP segments that were joined to the one in front of them before ip and tcp looked at them.
    GroJoined, "gro_joined";
    /// Datagrams that crossed into the device joined to the one in front of them.
    UsoJoined, "uso_joined";
    /// Bursts handed to the device.
    TxBursts, "tx_bursts";
    /// Receive polls of the device.
    RxPolls, "rx_polls";
    /// Receive polls that found nothing.
    RxEmptyPolls, "rx_empty_polls";
    /// Times a thread slept on the device; each sleep ends with a wake-up.
    Sleeps, "sleeps";
    /// Of those, sleeps for a fixed time in which frames gathered (a flood).
    Holds, "holds";
    /// Waits in which a thread looked at the device before it slept, or instead.
    Looks, "looks";
    /// Nanoseconds of that looking.
    LookNs, "look_ns";
    /// Steps by which holds became longer or shorter.
    HoldSteps, "hold_steps";
    /// Wake-ups sent to a sleeping thread or poll set.
    Wakeups, "wakeups";
    /// Requests left in the shard's inbox because the lock was taken.
    InboxPosts, "inbox_posts";
    /// Packets that arrived on a queue other than their owner's.
    WrongQueue, "wrong_queue";
    /// Times that a call took the lock of one of several shards behind a call of another thread: 0 where
    /// each thread keeps to a shard of its own.
    SharedLocks, "shared_locks";
    /// Packets from this stack to itself.
    Loopback, "loopback";
    /// Writes accepted (sosend calls).
    Sends, "sends";
    /// Passes of tcp::output that writes made themselves: one for each chain that was handed over.
    SendOutputs, "send_outputs";
    /// Frames that went down in those passes (a super-segment counts once).
    SendFrames, "send_frames";
    /// Packets of MTU size that those frames stand for.
    SendPackets, "send_packets";
    /// Mbufs taken to hold the bytes of writes.
    SendMbufs, "send_mbufs";
    /// Bytes accepted from writers.
    SendBytes, "send_bytes";
    /// Writers that had to wait for send memory although their buffer had space.
    SendWaits, "send_waits";
    /// Of those, woken because memory came free for them.
    SendWakes, "send_wakes";
    /// Pieces of files accepted (each followed by one pass of tcp::output).
    SendFilePieces, "sendfile_pieces";
    /// Bytes of those pieces, headers and trailers included.
    SendFileBytes, "sendfile_bytes";
    /// Pieces of files that were accepted before they were read, because they were not in memory.
    SendFileDeferred, "sendfile_deferred";
    /// Bytes of files that were queued by reference to their pages.
    SendFileMappedBytes, "sendfile_mapped_bytes";
    /// Reads that returned data (soreceive calls).
    Receives, "receives";
    /// Reads that had to wait and posted their own buffer meanwhile.
    PlacedReads, "placed_reads";
    /// Bytes given to readers.
    ReceiveBytes, "receive_bytes";
    /// Frames whose payload a device put straight into a posted buffer.
    PlacedFrames, "placed_frames";
    /// Bytes of their payload.
    PlacedBytes, "placed_bytes";
    /// Times a device was told what comes next of a flow.
    PlaceHints, "place_hints";
    /// Times a posted buffer was made known to a device.
    PlaceRegistrations, "place_registrations";
    /// Frames that came while a device expected the next one of a flow and did not fit.
    PlaceMisses, "place_misses";
    /// Bytes that a device copied because they had landed where they did not belong.
    PlaceMissBytes, "place_miss_bytes";
    /// Bytes that readers took by reference.
    LoanedBytes, "loaned_bytes";
    /// Bytes copied by this stack, both directions.
    CopiedBytes, "copied_bytes";
    /// Buffers that came ready-made out of the shard's cache.
    BufferFast, "buffer_fast";
    /// Buffers for which the cache had nothing: from the general free lists or a new slab.
    BufferSlow, "buffer_slow";
    /// Requests for a buffer that nothing could serve.
    BufferEmpty, "buffer_empty";
    /// Batches of freed buffers brought back into the cache.
    BufferRefill, "buffer_refill";
    /// Bytes of frames read again for checksums that the device does not compute.
    SummedBytes, "summed_bytes";
    /// Passes of tcp::output.
    TcpOutputs, "tcp_outputs";
    /// TCP segments sent (a super-segment counts once).
    TcpSegmentsOut, "tcp_segments_out";
    /// Packets of MTU size that the TCP segments sent stand for.
    TcpPacketsOut, "tcp_packets_out";
    /// TCP segments received (a super-segment counts once).
    TcpSegmentsIn, "tcp_segments_in";
    /// TCP bytes sent again.
    TcpRetransmitBytes, "tcp_retransmit_bytes";
    /// Fast retransmissions entered.
    TcpFastRetransmits, "tcp_fast_retransmits";
    /// Retransmission time-outs.
    TcpTimeouts, "tcp_timeouts";
    /// Bytes that arrived out of order.
    TcpOutOfOrderBytes, "tcp_out_of_order_bytes";
    /// Zero-window probes sent.
    TcpWindowProbes, "tcp_window_probes";
    /// Challenge ACKs sent (RFC 5961).
    TcpChallengeAcks, "tcp_challenge_acks";
    /// Connections opened by this stack.
    TcpActiveOpens, "tcp_active_opens";
    /// Connections accepted by a listener.
    TcpPassiveOpens, "tcp_passive_opens";
    /// SYNs answered with a SYN cookie.
    TcpSynCookiesSent, "tcp_syncookies_sent";
    /// Connections opened by a SYN cookie that came back.
    TcpSynCookiesValid, "tcp_syncookies_valid";
    /// Embryos that gave way to a later SYN.
    TcpEmbryosReplaced, "tcp_embryos_replaced";
    /// Resets sent.
    TcpResetsOut, "tcp_resets_out";
    /// Resets that segments without a connection asked for and that were not sent, because these are
    /// limited in rate.
    TcpResetsLimited, "tcp_resets_limited";
    /// Connections that their users had closed and that were reset because they, or their memory, were
    /// too many.
    TcpOrphansReset, "tcp_orphans_reset";
    /// Connections reset because their peers took nothing for long and others needed the memory.
    TcpStalledReset, "tcp_stalled_reset";
    /// Connections that failed because nothing was acknowledged for the user time-out.
    TcpUserTimeouts, "tcp_user_timeouts";
    /// Keepalive probes sent.
    TcpKeepaliveProbes, "tcp_keepalive_probes";
    /// Connections that failed because keepalive probes were not answered.
    TcpKeepaliveTimeouts, "tcp_keepalive_timeouts";
    /// Resets accepted.
    TcpResetsIn, "tcp_resets_in";
    /// Fragments received.
    FragmentsIn, "fragments_in";
    /// Datagrams put together from fragments.
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
    /// Timers that fired.
    TimersFired, "timers_fired";
}

/// The counters of one shard. Only the shard writes them.
#[derive(Clone, Debug)]
pub struct Counters {
    counts: [u64; Counter::COUNT],
    drops: [u64; DropReason::COUNT],
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

    /// How many packets were dropped for this reason.
    pub fn drops(&self, r: DropReason) -> u64 {
        self.drops.get(r as usize).copied().unwrap_or(0)
    }

    /// Drops of every kind together.
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
