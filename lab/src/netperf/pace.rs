//! When a test ends: after a time, after a number of units, when the user says so, or because the other
//! side has gone.
//!
//! The data loops ask [`Pace::is_over`] once per call, which reads flags and no clock. The time is
//! kept by a thread of its own that sleeps, takes the CPU reading at the end of the test's length
//! and, where the other side decides the end, waits [`PAD`] longer.

use super::meter::{Reading, Usage};
use super::socket::TICK;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// How much longer than the test's length a side waits that is not the one to end it.
pub const PAD: Duration = Duration::from_secs(4);
/// After this long without progress the other side is given up.
const PATIENCE: Duration = Duration::from_secs(60);
/// Silence after the test's length that means its end, where nothing else tells it.
const LAST_WORD: Duration = Duration::from_secs(1);

/// How long a test is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Length {
    /// After this time.
    Time(Duration),
    /// After this many bytes of a stream, or transactions.
    Units(u64),
    /// Until the other side or the user ends it.
    Endless,
}

impl Length {
    /// As netperf writes it: seconds, or a negative number of units, or 0.
    pub fn from_number(n: i64) -> Length {
        match n {
            0 => Length::Endless,
            1.. => Length::Time(Duration::from_secs(n.unsigned_abs())),
            _ => Length::Units(n.unsigned_abs()),
        }
    }

    /// The same for a side that receives a stream: it takes whatever is sent, so that both sides
    /// have the same bytes in the end, and leaves it to the sender to count.
    pub fn for_receiver(self) -> Length {
        match self {
            Length::Units(_) => Length::Endless,
            other => other,
        }
    }
}

#[derive(Default)]
struct Bell {
    /// The test's length has passed.
    has_passed: AtomicBool,
    /// And the time on top of it.
    is_over: AtomicBool,
    /// Taken when the length had passed.
    reading: Mutex<Option<Reading>>,
}

impl Bell {
    fn keep_time(
        &self,
        length: Duration,
        pad: Duration,
        measures_cpu: bool,
        cancel: &Receiver<()>,
    ) {
        if cancel.recv_timeout(length) != Err(RecvTimeoutError::Timeout) {
            return;
        }
        let reading = Reading::take(measures_cpu).ok();
        *self.reading.lock().unwrap_or_else(PoisonError::into_inner) = reading;
        self.has_passed.store(true, Ordering::Release);
        if pad.is_zero() || cancel.recv_timeout(pad) == Err(RecvTimeoutError::Timeout) {
            self.is_over.store(true, Ordering::Release);
        }
    }
}

/// One run of a test at one of its ends.
pub struct Pace<'a> {
    bell: Arc<Bell>,
    cancel: Option<Sender<()>>,
    keeper: Option<JoinHandle<()>>,
    units_left: Option<u64>,
    quiet: Duration,
    patience: Duration,
    stop: &'a AtomicBool,
    measures_cpu: bool,
    start: Reading,
}

