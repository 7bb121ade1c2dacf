//! The messages of pesto(1), which shows and changes the published ports of a running pasta(1): its protocol of version 2.
//!
//! ```text
//!   gateway ──► pesto   "basil:s\0", the version, the bytes of a table's name (128) and of an interface's (16);
//!                       of each table its number, its name, its capabilities, the count of its rules, the rules; 0
//!   pesto ──► gateway   of each table its number, the count of its rules, the rules; 0
//! ```
//!
//! The table HOST has the ports of the host (`-t`, `-u`), the table SPLICE has the ports of the guest's loopback (`-T`,
//! `-U`). A rule is a range of ports in 56 bytes: the address, the address of the target, the interface, the first port, the last one, the
//! first one of the target, the protocol, flags. Numbers are big-endian; an IPv4 address is a mapped one.
//!
//! pesto reads port specifications itself, and sends the tables back as they are to be. It does not wait for an answer,
//! and there is none. A message of pesto is at most [`MOST_BYTES`] long, and one error in it refuses all of it.
//!
//! Sources: pesto(1) of passt 0.0~git20261002.cba3570, and its bytes.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ops::RangeInclusive;

use crate::policy::Protocol;
use crate::ports::{Bind, Forward, PortSpec, Ports};

/// Rules of a table at most.
pub const MOST_RULES: usize = 255;
/// Bytes of a message of pesto at most.
pub const MOST_BYTES: usize = 2 * (1 + COUNT_BYTES + MOST_RULES * RULE_BYTES) + 1;

const MAGIC: [u8; 8] = *b"basil:s\0";
const VERSION: u32 = 2;
const NAME_BYTES: usize = 128;
const INTERFACE_BYTES: usize = 16;
const COUNT_BYTES: usize = 4;
const RULE_BYTES: usize = 56;
const HOST: (u8, &[u8]) = (1, b"HOST");
const GUEST: (u8, &[u8]) = (3, b"SPLICE");
const END: u8 = 0;
/// The interface that rules of the table SPLICE name; here they name none.
const LOOPBACK: &str = "lo";

/// The flags of a rule: at all addresses of both IP versions, as far as they can be bound, where the target listens.
const ANY_VERSION: u8 = 1;
const OPTIONAL: u8 = 2;
const AUTO: u8 = 4;

/// What a gateway can do for a table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Capabilities {
    /// IPv4.
    pub v4: bool,
    /// IPv6.
    pub v6: bool,
    /// TCP ports.
    pub tcp: bool,
    /// UDP ports.
    pub udp: bool,
    /// Ports on which the target listens (`auto`).
    pub auto: bool,
}

impl Capabilities {
    fn bits(self) -> u32 {
        const INTERFACES: bool = true;
        let all = [self.v4, self.v6, self.tcp, self.udp, self.auto, INTERFACES];
        (0..).zip(all).map(|(bit, is_set)| u32::from(is_set) << bit).sum()
    }

    /// The address of a rule that a specification binds nowhere in particular.
    fn any(self) -> Option<IpAddr> {
        match (self.v4, self.v6) {
            (true, false) => Some(Ipv4Addr::UNSPECIFIED.into()),
            (false, true) => Some(Ipv6Addr::UNSPECIFIED.into()),
            _ => None,
        }
    }
}

/// The two tables.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Tables {
    /// Ports of the host.
    pub host: Vec<Rule>,
    /// Ports of the guest's loopback interface.
    pub guest: Vec<Rule>,
}

/// A range of ports.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Rule {
    /// TCP or UDP.
    pub protocol: Protocol,
    /// Where it is bound.
    pub bind: Bind,
    /// The ports.
    pub from: RangeInclusive<u16>,
    /// The port to which the first one leads; the others follow in order.
    pub to: u16,
    /// The address to which they lead; without one that of the other side.
    pub to_address: Option<IpAddr>,
    /// A port that cannot be bound is left out without a message.
    pub is_optional: bool,
    /// A port is published while the other side listens on it.
    pub is_auto: bool,
}

