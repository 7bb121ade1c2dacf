use super::account::of_calls;
use super::*;
use crate::harness::options::parsed;

fn options(line: &str) -> Result<Options, String> {
    parsed(line)
}

fn refused() -> io::Result<()> {
    Err(io::Error::other("none here"))
}

#[test]
fn a_small_bench_measures_every_way() {
    let line = "--device sim --bytes 18 --threads 2 --runs 1 --seconds 0.001 --stack fulmar";
    let found = run(&options(line).expect("sound"), refused()).expect("it runs");
    let rows = &found.tables[0].rows;
    assert_eq!(rows.len(), 2 * Method::ALL.len());
    assert!(rows.iter().all(|r| r[NS].as_f64() > Some(0.0) && r[RATE].as_f64() > Some(0.0)));
    assert!(found.figure("udp.sim.two_threads_vs_one").is_some());
    assert!(found.value("sim.segmented.18b.t2", NS).is_some());
}

#[test]
fn the_account_of_a_call_says_what_each_of_its_packets_passes() {
    let passed = |f: &crate::account::Figures, stage: &str| {
        f.parts.iter().find(|p| p.stage == stage).map_or(0.0, |p| p.passes / f.packets)
    };
    // A measurement during which the thread lost its CPU has little to show.
    let is_whole = |_| {
        let methods = [Method::Connected, Method::ReceivedMany];
        let found = of_calls(&[Device::Sim], &methods, 18).unwrap();
        let [sent, received] = &found[..] else { panic!("{found:?}") };
        assert!(sent.title.contains("send, connected") && sent.total_ns.is_some());
        (0.5..1.5).contains(&passed(sent, "device_taken"))
            && passed(received, "receive_copied") > 0.0
            && passed(received, "device_taken") < 0.1
            && (0.9..1.1).contains(&sent.allocs_per_packet)
            && sent.hardware_ns > Some(0.0)
    };
    assert!((0..20).any(is_whole), "an account of neither is right");
    // Of a device of the kernel's own there is none.
    assert!(of_calls(&[Device::Veth], &Method::ALL, 18).unwrap().is_empty());
}

#[test]
fn without_namespaces_the_simulated_device_is_still_measured() {
    let small = "--bytes 18 --threads 1 --runs 1 --seconds 0.001";
    let found = run(&options(small).expect("sound"), refused()).expect("it runs");
    let rows = found.tables.iter().flat_map(|t| &t.rows);
    assert!(rows.clone().count() > 0 && rows.clone().all(|r| r["device"] == "sim"));
    let kernel = options(&format!("{small} --stack kernel")).expect("sound");
    assert!(run(&kernel, refused()).is_err());
}

#[test]
fn all_parts_are_measured_by_default() {
    let all = options("").expect("sound");
    assert_eq!((all.devices(), all.bytes()), (Device::ALL.to_vec(), BYTES.to_vec()));
    let part = options("--device tap --bytes 100 --threads 3 --stack fulmar").expect("sound");
    assert_eq!((part.devices(), part.bytes(), part.threads()), (vec![Device::Tap], vec![100], 3));
    assert_eq!(options("--stack kernel").expect("sound").devices(), [Device::Veth]);
    assert!(options("--bytes 0").unwrap_err().contains("1 to 1472"));
    assert!(options("--device veth").unwrap_err().contains("sim, tap"));
}
