//! The host's network, after which a guest's is made.
//!
//! For each IP version the *upstream* interface is the one with the default route of the lowest metric. Without a
//! default route it is the only interface that has a route at all, else none. That is the rule of pasta(1).

use std::collections::BTreeSet;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;

use crate::netns::{Address, Interface, Netlink, NextHop, Route};

use crate::mapping::is_link_local;
use crate::resolv::{RESOLV_CONF, ResolvConf};

/// The addresses and routes of the host of one IP version.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Upstream {
    /// The interface that leads out.
    pub interface: Interface,
    /// Its addresses of global scope; the preferred one first.
    pub addresses: Vec<Address>,
    /// Its routes.
    pub routes: Vec<Route>,
    /// The router of its default route.
    pub gateway: Option<IpAddr>,
}

/// The host's network.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct HostNetwork {
    /// IPv4.
    pub v4: Option<Upstream>,
    /// IPv6.
    pub v6: Option<Upstream>,
    /// The resolvers, in the order of resolv.conf(5). A link-local one has the index of its link.
    pub nameservers: Vec<SocketAddr>,
    /// Domains that a resolver searches.
    pub search: Vec<String>,
    /// How often the resolvers are asked in turn.
    pub attempts: u8,
    /// Each question begins with the next resolver.
    pub rotates: bool,
    /// Every address of its interfaces.
    pub addresses: Vec<IpAddr>,
    /// The networks of its links, and its routers.
    pub networks: Vec<(IpAddr, u8)>,
}

/// The network of a namespace, read from netlink.
#[derive(Clone, Debug, Default)]
pub struct Tables {
    /// Every interface.
    pub interfaces: Vec<Interface>,
    /// Every address.
    pub addresses: Vec<Address>,
    /// The routes of the main table.
    pub routes: Vec<Route>,
}

impl Tables {
    /// Asks the namespace of a netlink socket.
    ///
    /// # Errors
    /// Those of rtnetlink.
    pub fn read(netlink: &mut Netlink) -> io::Result<Tables> {
        Ok(Tables {
            interfaces: netlink.interfaces()?,
            addresses: netlink.addresses()?,
            routes: netlink.routes()?,
        })
    }
}

impl HostNetwork {
    /// Reads the network of the calling thread's namespace and `/etc/resolv.conf`. `upstream` names the
    /// interface of both IP versions; without it each version has its own.
    ///
    /// # Errors
    /// Those of rtnetlink; NotFound if there is no interface `upstream`.
    pub fn read(upstream: Option<&str>) -> io::Result<HostNetwork> {
        let tables = Tables::read(&mut Netlink::open()?)?;
        if let Some(name) = upstream
            && !tables.interfaces.iter().any(|i| i.name == name)
        {
            let what = format!("no interface {name} on the host");
            return Err(io::Error::new(io::ErrorKind::NotFound, what));
        }
        Ok(HostNetwork::of(&tables, upstream))
    }

    /// As [`HostNetwork::read`], by a socket that is open. An interface `upstream` that is not there leads nowhere.
    ///
    /// # Errors
    /// Those of rtnetlink.
    pub(crate) fn read_by(
        netlink: &mut Netlink,
        upstream: Option<&str>,
    ) -> io::Result<HostNetwork> {
        Ok(HostNetwork::of(&Tables::read(netlink)?, upstream))
    }

    fn of(tables: &Tables, upstream: Option<&str>) -> HostNetwork {
        let ResolvConf { nameservers, search, attempts, rotates } =
            ResolvConf::read(Path::new(RESOLV_CONF));
        HostNetwork {
            v4: upstream_of(tables, IpAddr::is_ipv4, upstream),
            v6: upstream_of(tables, IpAddr::is_ipv6, upstream),
            nameservers,
            search,
            attempts,
            rotates,
            addresses: tables.addresses.iter().map(|a| a.address).collect(),
            networks: networks_of(tables),
        }
    }
}

