//! UDP: flows of a guest, each with a socket of the host's that is connected to its peer, so that only the peer's
//! answers come back.
//!
//! Out: the shard hands over datagrams in its buffers. Those of one flow and length that come together
//! leave with one call (UDP_SEGMENT). In: what a socket has is received as one batch, runs unsplit (UDP_GRO), and
//! goes to the guest with one call. ICMP errors of the host's network come back by the error queue of the socket
//! and are sent to the guest about its own datagram; those of the guest are not passed on.
//!
//! Bounds: [`Limits::udp_flows`](crate::config::Limits), and the descriptors that the system allows; the least recently
//! used flow gives way.

mod flow;
mod out;
mod publish;
mod receive;

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use fulmar_base::{Instant, SlotId, Stage};
use fulmar_ip::InvokingPacket;
use fulmar_shard::{PendingError, SendMessage, Slab, Wheel};
use fulmar_socket::{Ready, SocketError, Step};
use fulmar_udp::BindOptions;
use nix::errno::Errno;
use nix::sys::epoll::EpollFlags;

use super::host::DatagramError;
use super::host::{self, Failure};
use super::poll::Token;
use super::published::PublishedSockets;
use super::siblings::ClientDatagrams;
use super::{Context, Settings};
use crate::policy::{NewFlow, Protocol};
use crate::stat::{Direction, FlowStat, Refusal};
use flow::{ClientKey, Flow, HostSocket};
pub use receive::Batch;

/// The guest's end and the other end as the guest knows it.
type Key = (SocketAddr, SocketAddr);
/// The bytes of a datagram, or of a run of them with the length of each but the last.
type Run<'a> = (&'a [u8], Option<u16>);

/// Errors that are passed on in one turn of a flow.
const ERRORS_PER_TURN: usize = 16;
/// Errors in a row that are about no datagram, such as those of a security module: the flow ends.
const MOST_FAILURES: usize = 16;
/// Flows that are looked at for an idle one when the table is full.
const LOOKED_AT: usize = 16;
/// Receive queue of the shard's socket, which all flows share, bytes.
const QUEUE_BYTES: usize = 4 << 20;

/// The UDP flows.
#[derive(Default)]
pub struct Udp {
    flows: Slab<Flow>,
    by_key: HashMap<Key, SlotId>,
    /// The queue of the second-chance (clock) algorithm, with the time of each flow's entry. Flows that have ended stay
    /// until they come up.
    order: VecDeque<(Instant, SlotId)>,
    /// Idle time-outs.
    timers: Option<Wheel<SlotId>>,
    /// The socket of the shard to which every datagram comes.
    socket: Option<SlotId>,
    has_datagrams: bool,
    published: PublishedSockets<Arc<OwnedFd>>,
    /// Flows that send by the socket of a published port.
    published_flows: usize,
    /// Those of clients whose address and port, as the guest sees them, another flow has.
    substitutes: HashMap<ClientKey, SlotId>,
    /// Sockets that may have more than one turn took.
    ready: VecDeque<Token>,
    batch: Batch,
    /// Counts the turns.
    turn: u64,
}

impl Udp {
    /// Opens the socket for whatever the guest sends.
    pub fn listen(&mut self, cx: &mut Context<'_>) -> Result<(), SocketError> {
        self.timers = Some(Wheel::new(cx.now));
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
        Ok(())
    }

    /// Whether something waits for its turn.
    pub fn has_work(&self) -> bool {
        self.has_datagrams || !self.ready.is_empty()
    }

    /// Whether the guest has sent something that was not taken yet.
    pub fn has_datagrams(&self) -> bool {
        self.has_datagrams
    }

    /// The guest has sent something.
    pub fn guest_ready(&mut self) {
        self.has_datagrams = true;
    }

    /// A socket of the host became ready.
    pub fn host_ready(&mut self, cx: &mut Context<'_>, id: SlotId, flags: EpollFlags) {
        if flags.contains(EpollFlags::EPOLLERR) {
            self.pass_errors(cx, id);
        }
        self.queue(id);
    }

    fn queue(&mut self, id: SlotId) {
        if let Some(flow) = self.flows.get_mut(id)
            && !flow.is_queued
        {
            flow.is_queued = true;
            self.ready.push_back(Token::Udp(id));
        }
    }

