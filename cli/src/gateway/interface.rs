//! The guest's interface: a TAP with one queue or several; where its device node is missing, may not be opened or is
//! another device's, one end of a veth pair with a packet socket on the other one.
//!
//! ```text
//!   guest's namespace                    a namespace of the gateway's own
//!   kernel ── veth ────────────────────── veth ── packet socket ── the stack
//! ```
//!
//! No process is in the second namespace and no file names it: the sockets alone hold it. It belongs to the caller's
//! user namespace, so that a guest with CAP_NET_ADMIN can list, make and remove interfaces there by the id that the
//! kernel gives a peer's namespace (rtnetlink(7), IFLA_TARGET_NETNSID). This gains the guest no more than the removal
//! of its own interface, because that namespace has no interface of the host. The veth's end there has no addresses and
//! answers nothing; the stack uses an Ethernet address other than the veth's.
//!
//! Frames pass with virtio-net headers, up to 64 KiB long and without checksums, as they do through a TAP.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsFd;

use fulmar::device::Device;
use fulmar::device::EtherAddr;
use fulmar::devices::OpenError;
use fulmar::devices::{PacketConfig, PacketSocket};
use fulmar::devices::{Tap, TapConfig};
use fulmar_gateway::guest::GuestNetwork;
use fulmar_gateway::netns::{Netns, VethEnd};

/// Index of the veth's end in the gateway's namespace: another one than in the guest's, see [`Netlink::add_veth_at`](fulmar_gateway::netns::Netlink::add_veth_at).
const OWN_INDEX: u32 = 1 << 20;

/// The far end of a guest's interface.
pub struct Interface {
    /// A device for each of its queues.
    pub queues: Vec<Box<dyn Device>>,
    /// Description for the log.
    pub what: String,
}

/// Makes the interface in the guest's namespace. `mac`: the gateway's Ethernet address.
///
/// # Errors
/// A sentence with what to do: the device node, the name.
pub fn open(
    network: &GuestNetwork,
    guest: &Netns,
    mac: Option<[u8; 6]>,
    queues: u16,
) -> io::Result<Interface> {
    let taps = guest.run(|| {
        fulmar_gateway::netns::loopback_up()?;
        Ok(open_taps(network, mac, queues))
    })?;
    match taps {
        Ok(taps) => Ok(Interface { queues: boxed(taps), what: "a TAP".to_owned() }),
        Err(e) if e.is_without_node() => {
            let sockets = open_veth(network, guest, mac, queues).map_err(|veth| {
                let sentence =
                    format!("{}; a veth pair instead failed too: {veth}", sentence_of(&e));
                io::Error::new(veth.kind(), sentence)
            })?;
            let what = format!("one end of a veth pair, with a packet socket on the other: {e}");
            Ok(Interface { queues: boxed(sockets), what })
        }
        Err(e) => Err(io::Error::new(e.source.kind(), sentence_of(&e))),
    }
}

fn boxed(devices: Vec<impl Device + 'static>) -> Vec<Box<dyn Device>> {
    devices.into_iter().map(|device| Box::new(device) as Box<dyn Device>).collect()
}

/// Why the TAP cannot be created, and the remedy.
fn sentence_of(e: &OpenError) -> String {
    let advice = match e.source.kind() {
        io::ErrorKind::PermissionDenied => {
            "as root, run `chmod 666 /dev/net/tun`, or add a udev rule to make it permanent: \
             `KERNEL==\"tun\", MODE=\"0666\"`"
        }
        _ => &e.advice,
    };
    format!("cannot create the guest's interface: {}: {}; {advice}", e.what, e.source)
}

/// A TAP of the calling thread's namespace.
fn open_taps(
    network: &GuestNetwork,
    mac: Option<[u8; 6]>,
    queues: u16,
) -> Result<Vec<Tap>, OpenError> {
    let config = TapConfig {
        name: network.name.clone(),
        ether: mac.map(EtherAddr),
        mtu: Some(network.mtu as usize),
        // A contained process has no io_uring, and posts no buffers.
        predict: false,
        one_by_one: true,
        // The program of the kernel is loaded before the process is contained, if it may be.
        steer: queues > 1,
    };
    Tap::open_queues(&config, queues)
}

/// A veth pair between the guest's namespace and a new one, and packet sockets on its end there.
fn open_veth(
    network: &GuestNetwork,
    guest: &Netns,
    mac: Option<[u8; 6]>,
    queues: u16,
) -> io::Result<Vec<PacketSocket>> {
    let own = Netns::new()?;
    let (name, mtu) = (network.name.as_str(), network.mtu);
    let guests = VethEnd { name, mac: network.mac.map_or_else(random_mac, Ok)?, mtu };
    let gateways = VethEnd { name, mac: random_mac()?, mtu };
    own.netlink()?
        .add_veth_at(&gateways, &guests, guest.as_fd(), OWN_INDEX)
        .map_err(|e| {
            let advice = match e.kind() {
                io::ErrorKind::AlreadyExists => {
                    "; the namespace already has an interface of that name, perhaps of another gateway: end that \
                     gateway, or choose another name with --ns-ifname"
                }
                _ => "",
            };
            io::Error::new(e.kind(), format!("cannot create {name}: {e}{advice}"))
        })?;
    own.set_up_silent(name)?;
    let config = PacketConfig {
        interface: name.to_owned(),
        ether: mac.map(EtherAddr),
        mtu: Some(mtu as usize),
        // A contained process posts no buffers.
        predict: false,
        ..PacketConfig::default()
    };
    own.run(|| Ok(PacketSocket::open_queues(&config, queues)?))
}

/// An Ethernet address that is local and of one station (IEEE 802).
fn random_mac() -> io::Result<[u8; 6]> {
    let mut mac = [0; 6];
    File::open("/dev/urandom")?.read_exact(&mut mac)?;
    mac[0] = mac[0] & !1 | 2;
    Ok(mac)
}
