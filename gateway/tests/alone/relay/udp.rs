//! UDP, echo requests, DNS and DHCP through a gateway.

use std::io::{ErrorKind, Write};
use std::net::{IpAddr, Ipv6Addr, SocketAddr, SocketAddrV6, TcpListener, UdpSocket};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use fulmar_gateway::config::Limits;
use fulmar_gateway::dhcp::{Lease, LeaseV6};
use fulmar_gateway::netns::Netns;
use fulmar_gateway::ports::PortSpec;
use fulmar_gateway::stat::Refusal;
use nix::sys::socket::{
    AddressFamily, SockFlag, SockProtocol, SockType, setsockopt, socket, sockopt,
};

use crate::relay::Test;
use crate::relay::world::{GUEST, GUEST_V6, HOST, HOST_V6, PATIENCE, ROUTER, World, ip};

pub const TESTS: &[Test] = &[
    ("datagrams_of_every_size_return_from_an_echo_server", datagrams_of_every_size_return),
    ("a_burst_of_datagrams_arrives_in_order_and_whole", a_burst_arrives_in_order),
    ("a_closed_port_of_the_host_is_reported_to_the_guest", a_closed_port_is_reported),
    ("datagrams_without_a_route_are_reported_to_the_guest", without_a_route_it_is_reported),
    ("a_published_udp_port_shows_the_guest_its_client", a_published_port_shows_its_client),
    ("clients_that_look_alike_to_the_guest_are_told_apart", clients_that_look_alike),
    ("a_link_local_client_is_answered", a_link_local_client_is_answered),
    (
        "a_server_answers_a_client_of_the_host_where_the_router_is_link_local",
        a_server_answers_where_the_router_is_link_local,
    ),
    ("a_published_udp_port_is_free_after_the_end_of_the_guest", a_published_port_is_free),
    ("udp_flows_have_a_bound_and_the_oldest_gives_way", flows_have_a_bound),
    ("an_echo_request_is_answered_by_who_was_asked", an_echo_request_is_answered),
    ("a_dhcp_client_is_given_its_lease", a_dhcp_client_is_given_its_lease),
    ("a_dhcpv6_client_is_given_its_lease", a_dhcpv6_client_is_given_its_lease),
];

pub fn bound(at: &str) -> UdpSocket {
    let socket = UdpSocket::bind((at, 0)).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    socket
}

/// A socket of the guest with one peer.
pub fn guest_to(world: &World, to: SocketAddr) -> UdpSocket {
    let any = if to.is_ipv4() { "0.0.0.0" } else { "::" };
    let socket = world.guest.run(|| UdpSocket::bind((any, 0))).unwrap();
    socket.connect(to).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    socket
}

pub fn receive(socket: &UdpSocket) -> std::io::Result<(Vec<u8>, SocketAddr)> {
    let mut buffer = vec![0; 65_536];
    loop {
        match socket.recv_from(&mut buffer) {
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            done => {
                let (n, from) = done?;
                buffer.truncate(n);
                return Ok((buffer, from));
            }
        }
    }
}

pub fn payload(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|n| (n * 7 + bytes) as u8).collect()
}

fn datagrams_of_every_size_return() {
    for (mtu, at) in [(1500, HOST), (65520, HOST), (65520, HOST_V6)] {
        let (world, server) = (World::with(mtu, |_| ()), bound(at));
        let client = guest_to(&world, server.local_addr().unwrap());
        for bytes in
            (0..200).chain([511, 512, 513, 1400, 1472, 1473, 4000, 8000, 8999, 9000, 60_000])
        {
            client.send(&payload(bytes)).unwrap();
            let (came, from) = receive(&server).unwrap();
            assert!(came == payload(bytes), "{bytes} of {mtu}");
            server.send_to(&came, from).unwrap();
            assert!(receive(&client).unwrap().0 == payload(bytes), "{bytes} of {mtu} back");
        }
        let stat = world.stat();
        assert_eq!((stat.flows.len(), stat.totals.udp_flows), (1, 1));
    }
}

