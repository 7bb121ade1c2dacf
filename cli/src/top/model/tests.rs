use super::*;
use serde_json::json;

/// A sample `seconds` after `at`, of a process that used a quarter of a CPU.
pub fn sample(at: Instant, seconds: u64, document: Value) -> Sample {
    let after = Duration::from_secs(seconds);
    let document = serde_json::from_value(document).expect("a document");
    Sample { at: at + after, document, cpu: Some(after / 4) }
}

fn flow(guest: &str, bytes: u64, age_s: u64) -> Value {
    json!({"protocol": "tcp", "direction": "out", "state": "half-closed", "guest": guest,
           "peer": "10.0.0.1:80", "host": "127.0.0.1:80", "bytes_out": bytes, "bytes_in": 2 * bytes,
           "recv_queue_bytes": 5, "send_queue_bytes": null, "host_unsent_bytes": 7, "rtt_us": 30.5,
           "host_rtt_us": 1200, "retransmits": 1, "host_retransmits": 2, "age_us": age_s * 1_000_000})
}

fn gateway(flows: Vec<Value>) -> Value {
    json!({"name": "curl", "pid": 7, "flows": flows, "sockets": [{"protocol": "udp"}],
           "gateway": {"guest": {"pid": 6}, "uptime_us": 5}})
}

#[test]
fn rates_of_a_flow_are_differences_over_time() {
    let now = Instant::now();
    let before = sample(now, 0, gateway(vec![flow("10.0.0.2:1", 100, 10)]));
    let after = sample(now, 2, gateway(vec![flow("10.0.0.2:1", 300, 12)]));
    let model = Model::new(Some(&before), &after, None);
    let row = &model.rows[0];
    assert_eq!((row.out, row.back, row.total_bytes), (Some(100.0), Some(200.0), Some(900)));
    assert_eq!((row.near.as_str(), row.far.as_str()), ("10.0.0.2:1", "127.0.0.1:80"));
    assert_eq!((row.queue_bytes, row.retransmits, row.rtt_us), (Some(12), Some(3), Some(1200.0)));
    assert_eq!((row.state.as_str(), model.cpu), ("half", Some(0.25)));
    assert_eq!(model.title, "curl (process 6), gateway 7");
    assert_eq!(Model::new(None, &after, None).rows[0].out, None, "one sample has no rate");
}

#[test]
fn a_new_flow_with_the_address_of_an_old_one_has_its_own_rate() {
    let now = Instant::now();
    let before = sample(now, 0, gateway(vec![flow("10.0.0.2:1", 1000, 10)]));
    let after = sample(now, 1, gateway(vec![flow("10.0.0.2:1", 50, 0)]));
    assert_eq!(Model::new(Some(&before), &after, None).rows[0].out, Some(50.0));
    let came = sample(now, 1, gateway(vec![flow("10.0.0.2:2", 70, 0)]));
    assert_eq!(Model::new(Some(&before), &came, None).rows[0].out, Some(70.0));
}

#[test]
fn a_filter_leaves_out_rows_and_nothing_else() {
    let filter: Filter = "sport = 2".parse().unwrap();
    let flows = vec![flow("10.0.0.2:1", 1, 1), flow("10.0.0.2:2", 1, 1)];
    let model = Model::new(None, &sample(Instant::now(), 0, gateway(flows)), Some(&filter));
    assert_eq!(model.rows.len(), 1);
    assert_eq!(model.rows[0].near, "10.0.0.2:2");
}

#[test]
fn a_document_of_another_version_is_shown_as_far_as_it_goes() {
    for document in [json!({}), json!({"version": 2, "colour": [], "gateway": {"mood": 1}})] {
        let model = Model::new(None, &sample(Instant::now(), 0, document), None);
        assert!(model.rows.is_empty() && model.drops.is_empty() && model.stages.is_empty());
    }
}

#[test]
fn present_drops_are_listed_above_past_drops() {
    let document = |old: u64, new: u64| {
        json!({"drops": [{"reason": "old", "layer": "ip", "packets": old},
                         {"reason": "never", "layer": "ip", "packets": 0}],
               "gateway": {"refusals": [{"reason": "new", "count": new}]}})
    };
    let now = Instant::now();
    let (before, after) = (sample(now, 0, document(100, 1)), sample(now, 1, document(100, 4)));
    let model = Model::new(Some(&before), &after, None);
    let shown: Vec<_> = model.drops.iter().map(|d| (d.reason.as_str(), d.rate)).collect();
    assert_eq!(shown, [("new", 3.0), ("old", 0.0)]);
    assert_eq!((model.drops[0].layer.as_str(), model.drop_rate()), ("gateway", 3.0));
}

#[test]
fn values_that_are_not_counted_are_not_numbers() {
    let listener =
        json!({"protocol": "tcp", "state": "LISTEN", "recv_queue_bytes": 1, "send_queue_bytes": 9});
    let sample = sample(Instant::now(), 0, json!({"sockets": [listener]}));
    let model = Model::new(None, &sample, None);
    assert_eq!(model.rows[0].queue_bytes, None, "a backlog is no queue of bytes");
    assert_eq!(format!("{:.0}", model.drop_rate()), "0");
}

#[test]
fn stages_have_shares_of_the_work_since_the_sample_before() {
    let document = |tcp: f64, copy: f64| {
        json!({"ledger": {"stages": [
            {"stage": "slept", "layer": "idle", "ns": 1e9},
            {"stage": "copied", "layer": "copy", "ns": copy},
            {"stage": "input", "layer": "tcp", "ns": tcp}]}})
    };
    let now = Instant::now();
    let before = sample(now, 0, document(1000.0, 1000.0));
    let after = sample(now, 1, document(4000.0, 2000.0));
    let model = Model::new(Some(&before), &after, None);
    let shown: Vec<_> = model.stages.iter().map(|s| (s.name.as_str(), s.share)).collect();
    assert_eq!(shown, [("input", 0.75), ("copied", 0.25)]);
}

#[test]
fn every_order_is_total_and_its_reverse_is_the_reverse() {
    let row =
        |near: &str, out: Option<f64>| Row { near: near.into(), out, back: out, ..Row::default() };
    let rows = [row("a", Some(2.0)), row("b", None), row("c", Some(9.0))];
    for sort in Sort::ALL {
        for (a, b) in [(0, 1), (1, 2), (0, 2)] {
            let (a, b) = (&rows[a], &rows[b]);
            assert_eq!(sort.compare(a, b), sort.compare(b, a).reverse(), "{sort:?}");
            assert!(sort.compare(a, b).is_ne());
        }
        assert_eq!(sort.next().previous(), sort);
    }
    assert!(Sort::Rate.compare(&rows[2], &rows[0]).is_lt(), "the fastest is first");
    assert!(Sort::Rate.compare(&rows[0], &rows[1]).is_lt(), "the unknown is last");
}
