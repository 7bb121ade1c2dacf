//! A shard and its waiters: the state under the lock of a host.
//!
//! ```text
//!   step or call ─► Event, PostCompletion, Outgoing ─► dispatch ─► wake-ups, tickets, rings of other shards
//! ```
//!
//! Every method dispatches the outcome of a step or call under the lock. Wake-ups are delivered after the
//! release.

mod turn;

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::task::Waker;

use fulmar_stack::base::{Counter, Instant, SlotId};
use fulmar_stack::device::Peek;
use fulmar_stack::mbuf::RecvBuf;
use fulmar_stack::socket::posted::CompletionPolicy;
use fulmar_stack::socket::{Ready, SocketError};

use crate::runtime::handoff::Handoff;
use crate::runtime::poll_set::PollSetCore;
use crate::runtime::ticket::{Post, Received, RecvTicket, Tickets};
use crate::runtime::waiter::Waiter;
use crate::runtime::watch::{Side, Tasks, Wakes, Watchers};
use fulmar_stack::shard::{Event, RecvOutcome, Shard, ShardParts};

/// A shard and the waiters of its sockets; it dereferences to the shard.
pub struct WatchedShard {
    shard: Shard,
    watchers: Watchers,
    tickets: Tickets,
    /// The rings to and from the sibling shards, if there are any.
    handoff: Option<Box<Handoff>>,
    /// The thread whose event loop is in a turn: see `turn.rs`.
    turn_of: Option<NonZeroUsize>,
    wakes: Wakes,
    tasks: Tasks,
    received: Received,
    /// Wake-ups may be pending.
    has_kicks: bool,
    /// The device is lost, and waiting threads are not woken yet.
    is_loss_untold: bool,
    /// Empty, kept for its allocation.
    events: Vec<Event>,
}

impl std::ops::Deref for WatchedShard {
    type Target = Shard;
    #[inline(always)]
    fn deref(&self) -> &Shard {
        &self.shard
    }
}

impl std::ops::DerefMut for WatchedShard {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut Shard {
        &mut self.shard
    }
}

/// The parts of a shard in which a thread panicked.
pub(crate) struct AbandonedShard {
    pub remains: ShardParts,
    /// Tickets of posted buffers, to be completed after the sockets are dropped.
    pub tickets: Tickets,
    pub handoff: Option<Box<Handoff>>,
    /// All that wait.
    pub tasks: Tasks,
}

impl WatchedShard {
    /// A shard without waiters.
    pub fn new(shard: Shard) -> Self {
        WatchedShard {
            shard,
            watchers: Watchers::default(),
            tickets: Tickets::default(),
            handoff: None,
            turn_of: None,
            wakes: Wakes::new(),
            tasks: Tasks::default(),
            received: Received::default(),
            has_kicks: false,
            is_loss_untold: false,
            events: Vec::new(),
        }
    }

    /// Joins the shard to its siblings. Once, before it is used.
    pub fn join(&mut self, handoff: Handoff) {
        self.shard.siblings().join(handoff.ports());
        self.handoff = Some(Box::new(handoff));
    }

    /// See [`Shard::step`].
    pub fn step(&mut self, now: Instant, budget: usize) -> usize {
        self.end_turn(now);
        self.take_hand_offs();
        let came = self.shard.step(now, budget);
        self.dispatch();
        came
    }

    /// See [`Shard::step_for_reader`].
    pub fn step_for_reader(&mut self, now: Instant) -> usize {
        self.end_turn(now);
        self.take_hand_offs();
        let came = self.shard.step_for_reader(now);
        self.dispatch();
        came
    }

    /// See [`Shard::step_for_post`].
    pub fn step_for_ticket(
        &mut self,
        now: Instant,
        ticket: &RecvTicket,
    ) -> (usize, Option<RecvOutcome>) {
        self.end_turn(now);
        self.take_hand_offs();
        let (came, outcome) = self.shard.step_for_post(now, ticket.token());
        (came, self.complete_directly(ticket, outcome))
    }

