//! A peer that breaks the protocol: one honest end, and the bare memory of the other one.
//!
//! Its only effects are drops and the end of the link (`EPROTO`). Every decision is made on a copy, so a peer that
//! changes a frame while it is read gets one frame or the other, never a mixture of checks and bytes that they were not
//! made on.

use std::sync::atomic::AtomicBool;

use super::super::layout::{BELL, PIECES, RETURNED, Record, SLABS, STATE, Violation};
use super::super::layout::{Piece, write_return};
use super::super::meet::{Met, meet_oneself};
use super::*;
use crate::drivers::vnet;
use fulmar_stack::wire::dissect::Headers;

fn liar() -> (Host, Met) {
    let (honest, liar) = meet_oneself(&config()).unwrap();
    (Host::new(Shm::new(honest, &config()).unwrap()), liar)
}

/// Where the liar keeps its frame.
const AT: usize = SLABS + 64;

/// Puts a frame at `AT` into the ring as frame number `index`, cut into pieces of these lengths and the rest.
fn show(liar: &Met, index: u64, frame: &[u8], cuts: &[usize]) {
    sys::scribble(&liar.own, AT, frame);
    show_again(liar, index, frame, cuts);
}

/// As [`show`], without writing the bytes.
fn show_again(liar: &Met, index: u64, frame: &[u8], cuts: &[usize]) {
    let mut record = Record::new(index as u32 % FRAMES as u32, vnet::request(&offload(frame)));
    let mut at = 0;
    for len in cuts.iter().copied().chain([usize::MAX]) {
        let len = len.min(frame.len() - at);
        assert!(record.push(Piece { at: (AT + at) as u32, len: len as u32 }));
        at += len;
    }
    record.write(&liar.own, index);
    liar.own.store(SENT, index + 1, Relaxed);
}

#[test]
fn headers_are_private_in_whatever_pieces_they_come() {
    let frame = datagram(1, 9000);
    let byte_by_byte = [1; PIECES - 1];
    for cuts in [&[][..], &[14], &[14, 20], &[14, 20, 8], &[41], &[42], &[43], &byte_by_byte] {
        let (mut host, liar) = liar();
        show(&liar, 0, &frame, cuts);
        let got = host.receive();
        sys::scribble(&liar.own, AT, &[0xff; 9000]);
        let front = got[0].chain.front().unwrap();
        assert!(!front.is_volatile() && front.as_slice() == &frame[..HEADERS], "{cuts:?}");
        assert!(got[0].chain.is_volatile(), "the payload is where it was");
        assert!(got[0].chain.to_vec()[HEADERS..] == [0xff; 9000 - HEADERS]);
        host.drop_all(got);
    }
}

/// Long frames other than a whole TCP segment or UDP datagram whose checksum is not verified.
fn frames_that_are_parsed_or_summed() -> Vec<(&'static str, Vec<u8>, Offload)> {
    let udp = datagram(1, 5000);
    let with = |at: usize, value: u8| {
        let mut f = udp.clone();
        f[at] = value;
        let header: [u8; 20] = f[14..34].try_into().unwrap();
        let mut header = header;
        header[10..12].fill(0);
        let sum = fulmar_stack::wire::checksum::checksum(&header);
        f[24..26].copy_from_slice(&sum.to_be_bytes());
        f
    };
    let left = offload(&udp);
    let outside = Offload { csum_start: 40, csum_offset: 4, ..left };
    vec![
        ("ICMP", with(23, 1), left),
        ("a first fragment", with(20, 0x20), left),
        ("a later fragment", with(21, 1), left),
        ("ARP", with(13, 6), left),
        ("another version", with(14, 0x75), left),
        ("headers that contradict the length", with(16, 0xff), left),
        ("a checksum to be verified", udp.clone(), Offload::default()),
        ("a checksum that ends in the payload", udp, outside),
    ]
}