impl<'a> Pace<'a> {
    /// Starts the clock. `pad` is zero at the side that ends the test.
    ///
    /// # Errors
    /// There is no thread for the time, or `/proc/stat` cannot be read.
    pub fn start(
        length: Length,
        pad: Duration,
        measures_cpu: bool,
        stop: &'a AtomicBool,
    ) -> io::Result<Pace<'a>> {
        let (cancel, cancelled) = channel();
        let bell = Arc::new(Bell::default());
        // Before the thread: however late this one runs again, no test is shorter than its length.
        let start = Reading::take(measures_cpu)?;
        let keeper = match length {
            Length::Time(time) => {
                let bell = bell.clone();
                let keep = move || bell.keep_time(time, pad, measures_cpu, &cancelled);
                Some(std::thread::Builder::new().name("test-timer".into()).spawn(keep)?)
            }
            _ => None,
        };
        let units_left = match length {
            Length::Units(n) => Some(n),
            _ => None,
        };
        let patience = match length {
            Length::Time(time) => PATIENCE.max(time + 2 * PAD),
            _ => PATIENCE,
        };
        let cancel = Some(cancel);
        let quiet = Duration::ZERO;
        Ok(Pace { bell, cancel, keeper, units_left, quiet, patience, stop, measures_cpu, start })
    }

    /// Nothing more is to be begun.
    pub fn is_over(&self) -> bool {
        self.units_left == Some(0)
            || self.bell.is_over.load(Ordering::Relaxed)
            || self.stop.load(Ordering::Relaxed)
    }

    /// `units` were done.
    pub fn spend(&mut self, units: u64) {
        self.quiet = Duration::ZERO;
        if let Some(left) = &mut self.units_left {
            *left = left.saturating_sub(units);
        }
    }

    /// Bytes moved that are not a whole unit.
    pub fn stir(&mut self) {
        self.quiet = Duration::ZERO;
    }

    /// A call returned after [`TICK`] without anything.
    ///
    /// # Errors
    /// `TimedOut`: the other side must be gone.
    pub fn idle(&mut self) -> io::Result<()> {
        self.quiet += TICK;
        if self.quiet > self.patience {
            let why = format!(
                "no data was transferred for {} s; check that the peer is running",
                self.quiet.as_secs()
            );
            return Err(io::Error::new(io::ErrorKind::TimedOut, why));
        }
        Ok(())
    }

    /// The test's length has passed and nothing came since: where no connection tells the end, this
    /// is it.
    pub fn is_silent_end(&self) -> bool {
        self.quiet >= LAST_WORD && self.bell.has_passed.load(Ordering::Acquire)
    }

    /// Ends the run. `by_time`: no end was signalled, so the account is closed as of the test's
    /// length and not as of now.
    ///
    /// # Errors
    /// `/proc/stat` cannot be read.
    pub fn finish(mut self, by_time: bool) -> io::Result<Usage> {
        let now = Reading::take(self.measures_cpu)?;
        self.dismiss_keeper();
        let at_length = self.bell.reading.lock().unwrap_or_else(PoisonError::into_inner).take();
        let end = at_length.filter(|_| by_time).unwrap_or(now);
        Ok(self.start.until(&end))
    }

    fn dismiss_keeper(&mut self) {
        self.cancel = None;
        if let Some(keeper) = self.keeper.take() {
            let _ = keeper.join();
        }
    }
}

impl Drop for Pace<'_> {
    fn drop(&mut self) {
        self.dismiss_keeper();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    static GO_ON: AtomicBool = AtomicBool::new(false);

    fn pace(length: Length, pad: Duration) -> Pace<'static> {
        Pace::start(length, pad, false, &GO_ON).expect("a thread")
    }

    #[test]
    fn lengths_are_read_as_netperf_writes_them() {
        for (n, length) in [
            (0, Length::Endless),
            (10, Length::Time(Duration::from_secs(10))),
            (-7, Length::Units(7)),
        ] {
            assert_eq!(Length::from_number(n), length);
        }
        assert_eq!(Length::from_number(i64::MIN), Length::Units(1 << 63));
    }

    #[test]
    fn units_end_a_test_when_they_are_spent() {
        let mut pace = pace(Length::Units(10), PAD);
        assert!(!pace.is_over());
        pace.spend(4);
        assert!(!pace.is_over());
        pace.spend(400);
        assert!(pace.is_over());
        assert!(!pace.is_silent_end());
    }

    #[test]
    fn the_time_ends_a_test_and_an_unfinished_one_leaves_no_thread() {
        let mut timed = pace(Length::Time(Duration::from_millis(1)), Duration::ZERO);
        while !timed.is_over() {
            std::thread::yield_now();
        }
        for _ in 0..10 {
            timed.idle().expect("it is not long yet");
        }
        assert!(timed.is_silent_end());
        let usage = timed.finish(true).expect("only clocks");
        assert!(usage.elapsed >= Duration::from_millis(1));
        // Must return at once and not after an hour.
        drop(pace(Length::Time(Duration::from_secs(3600)), PAD));
    }

    #[test]
    fn the_pad_comes_after_the_length() {
        let padded = pace(Length::Time(Duration::from_millis(1)), Duration::from_secs(3600));
        while !padded.bell.has_passed.load(Ordering::Acquire) {
            std::thread::yield_now();
        }
        assert!(!padded.is_over());
    }

    #[test]
    fn silence_has_an_end_and_any_sound_starts_it_again() {
        let mut pace = pace(Length::Endless, PAD);
        let ticks = (PATIENCE.as_millis() / TICK.as_millis()) as usize;
        for _ in 0..ticks {
            pace.idle().expect("patience");
        }
        pace.stir();
        pace.idle().expect("patience again");
        let error = (0..ticks).find_map(|_| pace.idle().err()).expect("it has an end");
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert!(!pace.is_over());
    }

    #[test]
    fn the_user_ends_any_test() {
        let stop = AtomicBool::new(false);
        let pace = Pace::start(Length::Endless, PAD, true, &stop).expect("/proc/stat");
        assert!(!pace.is_over());
        stop.store(true, Ordering::Relaxed);
        assert!(pace.is_over());
    }
}
