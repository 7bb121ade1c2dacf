//! Connections in TIME-WAIT: a small entry each, bounded in number. A full table drops its oldest entry.

use alloc::collections::VecDeque;

use crate::base::{FlowKey, Instant};
use crate::tcp::TimeWait;
use hashbrown::HashMap;

use crate::shard::secret::Keyed;

/// The table. A repeated FIN restarts the time of an entry (RFC 9293 section 3.10.7.4) but leaves its place in the
/// order; when the time of the place comes, the entry moves to the end.
pub(crate) struct TimeWaitTable {
    entries: HashMap<FlowKey, Entry, Keyed>,
    /// The places of entries, the oldest first. A place whose number is not its entry's is stale.
    order: VecDeque<Place>,
    next_place: u64,
    limit: usize,
}

struct Entry {
    state: TimeWait,
    place: u64,
}

#[derive(Clone, Copy)]
struct Place {
    at: Instant,
    key: FlowKey,
    number: u64,
}

impl TimeWaitTable {
    /// An empty table for at most `limit` entries.
    pub(crate) fn new(limit: usize, hasher: Keyed) -> Self {
        TimeWaitTable {
            entries: HashMap::with_hasher(hasher),
            order: VecDeque::new(),
            next_place: 0,
            limit: limit.max(1),
        }
    }

    /// How many entries there are.
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Adds an entry; the oldest goes if there are too many.
    pub(crate) fn insert(&mut self, key: FlowKey, state: TimeWait) {
        let place = self.place(key, state.expires());
        self.entries.insert(key, Entry { state, place });
        while self.entries.len() > self.limit {
            let Some(oldest) = self.order.pop_front() else { break };
            if self.is_current(&oldest) {
                self.entries.remove(&oldest.key);
            }
        }
        if self.order.len() > 2 * self.limit {
            let order = core::mem::take(&mut self.order);
            self.order = order.into_iter().filter(|place| self.is_current(place)).collect();
        }
    }

    fn place(&mut self, key: FlowKey, at: Instant) -> u64 {
        self.next_place += 1;
        self.order.push_back(Place { at, key, number: self.next_place });
        self.next_place
    }

    fn is_current(&self, place: &Place) -> bool {
        self.entries.get(&place.key).is_some_and(|e| e.place == place.number)
    }

    /// The entry of a flow.
    pub(crate) fn get_mut(&mut self, key: &FlowKey) -> Option<&mut TimeWait> {
        self.entries.get_mut(key).map(|e| &mut e.state)
    }

    /// The flows in TIME-WAIT.
    pub(crate) fn keys(&self) -> impl Iterator<Item = &FlowKey> {
        self.entries.keys()
    }

    /// Whether the flow is in TIME-WAIT.
    pub(crate) fn contains(&self, key: &FlowKey) -> bool {
        self.entries.contains_key(key)
    }

    /// Removes a flow. Its place in the order stays until its time comes.
    pub(crate) fn remove(&mut self, key: &FlowKey) {
        self.entries.remove(key);
        if self.order.front().is_some_and(|first| first.key == *key) {
            self.order.pop_front();
        }
    }

    /// Removes the entries that have expired at `now`.
    pub(crate) fn expire(&mut self, now: Instant) {
        while let Some(place) = self.order.front().copied().filter(|p| p.at <= now) {
            self.order.pop_front();
            if !self.is_current(&place) {
                continue;
            }
            match self.entries.get(&place.key).map(|e| e.state.expires()) {
                Some(later) if later > now => {
                    let number = self.place(place.key, later);
                    if let Some(entry) = self.entries.get_mut(&place.key) {
                        entry.place = number;
                    }
                }
                _ => drop(self.entries.remove(&place.key)),
            }
        }
    }

    /// When to call [`TimeWaitTable::expire`] next.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        self.order.front().map(|place| place.at)
    }
}
