//! ICMP for both IP versions (RFC 792, RFC 1122 section 3.2.2, RFC 4443): echo, received errors,
//! sent errors.

use core::net::{IpAddr, SocketAddr};

use crate::base::{Counter, DropReason, IpVersion, MtuDiscovery, Offload};
use crate::mbuf::Chain;
use crate::route::Traffic;
use crate::wire::{icmpv4, icmpv6, ipv4, ipv6, protocol};

use crate::ip::engine::Ip;
use crate::ip::frame::{Context, Frame, control_chain, first, prepend_upper, pull, sum_of_icmp};
use crate::ip::input::Network;
use crate::ip::output::NetworkHeader;
use crate::ip::quote::{Quoted, error_kind_v4, error_kind_v6, quotes_icmp_error};
use crate::ip::{
    EchoId, EchoReply, EchoRequest, ErrorKind, FrameSink, OutputError, SavedHeader, Verdict,
};

/// Header length of all messages sent, in both versions.
const HEADER_BYTES: usize = 8;
/// Offset of the checksum, in both versions.
const CHECKSUM_OFFSET: usize = 2;
/// Bytes of a received message that are made contiguous: the ICMP header and, of a quoted packet,
/// the longest IPv4 header and 8 bytes, or an IPv6 header with some extension headers. A valid
/// neighbour discovery message fits wholly.
const PARSED_BYTES: usize = 256;
/// Bytes quoted by an ICMPv4 error: the packet is at most 576 bytes long (RFC 1812 section
/// 4.3.2.3).
const QUOTE_V4_BYTES: usize = 576 - 28;
/// Bytes quoted by an ICMPv6 error: the packet fits the minimum MTU (RFC 4443 section 2.4(c)).
const QUOTE_V6_BYTES: usize = 1280 - 48;

/// An ICMP message of either version.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Message {
    V4(icmpv4::Message),
    V6(icmpv6::Message),
}

impl Message {
    fn protocol(&self) -> u8 {
        match self {
            Message::V4(_) => protocol::ICMP,
            Message::V6(_) => protocol::ICMPV6,
        }
    }

    fn emit(&self, bytes: &mut [u8]) -> Option<()> {
        match self {
            Message::V4(m) => m.emit(bytes).ok(),
            Message::V6(m) => m.emit(bytes).ok(),
        }
    }

    fn echo_request(to: IpAddr, ident: u16, seq: u16) -> Message {
        match to {
            IpAddr::V4(_) => Message::V4(icmpv4::Message::EchoRequest { ident, seq }),
            IpAddr::V6(_) => Message::V6(icmpv6::Message::EchoRequest { ident, seq }),
        }
    }

    fn echo_reply(to: IpAddr, ident: u16, seq: u16) -> Message {
        match to {
            IpAddr::V4(_) => Message::V4(icmpv4::Message::EchoReply { ident, seq }),
            IpAddr::V6(_) => Message::V6(icmpv6::Message::EchoReply { ident, seq }),
        }
    }
}

/// The start of the packet that an error quotes.
pub(crate) enum Quote<'a> {
    Saved(&'a [u8]),
    Packet(&'a Chain),
    /// A rebuilt start, and what followed it.
    Rebuilt(&'a [u8], &'a [u8]),
}

impl Quote<'_> {
    fn copy_to(&self, out: &mut [u8]) -> Option<()> {
        match self {
            Quote::Saved(bytes) => out.copy_from_slice(bytes.get(..out.len())?),
            Quote::Packet(chain) => {
                chain.copy_to(0, out);
            }
            Quote::Rebuilt(start, rest) => {
                let (to_start, to_rest) = out.split_at_mut_checked(start.len())?;
                to_start.copy_from_slice(start);
                to_rest.copy_from_slice(rest.get(..to_rest.len())?);
            }
        }
        Some(())
    }

    fn len(&self) -> usize {
        match self {
            Quote::Saved(bytes) => bytes.len(),
            Quote::Packet(chain) => chain.len(),
            Quote::Rebuilt(start, rest) => start.len().saturating_add(rest.len()),
        }
    }
}

