//! What `bench burst` found, as text, as JSON and as what the page is made of.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::{Value, json};

use super::buffers::Buffers;
use super::joining::Joining;
use super::{Direction, Lane};
use crate::bench::{Figure, Outcome, Stop};
use crate::report::{self, Machine};
use crate::stats::Estimate;

/// What was found.
pub struct Found {
    /// Every way.
    pub lanes: Vec<Lane>,
    /// What buffers cost by themselves.
    pub buffers: Buffers,
    /// What joining in software is worth.
    pub(super) joining: Option<Joining>,
    /// The figures asked for.
    pub figures: Vec<Figure>,
    /// How frames cross: device, method, sentence.
    pub(super) paths: Vec<(&'static str, &'static str, String)>,
    /// Ways that failed, and why.
    pub(super) errors: Vec<(String, String)>,
    pub(super) stop: Stop,
    pub(super) elapsed: Duration,
}

/// One curve: a device, a method, a direction, a frame length.
type Curve = (&'static str, &'static str, Direction, usize);

impl Found {
    fn outcome(&self) -> Outcome {
        Outcome {
            rows: Vec::new(),
            figures: self.figures.clone(),
            stop: self.stop,
            elapsed: self.elapsed,
        }
    }

    /// The curves in the order in which they were measured.
    fn curves(&self) -> Vec<Curve> {
        let mut curves: Vec<Curve> = Vec::new();
        for lane in &self.lanes {
            if !curves.contains(&lane.way.curve()) {
                curves.push(lane.way.curve());
            }
        }
        curves
    }

    fn points(&self, curve: Curve) -> impl Iterator<Item = &Lane> {
        self.lanes.iter().filter(move |l| l.way.curve() == curve)
    }

    fn ns(&self, curve: Curve, burst: usize) -> Option<Estimate> {
        self.points(curve).find(|l| l.way.burst == burst)?.ns()
    }

    /// The whole report as text.
    pub fn text(&self, machine: &Machine) -> String {
        let mut parts = vec![machine.sentence()];
        for direction in [Direction::Send, Direction::Receive] {
            parts.extend(self.table(direction));
        }
        parts.extend(self.buffers_line());
        parts.extend(self.joining.iter().flat_map(Joining::lines));
        let paths = self.paths.iter().filter(|(_, _, path)| !path.is_empty());
        let paths = paths.map(|(device, method, path)| format!("{device}, {method}: {path}"));
        parts.push(paths.collect::<Vec<_>>().join("\n"));
        parts.extend(self.errors.iter().map(|(name, e)| format!("not measured: {name}: {e}")));
        parts.push(report::figures_table(&self.figures));
        let stop = self.stop.sentence();
        parts.push(format!("{LEGEND}\nTook {:.0} s: {stop}.", self.elapsed.as_secs_f64()));
        parts.join("\n\n")
    }

    /// The curves of one direction, a burst per column.
    fn table(&self, direction: Direction) -> Option<String> {
        let curves: Vec<Curve> = self.curves().into_iter().filter(|c| c.2 == direction).collect();
        let mut bursts: Vec<usize> = self.lanes.iter().map(|l| l.way.burst).collect();
        bursts.sort_unstable();
        bursts.dedup();
        let names: Vec<String> = bursts.iter().map(|b| format!("x{b}")).collect();
        let head = ["frame", "device", "way"].into_iter().chain(names.iter().map(String::as_str));
        let mut table = report::new_table(head.chain(["frames per\ncrossing", "runs"]), 3);
        for curve in &curves {
            let (device, method, _, bytes) = *curve;
            let mut cells = vec![format!("{bytes} B"), device.to_owned(), title(method).to_owned()];
            let number = |b: &usize| self.ns(*curve, *b).map(|e| ns(e.median));
            cells.extend(bursts.iter().map(|b| number(b).unwrap_or_else(|| "–".into())));
            let most =
                self.points(*curve).filter_map(Lane::frames_per_crossing).fold(0.0, f64::max);
            cells.push(format!("{most:.0}"));
            cells.push(self.points(*curve).filter_map(Lane::ns).map(|e| e.runs).max()?.to_string());
            table.add_row(cells);
        }
        let what = match direction {
            Direction::Send => "Sending: ns of CPU per frame, by frames in a burst",
            Direction::Receive => "Receiving: ns of CPU per frame, by frames asked for at once",
        };
        (!curves.is_empty()).then(|| format!("{what}\n\n{table}"))
    }

    fn buffers_line(&self) -> Option<String> {
        let (pool, heap) = (self.buffers.pool()?, self.buffers.heap()?);
        Some(format!(
            "A buffer taken and freed: {:.1} ns ready-made from the pool, {:.1} ns with its header \
             from the general allocator.",
            pool.median, heap.median
        ))
    }

