//! DNS of the guest to its resolvers: questions to the host's resolvers, and the answers to them.
//!
//! ```text
//!   guest ──► a question? allowed? ──► own identifier ──► server 1, 2, ... ──► an answer to it? ──► learnt ──► guest
//!                   └─ REFUSED, FORMERR, NOTIMP                  └─ next: error, time-out, SERVFAIL, REFUSED, NOTIMP
//! ```
//!
//! A flow is a port of the guest and a resolver; it has a socket of the host's for each server, connected to it. Only
//! an answer to an outstanding question passes, and the answer completes the question: a forged answer has to match
//! port, identifier and letters before the server's comes. The host's resolvers are asked in their order, as glibc asks
//! them (resolv.conf(5)), except that a server that has failed lately is asked last. A server that is silent for
//! [`PATIENCE`] may still answer: the first answer counts.
//!
//! The policy decides about datagrams that are not plain questions
//! ([`Policy::decide_hidden_name`](crate::policy::Policy)); where it may pass it goes to the first server as it is, and
//! so do the answers; nothing is learnt from them.
//!
//! Bounds: a quarter of [`Limits::udp_flows`] and of `udp_sockets`, of which the least recently used gives way, and
//! the questions of each ([`flow`]).

mod flow;
mod given;
mod lookups;
pub(crate) mod message;
pub(crate) mod ruling;
mod servers;
mod streams;

use std::borrow::Cow;
use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::Arc;

use fulmar_stack::base::{Duration, Instant, SlotId, Stage};
use fulmar_stack::ip::{InvokingPacket, SentError};
use fulmar_stack::shard::{PendingError, SendMessage, Slab, Wheel};
use fulmar_stack::udp::Datagram;
use nix::errno::Errno;
use nix::sys::epoll::EpollFlags;
use smallvec::SmallVec;
use std::task::Poll;

use super::datagrams::{Batch, ERRORS_PER_TURN};
use super::host_socket::{self, DatagramError, Failure};
use super::way::{Decided, NotCarried};
use super::{Context, canonical};
use crate::config::Limits;
use crate::names::messages;
use crate::policy::{Decision, Protocol};
use crate::stat::{FlowStat, Refusal};
use flow::{Flow, Ids, is_without_descriptor};
use lookups::Lookups;
use message::{Code, Question, Unusual};
use ruling::{Ruling, messages_of, rule};
use servers::{FailedServers, Guesses};
use streams::Streams;

/// How long a server has before the next one is asked.
const PATIENCE: Duration = Duration::from_secs(1);
/// How long the last server has to answer when an earlier one has failed. After that the guest gets the failed server's
/// answer.
const LAST_PATIENCE: Duration = Duration::from_secs(4);
/// The port of DNS.
const PORT: u16 = 53;
/// Most bytes of a question.
const MOST_QUESTION_BYTES: usize = 4096;
/// Datagrams that are taken of one socket in one turn.
const TAKEN_PER_TURN: usize = 16;
/// Flows that are examined for an idle one when the table is full.
const LOOKED_AT: usize = 16;
/// Most late answers of a flow that are expected.
const MOST_LATE: usize = 4;

/// The guest's end and the resolver as the guest knows it.
type Key = (SocketAddr, SocketAddr);
type Addresses = SmallVec<[SocketAddr; 3]>;

/// The flows of DNS.
#[derive(Default)]
pub(crate) struct Dns {
    flows: Slab<Flow>,
    by_key: HashMap<Key, SlotId>,
    /// The queue of the second-chance (clock) algorithm, with the time of each flow's entry.
    order: VecDeque<(Instant, SlotId)>,
    timers: Option<Wheel<SlotId>>,
    /// The socket of the shard by which the guest is answered.
    socket: Option<SlotId>,
    failed: FailedServers,
    /// The server with which the next question begins, where they take turns.
    turn: usize,
    ids: Ids,
    guesses: Guesses,
    lookups: Lookups,
    streams: Streams,
    /// Names whose look-up has ended since the last [`Dns::take_known`].
    known: Vec<Arc<str>>,
}

