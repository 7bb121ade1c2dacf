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

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use fulmar_base::{Counter, Duration, Instant, NoProbe, Probe, SlotId};
use fulmar_mbuf::Chain;
use fulmar_socket::{Ready, Reservation, SocketError, Step};

use crate::baton::{Baton, Role};
use crate::poll_set::PollSetCore;
use crate::service::Service;
use crate::shard::Shard;
use crate::sys;
use crate::waiter::Waiter;
use crate::watch::Wake;

/// Frames that one poll takes before waiters are looked at.
pub(crate) const POLL_BUDGET: usize = 128;

/// Polls that find nothing before a waiter goes to sleep, with a yield between two of them: on one
/// CPU the yield lets the peer answer, on several it is the brief spin of a dense flow.
const EMPTY_POLLS: u32 = 2;

/// Longest sleep without looking at the clock again.
const LONG_SLEEP: Duration = Duration::from_secs(3600);

/// A request that needs no answer, left for whoever holds the lock.
pub enum Request {
    /// The bytes of a write are ready.
    Commit(SlotId, Reservation),
    /// Detached bytes are copied.
    ReadDone(SlotId, Chain),
    /// A datagram's payload is copied.
    Free(Chain),
    /// The user let go of a socket.
    Close(SlotId),
    /// Timers or the device want attention.
    Poll,
}

/// Requests that may wait in the inbox; each thread has at most one under way, plus closes.
const INBOX_LIMIT: usize = 65_536;

/// A shard with everything that threads need around it.
pub struct Host<P: Probe = NoProbe> {
    shard: Mutex<Shard<P>>,
    /// [`sys::thread_number`] of the lock's holder, 0 if free.
    owner: AtomicU64,
    inbox: Mutex<Vec<Request>>,
    inbox_len: AtomicUsize,
    /// The device's descriptor, if it has one.
    device_fd: Option<i32>,
    pub(crate) baton: Baton,
    /// Counts the calls of callers, so that the service thread sees whether they run the stack.
    pub(crate) activity: AtomicU64,
    /// Poll sets that exist: their owners sleep where nobody polls.
    pub(crate) poll_sets: AtomicUsize,
    pub(crate) service: Service,
    forks: u32,
    many_cpus: bool,
    empty_polls: AtomicU32,
}

impl<P: Probe> Host<P> {
    /// Puts a shard under a lock.
    ///
    /// # Errors
    /// The errno of `eventfd`.
    pub fn new(mut shard: Shard<P>) -> std::io::Result<Self> {
        sys::watch_forks();
        Ok(Host {
            device_fd: shard.device().wake_fd(),
            shard: Mutex::new(shard),
            owner: AtomicU64::new(0),
            inbox: Mutex::new(Vec::new()),
            inbox_len: AtomicUsize::new(0),
            baton: Baton::new()?,
            activity: AtomicU64::new(0),
            poll_sets: AtomicUsize::new(0),
            service: Service::default(),
            forks: sys::fork_generation(),
            many_cpus: sys::usable_cpus() > 1,
            empty_polls: AtomicU32::new(EMPTY_POLLS),
        })
    }

    /// Whether this process made the stack. In a forked child its memory does not exist.
    pub fn is_ours(&self) -> bool {
        sys::fork_generation() == self.forks
    }

    /// How often a waiter polls in vain before it sleeps; 0 is right for an idle stack, more keeps
    /// a CPU busy for the sake of latency.
    pub fn set_empty_polls(&self, n: u32) {
        self.empty_polls.store(n, Ordering::Relaxed);
    }

