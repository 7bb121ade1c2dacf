//! A server and its clients on a virtual clock: two shards over a simulated link. Clients of some ports
//! offer no window at all. What arrives is copied, as it is from a kernel's device.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex};
use std::task::Poll;

use fulmar::internals::drivers::link::{Impairments, LinkConfig, sim_pair};
use fulmar::internals::runtime::{PollSetCore, WatchedShard};
use fulmar_stack::base::{Counter, Duration, Instant, Secrets, SeqNum, SlotId};
use fulmar_stack::device::Packet;
use fulmar_stack::mbuf::{PoolConfig, Purpose};
use fulmar_stack::shard::{ListenOptions, Reserved, StackConfig};
use fulmar_stack::socket::{Attempt, Ready, SocketError};
use fulmar_stack::wire::dissect::{Headers, Transport};
use fulmar_stack::wire::tcp::Header;

use crate::stations;
use crate::tamper::Tampered;
use crate::world::World;

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

impl PeerBehaviour {
    /// False: the frame is not sent.
    fn adapt(&mut self, p: &mut Packet) -> bool {
        let frame_bytes = p.chain.len();
        let Some(first) = p.chain.slices_mut().next() else { return true };
        let Some(h) = Headers::parse(first, frame_bytes) else { return true };
        let Transport::Tcp(Header { src_port, dst_port: port, seq, .. }) = h.transport else {
            return true;
        };
        if self.no_window.contains(&port) {
            let window_at = h.network.l4 + 14;
            first[window_at..window_at + 2].fill(0);
        }
        let is_first = self.gap.contains(&port)
            && h.payload_bytes > 0
            && *self.first.entry(src_port).or_insert(seq) == seq;
        !is_first && !self.mute.contains(&port)
    }
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

/// The server's program.
pub struct Program {
    set: Arc<PollSetCore>,
    listeners: HashMap<u16, (SlotId, Service)>,
    serving: Vec<Serving>,
    /// Times that the server's shard was stepped.
    pub steps: u64,
    /// `WRITABLE` events of the server.
    pub wakes: u64,
}

/// The server, station 0, its program, and its clients, station 1.
pub struct Server {
    /// Both stations.
    pub world: World,
    /// The program of the server.
    pub program: Program,
    /// What clients do to what they send.
    pub behaviour: Arc<Mutex<PeerBehaviour>>,
}

impl Server {
    /// A server as configured by default.
    #[allow(clippy::new_without_default, reason = "a scenario is not a default value")]
    pub fn new() -> Server {
        Server::with(|_| ())
    }

    /// A server configured otherwise.
    pub fn with(configure: impl Fn(&mut StackConfig)) -> Server {
        Server::seeded(1, configure)
    }

