//! The simulation itself: it replays, its scenarios are varied, and its oracle can fail.

use fulmar_stack::base::{Counter, DropReason, Duration};

use super::*;

#[test]
fn a_seed_played_twice_is_the_same_to_the_byte() {
    for seed in 1..=150 {
        let (first, second) = (play(Case::network(seed), 0), play(Case::network(seed), 10));
        assert_eq!(first.1, second.1, "seed {seed}");
        assert!(first.0.is_ok() && second.0.is_ok(), "seed {seed}");
    }
}

#[test]
fn another_seed_is_another_run() {
    let digests: std::collections::BTreeSet<u64> =
        (1..=50).map(|s| play(Case::network(s), 0).1).collect();
    assert_eq!(digests.len(), 50);
}

#[test]
fn scenarios_hold_what_they_promise() {
    let all: Vec<Scenario> = (1..=2_000).map(Scenario::new).collect();
    let part = |is: &dyn Fn(&Scenario) -> bool| {
        all.iter().filter(|s| is(s)).count() as f64 / all.len() as f64
    };
    let between = |low: f64, high: f64, is: &dyn Fn(&Scenario) -> bool| {
        let p = part(is);
        assert!((low..high).contains(&p), "{p}");
    };
    between(0.4, 0.6, &|s| s.v6);
    between(0.3, 0.8, &|s| s.paths.iter().any(|w| w.loss > 0.0));
    between(0.02, 0.4, &|s| s.paths.iter().any(|w| w.loss > 0.03));
    between(0.1, 0.6, &|s| s.paths.iter().any(|w| w.reorder > 0.0));
    between(0.1, 0.6, &|s| s.paths.iter().any(|w| w.duplicate > 0.0));
    between(0.1, 0.6, &|s| s.paths.iter().any(|w| w.corrupt > 0.0));
    between(0.3, 0.8, &|s| s.paths.iter().any(|w| w.rate_bps.is_some()));
    between(0.01, 0.2, &|s| s.mtu == 576);
    between(0.2, 0.6, &|s| s.tso.is_some());
    between(0.02, 0.5, &|s| s.stations.iter().any(|s| s.pool_bytes < 2 << 20));
    between(0.5, 0.9, &|s| s.trouble == Trouble::None);
    between(0.05, 0.5, &|s| s.is_clean());
    between(0.1, 0.6, &|s| s.stations.iter().any(|s| s.urgent_percent > 0));
    let changes = |is: &dyn Fn(&RouteChange) -> bool| {
        let of = |s: &Scenario| match &s.trouble {
            Trouble::Routes(changes) => changes.iter().filter(|c| is(&c.2)).count(),
            _ => 0,
        };
        all.iter().map(of).sum::<usize>()
    };
    assert!(changes(&|c| matches!(c, RouteChange::Move { is_announced: true })) > 50);
    assert!(changes(&|c| matches!(c, RouteChange::Move { is_announced: false })) > 50);
    assert!(changes(&|c| matches!(c, RouteChange::Leave)) > 50);
    let has = |kind: &dyn Fn(&FlowKind) -> bool| {
        all.iter().flat_map(|s| &s.flows).filter(|f| kind(&f.kind)).count()
    };
    assert!(has(&|k| matches!(k, FlowKind::SimultaneousOpen)) > 50);
    assert!(has(&|k| matches!(k, FlowKind::Abort(..))) > 50);
    assert!(has(&|k| matches!(k, FlowKind::UnreadClose(_))) > 50);
    assert!(has(&|k| matches!(k, FlowKind::EarlyClose(_))) > 50);
    assert!(has(&|k| matches!(k, FlowKind::Deaf(_))) > 50);
    assert!(all.iter().all(|s| s.paths.iter().all(|w| w.loss <= 0.1)));
}

