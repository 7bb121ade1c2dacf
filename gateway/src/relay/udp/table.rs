//! The flows of one queue: by either end, by age, by time-out.
//!
//! Three classes share the table, so that none is starved by another: flows that the guest began, flows of outside
//! hosts that the guest has answered, and flows of *strangers*, which the guest has not answered. Strangers have an
//! eighth of the table at most. A full table removes a flow from outside while such flows have more than half of it,
//! else one of the guest's. Within a class it removes the least recently used flow, by the second-chance (clock)
//! algorithm.

use std::collections::{HashMap, VecDeque};
use std::hash::BuildHasher;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::RawFd;

use fulmar_stack::base::{Instant, SlotId};
use fulmar_stack::shard::{Slab, Wheel};

use super::flow::Flow;

/// The guest's end and the other end as the guest knows it.
pub(super) type Key = (SocketAddr, SocketAddr);
/// The host's socket, the other end as the host knows it, and the address of the host to which a client of a published
/// port writes.
pub(crate) type HostKey = (RawFd, SocketAddr, Option<IpAddr>);

/// Entries that are looked at for an idle flow.
const LOOKED_AT: usize = 16;
/// The part of the table that strangers have at most.
const STRANGERS: usize = 8;

/// The side that began a flow, and whether the guest takes part.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Class {
    /// The guest began it.
    Out,
    /// An outside host began it, and the guest has answered.
    Answered,
    /// An outside host began it, and the guest has not answered.
    Stranger,
}

const CLASSES: usize = 3;

/// The flows.
pub(super) struct Table {
    flows: Slab<Flow>,
    by_peer: HashMap<Key, SlotId>,
    by_host: HashMap<HostKey, SlotId>,
    /// The addresses to which the guest has written by a socket: how many flows have each, and its name.
    written_to: HashMap<(RawFd, IpAddr), (usize, IpAddr)>,
    /// How many flows each class has.
    count: [usize; CLASSES],
    /// The queue of each class, with the time of each entry. Entries of flows that have ended or changed their class
    /// stay until they come up.
    order: [VecDeque<(Instant, SlotId)>; CLASSES],
    timers: Wheel<SlotId>,
}

impl Default for Table {
    fn default() -> Table {
        Table {
            flows: Slab::default(),
            by_peer: HashMap::new(),
            by_host: HashMap::new(),
            written_to: HashMap::new(),
            count: [0; CLASSES],
            order: Default::default(),
            timers: Wheel::new(Instant::ZERO),
        }
    }
}

impl Table {
    /// A flow.
    pub(super) fn get(&self, id: SlotId) -> Option<&Flow> {
        self.flows.get(id)
    }

    /// A flow, to send by it or to count. [`Table::touched`] is to be called where its time or its class may have
    /// changed.
    pub(super) fn get_mut(&mut self, id: SlotId) -> Option<&mut Flow> {
        self.flows.get_mut(id)
    }

    /// All flows.
    pub(super) fn iter(&self) -> impl Iterator<Item = (SlotId, &Flow)> {
        self.flows.iter()
    }

    /// The flow between two ends.
    pub(super) fn find(&self, key: Key) -> Option<SlotId> {
        self.by_peer.get(&key).copied()
    }

    /// The flow to which a datagram from outside belongs.
    pub(crate) fn find_host(&self, (fd, peer, local): HostKey) -> Option<SlotId> {
        let exact = self.by_host.get(&(fd, peer, local));
        exact.or_else(|| self.by_host.get(&(fd, peer, None))).copied()
    }

    /// Whether a flow has exactly this end of the host.
    pub(crate) fn has_host(&self, key: HostKey) -> bool {
        self.by_host.contains_key(&key)
    }

    /// The name that the guest has for an address of the host's network to which it has written by a socket.
    pub(super) fn name_of(&self, socket_and_address: (RawFd, IpAddr)) -> Option<IpAddr> {
        self.written_to.get(&socket_and_address).map(|(_, name)| *name)
    }

    /// A keyed hash of a host's end, which an outsider cannot compute.
    pub(super) fn hash(&self, key: &HostKey) -> u64 {
        self.by_host.hasher().hash_one(key)
    }

    /// Adds a flow, neither of whose ends another one has.
    pub(super) fn insert(&mut self, mut flow: Flow, now: Instant) -> SlotId {
        let (key, host_key, class, expires) =
            ((flow.guest, flow.peer), flow.host_key(), flow.class(), flow.expires());
        flow.entered_as = class;
        let id = self.flows.insert(flow);
        let timer = self.timers.schedule(None, id, expires);
        if let Some(flow) = self.flows.get_mut(id) {
            flow.timer = Some(timer);
        }
        self.by_peer.insert(key, id);
        self.by_host.insert(host_key, id);
        self.enter(class, id, now);
        id
    }

