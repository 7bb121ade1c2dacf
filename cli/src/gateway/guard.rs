//! The rules that decide what a guest reaches.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;

use fulmar_gateway::first;
use fulmar_gateway::policy::{Decision, NewClient, NewFlow, Policy, Ruling};
use fulmar_gateway::rules::{Denial, Rules, Step, Verdict};
use fulmar_gateway::stat::{FlowStat, Refusal};

use super::ask::{Ask, Said};
use super::audit::Audit;
use super::plan::Plan;
use super::refused::{Flow, Refused, What};
use super::report::Reporter;

/// Stands for the address of a name that a proxy resolves: one of documentation (RFC 5737), which no host has.
const UNRESOLVED: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 0));

/// Types of records that are about the addresses of a name: A, AAAA, SVCB, HTTPS.
const ADDRESS_TYPES: [u16; 4] = [1, 28, 64, 65];

/// The rules of `fulmar run` as the gateway asks for them.
struct RulesPolicy {
    rules: Rules,
    /// The addresses at which DNS is forwarded: always allowed, the names decide.
    dns: Vec<IpAddr>,
    reporter: Option<Reporter>,
    /// Reports refusals to the user; `None`: it is not wanted.
    refused: Option<Refused>,
    audit: Option<Audit>,
    /// The user, who is asked about what no rule names.
    ask: Option<Ask>,
}

/// The rule of a flow that the user has allowed.
const BY_USER: &str = "--ask: allowed by the user";

/// Whether nothing but the closed rest refuses a destination.
fn is_unnamed(verdict: &Verdict<'_>) -> bool {
    verdict.step == Step::Default && verdict.denial.is_some()
}

/// The policy of a plan, if it needs one.
pub(super) fn rules_policy(
    plan: &Plan,
    reporter: &Reporter,
    refused: Option<&Refused>,
    audit: Option<Audit>,
    ask: Option<Ask>,
) -> Option<Box<dyn Policy>> {
    Some(Box::new(RulesPolicy {
        rules: plan.rules.clone()?,
        dns: plan.map.dns_forward.clone(),
        reporter: (plan.has_summary || plan.learn.is_some() || audit.is_some())
            .then(|| reporter.clone()),
        refused: refused.cloned(),
        audit,
        ask,
    }))
}

impl RulesPolicy {
    /// The decision, of which a denial is counted.
    fn decision_by(&self, denial: Option<&Denial>) -> Decision {
        let Some(denial) = denial else { return Decision::Allow };
        if let Some(reporter) = &self.reporter {
            reporter.deny_by(&denial.to_string());
        }
        Decision::Deny
    }

    /// What the rules say about a flow, or the user where they name none.
    fn rule_on(&self, flow: &NewFlow<'_>, ask: impl FnOnce(&Ask) -> Said) -> Ruling {
        let verdict = self.rules.verdict_of_flow(flow, &self.dns);
        let by = |decision: Decision, rule: &str| {
            let names = self.rules.allowed_names(flow).filter(|_| decision == Decision::Allow);
            Ruling { rule: Some(rule.into()), names, ..decision.into() }
        };
        match self.ask.as_ref().filter(|_| is_unnamed(&verdict)).map(ask) {
            Some(Said::Allowed) => by(Decision::Allow, BY_USER),
            Some(Said::Refused(why)) => by(Decision::Deny, why),
            Some(Said::Nothing) => Decision::Wait.into(),
            None => self.rules.ruling(flow, verdict),
        }
    }

    /// Counts the decision about a flow.
    fn count(&self, flow: &NewFlow<'_>, ruling: Ruling) -> Ruling {
        let (Some(reporter), Decision::Allow | Decision::Deny) = (&self.reporter, ruling.decision)
        else {
            return ruling;
        };
        let NewFlow { name, names, claimed_names, .. } = *flow;
        let known = name.or(names.first().map(String::as_str));
        let shown = known.or(claimed_names.first().map(String::as_str));
        let is_denied = ruling.decision == Decision::Deny;
        reporter.at(flow.protocol, flow.to, |tally| {
            if let Some(name) = shown {
                (tally.name, tally.is_claimed) = (Some(name.to_owned()), known.is_none());
            }
            tally.denied += u64::from(is_denied);
        });
        if let (true, Some(rule)) = (is_denied, &ruling.rule) {
            reporter.deny_by(rule);
        }
        ruling
    }
}

