//! What a burst is sent with or received by: a device of ours with something at its far end, or the
//! kernel's own sockets on veth.
//!
//! Only one end is timed, by the CPU time of its thread without simulated hardware. The other end
//! makes frames, or takes them away, between the timed sections.

use std::io;
use std::net::{Ipv4Addr, UdpSocket};
use std::os::fd::AsFd;
use std::time::Duration;

use fulmar::base::{Counters, Instant, OwnerKey};
use fulmar::mbuf::{Chain, Pool, PoolConfig, Purpose};
use fulmar::netdev::{Burst, Offload, Packet};
use fulmar::{Device, devices};

use super::flow::{self, Flow};
use super::sys::Batch;
use crate::{cpu, sys as calls, topology};
use fulmar_gateway::netns::Netns;
use fulmar_gateway::netns::VethEnd;

/// Frames of a timed section: fewer than any ring holds.
pub const SECTION: usize = 256;
/// Ethernet, IPv4 and UDP headers of the kernel's datagrams.
pub(super) const HEADER_BYTES: usize = 42;
/// A local experimental type (IEEE 802): a receiver drops such a frame at once.
const NOBODYS_TYPE: [u8; 2] = [0x88, 0xb5];
/// A group that the receiver is a member of, and one without members.
const JOINED: Ipv4Addr = Ipv4Addr::new(239, 72, 0, 1);
const EMPTY: Ipv4Addr = Ipv4Addr::new(239, 72, 0, 2);
pub(super) const PORT: u16 = 9;
/// Looks at a device in vain, after which nothing will come.
pub(super) const PATIENCE: usize = 1000;
/// What Linux joins at most (UDP_MAX_SEGMENTS before 6.9), and the longest datagram.
const MOST_SEGMENTS: usize = 64;
const MOST_DATAGRAM_BYTES: usize = 65_507;
/// Memory of a pool: a section of frames in flight, several times over.
const POOL_BYTES: usize = 32 << 20;

/// What is asked of a rig.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Load {
    /// Frames of a burst.
    pub burst: usize,
    /// Bytes of a frame, Ethernet header included.
    pub bytes: usize,
    /// Frames in all, at least.
    pub packets: usize,
    /// As it was done before: one frame per crossing, and for each a header and a cluster from the
    /// general allocator.
    pub is_old: bool,
}

/// What it cost.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Cost {
    /// CPU time of the thread, without simulated hardware.
    pub time: Duration,
    /// Frames that went or came.
    pub packets: usize,
    /// Calls into the device or the kernel.
    pub crossings: u64,
    /// Buffers that the general lists of the pool had to give.
    pub slow_allocs: u64,
}

impl Cost {
    /// Nanoseconds per frame.
    pub fn ns_per_packet(&self) -> f64 {
        self.time.as_nanos() as f64 / self.packets.max(1) as f64
    }
}

/// Something that sends and receives bursts.
pub trait Rig {
    /// Sends.
    fn send(&mut self, load: Load) -> io::Result<Cost>;
    /// Receives.
    fn receive(&mut self, load: Load) -> io::Result<Cost>;
    /// How frames cross, in words.
    fn path(&self) -> String;
}

/// CPU time of this thread that is not simulated hardware's.
fn host_time() -> io::Result<Duration> {
    let hardware = Duration::from_nanos(fulmar_nic::thread_hardware_ns());
    Ok(cpu::thread_cpu()?.saturating_sub(hardware))
}

/// A device with what a stack has beside it.
struct End {
    device: Box<dyn Device>,
    pool: Pool,
    burst: Burst,
    counters: Counters,
}

impl End {
    fn new(mut device: Box<dyn Device>) -> io::Result<End> {
        let config = PoolConfig::with_budget(POOL_BYTES);
        let owner = OwnerKey::new([0; OwnerKey::WORDS]);
        let pool =
            Pool::with_backing(config, device.attach(&owner).region).map_err(io::Error::other)?;
        let burst = Burst::with_capacity(SECTION);
        Ok(End { device, pool, burst, counters: Counters::default() })
    }

    fn crossings(&self) -> u64 {
        let stats = self.device.stats();
        stats.tx_crossings + stats.rx_crossings
    }

