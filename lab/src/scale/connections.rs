//! Established connections between two shards in this thread, on a virtual clock: what one of many
//! costs when it is asked, and what it holds while it is idle.
//!
//! Both ends are here, so memory per end is half of what a connection takes. The link hands frames
//! over and holds nothing back; the clock moves when nothing else does.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::task::Poll;
use std::time::Instant;

use fulmar::internals::drivers::link::{Impairments, LinkConfig, sim_pair};
use fulmar_stack::base::{Duration, Instant as StackInstant, Secrets, SlotId};
use fulmar_stack::ip::IfAddr;
use fulmar_stack::mbuf::PoolConfig;
use fulmar_stack::shard::{ListenOptions, Reserved, Shard, StackConfig};
use fulmar_stack::socket::{Attempt, SocketError};

use super::internet::Random;

/// Connections to one port of the server: a fifth of the ports that a client chooses from.
const PER_PORT: usize = 5000;
/// Connections that are opened together.
const TOGETHER: usize = 64;
/// A question, and its answer.
const MESSAGE: [u8; 64] = *b"what is asked, and what is answered: as many bytes as one line  ";
/// Steps of both ends after which what was sent has arrived: three for a handshake, and two to find the
/// neighbour.
const STEPS: usize = 6;
/// Frames of a step: all of those that were sent together.
const FRAMES: usize = 4 * TOGETHER;
/// Virtual time in which delayed answers go and timers of a fresh connection pass.
const SETTLE: Duration = Duration::from_secs(10);

const CLIENT: usize = 0;
const SERVER: usize = 1;

/// Two shards and the connections between them.
pub struct Connections {
    shards: [Shard; 2],
    listeners: Vec<SlotId>,
    /// The two ends of each.
    ends: Vec<[SlotId; 2]>,
    now: StackInstant,
    random: Random,
}

fn failed(what: &str) -> impl Fn(SocketError) -> io::Error {
    move |e| io::Error::other(format!("{what}: {e:?}"))
}

fn address(side: usize, port: u16) -> SocketAddr {
    SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 1, 0, 1 + side as u8)), port)
}

fn port(connection: usize) -> u16 {
    100 + (connection / PER_PORT) as u16
}

impl Connections {
    /// Two shards with room for `room` connections, of which none is open.
    ///
    /// # Errors
    /// No memory.
    pub fn new(room: usize, seed: u64) -> io::Result<Connections> {
        let (near, far) = sim_pair(seed, &Impairments::default(), &LinkConfig::default());
        let now = StackInstant::from_millis(1000);
        let shard = |side, device| {
            let config = StackConfig {
                addresses: vec![IfAddr { addr: address(side, 0).ip(), prefix_len: 24 }],
                pool: PoolConfig { huge_pages: false, ..PoolConfig::with_budget(64 << 20) },
                max_sockets: room + room / PER_PORT + 2,
                secrets: Some(Secrets::for_simulation(seed + side as u64)),
                ..StackConfig::default()
            };
            Shard::new(config, Box::new(device), now).map_err(|e| io::Error::other(e.to_string()))
        };
        let shards = [shard(CLIENT, near)?, shard(SERVER, far)?];
        let (listeners, ends) = (Vec::new(), Vec::new());
        let mut all = Connections { shards, listeners, ends, now, random: Random(seed) };
        for number in 0..room.div_ceil(PER_PORT) {
            let to = address(SERVER, port(number * PER_PORT));
            let listener = all.shards[SERVER].tcp_listen(to, ListenOptions::default());
            all.listeners.push(listener.map_err(failed("a listener"))?);
        }
        Ok(all)
    }

    /// How many are open.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Both ends handle what arrives, one after the other.
    fn step(&mut self) {
        for _ in 0..STEPS {
            self.now = self.now + Duration::from_micros(10);
            self.shards.iter_mut().for_each(|s| _ = s.step(self.now, FRAMES));
        }
    }

    /// Opens connections until there are `count`, and reports its progress.
    ///
    /// # Errors
    /// A connection that does not come about.
    pub fn open(&mut self, count: usize, mut progress: impl FnMut(usize)) -> io::Result<()> {
        while self.len() < count {
            // The first one finds the neighbour, for which only a few packets may wait.
            let together = if self.len() == 0 { 1 } else { TOGETHER };
            let batch = together.min(count - self.len()).min(PER_PORT - self.len() % PER_PORT);
            self.open_batch(batch)?;
            progress(self.len());
        }
        Ok(())
    }

