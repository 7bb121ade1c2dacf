//! The rules that decide what a guest reaches, and the summary of what it reached.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use fulmar::ledger::{Account, Stage, StageTime};
use fulmar_gateway::policy::{Decision, NewClient, NewFlow, Policy, Protocol};
use fulmar_gateway::rules::{Denial, Destination, Rules};
use fulmar_gateway::splice::Counters;
use fulmar_gateway::stat::{Direction, FlowStat, Refusal, Stat, Summary};
use nix::time::{ClockId, clock_gettime};

use super::plan::Plan;
use crate::format;

/// Most destinations and denied names with counts of their own; the others are counted together.
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
    /// The name is the word of a DNS server that the guest has chosen.
    is_claimed: bool,
    flows: u64,
    denied: u64,
    bytes_out: u64,
    bytes_in: u64,
    open_for: Duration,
}

impl Tally {
    fn bytes(&self) -> u64 {
        self.bytes_in + self.bytes_out
    }
}

/// The destinations of most bytes, and the sum of the others.
#[derive(Debug, Default)]
struct Destinations {
    kept: HashMap<(Protocol, SocketAddr), Tally>,
    others: Tally,
    /// How often a destination was moved to the others.
    moved: u64,
}

impl Destinations {
    fn at(&mut self, protocol: Protocol, to: SocketAddr) -> &mut Tally {
        if self.kept.len() >= MAX_DESTINATIONS && !self.kept.contains_key(&(protocol, to)) {
            self.move_smaller_half();
        }
        self.kept.entry((protocol, to)).or_default()
    }

    /// Many at a time, so that a guest with ever new destinations costs little for each.
    fn move_smaller_half(&mut self) {
        let mut all: Vec<_> = std::mem::take(&mut self.kept).into_iter().collect();
        all.sort_by_key(|(_, tally)| std::cmp::Reverse((tally.bytes(), tally.flows)));
        for (_, tally) in all.drain(MAX_DESTINATIONS / 2..) {
            self.moved += 1;
            self.others.flows += tally.flows;
            self.others.denied += tally.denied;
            self.others.bytes_out += tally.bytes_out;
            self.others.bytes_in += tally.bytes_in;
            self.others.open_for += tally.open_for;
        }
        self.kept = all.into_iter().collect();
    }
}

/// Names that were denied, with how often.
#[derive(Debug, Default)]
struct DeniedNames {
    kept: BTreeMap<String, u64>,
    /// Denials of names beyond [`MAX_DESTINATIONS`].
    others: u64,
}

/// Collects the figures of the summary. Clones share them.
#[derive(Clone, Default)]
pub struct Reporter {
    destinations: Arc<Mutex<Destinations>>,
    denied_names: Arc<Mutex<DeniedNames>>,
    /// How often each rule has refused a flow or a name.
    denied_by: Arc<Mutex<BTreeMap<String, u64>>>,
}

impl Reporter {
    fn at(&self, protocol: Protocol, to: SocketAddr, change: impl FnOnce(&mut Tally)) {
        let mut all = self.destinations.lock().unwrap_or_else(PoisonError::into_inner);
        change(all.at(protocol, to));
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
        if all.kept.len() < MAX_DESTINATIONS || all.kept.contains_key(name) {
            *all.kept.entry(name.to_owned()).or_default() += 1;
        } else {
            all.others += 1;
        }
    }

