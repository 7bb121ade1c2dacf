//! The rtnetlink requests that set up a namespace: links, addresses, routes.
//!
//! A [`Netlink`] socket belongs to the network namespace in which it was opened, whichever thread uses
//! it later. Each request waits for its acknowledgement.
//!
//! Source: rtnetlink(7).

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, BorrowedFd};

use netlink_packet_core::{NLM_F_ACK, NLM_F_CREATE, NLM_F_DUMP, NLM_F_EXCL, NLM_F_REPLACE};
use netlink_packet_route::address::{
    AddressAttribute, AddressHeaderFlags, AddressMessage, AddressScope,
};
use netlink_packet_route::link::{
    AfSpecInet6, AfSpecUnspec, In6AddrGenMode, InfoData, InfoKind, InfoVeth, LinkAttribute,
    LinkFlags, LinkInfo, LinkMessage,
};
use netlink_packet_route::route::RouteMessage;
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use netlink_sys::protocols::NETLINK_ROUTE;

use crate::netns::channel::Channel;
use crate::netns::route::Route;

/// One end of a veth pair.
#[derive(Clone, Debug)]
pub struct VethEnd<'a> {
    /// Interface name, at most 15 bytes.
    pub name: &'a str,
    /// Its Ethernet address.
    pub mac: [u8; 6],
    /// Its MTU in bytes.
    pub mtu: u32,
}

impl VethEnd<'_> {
    fn message(&self) -> LinkMessage {
        link(
            0,
            vec![
                LinkAttribute::IfName(self.name.into()),
                LinkAttribute::Address(self.mac.into()),
                LinkAttribute::Mtu(self.mtu),
            ],
        )
    }
}

fn link(index: u32, attributes: Vec<LinkAttribute>) -> LinkMessage {
    let mut message = LinkMessage::default();
    message.header.index = index;
    message.attributes = attributes;
    message
}

pub(crate) fn family_of(address: IpAddr) -> AddressFamily {
    if address.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 }
}

/// An interface.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Interface {
    /// Its index in the namespace.
    pub index: u32,
    /// Its name.
    pub name: String,
    /// Its Ethernet address, if it has one.
    pub mac: Option<[u8; 6]>,
    /// Its MTU in bytes.
    pub mtu: u32,
    /// IFF_UP.
    pub is_up: bool,
    /// IFF_LOOPBACK.
    pub is_loopback: bool,
}

/// An address of an interface.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Address {
    /// The interface.
    pub index: u32,
    /// The address.
    pub address: IpAddr,
    /// Bits of its prefix.
    pub prefix_len: u8,
    /// Its scope is RT_SCOPE_UNIVERSE.
    pub is_global: bool,
}

/// An rtnetlink socket.
pub struct Netlink(Channel);

impl Netlink {
    /// Opens a socket in the calling thread's network namespace.
    pub fn open() -> io::Result<Netlink> {
        Ok(Netlink(Channel::open(NETLINK_ROUTE)?))
    }

    /// Makes a veth pair: `near` here, `far` in the namespace behind `far_netns`.
    pub fn add_veth(
        &mut self,
        near: &VethEnd<'_>,
        far: &VethEnd<'_>,
        far_netns: BorrowedFd<'_>,
    ) -> io::Result<()> {
        self.add_veth_at(near, far, far_netns, 0)
    }

    /// As [`Netlink::add_veth`], with an index for the near end (0: the kernel chooses). Where both ends have the same
    /// one the kernel takes up to a second to find that the link is up (net/core/link_watch.c,
    /// linkwatch_urgent_event).
    pub fn add_veth_at(
        &mut self,
        near: &VethEnd<'_>,
        far: &VethEnd<'_>,
        far_netns: BorrowedFd<'_>,
        near_index: u32,
    ) -> io::Result<()> {
        let mut peer = far.message();
        peer.attributes.push(LinkAttribute::NetNsFd(far_netns.as_raw_fd()));
        let mut message = near.message();
        message.header.index = near_index;
        message.attributes.push(LinkAttribute::LinkInfo(vec![
            LinkInfo::Kind(InfoKind::Veth),
            LinkInfo::Data(InfoData::Veth(InfoVeth::Peer(peer))),
        ]));
        self.transact(RouteNetlinkMessage::NewLink(message), NLM_F_CREATE | NLM_F_EXCL)
    }

