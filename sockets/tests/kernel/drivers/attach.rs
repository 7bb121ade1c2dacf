//! Which interfaces a TAP or TUN of one queue may be, and what it makes of them.

use fulmar::internals::drivers::tap::{Tap, TapConfig};
use fulmar::internals::drivers::tun::{Tun, TunConfig};
use fulmar_testbed::namespace::{self, ip};

use crate::drivers::TUN;

fn config() -> TapConfig {
    TapConfig { name: "tap0".into(), ..TapConfig::default() }
}

fn open() -> Tap {
    Tap::open(&config()).unwrap()
}

#[test]
fn a_tap_made_for_several_queues_is_taken_if_it_is_nobodys() {
    let test = "attach::a_tap_made_for_several_queues_is_taken_if_it_is_nobodys";
    namespace::run(test, TUN, || {
        ip("tuntap add dev tap0 mode tap multi_queue");
        for _ in 0..2 {
            let _tap = open();
            let text = Tap::open(&config()).expect_err("it is the first one's").to_string();
            assert!(text.contains("another program is attached"), "{text}");
        }
    });
}

#[test]
fn a_tun_made_for_several_queues_is_taken_if_it_is_nobodys() {
    let test = "attach::a_tun_made_for_several_queues_is_taken_if_it_is_nobodys";
    namespace::run(test, TUN, || {
        ip("tuntap add dev tun0 mode tun multi_queue");
        let config = TunConfig { name: "tun0".into(), ..TunConfig::default() };
        for _ in 0..2 {
            let _tun = Tun::open(&config).unwrap();
            let text = Tun::open(&config).expect_err("it is the first one's").to_string();
            assert!(text.contains("another program is attached"), "{text}");
        }
    });
}

#[test]
fn an_interface_that_is_not_a_tap_is_refused_with_advice() {
    namespace::run("attach::an_interface_that_is_not_a_tap_is_refused_with_advice", TUN, || {
        ip("link add tap0 type veth peer name v1");
        let text = Tap::open(&config()).expect_err("it is a veth").to_string();
        assert!(text.contains("is not a TAP") && text.contains("another name"), "{text}");
        ip("link del tap0");
        ip("tuntap add dev tap0 mode tun multi_queue");
        let text = Tap::open(&config()).expect_err("it is a TUN").to_string();
        assert!(text.contains("is not a TAP"), "{text}");
    });
}
