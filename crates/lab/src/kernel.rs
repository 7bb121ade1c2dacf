//! The kernel against itself: two namespaces joined by a veth pair, a source in one and a sink in
//! the other. What a stack of our own is compared with.

use crate::bench::{Sample, Way};
use crate::cpu::Placement;
use crate::netlink::VethEnd;
use crate::netns::Netns;
use crate::peer::{Endpoint, Peer, Role, Spec};
use crate::{Bulk, cpu};
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
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
