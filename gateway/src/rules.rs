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
//! Within a step options come before lines of a file. The rules are closed by [`Rules::close`], by `deny *`, and by an
//! allowance that is no exception from a denial of the same source, unless that source also has `allow *`. Allowances of
//! a file do not count where an option closes.
//!
//! A name is decided twice: when the guest asks for it (a name that no allowed destination can have is refused), and
//! when the guest connects to an address that an answer gave for the name. A host of many names is reached under each
//! of them as soon as one is allowed. Answers of a DNS server that the guest has chosen itself can only deny.

mod guarded;
mod named;
#[cfg(test)]
mod tests;

use std::fmt;
use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::OnceLock;

use crate::relay::dns::message::{
    TYPE_A, TYPE_AAAA, TYPE_CNAME, TYPE_HTTPS, TYPE_MX, TYPE_SRV, TYPE_SVCB,
};
pub(crate) use guarded::embedded_v4;

/// The host of a rule.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Host {
    Any,
    Prefix(IpAddr, u8),
    Name(String),
    /// Names below this one, which begins with a dot.
    Below(String),
}

/// One destination.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Rule {
    host: Host,
    ports: RangeInclusive<u16>,
    /// As it was written.
    text: String,
}

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
    NoNetwork(Source),
    /// No rule names the destination, and this one allows others.
    AllowList(Rule, Source),
    /// Addresses that are refused without a rule.
    Guarded(&'static str),
}

impl fmt::Display for Denial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (what, source) = match &self.0 {
            Why::Rule(rule, source) => (format!("deny {}", rule.text), source),
            Why::NoNetwork(source) => ("no-network".to_owned(), source),
            Why::AllowList(rule, source) => {
                f.write_str("default: closed by ")?;
                (format!("allow {}", rule.text), source)
            }
            Why::Guarded(what) => {
                return write!(f, "default: {what}; permit an address with --allow ADDRESS");
            }
        };
        match source {
            Source::Option => write!(f, "--{what}"),
            Source::Line { file, number } => write!(f, "{}:{number}: {what}", file.display()),
        }
    }
}

/// A rule, where it was given, and whether it refuses.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Entry {
    rule: Rule,
    source: Source,
    /// `None`: it allows.
    denial: Option<Denial>,
}

impl Entry {
    fn is_option(&self) -> bool {
        self.source == Source::Option
    }
}

/// A destination.
#[derive(Clone, Copy, Debug)]
pub struct Destination<'a> {
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
    /// The guest wrote to a name. The guest may be in league with its owner: private addresses are guarded, too. While
    /// rules name names, they are guarded of every destination that has a name.
    pub is_by_name: bool,
}

/// The destinations that a guest may reach. Default: all but guarded addresses.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Rules {
    entries: Vec<Entry>,
    /// `no-network` and `deny *`.
    closings: Vec<Closing>,
    /// Of the entries and closings.
    default: OnceLock<Option<Closing>>,
}

/// What refuses the destinations that no rule names.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Closing {
    denial: Denial,
    /// Allowances of a file do not count.
    is_option: bool,
}

/// A rule that means nothing: what is wrong with it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ParseRuleError(String);

impl fmt::Display for ParseRuleError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for ParseRuleError {}

const ALL_PORTS: RangeInclusive<u16> = 0..=u16::MAX;

impl FromStr for Rule {
    type Err = ParseRuleError;

    fn from_str(text: &str) -> Result<Rule, ParseRuleError> {
        let error = |what: &str| ParseRuleError(format!("invalid rule `{text}`: {what}"));
        let (host, ports) = split(text).ok_or_else(|| error("missing bracket"))?;
        let ports = match ports {
            None => ALL_PORTS,
            Some(ports) => parse_ports(ports).ok_or_else(|| {
                error(match ports.starts_with("//") {
                    true => "expected HOST or HOST:PORT, not a URL",
                    false => "expected a port or a range (1-65535) after the colon",
                })
            })?,
        };
        let host = parse_host(host).ok_or_else(|| {
            error("expected an address, a prefix such as 10.0.0.0/8, a name, *.name or *")
        })?;
        Ok(Rule { host, ports, text: text.to_owned() })
    }
}

