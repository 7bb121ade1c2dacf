//! The virtio-net header, which precedes every frame of a TAP, TUN or packet socket: conversion from and to
//! [`Offload`].
//!
//! Its field `hdr_len` is a hint that kernels set in different ways, so it is ignored on receive; the length of the
//! headers is that of the parsed transport header.

#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use fulmar_stack::base::{DropReason, Gso, GsoKind, Offload};
use fulmar_stack::device::Packet;
use fulmar_stack::wire::virtio_net::{
    self, F_DATA_VALID, F_NEEDS_CSUM, GSO_ECN, GSO_NONE, GSO_TCPV4, GSO_TCPV6, GSO_UDP_L4, Header,
};

pub(super) const HEADER_BYTES: usize = virtio_net::HEADER_BYTES;
const ETHER_BYTES: usize = 14;
const UDP_HEADER_BYTES: usize = 8;
/// Byte of the TCP header whose upper half is its length in words (RFC 9293 section 3.1).
const TCP_DATA_OFFSET: usize = 12;
/// Offset of the TCP header's checksum.
const TCP_CHECKSUM: u16 = 16;
/// Offset of `hdr_len` in the virtio-net header.
const HDR_LEN: std::ops::Range<usize> = 2..4;

/// The header of a sent frame, with its offload request: checksum and segmentation.
pub(super) fn request(offload: &Offload) -> [u8; HEADER_BYTES] {
    let mut h = Header::default();
    if offload.needs_csum {
        h.flags = F_NEEDS_CSUM;
        h.csum_start = offload.csum_start;
        h.csum_offset = offload.csum_offset;
    }
    if let Some(gso) = offload.gso {
        let kind = match gso.kind {
            GsoKind::TcpV4 => GSO_TCPV4,
            GsoKind::TcpV6 => GSO_TCPV6,
            GsoKind::Udp => GSO_UDP_L4,
        };
        h.gso_type = kind | if gso.ecn { GSO_ECN } else { 0 };
        h.gso_size = gso.segment_bytes;
        h.hdr_len = gso.header_bytes;
    }
    let mut bytes = [0; HEADER_BYTES];
    // The buffer has exactly the length of the header.
    let _ = h.emit(&mut bytes);
    bytes
}

/// As [`request`], for a frame whose first contiguous bytes are `front`; sets `hdr_len` also without GSO.
///
/// The kernel copies `hdr_len` bytes into the linear part of its buffer, and the payload to the start of a page.
/// Without it TCP options precede the payload in the page, so that its page offset is a few bytes above that of the
/// source; at such a distance `rep movsb` takes ten times as long on some processors.
pub(super) fn request_before(offload: &Offload, front: &[u8]) -> [u8; HEADER_BYTES] {
    let mut bytes = request(offload);
    if let (None, Some(headers)) = (offload.gso, headers_bytes(offload, front)) {
        bytes[HDR_LEN].copy_from_slice(&headers.to_le_bytes());
    }
    bytes
}

/// [`request_before`] of a whole frame.
pub(super) fn request_for(p: &Packet) -> [u8; HEADER_BYTES] {
    request_before(&p.offload, p.chain.front().map_or(&[], |m| m.as_slice()))
}

/// The length of all headers. `None`: not a TCP segment, or `front` does not have all headers.
fn headers_bytes(offload: &Offload, front: &[u8]) -> Option<u16> {
    if !offload.needs_csum || offload.csum_offset != TCP_CHECKSUM {
        return None;
    }
    let l4 = usize::from(offload.csum_start);
    let words = usize::from(*front.get(l4.checked_add(TCP_DATA_OFFSET)?)?) >> 4;
    let end = l4.checked_add(words.saturating_mul(4))?;
    (words >= 5 && end <= front.len()).then(|| u16::try_from(end).ok()).flatten()
}

/// Parses the header of a received frame.
///
/// `frame_bytes`: length of the whole frame; `front`: its first contiguous bytes.
///
/// # Errors
/// [`DropReason::BadOffload`]: an offset points outside the frame, or the header contradicts itself.
pub(super) fn parse(
    header: &[u8; HEADER_BYTES],
    frame_bytes: usize,
    front: &[u8],
) -> Result<Offload, DropReason> {
    // Fast path: no flags, no GSO.
    if header.starts_with(&[0, GSO_NONE]) {
        return Ok(Offload::default());
    }
    let h = Header::parse(header).map_err(|_| DropReason::BadOffload)?;
    let mut offload = Offload { csum_valid: h.flags & F_DATA_VALID != 0, ..Offload::default() };
    if h.flags & F_NEEDS_CSUM != 0 {
        let (start, offset) = (usize::from(h.csum_start), usize::from(h.csum_offset));
        if start < ETHER_BYTES || start.saturating_add(offset).saturating_add(2) > frame_bytes {
            return Err(DropReason::BadOffload);
        }
        offload.needs_csum = true;
        (offload.csum_start, offload.csum_offset) = (h.csum_start, h.csum_offset);
    }
    if h.gso_type != GSO_NONE {
        offload.gso = Some(super_frame(&h, frame_bytes, front).ok_or(DropReason::BadOffload)?);
    }
    Ok(offload)
}

