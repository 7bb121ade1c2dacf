//! The loads: datagrams and writes to a modelled peer, datagrams and segments from it, over a simulated device.

use std::io::{self, Read as _, Write as _};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use fulmar::{Cidr, Stack, TcpStream, UdpSocket};
use fulmar_nic::{Command, SimConfig, SimHandle};

use super::measured::{Load, Timed};
use super::{Options, Path};

const NEAR: Ipv4Addr = Ipv4Addr::new(10, 72, 4, 1);
/// The modelled peer answers for every address and discards traffic to this port (RFC 863).
const FAR: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 72, 4, 2)), 9);
/// The port on which the peer sends without end (RFC 864).
const CHARGEN: SocketAddr = SocketAddr::new(FAR.ip(), 19);
/// Calls between two looks at the clock, and datagrams that the peer sends at once: fewer than buffers are posted.
const BATCH: u64 = 64;
/// Bytes of a received segment: with headers and timestamps it fills a packet of 1500.
pub const SEGMENT_BYTES: u64 = 1448;
/// How long a datagram of the peer may take.
const PATIENCE: Duration = Duration::from_millis(100);

/// The load of a path.
///
/// # Errors
/// Too many open descriptors; a connection that fails.
pub fn of(options: &Options) -> io::Result<Box<dyn Load>> {
    Ok(match options.path {
        Path::UdpSend => Box::new(Sends::new(&Rig::of(options))?),
        Path::TcpSend => Box::new(Writes::new(options)?),
        Path::UdpRecv => Box::new(Receives::new(options)?),
        Path::TcpRecv => Box::new(Reads::new()?),
    })
}

/// A stack over a simulated device, with `routes` unused routes.
fn stack(config: SimConfig, routes: u32) -> io::Result<(Stack, SimHandle)> {
    let (device, handle) = fulmar_nic::open(config).map_err(io::Error::other)?;
    let address = Cidr { address: IpAddr::V4(NEAR), prefix_len: 24 };
    let mut builder = Stack::builder().device(device).address(address).name("path").unlisted();
    for i in 0..routes {
        let [_, a, b, c] = (i << 8).to_be_bytes();
        let address = IpAddr::V4(Ipv4Addr::new(11 + a, b, c, 0));
        builder = builder.route(Cidr { address, prefix_len: 24 }, FAR.ip());
    }
    Ok((builder.build().map_err(io::Error::other)?, handle))
}

/// How datagrams are sent.
#[derive(Clone, Copy)]
pub struct Rig {
    /// Payload of each.
    pub bytes: usize,
    /// Routes that are not used.
    pub routes: u32,
    /// Each call names its destination; else the socket is connected.
    pub names_peer: bool,
}

impl Rig {
    /// Connected, without other routes.
    pub fn of(options: &Options) -> Rig {
        Rig { bytes: options.bytes, routes: 0, names_peer: false }
    }
}

/// Datagrams to the peer.
pub struct Sends {
    stack: Stack,
    socket: UdpSocket,
    to: Option<SocketAddr>,
    payload: Vec<u8>,
}

impl Sends {
    /// # Errors
    /// Too many open descriptors.
    pub fn new(rig: &Rig) -> io::Result<Sends> {
        // Hardware for small frames: its work, as much as the host's own, comes after many of them.
        let (stack, _) =
            stack(SimConfig { tx_fetch_frames: 16, ..SimConfig::default() }, rig.routes)?;
        let socket = UdpSocket::bind(&stack, (NEAR, 0))?;
        let to = rig.names_peer.then_some(FAR);
        if to.is_none() {
            socket.connect(FAR)?;
        }
        let sends = Sends { stack, socket, to, payload: vec![0x5a; rig.bytes] };
        // The first datagrams ask for the neighbour's address; from then on it is known.
        for _ in 0..8 {
            sends.send()?;
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(sends)
    }

    #[inline]
    fn send(&self) -> io::Result<usize> {
        match self.to {
            Some(to) => self.socket.send_to(&self.payload, to),
            None => self.socket.send(&self.payload),
        }
    }
}

impl Load for Sends {
    fn stack(&self) -> &Stack {
        &self.stack
    }

