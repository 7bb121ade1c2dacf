//! Simulation of two engines and a lossy, reordering, duplicating network on virtual time, over
//! many seeds: every byte arrives in order, both sides close, every buffer is freed.
//!
//! Failing seeds are printed. `FULMAR_TCP_SEED=n cargo test -p fulmar-stack --test main tcp::pair` replays one,
//! `FULMAR_TCP_SEEDS=n` runs `n` seeds.

use super::support::world::{Net, Rng, World, side};
use fulmar_stack::base::{Counter, Duration};
use fulmar_stack::tcp::*;

fn config(rng: &mut Rng) -> Config {
    Config {
        send_buffer_bytes: rng.pick(&[4096, 30_000, 1 << 20]),
        recv_buffer_bytes: rng.pick(&[4096, 30_000, 1 << 20]),
        max_buffer_bytes: rng.pick(&[1 << 20, 16 << 20]),
        timestamps: !rng.chance(300),
        sack: !rng.chance(300),
        nodelay: rng.chance(300),
        congestion: rng.pick(CongestionControl::ALL),
        // Not drawn: the seeds stay what they were.
        mtu_probing: if rng.0 & 2 == 0 { MtuProbing::BlackHole } else { MtuProbing::Always },
        ..Config::default()
    }
}

fn world(seed: u64) -> World {
    let mut rng = Rng(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let mtu = rng.pick(&[576, 1500, 1500, 9000]);
    let tso_bytes = rng.pick(&[None, Some(65_535), Some(16_384)]);
    let path = PathInfo { mtu, route_mtu: mtu, ip_header_bytes: 20, tso_bytes };
    let net = Net {
        one_way: Duration::from_micros(rng.pick(&[0, 20, 5_000, 150_000])),
        loss: rng.pick(&[0, 0, 10, 50, 100]),
        duplicate: rng.pick(&[0, 0, 20]),
        reorder: rng.pick(&[0, 0, 30, 200]),
        whole: rng.chance(500),
        mtu: usize::MAX,
        bottleneck: None,
    };
    let most = if net.loss > 10 { 150_000 } else { 700_000 };
    let (a, b) = (config(&mut rng), config(&mut rng));
    let lengths = [rng.below(most), if rng.chance(500) { rng.below(most) } else { 0 }];
    let sides = [side(0, &a, path, &mut rng, lengths[0]), side(1, &b, path, &mut rng, lengths[1])];
    World::new(net, sides, b, rng)
}

fn run(seed: u64) -> World {
    let mut w = world(seed);
    w.pump(0);
    let mut steps = 0u64;
    let end = w.now + Duration::from_secs(3000);
    while w.step() {
        steps += 1;
        assert!(steps < 2_000_000, "does not terminate");
        assert!(w.now < end, "takes too long");
    }
    for i in 0..2 {
        assert_eq!(w.sides[i].got, w.sides[1 - i].to_send, "bytes missing");
        let now = w.now;
        let s = &mut w.sides[i];
        s.env(now, |t, env| t.release(env));
        assert_eq!(s.pool.outstanding(), 0, "mbufs leaked");
        assert_eq!(s.window.granted_bytes, 0, "budget leaked");
    }
    w
}

#[test]
fn every_byte_arrives_whatever_the_network_does() {
    let read = |name: &str| std::env::var(name).ok().and_then(|v| v.parse::<u64>().ok());
    if let Some(seed) = read("FULMAR_TCP_SEED") {
        let w = run(seed);
        println!("{:?} {:?}", w.net, w.now);
        return;
    }
    let seeds = read("FULMAR_TCP_SEEDS").unwrap_or(500);
    let mut failed = Vec::new();
    for seed in 1..=seeds {
        if std::panic::catch_unwind(|| run(seed)).is_err() {
            println!("seed {seed} failed");
            failed.push(seed);
        }
    }
    assert!(failed.is_empty(), "seeds {failed:?}");
}

#[test]
fn on_a_clean_path_only_probes_are_sent_again() {
    let mut clean = 0;
    for seed in 1..200 {
        let w = world(seed);
        if w.net.loss + w.net.reorder + w.net.duplicate > 0 {
            continue;
        }
        let w = run(seed);
        for s in &w.sides {
            assert_eq!(s.counters.value(Counter::TcpFastRetransmits), 0, "seed {seed}");
            assert_eq!(s.counters.value(Counter::TcpRetransmitBytes), 0, "seed {seed}");
            assert_eq!(s.counters.value(Counter::TcpTimeouts), 0, "seed {seed}");
        }
        clean += 1;
    }
    assert!(clean > 10);
}

/// Goodput of a stream of 60 virtual seconds, Mb/s.
fn goodput(net: Net, congestion: CongestionControl, seed: u64) -> (f64, u64) {
    let mut w = World::bulk(net, &Config { congestion, ..Config::default() }, seed);
    let rate = w.goodput(Duration::from_secs(60));
    (rate, w.sides[0].counters.value(Counter::TcpTimeouts))
}

#[test]
#[ignore = "prints figures"]
fn goodput_over_lossy_paths_is_printed() {
    for (ms, loss, reorder) in [(20, 1, 0), (20, 10, 0), (1, 10, 0), (1, 0, 10), (50, 10, 0)] {
        let net = Net { loss, reorder, ..Net::clean(Duration::from_millis(ms)) };
        for c in CongestionControl::ALL {
            let runs: Vec<_> = (1..=3).map(|seed| goodput(net, *c, seed)).collect();
            println!("{ms} ms, loss {loss} per mille, reorder {reorder}: {c} {runs:.1?}");
        }
    }
}
