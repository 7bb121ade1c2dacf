//! What a frame costs that crosses a real device by itself, and in bursts: a TAP and AF_PACKET without a
//! stack, sending and receiving.
//!
//! Frames of any kind are those that the kernel discards. Those of one flow are datagrams between one
//! socket of the kernel's and the device, which may cross joined. Only the device's end is timed; the other
//! end makes frames, or takes them away, between the timed sections, by the same thread.

use std::cell::RefCell;
use std::io;
use std::net::{Ipv4Addr, UdpSocket};
use std::os::fd::AsFd;
use std::time::Duration;

use fulmar::config::PoolConfig;
use fulmar::device::Device;
use fulmar::device::{Burst, Offload, Packet};
use fulmar::device::{Chain, Pool, Purpose};
use fulmar::device::{Counters, EtherAddr, Instant, OwnerKey};
use fulmar::devices;
use fulmar_gateway::netns::Netns;

use super::NS;
use super::sys::Batch;
use crate::harness::{Ratio, Sample, Scenario};
use crate::topology::{self, Topology};
use crate::{cpu, sys as calls};

/// Frames of a timed section: fewer than any ring holds.
const SECTION: usize = 256;
/// Frames of one run of a way.
const FRAMES: usize = 2 * SECTION;
/// Frames of a burst.
const BURSTS: [usize; 3] = [1, 8, 64];
/// Bytes of a frame, Ethernet header included.
const FRAME_BYTES: usize = 64;
/// Ethernet, IPv4 and UDP headers.
const HEADER_BYTES: usize = 42;
const PAYLOAD_BYTES: usize = FRAME_BYTES - HEADER_BYTES;
/// Where UDP begins, and offsets in its header.
const L4: usize = 34;
const LENGTH: usize = 4;
const CHECKSUM: usize = 6;
const UDP: u8 = 17;
/// A local experimental type (IEEE 802): a receiver drops such a frame at once.
const NOBODYS_TYPE: [u8; 2] = [0x88, 0xb5];
/// A group, so that no neighbour has to be resolved.
const GROUP: Ipv4Addr = Ipv4Addr::new(239, 72, 0, 1);
const PORT: u16 = 9;
/// Looks in vain, after which nothing will come.
const PATIENCE: usize = 1000;
/// Memory of a pool: a section of frames in flight, several times over.
const POOL_BYTES: usize = 32 << 20;
/// Holds a section of datagrams, what the kernel adds to each included.
const BUFFER_BYTES: i32 = 16 << 20;

/// Which way frames go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Direction {
    Send,
    Receive,
}

impl Direction {
    const fn name(self) -> &'static str {
        match self {
            Direction::Send => "send",
            Direction::Receive => "receive",
        }
    }
}

/// A device with the pool, burst and counters that a stack would have, and the kernel's end.
pub struct Rig {
    device: Box<dyn Device>,
    pool: Pool,
    burst: Burst,
    counters: Counters,
    now: Instant,
    /// The sender whose datagrams arrive at the device.
    feed: Feed,
    /// Takes every datagram of the flow that the device sends; `None`: frames of any kind.
    receiver: Option<(UdpSocket, Batch)>,
    _site: [Option<Netns>; 2],
}

/// A kernel socket whose datagrams arrive at the device.
struct Feed {
    socket: UdpSocket,
    batch: Batch,
    /// Datagrams that are handed over as one (UDP_SEGMENT).
    joined: usize,
}

impl Feed {
    fn new(netns: &Netns) -> io::Result<Feed> {
        let socket = netns.run(|| {
            let socket = UdpSocket::bind((topology::PEER_IP, 0))?;
            socket.set_multicast_loop_v4(false)?;
            socket.connect((GROUP, PORT))?;
            Ok(socket)
        })?;
        Ok(Feed { socket, batch: Batch::new(SECTION, PAYLOAD_BYTES), joined: 1 })
    }

    /// From now on this many datagrams are handed over as one.
    fn join(&mut self, joined: usize) -> io::Result<()> {
        if self.joined != joined {
            let unit = if joined > 1 { PAYLOAD_BYTES as i32 } else { 0 }.to_ne_bytes();
            calls::setsockopt(self.socket.as_fd(), libc::SOL_UDP, libc::UDP_SEGMENT, &unit)?;
            self.batch = Batch::new(SECTION / joined, joined * PAYLOAD_BYTES);
            self.joined = joined;
        }
        Ok(())
    }

