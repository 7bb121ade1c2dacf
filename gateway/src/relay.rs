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

use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time;

use fulmar_stack::base::{Instant, SlotId};
use fulmar_stack::ip::InvokingPacket;
use smallvec::{SmallVec, smallvec};

use crate::allowance::{Allowance, Permit};
use crate::config::{BindAddresses, Carries, Config, Limits, OnLoopback, Outbound, UdpFilter};
use crate::first::{EncryptedHello, Expected};
use crate::mapping::{Mapping, is_link_local};
use crate::names::pins::Known;
use crate::policy::{NewClient, NewFlow, Protocol};
use crate::setup;
use crate::stat::{Direction, Refusal, Totals};
use crate::upstream::{Target, Upstream};
use datagrams::HostError;
use host_socket::Failure;
use poll::{Poll, Tokens};
use shared_names::{Meaning, SharedNames};
use shared_policy::SharedPolicy;
use siblings::Siblings;

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

/// What allows a flow.
#[derive(Clone, Default, Debug)]
pub(crate) struct Grant {
    /// The rule.
    pub rule: Option<Arc<str>>,
    /// The bounds that it shares with others.
    pub allowance: Option<Arc<Allowance>>,
    /// Its place among them, once it has entered.
    pub permit: Option<Permit>,
}

impl Grant {
    /// Takes the place of a flow within its bounds: one that the flow has by one of `others` is the same.
    ///
    /// # Errors
    /// There is no place.
    pub(crate) fn enter<'a>(
        &mut self,
        protocol: Protocol,
        others: impl IntoIterator<Item = &'a Grant>,
    ) -> Result<(), NotCarried> {
        let Some(allowance) = &self.allowance else { return Ok(()) };
        let mut own = others.into_iter().filter_map(|other| other.permit.as_ref());
        let same = own.find(|permit| permit.is_of(allowance)).cloned();
        self.permit = same.or_else(|| allowance.begin());
        let full = || NotCarried::from((denied(protocol), Refusal::Allowance)).by(self);
        self.permit.is_some().then_some(()).ok_or_else(full)
    }

    /// Whether the bounds let a payload pass now, which is counted then.
    pub(crate) fn may_pass(&self, now: Instant, bytes: usize) -> bool {
        self.permit.as_ref().is_none_or(|permit| permit.may_pass(now, bytes))
    }
}

/// Why a flow of the guest is not carried.
#[derive(Debug)]
pub(crate) struct NotCarried {
    /// What the guest gets.
    pub failure: Failure,
    pub why: Refusal,
    /// The rule of the last ruling.
    pub rule: Option<Arc<str>>,
    /// The destination as the host knows it, of which the rule is.
    pub leads_to: Option<SocketAddr>,
}

impl From<(Failure, Refusal)> for NotCarried {
    fn from((failure, why): (Failure, Refusal)) -> NotCarried {
        NotCarried { failure, why, rule: None, leads_to: None }
    }
}

impl NotCarried {
    /// A flow that was allowed.
    pub(crate) fn by(self, grant: &Grant) -> NotCarried {
        NotCarried { rule: grant.rule.clone(), ..self }
    }

    /// One that a rule denies.
    pub(crate) fn denied(
        protocol: Protocol,
        leads_to: SocketAddr,
        rule: Option<Arc<str>>,
    ) -> NotCarried {
        let (failure, why, leads_to) = (denied(protocol), Refusal::Policy, Some(leads_to));
        NotCarried { failure, why, rule, leads_to }
    }
}

/// What the policy says about a flow.
pub(crate) enum Decided {
    /// It is allowed. Where that is for names of its real address, these.
    Allow(Grant, Option<Names>),
    Wait,
    /// By this rule.
    Deny(Option<Arc<str>>),
}

impl Decided {
    /// The grant of a flow that cannot wait.
    pub(crate) fn grant(self) -> Option<(Grant, Option<Names>)> {
        if let Decided::Allow(grant, names) = self { Some((grant, names)) } else { None }
    }
}

/// An address of the host's network to which a flow may lead.
#[derive(Clone)]
pub(crate) struct Candidate {
    pub to: SocketAddr,
    pub grant: Grant,
}

/// Addresses in the order of trial.
pub(crate) type Candidates = SmallVec<[Candidate; 2]>;

