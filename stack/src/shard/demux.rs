//! Which connection or socket a packet is for, at the same cost for one as for a million.
//!
//! With few sockets a look-up reads from a near cache. With many, each packet of another flow misses on the
//! index, on the socket's slot and on the socket itself, one after the other; so a burst is looked up as a
//! batch before its first packet is handled ([`BatchLookup::look_up`]): each step is taken for all packets,
//! then the next one, so that the misses of the burst overlap. A result is used while the tables have not
//! changed.
//!
//! Invariant: the index holds each connection that packets may find, once; its key is in the engine.

use alloc::vec::Vec;
use core::net::{IpAddr, SocketAddr};

use crate::base::{FlowHasher, FlowIndex, FlowKey, SlotId, with_zone};
use crate::device::Burst;
use crate::ip::Delivered;
use crate::udp::{PreparedLookup, UdpTable};
use crate::wire::dissect::Network;
use crate::wire::protocol;

use crate::shard::raw::fetch;
use crate::shard::slab::Slab;
use crate::shard::sockets::Socket;

/// Sockets from which on bursts are looked up as a batch. Look-ups of fewer read a few hundred bytes each,
/// which stay in the second-level cache.
const MANY_SOCKETS: usize = 2048;

/// Bytes of a socket that are prefetched: those that an engine reads for a segment in order.
const SOCKET_BYTES: usize = 512;

/// The connections of a shard by flow.
pub(crate) struct Flows {
    index: FlowIndex,
    hasher: FlowHasher,
}

impl Flows {
    /// No connections.
    pub(crate) fn new(hasher: FlowHasher) -> Flows {
        Flows { index: FlowIndex::new(), hasher }
    }

    /// Counts changes of which connections packets may find.
    pub(crate) fn generation(&self) -> u64 {
        self.index.generation()
    }

    /// The connection of a flow.
    pub(crate) fn find(&self, sockets: &Slab<Socket>, key: &FlowKey) -> Option<SlotId> {
        self.find_by(self.hasher.hash(key), sockets, key)
    }

    fn find_by(&self, hash: u32, sockets: &Slab<Socket>, key: &FlowKey) -> Option<SlotId> {
        let slot = self.index.find(hash, |slot| match sockets.at(slot) {
            Some((_, Socket::Tcp(entry))) => entry.tcb.key() == key,
            _ => false,
        })?;
        sockets.at(slot).map(|(id, _)| id)
    }

    /// Packets of a flow go to this connection from now on.
    pub(crate) fn insert(&mut self, sockets: &Slab<Socket>, key: &FlowKey, id: SlotId) {
        let hash = self.hasher.hash(key);
        match self.find_by(hash, sockets, key).filter(|old| *old != id) {
            Some(old) => _ = self.index.replace(hash, old.index, id.index),
            None => self.index.insert(hash, id.index),
        }
    }

    /// Packets of a flow find this connection no longer, if they did.
    pub(crate) fn remove(&mut self, key: &FlowKey, id: SlotId) {
        let hash = self.hasher.hash(key);
        self.index.remove(hash, id.index);
    }
}

/// Result of the look-up of one frame.
#[derive(Clone, Copy)]
enum Hint {
    /// Nothing: not a plain packet of a transport.
    None,
    /// A TCP segment: its flow, the hash of that, and the connection.
    Tcp { key: FlowKey, hash: u32, found: Option<SlotId> },
    /// A datagram.
    Udp { probe: PreparedLookup, key: FlowKey, found: Option<SlotId> },
}

/// Results of the look-up of the current burst.
#[derive(Default)]
pub(crate) struct BatchLookup {
    hints: Vec<Hint>,
    /// The hint of the frame that is being handled, counted from 1; 0 before the first.
    at: usize,
    /// Generations of the tables of connections and of datagram sockets at the look-up.
    changes: (u64, u64),
}

impl BatchLookup {
    /// The next frame of the burst is handled.
    pub(crate) fn advance(&mut self) {
        self.at += 1;
    }

    /// No frame of the burst is left.
    pub(crate) fn clear(&mut self) {
        self.hints.clear();
        self.at = 0;
    }

    fn hint(&self) -> Option<&Hint> {
        self.hints.get(self.at.checked_sub(1)?)
    }

    /// The socket that a datagram from `remote` to `local` is for.
    pub(crate) fn socket_of_datagram(
        &self,
        table: &UdpTable<SlotId>,
        local: SocketAddr,
        remote: SocketAddr,
    ) -> Option<SlotId> {
        match self.hint() {
            Some(Hint::Udp { key, found, .. })
                if *key == FlowKey::new(local, remote) && self.changes.1 == table.generation() =>
            {
                *found
            }
            _ => table.lookup(local, remote),
        }
    }
}

/// The tables of the look-up.
pub(crate) struct Tables<'a> {
    /// Connections.
    pub flows: &'a Flows,
    /// Datagram sockets.
    pub udp: &'a UdpTable<SlotId>,
    /// The sockets of both.
    pub sockets: &'a Slab<Socket>,
}

