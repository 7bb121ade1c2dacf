//! Published ports, in the syntax of pasta(1): `none`, `auto`, `all`, or a list of
//! `[ADDRESS[%INTERFACE]/]FIRST[-LAST][:[TO_ADDRESS/]TO[-TO_LAST]]` with exclusions `~FIRST[-LAST]`.
//!
//! An exclusion holds for the whole option. Exclusions alone mean all other ports that are not ephemeral.
//! [`PortSpec::forwards`] resolves a specification to single bindings, so that the gateway handles one form.

use std::fmt;
use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::str::FromStr;

/// First port of the ephemeral range when the system does not say (RFC 6335 section 6; Linux's default range
/// begins at 32768).
pub(crate) const FIRST_EPHEMERAL_PORT: u16 = 32768;

/// The ports of one `-t`, `-u`, `-T` or `-U`.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub enum PortSpec {
    /// No port.
    #[default]
    None,
    /// The ports on which the other side listens, looked up again every second.
    Auto,
    /// Every port below the ephemeral range that can be bound, but those excluded.
    All {
        /// Where the ports are bound.
        bind: Bind,
        /// Ports that are left out.
        excluded: Vec<RangeInclusive<u16>>,
    },
    /// The ports listed.
    Ports(Vec<Ports>),
}

/// Where published ports are bound.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Bind {
    /// The local address; all of both IP versions if there is none.
    pub address: Option<IpAddr>,
    /// The interface (SO_BINDTODEVICE).
    pub interface: Option<String>,
}

/// A range of ports and the port to which the first one leads.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Ports {
    /// Where they are bound.
    pub bind: Bind,
    /// The ports that are bound.
    pub from: RangeInclusive<u16>,
    /// The port to which the first of `from` leads; the others follow in order.
    pub to: u16,
    /// The address to which they lead, of the version of the address that is bound; without one that of the other side.
    pub to_address: Option<IpAddr>,
    /// Ports of `from` that are left out.
    pub excluded: Vec<RangeInclusive<u16>>,
}

/// One binding.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Forward {
    /// Where it is bound.
    pub bind: Bind,
    /// The port that is bound.
    pub from: u16,
    /// The port to which it leads.
    pub to: u16,
    /// The address to which it leads; without one that of the other side.
    pub to_address: Option<IpAddr>,
    /// A port that cannot be bound is left out without an error.
    pub is_optional: bool,
}

/// An invalid specification: the error in it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ParsePortsError {
    spec: String,
    what: String,
}

impl fmt::Display for ParsePortsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "invalid port specification `{}`: {}", self.spec, self.what)
    }
}

impl std::error::Error for ParsePortsError {}

impl PortSpec {
    /// The bindings that the specification asks for, in order. `Auto` asks for none by itself.
    pub fn forwards(&self) -> Vec<Forward> {
        match self {
            PortSpec::None | PortSpec::Auto => Vec::new(),
            PortSpec::All { bind, excluded } => (1..FIRST_EPHEMERAL_PORT)
                .filter(|port| !contains(excluded, *port))
                .map(|port| Forward { is_optional: true, ..Forward::new(bind.clone(), port, port) })
                .collect(),
            PortSpec::Ports(ranges) => ranges.iter().flat_map(Ports::forwards).collect(),
        }
    }

    /// This and another specification of the same option, as when it is repeated: lists add up, and a word
    /// stands alone.
    ///
    /// # Errors
    /// A word beside anything else. A port of both at places that cannot be bound together, as pasta(1) refuses it.
    pub fn and(self, other: PortSpec) -> Result<PortSpec, ParsePortsError> {
        match (self, other) {
            (PortSpec::Ports(mut ranges), PortSpec::Ports(more)) => {
                for ports in more {
                    add(&mut ranges, ports)?;
                }
                Ok(PortSpec::Ports(ranges))
            }
            (a, b) if a == b => Ok(a),
            (_, b) => Err(ParsePortsError {
                spec: b.to_string(),
                what: "`none`, `auto` and `all` cannot be combined with other ports".into(),
            }),
        }
    }
}

/// Adds a range to others.
fn add(ranges: &mut Vec<Ports>, ports: Ports) -> Result<(), ParsePortsError> {
    for before in ranges.iter() {
        if let Some(port) = before.shares(&ports) {
            let what = format!("port {port} is also in `{before}`; omit one of them");
            return Err(ParsePortsError { spec: ports.to_string(), what });
        }
    }
    ranges.push(ports);
    Ok(())
}

