//! Account of CPU time by stage, sampled while a stack works.
//!
//! Cost: while the account is off, entering a shard reads one word of the ledger and one of the thread, and passing a
//! stage one of the shard.
//!
//! The unit of sampling is the *visit*: the time from one entry of a thread into a shard to its next entry. It includes
//! what the thread does outside of the shard (the program's work, copies without the lock, sleep), so the stages of a
//! visit sum up to all of its time. Of several visits one is measured, drawn at random: the cycle counter is read at
//! every stage, and the time since the previous reading is added to the stage that is reached.
//!
//! ```text
//!   enter ─lock─► Locked ─► SendChecked ─► ... ─► Released ─ copy ─► SendCopied ─ program ─► enter
//!   └──────────────────────────── one visit ─────────────────────────────────────────────────┘
//! ```
//!
//! The last reading is thread-local; the sums are atomics of the ledger, written in measured visits only. At each stage
//! the counter is read twice, before and after the sums are updated, so that only one reading is part of the measured
//! time; its cost is subtracted. A reading costs as much as a short stage, and a visit has a dozen. The cost depends on
//! the clock rate and on the instructions around it, so a loop of readings does not give it: of the visits drawn, one
//! in four is measured as a whole, and the difference to the others is the cost of their readings (`Calibration`).
//!
//! The time of a stage in which the thread was preempted or slept is not CPU time. An interval long enough for that
//! counts only if the thread's context switches did not change meanwhile (`ru_nivcsw`, `ru_nvcsw`).
//!
//! [`Account::total_ns`] checks the sum of the stages: it is the CPU time of the threads by the kernel, read once in
//! many visits and independent of stages and of their calibration.

use std::cell::Cell;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::time::Instant;

use fulmar_stack::base::{Counter, Observer, Stage};
use fulmar_stack::shard::Stat;

use crate::runtime::sys;
use total::{Stretch, Total};

mod total;

/// By default one visit in 64 is measured: the readings at a dozen stages then cost about two nanoseconds a packet.
pub const DEFAULT_EVERY: u32 = 64;

/// The sums of the account of a stack.
#[derive(Debug)]
pub struct Ledger {
    /// One visit in `every` is measured; 0: the account is off.
    every: AtomicU32,
    /// The cycle counter when the account was switched on; earlier readings do not count.
    since: AtomicU64,
    /// Cycles and passes by stage, in measured visits.
    stages: [Sum; Stage::COUNT],
    /// All visits.
    visits: AtomicU64,
    /// Visits that were measured.
    measured: AtomicU64,
    /// Intervals left out because of a context switch.
    preempted: AtomicU64,
    /// The cost of a pass in a loop, measured when the account is first switched on.
    pass: OnceLock<PassCost>,
    /// The cost of a pass in the visits themselves.
    calibration: Calibration,
    /// The CPU time of the threads by the kernel.
    total: Total,
    /// Cycle counter and clock at the same time, which give the rate of the counter.
    began: (u64, Instant),
}

/// Cycles that passing one stage costs: the readings and the sums.
#[derive(Clone, Copy, Debug, Default)]
struct PassCost {
    /// The part that the measured time includes.
    inside: f64,
    /// All of it.
    whole: f64,
}

#[derive(Debug, Default)]
struct Sum {
    cycles: AtomicU64,
    passes: AtomicU64,
}

/// Short visits measured as a whole and by their stages, drawn at random from the same visits.
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

/// The largest sampling interval, visits.
const MAX_EVERY: u32 = 1 << 20;

/// Visits of each kind from which on their difference is used.
const ENOUGH_VISITS: u64 = 256;

impl Visits {
    /// Adds a visit, if it is a short one without the `own` cycles of the account.
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

    /// Mean cycles and passes of a visit; `None` if there were too few.
    fn mean(&self) -> Option<(f64, f64)> {
        let visits = self.visits.load(Relaxed);
        let of = |sum: &AtomicU64| sum.load(Relaxed) as f64 / visits as f64;
        (visits >= ENOUGH_VISITS).then(|| (of(&self.sum.cycles), of(&self.sum.passes)))
    }
}

