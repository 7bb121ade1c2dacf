//! The relay: between the connections and datagrams of a guest, which end in a shard, and the host's sockets.
//!
//! Each transport is a layer with a table of its flows ([`tcp`]). What they share is passed to them as a
//! [`Context`].

pub mod echo;
pub mod host;
pub mod judge;
pub mod names;
pub mod poll;
mod published;
pub mod services;
pub mod siblings;
pub mod streams;
#[allow(unsafe_code)]
mod sys;
pub mod tcp;
pub mod udp;
pub mod wait;

use std::net::{IpAddr, SocketAddr};
use std::time;

use fulmar_base::Instant;
use fulmar_runtime::Account;

use crate::config::{BindAddresses, Carries, Config, Limits, OnLoopback, Outbound};
use crate::mapping::Mapping;
use crate::setup;
use crate::stat::{Refusal, Totals};
use judge::Judge;
use poll::{Owners, Poll};
use siblings::Siblings;

/// The stack of a gateway, with an account of CPU time that may be off.
pub type Shard = fulmar_shard::Shard<Account>;

/// The clock of the shard: it starts a little above zero, since zero is the past.
#[derive(Clone, Copy, Debug)]
pub struct Clock(time::Instant);

impl Clock {
    /// A clock that starts now.
    pub fn start() -> Clock {
        Clock(time::Instant::now())
    }

    /// What time it is.
    pub fn now(&self) -> Instant {
        Instant::from_nanos(1_000_000 + self.0.elapsed().as_nanos() as u64)
    }

    /// How long it runs.
    pub fn uptime(&self) -> time::Duration {
        self.0.elapsed()
    }
}

/// What was decided when the gateway was set up.
pub struct Settings {
    /// The guest's addresses.
    pub guest: Vec<IpAddr>,
    /// As whom the gateway answers on the guest's link.
    pub routers: Vec<IpAddr>,
    /// Who stands in for a client of IPv6 where the guest's router is link-local: to such a client the guest's kernel
    /// answers from its own link-local address, to which nobody has written.
    pub stand_in_v6: Option<IpAddr>,
    pub carries: Carries,
    pub mapping: Mapping,
    pub outbound: Outbound,
    pub limits: Limits,
    /// Of published ports.
    pub bind_addresses: BindAddresses,
    pub judge: Judge,
    pub on_loopback: Option<OnLoopback>,
}

impl Settings {
    /// Those of one of several queues.
    pub fn new(config: &Config, judge: &Judge, queues: usize) -> Settings {
        let network = &config.network;
        Settings {
            guest: network.addresses.iter().map(|(a, _)| *a).collect(),
            routers: setup::routers(network).iter().map(|r| r.addr).collect(),
            stand_in_v6: setup::stand_in_v6(network).map(IpAddr::V6),
            carries: config.carries,
            mapping: config.mapping.clone(),
            outbound: config.outbound.clone(),
            limits: config.limits.part_of(queues),
            bind_addresses: config.publish.addresses,
            judge: judge.clone(),
            on_loopback: None,
        }
    }

    /// The guest's first address of an IP version, one that is not link-local if there is one.
    pub fn guest_address(&self, is_v4: bool) -> Option<IpAddr> {
        let mut of_version = self.guest.iter().filter(|a| a.is_ipv4() == is_v4);
        let first = of_version.clone().next();
        of_version.find(|a| !is_link_local(**a)).or(first).copied()
    }

    /// As whom a client of a published port appears to the guest: as itself, unless the guest could not answer
    /// it there.
    pub fn seen_as(&self, client: IpAddr) -> Option<IpAddr> {
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
        let stand_in = self.stand_in_v6.filter(|_| !is_v4 && is_link_local(seen));
        Some(stand_in.unwrap_or(seen))
    }
}

/// What the layers of the relay share.
pub struct Context<'a> {
    pub now: Instant,
    pub stack: &'a mut Shard,
    pub poll: &'a Poll,
    pub owners: &'a mut Owners,
    pub settings: &'a mut Settings,
    pub totals: &'a mut Totals,
    pub siblings: &'a mut Siblings,
}

impl Context<'_> {
    /// Something was not carried.
    pub fn refuse(&mut self, why: Refusal) {
        self.totals.refusals.count(why);
    }

    /// The queue that owns the flow between the guest and an outside peer, if it is another.
    pub fn owner_elsewhere(&mut self, guest: SocketAddr, seen: SocketAddr) -> Option<u16> {
        if self.siblings.is_alone() {
            return None;
        }
        let own = self.stack.siblings().id();
        let owner = self.stack.owner_of_connection(guest, seen).ok()?;
        (owner != own).then_some(owner)
    }
}

/// 169.254.0.0/16 (RFC 3927) and fe80::/10 (RFC 4291 section 2.5.6).
pub fn is_link_local(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => v4.is_link_local(),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    }
}

/// An address as it is written in its own IP version: without a zone, which has its meaning on one side alone,
/// and not as an IPv6 address that stands for an IPv4 one.
pub fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}