impl Forward {
    /// A binding that leads to a port of the other side.
    pub fn new(bind: Bind, from: u16, to: u16) -> Forward {
        Forward { bind, from, to, to_address: None, is_optional: false }
    }
}

impl Bind {
    /// Whether one port cannot be bound at both places: one has every address or interface that the other one has.
    pub(crate) fn meets(&self, other: &Bind) -> bool {
        let interfaces = self.interface.as_ref().zip(other.interface.as_ref());
        interfaces.is_none_or(|(own, its)| own == its)
            && match (self.address, other.address) {
                (Some(own), Some(its)) if own.is_ipv4() == its.is_ipv4() => {
                    own == its || own.is_unspecified() || its.is_unspecified()
                }
                (Some(_), Some(_)) => false,
                _ => true,
            }
    }
}

impl Ports {
    /// The first port that both ranges bind where it cannot be bound twice.
    fn shares(&self, other: &Ports) -> Option<u16> {
        let first = *self.from.start().max(other.from.start());
        let last = *self.from.end().min(other.from.end());
        let is_left_out = |port| [self, other].iter().any(|p| contains(&p.excluded, port));
        let mut both = (first..=last).filter(|port| !is_left_out(*port));
        both.next().filter(|_| self.bind.meets(&other.bind))
    }

    fn forwards(&self) -> impl Iterator<Item = Forward> + '_ {
        let first = *self.from.start();
        let ports = self.from.clone().filter(|port| !contains(&self.excluded, *port));
        ports.map(move |port| Forward {
            bind: self.bind.clone(),
            from: port,
            to: self.to + (port - first),
            to_address: self.to_address,
            is_optional: false,
        })
    }
}

fn contains(ranges: &[RangeInclusive<u16>], port: u16) -> bool {
    ranges.iter().any(|range| range.contains(&port))
}

impl FromStr for PortSpec {
    type Err = ParsePortsError;

    fn from_str(spec: &str) -> Result<PortSpec, ParsePortsError> {
        match spec {
            "none" => return Ok(PortSpec::None),
            "auto" => return Ok(PortSpec::Auto),
            "all" => return Ok(PortSpec::All { bind: Bind::default(), excluded: Vec::new() }),
            _ => {}
        }
        parse_list(spec).map_err(|what| ParsePortsError { spec: spec.to_owned(), what })
    }
}

fn parse_list(spec: &str) -> Result<PortSpec, String> {
    if let Some((_, "tcp" | "udp")) = spec.rsplit_once('/') {
        return Err("omit `/tcp` and `/udp`: TCP and UDP ports have separate options".into());
    }
    let (bind, list) = match spec.split_once('/') {
        // The slash is that of a target.
        Some((before, _)) if is_ports(before) => (Bind::default(), spec),
        Some((bind, list)) => (parse_bind(bind)?, list),
        None => (Bind::default(), spec),
    };
    let (excluded, ports): (Vec<_>, Vec<_>) =
        list.split(',').partition(|item| item.starts_with('~'));
    let excluded =
        excluded.into_iter().map(|item| parse_range(&item[1..])).collect::<Result<Vec<_>, _>>()?;
    if ports.is_empty() || ports == ["all"] {
        return Ok(PortSpec::All { bind, excluded });
    }
    let mut ranges: Vec<Ports> = Vec::new();
    for item in ports {
        let (from, to, to_address) = parse_mapping(item, &bind)?;
        let (bind, excluded) = (bind.clone(), excluded.clone());
        let ports = Ports { bind, from, to, to_address, excluded };
        add(&mut ranges, ports).map_err(|e| format!("`{item}`: {}", e.what))?;
    }
    Ok(PortSpec::Ports(ranges))
}

/// `ADDRESS`, `ADDRESS%INTERFACE` or `%INTERFACE`; an IPv6 address may stand in brackets.
fn parse_bind(bind: &str) -> Result<Bind, String> {
    let (address, interface) = match bind.split_once('%') {
        Some((address, interface)) => (address, Some(interface)),
        None => (bind, None),
    };
    if interface.is_some_and(|name| name.is_empty() || name.len() > 15 || name.contains('/')) {
        return Err("expected an interface name of 1 to 15 characters".into());
    }
    if address.is_empty() && interface.is_none() {
        return Err("missing address before the slash".into());
    }
    let address = match address {
        "" => None,
        _ => Some(parse_address(address)?),
    };
    Ok(Bind { address, interface: interface.map(str::to_owned) })
}

