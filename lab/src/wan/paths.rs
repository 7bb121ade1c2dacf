//! The paths of `bench wan`, as `--faults` takes them.
//!
//! A list chosen from loss, round-trip time, reordering, bottleneck and queue, such that each value of one stands
//! beside a few of the others; the whole product would take a day.

use std::time::Duration;

/// A path: its name, its value for `--faults`, and the ECN feedback that a Linux end requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct PathOf {
    pub name: &'static str,
    pub faults: &'static str,
    pub ecn: Ecn,
}

/// Linux's `tcp_ecn` at both ends. fulmar as a sender takes what is asked for, and asks for accurate feedback as a
/// receiver.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Ecn {
    /// RFC 3168.
    Classic = 1,
    /// RFC 9768.
    Accurate = 3,
}

const fn path(name: &'static str, faults: &'static str) -> PathOf {
    PathOf { name, faults, ecn: Ecn::Classic }
}

const fn accurate(name: &'static str, faults: &'static str) -> PathOf {
    PathOf { name, faults, ecn: Ecn::Accurate }
}

/// Paths with one bulk flow. Names begin with the round-trip time where it is not 20 ms; queues are of one
/// bandwidth-delay product where the name does not say another.
pub(super) const PATHS: &[PathOf] = &[
    path("clean", "delay=10ms,rate=200mbit,queue=500k"),
    path("loss-0.01", "delay=10ms,rate=200mbit,queue=500k,loss=0.01%"),
    path("loss-0.1", "delay=10ms,rate=200mbit,queue=500k,loss=0.1%"),
    path("loss-1", "delay=10ms,rate=200mbit,queue=500k,loss=1%"),
    path("loss-3", "delay=10ms,rate=200mbit,queue=500k,loss=3%"),
    path("loss-runs", "delay=10ms,rate=200mbit,queue=500k,loss=1%,loss-run=4"),
    path("1ms", "delay=500us,rate=200mbit,queue=100k"),
    path("1ms-loss-0.1", "delay=500us,rate=200mbit,queue=100k,loss=0.1%"),
    path("1ms-loss-1", "delay=500us,rate=200mbit,queue=100k,loss=1%"),
    path("1ms-loss-3", "delay=500us,rate=200mbit,queue=100k,loss=3%"),
    path("100ms", "delay=50ms,rate=200mbit,queue=2500k"),
    path("100ms-loss-0.01", "delay=50ms,rate=200mbit,queue=2500k,loss=0.01%"),
    path("100ms-loss-0.1", "delay=50ms,rate=200mbit,queue=2500k,loss=0.1%"),
    path("100ms-loss-1", "delay=50ms,rate=200mbit,queue=2500k,loss=1%"),
    path("100ms-loss-runs", "delay=50ms,rate=200mbit,queue=2500k,loss=0.1%,loss-run=4"),
    path("300ms", "delay=150ms,rate=100mbit,queue=3750k"),
    path("300ms-loss-0.01", "delay=150ms,rate=100mbit,queue=3750k,loss=0.01%"),
    path("300ms-loss-0.1", "delay=150ms,rate=100mbit,queue=3750k,loss=0.1%"),
    path("reordered", "delay=10ms,rate=200mbit,queue=500k,reorder=1%"),
    path("100ms-reordered", "delay=50ms,rate=200mbit,queue=2500k,reorder=1%"),
    path("reordered-loss-0.1", "delay=10ms,rate=200mbit,queue=500k,reorder=1%,loss=0.1%"),
    path("jitter", "delay=10ms,rate=200mbit,queue=500k,jitter=5ms"),
    path("10mbit-0.5bdp", "delay=20ms,rate=10mbit,queue=25k"),
    path("10mbit-4bdp", "delay=20ms,rate=10mbit,queue=200k"),
    path("50ms-2bdp", "delay=25ms,rate=50mbit,queue=625k"),
    path("1gbit-0.5bdp", "delay=10ms,rate=1gbit,queue=1250k"),
    path("1gbit-4bdp", "delay=10ms,rate=1gbit,queue=10m"),
    path("codel", "delay=20ms,rate=50mbit,queue=1m,aqm=codel"),
    path("codel-ecn", "delay=20ms,rate=50mbit,queue=1m,aqm=codel+ecn"),
    accurate("codel-accurate-ecn", "delay=20ms,rate=50mbit,queue=1m,aqm=codel+ecn"),
    accurate("1ms-step-accurate-ecn", "delay=500us,rate=100mbit,queue=1m,aqm=mark:1ms"),
    path("policer", "delay=10ms,police=50mbit:64k"),
    path("100ms-policer", "delay=50ms,police=10mbit:64k"),
    path("no-delay", ""),
    path("no-delay-loss-1", "loss=1%"),
    path("no-delay-reordered", "reorder=1%"),
    path("10ms-cable", "delay=5ms"),
    path("10ms-cable-loss-1", "delay=5ms,loss=1%"),
    path("10ms-cable-reordered", "delay=5ms,reorder=1%"),
];
/// The paths without a limit of the rate: what befalls packets there, and the path without delay and that of 10 ms.
pub(super) const CABLE: [(&str, [&str; 2]); 3] = [
    ("clean", ["no-delay", "10ms-cable"]),
    ("reorder", ["no-delay-reordered", "10ms-cable-reordered"]),
    ("loss", ["no-delay-loss-1", "10ms-cable-loss-1"]),
];
/// The paths of `--quick`.
pub(super) const QUICK_PATHS: &[&str] = &["clean", "loss-1", "reordered", "50ms-2bdp", "codel-ecn"];
/// Paths over which the page shows one connection of each sender over time.
pub(super) const DRAWN: &[&str] = &["clean", "loss-1", "50ms-2bdp", "100ms", "codel-accurate-ecn"];
/// The drawn paths of `--quick`.
pub(super) const QUICK_DRAWN: &[&str] = &["50ms-2bdp"];
/// Answers: a name, bytes, and the path. The first is that of `--quick`.
pub(super) const ANSWERS: &[(&str, usize, &str)] = &[
    ("14k-loss-1", 14_000, "delay=25ms,loss=1%"),
    ("1k", 1_000, "delay=25ms,rate=200mbit,queue=1250k"),
    ("1k-loss-1", 1_000, "delay=25ms,loss=1%"),
    ("14k", 14_000, "delay=25ms,rate=200mbit,queue=1250k"),
    ("100k", 100_000, "delay=25ms,rate=200mbit,queue=1250k"),
    ("100k-loss-1", 100_000, "delay=25ms,loss=1%"),
    ("1m", 1_000_000, "delay=25ms,rate=200mbit,queue=1250k"),
    ("1m-loss-0.1", 1_000_000, "delay=25ms,loss=0.1%"),
    ("10m", 10_000_000, "delay=25ms,rate=1gbit,queue=6250k"),
];
/// The answers that the ratios name.
pub(super) const SHORT: &str = "14k-loss-1";
/// The path that flows of both stacks share.
pub(super) const SHARED: PathOf = path("shared", "delay=20ms,rate=50mbit,queue=250k");

