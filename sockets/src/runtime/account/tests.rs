//! Accounts whose times are known.

use super::*;

#[test]
fn the_stages_of_a_visit_sum_up_to_all_of_its_time() {
    let ledger = Ledger::with_pass(1, PassCost::default());
    let start = sys::ticks();
    ledger.enter();
    for stage in [Stage::Locked, Stage::SendChecked, Stage::Released, Stage::SendCopied] {
        ledger.pass(stage);
    }
    ledger.enter();
    let most = sys::ticks() - start;
    let sum: u64 = ledger.stages.iter().map(|s| s.cycles.load(Relaxed)).sum();
    assert!(sum > 0 && sum <= most);
    let passed: Vec<_> = ledger.times().stages.iter().map(|s| s.stage).collect();
    use Stage as S;
    assert_eq!(passed, [S::SendCall, S::Locked, S::SendChecked, S::SendCopied, S::Released]);
}

#[test]
fn a_thread_that_takes_part_in_an_account_can_open_another() {
    let first = Ledger::with_pass(1 << 20, PassCost::default());
    // Within a long wait for the next visit that is measured.
    (0..3).for_each(|_| first.enter());
    let held = CLOCK.with(|c| (c.at.get(), c.until_next.get()));
    let pass = measure_pass();
    assert!(pass.inside > 0.0 && pass.whole >= pass.inside, "{pass:?}");
    assert_eq!(CLOCK.with(|c| (c.at.get(), c.until_next.get())), held);
}

#[test]
fn the_cost_that_stages_add_to_a_visit_is_subtracted_from_each_of_them() {
    let ledger = Ledger::with_pass(1, PassCost { inside: 10.0, whole: 30.0 });
    ledger.stages[Stage::Locked as usize].cycles.store(1000, Relaxed);
    ledger.stages[Stage::Locked as usize].passes.store(10, Relaxed);
    ledger.visits.store(1, Relaxed);
    ledger.measured.store(1, Relaxed);
    for _ in 0..ENOUGH_VISITS {
        assert_eq!(ledger.pass_cost().inside, 10.0, "too few to tell");
        ledger.calibration.whole.add(300, 1, 0);
        ledger.calibration.staged.add(400, 6, 60);
    }
    // Long ones do not count.
    ledger.calibration.staged.add(1_000_000, 1, 10);
    let cost = ledger.pass_cost();
    assert_eq!((cost.inside, cost.whole), (20.0, 40.0));
    let (ns, times) = (ledger.ns_per_cycle(), ledger.times());
    let own = times.ns_of(Stage::Locked) / ns;
    assert!((own - 800.0).abs() < 80.0, "{own}");
}

#[test]
fn the_measured_visits_stand_for_all_of_them() {
    let ledger = Ledger::with_pass(16, PassCost::default());
    for _ in 0..100_000 {
        ledger.enter();
        ledger.pass(Stage::Locked);
    }
    let b = ledger.times();
    assert!(b.measured > 1000 && b.measured < 20_000, "{}", b.measured);
    // All visits except the visits of the wait that has not ended.
    assert!(b.visits <= 100_000 && b.visits > 100_000 - 20 * 16, "{}", b.visits);
    let locked = b.stages.iter().find(|s| s.stage == Stage::Locked).unwrap();
    // A pass during which the CPU was taken away does not count.
    let lost = b.preempted as f64 * b.visits as f64 / b.measured as f64;
    assert!((locked.passes + lost - b.visits as f64).abs() < 1.0, "{b:?}");
}

#[test]
fn a_visit_that_is_not_measured_leaves_no_trace() {
    let ledger = Ledger::with_pass(1 << 20, PassCost::default());
    CLOCK.with(|c| (c.until_next.set(1000), c.at.set(0)));
    for _ in 0..100 {
        ledger.enter();
        ledger.pass(Stage::Locked);
    }
    assert_eq!(ledger.times().measured, 0);
    assert!(ledger.times().stages.is_empty());
}

/// Intervals that the account has seen, counted or left out because the CPU was lost.
fn intervals(ledger: &Ledger) -> u64 {
    let passes = ledger.stages.iter().map(|s| s.passes.load(Relaxed)).sum::<u64>();
    passes + ledger.preempted.load(Relaxed)
}

#[test]
fn an_account_that_is_off_measures_nothing_and_leaves_the_visit_of_another_alone() {
    let (on, off) = (Ledger::with_pass(1, PassCost::default()), Ledger::with(0, OnceLock::new()));
    CLOCK.with(|c| (c.at.set(0), c.until_next.set(1)));
    on.enter();
    let began = CLOCK.with(|c| c.at.get());
    off.enter();
    off.pass(Stage::Locked);
    assert_eq!(CLOCK.with(|c| c.at.get()), began);
    assert_eq!((off.measured.load(Relaxed), intervals(&off)), (0, 0));
    on.pass(Stage::Locked);
    assert_eq!(intervals(&on), 1);
}