    /// Puts one more frame into the burst.
    fn add(&mut self, frame: &[u8], offload: Offload, is_old: bool) -> io::Result<()> {
        let chain = if is_old {
            // The header is the box, the cluster the vector: both from the general allocator.
            let mut cluster = Vec::with_capacity(2048);
            cluster.extend_from_slice(frame);
            let m = self.pool.external(Box::new(cluster), Purpose::Send);
            Chain::from(m.map_err(io::Error::other)?)
        } else {
            let mut m = self.pool.alloc(frame.len(), 0, Purpose::Send).map_err(io::Error::other)?;
            if let Some(room) = m.append(frame.len()) {
                room.copy_from_slice(frame);
            }
            Chain::from(m)
        };
        self.burst
            .push(Packet { chain, offload })
            .map_err(|_| io::Error::other("the burst is full"))
    }

    /// Sends what is in the burst; how many went.
    fn flush(&mut self, now: Instant) -> usize {
        self.device.tx_burst(now, &mut self.pool, &mut self.burst, &mut self.counters)
    }

    /// Takes one burst and frees it; how many came, super-datagrams cut.
    fn take(&mut self, now: Instant, burst: usize, is_old: bool) -> usize {
        let Self { device, pool, burst: out, counters } = self;
        let came = device.rx_burst(now, pool, out, burst, counters);
        let mut datagrams = came;
        while let Some(p) = out.pop_front() {
            if p.offload.gso.is_some() {
                // As a stack does: each gets memory of its own.
                for piece in flow::pieces(&p) {
                    if let Ok(mut m) = pool.alloc(piece.len(), 0, Purpose::Receive) {
                        m.append(piece.len()).map(|to| p.chain.copy_to(piece.start, to));
                        pool.free_mbuf(m);
                    }
                    datagrams += 1;
                }
                datagrams -= 1;
            }
            if is_old {
                let pair: (Box<[u8; 256]>, Vec<u8>) =
                    (Box::new([0; 256]), Vec::with_capacity(2048));
                drop(std::hint::black_box(pair));
            }
            pool.free(p.chain);
        }
        datagrams
    }
}

/// Who makes the frames that a device receives, and takes away those that it sends.
enum Far {
    Kernel(Feed),
    End(Box<End>),
}

/// A kernel socket whose datagrams arrive at the device.
struct Feed {
    socket: UdpSocket,
    batch: Batch,
    bytes: usize,
    /// Datagrams that are handed over as one (UDP_SEGMENT).
    joined: usize,
}

impl Feed {
    /// A socket with this address in a namespace, to a group, so that no neighbour has to be resolved.
    fn new(netns: &Netns, from: Ipv4Addr, group: Ipv4Addr) -> io::Result<Feed> {
        let socket = netns.run(|| {
            let socket = UdpSocket::bind((from, 0))?;
            socket.set_multicast_loop_v4(false)?;
            socket.connect((group, PORT))?;
            Ok(socket)
        })?;
        Ok(Feed { socket, batch: Batch::new(0, 0), bytes: 0, joined: 1 })
    }

    /// From now on its datagrams make frames of `bytes`.
    fn set_frame_bytes(&mut self, bytes: usize) {
        if self.bytes != bytes || self.joined != 1 {
            self.batch = Batch::new(SECTION, bytes.saturating_sub(HEADER_BYTES));
            (self.bytes, self.joined) = (bytes, 1);
        }
    }

    /// The same, as many as may be of `most` together.
    fn set_joined(&mut self, bytes: usize, most: usize) -> io::Result<()> {
        let unit = bytes.saturating_sub(HEADER_BYTES).max(1);
        let joined = most.min(MOST_SEGMENTS).min(MOST_DATAGRAM_BYTES / unit).max(1);
        if (self.bytes, self.joined) != (bytes, joined) {
            let unit_bytes = if joined > 1 { unit as i32 } else { 0 };
            let (level, option) = (libc::SOL_UDP, libc::UDP_SEGMENT);
            calls::setsockopt(self.socket.as_fd(), level, option, &unit_bytes.to_ne_bytes())?;
            self.batch = Batch::new(SECTION / joined, joined * unit);
            (self.bytes, self.joined) = (bytes, joined);
        }
        Ok(())
    }

