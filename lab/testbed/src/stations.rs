//! Two stations on a link, 10.0.0.1 and 10.0.0.2: their addresses, what their shards are configured with,
//! and what a program does with a socket of theirs.

use std::net::SocketAddr;

use fulmar_base::{EtherAddr, Instant, Probe, Secrets, SlotId};
use fulmar_ip::IfAddr;
use fulmar_mbuf::PoolConfig;
use fulmar_shard::{Reserved, Shard, StackConfig};
use fulmar_socket::{Attempt, Step};

/// A port of a station, which is 0 or 1.
pub fn at(station: u8, port: u16) -> SocketAddr {
    SocketAddr::from(([10, 0, 0, station + 1], port))
}

/// The Ethernet address that ends with this number.
pub fn ether(number: u8) -> EtherAddr {
    EtherAddr([2, 0, 0, 0, 0, number])
}

/// A station's configuration: its address in 10.0.0.0/24, a pool of so many bytes, secrets drawn from its
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
pub fn write<P: Probe>(
    shard: &mut Shard<P>,
    now: Instant,
    id: SlotId,
    bytes: &[u8],
) -> Option<usize> {
    match shard.tcp_reserve(now, id, bytes, bytes.len(), Attempt::First).unwrap() {
        Step::Done(Reserved::Sent(n)) => Some(n),
        Step::Done(Reserved::Space(mut r)) => {
            let n = r.len();
            r.chain.copy_from(0, &bytes[..n]).unwrap();
            shard.tcp_commit(now, id, r);
            Some(n)
        }
        _ => None,
    }
}

/// Reads what has come, at most so many bytes: nothing at the end of the stream, `None` before anything came.
///
/// # Panics
///
/// If the connection has failed.
pub fn read<P: Probe>(
    shard: &mut Shard<P>,
    now: Instant,
    id: SlotId,
    max: usize,
) -> Option<Vec<u8>> {
    let Step::Done(chain) = shard.tcp_take(id, max).unwrap() else { return None };
    let bytes = chain.to_vec();
    shard.tcp_read_done(now, id, chain);
    Some(bytes)
}