/// The networks of all addresses and of all routes without a router, and the routers. A route into a tunnel, where there
/// are no Ethernet addresses, leads elsewhere and not to neighbours; so does a default route.
fn networks_of(tables: &Tables) -> Vec<(IpAddr, u8)> {
    let has_neighbours = |hop: &NextHop| {
        let interface = tables.interfaces.iter().find(|i| i.index == hop.index);
        hop.gateway.is_none() && interface.is_some_and(|i| i.mac.is_some() && !i.is_loopback)
    };
    let of_addresses = tables.addresses.iter().map(|a| (a.address, a.prefix_len));
    let on_link = tables.routes.iter().filter(|route| route.hops.iter().any(has_neighbours));
    let on_link = on_link.map(|route| (route.destination, route.prefix_len));
    let routers = tables.routes.iter().flat_map(|route| &route.hops).filter_map(|hop| hop.gateway);
    let routers = routers.map(|router| (router, if router.is_ipv4() { 32 } else { 128 }));
    let all = of_addresses.chain(on_link).chain(routers).filter(|(_, bits)| *bits > 0);
    all.collect::<BTreeSet<_>>().into_iter().collect()
}

/// The upstream of one IP version.
pub(crate) fn upstream_of(
    tables: &Tables,
    is_of_version: fn(&IpAddr) -> bool,
    name: Option<&str>,
) -> Option<Upstream> {
    let is_usable = |hop: &NextHop| {
        let interface = tables.interfaces.iter().find(|i| i.index == hop.index);
        interface.is_some_and(|i| i.is_up && !i.is_loopback && name.is_none_or(|n| n == i.name))
    };
    let of_version = tables.routes.iter().filter(|route| is_of_version(&route.destination));
    let mut routes: Vec<Route> = of_version.cloned().collect();
    routes.iter_mut().for_each(|route| route.hops.retain(is_usable));
    routes.retain(|route| !route.hops.is_empty());
    let defaults = routes.iter().filter(|r| r.is_default() && r.tos == 0);
    let default = defaults.min_by_key(|r| r.metric).cloned();
    let index = match default.as_ref().and_then(|route| route.hops.first()) {
        Some(hop) => hop.index,
        None => only_interface(&routes)?,
    };
    routes.iter_mut().for_each(|route| route.hops.retain(|hop| hop.index == index));
    routes.retain(|route| !route.hops.is_empty());
    let interface = tables.interfaces.iter().find(|i| i.index == index)?.clone();
    let preferred = default.as_ref().and_then(|route| route.source);
    let mut addresses: Vec<Address> = tables
        .addresses
        .iter()
        .filter(|a| a.index == index && a.is_global && is_of_version(&a.address))
        .copied()
        .collect();
    addresses.sort_by_key(|a| Some(a.address) != preferred);
    Some(Upstream {
        interface,
        addresses,
        gateway: default.and_then(|route| route.hops.first()?.gateway),
        routes,
    })
}

