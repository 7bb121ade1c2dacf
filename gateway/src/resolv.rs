//! `/etc/resolv.conf` as glibc reads it: a part that is not understood is passed over, and the rest counts.
//!
//! A keyword stands in the first column and a blank follows it. Of several `search` and `domain` lines the last one
//! counts, of the name servers the first three. Without a name server, or without a file, it is
//! 127.0.0.1. Of the options a gateway needs `attempts` and `rotate`: `ndots` and `timeout` are for the guest's resolver,
//! which has them in a file of its own.
//!
//! Sources: resolv.conf(5), glibc's resolver (`res_init`), against which tests/alone/resolv.rs holds it.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// The host's file.
pub(crate) const RESOLV_CONF: &str = "/etc/resolv.conf";
/// Name servers that count (MAXNS).
const MOST_NAMESERVERS: usize = 3;
/// Domains that count. glibc has no bound.
const MOST_DOMAINS: usize = 64;
/// How often the name servers are asked (RES_DFLRETRY), and at most (RES_MAXRETRY).
const ATTEMPTS: u8 = 2;
const MOST_ATTEMPTS: u8 = 5;
/// Bytes of the file that are read.
const MOST_BYTES: u64 = 16 << 20;
/// The port of DNS.
pub(crate) const DNS_PORT: u16 = 53;

/// The configuration of a resolver.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ResolvConf {
    /// The name servers, in the order in which they are asked. A link-local one has the index of its link, or 0 if the
    /// file names none.
    pub nameservers: Vec<SocketAddr>,
    /// The domains to search.
    pub search: Vec<String>,
    /// How often the name servers are asked in turn.
    pub attempts: u8,
    /// Each question begins with the next name server.
    pub rotates: bool,
}

impl ResolvConf {
    /// Reads a file. One that cannot be read, or is not a regular file, counts as empty.
    pub fn read(path: &Path) -> ResolvConf {
        ResolvConf::parse(&contents(path).unwrap_or_default())
    }

    /// Reads the text of a file.
    pub fn parse(text: &[u8]) -> ResolvConf {
        let (mut nameservers, mut search) = (Vec::new(), Vec::new());
        let (mut attempts, mut rotates) = (ATTEMPTS, false);
        for line in text.split(|byte| *byte == b'\n') {
            // glibc's strings end at a zero.
            let line = line.split(|byte| *byte == 0).next().unwrap_or_default();
            if let Some(value) = value_of(line, b"nameserver") {
                if nameservers.len() < MOST_NAMESERVERS {
                    nameservers.extend(server(value));
                }
            } else if let Some(value) = value_of(line, b"domain").filter(|v| !v.is_empty()) {
                search = domains(value, 1);
            } else if let Some(value) = value_of(line, b"search").filter(|v| !v.is_empty()) {
                search = domains(value, MOST_DOMAINS);
            } else if let Some(value) = value_of(line, b"options") {
                for option in options(value) {
                    attempts = option.strip_prefix(b"attempts:").map_or(attempts, attempts_of);
                    rotates |= option.starts_with(b"rotate");
                }
            }
        }
        if nameservers.is_empty() {
            nameservers.push((Ipv4Addr::LOCALHOST, DNS_PORT).into());
        }
        ResolvConf { nameservers, search, attempts, rotates }
    }
}

/// The options of a line, each with what follows it, as glibc compares them.
fn options(line: &[u8]) -> impl Iterator<Item = &[u8]> {
    let mut rest = line;
    std::iter::from_fn(move || {
        let option = skip_blanks(rest);
        let length = option.iter().take_while(|byte| !is_blank(byte)).count();
        rest = option.get(length..).unwrap_or_default();
        (length > 0).then_some(option)
    })
}

/// A number as atoi(3) reads it, within its bounds. glibc takes no attempt for one.
fn attempts_of(text: &[u8]) -> u8 {
    let text = text.trim_ascii_start();
    let text = text.strip_prefix(b"+").unwrap_or(text);
    let digits = text.iter().take_while(|byte| byte.is_ascii_digit());
    let number = digits.fold(0_u8, |n, digit| n.saturating_mul(10).saturating_add(digit - b'0'));
    number.clamp(1, MOST_ATTEMPTS)
}

/// The bytes of a regular file, [`MOST_BYTES`] at most. Opening a FIFO does not block.
pub(crate) fn contents(path: &Path) -> io::Result<Vec<u8>> {
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
    regular_contents(file)
}

fn regular_contents(file: File) -> io::Result<Vec<u8>> {
    if !file.metadata()?.is_file() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut text = Vec::new();
    file.take(MOST_BYTES).read_to_end(&mut text)?;
    Ok(text)
}

