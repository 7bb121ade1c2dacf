use std::time::Duration;

use super::*;
use crate::report::Machine;

fn options() -> Options {
    Options {
        devices: vec![Device::Sim, Device::Shm, Device::Link],
        frame_bytes: FRAME_BYTES.to_vec(),
        bursts: vec![1, 64, 256],
        fulmar: true,
        kernel: false,
        budget: Duration::ZERO,
        runs: 2,
    }
}

#[test]
fn a_small_bench_measures_every_way_and_no_buffer_comes_from_the_general_lists() {
    let found = run(&options(), Err(io::Error::other("not asked for"))).expect("it runs");
    // Three devices, two lengths, two directions; three bursts and the old way.
    assert_eq!(found.lanes.len(), 3 * 2 * 2 * 4);
    assert!(found.lanes.iter().all(|l| l.ns().is_some_and(|e| e.runs == 2)));
    assert!(found.errors.is_empty(), "{:?}", found.errors);
    let slow = found.figures.iter().find(|f| f.ratio.name == "burst.slow_path_allocations");
    assert_eq!(slow.and_then(|f| f.estimate).map(|e| e.median), Some(0.0));
    let json = found.json(&Machine::here(), &["fulmar".into(), "bench".into(), "burst".into()]);
    assert!(json["ratios"]["burst.sim.64_vs_1"]["median"].is_number());
    assert!(json["ratios"]["buffers.heap_vs_pool"]["median"].is_number());
    assert_eq!(json["rows"].as_array().map(Vec::len), Some(48));
    let text = found.text(&Machine::here());
    assert!(text.contains("Sending: ns of CPU per frame") && text.contains("x256"), "{text}");
    let page = crate::page::report::page(&json).html();
    assert!(page.contains("Frames of 64 bytes, send") && page.contains("bursts of 256"));
}

#[test]
fn the_simulated_device_rings_its_doorbell_once_per_burst() {
    let mut rig = DeviceRig::sim().expect("a device");
    for burst in [1, 8, 64, 256] {
        let load = Load { burst, bytes: 64, packets: 1024, is_old: false };
        let cost = rig.send(load).expect("it sends");
        assert_eq!(cost.crossings, cost.packets as u64 / burst as u64, "bursts of {burst}");
    }
}

#[test]
fn the_old_way_crosses_once_per_frame() {
    let mut rig = DeviceRig::link().expect("a device");
    let load = Load { burst: 64, bytes: 64, packets: 512, is_old: true };
    let cost = rig.send(load).expect("it sends");
    assert_eq!((cost.packets, cost.crossings), (512, 512));
}

#[test]
fn names_of_ways_are_stable() {
    let way = Way {
        device: "tap",
        method: "ours",
        direction: Direction::Send,
        frame_bytes: 64,
        burst: 8,
    };
    assert_eq!(way.name(), "tap.ours.send.64b.x8");
}