/// The one interface that all routes name. Link-local routes name every interface and do not count.
fn only_interface(routes: &[Route]) -> Option<u32> {
    let routes = routes.iter().filter(|r| !is_link_local(r.destination));
    let mut indices = routes.flat_map(|r| &r.hops).map(|hop| hop.index);
    let first = indices.next()?;
    indices.all(|index| index == first).then_some(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn interface(index: u32, name: &str) -> Interface {
        Interface {
            index,
            name: name.into(),
            mac: None,
            mtu: 1500,
            is_up: true,
            is_loopback: name == "lo",
        }
    }

    fn address(index: u32, address: &str) -> Address {
        Address { index, address: ip(address), prefix_len: 24, is_global: true }
    }

    fn on_link(index: u32, destination: &str, prefix_len: u8) -> Route {
        Route::on_link(index, ip(destination), prefix_len)
    }

    fn two_interfaces() -> Tables {
        Tables {
            interfaces: vec![interface(1, "lo"), interface(2, "eth0"), interface(3, "wlan0")],
            addresses: vec![
                address(2, "192.0.2.5"),
                address(3, "10.0.0.5"),
                address(3, "10.0.0.6"),
            ],
            routes: vec![on_link(2, "192.0.2.0", 24), on_link(3, "10.0.0.0", 24)],
        }
    }

    #[test]
    fn the_upstream_has_the_default_route_of_the_lowest_metric() {
        let mut tables = two_interfaces();
        let default = |index, gateway, metric| Route {
            metric,
            source: Some(ip("10.0.0.6")),
            ..Route::default_through(index, ip(gateway))
        };
        tables.routes.push(default(2, "192.0.2.1", 600));
        tables.routes.push(default(3, "10.0.0.1", 100));
        let found = upstream_of(&tables, IpAddr::is_ipv4, None).unwrap();
        assert_eq!((found.interface.name.as_str(), found.gateway), ("wlan0", Some(ip("10.0.0.1"))));
        assert_eq!(found.addresses[0].address, ip("10.0.0.6"), "the route prefers it");
        assert_eq!(found.routes.len(), 2);
        let named = upstream_of(&tables, IpAddr::is_ipv4, Some("eth0")).unwrap();
        assert_eq!((named.interface.index, named.gateway), (2, Some(ip("192.0.2.1"))));
        assert_eq!(upstream_of(&tables, IpAddr::is_ipv6, None), None);
    }

    #[test]
    fn a_route_with_several_next_hops_keeps_the_next_hops_of_the_upstream() {
        let mut tables = two_interfaces();
        let hop = |index, gateway| Route::default_through(index, ip(gateway)).hops[0];
        let hops = vec![hop(3, "10.0.0.1"), hop(2, "192.0.2.1"), hop(3, "10.0.0.2")];
        tables.routes.push(Route { hops, ..Route::default_through(3, ip("10.0.0.1")) });
        let found = upstream_of(&tables, IpAddr::is_ipv4, None).unwrap();
        assert_eq!((found.interface.index, found.gateway), (3, Some(ip("10.0.0.1"))));
        let default = found.routes.iter().find(|r| r.is_default()).unwrap();
        assert_eq!(default.hops, [hop(3, "10.0.0.1"), hop(3, "10.0.0.2")]);
        tables.interfaces[2].is_up = false;
        let found = upstream_of(&tables, IpAddr::is_ipv4, None).unwrap();
        assert_eq!((found.interface.index, found.gateway), (2, Some(ip("192.0.2.1"))));
    }

    #[test]
    fn a_default_route_of_one_type_of_service_is_not_the_default_route() {
        let mut tables = two_interfaces();
        tables.routes.push(Route { tos: 16, ..Route::default_through(2, ip("192.0.2.1")) });
        assert_eq!(upstream_of(&tables, IpAddr::is_ipv4, None), None);
    }

    #[test]
    fn without_a_default_route_only_one_interface_with_routes_will_do() {
        let mut tables = two_interfaces();
        assert_eq!(upstream_of(&tables, IpAddr::is_ipv4, None), None);
        tables.routes.remove(1);
        let found = upstream_of(&tables, IpAddr::is_ipv4, None).unwrap();
        assert_eq!((found.interface.index, found.gateway), (2, None));
        tables.interfaces[1].is_up = false;
        assert_eq!(upstream_of(&tables, IpAddr::is_ipv4, None), None);
    }

    #[test]
    fn networks_of_links_are_those_of_addresses_routes_and_routers() {
        let mut tables = two_interfaces();
        tables.interfaces[1].mac = Some([2; 6]);
        tables.routes = vec![
            on_link(2, "2001:db8::", 64),
            on_link(2, "0.0.0.0", 0),
            on_link(3, "128.0.0.0", 1),
            Route::default_through(2, ip("198.51.100.1")),
        ];
        let found = networks_of(&tables);
        let wanted = [
            ("10.0.0.5", 24),
            ("10.0.0.6", 24),
            ("192.0.2.5", 24),
            ("198.51.100.1", 32),
            ("2001:db8::", 64),
        ];
        assert_eq!(found, wanted.map(|(network, bits)| (ip(network), bits)));
    }

    #[test]
    fn link_local_routes_do_not_make_an_upstream() {
        let mut tables = two_interfaces();
        tables.routes = vec![on_link(2, "fe80::", 64), on_link(3, "fe80::", 64)];
        assert_eq!(upstream_of(&tables, IpAddr::is_ipv6, None), None);
        tables.routes.push(on_link(3, "fd00::", 64));
        assert_eq!(upstream_of(&tables, IpAddr::is_ipv6, None).unwrap().interface.index, 3);
    }
}
