//! Published TCP ports: connections that come from outside.
//!
//! The guest sees the client's own address. A client that the guest could not answer (the host's loopback, or the
//! address that host and guest share) appears under another source address: see
//! [`Settings::translated`](super::super::Settings::translated).

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::task::Poll;

use fulmar_stack::base::{Duration, Instant, SlotId};
use fulmar_stack::socket::SocketError;
use nix::sys::socket::{Backlog, SockType, listen};

use super::super::host_socket;
use super::super::poll::Token;
use super::super::published_sockets::open_bound;
use super::super::siblings::{Client, Message};
use super::super::{Context, Endpoints, canonical};
use super::Tcp;
use super::flow::{Flow, Guest, Turn};
use crate::policy::Protocol;
use crate::ports::Forward;
use crate::published::PublishedPort;
use crate::stat::{Direction, Refusal};

/// Connections that a port accepts in one turn.
const ACCEPTS_PER_TURN: usize = 64;
/// A port that could not accept (no descriptor, too many flows) is tried again after this, or when a flow ends.
const RETRY: Duration = Duration::from_millis(100);

impl Tcp {
    /// Publishes a port. It is bound in the network namespace of the calling thread.
    ///
    /// # Errors
    /// As [`PublishedSockets::publish`](super::super::published_sockets::PublishedSockets::publish).
    pub(crate) fn publish(&mut self, cx: &mut Context<'_>, forward: &Forward) -> io::Result<()> {
        self.published.publish(cx, forward, Token::TcpListener, |at, settings| {
            let fd = open_bound(at, forward, SockType::Stream, settings.bind_addresses)?;
            host_socket::set_stream_options(&fd);
            // As many as net.core.somaxconn allows. A C library may know a smaller limit.
            listen(&fd, Backlog::MAXALLOWABLE)?;
            Ok(fd.into())
        })
    }

    /// No longer publishes a port; its connections stay.
    pub(crate) fn unpublish(&mut self, forward: &Forward) {
        drop(self.published.unpublish(forward));
    }

    /// Publishes nothing any more; the connections stay.
    pub(crate) fn unpublish_all(&mut self) {
        self.published.clear();
    }

    /// The published ports, once for each of their sockets.
    pub(crate) fn ports(&self) -> impl Iterator<Item = &Arc<PublishedPort>> {
        self.published.ports()
    }

    /// Accepts the clients of a published port.
    pub(crate) fn accept(&mut self, cx: &mut Context<'_>, id: SlotId) {
        for _ in 0..ACCEPTS_PER_TURN {
            if self.is_full(cx, Direction::In) {
                cx.refuse(Refusal::FlowLimit);
                return self.stall(cx, id);
            }
            if cx.siblings.is_busy() {
                return self.stall(cx, id);
            }
            let Some(published) = self.published.get(id) else { return };
            match published.socket.accept() {
                Ok((stream, from)) => {
                    let port = Arc::clone(&published.port);
                    self.on_client(cx, Client { stream, from: canonical(from), port });
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return,
                Err(e) if host_socket::is_shortage(host_socket::errno_of(&e)) => {
                    cx.refuse(Refusal::Descriptors);
                    return self.stall(cx, id);
                }
                // The client has given up (ECONNABORTED), or another error of its own.
                Err(_) => {}
            }
        }
        // More may wait, and the edge is used up.
        self.accepting.insert(id);
    }

    fn stall(&mut self, cx: &Context<'_>, id: SlotId) {
        self.stalled.insert(id);
        self.retry_at = self.retry_at.or(Some(cx.now + RETRY));
    }

    /// Lets a flow try again after [`RETRY`]: no event tells that the host's kernel has memory again.
    pub(super) fn starve(&mut self, cx: &Context<'_>, id: SlotId) {
        self.starved.insert(id);
        self.retry_at = self.retry_at.or(Some(cx.now + RETRY));
    }

    /// When stalled ports and starved flows are tried again, or the next address of a name.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        let of_races = self.delays.next_deadline();
        let of_holds = self.holding.next_deadline();
        let of_rates = self.paced.keys().next().map(|(at, _)| *at);
        let of_policy = self.undecided.next_deadline();
        [self.retry_at, of_races, of_holds, of_rates, of_policy].into_iter().flatten().min()
    }