fn a_burst_arrives_in_order() {
    const COUNT: usize = 64;
    let (world, server) = (World::with(1500, |_| ()), bound(HOST));
    let client = guest_to(&world, server.local_addr().unwrap());
    setsockopt(&server, sockopt::RcvBuf, &(1 << 20)).unwrap();
    // One call of the guest's kernel, which the interface may pass on as one frame.
    let segment = 1000u16;
    setsockopt(&client, sockopt::UdpGsoSegment, &i32::from(segment)).unwrap();
    client.send(&payload(usize::from(segment) * 50 + 10)).unwrap();
    let mut all = Vec::new();
    for _ in 0..51 {
        let (came, from) = receive(&server).unwrap();
        assert!(came.len() <= 1000 && from.ip() == ip(HOST));
        all.extend(came);
    }
    assert!(all == payload(usize::from(segment) * 50 + 10));
    setsockopt(&client, sockopt::UdpGsoSegment, &0).unwrap();
    for n in 0..COUNT {
        client.send(&payload(n + 1)).unwrap();
    }
    for n in 0..COUNT {
        assert!(receive(&server).unwrap().0 == payload(n + 1), "{n}");
    }
}

fn a_closed_port_is_reported() {
    for at in [HOST, HOST_V6] {
        let world = World::new();
        let closed = bound(at).local_addr().unwrap();
        let client = guest_to(&world, closed);
        client.send(b"anybody there?").unwrap();
        assert_eq!(receive(&client).unwrap_err().kind(), ErrorKind::ConnectionRefused, "{at}");
    }
}

fn without_a_route_it_is_reported() {
    let world = World::new();
    let client = guest_to(&world, "203.0.113.1:9".parse().unwrap());
    setsockopt(&client, sockopt::Ipv4RecvErr, &true).unwrap();
    client.send(b"anybody there?").unwrap();
    assert_unreachable(&client);
}

fn assert_unreachable(socket: &UdpSocket) {
    let errno = receive(socket).unwrap_err().raw_os_error();
    assert!(matches!(errno, Some(libc::ENETUNREACH | libc::EHOSTUNREACH)), "{errno:?}");
}

/// ICMP has said "administratively prohibited", which Linux tells by EHOSTUNREACH; that nothing comes is not enough.
pub fn assert_prohibited(socket: &UdpSocket) {
    let errno = receive(socket).map_err(|e| e.raw_os_error());
    assert_eq!(errno, Err(Some(libc::EHOSTUNREACH)));
}

fn a_published_port_shows_its_client() {
    let spec: PortSpec = "5353:53".parse().unwrap();
    let world = World::with(65520, |c| c.publish.udp = spec.forwards());
    for (at, to) in [(GUEST, HOST), (GUEST_V6, HOST_V6)] {
        let server = world.guest.run(|| UdpSocket::bind((at, 53))).unwrap();
        server.set_read_timeout(Some(PATIENCE)).unwrap();
        let client = bound(to);
        client.connect((to, 5353)).unwrap();
        client.send(b"question").unwrap();
        let (question, from) = receive(&server).unwrap();
        assert_eq!((&question[..], from), (&b"question"[..], client.local_addr().unwrap()));
        server.send_to(b"answer", from).unwrap();
        assert_eq!(receive(&client).unwrap().0, b"answer");
    }
    let published = world.stat().published;
    assert_eq!((published[0].to, published[0].connections, published[0].refused), (53, 2, 0));
}

/// A socket at one address, with a port that is free at the others, too.
fn bound_alike(addresses: &[&str]) -> Vec<UdpSocket> {
    loop {
        let first = bound(addresses[0]);
        let port = first.local_addr().unwrap().port();
        let others = addresses[1..].iter().map(|at| UdpSocket::bind((*at, port)));
        if let Ok(others) = others.collect::<Result<Vec<_>, _>>() {
            return std::iter::once(first).chain(others).collect();
        }
    }
}

