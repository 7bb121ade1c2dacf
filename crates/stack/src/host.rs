//! Who runs the shard: the caller, and nobody else while a caller does.
//!
//! ```text
//!   caller ──lock──► step of a socket ──done──► return
//!                        │ would wait
//!                        ▼
//!               poll the device itself ──progress──► the step again
//!                        │ nothing
//!                        ▼
//!          ┌─ the poll baton is free: take it; arm, poll once more, sleep on the device
//!          └─ somebody has it: sleep on the own waiter; the holder's poll wakes us
//! ```
//!
//! One baton per shard: its holder polls for all. A leaving holder wakes another waiter, who takes
//! it, or leaves it free, and the service thread finds it free at its next tick. The order is always
//! arm, poll once more, sleep. A thread that finds the lock taken and needs no answer leaves its
//! request in the inbox, which the holder drains before and after it releases.

mod guard;

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError, Weak};

use fulmar_base::{Counter, Duration, Instant, NoProbe, Outside, Probe, SlotId, Stage};
use fulmar_netdev::moderation::{ModerationConfig, Next};
use fulmar_socket::{Ready, SocketError, Step};

use crate::baton::{Baton, Role};
use crate::completion::Completion;
use crate::handoff::before_looking;
use crate::inbox::{INBOX_LIMIT, Inbox, Request, after_release};
pub use crate::limit::Limit;
use crate::poll_set::PollSetCore;
use crate::recv_calls::RecvTicket;
use crate::reentry::{HostBit, Mark, this_thread};
use crate::service::Service;
use crate::shard::Shard;
use crate::spin::Spin;
use crate::sys;
use crate::waiter::Waiter;
pub use guard::Guard;

/// Frames that one poll takes before waiters are looked at.
pub(crate) const POLL_BUDGET: usize = 128;

/// A shard with everything that threads need around it.
pub struct Host<P: Probe = NoProbe> {
    shard: Mutex<Shard<P>>,
    /// What its threads are doing in it, for the detection of re-entry.
    bit: HostBit,
    inbox: Inbox,
    /// The device's descriptor, if it has one.
    pub(crate) device_fd: Option<i32>,
    pub(crate) baton: Baton,
    /// Counts the calls of callers, so that the service thread sees whether they run the stack.
    pub(crate) activity: AtomicU64,
    /// Poll sets that exist: their owners sleep where nobody polls.
    pub(crate) poll_sets: AtomicUsize,
    pub(crate) service: Service,
    forks: u32,
    spin: Spin,
    /// Looks at the stages that are passed without the lock.
    outside: P::Outside,
    /// The thread that made the last call. Written under the lock, where there are several shards.
    last_caller: AtomicUsize,
    /// The hosts of all shards of the stack, in their order, if there are several.
    all: OnceLock<Vec<Weak<Host<P>>>>,
}

impl<P: Probe> Host<P> {
    /// Puts a shard under a lock.
    ///
    /// # Errors
    /// The errno of `eventfd` or `timerfd_create`.
    pub fn new(mut shard: Shard<P>) -> std::io::Result<Self> {
        sys::watch_forks();
        Ok(Host {
            device_fd: shard.device().wake_fd(),
            spin: Spin::new(shard.peek()),
            outside: shard.probe().outside(),
            shard: Mutex::new(shard),
            bit: HostBit::next(),
            inbox: Inbox::default(),
            baton: Baton::new()?,
            activity: AtomicU64::new(0),
            poll_sets: AtomicUsize::new(0),
            service: Service::default(),
            forks: sys::fork_generation(),
            last_caller: AtomicUsize::new(0),
            all: OnceLock::new(),
        })
    }

    /// Tells the host who else runs shards of its stack: all of them, in their order.
    pub(crate) fn stands_beside(&self, all: Vec<Weak<Host<P>>>) {
        let _ = self.all.set(all);
    }

    /// Whether the stack has other shards.
    #[inline]
    pub(crate) fn has_shards_beside(&self) -> bool {
        self.all.get().is_some()
    }

    /// Something lies in the rings of other shards, a bit each: wakes those who sleep. Who is awake will
    /// look before it sleeps.
    fn tell(&self, mut shards: u32) {
        if shards == 0 {
            return;
        }
        before_looking();
        while shards != 0 {
            let host = self.all.get().and_then(|all| all.get(shards.trailing_zeros() as usize));
            if let Some(host) = host.and_then(Weak::upgrade)
                && let Some((kick, _)) = host.baton.sleeper()
            {
                sys::signal_event(kick);
            }
            shards &= shards - 1;
        }
    }

