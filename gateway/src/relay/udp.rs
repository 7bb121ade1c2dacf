//! UDP: flows of a guest, and the host's sockets by which they leave.
//!
//! A port of the guest has one socket of the host, whatever peers it writes to ([`port`]): the peers see one address
//! and port, or a published port's where there is one. A datagram of a host that the guest has not written to begins a
//! flow, too, as far as the filter and the policy allow ([`UdpFilter`]).
//!
//! Out: the shard hands over datagrams in its buffers. Datagrams of one flow and length that come together leave with
//! one call (UDP_SEGMENT). In: the datagrams of a socket are received as one batch, with runs unsplit (UDP_GRO), and go
//! to the guest with one call for each peer. ICMP errors of the host's network come back by the error queue of the
//! socket and are sent to the guest about its own datagram; the guest's own ICMP errors are not passed on.
//!
//! Bounds: [`Limits::udp_flows`](crate::config::Limits), `udp_sockets`, and the descriptors that the system allows;
//! [`table`] decides which flow is removed for a new one.

mod first_bytes;
mod flow;
mod inbound;
pub(crate) mod initials;
mod out;
mod port;
mod publish;
mod read_out;
mod table;

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::task::Poll;

use fulmar_stack::base::{Instant, SlotId};
use fulmar_stack::ip::InvokingPacket;
use fulmar_stack::shard::{PendingError, SendMessage};
use fulmar_stack::socket::{Ready, SocketError};
use fulmar_stack::udp::BindOptions;
use nix::errno::Errno;
use nix::sys::epoll::EpollFlags;

use super::datagrams::{Batch, ERRORS_PER_TURN};
use super::dns::{self, Dns};
use super::host_socket::{self, Failure};
use super::poll::Token;
use super::published_sockets::PublishedSockets;
use super::way::{Candidate, NotCarried, Way};
use super::{Context, Endpoints};
use crate::policy::Protocol;
use crate::stat::{Direction, FlowStat, Refusal};
use first_bytes::FirstBytes;
use flow::{Flow, HostSocket};
use port::{PortKey, Ports};
use table::{Class, Key, Table};

/// The bytes of a datagram, or of a run of them with the length of each but the last.
type Run<'a> = (&'a [u8], Option<u16>);

/// Addresses of the guest's that lead to one of the host, for which a port has sockets at most.
const MOST_ALIASES: u8 = 4;
/// Most flows that are removed for one socket.
const MOST_DISPLACED: usize = 16;
/// Receive queue of the shard's socket, which all flows share, bytes.
const QUEUE_BYTES: usize = 4 << 20;

/// The UDP flows.
#[derive(Default)]
pub(crate) struct Udp {
    flows: Table,
    ports: Ports,
    /// The socket of the shard to which every datagram comes.
    socket: Option<SlotId>,
    has_datagrams: bool,
    published: PublishedSockets<Arc<OwnedFd>>,
    /// Sockets that may have more than one turn took.
    ready: VecDeque<Token>,
    /// Counts the turns.
    turn: u64,
    /// Bytes that the readers of first bytes keep and hold.
    read_bytes: usize,
    /// Datagrams to resolvers are its.
    pub dns: Dns,
}

impl Udp {
    /// Opens the socket for whatever the guest sends.
    pub(crate) fn listen(&mut self, cx: &mut Context<'_>) -> Result<(), SocketError> {
        let any = SocketAddr::from(([0u16; 8], 0));
        let options = BindOptions { any_port: true, ..BindOptions::default() };
        let socket = cx.stack.udp().bind(any, options)?;
        cx.stack.udp().with_socket(socket, |s| {
            s.gro = true;
            s.set_recv_limit(QUEUE_BYTES);
        })?;
        cx.stack.watch(socket, Some(Ready::READABLE));
        cx.tokens.set(socket, Token::UdpListener(socket));
        self.socket = Some(socket);
        self.dns.listen(cx, socket);
        Ok(())
    }

    /// Whether something waits for its turn.
    pub(crate) fn has_work(&self) -> bool {
        self.has_datagrams || !self.ready.is_empty()
    }

    /// Whether the guest has sent something that was not taken yet.
    pub(crate) fn has_datagrams(&self) -> bool {
        self.has_datagrams
    }

    /// The guest has sent something.
    pub(crate) fn guest_ready(&mut self) {
        self.has_datagrams = true;
    }

