//! The output is packets of at most 64 KiB with the bytes of the input, or a drop with its reason.

use fulmar_stack::mbuf::{Chain, PoolConfig};
use proptest::prelude::*;

use super::*;

const MSS: usize = 1428;
const TCP_BYTES: usize = 32;
const SEQ: u32 = 0xffff_0000;

/// The length fields of an IP header.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Form {
    /// The total length.
    V4(u16),
    /// The payload length.
    V6(u16),
    /// The same, and the body of a hop-by-hop header of 8 bytes.
    Jumbo(u16, [u8; 6]),
}

fn jumbo(payload_bytes: usize) -> [u8; 6] {
    let n = (payload_bytes as u32).to_be_bytes();
    [0xc2, 4, n[0], n[1], n[2], n[3]]
}

/// A frame of a Linux sender with `payload_bytes` bytes of payload, and its virtio-net header.
fn frame(form: Form, payload_bytes: usize) -> ([u8; vnet::HEADER_BYTES], Vec<u8>) {
    let mut f = vec![2; 12];
    let v6 = |f: &mut Vec<u8>, length: u16, next: u8| {
        f.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
        f.extend(length.to_be_bytes());
        f.extend([next, 64]);
        f.extend([0xfd; 32]);
    };
    match form {
        Form::V4(length) => {
            f.extend([8, 0, 0x45, 0]);
            f.extend(length.to_be_bytes());
            f.extend([0, 1, 0x40, 0, 64, 6, 0, 0, 10, 9, 0, 1, 10, 9, 0, 2]);
        }
        Form::V6(length) => v6(&mut f, length, 6),
        Form::Jumbo(length, body) => {
            v6(&mut f, length, 0);
            f.extend([6, 0]);
            f.extend(body);
        }
    }
    let csum_start = f.len() as u16;
    f.extend([0, 80, 0x10, 0]);
    f.extend(SEQ.to_be_bytes());
    f.extend([0, 0, 0, 9, 0x80, 0x18, 1, 0, 0, 0, 0, 0]);
    f.extend([1; 12]);
    f.extend(payload(payload_bytes));
    let header = virtio_header(form, csum_start);
    (header, f)
}

fn virtio_header(form: Form, csum_start: u16) -> [u8; vnet::HEADER_BYTES] {
    let kind = if matches!(form, Form::V4(_)) { GsoKind::TcpV4 } else { GsoKind::TcpV6 };
    vnet::request(&Offload {
        needs_csum: true,
        csum_start,
        csum_offset: 16,
        csum_valid: false,
        gso: Some(Gso {
            kind,
            segment_bytes: MSS as u16,
            header_bytes: csum_start + TCP_BYTES as u16,
            ecn: false,
        }),
    })
}

fn payload(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|i| (i * 7 + i / 251) as u8).collect()
}

fn pool() -> Pool {
    Pool::new(PoolConfig { huge_pages: false, ..PoolConfig::with_budget(16 << 20) }).unwrap()
}

/// The pieces of a frame that has landed in a buffer pair and its overflow.
fn pieces(
    header: &[u8; vnet::HEADER_BYTES],
    frame: &[u8],
) -> (Vec<(Offload, Vec<u8>)>, Counters, usize) {
    let (mut pool, mut counters) = (pool(), Counters::default());
    let mut big = BigTcp::new(1);
    let (small, rest) = frame.split_at(SMALL_BYTES.min(frame.len()));
    let (large, over) = rest.split_at(LARGE_BYTES.min(rest.len()));
    let landed = Landed::new([small, large, over], frame.len());
    let packet = copied(landed, header, frame.len(), &mut pool);
    let packet = big.learned(packet);
    big.queue(packet, &mut pool, &mut counters);
    let mut out = Burst::with_capacity(MOST_PIECES);
    let mut taking = Receiving::new(&mut out, &mut counters);
    big.deliver(MOST_PIECES, &mut taking);
    let mut all = Vec::new();
    while let Some(p) = out.pop_front() {
        assert!(p.chain.truesize() < 2 * p.chain.len() + 4096, "charged for the memory of another");
        all.push((p.offload, p.chain.to_vec()));
        pool.free(p.chain);
    }
    assert!(big.is_empty());
    (all, counters, pool.stats().mbufs_in_use)
}

/// The payload of pieces, whose headers are checked.
fn joined(pieces: &[(Offload, Vec<u8>)], l4: usize) -> Vec<u8> {
    let mut all = Vec::new();
    for (offload, f) in pieces {
        assert!(f.len() <= LONGEST_PLAIN);
        let (length_at, without) = if l4 == 34 { (16, 14) } else { (18, 54) };
        let length = u16::from_be_bytes([f[length_at], f[length_at + 1]]);
        assert_eq!(usize::from(length), f.len() - without);
        assert_eq!(f[if l4 == 34 { 23 } else { 20 }], protocol::TCP);
        let seq = u32::from_be_bytes(f[l4 + 4..l4 + 8].try_into().unwrap());
        assert_eq!(seq, SEQ.wrapping_add(all.len() as u32));
        assert_eq!((offload.csum_start, offload.needs_csum), (l4 as u16, true));
        let header_bytes = offload.gso.map(|g| usize::from(g.header_bytes));
        let is_super = f.len() > l4 + TCP_BYTES + MSS;
        assert_eq!(header_bytes, is_super.then_some(l4 + TCP_BYTES));
        all.extend(&f[l4 + TCP_BYTES..]);
    }
    all
}

