//! Who wants to be told about a socket: blocked threads and poll sets. Kept with the socket under
//! the shard lock; the wake-ups themselves are collected and fired after the lock is released.

use std::sync::Arc;

use fulmar_base::SlotId;
use fulmar_socket::Ready;

use crate::poll_set::PollSetCore;
use crate::waiter::Waiter;

/// A wake-up to fire once the shard lock is released.
pub enum Wake {
    /// A blocked thread.
    Thread(Arc<Waiter>),
    /// A poll set that sleeps.
    Set(Arc<PollSetCore>),
}

impl Wake {
    /// Wakes whoever it is.
    pub fn fire(self) {
        match self {
            Wake::Thread(w) => w.wake(),
            Wake::Set(s) => s.signal(),
        }
    }
}

struct Membership {
    set: Arc<PollSetCore>,
    token: usize,
    interest: Ready,
}

/// The watchers of one socket. Empty (and without memory) for most.
#[derive(Default)]
pub struct Watch {
    threads: Vec<(Arc<Waiter>, Ready)>,
    sets: Vec<Membership>,
}

impl Watch {
    /// Whether nobody watches.
    pub fn is_empty(&self) -> bool {
        self.threads.is_empty() && self.sets.is_empty()
    }

    /// A thread is about to sleep until one of `interest`.
    pub fn add_thread(&mut self, w: &Arc<Waiter>, interest: Ready) {
        self.threads.push((Arc::clone(w), interest));
    }

    /// The thread no longer sleeps for this socket.
    pub fn remove_thread(&mut self, w: &Arc<Waiter>) {
        self.threads.retain(|(t, _)| !Arc::ptr_eq(t, w));
    }

    /// The socket joins a poll set (again: with another token or interest).
    pub fn join(&mut self, set: &Arc<PollSetCore>, token: usize, interest: Ready) {
        self.leave(set);
        self.sets.push(Membership { set: Arc::clone(set), token, interest });
    }

    /// The socket leaves a poll set; false if it was not in it.
    pub fn leave(&mut self, set: &Arc<PollSetCore>) -> bool {
        let before = self.sets.len();
        self.sets.retain(|m| !Arc::ptr_eq(&m.set, set));
        before != self.sets.len()
    }

    /// The token and interest under which the socket is in the set.
    pub fn membership(&self, set: &Arc<PollSetCore>) -> Option<(usize, Ready)> {
        let m = self.sets.iter().find(|m| Arc::ptr_eq(&m.set, set))?;
        Some((m.token, m.interest))
    }

    /// The socket became `ready`: collects the wake-ups of those who care.
    pub fn notify(&mut self, socket: SlotId, ready: Ready, wakes: &mut Vec<Wake>) {
        for (thread, interest) in &self.threads {
            if !ready.seen_by(*interest).is_empty() {
                wakes.push(Wake::Thread(Arc::clone(thread)));
            }
        }
        for m in &self.sets {
            if !ready.seen_by(m.interest).is_empty() && m.set.mark(socket) {
                wakes.push(Wake::Set(Arc::clone(&m.set)));
            }
        }
    }
}
