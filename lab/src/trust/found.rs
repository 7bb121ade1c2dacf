//! What `bench trust` found, as text and as JSON.

use std::time::Duration;

use serde_json::{Value, json};

use super::{Played, Way};
use crate::bench::{Figure, Outcome, Ratio, Stop};
use crate::report::{self, Machine};
use crate::stats::Estimate;

/// What flooding costs by itself.
const BASE: &str = "kernel.unclaimed";

/// What was found.
pub struct Found {
    /// Every way.
    pub ways: Vec<Way>,
    outcome: Outcome,
}

impl Way {
    fn estimate(&self) -> Option<Estimate> {
        Estimate::of(&self.ns)
    }

    fn per_frame(&self, all: f64) -> f64 {
        all / self.frames.max(1) as f64
    }

    /// Over a TAP the flooder is not charged, so there is nothing to take off.
    fn is_charged_with_flooding(&self) -> bool {
        !self.name.starts_with("tap.")
    }
}

/// CPU nanoseconds per frame, one value per round, without what flooding costs by itself.
fn net(ways: &[Way], name: &str) -> Vec<f64> {
    let of = |name: &str| ways.iter().find(|w| w.name == name);
    match (of(name), of(BASE)) {
        (Some(way), _) if !way.is_charged_with_flooding() => way.ns.clone(),
        (Some(way), Some(base)) => way.ns.iter().zip(&base.ns).map(|(a, b)| a - b).collect(),
        _ => Vec::new(),
    }
}

/// A ratio to the kernel: what it is asked for, of the way of fulmar's above the line and the kernel's below
/// it, both without what flooding costs by itself.
struct Wanted {
    name: &'static str,
    sentence: &'static str,
    fulmar: &'static str,
    kernel: &'static str,
    /// What unclaimed frames cost fulmar is taken off as well, so that its device is not charged.
    above_device: Option<&'static str>,
    reach_and_aim: Option<(f64, f64)>,
}

const fn wanted(
    name: &'static str,
    sentence: &'static str,
    fulmar: &'static str,
    kernel: &'static str,
) -> Wanted {
    Wanted { name, sentence, fulmar, kernel, above_device: None, reach_and_aim: None }
}

const SYN: &str = "kernel.syn";
const STRAY: &str = "kernel.stray";
const TAP: Option<&str> = Some("tap.unclaimed");
const PACKET: Option<&str> = Some("packet.unclaimed");

const RATIOS: [Wanted; 8] = [
    Wanted {
        reach_and_aim: Some((0.5, 0.25)),
        ..wanted(
            "trust.syn_flood.us_per_syn",
            "CPU per flooded SYN with cookies: fulmar on TAP ÷ kernel on veth",
            "tap.syn",
            SYN,
        )
    },
    Wanted {
        above_device: TAP,
        ..wanted(
            "trust.syn_flood.us_per_syn.above_device",
            "the same, less what unclaimed frames cost fulmar",
            "tap.syn",
            SYN,
        )
    },
    wanted("trust.syn_flood.us_per_syn.packet", "fulmar on veth (packet)", "packet.syn", SYN),
    Wanted {
        above_device: PACKET,
        ..wanted(
            "trust.syn_flood.us_per_syn.packet.above_device",
            "fulmar on veth (packet), less what unclaimed frames cost fulmar",
            "packet.syn",
            SYN,
        )
    },
    Wanted {
        reach_and_aim: Some((2.0, 1.0)),
        ..wanted(
            "trust.drop.vs_kernel",
            "CPU per dropped stray segment: fulmar on TAP ÷ kernel on veth",
            "tap.stray",
            STRAY,
        )
    },
    Wanted {
        above_device: TAP,
        ..wanted(
            "trust.drop.vs_kernel.above_device",
            "the same, less what unclaimed frames cost fulmar",
            "tap.stray",
            STRAY,
        )
    },
    wanted("trust.drop.vs_kernel.packet", "fulmar on veth (packet)", "packet.stray", STRAY),
    Wanted {
        above_device: PACKET,
        ..wanted(
            "trust.drop.vs_kernel.packet.above_device",
            "fulmar on veth (packet), less what unclaimed frames cost fulmar",
            "packet.stray",
            STRAY,
        )
    },
];

/// The ratio round by round, of the rounds that have all of its ways.
fn ratio(ways: &[Way], wanted: &Wanted) -> Option<Estimate> {
    let (fulmar, kernel) = (net(ways, wanted.fulmar), net(ways, wanted.kernel));
    let device = match wanted.above_device {
        Some(name) => net(ways, name),
        None => vec![0.0; fulmar.len()],
    };
    let rounds = fulmar.iter().zip(&kernel).zip(&device);
    Estimate::of(&rounds.map(|((f, k), d)| (f - d) / k).collect::<Vec<_>>())
}

fn figures(ways: &[Way], played: &Played) -> Vec<Figure> {
    let served = [
        (
            "trust.slow_peers.served",
            "% of new connections served whole within 1 s of virtual time beside 4,000 peers with a \
             zero window",
            &played.beside_slow_peers,
            (100.0, 100.0),
        ),
        (
            "trust.syn_flood.connects",
            "% of honest connects at the first or second SYN during 100,000 spoofed SYNs per virtual \
             second",
            &played.during_flood,
            (99.0, 100.0),
        ),
    ];
    let served = served.into_iter().map(|(name, sentence, values, goal)| {
        figure(name, sentence, Estimate::of(values), Some(goal), true)
    });
    let ratios = RATIOS.iter().map(|wanted| {
        let Wanted { name, sentence, reach_and_aim, .. } = wanted;
        figure(name, sentence, ratio(ways, wanted), *reach_and_aim, false)
    });
    served.chain(ratios).filter(|f| f.estimate.is_some()).collect()
}

