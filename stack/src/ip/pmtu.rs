//! The path MTU cache (RFC 1191, RFC 8201).

use alloc::collections::BTreeMap;
use core::cmp::Ordering;
use core::net::IpAddr;

use crate::base::{Instant, IpVersion, MtuDiscovery};
use crate::wire::protocol;

/// Entries per table. When full, the entry that expires first is evicted, which costs another ICMP
/// message.
const MAX_PATHS: usize = 256;
/// Smallest path MTU adopted for IPv4: the datagram size that every host must accept (RFC 1122
/// section 3.3.2). A link may have a smaller MTU (RFC 791: 68), so a message below it also clears
/// DF to let routers fragment.
const SMALLEST_V4: usize = 576;
/// Minimum MTU of an IPv6 link (RFC 8200 section 5).
const SMALLEST_V6: usize = 1280;
/// Common MTUs (RFC 1191 section 7), for routers that report none.
const PLATEAUS: [usize; 8] = [32000, 17914, 8166, 4352, 2002, 1492, 1006, 576];

/// The smallest path MTU adopted.
pub(crate) fn smallest_mtu(version: IpVersion) -> usize {
    match version {
        IpVersion::V4 => SMALLEST_V4,
        IpVersion::V6 => SMALLEST_V6,
    }
}

/// Estimates the path MTU from the size of a packet that did not pass (RFC 1191 section 7.1).
pub(crate) fn plateau_below(packet_bytes: usize) -> usize {
    PLATEAUS.into_iter().find(|&p| p < packet_bytes).unwrap_or(SMALLEST_V4)
}

/// The packet size limit of a path.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Limit {
    pub(crate) mtu: usize,
    /// The path MTU is below the smallest one adopted: clear DF so that routers fragment.
    pub(crate) clear_df: bool,
}

impl Limit {
    /// The tighter of two limits.
    fn tighter(self, other: Option<&Path>) -> Limit {
        let Some(Path { limit, .. }) = other else { return self };
        match limit.mtu.cmp(&self.mtu) {
            Ordering::Less => *limit,
            Ordering::Equal => Limit { clear_df: limit.clear_df || self.clear_df, ..self },
            Ordering::Greater => self,
        }
    }
}

/// The limits of a path by protocol.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Limits {
    pub(crate) tcp: Limit,
    /// For other protocols; never more than `tcp`.
    pub(crate) datagrams: Limit,
    /// MTU of the interface, bytes: the limit of probes.
    pub(crate) link_mtu: usize,
}

impl Limits {
    /// One limit for all protocols.
    pub(crate) fn uniform(mtu: usize) -> Limits {
        let limit = Limit { mtu, clear_df: false };
        Limits { tcp: limit, datagrams: limit, link_mtu: mtu }
    }

    /// The limit of packets of a protocol.
    pub(crate) fn of(&self, protocol: u8, discovery: MtuDiscovery) -> Limit {
        match discovery {
            MtuDiscovery::Probe => Limit { mtu: self.link_mtu, clear_df: false },
            _ if protocol == protocol::TCP => self.tcp,
            _ => self.datagrams,
        }
    }
}

/// The evidence for a lowered MTU, which determines the traffic it applies to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Evidence {
    /// TCP has verified that the quoted segment was in flight: applies to all traffic.
    Segment,
    /// The message quotes a datagram that a socket may have sent. Weaker evidence: not applied to
    /// TCP.
    Datagram,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Path {
    limit: Limit,
    expires: Instant,
}

/// Destinations whose path MTU is below their route's, by evidence. Each table has its own bound,
/// so that messages about datagrams never evict entries verified by TCP.
#[derive(Clone, Debug, Default)]
pub(crate) struct PathMtus {
    verified: Table,
    unverified: Table,
    next_expiry: Option<Instant>,
    generation: u64,
}

impl PathMtus {
    /// The limits of the path to `dst` over a route with `route_mtu` and an interface with `link_mtu`.
    pub(crate) fn limits(&self, dst: IpAddr, route_mtu: usize, link_mtu: usize) -> Limits {
        let route = Limit { mtu: route_mtu, clear_df: false };
        let tcp = route.tighter(self.verified.paths.get(&dst));
        let datagrams = tcp.tighter(self.unverified.paths.get(&dst));
        Limits { tcp, datagrams, link_mtu }
    }

