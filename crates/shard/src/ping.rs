//! Echo requests: what their users ask of a shard, and the answers on their way up.

use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use core::net::SocketAddr;

use fulmar_base::{DropReason, Instant, Probe, SlotId, zone_of};
use fulmar_ip::{EchoId, EchoReply, ErrorKind, QuotedError};
use fulmar_mbuf::Purpose;
use fulmar_socket::{SocketError, Step};

use crate::net::{Net, Sink};
use crate::shard::Shard;
use crate::sockets::{Echo, PingEntry, Socket};

/// The sockets for echo requests, by their identifiers, and that for those of others.
#[derive(Default)]
pub struct Ping {
    pub idents: BTreeMap<u16, SlotId>,
    /// The socket that takes echo requests to addresses of other hosts.
    pub listener: Option<SlotId>,
}

impl<P: Probe> Shard<P> {
    /// Opens a socket for echo requests.
    pub fn ping_open(&mut self) -> SlotId {
        // Of 65,536 identifiers a few are in use.
        let mut ident = self.core.secret.echo_ident();
        while self.ping.idents.contains_key(&ident)
            && self.ping.idents.len() < usize::from(u16::MAX)
        {
            ident = ident.wrapping_add(1);
        }
        let id = self.core.sockets.insert(Socket::Ping(Box::new(PingEntry::new(ident))));
        self.ping.idents.insert(ident, id);
        id
    }

    /// Frees what a socket for echo requests has, which is out of the table.
    pub(crate) fn close_ping(&mut self, mut ping: PingEntry) {
        self.ping.idents.remove(&ping.ident);
        while let Some(echo) = ping.receive() {
            self.free_echo(echo);
        }
    }

    fn free_echo(&mut self, echo: Echo) {
        if let Ok(chain) = echo.outcome {
            self.core.net.pool.free(chain);
        }
    }

    /// The socket with this identifier.
    fn ping_of(&mut self, ident: u16) -> Option<(SlotId, &mut PingEntry)> {
        let id = *self.ping.idents.get(&ident)?;
        match self.core.sockets.get_mut(id) {
            Some(Socket::Ping(p)) => Some((id, p)),
            _ => None,
        }
    }

    /// Sends an echo request with `bytes` of payload.
    ///
    /// # Errors
    /// No route, too long, no buffer.
    pub fn ping_send(
        &mut self,
        now: Instant,
        id: SlotId,
        to: SocketAddr,
        seq: u16,
        bytes: &[u8],
    ) -> Result<(), SocketError> {
        let Some(Socket::Ping(p)) = self.core.sockets.get(id) else {
            return Err(SocketError::BadHandle);
        };
        let ident = p.ident;
        let route = self.core.net.ip.route(to.ip(), zone_of(to));
        route.map_err(|_| SocketError::NetworkUnreachable)?;
        if bytes.len() > fulmar_udp::max_payload(usize::MAX, to.ip()) {
            return Err(SocketError::MessageTooLong);
        }
        let payload = self.core.net.fill_datagram(id, core::iter::once(bytes), bytes.len())?;
        let Some(payload) = payload else { return Ok(()) };
        let Net { pool, counters, ip, link, probe, .. } = &mut self.core.net;
        link.set_now(now);
        let sink = &mut Sink { link, probe };
        ip.echo_request(now, pool, counters, to, EchoId { ident, seq }, payload, sink)
            .map_err(|_| SocketError::HostUnreachable)?;
        if let Some(Socket::Ping(p)) = self.core.sockets.get_mut(id) {
            p.note_sent(to.ip(), seq);
        }
        self.finish_datagrams(now);
        Ok(())
    }

    /// The next answer.
    ///
    /// # Errors
    /// [`SocketError::BadHandle`], [`SocketError::NetworkDown`].
    pub fn ping_receive(&mut self, id: SlotId) -> Result<Step<Echo>, SocketError> {
        let down = self.down();
        match self.core.sockets.get_mut(id) {
            Some(Socket::Ping(p)) => match p.receive() {
                Some(echo) => Ok(Step::Done(echo)),
                None => down.map_or(Ok(Step::WaitData(1)), Err),
            },
            _ => Err(SocketError::BadHandle),
        }
    }

    pub(crate) fn echo_reply(&mut self, r: EchoReply) {
        let (ident, from) = (r.ident, r.from);
        let echo = Echo { from, seq: r.seq, hop_limit: r.hop_limit, outcome: Ok(r.payload) };
        self.give_echo(ident, echo);
    }

    /// An ICMP error about an echo request of ours; one that was not sent lately is dropped.
    pub(crate) fn ping_error(&mut self, now: Instant, e: QuotedError) {
        let (ident, seq, to) = (e.local.port(), e.seq as u16, e.remote.ip());
        let is_ours = self.ping_of(ident).is_some_and(|(_, p)| p.sent.contains(&(to, seq)));
        if !is_ours {
            return self.core.net.counters.drop_packet(DropReason::IcmpNoFlow);
        }
        let error = match e.kind {
            ErrorKind::TooBig { mtu } => {
                self.core.net.ip.lower_datagram_mtu(now, to, mtu);
                SocketError::MessageTooLong
            }
            _ => SocketError::HostUnreachable,
        };
        self.give_echo(ident, Echo { from: to, seq, hop_limit: 0, outcome: Err(error) });
    }

    fn give_echo(&mut self, ident: u16, echo: Echo) {
        let share = self.core.net.pool.share_of(Purpose::Receive);
        let Some((id, ping)) = self.ping_of(ident) else {
            self.core.net.counters.drop_packet(DropReason::IcmpNoFlow);
            return self.free_echo(echo);
        };
        if let Err(refused) = ping.keep(echo, share) {
            self.core.net.counters.drop_packet(DropReason::EchoBufferFull);
            return self.free_echo(refused);
        }
        while let Some(surplus) = self.ping_of(ident).and_then(|(_, p)| p.pop_surplus()) {
            self.core.net.counters.drop_packet(DropReason::EchoBufferFull);
            self.free_echo(surplus);
        }
        self.notify(id);
    }
}
