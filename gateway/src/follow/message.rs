//! The states of the host's network on their way through a pipe: lines of text, of which the last one is `end`.
//!
//! Names of interfaces and domains have neither blanks nor line ends. Routes are not carried: the guest has its own.

use std::fmt::Write;
use std::io::{self, Read};
use std::net::IpAddr;
use std::str::{FromStr, SplitAsciiWhitespace};

use crate::netns::{Address, Interface};

use crate::host::{HostNetwork, Upstream};

/// Bytes of a state.
const MOST_BYTES: usize = 512 << 10;
/// Addresses of one IP version that are carried of the upstream.
const MOST_ADDRESSES: usize = 256;
/// Most addresses and most networks of the host in a message. The rules use them to refuse the guest the services there.
const MOST_OWN: usize = 4096;
const END: &[u8] = b"end\n";

/// A state as text.
pub fn encode(host: &HostNetwork) -> Vec<u8> {
    let mut text = String::new();
    for (version, upstream) in [("4", &host.v4), ("6", &host.v6)] {
        let Some(upstream) = upstream else { continue };
        let Interface { index, name, .. } = &upstream.interface;
        // Writing to a string does not fail.
        let _ = writeln!(text, "upstream {version} {index} {name}");
        if let Some(gateway) = upstream.gateway {
            let _ = writeln!(text, "gateway {version} {gateway}");
        }
        for address in upstream.addresses.iter().take(MOST_ADDRESSES) {
            let _ = writeln!(text, "address {version} {} {}", address.address, address.prefix_len);
        }
    }
    for own in host.addresses.iter().take(MOST_OWN) {
        let _ = writeln!(text, "own {own}");
    }
    for (network, bits) in host.networks.iter().take(MOST_OWN) {
        let _ = writeln!(text, "network {network} {bits}");
    }
    for server in &host.nameservers {
        let _ = writeln!(text, "nameserver {server}");
    }
    let _ = writeln!(text, "options {} {}", host.attempts, host.rotates);
    for domain in &host.search {
        let line = format!("search {domain}\n");
        if text.len() + line.len() + END.len() <= MOST_BYTES {
            text += &line;
        }
    }
    [text.as_bytes(), END].concat()
}

/// The state of a text without its end; `None`: it is none.
fn decode(text: &[u8]) -> Option<HostNetwork> {
    let mut host = HostNetwork::default();
    for line in std::str::from_utf8(text).ok()?.lines() {
        let mut words = line.split_ascii_whitespace();
        match words.next()? {
            "own" => host.addresses.push(word(&mut words)?),
            "network" => host.networks.push((word(&mut words)?, word(&mut words)?)),
            "nameserver" => host.nameservers.push(word(&mut words)?),
            "options" => (host.attempts, host.rotates) = (word(&mut words)?, word(&mut words)?),
            "search" => host.search.push(word(&mut words)?),
            keyword => {
                let upstream = match words.next()? {
                    "4" => &mut host.v4,
                    "6" => &mut host.v6,
                    _ => return None,
                };
                add_to(upstream, keyword, &mut words)?;
            }
        }
    }
    Some(host)
}

fn add_to(
    upstream: &mut Option<Upstream>,
    keyword: &str,
    words: &mut SplitAsciiWhitespace<'_>,
) -> Option<()> {
    if keyword == "upstream" {
        let (index, name) = (word(words)?, word(words)?);
        let (is_up, is_loopback) = (true, false);
        let interface = Interface { index, name, mac: None, mtu: 0, is_up, is_loopback };
        let (addresses, routes) = (Vec::new(), Vec::new());
        *upstream = Some(Upstream { interface, addresses, routes, gateway: None });
        return Some(());
    }
    let upstream = upstream.as_mut()?;
    let address: IpAddr = word(words)?;
    match keyword {
        "gateway" => upstream.gateway = Some(address),
        "address" => upstream.addresses.push(Address {
            index: upstream.interface.index,
            address,
            prefix_len: word(words)?,
            is_global: true,
        }),
        _ => return None,
    }
    Some(())
}

fn word<T: FromStr>(words: &mut SplitAsciiWhitespace<'_>) -> Option<T> {
    words.next()?.parse().ok()
}

/// Collects the states that come through a pipe.
#[derive(Default)]
pub struct States(Vec<u8>);

