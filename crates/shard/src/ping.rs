//! Sockets for echo requests: their calls, and the input of replies and errors.

use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use core::net::SocketAddr;

use fulmar_base::{DropReason, Instant, Probe, SlotId, zone_of};
use fulmar_ip::{EchoId, EchoReply, ErrorKind, QuotedError};
use fulmar_mbuf::{Pool, Purpose};
use fulmar_socket::{SocketError, Step};

use crate::layers::Core;
use crate::net::Net;
use crate::shard::Shard;
use crate::slab::Slab;
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
    ///
    /// # Errors
    /// A device that is gone, too many sockets, or no identifier left.
    pub fn ping_open(&mut self) -> Result<SlotId, SocketError> {
        self.core.check_usable()?;
        if self.ping.idents.len() > usize::from(u16::MAX) {
            return Err(SocketError::AddressNotAvailable);
        }
        // Of 65,536 identifiers a few are in use.
        let mut ident = self.core.secret.echo_ident();
        while self.ping.idents.contains_key(&ident) {
            ident = ident.wrapping_add(1);
        }
        let id = self.core.sockets.insert(Socket::Ping(Box::new(PingEntry::new(ident))));
        self.ping.idents.insert(ident, id);
        Ok(id)
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
        let echo = EchoId { ident, seq };
        let sent = self.core.net.with_ip(now, |ip, cx| ip.echo_request(cx, to, echo, payload));
        sent.map_err(|_| SocketError::HostUnreachable)?;
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
}

impl Ping {
    /// Closes a socket for echo requests.
    pub fn close<P: Probe>(&mut self, id: SlotId, core: &mut Core<P>) {
        let Some(Socket::Ping(mut ping)) = core.sockets.remove(id) else { return };
        self.idents.remove(&ping.ident);
        while let Some(echo) = ping.receive() {
            free_echo(echo, &mut core.net.pool);
        }
    }

    /// An answer of a peer.
    pub fn input<P: Probe>(&self, r: EchoReply, core: &mut Core<P>) {
        let EchoReply { ident, from, seq, hop_limit, payload } = r;
        self.deliver(ident, Echo { from, seq, hop_limit, outcome: Ok(payload) }, core);
    }

    /// An ICMP error about an echo request of ours; one that was not sent lately is dropped.
    pub fn icmp_error<P: Probe>(&self, now: Instant, e: QuotedError, core: &mut Core<P>) {
        let (ident, seq, to) = (e.local.port(), e.seq as u16, e.remote.ip());
        let ping = self.find(ident, &mut core.sockets);
        let is_ours = ping.is_some_and(|(_, p)| p.sent.contains(&(to, seq)));
        if !is_ours {
            return core.net.counters.drop_packet(DropReason::IcmpNoFlow);
        }
        let error = match e.kind {
            ErrorKind::TooBig { mtu } => {
                core.net.ip.lower_datagram_mtu(now, to, mtu);
                SocketError::MessageTooLong
            }
            _ => SocketError::HostUnreachable,
        };
        self.deliver(ident, Echo { from: to, seq, hop_limit: 0, outcome: Err(error) }, core);
    }

    fn find<'a>(
        &self,
        ident: u16,
        sockets: &'a mut Slab<Socket>,
    ) -> Option<(SlotId, &'a mut PingEntry)> {
        let id = *self.idents.get(&ident)?;
        match sockets.get_mut(id) {
            Some(Socket::Ping(p)) => Some((id, p)),
            _ => None,
        }
    }

    fn deliver<P: Probe>(&self, ident: u16, echo: Echo, core: &mut Core<P>) {
        let Net { pool, counters, .. } = &mut core.net;
        let share = pool.share_of(Purpose::Receive);
        let Some((id, ping)) = self.find(ident, &mut core.sockets) else {
            counters.drop_packet(DropReason::IcmpNoFlow);
            return free_echo(echo, pool);
        };
        if let Err(refused) = ping.keep(echo, share) {
            counters.drop_packet(DropReason::EchoBufferFull);
            return free_echo(refused, pool);
        }
        while let Some(surplus) = ping.pop_surplus() {
            counters.drop_packet(DropReason::EchoBufferFull);
            free_echo(surplus, pool);
        }
        core.notify(id);
    }
}

fn free_echo(echo: Echo, pool: &mut Pool) {
    if let Ok(chain) = echo.outcome {
        pool.free(chain);
    }
}