#[test]
fn a_frame_of_each_form_becomes_pieces_with_its_bytes() {
    for bytes in [66_000, 130_000, 190_000, 8 * 65_535 - 100] {
        let jumbo = jumbo(8 + TCP_BYTES + bytes);
        for (form, l4) in [(Form::V4(0), 34), (Form::V6(0), 54), (Form::Jumbo(0, jumbo), 54)] {
            let (header, frame) = frame(form, bytes);
            let (all, counters, live) = pieces(&header, &frame);
            assert!(joined(&all, l4) == payload(bytes), "{form:?} of {bytes}");
            let least = bytes.div_ceil(LONGEST_PLAIN - l4 - TCP_BYTES);
            assert!((least..=least + 1).contains(&all.len()), "{} of {bytes}", all.len());
            assert_eq!((counters.value(Counter::BigTcpFrames), live), (1, 0));
            // Only the last piece has PSH.
            let pushed: Vec<bool> = all.iter().map(|(_, f)| f[l4 + 13] & 8 != 0).collect();
            assert!(pushed.last() == Some(&true) && !pushed[..pushed.len() - 1].contains(&true));
        }
    }
}

#[test]
fn an_ipv6_frame_whose_payload_length_is_right_is_cut_too() {
    // 65,535 bytes behind a fixed header of 40: more than a packet of 64 KiB.
    let bytes = 65_535 - TCP_BYTES;
    let (header, frame) = frame(Form::V6(65_535), bytes);
    let (all, _, _) = pieces(&header, &frame);
    assert!(joined(&all, 54) == payload(bytes));
}

#[test]
fn lengths_that_lie_are_bad_offloads() {
    let bytes = 130_000;
    let right = 8 + TCP_BYTES + bytes;
    let lies = [
        Form::V4(20),
        Form::V4(0xffff),
        Form::V6(20),
        Form::V6(0xffff),
        Form::Jumbo(0, jumbo(right - 1)),
        Form::Jumbo(0, jumbo(right + 1)),
        Form::Jumbo(0, jumbo(0)),
        Form::Jumbo(0, jumbo(u32::MAX as usize)),
        // A payload length beside the option (RFC 2675 section 3).
        Form::Jumbo(40, jumbo(right)),
        // Padding, or an option of another length, instead.
        Form::Jumbo(0, [1, 4, 0, 0, 0, 0]),
        Form::Jumbo(0, [0xc2, 3, 0, 1, 0xfb, 0xf8]),
    ];
    for form in lies {
        let (header, frame) = frame(form, bytes);
        let (all, counters, live) = pieces(&header, &frame);
        assert!(all.is_empty(), "{form:?}");
        assert_eq!((counters.drops(DropReason::BadOffload), live), (1, 0), "{form:?}");
    }
}

#[test]
fn a_hop_by_hop_header_that_says_it_is_longer_is_a_bad_offload() {
    let (header, mut frame) = frame(Form::Jumbo(0, jumbo(8 + TCP_BYTES + 130_000)), 130_000);
    frame[V6_END + 1] = 1;
    let (_, counters, live) = pieces(&header, &frame);
    assert_eq!((counters.drops(DropReason::BadOffload), live), (1, 0));
}

#[test]
fn a_large_frame_that_is_not_a_super_frame_is_too_big() {
    let (_, frame) = frame(Form::V4(0), 130_000);
    let (_, counters, live) = pieces(&[0; vnet::HEADER_BYTES], &frame);
    assert_eq!((counters.drops(DropReason::FrameTooBig), live), (1, 0));
}

#[test]
fn a_frame_for_which_there_is_no_memory_is_dropped_whole() {
    let budget = PoolConfig { huge_pages: false, ..PoolConfig::with_budget(1 << 20) };
    let mut pool = Pool::new(budget).unwrap();
    let (header, frame) = frame(Form::V6(0), 8 * 65_535 - 100);
    let mut held = Vec::new();
    while let Ok(m) = pool.alloc(LARGE_BYTES, 0, fulmar_stack::mbuf::Purpose::Receive) {
        held.push(m);
    }
    let live = pool.stats().mbufs_in_use;
    let landed = Landed::new([&frame[..]], frame.len());
    let none = copied(landed, &header, frame.len(), &mut pool);
    assert_eq!(none.err(), Some(DropReason::NoBuffer));
    assert_eq!(pool.stats().mbufs_in_use, live);
    held.into_iter().for_each(|m| pool.free(Chain::from(m)));
}

proptest! {
    #[test]
    fn any_headers_give_pieces_or_a_reason(
        form in prop_oneof![
            any::<u16>().prop_map(Form::V4), any::<u16>().prop_map(Form::V6),
            any::<(u16, [u8; 6])>().prop_map(|(n, b)| Form::Jumbo(n, b)),
            Just(Form::V4(0)), Just(Form::V6(0)), Just(Form::Jumbo(0, jumbo(100_040))),
        ],
        changes in proptest::collection::vec((0usize..120, any::<u8>()), 0..4),
        virtio in proptest::collection::vec((0usize..vnet::HEADER_BYTES, any::<u8>()), 0..3),
    ) {
        let (mut header, mut frame) = frame(form, 100_000);
        changes.iter().for_each(|(at, byte)| frame[*at] = *byte);
        virtio.iter().for_each(|(at, byte)| header[*at] = *byte);
        let (all, counters, live) = pieces(&header, &frame);
        prop_assert_eq!(live, 0);
        let dropped: u64 = [DropReason::BadOffload, DropReason::FrameTooBig, DropReason::NoBuffer]
            .map(|r| counters.drops(r)).iter().sum();
        prop_assert!(dropped > 0 || !all.is_empty());
        prop_assert!(all.iter().all(|(_, f)| f.len() <= LONGEST_PLAIN));
    }
}
