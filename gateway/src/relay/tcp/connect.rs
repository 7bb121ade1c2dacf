//! From a guest's SYN to the connection: the way, the connect to the host or to one of a name's addresses, the tunnel
//! through a proxy, and the answer to the SYN.

use std::sync::Arc;

use fulmar_stack::base::SlotId;
use fulmar_stack::ip::SentError;
use fulmar_stack::shard::{Decision, Pending, PendingId};
use nix::sys::epoll::EpollFlags;
use smallvec::smallvec;

use super::super::host_socket::{self, Begun, Failure};
use super::super::poll::Token;
use super::super::way::{Candidate, Candidates, Grant, NotCarried, Way};
use super::super::{Context, Endpoints, canonical};
use super::Tcp;
use super::first_bytes::FirstBytes;
use super::flow::{Flow, Guest, Side};
use super::race::{self, Race, Standing};
use super::tunnel::{Stands, Tunnel};
use crate::policy::Protocol;
use crate::stat::{Direction, Refusal};

impl Tcp {
    /// Begins the connection to the host that a SYN asks for.
    pub(super) fn begin(&mut self, cx: &mut Context<'_>, syn: &Pending) -> Result<(), NotCarried> {
        let (from, to) = (syn.remote, canonical(syn.local));
        if !cx.settings.carries.tcp {
            return Err((Failure::Refused, Refusal::Forbidden).into());
        }
        if self.is_full(cx, Direction::Out) {
            return Err((Failure::Silence, Refusal::FlowLimit).into());
        }
        let (mut candidates, names, tunnel) = match cx.way(Protocol::Tcp, from, to) {
            Way::To(candidates, names) => (candidates, names, None),
            Way::Through(target, grant, names) => {
                let Some(upstream) = &cx.settings.upstream else {
                    return Err((Failure::Refused, Refusal::Upstream).into());
                };
                let tunnel = Tunnel::new(upstream, target);
                (smallvec![Candidate { to: upstream.address, grant }], names, Some(tunnel))
            }
            Way::LookUp(name) => return self.await_name(cx, name, syn),
            Way::Undecided => return self.undecided.add(cx.now, *syn),
            Way::Refused(why) => return Err(why),
        };
        if self.connecting >= cx.settings.limits.connecting {
            self.displace_unanswered(cx);
        }
        candidates.reverse();
        let (begun, Candidate { to: leads_to, grant }) = begin_with_first(cx, &mut candidates)?;
        let ends = Endpoints { guest: from, peer: to, host: leads_to };
        let guest = Guest::Pending(syn.id);
        let mut flow = Flow::new(guest, begun.stream, Direction::Out, ends, cx.now);
        flow.race = Race::new(candidates);
        flow.tunnel = tunnel;
        flow.grant = grant;
        if let Some(names) = names {
            let expected = names.expected(to.port(), cx.settings.encrypted_hello);
            flow.first_bytes = Some(FirstBytes::new(expected));
            flow.name = names.allowed.into_iter().next();
        }
        let has_race = flow.race.is_some();
        let id = self.add(cx, flow)?;
        self.connecting += 1;
        self.unanswered.push_back(id);
        if has_race {
            self.delays.push(cx.now, id);
        }
        if begun.is_connected {
            self.established(cx, id, syn.id);
        }
        Ok(())
    }

    /// Lets a SYN wait until its name was looked up.
    fn await_name(
        &mut self,
        cx: &mut Context<'_>,
        name: Arc<str>,
        syn: &Pending,
    ) -> Result<(), NotCarried> {
        if self.awaited >= cx.settings.limits.connecting {
            return Err((Failure::Silence, Refusal::ConnectingLimit).into());
        }
        self.awaited += 1;
        self.awaiting.entry(Arc::clone(&name)).or_default().push(*syn);
        cx.wanted.push(name);
        Ok(())
    }

    /// A name was looked up: the SYNs that wait for it go on.
    pub(crate) fn name_known(&mut self, cx: &mut Context<'_>, name: &str) {
        let waiting = self.awaiting.remove(name).unwrap_or_default();
        self.awaited -= waiting.len();
        for syn in waiting {
            let begun = match cx.settings.names.known(name, cx.now) {
                Some(_) => self.begin(cx, &syn),
                None => Err((Failure::NoHost, Refusal::NameFailed).into()),
            };
            if let Err(why) = begun {
                refuse_syn(cx, &syn, &why);
            }
        }
    }