    /// Continues with ports that have used up their turn, and with what is due to be tried again.
    pub(super) fn go_on_accepting(&mut self, cx: &mut Context<'_>) {
        if self.retry_at.is_some_and(|at| at <= cx.now) {
            self.retry_stalled(cx);
        }
        for id in std::mem::take(&mut self.accepting) {
            self.accept(cx, id);
        }
    }

    /// Tries again the ports and flows that were stalled or starved.
    pub(crate) fn retry_stalled(&mut self, cx: &mut Context<'_>) {
        self.retry_at = None;
        for id in std::mem::take(&mut self.starved) {
            self.queue(id);
        }
        for id in std::mem::take(&mut self.stalled) {
            self.accept(cx, id);
        }
    }

    /// Counts a client that was accepted and takes it, unless it belongs to the splicer.
    fn on_client(&mut self, cx: &mut Context<'_>, client: Client) {
        let Client { stream, from, port } = client;
        port.count_connection();
        if !cx.admits(Protocol::Tcp, from) {
            return port.count_refused();
        }
        let stream = match &mut cx.settings.on_loopback {
            Some(take) if from.ip().is_loopback() => take(stream, &port),
            _ => Some(stream),
        };
        if let Some(stream) = stream {
            self.take_client(cx, Client { stream, from, port });
        }
    }

    /// Opens a client's connection to the guest, unless another queue has to.
    pub(crate) fn take_client(&mut self, cx: &mut Context<'_>, client: Client) {
        let port = Arc::clone(&client.port);
        if let Err(why) = self.open_to_guest(cx, client) {
            port.count_refused();
            cx.refuse(why);
        }
    }

    fn open_to_guest(&mut self, cx: &mut Context<'_>, client: Client) -> Result<(), Refusal> {
        let Client { stream: client, from, port } = client;
        client.set_nonblocking(true).map_err(|_| Refusal::HostSocket)?;
        let own = || cx.settings.guest_address(from.is_ipv4());
        let guest = port.forward.to_address.or_else(own).ok_or(Refusal::NoAnswerAddress)?;
        let seen = cx.settings.translated(from.ip()).ok_or(Refusal::NoAnswerAddress)?;
        let guest = SocketAddr::new(guest, port.forward.to);
        let seen = SocketAddr::new(seen, from.port());
        if let Some(owner) = cx.owner_elsewhere(guest, seen) {
            let client = Message::Client(Client { stream: client, from, port });
            return cx.siblings.post(owner, client).map_err(|_| Refusal::QueueBusy);
        }
        if self.is_full(cx, Direction::In) {
            return Err(Refusal::FlowLimit);
        }
        let any_port = SocketAddr::new(seen.ip(), 0);
        let opened = match cx.stack.tcp_connect(cx.now, guest, Some(seen)) {
            // Two clients that appear as one address may have the same port.
            Err(SocketError::AddressInUse | SocketError::AddressNotAvailable) => {
                cx.stack.tcp_connect(cx.now, guest, Some(any_port))
            }
            opened => opened,
        };
        let socket = opened.map_err(|_| Refusal::GuestRefused)?;
        let ends = Endpoints { guest, peer: seen, host: from };
        let mut flow = Flow::new(Guest::Opening(socket), client, Direction::In, ends, cx.now);
        flow.port = Some(port);
        match self.add(cx, flow) {
            Ok(id) => self.adopt(cx, id, socket),
            Err((_, why)) => {
                cx.stack.close(cx.now, socket);
                return Err(why);
            }
        }
        Ok(())
    }

    /// The connect to the guest has succeeded or failed.
    pub(super) fn guest_answered(&mut self, cx: &mut Context<'_>, id: SlotId, socket: SlotId) {
        match cx.stack.tcp_connected(socket) {
            Ok(Poll::Ready(())) => {
                if let Some(flow) = self.flows.get_mut(id) {
                    flow.guest = Guest::Open(socket);
                }
                self.count_stream(cx.now, id);
                self.tell_begin(cx, id);
                self.queue(id);
            }
            Ok(_) => {}
            Err(_) => {
                cx.refuse(Refusal::GuestRefused);
                if let Some(port) = self.flows.get(id).and_then(|flow| flow.port.as_ref()) {
                    port.count_refused();
                }
                self.end(cx, id, Turn::GuestFailed);
            }
        }
    }
}
