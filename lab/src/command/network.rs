//! The device and the addresses of a stack.

use crate::outcome::Outcome;
use fulmar::{Cidr, Stack, devices};
use std::net::IpAddr;

/// The options.
#[derive(clap::Args, Clone, Debug)]
pub struct DeviceArgs {
    /// The device: an interface name, tap:NAME, tun:NAME or packet:INTERFACE
    #[arg(long, value_name = "DEVICE", default_value = "fulmar0")]
    device: String,
    /// Address of the stack with its prefix length; may be repeated
    #[arg(long = "addr", value_name = "CIDR", default_values = ["10.77.0.2/24", "fd77::2/64"])]
    addresses: Vec<Cidr>,
    /// Default gateway; may be given once for each IP version
    #[arg(long = "gateway", value_name = "ADDRESS")]
    gateways: Vec<IpAddr>,
}

impl DeviceArgs {
    /// Opens the device and builds the stack.
    pub fn open(&self) -> Outcome<Stack> {
        let device = devices::open(&self.device).map_err(|e| e.to_string())?;
        let mut builder = Stack::builder().device(device).name("fulmar-lab");
        for &address in &self.addresses {
            builder = builder.address(address);
        }
        for &gateway in &self.gateways {
            builder = builder.gateway(gateway);
        }
        builder.build().map_err(|e| e.to_string())
    }
}
