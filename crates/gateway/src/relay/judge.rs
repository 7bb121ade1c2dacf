//! The policy of a gateway, and what it is told of names: one for the threads of all queues.

use std::sync::{Arc, Mutex};

use super::names::Names;
use crate::policy::{Attempt, Decision, Policy};
use crate::stat::FlowStat;

struct Known {
    policy: Box<dyn Policy>,
    names: Names,
}

/// Decides about the guest's flows. Without a policy everything is allowed; by one that has panicked nothing is,
/// since it was left halfway.
#[derive(Clone, Default)]
pub struct Judge(Option<Arc<Mutex<Known>>>);

impl Judge {
    /// Decides as the policy does, if there is one.
    pub fn new(policy: Option<Box<dyn Policy>>) -> Judge {
        let known = |policy| Arc::new(Mutex::new(Known { policy, names: Names::default() }));
        Judge(policy.map(known))
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
    pub fn allows(&self, attempt: &Attempt<'_>) -> bool {
        let decided = self.ask(|Known { policy, names }| {
            policy.decide(&Attempt { names: names.of(attempt.to.ip()), ..*attempt })
        });
        decided.map_or(!self.has_policy(), |d| d == Decision::Allow)
    }

    /// Whether the guest may ask for a name.
    pub fn allows_name(&self, name: &str) -> bool {
        let decided = self.ask(|known| known.policy.decide_name(name));
        decided.map_or(!self.has_policy(), |d| d == Decision::Allow)
    }

    /// Reads an answer of DNS.
    pub fn learn(&self, message: &[u8]) {
        self.ask(|known| known.names.learn(message));
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
        fn decide(&mut self, attempt: &Attempt<'_>) -> Decision {
            assert!(attempt.to.port() != 9, "of the test");
            Decision::Allow
        }
    }

    fn attempt(port: u16) -> Attempt<'static> {
        let at = SocketAddr::from(([10, 0, 0, 1], port));
        Attempt { protocol: Protocol::Tcp, from: at, to: at, leads_to: at, names: &[] }
    }

    #[test]
    fn without_a_policy_all_is_allowed_and_by_one_that_panicked_nothing() {
        let none = Judge::new(None);
        assert!(none.allows(&attempt(9)) && none.allows_name("example.org"));
        let judge = Judge::new(Some(Box::new(Halfway)));
        let other = judge.clone();
        assert!(judge.allows(&attempt(1)) && other.allows_name("example.org"));
        assert!(catch_unwind(AssertUnwindSafe(|| judge.allows(&attempt(9)))).is_err());
        assert!(!other.allows(&attempt(1)) && !other.allows_name("example.org"));
    }
}
