//! Names with addresses of their own: a connection to such an address reaches that name, and nothing else does.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use fulmar_gateway::allowance::{Allowance, Bounds};
use fulmar_gateway::config::Config;
use fulmar_gateway::names::Ranges;
use fulmar_gateway::policy::{Decision, NewFlow, Policy, Protocol, Ruling};
use fulmar_gateway::rules::Rules;
use fulmar_gateway::stat::Refusal;
use nix::sys::socket::{Backlog, listen};

use crate::relay::Test;
use crate::relay::udp::{bound, guest_to, receive};
use crate::relay::world::{HOST, HOST_V6, PATIENCE, World, ip};

pub const TESTS: &[Test] = &[
    ("a_name_has_an_address_that_leads_to_it_alone", a_name_has_an_address),
    ("an_address_of_the_range_that_no_name_has_is_refused", an_address_without_a_name),
    ("the_policy_decides_about_the_real_address", the_policy_decides_about_the_real_address),
    ("a_name_does_not_lead_to_a_neighbour_of_the_host", a_name_of_a_neighbour),
    ("a_name_of_ipv6_alone_is_reached_over_ipv4", a_name_of_ipv6_alone),
    ("the_next_address_is_tried_when_the_first_refuses", the_next_address_is_tried),
    ("a_silent_address_is_passed_over_and_a_server_that_speaks_first_is_heard", a_silent_address),
    ("a_connection_after_the_lifetime_asks_again", a_connection_after_the_lifetime),
    ("a_name_that_does_not_exist_does_not_for_the_guest", a_name_that_does_not_exist),
    ("datagrams_to_a_name_reach_it_and_its_answers_come_back", datagrams_to_a_name),
    ("a_question_that_is_lost_is_asked_again", a_question_that_is_lost),
    ("a_resolver_that_lies_leads_to_no_host_of_its_own", a_resolver_that_lies),
    ("a_name_that_programs_read_otherwise_is_refused", a_name_that_programs_read_otherwise),
    ("guesses_at_an_answer_end_the_lookup_at_once", guesses_at_an_answer),
    ("flows_share_bounds_of_number_bytes_and_rate", flows_share_bounds),
    ("the_rule_and_its_bounds_are_those_of_the_connected_address", a_rule_of_one_address),
    ("questions_over_tcp_are_answered_as_those_over_udp", questions_over_tcp),
];

/// Allows the names good.example and other.example, at public addresses and at [`HOST`].
struct ByName;

impl Policy for ByName {
    fn decide(&mut self, flow: &NewFlow<'_>) -> Ruling {
        let is_dns = flow.to.port() == 53;
        let is_there = [ip(HOST), ip(HOST_V6)].contains(&flow.leads_to.ip());
        let decision = match flow.name {
            Some("example.com") if is_there => Decision::Allow,
            Some(name) if name.ends_with(".example") && is_there => Decision::Allow,
            None if is_dns => Decision::Allow,
            _ => Decision::Deny,
        };
        decision.into()
    }

    fn decide_name(&mut self, name: &str, _: u16) -> Decision {
        if name == "evil.example" { Decision::Deny } else { Decision::Allow }
    }
}

pub(super) fn world(resolver: &UdpSocket, change: impl FnOnce(&mut Config)) -> World {
    let at = resolver.local_addr().unwrap();
    World::with(65520, |c| {
        c.mapping.dns.push(ip("169.254.1.1"));
        c.mapping.resolvers.push(at);
        c.policy = Some(Box::new(ByName));
        c.names = Some(Ranges::of_global_id([7; 5]));
        change(c);
    })
}

pub(super) const A: u16 = 1;
const AAAA: u16 = 28;

