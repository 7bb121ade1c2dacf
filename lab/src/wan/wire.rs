//! The path between the ends of `bench wan`: a thread that moves frames from one device to another through [`Path`]s,
//! the same for every kind of end.
//!
//! Frames other than IP pass at once: a lost ARP request would measure ARP. A frame goes to the device of the other
//! side that last sent from its destination's address, or to all of them.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use fulmar_stack::base::{Counters, Instant, OwnerKey};
use fulmar_stack::device::impair::{Cuts, Impairments, Path, PathCounts, duplicate};
use fulmar_stack::device::{Burst, Device, Packet};
use fulmar_stack::mbuf::{Pool, PoolConfig};
use fulmar_stack::wire::eth;

use crate::sys;

const BURST_FRAMES: usize = 64;
const POOL_BYTES: usize = 512 << 20;
/// Most frames in flight in one direction.
const CAPACITY: usize = 1 << 17;
/// The longest sleep, which bounds the time until a wire stops when asked to.
const LONGEST_SLEEP: Duration = Duration::from_millis(20);
/// A time at which every frame is due.
const FOREVER: Instant = Instant::from_nanos(u64::MAX);
/// Shorter waits are spent polling: a sleep takes about as long.
const SHORTEST_SLEEP: Duration = Duration::from_micros(60);

/// An end of the wire: a device, and the hardware address that it last sent from.
struct Port {
    device: Box<dyn Device>,
    heard: [u8; 6],
}

/// The devices at both sides, and the memory for frames on their way.
pub struct Wire {
    /// Senders, then receivers.
    ports: Vec<Port>,
    /// How many of them are senders.
    senders: usize,
    pool: Pool,
    counters: Counters,
    fresh: Burst,
    /// Frames that a device has not taken yet, by port.
    ready: Vec<Burst>,
}

impl Wire {
    /// A wire between the devices in `near` and those in `far`.
    pub fn new(near: Vec<Box<dyn Device>>, far: Vec<Box<dyn Device>>) -> io::Result<Wire> {
        let config = PoolConfig { huge_pages: false, ..PoolConfig::with_budget(POOL_BYTES) };
        let pool = Pool::new(config).map_err(|e| io::Error::other(format!("{e:?}")))?;
        let senders = near.len();
        let mut ports: Vec<Port> =
            near.into_iter().chain(far).map(|device| Port { device, heard: [0; 6] }).collect();
        for port in &mut ports {
            port.device.attach(&OwnerKey::new([1; OwnerKey::WORDS]));
        }
        let ready = ports.iter().map(|_| Burst::with_capacity(BURST_FRAMES)).collect();
        let fresh = Burst::with_capacity(BURST_FRAMES);
        Ok(Wire { ports, senders, pool, counters: Counters::default(), fresh, ready })
    }

    /// Moves frames until it is stopped; returns the statistics of frames from near to far.
    pub fn run(
        &mut self,
        seed: u64,
        [there, back]: [&Impairments; 2],
        stop: &AtomicBool,
    ) -> io::Result<PathCounts> {
        // The default slack of a timer is as long as a packet takes at 200 Mb/s.
        sys::set_timer_slack(Duration::from_nanos(1))?;
        let mut is_armed = false;
        let mut there = Path::new(seed, there, CAPACITY, Cuts::Runs);
        let mut back = Path::new(seed ^ 1, back, CAPACITY, Cuts::Runs);
        while !stop.load(Ordering::Relaxed) {
            let now = fulmar::internals::runtime::now();
            let received = self.receive(now, &mut there, &mut back);
            let moved = received + self.send(now, &mut there, &mut back);
            // Frames that a device has not taken are offered again at once.
            let refused = self.ready.iter().any(|r| !r.is_empty()).then_some(now);
            let due = [&there, &back].into_iter().filter_map(|p| p.next_due()).chain(refused).min();
            if moved == 0 && !is_armed {
                is_armed = self.arm(due);
                continue;
            }
            if moved == 0 {
                self.sleep(due);
            }
            if is_armed {
                self.disarm();
                is_armed = false;
            }
        }
        self.disarm();
        // Frames still in flight do not belong to the next run.
        for ready in &mut self.ready {
            while let Some(p) = ready.pop_front() {
                self.pool.free(p.chain);
            }
        }
        for path in [&mut there, &mut back] {
            while let Some(p) = path.pop_due(FOREVER, &mut self.pool, &mut self.counters) {
                self.pool.free(p.chain);
            }
        }
        Ok(there.counts())
    }