#[test]
fn a_frame_that_is_parsed_or_summed_is_private_as_a_whole() {
    for (what, frame, offload) in frames_that_are_parsed_or_summed() {
        let (mut host, liar) = liar();
        sys::scribble(&liar.own, AT, &frame);
        let mut record = Record::new(0, vnet::request(&offload));
        assert!(record.push(Piece { at: AT as u32, len: frame.len() as u32 }));
        record.write(&liar.own, 0);
        liar.own.store(SENT, 1, Relaxed);
        let got = host.receive();
        sys::scribble(&liar.own, AT, &[0xff; 5000]);
        assert!(!got[0].chain.is_volatile() && got[0].chain.to_vec() == frame, "{what}");
        host.drop_all(got);
    }
}

/// Bytes of the front that the flipper changes, each between the honest value and another one: version and
/// header length, total length, fragment offset, protocol, UDP length, EtherType.
const FLIPS: [(usize, u8); 7] =
    [(13, 6), (14, 0x4f), (16, 0), (20, 0x20), (21, 1), (23, 6), (38, 0)];

#[test]
fn a_peer_that_changes_headers_while_they_are_read_gets_decisions_on_one_copy() {
    let (mut host, liar) = liar();
    let frame = datagram(3, 6000);
    sys::scribble(&liar.own, AT, &frame);
    let is_over = AtomicBool::new(false);
    let (mut lent, mut copied) = (0, 0);
    std::thread::scope(|threads| {
        threads.spawn(|| {
            let mut round = 0usize;
            while !is_over.load(Relaxed) {
                let (at, other) = FLIPS[round % FLIPS.len()];
                sys::scribble(&liar.own, AT + at, &[other]);
                sys::scribble(&liar.own, AT + at, &[frame[at]]);
                round += 1;
            }
        });
        for index in 0..4000 {
            show_again(&liar, index, &frame, &[14]);
            for p in host.receive() {
                if p.chain.is_volatile() {
                    lent += 1;
                    let front = p.chain.front().unwrap().as_slice();
                    let seen = Headers::parse(front, p.chain.len()).expect("checked on this copy");
                    assert_eq!(seen.payload_at, front.len());
                } else {
                    copied += 1;
                    assert_eq!(p.chain.to_vec(), p.chain.to_vec());
                }
                host.drop_all(vec![p]);
            }
        }
        is_over.store(true, Relaxed);
    });
    assert_eq!(lent + copied + host.drops(DropReason::BadOffload), 4000);
    assert_eq!(host.device.lost(), None);
    // Once the peer is honest the same frame is lent again.
    show_again(&liar, 4000, &frame, &[14]);
    let last = host.receive();
    assert!(last.iter().all(|p| p.chain.is_volatile()) && last.len() == 1);
    host.drop_all(last);
}

/// Any word of the rings, with values that are nearly right, and any at all.
fn lies() -> impl Strategy<Value = Vec<(usize, u64)>> {
    let word = prop_oneof![
        4 => Just(SENT), 2 => Just(RETURNED), 1 => Just(BELL), 1 => Just(STATE),
        8 => (0..40usize * 16).prop_map(|i| 4096 + i * 8),
        4 => (0..16usize).prop_map(|i| 4096 + FRAMES * 128 + i * 8),
    ];
    let small = 0u64..20;
    let piece = (0u64..1 << 26, 0u64..70_000).prop_map(|(at, len)| at | len << 32);
    let frame = (0u64..80, 0u64..66_000).prop_map(|(at, len)| (AT as u64 + at) | len << 32);
    let head = (0u64..FRAMES as u64 + 2, 0u64..PIECES as u64 + 2).prop_map(|(s, n)| s | n << 32);
    let value = prop_oneof![3 => small, 3 => piece, 3 => frame, 3 => head, 1 => any::<u64>()];
    proptest::collection::vec((word, value), 1..200)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn a_peer_that_scribbles_over_everything_costs_drops_or_the_link_and_nothing_else(
        lies in lies(),
    ) {
        let (mut host, liar) = liar();
        sys::scribble(&liar.own, AT, &datagram(1, 60_000));
        let mut kept = Vec::new();
        for (i, (at, value)) in lies.into_iter().enumerate() {
            liar.own.store(at, value, Relaxed);
            host.send(&pattern(i, 100));
            let got = host.receive_at(NOW + Duration::from_millis(i as u64));
            prop_assert!(got.iter().all(|p| p.chain.to_vec().len() <= 65_549));
            kept.extend(got);
            host.device.arm();
            host.device.disarm();
        }
        prop_assert!(matches!(host.device.lost(), None | Some(libc::EPROTO)));
        prop_assert!(host.pool.outstanding() < 20_000);
        host.drop_all(kept);
        // Dead at last: everything comes home, lied or not.
        drop(liar);
        let mut now = NOW;
        let is_home = sooner_or_later(|| {
            now = now + Duration::from_secs(10);
            let last = host.receive_at(now);
            host.drop_all(last);
            host.device.tx_reap(now, &mut host.pool);
            host.pool.outstanding() == 0
        });
        prop_assert!(is_home, "{} stay out", host.pool.outstanding());
    }
}