    /// Lowers the path MTU to `dst`, whose current limits are `known`. An MTU that is not lower is
    /// ignored: the MTU is raised by expiry only. Returns whether it was lowered.
    pub(crate) fn lower(
        &mut self,
        dst: IpAddr,
        mtu: usize,
        evidence: Evidence,
        known: Limits,
        expires: Instant,
    ) -> bool {
        let least = smallest_mtu(IpVersion::of(&dst));
        let limit = Limit { mtu: mtu.max(least), clear_df: mtu < least && dst.is_ipv4() };
        let (table, known) = match evidence {
            Evidence::Segment => (&mut self.verified, known.tcp),
            Evidence::Datagram => (&mut self.unverified, known.datagrams),
        };
        let is_new =
            limit.mtu < known.mtu || (limit.mtu == known.mtu && limit.clear_df && !known.clear_df);
        if is_new {
            table.insert(dst, Path { limit, expires });
            self.generation = self.generation.wrapping_add(1);
            self.next_expiry = Some(self.next_expiry.map_or(expires, |e| e.min(expires)));
        }
        is_new
    }

    /// Removes expired entries, so that a larger MTU is tried again (RFC 1191 section 6.3).
    pub(crate) fn on_timer(&mut self, now: Instant) {
        if self.next_expiry.is_none_or(|e| now < e) {
            return;
        }
        let next = [self.verified.expire(now), self.unverified.expire(now)];
        self.generation = self.generation.wrapping_add(1);
        self.next_expiry = next.into_iter().flatten().min();
    }

    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        self.next_expiry
    }

    pub(crate) fn generation(&self) -> u64 {
        self.generation
    }
}

#[derive(Clone, Debug, Default)]
struct Table {
    paths: BTreeMap<IpAddr, Path>,
}

impl Table {
    /// Inserts an entry. In a full table one of the same network is evicted if there is one, so that a peer with many
    /// addresses displaces its own; of these, or of all, the one that expires first.
    fn insert(&mut self, dst: IpAddr, path: Path) {
        if self.paths.len() >= MAX_PATHS && !self.paths.contains_key(&dst) {
            let rank =
                |(ip, p): &(&IpAddr, &Path)| (network_of(**ip) != network_of(dst), p.expires, **ip);
            let first = self.paths.iter().min_by_key(rank);
            if let Some(ip) = first.map(|(ip, _)| *ip) {
                self.paths.remove(&ip);
            }
        }
        self.paths.insert(dst, path);
    }

    /// Removes expired entries. Returns the next expiry.
    fn expire(&mut self, now: Instant) -> Option<Instant> {
        self.paths.retain(|_, p| now < p.expires);
        self.paths.values().map(|p| p.expires).min()
    }
}