    /// Takes the lock.
    ///
    /// # Errors
    /// [`SocketError::WouldBlock`] if this very thread holds it (a signal handler interrupted a
    /// call); [`SocketError::BadHandle`] in a forked child.
    pub fn lock(&self) -> Result<Guard<'_, P>, SocketError> {
        self.activity.fetch_add(1, Ordering::Relaxed);
        self.lock_quietly()
    }

    /// As [`Host::lock`], for the service thread, which is not a caller.
    pub(crate) fn lock_quietly(&self) -> Result<Guard<'_, P>, SocketError> {
        if !self.is_ours() {
            return Err(SocketError::BadHandle);
        }
        let me = sys::thread_number();
        if self.owner.load(Ordering::Relaxed) == me {
            return Err(SocketError::WouldBlock);
        }
        let shard = self.shard.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(self.guard(shard, me))
    }

    fn try_lock(&self) -> Option<Guard<'_, P>> {
        let me = sys::thread_number();
        if self.owner.load(Ordering::Relaxed) == me {
            return None;
        }
        let shard = match self.shard.try_lock() {
            Ok(shard) => shard,
            Err(TryLockError::Poisoned(p)) => p.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        Some(self.guard(shard, me))
    }

    fn guard<'a>(&'a self, shard: MutexGuard<'a, Shard<P>>, me: u64) -> Guard<'a, P> {
        self.owner.store(me, Ordering::Relaxed);
        Guard { host: self, shard: Some(shard) }
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
        f(&mut guard, sys::now())
    }

    /// Does a request now if the lock is free, else leaves it for the holder. Never waits long.
    pub fn post(&self, request: Request) {
        if !self.is_ours() {
            std::mem::forget(request);
            return;
        }
        if let Some(mut guard) = self.try_lock() {
            return perform(&mut guard, sys::now(), request);
        }
        let waiting = {
            let mut inbox = lock(&self.inbox);
            inbox.push(request);
            self.inbox_len.store(inbox.len(), Ordering::Release);
            inbox.len()
        };
        if waiting >= INBOX_LIMIT {
            // Somebody floods it faster than holders drain it: wait for the lock after all.
            drop(self.lock());
            return;
        }
        // The holder may have drained the inbox just before the request came in.
        drop(self.try_lock());
    }

    fn drain_inbox(&self, shard: &mut Shard<P>) {
        while self.inbox_len.load(Ordering::Acquire) > 0 {
            let requests = {
                let mut inbox = lock(&self.inbox);
                self.inbox_len.store(0, Ordering::Release);
                std::mem::take(&mut *inbox)
            };
            let now = sys::now();
            shard.count(Counter::InboxPosts, requests.len() as u64);
            for r in requests {
                perform(shard, now, r);
            }
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
        mut step: impl FnMut(&mut Shard<P>, Instant) -> Result<Step<R>, SocketError>,
    ) -> Result<R, SocketError> {
        let mut guard = self.lock()?;
        let mut now = sys::now();
        if let Step::Done(r) = step(&mut guard, now)? {
            return Ok(r);
        }
        // Readers and writers that cannot wait run the stack too, or nobody might.
        if guard.step(now, POLL_BUDGET) > 0
            && let Step::Done(r) = step(&mut guard, now)?
        {
            return Ok(r);
        }
        let Some(give_up) = limit.end(now) else { return Err(SocketError::WouldBlock) };
        let mut turn = Turn::new(self, For::Socket(socket, interest));
        loop {
            guard = turn.sleep(guard, give_up)?;
            now = sys::now();
            guard.step(now, POLL_BUDGET);
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
    /// As [`Host::lock`].
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
        let mut turn = Turn::new(self, For::Set(set));
        loop {
            guard = turn.sleep(guard, give_up)?;
            now = sys::now();
            guard.step(now, POLL_BUDGET);
            let found = collect(&mut guard);
            if found > 0 || give_up.is_some_and(|at| now >= at) {
                return Ok(found);
            }
        }
    }

    /// The descriptor of a poll set, for an event loop outside. From now on the service thread
    /// polls whenever no caller does.
    pub fn expose_set(&self, set: &PollSetCore) -> RawFd {
        if set.expose() {
            self.poll_sets.fetch_add(1, Ordering::AcqRel);
            self.service.unpark();
        }
        set.raw_fd()
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
        if !self.baton.is_held_by(Role::Caller) && !self.baton.wake_follower() {
            self.service.unpark();
        }
    }

    /// Arms the device and sleeps on it, unless something came meanwhile. For the baton's holder.
    pub(crate) fn sleep_on_device<'a>(
        &'a self,
        mut guard: Guard<'a, P>,
        role: Role,
        waiter: &Waiter,
        give_up: Option<Instant>,
    ) -> Result<Guard<'a, P>, SocketError> {
        let armed = guard.device().arm();
        let now = sys::now();
        if !armed || guard.step(now, POLL_BUDGET) > 0 || waiter.is_woken() {
            guard.device().disarm();
            return Ok(guard);
        }
        let until = [guard.next_deadline(), give_up].into_iter().flatten().min();
        let timeout = until.map_or(LONG_SLEEP, |at| at.since(now)).min(LONG_SLEEP);
        let wants_room = guard.has_backlog() && guard.device().wants_tx_wake();
        let kick = self.baton.kick_fd(role);
        self.baton.will_sleep(role, now + timeout);
        waiter.on_device(kick);
        guard.count(Counter::Sleeps, 1);
        drop(guard);
        if !waiter.is_woken() {
            sys::sleep_on(self.device_fd.map(|fd| (fd, wants_room)), kick, Some(timeout));
        }
        waiter.off_device();
        self.baton.awake(role);
        let mut guard = self.lock_quietly()?;
        guard.device().disarm();
        Ok(guard)
    }

    /// A timer became due earlier than the sleeper knows: wakes it.
    fn kick_if_late(kick: RawFd, until: Instant, next: Option<Instant>) {
        // Less than a millisecond is not worth a wake-up.
        if next.is_some_and(|n| n + Duration::from_millis(1) < until) {
            sys::signal_event(kick);
        }
    }

    /// Ends the service thread; sockets stay usable by whoever polls.
    pub fn stop(&self) {
        self.service.stop(self.baton.kick_fd(Role::Service));
    }

    /// Waits until everything that was accepted for sending is acknowledged. True if it is.
    pub fn drain(&self, socket: Option<SlotId>, limit: Duration) -> bool {
        let give_up = sys::now() + limit;
        let waiter = Waiter::current();
        loop {
            let Ok(mut guard) = self.lock() else { return false };
            let now = sys::now();
            guard.step(now, POLL_BUDGET);
            if guard.is_down() || guard.is_drained(socket) {
                return guard.is_drained(socket);
            }
            if now >= give_up {
                return false;
            }
            waiter.reset();
            let slice = (now + Duration::from_millis(5)).min(give_up);
            drop(self.sleep_on_device(guard, Role::Caller, &waiter, Some(slice)));
        }
    }
}