    /// Sends a section; how many datagrams went.
    fn send(&mut self) -> io::Result<usize> {
        Ok(self.batch.send(self.socket.as_fd(), SECTION / self.joined)? * self.joined)
    }
}

/// CPU time and frames.
#[derive(Default)]
struct Cost {
    time: Duration,
    frames: usize,
}

impl Rig {
    fn tap() -> io::Result<Topology<Box<dyn Device>>> {
        topology::tap(|name| devices::tap(name).map_err(io::Error::other))
    }

    fn packet() -> io::Result<Topology<Box<dyn Device>>> {
        topology::packet(|name| devices::packet(name).map_err(io::Error::other))
    }

    fn on(topology: Topology<Box<dyn Device>>, is_flow: bool) -> io::Result<Rig> {
        let Topology { mut device, peer_netns, _our_netns } = topology;
        let feed = Feed::new(&peer_netns)?;
        let receiver = if is_flow { Some(receiver(&peer_netns)?) } else { None };
        let owner = OwnerKey::new([0; OwnerKey::WORDS]);
        let region = device.attach(&owner).region;
        let pool = Pool::with_backing(PoolConfig::with_budget(POOL_BYTES), region);
        Ok(Rig {
            device,
            pool: pool.map_err(io::Error::other)?,
            burst: Burst::with_capacity(SECTION),
            counters: Counters::default(),
            now: Instant::ZERO,
            feed,
            receiver,
            _site: [Some(peer_netns), _our_netns],
        })
    }

    fn frame(&self) -> (Vec<u8>, Offload) {
        let ours = self.device.caps().ether;
        if self.receiver.is_some() {
            return datagram(ours);
        }
        let mut frame = [&[0xff; 6][..], &ours.0, &NOBODYS_TYPE].concat();
        frame.resize(FRAME_BYTES, 0x5a);
        (frame, Offload::default())
    }

    /// Puts one more frame into the burst.
    fn add(&mut self, frame: &[u8], offload: Offload) -> io::Result<()> {
        let mut m = self.pool.alloc(frame.len(), 0, Purpose::Send).map_err(io::Error::other)?;
        if let Some(room) = m.append(frame.len()) {
            room.copy_from_slice(frame);
        }
        let packet = Packet { chain: Chain::from(m), offload };
        self.burst.push(packet).map_err(|_| io::Error::other("the burst is full"))
    }

    /// Takes one burst and frees it; how many came, joined datagrams cut.
    fn take(&mut self, burst: usize) -> usize {
        let Self { device, pool, burst: out, counters, now, .. } = self;
        let mut datagrams = device.rx_burst(*now, pool, out, burst, counters);
        while let Some(p) = out.pop_front() {
            if p.offload.gso.is_some() {
                // As a stack does: each gets memory of its own.
                for piece in pieces(&p) {
                    if let Ok(mut m) = pool.alloc(piece.len(), 0, Purpose::Receive) {
                        m.append(piece.len()).map(|to| p.chain.copy_to(piece.start, to));
                        pool.free_mbuf(m);
                    }
                    datagrams += 1;
                }
                datagrams -= 1;
            }
            pool.free(p.chain);
        }
        datagrams
    }

    /// One timed section of sending.
    fn send(&mut self, burst: usize, cost: &mut Cost) -> io::Result<()> {
        let (frame, offload) = self.frame();
        let (mut sent, mut vain) = (0, 0);
        let start = cpu::thread_cpu()?;
        while sent < SECTION && vain < PATIENCE {
            while self.burst.len() < burst.min(SECTION - sent) {
                self.add(&frame, offload)?;
            }
            let Self { device, pool, burst: out, counters, now, .. } = self;
            let went = device.tx_burst(*now, pool, out, counters);
            (sent, vain) = (sent + went, if went == 0 { vain + 1 } else { 0 });
            device.tx_reap(*now, pool);
        }
        cost.time += cpu::thread_cpu()?.saturating_sub(start);
        cost.frames += sent;
        self.burst.clear(&mut self.pool);
        if sent == 0 {
            return Err(io::Error::other("the device accepts no frames"));
        }
        self.drain(sent)
    }

