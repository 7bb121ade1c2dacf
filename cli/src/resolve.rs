//! Names to addresses: literals at once, anything else through the system's resolver.

use crate::failure::{Failure, Outcome};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs};

/// Which version of IP the user asked for.
#[derive(clap::Args, Clone, Copy, PartialEq, Eq, Debug, Default)]
#[group(multiple = false)]
pub struct Family {
    /// IPv4 only
    #[arg(short = '4', long = "ipv4")]
    v4: bool,
    /// IPv6 only
    #[arg(short = '6', long = "ipv6")]
    v6: bool,
}

impl Family {
    /// Whether an address is of the wanted version.
    pub fn admits(self, ip: IpAddr) -> bool {
        !(self.v4 && ip.is_ipv6() || self.v6 && ip.is_ipv4())
    }

    /// The address that means "all of mine".
    pub fn unspecified(self) -> IpAddr {
        if self.v6 { Ipv6Addr::UNSPECIFIED.into() } else { Ipv4Addr::UNSPECIFIED.into() }
    }

    fn word(self) -> &'static str {
        match (self.v4, self.v6) {
            (true, _) => "IPv4 ",
            (_, true) => "IPv6 ",
            _ => "",
        }
    }
}

/// The addresses of `host` in the resolver's order, at least one.
pub fn resolve(host: &str, port: u16, family: Family) -> Outcome<Vec<SocketAddr>> {
    let bare = host.strip_prefix('[').and_then(|h| h.strip_suffix(']')).unwrap_or(host);
    let found = match literal(bare, port) {
        Some(address) => vec![address],
        None => (bare, port)
            .to_socket_addrs()
            .map_err(|e| Failure::new(format!("cannot resolve `{host}`: {e}; check the name")))?
            .collect(),
    };
    let wanted: Vec<_> = found.into_iter().filter(|a| family.admits(a.ip())).collect();
    if wanted.is_empty() {
        return Err(Failure::new(format!("`{host}` has no {}address", family.word())));
    }
    Ok(wanted)
}

/// An address written as numbers; `fe80::1%3` keeps its zone.
fn literal(text: &str, port: u16) -> Option<SocketAddr> {
    let ip = text.parse::<IpAddr>().ok().map(|ip| SocketAddr::new(ip, port));
    ip.or_else(|| format!("[{text}]:{port}").parse().ok())
}

/// Fails for port 0, at which no program listens (RFC 6335 section 6).
pub fn connectable(port: u16) -> Result<(), String> {
    if port == 0 { Err("invalid port 0: expected 1-65535".into()) } else { Ok(()) }
}

/// `HOST:PORT` to connect to, `[v6]:PORT`.
pub fn host_and_port(text: &str) -> Result<(String, u16), String> {
    let wrong = || "expected HOST:PORT, with an IPv6 address in brackets".to_owned();
    let (host, port) = text.rsplit_once(':').ok_or_else(wrong)?;
    let bracketed = host.starts_with('[') && host.ends_with(']');
    if host.is_empty() || (host.contains(':') && !bracketed) {
        return Err(wrong());
    }
    let port = port.parse().map_err(|_| wrong())?;
    connectable(port)?;
    Ok((host.to_owned(), port))
}

#[cfg(test)]
mod tests {
    use super::*;

    const V4: Family = Family { v4: true, v6: false };
    const V6: Family = Family { v4: false, v6: true };

    #[test]
    fn literals_need_no_resolver() {
        let any = Family::default();
        for (text, expected) in [
            ("10.0.0.1", "10.0.0.1:80"),
            ("::1", "[::1]:80"),
            ("[::1]", "[::1]:80"),
            ("fe80::1%3", "[fe80::1%3]:80"),
        ] {
            assert_eq!(resolve(text, 80, any).unwrap(), [expected.parse().unwrap()]);
        }
    }

    #[test]
    fn an_address_of_the_other_version_is_refused() {
        assert_eq!(resolve("::1", 1, V4).unwrap_err().to_string(), "`::1` has no IPv4 address");
        assert!(resolve("10.0.0.1", 1, V6).is_err());
    }

    #[test]
    fn host_and_port_are_parted_at_the_last_colon() {
        assert_eq!(host_and_port("a.example:80"), Ok(("a.example".into(), 80)));
        assert_eq!(host_and_port("[::1]:80"), Ok(("[::1]".into(), 80)));
        for wrong in ["", "a", "a:", ":80", "::1:80", "a:65536", "a:b", "a:0"] {
            assert!(host_and_port(wrong).is_err(), "{wrong}");
        }
    }
}
