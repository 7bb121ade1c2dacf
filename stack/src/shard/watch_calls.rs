//! Watching sockets: readiness is reported as data.

use alloc::vec::Vec;

use crate::base::{Counter, DropReason, SlotId};
use crate::socket::Ready;

use crate::shard::outcome::Event;
use crate::shard::world::Shard;

impl Shard {
    /// Sets the readiness that is reported for a socket; `None`: none. False if there is no such socket.
    pub fn watch(&mut self, id: SlotId, interest: Option<Ready>) -> bool {
        let Some(s) = self.core.sockets.get_mut(id) else { return false };
        s.watch().interest = interest;
        true
    }

    /// Reports the present readiness of a socket, if it is watched.
    pub fn notify(&mut self, id: SlotId) {
        self.core.events.notify(&mut self.core.sockets, id);
    }

    /// Whether the last step or call has produced events, completions or hand-offs to be taken.
    #[inline]
    pub fn has_outcome(&self) -> bool {
        !self.core.events.is_empty()
            || self.tcp.posted.has_completions()
            || self.core.siblings.has_outgoing()
    }

    /// Moves the readiness events to `into`, which is empty.
    pub fn take_events(&mut self, into: &mut Vec<Event>) {
        self.core.events.take(&mut self.core.sockets, into);
    }

    /// Adds to a counter on behalf of the runtime.
    pub fn count(&mut self, c: Counter, n: u64) {
        self.core.net.counters.add(c, n);
    }

    /// Counts a packet that the program has received and drops.
    pub fn count_drop(&mut self, reason: DropReason) {
        self.core.net.counters.drop_packet(reason);
    }
}
