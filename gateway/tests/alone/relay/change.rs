//! A host whose address or route changes while flows run. Its network is a veth pair to a namespace that is outside.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::process::Command;

use fulmar_gateway::netns::{Netns, VethEnd};
use nix::sys::socket::{setsockopt, sockopt};

use crate::relay::Test;
use crate::relay::errnos::take_all_errors;
use crate::relay::tcp::exchange;
use crate::relay::udp::{bound, guest_to, payload, receive};
use crate::relay::world::{HOST, HOST_V6, PATIENCE, World, ip};

pub const TESTS: &[Test] = &[
    ("flows_wait_for_a_route_and_new_ones_hear_of_it", flows_wait_for_a_route),
    ("new_flows_start_at_the_new_address_of_the_host", new_flows_start_at_the_new_address),
    ("each_kind_of_route_is_told_by_its_errno", each_kind_of_route_is_told),
    (
        "a_run_that_the_hosts_path_refuses_leaves_as_its_datagrams",
        a_run_that_the_hosts_path_refuses_leaves_as_its_datagrams,
    ),
    ("what_a_router_says_is_told_and_the_next_datagram_leaves", what_a_router_says_is_told),
];

/// The namespace outside, at 198.51.100.2; the host is 198.51.100.1. Gone with the value.
pub struct Outside(pub Netns);

impl Outside {
    pub fn new() -> Outside {
        let (here, outside) = (Netns::current().unwrap(), Netns::new().unwrap());
        let near = VethEnd { name: "out0", mac: [2, 0, 0, 0, 1, 1], mtu: 1500 };
        let far = VethEnd { name: "far0", mac: [2, 0, 0, 0, 1, 2], mtu: 1500 };
        here.add_veth(&near, &outside, &far).unwrap();
        here.set_address("out0", ip("198.51.100.1"), 24).unwrap();
        outside.set_address("far0", ip("198.51.100.2"), 24).unwrap();
        here.set_up("out0").unwrap();
        outside.set_up("far0").unwrap();
        Outside(outside)
    }

    pub fn listener(&self) -> TcpListener {
        self.0.run(|| TcpListener::bind("198.51.100.2:0")).unwrap()
    }

    fn server(&self) -> UdpSocket {
        let server = self.0.run(|| UdpSocket::bind("198.51.100.2:0")).unwrap();
        server.set_read_timeout(Some(PATIENCE)).unwrap();
        server
    }
}

impl Drop for Outside {
    fn drop(&mut self) {
        let here = Netns::current().unwrap();
        let index = here.if_index("out0").unwrap();
        here.netlink().unwrap().delete(index).unwrap();
    }
}

/// ip(8) in the host's namespace.
pub fn ip_tool(line: &str) {
    let status = Command::new("ip").args(line.split(' ')).status().expect("ip(8)");
    assert!(status.success(), "ip {line}");
}

fn flows_wait_for_a_route() {
    let (outside, world) = (Outside::new(), World::new());
    let listener = outside.listener();
    let (mut guest, mut host) = world.pair(&listener);
    exchange(&mut guest, &mut host);
    ip_tool("link set out0 down");
    guest.write_all(b"ping").unwrap();
    let error = world.connect(listener.local_addr().unwrap()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NetworkUnreachable, "{error}");
    ip_tool("link set out0 up");
    let mut came = [0; 4];
    host.read_exact(&mut came).unwrap();
    assert_eq!(&came, b"ping", "what was accepted arrives");
    exchange(&mut guest, &mut host);
    let (mut late, mut late_host) = world.pair(&listener);
    exchange(&mut late, &mut late_host);
}

