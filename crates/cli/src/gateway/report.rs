//! The rules that decide what a guest reaches, and the summary of what it reached.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use fulmar::ledger::{Balance, Stage, StageCost};
use fulmar_gateway::policy::{Decision, NewFlow, Policy, Protocol};
use fulmar_gateway::rules::{Denial, Rules};
use fulmar_gateway::splice::Counters;
use fulmar_gateway::stat::{Direction, FlowStat, Refusal, Stat, Summary};
use nix::time::{ClockId, clock_gettime};

use super::plan::Plan;
use crate::format;

/// Destinations in the summary's list at most; flows to others are in the totals alone.
const MAX_DESTINATIONS: usize = 4096;
/// Lines of each list of the summary.
const SHOWN: usize = 10;
/// Measured turns of the loop at least before shares are printed.
const ENOUGH_TURNS: u64 = 10;
/// The port of DNS.
const DNS_PORT: u16 = 53;

/// Flows to one destination.
#[derive(Clone, Debug, Default)]
struct Tally {
    name: Option<String>,
    flows: u64,
    denied: u64,
    bytes_out: u64,
    bytes_in: u64,
    open_for: Duration,
}

/// Collects what the summary says. Its copies share it.
#[derive(Clone, Default)]
pub struct Reporter {
    destinations: Arc<Mutex<HashMap<(Protocol, SocketAddr), Tally>>>,
    /// How often each name was denied.
    denied_names: Arc<Mutex<BTreeMap<String, u64>>>,
    /// How often each rule has refused a flow or a name.
    denied_by: Arc<Mutex<BTreeMap<String, u64>>>,
}

impl Reporter {
    fn at(&self, protocol: Protocol, to: SocketAddr, change: impl FnOnce(&mut Tally)) {
        let mut all = self.destinations.lock().unwrap_or_else(PoisonError::into_inner);
        if all.len() < MAX_DESTINATIONS || all.contains_key(&(protocol, to)) {
            change(all.entry((protocol, to)).or_default());
        }
    }

    /// Counts a refusal by a rule. There are no more entries than rules.
    fn deny_by(&self, rule: &Denial) {
        let mut all = self.denied_by.lock().unwrap_or_else(PoisonError::into_inner);
        *all.entry(rule.to_string()).or_default() += 1;
    }

    /// The rules that have refused something, the busiest first.
    fn write_denied_by(&self, text: &mut String) {
        let all = self.denied_by.lock().unwrap_or_else(PoisonError::into_inner);
        let mut all: Vec<_> = all.iter().collect();
        all.sort_by_key(|(_, times)| std::cmp::Reverse(**times));
        for (rule, times) in all.iter().take(SHOWN) {
            let _ = writeln!(text, "    {times} by {}", format::printable(rule));
        }
        if all.len() > SHOWN {
            let _ = writeln!(text, "    and some by {} other rules", all.len() - SHOWN);
        }
    }

    fn deny_name(&self, name: &str) {
        let mut all = self.denied_names.lock().unwrap_or_else(PoisonError::into_inner);
        if all.len() < MAX_DESTINATIONS || all.contains_key(name) {
            *all.entry(name.to_owned()).or_default() += 1;
        }
    }

    fn write_denied_names(&self, text: &mut String) {
        let all = self.denied_names.lock().unwrap_or_else(PoisonError::into_inner);
        for (name, times) in all.iter().take(SHOWN) {
            let _ = writeln!(text, "  name {}: denied {times} times", format::printable(name));
        }
        if all.len() > SHOWN {
            let _ = writeln!(text, "  and {} other names denied", all.len() - SHOWN);
        }
    }

    fn count(&self, flow: &FlowStat) {
        if flow.direction == Direction::Out {
            self.at(flow.protocol, flow.peer, |tally| {
                tally.flows += 1;
                tally.bytes_out += flow.bytes_out;
                tally.bytes_in += flow.bytes_in;
                tally.open_for += flow.age;
            });
        }
    }

