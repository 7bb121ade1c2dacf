//! A guest's programs and the host's talk through a gateway: the kernel's TCP and UDP in a namespace, sockets of
//! the host's namespace outside. Runs in namespaces of its own, so it has no harness: a user namespace needs a
//! process of one thread.

mod change;
mod dns;
mod errnos;
mod first_bytes;
mod mapping;
mod memory;
mod names;
mod queues;
mod raw;
mod shares;
mod tcp;
mod trouble;
mod udp;
mod undecided;
mod upstream;
mod world;

use std::io::{self, Write};
use std::sync::atomic::Ordering::Relaxed;

type Test = (&'static str, fn());

/// What is exact where one queue has all of it.
const ONE_QUEUE: [&str; 5] = [
    "without_descriptors_a_flow_of_datagrams_gives_way_to_the_next",
    "open_connections_beyond_the_bound_are_refused_and_leave_the_others_alone",
    "flows_have_a_bound",
    "udp_flows_have_a_bound_and_the_oldest_gives_way",
    "the_last_bytes_of_the_host_carry_the_fin",
];

pub fn main() {
    if let Err(e) = fulmar_gateway::netns::enter() {
        assert!(
            std::env::var_os("FULMAR_REQUIRE_KERNEL_TESTS").is_none(),
            "must not be skipped: {e}"
        );
        let _ = writeln!(io::stderr(), "SKIPPED gateway: {e}");
        return;
    }
    let has_tap = world::open_tap(65520);
    if let Err(e) = &has_tap {
        assert!(
            std::env::var_os("FULMAR_REQUIRE_KERNEL_TESTS").is_none(),
            "must not be skipped: {e}"
        );
        let _ = writeln!(io::stderr(), "SKIPPED gateway with a TAP: {e}");
    }
    world::prepare_host();
    let wanted: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with('-')).collect();
    let is_wanted = |name: &str| wanted.is_empty() || wanted.iter().any(|w| name.contains(w));
    let all = || {
        tcp::TESTS
            .iter()
            .chain(udp::TESTS)
            .chain(mapping::TESTS)
            .chain(shares::TESTS)
            .chain(dns::TESTS)
            .chain(names::TESTS)
            .chain(undecided::TESTS)
            .chain(first_bytes::TESTS)
            .chain(upstream::TESTS)
            .chain(trouble::TESTS)
            .chain(errnos::TESTS)
            .chain(change::TESTS)
            .chain(memory::TESTS)
    };
    let mut passed = 0;
    let kinds = [("TAP", 1), ("TAP", 2), ("veth", 1)];
    for (kind, queues) in kinds.into_iter().filter(|(kind, _)| *kind != "TAP" || has_tap.is_ok()) {
        world::QUEUES.store(queues, Relaxed);
        world::HAS_VETH.store(kind == "veth", Relaxed);
        let own = if queues == 1 { &[] } else { queues::TESTS };
        let is_left_out = |name| queues > 1 && ONE_QUEUE.contains(&name);
        for (name, test) in all().chain(own).filter(|(name, _)| is_wanted(name)) {
            if !is_left_out(*name) {
                println!("test {name}, {kind} of {queues} queues");
                test();
                passed += 1;
            }
        }
    }
    println!("test result: ok. {passed} passed; 0 failed");
}
