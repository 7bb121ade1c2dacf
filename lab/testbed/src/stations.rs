//! Two stations on a link, 10.0.0.1 and 10.0.0.2: their addresses, what their shards are configured with,
//! and what a program does with a socket of theirs.

use std::net::SocketAddr;
use std::task::Poll;

use fulmar::internals::drivers::link::{Impairments, LinkConfig, sim_pair};
use fulmar_stack::base::{Duration, EtherAddr, Instant, Secrets, SlotId};
use fulmar_stack::ip::IfAddr;
use fulmar_stack::mbuf::PoolConfig;
use fulmar_stack::shard::{ListenOptions, Reserved, Shard, StackConfig};
use fulmar_stack::socket::Attempt;

/// A port of a station, which is 0 or 1.
pub fn at(station: u8, port: u16) -> SocketAddr {
    SocketAddr::from(([10, 0, 0, station + 1], port))
}

/// The Ethernet address that ends with this number.
pub fn ether(number: u8) -> EtherAddr {
    EtherAddr([2, 0, 0, 0, 0, number])
}

/// A station's configuration: its address in 10.0.0.0/24, a pool of `budget_bytes`, secrets drawn from its
/// number.
pub fn config(station: u8, budget_bytes: usize) -> StackConfig {
    StackConfig {
        addresses: vec![IfAddr { addr: at(station, 0).ip(), prefix_len: 24 }],
        pool: PoolConfig { huge_pages: false, ..PoolConfig::with_budget(budget_bytes) },
        secrets: Some(Secrets::for_simulation(u64::from(station))),
        ..StackConfig::default()
    }
}

/// Writes what fits now: how many bytes that is, or `None` while the send buffer is full.
///
/// # Panics
///
/// If the connection cannot be written to.
pub fn write(shard: &mut Shard, now: Instant, id: SlotId, bytes: &[u8]) -> Option<usize> {
    match shard.sosend(id).reserve(now, bytes, bytes.len(), Attempt::First).unwrap() {
        Poll::Ready(Reserved::Sent(n)) => Some(n),
        Poll::Ready(Reserved::Space(mut r)) => {
            let n = r.len();
            r.chain.copy_from(0, &bytes[..n]).unwrap();
            shard.sosend(id).commit(now, r);
            Some(n)
        }
        _ => None,
    }
}

/// Reads what has come, at most `max` bytes: nothing at the end of the stream, `None` before anything came.
///
/// # Panics
///
/// If the connection has failed.
pub fn read(shard: &mut Shard, now: Instant, id: SlotId, max: usize) -> Option<Vec<u8>> {
    let Poll::Ready(chain) = shard.tcp_take(id, max).unwrap() else { return None };
    let bytes = chain.to_vec();
    shard.tcp_read_done(now, id, chain);
    Some(bytes)
}

/// A connection from station 0 to station 1, over a simulated link and on a virtual clock.
pub struct Connection {
    /// The virtual time.
    pub now: Instant,
    /// Both stations.
    pub shards: [Shard; 2],
    /// The end on station 0.
    pub client: SlotId,
    /// The end on station 1.
    pub server: SlotId,
}

impl Connection {
    /// Connects. `tick`: how long a step takes meanwhile.
    ///
    /// # Panics
    ///
    /// If that fails.
    pub fn new(
        seed: u64,
        how: &Impairments,
        config: impl Fn(u8) -> StackConfig,
        tick: Duration,
    ) -> Connection {
        let (a, b) = sim_pair(seed, how, &LinkConfig::default());
        let now = Instant::from_millis(1000);
        let shard = |station, device| Shard::new(config(station), Box::new(device), now).unwrap();
        let mut shards = [shard(0, a), shard(1, b)];
        let listener = shards[1].tcp_listen(at(1, 80), ListenOptions::default()).unwrap();
        let client = shards[0].tcp_connect(now, at(1, 80), None).unwrap();
        let mut c = Connection { now, shards, client, server: listener };
        for _ in 0..10_000 {
            c.step(tick);
            if let Poll::Ready((server, _)) = c.shards[1].tcp_accept(listener).unwrap() {
                return Connection { server, ..c };
            }
        }
        panic!("seed {seed}: no connection");
    }

    /// Lets time pass, then steps both stations.
    pub fn step(&mut self, time: Duration) {
        self.now = self.now + time;
        for s in &mut self.shards {
            s.step(self.now, 1000);
        }
    }

    /// The client writes whatever fits, bytes of no meaning.
    pub fn fill_send_buffer(&mut self) {
        let [client, _] = &mut self.shards;
        while let Ok(Poll::Ready(Reserved::Space(r))) =
            client.sosend(self.client).reserve(self.now, &[], 64 << 10, Attempt::Retry)
        {
            client.sosend(self.client).commit(self.now, r);
        }
    }

    /// The server takes everything, up to `max` bytes per read.
    ///
    /// # Panics
    ///
    /// If the connection has failed.
    pub fn take_all(&mut self, max: usize) -> Vec<u8> {
        let (mut all, [_, server]) = (Vec::new(), &mut self.shards);
        while let Some(bytes) = read(server, self.now, self.server, max).filter(|b| !b.is_empty()) {
            all.extend(bytes);
        }
        all
    }
}