    fn enter(&mut self, class: Class, id: SlotId, now: Instant) {
        if let Some(flow) = self.flows.get(id).filter(|_| class != Class::Stranger) {
            let (name, address) = (flow.peer.ip(), (flow.host_key().0, flow.host_addr.ip()));
            let (flows, of_all) = self.written_to.entry(address).or_insert((0, name));
            (*flows, *of_all) = (*flows + 1, name);
        }
        self.count[class as usize] += 1;
        let order = &mut self.order[class as usize];
        order.push_back((now, id));
        // Bounds the entries of flows that are gone.
        if order.len() > 2 * self.count[class as usize] + 64 {
            let flows = &self.flows;
            order.retain(|(_, id)| flows.get(*id).is_some_and(|f| f.entered_as == class));
        }
    }

    /// A datagram of a flow has passed.
    pub(super) fn touched(&mut self, id: SlotId, now: Instant) {
        let Some(flow) = self.flows.get_mut(id) else { return };
        flow.timer = Some(self.timers.schedule(flow.timer, id, flow.expires()));
        let class = flow.class();
        let before = std::mem::replace(&mut flow.entered_as, class);
        if class != before {
            self.count[before as usize] -= 1;
            self.enter(class, id, now);
        }
    }

    /// Removes a flow.
    pub(super) fn remove(&mut self, id: SlotId) -> Option<Flow> {
        let flow = self.flows.remove(id)?;
        self.by_peer.remove(&(flow.guest, flow.peer));
        self.by_host.remove(&flow.host_key());
        self.count[flow.entered_as as usize] -= 1;
        self.forget_address(&flow);
        if let Some(timer) = flow.timer {
            self.timers.cancel(timer);
        }
        Some(flow)
    }

    fn forget_address(&mut self, flow: &Flow) {
        let address = (flow.host_key().0, flow.host_addr.ip());
        let others =
            self.written_to.get_mut(&address).filter(|_| flow.entered_as != Class::Stranger);
        if let Some((flows, _)) = others {
            *flows -= 1;
            if *flows == 0 {
                self.written_to.remove(&address);
            }
        }
    }

    /// The flow that has to give way to a new one of a class in a table of `most` flows.
    pub(super) fn victim(&mut self, class: Class, most: usize, now: Instant) -> Option<SlotId> {
        let [out, answered, strangers] = self.count;
        if class == Class::Stranger && strangers >= (most / STRANGERS).max(1) {
            return self.oldest(Class::Stranger, now, |_| true);
        }
        if self.flows.len() < most {
            return None;
        }
        let outside = answered + strangers + usize::from(class != Class::Out);
        let of = match () {
            () if out > 0 && outside <= most / 2 => Class::Out,
            () if strangers > 0 => Class::Stranger,
            () => Class::Answered,
        };
        self.oldest(of, now, |_| true)
    }

    /// The least recently used flow of a class of those that may go, as far as [`LOOKED_AT`] entries tell.
    pub(super) fn oldest(
        &mut self,
        class: Class,
        now: Instant,
        may_go: impl Fn(&Flow) -> bool,
    ) -> Option<SlotId> {
        let mut looked_at = 0;
        while let Some((seen, id)) = self.order[class as usize].pop_front() {
            let Some(flow) = self.flows.get(id).filter(|f| f.entered_as == class) else { continue };
            let is_last = looked_at >= LOOKED_AT;
            let (has_moved, may_go) = (flow.moved > seen, may_go(flow));
            // Whatever becomes of it, it stays in the queue as long as it stays in the table.
            self.order[class as usize].push_back((now, id));
            if may_go && (is_last || !has_moved) {
                return Some(id);
            }
            if is_last {
                return None;
            }
            looked_at += 1;
        }
        None
    }

    /// The next flow whose time is over.
    pub(super) fn expired(&mut self, now: Instant) -> Option<SlotId> {
        while let Some(id) = self.timers.expire(now) {
            let Some(flow) = self.flows.get_mut(id) else { continue };
            let expires = flow.expires();
            flow.timer = None;
            if expires <= now {
                return Some(id);
            }
            flow.timer = Some(self.timers.schedule(None, id, expires));
        }
        None
    }

    /// When the next flow may time out.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.timers.next_deadline()
    }
}

#[cfg(test)]
mod tests;
