//! Header templates of flows: from Ethernet to UDP for datagrams, from Ethernet to IP for segments.
//!
//! A connected datagram socket has its own template; for other destinations and for connections
//! the shard has small direct-mapped caches, so that an idle connection costs nothing. A template is used
//! only while `ip` confirms that it is valid, and only for packets that fit its path; every other packet
//! takes the slow path, which makes a new template.

use alloc::vec::Vec;
use core::net::SocketAddr;

use crate::base::{FlowKey, Instant, Offload, SlotId};
use crate::ip::{Flow, Ip};
use crate::wire::protocol;
use crate::wire::udp::HEADER_BYTES;

use crate::shard::conn::socket_options::HeaderOptions;

/// Destinations cached: a collision costs a few look-ups, so that this only needs to cover the
/// destinations that are active at the same time.
const CACHED: usize = 64;

/// Cached connections: an estimate of the connections that are busy at the same time on one core.
const FLOWS: usize = 128;

/// The headers of datagrams from one socket to one destination.
pub struct UdpTemplate {
    ip: crate::ip::Template,
    udp: crate::udp::Template,
    remote: SocketAddr,
    /// The source that was named with the datagram.
    from: Option<SocketAddr>,
    options: HeaderOptions,
    /// Offload of a single datagram; offsets count from the Ethernet header.
    offload: Offload,
}

impl UdpTemplate {
    /// For datagrams like one that has just been sent from `local` to `remote`.
    pub(crate) fn new(
        ip: &Ip,
        now: Instant,
        local: SocketAddr,
        remote: SocketAddr,
        zone: u32,
        options: HeaderOptions,
    ) -> Option<UdpTemplate> {
        let flow = Flow {
            src: local.ip(),
            dst: remote.ip(),
            zone,
            ports: (local.port(), remote.port()),
            protocol: protocol::UDP,
            ttl: options.ttl,
            dscp_ecn: options.dscp_ecn,
            mtu_discovery: options.mtu_discovery,
        };
        let udp = crate::udp::Template::new(local, remote)?;
        let ip = ip.build_template(&flow, now)?;
        let offload = crate::udp::offload_of(0, None).shift(ip.header_bytes() as u16);
        Some(UdpTemplate { ip, udp, remote, from: None, options, offload })
    }

    /// The same for datagrams whose source is named with each.
    pub(crate) fn with_source(self, from: Option<SocketAddr>) -> UdpTemplate {
        UdpTemplate { from, ..self }
    }

    /// Offload of a single datagram.
    #[inline]
    pub(crate) fn offload(&self) -> &Offload {
        &self.offload
    }

    /// The part whose validity ends.
    #[inline]
    pub(crate) fn ip(&self) -> &crate::ip::Template {
        &self.ip
    }

    /// The UDP part, which stays valid.
    #[inline]
    pub(crate) fn udp(&self) -> &crate::udp::Template {
        &self.udp
    }

    /// Whether it is for datagrams to `remote`.
    pub(crate) fn is_to(&self, remote: &SocketAddr) -> bool {
        self.remote == *remote
    }

    /// Length of all headers.
    #[inline]
    pub(crate) fn header_bytes(&self) -> usize {
        self.ip.header_bytes() + HEADER_BYTES
    }

    /// Whether its datagrams have these options.
    #[inline(always)]
    pub(crate) fn has_options(&self, options: &HeaderOptions) -> bool {
        self.options == *options
    }
}

/// Templates of sockets that name their destination with each datagram.
#[derive(Default)]
pub(crate) struct UdpTemplates {
    /// Empty until one is kept.
    entries: Vec<Option<(SlotId, UdpTemplate)>>,
}

impl UdpTemplates {
    /// The template of a socket, a source that is named with each datagram, and a destination.
    #[inline]
    pub(crate) fn find(
        &self,
        id: SlotId,
        from: Option<SocketAddr>,
        remote: &SocketAddr,
    ) -> Option<&UdpTemplate> {
        let (owner, template) = self.entries.get(index_of(id, from, remote))?.as_ref()?;
        let is_same = *owner == id && template.remote == *remote && template.from == from;
        is_same.then_some(template)
    }

    /// Removes the templates of a socket whose own address has changed.
    pub(crate) fn remove(&mut self, id: SlotId) {
        for entry in &mut self.entries {
            entry.take_if(|(owner, _)| *owner == id);
        }
    }

    /// Keeps a template, in the place of the one that was there.
    pub(crate) fn insert(&mut self, id: SlotId, template: UdpTemplate) {
        if self.entries.is_empty() {
            self.entries.resize_with(CACHED, || None);
        }
        let at = index_of(id, template.from, &template.remote);
        if let Some(entry) = self.entries.get_mut(at) {
            *entry = Some((id, template));
        }
    }
}

/// Templates of connections.
#[derive(Default)]
pub(crate) struct FlowTemplates {
    /// Empty until one is kept.
    entries: Vec<Option<FlowTemplate>>,
}

/// The headers of a connection, and the key that they were made for.
struct FlowTemplate {
    owner: SlotId,
    options: HeaderOptions,
    ip: crate::ip::Template,
}

impl FlowTemplates {
    /// The headers of a connection's segments, rebuilt if the cached headers are stale. `None`: the segments take the
    /// slow path.
    #[inline]
    pub(crate) fn of(
        &mut self,
        id: SlotId,
        key: &FlowKey,
        options: HeaderOptions,
        ip: &Ip,
        now: Instant,
    ) -> Option<&crate::ip::Template> {
        let at = id.index as usize & (FLOWS - 1);
        let known = self.entries.get(at).and_then(Option::as_ref);
        let holds = |t: &FlowTemplate| {
            t.owner == id && t.options == options && ip.is_template_valid(&t.ip, now)
        };
        if !known.is_some_and(holds) {
            let made = ip.build_template(&flow_of(key, options), now)?;
            let made = FlowTemplate { owner: id, options, ip: made };
            if self.entries.is_empty() {
                self.entries.resize_with(FLOWS, || None);
            }
            *self.entries.get_mut(at)? = Some(made);
        }
        self.entries.get(at)?.as_ref().map(|t| &t.ip)
    }
}

/// The packets of a connection.
fn flow_of(key: &FlowKey, options: HeaderOptions) -> Flow {
    Flow {
        src: key.local_ip(),
        dst: key.remote_ip(),
        zone: key.zone,
        ports: (key.local_port, key.remote_port),
        protocol: protocol::TCP,
        ttl: options.ttl,
        dscp_ecn: options.dscp_ecn,
        mtu_discovery: options.mtu_discovery,
    }
}

#[inline]
fn index_of(id: SlotId, from: Option<SocketAddr>, remote: &SocketAddr) -> usize {
    let mixed = from.map_or(0, |from| hash_of(id, &from).rotate_left(32)) ^ hash_of(id, remote);
    (mixed >> 32) as usize & (CACHED - 1)
}

#[inline]
fn hash_of(id: SlotId, remote: &SocketAddr) -> u64 {
    let address = match remote {
        SocketAddr::V4(a) => u64::from(a.ip().to_bits()),
        SocketAddr::V6(a) => {
            let bits = a.ip().to_bits();
            (bits as u64) ^ ((bits >> 64) as u64)
        }
    };
    let ends = u64::from(remote.port()) << 32 ^ u64::from(id.index) << 48;
    (address ^ ends).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}
