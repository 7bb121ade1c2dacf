//! Which flow has begun a QUIC connection, for the threads of all queues.
//!
//! A server knows a connection that begins by its destination ID, from whatever port its packets come. If two flows of a
//! guest could use one ID, the server might get half of each ClientHello, which together name another host.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use fulmar_stack::base::{Duration, Instant};

/// Most IDs. Further connections are refused.
const MOST_IDS: usize = 65_536;
/// How long a server may keep the first packets of a connection that does not go on.
const KEPT: Duration = Duration::from_secs(60);

/// The ends of a flow as the guest knows them.
pub(crate) type Owner = (SocketAddr, SocketAddr);

/// The IDs of the connections that flows have begun.
#[derive(Clone, Default)]
pub(crate) struct Initials(Arc<Mutex<Table>>);

#[derive(Default)]
struct Table {
    /// Whose an ID is, and since when its flow has ended.
    owners: HashMap<Box<[u8]>, (Owner, Option<Instant>)>,
    /// IDs of flows that have ended, in the order of their ends.
    ended: VecDeque<(Instant, Box<[u8]>)>,
}

impl Table {
    /// Forgets IDs whose flows have ended long ago, and were not begun anew.
    fn forget(&mut self, now: Instant) {
        while self.ended.front().is_some_and(|(at, _)| *at + KEPT <= now) {
            let Some((at, id)) = self.ended.pop_front() else { return };
            if self.owners.get(&id).is_some_and(|(_, ended)| *ended == Some(at)) {
                self.owners.remove(&id);
            }
        }
    }
}

impl Initials {
    /// Enters the IDs of a flow. False: another flow has one of them, or there are too many.
    pub(super) fn claim<'a>(
        &self,
        ids: impl IntoIterator<Item = &'a [u8]>,
        owner: Owner,
        now: Instant,
    ) -> bool {
        let Ok(mut table) = self.0.lock() else { return false };
        table.forget(now);
        // An ID that was begun anew and ended again is in the list twice.
        let is_full = table.owners.len().max(table.ended.len()) >= MOST_IDS;
        ids.into_iter().all(|id| match table.owners.entry(id.into()) {
            Entry::Occupied(mut known) => {
                let is_own = known.get().0 == owner;
                if is_own {
                    known.get_mut().1 = None;
                }
                is_own
            }
            Entry::Vacant(_) if is_full => false,
            Entry::Vacant(place) => {
                place.insert((owner, None));
                true
            }
        })
    }

    /// A flow has ended. The server may still have a part of what it sent.
    pub(super) fn release<'a>(
        &self,
        ids: impl IntoIterator<Item = &'a [u8]>,
        owner: Owner,
        now: Instant,
    ) {
        let Ok(mut table) = self.0.lock() else { return };
        let Table { owners, ended } = &mut *table;
        for id in ids {
            if let Some((_, since)) = owners.get_mut(id).filter(|(of, _)| *of == owner) {
                *since = Some(now);
                ended.push_back((now, id.into()));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(port: u16) -> SocketAddr {
        ([10, 0, 0, 1], port).into()
    }

    #[test]
    fn an_id_is_one_flows_until_long_after_that_has_ended() {
        let initials = Initials::default();
        let (one, other) = ((at(1), at(443)), (at(2), at(443)));
        let (now, later) = (Instant::ZERO, Instant::ZERO + KEPT);
        assert!(initials.claim([&b"a"[..], b"b"], one, now));
        assert!(initials.claim([&b"a"[..], b"b", b"c"], one, now), "again");
        assert!(!initials.claim([&b"d"[..], b"b"], other, now));
        initials.release([&b"b"[..], b"d"], one, now);
        assert!(!initials.claim([&b"b"[..]], other, now), "the server may remember it");
        assert!(initials.claim([&b"b"[..]], other, later));
        initials.release([&b"a"[..], b"b", b"c"], one, later);
        assert!(!initials.claim([&b"b"[..]], one, later + KEPT), "that of another flow stays");
    }

    #[test]
    fn a_flow_that_begins_anew_keeps_its_ids() {
        let initials = Initials::default();
        let (one, other) = ((at(1), at(443)), (at(2), at(443)));
        let after = |seconds| Instant::ZERO + Duration::from_secs(seconds);
        assert!(initials.claim([&b"a"[..]], one, after(0)));
        initials.release([&b"a"[..]], one, after(0));
        assert!(initials.claim([&b"a"[..]], one, after(1)));
        assert!(!initials.claim([&b"a"[..]], other, after(100)));
    }

    #[test]
    fn ids_are_bounded() {
        let (initials, owner, now) = (Initials::default(), (at(1), at(443)), Instant::ZERO);
        let ids: Vec<[u8; 4]> = (0..=MOST_IDS as u32).map(u32::to_be_bytes).collect();
        let (last, fit) = ids.split_last().unwrap();
        for id in fit {
            assert!(initials.claim([&id[..]], owner, now));
        }
        assert!(!initials.claim([&last[..]], owner, now));
        assert!(initials.claim([&fit[7][..]], owner, now), "a known one");
        let refilled = Initials::default();
        for _ in 0..=MOST_IDS {
            refilled.claim([&b"a"[..]], owner, now);
            refilled.release([&b"a"[..]], owner, now);
        }
        assert!(!refilled.claim([&b"b"[..]], owner, now), "the list of the ended is bounded, too");
    }
}