/// Round trips of a run at the least: a window has to settle.
const ROUND_TRIPS: u32 = 30;
/// The longest run for them.
const LONGEST: Duration = Duration::from_secs(9);

/// How long a bulk run over this delay takes, of the time that is given.
pub(super) fn run_time(one_way: Duration, given: Duration) -> Duration {
    given.max((one_way * 2 * ROUND_TRIPS).min(LONGEST))
}

#[cfg(test)]
mod tests {
    use super::*;
    use fulmar::devices::FaultSpec;

    #[test]
    fn every_path_is_read_and_has_a_name_of_its_own() {
        let answers = ANSWERS.iter().map(|(name, _, text)| (*name, *text));
        let paths = PATHS.iter().chain([&SHARED]).map(|p| (p.name, p.faults));
        let all: Vec<_> = paths.chain(answers).collect();
        for (name, text) in &all {
            assert!(text.parse::<FaultSpec>().is_ok(), "{name}");
            assert_eq!(all.iter().filter(|(n, _)| n == name).count(), 1);
        }
        assert_eq!(ANSWERS[0].0, SHORT);
        let is_known = |q: &&str| PATHS.iter().any(|p| p.name == *q);
        assert!(QUICK_PATHS.iter().chain(DRAWN).chain(QUICK_DRAWN).all(is_known));
        assert!(CABLE.iter().flat_map(|(_, two)| two).all(is_known));
        assert!(QUICK_DRAWN.iter().all(|q| QUICK_PATHS.contains(q)));
    }

    #[test]
    fn a_run_has_thirty_round_trips_within_nine_seconds() {
        let (two, ms) = (Duration::from_secs(2), Duration::from_millis);
        assert_eq!(run_time(ms(10), two), two);
        assert_eq!(run_time(ms(50), two), ms(3000));
        assert_eq!(run_time(ms(1000), two), LONGEST);
        assert_eq!(run_time(ms(1000), ms(10_000)), ms(10_000));
    }
}
