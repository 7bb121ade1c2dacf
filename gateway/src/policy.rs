//! The policy: which flows of a guest may leave, and for which names it may ask.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use crate::allowance::Allowance;
use crate::first;
use crate::rules::{Denial, Rules};
use crate::stat::{FlowStat, Refusal};

/// A transport that the gateway carries.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Protocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
    /// Echo requests of ICMP and ICMPv6.
    Icmp,
}

impl Protocol {
    /// Its name in lower case.
    pub const fn name(self) -> &'static str {
        match self {
            Protocol::Tcp => "tcp",
            Protocol::Udp => "udp",
            Protocol::Icmp => "icmp",
        }
    }
}

/// A flow that a guest begins.
#[derive(Clone, Copy, Debug)]
pub struct NewFlow<'a> {
    /// Its transport.
    pub protocol: Protocol,
    /// The guest's end.
    pub from: SocketAddr,
    /// The destination as the guest wrote it. The port of an echo request is 0.
    pub to: SocketAddr,
    /// The destination as the host knows it, after [`Mapping`](crate::mapping::Mapping). Where an upstream proxy resolves
    /// the name, it is `to`, since the real address is not known.
    pub leads_to: SocketAddr,
    /// The name that the destination stands for, where names have addresses of their own
    /// ([`Config::names`](crate::Config)): `leads_to` is an address of that name, and the others have none of it.
    pub name: Option<&'a str>,
    /// The names for which the guest's resolvers had this address, the latest first. None where names have addresses of
    /// their own.
    pub names: &'a [String],
    /// The names for which other DNS servers had it, the latest first. The guest may have chosen the server, or run it:
    /// a reason to deny, none to allow.
    pub claimed_names: &'a [String],
    /// The destination is an address of the host's own ([`Mapping::host_addresses`](crate::mapping::Mapping)), and no
    /// mapping leads there.
    pub is_host: bool,
    /// The network of a link of the host ([`Mapping::host_networks`](crate::mapping::Mapping)) in which the destination is,
    /// if no mapping leads there.
    pub host_network: Option<(IpAddr, u8)>,
}

impl NewFlow<'_> {
    /// A flow to an address without a name, which is not the host's and which no mapping leads elsewhere.
    pub fn new(protocol: Protocol, from: SocketAddr, to: SocketAddr) -> Self {
        let (names, claimed_names) = (&[], &[]);
        NewFlow {
            protocol,
            from,
            to,
            leads_to: to,
            name: None,
            names,
            claimed_names,
            is_host: false,
            host_network: None,
        }
    }
}

/// A client of a published port.
#[derive(Clone, Copy, Debug)]
pub struct NewClient {
    /// Its transport.
    pub protocol: Protocol,
    /// Its address as the host knows it. That of a datagram may be forged.
    pub from: SocketAddr,
}

/// Whether a flow may leave.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Decision {
    /// It may.
    Allow,
    /// It may not: a connection is reset, a datagram is answered by ICMP's "administratively prohibited".
    Deny,
    /// It is not decided yet. A connection waits without an answer to its SYN, and the policy is asked again every second,
    /// and at once after [`Handle::decide_again`](crate::Handle::decide_again). After 70 seconds it is reset. A datagram is
    /// dropped: programs send again.
    Wait,
}

/// What a policy says about a flow. A [`Decision`] is one without a rule and without bounds.
#[derive(Clone, Debug)]
#[allow(clippy::exhaustive_structs, reason = "policies make it")]
pub struct Ruling {
    /// Whether the flow may leave.
    pub decision: Decision,
    /// What has decided, for reports.
    pub rule: Option<Arc<str>>,
    /// The bounds that an allowed flow shares with others; `None`: it has none.
    pub allowance: Option<Arc<Allowance>>,
    /// The names of its address for which the flow is allowed, if it is not for its address: the guest's first bytes
    /// must then ask for one of them ([`first`]). Where names have addresses of their own this does not count.
    pub names: Option<Vec<String>>,
}

impl From<Decision> for Ruling {
    fn from(decision: Decision) -> Ruling {
        Ruling { decision, rule: None, allowance: None, names: None }
    }
}