    /// Whether this process made the stack. In a forked child its memory does not exist.
    #[inline]
    pub fn is_ours(&self) -> bool {
        sys::fork_generation() == self.forks
    }

    /// What looks at the stages that are passed without the lock.
    #[inline]
    pub fn outside(&self) -> &P::Outside {
        &self.outside
    }

    /// Changes how threads wait for the device, from their next poll on.
    ///
    /// # Errors
    /// As [`Host::lock`].
    pub fn set_moderation(&self, config: ModerationConfig) -> Result<(), SocketError> {
        self.call(|shard, _| {
            shard.set_moderation(config);
            Ok(())
        })
    }

    /// Takes the lock.
    ///
    /// # Errors
    /// [`SocketError::WouldBlock`] if this very thread is inside the host (a signal handler
    /// interrupted a call); [`SocketError::BadHandle`] in a forked child.
    #[inline]
    pub fn lock(&self) -> Result<Guard<'_, P>, SocketError> {
        let mut guard = self.lock_quietly()?;
        // Only the holder of the lock writes it, so that no locked instruction is needed.
        let calls = self.activity.load(Ordering::Relaxed);
        self.activity.store(calls.wrapping_add(1), Ordering::Relaxed);
        self.note_caller(&mut guard);
        Ok(guard)
    }

    /// Counts a lock that was another thread's before, where there are shards to keep apart.
    #[inline]
    fn note_caller(&self, shard: &mut Shard<P>) {
        if !self.has_shards_beside() {
            return;
        }
        let (before, now) = (self.last_caller.load(Ordering::Relaxed), this_thread());
        if before != now {
            shard.count(Counter::SharedLocks, u64::from(before != 0));
            self.last_caller.store(now, Ordering::Relaxed);
        }
    }

    /// As [`Host::lock`], for the service thread, which is not a caller.
    // In place: a guard that is handed over is copied.
    #[inline]
    pub(crate) fn lock_quietly(&self) -> Result<Guard<'_, P>, SocketError> {
        if !self.is_ours() {
            return Err(SocketError::BadHandle);
        }
        let mark = self.bit.enter().ok_or(SocketError::WouldBlock)?;
        self.outside.enter();
        let shard = self.shard.lock().unwrap_or_else(PoisonError::into_inner);
        let mut guard = Guard::new(self, Some(shard), mark);
        // What this thread left in the inbox before comes before what it does now: a write that it
        // has ended must not look as if it were still going on.
        self.drain_inbox(&mut guard);
        Ok(guard)
    }

    fn try_shard(&self) -> Option<MutexGuard<'_, Shard<P>>> {
        match self.shard.try_lock() {
            Ok(shard) => Some(shard),
            Err(TryLockError::Poisoned(p)) => Some(p.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Runs one step of a socket that cannot wait.
    ///
    /// # Errors
    /// As [`Host::lock`], and the step's own.
    pub fn call<R>(
        &self,
        f: impl FnOnce(&mut Shard<P>, Instant) -> Result<R, SocketError>,
    ) -> Result<R, SocketError> {
        let mut guard = self.lock()?;
        let now = sys::now();
        guard.pass(Stage::Locked);
        f(&mut guard, now)
    }

    /// Does a request now if the lock is free, else leaves it for the holder. Never waits long.
    pub fn post(&self, request: Request) {
        if !self.is_ours() {
            return std::mem::forget(request);
        }
        let Some(mark) = self.bit.enter() else { return self.post_from_handler(request) };
        self.outside.enter();
        if let Some(shard) = self.try_shard() {
            let mut guard = Guard::new(self, Some(shard), mark);
            self.note_caller(&mut guard);
            self.drain_inbox(&mut guard);
            let now = sys::now();
            guard.pass(Stage::Locked);
            return perform(&mut guard, now, request);
        }
        let waiting = self.inbox.push(request);
        // The holder may have drained the inbox just before the request came in.
        let shard = if waiting < INBOX_LIMIT {
            after_release();
            self.try_shard()
        } else {
            // Somebody floods it faster than holders drain it: wait for the lock after all.
            Some(self.shard.lock().unwrap_or_else(PoisonError::into_inner))
        };
        drop(Guard::new(self, shard, mark));
    }

    /// The thread was interrupted inside the stack. It can have begun nothing in the handler, since
    /// every call there answers `WouldBlock`, but it can let go of a socket.
    fn post_from_handler(&self, request: Request) {
        match request {
            Request::Close(id) => self.inbox.push_close(id),
            // Its buffers go home without a lock; the charge stays with the socket.
            Request::LoanDone(_, chain, _) => drop(chain),
            other => std::mem::forget(other),
        }
    }

    #[inline]
    fn drain_inbox(&self, shard: &mut Shard<P>) {
        while !self.inbox.is_empty() {
            let now = sys::now();
            let done = self.inbox.drain(|r| perform(shard, now, r));
            shard.count(Counter::InboxPosts, done as u64);
        }
    }

    /// Repeats a step until it is done, sleeping in between: the one loop that waits.
    ///
    /// # Errors
    /// The step's own; [`SocketError::WouldBlock`] when `limit` allows no waiting or is over.
    pub fn wait<R>(
        &self,
        socket: SlotId,
        interest: Ready,
        limit: Limit,
        step: impl FnMut(&mut Shard<P>, Instant) -> Result<Step<R>, SocketError>,
    ) -> Result<R, SocketError> {
        self.wait_as(For::Socket(socket, interest), interest, limit, step)
    }

    /// Waits until a posted buffer is over, running the stack meanwhile as a reader does. False: the time
    /// is over.
    ///
    /// # Errors
    /// As [`Host::lock`]; [`SocketError::WouldBlock`] if a signal handler would have to wait.
    pub fn wait_ticket(&self, ticket: &RecvTicket, limit: Limit) -> Result<bool, SocketError> {
        if ticket.is_over() {
            return Ok(true);
        }
        let waits_for = For::Completion(&ticket.completion);
        let over = |_: &mut Shard<P>, _| {
            Ok(if ticket.is_over() { Step::Done(()) } else { Step::WaitData(1) })
        };
        match self.wait_as(waits_for, Ready::READABLE, limit, over) {
            Ok(()) => Ok(true),
            Err(SocketError::WouldBlock) => Ok(ticket.is_over()),
            Err(e) => Err(e),
        }
    }

    fn wait_as<R>(
        &self,
        waits_for: For<'_>,
        interest: Ready,
        limit: Limit,
        mut step: impl FnMut(&mut Shard<P>, Instant) -> Result<Step<R>, SocketError>,
    ) -> Result<R, SocketError> {
        let mut guard = self.lock()?;
        let now = sys::now();
        guard.pass(Stage::Locked);
        match step(&mut guard, now)? {
            Step::Done(r) => Ok(r),
            _ => self.wait_longer(guard, now, (waits_for, interest), limit, step),
        }
    }

    /// The step has to wait: runs the stack, sleeps, repeats it. Kept apart from [`Host::wait_as`] so
    /// that a step that is done at once does not pay for what this needs.
    #[inline(never)]
    fn wait_longer<'a, R>(
        &'a self,
        mut guard: Guard<'a, P>,
        mut now: Instant,
        (waits_for, interest): (For<'_>, Ready),
        limit: Limit,
        mut step: impl FnMut(&mut Shard<P>, Instant) -> Result<Step<R>, SocketError>,
    ) -> Result<R, SocketError> {
        let end = limit.end(now);
        // Readers and writers that cannot wait run the stack too, or nobody might.
        if end.is_none() || guard.looks_first(now) {
            let came = advance(&mut guard, now, interest);
            guard.looked_first(came > 0);
            if came > 0
                && let Step::Done(r) = step(&mut guard, now)?
            {
                return Ok(r);
            }
        }
        let Some(give_up) = end else { return Err(SocketError::WouldBlock) };
        let mut turn = Turn::new(self, &mut guard, now, waits_for)?;
        loop {
            guard = turn.sleep(guard, now, give_up)?;
            now = sys::now();
            guard.pass(Stage::Locked);
            let came = advance(&mut guard, now, interest);
            turn.polled(came);
            if let Step::Done(r) = step(&mut guard, now)? {
                return Ok(r);
            }
            if give_up.is_some_and(|at| now >= at) {
                return Err(SocketError::WouldBlock);
            }
        }
    }

    /// Waits until `collect` finds ready members of a poll set, or the time is over (0).
    ///
    /// # Errors
    /// As [`Host::lock`]; [`SocketError::WouldBlock`] if a signal handler would have to wait.
    pub fn wait_set(
        &self,
        set: &Arc<PollSetCore>,
        limit: Limit,
        mut collect: impl FnMut(&mut Shard<P>) -> usize,
    ) -> Result<usize, SocketError> {
        let mut guard = self.lock()?;
        let mut now = sys::now();
        guard.step(now, POLL_BUDGET);
        let found = collect(&mut guard);
        let (0, Some(give_up)) = (found, limit.end(now)) else { return Ok(found) };
        let mut turn = Turn::new(self, &mut guard, now, For::Set(set))?;
        loop {
            guard = turn.sleep(guard, now, give_up)?;
            now = sys::now();
            guard.step(now, POLL_BUDGET);
            let found = collect(&mut guard);
            if found > 0 || give_up.is_some_and(|at| now >= at) {
                return Ok(found);
            }
        }
    }

    /// Waits until something is over, running the stack meanwhile. False: the time is.
    ///
    /// # Errors
    /// As [`Host::wait_set`]; [`SocketError::NetworkDown`] if the device is gone: what has not ended
    /// will only end when the socket is closed.
    pub fn wait_completion(&self, c: &Completion, limit: Limit) -> Result<bool, SocketError> {
        if c.is_done() {
            return Ok(true);
        }
        let mut guard = self.lock()?;
        let mut now = sys::now();
        guard.step(now, POLL_BUDGET);
        let Some(give_up) = limit.end(now) else {
            drop(guard);
            return Ok(c.is_done());
        };
        let mut turn = Turn::new(self, &mut guard, now, For::Completion(c))?;
        loop {
            // It ends outside of the lock.
            guard = turn.sleep(guard, now, give_up)?;
            now = sys::now();
            guard.step(now, POLL_BUDGET);
            if c.is_done() {
                return Ok(true);
            }
            if guard.is_down() {
                return Err(SocketError::NetworkDown);
            }
            if give_up.is_some_and(|at| now >= at) {
                return Ok(false);
            }
        }
    }

    /// The descriptor of a poll set, for an event loop outside. From now on the service thread
    /// polls whenever no caller does.
    pub fn expose_set(&self, set: &PollSetCore) -> RawFd {
        let _mark = self.bit.enter();
        if self.is_ours() && set.expose() {
            self.poll_for_sets();
        }
        set.raw_fd()
    }

    /// A poll set was exposed that has, or may have, sockets of this shard.
    pub fn poll_for_sets(&self) {
        self.poll_sets.fetch_add(1, Ordering::SeqCst);
        self.service.unpark();
    }

    /// A poll set is gone.
    pub fn forget_set(&self, set: &PollSetCore) {
        if set.is_exposed() {
            self.poll_sets.fetch_sub(1, Ordering::AcqRel);
        }
    }

    /// Polls the stack once; for poll sets and for whoever drives a stack by hand.
    ///
    /// # Errors
    /// As [`Host::lock`].
    pub fn poll(&self) -> Result<usize, SocketError> {
        Ok(self.lock()?.step(sys::now(), POLL_BUDGET))
    }

    /// A caller has stopped waiting: the baton goes to another one, else to the service thread.
    fn pass_baton(&self) {
        if self.baton.is_held_by(Role::Caller) || self.baton.wake_follower() {
            return;
        }
        self.service.unpark();
        // It may sleep on the device since before it lost the baton, with an outdated deadline, and
        // its wake-ups may have been swallowed by those who had the baton since.
        if !self.baton.is_held_by(Role::Service)
            && let Some(kick) = self.baton.sleeping(Role::Service)
        {
            sys::signal_event(kick);
        }
    }

    /// Gives the lock back; who sleeps on the device learns of an earlier deadline.
    #[inline]
    fn release(&self, shard: MutexGuard<'_, Shard<P>>) {
        let late = self.baton.sleeper().map(|(fd, until)| (fd, until, shard.next_deadline()));
        drop(shard);
        if let Some((kick, until, next)) = late {
            kick_if_late(kick, until, next);
        }
        after_release();
    }

    /// Ends the service thread; sockets stay usable by whoever polls.
    pub fn stop(&self) {
        self.service.stop(self.baton.kick_fd(Role::Service));
    }

    /// Waits until everything that was accepted for sending is acknowledged. True if it is.
    pub fn drain(&self, socket: Option<SlotId>, limit: Duration) -> bool {
        self.try_drain(socket, limit).unwrap_or(false)
    }

    fn try_drain(&self, socket: Option<SlotId>, limit: Duration) -> Result<bool, SocketError> {
        let give_up = sys::now() + limit;
        let mut guard = self.lock()?;
        let mut turn = Turn::new(self, &mut guard, sys::now(), For::Time)?;
        loop {
            let now = sys::now();
            guard.step(now, POLL_BUDGET);
            if guard.is_down() || guard.is_drained(socket) || now >= give_up {
                return Ok(guard.is_drained(socket));
            }
            guard = turn.sleep(guard, now, Some((now + DRAIN_TICK).min(give_up)))?;
        }
    }
}

/// How often a drain looks whether it is done: nobody tells it.
const DRAIN_TICK: Duration = Duration::from_millis(5);

/// What a thread waits for.
enum For<'a> {
    Socket(SlotId, Ready),
    Set(&'a Arc<PollSetCore>),
    Completion(&'a Completion),
    Time,
}

/// One thread's turn of waiting; passes the baton on when it ends, however it ends.
struct Turn<'a, 'f, P: Probe> {
    host: &'a Host<P>,
    waiter: Arc<Waiter>,
    waits_for: For<'f>,
    has_baton: bool,
    /// The last wait was a breath between two polls.
    has_breathed: bool,
    _mark: Mark,
}

impl<'a, 'f, P: Probe> Turn<'a, 'f, P> {
    /// `WouldBlock` in a signal handler that interrupted a wait of this thread.
    fn new(
        host: &'a Host<P>,
        shard: &mut Shard<P>,
        now: Instant,
        waits_for: For<'f>,
    ) -> Result<Self, SocketError> {
        let mark = host.bit.start_waiting().ok_or(SocketError::WouldBlock)?;
        shard.start_waiting(now);
        let waiter = Waiter::current();
        Ok(Turn { host, waiter, waits_for, has_baton: false, has_breathed: false, _mark: mark })
    }

    /// The poll after the last wait brought so many frames.
    fn polled(&self, frames: usize) {
        if self.has_breathed {
            self.host.spin.polled(frames > 0);
        }
    }

    /// Waits once, in the way that the policy says: looks, holds or sleeps. Readiness, the device or
    /// the end of `give_up` ends it. May return early.
    fn sleep(
        &mut self,
        mut guard: Guard<'a, P>,
        now: Instant,
        give_up: Option<Instant>,
    ) -> Result<Guard<'a, P>, SocketError> {
        self.has_baton = self.has_baton || self.host.baton.try_take(Role::Caller);
        let next = match self.has_baton {
            true => {
                let may_look = self.host.spin.may_look() || guard.never_sleeps();
                guard.next_wait(now, may_look)
            }
            false => Next::Arm,
        };
        self.has_breathed = matches!(next, Next::Look { .. }) && !self.host.spin.has_peek();
        if self.has_breathed {
            drop(guard);
            self.host.spin.run(&self.waiter, now);
            let _ = self.host.outside.stage(Stage::Spun);
            return self.host.lock();
        }
        self.waiter.reset();
        self.register(&mut guard);
        if let For::Set(set) = self.waits_for
            && set.has_candidates()
        {
            // A socket of another shard, whose lock is not ours, has become ready meanwhile.
            self.unregister(&mut guard);
            return Ok(guard);
        }
        let mut guard = match next {
            _ if !self.has_baton => self.park(guard, give_up)?,
            Next::Look { until } => self.look(guard, until, give_up)?,
            Next::Hold { until } => self.on_device(guard, give_up, Some(until))?,
            Next::Arm => self.on_device(guard, give_up, None)?,
        };
        self.unregister(&mut guard);
        Ok(guard)
    }

    fn on_device(
        &self,
        guard: Guard<'a, P>,
        give_up: Option<Instant>,
        hold: Option<Instant>,
    ) -> Result<Guard<'a, P>, SocketError> {
        self.host.sleep_on_device(guard, Role::Caller, &self.waiter, give_up, hold)
    }

    /// Looks at the device without the lock.
    fn look(
        &self,
        guard: Guard<'a, P>,
        until: Instant,
        give_up: Option<Instant>,
    ) -> Result<Guard<'a, P>, SocketError> {
        let ends = [guard.next_deadline(), give_up, Some(until)];
        drop(guard);
        self.host.spin.run(&self.waiter, ends.into_iter().flatten().min().unwrap_or(until));
        let _ = self.host.outside.stage(Stage::Spun);
        self.host.lock()
    }

    fn register(&self, shard: &mut Shard<P>) {
        match self.waits_for {
            For::Socket(id, interest) => shard.watch_thread(id, &self.waiter, interest),
            For::Set(set) => set.add_sleeper(&self.waiter),
            For::Completion(c) => c.add_sleeper(&self.waiter),
            For::Time => {}
        }
    }

    fn unregister(&self, shard: &mut Shard<P>) {
        match self.waits_for {
            For::Socket(id, _) => shard.unwatch_thread(id, &self.waiter),
            For::Set(set) => set.remove_sleeper(&self.waiter),
            For::Completion(c) => c.remove_sleeper(&self.waiter),
            For::Time => {}
        }
    }

    fn park(
        &self,
        guard: Guard<'a, P>,
        give_up: Option<Instant>,
    ) -> Result<Guard<'a, P>, SocketError> {
        self.host.baton.follow(&self.waiter);
        drop(guard);
        // The baton may have been left free between the failed attempt and the registration.
        if self.host.baton.is_held_by(Role::Caller) {
            self.waiter.park(give_up.map(|at| at.since(sys::now())));
        }
        let _ = self.host.outside.stage(Stage::Slept);
        // Inside again, since a signal handler must not find the list's lock taken by its own thread:
        // it may wait for the shard's lock, whose holder may wait for the list.
        let guard = self.host.lock()?;
        self.host.baton.unfollow(&self.waiter);
        Ok(guard)
    }
}

