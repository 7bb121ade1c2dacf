//! Looking at a device before a sleep, without getting in anybody's way.
//!
//! Where a look costs next to nothing ([`Peek`](fulmar_netdev::Peek)) the thread
//! looks here, outside of the stack's lock; elsewhere a poll is the look, and this is the breath
//! between two of them. How long all of it lasts is up to
//! [`moderation`](fulmar_netdev::moderation).
//!
//! Whom it waits for may want this very CPU. Nobody tells, but a yield does: if it is no shorter than two
//! changes of thread take, and the kernel counts one, somebody else ran; and if what was waited for is
//! there then, it was whoever sends it. (Time alone would not tell: a virtual CPU that was taken away, or
//! a slow one, makes a yield long on which nobody ran, and the peer on another CPU goes on meanwhile.)
//! From then on the thread yields before every look, until yields come back at once. Where a look is a
//! poll, sleeping is as cheap as that: the next waits do not look at all, longer each time that what was
//! waited for came during a yield. Nor do they where somebody kept the CPU for long: a sleeper that is
//! woken gets it back sooner than a thread that has yielded. Unless what was waited for has come by then:
//! so it was whoever sends it who was busy, with that, as far as that is likely for so long a time.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};

use fulmar_base::{Duration, Instant};
use fulmar_netdev::Peek;

use crate::sys;
use crate::waiter::Waiter;

/// Looks between two looks at the clock: about half a microsecond.
const LOOKS: u32 = 16;

/// Looks at the clock, or polls, between two yields where nobody wants the CPU: a few microseconds,
/// against the half of one that a yield takes.
const ROUNDS: u32 = 8;

/// A yield that takes so long let somebody else run.
const SOMEBODY_RAN: Duration = Duration::from_micros(2);

/// A yield that takes so long let somebody run who has much to do.
const SOMEBODY_IS_BUSY: Duration = Duration::from_micros(100);

/// A yield that takes so long let somebody run for as long as the scheduler lets anybody; whoever fills a
/// ring is done sooner.
const SOMEBODY_ELSE_IS_BUSY: Duration = Duration::from_micros(500);

/// A yield that takes so long may have let somebody run; in vain it takes 0.2 to 0.5 µs.
const SOMEBODY_MAY_HAVE_RUN: Duration = Duration::from_nanos(800);

/// Waits that do not look after that; and at most, doubled each time that something came meanwhile.
const WITHOUT_LOOKING: (u32, u32) = (64, 4096);

/// Yields in vain after which nobody else is taken to want the CPU.
const VAIN_YIELDS: u32 = 4;

/// How the threads of one host look at its device.
pub struct Spin {
    peek: Option<Arc<dyn Peek>>,
    is_crowded: AtomicBool,
    vain_yields: AtomicU32,
    polls: AtomicU32,
    /// Waits left that do not look.
    without_looking: AtomicU32,
    /// How many there are the next time.
    next_without: AtomicU32,
    /// The last breath was a yield that may have let somebody run.
    may_have_let_run: AtomicBool,
    /// There is nothing to look for any more.
    is_over: AtomicBool,
}

impl Spin {
    /// For a device, which can be looked at from outside or not.
    pub fn new(peek: Option<Arc<dyn Peek>>) -> Spin {
        Spin {
            peek,
            is_crowded: AtomicBool::new(false),
            vain_yields: AtomicU32::new(0),
            polls: AtomicU32::new(0),
            without_looking: AtomicU32::new(0),
            next_without: AtomicU32::new(WITHOUT_LOOKING.0),
            may_have_let_run: AtomicBool::new(false),
            is_over: AtomicBool::new(false),
        }
    }

    /// Whether looking is of use, as far as is known; asked once per wait.
    pub fn may_look(&self) -> bool {
        let left = self.without_looking.load(Relaxed);
        self.without_looking.store(left.saturating_sub(1), Relaxed);
        left == 0
    }

    /// Whether looking is possible without the lock.
    pub fn has_peek(&self) -> bool {
        self.peek.is_some()
    }

