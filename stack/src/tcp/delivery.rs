//! Delivery-rate samples (draft-ietf-ccwg-bbr, "Delivery Rate Samples"): how fast the network
//! delivers. A sample ends with an ACK, and begins with the ACK before the delivered bytes were sent:
//!
//! ```text
//!   sent       |<---- send_elapsed ---->|
//!         first_sent_at              sent_at          rate = delivered between the two ACKs
//!   ACKs       |<-------- ack_elapsed -------->|             / max(send_elapsed, ack_elapsed)
//!         delivered_at                         now
//! ```
//!
//! A [`Snapshot`] holds the state at the time when bytes were sent, as a sample needs it. There is one for each instant
//! at which something was sent, found again by the transmission time that the [scoreboard](crate::tcp::scoreboard)
//! keeps. Bytes sent within a short time share a snapshot, as they share a run of the scoreboard.
//!
//! Cost: nothing while the controller takes no samples. Otherwise one snapshot per super-segment, at
//! most [`MAX_SNAPSHOTS`], and a binary search per ACK and per lost run. Beyond the limit the oldest
//! is forgotten, and a sample begins a little late.

use crate::base::{Duration, Instant};
use crate::tcp::Tcb;
use crate::tcp::arith::div_rem;
use crate::tcp::congestion::{CongestionControl, Lost, Sample};
use crate::tcp::rtt::nanos;
use crate::tcp::scoreboard::{Delivered, LostRun};
use alloc::boxed::Box;
use alloc::collections::VecDeque;

/// 64 KiB per connection in the worst case.
const MAX_SNAPSHOTS: usize = 1024;

/// The state when bytes were sent (P of the draft).
#[derive(Clone, Copy, Debug)]
struct Snapshot {
    sent_at: Instant,
    /// End of the highest bytes sent then: their acknowledgement ends its use.
    end: u64,
    /// P.delivered, P.delivered_time, P.first_send_time, P.lost; marked bytes of P.delivered.
    delivered: u64,
    marked: u64,
    delivered_at: Instant,
    first_sent_at: Instant,
    lost: u64,
    /// P.tx_in_flight, including the bytes sent then.
    in_flight: u64,
    is_app_limited: bool,
}

/// The sampler of a connection; `None` while the controller takes no samples. Boxed, since most
/// controllers take none.
#[derive(Clone, Debug)]
pub(crate) struct Delivery(Option<Box<Sampler>>);

/// The state of a connection (C of the draft), bytes.
#[derive(Clone, Debug)]
pub(crate) struct Sampler {
    delivered: u64,
    /// Part of `delivered`, and of the bytes of the last ACK, that was marked with CE.
    marked: u64,
    newly_marked: u64,
    delivered_at: Instant,
    /// When the latest delivered bytes were sent; when the first were sent, if all are delivered.
    first_sent_at: Instant,
    /// C.app_limited: samples are application-limited until `delivered` exceeds this; 0: they are
    /// not.
    app_limited: u64,
    /// Bytes ever marked as lost.
    lost: u64,
    /// The last output left less than a segment unsent.
    is_dry: bool,
    snapshots: VecDeque<Snapshot>,
    /// The last rate, bytes per second.
    rate: u64,
}

impl Delivery {
    /// A sampler if the controller takes samples.
    pub(crate) fn for_controller(which: CongestionControl) -> Delivery {
        Delivery(which.takes_samples().then(|| Box::new(Sampler::new())))
    }

    #[inline]
    pub(crate) fn is_on(&self) -> bool {
        self.0.is_some()
    }

    /// Adapts to another controller. Samples cover bytes sent from now on.
    pub(crate) fn switch_to(&mut self, which: CongestionControl) {
        if self.is_on() != which.takes_samples() {
            *self = Delivery::for_controller(which);
        }
    }

    /// The rate of the last sample, bytes per second; 0 before the first.
    pub(crate) fn rate(&self) -> u64 {
        self.0.as_ref().map_or(0, |s| s.rate)
    }

    /// Whether samples are application-limited.
    pub(crate) fn is_app_limited(&self) -> bool {
        self.0.as_ref().is_some_and(|s| s.app_limited != 0)
    }

