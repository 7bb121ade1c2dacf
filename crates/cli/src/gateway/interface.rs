//! The guest's interface: a TAP with one queue or several.

use std::io;

use fulmar::Device;
use fulmar::base::EtherAddr;
use fulmar::devices::tap_device::{Tap, TapConfig};
use fulmar_gateway::guest::GuestNetwork;

/// Makes the interface in the namespace of the calling thread: a device for each of its queues. `mac`: the gateway's
/// Ethernet address.
///
/// # Errors
/// A sentence with what to do: the device node, the name.
pub fn open(
    network: &GuestNetwork,
    mac: Option<[u8; 6]>,
    queues: u16,
) -> io::Result<Vec<Box<dyn Device>>> {
    let config = TapConfig {
        name: network.name.clone(),
        ether: mac.map(EtherAddr),
        mtu: Some(network.mtu as usize),
        // A contained process has no io_uring, and posts no buffers.
        predict: false,
        one_by_one: true,
        // The program of the kernel is loaded before the process is contained, if it may be.
        steer: queues > 1,
        flow_queues: 0,
    };
    let taps = Tap::open_queues(&config, queues).map_err(|e| {
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
    Ok(taps.into_iter().map(|tap| Box::new(tap) as Box<dyn Device>).collect())
}
