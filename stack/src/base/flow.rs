//! Ethernet addresses, flow keys and socket handles.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};

/// A 48-bit Ethernet address.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct EtherAddr(pub [u8; 6]);

impl EtherAddr {
    /// ff:ff:ff:ff:ff:ff.
    pub const BROADCAST: EtherAddr = EtherAddr([0xff; 6]);

    /// Whether the group bit is set, as in multicast and broadcast addresses.
    pub const fn is_multicast(self) -> bool {
        self.0[0] & 1 != 0
    }

    /// Whether a station may have this address: neither a group address nor all zeroes.
    pub fn is_unicast(self) -> bool {
        !self.is_multicast() && self.0 != [0; 6]
    }

    /// The Ethernet address of an IPv4 multicast group (RFC 1112 section 6.4).
    pub const fn for_ipv4_multicast(a: Ipv4Addr) -> EtherAddr {
        let o = a.octets();
        EtherAddr([0x01, 0x00, 0x5e, o[1] & 0x7f, o[2], o[3]])
    }

    /// The Ethernet address of an IPv6 multicast group (RFC 2464 section 7).
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

/// The zone index of a link-local address (RFC 4007): an interface index. 0 for other addresses.
pub(crate) type Zone = u32;

/// The local and remote endpoint of a flow. IPv4 addresses are stored as v4-mapped IPv6 addresses, so one
/// table serves both versions.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct FlowKey {
    local: u128,
    remote: u128,
    /// The local port.
    pub local_port: u16,
    /// The peer's port.
    pub remote_port: u16,
    /// The zone of link-local addresses, else 0.
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

    /// The local address; a v4-mapped address is returned as IPv4.
    pub fn local_ip(&self) -> IpAddr {
        from_bits(self.local)
    }

    /// The remote address; a v4-mapped address is returned as IPv4.
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

    /// The whole key as words, for hashing.
    #[inline]
    pub(crate) fn words(&self) -> [u64; 5] {
        let ports = u64::from(self.local_port) << 16 | u64::from(self.remote_port);
        let ends = u64::from(self.zone) << 32 | ports;
        let (local, remote) = (self.local, self.remote);
        [(local >> 64) as u64, local as u64, (remote >> 64) as u64, remote as u64, ends]
    }

    /// The whole key in two words, if both addresses are IPv4.
    #[inline]
    pub(crate) fn ipv4_words(&self) -> Option<[u64; 2]> {
        const MAPPED: u128 = 0xffff;
        let is_ipv4 = self.local >> 32 == MAPPED && self.remote >> 32 == MAPPED;
        let [_, local, _, remote, ends] = self.words();
        is_ipv4.then_some([local << 32 | remote & 0xffff_ffff, ends])
    }
}

/// The zone of an address: `sin6_scope_id`, or 0 for IPv4.
pub fn zone_of(a: SocketAddr) -> Zone {
    match a {
        SocketAddr::V4(_) => 0,
        SocketAddr::V6(a) => a.scope_id(),
    }
}

/// A socket address with a zone, which is used only if the address is link-local IPv6.
pub fn with_zone(ip: IpAddr, port: u16, zone: Zone) -> SocketAddr {
    match ip {
        IpAddr::V4(a) => SocketAddr::V4(SocketAddrV4::new(a, port)),
        IpAddr::V6(a) => {
            let zone = if a.is_unicast_link_local() { zone } else { 0 };
            SocketAddr::V6(SocketAddrV6::new(a, port, 0, zone))
        }
    }
}

/// A handle of a slot in a table of a shard. The generation detects a handle whose slot has been reused.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct SlotId {
    /// Index into the table.
    pub index: u32,
    /// Number of times the slot has been reused.
    pub generation: u32,
}

/// A handle of a socket, unique in a stack.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct SocketHandle {
    /// The shard that owns the socket.
    pub shard: u16,
    /// The socket's slot in that shard.
    pub slot: SlotId,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flow_key_returns_the_addresses_it_was_made_from() {
        for (l, r) in [("10.0.0.1:5000", "10.0.0.2:80"), ("[fe80::1%3]:1", "[fe80::2%3]:2")] {
            let (l, r): (SocketAddr, SocketAddr) = (l.parse().unwrap(), r.parse().unwrap());
            let k = FlowKey::new(l, r);
            assert_eq!((k.local(), k.remote()), (l, r));
        }
    }
}
