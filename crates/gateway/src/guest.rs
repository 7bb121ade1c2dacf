//! The network that a guest is given: an interface with addresses and routes like the host's.
//!
//! [`GuestNetwork::like`] decides it from the host's network and what the user asked for, without side effects;
//! [`GuestNetwork::configure`] sets it up in the guest's namespace. Without an upstream of its own a guest gets
//! link-local addresses, as pasta(1) gives them.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use fulmar_netns::{Netns, Route};

use crate::host::{HostNetwork, Upstream};
use crate::rules::covers;

/// Address and router of an IPv4 guest whose host has no route (RFC 3927).
const UNROUTED_ADDRESS: Ipv4Addr = Ipv4Addr::new(169, 254, 2, 1);
pub(crate) const UNROUTED_GATEWAY: Ipv4Addr = Ipv4Addr::new(169, 254, 2, 2);
const UNROUTED_PREFIX_LEN: u8 = 16;
/// Router of an IPv6 guest whose host has no route.
pub(crate) const UNROUTED_GATEWAY_V6: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1);
/// Largest IP packet of an Ethernet-like interface of the kernel, rounded to 32-bit words.
pub const DEFAULT_MTU: u32 = 65520;
/// Name of the guest's interface when the host has no upstream.
const DEFAULT_NAME: &str = "tap0";

/// The options of the guest's network. What is not set is taken from the host.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct GuestOptions {
    /// No IPv4, no IPv6.
    pub without_v4: bool,
    /// See `without_v4`.
    pub without_v6: bool,
    /// Name of the guest's interface.
    pub name: Option<String>,
    /// Its MTU in bytes.
    pub mtu: Option<u32>,
    /// Its Ethernet address.
    pub mac: Option<[u8; 6]>,
    /// Its addresses, with the length of the prefix where it was given.
    pub addresses: Vec<(IpAddr, Option<u8>)>,
    /// Length of the prefix of the IPv4 address.
    pub prefix_len: Option<u8>,
    /// Routers.
    pub gateways: Vec<IpAddr>,
}

/// A guest's interface.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct GuestNetwork {
    /// Its name.
    pub name: String,
    /// Its MTU in bytes.
    pub mtu: u32,
    /// Its Ethernet address; the kernel's choice if there is none.
    pub mac: Option<[u8; 6]>,
    /// Its addresses with the lengths of their prefixes.
    pub addresses: Vec<(IpAddr, u8)>,
    /// The router of its IPv4 default route.
    pub gateway_v4: Option<Ipv4Addr>,
    /// The router of its IPv6 default route.
    pub gateway_v6: Option<Ipv6Addr>,
    /// Its routes, in an order in which each router is reachable before it is named. `index` is not set.
    pub routes: Vec<Route>,
}

/// One IP version of a guest.
struct Version {
    addresses: Vec<(IpAddr, u8)>,
    gateway: Option<IpAddr>,
    routes: Vec<Route>,
}

impl GuestNetwork {
    /// The network of a guest of this host.
    pub fn like(host: &HostNetwork, options: &GuestOptions) -> GuestNetwork {
        let v4 = (!options.without_v4).then(|| version_of(host.v4.as_ref(), options, true));
        let v6 = (!options.without_v6).then(|| version_of(host.v6.as_ref(), options, false));
        let upstream = host.v4.as_ref().or(host.v6.as_ref());
        let default_name = || upstream.map_or(DEFAULT_NAME.into(), |u| u.interface.name.clone());
        let gateway = |version: &Option<Version>| version.as_ref().and_then(|v| v.gateway);
        GuestNetwork {
            name: options.name.clone().unwrap_or_else(default_name),
            mtu: options.mtu.unwrap_or(DEFAULT_MTU),
            mac: options.mac,
            gateway_v4: match gateway(&v4) {
                Some(IpAddr::V4(router)) => Some(router),
                _ => None,
            },
            gateway_v6: match gateway(&v6) {
                Some(IpAddr::V6(router)) => Some(router),
                _ => None,
            },
            addresses: [&v4, &v6].into_iter().flatten().flat_map(|v| v.addresses.clone()).collect(),
            routes: [&v4, &v6].into_iter().flatten().flat_map(|v| v.routes.clone()).collect(),
        }
    }

