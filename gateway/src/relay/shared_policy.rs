//! The policy of a gateway and the names of addresses, which it decides by: one of both for the threads of all queues.

use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use super::names::Names;
use super::way::{Decided, Grant, Names as FlowNames};
use crate::first;
use crate::policy::{Decision, NewClient, NewFlow, Policy, Ruling};
use crate::rules::Rules;
use crate::stat::{FlowStat, Refusal};

struct Known {
    policy: Box<dyn Policy>,
    /// By the guest's resolvers.
    resolved: Names,
    /// By other DNS servers.
    claimed: Names,
}

/// The policy behind a lock. Without a policy everything is allowed; after a panic of the policy nothing is, since its
/// state is unknown.
#[derive(Clone, Default)]
pub(crate) struct SharedPolicy {
    known: Option<Arc<Mutex<Known>>>,
    reads_names: bool,
    flows: Arc<AtomicU64>,
}

impl SharedPolicy {
    /// `None`: everything is allowed.
    pub(crate) fn new(policy: Option<Box<dyn Policy>>) -> SharedPolicy {
        let reads_names = policy.as_ref().is_some_and(|policy| policy.reads_names());
        let known =
            |policy| Known { policy, resolved: Names::default(), claimed: Names::default() };
        SharedPolicy {
            known: policy.map(|policy| Arc::new(Mutex::new(known(policy)))),
            reads_names,
            flows: Arc::default(),
        }
    }