impl<P: Probe> Drop for Turn<'_, '_, P> {
    fn drop(&mut self) {
        // The wake-up of another thread takes locks that a signal handler must not meet.
        let _mark = self.host.bit.enter();
        if self.has_baton {
            self.host.baton.leave(Role::Caller);
        }
        self.host.pass_baton();
    }
}

/// A timer became due earlier than the sleeper knows: wakes it.
fn kick_if_late(kick: RawFd, until: Instant, next: Option<Instant>) {
    // Less than a millisecond is not worth a wake-up.
    if next.is_some_and(|n| n + Duration::from_millis(1) < until) {
        sys::signal_event(kick);
    }
}

/// Runs the stack for a thread that waits for `interest`.
fn advance<P: Probe>(shard: &mut Shard<P>, now: Instant, interest: Ready) -> usize {
    if interest.intersects(Ready::READER) {
        shard.step_for_reader(now)
    } else {
        shard.step(now, POLL_BUDGET)
    }
}

fn perform<P: Probe>(shard: &mut Shard<P>, now: Instant, request: Request) {
    match request {
        Request::Commit(id, r) => shard.tcp_commit(now, id, r),
        Request::CommitLast(id, r) => {
            shard.tcp_commit(now, id, r);
            shard.tcp_end_write(id);
        }
        Request::EndWrite(id) => shard.tcp_end_write(id),
        Request::Abandon(id, r) => {
            shard.tcp_abandon(id, r);
            shard.tcp_end_write(id);
        }
        Request::EndSendFile(id) => shard.sendfile_end(id),
        Request::GiveBack(id, r) => shard.tcp_abandon(id, r),
        Request::ReadDone(id, chain) => shard.tcp_read_done(now, id, chain),
        Request::LoanDone(id, chain, lent) => shard.take_back(now, id, chain, lent),
        Request::AbandonPost(id, ticket) => {
            shard.tcp_abandon_post(now, id, &ticket);
        }
        Request::Free(chain) => shard.free(chain),
        Request::Close(id) => shard.close(now, id),
        Request::Poll => drop(shard.step(now, POLL_BUDGET)),
    }
}

/// A lock whose holder cannot leave it in a bad state, so that poison does not matter.
pub(crate) fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}