/// A flow that was refused, as the rules know it.
fn what(flow: &NewFlow<'_>) -> Flow {
    let NewFlow { protocol, to, leads_to, name, names, is_host, host_network, .. } = *flow;
    let is_by_name = name.is_some();
    let at = match is_by_name {
        true if leads_to == to => SocketAddr::new(UNRESOLVED, to.port()),
        true => leads_to,
        false => to,
    };
    let name = name.or(names.first().map(String::as_str)).map(str::to_owned);
    Flow { protocol, name, at, is_by_name, is_host, host_network }
}

impl Policy for RulesPolicy {
    fn reads_names(&self) -> bool {
        !self.rules.is_empty() || self.reporter.is_some()
    }

    fn decide(&mut self, flow: &NewFlow<'_>) -> Ruling {
        self.count(flow, self.rule_on(flow, |ask| ask.about(flow)))
    }

    fn decide_now(&mut self, flow: &NewFlow<'_>) -> Ruling {
        let ruling = self.rule_on(flow, |ask| match ask.was_allowed(flow) {
            true => Said::Allowed,
            false => Said::Refused("--ask: not allowed by the user"),
        });
        self.count(flow, ruling)
    }

    fn decide_look_up(&mut self, flow: &NewFlow<'_>) -> Ruling {
        if self.ask.is_none() || !is_unnamed(&self.rules.verdict_of_flow(flow, &self.dns)) {
            return Decision::Allow.into();
        }
        let ruling = self.rule_on(flow, |ask| ask.about(flow));
        match ruling.decision {
            // The address is decided when it is known.
            Decision::Allow => ruling,
            _ => self.count(flow, ruling),
        }
    }

    fn decide_client(&mut self, client: &NewClient) -> Decision {
        self.decision_by(self.rules.client_denial(client.protocol, client.from))
    }

    fn decide_name(&mut self, name: &str, record_type: u16) -> Decision {
        let verdict = self.rules.name_verdict(name, record_type);
        let waits =
            self.ask.is_some() && is_unnamed(&verdict) && ADDRESS_TYPES.contains(&record_type);
        let denial = verdict.denial.filter(|_| !waits);
        if let (Some(reporter), Some(_)) = (&self.reporter, denial) {
            reporter.deny_name(name);
        }
        if let (Some(refused), Some(by)) = (&self.refused, denial) {
            refused.add(&self.rules, What::Name(name.to_owned()), &by.to_string());
        }
        if let Some(audit) = &self.audit {
            audit.asked(name, record_type, denial.is_none(), verdict.text());
        }
        if waits { Decision::Wait } else { self.decision_by(denial) }
    }

    fn decide_hidden_name(&mut self) -> Decision {
        self.decision_by(self.rules.hidden_name_denial())
    }

    fn refused(&mut self, flow: &NewFlow<'_>, why: Refusal, rule: Option<Arc<str>>) {
        if let Some(audit) = &self.audit {
            audit.refused(flow, why, rule.clone());
        }
        let Some(refused) = &self.refused else { return };
        match (why, rule) {
            (Refusal::Policy, Some(by)) => refused.add(&self.rules, What::Flow(what(flow)), &by),
            (Refusal::Allowance, _) => {
                let what = Flow { at: flow.to, is_by_name: false, ..what(flow) };
                refused.add(
                    &self.rules,
                    What::Contradicted(what),
                    "a limit of its rule is reached",
                );
            }
            _ => {}
        }
    }

    fn set_rules(&mut self, rules: Rules) {
        self.refused.iter().for_each(|refused| refused.set_rules(&rules));
        self.rules = rules;
    }

    fn keeps_name(&self, name: &str, known: &[String]) -> bool {
        self.rules.keeps_name(name, known)
    }

