//! Paths that lead out: datagrams and writes over a simulated device.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use fulmar::base::{Stage, StepAblation};
use fulmar::{Cidr, Route};
use fulmar_nic::{Command, SimConfig, SimHandle};

use super::measured::{Driven, Timed};
use super::stack::{Stack, TcpStream, UdpSocket};
use super::{Ablation, Options, Spread};
use crate::cpu;
use crate::exit::ExitPoint;

pub(super) const NEAR: Ipv4Addr = Ipv4Addr::new(10, 72, 4, 1);
/// The modelled peer answers for every address and discards what comes to this port (RFC 863).
pub(super) const FAR: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 72, 4, 2)), 9);
/// Calls between two looks at the clock.
const BATCH: u64 = 64;
/// Where a rate is kept, datagrams that are due within so short a time go together.
const BURSTS_PER_SECOND: u64 = 20_000;

/// Datagrams of a burst at this rate: one by one, as long as the waits between them can be kept.
pub(super) fn burst_at(rate_pps: u64) -> u64 {
    (rate_pps / BURSTS_PER_SECOND).clamp(1, BATCH)
}

/// The address of the stacks.
pub(super) const ADDRESS: Cidr = Cidr { address: IpAddr::V4(NEAR), prefix_len: 24 };

/// A stack with exit points over a simulated device.
fn stack(exit: &ExitPoint, config: SimConfig, routes: u32) -> io::Result<(Stack, SimHandle)> {
    let (device, handle) = fulmar_nic::open(config).map_err(io::Error::other)?;
    let unused = |i: u32| {
        let [_, a, b, c] = (i << 8).to_be_bytes();
        let dst = fulmar::Prefix { addr: IpAddr::V4(Ipv4Addr::new(11 + a, b, c, 0)), len: 24 };
        Route { dst, via: Some(FAR.ip()), src: None, mtu: None }
    };
    let stack = Stack::new(exit, device, ADDRESS, (0..routes).map(unused).collect())?;
    Ok((stack, handle))
}

/// Hardware for small frames: its work, as much as the host's own, comes after many of them.
fn small_frames() -> SimConfig {
    SimConfig { tx_fetch_frames: 16, ..SimConfig::default() }
}

/// How datagrams are sent.
#[derive(Clone, Copy)]
struct Rig {
    /// Payload of each.
    bytes: usize,
    /// Routes that are not used.
    routes: u32,
    /// Each call names its destination; else the sockets are connected.
    names_peer: bool,
    /// Sockets that send in turn.
    sockets: usize,
}

/// Datagrams to one peer.
pub(super) struct Datagrams {
    sockets: Vec<UdpSocket>,
    /// The socket whose turn it is.
    next: usize,
    exit: ExitPoint,
    payload: Vec<u8>,
    rate_pps: u64,
    names_peer: bool,
    stack: Stack,
}

impl Datagrams {
    pub fn new(options: &Options) -> io::Result<Datagrams> {
        let bytes = options.bytes;
        Datagrams::with(options, Rig { bytes, routes: 0, names_peer: false, sockets: 1 })
    }

    fn with(options: &Options, rig: Rig) -> io::Result<Datagrams> {
        let exit = ExitPoint::default();
        let stack = stack(&exit, small_frames(), rig.routes)?.0;
        let mut sockets = Vec::new();
        for _ in 0..rig.sockets {
            let socket = UdpSocket::bind(&stack, IpAddr::V4(NEAR))?;
            if !rig.names_peer {
                socket.connect(FAR)?;
            }
            sockets.push(socket);
        }
        let payload = vec![0x5a; rig.bytes];
        let (rate_pps, names_peer) = (options.rate_pps, rig.names_peer);
        let mut datagrams =
            Datagrams { sockets, next: 0, exit, payload, rate_pps, names_peer, stack };
        datagrams.meet_neighbour()?;
        Ok(datagrams)
    }

    /// The first datagrams ask for the neighbour's address; from then on it is known.
    fn meet_neighbour(&mut self) -> io::Result<()> {
        for _ in 0..8 {
            self.send()?;
            std::thread::sleep(Duration::from_millis(1));
            self.stack.poll(BATCH as usize)?;
        }
        Ok(())
    }

    #[inline]
    fn send(&mut self) -> io::Result<()> {
        self.next = if self.next == 0 { self.sockets.len() } else { self.next } - 1;
        let Some(socket) = self.sockets.get(self.next) else { return Ok(()) };
        if self.names_peer {
            socket.send_to(&self.payload, FAR)?;
        } else {
            socket.send(&self.payload)?;
        }
        Ok(())
    }
}

impl Datagrams {
    fn burst(&mut self, datagrams: u64) -> io::Result<u64> {
        for _ in 0..datagrams {
            self.send()?;
        }
        Ok(datagrams)
    }

