//! The document of a stack or gateway as metrics. Names and numbers agree with `fulmar stat --json`. By Prometheus's
//! convention, counters end in `_total` and times are in seconds.
//!
//! Flows are summed by protocol and state: a metric for each flow would grow without bound on the reader's side.

use crate::stat::bound_address;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// Metrics of one name are one family: written together, below one help and one type.
#[derive(Default)]
struct Families(BTreeMap<String, Family>);

struct Family {
    help: &'static str,
    kind: &'static str,
    /// Labels in braces, and the value.
    samples: Vec<(String, f64)>,
}

const COUNTER: &str = "counter";
const GAUGE: &str = "gauge";

/// The name of a family without its prefix, its type and its help text.
#[derive(Clone, Copy)]
struct Metric<'a> {
    name: &'a str,
    kind: &'static str,
    help: &'static str,
}

fn counter<'a>(name: &'a str, help: &'static str) -> Metric<'a> {
    Metric { name, kind: COUNTER, help }
}

fn gauge<'a>(name: &'a str, help: &'static str) -> Metric<'a> {
    Metric { name, kind: GAUGE, help }
}

impl Families {
    fn add(&mut self, metric: Metric<'_>, labels: &[(&str, &str)], value: f64) {
        let Metric { name, kind, help } = metric;
        let suffix = if kind == COUNTER { "_total" } else { "" };
        let family = self.0.entry(format!("fulmar_{name}{suffix}"));
        let family = family.or_insert_with(|| Family { help, kind, samples: Vec::new() });
        family.samples.push((in_braces(labels), value));
    }

    fn text(&self) -> String {
        let mut text = String::new();
        for (name, family) in &self.0 {
            let _ = writeln!(text, "# HELP {name} {}\n# TYPE {name} {}", family.help, family.kind);
            for (labels, value) in &family.samples {
                let _ = writeln!(text, "{name}{labels} {value}");
            }
        }
        text
    }
}

fn in_braces(labels: &[(&str, &str)]) -> String {
    if labels.is_empty() {
        return String::new();
    }
    let escaped = |text: &str| text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
    let labels: Vec<String> =
        labels.iter().map(|(name, value)| format!("{name}=\"{}\"", escaped(value))).collect();
    format!("{{{}}}", labels.join(","))
}

/// A document as text.
pub fn exposition(document: &Value) -> String {
    let mut all = Families::default();
    let about = |field: &str| document[field].as_str().unwrap_or_default().to_owned();
    let (name, device) = (about("name"), document["device"]["name"].as_str().unwrap_or_default());
    let labels =
        [("name", name.as_str()), ("device", device), ("version", env!("CARGO_PKG_VERSION"))];
    all.add(gauge("info", "The stack and its device."), &labels, 1.0);
    sockets(&mut all, document);
    for drop in list(&document["drops"]) {
        let labels = [("reason", word(&drop["reason"])), ("layer", word(&drop["layer"]))];
        let family = counter("drops", "Packets dropped, by the reason.");
        all.add(family, &labels, number(&drop["packets"]));
    }
    for (name, value) in fields(&document["counters"]) {
        all.add(counter(name, "A counter of `fulmar stat --counters`."), &[], number(value));
    }
    for (name, value) in fields(&document["device"]) {
        if value.is_number() {
            let own = format!("device_{name}");
            let family = match name {
                "tx_held" => gauge(&own, "Sent frames that the device holds back."),
                _ => counter(&own, "A counter of the device."),
            };
            all.add(family, &[], number(value));
        }
    }
    pool(&mut all, &document["pool"]);
    stages(&mut all, &document["ledger"]);
    gateway(&mut all, &document["gateway"]);
    all.text()
}

/// Sockets and flows with their queues.
fn sockets(all: &mut Families, document: &Value) {
    all.add(gauge("time_wait", "Connections in TIME-WAIT."), &[], number(&document["time_wait"]));
    for (list_name, family, help) in [
        ("sockets", "sockets", "Sockets, by protocol and state."),
        ("flows", "gateway_flows", "Flows of the guest, by protocol, state and direction."),
    ] {
        let mut count: BTreeMap<[&str; 3], f64> = BTreeMap::new();
        let mut queued = BTreeMap::from([("receive", 0.0), ("send", 0.0)]);
        let sockets = list(&document[list_name]);
        for s in sockets {
            let labels = ["protocol", "state", "direction"].map(|field| word(&s[field]));
            // Flows come added up.
            *count.entry(labels).or_default() += s["count"].as_f64().unwrap_or(1.0);
            // Of a listener both are numbers of connections.
            if s["state"] != "LISTEN" {
                *queued.entry("receive").or_default() += number(&s["recv_queue_bytes"]);
                *queued.entry("send").or_default() += number(&s["send_queue_bytes"]);
            }
        }
        for ([protocol, state, direction], n) in count {
            let labels = [("protocol", protocol), ("state", state), ("direction", direction)];
            let used = if direction.is_empty() { 2 } else { 3 };
            all.add(gauge(family, help), &labels[..used], n);
        }
        for (queue, bytes) in queued.into_iter().filter(|_| !sockets.is_empty()) {
            let family = &*format!("{family}_queue_bytes");
            all.add(gauge(family, "Bytes that wait in the queues."), &[("queue", queue)], bytes);
        }
    }
}

