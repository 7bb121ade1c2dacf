//! A device behind a simulated path ([`Impairments`]) in each direction, reproducible from a seed.
//!
//! Direct placement is refused: the device would place a frame before the path drops or reorders it. The number of held
//! frames is bounded. [`Device::next_deadline`] is when the next one is due; every poll moves those that are due.

use alloc::format;

use crate::base::{Counters, Duration, Instant};
use crate::mbuf::Pool;

use crate::device::impair::{Cuts, Impairments, Path, PathCounts};
use crate::device::{
    Burst, Caps, Device, DeviceStats, DirectPlacement, Rng, forward_device, offload,
};

/// Frames that a direction holds before it accepts no more, if no bottleneck needs more.
const HELD_PKTS: usize = 1024;
const MOST_HELD_PKTS: usize = 1 << 16;
/// Additional space for the packets of one super-frame (65,535 bytes at the smallest MSS).
const SUPER_FRAME_PKTS: usize = 1400;
/// A path without a limited rate holds what this one sends during its delay.
const CABLE_BPS: u64 = 10_000_000_000;
/// A small packet, by which bytes in flight are converted to packets.
const PKT_BYTES: usize = 600;
const BURST_PKTS: usize = 64;
/// When frames that the inner device refused are offered again.
const RETRY: Duration = Duration::from_millis(1);

/// A device behind a simulated path.
pub struct Impaired<D: Device> {
    inner: D,
    caps: Caps,
    tx: Path,
    rx: Path,
    /// Frames that either path holds before it accepts no more.
    held_pkts: [usize; 2],
    tx_ready: Burst,
    rx_fresh: Burst,
    /// When the frames in `tx_ready`, which the inner device refused, are offered again.
    retry_at: Option<Instant>,
}

impl<D: Device> Impaired<D> {
    /// Puts paths in front of `inner`: `tx` for sent packets, `rx` for received ones.
    pub fn new(inner: D, seed: u64, tx: &Impairments, rx: &Impairments) -> Impaired<D> {
        let mut seeds = Rng::new(seed);
        let caps = inner.caps().exact_time();
        // A packet that is split off a frame has at most one mbuf more, for its headers.
        let max_segs = caps.max_segs.saturating_sub(1).max(1);
        let caps = Caps { places_on_receive: false, max_segs, ..caps };
        Impaired {
            inner,
            caps,
            held_pkts: [held_pkts(tx), held_pkts(rx)],
            tx: Path::new(seeds.number(), tx, MOST_HELD_PKTS + SUPER_FRAME_PKTS, Cuts::Runs),
            rx: Path::new(seeds.number(), rx, MOST_HELD_PKTS + SUPER_FRAME_PKTS, Cuts::Runs),
            tx_ready: Burst::with_capacity(BURST_PKTS),
            rx_fresh: Burst::with_capacity(BURST_PKTS),
            retry_at: None,
        }
    }

    /// The counters of the sending and of the receiving path.
    pub fn counts(&self) -> (PathCounts, PathCounts) {
        (self.tx.counts(), self.rx.counts())
    }

    /// The inner device.
    pub fn inner_mut(&mut self) -> &mut D {
        &mut self.inner
    }

    /// Sends all due frames on the inner device.
    fn flush(&mut self, now: Instant, pool: &mut Pool, counters: &mut Counters) {
        loop {
            release(&mut self.tx, now, pool, &mut self.tx_ready, BURST_PKTS, counters);
            if self.tx_ready.is_empty() {
                self.retry_at = None;
                return;
            }
            self.inner.tx_burst(now, pool, &mut self.tx_ready, counters);
            if !self.tx_ready.is_empty() {
                self.retry_at = Some(now + RETRY);
                return;
            }
        }
    }
}

impl<D: Device> Device for Impaired<D> {
    forward_device!(self => self.inner, except caps, tx_burst, rx_burst, next_deadline, placement, stats);

    fn caps(&self) -> &Caps {
        &self.caps
    }

    fn tx_burst(
        &mut self,
        now: Instant,
        pool: &mut Pool,
        burst: &mut Burst,
        counters: &mut Counters,
    ) -> usize {
        let before = burst.len();
        while self.tx.held_frames() < self.held_pkts[0] {
            let Some(p) = burst.pop_front() else { break };
            match offload::check(&p, &self.caps) {
                Ok(()) => self.tx.send(now, p, pool, counters),
                Err(reason) => p.discard(reason, pool, counters),
            }
        }
        self.flush(now, pool, counters);
        before - burst.len()
    }

    fn rx_burst(
        &mut self,
        now: Instant,
        pool: &mut Pool,
        out: &mut Burst,
        budget: usize,
        counters: &mut Counters,
    ) -> usize {
        self.flush(now, pool, counters);
        if self.rx.held_frames() < self.held_pkts[1] {
            let budget = budget.min(BURST_PKTS);
            self.inner.rx_burst(now, pool, &mut self.rx_fresh, budget, counters);
        }
        while let Some(p) = self.rx_fresh.pop_front() {
            self.rx.send(now, p, pool, counters);
        }
        release(&mut self.rx, now, pool, out, budget, counters)
    }

    fn next_deadline(&self) -> Option<Instant> {
        // Refused frames block all later ones.
        let tx = self.retry_at.or_else(|| self.tx.next_due());
        earlier(earlier(tx, self.rx.next_due()), self.inner.next_deadline())
    }

    fn placement(&mut self) -> Option<&mut dyn DirectPlacement> {
        None
    }

    fn stats(&self) -> DeviceStats {
        let stats = self.inner.stats();
        let name = format!("impaired({})", stats.name);
        let held = self.tx.held_frames().saturating_add(self.tx_ready.len()) as u64;
        DeviceStats { name, tx_held: stats.tx_held.saturating_add(held), ..stats }
    }
}

/// Packets in the queue of the bottleneck and in flight: with a lower limit the device would refuse frames that the
/// queue of the path should drop.
fn held_pkts(how: &Impairments) -> usize {
    let rate_bps = how.rate_bps.unwrap_or(CABLE_BPS);
    let time = how.delay.saturating_add(how.jitter).as_secs_f64();
    let bytes = how.queue_bytes as f64 + rate_bps as f64 / 8.0 * time;
    // A cast to an integer saturates.
    HELD_PKTS.saturating_add(bytes as usize / PKT_BYTES).min(MOST_HELD_PKTS)
}

/// Moves due frames into `out`, at most `limit`; returns how many.
fn release(
    path: &mut Path,
    now: Instant,
    pool: &mut Pool,
    out: &mut Burst,
    limit: usize,
    counters: &mut Counters,
) -> usize {
    let mut count = 0;
    while count < limit.min(out.capacity()) && !out.is_full() {
        let Some(p) = path.pop_due(now, pool, counters) else { break };
        // Cannot fail: `out` is not full.
        let _ = out.push(p);
        count += 1;
    }
    count
}

fn earlier(a: Option<Instant>, b: Option<Instant>) -> Option<Instant> {
    a.into_iter().chain(b).min()
}

#[cfg(test)]
mod tests;
