//! Each state on a scripted path. One ACK stands for a round trip.

use super::*;
use proptest::prelude::*;

const MSS: u64 = 1000;
/// 10 MB/s and 20 ms: a BDP of 200 segments.
const RATE: u64 = 10_000_000;
const RTT: Duration = Duration::from_millis(20);
const BDP: u64 = 200_000;

/// A controller and the path that its samples describe.
struct Path {
    bbr: Bbr,
    now: Instant,
    delivered: u64,
    /// Position of the next lost range.
    lost_at: u64,
}

impl Path {
    fn new() -> Path {
        let window = Window::new(MSS as u32, 10);
        Path { bbr: Bbr::new(window), now: Instant::from_millis(1000), delivered: 0, lost_at: 0 }
    }

    fn sample(&self, rate: u64, in_flight: u64) -> Sample {
        let bytes = (rate / 50).max(1);
        Sample {
            newly_acked: bytes,
            total_delivered: self.delivered.saturating_add(bytes),
            rate,
            delivered: bytes,
            prior_delivered: Some(self.delivered),
            tx_in_flight: in_flight,
            rtt: Some(RTT),
            srtt: RTT,
            in_flight,
            is_cwnd_limited: true,
            ..Sample::at(self.now)
        }
    }

    fn take(&mut self, sample: Sample) {
        self.delivered = sample.total_delivered;
        self.bbr.on_sample(&sample);
    }

    /// A round that delivers at `rate` and leaves `in_flight`.
    fn round(&mut self, rate: u64, in_flight: u64) {
        self.now = self.now + RTT;
        self.take(self.sample(rate, in_flight));
    }

    /// A lost range of `bytes` of what was sent with `in_flight`; `before` was lost of that already.
    fn lose(&mut self, bytes: u64, before: u64, in_flight: u64) {
        self.lost_at += 10 * MSS;
        self.bbr.on_lost(&Lost {
            now: self.now,
            start: self.lost_at,
            bytes,
            total_delivered: self.delivered,
            lost: before + bytes,
            tx_in_flight: in_flight,
            is_app_limited: false,
        });
    }

    /// Startup up to the rate of the path, then Drain.
    fn full() -> Path {
        let mut p = Path::new();
        for i in 0..8 {
            p.round(RATE >> (7 - i), 2 * BDP);
        }
        assert_eq!(p.bbr.state, State::Startup);
        (0..3).for_each(|_| p.round(RATE, 2 * BDP));
        assert_eq!(p.bbr.state, State::Drain);
        p
    }

    fn cruising() -> Path {
        let mut p = Path::full();
        p.round(RATE, 2 * BDP);
        (0..3).for_each(|_| p.round(RATE, BDP * 11 / 10));
        assert_eq!(p.bbr.state, State::Down);
        p.round(RATE, BDP * 8 / 10);
        assert_eq!(p.bbr.state, State::Cruise);
        p
    }

    /// Cruises until it is time to probe; the phase after Refill.
    fn probing() -> Path {
        let mut p = Path::cruising();
        p.cruise_to_up();
        p
    }

    fn cruise_to_up(&mut self) {
        let rounds = (0..200).take_while(|_| {
            self.round(RATE, BDP * 8 / 10);
            self.bbr.state != State::Refill
        });
        assert!((50..=63).contains(&rounds.count()));
        self.round(RATE, BDP);
        assert_eq!(self.bbr.state, State::Up);
    }
}

#[test]
fn startup_doubles_until_three_rounds_bring_no_growth() {
    let mut p = Path::new();
    for i in 0..8 {
        p.round(RATE >> (7 - i), 2 * BDP);
        assert_eq!(p.bbr.state, State::Startup);
        let rate = RATE >> (7 - i);
        let least = p.bbr.initial_pacing_rate(RTT);
        assert_eq!(p.bbr.pacing_rate(RTT), Some((rate * 277 / 100 * 99 / 100).max(least)));
    }
    p.round(RATE * 124 / 100, 2 * BDP);
    p.round(RATE * 123 / 100, 2 * BDP);
    assert_eq!(p.bbr.state, State::Startup);
    p.round(RATE * 124 / 100, 2 * BDP);
    assert_eq!(p.bbr.state, State::Drain);
    assert_eq!(p.bbr.max_rate.get(), RATE * 124 / 100);
    assert!(p.bbr.pacing_rate(RTT) < Some(RATE * 63 / 100));
}

