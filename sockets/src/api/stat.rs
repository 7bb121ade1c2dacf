//! Snapshots of a running stack, as structs and as JSON.

use std::io;

use fulmar_stack::base::{Counter, Counters, DropReason};
use fulmar_stack::device::DeviceStats;
use fulmar_stack::mbuf::PoolStats;
use fulmar_stack::socket::SocketError;
use fulmar_stack::tcp::Info;
use serde_json::{Map, Value, json};

use crate::api::error::to_io;
use crate::api::inner::Inner;
use crate::api::ledger::Account;

use crate::runtime::Balance;
use fulmar_stack::shard::ListenerStat;
pub use fulmar_stack::shard::SocketStat;

/// A snapshot of a stack.
#[derive(Clone, Debug)]
pub struct Stat {
    /// Its name.
    pub name: String,
    /// The network namespace in which it was built, as the kernel numbers it (the inode of
    /// `/proc/PID/ns/net`).
    pub network_namespace: Option<u64>,
    /// Shards that it consists of: one per queue of its device.
    pub shards: usize,
    /// Sockets, counters, drops, buffers, device, neighbours, routes: of all shards together.
    pub shard: fulmar_stack::shard::Stat,
    /// The cost of its stages, if it keeps an account.
    pub ledger: Option<Balance>,
}

impl Stat {
    pub(crate) fn of(inner: &Inner) -> io::Result<Stat> {
        let mut each = inner.hosts().map(|host| host.call(|shard, now| Ok(shard.stat_at(now))));
        let first = each.next().unwrap_or(Err(SocketError::BadHandle)).map_err(to_io)?;
        let shard = each.try_fold(first, |all, one| one.map(|one| all.with(one))).map_err(to_io)?;
        let ledger = inner.balance();
        let shards = inner.hosts().count();
        let (name, network_namespace) = (inner.name().to_owned(), inner.network_namespace);
        Ok(Stat { name, network_namespace, shards, shard, ledger })
    }

    /// How often something happened.
    pub fn count(&self, c: Counter) -> u64 {
        self.shard.counters.value(c)
    }

    /// How many packets were dropped for a reason.
    pub fn drops(&self, r: DropReason) -> u64 {
        self.shard.counters.drops(r)
    }

    /// The sockets.
    pub fn sockets(&self) -> &[SocketStat] {
        &self.shard.sockets
    }

    /// The cost of its stages and the bytes that it has moved, if it keeps an account.
    pub fn account(&self) -> Option<Account> {
        self.ledger.clone().map(|balance| Account::new(balance, &self.shard))
    }

    /// One JSON document; sizes are in bytes, times in microseconds.
    pub fn to_json(&self) -> String {
        self.to_value().to_string()
    }

    /// The document of [`Stat::to_json`].
    pub fn to_value(&self) -> Value {
        let s = &self.shard;
        let c = &s.counters;
        let drops = DropReason::ALL.iter().map(|r| {
            json!({"reason": r.name(), "layer": r.layer(), "packets": c.drops(*r),
                   "sentence": r.sentence().trim()})
        });
        let counters: Map<String, Value> =
            Counter::ALL.iter().map(|k| (k.name().to_owned(), json!(c.value(*k)))).collect();
        let addresses = s.addresses.iter().map(|a| format!("{}/{}", a.addr, a.prefix_len));
        json!({
            "name": self.name,
            "pid": std::process::id(),
            "network_namespace": self.network_namespace,
            "shards": self.shards,
            "addresses": addresses.collect::<Vec<_>>(),
            "sockets": s.sockets.iter().map(socket).collect::<Vec<_>>(),
            "time_wait": s.time_wait,
            "drops": drops.collect::<Vec<_>>(),
            "counters": counters,
            "pool": pool(&s.pool, s.window.granted_bytes, s.window.limit_bytes),
            "device": device(&s.device),
            "waiting": waiting(c),
            "neighbours": s.neighbours.iter().map(neighbour).collect::<Vec<_>>(),
            "routes": s.routes.iter().map(route).collect::<Vec<_>>(),
            "ledger": self.account().map(|a| a.to_json()),
        })
    }
}

