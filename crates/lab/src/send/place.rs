//! Where connections are made: a stack of ours over a real device against a kernel peer.

use super::{BUFFER_BYTES, Caller, Load, Place, Target};
use crate::bench::Sample;
use crate::cpu::{self, Placement};
use crate::kernel_calls::Sending;
use crate::on_pinned_thread;
use crate::peer::{Endpoint, Peer, Report, Role, Spec};
use crate::site::PEER_IP;
use crate::stream::{Counts, Ground, Start};
use fulmar::{Stack, TcpStream};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

/// Lets `caller` send: first the warm-up, then for `time`, measured. Returns this end's account.
pub(super) fn run(
    stack: &Stack,
    stream: &TcpStream,
    load: &Load,
    caller: &mut dyn Caller,
    time: Duration,
) -> io::Result<(Report, Counts)> {
    stream.set_send_buffer(load.buffer_bytes.unwrap_or(BUFFER_BYTES))?;
    let to = Target { stack, stream };
    let mut warm = 0;
    while warm < load.warm_bytes {
        warm += caller.call(&to)?;
    }
    let start = Start::now(stack)?;
    let (mut bytes, mut calls) = (0, 0);
    while start.at.elapsed() < time {
        bytes += caller.call(&to)?;
        calls += 1;
    }
    let (report, mut counts) = start.report(stack, bytes, calls)?;
    counts.push(("calls", calls));
    counts.push(("call_bytes", bytes));
    Ok((report, counts))
}

impl Place for Ground {
    fn device(&self) -> &'static str {
        self.over().name()
    }

    fn device_title(&self) -> &'static str {
        self.over().title()
    }

    fn placement(&self) -> Placement {
        self.placement
    }

    fn super_segments(&self) -> bool {
        self.super_segments
    }

    fn stream(
        &mut self,
        load: &Load,
        caller: &mut dyn Caller,
        time: Duration,
    ) -> io::Result<Sample> {
        let (near_cpu, far_cpu) = self.placement.cpus(&cpu::allowed_cpus()?)?;
        let sink = Spec {
            role: Role::Sink,
            endpoint: Endpoint::Listen(SocketAddr::new(IpAddr::V4(PEER_IP), 0)),
            cpu: far_cpu,
            buffer_bytes: load.read_bytes,
            warm_bytes: load.warm_bytes,
            time,
            sending: Sending::default(),
        };
        let peer = Peer::spawn(&sink, &self.site.peer_netns)?;
        let stack = &self.stack;
        let (near, counts) = on_pinned_thread(near_cpu, || {
            let stream = TcpStream::connect(stack, peer.address())?;
            run(stack, &stream, load, caller, time)
        })?;
        let sample = Sample::of_ends(near, peer.finish()?, load.warm_bytes);
        Ok(Sample { counts, ..sample })
    }
}