impl Calibration {
    /// Cycles that a pass adds to a visit. Visits of both kinds have the last pass.
    fn cycles_of_a_pass(&self) -> Option<f64> {
        let ((whole, passes), (staged, more)) = (self.whole.mean()?, self.staged.mean()?);
        (more - passes > 0.5).then(|| (staged - whole) / (more - passes))
    }

    fn clear(&self) {
        self.whole.clear();
        self.staged.clear();
    }
}

/// The time of one stage.
///
/// ```
/// # use fulmar::{Stack, devices};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let (device, _peer) = devices::link_pair()?;
/// # let stack = Stack::builder().device(device).address("10.0.0.1/24".parse()?).unlisted().account(1).build()?;
/// for time in stack.account()?.iter().flat_map(|account| &account.stages) {
///     println!("{}: {:.1} ns each time", time.stage.name(), time.ns / time.passes);
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StageTime {
    /// The stage. Its time is that from the previous stage to this one.
    pub stage: Stage,
    /// How often it was passed, extrapolated to all visits.
    pub passes: f64,
    /// Nanoseconds, extrapolated to all visits, without the cost of the account.
    pub ns: f64,
}

/// A snapshot of the account of a stack: the time of its stages, and the work done meanwhile.
///
/// ```
/// # use fulmar::{Stack, devices};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let (device, _peer) = devices::link_pair()?;
/// # let stack = Stack::builder().device(device).address("10.0.0.1/24".parse()?).unlisted().account(1).build()?;
/// if let Some(account) = stack.account()? {
///     println!("{} packets, {:.0} ns in the stack", account.packets, account.sum_ns());
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Account {
    /// The stages that were passed, in the order of [`Stage::ALL`].
    pub stages: Vec<StageTime>,
    /// Visits in all.
    pub visits: u64,
    /// Visits that were measured.
    pub measured: u64,
    /// Intervals that are in no sum, because the thread was preempted or slept.
    pub preempted: u64,
    /// Nanoseconds that passing one stage costs.
    pub pass_ns: f64,
    /// Nanoseconds that all passes of measured visits cost.
    pub overhead_ns: f64,
    /// CPU time of the threads by the kernel, in nanoseconds, extrapolated to all visits; [`Account::sum_ns`] should
    /// equal it. `None`: too few visits yet.
    pub total_ns: Option<f64>,
    /// Packets sent and received on the wire: a super-frame counts as all of its packets.
    pub packets: u64,
    /// Frames that crossed between stack and device.
    pub frames: u64,
    /// Bytes of these frames, headers included.
    pub bytes: u64,
    /// Calls into the device.
    pub crossings: u64,
    /// Bytes that the stack has copied.
    pub copied_bytes: u64,
    /// Buffers allocated from the pool.
    pub allocs: u64,
}

thread_local! {
    static CLOCK: Clock = const { Clock::new() };
}

/// The sampling state of a thread.
struct Clock {
    /// The last reading; 0: this visit is not measured.
    at: Cell<u64>,
    /// Visits until the next that is measured.
    until_next: Cell<u32>,
    /// Visits since the last that was measured by its stages, the next one included.
    waited: Cell<u32>,
    random: Cell<u32>,
    /// When the present visit began, if it is measured as a whole; else 0.
    whole_from: Cell<u64>,
    /// Cycles and passes of the present visit, if it is measured by its stages.
    cycles: Cell<u64>,
    passes: Cell<u64>,
    /// Context switches of the thread when they were last read.
    switches: Cell<u64>,
    /// Measured visits that are still to begin with a reading of the context switches, because an interval was long.
    switch_reads_left: Cell<u32>,
    /// Visits since the thread's CPU time was last read.
    stretch: Stretch,
}

