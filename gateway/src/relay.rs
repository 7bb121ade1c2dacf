//! The relay: from the connections and datagrams of a guest, which a shard terminates, to sockets of the host and back.
//!
//! Each transport is a layer with a table of its flows ([`tcp`]). Their methods take a [`Context`]: the time, the
//! shard, the epoll set, counters and settings.

pub(crate) mod datagrams;
pub(crate) mod dns;
pub(crate) mod echo;
pub(crate) mod host_socket;
pub(crate) mod names;
pub(crate) mod poll;
mod published_sockets;
pub(crate) mod services;
pub(crate) mod shared_names;
pub(crate) mod shared_policy;
pub(crate) mod siblings;
pub(crate) mod streams;
#[allow(unsafe_code)]
mod sys;
pub(crate) mod tcp;
pub(crate) mod udp;
pub(crate) mod wait;
pub(crate) mod way;

use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time;

use fulmar_stack::base::{Instant, SlotId};
use fulmar_stack::ip::InvokingPacket;

use crate::config::{BindAddresses, Carries, Config, Limits, OnLoopback, Outbound, UdpFilter};
use crate::first::EncryptedHello;
use crate::mapping::{Mapping, is_link_local};
use crate::policy::{NewClient, NewFlow, Protocol};
use crate::setup;
use crate::stat::{Refusal, Totals};
use crate::upstream::Upstream;
use datagrams::HostError;
use poll::{Poll, Tokens};
use shared_names::{Meaning, SharedNames};
use shared_policy::SharedPolicy;
use siblings::Siblings;
use way::NotCarried;

/// The stack of one queue, on the guest's link.
pub(crate) use fulmar_stack::shard::Shard;

/// The clock of the shard. It starts at one millisecond: an [`Instant`] of zero is one that has passed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock(time::Instant);

impl Clock {
    /// A clock that starts now.
    pub(crate) fn start() -> Clock {
        Clock(time::Instant::now())
    }

    /// The current time.
    pub(crate) fn now(&self) -> Instant {
        Instant::from_nanos(1_000_000 + self.0.elapsed().as_nanos() as u64)
    }

    /// How long it runs.
    pub(crate) fn uptime(&self) -> time::Duration {
        self.0.elapsed()
    }
}

/// The settings of a relay. While it runs, only the mapping changes, as a whole.
pub(crate) struct Settings {
    /// The guest's addresses.
    pub guest: Vec<IpAddr>,
    /// The gateway's own addresses on the guest's link.
    pub routers: Vec<IpAddr>,
    /// The source address of translated IPv6 clients where the guest's router is link-local: the guest's kernel would
    /// answer a link-local client from its own link-local address, which is not the one that the client wrote to.
    pub nat_source_v6: Option<IpAddr>,
    pub carries: Carries,
    pub mapping: Arc<Mapping>,
    pub outbound: Outbound,
    pub limits: Limits,
    /// Which hosts may write to the guest's UDP ports unasked.
    pub udp_filter: UdpFilter,
    /// Addresses at which published ports can be bound.
    pub bind_addresses: BindAddresses,
    pub names: SharedNames,
    pub encrypted_hello: EncryptedHello,
    pub upstream: Option<Upstream>,
    pub policy: SharedPolicy,
    pub on_loopback: Option<OnLoopback>,
}

impl Settings {
    /// The settings of one of several queues.
    pub(crate) fn new(
        config: &Config,
        policy: &SharedPolicy,
        names: &SharedNames,
        queues: usize,
    ) -> Settings {
        let network = &config.network;
        Settings {
            guest: network.addresses.iter().map(|(a, _)| *a).collect(),
            routers: setup::routers(network).iter().map(|r| r.addr).collect(),
            nat_source_v6: setup::nat_source_v6(network).map(IpAddr::V6),
            carries: config.carries,
            mapping: Arc::new(config.mapping.clone()),
            outbound: config.outbound.clone(),
            limits: config.limits.part_of(queues),
            udp_filter: config.udp_filter,
            bind_addresses: config.publish.addresses,
            names: names.clone(),
            encrypted_hello: config.encrypted_hello,
            upstream: config.upstream.clone(),
            policy: policy.clone(),
            on_loopback: None,
        }
    }

    /// The guest's first address of an IP version, one that is not link-local if there is one.
    pub(crate) fn guest_address(&self, is_v4: bool) -> Option<IpAddr> {
        let mut of_version = self.guest.iter().filter(|a| a.is_ipv4() == is_v4);
        let first = of_version.clone().next();
        of_version.find(|a| !is_link_local(**a)).or(first).copied()
    }

    /// The source address that a client of a published port has in the guest (source NAT): its own, unless it is one to
    /// which the guest could not answer: the host's loopback, an address that host and guest share, or a link-local
    /// one. Then it is the address that is mapped to it, else the router's, or where that is link-local one of the
    /// guest's prefix.
    pub(crate) fn translated(&self, client: IpAddr) -> Option<IpAddr> {
        let is_v4 = client.is_ipv4();
        let name = if client.is_loopback() {
            self.mapping.name_of_loopback(is_v4)
        } else if self.guest.contains(&client) || is_link_local(client) || client.is_unspecified() {
            self.mapping.name_of(client)
        } else {
            return Some(client);
        };
        let router = || self.routers.iter().copied().find(|r| r.is_ipv4() == is_v4);
        let seen = name.or_else(router)?;
        let of_prefix = self.nat_source_v6.filter(|_| !is_v4 && is_link_local(seen));
        Some(of_prefix.unwrap_or(seen))
    }
}