/// How long a call may wait.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Limit {
    /// Not at all.
    DoNotWait,
    /// At most so long.
    For(Duration),
    /// Until it is done.
    Forever,
}

impl Limit {
    /// When the waiting ends, `Some(None)` for never; `None` if there is to be none.
    fn end(self, now: Instant) -> Option<Option<Instant>> {
        match self {
            Limit::DoNotWait => None,
            Limit::Forever => Some(None),
            Limit::For(d) => Some(Some(now + d)),
        }
    }
}

/// What a thread waits for.
enum For<'a> {
    Socket(SlotId, Ready),
    Set(&'a Arc<PollSetCore>),
}

/// One thread's turn of waiting; passes the baton on when it ends, however it ends.
struct Turn<'a, 'f, P: Probe> {
    host: &'a Host<P>,
    waiter: Arc<Waiter>,
    waits_for: For<'f>,
    has_baton: bool,
    empty: u32,
}

impl<'a, 'f, P: Probe> Turn<'a, 'f, P> {
    fn new(host: &'a Host<P>, waits_for: For<'f>) -> Self {
        Turn { host, waiter: Waiter::current(), waits_for, has_baton: false, empty: 0 }
    }

    /// Sleeps once; readiness, the device or the end of `give_up` wakes it. May return early.
    fn sleep(
        &mut self,
        mut guard: Guard<'a, P>,
        give_up: Option<Instant>,
    ) -> Result<Guard<'a, P>, SocketError> {
        self.has_baton = self.has_baton || self.host.baton.try_take(Role::Caller);
        if self.has_baton && self.empty < self.host.empty_polls.load(Ordering::Relaxed) {
            self.empty += 1;
            drop(guard);
            self.breathe();
            return self.host.lock();
        }
        self.empty = 0;
        self.waiter.reset();
        self.register(&mut guard);
        let mut guard = if self.has_baton {
            self.host.sleep_on_device(guard, Role::Caller, &self.waiter, give_up)?
        } else {
            self.park(guard, give_up)?
        };
        self.unregister(&mut guard);
        Ok(guard)
    }

    fn register(&self, shard: &mut Shard<P>) {
        match self.waits_for {
            For::Socket(id, interest) => shard.watch_thread(id, &self.waiter, interest),
            For::Set(set) => set.set_sleeper(Some(Arc::clone(&self.waiter))),
        }
    }

    fn unregister(&self, shard: &mut Shard<P>) {
        match self.waits_for {
            For::Socket(id, _) => shard.unwatch_thread(id, &self.waiter),
            For::Set(set) => set.set_sleeper(None),
        }
    }

    fn breathe(&self) {
        if self.host.many_cpus {
            std::hint::spin_loop();
        }
        std::thread::yield_now();
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
        self.host.baton.unfollow(&self.waiter);
        self.host.lock()
    }
}