    /// Looks until there may be work, the waiter is woken, or the time is over. Without a way to look
    /// it only lets others run. For how long it did that, as far as is known.
    pub fn run(&self, waiter: &Waiter, until: Instant) -> Duration {
        let Some(peek) = &self.peek else { return self.breathe() };
        let mut others_ran = Duration::ZERO;
        for round in 1u32.. {
            if self.is_crowded.load(Relaxed) || round.is_multiple_of(ROUNDS) {
                let took = self.yield_now();
                self.after_yield(took, peek.is_pending());
                others_ran = others_ran.saturating_add(took);
            }
            for _ in 0..LOOKS {
                if peek.is_pending() || waiter.is_woken() {
                    return others_ran;
                }
                std::hint::spin_loop();
            }
            if sys::now() >= until || self.is_over.load(Relaxed) {
                break;
            }
        }
        others_ran
    }

    /// Ends every look, also those to come.
    pub fn end(&self) {
        self.is_over.store(true, Relaxed);
    }

    /// The poll after a breath has brought frames, or not.
    pub fn polled(&self, has_found: bool) {
        match (self.may_have_let_run.swap(false, Relaxed), has_found) {
            (_, false) => {}
            // Looking pays here.
            (false, true) => self.next_without.store(WITHOUT_LOOKING.0, Relaxed),
            (true, true) => {
                self.note_yield(SOMEBODY_RAN, true);
                let waits = self.next_without.load(Relaxed);
                self.without_looking.store(waits, Relaxed);
                self.next_without.store((2 * waits).min(WITHOUT_LOOKING.1), Relaxed);
            }
        }
    }

    /// Between two polls.
    fn breathe(&self) -> Duration {
        let polls = self.polls.load(Relaxed).wrapping_add(1);
        self.polls.store(polls, Relaxed);
        if !self.is_crowded.load(Relaxed) && !polls.is_multiple_of(ROUNDS) {
            return Duration::ZERO;
        }
        let took = self.yield_now();
        self.after_yield(took, false);
        took
    }

    /// For how long somebody else ran.
    fn yield_now(&self) -> Duration {
        let start = sys::now();
        std::thread::yield_now();
        let took = sys::now().since(start);
        let has_let_run = took >= SOMEBODY_MAY_HAVE_RUN && (self.is_known() || is_displaced_anew());
        if has_let_run { took } else { Duration::ZERO }
    }

    /// Whether a yield that lasts needs no proof: it decides about the next few looks only.
    fn is_known(&self) -> bool {
        self.peek.is_some() && self.is_crowded.load(Relaxed)
    }

    /// `has_brought`: what was waited for is there.
    fn after_yield(&self, took: Duration, has_brought: bool) {
        let may_have = (SOMEBODY_MAY_HAVE_RUN..SOMEBODY_IS_BUSY).contains(&took);
        self.may_have_let_run.store(may_have, Relaxed);
        self.note_yield(took, has_brought);
    }

    fn note_yield(&self, took: Duration, has_brought: bool) {
        let busy = if has_brought { SOMEBODY_ELSE_IS_BUSY } else { SOMEBODY_IS_BUSY };
        if took >= busy || (took >= SOMEBODY_RAN && self.peek.is_none()) {
            self.without_looking.store(WITHOUT_LOOKING.0, Relaxed);
        }
        if took >= SOMEBODY_RAN {
            self.vain_yields.store(0, Relaxed);
            return self.is_crowded.store(true, Relaxed);
        }
        let vain = self.vain_yields.load(Relaxed) + 1;
        self.vain_yields.store(vain.min(VAIN_YIELDS), Relaxed);
        if vain >= VAIN_YIELDS {
            self.is_crowded.store(false, Relaxed);
        }
    }
}

thread_local! {
    /// What the kernel had counted when it was last asked.
    static DISPLACED: Cell<u64> = const { Cell::new(0) };
}