    /// Completes a ticket whose waiter is the caller: the outcome is its return value.
    fn complete_directly(
        &mut self,
        ticket: &RecvTicket,
        outcome: Option<RecvOutcome>,
    ) -> Option<RecvOutcome> {
        if outcome.is_some() {
            drop(self.tickets.remove(ticket.token()));
            ticket.complete_directly();
        }
        self.dispatch();
        outcome
    }

    /// Takes the packets that siblings have handed off.
    #[inline]
    fn take_hand_offs(&mut self) {
        if self.handoff.is_some() {
            self.take_from_ring();
        }
    }

    #[inline(never)]
    fn take_from_ring(&mut self) {
        if let Some(handoff) = &mut self.handoff {
            handoff.deliver_to(&mut self.shard);
        }
    }

    /// Turns the outcome of the shard's work into wake-ups, completed tickets, and entries in siblings' rings.
    #[inline]
    pub fn dispatch(&mut self) {
        if self.shard.has_outcome() {
            self.dispatch_all();
        }
    }

    #[inline(never)]
    fn dispatch_all(&mut self) {
        self.has_kicks = true;
        let mut events = std::mem::take(&mut self.events);
        self.shard.take_events(&mut events);
        for event in events.drain(..) {
            match event {
                Event::Ready(id, ready) => {
                    if let Some(watch) = self.watchers.find(id) {
                        watch.notify(id, ready, &mut self.wakes);
                        if watch.take_tasks(ready, &mut self.tasks) {
                            self.shard.watch(id, watch.interest());
                        }
                    }
                }
                Event::Closed(id) => {
                    if let Some(watch) = self.watchers.find(id) {
                        // A waiter tries once more and gets the error that the socket is closed.
                        watch.notify(id, Ready::CLOSED, &mut self.wakes);
                        watch.take_tasks(Ready::CLOSED, &mut self.tasks);
                        watch.leave_all(id);
                        self.shard.watch(id, watch.interest());
                    }
                }
                Event::Down => {
                    self.is_loss_untold = true;
                    self.watchers.take_all_tasks(&mut self.tasks);
                }
            }
        }
        self.events = events;
        while let Some(over) = self.shard.posted().pop_completion() {
            if let Some(ticket) = self.tickets.end(over) {
                self.received.push(ticket);
            }
        }
        // A shard without siblings hands nothing off.
        if let Some(handoff) = &mut self.handoff {
            handoff.collect_from(&mut self.shard);
        }
    }

    /// Whether wake-ups, completions or kicks are pending, to be delivered after the release.
    #[inline(always)]
    pub(crate) fn has_pending_kicks(&mut self) -> bool {
        self.has_kicks || self.shard.has_outcome() || self.shard.pool().has_returned()
    }

    /// The pending wake-ups, to be delivered after the release.
    pub fn take_wakes(&mut self) -> Wakes {
        self.dispatch();
        self.has_kicks = false;
        self.shard.count(Counter::Wakeups, self.wakes.len() as u64);
        std::mem::take(&mut self.wakes)
    }

    /// Moves the tasks to wake, when the thread is outside of the stack, to `into`.
    pub(crate) fn move_tasks(&mut self, into: &mut Tasks) {
        if !self.tasks.is_empty() {
            into.append(&mut self.tasks);
        }
    }

    /// Whether the device was lost since the last call: every thread that waits is to be woken, whatever for.
    pub(crate) fn take_loss(&mut self) -> bool {
        std::mem::take(&mut self.is_loss_untold)
    }

    /// The completed tickets, to be dropped after the release.
    pub fn take_received(&mut self) -> Received {
        self.dispatch();
        std::mem::take(&mut self.received)
    }

    /// The shards to which something was handed off since the last call, one bit each.
    pub(crate) fn take_kicks(&mut self) -> u32 {
        self.handoff.as_mut().map_or(0, |h| h.take_kicks())
    }

    /// Whether another shard has handed something off.
    pub(crate) fn has_hand_offs(&self) -> bool {
        self.handoff.as_ref().is_some_and(|h| !h.is_empty())
    }

