//! The forwarding table: longest-prefix match over both IP versions.
//!
//! Routes of each version lie in one vector, longest prefix first, so that the first match is the
//! longest. A look-up costs one mask and compare per route; room `ip` remembers the answer per
//! destination, so this runs once per destination and change, not once per packet.

use alloc::vec::Vec;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// A block of addresses.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Prefix {
    /// Any address of the block; [`Table::insert`] clears the bits behind `len`.
    pub addr: IpAddr,
    /// Leading bits that count: 0 to 32 for IPv4, 0 to 128 for IPv6.
    pub len: u8,
}

impl Prefix {
    /// 0.0.0.0/0.
    pub const DEFAULT_V4: Prefix = Prefix { addr: IpAddr::V4(Ipv4Addr::UNSPECIFIED), len: 0 };
    /// ::/0.
    pub const DEFAULT_V6: Prefix = Prefix { addr: IpAddr::V6(Ipv6Addr::UNSPECIFIED), len: 0 };

    /// The block of `len` leading bits that holds `addr`, its host bits cleared. `None` if `len`
    /// is longer than the address.
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

    /// Whether `ip` is of the same version and inside the block.
    #[inline]
    pub fn contains(&self, ip: IpAddr) -> bool {
        match (self.addr, ip) {
            (IpAddr::V4(a), IpAddr::V4(b)) => (a.to_bits() ^ b.to_bits()) & mask32(self.len) == 0,
            (IpAddr::V6(a), IpAddr::V6(b)) => (a.to_bits() ^ b.to_bits()) & mask128(self.len) == 0,
            _ => false,
        }
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

/// Where packets to a block of addresses go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Route {
    /// The destinations.
    pub dst: Prefix,
    /// The router to hand them to; `None` if they are on the link.
    pub via: Option<IpAddr>,
    /// The source address to prefer; `None` leaves the choice to room `ip`.
    pub src: Option<IpAddr>,
    /// Largest IP packet on this route in bytes, if smaller than the link's.
    pub mtu: Option<usize>,
}

impl Route {
    /// A route to a block on the link.
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
pub enum RouteError {
    /// The prefix is longer than its address has bits.
    PrefixLength,
    /// Destination, gateway and source are not of one IP version.
    MixedVersions,
}

/// The forwarding table.
#[derive(Clone, Debug, Default)]
pub struct Table {
    /// Longest prefix first; equal lengths in the order of their addresses.
    v4: Vec<Route>,
    /// The same for IPv6.
    v6: Vec<Route>,
    generation: u64,
}

impl Table {
    /// An empty table.
    pub fn new() -> Table {
        Table::default()
    }

    /// Adds a route, or replaces the one with the same prefix, which is returned.
    ///
    /// # Errors
    /// [`RouteError::PrefixLength`], [`RouteError::MixedVersions`]: the table is unchanged.
    pub fn insert(&mut self, route: Route) -> Result<Option<Route>, RouteError> {
        let dst = Prefix::new(route.dst.addr, route.dst.len).ok_or(RouteError::PrefixLength)?;
        let is_v4 = dst.addr.is_ipv4();
        if [route.via, route.src].into_iter().flatten().any(|a| a.is_ipv4() != is_v4) {
            return Err(RouteError::MixedVersions);
        }
        let route = Route { dst, ..route };
        self.generation = self.generation.wrapping_add(1);
        let routes = self.routes_mut(dst.addr);
        match routes.binary_search_by(|r| order(&r.dst, &dst)) {
            Ok(i) => Ok(routes.get_mut(i).map(|old| core::mem::replace(old, route))),
            Err(i) => {
                routes.insert(i, route);
                Ok(None)
            }
        }
    }

    /// Takes a route out.
    pub fn remove(&mut self, dst: Prefix) -> Option<Route> {
        let dst = Prefix::new(dst.addr, dst.len)?;
        let routes = self.routes_mut(dst.addr);
        let i = routes.binary_search_by(|r| order(&r.dst, &dst)).ok()?;
        let route = routes.remove(i);
        self.generation = self.generation.wrapping_add(1);
        Some(route)
    }

    /// The route with the longest prefix that holds `ip`.
    pub fn lookup(&self, ip: IpAddr) -> Option<&Route> {
        let routes = if ip.is_ipv4() { &self.v4 } else { &self.v6 };
        routes.iter().find(|r| r.dst.contains(ip))
    }

    /// Every route: IPv4 before IPv6, longest prefix first.
    pub fn iter(&self) -> impl Iterator<Item = &Route> {
        self.v4.iter().chain(&self.v6)
    }

    /// Counts changes: a remembered look-up holds while this stays the same.
    #[inline]
    pub fn generation(&self) -> u64 {
        self.generation
    }

    fn routes_mut(&mut self, of: IpAddr) -> &mut Vec<Route> {
        if of.is_ipv4() { &mut self.v4 } else { &mut self.v6 }
    }
}

/// Longest first, so that the first match is the longest.
fn order(a: &Prefix, b: &Prefix) -> core::cmp::Ordering {
    b.len.cmp(&a.len).then(a.addr.cmp(&b.addr))
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
        t.insert(Route::on_link(prefix("10.0.0.0/24"))).unwrap();
        t.insert(Route::on_link(prefix("10.0.0.128/25"))).unwrap();
        let found = |ip: &str| t.lookup(ip.parse().unwrap()).map(|r| r.dst);
        assert_eq!(found("10.0.0.200"), Some(prefix("10.0.0.128/25")));
        assert_eq!(found("10.0.0.2"), Some(prefix("10.0.0.0/24")));
        assert_eq!(found("192.0.2.1"), Some(Prefix::DEFAULT_V4));
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
    fn every_change_moves_the_generation() {
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

    /// Addresses from a small corner of each space, so that prefixes overlap often.
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

    /// The model: an unsorted list, searched whole.
    fn scan(model: &[Route], ip: IpAddr) -> Option<Route> {
        model.iter().filter(|r| r.dst.contains(ip)).max_by_key(|r| r.dst.len).copied()
    }

    proptest! {
        #[test]
        fn lookup_agrees_with_a_linear_scan(
            steps in prop::collection::vec((any_prefix(), any::<bool>(), 576usize..1500), 0..60),
            probes in prop::collection::vec(any_ip(), 1..40),
        ) {
            let (mut table, mut model) = (Table::new(), Vec::<Route>::new());
            for (dst, insert, mtu) in steps {
                let old = model.iter().position(|r| r.dst == dst).map(|i| model.remove(i));
                if insert {
                    let route = Route { mtu: Some(mtu), ..Route::on_link(dst) };
                    model.push(route);
                    prop_assert_eq!(table.insert(route).unwrap(), old);
                } else {
                    prop_assert_eq!(table.remove(dst), old);
                }
                prop_assert_eq!(table.iter().count(), model.len());
            }
            for ip in probes {
                prop_assert_eq!(table.lookup(ip).copied(), scan(&model, ip));
            }
        }
    }
}
