//! Fast Open of a listener: its options, and the connections that count as pending.

use alloc::collections::VecDeque;

use crate::base::{Duration, Instant};

use crate::shard::fast_open::keys::FastOpenKeys;

/// Fast Open of a listener (Linux: TCP_FASTOPEN).
#[derive(Clone, Copy, Debug)]
pub struct FastOpenOptions {
    /// Connections at most, per shard, that were accepted with their SYN and whose handshake is not complete (RFC 7413
    /// section 5.1); beyond it the data of SYNs is ignored. A connection that its peer has reset counts for a
    /// minute more. Default 256. Each takes about 2 KiB and the data of its SYN, at most one segment.
    pub backlog: usize,
    /// Takes the data of SYNs without a cookie. A SYN with a forged source then costs a connection, and its answer
    /// may be up to an initial window of data to the owner of that address: for networks where peers are known
    /// (Linux: bit 0x200 of `tcp_fastopen`). Default off.
    pub without_cookie: bool,
    /// The keys of cookies. Default: the stack's keys, which change every day. Servers that share an address set the
    /// same keys.
    pub keys: Option<FastOpenKeys>,
}

impl Default for FastOpenOptions {
    fn default() -> Self {
        FastOpenOptions { backlog: 256, without_cookie: false, keys: None }
    }
}

/// How long a reset connection counts as pending (Linux: the same).
const RESET_COUNTS_FOR: Duration = Duration::from_secs(60);

/// The Fast Open connections of a listener.
pub(crate) struct FastOpenQueue {
    pub options: FastOpenOptions,
    /// Connections whose handshake is not complete.
    pub pending: usize,
    /// Until when each connection that was reset counts; oldest first.
    resets: VecDeque<Instant>,
}

impl FastOpenQueue {
    pub(crate) fn new(options: FastOpenOptions) -> FastOpenQueue {
        FastOpenQueue { options, pending: 0, resets: VecDeque::new() }
    }

    /// Whether a further connection may open with its SYN.
    pub(crate) fn has_space(&mut self, now: Instant) -> bool {
        while self.resets.front().is_some_and(|until| *until <= now) {
            self.resets.pop_front();
        }
        self.pending + self.resets.len() < self.options.backlog
    }

    /// A connection was reset by its peer before the end of its handshake.
    pub(crate) fn add_reset(&mut self, now: Instant) {
        self.resets.push_back(now + RESET_COUNTS_FOR);
    }
}
