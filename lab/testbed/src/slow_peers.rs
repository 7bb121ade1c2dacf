//! A server and its clients on a virtual clock: two shards over a simulated link. Clients of some ports
//! offer no window at all. What arrives is copied, as it is from a kernel's device.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex};
use std::task::Poll;

use fulmar::internals::drivers::link::{Impairments, LinkConfig, SimLink, sim_pair};
use fulmar::internals::runtime::{PollSetCore, WatchedShard};
use fulmar_stack::base::{
    Counter, Counters, DropReason, Duration, Instant, Secrets, SeqNum, SlotId,
};
use fulmar_stack::device::{Burst, Device, Packet, forward_device};
use fulmar_stack::ip::IfAddr;
use fulmar_stack::mbuf::{Pool, PoolConfig, Purpose};
use fulmar_stack::shard::{ListenOptions, Reserved, Shard, StackConfig};
use fulmar_stack::socket::{Attempt, Ready, SocketError};
use fulmar_stack::wire::dissect::{Headers, Transport};
use fulmar_stack::wire::tcp::Header;

/// Address and port of the server (station 0) or of the clients (station 1).
pub use crate::stations::at;

/// A millisecond.
pub const MS: Duration = Duration::from_millis(1);
/// A port that floods clients whose windows are closed.
pub const CLOSED: u16 = 80;
/// A port of the same server that answers.
pub const ANSWERING: u16 = 81;
/// Bytes of an answer.
pub const ANSWER: usize = 100_000;

/// What clients do to the frames that they send.
#[derive(Default)]
pub struct PeerBehaviour {
    /// To these ports of the server no window is offered.
    pub no_window: BTreeSet<u16>,
    /// To these nothing is sent at all.
    pub mute: BTreeSet<u16>,
    /// To these the first byte of a connection is not sent: what follows stays behind a gap.
    pub gap: BTreeSet<u16>,
    /// The sequence number of that byte, by the port of the client.
    first: HashMap<u16, SeqNum>,
}

/// An end of the link.
struct End {
    inner: SimLink,
    behaviour: Arc<Mutex<PeerBehaviour>>,
    kept: Burst,
    came: Burst,
}

impl End {
    /// False: the frame is not sent.
    fn adapt(&self, p: &mut Packet) -> bool {
        let mut behaviour = self.behaviour.lock().unwrap();
        let frame_bytes = p.chain.len();
        let Some(first) = p.chain.slices_mut().next() else { return true };
        let Some(h) = Headers::parse(first, frame_bytes) else { return true };
        let Transport::Tcp(Header { src_port, dst_port: port, seq, .. }) = h.transport else {
            return true;
        };
        if behaviour.no_window.contains(&port) {
            let window_at = h.network.l4 + 14;
            first[window_at..window_at + 2].fill(0);
        }
        let is_first = behaviour.gap.contains(&port)
            && h.payload_bytes > 0
            && *behaviour.first.entry(src_port).or_insert(seq) == seq;
        !is_first && !behaviour.mute.contains(&port)
    }
}

impl Device for End {
    forward_device!(self => self.inner, except tx_burst, rx_burst);
    fn tx_burst(
        &mut self,
        now: Instant,
        pool: &mut Pool,
        burst: &mut Burst,
        counters: &mut Counters,
    ) -> usize {
        let n = burst.len();
        while let Some(mut p) = burst.pop_front() {
            if self.adapt(&mut p) {
                self.kept.push(p).expect("as large as a burst");
            } else {
                pool.free(p.chain);
            }
        }
        let offered = self.kept.len();
        assert_eq!(self.inner.tx_burst(now, pool, &mut self.kept, counters), offered);
        n
    }
    fn rx_burst(
        &mut self,
        now: Instant,
        pool: &mut Pool,
        out: &mut Burst,
        budget: usize,
        counters: &mut Counters,
    ) -> usize {
        let n = self.inner.rx_burst(now, pool, &mut self.came, budget, counters);
        while let Some(p) = self.came.pop_front() {
            if let Some(p) = copy_to_pool(p, pool, counters) {
                out.push(p).expect("as large as a burst");
            }
        }
        n
    }
}

/// Copies a frame into memory of this pool, a small one into its reserve if need be, as drivers do. `None`: it was
/// dropped and counted.
pub fn copy_to_pool(p: Packet, pool: &mut Pool, counters: &mut Counters) -> Option<Packet> {
    let len = p.chain.len();
    let copy = pool.alloc_chain(len, 0, Purpose::Receive).or_else(|e| match len {
        0..=256 => pool.alloc_chain(len, 0, Purpose::Control),
        _ => Err(e),
    });
    let Ok(mut copy) = copy else {
        pool.free(p.chain);
        counters.drop_packet(DropReason::NoBuffer);
        return None;
    };
    copy.fill(p.chain.slices());
    pool.free(p.chain);
    Some(Packet { chain: copy, offload: p.offload })
}

