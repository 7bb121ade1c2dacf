//! Rates of a stack between two of its documents.

use crate::format::rate;
use fulmar::stat::Counter;
use fulmar::stat::Document;
use std::time::Duration;

/// Whether both documents are of one stack.
pub fn is_same(a: &Document, b: &Document) -> bool {
    let of = |d: &Document| (d.pid, d.name.clone(), d.addresses.clone(), d.device.name.clone());
    of(a) == of(b)
}

/// Frames, bytes, drops and retransmissions per second, one line each.
pub fn between(before: &Document, after: &Document, elapsed: Duration) -> String {
    let seconds = elapsed.as_secs_f64().max(1e-9);
    let growth = |of: &dyn Fn(&Document) -> u64| of(after).saturating_sub(of(before));
    let per_second = |n: u64| format!("{:.0}/s", n as f64 / seconds);
    let direction = |name, frames, bytes| {
        format!("{name}  {} frames  {}\n", per_second(frames), rate(bytes, elapsed))
    };
    let dropped = growth(&|d| d.drops.iter().map(|drop| drop.packets).sum());
    let again = growth(&|d| d.count(Counter::TcpRetransmitBytes));
    direction("received ", growth(&|d| d.device.rx_frames), growth(&|d| d.device.rx_bytes))
        + &direction("sent     ", growth(&|d| d.device.tx_frames), growth(&|d| d.device.tx_bytes))
        + &format!("dropped    {} packets\n", per_second(dropped))
        + &format!("resent     {}\n", rate(again, elapsed))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{from_value, json};

    #[test]
    fn rates_are_differences_over_time() {
        let document = |frames: u64, drops: u64| -> Document {
            let written = json!({"pid": 1, "name": "nc", "addresses": [],
                   "device": {"rx_frames": frames, "rx_bytes": frames * 125, "tx_frames": 7, "tx_bytes": 9},
                   "drops": [{"packets": drops}, {"packets": 1}],
                   "counters": {"tcp_retransmit_bytes": 0}});
            from_value(written).unwrap()
        };
        let text = between(&document(100, 0), &document(2100, 4), Duration::from_secs(2));
        let expected = "received   1000/s frames  1.00 Mb/s\nsent       0/s frames  0 b/s\n\
                        dropped    2/s packets\nresent     0 b/s\n";
        assert_eq!(text, expected);
        // A stack of the same process that began anew.
        assert!(
            between(&document(100, 0), &document(1, 0), Duration::from_secs(1)).contains("0/s")
        );
    }

    #[test]
    fn stacks_are_distinguished_by_process_name_and_addresses() {
        let stack = |pid: u32, address: &str| -> Document {
            from_value(json!({"pid": pid, "name": "nc", "addresses": [address]})).unwrap()
        };
        assert!(is_same(&stack(1, "a"), &stack(1, "a")));
        assert!(
            !is_same(&stack(1, "a"), &stack(2, "a")) && !is_same(&stack(1, "a"), &stack(1, "b"))
        );
    }
}