/// What the host's sockets took of datagrams to a resolver.
#[derive(Default)]
pub(crate) struct Taken {
    /// How many messages the datagrams had.
    pub messages: usize,
    /// A flow could not begin for lack of a descriptor.
    pub lacks_descriptor: bool,
}

impl Dns {
    /// Answers the guest by this socket of the shard.
    pub(crate) fn listen(&mut self, cx: &Context<'_>, socket: SlotId) {
        self.socket = Some(socket);
        self.timers = Some(Wheel::new(cx.now));
    }

    /// Takes datagrams of one flow of the guest if they are for a resolver; the caller frees them. `None`: they are for
    /// another host.
    pub(crate) fn take(&mut self, cx: &mut Context<'_>, datagrams: &[Datagram]) -> Option<Taken> {
        let first = datagrams.first()?;
        let (from, to) = (first.src, canonical(first.dst));
        if !cx.settings.mapping.is_dns(to) || !cx.settings.carries.udp {
            return None;
        }
        let servers = cx.settings.mapping.servers(to);
        if servers.is_empty() {
            return None;
        }
        let mut taken = Taken::default();
        for message in datagrams.iter().flat_map(messages_of) {
            let sent = self.take_message(cx, (from, to), &message, &servers);
            taken.lacks_descriptor |= sent.is_err_and(is_without_descriptor);
            taken.messages += 1;
        }
        Some(taken)
    }

    /// A socket of the host became ready.
    pub(crate) fn host_ready(
        &mut self,
        cx: &mut Context<'_>,
        batch: &mut Batch,
        id: SlotId,
        flags: EpollFlags,
    ) {
        let Some(flow) = self.flows.get(id) else { return };
        let servers: Addresses = flow.reached().collect();
        for server in servers {
            if flags.contains(EpollFlags::EPOLLERR) {
                self.take_errors(cx, id, server, batch);
            }
            self.receive(cx, id, server, batch);
        }
        self.set_timer(id);
    }

    /// Asks further servers, and ends flows, as the time has come.
    pub(crate) fn expire(&mut self, cx: &mut Context<'_>) {
        while let Some(id) = self.timers.as_mut().and_then(|t| t.expire(cx.now)) {
            let Some(flow) = self.flows.get_mut(id) else { continue };
            flow.timer = None;
            if flow.expires() <= cx.now {
                self.remove(cx, id);
                continue;
            }
            let now = cx.now;
            self.ask_on(cx, id, |a| a.next_at.is_some_and(|at| at <= now));
            self.set_timer(id);
        }
        while let Some(finished) = self.lookups.expired(cx.now) {
            self.finish(cx, finished);
        }
        self.expire_streams(cx);
    }

    /// When something is due.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        let timers = self.timers.as_ref()?;
        let of_flows = if self.flows.is_empty() { None } else { timers.next_deadline() };
        let others = [self.lookups.next_deadline(), self.streams.next_deadline()];
        of_flows.into_iter().chain(others.into_iter().flatten()).min()
    }

    /// A snapshot of the flows.
    pub(crate) fn stat(&self, now: Instant) -> impl Iterator<Item = FlowStat> + '_ {
        let of_guest = self.flows.iter().filter(|(_, flow)| (flow.guest, flow.peer) != given::OWN);
        of_guest.map(move |(_, flow)| flow.stat(now))
    }
}

