//! Echo requests: the guest's pings of other hosts leave by unprivileged ping sockets (SOCK_DGRAM of ICMP), where
//! the system allows them (net.ipv4.ping_group_range).
//!
//! A flow is an identifier of the guest and a destination. The kernel gives the request an identifier of its own,
//! and the reply gets the guest's again. Errors of the network about a request go back to the guest.
//!
//! Bounds: [`Limits::echo_flows`](crate::config::Limits), of which the oldest gives way; a flow that is idle for 30 s
//! ends.

use std::collections::{HashMap, VecDeque};
use std::io::IoSlice;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::task::Poll;

use fulmar_stack::base::{Duration, Instant, SlotId};
use fulmar_stack::ip::{EchoId, EchoRequest, InvokingPacket, SentError};
use fulmar_stack::shard::Slab;
use fulmar_stack::socket::{Ready, SocketError};
use nix::errno::Errno;
use nix::sys::epoll::EpollFlags;
use nix::sys::socket::{MsgFlags, SockProtocol, SockType, sendmsg, setsockopt, sockopt};

use super::datagrams::{Batch, ERRORS_PER_TURN};
use super::host_socket::{self, DatagramError, Failure};
use super::poll::Token;
use super::way::{Candidate, Grant, NotCarried, Way};
use super::{Context, Endpoints};
use crate::policy::Protocol;
use crate::stat::{Direction, FlowStat, Refusal};

/// Idle time-out of a flow, as Linux's conntrack has it (nf_conntrack_icmp_timeout).
const IDLE_TIMEOUT: Duration = Duration::from_secs(30);
/// Header of an echo request or reply (RFC 792, RFC 4443 section 4.1).
const HEADER_BYTES: usize = 8;
const REQUEST: u8 = 8;
const REPLY: u8 = 0;
const REQUEST_V6: u8 = 128;
const REPLY_V6: u8 = 129;
/// Requests that are taken in one turn.
const TAKEN_PER_TURN: usize = 64;
/// Batches that are received in one turn of a flow. The next reply is another edge.
const BATCHES_PER_TURN: usize = 16;

/// The guest's address, the destination, the identifier.
type Key = (IpAddr, IpAddr, u16);

struct Flow {
    id: u64,
    socket: OwnedFd,
    key: Key,
    leads_to: IpAddr,
    /// The name that it leads to.
    name: Option<Arc<str>>,
    /// Its rule and bounds.
    grant: Grant,
    bytes_out: u64,
    bytes_in: u64,
    began: Instant,
    moved: Instant,
}

/// The flows of echo requests.
#[derive(Default)]
pub(crate) struct Echoes {
    flows: Slab<Flow>,
    by_key: HashMap<Key, SlotId>,
    /// In the order in which they began.
    order: VecDeque<SlotId>,
    listener: Option<SlotId>,
    /// When the next flow may be over, at the earliest.
    deadline: Option<Instant>,
}

impl Echoes {
    /// Opens the socket for whatever the guest pings.
    pub(crate) fn listen(&mut self, cx: &mut Context<'_>) -> Result<(), SocketError> {
        let listener = cx.stack.icmp().listen()?;
        cx.stack.watch(listener, Some(Ready::READABLE));
        cx.tokens.set(listener, Token::Echo(listener));
        self.listener = Some(listener);
        Ok(())
    }

    /// The guest has sent echo requests.
    pub(crate) fn take_requests(&mut self, cx: &mut Context<'_>) {
        let Some(listener) = self.listener else { return };
        for _ in 0..TAKEN_PER_TURN {
            let Ok(Poll::Ready(request)) = cx.stack.icmp().receive_request(listener) else {
                return;
            };
            if let Err(why) = self.forward(cx, &request) {
                if why.why == Refusal::Undecided {
                    cx.refuse(why.why);
                    cx.stack.free(request.payload);
                    continue;
                }
                let ends = [request.src, request.dst].map(|ip| SocketAddr::new(ip, 0));
                cx.refuse_flow(Protocol::Icmp, ends.into(), &why);
                report(cx, &request, why.failure);
            }
            cx.stack.free(request.payload);
        }
        // More may wait.
        cx.stack.notify(listener);
    }

