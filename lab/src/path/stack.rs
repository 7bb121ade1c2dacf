//! A stack whose paths end at an exit point, and sockets over it.
//!
//! The product has no exit points, so its sockets cannot be used here. These make the same calls of the host as
//! `fulmar::UdpSocket` and `fulmar::TcpStream` do, as far as a path needs them, and end where they are told to.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use fulmar::Cidr;
use fulmar::base::{Duration, Instant, Outside, SlotId, Stage};
use fulmar::runtime::{Host, Limit, Request, WatchedShard};
use fulmar_stack::base::Probe as _;
use fulmar_stack::device::Device;
use fulmar_stack::ip::{IfAddr, Route};
use fulmar_stack::shard::{Reserved, StackConfig, TakenDatagram};
use fulmar_stack::socket::sosend::SMALL_WRITE_BYTES;
use fulmar_stack::socket::{Attempt, Least, Ready, SocketError, Step};

use crate::exit::{Exit, ExitPoint};

/// How long a call may wait: none has to.
const PATIENCE: Limit = Limit::For(Duration::from_secs(5));

/// A socket's error as an I/O error.
pub(super) fn errno(e: SocketError) -> io::Error {
    io::Error::from_raw_os_error(e.errno())
}

/// A stack of one shard with exit points.
pub(super) struct Stack {
    host: Arc<Host<Exit>>,
}

impl Stack {
    /// Over `device`, whose interface has this address.
    pub fn new(
        exit: &ExitPoint,
        device: impl Device + 'static,
        address: Cidr,
        routes: Vec<Route>,
    ) -> io::Result<Stack> {
        let addresses = vec![IfAddr { addr: address.address, prefix_len: address.prefix_len }];
        let config = StackConfig { addresses, routes, ..StackConfig::default() };
        let probe = || Exit::new(exit.clone());
        let hosts = fulmar::runtime::start_hosts(&config, vec![Box::new(device)], "path", probe);
        let host = hosts.map_err(io::Error::other)?.pop();
        Ok(Stack { host: host.ok_or(io::ErrorKind::Unsupported)? })
    }

    /// Polls once, for `budget` frames at most; how many came.
    pub fn poll(&self, budget: usize) -> io::Result<usize> {
        self.call(|shard, now| Ok(shard.step(now, budget)))
    }

    /// Runs a step that cannot wait.
    pub fn call<R>(
        &self,
        f: impl FnOnce(&mut WatchedShard<Exit>, Instant) -> Result<R, SocketError>,
    ) -> io::Result<R> {
        self.host.call(f).map_err(errno)
    }

    fn socket(&self, id: SlotId) -> Socket {
        Socket { host: Arc::clone(&self.host), id }
    }
}

impl Drop for Stack {
    fn drop(&mut self) {
        self.host.stop();
    }
}

/// A socket; dropping it closes it.
struct Socket {
    host: Arc<Host<Exit>>,
    id: SlotId,
}

impl Socket {
    /// Whether calls end at a stage outside of the lock.
    #[inline]
    fn ends_at(&self, stage: Stage) -> bool {
        self.host.outside().stage(stage).is_break()
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        self.host.post(Request::Close(self.id));
    }
}

/// A UDP socket.
pub(super) struct UdpSocket(Socket);

impl UdpSocket {
    /// Binds it to a port of the stack's choice.
    pub fn bind(stack: &Stack, address: IpAddr) -> io::Result<UdpSocket> {
        let local = SocketAddr::new(address, 0);
        let id = stack.call(|shard, _| shard.udp().bind(local, Default::default()))?;
        Ok(UdpSocket(stack.socket(id)))
    }

    pub fn connect(&self, to: SocketAddr) -> io::Result<()> {
        self.0.host.call(|shard, _| shard.udp().connect(self.0.id, to)).map_err(errno)
    }

    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        let local = self.0.host.call(|shard, _| shard.addresses(self.0.id)).map_err(errno)?.0;
        local.ok_or_else(|| errno(SocketError::Invalid))
    }

    /// As `fulmar::UdpSocket::send`.
    #[inline]
    pub fn send(&self, bytes: &[u8]) -> io::Result<usize> {
        let s = &self.0;
        if s.ends_at(Stage::SendCall) {
            return Ok(bytes.len());
        }
        let step =
            |shard: &mut WatchedShard<Exit>, now| shard.udp().send_connected(now, s.id, bytes);
        s.host.wait_coarse(s.id, Ready::WRITABLE, || PATIENCE, step).map_err(errno)
    }

    /// As `fulmar::UdpSocket::send_to`.
    #[inline]
    pub fn send_to(&self, bytes: &[u8], to: SocketAddr) -> io::Result<usize> {
        let s = &self.0;
        if s.ends_at(Stage::SendCall) {
            return Ok(bytes.len());
        }
        let step = |shard: &mut WatchedShard<Exit>, now| {
            shard.udp().send_step(now, s.id, &[bytes], Some(to))
        };
        s.host.wait_coarse(s.id, Ready::WRITABLE, || PATIENCE, step).map_err(errno)
    }

    /// As `fulmar::UdpSocket::recv` of a non-blocking socket.
    #[inline]
    pub fn recv(&self, into: &mut [u8]) -> io::Result<usize> {
        let s = &self.0;
        let step = |shard: &mut WatchedShard<Exit>, _| shard.udp().receive_into(s.id, into);
        let taken = s.host.wait_coarse(s.id, Ready::READABLE, || Limit::DoNotWait, step);
        let d = match taken.map_err(errno)? {
            TakenDatagram::Copied(n, _) => return Ok(n),
            TakenDatagram::Whole(d) => d,
        };
        if s.ends_at(Stage::ReceiveTaken) {
            return Ok(0);
        }
        let n = d.payload.copy_to(0, into);
        if !s.ends_at(Stage::ReceiveCopied) {
            s.host.post(Request::Free(d.payload));
        }
        Ok(n)
    }
}

