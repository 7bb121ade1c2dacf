//! The probe of the product: what each stage costs, measured while a stack works.
//!
//! It is compiled into every stack. While a ledger is off, entering a shard reads one word of it, and passing a
//! stage reads one thread-local word.
//!
//! A thread that enters a shard takes part in the account for one *visit* out of several, drawn at
//! random. During that visit the cycle counter is read at every stage that is passed; the time since
//! the reading before goes to the stage that is reached. The visit lasts until the thread enters a
//! shard again, so that what it did in between (its own work, a copy outside of the lock, sleep) is
//! accounted for as well, and the stages of a visit sum up to all of its time.
//!
//! ```text
//!   enter ─lock─► Locked ─► SendChecked ─► ... ─► Released ─ copy ─► SendCopied ─ program ─► enter
//!   └──────────────────────────── one visit ─────────────────────────────────────────────────┘
//! ```
//!
//! Readings are the thread's own (a thread-local), sums are the ledger's (atomics, touched only in
//! the visits that are measured). At each stage the counter is read twice, before and behind the
//! sums, so that of what the account itself costs only the reading lies in what it measures; that
//! part is taken off. It is as long as a short stage, and a visit has a dozen of them. How long depends
//! on the speed of the processor at the moment, and on what goes on around it, which it holds up; a loop
//! of readings does not show that. So of the visits drawn one in four is measured as a whole, without
//! its stages: by how much the others are longer, is what their readings cost (`Calibration`).
//!
//! A thread that lost its CPU in the middle of a stage, to another one or because a lock was taken, has
//! not worked there. A time that is long enough for that to be possible counts only if the kernel says
//! that it did not happen (`ru_nivcsw`, `ru_nvcsw`).
//!
//! What the sum of the stages is held against is measured without them ([`Balance::total_ns`]): the kernel's
//! account of each thread's CPU time, asked for once in many visits, and the visits in between.

use std::cell::Cell;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::time::Instant;

use fulmar_base::{Outside, Probe, Stage};

use crate::sys;
use total::{Stretch, Total};

mod total;

/// One visit in so many is measured, unless the stack is told otherwise: a reading at each of a
/// dozen stages then costs a packet about two nanoseconds.
pub const DEFAULT_EVERY: u32 = 64;

/// The account of a stack.
#[derive(Debug)]
pub struct Ledger {
    /// One visit in so many is measured; 0: the account is off.
    every: AtomicU32,
    /// Readings before this one belong to no account: it was off, or another one.
    since: AtomicU64,
    /// Cycles and passes by stage, in measured visits.
    stages: [Sum; Stage::COUNT],
    /// Visits that the measured ones stand for, and those.
    visits: AtomicU64,
    measured: AtomicU64,
    /// Times that were left out because the thread had lost its CPU.
    preempted: AtomicU64,
    /// What a pass costs by itself, as measured when the account was first switched on.
    pass: OnceLock<PassCost>,
    /// What it costs where it is passed.
    calibration: Calibration,
    /// What the kernel says that the threads have worked meanwhile.
    total: Total,
    /// When it began, by the cycle counter and by the clock: the one is calibrated by the other.
    began: (u64, Instant),
}

/// Cycles that one pass of a stage costs by itself.
#[derive(Clone, Copy, Debug, Default)]
struct PassCost {
    /// Of those, the ones that lie between two readings, and so in the sums.
    inside: f64,
    whole: f64,
}

#[derive(Debug, Default)]
struct Sum {
    cycles: AtomicU64,
    passes: AtomicU64,
}

/// Short visits of both kinds, drawn from the same ones, as long as they were measured.
#[derive(Debug, Default)]
struct Calibration {
    whole: Visits,
    staged: Visits,
}

#[derive(Debug, Default)]
struct Visits {
    visits: AtomicU64,
    sum: Sum,
}

/// The rarest that a visit is measured.
const MOST_EVERY: u32 = 1 << 20;

/// Visits of each kind before their difference is believed.
const ENOUGH_VISITS: u64 = 256;

