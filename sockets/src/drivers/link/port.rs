//! A link whose far end is the program: packets of its own loop go in and come out as bytes.
//!
//! ```text
//! PacketSender    push ─► copy, GRO ─► channel ─► copy into the stack's pool ─► stack
//! PacketReceiver  recv ◄─ copy, segmentation, checksums ◄─ channel ◄─────────── stack
//! ```
//!
//! Super-packets cross the channel: the sender joins the TCP segments of a batch, and the receiver segments what the stack
//! sends, both outside the shard lock. A packet that arrives is copied into the pool of the stack, so that the shares, the
//! reserve and the fairness of the pool hold for it.
//!
//! Bounds: the link's in each direction ([`LinkConfig::ring_pkts`], [`LinkConfig::ring_bytes`]), one batch of the sender,
//! and the packets of [`BATCH_FRAMES`] frames at the receiver.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use fulmar_stack::base::{Counters, DropReason, Instant, Medium};
use fulmar_stack::device::gro::Gro;
use fulmar_stack::device::offload::{Packets, make_unique};
use fulmar_stack::device::{Burst, Caps, Device, Packet, forward_device, plain_ip};
use fulmar_stack::mbuf::{Pool, PoolConfig, Purpose};

use super::LinkConfig;
use super::ring::{Link, Shared, bell};
use crate::drivers::OpenError;
use crate::drivers::wake::Bell;

/// Packets that a sender joins and hands over together, at most.
const BATCH_PACKETS: usize = 128;
/// Frames that a receiver takes from the channel at a time.
const BATCH_FRAMES: usize = 8;
/// Frames in each direction at most.
const CHANNEL_FRAMES: usize = 1024;
/// Memory for packets that the stack has not taken yet: a full channel and a batch.
const SENDER_BYTES: usize = 16 << 20;
/// Longest packet that may use the control reserve of the stack's pool, as an ACK does.
const CONTROL_BYTES: usize = 256;
/// RFC 791 section 3.2.
const MIN_MTU: usize = 68;
/// Longest IP packet.
const MAX_PACKET_BYTES: usize = 65_535;

/// A device whose packets the program passes.
///
/// The stack takes what [`PacketSender`] sends, and [`PacketReceiver`] returns what the stack sends. When the program
/// drops one of them, the device is gone for good, as that of [`link_pair`](crate::devices::link_pair) is.
///
/// # Errors
/// No descriptor is left; no memory; an MTU outside 68 to 65,535.
///
/// ```
/// use fulmar::{Stack, TcpStream, devices};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let (device, mut sender, mut receiver) = devices::channel(1420)?;
/// let stack = Stack::builder().device(device).address("10.0.0.2/24".parse()?).unlisted().build()?;
/// # let to = "10.0.0.1:80".parse()?;
/// # let _stream = TcpStream::connect_nonblocking(&stack, &to, &Default::default())?;
/// let packet = receiver.recv()?;
/// println!("a packet of {} bytes for the tunnel", packet.len());
/// # let from_tunnel = packet.to_vec();
/// // And from the tunnel:
/// sender.send(&from_tunnel)?;
/// # Ok(())
/// # }
/// ```
pub fn channel(mtu: usize) -> Result<(PacketDevice, PacketSender, PacketReceiver), OpenError> {
    if !(MIN_MTU..=MAX_PACKET_BYTES).contains(&mtu) {
        let e = io::Error::new(io::ErrorKind::InvalidInput, format!("invalid MTU {mtu}"));
        return Err(OpenError::new("cannot open a channel", e, "expected 68-65535"));
    }
    let link = LinkConfig { mtu, ring_pkts: CHANNEL_FRAMES, ..LinkConfig::default() };
    let caps = Caps { medium: Medium::Ip, ether: Medium::OWN, ..link.caps(0) };
    // Joined packets are copied when they arrive.
    let joined = Caps { mtu: MAX_PACKET_BYTES, max_segs: usize::MAX, ..caps };
    let mut shared = Shared::new(&link)?;
    // The two ends of the program sleep apart from each other.
    shared.spaces[1] = bell()?;
    let shared = Arc::new(shared);
    let end = |side, receives, caps| Link::new(&shared, side, receives, caps, "channel");
    let burst = || Burst::with_capacity(BATCH_PACKETS);
    let device = PacketDevice { link: end(0, true, caps), arriving: burst() };
    let sender = PacketSender {
        link: end(1, false, joined),
        pool: pool()?,
        batch: burst(),
        gro: Gro::new(),
        counters: Counters::default(),
    };
    let packets = Packets::new();
    let receiver =
        PacketReceiver { link: end(1, true, caps), arriving: burst(), packets, taken: 0 };
    Ok((device, sender, receiver))
}