/// Whether what stands before a slash is ports and a target's address, not an address to bind.
fn is_ports(before: &str) -> bool {
    before.split_once(':').is_some_and(|(from, to)| {
        let is_port = |c: char| c.is_ascii_digit() || matches!(c, '-' | ',' | '~');
        from.chars().all(is_port) && !from.is_empty() && parse_address(to).is_ok()
    }) && parse_address(before).is_err()
}

/// `FIRST[-LAST][:[TO_ADDRESS/]TO[-TO_LAST]]`, or `FIRST[-LAST]:TO_ADDRESS`.
fn parse_mapping(
    item: &str,
    bind: &Bind,
) -> Result<(RangeInclusive<u16>, u16, Option<IpAddr>), String> {
    let Some((from, target)) = item.split_once(':') else {
        let from = parse_range(item)?;
        let first = *from.start();
        return Ok((from, first, None));
    };
    if from.parse::<IpAddr>().is_ok() {
        return Err(format!("a slash separates an address from its ports: write {from}/{target}"));
    }
    let (to_address, to) = match target.split_once('/') {
        Some((address, to)) => (Some(parse_target(address, bind)?), to),
        None => match parse_target(target, bind) {
            Ok(address) => (Some(address), from),
            // `TO` alone.
            Err(_) if parse_address(target).is_err() => (None, target),
            Err(what) => return Err(what),
        },
    };
    let (from, to) = (parse_range(from)?, parse_range(to)?);
    let span = from.end() - from.start();
    if to.start() != to.end() && to.end() - to.start() != span {
        return Err(format!("the ranges of `{item}` differ in length"));
    }
    if to.start().checked_add(span).is_none() {
        return Err(format!("the target ports of `{item}` exceed 65535"));
    }
    Ok((from, *to.start(), to_address))
}

/// The address of a target. A port that is bound at both IP versions leads to no single address, as in pasta(1).
fn parse_target(text: &str, bind: &Bind) -> Result<IpAddr, String> {
    let target = parse_address(text)?;
    let any = if target.is_ipv4() { "0.0.0.0" } else { "[::]" };
    match bind.address {
        Some(bound) if bound.is_ipv4() == target.is_ipv4() => Ok(target),
        Some(bound) => Err(format!("{bound} and the target {target} differ in their IP version")),
        None => Err(format!(
            "a target of one IP version requires an address to bind, such as {any}/ before the ports"
        )),
    }
}

fn parse_address(text: &str) -> Result<IpAddr, String> {
    let inner = text.strip_prefix('[').and_then(|a| a.strip_suffix(']')).unwrap_or(text);
    inner.parse().map_err(|_| format!("invalid IP address `{text}`"))
}

fn parse_range(range: &str) -> Result<RangeInclusive<u16>, String> {
    let (first, last) = range.split_once('-').unwrap_or((range, range));
    let (first, last) = (parse_port(first)?, parse_port(last)?);
    if first > last {
        return Err(format!("invalid range `{range}`: its end is below its start"));
    }
    Ok(first..=last)
}

fn parse_port(port: &str) -> Result<u16, String> {
    let is_number = !port.is_empty() && port.bytes().all(|b| b.is_ascii_digit());
    let number = if is_number { port.parse().ok() } else { None };
    number.filter(|n| *n != 0).ok_or_else(|| format!("invalid port `{port}`: expected 1-65535"))
}

impl fmt::Display for PortSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PortSpec::None => f.write_str("none"),
            PortSpec::Auto => f.write_str("auto"),
            PortSpec::All { bind, excluded } => {
                write!(f, "{bind}")?;
                f.write_str("all")?;
                write_excluded(f, excluded)
            }
            PortSpec::Ports(ranges) => {
                let Some(first) = ranges.first() else { return f.write_str("none") };
                write!(f, "{}", first.bind)?;
                for (n, ports) in ranges.iter().enumerate() {
                    f.write_str(if n == 0 { "" } else { "," })?;
                    ports.write_mapping(f)?;
                }
                write_excluded(f, &first.excluded)
            }
        }
    }
}

