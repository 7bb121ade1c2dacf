//! The plan of a gateway, made from its options and checked before the set-up.

use std::ffi::OsString;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;

use fulmar_gateway::attach::Target;
use fulmar_gateway::config::{BindAddresses, Carries, Outbound, UdpFilter};
use fulmar_gateway::first::EncryptedHello;
use fulmar_gateway::guest::{DEFAULT_MTU, GuestNetwork, GuestOptions};
use fulmar_gateway::host::{HostNetwork, Upstream};
use fulmar_gateway::mapping::Mapping;
use fulmar_gateway::names::Ranges;
use fulmar_gateway::ports::PortSpec;
use fulmar_gateway::rules::Rules;
use fulmar_gateway::rules::file::Proxy;
use fulmar_gateway::{dhcp, ra};

use super::args::{
    Address, Args, AttachArgs, CarryArgs, GuestArgs, MapArgs, OrNone, PortArgs, ProcessArgs,
};
use super::ask::{Covered, Whom};
use super::audit;
use super::outside::Outside;
use crate::failure::{Failure, Outcome};

/// Port of a resolver.
const DNS_PORT: u16 = 53;
/// The least MTU of a link that carries IPv6, in bytes (RFC 8200 section 5).
pub const LEAST_MTU_V6: u32 = 1280;

/// The guest of a gateway.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Guest {
    /// Namespaces that exist.
    Existing(Target),
    /// New namespaces, for a program and its arguments; without arguments, for the user's shell.
    Program(Vec<OsString>),
}

/// Published ports of both directions.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Ports {
    /// TCP ports of the host.
    pub tcp: PortSpec,
    /// UDP ports of the host.
    pub udp: PortSpec,
    /// TCP ports of the guest's loopback.
    pub tcp_ns: PortSpec,
    /// UDP ports of the guest's loopback.
    pub udp_ns: PortSpec,
    /// Where ports of the host can be bound.
    pub addresses: BindAddresses,
    /// Which hosts may write to the guest's UDP ports unasked.
    pub udp_filter: UdpFilter,
    /// Connections between the loopback interfaces are spliced.
    pub has_splice: bool,
    /// Connections from the host's loopback arrive at the guest's loopback.
    pub is_to_loopback: bool,
    /// The guest has no interface, only these ports between the loopback interfaces.
    pub is_splice_only: bool,
}

/// The gateway that the options describe.
#[derive(Clone, Debug)]
pub struct Plan {
    /// For whom.
    pub guest: Guest,
    /// Its interface and addresses.
    pub options: GuestOptions,
    /// The interface is set up by the gateway.
    pub configures: bool,
    /// Stays when the file of the namespace is removed.
    pub outlives_file: bool,
    pub ports: Ports,
    /// The socket by which published ports are changed.
    pub conf_path: Option<PathBuf>,
    pub carries: Carries,
    pub outbound: Outbound,
    /// The host's interface after which the guest is made.
    pub upstream: Option<String>,
    /// Queues of the guest's interface.
    pub queues: u16,
    /// Ethernet address of the gateway.
    pub mac: Option<[u8; 6]>,
    pub attach: AttachArgs,
    pub addresses: GuestArgs,
    pub map: MapArgs,
    /// Networks of the guest's link that lead nowhere, but for the addresses of `map`.
    pub link: Vec<(IpAddr, u8)>,
    pub serves: Serves,
    pub process: ProcessArgs,
    /// The destinations that the guest may reach; `None`: pasta(1)'s default.
    pub rules: Option<Rules>,
    /// The ranges of which names get addresses of their own.
    pub names: Option<Ranges>,
    pub encrypted_hello: EncryptedHello,
    /// The proxy through which connections leave.
    pub proxy: Option<Proxy>,
    /// The options of a run with a policy file, which can be read again, and its text.
    pub reload: Option<(Arc<crate::run::Args>, Arc<str>)>,
    /// Files and folders that the program may not write to, where they exist.
    pub protected: Vec<PathBuf>,
    /// What a program may use beside its network.
    pub outside: Outside,
    /// Where the policy of what was reached is written.
    pub learn: Option<PathBuf>,
    /// Where the audit is written.
    pub audit: Option<audit::Target>,
    /// Who is asked about what no rule names.
    pub ask: Option<Whom>,
    /// The user's terminal, or the socket of who is asked: the program has no way to it.
    pub covered: Option<Covered>,
    /// Print a summary at the end.
    pub has_summary: bool,
}