    /// Sets the interface up in the guest's namespace, where it exists already.
    ///
    /// # Errors
    /// Those of rtnetlink, with the step that failed.
    pub fn configure(&self, netns: &Netns) -> io::Result<()> {
        let index = netns.if_index(&self.name)?;
        let mut netlink = netns.netlink()?;
        let step = |what: &str, done: io::Result<()>| {
            done.map_err(|e| {
                io::Error::new(e.kind(), format!("{what} of {} in the namespace: {e}", self.name))
            })
        };
        if let Some(mac) = self.mac {
            step("cannot set the Ethernet address", netlink.set_mac(index, mac))?;
        }
        step("cannot set the MTU", netlink.set_mtu(index, self.mtu))?;
        step("cannot bring up the interface", netlink.set_up(index))?;
        for (address, prefix_len) in &self.addresses {
            let what = format!("cannot add the address {address}/{prefix_len}");
            step(&what, netlink.add_address(index, *address, *prefix_len))?;
        }
        for route in &self.routes {
            match netlink.add_route(&Route { index, ..*route }) {
                // The kernel made it with the address.
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
                done => {
                    let to = format!("{}/{}", route.destination, route.prefix_len);
                    step(&format!("cannot add the route to {to}"), done)?;
                }
            }
        }
        Ok(())
    }
}

fn version_of(upstream: Option<&Upstream>, options: &GuestOptions, is_v4: bool) -> Version {
    let asked = options.addresses.iter().filter(|(a, _)| a.is_ipv4() == is_v4);
    let asked: Vec<_> = asked
        .map(|(a, len)| (*a, len.unwrap_or_else(|| prefix_of(*a, upstream, options))))
        .collect();
    let asked_gateway = options.gateways.iter().copied().rfind(|g| g.is_ipv4() == is_v4);
    let addresses = match (upstream, asked.is_empty()) {
        (_, false) => asked,
        (Some(up), true) => up.addresses.iter().map(|a| (a.address, a.prefix_len)).collect(),
        (None, true) if is_v4 => vec![(UNROUTED_ADDRESS.into(), UNROUTED_PREFIX_LEN)],
        (None, true) => Vec::new(),
    };
    let unrouted: IpAddr = if is_v4 { UNROUTED_GATEWAY.into() } else { UNROUTED_GATEWAY_V6.into() };
    let gateway = match (asked_gateway, upstream) {
        (Some(router), _) => Some(router),
        (None, Some(up)) => up.gateway,
        (None, None) => Some(unrouted),
    };
    let mut routes: Vec<Route> = match upstream {
        // With addresses or a router of the user's choice the host's routes do not fit.
        Some(up) if asked_gateway.is_none() && options.addresses.is_empty() => up.routes.clone(),
        _ => gateway.into_iter().flat_map(|router| default_route(router, &addresses)).collect(),
    };
    // The kernel makes the route to fe80::/64 itself.
    routes.retain(|route| route.gateway.is_some() || !is_v6_link_local(route.destination));
    routes.sort_by_key(|route| route.gateway.is_some());
    // Without an IPv6 address no route can be used.
    if !is_v4 && addresses.is_empty() {
        routes.clear();
    }
    for route in &mut routes {
        // The host's preferred source may be an address that the guest has not.
        route.source = route.source.filter(|s| addresses.iter().any(|(a, _)| a == s));
        route.index = 0;
    }
    Version { addresses, gateway, routes }
}

/// The default route through a router, after a route to the router where no prefix covers it.
fn default_route(router: IpAddr, addresses: &[(IpAddr, u8)]) -> Vec<Route> {
    let is_covered = is_v6_link_local(router) || addresses.iter().any(|a| covers(a.0, a.1, router));
    let host_bits = if router.is_ipv4() { 32 } else { 128 };
    let to_router = Route {
        destination: router,
        prefix_len: host_bits,
        gateway: None,
        ..Route::default_through(0, router)
    };
    let default = Route::default_through(0, router);
    if is_covered { vec![default] } else { vec![to_router, default] }
}

/// Length of the prefix of an address that was given without one: as asked, as the host has it, else that of
/// its class (RFC 4632 section 3.1); 64 bits for IPv6.
fn prefix_of(address: IpAddr, upstream: Option<&Upstream>, options: &GuestOptions) -> u8 {
    let IpAddr::V4(v4) = address else { return 64 };
    let of_host = || {
        let own = upstream?.addresses.iter().find(|a| a.address == address)?;
        Some(own.prefix_len)
    };
    options.prefix_len.or_else(of_host).unwrap_or(match v4.octets()[0] {
        0..=127 => 8,
        128..=191 => 16,
        192..=223 => 24,
        _ => 32,
    })
}

fn is_v6_link_local(address: IpAddr) -> bool {
    matches!(address, IpAddr::V6(v6) if v6.is_unicast_link_local())
}

