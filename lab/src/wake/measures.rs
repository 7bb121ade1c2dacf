//! Evaluation of both ends' accounts, the tables, and the figures.

use super::rig::Sample as Ends;
use super::{FLOOD_PPS, idle, transmit};
use crate::harness::report::{Chart, Column, Shape, label, number};
use crate::harness::{Ratio, Sample, Scenario, Term};

const P50: &str = "p50_us";
const P99: &str = "p99_us";
/// The 99th percentile of each stretch of 10 ms, the median of the stretches.
const STRETCH_P99: &str = "stretch_p99_us";
const PER_WAKEUP: &str = "frames_per_wakeup";

/// The title of the table that is drawn as curves.
pub const SWEEP: &str = "From one packet per second to the maximum, UDP, 64 bytes";

/// The values of one run.
pub fn sample(s: &Ends) -> Sample {
    let (near, far) = (&s.near, &s.far);
    let us = |quantile: usize| s.latency_ns().map_or(f64::NAN, |l| l[quantile] as f64 / 1e3);
    let seconds = near.elapsed.as_secs_f64();
    let per_packet_us = |seconds: f64| seconds * 1e6 / near.packets.max(1) as f64;
    let sent = far.sent.max(1) as f64;
    Sample::of(P50, us(0))
        .with(P99, us(1))
        .with(STRETCH_P99, near.stretch_p99_ns.map_or(f64::NAN, |ns| ns as f64 / 1e3))
        .with("p999_us", us(2))
        .with("packets_per_second", near.packets as f64 / seconds)
        .with("lost_pct", (100.0 * (sent - near.packets as f64) / sent).max(0.0))
        .with("wakeups_per_second", near.wakeups as f64 / seconds)
        .with("held_wakeups_pct", 100.0 * near.holds as f64 / near.wakeups as f64)
        // Every frame of a thread that never slept came at one.
        .with(PER_WAKEUP, near.frames as f64 / near.wakeups.max(1) as f64)
        .with("looking_pct", 100.0 * near.looked.as_secs_f64() / seconds)
        .with("near_thread_cpu_pct", 100.0 * near.thread.as_secs_f64() / seconds)
        .with("both_cpu_us_per_packet", per_packet_us((near.cpu + far.cpu).as_secs_f64()))
        .with("machine_us_per_packet", per_packet_us(near.machine.as_secs_f64()))
}

const COLUMNS: &[Column] = &[
    label("pps", "load\n/s"),
    label("load", "load"),
    label("connections", "connections"),
    label("device", "device"),
    label("mode", "waiting"),
    label("placement", "ends on"),
    number(P50, "p50\nµs", 1, "the median latency"),
    number(P99, "p99\nµs", 1, "the 99th percentile"),
    number(
        STRETCH_P99,
        "p99 in\n10ms µs",
        1,
        "the median over stretches of 10 ms of their 99th percentiles",
    ),
    number("p999_us", "p99.9\nµs", 1, "the 99.9th percentile"),
    number("packets_per_second", "taken\n/s", 0, "packets that the waiting end received"),
    number("lost_pct", "lost\n%", 1, "sent but not received"),
    number("wakeups_per_second", "wake-ups\n/s", 0, "sleeps of the waiting thread that ended"),
    number(
        "held_wakeups_pct",
        "of them\nholds %",
        0,
        "sleeps of fixed length for interrupt mitigation",
    ),
    number(PER_WAKEUP, "frames per\nwake-up", 1, "device frames"),
    number("looking_pct", "looking\n%", 0, "share of the time spent on polls without result"),
    number("near_thread_cpu_pct", "waiting\nthread %", 0, "its CPU, of the time"),
    number("both_cpu_us_per_packet", "both ends\nµs/packet", 2, "CPU of both processes"),
    number("machine_us_per_packet", "machine\nµs/packet", 1, "all CPUs, from /proc/stat"),
    number(transmit::NS, "ns per\nframe", 0, "CPU of the sending thread, without hardware"),
    number(transmit::REAPS, "taken back\n/s", 0, "reclaims of sent frames"),
    number(transmit::AT_ONCE, "frames\nat once", 1, "frames per reclaim"),
    number(idle::CPU, "CPU\n%", 3, "of one CPU, both stacks"),
    number("wakeups", "wake-ups", 0, "of either stack"),
    number("timers", "timers", 0, "that fired"),
    number("runs", "runs", 0, "number of measurements"),
];

/// The tables.
pub const SHAPE: Shape = Shape {
    name: "wake",
    title: "Cost and latency of waiting",
    lead: "Latency, wake-ups and CPU of threads that wait for a device: moderated, sleeping immediately, polling, \
        and of the kernel.",
    columns: COLUMNS,
    across: None,
    chart: Some(Chart {
        unit: "p99 of the latency, µs",
        parts: &[P99],
        group: &["device", "mode", "placement"],
        x: Some("pps"),
    }),
    legend: "\
latency   one question and its answer; of a flow, from the sender's clock to the receiver's.
          Of a flow also the 99th percentile of each stretch of 10 ms, the median of the stretches:
          a host that takes a CPU away now and then is in few of them.
wake-up   the end of a sleep of the thread that waits; of the kernel's: a voluntary context
          switch. Holds are sleeps for a fixed time in which frames gather.
looking   share of the time spent on polling the device without result.
CPU       of the thread that waits; of both processes; of the machine (/proc/stat, in ticks of
          10 ms: coarse in short runs). Polling and looking are in all of them.
lost      sent but not received: a queue was full.",
};

