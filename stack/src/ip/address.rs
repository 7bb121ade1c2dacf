//! The addresses of the interface: destination classification and source address selection.

use alloc::vec::Vec;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::base::EtherAddr;
use crate::route::Prefix;

use crate::ip::source;
use crate::ip::{ConfigError, IfAddr};

/// The all-hosts group (RFC 1112 section 4), the only IPv4 group that is joined.
const ALL_HOSTS: Ipv4Addr = Ipv4Addr::new(224, 0, 0, 1);
/// The all-nodes groups of link and interface scope (RFC 4291 section 2.7.1).
pub(crate) const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
const ALL_NODES_INTERFACE: Ipv6Addr = Ipv6Addr::new(0xff01, 0, 0, 0, 0, 0, 0, 1);
/// The link-local prefix (RFC 4291 section 2.5.6).
pub(crate) const LINK_LOCAL: Prefix =
    Prefix { addr: IpAddr::V6(Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 0)), len: 64 };

/// Classification of a destination address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum DstClass {
    /// An address of this interface.
    Own,
    /// An IPv4 broadcast address of this interface.
    Broadcast,
    /// A multicast group that this interface has joined.
    Group,
    /// Any other address.
    Foreign,
}

/// The addresses of one interface, in the order of their configuration.
#[derive(Clone, Debug, Default)]
pub(crate) struct Addresses {
    list: Vec<IfAddr>,
    /// The broadcast addresses of the links in `list`, cached because every packet's source is
    /// checked against them.
    broadcasts: Vec<Ipv4Addr>,
}

impl Addresses {
    pub(crate) fn iter(&self) -> impl Iterator<Item = &IfAddr> {
        self.list.iter()
    }

    /// Adds an address, or changes its prefix.
    pub(crate) fn insert(&mut self, new: IfAddr) -> Result<(), ConfigError> {
        let prefix = new.prefix().ok_or(ConfigError::PrefixLength(new.addr))?;
        if !is_assignable(new.addr) || broadcast_of(&prefix).map(IpAddr::V4) == Some(new.addr) {
            return Err(ConfigError::Address(new.addr));
        }
        match self.list.iter_mut().find(|a| a.addr == new.addr) {
            Some(old) => *old = new,
            None => self.list.push(new),
        }
        self.update_broadcasts();
        Ok(())
    }

    pub(crate) fn remove(&mut self, addr: IpAddr) -> Option<IfAddr> {
        let i = self.list.iter().position(|a| a.addr == addr)?;
        let old = self.list.remove(i);
        self.update_broadcasts();
        Some(old)
    }

    fn update_broadcasts(&mut self) {
        let links = self.list.iter().filter_map(IfAddr::prefix);
        self.broadcasts = links.filter_map(|p| broadcast_of(&p)).collect();
    }

    #[inline]
    pub(crate) fn is_own(&self, ip: IpAddr) -> bool {
        self.list.iter().any(|a| a.addr == ip)
    }

    /// 255.255.255.255, or the broadcast address of one of our links (RFC 1122 section 3.3.6).
    #[inline]
    pub(crate) fn is_broadcast(&self, ip: IpAddr) -> bool {
        matches!(ip, IpAddr::V4(a) if a.is_broadcast() || self.broadcasts.contains(&a))
    }

    /// Classifies the destination `ip`.
    #[inline]
    pub(crate) fn classify(&self, ip: IpAddr) -> DstClass {
        if self.is_own(ip) {
            return DstClass::Own;
        }
        match ip {
            IpAddr::V4(a) if a == ALL_HOSTS => DstClass::Group,
            IpAddr::V4(_) if self.is_broadcast(ip) => DstClass::Broadcast,
            IpAddr::V6(a) if a.is_multicast() && self.has_joined(a) => DstClass::Group,
            _ => DstClass::Foreign,
        }
    }

    fn has_joined(&self, group: Ipv6Addr) -> bool {
        let mut own = self.list.iter().filter_map(|a| match a.addr {
            IpAddr::V6(a) => Some(a),
            IpAddr::V4(_) => None,
        });
        group == ALL_NODES
            || group == ALL_NODES_INTERFACE
            || own.any(|a| solicited_node(a) == group)
    }

