//! What the kernel does beside it: its own ways of receiving, over veth, loopback and AF_UNIX.

use super::{Load, Use, way_name};
use crate::bench::{Cell, Run, Sample, Side, Way};
use crate::cpu::{self, Placement};
use crate::kernel::{Local, Pair};
use crate::kernel_calls::Sending;
use crate::kernel_receive::{ReceiveCall, Receiving};
use crate::peer::{Endpoint, Peer, Role, Spec};
use fulmar_netns::Netns;
use std::io;
use std::net::SocketAddr;
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
    /// Runs a receiver, which listens, and a source that reaches it.
    fn run(
        &self,
        [sender_netns, receiver_netns]: [&Netns; 2],
        at: Endpoint,
        placement: Placement,
        time: Duration,
    ) -> io::Result<Sample> {
        let (near_cpu, far_cpu) = placement.cpus(&cpu::allowed_cpus()?)?;
        let Load { buffers, buffer_bytes, usage, write_bytes, warm_bytes } = self.load;
        let (touch, wait_all) = (self.load.is_touched(), usage != Use::Bursty);
        let sink = Spec {
            role: Role::Sink,
            endpoint: at,
            cpu: near_cpu,
            buffer_bytes,
            warm_bytes,
            time,
            sending: Sending::default(),
            receiving: Receiving { call: self.call, buffers, touch, wait_all },
        };
        let receiver = Peer::spawn(&sink, receiver_netns)?;
        let to = match at {
            Endpoint::ListenLocal(n) => Endpoint::ConnectLocal(n),
            _ => Endpoint::Connect(receiver.address()),
        };
        let source = Spec {
            role: Role::Source,
            endpoint: to,
            cpu: far_cpu,
            buffer_bytes: write_bytes,
            sending: Sending { burst: self.load.burst(), ..Sending::default() },
            ..sink
        };
        let sent = Peer::spawn(&source, sender_netns)?.finish()?;
        let received = receiver.finish()?;
        let sample = Sample::of_ends(received, sent, warm_bytes);
        Ok(sample
            .count("reads_made", received.calls)
            .count("call_bytes", received.bytes)
            .count("waits", received.waits))
    }
}

/// A way of a bench: this call over this pair. The device of its name is `veth`.
pub fn pair_way(pair: &Pair, work: Work, placement: Placement) -> Way<'_> {
    let at = Endpoint::Listen(SocketAddr::new(Pair::RECEIVER, 0));
    let run = move |time| work.run(pair.ends(), at, placement, time);
    way_of("veth", pair.has_offloads(), work, placement, Box::new(run))
}

/// A way of a bench: this call between two processes in `netns`.
pub fn local_way(local: Local, netns: &Netns, work: Work, placement: Placement) -> Way<'_> {
    let at = local.endpoint();
    let run = move |time| work.run([netns, netns], at, placement, time);
    let mut way = way_of(local.name(), true, work, placement, Box::new(run));
    way.title = format!("{}, {}", way.title, local.title());
    way
}

fn way_of<'a>(
    device: &'static str,
    aggregation: bool,
    work: Work,
    placement: Placement,
    run: Run<'a>,
) -> Way<'a> {
    let cell = Cell {
        side: Side::Receives,
        device,
        method: work.call.name(),
        write_bytes: work.load.buffer_bytes,
        super_segments: aggregation,
        source: work.load.usage.name(),
    };
    let title = work.call.title().to_owned();
    Way { name: way_name(&cell, placement), title, placement, cell: Some(cell), run }
}
