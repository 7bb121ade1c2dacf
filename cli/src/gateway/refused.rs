//! Tells the user of a run what the rules have refused: a line at the first refusal, and one at the end.
//!
//! The lines name the option that would have allowed it. [`advice`] finds it by trial: the rules with that option are
//! asked the same question again, so that no option is named that would not help.

use std::collections::HashMap;
use std::fs::File;
use std::io::Write as _;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};

use fulmar_gateway::policy::Protocol;
use fulmar_gateway::rules::{Destination, Rules, Source};

use super::log::Log;
use super::plan::Plan;
use crate::format::{count, printable};

/// Most destinations with counts of their own; the others are counted together.
const MOST_DESTINATIONS: usize = 1024;
/// Destinations that the last line names.
const SHOWN: usize = 5;
/// The type of a question for an IPv4 address.
const TYPE_A: u16 = 1;

/// What was refused.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(super) enum What {
    /// To resolve a name.
    Name(String),
    /// A flow.
    Flow(Flow),
    /// A flow whose first bytes ask for another name, which no rule changes.
    Contradicted(Flow),
}

/// A flow that was refused.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(super) struct Flow {
    pub protocol: Protocol,
    /// The name that the guest asked for, if it is known.
    pub name: Option<String>,
    /// Its address, as the rules know it.
    pub at: SocketAddr,
    /// The address is one to which the name alone has led.
    pub is_by_name: bool,
    pub is_host: bool,
    /// The network of the host in which it is.
    pub host_network: Option<(IpAddr, u8)>,
}

impl What {
    /// As a user would write it.
    fn label(&self) -> String {
        let Flow { protocol, name, at, .. } = match self {
            What::Name(name) => return printable(name),
            What::Flow(flow) | What::Contradicted(flow) => flow,
        };
        let host = name.as_deref().map(printable);
        match (protocol, host) {
            (Protocol::Icmp, host) => {
                format!("{} (ping)", host.unwrap_or_else(|| at.ip().to_string()))
            }
            (Protocol::Udp, Some(host)) => format!("{host}:{} (UDP)", at.port()),
            (Protocol::Udp, None) => format!("{at} (UDP)"),
            (_, Some(host)) => format!("{host}:{}", at.port()),
            (_, None) => at.to_string(),
        }
    }

    /// The rules that might allow it, the narrowest first.
    fn candidates(&self) -> Vec<String> {
        match self {
            What::Name(name) => vec![name.clone()],
            What::Contradicted(_) => Vec::new(),
            What::Flow(Flow { protocol: Protocol::Icmp, name, at, .. }) => {
                name.iter().cloned().chain([at.ip().to_string()]).collect()
            }
            What::Flow(Flow { name, at, .. }) => {
                let by_name = name.iter().map(|name| format!("{name}:{}", at.port()));
                by_name.chain([at.to_string()]).collect()
            }
        }
    }

    fn is_allowed_by(&self, rules: &Rules) -> bool {
        match self {
            What::Name(name) => rules.name_denial(name, TYPE_A).is_none(),
            What::Contradicted(_) => false,
            What::Flow(flow) => {
                let Flow { protocol, name, at, is_by_name, is_host, host_network } = flow;
                let names = name.as_slice();
                let (is_host, host_network, is_by_name) = (*is_host, *host_network, *is_by_name);
                let to = Destination::new(*protocol, *at);
                rules
                    .denial(&Destination { names, is_host, host_network, is_by_name, ..to })
                    .is_none()
            }
        }
    }
}

/// The file whose line has refused: `a.toml` of `a.toml:2: default = "deny"` and of `default: closed by a.toml:1: allow x`.
/// `None`: an option has, whose IPv6 address may look like a file and a line.
fn file_of(by: &str) -> Option<&str> {
    let by = by.strip_prefix("default: closed by ").unwrap_or(by);
    let (file, rest) = by.split_once(':').filter(|_| !by.starts_with("--"))?;
    rest.split_once(':')?.0.parse::<u32>().ok().map(|_| file)
}

/// Where a rule would be added: to a file, else to the options.
fn source(file: Option<&str>) -> Source {
    file.map_or(Source::Option, |file| Source::Line { file: file.into(), number: 0 })
}

/// The rule that would allow it. `None`: no rule of this place does.
fn advice(rules: &Rules, what: &What, file: Option<&str>) -> Option<String> {
    what.candidates().into_iter().find(|text| {
        text.parse().is_ok_and(|rule| {
            let mut with = rules.clone();
            with.allow(rule, source(file));
            what.is_allowed_by(&with)
        })
    })
}

