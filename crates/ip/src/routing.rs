//! Which table a packet is looked up in, and which of several next hops it takes.
//!
//! The main table is that of every source; a policy sends packets from some blocks of source addresses
//! to another one first. A route may have several next hops, among which flows are spread by a hash of
//! addresses and ports (RFC 2992), so that each flow keeps to one; next hops that are down, or that
//! do not answer, are left out.

use alloc::collections::BTreeMap;
use core::net::IpAddr;

use fulmar_base::Instant;
use fulmar_mbuf::Chain;
use fulmar_route::{NextHop, Prefix, Route, RouteError, SourcePolicy, Table};

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
    /// Changes of rules, and those of tables that are gone.
    changes: u64,
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

    /// Whether packets to one destination may go different ways: then what is known of the
    /// destination does not say which.
    #[inline]
    pub(crate) fn is_manifold(&self) -> bool {
        !self.policy.is_empty() || self.is_spread()
    }

    /// Whether flows of any route are spread over several next hops.
    #[inline]
    pub(crate) fn is_spread(&self) -> bool {
        self.main.is_spread() || self.others.values().any(Table::is_spread)
    }

    #[inline]
    pub(crate) fn generation(&self) -> u64 {
        let others = self.others.values().fold(0, |all: u64, t| all.wrapping_add(t.generation()));
        self.changes.wrapping_add(self.main.generation()).wrapping_add(others)
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
                new.set_up(via, false);
            }
            new
        }))
    }

    /// Drops a table that has become empty; what was derived from it holds no longer.
    fn tidy(&mut self, table: u32) {
        if self.others.get(&table).is_some_and(Table::is_empty)
            && let Some(gone) = self.others.remove(&table)
        {
            self.changes = self.changes.wrapping_add(gone.generation()).wrapping_add(1);
        }
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
    /// [`ConfigError::PrefixLength`], [`ConfigError::MixedVersions`], [`ConfigError::RoutesFull`].
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
    /// As [`Ip::add_route`]; [`ConfigError::NextHops`].
    pub fn add_spread_route_to(
        &mut self,
        table: u32,
        dst: Prefix,
        hops: &[NextHop],
    ) -> Result<(), ConfigError> {
        let full = ConfigError::RoutesFull(dst);
        let routes = self.tables.get_mut(table).ok_or(full)?;
        let added = routes.insert_spread(dst, hops).map(drop).map_err(|e| match e {
            RouteError::PrefixLength => ConfigError::PrefixLength(dst.addr),
            RouteError::MixedVersions => ConfigError::MixedVersions(dst),
            RouteError::NextHops => ConfigError::NextHops(dst),
            RouteError::Full => full,
        });
        self.tables.tidy(table);
        added
    }

    /// Removes a route of the main table.
    pub fn remove_route(&mut self, dst: Prefix) -> Option<Route> {
        self.remove_route_from(MAIN, dst)
    }

    /// Removes a route of a table.
    pub fn remove_route_from(&mut self, table: u32, dst: Prefix) -> Option<Route> {
        let removed = self.tables.get_mut(table)?.remove(dst);
        self.tables.tidy(table);
        removed
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
        self.tables.changes = self.tables.changes.wrapping_add(1);
        true
    }

    /// Says whether the router `via` is up. While it is not, routes do without it: flows go to the next
    /// hops beside it, then to the route around; with none there is no route.
    pub fn set_next_hop_up(&mut self, via: IpAddr, is_up: bool) {
        self.tables.main.set_up(via, is_up);
        for table in self.tables.others.values_mut() {
            table.set_up(via, is_up);
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
pub(crate) fn flow_hash(src: IpAddr, dst: IpAddr, packet: &Chain) -> u64 {
    let first = packet.front().and_then(|m| m.as_slice().first_chunk::<4>().copied());
    hash_of_flow(src, dst, u32::from_be_bytes(first.unwrap_or_default()))
}

/// The same of a flow whose two ports are known, the source's first.
pub(crate) fn hash_of_flow(src: IpAddr, dst: IpAddr, ports: u32) -> u64 {
    [bits(src), bits(dst), ports.into()].into_iter().fold(0, |hash: u64, part| {
        (hash ^ part).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(31)
    })
}

fn bits(ip: IpAddr) -> u64 {
    match ip {
        IpAddr::V4(a) => a.to_bits().into(),
        IpAddr::V6(a) => {
            let bits = a.to_bits();
            (bits as u64) ^ ((bits >> 64) as u64).rotate_left(17)
        }
    }
}