fn pool(all: &mut Families, pool: &Value) {
    for (name, value) in fields(pool) {
        let is_level = name.ends_with("_bytes") || name.ends_with("_in_use");
        let kind = if is_level { GAUGE } else { COUNTER };
        let name = &*format!("pool_{name}");
        all.add(Metric { name, kind, help: "Buffers of the stack." }, &[], number(value));
    }
}

/// The account, if one is kept.
fn stages(all: &mut Families, ledger: &Value) {
    for stage in list(&ledger["stages"]) {
        let labels = [("stage", word(&stage["stage"])), ("layer", word(&stage["layer"]))];
        let family = counter("stage_seconds", "Time by stage of the account, extrapolated.");
        all.add(family, &labels, number(&stage["ns"]) / 1e9);
    }
}

fn gateway(all: &mut Families, gateway: &Value) {
    if !gateway.is_object() {
        return;
    }
    let seconds = |field: &str| number(&gateway[field]) / 1e6;
    let up = gauge("gateway_uptime_seconds", "Since the start of the gateway.");
    all.add(up, &[], seconds("uptime_us"));
    let cpu = counter("gateway_cpu_seconds", "CPU time of the gateway's process.");
    all.add(cpu, &[], seconds("cpu_us"));
    for protocol in ["tcp", "udp", "echo"] {
        let family = counter("gateway_flows_opened", "Flows since the start, by protocol.");
        let opened = number(&gateway[format!("{protocol}_flows")]);
        all.add(family, &[("protocol", protocol)], opened);
    }
    for direction in ["out", "in"] {
        let labels = [("direction", direction)];
        let bytes = counter("gateway_bytes", "Payload from the guest (out) and to it (in).");
        all.add(bytes, &labels, number(&gateway[format!("bytes_{direction}")]));
        let datagrams = counter("gateway_datagrams", "Datagrams from the guest and to it.");
        all.add(datagrams, &labels, number(&gateway[format!("datagrams_{direction}")]));
    }
    ports(all, &gateway["published"], &PUBLISHED);
    ports(all, &gateway["host_ports"], &TO_THE_HOST);
    for refusal in list(&gateway["refusals"]) {
        let family = counter("gateway_refusals", "What was not carried, by the reason.");
        all.add(family, &[("reason", word(&refusal["reason"]))], number(&refusal["count"]));
    }
    for (name, value) in fields(&gateway["spliced"]) {
        let name = format!("gateway_spliced_{name}");
        all.add(counter(&name, "Between the loopback interfaces."), &[], number(value));
    }
}

