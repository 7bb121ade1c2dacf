//! Building segments as mbufs, and verifying the checksum of received ones.

use crate::base::{FlowKey, Gso, GsoKind, Offload, SeqNum};
use crate::mbuf::{Chain, Mbuf, NoBuffer, Pool, Purpose};
use crate::tcp::contract::{HEADROOM, SegmentOut};
use crate::wire::checksum::Sum;
use crate::wire::protocol;
use crate::wire::tcp::{CHECKSUM_OFFSET, Flags, Header, MAX_HEADER_BYTES};
use core::net::IpAddr;

/// Checksum of a flow's pseudo header without the length, which `add_u16` adds.
pub(crate) fn pseudo_sum(key: &FlowKey) -> Sum {
    let mut sum = Sum::new();
    sum.add_pseudo(key.local_ip(), key.remote_ip(), protocol::TCP, 0);
    sum
}

/// Writes `hdr` into a new mbuf. Its checksum field holds the folded pseudo-header sum for
/// `tcp_bytes` of header and payload.
pub(crate) fn header_mbuf(
    pool: &mut Pool,
    pseudo: Sum,
    hdr: &Header,
    tcp_bytes: usize,
) -> Result<Mbuf, NoBuffer> {
    let mut mbuf = pool.alloc(MAX_HEADER_BYTES, HEADROOM, Purpose::Control)?;
    let mut sum = pseudo;
    // A segment is shorter than an IP packet, so its length fits 16 bits.
    sum.add_u16(tcp_bytes as u16);
    let written =
        mbuf.append(hdr.header_bytes()).is_some_and(|bytes| write_header(hdr, bytes, sum.fold()));
    if written {
        return Ok(mbuf);
    }
    pool.free_mbuf(mbuf);
    Err(NoBuffer)
}

fn write_header(hdr: &Header, bytes: &mut [u8], folded: u16) -> bool {
    let emitted = hdr.emit(bytes).is_ok();
    match bytes.get_mut(CHECKSUM_OFFSET..).and_then(|b| b.first_chunk_mut::<2>()) {
        Some(field) => *field = folded.to_be_bytes(),
        None => return false,
    }
    emitted
}

/// Checksum offload of a segment.
pub(crate) fn checksum_offload() -> Offload {
    Offload {
        needs_csum: true,
        csum_start: 0,
        csum_offset: CHECKSUM_OFFSET as u16,
        csum_valid: false,
        gso: None,
    }
}

/// Checksum offload of a segment, and segmentation offload if its payload exceeds `mss`.
pub(crate) fn offload(hdr: &Header, payload_bytes: usize, mss: usize, kind: GsoKind) -> Offload {
    let gso = (payload_bytes > mss).then(|| Gso {
        kind,
        segment_bytes: mss as u16,
        header_bytes: hdr.header_bytes() as u16,
        ecn: hdr.flags.contains(Flags::CWR),
    });
    Offload { gso, ..checksum_offload() }
}

/// Builds a segment without payload: a reset, or an ACK from TIME-WAIT. Ports come from `hdr`,
/// addresses from `key`.
///
/// Errors: [`NoBuffer`] if even the control reserve is exhausted.
pub(crate) fn control_segment(
    pool: &mut Pool,
    key: &FlowKey,
    hdr: &Header,
) -> Result<SegmentOut, NoBuffer> {
    let mbuf = header_mbuf(pool, pseudo_sum(key), hdr, hdr.header_bytes())?;
    Ok(SegmentOut { chain: Chain::from(mbuf), offload: checksum_offload(), ecn_capable: false })
}

/// The reset that answers a segment without a connection (RFC 9293 section 3.10.7.1). `None` if the
/// segment is a reset.
pub(crate) fn reset_for(hdr: &Header, payload_len: usize) -> Option<Header> {
    if hdr.flags.contains(Flags::RST) {
        return None;
    }
    let blank = Header { src_port: hdr.dst_port, dst_port: hdr.src_port, ..Header::default() };
    if hdr.flags.contains(Flags::ACK) {
        return Some(Header { seq: hdr.ack, flags: Flags::RST, ..blank });
    }
    let syn = u32::from(hdr.flags.contains(Flags::SYN));
    let fin = u32::from(hdr.flags.contains(Flags::FIN));
    let end = hdr.seq.0.wrapping_add(payload_len as u32).wrapping_add(syn).wrapping_add(fin);
    Some(Header { ack: SeqNum(end), flags: Flags::RST | Flags::ACK, ..blank })
}

/// Verifies the checksum of a received segment. `chain` is the TCP header and payload; `src` and
/// `dst` are the addresses of the IP header.
pub(crate) fn verify_checksum(src: IpAddr, dst: IpAddr, chain: &Chain) -> bool {
    let mut sum = Sum::new();
    sum.add_pseudo(src, dst, protocol::TCP, chain.len() as u32);
    for bytes in chain.slices() {
        sum.add_bytes(bytes);
    }
    sum.finish() == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mbuf::PoolConfig;

    fn key() -> FlowKey {
        FlowKey::new("10.0.0.1:80".parse().unwrap(), "10.0.0.2:4000".parse().unwrap())
    }

    #[test]
    fn a_control_segment_with_a_flipped_bit_fails_the_checksum() {
        let mut pool = Pool::new(PoolConfig::default()).unwrap();
        let hdr = Header { src_port: 80, dst_port: 4000, flags: Flags::RST, ..Header::default() };
        let seg = control_segment(&mut pool, &key(), &hdr).unwrap();
        assert!(seg.chain.front().unwrap().headroom() >= 80);
        let mut bytes = seg.chain.to_vec();
        let sum = crate::wire::checksum::checksum(&bytes);
        bytes[CHECKSUM_OFFSET..CHECKSUM_OFFSET + 2].copy_from_slice(&sum.to_be_bytes());
        for (flip, good) in [(0u8, true), (1, false)] {
            bytes[4] ^= flip;
            let mut chain = pool.alloc_chain(bytes.len(), 0, Purpose::Receive).unwrap();
            chain.copy_from(0, &bytes);
            let (src, dst) = (key().local_ip(), key().remote_ip());
            assert_eq!(verify_checksum(src, dst, &chain), good);
            pool.free(chain);
        }
        pool.free(seg.chain);
    }

    #[test]
    fn a_reset_takes_its_number_from_the_ack_or_acknowledges_the_segment() {
        let ack = Header { ack: SeqNum(77), flags: Flags::ACK, ..Header::default() };
        let r = reset_for(&ack, 10).unwrap();
        assert_eq!((r.seq, r.flags), (SeqNum(77), Flags::RST));
        let syn = Header { seq: SeqNum(u32::MAX), flags: Flags::SYN, ..Header::default() };
        let r = reset_for(&syn, 10).unwrap();
        assert_eq!((r.seq, r.ack, r.flags), (SeqNum(0), SeqNum(10), Flags::RST | Flags::ACK));
        assert!(reset_for(&Header { flags: Flags::RST, ..Header::default() }, 0).is_none());
    }
}
