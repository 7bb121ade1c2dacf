//! The policy in virtual time: a modelled host with one device, under traffic whose arrivals are
//! given, beside the same host without moderation.

use std::collections::VecDeque;

use proptest::prelude::*;

use super::*;

/// What things cost on the modelled machine, in ns.
const POLL: u64 = 300;
const FRAME: u64 = 1_000;
const WAKE: u64 = 20_000;
const TIMER_LATE: u64 = 8_000;

/// A host that reads frames, and answers those that are questions.
struct Model {
    policy: Moderation,
    now: u64,
    arrivals: VecDeque<u64>,
    /// Time between an answer and the peer's next request.
    think: Option<u64>,
    sent: u64,
    wakeups: u64,
    busy_polled: u64,
    delays: Vec<u64>,
}

impl Model {
    fn new(config: ModerationConfig, arrivals: impl IntoIterator<Item = u64>) -> Model {
        Model {
            policy: Moderation::new(config),
            now: 0,
            arrivals: arrivals.into_iter().collect(),
            think: None,
            sent: 0,
            wakeups: 0,
            busy_polled: 0,
            delays: Vec::new(),
        }
    }

    fn at(&self) -> Instant {
        Instant::from_nanos(self.now)
    }

    fn poll(&mut self) -> usize {
        let start = self.at();
        self.now += POLL;
        let mut frames = 0;
        while self.arrivals.front().is_some_and(|at| *at <= self.now) {
            let at = self.arrivals.pop_front().unwrap();
            self.now += FRAME;
            self.delays.push(self.now - at);
            frames += 1;
            if let Some(think) = self.think.filter(|_| self.delays.len() < 20_000) {
                self.sent += 1;
                self.arrivals.push_back(self.now + think);
            }
        }
        self.policy.polled(start, frames, frames * 1500, self.sent);
        frames
    }

    /// Runs until all frames are taken.
    fn run(&mut self) {
        while !self.arrivals.is_empty() {
            self.policy.start_waiting(self.at());
            while self.poll() == 0 {
                self.wait();
            }
        }
    }

    fn wait(&mut self) {
        let next = *self.arrivals.front().unwrap();
        match self.policy.next(self.at(), BusyPoll::Allowed) {
            Next::BusyPoll { .. } => self.busy_polled += POLL,
            Next::Hold { until } => {
                self.now = until.as_nanos() + TIMER_LATE;
                self.woken();
            }
            Next::Arm => {
                if next > self.now {
                    self.now = next + WAKE;
                    self.woken();
                }
            }
        }
    }

    fn woken(&mut self) {
        self.wakeups += 1;
        self.policy.slept();
    }

    fn quantile(&self, q: f64) -> u64 {
        let mut sorted = self.delays.clone();
        sorted.sort_unstable();
        sorted[((sorted.len() - 1) as f64 * q) as usize]
    }
}

/// Arrivals at a fixed rate.
fn steady(pps: u64, count: u64) -> impl Iterator<Item = u64> {
    (0..count).map(move |i| 1_000_000 + i * 1_000_000_000 / pps)
}

fn played(config: ModerationConfig, arrivals: impl IntoIterator<Item = u64>) -> Model {
    let mut model = Model::new(config, arrivals);
    model.run();
    model
}

fn asked(config: ModerationConfig, think: u64) -> Model {
    let mut model = Model::new(config, [1_000_000]);
    model.think = Some(think);
    model.run();
    model
}

#[test]
fn a_flood_costs_few_wake_ups_and_less_than_100_us() {
    for pps in [100_000, 400_000, 700_000] {
        let ours = played(ModerationConfig::ADAPTIVE, steady(pps, 200_000));
        let plain = played(ModerationConfig::NONE, steady(pps, 200_000));
        let per_wakeup = ours.delays.len() as u64 / ours.wakeups.max(1);
        let expected = pps * 64 / 1_000_000;
        assert!(per_wakeup >= expected * 3 / 4, "{per_wakeup} frames per wake-up at {pps}/s");
        let added = ours.quantile(0.99).saturating_sub(plain.quantile(0.99));
        assert!(added <= 100_000, "{added} ns at {pps}/s");
    }
}