    /// Sends datagrams, as many as are joined at a time; how many went.
    fn send(&mut self, count: usize) -> io::Result<usize> {
        Ok(self.batch.send(self.socket.as_fd(), count / self.joined)? * self.joined)
    }
}

/// The bytes of a frame, and what it asks of the device.
type Frame = (Vec<u8>, Offload);

/// A device of ours.
pub struct DeviceRig {
    near: End,
    far: Far,
    now: Instant,
    /// What is sent are datagrams of one flow, and what comes are those that the kernel joined.
    flow: Option<Flow>,
    _site: Option<Box<dyn std::any::Any>>,
}

impl DeviceRig {
    fn on_site(topology: topology::Topology<Box<dyn Device>>) -> io::Result<DeviceRig> {
        let feed = Feed::new(&topology.peer_netns, topology::PEER_IP, JOINED)?;
        let topology::Topology { device, peer_netns, _our_netns } = topology;
        let near = End::new(device)?;
        let keep = Box::new((peer_netns, _our_netns));
        let far = Far::Kernel(feed);
        Ok(DeviceRig { near, far, now: Instant::ZERO, flow: None, _site: Some(keep) })
    }

    fn open_tap(one_by_one: bool) -> io::Result<topology::Topology<Box<dyn Device>>> {
        topology::tap(|name| {
            let config = devices::tap_device::TapConfig {
                name: name.to_owned(),
                one_by_one,
                ..Default::default()
            };
            let tap = devices::tap_device::Tap::open(&config).map_err(io::Error::other)?;
            Ok(Box::new(tap) as Box<dyn Device>)
        })
    }

    fn open_packet() -> io::Result<topology::Topology<Box<dyn Device>>> {
        topology::packet(|name| devices::packet(name).map_err(io::Error::other))
    }

    /// The same with datagrams of one flow, which a socket of the kernel's receives.
    fn with_flow(topology: topology::Topology<Box<dyn Device>>) -> io::Result<DeviceRig> {
        let flow = Flow::new(&topology.peer_netns)?;
        Ok(DeviceRig { flow: Some(flow), ..DeviceRig::on_site(topology)? })
    }

    /// A TAP to the kernel, datagrams of one flow.
    pub fn tap_flow() -> io::Result<DeviceRig> {
        DeviceRig::with_flow(DeviceRig::open_tap(false)?)
    }

    /// AF_PACKET on veth, datagrams of one flow.
    pub fn packet_flow() -> io::Result<DeviceRig> {
        DeviceRig::with_flow(DeviceRig::open_packet()?)
    }

    /// A TAP to the kernel; `one_by_one`: never with many frames in a crossing.
    pub fn tap(one_by_one: bool) -> io::Result<DeviceRig> {
        DeviceRig::on_site(DeviceRig::open_tap(one_by_one)?)
    }

    /// AF_PACKET on veth.
    pub fn packet() -> io::Result<DeviceRig> {
        DeviceRig::on_site(DeviceRig::open_packet()?)
    }

    fn joined(near: Box<dyn Device>, far: Box<dyn Device>) -> io::Result<DeviceRig> {
        let far = Far::End(Box::new(End::new(far)?));
        let near = End::new(near)?;
        Ok(DeviceRig { near, far, now: Instant::ZERO, flow: None, _site: None })
    }

    /// Two simulated NICs on one wire.
    pub fn sim() -> io::Result<DeviceRig> {
        // Room for a section, whatever the far end does meanwhile.
        let config = fulmar_nic::SimConfig { rx_small_buffers: 2 * SECTION, ..Default::default() };
        let [(near, _), (far, _)] =
            fulmar_nic::pair(config.clone(), config).map_err(io::Error::other)?;
        DeviceRig::joined(Box::new(near), Box::new(far))
    }

    /// Both ends of shared memory, in one process.
    pub fn shm() -> io::Result<DeviceRig> {
        let config =
            devices::shm_device::ShmConfig { pool_bytes: POOL_BYTES, ..Default::default() };
        let (near, far) = devices::shm_device::Shm::pair(&config).map_err(io::Error::other)?;
        DeviceRig::joined(Box::new(near), Box::new(far))
    }