    /// Counts a lost run. Returns the report for the controller, if it takes samples.
    pub(crate) fn lost(&mut self, run: &LostRun, now: Instant) -> Option<Lost> {
        self.0.as_mut().map(|s| s.lost(run, now))
    }
}

impl Sampler {
    const fn new() -> Sampler {
        Sampler {
            delivered: 0,
            marked: 0,
            newly_marked: 0,
            delivered_at: Instant::ZERO,
            first_sent_at: Instant::ZERO,
            app_limited: 0,
            lost: 0,
            is_dry: true,
            snapshots: VecDeque::new(),
            rate: 0,
        }
    }

    /// Samples are application-limited until the bytes in flight are delivered.
    fn mark_app_limited(&mut self, in_flight: u64) {
        self.app_limited = self.delivered.saturating_add(in_flight).max(1);
    }

    /// `bytes` up to `end` were sent; `in_flight` includes them. They share the last snapshot if it
    /// was taken at most `within` ago.
    #[inline(never)]
    fn sent(&mut self, end: u64, bytes: u64, in_flight: u64, now: Instant, within: Duration) {
        if in_flight <= bytes {
            (self.first_sent_at, self.delivered_at) = (now, now);
        }
        if let Some(last) = self.snapshots.back_mut()
            && now.since(last.sent_at) <= within
            && in_flight > bytes
        {
            last.end = last.end.max(end);
            last.in_flight = last.in_flight.max(in_flight);
            return;
        }
        if self.snapshots.len() >= MAX_SNAPSHOTS {
            self.snapshots.pop_front();
        }
        self.snapshots.push_back(Snapshot {
            sent_at: now,
            end,
            delivered: self.delivered,
            marked: self.marked,
            delivered_at: self.delivered_at,
            first_sent_at: self.first_sent_at,
            lost: self.lost,
            in_flight,
            is_app_limited: self.app_limited != 0,
        });
    }

    /// The snapshot of the bytes sent at `sent_at`.
    fn snapshot_of(&self, sent_at: Instant) -> Option<&Snapshot> {
        let behind = self.snapshots.partition_point(|s| s.sent_at <= sent_at);
        self.snapshots.get(behind.checked_sub(1)?)
    }

    /// UpdateRateSample and GenerateRateSample, for an ACK whose latest delivered bytes were sent
    /// at `sent_at`. The bytes are already in `delivered`. The caller sets the fields that do not
    /// depend on the snapshot.
    fn sample(&mut self, sample: &mut Sample, sent_at: Instant, min_rtt: Duration) {
        if self.delivered > self.app_limited {
            self.app_limited = 0;
        }
        let Some(sent) = self.snapshot_of(sent_at).copied() else { return };
        let send_elapsed = sent_at.since(sent.first_sent_at);
        let ack_elapsed = sample.now.since(sent.delivered_at);
        let interval = send_elapsed.max(ack_elapsed);
        self.first_sent_at = sent_at;
        sample.delivered = self.delivered.saturating_sub(sent.delivered);
        sample.marked = self.marked.saturating_sub(sent.marked);
        sample.prior_delivered = Some(sent.delivered);
        sample.is_app_limited = sent.is_app_limited;
        sample.tx_in_flight = sent.in_flight;
        sample.lost = self.lost.saturating_sub(sent.lost);
        // A shorter interval is that of a spurious retransmission: the original was delivered.
        if interval >= min_rtt && !interval.is_zero() {
            sample.rate = rate_of(sample.delivered, interval);
            self.rate = sample.rate;
        }
    }

    /// Everything below `una` is acknowledged.
    fn forget_to(&mut self, una: u64) {
        while self.snapshots.front().is_some_and(|s| s.end <= una) {
            self.snapshots.pop_front();
        }
    }

    /// Counts a lost run. Returns the report for the controller.
    fn lost(&mut self, run: &LostRun, now: Instant) -> Lost {
        self.lost = self.lost.saturating_add(run.bytes);
        let sent = self.snapshot_of(run.sent_at);
        Lost {
            now,
            start: run.start,
            bytes: run.bytes,
            total_delivered: self.delivered,
            lost: sent.map_or(run.bytes, |s| self.lost.saturating_sub(s.lost)),
            tx_in_flight: sent.map_or(0, |s| s.in_flight),
            is_app_limited: sent.is_none_or(|s| s.is_app_limited),
        }
    }
}