impl Visits {
    /// Adds a visit, if without `own` cycles of the account's it is a short one.
    fn add(&self, cycles: u64, passes: u64, own: u64) {
        if cycles.saturating_sub(own) <= SHORT_CYCLES {
            self.visits.fetch_add(1, Relaxed);
            self.sum.cycles.fetch_add(cycles, Relaxed);
            self.sum.passes.fetch_add(passes, Relaxed);
        }
    }

    fn clear(&self) {
        for word in [&self.visits, &self.sum.cycles, &self.sum.passes] {
            word.store(0, Relaxed);
        }
    }

    /// Cycles and passes of a visit in the mean; `None` if there were too few.
    fn mean(&self) -> Option<(f64, f64)> {
        let visits = self.visits.load(Relaxed);
        let of = |sum: &AtomicU64| sum.load(Relaxed) as f64 / visits as f64;
        (visits >= ENOUGH_VISITS).then(|| (of(&self.sum.cycles), of(&self.sum.passes)))
    }
}

impl Calibration {
    /// What a pass adds to a visit. One of them both kinds have: the last.
    fn cycles_of_a_pass(&self) -> Option<f64> {
        let ((whole, passes), (staged, more)) = (self.whole.mean()?, self.staged.mean()?);
        (more - passes > 0.5).then(|| (staged - whole) / (more - passes))
    }

    fn clear(&self) {
        self.whole.clear();
        self.staged.clear();
    }
}

/// What one stage cost.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StageCost {
    /// The stage; its time is what passed since the stage before.
    pub stage: Stage,
    /// How often it was passed, extrapolated to all visits.
    pub passes: f64,
    /// Nanoseconds in all, extrapolated to all visits, without what the account itself costs.
    pub ns: f64,
}

/// What a ledger says.
#[derive(Clone, Debug, Default)]
pub struct Balance {
    /// Every stage that was passed, in the order of the list.
    pub stages: Vec<StageCost>,
    /// Visits in all.
    pub visits: u64,
    /// Visits that were measured.
    pub measured: u64,
    /// Times that are in no sum, since the thread had lost its CPU meanwhile.
    pub preempted: u64,
    /// Nanoseconds that one pass of a stage costs by itself.
    pub pass_ns: f64,
    /// Nanoseconds that the passes cost in all: what the stack would have been quicker without.
    pub overhead_ns: f64,
    /// Nanoseconds of CPU that the threads had meanwhile by the kernel's account, extrapolated to all
    /// visits: what [`Balance::sum_ns`] is held against. `None`: too few visits yet.
    pub total_ns: Option<f64>,
}

thread_local! {
    static CLOCK: Clock = const { Clock::new() };
}

/// A thread's last reading, and when it will take part again.
struct Clock {
    /// The last reading; 0: this visit is not measured.
    at: Cell<u64>,
    /// Visits until the next that is measured.
    until_next: Cell<u32>,
    /// Visits that the present wait stands for.
    waited: Cell<u32>,
    random: Cell<u32>,
    /// When the present visit began, if it is measured as a whole; else 0.
    whole_from: Cell<u64>,
    /// Cycles and passes of the present visit, if it is measured by its stages.
    cycles: Cell<u64>,
    passes: Cell<u64>,
    /// How often the thread had lost its CPU when that was last asked for.
    switches: Cell<u64>,
    /// To be asked when so many more visits begin: one was so long lately that it mattered.
    asks: Cell<u32>,
    /// Visits since the thread's CPU time was last asked for.
    stretch: Stretch,
}

/// An interval of so many cycles (some twenty microseconds) may include other threads' time.
const SUSPICIOUS_CYCLES: u64 = 50_000;
/// Measured visits that begin with the question, after one that was as long: long ones may be rare among short
/// ones, and what has happened since the last question would be held against them.
const ASKING_VISITS: u32 = 256;
/// Visits longer than this (a microsecond or two) say nothing about what a reading costs: it does not
/// matter to them, and they differ by more.
const SHORT_CYCLES: u64 = 4_000;

