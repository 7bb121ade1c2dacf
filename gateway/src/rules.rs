//! Which destinations a guest may reach: rules by address, port and name.
//!
//! A rule is `HOST[:PORTS]`. HOST is an address, a prefix (`10.0.0.0/8`), a name, all names below one
//! (`*.example.org`), or `*`; an IPv6 address before a port stands in brackets. PORTS is a port or a range.
//!
//! The first of these that says something about a destination decides:
//!
//! 1. the rules by address: the one with the longest prefix; of equal prefixes the denial;
//! 2. guarded addresses are refused, unless a rule of 1 with a prefix at least as long allows them;
//! 3. the denials by name: for each name of the address the most specific rule, of equal ones the denial;
//! 4. the allowances by name, likewise;
//! 5. the rules with `*`; the denial first;
//! 6. the default: refused where the rules are closed, else allowed.
//!
//! Within a step options come before lines of a file. The rules are closed by [`Rules::close`], by `deny *`, and by any
//! allowance except an exception from a denial of the same source, unless that source also has `allow *`. Allowances of
//! a file do not count where an option closes.
//!
//! A name is decided twice: when the guest asks for it (a name that no allowed destination can have is refused), and
//! when the guest connects to an address that an answer gave for the name. A host of many names is reached under each
//! of them as soon as one is allowed. Answers of a DNS server that the guest has chosen itself can only deny.

pub mod file;
mod guarded;
mod index;
mod named;
mod rule;
#[cfg(test)]
mod tests;

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use smallvec::SmallVec;

use crate::allowance::Allowance;
use crate::policy::{NewFlow, Protocol};
use crate::relay::dns::message::{
    TYPE_A, TYPE_AAAA, TYPE_CNAME, TYPE_HTTPS, TYPE_MX, TYPE_SRV, TYPE_SVCB,
};
pub(crate) use guarded::embedded_v4;
use index::Index;
pub(crate) use rule::covers;
pub use rule::{ParseRuleError, Rule};

/// Where a rule was given.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Source {
    /// By an option of the command.
    Option,
    /// By a line of a file.
    Line {
        /// The file.
        file: PathBuf,
        /// The number of the line, from 1.
        number: usize,
    },
}

/// The reason of a refusal. `Display`: as it was given, for a file after `FILE:LINE: `.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Denial(Why);

#[derive(Clone, PartialEq, Eq, Debug)]
enum Why {
    Rule(Rule, Source),
    /// What closes the rest, as it is written.
    Said(String, Source),
    /// No rule names the destination, and this one allows others.
    AllowList(Rule, Source),
    /// Addresses that are refused without a rule.
    Guarded(&'static str),
}

impl fmt::Display for Denial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (what, source) = match &self.0 {
            Why::Rule(rule, source) => (format!("deny {}", rule.text), source),
            Why::Said(text, source) => (text.clone(), source),
            Why::AllowList(rule, source) => {
                f.write_str("default: closed by ")?;
                (format!("allow {}", rule.text), source)
            }
            Why::Guarded(what) => {
                return write!(f, "default: {what}; permit an address with --allow ADDRESS");
            }
        };
        source.write(f, &what)
    }
}

impl Source {
    fn write(&self, f: &mut fmt::Formatter<'_>, what: &str) -> fmt::Result {
        match self {
            Source::Option => write!(f, "--{what}"),
            Source::Line { file, number } => write!(f, "{}:{number}: {what}", file.display()),
        }
    }
}

/// A rule, where it was given, and whether it refuses.
#[derive(Clone, Debug)]
struct Entry {
    rule: Rule,
    source: Source,
    /// `None`: it allows.
    denial: Option<Denial>,
    /// A denial that no allowance is an exception from.
    is_strict: bool,
    /// What all flows that it allows share.
    allowance: Option<Arc<Allowance>>,
    /// The text of an allowance, once it was needed.
    shown: OnceLock<Arc<str>>,
}

