//! A guest's programs and the host's talk through a gateway: the kernel's TCP and UDP in a namespace, sockets of
//! the host's namespace outside. Runs in namespaces of its own, so it has no harness: a user namespace needs a
//! process of one thread.

mod raw;
mod tcp;
mod trouble;
mod udp;
mod world;

use std::io::{self, Write};

type Test = (&'static str, fn());

fn main() {
    if let Err(e) = fulmar_netns::enter() {
        assert!(
            std::env::var_os("FULMAR_REQUIRE_KERNEL_TESTS").is_none(),
            "must not be skipped: {e}"
        );
        let _ = writeln!(io::stderr(), "SKIPPED gateway: {e}");
        return;
    }
    if let Err(e) = world::open_tap() {
        assert!(
            std::env::var_os("FULMAR_REQUIRE_KERNEL_TESTS").is_none(),
            "must not be skipped: {e}"
        );
        let _ = writeln!(io::stderr(), "SKIPPED gateway: {e}");
        return;
    }
    world::prepare_host();
    let wanted: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with('-')).collect();
    let mut passed = 0;
    for (name, test) in tcp::TESTS.iter().chain(udp::TESTS).chain(trouble::TESTS) {
        if wanted.is_empty() || wanted.iter().any(|w| name.contains(w.as_str())) {
            println!("test {name}");
            test();
            passed += 1;
        }
    }
    println!("test result: ok. {passed} passed; 0 failed");
}
