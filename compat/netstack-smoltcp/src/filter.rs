//! Filters of packets by source and destination.

use std::net::IpAddr;

/// Whether packets from the first address to the second pass.
pub type IpFilter<'a> = Box<dyn Fn(&IpAddr, &IpAddr) -> bool + Send + Sync + 'a>;

/// Filters, all of which a packet has to pass.
#[derive(Default)]
pub struct IpFilters<'a> {
    filters: Vec<IpFilter<'a>>,
}

impl<'a> IpFilters<'a> {
    /// Everything passes.
    pub fn new() -> Self {
        Self::default()
    }

    /// Packets between unicast addresses pass.
    pub fn with_non_broadcast() -> Self {
        let mut filters = Self::new();
        filters.add_fn(|src, dst| is_unicast(src) && is_unicast(dst));
        filters
    }

    /// Adds a filter.
    pub fn add(&mut self, filter: IpFilter<'a>) {
        self.filters.push(filter);
    }

    /// Adds a function as a filter.
    pub fn add_fn<F>(&mut self, filter: F)
    where
        F: Fn(&IpAddr, &IpAddr) -> bool + Send + Sync + 'a,
    {
        self.add(Box::new(filter));
    }

    /// Adds filters.
    pub fn add_all<I: IntoIterator<Item = IpFilter<'a>>>(&mut self, filters: I) {
        self.filters.extend(filters);
    }

    /// Whether a packet passes.
    pub fn is_allowed(&self, src: &IpAddr, dst: &IpAddr) -> bool {
        self.filters.iter().all(|passes| passes(src, dst))
    }
}

fn is_unicast(ip: &IpAddr) -> bool {
    let is_broadcast = matches!(ip, IpAddr::V4(v4) if v4.is_broadcast());
    !(is_broadcast || ip.is_multicast() || ip.is_unspecified())
}