    /// The socket of a guest's port became ready.
    pub(crate) fn host_ready(
        &mut self,
        cx: &mut Context<'_>,
        batch: &mut Batch,
        id: SlotId,
        flags: EpollFlags,
    ) {
        if flags.contains(EpollFlags::EPOLLERR)
            && let Some(port) = self.ports.get(id)
        {
            let socket = Arc::clone(&port.socket);
            self.pass_errors(cx, batch, &socket);
        }
        self.queue(id);
    }

    fn queue(&mut self, id: SlotId) {
        if let Some(port) = self.ports.get_mut(id)
            && !port.is_queued
        {
            port.is_queued = true;
            self.ready.push_back(Token::Udp(id));
        }
    }

    /// The socket of a published port became ready.
    pub(crate) fn published_ready(
        &mut self,
        cx: &mut Context<'_>,
        batch: &mut Batch,
        id: SlotId,
        flags: EpollFlags,
    ) {
        if flags.contains(EpollFlags::EPOLLERR)
            && let Some(published) = self.published.get(id)
        {
            let socket = Arc::clone(&published.socket);
            self.pass_errors(cx, batch, &socket);
        }
        self.queue_published(id);
    }

    fn queue_published(&mut self, id: SlotId) {
        if self.published.queue(id) {
            self.ready.push_back(Token::UdpListener(id));
        }
    }

    /// One turn of everything that is ready.
    pub(crate) fn run(&mut self, cx: &mut Context<'_>, batch: &mut Batch) {
        self.turn += 1;
        if std::mem::take(&mut self.has_datagrams) {
            self.take_datagrams(cx);
        }
        for _ in 0..self.ready.len() {
            match self.ready.pop_front() {
                Some(Token::Udp(id)) => self.receive_turn(cx, batch, id),
                Some(Token::UdpListener(id)) if self.take_published(cx, batch, id) => {
                    self.queue_published(id);
                }
                _ => {}
            }
        }
        while let Some(id) = self.flows.expired(cx.now) {
            self.remove(cx, id);
        }
    }

    fn receive_turn(&mut self, cx: &mut Context<'_>, batch: &mut Batch, id: SlotId) {
        if let Some(port) = self.ports.get_mut(id) {
            port.is_queued = false;
        }
        if self.receive(cx, batch, id) {
            self.queue(id);
        }
    }

    /// Begins a flow of the guest's.
    fn begin(&mut self, cx: &mut Context<'_>, key: Key) -> Result<SlotId, NotCarried> {
        let (from, to) = key;
        if !cx.settings.carries.udp {
            return Err((Failure::Silence, Refusal::Forbidden).into());
        }
        let (candidates, names) = match cx.way(Protocol::Udp, from, to) {
            Way::To(candidates, names) => (candidates, names),
            Way::LookUp(name) => {
                // The guest's program sends again.
                cx.wanted.push(name);
                return Err((Failure::Silence, Refusal::NameFailed).into());
            }
            Way::Undecided => return Err((Failure::Silence, Refusal::Undecided).into()),
            // Only connections pass through a proxy.
            Way::Through(..) => return Err((Failure::Prohibited, Refusal::Upstream).into()),
            Way::Refused(why) => return Err(why),
        };
        let found = host_socket::first_with_route(candidates, &cx.settings.outbound);
        let no_route = (Failure::NoRoute, Refusal::Unreachable);
        let Candidate { to: leads_to, mut grant } = found.ok_or(no_route)?;
        grant.enter(Protocol::Udp, [])?;
        let host = self
            .host_socket(cx, from, leads_to)
            .map_err(|errno| NotCarried::from(host_socket::failure_of(errno)).by(&grant))?;
        let ends = Endpoints { guest: from, peer: to, host: leads_to };
        let mut flow = Flow::new(host, Direction::Out, ends, cx.now);
        flow.grant = grant;
        flow.is_dns = cx.settings.mapping.is_dns(to);
        if let Some(names) = names {
            let expected = names.expected(to.port(), cx.settings.encrypted_hello);
            flow.first_bytes = Some(FirstBytes::new(expected));
            flow.name = names.allowed.into_iter().next();
        }
        Ok(self.add(cx, flow))
    }

