//! Datagrams that come to the socket of a guest's port.

use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;

use fulmar_stack::base::{SlotId, Stage};

use super::super::datagrams::{Batch, Received};
use super::super::host_socket::DatagramError;
use super::super::{Context, Endpoints, canonical};
use super::first_bytes::FirstBytes;
use super::flow::{Flow, HostSocket, STREAM_TIMEOUT};
use super::{Run, Udp, deliver};
use crate::config::UdpFilter;
use crate::policy::Protocol;
use crate::stat::{Direction, Refusal};

/// Errors in a row that are not about a datagram, such as refusals by a security module, after which the port closes.
const MOST_FAILURES: usize = 16;

impl Udp {
    /// Receives from the socket of a port and sends it to the guest. True: there may be more.
    pub(super) fn receive(&mut self, cx: &mut Context<'_>, batch: &mut Batch, id: SlotId) -> bool {
        let turn = self.turn;
        let Some(port) = self.ports.get_mut(id) else { return false };
        // An answer usually arrives alone, so a second call would find nothing. Remaining datagrams make the socket
        // ready again.
        let is_burst = port.last_receive_turn + 1 >= turn;
        port.last_receive_turn = turn;
        let filled = batch.fill_up_to(port.as_fd(), if is_burst { usize::MAX } else { 1 });
        cx.stack.pass(Stage::HostReceived);
        match filled {
            Ok(has_more) => {
                port.failures = 0;
                self.send_batch(cx, batch, id);
                has_more && is_burst
            }
            Err(error) => {
                self.receive_failed(cx, batch, id, error);
                false
            }
        }
    }

    /// Sends the batch to the guest, what came from one peer in a row with one call.
    fn send_batch(&mut self, cx: &mut Context<'_>, batch: &Batch, id: SlotId) {
        for of_peer in batch.list().chunk_by(|a, b| a.from == b.from) {
            let from = of_peer.first().and_then(|received| received.from);
            let flow = from.and_then(|from| self.flow_of(cx, id, from));
            match flow {
                Some(flow) => self.send_to_guest(cx, flow, batch, of_peer),
                None => cx.totals.refusals.add(Refusal::Unsolicited, of_peer.len() as u64),
            }
        }
    }

    /// The flow of a datagram that came to a port; begins it where the sender may write to the guest unasked.
    fn flow_of(&mut self, cx: &mut Context<'_>, id: SlotId, from: SocketAddr) -> Option<SlotId> {
        let port = self.ports.get(id)?;
        let found = self.flows.find_host((port.socket.as_raw_fd(), from, None));
        found.or_else(|| self.admit(cx, id, from))
    }

    /// Begins the flow of a host that writes to a port of the guest: one to which the guest could have written.
    fn admit(&mut self, cx: &mut Context<'_>, id: SlotId, from: SocketAddr) -> Option<SlotId> {
        let port = self.ports.get(id)?;
        let (guest, socket) = (port.key.guest, Arc::clone(&port.socket));
        let written_to = self.flows.name_of((socket.as_raw_fd(), from.ip()));
        let seen = match (written_to, cx.settings.udp_filter) {
            (Some(name), _) => name,
            (None, UdpFilter::None) => cx.settings.translated(canonical(from).ip())?,
            (None, UdpFilter::Address) => return None,
        };
        let seen = SocketAddr::new(seen, from.port());
        let is_named = cx.settings.mapping.target(seen).map(canonical) == Some(canonical(from));
        // Datagrams to a removed port do not keep it open.
        let is_used = cx.now.since(port.sent_at) < STREAM_TIMEOUT;
        if !is_named || !is_used || self.flows.find((guest, seen)).is_some() {
            return None;
        }
        let (mut grant, names) = cx.decide_now(Protocol::Udp, guest, seen, from).grant()?;
        grant.enter(Protocol::Udp, []).ok()?;
        let ends = Endpoints { guest, peer: seen, host: from };
        let host = HostSocket { fd: socket, local: None, port: Some(id) };
        self.ports.get_mut(id)?.flows += 1;
        let mut flow = Flow::new(host, Direction::In, ends, cx.now);
        flow.grant = grant;
        // What the guest answers must not ask for another name.
        if let Some(names) = names {
            let expected = names.expected(seen.port(), cx.settings.encrypted_hello);
            flow.first_bytes = Some(FirstBytes::new(expected));
            flow.name = names.allowed.into_iter().next();
        }
        Some(self.add(cx, flow))
    }

    fn receive_failed(
        &mut self,
        cx: &mut Context<'_>,
        batch: &mut Batch,
        id: SlotId,
        error: DatagramError,
    ) {
        let Some(port) = self.ports.get(id) else { return };
        let socket = Arc::clone(&port.socket);
        let passed = self.pass_errors(cx, batch, &socket);
        let Some(port) = self.ports.get_mut(id) else { return };
        port.failures = if passed > 0 { 0 } else { port.failures + 1 };
        if error == DatagramError::Broken || port.failures >= MOST_FAILURES {
            let flows = self.flows.iter().filter(|(_, flow)| flow.host.port == Some(id));
            let ids: Vec<SlotId> = flows.map(|(id, _)| id).collect();
            for id in ids {
                cx.refuse(Refusal::HostSocket);
                self.remove(cx, id);
            }
        }
    }

    /// Sends datagrams of the batch to the guest.
    pub(super) fn send_to_guest(
        &mut self,
        cx: &mut Context<'_>,
        id: SlotId,
        batch: &Batch,
        list: &[Received],
    ) {
        let (Some(flow), Some(socket)) = (self.flows.get_mut(id), self.socket) else { return };
        let runs: Vec<Run<'_>> = list.iter().map(|r| (batch.bytes(r), r.segment_bytes)).collect();
        deliver(cx, socket, flow, &runs);
        self.flows.touched(id, cx.now);
    }
}
