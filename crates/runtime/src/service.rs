//! The service thread: runs timers and receive when nobody else does.
//!
//! While callers run the stack it only ticks, to see whether they still do; when they have stopped
//! it takes the poll baton and sleeps on the device; while a caller holds the baton for long, asleep
//! on the device itself, it is parked and costs nothing. An idle stack uses no CPU.

use std::os::fd::RawFd;
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;

use fulmar_base::{Counter, Duration, Outside, Probe, Stage};
use fulmar_netdev::moderation::Next;

use crate::contain::contain;
use crate::host::{Host, POLL_BUDGET};
use crate::leader::Role;
use crate::sync::{AtomicBool, Mutex, Ordering, lock};
use crate::sys;
use crate::waiter::Waiter;

/// How long callers may be out of the stack before the service thread takes over: the delay that a
/// packet may meet in that gap, against 500 short wake-ups per second beside busy callers.
const TICK: Duration = Duration::from_millis(2);

/// Ticks with the baton in a caller's hands after which the service thread parks.
const TICKS_BEFORE_PARKING: u32 = if cfg!(fulmar_loom) { 1 } else { 25 };

/// The first look for memory that comes home after a failure, and the longest pause between two.
const FIRST_LOOK: std::time::Duration = std::time::Duration::from_millis(5);
const LONGEST_PAUSE: std::time::Duration = std::time::Duration::from_millis(500);

/// What a host knows of its service thread.
#[derive(Default)]
pub struct Service {
    thread: Mutex<Option<JoinHandle<()>>>,
    waiter: Mutex<Option<Arc<Waiter>>>,
    /// In a sleep that only [`Service::unpark`] ends.
    is_parked: AtomicBool,
    is_stopping: AtomicBool,
}

impl Service {
    /// Nobody polls any more: out of the long sleep, if it is in it.
    pub fn unpark(&self) {
        if self.is_parked.load(Ordering::SeqCst) && self.is_parked.swap(false, Ordering::SeqCst) {
            self.wake();
        }
    }

    /// Out of any sleep that is not on the device.
    pub fn wake(&self) {
        if let Some(w) = &*lock(&self.waiter) {
            w.wake();
        }
    }

    /// Ends the thread and waits for it.
    pub fn stop(&self, kick: RawFd) {
        self.is_stopping.store(true, Ordering::SeqCst);
        sys::signal_event(kick);
        self.wake();
        let handle = lock(&self.thread).take();
        if let Some(h) = handle
            && h.thread().id() != std::thread::current().id()
        {
            // If it panicked, the panic has been printed already.
            let _ = h.join();
        }
    }

    fn is_stopping(&self) -> bool {
        self.is_stopping.load(Ordering::SeqCst)
    }
}

/// Starts the service thread of a host.
///
/// # Errors
/// The errno of thread creation.
pub fn start<P: Probe>(host: &Arc<Host<P>>, name: &str) -> std::io::Result<()> {
    let weak = Arc::downgrade(host);
    let thread = std::thread::Builder::new().name(format!("fulmar-{name}"));
    let handle = thread.spawn(move || run(&weak))?;
    *lock(&host.service.thread) = Some(handle);
    Ok(())
}

pub(crate) fn run<P: Probe>(weak: &Weak<Host<P>>) {
    sys::block_signals();
    let waiter = Waiter::current();
    if let Some(host) = weak.upgrade() {
        *lock(&host.service.waiter) = Some(Arc::clone(&waiter));
    }
    let mut watchman = Watchman { waiter, held_ticks: 0, seen: 0, polls: 0 };
    while let Some(host) = weak.upgrade() {
        if host.service.is_stopping() {
            host.tell_time(false);
            return;
        }
        if host.has_failed() {
            host.dismantle();
            drop(host);
            return watchman.await_returns(weak);
        }
        if contain(|| watchman.turn(&host)).is_none() {
            // The stack is closed already if the thread had its lock.
            host.fail();
        }
    }
}