/// The services of the gateway for the guest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Serves {
    pub dhcp: bool,
    pub dhcp_v6: bool,
    pub advertisements: bool,
    /// The services for IPv6 if the host gets it later, whether or not the guest is set up already.
    pub late_advertisements: bool,
}

impl Plan {
    /// Checks the options against each other.
    ///
    /// # Errors
    /// A sentence: options that contradict, or one that is not supported.
    pub fn new(args: &Args) -> Outcome<Plan> {
        let (guest, addresses, carry) = (guest_of(args)?, &args.guest, args.carry);
        if carry.no_ndp && !addresses.ipv4_only {
            return Err(Failure::new(
                "--no-ndp is supported only with --ipv4-only; add --ipv4-only",
            ));
        }
        if addresses.mtu.is_some_and(|m| m != 0 && m < LEAST_MTU_V6) && !addresses.ipv4_only {
            return Err(Failure::new(format!(
                "IPv6 requires an MTU of at least {LEAST_MTU_V6}; raise --mtu, or add --ipv4-only"
            )));
        }
        let (options, outbound) = (guest_options(args)?, outbound_of(addresses)?);
        let advertises = !carry.no_ra && !carry.no_ndp && !addresses.ipv4_only;
        let upstream = addresses.interface.as_ref().or(outbound.interface.as_ref()).cloned();
        Ok(Plan {
            guest,
            options,
            configures: args.attach.config_net,
            outlives_file: args.attach.no_netns_quit,
            ports: ports_of(&args.ports, &carry)?,
            conf_path: args.ports.conf_path.clone(),
            carries: Carries { tcp: !carry.no_tcp, udp: !carry.no_udp, icmp: !carry.no_icmp },
            outbound,
            upstream,
            queues: args.process.queues.unwrap_or(1),
            mac: addresses.mac_addr.map(|m| m.0),
            attach: args.attach.clone(),
            addresses: addresses.clone(),
            map: args.map.clone(),
            link: Vec::new(),
            serves: Serves {
                dhcp: !carry.no_dhcp && !addresses.ipv6_only,
                dhcp_v6: !carry.no_dhcpv6 && !addresses.ipv4_only,
                // A guest that is set up already would make itself a second address of the prefix.
                advertisements: advertises && !args.attach.config_net,
                late_advertisements: advertises,
            },
            process: args.process.clone(),
            rules: None,
            names: None,
            encrypted_hello: EncryptedHello::default(),
            proxy: None,
            reload: None,
            protected: Vec::new(),
            outside: Outside::default(),
            learn: None,
            audit: None,
            ask: None,
            covered: None,
            has_summary: false,
        })
    }

    /// Whether something is reported or written when the gateway ends.
    pub fn reports_end(&self) -> bool {
        self.has_summary || self.audit.is_some() || self.learn.is_some()
    }

    /// The guest's interface on this host.
    pub fn network(&self, host: &HostNetwork) -> GuestNetwork {
        let (mut options, args) = (self.options.clone(), &self.attach);
        if self.ports.is_splice_only {
            return GuestNetwork::none();
        }
        let upstreams = || [&host.v4, &host.v6].into_iter().flatten();
        let has_own = |is_v4: bool| options.gateways.iter().any(|g| g.is_ipv4() == is_v4);
        if args.no_copy_routes {
            let routers: Vec<IpAddr> = upstreams().filter_map(|u: &Upstream| u.gateway).collect();
            let more: Vec<_> = routers.into_iter().filter(|r| !has_own(r.is_ipv4())).collect();
            options.gateways.extend(more);
        }
        if args.no_copy_addrs && options.addresses.is_empty() {
            let first = upstreams().filter_map(|u| u.addresses.first());
            options.addresses = first.map(|a| (a.address, Some(a.prefix_len))).collect();
        }
        GuestNetwork::like(host, &options)
    }

