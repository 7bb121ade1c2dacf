//! The network that a guest is given: an interface with addresses and routes like the host's.
//!
//! [`GuestNetwork::like`] decides it from the host's network and what the user asked for, without side effects;
//! [`GuestNetwork::configure`] sets it up in the guest's namespace. Without an upstream of its own a guest gets
//! link-local addresses, as pasta(1) gives them.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::netns::{Netlink, Netns, NextHop, Route};

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

/// The options of the guest's network. Unset options are taken from the host.
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
    /// The network of a guest without an interface of the gateway's.
    pub fn none() -> GuestNetwork {
        GuestNetwork {
            name: "lo".to_owned(),
            mtu: DEFAULT_MTU,
            mac: None,
            addresses: Vec::new(),
            gateway_v4: None,
            gateway_v6: None,
            routes: Vec::new(),
        }
    }

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

    /// Sets the interface up in the guest's namespace, where it exists already. Returns a sentence for each address and
    /// route that the kernel there refused: the guest does without it.
    ///
    /// # Errors
    /// Those of rtnetlink, with the step that failed.
    pub fn configure(&self, netns: &Netns) -> io::Result<Vec<String>> {
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
        let mut refused = Vec::new();
        for (address, prefix_len) in &self.addresses {
            if let Err(e) = netlink.add_address(index, *address, *prefix_len) {
                refused.push(format!(
                    "cannot add the address {address}/{prefix_len} to the guest: {e}"
                ));
            }
        }
        for route in &self.routes {
            if let Err(e) = add_route(&mut netlink, index, route) {
                let (to, length) = (route.destination, route.prefix_len);
                refused.push(format!("cannot add a route to {to}/{length} to the guest: {e}"));
                if route.is_default() {
                    // All that the gateway needs is to see the packets.
                    let _ = add_route(&mut netlink, index, &route_to_gateway(to.is_ipv4()));
                }
            }
        }
        Ok(refused)
    }
}

fn add_route(netlink: &mut Netlink, index: u32, route: &Route) -> io::Result<()> {
    let hops = route.hops.iter().map(|hop| NextHop { index, ..*hop }).collect();
    match netlink.add_route(&Route { hops, ..route.clone() }) {
        // The kernel made it with the address.
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        done => done,
    }
}

/// A default route through the gateway by the address that it has where the host has no router.
fn route_to_gateway(is_v4: bool) -> Route {
    let mut route = Route::default_through(0, unrouted_gateway(is_v4));
    // No prefix of the guest covers the IPv4 address.
    route.hops.iter_mut().for_each(|hop| hop.is_onlink = is_v4);
    route
}

fn unrouted_gateway(is_v4: bool) -> IpAddr {
    if is_v4 { UNROUTED_GATEWAY.into() } else { UNROUTED_GATEWAY_V6.into() }
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
    // A router of the other IP version (RFC 5549) answers no DHCP of this one.
    let own_gateway = upstream.and_then(|up| up.gateway).filter(|g| g.is_ipv4() == is_v4);
    let gateway = asked_gateway.or(own_gateway).unwrap_or_else(|| unrouted_gateway(is_v4));
    let mut routes: Vec<Route> = match upstream {
        // With addresses or a router of the user's choice the host's routes do not fit.
        Some(up) if asked_gateway.is_none() && options.addresses.is_empty() => {
            routes_like(&up.routes, options, is_v4)
        }
        _ => default_route(gateway, &addresses),
    };
    // Without an IPv6 address no route can be used.
    if !is_v4 && addresses.is_empty() {
        routes.clear();
    }
    for route in &mut routes {
        // The host's preferred source may be an address that the guest has not.
        route.source = route.source.filter(|s| addresses.iter().any(|(a, _)| a == s));
        route.hops.iter_mut().for_each(|hop| hop.index = 0);
    }
    Version { addresses, gateway: Some(gateway), routes }
}