/// A longer interval (some twenty microseconds) may include a context switch.
const SUSPICIOUS_CYCLES: u64 = 50_000;
/// Measured visits after a long interval that begin with a reading of the context switches. Otherwise a switch in a
/// visit that was not measured would be charged to the next long interval.
const SWITCH_READS: u32 = 256;
/// Longer visits (than a microsecond or two) are not used for calibration: they differ by more than the readings cost.
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
            switch_reads_left: Cell::new(0),
            stretch: Stretch::new(),
        }
    }

    /// Visits to the next that is measured: uniform from 1 to 2 `every` - 1, so that the sampling does not lock to a
    /// period of the program (xorshift32, Marsaglia 2003).
    fn draw(&self, every: u32) -> u32 {
        let mut x = self.random.get();
        x ^= x << 13;
        x ^= x >> 17;
        x ^= x << 5;
        self.random.set(x);
        if every <= 1 { 1 } else { 1 + x % (2 * every - 1) }
    }

    /// Whether the visit that was drawn is measured as a whole. None is if every visit is measured.
    fn is_for_whole(&self, every: u32) -> bool {
        every > 1 && self.random.get() >> 8 & 3 == 0
    }

    /// Whether the thread has had a context switch since they were last read.
    #[cold]
    fn was_switched(&self) -> bool {
        self.switch_reads_left.set(SWITCH_READS);
        let switches = sys::switches();
        self.switches.replace(switches) != switches
    }
}

impl Ledger {
    /// A ledger for which one visit in `every` is measured (0 counts as 1).
    pub fn new(every: u32) -> Arc<Ledger> {
        let ledger = Ledger::off();
        ledger.set_every(Some(every));
        ledger
    }

    /// A ledger that is off until `Ledger::set_every`.
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
            every: AtomicU32::new(every.min(MAX_EVERY)),
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

    /// Returns `n` if one visit in `n` is measured; `None`: the account is off.
    pub fn every(&self) -> Option<u32> {
        Some(self.every.load(Relaxed)).filter(|n| *n > 0)
    }

    /// Sets the sampling interval: one visit in `every` is measured (0 counts as 1); `None`: none is. The sums stay
    /// until [`Ledger::clear`].
    pub(crate) fn set_every(&self, every: Option<u32>) {
        if every.is_some() {
            self.pass.get_or_init(measure_pass);
            self.total.clear();
            self.since.store(sys::ticks(), Relaxed);
        }
        self.every.store(every.map_or(0, |n| n.clamp(1, MAX_EVERY)), Relaxed);
    }

    /// The thread has reached `stage`.
    #[inline(always)]
    pub fn pass(&self, stage: Stage) {
        CLOCK.with(|clock| {
            if clock.at.get() != 0 {
                self.note(clock, stage);
            }
        });
    }

    /// Whether the present visit of the thread is measured by its stages.
    #[inline(always)]
    pub fn is_measuring(&self) -> bool {
        CLOCK.with(|clock| clock.at.get() != 0)
    }

    // Not inlined: a path without measurement pays the branch only.
    #[inline(never)]
    fn note(&self, clock: &Clock, stage: Stage) {
        if self.every.load(Relaxed) == 0 {
            // The thread is measured by the ledger of another stack; the time goes to its next stage there.
            return;
        }
        if clock.at.get() < self.since.load(Relaxed) {
            return clock.at.set(sys::ticks().max(1));
        }
        let cycles = sys::ticks().saturating_sub(clock.at.get());
        let is_long = cycles > SUSPICIOUS_CYCLES && stage != Stage::Slept;
        if is_long && clock.was_switched() {
            self.preempted.fetch_add(1, Relaxed);
        } else {
            let sum = &self.stages[stage as usize];
            sum.cycles.fetch_add(cycles, Relaxed);
            sum.passes.fetch_add(1, Relaxed);
        }
        if stage == Stage::Slept && clock.switch_reads_left.get() > 0 {
            // The switch of the sleep itself must not be charged to the next interval.
            clock.switches.set(sys::switches());
        }
        clock.cycles.set(clock.cycles.get().wrapping_add(cycles));
        clock.passes.set(clock.passes.get().wrapping_add(1));
        clock.at.set(sys::ticks().max(1));
    }

    /// The thread is about to enter the shard: its time since [`Stage::Released`] belongs to the program.
    #[inline(always)]
    pub fn enter(&self) {
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
        if let Some(left) = clock.switch_reads_left.get().checked_sub(1) {
            clock.switch_reads_left.set(left);
            clock.switches.set(sys::switches());
        }
        clock.at.set(sys::ticks().max(1));
    }