fn socket(s: &SocketStat) -> Value {
    let mut v = json!({
        "protocol": s.protocol,
        "state": s.state,
        "recv_queue_bytes": s.recv_queue,
        "send_queue_bytes": s.send_queue,
        "local": s.local.map(|a| a.to_string()),
        "remote": s.remote.map(|a| a.to_string()),
    });
    if let Some(object) = v.as_object_mut() {
        object.extend(s.tcp.iter().flat_map(connection));
        object.extend(s.listener.iter().flat_map(listener));
    }
    v
}

/// No window is as large: before its first loss a connection has no threshold (RFC 5681 section 3.1: "arbitrarily
/// high").
const NO_SSTHRESH: u64 = 1 << 30;

/// The fields of a connection in a document.
pub fn connection(i: &Info) -> Map<String, Value> {
    // To a tenth: a clock that is read once per burst knows no more.
    let us = |d: std::time::Duration| (d.as_nanos() / 100) as f64 / 10.0;
    let v = json!({
        "rtt_us": us(i.rtt),
        "rttvar_us": us(i.rttvar),
        "rto_us": us(i.rto),
        "mss_bytes": i.mss_bytes,
        "cwnd_bytes": i.cwnd_bytes,
        "congestion": i.congestion.name(),
        "pacing_rate_bytes_per_s": i.pacing_rate,
        "delivery_rate_bytes_per_s": i.delivery_rate,
        "ssthresh_bytes": (i.ssthresh_bytes < NO_SSTHRESH).then_some(i.ssthresh_bytes),
        "snd_wnd_bytes": i.snd_wnd_bytes,
        "rcv_wnd_bytes": i.rcv_wnd_bytes,
        "in_flight_bytes": i.in_flight_bytes,
        "unsent_bytes": i.unsent_bytes,
        "acked_bytes": i.acked_bytes,
        "received_bytes": i.received_bytes,
        "out_of_order_bytes": i.out_of_order_bytes,
        "retransmits": i.retransmits,
        "retransmitted_bytes": i.retransmitted_bytes,
        "recovering": i.recovering,
        "ecn": i.ecn,
        "syn_data": i.syn_data,
        "tcp_info": details(i),
        "accurate_ecn": i.accurate_ecn,
        "ce_received": i.ce_received,
    });
    v.as_object().cloned().unwrap_or_default()
}

/// Further fields of TCP_INFO, in an object of their own: `fulmar stat` prints it with `--json` only.
fn details(i: &Info) -> Value {
    let us = |d: std::time::Duration| d.as_micros() as u64;
    json!({
        "min_rtt_us": i.min_rtt.map(us),
        "backoff": i.backoff,
        "probes": i.probes,
        "timed_out": i.timed_out,
        "app_limited": i.app_limited,
        "lost_bytes": i.lost_bytes,
        "sacked_bytes": i.sacked_bytes,
        "reordering_window_us": us(i.reordering_window),
        "reorderings": i.reorderings,
        "dsacks": i.dsacks,
        "busy_us": us(i.send_times.busy),
        "peer_window_limited_us": us(i.send_times.peer_window),
        "send_buffer_limited_us": us(i.send_times.send_buffer),
        "sent_bytes": i.sent_bytes,
        "delivered_ce_bytes": i.delivered_ce_bytes,
        "packets_out": i.packets_out,
        "data_packets_out": i.data_packets_out,
        "segments_in": i.segments_in,
        "data_segments_in": i.data_segments_in,
        "since_data_sent_us": us(i.since_data_sent),
        "since_data_received_us": us(i.since_data_received),
        "since_ack_received_us": us(i.since_ack_received),
        "pmtu_bytes": i.pmtu_bytes,
        "advmss_bytes": i.advmss_bytes,
        "rcv_mss_bytes": i.rcv_mss_bytes,
        "send_buffer_bytes": i.send_buffer_bytes,
        "recv_buffer_bytes": i.recv_buffer_bytes,
        "loaned_bytes": i.loaned_bytes,
        "timestamps": i.timestamps,
        "sack": i.sack,
        "window_scales": [i.window_scales.0, i.window_scales.1],
        "model": i.model.map(|m| json!({
            "phase": m.phase,
            "rate_bytes_per_s": m.rate,
            "min_rtt_us": m.min_rtt.map(us),
            "pacing_gain_percent": m.pacing_gain,
            "cwnd_gain_percent": m.cwnd_gain,
        })),
    })
}

