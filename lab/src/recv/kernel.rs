//! The kernel's own ways of receiving, for comparison: over veth, loopback and AF_UNIX.

use super::{Load, Use, scenario_name};
use crate::cpu::{self, Placement};
use crate::harness::Scenario;
use crate::kernel::KernelPair;
use crate::kernel_calls::Sending;
use crate::kernel_receive::{ReceiveCall, Receiving};
use crate::peer::{Role, Spec};
use crate::transfer::{self, Cell, Side, Transfer};
use std::io;
use std::time::Duration;

/// A call of the kernel's under a load.
#[derive(Clone, Copy, Debug)]
pub struct Work {
    /// Which call.
    pub call: ReceiveCall,
    /// What it gets, and into which buffers.
    pub load: Load,
}

impl Work {
    fn run(
        &self,
        ends: &KernelPair<'_>,
        placement: Placement,
        time: Duration,
    ) -> io::Result<Transfer> {
        let (near_cpu, far_cpu) = placement.cpus(&cpu::allowed_cpus()?)?;
        let Load { buffers, buffer_bytes, usage, write_bytes, warm_bytes } = self.load;
        let (touch, wait_all) = (self.load.is_touched(), usage != Use::Bursty);
        let sink = Spec {
            role: Role::Sink,
            endpoint: ends.at,
            cpu: near_cpu,
            buffer_bytes,
            warm_bytes,
            time,
            sending: Sending::default(),
            receiving: Receiving { call: self.call, buffers, touch, wait_all },
        };
        let sending = Sending { burst: self.load.burst(), ..Sending::default() };
        let source = Spec { cpu: far_cpu, buffer_bytes: write_bytes, sending, ..sink };
        let [sent, received] = ends.run(sink, source)?;
        Ok(Transfer::of_ends(received, sent, warm_bytes)
            .count("reads_made", received.calls)
            .count("call_bytes", received.bytes)
            .count("waits", received.waits))
    }

    /// The scenario of this call between such ends.
    pub fn between(self, ends: KernelPair<'_>, placement: Placement) -> Scenario<'_> {
        let cell = Cell {
            side: Side::Receives,
            device: ends.device,
            method: self.call.name(),
            write_bytes: self.load.buffer_bytes,
            super_segments: ends.offloads,
            source: self.load.usage.name(),
        };
        let title = format!("{}{}", self.call.title(), ends.said);
        let run = move |time| self.run(&ends, placement, time);
        cell.of(transfer::scenario(scenario_name(&cell, placement), title, placement, run))
    }
}
