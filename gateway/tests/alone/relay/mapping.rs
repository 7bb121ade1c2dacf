//! Which port of the host a guest's UDP port has, who may write to it, and how far a packet goes (RFC 4787).

use std::io::ErrorKind;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsRawFd;
use std::time::Duration;

use fulmar_gateway::config::UdpFilter;
use fulmar_gateway::netns::Netns;
use fulmar_gateway::policy::{Decision, NewFlow, Policy, Ruling};
use fulmar_gateway::ports::{Forward, PortSpec};
use fulmar_gateway::stat::Refusal;
use fulmar_stack::base::DropReason;
use nix::sys::socket::{ControlMessageOwned, MsgFlags, SockaddrIn, recvmsg, setsockopt, sockopt};

use crate::relay::Test;
use crate::relay::change::{Outside, ip_tool};
use crate::relay::raw::Raw;
use crate::relay::udp::{bound, guest_to, ping_socket, receive};
use crate::relay::world::{GUEST, GUEST_V6, HOST, HOST_V6, PATIENCE, World, ip};

pub const TESTS: &[Test] = &[
    ("all_peers_of_a_guests_port_see_one_port_its_own_number", all_peers_see_one_port),
    ("a_taken_number_gives_way_to_another_for_all_peers", a_taken_number_gives_way),
    ("a_published_port_is_the_source_port", a_published_port_is_the_source_port),
    ("a_port_can_be_published_while_the_guest_uses_its_number", a_used_number_can_be_published),
    ("a_server_may_answer_from_another_port_and_address", a_server_may_answer_from_elsewhere),
    ("the_address_filter_admits_addresses_written_to", the_address_filter),
    ("the_hosts_loopback_is_a_stranger_without_a_name", the_loopback_is_a_stranger),
    ("a_policy_decides_about_strangers", a_policy_decides_about_strangers),
    ("two_names_of_one_host_are_told_apart", two_names_of_one_host),
    ("an_error_of_one_peer_reaches_no_other", an_error_of_one_peer),
    ("a_thousand_ports_of_a_peer_leave_space_for_the_guest", a_thousand_ports_of_a_peer),
    ("the_guests_ttl_leaves_the_host", the_guests_ttl_leaves_the_host),
    ("a_router_where_the_ttl_ends_is_seen_by_the_guest", a_router_is_seen),
    ("a_ttl_of_zero_ends_at_the_gateway", a_ttl_of_zero_ends_at_the_gateway),
    ("multicast_and_broadcast_are_counted", multicast_and_broadcast_are_counted),
];

/// A socket of the guest that is not connected.
fn guest_at(world: &World, at: &str, port: u16) -> UdpSocket {
    let socket = world.guest.run(|| UdpSocket::bind((at, port))).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    socket
}

fn port_of(from: SocketAddr) -> u16 {
    from.port()
}

/// Sends to a server, which answers; returns the source that the server sees.
fn exchange(guest: &UdpSocket, server: &UdpSocket) -> SocketAddr {
    let at = server.local_addr().unwrap();
    guest.send_to(b"question", at).unwrap();
    let (came, from) = receive(server).unwrap();
    assert_eq!(came, b"question");
    server.send_to(b"answer", from).unwrap();
    assert_eq!(receive(guest).unwrap(), (b"answer".to_vec(), at));
    from
}

fn all_peers_see_one_port() {
    for (own, at, port) in [(GUEST, HOST, 45_678), (GUEST_V6, HOST_V6, 45_679)] {
        let world = World::new();
        let guest = guest_at(&world, own, port);
        let servers: Vec<UdpSocket> = (0..20).map(|_| bound(at)).collect();
        let seen: Vec<u16> = servers.iter().map(|s| port_of(exchange(&guest, s))).collect();
        assert!(seen.iter().all(|other| *other == port), "{seen:?}");
        assert_eq!(world.stat().totals.udp_flows, 20);
    }
}

fn a_taken_number_gives_way() {
    let taken = bound("0.0.0.0");
    let world = World::new();
    let guest = guest_at(&world, GUEST, taken.local_addr().unwrap().port());
    let (a, b) = (bound(HOST), bound(HOST));
    let seen = exchange(&guest, &a);
    assert_ne!(seen.port(), taken.local_addr().unwrap().port());
    assert_eq!(exchange(&guest, &b), seen);
}

fn published(spec: &str) -> Vec<Forward> {
    spec.parse::<PortSpec>().unwrap().forwards()
}

