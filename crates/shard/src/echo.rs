//! Echo requests to addresses of other hosts, which a gateway answers in their name, and ICMP errors about
//! what the program has received.
//!
//! ```text
//!   Verdict::EchoRequest ──► queue of the echo listener ──► echo_receive ──► program
//!                            (full: dropped)                                 │ echo_reply, send_icmp_error
//!   Ip::send_echo_reply, Ip::send_error_about_packet ◄───────────────────────┘
//! ```
//!
//! There is one echo listener, on the shard of the ping sockets. Without it such requests are dropped.

pub(crate) mod queue;

use alloc::boxed::Box;
use core::net::IpAddr;

use fulmar_base::{DropReason, Instant, Probe, SlotId};
use fulmar_ip::{EchoId, EchoRequest, InvokingPacket, SentError};
use fulmar_mbuf::Purpose;
use fulmar_socket::{SocketError, Step};

use crate::layers::Core;
use crate::net::Net;
use crate::ping::Ping;
use crate::shard::Shard;
use crate::sockets::Socket;

impl<P: Probe> Shard<P> {
    /// Opens the socket that takes echo requests to addresses that are not the stack's own
    /// ([`crate::StackConfig::any_ip`]). In a stack of several shards: on the first.
    ///
    /// # Errors
    /// [`SocketError::AddressInUse`]: there is one. [`SocketError::NoBuffer`]: too many sockets.
    pub fn echo_listen(&mut self) -> Result<SlotId, SocketError> {
        self.core.check_usable()?;
        if self.ping.listener.is_some() {
            return Err(SocketError::AddressInUse);
        }
        let id = self.core.sockets.insert(Socket::EchoListener(Box::default()));
        self.ping.listener = Some(id);
        Ok(id)
    }

    /// The oldest echo request. Free its payload with [`Shard::free`].
    ///
    /// # Errors
    /// [`SocketError::BadHandle`], [`SocketError::NetworkDown`].
    pub fn echo_receive(&mut self, id: SlotId) -> Result<Step<EchoRequest>, SocketError> {
        let down = self.down();
        match self.core.sockets.get_mut(id) {
            Some(Socket::EchoListener(listener)) => match listener.pop() {
                Some(request) => Ok(Step::Done(request)),
                None => down.map_or(Ok(Step::WaitData(1)), Err),
            },
            _ => Err(SocketError::BadHandle),
        }
    }

    /// Sends an echo reply from `src`, any address with [`crate::StackConfig::any_ip`], to `dst`.
    ///
    /// # Errors
    /// [`SocketError::BadHandle`]: `id` is no echo listener. [`SocketError::AddressNotAvailable`]: `src` is
    /// not the stack's. No route, too long, no buffer.
    pub fn echo_send_reply(
        &mut self,
        now: Instant,
        id: SlotId,
        src: IpAddr,
        dst: IpAddr,
        echo: EchoId,
        payload: &[u8],
    ) -> Result<(), SocketError> {
        if !matches!(self.core.sockets.get(id), Some(Socket::EchoListener(_))) {
            return Err(SocketError::BadHandle);
        }
        if !self.core.net.ip.accepts(src) || src.is_ipv4() != dst.is_ipv4() {
            return Err(SocketError::AddressNotAvailable);
        }
        if payload.len() > fulmar_udp::max_payload(usize::MAX, dst) {
            return Err(SocketError::MessageTooLong);
        }
        let parts = core::iter::once(payload);
        let chain = self.core.net.fill_datagram(id, parts, payload.len())?;
        let Some(chain) = chain else { return Ok(()) };
        let net = &mut self.core.net;
        let sent = net.with_ip(now, |ip, cx| ip.send_echo_reply(cx, src, dst, echo, chain));
        sent.map_err(|_| SocketError::HostUnreachable)?;
        self.finish_datagrams(now);
        Ok(())
    }

    /// Sends an ICMP error about a datagram or an echo request that was received, in the name of `from`, or
    /// of its destination. Within the limit of ICMP errors; nothing is sent about what went to a group.
    pub fn send_icmp_error(
        &mut self,
        now: Instant,
        about: &InvokingPacket<'_>,
        error: SentError,
        from: Option<IpAddr>,
    ) {
        self.core.net.with_ip(now, |ip, cx| ip.send_error_about_packet(cx, about, error, from));
        self.finish_datagrams(now);
    }
}

impl Ping {
    /// An echo request to an address of another host.
    pub fn input_request<P: Probe>(&mut self, request: EchoRequest, core: &mut Core<P>) {
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
    pub fn close_listener<P: Probe>(&mut self, id: SlotId, core: &mut Core<P>) {
        self.listener = None;
        let Some(Socket::EchoListener(mut listener)) = core.sockets.remove(id) else { return };
        while let Some(request) = listener.pop() {
            core.net.pool.free(request.payload);
        }
    }
}
