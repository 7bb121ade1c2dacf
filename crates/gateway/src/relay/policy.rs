//! The policy of a gateway and the names of addresses, which it decides by: one of both for the threads of all queues.

use std::sync::{Arc, Mutex};

use super::names::Names;
use crate::policy::{Decision, NewFlow, Policy};
use crate::stat::FlowStat;

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
pub struct SharedPolicy(Option<Arc<Mutex<Known>>>);

impl SharedPolicy {
    /// `None`: everything is allowed.
    pub fn new(policy: Option<Box<dyn Policy>>) -> SharedPolicy {
        let known =
            |policy| Known { policy, resolved: Names::default(), claimed: Names::default() };
        SharedPolicy(policy.map(|policy| Arc::new(Mutex::new(known(policy)))))
    }

    /// Whether there is a policy.
    pub fn has_policy(&self) -> bool {
        self.0.is_some()
    }

    /// `None`: there is no policy, or none any more.
    fn ask<T>(&self, question: impl FnOnce(&mut Known) -> T) -> Option<T> {
        Some(question(&mut *self.0.as_ref()?.lock().ok()?))
    }

    /// Whether a flow may leave.
    pub fn allows(&self, flow: &NewFlow<'_>) -> bool {
        let decided = self.ask(|Known { policy, resolved, claimed }| {
            let to = flow.to.ip();
            let (names, claimed_names) = (resolved.of(to), claimed.of(to));
            policy.decide(&NewFlow { names, claimed_names, ..*flow })
        });
        decided.map_or(!self.has_policy(), |d| d == Decision::Allow)
    }

    /// Whether the guest may ask for a name; `None`: one that cannot be read.
    pub fn allows_name(&self, name: Option<&str>) -> bool {
        let decided = self.ask(|known| match name {
            Some(name) => known.policy.decide_name(name),
            None => known.policy.decide_hidden_name(),
        });
        decided.map_or(!self.has_policy(), |d| d == Decision::Allow)
    }

    /// Reads an answer of one of the guest's resolvers.
    pub fn learn(&self, message: &[u8]) {
        self.ask(|known| known.resolved.learn(message));
    }

    /// Reads an answer of another DNS server.
    pub fn learn_claim(&self, message: &[u8]) {
        self.ask(|known| known.claimed.learn(message));
    }

    /// A flow has ended.
    pub fn ended(&self, flow: impl FnOnce() -> FlowStat) {
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
            names: &[],
            claimed_names: &[],
        }
    }

    #[test]
    fn without_a_policy_all_is_allowed_and_by_one_that_panicked_nothing() {
        let none = SharedPolicy::new(None);
        assert!(none.allows(&flow(9)) && none.allows_name(Some("example.org")));
        let policy = SharedPolicy::new(Some(Box::new(Halfway)));
        let other = policy.clone();
        assert!(policy.allows(&flow(1)) && other.allows_name(None));
        assert!(catch_unwind(AssertUnwindSafe(|| policy.allows(&flow(9)))).is_err());
        assert!(!other.allows(&flow(1)) && !other.allows_name(Some("example.org")));
    }
}
