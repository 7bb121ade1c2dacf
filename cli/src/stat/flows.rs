//! The parts of a gateway's document that a stack's document does not have.

use super::with_details;
use crate::format;
use fulmar::stat::{Document, Flow, Gateway, Port, Refusal};
use std::collections::BTreeMap;

/// The columns of a flow: both ends as guest and host know them.
const COLUMNS: [(&str, &str); 7] = [
    ("protocol", "Netid"),
    ("direction", "Dir"),
    ("state", "State"),
    ("recv_queue_bytes", "Recv-Q"),
    ("send_queue_bytes", "Send-Q"),
    ("guest", "Guest Address:Port"),
    ("host", "Host Address:Port"),
];

/// The flows, a line of columns each and the rest below.
pub fn table_of(flows: &[Flow]) -> String {
    let mut flows = flows.to_vec();
    // What differs only where an address is mapped.
    flows.iter_mut().filter(|f| f.peer == f.host).for_each(|f| f.peer = None);
    with_details(&flows, &COLUMNS)
}

/// The published ports: where they are bound, where in the guest they lead and what came to them.
pub fn published(ports: &[Port]) -> String {
    ports_table(ports, ["Host Address:Port", "Guest Port"])
}

/// The same of ports of the guest's loopback interface, which lead to the host's.
pub fn host_ports(ports: &[Port]) -> String {
    ports_table(ports, ["Guest Address:Port", "Host Port"])
}

fn ports_table(ports: &[Port], [from, to]: [&str; 2]) -> String {
    if ports.is_empty() {
        return String::new();
    }
    let cells = |p: &Port| {
        let leads_to = range(p.guest_port.or(p.host_port), p.last_guest_port.or(p.last_host_port));
        let from = format!("{}:{}", bound_address(p), range(Some(p.port), Some(p.last_port)));
        let [connections, refused] = [p.connections, p.refused].map(|n| n.to_string());
        vec![p.protocol.to_string(), from, leads_to, connections, refused]
    };
    let heads = ["Netid", from, to, "Connections", "Refused"];
    format::table(&heads, &ports.iter().map(cells).collect::<Vec<_>>())
}

/// The address at which a port is bound, as ss(8) writes it: `*`, `127.0.0.1`, `[::1]`, `*%eth0`.
pub(crate) fn bound_address(port: &Port) -> String {
    let address = match port.address {
        Some(v6) if v6.is_ipv6() => format!("[{v6}]"),
        Some(v4) => v4.to_string(),
        None => "*".to_owned(),
    };
    match &port.interface {
        Some(interface) => format!("{address}%{interface}"),
        None => address,
    }
}

fn range(first: Option<u16>, last: Option<u16>) -> String {
    let word = |port: Option<u16>| port.map_or("-".to_owned(), |port| port.to_string());
    if first == last { word(first) } else { format!("{}-{}", word(first), word(last)) }
}

/// What was not carried, with the reasons.
pub fn refusals(all: &[Refusal]) -> String {
    let counted = all.iter().filter(|r| r.count > 0);
    let cells =
        |r: &Refusal| vec![r.count.to_string(), r.reason.to_string(), r.sentence.to_string()];
    let lines: Vec<Vec<String>> = counted.map(cells).collect();
    if lines.is_empty() {
        return String::new();
    }
    format::table(&["times", "reason", "why"], &lines)
}

/// What was carried in all, by the names of the document.
pub fn totals(gateway: &Gateway) -> BTreeMap<&'static str, u64> {
    let g = gateway;
    let mut totals = BTreeMap::from([
        ("tcp_flows", g.tcp_flows),
        ("udp_flows", g.udp_flows),
        ("echo_flows", g.echo_flows),
        ("bytes_out", g.bytes_out),
        ("bytes_in", g.bytes_in),
        ("datagrams_out", g.datagrams_out),
        ("datagrams_in", g.datagrams_in),
    ]);
    if g.spliced.connections > 0 {
        totals.insert("spliced_connections", g.spliced.connections);
        totals.insert("spliced_bytes_there", g.spliced.bytes_there);
        totals.insert("spliced_bytes_back", g.spliced.bytes_back);
    }
    totals
}

