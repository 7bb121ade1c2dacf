//! What an interface is: addresses, routes, limits.

use alloc::vec::Vec;
use core::net::IpAddr;

use fulmar_base::{Duration, EtherAddr, Zone};
use fulmar_route::{Advice, NeighbourConfig, Prefix, Route};

/// An address of the interface, with the block of addresses that is on its link.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct IfAddr {
    /// The address.
    pub addr: IpAddr,
    /// Leading bits that it shares with its neighbours; 32 or 128 if it has none.
    pub prefix_len: u8,
}

impl IfAddr {
    /// The block of addresses on the link; `None` if `prefix_len` is too long.
    pub fn prefix(&self) -> Option<Prefix> {
        Prefix::new(self.addr, self.prefix_len)
    }
}

/// Settings of one interface.
#[derive(Clone, Debug)]
pub struct Config {
    /// Ethernet address of the interface.
    pub ether: EtherAddr,
    /// Largest IP packet that the link carries, in bytes.
    pub mtu: usize,
    /// The interface's number in scoped addresses. 1: the stack has one interface.
    pub zone: Zone,
    /// Addresses. With any IPv6 address comes the link-local one made from `ether` (RFC 4291
    /// appendix A), unless a link-local one is given.
    pub addresses: Vec<IfAddr>,
    /// Routes beside those to the addresses' own links.
    pub routes: Vec<Route>,
    /// Time to live and hop limit of what is sent. 64: RFC 1340's default, and Linux's.
    pub ttl: u8,
    /// Limits and times of the neighbour table.
    pub neighbours: NeighbourConfig,
    /// ICMP errors sent per second at most, and in one burst (RFC 4443 section 2.4(f) asks for a
    /// token bucket). 1000 and 50: Linux's defaults.
    pub icmp_errors_per_s: u32,
    /// See `icmp_errors_per_s`.
    pub icmp_error_burst: u32,
    /// Echo replies sent per second at most. 20,000: a flood ping across a LAN passes, a reflected
    /// flood costs a bounded share of one core.
    pub echo_replies_per_s: u32,
    /// Echo replies in one burst.
    pub echo_reply_burst: u32,
    /// How long a lowered path MTU is believed: 10 min (RFC 8201 section 4).
    pub path_mtu_lifetime: Duration,
    /// Storage that datagrams hold whose fragments have not all come, in bytes; a datagram of 64 KiB
    /// takes about 100 KB. 4 MiB: Linux's bound.
    pub reassembly_bytes: usize,
    /// Bytes of packets that wait for the addresses of neighbours, half of them of replies at most. 1 MiB.
    pub neighbour_queue_bytes: usize,
    /// Who is told of the memory of a table with many routes.
    pub table_memory: Advice,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            ether: EtherAddr([0x02, 0, 0, 0, 0, 1]),
            mtu: 1500,
            zone: 1,
            addresses: Vec::new(),
            routes: Vec::new(),
            ttl: 64,
            neighbours: NeighbourConfig::default(),
            icmp_errors_per_s: 1000,
            icmp_error_burst: 50,
            echo_replies_per_s: 20_000,
            echo_reply_burst: 1000,
            path_mtu_lifetime: Duration::from_secs(600),
            reassembly_bytes: 4 << 20,
            neighbour_queue_bytes: 1 << 20,
            table_memory: Advice::default(),
        }
    }
}

/// Why a configuration, or a change of it, was refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ConfigError {
    /// The interface's Ethernet address is a group or zero.
    EtherAddr,
    /// The MTU is under 576 bytes (RFC 1122 section 3.3.2), or under 1280 with an IPv6 address
    /// (RFC 8200 section 5), or over 65,535.
    Mtu {
        /// The least that would do.
        least: usize,
    },
    /// An address that no interface may have: unspecified, multicast or broadcast.
    Address(IpAddr),
    /// A prefix is longer than its address has bits.
    PrefixLength(IpAddr),
    /// A route's destination, gateway and source are not of one IP version.
    MixedVersions(Prefix),
    /// A router is on no network of the interface, or is the interface itself.
    Router(Prefix, IpAddr),
    /// A route has no next hops, or more than 64.
    NextHops(Prefix),
    /// There is no room for the route: in its table, for its next hops, or for one more table.
    RoutesFull(Prefix),
}

impl core::fmt::Display for ConfigError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            ConfigError::EtherAddr => {
                f.write_str("the Ethernet address must be that of one station")
            }
            ConfigError::Mtu { least } => {
                let why = if *least > 576 { " (an IPv6 address needs 1280)" } else { "" };
                write!(f, "the MTU must be between {least} and 65535 bytes{why}")
            }
            ConfigError::Address(a) => write!(f, "{a} cannot be the address of an interface"),
            ConfigError::PrefixLength(a) => {
                write!(f, "the prefix length of {a} must be at most its number of bits")
            }
            ConfigError::MixedVersions(p) => {
                write!(f, "the route to {p} needs a gateway and a source of its own IP version")
            }
            ConfigError::Router(p, via) => write!(
                f,
                "the route to {p} goes by {via}, which is no neighbour: give a router on a network of \
                 ours, or first a route to it without one"
            ),
            ConfigError::NextHops(p) => {
                write!(f, "the route to {p} needs from 1 to 64 next hops")
            }
            ConfigError::RoutesFull(p) => {
                write!(f, "there is no room for the route to {p}: remove others first")
            }
        }
    }
}

impl core::error::Error for ConfigError {}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;

    #[test]
    fn an_mtu_that_only_ipv6_forbids_is_refused_in_its_name() {
        let said = |least| ConfigError::Mtu { least }.to_string();
        assert_eq!(
            said(1280),
            "the MTU must be between 1280 and 65535 bytes (an IPv6 address needs 1280)"
        );
        assert_eq!(said(576), "the MTU must be between 576 and 65535 bytes");
    }
}
