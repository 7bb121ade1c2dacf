//! Policy routing and multipath routes: which table a packet is looked up in, and which next hop it
//! takes.
//!
//! The main table applies to all sources. A source policy directs packets from certain source
//! prefixes to another table first. A multipath route has several next hops. A hash of addresses
//! and ports (RFC 2992) assigns each flow to one of them. Next hops that are down or unreachable
//! are skipped.

use alloc::collections::BTreeMap;
use core::net::{IpAddr, SocketAddr};

use crate::base::{FlowKey, Instant, Key};
use crate::mbuf::Chain;
use crate::route::{NextHop, Prefix, Route, RouteError, SourcePolicy, Table};

use crate::ip::engine::Ip;
use crate::ip::{ConfigError, address};

/// Limit of tables other than the main one, and of rules: the number of tables that Linux can name.
const MAX_TABLES: usize = 256;

/// Number of the main table.
pub(crate) const MAIN: u32 = 0;

/// All tables of an interface.
#[derive(Default)]
pub(crate) struct Tables {
    main: Table,
    others: BTreeMap<u32, Table>,
    policy: SourcePolicy,
    /// Generation of rules and tables, kept as one counter because every packet reads it.
    generation: u64,
    /// Number of tables with multipath routes.
    multipath_tables: usize,
}

impl Tables {
    /// The table for packets from `src`.
    #[inline]
    pub(crate) fn table_for(&self, src: Option<IpAddr>) -> u32 {
        match src {
            Some(src) if !self.policy.is_empty() => self.policy.table_for(src),
            _ => MAIN,
        }
    }

    /// Whether any table has a multipath route.
    #[inline]
    pub(crate) fn is_multipath(&self) -> bool {
        self.multipath_tables > 0
    }

    /// Generation of the tables: values derived from them are valid while it is unchanged.
    #[inline]
    pub(crate) fn generation(&self) -> u64 {
        self.generation
    }

    fn advance_generation(&mut self) {
        self.generation = self.generation.wrapping_add(1);
    }

    /// Changes a table, creating it if necessary and removing it if it becomes empty. `None` if
    /// there are too many tables.
    fn change<R>(&mut self, table: u32, change: impl FnOnce(&mut Table) -> R) -> Option<R> {
        let known = self.get_mut(table)?;
        let before = usize::from(known.is_multipath());
        let result = change(known);
        let after = usize::from(known.is_multipath());
        self.multipath_tables = self.multipath_tables.saturating_sub(before).saturating_add(after);
        if self.others.get(&table).is_some_and(Table::is_empty) {
            self.others.remove(&table);
        }
        self.advance_generation();
        Some(result)
    }

    fn get_mut(&mut self, table: u32) -> Option<&mut Table> {
        if table == MAIN {
            return Some(&mut self.main);
        }
        if self.others.len() >= MAX_TABLES && !self.others.contains_key(&table) {
            return None;
        }
        let main = &self.main;
        Some(self.others.entry(table).or_insert_with(|| {
            let mut new = Table::new();
            for via in main.down() {
                new.set_gateway_up(via, false);
            }
            new
        }))
    }

    /// The next hop of a flow to `dst`, from `table`, else from the main table. Next hops that are
    /// not `usable` are selected only if no other exists.
    pub(crate) fn next_hop(
        &self,
        table: u32,
        dst: IpAddr,
        flow: u64,
        usable: impl Fn(&NextHop) -> bool,
    ) -> Option<Found> {
        let own = self.others.get(&table).filter(|_| table != MAIN);
        let group = own.and_then(|t| t.lookup(dst)).or_else(|| self.main.lookup(dst))?;
        if !group.is_multipath() {
            let hop = *group.select(flow, |_| true)?;
            return Some(Found { hop, is_multipath: false });
        }
        let chosen = group.select(flow, usable).or_else(|| group.select(flow, |_| true))?;
        // The flow may move to any next hop, so its packets must fit all of them.
        let mtu = group.hops().filter_map(|hop| hop.mtu).min();
        Some(Found { hop: NextHop { mtu, ..*chosen }, is_multipath: true })
    }
}

