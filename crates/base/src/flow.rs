//! Who talks to whom: hardware addresses, flow keys, ids.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};

/// A 48-bit Ethernet address.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct EtherAddr(pub [u8; 6]);

impl EtherAddr {
    /// ff:ff:ff:ff:ff:ff.
    pub const BROADCAST: EtherAddr = EtherAddr([0xff; 6]);

    /// Whether the group bit is set (this includes broadcast).
    pub const fn is_multicast(self) -> bool {
        self.0[0] & 1 != 0
    }

    /// Whether a station may own this address: not a group, not all zero.
    pub fn is_unicast(self) -> bool {
        !self.is_multicast() && self.0 != [0; 6]
    }

    /// The group address that carries an IPv4 multicast group (RFC 1112 section 6.4).
    pub const fn for_ipv4_multicast(a: Ipv4Addr) -> EtherAddr {
        let o = a.octets();
        EtherAddr([0x01, 0x00, 0x5e, o[1] & 0x7f, o[2], o[3]])
    }

    /// The group address that carries an IPv6 multicast group (RFC 2464 section 7).
    pub const fn for_ipv6_multicast(a: Ipv6Addr) -> EtherAddr {
        let o = a.octets();
        EtherAddr([0x33, 0x33, o[12], o[13], o[14], o[15]])
    }
}

impl core::fmt::Display for EtherAddr {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

/// The interface index that scopes a link-local address; 0 for every other address.
pub type Zone = u32;

/// Both ends of a flow, seen from this stack. Addresses are kept as 128 bits (IPv4 in its
/// v4-mapped form), so that one table serves both versions.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct FlowKey {
    local: u128,
    remote: u128,
    /// Port of this stack.
    pub local_port: u16,
    /// Port of the peer.
    pub remote_port: u16,
    /// Zone of the link-local addresses, else 0.
    pub zone: Zone,
}

fn to_bits(a: IpAddr) -> u128 {
    match a {
        IpAddr::V4(a) => a.to_ipv6_mapped().to_bits(),
        IpAddr::V6(a) => a.to_bits(),
    }
}

fn from_bits(b: u128) -> IpAddr {
    let a = Ipv6Addr::from_bits(b);
    a.to_ipv4_mapped().map_or(IpAddr::V6(a), IpAddr::V4)
}

impl FlowKey {
    /// The key of a flow between two addresses of the same version.
    pub fn new(local: SocketAddr, remote: SocketAddr) -> FlowKey {
        FlowKey {
            local: to_bits(local.ip()),
            remote: to_bits(remote.ip()),
            local_port: local.port(),
            remote_port: remote.port(),
            zone: zone_of(remote),
        }
    }

    /// The local address; a v4-mapped IPv6 address comes back as IPv4.
    pub fn local_ip(&self) -> IpAddr {
        from_bits(self.local)
    }

    /// The remote address; a v4-mapped IPv6 address comes back as IPv4.
    pub fn remote_ip(&self) -> IpAddr {
        from_bits(self.remote)
    }

    /// Local address and port.
    pub fn local(&self) -> SocketAddr {
        with_zone(self.local_ip(), self.local_port, self.zone)
    }

    /// Remote address and port.
    pub fn remote(&self) -> SocketAddr {
        with_zone(self.remote_ip(), self.remote_port, self.zone)
    }

    /// All of the key, for hashing.
    #[inline]
    pub(crate) fn words(&self) -> [u64; 5] {
        let ports = u64::from(self.local_port) << 16 | u64::from(self.remote_port);
        let ends = u64::from(self.zone) << 32 | ports;
        let (local, remote) = (self.local, self.remote);
        [(local >> 64) as u64, local as u64, (remote >> 64) as u64, remote as u64, ends]
    }

    /// The same in fewer words, if both addresses are IPv4.
    #[inline]
    pub(crate) fn ipv4_words(&self) -> Option<[u64; 2]> {
        const MAPPED: u128 = 0xffff;
        let is_ipv4 = self.local >> 32 == MAPPED && self.remote >> 32 == MAPPED;
        let [_, local, _, remote, ends] = self.words();
        is_ipv4.then_some([local << 32 | remote & 0xffff_ffff, ends])
    }
}

/// The zone of an address: the scope id of IPv6, 0 for IPv4.
pub fn zone_of(a: SocketAddr) -> Zone {
    match a {
        SocketAddr::V4(_) => 0,
        SocketAddr::V6(a) => a.scope_id(),
    }
}

/// A socket address with its zone, which only link-local IPv6 keeps.
pub fn with_zone(ip: IpAddr, port: u16, zone: Zone) -> SocketAddr {
    match ip {
        IpAddr::V4(a) => SocketAddr::V4(SocketAddrV4::new(a, port)),
        IpAddr::V6(a) => {
            let zone = if a.is_unicast_link_local() { zone } else { 0 };
            SocketAddr::V6(SocketAddrV6::new(a, port, 0, zone))
        }
    }
}

/// A slot in one of a shard's tables, with the generation that tells a reused slot from the one
/// that was meant. Handles are numbers, never pointers.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct SlotId {
    /// Index into the table.
    pub index: u32,
    /// Counts how often the slot was reused.
    pub generation: u32,
}

/// The name of a socket anywhere in a stack.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct SocketHandle {
    /// Which shard owns the socket.
    pub shard: u16,
    /// Which socket of that shard.
    pub slot: SlotId,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_survive_the_key() {
        for (l, r) in [("10.0.0.1:5000", "10.0.0.2:80"), ("[fe80::1%3]:1", "[fe80::2%3]:2")] {
            let (l, r): (SocketAddr, SocketAddr) = (l.parse().unwrap(), r.parse().unwrap());
            let k = FlowKey::new(l, r);
            assert_eq!((k.local(), k.remote()), (l, r));
        }
    }
}
