use super::*;
use crate::harness::options::parsed;

fn options(line: &str) -> Result<Options, String> {
    parsed(line)
}

#[test]
fn a_small_bench_measures_every_way_and_no_buffer_comes_from_the_general_lists() {
    let line = "--device sim,shm,link --burst 1,64,256 --stack fulmar --runs 2 --seconds 0.001";
    let refused = Err(io::Error::other("not asked for"));
    let found = run(&options(line).expect("sound"), refused).expect("it runs");
    let rows = found.tables.iter().flat_map(|t| &t.rows).filter(|r| r.contains_key("burst"));
    // Three devices, two lengths, two directions; three bursts and the old way.
    assert_eq!(rows.clone().count(), 3 * 2 * 2 * 4);
    assert!(rows.clone().all(|r| r["runs"] == 2 && r[NS].as_f64() > Some(0.0)));
    let median = |name: &str| found.figure(name).map(|e| e.median);
    assert_eq!(median("burst.slow_path_allocations"), Some(0.0));
    assert!(median("burst.sim.64_vs_1").is_some() && median("buffers.heap_vs_pool").is_some());
    assert!(found.value("link.old.send.64b.x1", NS).is_some());
    let text = found.text(&crate::harness::report::Machine::here());
    assert!(text.contains("Sending: ns of CPU per frame") && text.contains("x256"), "{text}");
}

#[test]
fn everything_is_measured_unless_a_part_is_asked_for() {
    let all = options("").expect("sound");
    assert_eq!((all.devices(), all.frame_bytes()), (Device::ALL.to_vec(), vec![64, 1514]));
    assert_eq!(all.bursts(), BURSTS);
    assert_eq!(options("--quick").expect("sound").bursts(), [1, 8, 64, 256]);
    assert!(options("--burst 257").unwrap_err().contains("1 to 256"));
    assert!(options("--bytes 9000").unwrap_err().contains("43 to 1514"));
    assert!(options("--device ether").unwrap_err().contains("tap, packet, sim, shm, link"));
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
