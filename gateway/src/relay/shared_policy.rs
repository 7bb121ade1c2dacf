//! The policy of a gateway and the names of addresses, which it decides by: one of both for the threads of all queues.

use std::net::IpAddr;
use std::sync::{Arc, Mutex};

use super::Names as FlowNames;
use super::names::Names;
use crate::allowance::Allowance;
use crate::first;
use crate::policy::{Decision, NewClient, NewFlow, Policy};
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
        }
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

    /// Whether a flow may leave.
    pub(crate) fn decide(&self, flow: &NewFlow<'_>) -> Decision {
        let decided = self.ask(|Known { policy, resolved, claimed }| {
            let to = flow.to.ip();
            let (names, claimed_names) = (resolved.of(to), claimed.of(to));
            policy.decide(&NewFlow { names, claimed_names, ..*flow })
        });
        decided.unwrap_or_else(|| self.default_decision())
    }

    /// The same of a flow that cannot wait.
    pub(crate) fn decide_now(&self, flow: &NewFlow<'_>) -> Decision {
        let decided = self.ask(|Known { policy, resolved, claimed }| {
            let to = flow.to.ip();
            let (names, claimed_names) = (resolved.of(to), claimed.of(to));
            policy.decide_now(&NewFlow { names, claimed_names, ..*flow })
        });
        decided.unwrap_or_else(|| self.default_decision())
    }

    /// Whether the name of a flow may be looked up.
    pub(crate) fn decide_look_up(&self, flow: &NewFlow<'_>) -> Decision {
        let decided = self.ask(|known| known.policy.decide_look_up(flow));
        decided.unwrap_or_else(|| self.default_decision())
    }

    /// The names for which an allowed flow to a real address is allowed, if it is not by the address.
    pub(crate) fn allowed_names(&self, flow: &NewFlow<'_>) -> Option<FlowNames> {
        if !self.reads_names {
            return None;
        }
        self.ask(|Known { policy, resolved, claimed }| {
            let to = flow.to.ip();
            let (names, claimed_names) = (resolved.of(to), claimed.of(to));
            let allowed = policy.allowed_names(&NewFlow { names, claimed_names, ..*flow })?;
            let are_all = allowed.len() == names.len();
            Some(FlowNames { allowed: allowed.into_iter().map(Arc::from).collect(), are_all })
        })
        .flatten()
    }

    /// The bounds that an allowed flow shares with others.
    pub(crate) fn allowance(&self, flow: &NewFlow<'_>) -> Option<Arc<Allowance>> {
        self.ask(|Known { policy, resolved, claimed }| {
            let to = flow.to.ip();
            let (names, claimed_names) = (resolved.of(to), claimed.of(to));
            policy.allowance(&NewFlow { names, claimed_names, ..*flow })
        })
        .flatten()
    }

    /// A flow of the guest is not carried.
    pub(crate) fn refused(&self, flow: &NewFlow<'_>, why: Refusal) {
        self.ask(|Known { policy, resolved, claimed }| {
            let to = flow.to.ip();
            let (names, claimed_names) = (resolved.of(to), claimed.of(to));
            policy.refused(&NewFlow { names, claimed_names, ..*flow }, why);
        });
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
        fn decide(&mut self, flow: &NewFlow<'_>) -> Decision {
            assert!(flow.to.port() != 9, "of the test");
            Decision::Allow
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

    #[test]
    fn without_a_policy_all_is_allowed_and_by_one_that_panicked_nothing() {
        let none = SharedPolicy::new(None);
        let question = Some(("example.org", 1));
        assert_eq!([none.decide(&flow(9)), none.decide_name(question)], [Decision::Allow; 2]);
        let policy = SharedPolicy::new(Some(Box::new(Halfway)));
        let other = policy.clone();
        assert_eq!([policy.decide(&flow(1)), other.decide_name(None)], [Decision::Allow; 2]);
        assert!(catch_unwind(AssertUnwindSafe(|| policy.decide(&flow(9)))).is_err());
        assert_eq!([other.decide(&flow(1)), other.decide_name(question)], [Decision::Deny; 2]);
        assert_eq!(
            [other.decide_now(&flow(1)), other.decide_look_up(&flow(1))],
            [Decision::Deny; 2]
        );
    }
}