fn listener(l: &ListenerStat) -> Map<String, Value> {
    // Whole, so that no field is forgotten.
    let ListenerStat {
        embryos,
        embryo_limit,
        accept_queue,
        accept_limit,
        pending,
        pending_limit,
        pending_expired,
        pending_reset,
        fast_open_pending,
        fast_open_limit,
        fast_opens,
        fast_open_invalid,
        fast_open_overflows,
        cookies_sent,
        cookies_valid,
        cookies_failed,
        embryos_replaced,
        embryos_expired,
        syns_dropped,
        acks_dropped,
    } = l;
    let v = json!({
        "embryos": embryos,
        "embryo_limit": embryo_limit,
        "accept_queue": accept_queue,
        "accept_limit": accept_limit,
        "pending": pending,
        "pending_limit": pending_limit,
        "pending_expired": pending_expired,
        "pending_reset": pending_reset,
        "fast_open_pending": fast_open_pending,
        "fast_open_limit": fast_open_limit,
        "fast_opens": fast_opens,
        "fast_open_invalid": fast_open_invalid,
        "fast_open_overflows": fast_open_overflows,
        "cookies_sent": cookies_sent,
        "cookies_valid": cookies_valid,
        "cookies_failed": cookies_failed,
        "embryos_replaced": embryos_replaced,
        "embryos_expired": embryos_expired,
        "syns_dropped": syns_dropped,
        "acks_dropped": acks_dropped,
    });
    v.as_object().cloned().unwrap_or_default()
}

fn pool(p: &PoolStats, granted: usize, window_limit: usize) -> Value {
    let [send, receive, control] = p.used_bytes;
    json!({
        "budget_bytes": p.budget_bytes,
        "mapped_bytes": p.slab_bytes,
        "send_bytes": send,
        "receive_bytes": receive,
        "control_bytes": control,
        "window_granted_bytes": granted,
        "window_limit_bytes": window_limit,
        "mbufs_in_use": p.mbufs_in_use,
        "allocs": p.allocs,
        "fast_allocs": p.fast_allocs,
        "slow_allocs": p.slow_allocs,
        "empty_allocs": p.empty_allocs,
        "refills": p.refills,
        "clones": p.clones,
        "remote_frees": p.remote_frees,
        "refused": p.failed_budget + p.failed_block + p.failed_descriptor,
    })
}

fn device(d: &DeviceStats) -> Value {
    // Whole, so that no field is forgotten.
    let DeviceStats {
        name,
        path,
        link,
        tx_frames,
        tx_bytes,
        tx_crossings,
        tx_refusals,
        tx_held,
        rx_frames,
        rx_bytes,
        rx_crossings,
        rx_missed,
        wakes,
        place_hits,
        place_misses,
        placed_bytes,
        place_miss_bytes,
    } = d;
    json!({
        "name": name,
        "path": path,
        "link": format!("{link:?}").to_lowercase(),
        "tx_frames": tx_frames,
        "tx_bytes": tx_bytes,
        "tx_crossings": tx_crossings,
        "tx_refusals": tx_refusals,
        "tx_held": tx_held,
        "rx_frames": rx_frames,
        "rx_bytes": rx_bytes,
        "rx_crossings": rx_crossings,
        "rx_missed": rx_missed,
        "wakes": wakes,
        "place_hits": place_hits,
        "place_misses": place_misses,
        "placed_bytes": placed_bytes,
        "place_miss_bytes": place_miss_bytes,
    })
}

/// How threads waited for the device.
fn waiting(c: &Counters) -> Value {
    let of = |k: Counter| c.value(k);
    let wakeups = of(Counter::Sleeps);
    let per_wakeup = of(Counter::RxFrames) as f64 / wakeups.max(1) as f64;
    json!({
        "wakeups": wakeups,
        "frames_per_wakeup": (wakeups > 0).then(|| (per_wakeup * 10.0).round() / 10.0),
        "holds": of(Counter::Holds),
        "mitigation_changes": of(Counter::MitigationChanges),
        "busy_polls": of(Counter::BusyPolls),
        "busy_poll_us": of(Counter::BusyPollNs) / 1000,
    })
}

fn neighbour(n: &fulmar_stack::route::Neighbour) -> Value {
    json!({
        "address": n.ip.to_string(),
        "ether": n.ether.to_string(),
        "state": format!("{:?}", n.state).to_lowercase(),
    })
}

fn route(r: &fulmar_stack::ip::Route) -> Value {
    json!({
        "to": format!("{}/{}", r.dst.addr, r.dst.len),
        "via": r.via.map(|v| v.to_string()),
    })
}
