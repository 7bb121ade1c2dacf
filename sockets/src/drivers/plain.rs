//! A device of two functions and a descriptor: whole packets, one at a time, without offloads.

mod qemu;

use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixDatagram;

use fulmar_stack::base::{Counters, DropReason, EtherAddr, Instant, Medium};
use fulmar_stack::device::{
    Burst, Caps, Device, DeviceStats, Interest, Packet, Tally, TxTime, WakeFd, plain_ip,
};
use fulmar_stack::mbuf::{Pool, Purpose};
use fulmar_stack::wire::eth;

use crate::drivers::{OpenError, sys};

pub use qemu::QemuStream;

/// Longest frame: an IP packet behind an Ethernet header.
const MAX_FRAME_BYTES: usize = 65_535 + eth::HEADER_BYTES;
/// Longest packet that may use the control reserve of the pool, as an ACK does.
const CONTROL_BYTES: usize = 256;

/// Sends and receives packets for [`plain`]: a tunnel, a socket, the character device of a TUN. The descriptor is set to
/// non-blocking, and is readable while packets are queued.
///
/// It is implemented for the descriptor of a TUN without a virtio-net header ([`File`]) and for connected
/// [`UnixDatagram`]s, of which each carries a packet (QEMU's `-netdev dgram`).
///
/// ```
/// use std::io;
/// use std::net::UdpSocket;
/// use std::os::fd::{AsFd, BorrowedFd};
///
/// use fulmar::devices::{self, PacketIo};
///
/// /// IP packets in the datagrams of a connected socket.
/// struct Tunnel(UdpSocket);
///
/// impl AsFd for Tunnel {
///     fn as_fd(&self) -> BorrowedFd<'_> {
///         self.0.as_fd()
///     }
/// }
///
/// impl PacketIo for Tunnel {
///     fn send(&mut self, packet: &[u8]) -> io::Result<()> {
///         self.0.send(packet).map(drop)
///     }
///
///     fn recv(&mut self, buf: &mut [u8]) -> io::Result<usize> {
///         self.0.recv(buf)
///     }
/// }
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let socket = UdpSocket::bind("127.0.0.1:0")?;
/// # socket.connect("127.0.0.1:9")?;
/// let device = devices::plain(Tunnel(socket), 1400)?;
/// let stack = fulmar::Stack::builder().device(device).address("10.0.0.2/24".parse()?).build()?;
/// # Ok(())
/// # }
/// ```
pub trait PacketIo: AsFd + Send {
    /// Sends one packet.
    ///
    /// # Errors
    /// `WouldBlock`: it is offered again when the descriptor is writable. `BrokenPipe`, `ConnectionReset`, `NotConnected`,
    /// `UnexpectedEof`, `InvalidData`: the device is gone for good. With any other error the packet is dropped.
    fn send(&mut self, packet: &[u8]) -> io::Result<()>;

    /// Receives one packet into `buf`, of 65,549 bytes; returns its length.
    ///
    /// # Errors
    /// `WouldBlock`: none is there. As [`PacketIo::send`].
    fn recv(&mut self, buf: &mut [u8]) -> io::Result<usize>;

    /// Goes on with packets that `send` took in part. Nothing to do where it takes packets whole.
    ///
    /// # Errors
    /// `WouldBlock`: a part is left.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl PacketIo for File {
    fn send(&mut self, packet: &[u8]) -> io::Result<()> {
        self.write(packet).map(drop)
    }

    fn recv(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.read(buf)
    }
}

impl PacketIo for UnixDatagram {
    fn send(&mut self, packet: &[u8]) -> io::Result<()> {
        match UnixDatagram::send(self, packet) {
            // The other socket was closed.
            Err(e) if e.kind() == ErrorKind::ConnectionRefused => Err(ErrorKind::BrokenPipe.into()),
            sent => sent.map(drop),
        }
    }

    fn recv(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        UnixDatagram::recv(self, buf)
    }
}

