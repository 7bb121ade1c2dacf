//! A gateway's document for `fulmar stat`: that of a stack, and what a gateway adds.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use fulmar::connection_json;
use fulmar_gateway::attach::Target;
use fulmar_gateway::guest::GuestNetwork;
use fulmar_gateway::published::PublishedStat;
use fulmar_gateway::splice::{Counters, Splicer};
use fulmar_gateway::stat::{Direction, FlowStat, HostTcp, Refusal, Stat, Totals};
use nix::time::{ClockId, clock_gettime};
use serde_json::{Map, Value, json};

use super::plan::{Guest, Plan};

/// What does not change in the life of a gateway.
pub struct About {
    name: String,
    /// Inode of the network namespace of the host's sockets.
    network_namespace: Option<u64>,
    guest: Value,
    splicers: Vec<Splicer>,
}

impl About {
    /// Of a gateway that is being set up. `host` and `guest` are the inodes of the network namespaces.
    pub fn new(
        plan: &Plan,
        target: &Target,
        network: &GuestNetwork,
        [host, guest]: [Option<u64>; 2],
        splicers: Vec<Splicer>,
    ) -> About {
        let (pid, path) = match target {
            Target::Process { pid, .. } => (Some(pid), None),
            Target::Path { netns, .. } => (None, Some(netns.display().to_string())),
        };
        let addresses = network.addresses.iter().map(|(a, length)| format!("{a}/{length}"));
        let guest = json!({
            "pid": pid,
            "path": path,
            "network_namespace": guest,
            "interface": network.name,
            "addresses": addresses.collect::<Vec<_>>(),
        });
        About { name: name_of(plan, target), network_namespace: host, guest, splicers }
    }

    /// The document for metrics: of the flows their numbers, by protocol, direction and state. Of sixty thousand flows
    /// the whole document would have more bytes than the gateway may have for its packets.
    pub fn totals(&self, stat: Stat) -> Value {
        let flows = sums_of(&stat.flows);
        let mut document = self.without_flows(stat).0;
        document["flows"] = flows;
        document
    }

    /// The document as text. A flow is written when it is described: of ten thousand only the text is in memory.
    pub fn document(&self, stat: Stat) -> String {
        let (document, flows) = self.without_flows(stat);
        with_array(document.to_string(), "flows", flows.iter().map(flow))
    }

    fn without_flows(&self, stat: Stat) -> (Value, Vec<FlowStat>) {
        let gateway = self.gateway(&stat);
        let Stat { queues, flows, stack, balance, .. } = stat;
        let stack = fulmar::Stat {
            name: self.name.clone(),
            network_namespace: self.network_namespace,
            shards: queues,
            shard: stack,
            ledger: balance,
        };
        let mut document = stack.to_value();
        document["gateway"] = gateway;
        (document, flows)
    }

    fn gateway(&self, stat: &Stat) -> Value {
        let cpu: Option<Duration> =
            clock_gettime(ClockId::CLOCK_PROCESS_CPUTIME_ID).ok().map(Duration::from);
        let Totals { tcp_flows, udp_flows, echo_flows, .. } = stat.totals;
        let Totals { bytes_out, bytes_in, datagrams_out, datagrams_in, .. } = stat.totals;
        // Those of the guest's loopback interface.
        let host_ports: Vec<_> = self.splicers.iter().flat_map(Splicer::published).collect();
        let refusals = Refusal::ALL.iter().map(|why| {
            json!({"reason": why.name(), "count": stat.totals.refusals.value(*why),
                   "sentence": why.sentence().trim()})
        });
        json!({
            "guest": self.guest,
            "uptime_us": micros(stat.uptime),
            "cpu_us": cpu.map(micros),
            "tcp_flows": tcp_flows,
            "udp_flows": udp_flows,
            "echo_flows": echo_flows,
            "bytes_out": bytes_out,
            "bytes_in": bytes_in,
            "datagrams_out": datagrams_out,
            "datagrams_in": datagrams_in,
            "published": ports(stat.published.iter(), "guest"),
            "host_ports": ports(host_ports.iter(), "host"),
            "refusals": refusals.collect::<Vec<_>>(),
            "spliced": self.spliced(),
        })
    }

