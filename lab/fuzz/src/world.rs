//! A stack with live connections in front of a hostile station, on a virtual clock.
//!
//! Properties, asked after every step:
//! - nothing panics, no arithmetic overflows;
//! - the stack comes to rest: due deadlines are a bounded number of steps;
//! - every frame that is sent is well formed, and an input is not amplified beyond a bound;
//! - memory stays within the budget, sockets within their number.
//!
//! At the end the program closes every socket, time passes, and the stack holds nothing: no socket,
//! no mbuf, no byte of receive window.

mod build;
mod calls;
mod extra;

use std::net::SocketAddr;
use std::sync::MutexGuard;

use arbitrary::Unstructured;
use fulmar_stack::base::{Duration, Instant, Secrets, SlotId};
use fulmar_stack::device::Caps;
use fulmar_stack::device::memory::{Arrival, MemoryDevice, MemoryPort, Wire};
use fulmar_stack::ip::{IfAddr, Route};
use fulmar_stack::mbuf::{Chain, PoolConfig};
use fulmar_stack::shard::{ListenOptions, PendingId, Shard, StackConfig};
use fulmar_stack::tcp::{EcnPolicy, LoanCharge};
use std::task::Poll;

use crate::extra::Features;
use crate::frames::{OURS, our_ip, peer_ip};
use crate::peer::Observer;
use crate::script::{Step, decode};

/// The port on which the stack listens.
const PORT: u16 = 80;
/// The port of its datagram socket.
const UDP_PORT: u16 = 53;
/// Its memory: little, so that scripts reach the bounds.
const BUDGET_BYTES: usize = 4 << 20;
const MAX_SOCKETS: usize = 64;
/// Most frames that one step of the script may cause: a window of small segments.
const MAX_FRAMES: usize = 20_000;

/// The harness: takes the bytes of an input, panics if a property is broken.
pub fn stack(input: &[u8]) {
    let mut u = Unstructured::new(input);
    let shape: u8 = u.arbitrary().unwrap_or(0);
    let mut world = World::new(shape);
    world.connect_honestly();
    for step in decode(&mut u, Features(shape)) {
        world.play(step);
        world.settle();
        world.check();
    }
    world.end();
}

/// The stack, and what the script holds of it.
pub(crate) struct World {
    shard: Shard,
    wire: MemoryPort,
    now: Instant,
    observer: Observer,
    listeners: Vec<SlotId>,
    udp: [SlotId; 3],
    ping: SlotId,
    /// With every address: datagram sockets of both versions, and the socket of echo requests.
    any_address: Option<[SlotId; 3]>,
    /// Pending connections that the program knows of.
    taken: Vec<PendingId>,
    connections: Vec<SlotId>,
    loans: Vec<(SlotId, Chain, LoanCharge)>,
    /// Counts frames for their identification and timestamps.
    serial: u32,
}

fn config(features: Features) -> StackConfig {
    let on = |v6, prefix_len| IfAddr { addr: our_ip(v6), prefix_len };
    let ecn = if features.has(Features::ECN) { EcnPolicy::Ask } else { EcnPolicy::default() };
    let any_ip = features.has(Features::ANY_ADDRESS);
    // Packets to hosts elsewhere go to the peer.
    let routes = any_ip.then(|| [false, true].map(|v6| Route::default_via(peer_ip(v6, 2))));
    StackConfig {
        addresses: vec![on(false, 24), on(true, 64)],
        pool: PoolConfig { huge_pages: false, ..PoolConfig::with_budget(BUDGET_BYTES) },
        max_sockets: MAX_SOCKETS,
        max_time_wait: 16,
        secrets: Some(Secrets::for_simulation(1)),
        any_ip,
        routes: routes.into_iter().flatten().collect(),
        tcp: fulmar_stack::tcp::Config { ecn, ..fulmar_stack::tcp::Config::default() },
        ..StackConfig::default()
    }
}

impl World {
    /// `shape` chooses what the device can do, and the [`Features`] of the stack.
    fn new(shape: u8) -> World {
        let mut caps = Caps::plain(1500, OURS);
        caps.tx_csum = shape & 1 != 0;
        caps.tso = (shape & 3 == 3).then_some(65_535);
        caps.udp_gso = shape & 3 == 3;
        caps.rx_gro = shape & 4 != 0;
        let (now, features) = (Instant::from_millis(1000), Features(shape));
        let (device, wire) = MemoryDevice::new(caps);
        let mut shard =
            Shard::new(config(features), Box::new(device), now).expect("a stack of these tunables");
        let any = |v6, port| SocketAddr::new(our_ip(v6), port);
        let mut listen = |v6| {
            let fast_open = extra::fast_open(features);
            let options = ListenOptions { backlog: 8, fast_open, ..ListenOptions::default() };
            shard.tcp_listen(any(v6, PORT), options).expect("a listener")
        };
        let mut listeners = vec![listen(false), listen(true)];
        listeners.extend(extra::listeners(&mut shard, features));
        let mut bind = |v6| {
            shard.udp().bind(any(v6, UDP_PORT), Default::default()).expect("a datagram socket")
        };
        let bound = [bind(false), bind(true)];
        let connected = shard.udp().open(build::peer(false, 2, 53)).expect("a connected one");
        let ping = shard.icmp().open().expect("a free identifier");
        let udp = [bound[0], bound[1], connected];
        let any_address = extra::any_address_sockets(&mut shard, features);
        World {
            shard,
            wire,
            now,
            observer: Observer::default(),
            listeners,
            udp,
            ping,
            any_address,
            taken: Vec::new(),
            connections: Vec::new(),
            loans: Vec::new(),
            serial: 0,
        }
    }