/// The names for which a flow was allowed.
pub(crate) struct Names {
    pub allowed: SmallVec<[Arc<str>; 1]>,
    /// No other name of the address is known.
    pub are_all: bool,
}

impl Names {
    /// What the first bytes may ask for.
    pub(crate) fn expected(&self, port: u16, encrypted_hello: EncryptedHello) -> Expected {
        Expected::new(self.allowed.iter().map(|name| &**name), port)
            .with_encrypted_hello(encrypted_hello)
            .shared(!self.are_all)
    }
}

/// Where a flow of the guest leads.
pub(crate) enum Way {
    /// To the first of these addresses that answers. Where they were allowed as addresses of names, the first bytes must
    /// ask for one of these.
    To(Candidates, Option<Names>),
    /// Through the upstream proxy, to the target that it is asked for.
    Through(Target, Grant, Option<Names>),
    /// To a name that has to be looked up first.
    LookUp(Arc<str>),
    /// Not known yet: the policy decides later.
    Undecided,
    /// Nowhere.
    Refused(NotCarried),
}

/// How the policy is asked about a flow.
type Decide = fn(&SharedPolicy, &NewFlow<'_>) -> Decided;

/// What the policy decides about a flow of the guest to a name that the upstream proxy resolves.
fn through(
    decide: Decide,
    settings: &Settings,
    protocol: Protocol,
    (from, to): (SocketAddr, SocketAddr),
    name: &str,
) -> Decided {
    let wanted = NewFlow { name: Some(name), ..NewFlow::new(protocol, from, to) };
    decide(&settings.policy, &wanted)
}

/// The failure that the guest gets of a flow that the policy denies.
fn denied(protocol: Protocol) -> Failure {
    if protocol == Protocol::Tcp { Failure::Refused } else { Failure::Prohibited }
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

    /// Where a flow of the guest leads, and whether the policy allows it.
    pub(crate) fn way(&self, protocol: Protocol, from: SocketAddr, to: SocketAddr) -> Way {
        let failure = if protocol == Protocol::Tcp { Failure::Refused } else { Failure::Silence };
        match self.settings.names.meaning(to.ip()) {
            Meaning::Name(name) => return self.way_to_name(protocol, from, to, name),
            Meaning::Nothing => return Way::Refused((failure, Refusal::NoName).into()),
            Meaning::Address => {}
        }
        // Another server would answer with real addresses, to whatever is asked.
        if self.settings.names.are_given() && self.settings.mapping.is_dns(to) {
            return Way::Refused((denied(protocol), Refusal::Policy).into());
        }
        let Some(leads_to) = self.settings.mapping.target(to) else {
            return Way::Refused((failure, Refusal::Forbidden).into());
        };
        let wanted = self.new_flow(protocol, (from, to), leads_to, None);
        let (grant, names) = match self.settings.policy.decide(&wanted) {
            Decided::Allow(grant, names) => (grant, names),
            Decided::Wait => return Way::Undecided,
            Decided::Deny(rule) => {
                return Way::Refused(NotCarried::denied(protocol, leads_to, rule));
            }
        };
        if self.settings.upstream.is_none() || leads_to.ip() != to.ip() {
            return Way::To(smallvec![Candidate { to: leads_to, grant }], names);
        }
        match protocol {
            Protocol::Tcp => Way::Through(Target::Address(leads_to), grant, names),
            _ => Way::Refused((denied(protocol), Refusal::Upstream).into()),
        }
    }

    fn way_to_name(
        &self,
        protocol: Protocol,
        from: SocketAddr,
        to: SocketAddr,
        name: Arc<str>,
    ) -> Way {
        if self.settings.upstream.is_some() {
            return self.way_through(protocol, from, to, name);
        }
        let Some((known, _)) = self.settings.names.known(&name, self.now) else {
            let wanted = NewFlow { name: Some(&name), ..NewFlow::new(protocol, from, to) };
            return match self.settings.policy.decide_look_up(&wanted) {
                Decided::Allow(..) => Way::LookUp(name),
                Decided::Wait => Way::Undecided,
                Decided::Deny(rule) => Way::Refused(NotCarried::denied(protocol, to, rule)),
            };
        };
        let Known::Addresses(addresses) = known else {
            return Way::Refused((Failure::NoHost, Refusal::NameFailed).into());
        };
        let mut candidates = Candidates::new();
        let mut waits = false;
        let mut refused = NotCarried::denied(protocol, to, None);
        for address in addresses {
            let to_address = SocketAddr::new(address, to.port());
            match self.by_name(SharedPolicy::decide, protocol, (from, to), to_address, &name) {
                Decided::Allow(grant, _) => candidates.push(Candidate { to: to_address, grant }),
                Decided::Wait => waits = true,
                Decided::Deny(rule) => refused = NotCarried::denied(protocol, to_address, rule),
            }
        }
        match candidates.is_empty() {
            true if waits => Way::Undecided,
            true => Way::Refused(refused),
            false => Way::To(candidates, Some(Names { allowed: smallvec![name], are_all: true })),
        }
    }

    /// The way to a name that the upstream proxy resolves.
    fn way_through(
        &self,
        protocol: Protocol,
        from: SocketAddr,
        to: SocketAddr,
        name: Arc<str>,
    ) -> Way {
        let decide = SharedPolicy::decide;
        let grant = match through(decide, self.settings, protocol, (from, to), &name) {
            Decided::Allow(grant, _) => grant,
            Decided::Wait => return Way::Undecided,
            Decided::Deny(rule) => return Way::Refused(NotCarried::denied(protocol, to, rule)),
        };
        if protocol != Protocol::Tcp {
            return Way::Refused((denied(protocol), Refusal::Upstream).into());
        }
        let target = Target::Name(Arc::clone(&name), to.port());
        Way::Through(target, grant, Some(Names { allowed: smallvec![name], are_all: true }))
    }

    /// What the policy decides about a flow of the guest to an address of a name.
    fn by_name(
        &self,
        decide: Decide,
        protocol: Protocol,
        (from, to): (SocketAddr, SocketAddr),
        leads_to: SocketAddr,
        name: &str,
    ) -> Decided {
        // What the resolver says must not lead where a mapping leads.
        if self.settings.mapping.target(leads_to) != Some(leads_to) {
            return Decided::Deny(None);
        }
        let wanted = self.new_flow(protocol, (from, to), leads_to, Some(name));
        decide(&self.settings.policy, &wanted)
    }

    /// What the policy decides about a flow to a real address that cannot wait. `leads_to`: the destination as the host
    /// knows it.
    pub(crate) fn decide_now(
        &self,
        protocol: Protocol,
        from: SocketAddr,
        to: SocketAddr,
        leads_to: SocketAddr,
    ) -> Decided {
        let wanted = self.new_flow(protocol, (from, to), leads_to, None);
        self.settings.policy.decide_now(&wanted)
    }

    /// The grant of new rules to a flow that has begun, within their bounds. By real addresses it is not known which name the
    /// flow was allowed for: then all names of the address must be allowed.
    ///
    /// # Errors
    /// It is denied, or there is no place.
    pub(crate) fn review(
        &self,
        protocol: Protocol,
        direction: Direction,
        ends: &Endpoints,
        before: &Grant,
    ) -> Result<Grant, NotCarried> {
        let changed = || NotCarried::from((denied(protocol), Refusal::PolicyChanged));
        let mut grant = self.granted(protocol, direction, ends).ok_or_else(changed)?;
        grant.enter(protocol, [before])?;
        Ok(grant)
    }

    fn granted(&self, protocol: Protocol, direction: Direction, ends: &Endpoints) -> Option<Grant> {
        let Endpoints { guest, peer, host } = *ends;
        if direction == Direction::In {
            let client = NewClient { protocol, from: host };
            return self.settings.policy.admits(&client).then(Grant::default);
        }
        let has_proxy = self.settings.upstream.is_some();
        let now: Decide = SharedPolicy::decide_now;
        let decided = match self.settings.names.meaning(peer.ip()) {
            Meaning::Name(name) if has_proxy => {
                through(now, self.settings, protocol, (guest, peer), &name)
            }
            Meaning::Name(name) => self.by_name(now, protocol, (guest, peer), host, &name),
            Meaning::Nothing => return None,
            Meaning::Address => {
                let target = if has_proxy { self.settings.mapping.target(peer)? } else { host };
                self.decide_now(protocol, guest, peer, target)
            }
        };
        let (grant, names) = decided.grant()?;
        names.is_none_or(|names| names.are_all).then_some(grant)
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
