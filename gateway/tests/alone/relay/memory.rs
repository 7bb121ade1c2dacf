//! Memory of a gateway whose flows are not read: what one guest may have at most.

use std::io::{ErrorKind, Write};
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;
use std::time::Duration;

use fulmar_gateway::config::Limits;
use fulmar_stack::base::Counter;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::socket::{setsockopt, sockopt};

use crate::relay::Test;
use crate::relay::change::ip_tool;
use crate::relay::tcp::exchange;
use crate::relay::trouble::{resident_bytes, unasked_listener};
use crate::relay::world::{HOST, QUEUES, World, listener};

pub const TESTS: &[Test] = &[(
    "what_nobody_reads_takes_no_more_memory_than_the_bound",
    what_nobody_reads_takes_no_more_memory_than_the_bound,
)];

/// The side that does not read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Deaf {
    Host,
    Guest,
}

/// Writes what is taken at once. Returns how much, and drops connections that were reset.
fn fill(writers: &mut Vec<TcpStream>, bytes: &[u8]) -> usize {
    let mut written = 0;
    writers.retain_mut(|writer| {
        loop {
            match writer.write(bytes) {
                Ok(n) => written += n,
                Err(e) => return e.kind() == ErrorKind::WouldBlock,
            }
        }
    });
    written
}

/// Connections that the guest has begun at once: the end that writes as much as it can, and the one that does not read.
fn flows(world: &World, deaf: Deaf, count: usize) -> (Vec<TcpStream>, Vec<TcpStream>) {
    let listener = unasked_listener();
    listener.set_nonblocking(false).unwrap();
    let port = listener.local_addr().unwrap().port();
    let begun: Vec<_> = (0..count).map(|_| world.begin_connection((HOST, port))).collect();
    let hosts: Vec<_> = (0..count).map(|_| listener.accept().unwrap()).collect();
    let hosts = hosts.into_iter().map(|(stream, _)| stream);
    let one = |(guest, host): (OwnedFd, TcpStream)| {
        let guest = TcpStream::from(guest);
        let (writer, reader) = if deaf == Deaf::Host { (guest, host) } else { (host, guest) };
        // Memory that the kernel holds does not count.
        setsockopt(&reader, sockopt::RcvBuf, &2048).unwrap();
        setsockopt(&writer, sockopt::SndBuf, &(8 << 10)).unwrap();
        writer.set_nonblocking(true).unwrap();
        (writer, reader)
    };
    begun.into_iter().zip(hosts).map(one).unzip()
}

fn what_nobody_reads_takes_no_more_memory_than_the_bound() {
    /// More than there are pages for.
    const FLOWS: usize = 3500;
    const MEMORY_BYTES: usize = 16 << 20;
    /// A slab of each size beside, of each queue (`PoolConfig`).
    const BESIDE_BYTES: usize = 16 << 20;
    let before = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, before.1, before.1).unwrap();
    // With a larger one the host's kernel takes megabytes of each.
    ip_tool("link set lo mtu 1500");
    for deaf in [Deaf::Host, Deaf::Guest] {
        let limits = Limits { memory_bytes: MEMORY_BYTES, ..Limits::default() };
        let (world, good) = (World::with(65520, |c| c.limits = limits), listener());
        let (mut near, mut far) = world.pair(&good);
        let resident = resident_bytes();
        let (mut writers, readers) = flows(&world, deaf, FLOWS);
        let bytes = vec![7; 64 << 10];
        let (mut most, mut quiet) = (0, 0);
        while quiet < 50 {
            quiet = if fill(&mut writers, &bytes) == 0 { quiet + 1 } else { 0 };
            most = most.max(resident_bytes());
            thread::sleep(Duration::from_millis(2));
        }
        let stat = world.stat();
        let pool = &stat.stack.pool;
        assert!(pool.used_bytes.iter().sum::<usize>() <= MEMORY_BYTES, "{deaf:?} {pool:?}");
        let grown = most.saturating_sub(resident);
        let bound = MEMORY_BYTES + usize::from(QUEUES.load(Relaxed)) * BESIDE_BYTES;
        assert!(grown < bound + FLOWS * (8 << 10), "{deaf:?}: {grown}");
        // Another's minimum may be the memory of those that have not moved for a while (docs/memory.md, "Reclamation").
        let resets = [Counter::TcpStalledReset, Counter::TcpUnreadReset];
        let reclaimed = resets.map(|c| stat.stack.counters.value(c)).iter().sum::<u64>();
        assert!((FLOWS - writers.len()) as u64 <= reclaimed, "{deaf:?}: {reclaimed}");
        exchange(&mut near, &mut far);
        let (mut late, mut late_far) = world.pair(&good);
        exchange(&mut late, &mut late_far);
        drop(readers);
    }
    ip_tool("link set lo mtu 65536");
    let _ = setrlimit(Resource::RLIMIT_NOFILE, before.0, before.1);
}
