//! State of a shard per socket.

use alloc::boxed::Box;
use alloc::collections::VecDeque;
use core::net::{IpAddr, SocketAddr};
use core::task::Poll;

use crate::base::{Duration, MtuDiscovery, SlotId};
use crate::mbuf::{Chain, FairShare};
use crate::socket::{Least, Ready, SocketError};
use crate::tcp::Tcb;
use crate::udp::UdpSocket;

use crate::shard::conn::posted::RecvEntry;
use crate::shard::conn::socket_options::{ECN_MASK, HeaderOptions, SocketOptions};
use crate::shard::fast_open::queue::{FastOpenOptions, FastOpenQueue};
use crate::shard::icmp::echo::queue::EchoListener;
use crate::shard::link::net::FlowPath;
use crate::shard::link::templates::UdpTemplate;
use crate::shard::listen::pending::PendingQueue;
use crate::shard::listen::sources::SourceUse;
use crate::shard::listen::syn_queue::{ListenerStat, SynQueue};
use crate::shard::outcome::Watched;
use crate::shard::slab::Slab;
use crate::shard::wheel::TimerId;

/// One slot of the socket table. The large ones are boxed, so that the table stays dense.
pub enum Socket {
    /// A connection.
    Tcp(Box<TcpEntry>),
    /// A listener.
    Listener(Box<Listener>),
    /// A datagram socket.
    Udp(Box<UdpEntry>),
    /// A ping socket: sends echo requests and receives their replies (Linux: a datagram socket of `IPPROTO_ICMP`).
    Ping(Box<PingEntry>),
    /// Receives echo requests to addresses of other hosts.
    EchoListener(Box<EchoListener>),
}

impl Socket {
    /// The watch of the socket.
    pub fn watch(&mut self) -> &mut Watched {
        match self {
            Socket::Tcp(s) => &mut s.watch,
            Socket::Listener(s) => &mut s.watch,
            Socket::Udp(s) => &mut s.watch,
            Socket::Ping(s) => &mut s.watch,
            Socket::EchoListener(s) => &mut s.watch,
        }
    }

    /// Whether it waits for memory or for the device, if it can.
    pub fn blocked(&mut self) -> Option<&mut SendBlocked> {
        match self {
            Socket::Tcp(s) => Some(&mut s.blocked),
            Socket::Udp(s) => Some(&mut s.blocked),
            Socket::Listener(_) | Socket::Ping(_) | Socket::EchoListener(_) => None,
        }
    }

    /// Readiness.
    pub fn ready(&self) -> Ready {
        match self {
            Socket::Tcp(s) => s.ready(),
            Socket::Listener(l) if l.has_connection() => Ready::READABLE,
            Socket::Listener(_) => Ready::NONE,
            Socket::Udp(s) => s.ready(),
            Socket::EchoListener(s) if s.is_empty() => Ready::NONE,
            Socket::EchoListener(_) => Ready::READABLE,
            Socket::Ping(s) if s.replies.is_empty() => Ready::NONE,
            Socket::Ping(_) => Ready::READABLE,
        }
    }
}

/// Look-ups by kind.
impl Slab<Socket> {
    /// A connection.
    pub fn tcp(&mut self, id: SlotId) -> Result<&mut TcpEntry, SocketError> {
        match self.get_mut(id) {
            Some(Socket::Tcp(s)) => Ok(s),
            Some(_) => Err(SocketError::NotSupported),
            None => Err(SocketError::BadHandle),
        }
    }

    /// A listener.
    pub fn listener(&mut self, id: SlotId) -> Result<&mut Listener, SocketError> {
        match self.get_mut(id) {
            Some(Socket::Listener(s)) => Ok(s),
            Some(_) => Err(SocketError::Invalid),
            None => Err(SocketError::BadHandle),
        }
    }

    /// What connections of a listener inherit; the default if it is gone.
    pub fn options_of_listener(&self, id: SlotId) -> SocketOptions {
        match self.get(id) {
            Some(Socket::Listener(l)) => l.options,
            _ => SocketOptions::default(),
        }
    }

    /// A datagram socket.
    pub fn udp(&mut self, id: SlotId) -> Result<&mut UdpEntry, SocketError> {
        match self.get_mut(id) {
            Some(Socket::Udp(s)) => Ok(s),
            Some(_) => Err(SocketError::NotSupported),
            None => Err(SocketError::BadHandle),
        }
    }

    /// Whether a connection is in the SYN queue of its listener.
    #[inline]
    pub fn is_embryo(&self, id: SlotId) -> bool {
        matches!(self.get(id), Some(Socket::Tcp(entry)) if entry.is_embryo)
    }
}

