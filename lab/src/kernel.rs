//! The kernel against itself: two namespaces joined by a veth pair, a source in one and a sink in
//! the other. What a stack of our own is compared with.

use crate::bench::{Cell, Run, Sample, Side, Way};
use crate::cpu::Placement;
use crate::file::{BenchFile, Heat};
use crate::kernel_calls::{FileOf, KernelCall, Sending};
use crate::kernel_receive::Receiving;
use crate::peer::{Endpoint, Peer, Role, Spec};
use crate::send::{self, Load};
use crate::{Bulk, cpu};
use fulmar_netns::Netns;
use fulmar_netns::VethEnd;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::AsRawFd;
use std::time::Duration;

const NEAR: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 71, 0, 1));
const FAR: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 71, 0, 2));

/// Two namespaces joined by veth, each with an address.
pub struct Pair {
    near: Netns,
    far: Netns,
    offloads: bool,
}

impl Pair {
    /// Makes them. With `offloads` false, segmentation, receive coalescing and checksum offload are
    /// off at both ends.
    pub fn new(mtu: u32, offloads: bool) -> io::Result<Pair> {
        let (near, far) = (Netns::new()?, Netns::new()?);
        let end = |name, last| VethEnd { name, mac: [2, 0, 0, 0, 0x71, last], mtu };
        near.add_veth(&end("veth0", 1), &far, &end("veth1", 2))?;
        if !offloads {
            near.set_offloads("veth0", false)?;
            far.set_offloads("veth1", false)?;
        }
        near.set_address("veth0", NEAR, 24)?;
        far.set_address("veth1", FAR, 24)?;
        Ok(Pair { near, far, offloads })
    }

    /// The address of the end that receives.
    pub const RECEIVER: IpAddr = FAR;

    /// Whether segmentation, receive coalescing and checksum offload are on.
    pub fn has_offloads(&self) -> bool {
        self.offloads
    }

    /// The namespaces of the end that sends and of the one that receives.
    pub fn ends(&self) -> [&Netns; 2] {
        [&self.near, &self.far]
    }

    /// Sends for about `time`. `near` in the sample is the sender, `far` the receiver.
    pub fn stream(&self, bulk: &Bulk, placement: Placement, time: Duration) -> io::Result<Sample> {
        let (near_cpu, far_cpu) = placement.cpus(&cpu::allowed_cpus()?)?;
        let sink = Spec {
            role: Role::Sink,
            endpoint: Endpoint::Listen(SocketAddr::new(FAR, 0)),
            cpu: far_cpu,
            buffer_bytes: bulk.read_bytes,
            warm_bytes: bulk.warm_bytes,
            time,
            sending: Sending::default(),
            receiving: Receiving::default(),
        };
        let sink_peer = Peer::spawn(&sink, &self.far)?;
        let source = Spec {
            role: Role::Source,
            endpoint: Endpoint::Connect(sink_peer.address()),
            cpu: near_cpu,
            buffer_bytes: bulk.write_bytes,
            ..sink
        };
        let sent = Peer::spawn(&source, &self.near)?.finish()?;
        let received = sink_peer.finish()?;
        Ok(Sample::of_ends(sent, received, bulk.warm_bytes).count("write_calls", sent.calls))
    }
}

/// A call of the kernel's under a load, from a file if it needs one.
#[derive(Clone, Copy, Debug)]
pub struct Work<'a> {
    /// Which call.
    pub call: KernelCall,
    /// How much at once, and with which buffers.
    pub load: Load,
    /// What is sent by the calls that send a file, and which part of it.
    pub file: Option<(&'a BenchFile, Heat)>,
}