/// Host and ports. An IPv6 address without brackets has no ports.
fn split(text: &str) -> Option<(&str, Option<&str>)> {
    if let Some(rest) = text.strip_prefix('[') {
        let (host, rest) = rest.split_once(']')?;
        return match rest.strip_prefix(':') {
            None if rest.is_empty() => Some((host, None)),
            ports => ports.map(|p| (host, Some(p))),
        };
    }
    Some(match text.split_once(':') {
        Some((host, ports)) if !ports.contains(':') => (host, Some(ports)),
        _ => (text, None),
    })
}

fn parse_ports(text: &str) -> Option<RangeInclusive<u16>> {
    let port = |text: &str| text.parse::<u16>().ok().filter(|p| *p != 0);
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let range = port(first)?..=port(last)?;
    (!range.is_empty()).then_some(range)
}

fn parse_host(text: &str) -> Option<Host> {
    if text == "*" {
        return Some(Host::Any);
    }
    let (address, length) = text.split_once('/').map_or((text, None), |(a, l)| (a, Some(l)));
    if let Ok(address) = address.parse::<IpAddr>() {
        let bits = if address.is_ipv4() { 32 } else { 128 };
        let length: u8 = length.map_or(Some(bits), |l| l.parse().ok().filter(|l| *l <= bits))?;
        return Some(match address.to_canonical() {
            // An IPv4-mapped prefix is one of IPv4.
            v4 @ IpAddr::V4(_) if address.is_ipv6() && length >= 96 => {
                Host::Prefix(v4, length - 96)
            }
            _ => Host::Prefix(address, length),
        });
    }
    let name = text.trim_end_matches('.').to_ascii_lowercase();
    let is_below = name.starts_with("*.");
    let labels = name.strip_prefix("*.").unwrap_or(&name);
    let is_label = |label: &str| {
        let is_part = |b: u8| b.is_ascii_alphanumeric() || b == b'-' || b == b'_';
        (1..=63).contains(&label.len()) && label.bytes().all(is_part)
    };
    // A last label of digits alone is a mistyped address.
    let is_number = labels.rsplit('.').next()?.bytes().all(|b| b.is_ascii_digit());
    if is_number || !labels.split('.').all(is_label) {
        return None;
    }
    Some(if is_below { Host::Below(format!(".{labels}")) } else { Host::Name(name) })
}

impl Rule {
    fn has_port(&self, port: Option<u16>) -> bool {
        port.is_none_or(|p| self.ports.contains(&p))
    }

    /// Bits of an address that the rule names, as of an IPv6 one; `None`: it does not name the address.
    fn bits_of(&self, to: IpAddr) -> Option<u8> {
        match self.host {
            Host::Prefix(prefix, length) if covers(prefix, length, to) => {
                Some(if prefix.is_ipv4() { 96 + length } else { length })
            }
            _ => None,
        }
    }

    /// Characters of a name that the rule names; `None`: it does not name it.
    fn characters_of(&self, name: &str) -> Option<usize> {
        match &self.host {
            Host::Name(own) if own == name => Some(usize::MAX),
            Host::Below(end) if name.ends_with(end) => Some(end.len()),
            _ => None,
        }
    }

    /// Whether it is `*`.
    fn is_everything(&self) -> bool {
        self.host == Host::Any && self.ports == ALL_PORTS
    }

    /// Whether an allowance is an exception from this denial: it names less, and decides before it.
    fn has_exception(&self, allowed: &Rule) -> bool {
        let (ports, of_allowed) = (&self.ports, &allowed.ports);
        let has_ports = ports.contains(of_allowed.start()) && ports.contains(of_allowed.end());
        let has_host = match (&self.host, &allowed.host) {
            (Host::Any, host) => *host != Host::Any,
            (Host::Prefix(prefix, length), Host::Prefix(own, longer)) => {
                length < longer && covers(*prefix, *length, *own)
            }
            (Host::Below(end), Host::Name(name)) => name.ends_with(end),
            (Host::Below(end), Host::Below(longer)) => end != longer && longer.ends_with(end),
            _ => false,
        };
        has_ports && has_host
    }

    fn is_by_name(&self) -> bool {
        matches!(self.host, Host::Name(_) | Host::Below(_))
    }
}