/// Why a socket is not writable although its buffer has space, and in which queues it is.
#[derive(Clone, Copy, Debug, Default)]
pub struct SendBlocked {
    /// It waits for memory or for the device.
    pub is_blocked: bool,
    /// In the queue of writers that wait for memory.
    pub for_memory: bool,
    /// In the queue of writers whose peers acknowledge nothing.
    pub stalled: bool,
    /// In the list of sockets to retry.
    pub for_retry: bool,
}

/// A connection: the state of the engine, and the shard's own state.
pub struct TcpEntry {
    /// The engine.
    pub tcb: Tcb,
    /// Where its packets go; refreshed when the IP layer's generation moves.
    pub path: FlowPath,
    /// Time to live of its packets; `None`: as configured.
    pub ttl: Option<u8>,
    /// TOS (traffic class) of its packets, without the ECN field.
    tos: u8,
    /// The listener that it came from, until it is accepted.
    pub parent: Option<SlotId>,
    /// The listener whose program accepted it before its SYN was answered, until its handshake is over.
    pub decided_by: Option<SlotId>,
    /// It is in the SYN queue of its listener: not yet established.
    pub is_embryo: bool,
    /// An embryo whose peer has acknowledged the SYN,ACK at a full accept queue.
    pub is_acked: bool,
    /// Fast Open: the listener that accepted it with the data of its SYN, until its handshake is complete.
    pub early: Option<SlotId>,
    /// Its class in the limit of its source address, if there is one.
    pub counts_as: Option<SourceUse>,
    /// The application still holds it.
    pub is_open: bool,
    /// Unsent data at `close`: `None` sends it in the background; zero resets.
    pub linger: Option<Duration>,
    /// Its place in the wheel.
    pub timer: Option<TimerId>,
    /// It is in the shard's output queue.
    pub is_queued: bool,
    /// Whether it waits for memory: see `send_wait.rs` and `retries.rs`.
    pub blocked: SendBlocked,
    /// The application closed it, and it is counted as an orphan.
    pub is_orphan: bool,
    /// The thread whose write is under way, 0 if none: writes are whole, one after the other.
    pub writer: u64,
    /// An error of the stack (device gone) that the engine does not know.
    pub error: Option<SocketError>,
    /// Buffers that its user posted, if it ever did.
    pub posted: Option<Box<RecvEntry>>,
    /// The watch of the socket.
    pub watch: Watched,
}

impl TcpEntry {
    /// An entry that is in no table yet.
    pub(crate) fn new(tcb: Tcb, path: FlowPath) -> TcpEntry {
        TcpEntry {
            tcb,
            path,
            ttl: None,
            tos: 0,
            parent: None,
            decided_by: None,
            is_embryo: false,
            is_acked: false,
            early: None,
            counts_as: None,
            is_open: false,
            linger: None,
            timer: None,
            is_queued: false,
            blocked: SendBlocked::default(),
            is_orphan: false,
            writer: 0,
            error: None,
            posted: None,
            watch: Default::default(),
        }
    }

    /// Sets the options of a new connection.
    pub fn set_options(&mut self, options: &SocketOptions) {
        let configured = self.options();
        self.change_options(&SocketOptions {
            nodelay: options.nodelay || configured.nodelay,
            max_pacing_rate: options.max_pacing_rate.or(configured.max_pacing_rate),
            ..*options
        });
    }

    /// Changes the options of a connection. To set what is in effect already has no effect.
    pub fn change_options(&mut self, options: &SocketOptions) {
        let before = self.options();
        self.ttl = options.ttl;
        self.set_tos(options.tos);
        let tcb = &mut self.tcb;
        if options.keepalive != before.keepalive {
            tcb.set_keepalive(options.keepalive);
        }
        if options.user_timeout != before.user_timeout {
            tcb.set_user_timeout(options.user_timeout);
        }
        if options.nodelay != before.nodelay {
            tcb.set_nodelay(options.nodelay);
        }
        if options.cork != before.cork {
            tcb.set_cork(options.cork);
        }
        if options.max_segment != before.max_segment {
            tcb.set_max_segment(options.max_segment);
        }
        if options.max_pacing_rate != before.max_pacing_rate {
            tcb.set_max_pacing_rate(options.max_pacing_rate);
        }
        tcb.set_notsent_low_water(options.notsent_low_water);
        options.quickack.into_iter().for_each(|on| tcb.set_quickack(on));
        options.ecn.into_iter().for_each(|policy| tcb.set_ecn(policy));
        let congestion = options.congestion.filter(|_| options.congestion != before.congestion);
        congestion.into_iter().for_each(|which| tcb.set_congestion(which));
        let probing = options.mtu_probing.filter(|_| options.mtu_probing != before.mtu_probing);
        probing.into_iter().for_each(|mode| tcb.set_mtu_probing(mode));
        let low =
            options.recv_low_water.filter(|_| options.recv_low_water != before.recv_low_water);
        low.into_iter().for_each(|bytes| tcb.set_recv_low_water(bytes));
        if let Some(bytes) = options.send_buffer {
            tcb.set_send_buffer(bytes);
        }
        if let Some(bytes) = options.recv_buffer {
            tcb.set_recv_buffer(bytes);
        }
    }

