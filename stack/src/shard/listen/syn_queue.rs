//! Options and statistics of listeners, and their SYN queue.

use alloc::collections::VecDeque;

use crate::base::{Duration, Instant, SlotId};

use crate::shard::conn::socket_options::SocketOptions;
use crate::shard::fast_open::queue::FastOpenOptions;

/// Default length of a SYN queue at the least: a backlog of 1 limits connections to be accepted, not
/// handshakes under way.
const MIN_SYN_BACKLOG: usize = 8;

/// When a listener answers SYNs with cookies (Linux: `net.ipv4.tcp_syncookies`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub enum SynCookies {
    /// Never: in a full SYN queue the oldest embryo is replaced (Linux: 0).
    Off,
    /// While the SYN queue, or that of the source address, is full (Linux: 1).
    #[default]
    WhenFull,
    /// Always: there are no embryos. For tests (Linux: 2).
    Always,
}

/// How a listener offers SYNs to its program before they are answered (Windows: SO_CONDITIONAL_ACCEPT; the
/// connect indication of XTI's `t_listen`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ConditionalAccept {
    /// Pending connections at most, per shard, with those that were accepted and whose handshake is not over; further
    /// SYNs are dropped. Default 1024, about 200 bytes each (accepted: 2.5 KB).
    pub backlog: usize,
    /// The same of one source at most (an IPv4 address, or the upper 64 bits of an IPv6 address);
    /// further SYNs of it are dropped. Default 256.
    pub per_source: usize,
    /// Time after which a pending connection is dropped. Default 75 s, BSD's limit of a connection attempt.
    pub timeout: Duration,
}

impl Default for ConditionalAccept {
    fn default() -> Self {
        ConditionalAccept { backlog: 1024, per_source: 256, timeout: Duration::from_secs(75) }
    }
}

/// How a listener is opened.
#[derive(Clone, Copy, Debug)]
pub struct ListenOptions {
    /// Most connections that wait to be accepted. Default 1024; Linux's default is 4096, std asks for 128.
    pub backlog: usize,
    /// Most embryos: connections whose handshake is under way. `None`: `backlog`, but at least 8. Each takes about 2
    /// KiB.
    pub syn_backlog: Option<usize>,
    /// When SYNs are answered with cookies. Default: while there is no space for an embryo.
    pub syn_cookies: SynCookies,
    /// Offers each SYN to the program as a pending connection, before it is answered (`TcpListener::pending`; of a
    /// shard [`Shard::tcp_pending`](crate::shard::Shard::tcp_pending)). Such a listener has neither embryos nor cookies
    /// nor an accept queue. Default: the stack answers.
    pub conditional_accept: Option<ConditionalAccept>,
    /// Takes the data of SYNs with a valid Fast Open cookie before the handshake is complete (RFC 7413), and gives
    /// cookies to those who ask. What a program does with such data it may do twice, if the network duplicates the
    /// SYN. No effect with `conditional_accept`. Default off.
    pub fast_open: Option<FastOpenOptions>,
    /// Listens on every port that has no listener for the same address of its own; the port of the address
    /// is 0. The local address of a connection is where its SYN went. Default off.
    pub any_port: bool,
    /// Bind although connections of an earlier listener are still in the tables. Default on, as
    /// `std::net::TcpListener::bind` does on Unix (SO_REUSEADDR).
    pub reuse_address: bool,
    /// A listener on `::` does not take IPv4. Default off.
    pub only_v6: bool,
    /// Options of its connections, from the SYN,ACK on. Default: as configured.
    pub socket: SocketOptions,
}

impl Default for ListenOptions {
    fn default() -> Self {
        ListenOptions {
            backlog: 1024,
            syn_backlog: None,
            syn_cookies: SynCookies::default(),
            conditional_accept: None,
            fast_open: None,
            any_port: false,
            reuse_address: true,
            only_v6: false,
            socket: SocketOptions::default(),
        }
    }
}

impl ListenOptions {
    /// Embryos at most.
    pub(crate) fn embryo_limit(&self) -> usize {
        self.syn_backlog.unwrap_or(self.backlog.max(MIN_SYN_BACKLOG)).max(1)
    }
}

