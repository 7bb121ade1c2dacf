//! The routing table of a stack: longest-prefix match for both IP versions.
//!
//! A host usually has few routes: they are flattened into one vector of ranges, and a look-up is a
//! binary search. From [`family::FIB_THRESHOLD`] routes on they are in a FIB (`fib.rs`), with constant cost
//! up to a million (`family.rs`). `ip` caches the result per destination, so a look-up runs once
//! per destination and change, not once per packet.

mod family;

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::route::next_hop::{Group, GroupError, NextHop, NextHops};
use family::Family;

/// An address prefix.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Prefix {
    /// Any address of the prefix; [`Table::insert`] clears the host bits.
    pub addr: IpAddr,
    /// Prefix length: 0 to 32 for IPv4, 0 to 128 for IPv6.
    pub len: u8,
}

impl Prefix {
    /// 0.0.0.0/0.
    pub const DEFAULT_V4: Prefix = Prefix { addr: IpAddr::V4(Ipv4Addr::UNSPECIFIED), len: 0 };
    /// ::/0.
    pub const DEFAULT_V6: Prefix = Prefix { addr: IpAddr::V6(Ipv6Addr::UNSPECIFIED), len: 0 };

    /// The prefix of length `len` that contains `addr`, host bits cleared. `None` if `len` exceeds
    /// the address length.
    pub fn new(addr: IpAddr, len: u8) -> Option<Prefix> {
        let addr = match addr {
            IpAddr::V4(a) if len <= 32 => {
                IpAddr::V4(Ipv4Addr::from_bits(a.to_bits() & mask32(len)))
            }
            IpAddr::V6(a) if len <= 128 => {
                IpAddr::V6(Ipv6Addr::from_bits(a.to_bits() & mask128(len)))
            }
            _ => return None,
        };
        Some(Prefix { addr, len })
    }

    /// Whether `ip` is of the same version and inside the prefix.
    #[inline]
    pub fn contains(&self, ip: IpAddr) -> bool {
        match (self.addr, ip) {
            (IpAddr::V4(a), IpAddr::V4(b)) => (a.to_bits() ^ b.to_bits()) & mask32(self.len) == 0,
            (IpAddr::V6(a), IpAddr::V6(b)) => (a.to_bits() ^ b.to_bits()) & mask128(self.len) == 0,
            _ => false,
        }
    }
}

/// The text is not a prefix.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ParsePrefixError;

impl core::fmt::Display for ParsePrefixError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("expected an address and a prefix length, such as 10.77.0.0/16 or fd77::/64")
    }
}

impl core::error::Error for ParsePrefixError {}

/// Host bits are cleared.
impl core::str::FromStr for Prefix {
    type Err = ParsePrefixError;

    fn from_str(text: &str) -> Result<Prefix, ParsePrefixError> {
        let (addr, len) = text.split_once('/').ok_or(ParsePrefixError)?;
        let addr = addr.parse().map_err(|_| ParsePrefixError)?;
        let len = len.parse().map_err(|_| ParsePrefixError)?;
        Prefix::new(addr, len).ok_or(ParsePrefixError)
    }
}

impl core::fmt::Display for Prefix {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{}/{}", self.addr, self.len)
    }
}

/// The mask of `len` leading ones.
const fn mask32(len: u8) -> u32 {
    match u32::MAX.checked_shr(len as u32) {
        Some(host_bits) => !host_bits,
        None => u32::MAX,
    }
}

/// The mask of `len` leading ones.
const fn mask128(len: u8) -> u128 {
    match u128::MAX.checked_shr(len as u32) {
        Some(host_bits) => !host_bits,
        None => u128::MAX,
    }
}

/// A route.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Route {
    /// Destination prefix.
    pub dst: Prefix,
    /// The gateway; `None`: on-link.
    pub via: Option<IpAddr>,
    /// The preferred source address; `None`: selected by `ip`.
    pub src: Option<IpAddr>,
    /// MTU of the route, bytes, if smaller than the link's.
    pub mtu: Option<usize>,
}

