//! Who sends the datagrams of `bench udp`, and who takes them away.
//!
//! Only the sending thread is timed, by its CPU time without simulated hardware. What arrives at a
//! kernel socket is counted and taken away between the timed sections, by the same thread, so that the
//! receiver's queue never fills; what the kernel does for the receiver inside the sender's calls (all
//! the way to that queue, over TAP and veth alike) is in the figure.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use fulmar::udp::{RecvMessage, SendMessage};
use fulmar::{Builder, Cidr, Stack, devices};
use fulmar_nic::{Command, SimConfig, SimHandle};

use super::Method;
use super::sys::Batch;
use crate::kernel::Pair;
use crate::{cpu, sys, topology};
use fulmar_gateway::netns::Netns;

/// Datagrams of a timed section, which always fit the receiver's queue.
const SECTION: usize = 256;
/// Datagrams of a timed section where no reader has to empty a queue.
const LONG_SECTION: usize = 4096;
/// More than a datagram of any size that is measured.
const ROOM_BYTES: usize = 2048;
/// Datagrams per call of the ways that send many, and of a section of those that take them.
pub const BATCH: usize = 64;
/// Where the simulated peer discards (RFC 863), and where kernel receivers listen.
const PORT: u16 = 9;
/// How long a datagram of the simulated peer may be on its way.
const LONGEST_WAIT: Duration = Duration::from_secs(5);
/// Looks for what has not arrived yet.
const PATIENCE: usize = 100;
const SIM_NEAR: Ipv4Addr = Ipv4Addr::new(10, 72, 6, 1);
const SIM_FAR: Ipv4Addr = Ipv4Addr::new(10, 72, 6, 2);
/// `linux/udp.h`.
const SOL_UDP: i32 = 17;
const UDP_SEGMENT: i32 = 103;

/// The cost of one run of a variant.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cost {
    /// CPU time of the sending thread, without simulated hardware.
    pub cpu: Duration,
    /// Elapsed time.
    pub wall: Duration,
    /// Datagrams sent.
    pub datagrams: u64,
    /// Those of them that did not arrive, where arrivals are counted; else 0.
    pub lost: u64,
}

impl Cost {
    /// CPU nanoseconds per datagram.
    pub fn ns(&self) -> f64 {
        self.cpu.as_nanos() as f64 / self.datagrams.max(1) as f64
    }

    /// Datagrams per second by the clock.
    pub fn pps(&self) -> f64 {
        self.datagrams as f64 / self.wall.as_secs_f64().max(1e-9)
    }
}

/// A sender, which on the simulated device receives as well.
pub trait Rig: Send {
    /// What goes before a timed section: the datagrams that it is to take are on their way.
    fn prepare(&mut self, method: Method, bytes: usize) -> io::Result<()> {
        let _ = (method, bytes);
        Ok(())
    }
    /// Datagrams of a timed section of this way.
    fn section_of(&self, method: Method) -> usize {
        let _ = method;
        self.section()
    }
    /// Sends about `count` datagrams of `bytes`.
    fn send(&mut self, method: Method, bytes: usize, count: usize) -> io::Result<()>;
    /// Takes away what arrived of `count`; how many.
    fn drain(&mut self, bytes: usize, count: usize) -> io::Result<usize>;
    /// Datagrams of a timed section.
    fn section(&self) -> usize;
}

/// Runs a way for about `slice`.
pub fn run(rig: &mut dyn Rig, method: Method, bytes: usize, slice: Duration) -> io::Result<Cost> {
    let (began, section) = (Instant::now(), rig.section_of(method));
    // The first warms: caches, templates, the pool's stacks.
    rig.prepare(method, bytes)?;
    rig.send(method, bytes, section)?;
    rig.drain(bytes, section)?;
    let mut cost = Cost::default();
    while cost.datagrams == 0 || began.elapsed() < slice {
        rig.prepare(method, bytes)?;
        let (hardware, start) = (fulmar_nic::thread_hardware_ns(), Instant::now());
        let before = cpu::thread_cpu()?;
        rig.send(method, bytes, section)?;
        let spent = cpu::thread_cpu()?.saturating_sub(before);
        cost.wall += start.elapsed();
        let hardware = Duration::from_nanos(fulmar_nic::thread_hardware_ns() - hardware);
        cost.cpu += spent.saturating_sub(hardware);
        cost.datagrams += section as u64;
        cost.lost += (section - rig.drain(bytes, section)?.min(section)) as u64;
    }
    if cost.lost * 10 > cost.datagrams {
        let Cost { lost, datagrams, .. } = cost;
        return Err(io::Error::other(format!("{lost} of {datagrams} datagrams did not arrive")));
    }
    Ok(cost)
}