    /// The whole report as JSON. `command` is the command line as given.
    pub fn json(&self, machine: &Machine, command: &[String]) -> Value {
        let mut json = report::json(machine, command, &self.outcome());
        json["lead"] = "What a frame costs against the number of frames that cross together: CPU \
                        time of the end that is timed, in nanoseconds."
            .into();
        json["rows"] = self.lanes.iter().map(row).collect();
        json["breakdowns"] = self.charts().into();
        json["paths"] = self.paths.iter().map(path).collect();
        json["buffers"] = json!({
            "pool_ns": self.buffers.pool().map(|e| e.median),
            "heap_ns": self.buffers.heap().map(|e| e.median),
        });
        json["joining"] = self.joining.as_ref().map(Joining::json).unwrap_or_default();
        let failed = |(name, e): &(String, String)| json!({ "name": name, "error": e });
        json["failed"] = self.errors.iter().map(failed).collect();
        json["notes"] = notes().into();
        json
    }

    /// A chart per direction and frame length, with a group per device and a bar per burst.
    fn charts(&self) -> Vec<Value> {
        let mut charts: BTreeMap<(usize, &str), Vec<Value>> = BTreeMap::new();
        for curve in self.curves() {
            let (device, method, direction, bytes) = curve;
            let bars = self.points(curve).filter_map(|lane| {
                let ns = lane.ns()?.median;
                Some(json!({
                    "group": format!("{device}, {}", title(method)),
                    "label": format!("bursts of {}", lane.way.burst),
                    "parts": [{ "name": "ns per frame", "value": ns }],
                }))
            });
            charts.entry((bytes, direction.name())).or_default().extend(bars);
        }
        let chart = |((bytes, direction), bars): ((usize, &str), Vec<Value>)| {
            json!({
                "title": format!("Frames of {bytes} bytes, {direction}"),
                "caption": "Shorter is better. What falls as the burst grows is the crossing.",
                "unit": "ns of CPU per frame",
                "bars": bars,
            })
        };
        charts.into_iter().map(chart).collect()
    }
}

/// A number of nanoseconds as a table wants it.
fn ns(value: f64) -> String {
    if value < 100.0 { format!("{value:.1}") } else { format!("{value:.0}") }
}

fn title(method: &str) -> &str {
    match method {
        "ours" => "bursts",
        "writev" => "writev, readv each",
        "flow" => "bursts of one flow",
        "old" => "old: one by one, general allocator",
        "kernel" => "kernel sendmmsg, recvmmsg",
        other => other,
    }
}

fn row(lane: &Lane) -> Value {
    let (way, e) = (&lane.way, lane.ns());
    json!({
        "name": way.name(),
        "title": format!("{}, {}", title(way.method), way.direction.name()),
        "group": format!("{} bytes, {}", way.frame_bytes, way.direction.name()),
        "placement": "same_cpu",
        "device": way.device,
        "method": way.method,
        "frame_bytes": way.frame_bytes,
        "burst": way.burst,
        "ns_per_frame": e.map(|e| e.median),
        "ns_per_frame_low": e.map(|e| e.low),
        "ns_per_frame_high": e.map(|e| e.high),
        "runs": e.map(|e| e.runs),
        "frames_per_crossing": lane.frames_per_crossing(),
        "slow_path_allocations": lane.slow_allocs,
    })
}

fn path((device, method, path): &(&str, &str, String)) -> Value {
    json!({ "device": device, "method": method, "path": path })
}

/// The legend as paragraphs: lines that are indented belong to the one above.
fn notes() -> Vec<String> {
    let mut notes: Vec<String> = Vec::new();
    for line in LEGEND.lines() {
        let words = line.split_whitespace().collect::<Vec<_>>().join(" ");
        match notes.last_mut() {
            Some(last) if line.starts_with(' ') => *last = format!("{last} {words}"),
            _ => notes.push(words),
        }
    }
    notes
}

const LEGEND: &str = "\
ns        is CPU time of the thread that sends or receives, without simulated hardware, per frame:
          taking and filling a buffer, crossing, freeing it. The other end makes the frames, or takes
          them away, between the timed parts; frames from and to the kernel wait in its queues.
bursts    are what the device does with a vector; over TAP by io_uring from the third small frame on.
flow      is datagrams from one socket to one of the kernel's. Sent, those of a burst cross as one; all
          that the kernel does until the socket has every one of them is in the figure. Received, the
          kernel's sender has joined so many of them (UDP_SEGMENT), and cutting them is in it.
old       is one frame per crossing; for each a header and a cluster from the general allocator.
kernel    is UDP sockets on veth: it also makes headers and looks up routes, which the others here
          do not, so it stands beside them for scale. Frames over TAP have a type nobody takes.
frames    per crossing are the most of any burst, as counted.";
