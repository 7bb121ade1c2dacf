//! Input and output of datagrams.

use core::net::{IpAddr, SocketAddr};

use crate::base::{Counters, DropReason, Offload, Zone, with_zone};
use crate::mbuf::{Chain, NoBuffer, Pool, Purpose};
use crate::wire::checksum::Sum;
use crate::wire::protocol;
use crate::wire::udp::{HEADER_BYTES, Header};

use crate::udp::template::offload_of;

/// Headroom for all headers, bytes: Ethernet 14, IPv6 40, UDP 8, and slack. A payload allocated
/// with it needs no separate mbuf for the headers.
pub(crate) const HEADROOM_BYTES: usize = 80;

/// Largest payload over IPv4: 65,535 less 20 bytes of IP header and 8 of UDP.
const MAX_PAYLOAD_V4: usize = 65_507;
/// Largest payload over IPv6 without jumbograms: 65,535 less 8 bytes of UDP header.
const MAX_PAYLOAD_V6: usize = 65_527;

/// A received datagram.
#[derive(Debug)]
pub struct Datagram {
    /// Source; port 0 if the sender expects no reply.
    pub src: SocketAddr,
    /// Destination.
    pub dst: SocketAddr,
    /// Payload; may be empty.
    pub payload: Chain,
    /// Of a run of datagrams that came as one super-frame: the length of each, bytes; the last one has the
    /// rest.
    pub segment_bytes: Option<u16>,
    /// TTL or hop limit as received.
    pub hop_limit: u8,
    /// TOS or traffic class as received.
    pub dscp_ecn: u8,
}

/// The packet was dropped: counted and freed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Dropped;

/// Why a datagram was not sent. Its payload is freed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OutputError {
    /// Longer than a UDP datagram can be (EMSGSIZE). A datagram longer than the path MTU is
    /// fragmented by `ip`, or refused there if the socket forbids fragmentation.
    MessageTooLong,
    /// Source and destination are of different IP versions.
    MixedVersions,
    /// No mbuf for the header.
    NoBuffer,
}

/// The largest payload of an unfragmented packet to `to`, for a path MTU of `mtu` bytes.
pub(crate) fn max_payload(mtu: usize, to: IpAddr) -> usize {
    let (ip_header_bytes, most) =
        if to.is_ipv4() { (20, MAX_PAYLOAD_V4) } else { (40, MAX_PAYLOAD_V6) };
    mtu.saturating_sub(ip_header_bytes).saturating_sub(HEADER_BYTES).min(most)
}

/// A packet delivered by `ip`.
#[derive(Debug)]
pub struct Incoming {
    /// Source address.
    pub src: IpAddr,
    /// Destination address.
    pub dst: IpAddr,
    /// The interface, if an address is link-local.
    pub zone: Zone,
    /// The packet, from the UDP header on.
    pub chain: Chain,
    /// Offsets count from the UDP header.
    pub offload: Offload,
    /// TTL or hop limit as received.
    pub hop_limit: u8,
    /// TOS or traffic class as received.
    pub dscp_ecn: u8,
}

/// The charge of a received payload to its socket's queue, bytes: its storage, but at least the
/// pool budget of its descriptors, so that tiny datagrams exhaust neither.
#[inline]
pub fn charge(payload: &Chain) -> usize {
    payload.storage_bytes().max(payload.truesize())
}

/// Validates a packet and strips its UDP header. Bytes beyond the UDP length are trimmed.
///
/// `lookup` finds the socket between parsing the header and verifying the checksum. It gets source, destination and
/// the packet's [`charge`]. If it returns a reason, the packet is dropped and counted.
///
/// # Errors
/// [`Dropped`]: `UdpHeader` (shorter than a UDP header or than the UDP length), `UdpChecksum`, `NoBuffer`, and the
/// errors of `lookup`.
pub fn input<T>(
    packet: Incoming,
    pool: &mut Pool,
    counters: &mut Counters,
    lookup: impl FnOnce(SocketAddr, SocketAddr, usize) -> Result<T, DropReason>,
) -> Result<(Datagram, T), Dropped> {
    let Incoming { src, dst, zone, mut chain, offload, hop_limit, dscp_ecn } = packet;
    let result = parse(&mut chain, pool).and_then(|header| {
        let from = with_zone(src, header.src_port, zone);
        let to = with_zone(dst, header.dst_port, zone);
        let found = lookup(from, to, charge(&chain))?;
        if !is_checksum_valid(src, dst, &header, &chain, offload) {
            return Err(DropReason::UdpChecksum);
        }
        Ok((from, to, found))
    });
    match result {
        Ok((src, dst, found)) => {
            chain.trim_front(HEADER_BYTES, pool);
            let payload = chain;
            Ok((Datagram { src, dst, payload, segment_bytes: None, hop_limit, dscp_ecn }, found))
        }
        Err(reason) => {
            counters.drop_packet(reason);
            pool.free(chain);
            Err(Dropped)
        }
    }
}

