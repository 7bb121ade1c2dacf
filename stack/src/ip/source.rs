//! Source address selection: RFC 6724 section 5, for both IP versions.

use core::cmp::Reverse;
use core::net::{IpAddr, Ipv6Addr};

use crate::route::Prefix;

use crate::ip::IfAddr;

/// The default policy table (RFC 6724 section 2.1): prefix, prefix length, label; longest first.
/// IPv4 addresses are v4-mapped.
const LABELS: [(Ipv6Addr, u8, u8); 9] = [
    (Ipv6Addr::LOCALHOST, 128, 0),
    (Ipv6Addr::new(0, 0, 0, 0, 0, 0xffff, 0, 0), 96, 4),
    (Ipv6Addr::UNSPECIFIED, 96, 3),
    (Ipv6Addr::new(0x2001, 0, 0, 0, 0, 0, 0, 0), 32, 5),
    (Ipv6Addr::new(0x2002, 0, 0, 0, 0, 0, 0, 0), 16, 2),
    (Ipv6Addr::new(0x3ffe, 0, 0, 0, 0, 0, 0, 0), 16, 12),
    (Ipv6Addr::new(0xfec0, 0, 0, 0, 0, 0, 0, 0), 10, 11),
    (Ipv6Addr::new(0xfc00, 0, 0, 0, 0, 0, 0, 0), 7, 13),
    (Ipv6Addr::UNSPECIFIED, 0, 1),
];

/// The label of an address: rule 6 prefers a source with the destination's label.
fn label_of(ip: IpAddr) -> u8 {
    let ip = IpAddr::V6(match ip {
        IpAddr::V4(a) => a.to_ipv6_mapped(),
        IpAddr::V6(a) => a,
    });
    let holds = |(addr, len, _): &&(Ipv6Addr, u8, u8)| {
        Prefix { addr: IpAddr::V6(*addr), len: *len }.contains(ip)
    };
    LABELS.iter().find(holds).map_or(1, |found| found.2)
}

/// The scope of an address, as a multicast scope value (RFC 6724 sections 3.1 and 3.2, RFC 7346).
fn scope_of(ip: IpAddr) -> u8 {
    const LINK: u8 = 2;
    const SITE: u8 = 5;
    const GLOBAL: u8 = 14;
    match ip {
        IpAddr::V4(a) if a.is_link_local() || a.is_loopback() => LINK,
        // RFC 2365: 224.0.0.0/24 has link-local scope.
        IpAddr::V4(a) if a.to_bits() >> 8 == 0x00e0_0000 => LINK,
        IpAddr::V4(_) => GLOBAL,
        IpAddr::V6(a) if a.is_multicast() => {
            let [_, scope, ..] = a.octets();
            scope & 0xf
        }
        IpAddr::V6(a) if a.is_unicast_link_local() || a == Ipv6Addr::LOCALHOST => LINK,
        IpAddr::V6(a) if a.segments().first().is_some_and(|s| s >> 6 == 0x3fb) => SITE,
        IpAddr::V6(_) => GLOBAL,
    }
}

/// CommonPrefixLen: leading bits that source and destination share, at most the source's prefix
/// length (RFC 6724 section 2.2).
fn common_bits(source: &IfAddr, dst: IpAddr) -> u32 {
    let shared = match (source.addr, dst) {
        (IpAddr::V4(a), IpAddr::V4(b)) => (a.to_bits() ^ b.to_bits()).leading_zeros(),
        (IpAddr::V6(a), IpAddr::V6(b)) => (a.to_bits() ^ b.to_bits()).leading_zeros(),
        _ => 0,
    };
    shared.min(source.prefix_len.into())
}

/// Rule 2 as a rank (higher is better): the smallest scope that is not below the destination's; if
/// all are below, the largest.
fn scope_rank(source: u8, destination: u8) -> (bool, i16) {
    let reaches = source >= destination;
    let distance = i16::from(source);
    (reaches, if reaches { distance.saturating_neg() } else { distance })
}

