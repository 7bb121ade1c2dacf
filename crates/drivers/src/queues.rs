//! A device cut into queues, one for each shard of a stack, on a virtual clock.
//!
//! What a NIC's hardware does with several queues is done here in software, in front of any device: each
//! received frame goes to one queue, as [`Steering`] says. For the simulation and for tests of what shards
//! do with packets on the wrong queue: the queues share the device under a lock, and no thread is woken
//! ([`Device::wake_fd`] is `None`), so that time alone drives them. Several queues that run by themselves
//! are those of an interface ([`crate::tap::Tap::open_queues`]).
//!
//! **Bounds.** A queue holds 1024 frames. While one is full nothing is taken from the device, which
//! holds back what comes or drops it by its own rules.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fulmar_base::{Counters, DropReason, FlowKey, Instant, OwnerKey};
use fulmar_mbuf::Pool;
use fulmar_netdev::{
    Attachment, Burst, Caps, Device, DeviceStats, Packet, Rng, Tally, TxTime, Wake, WakeFd,
};

use fulmar_wire::dissect::Network;

/// Frames that wait in one queue at most.
const LANE: usize = 1024;

/// Frames taken from the device at a time.
const BATCH: usize = 64;

/// Flows that the hardware remembers at most, as the kernel's TAP does.
const LEARNED: usize = 4096;

/// Which queue a received frame goes to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Steering {
    /// That of the shard which owns its flow: hardware with the stack's own hash. What has no flow goes
    /// to the first.
    Owner,
    /// The queue that has last sent a frame of its flow, as a TAP does; any, if none has.
    Sender {
        /// Decides about flows of which nothing was sent.
        seed: u64,
    },
    /// Any, frame by frame: the worst that can be.
    Any {
        /// Decides.
        seed: u64,
    },
}

/// What the queues share.
struct Trunk {
    device: Box<dyn Device>,
    lanes: Vec<VecDeque<Packet>>,
    taken: Burst,
    steering: Steering,
    /// By which the shards own flows, once the stack has told.
    owner: OwnerKey,
    rng: Rng,
    learned: HashMap<FlowKey, u16>,
}

/// One queue of a device.
pub struct Queue {
    trunk: Arc<Mutex<Trunk>>,
    number: u16,
    caps: Caps,
    stats: DeviceStats,
}

/// Cuts a device into `count` queues (at least one).
pub fn cut(device: Box<dyn Device>, count: u16, steering: Steering) -> Vec<Queue> {
    let count = count.max(1);
    let caps = Caps {
        queues: count,
        tx_time: TxTime::Exact,
        wake: Wake::Armed,
        coalescing: false,
        places_on_receive: false,
        ..device.caps().inspected()
    };
    let seed = match steering {
        Steering::Owner => 0,
        Steering::Sender { seed } | Steering::Any { seed } => seed,
    };
    let trunk = Arc::new(Mutex::new(Trunk {
        device,
        lanes: (0..count).map(|_| VecDeque::new()).collect(),
        taken: Burst::with_capacity(BATCH),
        steering,
        owner: OwnerKey::new([0; OwnerKey::WORDS]),
        rng: Rng::new(seed),
        learned: HashMap::new(),
    }));
    let queue = |number| Queue {
        trunk: Arc::clone(&trunk),
        number,
        caps,
        stats: DeviceStats { name: format!("queue {number} of {count}"), ..DeviceStats::default() },
    };
    (0..count).map(queue).collect()
}

/// The flow of a frame, seen from here; ports are 0 where there are none. `None` for what is no whole packet of
/// a flow.
fn flow_of(p: &Packet, received: bool) -> Option<FlowKey> {
    let front = p.chain.front()?.as_slice();
    let network = Network::parse(front, p.chain.len())?;
    let flow = network.flow(network.ports(front).unwrap_or_default());
    Some(if received { flow } else { FlowKey::new(flow.remote(), flow.local()) })
}

impl Trunk {
    fn any(&mut self) -> u16 {
        self.rng.below(self.lanes.len() as u64) as u16
    }

