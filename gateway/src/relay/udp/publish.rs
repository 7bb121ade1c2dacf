//! Published UDP ports: a flow for each client.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::slice;
use std::sync::Arc;

use fulmar_stack::base::SlotId;
use nix::sys::socket::{SockType, SockaddrStorage, getsockname, setsockopt, sockopt};

use super::super::datagrams::{Batch, Received};
use super::super::host_socket::DatagramError;
use super::super::poll::Token;
use super::super::published_sockets::open_bound;
use super::super::siblings::{ClientDatagrams, Message};
use super::super::{Context, Endpoints, canonical};
use super::flow::{Flow, HostSocket};
use super::table::HostKey;
use super::{Udp, deliver};
use crate::policy::Protocol;
use crate::ports::{Bind, Forward};
use crate::published::PublishedPort;
use crate::stat::{Direction, Refusal};

/// The lowest port that a client gets in place of its own: lower ports belong to services.
const LEAST_SUBSTITUTE: u16 = 1024;
/// Ports that are tried. The limit bounds the cost of each datagram of a client for which all ports are taken.
const TRIES: u64 = 64;

/// One of the ports that a client may get.
fn substitute_port(number: u64) -> u16 {
    LEAST_SUBSTITUTE + (number % u64::from(u16::MAX - LEAST_SUBSTITUTE + 1)) as u16
}

/// The control message that names the source address of a datagram.
pub(crate) fn packet_info(
    local: Option<IpAddr>,
) -> (Option<libc::in_pktinfo>, Option<libc::in6_pktinfo>) {
    match local {
        Some(IpAddr::V4(v4)) => {
            let any = libc::in_addr { s_addr: 0 };
            let own = libc::in_addr { s_addr: v4.to_bits().to_be() };
            (Some(libc::in_pktinfo { ipi_ifindex: 0, ipi_spec_dst: own, ipi_addr: any }), None)
        }
        Some(IpAddr::V6(v6)) => {
            let own = libc::in6_addr { s6_addr: v6.octets() };
            (None, Some(libc::in6_pktinfo { ipi6_addr: own, ipi6_ifindex: 0 }))
        }
        None => (None, None),
    }
}

impl Udp {
    /// Publishes a port. It is bound in the network namespace of the calling thread.
    ///
    /// # Errors
    /// As [`PublishedSockets::publish`](super::super::published_sockets::PublishedSockets::publish).
    pub(crate) fn publish(&mut self, cx: &mut Context<'_>, forward: &Forward) -> io::Result<()> {
        // A guest's port that had the number leaves by the published port from now on.
        self.release_port(cx, forward.from);
        let published = self.published.publish(cx, forward, Token::UdpListener, |at, settings| {
            let fd = open_bound(at, forward, SockType::Datagram, settings.bind_addresses)?;
            match at {
                SocketAddr::V4(_) => {
                    setsockopt(&fd, sockopt::Ipv4PacketInfo, &true)?;
                    setsockopt(&fd, sockopt::Ipv4RecvErr, &true)?;
                }
                SocketAddr::V6(_) => {
                    setsockopt(&fd, sockopt::Ipv6RecvPacketInfo, &true)?;
                    setsockopt(&fd, sockopt::Ipv6RecvErr, &true)?;
                }
            }
            let _ = setsockopt(&fd, sockopt::UdpGroSegment, &true);
            Ok(Arc::new(fd))
        });
        self.share_published(cx);
        published
    }

    /// Lets the flows of all queues leave by the published ports. One that is bound to an address or an interface does
    /// not lead everywhere.
    fn share_published(&self, cx: &mut Context<'_>) {
        let everywhere = self.published.iter().filter(|p| p.port.forward.bind == Bind::default());
        let sockets = everywhere.filter_map(|p| {
            let bound = getsockname::<SockaddrStorage>(p.socket.as_raw_fd()).ok()?;
            let is_v4 = bound.as_sockaddr_in().is_some();
            Some(((p.port.forward.to, is_v4), Arc::clone(&p.socket)))
        });
        cx.siblings.share_published(sockets.collect());
    }

    /// No longer publishes a port. Its flows end in all queues: they share its socket, and the port could not be bound
    /// again before.
    pub(crate) fn unpublish(&mut self, cx: &mut Context<'_>, forward: &Forward) {
        let sockets = self.published.unpublish(forward);
        self.share_published(cx);
        for socket in sockets.iter().map(AsRawFd::as_raw_fd) {
            self.end_flows_of(cx, socket);
            cx.siblings.end_flows_of(socket);
        }
    }

    /// Ends the flows of the socket of a published port.
    pub(crate) fn end_flows_of(&mut self, cx: &mut Context<'_>, socket: RawFd) {
        let is_of = |flow: &Flow| flow.is_published() && flow.host.fd.as_raw_fd() == socket;
        let of_socket = self.flows.iter().filter(|(_, flow)| is_of(flow));
        let ids: Vec<SlotId> = of_socket.map(|(id, _)| id).collect();
        ids.into_iter().for_each(|id| self.remove(cx, id));
    }

    /// Publishes nothing any more. A flow keeps the socket of its port.
    pub(crate) fn unpublish_all(&mut self, cx: &mut Context<'_>) {
        self.published.clear();
        self.share_published(cx);
    }