    /// Begins a visit that is measured as a whole: it has no stages.
    #[inline(never)]
    fn begin_whole(&self, clock: &Clock, every: u32) {
        let next = clock.draw(every);
        clock.until_next.set(next);
        // The next visit measured by its stages represents these visits, too.
        clock.waited.set(clock.waited.get().saturating_add(next));
        clock.at.set(0);
        clock.whole_from.set(sys::ticks().max(1));
    }

    /// Ends a measured visit: adds it to the calibration.
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

    /// The cost of a pass in a loop.
    fn loop_cost(&self) -> PassCost {
        self.pass.get().copied().unwrap_or_default()
    }

    /// The cost of a pass: from the calibration if there is one, else that of a loop.
    fn pass_cost(&self) -> PassCost {
        let pass = self.loop_cost();
        let Some(inside) = self.calibration.cycles_of_a_pass() else { return pass };
        // Less than in a loop if it overlaps with other instructions, more if it delays them; the bounds reject noise.
        let inside = inside.clamp(pass.inside / 2.0, pass.inside * 4.0);
        PassCost { inside, whole: pass.whole - pass.inside + inside }
    }

    /// A snapshot whose counts of the work are 0 (`Account::with_work`); `None` while the account is off.
    pub fn account(&self) -> Option<Account> {
        self.every().map(|_| self.times())
    }

    /// The times. Of unfinished visits they have the stages that were passed.
    fn times(&self) -> Account {
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
                stages.push(StageTime { stage: *stage, passes: passes as f64 * scale, ns });
            }
        }
        remove_negative(&mut stages);
        let pass_ns = pass.whole * ns_per_cycle;
        let overhead_ns = all_passes as f64 * pass_ns;
        let preempted = self.preempted.load(Relaxed);
        let total_ns = self.total.ns_per_visit().map(|ns| ns * visits as f64);
        Account {
            stages,
            visits,
            measured,
            preempted,
            pass_ns,
            overhead_ns,
            total_ns,
            ..Account::EMPTY
        }
    }

    /// Sets all sums to 0, for example after a warm-up.
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

    /// Nanoseconds of a cycle, the mean since the ledger was made; sleeps until that is 5 ms ago.
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

/// Sets negative times to 0 and scales the others so that their sum stays. The cost of a reading is a mean: of a stage
/// in which nothing happens more is subtracted than its readings took, and of the others less.
fn remove_negative(stages: &mut [StageTime]) {
    let is_busy = |s: &&mut StageTime| s.stage != Stage::Slept;
    let all: f64 = stages.iter_mut().filter(is_busy).map(|s| s.ns).sum();
    let above: f64 = stages.iter_mut().filter(is_busy).map(|s| s.ns.max(0.0)).sum();
    let share = if above > 0.0 { (all / above).clamp(0.0, 1.0) } else { 0.0 };
    stages.iter_mut().filter(is_busy).for_each(|s| s.ns = s.ns.max(0.0) * share);
    stages.iter_mut().for_each(|s| s.ns = s.ns.max(0.0));
}

impl Account {
    /// That of a ledger without visits.
    const EMPTY: Account = Account {
        stages: Vec::new(),
        visits: 0,
        measured: 0,
        preempted: 0,
        pass_ns: 0.0,
        overhead_ns: 0.0,
        total_ns: None,
        packets: 0,
        frames: 0,
        bytes: 0,
        crossings: 0,
        copied_bytes: 0,
        allocs: 0,
    };

    /// The account with the counts of a snapshot of the stack, which only packages released together with this one have.
    #[doc(hidden)]
    #[must_use]
    pub fn with_work(self, s: &Stat) -> Account {
        let (d, count) = (&s.device, |c: Counter| s.counters.value(c));
        Account {
            packets: count(Counter::TxPackets) + count(Counter::RxPackets),
            frames: d.tx_frames + d.rx_frames,
            bytes: d.tx_bytes + d.rx_bytes,
            crossings: d.tx_crossings + d.rx_crossings,
            copied_bytes: count(Counter::CopiedBytes),
            allocs: s.pool.allocs,
            ..self
        }
    }

    /// The account with the work since `before`. The stages are not subtracted: clear the account at that time.
    #[must_use]
    pub fn since(self, before: &Account) -> Account {
        Account {
            packets: self.packets.saturating_sub(before.packets),
            frames: self.frames.saturating_sub(before.frames),
            bytes: self.bytes.saturating_sub(before.bytes),
            crossings: self.crossings.saturating_sub(before.crossings),
            copied_bytes: self.copied_bytes.saturating_sub(before.copied_bytes),
            allocs: self.allocs.saturating_sub(before.allocs),
            ..self
        }
    }