/// A scenario with one honest connection over a good wire.
fn honest() -> Scenario {
    let mut s = (1..).map(Scenario::new).find(|s| s.is_clean()).expect("there is one");
    s.flows.truncate(1);
    s.flows[0].kind = FlowKind::Plain;
    s.flows[0].ends.iter_mut().for_each(|e| (e.bytes, e.leave) = (50_000, Leave::HalfClose));
    s
}

#[test]
fn an_error_without_a_cause_is_a_violation() {
    let mut s = honest();
    assert!(World::new(s.clone(), 0).play().is_ok());
    // The link dies, but the scenario that the oracle reads has a pause too short to break a connection.
    s.paths.iter_mut().for_each(|w| w.delay = Duration::from_millis(5));
    let (at, lasts) = (Duration::from_millis(22), Duration::from_secs(1));
    s.trouble = Trouble::Pause { at, lasts };
    let mut world = World::new(s, 0);
    world.never_mend();
    assert!(matches!(world.play(), Err(Violation::Uncaused { .. })));
}

#[test]
fn a_byte_that_was_not_written_is_a_violation() {
    assert_eq!(pattern::first_difference(3, 10, pattern::piece(3, 10, 500)), None);
    let mut bytes = pattern::piece(3, 10, 500).to_vec();
    bytes[499] ^= 1;
    assert_eq!(pattern::first_difference(3, 10, &bytes), Some(499));
    assert!(pattern::first_difference(4, 10, pattern::piece(3, 10, 500)).is_some());
    assert!(pattern::first_difference(3, 11, pattern::piece(3, 10, 500)).is_some());
}