#[test]
fn a_visit_from_before_the_account_was_switched_on_is_not_in_it() {
    let ledger = Ledger::with(0, OnceLock::from(PassCost::default()));
    CLOCK.with(|c| (c.at.set(1), c.until_next.set(9)));
    ledger.set_every(Some(64));
    ledger.pass(Stage::Locked);
    assert_eq!(intervals(&ledger), 0);
    ledger.pass(Stage::SendChecked);
    assert_eq!(intervals(&ledger), 1, "from here on it is");
    ledger.set_every(None);
    ledger.pass(Stage::Released);
    assert_eq!((intervals(&ledger), ledger.every()), (1, None));
}

/// A visit in which a stage took `cycles`, with what the kernel is said to have told before.
fn visit_of(cycles: u64, switches: u64) -> Ledger {
    let ledger = Ledger::with_pass(1, PassCost::default());
    CLOCK.with(|c| (c.at.set(0), c.until_next.set(1)));
    ledger.enter();
    CLOCK.with(|c| {
        c.at.set(sys::ticks().saturating_sub(cycles).max(1));
        c.switches.set(switches);
    });
    ledger.pass(Stage::Locked);
    ledger
}

#[test]
fn a_long_time_counts_unless_the_kernel_took_the_cpu_away_meanwhile() {
    let passes = |l: &Ledger| l.times().stages.len();
    let long = 10 * SUSPICIOUS_CYCLES;
    let lost = visit_of(long, u64::MAX);
    assert_eq!((passes(&lost), lost.times().preempted), (0, 1));
    // The kernel may preempt this very pass, but not every time.
    assert!((0..100).any(|_| passes(&visit_of(long, sys::switches())) == 1));
    // A short interval counts without a reading of the switches.
    assert_eq!(passes(&visit_of(0, u64::MAX)), 1);
}

#[test]
fn a_long_time_behind_a_sleep_counts() {
    let kept = (0..100).any(|_| {
        let ledger = visit_of(10 * SUSPICIOUS_CYCLES, u64::MAX);
        assert_eq!(ledger.times().preempted, 1);
        // The account does not read the thread's context switches after this sleep.
        CLOCK.with(|c| c.switches.set(u64::MAX));
        ledger.pass(Stage::Slept);
        CLOCK.with(|c| c.at.set(sys::ticks().saturating_sub(10 * SUSPICIOUS_CYCLES).max(1)));
        ledger.pass(Stage::ReceiveCopied);
        ledger.times().stages.iter().any(|s| s.stage == Stage::ReceiveCopied)
    });
    // The CPU may be taken away at this very moment, but not every time.
    assert!(kept);
}

#[test]
fn negative_stages_are_subtracted_from_the_others_and_the_sum_stays() {
    let cost = |(stage, ns)| StageTime { stage, passes: 1.0, ns };
    let slept = (Stage::Slept, 500.0);
    let mut stages = [(Stage::Locked, 30.0), (Stage::PathChosen, -6.0), (Stage::Released, 90.0)]
        .into_iter()
        .chain([slept])
        .map(cost)
        .collect::<Vec<_>>();
    remove_negative(&mut stages);
    let ns: Vec<f64> = stages.iter().map(|s| s.ns).collect();
    assert_eq!(ns, [28.5, 0.0, 85.5, 500.0]);
}

#[test]
fn two_accounts_are_added_stage_by_stage() {
    let cost = |stage, ns| StageTime { stage, passes: 1.0, ns };
    let of = |stages| Account { stages, visits: 1, measured: 1, ..Account::default() };
    let one = of(vec![cost(Stage::Locked, 5.0), cost(Stage::Slept, 100.0)]);
    let sum = of(vec![cost(Stage::Released, 2.0), cost(Stage::Locked, 1.0)]).and(&one);
    assert_eq!(sum.ns_of(Stage::Locked), 6.0);
    assert_eq!(sum.busy_ns(), 8.0);
    assert_eq!(sum.visits, 2);
}

#[test]
fn bytes_moved_before_the_account_are_not_in_it() {
    let before = Account { packets: 3, bytes: 100, ..Account::default() };
    let now = Account { packets: 10, bytes: 450, allocs: 4, ..Account::default() };
    let since = now.since(&before);
    assert_eq!((since.packets, since.bytes, since.allocs), (7, 350, 4));
}

#[test]
fn the_document_says_what_the_sum_is_held_against_or_that_it_is_not_known() {
    let stages = vec![StageTime { stage: Stage::Locked, passes: 10.0, ns: 300.0 }];
    let unknown = Account { stages, overhead_ns: 20.0, ..Account::default() };
    let known = Account { total_ns: Some(400.0), ..unknown.clone() };
    assert!(known.gap().is_some_and(|gap| (gap + 0.2).abs() < 1e-9));
    let told = |account| {
        let told = crate::stat::Ledger::from(&account);
        (told.total_ns, told.sum_ns)
    };
    assert_eq!((told(unknown), told(known)), ((None, 320.0), (Some(400.0), 320.0)));
}