    fn run(&mut self, slice: Duration) -> io::Result<Timed> {
        let (mut timed, start) = (Timed::default(), Instant::now());
        timed.batch(|| {
            let mut sent = 0;
            while start.elapsed() < slice {
                for _ in 0..BATCH {
                    self.send()?;
                }
                sent += BATCH;
            }
            Ok(sent)
        })?;
        Ok(timed)
    }
}

/// Writes of one size to a connection.
struct Writes {
    stack: Stack,
    stream: TcpStream,
    bytes: Vec<u8>,
}

/// Bytes that the connection transfers before the measurement, to open its window.
const WARM_BYTES: usize = 4 << 20;

impl Writes {
    fn new(options: &Options) -> io::Result<Writes> {
        let stack = stack(SimConfig::default(), 0)?.0;
        let mut stream = TcpStream::connect(&stack, FAR)?;
        stream.set_nodelay(true)?;
        let warm = vec![0; 64 << 10];
        for _ in 0..WARM_BYTES / warm.len() {
            stream.write_all(&warm)?;
        }
        Ok(Writes { stack, stream, bytes: vec![0x5a; options.bytes.max(1)] })
    }
}

impl Load for Writes {
    fn stack(&self) -> &Stack {
        &self.stack
    }

    fn run(&mut self, slice: Duration) -> io::Result<Timed> {
        let (mut timed, start) = (Timed::default(), Instant::now());
        timed.batch(|| {
            let mut writes = 0;
            while start.elapsed() < slice {
                self.stream.write_all(&self.bytes)?;
                writes += 1;
            }
            Ok(writes)
        })?;
        Ok(timed)
    }
}

/// A device that hands over every packet by itself.
fn one_by_one() -> SimConfig {
    SimConfig { lro: None, ..SimConfig::default() }
}

/// Datagrams of the peer.
struct Receives {
    stack: Stack,
    handle: SimHandle,
    socket: UdpSocket,
    bytes: usize,
}

impl Receives {
    fn new(options: &Options) -> io::Result<Receives> {
        let (stack, handle) = stack(one_by_one(), 0)?;
        let socket = UdpSocket::bind(&stack, (NEAR, 0))?;
        socket.set_read_timeout(Some(PATIENCE))?;
        Ok(Receives { stack, handle, socket, bytes: options.bytes.min(1472) })
    }

    fn read_all(&self) -> io::Result<u64> {
        let (mut room, mut came) = ([0; 2048], 0);
        while came < BATCH {
            match self.socket.recv(&mut room) {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                other => drop(other?),
            }
            came += 1;
        }
        Ok(came)
    }
}

impl Load for Receives {
    fn stack(&self) -> &Stack {
        &self.stack
    }

    fn run(&mut self, slice: Duration) -> io::Result<Timed> {
        let (mut timed, start) = (Timed::default(), Instant::now());
        let (from, to) = (SocketAddr::new(FAR.ip(), 7), self.socket.local_addr()?);
        while timed.wants_more(slice, start) {
            let what = Command::Datagrams { from, to, bytes: self.bytes, count: BATCH };
            self.handle.ask(what).map_err(io::Error::other)?;
            timed.batch(|| self.read_all())?;
        }
        Ok(timed)
    }
}

/// Segments of a peer that sends without end.
struct Reads {
    stack: Stack,
    stream: TcpStream,
    room: Vec<u8>,
}

impl Reads {
    fn new() -> io::Result<Reads> {
        let stack = stack(one_by_one(), 0)?.0;
        let stream = TcpStream::connect(&stack, CHARGEN)?;
        Ok(Reads { stack, stream, room: vec![0; 64 << 10] })
    }
}

impl Load for Reads {
    fn stack(&self) -> &Stack {
        &self.stack
    }

    fn run(&mut self, slice: Duration) -> io::Result<Timed> {
        let (mut timed, start) = (Timed::default(), Instant::now());
        timed.batch(|| {
            let mut bytes = 0;
            while start.elapsed() < slice {
                bytes += self.stream.read(&mut self.room)? as u64;
            }
            Ok(bytes / SEGMENT_BYTES)
        })?;
        Ok(timed)
    }
}