impl Entry {
    fn new(rule: Rule, source: Source, denial: Option<Denial>) -> Entry {
        let shown = OnceLock::new();
        Entry { rule, source, denial, is_strict: false, allowance: None, shown }
    }

    fn is_option(&self) -> bool {
        self.source == Source::Option
    }
}

/// A destination.
#[derive(Clone, Copy, Debug)]
pub struct Destination<'a> {
    /// The transport.
    pub protocol: Protocol,
    /// Its address.
    pub to: IpAddr,
    /// Its port; `None`: that of an echo request, which every rule names.
    pub port: Option<u16>,
    /// The names of the address from the guest's resolvers.
    pub names: &'a [String],
    /// The names from other DNS servers.
    pub claimed: &'a [String],
    /// The address is one of the host's own.
    pub is_host: bool,
    /// The network of a link of the host in which the address is: private as one of [`Destination::is_by_name`].
    pub host_network: Option<(IpAddr, u8)>,
    /// The guest wrote to a name. The guest may be in league with its owner: private addresses are guarded, too. While
    /// rules name names, they are guarded of every destination that has a name.
    pub is_by_name: bool,
}

impl Destination<'_> {
    /// An address without a name, which is not the host's.
    pub fn new(protocol: Protocol, to: SocketAddr) -> Self {
        let port = (protocol != Protocol::Icmp).then_some(to.port());
        let (names, claimed) = (&[], &[]);
        Destination {
            protocol,
            to: to.ip(),
            port,
            names,
            claimed,
            is_host: false,
            host_network: None,
            is_by_name: false,
        }
    }
}

/// The step of the decision ([module](self)).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Step {
    /// A denial that comes before all other rules.
    Strict,
    /// The rules by address.
    Address,
    /// Addresses that are refused without a rule.
    Guarded,
    /// The rules by name.
    Name,
    /// The rules with `*`.
    Any,
    /// No rule names the destination.
    Default,
}

impl Step {
    /// What decides in this step.
    pub fn sentence(self) -> &'static str {
        match self {
            Step::Strict => "a denied domain decides before every other rule",
            Step::Address => "of the rules by address, the longest prefix decides",
            Step::Guarded => "these addresses are refused unless a rule by address allows them",
            Step::Name => "of the rules by name, the most specific one decides",
            Step::Any => "no rule by address or name matches, and a rule with `*` decides",
            Step::Default => "no rule matches",
        }
    }
}

/// What the rules say about a destination.
#[derive(Clone, Copy, Debug)]
pub struct Verdict<'a> {
    /// The step that decided.
    pub step: Step,
    /// Why the destination is refused; `None`: it is allowed.
    pub denial: Option<&'a Denial>,
    entry: Option<&'a Entry>,
}

impl<'a> Verdict<'a> {
    fn of(step: Step, entry: &'a Entry) -> Verdict<'a> {
        Verdict { step, denial: entry.denial.as_ref(), entry: Some(entry) }
    }

    /// Its `Display`. The text of an allowance is made once.
    pub fn text(&self) -> Arc<str> {
        match (self.denial, self.entry) {
            (None, Some(entry)) => Arc::clone(entry.shown.get_or_init(|| self.to_string().into())),
            _ => self.to_string().into(),
        }
    }

    /// The limits of the rule that allows it.
    pub fn allowance(&self) -> Option<&'a Arc<Allowance>> {
        self.entry?.allowance.as_ref()
    }
}

/// The rule that decided, as it was given.
impl fmt::Display for Verdict<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.denial, self.entry) {
            (Some(denial), _) => denial.fmt(f),
            (None, Some(entry)) => entry.source.write(f, &format!("allow {}", entry.rule.text)),
            (None, None) => f.write_str("default: open"),
        }
    }
}

/// The destinations that a guest may reach. Default: all but guarded addresses.
#[derive(Clone, Debug, Default)]
pub struct Rules {
    entries: Vec<Entry>,
    /// `no-network` and `deny *`.
    closings: Vec<Closing>,
    /// Of all of them, since the last change.
    compiled: OnceLock<Box<Compiled>>,
}