impl Clock {
    const fn new() -> Clock {
        Clock {
            at: Cell::new(0),
            until_next: Cell::new(1),
            waited: Cell::new(1),
            random: Cell::new(0x9e37_79b9),
            whole_from: Cell::new(0),
            cycles: Cell::new(0),
            passes: Cell::new(0),
            switches: Cell::new(0),
            asks: Cell::new(0),
            stretch: Stretch::new(),
        }
    }

    /// How many visits on the next one is measured: from 1 to twice the mean, so that no rhythm of
    /// the program is met again and again. (xorshift32, Marsaglia 2003)
    fn draw(&self, every: u32) -> u32 {
        let mut x = self.random.get();
        x ^= x << 13;
        x ^= x >> 17;
        x ^= x << 5;
        self.random.set(x);
        if every <= 1 { 1 } else { 1 + x % (2 * every - 1) }
    }

    /// Whether the visit that was drawn is measured as a whole; none is where all are to be in the account.
    fn is_for_whole(&self, every: u32) -> bool {
        every > 1 && self.random.get() >> 8 & 3 == 0
    }

    /// Whether a long time since the reading before was, for all that is known, not the thread's own.
    #[cold]
    fn has_lost_cpu(&self) -> bool {
        self.asks.set(ASKING_VISITS);
        let switches = sys::switches();
        self.switches.replace(switches) != switches
    }
}

impl Ledger {
    /// An account in which one visit in `every` is measured (0 counts as 1).
    pub fn new(every: u32) -> Arc<Ledger> {
        let ledger = Ledger::off();
        ledger.set_every(Some(every));
        ledger
    }

