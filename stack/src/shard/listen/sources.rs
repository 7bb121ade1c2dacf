//! How many connections each source address has, where that is limited.
//!
//! A source is an IPv4 address or the upper 64 bits of an IPv6 address, which one host may have to
//! itself. Only connections that came in through a listener count. A source is in the table while it has
//! at least one, so that the table is as bounded as that of sockets; its hash is keyed.

use core::net::IpAddr;

use crate::base::FlowKey;
use hashbrown::HashMap;

use crate::shard::secret::Keyed;

/// Limits for each source address, per shard; `None`: none. Default none.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SourceLimits {
    /// Embryos. Further SYNs are answered with cookies, or dropped where those are off: the address of a SYN may be
    /// forged, and a cookie still lets its owner connect.
    pub embryos: Option<u32>,
    /// Connections whose handshake is complete. Further SYNs are dropped.
    pub connections: Option<u32>,
}

/// How a flow is counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SourceUse {
    /// An embryo.
    Embryo,
    /// A connection whose handshake is complete.
    Connection,
}

#[derive(Clone, Copy, Default)]
struct Counts {
    embryos: u32,
    connections: u32,
}

/// The table.
pub(crate) struct Sources {
    limits: SourceLimits,
    counts: HashMap<u128, Counts, Keyed>,
}

impl Sources {
    /// An empty table; `None` if there is nothing to limit.
    pub(crate) fn new(limits: SourceLimits, hasher: Keyed) -> Option<Sources> {
        let is_limited = limits != SourceLimits::default();
        is_limited.then(|| Sources { limits, counts: HashMap::with_hasher(hasher) })
    }

    fn of(&self, key: &FlowKey) -> Counts {
        self.counts.get(&source_of(key)).copied().unwrap_or_default()
    }

    /// Whether the source of a flow may have a further embryo.
    pub(crate) fn takes_embryo(&self, key: &FlowKey) -> bool {
        self.limits.embryos.is_none_or(|most| self.of(key).embryos < most)
    }

    /// Whether it may have a further connection.
    pub(crate) fn takes_connection(&self, key: &FlowKey) -> bool {
        self.limits.connections.is_none_or(|most| self.of(key).connections < most)
    }

    /// Whether the source of a flow may have a further embryo, and a connection that it becomes beside those that its
    /// other embryos become.
    pub(crate) fn takes_opening(&self, key: &FlowKey) -> bool {
        let Counts { embryos, connections } = self.of(key);
        let sum = embryos.saturating_add(connections);
        self.takes_embryo(key) && self.limits.connections.is_none_or(|most| sum < most)
    }

    /// It has an embryo more.
    pub(crate) fn add_embryo(&mut self, key: &FlowKey) {
        self.counts.entry(source_of(key)).or_default().embryos += 1;
    }

    /// One of its embryos has become a connection.
    pub(crate) fn complete(&mut self, key: &FlowKey) {
        let counts = self.counts.entry(source_of(key)).or_default();
        counts.embryos = counts.embryos.saturating_sub(1);
        counts.connections += 1;
    }

    /// A flow is gone.
    pub(crate) fn remove(&mut self, key: &FlowKey, was: SourceUse) {
        let source = source_of(key);
        let Some(counts) = self.counts.get_mut(&source) else { return };
        let count = match was {
            SourceUse::Embryo => &mut counts.embryos,
            SourceUse::Connection => &mut counts.connections,
        };
        *count = count.saturating_sub(1);
        if counts.embryos == 0 && counts.connections == 0 {
            self.counts.remove(&source);
        }
    }

    /// Sources in the table.
    #[cfg(test)]
    fn len(&self) -> usize {
        self.counts.len()
    }
}

/// The bits that identify the source of a flow. The bits of an IPv4 address are below the upper 64.
pub(crate) fn source_of(key: &FlowKey) -> u128 {
    match key.remote_ip() {
        IpAddr::V4(a) => a.to_ipv6_mapped().to_bits(),
        IpAddr::V6(a) => a.to_bits() >> 64 << 64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shard::secret::Secret;
    use proptest::prelude::*;

    fn flow(remote: &str) -> FlowKey {
        let remote: std::net::SocketAddr = remote.parse().unwrap();
        let local = if remote.is_ipv4() { "10.0.0.1:80" } else { "[fd00::1]:80" };
        FlowKey::new(local.parse().unwrap(), remote)
    }

    fn sources(limits: SourceLimits) -> Sources {
        Sources::new(limits, Secret::new(&crate::base::Secrets::for_simulation(1)).table_hasher())
            .unwrap()
    }

    #[test]
    fn an_ipv6_source_is_its_upper_64_bits_and_an_ipv4_source_the_whole_address() {
        let mut s = sources(SourceLimits { embryos: Some(1), ..SourceLimits::default() });
        for remote in ["[2001:db8::1]:9", "192.0.2.1:9"] {
            s.add_embryo(&flow(remote));
        }
        assert!(!s.takes_embryo(&flow("[2001:db8::ffff:2]:7")));
        assert!(!s.takes_embryo(&flow("192.0.2.1:7")));
        assert!(s.takes_embryo(&flow("[2001:db8:0:1::1]:9")));
        assert!(s.takes_embryo(&flow("192.0.2.2:9")));
        assert!(s.takes_embryo(&flow("[::5]:9")));
    }

    #[test]
    fn without_limits_there_is_no_table() {
        assert!(
            Sources::new(
                SourceLimits::default(),
                Secret::new(&crate::base::Secrets::for_simulation(1)).table_hasher()
            )
            .is_none()
        );
    }

    proptest! {
        /// Against a list of what there is.
        #[test]
        fn the_counts_are_those_of_a_list(
            steps in proptest::collection::vec((0u8..4, 0usize..8), 0..200),
        ) {
            use SourceUse::{Connection, Embryo};
            let limits = SourceLimits { embryos: Some(3), connections: Some(4) };
            let mut table = sources(limits);
            let mut list: Vec<(u8, SourceUse)> = Vec::new();
            let key = |host: u8| flow(&format!("192.0.2.{host}:9"));
            for (host, which) in steps {
                let mine = |list: &[(u8, SourceUse)], what| {
                    list.iter().filter(|e| **e == (host, what)).count()
                };
                prop_assert_eq!(table.takes_embryo(&key(host)), mine(&list, Embryo) < 3);
                prop_assert_eq!(table.takes_connection(&key(host)), mine(&list, Connection) < 4);
                match which {
                    0..3 => {
                        table.add_embryo(&key(host));
                        list.push((host, Embryo));
                    }
                    3..5 => {
                        if let Some(e) = list.iter_mut().find(|e| **e == (host, Embryo)) {
                            table.complete(&key(host));
                            e.1 = Connection;
                        }
                    }
                    _ => {
                        if let Some(i) = list.iter().position(|e| e.0 == host) {
                            let (_, was) = list.remove(i);
                            table.remove(&key(host), was);
                        }
                    }
                }
            }
            for (host, was) in list.drain(..) {
                table.remove(&key(host), was);
            }
            prop_assert_eq!(table.len(), 0);
        }
    }
}