#[test]
fn rounds_limited_by_the_application_do_not_end_startup() {
    let mut p = Path::new();
    p.round(RATE, BDP);
    for _ in 0..50 {
        p.now = p.now + RTT;
        p.take(Sample { is_app_limited: true, ..p.sample(RATE / 10, BDP / 10) });
    }
    assert_eq!((p.bbr.state, p.bbr.max_rate.get()), (State::Startup, RATE));
    // An app-limited sample that is faster than all earlier ones is used.
    p.take(Sample { is_app_limited: true, ..p.sample(RATE * 2, BDP) });
    assert_eq!(p.bbr.max_rate.get(), RATE * 2);
}

/// A round of Startup in fast recovery in which `ranges` of two segments each are lost.
fn lossy_startup(ranges: u64) -> Path {
    lossy_startup_after(ranges, Bbr::on_loss)
}

fn lossy_startup_after(ranges: u64, begin: fn(&mut Bbr)) -> Path {
    let mut p = Path::new();
    p.round(RATE / 2, BDP);
    p.round(RATE, 2 * BDP);
    begin(&mut p.bbr);
    for i in 0..ranges {
        p.lose(2 * MSS, i * 2 * MSS, 2 * BDP);
    }
    p.now = p.now + RTT;
    p.take(Sample { lost: ranges * 2 * MSS, ..p.sample(RATE, 2 * BDP) });
    p
}

#[test]
fn startup_ends_when_six_ranges_and_over_two_percent_are_lost_in_a_round() {
    assert_eq!(lossy_startup(4).bbr.state, State::Startup);
    let p = lossy_startup(6);
    assert_eq!(p.bbr.state, State::Drain);
    assert_eq!(p.bbr.bounds.inflight_long, BDP);
}

#[test]
fn losses_after_a_time_out_leave_startup_as_it_is() {
    let mut p = lossy_startup_after(6, Bbr::on_timeout);
    assert_eq!((p.bbr.state, p.bbr.full.was_reached), (State::Startup, false));
    // Nor do they without SACK, where ranges cannot be counted.
    p.take(Sample { lost: 4 * MSS, has_sack: false, ..p.sample(RATE, 2 * BDP) });
    assert_eq!((p.bbr.state, p.bbr.full.was_reached), (State::Startup, false));
}

#[test]
fn losses_that_prove_spurious_return_to_startup() {
    let mut p = lossy_startup(6);
    p.bbr.on_undo();
    assert_eq!(p.bbr.state, State::Startup);
    assert_eq!(p.bbr.bounds.inflight_long, INFINITE);
    assert!(!p.bbr.full.was_reached);
}

#[test]
fn drain_ends_with_a_bdp_in_flight_or_after_three_rounds() {
    let mut p = Path::full();
    p.round(RATE, BDP + MSS);
    assert_eq!(p.bbr.state, State::Drain);
    // Nothing is queued: Down is over at once.
    p.round(RATE, BDP);
    assert_eq!(p.bbr.state, State::Cruise);

    let mut p = Path::full();
    (0..3).for_each(|_| p.round(RATE, 2 * BDP));
    assert_eq!(p.bbr.state, State::Drain);
    p.round(RATE, 2 * BDP);
    assert_eq!(p.bbr.state, State::Down);
}

#[test]
fn the_window_is_two_bdp_and_the_rate_a_little_less_than_that_of_the_path() {
    let p = Path::cruising();
    assert_eq!(p.bbr.bdp(), BDP);
    let aggregated = p.bbr.aggregation.get();
    assert_eq!(p.bbr.window.cwnd, 2 * BDP + aggregated);
    assert_eq!(p.bbr.pacing_rate(RTT), Some(RATE * 99 / 100));
}

