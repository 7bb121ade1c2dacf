//! A gateway's document for `fulmar stat`: the document of its stack with the figures of a gateway.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use fulmar::stat::{Connection, Document, Flow, Gateway, Guest, Port, Refusal, Spliced};
use fulmar_gateway::attach::Target;
use fulmar_gateway::guest::GuestNetwork;
use fulmar_gateway::published::PublishedStat;
use fulmar_gateway::splice::{Counters, Splicer};
use fulmar_gateway::stat::{FlowStat, Refusal as Reason, Stat};
use nix::time::{ClockId, clock_gettime};
use serde::{Serialize, Serializer};

use super::plan::{self, Plan};

/// Constant properties of a gateway.
pub struct About {
    name: String,
    /// Inode of the network namespace of the host's sockets.
    network_namespace: Option<u64>,
    guest: Guest,
    /// The thread of the guest, whose own ports are the host's, and the thread of the host.
    splicers: [Option<Splicer>; 2],
}

/// A document with its flows. A flow is converted when it is written: of ten thousand only the text is in memory.
#[derive(Serialize)]
struct WithFlows<'a> {
    #[serde(flatten)]
    document: &'a Document,
    #[serde(serialize_with = "write_flows")]
    flows: &'a [FlowStat],
}

fn write_flows<S: Serializer>(flows: &[FlowStat], to: S) -> Result<S::Ok, S::Error> {
    to.collect_seq(flows.iter().map(flow))
}

impl About {
    /// Of a gateway that is being set up. `host` and `guest` are the inodes of the network namespaces.
    pub fn new(
        plan: &Plan,
        target: &Target,
        network: &GuestNetwork,
        [host, guest]: [Option<u64>; 2],
        splicers: [Option<Splicer>; 2],
    ) -> About {
        let mut about = Guest::default();
        match target {
            Target::Process { pid, .. } => about.pid = Some(*pid),
            Target::Path { netns, .. } => about.path = Some(netns.display().to_string()),
        }
        about.network_namespace = guest;
        about.interface.clone_from(&network.name);
        about.addresses = network.addresses.iter().map(|(a, n)| format!("{a}/{n}")).collect();
        About { name: name_of(plan, target), network_namespace: host, guest: about, splicers }
    }

    /// The document as text. `None`: it cannot be written.
    pub fn text(&self, stat: Stat) -> Option<String> {
        let (document, flows) = self.document(stat);
        serde_json::to_string(&WithFlows { document: &document, flows: &flows }).ok()
    }

    /// The document without its flows, and the flows: of sixty thousand the whole document would have more bytes than
    /// the gateway may have for its packets.
    pub fn document(&self, stat: Stat) -> (Document, Vec<FlowStat>) {
        let gateway = self.gateway(&stat);
        let Stat { queues, flows, stack, account, .. } = stat;
        let stack = fulmar::stat::Stat {
            name: self.name.clone(),
            network_namespace: self.network_namespace,
            shards: queues,
            shard: stack,
            account,
        };
        let mut document = stack.document();
        document.gateway = Some(gateway);
        (document, flows)
    }

    fn gateway(&self, stat: &Stat) -> Gateway {
        let cpu = clock_gettime(ClockId::CLOCK_PROCESS_CPUTIME_ID).ok().map(Duration::from);
        let [spliced, host_ports] =
            self.splicers.each_ref().map(|splicer| splicer.iter().flat_map(Splicer::published));
        let mut all = Gateway::default();
        all.guest = self.guest.clone();
        all.uptime_us = micros(stat.uptime);
        all.cpu_us = cpu.map(micros);
        all.tcp_flows = stat.totals.tcp_flows;
        all.udp_flows = stat.totals.udp_flows;
        all.echo_flows = stat.totals.echo_flows;
        all.bytes_out = stat.totals.bytes_out;
        all.bytes_in = stat.totals.bytes_in;
        all.datagrams_out = stat.totals.datagrams_out;
        all.datagrams_in = stat.totals.datagrams_in;
        all.published =
            stat.published.iter().cloned().chain(spliced).map(|p| published(&p)).collect();
        all.host_ports = host_ports.map(|port| to_the_host(&port)).collect();
        let count = |why| refusal(why, stat.totals.refusals.value(why));
        all.refusals = Reason::ALL.iter().copied().map(count).collect();
        all.spliced = self.spliced();
        all
    }

    /// Connections between the loopback interfaces.
    fn spliced(&self) -> Spliced {
        let sum = |of: fn(&Counters) -> &AtomicU64| -> u64 {
            self.splicers.iter().flatten().map(|splicer| of(splicer.counters()).load(Relaxed)).sum()
        };
        let mut all = Spliced::default();
        all.connections = sum(|c| &c.connections);
        all.refused = sum(|c| &c.refused);
        all.dropped = sum(|c| &c.dropped);
        all.bytes_there = sum(|c| &c.bytes_there);
        all.bytes_back = sum(|c| &c.bytes_back);
        all.datagrams_there = sum(|c| &c.datagrams_there);
        all.datagrams_back = sum(|c| &c.datagrams_back);
        all.datagrams_lost = sum(|c| &c.datagrams_lost);
        all.displaced = sum(|c| &c.displaced);
        all
    }
}