/// The routes of a guest, made after the host's. There is always a default route: what the host reaches may change,
/// and each of its sockets follows the routes that the host has by then.
fn routes_like(hosts: &[Route], options: &GuestOptions, is_v4: bool) -> Vec<Route> {
    // The kernel makes the route to fe80::/64 itself.
    let is_own = |route: &Route| route.gateway().is_none() && is_v6_link_local(route.destination);
    let mut routes: Vec<Route> = hosts.iter().filter(|route| !is_own(route)).cloned().collect();
    // By a default route to the link itself the guest's kernel would ask for every address of the world by ARP.
    let is_link = |route: &Route| route.is_default() && route.gateway().is_none();
    // A guest without IPv6 cannot ask for a router of IPv6.
    let is_beyond = |route: &Route| route.gateway().is_some_and(|g| g.is_ipv6());
    let lacks_router = |route: &Route| is_v4 && options.without_v6 && is_beyond(route);
    routes.retain(|route| !is_link(route) && !lacks_router(route));
    routes.sort_by_key(|route| route.gateway().is_some());
    if !routes.iter().any(|r| r.is_default() && r.tos == 0) {
        routes.push(route_to_gateway(is_v4));
    }
    routes
}

/// The default route through a router, after a route to the router where no prefix covers it.
fn default_route(router: IpAddr, addresses: &[(IpAddr, u8)]) -> Vec<Route> {
    let is_covered = is_v6_link_local(router) || addresses.iter().any(|a| covers(a.0, a.1, router));
    let host_bits = if router.is_ipv4() { 32 } else { 128 };
    let to_router = Route::on_link(0, router, host_bits);
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
    use crate::netns::{Address, Interface};

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
            source: Some(ip("192.0.2.5")),
            metric: 100,
            ..Route::on_link(2, ip("192.0.2.0"), 24)
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
        let order: Vec<_> = guest.routes.iter().map(|r| (r.prefix_len, r.gateway())).collect();
        assert_eq!(
            order,
            [(24, None), (0, Some(ip("192.0.2.1")))],
            "the router's link comes first"
        );
        assert!(guest.routes.iter().all(|r| r.leads_to(0)));
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
    fn a_guest_has_a_default_route_whatever_its_host_has() {
        let without_default = |routes: Vec<Route>| {
            let mut host = host();
            let upstream = host.v4.as_mut().unwrap();
            (upstream.routes, upstream.gateway) = (routes, None);
            GuestNetwork::like(&host, &GuestOptions::default())
        };
        let to_gateway = route_to_gateway(true);
        assert!(to_gateway.hops[0].is_onlink);
        let link = Route::on_link(2, ip("192.0.2.0"), 24);
        let everything = Route::on_link(2, ip("0.0.0.0"), 0);
        let of_service = Route { tos: 16, ..Route::default_through(2, ip("192.0.2.1")) };
        for routes in [vec![link.clone()], vec![link.clone(), everything], vec![link, of_service]] {
            let guest = without_default(routes);
            assert_eq!(guest.routes.last(), Some(&to_gateway));
            assert_eq!(guest.gateway_v4, Some(UNROUTED_GATEWAY));
            assert_eq!(guest.routes.iter().filter(|r| r.is_default() && r.tos == 0).count(), 1);
        }
    }

    #[test]
    fn a_router_of_the_other_ip_version_is_kept_where_the_guest_has_both() {
        let mut host = host();
        let upstream = host.v4.as_mut().unwrap();
        let mut through_v6 = Route::default_through(2, ip("192.0.2.1"));
        through_v6.hops[0].gateway = Some(ip("fe80::99"));
        (upstream.routes, upstream.gateway) = (vec![through_v6], Some(ip("fe80::99")));
        let guest = GuestNetwork::like(&host, &GuestOptions::default());
        assert_eq!(guest.routes[0].gateway(), Some(ip("fe80::99")));
        assert_eq!(guest.gateway_v4, Some(UNROUTED_GATEWAY), "the server of DHCP");
        let alone = GuestOptions { without_v6: true, ..GuestOptions::default() };
        assert_eq!(GuestNetwork::like(&host, &alone).routes, [route_to_gateway(true)]);
    }

    #[test]
    fn options_of_the_user_replace_the_hosts_values() {
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
