use super::*;
use crate::mbuf::{PoolConfig, Purpose};

fn pool() -> Pool {
    Pool::new(PoolConfig::with_budget(16 << 20)).unwrap()
}

fn datagram(pool: &mut Pool, bytes: usize) -> Datagram {
    let payload = pool.alloc_chain(bytes, 0, Purpose::Receive).unwrap();
    let (src, dst) = ("10.0.0.2:53".parse().unwrap(), "10.0.0.1:1000".parse().unwrap());
    Datagram { src, dst, payload, segment_bytes: None, hop_limit: 64, dscp_ecn: 0 }
}

#[test]
fn datagrams_are_received_in_order_and_only_the_first_wakes_the_reader() {
    let (mut pool, mut counters, mut s) = (pool(), Counters::default(), UdpSocket::new());
    let sizes = [10, 3000, 1];
    let woken = sizes.map(|n| {
        let d = datagram(&mut pool, n);
        s.deliver(d, &mut pool, &mut counters)
    });
    assert_eq!(woken, [true, false, false]);
    assert_eq!(counters.value(Counter::UdpIn), 3);
    for n in sizes {
        let d = s.receive().unwrap();
        assert_eq!(d.payload.len(), n);
        pool.free(d.payload);
    }
    assert_eq!((s.queued_bytes(), s.is_readable()), (0, false));
}

#[test]
fn a_full_queue_drops_datagrams_but_an_empty_one_always_accepts_one() {
    let (mut pool, mut counters, mut s) = (pool(), Counters::default(), UdpSocket::new());
    s.set_recv_limit(1);
    for _ in 0..3 {
        let d = datagram(&mut pool, 1000);
        s.deliver(d, &mut pool, &mut counters);
    }
    assert_eq!(s.queued(), 1);
    assert_eq!(counters.drops(DropReason::UdpBufferFull), 2);
    s.release(&mut pool);
    assert_eq!(pool.outstanding(), 0);
}

#[test]
fn tiny_datagrams_are_charged_the_budget_of_their_descriptors() {
    let (mut pool, mut counters, mut s) = (pool(), Counters::default(), UdpSocket::new());
    let most = DEFAULT_RECV_LIMIT_BYTES / crate::mbuf::Mbuf::MIN_TRUESIZE;
    for _ in 0..most + 50 {
        let d = datagram(&mut pool, 1);
        s.deliver(d, &mut pool, &mut counters);
    }
    assert_eq!((s.queued(), s.queued_bytes()), (most, DEFAULT_RECV_LIMIT_BYTES));
    assert_eq!(counters.drops(DropReason::UdpBufferFull), 50);
    while let Some(d) = s.receive() {
        pool.free(d.payload);
        assert_eq!(s.queued_bytes(), s.queued() * crate::mbuf::Mbuf::MIN_TRUESIZE);
    }
    assert_eq!(pool.outstanding(), 0);
}

#[test]
fn a_payload_in_the_senders_buffer_is_charged_its_storage() {
    let (mut pool, mut counters, mut s) = (pool(), Counters::default(), UdpSocket::new());
    let payload = pool.alloc_chain(1, 0, Purpose::Send).unwrap();
    let storage_bytes = payload.storage_bytes();
    s.deliver(Datagram { payload, ..datagram(&mut pool, 0) }, &mut pool, &mut counters);
    assert_eq!(s.queued_bytes(), storage_bytes);
    s.release(&mut pool);
    assert_eq!(pool.outstanding(), 0);
}

#[test]
fn empty_datagrams_do_not_grow_the_queue_without_bound() {
    let (mut pool, mut counters, mut s) = (pool(), Counters::default(), UdpSocket::new());
    for _ in 0..MAX_DATAGRAMS + 5 {
        let mut d = datagram(&mut pool, 1);
        pool.free(core::mem::take(&mut d.payload));
        s.deliver(d, &mut pool, &mut counters);
    }
    assert_eq!(s.queued(), MAX_DATAGRAMS);
    assert_eq!(counters.drops(DropReason::UdpBufferFull), 5);
}

#[test]
fn only_a_connected_socket_accepts_errors_of_its_peer() {
    let peer: SocketAddr = "10.0.0.2:53".parse().unwrap();
    let mut s = UdpSocket::new();
    assert!(!s.on_error(peer, UdpError::ConnectionRefused));
    s.remote = Some(peer);
    assert!(!s.on_error("10.0.0.2:54".parse().unwrap(), UdpError::ConnectionRefused));
    assert!(s.on_error(peer, UdpError::ConnectionRefused) && s.is_readable());
    assert_eq!(s.take_error(), Some(UdpError::ConnectionRefused));
    assert_eq!(s.take_error(), None);
}

#[test]
fn after_shutdown_queued_datagrams_stay_readable_and_new_ones_are_dropped() {
    let (mut pool, mut counters, mut s) = (pool(), Counters::default(), UdpSocket::new());
    let d = datagram(&mut pool, 10);
    s.deliver(d, &mut pool, &mut counters);
    s.shutdown_read();
    let d = datagram(&mut pool, 10);
    assert!(!s.deliver(d, &mut pool, &mut counters));
    assert_eq!(counters.drops(DropReason::UdpNoSocket), 1);
    assert_eq!(s.queued(), 1);
    s.release(&mut pool);
    assert_eq!(pool.outstanding(), 0);
}