/// The kernel socket at the far end.
struct Receiver {
    socket: UdpSocket,
    batch: Batch,
    bytes: usize,
}

impl Receiver {
    fn new(netns: &Netns, ip: IpAddr) -> io::Result<Receiver> {
        let socket = netns.run(|| UdpSocket::bind((ip, PORT)))?;
        let bytes = (16i32 << 20).to_ne_bytes();
        let set = |option| sys::setsockopt(socket.as_fd(), libc::SOL_SOCKET, option, &bytes);
        set(libc::SO_RCVBUFFORCE).or_else(|_| set(libc::SO_RCVBUF))?;
        Ok(Receiver { socket, batch: Batch::new(0, 0), bytes: 0 })
    }

    fn drain(&mut self, bytes: usize, count: usize) -> io::Result<usize> {
        if self.bytes != bytes {
            (self.batch, self.bytes) = (Batch::new(SECTION, bytes + 1), bytes);
        }
        let (mut came, mut vain) = (0, 0);
        while came < count && vain < PATIENCE {
            match self.batch.receive(self.socket.as_fd(), SECTION) {
                Ok(n) => came += n,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    vain += 1;
                    std::thread::sleep(Duration::from_micros(50));
                }
                Err(e) => return Err(e),
            }
        }
        Ok(came)
    }
}

/// A stack of which each measuring thread has a shard, on a simulated NIC of which it has a queue: what
/// the threads share is what the shards of a stack share.
pub struct Shards {
    stack: Stack,
    peers: Vec<SimHandle>,
}

impl Shards {
    /// As many shards as threads measure.
    pub fn open(threads: usize) -> io::Result<Shards> {
        let count = u16::try_from(threads.max(1)).unwrap_or(u16::MAX);
        let queues = fulmar_nic::open_queues(&SimConfig::default(), count);
        let (queues, peers) = queues.map_err(io::Error::other)?;
        let stack = builder(SIM_NEAR).devices(queues).build().map_err(io::Error::other)?;
        Ok(Shards { stack, peers })
    }

    /// Sockets in the shard of a thread.
    pub fn rig(&self, thread: usize) -> io::Result<Ours> {
        let none = || io::Error::other("fewer shards than threads");
        let peer = self.peers.get(thread).ok_or_else(none)?.clone();
        let stack = self.stack.on_shard(thread as u16)?;
        Ours::on(stack, (SIM_NEAR, SIM_FAR), None, Some(peer))
    }
}

fn builder(near: Ipv4Addr) -> Builder {
    let address = Cidr { address: IpAddr::V4(near), prefix_len: 24 };
    Stack::builder().address(address).name("bench udp").unlisted()
}

/// fulmar's sockets, on the simulated device or on TAP.
pub struct Ours {
    connected: fulmar::UdpSocket,
    open: fulmar::UdpSocket,
    far: SocketAddr,
    receiver: Option<Receiver>,
    payload: Vec<u8>,
    /// Where received datagrams are copied.
    rooms: Vec<[u8; ROOM_BYTES]>,
    /// The modelled peer, who can be asked to send.
    peer: Option<SimHandle>,
    stack: Stack,
    _site: Option<Netns>,
}

impl Ours {
    /// A stack on a TAP to the kernel, where a socket receives.
    pub fn tap() -> io::Result<Ours> {
        let topology = topology::tap(|name| devices::tap(name).map_err(io::Error::other))?;
        let receiver = Receiver::new(&topology.peer_netns, topology::PEER_IP.into())?;
        let ours =
            Ours::over(topology.device, topology::OUR_IP, topology::PEER_IP, Some(receiver))?;
        Ok(Ours { _site: Some(topology.peer_netns), ..ours })
    }

