//! Which destinations a guest may reach: rules by address, port and name.
//!
//! A rule is `HOST[:PORTS]`. HOST is an address, a prefix (`10.0.0.0/8`), a name, all names below one
//! (`*.example.org`), or `*`; an IPv6 address before a port stands in brackets. PORTS is a port or a range. What
//! an allowing rule names is allowed, even if a denying rule names it, too; what neither names is as
//! [`Rules::close`] was called or not.
//!
//! A name is decided twice: when the guest asks for it (a name that no allowed destination can have is refused),
//! and when the guest connects to an address that it was told for the name. A host of many names is reached under
//! each of them as soon as one is allowed. What a DNS server says that the guest has chosen itself can only deny.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::str::FromStr;

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

/// A rule that refuses destinations. `Display`: as it was given, for a file behind `FILE:LINE: `.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Denial {
    /// What it refuses; `None`: everything (`no-network`).
    rule: Option<Rule>,
    source: Source,
}

impl fmt::Display for Denial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.source {
            Source::Option => f.write_str("--")?,
            Source::Line { file, number } => write!(f, "{}:{number}: ", file.display())?,
        }
        match &self.rule {
            Some(rule) => write!(f, "deny {}", rule.text),
            None => f.write_str("no-network"),
        }
    }
}

/// What a guest may reach. Default: everything.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Rules {
    /// Exceptions from everything else.
    allowed: Vec<Rule>,
    /// Exceptions from an open network.
    denied: Vec<Denial>,
    /// Why destinations that no rule names are refused; `None`: they are allowed.
    closed: Option<Denial>,
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
        let (host, ports) = split(text).ok_or_else(|| error("a bracket is missing"))?;
        let ports = match ports {
            None => ALL_PORTS,
            Some(ports) => parse_ports(ports).ok_or_else(|| {
                error(match ports.starts_with("//") {
                    true => "it is a URL: give its host alone, or HOST:PORT",
                    false => "after the colon comes a port or a range (1 to 65535)",
                })
            })?,
        };
        let host = parse_host(host).ok_or_else(|| {
            error("give an address, a prefix such as 10.0.0.0/8, a name, *.name or *")
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
    /// Whether the rule names a destination, which DNS has called these names.
    fn matches(&self, to: IpAddr, port: Option<u16>, names: &[String]) -> bool {
        port.is_none_or(|p| self.ports.contains(&p))
            && match &self.host {
                Host::Any => true,
                Host::Prefix(prefix, length) => covers(*prefix, *length, to.to_canonical()),
                Host::Name(_) | Host::Below(_) => names.iter().any(|n| self.has_name(n)),
            }
    }

    fn has_name(&self, name: &str) -> bool {
        let name = name.trim_end_matches('.').to_ascii_lowercase();
        match &self.host {
            Host::Any => true,
            Host::Name(own) => *own == name,
            Host::Below(end) => name.ends_with(end),
            Host::Prefix(..) => false,
        }
    }
}

/// The IPv4 address to which translators bring an IPv6 one: of NAT64's well-known prefix (RFC 6052 section 2.1), or of
/// 6to4 (RFC 3056 section 2).
fn embedded_v4(to: IpAddr) -> Option<IpAddr> {
    let IpAddr::V6(v6) = to else { return None };
    match v6.segments() {
        [0x64, 0xff9b, 0, 0, 0, 0, high, low] | [0x2002, high, low, ..] => {
            Some(Ipv4Addr::from(u32::from(high) << 16 | u32::from(low)).into())
        }
        _ => None,
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

impl Rules {
    /// Allows what a rule names, whatever other rules say.
    pub fn allow(&mut self, rule: Rule) {
        self.allowed.push(rule);
    }

    /// Refuses what a rule names.
    pub fn deny(&mut self, rule: Rule, source: Source) {
        self.denied.push(Denial { rule: Some(rule), source });
    }

    /// Refuses what no rule names.
    pub fn close(&mut self, source: Source) {
        self.closed.get_or_insert(Denial { rule: None, source });
    }

    /// What refuses an address and a port (none: ICMP), which the guest's resolvers have called these names and other
    /// DNS servers those `claimed`. `None`: the guest may reach them.
    pub fn denial(
        &self,
        to: IpAddr,
        port: Option<u16>,
        names: &[String],
        claimed: &[String],
    ) -> Option<&Denial> {
        if self.is_allowed(to, port, names) {
            return None;
        }
        let leads_to = embedded_v4(to);
        self.denied_by(|rule| {
            rule.matches(to, port, names)
                || rule.matches(to, port, claimed)
                || leads_to.is_some_and(|v4| rule.matches(v4, port, &[]))
        })
    }

    /// Whether a rule allows a destination by name, address or port.
    pub fn is_allowed(&self, to: IpAddr, port: Option<u16>, names: &[String]) -> bool {
        self.allowed.iter().any(|r| r.matches(to, port, names))
    }

    /// What may refuse the name of a question that cannot be read. `None`: the guest may ask.
    pub fn hidden_name_denial(&self) -> Option<&Denial> {
        if self.allowed.iter().any(|r| matches!(r.host, Host::Any | Host::Prefix(..))) {
            return None;
        }
        self.denied_by(|rule| rule.ports == ALL_PORTS && !matches!(rule.host, Host::Prefix(..)))
    }

    /// What refuses every destination of a name. `None`: the guest may ask for it, since one may be reachable.
    pub fn name_denial(&self, name: &str) -> Option<&Denial> {
        // An address may be allowed under any name.
        let may_be_allowed =
            self.allowed.iter().any(|r| r.has_name(name) || matches!(r.host, Host::Prefix(..)));
        if may_be_allowed {
            return None;
        }
        self.denied_by(|rule| rule.ports == ALL_PORTS && rule.has_name(name))
    }

    /// The first denying rule of which this is so, or `no-network`.
    fn denied_by(&self, names: impl Fn(&Rule) -> bool) -> Option<&Denial> {
        let denied = self.denied.iter().find(|denial| denial.rule.as_ref().is_some_and(&names));
        denied.or(self.closed.as_ref())
    }

    /// Whether everything is allowed.
    pub fn is_unrestricted(&self) -> bool {
        self.closed.is_none() && self.denied.is_empty()
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
                ["allow", text] => self.allow(rule(text)?),
                ["deny", text] => self.deny(rule(text)?, source()),
                ["no-network"] => self.close(source()),
                _ => {
                    let what = "a line is `allow RULE`, `deny RULE` or `no-network`";
                    return Err(format!("line {number}: {what}"));
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn rules(text: &str) -> Rules {
        let mut rules = Rules::default();
        rules.add_file(text, Path::new("/etc/rules")).unwrap();
        rules
    }

    fn allows(rules: &Rules, to: &str, port: u16, names: &[&str]) -> bool {
        let names: Vec<String> = names.iter().map(|n| n.to_string()).collect();
        rules.denial(to.parse().unwrap(), Some(port), &names, &[]).is_none()
    }

    fn allows_name(rules: &Rules, name: &str) -> bool {
        rules.name_denial(name).is_none()
    }

    #[test]
    fn what_is_refused_names_the_rule_and_its_line_or_option() {
        let mut rules = rules("# first\ndeny 10.0.0.0/8 # ours\nno-network\nallow 10.1.1.1\n");
        rules.deny("*.Example.Org:80-90".parse().unwrap(), Source::Option);
        rules.close(Source::Option);
        let denial = |to: &str, names: &[&str]| {
            let names: Vec<String> = names.iter().map(|n| n.to_string()).collect();
            rules.denial(to.parse().unwrap(), Some(80), &names, &[]).map(Denial::to_string)
        };
        assert_eq!(denial("10.1.1.1", &[]), None);
        assert_eq!(denial("10.1.1.2", &[]).as_deref(), Some("/etc/rules:2: deny 10.0.0.0/8"));
        let by_name = denial("192.0.2.1", &["www.example.org"]);
        assert_eq!(by_name.as_deref(), Some("--deny *.Example.Org:80-90"));
        assert_eq!(denial("192.0.2.1", &[]).as_deref(), Some("/etc/rules:3: no-network"));
        let mut named = Rules::default();
        named.deny("example.com".parse().unwrap(), Source::Option);
        let refused = named.name_denial("example.com").map(Denial::to_string);
        assert_eq!(refused.as_deref(), Some("--deny example.com"));
        named.close(Source::Option);
        let other = named.name_denial("example.net").map(Denial::to_string);
        assert_eq!(other.as_deref(), Some("--no-network"));
    }

    #[test]
    fn a_denied_ipv4_address_is_not_reached_by_an_ipv6_one_that_leads_there() {
        let rules = rules("deny 10.0.0.0/8:80\ndeny ::ffff:192.0.2.0/120\nallow 10.9.9.9");
        for to in ["10.1.2.3", "::ffff:10.1.2.3", "64:ff9b::10.1.2.3", "2002:a01:203:7::1"] {
            assert!(!allows(&rules, to, 80, &[]), "{to}");
            assert!(allows(&rules, to, 81, &[]), "{to}");
        }
        assert!(!allows(&rules, "192.0.2.1", 443, &[]) && allows(&rules, "192.0.3.1", 443, &[]));
        // It cannot allow: who translates is not known.
        assert!(allows(&rules, "10.9.9.9", 80, &[]));
        assert!(!allows(&rules, "64:ff9b::10.9.9.9", 80, &[]));
        assert!(
            allows(&rules, "64:ff9b::11.1.2.3", 80, &[])
                && allows(&rules, "2001:a01:203::1", 80, &[])
        );
    }

    #[test]
    fn a_name_that_cannot_be_read_is_refused_where_a_name_may_be() {
        let is_refused = |text: &str| rules(text).hidden_name_denial().is_some();
        assert!(is_refused("no-network\nallow example.org") && is_refused("deny *.example.org"));
        assert!(is_refused("deny *"));
        for text in ["", "deny 10.0.0.0/8", "deny example.org:80", "no-network\nallow 10.0.0.0/8"] {
            assert!(!is_refused(text), "{text}");
        }
    }

    #[test]
    fn an_allowing_rule_is_an_exception_from_a_denying_one() {
        let rules = rules("deny 10.0.0.0/8\nallow 10.1.2.3:443  # the proxy\n");
        assert!(allows(&rules, "192.0.2.1", 80, &[]));
        assert!(!allows(&rules, "10.1.2.3", 80, &[]));
        assert!(allows(&rules, "10.1.2.3", 443, &[]));
    }

    #[test]
    fn without_a_network_only_what_is_allowed_is_reached() {
        let rules = rules("no-network\nallow *.example.org:80-90\nallow [2001:db8::/32]:22");
        assert!(allows(&rules, "192.0.2.1", 80, &["www.example.org"]));
        assert!(!allows(&rules, "192.0.2.1", 91, &["www.example.org"]));
        assert!(!allows(&rules, "192.0.2.1", 80, &["example.org", "badexample.org"]));
        assert!(allows(&rules, "2001:db8::5", 22, &[]));
        assert!(rules.denial("192.0.2.1".parse().unwrap(), None, &[], &[]).is_some());
    }

    #[test]
    fn a_server_of_the_guests_own_choice_can_deny_but_not_allow() {
        let rules = rules("deny 10.0.0.0/8\ndeny ads.example.net\nallow *.example.org");
        let denial = |to: &str, names: &[String], claimed: &[String]| {
            rules.denial(to.parse().unwrap(), Some(80), names, claimed).map(Denial::to_string)
        };
        let (good, bad) = (["www.example.org".to_owned()], ["ads.example.net".to_owned()]);
        assert_eq!(denial("10.1.1.1", &good, &[]), None);
        assert!(denial("10.1.1.1", &[], &good).is_some_and(|d| d.ends_with("deny 10.0.0.0/8")));
        assert!(denial("192.0.2.1", &[], &bad).is_some_and(|d| d.ends_with("ads.example.net")));
        assert_eq!(denial("192.0.2.1", &good, &bad), None);
    }

    #[test]
    fn a_name_is_refused_if_nothing_under_it_can_be_reached() {
        let closed = rules("no-network\nallow Example.Org:443");
        assert!(allows_name(&closed, "example.org.") && !allows_name(&closed, "example.com"));
        let open = rules("deny example.com\ndeny ads.example.net:80");
        assert!(!allows_name(&open, "EXAMPLE.com") && allows_name(&open, "ads.example.net"));
        let address = rules("no-network\nallow 192.0.2.0/24");
        assert!(allows_name(&address, "anything.example"));
        assert!(Rules::default().is_unrestricted() && !open.is_unrestricted());
    }

    #[test]
    fn rules_that_mean_nothing_are_refused_with_their_line() {
        for text in [
            "",
            "1.2.3",
            "10.0.0.0/33",
            "a b",
            "[::1",
            "[::1]80",
            "x:0",
            "x:9-1",
            "x:y",
            "-.*",
            "*.*",
        ] {
            assert!(text.parse::<Rule>().is_err(), "{text}");
        }
        let error = Rules::default().add_file("allow *\npermit x\n", Path::new("r")).unwrap_err();
        assert!(error.starts_with("line 2: "), "{error}");
        let error = Rules::default().add_file("allow 1.2.3.4.5", Path::new("r")).unwrap_err();
        assert!(error.contains("line 1: invalid rule `1.2.3.4.5`"), "{error}");
    }

    #[test]
    fn an_ipv6_address_needs_no_brackets_without_a_port() {
        let host = |text: &str| text.parse::<Rule>().unwrap().host;
        assert_eq!(host("2001:db8::/32"), Host::Prefix("2001:db8::".parse().unwrap(), 32));
        assert_eq!(host("[::1]:80"), Host::Prefix("::1".parse().unwrap(), 128));
        assert_eq!(host("localhost:80"), Host::Name("localhost".into()));
        assert_eq!(host("::ffff:10.0.0.0/104"), Host::Prefix("10.0.0.0".parse().unwrap(), 8));
        assert_eq!(host("::ffff:0:0/80"), Host::Prefix("::ffff:0:0".parse().unwrap(), 80));
    }

    proptest! {
        #[test]
        fn no_text_panics(text in "[a-z0-9.:/\\[\\]*-]{0,24}") {
            if let Ok(rule) = text.parse::<Rule>() {
                rule.matches("10.0.0.1".parse().unwrap(), Some(80), &["a.b".into()]);
            }
        }
    }

    #[test]
    fn prefixes_cover_what_shares_their_bits() {
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        assert!(covers(ip("10.0.2.100"), 24, ip("10.0.2.2")));
        assert!(!covers(ip("10.0.2.100"), 32, ip("10.0.2.2")));
        assert!(covers(ip("10.0.2.100"), 0, ip("192.0.2.1")));
        assert!(covers(ip("fd00::1"), 64, ip("fd00::2")));
        assert!(!covers(ip("fd00::1"), 64, ip("10.0.0.1")));
    }
}
