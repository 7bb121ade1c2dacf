//! Scenarios and frames in words.

use std::fmt::{Formatter, Result};

use fulmar::internals::drivers::link::Impairments;
use fulmar_stack::base::Duration;
use fulmar_stack::device::Packet;
use fulmar_stack::shard::FastOpenOptions;
use fulmar_stack::wire::{ipv4, ipv6, protocol, tcp};

use super::attack::Attack;
use super::swarm::Swarm;
use super::waiting::WaitPlan;
use super::world::START;
use super::{EndPlan, FlowPlan, Scenario, Station};

const ETHER_BYTES: usize = 14;

pub(super) fn scenario(s: &Scenario, f: &mut Formatter<'_>) -> Result {
    let version = if s.v6 { "IPv6" } else { "IPv4" };
    writeln!(f, "{version}, MTU {}, TSO {:?}, checksum offload {}", s.mtu, s.tso, s.csum)?;
    for (i, w) in s.paths.iter().enumerate() {
        writeln!(f, "way {i} -> {}: {}", 1 - i, way(w))?;
    }
    for (i, st) in s.stations.iter().enumerate() {
        writeln!(f, "station {i}: {}", station(st))?;
    }
    for (i, p) in s.flows.iter().enumerate() {
        writeln!(f, "flow {i}: {}", flow(p))?;
    }
    writeln!(f, "datagrams {:?}, pings {:?}", s.datagrams, s.pings)?;
    write!(f, "trouble: {:?}", s.trouble)?;
    swarm(&s.swarm, f)
}

fn swarm(s: &Swarm, f: &mut Formatter<'_>) -> Result {
    if s.features.is_empty() {
        return Ok(());
    }
    write!(f, "\nfeatures: {}", s.features)?;
    for (i, mss) in s.clamp_mss.iter().enumerate() {
        if let Some(mss) = mss {
            write!(f, "\nSYNs to station {i}: MSS at most {mss}")?;
        }
    }
    for (i, fast_open) in s.fast_open.iter().enumerate() {
        if let Some(o) = fast_open {
            let FastOpenOptions { backlog, without_cookie, .. } = o;
            write!(
                f,
                "\nlistener {i}: Fast Open, backlog {backlog}, without cookie {without_cookie}"
            )?;
        }
    }
    for (i, m) in
        s.middleboxes.iter().enumerate().flat_map(|(i, all)| all.iter().map(move |m| (i, m)))
    {
        let since = m.from.since(START);
        write!(f, "\nin front of station {i}: {:?} {:?} from {since:?}", m.action, m.segments)?;
    }
    for (i, plan) in s.decides.iter().enumerate() {
        if let Some(plan) = plan {
            write!(f, "\nstation {i} decides: {plan:?}")?;
        }
    }
    if let Some(i) = s.any_address {
        write!(f, "\nstation {i} answers for every address")?;
    }
    for a in &s.attacks {
        let Attack { kind, victim, from, every, burst, frames } = a;
        write!(
            f,
            "\nattack {kind:?} on station {victim}: from {from:?} {frames} frames, {burst} every {every:?}"
        )?;
    }
    s.jumps.iter().try_for_each(|(at, by)| write!(f, "\nat {at:?} the clock jumps by {by:?}"))
}

fn way(w: &Impairments) -> String {
    let rate = w.rate_bps.map_or("no limit".to_owned(), |r| {
        format!("{:.3} Mbit/s behind {} KiB", r as f64 / 1e6, w.queue_bytes >> 10)
    });
    let percent = |p: f64| p * 100.0;
    let size = w.mtu.map_or(String::new(), |mtu| format!("larger than {mtu} bytes lost, "));
    let rate = format!("{rate} {:?}", w.aqm);
    format!(
        "{rate}, {size}delay {:?} + {:?}, loss {:.2} %, reordered {:.2} % by {:?}, doubled {:.2} %, \
         corrupted {:.2} %, super-frames cut {:.0} %",
        w.delay,
        w.jitter,
        percent(w.loss),
        percent(w.reorder),
        w.reorder_delay,
        percent(w.duplicate),
        percent(w.corrupt),
        percent(w.cut),
    )
}

fn waiting(waits: Option<WaitPlan>) -> String {
    let Some(WaitPlan { config, registers }) = waits else { return "sees every frame".into() };
    let who = if registers { "device" } else { "thread" };
    format!("its {who} holds up to {:?} from {} frames/s", config.max_hold, config.flood_pps)
}

fn station(s: &Station) -> String {
    let t = &s.tcp;
    format!(
        "pool {} KiB, buffers {} / {} of {} KiB, timestamps {}, sack {}, ECN {:?}, MTU probing {:?}, nodelay {}, \
         {}{}, \
         user time-out {:?}, by edges {}, copies {}, places {}, device takes {:?}, budget {}{}, backlog {}, \
         accepts after {:?}, preempted {:?}, urgent {} %, {}",
        s.pool_bytes >> 10,
        t.send_buffer_bytes >> 10,
        t.recv_buffer_bytes >> 10,
        t.max_buffer_bytes >> 10,
        t.timestamps,
        t.sack,
        t.ecn,
        t.mtu_probing,
        t.nodelay,
        t.congestion,
        t.max_pacing_rate.map_or(String::new(), |r| format!(" at {r} B/s")),
        t.user_timeout,
        s.by_edges,
        s.copies,
        s.places,
        s.takes_pkts,
        s.budget,
        if s.as_reader { " (as reader)" } else { "" },
        s.backlog,
        s.accepts_after,
        s.preempted,
        s.urgent_percent,
        waiting(s.waits),
    )
}

