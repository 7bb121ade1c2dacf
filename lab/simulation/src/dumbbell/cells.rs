//! The paths and loads of the table.

use fulmar::internals::drivers::link::Impairments;
use fulmar_stack::base::Duration;
use fulmar_stack::device::impair::{Aqm, Policer};
use fulmar_stack::tcp::CongestionControl;

use super::{Cell, Load};

const MBIT: u64 = 1_000_000;
const SEED: u64 = 7;

/// A bottleneck of `mbit` Mb/s on a path of `rtt_ms`, with a queue of `queue_tenths` tenths of their product.
fn bottleneck(mbit: u64, rtt_ms: u64, queue_tenths: u64) -> Impairments {
    let product = mbit * MBIT / 8 * rtt_ms / 1000;
    Impairments {
        rate_bps: Some(mbit * MBIT),
        queue_bytes: (product * queue_tenths / 10) as usize,
        delay: Duration::from_micros(rtt_ms * 500),
        cut: 1.0,
        ..Impairments::default()
    }
}

/// A queue that marks packets that have waited for longer than `above_us`.
fn marking(mbit: u64, rtt_ms: u64, above_us: u64) -> Impairments {
    let aqm = Aqm::Step { above: Duration::from_micros(above_us) };
    Impairments { aqm, ecn: true, ..bottleneck(mbit, rtt_ms, 100) }
}

/// One flow of each controller meets these.
fn paths() -> Vec<(&'static str, Impairments)> {
    let ms = Duration::from_millis;
    let base = bottleneck(20, 40, 20);
    vec![
        ("20 Mb/s, 40 ms, queue 0.5 BDP", bottleneck(20, 40, 5)),
        ("20 Mb/s, 40 ms, queue 1 BDP", bottleneck(20, 40, 10)),
        ("20 Mb/s, 40 ms, queue 4 BDP", bottleneck(20, 40, 40)),
        ("20 Mb/s, 200 ms, queue 1 BDP", bottleneck(20, 200, 10)),
        ("100 Mb/s, 10 ms, queue 1 BDP", bottleneck(100, 10, 10)),
        ("2 Mb/s, 100 ms, queue 2 BDP", bottleneck(2, 100, 20)),
        ("20 Mb/s, 40 ms, CoDel", Impairments { aqm: Aqm::CODEL, ..bottleneck(20, 40, 100) }),
        (
            "20 Mb/s, 40 ms, CoDel, ECN",
            Impairments { aqm: Aqm::CODEL, ecn: true, ..bottleneck(20, 40, 100) },
        ),
        ("100 Mb/s, 2 ms, marks at 0.5 ms", marking(100, 2, 500)),
        ("100 Mb/s, 20 ms, marks at 1 ms", marking(100, 20, 1000)),
        ("20 Mb/s, 40 ms, loss 0.01 %", Impairments { loss: 0.0001, ..base.clone() }),
        ("20 Mb/s, 40 ms, loss 0.1 %", Impairments { loss: 0.001, ..base.clone() }),
        ("20 Mb/s, 40 ms, loss 1 %", Impairments { loss: 0.01, ..base.clone() }),
        ("20 Mb/s, 40 ms, loss 3 %", Impairments { loss: 0.03, ..base.clone() }),
        (
            "20 Mb/s, 40 ms, loss 1 % in runs of 4",
            Impairments { loss: 0.01, loss_run_pkts: 4.0, ..base.clone() },
        ),
        (
            "20 Mb/s, 40 ms, 1 % reordered by 4",
            Impairments { reorder: 0.01, reorder_pkts: 4, reorder_delay: ms(5), ..base.clone() },
        ),
        ("20 Mb/s, 40 ms, jitter 10 ms", Impairments { jitter: ms(10), ..base.clone() }),
        (
            "20 Mb/s policed, 40 ms, burst 64 KiB",
            Impairments {
                rate_bps: None,
                policer: Some(Policer { rate_bps: 20 * MBIT, burst_bytes: 64 << 10 }),
                ..base
            },
        ),
    ]
}

/// All of the table.
pub fn cells() -> Vec<Cell> {
    let all = [CongestionControl::Cubic, CongestionControl::NewReno, CongestionControl::Bbr];
    let time = Duration::from_secs(30);
    let bulk = |name: String, controllers: Vec<CongestionControl>, path: &Impairments| Cell {
        name,
        controllers,
        load: Load::Bulk,
        path: path.clone(),
        time,
        seed: SEED,
    };
    let mut cells = Vec::new();
    for (name, path) in paths() {
        let controllers = if path.ecn { CongestionControl::ALL } else { &all };
        cells.extend(controllers.iter().map(|c| bulk(name.into(), vec![*c], &path)));
    }
    let marked = Impairments { jitter: Duration::from_micros(50), ..marking(100, 2, 500) };
    let controllers = CongestionControl::ALL.iter();
    cells.extend(
        controllers.map(|c| bulk("100 Mb/s, 2 ms, marks at 0.5 ms".into(), vec![*c; 8], &marked)),
    );
    // Half a millisecond of jitter keeps flows from moving in step.
    let shared = Impairments { jitter: Duration::from_micros(500), ..bottleneck(50, 40, 10) };
    for flows in [2, 8, 32, 100] {
        let name = "50 Mb/s, 40 ms, queue 1 BDP";
        cells.extend(all.iter().map(|c| bulk(name.into(), vec![*c; flows], &shared)));
    }
    for (i, a) in all.iter().enumerate() {
        for b in &all[i + 1..] {
            let both = [vec![*a; 4], vec![*b; 4]].concat();
            cells.push(bulk("50 Mb/s, 40 ms, queue 1 BDP".into(), both, &shared));
        }
    }
    for (bytes, loss) in [(14_000, 0.0), (14_000, 0.01), (200_000, 0.0), (200_000, 0.01)] {
        let path = Impairments { loss, cut: 1.0, ..bottleneck(50, 50, 20) };
        let name = format!("{} KB each, 50 ms, loss {} %", bytes / 1000, loss * 100.0);
        let load = Load::Transfers { bytes, every: Duration::from_millis(60) };
        cells.extend(all.iter().map(|c| Cell {
            name: name.clone(),
            controllers: vec![*c],
            load,
            path: path.clone(),
            time,
            seed: SEED,
        }));
    }
    cells
}
