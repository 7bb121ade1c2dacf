//! Packets of a medium without a link layer ([`Medium::Ip`]): to and from the frames of the stack.
//!
//! ```text
//! memory  | constant Ethernet header, 14 bytes | IP header | payload |
//! wire                                         | IP header | payload |
//! ```
//!
//! The stack handles Ethernet frames only. A device of this medium puts the header in front of received packets
//! ([`link_header`] where the device has reserved the space, [`to_frame`] in general) and removes it from what it sends
//! ([`check_sent`], [`from_frame`]). The addresses in it are constants ([`Medium::OWN`], [`Medium::PEER`]); the
//! EtherType follows from the version field.

use crate::base::{DropReason, Medium, Offload};
use crate::mbuf::{Chain, Pool, Purpose};
use crate::wire::{eth, ipv4, ipv6};

use crate::device::Packet;

/// Length of the header that is not on the wire.
pub const HEADER_BYTES: usize = eth::HEADER_BYTES;

/// The header in front of a received packet of `bytes` bytes that starts with `first`.
///
/// # Errors
/// [`DropReason::IpHeader`]: the version is neither 4 nor 6; [`DropReason::Truncated`]: the packet is shorter
/// than the fixed header of its version. The stack checks all other fields.
pub fn link_header(first: &[u8], bytes: usize) -> Result<[u8; HEADER_BYTES], DropReason> {
    let version = first.first().ok_or(DropReason::Truncated)? >> 4;
    let (ethertype, least_bytes) = match version {
        4 => (eth::IPV4, ipv4::HEADER_BYTES),
        6 => (eth::IPV6, ipv6::HEADER_BYTES),
        _ => return Err(DropReason::IpHeader),
    };
    if bytes < least_bytes {
        return Err(DropReason::Truncated);
    }
    let mut header = [0; HEADER_BYTES];
    let link = eth::Header { dst: Medium::OWN, src: Medium::PEER, ethertype };
    link.emit(&mut header).map_err(|_| DropReason::Truncated)?;
    Ok(header)
}

/// A received IP packet as a frame, for a device whose packets come from elsewhere. The offsets of `offload`
/// count from the IP header. Costs no copy if the first mbuf has [`HEADER_BYTES`] of headroom.
///
/// # Errors
/// As [`link_header`]; [`DropReason::NoBuffer`]. The chain is freed; the caller counts the drop.
pub fn to_frame(
    mut packet: Chain,
    offload: Offload,
    pool: &mut Pool,
) -> Result<Packet, DropReason> {
    let mut first = [0];
    let copied_bytes = packet.copy_to(0, &mut first);
    let first = first.get(..copied_bytes).unwrap_or(&[]);
    let result = link_header(first, packet.len()).and_then(|header| {
        let space = packet.prepend(HEADER_BYTES, pool, Purpose::Receive);
        space.map_err(|_| DropReason::NoBuffer)?.copy_from_slice(&header);
        Ok(())
    });
    match result {
        Ok(()) => Ok(Packet { chain: packet, offload: offload.shift(HEADER_BYTES as u16) }),
        Err(reason) => {
            pool.free(packet);
            Err(reason)
        }
    }
}

/// Checks that a frame to be sent has a contiguous Ethernet header with the EtherType of IPv4 or IPv6.
///
/// # Errors
/// [`DropReason::NotIp`].
pub fn check_sent(frame: &Packet) -> Result<(), DropReason> {
    let first = frame.chain.slices().next().unwrap_or(&[]);
    match eth::Header::parse(first) {
        Ok(eth::Header { ethertype: eth::IPV4 | eth::IPV6, .. }) => Ok(()),
        _ => Err(DropReason::NotIp),
    }
}

/// The IP packet of a frame to be sent. The offsets of the offload request count from the IP header.
///
/// # Errors
/// As [`check_sent`]. The frame is freed; the caller counts the drop.
pub fn from_frame(mut frame: Packet, pool: &mut Pool) -> Result<Packet, DropReason> {
    if let Err(reason) = check_sent(&frame) {
        pool.free(frame.chain);
        return Err(reason);
    }
    frame.chain.trim_front(HEADER_BYTES, pool);
    frame.offload = frame.offload.unshift(HEADER_BYTES as u16);
    Ok(frame)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::testing::{packet, pool};
    use proptest::prelude::*;

    fn chain(bytes: &[u8], pool: &mut Pool) -> Chain {
        packet(pool, bytes).chain
    }

    #[test]
    fn a_packet_becomes_a_frame_and_a_packet_again() {
        let mut pool = pool();
        let offload =
            Offload { needs_csum: true, csum_start: 20, csum_offset: 16, ..Offload::default() };
        for (version, bytes, ethertype) in [(0x45, 20, eth::IPV4), (0x60, 40, eth::IPV6)] {
            let mut packet = vec![7; bytes];
            packet[0] = version;
            let received = chain(&packet, &mut pool);
            let frame = to_frame(received, offload, &mut pool).unwrap();
            let header = eth::Header::parse(&frame.chain.to_vec()).unwrap();
            assert_eq!(header, eth::Header { dst: Medium::OWN, src: Medium::PEER, ethertype });
            assert_eq!((frame.offload.csum_start, frame.chain.len()), (34, bytes + HEADER_BYTES));
            let sent = from_frame(frame, &mut pool).unwrap();
            assert_eq!((sent.chain.to_vec(), sent.offload), (packet, offload));
            pool.free(sent.chain);
        }
    }

    #[test]
    fn a_frame_that_is_not_an_ip_packet_is_dropped_with_a_reason() {
        let mut pool = pool();
        let mut reason = |bytes: &[u8]| {
            let received = chain(bytes, &mut pool);
            to_frame(received, Offload::default(), &mut pool).unwrap_err()
        };
        assert_eq!(reason(&[]), DropReason::Truncated);
        assert_eq!(reason(&[0x45; 19]), DropReason::Truncated);
        assert_eq!(reason(&[0x60; 39]), DropReason::Truncated);
        for nibble in (0..16u8).filter(|n| !matches!(n, 4 | 6)) {
            assert_eq!(reason(&[nibble << 4; 60]), DropReason::IpHeader);
        }
    }

    #[test]
    fn an_arp_frame_is_never_sent() {
        let mut pool = pool();
        let mut frame = vec![0; 42];
        let (dst, src) = (Medium::PEER, Medium::OWN);
        eth::Header { dst, src, ethertype: eth::ARP }.emit(&mut frame).unwrap();
        for bytes in [&frame[..], &frame[..13], &[]] {
            let p = packet(&mut pool, bytes);
            assert_eq!(from_frame(p, &mut pool).unwrap_err(), DropReason::NotIp);
        }
    }

    proptest! {
        #[test]
        fn any_bytes_become_a_frame_or_a_reason(bytes in proptest::collection::vec(any::<u8>(), 0..80)) {
            let mut pool = pool();
            let received = chain(&bytes, &mut pool);
            if let Ok(frame) = to_frame(received, Offload::default(), &mut pool) {
                let packet = from_frame(frame, &mut pool).unwrap();
                prop_assert_eq!(packet.chain.to_vec(), bytes);
                pool.free(packet.chain);
            }
        }
    }
}