/// What a decision looks up.
#[derive(Clone, Debug)]
struct Compiled {
    index: Index,
    closing: Option<Closing>,
    /// The first denial by name.
    first_name_denial: Option<u32>,
    has_names: bool,
    has_strict: bool,
}

/// What refuses the destinations that no rule names.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Closing {
    denial: Denial,
    /// Allowances of a file do not count.
    is_option: bool,
}

/// The port of DNS.
const DNS_PORT: u16 = 53;
/// Types of records that a closed guest may ask for: addresses, and what leads to them.
const USUAL_TYPES: [u16; 7] =
    [TYPE_A, TYPE_AAAA, TYPE_CNAME, TYPE_MX, TYPE_SRV, TYPE_SVCB, TYPE_HTTPS];

/// A name as rules have it.
fn canonical_name(name: &str) -> String {
    name.trim_end_matches('.').to_ascii_lowercase()
}

impl Rules {
    /// Allows what a rule names. This closes the rules unless the rule is an exception from a denial.
    pub fn allow(&mut self, rule: Rule, source: Source) {
        self.add(Entry::new(rule, source, None));
    }

    /// Refuses what a rule names. `*` on all ports is what [`Rules::close`] refuses.
    pub fn deny(&mut self, rule: Rule, source: Source) {
        let denial = Denial(Why::Rule(rule.clone(), source.clone()));
        if rule.is_everything() {
            return self.close_by(denial, &source);
        }
        self.add(Entry::new(rule, source, Some(denial)));
    }

    /// Refuses what no rule names.
    pub fn close(&mut self, source: Source) {
        self.close_as("no-network", source);
    }

    /// Refuses what no rule names, as long as nothing else does: rules of all sources count. For a user who is asked about
    /// it ([`Step::Default`]).
    pub fn close_to_ask(&mut self) {
        self.compiled.take();
        let denial = Denial(Why::Said("ask".to_owned(), Source::Option));
        self.closings.push(Closing { denial, is_option: false });
    }

    /// `what`: how that was said.
    fn close_as(&mut self, what: &str, source: Source) {
        self.close_by(Denial(Why::Said(what.to_owned(), source.clone())), &source);
    }

    fn add(&mut self, entry: Entry) {
        self.compiled.take();
        self.entries.push(entry);
    }

    fn close_by(&mut self, denial: Denial, source: &Source) {
        self.compiled.take();
        self.closings.push(Closing { denial, is_option: *source == Source::Option });
    }

    fn compiled(&self) -> &Compiled {
        self.compiled.get_or_init(|| {
            let numbered = || (0..).zip(&self.entries);
            let index = Index::new(numbered().map(|(n, e)| (n, &e.rule)));
            let mut denied = numbered().filter(|(_, e)| e.rule.is_by_name() && e.denial.is_some());
            Box::new(Compiled {
                closing: self.closing(&index),
                first_name_denial: denied.next().map(|(n, _)| n),
                has_names: self.entries.iter().any(|e| e.rule.is_by_name()),
                has_strict: self.entries.iter().any(|e| e.is_strict),
                index,
            })
        })
    }

    /// What closes the rules: an option before a line of a file. `None`: destinations that no rule names are allowed.
    fn closing(&self, index: &Index) -> Option<Closing> {
        let of = |is_option| {
            let said = self.closings.iter().find(|c| c.is_option == is_option).cloned();
            said.or_else(|| self.allow_list(index, is_option))
        };
        of(true).or_else(|| of(false))
    }

    /// The first allowance of the options, or of the lines, except exceptions, unless there is `allow *`.
    fn allow_list(&self, index: &Index, is_option: bool) -> Option<Closing> {
        let of_source = self.entries.iter().filter(|e| e.is_option() == is_option);
        let mut allows = of_source.filter(|e| e.denial.is_none());
        if allows.clone().any(|e| e.rule.is_everything()) {
            return None;
        }
        let is_exception = |allowed: &Entry| {
            let around = index.around(&allowed.rule.host);
            let mut denials = around.iter().map(|n| &self.entries[*n as usize]);
            denials.any(|e| {
                let is_denial = e.denial.is_some() && e.is_option() == is_option;
                is_denial && e.rule.has_exception(&allowed.rule)
            })
        };
        let first = allows.find(|e| !is_exception(e))?;
        let denial = Denial(Why::AllowList(first.rule.clone(), first.source.clone()));
        Some(Closing { denial, is_option })
    }