impl Route {
    /// A connected (on-link) route.
    pub fn on_link(dst: Prefix) -> Route {
        Route { dst, via: None, src: None, mtu: None }
    }

    /// The default route of the gateway's version.
    pub fn default_via(gateway: IpAddr) -> Route {
        let dst = if gateway.is_ipv4() { Prefix::DEFAULT_V4 } else { Prefix::DEFAULT_V6 };
        Route { dst, via: Some(gateway), src: None, mtu: None }
    }
}

/// Why a route was refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum RouteError {
    /// The prefix length exceeds the address length.
    PrefixLength,
    /// Destination, gateway and source are of different IP versions.
    MixedVersions,
    /// No next hop, or more than `route::MAX_MEMBERS`.
    NextHops,
    /// The table has `MAX_ROUTES` prefixes, or no number for another group of next hops.
    Full,
}

/// Limit of prefixes of a table.
const MAX_ROUTES: usize = if cfg!(test) { 2000 } else { 4 << 20 };

/// The routing table.
#[derive(Default)]
pub struct Table {
    hops: NextHops,
    v4: Family<u32>,
    v6: Family<u128>,
    generation: u64,
}

impl Table {
    /// An empty table.
    pub fn new() -> Table {
        Table::default()
    }

    /// Adds a route, or replaces the one with the same prefix. Returns the replaced route; of a
    /// multipath route, its first next hop.
    ///
    /// # Errors
    /// [`RouteError`]: the table is unchanged.
    pub fn insert(&mut self, route: Route) -> Result<Option<Route>, RouteError> {
        let Route { dst, via, src, mtu } = route;
        self.insert_multipath(dst, &[NextHop { via, src, mtu }])
    }

    /// As [`Table::insert`], for a multipath route (ECMP): each flow keeps its next hop.
    ///
    /// # Errors
    /// [`RouteError`]: the table is unchanged.
    pub(crate) fn insert_multipath(
        &mut self,
        dst: Prefix,
        hops: &[NextHop],
    ) -> Result<Option<Route>, RouteError> {
        let dst = Prefix::new(dst.addr, dst.len).ok_or(RouteError::PrefixLength)?;
        let is_v4 = dst.addr.is_ipv4();
        let mut addresses = hops.iter().flat_map(|hop| [hop.via, hop.src]).flatten();
        if addresses.any(|a| a.is_ipv4() != is_v4) {
            return Err(RouteError::MixedVersions);
        }
        if self.len() >= MAX_ROUTES && self.number(dst).is_none() {
            return Err(RouteError::Full);
        }
        let number = self.hops.add(hops).map_err(|e| match e {
            GroupError::Members => RouteError::NextHops,
            GroupError::Full => RouteError::Full,
        })?;
        let old = match dst.addr {
            IpAddr::V4(a) => self.v4.insert(a.to_bits(), dst.len, number),
            IpAddr::V6(a) => self.v6.insert(a.to_bits(), dst.len, number),
        };
        self.generation = self.generation.wrapping_add(1);
        Ok(old.and_then(|old| self.release(dst, old)))
    }

    /// The group of exactly this prefix.
    fn number(&self, dst: Prefix) -> Option<u32> {
        match dst.addr {
            IpAddr::V4(a) => self.v4.get(a.to_bits(), dst.len),
            IpAddr::V6(a) => self.v6.get(a.to_bits(), dst.len),
        }
    }

    /// Removes a route. Returns it; of a multipath route, its first next hop.
    pub fn remove(&mut self, dst: Prefix) -> Option<Route> {
        let dst = Prefix::new(dst.addr, dst.len)?;
        let number = match dst.addr {
            IpAddr::V4(a) => self.v4.remove(a.to_bits(), dst.len),
            IpAddr::V6(a) => self.v6.remove(a.to_bits(), dst.len),
        }?;
        self.generation = self.generation.wrapping_add(1);
        self.release(dst, number)
    }