/// The result of a look-up.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Found {
    pub(crate) hop: NextHop,
    /// Multipath: other flows to the same destination may use another next hop.
    pub(crate) is_multipath: bool,
}

impl Ip {
    /// Adds a route to the main table, or replaces the one with the same prefix.
    ///
    /// # Errors
    /// [`ConfigError::PrefixLength`], [`ConfigError::MixedVersions`], [`ConfigError::Gateway`],
    /// [`ConfigError::RoutesFull`].
    pub fn add_route(&mut self, route: Route) -> Result<(), ConfigError> {
        self.add_route_to(MAIN, route)
    }

    /// Adds a route to a table: 0 is the main table, others apply to the sources of a policy
    /// ([`Ip::set_source_policy`]).
    ///
    /// # Errors
    /// As [`Ip::add_route`].
    pub fn add_route_to(&mut self, table: u32, route: Route) -> Result<(), ConfigError> {
        let Route { dst, via, src, mtu } = route;
        self.add_multipath_route_to(table, dst, &[NextHop { via, src, mtu }])
    }

    /// Adds a multipath route (ECMP) to a table. Each flow keeps its next hop while that is up and
    /// reachable.
    ///
    /// # Errors
    /// As [`Ip::add_route`]; [`ConfigError::NextHops`], [`ConfigError::Gateway`].
    pub fn add_multipath_route_to(
        &mut self,
        table: u32,
        dst: Prefix,
        hops: &[NextHop],
    ) -> Result<(), ConfigError> {
        let full = ConfigError::RoutesFull(dst);
        let is_unreachable =
            |via: &IpAddr| via.is_ipv4() == dst.addr.is_ipv4() && !self.is_possible_gateway(*via);
        if let Some(via) = hops.iter().filter_map(|hop| hop.via).find(is_unreachable) {
            return Err(ConfigError::Gateway(dst, via));
        }
        let added = self.tables.change(table, |t| t.insert_multipath(dst, hops)).ok_or(full)?;
        added.map(drop).map_err(|e| match e {
            RouteError::PrefixLength => ConfigError::PrefixLength(dst.addr),
            RouteError::MixedVersions => ConfigError::MixedVersions(dst),
            RouteError::NextHops => ConfigError::NextHops(dst),
            RouteError::Full => full,
        })
    }

    /// Removes a route from the main table.
    pub fn remove_route(&mut self, dst: Prefix) -> Option<Route> {
        self.remove_route_from(MAIN, dst)
    }

    /// Removes a route from a table.
    pub fn remove_route_from(&mut self, table: u32, dst: Prefix) -> Option<Route> {
        self.tables.change(table, |t| t.remove(dst))?
    }

    /// Sets a rule: packets from `source` are looked up in `table` first, then in the main table.
    /// `None` removes the rule. False if there are too many rules, or the prefix length exceeds the
    /// address length.
    pub fn set_source_policy(&mut self, source: Prefix, table: Option<u32>) -> bool {
        let Some(source) = Prefix::new(source.addr, source.len) else { return false };
        let policy = &mut self.tables.policy;
        let is_full = policy.len() >= MAX_TABLES && !policy.has_rule(source);
        match table {
            Some(_) if is_full => return false,
            Some(table) => _ = policy.insert(source, table),
            None => _ = policy.remove(source),
        }
        self.tables.advance_generation();
        true
    }

    /// Sets whether the gateway `via` is up. While it is down, multipath routes use their other
    /// next hops. A route without any is skipped in favour of the next shorter prefix.
    pub fn set_gateway_up(&mut self, via: IpAddr, is_up: bool) {
        let mut is_changed = self.tables.main.set_gateway_up(via, is_up);
        for table in self.tables.others.values_mut() {
            is_changed |= table.set_gateway_up(via, is_up);
        }
        if is_changed {
            self.tables.advance_generation();
        }
    }