    /// Ends the flows of published ports, the last of which holds the socket of its port.
    pub(crate) fn end_published(&mut self, cx: &mut Context<'_>) {
        let of_ports = self.flows.iter().filter(|(_, flow)| flow.is_published());
        let ids: Vec<SlotId> = of_ports.map(|(id, _)| id).collect();
        ids.into_iter().for_each(|id| self.remove(cx, id));
    }

    /// The published ports, once for each of their sockets.
    pub(crate) fn ports(&self) -> impl Iterator<Item = &Arc<PublishedPort>> {
        self.published.ports()
    }

    /// Datagrams of clients wait at a published port. True: there may be more.
    pub(crate) fn take_published(
        &mut self,
        cx: &mut Context<'_>,
        batch: &mut Batch,
        id: SlotId,
    ) -> bool {
        let Some(published) = self.published.begin_turn(id) else { return false };
        let (socket, port) = (Arc::clone(&published.socket), Arc::clone(&published.port));
        let has_more = match batch.fill(socket.as_fd()) {
            Ok(has_more) => has_more,
            Err(DatagramError::Pending) => {
                self.pass_errors(cx, batch, &socket);
                return true;
            }
            Err(_) => return false,
        };
        for received in batch.list() {
            self.take_one(cx, &socket, &port, batch, received);
        }
        has_more
    }

    /// One of the batch: to its flow, here or on another queue.
    fn take_one(
        &mut self,
        cx: &mut Context<'_>,
        socket: &Arc<OwnedFd>,
        port: &Arc<PublishedPort>,
        batch: &Batch,
        received: &Received,
    ) {
        let Some(client) = received.from else { return };
        let own = || cx.settings.guest_address(client.is_ipv4());
        let guest = port.forward.to_address.or_else(own);
        let seen = cx.settings.translated(canonical(client).ip());
        let (Some(guest), Some(seen)) = (guest, seen) else {
            port.count_refused();
            return cx.refuse(Refusal::NoAnswerAddress);
        };
        let guest = SocketAddr::new(guest, port.forward.to);
        let seen = SocketAddr::new(seen, client.port());
        let arrival = |bytes: &[u8]| ClientDatagrams {
            port: Arc::clone(port),
            socket: Arc::clone(socket),
            local: received.to,
            client,
            guest,
            seen,
            bytes: bytes.to_vec(),
            segment_bytes: received.segment_bytes,
        };
        if let Some(owner) = cx.owner_of_port_elsewhere(guest) {
            let message = Message::Datagrams(arrival(batch.bytes(received)));
            if cx.siblings.post(owner, message).is_err() {
                port.count_refused();
                cx.refuse(Refusal::QueueBusy);
            }
            return;
        }
        if let Some(flow) = self.flow_of_client(cx, &arrival(&[])) {
            self.send_to_guest(cx, flow, batch, slice::from_ref(received));
        }
    }

    /// Sends the guest what another queue's thread received at a published port.
    pub(crate) fn take_client_datagrams(
        &mut self,
        cx: &mut Context<'_>,
        arrival: &ClientDatagrams,
    ) {
        let id = self.flow_of_client(cx, arrival);
        let (Some(id), Some(socket)) = (id, self.socket) else { return };
        let Some(flow) = self.flows.get_mut(id) else { return };
        deliver(cx, socket, flow, &[(&arrival.bytes, arrival.segment_bytes)]);
        self.flows.touched(id, cx.now);
    }

    /// The flow of a client, or of a peer to which the guest writes by the published port; begins it. Two clients may
    /// look alike to the guest: several addresses are translated to one, and a client may have the address of a peer
    /// that the guest has written to by another port. The second one gets another port.
    fn flow_of_client(&mut self, cx: &mut Context<'_>, a: &ClientDatagrams) -> Option<SlotId> {
        let key = (a.socket.as_raw_fd(), a.client, a.local);
        if let Some(id) = self.flows.find_host(key) {
            return Some(id);
        }
        // The guest's answers go to this address, which may be forged.
        if !cx.admits(Protocol::Udp, a.client) {
            a.port.count_refused();
            return None;
        }
        let is_taken = self.flows.find((a.guest, a.seen)).is_some();
        let seen = if is_taken { self.substitute(a, &key) } else { Some(a.seen) };
        let Some(seen) = seen else {
            a.port.count_refused();
            cx.refuse(Refusal::NoAnswerAddress);
            return None;
        };
        a.port.count_connection();
        let host = HostSocket { fd: Arc::clone(&a.socket), local: a.local, port: None };
        let ends = Endpoints { guest: a.guest, peer: seen, host: a.client };
        let flow = Flow::new(host, Direction::In, ends, cx.now);
        Some(self.add(cx, flow))
    }

    /// The address of a client with a port that no flow has.
    fn substitute(&self, a: &ClientDatagrams, key: &HostKey) -> Option<SocketAddr> {
        // By a keyed hash, so that a client cannot choose which ports are tried.
        let first = self.flows.hash(key);
        (0..TRIES).find_map(|n| {
            let seen = SocketAddr::new(a.seen.ip(), substitute_port(first.wrapping_add(n)));
            self.flows.find((a.guest, seen)).is_none().then_some(seen)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_number_leads_to_a_port_that_is_no_services() {
        let all: std::collections::HashSet<u16> = (0..70_000).map(substitute_port).collect();
        assert_eq!((all.len(), all.iter().min()), (65_536 - 1024, Some(&LEAST_SUBSTITUTE)));
        substitute_port(u64::MAX);
    }
}
