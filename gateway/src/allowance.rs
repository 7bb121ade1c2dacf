//! A bound of several flows together: how many there are at a time, how many bytes they move, and how fast.
//!
//! The rate is a token bucket of 100 ms. A connection waits for its bytes; a datagram beyond the rate is dropped.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

use fulmar_stack::base::{Duration, Instant};

/// For so long the bytes of the rate are saved up.
const BURST: Duration = Duration::from_millis(100);
/// The least that a connection waits for, bytes: it is not woken for single ones.
const LEAST_BYTES: u64 = 4096;
const SECOND: u128 = 1_000_000_000;

/// The bounds of an [`Allowance`]; `None`: no bound.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[allow(clippy::exhaustive_structs, reason = "made by `..Default::default()`")]
pub struct Bounds {
    /// Flows at a time.
    pub flows: Option<u32>,
    /// Bytes of payload, both ways together.
    pub bytes: Option<u64>,
    /// Bytes of payload in a second, both ways together.
    pub bytes_per_second: Option<u64>,
}

/// What flows share.
#[derive(Debug)]
pub struct Allowance {
    bounds: Bounds,
    open: AtomicUsize,
    bytes: AtomicU64,
    /// Bytes that may move now, below zero where a datagram has taken more, and since when that is so.
    bucket: Mutex<(i64, Option<Instant>)>,
}

/// What may move now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum May {
    Move(usize),
    /// Nothing before this time.
    Wait(Instant),
    /// Nothing any more.
    Over,
}

impl Allowance {
    /// One of which nothing is used.
    pub fn new(bounds: Bounds) -> Arc<Allowance> {
        let (open, bytes, bucket) = Default::default();
        Arc::new(Allowance { bounds, open, bytes, bucket })
    }

    /// The bounds.
    pub fn bounds(&self) -> Bounds {
        self.bounds
    }

    /// Begins a flow. `None`: the bound of connections is reached, or all bytes are used.
    pub(crate) fn begin(self: &Arc<Allowance>) -> Option<Permit> {
        let most = self.bounds.flows.map_or(usize::MAX, |most| most as usize);
        if self.bounds.bytes.is_some_and(|most| self.bytes.load(Relaxed) >= most) {
            return None;
        }
        let more = |open: usize| (open < most).then(|| open + 1);
        self.open.fetch_update(Relaxed, Relaxed, more).ok()?;
        Some(Permit(Arc::new(Place(Arc::clone(self)))))
    }
}

/// The place of one flow. It is free again when this and its clones are dropped.
#[derive(Clone, Debug)]
pub(crate) struct Permit(Arc<Place>);

#[derive(Debug)]
struct Place(Arc<Allowance>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Relaxed);
    }
}

impl Permit {
    /// Whether it is a place of an allowance.
    pub(crate) fn is_of(&self, allowance: &Arc<Allowance>) -> bool {
        Arc::ptr_eq(&self.0.0, allowance)
    }

    /// How many of `wanted` bytes may move now.
    pub(crate) fn may_move(&self, now: Instant, wanted: usize) -> May {
        let Allowance { bounds, bytes, bucket, .. } = &*self.0.0;
        let left = bounds.bytes.map_or(u64::MAX, |most| most.saturating_sub(bytes.load(Relaxed)));
        if left == 0 {
            return May::Over;
        }
        let Some(rate) = bounds.bytes_per_second else {
            return May::Move(wanted.min(usize::try_from(left).unwrap_or(usize::MAX)));
        };
        let mut bucket = bucket.lock().unwrap_or_else(PoisonError::into_inner);
        let saved = refill(&mut bucket, rate, now);
        let least = LEAST_BYTES.min(wanted as u64).min(left);
        if let Ok(saved) = u64::try_from(saved)
            && saved >= least
        {
            return May::Move(wanted.min(usize::try_from(saved.min(left)).unwrap_or(usize::MAX)));
        }
        let missing = u128::from(least.saturating_add_signed(saved.saturating_neg())) * SECOND;
        let ns = missing.div_ceil(u128::from(rate.max(1)));
        May::Wait(now + Duration::from_nanos(u64::try_from(ns).unwrap_or(u64::MAX / 2)))
    }

    /// Whether a datagram may pass now, which is counted then.
    pub(crate) fn may_pass(&self, now: Instant, bytes: usize) -> bool {
        let bounds = &self.0.0.bounds;
        let is_within = |most| self.0.0.bytes.load(Relaxed).saturating_add(bytes as u64) <= most;
        let may = bounds.bytes.is_none_or(is_within)
            && matches!(self.may_move(now, bytes.max(1)), May::Move(_));
        if may {
            self.moved(bytes);
        }
        may
    }

