//! What taking back sent frames costs on the simulated device: one by one as they complete, or
//! lazily, many at a time.

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

/// What the modelled peer does with it does not matter: it counts.
const FAR: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 72, 6, 2)), 9);
/// A UDP payload that fills an MTU of 1500.
const PAYLOAD: usize = 1472;

/// One way of taking frames back, and what it cost.
pub struct Completions {
    /// The name in JSON.
    pub name: &'static str,
    /// The name in tables.
    pub title: &'static str,
    config: SimConfig,
    /// Per round: frames taken back at once, CPU of the sending thread per frame in ns.
    samples: Vec<(f64, f64)>,
}

/// The ways.
pub fn ways() -> Vec<Completions> {
    let lazy = SimConfig::default();
    let at_once = SimConfig {
        tx_coalesce: Coalesce { packets: 1, delay: fulmar::base::Duration::ZERO },
        tx_reap_bytes: 1,
        ..SimConfig::default()
    };
    let way = |name, title, config| Completions { name, title, config, samples: Vec::new() };
    vec![
        way("tx.sim.lazy", "32 frames, 128 KiB or 1 ms at a time", lazy),
        way("tx.sim.at_once", "every frame as it completes", at_once),
    ]
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
        let sample = on_pinned_thread(cpu, || {
            let stack = build(device, Cidr { address, prefix_len: 24 }, "sim")?;
            let socket = UdpSocket::bind(&stack, SocketAddr::new(address, 0))?;
            socket.connect(FAR)?;
            let datagram = [0x5a; PAYLOAD];
            for _ in 0..1000 {
                socket.send(&datagram)?;
            }
            let before = handle.counts();
            let (hardware, thread, start) =
                (thread_hardware_ns(), cpu::thread_cpu()?, Instant::now());
            while start.elapsed() < time {
                for _ in 0..64 {
                    socket.send(&datagram)?;
                }
            }
            let hardware = Duration::from_nanos(thread_hardware_ns() - hardware);
            let thread = cpu::thread_cpu()?.saturating_sub(thread).saturating_sub(hardware);
            let after = handle.counts();
            let frames = (after.tx_frames - before.tx_frames).max(1) as f64;
            let taken = (after.completions - before.completions) as f64;
            let reaps = (after.reaps - before.reaps).max(1) as f64;
            Ok((taken / reaps, thread.as_nanos() as f64 / frames))
        })?;
        self.samples.push(sample);
        Ok(())
    }

    /// Frames taken back at once.
    pub fn frames_per_reap(&self) -> Option<Estimate> {
        Estimate::of(&self.samples.iter().map(|s| s.0).collect::<Vec<_>>())
    }

    /// CPU of the sending thread per frame, ns, without the simulated hardware's.
    pub fn ns_per_frame(&self) -> Option<Estimate> {
        Estimate::of(&self.samples.iter().map(|s| s.1).collect::<Vec<_>>())
    }
}

/// The figure: what lazy taking back saves.
pub fn asked(ways: &[Completions]) -> Option<Asked<'_>> {
    let [lazy, at_once] = ways else { return None };
    Some(Asked {
        name: "wake.transmit.sim.lazy_vs_at_once",
        sentence: "sending thread's CPU per frame, completions taken back lazily ÷ one by one, \
                   simulated device (published: 1/1.08 of the whole load)"
            .into(),
        goals: None,
        more_is_better: false,
        published: Some(0.93),
        of: Box::new(|round| Some(lazy.samples.get(round)?.1 / at_once.samples.get(round)?.1)),
    })
}
