//! ICMP errors about datagrams and pings: which of them are accepted.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use fulmar_stack::base::{Counters, DropReason, MtuDiscovery, Offload, SlotId};
use fulmar_stack::socket::SocketError;
use fulmar_stack::wire::checksum::checksum;

use crate::shard::udp::rig::*;

/// The error: destination unreachable with this code, or fragmentation needed.
const PORT: u8 = 3;
const FRAGMENTATION_NEEDED: u8 = 4;

fn framed(protocol: u8, dont_fragment: bool, addresses: [Ipv4Addr; 2], body: &[u8]) -> Vec<u8> {
    let mut packet = vec![0; 20];
    fulmar_stack::wire::ipv4::Header {
        src: addresses[0],
        dst: addresses[1],
        protocol,
        ttl: 64,
        dscp_ecn: 0,
        ident: 1,
        dont_fragment,
        more_fragments: false,
        fragment_offset: 0,
        header_bytes: 20,
        total_bytes: 20 + body.len(),
    }
    .emit(&mut packet)
    .unwrap();
    packet.extend(body);
    packet
}

/// A router's error about a packet of ours with 1400 bytes behind its first 8 transport bytes.
fn error(code: u8, mtu: u16, protocol: u8, to: Ipv4Addr, transport: [u8; 8]) -> Vec<u8> {
    let mut quoted = framed(protocol, true, [US, to], &[&transport[..], &[0; 1400]].concat());
    quoted.truncate(28);
    let mut message = vec![3, code, 0, 0, 0, 0, (mtu >> 8) as u8, mtu as u8];
    message.extend(quoted);
    let sum = checksum(&message).to_be_bytes();
    message[2..4].copy_from_slice(&sum);
    let mut frame = Vec::from(OURS.0);
    frame.extend(station_of(2).0);
    frame.extend([8, 0]);
    frame.extend(framed(1, false, [PEER, US], &message));
    frame
}

fn udp_error(code: u8, mtu: u16, (from, to): (u16, SocketAddr)) -> Vec<u8> {
    let IpAddr::V4(dst) = to.ip() else { panic!("{to}") };
    let [a, b] = from.to_be_bytes();
    let [c, d] = to.port().to_be_bytes();
    error(code, mtu, 17, dst, [a, b, c, d, 5, 128, 0, 0])
}

fn arrives(rig: &mut Rig, frame: Vec<u8>) {
    rig.arrive(frame, Offload::default());
    rig.step();
}

/// The path MTUs of TCP and of datagrams.
fn mtus(rig: &mut Rig, to: Ipv4Addr) -> [usize; 2] {
    let choice = rig.shard.ip().route(to.into(), 0).unwrap();
    [choice.mtu, choice.datagram_mtu]
}

fn drops(rig: &Rig, reason: DropReason) -> u64 {
    let counters: &Counters = rig.shard.counters();
    counters.drops(reason)
}

fn forbid_fragments(rig: &mut Rig, id: SlotId) {
    rig.shard.udp().with_socket(id, |u| u.mtu_discovery = MtuDiscovery::On).unwrap();
}

#[test]
fn a_path_mtu_for_a_datagram_that_was_never_sent_is_rejected() {
    let mut rig = Rig::new(caps(false));
    let id = rig.bound();
    forbid_fragments(&mut rig, id);
    arrives(&mut rig, udp_error(FRAGMENTATION_NEEDED, 600, (4000, peer(9))));
    assert_eq!(mtus(&mut rig, PEER), [1500, 1500]);
    assert_eq!(drops(&rig, DropReason::IcmpNoFlow), 1);
}

#[test]
fn a_path_mtu_for_a_datagram_that_routers_may_fragment_is_rejected() {
    let mut rig = Rig::new(caps(false));
    let id = rig.connected();
    rig.send(id, &[0; 1400]).unwrap();
    arrives(&mut rig, udp_error(FRAGMENTATION_NEEDED, 600, (4000, peer(9))));
    assert_eq!(mtus(&mut rig, PEER), [1500, 1500]);
    assert_eq!(rig.send(id, &[0; 1400]), Ok(1400));
}

