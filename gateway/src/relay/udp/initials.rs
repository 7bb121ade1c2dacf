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
    owners: HashMap<Box<[u8]>, Owner>,
    /// IDs of flows that have ended, and until when no other flow may have them.
    ended: VecDeque<(Instant, Box<[u8]>, Owner)>,
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
        let Table { owners, ended } = &mut *table;
        while ended.front().is_some_and(|(until, ..)| *until <= now) {
            if let Some((_, id, of)) = ended.pop_front()
                && owners.get(&id) == Some(&of)
            {
                owners.remove(&id);
            }
        }
        ids.into_iter().all(|id| {
            let is_full = owners.len() >= MOST_IDS;
            match owners.entry(id.into()) {
                Entry::Occupied(other) => *other.get() == owner,
                Entry::Vacant(_) if is_full => false,
                Entry::Vacant(place) => *place.insert(owner) == owner,
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
        let own = ids.into_iter().filter(|id| owners.get(*id) == Some(&owner));
        ended.extend(own.map(|id| (now + KEPT, Box::from(id), owner)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_one_flows_until_that_has_ended() {
        let (initials, at) = (Initials::default(), |port| SocketAddr::from(([10, 0, 0, 1], port)));
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
    fn ids_are_bounded() {
        let (initials, at) = (Initials::default(), SocketAddr::from(([10, 0, 0, 1], 1)));
        let ids: Vec<[u8; 4]> = (0..=MOST_IDS as u32).map(u32::to_be_bytes).collect();
        let (last, fit) = ids.split_last().unwrap();
        let now = Instant::ZERO;
        assert!(initials.claim(fit.iter().map(|id| &id[..]), (at, at), now));
        assert!(!initials.claim([&last[..]], (at, at), now));
        assert!(initials.claim([&fit[7][..]], (at, at), now), "a known one");
    }
}