impl Rule {
    fn read(bytes: &[u8; RULE_BYTES]) -> Result<Rule, String> {
        let [address, target] = [0, 16].map(|at| Ipv6Addr::from(part::<16>(bytes, at)));
        let interface = read_interface(part(bytes, 32))?;
        let [a, b, c, d, e, f, protocol, flags] = part(bytes, 48);
        let port = |high, low| u16::from_be_bytes([high, low]);
        let (first, last, to) = (port(a, b), port(c, d), port(e, f));
        if first == 0 || last < first || to == 0 || to.checked_add(last - first).is_none() {
            return Err(format!("invalid ports {first}-{last}:{to}"));
        }
        if flags & !(ANY_VERSION | OPTIONAL | AUTO) != 0 {
            return Err(format!("unknown flags {flags:#x}"));
        }
        let protocol = match libc::c_int::from(protocol) {
            libc::IPPROTO_TCP => Protocol::Tcp,
            libc::IPPROTO_UDP => Protocol::Udp,
            other => return Err(format!("unknown protocol {other}")),
        };
        let address = address.to_canonical();
        let to_address = Some(target.to_canonical()).filter(|a| !a.is_unspecified());
        let is_any = flags & ANY_VERSION != 0;
        let is_alike = to_address.is_none_or(|to| !is_any && to.is_ipv4() == address.is_ipv4());
        if is_any && address != Ipv6Addr::UNSPECIFIED || !is_alike {
            return Err(format!("{address} is not of both IP versions, or not of its target's"));
        }
        if address.is_multicast() || to_address.is_some_and(|to| to.is_multicast()) {
            return Err("a multicast address".into());
        }
        let address = Some(address).filter(|_| !is_any);
        Ok(Rule {
            protocol,
            bind: Bind { address, interface },
            from: first..=last,
            to,
            to_address,
            is_optional: flags & OPTIONAL != 0,
            is_auto: flags & AUTO != 0,
        })
    }

    fn write(&self, out: &mut Vec<u8>, is_guests: bool) {
        let octets = |address: IpAddr| match address {
            IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
            IpAddr::V6(v6) => v6.octets(),
        };
        let none = IpAddr::V6(Ipv6Addr::UNSPECIFIED);
        out.extend(octets(self.bind.address.unwrap_or(none)));
        out.extend(octets(self.to_address.unwrap_or(none)));
        let is_anywhere = self.bind.address.is_none_or(|a| a.is_unspecified());
        let loopback = if is_guests && is_anywhere { LOOPBACK } else { "" };
        let interface = self.bind.interface.as_deref().unwrap_or(loopback);
        write_name(out, interface.as_bytes(), INTERFACE_BYTES);
        let ports = [*self.from.start(), *self.from.end(), self.to];
        out.extend(ports.map(u16::to_be_bytes).concat());
        let is_tcp = self.protocol == Protocol::Tcp;
        let protocol = if is_tcp { libc::IPPROTO_TCP } else { libc::IPPROTO_UDP };
        let flag = |is_set: bool, flag: u8| if is_set { flag } else { 0 };
        let flags = flag(self.bind.address.is_none(), ANY_VERSION)
            | flag(self.is_optional, OPTIONAL)
            | flag(self.is_auto, AUTO);
        out.extend([protocol as u8, flags]);
    }

    /// Checks whether a gateway can have the rule beside others.
    ///
    /// # Errors
    /// A sentence: the gateway has no such protocol or IP version, or a port is in another rule, too.
    pub fn check<'a>(
        &self,
        caps: Capabilities,
        mut others: impl Iterator<Item = &'a Rule>,
    ) -> Result<(), String> {
        let has_version = match self.bind.address {
            Some(address) if address.is_ipv4() => caps.v4,
            Some(_) => caps.v6,
            None => caps.v4 && caps.v6,
        };
        let has_protocol = if self.protocol == Protocol::Tcp { caps.tcp } else { caps.udp };
        if !has_version || !has_protocol {
            return Err("the gateway was started without this protocol or IP version".into());
        }
        let is_plain = self.bind.address.is_none_or(|a| a.is_unspecified())
            && self.bind.interface.is_none()
            && self.to_address.is_none()
            && self.to == *self.from.start();
        if self.is_auto && !(caps.auto && is_plain) {
            return Err("`auto` is supported without an address, an interface and a target".into());
        }
        match others.find(|other| self.meets(other)) {
            Some(other) => Err(format!("{other} is published, too")),
            None => Ok(()),
        }
    }

    fn meets(&self, other: &Rule) -> bool {
        self.protocol == other.protocol
            && self.from.start() <= other.from.end()
            && other.from.start() <= self.from.end()
            && self.bind.meets(&other.bind)
    }

    /// The bindings, in order; none of a rule of `auto`.
    pub fn forwards(&self) -> impl Iterator<Item = Forward> + '_ {
        let first = *self.from.start();
        self.from.clone().filter(|_| !self.is_auto).map(move |port| Forward {
            bind: self.bind.clone(),
            from: port,
            to: self.to + (port - first),
            to_address: self.to_address,
            is_optional: self.is_optional,
        })
    }
}