/// A name that no rule names.
const UNNAMED: &str = "unnamed.invalid";

/// The rules that would allow all of them that a rule of this place can allow, as options or as an addition to the file
/// whose rules the user has given: an option would close what the file allows. Empty: none does. Allowances close what
/// was open before, unless everything else is allowed, too.
fn how_to_allow(rules: &Rules, whats: &[&What], file: Option<&str>) -> String {
    let refused = whats.iter().filter(|what| !what.is_allowed_by(rules));
    let mut texts: Vec<String> = refused.filter_map(|what| advice(rules, what, file)).collect();
    texts.sort();
    texts.dedup();
    if let Some(file) = file.filter(|_| !texts.is_empty()) {
        let texts: Vec<String> = texts.iter().map(|rule| printable(rule)).collect();
        return format!("add {} to the allow rules of {}", texts.join(", "), printable(file));
    }
    let mut with = rules.clone();
    for rule in texts.iter().filter_map(|text| text.parse().ok()) {
        with.allow(rule, Source::Option);
    }
    let rest = What::Name(UNNAMED.to_owned());
    let closes = !rest.is_allowed_by(&with) && rest.is_allowed_by(rules);
    let mut options: Vec<String> =
        texts.iter().map(|rule| format!("--allow {}", printable(rule))).collect();
    options.extend(closes.then(|| "--allow '*'".to_owned()));
    options.join(" ")
}

/// What was refused, and how often.
#[derive(Default)]
struct List {
    kept: HashMap<What, u64>,
    /// In the order in which they came.
    order: Vec<What>,
    /// Refusals beyond [`MOST_DESTINATIONS`].
    others: u64,
    /// The file of the first rule that has refused, if it is of one.
    file: Option<String>,
    /// Rules that were read after the start.
    new_rules: Option<Rules>,
}

/// The refusals of a run. Clones share them.
#[derive(Clone)]
pub(super) struct Refused {
    list: Arc<Mutex<List>>,
    log: Log,
    name: Arc<str>,
}

impl Refused {
    /// For a plan with rules and without `--quiet`. `name`: the command, before the last line.
    pub(super) fn of(plan: &Plan, log: &Log, name: &str) -> Option<Refused> {
        let is_wanted = plan.rules.is_some() && !plan.process.quiet;
        is_wanted.then(|| Refused::new(log, name))
    }

    pub(super) fn new(log: &Log, name: &str) -> Refused {
        Refused { list: Arc::default(), log: log.clone(), name: name.into() }
    }

    /// For the end of the run.
    pub(super) fn last_words(self, plan: &Plan) -> Option<LastWords> {
        Some(LastWords { rules: Arc::new(plan.rules.clone()?), refused: self })
    }

    /// The last line is about these rules.
    pub(super) fn set_rules(&self, rules: &Rules) {
        let mut list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        list.new_rules = Some(rules.clone());
    }

    #[cfg(test)]
    pub(super) fn count(&self) -> u64 {
        self.list.lock().unwrap().kept.values().sum()
    }

    /// Counts a refusal, and tells the first one. `by`: the rule that has refused.
    pub(super) fn add(&self, rules: &Rules, what: What, by: &str) {
        let mut list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        if list.order.is_empty() {
            list.file = file_of(by).map(str::to_owned);
            self.log.fail(&first_line(rules, &what, by));
        }
        if let Some(count) = list.kept.get_mut(&what) {
            *count += 1;
        } else if list.order.len() < MOST_DESTINATIONS {
            list.order.push(what.clone());
            list.kept.insert(what, 1);
        } else {
            list.others += 1;
        }
    }
}

/// The last line.
#[derive(Clone)]
pub(super) struct LastWords {
    refused: Refused,
    rules: Arc<Rules>,
}

impl LastWords {
    /// Writes it. Nothing where the first line has said it all.
    pub(super) fn write(&self, out: &mut File) {
        let Refused { list, name, .. } = &self.refused;
        let list = list.lock().unwrap_or_else(PoisonError::into_inner);
        if list.order.len() > 1 {
            let rules = list.new_rules.as_ref().unwrap_or(&self.rules);
            let line = format!("{name}: {}\n", last_line(rules, &list));
            // The reader may have given up.
            let _ = out.write_all(line.as_bytes());
        }
    }
}

