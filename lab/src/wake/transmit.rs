//! The cost of reaping sent frames on the simulated device: one by one as they complete, or lazily, many at a time; at
//! rates from few frames to the full rate.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use fulmar::{Cidr, UdpSocket};
use fulmar_nic::{Coalesce, SimConfig, thread_hardware_ns};

use crate::cpu::{self, Placement};
use crate::harness::{Ratio, Sample, Scenario};
use crate::on_pinned_thread;
use crate::stream::build;
use crate::sys;

/// The modelled peer's port does not matter: the peer counts the datagrams.
const FAR: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 72, 6, 2)), 9);
/// Frames per second; 0: the full rate.
const LOADS: [u64; 3] = [1_000, 20_000, 0];
/// A UDP payload that fills an MTU of 1500.
const PAYLOAD: usize = 1472;

/// CPU of the sending thread per frame, ns, without the simulated hardware's.
pub const NS: &str = "thread_cpu_ns_per_frame";
/// How often frames were taken back, per second.
pub const REAPS: &str = "reaps_per_second";
/// Frames taken back at once.
pub const AT_ONCE: &str = "frames_per_reap";

/// Both ways of taking frames back, at every load.
pub fn scenarios() -> Vec<Scenario<'static>> {
    let lazy = SimConfig::default();
    let at_once = SimConfig {
        tx_coalesce: Coalesce { packets: 1, delay: Duration::ZERO },
        tx_reap_bytes: 1,
        ..SimConfig::default()
    };
    let way = |name: &str, title: &str, config: &SimConfig, pps: u64| {
        let config = config.clone();
        let run = move |slice| measure(&config, pps, slice);
        let load = if pps == 0 { String::new() } else { format!(".{pps}") };
        let scenario = Scenario::new(format!("{name}{load}"), title, run)
            .in_table("Completions of sent frames, simulated device, UDP of MTU size")
            .label("mode", title);
        if pps == 0 { scenario.label("load", "at full speed") } else { scenario.label("pps", pps) }
    };
    let both = |pps| {
        [
            way("tx.sim.lazy", "32 frames, 128 KiB or 1 ms at a time", &lazy, pps),
            way("tx.sim.at_once", "every frame as it completes", &at_once, pps),
        ]
    };
    LOADS.into_iter().flat_map(both).collect()
}

/// The saving of lazy reclaims.
pub fn ratio() -> Ratio {
    Ratio::over(
        "wake.transmit.sim.lazy_vs_at_once",
        "sending thread's CPU per frame, completions taken back lazily ÷ one by one, simulated device \
         (published: 1/1.08 of the whole load)",
        NS,
        ["tx.sim.lazy", "tx.sim.at_once"],
    )
    .published(0.93)
}

/// Sends datagrams for `time`.
fn measure(config: &SimConfig, pps: u64, time: Duration) -> io::Result<Sample> {
    let (device, handle) = fulmar_nic::open(config.clone()).map_err(io::Error::other)?;
    let (cpu, _) = Placement::SameCpu.cpus(&cpu::allowed_cpus()?)?;
    let address = IpAddr::V4(Ipv4Addr::new(10, 72, 6, 1));
    on_pinned_thread(cpu, || {
        sys::exact_timers()?;
        let stack = build(device, Cidr { address, prefix_len: 24 }, "sim")?;
        let socket = UdpSocket::bind(&stack, SocketAddr::new(address, 0))?;
        socket.connect(FAR)?;
        for _ in 0..1000 {
            socket.send(&DATAGRAM)?;
        }
        let before = handle.counts();
        let (hardware, thread, start) = (thread_hardware_ns(), cpu::thread_cpu()?, Instant::now());
        send(&socket, pps, time)?;
        let hardware = Duration::from_nanos(thread_hardware_ns() - hardware);
        let thread = cpu::thread_cpu()?.saturating_sub(thread).saturating_sub(hardware);
        let after = handle.counts();
        let frames = (after.tx_frames - before.tx_frames).max(1) as f64;
        let taken = (after.completions - before.completions) as f64;
        let reaps = (after.reaps - before.reaps) as f64;
        Ok(Sample::of(NS, thread.as_nanos() as f64 / frames)
            .with(AT_ONCE, taken / reaps.max(1.0))
            .with(REAPS, reaps / start.elapsed().as_secs_f64()))
    })
}

static DATAGRAM: [u8; PAYLOAD] = [0x5a; PAYLOAD];

/// Sends for `time`, evenly where there is a rate.
fn send(socket: &UdpSocket, pps: u64, time: Duration) -> io::Result<()> {
    let start = Instant::now();
    let mut sent = 0u64;
    while start.elapsed() < time {
        for _ in 0..if pps == 0 { 64 } else { 1 } {
            socket.send(&DATAGRAM)?;
            sent += 1;
        }
        let due = sent.saturating_mul(1_000_000_000).checked_div(pps).map(Duration::from_nanos);
        if let Some(wait) = due.and_then(|due| due.checked_sub(start.elapsed())) {
            std::thread::sleep(wait);
        }
    }
    Ok(())
}