    /// Datagrams of clients came to a published port.
    pub fn published_ready(&mut self, id: SlotId) {
        if self.published.queue(id) {
            self.ready.push_back(Token::UdpListener(id));
        }
    }

    /// One turn of everything that is ready.
    pub fn run(&mut self, cx: &mut Context<'_>) {
        self.turn += 1;
        if std::mem::take(&mut self.has_datagrams) {
            self.take_datagrams(cx);
        }
        for _ in 0..self.ready.len() {
            match self.ready.pop_front() {
                Some(Token::Udp(id)) => self.receive_turn(cx, id),
                Some(Token::UdpListener(id)) if self.take_published(cx, id) => {
                    self.published_ready(id);
                }
                _ => {}
            }
        }
        self.expire(cx);
    }

    fn receive_turn(&mut self, cx: &mut Context<'_>, id: SlotId) {
        if let Some(flow) = self.flows.get_mut(id) {
            flow.is_queued = false;
        }
        if self.receive(cx, id) {
            self.queue(id);
        }
    }

    /// The flow between two ends.
    fn find(&self, key: Key) -> Option<SlotId> {
        self.by_key.get(&key).copied()
    }

    /// Begins a flow of the guest's.
    fn begin(&mut self, cx: &mut Context<'_>, key: Key) -> Result<SlotId, (Failure, Refusal)> {
        let (from, to) = key;
        if !cx.settings.carries.udp {
            return Err((Failure::Silence, Refusal::Forbidden));
        }
        let leads_to = cx.settings.mapping.target(to);
        let leads_to = leads_to.ok_or((Failure::Silence, Refusal::Forbidden))?;
        let wanted =
            NewFlow { protocol: Protocol::Udp, from, to, leads_to, names: &[], claimed_names: &[] };
        if !cx.settings.policy.allows(&wanted) {
            return Err((Failure::Unreachable(13, 1), Refusal::Policy));
        }
        let fd = self.open(cx, leads_to).map_err(host::failure_of)?;
        let added = self.add(cx, HostSocket::Own(fd), Direction::Out, [from, to, leads_to]);
        added.ok_or((Failure::Silence, Refusal::HostSocket))
    }

    /// Opens a socket of the host. Without a descriptor for it the least recently used flow that has one gives way:
    /// else DNS queries would fail until a time-out. Clients of a published port share one descriptor, and stay.
    fn open(&mut self, cx: &mut Context<'_>, to: SocketAddr) -> nix::Result<OwnedFd> {
        match flow::open(to, &cx.settings.outbound) {
            Err(Errno::EMFILE | Errno::ENFILE) if !self.flows.is_empty() => {
                self.displace(cx, |flow| !flow.host.is_published());
                flow::open(to, &cx.settings.outbound)
            }
            opened => opened,
        }
    }

    fn add(
        &mut self,
        cx: &mut Context<'_>,
        host: HostSocket,
        direction: Direction,
        addresses: [SocketAddr; 3],
    ) -> Option<SlotId> {
        if self.flows.len() >= cx.settings.limits.udp_flows {
            self.displace(cx, |_| true);
        }
        let [guest, peer, host_addr] = addresses;
        let flow = Flow {
            host,
            direction,
            guest,
            peer,
            host_addr,
            // What a client of a published port sends from port 53 is no answer to a question of the guest's.
            is_dns: direction == Direction::Out && cx.settings.mapping.is_dns(peer),
            gso_limit: u16::MAX,
            is_queued: false,
            failures: 0,
            last_receive_turn: 0,
            datagrams_out: 0,
            datagrams_in: 0,
            bytes_out: 0,
            bytes_in: 0,
            began: cx.now,
            moved: cx.now,
        };
        let expires = flow.expires();
        let id = self.flows.insert(flow);
        if let Some(Flow { host: HostSocket::Own(fd), .. }) = self.flows.get(id)
            && cx.poll.add_readable(fd.as_fd(), Token::Udp(id)).is_err()
        {
            self.flows.remove(id);
            return None;
        }
        self.published_flows +=
            self.flows.get(id).map_or(0, |flow| flow.host.is_published().into());
        self.by_key.insert((guest, peer), id);
        self.order.push_back((cx.now, id));
        if let Some(timers) = &mut self.timers {
            timers.schedule(None, id, expires);
        }
        cx.totals.udp_flows += 1;
        Some(id)
    }

