use super::*;
use crate::report::Machine;

#[test]
fn without_namespaces_the_scenarios_are_played_and_the_rest_is_left_out() {
    let options = Options { ways: Vec::new(), budget: Duration::ZERO, runs: 1 };
    let mut shown = Vec::new();
    let refused = io::Error::other("namespaces are not allowed here");
    let found = run(&options, Err(refused), &mut |what, n, all| shown.push((what, n, all)));
    let found = found.expect("the scenarios need nothing");
    assert!(shown.contains(&("playing slow peers", PLAYS as usize, PLAYS as usize)));
    let served = |name: &str| {
        let figure = found.figures().iter().find(|f| f.ratio.name == name);
        figure.and_then(|f| f.estimate).expect(name).low
    };
    assert_eq!(served("trust.slow_peers.served"), 100.0);
    assert_eq!(served("trust.syn_flood.connects"), 100.0);
    assert_eq!(found.figures().len(), 2);
    let machine = Machine::here();
    assert!(found.text(&machine).contains("trust.slow_peers.served"));
    assert_eq!(found.json(&machine, &[])["ratios"]["trust.syn_flood.connects"]["median"], 100.0);
}

fn way(name: &'static str, ns: &[f64]) -> Way {
    let machine = Duration::from_micros(3);
    Way { name, title: name, ns: ns.to_vec(), machine, answers: 1, frames: 2 }
}

#[test]
fn flooding_is_taken_off_both_sides_of_a_ratio_round_by_round() {
    let ways = vec![
        way("kernel.unclaimed", &[100.0, 200.0]),
        way("kernel.stray", &[300.0, 600.0]),
        way("packet.stray", &[500.0, 600.0]),
        way("packet.unclaimed", &[300.0, 400.0]),
        way("tap.stray", &[400.0, 800.0]),
    ];
    let found = Found::new(ways, &Played::default(), Stop::Runs, Duration::ZERO);
    let json = found.json(&Machine::here(), &[]);
    let interval = |name: &str| {
        let ratio = &json["ratios"][name];
        [&ratio["low"], &ratio["high"]].map(|v| v.as_f64())
    };
    assert_eq!(interval("trust.drop.vs_kernel.packet"), [Some(1.0), Some(2.0)]);
    // What fulmar's device costs is taken off as well.
    assert_eq!(interval("trust.drop.vs_kernel.packet.above_device"), [Some(0.5), Some(1.0)]);
    // Over a TAP flooding was not timed.
    assert_eq!(interval("trust.drop.vs_kernel"), [Some(2.0), Some(2.0)]);
    assert_eq!(json["rows"][1]["net_cpu_ns_per_frame"], 300.0);
    // A way that was not measured leaves its ratios out.
    assert_eq!(interval("trust.drop.vs_kernel.above_device"), [None, None]);
    assert_eq!(interval("trust.syn_flood.us_per_syn"), [None, None]);
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