fn new_flows_start_at_the_new_address() {
    let (outside, world) = (Outside::new(), World::new());
    let (listener, server) = (outside.listener(), outside.server());
    let (mut guest, mut host) = world.pair(&listener);
    let client = guest_to(&world, server.local_addr().unwrap());
    client.send(b"before").unwrap();
    let (_, from) = receive(&server).unwrap();
    assert_eq!(
        (host.peer_addr().unwrap().ip(), from.ip()),
        (ip("198.51.100.1"), ip("198.51.100.1"))
    );
    ip_tool("addr del 198.51.100.1/24 dev out0");
    ip_tool("addr add 198.51.100.77/24 dev out0");
    let (mut late, mut late_host) = world.pair(&listener);
    assert_eq!(late_host.peer_addr().unwrap().ip(), ip("198.51.100.77"));
    exchange(&mut late, &mut late_host);
    // A flow of datagrams goes on at the new address.
    client.send(b"after").unwrap();
    let (came, from) = receive(&server).unwrap();
    assert_eq!((&came[..], from.ip()), (&b"after"[..], ip("198.51.100.77")));
    server.send_to(b"answer", from).unwrap();
    assert_eq!(receive(&client).unwrap().0, b"answer");
    assert_eq!(world.stat().totals.udp_flows, 1);
    // A connection has the address that it was begun with, and waits for it.
    guest.write_all(b"ping").unwrap();
    ip_tool("addr add 198.51.100.1/24 dev out0");
    let mut came = [0; 4];
    host.read_exact(&mut came).unwrap();
    exchange(&mut guest, &mut host);
}

fn a_run_that_the_hosts_path_refuses_leaves_as_its_datagrams() {
    const EACH: usize = 1400;
    let all = payload(EACH * 20 + 9);
    for at in [HOST, HOST_V6] {
        let (world, server) = (World::new(), bound(at));
        let client = guest_to(&world, server.local_addr().unwrap());
        setsockopt(&client, sockopt::UdpGsoSegment, &(EACH as i32)).unwrap();
        let arrives = |what: &str| {
            client.send(&all).unwrap();
            for (n, wanted) in all.chunks(EACH).enumerate() {
                let (came, _) = receive(&server).unwrap();
                assert!(came == wanted, "{what}: {n} of {} bytes at {at}", came.len());
            }
        };
        arrives("as a run");
        // Datagrams that exceed the MTU leave as fragments, a run of them does not.
        ip_tool("link set lo mtu 1300");
        arrives("one by one");
        arrives("one by one from the start");
        ip_tool("link set lo mtu 65536");
        let stat = world.stat();
        assert_eq!((stat.flows.len(), stat.totals.datagrams_out), (1, 3 * 21));
        assert_eq!(stat.totals.refusals.iter().collect::<Vec<_>>(), []);
    }
}

fn each_kind_of_route_is_told() {
    let (world, to) = (World::new(), "203.0.113.7:80".parse::<SocketAddr>().unwrap());
    for (kind, heard) in [
        ("unreachable", libc::EHOSTUNREACH),
        // The guest's kernel says the same of what is prohibited (icmp_err_convert).
        ("prohibit", libc::EHOSTUNREACH),
        ("blackhole", libc::EHOSTUNREACH),
        ("throw", libc::ENETUNREACH),
    ] {
        ip_tool(&format!("route add {kind} 203.0.113.0/24"));
        let error = world.connect(to).unwrap_err();
        ip_tool(&format!("route del {kind} 203.0.113.0/24"));
        assert_eq!(error.raw_os_error(), Some(heard), "{kind}: {error}");
    }
}

fn what_a_router_says_is_told() {
    let (outside, world) = (Outside::new(), World::new());
    // A router that has no way to one address at first.
    ip_tool("route add 203.0.113.0/24 via 198.51.100.2");
    let in_router = |line: &str| {
        let done = outside.0.run(|| {
            ip_tool(line);
            Ok(())
        });
        done.unwrap();
    };
    outside.0.run(|| std::fs::write("/proc/sys/net/ipv4/ip_forward", "1")).unwrap();
    in_router("route add unreachable 203.0.113.9");
    let client = guest_to(&world, "203.0.113.9:9".parse().unwrap());
    take_all_errors(&client, "203.0.113.9");
    client.send(b"to nobody").unwrap();
    let error = receive(&client).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EHOSTUNREACH), "{error}");
    in_router("route del unreachable 203.0.113.9");
    in_router("addr add 203.0.113.9/32 dev lo");
    let server = outside.0.run(|| UdpSocket::bind("203.0.113.9:9")).unwrap();
    server.set_read_timeout(Some(PATIENCE)).unwrap();
    client.send(b"to somebody").unwrap();
    assert_eq!(receive(&server).unwrap().0, b"to somebody");
}