/// A TCP connection; dropping it resets it.
pub(super) struct TcpStream(Socket);

impl TcpStream {
    /// Connects, and sends without Nagle's algorithm.
    pub fn connect(stack: &Stack, to: SocketAddr) -> io::Result<TcpStream> {
        let id = stack.call(|shard, now| shard.tcp_connect(now, to, None))?;
        let stream = TcpStream(stack.socket(id));
        let connected = |shard: &mut WatchedShard<Exit>, _| shard.tcp_connected(id);
        stack.host.wait(id, Ready::WRITABLE, PATIENCE, connected).map_err(errno)?;
        stack.call(|shard, now| {
            shard.with_tcb(now, id, |t| {
                t.tcb.set_nodelay(true);
                t.linger = Some(std::time::Duration::ZERO);
            })
        })?;
        Ok(stream)
    }

    pub fn set_send_buffer(&self, bytes: usize) -> io::Result<usize> {
        let set = |shard: &mut WatchedShard<Exit>, now| {
            shard.with_tcb(now, self.0.id, |t| t.tcb.set_send_buffer(bytes))
        };
        self.0.host.call(set).map_err(errno)
    }

    /// Whether all that was written is acknowledged.
    pub fn is_drained(&self) -> io::Result<bool> {
        self.0.host.call(|shard, _| Ok(shard.is_drained(Some(self.0.id)))).map_err(errno)
    }

    /// Writes all bytes.
    pub fn write_all(&self, bytes: &[u8]) -> io::Result<()> {
        let mut done = 0;
        while let Some(rest) = bytes.get(done..).filter(|rest| !rest.is_empty()) {
            done += self.write(rest).map_err(errno)?;
        }
        Ok(())
    }

    /// As `fulmar::TcpStream::write`.
    fn write(&self, bytes: &[u8]) -> Result<usize, SocketError> {
        let s = &self.0;
        if s.ends_at(Stage::SendCall) {
            return Ok(bytes.len());
        }
        let mut reservation = match self.reserve(bytes)? {
            Reserved::Sent(n) => return Ok(n),
            Reserved::Space(r) => r,
        };
        let n = reservation.len();
        let ends_early = s.ends_at(Stage::SendReserved) || {
            reservation.chain.copy_from(0, bytes);
            s.ends_at(Stage::SendCopied)
        };
        s.host.post(match ends_early {
            true => Request::Abandon(s.id, reservation),
            false => Request::CommitLast(s.id, reservation),
        });
        Ok(n)
    }

    /// Space in the send buffer; what is small is sent at once.
    fn reserve(&self, bytes: &[u8]) -> Result<Reserved, SocketError> {
        if bytes.len() > SMALL_WRITE_BYTES
            && let Some(reserved) = self.reserve_at_once(bytes.len())?
        {
            return Ok(reserved);
        }
        let (s, mut attempt) = (&self.0, Attempt::First);
        s.host.wait(s.id, Ready::WRITABLE, PATIENCE, |shard, now| {
            if let Some(n) = begin(shard, s.id)? {
                return Ok(Step::WaitSpace(n));
            }
            let step = shard.sosend(s.id).reserve(now, bytes, bytes.len(), attempt);
            attempt = Attempt::Retry;
            if !matches!(step, Ok(Step::Done(Reserved::Space(_)))) {
                shard.sosend(s.id).unlock();
            }
            step
        })
    }

    /// Space that is there, without the time. `None`: there is none.
    fn reserve_at_once(&self, bytes: usize) -> Result<Option<Reserved>, SocketError> {
        let (id, mut shard) = (self.0.id, self.0.host.lock()?);
        if begin(&mut shard, id)?.is_some() {
            return Ok(None);
        }
        if shard.probe().stops_at(Stage::Locked) || shard.probe().stops_at(Stage::SendChecked) {
            shard.sosend(id).unlock();
            return Ok(Some(Reserved::Sent(bytes)));
        }
        if let Step::Done(r) = shard.sosend(id).try_reserve(bytes)? {
            return Ok(Some(Reserved::Space(r)));
        }
        shard.sosend(id).unlock();
        Ok(None)
    }