    fn forward(&mut self, cx: &mut Context<'_>, request: &EchoRequest) -> Result<(), NotCarried> {
        let key = (request.src, request.dst, request.ident);
        let id = match self.by_key.get(&key) {
            Some(id) => *id,
            None => self.begin(cx, key)?,
        };
        let Some(flow) = self.flows.get_mut(id) else { return Ok(()) };
        if !flow.grant.may_pass(cx.now, request.payload.len()) {
            return Err((Failure::Silence, Refusal::Allowance).into());
        }
        let mut message = vec![0; HEADER_BYTES + request.payload.len()];
        message[0] = if request.dst.is_ipv4() { REQUEST } else { REQUEST_V6 };
        message[6..HEADER_BYTES].copy_from_slice(&request.seq.to_be_bytes());
        request.payload.copy_to(0, &mut message[HEADER_BYTES..]);
        if request.hop_limit == 0 {
            send_error(cx, request, SentError::TimeExceeded { code: 0 });
            return Err((Failure::Silence, Refusal::HopLimit).into());
        }
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
        let hops = i32::from(request.hop_limit);
        let control = [host_socket::hop_limit(flow.leads_to.is_ipv4(), &hops)];
        let (fd, bytes) = (flow.socket.as_raw_fd(), request.payload.len() as u64);
        (flow.moved, flow.bytes_out) = (cx.now, flow.bytes_out + bytes);
        match sendmsg::<()>(fd, &[IoSlice::new(&message)], &control, flags, None) {
            Ok(_) => Ok(()),
            Err(Errno::EAGAIN | Errno::ENOBUFS) => {
                Err((Failure::Silence, Refusal::HostQueueFull).into())
            }
            Err(Errno::EMSGSIZE) => Err((Failure::Silence, Refusal::TooLong).into()),
            Err(e) => {
                if host_socket::may_be_of_lost_address(e) {
                    // The next request has a socket that starts at the new one.
                    self.remove(cx, id);
                }
                Err(host_socket::failure_of(e).into())
            }
        }
    }

    fn begin(&mut self, cx: &mut Context<'_>, key: Key) -> Result<SlotId, NotCarried> {
        let (from, to) = (SocketAddr::new(key.0, 0), SocketAddr::new(key.1, 0));
        if !cx.settings.carries.icmp {
            return Err((Failure::Silence, Refusal::Forbidden).into());
        }
        let (candidates, names) = match cx.way(Protocol::Icmp, from, to) {
            Way::To(candidates, names) => (candidates, names),
            Way::LookUp(name) => {
                cx.wanted.push(name);
                return Err((Failure::Silence, Refusal::NameFailed).into());
            }
            Way::Undecided => return Err((Failure::Silence, Refusal::Undecided).into()),
            // Only connections pass through a proxy.
            Way::Through(..) => return Err((Failure::Prohibited, Refusal::Upstream).into()),
            Way::Refused(why) => return Err(why),
        };
        // An echo request of one IP version is answered in that version.
        let found = candidates.into_iter().find(|c| c.to.is_ipv4() == to.is_ipv4());
        let unreachable = (Failure::NoHost, Refusal::Unreachable);
        let Candidate { to: leads_to, mut grant } = found.ok_or(unreachable)?;
        grant.enter(Protocol::Icmp, [])?;
        // No ping sockets are allowed: that says nothing about the destination.
        let failed = |e| match e {
            Errno::EACCES | Errno::EPERM => (Failure::Silence, Refusal::HostSocket),
            e => host_socket::failure_of(e),
        };
        let socket = open(leads_to, cx).map_err(|e| NotCarried::from(failed(e)).by(&grant))?;
        if self.flows.len() >= cx.settings.limits.echo_flows {
            cx.refuse(Refusal::Displaced);
            if let Some(oldest) = self.order.pop_front() {
                self.remove(cx, oldest);
            }
        }
        let (began, moved) = (cx.now, cx.now);
        let leads_to = leads_to.ip();
        let name = names.and_then(|names| names.allowed.into_iter().next());
        let id = cx.settings.policy.next_flow();
        let (bytes_out, bytes_in) = (0, 0);
        let flow =
            Flow { id, socket, key, leads_to, name, grant, bytes_out, bytes_in, began, moved };
        let id = self.flows.insert(flow);
        if let Some(flow) = self.flows.get(id)
            && cx.poll.add_arrivals(flow.socket.as_fd(), Token::Echo(id)).is_err()
        {
            self.flows.remove(id);
            return Err((Failure::Silence, Refusal::HostSocket).into());
        }
        self.by_key.insert(key, id);
        self.order.push_back(id);
        self.deadline = self.deadline.or(Some(cx.now + IDLE_TIMEOUT));
        cx.totals.echo_flows += 1;
        if let Some(flow) = self.flows.get(id) {
            cx.settings.policy.began(|| stat_of(flow, cx.now));
        }
        Ok(id)
    }

