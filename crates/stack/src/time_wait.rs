//! Connections in TIME-WAIT: a small entry each, bounded in number. When the table is full the
//! oldest gives way (RFC 9293 section 3.6.1 lets a new connection in by RFC 6191 anyway).

use std::collections::VecDeque;

use fulmar_base::{FlowKey, Instant};
use fulmar_tcp::TimeWait;
use hashbrown::HashMap;

use crate::secret::Keyed;

/// The table. Entries leave in the order of their time, checked again when it comes: a segment may
/// have restarted one.
pub struct TimeWaitTable {
    entries: HashMap<FlowKey, TimeWait, Keyed>,
    order: VecDeque<FlowKey>,
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
            self.order.push_back(key);
        }
        while self.order.len() > self.limit {
            if let Some(oldest) = self.order.pop_front() {
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
        if self.order.front() == Some(key) {
            self.order.pop_front();
        }
    }

    /// Forgets what is over at `now`.
    pub fn expire(&mut self, now: Instant) {
        while let Some(key) = self.order.front().copied() {
            match self.entries.get(&key) {
                Some(e) if e.expires() > now => return,
                Some(_) => drop(self.entries.remove(&key)),
                None => {}
            }
            self.order.pop_front();
        }
    }

    /// When to call [`TimeWaitTable::expire`] next.
    pub fn next_deadline(&self) -> Option<Instant> {
        let first = self.order.iter().find_map(|k| self.entries.get(k))?;
        Some(first.expires())
    }
}
