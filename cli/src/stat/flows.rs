//! The parts of a gateway's document that a stack's document does not have.

use super::{list, with_details, word};
use crate::format;
use serde_json::{Value, json};

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
pub fn table_of(flows: &Value) -> String {
    let shortened = list(flows).iter().map(|flow| {
        let mut flow = flow.clone();
        // What differs only where an address is mapped.
        if let (true, Some(fields)) = (flow["peer"] == flow["host"], flow.as_object_mut()) {
            fields.remove("peer");
        }
        flow
    });
    with_details(&shortened.collect(), &COLUMNS)
}

/// The published ports: where they are bound, where in the guest they lead and what came to them.
pub fn published(ports: &Value) -> String {
    ports_table(ports, "guest", ["Host Address:Port", "Guest Port"])
}

/// The same of ports of the guest's loopback interface, which lead to the host's.
pub fn host_ports(ports: &Value) -> String {
    ports_table(ports, "host", ["Guest Address:Port", "Host Port"])
}

fn ports_table(ports: &Value, to: &str, heads: [&str; 2]) -> String {
    let ports = list(ports);
    if ports.is_empty() {
        return String::new();
    }
    let cells = |p: &Value| {
        let from = format!("{}:{}", bound_address(p), range(&p["port"], &p["last_port"]));
        let to = range(&p[format!("{to}_port")], &p[format!("last_{to}_port")]);
        vec![word(&p["protocol"]), from, to, word(&p["connections"]), word(&p["refused"])]
    };
    let [from, to] = heads;
    let heads = ["Netid", from, to, "Connections", "Refused"];
    format::table(&heads, &ports.iter().map(cells).collect::<Vec<_>>())
}

/// The address at which a port is bound, as ss(8) writes it: `*`, `127.0.0.1`, `[::1]`, `*%eth0`.
pub(crate) fn bound_address(port: &Value) -> String {
    let address = match port["address"].as_str() {
        Some(v6) if v6.contains(':') => format!("[{v6}]"),
        Some(v4) => v4.to_owned(),
        None => "*".to_owned(),
    };
    match port["interface"].as_str() {
        Some(interface) => format!("{address}%{interface}"),
        None => address,
    }
}

fn range(first: &Value, last: &Value) -> String {
    if first == last { word(first) } else { format!("{}-{}", word(first), word(last)) }
}

/// What was not carried, with the reasons.
pub fn refusals(value: &Value) -> String {
    let counted = list(value).iter().filter(|r| r["count"].as_u64().unwrap_or(0) > 0);
    let cells = |r: &Value| ["count", "reason", "sentence"].map(|field| word(&r[field])).to_vec();
    let lines: Vec<Vec<String>> = counted.map(cells).collect();
    if lines.is_empty() {
        return String::new();
    }
    format::table(&["times", "reason", "why"], &lines)
}

/// What was carried in all.
pub fn totals(gateway: &Value) -> Value {
    let Some(fields) = gateway.as_object() else { return Value::Null };
    let is_total = |name: &str| {
        name.ends_with("_flows") || name.starts_with("bytes_") || name.starts_with("datagrams_")
    };
    let spliced = &gateway["spliced"];
    let more = spliced["connections"].as_u64().filter(|n| *n > 0);
    let more = more.into_iter().flat_map(|_| {
        let name = |field| format!("spliced_{field}");
        ["connections", "bytes_there", "bytes_back"].map(|f| (name(f), spliced[f].clone()))
    });
    let totals = fields.iter().filter(|(name, _)| is_total(name));
    json!(
        totals
            .map(|(name, value)| (name.clone(), value.clone()))
            .chain(more)
            .collect::<serde_json::Map<_, _>>()
    )
}

