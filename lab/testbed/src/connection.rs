//! A connection from station 0 to station 1 over a simulated path, and a stream over it.

use std::task::Poll;

use fulmar::internals::drivers::link::{
    Impairments, LinkConfig, SentPath, SimLink, sim_pair_each_way,
};
use fulmar_stack::base::{Duration, SlotId};
use fulmar_stack::device::Device;
use fulmar_stack::device::impair::PathCounts;
use fulmar_stack::shard::{Reserved, StackConfig};
use fulmar_stack::socket::Attempt;
use fulmar_stack::tcp::Tcb;

use crate::stations::read;
use crate::world::World;

/// See the module's header.
pub struct Connection {
    /// The stations.
    pub world: World,
    /// The end on station 0.
    pub client: SlotId,
    /// The end on station 1.
    pub server: SlotId,
    /// Bytes that [`Connection::stream`] has not written yet: unlimited at first.
    pub left: u64,
    received: u64,
    paths: [SentPath; 2],
}

/// A stretch of time of a stream.
#[derive(Clone, Copy, Debug)]
pub struct Stretch {
    /// Goodput in Mb/s.
    pub mbps: f64,
    /// The mean time of a packet in the bottleneck.
    pub queue: Duration,
    /// Packets that passed the bottleneck.
    pub passed: u64,
    /// Packets that it dropped.
    pub dropped: u64,
}

impl Connection {
    /// Connects over a link with the same impairments in both directions.
    pub fn new(seed: u64, how: &Impairments, config: impl Fn(u8) -> StackConfig) -> Connection {
        let link = LinkConfig::default();
        Connection::between(seed, [how, how], &link, config, |end| Box::new(end))
    }

    /// Connects over a path whose data direction alone has a limited rate. Super-frames are segmented.
    pub fn over(
        seed: u64,
        how: &Impairments,
        link: &LinkConfig,
        config: impl Fn(u8) -> StackConfig,
        device: impl Fn(SimLink) -> Box<dyn Device>,
    ) -> Connection {
        let [there, back] = each_way(how);
        Connection::between(seed, [&there, &back], link, config, device)
    }

    /// Changes the path of [`Connection::over`].
    pub fn set_path(&mut self, how: &Impairments) {
        self.paths.iter().zip(each_way(how)).for_each(|(path, how)| path.set(&how));
    }

    fn between(
        seed: u64,
        how: [&Impairments; 2],
        link: &LinkConfig,
        config: impl Fn(u8) -> StackConfig,
        device: impl Fn(SimLink) -> Box<dyn Device>,
    ) -> Connection {
        let (near, far) = sim_pair_each_way(seed, how, link);
        let paths = [near.sent_path(), far.sent_path()];
        let mut world = World::new([device(near), device(far)], config);
        let listener = world.listen(80);
        let [client, server] = world.connect(listener);
        Connection { world, client, server, left: u64::MAX, received: 0, paths }
    }

    /// The connection of a station.
    ///
    /// # Panics
    ///
    /// If it is closed.
    pub fn tcb(&mut self, station: usize) -> &mut Tcb {
        let id = [self.client, self.server][station];
        &mut self.world.shards[station].tcp_entry(id).expect("open").tcb
    }

    /// The client writes whatever fits, bytes of no meaning.
    pub fn fill_send_buffer(&mut self) {
        fill(&mut self.world, self.client, &mut { u64::MAX });
    }

    /// The server takes everything, up to `max` bytes per read.
    ///
    /// # Panics
    ///
    /// If the connection has failed.
    pub fn take_all(&mut self, max: usize) -> Vec<u8> {
        let (mut all, World { now, shards: [_, server] }) = (Vec::new(), &mut self.world);
        while let Some(bytes) = read(server, *now, self.server, max).filter(|b| !b.is_empty()) {
            all.extend(bytes);
        }
        all
    }

    /// The client writes as much as it can and the server reads, for so long.
    pub fn stream(&mut self, time: Duration) -> Stretch {
        let (before, received) = (self.paths[0].counts(), self.received);
        let Connection { world, client, server, left, received: all, .. } = self;
        fill(world, *client, left);
        world.pass_with(time, |world, station| match station {
            0 => fill(world, *client, left),
            _ => *all += discard(world, *server),
        });
        let bits = (self.received - received) * 8;
        Stretch::of(bits as f64 / 1e6 / time.as_secs_f64(), before, self.paths[0].counts())
    }
}

/// The impairments of data and of ACKs.
fn each_way(how: &Impairments) -> [Impairments; 2] {
    let there = Impairments { cut: 1.0, ..how.clone() };
    [there.clone(), Impairments { rate_bps: None, ..there }]
}

impl Stretch {
    fn of(mbps: f64, before: PathCounts, after: PathCounts) -> Stretch {
        let passed = after.passed - before.passed;
        let ns = (after.passed_ns - before.passed_ns) / passed.max(1);
        let dropped = after.queue_drops - before.queue_drops;
        Stretch { mbps, queue: Duration::from_nanos(ns), passed, dropped }
    }
}

/// Writes bytes of no meaning until the send buffer is full, at most `left`.
fn fill(world: &mut World, client: SlotId, left: &mut u64) {
    let World { now, shards: [shard, _] } = world;
    while let want @ 1.. = (*left).min(64 << 10) as usize
        && let Ok(Poll::Ready(Reserved::Space(r))) =
            shard.sosend(client).reserve(*now, &[], want, Attempt::Retry)
    {
        *left -= r.len() as u64;
        shard.sosend(client).commit(*now, r);
    }
}

/// Reads everything; how many bytes that was.
fn discard(world: &mut World, server: SlotId) -> u64 {
    let (World { now, shards: [_, shard] }, mut bytes) = (world, 0);
    while let Ok(Poll::Ready(chain)) = shard.tcp_take(server, 1 << 20)
        && !chain.is_empty()
    {
        bytes += chain.len() as u64;
        shard.tcp_read_done(*now, server, chain);
    }
    bytes
}
