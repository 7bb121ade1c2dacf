//! The options that every command with a device takes, and the stack that comes of them.

use crate::failure::{During, Failure, Outcome};
use crate::faults::FaultSpec;
use crate::sandbox::{DEFAULT_INTERFACE, FULMAR_ADDRESSES, KERNEL_ADDRESSES};
use fulmar::{Cidr, Device, Stack, TcpStream, devices};
use fulmar_lab::netns::Netns;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

/// The options.
#[derive(clap::Args, Clone, Debug)]
#[command(next_help_heading = "Device and addresses")]
pub struct StackArgs {
    /// tap:NAME, packet:INTERFACE, or auto: a TAP called fulmar0, else the interface fulmar0
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    device: DeviceSpec,
    /// An address of the stack with its prefix length; may be repeated [default: 10.77.0.2/24 and
    /// fd77::2/64]
    #[arg(long = "addr", value_name = "CIDR")]
    addresses: Vec<Cidr>,
    /// Where packets to other networks go; one for each version of IP
    #[arg(long = "gateway", value_name = "ADDRESS")]
    gateways: Vec<IpAddr>,
    /// Give the kernel's end of the TAP this address [default, with a new TAP and without --addr:
    /// 10.77.0.1/24 and fd77::1/64]
    #[arg(long = "peer-addr", value_name = "CIDR")]
    peer_addresses: Vec<Cidr>,
    /// The largest IP packet, in bytes
    #[arg(long, value_name = "BYTES")]
    mtu: Option<usize>,
    /// Write every frame to this file (pcapng)
    #[arg(long, value_name = "FILE")]
    pcap: Option<PathBuf>,
    /// Make the device a bad network: loss=1%,reorder=1%,dup=1%,corrupt=0.1%,delay=5ms,seed=7
    #[arg(long, value_name = "FAULTS")]
    faults: Option<FaultSpec>,
}

/// Which device.
#[derive(Clone, PartialEq, Eq, Debug)]
enum DeviceSpec {
    Auto,
    Tap(String),
    Packet(String),
}

impl FromStr for DeviceSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<DeviceSpec, String> {
        match text.split_once(':') {
            None if text == "auto" => Ok(DeviceSpec::Auto),
            Some(("tap", name)) => interface_name(name).map(DeviceSpec::Tap),
            Some(("packet", name)) => interface_name(name).map(DeviceSpec::Packet),
            _ => Err(format!("`{text}` is not a device: write tap:NAME, packet:INTERFACE or auto")),
        }
    }
}

/// Linux names interfaces with 1 to 15 bytes, no slash, no space (IFNAMSIZ; dev_valid_name).
fn interface_name(name: &str) -> Result<String, String> {
    let fits = (1..=15).contains(&name.len()) && name != "." && name != "..";
    let clean = !name.contains(|c: char| c == '/' || c == ':' || c.is_whitespace());
    if fits && clean {
        return Ok(name.to_owned());
    }
    Err(format!("`{name}` cannot be the name of an interface (1 to 15 characters)"))
}

/// A device, and how it came to be.
struct Opened {
    device: Box<dyn Device>,
    /// The TAP that this command made, whose kernel end is still bare.
    new_tap: Option<String>,
    /// fulmar0, on which the addresses of the sandbox are a safe guess.
    is_default: bool,
}

/// A running stack and the end of it.
pub struct Session {
    stack: Stack,
}

impl Session {
    /// The stack.
    pub fn stack(&self) -> &Stack {
        &self.stack
    }

    /// Connects, from a chosen local port if one is given.
    pub fn connect(
        &self,
        to: SocketAddr,
        local_port: Option<u16>,
        timeout: Duration,
    ) -> io::Result<TcpStream> {
        match local_port {
            None => TcpStream::connect_timeout(&self.stack, &to, timeout),
            Some(port) => TcpStream::connect_from(&self.stack, port, &to, timeout),
        }
    }

    /// Ends the stack: what was accepted is delivered, within the documented time.
    pub fn close(self) {
        drop(self.stack);
    }
}