fn parse(chain: &mut Chain, pool: &mut Pool) -> Result<Header, DropReason> {
    if chain.len() < HEADER_BYTES {
        return Err(DropReason::UdpHeader);
    }
    chain.pullup(HEADER_BYTES, pool).map_err(|NoBuffer| DropReason::NoBuffer)?;
    let first = chain.front().map_or(&[][..], |m| m.as_slice());
    let header = Header::parse(first).map_err(|_| DropReason::UdpHeader)?;
    let surplus = chain.len().checked_sub(usize::from(header.length));
    let surplus = surplus.ok_or(DropReason::UdpHeader)?;
    chain.trim_back(surplus, pool);
    Ok(header)
}

/// A checksum of zero means no checksum, which only IPv4 allows (RFC 768; RFC 8200 section 8.1).
fn is_checksum_valid(
    src: IpAddr,
    dst: IpAddr,
    header: &Header,
    c: &Chain,
    offload: Offload,
) -> bool {
    if header.checksum == 0 && !offload.needs_csum {
        return src.is_ipv4();
    }
    if offload.csum_valid || offload.needs_csum {
        return true;
    }
    let mut sum = Sum::new();
    c.slices().for_each(|piece| sum.add_bytes(piece));
    sum.add_pseudo(src, dst, protocol::UDP, u32::from(header.length));
    sum.is_valid()
}

/// Prepends a UDP header to a payload.
///
/// The result starts at the UDP header. The header is written into the headroom of `payload`'s
/// first mbuf, or into a new mbuf with `HEADROOM_BYTES` if that headroom is shared or too short.
/// The checksum field holds the folded pseudo-header sum; the device or its software fallback
/// completes it.
///
/// # Errors
/// See [`OutputError`].
pub fn output(
    pool: &mut Pool,
    local: SocketAddr,
    remote: SocketAddr,
    payload: Chain,
) -> Result<(Chain, Offload), OutputError> {
    let mut chain = payload;
    match prepend_header(pool, local, remote, &mut chain) {
        Ok(offload) => Ok((chain, offload)),
        Err(e) => {
            pool.free(chain);
            Err(e)
        }
    }
}

fn prepend_header(
    pool: &mut Pool,
    local: SocketAddr,
    remote: SocketAddr,
    chain: &mut Chain,
) -> Result<Offload, OutputError> {
    if local.is_ipv4() != remote.is_ipv4() {
        return Err(OutputError::MixedVersions);
    }
    if chain.len() > max_payload(usize::MAX, remote.ip()) {
        return Err(OutputError::MessageTooLong);
    }
    let length = u16::try_from(chain.len().saturating_add(HEADER_BYTES))
        .map_err(|_| OutputError::MessageTooLong)?;
    let mut sum = Sum::new();
    sum.add_pseudo(local.ip(), remote.ip(), protocol::UDP, u32::from(length));
    let header =
        Header { src_port: local.port(), dst_port: remote.port(), length, checksum: sum.fold() };
    let space = prepend(chain, pool).map_err(|NoBuffer| OutputError::NoBuffer)?;
    header.emit(space).map_err(|_| OutputError::NoBuffer)?;
    Ok(offload_of(0, None))
}

/// Space for the header: in the headroom of the payload if that leaves enough for the lower
/// headers, else in a new mbuf.
fn prepend<'a>(chain: &'a mut Chain, pool: &mut Pool) -> Result<&'a mut [u8], NoBuffer> {
    if !chain.front().is_some_and(|m| m.is_unique() && m.headroom() >= HEADROOM_BYTES) {
        chain.push_front(pool.alloc(0, HEADROOM_BYTES, Purpose::Control)?);
    }
    chain.prepend(HEADER_BYTES, pool, Purpose::Control)
}

#[cfg(test)]
mod tests;