fn a_published_port_is_the_source_port() {
    let world = World::with(65520, |c| c.publish.udp = published("5358:58"));
    for (own, at) in [(GUEST, HOST), (GUEST_V6, HOST_V6)] {
        let guest = guest_at(&world, own, 58);
        let peer = bound(at);
        let seen = exchange(&guest, &peer);
        assert_eq!(seen, (ip(at), 5358).into());
        // Datagrams of the peer to the published port belong to the same flow; another host begins a flow.
        peer.send_to(b"as a client", (at, 5358)).unwrap();
        assert_eq!(receive(&guest).unwrap(), (b"as a client".to_vec(), peer.local_addr().unwrap()));
        let other = bound(at);
        other.send_to(b"hello", (at, 5358)).unwrap();
        assert_eq!(receive(&guest).unwrap(), (b"hello".to_vec(), other.local_addr().unwrap()));
    }
    let stat = world.stat();
    assert_eq!((stat.totals.udp_flows, stat.published[0].connections), (4, 2));
}

fn a_used_number_can_be_published() {
    let world = World::new();
    let guest = guest_at(&world, GUEST, 5359);
    let server = bound(HOST);
    assert_eq!(exchange(&guest, &server).port(), 5359);
    // The thread of another queue closes its socket a moment later.
    let forward = &published("5359")[0];
    let udp = fulmar_gateway::policy::Protocol::Udp;
    world.until("it is published", |_| world.publish(udp, forward.clone()).is_ok());
    assert_eq!(exchange(&guest, &server).port(), 5359);
    let client = bound(HOST);
    client.send_to(b"hello", (HOST, 5359)).unwrap();
    assert_eq!(receive(&guest).unwrap().1, client.local_addr().unwrap());
}

/// A second address of the host.
const OTHER: &str = "192.0.2.77";

fn a_server_may_answer_from_elsewhere() {
    Netns::current().unwrap().set_address("lo", ip(OTHER), 32).unwrap();
    let world = World::new();
    let guest = guest_at(&world, GUEST, 0);
    let server = bound(HOST);
    guest.send_to(b"question", server.local_addr().unwrap()).unwrap();
    let (_, from) = receive(&server).unwrap();
    for other in [bound(HOST), bound(OTHER)] {
        other.send_to(b"from elsewhere", from).unwrap();
        let at = other.local_addr().unwrap();
        assert_eq!(receive(&guest).unwrap(), (b"from elsewhere".to_vec(), at));
        guest.send_to(b"on", at).unwrap();
        let (came, seen) = receive(&other).unwrap();
        assert_eq!((&came[..], seen.port()), (&b"on"[..], from.port()));
    }
}

fn assert_nothing(guest: &UdpSocket) {
    guest.set_nonblocking(true).unwrap();
    assert_eq!(receive(guest).unwrap_err().kind(), ErrorKind::WouldBlock);
    guest.set_nonblocking(false).unwrap();
}

/// Waits until `count` datagrams were refused as unsolicited.
fn until_unsolicited(world: &World, count: u64) {
    world.until("it is refused", |s| s.totals.refusals.value(Refusal::Unsolicited) == count);
}

fn the_address_filter() {
    Netns::current().unwrap().set_address("lo", ip(OTHER), 32).unwrap();
    let world = World::with(65520, |c| c.udp_filter = UdpFilter::Address);
    let guest = guest_at(&world, GUEST, 0);
    let server = bound(HOST);
    guest.send_to(b"question", server.local_addr().unwrap()).unwrap();
    let (_, from) = receive(&server).unwrap();
    bound(OTHER).send_to(b"a stranger", from).unwrap();
    until_unsolicited(&world, 1);
    let other_port = bound(HOST);
    other_port.send_to(b"from another port", from).unwrap();
    assert_eq!(receive(&guest).unwrap().1, other_port.local_addr().unwrap());
    assert_nothing(&guest);
}

fn the_loopback_is_a_stranger() {
    for is_mapped in [false, true] {
        let name = "10.0.0.77";
        let world = World::with(65520, |c| {
            c.mapping.host_loopback.extend(is_mapped.then_some(ip(name)));
        });
        let guest = guest_at(&world, GUEST, 0);
        let port = exchange(&guest, &bound(HOST)).port();
        let local = bound("127.0.0.1");
        local.send_to(b"hello", ("127.0.0.1", port)).unwrap();
        match is_mapped {
            true => assert_eq!(receive(&guest).unwrap().1.ip(), ip(name)),
            false => until_unsolicited(&world, 1),
        }
        assert_nothing(&guest);
    }
}

/// Allows one port of the host.
struct OnePort(u16);

impl Policy for OnePort {
    fn decide(&mut self, flow: &NewFlow<'_>) -> Ruling {
        if flow.to.port() == self.0 { Decision::Allow.into() } else { Decision::Deny.into() }
    }
}