fn flow(p: &FlowPlan) -> String {
    let ends: Vec<String> = p.ends.iter().map(end).collect();
    let to = if p.to_self { "itself" } else { "the other" };
    let when =
        p.again.map_or_else(|| format!("at {:?}", p.at), |f| format!("again after flow {f}"));
    let (opener, kind) = (p.opener, p.kind);
    format!("station {opener} connects to {to} {when}, {kind:?}: {} | {}", ends[0], ends[1])
}

fn end(e: &EndPlan) -> String {
    let pause = |d: Duration| if d.is_zero() { String::new() } else { format!(" every {d:?}") };
    format!(
        "writes {} by {}{}, reads by {}{} after {:?}{}{}{}, {:?}{}",
        e.bytes,
        e.write_bytes,
        pause(e.write_pause),
        e.read_bytes,
        pause(e.read_pause),
        e.read_after,
        if e.ragged { ", ragged" } else { "" },
        if e.cork { ", corked" } else { "" },
        options(e),
        e.leave,
        e.posts.map_or(String::new(), |p| format!(", {p:?}")),
    )
}

fn options(e: &EndPlan) -> String {
    let keepalive =
        e.options.keepalive.map_or(String::new(), |k| format!(", probes after {:?}", k.idle));
    let low_water =
        e.options.notsent_low_water.map_or(String::new(), |n| format!(", not sent below {n}"));
    let first = e.options.first.map_or(String::new(), |first| format!(", {first:?}"));
    let file = e.options.file.map_or(String::new(), |file| format!(", {file:?}"));
    keepalive + &low_water + &first + &file
}

/// A frame in a line, as tcpdump would say it. `head` is its beginning.
pub(super) fn frame(head: &[u8], p: &Packet) -> String {
    let bytes = p.chain.len();
    let packet = head.get(ETHER_BYTES..).unwrap_or(&[]);
    let told = match ethertype(head) {
        Some(0x0800) => v4(packet, bytes - ETHER_BYTES),
        Some(0x86dd) => v6(packet, bytes - ETHER_BYTES),
        Some(0x0806) => Some(arp(packet)),
        _ => None,
    };
    let gso = p.offload.gso.map_or(String::new(), |g| format!(" (super, {})", g.segment_bytes));
    told.map_or_else(|| format!("frame of {bytes} bytes"), |t| t + &gso)
}

fn ethertype(head: &[u8]) -> Option<u16> {
    Some(u16::from_be_bytes([*head.get(12)?, *head.get(13)?]))
}

fn arp(packet: &[u8]) -> String {
    let who = if packet.get(7) == Some(&1) { "question" } else { "answer" };
    format!("ARP {who}")
}

fn v4(packet: &[u8], bytes: usize) -> Option<String> {
    let h = ipv4::Header::parse(packet, bytes).ok()?;
    let payload = packet.get(h.header_bytes..)?;
    let bytes = h.total_bytes - h.header_bytes;
    if h.more_fragments || h.fragment_offset > 0 {
        let more = if h.more_fragments { "more" } else { "last" };
        return Some(format!(
            "fragment {} of protocol {}: {bytes} bytes from {}, {more}",
            h.ident, h.protocol, h.fragment_offset
        ));
    }
    transport(h.protocol, payload, bytes)
}

fn v6(packet: &[u8], bytes: usize) -> Option<String> {
    let h = ipv6::Header::parse(packet, bytes).ok()?;
    transport(h.next_header, packet.get(40..)?, h.payload_bytes)
}

fn transport(number: u8, bytes: &[u8], len: usize) -> Option<String> {
    if number != protocol::TCP {
        let name = match number {
            protocol::UDP => "UDP",
            protocol::ICMPV6 | protocol::ICMP => "ICMP",
            _ => "protocol?",
        };
        return Some(format!("{name} {len} bytes, type {}", bytes.first()?));
    }
    let (h, header_bytes) = tcp::Header::parse(bytes).ok()?;
    let sacks: Vec<_> = h.options.sack.iter().map(|(a, b)| format!("{}-{}", a.0, b.0)).collect();
    let stamps =
        h.options.timestamps.map_or(String::new(), |t| format!(" ts {}/{}", t.value, t.echo));
    Some(format!(
        "TCP {}>{} {} seq {} ack {} win {} len {}{stamps}{}{}",
        h.src_port,
        h.dst_port,
        h.flags,
        h.seq.0,
        h.ack.0,
        h.window,
        len - header_bytes,
        if sacks.is_empty() { "" } else { " sack " },
        sacks.join(","),
    ))
}

/// An ARP reply or a neighbour advertisement.
pub(super) fn is_neighbour_answer(p: &Packet) -> bool {
    let mut head = [0; ETHER_BYTES + 41];
    if p.chain.copy_to(0, &mut head) < ETHER_BYTES + 28 {
        return false;
    }
    match ethertype(&head) {
        Some(0x0806) => head[ETHER_BYTES + 7] == 2,
        Some(0x86dd) => head[ETHER_BYTES + 6] == protocol::ICMPV6 && head[ETHER_BYTES + 40] == 136,
        _ => false,
    }
}
