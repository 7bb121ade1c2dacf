//! Where streams of fulmar run: a stack over a real device against a kernel peer, and two stacks joined
//! by `link`; and the account of fulmar's end.
//!
//! The account is the CPU time of this whole process (the caller's thread and the stack's service
//! thread): whatever the stack does anywhere is in it.

use crate::cpu::{self, MachineClock, Placement};
use crate::peer::Report;
use crate::recv;
use crate::topology::{self, OUR_IP, OUR_MAC, PREFIX, Topology};
use crate::without_tso::WithoutTso;
use crate::{heap, on_pinned_thread};
use fulmar::device::Device;
use fulmar::device::EtherAddr;
use fulmar::stat::Counter;
use fulmar::{Cidr, Stack, devices};
use fulmar_nic::thread_hardware_ns;
use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Which real device carries fulmar.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Over {
    /// TAP with virtio-net header.
    Tap,
    /// AF_PACKET on veth.
    Packet,
}

impl Over {
    /// The name in scenarios and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Over::Tap => "tap",
            Over::Packet => "packet",
        }
    }

    /// The name in tables.
    pub const fn title(self) -> &'static str {
        match self {
            Over::Tap => "TAP",
            Over::Packet => "AF_PACKET",
        }
    }
}

/// Segment statistics of a stack.
struct Made {
    /// Super-segments, to send.
    super_segments: bool,
    /// One of several received ones, in software.
    gro: bool,
}

/// A stack over a real device, and the namespace of its kernel peers.
pub struct Testbed {
    over: Over,
    pub(crate) placement: Placement,
    /// Whether the stack may make super-segments.
    pub(crate) super_segments: bool,
    pub(crate) stack: Stack,
    pub(crate) topology: Topology<()>,
}

impl Testbed {
    /// Makes namespaces, device and stack. The stack's service thread runs where the placement
    /// puts our end. Needs root in the user namespace: see [`fulmar_gateway::netns::enter`].
    ///
    /// # Errors
    /// The error of the device or the namespaces.
    pub fn new(over: Over, placement: Placement, pcap: Option<&PathBuf>) -> io::Result<Testbed> {
        Testbed::with_super_segments(over, placement, true, pcap)
    }

    /// As [`Testbed::new`]; without super-segments the device looks to the stack as if it could not
    /// cut them (no TSO), and is otherwise the same.
    ///
    /// # Errors
    /// As [`Testbed::new`].
    pub fn with_super_segments(
        over: Over,
        placement: Placement,
        super_segments: bool,
        pcap: Option<&PathBuf>,
    ) -> io::Result<Testbed> {
        let topology = open_topology(over)?;
        let wrap = |device| -> Box<dyn Device> {
            if super_segments { device } else { Box::new(WithoutTso::new(device)) }
        };
        let made = Made { super_segments, gro: true };
        Testbed::on(topology, over, placement, pcap, wrap, made)
    }

    /// A testbed on which the kernel peer sends. Without aggregation the kernel's end cuts its
    /// segments itself.
    ///
    /// # Errors
    /// As [`Testbed::new`].
    pub(crate) fn for_receiving(
        over: Over,
        placement: Placement,
        offloads: recv::Offloads,
        pcap: Option<&PathBuf>,
    ) -> io::Result<Testbed> {
        let topology = open_topology(over)?;
        if !offloads.aggregation {
            let name = if over == Over::Tap { "tap0" } else { "veth1" };
            topology.peer_netns.set_offloads(name, false)?;
        }
        let made = Made { super_segments: true, gro: offloads.aggregation };
        Testbed::on(topology, over, placement, pcap, |device| offloads.limit(device), made)
    }