    /// Makes a bridge.
    pub fn add_bridge(&mut self, name: &str, mac: [u8; 6]) -> io::Result<()> {
        let message = link(
            0,
            vec![
                LinkAttribute::IfName(name.into()),
                LinkAttribute::Address(mac.into()),
                LinkAttribute::LinkInfo(vec![LinkInfo::Kind(InfoKind::Bridge)]),
            ],
        );
        self.transact(RouteNetlinkMessage::NewLink(message), NLM_F_CREATE | NLM_F_EXCL)
    }

    /// Makes an interface a port of a bridge (IFLA_MASTER).
    pub(crate) fn set_controller(&mut self, index: u32, bridge: u32) -> io::Result<()> {
        let attributes = vec![LinkAttribute::Controller(bridge)];
        self.transact(RouteNetlinkMessage::NewLink(link(index, attributes)), 0)
    }

    /// Sets the MTU of an interface, in bytes.
    pub fn set_mtu(&mut self, index: u32, mtu: u32) -> io::Result<()> {
        let message = link(index, vec![LinkAttribute::Mtu(mtu)]);
        self.transact(RouteNetlinkMessage::NewLink(message), 0)
    }

    /// Sets the Ethernet address of an interface that is down.
    pub fn set_mac(&mut self, index: u32, mac: [u8; 6]) -> io::Result<()> {
        let message = link(index, vec![LinkAttribute::Address(mac.into())]);
        self.transact(RouteNetlinkMessage::NewLink(message), 0)
    }

    /// Lets an interface be heard by packet sockets alone: it answers no ARP request (IFF_NOARP) and makes no IPv6
    /// address of its own (RFC 4862), without which it sends no solicitations.
    pub(crate) fn set_silent(&mut self, index: u32) -> io::Result<()> {
        let mut message = link(index, Vec::new());
        message.header.flags = LinkFlags::Noarp;
        message.header.change_mask = LinkFlags::Noarp;
        self.transact(RouteNetlinkMessage::NewLink(message), 0)?;
        let none = AfSpecInet6::AddrGenMode(In6AddrGenMode::None);
        let of_v6 = LinkAttribute::AfSpecUnspec(vec![AfSpecUnspec::Inet6(vec![none])]);
        match self.transact(RouteNetlinkMessage::NewLink(link(index, vec![of_v6])), 0) {
            // A kernel without IPv6, or an MTU below its least.
            Err(e) if e.raw_os_error() == Some(libc::EAFNOSUPPORT) => Ok(()),
            done => done,
        }
    }

    /// Brings an interface up.
    pub fn set_up(&mut self, index: u32) -> io::Result<()> {
        let mut message = link(index, Vec::new());
        message.header.flags = LinkFlags::Up;
        message.header.change_mask = LinkFlags::Up;
        self.transact(RouteNetlinkMessage::NewLink(message), 0)
    }

    /// Removes an interface; both ends of a veth pair go together.
    pub fn delete(&mut self, index: u32) -> io::Result<()> {
        self.transact(RouteNetlinkMessage::DelLink(link(index, Vec::new())), 0)
    }

    /// Gives an interface an address, and with it a route to its prefix. An IPv6 address is usable at
    /// once, without duplicate address detection (RFC 4862 section 5.4).
    pub fn add_address(&mut self, index: u32, address: IpAddr, prefix: u8) -> io::Result<()> {
        let mut message = AddressMessage::default();
        message.header.family = family_of(address);
        message.header.prefix_len = prefix;
        message.header.index = index;
        if address.is_ipv6() {
            message.header.flags = AddressHeaderFlags::Nodad;
        }
        message.attributes =
            vec![AddressAttribute::Local(address), AddressAttribute::Address(address)];
        self.transact(RouteNetlinkMessage::NewAddress(message), NLM_F_CREATE | NLM_F_REPLACE)
    }

