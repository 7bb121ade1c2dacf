//! The laboratory against the real kernel: namespaces, peers, the floor. A program of its own
//! rather than `#[test]`s, because it enters namespaces before it has threads and because its
//! children are itself. Times are not judged; bytes, counts and what is left behind are.

mod forward;
mod netserver;

use fulmar_gateway::netns::Netns;
use fulmar_lab::Bulk;
use fulmar_lab::child;
use fulmar_lab::cpu::Placement;
use fulmar_lab::file::{BenchFile, CacheState};
use fulmar_lab::floor::{Direction, Kind, Testbed};
use fulmar_lab::harness::options::Common;
use fulmar_lab::harness::{Sample, Scenario};
use fulmar_lab::kernel::receive::Receiving;
use fulmar_lab::kernel::send::{KernelCall, Sending};
use fulmar_lab::kernel::{Local, Pair, Work};
use fulmar_lab::peer::{Endpoint, Peer, Role, Spec};
use fulmar_lab::send::bench::file_scenario;
use fulmar_lab::send::file::FileMethod;
use fulmar_lab::send::shm::Shared;
use fulmar_lab::send::{self, Load, Method, Rig};
use fulmar_lab::stream::{self, Over};
use fulmar_lab::transfer::{PEER, THIS_END, Transfer};
use fulmar_lab::trust;
use std::cell::RefCell;
use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};

const TIME: Duration = Duration::from_millis(30);

fn main() {
    child::dispatch();
    if let Err(e) = fulmar_gateway::netns::enter() {
        return skip("all of it", &format!("namespaces are not allowed here: {e}"));
    }
    a_fresh_namespace_has_loopback_and_nothing_else();
    forward::the_kernel_of_a_guest_reaches_servers_of_the_host();
    kernel_to_kernel_moves_bytes_with_and_without_offloads();
    for kind in [Kind::Tap, Kind::Packet] {
        the_floor_moves_bytes_both_ways(kind);
    }
    every_kernel_call_moves_bytes();
    every_way_of_sending_moves_bytes_over_a_tap_in_as_many_outputs_as_it_should();
    a_file_goes_over_a_tap_in_every_way();
    two_processes_talk_over_shared_memory();
    every_victim_of_a_flood_does_what_is_measured();
    netserver::counts_what_a_client_on_the_kernel_sends_and_ends_on_an_interrupt();
    netserver::is_measured_by_a_stock_netperf_with_every_test();
    a_dropped_peer_is_dead();
    println!("real_kernel: ok");
}

/// Says aloud what did not run, or fails where it must run.
fn skip(what: &str, why: &str) {
    let required = std::env::var_os("FULMAR_REQUIRE_KERNEL_TESTS").is_some();
    assert!(!required, "{what} must not be skipped: {why}");
    println!("SKIPPED {what}: {why}");
}

fn a_fresh_namespace_has_loopback_and_nothing_else() {
    let netns = Netns::new().expect("a namespace");
    assert!(netns.if_index("lo").is_ok());
    assert!(netns.if_index("veth0").is_err());
}

fn assert_moved(what: &str, sample: io::Result<Transfer>) -> Transfer {
    let sample = sample.unwrap_or_else(|e| panic!("{what}: {e}"));
    assert!(sample.near.bytes > 0, "{what}: {sample:?}");
    assert!(sample.far.cpu > Duration::ZERO && sample.near.cpu > Duration::ZERO, "{what}");
    sample
}

fn kernel_to_kernel_moves_bytes_with_and_without_offloads() {
    for offloads in [true, false] {
        let pair = Pair::new(1500, offloads).expect("two namespaces and a veth pair");
        let work = Work { call: KernelCall::Write, load: load(), file: None };
        let sample = work.run(&pair.ends(), Placement::SameCpu, TIME);
        assert_moved(&format!("kernel, offloads {offloads}"), sample);
    }
}

fn the_floor_moves_bytes_both_ways(kind: Kind) {
    if kind == Kind::Tap && !Path::new("/dev/net/tun").exists() {
        return skip("TAP", "there is no /dev/net/tun");
    }
    match Testbed::new(kind) {
        Err(e) if e.kind() == io::ErrorKind::PermissionDenied && kind == Kind::Tap => {
            return skip("TAP", &format!("it may not be opened: {e}"));
        }
        testbed => drop(testbed.expect("a device")),
    }
    // The floor repeats nothing that the kernel drops, as it may where its softirq falls behind.
    let run = |direction, copy| {
        let run = |_| {
            let mut testbed = Testbed::new(kind).expect("a device");
            testbed.stream(&Bulk::default(), direction, copy, Placement::SameCpu, TIME)
        };
        let is_lost = |e: &io::Error| e.kind() == io::ErrorKind::TimedOut;
        let mut runs = (0..5).map(run).skip_while(|r| r.as_ref().is_err_and(is_lost));
        runs.next().unwrap_or_else(|| Err(io::ErrorKind::TimedOut.into()))
    };
    for direction in [Direction::Send, Direction::Receive] {
        for copy in [false, true] {
            let what = format!("{kind:?} {direction:?} copy {copy}");
            let sample = assert_moved(&what, run(direction, copy));
            // Super-frames, not packets: this is what makes it the floor.
            let frames =
                sample.counts.iter().find(|(n, _)| *n == "data_frames").expect("counted").1;
            assert!(sample.all_bytes() / frames > 16 * 1024, "{what}: {sample:?}");
        }
    }
}

