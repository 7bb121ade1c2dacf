//! The waiters of each socket: blocked threads and poll sets. Kept under the shard lock; wake-ups are collected and
//! delivered after the lock is released.

use std::sync::Arc;
use std::task::Waker;

use fulmar_stack::base::{SlotId, SocketHandle};
use fulmar_stack::socket::Ready;

use crate::runtime::contain::contain;
use crate::runtime::poll_set::PollSetCore;
use crate::runtime::waiter::Waiter;

/// The wake-ups that a call collects; rarely many, so that they need no heap.
pub(super) type Wakes = smallvec::SmallVec<[Wake; 8]>;

/// The tasks that a call wakes. Their code runs when the thread is outside of the stack again.
#[derive(Default)]
pub(crate) struct Tasks {
    woken: smallvec::SmallVec<[Waker; 8]>,
    /// Wakers that others have replaced: dropping one may drop its task.
    replaced: smallvec::SmallVec<[Waker; 1]>,
}

impl Tasks {
    pub(super) fn is_empty(&self) -> bool {
        self.woken.is_empty() && self.replaced.is_empty()
    }

    /// A waker that another one has replaced.
    pub(super) fn replace(&mut self, before: Option<Waker>) {
        self.replaced.extend(before);
    }

    /// Adds the tasks of another call.
    pub(crate) fn append(&mut self, other: &mut Tasks) {
        self.woken.append(&mut other.woken);
        self.replaced.append(&mut other.replaced);
    }

    /// Wakes them. A waker that panics keeps no other from being woken.
    pub(crate) fn wake(self) {
        let Tasks { woken, replaced } = self;
        woken.into_iter().for_each(|waker| _ = contain(|| waker.wake()));
        replaced.into_iter().for_each(|waker| _ = contain(|| drop(waker)));
    }
}

/// The side of a socket for which a task waits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Side {
    /// Bytes, datagrams, connections.
    Read = 0,
    /// Space; the end of a handshake.
    Write = 1,
}

impl Side {
    /// What wakes its task.
    fn interest(self) -> Ready {
        match self {
            Side::Read => Ready::READER,
            Side::Write => Ready::WRITABLE,
        }
    }
}

/// A wake-up to fire once the shard lock is released.
pub enum Wake {
    /// A blocked thread.
    Thread(Arc<Waiter>),
    /// A poll set that sleeps.
    Set(Arc<PollSetCore>),
}

impl Wake {
    /// Delivers it.
    pub fn fire(self) {
        match self {
            Wake::Thread(w) => w.wake(),
            Wake::Set(s) => s.signal(),
        }
    }
}

struct Membership {
    set: Arc<PollSetCore>,
    /// The shard of the socket: members of a set may belong to several.
    shard: u16,
    token: usize,
    interest: Ready,
    /// The socket is listed as a candidate.
    is_listed: bool,
}

impl Membership {
    /// Lists the socket. True: the set is to be signalled.
    fn list(&mut self, slot: SlotId) -> bool {
        let was_listed = std::mem::replace(&mut self.is_listed, true);
        !was_listed && self.set.mark(SocketHandle { shard: self.shard, slot })
    }

    fn forget(&self, slot: SlotId) {
        if self.is_listed {
            self.set.forget(SocketHandle { shard: self.shard, slot });
        }
    }
}

/// The watchers of all sockets of a shard, by slot.
#[derive(Default)]
pub(crate) struct Watchers(Vec<Watch>);

impl Watchers {
    /// The watchers of a socket, if it ever had any.
    pub(super) fn find(&mut self, id: SlotId) -> Option<&mut Watch> {
        self.0.get_mut(id.index as usize).filter(|w| w.generation == id.generation)
    }

    /// Wakes all tasks.
    pub(super) fn take_all_tasks(&mut self, tasks: &mut Tasks) {
        self.0.iter_mut().for_each(|watch| _ = watch.take_tasks(Ready::CLOSED, tasks));
    }