    /// Writes the summary. Flows that are still open count.
    pub fn print(
        &self,
        out: &mut impl io::Write,
        stat: &Stat,
        summary: &Summary,
        spliced: &[&Counters],
    ) {
        for flow in &stat.flows {
            self.count(flow);
        }
        let text = self.text(summary, spliced) + &stages(stat.balance.as_ref());
        // The reader may have given up.
        let _ = out.write_all(text.as_bytes());
    }

    fn text(&self, summary: &Summary, spliced: &[&Counters]) -> String {
        let totals = &summary.totals;
        let mut text = String::new();
        let cpu = clock_gettime(ClockId::CLOCK_PROCESS_CPUTIME_ID)
            .map(Duration::from)
            .unwrap_or_default();
        let _ = writeln!(
            text,
            "network: {:.1} s, {:.3} s of CPU in the gateway; {} TCP connections, {} UDP flows, {} echo flows; {} out, {} in",
            summary.uptime.as_secs_f64(),
            cpu.as_secs_f64(),
            totals.tcp_flows,
            totals.udp_flows,
            totals.echo_flows,
            format::bytes(totals.bytes_out),
            format::bytes(totals.bytes_in),
        );
        let sum = |of: fn(&Counters) -> u64| spliced.iter().map(|c| of(c)).sum::<u64>();
        let connections = sum(|c| c.connections.load(Relaxed));
        if connections > 0 {
            let bytes = sum(|c| c.bytes_there.load(Relaxed) + c.bytes_back.load(Relaxed));
            let _ =
                writeln!(text, "  loopback: {connections} connections, {}", format::bytes(bytes));
        }
        for (why, count) in totals.refusals.iter() {
            let _ = writeln!(text, "  {count} not carried: {}", why.sentence().trim());
            if why == Refusal::Policy {
                self.write_denied_by(&mut text);
            }
        }
        self.write_denied_names(&mut text);
        self.write_destinations(&mut text);
        text
    }

    fn write_destinations(&self, text: &mut String) {
        let all = self.destinations.lock().unwrap_or_else(PoisonError::into_inner);
        let mut all: Vec<_> = all.iter().collect();
        all.sort_by_key(|((_, to), t)| (std::cmp::Reverse(t.bytes_in + t.bytes_out), *to));
        for ((protocol, to), tally) in all.iter().take(SHOWN) {
            let name = tally
                .name
                .as_ref()
                .map(|n| format!(" ({})", format::printable(n)))
                .unwrap_or_default();
            let denied =
                if tally.denied > 0 { format!(", {} denied", tally.denied) } else { String::new() };
            let _ = writeln!(
                text,
                "  {} {to}{name}: {} flows{denied}, {} out, {} in, open for {:.3} s",
                protocol.name(),
                tally.flows,
                format::bytes(tally.bytes_out),
                format::bytes(tally.bytes_in),
                tally.open_for.as_secs_f64(),
            );
        }
        if all.len() > SHOWN {
            let _ = writeln!(text, "  and {} other destinations", all.len() - SHOWN);
        }
    }
}

/// Where the gateway's time went, by stage: from a sample, which says nothing of a few turns.
fn stages(balance: Option<&Balance>) -> String {
    let Some(balance) = balance.filter(|b| b.measured >= ENOUGH_TURNS) else {
        return String::new();
    };
    let mut costs: Vec<&StageCost> =
        balance.stages.iter().filter(|c| c.stage != Stage::Slept && c.ns > 0.0).collect();
    costs.sort_by(|a, b| b.ns.total_cmp(&a.ns));
    let all: f64 = costs.iter().map(|c| c.ns).sum();
    let mut text = format!(
        "where its time went, by stage ({} of {} turns measured):\n",
        balance.measured, balance.visits
    );
    for cost in costs.iter().take(SHOWN) {
        let (stage, share) = (cost.stage, cost.ns * 100.0 / all);
        let _ = writeln!(
            text,
            "  {share:>5.1} %  {:>9}  {:<17} {}",
            format::time(cost.ns / 1e3),
            stage.name(),
            stage.sentence().trim().split(". ").next().unwrap_or_default().trim_end_matches('.')
        );
    }
    text
}

