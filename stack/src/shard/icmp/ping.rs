//! Ping sockets: their calls, and the input of echo replies and of ICMP errors about echo requests.

use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use core::net::SocketAddr;
use core::task::Poll;

use crate::base::{DropReason, Instant, SlotId, zone_of};
use crate::ip::{EchoId, EchoReply, ErrorKind, QuotedError};
use crate::mbuf::{Pool, Purpose};
use crate::socket::SocketError;

use crate::shard::layers::Core;
use crate::shard::link::net::Net;
use crate::shard::slab::Slab;
use crate::shard::sockets::{Echo, PingEntry, Socket};
use crate::shard::world::Shard;

/// The ICMP sockets of a shard.
#[derive(Default)]
pub(crate) struct Ping {
    /// Ping sockets by the identifier of their echo requests.
    pub idents: BTreeMap<u16, SlotId>,
    /// The socket that receives echo requests to addresses of other hosts.
    pub listener: Option<SlotId>,
}

/// The calls of ICMP sockets: echo requests and their replies, echo requests of others, ICMP errors.
pub struct IcmpSockets<'a> {
    pub(crate) shard: &'a mut Shard,
}

impl Shard {
    /// ICMP sockets. In a stack of several shards they are on the first.
    pub fn icmp(&mut self) -> IcmpSockets<'_> {
        IcmpSockets { shard: self }
    }
}

impl IcmpSockets<'_> {
    /// Opens a ping socket, which has an identifier of its own.
    ///
    /// # Errors
    /// [`SocketError::NetworkDown`]; [`SocketError::NoBuffer`]: too many sockets;
    /// [`SocketError::AddressNotAvailable`]: no identifier is left.
    pub fn open(self) -> Result<SlotId, SocketError> {
        let Shard { core, ping, .. } = self.shard;
        core.check_usable()?;
        if ping.idents.len() > usize::from(u16::MAX) {
            return Err(SocketError::AddressNotAvailable);
        }
        // Of 65,536 identifiers a few are in use.
        let mut ident = core.secret.echo_ident();
        while ping.idents.contains_key(&ident) {
            ident = ident.wrapping_add(1);
        }
        let id = core.sockets.insert(Socket::Ping(Box::new(PingEntry::new(ident))));
        ping.idents.insert(ident, id);
        Ok(id)
    }

    /// Sends an echo request with `bytes` of payload.
    ///
    /// # Errors
    /// [`SocketError::BadHandle`]: `id` is not a ping socket. [`SocketError::NetworkUnreachable`];
    /// [`SocketError::MessageTooLong`]; [`SocketError::NoBuffer`]; [`SocketError::HostUnreachable`].
    pub fn send_request(
        self,
        now: Instant,
        id: SlotId,
        to: SocketAddr,
        seq: u16,
        bytes: &[u8],
    ) -> Result<(), SocketError> {
        let Core { net, sockets, .. } = &mut self.shard.core;
        let Some(Socket::Ping(p)) = sockets.get_mut(id) else {
            return Err(SocketError::BadHandle);
        };
        let route = net.ip.route(to.ip(), zone_of(to));
        route.map_err(|_| SocketError::NetworkUnreachable)?;
        if bytes.len() > crate::udp::max_payload(usize::MAX, to.ip()) {
            return Err(SocketError::MessageTooLong);
        }
        let payload = net.fill_datagram(core::iter::once(bytes), bytes.len())?;
        let echo = EchoId { ident: p.ident, seq };
        let sent = net.with_ip(now, |ip, cx| ip.echo_request(cx, to, echo, payload));
        sent.map_err(|_| SocketError::HostUnreachable)?;
        p.note_sent(to.ip(), seq);
        self.shard.finish_datagrams(now);
        Ok(())
    }

    /// Takes the oldest reply of a ping socket, or ICMP error about one of its requests.
    ///
    /// # Errors
    /// [`SocketError::BadHandle`], [`SocketError::NetworkDown`].
    pub fn receive_reply(self, id: SlotId) -> Result<Poll<Echo>, SocketError> {
        let down = self.shard.down();
        match self.shard.core.sockets.get_mut(id) {
            Some(Socket::Ping(p)) => match p.receive() {
                Some(echo) => Ok(Poll::Ready(echo)),
                None => down.map_or(Ok(Poll::Pending), Err),
            },
            _ => Err(SocketError::BadHandle),
        }
    }
}

impl Ping {
    /// Closes a ping socket.
    pub(crate) fn close(&mut self, id: SlotId, core: &mut Core) {
        let Some(Socket::Ping(mut ping)) = core.sockets.remove(id) else { return };
        self.idents.remove(&ping.ident);
        while let Some(echo) = ping.receive() {
            free_echo(echo, &mut core.net.pool);
        }
    }

    /// An echo reply.
    pub(crate) fn input(&self, r: EchoReply, core: &mut Core) {
        let EchoReply { ident, from, seq, hop_limit, payload } = r;
        self.deliver(ident, Echo { from, seq, hop_limit, outcome: Ok(payload) }, core);
    }

    /// An ICMP error about an echo request. Dropped unless the socket remembers the request.
    pub(crate) fn icmp_error(&self, now: Instant, e: QuotedError, core: &mut Core) {
        let (ident, seq, to) = (e.local.port(), e.seq as u16, e.remote.ip());
        let ping = self.find(ident, &mut core.sockets);
        let is_ours = ping.is_some_and(|(_, p)| p.sent.contains(&(to, seq)));
        if !is_ours {
            return core.net.counters.drop_packet(DropReason::IcmpNoFlow);
        }
        let error = match e.kind {
            // IPv4 routers may fragment our requests, and report nothing.
            ErrorKind::TooBig { .. } if to.is_ipv4() => {
                return core.net.counters.drop_packet(DropReason::IcmpNoFlow);
            }
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

    fn deliver(&self, ident: u16, echo: Echo, core: &mut Core) {
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
