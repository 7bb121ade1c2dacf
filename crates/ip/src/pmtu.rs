//! Path MTU: what is known to be smaller than the link (RFC 1191, RFC 8201).

use alloc::collections::BTreeMap;
use core::net::IpAddr;

use fulmar_base::Instant;

/// Paths remembered at most. More, and the one that expires first gives way: losing one costs
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

/// What is known about one path.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Path {
    pub(crate) mtu: usize,
    /// The true MTU is less than we send: routers must fragment.
    pub(crate) must_fragment: bool,
    expires: Instant,
}

/// The destinations with a path MTU smaller than their route's.
#[derive(Clone, Debug, Default)]
pub(crate) struct PathMtus {
    paths: BTreeMap<IpAddr, Path>,
    next_expiry: Option<Instant>,
    generation: u64,
}

impl PathMtus {
    pub(crate) fn find(&self, dst: IpAddr) -> Option<&Path> {
        self.paths.get(&dst)
    }

    /// Lowers the MTU of the path to `dst`, whose route has `route_mtu`. A report that does not
    /// lower it is ignored: raising is by expiry only.
    pub(crate) fn lower(&mut self, dst: IpAddr, mtu: usize, route_mtu: usize, expires: Instant) {
        let least = least_mtu(dst.is_ipv4());
        let current = self.paths.get(&dst).map_or(route_mtu, |p| p.mtu);
        let must_fragment = mtu < least && dst.is_ipv4();
        let was_fragmented = self.paths.get(&dst).is_some_and(|p| p.must_fragment);
        let mtu = mtu.max(least);
        if mtu > current || (mtu == current && must_fragment == was_fragmented) {
            return;
        }
        if self.paths.len() >= MAX_PATHS && !self.paths.contains_key(&dst) {
            let first = self.paths.iter().min_by_key(|(ip, p)| (p.expires, **ip));
            if let Some(ip) = first.map(|(ip, _)| *ip) {
                self.paths.remove(&ip);
            }
        }
        self.paths.insert(dst, Path { mtu, must_fragment, expires });
        self.generation = self.generation.wrapping_add(1);
        self.next_expiry = Some(self.next_expiry.map_or(expires, |e| e.min(expires)));
    }

    /// Forgets what has expired, so that a larger MTU is tried again (RFC 1191 section 6.3).
    pub(crate) fn on_timer(&mut self, now: Instant) {
        if self.next_expiry.is_none_or(|e| now < e) {
            return;
        }
        let before = self.paths.len();
        self.paths.retain(|_, p| now < p.expires);
        if self.paths.len() != before {
            self.generation = self.generation.wrapping_add(1);
        }
        self.next_expiry = self.paths.values().map(|p| p.expires).min();
    }

    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        self.next_expiry
    }

    pub(crate) fn generation(&self) -> u64 {
        self.generation
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(s: &str) -> IpAddr {
        s.parse().unwrap()
    }

    #[test]
    fn a_report_only_lowers() {
        let mut t = PathMtus::default();
        let (a, end) = (ip("10.0.0.1"), Instant::from_millis(1000));
        t.lower(a, 1600, 1500, end);
        assert_eq!(t.find(a), None);
        t.lower(a, 1400, 1500, end);
        t.lower(a, 1450, 1500, end);
        assert_eq!(t.find(a).unwrap().mtu, 1400);
    }

    #[test]
    fn a_report_below_the_least_is_raised_to_it() {
        let mut t = PathMtus::default();
        let end = Instant::from_millis(1000);
        t.lower(ip("10.0.0.1"), 68, 1500, end);
        let path = *t.find(ip("10.0.0.1")).unwrap();
        assert_eq!((path.mtu, path.must_fragment), (576, true));
        t.lower(ip("2001:db8::1"), 68, 1500, end);
        let path = *t.find(ip("2001:db8::1")).unwrap();
        assert_eq!((path.mtu, path.must_fragment), (1280, false));
    }

    #[test]
    fn a_lowered_path_expires() {
        let mut t = PathMtus::default();
        t.lower(ip("10.0.0.1"), 1400, 1500, Instant::from_millis(1000));
        let generation = t.generation();
        t.on_timer(Instant::from_millis(999));
        assert!(t.find(ip("10.0.0.1")).is_some());
        t.on_timer(Instant::from_millis(1000));
        assert_eq!(t.find(ip("10.0.0.1")), None);
        assert_ne!(t.generation(), generation);
        assert_eq!(t.next_deadline(), None);
    }

    #[test]
    fn the_table_is_bounded_and_drops_what_expires_first() {
        let mut t = PathMtus::default();
        for n in 0..=MAX_PATHS as u32 {
            let dst = IpAddr::V4((0x0a00_0000 + n).into());
            t.lower(dst, 1400, 1500, Instant::from_millis(1000 + u64::from(n)));
        }
        assert_eq!(t.paths.len(), MAX_PATHS);
        assert_eq!(t.find(ip("10.0.0.0")), None);
        assert!(t.find(ip("10.0.0.1")).is_some());
    }

    #[test]
    fn plateaus_are_below_the_packet() {
        assert_eq!(plateau_below(1500), 1492);
        assert_eq!(plateau_below(1492), 1006);
        assert_eq!(plateau_below(60), 576);
    }
}