    /// Where special addresses lead. `router`: the gateway's Ethernet address.
    pub fn mapping(&self, host: &HostNetwork, network: &GuestNetwork, router: [u8; 6]) -> Mapping {
        let map = &self.map;
        let routers = || {
            let v4 = network.gateway_v4.map(IpAddr::V4);
            let v6 = network.gateway_v6.map(|v6| [v6, advertised(network, router)]);
            let v6 = v6.into_iter().flatten().map(IpAddr::V6);
            let mut all: Vec<_> = v4.into_iter().chain(v6).collect();
            all.dedup();
            all
        };
        let host_loopback = match given(&map.map_host_loopback) {
            Some(addresses) => addresses,
            None if map.no_map_gw => Vec::new(),
            None => routers(),
        };
        let own =
            |guest: &IpAddr| own_address(host, network, guest.is_ipv4()).map(|own| (*guest, own));
        let host_address = given(&map.map_guest_addr).unwrap_or_default();
        let resolvers = match map.dns_host.as_slice() {
            [] => host.nameservers.iter().copied().filter(has_zone).collect(),
            asked => asked.iter().map(|a| SocketAddr::new(*a, DNS_PORT)).collect(),
        };
        Mapping {
            host_loopback,
            host_address: host_address.iter().filter_map(own).collect(),
            dns: map.dns_forward.clone(),
            resolvers,
            attempts: host.attempts,
            rotates: host.rotates,
            nameservers: self.nameservers(host),
            host_addresses: self.rules.iter().flat_map(|_| host.addresses.clone()).collect(),
            host_networks: self.rules.iter().flat_map(|_| host.networks.clone()).collect(),
            link: self.link.clone(),
            zone: host.v6.as_ref().map_or(0, |upstream| upstream.interface.index),
        }
    }

    /// Resolvers that are announced to the guest.
    fn nameservers(&self, host: &HostNetwork) -> Vec<IpAddr> {
        if !self.addresses.dhcp_dns {
            return Vec::new();
        }
        let hosts = || host.nameservers.iter().map(SocketAddr::ip).filter(|a| !a.is_loopback());
        match given(&self.addresses.dns) {
            Some(asked) => asked,
            None if self.map.dns_forward.is_empty() => hosts().collect(),
            None => self.map.dns_forward.clone(),
        }
    }

    fn search(&self, host: &HostNetwork) -> Vec<String> {
        let asked = &self.addresses.search;
        if !self.addresses.dhcp_search || asked.iter().any(|s| s == "none") {
            return Vec::new();
        }
        if asked.is_empty() {
            return host.search.clone();
        }
        asked.iter().flat_map(|list| list.split_whitespace().map(str::to_owned)).collect()
    }

    fn told_mtu(&self) -> Option<u32> {
        Some(self.options.mtu.unwrap_or(DEFAULT_MTU)).filter(|_| self.addresses.mtu != Some(0))
    }

    /// The lease of an IPv4 guest.
    pub fn lease(&self, host: &HostNetwork, network: &GuestNetwork) -> Option<dhcp::Lease> {
        let own = network.addresses.iter().find_map(|(address, length)| match address {
            IpAddr::V4(v4) => Some((*v4, *length)),
            IpAddr::V6(_) => None,
        });
        let ((address, prefix_len), router) = (own?, network.gateway_v4?);
        let v4 = |a: &IpAddr| if let IpAddr::V4(v4) = a { Some(*v4) } else { None };
        self.serves.dhcp.then(|| dhcp::Lease {
            address,
            prefix_len,
            server: router,
            router: Some(router),
            mtu: self.told_mtu().and_then(|m| u16::try_from(m).ok()),
            nameservers: self.nameservers(host).iter().filter_map(v4).collect(),
            search: self.search(host),
        })
    }

    /// The lease and the router advertisement of an IPv6 guest.
    pub fn lease_v6(
        &self,
        host: &HostNetwork,
        network: &GuestNetwork,
        router: [u8; 6],
    ) -> (Option<dhcp::LeaseV6>, Option<ra::Link>) {
        let v6 = |a: &IpAddr| if let IpAddr::V6(v6) = a { Some(*v6) } else { None };
        let Some(address) = network.addresses.iter().find_map(|(a, _)| v6(a)) else {
            return (None, None);
        };
        let nameservers: Vec<_> = self.nameservers(host).iter().filter_map(v6).collect();
        let search = self.search(host);
        // A DUID by the Ethernet address (RFC 8415 section 11.4), Ethernet being hardware type 1.
        let duid = [[0, 3, 0, 1].as_slice(), &router].concat();
        let lease = self.serves.dhcp_v6.then(|| dhcp::LeaseV6 {
            address,
            duid,
            nameservers: nameservers.clone(),
            search: search.clone(),
        });
        let link = self.serves.advertisements.then(|| ra::Link {
            router: fulmar::device::EtherAddr(router),
            source: advertised(network, router),
            address,
            mtu: self.told_mtu(),
            has_dhcp: lease.is_some(),
            nameservers,
            search,
        });
        (lease, link)
    }