impl Dns {
    /// Takes a message of the guest to a resolver.
    ///
    /// # Errors
    /// The host did not send it; the guest gets an ICMP error.
    fn take_message(
        &mut self,
        cx: &mut Context<'_>,
        key: Key,
        bytes: &[u8],
        servers: &Addresses,
    ) -> nix::Result<()> {
        let read = match bytes.len() {
            0..=MOST_QUESTION_BYTES => message::parse_question(bytes),
            _ => Err(Unusual::Wrong(Code::FORMAT_ERROR)),
        };
        let is_given = cx.settings.names.are_given();
        if let Ok(question) = &read
            && is_given
            && self.answer_pointer(cx, key, bytes, question)
        {
            return Ok(());
        }
        let (question, may_ask) = match rule(cx, bytes, read) {
            Ruling::Pass(question) => (question, true),
            Ruling::Unasked(question) => (Some(question), false),
            Ruling::Answer(answer) => return self.refuse(cx, key, Some(&answer)),
            Ruling::Drop => return self.refuse(cx, key, None),
        };
        if is_given && self.answer_by_name(cx, key, bytes, question.as_ref(), may_ask) {
            return Ok(());
        }
        let Some(bytes) = without_extras(cx, bytes, question.is_some()) else {
            return self.refuse(cx, key, message::answer_with(Code::REFUSED, bytes).as_deref());
        };
        match question {
            Some(question) if streams::is_stream(key) => {
                self.ask_over_tcp(cx, key, &bytes, question, servers);
                Ok(())
            }
            question => self.send_on(cx, key, &bytes, question, servers),
        }
    }

    /// Counts a message as refused, and answers it.
    fn refuse(&mut self, cx: &mut Context<'_>, key: Key, answer: Option<&[u8]>) -> nix::Result<()> {
        cx.refuse(Refusal::Policy);
        answer.into_iter().for_each(|answer| self.deliver(cx, key, answer));
        Ok(())
    }

    /// Sends a message on to the servers.
    fn send_on(
        &mut self,
        cx: &mut Context<'_>,
        key: Key,
        bytes: &[u8],
        question: Option<Question>,
        servers: &Addresses,
    ) -> nix::Result<()> {
        let id = match self.find_or_begin(cx, key, servers) {
            Ok(id) => id,
            Err(why) => {
                cx.refuse_flow(Protocol::Udp, key, &why);
                report(cx, key, bytes, why.failure);
                return Ok(());
            }
        };
        let sent = match question {
            Some(question) => self.ask(cx, id, bytes, question, servers),
            None => self.pass_opaque(cx, id, bytes, servers),
        };
        self.set_timer(id);
        sent
    }

    fn ask(
        &mut self,
        cx: &mut Context<'_>,
        id: SlotId,
        bytes: &[u8],
        question: Question,
        servers: &Addresses,
    ) -> nix::Result<()> {
        let Some(flow) = self.flows.get_mut(id) else { return Ok(()) };
        let mut servers = servers.clone();
        if cx.settings.mapping.rotates {
            let first = self.turn % servers.len().max(1);
            servers.rotate_left(first);
            self.turn = self.turn.wrapping_add(1);
        }
        let servers = self.failed.last(servers, cx.now);
        match flow.ask(bytes, question, servers, &mut self.ids, cx.now) {
            Some(at) => self.ask_next(cx, id, at),
            None => Ok(()),
        }
    }

    /// Sends a datagram that is not a question to the first server.
    fn pass_opaque(
        &mut self,
        cx: &mut Context<'_>,
        id: SlotId,
        bytes: &[u8],
        servers: &Addresses,
    ) -> nix::Result<()> {
        let (Some(flow), Some(server)) = (self.flows.get_mut(id), servers.first()) else {
            return Ok(());
        };
        flow.is_opaque = true;
        flow.send(cx, id, *server, bytes)
            .inspect_err(|errno| could_not_send(cx, (flow.guest, flow.peer), bytes, *errno))
    }

    fn find_or_begin(
        &mut self,
        cx: &mut Context<'_>,
        key: Key,
        servers: &Addresses,
    ) -> Result<SlotId, NotCarried> {
        if let Some(id) = self.by_key.get(&key) {
            return Ok(*id);
        }
        let ((from, to), Some(leads_to)) = (key, servers.first().copied()) else {
            return Err((Failure::Silence, Refusal::Forbidden).into());
        };
        if let Decided::Deny(rule) = cx.decide_now(Protocol::Udp, from, to, leads_to) {
            return Err(NotCarried::denied(Protocol::Udp, leads_to, rule));
        }
        let Limits { udp_flows, udp_sockets, .. } = cx.settings.limits;
        if self.flows.len() >= (udp_flows.min(udp_sockets) / 4).max(1) {
            self.displace(cx);
        }
        let id = self.flows.insert(Flow::new(from, to, leads_to, cx.now));
        self.by_key.insert(key, id);
        self.order.push_back((cx.now, id));
        cx.totals.udp_flows += 1;
        Ok(id)
    }

