//! Connections in TIME-WAIT: a small entry each, bounded in number. When the table is full the
//! oldest gives way (RFC 9293 section 3.6.1 lets a new connection in by RFC 6191 anyway).

use alloc::collections::VecDeque;

use fulmar_base::{FlowKey, Instant};
use fulmar_tcp::TimeWait;
use hashbrown::HashMap;

use crate::secret::Keyed;

/// The table. Entries leave in the order of their time, checked again when it comes: a FIN that came
/// again may have restarted one, which then goes to the end and does not hold up the others.
pub struct TimeWaitTable {
    entries: HashMap<FlowKey, TimeWait, Keyed>,
    order: VecDeque<(Instant, FlowKey)>,
    limit: usize,
}

impl TimeWaitTable {
    /// An empty table for at most `limit` entries.
    pub fn new(limit: usize, hasher: Keyed) -> Self {
        TimeWaitTable {
            entries: HashMap::with_hasher(hasher),
            order: VecDeque::new(),
            limit: limit.max(1),
        }
    }

    /// How many entries there are.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Adds an entry; the oldest goes if there are too many.
    pub fn insert(&mut self, key: FlowKey, entry: TimeWait) {
        if self.entries.insert(key, entry).is_none() {
            self.order.push_back((entry.expires(), key));
        }
        while self.order.len() > self.limit {
            if let Some((_, oldest)) = self.order.pop_front() {
                self.entries.remove(&oldest);
            }
        }
    }

    /// The entry of a flow.
    pub fn get_mut(&mut self, key: &FlowKey) -> Option<&mut TimeWait> {
        self.entries.get_mut(key)
    }

    /// The flows that are here.
    pub fn keys(&self) -> impl Iterator<Item = &FlowKey> {
        self.entries.keys()
    }

    /// Whether the flow is here.
    pub fn contains(&self, key: &FlowKey) -> bool {
        self.entries.contains_key(key)
    }

    /// Forgets a flow (its place in the order goes when its time comes).
    pub fn remove(&mut self, key: &FlowKey) {
        self.entries.remove(key);
        if self.order.front().is_some_and(|(_, first)| first == key) {
            self.order.pop_front();
        }
    }

    /// Forgets what is over at `now`.
    pub fn expire(&mut self, now: Instant) {
        while let Some((at, key)) = self.order.front().copied() {
            if at > now {
                return;
            }
            self.order.pop_front();
            match self.entries.get(&key).map(TimeWait::expires) {
                Some(later) if later > now => self.order.push_back((later, key)),
                Some(_) => drop(self.entries.remove(&key)),
                None => {}
            }
        }
    }

    /// When to call [`TimeWaitTable::expire`] next.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.order.front().map(|(at, _)| *at)
    }
}
