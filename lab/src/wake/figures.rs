//! The figures that issue from the cells: ratios of what ran in the same round.

use super::idle::Idle;
use super::place::Sample;
use super::transmit::{self, Completions};
use super::{Cell, FLOOD_PPS};
use crate::bench::{Figure, Ratio, Sample as BenchSample};
use crate::stats::Estimate;

/// A value of one cell in one round.
fn value(
    cells: &[Cell],
    round: usize,
    name: &str,
    of: &dyn Fn(&Sample) -> Option<f64>,
) -> Option<f64> {
    cells.iter().find(|c| c.name() == name)?.sample(round).and_then(of)
}

fn median_ns(s: &Sample) -> Option<f64> {
    s.latency_ns().map(|l| l[0] as f64)
}

fn p99_ns(s: &Sample) -> Option<f64> {
    s.latency_ns().map(|l| l[1] as f64)
}

/// Frames per wake-up; every frame of a thread that never slept came at one.
pub fn frames_per_wakeup(s: &Sample) -> Option<f64> {
    Some(s.near.frames as f64 / s.near.wakeups.max(1) as f64)
}

/// CPU of both ends per packet, in µs.
pub fn both_cpu_us(s: &Sample) -> f64 {
    (s.near.cpu + s.far.cpu).as_secs_f64() * 1e6 / s.near.packets.max(1) as f64
}

/// One name, its sentence, its goals, and a value per round.
pub struct Asked<'a> {
    pub name: &'static str,
    pub sentence: String,
    pub goals: Option<(f64, f64)>,
    pub more_is_better: bool,
    pub published: Option<f64>,
    pub of: Box<dyn Fn(usize) -> Option<f64> + 'a>,
}

impl Asked<'_> {
    fn figure(&self, rounds: usize) -> Option<Figure> {
        let values: Vec<f64> = (0..rounds).filter_map(&self.of).collect();
        let estimate = Some(Estimate::of(&values)?);
        let ratio = Ratio {
            name: self.name.to_owned(),
            sentence: self.sentence.clone(),
            way: String::new(),
            over: None,
            measure: |_: &BenchSample| f64::NAN,
            reach_and_aim: self.goals,
            more_is_better: self.more_is_better,
            published: self.published,
        };
        Some(Figure { ratio, estimate })
    }
}

fn stretch_p99_ns(s: &Sample) -> Option<f64> {
    s.near.stretch_p99_ns.map(|ns| ns as f64)
}

/// What holding adds to 99 % of the latencies of the flood, in µs; of all of them, or of those of a
/// stretch.
fn added_us(cells: &[Cell], round: usize, p99: &dyn Fn(&Sample) -> Option<f64>) -> Option<f64> {
    let of = |mode: &str| value(cells, round, &format!("bulk.tap.{mode}.two_cpus"), p99);
    Some((of("moderated")? - of("unmoderated")?) / 1000.0)
}

/// Every figure that has been measured.
pub fn figures(
    cells: &[Cell],
    completions: &[Completions],
    idle: Option<&Idle>,
    rounds: usize,
) -> Vec<Figure> {
    let mut asked = waiting(cells);
    asked.extend(beside_the_kernel(cells));
    asked.extend(transmit::asked(completions));
    if let Some(idle) = idle {
        asked.push(Asked {
            name: "wake.idle.cpu_pct",
            sentence: format!("CPU of two idle stacks with {} connections, %", idle.connections),
            goals: Some((0.1, 0.0)),
            more_is_better: false,
            published: None,
            of: Box::new(|round| (round == 0).then_some(idle.cpu_pct)),
        });
    }
    asked.iter().filter_map(|a| a.figure(rounds)).collect()
}