    /// The options in effect. Of buffers that are tuned, and of quick acknowledgements, which pass, there is no value.
    pub fn options(&self) -> SocketOptions {
        let tcb = &self.tcb;
        SocketOptions {
            nodelay: tcb.nodelay(),
            cork: tcb.cork(),
            quickack: None,
            congestion: Some(tcb.congestion()),
            ecn: Some(tcb.ecn_policy()),
            mtu_probing: Some(tcb.mtu_probing()),
            max_pacing_rate: tcb.max_pacing_rate(),
            keepalive: tcb.keepalive(),
            user_timeout: tcb.user_timeout(),
            ttl: self.ttl,
            tos: self.tos,
            max_segment: tcb.max_segment(),
            notsent_low_water: tcb.notsent_low_water(),
            recv_low_water: Some(tcb.recv_low_water()),
            send_buffer: tcb.send_buffer_as_set(),
            recv_buffer: tcb.recv_buffer_as_set(),
        }
    }

    /// IP_TOS and IPV6_TCLASS: the DSCP in the upper six bits. The lower two are the connection's ECN field, and not
    /// the user's, as on Linux.
    pub fn set_tos(&mut self, tos: u8) {
        self.tos = tos & !ECN_MASK;
    }

    /// The TOS (traffic class) as set, without the ECN field.
    pub fn tos(&self) -> u8 {
        self.tos
    }

    /// The socket options that set fields of its packets' headers.
    #[inline]
    pub(crate) fn header_options(&self) -> HeaderOptions {
        HeaderOptions { ttl: self.ttl, dscp_ecn: self.tos, mtu_discovery: MtuDiscovery::On }
    }

    /// Bytes for which a read of `max` waits.
    pub(crate) fn least(&self, max: usize, least: Least) -> usize {
        match least {
            Least::LowWater if self.error.is_none() => self.tcb.recv_low_water().min(max),
            Least::LowWater | Least::OneByte => 1,
        }
    }

    /// Locks the send side for a whole call (BSD: `sblock`). `writer` identifies the thread and is not 0. Wait
    /// for `WRITABLE` and repeat; unlock with [`SendCalls::unlock`](crate::shard::SendCalls::unlock).
    ///
    /// # Errors
    /// [`SocketError::WouldBlock`]: this thread holds the lock, and a signal handler interrupted it.
    pub fn lock_send(&mut self, writer: u64) -> Result<Poll<()>, SocketError> {
        if self.writer == writer {
            return Err(SocketError::WouldBlock);
        }
        if self.writer != 0 {
            return Ok(Poll::Pending);
        }
        self.writer = writer;
        Ok(Poll::Ready(()))
    }

    /// Whether a write would fail now, without clearing the error: a call that has accepted bytes leaves the
    /// error to the next.
    pub fn write_fails(&self) -> bool {
        self.error.is_some() || self.tcb.send_error().is_some()
    }

    /// Whether posted buffers wait: reads queue after them.
    #[inline]
    pub fn has_posted(&self) -> bool {
        self.posted.as_ref().is_some_and(|p| p.is_waiting())
    }

    /// Readiness. Reads queue behind posted buffers, so while some wait the socket is readable when
    /// a completion waits to be claimed.
    pub fn ready(&self) -> Ready {
        let mut ready = crate::socket::stream_ready(&self.tcb);
        if let Some(posted) = &self.posted {
            if posted.is_waiting() {
                ready = ready.without(Ready::READABLE);
            }
            if posted.has_unclaimed() {
                ready |= Ready::READABLE;
            }
        }
        if self.blocked.is_blocked && self.tcb.can_send() {
            ready = ready.without(Ready::WRITABLE);
        }
        if self.error.is_some() {
            ready |= Ready::ERROR | Ready::READABLE | Ready::WRITABLE;
        }
        ready
    }
}