    /// Counts bytes that have moved.
    pub(crate) fn moved(&self, moved: usize) {
        let Allowance { bounds, bytes, bucket, .. } = &*self.0.0;
        if bounds.bytes.is_some() {
            bytes.fetch_add(moved as u64, Relaxed);
        }
        if bounds.bytes_per_second.is_some() {
            let mut bucket = bucket.lock().unwrap_or_else(PoisonError::into_inner);
            bucket.0 = bucket.0.saturating_sub(i64::try_from(moved).unwrap_or(i64::MAX));
        }
    }
}

/// Adds what the rate has brought since the last time. The time that has brought no whole byte yet is kept.
fn refill(bucket: &mut (i64, Option<Instant>), rate: u64, now: Instant) -> i64 {
    let of = |ns: u128| i64::try_from(u128::from(rate) * ns / SECOND).unwrap_or(i64::MAX);
    let most = of(BURST.as_nanos()).max(LEAST_BYTES as i64);
    let (saved, since) = bucket;
    let Some(last) = *since else {
        (*saved, *since) = (most, Some(now));
        return most;
    };
    let gained = of(now.since(last).as_nanos());
    let took = gained.unsigned_abs() as u128 * SECOND / u128::from(rate.max(1));
    *saved = saved.saturating_add(gained).min(most);
    *since = Some(if *saved == most { now } else { last + Duration::from_nanos(took as u64) });
    *saved
}

#[cfg(test)]
mod tests {
    use super::*;

    fn permit(bounds: Bounds) -> Permit {
        Allowance::new(bounds).begin().unwrap()
    }

    #[test]
    fn flows_are_bounded_and_an_end_makes_room() {
        let allowance = Allowance::new(Bounds { flows: Some(2), ..Bounds::default() });
        let (first, _second) = (allowance.begin().unwrap(), allowance.begin().unwrap());
        assert!(allowance.begin().is_none());
        drop(first);
        assert!(allowance.begin().is_some());
    }

    #[test]
    fn bytes_are_bounded_for_all_flows_together() {
        let allowance = Allowance::new(Bounds { bytes: Some(100), ..Bounds::default() });
        let (a, b) = (allowance.begin().unwrap(), allowance.begin().unwrap());
        assert_eq!(a.may_move(Instant::ZERO, 70), May::Move(70));
        a.moved(70);
        assert_eq!(b.may_move(Instant::ZERO, 70), May::Move(30));
        b.moved(30);
        assert_eq!(a.may_move(Instant::ZERO, 1), May::Over);
        assert!(allowance.begin().is_none());
    }

    #[test]
    fn the_rate_holds_over_any_second_but_for_one_burst() {
        let rate = 1_000_000;
        let own = permit(Bounds { bytes_per_second: Some(rate), ..Bounds::default() });
        let (mut now, mut moved, end) = (Instant::ZERO, 0, Instant::ZERO + Duration::from_secs(2));
        while now < end {
            match own.may_move(now, 64 << 10) {
                May::Move(bytes) => {
                    own.moved(bytes);
                    moved += bytes as u64;
                }
                May::Wait(at) => {
                    assert!(at > now);
                    now = at;
                }
                May::Over => unreachable!(),
            }
        }
        let burst = rate / 10;
        assert!((2 * rate..=2 * rate + burst + LEAST_BYTES).contains(&moved), "{moved}");
    }

    #[test]
    fn datagrams_larger_than_the_burst_pass_at_the_rate() {
        let rate = 100_000;
        let own = permit(Bounds { bytes_per_second: Some(rate), ..Bounds::default() });
        let run = 60_000;
        let passed = (0..10_000)
            .filter(|ms| own.may_pass(Instant::ZERO + Duration::from_millis(*ms), run))
            .count();
        // Ten seconds, and what the last one has borrowed.
        let bytes = passed * run;
        assert!((900_000..=1_000_000 + 10_000 + run).contains(&bytes), "{bytes}");
        let few = permit(Bounds { bytes: Some(100), ..Bounds::default() });
        assert!(few.may_pass(Instant::ZERO, 60) && !few.may_pass(Instant::ZERO, 60));
        assert!(few.may_pass(Instant::ZERO, 40));
    }

    #[test]
    fn a_rate_of_a_byte_a_second_is_one() {
        let own = permit(Bounds { bytes_per_second: Some(1), ..Bounds::default() });
        assert_eq!(own.may_move(Instant::ZERO, 4096), May::Move(4096), "the burst");
        own.moved(4096);
        let May::Wait(at) = own.may_move(Instant::ZERO, 1) else { panic!() };
        assert_eq!(at, Instant::ZERO + Duration::from_secs(1));
        for tenth in 1..=9 {
            let now = Instant::ZERO + Duration::from_millis(100 * tenth);
            assert!(matches!(own.may_move(now, 1), May::Wait(_)), "the time adds up");
        }
        assert_eq!(own.may_move(at, 1), May::Move(1));
    }
}