/// What moderation is worth, and what it adds.
fn waiting(cells: &[Cell]) -> Vec<Asked<'_>> {
    let added = Asked {
        name: "wake.bulk.added_p99_us",
        sentence: "what moderation adds to 99 % of the latencies in 10 ms of that flood, µs".into(),
        goals: Some((100.0, 50.0)),
        more_is_better: false,
        published: None,
        of: Box::new(|round| added_us(cells, round, &stretch_p99_ns)),
    };
    let added_of_all = Asked {
        name: "wake.bulk.added_p99_of_all_us",
        sentence:
            "and to 99 % of all of them, those in which the host took a CPU away included, µs"
                .into(),
        goals: None,
        more_is_better: false,
        published: None,
        of: Box::new(|round| added_us(cells, round, &p99_ns)),
    };
    let rr = Asked {
        name: "wake.rr.moderated_vs_unmoderated",
        sentence: "request-reply median over TAP, the worse of both placements".into(),
        goals: Some((1.05, 1.0)),
        more_is_better: false,
        published: None,
        of: Box::new(|round| {
            let ratio = |at: &str| {
                let of = |mode| value(cells, round, &rr("tap", mode, at), &median_ns);
                Some(of("moderated")? / of("unmoderated")?)
            };
            ["same_cpu", "two_cpus"].into_iter().filter_map(ratio).reduce(f64::max)
        }),
    };
    vec![bulk(cells), added, added_of_all, rr]
}

fn rr(device: &str, mode: &str, at: &str) -> String {
    format!("rr.{device}.{mode}.{at}")
}

/// Request and reply beside the kernel's own, and beside a program without a stack.
fn beside_the_kernel(cells: &[Cell]) -> Vec<Asked<'_>> {
    let over = |name, sentence: &str, above: String, below: String, goals| Asked {
        name,
        sentence: format!("UDP request-reply median, {sentence}"),
        goals,
        more_is_better: false,
        published: None,
        of: Box::new(move |round| {
            let of = |name: &str| value(cells, round, name, &median_ns);
            Some(of(&above)? / of(&below)?)
        }),
    };
    let ours = |device, at| rr(device, "moderated", at);
    let kernel = |device, at| rr(device, "kernel", at);
    let bare = |at| rr("bare_tap", "unmoderated", at);
    let (near, far) = ("same_cpu", "two_cpus");
    let (tap, shm) =
        ("fulmar over tap ÷ kernel over veth", "fulmar over shm ÷ kernel over loopback");
    let floor = "a program without a stack over tap ÷ kernel over veth: what the device costs";
    let above = "fulmar over tap ÷ a program without a stack";
    let goals = |reach, aim| Some((reach, aim));
    vec![
        over(
            "wake.rr.tap.two_cpus.vs_kernel",
            tap,
            ours("tap", far),
            kernel("veth", far),
            goals(0.95, 0.8),
        ),
        over(
            "wake.rr.tap.same_cpu.vs_kernel",
            tap,
            ours("tap", near),
            kernel("veth", near),
            goals(0.95, 0.85),
        ),
        over("wake.rr.bare_tap.same_cpu.vs_kernel", floor, bare(near), kernel("veth", near), None),
        over("wake.rr.tap.same_cpu.vs_bare", above, ours("tap", near), bare(near), None),
        over(
            "wake.rr.shm.two_cpus.vs_kernel",
            shm,
            ours("shm", far),
            kernel("loopback", far),
            goals(0.3, 0.1),
        ),
    ]
}

fn bulk(cells: &[Cell]) -> Asked<'_> {
    Asked {
        name: "wake.bulk.frames_per_wakeup",
        sentence: format!(
            "device frames of MTU size per wake-up over TAP, {FLOOD_PPS} per second; 0 where \
             moderation adds more than 100 µs to 99 % of the latencies in 10 ms"
        ),
        goals: Some((16.0, 64.0)),
        more_is_better: true,
        published: Some(3.0),
        of: Box::new(|round| {
            let name = "bulk.tap.moderated.two_cpus";
            let frames = value(cells, round, name, &frames_per_wakeup)?;
            Some(if added_us(cells, round, &stretch_p99_ns)? <= 100.0 { frames } else { 0.0 })
        }),
    }
}
