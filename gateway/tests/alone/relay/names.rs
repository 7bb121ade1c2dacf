//! Names with addresses of their own: a connection to such an address reaches that name, and nothing else does.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::time::Duration;

use fulmar_gateway::config::Config;
use fulmar_gateway::names::Ranges;
use fulmar_gateway::policy::{Decision, NewFlow, Policy};
use fulmar_gateway::stat::Refusal;
use nix::sys::socket::{Backlog, listen};

use crate::relay::Test;
use crate::relay::udp::{bound, guest_to, receive};
use crate::relay::world::{HOST, HOST_V6, PATIENCE, World, ip};

pub const TESTS: &[Test] = &[
    ("a_name_has_an_address_that_leads_to_it_alone", a_name_has_an_address),
    ("an_address_of_the_range_that_no_name_has_is_refused", an_address_without_a_name),
    ("the_policy_decides_about_the_real_address", the_policy_decides_about_the_real_address),
    ("a_name_of_ipv6_alone_is_reached_over_ipv4", a_name_of_ipv6_alone),
    ("the_next_address_is_tried_when_the_first_refuses", the_next_address_is_tried),
    ("a_silent_address_is_passed_over_and_a_server_that_speaks_first_is_heard", a_silent_address),
    ("a_connection_after_the_lifetime_asks_again", a_connection_after_the_lifetime),
    ("a_name_that_does_not_exist_does_not_for_the_guest", a_name_that_does_not_exist),
    ("datagrams_to_a_name_reach_it_and_its_answers_come_back", datagrams_to_a_name),
    ("a_resolver_that_lies_leads_to_no_host_of_its_own", a_resolver_that_lies),
];

/// Allows the names good.example and other.example, at public addresses and at [`HOST`].
struct ByName;

impl Policy for ByName {
    fn decide(&mut self, flow: &NewFlow<'_>) -> Decision {
        let is_dns = flow.to.port() == 53;
        let is_there = [ip(HOST), ip(HOST_V6)].contains(&flow.leads_to.ip());
        match flow.name {
            Some(name) if name.ends_with(".example") && is_there => Decision::Allow,
            None if is_dns => Decision::Allow,
            _ => Decision::Deny,
        }
    }

    fn decide_name(&mut self, name: &str, _: u16) -> Decision {
        if name == "evil.example" { Decision::Deny } else { Decision::Allow }
    }
}

fn world(resolver: &UdpSocket, change: impl FnOnce(&mut Config)) -> World {
    let at = resolver.local_addr().unwrap();
    World::with(65520, |c| {
        c.mapping.dns.push(ip("169.254.1.1"));
        c.mapping.resolvers.push(at);
        c.policy = Some(Box::new(ByName));
        c.names = Some(Ranges::of_global_id([7; 5]));
        change(c);
    })
}

const A: u16 = 1;
const AAAA: u16 = 28;

/// The question of the guest for a name of two labels.
fn question(first: &str, kind: u16) -> Vec<u8> {
    let mut message = vec![0, 7, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, first.len() as u8];
    message.extend(first.as_bytes());
    message.extend(b"\x07example\0");
    message.extend([kind.to_be_bytes(), [0, 1]].concat());
    message
}

/// Where the question of a message ends.
fn end_of_question(message: &[u8]) -> usize {
    12 + message[12..].iter().position(|b| *b == 0).unwrap() + 5
}

/// Answers the next two questions of the gateway, which are for A and AAAA, with these addresses, for `ttl` seconds.
fn answer_both(resolver: &UdpSocket, addresses: &[&str], ttl: u8, code: u8) {
    resolver.set_read_timeout(Some(PATIENCE)).unwrap();
    for _ in 0..2 {
        let (asked, from) = receive(resolver).unwrap();
        let end = end_of_question(&asked);
        let kind = u16::from_be_bytes([asked[end - 4], asked[end - 3]]);
        let of_kind = addresses.iter().map(|a| ip(a)).filter(|a| a.is_ipv4() == (kind == A));
        let of_kind: Vec<IpAddr> = of_kind.collect();
        let mut answer = asked[..end].to_vec();
        (answer[2], answer[3]) = (0x81, 0x80 | code);
        answer[6..12].copy_from_slice(&[0, of_kind.len() as u8, 0, 0, 0, 0]);
        for address in of_kind {
            let octets = match address {
                IpAddr::V4(v4) => v4.octets().to_vec(),
                IpAddr::V6(v6) => v6.octets().to_vec(),
            };
            answer.extend([192, 12]);
            answer.extend(kind.to_be_bytes());
            answer.extend([0, 1, 0, 0, 0, ttl, 0, octets.len() as u8]);
            answer.extend(octets);
        }
        resolver.send_to(&answer, from).unwrap();
    }
}