    /// Selects the source address for packets to `dst` via `next_hop`: see [`source::select`].
    pub(crate) fn source_for(&self, dst: IpAddr, next_hop: IpAddr) -> Option<IpAddr> {
        source::select(self.list.iter(), dst, next_hop)
    }
}

/// Whether the address can be assigned to an interface. A v4-mapped IPv6 address cannot: flow keys
/// represent IPv4 addresses in that form.
fn is_assignable(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(a) => {
            // 240.0.0.0/4 (RFC 1112 section 4).
            let is_reserved = a.to_bits() >> 28 == 0xf;
            !a.is_unspecified() && !a.is_multicast() && !a.is_broadcast() && !is_reserved
        }
        IpAddr::V6(a) => !a.is_unspecified() && !a.is_multicast() && a.to_ipv4_mapped().is_none(),
    }
}

/// Whether the address can be the source of a packet from another host (RFC 1122 section 3.2.1.3,
/// RFC 4291 section 2.7). The caller handles the unspecified IPv6 address, which duplicate address
/// detection uses.
pub(crate) fn is_possible_source(ip: IpAddr) -> bool {
    is_assignable(ip) && !ip.is_loopback()
}

/// All host bits set; a /31 (RFC 3021) and a /32 have no broadcast address.
fn broadcast_of(link: &Prefix) -> Option<Ipv4Addr> {
    let IpAddr::V4(network) = link.addr else { return None };
    let host_bits = u32::MAX.checked_shr(link.len.into()).filter(|_| link.len < 31)?;
    Some(Ipv4Addr::from_bits(network.to_bits() | host_bits))
}

/// ff02::1:ff00:0/104 (RFC 4291 section 2.7.1).
pub(crate) fn is_solicited_node(a: Ipv6Addr) -> bool {
    a.segments().starts_with(&[0xff02, 0, 0, 0, 0, 1]) && a.segments()[6] >> 8 == 0xff
}

/// Whether the address has link scope, or a smaller one.
pub(crate) fn is_link_scoped(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(a) => a.is_link_local(),
        IpAddr::V6(a) => a.is_unicast_link_local() || is_link_multicast(a),
    }
}

/// Multicast of interface or link scope (RFC 4291 section 2.7).
fn is_link_multicast(a: Ipv6Addr) -> bool {
    let [kind, scope, ..] = a.octets();
    kind == 0xff && matches!(scope & 0xf, 1 | 2)
}

/// The solicited-node multicast address of `a` (RFC 4291 section 2.7.1).
pub(crate) fn solicited_node(a: Ipv6Addr) -> Ipv6Addr {
    const PREFIX: u128 = 0xff02_0000_0000_0000_0000_0001_ff00_0000;
    Ipv6Addr::from_bits(PREFIX | (a.to_bits() & 0x00ff_ffff))
}

/// The link-local address made from an Ethernet address (RFC 4291 appendix A, RFC 2464 section 5).
pub(crate) fn link_local(ether: EtherAddr) -> Ipv6Addr {
    let [a, b, c, d, e, f] = ether.0;
    let id = u64::from_be_bytes([a ^ 0x02, b, c, 0xff, 0xfe, d, e, f]);
    Ipv6Addr::from_bits((0xfe80 << 112) | u128::from(id))
}

