use super::*;
use serde_json::{Value, from_value, json, to_value};

/// The names of version 1: in each line an object and what it has.
const NAMES: &str = "
/ version name pid network_namespace shards addresses sockets flows time_wait drops counters pool device waiting
/ neighbours routes ledger gateway
/drops/0 reason layer packets sentence
/sockets/0 protocol state recv_queue_bytes send_queue_bytes local remote rtt_us rttvar_us rto_us mss_bytes cwnd_bytes
/sockets/0 congestion pacing_rate_bytes_per_s delivery_rate_bytes_per_s ssthresh_bytes snd_wnd_bytes rcv_wnd_bytes
/sockets/0 in_flight_bytes unsent_bytes acked_bytes received_bytes out_of_order_bytes retransmits retransmitted_bytes
/sockets/0 recovering ecn syn_data tcp_info accurate_ecn ce_received embryos embryo_limit accept_queue accept_limit
/sockets/0 pending pending_limit pending_expired pending_reset fast_open_pending fast_open_limit fast_opens
/sockets/0 fast_open_invalid fast_open_overflows cookies_sent cookies_valid cookies_failed embryos_replaced
/sockets/0 embryos_expired syns_dropped acks_dropped
/sockets/0/tcp_info min_rtt_us backoff probes timed_out app_limited lost_bytes sacked_bytes reordering_window_us
/sockets/0/tcp_info reorderings dsacks busy_us peer_window_limited_us send_buffer_limited_us sent_bytes
/sockets/0/tcp_info delivered_ce_bytes packets_out data_packets_out segments_in data_segments_in since_data_sent_us
/sockets/0/tcp_info since_data_received_us since_ack_received_us pmtu_bytes advmss_bytes rcv_mss_bytes
/sockets/0/tcp_info send_buffer_bytes recv_buffer_bytes loaned_bytes timestamps sack window_scales model
/sockets/0/tcp_info/model phase rate_bytes_per_s min_rtt_us pacing_gain_percent cwnd_gain_percent
/pool budget_bytes mapped_bytes send_bytes receive_bytes control_bytes window_granted_bytes window_limit_bytes
/pool mbufs_in_use allocs fast_allocs slow_allocs empty_allocs refills clones remote_frees refused
/device name path link tx_frames tx_bytes tx_crossings tx_refusals tx_held rx_frames rx_bytes rx_crossings rx_missed
/device wakes place_hits place_misses placed_bytes place_miss_bytes
/waiting wakeups frames_per_wakeup holds mitigation_changes busy_polls busy_poll_us
/neighbours/0 address ether state
/routes/0 to via
/ledger visits measured preempted pass_ns overhead_ns sum_ns total_ns stages packets frames bytes crossings
/ledger copied_bytes allocs
/ledger/stages/0 stage layer passes ns sentence
/flows/0 protocol direction state guest peer host bytes_out bytes_in age_us idle_us recv_queue_bytes send_queue_bytes
/flows/0 rtt_us tcp_info host_rtt_us host_retransmits host_in_flight_pkts host_unsent_bytes
/gateway guest uptime_us cpu_us tcp_flows udp_flows echo_flows bytes_out bytes_in datagrams_out datagrams_in published
/gateway host_ports refusals spliced
/gateway/guest pid path network_namespace interface addresses
/gateway/published/0 protocol address interface port last_port guest_port last_guest_port host_port last_host_port
/gateway/published/0 connections refused
/gateway/spliced connections refused dropped bytes_there bytes_back datagrams_there datagrams_back datagrams_lost
/gateway/spliced displaced
";

/// A document with every part.
fn whole() -> Document {
    let document = json!({
        "version": VERSION, "drops": [{}], "neighbours": [{}], "routes": [{}], "ledger": {"stages": [{}]},
        "sockets": [{"rtt_us": 12.5, "tcp_info": {"model": {}}, "embryo_limit": 8}],
        "flows": [{"guest": "[::1]:80", "rtt_us": 1}],
        "gateway": {"refusals": [{}], "published": [
            {"guest_port": 1, "last_guest_port": 2, "host_port": 3, "last_host_port": 4}]},
    });
    from_value(document).unwrap()
}

#[test]
fn every_name_of_version_1_is_in_the_document() {
    let document = to_value(whole()).unwrap();
    for line in NAMES.lines() {
        let (place, names) = line.split_once(' ').unwrap_or_default();
        let object = document.pointer(place.trim_end_matches('/')).expect(place);
        for name in names.split(' ').filter(|name| !name.is_empty()) {
            assert!(object.get(name).is_some(), "{name} is missing in {place}");
        }
    }
    assert_eq!(document["version"], 1);
}

#[test]
fn what_is_written_is_read_again() {
    assert_eq!(from_value::<Document>(to_value(whole()).unwrap()).unwrap(), whole());
    let plain = Socket { protocol: "udp".into(), ..Socket::default() };
    let read = from_value::<Socket>(to_value(&plain).unwrap()).unwrap();
    assert_eq!(read, plain, "it is neither a connection nor a listener");
}

#[test]
fn unknown_fields_are_ignored_and_missing_ones_have_their_default() {
    let newer = json!({"version": 2, "name": "nc", "colour": "blue", "device": {"tx_frames": 7, "speed": {"mb": 3}},
                       "sockets": [{"protocol": "tcp", "cwnd_bytes": 14_480, "mood": []}]});
    let document: Document = from_value(newer).unwrap();
    assert_eq!((document.version, document.name.as_str()), (2, "nc"));
    assert_eq!((document.device.tx_frames, document.device.rx_frames), (7, 0));
    let socket = &document.sockets[0];
    assert_eq!(socket.tcp.as_ref().map(|tcp| tcp.cwnd_bytes), Some(14_480));
    assert_eq!(socket.listener, None);
    assert_eq!(from_value::<Document>(json!({})).unwrap(), Document::default());
}

/// Without this test [`VERSION`] or a field could change and the page's schema would not.
#[test]
fn the_schema_of_the_page_is_that_of_the_document() {
    let settings = schemars::generate::SchemaSettings::draft2020_12().for_serialize();
    let schema = Value::from(settings.into_generator().into_root_schema_for::<Document>());
    let schema = format!("{schema:#}\n");
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/stat.schema.json");
    if std::env::var_os("FULMAR_UPDATE").is_some() {
        std::fs::write(file, &schema).unwrap();
    }
    let is_kept = std::fs::read_to_string(file).unwrap_or_default() == schema;
    assert!(
        is_kept,
        "docs/stat.schema.json is old: FULMAR_UPDATE=1 cargo test -p fulmar --lib schema"
    );
}