#[test]
fn without_a_probe_by_rounds_the_next_comes_after_two_to_three_seconds() {
    let mut p = Path::cruising();
    let began = p.now;
    // Rounds of 100 ms: 63 would take longer.
    while p.bbr.state == State::Cruise {
        p.now = p.now + RTT * 5;
        p.take(p.sample(RATE, BDP * 8 / 10));
    }
    assert_eq!(p.bbr.state, State::Refill);
    let waited = p.now.since(began).as_millis();
    assert!((1900..=3200).contains(&waited), "{waited} ms");
}

#[test]
fn a_small_bdp_is_probed_as_often_as_reno_would() {
    let mut p = Path::cruising();
    p.bbr.window.cwnd = 8 * MSS;
    let mut rounds = 0;
    while p.bbr.state == State::Cruise {
        p.now = p.now + RTT;
        p.bbr.window.cwnd = 8 * MSS;
        p.take(Sample { newly_acked: 0, ..p.sample(RATE, 4 * MSS) });
        rounds += 1;
    }
    assert!(rounds <= 8, "{rounds}");
}

#[test]
fn up_ends_when_three_rounds_bring_no_growth() {
    let mut p = Path::probing();
    assert_eq!(p.bbr.state.pacing_gain(), 125);
    p.round(RATE * 13 / 10, BDP * 5 / 4);
    (0..2).for_each(|_| p.round(RATE * 13 / 10, BDP * 5 / 4));
    assert_eq!(p.bbr.state, State::Up);
    p.round(RATE * 13 / 10, BDP * 5 / 4);
    assert_eq!(p.bbr.state, State::Down);
    assert_eq!(p.bbr.max_rate.get(), RATE * 13 / 10);
}

#[test]
fn too_many_losses_while_probing_set_the_long_term_bound_where_they_crossed_two_percent() {
    let mut p = Path::probing();
    // Two percent of 250 segments, then ten more of a run of 20: five less 4 make the threshold.
    p.lose(4 * MSS, 0, 230 * MSS);
    assert_eq!(p.bbr.state, State::Up);
    p.lose(20 * MSS, 4 * MSS, 250 * MSS);
    assert_eq!(p.bbr.state, State::Down);
    // (2 % of 230 - 4) / 0.98 beyond 230.
    assert_eq!(p.bbr.bounds.inflight_long, 230 * MSS + 600 * 100 / 98);
    // Only once per probe.
    p.lose(20 * MSS, 24 * MSS, 100 * MSS);
    assert_eq!(p.bbr.bounds.inflight_long, 230 * MSS + 612);
}

#[test]
fn one_lost_segment_of_twenty_to_fifty_does_not_end_a_probe() {
    let mut p = Path::probing();
    p.bbr.bounds.inflight_long = 30 * MSS;
    // More than three percent.
    p.lose(MSS, 0, 30 * MSS);
    assert_eq!((p.bbr.state, p.bbr.bounds.inflight_long), (State::Up, 30 * MSS));
    p.lose(MSS, MSS, 30 * MSS);
    assert_eq!(p.bbr.state, State::Down);
    // Of fewer than 20 it is a large share.
    let mut p = Path::probing();
    p.lose(MSS, 0, 19 * MSS);
    assert_eq!(p.bbr.state, State::Down);
}