/// The offset and length of a piece, as the lying peer claims.
type Range = (u64, u64);

/// Puts one record into the liar's ring and shows it.
fn claim(liar: &Met, slot: u64, count: u64, pieces: &[Range]) {
    liar.own.store(4096, slot | count << 32, Relaxed);
    for (i, (at, len)) in pieces.iter().enumerate() {
        liar.own.store(4096 + 24 + i * 8, at | len << 32, Relaxed);
    }
    liar.own.store(SENT, 1, Relaxed);
}

/// The link has ended with `EPROTO`, and the device names the violation.
fn assert_ended_for(host: &Host, violation: Violation) {
    assert_eq!(host.device.lost(), Some(libc::EPROTO), "{violation:?}");
    let path = host.device.stats().path;
    assert!(path.ends_with(violation.sentence()), "{violation:?}: {path}");
}

#[test]
fn a_record_that_no_honest_peer_writes_ends_the_link() {
    let good = (SLABS as u64, 100);
    let end = (SLABS + (8 << 20) + (16 << 20) + 10 * SLAB_BYTES) as u64;
    let long = (SLABS as u64, 60_000);
    let cases: [(u64, u64, &[Range], Violation); 11] = [
        (FRAMES as u64, 1, &[good], Violation::Slot),
        (u32::MAX.into(), 1, &[good], Violation::Slot),
        (0, 0, &[good], Violation::PieceCount),
        (0, PIECES as u64 + 1, &[good], Violation::PieceCount),
        (0, u32::MAX.into(), &[good], Violation::PieceCount),
        (0, 1, &[(0, 100)], Violation::Piece),
        (0, 1, &[(end, 1)], Violation::Piece),
        (0, 1, &[(end - 1, 2)], Violation::Piece),
        (0, 1, &[(u32::MAX.into(), u32::MAX.into())], Violation::Piece),
        (0, 1, &[(SLABS as u64, 0)], Violation::Piece),
        (0, 2, &[long, long], Violation::FrameBytes),
    ];
    for (slot, count, pieces, violation) in cases {
        let (mut host, liar) = liar();
        claim(&liar, slot, count, pieces);
        assert!(host.receive().is_empty());
        assert_ended_for(&host, violation);
        assert_eq!(host.drops(DropReason::ShmInvalid), 1);
    }
    let (mut host, liar) = liar();
    claim(&liar, 0, 1, &[good]);
    assert_eq!(host.receive().len(), 1);
    assert_eq!(host.device.lost(), None);
}

#[test]
fn a_ring_that_goes_back_or_beyond_its_places_ends_the_link() {
    for (first, then) in [(0, FRAMES as u64 + 1), (3, 2), (3, 0), (0, u64::MAX), (5, 1 << 63)] {
        let (mut host, liar) = liar();
        for index in 0..first {
            show(&liar, index, &datagram(1, 100), &[]);
        }
        let got = host.receive();
        assert_eq!(got.len() as u64, first);
        host.drop_all(got);
        liar.own.store(SENT, then, Relaxed);
        assert!(host.receive().is_empty());
        assert_ended_for(&host, Violation::Index);
    }
}

