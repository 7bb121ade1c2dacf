use super::*;
use crate::mbuf::PoolConfig;
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

/// Source and destination of a datagram.
#[derive(Clone, Copy)]
struct Flow {
    src: SocketAddr,
    dst: SocketAddr,
}

fn v4() -> Flow {
    flow("10.0.0.1:1000", "10.0.0.2:53")
}

fn v6() -> Flow {
    flow("[2001:db8::1]:1000", "[2001:db8::2]:53")
}

fn flow(src: &str, dst: &str) -> Flow {
    Flow { src: src.parse().unwrap(), dst: dst.parse().unwrap() }
}

/// A UDP packet with a complete checksum.
fn packet(pool: &mut Pool, Flow { src, dst }: Flow, payload: &[u8]) -> Vec<u8> {
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

/// Receives a packet whatever sockets there are.
fn take(
    Flow { src, dst }: Flow,
    chain: Chain,
    offload: Offload,
    pool: &mut Pool,
    counters: &mut Counters,
) -> Result<Datagram, Dropped> {
    let (src, dst) = (src.ip(), dst.ip());
    let packet = Incoming { src, dst, zone: 0, chain, offload, hop_limit: 7, dscp_ecn: 0xb9 };
    let received = input(packet, pool, counters, |_, _, _| Ok(()));
    received.map(|(datagram, ())| datagram)
}

struct Received {
    payload: Option<Vec<u8>>,
    counters: Counters,
}

fn receive(flow: Flow, bytes: &[u8], offload: Offload) -> Received {
    let (mut pool, mut counters) = (pool(), Counters::default());
    let c = chain(&mut pool, bytes, 0);
    let got = take(flow, c, offload, &mut pool, &mut counters);
    let payload = got.ok().map(|d| {
        assert_eq!((d.src, d.dst, d.hop_limit, d.dscp_ecn), (flow.src, flow.dst, 7, 0xb9));
        let bytes = d.payload.to_vec();
        pool.free(d.payload);
        bytes
    });
    assert_eq!(pool.outstanding(), 0);
    Received { payload, counters }
}

#[test]
fn a_sent_datagram_is_received_over_both_versions() {
    for e in [v4(), v6()] {
        for len in [0, 1, 7, 1472, 30_001, max_payload(usize::MAX, e.dst.ip())] {
            let payload: Vec<u8> = (0..len).map(|i| i as u8).collect();
            let bytes = packet(&mut pool(), e, &payload);
            assert_eq!(receive(e, &bytes, Offload::default()).payload, Some(payload));
        }
    }
}

#[test]
fn a_wrong_checksum_is_dropped() {
    let e = v4();
    let mut bytes = packet(&mut pool(), e, b"hello");
    bytes[9] ^= 0x10;
    let got = receive(e, &bytes, Offload::default());
    assert_eq!(got.payload, None);
    assert_eq!(got.counters.drops(DropReason::UdpChecksum), 1);
    assert_eq!(got.counters.total_drops(), 1);
}

#[test]
fn a_checksum_verified_by_the_device_is_not_verified_again() {
    let e = v4();
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
    for (e, is_taken) in [(v4(), true), (v6(), false)] {
        let mut bytes = packet(&mut pool(), e, b"hello");
        bytes[6..8].fill(0);
        let got = receive(e, &bytes, Offload::default());
        assert_eq!(got.payload.is_some(), is_taken);
        assert_eq!(got.counters.drops(DropReason::UdpChecksum), u64::from(!is_taken));
    }
}

#[test]
fn a_udp_length_beyond_the_packet_is_dropped_and_a_surplus_is_trimmed() {
    let e = v4();
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
fn a_header_is_written_into_unshared_headroom() {
    let (mut pool, e) = (pool(), v4());
    let c = chain(&mut pool, b"hello", HEADROOM_BYTES);
    let (c, _) = output(&mut pool, e.src, e.dst, c).unwrap();
    assert_eq!(c.segs(), 1);
    let shared = pool.clone_range(&c, 0, c.len()).unwrap();
    let (c, _) = output(&mut pool, e.src, e.dst, c).unwrap();
    assert_eq!(c.segs(), 2);
    assert!(c.front().unwrap().headroom() >= 54);
    assert_eq!(&c.to_vec()[16..], b"hello");
    pool.free(c);
    pool.free(shared);
    assert_eq!(pool.outstanding(), 0);
}

#[test]
fn a_payload_above_the_maximum_datagram_is_refused() {
    for e in [v4(), v6()] {
        let mut pool = pool();
        let c = chain(&mut pool, &vec![0; max_payload(usize::MAX, e.dst.ip()) + 1], 0);
        assert_eq!(output(&mut pool, e.src, e.dst, c).unwrap_err(), OutputError::MessageTooLong);
        assert_eq!(pool.outstanding(), 0);
    }
    assert_eq!(max_payload(1500, v4().src.ip()), 1472);
    assert_eq!(max_payload(1500, v6().src.ip()), 1452);
}

#[test]
fn addresses_of_different_versions_are_refused() {
    let mut pool = pool();
    let c = chain(&mut pool, b"hello", 0);
    let sent = output(&mut pool, v4().src, v6().dst, c);
    assert_eq!(sent.unwrap_err(), OutputError::MixedVersions);
    assert_eq!(pool.outstanding(), 0);
}

proptest! {
    #[test]
    fn arbitrary_bytes_are_a_datagram_or_one_counted_drop(
        bytes in prop::collection::vec(any::<u8>(), 0..64),
        is_v4 in any::<bool>(),
        csum_valid in any::<bool>(),
    ) {
        let (mut pool, mut counters) = (pool(), Counters::default());
        let e = if is_v4 { v4() } else { v6() };
        let c = chain(&mut pool, &bytes, 0);
        let offload = Offload { csum_valid, ..Offload::default() };
        match take(e, c, offload, &mut pool, &mut counters) {
            Ok(d) => {
                prop_assert_eq!(counters.total_drops(), 0);
                pool.free(d.payload);
            }
            Err(Dropped) => prop_assert_eq!(counters.total_drops(), 1),
        }
        prop_assert_eq!(pool.outstanding(), 0);
    }
}