    fn open_batch(&mut self, count: usize) -> io::Result<()> {
        let first = self.len();
        let to = address(SERVER, port(first));
        let client = &mut self.shards[CLIENT];
        let near = (0..count).map(|_| client.tcp_connect(self.now, to, None));
        let near: Result<Vec<_>, _> = near.collect();
        let near = near.map_err(failed("a connection"))?;
        self.step();
        let mut far = Vec::with_capacity(count);
        while let Ok(Poll::Ready(accepted)) =
            self.shards[SERVER].tcp_accept(self.listeners[first / PER_PORT])
        {
            far.push(accepted);
        }
        for client in near {
            let from = self.shards[CLIENT].addresses(client).map_err(failed("a connection"))?.0;
            let server = far.iter().find(|(_, peer)| Some(*peer) == from);
            let server = server.ok_or_else(|| io::Error::other("a connection was not accepted"))?;
            self.ends.push([client, server.0]);
        }
        Ok(())
    }

    /// Lets time pass in which nothing is asked.
    pub fn rest(&mut self) {
        let end = self.now + SETTLE;
        while self.now < end {
            let next = self.shards.iter().filter_map(Shard::next_deadline).min();
            self.now = next.unwrap_or(end).clamp(self.now + Duration::from_micros(10), end);
            self.shards.iter_mut().for_each(|s| _ = s.step(self.now, FRAMES));
        }
    }

    fn write(&mut self, side: usize, id: SlotId) -> io::Result<()> {
        match self.shards[side].sosend(id).reserve(
            self.now,
            &MESSAGE,
            MESSAGE.len(),
            Attempt::First,
        ) {
            Ok(Poll::Ready(Reserved::Sent(_))) => Ok(()),
            Ok(_) => Err(io::Error::other("an idle connection has no room for 64 bytes")),
            Err(e) => Err(failed("a write")(e)),
        }
    }

    fn read(&mut self, side: usize, id: SlotId) -> io::Result<()> {
        match self.shards[side].tcp_take(id, MESSAGE.len()) {
            Ok(Poll::Ready(chain)) if chain.len() == MESSAGE.len() => {
                self.shards[side].tcp_read_done(self.now, id, chain);
                Ok(())
            }
            Ok(_) => Err(io::Error::other("a connection does not answer")),
            Err(e) => Err(failed("a read")(e)),
        }
    }

    /// One question and its answer on one connection.
    ///
    /// # Errors
    /// It does not answer.
    pub fn ask(&mut self, connection: usize) -> io::Result<()> {
        let [client, server] = self.ends[connection];
        self.write(CLIENT, client)?;
        self.now = self.now + Duration::from_micros(10);
        self.shards[SERVER].step(self.now, FRAMES);
        self.read(SERVER, server)?;
        self.write(SERVER, server)?;
        self.shards[CLIENT].step(self.now, FRAMES);
        self.read(CLIENT, client)
    }

    /// Asks every connection once.
    ///
    /// # Errors
    /// One of them does not answer.
    pub fn ask_all(&mut self) -> io::Result<()> {
        (0..self.len()).try_for_each(|connection| self.ask(connection))
    }

    /// ns per question and answer, both ends, of connections drawn at random.
    ///
    /// # Errors
    /// One of them does not answer.
    pub fn asked(&mut self, time: std::time::Duration) -> io::Result<f64> {
        let (start, mut done) = (Instant::now(), 0u32);
        while start.elapsed() < time {
            for _ in 0..16 {
                let connection = self.random.below(self.len());
                self.ask(connection)?;
                done += 1;
            }
        }
        Ok(start.elapsed().as_nanos() as f64 / f64::from(done))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SLICE: std::time::Duration = std::time::Duration::from_micros(1);

    #[test]
    fn every_connection_answers_before_and_after_a_rest() {
        let mut all = Connections::new(PER_PORT + 200, 1).unwrap();
        let mut shown = Vec::new();
        all.open(PER_PORT + 200, |n| shown.push(n)).unwrap();
        assert!(shown.is_sorted() && shown.last() == Some(&(PER_PORT + 200)));
        all.ask_all().unwrap();
        all.rest();
        all.ask_all().unwrap();
        assert!(all.asked(SLICE).unwrap() > 0.0);
    }
}
