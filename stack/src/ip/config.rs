//! Configuration of an interface: addresses, routes, limits.

use alloc::vec::Vec;
use core::net::IpAddr;

use crate::base::{Duration, EtherAddr, Medium, Zone};
use crate::route::{NeighbourConfig, Prefix, Route};

/// An address of the interface, with the prefix of its link.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct IfAddr {
    /// The address.
    pub addr: IpAddr,
    /// Prefix length of the link; 32 or 128 if no neighbour is on it.
    pub prefix_len: u8,
}

impl IfAddr {
    /// The on-link prefix; `None` if `prefix_len` is too long.
    pub fn prefix(&self) -> Option<Prefix> {
        Prefix::new(self.addr, self.prefix_len)
    }
}

/// Settings of one interface.
#[derive(Clone, Debug)]
pub struct Config {
    /// The medium of the interface. On [`Medium::Ip`] every next hop is the peer, always resolved.
    pub medium: Medium,
    /// Ethernet address of the interface.
    pub ether: EtherAddr,
    /// MTU of the link, bytes of IP packet.
    pub mtu: usize,
    /// Zone index of the interface in scoped addresses (RFC 4007). 1: the stack has one interface.
    pub zone: Zone,
    /// Addresses. With the first IPv6 address the link-local address derived from `ether` is added
    /// (RFC 4291 appendix A), unless a link-local address is configured.
    pub addresses: Vec<IfAddr>,
    /// Accepts packets to every unicast address, and answers ARP requests and neighbour solicitations for each, as a
    /// gateway does for its guests (Linux: AnyIP). Not answered: solicitations for addresses of known neighbours, and
    /// probes of duplicate address detection. Neighbour advertisements have the router flag (RFC 4861 section 4.4).
    /// Echo requests to addresses other than `addresses` are returned
    /// ([`Verdict::EchoRequest`](crate::ip::Verdict::EchoRequest)).
    pub any_ip: bool,
    /// Routes other than the connected routes of the addresses.
    pub routes: Vec<Route>,
    /// Default TTL and hop limit. 64: the default of RFC 1340 and Linux.
    pub ttl: u8,
    /// Limits and timers of the neighbour table.
    pub neighbours: NeighbourConfig,
    /// Rate limit of ICMP errors sent, per second (token bucket, RFC 4443 section 2.4(f)). 1000:
    /// Linux's default.
    pub icmp_errors_per_s: u32,
    /// Burst size of that limit. 50: Linux's default.
    pub icmp_error_burst: u32,
    /// Rate limit of echo replies, per second. 20,000: a flood ping across a LAN passes, and a
    /// reflection attack costs a bounded share of one core.
    pub echo_replies_per_s: u32,
    /// Burst size of that limit.
    pub echo_reply_burst: u32,
    /// Lifetime of a lowered path MTU: 10 min (RFC 8201 section 4).
    pub path_mtu_lifetime: Duration,
    /// Upper bound of storage for incomplete datagrams, bytes. A datagram of 64 KiB takes about 100
    /// KB. 4 MiB: Linux's bound.
    pub reassembly_bytes: usize,
    /// Upper bound of packets waiting for neighbour resolution, bytes; replies may use half of it.
    /// 1 MiB.
    pub neighbour_queue_bytes: usize,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            medium: Medium::Ethernet,
            ether: EtherAddr([0x02, 0, 0, 0, 0, 1]),
            mtu: 1500,
            zone: 1,
            addresses: Vec::new(),
            any_ip: false,
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
        }
    }
}

/// Why a configuration, or a change to it, was refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum ConfigError {
    /// The interface's Ethernet address is a group address or zero.
    EtherAddr,
    /// The MTU is below 576 bytes (RFC 1122 section 3.3.2), below 1280 with an IPv6 address (RFC
    /// 8200 section 5), or above 65,535.
    Mtu {
        /// The smallest MTU allowed.
        least: usize,
    },
    /// The address cannot be assigned: unspecified, multicast or broadcast.
    Address(IpAddr),
    /// The prefix length exceeds the address length.
    PrefixLength(IpAddr),
    /// A route's destination, gateway and source are of different IP versions.
    MixedVersions(Prefix),
    /// The gateway is not on-link, or is an own address.
    Gateway(Prefix, IpAddr),
    /// A route has no next hops, or more than 64.
    NextHops(Prefix),
    /// A limit is reached: routes per table, next hops, or number of tables.
    RoutesFull(Prefix),
}

impl core::fmt::Display for ConfigError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            ConfigError::EtherAddr => f.write_str("the Ethernet address must be a unicast address"),
            ConfigError::Mtu { least } => {
                let why = if *least > 576 { " (an IPv6 address needs 1280)" } else { "" };
                write!(f, "the MTU must be between {least} and 65535 bytes{why}")
            }
            ConfigError::Address(a) => write!(f, "{a} cannot be the address of an interface"),
            ConfigError::PrefixLength(a) => {
                write!(f, "the prefix length of {a} must be at most its number of bits")
            }
            ConfigError::MixedVersions(p) => {
                write!(f, "the gateway and source of the route to {p} must be of its IP version")
            }
            ConfigError::Gateway(p, via) => write!(
                f,
                "the gateway {via} of the route to {p} is not on-link: use a gateway on a network of \
                 this interface, or add an on-link route to it first"
            ),
            ConfigError::NextHops(p) => {
                write!(f, "the route to {p} must have 1 to 64 next hops")
            }
            ConfigError::RoutesFull(p) => {
                write!(
                    f,
                    "the routing table has no space for the route to {p}: remove other routes first"
                )
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
    fn an_mtu_below_the_ipv6_minimum_is_reported_as_such() {
        let message = |least| ConfigError::Mtu { least }.to_string();
        assert_eq!(
            message(1280),
            "the MTU must be between 1280 and 65535 bytes (an IPv6 address needs 1280)"
        );
        assert_eq!(message(576), "the MTU must be between 576 and 65535 bytes");
    }
}
