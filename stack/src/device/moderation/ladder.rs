//! The length of holds: a hill climb over steps, judged by windows of traffic.

use crate::base::{Duration, Instant};

/// The highest step. The hold of a step is step/TOP of the longest.
pub(super) const TOP: usize = 4;

/// A window is full after `EVENTS` polls with frames or `FRAMES` frames ...
const EVENTS: u64 = 64;
const FRAMES: u64 = 1024;
/// ... and after this time.
const SHORTEST: Duration = Duration::from_millis(1);
/// A window that is not full after this time is not a flood.
const LONGEST: Duration = Duration::from_millis(20);
/// Differences below this part of the larger value are noise.
const NOISE: f64 = 0.1;
/// Windows of rest after a failed attempt; doubled with each, up to the second number.
const REST: (u32, u32) = (16, 1024);
/// Fraction of a CPU that waiting must take for a first hold to be tried.
const WORTH_SAVING: f64 = 0.05;
/// Windows of an attempt at another step, half of them on it.
const ATTEMPT: u32 = 4;

/// The traffic of a window.
#[derive(Clone, Debug, Default)]
pub(super) struct Window {
    since: Option<Instant>,
    events: u64,
    frames: u64,
    bytes: u64,
    sent_before: u64,
    sent: u64,
    /// CPU time of waiting: wake-ups and busy-polling.
    wait_time: Duration,
    /// Mean time between two frames in the last full window, in ns; 0 if there was none.
    gap_ns: u64,
}

impl Window {
    /// Adds a poll with frames. `sent`: frames sent since the start.
    pub(super) fn add(&mut self, now: Instant, frames: usize, bytes: usize, sent: u64) {
        if self.since.is_none() {
            (self.since, self.sent_before) = (Some(now), sent);
        }
        self.events += 1;
        self.frames += frames as u64;
        self.bytes += bytes as u64;
        self.sent = sent;
    }

    /// Adds CPU time of waiting.
    pub(super) fn add_wait_time(&mut self, time: Duration) {
        self.wait_time = self.wait_time.saturating_add(time);
    }

    /// Frames sent since the start, at the last poll with frames.
    pub(super) fn sent(&self) -> u64 {
        self.sent
    }

    fn age(&self, now: Instant) -> Duration {
        self.since.map_or(Duration::ZERO, |s| now.since(s))
    }

    /// Whether the window can be judged.
    pub(super) fn is_full(&self, now: Instant) -> bool {
        let has_enough = self.events >= EVENTS || self.frames >= FRAMES;
        (has_enough && self.age(now) >= SHORTEST) || self.is_stale(now)
    }

    /// Whether the window has lasted too long for a flood.
    pub(super) fn is_stale(&self, now: Instant) -> bool {
        self.age(now) >= LONGEST
    }

    /// The expected time until `frames` frames have arrived.
    pub(super) fn time_of(&self, frames: usize) -> Duration {
        match self.gap_ns {
            0 => Duration::MAX,
            gap => Duration::from_nanos(gap.saturating_mul(frames as u64)),
        }
    }

    /// Ends the window; the next one begins.
    pub(super) fn close(&mut self, now: Instant, sent: u64) -> Rates {
        let seconds = self.age(now).as_secs_f64().max(1e-9);
        let rates = Rates {
            bytes: self.bytes as f64 / seconds,
            frames: self.frames as f64 / seconds,
            sent: sent.saturating_sub(self.sent_before) as f64 / seconds,
            wait_cpu: self.wait_time.as_secs_f64() / seconds,
        };
        let gap_ns = if rates.frames > 0.0 { (1e9 / rates.frames) as u64 } else { 0 };
        *self = Window { since: Some(now), sent_before: sent, sent, gap_ns, ..Window::default() };
        rates
    }
}

/// A window's traffic per second.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rates {
    /// Bytes received.
    pub bytes: f64,
    /// Frames received.
    pub frames: f64,
    /// Frames sent.
    pub sent: f64,
    /// Fraction of a CPU that waiting took.
    pub wait_cpu: f64,
}

impl Rates {
    /// Whether frames come at `pps` or more, and not one for each that is sent: in request and response traffic a side
    /// waits for every frame.
    pub(super) fn is_flood(&self, pps: u32) -> bool {
        self.frames >= f64::from(pps) && self.frames >= 1.5 * self.sent
    }
}