    fn over(
        device: Box<dyn fulmar::device::Device>,
        near: Ipv4Addr,
        far: Ipv4Addr,
        receiver: Option<Receiver>,
    ) -> io::Result<Ours> {
        let builder = builder(near).device(device);
        let stack = builder.build().map_err(io::Error::other)?;
        Ours::on(stack, (near, far), receiver, None)
    }

    /// With sockets of their own in the shard of this handle.
    fn on(
        stack: Stack,
        (near, far): (Ipv4Addr, Ipv4Addr),
        receiver: Option<Receiver>,
        peer: Option<SimHandle>,
    ) -> io::Result<Ours> {
        let far = SocketAddr::from((far, PORT));
        let connected = fulmar::UdpSocket::bind(&stack, (near, 0))?;
        connected.connect(far)?;
        let open = fulmar::UdpSocket::bind(&stack, (near, 0))?;
        // Datagrams of the peer arrive immediately, or never.
        open.set_read_timeout(Some(LONGEST_WAIT))?;
        let (payload, rooms) = (Vec::new(), vec![[0; ROOM_BYTES]; BATCH]);
        let mut ours =
            Ours { connected, open, far, receiver, payload, rooms, peer, stack, _site: None };
        ours.meet_neighbour()?;
        Ok(ours)
    }

    /// The first datagrams ask for the neighbour's address; from then on it is known.
    fn meet_neighbour(&mut self) -> io::Result<()> {
        for _ in 0..8 {
            self.connected.send(b"hello")?;
            std::thread::sleep(Duration::from_millis(2));
            let polled = self.stack.host().poll();
            polled.map_err(|e| io::Error::from_raw_os_error(e.errno()))?;
        }
        self.drain(8, SECTION).map(drop)
    }

    /// Its stack.
    pub fn stack(&self) -> &Stack {
        &self.stack
    }

    fn send_many(&self, bytes: usize, count: usize, alike: bool) -> io::Result<()> {
        let message = |i: usize| {
            // Of two sizes in turn no more than two leave as one run: only its last may be shorter.
            let len = if alike { bytes } else { bytes - (i & 1) };
            SendMessage::new(&self.payload[..len])
        };
        let messages: [SendMessage<'_>; BATCH] = std::array::from_fn(message);
        let mut sent = 0;
        while sent < count {
            sent += self.connected.send_many(&messages[..BATCH.min(count - sent)])?;
        }
        Ok(())
    }
}

impl Ours {
    /// Takes `count` datagrams, several per call if `many`. They have been sent already.
    fn receive(&mut self, count: usize, many: bool) -> io::Result<()> {
        let Ours { open, rooms, .. } = self;
        let mut taken = 0;
        while taken < count {
            taken += match many {
                false => open.recv(&mut rooms[0]).map(|_| 1)?,
                true => {
                    let mut rooms = rooms.iter_mut();
                    let mut next = || rooms.next().map_or(&mut [][..], |r| &mut r[..]);
                    let mut into: [RecvMessage<'_>; BATCH] =
                        std::array::from_fn(|_| RecvMessage::new(next()));
                    open.recv_many(&mut into)?
                }
            };
        }
        Ok(())
    }
}

impl Rig for Ours {
    fn prepare(&mut self, method: Method, bytes: usize) -> io::Result<()> {
        let Some(peer) = self.peer.as_ref().filter(|_| method.receives()) else { return Ok(()) };
        let (from, to) = (SocketAddr::new(self.far.ip(), 7), self.open.local_addr()?);
        let what = Command::Datagrams { from, to, bytes, count: BATCH as u64 };
        peer.ask(what).map_err(io::Error::other)
    }

    fn section_of(&self, method: Method) -> usize {
        if method.receives() { BATCH } else { self.section() }
    }

