//! The figures of one stack or gateway that `fulmar top` shows, made from two of its documents.

use crate::stat::{self, Ends, Filter};
use fulmar::stat::Counter;
use fulmar::stat::ledger;
use fulmar::stat::{Document, DropCount, Flow, Refusal, Socket, StageCost};
use serde_json::{Map, Value};
use std::cmp::Ordering;
use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// A document, and when it was read.
#[derive(Clone, Debug)]
pub struct Sample {
    /// When.
    pub at: Instant,
    /// The document, safe for a terminal.
    pub document: Document,
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
    /// Bytes from near to far and back.
    moved_bytes: Option<[u64; 2]>,
    /// Its place among the flows or sockets of the document.
    at: usize,
}

impl Row {
    /// Which one it is, from one sample to the next.
    pub fn identity(&self) -> [String; 3] {
        [&self.protocol, &self.near, &self.far].map(String::clone)
    }

    /// Every figure in its document by its name, the figures of an inner object last.
    pub fn details(&self, document: &Document) -> Vec<(String, String)> {
        let mut all = Vec::new();
        let figures = match document.gateway {
            Some(_) => document.flows.get(self.at).map(stat::named),
            None => document.sockets.get(self.at).map(stat::named),
        };
        flatten("", &figures.unwrap_or_default(), &mut all);
        all
    }
}