impl<P: Probe> Drop for Turn<'_, '_, P> {
    fn drop(&mut self) {
        if self.has_baton {
            self.host.baton.leave(Role::Caller);
        }
        self.host.pass_baton();
    }
}

/// The shard lock. Releasing it drains the inbox and fires the wake-ups that were collected.
pub struct Guard<'a, P: Probe = NoProbe> {
    host: &'a Host<P>,
    shard: Option<MutexGuard<'a, Shard<P>>>,
}

impl<P: Probe> std::ops::Deref for Guard<'_, P> {
    type Target = Shard<P>;
    fn deref(&self) -> &Shard<P> {
        self.shard.as_ref().expect("invariant: present until the guard is dropped")
    }
}

impl<P: Probe> std::ops::DerefMut for Guard<'_, P> {
    fn deref_mut(&mut self) -> &mut Shard<P> {
        self.shard.as_mut().expect("invariant: present until the guard is dropped")
    }
}

impl<P: Probe> Drop for Guard<'_, P> {
    fn drop(&mut self) {
        let Some(mut shard) = self.shard.take() else { return };
        self.host.drain_inbox(&mut shard);
        let wakes = shard.take_wakes();
        let late = self.host.baton.sleeper().map(|(fd, until)| (fd, until, shard.next_deadline()));
        self.host.owner.store(0, Ordering::Relaxed);
        drop(shard);
        if let Some((kick, until, next)) = late {
            Host::<P>::kick_if_late(kick, until, next);
        }
        wakes.into_iter().flatten().for_each(Wake::fire);
        if self.host.inbox_len.load(Ordering::Acquire) > 0 {
            // Left between the last look and the release: whoever gets the lock drains it.
            drop(self.host.try_lock());
        }
    }
}

fn perform<P: Probe>(shard: &mut Shard<P>, now: Instant, request: Request) {
    match request {
        Request::Commit(id, r) => shard.tcp_commit(now, id, r),
        Request::ReadDone(id, chain) => shard.tcp_read_done(now, id, chain),
        Request::Free(chain) => shard.free(chain),
        Request::Close(id) => shard.close(now, id),
        Request::Poll => drop(shard.step(now, POLL_BUDGET)),
    }
}

/// A lock whose holder cannot leave it in a bad state, so that poison does not matter.
pub(crate) fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}
