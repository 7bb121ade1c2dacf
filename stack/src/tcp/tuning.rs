//! Autotuning of the send and receive buffers, unless the user has set their size.
//!
//! **The send buffer** starts at `Config::send_buffer_bytes` and doubles once per round trip while
//! it limits the connection: it is nearly full, and less than half of it is unsent. So it settles
//! at about twice the bytes in flight: one window in flight, one being written.
//!
//! Two bounds keep it small. It never exceeds twice the bandwidth-delay product: the best rate of
//! the last rounds times the *minimum* round-trip time. Queueing delay does not count, so the
//! buffer cannot feed a queue in the network (bufferbloat). A controller that takes delivery-rate
//! samples keeps two of the products in flight itself, and must never find the buffer empty: there it
//! is twice as much. And a connection takes at most its
//! share of the pool's free memory.
//!
//! **The receive buffer** starts at `Config::recv_buffer_bytes`. A receiver does not see the bytes
//! in flight, but the bytes that arrive per round trip (dynamic right-sizing). If these are about a
//! window, the window limits the peer, and the buffer doubles, once per round. The bounds are the
//! same: twice the bandwidth-delay product, and a share of what is left of the shard's window
//! budget. So it settles where the path is full. With a peer that is not window-limited (on the
//! same machine, for example) it keeps its initial size and stays in the cache. It does not grow
//! while the reader leaves bytes unread, and never shrinks: an advertised window is not withdrawn.
//!
//! The minimum round-trip time is taken over the whole connection: a path that becomes longer keeps
//! the buffers of the shorter one. It is measured by the handshake. If a SYN was retransmitted, or
//! delayed by neighbour resolution, a receiver that sends no data measures it from TSecr (RFC 7323
//! section 4), in milliseconds.

use crate::base::{Duration, Instant};
use crate::mbuf::Purpose;
use crate::tcp::Tcb;
use crate::tcp::arith::div_rem;
use crate::tcp::contract::Env;
use crate::tcp::rtt::nanos;
use crate::tcp::timers::later;
use crate::wire::tcp::Header;

/// Rounds per epoch. A best rate expires after one to two epochs.
const EPOCH_ROUNDS: u8 = 8;

/// A buffer may grow by at most this fraction (1/8) of the free memory.
const GROWTH_FRACTION: usize = 8;

/// Minimum duration of a receive round. Frames arrive in bursts; over a shorter time the rate would
/// be that of a burst.
const MIN_RECV_ROUND: Duration = Duration::from_millis(10);

/// The best rates of the current and the previous epoch, bytes per second.
#[derive(Clone, Copy, Debug, Default)]
struct Rates {
    best: [u64; 2],
    rounds: u8,
}

/// Autotuning state of the send buffer.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Tuning {
    /// The user has set the buffer.
    pub fixed: bool,
    /// The round ends when this position is acknowledged.
    round_end: u64,
    /// `snd.una` at the start of the round, and the time.
    round_from: u64,
    round_at: Option<Instant>,
    /// The buffer limited the connection in this round.
    pub buffer_limited: bool,
    /// The application limited the last round.
    app_limited: bool,
    /// The rate of the last round, bytes per second.
    last_rate: u64,
    rates: Rates,
}

/// Autotuning state of the receive buffer.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RecvTuning {
    /// The user has set the buffer.
    pub fixed: bool,
    /// Earliest end of the round.
    round_end: Instant,
    /// `rcv.nxt` at the start of the round, and the time.
    round_from: u64,
    round_at: Option<Instant>,
    rates: Rates,
    /// The minimum round-trip time by TSecr.
    tsecr_min: Option<Duration>,
}

impl Rates {
    /// Records the rate of a round, bytes per second. `None`: it took no time.
    fn record(&mut self, bytes: u64, took: Duration) -> Option<u64> {
        let ns = nanos(took);
        if ns == 0 {
            return None;
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
        Some(rate)
    }

    /// Twice the bandwidth-delay product, bytes.
    fn twice_bdp(&self, min_rtt: Duration) -> usize {
        let [best, last] = self.best;
        let per_ns = u128::from(best.max(last)).saturating_mul(u128::from(nanos(min_rtt)));
        let product = per_ns.checked_div(500_000_000).unwrap_or(0);
        usize::try_from(product).unwrap_or(usize::MAX)
    }
}

impl Tuning {
    /// The rate of the last round, bytes per second, and whether the application limited it.
    pub(crate) fn last_rate(&self) -> (u64, bool) {
        (self.last_rate, self.app_limited)
    }
}

impl Tcb {
    /// After output: records whether the send buffer limits the connection.
    #[inline]
    pub(crate) fn record_buffer_limited(&mut self) {
        let limit = self.send.limit();
        let unsent = self.send_end().saturating_sub(self.snd.nxt);
        self.tuning.buffer_limited |= self.send.space() < limit / 4 && unsent < limit as u64 / 2;
    }