    /// Connections between the loopback interfaces.
    fn spliced(&self) -> Value {
        let sum = |of: fn(&Counters) -> &AtomicU64| -> u64 {
            self.splicers.iter().map(|splicer| of(splicer.counters()).load(Relaxed)).sum()
        };
        json!({
            "connections": sum(|c| &c.connections),
            "refused": sum(|c| &c.refused),
            "dropped": sum(|c| &c.dropped),
            "bytes_there": sum(|c| &c.bytes_there),
            "bytes_back": sum(|c| &c.bytes_back),
            "datagrams_there": sum(|c| &c.datagrams_there),
            "datagrams_back": sum(|c| &c.datagrams_back),
            "datagrams_lost": sum(|c| &c.datagrams_lost),
            "displaced": sum(|c| &c.displaced),
        })
    }
}

/// The name of the program, of the process or of the namespace's file.
fn name_of(plan: &Plan, target: &Target) -> String {
    let file_name = |path: &Path| path.file_name().map(|n| n.to_string_lossy().into_owned());
    let of_program = match &plan.guest {
        Guest::Program(command) => command.first().and_then(|program| file_name(program.as_ref())),
        Guest::Existing(_) => None,
    };
    let name = of_program.or_else(|| match target {
        Target::Process { pid, .. } => {
            let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).ok()?;
            Some(name.trim_end().to_owned())
        }
        Target::Path { netns, .. } => file_name(netns),
    });
    name.unwrap_or_else(|| "gateway".to_owned())
}

/// An object of JSON with an array more.
fn with_array(mut object: String, name: &str, all: impl Iterator<Item = Value>) -> String {
    object.pop();
    let _ = write!(object, ",\"{name}\":[");
    for (n, value) in all.enumerate() {
        let _ = write!(object, "{}{value}", if n == 0 { "" } else { "," });
    }
    object + "]}"
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

/// The numbers of flows and of their queued bytes, by protocol, direction and state.
fn sums_of(flows: &[FlowStat]) -> Value {
    let mut sums: BTreeMap<[&str; 3], [u64; 3]> = BTreeMap::new();
    for f in flows {
        let [count, received, sent] =
            sums.entry([f.protocol.name(), direction_of(f), f.state]).or_default();
        *count += 1;
        *received += f.tcp.as_ref().map_or(0, |t| t.recv_queue_bytes as u64);
        *sent += f.tcp.as_ref().map_or(0, |t| t.send_queue_bytes as u64);
    }
    let sum = |(what, numbers): ([&str; 3], [u64; 3])| {
        let ([protocol, direction, state], [count, received, sent]) = (what, numbers);
        json!({"protocol": protocol, "direction": direction, "state": state, "count": count,
               "recv_queue_bytes": received, "send_queue_bytes": sent})
    };
    sums.into_iter().map(sum).collect()
}

fn direction_of(f: &FlowStat) -> &'static str {
    match f.direction {
        Direction::Out => "out",
        Direction::In => "in",
    }
}

fn flow(f: &FlowStat) -> Value {
    let direction = direction_of(f);
    let mut value = json!({
        "protocol": f.protocol.name(),
        "direction": direction,
        "state": f.state,
        "guest": f.guest.to_string(),
        "peer": f.peer.to_string(),
        "host": f.host.to_string(),
        "bytes_out": f.bytes_out,
        "bytes_in": f.bytes_in,
        "age_us": micros(f.age),
        "idle_us": micros(f.idle),
        "recv_queue_bytes": f.tcp.as_ref().map(|t| t.recv_queue_bytes),
        "send_queue_bytes": f.tcp.as_ref().map(|t| t.send_queue_bytes),
    });
    if let Some(object) = value.as_object_mut() {
        object.extend(f.tcp.iter().flat_map(connection_json));
        object.extend(f.host_tcp.iter().flat_map(host_connection));
    }
    value
}

/// Published ports that lead to one side; several in one place to which nothing came.
fn ports<'a>(all: impl Iterator<Item = &'a PublishedStat>, to: &str) -> Value {
    let fields = |ports: &PublishedStat| {
        let mut value = json!({
            "protocol": ports.protocol.name(),
            "address": ports.bind.address.map(|a| a.to_string()),
            "interface": ports.bind.interface,
            "port": ports.from.start(),
            "last_port": ports.from.end(),
            "connections": ports.connections,
            "refused": ports.refused,
        });
        value[format!("{to}_port")] = json!(ports.to);
        value[format!("last_{to}_port")] = json!(ports.last_to());
        value
    };
    all.map(fields).collect()
}