/// A listening socket.
pub struct Listener {
    /// Where it listens; the address may be unspecified, and the port 0: every port.
    pub(crate) local: SocketAddr,
    /// Takes IPv4 too, although bound to `::`.
    pub(crate) dual_stack: bool,
    /// Connections at most that wait in `accept`.
    pub(crate) backlog: usize,
    /// Those that are not yet established.
    pub(crate) syn_queue: SynQueue,
    /// Established ones, oldest first.
    pub(crate) accept: VecDeque<SlotId>,
    /// Those that the program has to decide about, if it wants that.
    pub(crate) pending: Option<Box<PendingQueue>>,
    /// Options of its connections.
    pub options: SocketOptions,
    /// Fast Open, if its connections may use it.
    pub(crate) fast_open: Option<Box<FastOpenQueue>>,
    /// The watch of the socket.
    pub(crate) watch: Watched,
}

impl Listener {
    /// Whether a connection to `local` is for it.
    pub fn matches(&self, local: IpAddr) -> bool {
        match (self.local.ip(), local) {
            (mine, to) if mine == to => true,
            (IpAddr::V4(mine), IpAddr::V4(_)) => mine.is_unspecified(),
            (IpAddr::V6(mine), IpAddr::V6(_)) => mine.is_unspecified(),
            (IpAddr::V6(mine), IpAddr::V4(_)) => mine.is_unspecified() && self.dual_stack,
            (IpAddr::V4(_), IpAddr::V6(_)) => false,
        }
    }

    /// Whether a connection waits for the program.
    pub fn has_connection(&self) -> bool {
        !self.accept.is_empty() || self.pending.as_ref().is_some_and(|p| p.is_ready())
    }

    /// Turns Fast Open of later connections on or off (TCP_FASTOPEN), or changes its keys. None of a listener whose
    /// connections are pending first: nothing is answered before the program has decided.
    pub fn set_fast_open(&mut self, options: Option<FastOpenOptions>) {
        match (options.filter(|_| self.pending.is_none()), &mut self.fast_open) {
            (Some(options), Some(queue)) => queue.options = options,
            (options, queue) => *queue = options.map(|o| Box::new(FastOpenQueue::new(o))),
        }
    }

    /// Its numbers.
    pub fn stat(&self) -> ListenerStat {
        let stat = ListenerStat {
            embryos: self.syn_queue.len,
            embryo_limit: self.syn_queue.limit,
            accept_queue: self.accept.len(),
            accept_limit: self.backlog,
            fast_open_pending: self.fast_open.as_ref().map_or(0, |q| q.pending),
            fast_open_limit: self.fast_open.as_ref().map_or(0, |q| q.options.backlog),
            ..self.syn_queue.counts
        };
        self.pending.as_ref().map_or(stat, |p| p.stat(stat))
    }

    /// Whether it listens on one address only, and so is preferred.
    pub fn is_specific(&self) -> bool {
        !self.local.ip().is_unspecified()
    }
}

/// A datagram socket.
pub struct UdpEntry {
    /// The engine's part.
    pub socket: UdpSocket,
    /// Its name in the table of bindings.
    pub binding: Option<u32>,
    /// It does not take IPv4, although bound to `::`.
    pub only_v6: bool,
    /// Whether it waits for memory or for the device: see `send_wait.rs` and `retries.rs`.
    pub blocked: SendBlocked,
    /// The headers of what it sends to the peer it is connected to; in memory of their own, since most
    /// sockets that only listen have none.
    pub template: Option<Box<UdpTemplate>>,
    /// The watch of the socket.
    pub watch: Watched,
}

impl UdpEntry {
    /// Readiness. Writable unless buffers or the device ran short.
    pub fn ready(&self) -> Ready {
        let readable = if self.socket.is_readable() { Ready::READABLE } else { Ready::NONE };
        let writable = if self.blocked.is_blocked { Ready::NONE } else { Ready::WRITABLE };
        let error = if self.socket.has_error() { Ready::ERROR } else { Ready::NONE };
        readable | writable | error
    }
}

/// An answer to an echo request.
pub struct Echo {
    /// The host that answered.
    pub from: IpAddr,
    /// The number of the request.
    pub seq: u16,
    /// Time to live or hop limit as received.
    pub hop_limit: u8,
    /// The payload that came back, or the error.
    pub outcome: Result<Chain, SocketError>,
}

/// Replies that a ping socket keeps at most.
const PING_REPLIES: usize = 64;
/// Their charge at most ([`charge`](crate::udp::charge)): as much as a datagram socket by default.
const PING_BYTES: usize = 256 << 10;
/// Requests remembered per socket for the ICMP errors about them: more than are under way at the rate of
/// an ordinary ping.
const PINGS_REMEMBERED: usize = 64;

