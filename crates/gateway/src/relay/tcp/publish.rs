//! Published TCP ports: connections that come from outside.
//!
//! The guest sees the client's own address. A client that the guest could not answer (the host's loopback, or the
//! address that host and guest share) appears as the address that stands for it, else as the guest's router, or where
//! that is link-local as an address of the guest's prefix.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use fulmar_base::{Duration, Instant, SlotId};
use fulmar_shard::Slab;
use fulmar_socket::{SocketError, Step};
use nix::sys::socket::{Backlog, SockType, SockaddrStorage, bind, listen, setsockopt, sockopt};

use super::super::host;
use super::super::poll::Owner;
use super::super::siblings::{Client, Message};
use super::super::{Context, canonical};
use super::flow::{Flow, Guest, Turn};
use super::{Tcp, is_shortage};
use crate::config::BindAddresses;
use crate::ports::Forward;
use crate::published::PublishedPort;
use crate::stat::{Direction, Refusal};

/// Connections that a port accepts in one turn.
const ACCEPTS_PER_TURN: usize = 64;
/// Connections that wait to be accepted, as Linux's net.core.somaxconn has it.
const BACKLOG: i32 = 4096;
/// A port that could not accept, for want of descriptors say, is asked again after this, or when a flow ends.
const RETRY: Duration = Duration::from_millis(100);

/// A socket that listens for a published port.
pub struct Published {
    listener: TcpListener,
    port: Arc<PublishedPort>,
}

/// The addresses at which a port is bound.
pub fn places(forward: &Forward, has: impl Fn(bool) -> bool) -> Vec<SocketAddr> {
    let any = |is_v4: bool| match is_v4 {
        true => SocketAddr::from(([0u8; 4], forward.from)),
        false => SocketAddr::from(([0u16; 8], forward.from)),
    };
    match forward.bind.address {
        Some(address) => vec![SocketAddr::new(address, forward.from)],
        None => [true, false].into_iter().filter(|v| has(*v)).map(any).collect(),
    }
}

/// A bound socket for a published port.
pub fn bound(
    at: SocketAddr,
    forward: &Forward,
    kind: SockType,
    addresses: BindAddresses,
) -> io::Result<OwnedFd> {
    let fd = host::open(at.is_ipv4(), kind, None)?;
    if kind == SockType::Stream {
        setsockopt(&fd, sockopt::ReuseAddr, &true)?;
    }
    if at.is_ipv6() {
        setsockopt(&fd, sockopt::Ipv6V6Only, &true)?;
    }
    if addresses == BindAddresses::Any {
        // Of IPv6 sockets, too (ip(7)).
        setsockopt(&fd, sockopt::IpFreebind, &true)?;
    }
    if let Some(interface) = &forward.bind.interface {
        setsockopt(&fd, sockopt::BindToDevice, &interface.into())?;
    }
    bind(fd.as_raw_fd(), &SockaddrStorage::from(at))?;
    Ok(fd)
}

/// Whether the host has no such IP version at all.
pub fn is_missing_version(e: &io::Error, forward: &Forward) -> bool {
    let lacks = matches!(e.raw_os_error(), Some(libc::EAFNOSUPPORT | libc::EADDRNOTAVAIL));
    lacks && forward.bind.address.is_none()
}

impl Tcp {
    /// Publishes a port. It is bound in the network namespace of the calling thread.
    pub fn publish(&mut self, cx: &mut Context<'_>, forward: &Forward) -> io::Result<()> {
        let port = Arc::new(PublishedPort::new(forward.clone()));
        for at in places(forward, |v4| cx.settings.guest_address(v4).is_some()) {
            match self.publish_at(cx, at, &port) {
                Err(e) if is_missing_version(&e, forward) => {}
                done => done?,
            }
        }
        Ok(())
    }

    fn publish_at(
        &mut self,
        cx: &mut Context<'_>,
        at: SocketAddr,
        port: &Arc<PublishedPort>,
    ) -> io::Result<()> {
        let fd = bound(at, &port.forward, SockType::Stream, cx.settings.bind_addresses)?;
        host::prepare(&fd);
        listen(&fd, Backlog::new(BACKLOG)?)?;
        let published = Published { listener: fd.into(), port: Arc::clone(port) };
        let id = self.published.insert(published);
        let Some(published) = self.published.get(id) else { return Ok(()) };
        cx.poll.add_arrivals(&published.listener, Owner::TcpListener(id))
    }