/// Bytes per second.
fn rate_of(bytes: u64, time: Duration) -> u64 {
    let ns = nanos(time);
    match bytes.checked_mul(1_000_000_000) {
        Some(product) => div_rem(product, ns).0,
        None => div_rem(bytes, ns / 1_000_000_000).0,
    }
}

impl Tcb {
    /// Data was sent, and the scoreboard knows it.
    #[inline]
    pub(crate) fn sample_sent(&mut self, end: u64, bytes: u64, now: Instant, within: Duration) {
        if self.delivery.is_on() {
            // An unacknowledged SYN is in flight before the first data of a Fast Open server, and no data.
            let in_flight = self.pipe().saturating_sub(u64::from(self.snd.una == 0));
            if let Some(sampler) = &mut self.delivery.0 {
                sampler.sent(end, bytes, in_flight, now, within);
            }
        }
    }

    /// CheckIfApplicationLimited before an ACK is processed, a timer expires or a write is sent: the
    /// application had nothing to send although the network would have taken more.
    #[inline]
    pub(crate) fn check_app_limited(&mut self, now: Instant) {
        if self.delivery.0.as_ref().is_some_and(|s| s.is_dry) {
            self.note_app_limited(now);
        }
    }

    #[inline(never)]
    fn note_app_limited(&mut self, now: Instant) {
        let in_flight = self.pipe();
        let is_waiting = self.sacked.lost_bytes() > 0 || self.pacing.is_ahead(now);
        if !is_waiting
            && in_flight < self.congestion.cwnd()
            && let Some(sampler) = &mut self.delivery.0
        {
            sampler.mark_app_limited(in_flight);
        }
    }

    /// After output: whether the application has left less than a segment to send.
    #[inline]
    pub(crate) fn record_dry(&mut self) {
        if self.delivery.is_on() {
            let unsent = self.send_end().saturating_sub(self.snd.nxt);
            let is_dry = unsent < self.smss();
            if let Some(sampler) = &mut self.delivery.0 {
                sampler.is_dry = is_dry;
            }
        }
    }

    /// Counts what an ACK delivered, and how much of it was marked, before losses are looked for.
    #[inline]
    pub(crate) fn count_delivered(&mut self, bytes: u64, marked: u64, now: Instant) {
        if let Some(sampler) = &mut self.delivery.0
            && bytes > 0
        {
            sampler.delivered = sampler.delivered.saturating_add(bytes);
            sampler.marked = sampler.marked.saturating_add(marked);
            sampler.newly_marked = marked;
            sampler.delivered_at = now;
        }
    }