/// Whether somebody else got this thread's CPU since that was last asked.
fn is_displaced_anew() -> bool {
    let times = sys::times_displaced();
    DISPLACED.replace(times) != times
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    /// Has work at the n-th look.
    struct Nth(AtomicUsize, usize);

    impl Peek for Nth {
        fn is_pending(&self) -> bool {
            self.0.fetch_add(1, Relaxed) + 1 >= self.1
        }
    }

    fn looks(nth: usize, until: Instant) -> usize {
        let peek = Arc::new(Nth(AtomicUsize::new(0), nth));
        let spin = Spin::new(Some(Arc::clone(&peek) as Arc<dyn Peek>));
        let waiter = Waiter::current();
        waiter.reset();
        spin.run(&waiter, until);
        peek.0.load(Relaxed)
    }

    #[test]
    fn looking_ends_with_the_work_or_the_time() {
        assert_eq!(looks(1, Instant::FAR_FUTURE), 1);
        assert_eq!(looks(20, Instant::FAR_FUTURE), 20);
        assert_eq!(looks(usize::MAX, Instant::ZERO), LOOKS as usize);
    }

    #[test]
    fn looking_ends_when_the_thread_is_woken() {
        let waiter = Waiter::current();
        waiter.reset();
        waiter.wake();
        let peek = Arc::new(Nth(AtomicUsize::new(0), usize::MAX));
        let spin = Spin::new(Some(Arc::clone(&peek) as Arc<dyn Peek>));
        spin.run(&waiter, Instant::FAR_FUTURE);
        assert_eq!(peek.0.load(Relaxed), 1);
    }

    #[test]
    fn waits_do_not_look_for_a_while_where_somebody_else_needs_the_cpu() {
        let waits = |spin: &Spin| (0..1000).take_while(|_| !spin.may_look()).count();
        let spin = Spin::new(None);
        assert_eq!(waits(&spin), 0);
        spin.note_yield(SOMEBODY_RAN, false);
        assert_eq!(waits(&spin), WITHOUT_LOOKING.0 as usize);
        for waits_without in [1, 2, 4].map(|n| n * WITHOUT_LOOKING.0 as usize) {
            spin.after_yield(SOMEBODY_RAN, false);
            spin.polled(true);
            assert_eq!(waits(&spin), waits_without.min(1000));
        }
        let spin = Spin::new(Some(Arc::new(Nth(AtomicUsize::new(0), 1)) as Arc<dyn Peek>));
        spin.note_yield(SOMEBODY_RAN, false);
        assert_eq!(waits(&spin), 0, "a look costs nothing there");
        spin.note_yield(SOMEBODY_IS_BUSY, true);
        assert_eq!(waits(&spin), 0, "it was busy with what is waited for");
        spin.note_yield(SOMEBODY_IS_BUSY, false);
        assert_eq!(waits(&spin), WITHOUT_LOOKING.0 as usize);
    }

    #[test]
    fn what_comes_during_a_yield_comes_from_this_cpu_unless_the_yield_was_too_short() {
        let yields = |took: Duration, found: bool| {
            let spin = Spin::new(None);
            spin.after_yield(took, false);
            spin.polled(found);
            spin.may_look()
        };
        assert!(yields(Duration::from_nanos(300), true));
        assert!(yields(SOMEBODY_MAY_HAVE_RUN, false));
        assert!(!yields(SOMEBODY_MAY_HAVE_RUN, true));
        assert!(!yields(SOMEBODY_RAN, false));
    }

    #[test]
    fn it_yields_at_once_as_long_as_somebody_else_runs_then() {
        let spin = Spin::new(None);
        spin.note_yield(SOMEBODY_RAN, false);
        assert!(spin.is_crowded.load(Relaxed));
        (1..VAIN_YIELDS).for_each(|_| spin.note_yield(Duration::ZERO, false));
        assert!(spin.is_crowded.load(Relaxed));
        spin.note_yield(Duration::ZERO, false);
        assert!(!spin.is_crowded.load(Relaxed));
    }
}