impl Ip {
    pub(crate) fn icmpv4_input<S: FrameSink>(
        &mut self,
        cx: &mut Context<'_, S>,
        frame: &mut Frame,
        network: &Network,
    ) -> Result<Verdict, DropReason> {
        strip_and_verify(cx, frame, network)?;
        let message =
            icmpv4::Message::parse(first(&frame.chain)).map_err(|_| DropReason::IcmpInvalid)?;
        cx.counters.count(Counter::IcmpIn);
        match message {
            icmpv4::Message::EchoRequest { ident, seq } => {
                // No reply to a group address: one packet would elicit many (RFC 1122 section
                // 3.2.2.6).
                if network.is_group || frame.is_group {
                    return Err(DropReason::IpDestination);
                }
                self.echo_reply(cx, frame, network, ident, seq)
            }
            icmpv4::Message::EchoReply { ident, seq } => {
                Ok(reply_verdict(cx, frame, network, ident, seq))
            }
            _ => {
                let kind = error_kind_v4(&message, first(&frame.chain));
                self.error_input(frame, network, kind)
            }
        }
    }

    pub(crate) fn icmpv6_input<S: FrameSink>(
        &mut self,
        cx: &mut Context<'_, S>,
        frame: &mut Frame,
        network: &Network,
    ) -> Result<Verdict, DropReason> {
        use icmpv6::Message as M;
        strip_and_verify(cx, frame, network)?;
        let message = M::parse(first(&frame.chain)).map_err(|_| DropReason::IcmpInvalid)?;
        cx.counters.count(Counter::IcmpIn);
        match message {
            M::NeighbourSolicitation { .. }
            | M::NeighbourAdvertisement { .. }
            | M::RouterSolicitation
            | M::RouterAdvertisement { .. }
            | M::Redirect { .. } => {
                self.ndp_input(cx, frame, network, message).map(|()| Verdict::Consumed)
            }
            _ if network.src.is_unspecified() => Err(DropReason::IpSource),
            // RFC 4443 section 4.2 permits a reply to a multicast echo request; it is rate-limited
            // like any other.
            M::EchoRequest { ident, seq } => self.echo_reply(cx, frame, network, ident, seq),
            M::EchoReply { ident, seq } => Ok(reply_verdict(cx, frame, network, ident, seq)),
            _ => self.error_input(frame, network, error_kind_v6(&message)),
        }
    }

    /// Processes a received error. It is dropped unless this host can have sent the quoted packet:
    /// same IP version, source equal to the error's destination, unicast destination (RFC 1122
    /// section 3.2.2: no error is sent about a packet to a group).
    fn error_input(
        &mut self,
        frame: &Frame,
        network: &Network,
        kind: Option<ErrorKind>,
    ) -> Result<Verdict, DropReason> {
        let kind = kind.ok_or(DropReason::IcmpIgnored)?;
        if network.is_group || frame.is_group {
            return Err(DropReason::IpDestination);
        }
        let packet = first(&frame.chain).get(HEADER_BYTES..).unwrap_or(&[]);
        let version = IpVersion::of(&network.dst);
        let other = if version == IpVersion::V4 { 6 } else { 4 };
        if packet.first().is_some_and(|b| b >> 4 == other) {
            return Err(DropReason::IcmpQuote);
        }
        let quoted = Quoted::parse(packet, version).ok_or(DropReason::IcmpInvalid)?;
        if quoted.src != network.dst {
            return Err(DropReason::IcmpNoFlow);
        }
        let is_group = quoted.dst.is_multicast() || self.is_broadcast(quoted.dst);
        if is_group || !quoted.can_cause(kind) {
            return Err(DropReason::IcmpQuote);
        }
        Ok(Verdict::IcmpError(quoted.error(kind, self.config.zone)))
    }

    /// Sends an echo reply that reuses the buffers of the request, if it is for this host.
    fn echo_reply<S: FrameSink>(
        &mut self,
        cx: &mut Context<'_, S>,
        frame: &mut Frame,
        network: &Network,
        ident: u16,
        seq: u16,
    ) -> Result<Verdict, DropReason> {
        if !network.is_group && !self.is_local(network.dst) {
            frame.chain.trim_front(HEADER_BYTES, cx.pool);
            return Ok(Verdict::EchoRequest(EchoRequest {
                src: network.src,
                dst: network.dst,
                ident,
                seq,
                hop_limit: network.hop_limit,
                payload: frame.take(),
            }));
        }
        if !self.echo_limit.take(cx.now, &mut self.limit_jitter) {
            return Err(DropReason::RateLimited);
        }
        frame.chain.trim_front(HEADER_BYTES, cx.pool);
        let src = if network.is_group { None } else { Some(network.dst) };
        let message = Message::echo_reply(network.src, ident, seq);
        // `icmp_output` counts its own errors, except a full sink.
        match self.icmp_output(cx, src, network.src, Traffic::Reply, &message, frame.take()) {
            Err(OutputError::Full) => Err(DropReason::TxQueueFull),
            Ok(()) | Err(_) => Ok(Verdict::Consumed),
        }
    }

