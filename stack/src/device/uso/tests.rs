use crate::base::{Counters, EtherAddr};
use crate::mbuf::{Chain, Pool};
use proptest::prelude::*;

use super::*;
use crate::device::offload::{segment, verify};
use crate::device::testing::{chain, headers, pool};
use crate::device::{Burst, Packet};

const MANY_SEGS: usize = 1000;

/// The identification in the IPv4 header, from the start of the frame.
const IDENT: usize = eth::HEADER_BYTES + 4;

fn caps() -> Caps {
    Caps {
        tx_csum: true,
        tso: Some(65_535),
        udp_gso: true,
        ..Caps::plain(1500, EtherAddr([2, 0, 0, 0, 0, 1]))
    }
}

/// A datagram as the stack sends it, number `n` of its flow, from source port `port`.
fn datagram(pool: &mut Pool, v6: bool, port: u16, n: u16, payload: &[u8]) -> Packet {
    let (mut h, offload) = headers(v6, true, payload.len(), u16::MAX, 0);
    let l4 = usize::from(offload.csum_start);
    h[l4..l4 + 2].copy_from_slice(&port.to_be_bytes());
    if !v6 {
        h[IDENT..IDENT + 2].copy_from_slice(&n.to_be_bytes());
        // It may be fragmented, so that the identification counts.
        h[IDENT + 2] = 0;
        seal(&mut h);
    }
    h.extend(payload);
    Packet { chain: chain(pool, &h, &[]), offload }
}

/// Makes the checksum of the IPv4 header right.
fn seal(h: &mut [u8]) {
    h[24..26].fill(0);
    let sum = checksum(&h[14..34]);
    h[24..26].copy_from_slice(&sum.to_be_bytes());
}

/// The bytes of a frame whose checksum is complete.
fn finished(pool: &mut Pool, p: &Packet) -> Vec<u8> {
    let mut out = Burst::with_capacity(1);
    let copy = Packet { chain: chain(pool, &p.chain.to_vec(), &[]), offload: p.offload };
    segment(copy, pool, &mut out, &mut Counters::default()).unwrap();
    out.pop_front().unwrap().chain.to_vec()
}

/// The datagrams that a device sends for a super-datagram of the first packets.
fn cut(pool: &mut Pool, joined: &Joined, packets: &[Packet]) -> Vec<Vec<u8>> {
    let mut whole: Chain = chain(pool, joined.headers(), &[]);
    for p in &packets[..joined.count] {
        whole.append(chain(pool, &p.chain.to_vec()[joined.headers().len()..], &[]));
    }
    let mut out = Burst::with_capacity(MOST);
    let whole = Packet { chain: whole, offload: joined.offload };
    segment(whole, pool, &mut out, &mut Counters::default()).unwrap();
    assert!(out.iter().all(verify));
    out.iter().map(|p| p.chain.to_vec()).collect()
}

proptest! {
    #[test]
    fn segmenting_restores_the_joined_datagrams(
        v6: bool, sizes in proptest::collection::vec((1usize..4, 0u16..2), 0..90), unit in 1usize..1000,
        first: u16, in_a_row: bool,
    ) {
        let mut pool = pool();
        // Mostly as long as the first; now and then shorter, longer, or of another flow.
        let packets: Vec<Packet> = sizes.iter().enumerate().map(|(i, (size, other))| {
            let bytes = if in_a_row { unit } else { unit * size / 2 + 1 };
            let port = if in_a_row { 7 } else { 7 + other };
            datagram(&mut pool, v6, port, first.wrapping_add(i as u16), &vec![i as u8; bytes])
        }).collect();
        let joined = join(&packets, &caps(), MANY_SEGS);
        if in_a_row && packets.len() >= LEAST && unit * LEAST < 60_000 {
            prop_assert!(joined.is_some());
        }
        if let Some(joined) = joined {
            prop_assert!((LEAST..=MOST.min(packets.len())).contains(&joined.count));
            let before: Vec<Vec<u8>> =
                packets[..joined.count].iter().map(|p| finished(&mut pool, p)).collect();
            prop_assert_eq!(cut(&mut pool, &joined, &packets), before);
        }
    }

    #[test]
    fn frames_of_any_bytes_are_joined_only_if_they_can_be_cut_again(
        frames in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..90), 1..6),
        start in 0u16..70,
    ) {
        let mut pool = pool();
        let offload =
            Offload { needs_csum: true, csum_start: start, csum_offset: 6, ..Offload::default() };
        let packets: Vec<Packet> =
            frames.iter().map(|f| Packet { chain: chain(&mut pool, f, &[]), offload }).collect();
        prop_assert!(before_join(&packets, &caps()) <= packets.len());
        if let Some(joined) = join(&packets, &caps(), MANY_SEGS) {
            prop_assert_eq!(cut(&mut pool, &joined, &packets).len(), joined.count);
        }
    }
}