    fn queue_of(&mut self, p: &Packet) -> u16 {
        let flow = flow_of(p, true);
        match (self.steering, flow) {
            (Steering::Owner, Some(flow)) => self.owner.owner(&flow, self.lanes.len() as u16),
            (Steering::Owner, None) => 0,
            (Steering::Any { .. }, _) => self.any(),
            (Steering::Sender { .. }, flow) => {
                let known = flow.and_then(|f| self.learned.get(&f).copied());
                known.unwrap_or_else(|| self.any())
            }
        }
    }

    /// Notes which queue sends the frames' flows.
    fn learn(&mut self, queue: u16, burst: &Burst) {
        if !matches!(self.steering, Steering::Sender { .. }) {
            return;
        }
        for flow in burst.iter().filter_map(|p| flow_of(p, false)) {
            if self.learned.len() < LEARNED || self.learned.contains_key(&flow) {
                self.learned.insert(flow, queue);
            }
        }
    }

    /// Brings what has come to the queues.
    fn distribute(&mut self, now: Instant, pool: &mut Pool, counters: &mut Counters) {
        loop {
            let room = self.lanes.iter().map(|l| LANE - l.len()).min().unwrap_or(0).min(BATCH);
            if room == 0 {
                return;
            }
            // Its frames are counted by the queue that hands them over; its drops here.
            let mut inner = Counters::default();
            let n = self.device.rx_burst(now, pool, &mut self.taken, room, &mut inner);
            for reason in DropReason::ALL {
                (0..inner.drops(*reason)).for_each(|_| counters.drop_packet(*reason));
            }
            while let Some(p) = self.taken.pop_front() {
                let queue = usize::from(self.queue_of(&p));
                if let Some(lane) = self.lanes.get_mut(queue) {
                    lane.push_back(p);
                }
            }
            if n < room {
                return;
            }
        }
    }
}

impl Queue {
    fn trunk(&self) -> MutexGuard<'_, Trunk> {
        self.trunk.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Device for Queue {
    fn caps(&self) -> &Caps {
        &self.caps
    }

    fn attach(&mut self, owner: &OwnerKey) -> Attachment {
        self.trunk().owner = *owner;
        Attachment::default()
    }

    fn tx_burst(
        &mut self,
        now: Instant,
        pool: &mut Pool,
        burst: &mut Burst,
        counters: &mut Counters,
    ) -> usize {
        let before = counters.value(fulmar_base::Counter::TxFrames);
        let mut trunk = self.trunk();
        trunk.learn(self.number, burst);
        let taken = trunk.device.tx_burst(now, pool, burst, counters);
        drop(trunk);
        self.stats.tx_crossings += 1;
        self.stats.tx_frames += counters.value(fulmar_base::Counter::TxFrames) - before;
        taken
    }

    fn tx_reap(&mut self, now: Instant, pool: &mut Pool) -> usize {
        self.trunk().device.tx_reap(now, pool)
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
        let mut trunk = self.trunk();
        trunk.distribute(now, pool, counters);
        if let Some(lane) = trunk.lanes.get_mut(usize::from(self.number)) {
            for p in lane.drain(..budget.min(out.space()).min(lane.len())) {
                tally.add(&p);
                // There is room: the number of rounds was bounded by it.
                let _ = out.push(p);
            }
        }
        drop(trunk);
        self.stats.rx_crossings += 1;
        tally.received(counters, &mut self.stats);
        tally.frames as usize
    }

    fn arm(&mut self) -> bool {
        let mut trunk = self.trunk();
        let is_empty = trunk.lanes.get(usize::from(self.number)).is_none_or(VecDeque::is_empty);
        is_empty && trunk.device.arm()
    }

    fn disarm(&mut self) {
        self.trunk().device.disarm();
    }

    fn wake_fd(&self) -> Option<WakeFd> {
        None
    }

    fn lost(&self) -> Option<i32> {
        self.trunk().device.lost()
    }

    fn next_deadline(&self) -> Option<Instant> {
        let trunk = self.trunk();
        match trunk.lanes.get(usize::from(self.number)) {
            Some(lane) if !lane.is_empty() => Some(Instant::ZERO),
            _ => trunk.device.next_deadline(),
        }
    }

    fn stats(&self) -> DeviceStats {
        self.stats.clone()
    }
}