    /// Sends an echo request to `to`, whose port is ignored. [`Ip::input`] returns the reply as
    /// [`Verdict::EchoReply`] with the same `id` and payload.
    ///
    /// # Errors
    /// See [`OutputError`]; the payload is freed.
    pub fn echo_request<S: FrameSink>(
        &mut self,
        cx: &mut Context<'_, S>,
        to: SocketAddr,
        id: EchoId,
        payload: Chain,
    ) -> Result<(), OutputError> {
        let message = Message::echo_request(to.ip(), id.ident, id.seq);
        self.icmp_output(cx, None, to.ip(), Traffic::Own, &message, payload)
    }

    /// Sends the echo reply of `src` to `dst`, the answer to an [`EchoRequest`].
    ///
    /// # Errors
    /// See [`OutputError`]; the payload is freed.
    pub fn send_echo_reply<S: FrameSink>(
        &mut self,
        cx: &mut Context<'_, S>,
        src: IpAddr,
        dst: IpAddr,
        id: EchoId,
        payload: Chain,
    ) -> Result<(), OutputError> {
        let message = Message::echo_reply(dst, id.ident, id.seq);
        self.icmp_output(cx, Some(src), dst, Traffic::Own, &message, payload)
    }

    /// Sends port unreachable about a UDP datagram (RFC 1122 section 4.1.3.1), unless an error
    /// about it is not permitted or the rate limit is reached.
    pub fn port_unreachable<S: FrameSink>(&mut self, cx: &mut Context<'_, S>, about: &SavedHeader) {
        if !about.answerable {
            return;
        }
        let packet = about.as_slice();
        let addresses = match packet.first().map(|b| b >> 4) {
            Some(4) => ipv4::Header::parse(packet, usize::MAX)
                .map(|h| (IpAddr::V4(h.src), IpAddr::V4(h.dst))),
            _ => ipv6::Header::parse(packet, usize::MAX)
                .map(|h| (IpAddr::V6(h.src), IpAddr::V6(h.dst))),
        };
        let Ok((src, dst)) = addresses else { return };
        let message = match src {
            IpAddr::V4(_) => {
                let code = icmpv4::unreachable::PORT;
                Message::V4(icmpv4::Message::Unreachable { code, next_hop_mtu: 0 })
            }
            IpAddr::V6(_) => {
                Message::V6(icmpv6::Message::Unreachable { code: icmpv6::unreachable::PORT })
            }
        };
        self.send_error(cx, Some(dst), src, &message, Quote::Saved(packet));
    }

    /// Sends protocol unreachable (RFC 1122 section 3.2.2.1), or parameter problem code 1 (RFC 8200
    /// section 4).
    pub(crate) fn unknown_protocol<S: FrameSink>(
        &mut self,
        cx: &mut Context<'_, S>,
        frame: &Frame,
        network: &Network,
    ) {
        match network.src {
            IpAddr::V4(_) if !network.is_group && !frame.is_group => {
                let code = icmpv4::unreachable::PROTOCOL;
                let message = Message::V4(icmpv4::Message::Unreachable { code, next_hop_mtu: 0 });
                let quote = Quote::Packet(&frame.chain);
                self.send_error(cx, Some(network.dst), network.src, &message, quote);
            }
            IpAddr::V4(_) => {}
            IpAddr::V6(_) => {
                let pointer = u32::try_from(network.next_header_at).unwrap_or(0);
                let code = icmpv6::parameter::UNRECOGNISED_NEXT_HEADER;
                let message = icmpv6::Message::ParameterProblem { code, pointer };
                self.send_error_v6(cx, frame, network, message);
            }
        }
    }

    /// Sends an ICMPv6 error, unless RFC 4443 section 2.4(e) forbids it.
    pub(crate) fn send_error_v6<S: FrameSink>(
        &mut self,
        cx: &mut Context<'_, S>,
        frame: &Frame,
        network: &Network,
        message: icmpv6::Message,
    ) {
        if !network.is_group && !frame.is_group {
            self.send_error_v6_even_if_multicast(cx, frame, network, message);
        }
    }

    /// Sends an ICMPv6 error that is allowed about a multicast packet, too: the exceptions of RFC 4443
    /// section 2.4(e.3).
    pub(crate) fn send_error_v6_even_if_multicast<S: FrameSink>(
        &mut self,
        cx: &mut Context<'_, S>,
        frame: &Frame,
        network: &Network,
        message: icmpv6::Message,
    ) {
        if network.src.is_unspecified() {
            return;
        }
        let is_group = network.is_group || frame.is_group;
        let src = (!is_group).then_some(network.dst);
        let quote = Quote::Packet(&frame.chain);
        self.send_error(cx, src, network.src, &Message::V6(message), quote);
    }