impl Ports {
    fn write_mapping(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_range(f, &self.from)?;
        match self.to_address {
            Some(address) => write!(f, ":{address}/{}", self.to),
            None if self.to == *self.from.start() => Ok(()),
            None => write!(f, ":{}", self.to),
        }
    }
}

impl fmt::Display for Ports {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.bind)?;
        self.write_mapping(f)?;
        write_excluded(f, &self.excluded)
    }
}

impl fmt::Display for Bind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(address) = self.address {
            write!(f, "{address}")?;
        }
        if let Some(interface) = &self.interface {
            write!(f, "%{interface}")?;
        }
        if *self == Bind::default() { Ok(()) } else { f.write_str("/") }
    }
}

fn write_range(f: &mut fmt::Formatter<'_>, range: &RangeInclusive<u16>) -> fmt::Result {
    if range.start() == range.end() {
        return write!(f, "{}", range.start());
    }
    write!(f, "{}-{}", range.start(), range.end())
}

fn write_excluded(f: &mut fmt::Formatter<'_>, excluded: &[RangeInclusive<u16>]) -> fmt::Result {
    excluded.iter().try_for_each(|range| {
        f.write_str(",~")?;
        write_range(f, range)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn forwards(spec: &str) -> Vec<(u16, u16)> {
        let spec: PortSpec = spec.parse().unwrap();
        spec.forwards().into_iter().map(|f| (f.from, f.to)).collect()
    }

    #[test]
    fn single_ports_ranges_and_lists_are_forwarded_to_themselves() {
        assert_eq!(forwards("22"), [(22, 22)]);
        assert_eq!(forwards("22,25"), [(22, 22), (25, 25)]);
        assert_eq!(forwards("22-24"), [(22, 22), (23, 23), (24, 24)]);
        assert_eq!(forwards("none"), []);
        assert_eq!(forwards("auto"), []);
    }

    #[test]
    fn a_target_maps_a_port_or_a_range_in_order() {
        assert_eq!(forwards("22:23"), [(22, 23)]);
        assert_eq!(forwards("22-24:32-34"), [(22, 32), (23, 33), (24, 34)]);
        assert_eq!(forwards("22-23:8080"), [(22, 8080), (23, 8081)]);
    }

    #[test]
    fn a_target_may_have_an_address_of_the_version_that_is_bound() {
        let first = |spec: &str| {
            let forward = spec.parse::<PortSpec>().unwrap().forwards().remove(0);
            let text = |a: Option<IpAddr>| a.map(|a| a.to_string()).unwrap_or_default();
            (text(forward.bind.address), forward.from, text(forward.to_address), forward.to)
        };
        let of = |b: &str, from, to: &str, port| (b.to_owned(), from, to.to_owned(), port);
        assert_eq!(first("0.0.0.0/50:192.0.2.5/60"), of("0.0.0.0", 50, "192.0.2.5", 60));
        assert_eq!(first("127.0.0.6/50-59:192.0.2.6"), of("127.0.0.6", 50, "192.0.2.6", 50));
        assert_eq!(first("::/50:fd00::5/60"), of("::", 50, "fd00::5", 60));
        assert_eq!(first("[::1]/50:[fd00::5]/60"), of("::1", 50, "fd00::5", 60));
        assert_eq!(first("0.0.0.0/50:192.0.2.5/60,70").3, 60);
        for (spec, what) in [
            ("50:192.0.2.5/60", "an address to bind, such as 0.0.0.0/ before the ports"),
            ("50:192.0.2.5", "an address to bind, such as 0.0.0.0/"),
            // Without brackets it would be the address to bind.
            ("50:[fd00::5]/60", "an address to bind, such as [::]/"),
            ("::1/50:192.0.2.5/60", "differ in their IP version"),
            ("0.0.0.0/50:192.0.2/60", "invalid IP address `192.0.2`"),
            ("0.0.0.0/50:192.0.2.5/", "invalid port ``"),
            ("0.0.0.0/50-51:192.0.2.5/60-62", "differ in length"),
        ] {
            let error = spec.parse::<PortSpec>().expect_err(spec).to_string();
            assert!(error.contains(what), "{spec}: {error}");
        }
    }

    #[test]
    fn exclusions_leave_ports_out_and_alone_mean_all_others() {
        assert_eq!(forwards("20-24,~21-22"), [(20, 20), (23, 23), (24, 24)]);
        let all = forwards("~2000-32767");
        assert_eq!((all.len(), all[0], all[1998]), (1999, (1, 1), (1999, 1999)));
        let optional: PortSpec = "all".parse().unwrap();
        assert!(optional.forwards().iter().all(|f| f.is_optional));
    }

    #[test]
    fn addresses_and_interfaces_say_where_to_bind() {
        let bind = |spec: &str| spec.parse::<PortSpec>().unwrap().forwards().remove(0).bind;
        let v4: IpAddr = "192.0.2.1".parse().unwrap();
        assert_eq!(bind("192.0.2.1/22"), Bind { address: Some(v4), interface: None });
        let both = Bind { address: Some(v4), interface: Some("eth0".into()) };
        assert_eq!(bind("192.0.2.1%eth0/22"), both);
        assert_eq!(bind("%eth0/22"), Bind { address: None, interface: Some("eth0".into()) });
        let v6 = Bind { address: Some("::1".parse().unwrap()), interface: None };
        assert_eq!((bind("::1/22"), bind("[::1]/22")), (v6.clone(), v6));
    }

    #[test]
    fn specifications_without_a_meaning_are_refused_with_the_reason() {
        for (spec, what) in [
            ("", "invalid port ``"),
            ("0", "invalid port `0`: expected 1-65535"),
            ("65536", "invalid port `65536`"),
            ("+22", "invalid port `+22`"),
            ("22-", "invalid port ``"),
            ("30-20", "invalid range `30-20`: its end is below its start"),
            ("22-24:1-2", "differ in length"),
            ("1-100:65500", "exceed 65535"),
            ("22,20-30:80", "`20-30:80`: port 22 is also in `22`"),
            ("/22", "missing address"),
            ("1.2.3/22", "invalid IP address `1.2.3`"),
            ("22:23/udp", "have separate options"),
            ("127.0.0.1:8080:80", "write 127.0.0.1/8080:80"),
            ("%/22", "interface name"),
            ("22,none", "invalid port `none`"),
        ] {
            let error = spec.parse::<PortSpec>().expect_err(spec).to_string();
            assert!(error.contains(what), "{spec}: {error}");
        }
    }

    #[test]
    fn repeated_options_add_up_and_words_stand_alone() {
        let spec = |s: &str| s.parse::<PortSpec>().unwrap();
        let both = spec("22").and(spec("192.0.2.1/80")).unwrap();
        assert_eq!(both.forwards().len(), 2);
        assert_eq!(spec("none").and(spec("none")), Ok(PortSpec::None));
        assert!(spec("none").and(spec("22")).is_err() && spec("22").and(spec("auto")).is_err());
    }

    #[test]
    fn a_port_that_is_given_twice_is_refused_with_both_ranges() {
        let and = |a: &str, b: &str| a.parse::<PortSpec>().unwrap().and(b.parse().unwrap());
        let refused = and("8080:80", "8000-8090:81").unwrap_err().to_string();
        assert_eq!(
            refused,
            "invalid port specification `8000-8090:81`: port 8080 is also in `8080:80`; omit one of them"
        );
        for (a, b) in [
            ("22", "22"),
            ("127.0.0.1/22", "22"),
            ("22", "[::1]/22"),
            ("0.0.0.0/22", "127.0.0.1/22"),
            ("%eth0/22", "22"),
            ("22-30,~23-29", "30-40"),
        ] {
            assert!(and(a, b).is_err(), "{a} {b}");
        }
        for (a, b) in [
            ("22", "23-24"),
            ("127.0.0.1/22", "127.0.0.2/22"),
            ("127.0.0.1/22", "[::1]/22"),
            ("0.0.0.0/22", "[::]/22"),
            ("%eth0/22", "%eth1/22"),
            ("22-30,~23-29", "23-29"),
        ] {
            assert!(and(a, b).is_ok(), "{a} {b}");
        }
    }

    proptest! {
        /// A printed specification parses to the same value, and arbitrary input does not panic.
        #[test]
        fn specifications_survive_printing(text in "[0-9a-f:.%/,~-]{0,24}|[a-z]{2,4}") {
            if let Ok(spec) = text.parse::<PortSpec>() {
                prop_assert_eq!(spec.to_string().parse::<PortSpec>().map(|s| s.forwards()), Ok(spec.forwards()));
            }
        }
    }
}
