//! What `fulmar top` shows: figures of one stack or gateway, made from two of its documents.

use crate::stat::Filter;
use serde_json::Value;
use std::cmp::Ordering;
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// A document, and when it was read.
#[derive(Clone, Debug)]
pub struct Sample {
    /// When.
    pub at: Instant,
    /// The document, safe for a terminal.
    pub document: Value,
    /// CPU time of its process so far.
    pub cpu: Option<Duration>,
}

/// A flow of a gateway, or a socket of a stack.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Row {
    /// `tcp`, `udp`, `icmp`.
    pub protocol: String,
    /// As short as ss(8) writes it.
    pub state: String,
    /// The guest's end, or the stack's own.
    pub near: String,
    /// The host's end, or the peer.
    pub far: String,
    /// Bytes per second from near to far. `None`: unknown.
    pub out: Option<f64>,
    /// Bytes per second from far to near.
    pub back: Option<f64>,
    /// Round-trip time on the far side where it is known, else on the near one.
    pub rtt_us: Option<f64>,
    /// Bytes that wait in both queues, and in the host's.
    pub queue_bytes: Option<u64>,
    /// Segments sent again on both sides.
    pub retransmits: Option<u64>,
    /// Bytes of both directions since it began.
    pub total_bytes: Option<u64>,
    /// Since it began.
    pub age: Option<Duration>,
    /// All that the stack says of it.
    pub value: Value,
}

impl Row {
    /// Which one it is, from one sample to the next.
    pub fn identity(&self) -> [String; 3] {
        [&self.protocol, &self.near, &self.far].map(String::clone)
    }

    /// Every figure by its name; the figures of an inner object follow the others.
    pub fn details(&self) -> Vec<(String, String)> {
        let mut all = Vec::new();
        flatten("", &self.value, &mut all);
        all
    }
}

/// The members of an object and of the objects in it. A member of TCP_INFO has its name alone, a member of another
/// inner object a prefix.
fn flatten(prefix: &str, value: &Value, all: &mut Vec<(String, String)>) {
    let Some(object) = value.as_object() else { return };
    for (name, value) in object.iter().filter(|(_, v)| !v.is_object()) {
        let said = match value {
            Value::Null => "-".to_owned(),
            Value::String(text) => text.clone(),
            Value::Bool(is_so) => if *is_so { "yes" } else { "no" }.to_owned(),
            other => other.to_string(),
        };
        all.push((format!("{prefix}{name}"), said));
    }
    for (name, inner) in object.iter().filter(|(_, v)| v.is_object()) {
        let prefix = if name == "tcp_info" { String::new() } else { format!("{name}.") };
        flatten(&prefix, inner, all);
    }
}

/// By what the rows are sorted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Sort {
    /// Bytes per second of both directions, the most first.
    #[default]
    Rate,
    /// Bytes since the flow began.
    Bytes,
    /// Round-trip time.
    Rtt,
    /// Queues.
    Queue,
    /// Retransmissions.
    Retransmits,
    /// Age, the youngest first.
    Age,
    /// The near end, by text.
    Near,
    /// The far end.
    Far,
}

impl Sort {
    /// All, in the order in which a key goes through them.
    pub const ALL: [Sort; 8] = [
        Sort::Rate,
        Sort::Bytes,
        Sort::Rtt,
        Sort::Queue,
        Sort::Retransmits,
        Sort::Age,
        Sort::Near,
        Sort::Far,
    ];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Sort::Rate => "rate",
            Sort::Bytes => "bytes",
            Sort::Rtt => "rtt",
            Sort::Queue => "queue",
            Sort::Retransmits => "retransmissions",
            Sort::Age => "age",
            Sort::Near => "near",
            Sort::Far => "far",
        }
    }

    /// The one after it.
    pub fn next(self) -> Sort {
        let at = Sort::ALL.iter().position(|s| *s == self).unwrap_or(0);
        Sort::ALL[(at + 1) % Sort::ALL.len()]
    }

    /// The one before it.
    pub fn previous(self) -> Sort {
        let at = Sort::ALL.iter().position(|s| *s == self).unwrap_or(0);
        Sort::ALL[(at + Sort::ALL.len() - 1) % Sort::ALL.len()]
    }

    /// Compares two rows in the order of this sort.
    pub fn compare(self, a: &Row, b: &Row) -> Ordering {
        let number =
            |x: Option<f64>, y: Option<f64>| y.unwrap_or(-1.0).total_cmp(&x.unwrap_or(-1.0));
        let order = match self {
            Sort::Rate => number(a.rate(), b.rate()),
            Sort::Bytes => b.total_bytes.cmp(&a.total_bytes),
            Sort::Rtt => number(a.rtt_us, b.rtt_us),
            Sort::Queue => b.queue_bytes.cmp(&a.queue_bytes),
            Sort::Retransmits => b.retransmits.cmp(&a.retransmits),
            Sort::Age => a.age.unwrap_or(Duration::MAX).cmp(&b.age.unwrap_or(Duration::MAX)),
            Sort::Near => Ordering::Equal,
            Sort::Far => a.far.cmp(&b.far),
        };
        // Rows that are equal keep their places from one picture to the next.
        order.then_with(|| (&a.near, &a.far, &a.protocol).cmp(&(&b.near, &b.far, &b.protocol)))
    }
}

