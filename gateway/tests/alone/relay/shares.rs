//! What one direction, one protocol or one silent host takes leaves something for the others.

use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsRawFd;

use fulmar_gateway::config::Limits;
use fulmar_gateway::ports::PortSpec;
use fulmar_gateway::stat::Refusal;
use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, SockaddrStorage, bind, listen, socket,
};

use crate::relay::Test;
use crate::relay::tcp::exchange;
use crate::relay::udp::{bound, guest_to, receive};
use crate::relay::world::{GUEST, HOST, World, ip, listener};

pub const TESTS: &[Test] = &[
    ("silent_hosts_leave_space_for_one_that_answers", silent_hosts_leave_space),
    ("clients_of_a_published_port_leave_flows_for_the_guest", clients_leave_flows_for_the_guest),
    ("the_guest_leaves_flows_for_clients", the_guest_leaves_flows_for_clients),
    ("udp_ports_beyond_the_bound_close_the_oldest", udp_ports_have_a_bound),
];

/// A listener that answers no SYN, since its queue is full, and the client that fills it.
fn silent_listener() -> (TcpListener, TcpStream) {
    let fd = socket(AddressFamily::Inet, SockType::Stream, SockFlag::SOCK_CLOEXEC, None).unwrap();
    let any = SockaddrStorage::from(SocketAddr::new(ip(HOST), 0));
    bind(fd.as_raw_fd(), &any).unwrap();
    listen(&fd, Backlog::new(0).unwrap()).unwrap();
    let listener = TcpListener::from(fd);
    let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (listener, client)
}

fn silent_hosts_leave_space() {
    const CONNECTING: usize = 16;
    let limits = Limits { connecting: CONNECTING, ..Limits::default() };
    let (world, good) = (World::with(65520, |c| c.limits = limits), listener());
    let (silent, _client) = silent_listener();
    let port = silent.local_addr().unwrap().port();
    let begun: Vec<_> = (0..4 * CONNECTING).map(|_| world.begin_connection((HOST, port))).collect();
    world.until("some gave way", |s| {
        s.totals.refusals.value(Refusal::ConnectingLimit) >= 2 * CONNECTING as u64
    });
    for _ in 0..10 {
        let (mut guest, mut host) = world.pair(&good);
        exchange(&mut guest, &mut host);
    }
    let connecting = world.stat().flows.iter().filter(|f| f.state == "connecting").count();
    assert!(connecting <= CONNECTING, "{connecting}");
    drop(begun);
}

fn published(c: &mut fulmar_gateway::Config, spec: &str) {
    c.publish.tcp = spec.parse::<PortSpec>().unwrap().forwards();
    c.limits = Limits { tcp_flows: 16, ..Limits::default() };
}

fn clients_leave_flows_for_the_guest() {
    let world = World::with(65520, |c| published(c, "8094:94"));
    let _server = world.guest.run(|| TcpListener::bind((GUEST, 94))).unwrap();
    let clients: Vec<_> = (0..30).map(|_| TcpStream::connect((HOST, 8094)).unwrap()).collect();
    world.until("clients are refused", |s| s.totals.refusals.value(Refusal::FlowLimit) > 0);
    let good = listener();
    let (mut guest, mut host) = world.pair(&good);
    exchange(&mut guest, &mut host);
    drop(clients);
}

fn the_guest_leaves_flows_for_clients() {
    let world = World::with(65520, |c| published(c, "8095:95"));
    let server = world.guest.run(|| TcpListener::bind((GUEST, 95))).unwrap();
    let good = listener();
    let port = good.local_addr().unwrap().port();
    let begun: Vec<_> = (0..30).map(|_| world.begin_connection((HOST, port))).collect();
    world.until("the guest is refused", |s| s.totals.refusals.value(Refusal::FlowLimit) > 0);
    let mut client = TcpStream::connect((HOST, 8095)).unwrap();
    let (mut accepted, _) = server.accept().unwrap();
    exchange(&mut client, &mut accepted);
    drop(begun);
}

fn udp_ports_have_a_bound() {
    let limits = Limits { udp_sockets: 8, ..Limits::default() };
    let (world, server) = (World::with(65520, |c| c.limits = limits), bound(HOST));
    let at = server.local_addr().unwrap();
    let clients: Vec<UdpSocket> = (0..40).map(|_| guest_to(&world, at)).collect();
    for client in &clients {
        client.send(b"x").unwrap();
        receive(&server).unwrap();
    }
    let stat = world.stat();
    assert!(stat.flows.len() <= 8, "{}", stat.flows.len());
    assert!(stat.totals.refusals.value(Refusal::Displaced) >= 32);
    // One that gave way begins anew.
    clients[0].send(b"again").unwrap();
    let (_, from) = receive(&server).unwrap();
    server.send_to(b"answer", from).unwrap();
    assert_eq!(receive(&clients[0]).unwrap().0, b"answer");
}