/// A device for IP packets of at most `mtu` bytes, without a link layer.
///
/// # Errors
/// The descriptor cannot be set to non-blocking.
///
/// ```
/// use std::os::unix::net::UnixDatagram;
/// use fulmar::devices;
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let (socket, _tunnel) = UnixDatagram::pair()?;
/// // Each datagram is an IP packet.
/// let device = devices::plain(socket, 1400)?;
/// let stack = fulmar::Stack::builder().device(device).address("10.0.0.2/24".parse()?).build()?;
/// # drop(stack);
/// # Ok(())
/// # }
/// ```
pub fn plain<I: PacketIo>(io: I, mtu: usize) -> Result<Plain<I>, OpenError> {
    Plain::new(io, Caps::plain_ip(mtu))
}

/// A device for Ethernet frames. `ether` is the stack's address; `mtu` counts from the IP header.
///
/// # Errors
/// As [`plain`].
///
/// ```
/// use std::os::unix::net::UnixDatagram;
/// use fulmar::device::EtherAddr;
/// use fulmar::devices;
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let (socket, _machine) = UnixDatagram::pair()?;
/// // Each datagram is a frame, as of `-netdev dgram` of QEMU.
/// let device = devices::plain_ethernet(socket, 1500, EtherAddr([2, 0, 0, 0, 0, 1]))?;
/// let stack = fulmar::Stack::builder().device(device).address("10.0.0.2/24".parse()?).build()?;
/// # drop(stack);
/// # Ok(())
/// # }
/// ```
pub fn plain_ethernet<I: PacketIo>(
    io: I,
    mtu: usize,
    ether: EtherAddr,
) -> Result<Plain<I>, OpenError> {
    Plain::new(io, Caps::plain(mtu, ether))
}

/// The device of [`plain`] and [`plain_ethernet`].
///
/// ```
/// use std::os::unix::net::UnixDatagram;
/// use fulmar::devices::{self, Plain};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let (socket, _tunnel) = UnixDatagram::pair()?;
/// let device: Plain<UnixDatagram> = devices::plain(socket, 1400)?;
/// let stack = fulmar::Stack::builder().device(device).address("10.0.0.2/24".parse()?).build()?;
/// # drop(stack);
/// # Ok(())
/// # }
/// ```
pub struct Plain<I> {
    io: I,
    caps: Caps,
    /// A packet was refused, or a part of one is left.
    is_full: bool,
    /// The last call to receive found nothing: the descriptor tells when to call again.
    is_drained: bool,
    /// The errno with which it was lost.
    lost: Option<i32>,
    frame: Box<[u8; MAX_FRAME_BYTES]>,
    stats: DeviceStats,
}

impl<I> std::fmt::Debug for Plain<I> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Plain").finish_non_exhaustive()
    }
}

impl<I: PacketIo> Plain<I> {
    fn new(io: I, caps: Caps) -> Result<Plain<I>, OpenError> {
        sys::set_nonblocking(io.as_fd()).map_err(|e| {
            OpenError::new(
                "cannot set the descriptor of a device to non-blocking",
                e,
                "pass an open one",
            )
        })?;
        let caps = Caps { tx_time: TxTime::Coarse, ..caps };
        let stats = DeviceStats { name: "plain".to_owned(), ..DeviceStats::default() };
        let frame = Box::new([0; MAX_FRAME_BYTES]);
        Ok(Plain { io, caps, is_full: false, is_drained: false, lost: None, frame, stats })
    }

    /// Bytes of a frame that are not on the wire.
    fn link_bytes(&self) -> usize {
        if self.caps.medium == Medium::Ip { plain_ip::HEADER_BYTES } else { 0 }
    }

    /// Notes the errors after which nothing more comes.
    fn note(&mut self, e: &io::Error) {
        self.lost = self.lost.or(match e.kind() {
            ErrorKind::BrokenPipe
            | ErrorKind::ConnectionReset
            | ErrorKind::NotConnected
            | ErrorKind::UnexpectedEof => Some(libc::EPIPE),
            ErrorKind::InvalidData => Some(libc::EPROTO),
            _ => None,
        });
    }

    fn flush(&mut self) {
        match self.io.flush() {
            Ok(()) => self.is_full = false,
            Err(e) if e.kind() == ErrorKind::WouldBlock => self.is_full = true,
            Err(e) => self.note(&e),
        }
    }