    fn contradicted(&mut self, flow: &FlowStat, why: &first::Refusal) {
        if let Some(audit) = &self.audit {
            audit.contradicted(flow, why.to_string());
        }
        if let Some(refused) = &self.refused {
            let FlowStat { protocol, host, ref name, .. } = *flow;
            let name = name.as_deref().map(str::to_owned);
            let (at, is_by_name, is_host, host_network) = (host, false, false, None);
            let what = Flow { protocol, name, at, is_by_name, is_host, host_network };
            refused.add(&self.rules, What::Contradicted(what), &why.to_string());
        }
    }

    fn began(&mut self, flow: &FlowStat) {
        if let Some(audit) = &self.audit {
            audit.began(flow);
        }
    }

    fn ended(&mut self, flow: &FlowStat) {
        if let Some(audit) = &self.audit {
            audit.ended(flow);
        }
        if let Some(reporter) = &self.reporter {
            reporter.count(flow);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gateway::log::Log;
    use fulmar_gateway::policy::Protocol;
    use fulmar_gateway::rules::Source;
    use std::path::Path;

    impl RulesPolicy {
        fn of(rules: Rules, dns: Vec<IpAddr>, reporter: Option<Reporter>) -> RulesPolicy {
            RulesPolicy { rules, dns, reporter, refused: None, audit: None, ask: None }
        }
    }

    fn decide(policy: &mut RulesPolicy, to: &str, names: &[&str]) -> Decision {
        decide_over(policy, Protocol::Tcp, to, names)
    }

    fn decide_over(
        policy: &mut RulesPolicy,
        protocol: Protocol,
        to: &str,
        names: &[&str],
    ) -> Decision {
        let to: SocketAddr = to.parse().unwrap();
        let names: Vec<String> = names.iter().map(|n| n.to_string()).collect();
        policy
            .decide(&NewFlow {
                protocol,
                from: "10.0.0.2:1000".parse().unwrap(),
                to,
                leads_to: to,
                name: None,
                names: &names,
                claimed_names: &[],
                is_host: false,
                host_network: None,
            })
            .decision
    }

    #[test]
    fn dns_is_always_reached_over_udp_and_its_names_are_decided() {
        let mut rules = Rules::default();
        rules.add_file("no-network\nallow example.org:443", Path::new("/r")).unwrap();
        rules.deny("169.254.1.0/24".parse().unwrap(), Source::Option);
        let reporter = Reporter::default();
        let dns = vec!["169.254.1.1".parse().unwrap()];
        let mut policy = RulesPolicy::of(rules, dns, Some(reporter.clone()));
        let over_udp = decide_over(&mut policy, Protocol::Udp, "169.254.1.1:53", &[]);
        assert_eq!(over_udp, Decision::Allow);
        assert_eq!(decide(&mut policy, "169.254.1.1:80", &[]), Decision::Deny);
        assert_eq!(decide(&mut policy, "192.0.2.1:443", &["example.org"]), Decision::Allow);
        assert_eq!(decide(&mut policy, "192.0.2.1:80", &["example.org"]), Decision::Deny);
        assert_eq!(policy.decide_name("example.org", 1), Decision::Allow);
        assert_eq!(policy.decide_name("example.com", 1), Decision::Deny);
        let mut text = String::new();
        reporter.write_denied_names(&mut text);
        assert_eq!(text, "  name example.com: denied 1 times\n");
        let mut by = String::new();
        reporter.write_denied_by(&mut by);
        assert_eq!(by, "    2 by /r:1: no-network\n    1 by --deny 169.254.1.0/24\n");
        reporter.write_destinations(&mut text);
        assert!(text.contains("tcp 192.0.2.1:80 (example.org): 0 flows, 1 denied"), "{text}");
    }

    #[test]
    fn an_answer_opens_the_closed_rest_and_nothing_else() {
        let mut rules = Rules::default();
        rules
            .add_file(
                "deny 192.0.2.0/24\nallow good.example:80\ndeny evil.example",
                Path::new("/r"),
            )
            .unwrap();
        rules.close_to_ask();
        let ask = Ask::unread();
        let mut policy =
            RulesPolicy { ask: Some(ask.clone()), ..RulesPolicy::of(rules, vec![], None) };
        let flow = |name, to: &str, leads_to: &str| {
            let (from, to) = ("10.0.0.2:1000".parse().unwrap(), to.parse().unwrap());
            let flow = NewFlow::new(Protocol::Tcp, from, to);
            NewFlow { name, leads_to: leads_to.parse().unwrap(), ..flow }
        };
        let own = "198.18.0.2:443";
        let other = flow(Some("other.example"), own, own);
        // Of a name that rules deny or allow nothing is asked.
        assert_eq!(policy.decide_name("evil.example", 1), Decision::Deny);
        assert_eq!(policy.decide_name("good.example", 1), Decision::Allow);
        assert_eq!(policy.decide_name("other.example", 28), Decision::Wait);
        assert_eq!(policy.decide_name("other.example", 16), Decision::Deny, "TXT");
        assert_eq!(
            policy.decide(&flow(Some("evil.example"), own, "198.51.100.7:443")).decision,
            Decision::Deny
        );
        assert_eq!(
            policy.decide(&flow(None, "192.0.2.1:443", "192.0.2.1:443")).decision,
            Decision::Deny
        );
        assert_eq!(policy.decide_now(&other).decision, Decision::Deny, "nothing is asked");
        assert_eq!(policy.decide_look_up(&other).decision, Decision::Wait);
        ask.hear("{\"id\":1,\"answer\":\"always\"}");
        assert_eq!(policy.decide_look_up(&other).decision, Decision::Allow);
        let leads = |to| flow(Some("other.example"), own, to);
        assert_eq!(policy.decide(&leads("198.51.100.7:443")).decision, Decision::Allow);
        assert_eq!(policy.decide_now(&leads("198.51.100.7:443")).decision, Decision::Allow);
        for guarded in ["10.0.0.1:443", "127.0.0.1:443", "169.254.169.254:443", "192.0.2.1:443"] {
            assert_eq!(policy.decide(&leads(guarded)).decision, Decision::Deny, "{guarded}");
        }
        let elsewhere = flow(Some("other.example"), "198.18.0.2:22", "198.18.0.2:22");
        assert_eq!(policy.decide_look_up(&elsewhere).decision, Decision::Wait, "another port");
        // New rules decide before the answer.
        let mut rules = Rules::default();
        rules.deny("other.example".parse().unwrap(), Source::Option);
        rules.close_to_ask();
        policy.set_rules(rules);
        assert_eq!(policy.decide_now(&leads("198.51.100.7:443")).decision, Decision::Deny);
        assert_eq!(policy.decide(&elsewhere).decision, Decision::Deny);
    }

    #[test]
    fn dns_whose_names_are_not_read_passes_where_no_name_is_refused() {
        for (text, decision) in [
            ("no-network\nallow example.org:443", Decision::Deny),
            ("no-network\nallow 192.0.2.0/24", Decision::Deny),
            ("deny *.example.org", Decision::Deny),
            ("deny example.org:80\nallow 192.0.2.53", Decision::Deny),
            ("deny 10.0.0.0/8", Decision::Allow),
        ] {
            let mut rules = Rules::default();
            rules.add_file(text, Path::new("/r")).unwrap();
            let dns = vec!["169.254.1.1".parse().unwrap()];
            let mut policy = RulesPolicy::of(rules, dns, None);
            for server in ["169.254.1.1:53", "192.0.2.53:53"] {
                assert_eq!(decide(&mut policy, server, &[]), decision, "{text}, {server}");
            }
            assert_eq!(policy.decide_hidden_name(), decision, "{text}");
        }
    }

    #[test]
    fn a_flow_with_several_addresses_is_refused_once_and_only_if_none_is_left() {
        let mut rules = Rules::default();
        rules.add_file("no-network\nallow example.org", Path::new("/r")).unwrap();
        let told = Refused::new(&Log::to_stderr("t", true), "t");
        let mut policy =
            RulesPolicy { refused: Some(told.clone()), ..RulesPolicy::of(rules, vec![], None) };
        let flow = |leads_to: &str| NewFlow {
            protocol: Protocol::Tcp,
            from: "10.0.0.2:1000".parse().unwrap(),
            to: "198.18.0.1:80".parse().unwrap(),
            leads_to: leads_to.parse().unwrap(),
            name: Some("example.org"),
            names: &[],
            claimed_names: &[],
            is_host: false,
            host_network: None,
        };
        let denied = policy.decide(&flow("10.0.0.1:80"));
        assert_eq!(denied.decision, Decision::Deny);
        let allowed = policy.decide(&flow("192.0.2.1:80"));
        assert_eq!(allowed.decision, Decision::Allow);
        assert_eq!(allowed.rule.as_deref(), Some("/r:2: allow example.org"));
        assert_eq!(told.count(), 0, "the other address is allowed");
        policy.refused(&flow("10.0.0.1:80"), Refusal::Unreachable, allowed.rule);
        assert_eq!(told.count(), 0, "for another reason");
        policy.refused(&flow("10.0.0.1:80"), Refusal::Policy, denied.rule);
        assert_eq!(told.count(), 1);
    }

    #[test]
    fn without_rules_names_are_read_for_the_summary_alone() {
        let policy = |text: &str, reporter| {
            let mut rules = Rules::default();
            rules.add_file(text, Path::new("/r")).unwrap();
            RulesPolicy::of(rules, vec![], reporter)
        };
        assert!(!policy("", None).reads_names());
        assert!(policy("deny 10.0.0.0/8", None).reads_names());
        assert!(policy("", Some(Reporter::default())).reads_names());
        assert_eq!(decide(&mut policy("", None), "169.254.169.254:80", &[]), Decision::Deny);
        let from = "10.1.2.3:40000".parse().unwrap();
        let client = NewClient { protocol: Protocol::Udp, from };
        assert_eq!(policy("deny 10.0.0.0/8", None).decide_client(&client), Decision::Deny);
        assert_eq!(policy("no-network", None).decide_client(&client), Decision::Allow);
    }

    #[test]
    fn a_name_by_the_word_of_the_guests_own_server_is_shown_as_claimed() {
        let reporter = Reporter::default();
        let rules = Rules::default();
        let mut policy = RulesPolicy::of(rules, vec![], Some(reporter.clone()));
        let to = "192.0.2.1:443".parse().unwrap();
        let flow = NewFlow {
            protocol: Protocol::Tcp,
            from: "10.0.0.2:1000".parse().unwrap(),
            to,
            leads_to: to,
            name: None,
            names: &[],
            claimed_names: &["good.example".to_owned()],
            is_host: false,
            host_network: None,
        };
        policy.decide(&flow);
        let shown = || {
            let mut text = String::new();
            reporter.write_destinations(&mut text);
            text
        };
        assert!(shown().contains("192.0.2.1:443 (claimed: good.example):"), "{}", shown());
        let names = ["known.example".to_owned()];
        policy.decide(&NewFlow { names: &names, ..flow });
        assert!(shown().contains("192.0.2.1:443 (known.example):"), "{}", shown());
    }

    #[test]
    fn names_of_a_guests_choice_write_no_escape_sequences() {
        let name = "a\u{1b}[2J\u{7}.example";
        let mut rules = Rules::default();
        rules.add_file("deny example", Path::new("/r\u{1b}c")).unwrap();
        rules.deny("*.example".parse().unwrap(), Source::Option);
        let reporter = Reporter::default();
        let mut policy = RulesPolicy::of(rules, vec![], Some(reporter.clone()));
        assert_eq!(policy.decide_name(name, 1), Decision::Deny);
        assert_eq!(policy.decide_name("example", 1), Decision::Deny);
        assert_eq!(decide(&mut policy, "192.0.2.1:443", &[name]), Decision::Deny);
        let mut text = String::new();
        reporter.write_denied_names(&mut text);
        reporter.write_denied_by(&mut text);
        reporter.write_destinations(&mut text);
        assert!(text.contains("[2J") && text.contains("/r") && text.contains("192.0.2.1:443"));
        assert!(text.chars().all(|c| c == '\n' || !c.is_control()), "{text:?}");
    }
}
