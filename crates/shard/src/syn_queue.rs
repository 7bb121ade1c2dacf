//! Options and statistics of listeners, and their SYN queue.

use alloc::collections::VecDeque;

use fulmar_base::{Duration, Instant, SlotId};
use fulmar_tcp::Keepalive;

/// Default length of a SYN queue at the least: a backlog of 1 limits connections to be accepted, not
/// handshakes under way.
const MIN_SYN_BACKLOG: usize = 8;

/// When a listener answers SYNs with cookies (Linux: `net.ipv4.tcp_syncookies`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum SynCookies {
    /// Never: in a full SYN queue the oldest embryo is replaced (Linux: 0).
    Off,
    /// While the SYN queue, or that of the source address, is full (Linux: 1).
    #[default]
    WhenFull,
    /// Always: there are no embryos. For tests (Linux: 2).
    Always,
}

/// How a listener is opened.
#[derive(Clone, Copy, Debug)]
pub struct ListenOptions {
    /// Connections at most that wait to be accepted. Default 1024; Linux's default is 4096, std
    /// asks for 128.
    pub backlog: usize,
    /// Embryos at most: connections whose handshake is under way. `None`: as many as `backlog`, but at
    /// least 8. Each takes about 2 KiB.
    pub syn_backlog: Option<usize>,
    /// When SYNs are answered with cookies. Default: while there is no space for an embryo.
    pub syn_cookies: SynCookies,
    /// Bind although connections of an earlier listener are still in the tables. Default on, as
    /// `core::net` does.
    pub reuse_address: bool,
    /// A listener on `::` does not take IPv4. Default off.
    pub only_v6: bool,
    /// Keepalive of its connections ([`fulmar_tcp::Tcb::set_keepalive`]). Default off.
    pub keepalive: Option<Keepalive>,
    /// User time-out of its connections ([`fulmar_tcp::Tcb::set_user_timeout`]). Default as configured.
    pub user_timeout: Option<Duration>,
}

impl Default for ListenOptions {
    fn default() -> Self {
        ListenOptions {
            backlog: 1024,
            syn_backlog: None,
            syn_cookies: SynCookies::default(),
            reuse_address: true,
            only_v6: false,
            keepalive: None,
            user_timeout: None,
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
    /// SYNs answered with a cookie.
    pub cookies_sent: u64,
    /// ACKs that brought back a right one.
    pub cookies_valid: u64,
    /// ACKs that brought back a wrong one.
    pub cookies_failed: u64,
    /// Embryos replaced by a later one.
    pub embryos_replaced: u64,
    /// SYNs dropped: full accept queue, limits of the source address, no socket left.
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
            cookies_sent: self.cookies_sent + other.cookies_sent,
            cookies_valid: self.cookies_valid + other.cookies_valid,
            cookies_failed: self.cookies_failed + other.cookies_failed,
            embryos_replaced: self.embryos_replaced + other.embryos_replaced,
            syns_dropped: self.syns_dropped + other.syns_dropped,
            acks_dropped: self.acks_dropped + other.acks_dropped,
        }
    }
}

/// The SYN queue of a listener, and its cookies.
pub struct SynQueue {
    /// Embryos at most.
    pub limit: usize,
    pub cookies: SynCookies,
    /// Embryos.
    pub len: usize,
    /// Oldest first; entries that are embryos no longer are skipped.
    pub order: VecDeque<SlotId>,
    /// Until when a cookie that was sent may come back.
    pub cookies_until: Instant,
    /// Counts; lengths and limits are filled in by [`crate::sockets::Listener::stat`].
    pub counts: ListenerStat,
}

impl SynQueue {
    pub fn new(options: &ListenOptions) -> SynQueue {
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
    pub fn remove_one(&mut self) {
        self.len = self.len.saturating_sub(1);
    }

    pub fn is_under_pressure(&self) -> bool {
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