/// The service thread's own state.
struct Watchman {
    waiter: Arc<Waiter>,
    /// Ticks for which a caller has had the baton.
    held_ticks: u32,
    /// The count of calls when last looked at.
    seen: u64,
    /// The count of polls of the device when last looked at.
    polls: u64,
}

impl Watchman {
    fn turn<P: Probe>(&mut self, host: &Host<P>) {
        if host.baton.is_held_by(Role::Caller) {
            host.tell_time(false);
            return self.stay_away(host);
        }
        self.held_ticks = 0;
        let calls = host.activity.load(Ordering::Relaxed);
        let callers_run_it = calls != self.seen && host.poll_sets.load(Ordering::Relaxed) == 0;
        self.seen = calls;
        if callers_run_it {
            self.look_after(host);
            host.tell_time(true);
            return doze(host);
        }
        host.tell_time(false);
        if host.baton.try_take(Role::Service) {
            self.stand_in(host);
            host.baton.leave(Role::Service);
        }
    }

    /// Between the calls of others only the timers need somebody, and what was held for the next
    /// call, and the time, that not every call has to read the clock; the frames stay for the callers,
    /// whose caches they belong in. But not every call looks at the device (a getter, a datagram sent): if
    /// none did, the frames would wait for ever.
    fn look_after<P: Probe>(&mut self, host: &Host<P>) {
        let Ok(mut guard) = host.lock_quietly() else { return };
        let callers_poll = guard.counters().value(Counter::RxPolls) != self.polls;
        guard.step(sys::now(), if callers_poll { 0 } else { POLL_BUDGET });
        self.polls = guard.counters().value(Counter::RxPolls);
    }

    /// A caller polls for all.
    fn stay_away<P: Probe>(&mut self, host: &Host<P>) {
        self.held_ticks += 1;
        if self.held_ticks < TICKS_BEFORE_PARKING {
            return doze(host);
        }
        self.waiter.reset();
        // Before the look at the baton: who leaves it looks here afterwards.
        host.service.is_parked.store(true, Ordering::SeqCst);
        let is_over = host.service.is_stopping() || host.has_failed();
        if host.baton.is_held_by(Role::Caller) && !is_over {
            self.waiter.park(None);
            let _ = host.outside().stage(Stage::Slept);
        }
        host.service.is_parked.store(false, Ordering::SeqCst);
        self.held_ticks = 0;
    }

    /// After a failure: memory that the program gave away, and that a peer on this machine still reads,
    /// comes home without a word. Looks for it until none is out.
    fn await_returns<P: Probe>(&self, weak: &Weak<Host<P>>) {
        let mut pause = FIRST_LOOK;
        loop {
            self.waiter.reset();
            match weak.upgrade() {
                Some(host) if !host.service.is_stopping() && host.take_returns() > 0 => {}
                _ => return,
            }
            self.waiter.park(Some(pause));
            pause = (2 * pause).min(LONGEST_PAUSE);
        }
    }

    /// Polls for everybody, until a caller takes the baton or is seen to run the stack.
    fn stand_in<P: Probe>(&mut self, host: &Host<P>) {
        while host.baton.is_held_by(Role::Service) && !host.service.is_stopping() {
            let Ok(mut guard) = host.lock_quietly() else { return };
            let now = sys::now();
            guard.step(now, POLL_BUDGET);
            self.waiter.reset();
            // It looks at nothing for long: the CPU may be the program's.
            let hold = match guard.next_wait(now, false) {
                Next::Hold { until } => Some(until),
                Next::Look { .. } | Next::Arm => None,
            };
            let slept = host.sleep_on_device(guard, Role::Service, &self.waiter, None, hold);
            let Ok(mut guard) = slept else { return };
            let calls = host.activity.load(Ordering::Relaxed);
            if calls != self.seen && host.poll_sets.load(Ordering::Relaxed) == 0 {
                guard.step(sys::now(), POLL_BUDGET);
                return;
            }
        }
    }
}