impl Rates {
    const NONE: Rates = Rates { bytes: 0.0, frames: 0.0, sent: 0.0, wait_cpu: 0.0 };

    fn add(&mut self, more: &Rates) {
        self.bytes += more.bytes;
        self.frames += more.frames;
        self.sent += more.sent;
        self.wait_cpu += more.wait_cpu;
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Verdict {
    Better,
    Same,
    Worse,
}

/// Whether `a` is more than `b`, beyond the noise.
fn compare(a: f64, b: f64) -> Verdict {
    if (a - b).abs() <= NOISE * a.max(b) {
        Verdict::Same
    } else if a > b {
        Verdict::Better
    } else {
        Verdict::Worse
    }
}

/// Compares a window with an earlier one: more bytes are better, then more frames, then less CPU for waiting.
fn judge(new: &Rates, old: &Rates) -> Verdict {
    let by = [
        compare(new.bytes, old.bytes),
        compare(new.frames, old.frames),
        compare(old.wait_cpu, new.wait_cpu),
    ];
    by.into_iter().find(|v| *v != Verdict::Same).unwrap_or(Verdict::Same)
}

/// A hill climb over the steps.
///
/// An attempt alternates windows of the current step and of the next one, so that a change of the traffic affects both.
/// A higher step is taken if it is better, a lower one unless it is worse. After a success the climb continues in its
/// direction; after a failure it rests, for longer each time, and then tries the other direction.
#[derive(Clone, Debug)]
pub(super) struct Ladder {
    /// 0 to [`TOP`].
    step: usize,
    /// The next attempt is a higher step.
    goes_up: bool,
    /// Sums of the windows of this attempt: at the current step and at the other.
    sums: [Rates; 2],
    /// Windows of this attempt so far; every second one is of the other step.
    windows: u32,
    /// Windows until the next attempt.
    rest: u32,
    /// Windows of rest after the next failure.
    next_rest: u32,
}

impl Default for Ladder {
    fn default() -> Ladder {
        let sums = [Rates::NONE; 2];
        Ladder { step: 0, goes_up: true, sums, windows: 0, rest: 0, next_rest: REST.0 }
    }
}

impl Ladder {
    /// The step of the current window, 0 to [`TOP`].
    pub(super) fn step(&self) -> usize {
        if self.windows.is_multiple_of(2) { self.step } else { self.other() }
    }

    /// Judges a window; `None`: there was no flood, so nothing is held.
    pub(super) fn judge(&mut self, flood: Option<Rates>) {
        let Some(rates) = flood else {
            *self = Ladder::default();
            return;
        };
        if self.rest > 0 {
            self.rest -= 1;
            return;
        }
        // A hold saves CPU and nothing else.
        if self.step == 0 && self.windows == 0 && rates.wait_cpu < WORTH_SAVING {
            return;
        }
        self.sums[self.windows as usize % 2].add(&rates);
        self.windows += 1;
        if self.windows == ATTEMPT {
            let verdict = judge(&self.sums[1], &self.sums[0]);
            self.decide(verdict);
        }
    }

    fn other(&self) -> usize {
        if self.goes_up { self.step + 1 } else { self.step.saturating_sub(1) }
    }

    fn decide(&mut self, verdict: Verdict) {
        let is_taken = match self.goes_up {
            true => verdict == Verdict::Better,
            false => verdict != Verdict::Worse,
        };
        (self.sums, self.windows) = ([Rates::NONE; 2], 0);
        if is_taken {
            (self.step, self.next_rest) = (self.other(), REST.0);
        } else {
            self.rest = self.next_rest;
            self.next_rest = (2 * self.next_rest).min(REST.1);
            self.goes_up = !self.goes_up;
        }
        self.turn_at_the_ends(is_taken);
    }

    /// At the lowest and at the highest step there is one direction only.
    fn turn_at_the_ends(&mut self, is_taken: bool) {
        if self.step == 0 || self.step == TOP {
            self.goes_up = self.step == 0;
            if is_taken {
                self.rest = self.next_rest;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rates(bytes: f64, wait_cpu: f64) -> Rates {
        Rates { bytes, frames: bytes / 1000.0, sent: 0.0, wait_cpu }
    }

    #[test]
    fn bytes_count_before_frames_and_frames_before_wait_cpu() {
        let base = Rates { bytes: 1e9, frames: 1e6, sent: 0.0, wait_cpu: 0.5 };
        let with = |bytes, frames, wait_cpu| Rates { bytes, frames, wait_cpu, ..base };
        assert_eq!(judge(&with(1.2e9, 0.5e6, 1.0), &base), Verdict::Better);
        assert_eq!(judge(&with(1.05e9, 0.5e6, 0.1), &base), Verdict::Worse);
        assert_eq!(judge(&with(1.05e9, 1.05e6, 0.1), &base), Verdict::Better);
        assert_eq!(judge(&with(1.05e9, 1.05e6, 0.52), &base), Verdict::Same);
    }

    /// So many windows, of which each is what `brings` says of the step it is held at. How many were at
    /// each step.
    fn windows(
        l: &mut Ladder,
        count: usize,
        mut brings: impl FnMut(usize) -> Rates,
    ) -> [usize; TOP + 1] {
        let mut at = [0; TOP + 1];
        for _ in 0..count {
            at[l.step()] += 1;
            l.judge(Some(brings(l.step())));
        }
        at
    }

    #[test]
    fn the_ladder_climbs_while_a_step_saves_wait_cpu_and_stays_at_the_top() {
        let mut l = Ladder::default();
        let saves = |step| rates(1e9, 1.0 / (step + 1) as f64);
        windows(&mut l, TOP * ATTEMPT as usize, saves);
        assert_eq!(l.step(), TOP);
        let at = windows(&mut l, 10_000, saves);
        assert_eq!(l.step(), TOP);
        assert!(at[TOP] > 9_950, "{at:?}");
    }

    #[test]
    fn the_ladder_descends_if_a_lower_step_does_not_cost_more() {
        let mut l = Ladder::default();
        windows(&mut l, 100, |step| rates(1e9, 1.0 / (step + 1) as f64));
        windows(&mut l, 1_000, |_| rates(1e9, 0.2));
        assert_eq!(l.step(), 0);
    }

    #[test]
    fn the_ladder_descends_if_holds_have_begun_to_cost_bytes() {
        let mut l = Ladder::default();
        windows(&mut l, 100, |step| rates(1e9, 1.0 / (step + 1) as f64));
        windows(&mut l, 200, |step| rates(1e9 / (step + 1) as f64, 0.2));
        assert_eq!(l.step(), 0);
    }

    #[test]
    fn a_step_that_costs_bytes_is_tried_ever_less_often() {
        let mut l = Ladder::default();
        let costs = |step| rates(1e9 / (step + 1) as f64, 1.0 / (step + 1) as f64);
        let first = windows(&mut l, 1_000, costs);
        let then = windows(&mut l, 10_000, costs);
        assert!(first[1] > 2 && first[1] < 20, "{first:?}");
        assert!(then[1] > 2 && then[1] < 30, "it still tries: {then:?}");
        assert_eq!(first[2] + then[2], 0);
    }

    #[test]
    fn an_independent_change_does_not_make_the_ladder_climb() {
        let mut l = Ladder::default();
        let mut bytes = 1e9;
        let at = windows(&mut l, 300, |_| {
            bytes *= 1.02;
            rates(bytes, 0.2)
        });
        assert!(at[0] > 280, "{at:?}");
    }

    #[test]
    fn a_hold_is_not_tried_if_waiting_costs_almost_nothing() {
        let mut l = Ladder::default();
        let at = windows(&mut l, 1_000, |_| rates(1e9, 0.9 * WORTH_SAVING));
        assert_eq!(at[0], 1_000);
        windows(&mut l, 1, |_| rates(1e9, 1.1 * WORTH_SAVING));
        assert_eq!(l.step(), 1);
    }

    #[test]
    fn without_a_flood_nothing_is_held() {
        let mut l = Ladder::default();
        l.judge(Some(rates(1e9, 1.0)));
        l.judge(None);
        assert_eq!(l.step(), 0);
        assert!(!Rates { frames: 1e5, sent: 1e5, ..rates(1e8, 0.0) }.is_flood(20_000));
        assert!(!Rates { frames: 1e4, ..rates(1e8, 0.0) }.is_flood(20_000));
        assert!(Rates { frames: 1e5, sent: 5e4, ..rates(1e8, 0.0) }.is_flood(20_000));
    }
}