fn clients_that_look_alike() {
    let spec: PortSpec = "5357:57".parse().unwrap();
    let world = World::with(65520, |c| c.publish.udp = spec.forwards());
    let server = world.guest.run(|| UdpSocket::bind((GUEST, 57))).unwrap();
    server.set_read_timeout(Some(PATIENCE)).unwrap();
    // The host's loopback has one address for the guest.
    let clients = bound_alike(&["127.0.0.1", "127.0.0.2", "127.0.0.3"]);
    let mut seen = Vec::new();
    for round in 0..3u8 {
        for (client, serial) in clients.iter().zip(0..) {
            client.set_read_timeout(Some(PATIENCE)).unwrap();
            client.send_to(&[round, serial], ("127.0.0.1", 5357)).unwrap();
            let (came, from) = receive(&server).unwrap();
            assert_eq!((came, from.ip()), (vec![round, serial], ip(ROUTER)));
            seen.push(from);
        }
    }
    assert_eq!((&seen[3..6], &seen[6..]), (&seen[..3], &seen[..3]), "each keeps its port");
    assert_eq!(seen[0].port(), clients[0].local_addr().unwrap().port());
    assert!(seen[0] != seen[1] && seen[1] != seen[2] && seen[0] != seen[2]);
    for (from, serial) in seen[..3].iter().zip(0u8..) {
        server.send_to(&[serial], from).unwrap();
    }
    for (client, serial) in clients.iter().zip(0u8..) {
        assert_eq!(receive(client).unwrap().0, [serial]);
    }
    assert_eq!((world.stat().flows.len(), world.stat().published[0].connections), (3, 3));
}

fn a_link_local_client_is_answered() {
    let spec: PortSpec = "5359:59".parse().unwrap();
    let (host, own) = (Netns::current().unwrap(), "fe80::77");
    host.set_address("lo", ip(own), 64).unwrap();
    let world = World::with(65520, |c| c.publish.udp = spec.forwards());
    let server = world.guest.run(|| UdpSocket::bind((GUEST_V6, 59))).unwrap();
    server.set_read_timeout(Some(PATIENCE)).unwrap();
    let link = host.if_index("lo").unwrap();
    let at = |port| SocketAddrV6::new(own.parse().unwrap(), port, 0, link);
    let client = UdpSocket::bind(at(0)).unwrap();
    client.set_read_timeout(Some(PATIENCE)).unwrap();
    client.send_to(b"question", at(5359)).unwrap();
    let (_, from) = receive(&server).unwrap();
    assert_eq!(from.ip(), ip("fd00::1"));
    server.send_to(b"answer", from).unwrap();
    assert_eq!(receive(&client).unwrap(), (b"answer".to_vec(), at(5359).into()));
}

fn a_published_port_is_free() {
    let spec: PortSpec = "5355:55".parse().unwrap();
    let mut world = World::with(65520, |c| c.publish.udp = spec.forwards());
    let server = world.guest.run(|| UdpSocket::bind((GUEST, 55))).unwrap();
    server.set_read_timeout(Some(PATIENCE)).unwrap();
    let client = bound(HOST);
    // Twice, so that the flow may rest for longer than this test waits.
    for _ in 0..2 {
        client.send_to(b"question", (HOST, 5355)).unwrap();
        let (_, from) = receive(&server).unwrap();
        server.send_to(b"answer", from).unwrap();
        receive(&client).unwrap();
    }
    // A host that does not read, so that the gateway stays.
    let listener = TcpListener::bind((HOST, 0)).unwrap();
    let (guest, host) = world.pair(&listener);
    guest.set_nonblocking(true).unwrap();
    world.until("the gateway holds bytes", |s| {
        while (&guest).write(&[7; 65_536]).is_ok() {}
        s.flows.iter().filter_map(|f| f.tcp.as_ref()).any(|tcp| tcp.recv_queue_bytes > 0)
    });
    world.end_guest();
    let begun = Instant::now();
    while UdpSocket::bind((HOST, 5355)).is_err() {
        assert!(begun.elapsed() < PATIENCE / 2, "the port is still bound");
        std::thread::sleep(Duration::from_millis(5));
    }
    drop((guest, host));
    world.end();
}