    /// Peeks for work without the lock: frames of the device, and packets that siblings have handed off.
    pub(crate) fn peek(&self) -> Option<Arc<dyn Peek>> {
        let device = self.shard.peek()?;
        Some(match &self.handoff {
            Some(handoff) => handoff.peek_with_ring(device),
            None => device,
        })
    }

    /// Takes everything that holds a descriptor or foreign memory out of a shard whose state is unknown.
    pub(crate) fn abandon(&mut self) -> AbandonedShard {
        AbandonedShard {
            remains: self.shard.abandon(),
            tickets: std::mem::take(&mut self.tickets),
            handoff: self.handoff.take(),
            tasks: {
                self.watchers.take_all_tasks(&mut self.tasks);
                std::mem::take(&mut self.tasks)
            },
        }
    }
}

/// Threads and poll sets.
impl WatchedShard {
    /// A thread is about to sleep until the socket is ready.
    pub(crate) fn watch_thread(&mut self, id: SlotId, w: &Arc<Waiter>, interest: Ready) {
        if self.shard.ready(id).is_ok() {
            self.watchers.of(id, &mut self.tasks).add_thread(w, interest);
            self.update_interest(id);
        }
    }

    /// The thread has woken.
    pub(crate) fn unwatch_thread(&mut self, id: SlotId, w: &Arc<Waiter>) {
        if let Some(watch) = self.watchers.find(id) {
            watch.remove_thread(w);
            self.update_interest(id);
        }
    }

    /// A task waits until a side of the socket is ready, instead of the task that waited for it.
    #[inline]
    pub(crate) fn watch_task(&mut self, id: SlotId, side: Side, waker: &Waker) {
        if self.shard.ready(id).is_err() {
            return;
        }
        let replaced = self.watchers.of(id, &mut self.tasks).set_task(side, waker);
        self.tasks.replace(replaced);
        self.has_kicks |= !self.tasks.is_empty();
        self.update_interest(id);
    }

    fn update_interest(&mut self, id: SlotId) {
        let interest = self.watchers.find(id).and_then(|w| w.interest());
        self.shard.watch(id, interest);
    }

    /// Adds a socket to a poll set, or changes its token and interest. What it is ready for
    /// already is reported by the next wait.
    ///
    /// # Errors
    /// [`SocketError::BadHandle`].
    pub fn join_set(
        &mut self,
        id: SlotId,
        set: &Arc<PollSetCore>,
        token: usize,
        interest: Ready,
    ) -> Result<(), SocketError> {
        self.shard.ready(id)?;
        let shard = self.shard.siblings().id();
        self.watchers.of(id, &mut self.tasks).join(shard, set, token, interest);
        self.update_interest(id);
        self.shard.notify(id);
        self.dispatch();
        Ok(())
    }

    /// Changes token and interest of a socket that is in a poll set.
    ///
    /// # Errors
    /// [`SocketError::Invalid`]: it is not in it.
    pub(crate) fn rejoin_set(
        &mut self,
        id: SlotId,
        set: &Arc<PollSetCore>,
        token: usize,
        interest: Ready,
    ) -> Result<(), SocketError> {
        if !self.watchers.find(id).is_some_and(|w| w.is_in(set)) {
            return Err(SocketError::Invalid);
        }
        self.join_set(id, set, token, interest)
    }

    /// Takes a socket out of a poll set.
    ///
    /// # Errors
    /// [`SocketError::Invalid`]: it was not in it.
    pub(crate) fn leave_set(
        &mut self,
        id: SlotId,
        set: &Arc<PollSetCore>,
    ) -> Result<(), SocketError> {
        self.shard.ready(id)?;
        self.dispatch();
        let left = self.watchers.find(id).is_some_and(|w| w.leave(id, set));
        self.update_interest(id);
        if left { Ok(()) } else { Err(SocketError::Invalid) }
    }