    /// The scenario of `trust.slow_peers.served`: `peers` clients with a closed window are connected to
    /// [`CLOSED`], and the server has written what it may; [`ANSWERING`] is free. The server is as
    /// configured by default.
    pub fn beside_closed_windows(peers: usize, seed: u64) -> Server {
        let mut w = Server::seeded(seed, |_| ());
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
    pub fn seeded(seed: u64, configure: impl Fn(&mut StackConfig)) -> Server {
        let how = Impairments { delay: MS, ..Impairments::default() };
        let (near, far) = sim_pair(1, &how, &LinkConfig::default());
        let behaviour = Arc::new(Mutex::new(PeerBehaviour::default()));
        let clients = Arc::clone(&behaviour);
        let adapt = move |p: &mut Packet| clients.lock().unwrap().adapt(p);
        let devices = [Tampered::new(near).copies(), Tampered::new(far).copies().sends(adapt)];
        let world = World::new(devices.map(|d| Box::new(d) as _), |station| {
            let mut config = stations::config(station, PoolConfig::default().budget_bytes);
            config.secrets = Some(Secrets::for_simulation(2 * seed + u64::from(station)));
            if station == 0 {
                configure(&mut config);
            }
            config
        });
        let program = Program {
            set: Arc::new(PollSetCore::new().unwrap()),
            listeners: HashMap::new(),
            serving: Vec::new(),
            steps: 0,
            wakes: 0,
        };
        Server { world, program, behaviour }
    }

    /// Opens a port whose connections are accepted at once.
    pub fn serve(&mut self, port: u16, service: Service) {
        let options = ListenOptions { backlog: 8192, ..ListenOptions::default() };
        let listener = self.world.shards[0].tcp_listen(at(0, port), options).unwrap();
        self.program.listeners.insert(port, (listener, service));
    }

    /// The clients of this port offer no window from now on.
    pub fn no_window(&mut self, port: u16) {
        self.behaviour.lock().unwrap().no_window.insert(port);
    }

    /// A client begins to connect.
    pub fn connect(&mut self, port: u16) -> SlotId {
        self.world.shards[1].tcp_connect(self.world.now, at(0, port), None).unwrap()
    }

    /// `n` connections to a port, each accepted.
    pub fn connect_many(&mut self, port: u16, n: usize) -> Vec<SlotId> {
        let (mut ids, served) = (Vec::new(), self.program.serving.len());
        while ids.len() < n {
            for _ in 0..200.min(n - ids.len()) {
                ids.push(self.connect(port));
            }
            self.pass(5 * MS);
        }
        let end = self.world.now + Duration::from_secs(10);
        while self.program.serving.len() < served + n {
            let accepted = self.program.serving.len() - served;
            assert!(self.world.now < end, "{accepted} of {n} accepted");
            self.pass(10 * MS);
        }
        ids
    }

    /// Lets time pass: the shards run at their deadlines, the server's program after each.
    pub fn pass(&mut self, time: Duration) {
        let Server { world, program, .. } = self;
        world.pass_with(time, |world, station| {
            if station == 0 {
                program.run(&mut world.shards[0], world.now);
            }
        });
    }

    /// Asks a port that answers, on new connections, and reads the answers; how many came whole in time.
    pub fn ask(&mut self, port: u16, connections: usize, answer: usize, time: Duration) -> usize {
        let ids: Vec<SlotId> = (0..connections).map(|_| self.connect(port)).collect();
        let (end, mut got, mut asked) =
            (self.world.now + time, vec![0; ids.len()], vec![false; ids.len()]);
        while self.world.now < end {
            self.pass(MS);
            for (i, id) in ids.iter().enumerate() {
                if !asked[i] {
                    asked[i] = self.write(*id, b"hello");
                }
                let World { now, shards: [_, clients] } = &mut self.world;
                while let Ok(Poll::Ready(chain)) = clients.tcp_take(*id, 1 << 20)
                    && !chain.is_empty()
                {
                    got[i] += chain.len();
                    clients.tcp_read_done(*now, *id, chain);
                }
            }
        }
        got.into_iter().filter(|n| *n == answer).count()
    }

    fn write(&mut self, id: SlotId, bytes: &[u8]) -> bool {
        let World { now, shards: [_, clients] } = &mut self.world;
        let step = clients.sosend(id).reserve(*now, bytes, bytes.len(), Attempt::First);
        matches!(step, Ok(Poll::Ready(Reserved::Sent(_))))
    }

    /// A counter of the server.
    pub fn count(&self, c: Counter) -> u64 {
        self.world.shards[0].counters().value(c)
    }

    /// Why the server's program lost a connection, of the first ones that it serves.
    pub fn errors(&mut self) -> Vec<SocketError> {
        let ids = self.accepted();
        ids.iter().filter_map(|id| self.world.shards[0].take_error(*id).ok().flatten()).collect()
    }

    /// The connections of the server's program, in the order in which it accepted them.
    pub fn accepted(&self) -> Vec<SlotId> {
        self.program.serving.iter().map(|s| s.id).collect()
    }

    /// Bytes of the send share in use.
    pub fn used(&mut self) -> usize {
        self.world.shards[0].pool().share_of(Purpose::Send).used
    }
}

impl Program {
    fn run(&mut self, server: &mut WatchedShard, now: Instant) {
        self.steps += 1;
        for (listener, service) in self.listeners.values() {
            while let Ok(Poll::Ready((id, _))) = server.tcp_accept(*listener) {
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
                server.join_set(id, &self.set, token, interest).unwrap();
            }
        }
        let mut ready = Vec::new();
        server.collect_set(&self.set, 10_000, |token, what| ready.push((token, what)));
        for (token, what) in ready {
            self.wakes += u64::from(what.contains(Ready::WRITABLE));
            self.serve_one(server, now, token);
        }
    }

    fn serve_one(&mut self, server: &mut WatchedShard, now: Instant, token: usize) {
        let s = &mut self.serving[token];
        if !s.is_open || s.service == Service::Idle {
            return;
        }
        if let Service::Answer(bytes) = s.service
            && let Ok(Poll::Ready(chain)) = server.tcp_take(s.id, 1 << 20)
        {
            if s.left == 0 && !chain.is_empty() {
                s.left = bytes;
                server.join_set(s.id, &self.set, token, Ready::WRITABLE).unwrap();
            }
            server.tcp_read_done(now, s.id, chain);
        }
        while s.left > 0 {
            let want = s.left.min(64 << 10);
            match server.sosend(s.id).reserve(now, &[], want, Attempt::First) {
                Ok(Poll::Ready(Reserved::Space(r))) => {
                    s.left -= r.len();
                    server.sosend(s.id).commit(now, r);
                }
                Ok(_) => return,
                Err(_) => {
                    s.is_open = false;
                    return server.close(now, s.id);
                }
            }
        }
        match s.service {
            Service::Answer(_) => {
                server.join_set(s.id, &self.set, token, Ready::READABLE).unwrap();
            }
            _ => {
                s.is_open = false;
                server.close(now, s.id);
            }
        }
    }
}