fn a_server_answers_where_the_router_is_link_local() {
    let spec: PortSpec = "5354:54".parse().unwrap();
    for is_mapped in [false, true] {
        let world = World::with(65520, |c| {
            let router: Ipv6Addr = "fe80::99".parse().unwrap();
            c.network.gateway_v6 = Some(router);
            c.mapping.host_loopback.extend(is_mapped.then_some(IpAddr::V6(router)));
            c.publish.udp = spec.forwards();
        });
        // The source of its answer is the kernel's choice, by the address of the client.
        let server = world.guest.run(|| UdpSocket::bind("[::]:54")).unwrap();
        server.set_read_timeout(Some(PATIENCE)).unwrap();
        let has_link_local = || {
            let all = world.guest.run(|| std::fs::read_to_string("/proc/thread-self/net/if_inet6"));
            // Scope 20 is the link's; flag 40 means tentative (if_addr.h IFA_F_TENTATIVE).
            all.unwrap().lines().any(|l| l.contains(" 20 80 ") && l.ends_with("eth0"))
        };
        world.until("the guest has a link-local address", |_| has_link_local());
        let client = bound("::1");
        client.connect(("::1", 5354)).unwrap();
        client.send(b"question").unwrap();
        let (_, from) = receive(&server).unwrap();
        assert_eq!(from.ip(), ip("fd00::1"));
        server.send_to(b"answer", from).unwrap();
        assert_eq!(receive(&client).unwrap().0, b"answer");
        world.end();
    }
}

fn flows_have_a_bound() {
    let limits = Limits { udp_flows: 4, ..Limits::default() };
    let (world, server) = (World::with(65520, |c| c.limits = limits), bound(HOST));
    let to = server.local_addr().unwrap();
    let clients: Vec<UdpSocket> = (0..10).map(|_| guest_to(&world, to)).collect();
    for client in &clients {
        client.send(b"x").unwrap();
        receive(&server).unwrap();
    }
    let stat = world.stat();
    assert_eq!(stat.flows.len(), 4);
    assert_eq!(stat.totals.refusals.value(Refusal::Displaced), 6);
}

/// A ping socket; both namespaces allow it to this process.
pub fn ping_socket() -> std::io::Result<UdpSocket> {
    std::fs::write("/proc/sys/net/ipv4/ping_group_range", "0 0")?;
    let (family, flags) = (AddressFamily::Inet, SockFlag::SOCK_CLOEXEC);
    let fd: OwnedFd = socket(family, SockType::Datagram, flags, SockProtocol::Icmp)?;
    Ok(fd.into())
}

fn an_echo_request_is_answered() {
    if let Err(e) = ping_socket() {
        println!("SKIPPED: no ping sockets here: {e}");
        return;
    }
    let world = World::new();
    let client = world.guest.run(ping_socket).unwrap();
    client.set_read_timeout(Some(PATIENCE)).unwrap();
    for (to, seq) in [(HOST, 1u8), (HOST, 2), (ROUTER, 3)] {
        client.connect((to, 0)).unwrap();
        client.send(&[8, 0, 0, 0, 0, 0, 0, seq, b'h', b'i']).unwrap();
        let (reply, from) = receive(&client).unwrap();
        assert_eq!((reply[0], reply[7], &reply[8..], from.ip()), (0, seq, &b"hi"[..], ip(to)));
    }
    assert_eq!(world.stat().totals.echo_flows, 1, "the router answers by itself");
    client.connect(("203.0.113.1", 0)).unwrap();
    setsockopt(&client, sockopt::Ipv4RecvErr, &true).unwrap();
    client.send(&[8, 0, 0, 0, 0, 0, 0, 4]).unwrap();
    assert_unreachable(&client);
}

pub fn lease() -> Lease {
    Lease {
        address: GUEST.parse().unwrap(),
        prefix_len: 24,
        server: ROUTER.parse().unwrap(),
        router: Some(ROUTER.parse().unwrap()),
        mtu: Some(1500),
        nameservers: vec![],
        search: vec![],
    }
}

pub fn lease_v6() -> LeaseV6 {
    LeaseV6 {
        address: GUEST_V6.parse().unwrap(),
        duid: vec![0, 3, 0, 1, 2, 0, 0, 0, 0, 1],
        nameservers: vec!["fd00::53".parse().unwrap()],
        search: vec!["example.org".into()],
    }
}

