//! Two stations on a virtual clock, 10.0.0.1 and 10.0.0.2, over any two devices.
//!
//! Time passes at the deadlines of the stations ([`World::pass`]), at once ([`World::step`]), or to the next deadline
//! ([`World::advance`]).

use std::task::Poll;

use fulmar::internals::drivers::link::{Impairments, LinkConfig, sim_pair};
use fulmar::internals::runtime::WatchedShard;
use fulmar_stack::base::{Duration, Instant, SlotId};
use fulmar_stack::device::Device;
use fulmar_stack::shard::{ListenOptions, Shard, StackConfig};

use crate::stations::at;

/// The time at which a world begins.
pub const START: Instant = Instant::from_millis(1000);
/// Frames of a step at most.
const FRAMES: usize = 256;
/// Steps at one time, at most: a deadline that does not pass would stop the clock.
const STEPS_AT_ONCE: usize = 10_000;

/// See the module's header.
pub struct World {
    /// The virtual time.
    pub now: Instant,
    /// The stations.
    pub shards: [WatchedShard; 2],
}

impl World {
    /// Two stations over these devices.
    ///
    /// # Panics
    ///
    /// If a stack refuses its configuration.
    pub fn new(devices: [Box<dyn Device>; 2], config: impl Fn(u8) -> StackConfig) -> World {
        let [near, far] = devices;
        let shard = |station, device| {
            WatchedShard::new(Shard::new(config(station), device, START).expect("a shard"))
        };
        World { now: START, shards: [shard(0, near), shard(1, far)] }
    }

    /// Two stations over a simulated link with the same impairments in both directions.
    pub fn linked(seed: u64, how: &Impairments, config: impl Fn(u8) -> StackConfig) -> World {
        let (near, far) = sim_pair(seed, how, &LinkConfig::default());
        World::new([Box::new(near), Box::new(far)], config)
    }

    /// Lets time pass at once, then steps both stations.
    pub fn step(&mut self, time: Duration) {
        self.now = self.now + time;
        for s in &mut self.shards {
            s.step(self.now, FRAMES);
        }
    }

    /// Lets time pass to the next deadline, at most for `most`, then steps both stations.
    pub fn advance(&mut self, most: Duration) {
        let next = self.shards.iter().filter_map(|s| s.next_deadline()).min();
        let soon = Duration::from_micros(1);
        self.step(next.map_or(most, |at| at.since(self.now).clamp(soon, most)));
    }

    /// Lets time pass. Each station is stepped at its own deadlines and at no other time.
    pub fn pass(&mut self, time: Duration) {
        self.pass_with(time, |_, _| ());
    }

    /// As [`World::pass`]; after each step of a station its program runs.
    ///
    /// # Panics
    ///
    /// If a deadline does not pass.
    pub fn pass_with(&mut self, time: Duration, mut program: impl FnMut(&mut World, usize)) {
        let (end, mut steps) = (self.now + time, 0);
        while steps < STEPS_AT_ONCE {
            let next = self.shards.iter().filter_map(|s| s.next_deadline()).min();
            let Some(next) = next.filter(|at| *at <= end) else {
                self.now = end;
                return;
            };
            steps = if next > self.now { 0 } else { steps + 1 };
            self.now = self.now.max(next);
            for station in 0..2 {
                let shard = &mut self.shards[station];
                if shard.next_deadline().is_some_and(|at| at <= self.now) {
                    shard.step(self.now, FRAMES);
                    program(self, station);
                }
            }
        }
        panic!("a deadline that is due stays due");
    }

    /// Station 1 listens.
    pub fn listen(&mut self, port: u16) -> SlotId {
        self.shards[1].tcp_listen(at(1, port), ListenOptions::default()).expect("a free port")
    }

    /// The next connection of a listener of station 1.
    pub fn accept(&mut self, listener: SlotId) -> Option<SlotId> {
        match self.shards[1].tcp_accept(listener).expect("a listener") {
            Poll::Ready((id, _)) => Some(id),
            Poll::Pending => None,
        }
    }

    /// A connection from station 0 to a listener of station 1: the ends.
    ///
    /// # Panics
    ///
    /// If none is accepted within a minute.
    pub fn connect(&mut self, listener: SlotId) -> [SlotId; 2] {
        let to = self.shards[1].addresses(listener).expect("a listener").0.expect("it is bound");
        let client = self.shards[0].tcp_connect(self.now, to, None).expect("a connection");
        let end = self.now + Duration::from_secs(60);
        while self.now < end {
            self.advance(Duration::from_millis(1));
            if let Some(server) = self.accept(listener) {
                return [client, server];
            }
        }
        panic!("no connection");
    }
}
