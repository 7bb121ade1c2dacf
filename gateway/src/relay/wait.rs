//! How the loop waits: it busy-polls where events have lately come within the time of a wake-up, and sleeps otherwise.
//!
//! A request and its answer pass the gateway microseconds apart. A sleep between them costs two wake-ups across CPUs,
//! each paid by the thread that sends as well: 10 µs in a virtual machine. The policy is that of every stack
//! ([`moderation`](fulmar_stack::device::moderation)): a wait of 60 µs at most is polled, and a gateway whose events come
//! more rarely than that polls once and sleeps. Nothing is held back: whatever comes ends the wait.
//!
//! The thread yields between polls ([`Spin`]), so that the ends of a connection run that share its CPU.

use std::io;

use fulmar::internals::runtime::Spin;
use fulmar_stack::base::{Duration, Instant, Stage};
use fulmar_stack::device::moderation::{BusyPoll, Moderation, ModerationConfig, Next};

use super::Clock;
use super::poll::{Events, Poll};

/// No hold: the host's sockets would wait with the guest's frames.
const CONFIG: ModerationConfig =
    ModerationConfig { max_hold: Duration::ZERO, ..ModerationConfig::ADAPTIVE };

/// The waits of a loop, and what it has learnt from them.
pub(crate) struct Waits {
    moderation: Moderation,
    spin: Spin,
}

impl Default for Waits {
    fn default() -> Self {
        Waits { moderation: Moderation::new(CONFIG), spin: Spin::new(None) }
    }
}

impl Waits {
    /// Waits until something happens or `until` passes; `None`: for as long as it takes. Returns how the time went:
    /// [`Stage::Slept`], or [`Stage::Spun`].
    ///
    /// # Errors
    /// Those of epoll_wait.
    pub(crate) fn wait(
        &mut self,
        poll: &Poll,
        events: &mut Events,
        clock: Clock,
        until: Option<Instant>,
    ) -> io::Result<Stage> {
        let now = clock.now();
        if until.is_some_and(|at| at <= now) {
            poll.wait(events, now, until)?;
            return Ok(Stage::Spun);
        }
        self.moderation.start_waiting(now);
        let how = match self.busy_poll(poll, events, clock, until)? {
            0 => {
                poll.wait(events, clock.now(), until)?;
                self.moderation.slept();
                Stage::Slept
            }
            _ => Stage::Spun,
        };
        self.moderation.polled(clock.now(), events.len(), 0, 0);
        Ok(how)
    }

    /// Polls as long as the policy says; the number of events, zero when the thread is to sleep.
    fn busy_poll(
        &mut self,
        poll: &Poll,
        events: &mut Events,
        clock: Clock,
        until: Option<Instant>,
    ) -> io::Result<usize> {
        let mut others_ran = Duration::ZERO;
        let may_poll = self.spin.may_poll();
        while may_poll && others_ran.is_zero() {
            let now = clock.now();
            let next = self.moderation.next(now, BusyPoll::Allowed);
            if !matches!(next, Next::BusyPoll { .. }) || until.is_some_and(|at| at <= now) {
                return Ok(0);
            }
            let came = poll.wait(events, now, Some(Instant::ZERO))?;
            if came > 0 {
                return Ok(came);
            }
            others_ran = self.spin.yield_now();
            self.moderation.yielded(others_ran);
        }
        Ok(0)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixStream;
    use std::time;

    use super::super::poll::Token;
    use super::*;

    struct Loop {
        waits: Waits,
        poll: Poll,
        clock: Clock,
        events: Events,
        peer: UnixStream,
        _own: UnixStream,
    }

    fn start() -> Loop {
        let (own, peer) = UnixStream::pair().unwrap();
        let poll = Poll::new().unwrap();
        poll.add_arrivals(&own, Token::Siblings).unwrap();
        let (waits, events) = (Waits::default(), Events::default());
        Loop { waits, poll, clock: Clock::start(), events, peer, _own: own }
    }

    impl Loop {
        fn wait(&mut self, time: Duration) -> Stage {
            let until = Some(self.clock.now() + time);
            self.waits.wait(&self.poll, &mut self.events, self.clock, until).unwrap()
        }
    }

    #[test]
    fn events_that_come_at_once_lengthen_the_busy_poll() {
        let mut l = start();
        // One that a busy machine has delayed shortens it.
        let is_longer = (0..100).any(|_| {
            l.peer.write_all(&[1]).unwrap();
            l.wait(Duration::from_secs(60));
            assert_eq!(l.events.len(), 1);
            l.waits.moderation.spin() > CONFIG.min_spin
        });
        assert!(is_longer);
    }

    #[test]
    fn events_that_come_rarely_are_slept_for() {
        let mut l = start();
        for _ in 0..10 {
            let mut peer = l.peer.try_clone().unwrap();
            let sender = std::thread::spawn(move || {
                std::thread::sleep(time::Duration::from_millis(2));
                peer.write_all(&[1]).unwrap();
            });
            // The sender may have been faster than this thread.
            let (begun, how) = (l.clock.now(), l.wait(Duration::from_secs(60)));
            let is_rare = l.clock.now().since(begun) > Duration::from_millis(1);
            assert!(!is_rare || how == Stage::Slept);
            sender.join().unwrap();
        }
    }

    #[test]
    fn waits_that_time_out_do_not_extend_busy_polling() {
        let mut l = start();
        for _ in 0..10 {
            l.wait(Duration::from_millis(1));
            assert_eq!(l.events.len(), 0);
        }
        assert_eq!(l.waits.moderation.spin(), CONFIG.min_spin);
    }
}
