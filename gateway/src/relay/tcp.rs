//! TCP: the flows of a guest, from the SYN to the last FIN.
//!
//! ```text
//!   guest's SYN ──► pending ──► connect ──┬─ connected ──► SYN,ACK ──► open
//!                                         └─ failed ─────► RST, ICMP error or silence
//!   client ──► accept ──► SYN to the guest ──┬─ SYN,ACK ──► open
//!                                            └─ failed ───► RST
//! ```
//!
//! Bounds: [`Limits::tcp_flows`](crate::config::Limits), of which each direction has three quarters at most, and
//! `connecting` of those that no host has answered: the oldest of these gives way to the next.
//! Each flow that can move bytes has its turn in order ([`flow`]).

mod connect;
mod first_bytes;
mod flow;
pub(crate) mod publish;
mod race;
mod tunnel;
mod undecided;

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::task::Poll;

use fulmar_stack::base::{Duration, Instant, SlotId};
use fulmar_stack::shard::{ConditionalAccept, Decision, ListenOptions, Pending, Slab};
use fulmar_stack::socket::Ready;
use nix::sys::epoll::EpollFlags;

use super::host_socket::{self, Failure};
use super::poll::Token;
use super::published_sockets::PublishedSockets;
use super::streams::{Stream, Streams, Undelivered};
use super::{Context, Endpoints};
use crate::policy::Protocol;
use crate::stat::{Direction, FlowStat, Refusal, Totals};
use connect::{accept_for_dns, decide_failure, is_to_resolver, refuse_syn};
use first_bytes::Holding;
use flow::{Flow, Guest, Turn};
use race::Delays;
use undecided::{MOST_UNDECIDED, Undecided};

/// The events of a connection of the shard.
const INTEREST: Ready = Ready::READABLE.with(Ready::WRITABLE).with(Ready::PEER_CLOSED);

/// Bytes that all flows together move before the frames leave and new ones are taken: what the host's kernel wrote into
/// memory is then still in the CPU's cache when the guest's kernel reads it. Without the bound 64 streams of
/// 256 KiB each would pass through memory before the first frame leaves. Half of a common second-level cache.
const ROUND_BYTES: u64 = 512 << 10;

/// A guest's kernel whose programs are gone is silent for less than this while it still has something to send: longer
/// than its retransmission time-out on a link of its own (200 ms on Linux) and the delay of an acknowledgement.
const QUIET: Duration = Duration::from_millis(500);

/// Most bytes that the readers of all flows keep of first bytes. A flow that needs more then ends.
const MOST_KEPT_BYTES: usize = 32 << 20;

/// SYNs that may come between two turns, beyond those whose host has not answered.
const SYNS_AT_ONCE: usize = 1024;

/// With more flows a snapshot does not ask the kernel for each: at a microsecond a call the relay would pause.
const MOST_HOST_INFO: usize = 1024;

/// The TCP flows.
#[derive(Default)]
pub(crate) struct Tcp {
    flows: Slab<Flow>,
    /// Flows that may have bytes to move, in order.
    ready: VecDeque<SlotId>,
    /// The guest's streams that have not ended.
    streams: Streams,
    /// When the guest last sent bytes or opened a connection.
    guest_moved: Option<Instant>,
    /// Flows whose host has not answered.
    connecting: usize,
    /// The same in order; those that were answered or have ended stay until they come up.
    unanswered: VecDeque<SlotId>,
    /// Flows of clients of published ports.
    inbound: usize,
    /// The shard's listener for every port.
    listener: Option<SlotId>,
    published: PublishedSockets<TcpListener>,
    /// Published ports that could not accept: no descriptor, or too many flows.
    stalled: HashSet<SlotId>,
    /// Flows whose `send` or `recv` failed with ENOBUFS or ENOMEM.
    starved: HashSet<SlotId>,
    /// When `stalled` and `starved` are tried again.
    retry_at: Option<Instant>,
    /// Published ports that have used up their turn.
    accepting: HashSet<SlotId>,
    /// SYNs whose name is looked up.
    awaiting: HashMap<Arc<str>, Vec<Pending>>,
    /// How many these are.
    awaited: usize,
    /// SYNs that the policy has not decided about.
    undecided: Undecided,
    delays: Delays,
    /// Flows whose first bytes are held.
    holding: Holding,
    /// Bytes that the readers of first bytes keep.
    kept_bytes: usize,
    /// Flows that wait for bytes of their rate, by the time until which they do and their index.
    paced: BTreeMap<(Instant, u32), SlotId>,
}

