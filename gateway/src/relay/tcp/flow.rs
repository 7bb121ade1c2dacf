//! One TCP flow: bytes between a connection of the shard and a socket of the host.
//!
//! Out: a chain leaves the shard's receive queue and goes to the host with one call over its pieces. What the
//! host does not take returns to the queue, so that the window closes to the guest. In: the host's kernel writes
//! into room that was reserved in the send buffer. No byte is copied here, and a flow at rest holds no buffer.
//!
//! Invariants: `readable` and `writable` of a side stay true until a call says otherwise (the epoll set is
//! edge-triggered). A side `is_ended` once the end of its stream was passed on to the other one.

use std::io::{IoSlice, IoSliceMut, Read};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::task::Poll;

use fulmar_stack::base::{Duration, Instant, SlotId, Stage};
use fulmar_stack::mbuf::Chain;
use fulmar_stack::shard::{PendingId, Reserved, TcpEntry};
use fulmar_stack::socket::{Attempt, Reservation};
use fulmar_stack::tcp::Keepalive;
use nix::sys::socket::{MsgFlags, sendmsg};
use smallvec::SmallVec;

use super::super::host_socket::{self, Failure, StreamError};
use super::super::streams::Stream;
use super::super::way::{Grant, NotCarried};
use super::super::{Context, Endpoints};
use super::first_bytes::{FirstBytes, May};
use super::race::Race;
use super::tunnel::Tunnel;
use crate::allowance;
use crate::published::PublishedPort;
use crate::stat::{Direction, Refusal};

/// Bytes that a flow moves in each direction before it is another's turn.
const TURN_BYTES: usize = 256 << 10;
/// Most bytes of one call to the host.
const MOST_CALL_BYTES: usize = 256 << 10;
/// Bytes of one read from the host at least.
const LEAST_READ_BYTES: usize = 4 << 10;
/// Most pieces of memory in one call.
const MOST_PARTS: usize = 64;
/// The longest wait for bytes of a rate: an entry of a flow that has ended is kept no longer.
const MOST_PACE: Duration = Duration::from_secs(1);
/// Keepalive probes of a half-closed connection that the guest does not answer before it ends.
const PROBES: u32 = 8;

/// The guest's end of a flow.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Guest {
    /// Its SYN is not answered yet.
    Pending(PendingId),
    /// The gateway's SYN is not answered yet.
    Opening(SlotId),
    /// A connection.
    Open(SlotId),
}

/// The operations that one end is ready for.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Side {
    pub readable: bool,
    pub writable: bool,
    /// A FIN has arrived (EPOLLRDHUP).
    pub has_hung_up: bool,
    /// Urgent data has come (EPOLLPRI), in front of which a read stops.
    pub has_urgent: bool,
    /// The end of its stream was passed on.
    pub is_ended: bool,
}

/// A flow.
pub(super) struct Flow {
    /// Its number, since it was added.
    pub id: u64,
    pub guest: Guest,
    pub host: TcpStream,
    pub direction: Direction,
    /// The guest's end.
    pub guest_addr: SocketAddr,
    /// The other end as the guest knows it.
    pub peer_addr: SocketAddr,
    /// The other end as the host knows it.
    pub host_addr: SocketAddr,
    /// The name that it leads to.
    pub name: Option<Arc<str>>,
    /// The reader of the guest's bytes, as long as they have to be read.
    pub first_bytes: Option<Box<FirstBytes>>,
    /// Bytes that the reader keeps, as they are counted for all flows together.
    pub kept_bytes: usize,
    /// Other addresses of the name that it leads to, until one has answered.
    pub race: Option<Box<Race>>,
    /// The tunnel through a proxy, while it is opened.
    pub tunnel: Option<Box<Tunnel>>,
    /// Its rule and bounds.
    pub grant: Grant,
    /// When it may move bytes again.
    waits_until: Option<Instant>,
    /// It is among those that wait for bytes of their rate.
    pub is_paced: bool,
    /// The published port that accepted its client.
    pub port: Option<Arc<PublishedPort>>,
    pub guest_side: Side,
    pub host_side: Side,
    /// It is in the queue of flows that may have bytes to move.
    pub is_queued: bool,
    /// The state under which [`Streams`](super::super::streams::Streams) counts its stream from the guest.
    pub counted: Stream,
    /// Whether the next reservation of send buffer follows one that found no space: then it waits for more of it.
    attempt: Attempt,
    /// Bytes of the next read from the host.
    read_bytes: usize,
    pub bytes_out: u64,
    pub bytes_in: u64,
    pub began: Instant,
    pub moved: Instant,
}

