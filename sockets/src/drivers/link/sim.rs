//! The link on a virtual clock: the fate of a frame (delay, loss, ...) is decided when it is sent.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fulmar_stack::base::{Counters, Instant};
use fulmar_stack::device::impair::{Cuts, Impairments, Path, PathCounts};
use fulmar_stack::device::{Burst, Caps, Device, DeviceStats, Rng, Tally, WakeFd, offload};
use fulmar_stack::mbuf::Pool;

use super::LinkConfig;

/// Most frames in flight in one direction: more than any window, so that only the queue in front of a
/// limited rate overflows. Their memory is bounded by the sender's pool.
const IN_FLIGHT_PKTS: usize = 1 << 16;

/// One end of a simulated link. Deterministic: arrivals follow from the seed and the times of sending. It
/// uses no clock and no descriptor.
pub struct SimLink {
    paths: Arc<[Mutex<Path>; 2]>,
    side: usize,
    caps: Caps,
    stats: DeviceStats,
}

/// Joins two stacks. Both directions have the same impairments.
pub fn sim_pair(seed: u64, how: &Impairments, config: &LinkConfig) -> (SimLink, SimLink) {
    sim_pair_each_way(seed, [how, how], config)
}

/// Joins two stacks. `how[0]` has the impairments from the first end to the second, `how[1]` those of the
/// other direction.
pub fn sim_pair_each_way(
    seed: u64,
    how: [&Impairments; 2],
    config: &LinkConfig,
) -> (SimLink, SimLink) {
    let mut seeds = Rng::new(seed);
    let (there, back) = (seeds.number(), seeds.number());
    let path = |seed, how| Mutex::new(Path::new(seed, how, IN_FLIGHT_PKTS, Cuts::Shared));
    let paths = Arc::new([path(there, how[0]), path(back, how[1])]);
    let end = |side: usize| SimLink {
        paths: Arc::clone(&paths),
        side,
        caps: config.caps(side),
        stats: DeviceStats { name: format!("sim-link{side}"), ..DeviceStats::default() },
    };
    (end(0), end(1))
}

/// The path of one direction of a simulated link.
#[derive(Clone)]
pub struct SentPath {
    paths: Arc<[Mutex<Path>; 2]>,
    side: usize,
}

impl SentPath {
    /// The counts so far.
    pub fn counts(&self) -> PathCounts {
        lock(&self.paths[self.side]).counts()
    }

    /// Changes the impairments of the frames that are sent from now on.
    pub fn set(&self, how: &Impairments) {
        lock(&self.paths[self.side]).set(how);
    }
}

fn lock(path: &Mutex<Path>) -> MutexGuard<'_, Path> {
    path.lock().unwrap_or_else(PoisonError::into_inner)
}

impl SimLink {
    /// The path of the frames that this end sends. It remains usable after a stack has taken the device.
    pub fn sent_path(&self) -> SentPath {
        SentPath { paths: Arc::clone(&self.paths), side: self.side }
    }

    /// Path 0 carries the frames of side 0.
    fn path(&self, index: usize) -> MutexGuard<'_, Path> {
        lock(&self.paths[index])
    }
}

impl Device for SimLink {
    fn caps(&self) -> &Caps {
        &self.caps
    }

    fn tx_burst(
        &mut self,
        now: Instant,
        pool: &mut Pool,
        burst: &mut Burst,
        counters: &mut Counters,
    ) -> usize {
        let taken = burst.len();
        let mut tally = Tally::default();
        let mut path = self.path(self.side);
        while let Some(p) = burst.pop_front() {
            if let Err(reason) = offload::check(&p, &self.caps) {
                p.discard(reason, pool, counters);
                continue;
            }
            tally.add(&p);
            path.send(now, p, pool, counters);
        }
        drop(path);
        self.stats.tx_crossings += 1;
        tally.sent(counters, &mut self.stats);
        taken
    }

    fn rx_burst(
        &mut self,
        now: Instant,
        pool: &mut Pool,
        out: &mut Burst,
        budget: usize,
        counters: &mut Counters,
    ) -> usize {
        let mut tally = Tally::default();
        let mut path = self.path(1 - self.side);
        for _ in 0..budget.min(out.space()) {
            let Some(p) = path.pop_due(now, pool, counters) else { break };
            tally.receive(p, out);
        }
        drop(path);
        self.stats.rx_crossings += 1;
        tally.received(counters, &mut self.stats);
        tally.frames as usize
    }

    /// No wake-up: frames arrive with time only.
    fn wake_fd(&self) -> Option<WakeFd> {
        None
    }

    fn next_deadline(&self) -> Option<Instant> {
        self.path(1 - self.side).next_due()
    }

    fn stats(&self) -> DeviceStats {
        self.stats.clone()
    }
}