    /// All routes of the main table, once per next hop: IPv4 before IPv6, longest prefix first.
    pub fn routes(&self) -> impl Iterator<Item = Route> {
        self.tables.main.iter()
    }

    /// The next hop of a flow to another host.
    pub(crate) fn next_hop_to(
        &self,
        dst: IpAddr,
        src: Option<IpAddr>,
        flow: u64,
        now: Instant,
    ) -> Option<Found> {
        if !address::is_possible_source(dst) {
            return None;
        }
        let is_usable = |hop: &NextHop| !self.neighbours.has_failed(hop.via.unwrap_or(dst), now);
        self.tables.next_hop(self.tables.table_for(src), dst, flow, is_usable)
    }

    /// Whether `via` can be a gateway: on-link by the routes, or any link-local address (RFC 4291
    /// section 2.5.6).
    fn is_possible_gateway(&self, via: IpAddr) -> bool {
        let is_link_local = matches!(via, IpAddr::V6(a) if a.is_unicast_link_local());
        self.is_on_link(via) || (is_link_local && !self.is_local(via))
    }

    /// Whether `ip` is on-link by the routes, so that a neighbour entry is permitted.
    pub(crate) fn is_on_link(&self, ip: IpAddr) -> bool {
        let on_link = |table: &Table| {
            table.lookup(ip).is_some_and(|group| group.hops().any(|hop| hop.via.is_none()))
        };
        !self.is_local(ip)
            && (on_link(&self.tables.main) || self.tables.others.values().any(on_link))
    }
}

/// The flow hash that selects among next hops: addresses, and the ports at the start of a transport
/// packet. Keyed, so that an attacker cannot direct all flows to one next hop.
pub(crate) fn flow_hash(key: &Key, src: IpAddr, dst: IpAddr, packet: &Chain) -> u64 {
    let first = packet.front().and_then(|m| m.as_slice().first_chunk::<4>().copied());
    flow_hash_of_ports(key, src, dst, u32::from_be_bytes(first.unwrap_or_default()))
}

/// The same from known ports, the source port in the upper half.
pub(crate) fn flow_hash_of_ports(key: &Key, src: IpAddr, dst: IpAddr, ports: u32) -> u64 {
    let (src_port, dst_port) = ((ports >> 16) as u16, ports as u16);
    key.hash_flow(&FlowKey::new(SocketAddr::new(src, src_port), SocketAddr::new(dst, dst_port)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::net::Ipv4Addr;
    use proptest::prelude::*;

    fn hops(count: u8) -> alloc::vec::Vec<NextHop> {
        let via = |n| Some(IpAddr::from([10, 0, 0, n]));
        (0..count).map(|n| NextHop { via: via(n), src: None, mtu: None }).collect()
    }

    proptest! {
        #[test]
        fn the_summary_of_the_tables_is_consistent(
            steps in prop::collection::vec((0u32..4, 0u32..3, 0u8..4), 1..80),
        ) {
            let mut tables = Tables::default();
            for (table, net, count) in steps {
                let dst = Prefix { addr: Ipv4Addr::from_bits(net << 8).into(), len: 24 };
                let before = tables.generation();
                let changed = tables.change(table, |t| match count {
                    0 => t.remove(dst).is_some(),
                    n => t.insert_multipath(dst, &hops(n)).is_ok(),
                });
                prop_assert!(changed.is_some());
                prop_assert_ne!(tables.generation(), before);
                let all = || tables.others.values().chain([&tables.main]);
                prop_assert_eq!(tables.is_multipath(), all().any(Table::is_multipath));
                prop_assert!(tables.others.values().all(|t| !t.is_empty()));
            }
        }
    }
}
