//! The stations 10.0.0.1 and 10.0.0.2: their addresses, the configuration of their shards, and the calls of a program.

use std::net::SocketAddr;
use std::task::Poll;

use fulmar_stack::base::{EtherAddr, Instant, Secrets, SlotId};
use fulmar_stack::ip::IfAddr;
use fulmar_stack::mbuf::PoolConfig;
use fulmar_stack::shard::{Reserved, Shard, StackConfig};
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