/// What the server's program does with a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Service {
    /// Writes whatever fits, for ever.
    Flood,
    /// Writes this many bytes, then closes.
    Farewell(usize),
    /// Answers the first bytes with this many, and waits.
    Answer(usize),
    /// Reads nothing and writes nothing.
    Idle,
}

struct Serving {
    id: SlotId,
    service: Service,
    left: usize,
    is_open: bool,
}

/// The server, its program, its clients, and the link between them.
pub struct World {
    /// The virtual time.
    pub now: Instant,
    /// The server's shard.
    pub server: WatchedShard,
    /// The shard of all clients.
    pub clients: Shard,
    /// What clients do to what they send.
    pub behaviour: Arc<Mutex<PeerBehaviour>>,
    set: Arc<PollSetCore>,
    listeners: HashMap<u16, (SlotId, Service)>,
    serving: Vec<Serving>,
    /// Times that the server's shard was stepped.
    pub steps: u64,
    /// `WRITABLE` events of the server.
    pub wakes: u64,
}

impl World {
    /// A server as configured by default.
    #[allow(clippy::new_without_default, reason = "a world is no value that something defaults to")]
    pub fn new() -> World {
        World::with(|_| ())
    }

    /// A server configured otherwise.
    pub fn with(configure: impl FnOnce(&mut StackConfig)) -> World {
        World::seeded(1, configure)
    }

    /// The scenario of `trust.slow_peers.served`: `peers` clients with a closed window are connected to
    /// [`CLOSED`], and the server has written what it may; [`ANSWERING`] is free. The server is as
    /// configured by default.
    pub fn beside_closed_windows(peers: usize, seed: u64) -> World {
        let mut w = World::seeded(seed, |_| ());
        w.close_windows();
        w.connect_many(CLOSED, peers);
        w.pass(Duration::from_secs(2));
        w
    }

    /// Serves [`CLOSED`] and [`ANSWERING`].
    pub fn close_windows(&mut self) {
        self.serve(CLOSED, Service::Flood);
        self.serve(ANSWERING, Service::Answer(ANSWER));
        self.no_window(CLOSED);
    }

    /// A server. Its secrets, and its clients' secrets, are drawn from this seed.
    pub fn seeded(seed: u64, configure: impl FnOnce(&mut StackConfig)) -> World {
        let how = Impairments { delay: MS, ..Impairments::default() };
        let (a, b) = sim_pair(1, &how, &LinkConfig::default());
        let now = Instant::from_millis(1000);
        let config = |station: u8| StackConfig {
            addresses: vec![IfAddr { addr: at(station, 0).ip(), prefix_len: 24 }],
            pool: PoolConfig { huge_pages: false, ..PoolConfig::default() },
            secrets: Some(Secrets::for_simulation(2 * seed + u64::from(station))),
            ..StackConfig::default()
        };
        let behaviour = Arc::new(Mutex::new(PeerBehaviour::default()));
        let end = |inner, behaviour: &Arc<Mutex<PeerBehaviour>>| End {
            inner,
            behaviour: Arc::clone(behaviour),
            kept: Burst::with_capacity(64),
            came: Burst::with_capacity(64),
        };
        let clients = end(b, &behaviour);
        let mut server = config(0);
        configure(&mut server);
        World {
            now,
            server: WatchedShard::new(
                Shard::new(server, Box::new(end(a, &Arc::default())), now).unwrap(),
            ),
            clients: Shard::new(config(1), Box::new(clients), now).unwrap(),
            behaviour,
            set: Arc::new(PollSetCore::new().unwrap()),
            listeners: HashMap::new(),
            serving: Vec::new(),
            steps: 0,
            wakes: 0,
        }
    }

    /// Opens a port whose connections are accepted at once.
    pub fn serve(&mut self, port: u16, service: Service) {
        let options = ListenOptions { backlog: 8192, ..ListenOptions::default() };
        let listener = self.server.tcp_listen(at(0, port), options).unwrap();
        self.listeners.insert(port, (listener, service));
    }

    /// The clients of this port offer no window from now on.
    pub fn no_window(&mut self, port: u16) {
        self.behaviour.lock().unwrap().no_window.insert(port);
    }

    /// A client begins to connect.
    pub fn connect(&mut self, port: u16) -> SlotId {
        self.clients.tcp_connect(self.now, at(0, port), None).unwrap()
    }

    /// `n` connections to a port, each accepted.
    pub fn connect_many(&mut self, port: u16, n: usize) -> Vec<SlotId> {
        let (mut ids, served) = (Vec::new(), self.serving.len());
        while ids.len() < n {
            for _ in 0..200.min(n - ids.len()) {
                ids.push(self.connect(port));
            }
            self.pass(5 * MS);
        }
        let end = self.now + Duration::from_secs(10);
        while self.serving.len() < served + n {
            assert!(self.now < end, "{} of {n} accepted", self.serving.len() - served);
            self.pass(10 * MS);
        }
        ids
    }

