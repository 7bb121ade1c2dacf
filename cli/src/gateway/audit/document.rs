//! The lines of an audit. docs/egress.md has their fields and the fields of OCSF that these are.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::SystemTime;

use fulmar_gateway::policy::{NewFlow, Protocol};
use fulmar_gateway::stat::{Direction, FlowStat, Refusal};
use serde::Serialize;

use super::receipt::{Stages, Work};

/// An event and when it was.
pub(super) struct Line {
    pub time: SystemTime,
    pub event: Event,
}

/// What happened.
pub(super) enum Event {
    Question {
        name: String,
        record_type: u16,
        is_allowed: bool,
        rule: Arc<str>,
    },
    Begin(Flow),
    End(Flow),
    /// The first bytes ask for another name.
    Contradicted(Flow, String),
    Refuse {
        flow: Refused,
        why: Refusal,
    },
    /// The CPU time of a destination.
    Receipt(Work, Stages),
    /// That of the gateway.
    Total(Stages),
}

/// A flow that is carried.
pub(super) struct Flow {
    id: u64,
    protocol: Protocol,
    direction: Direction,
    guest: SocketAddr,
    peer: SocketAddr,
    host: SocketAddr,
    name: Option<Arc<str>>,
    rule: Option<Arc<str>>,
    bytes: [u64; 2],
    seconds: f64,
}

impl Flow {
    pub(super) fn of(flow: &FlowStat, id: u64) -> Flow {
        Flow {
            id,
            protocol: flow.protocol,
            direction: flow.direction,
            guest: flow.guest,
            peer: flow.peer,
            host: flow.host,
            name: flow.name.clone(),
            rule: flow.rule.clone(),
            bytes: [flow.bytes_out, flow.bytes_in],
            seconds: flow.age.as_secs_f64(),
        }
    }
}

/// A flow that is not.
pub(super) struct Refused {
    protocol: Protocol,
    guest: SocketAddr,
    peer: SocketAddr,
    host: Option<SocketAddr>,
    name: Option<String>,
    rule: Option<Arc<str>>,
}

impl Refused {
    pub(super) fn of(flow: &NewFlow<'_>, rule: Option<Arc<str>>) -> Refused {
        Refused {
            protocol: flow.protocol,
            guest: flow.from,
            peer: flow.to,
            // The host's network does not know the address of a name.
            host: flow.name.is_none().then_some(flow.leads_to),
            name: flow.name.or(flow.names.first().map(String::as_str)).map(str::to_owned),
            rule,
        }
    }
}

/// One line.
#[derive(Serialize, Default)]
struct Record<'a> {
    time: String,
    event: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    verdict: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    rule: Option<Option<&'a str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<Option<&'a str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    record_type: Option<u16>,
    #[serde(flatten)]
    ends: Option<Ends>,
    #[serde(flatten)]
    moved: Option<Moved>,
    #[serde(flatten)]
    work: Option<WorkFields>,
    #[serde(flatten)]
    cpu: Option<Cpu>,
}

#[derive(Serialize)]
struct WorkFields {
    protocol: Option<&'static str>,
    used_address: Option<IpAddr>,
    port: Option<u16>,
    flows: u64,
    denied: u64,
    bytes_out: u64,
    bytes_in: u64,
}

/// Microseconds.
#[derive(Serialize)]
struct Cpu {
    cpu_us: f64,
    stages_us: Stages,
}

impl Cpu {
    fn of(stages: &Stages) -> Cpu {
        let rounded = |us: f64| (us * 1e3).round() / 1e3;
        Cpu {
            cpu_us: rounded(stages.values().sum()),
            stages_us: stages.iter().map(|(stage, us)| (*stage, rounded(*us))).collect(),
        }
    }
}

#[derive(Serialize)]
struct Ends {
    protocol: &'static str,
    direction: &'static str,
    guest_address: IpAddr,
    guest_port: u16,
    /// As the guest knows it.
    used_address: IpAddr,
    /// As the host knows it.
    address: Option<IpAddr>,
    port: u16,
}

#[derive(Serialize)]
struct Moved {
    bytes_out: u64,
    bytes_in: u64,
    seconds: f64,
}