    /// Asks the next server of a question, and further ones while they cannot be asked.
    ///
    /// # Errors
    /// None can be asked; the guest gets an ICMP error.
    fn ask_next(&mut self, cx: &mut Context<'_>, id: SlotId, at: usize) -> nix::Result<()> {
        let mut failed = None;
        loop {
            let is_alone = self.flows.len() == 1;
            let Some(flow) = self.flows.get_mut(id) else { return Ok(()) };
            let Some(asked) = flow.asked.get_mut(at) else { return Ok(()) };
            let Some(server) = asked.servers.get(asked.next).copied() else { break };
            asked.next += 1;
            asked.next_at = match (asked.has_more_servers(), &asked.failure) {
                (true, _) => Some(cx.now + PATIENCE),
                (false, Some(_)) => Some(cx.now + LAST_PATIENCE),
                (false, None) => None,
            };
            let message = asked.message.clone();
            let sent = flow.send(cx, id, server, &message);
            cx.stack.pass(Stage::HostSent);
            match sent {
                Ok(()) => return Ok(()),
                Err(errno) if is_without_descriptor(errno) && !is_alone => {
                    asked_again(flow, at);
                    self.displace(cx);
                }
                Err(errno) => {
                    self.failed.add(server, cx.now);
                    failed = Some(errno);
                }
            }
        }
        let Some(flow) = self.flows.get_mut(id) else { return Ok(()) };
        let (key, asked) = ((flow.guest, flow.peer), flow.asked.remove(at));
        if key == given::OWN {
            self.on_own_answer(cx, &asked.question, None);
            return Ok(());
        }
        match (asked.failure, failed) {
            (Some(answer), _) => self.answer(cx, key, &asked.guest_ids, &answer),
            (None, Some(errno)) => {
                could_not_send(cx, key, &asked.message, errno);
                return Err(errno);
            }
            (None, None) => {}
        }
        Ok(())
    }

    /// Asks the next server of those questions of a flow whose last one has failed.
    fn ask_on(
        &mut self,
        cx: &mut Context<'_>,
        id: SlotId,
        has_failed: impl Fn(&flow::Asked) -> bool,
    ) {
        let mut at = 0;
        while let Some(asked) = self.flows.get_mut(id).and_then(|flow| flow.asked.get_mut(at)) {
            let own = asked.id;
            if has_failed(asked) && (asked.has_more_servers() || asked.failure.is_some()) {
                asked.server().into_iter().for_each(|server| self.failed.add(server, cx.now));
                // The guest gets the error as an ICMP error.
                let _ = self.ask_next(cx, id, at);
            }
            let flow = self.flows.get(id);
            let is_there = flow.and_then(|flow| flow.asked.get(at)).is_some_and(|a| a.id == own);
            at += usize::from(is_there);
        }
    }

    fn receive(&mut self, cx: &mut Context<'_>, id: SlotId, server: SocketAddr, batch: &mut Batch) {
        let Some(fd) = self.flows.get(id).and_then(|flow| flow.socket_to(server)) else { return };
        let filled = batch.fill_up_to(fd.as_fd(), TAKEN_PER_TURN);
        cx.stack.pass(Stage::HostReceived);
        match filled {
            Ok(_) => {
                for received in batch.list() {
                    self.on_datagram(cx, id, server, batch.bytes(received));
                }
            }
            // The error queue has told of it.
            Err(DatagramError::Pending) => self.ask_on(cx, id, |a| a.server() == Some(server)),
            Err(_) => {
                cx.refuse(Refusal::HostSocket);
                self.remove(cx, id);
            }
        }
    }