/// The Ethernet address of a broadcast or multicast destination.
pub(crate) fn group_ether(ip: IpAddr) -> EtherAddr {
    match ip {
        IpAddr::V4(a) if a.is_multicast() => EtherAddr::for_ipv4_multicast(a),
        IpAddr::V4(_) => EtherAddr::BROADCAST,
        IpAddr::V6(a) => EtherAddr::for_ipv6_multicast(a),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addresses(list: &[(&str, u8)]) -> Addresses {
        let mut a = Addresses::default();
        for (addr, prefix_len) in list {
            let new = IfAddr { addr: addr.parse().unwrap(), prefix_len: *prefix_len };
            a.insert(new).unwrap();
        }
        a
    }

    fn ip(s: &str) -> IpAddr {
        s.parse().unwrap()
    }

    #[test]
    fn broadcast_addresses_are_classified() {
        let a = addresses(&[("10.1.2.3", 24), ("192.0.2.1", 31)]);
        assert_eq!(a.classify(ip("10.1.2.255")), DstClass::Broadcast);
        assert_eq!(a.classify(ip("255.255.255.255")), DstClass::Broadcast);
        assert_eq!(a.classify(ip("10.1.3.255")), DstClass::Foreign);
        // A point-to-point /31 has no broadcast address (RFC 3021).
        assert_eq!(a.classify(ip("192.0.2.1")), DstClass::Own);
        assert_eq!(a.classify(ip("192.0.2.0")), DstClass::Foreign);
    }

    #[test]
    fn the_solicited_node_groups_of_own_addresses_are_joined() {
        let a = addresses(&[("2001:db8::12:3456", 64)]);
        assert_eq!(a.classify(ip("ff02::1:ff12:3456")), DstClass::Group);
        assert_eq!(a.classify(ip("ff02::1:ff12:3457")), DstClass::Foreign);
        assert_eq!(a.classify(ip("ff02::1")), DstClass::Group);
        assert_eq!(a.classify(ip("ff02::2")), DstClass::Foreign);
        assert_eq!(a.classify(ip("224.0.0.1")), DstClass::Group);
    }

    #[test]
    fn link_local_address_comes_from_the_ethernet_address() {
        let ether = EtherAddr([0x02, 0x11, 0x22, 0x33, 0x44, 0x55]);
        assert_eq!(IpAddr::V6(link_local(ether)), ip("fe80::11:22ff:fe33:4455"));
    }

    #[test]
    fn the_source_has_the_scope_and_prefix_of_the_destination() {
        let a = addresses(&[
            ("2001:db8:1::1", 64),
            ("2001:db8:2::1", 64),
            ("fe80::1", 64),
            ("10.0.0.1", 24),
            ("10.0.1.1", 24),
        ]);
        let source = |dst: &str, hop: &str| a.source_for(ip(dst), ip(hop)).unwrap();
        assert_eq!(source("2001:db8:2::9", "2001:db8:2::9"), ip("2001:db8:2::1"));
        assert_eq!(source("fe80::9", "fe80::9"), ip("fe80::1"));
        assert_eq!(source("ff02::1", "ff02::1"), ip("fe80::1"));
        assert_eq!(source("10.0.1.9", "10.0.1.9"), ip("10.0.1.1"));
        // Off the link, the address of the gateway's link counts.
        assert_eq!(source("192.0.2.1", "10.0.1.254"), ip("10.0.1.1"));
        assert_eq!(source("192.0.2.1", "203.0.113.1"), ip("10.0.0.1"));
        assert_eq!(source("10.0.1.1", "10.0.1.1"), ip("10.0.1.1"));
        assert_eq!(addresses(&[("10.0.0.1", 8)]).source_for(ip("::2"), ip("::2")), None);
    }

    #[test]
    fn group_and_mapped_addresses_cannot_be_assigned() {
        let mut a = Addresses::default();
        for bad in ["224.0.0.9", "0.0.0.0", "255.255.255.255", "ff02::1", "::", "::ffff:10.0.0.1"] {
            let new = IfAddr { addr: ip(bad), prefix_len: 24 };
            assert_eq!(a.insert(new), Err(ConfigError::Address(ip(bad))), "{bad}");
        }
        let broadcast = IfAddr { addr: ip("10.0.0.255"), prefix_len: 24 };
        assert_eq!(a.insert(broadcast), Err(ConfigError::Address(ip("10.0.0.255"))));
        let long = IfAddr { addr: ip("10.0.0.1"), prefix_len: 33 };
        assert_eq!(a.insert(long), Err(ConfigError::PrefixLength(ip("10.0.0.1"))));
    }
}