/// Whether the first `length` bits of both are equal. False for addresses of different versions.
pub(crate) fn covers(prefix: IpAddr, length: u8, address: IpAddr) -> bool {
    let (difference, bits) = match (prefix, address) {
        (IpAddr::V4(a), IpAddr::V4(b)) => (u128::from(a.to_bits() ^ b.to_bits()), 32),
        (IpAddr::V6(a), IpAddr::V6(b)) => (a.to_bits() ^ b.to_bits(), 128),
        _ => return false,
    };
    difference.checked_shr(bits - u32::from(length).min(bits)).unwrap_or(0) == 0
}

/// Types of records that a closed guest may ask for: addresses, and what leads to them.
const USUAL_TYPES: [u16; 7] =
    [TYPE_A, TYPE_AAAA, TYPE_CNAME, TYPE_MX, TYPE_SRV, TYPE_SVCB, TYPE_HTTPS];

impl Rules {
    /// Allows what a rule names. This closes the rules unless the rule is an exception from a denial.
    pub fn allow(&mut self, rule: Rule, source: Source) {
        self.add(Entry { rule, source, denial: None });
    }

    /// Refuses what a rule names. `*` on all ports is what [`Rules::close`] refuses.
    pub fn deny(&mut self, rule: Rule, source: Source) {
        let denial = Denial(Why::Rule(rule.clone(), source.clone()));
        if rule.is_everything() {
            return self.close_by(denial, &source);
        }
        self.add(Entry { rule, source, denial: Some(denial) });
    }

    /// Refuses what no rule names.
    pub fn close(&mut self, source: Source) {
        self.close_by(Denial(Why::NoNetwork(source.clone())), &source);
    }

    fn add(&mut self, entry: Entry) {
        self.default.take();
        self.entries.push(entry);
    }

    fn close_by(&mut self, denial: Denial, source: &Source) {
        self.default.take();
        self.closings.push(Closing { denial, is_option: *source == Source::Option });
    }

    /// What closes the rules: an option before a line of a file. `None`: destinations that no rule names are allowed.
    fn closing(&self) -> Option<&Closing> {
        let find = || {
            let of = |is_option| {
                let said = self.closings.iter().find(|c| c.is_option == is_option).cloned();
                said.or_else(|| self.allow_list(is_option))
            };
            of(true).or_else(|| of(false))
        };
        self.default.get_or_init(find).as_ref()
    }

    /// The first allowance of the options, or of the lines, that is no exception, unless there is `allow *`.
    fn allow_list(&self, is_option: bool) -> Option<Closing> {
        let entries = || self.entries.iter().filter(|e| e.is_option() == is_option);
        let mut allows = entries().filter(|e| e.denial.is_none());
        if allows.clone().any(|e| e.rule.is_everything()) {
            return None;
        }
        let is_exception = |allowed: &Entry| {
            entries().any(|e| e.denial.is_some() && e.rule.has_exception(&allowed.rule))
        };
        let first = allows.find(|e| !is_exception(e))?;
        let denial = Denial(Why::AllowList(first.rule.clone(), first.source.clone()));
        Some(Closing { denial, is_option })
    }

    /// Why a destination that no rule names is refused; `None`: it is allowed.
    fn closed(&self) -> Option<&Denial> {
        self.closing().map(|c| &c.denial)
    }

    /// The rules that count.
    fn entries(&self) -> impl Iterator<Item = &Entry> {
        let is_closed_by_option = self.closing().is_some_and(|c| c.is_option);
        self.entries
            .iter()
            .filter(move |e| e.denial.is_some() || e.is_option() || !is_closed_by_option)
    }

    /// The rule that refuses a destination. `None`: the guest may reach it.
    pub fn denial(&self, d: &Destination<'_>) -> Option<&Denial> {
        let to = d.to.to_canonical();
        let has_name = !d.names.is_empty() || !d.claimed.is_empty();
        let is_by_name = d.is_by_name || (has_name && self.have_names());
        let by_address = self.by_address(to, d.port, guarded::kind_of(to, d.is_host, is_by_name));
        if let Some(decided) = by_address {
            return decided;
        }
        let by_name = |name: &String| self.by_name(name, |e| e.rule.has_port(d.port));
        let claims = d.claimed.iter().filter_map(by_name);
        let decided = d.names.iter().filter_map(by_name);
        if let Some(denial) = decided.clone().chain(claims).flatten().next() {
            return Some(denial);
        }
        if decided.clone().next().is_some() {
            return None;
        }
        let of_any = self.entries().filter(|e| e.rule.host == Host::Any && e.rule.has_port(d.port));
        match of_any.max_by_key(|e| (e.is_option(), e.denial.is_some())) {
            Some(entry) => entry.denial.as_ref(),
            None => self.closed(),
        }
    }

