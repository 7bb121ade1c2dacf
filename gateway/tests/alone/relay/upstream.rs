//! Connections through a proxy: names are resolved there, and nothing else leaves.

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, TcpListener, TcpStream};
use std::thread::JoinHandle;

use fulmar_gateway::policy::{Decision, NewFlow, Policy, Ruling};
use fulmar_gateway::stat::Refusal;
use fulmar_gateway::upstream::{Kind, Upstream};

use crate::relay::Test;
use crate::relay::names::{A, answered, client, connect, listening, question, rest_of, world};
use crate::relay::udp::{bound, guest_to};
use crate::relay::world::{HOST, PATIENCE, World, ip};

pub const TESTS: &[Test] = &[
    ("a_name_is_reached_through_an_http_proxy_and_is_not_resolved_here", through_http),
    ("a_name_is_reached_through_a_socks_proxy_with_a_password", through_socks),
    ("a_refusal_of_the_proxy_refuses_the_connection", a_refusal),
    ("first_bytes_are_read_in_a_tunnel_and_datagrams_do_not_pass", first_bytes_and_datagrams),
];

/// A world whose proxy is a listener, and the guest's address of good.example.
fn begin(kind: Kind) -> (World, TcpListener, IpAddr) {
    let (resolver, proxy) = (bound("127.0.0.1"), listening("127.0.0.1"));
    let address = proxy.local_addr().unwrap();
    let credentials = (kind == Kind::Socks5).then(|| ("me".to_owned(), "pw".to_owned()));
    let world = world(&resolver, |c| {
        c.upstream = Some(Upstream { kind, address, credentials });
        c.policy = Some(Box::new(NameOnly));
    });
    let client = client(&world);
    client.send(&question("good", A)).unwrap();
    let (code, address) = answered(&client);
    assert_eq!(code, 0, "no resolver has answered");
    (world, proxy, address.unwrap())
}

/// Allows good.example, whose real address the proxy alone knows.
struct NameOnly;

impl Policy for NameOnly {
    fn decide(&mut self, flow: &NewFlow<'_>) -> Ruling {
        let decision = match flow.name {
            Some("good.example") if flow.leads_to == flow.to => Decision::Allow,
            None if flow.to.port() == 53 => Decision::Allow,
            _ => Decision::Deny,
        };
        decision.into()
    }
}

/// Answers each part of the guest's gateway, which must be this, and goes on with the connection.
fn serve(proxy: TcpListener, parts: Vec<(Vec<u8>, Vec<u8>)>) -> JoinHandle<TcpStream> {
    std::thread::spawn(move || {
        let (mut stream, _) = proxy.accept().unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        for (asked, answer) in parts {
            let mut came = vec![0; asked.len()];
            stream.read_exact(&mut came).unwrap();
            assert_eq!(came.escape_ascii().to_string(), asked.escape_ascii().to_string());
            stream.write_all(&answer).unwrap();
        }
        stream
    })
}

const CONNECT: &[u8] = b"CONNECT good.example:7777 HTTP/1.1\r\nHost: good.example:7777\r\n\r\n";

fn talks(mut guest: TcpStream, mut far: TcpStream) {
    let mut greeting = [0; 5];
    guest.read_exact(&mut greeting).unwrap();
    guest.write_all(b"line\n").unwrap();
    let mut line = [0; 5];
    far.read_exact(&mut line).unwrap();
    assert_eq!((&greeting, &line), (b"hello", b"line\n"));
}

fn through_http() {
    let (world, proxy, good) = begin(Kind::Http);
    // The destination speaks at once.
    let answer = b"HTTP/1.1 200 OK\r\n\r\nhello".to_vec();
    let server = serve(proxy, vec![(CONNECT.to_vec(), answer)]);
    let guest = connect(&world, (good, 7777).into()).unwrap();
    talks(guest, server.join().unwrap());
}

fn through_socks() {
    let (world, proxy, good) = begin(Kind::Socks5);
    let request = [&[5, 1, 0, 3, 12][..], b"good.example", &7777u16.to_be_bytes()].concat();
    let connected = [&[5, 0, 0, 1, 10, 0, 0, 1, 0, 80][..], b"hello"].concat();
    let server = serve(
        proxy,
        vec![
            (vec![5, 2, 0, 2], vec![5, 2]),
            ([&[1, 2][..], b"me", &[2], b"pw"].concat(), vec![1, 0]),
            (request, connected),
        ],
    );
    let guest = connect(&world, (good, 7777).into()).unwrap();
    talks(guest, server.join().unwrap());
}

fn a_refusal() {
    let (world, proxy, good) = begin(Kind::Http);
    let server = serve(proxy, vec![(CONNECT.to_vec(), b"HTTP/1.1 403 No\r\n\r\n".to_vec())]);
    let refused = connect(&world, (good, 7777).into()).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
    drop(server.join().unwrap());
    // An address that no rule allows does not get as far as the proxy.
    let refused = connect(&world, (ip(HOST), 7777).into()).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
    let refusals = world.stat().totals.refusals;
    assert_eq!((refusals.value(Refusal::Upstream), refusals.value(Refusal::Policy)), (1, 1));
}

fn first_bytes_and_datagrams() {
    let (world, proxy, good) = begin(Kind::Http);
    let server = serve(proxy, vec![(CONNECT.to_vec(), b"HTTP/1.1 200 OK\r\n\r\n".to_vec())]);
    let mut guest = connect(&world, (good, 7777).into()).unwrap();
    guest.write_all(b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n").unwrap();
    assert!(rest_of(server.join().unwrap()).1, "reset");
    let datagrams = guest_to(&world, (good, 7777).into());
    datagrams.send(b"x").unwrap();
    datagrams.set_read_timeout(Some(PATIENCE)).unwrap();
    assert!(datagrams.recv(&mut [0]).is_err());
    assert_eq!(world.stat().totals.refusals.value(Refusal::Upstream), 1);
}