    /// Takes the datagrams of a flow away that were sent.
    fn drain(&mut self, expected: usize) -> io::Result<()> {
        let Some((socket, batch)) = &mut self.receiver else { return Ok(()) };
        let mut came = 0;
        for _ in 0..PATIENCE {
            came += batch.receive(socket.as_fd(), SECTION).unwrap_or(0);
            if came >= expected {
                return Ok(());
            }
            std::thread::yield_now();
        }
        Err(io::Error::other(format!("{came} of {expected} datagrams reached the kernel's socket")))
    }

    /// One timed section of receiving. For a flow, the kernel's sender joins the datagrams of a burst.
    fn receive(&mut self, burst: usize, cost: &mut Cost) -> io::Result<()> {
        self.feed.join(if self.receiver.is_some() { burst } else { 1 })?;
        let fed = self.feed.send()?;
        self.now = self.now + Duration::from_micros(100);
        let (mut came, mut vain) = (0, 0);
        let start = cpu::thread_cpu()?;
        while came < fed && vain < PATIENCE {
            let n = self.take(burst);
            (came, vain) = (came + n, if n == 0 { vain + 1 } else { 0 });
        }
        cost.time += cpu::thread_cpu()?.saturating_sub(start);
        cost.frames += came;
        if came == 0 { Err(io::Error::other("no frame was received")) } else { Ok(()) }
    }

    /// CPU nanoseconds per frame.
    fn run(&mut self, direction: Direction, burst: usize) -> io::Result<f64> {
        let mut section = |cost: &mut Cost| match direction {
            Direction::Send => self.send(burst, cost),
            Direction::Receive => self.receive(burst, cost),
        };
        // The first warms: caches, and the pool's stacks.
        section(&mut Cost::default())?;
        let mut cost = Cost::default();
        while cost.frames < FRAMES {
            section(&mut cost)?;
        }
        Ok(cost.time.as_nanos() as f64 / cost.frames as f64)
    }
}

/// A socket in the namespace of the kernel's end.
fn receiver(netns: &Netns) -> io::Result<(UdpSocket, Batch)> {
    let socket = netns.run(|| UdpSocket::bind((topology::PEER_IP, PORT)))?;
    let bytes = BUFFER_BYTES.to_ne_bytes();
    let set = |option| calls::setsockopt(socket.as_fd(), libc::SOL_SOCKET, option, &bytes);
    set(libc::SO_RCVBUFFORCE).or_else(|_| set(libc::SO_RCVBUF))?;
    Ok((socket, Batch::new(SECTION, FRAME_BYTES)))
}

/// A datagram to that socket, as a stack hands it to a device that computes checksums.
fn datagram(from: EtherAddr) -> (Vec<u8>, Offload) {
    let l4_bytes = (FRAME_BYTES - L4) as u16;
    let mut f = [&topology::PEER_MAC[..], &from.0, &[0x08, 0x00]].concat();
    // Not to be fragmented, so that the identification means nothing.
    f.extend([0x45, 0, 0, 0, 0, 0, 0x40, 0, 64, UDP, 0, 0]);
    f.extend(topology::OUR_IP.octets());
    f.extend(topology::PEER_IP.octets());
    f[16..18].copy_from_slice(&(l4_bytes + 20).to_be_bytes());
    let header_sum = !sum(&f[14..L4]);
    f[24..26].copy_from_slice(&header_sum.to_be_bytes());
    f.resize(FRAME_BYTES, 0x5a);
    f[L4..L4 + LENGTH].copy_from_slice(&[0x20, 0, 0, PORT as u8]);
    f[L4 + LENGTH..L4 + CHECKSUM].copy_from_slice(&l4_bytes.to_be_bytes());
    let pseudo = [&f[26..L4], &[0, UDP], &l4_bytes.to_be_bytes()].concat();
    let partial = sum(&pseudo);
    f[L4 + CHECKSUM..HEADER_BYTES].copy_from_slice(&partial.to_be_bytes());
    let offload = Offload {
        needs_csum: true,
        csum_start: L4 as u16,
        csum_offset: CHECKSUM as u16,
        ..Offload::default()
    };
    (f, offload)
}

