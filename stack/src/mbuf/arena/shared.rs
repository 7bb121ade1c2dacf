//! Mbufs over shared bytes ([`SharedBytes`](crate::mbuf::SharedBytes)).

#![forbid(unsafe_code)]

use super::raw::Owner;
use crate::mbuf::Mbuf;

impl Mbuf {
    /// Notifies the owner of shared bytes that this range was not delivered.
    pub(crate) fn note_undelivered(&self, why: u8) {
        let Some(record) = self.record() else { return };
        if let Owner::Shared(owner) = &record.owner {
            owner.on_undelivered(why);
        }
    }
}