    /// Two stacks in one process.
    pub fn link() -> io::Result<DeviceRig> {
        let (near, far) = devices::link_pair().map_err(io::Error::other)?;
        DeviceRig::joined(near, far)
    }

    fn tick(&mut self) {
        self.now = self.now + Duration::from_micros(100);
    }

    fn frame(&self, bytes: usize) -> Frame {
        let ours = self.near.device.caps().ether;
        if self.flow.is_some() {
            return flow::datagram(ours, bytes.max(HEADER_BYTES + 1));
        }
        let mut frame = vec![0xff; 6];
        frame.extend(ours.0);
        frame.extend(NOBODYS_TYPE);
        frame.resize(bytes.max(frame.len()), 0x5a);
        (frame, Offload::default())
    }

    /// Takes away what the device has sent; how many frames that were.
    fn drain(&mut self, expected: usize) -> io::Result<()> {
        if let Some(flow) = &mut self.flow {
            return flow.drain(expected);
        }
        let mut came = 0;
        for _ in 0..PATIENCE {
            self.tick();
            let now = self.now;
            let Far::End(far) = &mut self.far else { return Ok(()) };
            came += far.take(now, SECTION, false);
            self.near.device.tx_reap(now, &mut self.near.pool);
            self.near.pool.drain_remote();
            if came >= expected {
                return Ok(());
            }
        }
        Err(io::Error::other(format!("{came} of {expected} frames came to the other end")))
    }

    /// Makes `count` frames arrive; how many will. `joined`: datagrams that the kernel is given at once.
    fn feed(&mut self, count: usize, frame: &[u8], joined: usize) -> io::Result<usize> {
        self.tick();
        let now = self.now;
        let far = match &mut self.far {
            Far::Kernel(feed) => {
                match self.flow {
                    Some(_) => feed.set_joined(frame.len(), joined)?,
                    None => feed.set_frame_bytes(frame.len()),
                }
                return feed.send(count);
            }
            Far::End(far) => far,
        };
        far.pool.drain_remote();
        for _ in 0..count {
            far.add(frame, Offload::default(), false)?;
        }
        let sent = far.flush(now);
        far.burst.clear(&mut far.pool);
        Ok(sent)
    }

    /// One timed section of sending.
    fn send_section(&mut self, load: Load, frame: &Frame, cost: &mut Cost) -> io::Result<()> {
        // Whole bursts.
        let wanted = SECTION - SECTION % load.burst.clamp(1, SECTION);
        let (mut sent, mut vain) = (0, 0);
        let start = host_time()?;
        while sent < wanted && vain < PATIENCE {
            while self.near.burst.len() < load.burst.min(wanted - sent) {
                self.near.add(&frame.0, frame.1, load.is_old)?;
            }
            let went = self.near.flush(self.now);
            (sent, vain) = (sent + went, if went == 0 { vain + 1 } else { 0 });
            self.near.device.tx_reap(self.now, &mut self.near.pool);
        }
        cost.time += host_time()?.saturating_sub(start);
        cost.packets += sent;
        self.near.burst.clear(&mut self.near.pool);
        if sent == 0 {
            return Err(io::Error::other("the device takes no frames"));
        }
        self.drain(sent)
    }

    /// One timed section of receiving.
    fn receive_section(&mut self, load: Load, frame: &Frame, cost: &mut Cost) -> io::Result<()> {
        let fed = self.feed(SECTION, &frame.0, load.burst)?;
        self.tick();
        let (mut came, mut vain) = (0, 0);
        let start = host_time()?;
        while came < fed && vain < PATIENCE {
            let n = self.near.take(self.now, load.burst, load.is_old);
            (came, vain) = (came + n, if n == 0 { vain + 1 } else { 0 });
        }
        cost.time += host_time()?.saturating_sub(start);
        cost.packets += came;
        if came == 0 { Err(io::Error::other("no frame comes")) } else { Ok(()) }
    }

