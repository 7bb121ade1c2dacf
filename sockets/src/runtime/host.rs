//! The shard lock and the threads around it.
//!
//! ```text
//!   call ─► lock ─► inbox ─► the call of the shard ─► inbox ─► unlock ─► wake-ups
//!                                  │ would wait (wait.rs)
//!                                  ▼
//!                     poll the device, repeat the call
//!                                  │ nothing came
//!                                  ▼
//!          ┌─ no leader: lead. Busy-poll, or arm, poll once more, sleep on the device
//!          └─ another thread leads: sleep on a futex; the leader's poll wakes this thread
//! ```
//!
//! A shard has at most one leader, which polls for all ([`Leader`]). A leader that returns wakes a follower, else
//! the service thread. A request that needs no answer and finds the lock taken is queued in the inbox, which the
//! holder drains after it locks and before it unlocks.
//!
//! A panic under the lock closes the stack for good: see `failure.rs`.

mod drive;
mod failure;
mod guard;
mod posted;
mod requests;
mod tasks;
mod wait;
mod wait_guard;

use std::os::fd::RawFd;
use std::sync::{Arc, OnceLock, PoisonError, TryLockError, Weak};

use fulmar_stack::base::{Counter, Duration, Instant, Stage};
use fulmar_stack::device::TxTime;
use fulmar_stack::device::moderation::ModerationConfig;
use fulmar_stack::socket::SocketError;

use crate::runtime::account::Ledger;
use crate::runtime::handoff::handoff_fence;
use crate::runtime::inbox::{Inbox, after_release};
use crate::runtime::leader::{Leader, Role};
use crate::runtime::poll_set::PollSetCore;
use crate::runtime::reentry::{HostBit, Inside, this_thread};
use crate::runtime::service::Service;
use crate::runtime::spin::Spin;
use crate::runtime::sync::{
    AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Mutex, MutexGuard, Ordering, lock,
};
use crate::runtime::sys;
use crate::runtime::watched::WatchedShard;
pub(crate) use drive::{Driven, Driving};
use failure::OnUnwind;
pub use guard::Guard;

/// Calls that find the service thread asleep on the device before it is woken. Each of them compares deadlines,
/// which costs as much as the lock; a wake-up costs as much as a hundred comparisons.
pub(crate) const CALLS_PAST_SERVICE: u32 = 128;

/// Most frames that one poll takes before pending wake-ups are delivered.
pub(crate) const POLL_BUDGET: usize = 128;

/// Owners of shared bytes without references, to be dropped without the lock. There are rarely more than four, so this
/// rarely allocates.
type Returned = smallvec::SmallVec<[Arc<dyn fulmar_stack::mbuf::SharedBytes>; 4]>;

/// A shard with everything that threads need around it.
pub struct Host {
    shard: Mutex<WatchedShard>,
    /// Detects re-entry by a signal handler.
    bit: HostBit,
    pub(crate) inbox: Inbox,
    pub(crate) leader: Leader,
    /// Calls so far: the service thread sees by it whether callers run the stack.
    pub(crate) activity: AtomicU64,
    /// Exposed poll sets: their owners may sleep in epoll_wait(2), where they do not poll the device.
    pub(crate) poll_sets: AtomicUsize,
    pub(crate) service: Service,
    /// What the driver sleeps on, if there is one.
    driver: Mutex<Option<Arc<Driven>>>,
    /// A task of an async program has waited for a socket: it does not run the stack itself.
    has_tasks: AtomicBool,
    forks: u32,
    spin: Spin,
    /// The account, which may be off.
    ledger: Arc<Ledger>,
    /// The device does not need the exact time of a crossing.
    takes_coarse_time: bool,
    /// The service thread ticks, so that the shard's clock is a few milliseconds coarse.
    has_coarse_clock: AtomicBool,
    /// Calls since the service thread went to sleep.
    calls_past_service: AtomicU32,
    /// The thread that made the last call, if the stack has several shards. Written under the lock.
    last_caller: AtomicUsize,
    /// The hosts of all shards of the stack, by number, if there are several.
    siblings: OnceLock<Vec<Weak<Host>>>,
    /// Poll sets on whose descriptors threads may sleep.
    exposed_sets: Mutex<Vec<Weak<PollSetCore>>>,
    /// Why the stack is down for good.
    failure: OnceLock<String>,
}

