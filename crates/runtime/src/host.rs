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
//!
//! A panic under the lock closes the stack for good: see `failure.rs`.

mod failure;
mod guard;
mod posted;
mod requests;
mod wait_guard;

use std::os::fd::RawFd;
use std::sync::{Arc, OnceLock, PoisonError, TryLockError, Weak};

use fulmar_base::{Counter, Duration, Instant, Outside, Probe, SlotId, Stage};
use fulmar_netdev::TxTime;
use fulmar_netdev::moderation::ModerationConfig;
use fulmar_socket::{Ready, SocketError, Step};

use crate::account::{Account, Ledger};
use crate::completion::Completion;
use crate::handoff::before_looking;
use crate::inbox::{Inbox, after_release};
use crate::leader::{Baton, Role};
use crate::limit::Limit;
use crate::poll_set::PollSetCore;
use crate::reentry::{HostBit, Inside, this_thread};
use crate::service::Service;
use crate::spin::Spin;
use crate::sync::{
    AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Mutex, MutexGuard, Ordering, lock,
};
use crate::sys;
use crate::watched::WatchedShard;
use failure::OnUnwind;
pub use guard::Guard;
pub use posted::PostedRead;
use wait_guard::{For, Turn};

/// Calls beside the sleeping service thread after which it is woken: a deadline looked at by each costs
/// as much as the lock, a wake-up as much as a hundred of them.
pub(crate) const CALLS_BESIDE_SERVICE: u32 = 128;

/// Frames that one poll takes before waiters are looked at.
pub(crate) const POLL_BUDGET: usize = 128;

/// Owners of shared bytes that have come home, to be dropped without the lock; rarely many, so that they
/// need no heap.
type Returned = smallvec::SmallVec<[Arc<dyn fulmar_mbuf::SharedBytes>; 4]>;

/// A shard with everything that threads need around it.
pub struct Host<P: Probe = Account> {
    shard: Mutex<WatchedShard<P>>,
    /// What its threads are doing in it, for the detection of re-entry.
    bit: HostBit,
    pub(crate) inbox: Inbox,
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
    /// The device needs no exact time of a crossing.
    takes_coarse_time: bool,
    /// Single reads may post their buffers.
    places_reads: bool,
    /// The service thread looks at the clock every few milliseconds, and the shard knows what it saw.
    is_told_time: AtomicBool,
    /// Calls beside the service thread while it slept.
    calls_beside: AtomicU32,
    /// The thread that made the last call. Written under the lock, where there are several shards.
    last_caller: AtomicUsize,
    /// The hosts of all shards of the stack, in their order, if there are several.
    all: OnceLock<Vec<Weak<Host<P>>>>,
    /// Poll sets whose descriptors somebody may sleep on.
    exposed_sets: Mutex<Vec<Weak<PollSetCore>>>,
    /// Why the stack is down for good.
    failure: OnceLock<String>,
}

impl Host {
    /// The ledger of the stack, which may be off.
    pub fn ledger(&self) -> &Arc<Ledger> {
        self.outside.ledger()
    }

    /// The caller passes a stage outside of the lock.
    #[inline(always)]
    pub fn pass(&self, stage: Stage) {
        let _ = self.outside.stage(stage);
    }
}

