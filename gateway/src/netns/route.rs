//! Unicast routes of the main table, as rtnetlink writes them.
//!
//! Flags that say what the kernel has found out about a next hop (dead, link down, offloaded) are not part of a route:
//! a kernel refuses a new one that has them. Attributes that only matter where packets leave for another host (an MTU,
//! TCP's parameters, an encapsulation) are not read.
//!
//! Sources: rtnetlink(7), linux/rtnetlink.h, ip-route(8).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteFlags, RouteHeader, RouteMessage, RouteNextHop,
    RouteNextHopFlags, RouteProtocol, RouteScope, RouteType, RouteVia,
};

use crate::netns::netlink::family_of;

/// Where a route leads.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NextHop {
    /// The outgoing interface.
    pub index: u32,
    /// The router; none on the link itself. That of an IPv4 route may have an IPv6 address (RFC 5549).
    pub gateway: Option<IpAddr>,
    /// The router is on the link of the interface, whatever the other routes say (RTNH_F_ONLINK).
    pub is_onlink: bool,
    /// Its share of the packets, less one (`rtnh_hops`).
    pub weight: u8,
}

/// A unicast route of the main table.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Route {
    /// The destination; the unspecified address for the default route.
    pub destination: IpAddr,
    /// Bits of its prefix.
    pub prefix_len: u8,
    /// One next hop, or several among which the kernel divides the flows.
    pub hops: Vec<NextHop>,
    /// The source address to prefer.
    pub source: Option<IpAddr>,
    /// RTA_PRIORITY: of several routes to a destination the one with the lowest is used.
    pub metric: u32,
    /// `rtm_scope` of an IPv4 route: RT_SCOPE_UNIVERSE, RT_SCOPE_LINK, or one that the administrator chose.
    pub scope: u8,
    /// `rtm_tos`: the route is for packets of this type of service alone, unless it is 0.
    pub tos: u8,
}

impl Route {
    /// A route to the hosts of a prefix on the link of an interface.
    pub fn on_link(index: u32, destination: IpAddr, prefix_len: u8) -> Route {
        let hop = NextHop { index, gateway: None, is_onlink: false, weight: 0 };
        let scope = RouteScope::Link.into();
        let (hops, source, metric, tos) = (vec![hop], None, 0, 0);
        Route { destination, prefix_len, hops, source, metric, scope, tos }
    }

    /// A default route through a router on the link of an interface.
    pub fn default_through(index: u32, gateway: IpAddr) -> Route {
        let hop = NextHop { index, gateway: Some(gateway), is_onlink: false, weight: 0 };
        let scope = RouteScope::Universe.into();
        Route { hops: vec![hop], scope, ..Route::on_link(index, unspecified(gateway.is_ipv4()), 0) }
    }

    /// Whether it is a default route.
    pub fn is_default(&self) -> bool {
        self.prefix_len == 0
    }

    /// The first router on the way.
    pub fn gateway(&self) -> Option<IpAddr> {
        self.hops.iter().find_map(|hop| hop.gateway)
    }

    /// Whether packets leave by an interface.
    pub fn leads_to(&self, index: u32) -> bool {
        self.hops.iter().any(|hop| hop.index == index)
    }