/// The name of the program, of the process or of the namespace's file.
fn name_of(plan: &Plan, target: &Target) -> String {
    let file_name = |path: &Path| path.file_name().map(|n| n.to_string_lossy().into_owned());
    let of_program = match &plan.guest {
        plan::Guest::Program(command) => {
            command.first().and_then(|program| file_name(program.as_ref()))
        }
        plan::Guest::Existing(_) => None,
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

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

fn refusal(why: Reason, count: u64) -> Refusal {
    let mut refusal = Refusal::default();
    refusal.reason = why.name().into();
    refusal.count = count;
    refusal.sentence = why.sentence().trim().into();
    refusal
}

fn flow(f: &FlowStat) -> Flow {
    let mut flow = Flow::default();
    flow.protocol = f.protocol.name().into();
    flow.direction = f.direction.name().into();
    flow.state = f.state.into();
    flow.guest = Some(f.guest);
    flow.peer = Some(f.peer);
    flow.host = Some(f.host);
    flow.bytes_out = f.bytes_out;
    flow.bytes_in = f.bytes_in;
    flow.age_us = micros(f.age);
    flow.idle_us = micros(f.idle);
    flow.recv_queue_bytes = f.tcp.as_ref().map(|t| t.recv_queue_bytes);
    flow.send_queue_bytes = f.tcp.as_ref().map(|t| t.send_queue_bytes);
    flow.tcp = f.tcp.as_ref().map(Connection::from);
    flow.host_rtt_us = f.host_tcp.map(|host| micros(host.rtt));
    flow.host_retransmits = f.host_tcp.map(|host| host.retransmits);
    flow.host_in_flight_pkts = f.host_tcp.map(|host| host.in_flight_pkts);
    flow.host_unsent_bytes = f.host_tcp.map(|host| host.unsent_bytes);
    flow
}

/// A port of the host that leads to the guest; several in one place to which nothing came.
fn published(ports: &PublishedStat) -> Port {
    let mut port = bound(ports);
    (port.guest_port, port.last_guest_port) = (Some(ports.to), Some(ports.last_to()));
    port
}

/// The same of a port of the guest that leads to the host.
fn to_the_host(ports: &PublishedStat) -> Port {
    let mut port = bound(ports);
    (port.host_port, port.last_host_port) = (Some(ports.to), Some(ports.last_to()));
    port
}

fn bound(ports: &PublishedStat) -> Port {
    let mut port = Port::default();
    port.protocol = ports.protocol.name().into();
    port.address = ports.bind.address;
    port.interface.clone_from(&ports.bind.interface);
    (port.port, port.last_port) = (*ports.from.start(), *ports.from.end());
    (port.connections, port.refused) = (ports.connections, ports.refused);
    port
}

#[cfg(test)]
mod tests {
    use super::*;
    use fulmar_gateway::policy::Protocol;
    use fulmar_gateway::ports::Bind;
    use fulmar_gateway::stat::{Direction, HostTcp};
    use serde_json::{Value, json};

    #[test]
    fn a_published_port_says_where_it_is_bound_and_leads() {
        let bind = Bind { address: Some([127, 0, 0, 1].into()), interface: None };
        let ports = PublishedStat {
            protocol: Protocol::Tcp,
            bind,
            from: 8080..=8081,
            to_address: None,
            to: 80,
            connections: 0,
            refused: 0,
        };
        let expected = json!({
            "protocol": "tcp", "address": "127.0.0.1", "interface": null, "port": 8080, "last_port": 8081,
            "guest_port": 80, "last_guest_port": 81, "connections": 0, "refused": 0,
        });
        assert_eq!(json!(published(&ports)), expected);
        let to_host = to_the_host(&ports);
        assert_eq!((to_host.host_port, to_host.last_host_port), (Some(80), Some(81)));
        assert_eq!(to_host.guest_port, None);
        let anywhere = PublishedStat { bind: Bind::default(), ..ports };
        assert_eq!(published(&anywhere).address, None);
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
            id: Some(1),
            rule: None,
            protocol: Protocol::Tcp,
            direction: Direction::Out,
            guest: at("10.0.0.2:1000"),
            peer: at("10.0.0.1:80"),
            host: at("127.0.0.1:80"),
            name: None,
            state: "open",
            bytes_out: 7,
            bytes_in: 8,
            age: Duration::from_secs(2),
            idle: Duration::from_micros(1),
            tcp: None,
            host_tcp: Some(host_tcp),
        };
        let flows = [tcp.clone(), FlowStat { protocol: Protocol::Udp, host_tcp: None, ..tcp }];
        let with = WithFlows { document: &Document::default(), flows: &flows };
        let text = serde_json::to_string(&with).unwrap();
        let value = &serde_json::from_str::<Value>(&text).unwrap()["flows"][0];
        assert_eq!(value["guest"], "10.0.0.2:1000");
        assert_eq!(value["host"], "127.0.0.1:80");
        assert_eq!((&value["age_us"], &value["bytes_in"]), (&json!(2_000_000), &json!(8)));
        assert_eq!(value["host_rtt_us"], 12_000);
        let read: Document = serde_json::from_str(&text).unwrap();
        assert_eq!(read.flows, flows.each_ref().map(flow));
        assert_eq!((read.flows[1].host_rtt_us, read.flows[1].send_queue_bytes), (None, None));
    }
}
