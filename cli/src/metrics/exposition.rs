//! The document of a stack or gateway as metrics. Names and numbers agree with `fulmar stat --json`. By Prometheus's
//! convention, counters end in `_total` and times are in seconds.
//!
//! Flows are summed by protocol and state: a metric for each flow would grow without bound on the reader's side.

use crate::stat::{bound_address, named};
use fulmar::stat::{Document, Gateway, Port, Socket};
use fulmar_gateway::stat::FlowStat;
use serde::Serialize;
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

/// A document as text, with the flows of a gateway, which are added up.
pub fn exposition(document: &Document, flows: &[FlowStat]) -> String {
    let mut all = Families::default();
    let labels = [
        ("name", &*document.name),
        ("device", &*document.device.name),
        ("version", env!("CARGO_PKG_VERSION")),
    ];
    all.add(gauge("info", "The stack and its device."), &labels, 1.0);
    all.add(gauge("time_wait", "Connections in TIME-WAIT."), &[], document.time_wait as f64);
    sockets(&mut all, &document.sockets);
    listeners(&mut all, &document.sockets);
    flows_of(&mut all, flows);
    for drop in &document.drops {
        let family = counter("drops", "Packets dropped, by reason.");
        all.add(family, &[("reason", &drop.reason), ("layer", &drop.layer)], drop.packets as f64);
    }
    for (name, value) in &document.counters {
        all.add(counter(name, "A counter of `fulmar stat --counters`."), &[], *value as f64);
    }
    for (name, value) in numbers(&document.device) {
        let own = format!("device_{name}");
        let family = match name.as_str() {
            "tx_held" => gauge(&own, "Sent frames not yet released by the device."),
            _ => counter(&own, "A counter of the device."),
        };
        all.add(family, &[], value);
    }
    for (name, value) in numbers(&document.pool) {
        let is_level = name.ends_with("_bytes") || name.ends_with("_in_use");
        let kind = if is_level { GAUGE } else { COUNTER };
        let name = &*format!("pool_{name}");
        all.add(Metric { name, kind, help: "Buffers of the stack." }, &[], value);
    }
    for stage in document.ledger.iter().flat_map(|ledger| &ledger.stages) {
        let family =
            counter("stage_seconds", "CPU time by stage, extrapolated from the sampled calls.");
        all.add(family, &[("stage", &stage.stage), ("layer", &stage.layer)], stage.ns / 1e9);
    }
    if let Some(gateway) = &document.gateway {
        of_gateway(&mut all, gateway);
    }
    all.text()
}

/// The numbers of a part of a document by their names.
fn numbers<T: Serialize>(part: &T) -> impl Iterator<Item = (String, f64)> {
    named(part).into_iter().filter_map(|(name, value)| Some((name, value.as_f64()?)))
}

/// Sockets with their queues.
fn sockets(all: &mut Families, sockets: &[Socket]) {
    let mut count: BTreeMap<[&str; 2], f64> = BTreeMap::new();
    for s in sockets {
        *count.entry([&s.protocol, &s.state]).or_default() += 1.0;
    }
    for ([protocol, state], n) in count {
        let family = gauge("sockets", "Sockets, by protocol and state.");
        all.add(family, &[("protocol", protocol), ("state", state)], n);
    }
    // Of a listener both are numbers of connections.
    let queued = sockets.iter().filter(|s| s.state != "LISTEN");
    let queued = queued.map(|s| [s.recv_queue_bytes, s.send_queue_bytes]);
    queues(all, "sockets_queue_bytes", sockets.is_empty(), queued);
}

/// The flows of a gateway with their queues.
fn flows_of(all: &mut Families, flows: &[FlowStat]) {
    let mut count: BTreeMap<[&str; 3], f64> = BTreeMap::new();
    for f in flows {
        *count.entry([f.protocol.name(), f.state, f.direction.name()]).or_default() += 1.0;
    }
    for ([protocol, state, direction], n) in count {
        let labels = [("protocol", protocol), ("state", state), ("direction", direction)];
        let help = "Flows of the guest, by protocol, state and direction.";
        all.add(gauge("gateway_flows", help), &labels, n);
    }
    let tcp = flows.iter().filter_map(|f| f.tcp.as_ref());
    let queued = tcp.map(|tcp| [tcp.recv_queue_bytes, tcp.send_queue_bytes]);
    queues(all, "gateway_flows_queue_bytes", flows.is_empty(), queued);
}