#[test]
fn losses_on_a_path_of_microseconds_leave_seven_tenths_of_three_quanta() {
    let mut p = Path::probing();
    // A gigabyte per second: quanta of 64 KiB, and a product of rate and delay of 20 segments.
    (p.bbr.rate, p.bbr.pacing_rate) = (1_000_000_000, 1_000_000_000);
    (p.bbr.min_rtt.ns, p.bbr.window.cwnd) = (20_000, 400 * MSS);
    p.lose(2 * MSS, 0, 45 * MSS);
    let quanta = 3 * (64 << 10) + 2 * MSS;
    assert_eq!(p.bbr.bounds.inflight_long, quanta * 70 / 100);
    // Never more than of the window.
    let mut p = Path::probing();
    (p.bbr.rate, p.bbr.pacing_rate) = (1_000_000_000, 1_000_000_000);
    (p.bbr.min_rtt.ns, p.bbr.window.cwnd) = (20_000, 50 * MSS);
    p.lose(2 * MSS, 0, 20 * MSS);
    assert_eq!(p.bbr.bounds.inflight_long, 35 * MSS);
}

#[test]
fn a_probe_after_one_that_went_too_high_stops_at_the_bound_and_is_repeated_at_once() {
    let mut p = Path::probing();
    p.lose(20 * MSS, 0, 250 * MSS);
    let bound = p.bbr.bounds.inflight_long;
    p.round(RATE, BDP * 8 / 10);
    p.round(RATE, BDP * 8 / 10);
    assert_eq!(p.bbr.state, State::Cruise);
    p.cruise_to_up();
    assert!(p.bbr.cycle.was_too_high);
    p.round(RATE, bound);
    assert_eq!(p.bbr.state, State::Down);
    // A round later the feedback is complete, and was good.
    p.round(RATE, BDP);
    assert_eq!(p.bbr.state, State::Refill);
    p.round(RATE, BDP);
    assert_eq!(p.bbr.state, State::Up);
}

#[test]
fn the_long_term_bound_rises_by_doubling_steps_while_probing() {
    let mut p = Path::probing();
    p.bbr.bounds.inflight_long = BDP;
    p.bbr.window.cwnd = BDP;
    p.bbr.bounds.up_rounds = 0;
    p.bbr.raise_slope();
    let mut last = BDP;
    let mut steps = Vec::new();
    for i in 1..6 {
        p.now = p.now + RTT;
        // The rate grows: the probe goes on.
        let sample =
            Sample { newly_acked: BDP, tx_in_flight: BDP, ..p.sample(RATE + RATE * i, BDP) };
        p.take(sample);
        steps.push((p.bbr.bounds.inflight_long - last) / MSS);
        last = p.bbr.bounds.inflight_long;
    }
    // 1, 2, 4, 8, 16, but for rounding.
    assert_eq!(steps[0], 1);
    assert!(steps.windows(2).all(|w| w[1] > w[0]), "{steps:?}");
    assert!(steps.iter().sum::<u64>().abs_diff(31) <= 2, "{steps:?}");
}

#[test]
fn losses_while_cruising_bring_rate_and_flight_down_to_what_is_delivered_until_the_next_probe() {
    let mut p = Path::cruising();
    p.lose(MSS, 0, BDP);
    p.round(RATE * 9 / 10, BDP * 8 / 10);
    // The end of the round in which the loss was.
    p.round(RATE * 9 / 10, BDP * 8 / 10);
    assert_eq!(p.bbr.bounds.rate_short, RATE);
    p.lose(MSS, 0, BDP);
    p.round(RATE * 9 / 10, BDP * 8 / 10);
    assert_eq!((p.bbr.bounds.rate_short, p.bbr.rate), (RATE * 9 / 10, RATE * 9 / 10));
    // Never by more than three tenths in a round.
    p.lose(MSS, 0, BDP);
    p.bbr.latest = Latest::default();
    p.round(RATE / 10, BDP / 2);
    assert_eq!(p.bbr.rate, RATE * 63 / 100);
    assert_eq!(p.bbr.max_rate.get(), RATE);
    while p.bbr.state != State::Refill {
        p.round(RATE * 63 / 100, BDP / 2);
    }
    assert_eq!(p.bbr.bounds.rate_short, INFINITE);
    assert_eq!(p.bbr.rate, RATE);
}

#[test]
fn headroom_is_left_while_cruising() {
    let mut p = Path::cruising();
    p.bbr.bounds.inflight_long = BDP;
    p.round(RATE, BDP * 8 / 10);
    assert_eq!(p.bbr.window.cwnd, BDP * 85 / 100);
}