    /// The decision of the rules by address: `Some(None)` allows.
    fn by_address(
        &self,
        to: IpAddr,
        port: Option<u16>,
        guarded: Option<(u8, &'static Denial)>,
    ) -> Option<Option<&Denial>> {
        let embedded = embedded_v4(to);
        let bits_of = |e: &Entry| {
            // The translator is not known, so that a form of an address can only be denied.
            let forms = embedded.iter().filter(|_| e.denial.is_some());
            let bits = forms.filter_map(|v4| e.rule.bits_of(*v4)).max();
            e.rule.bits_of(to).max(bits)
        };
        let of_port = self.entries().filter(|e| e.rule.has_port(port));
        let found =
            of_port.filter_map(|e| Some(((e.is_option(), bits_of(e)?, e.denial.is_some()), e)));
        match (found.max_by_key(|(rank, _)| *rank), guarded) {
            (Some(((_, bits, false), _)), Some((least, denial))) if bits < least => {
                Some(Some(denial))
            }
            (Some((_, entry)), _) => Some(entry.denial.as_ref()),
            (None, Some((_, denial))) => Some(Some(denial)),
            (None, None) => None,
        }
    }

    /// The decision about a name of the rules by name that `counts` accepts: `Some(None)` allows.
    fn by_name(&self, name: &str, counts: impl Fn(&Entry) -> bool) -> Option<Option<&Denial>> {
        let name = name.trim_end_matches('.').to_ascii_lowercase();
        let found = self.entries().filter(|e| counts(e)).filter_map(|e| {
            Some(((e.is_option(), e.rule.characters_of(&name)?, e.denial.is_some()), e))
        });
        found.max_by_key(|(rank, _)| *rank).map(|(_, entry)| entry.denial.as_ref())
    }

    /// The rule that refuses a client of a published port. Its address may be forged, and the guest's answers go there.
    /// Addresses that no rule names are admitted even where the rest is closed.
    pub fn client_denial(&self, from: IpAddr, port: u16) -> Option<&Denial> {
        let from = from.to_canonical();
        self.by_address(from, Some(port), guarded::metadata(from)).flatten()
    }

    /// The rule that refuses a message to a DNS server whose question cannot be read. `None`: the guest may send it.
    pub fn hidden_name_denial(&self) -> Option<&Denial> {
        let by_name = self.entries().filter(|e| e.rule.is_by_name());
        by_name.filter_map(|e| e.denial.as_ref()).next().or(self.closed())
    }

    /// The rule that refuses a question for records of a name. `None`: the guest may ask, since a destination of the
    /// name may be reachable.
    pub fn name_denial(&self, name: &str, record_type: u16) -> Option<&Denial> {
        // A denial of some ports leaves others.
        let counts = |e: &Entry| e.denial.is_none() || e.rule.ports == ALL_PORTS;
        let is_any_allowed =
            || self.entries().any(|e| e.rule.host == Host::Any && e.denial.is_none());
        match self.by_name(name, counts) {
            Some(Some(denial)) => Some(denial),
            None if !is_any_allowed() => self.closed(),
            _ => self.closed().filter(|_| !USUAL_TYPES.contains(&record_type)),
        }
    }

    /// Whether a name of an address is a reason to deny that none of the others is.
    pub fn keeps_name(&self, name: &str, known: &[String]) -> bool {
        let denials = self.entries.iter().filter(|e| e.denial.is_some());
        let mut of_name = denials.filter(|e| e.rule.characters_of(name).is_some());
        of_name.any(|e| !known.iter().any(|n| e.rule.characters_of(n).is_some()))
    }

    /// Whether a rule names a name.
    pub fn have_names(&self) -> bool {
        self.entries.iter().any(|e| e.rule.is_by_name())
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
