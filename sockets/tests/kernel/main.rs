//! The crate against the kernel's own sockets, over a TAP in a network namespace.
//!
//! Every test starts itself again in a namespace of its own, where the kernel is 10.77.0.1 and
//! fd77::1, and fulmar 10.77.0.2 and fd77::2. Where that is not allowed it says so and passes, or
//! fails under FULMAR_REQUIRE_KERNEL_TESTS=1.

// Options of the kernel's sockets that std does not have.
#![allow(unsafe_code)]

#[path = "../support/mod.rs"]
mod support;

mod big_tcp;
mod drivers;
mod ecn;
mod errno;
mod event_loop;
mod fast_open;
mod faults;
mod listen;
mod namespace;
mod path_mtu;
mod placement;
mod queues;
mod readme;
mod sendfile;
mod sys;
mod tcp;
mod tun;
mod udp;

use fulmar::Stack;
use fulmar::device::Device;
use fulmar::devices::{self, Impairments};
use fulmar::tcp::TcpConfig;

use namespace::ip;

/// Mbufs that a TAP keeps posted for the next frame: a small one and a large one.
const POSTED: usize = 2;

const KERNEL: &str = "10.77.0.1";
const OURS: &str = "10.77.0.2";
const KERNEL6: &str = "fd77::1";
const OURS6: &str = "fd77::2";

/// Runs a test's body in a namespace; the name is that of the function around it.
#[macro_export]
macro_rules! in_namespace {
    ($body:expr) => {{
        fn here() {}
        $crate::namespace::run(std::any::type_name_of_val(&here), $body)
    }};
}

/// A TAP whose kernel end has its addresses.
fn tap(name: &str, kernel: &str, kernel6: &str) -> Box<dyn Device> {
    let device = devices::tap(name).unwrap();
    ip(&format!("addr add {kernel}/24 dev {name}"));
    ip(&format!("addr add {kernel6}/64 dev {name} nodad"));
    ip(&format!("link set {name} up"));
    device
}

fn stack_on(device: Box<dyn Device>) -> Stack {
    stack_of(device, TcpConfig::default())
}

fn stack_of(device: Box<dyn Device>, tcp: TcpConfig) -> Stack {
    Stack::builder()
        .device(device)
        .tcp(tcp)
        .address(format!("{OURS}/24").parse().unwrap())
        .address(format!("{OURS6}/64").parse().unwrap())
        .exit_drain(support::PATIENCE)
        .unlisted()
        .build()
        .unwrap()
}

fn stack() -> Stack {
    stack_on(tap("fulmar0", KERNEL, KERNEL6))
}

/// The same on a bad network, with TCP configured.
fn stack_with(seed: u64, rates: &Impairments, tcp: TcpConfig) -> Stack {
    let device = tap("fulmar0", KERNEL, KERNEL6);
    stack_of(devices::impaired(device, seed, rates, rates), tcp)
}

/// The same on a bad network.
fn stack_with_faults(seed: u64, rates: &Impairments) -> Stack {
    let device = tap("fulmar0", KERNEL, KERNEL6);
    stack_on(devices::impaired(device, seed, rates, rates))
}
