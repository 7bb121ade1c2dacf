//! The host's network, after which a guest's is made.
//!
//! For each IP version the *upstream* interface is the one with the default route of the lowest metric. Without a
//! default route it is the only interface that has a route at all, else none. That is the rule of pasta(1).

use std::io;
use std::net::IpAddr;
use std::path::Path;

use fulmar_netns::{Address, Interface, Netlink, Route};

use crate::mapping::is_link_local;

/// What the host has of one IP version.
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
    /// Addresses of the resolvers, in the order of resolv.conf(5).
    pub nameservers: Vec<IpAddr>,
    /// Domains that a resolver searches.
    pub search: Vec<String>,
    /// Every address of its interfaces.
    pub addresses: Vec<IpAddr>,
}

/// What netlink says of a namespace.
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
    /// Those of rtnetlink; NotFound if there is no interface `upstream`. A resolv.conf that cannot be read or
    /// understood counts as empty.
    pub fn read(upstream: Option<&str>) -> io::Result<HostNetwork> {
        let tables = Tables::read(&mut Netlink::open()?)?;
        if let Some(name) = upstream
            && !tables.interfaces.iter().any(|i| i.name == name)
        {
            let what = format!("the host has no interface {name}");
            return Err(io::Error::new(io::ErrorKind::NotFound, what));
        }
        let (nameservers, search) = read_resolvers(Path::new("/etc/resolv.conf"));
        Ok(HostNetwork {
            v4: upstream_of(&tables, IpAddr::is_ipv4, upstream),
            v6: upstream_of(&tables, IpAddr::is_ipv6, upstream),
            nameservers,
            search,
            addresses: tables.addresses.iter().map(|a| a.address).collect(),
        })
    }
}

/// The upstream of one IP version.
pub fn upstream_of(
    tables: &Tables,
    is_of_version: fn(&IpAddr) -> bool,
    name: Option<&str>,
) -> Option<Upstream> {
    let candidates = tables.routes.iter().filter(|route| {
        let interface = tables.interfaces.iter().find(|i| i.index == route.index);
        interface.is_some_and(|i| i.is_up && !i.is_loopback && name.is_none_or(|n| n == i.name))
            && is_of_version(&route.destination)
    });
    let routes: Vec<Route> = candidates.copied().collect();
    let default = routes.iter().filter(|r| r.is_default()).min_by_key(|r| r.metric);
    let index = match default {
        Some(route) => route.index,
        None => only_interface(&routes)?,
    };
    let interface = tables.interfaces.iter().find(|i| i.index == index)?.clone();
    let preferred = default.and_then(|route| route.source);
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
        gateway: default.and_then(|route| route.gateway),
        routes: routes.into_iter().filter(|r| r.index == index).collect(),
    })
}

/// The one interface that all routes name. Link-local routes name every interface and do not count.
fn only_interface(routes: &[Route]) -> Option<u32> {
    let mut indices = routes.iter().filter(|r| !is_link_local(r.destination)).map(|r| r.index);
    let first = indices.next()?;
    indices.all(|index| index == first).then_some(first)
}

fn read_resolvers(path: &Path) -> (Vec<IpAddr>, Vec<String>) {
    let config = std::fs::read(path).ok().and_then(|text| resolv_conf::Config::parse(text).ok());
    let Some(config) = config else { return Default::default() };
    let nameservers = config.nameservers.iter().map(IpAddr::from).collect();
    let search = config.get_last_search_or_domain().cloned().collect();
    (nameservers, search)
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
        let destination = ip(destination);
        Route { destination, prefix_len, gateway: None, index, source: None, metric: 0 }
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
    fn link_local_routes_do_not_make_an_upstream() {
        let mut tables = two_interfaces();
        tables.routes = vec![on_link(2, "fe80::", 64), on_link(3, "fe80::", 64)];
        assert_eq!(upstream_of(&tables, IpAddr::is_ipv6, None), None);
        tables.routes.push(on_link(3, "fd00::", 64));
        assert_eq!(upstream_of(&tables, IpAddr::is_ipv6, None).unwrap().interface.index, 3);
    }

    #[test]
    fn resolvers_are_read_in_order_and_a_bad_file_counts_as_empty() {
        let file = std::env::temp_dir().join(format!("fulmar-resolv-{}", std::process::id()));
        let text = "search example.org corp.example\nnameserver 192.0.2.53\nnameserver fd00::53\n";
        std::fs::write(&file, text).unwrap();
        let (nameservers, search) = read_resolvers(&file);
        assert_eq!(nameservers, [ip("192.0.2.53"), ip("fd00::53")]);
        assert_eq!(search, ["example.org", "corp.example"]);
        std::fs::write(&file, "nameserver nonsense\n").unwrap();
        assert_eq!(read_resolvers(&file), (vec![], vec![]));
        std::fs::remove_file(&file).unwrap();
        assert_eq!(read_resolvers(&file), (vec![], vec![]));
    }
}