    fn on(
        topology: Topology<Box<dyn Device>>,
        over: Over,
        placement: Placement,
        pcap: Option<&PathBuf>,
        wrap: impl FnOnce(Box<dyn Device>) -> Box<dyn Device>,
        Made { super_segments, gro }: Made,
    ) -> io::Result<Testbed> {
        let Topology { device, peer_netns, _our_netns } = topology;
        let device = captured(device, pcap)?;
        let device = wrap(device);
        let (near_cpu, _) = placement.cpus(&cpu::allowed_cpus()?)?;
        let address = Cidr { address: IpAddr::V4(OUR_IP), prefix_len: PREFIX };
        let stack = on_pinned_thread(near_cpu, || build_with(device, address, over.name(), gro))?;
        let topology = Topology { device: (), peer_netns, _our_netns };
        Ok(Testbed { over, placement, super_segments, stack, topology })
    }

    /// The kind of device.
    pub fn over(&self) -> Over {
        self.over
    }
}

fn open_topology(over: Over) -> io::Result<Topology<Box<dyn Device>>> {
    match over {
        Over::Tap => topology::tap(open_tap),
        Over::Packet => topology::packet(open_packet),
    }
}

fn open_tap(name: &str) -> io::Result<Box<dyn Device>> {
    let config = devices::TapConfig {
        name: name.to_owned(),
        ether: Some(EtherAddr(OUR_MAC)),
        ..Default::default()
    };
    let tap = devices::Tap::open(&config).map_err(io::Error::other)?;
    Ok(Box::new(tap))
}

fn open_packet(name: &str) -> io::Result<Box<dyn Device>> {
    let config = devices::PacketConfig {
        interface: name.to_owned(),
        ether: Some(EtherAddr(OUR_MAC)),
        ..Default::default()
    };
    let socket = devices::PacketSocket::open(&config).map_err(io::Error::other)?;
    Ok(Box::new(socket))
}

/// The device, whose frames are written to this file if there is one.
pub(crate) fn captured(
    device: Box<dyn Device>,
    pcap: Option<&PathBuf>,
) -> io::Result<Box<dyn Device>> {
    let Some(file) = pcap else { return Ok(device) };
    Ok(devices::capture(device, io::BufWriter::new(std::fs::File::create(file)?)))
}

pub(crate) fn build(device: Box<dyn Device>, address: Cidr, name: &str) -> io::Result<Stack> {
    build_with(device, address, name, true)
}

/// As [`build`]; `gro`: whether the stack joins segments that come one by one.
pub(crate) fn build_with(
    device: Box<dyn Device>,
    address: Cidr,
    name: &str,
    gro: bool,
) -> io::Result<Stack> {
    let builder = Stack::builder().gro(gro).device(device).address(address).name(name);
    builder.unlisted().build().map_err(io::Error::other)
}

