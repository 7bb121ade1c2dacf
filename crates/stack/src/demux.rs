//! Which connection or socket a packet is for, at the same cost for one as for a million.
//!
//! With few sockets what a look-up reads is in a near cache. With many, each packet of another flow
//! waits for the index, for the socket's slot and for the socket itself, one after the other; so a
//! burst is looked up together before its first packet is handled ([`Shard::foresee`]): each step is
//! taken for all packets, then the next one, and the misses of the burst are under way at the same time.
//! What was found is used if nothing has changed since.
//!
//! Invariant: the index holds each connection that packets may find, once; its key is in the engine.

use std::net::SocketAddr;

use fulmar_base::{FlowHasher, FlowIndex, FlowKey, Probe, SlotId, with_zone};
use fulmar_udp::{UdpProbe, UdpTable};
use fulmar_wire::{eth, protocol};

use crate::shard::Shard;
use crate::sockets::Socket;
use crate::sys;

/// Sockets from which on bursts are looked up together. What look-ups of fewer read, a few hundred
/// bytes each, stays in the second-level cache.
const MANY_SOCKETS: usize = 2048;

/// Bytes of a socket that are fetched ahead: what an engine reads for a segment in order.
const SOCKET_BYTES: usize = 512;

/// The connections of a shard by flow.
pub struct Flows {
    index: FlowIndex,
    hasher: FlowHasher,
}

impl Flows {
    /// No connections.
    pub fn new(hasher: FlowHasher) -> Flows {
        Flows { index: FlowIndex::new(), hasher }
    }
}

/// What was found for one frame of a burst.
#[derive(Clone, Copy)]
enum Hint {
    /// Nothing: not a plain packet of a transport.
    None,
    /// A TCP segment: its flow, the hash of that, and the connection.
    Tcp { key: FlowKey, hash: u32, found: Option<SlotId> },
    /// A datagram.
    Udp { probe: UdpProbe, key: FlowKey, found: Option<SlotId> },
}

/// What was found for the frames of the present burst.
#[derive(Default)]
pub struct Foresight {
    hints: Vec<Hint>,
    /// The hint of the frame that is being handled, counted from 1; 0 before the first.
    at: usize,
    /// The tables as they were: those of connections and of datagram sockets.
    changes: (u64, u64),
}

impl Foresight {
    /// The next frame of the burst is handled.
    pub fn advance(&mut self) {
        self.at += 1;
    }

    /// No frame of the burst is left.
    pub fn clear(&mut self) {
        self.hints.clear();
        self.at = 0;
    }

    fn hint(&self) -> Option<&Hint> {
        self.hints.get(self.at.checked_sub(1)?)
    }

    /// The socket that a datagram from `remote` to `local` is for.
    pub fn socket_of_datagram(
        &self,
        table: &UdpTable<SlotId>,
        local: SocketAddr,
        remote: SocketAddr,
    ) -> Option<SlotId> {
        match self.hint() {
            Some(Hint::Udp { key, found, .. })
                if *key == FlowKey::new(local, remote) && self.changes.1 == table.changes() =>
            {
                *found
            }
            _ => table.lookup(local, remote),
        }
    }
}

impl<P: Probe> Shard<P> {
    /// Counts changes of which connections packets may find.
    pub(crate) fn flow_changes(&self) -> u64 {
        self.flows.index.changes()
    }

    /// The connection of a flow.
    pub(crate) fn flow(&self, key: &FlowKey) -> Option<SlotId> {
        self.flow_at(self.flows.hasher.hash(key), key)
    }

    fn flow_at(&self, hash: u32, key: &FlowKey) -> Option<SlotId> {
        let slot = self.flows.index.find(hash, |slot| match self.sockets.at(slot) {
            Some((_, Socket::Tcp(entry))) => entry.tcb.key() == key,
            _ => false,
        })?;
        self.sockets.at(slot).map(|(id, _)| id)
    }

    /// Packets of a flow go to this connection from now on.
    pub(crate) fn insert_flow(&mut self, key: &FlowKey, id: SlotId) {
        let hash = self.flows.hasher.hash(key);
        match self.flow_at(hash, key).filter(|old| *old != id) {
            Some(old) => _ = self.flows.index.replace(hash, old.index, id.index),
            None => self.flows.index.insert(hash, id.index),
        }
    }

    /// Packets of a flow find this connection no longer, if they did.
    pub(crate) fn remove_flow(&mut self, key: &FlowKey, id: SlotId) {
        let hash = self.flows.hasher.hash(key);
        self.flows.index.remove(hash, id.index);
    }