    /// Nanoseconds of all stages but sleep.
    pub fn busy_ns(&self) -> f64 {
        self.stages.iter().filter(|s| s.stage != Stage::Slept).map(|s| s.ns).sum()
    }

    /// Nanoseconds of all stages but sleep, and the cost of the account: the CPU time of the threads.
    pub fn sum_ns(&self) -> f64 {
        self.busy_ns() + self.overhead_ns
    }

    /// Relative difference of the sum of the stages to the CPU time by the kernel: 0.01 is one percent more.
    pub fn gap(&self) -> Option<f64> {
        self.total_ns.filter(|t| *t > 0.0).map(|total| self.sum_ns() / total - 1.0)
    }

    /// Nanoseconds of one stage.
    pub fn ns_of(&self, stage: Stage) -> f64 {
        self.stages.iter().find(|s| s.stage == stage).map_or(0.0, |s| s.ns)
    }

    /// The sum of both.
    #[must_use]
    pub fn and(mut self, other: &Account) -> Account {
        for cost in &other.stages {
            match self.stages.iter_mut().find(|s| s.stage == cost.stage) {
                Some(s) => (s.ns, s.passes) = (s.ns + cost.ns, s.passes + cost.passes),
                None => self.stages.push(*cost),
            }
        }
        self.stages.sort_by_key(|s| s.stage as u8);
        // The CPU time of no visits is known: 0.
        let total = |b: &Account| if b.visits == 0 { Some(0.0) } else { b.total_ns };
        self.total_ns = total(&self).zip(total(other)).map(|(a, b)| a + b);
        self.visits += other.visits;
        self.measured += other.measured;
        self.preempted += other.preempted;
        self.overhead_ns += other.overhead_ns;
        self.pass_ns = self.pass_ns.max(other.pass_ns);
        self.packets += other.packets;
        self.frames += other.frames;
        self.bytes += other.bytes;
        self.crossings += other.crossings;
        self.copied_bytes += other.copied_bytes;
        self.allocs += other.allocs;
        self
    }
}

/// The ledgers of this process.
static ALL: Mutex<Vec<Weak<Ledger>>> = Mutex::new(Vec::new());

/// The sum of the ledgers of closed stacks.
static PAST: Mutex<Account> = Mutex::new(Account::EMPTY);

impl Drop for Ledger {
    fn drop(&mut self) {
        if self.measured.load(Relaxed) > 0 {
            let mut past = PAST.lock().unwrap_or_else(PoisonError::into_inner);
            *past = std::mem::take(&mut *past).and(&self.times());
        }
    }
}

/// The sum of the accounts of all stacks of this process, closed ones included; the counts of the work are 0.
pub fn of_this_process() -> Account {
    let all: Vec<Arc<Ledger>> = {
        let all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
        all.iter().filter_map(Weak::upgrade).collect()
    };
    let past = PAST.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let kept = all.iter().filter(|l| l.visits.load(Relaxed) > 0);
    kept.fold(past, |sum, l| sum.and(&l.times()))
}

/// The cost of one pass in a loop: the minimum of several trials.
fn measure_pass() -> PassCost {
    const PASSES: u64 = 512;
    let ledger = Ledger::with_pass(1, PassCost::default());
    let held = CLOCK.with(|c| (c.at.get(), c.until_next.get(), c.waited.get()));
    let trial = || {
        ledger.clear();
        // Whatever this thread was drawn for, this visit is measured.
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
    // The trials are not part of the sum of the process.
    ledger.clear();
    CLOCK.with(|c| {
        c.at.set(held.0);
        c.until_next.set(held.1);
        c.waited.set(held.2);
    });
    let each = |cycles| cycles as f64 / PASSES as f64;
    PassCost { inside: each(inside), whole: each(whole) }
}

impl Observer for Ledger {
    fn pass(&self, stage: Stage) {
        Ledger::pass(self, stage);
    }
}

#[cfg(test)]
mod tests;
