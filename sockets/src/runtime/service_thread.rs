//! The service thread: runs timers and receive when no caller does.
//!
//! ```text
//!   callers come and go     tick: run timers every TICK, poll the device if no caller did
//!   no calls since a tick   lead: poll the device, sleep on it
//!   a caller leads          back off: tick, and park after TICKS_BEFORE_PARKING
//!   a driver leads          stand by: wait for its descriptor, and lead if it does not turn
//! ```
//!
//! An idle stack uses no CPU.

use std::sync::{Arc, Weak};

use fulmar_stack::base::{Counter, Duration, Stage};
use fulmar_stack::device::moderation::{BusyPoll, Next};

use crate::runtime::contain::contain;
use crate::runtime::host::{Host, POLL_BUDGET};
use crate::runtime::leader::Role;
use crate::runtime::sync::{Ordering, lock};
use crate::runtime::sys;
use crate::runtime::waiter::Waiter;

/// How long no call may come before the service thread takes over: the latency that a packet may meet in that gap,
/// against 500 short wake-ups per second beside busy callers.
const TICK: Duration = Duration::from_millis(2);

/// Ticks while a caller leads after which the service thread parks.
const TICKS_BEFORE_PARKING: u32 = if cfg!(fulmar_loom) { 1 } else { 25 };

/// The first check for zero-copy memory that is returned after a failure, and the longest pause between two.
const FIRST_CHECK: std::time::Duration = std::time::Duration::from_millis(5);
const LONGEST_PAUSE: std::time::Duration = std::time::Duration::from_millis(500);

/// Starts the service thread of a host.
///
/// # Errors
/// The errno of thread creation.
pub fn start(host: &Arc<Host>, name: &str) -> std::io::Result<()> {
    let weak = Arc::downgrade(host);
    let thread = std::thread::Builder::new().name(format!("fulmar-{name}"));
    let handle = thread.spawn(move || run(&weak))?;
    *lock(&host.service.thread) = Some(handle);
    Ok(())
}

pub(crate) fn run(weak: &Weak<Host>) {
    sys::block_signals();
    let waiter = Waiter::current();
    if let Some(host) = weak.upgrade() {
        *lock(&host.service.waiter) = Some(Arc::clone(&waiter));
    }
    let mut service = ServiceThread { waiter, caller_ticks: 0, seen: 0, polls: 0 };
    while let Some(host) = weak.upgrade() {
        if host.service.is_stopping() {
            host.set_coarse_clock(false);
            return;
        }
        if host.has_failed() {
            host.dismantle();
            drop(host);
            return service.await_zero_copy(weak);
        }
        if contain(|| service.run_once(&host)).is_none() {
            // The stack is closed already if the thread held the lock.
            host.fail();
        }
    }
}

/// The state of the service thread.
struct ServiceThread {
    waiter: Arc<Waiter>,
    /// Ticks for which a caller has led.
    caller_ticks: u32,
    /// Calls at the last tick.
    seen: u64,
    /// Polls of the device at the last tick.
    polls: u64,
}

impl ServiceThread {
    fn run_once(&mut self, host: &Host) {
        if host.leader.is_led() {
            host.set_coarse_clock(false);
            if host.leader.has_driver() {
                return self.stand_by(host);
            }
            return self.back_off(host);
        }
        self.caller_ticks = 0;
        let calls = host.activity.load(Ordering::Relaxed);
        let callers_run_it = calls != self.seen && host.poll_sets.load(Ordering::Relaxed) == 0;
        self.seen = calls;
        if callers_run_it {
            self.run_timers(host);
            host.set_coarse_clock(true);
            return tick(host);
        }
        host.set_coarse_clock(false);
        if host.leader.try_take(Role::Service) {
            self.poll_device(host);
            host.leader.resign(Role::Service);
        }
    }

    /// A driver leads: stands in while it is stuck.
    fn stand_by(&mut self, host: &Host) {
        if host.is_driver_stuck() {
            self.poll_device(host);
            host.leader.resign(Role::Service);
        }
    }

    /// Runs timers and deferred output, and keeps the coarse clock, between the calls of a busy program. Frames are
    /// left to the callers, in whose caches they belong. Not every call polls the device (a getter, a datagram
    /// sent): if none did since the last tick, frames are received here.
    fn run_timers(&mut self, host: &Host) {
        let Ok(mut guard) = host.lock_as(Role::Service) else { return };
        let callers_poll = guard.counters().value(Counter::RxPolls) != self.polls;
        let now = sys::now();
        if callers_poll && guard.is_in_turn(now) {
            // The event loop runs the timers with its next wait.
            guard.flush_turn(now);
        } else {
            guard.step(now, if callers_poll { 0 } else { POLL_BUDGET });
        }
        self.polls = guard.counters().value(Counter::RxPolls);
    }

    /// A caller leads.
    fn back_off(&mut self, host: &Host) {
        self.caller_ticks += 1;
        if self.caller_ticks < TICKS_BEFORE_PARKING {
            return tick(host);
        }
        self.waiter.reset();
        // Before the role is read: a leader that resigns reads `is_parked` afterwards.
        host.service.is_parked.store(true, Ordering::SeqCst);
        let is_over = host.service.is_stopping() || host.has_failed();
        if host.leader.is_led() && !is_over {
            self.waiter.park(None);
            host.pass(Stage::Slept);
        }
        host.service.is_parked.store(false, Ordering::SeqCst);
        self.caller_ticks = 0;
    }