/// The text after a keyword and its blanks; `None`: the line has another keyword, or is a comment.
pub(crate) fn value_of<'a>(line: &'a [u8], keyword: &[u8]) -> Option<&'a [u8]> {
    let rest = line.strip_prefix(keyword)?;
    let value = skip_blanks(rest);
    (value.len() < rest.len()).then_some(value)
}

fn is_blank(byte: &u8) -> bool {
    matches!(byte, b' ' | b'\t')
}

fn skip_blanks(text: &[u8]) -> &[u8] {
    let blanks = text.iter().take_while(|byte| is_blank(byte)).count();
    text.get(blanks..).unwrap_or_default()
}

/// The first domains of a list, those that are not UTF-8 left out.
fn domains(list: &[u8], most: usize) -> Vec<String> {
    let words = list.split(is_blank).filter(|word| !word.is_empty()).take(most);
    words.filter_map(|word| String::from_utf8(word.to_vec()).ok()).collect()
}

fn server(value: &[u8]) -> Option<SocketAddr> {
    if let Some(v4) = inet_aton(value) {
        return Some((v4, DNS_PORT).into());
    }
    let word = value.split(is_blank).next()?;
    let (address, zone) = match word.iter().position(|byte| *byte == b'%') {
        Some(at) => (word.get(..at)?, word.get(at + 1..)),
        None => (word, None),
    };
    let address: Ipv6Addr = std::str::from_utf8(address).ok()?.parse().ok()?;
    let zone = zone.map_or(0, |zone| zone_of(address, zone));
    Some(SocketAddrV6::new(address, DNS_PORT, 0, zone).into())
}

/// The index of a zone: the name of an interface, for an address of a link, or a number. 0: neither.
fn zone_of(address: Ipv6Addr, zone: &[u8]) -> u32 {
    let is_of_link = address.is_unicast_link_local() || (address.segments()[0] & 0xff0f) == 0xff02;
    let Ok(zone) = std::str::from_utf8(zone) else { return 0 };
    let named = || nix::net::if_::if_nametoindex(zone).ok();
    let number = || zone.bytes().all(|b| b.is_ascii_digit()).then(|| zone.parse().ok()).flatten();
    let named = if is_of_link { named() } else { None };
    named.or_else(number).unwrap_or(0)
}

/// An IPv4 address in the forms of inet_aton(3), up to a white space: one to four numbers, decimal, octal or
/// hexadecimal, the last of which fills the rest of the address.
fn inet_aton(text: &[u8]) -> Option<Ipv4Addr> {
    let is_end = |byte: &u8| byte.is_ascii_whitespace() || *byte == 0x0b;
    let text = text.split(is_end).next()?;
    let mut parts = text.split(|byte| *byte == b'.').map(number);
    let (mut address, mut shift) = (0, 32);
    while let Some(part) = parts.next() {
        let part = part?;
        let is_last = parts.size_hint().1 == Some(0);
        // Filled by the parts that come below.
        if is_last {
            let is_in_range = shift == 32 || part < 1 << shift;
            return is_in_range.then(|| Ipv4Addr::from_bits(address | part));
        }
        shift -= 8;
        if part > 0xff || shift == 0 {
            return None;
        }
        address |= part << shift;
    }
    None
}