/// The upper 64 bits of an IPv6 address, which one host may have to itself, or an IPv4 address.
fn network_of(ip: IpAddr) -> u128 {
    match ip {
        IpAddr::V4(a) => a.to_ipv6_mapped().to_bits(),
        IpAddr::V6(a) => a.to_bits() >> 64 << 64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINK: usize = 1500;

    /// The limits of a path with an MTU below the link's.
    fn lowered(mtu: usize) -> Limits {
        Limits { link_mtu: LINK, ..Limits::uniform(mtu) }
    }

    fn ip(s: &str) -> IpAddr {
        s.parse().unwrap()
    }

    fn at(ms: u64) -> Instant {
        Instant::from_millis(ms)
    }

    fn lower(t: &mut PathMtus, dst: &str, mtu: usize, evidence: Evidence) -> bool {
        let dst = ip(dst);
        let known = t.limits(dst, LINK, LINK);
        t.lower(dst, mtu, evidence, known, at(1000))
    }

    #[test]
    fn a_message_only_lowers_the_path_mtu() {
        let mut t = PathMtus::default();
        assert!(!lower(&mut t, "10.0.0.1", 1600, Evidence::Segment));
        assert!(lower(&mut t, "10.0.0.1", 1400, Evidence::Segment));
        assert!(!lower(&mut t, "10.0.0.1", 1450, Evidence::Segment));
        assert!(!lower(&mut t, "10.0.0.1", 1400, Evidence::Segment));
        assert_eq!(t.limits(ip("10.0.0.1"), LINK, LINK), lowered(1400));
    }

    #[test]
    fn a_message_below_the_smallest_mtu_is_raised_to_it_and_effective_once() {
        let mut t = PathMtus::default();
        assert!(lower(&mut t, "10.0.0.1", 68, Evidence::Segment));
        assert!(!lower(&mut t, "10.0.0.1", 67, Evidence::Segment));
        let limit = t.limits(ip("10.0.0.1"), LINK, LINK).tcp;
        assert_eq!(limit, Limit { mtu: 576, clear_df: true });
        assert!(lower(&mut t, "2001:db8::1", 68, Evidence::Segment));
        let limit = t.limits(ip("2001:db8::1"), LINK, LINK).tcp;
        assert_eq!(limit, Limit { mtu: 1280, clear_df: false });
    }

    #[test]
    fn a_quoted_datagram_does_not_lower_the_path_mtu_of_tcp() {
        let mut t = PathMtus::default();
        assert!(lower(&mut t, "10.0.0.1", 600, Evidence::Datagram));
        let limits = t.limits(ip("10.0.0.1"), LINK, LINK);
        assert_eq!((limits.tcp.mtu, limits.datagrams.mtu), (LINK, 600));
        // Evidence by TCP applies to all traffic.
        assert!(lower(&mut t, "10.0.0.1", 590, Evidence::Segment));
        let limits = t.limits(ip("10.0.0.1"), LINK, LINK);
        assert_eq!((limits.tcp.mtu, limits.datagrams.mtu), (590, 590));
    }

    #[test]
    fn a_lowered_path_expires() {
        let mut t = PathMtus::default();
        lower(&mut t, "10.0.0.1", 1400, Evidence::Segment);
        let generation = t.generation();
        t.on_timer(at(999));
        assert_eq!(t.limits(ip("10.0.0.1"), LINK, LINK), lowered(1400));
        t.on_timer(at(1000));
        assert_eq!(t.limits(ip("10.0.0.1"), LINK, LINK), Limits::uniform(LINK));
        assert_ne!(t.generation(), generation);
        assert_eq!(t.next_deadline(), None);
    }

    #[test]
    fn the_tables_are_bounded_and_datagrams_evict_no_entry_of_tcp() {
        let mut t = PathMtus::default();
        lower(&mut t, "192.0.2.1", 1400, Evidence::Segment);
        for n in 0..=MAX_PATHS as u32 {
            let dst = IpAddr::V4((0x0a00_0000 + n).into());
            let known = t.limits(dst, LINK, LINK);
            t.lower(dst, 1400, Evidence::Datagram, known, at(2000 + u64::from(n)));
        }
        assert_eq!(t.unverified.paths.len(), MAX_PATHS);
        assert_eq!(t.limits(ip("10.0.0.0"), LINK, LINK), Limits::uniform(LINK));
        assert_eq!(t.limits(ip("10.0.0.1"), LINK, LINK).datagrams.mtu, 1400);
        assert_eq!(t.limits(ip("192.0.2.1"), LINK, LINK), lowered(1400));
    }

    #[test]
    fn a_peer_with_many_addresses_displaces_its_own() {
        let mut t = PathMtus::default();
        lower(&mut t, "192.0.2.1", 1400, Evidence::Segment);
        for n in 0..2 * MAX_PATHS as u128 {
            let dst = IpAddr::V6((0x2001_0db8_u128 << 96 | n).into());
            let known = t.limits(dst, LINK, LINK);
            t.lower(dst, 1400, Evidence::Segment, known, at(2000));
        }
        assert_eq!(t.verified.paths.len(), MAX_PATHS);
        assert_eq!(t.limits(ip("192.0.2.1"), LINK, LINK), lowered(1400));
    }

    #[test]
    fn plateaus_are_below_the_packet() {
        assert_eq!(plateau_below(1500), 1492);
        assert_eq!(plateau_below(1492), 1006);
        assert_eq!(plateau_below(60), 576);
    }
}