fn load() -> Load {
    Load { warm_bytes: 1 << 20, ..Load::of_writes(64 << 10) }
}

/// Runs a scenario once.
fn run(mut scenario: Scenario<'_>) -> Sample {
    let name = &scenario.name;
    let sample = (scenario.run)(TIME).unwrap_or_else(|e| panic!("{name}: {e}"));
    assert!(sample.bytes > 0, "{name}: {sample:?}");
    assert!(sample.value(THIS_END) > Some(0.0) && sample.value(PEER) > Some(0.0), "{name}");
    sample
}

fn every_kernel_call_moves_bytes() {
    let pair = Pair::new(1500, true).expect("two namespaces and a veth pair");
    let here = Netns::current().expect("here");
    let file = BenchFile::with_bytes(1 << 20).expect("a temporary file");
    for call in KernelCall::ALL {
        let file = call.needs_file().then_some((&file, CacheState::Cold));
        let work = Work { call, load: load(), file };
        let sample = run(work.between(pair.ends(), Placement::SameCpu));
        assert_eq!(sample.counted("zerocopy_sends") > 0, call == KernelCall::ZeroCopy);
        for local in Local::ALL {
            // AF_UNIX has no zerocopy.
            if call != KernelCall::ZeroCopy {
                run(work.between(local.ends(&here), Placement::SameCpu));
            }
        }
    }
}

/// A stack of ours over a TAP, unless this machine has none.
fn tap(super_segments: bool) -> Option<RefCell<Box<dyn Rig>>> {
    if !Path::new("/dev/net/tun").exists() {
        skip("TAP", "there is no /dev/net/tun");
        return None;
    }
    let testbed =
        stream::Testbed::with_super_segments(Over::Tap, Placement::SameCpu, super_segments, None);
    match testbed {
        Ok(testbed) => Some(RefCell::new(Box::new(testbed))),
        Err(e) => {
            skip("TAP", &e.to_string());
            None
        }
    }
}

fn every_way_of_sending_moves_bytes_over_a_tap_in_as_many_outputs_as_it_should() {
    for super_segments in [true, false] {
        let Some(rig) = tap(super_segments) else { return };
        for (method, at_least) in [
            (Method::Old, 32.0),
            (Method::Published, 1.0),
            (Method::Ours, 1.0),
            (Method::Owned, 1.0),
        ] {
            let sample = run(send::scenario(&rig, method, load()));
            // A write that found the buffer nearly full took more passes.
            let outputs = sample.value("output_calls_per_write").expect("counted");
            assert!((at_least..at_least + 8.0).contains(&outputs), "{method:?}: {outputs}");
            let frame_bytes = sample.counted("call_bytes") / sample.counted("tx_frames").max(1);
            let whole = super_segments && method != Method::Old;
            assert_eq!(frame_bytes > 4000, whole, "{method:?}: {frame_bytes}");
        }
    }
}

fn a_file_goes_over_a_tap_in_every_way() {
    let file = BenchFile::with_bytes(1 << 20).expect("a temporary file");
    let Some(rig) = tap(true) else { return };
    for method in FileMethod::ALL {
        run(file_scenario(&rig, method, &file, CacheState::Cold, load()));
    }
}

fn two_processes_talk_over_shared_memory() {
    let shared = Shared::new(Placement::SameCpu, true).expect("shared memory");
    let rig: RefCell<Box<dyn Rig>> = RefCell::new(Box::new(shared));
    // The child warms up for the time that it was started with.
    let load = Load::of_writes(64 << 10);
    for method in [Method::Old, Method::Ours] {
        run(send::scenario(&rig, method, load));
    }
}

/// A victim that sends no cookies, or answers strays, ends the bench with an error.
fn every_victim_of_a_flood_does_what_is_measured() {
    let options =
        trust::Options { common: Common { runs: 3, ..Common::default() }, way: Vec::new() };
    let found = trust::run(&options, Ok(())).expect("a round");
    let has = |name: &str| found.value(name, "cpu_ns_per_frame").is_some();
    assert!(has("kernel.unclaimed") && has("kernel.syn") && has("kernel.stray"));
    let figures: Vec<&str> = found.figures.iter().map(|f| f.ratio.name.as_str()).collect();
    let of_packet = ["trust.syn_flood.us_per_syn.packet", "trust.drop.vs_kernel.packet"];
    let of_tap = ["trust.syn_flood.us_per_syn", "trust.drop.vs_kernel"];
    for name in ["trust.slow_peers.served", "trust.syn_flood.connects"].iter().chain(&of_packet) {
        assert!(figures.contains(name), "{name} is not in {figures:?}");
    }
    if !of_tap.iter().all(|name| figures.contains(name)) {
        skip("a flood over TAP", "it cannot be opened here");
    }
}

fn a_dropped_peer_is_dead() {
    let spec = Spec {
        role: Role::Sink,
        endpoint: Endpoint::Listen(SocketAddr::from(([127, 0, 0, 1], 0))),
        cpu: None,
        buffer_bytes: 1,
        warm_bytes: 0,
        time: TIME,
        sending: Sending::default(),
        receiving: Receiving::default(),
    };
    let peer = Peer::spawn(&spec, &Netns::current().expect("here")).expect("a peer");
    let proc = format!("/proc/{}", peer.id());
    assert!(Path::new(&proc).exists());
    drop(peer);
    let patience = Instant::now() + Duration::from_secs(60);
    while Path::new(&proc).exists() {
        assert!(Instant::now() < patience, "the peer outlives its handle");
    }
}