    /// Removes a reference to a group. Returns the route.
    fn release(&mut self, dst: Prefix, number: u32) -> Option<Route> {
        let first = self.hops.group(number)?.hops().next().copied()?;
        self.hops.remove(number);
        Some(route_via(dst, first))
    }

    /// The next hops of the longest matching prefix that has a next hop up.
    #[inline]
    pub fn lookup(&self, ip: IpAddr) -> Option<&Group> {
        let number = match ip {
            IpAddr::V4(a) => self.v4.lookup(a.to_bits()),
            IpAddr::V6(a) => self.v6.lookup(a.to_bits()),
        };
        let group = self.hops.group(number)?;
        if group.is_up() { Some(group) } else { self.lookup_shorter(ip) }
    }

    /// Fallback if all next hops of the longest prefix are down: the shorter prefixes, longest
    /// first.
    #[cold]
    fn lookup_shorter(&self, ip: IpAddr) -> Option<&Group> {
        let bits = if ip.is_ipv4() { 32 } else { 128 };
        (0..=bits).rev().find_map(|len| {
            let number = self.number(Prefix::new(ip, len)?)?;
            self.hops.group(number).filter(|g| g.is_up())
        })
    }

    /// Sets the state of the gateway `via`: while it is down, its next hops are not used. Returns
    /// whether it changed.
    pub fn set_gateway_up(&mut self, via: IpAddr, is_up: bool) -> bool {
        let is_changed = self.hops.set_gateway_up(via, is_up);
        self.generation = self.generation.wrapping_add(u64::from(is_changed));
        is_changed
    }

    /// The gateways that are down.
    pub fn down(&self) -> impl Iterator<Item = IpAddr> {
        self.hops.down()
    }

    /// Whether any route is a multipath route.
    #[inline]
    pub(crate) fn is_multipath(&self) -> bool {
        self.hops.is_multipath()
    }

    /// All routes, once per next hop: IPv4 before IPv6, longest prefix first.
    pub fn iter(&self) -> impl Iterator<Item = Route> {
        let v4 = self.v4.sorted().into_iter();
        let v6 = self.v6.sorted().into_iter();
        let v4 = v4.map(|(a, len, n)| (IpAddr::V4(Ipv4Addr::from_bits(a)), len, n));
        let v6 = v6.map(|(a, len, n)| (IpAddr::V6(Ipv6Addr::from_bits(a)), len, n));
        v4.chain(v6).flat_map(|(addr, len, number)| {
            let hops = self.hops.group(number).into_iter().flat_map(Group::hops);
            hops.map(move |hop| route_via(Prefix { addr, len }, *hop))
        })
    }

    /// Number of prefixes with routes.
    pub fn len(&self) -> usize {
        self.v4.len().saturating_add(self.v6.len())
    }

    /// Whether there are no routes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Generation of the table: a cached result is valid while it is unchanged.
    #[inline]
    pub fn generation(&self) -> u64 {
        self.generation
    }
}

