//! What `bench udp` found, as text, as JSON and as what the page is made of.

use std::time::Duration;

use serde_json::{Value, json};

use super::{Device, Lane, Method, Outcomes, Way};
use crate::bench::{Figure, Outcome, Ratio, Stop};
use crate::report::{self, Machine};
use crate::stats::Estimate;

/// The payload that the ratios are about: the shortest Ethernet frame.
const SMALL: usize = 18;

/// What was found.
pub struct Found {
    /// Every way.
    pub lanes: Vec<Lane>,
    /// Ways that failed, and why.
    errors: Vec<(String, String)>,
    outcome: Outcome,
}

impl Found {
    /// `found` has per thread, round and way what it cost.
    pub(super) fn new(all: &[Way], found: &[Outcomes], (stop, elapsed): (Stop, Duration)) -> Found {
        let (mut lanes, mut errors) = (Vec::new(), Vec::new());
        for (column, way) in all.iter().enumerate() {
            match lane(*way, column, found) {
                Ok(lane) => lanes.push(lane),
                Err(e) => errors.push((way.name(), e)),
            }
        }
        let figures = figures(&lanes);
        let outcome = Outcome { rows: Vec::new(), figures, stop, elapsed };
        Found { lanes, errors, outcome }
    }

    /// The figures asked for.
    pub fn figures(&self) -> &[Figure] {
        &self.outcome.figures
    }

    /// The whole report as text.
    pub fn text(&self, machine: &Machine) -> String {
        let mut parts = vec![machine.sentence()];
        let mut sizes: Vec<usize> = self.lanes.iter().map(|l| l.way.bytes).collect();
        sizes.sort_unstable();
        sizes.dedup();
        parts.extend(sizes.into_iter().map(|bytes| self.table(bytes)));
        parts.extend(self.errors.iter().map(|(name, e)| format!("not measured: {name}: {e}")));
        parts.push(report::figures_table(&self.outcome.figures));
        let Outcome { stop, elapsed, .. } = &self.outcome;
        parts.push(format!("{LEGEND}\nTook {:.0} s: {}.", elapsed.as_secs_f64(), stop.sentence()));
        parts.join("\n\n")
    }

    fn table(&self, bytes: usize) -> String {
        let head = ["device", "call", "threads", "ns per\ndatagram", "95 %", "packets/s", "runs"];
        let mut table = report::new_table(head, 2);
        for lane in self.lanes.iter().filter(|l| l.way.bytes == bytes) {
            let (Some(ns), Some(pps)) = (lane.ns(), lane.pps()) else { continue };
            table.add_row([
                lane.way.device.name().to_owned(),
                lane.way.method.title(lane.way.device).to_owned(),
                lane.way.threads.to_string(),
                number(ns.median),
                ns.interval(if ns.median < 100.0 { 1 } else { 0 }),
                thousands(pps.median),
                ns.runs.to_string(),
            ]);
        }
        format!("Datagrams of {bytes} bytes\n\n{table}")
    }

    /// The whole report as JSON. `command` is the command line as given.
    pub fn json(&self, machine: &Machine, command: &[String]) -> Value {
        let mut json = report::json(machine, command, &self.outcome);
        json["lead"] =
            "What a datagram costs the thread that sends or takes it, in CPU nanoseconds, by the \
                        call and by the number of threads."
                .into();
        json["rows"] = self.lanes.iter().map(row).collect();
        json["breakdowns"] = self.charts().into();
        let failed = |(name, e): &(String, String)| json!({ "name": name, "error": e });
        json["failed"] = self.errors.iter().map(failed).collect();
        json["notes"] = LEGEND.split("\n\n").map(one_line).collect::<Vec<_>>().into();
        json
    }

    /// A chart per payload, with a group per device and number of threads and a bar per call.
    fn charts(&self) -> Vec<Value> {
        let mut sizes: Vec<usize> = self.lanes.iter().map(|l| l.way.bytes).collect();
        sizes.sort_unstable();
        sizes.dedup();
        let chart = |bytes: usize| {
            let bars = self.lanes.iter().filter(|l| l.way.bytes == bytes).filter_map(|lane| {
                let Way { device, method, threads, .. } = lane.way;
                let plural = if threads == 1 { "" } else { "s" };
                Some(json!({
                    "group": format!("{}, {threads} thread{plural}", device.name()),
                    "label": method.title(device),
                    "parts": [{ "name": "ns per datagram", "value": lane.ns()?.median }],
                }))
            });
            json!({
                "title": format!("Datagrams of {bytes} bytes"),
                "caption": "Shorter is better. Over TAP and veth the kernel's receiving half is in it.",
                "unit": "ns of CPU per datagram",
                "bars": bars.collect::<Vec<_>>(),
            })
        };
        sizes.into_iter().map(chart).collect()
    }
}