    /// Tries the next addresses of names whose earlier ones have been silent.
    pub(super) fn try_next(&mut self, cx: &mut Context<'_>) {
        // An attempt beside the first has a descriptor, too: all attempts stay within the limit of connecting flows.
        let has_place = self.connecting * race::MOST_ATTEMPTS <= cx.settings.limits.connecting;
        while let Some(id) = self.delays.pop(cx.now) {
            let Some(flow) = self.flows.get_mut(id) else { continue };
            let Some(race) = flow.race.as_mut() else { continue };
            while has_place && let Some(mut next) = race.next() {
                let grants = race.grants().chain([&flow.grant]);
                let Ok(begun) = begin_attempt(cx, &mut next, grants) else { continue };
                if cx.poll.add_edges(&begun.stream, Token::Tcp(id)).is_ok() {
                    race.add(begun.stream, next);
                    break;
                }
            }
            if race.has_left() {
                self.delays.push(cx.now, id);
            }
        }
    }

    /// Takes the attempt of a race that has connected; begins the next one where all have failed. `None`: it goes on.
    ///
    /// # Errors
    /// No attempt is left.
    pub(super) fn settle_race(
        &mut self,
        cx: &mut Context<'_>,
        id: SlotId,
    ) -> Option<Result<(), NotCarried>> {
        let flow = self.flows.get_mut(id)?;
        let race = flow.race.as_mut()?;
        let mut standing = race.settle(&mut (&mut flow.host, &mut flow.host_addr, &mut flow.grant));
        let mut failed = None;
        while let Standing::Failed(errno) = standing {
            let failure = || NotCarried::from(host_socket::failure_of(errno)).by(&flow.grant);
            failed.get_or_insert_with(failure);
            let Some(mut next) = race.next() else { break };
            match begin_attempt(cx, &mut next, [&flow.grant]) {
                Err(why) => failed = Some(why),
                Ok(begun) => {
                    if cx.poll.add_edges(&begun.stream, Token::Tcp(id)).is_ok() {
                        standing =
                            if begun.is_connected { Standing::Connected } else { Standing::Waits };
                        (flow.host, flow.host_addr) = (begun.stream, next.to);
                        flow.grant = next.grant;
                    }
                }
            }
        }
        // An edge does not say which attempt it is of, and the winner's may have come already.
        let is_connected = standing == Standing::Connected;
        flow.host_side = Side { writable: is_connected, ..Side::default() };
        if is_connected {
            flow.host_side.readable = cx.poll.repeat_edges(&flow.host, Token::Tcp(id)).is_err();
        }
        let outcome = match (standing, failed) {
            (Standing::Waits, _) => return None,
            (Standing::Failed(_), Some(why)) => Err(why),
            _ => Ok(()),
        };
        flow.race = None;
        Some(outcome)
    }

    /// The connect to the host has succeeded or failed.
    pub(super) fn host_answered(
        &mut self,
        cx: &mut Context<'_>,
        id: SlotId,
        pending: PendingId,
        flags: EpollFlags,
    ) {
        let Some(flow) = self.flows.get(id) else { return };
        // A connection that failed shows EPOLLERR.
        let has_failed = flags.intersects(EpollFlags::EPOLLERR | EpollFlags::EPOLLHUP);
        let outcome = if has_failed { host_socket::outcome(&flow.host) } else { Ok(()) };
        match outcome {
            Ok(()) if flow.host_side.writable => self.established(cx, id, pending),
            Ok(()) => {}
            Err(errno) => {
                let why = flow.not_carried(host_socket::failure_of(errno));
                self.give_up(cx, id, pending, &why);
            }
        }
    }

    /// A race has a winner, or no attempt is left.
    pub(super) fn race_ended(
        &mut self,
        cx: &mut Context<'_>,
        id: SlotId,
        pending: PendingId,
        outcome: Result<(), NotCarried>,
    ) {
        match outcome {
            Ok(()) => self.established(cx, id, pending),
            Err(why) => self.give_up(cx, id, pending, &why),
        }
    }

    /// Refuses the SYN of a flow that has begun, and removes the flow.
    fn give_up(&mut self, cx: &mut Context<'_>, id: SlotId, pending: PendingId, why: &NotCarried) {
        let Some(flow) = self.remove(id) else { return };
        cx.refuse_flow(Protocol::Tcp, (flow.guest_addr, flow.peer_addr), why);
        decide_failure(cx, pending, flow.peer_addr.is_ipv4(), why.failure);
    }