impl Row {
    /// Bytes per second of both directions.
    pub fn rate(&self) -> Option<f64> {
        Some(self.out? + self.back?)
    }
}

/// Something that was counted, with its reason.
#[derive(Clone, PartialEq, Debug)]
pub struct Count {
    /// How often in all.
    pub total: u64,
    /// Per second.
    pub rate: f64,
    /// The layer, or `gateway`.
    pub layer: String,
    /// The reason's name.
    pub reason: String,
    /// The reason in a sentence.
    pub sentence: String,
}

/// A stage of the account.
#[derive(Clone, PartialEq, Debug)]
pub struct Stage {
    /// Its name.
    pub name: String,
    /// Its layer.
    pub layer: String,
    /// Of the time that the stack worked since the sample before, from 0 to 1.
    pub share: f64,
}

/// All that is shown of one stack.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Model {
    /// Whose stack it is.
    pub title: String,
    /// The name alone.
    pub name: String,
    /// Of a gateway its guest, of a stack its device and addresses.
    pub attends: String,
    /// Whether it is a gateway: its rows have a guest's and a host's end.
    pub is_gateway: bool,
    /// Bytes per second that the stack's device sent and received.
    pub sent: Option<f64>,
    /// Received.
    pub received: Option<f64>,
    /// Packets per second, both directions.
    pub packets: Option<f64>,
    /// Bytes per second sent again by TCP.
    pub again: Option<f64>,
    /// CPU time per time of the process: 1 is one CPU.
    pub cpu: Option<f64>,
    /// Buffers in bytes: mapped, at most.
    pub buffers: [u64; 2],
    /// Since the start.
    pub uptime: Option<Duration>,
    /// Flows or sockets by protocol.
    pub tally: Vec<(String, usize)>,
    /// The flows or sockets, in no order.
    pub rows: Vec<Row>,
    /// Drops and refusals that happened, the most frequent at present first.
    pub drops: Vec<Count>,
    /// Stages with a share, the largest first; empty: no account is kept.
    pub stages: Vec<Stage>,
}

/// What changed between two samples.
struct Change<'a> {
    before: Option<&'a Value>,
    seconds: f64,
}

impl Change<'_> {
    /// Growth per second of a counter.
    fn rate(&self, after: &Value, path: &str) -> Option<f64> {
        self.grown(after.pointer(path)?.as_u64()?, self.before?.pointer(path)?.as_u64()?)
    }

    fn grown(&self, after: u64, before: u64) -> Option<f64> {
        (self.seconds > 0.0).then(|| after.saturating_sub(before) as f64 / self.seconds)
    }
}

