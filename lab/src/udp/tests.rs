use super::*;
use crate::report::Machine;

fn options(threads: usize) -> Options {
    Options {
        devices: vec![Device::Sim],
        bytes: vec![18],
        threads,
        budget: Duration::ZERO,
        runs: 1,
    }
}

#[test]
fn a_small_bench_measures_every_way_and_says_so_in_every_report() {
    let found = run(&options(2), Ok(())).unwrap();
    assert_eq!(found.lanes.len(), 2 * Method::ALL.len());
    assert!(found.lanes.iter().all(|l| l.ns().is_some_and(|e| e.median > 0.0)));
    let names: Vec<&str> = found.figures().iter().map(|f| f.ratio.name.as_str()).collect();
    assert!(names.contains(&"udp.sim.two_threads_vs_one"), "{names:?}");
    let text = found.text(&Machine::here());
    assert!(text.contains("send_segmented") && text.contains("packets/s"), "{text}");
    let json = found.json(&Machine::here(), &[]);
    assert_eq!(json["rows"].as_array().map(Vec::len), Some(found.lanes.len()));
    assert!(!crate::page::report::page(&json).html().is_empty());
}

#[test]
fn the_account_of_a_call_says_what_each_of_its_packets_passes() {
    let found = of_calls(&[Device::Sim], &[Method::Connected, Method::ReceivedMany], 18).unwrap();
    let [sent, received] = &found[..] else { panic!("{found:?}") };
    let passed = |f: &crate::account::Figures, stage: &str| {
        f.parts.iter().find(|p| p.stage == stage).map_or(0.0, |p| p.passes / f.packets)
    };
    assert!((0.5..1.5).contains(&passed(sent, "device_taken")), "{sent:?}");
    assert!(passed(received, "receive_copied") > 0.0 && passed(received, "device_taken") < 0.1);
    assert!((0.9..1.1).contains(&sent.allocs_per_packet) && sent.hardware_ns > Some(0.0));
    assert!(sent.title.contains("send, connected") && sent.total_ns.is_some());
    // Of a device of the kernel's own there is none.
    assert!(of_calls(&[Device::Veth], &Method::ALL, 18).unwrap().is_empty());
}

#[test]
fn without_namespaces_the_simulated_device_is_still_measured() {
    let all = Options { devices: Device::ALL.to_vec(), ..options(1) };
    let found = run(&all, Err(io::Error::other("none here"))).unwrap();
    assert!(found.lanes.iter().all(|l| l.way.device == Device::Sim));
    let kernel = Options { devices: vec![Device::Veth], ..options(1) };
    assert!(run(&kernel, Err(io::Error::other("none here"))).is_err());
}

#[test]
fn names_of_ways_are_all_different() {
    let wanted = Options { devices: Device::ALL.to_vec(), bytes: BYTES.to_vec(), ..options(3) };
    let all = Device::ALL.into_iter().flat_map(|d| ways(&wanted, d));
    let mut names: Vec<String> = all.map(|w| w.name()).collect();
    let count = names.len();
    names.sort();
    names.dedup();
    assert_eq!(names.len(), count);
}
