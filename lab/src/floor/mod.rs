//! The floor: the least that TCP over a device can cost against a kernel peer.
//!
//! A do-nothing peer ([`flow`]) with prebuilt headers, no timers, no payload copy and the cheapest
//! acknowledging that keeps the kernel sending, on the same device and against the same kernel peer
//! as the stack that is judged; optionally plus the one copy that a socket interface cannot avoid.
//! A stack's cost over its floor is the stack's own.
//!
//! The choices, which a stack compared with it should share: MTU 1500, timestamps and window
//! scaling, no SACK, super-frames of 45 packets, one read or write call per frame, sleeping (not
//! spinning) when there is nothing to do.

pub mod device;
pub mod flow;
pub mod segment;

use crate::Bulk;
use crate::cpu::{self, Placement};
use crate::harness::Scenario;
use crate::peer::{Peer, Role, Spec};
use crate::topology::{self, OUR_IP, OUR_MAC, PEER_IP, PEER_MAC, Topology};
use crate::transfer::{self, Transfer};
use device::{FrameDevice, Packet, Tap};
use flow::{Counts, Flow, Load};
use segment::Addresses;
use std::cell::RefCell;
use std::io;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

/// Which device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// TAP with virtio-net header.
    Tap,
    /// AF_PACKET on veth.
    Packet,
}

impl Kind {
    /// The name in scenarios and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Kind::Tap => "tap",
            Kind::Packet => "packet",
        }
    }

    /// The name in tables.
    pub const fn title(self) -> &'static str {
        match self {
            Kind::Tap => "TAP",
            Kind::Packet => "AF_PACKET",
        }
    }
}

impl Direction {
    /// The name in scenarios and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Direction::Send => "send",
            Direction::Receive => "recv",
        }
    }
}

/// Which way the bytes go, seen from us.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Direction {
    /// To the kernel peer.
    Send,
    /// From the kernel peer.
    Receive,
}

/// A device of the floor, the namespace of its kernel peers, and the ports used so far.
pub struct Testbed {
    kind: Kind,
    topology: Topology<Box<dyn FrameDevice>>,
    next_port: AtomicU16,
}

impl Testbed {
    /// Makes namespaces and device. Needs root in the user namespace: see [`fulmar_gateway::netns::enter`].
    pub fn new(kind: Kind) -> io::Result<Testbed> {
        let boxed = |device: Packet| -> Box<dyn FrameDevice> { Box::new(device) };
        let topology = match kind {
            Kind::Tap => topology::tap(|name| Ok(Box::new(Tap::open(name)?) as _))?,
            Kind::Packet => topology::packet(|name| Packet::open(name).map(boxed))?,
        };
        Ok(Testbed { kind, topology, next_port: AtomicU16::new(0) })
    }

    /// The kind of device.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Runs one connection for about `time`. `near` in the sample is this thread's account, `far`
    /// the kernel peer's process. `copy`: also copy every byte once, as the stack will have to.
    pub fn stream(
        &mut self,
        bulk: &Bulk,
        direction: Direction,
        copy: bool,
        placement: Placement,
        time: Duration,
    ) -> io::Result<Transfer> {
        let (near_cpu, far_cpu) = placement.cpus(&cpu::allowed_cpus()?)?;
        let (role, user_bytes, peer_bytes) = match direction {
            Direction::Send => (Role::Sink, bulk.write_bytes, bulk.read_bytes),
            Direction::Receive => (Role::Source, bulk.read_bytes, bulk.write_bytes),
        };
        let spec = Spec { cpu: far_cpu, ..Spec::new(role, peer_bytes, bulk.warm_bytes, time) };
        let peer = Peer::spawn(&spec, &self.topology.peer_netns)?;
        let addresses = self.addresses(peer.address().port());
        let load = Load {
            window_bytes: bulk.window_bytes,
            copy_bytes: if copy { user_bytes } else { 0 },
            frames_per_ack: bulk.frames_per_ack,
            warm_bytes: bulk.warm_bytes,
            time,
        };
        let (near, counts) = self.run_flow(addresses, direction, &load, near_cpu)?;
        Ok(counted(Transfer::of_ends(near, peer.finish()?, bulk.warm_bytes), &counts))
    }

    fn addresses(&self, peer_port: u16) -> Addresses {
        // A new port each time: the last connection's may be in TIME_WAIT at the peer.
        let our_port = 32_768 | self.next_port.fetch_add(1, Ordering::Relaxed);
        Addresses {
            our_mac: OUR_MAC,
            peer_mac: PEER_MAC,
            our_ip: OUR_IP,
            peer_ip: PEER_IP,
            our_port,
            peer_port,
        }
    }

    /// Runs the flow on a thread of its own, because pinning must not outlive the run.
    fn run_flow(
        &mut self,
        addresses: Addresses,
        direction: Direction,
        load: &Load,
        cpu: Option<usize>,
    ) -> io::Result<(crate::peer::Report, Counts)> {
        let device = self.topology.device.as_mut();
        crate::on_pinned_thread(cpu, move || {
            let flow = Flow::connect(device, addresses, load.window_bytes)?;
            match direction {
                Direction::Send => flow.send(load),
                Direction::Receive => flow.receive(load),
            }
        })
    }
}

fn counted(sample: Transfer, counts: &Counts) -> Transfer {
    sample
        .count("data_frames", counts.data_frames)
        .count("ack_frames", counts.ack_frames)
        .count("waits", counts.waits)
        .count("out_of_order", counts.out_of_order)
}

/// The way `floor.DEVICE.DIRECTION.PLACEMENT`; without the copy, `floor.DEVICE.DIRECTION.bare.…`.
pub fn scenario(
    testbed: &RefCell<Testbed>,
    bulk: Bulk,
    direction: Direction,
    copy: bool,
    placement: Placement,
) -> Scenario<'_> {
    let kind = testbed.borrow().kind;
    let bare = if copy { "" } else { ".bare" };
    let verb = match direction {
        Direction::Send => "sending",
        Direction::Receive => "receiving",
    };
    let with = if copy { " + memcpy" } else { "" };
    transfer::scenario(
        format!("floor.{}.{}{bare}.{}", kind.name(), direction.name(), placement.name()),
        format!("do-nothing TCP{with}, {}, {verb}", kind.title()),
        placement,
        move |time| testbed.borrow_mut().stream(&bulk, direction, copy, placement, time),
    )
}