    fn is_sender(&self, at: usize) -> bool {
        at < self.senders
    }

    fn receive(&mut self, now: Instant, there: &mut Path, back: &mut Path) -> usize {
        let mut moved = 0;
        for at in 0..self.ports.len() {
            let Wire { ports, pool, counters, fresh, .. } = self;
            let n = ports[at].device.rx_burst(now, pool, fresh, BURST_FRAMES, counters);
            ports[at].device.tx_reap(now, pool);
            moved += n;
            while let Some(p) = self.fresh.pop_front() {
                self.ports[at].heard = source(&p);
                match is_ip(&p) {
                    true if self.is_sender(at) => {
                        there.send(now, p, &mut self.pool, &mut self.counters);
                    }
                    true => back.send(now, p, &mut self.pool, &mut self.counters),
                    false => self.offer_side(!self.is_sender(at), p),
                }
            }
        }
        moved
    }

    /// To the device of one side from which its destination was heard, or to each of that side.
    fn offer_side(&mut self, senders: bool, p: Packet) {
        let to = destination(&p);
        let side = if senders { 0..self.senders } else { self.senders..self.ports.len() };
        if let Some(at) = side.clone().find(|at| self.ports[*at].heard == to) {
            return self.offer(at, p);
        }
        let first = side.start;
        for at in side.skip(1) {
            if let Ok(twin) = duplicate(&p, &mut self.pool) {
                self.offer(at, twin);
            }
        }
        self.offer(first, p);
    }

    fn offer(&mut self, at: usize, p: Packet) {
        if let Err(p) = self.ready[at].push(p) {
            self.pool.free(p.chain);
        }
    }

    fn send(&mut self, now: Instant, there: &mut Path, back: &mut Path) -> usize {
        let mut moved = 0;
        while self.ready.iter().all(|r| !r.is_full()) {
            let due = there.pop_due(now, &mut self.pool, &mut self.counters);
            let Some(p) = due else { break };
            self.offer_side(false, p);
            moved += 1;
        }
        while self.ready.iter().all(|r| !r.is_full()) {
            let Some(p) = back.pop_due(now, &mut self.pool, &mut self.counters) else { break };
            self.offer_side(true, p);
            moved += 1;
        }
        for (port, ready) in self.ports.iter_mut().zip(&mut self.ready) {
            if !ready.is_empty() {
                port.device.tx_burst(now, &mut self.pool, ready, &mut self.counters);
            }
        }
        moved
    }

    /// Asks every device to wake us. False: one has frames, or something is due too soon for a sleep.
    fn arm(&mut self, due: Option<Instant>) -> bool {
        let now = fulmar::internals::runtime::now();
        if due.is_some_and(|at| at.since(now) < SHORTEST_SLEEP) {
            return false;
        }
        let is_idle = self.ports.iter_mut().all(|p| p.device.arm());
        if !is_idle {
            self.disarm();
        }
        is_idle
    }

    fn disarm(&mut self) {
        self.ports.iter_mut().for_each(|p| p.device.disarm());
    }

    /// Until a device has frames, or until `due`.
    fn sleep(&self, due: Option<Instant>) {
        let time = due.map_or(LONGEST_SLEEP, |at| {
            at.since(fulmar::internals::runtime::now()).min(LONGEST_SLEEP)
        });
        let fds: Vec<_> = self.ports.iter().filter_map(|p| p.device.wake_fd()).collect();
        sys::sleep_on(&fds, time);
    }
}

fn ethertype(p: &Packet) -> Option<u16> {
    let mut header = [0; eth::HEADER_BYTES];
    p.chain.copy_to(0, &mut header);
    eth::Header::parse(&header).ok().map(|h| h.ethertype)
}

fn is_ip(p: &Packet) -> bool {
    matches!(ethertype(p), Some(eth::IPV4 | eth::IPV6))
}

fn destination(p: &Packet) -> [u8; 6] {
    let mut addresses = [0; 6];
    p.chain.copy_to(0, &mut addresses);
    addresses
}

fn source(p: &Packet) -> [u8; 6] {
    let mut addresses = [0; 12];
    p.chain.copy_to(0, &mut addresses);
    let mut source = [0; 6];
    source.copy_from_slice(&addresses[6..]);
    source
}