fn figure(
    name: &str,
    sentence: &str,
    estimate: Option<Estimate>,
    reach_and_aim: Option<(f64, f64)>,
    more_is_better: bool,
) -> Figure {
    let ratio = Ratio {
        name: name.into(),
        sentence: sentence.into(),
        way: String::new(),
        over: None,
        measure: |_| f64::NAN,
        reach_and_aim,
        more_is_better,
        published: None,
    };
    Figure { ratio, estimate }
}

impl Found {
    pub(super) fn new(ways: Vec<Way>, played: &Played, stop: Stop, elapsed: Duration) -> Found {
        let figures = figures(&ways, played);
        let outcome = Outcome { rows: Vec::new(), figures, stop, elapsed };
        Found { ways, outcome }
    }

    /// The figures asked for.
    pub fn figures(&self) -> &[Figure] {
        &self.outcome.figures
    }

    /// The whole report as text.
    pub fn text(&self, machine: &Machine) -> String {
        let mut parts = vec![machine.sentence()];
        if !self.ways.is_empty() {
            parts.push(self.table());
        }
        parts.push(report::figures_table(&self.outcome.figures));
        let Outcome { stop, elapsed, .. } = &self.outcome;
        parts.push(format!("{LEGEND}\nTook {:.0} s: {}.", elapsed.as_secs_f64(), stop.sentence()));
        parts.join("\n\n")
    }

    fn table(&self) -> String {
        let head = [
            "way",
            "CPU\nns/frame",
            "95 %",
            "net of\nflooding",
            "machine\nns/frame",
            "answers\nper frame",
            "runs",
        ];
        let mut table = report::new_table(head, 1);
        for way in &self.ways {
            let Some(e) = way.estimate() else { continue };
            let net = Estimate::of(&net(&self.ways, way.name));
            table.add_row([
                way.title.to_owned(),
                format!("{:.0}", e.median),
                e.interval(0),
                net.map_or_else(|| "–".into(), |e| format!("{:.0}", e.median)),
                format!("{:.0}", way.per_frame(way.machine.as_nanos() as f64)),
                format!("{:.2}", way.per_frame(way.answers as f64)),
                e.runs.to_string(),
            ]);
        }
        table.to_string()
    }

    /// The whole report as JSON. `command` is the command line as given.
    pub fn json(&self, machine: &Machine, command: &[String]) -> Value {
        let mut json = report::json(machine, command, &self.outcome);
        json["lead"] =
            "What a flooded frame costs, in CPU nanoseconds, beside the kernel; and who is \
                        served meanwhile."
                .into();
        json["rows"] = self.ways.iter().map(|way| self.row(way)).collect();
        let one_line = |p: &str| p.split_whitespace().collect::<Vec<_>>().join(" ");
        json["notes"] = LEGEND.split("\n\n").map(one_line).collect::<Vec<_>>().into();
        json
    }

    fn row(&self, way: &Way) -> Value {
        let (e, net) = (way.estimate(), Estimate::of(&net(&self.ways, way.name)));
        json!({
            "name": way.name,
            "title": way.title,
            "cpu_ns_per_frame": e.map(|e| e.median),
            "cpu_ns_per_frame_low": e.map(|e| e.low),
            "cpu_ns_per_frame_high": e.map(|e| e.high),
            "net_cpu_ns_per_frame": net.map(|e| e.median),
            "machine_cpu_ns_per_frame": way.per_frame(way.machine.as_nanos() as f64),
            "answers_per_frame": way.per_frame(way.answers as f64),
            "runs": e.map(|e| e.runs),
        })
    }
}

const LEGEND: &str = "\
CPU ns/frame is CPU time of one pinned thread, which sends 256 frames from a packet socket and then
has the victim do what it does about them. What the kernel does about a frame on veth runs inside
the sender's call, in a softirq, and is in that time: the whole way of the frame up to the kernel's
TCP or to fulmar's packet socket, and the way of the answer back to the flooder's interface, where
it is dropped. (A kernel with CONFIG_IRQ_TIME_ACCOUNTING leaves softirqs out of a thread's time.)
machine is the busy time of all CPUs meanwhile, from /proc/stat, which counts in ticks.

net of flooding: the same less what 256 unclaimed frames cost in the same round. They are SYNs under
an EtherType that nobody takes, on the kernel's veth pair, so that sending and veth are taken off and
nothing of the victim's. What fulmar's packet socket and polling it cost stays in. Over a TAP the
kernel only queues what is sent; sending is not timed there, and reading it is. Figures with
above_device take off what fulmar spends on unclaimed frames too, which is its device and little else.

SYNs come from 198.18.0.0/15, none twice from one address and port in a round. Both listeners have a
SYN queue of 128, which is full, and tcp_syncookies is 1: nine of ten SYNs or more are answered
with a cookie (checked in every run). Answers go by a default route to a router whose station is
nobody's. Stray segments are resets to a closed port; none is answered, and what comes back meanwhile
are SYN,ACKs that embryos repeat, for one frame in ten at most (checked).

Percentages are of 250 connections, on a virtual clock, three plays with different secrets.";