/// The clock that a step is run by.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Clock {
    Exact,
    /// A time that is a few milliseconds old at most.
    Coarse,
}

impl Host {
    /// Puts a shard under a lock, with an account that may be off.
    ///
    /// # Errors
    /// The errno of `eventfd` or `timerfd_create`.
    pub fn new(mut shard: WatchedShard, ledger: Arc<Ledger>) -> std::io::Result<Self> {
        sys::watch_forks();
        let leader = Leader::new()?;
        let caps = *shard.device().caps();
        shard.pool().set_kick(Arc::new(leader.kick()?));
        shard.stages().set_observer(ledger.clone());
        Ok(Host {
            spin: Spin::new(shard.peek()),
            ledger,
            takes_coarse_time: caps.tx_time == TxTime::Coarse,
            shard: Mutex::new(shard),
            has_coarse_clock: AtomicBool::new(false),
            calls_past_service: AtomicU32::new(0),
            bit: HostBit::next(),
            inbox: Inbox::default(),
            leader,
            activity: AtomicU64::new(0),
            poll_sets: AtomicUsize::new(0),
            service: Service::default(),
            driver: Mutex::new(None),
            has_tasks: AtomicBool::new(false),
            forks: sys::fork_generation(),
            last_caller: AtomicUsize::new(0),
            siblings: OnceLock::new(),
            exposed_sets: Mutex::new(Vec::new()),
            failure: OnceLock::new(),
        })
    }

    /// Sets the hosts of all shards of the stack, by number.
    pub(crate) fn set_siblings(&self, all: Vec<Weak<Host>>) {
        let _ = self.siblings.set(all);
    }

    /// Whether the stack has other shards.
    #[inline]
    pub(crate) fn has_siblings(&self) -> bool {
        self.siblings.get().is_some()
    }

    /// Wakes the leaders of the shards in this bit mask, whose rings are not empty. A leader that is awake checks
    /// its ring before it sleeps.
    fn kick_siblings(&self, mut shards: u32) {
        if shards == 0 {
            return;
        }
        handoff_fence();
        while shards != 0 {
            let host =
                self.siblings.get().and_then(|all| all.get(shards.trailing_zeros() as usize));
            if let Some(host) = host.and_then(Weak::upgrade)
                && let Some((kick, _)) = host.leader.sleeper()
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

    /// The ledger of the stack, which may be off.
    pub fn ledger(&self) -> &Arc<Ledger> {
        &self.ledger
    }

    /// The caller passes a stage outside of the lock.
    #[inline(always)]
    pub fn pass(&self, stage: Stage) {
        self.ledger.pass(stage);
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
    pub fn lock(&self) -> Result<Guard<'_>, SocketError> {
        self.lock_as(Role::Caller)
    }

    /// As [`Host::lock`]. Calls of the service thread are not counted as activity.
    #[inline(always)]
    pub(crate) fn lock_as(&self, role: Role) -> Result<Guard<'_>, SocketError> {
        let inside = self.enter()?;
        let mut guard = Guard::new(self, Some(self.shard()), inside);
        self.on_locked(&mut guard, role)?;
        Ok(guard)
    }

    /// Marks the thread as inside of the host: before it takes the lock.
    #[inline(always)]
    fn enter(&self) -> Result<Inside, SocketError> {
        if !self.is_ours() {
            return Err(SocketError::BadHandle);
        }
        let inside = self.bit.enter().ok_or(SocketError::WouldBlock)?;
        self.ledger.enter();
        Ok(inside)
    }

    /// The first work under the lock.
    #[inline(always)]
    fn on_locked(&self, shard: &mut WatchedShard, role: Role) -> Result<(), SocketError> {
        // A call must not overtake this thread's own earlier requests: a write that has ended would still block
        // the next one.
        if !self.drain_inbox(shard) {
            return Err(SocketError::NetworkDown);
        }
        if role == Role::Caller {
            self.end_turn_of_other(shard);
            // Only the holder of the lock writes it, so that no locked instruction is needed.
            let calls = self.activity.load(Ordering::Relaxed);
            self.activity.store(calls.wrapping_add(1), Ordering::Relaxed);
            self.note_caller(shard);
        }
        Ok(())
    }

    /// Ends the turn of an event loop when another thread calls: output that the turn deferred does not wait for the
    /// loop.
    #[inline(always)]
    fn end_turn_of_other(&self, shard: &mut WatchedShard) {
        if shard.is_in_turn_of_other() {
            shard.end_turn(sys::now());
        }
    }

    /// Waits for the lock.
    #[inline(always)]
    fn shard(&self) -> MutexGuard<'_, WatchedShard> {
        self.observed(self.shard.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The stages of the shard are reported if the visit of this thread is measured.
    #[inline(always)]
    fn observed<'a>(
        &self,
        mut shard: MutexGuard<'a, WatchedShard>,
    ) -> MutexGuard<'a, WatchedShard> {
        shard.stages().observe(self.ledger.is_measuring());
        shard
    }

