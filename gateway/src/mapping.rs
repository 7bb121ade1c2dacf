//! Which host address a guest's destination stands for.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};

use smallvec::SmallVec;

use crate::rules::{covers, embedded_v4};

/// The port of DNS, over UDP and TCP.
const DNS_PORT: u16 = 53;

/// Where the guest's destinations lead. Addresses that are not listed lead to themselves, but for the host's
/// loopback, to which nothing leads that is not listed.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Mapping {
    /// Addresses that stand for the host's loopback of their IP version.
    pub host_loopback: Vec<IpAddr>,
    /// Addresses that stand for another one: an address of the host that the guest cannot name, since it has
    /// the same.
    pub host_address: Vec<(IpAddr, IpAddr)>,
    /// Addresses at which DNS is forwarded to the host's resolvers.
    pub dns: Vec<IpAddr>,
    /// The host's resolvers, best first. A link-local one has its zone.
    pub resolvers: Vec<SocketAddr>,
    /// How often the host's resolvers are asked for the gateway's own questions; 0 counts as 1.
    pub attempts: u8,
    /// Each question begins with the next one of the host's resolvers.
    pub rotates: bool,
    /// DNS servers that are announced to the guest.
    pub nameservers: Vec<IpAddr>,
    /// The host's own addresses, where its programs answer: for the policy
    /// ([`NewFlow::is_host`](crate::policy::NewFlow)). Empty where the policy need not know them.
    pub host_addresses: Vec<IpAddr>,
    /// The networks of the host's links, where its neighbours answer: for the policy, as above.
    pub host_networks: Vec<(IpAddr, u8)>,
    /// Networks of the guest's link that the host's network does not have: an address there leads nowhere unless it is
    /// listed above, also where the host has a network of the same number.
    pub link: Vec<(IpAddr, u8)>,
    /// The host's interface on whose link an IPv6 address of the guest's link is, by its index; 0: there is none.
    pub zone: u32,
}

impl Mapping {
    /// Where a destination leads. `None`: nowhere.
    pub fn target(&self, to: SocketAddr) -> Option<SocketAddr> {
        let ip = to.ip();
        if to.port() == DNS_PORT && self.dns.contains(&ip) {
            return self.resolver(ip);
        }
        if self.host_loopback.contains(&ip) {
            return Some(SocketAddr::new(loopback_of(ip), to.port()));
        }
        if let Some((_, stands_for)) = self.host_address.iter().find(|(a, _)| *a == ip) {
            return Some(SocketAddr::new(*stands_for, to.port()));
        }
        (is_outside(ip) && !self.is_on_link(ip)).then(|| self.zoned(to))
    }

    /// Whether an address is one of the guest's link alone, in whatever notation.
    fn is_on_link(&self, ip: IpAddr) -> bool {
        let ip = ip.to_canonical();
        self.link.iter().any(|(network, prefix_len)| covers(*network, *prefix_len, ip))
    }

    /// A link-local address with its zone: that of the resolver which has it, else the upstream's.
    fn zoned(&self, to: SocketAddr) -> SocketAddr {
        let SocketAddr::V6(v6) = to else { return to };
        if !v6.ip().is_unicast_link_local() {
            return to;
        }
        let zone_of = |resolver: &SocketAddr| match resolver {
            SocketAddr::V6(r) => (r.ip(), r.port()).eq(&(v6.ip(), v6.port())).then(|| r.scope_id()),
            SocketAddr::V4(_) => None,
        };
        let zone = self.resolvers.iter().find_map(zone_of).unwrap_or(self.zone);
        SocketAddrV6::new(*v6.ip(), v6.port(), 0, zone).into()
    }

    /// Whether a destination is a DNS server: port 53 of any address.
    pub fn is_dns(&self, to: SocketAddr) -> bool {
        to.port() == DNS_PORT
    }

    /// Whether a DNS server is a resolver that the host or the gateway's user has chosen, not the guest. `to`: as the
    /// guest wrote it, `leads_to`: where it leads.
    pub(crate) fn is_resolver(&self, to: SocketAddr, leads_to: SocketAddr) -> bool {
        self.resolvers.contains(&leads_to)
            || (self.is_dns(to) && self.nameservers.contains(&to.ip()))
    }

    /// The servers that are asked what the guest asks a resolver, in order. None: the destination is not a resolver, or
    /// nowhere. A resolver's address stands for itself, the forwarder's for all of the host's.
    pub fn servers(&self, to: SocketAddr) -> SmallVec<[SocketAddr; 3]> {
        if self.is_dns(to) && self.dns.contains(&to.ip()) {
            return self.resolvers.iter().copied().collect();
        }
        let leads_to = self.target(to).filter(|leads_to| self.is_resolver(to, *leads_to));
        leads_to.into_iter().collect()
    }

    /// Whether a destination is an address of the host's own, or a form that leads to one, and no mapping leads there.
    pub fn is_host(&self, to: SocketAddr, leads_to: SocketAddr) -> bool {
        let is_own = |ip: &IpAddr| self.host_addresses.contains(ip);
        to == leads_to && (is_own(&to.ip()) || embedded_v4(to.ip()).iter().any(is_own))
    }

