//! Multi-queue in software in front of any device: receive-side scaling for tests on a virtual clock.
//!
//! [`Steering`] selects the queue of each received frame, as a NIC does. For the simulation, and for tests with packets
//! on the wrong queue. The queues share the device under a lock and are polled: no thread is woken ([`Device::wake_fd`]
//! is `None`). The queues of a TAP wake threads ([`Tap::open_queues`](crate::drivers::tap::Tap::open_queues)).
//!
//! **Bounds.** A queue holds 1024 frames. While one queue is full the device is not polled; it
//! queues or drops frames by its own rules.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fulmar_stack::base::{Counters, DropReason, FlowKey, Instant, OwnerKey};
use fulmar_stack::device::{
    Attachment, Burst, Caps, Device, DeviceStats, Packet, Rng, Tally, TxTime, Wake, WakeFd,
};
use fulmar_stack::mbuf::Pool;

use fulmar_stack::wire::dissect::Network;

/// Most frames of one queue.
const QUEUE_FRAMES: usize = 1024;

/// Frames received from the device at a time.
const BATCH: usize = 64;

/// Most flows that are learnt, as in the kernel's TAP.
const LEARNED: usize = 4096;

/// The rule for the queue of a received frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(clippy::exhaustive_enums, reason = "internal: its users are released with it")]
pub enum Steering {
    /// The queue of the shard that owns the flow: RSS with the stack's own hash. A frame without a flow
    /// goes to the first queue.
    Owner,
    /// The queue that last sent a frame of the flow, as a TAP does; a random one if none has.
    Sender {
        /// Seed of the choice for flows that have sent nothing.
        seed: u64,
    },
    /// A random queue for each frame: the worst case.
    Any {
        /// Seed of the choice.
        seed: u64,
    },
}

/// The state that the queues share.
struct Shared {
    device: Box<dyn Device>,
    queues: Vec<VecDeque<Packet>>,
    taken: Burst,
    steering: Steering,
    /// The key of flow ownership, once [`Device::attach`] has set it.
    owner: OwnerKey,
    rng: Rng,
    learned: HashMap<FlowKey, u16>,
}

/// One queue of a device.
pub struct Queue {
    shared: Arc<Mutex<Shared>>,
    number: u16,
    caps: Caps,
    stats: DeviceStats,
}

/// Splits a device into `count` queues (at least one).
pub fn split(device: Box<dyn Device>, count: u16, steering: Steering) -> Vec<Queue> {
    let count = count.max(1);
    let caps = Caps {
        queues: count,
        tx_time: TxTime::Exact,
        wake: Wake::Armed,
        coalescing: false,
        places_on_receive: false,
        ..device.caps().exact_time()
    };
    let seed = match steering {
        Steering::Owner => 0,
        Steering::Sender { seed } | Steering::Any { seed } => seed,
    };
    let shared = Arc::new(Mutex::new(Shared {
        device,
        queues: (0..count).map(|_| VecDeque::new()).collect(),
        taken: Burst::with_capacity(BATCH),
        steering,
        owner: OwnerKey::new([0; OwnerKey::WORDS]),
        rng: Rng::new(seed),
        learned: HashMap::new(),
    }));
    let queue = |number| Queue {
        shared: Arc::clone(&shared),
        number,
        caps,
        stats: DeviceStats { name: format!("queue {number} of {count}"), ..DeviceStats::default() },
    };
    (0..count).map(queue).collect()
}

/// The flow of a frame from this stack's point of view; ports are 0 without a transport. `None`: not a
/// whole packet.
fn flow_of_received(p: &Packet) -> Option<FlowKey> {
    let front = p.chain.front()?.as_slice();
    let network = Network::parse(front, p.chain.len())?;
    Some(network.flow(network.ports(front).unwrap_or_default()))
}

fn flow_of_sent(p: &Packet) -> Option<FlowKey> {
    flow_of_received(p).map(|flow| FlowKey::new(flow.remote(), flow.local()))
}

impl Shared {
    fn any(&mut self) -> u16 {
        self.rng.below(self.queues.len() as u64) as u16
    }