/// A way over all threads: of those that ran, the mean of what a datagram cost, and the sum of rates.
fn lane(way: Way, column: usize, found: &[Outcomes]) -> Result<Lane, String> {
    let rounds = found.iter().map(Vec::len).min().unwrap_or(0);
    let mut lane = Lane { way, ns: Vec::new(), pps: Vec::new(), lost: 0 };
    for round in 0..rounds {
        let (mut ns, mut pps, mut ran) = (0.0, 0.0, 0);
        for thread in found {
            let Some(cost) = thread[round][column].clone()? else { continue };
            (ns, pps, ran) = (ns + cost.ns(), pps + cost.pps(), ran + 1);
            lane.lost += cost.lost;
        }
        if ran > 0 {
            lane.ns.push(ns / f64::from(ran));
            lane.pps.push(pps);
        }
    }
    Ok(lane)
}

fn values(lanes: &[Lane], device: Device, method: Method, threads: usize) -> &[f64] {
    let way = Way { device, method, bytes: SMALL, threads };
    lanes.iter().find(|l| l.way == way).map_or(&[], |l| &l.ns)
}

fn over(above: &[f64], below: &[f64]) -> Option<Estimate> {
    Estimate::of(&above.iter().zip(below).map(|(a, b)| a / b).collect::<Vec<_>>())
}

struct Wanted {
    name: &'static str,
    sentence: &'static str,
    estimate: Option<Estimate>,
    reach_and_aim: Option<(f64, f64)>,
    more_is_better: bool,
}

/// The figures asked for, and others that say why; those that were not measured are left out.
fn figures(lanes: &[Lane]) -> Vec<Figure> {
    let all = beside_the_kernel(lanes).into_iter().chain(on_the_simulated_device(lanes));
    all.filter(|w| w.estimate.is_some()).map(figure).collect()
}

/// A figure that nothing is asked of.
fn plain(name: &'static str, sentence: &'static str, estimate: Option<Estimate>) -> Wanted {
    Wanted { name, sentence, estimate, reach_and_aim: None, more_is_better: false }
}

/// Over TAP, the kernel on veth above.
fn beside_the_kernel(lanes: &[Lane]) -> [Wanted; 4] {
    let of_medians = |v: &[f64]| Estimate::of(v).map_or(f64::INFINITY, |e| e.median);
    let kernel = |method| values(lanes, Device::Veth, method, 1);
    let ours = |method| values(lanes, Device::Tap, method, 1);
    let (send, sendmmsg) = (kernel(Method::Connected), kernel(Method::Many));
    let best = if of_medians(send) < of_medians(sendmmsg) { send } else { sendmmsg };
    let asked = Wanted {
        reach_and_aim: Some((2.5, 3.5)),
        ..plain(
            "udp.tap.batch64.kernel_vs_fulmar",
            "ns per datagram of 18 bytes, the kernel's best of send and sendmmsg on veth ÷ send_many \
             of 64 over TAP",
            over(best, ours(Method::Many)),
        )
    };
    let others = [
        plain(
            "udp.tap.batch64_apart.kernel_vs_fulmar",
            "the same, of two sizes in turn: frames of two datagrams",
            over(best, ours(Method::Apart)),
        ),
        plain(
            "udp.tap.connected.kernel_vs_fulmar",
            "one by one: the kernel's send on veth ÷ send over TAP",
            over(send, ours(Method::Connected)),
        ),
        plain(
            "udp.tap.segmented.kernel_vs_fulmar",
            "cut below: the kernel's UDP_SEGMENT on veth ÷ send_segmented over TAP",
            over(kernel(Method::Segmented), ours(Method::Segmented)),
        ),
    ];
    let [apart, connected, segmented] = others;
    [asked, apart, connected, segmented].map(|w| Wanted { more_is_better: true, ..w })
}