impl Model {
    /// The figures between two samples of one stack; without the first one there are no rates. Its rows are those
    /// that the filter admits.
    pub fn new(before: Option<&Sample>, after: &Sample, filter: Option<&Filter>) -> Model {
        let seconds = before.map_or(0.0, |b| (after.at - b.at).as_secs_f64());
        let change = Change { before: before.map(|b| &b.document), seconds };
        let document = &after.document;
        let is_gateway = document["gateway"].is_object();
        let rows = rows(&change, document, is_gateway, filter);
        let sum = |a: Option<f64>, b: Option<f64>| Some(a? + b?);
        let cpu = before.and_then(|b| Some((b.cpu?, after.cpu?)));
        Model {
            title: title(document),
            name: text(&document["name"]),
            attends: attends(document),
            is_gateway,
            sent: change.rate(document, "/device/tx_bytes"),
            received: change.rate(document, "/device/rx_bytes"),
            packets: sum(
                change.rate(document, "/counters/tx_packets"),
                change.rate(document, "/counters/rx_packets"),
            ),
            again: change.rate(document, "/counters/tcp_retransmit_bytes"),
            cpu: cpu
                .filter(|_| seconds > 0.0)
                .map(|(b, a)| a.saturating_sub(b).as_secs_f64() / seconds),
            buffers: ["mapped_bytes", "budget_bytes"]
                .map(|field| document["pool"][field].as_u64().unwrap_or(0)),
            uptime: micros(&document["gateway"]["uptime_us"]),
            tally: tally(&rows),
            rows,
            drops: drops(&change, document),
            stages: stages(&change, document),
        }
    }

    /// Bytes per second out of a gateway's guest, which is into its stack, or out of a stack.
    pub fn out(&self) -> Option<f64> {
        if self.is_gateway { self.received } else { self.sent }
    }

    /// The same of the other direction.
    pub fn back(&self) -> Option<f64> {
        if self.is_gateway { self.sent } else { self.received }
    }