/// The guest of a gateway in a few words. `None`: the document is a stack's.
pub fn guest_of(document: &Document) -> Option<String> {
    let guest = &document.gateway.as_ref()?.guest;
    Some(match (guest.pid, &guest.path) {
        (Some(pid), _) => format!("process {pid}"),
        (None, Some(path)) => path.clone(),
        (None, None) => format!("network namespace {}", guest.network_namespace.unwrap_or(0)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, from_value, json};

    #[test]
    fn a_flow_is_laid_out_with_both_ends() {
        let flow = |host: &str| -> Flow {
            let written = json!({"protocol": "tcp", "direction": "out", "state": "open", "recv_queue_bytes": 0,
                   "send_queue_bytes": 7, "guest": "10.0.0.2:1000", "peer": "192.0.2.1:80", "host": host,
                   "bytes_out": 2048, "host_rtt_us": 1500, "age_us": 2000});
            from_value(written).unwrap()
        };
        let text = table_of(&[flow("192.0.2.1:80"), flow("127.0.0.1:80")]);
        let expected = "\
Netid  Dir  State  Recv-Q  Send-Q  Guest Address:Port  Host Address:Port
tcp    out  open        0       7  10.0.0.2:1000       192.0.2.1:80
      age:2ms bytes_in:0B bytes_out:2.00KiB host_rtt:1.5ms idle:0us
tcp    out  open        0       7  10.0.0.2:1000       127.0.0.1:80
      age:2ms bytes_in:0B bytes_out:2.00KiB host_rtt:1.5ms idle:0us peer:192.0.2.1:80
";
        assert_eq!(text, expected);
    }

    #[test]
    fn a_published_port_has_a_line_and_so_have_idle_ones_together() {
        let port = |address: Value, ports: [u16; 2], to: [u16; 2], counts: [u64; 2]| {
            let written = json!({"protocol": "tcp", "address": address, "interface": null, "port": ports[0],
                   "last_port": ports[1], "guest_port": to[0], "last_guest_port": to[1],
                   "connections": counts[0], "refused": counts[1]});
            from_value::<Port>(written).unwrap()
        };
        let mut bound = port(json!("::1"), [443, 443], [8443, 8443], [0, 0]);
        bound.interface = Some("eth0".to_owned());
        let text = published(&[
            port(Value::Null, [8080, 8080], [80, 80], [12, 3]),
            port(json!("127.0.0.1"), [9180, 9181], [80, 81], [0, 0]),
            bound,
        ]);
        let expected = "\
Netid  Host Address:Port    Guest Port  Connections  Refused
tcp    *:8080               80                   12        3
tcp    127.0.0.1:9180-9181  80-81                 0        0
tcp    [::1]%eth0:443       8443                  0        0
";
        assert_eq!(text, expected);
        let to_host = json!([{"protocol": "udp", "address": null, "interface": "lo", "port": 53, "last_port": 53,
            "host_port": 5353, "last_host_port": 5353, "connections": 1, "refused": 0}]);
        let to_host: Vec<Port> = from_value(to_host).unwrap();
        let expected = "\
Netid  Guest Address:Port  Host Port  Connections  Refused
udp    *%lo:53                  5353            1        0
";
        assert_eq!(host_ports(&to_host), expected);
    }

    #[test]
    fn a_stack_has_no_flows_and_no_guest() {
        assert_eq!((table_of(&[]), refusals(&[]), published(&[])), Default::default());
        assert_eq!(guest_of(&Document::default()), None);
    }

    #[test]
    fn totals_name_what_was_spliced_only_if_there_was_something() {
        let gateway = |n: u64| -> Gateway {
            from_value(json!({"tcp_flows": 1, "guest": {"pid": 7}, "spliced": {"connections": n, "bytes_back": 6}}))
                .unwrap()
        };
        assert_eq!((totals(&gateway(0)).len(), totals(&gateway(0))["tcp_flows"]), (7, 1));
        let spliced = totals(&gateway(4));
        assert_eq!((spliced["spliced_connections"], spliced["spliced_bytes_back"]), (4, 6));
        let mut document = Document::default();
        document.gateway = Some(gateway(0));
        assert_eq!(guest_of(&document).as_deref(), Some("process 7"));
    }
}
