//! One datagram in, one datagram out.

use core::net::{IpAddr, SocketAddr};

use fulmar_base::{Counters, DropReason, Offload, Zone, with_zone};
use fulmar_mbuf::{Chain, NoBuffer, Pool, Purpose};
use fulmar_wire::checksum::Sum;
use fulmar_wire::protocol;
use fulmar_wire::udp::{HEADER_BYTES, Header};

use crate::template::offload_of;

/// Room in front of a payload for every header: Ethernet 14, IPv6 40, UDP 8, and slack. Whoever
/// allocates a payload with it saves the mbuf that a header would need otherwise.
pub const HEADROOM_BYTES: usize = 80;

/// Largest payload over IPv4: 65,535 less 20 bytes of IP header and 8 of UDP.
const MAX_PAYLOAD_V4: usize = 65_507;
/// Largest payload over IPv6 without jumbograms: 65,535 less 8 bytes of UDP header.
const MAX_PAYLOAD_V6: usize = 65_527;

/// A received datagram.
#[derive(Debug)]
pub struct Datagram {
    /// Who sent it; port 0 if it wants no answer.
    pub src: SocketAddr,
    /// Where it was sent to.
    pub dst: SocketAddr,
    /// What is in it; may be empty.
    pub payload: Chain,
}

/// The packet was dropped, counted and freed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Dropped;

/// Why a datagram was not sent. Its payload is freed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OutputError {
    /// Larger than a datagram can be (EMSGSIZE). What is larger than the path's MTU is cut later, by
    /// room `ip`, or refused there if the socket does not allow that.
    MessageTooLong,
    /// The addresses are of different IP versions.
    MixedVersions,
    /// No mbuf for the header.
    NoBuffer,
}

/// The largest payload that one packet of `mtu` bytes carries to an address of this version.
pub fn max_payload(mtu: usize, to: IpAddr) -> usize {
    let (ip_header_bytes, most) =
        if to.is_ipv4() { (20, MAX_PAYLOAD_V4) } else { (40, MAX_PAYLOAD_V6) };
    mtu.saturating_sub(ip_header_bytes).saturating_sub(HEADER_BYTES).min(most)
}

/// Checks a packet that room `ip` delivered and takes its header off.
///
/// `chain` starts at the UDP header, `offload` counts from there; the surplus of an IP packet that
/// is longer than its UDP length is cut off.
///
/// # Errors
/// [`Dropped`]: `UdpHeader` (shorter than a header or than its length says), `UdpChecksum`.
pub fn input(
    src: IpAddr,
    dst: IpAddr,
    zone: Zone,
    chain: Chain,
    offload: Offload,
    pool: &mut Pool,
    counters: &mut Counters,
) -> Result<Datagram, Dropped> {
    let packet = Incoming { src, dst, zone, chain, offload };
    input_for(packet, pool, counters, |_, _, _| Ok(())).map(|(datagram, ())| datagram)
}

/// A packet that room `ip` delivered, as for [`input`].
#[derive(Debug)]
pub struct Incoming {
    /// Who sent it.
    pub src: IpAddr,
    /// Where it was sent to.
    pub dst: IpAddr,
    /// The interface, if one of them is link-local.
    pub zone: Zone,
    /// Starts at the UDP header.
    pub chain: Chain,
    /// Counts from there.
    pub offload: Offload,
}

/// What a received payload is charged to the queue that keeps it: its storage, and no less than the
/// budget that comes with its descriptors, so that tiny datagrams use up neither.
#[inline]
pub fn charge(payload: &Chain) -> usize {
    payload.storage_bytes().max(payload.held_bytes())
}

/// As [`input`], and asks in between whom the packet is for: when its header is understood, and before
/// its bytes are read for the checksum. `look` gets both ends and what the packet is charged ([`charge`]);
/// with a reason the packet is dropped and counted, with `None` it is only freed.
///
/// # Errors
/// As [`input`], and whatever `look` says.
pub fn input_for<T>(
    packet: Incoming,
    pool: &mut Pool,
    counters: &mut Counters,
    look: impl FnOnce(SocketAddr, SocketAddr, usize) -> Result<T, Option<DropReason>>,
) -> Result<(Datagram, T), Dropped> {
    let Incoming { src, dst, zone, mut chain, offload } = packet;
    let looked = check(&mut chain, pool).map_err(Some).and_then(|header| {
        let from = with_zone(src, header.src_port, zone);
        let to = with_zone(dst, header.dst_port, zone);
        let found = look(from, to, charge(&chain))?;
        if !is_sum_right(src, dst, &header, &chain, offload) {
            return Err(Some(DropReason::UdpChecksum));
        }
        Ok((from, to, found))
    });
    match looked {
        Ok((src, dst, found)) => {
            chain.trim_front(HEADER_BYTES, pool);
            Ok((Datagram { src, dst, payload: chain }, found))
        }
        Err(reason) => {
            if let Some(reason) = reason {
                counters.drop_packet(reason);
            }
            pool.free(chain);
            Err(Dropped)
        }
    }
}

fn check(chain: &mut Chain, pool: &mut Pool) -> Result<Header, DropReason> {
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

/// A checksum of zero means that there is none, which only IPv4 allows (RFC 768; RFC 8200 section
/// 8.1).
fn is_sum_right(src: IpAddr, dst: IpAddr, header: &Header, c: &Chain, offload: Offload) -> bool {
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

/// Puts a UDP header in front of a payload.
///
/// The result starts at the UDP header, with the headroom of `payload`'s first mbuf less 8 bytes,
/// or of a new mbuf with [`HEADROOM_BYTES`] if that is shared or too short. The checksum field holds
/// the folded sum of the pseudo-header; the device or its software fallback completes it.
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
    let room = prepend(chain, pool).map_err(|NoBuffer| OutputError::NoBuffer)?;
    header.emit(room).map_err(|_| OutputError::NoBuffer)?;
    Ok(offload_of(0, None))
}

/// Room for the header: in front of the payload if that leaves enough for the lower headers, else
/// in an mbuf of its own.
fn prepend<'a>(chain: &'a mut Chain, pool: &mut Pool) -> Result<&'a mut [u8], NoBuffer> {
    if !chain.front().is_some_and(|m| m.is_unique() && m.headroom() >= HEADROOM_BYTES) {
        chain.push_front(pool.alloc(0, HEADROOM_BYTES, Purpose::Control)?);
    }
    chain.prepend(HEADER_BYTES, pool, Purpose::Control)
}

#[cfg(test)]
mod tests;
