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