impl BatchLookup {
    /// The connection that a segment is for.
    pub(crate) fn connection(
        &self,
        flows: &Flows,
        sockets: &Slab<Socket>,
        key: &FlowKey,
    ) -> Option<SlotId> {
        match self.hint() {
            Some(Hint::Tcp { key: known, found, .. })
                if known == key && self.changes.0 == flows.index.generation() =>
            {
                *found
            }
            _ => flows.find(sockets, key),
        }
    }

    /// Looks up all frames of a burst, if there are many sockets.
    #[inline]
    pub(crate) fn look_up(&mut self, burst: &Burst, tables: &Tables<'_>) {
        self.clear();
        let sockets = tables.flows.index.len() + tables.udp.len();
        if sockets >= MANY_SOCKETS && burst.len() >= 2 {
            self.look_up_all(burst, tables);
        }
    }

    #[inline(never)]
    fn look_up_all(&mut self, burst: &Burst, tables: &Tables<'_>) {
        self.hints.extend(burst.iter().map(|p| {
            let first = p.chain.front().map_or(&[][..], |m| m.as_slice());
            endpoints_of(first, p.chain.len())
                .map_or(Hint::None, |(protocol, key)| tables.begin(protocol, key))
        }));
        let hints = &mut self.hints;
        let touched = hints.iter().fold(0, |all, hint| all ^ tables.prefetch(hint));
        core::hint::black_box(touched);
        hints.iter_mut().for_each(|hint| tables.fetch_slot(hint));
        hints.iter().for_each(|hint| tables.fetch_socket(hint));
        hints.iter_mut().for_each(|hint| tables.resolve(hint));
        self.changes = (tables.flows.index.generation(), tables.udp.generation());
    }
}

/// The steps of a batched look-up, each taken for all frames.
impl Tables<'_> {
    /// First step: the key.
    fn begin(&self, protocol: u8, key: FlowKey) -> Hint {
        if protocol == protocol::TCP {
            return Hint::Tcp { key, hash: self.flows.hasher.hash(&key), found: None };
        }
        Hint::Udp { probe: self.udp.prepare_lookup(key.local(), key.remote()), key, found: None }
    }

    /// Second step: the index; for datagrams it names a binding, not yet a socket.
    fn prefetch(&self, hint: &Hint) -> u32 {
        match hint {
            Hint::None => 0,
            Hint::Tcp { hash, .. } => self.flows.index.prefetch(*hash),
            Hint::Udp { probe, .. } => self.udp.prefetch(probe) ^ self.udp.prefetch_binding(probe),
        }
    }

    /// Third step: the slot of the socket.
    fn fetch_slot(&self, hint: &mut Hint) {
        let slot = match hint {
            Hint::None => None,
            Hint::Tcp { hash, .. } => self.flows.index.candidate(*hash),
            Hint::Udp { probe, found, .. } => {
                *found = self.udp.lookup_prepared(probe);
                found.map(|id| id.index)
            }
        };
        if let Some(slot) = slot {
            self.sockets.fetch(slot);
        }
    }

    /// Fourth step: the socket.
    fn fetch_socket(&self, hint: &Hint) {
        let slot = match hint {
            Hint::None => None,
            Hint::Tcp { hash, .. } => self.flows.index.candidate(*hash),
            Hint::Udp { found, .. } => found.map(|id| id.index),
        };
        match slot.and_then(|slot| self.sockets.at(slot)) {
            Some((_, Socket::Tcp(entry))) => fetch(&**entry, SOCKET_BYTES),
            Some((_, Socket::Udp(entry))) => fetch(&**entry, SOCKET_BYTES),
            _ => {}
        }
    }

    /// Last step: whether the connection has this key.
    fn resolve(&self, hint: &mut Hint) {
        if let Hint::Tcp { key, hash, found } = hint {
            *found = self.flows.find_by(*hash, self.sockets, key);
        }
    }
}

/// The flow of a delivered UDP packet; `None` if it is too short to have ports.
pub(super) fn ports_of(d: &Delivered) -> Option<FlowKey> {
    let [s0, s1, d0, d1] = *d.chain.front()?.as_slice().first_chunk::<4>()?;
    let local = with_zone(d.dst, u16::from_be_bytes([d0, d1]), d.zone);
    let remote = with_zone(d.src, u16::from_be_bytes([s0, s1]), d.zone);
    Some(FlowKey::new(local, remote))
}

/// Protocol and flow of a frame, without scoped addresses, whose zone only `ip` knows. A hint: the
/// layers check all of it.
fn endpoints_of(frame: &[u8], frame_bytes: usize) -> Option<(u8, FlowKey)> {
    let network = Network::parse(frame, frame_bytes)?;
    let is_scoped = matches!(network.src, IpAddr::V6(a) if a.is_unicast_link_local());
    if is_scoped {
        return None;
    }
    Some((network.protocol, network.flow(network.ports(frame)?)))
}