    /// Two connections of each version, one opened by each side, so that scripts begin with some.
    fn connect_honestly(&mut self) {
        for v6 in [false, true] {
            self.teach_neighbour(v6, 2);
            self.arrive(build::syn(v6, 2, 1000, &build::usual_options(self.now), 0x02));
            self.settle();
            let to = build::peer(v6, 2, 2000);
            if let Ok(id) = self.shard.tcp_connect(self.now, to, None) {
                self.connections.push(id);
            }
            self.settle();
        }
        for n in 0..self.observer.flows().len() {
            self.play(Step::Answer { flow: n as u8, options: None, resets: false });
            self.settle();
        }
        for &listener in &self.listeners {
            while let Ok(Poll::Ready((id, _))) = self.shard.tcp_accept(listener) {
                self.connections.push(id);
            }
        }
        assert_eq!(self.connections.len(), 4, "the honest handshakes failed");
    }

    /// Plays a step of the script.
    fn play(&mut self, step: Step) {
        match step {
            Step::Wait { ms } => self.pass(Duration::from_millis(u64::from(ms))),
            Step::LongWait { s } => self.pass(Duration::from_secs(u64::from(s))),
            Step::Device { is_full } => self.lock_wire().is_full = is_full,
            Step::Call(call) => self.call(call),
            Step::Extra(step) => self.extra(step),
            frame => {
                if let Some(arrival) = self.build(frame) {
                    self.arrive(arrival);
                }
            }
        }
    }

    fn lock_wire(&self) -> MutexGuard<'_, Wire> {
        self.wire.lock()
    }

    fn arrive(&mut self, a: Arrival) {
        self.serial = self.serial.wrapping_add(1);
        self.lock_wire().arriving.push_back(a);
    }

    /// Lets time pass, the stack stepped at its deadlines.
    fn pass(&mut self, time: Duration) {
        let end = self.now + time;
        // A window of small segments, each with timers of its own, is a few hundred deadlines a
        // second; ten thousand mean that a deadline does not move.
        for _ in 0..10_000 {
            self.settle();
            match self.shard.next_deadline().filter(|at| *at <= end) {
                Some(at) => self.now = self.now.max(at),
                None => {
                    self.now = end;
                    return;
                }
            }
        }
        panic!("time does not pass: {:?}", self.shard.next_deadline());
    }

    /// Steps the stack until nothing is due, and looks at what it sent.
    fn settle(&mut self) {
        let mut frames = 0;
        for _ in 0..10_000 {
            self.shard.step(self.now, 64);
            frames += self.look_at_sent();
            assert!(frames <= MAX_FRAMES, "{frames} frames came of one step");
            let is_due = self.shard.next_deadline().is_some_and(|at| at <= self.now);
            if self.lock_wire().arriving.is_empty() && !is_due {
                return;
            }
        }
        panic!("a deadline that is due stays due");
    }

    fn look_at_sent(&mut self) -> usize {
        let sent = std::mem::take(&mut self.lock_wire().sent);
        for (frame, _) in &sent {
            self.observer.see(frame);
        }
        sent.len()
    }

    fn check(&mut self) {
        let pool = self.shard.pool().stats();
        let used: usize = pool.used_bytes.iter().sum();
        assert!(used <= pool.budget_bytes, "{used} of {} bytes in use", pool.budget_bytes);
    }

    /// Closes everything and lets the longest time-outs pass.
    fn end(mut self) {
        self.lock_wire().is_full = false;
        while let Some((id, chain, lent)) = self.loans.pop() {
            self.shard.take_back(self.now, id, chain, lent);
        }
        let all = self.connections.drain(..).chain(self.udp).chain(self.listeners.drain(..));
        let all = all.chain(self.any_address.into_iter().flatten());
        for id in all.chain([self.ping]).collect::<Vec<_>>() {
            self.shard.close(self.now, id);
        }
        // User time-out, TIME-WAIT, reassembly: all are below ten minutes.
        self.pass(Duration::from_secs(600));
        let stat = self.shard.stat();
        let states: Vec<_> = stat.sockets.iter().map(|s| (s.state, s.local, s.remote)).collect();
        assert!(states.is_empty(), "sockets are left: {states:?}");
        assert_eq!(stat.time_wait, 0, "TIME-WAIT entries are left");
        assert_eq!(stat.window.granted_bytes, 0, "bytes of receive window are left");
        assert_eq!(stat.pool.mbufs_in_use, 0, "mbufs are left");
    }
}