/// fulmar alone.
fn on_the_simulated_device(lanes: &[Lane]) -> [Wanted; 6] {
    let sim = |method, threads| values(lanes, Device::Sim, method, threads);
    let (connected, many) = (Method::Connected, Method::Many);
    [
        Wanted {
            reach_and_aim: Some((1.1, 1.0)),
            ..plain(
                "udp.sim.two_threads_vs_one",
                "ns per datagram and thread, connected, simulated device: two threads on two shards \
                 ÷ one",
                over(sim(connected, 2), sim(connected, 1)),
            )
        },
        plain(
            "udp.sim.batch64.two_threads_vs_one",
            "the same, 64 per call",
            over(sim(many, 2), sim(many, 1)),
        ),
        plain(
            "udp.sim.batch64_vs_connected",
            "ns per datagram, simulated device: send_many of 64 ÷ send",
            over(sim(many, 1), sim(connected, 1)),
        ),
        plain(
            "udp.sim.unconnected_vs_connected",
            "ns per datagram, simulated device: send_to ÷ send",
            over(sim(Method::Unconnected, 1), sim(connected, 1)),
        ),
        plain(
            "udp.sim.recv_many_vs_recv",
            "ns per datagram taken, simulated device: recv_many of 64 ÷ recv",
            over(sim(Method::ReceivedMany, 1), sim(Method::Received, 1)),
        ),
        plain(
            "udp.sim.recv_many.two_threads_vs_one",
            "ns per datagram taken and thread, recv_many: two threads on two shards ÷ one",
            over(sim(Method::ReceivedMany, 2), sim(Method::ReceivedMany, 1)),
        ),
    ]
}

fn figure(w: Wanted) -> Figure {
    Figure {
        ratio: Ratio {
            name: w.name.into(),
            sentence: w.sentence.into(),
            way: String::new(),
            over: None,
            measure: |_| f64::NAN,
            reach_and_aim: w.reach_and_aim,
            more_is_better: w.more_is_better,
            published: None,
        },
        estimate: w.estimate,
    }
}

fn number(value: f64) -> String {
    if value < 100.0 { format!("{value:.1}") } else { format!("{value:.0}") }
}

/// A rate with its thousands set apart.
fn thousands(value: f64) -> String {
    let digits = format!("{value:.0}");
    let groups = digits.as_bytes().rchunks(3).rev();
    let groups: Vec<&str> = groups.filter_map(|g| std::str::from_utf8(g).ok()).collect();
    groups.join(",")
}

fn row(lane: &Lane) -> Value {
    let (Way { device, method, bytes, threads }, ns, pps) = (lane.way, lane.ns(), lane.pps());
    json!({
        "name": lane.way.name(),
        "title": format!("{}, {}", device.name(), method.title(device)),
        "group": format!("{bytes} bytes, threads: {threads}"),
        "device": device.name(),
        "method": method.name(),
        "payload_bytes": bytes,
        "threads": threads,
        "ns_per_datagram": ns.map(|e| e.median),
        "ns_per_datagram_low": ns.map(|e| e.low),
        "ns_per_datagram_high": ns.map(|e| e.high),
        "datagrams_per_s": pps.map(|e| e.median),
        "lost": lane.lost,
        "runs": ns.map(|e| e.runs),
    })
}

fn one_line(paragraph: &str) -> String {
    paragraph.split_whitespace().collect::<Vec<_>>().join(" ")
}

const LEGEND: &str = "\
ns per datagram is CPU time of the thread that sends or takes it, without simulated hardware; of several threads the
mean. packets/s is by the clock, all threads together, while they send; hardware that runs inside
the sender's calls slows it down.

sim is a simulated device whose peer discards. Over TAP and veth a kernel socket receives: what the
kernel does up to its queue runs inside the sender's calls and is in the figure; reading the queue
is not.

send_many and send_segmented of equal sizes cross a TAP as one frame of many datagrams, which the
kernel takes apart on its side; of two sizes in turn only two at a time can, since only the last
datagram of such a frame may be shorter.

Threads on the simulated device have a shard each, of one stack on one NIC with a queue for each;
one thread is measured on the same stack. Over TAP and veth they have a device of their own each.

recv and recv_many take what the simulated peer has sent, packet by packet; polling the device and
finding the socket are in the figure.";
