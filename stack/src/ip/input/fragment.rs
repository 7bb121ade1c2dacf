//! Fragment input: validation of fragments, and the packet that reassembly yields.

use core::net::IpAddr;

use crate::base::{Counter, DropReason, Duration, Offload};
use crate::mbuf::{Chain, NoBuffer, Pool, Purpose};
use crate::wire::icmpv6::{Message as MessageV6, parameter};
use crate::wire::ipv6::{self, Fragment, Upper};
use crate::wire::{icmpv4, icmpv6, ipv4, protocol, tcp, udp};

use super::Network;
use crate::ip::FrameSink;
use crate::ip::engine::Ip;
use crate::ip::frame::{Context, Frame};
use crate::ip::icmp::Message;
use crate::ip::reassembly::{Datagram, First, Fragment as PayloadFragment, Key};

/// Reassembly time-out of IPv4: 30 s as Linux. RFC 1122 section 3.3.2 asks for 60 to 120 s. A
/// shorter time-out limits the buffers that a flood of fragments occupies.
const TIMEOUT_V4: Duration = Duration::from_secs(30);
/// Reassembly time-out of IPv6 (RFC 8200 section 4.5).
const TIMEOUT_V6: Duration = Duration::from_secs(60);
/// Maximum length of a reassembled datagram, bytes, IPv4 header or IPv6 extension headers included.
const MAX_BYTES: usize = 65_535;
/// Code of time exceeded: fragment reassembly time exceeded.
const REASSEMBLY: u8 = 1;

/// A fragment as described by its headers.
struct Incoming {
    key: Key,
    first: First,
    start: u16,
    more: bool,
    ecn: u8,
    is_group: bool,
    /// Offset of the payload, bytes.
    header_bytes: usize,
    lifetime: Duration,
}

impl Ip {
    /// Processes an IPv4 fragment without link padding. If it completes a datagram, `frame` becomes
    /// the reassembled packet and its header is returned.
    pub(super) fn fragment_v4<S: FrameSink>(
        &mut self,
        cx: &mut Context<'_, S>,
        frame: &mut Frame,
        header: &ipv4::Header,
        is_group: bool,
    ) -> Result<Option<ipv4::Header>, DropReason> {
        let end = usize::from(header.fragment_offset).saturating_add(header.total_bytes);
        let is_unaligned = header.more_fragments && !header.payload_bytes().is_multiple_of(8);
        if is_unaligned || header.payload_bytes() == 0 || end > MAX_BYTES {
            return Err(DropReason::FragmentInvalid);
        }
        let key = Key {
            src: IpAddr::V4(header.src),
            dst: IpAddr::V4(header.dst),
            protocol: header.protocol,
            ident: header.ident.into(),
        };
        let part = Incoming {
            key,
            first: First::V4(*header),
            start: header.fragment_offset,
            more: header.more_fragments,
            ecn: header.dscp_ecn & 3,
            is_group,
            header_bytes: header.header_bytes,
            lifetime: TIMEOUT_V4,
        };
        let Some((first, ecn)) = self.reassemble(cx, frame, part)? else { return Ok(None) };
        let First::V4(first) = first else { return Err(DropReason::FragmentInvalid) };
        let header = ipv4::Header {
            more_fragments: false,
            dscp_ecn: first.dscp_ecn & !3 | ecn,
            header_bytes: ipv4::HEADER_BYTES,
            total_bytes: frame.chain.len().saturating_add(ipv4::HEADER_BYTES),
            ..first
        };
        prepend_header(frame, ipv4::HEADER_BYTES, cx.pool, |b| header.emit(b).ok())?;
        Ok(Some(header))
    }