/// The rules of `fulmar run` as the gateway asks for them.
struct RulesPolicy {
    rules: Rules,
    /// The addresses at which DNS is forwarded: always allowed, the names decide.
    dns: Vec<IpAddr>,
    reporter: Option<Reporter>,
}

/// The policy of a plan, if it needs one.
pub fn rules_policy(plan: &Plan, reporter: &Reporter) -> Option<Box<dyn Policy>> {
    if plan.rules.is_unrestricted() && !plan.has_summary {
        return None;
    }
    Some(Box::new(RulesPolicy {
        rules: plan.rules.clone(),
        dns: plan.map.dns_forward.clone(),
        reporter: plan.has_summary.then(|| reporter.clone()),
    }))
}

impl Policy for RulesPolicy {
    fn decide(&mut self, flow: &NewFlow<'_>) -> Decision {
        let NewFlow { to, names, claimed_names, .. } = *flow;
        let port = (flow.protocol != Protocol::Icmp).then_some(to.port());
        let is_dns = to.port() == DNS_PORT && self.dns.contains(&to.ip());
        let by_address = match is_dns {
            true => None,
            false => self.rules.denial(to.ip(), port, names, claimed_names),
        };
        // The names in DNS over TCP are not read.
        let hides_names = flow.protocol == Protocol::Tcp
            && to.port() == DNS_PORT
            && !self.rules.is_allowed(to.ip(), port, names);
        let by_name = if hides_names { self.rules.hidden_name_denial() } else { None };
        let denial = by_address.or(by_name);
        if let Some(reporter) = &self.reporter {
            reporter.at(flow.protocol, to, |tally| {
                tally.name = names.first().or(claimed_names.first()).cloned().or(tally.name.take());
                tally.denied += u64::from(denial.is_some());
            });
            denial.into_iter().for_each(|rule| reporter.deny_by(rule));
        }
        if denial.is_none() { Decision::Allow } else { Decision::Deny }
    }

    fn decide_name(&mut self, name: &str) -> Decision {
        let Some(rule) = self.rules.name_denial(name) else { return Decision::Allow };
        if let Some(reporter) = &self.reporter {
            reporter.deny_name(name);
            reporter.deny_by(rule);
        }
        Decision::Deny
    }

    fn decide_hidden_name(&mut self) -> Decision {
        let Some(rule) = self.rules.hidden_name_denial() else { return Decision::Allow };
        if let Some(reporter) = &self.reporter {
            reporter.deny_by(rule);
        }
        Decision::Deny
    }

