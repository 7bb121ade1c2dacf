//! How large the buffers are, as long as their user has not said.
//!
//! **The send buffer** begins at `Config::send_buffer_bytes` and doubles once per round trip while it is what holds
//! the connection back: it is nearly full, and less than half of it still waits for the windows. So
//! it ends at about twice what is in flight: one window under way, one being written.
//!
//! Two bounds keep it from growing for nothing. It never exceeds twice the bandwidth-delay product,
//! the best rate of the last rounds times the *smallest* round-trip time: what a longer queue in the
//! network adds to the round-trip time does not count, so that the buffer cannot feed the queue. And
//! a connection takes no more than its part of what the pool still has.
//!
//! **The receive buffer** begins at `Config::recv_buffer_bytes`. A receiver does not see what is in
//! flight, but what arrives in a round trip: about as much as the window offers means that the window
//! is what holds the peer back, and it doubles, once per round. The bounds are the same: twice the
//! product of the best rate and the smallest round-trip time, and a part of what is left of the shard's
//! window budget. So it ends where the path is full, and where the peer is not held back (a peer on
//! the same machine, say) it stays as small as it began, and in the cache. It does not grow for a
//! reader who leaves bytes lying, and never shrinks by itself: what was offered may still come.
//!
//! The smallest round-trip time is that of the whole connection; a path that becomes longer keeps
//! the buffers of the shorter one. It is known from the handshake; where that was lost, or took longer
//! than the path (somebody had to be found first), the peer's echoes of our timestamps tell a receiver
//! that sends nothing (RFC 7323 section 4), to the millisecond.

use crate::Tcb;
use crate::arith::div_rem;
use crate::contract::Env;
use crate::rtt::nanos;
use crate::timers::later;
use fulmar_base::{Duration, Instant};
use fulmar_mbuf::Purpose;
use fulmar_wire::tcp::Header;

/// Rounds after which an old best rate is forgotten, at the latest after twice as many.
const EPOCH_ROUNDS: u8 = 8;

/// A connection may take this part of what the send share still has.
const SHARE: usize = 8;

/// A receiver's rounds last at least so long: frames come in bursts, and a rate over less would be
/// that of a burst.
const LEAST_RECV_ROUND: Duration = Duration::from_millis(10);

/// The best rates of this and of the last epoch of rounds, bytes per second.
#[derive(Clone, Copy, Debug, Default)]
struct Rates {
    best: [u64; 2],
    rounds: u8,
}

/// What is known about the rounds of the sender.
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
    rates: Rates,
}

/// What is known about the rounds of the receiver.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RecvTuning {
    /// The user has set the buffer.
    pub fixed: bool,
    /// When the round ends, at the earliest.
    round_end: Instant,
    /// The position expected when the round began, and when that was.
    round_from: u64,
    round_at: Option<Instant>,
    rates: Rates,
    /// The smallest round-trip time by the peer's echoes.
    echo_min: Option<Duration>,
}

impl Rates {
    /// Takes the rate of a round.
    fn note(&mut self, bytes: u64, took: Duration) {
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
            self.tuning.rates.note(bytes, env.now.since(since));
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
        let most = self.tuning.rates.two_products(self.rtt.min()?);
        let most = most.min(self.cfg.max_buffer_bytes).max(least);
        if limit > most.saturating_mul(2) {
            return Some(most);
        }
        if !self.tuning.short || most <= limit {
            return None;
        }
        let common = env.pool.share_of(Purpose::Send).common();
        let (affordable, _) = div_rem(common as u64, SHARE as u64);
        let larger = limit.saturating_mul(2).min(most);
        (larger.saturating_sub(limit) as u64 <= affordable).then_some(larger)
    }
}

impl Tcb {
    /// After bytes in order: at the end of a round the receive buffer may grow.
    #[inline]
    pub(crate) fn tune_recv_buffer(&mut self, env: &Env, hdr: &Header) {
        if !self.recv_tuning.fixed && env.now >= self.recv_tuning.round_end {
            self.end_recv_round(env, hdr);
        }
    }

    fn end_recv_round(&mut self, env: &Env, hdr: &Header) {
        self.sample_echo(env, hdr);
        let rtts = [self.rtt.min(), self.recv_tuning.echo_min];
        let Some(rtt) = rtts.into_iter().flatten().min() else { return };
        if let Some(since) = self.recv_tuning.round_at {
            let bytes = self.rcv_nxt.saturating_sub(self.recv_tuning.round_from);
            self.recv_tuning.rates.note(bytes, env.now.since(since));
            if let Some(bytes) = self.tuned_recv_buffer(env, rtt) {
                self.recv_limit = bytes;
            }
        }
        self.recv_tuning.round_from = self.rcv_nxt;
        self.recv_tuning.round_at = Some(env.now);
        self.recv_tuning.round_end = later(env.now, rtt.max(LEAST_RECV_ROUND));
    }

    /// A round-trip time from the echo of our timestamp: at least the path's, since the peer may have
    /// waited for something to send.
    fn sample_echo(&mut self, env: &Env, hdr: &Header) {
        let Some(t) = hdr.options.timestamps.filter(|t| self.stamps.on && t.echo != 0) else {
            return;
        };
        let age_ms = self.stamp(env.now).wrapping_sub(t.echo);
        if age_ms < 1 << 20 {
            let sample = Duration::from_millis(u64::from(age_ms.max(1)));
            let least = self.recv_tuning.echo_min.map_or(sample, |m| m.min(sample));
            self.recv_tuning.echo_min = Some(least);
        }
    }

    /// A larger receive buffer, if the window is what holds the peer back.
    fn tuned_recv_buffer(&self, env: &Env, rtt: Duration) -> Option<usize> {
        let limit = self.recv_limit;
        let most = self.recv_tuning.rates.two_products(rtt).min(self.cfg.max_buffer_bytes);
        // Three quarters of the window in a round trip.
        let is_held_back = most >= limit.saturating_add(limit / 2);
        if !is_held_back || self.recv.readable() > limit / 2 {
            return None;
        }
        let larger = limit.saturating_mul(2).min(most);
        let budget = env.window.limit_bytes.saturating_sub(env.window.granted_bytes);
        let free = budget.min(env.pool.available(Purpose::Receive));
        let (affordable, _) = div_rem(free as u64, SHARE as u64);
        (larger.saturating_sub(limit) as u64 <= affordable).then_some(larger)
    }
}