/// The members of an object, and of the objects in it: the members of TCP_INFO by name, of other objects with a prefix.
fn flatten(prefix: &str, object: &Map<String, Value>, all: &mut Vec<(String, String)>) {
    for (name, value) in object.iter().filter(|(_, v)| !v.is_object()) {
        let said = match value {
            Value::Bool(is_so) => if *is_so { "yes" } else { "no" }.to_owned(),
            other => stat::word(other),
        };
        all.push((format!("{prefix}{name}"), said));
    }
    for (name, inner) in object.iter().filter_map(|(name, v)| Some((name, v.as_object()?))) {
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
    before: Option<&'a Document>,
    after: &'a Document,
    seconds: f64,
}

impl Change<'_> {
    /// Growth per second of a number.
    fn rate(&self, of: impl Fn(&Document) -> u64) -> Option<f64> {
        self.grown(of(self.after), of(self.before?))
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
        let document = &after.document;
        let change = Change { before: before.map(|b| &b.document), after: document, seconds };
        let rows = rows(&change, filter);
        let cpu = before.and_then(|b| Some((b.cpu?, after.cpu?)));
        let Document { name, pid, device, addresses, pool, gateway, .. } = document;
        let guest = stat::guest_of(document);
        Model {
            title: match &guest {
                Some(guest) => format!("{name} ({guest}), gateway {pid}"),
                None => format!("{name}, process {pid}, {}", device.name),
            },
            name: name.clone(),
            attends: guest.unwrap_or_else(|| {
                let all: Vec<&str> =
                    std::iter::once(&device.name).chain(addresses).map(String::as_str).collect();
                all.join(" ")
            }),
            is_gateway: gateway.is_some(),
            sent: change.rate(|d| d.device.tx_bytes),
            received: change.rate(|d| d.device.rx_bytes),
            packets: change.rate(|d| d.count(Counter::TxPackets) + d.count(Counter::RxPackets)),
            again: change.rate(|d| d.count(Counter::TcpRetransmitBytes)),
            cpu: cpu
                .filter(|_| seconds > 0.0)
                .map(|(b, a)| a.saturating_sub(b).as_secs_f64() / seconds),
            buffers: [pool.mapped_bytes as u64, pool.budget_bytes as u64],
            uptime: gateway.as_ref().map(|g| Duration::from_micros(g.uptime_us)),
            tally: tally(&rows),
            rows,
            drops: drops(&change),
            stages: stages(&change),
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

/// The rows of a document that the filter admits, without rates.
fn rows_of(document: &Document, filter: Option<&Filter>) -> Vec<Row> {
    let is_shown = |ends| filter.is_none_or(|f| f.admits(ends));
    if document.gateway.is_some() {
        let flows = document.flows.iter().enumerate().filter(|(_, f)| is_shown((*f).into()));
        return flows.map(|(at, f)| row_of_flow(at, f)).collect();
    }
    let sockets = document.sockets.iter().enumerate().filter(|(_, s)| is_shown((*s).into()));
    sockets.map(|(at, s)| row_of_socket(at, s)).collect()
}

fn row(at: usize, ends: Ends<'_>, far: Option<SocketAddr>, moved_bytes: Option<[u64; 2]>) -> Row {
    let text = |end: Option<SocketAddr>| end.map_or("-".to_owned(), |end| end.to_string());
    Row {
        protocol: ends.protocol.to_owned(),
        state: short_state(ends.state),
        near: text(ends.local),
        far: text(far),
        total_bytes: moved_bytes.map(|[out, back]| out + back),
        moved_bytes,
        at,
        ..Row::default()
    }
}

fn row_of_flow(at: usize, f: &Flow) -> Row {
    let sum =
        |all: &[Option<u64>]| all.iter().any(Option::is_some).then(|| all.iter().flatten().sum());
    let queues = [f.recv_queue_bytes, f.send_queue_bytes].map(|n| n.map(|n| n as u64));
    let near_retransmits = f.tcp.as_ref().map(|tcp| tcp.retransmits);
    Row {
        rtt_us: f.host_rtt_us.map(|us| us as f64).or(f.tcp.as_ref().map(|tcp| tcp.rtt_us)),
        queue_bytes: sum(&[queues[0], queues[1], f.host_unsent_bytes.map(u64::from)]),
        retransmits: sum(&[near_retransmits, f.host_retransmits.map(u64::from)]),
        age: Some(Duration::from_micros(f.age_us)),
        ..row(at, f.into(), f.host, Some([f.bytes_out, f.bytes_in]))
    }
}

fn row_of_socket(at: usize, s: &Socket) -> Row {
    let tcp = s.tcp.as_ref();
    Row {
        rtt_us: tcp.map(|tcp| tcp.rtt_us),
        // Of a listener both are numbers of connections.
        queue_bytes: (s.state != "LISTEN")
            .then_some((s.recv_queue_bytes + s.send_queue_bytes) as u64),
        retransmits: tcp.map(|tcp| tcp.retransmits),
        ..row(at, s.into(), s.remote, tcp.map(|tcp| [tcp.acked_bytes, tcp.received_bytes]))
    }
}

fn rows(change: &Change<'_>, filter: Option<&Filter>) -> Vec<Row> {
    let mut rows = rows_of(change.after, filter);
    let Some(before) = change.before else { return rows };
    let before = rows_of(before, None).into_iter();
    let before: HashMap<_, _> = before.map(|row| (row.identity(), row)).collect();
    for row in &mut rows {
        let Some([out, back]) = row.moved_bytes else { continue };
        // A flow that began anew between the samples has the address of another one. Of a new one all has passed
        // since the sample before.
        let old = before.get(&row.identity()).filter(|old| old.age <= row.age);
        let [out_before, back_before] = old.and_then(|old| old.moved_bytes).unwrap_or_default();
        row.out = change.grown(out, out_before);
        row.back = change.grown(back, back_before);
    }
    rows
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

fn drops(change: &Change<'_>) -> Vec<Count> {
    let mut all: Vec<Count> = counts_of(change.after);
    let before: HashMap<_, _> = change
        .before
        .map(counts_of)
        .unwrap_or_default()
        .into_iter()
        .map(|old| ((old.layer, old.reason), old.total))
        .collect();
    all.retain(|count| count.total > 0);
    for count in &mut all {
        let old = before.get(&(count.layer.clone(), count.reason.clone()));
        count.rate = old.and_then(|old| change.grown(count.total, *old)).unwrap_or(0.0);
    }
    all.sort_by(|a, b| b.rate.total_cmp(&a.rate).then(b.total.cmp(&a.total)));
    all
}

/// Drops and refusals without rates.
fn counts_of(document: &Document) -> Vec<Count> {
    let count = |layer: &str, reason: &str, total, sentence: &str| Count {
        total,
        rate: 0.0,
        layer: layer.to_owned(),
        reason: reason.to_owned(),
        sentence: sentence.to_owned(),
    };
    let drop = |d: &DropCount| count(&d.layer, &d.reason, d.packets, &d.sentence);
    let refusal = |r: &Refusal| count("gateway", &r.reason, r.count, &r.sentence);
    let refusals = document.gateway.iter().flat_map(|g| &g.refusals).map(refusal);
    document.drops.iter().map(drop).chain(refusals).collect()
}

/// What the stages cost since the sample before; without one, since the start.
fn stages(change: &Change<'_>) -> Vec<Stage> {
    fn stages_of(document: &Document) -> &[StageCost] {
        document.ledger.as_ref().map_or(&[], |ledger| &ledger.stages)
    }
    let before: HashMap<&str, f64> =
        change.before.into_iter().flat_map(stages_of).map(|old| (&*old.stage, old.ns)).collect();
    // Sleep is not work.
    let busy =
        stages_of(change.after).iter().filter(|stage| stage.layer != ledger::Stage::Slept.layer());
    let before = |stage: &StageCost| before.get(&*stage.stage).copied().unwrap_or(0.0);
    let costs = busy.map(|stage| (stage, (stage.ns - before(stage)).max(0.0)));
    let costs: Vec<(&StageCost, f64)> = costs.filter(|(_, ns)| *ns > 0.0).collect();
    let all: f64 = costs.iter().map(|(_, ns)| ns).sum();
    let share = |(stage, ns): (&StageCost, f64)| Stage {
        name: stage.stage.to_string(),
        layer: stage.layer.to_string(),
        share: ns / all,
    };
    let mut stages: Vec<Stage> = costs.into_iter().map(share).collect();
    stages.sort_by(|a, b| b.share.total_cmp(&a.share));
    stages
}

#[cfg(test)]
pub(super) mod tests;
