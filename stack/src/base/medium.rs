//! The medium of an interface: what is in front of the IP header on the wire.

use crate::base::EtherAddr;

/// The medium of an interface.
///
/// In memory every frame starts with an Ethernet header of 14 bytes, so that one code handles all media. On
/// [`Medium::Ip`] that header never leaves the host: the device writes it in front of each received packet and removes
/// it from each sent packet.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Medium {
    /// Ethernet frames: neighbours are resolved by ARP and neighbour discovery.
    #[default]
    Ethernet,
    /// IP packets without a link layer, point-to-point (Linux: ARPHRD_NONE with IFF_POINTOPOINT and
    /// IFF_NOARP). All packets go to the one peer. No ARP packet and no neighbour solicitation is sent or
    /// answered.
    Ip,
}

impl Medium {
    /// Constant address of the stack in the headers of [`Medium::Ip`].
    pub const OWN: EtherAddr = EtherAddr([0x02, 0, 0, 0, 0, 1]);
    /// Constant address of the peer in the headers of [`Medium::Ip`].
    pub const PEER: EtherAddr = EtherAddr([0x02, 0, 0, 0, 0, 2]);
}
