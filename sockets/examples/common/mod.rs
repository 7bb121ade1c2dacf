//! Code shared by the examples: the device argument and error messages.

#![allow(dead_code, reason = "each example uses its part")]

use std::error::Error;
use std::net::IpAddr;
use std::process::ExitCode;

use fulmar::device::Device;
use fulmar::{Cidr, Stack, devices};

/// The result of an example.
pub type Outcome<T = ()> = Result<T, Box<dyn Error>>;

/// Where an example runs.
pub enum Place {
    /// On a device, with the address `ADDRESS/PREFIX`; the peer is another program.
    Network(Stack),
    /// Both ends in this process, connected directly.
    Demo(Stack, Stack),
}

/// Default addresses: of the example, and of the other end of `link`.
pub const OURS: &str = "10.77.0.2/24";
pub const PEER: &str = "10.77.0.1/24";

/// Help for the first argument of every example.
pub const DEVICE_HELP: &str = "DEVICE is one of
    link          both ends in this process, without privileges
    fulmar0       the interface in a shell of `fulmar sandbox`; the kernel has 10.77.0.1
    tap:NAME      a TAP interface, created if missing; the kernel is at its other end
    tun:NAME      a TUN interface, the same without Ethernet
    packet:IF     an Ethernet interface; fulmar is a separate station on that network
ADDRESS is fulmar's own address (default 10.77.0.2/24). After starting on a TAP or TUN, configure the
kernel's end from another terminal:
    ip addr add 10.77.0.1/24 dev NAME && ip link set NAME up
";

/// Opens the device.
pub fn open(device: &str, address: Option<&str>) -> Outcome<Place> {
    let address = address.unwrap_or(OURS);
    if device == "link" {
        let (ours, peer) = devices::link_pair()?;
        return Ok(Place::Demo(stack(ours, address)?, stack(peer, PEER)?));
    }
    Ok(Place::Network(stack(devices::open(device)?, address)?))
}

/// A stack with one address, and as gateway the first address of its network.
fn stack(device: Box<dyn Device>, address: &str) -> Outcome<Stack> {
    let own: Cidr = address.parse()?;
    let builder = Stack::builder().device(device).address(own);
    let builder = match first_of(own) {
        Some(gateway) if gateway != own.address => builder.gateway(gateway),
        _ => builder,
    };
    Ok(builder.build()?)
}

/// The first address of a network, where a gateway usually is.
fn first_of(own: Cidr) -> Option<IpAddr> {
    let IpAddr::V4(v4) = own.address else { return None };
    let host_bits = 32u32.checked_sub(own.prefix_len.into()).filter(|bits| *bits > 1)?;
    let network = u32::from(v4).checked_shr(host_bits).unwrap_or(0).checked_shl(host_bits);
    Some(IpAddr::V4((network.unwrap_or(0) + 1).into()))
}

/// Runs an example; an error is one sentence on standard error, not a debug dump.
pub fn run(example: fn(&[String]) -> Outcome) -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match example(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("error: {e}");
            ExitCode::FAILURE
        }
    }
}
