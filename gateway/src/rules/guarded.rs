//! Addresses that are refused without a rule, and IPv6 addresses by which IPv4 ones are reached.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use smallvec::SmallVec;

use super::{Denial, Why, covers};
use crate::mapping::is_link_local;

static METADATA: Denial = Denial(Why::Guarded("addresses of cloud metadata services"));
static LINK_LOCAL: Denial = Denial(Why::Guarded("link-local addresses"));
static PRIVATE: Denial = Denial(Why::Guarded("private addresses to which a name leads"));
static NETWORK: Denial =
    Denial(Why::Guarded("addresses of the host's own network to which a name leads"));
static HOST: Denial = Denial(Why::Guarded("the host's own addresses"));

/// Where clouds serve the credentials and the user data of a machine, and answer its DNS: AWS (EC2, ECS, EKS), and most
/// others at the first address; Scaleway, Tencent Cloud; Alibaba Cloud; Oracle Cloud; Azure.
const METADATA_V4: [Ipv4Addr; 9] = [
    Ipv4Addr::new(169, 254, 169, 254),
    Ipv4Addr::new(169, 254, 169, 253),
    Ipv4Addr::new(169, 254, 170, 2),
    Ipv4Addr::new(169, 254, 170, 23),
    Ipv4Addr::new(169, 254, 42, 42),
    Ipv4Addr::new(169, 254, 0, 23),
    Ipv4Addr::new(100, 100, 100, 200),
    Ipv4Addr::new(192, 0, 0, 192),
    Ipv4Addr::new(168, 63, 129, 16),
];
/// AWS (EC2, EKS, DNS), Google Cloud, Oracle Cloud, Akamai, Alibaba Cloud, Scaleway, OpenStack.
const METADATA_V6: [Ipv6Addr; 9] = [
    Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254),
    Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x23),
    Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x253),
    Ipv6Addr::new(0xfd20, 0xce, 0, 0, 0, 0, 0, 0x254),
    Ipv6Addr::new(0xfd00, 0xc1, 0, 0, 0, 0, 0xa9fe, 0xa9fe),
    Ipv6Addr::new(0xfd00, 0xa9fe, 0xa9fe, 0, 0, 0, 0, 1),
    Ipv6Addr::new(0xfd00, 0x100, 0, 0, 0, 0, 0x100, 0x200),
    Ipv6Addr::new(0xfd00, 0x42, 0, 0, 0, 0, 0, 0x42),
    Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0xa9fe, 0xa9fe),
];
/// Bits of a whole address, and of the IPv4 and IPv6 prefixes of link-local ones, as of an IPv6 address.
const WHOLE: u8 = 128;
const LINK_LOCAL_V4: u8 = 96 + 16;
const LINK_LOCAL_V6: u8 = 10;

/// Why an address is refused that no rule allows, and the length of a prefix that allows it.
pub(crate) fn kind_of(
    to: IpAddr,
    is_host: bool,
    is_by_name: bool,
    host_network: Option<(IpAddr, u8)>,
) -> Option<(u8, &'static Denial)> {
    let link_local = |ip: IpAddr| match ip {
        ip if !is_link_local(ip) => None,
        IpAddr::V4(_) => Some((LINK_LOCAL_V4, &LINK_LOCAL)),
        IpAddr::V6(_) => Some((LINK_LOCAL_V6, &LINK_LOCAL)),
    };
    let of_host = is_host.then_some((WHOLE, &HOST));
    let network = || {
        let (network, bits) = host_network?;
        Some((if network.is_ipv4() { bits.saturating_add(96) } else { bits }, &NETWORK))
    };
    let named = || if is_by_name { forms(to).find_map(private).or_else(network) } else { None };
    of_host.or_else(|| metadata(to)).or_else(|| forms(to).find_map(link_local)).or_else(named)
}

/// Ranges of a site, of a provider's own network, of this host and of groups (RFC 6890, RFC 4193, RFC 5771).
fn private(ip: IpAddr) -> Option<(u8, &'static Denial)> {
    const RANGES: [([u8; 4], u8); 9] = [
        ([0, 0, 0, 0], 8),
        ([10, 0, 0, 0], 8),
        ([100, 64, 0, 0], 10),
        ([127, 0, 0, 0], 8),
        ([172, 16, 0, 0], 12),
        ([192, 0, 0, 0], 24),
        ([192, 168, 0, 0], 16),
        ([198, 18, 0, 0], 15),
        ([224, 0, 0, 0], 3),
    ];
    const RANGES_V6: [(u16, u8); 3] = [(0xfc00, 7), (0xfec0, 10), (0xff00, 8)];
    let of_v4 = RANGES.iter().map(|(prefix, bits)| (IpAddr::from(*prefix), *bits, 96));
    let v6 = |first: u16| Ipv6Addr::new(first, 0, 0, 0, 0, 0, 0, 0);
    let of_v6 = RANGES_V6.iter().map(|(first, bits)| (IpAddr::V6(v6(*first)), *bits, 0));
    let own = [Ipv6Addr::LOCALHOST, Ipv6Addr::UNSPECIFIED].map(|a| (IpAddr::V6(a), WHOLE, 0));
    let mut all = of_v4.chain(of_v6).chain(own);
    let (_, bits, before) = all.find(|(prefix, bits, _)| covers(*prefix, *bits, ip))?;
    Some((before + bits, &PRIVATE))
}

/// As [`kind_of`], of metadata services alone.
pub(super) fn metadata(to: IpAddr) -> Option<(u8, &'static Denial)> {
    let is_metadata = |ip: IpAddr| match ip {
        IpAddr::V4(v4) => METADATA_V4.contains(&v4),
        IpAddr::V6(v6) => METADATA_V6.contains(&v6),
    };
    forms(to).any(is_metadata).then_some((WHOLE, &METADATA))
}