    /// The smallest network of the host's links in which a destination is, or a form of an address there, if no mapping
    /// leads there.
    pub fn host_network(&self, to: SocketAddr, leads_to: SocketAddr) -> Option<(IpAddr, u8)> {
        let ip = to.ip().to_canonical();
        let forms = embedded_v4(ip);
        let is_in = |(network, bits): &&(IpAddr, u8)| {
            covers(*network, *bits, ip) || forms.iter().any(|v4| covers(*network, *bits, *v4))
        };
        let found = self.host_networks.iter().filter(is_in).max_by_key(|(_, bits)| *bits);
        found.copied().filter(|_| to == leads_to)
    }

    /// The first resolver of the same IP version, else the first.
    fn resolver(&self, ip: IpAddr) -> Option<SocketAddr> {
        let mut resolvers = self.resolvers.iter();
        let same = resolvers.find(|r| r.is_ipv4() == ip.is_ipv4());
        same.or(self.resolvers.first()).copied()
    }

    /// The address by which a guest names one of the host's loopback.
    pub(crate) fn name_of_loopback(&self, is_v4: bool) -> Option<IpAddr> {
        self.host_loopback.iter().copied().find(|a| a.is_ipv4() == is_v4)
    }

    /// The address by which a guest names one of the host that the guest has too.
    pub fn name_of(&self, host: IpAddr) -> Option<IpAddr> {
        self.host_address.iter().find(|(_, stands_for)| *stands_for == host).map(|(name, _)| *name)
    }
}

/// 127.0.0.1 or ::1.
pub fn loopback_of(ip: IpAddr) -> IpAddr {
    match ip {
        IpAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
    }
}

/// 169.254.0.0/16 (RFC 3927) and fe80::/10 (RFC 4291 section 2.5.6).
pub(crate) fn is_link_local(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => v4.is_link_local(),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    }
}