/// How a turn ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Turn {
    /// Nothing is left to do now.
    Idle,
    /// There is more: another turn.
    More,
    /// There is more, for which the host's kernel has no memory now.
    Starved,
    /// Both streams have ended.
    Over,
    /// The guest has reset its connection, or it failed.
    GuestFailed,
    /// The host has reset its connection, or it failed.
    HostFailed,
    /// The guest's first bytes are refused.
    Contradicted,
    /// All bytes of its rule are used.
    OverLimit,
    /// New rules deny it.
    Denied,
}

/// The result of one call that moves bytes.
enum Moved {
    Bytes(usize),
    Nothing,
    /// The direction ends its turn like this.
    Stopped(Turn),
}

impl Flow {
    pub(super) fn new(
        guest: Guest,
        host: TcpStream,
        direction: Direction,
        Endpoints { guest: guest_addr, peer: peer_addr, host: host_addr }: Endpoints,
        now: Instant,
    ) -> Flow {
        Flow {
            id: 0,
            guest,
            host,
            direction,
            guest_addr,
            peer_addr,
            host_addr,
            name: None,
            first_bytes: None,
            kept_bytes: 0,
            race: None,
            tunnel: None,
            grant: Grant::default(),
            waits_until: None,
            is_paced: false,
            port: None,
            guest_side: Side::default(),
            host_side: Side::default(),
            is_queued: false,
            counted: Stream::default(),
            attempt: Attempt::First,
            read_bytes: 4 * LEAST_READ_BYTES,
            bytes_out: 0,
            bytes_in: 0,
            began: now,
            moved: now,
        }
    }

    /// Why it is not carried on.
    pub(super) fn not_carried(&self, why: (Failure, Refusal)) -> NotCarried {
        NotCarried::from(why).by(&self.grant)
    }

    /// The socket of the shard, if there is one.
    pub(super) fn socket(&self) -> Option<SlotId> {
        match self.guest {
            Guest::Pending(_) => None,
            Guest::Opening(socket) | Guest::Open(socket) => Some(socket),
        }
    }