/// A number as strtoul(3) reads it with base 0.
fn number(digits: &[u8]) -> Option<u32> {
    let text = std::str::from_utf8(digits).ok()?;
    let (text, radix) = match digits {
        [b'0', b'x' | b'X', _, ..] => (text.get(2..)?, 16),
        [b'0', _, ..] => (text, 8),
        _ => (text, 10),
    };
    let is_number = !text.is_empty() && text.bytes().all(|b| char::from(b).is_digit(radix));
    if is_number { u32::from_str_radix(text, radix).ok() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;
    use std::time::Duration;

    fn parsed(text: &str) -> ResolvConf {
        ResolvConf::parse(text.as_bytes())
    }

    fn at(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    #[test]
    fn unknown_lines_are_skipped_and_the_rest_counts() {
        for bad in [
            "options retrans:3 retry:1",
            "options ndots:x timeout:-1",
            "frobnicate yes",
            "domain",
            "domain ",
            "nameserver nonsense",
            "nameserver",
            "search",
            "; nameserver 192.0.2.1",
            "#nameserver 192.0.2.1",
            " nameserver 192.0.2.1",
            "Nameserver 192.0.2.1",
            "nameserver192.0.2.1",
        ] {
            let found =
                parsed(&format!("{bad}\nnameserver\t192.0.2.53\nsearch a.example\n{bad}\n"));
            assert_eq!(found.nameservers, [at("192.0.2.53:53")], "{bad}");
            assert_eq!(found.search, ["a.example"], "{bad}");
        }
        let bytes = b"# \xff\xfe\nsearch \xff.example b.example\nnameserver 192.0.2.53";
        let found = ResolvConf::parse(bytes);
        assert_eq!(
            (found.nameservers, found.search),
            (vec![at("192.0.2.53:53")], vec!["b.example".into()])
        );
    }

    #[test]
    fn the_first_word_of_a_line_is_the_server_and_the_first_three_count() {
        let found = parsed(
            "nameserver 192.0.2.1 192.0.2.9\nnameserver 192.0.2.2\r\nnameserver fd00::3 x\nnameserver 192.0.2.4\n",
        );
        assert_eq!(found.nameservers, ["192.0.2.1:53", "192.0.2.2:53", "[fd00::3]:53"].map(at));
        let many: String = (0..64).map(|n| format!("nameserver 192.0.2.{n}\n")).collect();
        assert_eq!(parsed(&many).nameservers.len(), MOST_NAMESERVERS);
        assert_eq!(parsed("").nameservers, [at("127.0.0.1:53")]);
    }

    #[test]
    fn the_last_of_search_and_domain_counts() {
        let search = |text: &str| parsed(text).search;
        assert_eq!(search("domain d.example e.example\n"), ["d.example"]);
        assert_eq!(search("search a.example\t b.example \ndomain d.example\n"), ["d.example"]);
        assert_eq!(
            search("domain d.example\nsearch a.example b.example"),
            ["a.example", "b.example"]
        );
        assert_eq!(search(&format!("search {}", "d ".repeat(100_000))).len(), MOST_DOMAINS);
    }

    #[test]
    fn addresses_of_ipv4_have_the_forms_of_inet_aton() {
        let server = |text: &str| inet_aton(text.as_bytes()).map(|a| a.to_string());
        for (text, means) in [
            ("127.1", "127.0.0.1"),
            ("10.1.258", "10.1.1.2"),
            ("0xc0.0x00.02.065", "192.0.2.53"),
            ("3221226037", "192.0.2.53"),
            ("192.0.2.53\r", "192.0.2.53"),
            ("192.0.2.53 x", "192.0.2.53"),
            ("0", "0.0.0.0"),
        ] {
            assert_eq!(server(text).as_deref(), Some(means), "{text}");
        }
        for text in [
            "",
            ".",
            "1.",
            ".1",
            "1..2",
            "256.1",
            "1.2.3.256",
            "1.2.65536",
            "1.16777216",
            "1.2.3.4.5",
            "4294967296",
            "08.1",
            "0x.1",
            "1.2.3.4x",
            "+1.2.3.4",
            "-1",
            "a.b.c.d",
        ] {
            assert_eq!(server(text), None, "{text}");
        }
    }

    #[test]
    fn a_server_of_a_link_keeps_its_zone() {
        let lo = nix::net::if_::if_nametoindex("lo").unwrap();
        for (text, zone) in [
            ("fe80::1%lo", lo),
            ("fe80::1%7", 7),
            ("fe80::1", 0),
            ("fe80::1%", 0),
            ("fe80::1%no-such-if", 0),
            ("fe80::1%+7", 0),
            ("ff02::1%lo", lo),
            ("fd00::1%lo", 0),
            ("fd00::1%7", 7),
        ] {
            let found = parsed(&format!("nameserver {text}\n")).nameservers;
            let SocketAddr::V6(v6) = found[0] else { panic!("{found:?}") };
            assert_eq!(v6.scope_id(), zone, "{text}");
        }
    }

    #[test]
    fn a_path_that_is_not_a_file_counts_as_empty_and_does_not_block() {
        let folder = std::env::temp_dir().join(format!("fulmar-resolv-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("resolv.conf");
        let empty = ResolvConf::parse(b"");
        assert_eq!(ResolvConf::read(&path), empty, "missing");
        assert_eq!(ResolvConf::read(&folder), empty, "a directory");
        assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
        let (done, is_done) = std::sync::mpsc::channel();
        let fifo = path.clone();
        std::thread::spawn(move || done.send(ResolvConf::read(&fifo)));
        assert_eq!(is_done.recv_timeout(Duration::from_secs(60)), Ok(empty), "a FIFO");
        std::fs::remove_file(&path).unwrap();
        let mut large = b"# a comment of a line\n".repeat(500_000);
        large.extend(b"nameserver 192.0.2.53");
        std::fs::write(&path, large).unwrap();
        assert_eq!(ResolvConf::read(&path).nameservers, [at("192.0.2.53:53")], "11 MB");
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