    /// The watchers of a socket that exists. Tasks of an earlier socket of the slot move to `tasks`.
    pub(super) fn of(&mut self, id: SlotId, tasks: &mut Tasks) -> &mut Watch {
        let at = id.index as usize;
        if self.0.len() <= at {
            self.0.resize_with(at + 1, Watch::default);
        }
        let watch = &mut self.0[at];
        if watch.generation != id.generation {
            // Of a socket that is gone.
            watch.leave_all(SlotId { index: id.index, generation: watch.generation });
            watch.threads.clear();
            watch.take_tasks(Ready::CLOSED, tasks);
            watch.generation = id.generation;
        }
        watch
    }
}

/// The watchers of one socket. Empty (and without memory) for most.
#[derive(Default)]
pub(super) struct Watch {
    generation: u32,
    threads: Vec<(Arc<Waiter>, Ready)>,
    sets: Vec<Membership>,
    /// The task that waits for each side.
    tasks: [Option<Waker>; 2],
}

const SIDES: [Side; 2] = [Side::Read, Side::Write];

impl Watch {
    /// The union of their interests; `None`: no waiters.
    pub(super) fn interest(&self) -> Option<Ready> {
        let threads = self.threads.iter().map(|(_, interest)| *interest);
        let sets = self.sets.iter().map(|m| m.interest);
        let tasks = SIDES.into_iter().filter(|side| self.tasks[*side as usize].is_some());
        threads.chain(sets).chain(tasks.map(Side::interest)).reduce(|all, one| all | one)
    }

    /// A task waits for a side. Returns the waker of the task that waited for it before.
    pub(super) fn set_task(&mut self, side: Side, waker: &Waker) -> Option<Waker> {
        let task = &mut self.tasks[side as usize];
        match task {
            Some(known) if known.will_wake(waker) => None,
            _ => task.replace(waker.clone()),
        }
    }

    /// The tasks of a socket that is ready no longer wait. True: there were any.
    pub(super) fn take_tasks(&mut self, ready: Ready, tasks: &mut Tasks) -> bool {
        let before = tasks.woken.len();
        for side in SIDES {
            if !ready.seen_by(side.interest()).is_empty() {
                tasks.woken.extend(self.tasks[side as usize].take());
            }
        }
        tasks.woken.len() > before
    }

    /// A thread is about to sleep until one of `interest`.
    pub(crate) fn add_thread(&mut self, w: &Arc<Waiter>, interest: Ready) {
        self.threads.push((Arc::clone(w), interest));
    }

    /// The thread no longer sleeps for this socket.
    pub(crate) fn remove_thread(&mut self, w: &Arc<Waiter>) {
        self.threads.retain(|(t, _)| !Arc::ptr_eq(t, w));
    }

    fn member(&mut self, set: &Arc<PollSetCore>) -> Option<&mut Membership> {
        self.sets.iter_mut().find(|m| Arc::ptr_eq(&m.set, set))
    }

    /// The socket, one of `shard`, joins a poll set, or changes its token and interest.
    pub(super) fn join(
        &mut self,
        shard: u16,
        set: &Arc<PollSetCore>,
        token: usize,
        interest: Ready,
    ) {
        match self.member(set) {
            Some(m) => (m.token, m.interest) = (token, interest),
            None => {
                let set = Arc::clone(set);
                self.sets.push(Membership { set, shard, token, interest, is_listed: false });
            }
        }
    }

    /// Whether the socket is in a poll set.
    pub(super) fn is_in(&self, set: &Arc<PollSetCore>) -> bool {
        self.sets.iter().any(|m| Arc::ptr_eq(&m.set, set))
    }

    /// The socket leaves a poll set; false if it was not in it.
    pub(super) fn leave(&mut self, socket: SlotId, set: &Arc<PollSetCore>) -> bool {
        let before = self.sets.len();
        self.sets.retain(|m| {
            let stays = !Arc::ptr_eq(&m.set, set);
            if !stays {
                m.forget(socket);
            }
            stays
        });
        before != self.sets.len()
    }

    /// The socket leaves every poll set: it was closed.
    pub(crate) fn leave_all(&mut self, socket: SlotId) {
        self.sets.drain(..).for_each(|m| m.forget(socket));
    }