    /// How many drops and refusals there are per second.
    pub fn drop_rate(&self) -> f64 {
        // The sum of nothing is -0.
        self.drops.iter().fold(0.0, |all, d| all + d.rate)
    }
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

fn text(value: &Value) -> String {
    match value {
        Value::Null => "-".to_owned(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

fn micros(value: &Value) -> Option<Duration> {
    value.as_u64().map(Duration::from_micros)
}

fn title(document: &Value) -> String {
    let (name, pid) = (text(&document["name"]), text(&document["pid"]));
    match crate::stat::guest_of(document) {
        Some(guest) => format!("{name} ({guest}), gateway {pid}"),
        None => format!("{name}, process {pid}, {}", text(&document["device"]["name"])),
    }
}

fn attends(document: &Value) -> String {
    crate::stat::guest_of(document).unwrap_or_else(|| {
        let device = text(&document["device"]["name"]);
        let addresses = list(&document["addresses"]).iter().map(text);
        std::iter::once(device).chain(addresses).collect::<Vec<_>>().join(" ")
    })
}

/// The fields of a flow, or of a socket, that tell it from the others.
fn identity(value: &Value) -> [&str; 5] {
    ["protocol", "local", "remote", "guest", "peer"]
        .map(|field| value[field].as_str().unwrap_or_default())
}

fn rows(
    change: &Change<'_>,
    document: &Value,
    is_gateway: bool,
    filter: Option<&Filter>,
) -> Vec<Row> {
    let name = if is_gateway { "flows" } else { "sockets" };
    let before = change.before.map_or(&[][..], |b| list(&b[name]));
    let before: HashMap<[&str; 5], &Value> = before.iter().map(|v| (identity(v), v)).collect();
    let row = |value: &Value| {
        // A flow that began anew between the samples has the address of another one.
        let old = before.get(&identity(value)).copied();
        let is_same = |old: &&Value| micros(&old["age_us"]) <= micros(&value["age_us"]);
        row(change, value, old.filter(is_same), is_gateway)
    };
    let admitted = |value: &&Value| filter.is_none_or(|f| f.admits(value));
    list(&document[name]).iter().filter(admitted).map(row).collect()
}

fn row(change: &Change<'_>, value: &Value, old: Option<&Value>, is_gateway: bool) -> Row {
    let [near, far, out, back] = match is_gateway {
        true => ["guest", "host", "bytes_out", "bytes_in"],
        false => ["local", "remote", "acked_bytes", "received_bytes"],
    };
    let number = |field: &str| value[field].as_u64();
    let rate = |field: &str| match old {
        Some(old) => change.grown(number(field)?, old[field].as_u64()?),
        // It is new: all of it has passed since the sample before.
        None => change.before.and_then(|_| change.grown(number(field)?, 0)),
    };
    let sum = |fields: &[&str]| {
        let known: Vec<u64> = fields.iter().filter_map(|f| number(f)).collect();
        (!known.is_empty()).then(|| known.iter().sum())
    };
    Row {
        protocol: text(&value["protocol"]),
        state: short_state(value["state"].as_str().unwrap_or("-")),
        near: text(&value[near]),
        far: text(&value[far]),
        out: rate(out),
        back: rate(back),
        rtt_us: value["host_rtt_us"].as_f64().or(value["rtt_us"].as_f64()),
        // Of a listener both are numbers of connections.
        queue_bytes: match value["state"] == "LISTEN" {
            true => None,
            false => sum(&["recv_queue_bytes", "send_queue_bytes", "host_unsent_bytes"]),
        },
        retransmits: sum(&["retransmits", "host_retransmits"]),
        total_bytes: sum(&[out, back]),
        age: micros(&value["age_us"]),
        value: value.clone(),
    }
}

/// Six columns at most.
fn short_state(state: &str) -> String {
    match state {
        "ESTABLISHED" => "ESTAB",
        "UNCONNECTED" => "UNCONN",
        "SYN-RECEIVED" => "SYN-R",
        "SYN-SENT" => "SYN-S",
        "FIN-WAIT-1" => "FIN-1",
        "FIN-WAIT-2" => "FIN-2",
        "CLOSE-WAIT" => "CL-WT",
        "CLOSING" => "CLOSNG",
        "LAST-ACK" => "LSTACK",
        "connecting" => "conn..",
        "half-closed" => "half",
        other => other,
    }
    .chars()
    .take(6)
    .collect()
}

fn tally(rows: &[Row]) -> Vec<(String, usize)> {
    let mut tally: Vec<(String, usize)> = Vec::new();
    for row in rows {
        match tally.iter_mut().find(|(protocol, _)| *protocol == row.protocol) {
            Some((_, n)) => *n += 1,
            None => tally.push((row.protocol.clone(), 1)),
        }
    }
    tally.sort();
    tally
}

fn drops(change: &Change<'_>, document: &Value) -> Vec<Count> {
    let of = |list_path: &str, field: &str, layer: Option<&str>| {
        let found = document.pointer(list_path).map_or(&[][..], list);
        let before = change.before.and_then(|b| b.pointer(list_path)).map_or(&[][..], list);
        let mut counts = Vec::new();
        for value in found {
            let total = value[field].as_u64().unwrap_or(0);
            let old = before.iter().find(|old| old["reason"] == value["reason"]);
            let old = old.and_then(|old| old[field].as_u64());
            if total > 0 {
                counts.push(Count {
                    total,
                    rate: old.and_then(|old| change.grown(total, old)).unwrap_or(0.0),
                    layer: layer.map_or_else(|| text(&value["layer"]), str::to_owned),
                    reason: text(&value["reason"]),
                    sentence: text(&value["sentence"]),
                });
            }
        }
        counts
    };
    let mut all = of("/drops", "packets", None);
    all.extend(of("/gateway/refusals", "count", Some("gateway")));
    all.sort_by(|a, b| b.rate.total_cmp(&a.rate).then(b.total.cmp(&a.total)));
    all
}

/// What the stages cost since the sample before; without one, since the start.
fn stages(change: &Change<'_>, document: &Value) -> Vec<Stage> {
    let now = list(&document["ledger"]["stages"]);
    let before = change.before.map_or(&[][..], |b| list(&b["ledger"]["stages"]));
    let ns_before = |stage: &Value| {
        let old = before.iter().find(|old| old["stage"] == stage["stage"]);
        old.and_then(|old| old["ns"].as_f64()).unwrap_or(0.0)
    };
    // Sleep is not work.
    let busy = now.iter().filter(|stage| stage["layer"] != "idle");
    let costs = busy.map(|s| (s, (s["ns"].as_f64().unwrap_or(0.0) - ns_before(s)).max(0.0)));
    let costs: Vec<(&Value, f64)> = costs.filter(|(_, ns)| *ns > 0.0).collect();
    let all: f64 = costs.iter().map(|(_, ns)| ns).sum();
    let stage = |(s, ns): &(&Value, f64)| Stage {
        name: text(&s["stage"]),
        layer: text(&s["layer"]),
        share: ns / all,
    };
    let mut stages: Vec<Stage> = costs.iter().map(stage).collect();
    stages.sort_by(|a, b| b.share.total_cmp(&a.share));
    stages
}

#[cfg(test)]
pub(super) mod tests;