#[test]
fn a_lower_rate_is_accepted_after_two_cycles() {
    let mut p = Path::probing();
    for _ in 0..2 {
        let mut cycle = 0;
        while p.bbr.state == State::Up || cycle == 0 {
            cycle += u32::from(p.bbr.state != State::Up);
            p.round(RATE / 2, BDP / 2);
        }
        while p.bbr.state != State::Up {
            p.round(RATE / 2, BDP / 3);
        }
    }
    assert_eq!(p.bbr.max_rate.get(), RATE / 2);
}

#[test]
fn probe_rtt_comes_after_five_seconds_and_lasts_200_ms_and_a_round() {
    let mut p = Path::cruising();
    let began = p.now;
    while p.bbr.state != State::ProbeRtt {
        p.now = p.now + RTT;
        let slow = Some(RTT + Duration::from_millis(5));
        p.take(Sample { rtt: slow, ..p.sample(RATE, BDP) });
        assert!(p.now.since(began) < Duration::from_secs(6));
    }
    assert!(p.now.since(began) > Duration::from_secs(4));
    assert!(p.bbr.is_probing_rtt());
    assert_eq!(p.bbr.window.cwnd, BDP / 2);
    let before = p.bbr.prior_cwnd;
    p.round(RATE / 2, BDP / 2);
    let drained = p.now;
    while p.bbr.state == State::ProbeRtt {
        p.round(RATE / 2, BDP / 2);
    }
    let lasted = p.now.since(drained).as_millis();
    assert!((200..=240).contains(&lasted), "{lasted} ms");
    assert_eq!(p.bbr.state, State::Cruise);
    assert!(p.bbr.window.cwnd > BDP, "{} of {before}", p.bbr.window.cwnd);
    // The next one is five seconds away.
    (0..200).for_each(|_| p.round(RATE, BDP * 8 / 10));
    assert_ne!(p.bbr.state, State::ProbeRtt);
}

#[test]
fn an_idle_period_stands_for_probe_rtt_and_leaves_rate_and_window() {
    let mut p = Path::cruising();
    let (cwnd, rate) = (p.bbr.window.cwnd, p.bbr.pacing_rate);
    p.now = p.now + Duration::from_secs(6);
    p.bbr.on_idle();
    p.bbr.on_restart(p.now);
    p.round(RATE, BDP / 2);
    assert!(p.bbr.state.is_probe_bw(), "{:?}", p.bbr.state);
    assert!(p.bbr.window.cwnd >= cwnd);
    assert_eq!(p.bbr.pacing_rate, rate);
}

#[test]
fn the_least_round_trip_time_expires_after_ten_seconds() {
    let mut m = MinRtt::new();
    let at = |s: u64| Instant::from_millis(s * 1000);
    m.update(Some(RTT), at(100));
    (1..=9).for_each(|s| m.update(Some(RTT * 2), at(100 + s)));
    assert_eq!(m.ns, nanos(RTT));
    (10..=12).for_each(|s| m.update(Some(RTT * 2), at(100 + s)));
    assert_eq!(m.ns, nanos(RTT * 2));
    m.update(Some(RTT / 2), at(113));
    assert_eq!(m.ns, nanos(RTT / 2));
}

#[test]
fn acks_in_bunches_enlarge_the_window_by_what_a_bunch_holds() {
    let mut p = Path::cruising();
    let before = p.bbr.window.cwnd;
    // Silence for a round, then the ACKs of two rounds and a half at once, without pacing.
    for _ in 0..20 {
        p.round(RATE, BDP * 8 / 10);
        let bunch = Sample { newly_acked: BDP / 2, ..p.sample(RATE, BDP * 8 / 10) };
        p.take(bunch);
    }
    assert!(p.bbr.aggregation.get() >= BDP / 2);
    assert!(p.bbr.window.cwnd > before + BDP / 4);
}

