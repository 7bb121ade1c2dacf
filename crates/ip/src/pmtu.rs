//! Path MTU: what is known to be smaller than the link (RFC 1191, RFC 8201).

use alloc::collections::BTreeMap;
use core::cmp::Ordering;
use core::net::IpAddr;

use fulmar_base::Instant;
use fulmar_wire::protocol;

/// Paths remembered at most, in each table. More, and the one that expires first gives way: losing one costs
/// another ICMP message, not a connection.
const MAX_PATHS: usize = 256;
/// Least path MTU that is believed for IPv4: the size that every host must take (RFC 1122 section
/// 3.3.2). A router may really have less (RFC 791: 68), so that a report of less also lets routers
/// fragment.
const LEAST_V4: usize = 576;
/// Least MTU of any IPv6 link (RFC 8200 section 5).
const LEAST_V6: usize = 1280;
/// Sizes that links have (RFC 1191 section 7), for routers that do not say theirs.
const PLATEAUS: [usize; 8] = [32000, 17914, 8166, 4352, 2002, 1492, 1006, 576];

/// The least path MTU that is believed.
pub(crate) fn least_mtu(is_v4: bool) -> usize {
    if is_v4 { LEAST_V4 } else { LEAST_V6 }
}

/// A guess at the path MTU from the size of a packet that did not pass (RFC 1191 section 7.1).
pub(crate) fn plateau_below(packet_bytes: usize) -> usize {
    PLATEAUS.into_iter().find(|&p| p < packet_bytes).unwrap_or(LEAST_V4)
}

/// The largest packets of a path.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Limit {
    pub(crate) mtu: usize,
    /// The true MTU is less than we send: routers must fragment.
    pub(crate) must_fragment: bool,
}

impl Limit {
    /// What both limits allow.
    fn and(self, other: Option<&Path>) -> Limit {
        let Some(Path { limit, .. }) = other else { return self };
        match limit.mtu.cmp(&self.mtu) {
            Ordering::Less => *limit,
            Ordering::Equal => {
                Limit { must_fragment: limit.must_fragment || self.must_fragment, ..self }
            }
            Ordering::Greater => self,
        }
    }
}

/// The limits of a path for each kind of traffic.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Limits {
    pub(crate) tcp: Limit,
    /// What is not TCP; never more than `tcp`.
    pub(crate) datagrams: Limit,
}

impl Limits {
    /// The same for all traffic.
    pub(crate) fn of(mtu: usize) -> Limits {
        let limit = Limit { mtu, must_fragment: false };
        Limits { tcp: limit, datagrams: limit }
    }

    pub(crate) fn for_protocol(&self, protocol: u8) -> Limit {
        if protocol == protocol::TCP { self.tcp } else { self.datagrams }
    }
}

/// What a lowered MTU applies to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Evidence {
    /// TCP has proof that the quoted segment was in flight: for all traffic.
    Segment,
    /// A datagram was quoted that a socket may have sent. That proves less, so that TCP does not
    /// follow it.
    Datagram,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Path {
    limit: Limit,
    expires: Instant,
}

/// The destinations with a path MTU smaller than their route's, by what it is known from. Each table
/// has its own bound: reports about datagrams never displace what TCP has proven.
#[derive(Clone, Debug, Default)]
pub(crate) struct PathMtus {
    proven: Table,
    claimed: Table,
    next_expiry: Option<Instant>,
    generation: u64,
}

impl PathMtus {
    /// The limits of the path to `dst`, whose route has `route_mtu`.
    pub(crate) fn limits(&self, dst: IpAddr, route_mtu: usize) -> Limits {
        let route = Limit { mtu: route_mtu, must_fragment: false };
        let tcp = route.and(self.proven.paths.get(&dst));
        Limits { tcp, datagrams: tcp.and(self.claimed.paths.get(&dst)) }
    }

    /// Lowers the MTU of the path to `dst`, whose limits are `known`. A report that does not lower it
    /// is ignored: raising is by expiry only. Returns whether it was lowered.
    pub(crate) fn lower(
        &mut self,
        dst: IpAddr,
        mtu: usize,
        (evidence, known): (Evidence, Limits),
        expires: Instant,
    ) -> bool {
        let least = least_mtu(dst.is_ipv4());
        let limit = Limit { mtu: mtu.max(least), must_fragment: mtu < least && dst.is_ipv4() };
        let (table, known) = match evidence {
            Evidence::Segment => (&mut self.proven, known.tcp),
            Evidence::Datagram => (&mut self.claimed, known.datagrams),
        };
        let is_new = limit.mtu < known.mtu
            || (limit.mtu == known.mtu && limit.must_fragment && !known.must_fragment);
        if is_new {
            table.insert(dst, Path { limit, expires });
            self.generation = self.generation.wrapping_add(1);
            self.next_expiry = Some(self.next_expiry.map_or(expires, |e| e.min(expires)));
        }
        is_new
    }