    /// The number of another flow.
    pub(crate) fn next_flow(&self) -> u64 {
        self.flows.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Gives the policy other rules; the names of addresses stay.
    pub(crate) fn set_rules(&self, rules: Rules) {
        self.ask(|known| known.policy.set_rules(rules));
    }

    /// Whether there is a policy.
    fn has_policy(&self) -> bool {
        self.known.is_some()
    }

    /// Whether there is one that decides by names, or wants to know them.
    pub(crate) fn reads_names(&self) -> bool {
        self.reads_names
    }

    /// `None`: there is no policy, or none any more.
    fn ask<T>(&self, question: impl FnOnce(&mut Known) -> T) -> Option<T> {
        Some(question(&mut *self.known.as_ref()?.lock().ok()?))
    }

    /// The decision without a policy, or after its panic.
    fn default_decision(&self) -> Decision {
        if self.has_policy() { Decision::Deny } else { Decision::Allow }
    }

    /// What the policy says about a flow that begins.
    pub(crate) fn decide(&self, flow: &NewFlow<'_>) -> Decided {
        self.decide_by(flow, |policy, flow| policy.decide(flow))
    }

    /// The same of a flow that cannot wait: where the policy would wait, it is denied.
    pub(crate) fn decide_now(&self, flow: &NewFlow<'_>) -> Decided {
        match self.decide_by(flow, |policy, flow| policy.decide_now(flow)) {
            Decided::Wait => Decided::Deny(None),
            decided => decided,
        }
    }

    /// Whether the name of a flow may be looked up.
    pub(crate) fn decide_look_up(&self, flow: &NewFlow<'_>) -> Decided {
        self.decide_by(flow, |policy, flow| policy.decide_look_up(flow))
    }

    fn decide_by(
        &self,
        flow: &NewFlow<'_>,
        question: fn(&mut dyn Policy, &NewFlow<'_>) -> Ruling,
    ) -> Decided {
        let decided = self.with_names(flow, |policy, flow| {
            let Ruling { decision, rule, allowance, names } = question(policy, flow);
            let are_all = |allowed: &[String]| allowed.len() == flow.names.len();
            match decision {
                Decision::Deny => Decided::Deny(rule),
                Decision::Wait => Decided::Wait,
                Decision::Allow => {
                    let names = names.filter(|_| self.reads_names).map(|allowed| FlowNames {
                        are_all: are_all(&allowed),
                        allowed: allowed.into_iter().map(Arc::from).collect(),
                    });
                    Decided::Allow(Grant { rule, allowance, permit: None }, names)
                }
            }
        });
        decided.unwrap_or_else(|| match self.default_decision() {
            Decision::Allow => Decided::Allow(Grant::default(), None),
            _ => Decided::Deny(None),
        })
    }

    /// Asks about a flow, with the names of its address.
    fn with_names<T>(
        &self,
        flow: &NewFlow<'_>,
        question: impl FnOnce(&mut dyn Policy, &NewFlow<'_>) -> T,
    ) -> Option<T> {
        self.ask(|Known { policy, resolved, claimed }| {
            let to = flow.to.ip();
            let (names, claimed_names) = (resolved.of(to), claimed.of(to));
            question(&mut **policy, &NewFlow { names, claimed_names, ..*flow })
        })
    }

    /// A flow of the guest is not carried.
    pub(crate) fn refused(&self, flow: &NewFlow<'_>, why: Refusal, rule: Option<Arc<str>>) {
        self.with_names(flow, |policy, flow| policy.refused(flow, why, rule));
    }

    /// Whether a client of a published port is admitted.
    pub(crate) fn admits(&self, client: &NewClient) -> bool {
        let decided = self.ask(|known| known.policy.decide_client(client));
        decided.map_or(!self.has_policy(), |d| d == Decision::Allow)
    }

    /// Whether the guest may ask for records of a type of a name; `None`: what it asks for cannot be read.
    pub(crate) fn decide_name(&self, asked: Option<(&str, u16)>) -> Decision {
        if !self.reads_names {
            return Decision::Allow;
        }
        let decided = self.ask(|known| match asked {
            Some((name, record_type)) => known.policy.decide_name(name, record_type),
            None => known.policy.decide_hidden_name(),
        });
        decided.unwrap_or_else(|| self.default_decision())
    }

    /// One of the guest's resolvers has answered a question for a name with these addresses.
    pub(crate) fn learn(&self, name: &str, addresses: &[IpAddr]) {
        self.ask(|Known { policy, resolved, .. }| {
            for address in addresses {
                resolved.add(*address, name, |known| policy.keeps_name(name, known));
            }
        });
    }

    /// Another DNS server has.
    pub(crate) fn learn_claim(&self, name: &str, addresses: &[IpAddr]) {
        self.ask(|Known { policy, claimed, .. }| {
            for address in addresses {
                claimed.add(*address, name, |known| policy.keeps_name(name, known));
            }
        });
    }

    /// A flow's first bytes are refused.
    pub(crate) fn contradicted(&self, flow: &FlowStat, why: &first::Refusal) {
        self.ask(|known| known.policy.contradicted(flow, why));
    }

    /// A flow has begun.
    pub(crate) fn began(&self, flow: impl FnOnce() -> FlowStat) {
        self.ask(|known| known.policy.began(&flow()));
    }

    /// A flow has ended.
    pub(crate) fn ended(&self, flow: impl FnOnce() -> FlowStat) {
        self.ask(|known| known.policy.ended(&flow()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::Protocol;
    use std::net::SocketAddr;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    struct Halfway;

    impl Policy for Halfway {
        fn decide(&mut self, flow: &NewFlow<'_>) -> Ruling {
            assert!(flow.to.port() != 9, "of the test");
            Decision::Allow.into()
        }
    }

    fn flow(port: u16) -> NewFlow<'static> {
        let at = SocketAddr::from(([10, 0, 0, 1], port));
        NewFlow {
            protocol: Protocol::Tcp,
            from: at,
            to: at,
            leads_to: at,
            name: None,
            names: &[],
            claimed_names: &[],
            is_host: false,
            host_network: None,
        }
    }

    struct Slow;

    impl Policy for Slow {
        fn decide(&mut self, _: &NewFlow<'_>) -> Ruling {
            Decision::Wait.into()
        }
    }

    #[test]
    fn a_flow_that_cannot_wait_is_denied_where_the_policy_waits() {
        let policy = SharedPolicy::new(Some(Box::new(Slow)));
        assert!(matches!(policy.decide(&flow(1)), Decided::Wait));
        assert!(matches!(policy.decide_now(&flow(1)), Decided::Deny(None)));
    }

    #[test]
    fn without_a_policy_all_is_allowed_and_by_one_that_panicked_nothing() {
        let none = SharedPolicy::new(None);
        let question = Some(("example.org", 1));
        let allows = |policy: &SharedPolicy, port| policy.decide(&flow(port)).grant().is_some();
        assert!(allows(&none, 9) && none.decide_name(question) == Decision::Allow);
        let policy = SharedPolicy::new(Some(Box::new(Halfway)));
        let other = policy.clone();
        assert!(allows(&policy, 1) && other.decide_name(None) == Decision::Allow);
        assert!(catch_unwind(AssertUnwindSafe(|| policy.decide(&flow(9)))).is_err());
        assert!(!allows(&other, 1) && other.decide_name(question) == Decision::Deny);
        for decided in [other.decide_now(&flow(1)), other.decide_look_up(&flow(1))] {
            assert!(matches!(decided, Decided::Deny(None)));
        }
    }
}