    /// Adds a route to the main table.
    pub fn add_route(&mut self, route: &Route) -> io::Result<()> {
        let message = RouteNetlinkMessage::NewRoute(route.message());
        self.transact(message, NLM_F_CREATE | NLM_F_EXCL)
    }

    /// The interfaces of the namespace.
    pub fn interfaces(&mut self) -> io::Result<Vec<Interface>> {
        let answers = self.dump(RouteNetlinkMessage::GetLink(LinkMessage::default()))?;
        Ok(answers.into_iter().filter_map(interface_of).collect())
    }

    /// The addresses of the namespace.
    pub fn addresses(&mut self) -> io::Result<Vec<Address>> {
        let answers = self.dump(RouteNetlinkMessage::GetAddress(AddressMessage::default()))?;
        Ok(answers.into_iter().filter_map(address_of).collect())
    }

    /// The unicast routes of the main table, of both IP versions.
    pub fn routes(&mut self) -> io::Result<Vec<Route>> {
        let mut routes = Vec::new();
        for family in [AddressFamily::Inet, AddressFamily::Inet6] {
            let mut request = RouteMessage::default();
            request.header.address_family = family;
            let answers = self.dump(RouteNetlinkMessage::GetRoute(request))?;
            routes.extend(answers.into_iter().filter_map(route_of));
        }
        Ok(routes)
    }

    /// Sends a request and waits for its acknowledgement.
    fn transact(&mut self, message: RouteNetlinkMessage, flags: u16) -> io::Result<()> {
        self.0.send(message, NLM_F_ACK | flags)?;
        self.0.receive(|_: RouteNetlinkMessage| {})
    }

    /// Sends a request and collects every object of the answer.
    fn dump(&mut self, message: RouteNetlinkMessage) -> io::Result<Vec<RouteNetlinkMessage>> {
        let mut answers = Vec::new();
        self.0.send(message, NLM_F_DUMP)?;
        self.0.receive(|answer| answers.push(answer))?;
        Ok(answers)
    }
}

fn interface_of(answer: RouteNetlinkMessage) -> Option<Interface> {
    let RouteNetlinkMessage::NewLink(message) = answer else { return None };
    let flags = message.header.flags;
    let mut interface = Interface {
        index: message.header.index,
        name: String::new(),
        mac: None,
        mtu: 0,
        is_up: flags.contains(LinkFlags::Up),
        is_loopback: flags.contains(LinkFlags::Loopback),
    };
    for attribute in message.attributes {
        match attribute {
            LinkAttribute::IfName(name) => interface.name = name,
            LinkAttribute::Address(mac) => interface.mac = mac.try_into().ok(),
            LinkAttribute::Mtu(mtu) => interface.mtu = mtu,
            _ => {}
        }
    }
    Some(interface)
}

/// IFA_LOCAL is the own address where IFA_ADDRESS is that of a point-to-point peer.
fn address_of(answer: RouteNetlinkMessage) -> Option<Address> {
    let RouteNetlinkMessage::NewAddress(message) = answer else { return None };
    let local = message.attributes.iter().find_map(|a| match a {
        AddressAttribute::Local(address) => Some(*address),
        _ => None,
    });
    let any = message.attributes.iter().find_map(|a| match a {
        AddressAttribute::Address(address) => Some(*address),
        _ => None,
    });
    Some(Address {
        index: message.header.index,
        address: local.or(any)?,
        prefix_len: message.header.prefix_len,
        is_global: message.header.scope == AddressScope::Universe,
    })
}

fn route_of(answer: RouteNetlinkMessage) -> Option<Route> {
    let RouteNetlinkMessage::NewRoute(message) = answer else { return None };
    Route::of_message(message)
}
