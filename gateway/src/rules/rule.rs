//! One rule: what it names, and how it is written.

use std::fmt;
use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::str::FromStr;

use crate::policy::Protocol;
use crate::relay::dns::message::ends_in_number;

/// The host of a rule.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Host {
    Any,
    Prefix(IpAddr, u8),
    Name(String),
    /// Names below this one, which begins with a dot.
    Below(String),
}

/// The transports that a rule names, one bit for each.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Protocols(u8);

impl Protocols {
    pub(super) const NONE: Protocols = Protocols(0);
    pub(super) const ALL: Protocols = Protocols(0b111);

    pub(super) fn with(self, protocol: Protocol) -> Protocols {
        Protocols(self.0 | Protocols::bit(protocol))
    }

    const fn bit(protocol: Protocol) -> u8 {
        match protocol {
            Protocol::Tcp => 0b001,
            Protocol::Udp => 0b010,
            Protocol::Icmp => 0b100,
        }
    }

    fn have(self, protocol: Protocol) -> bool {
        self.0 & Protocols::bit(protocol) != 0
    }

    fn have_all(self, others: Protocols) -> bool {
        self.0 & others.0 == others.0
    }
}

/// One destination.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Rule {
    pub(super) host: Host,
    pub(super) ports: RangeInclusive<u16>,
    pub(super) protocols: Protocols,
    /// As it was written.
    pub(super) text: String,
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

pub(super) const ALL_PORTS: RangeInclusive<u16> = 0..=u16::MAX;

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
        Ok(Rule { host, ports, protocols: Protocols::ALL, text: text.to_owned() })
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
    if ends_in_number(labels) || !labels.split('.').all(is_label) {
        return None;
    }
    Some(if is_below { Host::Below(format!(".{labels}")) } else { Host::Name(name) })
}

impl Rule {
    /// Whether it names a port of a transport. `None`: that of an echo request, which every rule names.
    pub(super) fn has_port(&self, protocol: Protocol, port: Option<u16>) -> bool {
        self.protocols.have(protocol) && port.is_none_or(|p| self.ports.contains(&p))
    }

    /// Whether it names all ports of all transports.
    pub(super) fn has_all_ports(&self) -> bool {
        self.ports == ALL_PORTS && self.protocols == Protocols::ALL
    }

    /// Bits of an address that the rule names, as of an IPv6 one; `None`: it does not name the address.
    pub(super) fn bits_of(&self, to: IpAddr) -> Option<u8> {
        match self.host {
            Host::Prefix(prefix, length) if covers(prefix, length, to) => {
                Some(if prefix.is_ipv4() { 96 + length } else { length })
            }
            _ => None,
        }
    }

    /// Characters of a name that the rule names; `None`: it does not name it.
    pub(super) fn characters_of(&self, name: &str) -> Option<usize> {
        match &self.host {
            Host::Name(own) if own == name => Some(usize::MAX),
            Host::Below(end) if name.ends_with(end) => Some(end.len()),
            _ => None,
        }
    }

    /// Whether it is `*`.
    pub(super) fn is_everything(&self) -> bool {
        self.host == Host::Any && self.has_all_ports()
    }

    /// Whether an allowance is an exception from this denial: it names less, and decides before it.
    pub(super) fn has_exception(&self, allowed: &Rule) -> bool {
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
        has_ports && has_host && self.protocols.have_all(allowed.protocols)
    }

    pub(super) fn is_by_name(&self) -> bool {
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
