//! The kernel against itself: two namespaces joined by a veth pair, a source in one and a sink in
//! the other. What a stack of our own is compared with.

pub mod receive;
pub mod send;

use self::send::{FileOf, KernelCall, Sending};
use crate::cpu::{self, Placement};
use crate::file::{BenchFile, CacheState};
use crate::harness::Scenario;
use crate::peer::{Endpoint, Peer, Report, Role, Spec};
use crate::send::{Load, scenario_name};
use crate::transfer::{self, Cell, Side, Transfer};
use fulmar_gateway::netns::Netns;
use fulmar_gateway::netns::VethEnd;
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
    /// The near end's address.
    pub(crate) const NEAR: IpAddr = NEAR;
    /// The far end's address.
    pub(crate) const FAR: IpAddr = FAR;

    /// The near end's namespace.
    pub(crate) fn near(&self) -> &Netns {
        &self.near
    }

    /// The far end's namespace.
    pub(crate) fn far(&self) -> &Netns {
        &self.far
    }

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

    /// Whether segmentation, receive coalescing and checksum offload are on.
    pub fn has_offloads(&self) -> bool {
        self.offloads
    }

    /// The ends of a connection over this pair. The device of its name is `veth`.
    pub fn ends(&self) -> KernelPair<'_> {
        let at = Endpoint::Listen(SocketAddr::new(FAR, 0));
        let Pair { near, far, offloads } = self;
        KernelPair {
            sender: near,
            receiver: far,
            at,
            device: "veth",
            offloads: *offloads,
            said: "",
        }
    }
}

/// Where two kernel processes are that talk to each other.
#[derive(Clone, Copy)]
pub struct KernelPair<'a> {
    sender: &'a Netns,
    receiver: &'a Netns,
    /// Where the end that receives listens.
    pub at: Endpoint,
    /// The name in scenarios and JSON.
    pub device: &'static str,
    /// Whether segmentation and receive coalescing are on.
    pub offloads: bool,
    /// Behind the titles of ways.
    pub said: &'static str,
}

impl KernelPair<'_> {
    /// Runs a listening sink and a source that connects to it; returns the accounts of both.
    pub fn run(&self, sink: Spec, source: Spec) -> io::Result<[Report; 2]> {
        let receiver = Peer::spawn(&Spec { endpoint: self.at, ..sink }, self.receiver)?;
        let endpoint = match self.at {
            Endpoint::ListenLocal(n) => Endpoint::ConnectLocal(n),
            _ => Endpoint::Connect(receiver.address()),
        };
        let source = Spec { role: Role::Source, endpoint, ..source };
        let sent = Peer::spawn(&source, self.sender)?.finish()?;
        Ok([sent, receiver.finish()?])
    }
}

/// A call of the kernel's under a load, from a file if it needs one.
#[derive(Clone, Copy, Debug)]
pub struct Work<'a> {
    /// Which call.
    pub call: KernelCall,
    /// How much at once, and with which buffers.
    pub load: Load,
    /// The file for calls that send files, and the part of it.
    pub file: Option<(&'a BenchFile, CacheState)>,
}

impl<'a> Work<'a> {
    fn sending(&self) -> Sending {
        let of = |(file, heat): (&BenchFile, CacheState)| FileOf {
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

    /// Sends for about `time`. `near` in the transfer is the sender, `far` the receiver.
    ///
    /// # Errors
    /// The error of the connection.
    pub fn run(
        &self,
        ends: &KernelPair<'_>,
        placement: Placement,
        time: Duration,
    ) -> io::Result<Transfer> {
        let (near_cpu, far_cpu) = placement.cpus(&cpu::allowed_cpus()?)?;
        let Load { read_bytes, write_bytes, warm_bytes, .. } = self.load;
        let sink = Spec {
            cpu: far_cpu,
            sending: self.sending(),
            ..Spec::new(Role::Sink, read_bytes, warm_bytes, time)
        };
        let source = Spec { cpu: near_cpu, buffer_bytes: write_bytes, ..sink };
        let [sent, received] = ends.run(sink, source)?;
        Ok(Transfer::of_ends(sent, received, self.load.warm_bytes)
            .count("calls", sent.calls)
            .count("zerocopy_sends", sent.zerocopy.0)
            .count("zerocopy_copied", sent.zerocopy.1))
    }

    /// The scenario of this call between such ends. Its name is that of [`scenario_name`].
    pub fn between(self, ends: KernelPair<'a>, placement: Placement) -> Scenario<'a> {
        let cell = Cell {
            side: Side::Sends,
            device: ends.device,
            method: self.call.name(),
            write_bytes: self.load.write_bytes,
            super_segments: ends.offloads,
            source: self.file.map_or("hot", |(_, heat)| heat.name()),
        };
        let (name, title) = (scenario_name(&cell, placement), self.call.title());
        let title = format!("{title}{}", ends.said);
        cell.of(transfer::scenario(name, title, placement, move |time| {
            self.run(&ends, placement, time)
        }))
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

    /// The name in scenarios and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Local::Loopback => "loopback",
            Local::Unix => "unix",
        }
    }

    /// The ends of a connection between two processes in `netns`.
    pub fn ends(self, netns: &Netns) -> KernelPair<'_> {
        let (at, said) = match self {
            Local::Loopback => {
                (Endpoint::Listen(SocketAddr::from(([127, 0, 0, 1], 0))), ", TCP over loopback")
            }
            Local::Unix => (Endpoint::ListenLocal(std::process::id()), ", AF_UNIX"),
        };
        let device = self.name();
        KernelPair { sender: netns, receiver: netns, at, device, offloads: true, said }
    }
}
