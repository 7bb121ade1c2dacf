//! Buffers, device, waiting, neighbours, routes and the account in the document.

use fulmar_stack::base::{Counter, Counters};
use fulmar_stack::device::DeviceStats;
use fulmar_stack::ip::{Neighbour as KnownNeighbour, Route as KnownRoute};
use fulmar_stack::shard::Stat;

use super::{Name, part};
use crate::runtime::account::{Account, StageTime};

part! { "The buffers of a stack: levels, and counts since its start."
r#"println!("{} of {} bytes are mapped", document.pool.mapped_bytes, document.pool.budget_bytes);"#
Pool of s: Stat {
    budget_bytes: usize = s.pool.budget_bytes, "The budget.";
    mapped_bytes: usize = s.pool.slab_bytes, "Bytes of mapped slabs.";
    send_bytes: usize = s.pool.used_bytes[0], "Storage in use to send.";
    receive_bytes: usize = s.pool.used_bytes[1], "Storage in use to receive.";
    control_bytes: usize = s.pool.used_bytes[2], "Storage in use for control.";
    window_granted_bytes: usize = s.window.granted_bytes, "Receive windows granted.";
    window_limit_bytes: usize = s.window.limit_bytes, "Limit of the receive windows.";
    mbufs_in_use: usize = s.pool.mbufs_in_use, "Mbufs in use.";
    allocs: u64 = s.pool.allocs, "Allocations of storage.";
    fast_allocs: u64 = s.pool.fast_allocs, "Allocations from the magazines.";
    slow_allocs: u64 = s.pool.slow_allocs, "Allocations from the free lists or a new slab.";
    empty_allocs: u64 = s.pool.empty_allocs, "Allocations that failed.";
    refills: u64 = s.pool.refills, "Batches loaded into the magazines.";
    clones: u64 = s.pool.clones, "References made to storage in use.";
    remote_frees: u64 = s.pool.remote_frees, "Mbufs freed through the remote-free list.";
    refused: u64 = s.pool.failed_budget + s.pool.failed_block + s.pool.failed_descriptor, "Allocations refused.";
} }

part! { "The device. Counts start when it is opened."
r#"let device = &document.device;
println!("{}: {} frames sent, {} received", device.name, device.tx_frames, device.rx_frames);"#
Device of d: DeviceStats whole {
    name: String = d.name.clone(), "Its name, with its wrappers.";
    path: String = d.path.clone(), "How frames cross to the other side, a sentence; empty if there is only one way.";
    link: Name = format!("{:?}", d.link).to_lowercase().into(), "`up` or `down`.";
    tx_frames: u64, "Frames sent.";
    tx_bytes: u64, "Bytes of frames sent.";
    tx_crossings: u64, "Crossings to send: system calls, doorbells or lock acquisitions.";
    tx_refusals: u64, "Bursts that the device accepted only in part.";
    tx_held: u64, "Sent frames that the device holds back for now.";
    rx_frames: u64, "Frames received.";
    rx_bytes: u64, "Bytes of frames received.";
    rx_crossings: u64, "Crossings to receive, empty ones included.";
    rx_missed: u64, "Frames lost before the device could hand them over, because a queue below it was full.";
    wakes: u64, "Wake-ups written to a peer.";
    place_hits: u64, "Frames whose payload was placed into a posted buffer.";
    place_misses: u64, "Frames of a placed flow that had to be copied.";
    placed_bytes: u64, "Payload bytes placed into posted buffers.";
    place_miss_bytes: u64, "Bytes copied because of misses.";
} }

part! { "Waiting of threads for the device."
r#"if let Some(frames) = document.waiting.frames_per_wakeup {
    println!("{frames} frames for each wake-up");
}"#
Waiting of c: Counters {
    wakeups: u64 = c.value(Counter::Sleeps), "Sleeps on the device; each ends with a wake-up.";
    frames_per_wakeup: Option<f64> = frames_per_wakeup(c), "Frames received per wake-up, to a tenth.";
    holds: u64 = c.value(Counter::Holds), "Sleeps of fixed length for interrupt mitigation.";
    mitigation_changes: u64 = c.value(Counter::MitigationChanges), "Changes of the interrupt mitigation delay.";
    busy_polls: u64 = c.value(Counter::BusyPolls), "Waits that busy-polled the device.";
    busy_poll_us: u64 = c.value(Counter::BusyPollNs) / 1000, "Time of busy-polling.";
} }

fn frames_per_wakeup(c: &Counters) -> Option<f64> {
    let (frames, wakeups) = (c.value(Counter::RxFrames), c.value(Counter::Sleeps));
    (wakeups > 0).then(|| (frames as f64 / wakeups as f64 * 10.0).round() / 10.0)
}

part! { "A neighbour."
r#"for neighbour in &document.neighbours {
    println!("{} at {}: {}", neighbour.address, neighbour.ether, neighbour.state);
}"#
Neighbour of n: KnownNeighbour {
    address: String = n.ip.to_string(), "IP address.";
    ether: String = n.ether.to_string(), "Ethernet address.";
    state: String = format!("{:?}", n.state).to_lowercase(), "State of neighbour discovery, such as `reachable`.";
} }

part! { "A route."
r#"for route in &document.routes {
    println!("{} via {}", route.to, route.via.as_deref().unwrap_or("the link"));
}"#
Route of r: KnownRoute {
    to: String = format!("{}/{}", r.dst.addr, r.dst.len), "Destination prefix.";
    via: Option<String> = r.via.map(|via| via.to_string()), "The gateway; none: on-link.";
} }

part! { "The cost of the stages, extrapolated to all calls, and the work done meanwhile."
r#"if let Some(ledger) = &document.ledger {
    println!("{:.1} ns for each packet", ledger.sum_ns / ledger.packets as f64);
}"#
Ledger of a: Account {
    visits: u64, "Calls of the stack.";
    measured: u64, "Calls that were measured.";
    preempted: u64, "Intervals in no sum, because the thread was preempted or slept.";
    pass_ns: f64, "Cost of passing one stage.";
    overhead_ns: f64, "Cost of the account.";
    sum_ns: f64 = a.sum_ns(), "Time of all stages but sleep, and the cost of the account.";
    total_ns: Option<f64>, "CPU time of the threads by the kernel; none: too few calls yet.";
    stages: Vec<StageCost> = a.stages.iter().map(StageCost::from).collect(), "Stages that were passed, in their order.";
    packets: u64, "Packets sent and received: a super-frame counts as its packets.";
    frames: u64, "Frames that crossed between stack and device.";
    bytes: u64, "Bytes of these frames.";
    crossings: u64, "Calls into the device.";
    copied_bytes: u64, "Bytes that the stack has copied.";
    allocs: u64, "Buffers allocated from the pool.";
} }

part! { "The cost of one stage."
r#"for stage in document.ledger.iter().flat_map(|ledger| &ledger.stages) {
    println!("{:16} {:8.1} ns", stage.stage, stage.ns);
}"#
StageCost of c: StageTime {
    stage: Name = c.stage.name().into(), "Name of the stage.";
    layer: Name = c.stage.layer().into(), "The layer that it belongs to.";
    passes: f64, "How often it was passed.";
    ns: f64, "Time since the previous stage, without the cost of the account.";
    sentence: Name = c.stage.sentence().trim().into(), "The work between the previous stage and this one.";
} }