fn a_dhcp_client_is_given_its_lease() {
    let world = World::with(65520, |c| c.dhcp = Some(lease()));
    let client = world.guest.run(|| {
        let socket = UdpSocket::bind("0.0.0.0:68")?;
        socket.set_broadcast(true)?;
        setsockopt(&socket, sockopt::BindToDevice, &"eth0".into())?;
        Ok(socket)
    });
    let client = client.unwrap();
    client.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut message = vec![0; 240];
    (message[0], message[1], message[2], message[4]) = (1, 1, 6, 42);
    message[236..240].copy_from_slice(&[99, 130, 83, 99]);
    message.extend([53, 1, 1, 255]);
    client.send_to(&message, "255.255.255.255:67").unwrap();
    let (reply, from) = receive(&client).unwrap();
    assert_eq!((reply[0], reply[4], from.ip()), (2, 42, ip(ROUTER)));
    assert_eq!(reply[16..20], [10, 0, 0, 2]);
}

/// Messages and options of DHCPv6 (RFC 8415 sections 7.3 and 21, RFC 3646).
const SOLICIT: u8 = 1;
const ADVERTISE: u8 = 2;
const REQUEST: u8 = 3;
const REPLY: u8 = 7;
const CLIENT: u16 = 1;
const SERVER: u16 = 2;
const IA_NA: u16 = 3;
const IA_ADDR: u16 = 5;
const ORO: u16 = 6;
const DNS: u16 = 23;

/// An option of DHCPv6 (RFC 8415 section 21.1).
fn option_v6(code: u16, value: &[u8]) -> Vec<u8> {
    [&code.to_be_bytes()[..], &(value.len() as u16).to_be_bytes(), value].concat()
}

/// The value of an option in a message or behind the fixed part of another option.
fn find_v6(mut options: &[u8], code: u16) -> Option<&[u8]> {
    while let [a, b, c, d, rest @ ..] = options {
        let bytes = usize::from(u16::from_be_bytes([*c, *d]));
        let (value, others) = rest.split_at_checked(bytes)?;
        if u16::from_be_bytes([*a, *b]) == code {
            return Some(value);
        }
        options = others;
    }
    None
}

fn a_dhcpv6_client_is_given_its_lease() {
    let world = World::with(65520, |c| c.dhcp_v6 = Some(lease_v6()));
    let index = world.guest.if_index("eth0").unwrap();
    let client = world.guest.run(|| UdpSocket::bind("[::]:546")).unwrap();
    client.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
    let all_servers = SocketAddrV6::new("ff02::1:2".parse().unwrap(), 547, 0, index);
    let identity = option_v6(CLIENT, &[0, 3, 0, 1, 2, 0, 0, 0, 0, 9]);
    let ask = |kind: u8, more: Vec<u8>| {
        let wanted = option_v6(ORO, &DNS.to_be_bytes());
        let message = [&[kind, 1, 2, 3][..], &identity, &wanted, &more].concat();
        // An answer is lost while the guest's address is tentative: a client asks again (RFC 8415 section 15).
        let answer = (0..PATIENCE.as_secs()).find_map(|_| {
            client.send_to(&message, all_servers).unwrap();
            receive(&client).ok()
        });
        answer.expect("an answer").0
    };
    let association = [0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0];
    let offer = ask(SOLICIT, option_v6(IA_NA, &association));
    assert_eq!(offer[..4], [ADVERTISE, 1, 2, 3]);
    let server = find_v6(&offer[4..], SERVER).unwrap();
    assert_eq!(server, lease_v6().duid);
    let offered = find_v6(&offer[4..], IA_NA).unwrap();
    let address = find_v6(&offered[12..], IA_ADDR).unwrap();
    assert_eq!(address[..16], lease_v6().address.octets());
    let chosen = [&association[..], &option_v6(IA_ADDR, address)].concat();
    let reply = ask(REQUEST, [option_v6(SERVER, server), option_v6(IA_NA, &chosen)].concat());
    assert_eq!(reply[..4], [REPLY, 1, 2, 3]);
    let given = find_v6(&reply[4..], IA_NA).unwrap();
    assert_eq!(find_v6(&given[12..], IA_ADDR).unwrap()[..16], lease_v6().address.octets());
    let resolver = find_v6(&reply[4..], DNS).unwrap();
    assert_eq!(resolver, lease_v6().nameservers[0].octets());
}
