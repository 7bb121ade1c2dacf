//! How the threads of a shard wait for its device: what the policy says
//! ([`moderation`](fulmar_netdev::moderation)), told to the device where that can hold by itself.

use fulmar_base::{Counter, Instant, Probe};
use fulmar_netdev::moderation::{Moderation, ModerationConfig, Next};

use crate::shard::Shard;

impl<P: Probe> Shard<P> {
    /// A thread begins to wait for the device.
    pub fn start_waiting(&mut self, now: Instant) {
        self.moderation.start_waiting(now);
    }

    /// What a thread that waits does after a poll that found nothing. `may_look`: it is a thread that
    /// has nothing else to do.
    pub fn next_wait(&mut self, now: Instant, may_look: bool) -> Next {
        let next = self.moderation.next(now, may_look);
        self.tell_device();
        self.count_look();
        match next {
            // The device holds, or has to be asked for room.
            Next::Hold { .. } if self.has_registers || self.net.link.has_backlog() => Next::Arm,
            next => next,
        }
    }

    /// Whether a thread that waits was told never to sleep, whoever else may want the CPU.
    pub(crate) fn never_sleeps(&self) -> bool {
        self.config.moderation.min_spin == fulmar_base::Duration::MAX
    }

    /// Whether a thread that finds nothing to do looks at the device before it waits. Not where that has
    /// long been in vain, and nothing can be missed by sleeping at once.
    pub(crate) fn looks_first(&mut self, now: Instant) -> bool {
        let may_miss = !self.shows_what_waits() || self.next_deadline().is_some_and(|at| at <= now);
        may_miss || self.moderation.looks_first()
    }

    /// What that look brought.
    pub(crate) fn looked_first(&mut self, has_found: bool) {
        self.moderation.looked_first(has_found);
    }

    /// Whether the device's descriptor is readable whenever there is something to do for it.
    fn shows_what_waits(&mut self) -> bool {
        self.net.link.device().shows_what_waits() && !self.net.link.has_backlog() && !self.is_down()
    }

    /// How many frames a poll asks for at once, where there is room for so many.
    pub(crate) fn frames_to_ask(&mut self, room: usize) -> usize {
        if self.net.link.device().shows_what_waits() { self.moderation.ask(room) } else { room }
    }

    /// A thread has slept on the device.
    pub fn slept(&mut self) {
        self.moderation.slept();
    }

    /// Changes how threads wait for the device.
    pub fn set_moderation(&mut self, config: ModerationConfig) {
        self.config.moderation = config;
        self.moderation.set_config(config);
        self.tell_device();
    }

    /// How threads wait for the device, as of now.
    pub fn moderation(&self) -> &Moderation {
        &self.moderation
    }

    /// A step of the holds goes to the device, if that has registers for it.
    fn tell_device(&mut self) {
        if let Some(step) = self.moderation.take_change() {
            self.net.counters.count(Counter::HoldSteps);
            self.has_registers = self.net.link.device().coalesce(step).is_ok();
        }
    }

    /// A look at the device has ended.
    pub(crate) fn count_look(&mut self) {
        if let Some(took) = self.moderation.take_looked() {
            self.net.counters.count(Counter::Looks);
            self.net.counters.add(Counter::LookNs, took.as_nanos() as u64);
        }
    }
}
