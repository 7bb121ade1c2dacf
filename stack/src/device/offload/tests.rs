use crate::base::{DropReason, EtherAddr, Offload};
use proptest::prelude::*;

use super::*;
use crate::device::testing::{frame, packet, pool};

fn plain(mtu: usize) -> Caps {
    Caps::plain(mtu, EtherAddr([2, 0, 0, 0, 0, 1]))
}

fn drain(out: &mut Burst) -> Vec<Packet> {
    std::iter::from_fn(|| out.pop_front()).collect()
}

/// Offers the frame again and again, as a caller with a small burst does.
fn fit_all(p: Packet, caps: &Caps, pool: &mut Pool, room: usize) -> Vec<Packet> {
    let mut out = Burst::with_capacity(room);
    let mut all = Vec::new();
    let mut next = Some(p);
    while let Some(p) = next.take() {
        if let Err(u) = fit(p, caps, pool, &mut out, &mut Counters::default()) {
            assert_eq!(u.why, Refusal::NoSpace);
            next = Some(u.packet);
        }
        all.append(&mut drain(&mut out));
    }
    all
}

fn l4_header_bytes(udp: bool) -> usize {
    if udp { 8 } else { 32 }
}

/// Clears "don't fragment" of an IPv4 header.
fn may_be_fragmented(p: &mut Packet) {
    let mut h = p.chain.to_vec();
    h[IDENT + 2] &= !DONT_FRAGMENT;
    put_u16(&mut h, ETHER_BYTES + 10, 0);
    let sum = checksum(&h[ETHER_BYTES..ETHER_BYTES + 20]);
    put_u16(&mut h, ETHER_BYTES + 10, sum);
    p.chain.copy_from(0, &h[..ETHER_BYTES + 20]).unwrap();
}

proptest! {
    /// The model: the frames that a plain device is given.
    #[test]
    fn flat_packets_are_those_that_a_plain_device_sends(
        v6: bool, udp: bool, payload in proptest::collection::vec(any::<u8>(), 1..9000),
        mss in 1u16..1400, skips: bool, atomic: bool,
    ) {
        let mut pool = pool();
        let mut p = frame(&mut pool, v6, udp, &payload, mss);
        if !v6 && !atomic {
            may_be_fragmented(&mut p);
        }
        let skip = if skips { ETHER_BYTES } else { 0 };
        let mut flat = Packets::new();
        prop_assert_eq!(flat.append(&p, skip), Ok(()));
        let packets = fit_all(p, &plain(1500), &mut pool, 8);
        let model: Vec<_> = packets.iter().map(|p| p.chain.to_vec()[skip..].to_vec()).collect();
        prop_assert_eq!(flat.iter().map(<[u8]>::to_vec).collect::<Vec<_>>(), model);
        packets.into_iter().for_each(|p| pool.free(p.chain));
    }

    /// Of requests that do not match the frame, every one is refused or carried out; none reaches beyond it.
    #[test]
    fn a_request_that_lies_is_refused_or_stays_within_the_frame(
        bytes in proptest::collection::vec(any::<u8>(), 0..200),
        (csum_start, csum_offset, needs_csum) in (0u16..220, 0u16..220, any::<bool>()),
        gso in proptest::option::of((0u8..3, any::<u16>(), 0u16..220)),
    ) {
        let mut pool = pool();
        let mut p = packet(&mut pool, &bytes);
        let gso = gso.map(|(kind, segment_bytes, header_bytes)| Gso {
            kind: [GsoKind::TcpV4, GsoKind::TcpV6, GsoKind::Udp][usize::from(kind)],
            segment_bytes, header_bytes, ecn: false,
        });
        p.offload = Offload { needs_csum, csum_start, csum_offset, csum_valid: false, gso };
        let mut flat = Packets::new();
        if flat.append(&p, ETHER_BYTES).is_err() {
            prop_assert!(flat.is_empty());
        }
        pool.free(p.chain);
    }

    #[test]
    fn cut_packets_carry_the_payload_in_order_with_right_checksums(
        v6: bool, udp: bool, payload in proptest::collection::vec(any::<u8>(), 1..9000),
        mss in 1u16..1400, room in 1usize..200, atomic: bool,
    ) {
        let mut pool = pool();
        let mut p = frame(&mut pool, v6, udp, &payload, mss);
        if !v6 && !atomic {
            may_be_fragmented(&mut p);
        }
        let original = p.chain.to_vec();
        let l4 = usize::from(p.offload.csum_start);
        let header_bytes = l4 + l4_header_bytes(udp);
        let count = p.wire_packets();
        let packets = fit_all(p, &plain(1500), &mut pool, room);
        prop_assert_eq!(packets.len(), count);
        let mut rebuilt: Vec<u8> = Vec::new();
        for (i, p) in packets.iter().enumerate() {
            prop_assert!(verify(p), "packet {} of {}", i, count);
            prop_assert!(!p.offload.needs_csum && p.offload.gso.is_none());
            let bytes = p.chain.to_vec();
            if !udp {
                let seq = take_u32(&original, l4 + 4).wrapping_add(rebuilt.len() as u32);
                prop_assert_eq!(take_u32(&bytes, l4 + 4), seq);
                let flags = 0x10 | if i == 0 { 0x80 } else { 0 } | if i + 1 == count { 0x09 } else { 0 };
                prop_assert_eq!(bytes[l4 + 13], flags);
            }
            if !v6 {
                let ident = u16::from_be_bytes([bytes[18], bytes[19]]);
                let further = if atomic { 0 } else { i as u16 };
                prop_assert_eq!(ident, 0xfffeu16.wrapping_add(further));
            }
            rebuilt.extend(&bytes[header_bytes..]);
        }
        prop_assert_eq!(rebuilt, payload);
    }

    #[test]
    fn a_completed_checksum_is_right_wherever_the_chain_is_cut(
        v6: bool, udp: bool, payload in proptest::collection::vec(any::<u8>(), 0..600),
        cuts in proptest::collection::vec(any::<usize>(), 0..5),
    ) {
        let mut pool = pool();
        let p = frame(&mut pool, v6, udp, &payload, 1400);
        let chain = crate::device::testing::chain(&mut pool, &p.chain.to_vec(), &cuts);
        let mut p = Packet { chain, offload: p.offload };
        finish_checksum(&mut p, &mut pool).unwrap();
        prop_assert!(!p.offload.needs_csum);
        prop_assert!(verify(&p));
        let mut bytes = p.chain.to_vec();
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
        prop_assert!(!verify(&packet(&mut pool, &bytes)));
    }

    #[test]
    fn invalid_requests_never_panic(
        bytes in proptest::collection::vec(any::<u8>(), 1..400),
        csum in any::<(u16, u16)>(), seg in 0u16..600, hdr in 0u16..400, kind in 0u8..3,
    ) {
        let mut pool = pool();
        let mut p = packet(&mut pool, &bytes);
        let kind = [GsoKind::TcpV4, GsoKind::TcpV6, GsoKind::Udp][usize::from(kind)];
        p.offload.needs_csum = true;
        (p.offload.csum_start, p.offload.csum_offset) = csum;
        p.offload.gso = (seg > 100).then_some(Gso { kind, segment_bytes: seg, header_bytes: hdr, ecn: false });
        let mut out = Burst::with_capacity(64);
        let _ = fit(p, &plain(1500), &mut pool, &mut out, &mut Counters::default());
    }
}