    /// The router advertisement of a guest whose host had no IPv6 when it was configured and has it now: the guest's
    /// kernel makes itself an address of the prefix.
    pub fn late_advertisement(
        &self,
        host: &HostNetwork,
        network: &GuestNetwork,
        router: [u8; 6],
    ) -> Option<ra::Link> {
        let may_have = self.serves.late_advertisements;
        let addresses = &host.v6.as_ref()?.addresses;
        let address = addresses.iter().find_map(|a| match a.address {
            IpAddr::V6(v6) => Some(v6),
            IpAddr::V4(_) => None,
        })?;
        let has_none = network.addresses.iter().all(|(a, _)| a.is_ipv4());
        (may_have && has_none).then(|| ra::Link {
            router: fulmar::device::EtherAddr(router),
            source: advertised(network, router),
            address,
            mtu: self.told_mtu(),
            has_dhcp: false,
            nameservers: Vec::new(),
            search: Vec::new(),
        })
    }
}

/// The address from which the gateway advertises itself as a router, whose Ethernet address is `router`: the guest's
/// router, so that it has one address however the guest is configured, unless that is not link-local.
fn advertised(network: &GuestNetwork, router: [u8; 6]) -> Ipv6Addr {
    let of_guest = network.gateway_v6.filter(Ipv6Addr::is_unicast_link_local);
    of_guest.unwrap_or_else(|| ra::link_local(fulmar::device::EtherAddr(router)))
}

/// The addresses of an option that is given; none of them for `none`.
fn given(list: &[OrNone<IpAddr>]) -> Option<Vec<IpAddr>> {
    let addresses = || {
        let values = list.iter().filter_map(|item| match item {
            OrNone::Is(address) => Some(*address),
            OrNone::None => None,
        });
        values.collect()
    };
    match list.last() {
        None => None,
        Some(OrNone::None) => Some(Vec::new()),
        Some(OrNone::Is(_)) => Some(addresses()),
    }
}

/// Whether a server can be reached: an address of a link leads nowhere without its link.
fn has_zone(server: &SocketAddr) -> bool {
    !matches!(server, SocketAddr::V6(v6) if v6.ip().is_unicast_link_local() && v6.scope_id() == 0)
}

/// The host's own address of an IP version: the one that the guest has, too, if it has one.
fn own_address(host: &HostNetwork, network: &GuestNetwork, is_v4: bool) -> Option<IpAddr> {
    let upstream = if is_v4 { host.v4.as_ref() } else { host.v6.as_ref() }?;
    let shared = upstream
        .addresses
        .iter()
        .find(|a| network.addresses.iter().any(|(guests, _)| *guests == a.address));
    shared.or(upstream.addresses.first()).map(|a| a.address)
}

fn guest_of(args: &Args) -> Outcome<Guest> {
    let attach = &args.attach;
    if attach.netns_only && attach.userns.is_some() {
        return Err(Failure::new("--netns-only conflicts with --userns; omit one of them"));
    }
    if let Some(netns) = &attach.netns {
        if !args.command.is_empty() {
            return Err(Failure::new(
                "--netns conflicts with a process id or a program; omit one of them",
            ));
        }
        return Ok(Guest::Existing(Target::named(netns, attach.userns.clone())));
    }
    let number = match args.command.as_slice() {
        [one] => one.to_str().filter(|t| t.bytes().all(|b| b.is_ascii_digit()) && !t.is_empty()),
        _ => None,
    };
    let Some(number) = number else {
        return match attach.userns {
            None => Ok(Guest::Program(args.command.clone())),
            Some(_) => Err(Failure::new("--userns requires --netns or a process id")),
        };
    };
    let pid = number.parse().ok().filter(|pid| (1..=i32::MAX as u32).contains(pid));
    let pid = pid.ok_or_else(|| Failure::new(format!("invalid process id `{number}`")))?;
    if attach.netns_only {
        let netns = PathBuf::from(format!("/proc/{pid}/ns/net"));
        return Ok(Guest::Existing(Target::Path { netns, userns: None }));
    }
    Ok(Guest::Existing(Target::Process { pid, userns: attach.userns.clone() }))
}

