//! RACK (RFC 8985 section 6): a segment is lost if another one that was sent later was delivered,
//! and a reordering window has passed.

use super::Mode;
use crate::base::{Counter, Counters, Duration, Instant};
use crate::tcp::Tcb;
use crate::tcp::scoreboard::{Delivered, LostRun, Scoreboard, Transmission};
use crate::tcp::timers::Timer;
use crate::wire::tcp::Header;

use crate::tcp::timers::Pending;

/// Recoveries without a DSACK after which the window shrinks to its first size (section 6.2 step 4).
const PERSIST_RECOVERIES: u8 = 16;

/// The state of RACK.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rack {
    /// The latest delivered transmission (RACK.xmit_ts, RACK.end_seq).
    latest: Transmission,
    /// Round-trip time of the latest delivery (RACK.rtt).
    rtt: Duration,
    /// RACK.reordering_seen.
    reordering_seen: bool,
    /// RACK.reo_wnd_mult: quarters of the smallest round-trip time.
    quarters: u32,
    /// RACK.reo_wnd_persist.
    persist: u8,
    /// RACK.dsack_round: the window grows once per round trip.
    dsack_round: Option<u64>,
    /// The last detection found a lost retransmission.
    pub lost_retransmission: bool,
}

impl Rack {
    pub(crate) const fn new() -> Rack {
        Rack {
            latest: Transmission { sent_at: Instant::ZERO, end: 0 },
            rtt: Duration::ZERO,
            reordering_seen: false,
            quarters: 1,
            persist: 0,
            dsack_round: None,
            lost_retransmission: false,
        }
    }

    /// Section 6.2 step 2, for a delivery whose transmission is known.
    #[inline]
    pub(crate) fn update(&mut self, sent: Transmission, now: Instant) {
        self.rtt = now.since(sent.sent_at);
        self.latest = self.latest.max(sent);
    }

    /// A DSACK reports that a retransmission was needless (section 6.2 step 4).
    pub(crate) fn on_dsack(&mut self, snd_una: u64, snd_nxt: u64) {
        if self.dsack_round.is_none_or(|round| snd_una >= round) {
            self.dsack_round = Some(snd_nxt);
            self.quarters = self.quarters.saturating_add(1);
        }
        self.persist = PERSIST_RECOVERIES;
    }

    /// A recovery was undone: segments arrive out of order.
    pub(crate) fn on_undo(&mut self) {
        self.reordering_seen = true;
    }

    pub(crate) fn on_recovery_end(&mut self) {
        self.persist = self.persist.saturating_sub(1);
        if self.persist == 0 {
            self.quarters = 1;
        }
    }
}

impl Tcb {
    /// Steps 1 to 3 of section 6.2. Which copy of a retransmitted segment was delivered is
    /// ambiguous: it counts only if it can have been the last.
    pub(crate) fn update_rack(&mut self, hdr: &Header, delivered: &Delivered, now: Instant) {
        if let Some(sent) = delivered.retransmitted
            && self.is_of_last_copy(hdr, sent, now)
        {
            self.recovery.rack.update(sent, now);
        }
        if let Some(sent) = delivered.original {
            self.recovery.rack.update(sent, now);
        }
        if delivered.reordered {
            self.recovery.rack.reordering_seen = true;
            self.statistics.reorderings = self.statistics.reorderings.saturating_add(1);
        }
    }

    fn is_of_last_copy(&self, hdr: &Header, sent: Transmission, now: Instant) -> bool {
        let stamp = self.ts_clock(sent.sent_at);
        let echoes_earlier = hdr
            .options
            .timestamps
            .is_some_and(|t| self.ts.on && (t.echo.wrapping_sub(stamp) as i32) < 0);
        let too_soon = self.rtt.min().is_some_and(|min| now.since(sent.sent_at) < min);
        !echoes_earlier && !too_soon
    }

    /// RACK_reo_wnd of section 6.2 step 4. More than two segments SACKed stand for DupThresh.
    pub(crate) fn reordering_window(&self) -> Duration {
        let rack = &self.recovery.rack;
        if !rack.reordering_seen {
            let is_recovering = !matches!(self.recovery.mode, Mode::Open);
            if is_recovering || self.sacked.sacked_bytes() > self.smss().saturating_mul(2) {
                return Duration::ZERO;
            }
        }
        self.rtt.min_quarter().saturating_mul(rack.quarters).min(self.rtt.srtt())
    }

    /// Step 5: marks what is lost, and sets the timer for what may be lost soon.
    pub(crate) fn detect_by_rack(&mut self, now: Instant, counters: &mut Counters) {
        let is_idle = matches!(self.recovery.mode, Mode::Open) && self.sacked.sacked_bytes() == 0;
        let next = if is_idle {
            None
        } else {
            let window = self.recovery.rack.rtt.saturating_add(self.reordering_window());
            let latest = self.recovery.rack.latest;
            let (scoreboard, on_lost) = self.loss_reporter(now);
            let losses = scoreboard.mark_lost(latest, window, now, on_lost);
            if losses.retransmission {
                self.recovery.rack.lost_retransmission = true;
                counters.count(Counter::TcpLostRetransmits);
            }
            losses.next
        };
        if let Some(at) = next {
            self.timers.set(Timer::Retransmit, at);
            self.recovery.pending = Pending::Reordering;
        } else if matches!(self.recovery.pending, Pending::Reordering) {
            self.timers.stop(Timer::Retransmit);
        }
    }

    /// RACK_mark_losses_on_RTO of section 6.3: the first segment, and what was sent a round trip and
    /// the reordering window ago. Without SACK, everything.
    pub(crate) fn mark_lost_on_timeout(&mut self, now: Instant) {
        if !self.sack_on {
            return self.mark_all_lost(now);
        }
        let first_end = self.snd.una.saturating_add(self.smss());
        let window = self.recovery.rack.rtt.saturating_add(self.reordering_window());
        let ns = now.as_nanos().saturating_sub(crate::tcp::rtt::nanos(window));
        let (scoreboard, mut on_lost) = self.loss_reporter(now);
        scoreboard.mark_lost_to(first_end, &mut on_lost);
        scoreboard.mark_lost_sent_before(Instant::from_nanos(ns), on_lost);
    }

    /// All that is in flight is lost: the time-out is repeated.
    pub(crate) fn mark_all_lost(&mut self, now: Instant) {
        let (scoreboard, on_lost) = self.loss_reporter(now);
        scoreboard.mark_all_lost(on_lost);
    }

    /// The scoreboard, and the callback that reports each lost run to the controller: a split
    /// borrow.
    pub(crate) fn loss_reporter(
        &mut self,
        now: Instant,
    ) -> (&mut Scoreboard, impl FnMut(&LostRun)) {
        let Tcb { sacked, delivery, congestion, mtu_search, .. } = self;
        let probe = mtu_search.probe();
        let on_lost = move |run: &LostRun| {
            // The loss of a probe is not a sign of congestion (RFC 4821 section 7.6.2).
            if probe.is_some_and(|p| p.covers(run.start, run.bytes)) {
                return;
            }
            if let Some(lost) = delivery.lost(run, now) {
                congestion.on_lost(&lost);
            }
        };
        (sacked, on_lost)
    }
}