/// Selects the source address for packets to `dst` via `next_hop`, of the same IP version, by the
/// rules in order:
///
/// 1. the destination itself; 2. appropriate scope; 5.5. the prefix of the next hop, which with static addresses
///    stands for the advertising router; 6. matching label; 8. longest common prefix. Ties go to the address
///    configured first.
///
/// The other rules do not apply: static addresses are neither deprecated (3) nor temporary (7), there are no home
/// addresses (4), and there is one interface (5).
pub(crate) fn select<'a>(
    own: impl Iterator<Item = &'a IfAddr>,
    dst: IpAddr,
    next_hop: IpAddr,
) -> Option<IpAddr> {
    let (label, scope) = (label_of(dst), scope_of(dst));
    let rank = |(at, own): &(usize, &IfAddr)| {
        (
            own.addr == dst,
            scope_rank(scope_of(own.addr), scope),
            own.prefix().is_some_and(|p| p.contains(next_hop)),
            label_of(own.addr) == label,
            common_bits(own, dst),
            Reverse(*at),
        )
    };
    let same_version = own.filter(|own| own.addr.is_ipv4() == dst.is_ipv4());
    same_version.enumerate().max_by_key(rank).map(|(_, own)| own.addr)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(s: &str) -> IpAddr {
        s.parse().unwrap()
    }

    fn own(text: &&str) -> IfAddr {
        let (addr, len) = text.split_once('/').unwrap();
        IfAddr { addr: ip(addr), prefix_len: len.parse().unwrap() }
    }

    /// The source selected among `own`, with a gateway outside of all prefixes.
    fn source(texts: &[&str], dst: &str) -> IpAddr {
        let all: Vec<IfAddr> = texts.iter().map(own).collect();
        select(all.iter(), ip(dst), ip("fe80::ffff")).unwrap()
    }

    /// The examples of RFC 6724 section 10.1 for the rules that apply, with a link-local gateway.
    #[test]
    fn the_examples_of_the_rfc_hold() {
        for (dst, own, expected) in [
            ("2001:db8:1::1", &["2001:db8:3::1/64", "fe80::1/64"][..], "2001:db8:3::1"),
            ("ff05::1", &["2001:db8:3::1/64", "fe80::1/64"], "2001:db8:3::1"),
            ("2001:db8:1::1", &["2001:db8:1::1/64", "2001:db8:2::1/64"], "2001:db8:1::1"),
            ("fe80::2", &["fe80::1/64", "2001:db8:1::1/64"], "fe80::1"),
            ("2001:db8:1::1", &["2001:db8:1::2/64", "2001:db8:3::2/64"], "2001:db8:1::2"),
            (
                "2002:c633:6401::1",
                &["2002:c633:6401::d5e3:7953:13eb:22e8/64", "2001:db8:1::2/64"],
                "2002:c633:6401::d5e3:7953:13eb:22e8",
            ),
        ] {
            assert_eq!(source(own, dst), ip(expected), "to {dst} from {own:?}");
            let turned: Vec<&str> = own.iter().rev().copied().collect();
            assert_eq!(source(&turned, dst), ip(expected), "to {dst} from {turned:?}");
        }
    }

    #[test]
    fn a_matching_label_precedes_a_longer_prefix() {
        // Unique local against global: without labels the global address shares the same number of bits.
        assert_eq!(source(&["2001:db8::1/64", "fd00:1::1/64"], "fdff::9"), ip("fd00:1::1"));
        assert_eq!(source(&["fd00:1::1/64", "2001:db8::1/64"], "2600::9"), ip("2001:db8::1"));
        assert_eq!(source(&["2002:1::1/48", "2003::1/64"], "2001:db8::9"), ip("2003::1"));
    }

    #[test]
    fn the_common_prefix_is_limited_to_the_prefix_of_the_source() {
        // Both share the /64 and further bits do not count, so the first one is selected.
        assert_eq!(
            source(&["2001:db8::ff/64", "2001:db8::1/64"], "2001:db8::2"),
            ip("2001:db8::ff")
        );
    }

    #[test]
    fn ties_go_to_the_address_configured_first() {
        assert_eq!(source(&["10.0.0.1/8", "10.0.0.2/8"], "10.9.9.9"), ip("10.0.0.1"));
    }

    #[test]
    fn labels_are_those_of_the_longest_prefix_of_the_policy_table() {
        for (addr, label) in [
            ("::1", 0),
            ("10.0.0.1", 4),
            ("::10.0.0.1", 3),
            ("2001:0:1::1", 5),
            ("2001:db8::1", 1),
            ("2002::1", 2),
            ("3ffe::1", 12),
            ("fec0::1", 11),
            ("fd12::1", 13),
            ("fe80::1", 1),
        ] {
            assert_eq!(label_of(ip(addr)), label, "{addr}");
        }
    }
}