fn queues(
    all: &mut Families,
    name: &str,
    is_empty: bool,
    queued: impl Iterator<Item = [usize; 2]>,
) {
    if is_empty {
        return;
    }
    let [receive, send] = queued.fold([0, 0], |[a, b], [receive, send]| [a + receive, b + send]);
    for (queue, bytes) in [("receive", receive), ("send", send)] {
        let family = gauge(name, "Bytes in the queues.");
        all.add(family, &[("queue", queue)], bytes as f64);
    }
}

/// The numbers of all listeners together.
fn listeners(all: &mut Families, sockets: &[Socket]) {
    const LEVELS: [&str; 4] = ["embryos", "accept_queue", "pending", "fast_open_pending"];
    let mut sums: BTreeMap<String, f64> = BTreeMap::new();
    for (name, value) in sockets.iter().flat_map(|s| &s.listener).flat_map(numbers) {
        *sums.entry(name).or_default() += value;
    }
    for (name, value) in sums {
        let is_level = LEVELS.contains(&&*name) || name.ends_with("_limit");
        let kind = if is_level { GAUGE } else { COUNTER };
        let name = &*format!("listeners_{name}");
        all.add(Metric { name, kind, help: "All listeners together." }, &[], value);
    }
}

fn of_gateway(all: &mut Families, gateway: &Gateway) {
    let up = gauge("gateway_uptime_seconds", "Since the start of the gateway.");
    all.add(up, &[], gateway.uptime_us as f64 / 1e6);
    let cpu = counter("gateway_cpu_seconds", "CPU time of the gateway's process.");
    all.add(cpu, &[], gateway.cpu_us.unwrap_or(0) as f64 / 1e6);
    for (protocol, opened) in
        [("tcp", gateway.tcp_flows), ("udp", gateway.udp_flows), ("echo", gateway.echo_flows)]
    {
        let family = counter("gateway_flows_opened", "Flows since the start, by protocol.");
        all.add(family, &[("protocol", protocol)], opened as f64);
    }
    for (direction, bytes, datagrams) in [
        ("out", gateway.bytes_out, gateway.datagrams_out),
        ("in", gateway.bytes_in, gateway.datagrams_in),
    ] {
        let labels = [("direction", direction)];
        let family = counter("gateway_bytes", "Payload from the guest (out) and to it (in).");
        all.add(family, &labels, bytes as f64);
        let family = counter("gateway_datagrams", "Datagrams from the guest (out) and to it (in).");
        all.add(family, &labels, datagrams as f64);
    }
    ports(all, &gateway.published, &PUBLISHED);
    ports(all, &gateway.host_ports, &TO_THE_HOST);
    for refusal in &gateway.refusals {
        let family = counter("gateway_refusals", "Traffic that was not carried, by reason.");
        all.add(family, &[("reason", &refusal.reason)], refusal.count as f64);
    }
    for (name, value) in numbers(&gateway.spliced) {
        let name = format!("gateway_spliced_{name}");
        all.add(counter(&name, "Between the loopback interfaces."), &[], value);
    }
}

