//! Two stacks that probe every path MTU, over networks that lose, repeat and reorder packets: every byte arrives in
//! order, and every buffer is freed. The seeds of the simulation have the same networks without such probes.

use fulmar::internals::drivers::link::{Impairments, LinkConfig};
use fulmar_stack::base::{Counter, Duration};
use fulmar_stack::device::Rng;
use fulmar_stack::shard::StackConfig;
use fulmar_stack::tcp::*;
use fulmar_testbed::connection::Connection;
use fulmar_testbed::stations;
use fulmar_testbed::tamper::Tampered;

fn pick<T: Copy>(rng: &mut Rng, of: &[T]) -> T {
    of[rng.below(of.len() as u64) as usize]
}

fn config(rng: &mut Rng) -> Config {
    Config {
        send_buffer_bytes: pick(rng, &[4096, 30_000, 1 << 20]),
        recv_buffer_bytes: pick(rng, &[4096, 30_000, 1 << 20]),
        timestamps: rng.below(10) > 2,
        sack: rng.below(10) > 2,
        congestion: pick(rng, CongestionControl::ALL),
        mtu_probing: MtuProbing::Always,
        ..Config::default()
    }
}

fn network(rng: &mut Rng) -> Impairments {
    Impairments {
        delay: Duration::from_micros(pick(rng, &[20, 5_000, 150_000])),
        loss: pick(rng, &[0.0, 0.0, 0.01, 0.05]),
        duplicate: pick(rng, &[0.0, 0.02]),
        reorder: pick(rng, &[0.0, 0.0, 0.03, 0.2]),
        reorder_delay: Duration::from_millis(20),
        mtu: pick(rng, &[None, None, Some(1100)]),
        ..Impairments::default()
    }
}

fn run(seed: u64) {
    let mut rng = Rng::new(seed);
    let (how, tcp) = (network(&mut rng), [config(&mut rng), config(&mut rng)]);
    let station = |n: u8| StackConfig { tcp: tcp[usize::from(n)], ..stations::config(n, 8 << 20) };
    let link = LinkConfig::default();
    let mut c =
        Connection::over(seed, &how, &link, station, |end| Box::new(Tampered::new(end).copies()));
    let sent: Vec<u8> = (0..rng.below(200_000)).map(|i| (i ^ (i >> 8)) as u8).collect();
    let (mut written, mut got) = (0, Vec::new());
    let end = c.world.now + Duration::from_secs(3000);
    while got.len() < sent.len() {
        let (now, rest) = (c.world.now, &sent[written..]);
        if !rest.is_empty() {
            written += stations::write(&mut c.world.shards[0], now, c.client, rest).unwrap_or(0);
        }
        c.world.advance(Duration::from_millis(10));
        got.extend(c.take_all(1 << 20));
        assert!(c.world.now < end, "seed {seed}: {} of {} bytes", got.len(), sent.len());
    }
    assert!(got == sent, "seed {seed}");
    if how.loss + how.reorder + how.duplicate == 0.0 && how.mtu.is_none() {
        let again = c.world.shards[0].counters().value(Counter::TcpRetransmitBytes);
        assert_eq!(again, 0, "seed {seed}");
    }
    for (shard, id) in c.world.shards.iter_mut().zip([c.client, c.server]) {
        shard.close(c.world.now, id);
    }
    c.world.pass(Duration::from_secs(300));
    for shard in &mut c.world.shards {
        shard.pool().drain_remote();
        assert_eq!(shard.stat().pool.mbufs_in_use, 0, "seed {seed}");
    }
}

#[test]
fn every_byte_arrives_beside_probes_whatever_the_network_does() {
    (1..=200).for_each(run);
}