#[test]
fn a_lone_request_is_not_delayed_however_long_the_peer_thinks() {
    for think in [2_000, 10_000, 30_000, 100_000, 1_000_000] {
        let ours = asked(ModerationConfig::ADAPTIVE, think);
        let plain = asked(ModerationConfig::NONE, think);
        assert!(ours.quantile(0.5) <= plain.quantile(0.5), "peer thinks {think} ns");
        assert!(ours.quantile(0.99) <= plain.quantile(0.99), "peer thinks {think} ns");
    }
}

#[test]
fn a_peer_that_answers_within_a_wake_up_is_waited_for_without_sleeping() {
    let ours = asked(ModerationConfig::ADAPTIVE, 30_000);
    assert!(ours.wakeups < 10, "{} wake-ups", ours.wakeups);
    assert_eq!(ours.quantile(0.5), ours.quantile(0.25), "every answer is at once");
}

#[test]
fn sparse_traffic_is_hardly_polled_for() {
    let ours = played(ModerationConfig::ADAPTIVE, steady(1_000, 2_000));
    assert_eq!(ours.wakeups, 2_000);
    assert!(ours.busy_polled < 2_000 * 4_000, "{} ns of busy-polling", ours.busy_polled);
}

#[test]
fn after_a_flood_requests_are_answered_at_once_again() {
    let flood = steady(400_000, 100_000);
    let mut model = played(ModerationConfig::ADAPTIVE, flood);
    assert!(!model.policy.hold().is_zero());
    model.delays.clear();
    model.think = Some(30_000);
    model.arrivals.push_back(model.now + 50_000_000);
    model.run();
    assert!(model.policy.hold().is_zero());
    assert!(model.quantile(0.99) <= WAKE + 2 * POLL + FRAME);
}

#[test]
fn every_step_is_set_once_in_the_registers_of_a_device() {
    let mut model = Model::new(ModerationConfig::ADAPTIVE, steady(400_000, 50_000));
    let mut told = Vec::new();
    while !model.arrivals.is_empty() {
        if model.poll() == 0 {
            model.wait();
        }
        told.extend(model.policy.take_change());
    }
    assert!(told.len() >= ladder::TOP, "{told:?}");
    assert!(told.windows(2).all(|w| w[0] != w[1]), "{told:?}");
    let top = told.iter().flatten().map(|p| p.receive.delay).max();
    assert_eq!(top, Some(ModerationConfig::ADAPTIVE.max_hold));
    model.policy.set_config(ModerationConfig::NONE);
    assert_eq!(model.policy.take_change(), Some(None), "back to what it was set up with");
    assert_eq!(model.policy.take_change(), None);
}

#[test]
fn without_moderation_every_wait_sleeps_and_with_polling_none_does() {
    let plain = played(ModerationConfig::NONE, steady(10_000, 1_000));
    assert_eq!((plain.wakeups, plain.busy_polled), (1_000, 0));
    let polling = played(ModerationConfig::POLLING, steady(10_000, 1_000));
    assert_eq!(polling.wakeups, 0);
}

/// Cost of a frame for a sender on the same CPU, and of a thread switch, in ns.
const SEND: u64 = 500;
const SWITCH: u64 = 2_000;

/// A sender and a reader that share a CPU, with a ring between them. The reader reads 64 frames at a time. Returns the
/// frames, the holds and the elapsed time after `waits` waits.
fn shared_cpu(config: ModerationConfig, ring: u64, waits: u64) -> (u64, u64, u64) {
    let mut policy = Moderation::new(config);
    let (mut now, mut frames, mut holds) = (1_000_000, 0, 0);
    for _ in 0..waits {
        let start = Instant::from_nanos(now);
        policy.start_waiting(start);
        policy.polled(start, 0, 0, 0);
        let mut waiting = ring;
        match policy.next(start, BusyPoll::Allowed) {
            // The sender fills the ring and gives the CPU back.
            Next::BusyPoll { .. } => {
                now += ring * SEND + SWITCH;
                policy.yielded(Duration::from_nanos(ring * SEND + SWITCH));
            }
            // The sender fills the ring here, too. Then the CPU is idle until the timer fires.
            Next::Hold { until } => {
                now = (now + ring * SEND + SWITCH).max(until.as_nanos() + TIMER_LATE);
                policy.slept();
                holds += 1;
            }
            // Its first frames wake the reader, who gets the CPU at once.
            Next::Arm => {
                waiting = 16;
                now += waiting * SEND + SWITCH;
                policy.slept();
            }
        }
        while waiting > 0 {
            let took = waiting.min(64);
            policy.polled(Instant::from_nanos(now), took as usize, took as usize * 1500, 0);
            now += took * FRAME;
            (waiting, frames) = (waiting - took, frames + took);
        }
    }
    (frames, holds, now)
}