/// The folded sum of 16-bit words (RFC 1071).
fn sum(bytes: &[u8]) -> u16 {
    let words = bytes.chunks(2).map(|w| u32::from(w[0]) << 8 | w.get(1).map_or(0, |b| (*b).into()));
    let mut sum: u32 = words.sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

/// The datagrams that a received frame stands for.
fn pieces(p: &Packet) -> impl Iterator<Item = std::ops::Range<usize>> + use<> {
    let (from, unit) = match p.offload.gso {
        Some(gso) => (usize::from(gso.header_bytes), usize::from(gso.segment_bytes).max(1)),
        None => (0, usize::MAX),
    };
    let end = p.chain.len();
    std::iter::successors(Some(from), move |at| at.checked_add(unit))
        .take_while(move |at| *at < end)
        .map(move |at| at..end.min(at.saturating_add(unit)))
}

/// A rig by the names of its scenarios.
pub struct Opened {
    device: &'static str,
    method: &'static str,
    rig: RefCell<Rig>,
}

/// TAP and AF_PACKET, frames of any kind and of one flow. What cannot be opened here is said on standard
/// error and left out.
pub fn open() -> Vec<Opened> {
    type Open = fn() -> io::Result<Topology<Box<dyn Device>>>;
    let devices: [(&str, Open); 2] = [("tap", Rig::tap), ("packet", Rig::packet)];
    let all = devices.into_iter().flat_map(|(device, open)| {
        [("any", false), ("flow", true)].map(|(method, is_flow)| {
            let rig = open().and_then(|topology| Rig::on(topology, is_flow));
            rig.map(|rig| Opened { device, method, rig: RefCell::new(rig) })
                .inspect_err(|e| eprintln!("not measured: frames over {device} ({method}): {e}"))
        })
    });
    all.flatten().collect()
}

/// Every way of one rig.
pub fn scenarios(opened: &Opened) -> Vec<Scenario<'_>> {
    let (device, method) = (opened.device, opened.method);
    let both = [Direction::Send, Direction::Receive].into_iter();
    let each = both.flat_map(|direction| BURSTS.map(|burst| (direction, burst)));
    each.map(|(direction, burst)| {
        let run = move |_| Ok(Sample::of(NS, opened.rig.borrow_mut().run(direction, burst)?));
        let kind = if method == "flow" { "of one flow" } else { "of any kind" };
        let title = format!("{}, {kind}, x{burst}", direction.name());
        Scenario::new(name(device, method, direction, burst), title, run)
            .in_table("Frames of 64 bytes, by burst size")
            .label("device", device)
            .label("method", method)
            .label("burst", burst)
            .label("threads", 1)
    })
    .collect()
}

fn name(device: &str, method: &str, direction: Direction, burst: usize) -> String {
    format!("frames.{device}.{method}.{}.x{burst}", direction.name())
}

/// Bursts of 64 over bursts of 1.
pub fn ratios() -> Vec<Ratio> {
    let of = |name: &str, sentence, device, method, direction| {
        let ways = [64, 1].map(|burst| self::name(device, method, direction, burst));
        Ratio::over(name.to_owned(), sentence, NS, ways)
    };
    let (send, receive) = (Direction::Send, Direction::Receive);
    let flow = "ns per 64-byte datagram of one flow over TAP, read by a kernel socket, bursts of 64 ÷ of 1";
    let any = "ns per 64-byte frame of any kind, bursts of 64 ÷ bursts of 1";
    let joined = "ns per 64-byte datagram received, 64 joined by the sender ÷ 1";
    let came = "ns per 64-byte frame received, bursts of 64 ÷ bursts of 1";
    vec![
        of("burst.tap.64_vs_1", flow, "tap", "flow", send).goals(0.68, 0.6),
        of("burst.packet.flow.64_vs_1", "the same, packet", "packet", "flow", send),
        of("burst.tap.any.64_vs_1", any, "tap", "any", send),
        of("burst.packet.64_vs_1", "the same, packet", "packet", "any", send),
        of("burst.tap.flow.receive.64_vs_1", joined, "tap", "flow", receive),
        of("burst.packet.flow.receive.64_vs_1", "the same, packet", "packet", "flow", receive),
        of("burst.tap.receive.64_vs_1", came, "tap", "any", receive),
        of("burst.packet.receive.64_vs_1", "the same, packet", "packet", "any", receive),
    ]
}