/// Counters over the measured part of a run, by name.
pub(crate) type Counts = Vec<(&'static str, u64)>;

/// Reads every counter that a table may want, so that the difference of two is a run's.
pub(crate) fn counted(stack: &Stack) -> io::Result<Counts> {
    let stat = stack.stat()?;
    let of = |name, c| (name, stat.count(c));
    Ok(vec![
        ("tx_frames", stat.count(Counter::TxFrames)),
        ("rx_frames", stat.count(Counter::RxFrames)),
        ("rx_bytes", stat.count(Counter::RxBytes)),
        ("tx_crossings", stat.shard.device.tx_crossings),
        ("rx_crossings", stat.shard.device.rx_crossings),
        of("packets", Counter::TxPackets).plus(stat.count(Counter::RxPackets)),
        of("output_passes", Counter::TcpOutputs),
        of("send_outputs", Counter::SendOutputs),
        of("send_frames", Counter::SendFrames),
        of("send_packets", Counter::SendPackets),
        of("send_mbufs", Counter::SendMbufs),
        of("send_bytes", Counter::SendBytes),
        of("writes", Counter::Sends),
        of("reads", Counter::Receives),
        of("copied_bytes", Counter::CopiedBytes),
        of("sleeps", Counter::Sleeps),
        of("slow_allocations", Counter::BufferSlow),
        of("fast_allocations", Counter::BufferFast),
        of("placed_bytes", Counter::PlacedBytes),
        ("placement_hits", stat.shard.device.place_hits),
        ("placement_misses", stat.shard.device.place_misses),
        of("retransmitted_bytes", Counter::TcpRetransmitBytes),
    ])
}

trait Plus {
    fn plus(self, n: u64) -> Self;
}

impl Plus for (&'static str, u64) {
    fn plus(self, n: u64) -> Self {
        (self.0, self.1 + n)
    }
}

pub(crate) fn difference(before: &Counts, after: &Counts) -> Counts {
    before.iter().zip(after).map(|(b, a)| (a.0, a.1.wrapping_sub(b.1))).collect()
}

/// The clocks and counters at the start of the measured part.
pub(crate) struct Start {
    pub at: Instant,
    cpu: Duration,
    thread: Duration,
    /// The simulated hardware's part of `thread`.
    hardware_ns: u64,
    machine: MachineClock,
    user: Duration,
    waits: u64,
    heap_allocations: u64,
    counts: Counts,
}

impl Start {
    pub fn now(stack: &Stack) -> io::Result<Start> {
        let counts = counted(stack)?;
        Ok(Start {
            counts,
            machine: MachineClock::read()?,
            user: cpu::process_user_cpu()?,
            waits: cpu::process_waits()?,
            cpu: cpu::process_cpu(None)?,
            hardware_ns: thread_hardware_ns(),
            thread: cpu::thread_cpu()?,
            // After the clocks, some of which read files: their memory is none of the stack's.
            heap_allocations: heap::allocations(),
            at: Instant::now(),
        })
    }

    pub fn report(self, stack: &Stack, bytes: u64, calls: u64) -> io::Result<(Report, Counts)> {
        let elapsed = self.at.elapsed();
        let heap_allocations = heap::allocations() - self.heap_allocations;
        let thread = cpu::thread_cpu()?.saturating_sub(self.thread);
        let hardware = Duration::from_nanos(thread_hardware_ns() - self.hardware_ns);
        let thread = thread.saturating_sub(hardware);
        let cpu = cpu::process_cpu(None)?.saturating_sub(self.cpu);
        let machine = MachineClock::read()?.since(self.machine).busy;
        let user = Some(cpu::process_user_cpu()?.saturating_sub(self.user));
        let waits = cpu::process_waits()?.saturating_sub(self.waits);
        let mut counts = difference(&self.counts, &counted(stack)?);
        counts.push(("heap_allocations", heap_allocations));
        let zerocopy = (0, 0);
        Ok((Report { bytes, elapsed, cpu, calls, thread, machine, user, zerocopy, waits }, counts))
    }
}

/// Two stacks in this process, joined by `link`, with a blocking thread each.
pub struct Joined {
    pub(crate) placement: Placement,
    /// Whether the near stack may make super-segments.
    pub(crate) super_segments: bool,
    pub(crate) near: Stack,
    pub(crate) far: Stack,
}

pub(crate) const FAR_IP: Ipv4Addr = Ipv4Addr::new(10, 72, 1, 2);
const NEAR_IP: Ipv4Addr = Ipv4Addr::new(10, 72, 1, 1);

impl Joined {
    /// Makes both stacks, each with its service thread where the placement puts that end. Without
    /// super-segments the near stack cuts its segments itself.
    ///
    /// # Errors
    /// Too many open descriptors.
    pub fn new(placement: Placement, super_segments: bool) -> io::Result<Joined> {
        let (near, far) = devices::link_pair().map_err(io::Error::other)?;
        let near = if super_segments { near } else { Box::new(WithoutTso::new(near)) };
        let (near_cpu, far_cpu) = placement.cpus(&cpu::allowed_cpus()?)?;
        let at = |device, ip, cpu| {
            let address = Cidr { address: IpAddr::V4(ip), prefix_len: PREFIX };
            on_pinned_thread(cpu, move || build(device, address, "link"))
        };
        let (near, far) = (at(near, NEAR_IP, near_cpu)?, at(far, FAR_IP, far_cpu)?);
        Ok(Joined { placement, super_segments, near, far })
    }
}