/// A socket for echo requests.
pub struct PingEntry {
    /// The ident of its requests.
    pub ident: u16,
    /// Replies not yet taken, at most [`PING_REPLIES`].
    replies: VecDeque<Echo>,
    /// Their charge in bytes.
    truesize: usize,
    /// Requests sent lately, at most [`PINGS_REMEMBERED`]: an ICMP error is accepted only about one of these.
    pub sent: VecDeque<(IpAddr, u16)>,
    /// The watch of the socket.
    pub watch: Watched,
}

impl Echo {
    fn charge(&self) -> usize {
        self.outcome.as_ref().map_or(0, crate::udp::charge)
    }
}

impl PingEntry {
    pub fn new(ident: u16) -> PingEntry {
        PingEntry {
            ident,
            replies: VecDeque::new(),
            truesize: 0,
            sent: VecDeque::new(),
            watch: Watched::default(),
        }
    }

    /// Queues a reply, if the receive share has space for it.
    ///
    /// # Errors
    /// The reply, if there is none.
    pub fn keep(&mut self, echo: Echo, share: FairShare) -> Result<(), Echo> {
        let charge = echo.charge();
        if share.is_contended() && charge > share.allowance(self.truesize, false) {
            return Err(echo);
        }
        self.truesize += charge;
        self.replies.push_back(echo);
        Ok(())
    }

    /// A reply beyond the limits, the oldest first.
    pub fn pop_surplus(&mut self) -> Option<Echo> {
        let is_full = self.replies.len() > PING_REPLIES || self.truesize > PING_BYTES;
        if is_full { self.receive() } else { None }
    }

    /// The oldest reply.
    pub fn receive(&mut self) -> Option<Echo> {
        let echo = self.replies.pop_front()?;
        self.truesize -= echo.charge();
        Some(echo)
    }

    /// Replies not yet taken.
    pub fn queued(&self) -> usize {
        self.replies.len()
    }

    /// Remembers a request; of too many the oldest is forgotten.
    pub fn note_sent(&mut self, to: IpAddr, seq: u16) {
        if self.sent.len() >= PINGS_REMEMBERED {
            self.sent.pop_front();
        }
        self.sent.push_back((to, seq));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mbuf::{Pool, PoolConfig, Purpose};

    /// Keeps `count` replies of `bytes` bytes one after the other, and returns the number that is kept.
    fn kept(ping: &mut PingEntry, pool: &mut Pool, count: u16, bytes: usize) -> usize {
        for seq in 0..count {
            let chain = pool.alloc_chain(bytes, 0, Purpose::Receive).unwrap();
            let echo = Echo { from: [10, 0, 0, 2].into(), seq, hop_limit: 64, outcome: Ok(chain) };
            if let Err(Echo { outcome: Ok(chain), .. }) =
                ping.keep(echo, pool.share_of(Purpose::Receive))
            {
                pool.free(chain);
            }
            while let Some(Echo { outcome: Ok(chain), .. }) = ping.pop_surplus() {
                pool.free(chain);
            }
        }
        ping.queued()
    }

    #[test]
    fn replies_that_nobody_takes_are_bounded_in_number_and_bytes_and_the_oldest_give_way() {
        let mut pool = Pool::new(PoolConfig::with_budget(16 << 20)).unwrap();
        for (bytes, most) in [(8, PING_REPLIES), (60_000, 4)] {
            let mut ping = PingEntry::new(1);
            assert_eq!(kept(&mut ping, &mut pool, 200, bytes), most);
            assert!(ping.truesize <= PING_BYTES);
            let mut seq = 200 - most as u16;
            while let Some(echo) = ping.receive() {
                assert_eq!(echo.seq, seq);
                seq += 1;
                echo.outcome.into_iter().for_each(|c| pool.free(c));
            }
            assert_eq!((seq, ping.truesize, pool.outstanding()), (200, 0, 0));
        }
    }

    #[test]
    fn replies_have_a_fair_part_of_a_scarce_receive_share() {
        let mut pool = Pool::new(PoolConfig::with_budget(2 << 20)).unwrap();
        let limit = pool.share_of(Purpose::Receive).limit;
        let others = pool.alloc_chain(limit / 4 * 3, 0, Purpose::Receive).unwrap();
        let mut ping = PingEntry::new(1);
        assert_eq!(kept(&mut ping, &mut pool, 200, 8), 4, "a page");
        assert_eq!(ping.truesize, FairShare::MIN_BYTES);
        while let Some(echo) = ping.receive() {
            echo.outcome.into_iter().for_each(|c| pool.free(c));
        }
        pool.free(others);
    }
}