    /// Ends the flows that new rules deny, or to which their bounds leave no place.
    pub(crate) fn review(&mut self, cx: &mut Context<'_>) {
        for id in self.flows.iter().map(|(id, _)| id).collect::<Vec<_>>() {
            let Some(flow) = self.flows.get_mut(id) else { continue };
            let [guest, peer, host] =
                [flow.key.0, flow.key.1, flow.leads_to].map(|ip| (ip, 0).into());
            let ends = Endpoints { guest, peer, host };
            match cx.review(Protocol::Icmp, Direction::Out, &ends, &flow.grant) {
                Ok(grant) => flow.grant = grant,
                Err(why) => {
                    cx.refuse_under_new_rules(Protocol::Icmp, (guest, peer), &why);
                    self.remove(cx, id);
                }
            }
        }
    }

    fn remove(&mut self, cx: &mut Context<'_>, id: SlotId) {
        let Some(flow) = self.flows.remove(id) else { return };
        self.by_key.remove(&flow.key);
        self.order.retain(|other| *other != id);
        cx.settings.policy.ended(|| stat_of(&flow, cx.now));
    }

    /// A socket of the host became ready.
    pub(crate) fn host_ready(
        &mut self,
        cx: &mut Context<'_>,
        batch: &mut Batch,
        id: SlotId,
        flags: EpollFlags,
    ) {
        if flags.contains(EpollFlags::EPOLLERR) {
            self.pass_errors(cx, batch, id);
        }
        for _ in 0..BATCHES_PER_TURN {
            let Some(flow) = self.flows.get(id) else { return };
            match batch.fill(flow.socket.as_fd()) {
                Ok(has_more) => {
                    self.pass_replies(cx, batch, id);
                    if !has_more {
                        return;
                    }
                }
                // Datagrams that arrived after the error are still queued, and the edge-triggered event is used up.
                Err(DatagramError::Pending) => self.pass_errors(cx, batch, id),
                Err(_) => {
                    cx.refuse(Refusal::HostSocket);
                    return self.remove(cx, id);
                }
            }
        }
    }

    fn pass_replies(&mut self, cx: &mut Context<'_>, batch: &Batch, id: SlotId) {
        let (Some(flow), Some(listener)) = (self.flows.get_mut(id), self.listener) else { return };
        for received in batch.list() {
            let message = batch.bytes(received);
            let Some((header, payload)) = message.split_first_chunk::<HEADER_BYTES>() else {
                continue;
            };
            if !matches!(header[0], REPLY | REPLY_V6) {
                continue;
            }
            if !flow.grant.may_pass(cx.now, payload.len()) {
                cx.totals.refusals.count(Refusal::Allowance);
                continue;
            }
            let seq = u16::from_be_bytes([header[6], header[7]]);
            let (guest, peer, ident) = flow.key;
            let echo = EchoId { ident, seq };
            (flow.moved, flow.bytes_in) = (cx.now, flow.bytes_in + payload.len() as u64);
            let sent = cx.stack.icmp().send_reply(cx.now, listener, peer, guest, echo, payload);
            if sent.is_err() {
                cx.totals.refusals.count(Refusal::NoBuffer);
            }
        }
    }