/// In the syntax of the options: `tcp 127.0.0.1/8080:80`.
impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Rule { bind, from, to, to_address, .. } = self.clone();
        let ports = Ports { bind, from, to, to_address, excluded: Vec::new() };
        let auto = if self.is_auto { ",auto" } else { "" };
        write!(f, "{} {ports}{auto}", self.protocol.name())
    }
}

/// Bytes of a rule: `at` is a constant within it.
fn part<const N: usize>(rule: &[u8; RULE_BYTES], at: usize) -> [u8; N] {
    std::array::from_fn(|n| rule[at + n])
}

fn read_interface(bytes: [u8; INTERFACE_BYTES]) -> Result<Option<String>, String> {
    let end = bytes.iter().position(|b| *b == 0).ok_or("the name of an interface has no end")?;
    let name = bytes.get(..end).unwrap_or_default();
    if !name.iter().all(|b| b.is_ascii_graphic() && *b != b'/') || matches!(name, b"." | b"..") {
        return Err("invalid name of an interface".into());
    }
    Ok(Some(String::from_utf8_lossy(name).into_owned()).filter(|name| !name.is_empty()))
}

/// Writes a name, or so much of it as there is space before the final zero.
fn write_name(out: &mut Vec<u8>, name: &[u8], bytes: usize) {
    let padded = name.iter().take(bytes - 1).copied().chain(std::iter::repeat(0));
    out.extend(padded.take(bytes));
}

/// The ports of an option as pesto's rules.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Specs {
    /// What the gateway can do.
    pub capabilities: Capabilities,
    /// The ephemeral ports of the host, which `auto` and `all` leave out.
    pub ephemeral: RangeInclusive<u16>,
}

impl Specs {
    /// The rules of a specification, as pesto makes them of the same text.
    pub fn rules(&self, protocol: Protocol, spec: &PortSpec) -> Vec<Rule> {
        match spec {
            PortSpec::None => Vec::new(),
            PortSpec::Auto => self.all(protocol, &Bind::default(), &[], true),
            PortSpec::All { bind, excluded } => self.all(protocol, bind, excluded, false),
            PortSpec::Ports(ranges) => {
                ranges.iter().flat_map(|ports| self.some(protocol, ports)).collect()
            }
        }
    }

    fn all(
        &self,
        protocol: Protocol,
        bind: &Bind,
        excluded: &[RangeInclusive<u16>],
        is_auto: bool,
    ) -> Vec<Rule> {
        let excluded = [excluded, std::slice::from_ref(&self.ephemeral)].concat();
        let (bind, from) = (bind.clone(), 1..=u16::MAX);
        let ports = Ports { bind, from, to: 1, to_address: None, excluded };
        let optional = |rule| Rule { is_optional: true, is_auto, ..rule };
        self.some(protocol, &ports).into_iter().map(optional).collect()
    }

    /// The rules of a range: one for each part between exclusions.
    fn some(&self, protocol: Protocol, ports: &Ports) -> Vec<Rule> {
        let mut bind = ports.bind.clone();
        bind.address = bind.address.or(self.capabilities.any());
        let rule = |from: RangeInclusive<u16>| Rule {
            protocol,
            bind: bind.clone(),
            to: ports.to + (from.start() - ports.from.start()),
            from,
            to_address: ports.to_address,
            is_optional: false,
            is_auto: false,
        };
        parts(&ports.from, &ports.excluded).into_iter().map(rule).collect()
    }
}