    /// Lets time pass: the shards run at their deadlines, the server's program after each.
    pub fn pass(&mut self, time: Duration) {
        let end = self.now + time;
        for _ in 0..1_000_000 {
            let next = [&*self.server, &self.clients].map(Shard::next_deadline);
            let Some(at) = next.into_iter().flatten().min().filter(|at| *at <= end) else {
                self.now = end;
                return;
            };
            self.now = self.now.max(at);
            if next[0].is_some_and(|at| at <= self.now) {
                self.server.step(self.now, 64);
                self.steps += 1;
                self.run_program();
            }
            if next[1].is_some_and(|at| at <= self.now) {
                self.clients.step(self.now, 64);
            }
        }
        panic!("deadlines that pass without an end");
    }

    fn run_program(&mut self) {
        for (listener, service) in self.listeners.values() {
            while let Ok(Poll::Ready((id, _))) = self.server.tcp_accept(*listener) {
                let left = match service {
                    Service::Flood => usize::MAX,
                    Service::Farewell(n) => *n,
                    Service::Answer(_) | Service::Idle => 0,
                };
                let token = self.serving.len();
                self.serving.push(Serving { id, service: *service, left, is_open: true });
                let interest = match service {
                    Service::Answer(_) => Ready::READABLE,
                    Service::Idle => Ready::NONE,
                    _ => Ready::WRITABLE,
                };
                self.server.join_set(id, &self.set, token, interest).unwrap();
            }
        }
        let mut ready = Vec::new();
        self.server.collect_set(&self.set, 10_000, |token, what| ready.push((token, what)));
        for (token, what) in ready {
            self.wakes += u64::from(what.contains(Ready::WRITABLE));
            self.serve_one(token);
        }
    }

    fn serve_one(&mut self, token: usize) {
        let s = &mut self.serving[token];
        if !s.is_open || s.service == Service::Idle {
            return;
        }
        if let Service::Answer(bytes) = s.service
            && let Ok(Poll::Ready(chain)) = self.server.tcp_take(s.id, 1 << 20)
        {
            if s.left == 0 && !chain.is_empty() {
                s.left = bytes;
                self.server.join_set(s.id, &self.set, token, Ready::WRITABLE).unwrap();
            }
            self.server.tcp_read_done(self.now, s.id, chain);
        }
        while s.left > 0 {
            let want = s.left.min(64 << 10);
            match self.server.sosend(s.id).reserve(self.now, &[], want, Attempt::First) {
                Ok(Poll::Ready(Reserved::Space(r))) => {
                    s.left -= r.len();
                    self.server.sosend(s.id).commit(self.now, r);
                }
                Ok(_) => return,
                Err(_) => {
                    s.is_open = false;
                    return self.server.close(self.now, s.id);
                }
            }
        }
        match s.service {
            Service::Answer(_) => {
                self.server.join_set(s.id, &self.set, token, Ready::READABLE).unwrap();
            }
            _ => {
                s.is_open = false;
                self.server.close(self.now, s.id);
            }
        }
    }

    /// Asks a port that answers, on new connections, and reads the answers; how many came whole in time.
    pub fn ask(&mut self, port: u16, connections: usize, answer: usize, time: Duration) -> usize {
        let ids: Vec<SlotId> = (0..connections).map(|_| self.connect(port)).collect();
        let (end, mut got, mut asked) =
            (self.now + time, vec![0; ids.len()], vec![false; ids.len()]);
        while self.now < end {
            self.pass(MS);
            for (i, id) in ids.iter().enumerate() {
                if !asked[i] {
                    asked[i] = self.write(*id, b"hello");
                }
                while let Ok(Poll::Ready(chain)) = self.clients.tcp_take(*id, 1 << 20) {
                    if chain.is_empty() {
                        break;
                    }
                    got[i] += chain.len();
                    self.clients.tcp_read_done(self.now, *id, chain);
                }
            }
        }
        got.into_iter().filter(|n| *n == answer).count()
    }

    fn write(&mut self, id: SlotId, bytes: &[u8]) -> bool {
        let step = self.clients.sosend(id).reserve(self.now, bytes, bytes.len(), Attempt::First);
        matches!(step, Ok(Poll::Ready(Reserved::Sent(_))))
    }

    /// A counter of the server.
    pub fn count(&self, c: Counter) -> u64 {
        self.server.counters().value(c)
    }

    /// Why the server's program lost a connection, of the first ones that it serves.
    pub fn errors(&mut self) -> Vec<SocketError> {
        let ids = self.accepted();
        ids.iter().filter_map(|id| self.server.take_error(*id).ok().flatten()).collect()
    }

    /// The connections of the server's program, in the order in which it accepted them.
    pub fn accepted(&self) -> Vec<SlotId> {
        self.serving.iter().map(|s| s.id).collect()
    }

    /// Bytes of the send share in use.
    pub fn used(&mut self) -> usize {
        self.server.pool().share_of(Purpose::Send).used
    }
}