    /// Its state in a word.
    pub(super) fn state(&self) -> &'static str {
        match (self.guest, self.guest_side.is_ended || self.host_side.is_ended) {
            (Guest::Pending(_) | Guest::Opening(_), _) => "connecting",
            (Guest::Open(_), false) => "open",
            (Guest::Open(_), true) => "half-closed",
        }
    }

    /// The state of its stream from the guest. While the host has no space (EPOLLOUT is awaited) bytes are held.
    pub(super) fn stream(&self) -> Stream {
        match self.guest {
            Guest::Open(_) if self.guest_side.is_ended => Stream::Ended,
            Guest::Open(_) if self.guest_side.readable && !self.host_side.writable => Stream::Held,
            Guest::Open(_) => Stream::Open,
            Guest::Pending(_) | Guest::Opening(_) => Stream::Ended,
        }
    }

    /// Moves the bytes that can be moved, up to a bound.
    pub(super) fn turn(&mut self, cx: &mut Context<'_>) -> Turn {
        let Guest::Open(socket) = self.guest else { return Turn::Idle };
        let out = self.run(cx, socket, Flow::move_out);
        if !matches!(out, Turn::Idle | Turn::More | Turn::Starved) {
            return out;
        }
        let may_pass = self.guest_side.readable;
        match (self.run(cx, socket, Flow::move_in), out) {
            // The host's answer has decided about bytes that are held.
            (Turn::Idle, Turn::Idle) if self.guest_side.readable != may_pass => Turn::More,
            (Turn::Idle, Turn::Idle) if self.guest_side.is_ended && self.host_side.is_ended => {
                Turn::Over
            }
            (Turn::Idle | Turn::Starved, Turn::More) => Turn::More,
            (Turn::Idle, out) => out,
            (back, _) => back,
        }
    }

    fn run(
        &mut self,
        cx: &mut Context<'_>,
        socket: SlotId,
        step: fn(&mut Flow, &mut Context<'_>, SlotId) -> Moved,
    ) -> Turn {
        let mut bytes = 0;
        while bytes < TURN_BYTES {
            match step(self, cx, socket) {
                Moved::Bytes(n) => bytes += n,
                Moved::Nothing => return Turn::Idle,
                Moved::Stopped(turn) => return turn,
            }
        }
        Turn::More
    }

    /// One piece from the guest to the host.
    fn move_out(&mut self, cx: &mut Context<'_>, socket: SlotId) -> Moved {
        if !self.guest_side.readable || !self.host_side.writable || self.guest_side.is_ended {
            return Moved::Nothing;
        }
        let most = match self.may_pass(cx, socket) {
            Ok(0) => {
                self.guest_side.readable = false;
                return Moved::Nothing;
            }
            Ok(bytes) => bytes,
            Err(turn) => return Moved::Stopped(turn),
        };
        let most = match self.budget(cx.now, most) {
            Ok(0) => return Moved::Nothing,
            Ok(bytes) => bytes,
            // The end of the stream passes all the same.
            Err(_) if is_empty(cx, socket) => 1,
            Err(turn) => return Moved::Stopped(turn),
        };
        match cx.stack.tcp_take(socket, most) {
            Ok(Poll::Ready(chain)) if chain.is_empty() => {
                cx.stack.free(chain);
                self.guest_side.is_ended = true;
                // Where both streams have ended, the socket is closed next, which sends the same FIN.
                if !self.host_side.is_ended {
                    // The host's end may be gone; then the next call there says so.
                    let _ = self.host.shutdown(Shutdown::Write);
                    // A guest's kernel that has forgotten the connection answers a probe by a reset.
                    let idle = cx.settings.limits.half_closed_idle;
                    let probes = Keepalive { idle, interval: idle / 4, count: PROBES };
                    let probed = |entry: &mut TcpEntry| entry.tcb.set_keepalive(Some(probes));
                    let _ = cx.stack.with_tcb(cx.now, socket, probed);
                }
                Moved::Nothing
            }
            Ok(Poll::Ready(chain)) => self.send(cx, socket, chain),
            Ok(_) => {
                self.guest_side.readable = false;
                Moved::Nothing
            }
            Err(_) => Moved::Stopped(Turn::GuestFailed),
        }
    }

    /// How many of `wanted` bytes its bounds let move now; with none it waits.
    fn budget(&mut self, now: Instant, wanted: usize) -> Result<usize, Turn> {
        match self.grant.permit.as_ref().map(|permit| permit.may_move(now, wanted)) {
            None => Ok(wanted),
            Some(allowance::May::Move(bytes)) => Ok(bytes),
            Some(allowance::May::Wait(at)) => {
                self.waits_until = Some(self.waits_until.map_or(at, |other| other.min(at)));
                Ok(0)
            }
            Some(allowance::May::Over) => Err(Turn::OverLimit),
        }
    }

    fn count_moved(&self, bytes: usize) {
        if let Some(permit) = &self.grant.permit {
            permit.moved(bytes);
        }
    }

    /// Until when the flow waits for bytes of its rate, unless that is known already.
    pub(super) fn pace(&mut self, now: Instant) -> Option<Instant> {
        let at = self.waits_until.take().filter(|_| !self.is_paced)?;
        self.is_paced = true;
        Some(at.min(now + MOST_PACE))
    }

    /// How many bytes may be taken at most; at the end of the stream at least one.
    fn may_pass(&mut self, cx: &mut Context<'_>, socket: SlotId) -> Result<usize, Turn> {
        let Some(first) = &mut self.first_bytes else { return Ok(MOST_CALL_BYTES) };
        match first.read(cx, socket, self.bytes_out) {
            May::Pass(bytes) => {
                if first.is_over() {
                    self.first_bytes = None;
                }
                Ok(bytes.clamp(1, MOST_CALL_BYTES as u64) as usize)
            }
            May::Wait => Ok(0),
            May::Refused => Err(Turn::Contradicted),
            May::Failed => Err(Turn::GuestFailed),
        }
    }

    fn send(&mut self, cx: &mut Context<'_>, socket: SlotId, mut chain: Chain) -> Moved {
        let sent = send_chain(&self.host, &chain);
        cx.stack.pass(Stage::HostSent);
        match sent {
            Ok((sent, offered)) => {
                self.bytes_out += sent as u64;
                self.count_moved(sent);
                cx.totals.bytes_out += sent as u64;
                self.moved = cx.now;
                self.host_side.writable = sent == offered;
                if sent < chain.len() {
                    chain.trim_front(sent, cx.stack.pool());
                    self.unread(cx, socket, std::mem::take(&mut chain));
                }
                cx.stack.tcp_read_done(cx.now, socket, chain);
                Moved::Bytes(sent)
            }
            Err(errno) => {
                let error = host_socket::stream_error_of(errno);
                self.host_side.writable &= error != StreamError::NotReady;
                match error {
                    StreamError::Over => cx.stack.free(chain),
                    _ => self.unread(cx, socket, chain),
                }
                moved_after(error)
            }
        }
    }

    /// Bytes that the host did not take return to the queue, so that the guest's window counts them.
    fn unread(&mut self, cx: &mut Context<'_>, socket: SlotId, chain: Chain) {
        match cx.stack.tcp_entry(socket) {
            Ok(entry) => entry.tcb.recv_queue().unread(chain),
            Err(_) => cx.stack.free(chain),
        }
    }

    /// One piece from the host to the guest.
    fn move_in(&mut self, cx: &mut Context<'_>, socket: SlotId) -> Moved {
        if !self.host_side.readable || !self.guest_side.writable || self.host_side.is_ended {
            return Moved::Nothing;
        }
        let most = match self.budget(cx.now, self.read_bytes) {
            Ok(0) => return Moved::Nothing,
            Ok(bytes) => bytes,
            Err(turn) => return self.end_at_limit(cx, socket, turn),
        };
        match cx.stack.sosend(socket).reserve(cx.now, &[], most, self.attempt) {
            Ok(Poll::Ready(Reserved::Space(room))) => {
                self.attempt = Attempt::First;
                self.receive(cx, socket, room)
            }
            Ok(_) => {
                self.attempt = Attempt::Retry;
                self.guest_side.writable = false;
                Moved::Nothing
            }
            Err(_) => Moved::Stopped(Turn::GuestFailed),
        }
    }

    fn receive(&mut self, cx: &mut Context<'_>, socket: SlotId, mut room: Reservation) -> Moved {
        let asked = room.len();
        let received = {
            let mut parts: SmallVec<[IoSliceMut<'_>; 8]> =
                room.chain.slices_mut().map(IoSliceMut::new).collect();
            (&self.host).read_vectored(&mut parts)
        };
        cx.stack.pass(Stage::HostReceived);
        match received {
            Ok(0) => {
                cx.stack.sosend(socket).abandon(cx.now, room);
                self.end_in(cx, socket);
                Moved::Nothing
            }
            Ok(n) => {
                // Where a FIN has arrived, the last bytes and the FIN leave as one segment. After a FIN `recv` returns
                // no error, so that the peek clears none.
                let is_last = n < asked
                    && self.host_side.has_hung_up
                    && matches!(self.host.peek(&mut [0]), Ok(0));
                room.keep(n);
                if let Some(first) = &mut self.first_bytes {
                    self.guest_side.readable |= first.answered(&room.chain);
                }
                room.more = is_last;
                cx.stack.sosend(socket).commit(cx.now, room);
                self.bytes_in += n as u64;
                self.count_moved(n);
                cx.totals.bytes_in += n as u64;
                self.moved = cx.now;
                self.adapt_read_bytes(asked, n);
                if is_last {
                    self.end_in(cx, socket);
                }
                // A short read has emptied the socket, unless the end or urgent data is what comes next.
                let Side { has_hung_up, has_urgent, .. } = self.host_side;
                self.host_side.readable = n == asked || has_hung_up || has_urgent;
                Moved::Bytes(n)
            }
            Err(e) => {
                cx.stack.sosend(socket).abandon(cx.now, room);
                let error = host_socket::stream_error_of(host_socket::errno_of(&e));
                if error == StreamError::NotReady {
                    self.host_side.readable = false;
                    self.host_side.has_urgent = false;
                }
                moved_after(error)
            }
        }
    }

    /// All bytes of its rule are used: the end of the host's stream passes all the same.
    fn end_at_limit(&mut self, cx: &mut Context<'_>, socket: SlotId, turn: Turn) -> Moved {
        match self.host.peek(&mut [0]) {
            Ok(0) => self.end_in(cx, socket),
            Ok(_) => return Moved::Stopped(turn),
            Err(e) => match host_socket::stream_error_of(host_socket::errno_of(&e)) {
                StreamError::NotReady => self.host_side.readable = false,
                error => return moved_after(error),
            },
        }
        Moved::Nothing
    }

    /// The host's stream has ended.
    fn end_in(&mut self, cx: &mut Context<'_>, socket: SlotId) {
        self.host_side.is_ended = true;
        // A guest whose connection is over is found by the next call.
        let _ = cx.stack.tcp_shutdown(cx.now, socket, fulmar_stack::socket::Shutdown::Write);
    }

    /// Larger reads after a full one, smaller ones after one that was nearly empty.
    fn adapt_read_bytes(&mut self, asked: usize, came: usize) {
        if came == asked && asked >= self.read_bytes {
            self.read_bytes = (self.read_bytes * 4).min(MOST_CALL_BYTES);
        } else if came < asked / 8 {
            self.read_bytes = (self.read_bytes / 2).max(LEAST_READ_BYTES);
        }
    }
}

/// Whether the guest has sent nothing that was not taken.
fn is_empty(cx: &mut Context<'_>, socket: SlotId) -> bool {
    cx.stack.tcp_entry(socket).is_ok_and(|entry| entry.tcb.recv_queue().readable() == 0)
}

/// The result of a call that failed.
fn moved_after(error: StreamError) -> Moved {
    match error {
        StreamError::NotReady => Moved::Nothing,
        StreamError::Interrupted => Moved::Bytes(0),
        StreamError::Shortage => Moved::Stopped(Turn::Starved),
        StreamError::Over => Moved::Stopped(Turn::HostFailed),
    }
}

/// Offers the pieces of a chain to the host: bytes taken, and bytes offered.
fn send_chain(host: &TcpStream, chain: &Chain) -> nix::Result<(usize, usize)> {
    let mut parts: SmallVec<[IoSlice<'_>; MOST_PARTS]> = SmallVec::new();
    let mut offered = 0;
    for slice in chain.slices().filter(|s| !s.is_empty()).take(MOST_PARTS) {
        offered += slice.len();
        parts.push(IoSlice::new(slice));
    }
    let flags = MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT;
    let sent = sendmsg::<()>(host.as_raw_fd(), &parts, &[], flags, None)?;
    Ok((sent, offered))
}