/// The parts of a range that no exclusion has.
fn parts(
    range: &RangeInclusive<u16>,
    excluded: &[RangeInclusive<u16>],
) -> Vec<RangeInclusive<u16>> {
    let mut excluded = excluded.to_vec();
    excluded.sort_by_key(|range| *range.start());
    let (mut next, mut parts) = (u32::from(*range.start()), Vec::new());
    let end = u32::from(*range.end());
    let mut until = |last: u32, after: u32| {
        if let (Ok(first), Ok(last)) = (u16::try_from(next), u16::try_from(last.min(end))) {
            parts.extend(Some(first..=last).filter(|part| !part.is_empty()));
        }
        next = next.max(after);
    };
    for range in &excluded {
        until(u32::from(*range.start()).saturating_sub(1), u32::from(*range.end()) + 1);
    }
    until(end, end + 1);
    parts
}

/// What a gateway sends to pesto.
pub fn greeting(capabilities: Capabilities, tables: &Tables) -> Vec<u8> {
    let mut out = MAGIC.to_vec();
    let sizes = [VERSION, NAME_BYTES as u32, INTERFACE_BYTES as u32];
    out.extend(sizes.map(u32::to_be_bytes).concat());
    for ((number, name), rules) in [(HOST, &tables.host), (GUEST, &tables.guest)] {
        out.push(number);
        write_name(&mut out, name, NAME_BYTES);
        out.extend(capabilities.bits().to_be_bytes());
        write_rules(&mut out, rules, number == GUEST.0);
    }
    out.push(END);
    out
}

/// What pesto sends for these tables.
pub fn update(tables: &Tables) -> Vec<u8> {
    let mut out = Vec::new();
    for ((number, _), rules) in [(HOST, &tables.host), (GUEST, &tables.guest)] {
        out.push(number);
        write_rules(&mut out, rules, number == GUEST.0);
    }
    out.push(END);
    out
}

fn write_rules(out: &mut Vec<u8>, rules: &[Rule], is_guests: bool) {
    let rules = rules.get(..MOST_RULES).unwrap_or(rules);
    out.extend((rules.len() as u32).to_be_bytes());
    rules.iter().for_each(|rule| rule.write(out, is_guests));
}

/// Reads what pesto has sent so far. `None`: the message is not whole yet. A table that it leaves out is empty.
///
/// # Errors
/// A sentence: no gateway can have these tables.
pub fn read(mut bytes: &[u8]) -> Result<Option<Tables>, String> {
    let mut found: [Option<&[u8]>; 2] = [None; 2];
    loop {
        let Some((&number, rest)) = bytes.split_first() else { return Ok(None) };
        let table = match number {
            END => break,
            number if number == HOST.0 => &mut found[0],
            number if number == GUEST.0 => &mut found[1],
            other => return Err(format!("table {other} does not exist")),
        };
        let Some((count, rest)) = rest.split_first_chunk::<COUNT_BYTES>() else { return Ok(None) };
        let count = u32::from_be_bytes(*count) as usize;
        if count > MOST_RULES || table.is_some() {
            return Err(format!("a table is given twice, or has more than {MOST_RULES} rules"));
        }
        let Some((rules, rest)) = rest.split_at_checked(count * RULE_BYTES) else {
            return Ok(None);
        };
        (*table, bytes) = (Some(rules), rest);
    }
    let [host, guest] = found.map(|rules| read_rules(rules.unwrap_or_default()));
    let (host, mut guest) = (host?, guest?);
    for bind in guest.iter_mut().map(|rule| &mut rule.bind) {
        bind.interface = bind.interface.take().filter(|name| name != LOOPBACK);
    }
    Ok(Some(Tables { host, guest }))
}

fn read_rules(bytes: &[u8]) -> Result<Vec<Rule>, String> {
    bytes.as_chunks::<RULE_BYTES>().0.iter().map(Rule::read).collect()
}

#[cfg(test)]
mod tests;
