//! What the examples share: the device argument, and errors as sentences.

#![allow(dead_code, reason = "each example uses its part")]

use std::error::Error;
use std::net::IpAddr;
use std::process::ExitCode;

use fulmar::{Cidr, Device, Stack, devices};

/// The result of an example.
pub type Outcome<T = ()> = Result<T, Box<dyn Error>>;

/// Where an example runs.
pub enum Place {
    /// On a device, as `ADDRESS/PREFIX`; the peer is somebody else.
    Network(Stack),
    /// In this process alone: both ends, joined directly.
    Demo(Stack, Stack),
}

/// The address of the example itself, unless it is given; of the other end of `link`.
pub const OURS: &str = "10.77.0.2/24";
pub const PEER: &str = "10.77.0.1/24";

/// What every example says about its first argument.
pub const DEVICE_HELP: &str = "DEVICE is one of
    link          both ends in this process, for a look without any rights
    fulmar0       the interface of a shell of `fulmar sandbox`, where the kernel is 10.77.0.1
    tap:NAME      a TAP interface, made if need be; the kernel is at its other end
    tun:NAME      a TUN interface, the same without Ethernet
    packet:IF     an Ethernet interface; fulmar is a station of its own on that network
ADDRESS is fulmar's own address (10.77.0.2/24 if you give none). After starting on a TAP or TUN, give the
kernel its end from another terminal:
    ip addr add 10.77.0.1/24 dev NAME && ip link set NAME up
";

/// Opens what the device argument says.
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