fn host_connection(host: &HostTcp) -> Map<String, Value> {
    let fields = [
        ("host_rtt_us", json!(micros(host.rtt))),
        ("host_retransmits", json!(host.retransmits)),
        ("host_in_flight_pkts", json!(host.in_flight_pkts)),
        ("host_unsent_bytes", json!(host.unsent_bytes)),
    ];
    fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use fulmar_gateway::policy::Protocol;
    use fulmar_gateway::ports::Bind;

    #[test]
    fn arrays_are_appended_to_an_object() {
        let append = |values: Vec<Value>| {
            let text = with_array(json!({"a": {"b": 1}}).to_string(), "all", values.into_iter());
            serde_json::from_str::<Value>(&text).unwrap()
        };
        assert_eq!(append(vec![]), json!({"a": {"b": 1}, "all": []}));
        let two = vec![json!({"c": 2}), json!(3)];
        assert_eq!(append(two), json!({"a": {"b": 1}, "all": [{"c": 2}, 3]}));
    }

    #[test]
    fn metrics_have_the_numbers_of_the_flows_and_not_the_flows() {
        let at = |text: &str| text.parse().unwrap();
        let flow = |state, direction| FlowStat {
            protocol: Protocol::Udp,
            direction,
            guest: at("10.0.0.2:1000"),
            peer: at("10.0.0.1:80"),
            host: at("127.0.0.1:80"),
            state,
            bytes_out: 7,
            bytes_in: 8,
            age: Duration::from_secs(2),
            idle: Duration::from_secs(1),
            tcp: None,
            host_tcp: None,
        };
        let mut flows = vec![flow("open", Direction::Out); 60_000];
        flows.push(flow("open", Direction::In));
        let sums = sums_of(&flows);
        let expected = |direction, count| {
            json!({"protocol": "udp", "direction": direction, "state": "open", "count": count,
                   "recv_queue_bytes": 0, "send_queue_bytes": 0})
        };
        assert_eq!(sums, json!([expected("in", 1), expected("out", 60_000)]));
        let text = crate::metrics::exposition(&json!({"flows": sums}));
        let line = r#"fulmar_gateway_flows{protocol="udp",state="open",direction="out"} 60000"#;
        assert!(text.contains(line), "{text}");
    }

    #[test]
    fn a_published_port_says_where_it_is_bound_and_leads() {
        let bind = Bind { address: Some([127, 0, 0, 1].into()), interface: None };
        let ports = PublishedStat {
            protocol: Protocol::Tcp,
            bind,
            from: 8080..=8081,
            to: 80,
            connections: 0,
            refused: 0,
        };
        let expected = json!({
            "protocol": "tcp", "address": "127.0.0.1", "interface": null, "port": 8080, "last_port": 8081,
            "guest_port": 80, "last_guest_port": 81, "connections": 0, "refused": 0,
        });
        assert_eq!(super::ports([ports.clone()].iter(), "guest"), json!([expected]));
        let to_host = super::ports([ports.clone()].iter(), "host");
        assert_eq!([&to_host[0]["host_port"], &to_host[0]["last_host_port"]], [80, 81]);
        let anywhere = PublishedStat { bind: Bind::default(), ..ports };
        assert_eq!(super::ports([anywhere].iter(), "guest")[0]["address"], Value::Null);
    }

    #[test]
    fn a_flow_has_both_ends_and_what_each_connection_says() {
        let at = |text: &str| text.parse().unwrap();
        let host_tcp = HostTcp {
            rtt: Duration::from_millis(12),
            retransmits: 3,
            in_flight_pkts: 4,
            unsent_bytes: 5,
        };
        let tcp = FlowStat {
            protocol: Protocol::Tcp,
            direction: Direction::Out,
            guest: at("10.0.0.2:1000"),
            peer: at("10.0.0.1:80"),
            host: at("127.0.0.1:80"),
            state: "open",
            bytes_out: 7,
            bytes_in: 8,
            age: Duration::from_secs(2),
            idle: Duration::from_micros(1),
            tcp: None,
            host_tcp: Some(host_tcp),
        };
        let value = flow(&tcp);
        assert_eq!(value["guest"], "10.0.0.2:1000");
        assert_eq!(value["host"], "127.0.0.1:80");
        assert_eq!((&value["age_us"], &value["bytes_in"]), (&json!(2_000_000), &json!(8)));
        assert_eq!(value["host_rtt_us"], 12_000);
        let udp = flow(&FlowStat { protocol: Protocol::Udp, host_tcp: None, ..tcp });
        assert!(udp.get("host_rtt_us").is_none() && udp["send_queue_bytes"].is_null());
    }
}
