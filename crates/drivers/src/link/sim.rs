//! The link on a virtual clock: what happens to a frame is decided when it is sent.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fulmar_base::{Counters, Instant};
use fulmar_mbuf::Pool;
use fulmar_netdev::impair::{Cuts, Impairments, Path, PathCounts};
use fulmar_netdev::{Burst, Caps, Device, DeviceStats, Rng, Tally, WakeFd, offload};

use super::LinkConfig;

/// Frames on their way in one direction: more than any window holds, so that only the queue in front
/// of a limited rate overflows. The memory is the sending pool's, which bounds it.
const IN_FLIGHT_PKTS: usize = 1 << 16;

/// One end of a simulated link. Deterministic: what arrives when follows from the seed and from
/// what was sent when. No object of the operating system, no clock.
pub struct SimLink {
    paths: Arc<[Mutex<Path>; 2]>,
    side: usize,
    caps: Caps,
    stats: DeviceStats,
}

/// Joins two stacks by a wire that treats both directions alike.
pub fn sim_pair(seed: u64, how: &Impairments, config: &LinkConfig) -> (SimLink, SimLink) {
    sim_pair_each_way(seed, [how, how], config)
}

/// Joins two stacks; `how[0]` is what happens to frames from the first end to the second.
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

/// The path of what one end of a simulated link sends.
#[derive(Clone)]
pub struct SentPath {
    paths: Arc<[Mutex<Path>; 2]>,
    side: usize,
}

impl SentPath {
    /// What was done so far to its packets.
    pub fn counts(&self) -> PathCounts {
        lock(&self.paths[self.side]).counts()
    }
}

fn lock(path: &Mutex<Path>) -> MutexGuard<'_, Path> {
    path.lock().unwrap_or_else(PoisonError::into_inner)
}

impl SimLink {
    /// The counts of the path of what this end sends, also after a stack has taken the device.
    pub fn sent_path(&self) -> SentPath {
        SentPath { paths: Arc::clone(&self.paths), side: self.side }
    }

    /// Path 0 carries what side 0 sends.
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
                counters.drop_packet(reason);
                pool.free(p.chain);
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
            tally.add(&p);
            // There is room: the number of rounds was bounded by it.
            let _ = out.push(p);
        }
        drop(path);
        self.stats.rx_crossings += 1;
        tally.received(counters, &mut self.stats);
        tally.frames as usize
    }

    /// Frames come by time only.
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