    /// Passes the ready members of a poll set that are sockets of this shard to `ready`, by token and readiness,
    /// `limit` at most; returns how many. Level-triggered: a ready member is reported again by the next call, unless
    /// its interest has [`Ready::EDGE`].
    pub fn collect_set(
        &mut self,
        set: &Arc<PollSetCore>,
        limit: usize,
        mut ready: impl FnMut(usize, Ready),
    ) -> usize {
        self.dispatch();
        let (mut reported, mut still_listed) = (0, Vec::new());
        while reported < limit {
            let candidates = set.drain(self.shard.siblings().id(), limit - reported);
            if candidates.is_empty() {
                break;
            }
            for id in candidates {
                let Some(watch) = self.watchers.find(id) else { continue };
                let Some((token, interest)) = watch.unlisted(set) else { continue };
                let Ok(ready_for) = self.shard.ready(id) else { continue };
                let seen = ready_for.seen_by(interest);
                if seen.is_empty() {
                    continue;
                }
                ready(token, seen);
                reported += 1;
                // Edge-triggered: listed again by the next change.
                if !interest.contains(Ready::EDGE) {
                    still_listed.push(id);
                }
            }
        }
        // After the members beyond the limit, so that every one is reported in turn.
        for id in still_listed {
            if let Some(watch) = self.watchers.find(id) {
                watch.relist(id, set);
            }
        }
        reported
    }
}

/// Posted buffers.
impl WatchedShard {
    /// See [`PostedBuffers::post`](fulmar_stack::shard::PostedBuffers::post).
    ///
    /// # Errors
    /// As there.
    pub fn tcp_post(
        &mut self,
        now: Instant,
        id: SlotId,
        buf: RecvBuf,
        rule: CompletionPolicy,
        ticket: &Arc<RecvTicket>,
    ) -> Result<(), (SocketError, RecvBuf)> {
        self.post_or_return(now, Post { id, buf, rule, ticket })
    }

    fn post_or_return(
        &mut self,
        now: Instant,
        Post { id, buf, rule, ticket }: Post<'_>,
    ) -> Result<(), (SocketError, RecvBuf)> {
        let token = self.tickets.add(ticket);
        let posted =
            self.shard.posted().post(now, fulmar_stack::shard::Post { id, buf, rule, token });
        if posted.is_err() {
            drop(self.tickets.remove(token));
        }
        self.dispatch();
        posted
    }

    /// As [`WatchedShard::tcp_post`]; a buffer that cannot be posted stays in `post`.
    pub(crate) fn post_if_possible(&mut self, now: Instant, post: &mut Option<Post<'_>>) {
        let Some(Post { id, buf, rule, ticket }) = post.take() else { return };
        if let Err((_, buf)) = self.post_or_return(now, Post { id, buf, rule, ticket }) {
            *post = Some(Post { id, buf, rule, ticket });
        }
    }

    /// See [`PostedBuffers::cancel`](fulmar_stack::shard::PostedBuffers::cancel).
    pub fn tcp_cancel_post(&mut self, now: Instant, id: SlotId, ticket: &Arc<RecvTicket>) {
        let token = ticket.token();
        if self.tickets.get(token).is_some_and(|t| Arc::ptr_eq(t, ticket)) {
            self.shard.posted().cancel(now, id, token);
            self.dispatch();
        }
    }

    /// See [`PostedBuffers::revoke`](fulmar_stack::shard::PostedBuffers::revoke). False: the buffer stays posted, and its
    /// ticket will get the outcome.
    pub fn tcp_abandon_post(&mut self, now: Instant, id: SlotId, ticket: &Arc<RecvTicket>) -> bool {
        let token = ticket.token();
        let is_gone = self.shard.posted().revoke(now, id, token);
        if is_gone {
            drop(self.tickets.remove(token));
        }
        self.dispatch();
        is_gone
    }

    /// As [`WatchedShard::tcp_abandon_post`] for the tickets of a connection that signal handlers have dropped, the
    /// last first.
    pub(crate) fn tcp_abandon_unwanted(&mut self, now: Instant, id: SlotId) {
        let posted = self.shard.posted().tokens(id).filter_map(|token| self.tickets.get(token));
        let unwanted: Vec<_> = posted.filter(|t| t.take_unwanted()).map(Arc::clone).collect();
        for ticket in unwanted.iter().rev() {
            self.tcp_abandon_post(now, id, ticket);
        }
    }
}