    /// What the kernel wrote; `None`: a route of another table or type (unreachable, blackhole, local, ...), or one
    /// without an interface.
    pub(crate) fn of_message(message: RouteMessage) -> Option<Route> {
        let header = message.header;
        if header.table != RouteHeader::RT_TABLE_MAIN || header.kind != RouteType::Unicast {
            return None;
        }
        let is_v4 = header.address_family == family_of(Ipv4Addr::UNSPECIFIED.into());
        let is_onlink = header.flags.contains(RouteFlags::Onlink);
        let mut alone = NextHop { index: 0, gateway: None, is_onlink, weight: 0 };
        let mut route = Route {
            destination: unspecified(is_v4),
            prefix_len: header.destination_prefix_length,
            hops: Vec::new(),
            source: None,
            metric: 0,
            scope: header.scope.into(),
            tos: header.tos,
        };
        for attribute in message.attributes {
            match attribute {
                RouteAttribute::Destination(to) => route.destination = ip_of(to)?,
                RouteAttribute::PrefSource(source) => route.source = ip_of(source),
                RouteAttribute::Priority(metric) => route.metric = metric,
                RouteAttribute::Oif(index) => alone.index = index,
                RouteAttribute::MultiPath(hops) => {
                    route.hops = hops.into_iter().map(hop_of).collect();
                }
                other => alone.gateway = gateway_of(other).or(alone.gateway),
            }
        }
        if route.hops.is_empty() {
            route.hops.push(alone);
        }
        route.hops.retain(|hop| hop.index != 0);
        (!route.hops.is_empty()).then_some(route)
    }

    /// The message that adds it.
    pub(crate) fn message(&self) -> RouteMessage {
        let mut message = RouteMessage::default();
        message.header = RouteHeader {
            address_family: family_of(self.destination),
            destination_prefix_length: self.prefix_len,
            table: RouteHeader::RT_TABLE_MAIN,
            protocol: RouteProtocol::Static,
            scope: self.scope.into(),
            tos: self.tos,
            kind: RouteType::Unicast,
            ..RouteHeader::default()
        };
        let attributes = [
            (!self.is_default()).then(|| RouteAttribute::Destination(self.destination.into())),
            self.source.map(|source| RouteAttribute::PrefSource(source.into())),
            (self.metric != 0).then_some(RouteAttribute::Priority(self.metric)),
        ];
        message.attributes = attributes.into_iter().flatten().collect();
        match self.hops.as_slice() {
            [hop] => {
                if hop.is_onlink {
                    message.header.flags = RouteFlags::Onlink;
                }
                message.attributes.push(RouteAttribute::Oif(hop.index));
                message.attributes.extend(self.attribute_of(hop));
            }
            hops => {
                let hops = hops.iter().map(|hop| self.next_hop(hop)).collect();
                message.attributes.push(RouteAttribute::MultiPath(hops));
            }
        }
        message
    }

    fn next_hop(&self, hop: &NextHop) -> RouteNextHop {
        let mut next = RouteNextHop::default();
        next.interface_index = hop.index;
        next.hops = hop.weight;
        if hop.is_onlink {
            next.flags = RouteNextHopFlags::Onlink;
        }
        next.attributes = self.attribute_of(hop).into_iter().collect();
        next
    }

    /// The router of a next hop: RTA_VIA where its address has another version than the route.
    fn attribute_of(&self, hop: &NextHop) -> Option<RouteAttribute> {
        let gateway = hop.gateway?;
        let is_same = gateway.is_ipv4() == self.destination.is_ipv4();
        let same = || RouteAttribute::Gateway(gateway.into());
        Some(if is_same { same() } else { RouteAttribute::Via(gateway.into()) })
    }
}

fn hop_of(hop: RouteNextHop) -> NextHop {
    NextHop {
        index: hop.interface_index,
        gateway: hop.attributes.into_iter().find_map(gateway_of),
        is_onlink: hop.flags.contains(RouteNextHopFlags::Onlink),
        weight: hop.hops,
    }
}

fn gateway_of(attribute: RouteAttribute) -> Option<IpAddr> {
    match attribute {
        RouteAttribute::Gateway(gateway) => ip_of(gateway),
        RouteAttribute::Via(RouteVia::Inet(v4)) => Some(v4.into()),
        RouteAttribute::Via(RouteVia::Inet6(v6)) => Some(v6.into()),
        _ => None,
    }
}

fn unspecified(is_v4: bool) -> IpAddr {
    if is_v4 { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() }
}

fn ip_of(address: RouteAddress) -> Option<IpAddr> {
    match address {
        RouteAddress::Inet(v4) => Some(v4.into()),
        RouteAddress::Inet6(v6) => Some(v6.into()),
        _ => None,
    }
}
