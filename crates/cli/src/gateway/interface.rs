//! The guest's interface: a TAP, or where its device node may not be opened a veth.

use std::io;

use fulmar::Device;
use fulmar::base::EtherAddr;
use fulmar::devices::tap_device::{Tap, TapConfig};
use fulmar_gateway::guest::GuestNetwork;

/// Makes the interface in the namespace of the calling thread. `mac`: the gateway's Ethernet address.
///
/// # Errors
/// A sentence with what to do: the device node, the name.
pub fn open(network: &GuestNetwork, mac: Option<[u8; 6]>) -> io::Result<Box<dyn Device>> {
    let config = TapConfig {
        name: network.name.clone(),
        ether: mac.map(EtherAddr),
        mtu: Some(network.mtu as usize),
        // A contained process has no io_uring, and posts no buffers.
        predict: false,
        one_by_one: true,
        steer: false,
        flow_queues: 0,
    };
    let tap = Tap::open(&config).map_err(|e| {
        let advice = match e.source.kind() {
            io::ErrorKind::PermissionDenied => {
                "let root run `chmod 666 /dev/net/tun` once; for good, with a udev rule \
                 `KERNEL==\"tun\", MODE=\"0666\"`"
            }
            _ => &e.advice,
        };
        let what = format!("cannot make the guest's interface: {}: {}; {advice}", e.what, e.source);
        io::Error::new(e.source.kind(), what)
    })?;
    Ok(Box::new(tap))
}