impl<P: Probe> Host<P> {
    /// Puts a shard under a lock.
    ///
    /// # Errors
    /// The errno of `eventfd` or `timerfd_create`.
    pub fn new(mut shard: WatchedShard<P>) -> std::io::Result<Self> {
        sys::watch_forks();
        let baton = Baton::new()?;
        let caps = *shard.device().caps();
        shard.pool().set_kick(Arc::new(baton.kick()?));
        Ok(Host {
            spin: Spin::new(shard.peek()),
            outside: shard.probe().outside(),
            takes_coarse_time: caps.tx_time == TxTime::Coarse,
            places_reads: caps.places_on_receive,
            shard: Mutex::new(shard),
            is_told_time: AtomicBool::new(false),
            calls_beside: AtomicU32::new(0),
            bit: HostBit::next(),
            inbox: Inbox::default(),
            baton,
            activity: AtomicU64::new(0),
            poll_sets: AtomicUsize::new(0),
            service: Service::default(),
            forks: sys::fork_generation(),
            last_caller: AtomicUsize::new(0),
            all: OnceLock::new(),
            exposed_sets: Mutex::new(Vec::new()),
            failure: OnceLock::new(),
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

    /// Whether it pays for single reads to post their buffers: [`Caps::places_on_receive`].
    ///
    /// [`Caps::places_on_receive`]: fulmar_netdev::Caps::places_on_receive
    #[inline]
    pub fn places_reads(&self) -> bool {
        self.places_reads
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
    /// interrupted a call); [`SocketError::BadHandle`] in a forked child;
    /// [`SocketError::NetworkDown`] after a panic ([`Host::failure`]).
    #[inline]
    pub fn lock(&self) -> Result<Guard<'_, P>, SocketError> {
        let inside = self.come_in()?;
        self.outside.enter();
        let mut guard = Guard::new(self, Some(self.shard()), inside);
        self.arrive(&mut guard)?;
        Ok(guard)
    }

    /// The thread is inside from now on. Apart from the lock, so that the guard is made where it stays:
    /// one that comes in a `Result` is copied, word by word behind the stores that have just made it.
    #[inline(always)]
    fn come_in(&self) -> Result<Inside, SocketError> {
        if !self.is_ours() {
            return Err(SocketError::BadHandle);
        }
        self.bit.enter().ok_or(SocketError::WouldBlock)
    }

    /// What a caller does first under the lock.
    #[inline(always)]
    fn arrive(&self, shard: &mut WatchedShard<P>) -> Result<(), SocketError> {
        // What this thread left in the inbox before comes before what it does now: a write that it
        // has ended must not look as if it were still going on.
        if !self.drain_inbox(shard) {
            return Err(SocketError::NetworkDown);
        }
        // Only the holder of the lock writes it, so that no locked instruction is needed.
        let calls = self.activity.load(Ordering::Relaxed);
        self.activity.store(calls.wrapping_add(1), Ordering::Relaxed);
        self.note_caller(shard);
        Ok(())
    }

    /// The shard, once it is nobody else's.
    #[inline(always)]
    fn shard(&self) -> MutexGuard<'_, WatchedShard<P>> {
        self.shard.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a lock that was another thread's before, where there are shards to keep apart.
    #[inline]
    fn note_caller(&self, shard: &mut WatchedShard<P>) {
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
    pub(crate) fn lock_quietly(&self) -> Result<Guard<'_, P>, SocketError> {
        let inside = self.come_in()?;
        self.outside.enter();
        let mut guard = Guard::new(self, Some(self.shard()), inside);
        if self.drain_inbox(&mut guard) { Ok(guard) } else { Err(SocketError::NetworkDown) }
    }

    fn try_shard(&self) -> Option<MutexGuard<'_, WatchedShard<P>>> {
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
        f: impl FnOnce(&mut WatchedShard<P>, Instant) -> Result<R, SocketError>,
    ) -> Result<R, SocketError> {
        let inside = self.come_in()?;
        self.outside.enter();
        let mut shard = self.shard();
        let unwinding = OnUnwind::of(self);
        let done = self.arrive(&mut shard).and_then(|()| {
            let now = sys::now();
            shard.pass(Stage::Locked);
            f(&mut shard, now)
        });
        unwinding.disarm();
        self.let_go(shard, inside);
        done
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
        step: impl FnMut(&mut WatchedShard<P>, Instant) -> Result<Step<R>, SocketError>,
    ) -> Result<R, SocketError> {
        self.wait_as(For::Socket(socket, interest), interest, || limit, true, step)
    }

    /// As [`Host::wait`], for a step to which the time says so little that it may be a few milliseconds
    /// old, that of the service thread's last look at the clock or of the kernel's last tick: a datagram
    /// sent, or taken out of a queue. Over a device that has to be told the time of a crossing it is exact
    /// all the same. For how long it may wait is asked once it has to.
    ///
    /// # Errors
    /// As [`Host::wait`].
    #[inline]
    pub fn wait_recently<R>(
        &self,
        socket: SlotId,
        interest: Ready,
        limit: impl FnOnce() -> Limit,
        step: impl FnMut(&mut WatchedShard<P>, Instant) -> Result<Step<R>, SocketError>,
    ) -> Result<R, SocketError> {
        let is_exact = !self.takes_coarse_time;
        self.wait_as(For::Socket(socket, interest), interest, limit, is_exact, step)
    }

    #[inline]
    fn wait_as<R>(
        &self,
        waits_for: For<'_>,
        interest: Ready,
        limit: impl FnOnce() -> Limit,
        is_exact: bool,
        mut step: impl FnMut(&mut WatchedShard<P>, Instant) -> Result<Step<R>, SocketError>,
    ) -> Result<R, SocketError> {
        let inside = self.come_in()?;
        self.outside.enter();
        let mut shard = self.shard();
        let unwinding = OnUnwind::of(self);
        if let Err(e) = self.arrive(&mut shard) {
            unwinding.disarm();
            self.let_go(shard, inside);
            return Err(e);
        }
        let now = if is_exact { sys::now() } else { self.recently(&shard) };
        shard.pass(Stage::Locked);
        let said = step(&mut shard, now);
        unwinding.disarm();
        if let Ok(Step::Done(r)) = said {
            // Without a guard, which would be made in memory.
            self.let_go(shard, inside);
            return Ok(r);
        }
        let guard = Guard::new(self, Some(shard), inside);
        said?;
        let now = if is_exact { now } else { sys::now() };
        self.wait_longer(guard, now, (waits_for, interest), limit(), step)
    }

    /// What time it was a few milliseconds ago at most: as the shard knows it, if it was told so lately.
    #[inline(always)]
    fn recently(&self, shard: &WatchedShard<P>) -> Instant {
        if self.tells_time() { shard.now() } else { sys::recently() }
    }

    /// Whether the shard knows what time it was a few milliseconds ago.
    #[inline(always)]
    pub(crate) fn tells_time(&self) -> bool {
        self.is_told_time.load(Ordering::Relaxed)
    }

    /// The service thread will, or will no longer, step the shard every few milliseconds.
    pub(crate) fn tell_time(&self, will: bool) {
        self.is_told_time.store(will, Ordering::Relaxed);
    }

    /// The step has to wait: runs the stack, sleeps, repeats it. Kept apart from [`Host::wait_as`] so
    /// that a step that is done at once does not pay for what this needs.
    #[inline(never)]
    fn wait_longer<'a, R>(
        &'a self,
        mut guard: Guard<'a, P>,
        now: Instant,
        (waits_for, interest): (For<'_>, Ready),
        limit: Limit,
        mut step: impl FnMut(&mut WatchedShard<P>, Instant) -> Result<Step<R>, SocketError>,
    ) -> Result<R, SocketError> {
        let end = limit.end(now);
        // Readers and writers that cannot wait run the stack too, or nobody might.
        let came = advance(&mut guard, now, interest);
        // What another shard has handed over is not counted among the frames, and nobody is told of it:
        // this thread is not on the list of those who wait yet.
        if (came > 0 || self.has_shards_beside())
            && let Step::Done(r) = step(&mut guard, now)?
        {
            return Ok(r);
        }
        let Some(give_up) = end else { return Err(SocketError::WouldBlock) };
        self.wait_in_turn(guard, now, (waits_for, interest), give_up, step)
    }

    /// The first poll has brought nothing.
    #[inline(never)]
    fn wait_in_turn<'a, R>(
        &'a self,
        mut guard: Guard<'a, P>,
        mut now: Instant,
        (waits_for, interest): (For<'_>, Ready),
        give_up: Option<Instant>,
        mut step: impl FnMut(&mut WatchedShard<P>, Instant) -> Result<Step<R>, SocketError>,
    ) -> Result<R, SocketError> {
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
        mut collect: impl FnMut(&mut WatchedShard<P>) -> usize,
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
    /// As [`Host::wait_set`]; [`SocketError::NetworkDown`] or [`SocketError::Protocol`] if the device is gone: what has not ended
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
            if let Some(e) = guard.down() {
                return Err(e);
            }
            if give_up.is_some_and(|at| now >= at) {
                return Ok(false);
            }
        }
    }

    /// The descriptor of a poll set, for an event loop outside. From now on the service thread
    /// polls whenever no caller does.
    pub fn expose_set(&self, set: &Arc<PollSetCore>) -> RawFd {
        let _mark = self.bit.enter();
        if self.is_ours() && set.expose() {
            self.poll_for_sets();
            lock(&self.exposed_sets).push(Arc::downgrade(set));
            if self.inbox.is_closed() {
                set.signal();
            }
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
            lock(&self.exposed_sets).retain(|s| !std::ptr::eq(s.as_ptr(), set));
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
    #[inline(always)]
    fn release(&self, shard: MutexGuard<'_, WatchedShard<P>>) {
        match self.baton.sleeper() {
            None => drop(shard),
            Some((kick, until)) => self.release_beside(shard, kick, until),
        }
        after_release();
    }

    /// As [`Host::release`], beside somebody who sleeps on the device.
    #[inline(never)]
    fn release_beside(&self, shard: MutexGuard<'_, WatchedShard<P>>, kick: RawFd, until: Instant) {
        let unwinding = OnUnwind::of(self);
        let is_late = is_late(until, shard.next_deadline());
        let wakes = is_late || self.is_beside_service_too_often();
        unwinding.disarm();
        drop(shard);
        if wakes {
            sys::signal_event(kick);
        }
    }

    /// Whether callers come and go beside the sleeping service thread so often that it is better awake: while
    /// it ticks nobody looks at deadlines for it. With a poll set it would only go to sleep again.
    fn is_beside_service_too_often(&self) -> bool {
        // Written under the lock only.
        let calls = self.calls_beside.load(Ordering::Relaxed) + 1;
        let often = calls >= CALLS_BESIDE_SERVICE;
        self.calls_beside.store(if often { 0 } else { calls }, Ordering::Relaxed);
        often && self.poll_sets.load(Ordering::Relaxed) == 0 && self.baton.is_held_by(Role::Service)
    }

    /// Ends the service thread; sockets stay usable by whoever polls.
    pub fn stop(&self) {
        self.service.stop(self.baton.kick_fd(Role::Service));
    }

    /// Waits until everything that was accepted for sending is acknowledged. True if it is.
    pub fn drain(&self, socket: Option<SlotId>, limit: Duration) -> bool {
        self.in_destructor(|| self.try_drain(socket, limit).unwrap_or(false))
    }

    fn try_drain(&self, socket: Option<SlotId>, limit: Duration) -> Result<bool, SocketError> {
        let give_up = sys::now() + limit;
        let mut guard = self.lock()?;
        let mut turn = Turn::new(self, &mut guard, sys::now(), For::Time)?;
        loop {
            let now = sys::now();
            guard.step(now, POLL_BUDGET);
            if guard.down().is_some() || guard.is_drained(socket) || now >= give_up {
                return Ok(guard.is_drained(socket));
            }
            guard = turn.sleep(guard, now, Some((now + DRAIN_TICK).min(give_up)))?;
        }
    }
}

/// How often a drain looks whether it is done: nobody tells it.
const DRAIN_TICK: Duration = Duration::from_millis(5);

/// Whether a timer became due earlier than the sleeper knows. Less than a millisecond is not worth a
/// wake-up.
fn is_late(until: Instant, next: Option<Instant>) -> bool {
    next.is_some_and(|n| n + Duration::from_millis(1) < until)
}

/// Runs the stack for a thread that waits for `interest`.
fn advance<P: Probe>(shard: &mut WatchedShard<P>, now: Instant, interest: Ready) -> usize {
    if interest.intersects(Ready::READER) {
        shard.step_for_reader(now)
    } else {
        shard.step(now, POLL_BUDGET)
    }
}