    fn run(
        &mut self,
        load: Load,
        section: fn(&mut DeviceRig, Load, &Frame, &mut Cost) -> io::Result<()>,
    ) -> io::Result<Cost> {
        let load = Load { burst: if load.is_old { 1 } else { load.burst }, ..load };
        let frame = self.frame(load.bytes);
        // The first warms: caches, and the pool's stacks.
        section(self, load, &frame, &mut Cost::default())?;
        let (crossings, slow) = (self.near.crossings(), self.near.pool.stats().slow_allocs);
        let mut cost = Cost::default();
        while cost.packets < load.packets {
            section(self, load, &frame, &mut cost)?;
        }
        cost.crossings = self.near.crossings() - crossings;
        cost.slow_allocs = self.near.pool.stats().slow_allocs - slow;
        Ok(cost)
    }
}

impl Rig for DeviceRig {
    fn send(&mut self, load: Load) -> io::Result<Cost> {
        self.run(load, DeviceRig::send_section)
    }

    fn receive(&mut self, load: Load) -> io::Result<Cost> {
        self.run(load, DeviceRig::receive_section)
    }

    fn path(&self) -> String {
        self.near.device.stats().path
    }
}

/// The kernel's own sockets on a veth pair: sendmmsg and recvmmsg.
pub struct KernelRig {
    /// Sends to a group without members: the far end drops it.
    near: Feed,
    /// Makes what `receiver` gets.
    feed: Feed,
    receiver: UdpSocket,
    batch: Batch,
    bytes: usize,
    _ends: [Netns; 2],
}

impl KernelRig {
    /// Makes two namespaces and the pair.
    pub fn new() -> io::Result<KernelRig> {
        let (near, far) = (Netns::new()?, Netns::new()?);
        let end = |name, last| VethEnd { name, mac: [2, 0, 0, 0, 0x73, last], mtu: topology::MTU };
        near.add_veth(&end("veth0", 1), &far, &end("veth1", 2))?;
        near.set_address("veth0", topology::OUR_IP.into(), topology::PREFIX)?;
        far.set_address("veth1", topology::PEER_IP.into(), topology::PREFIX)?;
        let receiver = near.run(|| {
            let socket = UdpSocket::bind((JOINED, PORT))?;
            socket.join_multicast_v4(&JOINED, &topology::OUR_IP)?;
            let bytes = (4i32 << 20).to_ne_bytes();
            let set = |option| calls::setsockopt(socket.as_fd(), libc::SOL_SOCKET, option, &bytes);
            set(libc::SO_RCVBUFFORCE).or_else(|_| set(libc::SO_RCVBUF))?;
            Ok(socket)
        })?;
        let near_feed = Feed::new(&near, topology::OUR_IP, EMPTY)?;
        let feed = Feed::new(&far, topology::PEER_IP, JOINED)?;
        let batch = Batch::new(0, 0);
        Ok(KernelRig { near: near_feed, feed, receiver, batch, bytes: 0, _ends: [near, far] })
    }
}

impl Rig for KernelRig {
    fn send(&mut self, load: Load) -> io::Result<Cost> {
        self.near.set_frame_bytes(load.bytes);
        let mut cost = Cost::default();
        let start = host_time()?;
        while cost.packets < load.packets {
            cost.packets += self.near.send(load.burst)?;
            cost.crossings += 1;
        }
        cost.time = host_time()?.saturating_sub(start);
        Ok(cost)
    }

    fn receive(&mut self, load: Load) -> io::Result<Cost> {
        if self.bytes != load.bytes {
            self.batch = Batch::new(SECTION, load.bytes.saturating_sub(HEADER_BYTES));
            self.feed.set_frame_bytes(load.bytes);
            self.bytes = load.bytes;
        }
        let mut cost = Cost::default();
        while cost.packets < load.packets {
            // What the socket has no room for is lost, so the end is found by asking.
            let fed = self.feed.send(SECTION)?;
            let mut came = 0;
            let start = host_time()?;
            while came < fed
                && let Ok(n) = self.batch.receive(self.receiver.as_fd(), load.burst)
            {
                came += n;
                cost.crossings += 1;
            }
            cost.time += host_time()?.saturating_sub(start);
            cost.packets += came;
            if came == 0 {
                return Err(io::Error::other("no datagram comes"));
            }
        }
        Ok(cost)
    }

    fn path(&self) -> String {
        "sendmmsg and recvmmsg".into()
    }
}
