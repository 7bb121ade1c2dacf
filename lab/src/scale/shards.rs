//! Threads on different shards of one stack: how many of their packets take a lock that another thread
//! has taken before.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::thread;

use fulmar::device::Device;
use fulmar::device::EtherAddr;
use fulmar::stat::Counter;
use fulmar::{Cidr, Stack, UdpSocket};
use fulmar_nic::{SimConfig, pair};

/// Datagrams that find neighbours and buffers before any is counted.
const WARM_UP: u64 = 100;
/// Datagrams that are counted, of each thread.
const PACKETS: u64 = 5000;
const PAYLOAD: [u8; 18] = [7; 18];
const FIRST_PORT: u16 = 53;

fn address(side: u8) -> IpAddr {
    Ipv4Addr::new(10, 1, 0, side).into()
}

/// Two stacks of `shards` shards each, joined queue by queue.
fn stacks(shards: u16) -> io::Result<[Stack; 2]> {
    let config = |n| SimConfig { ether: EtherAddr([2, 0, 0, 0, 0, n]), ..SimConfig::default() };
    let mut queues: [Vec<Box<dyn Device>>; 2] = [Vec::new(), Vec::new()];
    for _ in 0..shards {
        let [(near, _), (far, _)] = pair(config(1), config(2)).map_err(io::Error::other)?;
        queues[0].push(Box::new(near));
        queues[1].push(Box::new(far));
    }
    let build = |side, queues| {
        let own = Cidr { address: address(side), prefix_len: 24 };
        let stack = Stack::builder().devices(queues).address(own).unlisted().build();
        stack.map_err(|e| io::Error::other(e.to_string()))
    };
    let [near, far] = queues;
    Ok([build(1, near)?, build(2, far)?])
}

/// Locks taken by a thread that was not the last to take them.
fn shared(stacks: &[Stack; 2]) -> io::Result<u64> {
    let one = |s: &Stack| {
        let value = s.host().call(|shard, _| Ok(shard.counters().value(Counter::SharedLocks)));
        value.map_err(|e| io::Error::other(format!("cannot query a shard: {e:?}")))
    };
    Ok(one(&stacks[0])? + one(&stacks[1])?)
}

/// Sends datagrams from one end to the other; how many locks were shared meanwhile. Each thread has a port
/// of its own: a port that sockets of several shards have belongs to the hash of the flow.
fn exchange(stacks: &[Stack; 2], port: u16) -> io::Result<u64> {
    let to = SocketAddr::new(address(1), port);
    let (receiver, sender) =
        (UdpSocket::bind(&stacks[0], to)?, UdpSocket::connected(&stacks[1], to)?);
    let mut into = [0; 64];
    let mut one = || sender.send(&PAYLOAD).and_then(|_| receiver.recv(&mut into)).map(drop);
    (0..WARM_UP).try_for_each(|_| one())?;
    let before = shared(stacks)?;
    (0..PACKETS).try_for_each(|_| one())?;
    Ok(shared(stacks)? - before)
}

/// Locks per packet that threads on different shards took from each other.
///
/// # Errors
/// What the stack refuses.
pub(super) fn shared_locks_per_packet(threads: usize) -> io::Result<f64> {
    let shards = u16::try_from(threads).unwrap_or(1).max(1);
    let [near, far] = stacks(shards)?;
    let each = (0..shards).map(|n| {
        let ends = [&near, &far].map(|s| s.on_shard(n));
        let [Ok(near), Ok(far)] = ends else {
            return Err(io::Error::other("the stack has fewer shards than queues"));
        };
        Ok(thread::spawn(move || exchange(&[near, far], FIRST_PORT + n)))
    });
    let each = each.collect::<io::Result<Vec<_>>>()?;
    let lost = || Err(io::Error::other("a thread of the bench ended early"));
    let shared: u64 =
        each.into_iter().map(|t| t.join().unwrap_or_else(|_| lost())).sum::<io::Result<u64>>()?;
    Ok(shared as f64 / (f64::from(shards) * PACKETS as f64))
}
