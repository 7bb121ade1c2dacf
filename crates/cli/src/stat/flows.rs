//! What the document of a gateway has beside that of a stack.

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
    fn a_stack_has_no_flows_and_no_guest() {
        let stack = json!({"name": "nc"});
        assert_eq!(table_of(&stack["flows"]), "");
        assert_eq!(refusals(&stack["gateway"]["refusals"]), "");
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