    /// No longer publishes a port; its connections stay.
    pub fn unpublish(&mut self, forward: &Forward) {
        let ids: Vec<SlotId> = self
            .published
            .iter()
            .filter(|(_, p)| p.port.forward == *forward)
            .map(|(id, _)| id)
            .collect();
        ids.into_iter().for_each(|id| drop(self.published.remove(id)));
    }

    /// Publishes nothing any more; the connections stay.
    pub fn unpublish_all(&mut self) {
        self.published = Slab::default();
    }

    /// The published ports, once for each of their sockets.
    pub fn ports(&self) -> impl Iterator<Item = &Arc<PublishedPort>> {
        self.published.iter().map(|(_, published)| &published.port)
    }

    /// Clients wait at a published port.
    pub fn accept(&mut self, cx: &mut Context<'_>, id: SlotId) {
        for _ in 0..ACCEPTS_PER_TURN {
            if self.flows.len() >= cx.settings.limits.tcp_flows {
                cx.refuse(Refusal::FlowLimit);
                return self.stall(cx, id);
            }
            if cx.siblings.is_busy() {
                return self.stall(cx, id);
            }
            let Some(published) = self.published.get(id) else { return };
            match published.listener.accept() {
                Ok((stream, from)) => {
                    let port = Arc::clone(&published.port);
                    self.came(cx, Client { stream, from: canonical(from), port });
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return,
                Err(e) if is_shortage(host::errno_of(&e)) => {
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

    /// A flow tries again later: no event says when the host's kernel has memory again.
    pub(super) fn starve(&mut self, cx: &Context<'_>, id: SlotId) {
        self.starved.insert(id);
        self.retry_at = self.retry_at.or(Some(cx.now + RETRY));
    }

    /// When published ports and flows that had to stop are tried again.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.retry_at
    }

    /// Goes on where the bound of a turn was reached, or where something was lacking a while ago.
    pub(super) fn go_on_accepting(&mut self, cx: &mut Context<'_>) {
        if self.retry_at.is_some_and(|at| at <= cx.now) {
            self.retry_stalled(cx);
        }
        for id in std::mem::take(&mut self.accepting) {
            self.accept(cx, id);
        }
    }

    /// Tries published ports and flows again that had to stop.
    pub fn retry_stalled(&mut self, cx: &mut Context<'_>) {
        self.retry_at = None;
        for id in std::mem::take(&mut self.starved) {
            self.queue(id);
        }
        for id in std::mem::take(&mut self.stalled) {
            self.accept(cx, id);
        }
    }

    /// A client came.
    fn came(&mut self, cx: &mut Context<'_>, client: Client) {
        let Client { stream, from, port } = client;
        port.count_connection();
        let stream = match &mut cx.settings.on_loopback {
            Some(take) if from.ip().is_loopback() => take(stream, &port),
            _ => Some(stream),
        };
        if let Some(stream) = stream {
            self.take_client(cx, Client { stream, from, port });
        }
    }

    /// Opens a client's connection to the guest, unless another queue has to.
    pub fn take_client(&mut self, cx: &mut Context<'_>, client: Client) {
        let port = Arc::clone(&client.port);
        if let Err(why) = self.open_to_guest(cx, client) {
            port.count_refused();
            cx.refuse(why);
        }
    }

    fn open_to_guest(&mut self, cx: &mut Context<'_>, client: Client) -> Result<(), Refusal> {
        let Client { stream: client, from, port } = client;
        client.set_nonblocking(true).map_err(|_| Refusal::HostSocket)?;
        let guest = cx.settings.guest_address(from.is_ipv4()).ok_or(Refusal::NoAnswerAddress)?;
        let seen = cx.settings.seen_as(from.ip()).ok_or(Refusal::NoAnswerAddress)?;
        let guest = SocketAddr::new(guest, port.forward.to);
        let seen = SocketAddr::new(seen, from.port());
        if let Some(owner) = cx.owner_elsewhere(guest, seen) {
            let client = Message::Client(Client { stream: client, from, port });
            return cx.siblings.leave(owner, client).map_err(|_| Refusal::QueueBusy);
        }
        if self.flows.len() >= cx.settings.limits.tcp_flows {
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
        let addresses = [guest, seen, from];
        let mut flow = Flow::new(Guest::Opening(socket), client, Direction::In, addresses, cx.now);
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

    /// The guest has answered a connection, or will not.
    pub(super) fn guest_answered(&mut self, cx: &mut Context<'_>, id: SlotId, socket: SlotId) {
        match cx.stack.tcp_connected(socket) {
            Ok(Step::Done(())) => {
                if let Some(flow) = self.flows.get_mut(id) {
                    flow.guest = Guest::Open(socket);
                }
                self.count_stream(cx.now, id);
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
