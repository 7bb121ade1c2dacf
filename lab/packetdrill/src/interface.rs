//! A machine for the two threads of packetdrill: one plays the script, the other makes the calls that block.
//!
//! Time passes only in calls of the first thread (`usleep`, `netdev_receive`, reading the clock). After each change it
//! makes blocked calls check their condition again. It waits until each call is blocked again, or has returned **and
//! packetdrill has the time of its return**, which packetdrill gets by reading the clock. So a script gives the same
//! result each time.
//!
//! A call that would block the first thread advances the clock itself, because no other thread does.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};

use fulmar_stack::base::{Duration, Instant};

use crate::sockets::{Answer, Machine, Refusal};
use crate::world::micros;

/// How long the first thread waits for another one, in real time: only a bug takes longer.
const PATIENCE: std::time::Duration = std::time::Duration::from_secs(2);

/// How far the clock is moved for a packet or for a call of the first thread. Beyond it nothing comes.
const HORIZON: Duration = Duration::from_secs(3 * 3600);

/// Most deadlines that one wait may pass.
const MAX_EVENTS: usize = 1_000_000;

/// A machine and those who wait for it.
pub struct Interface {
    inner: Mutex<Inner>,
    changed: Condvar,
    /// The thread that plays the script.
    player: ThreadId,
}

struct Inner {
    machine: Machine,
    /// Calls that are blocked.
    parked: usize,
    /// Blocked calls that have not looked at the last change.
    to_recheck: usize,
    /// Counts changes.
    generation: u64,
    /// A thread whose blocked call has ended, until it has read the clock.
    returning: Option<ThreadId>,
    /// When the time-out of a blocked call expires.
    wake_at: Option<Instant>,
    /// Whether the last call only read the clock.
    was_clock: bool,
}

/// When a call stops waiting.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wait {
    /// It does not wait: EAGAIN.
    Never,
    /// At this time.
    Until(Instant),
    /// Never.
    Forever,
}

impl Interface {
    /// For the thread that calls, which plays the script.
    pub fn new(machine: Machine) -> Interface {
        let inner = Inner {
            machine,
            parked: 0,
            to_recheck: 0,
            generation: 0,
            returning: None,
            wake_at: None,
            was_clock: false,
        };
        Interface {
            inner: Mutex::new(inner),
            changed: Condvar::new(),
            player: thread::current().id(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn enter(&self) -> MutexGuard<'_, Inner> {
        let mut inner = self.lock();
        inner.was_clock = false;
        self.end_return(&mut inner);
        inner
    }

    /// The thread that calls has returned from whatever it was blocked in.
    fn end_return(&self, inner: &mut Inner) {
        if inner.returning == Some(thread::current().id()) {
            inner.returning = None;
            self.changed.notify_all();
        }
    }

    /// Repeats a step until it is done, fails or has waited long enough.
    ///
    /// # Errors
    /// An errno: the step's, or EAGAIN.
    pub fn call<T>(
        &self,
        wait: Wait,
        mut step: impl FnMut(&mut Machine) -> Answer<T>,
    ) -> Result<T, i32> {
        let mut inner = self.enter();
        let mut has_parked = false;
        let answer = loop {
            match step(&mut inner.machine) {
                Ok(answer) => break Ok(answer),
                Err(Refusal::Errno(errno)) => break Err(errno),
                Err(Refusal::WouldBlock) => {}
            }
            let now = inner.machine.world.now();
            match wait {
                Wait::Never => break Err(libc::EAGAIN),
                Wait::Until(at) if now >= at => break Err(libc::EAGAIN),
                _ => {}
            }
            if thread::current().id() == self.player {
                if !self.pass_an_event(&mut inner, wait) {
                    break Err(libc::EAGAIN);
                }
            } else {
                inner = self.park(inner, wait, &mut has_parked);
            }
        };
        inner.machine.note_edges();
        if has_parked {
            inner.to_recheck = inner.to_recheck.saturating_sub(1);
            inner.returning = Some(thread::current().id());
            self.changed.notify_all();
        } else if thread::current().id() == self.player {
            drop(self.publish(inner));
        }
        answer
    }

    /// Blocks until something has changed.
    fn park<'a>(
        &'a self,
        mut inner: MutexGuard<'a, Inner>,
        wait: Wait,
        has_parked: &mut bool,
    ) -> MutexGuard<'a, Inner> {
        if *has_parked {
            inner.to_recheck = inner.to_recheck.saturating_sub(1);
            self.changed.notify_all();
        }
        *has_parked = true;
        let seen = inner.generation;
        inner.parked += 1;
        if let Wait::Until(at) = wait {
            inner.wake_at = Some(inner.wake_at.map_or(at, |w| w.min(at)));
        }
        while inner.generation == seen {
            inner = self.changed.wait(inner).unwrap_or_else(PoisonError::into_inner);
        }
        inner.parked -= 1;
        inner.wake_at = None;
        inner
    }

