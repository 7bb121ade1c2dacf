//! What a stack did between two of its documents.

use crate::format::rate;
use serde_json::Value;
use std::time::Duration;

/// Whether both documents are of one stack.
pub fn is_same(a: &Value, b: &Value) -> bool {
    ["pid", "name", "addresses"].iter().all(|field| a[field] == b[field])
}

/// Frames, bytes, drops and retransmissions per second, one line each.
pub fn between(before: &Value, after: &Value, elapsed: Duration) -> String {
    let seconds = elapsed.as_secs_f64().max(1e-9);
    let growth = |of: &dyn Fn(&Value) -> Option<u64>| {
        of(after).unwrap_or(0).saturating_sub(of(before).unwrap_or(0))
    };
    let device = |field: &'static str| growth(&|d| d["device"][field].as_u64());
    let per_second = |n: u64| format!("{:.0}/s", n as f64 / seconds);
    let direction = |name, frames, bytes| {
        format!("{name}  {} frames  {}\n", per_second(device(frames)), rate(device(bytes), elapsed))
    };
    let dropped = growth(&|d| {
        let reasons = d["drops"].as_array()?.iter();
        Some(reasons.filter_map(|r| r["packets"].as_u64()).sum())
    });
    let again = growth(&|d| d["counters"]["tcp_retransmit_bytes"].as_u64());
    direction("received ", "rx_frames", "rx_bytes")
        + &direction("sent     ", "tx_frames", "tx_bytes")
        + &format!("dropped    {} packets\n", per_second(dropped))
        + &format!("sent again {}\n", rate(again, elapsed))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn rates_are_differences_over_time() {
        let document = |frames: u64, drops: u64| {
            json!({"pid": 1, "name": "nc", "addresses": [],
                   "device": {"rx_frames": frames, "rx_bytes": frames * 125, "tx_frames": 7, "tx_bytes": 9},
                   "drops": [{"packets": drops}, {"packets": 1}],
                   "counters": {"tcp_retransmit_bytes": 0}})
        };
        let text = between(&document(100, 0), &document(2100, 4), Duration::from_secs(2));
        let expected = "received   1000/s frames  1.00 Mb/s\nsent       0/s frames  0 b/s\n\
                        dropped    2/s packets\nsent again 0 b/s\n";
        assert_eq!(text, expected);
        // A stack of the same process that began anew.
        assert!(
            between(&document(100, 0), &document(1, 0), Duration::from_secs(1)).contains("0/s")
        );
    }

    #[test]
    fn stacks_are_told_apart_by_process_name_and_addresses() {
        let stack =
            |pid: u64, address: &str| json!({"pid": pid, "name": "nc", "addresses": [address]});
        assert!(is_same(&stack(1, "a"), &stack(1, "a")));
        assert!(
            !is_same(&stack(1, "a"), &stack(2, "a")) && !is_same(&stack(1, "a"), &stack(1, "b"))
        );
    }
}