    /// Passes the ICMP errors of a flow's error queue on to the guest.
    fn pass_errors(&self, cx: &mut Context<'_>, batch: &mut Batch, id: SlotId) {
        let Some(flow) = self.flows.get(id) else { return };
        let (guest, peer, ident) = flow.key;
        for _ in 0..ERRORS_PER_TURN {
            let Some((said, message)) = batch.receive_error(flow.socket.as_fd()) else { return };
            let Some((header, payload)) = message.split_first_chunk::<HEADER_BYTES>() else {
                continue;
            };
            let echo = EchoId { ident, seq: u16::from_be_bytes([header[6], header[7]]) };
            let about = InvokingPacket::echo_request(guest, peer, echo, payload, payload.len());
            cx.pass_error(&about, &said, flow.leads_to);
        }
    }

    /// Ends flows that have timed out.
    pub(crate) fn expire(&mut self, cx: &mut Context<'_>) {
        if self.next_deadline().is_none_or(|at| at > cx.now) {
            return;
        }
        let over = |(_, flow): &(SlotId, &Flow)| flow.moved + IDLE_TIMEOUT <= cx.now;
        let ids: Vec<SlotId> = self.flows.iter().filter(over).map(|(id, _)| id).collect();
        ids.into_iter().for_each(|id| self.remove(cx, id));
        self.deadline = self.flows.iter().map(|(_, flow)| flow.moved + IDLE_TIMEOUT).min();
    }

    /// When the next flow may time out.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// A snapshot of the flows.
    pub(crate) fn stat(&self, now: Instant) -> impl Iterator<Item = FlowStat> + '_ {
        self.flows.iter().map(move |(_, flow)| stat_of(flow, now))
    }
}

fn open(to: SocketAddr, cx: &Context<'_>) -> nix::Result<OwnedFd> {
    let protocol = if to.is_ipv4() { SockProtocol::Icmp } else { SockProtocol::IcmpV6 };
    let fd = host_socket::open(to.is_ipv4(), SockType::Datagram, protocol)?;
    host_socket::bind_outbound(&fd, to, &cx.settings.outbound)?;
    match to {
        SocketAddr::V4(_) => setsockopt(&fd, sockopt::Ipv4RecvErr, &true)?,
        SocketAddr::V6(_) => setsockopt(&fd, sockopt::Ipv6RecvErr, &true)?,
    }
    host_socket::connect_to(&fd, to)?;
    Ok(fd)
}

fn report(cx: &mut Context<'_>, request: &EchoRequest, failure: Failure) {
    // A refusal is the pending error of an earlier request: the error queue has it, too.
    if failure != Failure::Refused
        && let Some(error) = failure.error(request.dst.is_ipv4())
    {
        send_error(cx, request, error);
    }
}

/// Sends the guest an ICMP error about its request.
fn send_error(cx: &mut Context<'_>, request: &EchoRequest, error: SentError) {
    let mut start = [0; 64];
    let n = request.payload.copy_to(0, &mut start);
    let &EchoRequest { src, dst, ident, seq, ref payload, .. } = request;
    let echo = EchoId { ident, seq };
    let about = InvokingPacket::echo_request(src, dst, echo, &start[..n], payload.len());
    cx.stack.icmp().send_error(cx.now, &about, error, None);
}

fn stat_of(flow: &Flow, now: Instant) -> FlowStat {
    let (guest, peer, ident) = flow.key;
    FlowStat {
        id: Some(flow.id),
        protocol: Protocol::Icmp,
        direction: Direction::Out,
        guest: SocketAddr::new(guest, ident),
        peer: SocketAddr::new(peer, 0),
        host: SocketAddr::new(flow.leads_to, 0),
        name: flow.name.clone(),
        rule: flow.grant.rule.clone(),
        state: "open",
        bytes_out: flow.bytes_out,
        bytes_in: flow.bytes_in,
        age: now.since(flow.began),
        idle: now.since(flow.moved),
        tcp: None,
        host_tcp: None,
    }
}