#[test]
fn shared_headers_are_copied_before_the_checksum_is_stored() {
    let mut pool = pool();
    let mut p = frame(&mut pool, false, false, &[7; 100], 1400);
    let held = pool.clone_range(&p.chain, 0, p.chain.len()).unwrap();
    let before = held.to_vec();
    finish_checksum(&mut p, &mut pool).unwrap();
    assert_eq!(held.to_vec(), before);
    assert_ne!(p.chain.to_vec(), before);
    assert!(verify(&p));
}

#[test]
fn a_udp_checksum_of_zero_is_sent_as_all_ones() {
    assert_eq!(stored(0, UDP_CSUM), 0xffff);
    assert_eq!(stored(0, TCP_CSUM), 0);
}

#[test]
fn a_device_with_a_small_limit_gets_smaller_super_frames() {
    let mut pool = pool();
    let payload: Vec<u8> = (0..60_000u32).map(|i| i as u8).collect();
    let mut caps = plain(1500);
    (caps.tx_csum, caps.tso) = (true, Some(16_384));
    let p = frame(&mut pool, true, false, &payload, 1000);
    let header_bytes = usize::from(p.offload.gso.unwrap().header_bytes);
    let frames = fit_all(p, &caps, &mut pool, 8);
    assert_eq!(frames.len(), 4);
    assert_eq!(frames.iter().map(Packet::wire_packets).sum::<usize>(), 60);
    assert!(frames.iter().all(|f| check(f, &caps).is_ok() && f.offload.needs_csum));
    let rebuilt: Vec<u8> =
        frames.iter().flat_map(|f| f.chain.to_vec().split_off(header_bytes)).collect();
    assert_eq!(rebuilt, payload);
}

#[test]
fn a_capable_device_gets_the_frame_untouched() {
    let mut pool = pool();
    let mut caps = plain(1500);
    (caps.tx_csum, caps.tso) = (true, Some(65_535));
    let p = frame(&mut pool, false, false, &[1; 20_000], 1448);
    let before = (p.chain.to_vec(), p.offload);
    let after = fit_all(p, &caps, &mut pool, 1);
    assert_eq!((after[0].chain.to_vec(), after[0].offload), before);
}

#[test]
fn a_chain_of_too_many_mbufs_is_copied_together() {
    let mut pool = pool();
    let mut caps = plain(1500);
    caps.max_segs = 2;
    let cuts: Vec<usize> = (1..9).map(|i| i * 10).collect();
    let chain = crate::device::testing::chain(&mut pool, &[5; 100], &cuts);
    let after = fit_all(Packet::new(chain), &caps, &mut pool, 1);
    assert_eq!((after[0].chain.segs(), after[0].chain.to_vec()), (1, vec![5; 100]));
}

#[test]
fn a_frame_above_the_mtu_is_dropped_as_too_big() {
    let mut pool = pool();
    let mut out = Burst::with_capacity(4);
    for segment in [None, Some(1460u16)] {
        let mut p = match segment {
            None => packet(&mut pool, &[0; 1515]),
            Some(mss) => frame(&mut pool, false, false, &[0; 5000], mss),
        };
        p.offload.needs_csum = segment.is_some();
        let unfit =
            fit(p, &plain(1500), &mut pool, &mut out, &mut Counters::default()).unwrap_err();
        assert_eq!(unfit.why, Refusal::Drop(DropReason::FrameTooBig));
    }
}
