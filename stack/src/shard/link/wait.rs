//! How the threads of a shard wait for its device: the policy
//! ([`moderation`](crate::device::moderation)), given to the device where it coalesces by itself.

use crate::base::Instant;
use crate::device::moderation::{BusyPoll, Moderation, ModerationConfig, Next};

use crate::shard::world::Shard;

impl Shard {
    /// The next action of a waiting thread after an empty poll.
    pub fn next_wait(&mut self, now: Instant, busy_poll: BusyPoll) -> Next {
        let next = match self.rx.is_drained {
            true => self.rx.moderation.next(now, busy_poll),
            // The last step ended at its budget.
            false => self.rx.moderation.next_unheld(now, busy_poll),
        };
        self.rx.coalesce(&mut self.core.net);
        self.rx.count_poll(&mut self.core.net.counters);
        match next {
            // The device coalesces by itself, or has to signal space.
            Next::Hold { .. }
                if self.core.net.link.caps().coalescing
                    || self.core.net.link.has_unsent_frames() =>
            {
                Next::Arm
            }
            next => next,
        }
    }

    /// Whether an event loop with other work polls once more instead of going to sleep. It never holds.
    pub fn polls_on(&mut self, now: Instant) -> bool {
        let next = self.rx.moderation.next_unheld(now, BusyPoll::Allowed);
        self.rx.count_poll(&mut self.core.net.counters);
        matches!(next, Next::BusyPoll { .. })
    }

    /// Changes how threads wait for the device.
    pub fn set_moderation(&mut self, config: ModerationConfig) {
        self.core.config.moderation = config;
        self.rx.moderation.set_config(config);
        self.rx.coalesce(&mut self.core.net);
    }

    /// The policy by which threads wait for the device. It is to be notified when a thread begins to wait, has
    /// polled and has slept.
    pub fn moderation(&mut self) -> &mut Moderation {
        &mut self.rx.moderation
    }
}

#[cfg(test)]
mod tests {
    use crate::base::{Counter, Duration, EtherAddr, SlotId};
    use crate::device::Caps;
    use crate::device::memory::{MemoryDevice, MemoryPort};
    use core::task::Poll;

    use super::*;
    use crate::shard::StackConfig;
    use crate::shard::world::FRAMES_AFTER_HOLD;

    /// A stack that only takes, another that sends to it, and the time.
    struct Flood {
        taker: Shard,
        sender: Shard,
        from: SlotId,
        ports: [MemoryPort; 2],
        now: Instant,
    }

    impl Flood {
        fn new() -> Flood {
            let now = Instant::from_millis(1);
            let stack = |host: u8| {
                let ether = EtherAddr([2, 0, 0, 0, 0, host]);
                let (device, port) = MemoryDevice::new(Caps::plain(1500, ether));
                let addr = [10, 0, 0, host].into();
                let addresses = vec![crate::ip::IfAddr { addr, prefix_len: 24 }];
                let secrets = Some(crate::base::Secrets::for_simulation(host.into()));
                let config = StackConfig { addresses, secrets, ..StackConfig::default() };
                (Shard::new(config, Box::new(device), now).unwrap(), port)
            };
            let ((mut taker, a), (mut sender, b)) = (stack(1), stack(2));
            let to = "10.0.0.1:9".parse().unwrap();
            let at = taker.udp().bind(to, Default::default()).unwrap();
            let from = sender.udp().open(to).unwrap();
            let mut flood = Flood { taker, sender, from, ports: [a, b], now };
            // Neighbours get to know each other.
            while !matches!(flood.taker.udp().receive(at), Ok(Poll::Ready(_))) {
                flood.send(1);
                flood.taker.step(now, 1);
                flood.carry();
                flood.sender.step(now, 1);
                flood.carry();
            }
            flood
        }

        fn send(&mut self, count: usize) {
            for _ in 0..count {
                self.sender.udp().send(self.now, self.from, &[&[0; 1000]], None).unwrap();
            }
            self.carry();
        }

        /// Takes each one's frames to the other.
        fn carry(&self) {
            let [a, b] = &self.ports;
            for (from, to) in [(a, b), (b, a)] {
                std::iter::from_fn(|| from.pop()).for_each(|frame| assert!(to.push(&frame)));
            }
        }

        /// As the flood goes on, until threads hold. When the hold ends.
        fn until_held(&mut self) -> Instant {
            for _ in 0..10_000 {
                self.send(16);
                self.taker.moderation().start_waiting(self.now);
                while self.taker.step_for_reader(self.now) > 0 {}
                self.now = self.now + Duration::from_micros(50);
                if let Next::Hold { until } = self.taker.next_wait(self.now, BusyPoll::Forbidden) {
                    return until;
                }
                self.taker.moderation().slept();
            }
            panic!("no hold in a flood");
        }
    }

    #[test]
    fn after_a_hold_a_reader_gets_the_first_frames_before_the_rest_is_taken() {
        let mut flood = Flood::new();
        flood.now = flood.until_held();
        flood.send(3 * FRAMES_AFTER_HOLD);
        flood.taker.moderation().slept();
        assert_eq!(flood.taker.step_for_reader(flood.now), FRAMES_AFTER_HOLD);
        assert_eq!(flood.taker.step_for_reader(flood.now), 2 * FRAMES_AFTER_HOLD);
    }

    #[test]
    fn a_wait_does_not_hold_while_the_device_has_more_frames() {
        let mut flood = Flood::new();
        flood.now = flood.until_held();
        // More than one step takes, by frames or by bytes.
        flood.send(200);
        flood.taker.moderation().slept();
        assert!(flood.taker.step_for_reader(flood.now) < 200);
        assert_eq!(flood.taker.next_wait(flood.now, BusyPoll::Forbidden), Next::Arm);
        while flood.taker.step_for_reader(flood.now) > 0 {}
        assert!(matches!(flood.taker.next_wait(flood.now, BusyPoll::Forbidden), Next::Hold { .. }));
    }

    #[test]
    fn an_ack_over_loopback_hides_no_answer_to_the_device() {
        let mut flood = Flood::new();
        let before = flood.taker.answers();
        assert!(before > 0, "neighbours were resolved");
        flood.taker.count(Counter::TcpAcksOut, before);
        flood.taker.count(Counter::Loopback, before);
        assert_eq!(flood.taker.answers(), before);
    }
}