fn guest_options(args: &Args) -> Outcome<GuestOptions> {
    let guest = &args.guest;
    let options = GuestOptions {
        without_v4: guest.ipv6_only,
        without_v6: guest.ipv4_only,
        name: args.attach.ns_ifname.clone(),
        mtu: guest.mtu.filter(|m| *m != 0),
        mac: args.attach.ns_mac_addr.map(|m| m.0),
        addresses: guest.address.iter().map(|Address(a, length)| (*a, *length)).collect(),
        prefix_len: guest.netmask,
        gateways: guest.gateway.clone(),
    };
    let all = options.addresses.iter().map(|(a, _)| a).chain(&options.gateways);
    for address in all {
        if (address.is_ipv4() && guest.ipv6_only) || (address.is_ipv6() && guest.ipv4_only) {
            let only = if guest.ipv4_only { "--ipv4-only" } else { "--ipv6-only" };
            return Err(Failure::new(format!("the address {address} conflicts with {only}")));
        }
    }
    Ok(options)
}

fn ports_of(args: &PortArgs, carry: &CarryArgs) -> Outcome<Ports> {
    let spec = |list: &[PortSpec], is_off: bool, option: &str| {
        let mut list = list.iter().cloned();
        let Some(first) = list.next() else {
            return Ok(if is_off { PortSpec::None } else { PortSpec::Auto });
        };
        let sum = list.try_fold(first, PortSpec::and).map_err(|e| Failure::new(e.to_string()))?;
        if is_off && sum != PortSpec::None {
            return Err(Failure::new(format!("{option} conflicts with --no-{}", &option[2..5])));
        }
        Ok(sum)
    };
    if args.splice_only && args.no_splice {
        return Err(Failure::new("--splice-only conflicts with --no-splice; omit one of them"));
    }
    let leads_away = |spec: &PortSpec| match spec {
        PortSpec::Ports(all) => all.iter().any(|p| p.to_address.is_some_and(|a| !a.is_loopback())),
        _ => false,
    };
    if args.splice_only && args.tcp_ns.iter().chain(&args.udp_ns).any(leads_away) {
        return Err(Failure::new(super::publish::not_loopback().to_string()));
    }
    Ok(Ports {
        tcp: spec(&args.tcp_ports, carry.no_tcp, "--tcp-ports")?,
        udp: spec(&args.udp_ports, carry.no_udp, "--udp-ports")?,
        tcp_ns: spec(&args.tcp_ns, carry.no_tcp, "--tcp-ns")?,
        udp_ns: spec(&args.udp_ns, carry.no_udp, "--udp-ns")?,
        addresses: if args.freebind { BindAddresses::Any } else { BindAddresses::Own },
        udp_filter: if args.udp_filter { UdpFilter::Address } else { UdpFilter::None },
        has_splice: !args.no_splice,
        is_to_loopback: args.host_lo_to_ns_lo,
        is_splice_only: args.splice_only,
    })
}

fn outbound_of(guest: &GuestArgs) -> Outcome<Outbound> {
    let mut outbound = Outbound::default();
    let named = [&guest.outbound_if4, &guest.outbound_if6].into_iter().flatten();
    let mut interfaces: Vec<&str> = named.map(String::as_str).collect();
    for text in &guest.outbound {
        match text.parse() {
            Ok(IpAddr::V4(v4)) => outbound.v4 = Some(v4),
            Ok(IpAddr::V6(v6)) => outbound.v6 = Some(v6),
            Err(_) => interfaces.push(text),
        }
    }
    outbound.interface = interfaces.last().map(|name| name.to_string());
    if interfaces.windows(2).any(|pair| pair[0] != pair[1]) {
        return Err(Failure::new(format!(
            "several outbound interfaces ({}) are not supported; give one",
            interfaces.join(", ")
        )));
    }
    Ok(outbound)
}