/// The guest of a gateway in a few words. `None`: the document is a stack's.
pub fn guest_of(document: &Value) -> Option<String> {
    let guest = document["gateway"]["guest"].as_object()?;
    Some(match (guest.get("pid").and_then(Value::as_u64), guest.get("path")) {
        (Some(pid), _) => format!("process {pid}"),
        (None, Some(Value::String(path))) => path.clone(),
        _ => format!(
            "network namespace {}",
            word(&document["gateway"]["guest"]["network_namespace"])
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flow_is_laid_out_with_both_ends() {
        let flow = |host: &str| {
            json!({"protocol": "tcp", "direction": "out", "state": "open", "recv_queue_bytes": 0,
                   "send_queue_bytes": 7, "guest": "10.0.0.2:1000", "peer": "192.0.2.1:80", "host": host,
                   "bytes_out": 2048, "host_rtt_us": 1500, "cwnd_bytes": null})
        };
        let text = table_of(&json!([flow("192.0.2.1:80"), flow("127.0.0.1:80")]));
        let expected = "\
Netid  Dir  State  Recv-Q  Send-Q  Guest Address:Port  Host Address:Port
tcp    out  open        0       7  10.0.0.2:1000       192.0.2.1:80
      bytes_out:2.00KiB host_rtt:1.5ms
tcp    out  open        0       7  10.0.0.2:1000       127.0.0.1:80
      bytes_out:2.00KiB host_rtt:1.5ms peer:192.0.2.1:80
";
        assert_eq!(text, expected);
    }

    #[test]
    fn a_published_port_has_a_line_and_so_have_idle_ones_together() {
        let port = |address: Value, ports: [u16; 2], to: [u16; 2], counts: [u64; 2]| {
            json!({"protocol": "tcp", "address": address, "interface": null, "port": ports[0],
                   "last_port": ports[1], "guest_port": to[0], "last_guest_port": to[1],
                   "connections": counts[0], "refused": counts[1]})
        };
        let mut bound = port(json!("::1"), [443, 443], [8443, 8443], [0, 0]);
        bound["interface"] = json!("eth0");
        let text = published(&json!([
            port(Value::Null, [8080, 8080], [80, 80], [12, 3]),
            port(json!("127.0.0.1"), [9180, 9181], [80, 81], [0, 0]),
            bound,
        ]));
        let expected = "\
Netid  Host Address:Port    Guest Port  Connections  Refused
tcp    *:8080               80                   12        3
tcp    127.0.0.1:9180-9181  80-81                 0        0
tcp    [::1]%eth0:443       8443                  0        0
";
        assert_eq!(text, expected);
        let to_host = json!([{"protocol": "udp", "address": null, "interface": "lo", "port": 53, "last_port": 53,
            "host_port": 5353, "last_host_port": 5353, "connections": 1, "refused": 0}]);
        let expected = "\
Netid  Guest Address:Port  Host Port  Connections  Refused
udp    *%lo:53                  5353            1        0
";
        assert_eq!(host_ports(&to_host), expected);
    }

    #[test]
    fn a_stack_has_no_flows_and_no_guest() {
        let stack = json!({"name": "nc"});
        assert_eq!(table_of(&stack["flows"]), "");
        assert_eq!(refusals(&stack["gateway"]["refusals"]), "");
        assert_eq!(published(&stack["gateway"]["published"]), "");
        assert_eq!((totals(&stack["gateway"]), guest_of(&stack)), (Value::Null, None));
    }

    #[test]
    fn totals_name_what_was_spliced_only_if_there_was_something() {
        let gateway = |n: u64| {
            json!({"tcp_flows": 1, "bytes_in": 2, "uptime_us": 3, "guest": {"pid": 7},
                   "spliced": {"connections": n, "bytes_there": 5, "bytes_back": 6}})
        };
        assert_eq!(totals(&gateway(0)), json!({"tcp_flows": 1, "bytes_in": 2}));
        assert_eq!(totals(&gateway(4))["spliced_connections"], 4);
        let document = json!({"gateway": gateway(0)});
        assert_eq!(guest_of(&document).as_deref(), Some("process 7"));
    }
}
