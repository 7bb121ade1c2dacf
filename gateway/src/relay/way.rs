//! The way of a flow: whether the policy allows it, by which rule and within which bounds, and to which addresses.

use std::net::SocketAddr;
use std::sync::Arc;

use fulmar_stack::base::Instant;
use smallvec::{SmallVec, smallvec};

use super::host_socket::Failure;
use super::shared_names::Meaning;
use super::shared_policy::SharedPolicy;
use super::{Context, Endpoints, Settings};
use crate::allowance::{Allowance, Permit};
use crate::first::{EncryptedHello, Expected};
use crate::names::pins::Known;
use crate::policy::{NewClient, NewFlow, Protocol};
use crate::stat::{Direction, Refusal};
use crate::upstream::Target;

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

impl Context<'_> {
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
}