    /// Ends the flow that was used least recently of those that may go, as far as [`LOOKED_AT`] entries tell.
    fn displace(&mut self, cx: &mut Context<'_>, may_go: impl Fn(&Flow) -> bool) {
        for look in 0..=LOOKED_AT {
            let Some((seen, id)) = self.order.pop_front() else { return };
            let Some(flow) = self.flows.get(id) else { continue };
            let has_moved = flow.moved > seen && look < LOOKED_AT;
            if has_moved || !may_go(flow) {
                self.order.push_back((cx.now, id));
                continue;
            }
            cx.refuse(Refusal::Displaced);
            return self.remove(cx, id);
        }
    }

    fn remove(&mut self, cx: &mut Context<'_>, id: SlotId) {
        let Some(flow) = self.flows.remove(id) else { return };
        self.published_flows -= usize::from(flow.host.is_published());
        self.by_key.remove(&(flow.guest, flow.peer));
        if let Some(key) = flow.host.client_key() {
            self.substitutes.remove(&key);
        }
        cx.settings.policy.ended(|| stat_of(&flow, cx.now));
        // Bounds the entries of flows that have ended.
        if self.order.len() > 2 * self.flows.len() + 64 {
            self.order.retain(|(_, id)| self.flows.get(*id).is_some());
        }
    }

    fn expire(&mut self, cx: &mut Context<'_>) {
        while let Some(id) = self.timers.as_mut().and_then(|timers| timers.expire(cx.now)) {
            let Some(flow) = self.flows.get(id) else { continue };
            let expires = flow.expires();
            match (expires <= cx.now, &mut self.timers) {
                (false, Some(timers)) => {
                    timers.schedule(None, id, expires);
                }
                _ => self.remove(cx, id),
            }
        }
    }

    /// When the next flow may time out.
    pub fn next_deadline(&self) -> Option<Instant> {
        if self.flows.is_empty() { None } else { self.timers.as_ref()?.next_deadline() }
    }

    /// Receives from a flow's socket and sends it to the guest. True: there may be more.
    fn receive(&mut self, cx: &mut Context<'_>, id: SlotId) -> bool {
        let turn = self.turn;
        let Some(flow) = self.flows.get_mut(id) else { return false };
        let HostSocket::Own(fd) = &flow.host else { return false };
        // An answer comes alone: a second call would find nothing. What is left makes the socket ready again.
        let is_burst = flow.last_receive_turn + 1 >= turn;
        flow.last_receive_turn = turn;
        let filled = self.batch.fill_up_to(fd.as_fd(), if is_burst { usize::MAX } else { 1 });
        cx.stack.pass(Stage::HostReceived);
        match filled {
            Ok(has_more) => {
                flow.failures = 0;
                self.send_to_guest(cx, id, 0..self.batch.list().len());
                has_more && is_burst
            }
            Err(error) => {
                self.receive_failed(cx, id, error);
                false
            }
        }
    }

    fn receive_failed(&mut self, cx: &mut Context<'_>, id: SlotId, error: DatagramError) {
        let passed = self.pass_errors(cx, id);
        let Some(flow) = self.flows.get_mut(id) else { return };
        flow.failures = if passed > 0 { 0 } else { flow.failures + 1 };
        if error == DatagramError::Broken || flow.failures >= MOST_FAILURES {
            cx.refuse(Refusal::HostSocket);
            self.remove(cx, id);
        }
    }

    /// Sends datagrams of the batch to the guest.
    fn send_to_guest(&mut self, cx: &mut Context<'_>, id: SlotId, which: Range<usize>) {
        let (Some(flow), Some(socket)) = (self.flows.get_mut(id), self.socket) else { return };
        let list = self.batch.list().get(which).unwrap_or(&[]);
        let runs: Vec<Run<'_>> =
            list.iter().map(|r| (self.batch.bytes(r), r.segment_bytes)).collect();
        deliver(cx, socket, flow, &runs);
    }