#[cfg(test)]
mod tests {
    use super::*;
    use fulmar_netns::{Address, Interface};

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn host() -> HostNetwork {
        let interface = Interface {
            index: 2,
            name: "eth0".into(),
            mac: Some([2; 6]),
            mtu: 1500,
            is_up: true,
            is_loopback: false,
        };
        let on_link = Route {
            destination: ip("192.0.2.0"),
            prefix_len: 24,
            gateway: None,
            index: 2,
            source: Some(ip("192.0.2.5")),
            metric: 100,
        };
        let upstream = Upstream {
            interface,
            addresses: vec![Address {
                index: 2,
                address: ip("192.0.2.5"),
                prefix_len: 24,
                is_global: true,
            }],
            routes: vec![Route::default_through(2, ip("192.0.2.1")), on_link],
            gateway: Some(ip("192.0.2.1")),
        };
        HostNetwork { v4: Some(upstream), v6: None, ..HostNetwork::default() }
    }

    #[test]
    fn a_guest_has_the_addresses_and_routes_of_its_host() {
        let guest = GuestNetwork::like(&host(), &GuestOptions::default());
        assert_eq!((guest.name.as_str(), guest.mtu), ("eth0", DEFAULT_MTU));
        assert_eq!(guest.addresses, [(ip("192.0.2.5"), 24)]);
        assert_eq!(guest.gateway_v4, Some(Ipv4Addr::new(192, 0, 2, 1)));
        let order: Vec<_> = guest.routes.iter().map(|r| (r.prefix_len, r.gateway)).collect();
        assert_eq!(
            order,
            [(24, None), (0, Some(ip("192.0.2.1")))],
            "the router's link comes first"
        );
        assert!(guest.routes.iter().all(|r| r.index == 0));
    }

    #[test]
    fn a_host_without_a_route_gives_link_local_addresses() {
        let guest = GuestNetwork::like(&HostNetwork::default(), &GuestOptions::default());
        assert_eq!(guest.name, "tap0");
        assert_eq!(guest.addresses, [(UNROUTED_ADDRESS.into(), 16)]);
        assert_eq!(guest.routes, [Route::default_through(0, UNROUTED_GATEWAY.into())]);
        assert_eq!(guest.gateway_v6, Some(UNROUTED_GATEWAY_V6));
    }

    #[test]
    fn what_the_user_asks_for_takes_the_place_of_the_hosts() {
        let options = GuestOptions {
            name: Some("ns0".into()),
            mtu: Some(1500),
            addresses: vec![(ip("10.0.2.100"), None), (ip("fd00::2"), Some(48))],
            gateways: vec![ip("10.0.2.2")],
            prefix_len: Some(24),
            ..GuestOptions::default()
        };
        let guest = GuestNetwork::like(&host(), &options);
        assert_eq!((guest.name.as_str(), guest.mtu), ("ns0", 1500));
        assert_eq!(guest.addresses, [(ip("10.0.2.100"), 24), (ip("fd00::2"), 48)]);
        assert_eq!(guest.gateway_v4, Some(Ipv4Addr::new(10, 0, 2, 2)));
        assert!(guest.routes.contains(&Route::default_through(0, ip("10.0.2.2"))));
        assert!(guest.routes.iter().all(|r| r.destination != ip("192.0.2.0")));
        let v4 = GuestNetwork::like(
            &host(),
            &GuestOptions { without_v6: true, ..GuestOptions::default() },
        );
        assert_eq!(v4.gateway_v6, None);
    }

    #[test]
    fn a_router_outside_of_the_prefix_gets_a_route_of_its_own() {
        let options = GuestOptions {
            addresses: vec![(ip("10.0.2.100"), Some(32))],
            gateways: vec![ip("10.0.2.2")],
            without_v6: true,
            ..GuestOptions::default()
        };
        let routes = GuestNetwork::like(&host(), &options).routes;
        assert_eq!((routes[0].destination, routes[0].prefix_len), (ip("10.0.2.2"), 32));
        assert!(routes[1].is_default());
    }

    #[test]
    fn a_prefix_that_is_not_given_is_that_of_the_host_or_of_the_class() {
        let upstream = host().v4;
        let of = |a: &str| prefix_of(ip(a), upstream.as_ref(), &GuestOptions::default());
        assert_eq!(
            [of("192.0.2.5"), of("10.1.1.1"), of("172.16.0.1"), of("fd00::1")],
            [24, 8, 16, 64]
        );
    }
}