    fn queue_of(&mut self, p: &Packet) -> u16 {
        let flow = flow_of_received(p);
        match (self.steering, flow) {
            (Steering::Owner, Some(flow)) => self.owner.owner(&flow, self.queues.len() as u16),
            (Steering::Owner, None) => 0,
            (Steering::Any { .. }, _) => self.any(),
            (Steering::Sender { .. }, flow) => {
                let known = flow.and_then(|f| self.learned.get(&f).copied());
                known.unwrap_or_else(|| self.any())
            }
        }
    }

    /// Learns the queue of each sent flow.
    fn learn(&mut self, queue: u16, burst: &Burst) {
        if !matches!(self.steering, Steering::Sender { .. }) {
            return;
        }
        for flow in burst.iter().filter_map(flow_of_sent) {
            if self.learned.len() < LEARNED || self.learned.contains_key(&flow) {
                self.learned.insert(flow, queue);
            }
        }
    }

    /// Receives from the device into the queues.
    fn distribute(&mut self, now: Instant, pool: &mut Pool, counters: &mut Counters) {
        loop {
            let space =
                self.queues.iter().map(|l| QUEUE_FRAMES - l.len()).min().unwrap_or(0).min(BATCH);
            if space == 0 {
                return;
            }
            // Frames are counted by the queue that hands them up; drops are counted here.
            let mut inner = Counters::default();
            let n = self.device.rx_burst(now, pool, &mut self.taken, space, &mut inner);
            for reason in DropReason::ALL {
                (0..inner.drops(*reason)).for_each(|_| counters.drop_packet(*reason));
            }
            while let Some(p) = self.taken.pop_front() {
                let queue = usize::from(self.queue_of(&p));
                if let Some(lane) = self.queues.get_mut(queue) {
                    lane.push_back(p);
                }
            }
            if n < space {
                return;
            }
        }
    }
}

impl Queue {
    fn shared(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Device for Queue {
    fn caps(&self) -> &Caps {
        &self.caps
    }

    fn attach(&mut self, owner: &OwnerKey) -> Attachment {
        self.shared().owner = *owner;
        Attachment::default()
    }

    fn tx_burst(
        &mut self,
        now: Instant,
        pool: &mut Pool,
        burst: &mut Burst,
        counters: &mut Counters,
    ) -> usize {
        let before = counters.value(fulmar_stack::base::Counter::TxFrames);
        let mut shared = self.shared();
        shared.learn(self.number, burst);
        let taken = shared.device.tx_burst(now, pool, burst, counters);
        drop(shared);
        self.stats.tx_crossings += 1;
        self.stats.tx_frames += counters.value(fulmar_stack::base::Counter::TxFrames) - before;
        taken
    }

    fn tx_reap(&mut self, now: Instant, pool: &mut Pool) -> usize {
        self.shared().device.tx_reap(now, pool)
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
        let mut shared = self.shared();
        shared.distribute(now, pool, counters);
        if let Some(lane) = shared.queues.get_mut(usize::from(self.number)) {
            for p in lane.drain(..budget.min(out.space()).min(lane.len())) {
                tally.receive(p, out);
            }
        }
        drop(shared);
        self.stats.rx_crossings += 1;
        tally.received(counters, &mut self.stats);
        tally.frames as usize
    }

    fn arm(&mut self) -> bool {
        let mut shared = self.shared();
        let is_empty = shared.queues.get(usize::from(self.number)).is_none_or(VecDeque::is_empty);
        is_empty && shared.device.arm()
    }

    fn disarm(&mut self) {
        self.shared().device.disarm();
    }

    fn wake_fd(&self) -> Option<WakeFd> {
        None
    }

    fn lost(&self) -> Option<i32> {
        self.shared().device.lost()
    }

    fn next_deadline(&self) -> Option<Instant> {
        let shared = self.shared();
        match shared.queues.get(usize::from(self.number)) {
            Some(lane) if !lane.is_empty() => Some(Instant::ZERO),
            _ => shared.device.next_deadline(),
        }
    }

    fn stats(&self) -> DeviceStats {
        self.stats.clone()
    }
}
