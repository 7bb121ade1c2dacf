//! The router advertisement of a guest's link (RFC 4861 section 4.2, RFC 8106).
//!
//! Output: the ICMPv6 message; the sender of the packet fills in its checksum. It answers a router solicitation, to the
//! guest alone or to all nodes.

use std::net::Ipv6Addr;

use fulmar_stack::base::EtherAddr;
use fulmar_stack::wire::icmpv6::{HEADER_BYTES, Message, NdpOption};

/// Lifetime of the default route: the largest that there is (RFC 4861 section 6.2.1, RFC 8319 section 4).
const ROUTER_LIFETIME_S: u16 = u16::MAX;
/// Option types of RFC 8106.
const RDNSS: u8 = 25;
const DNSSL: u8 = 31;
/// Most advertised resolvers and domains: an option's length is a byte, in units of 8 bytes.
const MAX_NAMESERVERS: usize = 127;
/// See [`MAX_NAMESERVERS`].
const MAX_SEARCH_BYTES: usize = 2032;

/// The parameters of the link that the advertisement carries.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Link {
    /// Ethernet address of the router.
    pub router: EtherAddr,
    /// Its link-local address, from which it advertises itself.
    pub source: Ipv6Addr,
    /// The guest's address. Its /64 is the prefix of the link; the guest may make more addresses in it.
    pub address: Ipv6Addr,
    /// MTU in bytes, if one is announced.
    pub mtu: Option<u32>,
    /// DHCPv6 gives the address, too (the M flag).
    pub has_dhcp: bool,
    /// Its resolvers.
    pub nameservers: Vec<Ipv6Addr>,
    /// The domains that it searches.
    pub search: Vec<String>,
}

impl Link {
    /// The router advertisement, with a checksum of zero.
    pub fn advertisement(&self) -> Vec<u8> {
        let message = Message::RouterAdvertisement {
            hop_limit: 64,
            managed: self.has_dhcp,
            other: self.has_dhcp,
            router_lifetime_s: ROUTER_LIFETIME_S,
            reachable_ms: 0,
            retrans_ms: 0,
        };
        let mut bytes = vec![0; message.header_bytes().max(HEADER_BYTES)];
        let _ = message.emit(&mut bytes);
        let prefix = NdpOption::Prefix {
            prefix: Ipv6Addr::from_bits(self.address.to_bits() & (u128::MAX << 64)),
            prefix_bits: 64,
            on_link: true,
            autonomous: true,
            valid_s: u32::MAX,
            preferred_s: u32::MAX,
        };
        let options = [
            Some(NdpOption::SourceLinkLayer(self.router)),
            self.mtu.map(NdpOption::Mtu),
            Some(prefix),
        ];
        for option in options.into_iter().flatten() {
            let mut encoded = [0; 32];
            let length = option.emit(&mut encoded).unwrap_or(0);
            bytes.extend_from_slice(&encoded[..length]);
        }
        let nameservers = self.nameservers.iter().take(MAX_NAMESERVERS);
        add_dns(&mut bytes, RDNSS, &nameservers.flat_map(Ipv6Addr::octets).collect::<Vec<_>>());
        let mut search = Vec::new();
        for name in self.search.iter().filter_map(|domain| encoded_name(domain)) {
            if search.len() + name.len() <= MAX_SEARCH_BYTES {
                search.extend(name);
            }
        }
        add_dns(&mut bytes, DNSSL, &search);
        bytes
    }
}

/// The link-local address that belongs to an Ethernet address (RFC 4291 appendix A).
pub fn link_local(ether: EtherAddr) -> Ipv6Addr {
    let [a, b, c, d, e, f] = ether.0.map(u16::from);
    let (first, last) = ((a ^ 2) << 8 | b, e << 8 | f);
    Ipv6Addr::new(0xfe80, 0, 0, 0, first, c << 8 | 0xff, 0xfe00 | d, last)
}