    /// Passes the sample of an ACK to the controller, after loss detection.
    #[inline(never)]
    pub(crate) fn sample_delivered(&mut self, delivered: &Delivered, now: Instant) {
        let newest = delivered.original.max(delivered.retransmitted);
        let in_flight = self.pipe();
        let Some(sampler) = &mut self.delivery.0 else { return };
        if let Some(newest) = newest.filter(|_| delivered.bytes > 0) {
            let mut sample = Sample {
                newly_acked: delivered.bytes,
                newly_marked: sampler.newly_marked,
                total_delivered: sampler.delivered,
                total_marked: self.ecn.is_accurate().then_some(sampler.marked),
                rtt: delivered.original.map(|sent| now.since(sent.sent_at)),
                srtt: self.rtt.srtt(),
                in_flight,
                is_cwnd_limited: self.snd.una <= self.send_marks.full_end,
                has_sack: self.sack_on,
                ..Sample::at(now)
            };
            let min_rtt = self.rtt.min().unwrap_or(Duration::ZERO);
            sampler.sample(&mut sample, newest.sent_at, min_rtt);
            self.congestion.on_sample(&sample);
            if self.congestion.is_probing_rtt() {
                sampler.mark_app_limited(in_flight);
            }
            sampler.forget_to(self.snd.una);
            self.update_pacing();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn at(ms: u64) -> Instant {
        Instant::from_millis(ms)
    }

    fn ack(d: &mut Sampler, bytes: u64, sent_ms: u64, now_ms: u64, min_rtt: Duration) -> Sample {
        d.delivered += bytes;
        d.delivered_at = at(now_ms);
        let mut sample = Sample::at(at(now_ms));
        d.sample(&mut sample, at(sent_ms), min_rtt);
        sample
    }

    #[test]
    fn a_sample_divides_what_was_delivered_since_the_bytes_were_sent_by_the_longer_interval() {
        let mut d = Sampler::new();
        // Ten segments at once, then one with each ACK: ACKs come every 2 ms, from 20 ms on.
        d.sent(10_000, 10_000, 10_000, at(0), Duration::ZERO);
        let s = ack(&mut d, 1000, 0, 20, MS * 20);
        assert_eq!((s.delivered, s.rate), (1000, 50_000));
        d.sent(11_000, 1000, 10_000, at(20), Duration::ZERO);
        (1..10).for_each(|i| _ = ack(&mut d, 1000, 0, 20 + 2 * i, MS * 20));
        // Sent when 1000 had been delivered, at 20 ms; acknowledged at 40.
        let s = ack(&mut d, 1000, 20, 40, MS * 20);
        assert_eq!((s.prior_delivered, s.delivered, s.rate), (Some(1000), 10_000, 500_000));
    }

    #[test]
    fn compressed_acks_are_bounded_by_the_rate_of_sending() {
        let mut d = Sampler::new();
        for i in 0..10 {
            d.sent(1000 * (i + 1), 1000, 1000 * (i + 1), at(i * 10), Duration::ZERO);
        }
        // All ten are acknowledged at once, 110 ms after the first was sent.
        let s = ack(&mut d, 10_000, 90, 110, MS * 20);
        assert_eq!(s.rate, 10_000 * 1000 / 110);
    }

    #[test]
    fn an_interval_below_the_least_round_trip_time_gives_no_rate() {
        let mut d = Sampler::new();
        d.sent(1000, 1000, 1000, at(0), Duration::ZERO);
        let s = ack(&mut d, 1000, 0, 5, MS * 20);
        assert_eq!((s.rate, s.delivered), (0, 1000));
    }

    #[test]
    fn bytes_sent_after_an_application_pause_are_marked_until_they_are_delivered() {
        let mut d = Sampler::new();
        d.sent(1000, 1000, 1000, at(0), Duration::ZERO);
        d.mark_app_limited(1000);
        d.sent(2000, 1000, 2000, at(5), Duration::ZERO);
        assert!(!ack(&mut d, 1000, 0, 20, MS).is_app_limited);
        assert!(d.app_limited != 0);
        assert!(ack(&mut d, 1000, 5, 25, MS).is_app_limited);
        assert!(d.app_limited == 0);
        d.sent(3000, 1000, 1000, at(30), Duration::ZERO);
        assert!(!ack(&mut d, 1000, 30, 50, MS).is_app_limited);
    }

    #[test]
    fn a_lost_run_knows_what_was_in_flight_and_lost_since_it_was_sent() {
        let mut d = Sampler::new();
        d.sent(4000, 4000, 4000, at(0), Duration::ZERO);
        d.sent(8000, 4000, 8000, at(10), Duration::ZERO);
        let run = |start, ms| LostRun { start, bytes: 1000, sent_at: at(ms) };
        let first = d.lost(&run(0, 0), at(50));
        assert_eq!((first.tx_in_flight, first.lost), (4000, 1000));
        let second = d.lost(&run(4000, 10), at(50));
        assert_eq!((second.tx_in_flight, second.lost), (8000, 2000));
    }

    #[test]
    fn snapshots_are_bounded_and_forgotten_with_their_acknowledgement() {
        let mut d = Sampler::new();
        for i in 0..5000 {
            d.sent(1000 * (i + 1), 1000, 1000 * (i + 1), at(i), Duration::ZERO);
        }
        assert_eq!(d.snapshots.len(), MAX_SNAPSHOTS);
        // Its own snapshot is gone: no sample.
        assert_eq!(ack(&mut d, 1000, 0, 6000, MS).prior_delivered, None);
        d.forget_to(4_900_000);
        assert_eq!(d.snapshots.len(), 100);
        d.forget_to(5_000_000);
        assert!(d.snapshots.is_empty());
    }
}
