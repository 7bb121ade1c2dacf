//! The shard under test and its clock. Nothing happens but by [`World::run_until`] and by the calls of sockets,
//! so a script that waits for an hour takes as long as its events.

use std::collections::VecDeque;

use fulmar_stack::base::Instant;
use fulmar_stack::shard::Shard;

use crate::cable::Cable;
use crate::dialect;
use crate::settings::{Dialect, Settings};

/// The time at which a script starts: late enough for every difference of times to be positive.
const START: Instant = Instant::from_millis(1_000_000);

/// Steps at one time, at most: a deadline that does not pass would stop the clock.
const STEPS_AT_ONCE: usize = 1000;

/// A shard, its device and the time.
pub struct World {
    now: Instant,
    settings: Settings,
    /// The packets that the shard sent and the script has not seen, with the time.
    sent: VecDeque<(Instant, Vec<u8>)>,
    /// Made by the first use, since scripts set sysctls before they open sockets.
    stack: Option<Stack>,
}

struct Stack {
    shard: Shard,
    cable: Cable,
}

impl Stack {
    fn new(settings: &Settings, now: Instant) -> Stack {
        let (device, cable) = Cable::new(settings.mtu());
        let shard = Shard::new(settings.stack_config(), Box::new(device), now);
        Stack { shard: shard.expect("invariant: the configuration is our own"), cable }
    }
}

impl Default for World {
    fn default() -> World {
        World::new(Settings::default())
    }
}

impl World {
    /// A world whose stack is configured by `settings`.
    pub fn new(settings: Settings) -> World {
        World { now: START, settings, sent: VecDeque::new(), stack: None }
    }

    /// The time.
    pub fn now(&self) -> Instant {
        self.now
    }

    /// The sysctls.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Replaces the sysctls. A stack that is in use keeps its configuration; options of new listeners follow.
    pub fn set_settings(&mut self, settings: Settings) {
        self.settings = settings;
    }

    fn stack(&mut self) -> &mut Stack {
        self.stack.get_or_insert_with(|| Stack::new(&self.settings, self.now))
    }

    /// The shard.
    pub fn shard(&mut self) -> &mut Shard {
        &mut self.stack().shard
    }

    /// Runs a call of the shard at the present time, and everything that follows from it at once.
    pub fn call<T>(&mut self, f: impl FnOnce(&mut Shard, Instant) -> T) -> T {
        let now = self.now;
        let answer = f(self.shard(), now);
        self.settle();
        answer
    }

    /// The shard receives a packet.
    pub fn inject(&mut self, packet: &[u8]) {
        self.stack().cable.inject(packet);
        self.settle();
    }

    /// The next packet that the shard has sent, with its time.
    pub fn take_sent(&mut self) -> Option<(Instant, Vec<u8>)> {
        self.sent.pop_front()
    }

    /// When the shard has to be stepped next.
    pub fn next_deadline(&self) -> Option<Instant> {
        let stack = self.stack.as_ref()?;
        stack.shard.next_deadline().map(|at| at.max(self.now))
    }

    /// Lets time pass to `at` and runs what is due then. A time that has passed is the present.
    pub fn run_until(&mut self, at: Instant) {
        self.now = self.now.max(at);
        self.settle();
    }

    /// Everything that the shard can do at the present time.
    fn settle(&mut self) {
        let (now, dialect) = (self.now, self.settings.dialect());
        let ignores_push = self.settings.ignores_push();
        let Some(stack) = &mut self.stack else { return };
        for _ in 0..STEPS_AT_ONCE {
            stack.shard.step(now, 64);
            for mut packet in stack.cable.take_sent() {
                if dialect == Dialect::FreeBsd {
                    dialect::reorder_options(&mut packet);
                }
                if ignores_push {
                    dialect::clear_push(&mut packet);
                }
                self.sent.push_back((now, packet));
            }
            let is_due = stack.shard.next_deadline().is_some_and(|at| at <= now);
            if !is_due && !stack.cable.has_arriving() {
                break;
            }
        }
    }

    /// Microseconds of the clock since an epoch of its own.
    pub fn now_us(&self) -> u64 {
        self.now.as_nanos() / 1000
    }
}

/// Microseconds of a time, on the clock of [`World::now_us`].
pub fn micros(at: Instant) -> u64 {
    at.as_nanos() / 1000
}