    fn send(&mut self, method: Method, bytes: usize, count: usize) -> io::Result<()> {
        let run = runs(bytes);
        if self.payload.len() < bytes * run {
            self.payload.resize(bytes * run, 0x5a);
        }
        let one = &self.payload[..bytes];
        match method {
            Method::Connected => (0..count).try_for_each(|_| self.connected.send(one).map(drop)),
            Method::Unconnected => {
                (0..count).try_for_each(|_| self.open.send_to(one, self.far).map(drop))
            }
            Method::Many => self.send_many(bytes, count, true),
            Method::Apart => self.send_many(bytes, count, false),
            Method::Segmented => {
                let run = &self.payload[..bytes * run];
                (0..count / runs(bytes))
                    .try_for_each(|_| self.connected.send_segmented(run, bytes).map(drop))?;
                (0..count % runs(bytes)).try_for_each(|_| self.connected.send(one).map(drop))
            }
            Method::Received => self.receive(count, false),
            Method::ReceivedMany => self.receive(count, true),
        }
    }

    fn drain(&mut self, bytes: usize, count: usize) -> io::Result<usize> {
        self.receiver.as_mut().map_or(Ok(count), |r| r.drain(bytes, count))
    }

    fn section(&self) -> usize {
        if self.receiver.is_some() { SECTION } else { LONG_SECTION }
    }
}

/// Datagrams of one run: a whole batch, if that fits a packet of 64 KiB.
fn runs(bytes: usize) -> usize {
    BATCH.min(65_000 / bytes.max(1)).max(1)
}

/// The kernel's own sockets on veth.
pub struct Kernel {
    connected: UdpSocket,
    open: UdpSocket,
    /// Segments its payloads (UDP_SEGMENT).
    segmenting: UdpSocket,
    segment_bytes: usize,
    receiver: Receiver,
    payload: Vec<u8>,
    batch: Batch,
    batch_bytes: usize,
    _pair: Pair,
}

impl Kernel {
    /// Makes two namespaces and the pair.
    pub fn new() -> io::Result<Kernel> {
        let pair = Pair::new(topology::MTU, true)?;
        let receiver = Receiver::new(pair.far(), Pair::FAR)?;
        let open = || pair.near().run(|| UdpSocket::bind((Pair::NEAR, 0)));
        let connected = || {
            let socket = open()?;
            socket.connect((Pair::FAR, PORT))?;
            Ok::<_, io::Error>(socket)
        };
        Ok(Kernel {
            connected: connected()?,
            open: open()?,
            segmenting: connected()?,
            segment_bytes: 0,
            receiver,
            payload: Vec::new(),
            batch: Batch::new(0, 0),
            batch_bytes: 0,
            _pair: pair,
        })
    }

    fn prepare(&mut self, bytes: usize) -> io::Result<()> {
        if self.batch_bytes != bytes {
            (self.batch, self.batch_bytes) = (Batch::new(BATCH, bytes), bytes);
            self.payload = vec![0x5a; bytes * runs(bytes)];
        }
        if self.segment_bytes != bytes {
            let value = (bytes as i32).to_ne_bytes();
            sys::setsockopt(self.segmenting.as_fd(), SOL_UDP, UDP_SEGMENT, &value)?;
            self.segment_bytes = bytes;
        }
        Ok(())
    }
}

impl Rig for Kernel {
    fn send(&mut self, method: Method, bytes: usize, count: usize) -> io::Result<()> {
        self.prepare(bytes)?;
        let one = &self.payload[..bytes];
        match method {
            Method::Connected => (0..count).try_for_each(|_| self.connected.send(one).map(drop)),
            Method::Unconnected => {
                (0..count).try_for_each(|_| self.open.send_to(one, (Pair::FAR, PORT)).map(drop))
            }
            Method::Many | Method::Apart => {
                let mut sent = 0;
                while sent < count {
                    sent += self.batch.send(self.connected.as_fd(), BATCH.min(count - sent))?;
                }
                Ok(())
            }
            Method::Segmented => {
                (0..count / runs(bytes))
                    .try_for_each(|_| self.segmenting.send(&self.payload).map(drop))?;
                (0..count % runs(bytes)).try_for_each(|_| self.segmenting.send(one).map(drop))
            }
            // This is the only sender on veth.
            Method::Received | Method::ReceivedMany => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    fn drain(&mut self, bytes: usize, count: usize) -> io::Result<usize> {
        self.receiver.drain(bytes, count)
    }

    fn section(&self) -> usize {
        SECTION
    }
}