/// What the gateway answers: the code and the address.
fn answered(client: &UdpSocket) -> (u8, Option<IpAddr>) {
    client.set_read_timeout(Some(PATIENCE)).unwrap();
    let (answer, _) = receive(client).unwrap();
    let data = &answer[end_of_question(&answer)..];
    let address = match (answer[7], data.get(10..12)) {
        (0, _) | (_, None) => None,
        (_, Some([0, 4])) => Some(IpAddr::from(<[u8; 4]>::try_from(&data[12..16]).unwrap())),
        (_, Some(_)) => Some(IpAddr::from(<[u8; 16]>::try_from(&data[12..28]).unwrap())),
    };
    (answer[3] & 15, address)
}

fn client(world: &World) -> UdpSocket {
    guest_to(world, "169.254.1.1:53".parse().unwrap())
}

/// The address of a name that has these.
fn given(world: &World, resolver: &UdpSocket, first: &str, kind: u16, real: &[&str]) -> IpAddr {
    let client = client(world);
    client.send(&question(first, kind)).unwrap();
    answer_both(resolver, real, 60, 0);
    let (code, address) = answered(&client);
    assert_eq!(code, 0);
    address.expect("an address")
}

fn connect(world: &World, to: SocketAddr) -> std::io::Result<TcpStream> {
    world.guest.run(|| TcpStream::connect_timeout(&to, PATIENCE))
}

fn listening(at: &str) -> TcpListener {
    TcpListener::bind((ip(at), 0)).unwrap()
}

/// Sends a word each way.
fn talks(mut stream: TcpStream, server: &TcpListener) {
    let (mut far, _) = server.accept().unwrap();
    stream.write_all(b"to").unwrap();
    let mut word = [0; 2];
    far.read_exact(&mut word).unwrap();
    far.write_all(b"fro").unwrap();
    let mut answer = [0; 3];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!((&word, &answer), (b"to", b"fro"));
}

fn a_name_has_an_address() {
    let (resolver, server) = (bound("127.0.0.1"), listening(HOST));
    let port = server.local_addr().unwrap().port();
    let world = world(&resolver, |_| ());
    let good = given(&world, &resolver, "good", A, &[HOST]);
    assert!(good.to_string().starts_with("198.18."), "{good}");
    assert_eq!(
        given(&world, &resolver, "other", A, &[HOST]),
        "198.18.0.3".parse::<IpAddr>().unwrap()
    );
    talks(connect(&world, (good, port).into()).unwrap(), &server);
    let refused = connect(&world, (ip(HOST), port).into()).unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused, "the address itself");
    let client = client(&world);
    client.send(&question("evil", A)).unwrap();
    assert_eq!(answered(&client), (5, None));
    // It is pinned: the resolver gets no question.
    client.send(&question("good", A)).unwrap();
    assert_eq!(answered(&client), (0, Some(good)));
    client.send(&question("good", AAAA)).unwrap();
    let (code, v6) = answered(&client);
    assert!(code == 0 && v6.unwrap().to_string().starts_with("fd07:707:707:"), "{v6:?}");
    talks(connect(&world, (v6.unwrap(), port).into()).unwrap(), &server);
}

fn an_address_without_a_name() {
    let resolver = bound("127.0.0.1");
    let world = world(&resolver, |_| ());
    for to in ["198.18.0.2:80", "198.19.255.254:80", "[fd07:707:707::9]:80"] {
        let refused = connect(&world, to.parse().unwrap()).unwrap_err();
        assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused, "{to}");
    }
    assert_eq!(world.stat().totals.refusals.value(Refusal::NoName), 3);
}

fn the_policy_decides_about_the_real_address() {
    let resolver = bound("127.0.0.1");
    let world = world(&resolver, |_| ());
    let metadata = given(&world, &resolver, "metadata", A, &["169.254.169.254"]);
    let refused = connect(&world, (metadata, 80).into()).unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused);
    assert_eq!(world.stat().totals.refusals.value(Refusal::Policy), 1);
}

