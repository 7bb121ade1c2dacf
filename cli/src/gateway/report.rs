//! The summary of what a guest reached.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use fulmar::stat::ledger::{Account, Stage, StageTime};
use fulmar_gateway::policy::Protocol;
use fulmar_gateway::splice::Counters;
use fulmar_gateway::stat::{Direction, FlowStat, Refusal, Stat, Summary};
use nix::time::{ClockId, clock_gettime};

use super::audit::receipt::Work;
use crate::format;

/// Most destinations and denied names with counts of their own; the others are counted together.
const MAX_DESTINATIONS: usize = 4096;
/// Lines of each list of the summary.
const SHOWN: usize = 10;
/// Measured turns of the loop at least before shares are printed.
const ENOUGH_TURNS: u64 = 10;

/// Flows to one destination.
#[derive(Clone, Debug, Default)]
pub(super) struct Tally {
    pub(super) name: Option<String>,
    /// The name is the word of a DNS server that the guest has chosen.
    pub(super) is_claimed: bool,
    flows: u64,
    pub(super) denied: u64,
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
    pub(super) fn at(&self, protocol: Protocol, to: SocketAddr, change: impl FnOnce(&mut Tally)) {
        let mut all = self.destinations.lock().unwrap_or_else(PoisonError::into_inner);
        change(all.at(protocol, to));
    }

    /// Counts a refusal by a rule. There are no more entries than rules.
    pub(super) fn deny_by(&self, rule: &str) {
        let mut all = self.denied_by.lock().unwrap_or_else(PoisonError::into_inner);
        *all.entry(rule.to_owned()).or_default() += 1;
    }

    /// The rules that have refused something, the busiest first.
    pub(super) fn write_denied_by(&self, text: &mut String) {
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

    pub(super) fn deny_name(&self, name: &str) {
        let mut all = self.denied_names.lock().unwrap_or_else(PoisonError::into_inner);
        if all.kept.len() < MAX_DESTINATIONS || all.kept.contains_key(name) {
            *all.kept.entry(name.to_owned()).or_default() += 1;
        } else {
            all.others += 1;
        }
    }

    pub(super) fn write_denied_names(&self, text: &mut String) {
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

    pub(super) fn count(&self, flow: &FlowStat) {
        if flow.direction == Direction::Out {
            self.at(flow.protocol, flow.peer, |tally| {
                tally.flows += 1;
                tally.bytes_out += flow.bytes_out;
                tally.bytes_in += flow.bytes_in;
                tally.open_for += flow.age;
            });
        }
    }

    /// What the guest did at each destination.
    pub(super) fn work(&self) -> Vec<Work> {
        let all = self.destinations.lock().unwrap_or_else(PoisonError::into_inner);
        let work = |to, tally: &Tally| Work {
            to,
            name: tally.name.clone(),
            flows: tally.flows,
            denied: tally.denied,
            bytes_out: tally.bytes_out,
            bytes_in: tally.bytes_in,
        };
        let others = (all.moved > 0).then(|| work(None, &all.others));
        all.kept.iter().map(|(to, tally)| work(Some(*to), tally)).chain(others).collect()
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

    pub(super) fn write_destinations(&self, text: &mut String) {
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
        "  {what}: {}{denied}, {} out, {} in, open for {open_for:.3} s",
        format::count(tally.flows, "flow"),
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::IpAddr;

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