/// Decides about the flows of a guest, before anything of them leaves the host.
pub trait Policy: Send {
    /// A flow begins. For a name with several addresses each of them is asked about, and the guest gets one of those that
    /// are allowed.
    fn decide(&mut self, flow: &NewFlow<'_>) -> Ruling;

    /// As [`Policy::decide`], where nothing can wait: a flow that has begun, under new rules, or one that a host outside
    /// begins. [`Decision::Wait`] is a denial.
    fn decide_now(&mut self, flow: &NewFlow<'_>) -> Ruling {
        self.decide(flow)
    }

    /// Whether the name of a flow may be looked up for it, where names have addresses of their own. `leads_to` is `to`:
    /// the real address is not known. The host's resolvers are not asked for the name of a flow that waits here.
    fn decide_look_up(&mut self, flow: &NewFlow<'_>) -> Ruling {
        let _ = flow;
        Decision::Allow.into()
    }

    /// Whether it decides by names, or wants to know them: without that the questions and answers of DNS are not read.
    /// Asked once.
    fn reads_names(&self) -> bool {
        true
    }

    /// Other rules than those that it was made with ([`Handle::set_rules`](crate::Handle::set_rules)). A policy that
    /// does not decide by rules has nothing to do.
    fn set_rules(&mut self, rules: Rules) {
        let _ = rules;
    }

    /// A client of a published port appears. One that is denied is not admitted: a connection is reset, a datagram
    /// dropped.
    fn decide_client(&mut self, client: &NewClient) -> Decision {
        let _ = client;
        Decision::Allow
    }

    /// A DNS question for records of a type of a name, in lower case, without the dot at its end. What is denied is
    /// answered by REFUSED. Where names have addresses of their own, [`Decision::Wait`] lets the guest have
    /// these addresses, and the host's resolvers are not asked until a flow to it is allowed; elsewhere it is a denial.
    fn decide_name(&mut self, name: &str, record_type: u16) -> Decision {
        let _ = (name, record_type);
        Decision::Allow
    }

    /// A message to a DNS server that is not one plain question: a response, an update, several questions, records that
    /// would be an answer, another protocol. What is denied is answered by FORMERR, NOTIMP or REFUSED.
    fn decide_hidden_name(&mut self) -> Decision {
        Decision::Allow
    }

    /// A flow of the guest is not carried, by the decisions about its addresses or for another reason. `rule`: that of the
    /// last ruling on it. A datagram that is sent again is refused again.
    fn refused(&mut self, flow: &NewFlow<'_>, why: Refusal, rule: Option<Arc<str>>) {
        let _ = (flow, why, rule);
    }

    /// Whether a name of an address has to be kept beside `known`, however many other names the address has later: it
    /// may be a reason to deny that they are not.
    fn keeps_name(&self, name: &str, known: &[String]) -> bool {
        let _ = (name, known);
        false
    }

    /// The guest's first bytes on a flow to a name ask for another name, or cannot be read: it ends.
    fn contradicted(&mut self, flow: &FlowStat, why: &first::Refusal) {
        let _ = (flow, why);
    }

    /// A flow began that was allowed: a connection is open on both sides, a datagram is about to leave. One that is not
    /// carried after [`Policy::decide`] has allowed it is [`refused`](Policy::refused).
    fn began(&mut self, flow: &FlowStat) {
        let _ = flow;
    }

    /// A flow ended.
    fn ended(&mut self, flow: &FlowStat) {
        let _ = flow;
    }
}

/// The policy of [`Rules`], without a report of what it refuses.
#[derive(Clone, Debug)]
pub struct ByRules {
    rules: Rules,
    dns: Vec<IpAddr>,
}

impl ByRules {
    /// `dns`: the addresses at which the gateway forwards DNS ([`Mapping::dns`](crate::mapping::Mapping)). They are
    /// reached whatever the rules say of addresses, and the names that the guest asks for are decided.
    pub fn new(rules: Rules, dns: Vec<IpAddr>) -> ByRules {
        ByRules { rules, dns }
    }
}

fn unless(denial: Option<&Denial>) -> Decision {
    if denial.is_some() { Decision::Deny } else { Decision::Allow }
}

impl Policy for ByRules {
    fn decide(&mut self, flow: &NewFlow<'_>) -> Ruling {
        self.rules.ruling(flow, self.rules.verdict_of_flow(flow, &self.dns))
    }

    fn reads_names(&self) -> bool {
        !self.rules.is_empty()
    }

    fn set_rules(&mut self, rules: Rules) {
        self.rules = rules;
    }

    fn decide_client(&mut self, client: &NewClient) -> Decision {
        unless(self.rules.client_denial(client.protocol, client.from))
    }

    fn decide_name(&mut self, name: &str, record_type: u16) -> Decision {
        unless(self.rules.name_denial(name, record_type))
    }

    fn decide_hidden_name(&mut self) -> Decision {
        unless(self.rules.hidden_name_denial())
    }

    fn keeps_name(&self, name: &str, known: &[String]) -> bool {
        self.rules.keeps_name(name, known)
    }
}