    /// An account that is off until [`Ledger::set_every`].
    pub fn off() -> Arc<Ledger> {
        let ledger = Arc::new(Ledger::with(0, OnceLock::new()));
        let mut all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|l| l.strong_count() > 0);
        all.push(Arc::downgrade(&ledger));
        ledger
    }

    fn with_pass(every: u32, pass: PassCost) -> Ledger {
        Ledger::with(every, OnceLock::from(pass))
    }

    fn with(every: u32, pass: OnceLock<PassCost>) -> Ledger {
        Ledger {
            every: AtomicU32::new(every.min(MOST_EVERY)),
            since: AtomicU64::new(0),
            stages: std::array::from_fn(|_| Sum::default()),
            visits: AtomicU64::new(0),
            measured: AtomicU64::new(0),
            preempted: AtomicU64::new(0),
            pass,
            calibration: Calibration::default(),
            total: Total::default(),
            began: (sys::ticks(), Instant::now()),
        }
    }

    /// One visit in so many is measured; `None`: the account is off.
    pub fn every(&self) -> Option<u32> {
        Some(self.every.load(Relaxed)).filter(|n| *n > 0)
    }

    /// From now on one visit in `every` is measured (0 counts as 1); `None`: none is. What was measured stays,
    /// until [`Ledger::clear`].
    pub fn set_every(&self, every: Option<u32>) {
        if every.is_some() {
            self.pass.get_or_init(measure_pass);
            self.total.clear();
            self.since.store(sys::ticks(), Relaxed);
        }
        self.every.store(every.map_or(0, |n| n.clamp(1, MOST_EVERY)), Relaxed);
    }

    #[inline(always)]
    fn pass(&self, stage: Stage) {
        CLOCK.with(|clock| {
            if clock.at.get() != 0 {
                self.note(clock, stage);
            }
        });
    }

    // Not inlined: the branch around it is all that a path pays.
    #[inline(never)]
    fn note(&self, clock: &Clock, stage: Stage) {
        if self.every.load(Relaxed) == 0 {
            // The visit is one of another stack, whose next stage gets the time.
            return;
        }
        if clock.at.get() < self.since.load(Relaxed) {
            return clock.at.set(sys::ticks().max(1));
        }
        let cycles = sys::ticks().saturating_sub(clock.at.get());
        let is_long = cycles > SUSPICIOUS_CYCLES && stage != Stage::Slept;
        if is_long && clock.has_lost_cpu() {
            self.preempted.fetch_add(1, Relaxed);
        } else {
            let sum = &self.stages[stage as usize];
            sum.cycles.fetch_add(cycles, Relaxed);
            sum.passes.fetch_add(1, Relaxed);
        }
        if stage == Stage::Slept && clock.asks.get() > 0 {
            // It has lost its CPU of its own will: that is no reason to leave out what comes next.
            clock.switches.set(sys::switches());
        }
        clock.cycles.set(clock.cycles.get().wrapping_add(cycles));
        clock.passes.set(clock.passes.get().wrapping_add(1));
        clock.at.set(sys::ticks().max(1));
    }

    #[inline(always)]
    fn enter(&self) {
        let every = self.every.load(Relaxed);
        if every != 0 {
            self.enter_accounted(every);
        }
    }

    #[inline]
    fn enter_accounted(&self, every: u32) {
        CLOCK.with(|clock| {
            self.pass(Stage::SendCall);
            if clock.at.get() != 0 || clock.whole_from.get() != 0 {
                self.end_visit(clock);
            }
            let left = clock.until_next.get() - 1;
            if left > 0 {
                clock.until_next.set(left);
                clock.at.set(0);
            } else if clock.is_for_whole(every) {
                self.begin_whole(clock, every);
            } else {
                self.begin_visit(clock, every);
            }
        });
    }

    #[inline(never)]
    fn begin_visit(&self, clock: &Clock, every: u32) {
        let waited = u64::from(clock.waited.get());
        self.visits.fetch_add(waited, Relaxed);
        clock.stretch.add(&self.total, waited);
        self.measured.fetch_add(1, Relaxed);
        let next = clock.draw(every);
        clock.until_next.set(next);
        clock.waited.set(next);
        if let Some(left) = clock.asks.get().checked_sub(1) {
            clock.asks.set(left);
            clock.switches.set(sys::switches());
        }
        clock.at.set(sys::ticks().max(1));
    }

    /// Begins a visit that is measured as a whole: it has no stages.
    #[inline(never)]
    fn begin_whole(&self, clock: &Clock, every: u32) {
        let next = clock.draw(every);
        clock.until_next.set(next);
        // The visits that it stood for are the next measured one's.
        clock.waited.set(clock.waited.get().saturating_add(next));
        clock.at.set(0);
        clock.whole_from.set(sys::ticks().max(1));
    }

    /// A visit is over: if it was a measured one, it tells what readings cost.
    #[inline(never)]
    fn end_visit(&self, clock: &Clock) {
        let from = clock.whole_from.replace(0);
        if from != 0 {
            self.calibration.whole.add(sys::ticks().saturating_sub(from), 1, 0);
        } else if clock.at.get() != 0 {
            let (cycles, passes) = (clock.cycles.get(), clock.passes.get());
            self.calibration.staged.add(
                cycles,
                passes,
                (self.loop_cost().inside * passes as f64) as u64,
            );
        }
        clock.cycles.set(0);
        clock.passes.set(0);
    }

    /// What a pass costs in a loop.
    fn loop_cost(&self) -> PassCost {
        self.pass.get().copied().unwrap_or_default()
    }

    /// What a pass costs, as far as is known.
    fn pass_cost(&self) -> PassCost {
        let pass = self.loop_cost();
        let Some(inside) = self.calibration.cycles_of_a_pass() else { return pass };
        // It can be less than that of a loop, where it fills a pause, and more, but not by any amount.
        let inside = inside.clamp(pass.inside / 2.0, pass.inside * 4.0);
        PassCost { inside, whole: pass.whole - pass.inside + inside }
    }

    /// What the account says so far. Of visits that go on at this moment, what they have passed is in.
    pub fn balance(&self) -> Balance {
        let (visits, measured) = (self.visits.load(Relaxed), self.measured.load(Relaxed));
        let ns_per_cycle = self.ns_per_cycle();
        let scale = if measured == 0 { 0.0 } else { visits as f64 / measured as f64 };
        let pass = self.pass_cost();
        let mut all_passes = 0;
        let mut stages = Vec::new();
        for (stage, sum) in Stage::ALL.iter().zip(&self.stages) {
            let (cycles, passes) = (sum.cycles.load(Relaxed), sum.passes.load(Relaxed));
            all_passes += passes;
            if passes > 0 {
                let ns = (cycles as f64 - passes as f64 * pass.inside) * ns_per_cycle * scale;
                stages.push(StageCost { stage: *stage, passes: passes as f64 * scale, ns });
            }
        }
        settle(&mut stages);
        let pass_ns = pass.whole * ns_per_cycle;
        let overhead_ns = all_passes as f64 * pass_ns;
        let preempted = self.preempted.load(Relaxed);
        let total_ns = self.total.ns_per_visit().map(|ns| ns * visits as f64);
        Balance { stages, visits, measured, preempted, pass_ns, overhead_ns, total_ns }
    }

    /// Forgets what was measured so far, to begin behind a warm-up.
    pub fn clear(&self) {
        for sum in &self.stages {
            sum.cycles.store(0, Relaxed);
            sum.passes.store(0, Relaxed);
        }
        self.calibration.clear();
        self.total.clear();
        self.visits.store(0, Relaxed);
        self.measured.store(0, Relaxed);
        self.preempted.store(0, Relaxed);
    }

    /// The rate of the cycle counter since the ledger began; over a few milliseconds at the least.
    fn ns_per_cycle(&self) -> f64 {
        let least = std::time::Duration::from_millis(5);
        let (ticks, clock) = &self.began;
        if let Some(rest) = least.checked_sub(clock.elapsed()) {
            std::thread::sleep(rest);
        }
        let cycles = sys::ticks().saturating_sub(*ticks).max(1);
        clock.elapsed().as_nanos() as f64 / cycles as f64
    }
}

