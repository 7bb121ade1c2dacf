use super::*;
use crate::harness::options::parsed;

fn options(line: &str) -> Options {
    parsed(line).expect("sound options")
}

#[test]
fn without_namespaces_the_scenarios_are_played_and_the_rest_is_left_out() {
    let refused = io::Error::other("namespaces are not allowed here");
    let found = run(&options("--seconds 0.001 --runs 3"), Err(refused)).expect("it needs nothing");
    for name in [SLOW, CONNECTS] {
        let served = found.figure(name).expect(name);
        assert_eq!((served.low, served.runs), (100.0, PLAYS));
    }
    assert_eq!(found.figures.len(), 2);
}

#[test]
fn ways_are_asked_for_by_name() {
    assert_eq!(options("--way packet.syn,kernel.syn").way, ["packet.syn", "kernel.syn"]);
    let refused = parsed::<Options>("--way packet").expect_err("no such way");
    assert!(WAYS.iter().all(|w| refused.contains(w.2)), "{refused}");
}

fn scenario<'a>(name: &'static str, ns: &'a [f64]) -> Scenario<'a> {
    let mut round = ns.iter();
    Scenario::new(name, name, move |_| Ok(Sample::of(NS, *round.next().unwrap_or(&f64::NAN))))
}

#[test]
fn flooding_is_taken_off_both_sides_of_a_ratio_round_by_round() {
    let scenarios = vec![
        scenario("kernel.unclaimed", &[100.0, 200.0]),
        scenario("kernel.stray", &[300.0, 600.0]),
        scenario("packet.stray", &[500.0, 600.0]),
        scenario("packet.unclaimed", &[300.0, 400.0]),
        scenario("tap.stray", &[400.0, 800.0]),
    ];
    let (budget, pace) = (Duration::ZERO, Pace::Calls);
    let found =
        report(harness::run(Plan { scenarios, ratios: ratios(), budget, max_runs: 2, pace }));
    let interval = |name: &str| found.figure(name).map(|e| (e.low, e.high));
    assert_eq!(interval("trust.drop.vs_kernel.packet"), Some((1.0, 2.0)));
    // What fulmar's device costs is taken off as well.
    assert_eq!(interval("trust.drop.vs_kernel.packet.above_device"), Some((0.5, 1.0)));
    // Over a TAP flooding was not timed.
    assert_eq!(interval("trust.drop.vs_kernel"), Some((2.0, 2.0)));
    assert_eq!(found.value("kernel.stray", "net_cpu_ns_per_frame"), Some(300.0));
    // A way that was not measured leaves its ratios out.
    assert_eq!(interval("trust.drop.vs_kernel.above_device"), None);
    assert_eq!(interval("trust.syn_flood.us_per_syn"), None);
}

#[test]
fn a_victim_that_answers_strays_or_sends_no_cookies_has_no_figure() {
    let cost = |cookies, segments, answers| {
        let tally = Tally { cookies, segments, answers };
        Cost { cpu: Duration::ZERO, machine: Duration::ZERO, tally, frames: 1000 }
    };
    assert!(check("w", Frames::Syns, &cost(950, 0, 1000)).is_ok());
    assert!(check("w", Frames::Syns, &cost(950, 0, 10)).is_err());
    assert!(check("w", Frames::Syns, &cost(10, 0, 1000)).is_err());
    assert!(check("w", Frames::Strays, &cost(0, 1000, 0)).is_ok());
    // Embryos of the SYNs before repeat their SYN,ACKs.
    assert!(check("w", Frames::Strays, &cost(0, 1000, 60)).is_ok());
    assert!(check("w", Frames::Strays, &cost(0, 1000, 500)).is_err());
    assert!(check("w", Frames::Strays, &cost(0, 10, 0)).is_err());
}