fn pool() -> Result<Pool, OpenError> {
    let config = PoolConfig { huge_pages: false, ..PoolConfig::with_budget(SENDER_BYTES) };
    Pool::new(config).map_err(|e| {
        let e = io::Error::new(io::ErrorKind::OutOfMemory, e.to_string());
        OpenError::new("cannot allocate the buffers of a channel", e, "free some memory")
    })
}

fn gone() -> io::Error {
    io::Error::new(io::ErrorKind::BrokenPipe, "the stack of the channel has ended")
}

/// The stack's end of a channel: [`channel`].
///
/// ```
/// use fulmar::Stack;
/// use fulmar::devices::{self, PacketDevice};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let (device, _sender, _receiver): (PacketDevice, _, _) = devices::channel(1420)?;
/// let stack = Stack::builder().device(device).address("10.0.0.2/24".parse()?).unlisted().build()?;
/// # drop(stack);
/// # Ok(())
/// # }
/// ```
pub struct PacketDevice {
    link: Link,
    /// Frames in the sender's memory.
    arriving: Burst,
}

impl std::fmt::Debug for PacketDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PacketDevice").finish_non_exhaustive()
    }
}

impl Device for PacketDevice {
    forward_device!(self => self.link, except rx_burst);

    fn rx_burst(
        &mut self,
        now: Instant,
        pool: &mut Pool,
        out: &mut Burst,
        budget: usize,
        counters: &mut Counters,
    ) -> usize {
        let before = out.len();
        let budget = budget.min(out.space());
        self.link.rx_burst(now, pool, &mut self.arriving, budget, counters);
        while let Some(mut p) = self.arriving.pop_front() {
            let is_control = p.chain.len() <= CONTROL_BYTES;
            let purpose = if is_control { Purpose::Control } else { Purpose::Receive };
            match make_unique(&mut p.chain, pool, purpose) {
                Ok(()) => drop(out.push(p)),
                Err(_) => p.discard(DropReason::NoBuffer, pool, counters),
            }
        }
        out.len() - before
    }
}

/// Passes IP packets to the stack of a channel.
///
/// The descriptor is readable when there is space again: see [`PacketSender::rest`].
///
/// ```
/// use std::io::ErrorKind;
/// use fulmar::{Stack, devices};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let (device, mut sender, _receiver) = devices::channel(1420)?;
/// # let stack = Stack::builder().device(device).address("10.0.0.2/24".parse()?).unlisted().build()?;
/// # let packets = [[0; 40]; 3];
/// for packet in &packets {
///     sender.push(packet)?;
/// }
/// match sender.flush() {
///     Err(e) if e.kind() == ErrorKind::WouldBlock => println!("the stack is slower than the tunnel"),
///     done => done?,
/// }
/// # drop(stack);
/// # Ok(())
/// # }
/// ```
pub struct PacketSender {
    link: Link,
    pool: Pool,
    batch: Burst,
    gro: Gro,
    counters: Counters,
}

impl PacketSender {
    /// Passes one packet, and those that were pushed. A program that has several packets at hand pushes them and flushes
    /// once.
    ///
    /// # Errors
    /// As [`PacketSender::push`].
    pub fn send(&mut self, packet: &[u8]) -> io::Result<()> {
        self.push(packet)?;
        match self.flush() {
            // The packet is in the batch: the next call passes it.
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(()),
            done => done,
        }
    }

    /// Copies a packet into the batch, which is passed when it has 128 packets, or by [`PacketSender::flush`]. The stack
    /// checks all headers, and counts what it drops ([`Stack::stat`](crate::Stack::stat)).
    ///
    /// # Errors
    /// `WouldBlock`: channel and batch are full, and the packet was not taken. `BrokenPipe`: the stack has ended.
    /// `InvalidInput`: more than 65,535 bytes.
    pub fn push(&mut self, packet: &[u8]) -> io::Result<()> {
        if self.batch.is_full() {
            self.flush()?;
        }
        if packet.len() > MAX_PACKET_BYTES {
            let length = format!("invalid packet of {} bytes: expected 0-65535", packet.len());
            return Err(io::Error::new(io::ErrorKind::InvalidInput, length));
        }
        // Without the EtherType of IP the stack drops it.
        let header = plain_ip::link_header(packet, packet.len()).unwrap_or_default();
        let bytes = header.len() + packet.len();
        let Ok(mut chain) = self.pool.alloc_chain(bytes, 0, Purpose::Control) else {
            return Err(io::ErrorKind::WouldBlock.into());
        };
        chain.fill([&header[..], packet]);
        // It has space.
        let _ = self.batch.push(Packet::new(chain));
        Ok(())
    }

