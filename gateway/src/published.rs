//! Counts of published ports. Ports of the host lead to the guest. Ports of the guest's loopback interface lead to the
//! host's loopback interface.
//!
//! A port is shared by the sockets that listen for it, one for each IP version, and by the threads that carry its
//! connections. The counts are atomic, without any ordering.

use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::policy::Protocol;
use crate::ports::{Bind, Forward};

/// A published port and its counts.
#[derive(Debug)]
pub struct PublishedPort {
    /// Where it is bound and where it leads.
    pub forward: Forward,
    connections: AtomicU64,
    refused: AtomicU64,
}

impl PublishedPort {
    /// A port to which nothing came yet.
    pub fn new(forward: Forward) -> PublishedPort {
        PublishedPort { forward, connections: AtomicU64::new(0), refused: AtomicU64::new(0) }
    }

    /// A client was accepted (TCP), or the flow of a client was begun (UDP).
    pub(crate) fn count_connection(&self) {
        self.connections.fetch_add(1, Relaxed);
    }

    /// A client was reset (TCP), or a datagram got no flow (UDP), before the guest had it.
    pub(crate) fn count_refused(&self) {
        self.refused.fetch_add(1, Relaxed);
    }
}

/// Published ports in a snapshot: one port, or consecutive ports to which nothing came.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PublishedStat {
    /// TCP or UDP.
    pub protocol: Protocol,
    /// Where they are bound.
    pub bind: Bind,
    /// The ports that are bound.
    pub from: RangeInclusive<u16>,
    /// The port of the other side to which the first one leads; the others follow in order.
    pub to: u16,
    /// The address to which they lead, if it is not that of the other side.
    pub to_address: Option<IpAddr>,
    /// TCP: clients that were accepted. UDP: flows of clients.
    pub connections: u64,
    /// TCP: accepted clients that were reset before the other side had accepted them. UDP: datagrams that got no flow.
    pub refused: u64,
}

impl PublishedStat {
    fn of(protocol: Protocol, port: &PublishedPort) -> PublishedStat {
        let Forward { bind, from, to, to_address, .. } = &port.forward;
        PublishedStat {
            protocol,
            bind: bind.clone(),
            from: *from..=*from,
            to: *to,
            to_address: *to_address,
            connections: port.connections.load(Relaxed),
            refused: port.refused.load(Relaxed),
        }
    }

    fn is_idle(&self) -> bool {
        self.connections == 0 && self.refused == 0
    }

    /// The port of the other side to which the last one leads.
    pub fn last_to(&self) -> u16 {
        self.to.saturating_add(self.from.end() - self.from.start())
    }

    /// Whether `next` continues this range, and both are idle.
    fn is_continued_by(&self, next: &PublishedStat) -> bool {
        self.is_idle()
            && next.is_idle()
            && self.bind == next.bind
            && self.to_address == next.to_address
            && self.from.end().checked_add(1) == Some(*next.from.start())
            && self.last_to().checked_add(1) == Some(next.to)
    }
}

/// A snapshot of the ports of one protocol, in order. Both IP versions of a port are one entry, and consecutive unused
/// ports are joined: `-t all` has one entry for each used port and each gap.
pub(crate) fn stat<'a>(
    protocol: Protocol,
    ports: impl Iterator<Item = &'a Arc<PublishedPort>>,
) -> Vec<PublishedStat> {
    type Place<'a> = (Option<IpAddr>, Option<&'a str>, u16);
    let place = |port: &&'a Arc<PublishedPort>| -> Place<'a> {
        let Forward { bind, from, .. } = &port.forward;
        (bind.address, bind.interface.as_deref(), *from)
    };
    let mut ports: Vec<_> = ports.collect();
    ports.sort_by_key(place);
    ports.dedup_by(|a, b| Arc::ptr_eq(a, b));
    let mut joined: Vec<PublishedStat> = Vec::new();
    for next in ports.into_iter().map(|port| PublishedStat::of(protocol, port)) {
        match joined.last_mut() {
            Some(last) if last.is_continued_by(&next) => {
                last.from = *last.from.start()..=*next.from.end();
            }
            _ => joined.push(next),
        }
    }
    joined
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ports::PortSpec;

    fn ports(specs: &[&str]) -> Vec<Arc<PublishedPort>> {
        let forwards = specs.iter().flat_map(|s| s.parse::<PortSpec>().unwrap().forwards());
        forwards.map(|forward| Arc::new(PublishedPort::new(forward))).collect()
    }

    fn ranges(ports: &[Arc<PublishedPort>]) -> Vec<(u16, u16, u16)> {
        let all = stat(Protocol::Tcp, ports.iter());
        all.iter().map(|s| (*s.from.start(), *s.from.end(), s.to)).collect()
    }

    #[test]
    fn idle_ports_are_joined_as_far_as_they_lead_to_consecutive_ports() {
        let ports = ports(&["80-83:8080", "84:90", "86", "127.0.0.1/85"]);
        assert_eq!(ranges(&ports), [(80, 83, 8080), (84, 84, 90), (86, 86, 86), (85, 85, 85)]);
        ports[1].count_connection();
        ports[2].count_refused();
        let used = ranges(&ports);
        assert_eq!(used[..4], [(80, 80, 8080), (81, 81, 8081), (82, 82, 8082), (83, 83, 8083)]);
        let all = stat(Protocol::Tcp, ports.iter());
        assert_eq!((all[1].connections, all[1].refused), (1, 0));
        assert_eq!((all[2].connections, all[2].refused), (0, 1));
    }

    #[test]
    fn both_ip_versions_of_a_port_are_one() {
        let mut ports = ports(&["443"]);
        ports.push(Arc::clone(&ports[0]));
        assert_eq!(ranges(&ports), [(443, 443, 443)]);
        let highest = self::ports(&["65534-65535"]);
        assert_eq!(ranges(&highest), [(65_534, 65_535, 65_534)]);
    }
}