/// The question of the guest for a name below `example`, or for one of two labels.
pub(super) fn question(first: &str, kind: u16) -> Vec<u8> {
    let mut message = vec![0, 7, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    let (first, second) = first.split_once('.').unwrap_or((first, "example"));
    for label in [first, second] {
        message.push(label.len() as u8);
        message.extend(label.as_bytes());
    }
    message.push(0);
    message.extend([kind.to_be_bytes(), [0, 1]].concat());
    message
}

/// Where the question of a message ends.
fn end_of_question(message: &[u8]) -> usize {
    12 + message[12..].iter().position(|b| *b == 0).unwrap() + 5
}

/// Answers the next two questions of the gateway, which are for A and AAAA, with these addresses, for `ttl` seconds.
pub(super) fn answer_both(resolver: &UdpSocket, addresses: &[&str], ttl: u8, code: u8) {
    answer(resolver, 2, addresses, ttl, code);
}

pub(super) fn answer(
    resolver: &UdpSocket,
    questions: usize,
    addresses: &[&str],
    ttl: u8,
    code: u8,
) {
    resolver.set_read_timeout(Some(PATIENCE)).unwrap();
    for _ in 0..questions {
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
pub(super) fn answered(client: &UdpSocket) -> (u8, Option<IpAddr>) {
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

pub(super) fn client(world: &World) -> UdpSocket {
    guest_to(world, "169.254.1.1:53".parse().unwrap())
}

/// The address of a name that has these.
pub(super) fn given(
    world: &World,
    resolver: &UdpSocket,
    first: &str,
    kind: u16,
    real: &[&str],
) -> IpAddr {
    let client = client(world);
    client.send(&question(first, kind)).unwrap();
    answer_both(resolver, real, 60, 0);
    let (code, address) = answered(&client);
    assert_eq!(code, 0);
    address.expect("an address")
}

pub(super) fn connect(world: &World, to: SocketAddr) -> std::io::Result<TcpStream> {
    world.guest.run(|| TcpStream::connect_timeout(&to, PATIENCE))
}

pub(super) fn listening(at: &str) -> TcpListener {
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
    client.send(&reverse_question(good)).unwrap();
    let (answer, _) = receive(&client).unwrap();
    assert!(answer.ends_with(b"\x04good\x07example\0"), "{answer:?}");
}

/// The question for the name of an IPv4 address.
fn reverse_question(address: IpAddr) -> Vec<u8> {
    const PTR: [u8; 4] = [0, 12, 0, 1];
    let IpAddr::V4(v4) = address else { panic!("{address}") };
    let labels = v4.octets().map(|octet| octet.to_string());
    let mut message = vec![0, 7, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    let labels = labels.iter().rev().map(String::as_str);
    for label in labels.chain(["in-addr", "arpa"]) {
        message.push(label.len() as u8);
        message.extend(label.as_bytes());
    }
    [message, vec![0], PTR.to_vec()].concat()
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

/// The rules of a user who allows a name.
struct ByRules(Rules);

impl Policy for ByRules {
    fn decide(&mut self, flow: &NewFlow<'_>) -> Ruling {
        self.0.ruling(flow, self.0.verdict_of_flow(flow, &[ip("169.254.1.1")]))
    }
}

fn a_name_of_a_neighbour() {
    let (resolver, server) = (bound("127.0.0.1"), listening(HOST));
    let port = server.local_addr().unwrap().port();
    for network in ["192.0.2.0", "203.0.113.0"] {
        let mut rules = Rules::default();
        rules.add_file("allow *\ndeny evil.example", Path::new("/r")).unwrap();
        let world = world(&resolver, |c| {
            c.mapping.host_networks.push((ip(network), 24));
            c.policy = Some(Box::new(ByRules(rules)));
        });
        let good = given(&world, &resolver, "good", A, &[HOST]);
        let connected = connect(&world, (good, port).into());
        let refused = world.stat().totals.refusals.value(Refusal::Policy);
        match network {
            "192.0.2.0" => {
                assert_eq!(connected.unwrap_err().kind(), std::io::ErrorKind::ConnectionRefused);
                assert_eq!(refused, 1);
            }
            _ => talks(connected.unwrap(), &server),
        }
    }
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

fn a_question_that_is_lost() {
    let resolver = bound("127.0.0.1");
    let world = world(&resolver, |c| c.mapping.attempts = 2);
    let client = client(&world);
    client.send(&question("good", A)).unwrap();
    for _ in 0..2 {
        receive(&resolver).unwrap();
    }
    answer_both(&resolver, &[HOST], 60, 0);
    let (code, address) = answered(&client);
    assert!(code == 0 && address.is_some(), "{code}");
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

/// Sends a question over TCP.
fn ask_over_tcp(stream: &mut TcpStream, question: &[u8]) {
    stream.write_all(&(question.len() as u16).to_be_bytes()).unwrap();
    stream.write_all(question).unwrap();
}

/// The next message over TCP.
fn message_over_tcp(stream: &mut TcpStream) -> Vec<u8> {
    let mut length = [0; 2];
    stream.read_exact(&mut length).unwrap();
    let mut message = vec![0; u16::from_be_bytes(length).into()];
    stream.read_exact(&mut message).unwrap();
    message
}

fn questions_over_tcp() {
    const TXT: u16 = 16;
    let resolver = bound("127.0.0.1");
    let servers = TcpListener::bind(resolver.local_addr().unwrap()).unwrap();
    let world = world(&resolver, |_| ());
    let good = given(&world, &resolver, "good", A, &[HOST]);
    let mut stream = connect(&world, "169.254.1.1:53".parse().unwrap()).unwrap();
    stream.set_nodelay(true).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    // Several at once, one of them in single bytes.
    ask_over_tcp(&mut stream, &question("good", A));
    ask_over_tcp(&mut stream, &question("evil", A));
    let slow = question("good", A);
    for byte in [&(slow.len() as u16).to_be_bytes()[..], &slow].concat() {
        stream.write_all(&[byte]).unwrap();
    }
    let IpAddr::V4(v4) = good else { panic!("{good}") };
    assert!(message_over_tcp(&mut stream).ends_with(&v4.octets()));
    assert_eq!(message_over_tcp(&mut stream)[3] & 15, 5, "refused");
    assert!(message_over_tcp(&mut stream).ends_with(&v4.octets()));
    // Other types are asked over TCP, and a long answer comes whole.
    let asked = question("good", TXT);
    ask_over_tcp(&mut stream, &asked);
    let (mut server, _) = servers.accept().unwrap();
    assert_eq!(message_over_tcp(&mut server), asked);
    let mut answer = asked.clone();
    answer[2] = 0x81;
    answer.extend(vec![7; 20_000]);
    ask_over_tcp(&mut server, &answer);
    assert!(message_over_tcp(&mut stream) == answer);
    // A server that closes has failed.
    ask_over_tcp(&mut stream, &question("other", TXT));
    drop(servers.accept().unwrap());
    assert_eq!(message_over_tcp(&mut stream)[3] & 15, 2, "SERVFAIL");
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    assert_eq!(rest_of(stream), (vec![], false));
}

/// Allows all, within bounds.
struct Within(Arc<Allowance>);

impl Policy for Within {
    fn decide(&mut self, flow: &NewFlow<'_>) -> Ruling {
        let allowance = (flow.to.port() != 53).then(|| Arc::clone(&self.0));
        Ruling { allowance, ..Decision::Allow.into() }
    }
}

/// Allows each address by a rule of its own, of which that of [`HOST`] has bounds.
struct ByAddress(Arc<Allowance>);

impl Policy for ByAddress {
    fn decide(&mut self, flow: &NewFlow<'_>) -> Ruling {
        let at = flow.leads_to.ip();
        let allowance = (at == ip(HOST)).then(|| Arc::clone(&self.0));
        Ruling { rule: Some(at.to_string().into()), allowance, ..Decision::Allow.into() }
    }
}

fn a_rule_of_one_address() {
    let (resolver, server) = (bound("127.0.0.1"), listening(HOST));
    let port = server.local_addr().unwrap().port();
    let one = Allowance::new(Bounds { flows: Some(1), ..Bounds::default() });
    let world = world(&resolver, |c| c.policy = Some(Box::new(ByAddress(one))));
    // Nothing listens at the IPv6 address, which comes first.
    let good = given(&world, &resolver, "good", A, &[HOST_V6, HOST]);
    let connected = connect(&world, (good, port).into()).unwrap();
    let rules = || {
        let tcp = world.stat().flows.into_iter().filter(|flow| flow.protocol == Protocol::Tcp);
        tcp.filter_map(|flow| flow.rule).collect::<Vec<_>>()
    };
    assert_eq!(rules(), [HOST.into()]);
    let refused = connect(&world, (good, port).into()).unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused, "the second");
    assert_eq!(world.stat().totals.refusals.value(Refusal::Allowance), 1);
    drop((connected, server.accept().unwrap()));
    let deadline = std::time::Instant::now() + PATIENCE;
    while !rules().is_empty() {
        assert!(std::time::Instant::now() < deadline, "the first has ended");
    }
    talks(connect(&world, (good, port).into()).unwrap(), &server);
}

/// Receives until the end: how many bytes, whether there was a reset, and how long it took.
fn transfer(bounds: Bounds, bytes: usize) -> (usize, bool, Duration) {
    let (resolver, server) = (bound("127.0.0.1"), listening(HOST));
    let to = SocketAddr::new(ip(HOST), server.local_addr().unwrap().port());
    let allowance = Allowance::new(bounds);
    let world = world(&resolver, |c| {
        c.names = None;
        c.policy = Some(Box::new(Within(allowance)));
    });
    let stream = connect(&world, to).unwrap();
    let (mut far, _) = server.accept().unwrap();
    if bounds.flows == Some(1) {
        let refused = connect(&world, to).unwrap_err();
        assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused);
        assert_eq!(world.stat().totals.refusals.value(Refusal::Allowance), 1);
    }
    let sender = std::thread::spawn(move || {
        // A reset ends it early.
        let _ = far.write_all(&vec![7; bytes]);
        far
    });
    let begun = std::time::Instant::now();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut came = Vec::new();
    let mut stream = stream.take(bytes as u64);
    let is_reset = stream.read_to_end(&mut came).is_err();
    drop(sender.join().unwrap());
    (came.len(), is_reset, begun.elapsed())
}

fn flows_share_bounds() {
    let none = Bounds::default();
    assert_eq!(transfer(Bounds { flows: Some(1), ..none }, 300_000).0, 300_000);
    let (came, is_reset, _) = transfer(Bounds { bytes: Some(100_000), ..none }, 300_000);
    assert!(is_reset && came <= 100_000, "{came}");
    let paced = Bounds { bytes_per_second: Some(1_000_000), ..none };
    let (came, is_reset, took) = transfer(paced, 600_000);
    assert!(!is_reset && came == 600_000);
    // A burst of a tenth of a second comes at once.
    assert!(took >= Duration::from_millis(450), "{took:?}");
}

fn guesses_at_an_answer() {
    let resolver = bound("127.0.0.1");
    let world = world(&resolver, |_| ());
    let client = client(&world);
    client.send(&question("good", A)).unwrap();
    resolver.set_read_timeout(Some(PATIENCE)).unwrap();
    let (asked, from) = receive(&resolver).unwrap();
    let begun = std::time::Instant::now();
    for guess in 1..100u8 {
        let wrong = [asked[0] ^ guess, asked[1], 0x81, 0x80];
        resolver.send_to(&[&wrong[..], &asked[4..]].concat(), from).unwrap();
    }
    assert_eq!(answered(&client), (2, None), "SERVFAIL");
    assert!(begun.elapsed() < Duration::from_secs(5), "not by the time-out");
}

fn a_name_that_programs_read_otherwise() {
    let resolver = bound("127.0.0.1");
    let world = world(&resolver, |_| ());
    let client = client(&world);
    for label in ["secret.good", "good\0", "good\r\nx", "good x"] {
        let mut message = vec![0, 7, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, label.len() as u8];
        message.extend(label.as_bytes());
        message.extend(b"\x07example\0\0\x01\0\x01");
        client.send(&message).unwrap();
        assert_eq!(answered(&client), (5, None), "{}", label.escape_default());
    }
    for name in ["169.254", "127.0x1", "good.0"] {
        client.send(&question(name, A)).unwrap();
        assert_eq!(answered(&client), (5, None), "{name}: an address as text");
    }
    // No resolver was asked.
    resolver.set_nonblocking(true).unwrap();
    assert!(resolver.recv(&mut [0; 9]).is_err());
}

/// All that comes before the end or the reset of a stream, and whether it was reset.
pub(super) fn rest_of(mut stream: TcpStream) -> (Vec<u8>, bool) {
    let mut came = Vec::new();
    let ended = stream.read_to_end(&mut came);
    let is_reset = ended.as_ref().is_err_and(|e| e.kind() == std::io::ErrorKind::ConnectionReset);
    assert!(ended.is_ok() || is_reset, "{ended:?} after {came:?}");
    (came, is_reset)
}