fn doze<P: Probe>(host: &Host<P>) {
    sys::sleep(TICK);
    let _ = host.outside().stage(Stage::Slept);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::WatchedShard;
    use crate::host::CALLS_BESIDE_SERVICE;
    use fulmar_base::NoProbe;
    use fulmar_drivers::link::{Link, LinkConfig, pair};
    use fulmar_shard::{Shard, StackConfig};

    fn config(host: u8) -> StackConfig {
        let addr = [10, 0, 0, host].into();
        StackConfig {
            addresses: vec![fulmar_ip::IfAddr { addr, prefix_len: 24 }],
            secrets: Some(fulmar_base::Secrets::for_simulation(host.into())),
            ..StackConfig::default()
        }
    }

    fn host(device: Link) -> std::io::Result<Host<NoProbe>> {
        Host::new(WatchedShard::new(Shard::new(config(1), Box::new(device), sys::now()).unwrap()))
    }

    /// Asks the other side something; whether it has answered is what the next step finds.
    fn ask(peer: &mut Shard) {
        let ping = peer.ping_open();
        peer.ping_send(sys::now(), ping, ([10, 0, 0, 1], 0).into(), 1, b"?").unwrap();
    }

    #[test]
    fn frames_are_left_to_callers_who_look_at_the_device_and_to_nobody_else() {
        let (p, q) = pair(&LinkConfig::default()).unwrap();
        let host = host(p).unwrap();
        let mut peer = Shard::new(config(2), Box::new(q), sys::now()).unwrap();
        let mut watchman = Watchman { waiter: Waiter::current(), held_ticks: 0, seen: 0, polls: 0 };
        watchman.look_after(&host);

        ask(&mut peer);
        // A call, but none that receives.
        host.call(|_, _| Ok(())).unwrap();
        watchman.look_after(&host);
        assert!(peer.step(sys::now(), 10) > 0, "nobody took the frame");

        while host.poll().unwrap() + peer.step(sys::now(), 10) > 0 {}
        ask(&mut peer);
        watchman.look_after(&host);
        assert_eq!(peer.step(sys::now(), 10), 0, "the caller would have taken it");
        host.poll().unwrap();
        assert!(peer.step(sys::now(), 10) > 0);
    }

    #[test]
    fn callers_who_come_often_beside_the_sleeping_service_thread_wake_it() {
        let (p, _q) = pair(&LinkConfig::default()).unwrap();
        let host = host(p).unwrap();
        let is_kicked = || {
            let timer = host.baton.timer_at(Role::Service, sys::now());
            let is_kicked = sys::sleep_on(None, host.baton.kick_fd(Role::Service), timer);
            sys::clear_event(host.baton.kick_fd(Role::Service));
            is_kicked
        };
        let calls = |n| (0..n).for_each(|_| host.call(|_, _| Ok(())).unwrap());
        // Until a time before which no timer is due.
        assert!(host.baton.try_take(Role::Service));
        host.baton.will_sleep(Role::Service, sys::now());
        calls(CALLS_BESIDE_SERVICE - 1);
        assert!(!is_kicked());
        calls(1);
        assert!(is_kicked());
        // A poll set would send it to sleep again, and a caller who sleeps waits for what is his.
        host.poll_for_sets();
        calls(CALLS_BESIDE_SERVICE);
        assert!(!is_kicked());
    }

    #[test]
    fn callers_are_told_the_time_while_the_service_thread_ticks_and_no_longer() {
        let (p, _q) = pair(&LinkConfig::default()).unwrap();
        let host = host(p).unwrap();
        let mut watchman = Watchman { waiter: Waiter::current(), held_ticks: 0, seen: 0, polls: 0 };
        assert!(!host.tells_time());
        host.call(|_, _| Ok(())).unwrap();
        let before = sys::now();
        watchman.turn(&host);
        assert!(host.tells_time());
        assert!(host.lock().unwrap().now() >= before, "the shard knows what the tick saw");
        // A caller that sleeps on the device: the service thread may not look for long.
        assert!(host.baton.try_take(Role::Caller));
        watchman.turn(&host);
        assert!(!host.tells_time());
    }
}