#[test]
fn a_slot_that_is_out_cannot_be_sent_again() {
    let (mut host, liar) = liar();
    let frame = datagram(1, 5000);
    show(&liar, 0, &frame, &[]);
    let kept = host.receive();
    assert!(kept.len() == 1 && kept[0].chain.is_volatile());
    let mut again = Record::new(0, vnet::request(&offload(&frame)));
    assert!(again.push(Piece { at: AT as u32, len: 5000 }));
    again.write(&liar.own, 1);
    liar.own.store(SENT, 2, Relaxed);
    assert!(host.receive().is_empty());
    assert_ended_for(&host, Violation::SlotInUse);
    host.drop_all(kept);
}

type Prepare<'a> = &'a dyn Fn(&mut Host, &Met);

#[test]
fn a_slot_comes_back_once_and_only_if_it_is_out() {
    let never = |_: &mut Host, liar: &Met| write_return(&liar.own, 0, 7);
    let twice = |host: &mut Host, liar: &Met| {
        assert!(host.send(&pattern(1, 100)));
        write_return(&liar.own, 0, 0);
        liar.own.store(RETURNED, 1, Relaxed);
        host.receive();
        assert_eq!(host.device.lost(), None);
        write_return(&liar.own, 1, 0);
    };
    let no_slot = |_: &mut Host, liar: &Met| write_return(&liar.own, 0, FRAMES as u32);
    let cases: [(Prepare<'_>, u64, Violation); 4] = [
        (&never, 1, Violation::SlotNotOut),
        (&twice, 2, Violation::SlotNotOut),
        (&no_slot, 1, Violation::Slot),
        (&never, FRAMES as u64 + 1, Violation::Index),
    ];
    for (prepare, returned, violation) in cases {
        let (mut host, liar) = liar();
        prepare(&mut host, &liar);
        liar.own.store(RETURNED, returned, Relaxed);
        host.receive();
        assert_ended_for(&host, violation);
    }
}

#[test]
fn a_ring_that_is_always_full_is_taken_in_steps_of_the_budget() {
    let (mut host, liar) = liar();
    let frame = datagram(1, 100);
    show(&liar, 0, &frame, &[]);
    for index in 0..FRAMES as u64 {
        show_again(&liar, index, &frame, &[]);
    }
    let mut burst = Burst::with_capacity(64);
    let Host { device, pool, counters, .. } = &mut host;
    for step in 1..100 {
        liar.own.store(SENT, FRAMES as u64 + (step - 1) * 16, Relaxed);
        assert_eq!(device.rx_burst(NOW, pool, &mut burst, 16, counters), 16);
        burst.clear(pool);
    }
    assert_eq!(device.lost(), None);
}

#[test]
fn a_flood_of_wake_ups_is_drained_in_steps_and_ends() {
    let (mut host, liar) = liar();
    while sys::try_send_message(liar.socket.as_fd()) {}
    for _ in 0..1000 {
        host.device.arm();
        host.device.disarm();
        assert!(host.receive().is_empty());
    }
    assert!(host.device.arm() && !is_readable(host.device.wake_fd().unwrap().fd));
    assert_eq!(host.device.lost(), None);
}

#[test]
fn memory_sent_to_a_lying_peer_is_not_reused_until_the_peer_is_dead() {
    let (mut host, liar) = liar();
    assert!(host.send(&pattern(1, 500)));
    liar.own.store(SENT, u64::MAX / 2, Relaxed);
    host.receive();
    assert_eq!(host.device.lost(), Some(libc::EPROTO));
    host.receive();
    assert_eq!(host.pool.outstanding(), 1, "the liar may be reading it");
    drop(liar);
    assert!(sooner_or_later(|| {
        host.receive();
        host.pool.outstanding() == 0
    }));
}