impl Work<'_> {
    fn sending(&self) -> Sending {
        let of = |(file, heat): (&BenchFile, Heat)| FileOf {
            pid: std::process::id(),
            fd: file.file().as_raw_fd(),
            bytes: file.bytes(),
            heat,
        };
        Sending {
            call: self.call,
            file: self.file.map(of),
            socket_buffer_bytes: self.load.buffer_bytes,
            burst: None,
        }
    }

    /// Runs a sink at `far` in `far_netns` and a source that reaches it in `near_netns`.
    fn run(
        &self,
        [near_netns, far_netns]: [&Netns; 2],
        far: Endpoint,
        placement: Placement,
        time: Duration,
    ) -> io::Result<Sample> {
        let (near_cpu, far_cpu) = placement.cpus(&cpu::allowed_cpus()?)?;
        let sink = Spec {
            role: Role::Sink,
            endpoint: far,
            cpu: far_cpu,
            buffer_bytes: self.load.read_bytes,
            warm_bytes: self.load.warm_bytes,
            time,
            sending: self.sending(),
            receiving: Receiving::default(),
        };
        let sink_peer = Peer::spawn(&sink, far_netns)?;
        let near = match far {
            Endpoint::ListenLocal(n) => Endpoint::ConnectLocal(n),
            _ => Endpoint::Connect(sink_peer.address()),
        };
        let source = Spec {
            role: Role::Source,
            endpoint: near,
            cpu: near_cpu,
            buffer_bytes: self.load.write_bytes,
            ..sink
        };
        let sent = Peer::spawn(&source, near_netns)?.finish()?;
        let received = sink_peer.finish()?;
        let sample = Sample::of_ends(sent, received, self.load.warm_bytes);
        Ok(sample
            .count("calls", sent.calls)
            .count("zerocopy_sends", sent.zerocopy.0)
            .count("zerocopy_copied", sent.zerocopy.1))
    }
}

impl Pair {
    /// A way of a bench: this call over this pair. Its name is that of [`send::way_name`], the device
    /// `veth`.
    pub fn way<'a>(&'a self, work: Work<'a>, placement: Placement) -> Way<'a> {
        let far = Endpoint::Listen(SocketAddr::new(FAR, 0));
        let run = move |time| work.run([&self.near, &self.far], far, placement, time);
        way_of("veth", self.offloads, work, placement, Box::new(run))
    }
}

/// How two processes on one host talk through the kernel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Local {
    /// TCP over the loopback interface.
    Loopback,
    /// A stream socket of AF_UNIX.
    Unix,
}

impl Local {
    /// Both.
    pub const ALL: [Local; 2] = [Local::Loopback, Local::Unix];

    /// The name in ways and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Local::Loopback => "loopback",
            Local::Unix => "unix",
        }
    }

    /// The name in tables.
    pub const fn title(self) -> &'static str {
        match self {
            Local::Loopback => "TCP over loopback",
            Local::Unix => "AF_UNIX",
        }
    }

    /// Where the end that receives listens.
    pub fn endpoint(self) -> Endpoint {
        match self {
            Local::Loopback => Endpoint::Listen(SocketAddr::from(([127, 0, 0, 1], 0))),
            Local::Unix => Endpoint::ListenLocal(std::process::id()),
        }
    }

    /// A way of a bench: this call between two processes in `netns`. Its name is that of
    /// [`send::way_name`], the device `loopback` or `unix`.
    pub fn way<'a>(self, netns: &'a Netns, work: Work<'a>, placement: Placement) -> Way<'a> {
        let far = self.endpoint();
        let run = move |time| work.run([netns, netns], far, placement, time);
        let mut way = way_of(self.name(), true, work, placement, Box::new(run));
        way.title = format!("{}, {}", way.title, self.title());
        way
    }
}

fn way_of<'a>(
    device: &'static str,
    super_segments: bool,
    work: Work<'a>,
    placement: Placement,
    run: Run<'a>,
) -> Way<'a> {
    let cell = Cell {
        side: Side::Sends,
        device,
        method: work.call.name(),
        write_bytes: work.load.write_bytes,
        super_segments,
        source: work.file.map_or("hot", |(_, heat)| heat.name()),
    };
    Way {
        name: send::way_name(&cell, placement),
        title: work.call.title().to_owned(),
        placement,
        cell: Some(cell),
        run,
    }
}

/// The way `kernel.PLACEMENT` over this pair; without offloads, `kernel.no_offloads.PLACEMENT`.
pub fn way(pair: &Pair, bulk: Bulk, placement: Placement) -> Way<'_> {
    let (plain, said) = if pair.offloads { ("", "") } else { (".no_offloads", ", no offloads") };
    Way {
        name: format!("kernel{plain}.{}", placement.name()),
        title: format!("kernel to kernel, veth{said}"),
        placement,
        cell: None,
        run: Box::new(move |time| pair.stream(&bulk, placement, time)),
    }
}