    /// Forgets what has expired, so that a larger MTU is tried again (RFC 1191 section 6.3).
    pub(crate) fn on_timer(&mut self, now: Instant) {
        if self.next_expiry.is_none_or(|e| now < e) {
            return;
        }
        let next = [self.proven.expire(now), self.claimed.expire(now)];
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
    /// Stores a path; of too many, the one that expires first gives way.
    fn insert(&mut self, dst: IpAddr, path: Path) {
        if self.paths.len() >= MAX_PATHS && !self.paths.contains_key(&dst) {
            let first = self.paths.iter().min_by_key(|(ip, p)| (p.expires, **ip));
            if let Some(ip) = first.map(|(ip, _)| *ip) {
                self.paths.remove(&ip);
            }
        }
        self.paths.insert(dst, path);
    }

    /// Forgets what has expired. Returns when the next path does.
    fn expire(&mut self, now: Instant) -> Option<Instant> {
        self.paths.retain(|_, p| now < p.expires);
        self.paths.values().map(|p| p.expires).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINK: usize = 1500;

    fn ip(s: &str) -> IpAddr {
        s.parse().unwrap()
    }

    fn at(ms: u64) -> Instant {
        Instant::from_millis(ms)
    }

    fn lower(t: &mut PathMtus, dst: &str, mtu: usize, evidence: Evidence) -> bool {
        let dst = ip(dst);
        let known = t.limits(dst, LINK);
        t.lower(dst, mtu, (evidence, known), at(1000))
    }

    #[test]
    fn a_report_only_lowers() {
        let mut t = PathMtus::default();
        assert!(!lower(&mut t, "10.0.0.1", 1600, Evidence::Segment));
        assert!(lower(&mut t, "10.0.0.1", 1400, Evidence::Segment));
        assert!(!lower(&mut t, "10.0.0.1", 1450, Evidence::Segment));
        assert!(!lower(&mut t, "10.0.0.1", 1400, Evidence::Segment));
        assert_eq!(t.limits(ip("10.0.0.1"), LINK), Limits::of(1400));
    }

    #[test]
    fn a_report_below_the_least_is_raised_to_it_and_news_once() {
        let mut t = PathMtus::default();
        assert!(lower(&mut t, "10.0.0.1", 68, Evidence::Segment));
        assert!(!lower(&mut t, "10.0.0.1", 67, Evidence::Segment));
        let limit = t.limits(ip("10.0.0.1"), LINK).tcp;
        assert_eq!(limit, Limit { mtu: 576, must_fragment: true });
        assert!(lower(&mut t, "2001:db8::1", 68, Evidence::Segment));
        let limit = t.limits(ip("2001:db8::1"), LINK).tcp;
        assert_eq!(limit, Limit { mtu: 1280, must_fragment: false });
    }

    #[test]
    fn what_a_datagram_is_quoted_for_does_not_lower_the_path_of_tcp() {
        let mut t = PathMtus::default();
        assert!(lower(&mut t, "10.0.0.1", 600, Evidence::Datagram));
        let limits = t.limits(ip("10.0.0.1"), LINK);
        assert_eq!((limits.tcp.mtu, limits.datagrams.mtu), (LINK, 600));
        // What TCP has proven counts for everything.
        assert!(lower(&mut t, "10.0.0.1", 590, Evidence::Segment));
        let limits = t.limits(ip("10.0.0.1"), LINK);
        assert_eq!((limits.tcp.mtu, limits.datagrams.mtu), (590, 590));
    }

    #[test]
    fn a_lowered_path_expires() {
        let mut t = PathMtus::default();
        lower(&mut t, "10.0.0.1", 1400, Evidence::Segment);
        let generation = t.generation();
        t.on_timer(at(999));
        assert_eq!(t.limits(ip("10.0.0.1"), LINK), Limits::of(1400));
        t.on_timer(at(1000));
        assert_eq!(t.limits(ip("10.0.0.1"), LINK), Limits::of(LINK));
        assert_ne!(t.generation(), generation);
        assert_eq!(t.next_deadline(), None);
    }

    #[test]
    fn the_tables_are_bounded_and_datagrams_displace_nothing_of_tcp() {
        let mut t = PathMtus::default();
        lower(&mut t, "192.0.2.1", 1400, Evidence::Segment);
        for n in 0..=MAX_PATHS as u32 {
            let dst = IpAddr::V4((0x0a00_0000 + n).into());
            let known = t.limits(dst, LINK);
            t.lower(dst, 1400, (Evidence::Datagram, known), at(2000 + u64::from(n)));
        }
        assert_eq!(t.claimed.paths.len(), MAX_PATHS);
        assert_eq!(t.limits(ip("10.0.0.0"), LINK), Limits::of(LINK));
        assert_eq!(t.limits(ip("10.0.0.1"), LINK).datagrams.mtu, 1400);
        assert_eq!(t.limits(ip("192.0.2.1"), LINK), Limits::of(1400));
    }

    #[test]
    fn plateaus_are_below_the_packet() {
        assert_eq!(plateau_below(1500), 1492);
        assert_eq!(plateau_below(1492), 1006);
        assert_eq!(plateau_below(60), 576);
    }
}