/// Statistics of a listener.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ListenerStat {
    /// Connections whose handshake is under way.
    pub embryos: usize,
    /// Embryos at most.
    pub embryo_limit: usize,
    /// Connections that wait to be accepted.
    pub accept_queue: usize,
    /// Connections in the accept queue at most.
    pub accept_limit: usize,
    /// Connections that the program has yet to decide about.
    pub pending: usize,
    /// Pending connections at most.
    pub pending_limit: usize,
    /// Pending connections dropped by their time-out.
    pub pending_expired: u64,
    /// Pending connections that the peer has reset.
    pub pending_reset: u64,
    /// SYNs answered with a cookie.
    pub cookies_sent: u64,
    /// ACKs that brought back a right one.
    pub cookies_valid: u64,
    /// ACKs without a connection that brought no valid one.
    pub cookies_failed: u64,
    /// Fast Open connections whose handshake is not complete.
    pub fast_open_pending: usize,
    /// These at most.
    pub fast_open_limit: usize,
    /// Connections opened with their SYN.
    pub fast_opens: u64,
    /// SYNs with an invalid cookie.
    pub fast_open_invalid: u64,
    /// SYNs whose data was ignored at the limit.
    pub fast_open_overflows: u64,
    /// Embryos replaced by a later one.
    pub embryos_replaced: u64,
    /// Embryos given up because no answer to their SYN,ACK came.
    pub embryos_expired: u64,
    /// SYNs dropped: full accept queue or queue of pending connections, limits of the source address, no socket left.
    pub syns_dropped: u64,
    /// ACKs at the end of a handshake dropped for the same reasons.
    pub acks_dropped: u64,
}

impl ListenerStat {
    /// This and the same listener in another shard.
    #[must_use]
    pub fn with(self, other: ListenerStat) -> ListenerStat {
        ListenerStat {
            embryos: self.embryos + other.embryos,
            embryo_limit: self.embryo_limit + other.embryo_limit,
            accept_queue: self.accept_queue + other.accept_queue,
            accept_limit: self.accept_limit + other.accept_limit,
            pending: self.pending + other.pending,
            pending_limit: self.pending_limit + other.pending_limit,
            pending_expired: self.pending_expired + other.pending_expired,
            pending_reset: self.pending_reset + other.pending_reset,
            cookies_sent: self.cookies_sent + other.cookies_sent,
            cookies_valid: self.cookies_valid + other.cookies_valid,
            cookies_failed: self.cookies_failed + other.cookies_failed,
            fast_open_pending: self.fast_open_pending + other.fast_open_pending,
            fast_open_limit: self.fast_open_limit + other.fast_open_limit,
            fast_opens: self.fast_opens + other.fast_opens,
            fast_open_invalid: self.fast_open_invalid + other.fast_open_invalid,
            fast_open_overflows: self.fast_open_overflows + other.fast_open_overflows,
            embryos_replaced: self.embryos_replaced + other.embryos_replaced,
            embryos_expired: self.embryos_expired + other.embryos_expired,
            syns_dropped: self.syns_dropped + other.syns_dropped,
            acks_dropped: self.acks_dropped + other.acks_dropped,
        }
    }
}

/// The SYN queue of a listener, and its cookies.
pub(crate) struct SynQueue {
    /// Embryos at most.
    pub limit: usize,
    pub cookies: SynCookies,
    /// Embryos.
    pub len: usize,
    /// Oldest first; entries that are embryos no longer are skipped.
    pub order: VecDeque<SlotId>,
    /// Until when a cookie that was sent may come back.
    pub cookies_until: Instant,
    /// Counts; lengths and limits are filled in by [`Listener::stat`](crate::shard::sockets::Listener::stat).
    pub counts: ListenerStat,
}

impl SynQueue {
    pub(crate) fn new(options: &ListenOptions) -> SynQueue {
        SynQueue {
            limit: options.embryo_limit(),
            cookies: options.syn_cookies,
            len: 0,
            order: VecDeque::new(),
            cookies_until: Instant::ZERO,
            counts: ListenerStat::default(),
        }
    }

    /// A connection has left the queue.
    pub(crate) fn remove_one(&mut self) {
        self.len = self.len.saturating_sub(1);
    }

    pub(crate) fn is_under_pressure(&self) -> bool {
        self.len > self.limit / 2
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_syn_queue_is_as_long_as_the_backlog_unless_that_is_very_short() {
        let limit = |backlog, syn_backlog| {
            ListenOptions { backlog, syn_backlog, ..ListenOptions::default() }.embryo_limit()
        };
        assert_eq!([limit(1, None), limit(8, None), limit(300, None)], [8, 8, 300]);
        assert_eq!([limit(300, Some(0)), limit(300, Some(5))], [1, 5]);
    }
}