    /// Counts locks that another thread held last, if the stack has several shards.
    #[inline]
    fn note_caller(&self, shard: &mut WatchedShard) {
        if !self.has_siblings() {
            return;
        }
        let (before, now) = (self.last_caller.load(Ordering::Relaxed), this_thread());
        if before != now {
            shard.count(Counter::SharedLocks, u64::from(before != 0));
            self.last_caller.store(now, Ordering::Relaxed);
        }
    }

    fn try_shard(&self) -> Option<MutexGuard<'_, WatchedShard>> {
        match self.shard.try_lock() {
            Ok(shard) => Some(self.observed(shard)),
            Err(TryLockError::Poisoned(p)) => Some(self.observed(p.into_inner())),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Runs one step of a socket that cannot wait.
    ///
    /// # Errors
    /// As [`Host::lock`], and the step's own.
    #[inline]
    pub fn call<R>(
        &self,
        f: impl FnOnce(&mut WatchedShard, Instant) -> Result<R, SocketError>,
    ) -> Result<R, SocketError> {
        self.call_at(Clock::Exact, f)
    }

    /// As [`Host::call`], with the exact time or a coarse one. Without a [`Guard`], which lives in memory: a
    /// datagram that is sent at once pays for no more than this.
    #[inline(always)]
    fn call_at<R>(
        &self,
        clock: Clock,
        f: impl FnOnce(&mut WatchedShard, Instant) -> Result<R, SocketError>,
    ) -> Result<R, SocketError> {
        let inside = self.enter()?;
        let mut shard = self.shard();
        let unwinding = OnUnwind::of(self);
        let done = self.on_locked(&mut shard, Role::Caller).and_then(|()| {
            let now = match clock {
                Clock::Exact => sys::now(),
                Clock::Coarse => self.coarse_now(&shard),
            };
            shard.pass(Stage::Locked);
            f(&mut shard, now)
        });
        unwinding.disarm();
        self.unlock(shard, inside);
        done
    }

    /// A time that is a few milliseconds old at most: the shard's own while the service thread ticks.
    #[inline(always)]
    fn coarse_now(&self, shard: &WatchedShard) -> Instant {
        if self.has_coarse_clock() { shard.now() } else { sys::coarse_now() }
    }

    /// Whether the shard's clock is a few milliseconds coarse.
    #[inline(always)]
    pub(crate) fn has_coarse_clock(&self) -> bool {
        self.has_coarse_clock.load(Ordering::Relaxed)
    }

    /// The service thread begins or ends to step the shard every few milliseconds.
    pub(crate) fn set_coarse_clock(&self, is_kept: bool) {
        self.has_coarse_clock.store(is_kept, Ordering::Relaxed);
    }

    /// The descriptor of a poll set, for an event loop of the program. From now on the service thread polls
    /// whenever no caller does.
    pub(crate) fn expose_set(&self, set: &Arc<PollSetCore>) -> RawFd {
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

    /// The driver, if there is one.
    pub(crate) fn driven(&self) -> Option<Arc<Driven>> {
        lock(&self.driver).clone()
    }

    /// A poll set was exposed that may have sockets of this shard.
    pub(crate) fn poll_for_sets(&self) {
        self.poll_sets.fetch_add(1, Ordering::SeqCst);
        self.service.unpark();
    }

    /// A poll set is gone.
    pub(crate) fn forget_set(&self, set: &PollSetCore) {
        if set.is_exposed() {
            self.poll_sets.fetch_sub(1, Ordering::AcqRel);
            lock(&self.exposed_sets).retain(|s| !std::ptr::eq(s.as_ptr(), set));
        }
    }

    /// Polls the stack once.
    ///
    /// # Errors
    /// As [`Host::lock`].
    pub fn poll(&self) -> Result<usize, SocketError> {
        Ok(self.lock()?.step(sys::now(), POLL_BUDGET))
    }

    /// The leader has returned to its program: wakes a follower, which becomes leader, else the service thread.
    fn promote_follower(&self) {
        if self.leader.has_driver() {
            // The driver takes the lead that a caller has left.
            return sys::signal_event(self.leader.kick_fd(Role::Driver));
        }
        if self.leader.is_held_by(Role::Caller) || self.leader.wake_follower() {
            return;
        }
        self.service.unpark();
        // The service thread may have slept on the device since before a caller took the lead: with an outdated
        // deadline, and without the wake-ups that the callers consumed.
        if !self.leader.is_held_by(Role::Service)
            && let Some(kick) = self.leader.sleeping(Role::Service)
        {
            sys::signal_event(kick);
        }
    }

    /// Unlocks; reports an earlier deadline to a leader that sleeps on the device.
    #[inline(always)]
    fn release(&self, shard: MutexGuard<'_, WatchedShard>) {
        match self.leader.sleeper() {
            None => drop(shard),
            Some((kick, until)) => self.release_past_sleeper(shard, kick, until),
        }
        after_release();
    }

    /// As [`Host::release`], while a leader sleeps on the device.
    #[inline(never)]
    fn release_past_sleeper(
        &self,
        shard: MutexGuard<'_, WatchedShard>,
        kick: RawFd,
        until: Instant,
    ) {
        let unwinding = OnUnwind::of(self);
        let is_late = is_late(until, shard.next_deadline());
        let wakes = is_late || self.is_service_overdue();
        unwinding.disarm();
        drop(shard);
        if wakes {
            sys::signal_event(kick);
        }
    }

    /// Whether the sleeping service thread is to be woken because calls are frequent: while it ticks, no call
    /// compares deadlines. With an exposed poll set it would only go to sleep again.
    fn is_service_overdue(&self) -> bool {
        // Written under the lock only.
        let calls = self.calls_past_service.load(Ordering::Relaxed) + 1;
        let often = calls >= CALLS_PAST_SERVICE;
        self.calls_past_service.store(if often { 0 } else { calls }, Ordering::Relaxed);
        often
            && self.poll_sets.load(Ordering::Relaxed) == 0
            && self.leader.is_held_by(Role::Service)
    }

    /// Ends the service thread. Sockets stay usable by threads that poll.
    pub fn stop(&self) {
        self.service.stop(self.leader.kick_fd(Role::Service));
    }
}

/// Whether a timer became due earlier than the sleeper knows. Less than a millisecond is not worth a
/// wake-up.
fn is_late(until: Instant, next: Option<Instant>) -> bool {
    next.is_some_and(|n| n + Duration::from_millis(1) < until)
}