/// Ports of one side that lead to the other one.
struct Ports {
    /// The field of the port to which they lead.
    to: &'static str,
    connections: [&'static str; 2],
    refused: [&'static str; 2],
}

const PUBLISHED: Ports = Ports {
    to: "guest_port",
    connections: [
        "gateway_published_connections",
        "Clients of published ports: connections accepted, flows of datagrams begun.",
    ],
    refused: [
        "gateway_published_refused",
        "Connections to published ports that the guest did not get, and datagrams.",
    ],
};

const TO_THE_HOST: Ports = Ports {
    to: "host_port",
    connections: [
        "gateway_host_port_connections",
        "Clients of ports of the guest's loopback: connections accepted, flows of datagrams begun.",
    ],
    refused: [
        "gateway_host_port_refused",
        "Connections to ports of the guest's loopback that the host did not get, and datagrams.",
    ],
};

/// Each port. A range of ports is listed to which nothing came: its ports have metrics from their first client on.
fn ports(all: &mut Families, list_of_all: &Value, kind: &Ports) {
    for port in list(list_of_all).iter().filter(|p| p["port"] == p["last_port"]) {
        let (address, numbers) =
            (bound_address(port), ["port", kind.to].map(|f| port[f].to_string()));
        let labels = [
            ("protocol", word(&port["protocol"])),
            ("address", &*address),
            ("port", &*numbers[0]),
            (kind.to, &*numbers[1]),
        ];
        for ([name, help], field) in [(kind.connections, "connections"), (kind.refused, "refused")]
        {
            all.add(counter(name, help), &labels, number(&port[field]));
        }
    }
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

fn fields(value: &Value) -> impl Iterator<Item = (&str, &Value)> {
    value.as_object().into_iter().flat_map(Map::iter).map(|(name, value)| (name.as_str(), value))
}

fn word(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// A number; what is absent counts as none.
fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::collections::HashSet;

    fn document() -> Value {
        json!({
            "name": "a\"b\\\n", "time_wait": 1, "device": {"name": "eth0", "tx_frames": 3},
            "sockets": [{"protocol": "tcp", "state": "LISTEN", "recv_queue_bytes": 9, "send_queue_bytes": 9}],
            "flows": [
                {"protocol": "tcp", "state": "open", "direction": "out", "recv_queue_bytes": 2, "send_queue_bytes": 3},
                {"protocol": "tcp", "state": "open", "direction": "out", "recv_queue_bytes": 1, "send_queue_bytes": null},
            ],
            "drops": [{"reason": "tcp_paws", "layer": "tcp", "packets": 4}],
            "counters": {"rx_frames": 5, "tx_frames": 6},
            "pool": {"budget_bytes": 7, "allocs": 8},
            "ledger": {"stages": [{"stage": "locked", "layer": "lock", "ns": 5e8}]},
            "gateway": {"uptime_us": 2_500_000, "cpu_us": 1000, "tcp_flows": 10, "bytes_out": 11,
                        "published": [
                            {"protocol": "udp", "address": null, "interface": "eth0", "port": 53, "last_port": 53,
                             "guest_port": 5353, "connections": 14, "refused": 15},
                            {"protocol": "tcp", "address": null, "port": 1, "last_port": 52, "guest_port": 1},
                        ],
                        "host_ports": [
                            {"protocol": "tcp", "address": null, "interface": "lo", "port": 80, "last_port": 80,
                             "host_port": 8080, "connections": 17, "refused": 18},
                        ],
                        "refusals": [{"reason": "policy", "count": 12}], "spliced": {"connections": 13}},
        })
    }

    #[test]
    fn the_numbers_are_those_of_stat() {
        let text = exposition(&document());
        for line in [
            r#"fulmar_info{name="a\"b\\\n",device="eth0",version="0.1.0"} 1"#,
            r#"fulmar_sockets{protocol="tcp",state="LISTEN"} 1"#,
            r#"fulmar_sockets_queue_bytes{queue="receive"} 0"#,
            r#"fulmar_gateway_flows{protocol="tcp",state="open",direction="out"} 2"#,
            r#"fulmar_gateway_flows_queue_bytes{queue="receive"} 3"#,
            r#"fulmar_drops_total{reason="tcp_paws",layer="tcp"} 4"#,
            "fulmar_rx_frames_total 5",
            "fulmar_device_tx_frames_total 3",
            "fulmar_pool_budget_bytes 7",
            "fulmar_pool_allocs_total 8",
            r#"fulmar_stage_seconds_total{stage="locked",layer="lock"} 0.5"#,
            "fulmar_gateway_uptime_seconds 2.5",
            "fulmar_gateway_cpu_seconds_total 0.001",
            r#"fulmar_gateway_flows_opened_total{protocol="tcp"} 10"#,
            r#"fulmar_gateway_bytes_total{direction="out"} 11"#,
            r#"fulmar_gateway_refusals_total{reason="policy"} 12"#,
            r#"fulmar_gateway_published_connections_total{protocol="udp",address="*%eth0",port="53",guest_port="5353"} 14"#,
            r#"fulmar_gateway_published_refused_total{protocol="udp",address="*%eth0",port="53",guest_port="5353"} 15"#,
            r#"fulmar_gateway_host_port_connections_total{protocol="tcp",address="*%lo",port="80",host_port="8080"} 17"#,
            r#"fulmar_gateway_host_port_refused_total{protocol="tcp",address="*%lo",port="80",host_port="8080"} 18"#,
            "fulmar_gateway_spliced_connections_total 13",
        ] {
            assert!(text.lines().any(|l| l == line), "{line}\n{text}");
        }
        assert!(!text.contains(r#"port="1""#), "a range has no metrics");
    }

    #[test]
    fn each_family_is_declared_once_before_its_samples() {
        let text = exposition(&document());
        let (mut declared, mut last) = (HashSet::new(), String::new());
        for line in text.lines() {
            let mut words = line.split([' ', '{']);
            match line.strip_prefix("# TYPE ").map(|rest| rest.split(' ').next().unwrap()) {
                Some(name) => {
                    assert!(declared.insert(name.to_owned()), "{name} twice");
                    last = name.to_owned();
                }
                None if line.starts_with('#') => {}
                None => assert_eq!(words.next(), Some(last.as_str()), "{line}"),
            }
        }
        assert!(text.ends_with('\n'));
    }

    #[test]
    fn a_stack_has_no_metrics_of_a_gateway() {
        let text = exposition(&json!({"counters": {"rx_frames": 1}}));
        assert!(text.contains("fulmar_rx_frames_total 1") && !text.contains("gateway"), "{text}");
    }
}