    /// As `fulmar::TcpStream::read` of a non-blocking stream.
    pub fn read(&self, into: &mut [u8]) -> io::Result<usize> {
        let (s, most) = (&self.0, into.len());
        let take =
            |shard: &mut WatchedShard<Exit>, _| shard.tcp_take_more(s.id, most, 0, Least::OneByte);
        let taken = s.host.wait(s.id, Ready::READER, Limit::DoNotWait, take);
        let chain = taken.map_err(errno)?;
        let n = chain.copy_to(0, into);
        if n > 0 && !s.ends_at(Stage::ReceiveCopied) {
            s.host.post(Request::ReadDone(s.id, chain));
        }
        Ok(n)
    }
}

/// Begins a write, if no other is going on; what to wait for if one is.
fn begin(shard: &mut WatchedShard<Exit>, id: SlotId) -> Result<Option<usize>, SocketError> {
    Ok(match shard.tcp_entry(id).and_then(|e| e.lock_send(fulmar::runtime::thread_number()))? {
        Step::Done(()) => None,
        Step::WaitSpace(n) | Step::WaitData(n) => Some(n),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use fulmar::devices;
    use std::time::Instant as StdInstant;

    /// Two stacks with exit points, with a socket each, which have met.
    fn pair() -> ([Stack; 2], [UdpSocket; 2], [ExitPoint; 2]) {
        let exits: [ExitPoint; 2] = Default::default();
        let (p, q) = devices::link_pair().unwrap();
        let address = |n| Cidr { address: IpAddr::from([10, 1, 0, n]), prefix_len: 24 };
        let stack = |n, exit, device| Stack::new(exit, device, address(n), Vec::new()).unwrap();
        let stacks = [stack(1, &exits[0], p), stack(2, &exits[1], q)];
        let socket = |n: usize| UdpSocket::bind(&stacks[n], address(n as u8 + 1).address).unwrap();
        let sockets = [socket(0), socket(1)];
        sockets[0].connect(sockets[1].local_addr().unwrap()).unwrap();
        sockets[0].send(b"first").unwrap();
        assert_eq!(receive(&stacks, &sockets[1]), 5);
        (stacks, sockets, exits)
    }

    /// Polls until a datagram is there.
    fn receive(stacks: &[Stack; 2], socket: &UdpSocket) -> usize {
        let start = StdInstant::now();
        loop {
            stacks.iter().for_each(|s| _ = s.poll(64).unwrap());
            match socket.recv(&mut [0; 64]) {
                Ok(n) => return n,
                Err(e) => assert_eq!(e.kind(), io::ErrorKind::WouldBlock),
            }
            assert!(start.elapsed() < std::time::Duration::from_secs(120), "it never came");
        }
    }

    fn buffers_come_back(stacks: &[Stack; 2]) {
        let out = |s: &Stack| s.call(|shard, _| Ok(shard.stat().pool.mbufs_in_use)).unwrap();
        let start = StdInstant::now();
        while stacks.iter().map(out).sum::<usize>() > 0 {
            assert!(start.elapsed() < std::time::Duration::from_secs(120), "buffers are leaked");
            stacks.iter().for_each(|s| _ = s.poll(64).unwrap());
        }
    }

    #[test]
    fn a_path_that_ends_early_sends_nothing_and_leaks_no_buffer() {
        let (stacks, sockets, exits) = pair();
        let frames = || stacks[0].call(|shard, _| Ok(shard.stat().device.tx_frames)).unwrap();
        let before = frames();
        use Stage as S;
        for stage in [
            S::SendCall,
            S::Locked,
            S::SendChecked,
            S::PathChosen,
            S::SendReserved,
            S::SendCopied,
            S::TransportOutput,
            S::RouteFound,
            S::IpOutput,
            S::EtherOutput,
            S::BurstQueued,
        ] {
            exits[0].set(Some(stage));
            for _ in 0..10 {
                assert_eq!(sockets[0].send(b"18 bytes of payload").unwrap(), 19);
            }
            assert_eq!(frames(), before, "{stage:?}");
        }
        exits[0].set(Some(S::DeviceTaken));
        assert_eq!(sockets[0].send(b"x").unwrap(), 1);
        assert_eq!(frames(), before + 1);
        exits[0].set(None);
        assert_eq!(receive(&stacks, &sockets[1]), 1);
        buffers_come_back(&stacks);
    }

    #[test]
    fn a_frame_that_ends_at_any_stage_on_its_way_up_leaks_no_buffer() {
        let (stacks, sockets, exits) = pair();
        let received = || stacks[1].call(|shard, _| Ok(shard.stat().device.rx_frames)).unwrap();
        use Stage as S;
        for stage in [S::DeviceReceived, S::EtherInput, S::IpInput, S::Demultiplexed] {
            let before = received();
            exits[1].set(Some(stage));
            sockets[0].send(b"lost").unwrap();
            while received() == before {
                stacks[1].poll(64).unwrap();
            }
            assert!(sockets[1].recv(&mut [0; 8]).is_err(), "{stage:?}");
        }
        exits[1].set(None);
        sockets[0].send(b"comes").unwrap();
        assert_eq!(receive(&stacks, &sockets[1]), 5);
        buffers_come_back(&stacks);
    }
}