    /// Sends the first frame of a burst. False: the device is full.
    fn send(&mut self, p: &Packet) -> Result<bool, DropReason> {
        let link_bytes = self.link_bytes();
        if link_bytes > 0 {
            plain_ip::check_sent(p)?;
        }
        let bytes = p.chain.copy_to(link_bytes, &mut self.frame[..]);
        match self.io.send(&self.frame[..bytes]) {
            Ok(()) => Ok(true),
            Err(e) if e.kind() == ErrorKind::WouldBlock => Ok(false),
            Err(e) => {
                self.note(&e);
                Err(DropReason::DeviceGone)
            }
        }
    }

    /// The frame of `bytes` bytes in the buffer.
    fn received(&self, bytes: usize, pool: &mut Pool) -> Result<Packet, DropReason> {
        let packet = self.frame.get(..bytes).ok_or(DropReason::Truncated)?;
        let header = match self.caps.medium {
            Medium::Ethernet if bytes < eth::HEADER_BYTES => return Err(DropReason::Truncated),
            Medium::Ethernet => None,
            Medium::Ip => Some(plain_ip::link_header(packet, bytes)?),
        };
        let purpose = if bytes <= CONTROL_BYTES { Purpose::Control } else { Purpose::Receive };
        let all = bytes + self.link_bytes();
        let mut chain = pool.alloc_chain(all, 0, purpose).map_err(|_| DropReason::NoBuffer)?;
        chain.fill([header.as_ref().map_or(&[][..], |h| &h[..]), packet]);
        Ok(Packet::new(chain))
    }

    /// The counts of a burst, as on the wire.
    fn on_wire(&self, tally: Tally) -> Tally {
        if self.caps.medium == Medium::Ip { tally.of_plain_ip() } else { tally }
    }
}

impl<I: PacketIo> Device for Plain<I> {
    fn caps(&self) -> &Caps {
        &self.caps
    }

    fn tx_burst(
        &mut self,
        _now: Instant,
        pool: &mut Pool,
        burst: &mut Burst,
        counters: &mut Counters,
    ) -> usize {
        self.flush();
        let (mut taken, mut tally) = (0, Tally::default());
        while !self.is_full
            && let Some(p) = burst.front()
        {
            self.stats.tx_crossings += 1;
            match self.send(p) {
                Ok(true) => tally.add(p),
                Ok(false) => {
                    self.is_full = true;
                    self.stats.tx_refusals += 1;
                    break;
                }
                Err(reason) => counters.drop_packet(reason),
            }
            burst.pop_front().into_iter().for_each(|p| pool.free(p.chain));
            taken += 1;
        }
        if taken > 0 && !self.is_full {
            self.flush();
        }
        self.on_wire(tally).sent(counters, &mut self.stats);
        taken
    }

    fn rx_burst(
        &mut self,
        _now: Instant,
        pool: &mut Pool,
        out: &mut Burst,
        budget: usize,
        counters: &mut Counters,
    ) -> usize {
        if self.is_full {
            self.flush();
        }
        let mut tally = Tally::default();
        for _ in 0..budget.min(out.space()) {
            self.stats.rx_crossings += 1;
            let came = self.io.recv(&mut self.frame[..]);
            self.is_drained = came.is_err();
            let bytes = match came {
                Ok(bytes) => bytes,
                Err(e) => {
                    self.note(&e);
                    break;
                }
            };
            match self.received(bytes, pool) {
                Ok(p) => tally.receive(p, out),
                Err(reason) => counters.drop_packet(reason),
            }
        }
        self.on_wire(tally).received(counters, &mut self.stats);
        tally.frames as usize
    }

    /// Packets that [`PacketIo`] has read and not returned do not show in the descriptor.
    fn arm(&mut self) -> bool {
        self.is_drained
    }

    fn wake_fd(&self) -> Option<WakeFd> {
        let interest = if self.is_full { Interest::ReadableOrWritable } else { Interest::Readable };
        Some(WakeFd { fd: self.io.as_fd().as_raw_fd(), interest })
    }

    fn lost(&self) -> Option<i32> {
        self.lost
    }

    fn stats(&self) -> DeviceStats {
        self.stats.clone()
    }
}
