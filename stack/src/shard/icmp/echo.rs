//! Echo requests to addresses of other hosts, which a gateway answers in their name, and ICMP errors about
//! what the program has received.
//!
//! ```text
//!   Verdict::EchoRequest ──► queue of the echo listener ──► receive_request ──► program
//!                            (full: dropped)                                    │ send_reply, send_error
//!   Ip::send_echo_reply, Ip::send_error_about_packet ◄──────────────────────────┘
//! ```
//!
//! There is one echo listener, on the shard of the ping sockets. Without it such requests are dropped.

pub(crate) mod queue;

use alloc::boxed::Box;
use core::net::IpAddr;
use core::task::Poll;

use crate::base::{DropReason, Instant, SlotId};
use crate::ip::{EchoId, EchoRequest, InvokingPacket, SentError};
use crate::mbuf::Purpose;
use crate::socket::SocketError;

use crate::shard::icmp::ping::{IcmpSockets, Ping};
use crate::shard::layers::Core;
use crate::shard::link::net::Net;
use crate::shard::sockets::Socket;
use crate::shard::world::Shard;

impl IcmpSockets<'_> {
    /// Opens the echo listener: the socket that receives echo requests to addresses that are not the stack's own
    /// ([`StackConfig::any_ip`](crate::shard::StackConfig::any_ip)).
    ///
    /// # Errors
    /// [`SocketError::AddressInUse`]: there is one. [`SocketError::NoBuffer`]: too many sockets.
    pub fn listen(self) -> Result<SlotId, SocketError> {
        let Shard { core, ping, .. } = self.shard;
        core.check_usable()?;
        if ping.listener.is_some() {
            return Err(SocketError::AddressInUse);
        }
        let id = core.sockets.insert(Socket::EchoListener(Box::default()));
        ping.listener = Some(id);
        Ok(id)
    }

    /// Takes the oldest echo request. Free its payload with [`Shard::free`].
    ///
    /// # Errors
    /// [`SocketError::BadHandle`], [`SocketError::NetworkDown`].
    pub fn receive_request(self, id: SlotId) -> Result<Poll<EchoRequest>, SocketError> {
        let down = self.shard.down();
        match self.shard.core.sockets.get_mut(id) {
            Some(Socket::EchoListener(listener)) => match listener.pop() {
                Some(request) => Ok(Poll::Ready(request)),
                None => down.map_or(Ok(Poll::Pending), Err),
            },
            _ => Err(SocketError::BadHandle),
        }
    }

    /// Sends an echo reply from `src`, any address with [`StackConfig::any_ip`](crate::shard::StackConfig::any_ip), to
    /// `dst`.
    ///
    /// # Errors
    /// [`SocketError::BadHandle`]: `id` is not an echo listener. [`SocketError::AddressNotAvailable`]: `src` is not the
    /// stack's. No route, too long, no buffer.
    pub fn send_reply(
        self,
        now: Instant,
        id: SlotId,
        src: IpAddr,
        dst: IpAddr,
        echo: EchoId,
        payload: &[u8],
    ) -> Result<(), SocketError> {
        let Core { net, sockets, .. } = &mut self.shard.core;
        if !matches!(sockets.get(id), Some(Socket::EchoListener(_))) {
            return Err(SocketError::BadHandle);
        }
        if !net.ip.accepts(src) || src.is_ipv4() != dst.is_ipv4() {
            return Err(SocketError::AddressNotAvailable);
        }
        if payload.len() > crate::udp::max_payload(usize::MAX, dst) {
            return Err(SocketError::MessageTooLong);
        }
        let parts = core::iter::once(payload);
        let chain = net.fill_datagram(parts, payload.len())?;
        let sent = net.with_ip(now, |ip, cx| ip.send_echo_reply(cx, src, dst, echo, chain));
        sent.map_err(|_| SocketError::HostUnreachable)?;
        self.shard.finish_datagrams(now);
        Ok(())
    }

    /// Sends an ICMP error about a received datagram or echo request. Its source is `from`; `None`: the destination of
    /// that packet. The rate limit of ICMP errors applies. No error is sent about a packet to a group.
    pub fn send_error(
        self,
        now: Instant,
        about: &InvokingPacket<'_>,
        error: SentError,
        from: Option<IpAddr>,
    ) {
        let net = &mut self.shard.core.net;
        net.with_ip(now, |ip, cx| ip.send_error_about_packet(cx, about, error, from));
        self.shard.finish_datagrams(now);
    }
}

impl Ping {
    /// An echo request to an address of another host.
    pub(crate) fn input_request(&mut self, request: EchoRequest, core: &mut Core) {
        let Net { pool, counters, .. } = &mut core.net;
        let listener = self.listener.and_then(|id| match core.sockets.get_mut(id) {
            Some(Socket::EchoListener(listener)) => Some((id, listener)),
            _ => None,
        });
        let Some((id, listener)) = listener else {
            counters.drop_packet(DropReason::IcmpIgnored);
            return pool.free(request.payload);
        };
        match listener.push(request, pool.share_of(Purpose::Receive)) {
            Ok(()) => core.notify(id),
            Err(refused) => {
                counters.drop_packet(DropReason::EchoBufferFull);
                pool.free(refused.payload);
            }
        }
    }

    /// Closes the echo listener.
    pub(crate) fn close_listener(&mut self, id: SlotId, core: &mut Core) {
        self.listener = None;
        let Some(Socket::EchoListener(mut listener)) = core.sockets.remove(id) else { return };
        while let Some(request) = listener.pop() {
            core.net.pool.free(request.payload);
        }
    }
}