    /// Joins the TCP segments of the batch and passes it.
    ///
    /// # Errors
    /// `WouldBlock`: the channel is full, and a part of the batch is left. `BrokenPipe`: the stack has ended.
    pub fn flush(&mut self) -> io::Result<()> {
        if self.link.is_over() {
            return Err(gone());
        }
        let PacketSender { link, pool, batch, gro, counters } = self;
        if batch.len() > 1 {
            gro.coalesce(batch, pool, counters);
        }
        link.tx_burst(Instant::ZERO, pool, batch, counters);
        if batch.is_empty() { Ok(()) } else { Err(io::ErrorKind::WouldBlock.into()) }
    }

    /// Prepares a sleep on the descriptor after `WouldBlock`. False: there is space, or the stack has ended.
    pub fn rest(&mut self) -> bool {
        self.link.space().disarm();
        self.link.space().arm();
        !self.batch.is_empty() && self.link.is_blocked() && !self.link.is_over()
    }
}

/// Returns the IP packets that the stack of a channel sends: complete, with checksums, of the channel's MTU at most.
///
/// The descriptor is readable when a packet has come: see [`PacketReceiver::rest`].
///
/// ```
/// use fulmar::{Stack, UdpSocket, devices};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let (device, mut sender, mut receiver) = devices::channel(1500)?;
/// let stack = Stack::builder().device(device).address("10.0.0.2/24".parse()?).build()?;
/// let socket = UdpSocket::bind(&stack, "10.0.0.2:7000")?;
/// socket.send_to(b"hello", "10.0.0.1:53")?;
/// # let stack = Stack::builder();
/// let packet = receiver.recv()?;
/// assert!(packet.ends_with(b"hello"));
/// // To the tunnel with it; what the tunnel returns goes to `sender.send`.
/// # let _ = &mut sender;
/// # Ok(())
/// # }
/// ```
pub struct PacketReceiver {
    link: Link,
    arriving: Burst,
    packets: Packets,
    /// Packets that were returned.
    taken: usize,
}

impl PacketReceiver {
    /// The next packet. Waits for it.
    ///
    /// # Errors
    /// `BrokenPipe`: the stack has ended, and no packet is left.
    pub fn recv(&mut self) -> io::Result<&[u8]> {
        while !self.advance()? {
            if self.rest() {
                let mut fds = [PollFd::new(self.as_fd(), PollFlags::POLLIN)];
                // A signal, or an error, is a reason to look again.
                let _ = poll(&mut fds, PollTimeout::NONE);
            }
        }
        Ok(self.packet())
    }

    /// The next packet, without waiting.
    ///
    /// # Errors
    /// `WouldBlock`: none is there. As [`PacketReceiver::recv`].
    pub fn try_recv(&mut self) -> io::Result<&[u8]> {
        if self.advance()? { Ok(self.packet()) } else { Err(io::ErrorKind::WouldBlock.into()) }
    }

    /// The packets that are there, the first of which [`PacketReceiver::try_recv`] would return; empty: none. For calls
    /// that send many at a time (sendmmsg(2)).
    ///
    /// # Errors
    /// As [`PacketReceiver::recv`].
    pub fn try_recv_all(&mut self) -> io::Result<impl ExactSizeIterator<Item = &[u8]>> {
        let first = if self.advance()? { self.taken - 1 } else { self.packets.len() };
        self.taken = self.packets.len();
        Ok(self.packets.iter().skip(first))
    }

    /// Prepares a sleep on the descriptor. False: a packet is there, or the stack has ended.
    pub fn rest(&mut self) -> bool {
        self.bell().disarm();
        self.bell().arm();
        !self.fill() && !self.link.is_over()
    }

    /// Goes on to the next packet; false: there is none.
    fn advance(&mut self) -> io::Result<bool> {
        let has_packet = self.fill();
        self.taken += usize::from(has_packet);
        if !has_packet && self.link.is_over() { Err(gone()) } else { Ok(has_packet) }
    }

    /// Takes frames that have come if no packet is left; whether there is one.
    fn fill(&mut self) -> bool {
        while self.taken == self.packets.len() {
            self.packets.clear();
            self.taken = 0;
            if self.link.take_in(&mut self.arriving, BATCH_FRAMES).frames == 0 {
                return false;
            }
            while let Some(p) = self.arriving.pop_front() {
                // The stack never sends a request that does not match its frame.
                let _ = self.packets.append(&p, plain_ip::HEADER_BYTES);
            }
        }
        true
    }

    fn packet(&self) -> &[u8] {
        self.taken.checked_sub(1).and_then(|i| self.packets.get(i)).unwrap_or_default()
    }

    fn bell(&self) -> &Bell {
        self.link.arrivals()
    }
}

macro_rules! descriptor {
    ($t:ty, $bell:ident) => {
        impl AsFd for $t {
            fn as_fd(&self) -> BorrowedFd<'_> {
                self.link.$bell().as_fd()
            }
        }

        impl std::fmt::Debug for $t {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.debug_struct(stringify!($t)).finish_non_exhaustive()
            }
        }
    };
}

descriptor!(PacketSender, space);
descriptor!(PacketReceiver, arrivals);