    /// Why a destination that no rule names is refused; `None`: it is allowed.
    fn closed(&self) -> Option<&Denial> {
        self.compiled().closing.as_ref().map(|c| &c.denial)
    }

    /// Rules by their numbers, of those that count: allowances of a file do not where an option closes.
    fn counting(&self, numbers: impl Iterator<Item = u32>) -> impl Iterator<Item = (u32, &Entry)> {
        let is_closed_by_option = self.compiled().closing.as_ref().is_some_and(|c| c.is_option);
        let numbered = numbers.map(|n| (n, &self.entries[n as usize]));
        numbered.filter(move |(_, e)| e.denial.is_some() || e.is_option() || !is_closed_by_option)
    }

    /// The rule that refuses a destination. `None`: the guest may reach it.
    pub fn denial(&self, d: &Destination<'_>) -> Option<&Denial> {
        self.verdict(d).denial
    }

    /// What the rules say about a destination.
    pub fn verdict(&self, d: &Destination<'_>) -> Verdict<'_> {
        let to = d.to.to_canonical();
        let has_name = !d.names.is_empty() || !d.claimed.is_empty();
        let is_by_name = d.is_by_name || (has_name && self.have_names());
        let guarded = guarded::kind_of(to, d.is_host, is_by_name, d.host_network);
        let strict = || self.strict(Some(to), d);
        let by_address = || self.by_address(to, (d.protocol, d.port), guarded);
        strict().or_else(by_address).or_else(|| self.by_names(d)).unwrap_or_else(|| self.by_any(d))
    }

    /// The verdict on a name whose address is not known yet; the address of the destination does not count.
    pub fn verdict_of_name(&self, d: &Destination<'_>) -> Verdict<'_> {
        let strict = self.strict(None, d);
        strict.or_else(|| self.by_names(d)).unwrap_or_else(|| self.by_any(d))
    }

    /// What the rules say about a flow. `dns`: the addresses at which the gateway forwards DNS, where names decide.
    pub fn verdict_of_flow(&self, flow: &NewFlow<'_>, dns: &[IpAddr]) -> Verdict<'_> {
        let own = flow.name.map(|name| [name.to_owned()]);
        let at = if own.is_some() { flow.leads_to } else { flow.to };
        let destination = Destination {
            names: own.as_ref().map_or(flow.names, |own| own.as_slice()),
            claimed: flow.claimed_names,
            is_host: flow.is_host,
            host_network: flow.host_network,
            is_by_name: own.is_some(),
            ..Destination::new(flow.protocol, at)
        };
        // A proxy resolves the name.
        let verdict = match own.is_some() && flow.leads_to == flow.to {
            true => self.verdict_of_name(&destination),
            false => self.verdict(&destination),
        };
        let is_dns = flow.to.port() == DNS_PORT;
        // The names in DNS over TCP are not read.
        let hides_names = is_dns && flow.protocol == Protocol::Tcp;
        let hidden = || if hides_names { self.hidden_name_denial() } else { None };
        match verdict.denial {
            Some(_) if !is_dns || !dns.contains(&flow.to.ip()) => verdict,
            // Names decide there, whatever the rules say about the address.
            Some(_) => Verdict { step: Step::Default, denial: hidden(), entry: None },
            None => Verdict { denial: hidden(), ..verdict },
        }
    }

    /// A denial that comes before all other rules.
    fn strict(&self, to: Option<IpAddr>, d: &Destination<'_>) -> Option<Verdict<'_>> {
        let Compiled { index, has_strict: true, .. } = self.compiled() else { return None };
        let names: Vec<String> =
            d.names.iter().chain(d.claimed).map(|name| canonical_name(name)).collect();
        let by_name = names.iter().flat_map(|name| index.of_name(name));
        let by_address = to.into_iter().flat_map(|to| index.of_address(to));
        let all = index.of_any().chain(by_address).chain(by_name);
        let mut strict = all.map(|n| &self.entries[n as usize]).filter(|e| e.is_strict);
        let found = strict.find(|e| e.rule.has_port(d.protocol, d.port))?;
        Some(Verdict::of(Step::Strict, found))
    }

    /// What the rules by name say: a denial of one name before an allowance of another.
    fn by_names(&self, d: &Destination<'_>) -> Option<Verdict<'_>> {
        let by_name = |name: &String| self.by_name(name, |e| e.rule.has_port(d.protocol, d.port));
        let claims = d.claimed.iter().filter_map(by_name);
        let decided: SmallVec<[&Entry; 4]> = d.names.iter().filter_map(by_name).collect();
        let first = decided.first().copied();
        let denied = decided.into_iter().chain(claims).find(|e| e.denial.is_some());
        denied.or(first).map(|entry| Verdict::of(Step::Name, entry))
    }

    fn by_any(&self, d: &Destination<'_>) -> Verdict<'_> {
        let of_any = self.counting(self.compiled().index.of_any());
        let of_port = of_any.filter(|(_, e)| e.rule.has_port(d.protocol, d.port));
        match of_port.max_by_key(|(n, e)| (e.is_option(), e.denial.is_some(), *n)) {
            Some((_, entry)) => Verdict::of(Step::Any, entry),
            None => Verdict { step: Step::Default, denial: self.closed(), entry: None },
        }
    }

    /// What the rules by address, and the list of guarded ones, say.
    fn by_address(
        &self,
        to: IpAddr,
        (protocol, port): (Protocol, Option<u16>),
        guarded: Option<(u8, &'static Denial)>,
    ) -> Option<Verdict<'_>> {
        let index = &self.compiled().index;
        // The translator is not known, so that a form of an address can only be denied.
        let embedded = embedded_v4(to);
        let forms = embedded.iter().flat_map(|form| {
            let denials = self.counting(index.of_address(*form));
            denials.filter(|(_, e)| e.denial.is_some()).map(|found| (*form, found))
        });
        let all = self.counting(index.of_address(to)).map(|found| (to, found)).chain(forms);
        let of_port = all.filter(|(_, (_, e))| e.rule.has_port(protocol, port));
        let ranked = of_port.filter_map(|(form, (n, e))| {
            Some(((e.is_option(), e.rule.bits_of(form)?, e.denial.is_some(), n), e))
        });
        let refused =
            |denial| Some(Verdict { step: Step::Guarded, denial: Some(denial), entry: None });
        match (ranked.max_by_key(|(rank, _)| *rank), guarded) {
            (Some(((_, bits, false, _), _)), Some((least, denial))) if bits < least => {
                refused(denial)
            }
            (Some((_, entry)), _) => Some(Verdict::of(Step::Address, entry)),
            (None, Some((_, denial))) => refused(denial),
            (None, None) => None,
        }
    }

    /// The rule by name that `counts` accepts and decides about a name.
    fn by_name(&self, name: &str, counts: impl Fn(&Entry) -> bool) -> Option<&Entry> {
        let name = canonical_name(name);
        let found = self.counting(self.compiled().index.of_name(&name));
        let ranked = found.filter(|(_, e)| counts(e)).filter_map(|(n, e)| {
            Some(((e.is_option(), e.rule.characters_of(&name)?, e.denial.is_some(), n), e))
        });
        ranked.max_by_key(|(rank, _)| *rank).map(|(_, entry)| entry)
    }

    /// The rule that refuses a client of a published port. Its address may be forged, and the guest's answers go there.
    /// Addresses that no rule names are admitted even where the rest is closed.
    pub fn client_denial(&self, protocol: Protocol, from: SocketAddr) -> Option<&Denial> {
        let address = from.ip().to_canonical();
        let guarded = guarded::metadata(address);
        self.by_address(address, (protocol, Some(from.port())), guarded)?.denial
    }

    /// The rule that refuses a message to a DNS server whose question cannot be read. `None`: the guest may send it.
    pub fn hidden_name_denial(&self) -> Option<&Denial> {
        let first = self.compiled().first_name_denial;
        first.and_then(|n| self.entries[n as usize].denial.as_ref()).or(self.closed())
    }

    /// The rule that refuses a question for records of a name. `None`: the guest may ask, since a destination of the
    /// name may be reachable.
    pub fn name_denial(&self, name: &str, record_type: u16) -> Option<&Denial> {
        self.name_verdict(name, record_type).denial
    }

    /// What the rules say about a question for records of a name.
    pub fn name_verdict(&self, name: &str, record_type: u16) -> Verdict<'_> {
        // A denial of some ports leaves others.
        let counts = |e: &Entry| e.denial.is_none() || e.rule.has_all_ports();
        let is_strict = |e: &Entry| e.is_strict && e.rule.has_all_ports();
        let has_strict = self.compiled().has_strict;
        let strict = has_strict.then(|| self.by_name(name, is_strict)).flatten();
        let entry = strict.or_else(|| self.by_name(name, counts));
        let unusual = || self.closed().filter(|_| !USUAL_TYPES.contains(&record_type));
        match entry {
            Some(entry) if entry.denial.is_some() => Verdict::of(Step::Name, entry),
            Some(entry) => Verdict { step: Step::Name, denial: unusual(), entry: Some(entry) },
            None if self.is_any_allowed() => {
                Verdict { step: Step::Any, denial: unusual(), entry: None }
            }
            None => Verdict { step: Step::Default, denial: self.closed(), entry: None },
        }
    }

    fn is_any_allowed(&self) -> bool {
        self.counting(self.compiled().index.of_any()).any(|(_, e)| e.denial.is_none())
    }

    /// Whether a name of an address is a reason to deny that none of the others is.
    pub fn keeps_name(&self, name: &str, known: &[String]) -> bool {
        let of_name = self.compiled().index.of_name(name).map(|n| &self.entries[n as usize]);
        let mut denials = of_name.filter(|e| e.denial.is_some());
        denials.any(|e| !known.iter().any(|n| e.rule.characters_of(n).is_some()))
    }

    /// Whether a rule names a name.
    pub fn have_names(&self) -> bool {
        self.compiled().has_names
    }

    /// How many rules there are, without those that say what happens to the rest.
    pub fn len(&self) -> usize {
        self.entries.iter().filter(|e| !e.rule.is_everything()).count()
    }

    /// Whether what no rule names is refused.
    pub fn is_closed(&self) -> bool {
        self.closed().is_some()
    }

    /// Whether there is no rule.
    pub fn is_empty(&self) -> bool {
        self.closings.is_empty() && self.entries.is_empty()
    }

    /// Adds the lines of a file: `allow RULE`, `deny RULE`, `no-network`; `#` begins a comment.
    ///
    /// # Errors
    /// The number of the line and what is wrong with it.
    pub fn add_file(&mut self, text: &str, file: &Path) -> Result<(), String> {
        for (number, line) in (1..).zip(text.lines()) {
            let line = line.split('#').next().unwrap_or("");
            let words: Vec<&str> = line.split_whitespace().collect();
            let rule = |text: &str| text.parse::<Rule>().map_err(|e| format!("line {number}: {e}"));
            let source = || Source::Line { file: file.to_owned(), number };
            match words[..] {
                [] => {}
                ["allow", text] => self.allow(rule(text)?, source()),
                ["deny", text] => self.deny(rule(text)?, source()),
                ["no-network"] => self.close(source()),
                _ => {
                    let what = "expected `allow RULE`, `deny RULE` or `no-network`";
                    return Err(format!("line {number}: {what}"));
                }
            }
        }
        Ok(())
    }
}