    /// Sends an error about a packet that starts with its IP header.
    pub(crate) fn send_error_about<S: FrameSink>(
        &mut self,
        cx: &mut Context<'_, S>,
        src: IpAddr,
        dst: IpAddr,
        message: &Message,
        packet: &Chain,
    ) {
        self.send_error(cx, Some(src), dst, message, Quote::Packet(packet));
    }

    pub(crate) fn send_error<S: FrameSink>(
        &mut self,
        cx: &mut Context<'_, S>,
        src: Option<IpAddr>,
        dst: IpAddr,
        message: &Message,
        quote: Quote<'_>,
    ) {
        if !self.error_limit.take(cx.now, &mut self.limit_jitter) {
            cx.counters.drop_packet(DropReason::RateLimited);
            return;
        }
        let most_bytes = if dst.is_ipv4() { QUOTE_V4_BYTES } else { QUOTE_V6_BYTES };
        let quote_bytes = quote.len().min(most_bytes);
        let Ok(chain) = control_chain(quote_bytes, cx.pool, |bytes| quote.copy_to(bytes)) else {
            cx.counters.drop_packet(DropReason::NoBuffer);
            return;
        };
        // Two hosts would answer each other for ever (RFC 1122 section 3.2.2, RFC 4443 section 2.4).
        if quotes_icmp_error(first(&chain)) {
            return cx.pool.free(chain);
        }
        if self.icmp_output(cx, src, dst, Traffic::Reply, message, chain) == Err(OutputError::Full)
        {
            cx.counters.drop_packet(DropReason::TxQueueFull);
        }
    }

    /// Prepends an ICMP header to `body` and sends it from `src`, or from the selected source
    /// address.
    fn icmp_output<S: FrameSink>(
        &mut self,
        cx: &mut Context<'_, S>,
        src: Option<IpAddr>,
        dst: IpAddr,
        traffic: Traffic,
        message: &Message,
        body: Chain,
    ) -> Result<(), OutputError> {
        let Some(src) = src.or_else(|| self.route(dst, 0).ok().map(|p| p.src)) else {
            cx.discard(body, DropReason::NoRoute);
            return Err(OutputError::NoRoute);
        };
        let mut chain = body;
        let header = prepend_upper(&mut chain, HEADER_BYTES, cx.pool);
        if header.ok().and_then(|bytes| message.emit(bytes)).is_none() {
            cx.discard(chain, DropReason::NoBuffer);
            return Err(OutputError::NoBuffer);
        }
        let sum = sum_of_icmp(&chain, src, dst).finish();
        set_checksum(&mut chain, sum);
        let network = NetworkHeader {
            src,
            dst,
            protocol: message.protocol(),
            ttl: self.config.ttl,
            dscp_ecn: 0,
            traffic,
            mtu_discovery: MtuDiscovery::Off,
        };
        self.ip_output(cx, network, 0, chain, Offload::default())?;
        cx.counters.count(Counter::IcmpOut);
        Ok(())
    }
}

/// Strips the IP header, verifies the checksum, and makes the parsed part contiguous.
fn strip_and_verify<S>(
    cx: &mut Context<'_, S>,
    frame: &mut Frame,
    network: &Network,
) -> Result<(), DropReason> {
    frame.strip(network.header_bytes, cx.pool)?;
    let is_right = frame.is_checksum_trusted()
        || sum_of_icmp(&frame.chain, network.src, network.dst).is_valid();
    if !is_right {
        return Err(DropReason::IcmpChecksum);
    }
    let bytes = frame.chain.len().min(PARSED_BYTES);
    pull(&mut frame.chain, bytes, cx.pool)?;
    Ok(())
}

fn reply_verdict<S>(
    cx: &mut Context<'_, S>,
    frame: &mut Frame,
    network: &Network,
    ident: u16,
    seq: u16,
) -> Verdict {
    frame.chain.trim_front(HEADER_BYTES, cx.pool);
    let (from, hop_limit) = (network.src, network.hop_limit);
    Verdict::EchoReply(EchoReply { from, ident, seq, hop_limit, payload: frame.take() })
}

/// Writes the checksum into the ICMP header at the start of a chain.
pub(crate) fn set_checksum(chain: &mut Chain, sum: u16) {
    chain.copy_from(CHECKSUM_OFFSET, &sum.to_be_bytes());
}