fn route_via(dst: Prefix, hop: NextHop) -> Route {
    Route { dst, via: hop.via, src: hop.src, mtu: hop.mtu }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn prefix(s: &str) -> Prefix {
        let (addr, len) = s.split_once('/').unwrap();
        Prefix::new(addr.parse().unwrap(), len.parse().unwrap()).unwrap()
    }

    #[test]
    fn longest_prefix_wins() {
        let mut t = Table::new();
        t.insert(Route::default_via("10.0.0.1".parse().unwrap())).unwrap();
        t.insert(Route { mtu: Some(1300), ..Route::on_link(prefix("10.0.0.0/24")) }).unwrap();
        t.insert(Route { mtu: Some(1200), ..Route::on_link(prefix("10.0.0.128/25")) }).unwrap();
        let found = |ip: &str| t.lookup(ip.parse().unwrap()).map(|g| g.hops().next().unwrap().mtu);
        assert_eq!(found("10.0.0.200"), Some(Some(1200)));
        assert_eq!(found("10.0.0.2"), Some(Some(1300)));
        assert_eq!(found("192.0.2.1"), Some(None));
        assert_eq!(found("2001:db8::1"), None);
    }

    #[test]
    fn host_bits_are_cleared_on_insert() {
        let mut t = Table::new();
        let dst = Prefix { addr: "10.0.0.77".parse().unwrap(), len: 24 };
        t.insert(Route::on_link(dst)).unwrap();
        assert_eq!(t.iter().next().unwrap().dst, prefix("10.0.0.0/24"));
        assert!(t.remove(dst).is_some());
    }

    #[test]
    fn a_prefix_longer_than_the_address_is_refused() {
        let mut t = Table::new();
        let dst = Prefix { addr: "10.0.0.0".parse().unwrap(), len: 33 };
        assert_eq!(t.insert(Route::on_link(dst)), Err(RouteError::PrefixLength));
        assert_eq!(t.generation(), 0);
    }

    #[test]
    fn a_gateway_of_the_other_version_is_refused() {
        let mut t = Table::new();
        let via = Some("2001:db8::1".parse().unwrap());
        let route = Route { via, ..Route::on_link(prefix("10.0.0.0/8")) };
        assert_eq!(t.insert(route), Err(RouteError::MixedVersions));
    }

    #[test]
    fn every_change_advances_the_generation() {
        let mut t = Table::new();
        let mut last = t.generation();
        let mut moved = |t: &Table| core::mem::replace(&mut last, t.generation()) != t.generation();
        t.insert(Route::on_link(prefix("10.0.0.0/8"))).unwrap();
        assert!(moved(&t));
        t.insert(Route { mtu: Some(1400), ..Route::on_link(prefix("10.0.0.0/8")) }).unwrap();
        assert!(moved(&t));
        assert!(t.remove(prefix("10.0.0.0/9")).is_none());
        assert!(!moved(&t));
        assert!(t.remove(prefix("10.0.0.0/8")).is_some());
        assert!(moved(&t));
    }

    #[test]
    fn a_route_whose_next_hops_are_down_falls_back_to_a_shorter_prefix() {
        let mut t = Table::new();
        let via = |n: u8| IpAddr::from([10, 0, 0, n]);
        let hop = |n| NextHop { via: Some(via(n)), src: None, mtu: None };
        t.insert(Route::default_via(via(1))).unwrap();
        t.insert_multipath(prefix("192.0.2.0/24"), &[hop(2), hop(3)]).unwrap();
        let chosen = |t: &Table| {
            let group = t.lookup("192.0.2.9".parse().unwrap());
            group.and_then(|g| g.select(7, |_| true)).and_then(|hop| hop.via)
        };
        let first = chosen(&t).unwrap();
        assert!(first == via(2) || first == via(3));
        assert!(t.set_gateway_up(first, false));
        let second = chosen(&t).unwrap();
        assert!(second != first && second != via(1));
        assert!(t.set_gateway_up(second, false));
        assert_eq!(chosen(&t), Some(via(1)));
        assert!(t.set_gateway_up(via(1), false));
        assert_eq!(chosen(&t), None);
        assert!(t.set_gateway_up(first, true));
        assert_eq!(chosen(&t), Some(first));
    }

    #[test]
    fn invalid_next_hops_are_refused_and_change_nothing() {
        let mut t = Table::new();
        let hop = NextHop { via: None, src: None, mtu: None };
        let dst = prefix("10.0.0.0/8");
        assert_eq!(t.insert_multipath(dst, &[]), Err(RouteError::NextHops));
        let many = vec![hop; crate::route::next_hop::MAX_MEMBERS + 1];
        assert_eq!(t.insert_multipath(dst, &many), Err(RouteError::NextHops));
        assert!(t.is_empty() && t.generation() == 0);
    }

    #[test]
    fn a_full_table_refuses_further_prefixes_only() {
        let mut t = Table::new();
        let route = |n: usize| {
            let addr = Ipv6Addr::from_bits((n as u128) << 64).into();
            Route::on_link(Prefix { addr, len: 64 })
        };
        (0..MAX_ROUTES).for_each(|n| assert_eq!(t.insert(route(n)), Ok(None)));
        assert_eq!(t.insert(route(MAX_ROUTES)), Err(RouteError::Full));
        assert_eq!(t.insert(route(3)), Ok(Some(route(3))));
        assert!(t.remove(route(3).dst).is_some());
        assert_eq!(t.insert(route(MAX_ROUTES)), Ok(None));
    }

    /// Addresses from a small range of each space, so that prefixes overlap often.
    fn any_ip() -> impl Strategy<Value = IpAddr> {
        prop_oneof![
            (0u32..16, any::<bool>()).prop_map(|(n, high)| {
                IpAddr::V4(Ipv4Addr::from_bits(if high { n << 28 } else { n }))
            }),
            (0u128..16, any::<bool>()).prop_map(|(n, high)| {
                IpAddr::V6(Ipv6Addr::from_bits(if high { n << 124 } else { n }))
            }),
        ]
    }

    fn any_prefix() -> impl Strategy<Value = Prefix> {
        (any_ip(), 0u8..=128).prop_map(|(ip, len)| {
            let bits = if ip.is_ipv4() { 32 } else { 128 };
            Prefix::new(ip, len % (bits + 1)).unwrap()
        })
    }

    /// The model: an unsorted list, scanned linearly.
    fn scan(model: &[Route], ip: IpAddr) -> Option<Route> {
        model.iter().filter(|r| r.dst.contains(ip)).max_by_key(|r| r.dst.len).copied()
    }

    proptest! {
        #[test]
        fn lookup_agrees_with_a_linear_scan(
            steps in prop::collection::vec((any_prefix(), any::<bool>(), 576usize..1500), 0..60),
            probes in prop::collection::vec(any_ip(), 1..40),
        ) {
            agrees_with_a_scan(steps, &probes);
        }
    }

    fn agrees_with_a_scan(steps: Vec<(Prefix, bool, usize)>, probes: &[IpAddr]) {
        let (mut table, mut model) = (Table::new(), Vec::<Route>::new());
        for (dst, insert, mtu) in steps {
            let old = model.iter().position(|r| r.dst == dst).map(|i| model.remove(i));
            if insert {
                let route = Route { mtu: Some(mtu), ..Route::on_link(dst) };
                model.push(route);
                assert_eq!(table.insert(route).unwrap(), old);
            } else {
                assert_eq!(table.remove(dst), old);
            }
            assert_eq!(table.len(), model.len());
        }
        for ip in probes {
            let hop = table.lookup(*ip).and_then(|g| g.hops().next()).map(|hop| hop.mtu);
            assert_eq!(hop, scan(&model, *ip).map(|r| r.mtu));
        }
        model.sort_by_key(|r| (!r.dst.addr.is_ipv4(), core::cmp::Reverse(r.dst.len), r.dst.addr));
        assert_eq!(table.iter().collect::<Vec<_>>(), model);
    }

    #[test]
    fn many_routes_are_found_and_few_again_after_removal() {
        let many = 2 * family::FIB_THRESHOLD as u32;
        let net =
            |n: u32| Prefix::new(Ipv4Addr::from_bits(0x0a00_0000 | n << 8).into(), 24).unwrap();
        let routes = |insert: bool| (0..many).map(move |n| (net(n), insert, 600 + n as usize));
        let probes: Vec<IpAddr> =
            (0..many + 9).map(|n| Ipv4Addr::from_bits(0x0a00_0001 | n << 8).into()).collect();
        agrees_with_a_scan(routes(true).collect(), &probes);
        let few = many - 5;
        let most = routes(false).take(few as usize);
        agrees_with_a_scan(routes(true).chain(most).collect(), &probes);
    }
}