/// A reading right behind another costs less than most: a stage in which nothing happens comes out below
/// zero. What was taken off it too much, the others were relieved of too little.
fn settle(stages: &mut [StageCost]) {
    let is_busy = |s: &&mut StageCost| s.stage != Stage::Slept;
    let all: f64 = stages.iter_mut().filter(is_busy).map(|s| s.ns).sum();
    let above: f64 = stages.iter_mut().filter(is_busy).map(|s| s.ns.max(0.0)).sum();
    let share = if above > 0.0 { (all / above).clamp(0.0, 1.0) } else { 0.0 };
    stages.iter_mut().filter(is_busy).for_each(|s| s.ns = s.ns.max(0.0) * share);
    stages.iter_mut().for_each(|s| s.ns = s.ns.max(0.0));
}

impl Balance {
    /// Nothing was measured.
    const EMPTY: Balance = Balance {
        stages: Vec::new(),
        visits: 0,
        measured: 0,
        preempted: 0,
        pass_ns: 0.0,
        overhead_ns: 0.0,
        total_ns: None,
    };

    /// Nanoseconds of all stages but sleep.
    pub fn busy_ns(&self) -> f64 {
        self.stages.iter().filter(|s| s.stage != Stage::Slept).map(|s| s.ns).sum()
    }

    /// Nanoseconds of all stages but sleep, and beside them what the account itself has cost: all that its
    /// threads have worked.
    pub fn sum_ns(&self) -> f64 {
        self.busy_ns() + self.overhead_ns
    }

    /// How far the sum of the stages is from what the kernel says: 0.01 is one percent too much.
    pub fn gap(&self) -> Option<f64> {
        self.total_ns.filter(|t| *t > 0.0).map(|total| self.sum_ns() / total - 1.0)
    }

    /// Nanoseconds of one stage.
    pub fn ns_of(&self, stage: Stage) -> f64 {
        self.stages.iter().find(|s| s.stage == stage).map_or(0.0, |s| s.ns)
    }

    /// Both accounts in one.
    #[must_use]
    pub fn and(mut self, other: &Balance) -> Balance {
        for cost in &other.stages {
            match self.stages.iter_mut().find(|s| s.stage == cost.stage) {
                Some(s) => (s.ns, s.passes) = (s.ns + cost.ns, s.passes + cost.passes),
                None => self.stages.push(*cost),
            }
        }
        self.stages.sort_by_key(|s| s.stage as u8);
        // Of nothing nothing is unknown.
        let total = |b: &Balance| if b.visits == 0 { Some(0.0) } else { b.total_ns };
        self.total_ns = total(&self).zip(total(other)).map(|(a, b)| a + b);
        self.visits += other.visits;
        self.measured += other.measured;
        self.preempted += other.preempted;
        self.overhead_ns += other.overhead_ns;
        self.pass_ns = self.pass_ns.max(other.pass_ns);
        self
    }
}

