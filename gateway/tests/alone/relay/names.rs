//! Names with addresses of their own: a connection to such an address reaches that name, and nothing else does.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use fulmar_gateway::allowance::{Allowance, Bounds};
use fulmar_gateway::config::Config;
use fulmar_gateway::names::Ranges;
use fulmar_gateway::policy::{Decision, NewFlow, Policy};
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
    ("a_request_for_another_name_at_the_address_ends_the_connection", a_request_for_another_name),
    ("a_request_for_the_name_passes_whole_in_single_bytes", a_request_in_single_bytes),
    ("an_upload_passes_behind_its_head_and_the_next_request_is_read", an_upload),
    ("a_client_hello_for_another_name_ends_the_connection", a_client_hello_for_another_name),
    ("a_quic_hello_for_another_name_is_dropped", a_quic_hello_for_another_name),
    ("a_dot_within_a_label_makes_no_other_name", a_dot_within_a_label),
    ("guesses_at_an_answer_end_the_lookup_at_once", guesses_at_an_answer),
    ("flows_share_bounds_of_number_bytes_and_rate", flows_share_bounds),
    ("questions_over_tcp_are_answered_as_those_over_udp", questions_over_tcp),
    ("with_real_addresses_the_first_bytes_ask_for_an_allowed_name", with_real_addresses),
];

/// Allows the names good.example and other.example, at public addresses and at [`HOST`].
struct ByName;