fn first_line(rules: &Rules, what: &What, by: &str) -> String {
    let file = file_of(by);
    // Of a default the sentence itself says what to do.
    let by = printable(by.split(';').next().unwrap_or(by));
    let refused = match what {
        What::Name(name) => format!("refused to resolve {}", printable(name)),
        What::Flow(_) | What::Contradicted(_) => format!("refused {}", what.label()),
    };
    match how_to_allow(rules, &[what], file).as_str() {
        "" if file.is_some() => format!("{refused} ({by}); to allow it, change that rule"),
        "" => format!("{refused} ({by}); no --allow changes that"),
        how => format!("{refused} ({by}); to allow it: {how}"),
    }
}

fn last_line(rules: &Rules, list: &List) -> String {
    let is_flow = |what: &What| !matches!(what, What::Name(_));
    let refusals = |flows: bool| {
        let of_kind = list.kept.iter().filter(|(what, _)| is_flow(what) == flows);
        of_kind.map(|(_, count)| count).sum::<u64>()
    };
    let beyond = if list.others > 0 { " or more" } else { "" };
    let destinations = list.order.len();
    let what = match (refusals(true) + list.others, refusals(false)) {
        (flows, 0) => format!("{flows} connections to {destinations}{beyond} destinations"),
        (0, names) => format!("{names} lookups of {destinations}{beyond} names"),
        (flows, names) => {
            format!("{} and {}", count(flows, "connection"), count(names, "lookup"))
        }
    };
    let mut sorted: Vec<&What> = list.order.iter().collect();
    sorted.sort_by_key(|what| std::cmp::Reverse(list.kept.get(what)));
    let shown = &sorted[..sorted.len().min(SHOWN)];
    let labels = shown.iter().map(|what| match list.kept.get(what) {
        Some(count) if *count > 1 => format!("{} ({count})", what.label()),
        _ => what.label(),
    });
    let more = sorted.len() - shown.len();
    let labels = labels.collect::<Vec<_>>().join(", ");
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    let how = match how_to_allow(rules, shown, list.file.as_deref()).as_str() {
        "" => String::new(),
        options => format!("; to allow: {options}"),
    };
    format!("{what} were refused: {labels}{more}{how}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;
    use std::os::fd::OwnedFd;
    use std::path::Path;

    fn rules(text: &str) -> Rules {
        let mut rules = Rules::default();
        rules.add_file(text, Path::new("/r")).unwrap();
        rules
    }

    fn flow(name: Option<&str>, at: &str) -> What {
        let (protocol, is_by_name) = (Protocol::Tcp, name.is_some());
        let (name, at) = (name.map(str::to_owned), at.parse().unwrap());
        What::Flow(Flow { protocol, name, at, is_by_name, is_host: false, host_network: None })
    }

    #[test]
    fn what_a_file_refuses_is_allowed_in_the_file() {
        let name = |name: &str| What::Name(name.into());
        let of_file = rules("no-network\nallow example.org\ndeny evil.example");
        let line = first_line(&of_file, &name("other.example"), "/r:1: no-network");
        let how = "to allow it: add other.example to the allow rules of /r";
        assert_eq!(line, format!("refused to resolve other.example (/r:1: no-network); {how}"));
        let denied = first_line(&of_file, &name("evil.example"), "/r:3: deny evil.example");
        assert!(
            denied.ends_with("(/r:3: deny evil.example); to allow it, change that rule"),
            "{denied}"
        );
        assert_eq!(file_of("default: closed by a.toml:1: allow example.org"), Some("a.toml"));
        assert_eq!(file_of("default: closed by --allow 2001:4860::/32"), None);
        assert_eq!(file_of("--deny 2001:4860::/32"), None);
        let both = [&name("b.example"), &name("a.example")];
        let how = "add a.example, b.example to the allow rules of /r";
        assert_eq!(how_to_allow(&of_file, &both, Some("/r")), how);
    }

    #[test]
    fn the_option_that_is_named_would_allow_it() {
        let closed = rules("no-network\nallow example.org:80\ndeny evil.example");
        let option = |what: &What| advice(&closed, what, None);
        assert_eq!(option(&What::Name("other.example".into())).unwrap(), "other.example");
        let other_port = flow(Some("example.org"), "192.0.2.1:443");
        assert_eq!(option(&other_port).unwrap(), "example.org:443");
        assert_eq!(option(&flow(None, "192.0.2.1:22")).unwrap(), "192.0.2.1:22");
        assert_eq!(option(&flow(None, "[2001:db8::1]:22")).unwrap(), "[2001:db8::1]:22");
        let private = flow(Some("example.org"), "10.0.0.1:80");
        assert_eq!(option(&private).unwrap(), "10.0.0.1:80", "the name alone does not lead there");
        let ping = Flow {
            protocol: Protocol::Icmp,
            name: None,
            at: "192.0.2.1:0".parse().unwrap(),
            is_by_name: false,
            is_host: false,
            host_network: None,
        };
        assert_eq!(option(&What::Flow(ping)).unwrap(), "192.0.2.1");
    }

    #[test]
    fn an_option_that_would_close_the_rest_is_named_with_one_that_opens_it() {
        let what = flow(None, "169.254.169.254:80");
        assert_eq!(
            how_to_allow(&rules(""), &[&what], None),
            "--allow 169.254.169.254:80 --allow '*'"
        );
        assert_eq!(
            how_to_allow(&rules("no-network"), &[&what], None),
            "--allow 169.254.169.254:80"
        );
    }

    #[test]
    fn no_option_is_named_where_none_helps() {
        let mut denied = Rules::default();
        denied.deny("192.0.2.0/24".parse().unwrap(), Source::Option);
        denied.deny("evil.example".parse().unwrap(), Source::Option);
        assert_eq!(advice(&denied, &What::Name("evil.example".into()), None), None);
        let line = first_line(&denied, &What::Name("evil.example".into()), "--deny evil.example");
        assert_eq!(
            line,
            "refused to resolve evil.example (--deny evil.example); no --allow changes that"
        );
        assert_eq!(advice(&denied, &flow(None, "192.0.2.7:80"), None).unwrap(), "192.0.2.7:80");
    }

    #[test]
    fn the_first_refusal_and_all_of_them_are_told_in_one_line_each() {
        let closed = rules("no-network");
        let what = flow(Some("registry.npmjs.org"), "104.16.1.34:443");
        assert_eq!(
            first_line(&closed, &what, "--no-network"),
            "refused registry.npmjs.org:443 (--no-network); to allow it: --allow registry.npmjs.org:443"
        );
        let refused = Refused::new(&Log::to_stderr("t", true), "t");
        for what in [what.clone(), flow(None, "192.0.2.1:80"), what] {
            refused.add(&closed, what, "--no-network");
        }
        let line = |refused: &Refused| last_line(&closed, &refused.list.lock().unwrap());
        assert_eq!(
            line(&refused),
            "3 connections to 2 destinations were refused: registry.npmjs.org:443 (2), 192.0.2.1:80; to allow: \
             --allow 192.0.2.1:80 --allow registry.npmjs.org:443"
        );
        for n in 0..2 * MOST_DESTINATIONS {
            refused.add(&closed, What::Name(format!("n{n}.example")), "--no-network");
        }
        let text = line(&refused);
        assert!(text.starts_with("1029 connections and 1022 lookups"), "{text}");
        assert!(text.contains(" and 1019 more; to allow: --allow 192.0.2.1:80"), "{text}");
    }

    #[test]
    fn a_name_of_the_guests_writes_no_escape_sequences() {
        let what = What::Name("a\u{1b}[2J.example".into());
        let line = first_line(&rules("no-network"), &what, "/r\u{1b}:1: no-network");
        assert!(line.chars().all(|c| !c.is_control()), "{line:?}");
    }

    #[test]
    fn the_last_line_is_about_the_rules_that_were_read_last() {
        let closed = rules("no-network");
        let refused = Refused::new(&Log::to_stderr("t", true), "t");
        for at in ["192.0.2.1:80", "192.0.2.2:80"] {
            refused.add(&closed, flow(None, at), "--no-network");
        }
        let words = LastWords { refused: refused.clone(), rules: Arc::new(closed) };
        let said = || {
            let (mut reader, writer) = io::pipe().unwrap();
            words.write(&mut File::from(OwnedFd::from(writer)));
            io::read_to_string(&mut reader).unwrap()
        };
        assert!(said().ends_with("to allow: --allow 192.0.2.1:80 --allow 192.0.2.2:80\n"));
        refused.set_rules(&rules("allow *"));
        assert!(said().ends_with(" were refused: 192.0.2.1:80, 192.0.2.2:80\n"), "{}", said());
    }
}