    /// All of a slice is one batch: the thread's clock is not read in between.
    fn without_pause(&mut self, timed: &mut Timed, slice: Duration) -> io::Result<()> {
        let start = Instant::now();
        timed.batch(|| {
            let mut sent = 0;
            while start.elapsed() < slice {
                sent += self.burst(BATCH)?;
            }
            Ok(sent)
        })
    }

    /// A burst is a batch, and the wait for the next one is in none. Readings around so few datagrams cost as
    /// much as these: that is measured, and taken off.
    fn at_rate(&mut self, timed: &mut Timed, rate: u64, slice: Duration) -> io::Result<()> {
        let (own, start) = (Timed::of_nothing()?, Instant::now());
        while start.elapsed() < slice {
            timed.batch(|| self.burst(burst_at(rate)))?;
            timed.take_off(own);
            timed.keep_rate(start, rate, slice);
        }
        Ok(())
    }
}

impl Driven for Datagrams {
    fn run(&mut self, stage: Option<Stage>, slice: Duration) -> io::Result<Timed> {
        self.exit.set(stage);
        let mut timed = Timed::default();
        let ran = match self.rate_pps {
            0 => self.without_pause(&mut timed, slice),
            rate => self.at_rate(&mut timed, rate, slice),
        };
        self.exit.set(None);
        // What an early end has left in the device's rings is taken back.
        self.send()?;
        ran.map(|()| timed)
    }
}

/// A variation of the whole path.
struct Changed {
    what: &'static str,
    how: How,
}

/// What is different.
#[derive(Clone, Copy)]
enum How {
    /// Fewer bytes.
    Bytes(usize),
    /// No peer is fixed.
    NamesPeer,
    /// More routes in the table.
    Routes(u32),
    /// A step is done in another way.
    Varied(StepAblation),
    /// The same, where this many sockets send in turn, in both.
    VariedAmong(StepAblation, usize),
}

/// Sockets that send in turn where it matters whose buffers are warm.
const MANY: usize = 256;

const CHANGES: [Changed; 9] = [
    Changed { what: "without payload (nothing to copy)", how: How::Bytes(0) },
    Changed { what: "every call names its destination (not connected)", how: How::NamesPeer },
    Changed { what: "with 1000 more routes in the table", how: How::Routes(1000) },
    Changed {
        what: "without the look-up (ready-made headers, unchecked)",
        how: How::Varied(StepAblation::NoCacheValidation),
    },
    Changed {
        what: "every layer asked for every packet (no ready-made headers)",
        how: How::Varied(StepAblation::NoTemplate),
    },
    Changed {
        what: "route, source and neighbour looked up in the tables for every packet",
        how: How::Varied(StepAblation::NoDestinationCache),
    },
    Changed {
        what: "small buffers from a stock of the socket instead of the thread's pool",
        how: How::Varied(StepAblation::CachePerSocket),
    },
    Changed {
        what: "the same, 256 sockets in turn",
        how: How::VariedAmong(StepAblation::CachePerSocket, MANY),
    },
    Changed {
        what: "early instead of deferred encapsulation (copied first, headers in a buffer of their own)",
        how: How::Varied(StepAblation::EarlyEncapsulation),
    },
];

/// Variations of the whole path, each measured in turn with the path itself.
pub(super) fn ablations(options: &Options) -> io::Result<Vec<Ablation>> {
    CHANGES.iter().map(|c| ablation(options, c)).collect()
}

fn ablation(options: &Options, changed: &Changed) -> io::Result<Ablation> {
    let usual = Rig { bytes: options.bytes, routes: 0, names_peer: false, sockets: 1 };
    let (plain, other, variation) = match changed.how {
        How::Bytes(bytes) => (usual, Rig { bytes, ..usual }, None),
        How::NamesPeer => (usual, Rig { names_peer: true, ..usual }, None),
        How::Routes(routes) => (usual, Rig { routes, ..usual }, None),
        How::Varied(v) => (usual, usual, Some(v)),
        How::VariedAmong(v, sockets) => {
            let rig = Rig { sockets, ..usual };
            (rig, rig, Some(v))
        }
    };
    let mut plain = Datagrams::with(options, plain)?;
    let mut other = Datagrams::with(options, other)?;
    other.exit.vary(variation);
    let (mut with, mut without) = (Spread::default(), Spread::default());
    for run in 0..=options.runs {
        let pair = (ns(plain.run(None, options.slice)?), ns(other.run(None, options.slice)?));
        // The first warms caches.
        if run > 0 {
            without.runs.push(pair.0);
            with.runs.push(pair.1);
        }
    }
    Ok(Ablation { what: changed.what, with, without })
}