    /// A server has sent something.
    fn on_datagram(&mut self, cx: &mut Context<'_>, id: SlotId, server: SocketAddr, bytes: &[u8]) {
        let Some(flow) = self.flows.get_mut(id) else { return };
        let key = (flow.guest, flow.peer);
        let Some(at) = flow.answered_by(bytes) else {
            if flow.is_opaque {
                flow.count_in(bytes.len(), cx.now);
                return self.deliver(cx, key, bytes);
            }
            return self.on_stranger(cx, id);
        };
        self.failed.remove(server);
        flow.count_in(bytes.len(), cx.now);
        let Some(asked) = flow.asked.get_mut(at) else { return };
        let has_failed = message::code(bytes).is_none_or(Code::is_failure_of_server);
        if has_failed && asked.has_more_servers() {
            asked.failure = Some(bytes.into());
            // The guest gets this answer in any case.
            let _ = self.ask_next(cx, id, at);
            return;
        }
        flow.late = (flow.late + asked.next.saturating_sub(1)).min(MOST_LATE);
        let asked = flow.asked.remove(at);
        if key == given::OWN {
            return self.on_own_answer(cx, &asked.question, Some(bytes));
        }
        if cx.settings.policy.reads_names() && !cx.settings.names.are_given() {
            let addresses = message::addresses(bytes, &asked.question);
            cx.settings.policy.learn(&asked.question.name, &addresses);
        }
        self.answer(cx, key, &asked.guest_ids, bytes);
    }

    /// Drops a datagram that answers no question. If too many of them arrive, no question stays outstanding: the guest
    /// asks again, with other identifiers.
    fn on_stranger(&mut self, cx: &mut Context<'_>, id: SlotId) {
        cx.refuse(Refusal::DnsAnswer);
        let Some(flow) = self.flows.get_mut(id) else { return };
        if flow.late > 0 {
            flow.late -= 1;
            return;
        }
        if flow.asked.is_empty() || !self.guesses.count(cx.now) {
            return;
        }
        let ids: Vec<SlotId> = self.flows.iter().map(|(id, _)| id).collect();
        for id in ids {
            let Some(flow) = self.flows.get_mut(id) else { continue };
            let is_own = (flow.guest, flow.peer) == given::OWN;
            let asked = std::mem::take(&mut flow.asked);
            // The gateway does not repeat its own questions; their look-ups fail at once.
            for asked in asked.iter().filter(|_| is_own) {
                self.on_own_answer(cx, &asked.question, None);
            }
        }
    }

    /// Reads the error queue of a server's socket.
    fn take_errors(
        &mut self,
        cx: &mut Context<'_>,
        id: SlotId,
        server: SocketAddr,
        batch: &mut Batch,
    ) {
        for _ in 0..ERRORS_PER_TURN {
            let Some(flow) = self.flows.get(id) else { return };
            let Some(fd) = flow.socket_to(server) else { return };
            let Some((said, quoted)) = batch.receive_error(fd.as_fd()) else { return };
            if matches!(said.error, None | Some(SentError::TooBig { .. })) {
                continue;
            }
            let of = message::id(quoted);
            let is_meant =
                |a: &flow::Asked| a.server() == Some(server) && of.is_none_or(|of| of == a.id);
            let is_last = |a: &flow::Asked| !a.has_more_servers() && a.failure.is_none();
            let last = flow.asked.iter().find(|a| is_meant(a) && is_last(a));
            if last.is_some() || flow.is_opaque {
                let payload = last.map_or(quoted, |a| &a.message);
                let about = InvokingPacket::datagram(flow.guest, flow.peer, payload, payload.len());
                if (flow.guest, flow.peer) != given::OWN {
                    cx.pass_error(&about, &said, server.ip());
                }
                self.failed.add(server, cx.now);
            }
            self.ask_on(cx, id, is_meant);
        }
    }

    /// Sends the guest an answer to its questions with these identifiers.
    fn answer(&mut self, cx: &mut Context<'_>, key: Key, guest_ids: &[u16], bytes: &[u8]) {
        let mut answer = bytes.to_vec();
        for guest_id in guest_ids {
            if let Some(id) = answer.get_mut(..2) {
                id.copy_from_slice(&guest_id.to_be_bytes());
            }
            self.deliver(cx, key, &answer);
        }
    }