    /// The socket by which a port of the guest reaches a destination: that of a published port, or one of its own.
    fn host_socket(
        &mut self,
        cx: &mut Context<'_>,
        guest: SocketAddr,
        leads_to: SocketAddr,
    ) -> nix::Result<HostSocket> {
        if let Some(fd) = cx.published_socket(guest, leads_to)
            && !self.flows.has_host((fd.as_raw_fd(), leads_to, None))
        {
            return Ok(HostSocket { fd, local: None, port: None });
        }
        let key = PortKey::of(guest, leads_to);
        for alias in 0..MOST_ALIASES {
            let key = PortKey { alias, ..key };
            let id = match self.ports.find(&key) {
                Some(id) => id,
                None => self.open_port(cx, key)?,
            };
            let Some(port) = self.ports.get_mut(id) else { continue };
            let fd = Arc::clone(&port.socket);
            if !self.flows.has_host((fd.as_raw_fd(), leads_to, None)) {
                port.flows += 1;
                return Ok(HostSocket { fd, local: None, port: Some(id) });
            }
        }
        Err(Errno::EADDRINUSE)
    }

    /// Opens the socket of a guest's port. Without a descriptor for it flows of the guest's give way: else DNS queries
    /// would fail until a time-out.
    fn open_port(&mut self, cx: &mut Context<'_>, key: PortKey) -> nix::Result<SlotId> {
        // A quarter is that of DNS.
        let most = cx.settings.limits.udp_sockets;
        if self.ports.len() >= most - most / 4 {
            self.displace_port(cx);
        }
        let socket = match key.open(&cx.settings.outbound) {
            Err(Errno::EMFILE | Errno::ENFILE) if self.displace_port(cx) => {
                key.open(&cx.settings.outbound)
            }
            opened => opened,
        }?;
        let id = self.ports.insert(key, socket, cx.now);
        let Some(port) = self.ports.get(id) else { return Err(Errno::ENFILE) };
        if cx.poll.add_readable(port, Token::Udp(id)).is_err() {
            self.ports.remove(id);
            return Err(Errno::ENFILE);
        }
        cx.siblings.own_port(port.bound, true);
        Ok(id)
    }

    /// Ends flows of the guest's until a socket is closed. False: none could be.
    fn displace_port(&mut self, cx: &mut Context<'_>) -> bool {
        let before = self.ports.len();
        for _ in 0..MOST_DISPLACED {
            let oldest = self.flows.oldest(Class::Out, cx.now, |flow| !flow.is_published());
            let Some(id) = oldest else { return false };
            cx.refuse(Refusal::Displaced);
            self.remove(cx, id);
            if self.ports.len() < before {
                return true;
            }
        }
        false
    }

    /// Adds a flow; another one may have to give way.
    fn add(&mut self, cx: &mut Context<'_>, mut flow: Flow) -> SlotId {
        flow.id = cx.settings.policy.next_flow();
        let most = cx.settings.limits.udp_flows;
        if let Some(id) = self.flows.victim(flow.class(), most, cx.now) {
            cx.refuse(Refusal::Displaced);
            self.remove(cx, id);
        }
        cx.totals.udp_flows += 1;
        cx.settings.policy.began(|| stat_of(&flow, cx.now));
        self.flows.insert(flow, cx.now)
    }

    /// Ends the guest's flows whose destination leads elsewhere by a new mapping.
    pub(crate) fn end_moved(&mut self, cx: &mut Context<'_>) {
        let has_moved = |flow: &Flow| {
            let leads_to = cx.settings.mapping.target(flow.peer);
            flow.direction == Direction::Out
                && !cx.settings.names.cover(flow.peer.ip())
                && leads_to != Some(flow.host_addr)
        };
        let moved = self.flows.iter().filter(|(_, flow)| has_moved(flow));
        for id in moved.map(|(id, _)| id).collect::<Vec<_>>() {
            self.remove(cx, id);
        }
    }

    /// Ends the flows that new rules deny, or to which their bounds leave no place.
    pub(crate) fn review(&mut self, cx: &mut Context<'_>) {
        for id in self.flows.iter().map(|(id, _)| id).collect::<Vec<_>>() {
            let Some(flow) = self.flows.get_mut(id) else { continue };
            let ends = Endpoints { guest: flow.guest, peer: flow.peer, host: flow.host_addr };
            // A host that wrote to a port of the guest's own is one that the guest may write to.
            let direction = if flow.is_of_client() { Direction::In } else { Direction::Out };
            match cx.review(Protocol::Udp, direction, &ends, &flow.grant) {
                Ok(grant) => flow.grant = grant,
                Err(why) => {
                    cx.refuse_under_new_rules(Protocol::Udp, (ends.guest, ends.peer), &why);
                    self.remove(cx, id);
                }
            }
        }
    }

