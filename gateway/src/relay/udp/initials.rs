//! Which flow has begun a QUIC connection, for the threads of all queues.
//!
//! A server knows a connection that begins by its destination ID, from whatever port its packets come. If two flows of a
//! guest could use one ID, the server might get half of each ClientHello, which together name another host.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

/// Most IDs. Further connections are refused.
const MOST_IDS: usize = 65_536;

/// The ends of a flow as the guest knows them.
pub(crate) type Owner = (SocketAddr, SocketAddr);

/// The IDs of the connections that flows have begun.
#[derive(Clone, Default)]
pub(crate) struct Initials(Arc<Mutex<HashMap<Box<[u8]>, Owner>>>);

impl Initials {
    /// Enters the IDs of a flow. False: another flow has one of them, or there are too many.
    pub(super) fn claim<'a>(&self, ids: impl IntoIterator<Item = &'a [u8]>, owner: Owner) -> bool {
        let Ok(mut owners) = self.0.lock() else { return false };
        ids.into_iter().all(|id| {
            let is_full = owners.len() >= MOST_IDS;
            match owners.entry(id.into()) {
                Entry::Occupied(other) => *other.get() == owner,
                Entry::Vacant(_) if is_full => false,
                Entry::Vacant(place) => *place.insert(owner) == owner,
            }
        })
    }

    /// A flow has ended.
    pub(super) fn release<'a>(&self, ids: impl IntoIterator<Item = &'a [u8]>, owner: Owner) {
        let Ok(mut owners) = self.0.lock() else { return };
        for id in ids {
            if owners.get(id) == Some(&owner) {
                owners.remove(id);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_one_flows_until_that_has_ended() {
        let (initials, at) = (Initials::default(), |port| SocketAddr::from(([10, 0, 0, 1], port)));
        let (one, other) = ((at(1), at(443)), (at(2), at(443)));
        assert!(initials.claim([&b"a"[..], b"b"], one));
        assert!(initials.claim([&b"a"[..], b"b", b"c"], one), "again");
        assert!(!initials.claim([&b"d"[..], b"b"], other));
        initials.release([&b"b"[..], b"d"], one);
        assert!(initials.claim([&b"b"[..]], other));
        initials.release([&b"a"[..], b"b", b"c"], one);
        assert!(!initials.claim([&b"b"[..]], one), "that of another flow stays");
    }

    #[test]
    fn ids_are_bounded() {
        let (initials, at) = (Initials::default(), SocketAddr::from(([10, 0, 0, 1], 1)));
        let ids: Vec<[u8; 4]> = (0..=MOST_IDS as u32).map(u32::to_be_bytes).collect();
        let (last, fit) = ids.split_last().unwrap();
        assert!(initials.claim(fit.iter().map(|id| &id[..]), (at, at)));
        assert!(!initials.claim([&last[..]], (at, at)));
        assert!(initials.claim([&fit[7][..]], (at, at)), "a known one");
    }
}