impl Policy for ByName {
    fn decide(&mut self, flow: &NewFlow<'_>) -> Decision {
        let is_dns = flow.to.port() == 53;
        let is_there = [ip(HOST), ip(HOST_V6)].contains(&flow.leads_to.ip());
        match flow.name {
            Some("example.com") if is_there => Decision::Allow,
            Some(name) if name.ends_with(".example") && is_there => Decision::Allow,
            None if is_dns => Decision::Allow,
            _ => Decision::Deny,
        }
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
fn answer_both(resolver: &UdpSocket, addresses: &[&str], ttl: u8, code: u8) {
    answer(resolver, 2, addresses, ttl, code);
}

fn answer(resolver: &UdpSocket, questions: usize, addresses: &[&str], ttl: u8, code: u8) {
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
fn given(world: &World, resolver: &UdpSocket, first: &str, kind: u16, real: &[&str]) -> IpAddr {
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
    fn decide(&mut self, flow: &NewFlow<'_>) -> Decision {
        let is_allowed = self.0.verdict_of_flow(flow, &[ip("169.254.1.1")]).denial.is_none();
        if is_allowed { Decision::Allow } else { Decision::Deny }
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

/// A connection to a name, and the server's end.
fn connected(world: &World, good: IpAddr) -> (TcpStream, TcpStream) {
    let server = listening(HOST);
    let stream = connect(world, (good, server.local_addr().unwrap().port()).into()).unwrap();
    let (far, _) = server.accept().unwrap();
    for end in [&stream, &far] {
        end.set_read_timeout(Some(PATIENCE)).unwrap();
        end.set_nodelay(true).unwrap();
    }
    (stream, far)
}

/// All that comes before the end or the reset of a stream, and whether it was reset.
pub(super) fn rest_of(mut stream: TcpStream) -> (Vec<u8>, bool) {
    let mut came = Vec::new();
    let ended = stream.read_to_end(&mut came);
    let is_reset = ended.as_ref().is_err_and(|e| e.kind() == std::io::ErrorKind::ConnectionReset);
    assert!(ended.is_ok() || is_reset, "{ended:?} after {came:?}");
    (came, is_reset)
}

fn a_request_for_another_name() {
    let resolver = bound("127.0.0.1");
    let world = world(&resolver, |_| ());
    let good = given(&world, &resolver, "good", A, &[HOST]);
    for request in [
        &b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n"[..],
        b"GET http://evil.example/ HTTP/1.1\r\nHost: good.example\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"CONNECT evil.example:443 HTTP/1.1\r\nHost: evil.example:443\r\n\r\n",
    ] {
        let (mut stream, far) = connected(&world, good);
        stream.write_all(request).unwrap();
        assert_eq!(rest_of(stream), (vec![], true), "{}", request.escape_ascii());
        let (came, is_reset) = rest_of(far);
        assert!(is_reset && b"CONNECT".starts_with(&came) || b"GET".starts_with(&came), "{came:?}");
    }
    assert_eq!(world.stat().totals.refusals.value(Refusal::FirstBytes), 4);
}

fn a_request_in_single_bytes() {
    let resolver = bound("127.0.0.1");
    let world = world(&resolver, |_| ());
    let good = given(&world, &resolver, "good", A, &[HOST]);
    let (mut stream, mut far) = connected(&world, good);
    let request = b"GET / HTTP/1.1\r\nX: y\r\nHost: good.example\r\n\r\n";
    let (last, first) = request.split_last().unwrap();
    for byte in first {
        stream.write_all(&[*byte]).unwrap();
    }
    let mut came = [0; 3];
    far.read_exact(&mut came).unwrap();
    far.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    let early = far.read(&mut [0]).unwrap_err();
    assert_eq!((&came, early.kind()), (b"GET", std::io::ErrorKind::WouldBlock), "the head is held");
    stream.write_all(&[*last]).unwrap();
    far.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut whole = vec![0; request.len() - 3];
    far.read_exact(&mut whole).unwrap();
    assert_eq!(whole, request[3..]);
    far.write_all(b"HTTP/1.1 204 No Content\r\n\r\n").unwrap();
    drop(far);
    assert_eq!(rest_of(stream).0, b"HTTP/1.1 204 No Content\r\n\r\n");
}

fn an_upload() {
    let resolver = bound("127.0.0.1");
    let world = world(&resolver, |_| ());
    let good = given(&world, &resolver, "good", A, &[HOST]);
    let (mut stream, mut far) = connected(&world, good);
    let body = vec![7; 3 << 20];
    let head =
        format!("POST / HTTP/1.1\r\nHost: good.example\r\nContent-Length: {}\r\n\r\n", body.len());
    let length = head.len() + body.len();
    let server = std::thread::spawn(move || {
        let mut came = vec![0; length];
        far.read_exact(&mut came).unwrap();
        far.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").unwrap();
        (came, far)
    });
    stream.write_all(head.as_bytes()).unwrap();
    stream.write_all(&body).unwrap();
    let (came, far) = server.join().unwrap();
    assert!(came.starts_with(head.as_bytes()) && came.ends_with(&body));
    stream.write_all(b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n").unwrap();
    assert!(rest_of(stream).1 && rest_of(far).1);
}

fn bytes(digits: &str) -> Vec<u8> {
    let digit = |at: usize| char::from(digits.as_bytes()[at]).to_digit(16).unwrap() as u8;
    (0..digits.len() / 2).map(|at| digit(2 * at) << 4 | digit(2 * at + 1)).collect()
}

/// The ClientHello of `openssl s_client` 3.0.19 for allowed.example.
const CLIENT_HELLO: &str = "\
    160301013c01000138030302568fb64ef97fbd5db16bb3f83717872ab978ddb8251d2ac4fe851b555b8d6b20792199ee7bba5b5417d246a4\
    dd86a2310ebdcf5d005d5161ba8ac1100db1f26b003e130213031301c02cc030009fcca9cca8ccaac02bc02f009ec024c028006bc023c027\
    0067c00ac0140039c009c0130033009d009c003d003c0035002f00ff010000b100000014001200000f616c6c6f7765642e6578616d706c65\
    000b000403000102000a00160014001d0017001e0019001801000101010201030104002300000016000000170000000d002a002804030503\
    0603080708080809080a080b080408050806040105010601030303010302040205020602002b0009080304030303020301002d0002010100\
    3300260024001d00200447e9b05655a656fd26b745b9824808182e6e3f6a81f241e1d72707a2bd4a45";

/// The Initial packet of RFC 9001 appendix A.2, for example.com.
const QUIC_INITIAL: &str = "\
    c000000001088394c8f03e5157080000449e7b9aec34d1b1c98dd7689fb8ec11d242b123dc9bd8bab936b47d92ec356c0bab7df5976d27cd\
    449f63300099f3991c260ec4c60d17b31f8429157bb35a1282a643a8d2262cad67500cadb8e7378c8eb7539ec4d4905fed1bee1fc8aafba1\
    7c750e2c7ace01e6005f80fcb7df621230c83711b39343fa028cea7f7fb5ff89eac2308249a02252155e2347b63d58c5457afd84d05dfffd\
    b20392844ae812154682e9cf012f9021a6f0be17ddd0c2084dce25ff9b06cde535d0f920a2db1bf362c23e596d11a4f5a6cf3948838a3aec\
    4e15daf8500a6ef69ec4e3feb6b1d98e610ac8b7ec3faf6ad760b7bad1db4ba3485e8a94dc250ae3fdb41ed15fb6a8e5eba0fc3dd60bc8e3\
    0c5c4287e53805db059ae0648db2f64264ed5e39be2e20d82df566da8dd5998ccabdae053060ae6c7b4378e846d29f37ed7b4ea9ec5d82e7\
    961b7f25a9323851f681d582363aa5f89937f5a67258bf63ad6f1a0b1d96dbd4faddfcefc5266ba6611722395c906556be52afe3f565636a\
    d1b17d508b73d8743eeb524be22b3dcbc2c7468d54119c7468449a13d8e3b95811a198f3491de3e7fe942b330407abf82a4ed7c1b311663a\
    c69890f4157015853d91e923037c227a33cdd5ec281ca3f79c44546b9d90ca00f064c99e3dd97911d39fe9c5d0b23a229a234cb36186c481\
    9e8b9c5927726632291d6a418211cc2962e20fe47feb3edf330f2c603a9d48c0fcb5699dbfe5896425c5bac4aee82e57a85aaf4e2513e4f0\
    5796b07ba2ee47d80506f8d2c25e50fd14de71e6c418559302f939b0e1abd576f279c4b2e0feb85c1f28ff18f58891ffef132eef2fa09346\
    aee33c28eb130ff28f5b766953334113211996d20011a198e3fc433f9f2541010ae17c1bf202580f6047472fb36857fe843b19f5984009dd\
    c324044e847a4f4a0ab34f719595de37252d6235365e9b84392b061085349d73203a4a13e96f5432ec0fd4a1ee65accdd5e3904df54c1da5\
    10b0ff20dcc0c77fcb2c0e0eb605cb0504db87632cf3d8b4dae6e705769d1de354270123cb11450efc60ac47683d7b8d0f811365565fd98c\
    4c8eb936bcab8d069fc33bd801b03adea2e1fbc5aa463d08ca19896d2bf59a071b851e6c239052172f296bfb5e72404790a2181014f3b94a\
    4e97d117b438130368cc39dbb2d198065ae3986547926cd2162f40a29f0c3c8745c0f50fba3852e566d44575c29d39a03f0cda721984b6f4\
    40591f355e12d439ff150aab7613499dbd49adabc8676eef023b15b65bfc5ca06948109f23f350db82123535eb8a7433bdabcb909271a6ec\
    bcb58b936a88cd4e8f2e6ff5800175f113253d8fa9ca8885c2f552e657dc603f252e1a8e308f76f0be79e2fb8f5d5fbbe2e30ecadd220723\
    c8c0aea8078cdfcb3868263ff8f0940054da48781893a7e49ad5aff4af300cd804a6b6279ab3ff3afb64491c85194aab760d58a606654f9f\
    4400e8b38591356fbf6425aca26dc85244259ff2b19c41b9f96f3ca9ec1dde434da7d2d392b905ddf3d1f9af93d1af5950bd493f5aa731b4\
    056df31bd267b6b90a079831aaf579be0a39013137aac6d404f518cfd46840647e78bfe706ca4cf5e9c5453e9f7cfd2b8b4c8d169a44e55c\
    88d4a9a7f9474241e221af44860018ab0856972e194cd934";

fn a_client_hello_for_another_name() {
    let (resolver, server) = (bound("127.0.0.1"), listening(HOST));
    let to = |address| SocketAddr::new(address, server.local_addr().unwrap().port());
    let world = world(&resolver, |_| ());
    let (good, allowed) = ("good", "allowed");
    let (good, allowed) =
        (given(&world, &resolver, good, A, &[HOST]), given(&world, &resolver, allowed, A, &[HOST]));
    let hello = bytes(CLIENT_HELLO);
    let mut stream = connect(&world, to(good)).unwrap();
    let (far, _) = server.accept().unwrap();
    stream.write_all(&hello).unwrap();
    assert_eq!((rest_of(stream), rest_of(far)), ((vec![], true), (vec![], true)));
    let mut stream = connect(&world, to(allowed)).unwrap();
    let (mut far, _) = server.accept().unwrap();
    stream.set_nodelay(true).unwrap();
    hello.chunks(1).for_each(|byte| stream.write_all(byte).unwrap());
    let mut came = vec![0; hello.len()];
    far.read_exact(&mut came).unwrap();
    assert_eq!(came, hello);
}

fn a_quic_hello_for_another_name() {
    let (resolver, server) = (bound("127.0.0.1"), bound(HOST));
    let port = server.local_addr().unwrap().port();
    let world = world(&resolver, |_| ());
    let good = given(&world, &resolver, "good", A, &[HOST]);
    let right = given(&world, &resolver, "example.com", A, &[HOST]);
    let initial = bytes(QUIC_INITIAL);
    let guest = guest_to(&world, (good, port).into());
    guest.send(&initial).unwrap();
    // The refusal of the datagram before is the error of a later call.
    let insist = |socket: &UdpSocket| while socket.send(b"end").is_err() {};
    insist(&guest);
    assert_eq!(receive(&server).unwrap().0, b"end", "the hello is dropped");
    let guest = guest_to(&world, (right, port).into());
    guest.send(&initial).unwrap();
    assert!(receive(&server).unwrap().0 == initial);
    // Another port of the guest must not go on with the connection.
    let other = guest_to(&world, (right, port).into());
    other.send(&initial).unwrap();
    insist(&other);
    guest.send(b"mark").unwrap();
    assert_eq!(receive(&server).unwrap().0, b"mark");
    assert_eq!(world.stat().totals.refusals.value(Refusal::FirstBytes), 3);
}

/// Allows what the guest's resolver has for good.example.
struct ByLearntName;

impl Policy for ByLearntName {
    fn decide(&mut self, flow: &NewFlow<'_>) -> Decision {
        let is_good = flow.names.iter().any(|name| name == "good.example");
        if is_good || flow.to.port() == 53 { Decision::Allow } else { Decision::Deny }
    }

    fn allowed_names(&mut self, flow: &NewFlow<'_>) -> Option<Vec<String>> {
        Some(flow.names.iter().filter(|name| *name == "good.example").cloned().collect())
    }
}

fn with_real_addresses() {
    let (resolver, server) = (bound("127.0.0.1"), listening(HOST));
    let to = SocketAddr::new(ip(HOST), server.local_addr().unwrap().port());
    let world = world(&resolver, |c| {
        c.names = None;
        c.policy = Some(Box::new(ByLearntName));
    });
    let client = client(&world);
    let exchange = |first: &str, request: &[u8]| {
        client.send(&question(first, A)).unwrap();
        answer(&resolver, 1, &[HOST], 60, 0);
        assert_eq!(answered(&client), (0, Some(ip(HOST))));
        let mut stream = connect(&world, to).unwrap();
        let (far, _) = server.accept().unwrap();
        stream.write_all(request).unwrap();
        // It may be reset already.
        let _ = stream.shutdown(std::net::Shutdown::Write);
        far.set_read_timeout(Some(PATIENCE)).unwrap();
        rest_of(far)
    };
    let good = b"GET / HTTP/1.1\r\nHost: good.example\r\n\r\n";
    assert_eq!(exchange("good", good), (good.to_vec(), false));
    assert!(exchange("good", b"GET / HTTP/1.1\r\nHost: other.example\r\n\r\n").1);
    assert_eq!(exchange("good", b"text\n"), (b"text\n".to_vec(), false));
    // The address has another name, too, which is not allowed.
    assert_eq!(exchange("other", good), (good.to_vec(), false));
    assert!(exchange("good", b"text\n").1);
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
    fn decide(&mut self, _: &NewFlow<'_>) -> Decision {
        Decision::Allow
    }

    fn allowance(&mut self, flow: &NewFlow<'_>) -> Option<Arc<Allowance>> {
        (flow.to.port() != 53).then(|| Arc::clone(&self.0))
    }
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

fn a_dot_within_a_label() {
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
    // No resolver was asked.
    resolver.set_nonblocking(true).unwrap();
    assert!(resolver.recv(&mut [0; 9]).is_err());
}