/// The ledgers of this process.
static ALL: Mutex<Vec<Weak<Ledger>>> = Mutex::new(Vec::new());

/// What the ledgers said whose stacks are gone.
static PAST: Mutex<Balance> = Mutex::new(Balance::EMPTY);

impl Drop for Ledger {
    fn drop(&mut self) {
        if self.measured.load(Relaxed) > 0 {
            let mut past = PAST.lock().unwrap_or_else(PoisonError::into_inner);
            *past = std::mem::take(&mut *past).and(&self.balance());
        }
    }
}

/// The accounts of all stacks that this process has had so far, in one.
pub fn of_this_process() -> Balance {
    let all: Vec<Arc<Ledger>> = {
        let all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
        all.iter().filter_map(Weak::upgrade).collect()
    };
    let past = PAST.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let kept = all.iter().filter(|l| l.visits.load(Relaxed) > 0);
    kept.fold(past, |sum, l| sum.and(&l.balance()))
}

/// The cost of one pass, by the least of several trials: whatever disturbs makes it longer.
fn measure_pass() -> PassCost {
    const PASSES: u64 = 512;
    let ledger = Ledger::with_pass(1, PassCost::default());
    let held = CLOCK.with(|c| (c.at.get(), c.until_next.get(), c.waited.get()));
    let trial = || {
        ledger.clear();
        // Whatever this thread has been drawn for elsewhere: this visit is measured.
        CLOCK.with(|c| (c.at.set(0), c.whole_from.set(0)));
        CLOCK.with(|c| ledger.begin_visit(c, 1));
        let start = sys::ticks();
        for _ in 0..PASSES {
            ledger.pass(std::hint::black_box(Stage::Released));
        }
        let whole = sys::ticks().saturating_sub(start);
        let inside = ledger.stages[Stage::Released as usize].cycles.load(Relaxed);
        (whole, inside)
    };
    let (whole, inside) = (0..8).map(|_| trial()).min().unwrap_or_default();
    // Its account is not part of the process's.
    ledger.clear();
    CLOCK.with(|c| {
        c.at.set(held.0);
        c.until_next.set(held.1);
        c.waited.set(held.2);
    });
    let each = |cycles| cycles as f64 / PASSES as f64;
    PassCost { inside: each(inside), whole: each(whole) }
}

/// The probe. Cheap to clone: threads hold one each way, under the shard lock and outside of it.
#[derive(Clone, Debug)]
pub struct Account(Arc<Ledger>);

impl Account {
    /// Keeps the account in `ledger`.
    pub fn new(ledger: Arc<Ledger>) -> Account {
        Account(ledger)
    }

    /// The ledger.
    pub fn ledger(&self) -> &Arc<Ledger> {
        &self.0
    }
}

impl Default for Account {
    /// Off.
    fn default() -> Account {
        Account(Ledger::off())
    }
}

impl Probe for Account {
    type Outside = Account;

    fn outside(&self) -> Account {
        self.clone()
    }

    #[inline(always)]
    fn stage(&mut self, stage: Stage) -> ControlFlow<()> {
        self.0.pass(stage);
        ControlFlow::Continue(())
    }

    #[inline(always)]
    fn stages<const N: usize>(&mut self, stages: [Stage; N]) -> ControlFlow<()> {
        if CLOCK.with(|clock| clock.at.get() != 0) {
            stages.into_iter().for_each(|stage| self.0.pass(stage));
        }
        ControlFlow::Continue(())
    }
}

impl Outside for Account {
    #[inline(always)]
    fn enter(&self) {
        self.0.enter();
    }

    #[inline(always)]
    fn leave(&self) {
        self.0.pass(Stage::Released);
    }

    #[inline(always)]
    fn stage(&self, stage: Stage) -> ControlFlow<()> {
        self.0.pass(stage);
        ControlFlow::Continue(())
    }
}

#[cfg(test)]
mod tests;