    /// The host's socket is connected; where that is to a proxy, the tunnel is opened next.
    fn established(&mut self, cx: &mut Context<'_>, id: SlotId, pending: PendingId) {
        let Some(flow) = self.flows.get_mut(id) else { return };
        match flow.tunnel.as_mut().map_or(Stands::Open, |tunnel| tunnel.advance(&flow.host)) {
            Stands::Waits => {}
            Stands::Open => {
                // The destination may have spoken already, behind the proxy's answer.
                flow.host_side.readable |= flow.tunnel.take().is_some();
                self.host_connected(cx, id, pending);
            }
            Stands::Refused => {
                let why = flow.not_carried((Failure::Refused, Refusal::Upstream));
                self.give_up(cx, id, pending, &why);
            }
        }
    }

    fn host_connected(&mut self, cx: &mut Context<'_>, id: SlotId, pending: PendingId) {
        let decided = cx.stack.tcp_decide(cx.now, pending, Decision::Accept);
        let Ok(Some(socket)) = decided else {
            let Some(flow) = self.flows.get(id) else { return };
            // Where it is still pending its repeated SYN would be absorbed.
            let why = flow.not_carried((Failure::Silence, Refusal::GivenUp));
            return self.give_up(cx, id, pending, &why);
        };
        self.connecting = self.connecting.saturating_sub(1);
        if let Some(flow) = self.flows.get_mut(id) {
            (flow.guest, flow.race) = (Guest::Open(socket), None);
        }
        self.count_stream(cx.now, id);
        self.adopt(cx, id, socket);
        self.tell_begin(cx, id);
    }
}

/// Whether a connection is for DNS and ends in the gateway, since names have addresses of their own.
pub(super) fn is_to_resolver(cx: &Context<'_>, syn: &Pending) -> bool {
    let to = canonical(syn.local);
    cx.settings.names.are_given()
        && cx.settings.mapping.is_dns(to)
        && !cx.settings.mapping.servers(to).is_empty()
}

pub(super) fn accept_for_dns(cx: &mut Context<'_>, syn: &Pending) {
    // It may have been reset meanwhile.
    if let Ok(Some(socket)) = cx.stack.tcp_decide(cx.now, syn.id, Decision::Accept) {
        cx.to_dns.push((socket, syn.remote, canonical(syn.local)));
    }
}

/// Begins a connection to an address, within the bounds of its rule. `others`: the grants of the flow's other
/// attempts.
fn begin_attempt<'a>(
    cx: &Context<'_>,
    to: &mut Candidate,
    others: impl IntoIterator<Item = &'a Grant>,
) -> Result<Begun, NotCarried> {
    to.grant.enter(Protocol::Tcp, others)?;
    let failed = |errno| NotCarried::from(host_socket::failure_of(errno)).by(&to.grant);
    host_socket::begin_connection(to.to, &cx.settings.outbound).map_err(failed)
}

/// Takes the last address to which a connection can begin, and begins it.
fn begin_with_first(
    cx: &Context<'_>,
    candidates: &mut Candidates,
) -> Result<(Begun, Candidate), NotCarried> {
    let mut failed = (Failure::NoHost, Refusal::Unreachable).into();
    while let Some(mut next) = candidates.pop() {
        match begin_attempt(cx, &mut next, []) {
            Ok(begun) => return Ok((begun, next)),
            Err(why) => failed = why,
        }
    }
    Err(failed)
}

/// Refuses a SYN of the guest.
pub(super) fn refuse_syn(cx: &mut Context<'_>, syn: &Pending, why: &NotCarried) {
    cx.refuse_flow(Protocol::Tcp, (syn.remote, canonical(syn.local)), why);
    decide_failure(cx, syn.id, syn.local.is_ipv4(), why.failure);
}

/// Answers the guest's SYN after a failure.
pub(super) fn decide_failure(
    cx: &mut Context<'_>,
    pending: PendingId,
    is_v4: bool,
    failure: Failure,
) {
    let decision = match failure.error(is_v4) {
        Some(SentError::Unreachable { code }) => Decision::Unreachable(code),
        Some(_) => Decision::Refuse,
        None => Decision::Drop,
    };
    // It may have been reset meanwhile.
    let _ = cx.stack.tcp_decide(cx.now, pending, decision);
}
