//! Runs a test in a network namespace of its own, where loopback is up.

use fulmar_testbed::namespace;
pub use fulmar_testbed::namespace::{command, ip};

/// Runs `body` in a fresh network namespace. `here` is the path of a function inside the test.
pub fn run(here: &str, body: fn()) {
    // `kernel::tcp::the_test::here`, of which the harness knows `tcp::the_test`.
    let path: Vec<&str> = here.split("::").filter(|p| *p != "here").skip(1).collect();
    namespace::run(&path.join("::"), Some("/dev/net/tun"), || {
        ip("link set lo up");
        crate::support::within(body);
    });
}
