//! A stack of ours over the simulated NIC, whose modelled peer sends: one host's cost alone, without
//! a kernel.
//!
//! The hardware runs inside the receiver's calls; its time is taken off every account and shown
//! apart. The peer has no CPU account: it is part of the hardware. It does not write the payload that
//! it sends: as DMA that passes the CPU's caches, what a reader finds is what lay there before.

use super::run::{Asking, StopCondition, run};
use super::{BURST, Load, Offloads, Reader, Rig, RigConfig, Target};
use crate::cpu::{self, Placement};
use crate::on_pinned_thread;
use crate::peer::Report;
use crate::stream::{build_with, captured};
use crate::transfer::Transfer;
use fulmar::{Cidr, Stack, TcpStream};
use fulmar_nic::{Command, FarEnd, Service, SimConfig, SimHandle};
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

const NEAR_IP: Ipv4Addr = Ipv4Addr::new(10, 72, 2, 1);
const FAR_IP: Ipv4Addr = Ipv4Addr::new(10, 72, 2, 2);
/// Where the modelled peer sends 4 GiB for each byte that it gets.
const STREAMS: u16 = 19;
/// Where it sends a burst for each byte that it gets.
const BURSTS: u16 = 20;
/// Bytes that are sent to it at the start: more than any run takes.
const PARTS: usize = 1000;

/// The stack, and the handle to its NIC.
pub(super) struct Simulated {
    stack: Stack,
    handle: SimHandle,
    offloads: Offloads,
}

impl Simulated {
    /// Makes a NIC without a limit of rate, and a stack on it.
    ///
    /// # Errors
    /// Too many open descriptors.
    pub fn new(offloads: Offloads, pcap: Option<&PathBuf>) -> io::Result<Simulated> {
        let (device, handle) = fulmar_nic::open(config(offloads)).map_err(io::Error::other)?;
        let device = captured(device, pcap)?;
        let device = offloads.limit(device);
        let (near_cpu, _) = Placement::SameCpu.cpus(&cpu::allowed_cpus()?)?;
        let address = Cidr { address: IpAddr::V4(NEAR_IP), prefix_len: 24 };
        let stack = on_pinned_thread(near_cpu, || {
            build_with(device, address, "sim", offloads.aggregation)
        })?;
        Ok(Simulated { stack, handle, offloads })
    }
}

fn config(offloads: Offloads) -> SimConfig {
    let services = vec![
        (STREAMS..=STREAMS, Service::Respond { request: 1, response: u32::MAX }),
        (BURSTS..=BURSTS, Service::Respond { request: 1, response: BURST.bytes as u32 }),
        (0..=u16::MAX, Service::Discard),
    ];
    let far_end = FarEnd { services, ..FarEnd::default() };
    let config = SimConfig { far_end, placement: offloads.placement, ..SimConfig::default() };
    if offloads.aggregation {
        return config;
    }
    // Packets come one by one, each in a buffer of its own size.
    SimConfig { lro: None, rx_buffers: 512, rx_buffer_bytes: 2048, ..config }
}

impl Rig for Simulated {
    /// One CPU: one process is both ends.
    fn config(&self) -> RigConfig {
        RigConfig { device: "sim", placement: Placement::SameCpu, offloads: self.offloads }
    }

    fn stream(
        &mut self,
        load: &Load,
        reader: &mut dyn Reader,
        time: Duration,
    ) -> io::Result<Transfer> {
        let (near_cpu, _) = Placement::SameCpu.cpus(&cpu::allowed_cpus()?)?;
        let (stack, handle) = (&self.stack, &self.handle);
        let port = if load.burst().is_some() { BURSTS } else { STREAMS };
        let sample = on_pinned_thread(near_cpu, || {
            let stream = TcpStream::connect(stack, SocketAddr::new(IpAddr::V4(FAR_IP), port))?;
            let from = Target { stack, stream: &stream };
            let mut before = None;
            let mut at_start = || before = Some(handle.counts());
            let asking =
                load.burst().map_or(Asking::Once(PARTS), |burst| Asking::Bursts { burst, left: 0 });
            let until = StopCondition::After(time);
            let (near, mut counts) = run(&from, load, reader, until, asking, &mut at_start)?;
            let (before, after) = (before.unwrap_or_default(), handle.counts());
            counts.extend([
                ("doorbells", after.doorbells - before.doorbells),
                ("interrupts", after.interrupts - before.interrupts),
            ]);
            let far = Report { cpu: Duration::ZERO, ..near };
            let far = Report { thread: Duration::ZERO, ..far };
            let hardware = Duration::from_nanos(after.inline_ns - before.inline_ns);
            let sample = Transfer::of_ends(near, far, load.warm_bytes);
            Ok(Transfer { counts, hardware, ..sample })
        })?;
        // The peer would send for ever to a connection that is gone.
        let _ = self.handle.ask(Command::ResetAll);
        Ok(sample)
    }
}
