//! Which names of an address have allowed it, where names have their real addresses.

use super::{Destination, Rules};

impl Rules {
    /// The names of a destination by which the rules allow it, if its address alone is not allowed.
    pub fn allowed_names(&self, d: &Destination<'_>) -> Option<Vec<String>> {
        if !self.have_names() || d.names.is_empty() || self.is_allowed_as(d, &[]) {
            return None;
        }
        let of_one = |name: &&String| self.is_allowed_as(d, std::slice::from_ref(*name));
        Some(d.names.iter().filter(of_one).cloned().collect())
    }

    fn is_allowed_as(&self, d: &Destination<'_>, names: &[String]) -> bool {
        let (to, port, is_host, is_by_name) = (d.to, d.port, d.is_host, d.is_by_name);
        let of = Destination { to, port, names, claimed: &[], is_host, is_by_name };
        self.denial(&of).is_none()
    }
}

#[cfg(test)]
mod tests {
    use crate::rules::{Destination, Rules, Source};

    #[test]
    fn names_that_allow_an_address_are_those_that_rules_allow_at_the_port() {
        let mut rules = Rules::default();
        for rule in ["good.example:443", "other.example:22", "192.0.2.7"] {
            rules.allow(rule.parse().unwrap(), Source::Option);
        }
        let names = ["good.example", "other.example"].map(String::from);
        let at = |address: &str, port| {
            let (to, port) = (address.parse().unwrap(), Some(port));
            let (claimed, is_host, is_by_name) = (&[][..], false, false);
            let of = Destination { to, port, names: &names, claimed, is_host, is_by_name };
            rules.allowed_names(&of)
        };
        assert_eq!(at("192.0.2.1", 443), Some(vec![names[0].clone()]));
        assert_eq!(at("192.0.2.1", 22), Some(vec![names[1].clone()]));
        assert_eq!(at("192.0.2.7", 443), None, "by its address");
        let mut open = Rules::default();
        open.deny("evil.example".parse().unwrap(), Source::Option);
        let (to, port, names) = ("192.0.2.1".parse().unwrap(), Some(443), &names[..]);
        let (claimed, is_host, is_by_name) = (&[][..], false, false);
        let of = Destination { to, port, names, claimed, is_host, is_by_name };
        assert_eq!(open.allowed_names(&of), None, "by default");
    }
}