#[test]
fn a_sender_that_fills_the_ring_whenever_it_runs_is_not_delayed() {
    for ring in [24, 48, 96] {
        let (frames, holds, took) = shared_cpu(ModerationConfig::ADAPTIVE, ring, 10_000);
        assert!(holds < 300, "{holds} holds with a ring of {ring}");
        let best = ring * (SEND + FRAME) + SWITCH;
        assert!(took < frames / ring * best * 21 / 20, "{took} ns with a ring of {ring}");
    }
}

#[test]
fn time_of_other_threads_is_not_a_cost_of_busy_polling() {
    let cost = |given: Duration| {
        let mut policy = Moderation::new(ModerationConfig::LATENCY);
        let at = |us: u64| Instant::from_nanos(us * 1_000);
        policy.start_waiting(at(1_000));
        policy.polled(at(1_000), 0, 0, 0);
        assert!(matches!(policy.next(at(1_000), BusyPoll::Allowed), Next::BusyPoll { .. }));
        policy.yielded(given);
        policy.polled(at(1_040), 1, 1500, 0);
        policy.take_busy_polled()
    };
    assert_eq!(cost(Duration::ZERO), Some(Duration::from_micros(40)));
    assert_eq!(cost(Duration::from_micros(30)), Some(Duration::from_micros(10)));
    assert_eq!(cost(Duration::from_micros(50)), Some(Duration::ZERO));
}

#[test]
fn a_hold_does_not_teach_that_frames_are_long_in_coming() {
    let model = played(ModerationConfig::ADAPTIVE, steady(400_000, 100_000));
    assert_eq!(model.policy.hold(), ModerationConfig::ADAPTIVE.max_hold);
    assert!(model.policy.spin() > ModerationConfig::ADAPTIVE.min_spin);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever the traffic: everything is received, no hold and no busy-poll is longer than the longest, and
    /// no two holds follow each other without a frame.
    #[test]
    fn every_frame_is_taken_and_every_wait_is_bounded(
        gaps in proptest::collection::vec(prop_oneof![0u64..3_000, 0u64..60_000, 0u64..30_000_000], 1..2_000),
        which in 0usize..4,
    ) {
        let config = [
            ModerationConfig::ADAPTIVE,
            ModerationConfig::LATENCY,
            ModerationConfig::THROUGHPUT,
            ModerationConfig::NONE,
        ][which];
        let arrivals = gaps.iter().scan(0, |at, gap| { *at += gap; Some(*at) });
        let mut model = Model::new(config, arrivals);
        while !model.arrivals.is_empty() {
            let mut holds = 0;
            while model.poll() == 0 {
                match model.policy.next(model.at(), BusyPoll::Allowed) {
                    Next::Hold { until } => {
                        prop_assert!(until.since(model.at()) <= config.max_hold);
                        holds += 1;
                        model.now = until.as_nanos();
                        model.policy.slept();
                    }
                    Next::BusyPoll { until } => {
                        prop_assert!(until.since(model.at()) <= config.max_spin);
                    }
                    Next::Arm => {
                        model.now = model.now.max(model.arrivals[0]);
                        model.policy.slept();
                    }
                }
            }
            prop_assert!(holds <= 1, "{holds} holds in vain");
        }
        prop_assert_eq!(model.delays.len(), gaps.len());
    }
}