/// What moderation may add to the 99th percentile of a stretch's latencies for its frames per wake-up to count.
const MOST_ADDED_US: f64 = 100.0;

/// Every figure of these scenarios.
pub fn ratios(scenarios: &[Scenario<'_>]) -> Vec<Ratio> {
    let mut all = of_moderation();
    all.extend(beside_the_kernel());
    all.push(transmit::ratio());
    all.push(idle::ratio());
    // The worse of both placements is also known where there is one.
    all.retain(|r| r.is_measured(scenarios) || r.name == EITHER);
    all
}

const EITHER: &str = "wake.rr.moderated_vs_unmoderated";

/// The benefit of moderation, and its latency.
fn of_moderation() -> Vec<Ratio> {
    let flood = |mode: &str, key| -> Term { (format!("bulk.tap.{mode}.two_cpus"), key) };
    let added = |name, sentence, key| {
        let terms = vec![flood("moderated", key), flood("unmoderated", key)];
        Ratio::new(name, sentence, terms, |t| t[0] - t[1])
    };
    let at = |mode, placement| -> Term { (rr("tap", mode, placement), P50) };
    let both = ["same_cpu", "two_cpus"].map(|p| [at("moderated", p), at("unmoderated", p)]);
    let frames = vec![
        flood("moderated", PER_WAKEUP),
        flood("moderated", STRETCH_P99),
        flood("unmoderated", STRETCH_P99),
    ];
    let sentence = format!(
        "device frames of MTU size per wake-up over TAP, {FLOOD_PPS} per second; 0 where moderation adds more \
         than 100 µs to the 99th percentile of stretches of 10 ms"
    );
    let frames =
        Ratio::new("wake.bulk.frames_per_wakeup", sentence, frames, |t| match t[1] - t[2] {
            added if added.is_nan() => f64::NAN,
            added if added <= MOST_ADDED_US => t[0],
            _ => 0.0,
        });
    vec![
        frames.goals(16.0, 64.0).more_is_better().published(3.0),
        added(
            "wake.bulk.added_p99_us",
            "what moderation adds to the 99th percentile of stretches of 10 ms of that flood, µs",
            STRETCH_P99,
        )
        .goals(100.0, 50.0),
        added(
            "wake.bulk.added_p99_of_all_us",
            "and to the 99th percentile of the whole flood, including times when the host took a CPU away, µs",
            P99,
        ),
        Ratio::new(
            EITHER,
            "request-reply median over TAP, the worse of both placements",
            both.concat(),
            |t| (t[0] / t[1]).max(t[2] / t[3]),
        )
        .goals(1.05, 1.0),
    ]
}

fn rr(device: &str, mode: &str, at: &str) -> String {
    format!("rr.{device}.{mode}.{at}")
}

/// Request and reply beside the kernel's own.
fn beside_the_kernel() -> Vec<Ratio> {
    let over = |name, sentence: &str, ways: [String; 2]| {
        Ratio::over(name, format!("UDP request-reply median, {sentence}"), P50, ways)
    };
    let ours = |device, at| rr(device, "moderated", at);
    let kernel = |device, at| rr(device, "kernel", at);
    let tap = "fulmar over tap ÷ kernel over veth";
    vec![
        over(
            "wake.rr.tap.two_cpus.vs_kernel",
            tap,
            [ours("tap", "two_cpus"), kernel("veth", "two_cpus")],
        )
        .goals(0.95, 0.8),
        over(
            "wake.rr.tap.same_cpu.vs_kernel",
            tap,
            [ours("tap", "same_cpu"), kernel("veth", "same_cpu")],
        )
        .goals(0.95, 0.85),
        over(
            "wake.rr.shm.two_cpus.vs_kernel",
            "fulmar over shm ÷ kernel over loopback",
            [ours("shm", "two_cpus"), kernel("loopback", "two_cpus")],
        )
        .goals(0.3, 0.1),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(name: &str, terms: &[f64]) -> f64 {
        let ratio = of_moderation().into_iter().find(|r| r.name == name).expect(name);
        (ratio.of)(terms)
    }

    #[test]
    fn frames_per_wakeup_count_only_where_little_is_added_to_the_latency() {
        let name = "wake.bulk.frames_per_wakeup";
        assert_eq!(of(name, &[40.0, 150.0, 60.0]), 40.0);
        assert_eq!(of(name, &[40.0, 161.0, 60.0]), 0.0);
        assert!(of(name, &[40.0, 150.0, f64::NAN]).is_nan());
    }

    #[test]
    fn the_worse_placement_is_known_where_there_is_only_one() {
        assert_eq!(of(EITHER, &[2.0, 1.0, 3.0, 1.0]), 3.0);
        assert_eq!(of(EITHER, &[2.0, 1.0, f64::NAN, f64::NAN]), 2.0);
    }
}
