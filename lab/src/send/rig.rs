//! Where connections are made: a stack of ours over a real device against a kernel peer, or joined to
//! another stack of ours.

use super::{BUFFER_BYTES, Caller, Load, Rig, RigConfig, Target};
use crate::cpu;
use crate::on_pinned_thread;
use crate::peer::{Peer, Report, Role, Spec};
use crate::recv::drain;
use crate::stream::{Counts, FAR_IP, Joined, Start, Testbed};
use crate::transfer::Transfer;
use fulmar::{SocketOptions, Stack, TcpListener, TcpStream};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::thread;
use std::time::Duration;

/// Calls between two looks at the clock: a look costs a hundredth of a write of 64 KiB, which is no
/// part of any way. The copy that writes are compared with looks once per 16 of them.
const CALLS_PER_LOOK: u64 = 8;

/// Lets `caller` send: first the warm-up, then, after a word to `at_start`, for `time`, measured.
/// Returns this end's account.
pub(super) fn run(
    stack: &Stack,
    stream: &TcpStream,
    load: &Load,
    caller: &mut dyn Caller,
    time: Duration,
    at_start: &mut dyn FnMut(),
) -> io::Result<(Report, Counts)> {
    let send_buffer = Some(load.buffer_bytes.unwrap_or(BUFFER_BYTES));
    stream.set_options(SocketOptions { send_buffer, ..stream.options()? })?;
    let to = Target { stack, stream };
    let mut warm = 0;
    while warm < load.warm_bytes {
        warm += caller.call(&to)?;
    }
    at_start();
    let start = Start::now(stack)?;
    let (mut bytes, mut calls) = (0, 0);
    while start.at.elapsed() < time {
        for _ in 0..CALLS_PER_LOOK {
            bytes += caller.call(&to)?;
        }
        calls += CALLS_PER_LOOK;
    }
    let (report, mut counts) = start.report(stack, bytes, calls)?;
    caller.finish(&to)?;
    counts.push(("calls", calls));
    counts.push(("call_bytes", bytes));
    let by_stack = counts.iter().find(|(n, _)| *n == "copied_bytes").map_or(0, |(_, n)| *n);
    counts.push(("all_copied_bytes", by_stack + bytes * caller.copies_per_byte()));
    Ok((report, counts))
}

impl Rig for Testbed {
    fn config(&self) -> RigConfig {
        RigConfig {
            device: self.over().name(),
            placement: self.placement,
            super_segments: self.super_segments,
        }
    }

    fn stream(
        &mut self,
        load: &Load,
        caller: &mut dyn Caller,
        time: Duration,
    ) -> io::Result<Transfer> {
        let (near_cpu, far_cpu) = self.placement.cpus(&cpu::allowed_cpus()?)?;
        let sink = Spec::new(Role::Sink, load.read_bytes, load.warm_bytes, time);
        let sink = Spec { cpu: far_cpu, ..sink };
        let peer = Peer::spawn(&sink, &self.topology.peer_netns)?;
        let stack = &self.stack;
        let (near, counts) = on_pinned_thread(near_cpu, || {
            let stream = TcpStream::connect(stack, peer.address())?;
            run(stack, &stream, load, caller, time, &mut || ())
        })?;
        let sample = Transfer::of_ends(near, peer.finish()?, load.warm_bytes);
        Ok(Transfer { counts, ..sample })
    }
}

impl Rig for Joined {
    fn config(&self) -> RigConfig {
        RigConfig { device: "link", placement: self.placement, super_segments: self.super_segments }
    }

    fn stream(
        &mut self,
        load: &Load,
        caller: &mut dyn Caller,
        time: Duration,
    ) -> io::Result<Transfer> {
        let (near_cpu, far_cpu) = self.placement.cpus(&cpu::allowed_cpus()?)?;
        let listener = TcpListener::bind(&self.far, SocketAddr::new(IpAddr::V4(FAR_IP), 0))?;
        let to = listener.local_addr()?;
        let (near, far) = (&self.near, &self.far);
        let (read_bytes, warm_bytes) = (load.read_bytes, load.warm_bytes);
        let (sent, received) = thread::scope(|scope| {
            let reader = scope.spawn(move || {
                let take = || drain(far, &listener.accept()?.0, read_bytes, warm_bytes);
                on_pinned_thread(far_cpu, take)
            });
            let sent = on_pinned_thread(near_cpu, || {
                run(near, &TcpStream::connect(near, to)?, load, caller, time, &mut || ())
            });
            let received = reader.join().unwrap_or_else(|_| Err(io::Error::other("it panicked")));
            sent.and_then(|s| Ok((s, received?)))
        })?;
        let (near, counts) = sent;
        // The other end's time and bytes; its CPU is in the process's account already.
        let far = Report { cpu: Duration::ZERO, ..received };
        let sample = Transfer::of_ends(near, far, load.warm_bytes);
        Ok(Transfer { counts, ..sample })
    }
}