/// An address and those that it may lead to.
fn forms(to: IpAddr) -> impl Iterator<Item = IpAddr> {
    std::iter::once(to).chain(embedded_v4(to))
}

/// The IPv4 addresses to which translators and tunnels may bring an IPv6 one: NAT64 by its well-known prefix (RFC 6052
/// section 2.1) and by prefixes of its local one (RFC 8215, with the lengths of RFC 6052 section 2.2), IPv4-translated
/// (RFC 2765 section 2.1) and IPv4-compatible (RFC 4291 section 2.5.5.1), 6to4 (RFC 3056 section 2), Teredo's server
/// and client (RFC 4380 section 4), ISATAP (RFC 5214 section 6.1).
pub(crate) fn embedded_v4(to: IpAddr) -> SmallVec<[IpAddr; 4]> {
    let IpAddr::V6(v6) = to else { return SmallVec::new() };
    let o = v6.octets();
    let at = |n: usize| IpAddr::from([o[n], o[n + 1], o[n + 2], o[n + 3]]);
    let around = |a: usize, b: usize, c: usize, d: usize| IpAddr::from([o[a], o[b], o[c], o[d]]);
    let mut found = SmallVec::new();
    match v6.segments() {
        // The octet 8 is none of the address (RFC 6052 section 2.2).
        [0x64, 0xff9b, 1, ..] => {
            found.extend([around(6, 7, 9, 10), around(7, 9, 10, 11), around(9, 10, 11, 12), at(12)])
        }
        [0x64, 0xff9b, 0, 0, 0, 0, ..] | [0, 0, 0, 0, 0xffff, 0, ..] | [0, 0, 0, 0, 0, 0, ..] => {
            found.push(at(12));
        }
        [0x2002, ..] => found.push(at(2)),
        [0x2001, 0, ..] => {
            found.push(at(4));
            found.push(IpAddr::from([!o[12], !o[13], !o[14], !o[15]]));
        }
        _ => {}
    }
    if matches!(v6.segments(), [.., 0 | 0x200, 0x5efe, _, _]) {
        found.push(at(12));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forms_of_an_ipv4_address_are_known() {
        let wanted: IpAddr = "10.1.2.3".parse().unwrap();
        for form in [
            "64:ff9b::10.1.2.3",
            "64:ff9b:1::10.1.2.3",
            "64:ff9b:1:7::10.1.2.3",
            "64:ff9b:1:a01:2:300::",
            "64:ff9b:1:ff0a:1:203::",
            "64:ff9b:1:ffff:a:102:300::",
            "::ffff:0:10.1.2.3",
            "::10.1.2.3",
            "2002:a01:203::",
            "2002:a01:203:7::1",
            "2001:0:a01:203::1",
            "2001:0:c000:201:0:1:f5fe:fdfc",
            "2001:db8::5efe:10.1.2.3",
            "2001:db8::200:5efe:10.1.2.3",
        ] {
            let found = embedded_v4(form.parse().unwrap());
            assert!(found.contains(&wanted), "{form}: {found:?}");
        }
        for other in ["2001:db8::a01:203", "2001:a01:203::1", "64:ff9b:2::a01:203", "10.1.2.3"] {
            assert!(embedded_v4(other.parse().unwrap()).is_empty(), "{other}");
        }
    }

    #[test]
    fn private_addresses_are_guarded_where_a_name_leads_there() {
        let kind = |text: &str, is_by_name| {
            kind_of(text.parse().unwrap(), false, is_by_name, None).map(|(_, denial)| denial)
        };
        for private in [
            "10.0.0.1",
            "100.127.0.1",
            "127.0.0.1",
            "172.31.0.1",
            "192.168.9.9",
            "198.19.0.7",
            "224.0.0.1",
            "255.255.255.255",
            "0.0.0.0",
            "fd12::1",
            "ff02::1",
            "::1",
            "::",
            "64:ff9b::10.0.0.1",
        ] {
            assert_eq!(kind(private, true), Some(&PRIVATE), "{private}");
            assert_eq!(kind(private, false), None, "{private}");
        }
        for public in
            ["9.9.9.9", "100.128.0.1", "172.32.0.1", "192.0.1.1", "198.20.0.1", "2001:db8::1"]
        {
            assert_eq!(kind(public, true), None, "{public}");
        }
        assert_eq!(kind("169.254.169.254", true), Some(&METADATA));
    }

    #[test]
    fn metadata_and_link_local_addresses_are_guarded_however_they_are_written() {
        let kind = |text: &str| {
            kind_of(text.parse().unwrap(), false, false, None).map(|(_, denial)| denial)
        };
        for metadata in [
            "169.254.169.254",
            "fd00:ec2::254",
            "169.254.170.2",
            "100.100.100.200",
            "192.0.0.192",
            "168.63.129.16",
            "fd20:ce::254",
            "fd00:c1::a9fe:a9fe",
            "fd00:a9fe:a9fe::1",
            "fd00:100::100:200",
            "64:ff9b::169.254.169.254",
            "2002:a9fe:a9fe::1",
        ] {
            assert_eq!(kind(metadata), Some(&METADATA), "{metadata}");
        }
        for link_local in ["169.254.1.1", "fe80::1", "::ffff:0:169.254.9.9"] {
            assert_eq!(kind(link_local), Some(&LINK_LOCAL), "{link_local}");
        }
        assert_eq!(kind("10.1.2.3").or(kind("2001:db8::1")), None);
        assert_eq!(kind_of("10.1.2.3".parse().unwrap(), true, false, None), Some((WHOLE, &HOST)));
    }
}