    /// The same for IPv6. `upper` is the result of the extension header walk. The next header of
    /// the returned header is that of the fragmentable part.
    pub(super) fn fragment_v6<S: FrameSink>(
        &mut self,
        cx: &mut Context<'_, S>,
        frame: &mut Frame,
        header: &ipv6::Header,
        network: &Network,
        upper: &Upper,
        fragment: Fragment,
    ) -> Result<Option<ipv6::Header>, DropReason> {
        let header_bytes = upper.fragment_at.saturating_add(ipv6::FRAGMENT_BYTES);
        let bytes = frame.chain.len().saturating_sub(header_bytes);
        if let Some((code, pointer)) = parameter_problem(upper, fragment, bytes) {
            let message = MessageV6::ParameterProblem { code, pointer };
            self.send_error_v6(cx, frame, network, message);
            return Err(DropReason::FragmentInvalid);
        }
        if bytes == 0 || header.src.is_unspecified() {
            return Err(DropReason::FragmentInvalid);
        }
        let next_header = frame.chain.front().and_then(|m| m.as_slice().get(upper.fragment_at));
        let next_header = *next_header.ok_or(DropReason::Truncated)?;
        let part = Incoming {
            key: Key { src: network.src, dst: network.dst, protocol: 0, ident: fragment.ident },
            first: First::V6(ipv6::Header { next_header, ..*header }),
            start: fragment.offset,
            more: fragment.more,
            ecn: network.dscp_ecn & 3,
            is_group: network.is_group,
            header_bytes,
            lifetime: TIMEOUT_V6,
        };
        let Some((first, ecn)) = self.reassemble(cx, frame, part)? else { return Ok(None) };
        let First::V6(first) = first else { return Err(DropReason::FragmentInvalid) };
        let header = ipv6::Header {
            traffic_class: first.traffic_class & !3 | ecn,
            payload_bytes: frame.chain.len(),
            ..first
        };
        prepend_header(frame, ipv6::HEADER_BYTES, cx.pool, |b| header.emit(b).ok())?;
        Ok(Some(header))
    }

    /// Inserts the payload of a fragment into the reassembly table. If it completes a datagram,
    /// `frame` becomes the datagram's payload.
    fn reassemble<S: FrameSink>(
        &mut self,
        cx: &mut Context<'_, S>,
        frame: &mut Frame,
        part: Incoming,
    ) -> Result<Option<(First, u8)>, DropReason> {
        // A fragmented datagram has a complete checksum.
        if frame.offload.needs_csum || frame.offload.gso.is_some() {
            return Err(DropReason::BadOffload);
        }
        cx.counters.count(Counter::FragmentsIn);
        frame.strip(part.header_bytes, cx.pool)?;
        let fragment = PayloadFragment {
            key: part.key,
            start: part.start,
            is_last: !part.more,
            first: (part.start == 0).then_some(part.first),
            ecn: part.ecn,
            is_group: part.is_group || frame.is_group,
            lifetime: part.lifetime,
            chain: frame.take(),
        };
        let whole = self.reassembly.insert(cx.now, fragment, cx.pool, cx.counters)?;
        let Some(whole) = whole else { return Ok(None) };
        frame.chain = whole.chain;
        // The device's verdict on the fragment does not apply to the datagram.
        frame.offload = Offload::default();
        frame.is_group = whole.is_group;
        let first = whole.first.ok_or(DropReason::FragmentInvalid)?;
        cx.counters.count(Counter::Reassembled);
        Ok(Some((first, whole.ecn)))
    }

    /// Drops expired datagrams, and sends time exceeded for those whose first fragment arrived (RFC
    /// 792, RFC 8200 section 4.5).
    pub(crate) fn expire_fragments<S: FrameSink>(&mut self, cx: &mut Context<'_, S>) {
        while let Some(whole) = self.reassembly.pop_expired(cx.now, cx.pool) {
            cx.counters.drop_packet(DropReason::FragmentTimeout);
            self.time_exceeded(cx, whole);
        }
    }

    fn time_exceeded<S: FrameSink>(&mut self, cx: &mut Context<'_, S>, whole: Datagram) {
        let Datagram { key, first, is_group, mut chain, first_bytes, .. } = whole;
        if let Some(first) = first
            && !is_group
            && restore_headers(&first, key.ident, first_bytes, &mut chain, cx.pool).is_some()
        {
            let message = match first {
                First::V4(_) => Message::V4(icmpv4::Message::TimeExceeded { code: REASSEMBLY }),
                First::V6(_) => Message::V6(icmpv6::Message::TimeExceeded { code: REASSEMBLY }),
            };
            self.send_error_about(cx, key.dst, key.src, &message, &chain);
        }
        cx.pool.free(chain);
    }
}