fn a_policy_decides_about_strangers() {
    let server = bound(HOST);
    let port = server.local_addr().unwrap().port();
    let world = World::with(65520, |c| c.policy = Some(Box::new(OnePort(port))));
    let guest = guest_at(&world, GUEST, 0);
    let seen = exchange(&guest, &server);
    bound(HOST).send_to(b"a stranger", seen).unwrap();
    until_unsolicited(&world, 1);
    assert_nothing(&guest);
}

fn two_names_of_one_host() {
    let names = ["10.0.0.77", "10.0.0.78"];
    let world = World::with(65520, |c| {
        c.mapping.host_loopback.extend(names.map(ip));
    });
    let guest = guest_at(&world, GUEST, 0);
    let server = bound("127.0.0.1");
    let port = server.local_addr().unwrap().port();
    let seen = names.map(|name| {
        guest.send_to(name.as_bytes(), (name, port)).unwrap();
        receive(&server).unwrap().1
    });
    for (name, from) in names.iter().zip(seen) {
        server.send_to(b"answer", from).unwrap();
        assert_eq!(receive(&guest).unwrap().1, (ip(name), port).into());
    }
}

fn an_error_of_one_peer() {
    let world = World::new();
    let guest = guest_at(&world, GUEST, 0);
    setsockopt(&guest, sockopt::Ipv4RecvErr, &true).unwrap();
    let (server, closed) = (bound(HOST), bound(HOST).local_addr().unwrap());
    let at = server.local_addr().unwrap();
    for _ in 0..100 {
        // The errors come while datagrams to the other peer leave by the same socket.
        // The pending error of the guest's own socket ends its call.
        while guest.send_to(b"lost", closed).is_err() {}
        for n in 0..3u8 {
            while guest.send_to(&[n], at).is_err() {}
            assert_eq!(receive(&server).unwrap().0, [n]);
        }
    }
    world.until("errors came", |_| {
        let mut bytes = [0; 64];
        let (mut control, flags) = ([0u8; 512], MsgFlags::MSG_ERRQUEUE | MsgFlags::MSG_DONTWAIT);
        let mut parts = [std::io::IoSliceMut::new(&mut bytes)];
        let came = recvmsg::<SockaddrIn>(guest.as_raw_fd(), &mut parts, Some(&mut control), flags);
        let Ok(came) = came else { return true };
        assert_eq!(came.address.map(|a| SocketAddr::from((a.ip(), a.port()))), Some(closed));
        false
    });
    assert_eq!(world.stat().totals.refusals.value(Refusal::HostQueueFull), 0);
}

fn a_thousand_ports_of_a_peer() {
    let limits = fulmar_gateway::config::Limits { udp_flows: 64, ..Default::default() };
    let world = World::with(65520, |c| c.limits = limits);
    let guest = guest_at(&world, GUEST, 0);
    let server = bound(HOST);
    let seen = exchange(&guest, &server);
    world.until("a thousand have come", |s| {
        (0..50).for_each(|_| drop(bound(HOST).send_to(b"x", seen)));
        s.totals.udp_flows > 1000
    });
    let stat = world.stat();
    assert!(stat.flows.len() <= 9, "{}", stat.flows.len());
    let own = server.local_addr().unwrap();
    assert!(stat.flows.iter().any(|flow| flow.peer == own));
    // The queue of the guest's socket is full of the others.
    guest.set_nonblocking(true).unwrap();
    world.until("the guest's own peer is heard", |_| {
        server.send_to(b"still there", seen).unwrap();
        std::iter::from_fn(|| receive(&guest).ok())
            .any(|came| came == (b"still there".to_vec(), own))
    });
}

fn the_guests_ttl_leaves_the_host() {
    let world = World::new();
    for (own, at) in [(GUEST, HOST), (GUEST_V6, HOST_V6)] {
        let (guest, server) = (guest_at(&world, own, 0), bound(at));
        let is_v4 = server.local_addr().unwrap().is_ipv4();
        match is_v4 {
            true => setsockopt(&server, sockopt::Ipv4RecvTtl, &true).unwrap(),
            false => setsockopt(&server, sockopt::Ipv6RecvHopLimit, &true).unwrap(),
        }
        for hops in [64, 7, 255, 1, 64] {
            match is_v4 {
                true => setsockopt(&guest, sockopt::Ipv4Ttl, &hops).unwrap(),
                false => setsockopt(&guest, sockopt::Ipv6Ttl, &hops).unwrap(),
            }
            guest.send_to(b"x", server.local_addr().unwrap()).unwrap();
            let mut byte = [0];
            let (mut control, mut parts) = ([0u8; 128], [std::io::IoSliceMut::new(&mut byte)]);
            let flags = MsgFlags::empty();
            let came = recvmsg::<()>(server.as_raw_fd(), &mut parts, Some(&mut control), flags);
            let came = came.unwrap().cmsgs().unwrap().find_map(|c| match c {
                ControlMessageOwned::Ipv4Ttl(n) | ControlMessageOwned::Ipv6HopLimit(n) => Some(n),
                _ => None,
            });
            assert_eq!(came, Some(hops), "{at}");
        }
    }
}