fn run(pool: &mut Pool, count: u16) -> Vec<Packet> {
    (0..count).map(|n| datagram(pool, false, 7, n, &[n as u8; 22])).collect()
}

/// How many of the datagrams would cross together after `change` to the third.
fn joined_after(change: impl Fn(&mut Vec<u8>, &mut Offload)) -> usize {
    let mut pool = pool();
    let mut packets = run(&mut pool, 5);
    let mut bytes = packets[2].chain.to_vec();
    // Fragmenting is allowed.
    for p in &mut packets {
        let mut bytes = p.chain.to_vec();
        bytes[20] = 0;
        seal(&mut bytes);
        p.chain = chain(&mut pool, &bytes, &[]);
    }
    bytes[20] = 0;
    seal(&mut bytes);
    change(&mut bytes, &mut packets[2].offload);
    packets[2].chain = chain(&mut pool, &bytes, &[]);
    assert!(join(&packets, &caps(), MANY_SEGS).is_none_or(|j| j.count == 5));
    join(&packets, &caps(), MANY_SEGS).map_or(0, |j| j.count)
}

#[test]
fn a_run_is_joined_and_one_that_differs_ends_it() {
    assert_eq!(joined_after(|_, _| ()), 5);
    // Service, fragment, time to live, protocol, addresses, ports.
    for at in [15, 21, 22, 23, 29, 33, 35, 37] {
        let after = joined_after(|bytes, _| {
            bytes[at] ^= 1;
            seal(bytes);
        });
        assert_eq!(after, 0, "byte {at}");
    }
    // Lengths that differ from the frame's lengths.
    assert_eq!(joined_after(|bytes, _| bytes[17] ^= 1), 0);
    assert_eq!(joined_after(|bytes, _| bytes[39] ^= 1), 0);
    assert_eq!(joined_after(|bytes, _| bytes.push(0)), 0);
    // Another station.
    assert_eq!(joined_after(|bytes, _| bytes[0] ^= 2), 0);
}

#[test]
fn a_checksum_that_is_there_passes_as_it_is() {
    assert_eq!(joined_after(|_, offload| *offload = Offload::default()), 0);
}

#[test]
fn datagrams_are_joined_whatever_their_identifications() {
    let mut pool = pool();
    let packets: Vec<Packet> =
        (0..4).map(|n| datagram(&mut pool, false, 7, n * 77, &[1; 22])).collect();
    assert_eq!(join(&packets, &caps(), MANY_SEGS).map(|j| j.count), Some(4));
}

#[test]
fn a_shorter_datagram_is_the_last_of_its_run() {
    let mut pool = pool();
    let packets: Vec<Packet> = [22, 22, 22, 9, 9, 9]
        .iter()
        .enumerate()
        .map(|(n, &bytes)| datagram(&mut pool, true, 7, n as u16, &vec![1; bytes]))
        .collect();
    assert_eq!(join(&packets, &caps(), MANY_SEGS).map(|j| j.count), Some(4));
    assert_eq!(join(&packets[3..], &caps(), MANY_SEGS).map(|j| j.count), Some(3));
    assert_eq!(join(&packets[4..], &caps(), MANY_SEGS), None, "two are not worth it");
}

#[test]
fn bounds_of_the_device_are_kept() {
    let mut pool = pool();
    let packets = run(&mut pool, 80);
    let count = |caps: &Caps, segs| join(&packets, caps, segs).map_or(0, |j| j.count);
    assert_eq!(count(&caps(), MANY_SEGS), MOST);
    assert_eq!(count(&caps(), 10), 10);
    assert_eq!(count(&Caps { tso: Some(28 + 22 * 7 + 21), ..caps() }, MANY_SEGS), 7);
    assert_eq!(count(&Caps { mtu: 49, ..caps() }, MANY_SEGS), 0, "too long each");
    assert_eq!(count(&Caps { udp_gso: false, ..caps() }, MANY_SEGS), 0);
    assert_eq!(count(&Caps { tx_csum: false, ..caps() }, MANY_SEGS), 0);
}

#[test]
fn frames_before_a_run_are_counted() {
    let mut pool = pool();
    let mut packets: Vec<Packet> =
        [1, 2, 1, 2, 2].map(|port| datagram(&mut pool, false, port, 0, &[1; 22])).into();
    assert_eq!(before_join(&packets, &caps()), 5, "pairs are none");
    packets.extend(run(&mut pool, 4));
    assert_eq!(before_join(&packets, &caps()), 5);
    assert_eq!(before_join(&packets[5..], &caps()), 0);
    assert_eq!(before_join(&packets, &Caps { udp_gso: false, ..caps() }), 9);
}