/// Whether a packet to an address may leave the host, or go to the host itself by an address of its own.
fn is_outside(ip: IpAddr) -> bool {
    let v4 = match ip {
        IpAddr::V4(v4) => Some(v4),
        // An IPv6 socket connects to these by IPv4.
        IpAddr::V6(v6) => v6.to_ipv4_mapped(),
    };
    let is_own = v4.map_or(ip.is_loopback(), |v4| v4.is_loopback());
    // 0.0.0.0/8 and :: mean this host (RFC 1122 section 3.2.1.3), and Linux takes them so.
    let is_this = v4.is_some_and(|v4| v4.octets()[0] == 0) || ip.is_unspecified();
    !(is_own || is_this || ip.is_multicast() || v4.is_some_and(|v4| v4.is_broadcast()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    fn mapping() -> Mapping {
        Mapping {
            host_loopback: vec!["10.0.2.2".parse().unwrap(), "fd00::2".parse().unwrap()],
            host_address: vec![("169.254.1.2".parse().unwrap(), "192.0.2.5".parse().unwrap())],
            dns: vec!["169.254.1.1".parse().unwrap()],
            resolvers: vec![at("[2001:db8::53]:53"), at("192.0.2.53:53")],
            attempts: 2,
            rotates: false,
            nameservers: vec!["198.51.100.53".parse().unwrap()],
            host_addresses: vec!["192.0.2.5".parse().unwrap(), "192.0.2.6".parse().unwrap()],
            host_networks: vec![
                ("203.0.113.0".parse().unwrap(), 24),
                ("203.0.113.7".parse().unwrap(), 32),
            ],
            link: Vec::new(),
            zone: 3,
        }
    }

    #[test]
    fn an_address_of_the_link_leads_to_the_zone_of_the_resolver_or_of_the_upstream() {
        let resolvers = vec![at("[fe80::53%7]:53")];
        let dns = vec!["169.254.1.1".parse().unwrap(), "fe80::99".parse().unwrap()];
        let mapping = Mapping { resolvers, dns, ..mapping() };
        let to = |text: &str| mapping.target(at(text));
        assert_eq!(to("[fe80::53]:53"), Some(at("[fe80::53%7]:53")));
        assert_eq!(to("[fe80::53]:80"), Some(at("[fe80::53%3]:80")));
        assert_eq!(to("[fd00::53]:53"), Some(at("[fd00::53]:53")));
        assert_eq!([to("169.254.1.1:53"), to("[fe80::99]:53")], [Some(at("[fe80::53%7]:53")); 2]);
        let leads_to = to("[fe80::53]:53").unwrap();
        assert!(mapping.is_resolver(at("[fe80::53]:53"), leads_to));
    }

    #[test]
    fn addresses_that_stand_for_the_host_lead_there_and_others_to_themselves() {
        let to = |text: &str| mapping().target(at(text));
        assert_eq!(to("10.0.2.2:80"), Some(at("127.0.0.1:80")));
        assert_eq!(to("[fd00::2]:80"), Some(at("[::1]:80")));
        assert_eq!(to("169.254.1.2:80"), Some(at("192.0.2.5:80")));
        assert_eq!(to("198.51.100.1:80"), Some(at("198.51.100.1:80")));
    }

    #[test]
    fn resolvers_are_those_of_the_host_and_those_announced_to_the_guest() {
        let is_resolver = |to: &str| {
            let leads_to = mapping().target(at(to)).unwrap();
            mapping().is_resolver(at(to), leads_to)
        };
        assert!(
            ["169.254.1.1:53", "192.0.2.53:53", "198.51.100.53:53"].into_iter().all(is_resolver)
        );
        assert!(!["192.0.2.54:53", "198.51.100.53:80", "10.0.2.2:53"].into_iter().any(is_resolver));
    }

    #[test]
    fn dns_goes_to_the_resolver_of_the_same_version_and_nothing_else_does() {
        let to = |text: &str| mapping().target(at(text));
        assert_eq!(to("169.254.1.1:53"), Some(at("192.0.2.53:53")));
        assert_eq!(to("169.254.1.1:80"), Some(at("169.254.1.1:80")));
        let alone = Mapping { resolvers: vec![at("[::1]:53")], ..mapping() };
        assert_eq!(alone.target(at("169.254.1.1:53")), Some(at("[::1]:53")));
        let none = Mapping { resolvers: Vec::new(), ..mapping() };
        assert_eq!(none.target(at("169.254.1.1:53")), None);
    }

    #[test]
    fn all_resolvers_are_asked_for_the_forwarder_whatever_its_ip_version() {
        let servers = |to: &str| mapping().servers(at(to)).into_vec();
        assert_eq!(servers("169.254.1.1:53"), [at("[2001:db8::53]:53"), at("192.0.2.53:53")]);
        assert_eq!(servers("192.0.2.53:53"), [at("192.0.2.53:53")]);
        assert_eq!(servers("198.51.100.53:53"), [at("198.51.100.53:53")]);
        for other in ["169.254.1.1:80", "192.0.2.54:53", "127.0.0.1:53"] {
            assert_eq!(servers(other), [], "{other}");
        }
    }

    #[test]
    fn an_address_of_the_host_is_its_own_unless_it_is_reached_by_a_mapping() {
        let is_host = |to: &str| mapping().is_host(at(to), mapping().target(at(to)).unwrap());
        assert!(is_host("192.0.2.6:80"));
        assert!(!is_host("169.254.1.2:80"), "mapped to 192.0.2.5");
        assert!(!is_host("198.51.100.1:80"));
    }

    #[test]
    fn an_address_of_the_hosts_links_is_of_the_smallest_network() {
        let bits = |to: &str| mapping().host_network(at(to), at(to)).map(|(_, bits)| bits);
        assert_eq!(bits("203.0.113.7:80"), Some(32));
        assert_eq!(bits("203.0.113.8:80").and(bits("[2002:cb00:7108::1]:80")), Some(24));
        assert_eq!(bits("203.0.114.7:80"), None);
        let mapped = mapping().host_network(at("203.0.113.8:80"), at("192.0.2.5:80"));
        assert_eq!(mapped, None);
    }

    #[test]
    fn unlisted_addresses_never_lead_to_the_loopback_of_the_host_in_any_notation() {
        for text in [
            "127.0.0.1:1",
            "127.1.2.3:1",
            "0.0.0.0:1",
            "0.1.2.3:1",
            "[::1]:1",
            "[::]:1",
            "[::ffff:127.0.0.1]:1",
            "[::ffff:0.0.0.0]:1",
            "255.255.255.255:1",
            "224.0.0.1:1",
            "[ff02::1]:1",
        ] {
            assert_eq!(mapping().target(at(text)), None, "{text}");
        }
    }

    #[test]
    fn an_address_of_the_link_leads_nowhere_unless_it_is_mapped() {
        let link = vec![("10.0.2.0".parse().unwrap(), 24), ("fd00::".parse().unwrap(), 64)];
        let dns = vec!["10.0.2.3".parse().unwrap()];
        let mapping = Mapping { link, dns, ..mapping() };
        let to = |text: &str| mapping.target(at(text));
        assert_eq!(to("10.0.2.2:80"), Some(at("127.0.0.1:80")));
        assert_eq!(to("10.0.2.3:53"), Some(at("192.0.2.53:53")));
        for nowhere in [
            "10.0.2.3:80",
            "10.0.2.50:80",
            "[::ffff:10.0.2.50]:80",
            "[fd00::3]:53",
            "[fd00::ffff]:1",
        ] {
            assert_eq!(to(nowhere), None, "{nowhere}");
        }
        for outside in ["10.0.3.50:80", "[fd00:0:0:1::3]:53"] {
            assert_eq!(to(outside), Some(at(outside)));
        }
    }

    #[test]
    fn a_mapped_address_is_mapped_back() {
        assert_eq!(mapping().name_of_loopback(true), Some("10.0.2.2".parse().unwrap()));
        assert_eq!(
            mapping().name_of("192.0.2.5".parse().unwrap()),
            Some("169.254.1.2".parse().unwrap())
        );
        assert_eq!(mapping().name_of("192.0.2.6".parse().unwrap()), None);
    }
}