fn super_frame(h: &Header, frame_bytes: usize, front: &[u8]) -> Option<Gso> {
    let kind = match h.gso_type & !GSO_ECN {
        GSO_TCPV4 => GsoKind::TcpV4,
        GSO_TCPV6 => GsoKind::TcpV6,
        GSO_UDP_L4 => GsoKind::Udp,
        _ => return None,
    };
    if h.flags & F_NEEDS_CSUM == 0 || h.gso_size == 0 {
        return None;
    }
    let l4 = usize::from(h.csum_start);
    let l4_header_bytes = match kind {
        GsoKind::Udp => UDP_HEADER_BYTES,
        GsoKind::TcpV4 | GsoKind::TcpV6 => {
            let words = usize::from(*front.get(l4.checked_add(TCP_DATA_OFFSET)?)?) >> 4;
            (words >= 5).then_some(words.saturating_mul(4))?
        }
    };
    let header_bytes = l4.checked_add(l4_header_bytes)?;
    (header_bytes < frame_bytes).then_some(Gso {
        kind,
        segment_bytes: h.gso_size,
        header_bytes: u16::try_from(header_bytes).ok()?,
        ecn: h.gso_type & GSO_ECN != 0,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn gso_offload(kind: GsoKind) -> Offload {
        let l4_header_bytes = if kind == GsoKind::Udp { 8 } else { 32 };
        Offload {
            needs_csum: true,
            csum_start: 34,
            csum_offset: if kind == GsoKind::Udp { 6 } else { 16 },
            csum_valid: false,
            gso: Some(Gso {
                kind,
                segment_bytes: 1448,
                header_bytes: 34 + l4_header_bytes,
                ecn: true,
            }),
        }
    }

    #[test]
    fn requests_are_understood_as_they_were_meant() {
        let mut front = [0u8; 256];
        front[34 + 12] = 0x80;
        for kind in [GsoKind::TcpV4, GsoKind::TcpV6, GsoKind::Udp] {
            let offload = gso_offload(kind);
            assert_eq!(parse(&request(&offload), 60_000, &front), Ok(offload));
        }
        let mut csum_only = gso_offload(GsoKind::TcpV4);
        csum_only.gso = None;
        assert_eq!(parse(&request(&csum_only), 60, &front[..60]), Ok(csum_only));
        assert_eq!(parse(&[0; 12], 60, &front[..60]), Ok(Offload::default()));
    }

    #[test]
    fn the_header_length_of_a_segment_is_known_if_all_headers_are_present() {
        let offload = Offload { gso: None, ..gso_offload(GsoKind::TcpV4) };
        let mut front = [0u8; 66];
        let told = |o: &Offload, front: &[u8]| {
            let header = request_before(o, front);
            assert_eq!(parse(&header, 60_000, front), Ok(*o));
            u16::from_le_bytes([header[2], header[3]])
        };
        front[34 + 12] = 0x80;
        assert_eq!(told(&offload, &front), 66);
        assert_eq!(told(&offload, &front[..65]), 0, "part of the options is elsewhere");
        assert_eq!(told(&offload, &front[..40]), 0);
        front[34 + 12] = 0x40;
        assert_eq!(told(&offload, &front), 0, "no TCP header is that short");
        let of_udp = Offload { csum_offset: 6, ..offload };
        assert_eq!(told(&of_udp, &front), 0, "the kernel finds the end of an UDP header itself");
        assert_eq!(told(&gso_offload(GsoKind::TcpV4), &[0x80; 66]), 66);
    }

    #[test]
    fn a_checksum_outside_the_frame_is_a_bad_offload() {
        let mut offload = gso_offload(GsoKind::TcpV4);
        offload.gso = None;
        let header = request(&offload);
        assert_eq!(parse(&header, 51, &[0; 51]), Err(DropReason::BadOffload));
        assert!(parse(&header, 52, &[0; 52]).is_ok());
        offload.csum_start = 13;
        assert_eq!(parse(&request(&offload), 60, &[0; 60]), Err(DropReason::BadOffload));
    }

    proptest! {
        #[test]
        fn parsed_headers_are_inside_the_frame(
            header: [u8; 12], front in proptest::collection::vec(any::<u8>(), 0..256), more in 0usize..70_000,
        ) {
            let frame_bytes = front.len() + more;
            if let Ok(o) = parse(&header, frame_bytes, &front) {
                if o.needs_csum {
                    prop_assert!(usize::from(o.csum_start) + usize::from(o.csum_offset) + 2 <= frame_bytes);
                }
                if let Some(gso) = o.gso {
                    prop_assert!(usize::from(gso.header_bytes) < frame_bytes && gso.segment_bytes > 0);
                    prop_assert!(o.needs_csum);
                }
            }
        }
    }
}
