//! Which interfaces a TAP of one queue may be, and what it makes of them.

use fulmar::drivers::tap::{Tap, TapConfig};
use fulmar_stack::device::Device;
use fulmar_testbed::namespace::{self, ip};

use crate::drivers::TUN;

fn config() -> TapConfig {
    TapConfig { name: "tap0".into(), ..TapConfig::default() }
}

fn open() -> Tap {
    Tap::open(&config()).unwrap()
}

/// Whether flows may be given queues, as a person is told.
fn path_of(tap: &Tap) -> String {
    tap.stats().path
}

const QUEUES_FOR_FLOWS: &str = "get queues of their own";

#[test]
fn a_new_tap_is_ready_for_queues_of_flows_and_costs_no_queueing_disciplines() {
    let test = "attach::a_new_tap_is_ready_for_queues_of_flows_and_costs_no_queueing_disciplines";
    namespace::run(test, TUN, || {
        let tap = open();
        assert!(path_of(&tap).contains(QUEUES_FOR_FLOWS), "{}", path_of(&tap));
        ip("link set tap0 up");
        let shown = ip("-d link show tap0");
        assert!(shown.contains("multi_queue") && shown.contains("qdisc noqueue"), "{shown}");
    });
}

#[test]
fn a_tap_that_is_to_have_no_queues_for_flows_is_made_for_one() {
    let test = "attach::a_tap_that_is_to_have_no_queues_for_flows_is_made_for_one";
    namespace::run(test, TUN, || {
        let _tap = Tap::open(&TapConfig { flow_queues: 0, ..config() }).unwrap();
        assert!(!ip("-d link show tap0").contains("multi_queue"));
    });
}

#[test]
fn a_tap_made_for_several_queues_is_taken_if_it_is_nobodys() {
    let test = "attach::a_tap_made_for_several_queues_is_taken_if_it_is_nobodys";
    namespace::run(test, TUN, || {
        ip("tuntap add dev tap0 mode tap multi_queue");
        for _ in 0..2 {
            let tap = open();
            assert!(path_of(&tap).contains(QUEUES_FOR_FLOWS), "{}", path_of(&tap));
            let text = Tap::open(&config()).err().expect("it is the first one's").to_string();
            assert!(text.contains("another program is attached"), "{text}");
        }
        let _tap = Tap::open(&TapConfig { flow_queues: 0, ..config() }).unwrap();
    });
}

#[test]
fn what_is_no_tap_is_refused_with_advice() {
    namespace::run("attach::what_is_no_tap_is_refused_with_advice", TUN, || {
        ip("link add tap0 type veth peer name v1");
        for flow_queues in [0, 4] {
            let refused = Tap::open(&TapConfig { flow_queues, ..config() });
            let text = refused.err().expect("it is a veth").to_string();
            assert!(text.contains("is not a TAP") && text.contains("another name"), "{text}");
        }
        ip("link del tap0");
        ip("tuntap add dev tap0 mode tun multi_queue");
        let text = Tap::open(&config()).err().expect("it is a TUN").to_string();
        assert!(text.contains("is not a TAP"), "{text}");
    });
}