    fn ended(&mut self, flow: &FlowStat) {
        if let Some(reporter) = &self.reporter {
            reporter.count(flow);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fulmar_gateway::rules::Source;
    use std::path::Path;

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
        policy.decide(&NewFlow {
            protocol,
            from: "10.0.0.2:1000".parse().unwrap(),
            to,
            leads_to: to,
            names: &names,
            claimed_names: &[],
        })
    }

    #[test]
    fn dns_is_always_reached_over_udp_and_its_names_are_decided() {
        let mut rules = Rules::default();
        rules.add_file("no-network\nallow example.org:443", Path::new("/r")).unwrap();
        rules.deny("169.254.1.0/24".parse().unwrap(), Source::Option);
        let reporter = Reporter::default();
        let dns = vec!["169.254.1.1".parse().unwrap()];
        let mut policy = RulesPolicy { rules, dns, reporter: Some(reporter.clone()) };
        let over_udp = decide_over(&mut policy, Protocol::Udp, "169.254.1.1:53", &[]);
        assert_eq!(over_udp, Decision::Allow);
        assert_eq!(decide(&mut policy, "169.254.1.1:80", &[]), Decision::Deny);
        assert_eq!(decide(&mut policy, "192.0.2.1:443", &["example.org"]), Decision::Allow);
        assert_eq!(decide(&mut policy, "192.0.2.1:80", &["example.org"]), Decision::Deny);
        assert_eq!(policy.decide_name("example.org"), Decision::Allow);
        assert_eq!(policy.decide_name("example.com"), Decision::Deny);
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
    fn dns_whose_names_are_not_read_passes_where_no_name_is_refused() {
        for (text, decision) in [
            ("no-network\nallow example.org:443", Decision::Deny),
            ("deny *.example.org", Decision::Deny),
            ("deny 10.0.0.0/8", Decision::Allow),
            ("no-network\nallow 192.0.2.0/24", Decision::Allow),
        ] {
            let mut rules = Rules::default();
            rules.add_file(text, Path::new("/r")).unwrap();
            let dns = vec!["169.254.1.1".parse().unwrap()];
            let mut policy = RulesPolicy { rules, dns, reporter: None };
            assert_eq!(decide(&mut policy, "169.254.1.1:53", &[]), decision, "{text}");
            if !text.contains("no-network") {
                assert_eq!(decide(&mut policy, "192.0.2.53:53", &[]), decision, "{text}");
            }
            assert_eq!(policy.decide_hidden_name(), decision, "{text}");
        }
    }

    #[test]
    fn names_of_a_guests_choice_write_no_escape_sequences() {
        let name = "a\u{1b}[2J\u{7}.example";
        let mut rules = Rules::default();
        rules.add_file("deny example", Path::new("/r\u{1b}c")).unwrap();
        rules.deny("*.example".parse().unwrap(), Source::Option);
        let reporter = Reporter::default();
        let mut policy = RulesPolicy { rules, dns: vec![], reporter: Some(reporter.clone()) };
        assert_eq!(policy.decide_name(name), Decision::Deny);
        assert_eq!(policy.decide_name("example"), Decision::Deny);
        assert_eq!(decide(&mut policy, "192.0.2.1:443", &[name]), Decision::Deny);
        let mut text = String::new();
        reporter.write_denied_names(&mut text);
        reporter.write_denied_by(&mut text);
        reporter.write_destinations(&mut text);
        assert!(text.contains("[2J") && text.contains("/r") && text.contains("192.0.2.1:443"));
        assert!(text.chars().all(|c| c == '\n' || !c.is_control()), "{text:?}");
    }

    #[test]
    fn the_stages_are_told_with_their_shares_if_enough_was_measured() {
        let cost = |stage, ns| StageCost { stage, passes: 1.0, ns };
        let stages_of = vec![
            cost(Stage::HostSent, 1e6),
            cost(Stage::DeviceReceived, 3e6),
            cost(Stage::Slept, 1e9),
        ];
        let balance = |measured| Balance {
            stages: stages_of.clone(),
            measured,
            visits: 400,
            ..Balance::default()
        };
        let text = stages(Some(&balance(100)));
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "where its time went, by stage (100 of 400 turns measured):");
        assert!(
            lines[1].starts_with("   75.0 %        3ms  device_received   The device"),
            "{text}"
        );
        assert!(lines[2].starts_with("   25.0 %        1ms  host_sent         The host"), "{text}");
        assert_eq!(lines.len(), 3, "sleep is no work");
        assert_eq!(stages(Some(&balance(ENOUGH_TURNS - 1))) + &stages(None), "");
    }

    #[test]
    fn destinations_are_bounded() {
        let reporter = Reporter::default();
        for n in 0..2 * MAX_DESTINATIONS as u32 {
            let to = SocketAddr::new(IpAddr::from((n + (10 << 24)).to_be_bytes()), 80);
            reporter.at(Protocol::Tcp, to, |t| t.flows += 1);
        }
        let mut text = String::new();
        reporter.write_destinations(&mut text);
        assert_eq!(text.lines().count(), SHOWN + 1);
        assert!(text.ends_with(&format!("and {} other destinations\n", MAX_DESTINATIONS - SHOWN)));
    }
}
