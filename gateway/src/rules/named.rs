//! Which names of an address have allowed it, where names have their real addresses.

use super::{Destination, Rules, Verdict};
use crate::policy::{Decision, NewFlow, Ruling};

impl Rules {
    /// The ruling that a verdict on a flow is.
    pub fn ruling(&self, flow: &NewFlow<'_>, verdict: Verdict<'_>) -> Ruling {
        let rule = Some(verdict.text());
        match verdict.denial {
            Some(_) => Ruling { rule, ..Decision::Deny.into() },
            None => Ruling {
                rule,
                allowance: verdict.allowance().cloned(),
                names: self.allowed_names(flow),
                decision: Decision::Allow,
            },
        }
    }

    /// The names of a flow's address by which the rules allow it, if its address alone is not allowed.
    pub fn allowed_names(&self, flow: &NewFlow<'_>) -> Option<Vec<String>> {
        let is_allowed_as = |names: &[String]| {
            let at = Destination::new(flow.protocol, flow.to);
            let (is_host, host_network) = (flow.is_host, flow.host_network);
            self.denial(&Destination { names, is_host, host_network, ..at }).is_none()
        };
        if !self.have_names() || flow.names.is_empty() || is_allowed_as(&[]) {
            return None;
        }
        let of_one = |name: &&String| is_allowed_as(std::slice::from_ref(*name));
        Some(flow.names.iter().filter(of_one).cloned().collect())
    }
}

#[cfg(test)]
mod tests {
    use crate::policy::{NewFlow, Protocol};
    use crate::rules::{Rules, Source};

    #[test]
    fn names_that_allow_an_address_are_those_that_rules_allow_at_the_port() {
        let mut rules = Rules::default();
        for rule in ["good.example:443", "other.example:22", "192.0.2.7"] {
            rules.allow(rule.parse().unwrap(), Source::Option);
        }
        let names = ["good.example", "other.example"].map(String::from);
        let from = "10.0.0.2:1000".parse().unwrap();
        let at = |rules: &Rules, to: &str| {
            let flow = NewFlow::new(Protocol::Tcp, from, to.parse().unwrap());
            rules.allowed_names(&NewFlow { names: &names, ..flow })
        };
        assert_eq!(at(&rules, "192.0.2.1:443"), Some(vec![names[0].clone()]));
        assert_eq!(at(&rules, "192.0.2.1:22"), Some(vec![names[1].clone()]));
        assert_eq!(at(&rules, "192.0.2.7:443"), None, "by its address");
        let mut open = Rules::default();
        open.deny("evil.example".parse().unwrap(), Source::Option);
        assert_eq!(at(&open, "192.0.2.1:443"), None, "by default");
    }
}
