use super::*;
use fulmar_mbuf::PoolConfig;
use proptest::prelude::*;

fn pool() -> Pool {
    Pool::new(PoolConfig::with_budget(16 << 20)).unwrap()
}

fn chain(pool: &mut Pool, bytes: &[u8], headroom: usize) -> Chain {
    let mut c = pool.alloc_chain(bytes.len().max(1), headroom, Purpose::Send).unwrap();
    c.trim_back(c.len() - bytes.len(), pool);
    c.copy_from(0, bytes).unwrap();
    c
}

const V4: (&str, &str) = ("10.0.0.1:1000", "10.0.0.2:53");
const V6: (&str, &str) = ("[2001:db8::1]:1000", "[2001:db8::2]:53");

fn ends((a, b): (&str, &str)) -> (SocketAddr, SocketAddr) {
    (a.parse().unwrap(), b.parse().unwrap())
}

/// A packet with a complete checksum.
fn packet(pool: &mut Pool, (src, dst): (SocketAddr, SocketAddr), payload: &[u8]) -> Vec<u8> {
    let payload = chain(pool, payload, HEADROOM_BYTES);
    let (c, offload) = output(pool, src, dst, payload).unwrap();
    assert!(offload.needs_csum && (offload.csum_start, offload.csum_offset) == (0, 6));
    let mut bytes = c.to_vec();
    pool.free(c);
    let mut sum = Sum::new();
    sum.add_bytes(&bytes);
    bytes[6..8].copy_from_slice(&sum.finish_udp().to_be_bytes());
    bytes
}

struct Received {
    payload: Option<Vec<u8>>,
    counters: Counters,
}

fn receive(ends: (SocketAddr, SocketAddr), bytes: &[u8], offload: Offload) -> Received {
    let (mut pool, mut counters) = (pool(), Counters::default());
    let c = chain(&mut pool, bytes, 0);
    let got = input(ends.0.ip(), ends.1.ip(), 0, c, offload, &mut pool, &mut counters);
    let payload = got.ok().map(|d| {
        assert_eq!((d.src, d.dst), ends);
        let bytes = d.payload.to_vec();
        pool.free(d.payload);
        bytes
    });
    assert_eq!(pool.outstanding(), 0);
    Received { payload, counters }
}

#[test]
fn what_is_sent_is_received_over_both_versions() {
    for e in [V4, V6].map(ends) {
        for len in [0, 1, 7, 1472, 30_001, max_payload(usize::MAX, e.1.ip())] {
            let payload: Vec<u8> = (0..len).map(|i| i as u8).collect();
            let bytes = packet(&mut pool(), e, &payload);
            assert_eq!(receive(e, &bytes, Offload::default()).payload, Some(payload));
        }
    }
}

#[test]
fn a_wrong_checksum_is_dropped() {
    let e = ends(V4);
    let mut bytes = packet(&mut pool(), e, b"hello");
    bytes[9] ^= 0x10;
    let got = receive(e, &bytes, Offload::default());
    assert_eq!(got.payload, None);
    assert_eq!(got.counters.drops(DropReason::UdpChecksum), 1);
    assert_eq!(got.counters.total_drops(), 1);
}

#[test]
fn a_checksum_that_the_device_verified_is_not_summed_again() {
    let e = ends(V4);
    let mut bytes = packet(&mut pool(), e, b"hello");
    bytes[6] ^= 0x10;
    for trusted in [
        Offload { csum_valid: true, ..Offload::default() },
        Offload { needs_csum: true, csum_offset: 6, ..Offload::default() },
    ] {
        assert_eq!(receive(e, &bytes, trusted).payload.as_deref(), Some(&b"hello"[..]));
    }
}

#[test]
fn a_zero_checksum_means_none_over_ipv4_and_is_dropped_over_ipv6() {
    for (e, is_taken) in [(ends(V4), true), (ends(V6), false)] {
        let mut bytes = packet(&mut pool(), e, b"hello");
        bytes[6..8].fill(0);
        let got = receive(e, &bytes, Offload::default());
        assert_eq!(got.payload.is_some(), is_taken);
        assert_eq!(got.counters.drops(DropReason::UdpChecksum), u64::from(!is_taken));
    }
}

#[test]
fn a_length_beyond_the_packet_is_dropped_and_a_surplus_is_cut_off() {
    let e = ends(V4);
    let bytes = packet(&mut pool(), e, b"hello");
    for cut in 0..bytes.len() {
        let got = receive(e, &bytes[..cut], Offload::default());
        assert_eq!(got.payload, None);
        assert_eq!(got.counters.drops(DropReason::UdpHeader), 1, "cut at {cut}");
    }
    let longer = [&bytes[..], &[0xee; 9]].concat();
    assert_eq!(receive(e, &longer, Offload::default()).payload.as_deref(), Some(&b"hello"[..]));
}

#[test]
fn a_header_goes_into_the_headroom_if_nobody_shares_it() {
    let (mut pool, e) = (pool(), ends(V4));
    let c = chain(&mut pool, b"hello", HEADROOM_BYTES);
    let (c, _) = output(&mut pool, e.0, e.1, c).unwrap();
    assert_eq!(c.segs(), 1);
    let shared = pool.clone_range(&c, 0, c.len()).unwrap();
    let (c, _) = output(&mut pool, e.0, e.1, c).unwrap();
    assert_eq!(c.segs(), 2);
    assert!(c.front().unwrap().headroom() >= 54);
    assert_eq!(&c.to_vec()[16..], b"hello");
    pool.free(c);
    pool.free(shared);
    assert_eq!(pool.outstanding(), 0);
}

#[test]
fn a_payload_larger_than_a_datagram_is_refused() {
    for e in [V4, V6].map(ends) {
        let mut pool = pool();
        let c = chain(&mut pool, &vec![0; max_payload(usize::MAX, e.1.ip()) + 1], 0);
        assert_eq!(output(&mut pool, e.0, e.1, c).unwrap_err(), OutputError::MessageTooLong);
        assert_eq!(pool.outstanding(), 0);
    }
    assert_eq!(max_payload(1500, ends(V4).0.ip()), 1472);
    assert_eq!(max_payload(1500, ends(V6).0.ip()), 1452);
}

#[test]
fn addresses_of_different_versions_are_refused() {
    let mut pool = pool();
    let c = chain(&mut pool, b"hello", 0);
    let sent = output(&mut pool, ends(V4).0, ends(V6).1, c);
    assert_eq!(sent.unwrap_err(), OutputError::MixedVersions);
    assert_eq!(pool.outstanding(), 0);
}

proptest! {
    #[test]
    fn any_bytes_are_a_datagram_or_one_counted_drop(
        bytes in prop::collection::vec(any::<u8>(), 0..64),
        is_v4 in any::<bool>(),
        csum_valid in any::<bool>(),
    ) {
        let (mut pool, mut counters) = (pool(), Counters::default());
        let e = ends(if is_v4 { V4 } else { V6 });
        let c = chain(&mut pool, &bytes, 0);
        let offload = Offload { csum_valid, ..Offload::default() };
        match input(e.0.ip(), e.1.ip(), 0, c, offload, &mut pool, &mut counters) {
            Ok(d) => {
                prop_assert_eq!(counters.total_drops(), 0);
                pool.free(d.payload);
            }
            Err(Dropped) => prop_assert_eq!(counters.total_drops(), 1),
        }
        prop_assert_eq!(pool.outstanding(), 0);
    }
}