    fn write_denied_names(&self, text: &mut String) {
        let all = self.denied_names.lock().unwrap_or_else(PoisonError::into_inner);
        let mut names: Vec<_> = all.kept.iter().collect();
        names.sort_by_key(|(_, times)| std::cmp::Reverse(**times));
        for (name, times) in names.iter().take(SHOWN) {
            let _ = writeln!(text, "  name {}: denied {times} times", format::printable(name));
        }
        if names.len() > SHOWN {
            let _ = writeln!(text, "  and {} other names denied", names.len() - SHOWN);
        }
        if all.others > 0 {
            let _ = writeln!(
                text,
                "  and names beyond {MAX_DESTINATIONS}: denied {} times",
                all.others
            );
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
        let text = self.text(summary, spliced) + &stages(stat.account.as_ref());
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
        let destinations = self.destinations.lock().unwrap_or_else(PoisonError::into_inner);
        let mut all: Vec<_> = destinations.kept.iter().collect();
        all.sort_by_key(|((_, to), tally)| (std::cmp::Reverse(tally.bytes()), *to));
        for ((protocol, to), tally) in all.iter().take(SHOWN) {
            let name = tally.name.as_ref().map(|n| {
                let claimed = if tally.is_claimed { "claimed: " } else { "" };
                format!(" ({claimed}{})", format::printable(n))
            });
            let (what, name) = (format!("{} {to}", protocol.name()), name.unwrap_or_default());
            write_tally(text, &format!("{what}{name}"), tally);
        }
        if all.len() > SHOWN {
            let _ = writeln!(text, "  and {} other destinations", all.len() - SHOWN);
        }
        if destinations.moved > 0 {
            let what = format!("and destinations with fewer bytes ({} times)", destinations.moved);
            write_tally(text, &what, &destinations.others);
        }
    }
}

fn write_tally(text: &mut String, what: &str, tally: &Tally) {
    let denied = match tally.denied {
        0 => String::new(),
        denied => format!(", {denied} denied"),
    };
    let open_for = tally.open_for.as_secs_f64();
    let _ = writeln!(
        text,
        "  {what}: {} flows{denied}, {} out, {} in, open for {open_for:.3} s",
        tally.flows,
        format::bytes(tally.bytes_out),
        format::bytes(tally.bytes_in),
    );
}

/// Where the gateway's time went, by stage: from a sample, which says nothing of a few turns.
fn stages(account: Option<&Account>) -> String {
    let Some(account) = account.filter(|b| b.measured >= ENOUGH_TURNS) else {
        return String::new();
    };
    let mut costs: Vec<&StageTime> =
        account.stages.iter().filter(|c| c.stage != Stage::Slept && c.ns > 0.0).collect();
    costs.sort_by(|a, b| b.ns.total_cmp(&a.ns));
    let all: f64 = costs.iter().map(|c| c.ns).sum();
    let mut text =
        format!("CPU time by stage ({} of {} turns measured):\n", account.measured, account.visits);
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
    Some(Box::new(RulesPolicy {
        rules: plan.rules.clone()?,
        dns: plan.map.dns_forward.clone(),
        reporter: plan.has_summary.then(|| reporter.clone()),
    }))
}

impl RulesPolicy {
    /// The decision, of which a denial is counted.
    fn decision_by(&self, denial: Option<&Denial>) -> Decision {
        let Some(rule) = denial else { return Decision::Allow };
        if let Some(reporter) = &self.reporter {
            reporter.deny_by(rule);
        }
        Decision::Deny
    }
}

impl Policy for RulesPolicy {
    fn reads_names(&self) -> bool {
        !self.rules.is_empty() || self.reporter.is_some()
    }

    fn decide(&mut self, flow: &NewFlow<'_>) -> Decision {
        let NewFlow { to, leads_to, name, names, claimed_names, is_host, .. } = *flow;
        let own = name.map(|name| [name.to_owned()]);
        let names = own.as_ref().map_or(names, |own| own.as_slice());
        let port = (flow.protocol != Protocol::Icmp).then_some(to.port());
        let is_dns = to.port() == DNS_PORT && self.dns.contains(&to.ip());
        let is_by_name = name.is_some();
        let at = if is_by_name { leads_to } else { to };
        let claimed = claimed_names;
        let destination = Destination { to: at.ip(), port, names, claimed, is_host, is_by_name };
        let by_address = if is_dns { None } else { self.rules.denial(&destination) };
        // The names in DNS over TCP are not read.
        let hides_names = flow.protocol == Protocol::Tcp && to.port() == DNS_PORT;
        let by_name = if hides_names { self.rules.hidden_name_denial() } else { None };
        let denial = by_address.or(by_name);
        if let Some(reporter) = &self.reporter {
            reporter.at(flow.protocol, to, |tally| {
                if let Some(name) = names.first().or(claimed_names.first()) {
                    (tally.name, tally.is_claimed) = (Some(name.clone()), names.is_empty());
                }
                tally.denied += u64::from(denial.is_some());
            });
        }
        self.decision_by(denial)
    }

    fn decide_client(&mut self, client: &NewClient) -> Decision {
        self.decision_by(self.rules.client_denial(client.from.ip(), client.from.port()))
    }

    fn decide_name(&mut self, name: &str, record_type: u16) -> Decision {
        let denial = self.rules.name_denial(name, record_type);
        if let (Some(reporter), Some(_)) = (&self.reporter, denial) {
            reporter.deny_name(name);
        }
        self.decision_by(denial)
    }