    /// The socket was taken from the list: returns its token and interest.
    pub(super) fn unlisted(&mut self, set: &Arc<PollSetCore>) -> Option<(usize, Ready)> {
        let m = self.member(set)?;
        m.is_listed = false;
        Some((m.token, m.interest))
    }

    /// The socket is still ready: lists it again.
    pub(crate) fn relist(&mut self, socket: SlotId, set: &Arc<PollSetCore>) {
        if let Some(m) = self.member(set)
            && m.list(socket)
        {
            m.set.signal();
        }
    }

    /// The socket became `ready`: collects the wake-ups of interested waiters.
    pub(super) fn notify(&mut self, socket: SlotId, ready: Ready, wakes: &mut Wakes) {
        for (thread, interest) in &self.threads {
            if !ready.seen_by(*interest).is_empty() {
                wakes.push(Wake::Thread(Arc::clone(thread)));
            }
        }
        for m in &mut self.sets {
            if !ready.seen_by(m.interest).is_empty() && m.list(socket) {
                wakes.push(Wake::Set(Arc::clone(&m.set)));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(index: u32) -> SlotId {
        SlotId { index, generation: 0 }
    }

    #[test]
    fn a_socket_is_listed_once_however_often_it_becomes_ready() {
        let set = Arc::new(PollSetCore::new().unwrap());
        let (mut watch, mut wakes) = (Watch::default(), Wakes::new());
        watch.join(0, &set, 5, Ready::READABLE);
        for _ in 0..10 {
            watch.notify(id(1), Ready::READABLE, &mut wakes);
            watch.join(0, &set, 6, Ready::READABLE);
        }
        assert_eq!(wakes.len(), 1);
        assert_eq!(set.drain(0, 9), [id(1)]);
        assert_eq!(watch.unlisted(&set), Some((6, Ready::READABLE)));
        watch.notify(id(1), Ready::READABLE, &mut wakes);
        assert_eq!(set.drain(0, 9), [id(1)]);
    }

    #[test]
    fn a_removed_socket_is_no_longer_a_candidate() {
        let set = Arc::new(PollSetCore::new().unwrap());
        let (mut a, mut b, mut wakes) = (Watch::default(), Watch::default(), Wakes::new());
        for (w, n) in [(&mut a, 1), (&mut b, 2)] {
            w.join(0, &set, n as usize, Ready::READABLE);
            w.notify(id(n), Ready::READABLE, &mut wakes);
        }
        assert!(a.leave(id(1), &set));
        assert!(!a.leave(id(1), &set));
        b.leave_all(id(2));
        assert!(set.drain(0, 9).is_empty());
        assert_eq!((a.interest(), b.interest()), (None, None));
    }

    #[test]
    fn waiters_of_a_closed_socket_do_not_wait_for_its_successor() {
        let set = Arc::new(PollSetCore::new().unwrap());
        let (mut watchers, mut wakes) = (Watchers::default(), Wakes::new());
        let (gone, next) = (id(3), SlotId { index: 3, generation: 1 });
        watchers.of(gone, &mut Tasks::default()).join(0, &set, 5, Ready::READABLE);
        watchers.of(gone, &mut Tasks::default()).notify(gone, Ready::READABLE, &mut wakes);
        assert!(watchers.find(next).is_none());
        assert_eq!(watchers.of(next, &mut Tasks::default()).interest(), None);
        assert!(watchers.find(gone).is_none());
        assert!(!set.has_candidates());
    }

    #[test]
    fn errors_wake_waiters_of_any_interest() {
        let (mut watch, mut wakes) = (Watch::default(), Wakes::new());
        let w = Waiter::current();
        watch.add_thread(&w, Ready::WRITABLE);
        watch.notify(id(1), Ready::READABLE, &mut wakes);
        assert!(wakes.is_empty());
        watch.notify(id(1), Ready::ERROR, &mut wakes);
        assert_eq!(wakes.len(), 1);
        watch.remove_thread(&w);
        assert_eq!(watch.interest(), None);
    }
}