/// Code and pointer of the parameter problem about an invalid IPv6 fragment of `bytes` (RFC 8200
/// section 4.5): payload length not a multiple of 8 with more fragments to follow; datagram too
/// long; transport header incomplete in the first fragment.
fn parameter_problem(upper: &Upper, fragment: Fragment, bytes: usize) -> Option<(u8, u32)> {
    const PAYLOAD_LENGTH_AT: u32 = 4;
    let extensions_bytes = upper.fragment_at.saturating_sub(ipv6::HEADER_BYTES);
    let end = usize::from(fragment.offset).saturating_add(bytes).saturating_add(extensions_bytes);
    if fragment.more && !bytes.is_multiple_of(8) {
        return Some((parameter::ERRONEOUS_FIELD, PAYLOAD_LENGTH_AT));
    }
    if end > MAX_BYTES {
        let offset_at = u32::try_from(upper.fragment_at.saturating_add(2)).unwrap_or(u32::MAX);
        return Some((parameter::ERRONEOUS_FIELD, offset_at));
    }
    let packet_bytes = upper.fragment_at.saturating_add(ipv6::FRAGMENT_BYTES).saturating_add(bytes);
    let headers_bytes = upper.offset.saturating_add(min_header_bytes(upper.protocol));
    let is_truncated = fragment.offset == 0 && packet_bytes < headers_bytes;
    is_truncated.then_some((parameter::INCOMPLETE_HEADER_CHAIN, 0))
}

/// Bytes of the transport header that a first fragment must contain (RFC 7112 section 5): the fixed
/// part.
fn min_header_bytes(protocol: u8) -> usize {
    match protocol {
        protocol::TCP => tcp::HEADER_BYTES,
        protocol::UDP => udp::HEADER_BYTES,
        protocol::ICMPV6 => icmpv6::HEADER_BYTES,
        protocol::NO_NEXT_HEADER => 0,
        _ => 1,
    }
}

/// Prepends a header to a packet.
fn prepend_header(
    frame: &mut Frame,
    bytes: usize,
    pool: &mut Pool,
    emit: impl FnOnce(&mut [u8]) -> Option<()>,
) -> Result<(), DropReason> {
    let space = frame.chain.prepend(bytes, pool, Purpose::Control);
    let space = space.map_err(|NoBuffer| DropReason::NoBuffer)?;
    emit(space).ok_or(DropReason::IpHeader)
}

/// Prepends the headers of the first fragment to a chain that starts with its payload. Options and
/// other extension headers are omitted.
fn restore_headers(
    first: &First,
    ident: u32,
    bytes: usize,
    chain: &mut Chain,
    pool: &mut Pool,
) -> Option<()> {
    match first {
        First::V4(header) => {
            let total_bytes = bytes.saturating_add(ipv4::HEADER_BYTES);
            let space = chain.prepend(ipv4::HEADER_BYTES, pool, Purpose::Control).ok()?;
            ipv4::Header { total_bytes, ..*header }.emit(space).ok()
        }
        First::V6(header) => {
            let both_bytes = ipv6::HEADER_BYTES.saturating_add(ipv6::FRAGMENT_BYTES);
            let space = chain.prepend(both_bytes, pool, Purpose::Control).ok()?;
            let (fixed, extension) = space.split_at_mut_checked(ipv6::HEADER_BYTES)?;
            let payload_bytes = bytes.saturating_add(ipv6::FRAGMENT_BYTES);
            let next_header = protocol::FRAGMENT;
            ipv6::Header { next_header, payload_bytes, ..*header }.emit(fixed).ok()?;
            let fragment = Fragment { offset: 0, more: true, ident };
            fragment.emit(header.next_header, extension).ok()
        }
    }
}