/// An option of RFC 8106 with a lifetime of infinity, padded to units of 8 bytes; none without a value.
fn add_dns(bytes: &mut Vec<u8>, kind: u8, value: &[u8]) {
    if value.is_empty() {
        return;
    }
    let units = (8 + value.len()).div_ceil(8);
    bytes.extend_from_slice(&[kind, units as u8, 0, 0]);
    bytes.extend_from_slice(&u32::MAX.to_be_bytes());
    bytes.extend_from_slice(value);
    bytes.resize(bytes.len() + units * 8 - 8 - value.len(), 0);
}

/// A domain name as labels (RFC 1035 section 3.1); `None` if it is none.
fn encoded_name(domain: &str) -> Option<Vec<u8>> {
    let mut encoded = Vec::new();
    for label in domain.trim_end_matches('.').split('.') {
        if !(1..=63).contains(&label.len()) || !label.is_ascii() {
            return None;
        }
        encoded.push(label.len() as u8);
        encoded.extend_from_slice(label.as_bytes());
    }
    encoded.push(0);
    (encoded.len() <= 255).then_some(encoded)
}

#[cfg(test)]
mod tests {
    use super::*;
    use fulmar_stack::wire::icmpv6::ndp_options;

    fn link() -> Link {
        Link {
            router: EtherAddr([2, 0, 0, 0, 0, 1]),
            source: "fe80::99".parse().unwrap(),
            address: "2001:db8:1:2:3::5".parse().unwrap(),
            mtu: Some(65520),
            has_dhcp: true,
            nameservers: vec!["fd00::53".parse().unwrap(), "fd00::54".parse().unwrap()],
            search: vec!["example.org".into(), "a..b".into(), "corp.example.".into()],
        }
    }

    #[test]
    fn the_guest_learns_router_prefix_and_mtu() {
        let bytes = link().advertisement();
        let message = Message::parse(&bytes).unwrap();
        assert!(matches!(
            message,
            Message::RouterAdvertisement { managed: true, router_lifetime_s: u16::MAX, .. }
        ));
        let options: Vec<_> =
            ndp_options(&bytes[message.header_bytes()..]).map(Result::unwrap).collect();
        assert_eq!(options[0], NdpOption::SourceLinkLayer(link().router));
        assert_eq!(options[1], NdpOption::Mtu(65520));
        let NdpOption::Prefix { prefix, prefix_bits, autonomous, .. } = options[2] else {
            panic!("{options:?}");
        };
        assert_eq!(
            (prefix, prefix_bits, autonomous),
            ("2001:db8:1:2::".parse().unwrap(), 64, true)
        );
    }

    #[test]
    fn resolvers_and_search_domains_are_options_of_their_own() {
        let bytes = link().advertisement();
        let at = bytes.windows(2).position(|w| w == [RDNSS, 5]).unwrap();
        assert_eq!(bytes[at + 8..at + 24], "fd00::53".parse::<Ipv6Addr>().unwrap().octets());
        assert_eq!(bytes[at + 24..at + 40], "fd00::54".parse::<Ipv6Addr>().unwrap().octets());
        let search = &bytes[at + 40..];
        assert_eq!(search[..2], [DNSSL, 5]);
        assert_eq!(&search[8..21], b"\x07example\x03org\0");
        assert_eq!(&search[21..35], b"\x04corp\x07example\0");
        assert_eq!((search.len(), bytes.len() % 8), (40, 0));
    }

    #[test]
    fn absent_parameters_are_not_advertised() {
        let bare =
            Link { mtu: None, has_dhcp: false, nameservers: vec![], search: vec![], ..link() };
        assert_eq!(bare.advertisement().len(), 16 + 8 + 32);
    }

    #[test]
    fn long_lists_fit_into_their_options() {
        let many = Link {
            nameservers: vec![Ipv6Addr::LOCALHOST; 1000],
            search: vec!["d".repeat(63) + ".example"; 1000],
            ..link()
        };
        let bytes = many.advertisement();
        let message = Message::parse(&bytes).unwrap();
        let options = ndp_options(&bytes[message.header_bytes()..]).map(Result::unwrap);
        assert_eq!(options.count(), 5);
    }
}
