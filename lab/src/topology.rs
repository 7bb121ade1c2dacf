//! A device of ours and the namespace of its kernel peer: the topology of every variant over a real
//! device, fulmar's and the floor's alike.
//!
//! ```text
//! tap:      [ we: open the device ]== TAP == [ kernel: PEER_IP, PEER_MAC ]
//! packet:   [ veth0, bound by us  ]== veth ==[ veth1: PEER_IP, PEER_MAC  ]
//! ```
//! We speak as [`OUR_IP`] and [`OUR_MAC`] on either. On veth the kernel at our end knows neither: it
//! takes every frame for another station's and drops it before its own IP looks at it.

use fulmar_gateway::netns::Netns;
use fulmar_gateway::netns::VethEnd;
use std::io;
use std::net::{IpAddr, Ipv4Addr};

/// The MTU of every device, in bytes.
pub const MTU: u32 = 1500;
/// Our hardware address.
pub const OUR_MAC: [u8; 6] = [2, 0, 0, 0, 0x72, 2];
/// The kernel peer's hardware address.
pub const PEER_MAC: [u8; 6] = [2, 0, 0, 0, 0x72, 1];
/// Our address.
pub const OUR_IP: Ipv4Addr = Ipv4Addr::new(10, 72, 0, 2);
/// The kernel peer's address.
pub const PEER_IP: Ipv4Addr = Ipv4Addr::new(10, 72, 0, 1);
/// Bits of the prefix that both share.
pub const PREFIX: u8 = 24;

/// The TAP, in the namespace of the kernel peer.
pub const TAP: &str = "tap0";
/// Our end of a veth pair.
pub const NEAR_VETH: &str = "veth0";
/// The kernel peer's.
pub const FAR_VETH: &str = "veth1";

/// A device, opened, with its kernel end configured and up.
pub struct Topology<D> {
    /// The device as `open` returned it.
    pub device: D,
    /// Where kernel peers live: hand it to [`crate::peer::Peer::spawn`].
    pub peer_netns: Netns,
    /// The namespace of our end of a veth pair, which must outlive the device.
    pub(crate) _our_netns: Option<Netns>,
}

/// Makes a namespace and, in it, the TAP interface that `open` opens by its name.
pub fn tap<D: Send>(open: impl FnOnce(&str) -> io::Result<D> + Send) -> io::Result<Topology<D>> {
    let netns = Netns::new()?;
    let device = netns.run(|| open(TAP))?;
    let (mut netlink, index) = (netns.netlink()?, netns.if_index(TAP)?);
    netlink.set_mac(index, PEER_MAC)?;
    netlink.set_mtu(index, MTU)?;
    netns.set_address(TAP, IpAddr::V4(PEER_IP), PREFIX)?;
    Ok(Topology { device, peer_netns: netns, _our_netns: None })
}

/// Makes two namespaces joined by veth; `open` binds to our end by its name, in its namespace.
pub fn packet<D: Send>(open: impl FnOnce(&str) -> io::Result<D> + Send) -> io::Result<Topology<D>> {
    let (ours, peers) = (Netns::new()?, Netns::new()?);
    let near = VethEnd { name: NEAR_VETH, mac: [2, 0, 0, 0, 0x72, 3], mtu: MTU };
    let far = VethEnd { name: FAR_VETH, mac: PEER_MAC, mtu: MTU };
    ours.add_veth(&near, &peers, &far)?;
    ours.set_up(near.name)?;
    peers.set_address(far.name, IpAddr::V4(PEER_IP), PREFIX)?;
    let device = ours.run(|| open(near.name))?;
    Ok(Topology { device, peer_netns: peers, _our_netns: Some(ours) })
}
