//! How large the send buffer is, as long as its user has not said.
//!
//! It begins at `Config::send_buffer_bytes` and doubles once per round trip while it is what holds
//! the connection back: it is nearly full, and less than half of it still waits for the windows. So
//! it ends at about twice what is in flight: one window under way, one being written.
//!
//! Two bounds keep it from growing for nothing. It never exceeds twice the bandwidth-delay product,
//! the best rate of the last rounds times the *smallest* round-trip time: what a longer queue in the
//! network adds to the round-trip time does not count, so that the buffer cannot feed the queue. And
//! a connection takes no more than its part of what the pool still has.
//!
//! The smallest round-trip time is that of the whole connection; a path that becomes longer keeps
//! the buffer of the shorter one.

use crate::Tcb;
use crate::arith::div_rem;
use crate::contract::Env;
use crate::rtt::nanos;
use fulmar_base::{Duration, Instant};
use fulmar_mbuf::Purpose;

/// Rounds after which an old best rate is forgotten, at the latest after twice as many.
const EPOCH_ROUNDS: u8 = 8;

/// A connection may take this part of what the send share still has.
const SHARE: usize = 8;

/// What is known about the rounds.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Tuning {
    /// The user has set the buffer.
    pub fixed: bool,
    /// The round ends when this position is acknowledged.
    round_end: u64,
    /// Position acknowledged when the round began, and when that was.
    round_from: u64,
    round_at: Option<Instant>,
    /// The buffer held the connection back in this round.
    pub short: bool,
    /// The best rates of this and of the last epoch, bytes per second.
    best: [u64; 2],
    rounds: u8,
}

impl Tuning {
    /// Takes the rate of a round.
    fn note_rate(&mut self, bytes: u64, took: Duration) {
        let ns = nanos(took);
        if ns == 0 {
            return;
        }
        let (rate, _) = div_rem(bytes.saturating_mul(1_000_000_000), ns);
        self.rounds = self.rounds.saturating_add(1);
        let [best, last] = self.best;
        self.best = if self.rounds > EPOCH_ROUNDS {
            self.rounds = 0;
            [rate, best]
        } else {
            [best.max(rate), last]
        };
    }

    /// Twice the bandwidth-delay product, bytes.
    fn two_products(&self, min_rtt: Duration) -> usize {
        let [best, last] = self.best;
        let per_ns = u128::from(best.max(last)).saturating_mul(u128::from(nanos(min_rtt)));
        let product = per_ns.checked_div(500_000_000).unwrap_or(0);
        usize::try_from(product).unwrap_or(usize::MAX)
    }
}

impl Tcb {
    /// After a pass of output: whether the send buffer is what holds the connection back.
    #[inline]
    pub(crate) fn note_short_buffer(&mut self) {
        let limit = self.send.limit();
        let unsent = self.send_end().saturating_sub(self.snd_nxt);
        self.tuning.short |= self.send.space() < limit / 4 && unsent < limit as u64 / 2;
    }

    /// After an acknowledgement: at the end of a round the buffer may change.
    #[inline]
    pub(crate) fn tune_send_buffer(&mut self, env: &Env) {
        if !self.tuning.fixed && self.snd_una >= self.tuning.round_end {
            self.end_round(env);
        }
    }

    fn end_round(&mut self, env: &Env) {
        if let Some(since) = self.tuning.round_at {
            let bytes = self.snd_una.saturating_sub(self.tuning.round_from);
            self.tuning.note_rate(bytes, env.now.since(since));
        }
        if let Some(bytes) = self.tuned_buffer(env) {
            self.send.set_limit(bytes);
        }
        self.tuning.short = false;
        self.tuning.round_from = self.snd_una;
        self.tuning.round_end = self.snd_nxt.max(self.snd_una.saturating_add(1));
        // A pause of the writer is no round.
        self.tuning.round_at = (self.snd_nxt > self.snd_una).then_some(env.now);
    }

    /// A better size of the buffer, if there is one.
    fn tuned_buffer(&self, env: &Env) -> Option<usize> {
        let limit = self.send.limit();
        let least = self.cfg.send_buffer_bytes;
        let most = self.tuning.two_products(self.rtt.min()?);
        let most = most.min(self.cfg.max_buffer_bytes).max(least);
        if limit > most.saturating_mul(2) {
            return Some(most);
        }
        if !self.tuning.short || most <= limit {
            return None;
        }
        let (affordable, _) = div_rem(env.pool.available(Purpose::Send) as u64, SHARE as u64);
        let larger = limit.saturating_mul(2).min(most);
        (larger.saturating_sub(limit) as u64 <= affordable).then_some(larger)
    }
}