    fn decide_hidden_name(&mut self) -> Decision {
        self.decision_by(self.rules.hidden_name_denial())
    }

    fn keeps_name(&self, name: &str, known: &[String]) -> bool {
        self.rules.keeps_name(name, known)
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
            name: None,
            names: &names,
            claimed_names: &[],
            is_host: false,
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
            let mut policy = RulesPolicy { rules, dns, reporter: None };
            for server in ["169.254.1.1:53", "192.0.2.53:53"] {
                assert_eq!(decide(&mut policy, server, &[]), decision, "{text}, {server}");
            }
            assert_eq!(policy.decide_hidden_name(), decision, "{text}");
        }
    }

    #[test]
    fn without_rules_names_are_read_for_the_summary_alone() {
        let policy = |text: &str, reporter| {
            let mut rules = Rules::default();
            rules.add_file(text, Path::new("/r")).unwrap();
            RulesPolicy { rules, dns: vec![], reporter }
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
        let mut policy = RulesPolicy { rules, dns: vec![], reporter: Some(reporter.clone()) };
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
        let mut policy = RulesPolicy { rules, dns: vec![], reporter: Some(reporter.clone()) };
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

    #[test]
    fn the_summary_has_the_stages_if_enough_was_measured() {
        let cost = |stage, ns| StageTime { stage, passes: 1.0, ns };
        let stages_of = vec![
            cost(Stage::HostSent, 1e6),
            cost(Stage::DeviceReceived, 3e6),
            cost(Stage::Slept, 1e9),
        ];
        let account = |measured| {
            let mut account = Account::default();
            (account.stages, account.measured, account.visits) = (stages_of.clone(), measured, 400);
            account
        };
        let text = stages(Some(&account(100)));
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "CPU time by stage (100 of 400 turns measured):");
        assert!(
            lines[1].starts_with("   75.0 %        3ms  device_received   The device"),
            "{text}"
        );
        assert!(lines[2].starts_with("   25.0 %        1ms  host_sent         The host"), "{text}");
        assert_eq!(lines.len(), 3, "sleep is no work");
        assert_eq!(stages(Some(&account(ENOUGH_TURNS - 1))) + &stages(None), "");
    }

    #[test]
    fn destinations_are_bounded_and_those_of_most_bytes_are_kept() {
        let reporter = Reporter::default();
        let to = |n: u32| SocketAddr::new(IpAddr::from((n + (10 << 24)).to_be_bytes()), 80);
        let decoys = 4 * MAX_DESTINATIONS as u32;
        for n in 0..decoys {
            reporter.at(Protocol::Tcp, to(n), |t| (t.flows, t.bytes_out) = (1, 10));
            if n == decoys / 2 {
                let large = "192.0.2.1:443".parse().unwrap();
                reporter.at(Protocol::Tcp, large, |t| (t.flows, t.bytes_out) = (1, 1_000_000));
            }
        }
        let mut text = String::new();
        reporter.write_destinations(&mut text);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), SHOWN + 2, "{text}");
        assert!(lines[0].contains("192.0.2.1:443"), "{text}");
        assert!(
            lines[SHOWN].starts_with("  and ") && lines[SHOWN].ends_with(" other destinations")
        );
        assert!(lines[SHOWN + 1].starts_with("  and destinations with fewer bytes ("), "{text}");
        let all = reporter.destinations.lock().unwrap();
        let flows = all.kept.values().map(|t| t.flows).sum::<u64>() + all.others.flows;
        assert!(all.kept.len() <= MAX_DESTINATIONS);
        assert_eq!(flows, u64::from(decoys) + 1, "none is lost");
    }

    #[test]
    fn denied_names_are_bounded_and_what_is_left_out_is_counted() {
        let reporter = Reporter::default();
        for n in 0..MAX_DESTINATIONS + 5 {
            reporter.deny_name(&format!("n{n}.example"));
        }
        (0..3).for_each(|_| reporter.deny_name("n9.example"));
        let mut text = String::new();
        reporter.write_denied_names(&mut text);
        assert!(text.starts_with("  name n9.example: denied 4 times\n"), "{text}");
        assert!(text.ends_with("  and names beyond 4096: denied 5 times\n"), "{text}");
    }
}