impl States {
    /// Reads once. Returns the last state that has come as a whole; `None`: none has.
    ///
    /// # Errors
    /// UnexpectedEof: the pipe has ended; InvalidData: the bytes are not a state, or too many.
    pub fn read(&mut self, mut pipe: impl Read) -> io::Result<Option<HostNetwork>> {
        let mut part = [0; 4096];
        match pipe.read(&mut part) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => self.0.extend_from_slice(part.get(..n).unwrap_or_default()),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => return Ok(None),
            Err(e) => return Err(e),
        }
        let mut last = None;
        while let Some(at) = self.end() {
            let state = self.0.get(..at).and_then(decode);
            last = Some(state.ok_or(io::ErrorKind::InvalidData)?);
            self.0.drain(..at + END.len());
        }
        if self.0.len() > MOST_BYTES {
            return Err(io::ErrorKind::InvalidData.into());
        }
        Ok(last)
    }

    /// Where the end of the first state begins: a line of its own.
    fn end(&self) -> Option<usize> {
        let is_end = |at: &usize| *at == 0 || self.0.get(at - 1) == Some(&b'\n');
        let ends = self.0.windows(END.len()).enumerate().filter(|(_, window)| *window == END);
        ends.map(|(at, _)| at).find(is_end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn host() -> HostNetwork {
        let of = |address: &str, gateway: &str| {
            let interface = Interface {
                index: 7,
                name: "eth0".into(),
                mac: None,
                mtu: 0,
                is_up: true,
                is_loopback: false,
            };
            let address = address.parse().unwrap();
            let address = Address { index: 7, address, prefix_len: 24, is_global: true };
            let gateway = Some(gateway.parse().unwrap());
            Some(Upstream { interface, addresses: vec![address; 2], routes: vec![], gateway })
        };
        HostNetwork {
            v4: of("192.0.2.5", "192.0.2.1"),
            v6: of("fd00::5", "fe80::99"),
            nameservers: ["192.0.2.53:53", "[fe80::1%7]:53"].map(|a| a.parse().unwrap()).into(),
            search: vec!["end".into(), "a.example".into()],
            attempts: 3,
            rotates: true,
            addresses: ["127.0.0.1", "fe80::5"].map(|a| a.parse().unwrap()).into(),
            networks: vec![("192.0.2.0".parse().unwrap(), 24), ("fd00::".parse().unwrap(), 64)],
        }
    }

    #[test]
    fn a_state_arrives_as_it_was_sent_however_the_pipe_cuts_it() {
        let without = HostNetwork { v4: None, ..host() };
        let bytes = [encode(&host()), encode(&without)].concat();
        for each in [1, 7, bytes.len()] {
            let mut states = States::default();
            let came: Vec<_> =
                bytes.chunks(each).filter_map(|part| states.read(part).unwrap()).collect();
            assert_eq!(came.last(), Some(&without), "{each}");
            assert_eq!(came.len(), if each == bytes.len() { 1 } else { 2 }, "the last one counts");
        }
        assert_eq!(decode(&encode(&host())[..encode(&host()).len() - 4]), Some(host()));
    }

    #[test]
    fn the_end_of_the_pipe_and_an_invalid_state_are_errors() {
        let error = |bytes: &[u8]| States::default().read(bytes).unwrap_err().kind();
        assert_eq!(error(b""), io::ErrorKind::UnexpectedEof);
        for wrong in [
            "nonsense\nend\n",
            "address 4 192.0.2.1 24\nend\n",
            "nameserver 1\nend\n",
            "options 2 maybe\nend\n",
            "gateway 5 1\nend\n",
        ] {
            assert_eq!(error(wrong.as_bytes()), io::ErrorKind::InvalidData, "{wrong}");
        }
        let mut states = States::default();
        let mut endless = std::iter::repeat_with(|| states.read(&[b'x'; 4096][..]));
        assert!(endless.by_ref().take(160).any(|came| came.is_err()), "it is bounded");
    }

    #[test]
    fn a_state_that_is_too_long_is_cut_where_it_matters_least() {
        let search = vec!["d".repeat(250); 10_000];
        let bytes = encode(&HostNetwork { search, ..host() });
        assert!(bytes.len() <= MOST_BYTES);
        let came = States::default().read(&bytes[..4096]).unwrap();
        assert_eq!(came, None);
        let kept = decode(&bytes[..bytes.len() - END.len()]).unwrap();
        assert_eq!((kept.nameservers, kept.v6), (host().nameservers, host().v6));
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = States::default().read(&[&bytes[..], END].concat()[..]);
            let _ = States::default().read(&[b"upstream 4 ", &bytes[..], b"\n", END].concat()[..]);
        }
    }
}
