//! A stack of ours over a real device, and a kernel peer that sends.

use super::run::{Asking, StopCondition, run};
use super::{Load, Offloads, Reader, Rig, RigConfig, Target};
use crate::cpu::{self, Placement};
use crate::kernel::send::Sending;
use crate::on_pinned_thread;
use crate::peer::{Peer, Role, Spec};
use crate::stream::{Over, Testbed};
use crate::transfer::Transfer;
use fulmar::TcpStream;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// The stack with its device, and what that does for it.
pub(crate) struct Real {
    testbed: Testbed,
    offloads: Offloads,
}

impl Real {
    /// Makes namespaces, device and stack. Without aggregation the interface of the kernel's end cuts
    /// nothing and sums itself, so that packets arrive as on a wire.
    ///
    /// # Errors
    /// The error of the device or the namespaces.
    pub fn new(
        over: Over,
        placement: Placement,
        offloads: Offloads,
        pcap: Option<&PathBuf>,
    ) -> io::Result<Real> {
        let testbed = Testbed::for_receiving(over, placement, offloads, pcap)?;
        Ok(Real { testbed, offloads })
    }
}

impl Rig for Real {
    fn config(&self) -> RigConfig {
        RigConfig {
            device: self.testbed.over().name(),
            placement: self.testbed.placement,
            offloads: self.offloads,
        }
    }

    fn stream(
        &mut self,
        load: &Load,
        reader: &mut dyn Reader,
        time: Duration,
    ) -> io::Result<Transfer> {
        let (near_cpu, far_cpu) = self.testbed.placement.cpus(&cpu::allowed_cpus()?)?;
        let source = Spec {
            cpu: far_cpu,
            sending: Sending { burst: load.burst(), ..Sending::default() },
            ..Spec::new(Role::Source, load.write_bytes, load.warm_bytes, time)
        };
        let peer = Peer::spawn(&source, &self.testbed.topology.peer_netns)?;
        let stack = &self.testbed.stack;
        let (near, counts) = on_pinned_thread(near_cpu, || {
            let stream = TcpStream::connect(stack, peer.address())?;
            let from = Target { stack, stream: &stream };
            run(&from, load, reader, StopCondition::Sender, Asking::Not, &mut || ())
        })?;
        let sample = Transfer::of_ends(near, peer.finish()?, load.warm_bytes);
        Ok(Transfer { counts, ..sample })
    }
}