    /// After an acknowledgement: at the end of a round, measures its rate and resizes the send buffer.
    #[inline]
    pub(crate) fn tune_send_buffer(&mut self, env: &Env) {
        if self.snd.una >= self.tuning.round_end {
            self.end_send_round(env);
        }
    }

    fn end_send_round(&mut self, env: &Env) {
        if let Some(since) = self.tuning.round_at {
            let bytes = self.snd.una.saturating_sub(self.tuning.round_from);
            let is_dry = self.unsent_bytes() < self.smss();
            let rate = self.tuning.rates.record(bytes, env.now.since(since));
            self.tuning.last_rate = rate.unwrap_or(self.tuning.last_rate);
            self.tuning.app_limited = is_dry && self.pipe() < self.congestion.cwnd();
        }
        if !self.tuning.fixed
            && let Some(bytes) = self.tuned_send_buffer(env)
        {
            self.send.set_limit(bytes);
        }
        self.tuning.buffer_limited = false;
        self.tuning.round_from = self.snd.una;
        self.tuning.round_end = self.snd.nxt.max(self.snd.una.saturating_add(1));
        // No round begins while nothing is in flight.
        self.tuning.round_at = (self.snd.nxt > self.snd.una).then_some(env.now);
    }

    /// The new size of the send buffer, if it is to change.
    fn tuned_send_buffer(&self, env: &Env) -> Option<usize> {
        let limit = self.send.limit();
        let least = self.cfg.send_buffer_bytes;
        let most = self.tuning.rates.twice_bdp(self.rtt.min()?);
        let most = if self.delivery.is_on() { most.saturating_mul(2) } else { most };
        let most = most.min(self.cfg.max_buffer_bytes).max(least);
        if limit > most.saturating_mul(2) {
            return Some(most);
        }
        if !self.tuning.buffer_limited || most <= limit {
            return None;
        }
        let common = env.pool.share_of(Purpose::Send).common();
        let (affordable, _) = div_rem(common as u64, GROWTH_FRACTION as u64);
        let larger = limit.saturating_mul(2).min(most);
        (larger.saturating_sub(limit) as u64 <= affordable).then_some(larger)
    }
}

impl Tcb {
    /// After in-order data: grows the receive buffer at the end of a round.
    #[inline]
    pub(crate) fn tune_recv_buffer(&mut self, env: &Env, hdr: &Header) {
        if !self.recv_tuning.fixed && env.now >= self.recv_tuning.round_end {
            self.end_recv_round(env, hdr);
        }
    }

    fn end_recv_round(&mut self, env: &Env, hdr: &Header) {
        self.sample_tsecr(env, hdr);
        let rtts = [self.rtt.min(), self.recv_tuning.tsecr_min];
        let Some(rtt) = rtts.into_iter().flatten().min() else { return };
        if let Some(since) = self.recv_tuning.round_at {
            let bytes = self.rcv.nxt.saturating_sub(self.recv_tuning.round_from);
            self.recv_tuning.rates.record(bytes, env.now.since(since));
            if let Some(bytes) = self.tuned_recv_buffer(env, rtt) {
                self.space.set_limit(bytes);
            }
        }
        self.recv_tuning.round_from = self.rcv.nxt;
        self.recv_tuning.round_at = Some(env.now);
        self.recv_tuning.round_end = later(env.now, rtt.max(MIN_RECV_ROUND));
    }

    /// Takes a round-trip sample from TSecr. It is an upper bound, since the peer may have waited
    /// for data to send.
    fn sample_tsecr(&mut self, env: &Env, hdr: &Header) {
        let Some(t) = hdr.options.timestamps.filter(|t| self.ts.on && t.echo != 0) else {
            return;
        };
        let age_ms = self.ts_clock(env.now).wrapping_sub(t.echo);
        if age_ms < 1 << 20 {
            let sample = Duration::from_millis(u64::from(age_ms.max(1)));
            let least = self.recv_tuning.tsecr_min.map_or(sample, |m| m.min(sample));
            self.recv_tuning.tsecr_min = Some(least);
        }
    }

    /// The new size of the receive buffer, if the window limits the peer.
    fn tuned_recv_buffer(&self, env: &Env, rtt: Duration) -> Option<usize> {
        let limit = self.space.limit();
        let most = self.recv_tuning.rates.twice_bdp(rtt).min(self.cfg.max_buffer_bytes);
        // At least three quarters of the window arrived per round trip.
        let is_held_back = most >= limit.saturating_add(limit / 2);
        if !is_held_back || self.recv.readable() > limit / 2 {
            return None;
        }
        let larger = limit.saturating_mul(2).min(most);
        let budget = env.window.limit_bytes.saturating_sub(env.window.granted_bytes);
        let free = budget.min(env.pool.available(Purpose::Receive));
        let (affordable, _) = div_rem(free as u64, GROWTH_FRACTION as u64);
        (larger.saturating_sub(limit) as u64 <= affordable).then_some(larger)
    }
}