impl<'a> Record<'a> {
    fn of(line: &'a Line) -> Record<'a> {
        let record = match &line.event {
            Event::Question { name, record_type, is_allowed, rule } => Record {
                event: "question",
                verdict: Some(if *is_allowed { "allow" } else { "deny" }),
                rule: Some(Some(rule)),
                name: Some(Some(name)),
                record_type: Some(*record_type),
                ..Record::default()
            },
            Event::Begin(flow) => Record { moved: None, ..Record::of_flow(flow, "begin") },
            Event::End(flow) => Record::of_flow(flow, "end"),
            Event::Contradicted(flow, why) => {
                let verdict = Some("deny");
                Record { reason: Some(why), verdict, ..Record::of_flow(flow, "contradiction") }
            }
            Event::Refuse { flow, why } => Record::of_refused(flow, *why),
            Event::Receipt(work, stages) => Record::of_work(work, stages),
            Event::Total(stages) => {
                Record { event: "total", cpu: Some(Cpu::of(stages)), ..Record::default() }
            }
        };
        Record { time: rfc3339(line.time), ..record }
    }

    fn of_flow(flow: &'a Flow, event: &'static str) -> Record<'a> {
        let [bytes_out, bytes_in] = flow.bytes;
        Record {
            event,
            id: Some(flow.id),
            rule: Some(flow.rule.as_deref()),
            name: Some(flow.name.as_deref()),
            ends: Some(Ends {
                protocol: flow.protocol.name(),
                direction: flow.direction.name(),
                guest_address: flow.guest.ip(),
                guest_port: flow.guest.port(),
                used_address: flow.peer.ip(),
                address: Some(flow.host.ip()),
                port: flow.host.port(),
            }),
            moved: Some(Moved { bytes_out, bytes_in, seconds: flow.seconds }),
            ..Record::default()
        }
    }

    fn of_work(work: &'a Work, stages: &Stages) -> Record<'a> {
        Record {
            event: "receipt",
            name: Some(work.name.as_deref()),
            work: Some(WorkFields {
                protocol: work.to.map(|(protocol, _)| protocol.name()),
                used_address: work.to.map(|(_, to)| to.ip()),
                port: work.to.map(|(_, to)| to.port()),
                flows: work.flows,
                denied: work.denied,
                bytes_out: work.bytes_out,
                bytes_in: work.bytes_in,
            }),
            cpu: Some(Cpu::of(stages)),
            ..Record::default()
        }
    }

    fn of_refused(flow: &'a Refused, why: Refusal) -> Record<'a> {
        // Others are failures of the network.
        use Refusal::{Allowance, Forbidden, NoName, Policy};
        let is_refused = matches!(why, Policy | Forbidden | NoName | Allowance);
        Record {
            event: if is_refused { "refuse" } else { "fail" },
            verdict: is_refused.then_some("deny"),
            reason: Some(why.name()),
            rule: Some(flow.rule.as_deref()),
            name: Some(flow.name.as_deref()),
            ends: Some(Ends {
                protocol: flow.protocol.name(),
                direction: Direction::Out.name(),
                guest_address: flow.guest.ip(),
                guest_port: flow.guest.port(),
                used_address: flow.peer.ip(),
                address: flow.host.map(|host| host.ip()),
                port: flow.peer.port(),
            }),
            ..Record::default()
        }
    }
}

/// The lines as JSON. `is_broken`: what was written before has no end.
pub(super) fn texts(lines: &[Line], is_broken: bool) -> Vec<u8> {
    let mut texts = Vec::with_capacity(lines.len() * 400);
    texts.extend(is_broken.then_some(b'\n'));
    for line in lines {
        // Nothing in a record can fail to be JSON.
        let _ = serde_json::to_writer(&mut texts, &Record::of(line));
        texts.push(b'\n');
    }
    texts
}

/// A time as RFC 3339 has it, of UTC and in microseconds. A clock that stands before 1970 shows 1970.
pub(super) fn rfc3339(time: SystemTime) -> String {
    let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let (days, seconds) = (since.as_secs() / 86_400, since.as_secs() % 86_400);
    let (year, month, day) = date(days);
    let (hour, minute, second) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    let micros = since.subsec_micros();
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{micros:06}Z")
}

/// Year, month and day of the days since 1970. Years begin in March here, so that the leap day is the last one of a
/// year, and 400 years have 146,097 days.
fn date(days: u64) -> (u64, u64, u64) {
    let days = days + 719_468;
    let (era, of_era) = (days / 146_097, days % 146_097);
    let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month + 2) / 5 + 1;
    let is_next_year = month >= 10;
    let month = if is_next_year { month - 9 } else { month + 3 };
    (era * 400 + year + u64::from(is_next_year), month, day)
}