fn ns(timed: Timed) -> f64 {
    let all = timed.time.as_nanos() as f64 - timed.hardware_ns as f64;
    all / timed.packets.max(1) as f64
}

/// A run of the ledger takes this many slices: of a slice's packets too few are measured for an interrupt
/// in one of them not to show.
const LEDGER_SLICES: u32 = 8;

/// How far the ledger's sum is from the measured total, once per run: all stages, the program's own
/// loop and the simulated hardware in both, and beside the stages what the account itself has cost.
pub(super) fn ledger(options: &Options) -> io::Result<Vec<f64>> {
    let device = fulmar_nic::open(SimConfig::default()).map_err(io::Error::other)?.0;
    let builder = fulmar::Stack::builder().device(device).address(ADDRESS).name("path").unlisted();
    let stack = builder.account(fulmar::ledger::DEFAULT_EVERY).build().map_err(io::Error::other)?;
    let socket = fulmar::UdpSocket::bind(&stack, (NEAR, 0))?;
    socket.connect(FAR)?;
    let payload = vec![0x5a; options.bytes];
    let mut gaps = Vec::new();
    for run in 0..=options.runs {
        stack.clear_ledger();
        let (start, before, mut sent) = (Instant::now(), cpu::thread_cpu()?, 0u64);
        while start.elapsed() < options.slice * LEDGER_SLICES {
            for _ in 0..BATCH {
                socket.send(&payload)?;
            }
            sent += BATCH;
        }
        let total = (cpu::thread_cpu()?.saturating_sub(before)).as_nanos() as f64 / sent as f64;
        let balance = stack.ledger().unwrap_or_default();
        let visits = balance.visits.max(1) as f64;
        let sum = (balance.busy_ns() + balance.overhead_ns) / visits;
        if run > 0 {
            gaps.push((sum / total - 1.0).abs());
        }
    }
    Ok(gaps)
}

/// Writes of one size to connections that do not outlive their batch: what an early end has left of a
/// connection goes with it.
pub(super) struct Writes {
    stack: Stack,
    handle: SimHandle,
    exit: ExitPoint,
    bytes: Vec<u8>,
    /// Opened since the peer forgot all of them.
    connections: usize,
}

/// What a connection moves before it is measured: its window is open then.
const WARM_BYTES: usize = 4 << 20;
/// Bytes of a batch at most, well within that window.
const BATCH_BYTES: usize = 512 << 10;
/// Connections after which the peer is told to forget them, well below what it keeps: of what ended
/// early it has not seen the bytes, so that the reset behind them does not end the connection for it.
const FORGETS_AFTER: usize = 256;
/// Writes of a batch at most.
const BATCH_WRITES: usize = 256;

impl Writes {
    pub fn new(options: &Options) -> io::Result<Writes> {
        let exit = ExitPoint::default();
        let (stack, handle) = stack(&exit, SimConfig::default(), 0)?;
        let bytes = vec![0x5a; options.bytes.max(1)];
        Ok(Writes { stack, handle, exit, bytes, connections: 0 })
    }

    /// A connection with nothing on its way.
    fn connection(&mut self) -> io::Result<TcpStream> {
        self.connections += 1;
        if self.connections > FORGETS_AFTER {
            self.connections = 1;
            self.handle.ask(Command::ResetAll).map_err(io::Error::other)?;
            self.stack.poll(BATCH as usize)?;
        }
        let stream = TcpStream::connect(&self.stack, FAR)?;
        // All of a batch has room, since at some stages nothing leaves the buffer.
        stream.set_send_buffer(4 * BATCH_BYTES)?;
        let warm = vec![0; 64 << 10];
        for _ in 0..WARM_BYTES / warm.len() {
            stream.write_all(&warm)?;
        }
        for _ in 0..10_000 {
            self.stack.poll(BATCH as usize)?;
            if stream.is_drained()? {
                return Ok(stream);
            }
        }
        Err(io::Error::new(io::ErrorKind::TimedOut, "the modelled peer does not acknowledge"))
    }
}

impl Driven for Writes {
    fn run(&mut self, stage: Option<Stage>, slice: Duration) -> io::Result<Timed> {
        let writes = (BATCH_BYTES / self.bytes.len()).clamp(1, BATCH_WRITES);
        let (mut timed, start) = (Timed::default(), Instant::now());
        while timed.wants_more(slice, start) {
            let stream = self.connection()?;
            self.exit.set(stage);
            let ran = timed.batch(|| {
                for _ in 0..writes {
                    stream.write_all(&self.bytes)?;
                }
                Ok(writes as u64)
            });
            self.exit.set(None);
            ran?;
        }
        Ok(timed)
    }
}