#[test]
fn a_panic_is_a_failure_with_its_seed() {
    let failure = Failure {
        case: Case::network(7),
        violation: Violation::Panic("why".into()),
        trace: vec!["an event".into()],
        replays: true,
    };
    let text = failure.to_string();
    for part in ["seed 7", "why", "an event", "trouble", "fulmar-lab sim --seed 7 --verbose"] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn a_case_of_the_swarm_played_twice_is_the_same_to_the_byte() {
    for seed in 1..=60 {
        let case = Case::swarm(seed);
        assert_eq!(play(case, 0).1, play(case, 10).1, "seed {seed}");
    }
}

#[test]
fn every_feature_of_the_swarm_occurs_and_can_be_left_out_alone() {
    let all: Vec<Scenario> = (1..=1_000).map(|s| Scenario::of(Case::swarm(s))).collect();
    for feature in Feature::ALL {
        let with = all.iter().filter(|s| s.swarm.features.has(feature));
        assert!(with.clone().count() > 50, "{}", feature.name());
        let s = with.into_iter().next().expect("there are some");
        let case = Case { without: Features::default().with(feature), ..s.case };
        let kept = Scenario::of(case).swarm.features;
        assert!(!kept.has(feature));
        assert_eq!(kept.with(feature), s.swarm.features);
    }
    assert!(all.iter().any(|s| s.swarm.features.is_empty()));
    assert!(all.iter().filter(|s| s.service_bound(0).is_some()).count() > 500);
}

/// A scenario of the swarm with one honest connection over a good wire, and nothing hostile yet.
fn honest_in_swarm() -> Scenario {
    let mut s = honest();
    s.case = Case::swarm(s.seed);
    s.paths.iter_mut().for_each(|w| w.delay = Duration::from_millis(5));
    s
}

#[test]
fn a_connection_without_progress_is_a_violation() {
    let mut world = World::new(honest_in_swarm(), 0);
    world.never_accept();
    assert!(matches!(world.play(), Err(Violation::Unserved { flow: 0, .. })));
}

#[test]
fn forged_segments_reach_the_connection_and_do_it_no_harm() {
    let mut s = honest_in_swarm();
    s.flows[0].at = Duration::ZERO;
    for e in &mut s.flows[0].ends {
        (e.write_pause, e.write_bytes) = (Duration::from_millis(20), 1_000);
    }
    let attack = |victim| Attack {
        kind: AttackKind::Segments,
        victim,
        from: Duration::from_millis(1),
        every: Duration::from_millis(1),
        burst: 2,
        frames: 1_000,
    };
    s.swarm.attacks = vec![attack(0), attack(1)];
    let mut world = World::new(s, 0);
    world.play().expect("no harm");
    let counters = world.counters();
    assert!(counters.iter().all(|c| c.drops(DropReason::TcpOutOfWindow) > 20), "{counters:?}");
    assert!(counters.iter().all(|c| c.drops(DropReason::TcpBadAck) > 20), "{counters:?}");
}

#[test]
fn a_flood_of_syns_reaches_the_listener() {
    let mut s = honest_in_swarm();
    let victim = 1 - s.flows[0].opener;
    s.flows[0].to_self = false;
    let sent = |s: &Scenario| {
        let mut world = World::new(s.clone(), 0);
        // Whether it withstands is asked of every seed.
        _ = world.play();
        world.counters()[victim].value(Counter::TxFrames)
    };
    let honest = sent(&s);
    s.swarm.attacks = vec![Attack {
        kind: AttackKind::SynFlood,
        victim,
        from: Duration::from_millis(1),
        every: Duration::from_micros(10),
        burst: 50,
        frames: 50,
    }];
    // The listener answers: with SYN,ACKs, at first with questions for the forged neighbours.
    assert!(sent(&s) >= honest + 40);
}

#[test]
fn fast_open_and_ecn_reach_the_stacks_whatever_middleboxes_do() {
    let mut total = fulmar_stack::base::Counters::default();
    for seed in 1..=400 {
        let s = Scenario::of(Case::swarm(seed));
        if !s.swarm.features.has(Feature::FastOpen) && !s.swarm.features.has(Feature::EcnManglers) {
            continue;
        }
        let mut world = World::new(s, 0);
        world.play().expect("every promise is held");
        world.counters().iter().for_each(|c| total.merge(c));
    }
    let counts = [
        Counter::TcpFastOpensPassive,
        Counter::TcpFastOpenCookiesSent,
        Counter::TcpFastOpenCookiesInvalid,
        Counter::TcpFastOpenOverflows,
        Counter::TcpAccurateEcnOpens,
        Counter::TcpEcnDistrusted,
    ];
    for c in counts {
        assert!(total.value(c) > 2, "{}: {}", c.name(), total.value(c));
    }
}

#[test]
fn an_opener_that_fails_unseen_is_one_that_the_listener_gave_up() {
    let mut s = honest();
    s.flows[0].to_self = false;
    let mut world = World::new(s, 0);
    world.open_listeners().expect("two listeners");
    assert_eq!(world.check_listeners(), Ok(()));
    // However often its peer's station has reset connections for their memory.
    world.ends[0].error = Some(fulmar_stack::socket::SocketError::TimedOut);
    world.sides[1 - world.ends[0].station].reclaimed = [1; 3];
    assert!(matches!(world.check_listeners(), Err(Violation::Handshakes { .. })));
    world.ends[0].is_reclaimed = true;
    assert_eq!(world.check_listeners(), Ok(()));
}

#[test]
fn files_are_sent_in_parts_and_by_reference() {
    let mut s = honest();
    let file = FilePlan { head: 700, tail: 300, shares: true, blocks: true };
    s.flows[0].ends.iter_mut().for_each(|e| {
        (e.options.file, e.bytes, e.write_bytes, e.posts) = (Some(file), 300_000, 120_000, None);
    });
    let mut world = World::new(s, 0);
    world.play().expect("every promise is held");
    let [a, b] = world.counters();
    let sum = |c: Counter| a.value(c) + b.value(c);
    assert_eq!(sum(Counter::SendBytes), 600_000);
    let copied = sum(Counter::SendFileBytes);
    assert!(copied > 0 && copied < 500_000, "{copied}");
}