    /// Lets blocked calls look at what has changed.
    fn publish<'a>(&'a self, mut inner: MutexGuard<'a, Inner>) -> MutexGuard<'a, Inner> {
        inner.machine.note_edges();
        if inner.parked > 0 {
            inner.generation += 1;
            inner.to_recheck = inner.parked;
            self.changed.notify_all();
        }
        while inner.to_recheck > 0 || inner.returning.is_some() {
            let (guard, time) =
                self.changed.wait_timeout(inner, PATIENCE).unwrap_or_else(PoisonError::into_inner);
            inner = guard;
            if time.timed_out() {
                inner.to_recheck = 0;
                inner.returning = None;
            }
        }
        inner
    }

    /// The next time at which something happens.
    fn next_event(inner: &Inner) -> Option<Instant> {
        let (shard, caller) = (inner.machine.world.next_deadline(), inner.wake_at);
        shard.into_iter().chain(caller).min()
    }

    /// Moves the clock to the next event for a call of the player. False if there is none.
    fn pass_an_event(&self, inner: &mut Inner, wait: Wait) -> bool {
        let now = inner.machine.world.now();
        let until = if let Wait::Until(at) = wait { Some(at) } else { None };
        let next = inner.machine.world.next_deadline().into_iter().chain(until).min();
        let Some(at) = next.filter(|at| at.since(now) < HORIZON) else { return false };
        inner.machine.world.run_until(at.max(now));
        inner.machine.note_edges();
        true
    }

    /// Lets time pass to `target`, one event after the other.
    fn advance<'a>(
        &'a self,
        mut inner: MutexGuard<'a, Inner>,
        target: Instant,
    ) -> MutexGuard<'a, Inner> {
        for _ in 0..MAX_EVENTS {
            let next = Interface::next_event(&inner).filter(|at| *at <= target);
            let Some(at) = next else { break };
            inner.machine.world.run_until(at);
            inner = self.publish(inner);
        }
        inner.machine.world.run_until(target);
        self.publish(inner)
    }

    /// usleep(3).
    pub fn sleep(&self, time: Duration) {
        let inner = self.enter();
        let target = inner.machine.world.now() + time;
        drop(self.advance(inner, target));
    }

    /// gettimeofday(2), in microseconds. Each repeated reading by one thread returns a microsecond more, because
    /// packetdrill spins for the last microseconds of a wait.
    pub fn clock_us(&self) -> u64 {
        let mut inner = self.lock();
        let has_returned = inner.returning == Some(thread::current().id());
        self.end_return(&mut inner);
        if inner.was_clock && !has_returned {
            let target = inner.machine.world.now() + Duration::from_micros(1);
            inner = self.advance(inner, target);
        }
        inner.was_clock = true;
        inner.machine.world.now_us()
    }

    /// The present time.
    pub fn now(&self) -> Instant {
        self.lock().machine.world.now()
    }

    /// The shard receives a packet.
    pub fn inject(&self, packet: &[u8]) {
        let mut inner = self.enter();
        inner.machine.world.inject(packet);
        drop(self.publish(inner));
    }

    /// The next packet that the shard sends, with its time in microseconds; `None` if none comes for hours.
    pub fn next_sent(&self) -> Option<(u64, Vec<u8>)> {
        let mut inner = self.enter();
        let limit = inner.machine.world.now() + HORIZON;
        for _ in 0..MAX_EVENTS {
            if let Some((at, packet)) = inner.machine.world.take_sent() {
                return Some((micros(at), packet));
            }
            let at = Interface::next_event(&inner).filter(|at| *at <= limit)?;
            inner.machine.world.run_until(at);
            inner = self.publish(inner);
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    fn socket(interface: &Interface) -> i32 {
        let call = |m: &mut Machine| m.socket(libc::AF_INET, libc::SOCK_STREAM, 0);
        interface.call(Wait::Never, call).unwrap()
    }

    #[test]
    fn a_blocked_call_ends_at_the_time_of_the_event_that_ends_it() {
        let interface = Arc::new(Interface::new(Machine::default()));
        let fd = socket(&interface);
        let (other, start) = (Arc::clone(&interface), interface.now());
        let blocked = thread::spawn(move || {
            let peer = "192.0.2.1:80".parse().unwrap();
            let mut connecting = false;
            let answer = other.call(Wait::Forever, |m| {
                if std::mem::replace(&mut connecting, true) {
                    m.connected(fd)
                } else {
                    m.connect(fd, peer)
                }
            });
            (answer, other.clock_us())
        });
        while interface.lock().parked == 0 {
            thread::yield_now();
        }
        interface.sleep(Duration::from_secs(1000));
        let (answer, ended_us) = blocked.join().unwrap();
        assert_eq!(answer, Err(libc::ETIMEDOUT));
        // The user time-out, to the granularity of the timer wheel.
        let ended = ended_us - micros(start);
        assert!((120_000_000..120_002_000).contains(&ended), "{ended}");
    }

    #[test]
    fn a_call_that_blocks_the_player_moves_the_clock_to_its_time_out() {
        let interface = Interface::new(Machine::default());
        let fd = socket(&interface);
        let peer = "192.0.2.1:80".parse().unwrap();
        let mut connecting = false;
        let answer = interface.call(Wait::Until(interface.now() + Duration::from_secs(10)), |m| {
            if std::mem::replace(&mut connecting, true) {
                m.connected(fd)
            } else {
                m.connect(fd, peer)
            }
        });
        assert_eq!(answer, Err(libc::EAGAIN));
        assert_eq!(interface.now().as_nanos(), 1_010_000_000_000);
    }
}