/// Ports of one side that lead to the other one.
struct Ports {
    /// The label of the port to which they lead.
    to: &'static str,
    connections: [&'static str; 2],
    refused: [&'static str; 2],
}

const PUBLISHED: Ports = Ports {
    to: "guest_port",
    connections: [
        "gateway_published_connections",
        "Clients of published ports: accepted connections and new datagram flows.",
    ],
    refused: [
        "gateway_published_refused",
        "Connections and datagrams to published ports that were not delivered to the guest.",
    ],
};

const TO_THE_HOST: Ports = Ports {
    to: "host_port",
    connections: [
        "gateway_host_port_connections",
        "Clients of ports on the guest's loopback interface: accepted connections and new datagram flows.",
    ],
    refused: [
        "gateway_host_port_refused",
        "Connections and datagrams to ports on the guest's loopback interface that were not delivered to the host.",
    ],
};

/// Each port. A range of ports is listed to which nothing came: its ports have metrics from their first client on.
fn ports(all: &mut Families, ports: &[Port], kind: &Ports) {
    for port in ports.iter().filter(|p| p.port == p.last_port) {
        let to = port.guest_port.or(port.host_port).unwrap_or(0).to_string();
        let (address, from) = (bound_address(port), port.port.to_string());
        let labels =
            [("protocol", &*port.protocol), ("address", &address), ("port", &from), (kind.to, &to)];
        for ([name, help], n) in
            [(kind.connections, port.connections), (kind.refused, port.refused)]
        {
            all.add(counter(name, help), &labels, n as f64);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fulmar_gateway::policy::Protocol;
    use fulmar_gateway::stat::Direction;
    use serde_json::json;
    use std::collections::HashSet;
    use std::time::Duration;

    fn document() -> Document {
        let written = json!({
            "name": "a\"b\\\n", "time_wait": 1, "device": {"name": "eth0", "tx_frames": 3, "tx_held": 2, "rx_missed": 1},
            "sockets": [{"protocol": "tcp", "state": "LISTEN", "recv_queue_bytes": 9, "send_queue_bytes": 9,
                         "pending": 4, "pending_limit": 5, "pending_expired": 6, "pending_reset": 7},
                        {"protocol": "tcp", "state": "LISTEN", "pending_reset": 1},
                        {"protocol": "udp", "state": "UNCONNECTED", "recv_queue_bytes": 8}],
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
        });
        serde_json::from_value(written).unwrap()
    }

    fn flow(direction: Direction) -> FlowStat {
        let at = "10.0.0.2:1000".parse().unwrap();
        FlowStat {
            id: Some(1),
            rule: None,
            protocol: Protocol::Udp,
            direction,
            guest: at,
            peer: at,
            host: at,
            name: None,
            state: "open",
            bytes_out: 7,
            bytes_in: 8,
            age: Duration::from_secs(2),
            idle: Duration::from_secs(1),
            tcp: None,
            host_tcp: None,
        }
    }

    #[test]
    fn the_numbers_are_those_of_stat() {
        let mut flows = vec![flow(Direction::Out); 60_000];
        flows.push(flow(Direction::In));
        let text = exposition(&document(), &flows);
        for line in [
            r#"fulmar_info{name="a\"b\\\n",device="eth0",version="0.1.0"} 1"#,
            r#"fulmar_sockets{protocol="tcp",state="LISTEN"} 2"#,
            r#"fulmar_sockets_queue_bytes{queue="receive"} 8"#,
            "fulmar_listeners_pending 4",
            "fulmar_listeners_pending_limit 5",
            "fulmar_listeners_pending_expired_total 6",
            "fulmar_listeners_pending_reset_total 8",
            r#"fulmar_gateway_flows{protocol="udp",state="open",direction="out"} 60000"#,
            r#"fulmar_gateway_flows{protocol="udp",state="open",direction="in"} 1"#,
            r#"fulmar_gateway_flows_queue_bytes{queue="receive"} 0"#,
            r#"fulmar_drops_total{reason="tcp_paws",layer="tcp"} 4"#,
            "fulmar_rx_frames_total 5",
            "fulmar_device_tx_frames_total 3",
            "fulmar_device_tx_held 2",
            "fulmar_device_rx_missed_total 1",
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
        let text = exposition(&document(), &[flow(Direction::Out)]);
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
        let mut stack = document();
        stack.gateway = None;
        let text = exposition(&stack, &[]);
        assert!(text.contains("fulmar_rx_frames_total 5") && !text.contains("gateway"), "{text}");
    }
}