/// The state that the layers of the relay share.
pub(crate) struct Context<'a> {
    pub now: Instant,
    pub stack: &'a mut Shard,
    pub poll: &'a Poll,
    pub tokens: &'a mut Tokens,
    pub settings: &'a mut Settings,
    pub totals: &'a mut Totals,
    pub siblings: &'a mut Siblings,
    /// Names that connections wait for.
    pub wanted: &'a mut Vec<Arc<str>>,
    /// Connections of the guest to its resolvers: the socket, the guest's end, and the resolver.
    pub to_dns: &'a mut Vec<(SlotId, SocketAddr, SocketAddr)>,
}

impl Context<'_> {
    /// Counts something that was not carried.
    pub(crate) fn refuse(&mut self, why: Refusal) {
        self.totals.refusals.count(why);
    }

    /// Counts a flow of the guest that is not carried, and tells the policy.
    pub(crate) fn refuse_flow(
        &mut self,
        protocol: Protocol,
        (from, to): (SocketAddr, SocketAddr),
        &NotCarried { why, ref rule, leads_to, .. }: &NotCarried,
    ) {
        self.refuse(why);
        let name = match self.settings.names.meaning(to.ip()) {
            Meaning::Name(name) => Some(name),
            Meaning::Address | Meaning::Nothing => None,
        };
        let leads_to = leads_to.or_else(|| self.settings.mapping.target(to)).unwrap_or(to);
        let flow = self.new_flow(protocol, (from, to), leads_to, name.as_deref());
        self.settings.policy.refused(&flow, why, rule.clone());
    }

    /// Counts a flow that new rules end. The policy has said so itself if it is denied.
    fn refuse_under_new_rules(
        &mut self,
        protocol: Protocol,
        ends: (SocketAddr, SocketAddr),
        why: &NotCarried,
    ) {
        match why.why {
            Refusal::PolicyChanged => self.refuse(Refusal::PolicyChanged),
            _ => self.refuse_flow(protocol, ends, why),
        }
    }

    /// A flow as the policy receives it. `name`: that of the guest's destination.
    fn new_flow<'a>(
        &self,
        protocol: Protocol,
        (from, to): (SocketAddr, SocketAddr),
        leads_to: SocketAddr,
        name: Option<&'a str>,
    ) -> NewFlow<'a> {
        let mapping = &self.settings.mapping;
        // The address of a name stands for the real one.
        let at = if name.is_some() { leads_to } else { to };
        let is_host = mapping.is_host(at, leads_to);
        let host_network = mapping.host_network(at, leads_to);
        NewFlow { leads_to, name, is_host, host_network, ..NewFlow::new(protocol, from, to) }
    }

    /// Passes an error of the host's network on to the guest. `leads_to`: the packet's destination as the host knows
    /// it.
    pub(crate) fn pass_error(
        &mut self,
        about: &InvokingPacket<'_>,
        said: &HostError,
        leads_to: IpAddr,
    ) {
        let Some(error) = said.error else { return };
        // A router speaks for itself; the destination by the address that the guest knows it by.
        let is_router = |from: &IpAddr| *from != leads_to && from.is_ipv4() == about.dst.is_ipv4();
        self.stack.icmp().send_error(self.now, about, error, said.from.filter(is_router));
    }

    /// The queue that has the datagrams of a guest's port, if it is another.
    pub(crate) fn owner_of_port_elsewhere(&mut self, guest: SocketAddr) -> Option<u16> {
        if self.siblings.is_alone() {
            return None;
        }
        let siblings = self.stack.siblings();
        let owner = siblings.owner_of_sender(guest);
        (owner != siblings.id()).then_some(owner)
    }

    /// The socket of a published port that leads to a guest's port, by which the guest reaches a destination, too.
    pub(crate) fn published_socket(
        &self,
        guest: SocketAddr,
        leads_to: SocketAddr,
    ) -> Option<Arc<OwnedFd>> {
        let outbound = &self.settings.outbound;
        let leads_there =
            outbound.address_for(leads_to).is_none() && outbound.interface_for(leads_to).is_none();
        let key = (guest.port(), leads_to.is_ipv4());
        leads_there.then(|| self.siblings.published_socket(key)).flatten()
    }

    /// Whether the policy admits a client of a published port, which is counted if not.
    pub(crate) fn admits(&mut self, protocol: Protocol, from: SocketAddr) -> bool {
        let is_admitted = self.settings.policy.admits(&NewClient { protocol, from });
        if !is_admitted {
            self.refuse(Refusal::Policy);
        }
        is_admitted
    }

    /// The queue that owns the flow between the guest and an outside peer, if it is another.
    pub(crate) fn owner_elsewhere(&mut self, guest: SocketAddr, seen: SocketAddr) -> Option<u16> {
        if self.siblings.is_alone() {
            return None;
        }
        let own = self.stack.siblings().id();
        let owner = self.stack.owner_of_connection(guest, seen).ok()?;
        (owner != own).then_some(owner)
    }
}

/// The addresses of a flow.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Endpoints {
    /// The guest's end.
    pub guest: SocketAddr,
    /// The other end as the guest knows it.
    pub peer: SocketAddr,
    /// The other end as the host knows it.
    pub host: SocketAddr,
}

/// An address as it is written in its own IP version: without a zone, which has its meaning on one side alone,
/// and not as an IPv6 address that stands for an IPv4 one.
pub(crate) fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}