    fn remove(&mut self, cx: &mut Context<'_>, id: SlotId) {
        let Some(flow) = self.flows.remove(id) else { return };
        if let Some(first) = &flow.first_bytes {
            self.read_bytes -= first.counted;
            cx.settings.names.initials.release(
                first.connection_ids(),
                (flow.guest, flow.peer),
                cx.now,
            );
        }
        cx.settings.policy.ended(|| stat_of(&flow, cx.now));
        let Some(of_port) = flow.host.port else { return };
        let Some(port) = self.ports.get_mut(of_port) else { return };
        port.flows -= 1;
        if port.flows == 0 {
            cx.siblings.own_port(port.bound, false);
            self.ports.remove(of_port);
        }
    }

    /// Closes the sockets of the guest's ports that have a number on the host, which is published.
    pub(crate) fn release_port(&mut self, cx: &mut Context<'_>, number: u16) {
        for of_port in self.ports.bound_to(number) {
            let flows = self.flows.iter().filter(|(_, flow)| flow.host.port == Some(of_port));
            let ids: Vec<SlotId> = flows.map(|(id, _)| id).collect();
            ids.into_iter().for_each(|id| self.remove(cx, id));
        }
    }

    /// When the next flow may time out.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        self.flows.next_deadline()
    }

    /// Passes the ICMP errors of a socket's error queue on to the guest. Returns how many entries there were.
    fn pass_errors(
        &mut self,
        cx: &mut Context<'_>,
        batch: &mut Batch,
        socket: &impl AsFd,
    ) -> usize {
        let fd = socket.as_fd();
        for passed in 0..ERRORS_PER_TURN {
            let Some((said, payload)) = batch.receive_error(fd) else { return passed };
            let Some(to) = said.about else { continue };
            let id = self.flows.find_host((fd.as_raw_fd(), to, said.local));
            let Some(flow) = id.and_then(|id| self.flows.get(id)) else { continue };
            let about = InvokingPacket::datagram(flow.guest, flow.peer, payload, payload.len());
            cx.pass_error(&about, &said, flow.host_addr.ip());
        }
        ERRORS_PER_TURN
    }

    /// A snapshot of the flows.
    pub(crate) fn stat(&self, now: Instant) -> impl Iterator<Item = FlowStat> + '_ {
        self.flows.iter().map(move |(_, flow)| stat_of(flow, now))
    }
}

/// Sends datagrams, or runs of them with the length of each, to the guest.
fn deliver<'a>(cx: &mut Context<'_>, socket: SlotId, flow: &mut Flow, runs: &[Run<'a>]) {
    let whole = runs.iter().map(|(bytes, _)| bytes.len()).sum();
    if !flow.grant.may_pass(cx.now, whole) {
        let lost = runs.iter().map(|(bytes, each)| flow::count_of(bytes.len(), *each) as u64);
        return cx.totals.refusals.add(Refusal::Allowance, lost.sum());
    }
    let message = |&(bytes, segment_bytes): &Run<'a>| {
        let m = SendMessage::new(bytes).to(flow.guest).from(flow.peer);
        segment_bytes.map_or(m, |each| m.segmented(each))
    };
    let messages: Vec<SendMessage<'_>> = runs.iter().map(message).collect();
    let mut sent = 0;
    while sent < messages.len() {
        let error = if sent == 0 { PendingError::Return } else { PendingError::Leave };
        match cx.stack.udp().send_many(cx.now, socket, &messages[sent..], error) {
            Ok(Poll::Ready(done)) if done.messages > 0 => sent += done.messages,
            _ => {
                cx.refuse(Refusal::NoBuffer);
                sent += 1;
            }
        }
    }
    if flow.is_dns && cx.settings.policy.reads_names() {
        let messages = runs.iter().flat_map(|(bytes, each)| {
            bytes.chunks(each.map_or(usize::MAX, |n| usize::from(n.max(1))))
        });
        messages.for_each(|message| dns::ruling::learn_claim(cx, message));
    }
    let bytes: usize = runs.iter().map(|(bytes, _)| bytes.len()).sum();
    let datagrams = runs.iter().map(|(bytes, each)| flow::count_of(bytes.len(), *each));
    let datagrams = datagrams.sum::<usize>() as u64;
    flow.count_in(datagrams, bytes as u64, cx.now);
    cx.totals.datagrams_in += datagrams;
    cx.totals.bytes_in += bytes as u64;
}

fn stat_of(flow: &Flow, now: Instant) -> FlowStat {
    FlowStat {
        id: Some(flow.id),
        protocol: Protocol::Udp,
        direction: flow.direction,
        guest: flow.guest,
        peer: flow.peer,
        host: flow.host_addr,
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