    /// Sends the guest what another queue's thread received at a published port.
    pub fn take_client_datagrams(&mut self, cx: &mut Context<'_>, arrival: &ClientDatagrams) {
        let id = self.flow_of_client(cx, arrival);
        let Some(flow) = id.and_then(|id| self.flows.get_mut(id)) else { return };
        if let Some(socket) = self.socket {
            deliver(cx, socket, flow, &[(&arrival.bytes, arrival.segment_bytes)]);
        }
    }

    /// Passes the ICMP errors of a flow's error queue on to the guest. Returns how many entries there were.
    fn pass_errors(&mut self, cx: &mut Context<'_>, id: SlotId) -> usize {
        for passed in 0..ERRORS_PER_TURN {
            let Some(flow) = self.flows.get(id) else { return passed };
            let HostSocket::Own(fd) = &flow.host else { return passed };
            let Some((said, payload)) = self.batch.receive_error(fd.as_fd()) else { return passed };
            let Some(error) = said.error else { continue };
            // A router speaks for itself; the peer by the name that the guest knows it by.
            let from = said.from.filter(|from| *from != flow.host_addr.ip());
            let from = from.filter(|from| from.is_ipv4() == flow.peer.is_ipv4());
            let about = InvokingPacket::datagram(flow.guest, flow.peer, payload, payload.len());
            cx.stack.icmp().send_error(cx.now, &about, error, from);
        }
        ERRORS_PER_TURN
    }

    /// A snapshot of the flows.
    pub fn stat(&self, now: Instant) -> impl Iterator<Item = FlowStat> + '_ {
        self.flows.iter().map(move |(_, flow)| stat_of(flow, now))
    }
}

/// Sends datagrams, or runs of them with the length of each, to the guest.
fn deliver<'a>(cx: &mut Context<'_>, socket: SlotId, flow: &mut Flow, runs: &[Run<'a>]) {
    let message = |&(bytes, segment_bytes): &Run<'a>| {
        let m = SendMessage::new(bytes).to(flow.guest).from(flow.peer);
        segment_bytes.map_or(m, |each| m.segmented(each))
    };
    let messages: Vec<SendMessage<'_>> = runs.iter().map(message).collect();
    let mut sent = 0;
    while sent < messages.len() {
        let error = if sent == 0 { PendingError::Return } else { PendingError::Leave };
        match cx.stack.udp().send_many(cx.now, socket, &messages[sent..], error) {
            Ok(Step::Done(done)) if done.messages > 0 => sent += done.messages,
            _ => {
                cx.refuse(Refusal::NoBuffer);
                sent += 1;
            }
        }
    }
    if flow.is_dns && cx.settings.policy.has_policy() {
        let Settings { mapping, policy, .. } = cx.settings;
        let is_resolver = mapping.is_resolver(flow.peer, flow.host_addr);
        let messages = runs.iter().flat_map(|(bytes, each)| {
            bytes.chunks(each.map_or(usize::MAX, |n| usize::from(n.max(1))))
        });
        messages.for_each(|message| match is_resolver {
            true => policy.learn(message),
            false => policy.learn_claim(message),
        });
    }
    let bytes: usize = runs.iter().map(|(bytes, _)| bytes.len()).sum();
    let datagrams = runs.iter().map(|(bytes, each)| flow::count_of(bytes.len(), *each));
    let datagrams = datagrams.sum::<usize>() as u64;
    flow.datagrams_in += datagrams;
    flow.bytes_in += bytes as u64;
    flow.moved = cx.now;
    cx.totals.datagrams_in += datagrams;
    cx.totals.bytes_in += bytes as u64;
}

fn stat_of(flow: &Flow, now: Instant) -> FlowStat {
    FlowStat {
        protocol: Protocol::Udp,
        direction: flow.direction,
        guest: flow.guest,
        peer: flow.peer,
        host: flow.host_addr,
        state: "open",
        bytes_out: flow.bytes_out,
        bytes_in: flow.bytes_in,
        age: now.since(flow.began),
        idle: now.since(flow.moved),
        tcp: None,
        host_tcp: None,
    }
}