    /// After a failure: zero-copy memory that a peer on this machine still reads is returned without a notification.
    /// Checks until none is referenced.
    fn await_zero_copy(&self, weak: &Weak<Host>) {
        let mut pause = FIRST_CHECK;
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

    /// Leads, until a caller takes the lead or is seen to run the stack.
    fn poll_device(&mut self, host: &Host) {
        while host.leader.is_held_by(Role::Service) && !host.service.is_stopping() {
            let Ok(mut guard) = host.lock_as(Role::Service) else { return };
            let now = sys::now();
            guard.step(now, POLL_BUDGET);
            self.waiter.reset();
            // It never busy-polls: the program may want the CPU.
            let hold = match guard.next_wait(now, BusyPoll::Forbidden) {
                Next::Hold { until } => Some(until),
                Next::BusyPoll { .. } | Next::Arm => None,
            };
            let slept = host.sleep_on_device(guard, Role::Service, &self.waiter, None, hold);
            let Ok(mut guard) = slept else { return };
            let calls = host.activity.load(Ordering::Relaxed);
            let callers_run_it = calls != self.seen && host.poll_sets.load(Ordering::Relaxed) == 0;
            if callers_run_it && !host.leader.has_driver() {
                guard.step(sys::now(), POLL_BUDGET);
                return;
            }
        }
    }
}

fn tick(host: &Host) {
    sys::sleep(TICK);
    host.pass(Stage::Slept);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::drivers::link::{Link, LinkConfig, pair};
    use crate::runtime::Ledger;
    use crate::runtime::WatchedShard;
    use crate::runtime::host::CALLS_PAST_SERVICE;
    use fulmar_stack::shard::{Shard, StackConfig};

    fn config(host: u8) -> StackConfig {
        let addr = [10, 0, 0, host].into();
        StackConfig {
            addresses: vec![fulmar_stack::ip::IfAddr { addr, prefix_len: 24 }],
            secrets: Some(fulmar_stack::base::Secrets::for_simulation(host.into())),
            ..StackConfig::default()
        }
    }

    fn host(device: Link) -> std::io::Result<Host> {
        let shard = Shard::new(config(1), Box::new(device), sys::now()).unwrap();
        Host::new(WatchedShard::new(shard), Ledger::off())
    }

    /// Asks the other side; the next step finds whether it has answered.
    fn ask(peer: &mut Shard) {
        let ping = peer.icmp().open().unwrap();
        peer.icmp().send_request(sys::now(), ping, ([10, 0, 0, 1], 0).into(), 1, b"?").unwrap();
    }

    #[test]
    fn frames_are_left_to_callers_that_poll_the_device() {
        let (p, q) = pair(&LinkConfig::default()).unwrap();
        let host = host(p).unwrap();
        let mut peer = Shard::new(config(2), Box::new(q), sys::now()).unwrap();
        let mut service =
            ServiceThread { waiter: Waiter::current(), caller_ticks: 0, seen: 0, polls: 0 };
        service.run_timers(&host);

        ask(&mut peer);
        // A call, but none that receives.
        host.call(|_, _| Ok(())).unwrap();
        service.run_timers(&host);
        assert!(peer.step(sys::now(), 10) > 0, "the frame was not received");

        while host.poll().unwrap() + peer.step(sys::now(), 10) > 0 {}
        ask(&mut peer);
        service.run_timers(&host);
        assert_eq!(peer.step(sys::now(), 10), 0, "the frame is left to the caller");
        host.poll().unwrap();
        assert!(peer.step(sys::now(), 10) > 0);
    }

    #[test]
    fn frequent_calls_wake_the_sleeping_service_thread() {
        let (p, _q) = pair(&LinkConfig::default()).unwrap();
        let host = host(p).unwrap();
        let is_kicked = || {
            let timer = host.leader.timer_at(Role::Service, sys::now());
            let is_kicked = sys::sleep_on(None, host.leader.kick_fd(Role::Service), timer);
            sys::clear_event(host.leader.kick_fd(Role::Service));
            is_kicked
        };
        let calls = |n| (0..n).for_each(|_| host.call(|_, _| Ok(())).unwrap());
        // Until a time before which no timer is due.
        assert!(host.leader.try_take(Role::Service));
        host.leader.will_sleep(Role::Service, sys::now());
        calls(CALLS_PAST_SERVICE - 1);
        assert!(!is_kicked());
        calls(1);
        assert!(is_kicked());
        // With an exposed poll set it would only go to sleep again.
        host.poll_for_sets();
        calls(CALLS_PAST_SERVICE);
        assert!(!is_kicked());
    }

    #[test]
    fn the_clock_is_coarse_only_while_the_service_thread_ticks() {
        let (p, _q) = pair(&LinkConfig::default()).unwrap();
        let host = host(p).unwrap();
        let mut service =
            ServiceThread { waiter: Waiter::current(), caller_ticks: 0, seen: 0, polls: 0 };
        assert!(!host.has_coarse_clock());
        host.call(|_, _| Ok(())).unwrap();
        let before = sys::now();
        service.run_once(&host);
        assert!(host.has_coarse_clock());
        assert!(host.lock().unwrap().now() >= before, "the shard knows what the tick saw");
        // A caller sleeps on the device: the service thread may park.
        assert!(host.leader.try_take(Role::Caller));
        service.run_once(&host);
        assert!(!host.has_coarse_clock());
    }
}
