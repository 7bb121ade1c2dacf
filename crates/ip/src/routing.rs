//! Which table a packet is looked up in, and which of several next hops it takes.
//!
//! The main table is that of every source; a policy sends packets from some blocks of source addresses
//! to another one first. A route may have several next hops, among which flows are spread by a hash of
//! addresses and ports (RFC 2992), so that each flow keeps to one; next hops that are down, or that
//! do not answer, are left out.

use alloc::collections::BTreeMap;
use core::net::{IpAddr, SocketAddr};

use fulmar_base::{FlowKey, Instant, Key};
use fulmar_mbuf::Chain;
use fulmar_route::{Advice, NextHop, Prefix, Route, RouteError, SourcePolicy, Table};

use crate::engine::Ip;
use crate::{ConfigError, address};

/// Tables beside the main one, and rules, at most: as many as have names on Linux.
const MAX_TABLES: usize = 256;

/// The number of the main table.
pub(crate) const MAIN: u32 = 0;

/// All tables of an interface.
#[derive(Default)]
pub(crate) struct Tables {
    main: Table,
    others: BTreeMap<u32, Table>,
    policy: SourcePolicy,
    /// Changes of rules and of tables, counted when they are made: asked for with every packet.
    generation: u64,
    /// Tables with routes whose flows are spread.
    spread: usize,
    advice: Advice,
}

impl Tables {
    pub(crate) fn new(advice: Advice) -> Tables {
        Tables { main: Table::with_advice(advice), advice, ..Tables::default() }
    }

    /// The table for packets from `src`.
    #[inline]
    pub(crate) fn table_for(&self, src: Option<IpAddr>) -> u32 {
        match src {
            Some(src) if !self.policy.is_empty() => self.policy.table_for(src),
            _ => MAIN,
        }
    }

    /// Whether flows of any route are spread over several next hops.
    #[inline]
    pub(crate) fn is_spread(&self) -> bool {
        self.spread > 0
    }

    /// Counts changes: what was derived from the tables holds while this stays the same.
    #[inline]
    pub(crate) fn generation(&self) -> u64 {
        self.generation
    }

    fn count_change(&mut self) {
        self.generation = self.generation.wrapping_add(1);
    }

    /// Changes a table, which is made if there is none and dropped if it is empty then. `None` if there
    /// are too many.
    fn change<R>(&mut self, table: u32, change: impl FnOnce(&mut Table) -> R) -> Option<R> {
        let known = self.get_mut(table)?;
        let before = usize::from(known.is_spread());
        let result = change(known);
        let after = usize::from(known.is_spread());
        self.spread = self.spread.saturating_sub(before).saturating_add(after);
        if self.others.get(&table).is_some_and(Table::is_empty) {
            self.others.remove(&table);
        }
        self.count_change();
        Some(result)
    }

    fn get_mut(&mut self, table: u32) -> Option<&mut Table> {
        if table == MAIN {
            return Some(&mut self.main);
        }
        if self.others.len() >= MAX_TABLES && !self.others.contains_key(&table) {
            return None;
        }
        let (main, advice) = (&self.main, self.advice);
        Some(self.others.entry(table).or_insert_with(|| {
            let mut new = Table::with_advice(advice);
            for via in main.down() {
                new.set_up(via, false);
            }
            new
        }))
    }

    /// The next hop of a flow to `dst`, by its own table, else by the main one. Next hops that are not
    /// `usable` are taken only if there are no others.
    pub(crate) fn next_hop(
        &self,
        table: u32,
        dst: IpAddr,
        flow: u64,
        usable: impl Fn(&NextHop) -> bool,
    ) -> Option<Found> {
        let own = self.others.get(&table).filter(|_| table != MAIN);
        let group = own.and_then(|t| t.lookup(dst)).or_else(|| self.main.lookup(dst))?;
        if !group.is_spread() {
            let hop = *group.choose(flow, |_| true)?;
            return Some(Found { hop, is_spread: false });
        }
        let chosen = group.choose(flow, usable).or_else(|| group.choose(flow, |_| true))?;
        // The flow may come to any of them: its packets have to fit all.
        let mtu = group.hops().filter_map(|hop| hop.mtu).min();
        Some(Found { hop: NextHop { mtu, ..*chosen }, is_spread: true })
    }
}

/// What the tables say.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Found {
    pub(crate) hop: NextHop,
    /// Other flows to the same destination may take another.
    pub(crate) is_spread: bool,
}

impl Ip {
    /// Adds a route to the main table, or replaces the one with the same prefix.
    ///
    /// # Errors
    /// [`ConfigError::PrefixLength`], [`ConfigError::MixedVersions`], [`ConfigError::Router`],
    /// [`ConfigError::RoutesFull`].
    pub fn add_route(&mut self, route: Route) -> Result<(), ConfigError> {
        self.add_route_to(MAIN, route)
    }

    /// Adds a route to a table: 0 is the main one, others are for the sources that a policy names
    /// ([`Ip::set_source_policy`]).
    ///
    /// # Errors
    /// As [`Ip::add_route`].
    pub fn add_route_to(&mut self, table: u32, route: Route) -> Result<(), ConfigError> {
        let Route { dst, via, src, mtu } = route;
        self.add_spread_route_to(table, dst, &[NextHop { via, src, mtu }])
    }