fn a_name_of_ipv6_alone() {
    let (resolver, server) = (bound("127.0.0.1"), listening(HOST_V6));
    let port = server.local_addr().unwrap().port();
    let world = world(&resolver, |_| ());
    let good = given(&world, &resolver, "good", A, &[HOST_V6]);
    assert!(good.is_ipv4());
    talks(connect(&world, (good, port).into()).unwrap(), &server);
}

fn the_next_address_is_tried() {
    let (resolver, server) = (bound("127.0.0.1"), listening(HOST));
    let port = server.local_addr().unwrap().port();
    let world = world(&resolver, |_| ());
    // Nothing listens at the IPv6 address, which comes first.
    let good = given(&world, &resolver, "good", A, &[HOST_V6, HOST]);
    talks(connect(&world, (good, port).into()).unwrap(), &server);
    drop(server);
    let refused = connect(&world, (good, port).into()).unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused, "all refuse");
}

fn a_silent_address() {
    let (resolver, server) = (bound("127.0.0.1"), listening(HOST));
    let port = server.local_addr().unwrap().port();
    // Its accept queue is full, so that it drops SYNs.
    let full = TcpListener::bind((ip(HOST_V6), port)).unwrap();
    listen(&full, Backlog::new(0).unwrap()).unwrap();
    let address = SocketAddr::from((ip(HOST_V6), port));
    let soon = Duration::from_millis(50);
    let _filling: Vec<_> =
        (0..3).map(|_| TcpStream::connect_timeout(&address, soon)).filter_map(Result::ok).collect();
    let world = world(&resolver, |_| ());
    let good = given(&world, &resolver, "good", A, &[HOST_V6, HOST]);
    let greeting = std::thread::spawn(move || {
        let (mut far, _) = server.accept().unwrap();
        far.write_all(b"hello").unwrap();
        far
    });
    let mut stream = connect(&world, (good, port).into()).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut word = [0; 5];
    stream.read_exact(&mut word).unwrap();
    assert_eq!(&word, b"hello");
    drop(greeting.join().unwrap());
    assert_eq!(stream.read(&mut word).unwrap(), 0, "the end of the stream");
}

fn a_connection_after_the_lifetime() {
    let (resolver, server) = (bound("127.0.0.1"), listening(HOST));
    let port = server.local_addr().unwrap().port();
    let world = world(&resolver, |_| ());
    let client = client(&world);
    client.send(&question("good", A)).unwrap();
    answer_both(&resolver, &["203.0.113.9"], 1, 0);
    let good = answered(&client).1.unwrap();
    // Longer than the least lifetime.
    std::thread::sleep(Duration::from_millis(5200));
    let connected = std::thread::scope(|scope| {
        scope.spawn(|| answer_both(&resolver, &[HOST], 60, 0));
        connect(&world, (good, port).into())
    });
    talks(connected.unwrap(), &server);
}

fn a_name_that_does_not_exist() {
    let resolver = bound("127.0.0.1");
    let world = world(&resolver, |_| ());
    let client = client(&world);
    for (code, told) in [(3, 3), (0, 0), (2, 2)] {
        client.send(&question(&format!("n{code}"), A)).unwrap();
        answer_both(&resolver, &[], 0, code);
        assert_eq!(answered(&client), (told, None));
    }
}

fn datagrams_to_a_name() {
    let (resolver, server) = (bound("127.0.0.1"), bound(HOST));
    let port = server.local_addr().unwrap().port();
    let world = world(&resolver, |_| ());
    let both = ["good", "other"].map(|first| given(&world, &resolver, first, A, &[HOST]));
    // Two names of one address: each answer comes from the address that was written to.
    for to in both {
        let guest = guest_to(&world, (to, port).into());
        guest.send(b"question").unwrap();
        let (came, from) = receive(&server).unwrap();
        assert_eq!(came, b"question");
        server.send_to(b"answer", from).unwrap();
        assert_eq!(receive(&guest).unwrap().0, b"answer", "from {to}");
    }
}

fn a_resolver_that_lies() {
    let (resolver, server) = (bound("127.0.0.1"), listening("127.0.0.1"));
    let port = server.local_addr().unwrap().port();
    let world = world(&resolver, |c| c.policy = None);
    for loopback in ["127.0.0.1", "::1", "0.0.0.0", "::ffff:127.0.0.1"] {
        let first = format!("n{}", loopback.len());
        let name = given(&world, &resolver, &first, A, &[loopback]);
        let refused = connect(&world, (name, port).into()).unwrap_err();
        assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused, "{loopback}");
    }
}