#[test]
fn a_path_mtu_for_a_datagram_that_may_have_been_sent_counts_for_datagrams_alone() {
    for is_connected in [true, false] {
        let mut rig = Rig::new(caps(false));
        let id = rig.connected();
        let id = if is_connected { id } else { rig.unconnected() };
        forbid_fragments(&mut rig, id);
        let to = (!is_connected).then(|| peer(9));
        let send = |rig: &mut Rig| rig.shard.udp().send(rig.now, id, &[&[0; 1400]], to);
        assert_eq!(send(&mut rig), Ok(1400));
        let port = if is_connected { 4000 } else { 4001 };
        arrives(&mut rig, udp_error(FRAGMENTATION_NEEDED, 600, (port, peer(9))));
        assert_eq!(mtus(&mut rig, PEER), [1500, 600]);
        // Of another port of the peer nothing was sent there.
        arrives(&mut rig, udp_error(FRAGMENTATION_NEEDED, 590, (port, peer(10))));
        assert_eq!(mtus(&mut rig, PEER), [1500, 600]);
        assert_eq!(send(&mut rig), Err(SocketError::MessageTooLong));
    }
}

#[test]
fn a_path_mtu_from_a_router_does_not_limit_probes() {
    let mut rig = Rig::new(caps(false));
    let id = rig.connected();
    rig.shard.udp().with_socket(id, |u| u.mtu_discovery = MtuDiscovery::Probe).unwrap();
    assert_eq!(rig.send(id, &[0; 1400]), Ok(1400));
    arrives(&mut rig, udp_error(FRAGMENTATION_NEEDED, 600, (4000, peer(9))));
    assert_eq!(mtus(&mut rig, PEER), [1500, 600]);
    // The report itself is the socket's pending error, once.
    assert_eq!(rig.send(id, &[0; 1400]), Err(SocketError::MessageTooLong));
    for _ in 0..2 {
        assert_eq!(rig.send(id, &[0; 1472]), Ok(1472));
        assert_eq!(rig.send(id, &[0; 1473]), Err(SocketError::MessageTooLong));
    }
}

#[test]
fn a_port_unreachable_is_reported_to_the_connected_socket_alone() {
    let mut rig = Rig::new(caps(false));
    let id = rig.connected();
    let own = rig.unconnected();
    arrives(&mut rig, udp_error(PORT, 0, (4000, peer(10))));
    arrives(&mut rig, udp_error(PORT, 0, (4001, peer(9))));
    assert_eq!(drops(&rig, DropReason::IcmpNoFlow), 2);
    assert_eq!(rig.shard.udp().send(rig.now, own, &[b"x"], Some(peer(9))), Ok(1));
    assert!(!rig.shard.ready(id).unwrap().is_error());
    arrives(&mut rig, udp_error(PORT, 0, (4000, peer(9))));
    assert!(rig.shard.ready(id).unwrap().is_error());
    assert_eq!(rig.send(id, b"x"), Err(SocketError::ConnectionRefused));
    assert!(!rig.shard.ready(id).unwrap().is_error());
}

#[test]
fn an_error_about_a_ping_that_was_not_sent_is_dropped() {
    let mut rig = Rig::new(caps(false));
    rig.connected();
    let ping = rig.shard.icmp().open().unwrap();
    let to = SocketAddr::new(PEER.into(), 0);
    rig.take();
    rig.shard.icmp().send_request(rig.now, ping, to, 7, b"ping").unwrap();
    let sent = rig.take().remove(0).0;
    let ident = [sent[38], sent[39]];
    let quote = |seq| [8, 0, 0, 0, ident[0], ident[1], 0, seq];
    arrives(&mut rig, error(1, 0, 1, PEER, quote(8)));
    arrives(&mut rig, error(1, 0, 1, Ipv4Addr::new(10, 0, 0, 3), quote(7)));
    assert_eq!(drops(&rig, DropReason::IcmpNoFlow), 2);
    assert!(matches!(rig.shard.icmp().receive_reply(ping), Ok(std::task::Poll::Pending)));
    // Our echo requests may be fragmented: no IPv4 router reports one.
    arrives(&mut rig, error(FRAGMENTATION_NEEDED, 600, 1, PEER, quote(7)));
    assert_eq!((mtus(&mut rig, PEER), drops(&rig, DropReason::IcmpNoFlow)), ([1500, 1500], 3));
    arrives(&mut rig, error(1, 0, 1, PEER, quote(7)));
    let Ok(std::task::Poll::Ready(echo)) = rig.shard.icmp().receive_reply(ping) else {
        panic!("the error about the ping that was sent is not returned")
    };
    assert_eq!((echo.seq, echo.outcome.err()), (7, Some(SocketError::HostUnreachable)));
}