    fn deliver(&mut self, cx: &mut Context<'_>, key: Key, bytes: &[u8]) {
        if streams::is_stream(key) {
            return self.deliver_on_stream(cx, key, bytes);
        }
        let (guest, peer) = key;
        let Some(socket) = self.socket else { return };
        let message = [SendMessage::new(bytes).to(guest).from(peer)];
        match cx.stack.udp().send_many(cx.now, socket, &message, PendingError::Return) {
            Ok(Poll::Ready(done)) if done.messages > 0 => {
                cx.totals.datagrams_in += 1;
                cx.totals.bytes_in += bytes.len() as u64;
            }
            _ => cx.refuse(Refusal::NoBuffer),
        }
    }

    fn set_timer(&mut self, id: SlotId) {
        if let (Some(flow), Some(timers)) = (self.flows.get_mut(id), &mut self.timers) {
            flow.timer = Some(timers.schedule(flow.timer, id, flow.next_deadline()));
        }
    }

    /// Ends the flow that was used least recently, as far as [`LOOKED_AT`] entries tell.
    fn displace(&mut self, cx: &mut Context<'_>) {
        for look in 0..=LOOKED_AT {
            let Some((seen, id)) = self.order.pop_front() else { return };
            let Some(flow) = self.flows.get(id) else { continue };
            if flow.moved > seen && look < LOOKED_AT {
                self.order.push_back((cx.now, id));
                continue;
            }
            cx.refuse(Refusal::Displaced);
            return self.remove(cx, id);
        }
    }

    fn remove(&mut self, cx: &mut Context<'_>, id: SlotId) {
        let Some(flow) = self.flows.remove(id) else { return };
        self.by_key.remove(&(flow.guest, flow.peer));
        if let (Some(timer), Some(timers)) = (flow.timer, &mut self.timers) {
            timers.cancel(timer);
        }
        if (flow.guest, flow.peer) != given::OWN {
            cx.settings.policy.ended(|| flow.stat(cx.now));
        }
        // Bounds the entries of flows that have ended.
        if self.order.len() > 2 * self.flows.len() + 64 {
            self.order.retain(|(_, id)| self.flows.get(*id).is_some());
        }
    }
}

/// The question alone where names are read, since options and further records could carry data out; the message as it is
/// elsewhere. `None`: names are read, and the message is not a plain question.
fn without_extras<'a>(
    cx: &mut Context<'_>,
    bytes: &'a [u8],
    is_question: bool,
) -> Option<Cow<'a, [u8]>> {
    let is_given = cx.settings.names.are_given();
    let reads_names = cx.settings.policy.reads_names();
    let plain = if is_given || reads_names { messages::plain(bytes) } else { None };
    let may_hide = |cx: &mut Context<'_>| {
        !reads_names || cx.settings.policy.decide_name(None) == Decision::Allow
    };
    match plain {
        Some(plain) => Some(plain.into()),
        None if is_given || is_question && !may_hide(cx) => None,
        None => Some(bytes.into()),
    }
}

/// The server that was asked last is asked again.
fn asked_again(flow: &mut Flow, at: usize) {
    if let Some(asked) = flow.asked.get_mut(at) {
        asked.next = asked.next.saturating_sub(1);
    }
}

/// Counts a message that the host did not send, and sends the guest an ICMP error.
fn could_not_send(cx: &mut Context<'_>, key: Key, bytes: &[u8], errno: Errno) {
    let (failure, why) = host_socket::failure_of(errno);
    cx.refuse(why);
    report(cx, key, bytes, failure);
}

/// Sends the guest the ICMP error about its message.
fn report(cx: &mut Context<'_>, (guest, peer): Key, bytes: &[u8], failure: Failure) {
    let Some(error) = failure.error(peer.is_ipv4()) else { return };
    let about = InvokingPacket::datagram(guest, peer, bytes, bytes.len());
    cx.stack.icmp().send_error(cx.now, &about, error, None);
}
