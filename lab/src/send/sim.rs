//! A stack of ours over the simulated NIC, with the modelled peer at the far end: one host's cost
//! alone, without a kernel.
//!
//! The hardware runs inside the sender's calls; its time is taken off every account and shown apart.
//! The peer has no CPU account: it is part of the hardware. It acknowledges by bytes, as a receiver
//! does that aggregates, and not by bursts, so that no way is charged for more ACKs per byte than
//! another one unless its frames are larger than that. Without super-segments the NIC does not
//! cut, and completes checksums all the same, as the cards of the published measurements did.

use super::rig::run;
use super::{Caller, Load, Rig, RigConfig};
use crate::cpu::{self, Placement};
use crate::on_pinned_thread;
use crate::peer::Report;
use crate::stream::{build, captured};
use crate::transfer::Transfer;
use fulmar::{Cidr, Stack, TcpStream};
use fulmar_nic::{AckRule, FarEnd, SimConfig, SimHandle};
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

const NEAR_IP: Ipv4Addr = Ipv4Addr::new(10, 72, 2, 1);
/// The modelled peer answers for every address; on this port it discards (RFC 863).
const FAR: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 72, 2, 2)), 9);

/// An ACK per 16 KiB, however small the bursts are: were there one at the end of every burst, the old
/// way would get 32 per write of 64 KiB, and pay for them, where a kernel peer sends it ten.
const ACKS: AckRule = AckRule { packets: 0, bytes: 16 << 10, wait: Duration::from_millis(1) };

/// The stack, and the handle to its NIC.
pub struct Simulated {
    stack: Stack,
    handle: SimHandle,
    super_segments: bool,
}

impl Simulated {
    /// Makes a NIC without a limit of rate, and a stack on it.
    ///
    /// # Errors
    /// Too many open descriptors.
    pub fn new(super_segments: bool, pcap: Option<&PathBuf>) -> io::Result<Simulated> {
        let far_end = FarEnd { ack: ACKS, ..FarEnd::default() };
        let config = SimConfig { far_end, ..SimConfig::default() };
        let config = if super_segments { config } else { SimConfig { tso: None, ..config } };
        let (device, handle) = fulmar_nic::open(config).map_err(io::Error::other)?;
        let device = captured(device, pcap)?;
        let (near_cpu, _) = Placement::SameCpu.cpus(&cpu::allowed_cpus()?)?;
        let address = Cidr { address: IpAddr::V4(NEAR_IP), prefix_len: 24 };
        let stack = on_pinned_thread(near_cpu, || build(device, address, "sim"))?;
        Ok(Simulated { stack, handle, super_segments })
    }
}

impl Rig for Simulated {
    /// One CPU: one process is both ends.
    fn config(&self) -> RigConfig {
        RigConfig {
            device: "sim",
            placement: Placement::SameCpu,
            super_segments: self.super_segments,
        }
    }

    fn stream(
        &mut self,
        load: &Load,
        caller: &mut dyn Caller,
        time: Duration,
    ) -> io::Result<Transfer> {
        let (near_cpu, _) = Placement::SameCpu.cpus(&cpu::allowed_cpus()?)?;
        let (stack, handle) = (&self.stack, &self.handle);
        on_pinned_thread(near_cpu, || {
            let stream = TcpStream::connect(stack, FAR)?;
            let mut before = None;
            let mut at_start = || before = Some(handle.counts());
            let (near, mut counts) = run(stack, &stream, load, caller, time, &mut at_start)?;
            let (before, after) = (before.unwrap_or_default(), handle.counts());
            counts.extend([
                ("doorbells", after.doorbells - before.doorbells),
                ("interrupts", after.interrupts - before.interrupts),
                ("descriptors", after.descriptors - before.descriptors),
                ("peer_acks", after.peer_acks_out - before.peer_acks_out),
                ("peer_bytes", after.peer_bytes_in - before.peer_bytes_in),
            ]);
            let far = Report { cpu: Duration::ZERO, thread: Duration::ZERO, ..near };
            let sample = Transfer::of_ends(near, far, load.warm_bytes);
            let hardware = Duration::from_nanos(after.inline_ns - before.inline_ns);
            Ok(Transfer { counts, hardware, ..sample })
        })
    }
}