#[test]
fn a_tiny_bdp_leaves_four_segments_or_three_quanta_of_window() {
    let mut p = Path::new();
    for _ in 0..30 {
        p.round(5_000, MSS);
    }
    assert_ne!(p.bbr.state, State::Startup);
    assert!(p.bbr.window.cwnd >= 6 * MSS && p.bbr.window.cwnd <= 8 * MSS);
    p.bbr.bounds.inflight_short = 1;
    p.round(5_000, MSS);
    assert_eq!(p.bbr.window.cwnd, 4 * MSS);
}

#[test]
fn a_time_out_leaves_one_segment_and_its_end_restores_the_window() {
    let mut p = Path::cruising();
    let cwnd = p.bbr.window.cwnd;
    p.bbr.on_timeout();
    assert_eq!(p.bbr.window.cwnd, MSS);
    p.take(Sample { newly_acked: MSS, ..p.sample(RATE, MSS) });
    assert!(p.bbr.window.cwnd <= 4 * MSS);
    p.bbr.on_recovered();
    assert_eq!(p.bbr.window.cwnd, cwnd);
    // It does so once.
    p.bbr.window.cwnd = MSS;
    p.bbr.on_recovered();
    assert_eq!(p.bbr.window.cwnd, MSS);
}

#[derive(Clone, Debug)]
enum Event {
    Sample(u64, u64, u64, u64, bool),
    Lost(u64, u64, u64),
    Loss,
    Recovered,
    Timeout(bool),
    Undo,
    Restart,
    Wait(u64),
}

fn event() -> impl Strategy<Value = Event> {
    let number = || prop_oneof![Just(0), 1u64..100_000, Just(u64::MAX), any::<u64>()];
    prop_oneof![
        4 => (number(), number(), number(), number(), any::<bool>())
            .prop_map(|(a, b, c, d, e)| Event::Sample(a, b, c, d, e)),
        2 => (number(), number(), number()).prop_map(|(a, b, c)| Event::Lost(a, b, c)),
        1 => Just(Event::Loss),
        1 => Just(Event::Recovered),
        1 => any::<bool>().prop_map(Event::Timeout),
        1 => Just(Event::Undo),
        1 => Just(Event::Restart),
        1 => number().prop_map(Event::Wait),
    ]
}

proptest! {
    #[test]
    fn the_controller_withstands_every_order_of_events_and_every_number(events in prop::collection::vec(event(), 1..200)) {
        let mut p = Path::new();
        for e in events {
            match e {
                Event::Sample(rate, bytes, in_flight, lost, limited) => p.take(Sample {
                    newly_acked: bytes,
                    total_delivered: p.delivered.saturating_add(bytes),
                    delivered: bytes,
                    lost,
                    tx_in_flight: lost ^ in_flight,
                    is_app_limited: limited,
                    has_sack: !limited,
                    rtt: Some(Duration::from_nanos(rate ^ bytes)),
                    ..p.sample(rate, in_flight)
                }),
                Event::Lost(bytes, before, in_flight) => p.bbr.on_lost(&Lost {
                    now: p.now,
                    start: before,
                    bytes,
                    total_delivered: p.delivered,
                    lost: before,
                    tx_in_flight: in_flight,
                    is_app_limited: before == 0,
                }),
                Event::Loss => p.bbr.on_loss(),
                Event::Recovered => p.bbr.on_recovered(),
                Event::Timeout(again) => if again { p.bbr.on_repeated_timeout() } else { p.bbr.on_timeout() },
                Event::Undo => p.bbr.on_undo(),
                Event::Restart => p.bbr.on_restart(p.now),
                Event::Wait(ns) => p.now = p.now + Duration::from_nanos(ns % (1 << 40)),
            }
            prop_assert!(p.bbr.window.cwnd >= MSS && p.bbr.window.cwnd <= MAX_CWND);
            prop_assert!(p.bbr.pacing_rate(RTT).is_some_and(|r| r > 0));
        }
    }
}
