//! What taking back sent frames costs on the simulated device: one by one as they complete, or
//! lazily, many at a time; from few frames to as many as go.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use fulmar::devices::sim::{Coalesce, SimConfig, thread_hardware_ns};
use fulmar::{Cidr, UdpSocket, devices};

use super::figures::Asked;
use crate::cpu::{self, Placement};
use crate::on_pinned_thread;
use crate::stats::Estimate;
use crate::stream::build;
use crate::sys;

/// What the modelled peer does with it does not matter: it counts.
const FAR: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 72, 6, 2)), 9);
/// Frames per second, 0 for as many as go.
const LOADS: [u64; 3] = [1_000, 20_000, 0];
/// A UDP payload that fills an MTU of 1500.
const PAYLOAD: usize = 1472;

/// One way of taking frames back, and what it cost.
pub struct Completions {
    /// The name in JSON.
    pub name: String,
    /// The name in tables.
    pub title: &'static str,
    /// Frames per second, 0 for as many as go.
    pub pps: u64,
    config: SimConfig,
    /// One per round.
    samples: Vec<Cost>,
}

/// What a run cost.
#[derive(Clone, Copy)]
struct Cost {
    /// Frames taken back at once.
    at_once: f64,
    /// How often frames were taken back, per second.
    per_second: f64,
    /// CPU of the sending thread per frame, in ns.
    ns: f64,
}

const LAZY: &str = "tx.sim.lazy";
const AT_ONCE: &str = "tx.sim.at_once";

/// The ways, at every load.
pub fn ways() -> Vec<Completions> {
    let lazy = SimConfig::default();
    let at_once = SimConfig {
        tx_coalesce: Coalesce { packets: 1, delay: fulmar::base::Duration::ZERO },
        tx_reap_bytes: 1,
        ..SimConfig::default()
    };
    let way = |name: &str, title, config: &SimConfig, pps| {
        let load = if pps == 0 { String::new() } else { format!(".{pps}") };
        let (name, config) = (format!("{name}{load}"), config.clone());
        Completions { name, title, pps, config, samples: Vec::new() }
    };
    let both = |pps| {
        [
            way(LAZY, "32 frames, 128 KiB or 1 ms at a time", &lazy, pps),
            way(AT_ONCE, "every frame as it completes", &at_once, pps),
        ]
    };
    LOADS.into_iter().flat_map(both).collect()
}

impl Completions {
    /// Sends datagrams for `time`.
    ///
    /// # Errors
    /// No descriptors left.
    pub fn run(&mut self, time: Duration) -> io::Result<()> {
        let (device, handle) = devices::sim_nic(self.config.clone()).map_err(io::Error::other)?;
        let (cpu, _) = Placement::SameCpu.cpus(&cpu::allowed_cpus()?)?;
        let address = IpAddr::V4(Ipv4Addr::new(10, 72, 6, 1));
        let pps = self.pps;
        let sample = on_pinned_thread(cpu, || {
            sys::exact_timers()?;
            let stack = build(device, Cidr { address, prefix_len: 24 }, "sim")?;
            let socket = UdpSocket::bind(&stack, SocketAddr::new(address, 0))?;
            socket.connect(FAR)?;
            for _ in 0..1000 {
                socket.send(&DATAGRAM)?;
            }
            let before = handle.counts();
            let (hardware, thread, start) =
                (thread_hardware_ns(), cpu::thread_cpu()?, Instant::now());
            send(&socket, pps, time)?;
            let hardware = Duration::from_nanos(thread_hardware_ns() - hardware);
            let thread = cpu::thread_cpu()?.saturating_sub(thread).saturating_sub(hardware);
            let after = handle.counts();
            let frames = (after.tx_frames - before.tx_frames).max(1) as f64;
            let taken = (after.completions - before.completions) as f64;
            let reaps = (after.reaps - before.reaps) as f64;
            Ok(Cost {
                at_once: taken / reaps.max(1.0),
                per_second: reaps / start.elapsed().as_secs_f64(),
                ns: thread.as_nanos() as f64 / frames,
            })
        })?;
        self.samples.push(sample);
        Ok(())
    }

    fn estimate(&self, of: impl Fn(&Cost) -> f64) -> Option<Estimate> {
        Estimate::of(&self.samples.iter().map(of).collect::<Vec<_>>())
    }

    /// How often frames were taken back, per second.
    pub fn reaps_per_second(&self) -> Option<Estimate> {
        self.estimate(|s| s.per_second)
    }

    /// Frames taken back at once.
    pub fn frames_per_reap(&self) -> Option<Estimate> {
        self.estimate(|s| s.at_once)
    }

    /// CPU of the sending thread per frame, ns, without the simulated hardware's.
    pub fn ns_per_frame(&self) -> Option<Estimate> {
        self.estimate(|s| s.ns)
    }
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

/// The figure: what lazy taking back saves.
pub fn asked(ways: &[Completions]) -> Option<Asked<'_>> {
    let way = |name: &str| ways.iter().find(|w| w.name == name);
    let (lazy, at_once) = (way(LAZY)?, way(AT_ONCE)?);
    Some(Asked {
        name: "wake.transmit.sim.lazy_vs_at_once",
        sentence: "sending thread's CPU per frame, completions taken back lazily ÷ one by one, \
                   simulated device (published: 1/1.08 of the whole load)"
            .into(),
        goals: None,
        more_is_better: false,
        published: Some(0.93),
        of: Box::new(|round| Some(lazy.samples.get(round)?.ns / at_once.samples.get(round)?.ns)),
    })
}