fn a_router_is_seen() {
    let (outside, world) = (Outside::new(), World::new());
    outside.0.run(|| std::fs::write("/proc/sys/net/ipv4/ip_forward", "1")).unwrap();
    ip_tool("route add 203.0.113.0/24 via 198.51.100.2");
    // A router without a route says so before it looks at the TTL.
    let there = || {
        ip_tool("route add 203.0.113.0/24 via 198.51.100.99");
        Ok(())
    };
    outside.0.run(there).unwrap();
    let far: SocketAddr = "203.0.113.9:33434".parse().unwrap();
    let offender = |socket: &UdpSocket| {
        let mut bytes = [0; 64];
        let (mut control, mut parts) = ([0u8; 512], [std::io::IoSliceMut::new(&mut bytes)]);
        let (fd, flags) = (socket.as_raw_fd(), MsgFlags::MSG_ERRQUEUE | MsgFlags::MSG_DONTWAIT);
        let came = recvmsg::<SockaddrIn>(fd, &mut parts, Some(&mut control), flags).ok()?;
        came.cmsgs().unwrap().find_map(|c| match c {
            ControlMessageOwned::Ipv4RecvErr(e, from) => {
                assert_eq!((e.ee_type, e.ee_code), (11, 0), "time exceeded in transit");
                Some(u32::from_be(from?.sin_addr.s_addr).into())
            }
            _ => None,
        })
    };
    let is_seen = |socket: &UdpSocket, send: &dyn Fn()| {
        setsockopt(socket, sockopt::Ipv4RecvErr, &true).unwrap();
        setsockopt(socket, sockopt::Ipv4Ttl, &1).unwrap();
        world.until("a router has answered", |_| {
            send();
            std::thread::sleep(Duration::from_millis(20));
            let from: Option<std::net::Ipv4Addr> = offender(socket);
            from.is_some_and(|from| ip("198.51.100.2") == from)
        });
    };
    let udp = guest_at(&world, GUEST, 0);
    // The error of the probe before ends a call.
    is_seen(&udp, &|| drop(udp.send_to(b"probe", far)));
    // Both namespaces have to allow them.
    if ping_socket().is_ok()
        && let Ok(echo) = world.guest.run(ping_socket)
    {
        let to = SocketAddr::new(far.ip(), 0);
        is_seen(&echo, &|| drop(echo.send_to(&[8, 0, 0, 0, 0, 0, 0, 1], to)));
    }
    ip_tool("route del 203.0.113.0/24");
}

fn a_ttl_of_zero_ends_at_the_gateway() {
    let world = World::new();
    let mut raw = Raw::new(&world);
    let server = bound(HOST);
    let to = (HOST.parse().unwrap(), server.local_addr().unwrap().port());
    let mut frame = raw.udp((GUEST.parse().unwrap(), 40_000), to, b"no hop left");
    frame[14 + 8] = 0;
    frame[14 + 10..14 + 12].fill(0);
    let sum = fulmar_stack::wire::checksum::checksum(&frame[14..34]);
    frame[14 + 10..14 + 12].copy_from_slice(&sum.to_be_bytes());
    raw.send(&frame);
    world.until("it is refused", |s| s.totals.refusals.value(Refusal::HopLimit) == 1);
    assert_nothing(&server);
}

fn multicast_and_broadcast_are_counted() {
    let world = World::new();
    let guest = guest_at(&world, GUEST, 0);
    guest.set_broadcast(true).unwrap();
    let guest_v6 = guest_at(&world, GUEST_V6, 0);
    guest.send_to(b"SSDP", "239.255.255.250:1900").unwrap();
    guest.send_to(b"Wake-on-LAN", "255.255.255.255:9").unwrap();
    let index = world.guest.if_index("eth0").unwrap();
    let group = std::net::SocketAddrV6::new("ff02::fb".parse().unwrap(), 5353, 0, index);
    guest_v6.send_to(b"mDNS", group).unwrap();
    // A connected socket gets no error either: none is sent about a group (RFC 1122 section 3.2.2).
    let other = guest_to(&world, "239.255.255.250:1900".parse().unwrap());
    other.send(b"SSDP").unwrap();
    world.until("all are counted", |s| {
        let broadcasts = s.totals.refusals.value(Refusal::Forbidden);
        broadcasts == 1 && s.stack.counters.drops(DropReason::IpGroup) >= 3
    });
    assert!(other.take_error().unwrap().is_none());
}
