//! Paths that lead in: datagrams and segments that a modelled peer sends over a simulated device.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use fulmar::base::{Counter, Stage};
use fulmar_nic::{Command, FarEnd, Service, SimConfig, SimHandle};

use super::Options;
use super::measured::{Driven, Timed};
use super::send::{ADDRESS, FAR, NEAR};
use super::stack::{Stack, TcpStream, UdpSocket};
use crate::exit::ExitPoint;

/// Datagrams of a batch: fewer than buffers are posted.
const BATCH: u64 = 64;
/// Looks at the device in vain before the rest of a batch is taken for lost.
const LOOKS: usize = 10_000;
/// The port where the peer sends (RFC 864), though not without end.
const CHARGEN: u16 = 19;

/// Frames that the stack has ever taken off its device, whichever thread polled.
fn received(stack: &Stack) -> io::Result<u64> {
    stack.call(|shard, _| Ok(shard.counters().value(Counter::RxFrames)))
}

/// A stack whose device hands every packet over by itself.
fn stack(exit: &ExitPoint, far_end: FarEnd) -> io::Result<(Stack, SimHandle)> {
    let config = SimConfig { lro: None, far_end, ..SimConfig::default() };
    let (device, handle) = fulmar_nic::open(config).map_err(io::Error::other)?;
    Ok((Stack::new(exit, device, ADDRESS, Vec::new())?, handle))
}

/// Whether a path ends before anything waits for a reader.
fn ends_before_reading(stage: Option<Stage>) -> bool {
    stage.is_some_and(|s| (s as u8) < Stage::ReceiveTaken as u8)
}

/// Datagrams of a modelled peer.
pub(super) struct Datagrams {
    stack: Stack,
    handle: SimHandle,
    socket: UdpSocket,
    exit: ExitPoint,
    bytes: usize,
}

impl Datagrams {
    pub fn new(options: &Options) -> io::Result<Datagrams> {
        let exit = ExitPoint::default();
        let (stack, handle) = stack(&exit, FarEnd::default())?;
        let socket = UdpSocket::bind(&stack, IpAddr::V4(NEAR))?;
        Ok(Datagrams { stack, handle, socket, exit, bytes: options.bytes.min(1472) })
    }

    /// The peer's datagrams of one batch, to be taken by the next polls.
    fn ask(&self) -> io::Result<()> {
        let (from, to) = (SocketAddr::new(FAR.ip(), 7), self.socket.local_addr()?);
        let what = Command::Datagrams { from, to, bytes: self.bytes, count: BATCH };
        self.handle.ask(what).map_err(io::Error::other)
    }

    /// Takes a batch off the device, before which the stack had taken `before` frames; how many of
    /// it this thread took. Where this thread did not run for a while, the service thread stands in
    /// for it and takes the others, and the device may have had no room for all of them.
    fn take(&self, before: u64) -> io::Result<u64> {
        let mut taken = 0;
        for _ in 0..LOOKS {
            taken += self.stack.poll(BATCH as usize)? as u64;
            if taken >= BATCH || received(&self.stack)? - before >= BATCH {
                return Ok(taken);
            }
        }
        Ok(taken)
    }

    fn read_all(&self) -> io::Result<()> {
        let mut room = [0; 2048];
        for _ in 0..BATCH {
            match self.socket.recv(&mut room) {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                other => drop(other?),
            }
        }
        Ok(())
    }
}

impl Driven for Datagrams {
    fn run(&mut self, stage: Option<Stage>, slice: Duration) -> io::Result<Timed> {
        let (mut timed, mut shared, start) = (Timed::default(), 0, Instant::now());
        while timed.wants_more(slice, start) {
            let (whole, before) = (timed, received(&self.stack)?);
            self.ask()?;
            self.exit.set(stage);
            let ran = timed.batch(|| {
                let taken = self.take(before)?;
                if !ends_before_reading(stage) {
                    self.read_all()?;
                }
                Ok(taken)
            });
            self.exit.set(None);
            ran?;
            self.read_all()?;
            // Of what another thread took this one has paid for a part only: no figure.
            shared = if timed.packets - whole.packets < BATCH { shared + 1 } else { 0 };
            if shared > 1000 {
                let why = "the modelled peer sends no datagrams, or another thread takes them";
                return Err(io::Error::new(io::ErrorKind::TimedOut, why));
            }
            if shared > 0 {
                timed = whole;
            }
        }
        Ok(timed)
    }
}

/// What a modelled peer sends at once on each connection; a new connection for each batch.
pub(super) struct Segments {
    stack: Stack,
    exit: ExitPoint,
    room: Vec<u8>,
}

/// Segments of a batch, which go into the first window.
const FRAMES: u64 = 24;
/// Bytes of a segment: with headers and timestamps it fills a packet of 1500.
pub(super) const SEGMENT_BYTES: u64 = 1448;
/// Looks at the device before what has not come is taken for lost. What is dropped early is not sent
/// again so soon: the peer falls silent then.
const SEGMENT_LOOKS: usize = 8;

impl Segments {
    pub fn new(_: &Options) -> io::Result<Segments> {
        let exit = ExitPoint::default();
        let services =
            vec![(CHARGEN..=CHARGEN, Service::Generate { bytes: FRAMES * SEGMENT_BYTES })];
        let far_end = FarEnd { services, ..FarEnd::default() };
        let stack = stack(&exit, far_end)?.0;
        Ok(Segments { stack, exit, room: vec![0; 64 << 10] })
    }

    /// A connection and the batch that comes over it; how many segments this thread took, if no other
    /// thread took some of them: of such a batch it has paid for a part only.
    fn batch(&mut self, stage: Option<Stage>, timed: &mut Timed) -> io::Result<Option<u64>> {
        let stream = TcpStream::connect(&self.stack, SocketAddr::new(FAR.ip(), CHARGEN))?;
        let before = received(&self.stack)?;
        self.exit.set(stage);
        let mut taken = 0;
        let ran = timed.batch(|| {
            for _ in 0..SEGMENT_LOOKS {
                taken += self.stack.poll(FRAMES as usize)? as u64;
                if taken >= FRAMES {
                    break;
                }
            }
            if !ends_before_reading(stage) {
                match stream.read(&mut self.room) {
                    Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                    other => drop(other?),
                }
            }
            Ok(taken)
        });
        self.exit.set(None);
        ran?;
        let all = received(&self.stack)? - before;
        Ok((taken > 0 && all == taken).then_some(taken))
    }
}

impl Driven for Segments {
    fn run(&mut self, stage: Option<Stage>, slice: Duration) -> io::Result<Timed> {
        let (mut timed, mut lost, start) = (Timed::default(), 0, Instant::now());
        while timed.wants_more(slice, start) {
            let mut with_batch = timed;
            if self.batch(stage, &mut with_batch)?.is_some() {
                (timed, lost) = (with_batch, 0);
            } else {
                lost += 1;
            }
            if lost > 1000 {
                let why = "the modelled peer is silent, or another thread takes what it sends";
                return Err(io::Error::new(io::ErrorKind::TimedOut, why));
            }
        }
        Ok(timed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_ends_although_another_thread_took_some_of_it() {
        let datagrams = Datagrams::new(&Options::default()).unwrap();
        let before = received(&datagrams.stack).unwrap();
        datagrams.ask().unwrap();
        // As the service thread does when the caller has not run for a while.
        let others = datagrams.stack.poll(10).unwrap() as u64;
        assert!(datagrams.take(before).unwrap() <= BATCH - others);
        assert_eq!(received(&datagrams.stack).unwrap() - before, BATCH);
    }
}
