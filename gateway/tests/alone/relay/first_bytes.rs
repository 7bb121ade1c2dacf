//! The first bytes of a connection to a name: they do not ask for another name.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream, UdpSocket};
use std::time::Duration;

use fulmar_gateway::policy::{Decision, NewFlow, Policy, Ruling};
use fulmar_gateway::stat::Refusal;

use crate::relay::Test;
use crate::relay::names::{
    A, answer, answered, client, connect, given, listening, question, rest_of, world,
};
use crate::relay::udp::{bound, guest_to, receive};
use crate::relay::world::{HOST, PATIENCE, World, ip};
use fixtures::{OPENSSL, QUIC_V1, bytes};

#[path = "../../../src/first/tests/fixtures.rs"]
#[expect(dead_code, reason = "the unit tests use more of them")]
mod fixtures;

pub const TESTS: &[Test] = &[
    ("a_request_for_another_name_at_the_address_ends_the_connection", a_request_for_another_name),
    ("a_request_for_the_name_passes_whole_in_single_bytes", a_request_in_single_bytes),
    ("an_upload_passes_behind_its_head_and_the_next_request_is_read", an_upload),
    ("a_client_hello_for_another_name_ends_the_connection", a_client_hello_for_another_name),
    ("a_quic_hello_for_another_name_is_dropped", a_quic_hello_for_another_name),
    ("with_real_addresses_the_first_bytes_ask_for_an_allowed_name", with_real_addresses),
];

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

fn a_client_hello_for_another_name() {
    let (resolver, server) = (bound("127.0.0.1"), listening(HOST));
    let to = |address| SocketAddr::new(address, server.local_addr().unwrap().port());
    let world = world(&resolver, |_| ());
    let (good, allowed) = ("good", "allowed");
    let (good, allowed) =
        (given(&world, &resolver, good, A, &[HOST]), given(&world, &resolver, allowed, A, &[HOST]));
    let hello = bytes(OPENSSL);
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
    let initial = bytes(QUIC_V1);
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
    world.until("both hellos and `end` are refused", |stat| {
        stat.totals.refusals.value(Refusal::FirstBytes) == 3
    });
}

/// Allows what the guest's resolver has for good.example.
struct ByLearntName;

impl Policy for ByLearntName {
    fn decide(&mut self, flow: &NewFlow<'_>) -> Ruling {
        let good = flow.names.iter().filter(|name| *name == "good.example");
        let good: Vec<String> = good.cloned().collect();
        match good.is_empty() && flow.to.port() != 53 {
            true => Decision::Deny.into(),
            false => Ruling { names: Some(good), ..Decision::Allow.into() },
        }
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