    /// Adds a route over several next hops of equal cost to a table. Each flow keeps to one of them
    /// while that is up and answers.
    ///
    /// # Errors
    /// As [`Ip::add_route`]; [`ConfigError::NextHops`], [`ConfigError::Router`].
    pub fn add_spread_route_to(
        &mut self,
        table: u32,
        dst: Prefix,
        hops: &[NextHop],
    ) -> Result<(), ConfigError> {
        let full = ConfigError::RoutesFull(dst);
        let far =
            |via: &IpAddr| via.is_ipv4() == dst.addr.is_ipv4() && !self.is_possible_router(*via);
        if let Some(via) = hops.iter().filter_map(|hop| hop.via).find(far) {
            return Err(ConfigError::Router(dst, via));
        }
        let added = self.tables.change(table, |t| t.insert_spread(dst, hops)).ok_or(full)?;
        added.map(drop).map_err(|e| match e {
            RouteError::PrefixLength => ConfigError::PrefixLength(dst.addr),
            RouteError::MixedVersions => ConfigError::MixedVersions(dst),
            RouteError::NextHops => ConfigError::NextHops(dst),
            RouteError::Full => full,
        })
    }

    /// Removes a route of the main table.
    pub fn remove_route(&mut self, dst: Prefix) -> Option<Route> {
        self.remove_route_from(MAIN, dst)
    }

    /// Removes a route of a table.
    pub fn remove_route_from(&mut self, table: u32, dst: Prefix) -> Option<Route> {
        self.tables.change(table, |t| t.remove(dst))?
    }

    /// Packets from a block of source addresses look at `table` first, and at the main one for what it
    /// has no route to. `None` takes the rule back. False if there are too many rules, or the prefix is
    /// longer than its address.
    pub fn set_source_policy(&mut self, source: Prefix, table: Option<u32>) -> bool {
        let Some(source) = Prefix::new(source.addr, source.len) else { return false };
        let policy = &mut self.tables.policy;
        match table {
            Some(_) if policy.len() >= MAX_TABLES => return false,
            Some(table) => _ = policy.insert(source, table),
            None => _ = policy.remove(source),
        }
        self.tables.count_change();
        true
    }

    /// Says whether the router `via` is up. While it is not, routes do without it: flows go to the next
    /// hops beside it, then to the route around; with none there is no route.
    pub fn set_next_hop_up(&mut self, via: IpAddr, is_up: bool) {
        let mut is_news = self.tables.main.set_up(via, is_up);
        for table in self.tables.others.values_mut() {
            is_news |= table.set_up(via, is_up);
        }
        if is_news {
            self.tables.count_change();
        }
    }

    /// Every route of the main table, once per next hop: IPv4 before IPv6, longest prefix first.
    pub fn routes(&self) -> impl Iterator<Item = Route> {
        self.tables.main.iter()
    }

    /// Where packets of a flow to another host go by the tables.
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
        let answers = |hop: &NextHop| !self.neighbours.has_failed(hop.via.unwrap_or(dst), now);
        self.tables.next_hop(self.tables.table_for(src), dst, flow, answers)
    }

    /// Whether packets can be handed to `via` for others: a neighbour by the routes, or any address that
    /// counts on the link only (RFC 4291 section 2.5.6).
    fn is_possible_router(&self, via: IpAddr) -> bool {
        let is_of_the_link = matches!(via, IpAddr::V6(a) if a.is_unicast_link_local());
        self.is_on_link(via) || (is_of_the_link && !self.is_local(via))
    }

    /// Whether `ip` is a neighbour by the routes, so that it may be learned about.
    pub(crate) fn is_on_link(&self, ip: IpAddr) -> bool {
        let on_link = |table: &Table| {
            table.lookup(ip).is_some_and(|group| group.hops().any(|hop| hop.via.is_none()))
        };
        !self.is_local(ip)
            && (on_link(&self.tables.main) || self.tables.others.values().any(on_link))
    }
}

/// The hash that chooses among next hops: addresses and, from the front of a transport packet, ports.
/// Keyed, so that a stranger cannot bring all flows to one of them.
pub(crate) fn flow_hash(key: &Key, src: IpAddr, dst: IpAddr, packet: &Chain) -> u64 {
    let first = packet.front().and_then(|m| m.as_slice().first_chunk::<4>().copied());
    hash_of_flow(key, src, dst, u32::from_be_bytes(first.unwrap_or_default()))
}

/// The same of a flow whose two ports are known, the source's first.
pub(crate) fn hash_of_flow(key: &Key, src: IpAddr, dst: IpAddr, ports: u32) -> u64 {
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
        fn what_is_kept_of_all_tables_is_what_they_say(
            steps in prop::collection::vec((0u32..4, 0u32..3, 0u8..4), 1..80),
        ) {
            let mut tables = Tables::default();
            for (table, net, count) in steps {
                let dst = Prefix { addr: Ipv4Addr::from_bits(net << 8).into(), len: 24 };
                let before = tables.generation();
                let changed = tables.change(table, |t| match count {
                    0 => t.remove(dst).is_some(),
                    n => t.insert_spread(dst, &hops(n)).is_ok(),
                });
                prop_assert!(changed.is_some());
                prop_assert_ne!(tables.generation(), before);
                let all = || tables.others.values().chain([&tables.main]);
                prop_assert_eq!(tables.is_spread(), all().any(Table::is_spread));
                prop_assert!(tables.others.values().all(|t| !t.is_empty()));
            }
        }
    }
}