    /// The connection that a segment is for.
    pub(crate) fn flow_of_segment(&self, key: &FlowKey) -> Option<SlotId> {
        match self.foresight.hint() {
            Some(Hint::Tcp { key: foreseen, found, .. })
                if foreseen == key && self.foresight.changes.0 == self.flows.index.changes() =>
            {
                *found
            }
            _ => self.flow(key),
        }
    }

    /// Looks up all frames of the burst that was received, if that is worth it.
    #[inline]
    pub(crate) fn foresee(&mut self) {
        self.foresight.clear();
        let sockets = self.flows.index.len() + self.udp.len();
        if sockets >= MANY_SOCKETS && self.rx.len() >= 2 {
            self.look_up_all();
        }
    }

    #[inline(never)]
    fn look_up_all(&mut self) {
        let mut hints = std::mem::take(&mut self.foresight.hints);
        hints.extend(self.rx.iter().map(|p| {
            let first = p.chain.front().map_or(&[][..], |m| m.as_slice());
            ends_of(first).map_or(Hint::None, |(protocol, key)| self.begin(protocol, key))
        }));
        let touched = hints.iter().fold(0, |all, hint| all ^ self.touch(hint));
        std::hint::black_box(touched);
        hints.iter_mut().for_each(|hint| self.fetch_slot(hint));
        hints.iter().for_each(|hint| self.fetch_socket(hint));
        hints.iter_mut().for_each(|hint| self.resolve(hint));
        self.foresight.hints = hints;
        self.foresight.changes = (self.flows.index.changes(), self.udp.changes());
    }

    /// First step: what is to be looked up.
    fn begin(&self, protocol: u8, key: FlowKey) -> Hint {
        if protocol == protocol::TCP {
            return Hint::Tcp { key, hash: self.flows.hasher.hash(&key), found: None };
        }
        Hint::Udp { probe: self.udp.probe(key.local(), key.remote()), key, found: None }
    }

    /// Second step: the index; for datagrams it names a binding, not yet a socket.
    fn touch(&self, hint: &Hint) -> u32 {
        match hint {
            Hint::None => 0,
            Hint::Tcp { hash, .. } => self.flows.index.touch(*hash),
            Hint::Udp { probe, .. } => self.udp.touch(probe) ^ self.udp.touch_binding(probe),
        }
    }

    /// Third step: the slot of the socket.
    fn fetch_slot(&self, hint: &mut Hint) {
        let slot = match hint {
            Hint::None => None,
            Hint::Tcp { hash, .. } => self.flows.index.candidate(*hash),
            Hint::Udp { probe, found, .. } => {
                *found = self.udp.lookup_probe(probe);
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
            Some((_, Socket::Tcp(entry))) => sys::fetch(&**entry, SOCKET_BYTES),
            Some((_, Socket::Udp(entry))) => sys::fetch(&**entry, SOCKET_BYTES),
            _ => {}
        }
    }

    /// Last step: whether the connection has this key.
    fn resolve(&self, hint: &mut Hint) {
        if let Hint::Tcp { key, hash, found } = hint {
            *found = self.flow_at(*hash, key);
        }
    }
}

/// Protocol and flow of a plain frame: IPv4 without options and fragments, or IPv6 without extension
/// headers and scoped addresses. A guess, which nothing is decided by: the layers check all of it.
fn ends_of(frame: &[u8]) -> Option<(u8, FlowKey)> {
    let packet = frame.get(eth::HEADER_BYTES..)?;
    let (protocol, src, dst, ports) = match (eth::Header::parse(frame).ok()?.ethertype, packet) {
        (eth::IPV4, [0x45, _, _, _, _, _, high, low, _, protocol, ..]) => {
            let is_fragment = (high & 0x3f | low) != 0;
            let src: [u8; 4] = packet.get(12..)?.first_chunk().copied()?;
            let dst: [u8; 4] = packet.get(16..)?.first_chunk().copied()?;
            if is_fragment {
                return None;
            }
            (*protocol, src.into(), dst.into(), packet.get(20..24)?)
        }
        (eth::IPV6, [_, _, _, _, _, _, next_header, ..]) => {
            let src: [u8; 16] = packet.get(8..)?.first_chunk().copied()?;
            let dst: [u8; 16] = packet.get(24..)?.first_chunk().copied()?;
            (*next_header, src.into(), dst.into(), packet.get(40..44)?)
        }
        _ => return None,
    };
    let is_scoped = matches!(src, std::net::IpAddr::V6(a) if a.is_unicast_link_local());
    if !matches!(protocol, protocol::TCP | protocol::UDP) || is_scoped {
        return None;
    }
    let [s0, s1, d0, d1] = *ports.first_chunk::<4>()?;
    let local = with_zone(dst, u16::from_be_bytes([d0, d1]), 0);
    let remote = with_zone(src, u16::from_be_bytes([s0, s1]), 0);
    Some((protocol, FlowKey::new(local, remote)))
}