impl Tcp {
    /// Opens the listener for the guest's connections to any address and port.
    pub(crate) fn listen(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Result<(), fulmar_stack::socket::SocketError> {
        // More than are carried: the relay decides which of them gives way.
        let backlog = cx.settings.limits.connecting + MOST_UNDECIDED + SYNS_AT_ONCE;
        let conditional =
            ConditionalAccept { backlog, per_source: backlog, ..ConditionalAccept::default() };
        let options = ListenOptions {
            any_port: true,
            conditional_accept: Some(conditional),
            ..ListenOptions::default()
        };
        let any = SocketAddr::from(([0u16; 8], 0));
        let listener = cx.stack.tcp_listen(any, options)?;
        cx.stack.watch(listener, Some(Ready::READABLE));
        cx.tokens.set(listener, Token::TcpListener(listener));
        self.listener = Some(listener);
        Ok(())
    }

    /// Whether flows wait for their turn.
    pub(crate) fn has_work(&self) -> bool {
        !self.ready.is_empty() || !self.accepting.is_empty()
    }

    /// Begins the connections of the guest's new SYNs.
    pub(crate) fn take_pending(&mut self, cx: &mut Context<'_>) {
        let Some(listener) = self.listener else { return };
        while let Ok(Poll::Ready(pending)) = cx.stack.tcp_pending(listener) {
            if is_to_resolver(cx, &pending) {
                accept_for_dns(cx, &pending);
                continue;
            }
            if let Err(why) = self.begin(cx, &pending) {
                refuse_syn(cx, &pending, &why);
            }
        }
    }

    /// Whether a flow of a direction has no place. A quarter is left to the guest, and one to clients where ports are
    /// published.
    fn is_full(&self, cx: &Context<'_>, direction: Direction) -> bool {
        let most = cx.settings.limits.tcp_flows;
        // Only the first queue knows the ports.
        let may_have_clients = self.published.iter().next().is_some() || !cx.siblings.is_alone();
        let (of_direction, reserve) = match direction {
            Direction::In => (self.inbound, most / 4),
            Direction::Out if may_have_clients => (self.flows.len() - self.inbound, most / 4),
            Direction::Out => (self.flows.len(), 0),
        };
        self.flows.len() >= most || of_direction >= most - reserve
    }

    /// Ends the flow whose host has been silent for longest. Its guest sends its SYN again, and begins anew.
    fn displace_unanswered(&mut self, cx: &mut Context<'_>) {
        while let Some(id) = self.unanswered.pop_front() {
            let Some(flow) = self.flows.get(id) else { continue };
            let Guest::Pending(pending) = flow.guest else { continue };
            let silent = flow.not_carried((Failure::Silence, Refusal::ConnectingLimit));
            cx.refuse_flow(Protocol::Tcp, (flow.guest_addr, flow.peer_addr), &silent);
            // It may have been reset meanwhile.
            let _ = cx.stack.tcp_decide(cx.now, pending, Decision::Drop);
            self.remove(id);
            return;
        }
    }

    /// Enters a flow and watches its socket of the host.
    fn add(&mut self, cx: &mut Context<'_>, mut flow: Flow) -> Result<SlotId, (Failure, Refusal)> {
        flow.id = cx.settings.policy.next_flow();
        let id = self.flows.insert(flow);
        let Some(flow) = self.flows.get(id) else {
            return Err((Failure::Silence, Refusal::FlowLimit));
        };
        if cx.poll.add_edges(&flow.host, Token::Tcp(id)).is_err() {
            self.flows.remove(id);
            return Err((Failure::Silence, Refusal::HostSocket));
        }
        self.inbound += usize::from(flow.direction == Direction::In);
        Ok(id)
    }

    /// The host's socket became ready for something.
    pub(crate) fn host_ready(&mut self, cx: &mut Context<'_>, id: SlotId, flags: EpollFlags) {
        let Some(flow) = self.flows.get_mut(id) else { return };
        let has_failed = flags.intersects(EpollFlags::EPOLLERR | EpollFlags::EPOLLHUP);
        flow.host_side.readable |= flags.contains(EpollFlags::EPOLLIN) || has_failed;
        flow.host_side.writable |= flags.contains(EpollFlags::EPOLLOUT) || has_failed;
        flow.host_side.has_urgent |= flags.contains(EpollFlags::EPOLLPRI);
        flow.host_side.has_hung_up |= flags.contains(EpollFlags::EPOLLRDHUP) || has_failed;
        let is_racing = flow.race.is_some();
        match flow.guest {
            Guest::Pending(pending) if is_racing => {
                if let Some(how) = self.settle_race(cx, id) {
                    self.race_ended(cx, id, pending, how);
                }
            }
            Guest::Pending(pending) => self.host_answered(cx, id, pending, flags),
            // A reset that comes while the guest reads nothing is passed on all the same.
            _ if flags.contains(EpollFlags::EPOLLERR)
                && host_socket::outcome(&flow.host).is_err() =>
            {
                self.end(cx, id, Turn::HostFailed);
            }
            _ => self.queue(id),
        }
    }

    /// Reports a connection that is open on both sides to the policy.
    fn tell_begin(&self, cx: &Context<'_>, id: SlotId) {
        let Some(flow) = self.flows.get(id) else { return };
        cx.settings.policy.began(|| stat_of(flow, cx.now));
    }

    /// Reports the end of a connection to the policy if its begin was reported.
    fn tell_end(cx: &Context<'_>, flow: &Flow) {
        if let Guest::Open(_) = flow.guest {
            cx.settings.policy.ended(|| stat_of(flow, cx.now));
        }
    }

    /// Gives a connection of the shard to its flow.
    fn adopt(&mut self, cx: &mut Context<'_>, id: SlotId, socket: SlotId) {
        if let Ok(entry) = cx.stack.tcp_entry(socket) {
            entry.tcb.set_nodelay(true);
        }
        cx.tokens.set(socket, Token::Tcp(id));
        cx.stack.watch(socket, Some(INTEREST));
        cx.stack.notify(socket);
        cx.totals.tcp_flows += 1;
    }

    /// Counts the stream of a connection that is established.
    fn count_stream(&mut self, now: Instant, id: SlotId) {
        if let Some(flow) = self.flows.get_mut(id) {
            self.streams.recount(flow.stream(), &mut flow.counted);
            self.guest_moved = Some(now);
        }
    }

    /// The guest's connection became ready for something.
    pub(crate) fn guest_ready(&mut self, cx: &mut Context<'_>, id: SlotId, ready: Ready) {
        let Some(flow) = self.flows.get_mut(id) else { return };
        let has_failed = ready.intersects(Ready::ERROR.with(Ready::CLOSED));
        flow.guest_side.readable |= ready.is_readable() || ready.is_peer_closed() || has_failed;
        flow.guest_side.writable |= ready.is_writable() || has_failed;
        if let Guest::Opening(socket) = flow.guest {
            return self.guest_answered(cx, id, socket);
        }
        if ready.is_error() {
            return self.end(cx, id, Turn::GuestFailed);
        }
        self.queue(id);
    }

    fn queue(&mut self, id: SlotId) {
        if let Some(flow) = self.flows.get_mut(id)
            && !flow.is_queued
        {
            flow.is_queued = true;
            self.ready.push_back(id);
        }
    }

    /// Gives each flow that is ready its turn, as far as the bytes of a round last; the others come first in the next.
    pub(crate) fn run(&mut self, cx: &mut Context<'_>) {
        self.go_on_accepting(cx);
        self.try_next(cx);
        if self.undecided.is_due(cx.now) {
            self.decide_again(cx);
        }
        self.end_held(cx);
        self.end_pacing(cx.now);
        let moved = |totals: &Totals| totals.bytes_out + totals.bytes_in;
        let (begun, out) = (moved(cx.totals), cx.totals.bytes_out);
        for _ in 0..self.ready.len() {
            if moved(cx.totals) - begun >= ROUND_BYTES {
                break;
            }
            let Some(id) = self.ready.pop_front() else { break };
            let Some(flow) = self.flows.get_mut(id) else { continue };
            flow.is_queued = false;
            let mut turn = flow.turn(cx);
            let keeps = flow.first_bytes.as_ref().map_or(0, |first| first.memory_bytes());
            self.kept_bytes = self.kept_bytes - flow.kept_bytes + keeps;
            let has_grown = keeps > std::mem::replace(&mut flow.kept_bytes, keeps);
            if let Some(first) = flow.first_bytes.as_mut()
                && has_grown
                && self.kept_bytes > MOST_KEPT_BYTES
            {
                first.refuse();
                turn = Turn::Contradicted;
            }
            self.streams.recount(flow.stream(), &mut flow.counted);
            if let Some(first) = &mut flow.first_bytes {
                self.holding.watch(cx.now, id, first);
            }
            if let Some(at) = flow.pace(cx.now) {
                self.paced.insert((at, id.index), id);
            }
            match turn {
                Turn::Idle => {}
                Turn::More => self.queue(id),
                Turn::Starved => self.starve(cx, id),
                over => self.end(cx, id, over),
            }
        }
        if cx.totals.bytes_out > out {
            self.guest_moved = Some(cx.now);
        }
    }

    /// Flows whose rate has bytes again go on.
    fn end_pacing(&mut self, now: Instant) {
        while let Some(first) = self.paced.first_entry().filter(|first| first.key().0 <= now) {
            let id = first.remove();
            if let Some(flow) = self.flows.get_mut(id) {
                flow.is_paced = false;
            }
            self.queue(id);
        }
    }

    /// Ends flows that have held bytes for too long.
    fn end_held(&mut self, cx: &mut Context<'_>) {
        while let Some(id) = self.holding.pop(cx.now) {
            let first = self.flows.get_mut(id).and_then(|flow| flow.first_bytes.as_mut());
            if first.is_some_and(|first| self.holding.is_late(cx.now, id, first)) {
                self.end(cx, id, Turn::Contradicted);
            }
        }
    }

    /// A flow is over.
    fn end(&mut self, cx: &mut Context<'_>, id: SlotId, how: Turn) {
        let Some(flow) = self.remove(id) else { return };
        if how == Turn::OverLimit {
            let over = flow.not_carried((Failure::Refused, Refusal::Allowance));
            cx.refuse_flow(Protocol::Tcp, (flow.guest_addr, flow.peer_addr), &over);
        }
        if let (Turn::Contradicted, Some(first)) = (how, &flow.first_bytes) {
            cx.refuse(Refusal::FirstBytes);
            let stat = stat_of(&flow, cx.now);
            cx.settings.policy.contradicted(&stat, &first.refusal());
        }
        Tcp::tell_end(cx, &flow);
        if let Some(socket) = flow.socket() {
            if let Turn::HostFailed | Turn::Contradicted | Turn::OverLimit | Turn::Denied = how
                && let Ok(entry) = cx.stack.tcp_entry(socket)
            {
                entry.linger = Some(Duration::ZERO);
            }
            cx.stack.close(cx.now, socket);
        }
        if how == Turn::Over {
            host_socket::close(flow.host);
        }
        self.retry_stalled(cx);
    }

    /// Resets the flows that new rules deny, or to which their bounds leave no place.
    pub(crate) fn review(&mut self, cx: &mut Context<'_>) {
        for id in self.flows.iter().map(|(id, _)| id).collect::<Vec<_>>() {
            let Some(flow) = self.flows.get_mut(id) else { continue };
            let (guest, peer, host) = (flow.guest_addr, flow.peer_addr, flow.host_addr);
            let ends = Endpoints { guest, peer, host };
            match cx.review(Protocol::Tcp, flow.direction, &ends, &flow.grant) {
                Ok(grant) => {
                    // Addresses that it has not tried were allowed by the old rules.
                    (flow.grant, flow.race) = (grant, None);
                    self.queue(id);
                }
                Err(why) => {
                    if let Guest::Pending(pending) = flow.guest {
                        decide_failure(cx, pending, peer.is_ipv4(), why.failure);
                    }
                    cx.refuse_under_new_rules(Protocol::Tcp, (guest, peer), &why);
                    self.end(cx, id, Turn::Denied);
                }
            }
        }
    }

    fn remove(&mut self, id: SlotId) -> Option<Flow> {
        let mut flow = self.flows.remove(id)?;
        self.streams.recount(Stream::Ended, &mut flow.counted);
        self.inbound -= usize::from(flow.direction == Direction::In);
        self.kept_bytes -= flow.kept_bytes;
        if let Guest::Pending(_) = flow.guest {
            self.connecting = self.connecting.saturating_sub(1);
        }
        // Bounds the entries of flows that were answered or have ended.
        if self.unanswered.len() > 2 * self.connecting + 64 {
            let flows = &self.flows;
            let is_pending = |f: &Flow| matches!(f.guest, Guest::Pending(_));
            self.unanswered.retain(|id| flows.get(*id).is_some_and(is_pending));
        }
        Some(flow)
    }

    /// When all that the guest has sent is delivered, unless more comes before: at once where all streams have ended,
    /// else [`QUIET`] after the guest's last bytes. `begun`: when the guest's exit was noticed.
    pub(crate) fn delivered_at(&self, begun: Instant) -> Instant {
        match self.streams.undelivered() {
            Undelivered::Nothing => begun,
            // Starved flows hold bytes, too.
            Undelivered::MayCome if self.starved.is_empty() => {
                self.guest_moved.unwrap_or(begun).max(begun) + QUIET
            }
            Undelivered::MayCome | Undelivered::Held => Instant::FAR_FUTURE,
        }
    }

    /// Resets every connection of the guest, and every connection of the host whose stream from the guest is not whole.
    pub(crate) fn reset_all(&mut self, cx: &mut Context<'_>) {
        let ids: Vec<SlotId> = self.flows.iter().map(|(id, _)| id).collect();
        for id in ids {
            let Some(flow) = self.remove(id) else { continue };
            match flow.guest {
                Guest::Pending(_) => {
                    let given_up = flow.not_carried((Failure::Silence, Refusal::GivenUp));
                    cx.refuse_flow(Protocol::Tcp, (flow.guest_addr, flow.peer_addr), &given_up);
                }
                _ => Tcp::tell_end(cx, &flow),
            }
            if let Some(socket) = flow.socket() {
                if let Ok(entry) = cx.stack.tcp_entry(socket) {
                    entry.linger = Some(Duration::ZERO);
                }
                cx.stack.close(cx.now, socket);
            }
            if flow.guest_side.is_ended {
                host_socket::close(flow.host);
            }
        }
        debug_assert_eq!(self.streams, Streams::default(), "each stream is counted once");
    }

    /// A snapshot of the flows.
    pub(crate) fn stat(&self, cx: &mut Context<'_>) -> Vec<FlowStat> {
        let asks_host = self.flows.len() <= MOST_HOST_INFO;
        let mut stat = |flow: &Flow| {
            let entry = flow.socket().and_then(|socket| cx.stack.tcp_entry(socket).ok());
            FlowStat {
                tcp: entry.map(|e| e.tcb.info()),
                host_tcp: if asks_host { host_socket::tcp_info(&flow.host) } else { None },
                ..stat_of(flow, cx.now)
            }
        };
        self.flows.iter().map(|(_, flow)| stat(flow)).collect()
    }
}

/// A flow without the state of its connections, for which kernel and stack are asked one by one.
fn stat_of(flow: &Flow, now: Instant) -> FlowStat {
    FlowStat {
        id: Some(flow.id),
        protocol: Protocol::Tcp,
        direction: flow.direction,
        guest: flow.guest_addr,
        peer: flow.peer_addr,
        host: flow.host_addr,
        name: flow.name.clone(),
        rule: flow.grant.rule.clone(),
        state: flow.state(),
        bytes_out: flow.bytes_out,
        bytes_in: flow.bytes_in,
        age: now.since(flow.began),
        idle: now.since(flow.moved),
        tcp: None,
        host_tcp: None,
    }
}
