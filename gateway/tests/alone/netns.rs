//! What a namespace is given is what the kernel says it has. Runs in namespaces of its own, so it has no
//! harness: a user namespace needs a process of one thread.

use std::io::{self, Read, Write};
use std::net::{IpAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsFd;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use fulmar_gateway::netns::{Netns, NextHop, OpenPorts, Route, VethEnd, abort_connections};

const NEAR: VethEnd<'_> = VethEnd { name: "near", mac: [2, 0, 0, 0, 0, 1], mtu: 9000 };
const FAR: VethEnd<'_> = VethEnd { name: "far", mac: [2, 0, 0, 0, 0, 2], mtu: 9000 };

pub fn main() {
    if let Err(e) = fulmar_gateway::netns::enter() {
        assert!(
            std::env::var_os("FULMAR_REQUIRE_KERNEL_TESTS").is_none(),
            "must not be skipped: {e}"
        );
        let _ = writeln!(io::stderr(), "SKIPPED netns: {e}");
        return;
    }
    let (here, there) = (Netns::current().unwrap(), Netns::new().unwrap());
    here.add_veth(&NEAR, &there, &FAR).unwrap();
    a_veth_pair_has_its_names_addresses_and_mtu(&here, &there);
    a_silent_end_has_no_address_while_the_other_one_makes_its_own();
    an_address_is_listed_and_carries_datagrams(&here, &there);
    a_route_is_listed_as_it_was_added(&here);
    what_the_kernel_refuses_is_told_with_its_errno(&here);
    a_namespace_is_opened_by_its_path_and_nothing_else_is(&there);
    a_port_is_open_in_its_own_namespace_until_its_socket_is_closed(&there);
    connections_with_others_are_aborted_and_those_within_stay(&here, &there);
    a_deleted_interface_is_gone_at_both_ends(&here, &there);
    println!("test result: ok. 9 passed; 0 failed");
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn a_veth_pair_has_its_names_addresses_and_mtu(here: &Netns, there: &Netns) {
    for (netns, end) in [(here, &NEAR), (there, &FAR)] {
        let interfaces = netns.netlink().unwrap().interfaces().unwrap();
        let lo = interfaces.iter().find(|i| i.is_loopback).unwrap();
        assert!(lo.name == "lo" && lo.is_up);
        let veth = interfaces.iter().find(|i| i.name == end.name).unwrap();
        assert_eq!((veth.mac, veth.mtu, veth.is_up), (Some(end.mac), end.mtu, false));
        assert_eq!(netns.if_index(end.name).unwrap(), veth.index);
    }
}

fn a_port_is_open_in_its_own_namespace_until_its_socket_is_closed(there: &Netns) {
    let open = || Ok((OpenPorts::tcp()?, OpenPorts::udp()?));
    let ((mut tcp, mut udp), (mut far_tcp, _)) = (open().unwrap(), there.run(open).unwrap());
    assert!(tcp.list().unwrap().is_empty() && udp.list().unwrap().is_empty());
    let listeners = ["127.0.0.1:0", "[::1]:0"].map(|a| TcpListener::bind(a).unwrap());
    let ports = listeners.each_ref().map(|l| l.local_addr().unwrap().port());
    // A connected socket is not open to others.
    let client = TcpStream::connect(listeners[0].local_addr().unwrap()).unwrap();
    let bound = UdpSocket::bind("0.0.0.0:0").unwrap();
    let connected = UdpSocket::bind("127.0.0.1:0").unwrap();
    connected.connect("127.0.0.1:9").unwrap();
    assert_eq!(tcp.list().unwrap(), ports.into());
    assert_eq!(udp.list().unwrap(), [bound.local_addr().unwrap().port()].into());
    assert!(far_tcp.list().unwrap().is_empty());
    drop((listeners, client, bound));
    assert!(tcp.list().unwrap().is_empty() && udp.list().unwrap().is_empty());
}

fn connections_with_others_are_aborted_and_those_within_stay(here: &Netns, there: &Netns) {
    for (far, own) in [("10.9.0.2:0", "127.0.0.1:0"), ("[fd09::2]:0", "[fd09::1]:0")] {
        let outside = there.run(|| TcpListener::bind(far)).unwrap();
        let within = TcpListener::bind(own).unwrap();
        let ends = |listener: &TcpListener| {
            let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            (near, listener.accept().unwrap().0)
        };
        let ((mut near, _far), (mut inside, mut kept)) = (ends(&outside), ends(&within));
        let waiting = std::thread::spawn(move || near.read(&mut [0]).unwrap_err());
        assert_eq!(here.run(abort_connections).unwrap(), 1, "{far}");
        let error = waiting.join().unwrap();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionAborted, "{far}: {error}");
        inside.write_all(b"x").unwrap();
        kept.read_exact(&mut [0]).unwrap();
        assert_eq!(here.run(abort_connections).unwrap(), 0, "{far}");
    }
}

fn a_silent_end_has_no_address_while_the_other_one_makes_its_own() {
    let (usual, silent) = (Netns::new().unwrap(), Netns::new().unwrap());
    silent.netlink().unwrap().add_veth_at(&FAR, &NEAR, usual.as_fd(), 1000).unwrap();
    assert_eq!(silent.if_index("far").unwrap(), 1000);
    silent.set_up_silent("far").unwrap();
    usual.set_up("near").unwrap();
    let near = usual.if_index("near").unwrap();
    let (begin, mut netlink) = (Instant::now(), usual.netlink().unwrap());
    while netlink.addresses().unwrap().iter().all(|a| a.index != near) {
        if usual.run(|| UdpSocket::bind("[::1]:0")).is_err() {
            return;
        }
        assert!(begin.elapsed() < Duration::from_secs(60), "it has a link-local address");
        thread::sleep(Duration::from_millis(1));
    }
    let mut netlink = silent.netlink().unwrap();
    let far = netlink.interfaces().unwrap().into_iter().find(|i| i.index == 1000).unwrap();
    let addresses = netlink.addresses().unwrap();
    assert!(far.is_up && addresses.iter().all(|a| a.index != 1000), "{far:?} {addresses:?}");
}

fn an_address_is_listed_and_carries_datagrams(here: &Netns, there: &Netns) {
    for (netns, name, v4, v6) in
        [(here, "near", "10.9.0.1", "fd09::1"), (there, "far", "10.9.0.2", "fd09::2")]
    {
        netns.set_address(name, ip(v4), 24).unwrap();
        netns.set_address(name, ip(v6), 64).unwrap();
        let index = netns.if_index(name).unwrap();
        let listed = netns.netlink().unwrap().addresses().unwrap();
        let global: Vec<_> = listed.iter().filter(|a| a.index == index && a.is_global).collect();
        assert_eq!(global.len(), 2, "{listed:?}");
        assert!(global.iter().any(|a| a.address == ip(v4) && a.prefix_len == 24));
        assert!(global.iter().any(|a| a.address == ip(v6) && a.prefix_len == 64));
    }
    let receiver = there.run(|| UdpSocket::bind("10.9.0.2:0")).unwrap();
    let sender = UdpSocket::bind("10.9.0.1:0").unwrap();
    sender.send_to(b"hello", receiver.local_addr().unwrap()).unwrap();
    let mut buf = [0; 16];
    assert_eq!(receiver.recv(&mut buf).unwrap(), 5);
}

fn a_route_is_listed_as_it_was_added(here: &Netns) {
    let index = here.if_index("near").unwrap();
    let mut netlink = here.netlink().unwrap();
    let through =
        |gateway: &str| NextHop { index, gateway: Some(ip(gateway)), is_onlink: false, weight: 0 };
    let onlink = |gateway: &str| NextHop { is_onlink: true, ..through(gateway) };
    let to = |destination: &str, prefix_len, hops: &[NextHop]| {
        let route = Route {
            scope: 0,
            hops: hops.to_vec(),
            ..Route::on_link(index, ip(destination), prefix_len)
        };
        // The kernel gives IPv6 routes this metric where they have none.
        if route.destination.is_ipv6() { Route { metric: 1024, ..route } } else { route }
    };
    let beyond = Route {
        source: Some(ip("10.9.0.1")),
        metric: 7,
        ..to("192.0.2.0", 24, &[through("10.9.0.2")])
    };
    let shared = [NextHop { weight: 2, ..through("10.9.0.2") }, through("10.9.0.3")];
    let added = [
        Route::default_through(index, ip("10.9.0.2")),
        Route { metric: 1024, ..Route::default_through(index, ip("fd09::2")) },
        beyond,
        to("198.51.100.0", 24, &[onlink("203.0.113.9")]),
        to("2001:db8:1::", 48, &[onlink("2001:db8::99")]),
        to("203.0.113.0", 25, &shared),
        to("203.0.113.128", 25, &[onlink("198.18.0.1"), onlink("198.18.0.2")]),
        to("2001:db8:2::", 48, &[through("fd09::2"), through("fd09::3")]),
        to("198.18.0.0", 16, &[through("fe80::99")]),
        Route { scope: 200, ..Route::on_link(index, ip("198.19.0.0"), 16) },
        Route { tos: 16, ..Route::on_link(index, ip("198.19.0.0"), 16) },
    ];
    for route in &added {
        netlink.add_route(route).unwrap_or_else(|e| panic!("{route:?}: {e}"));
    }
    let listed = netlink.routes().unwrap();
    for route in &added {
        assert!(listed.contains(route), "{route:?}\n{listed:?}");
    }
    let on_link = listed.iter().find(|r| r.destination == ip("10.9.0.0")).unwrap();
    assert_eq!((on_link.prefix_len, on_link.gateway()), (24, None));
}

fn what_the_kernel_refuses_is_told_with_its_errno(here: &Netns) {
    let mut netlink = here.netlink().unwrap();
    assert_eq!(netlink.set_up(9999).unwrap_err().raw_os_error(), Some(19), "ENODEV");
    let again = Route::default_through(here.if_index("near").unwrap(), ip("10.9.0.2"));
    assert_eq!(netlink.add_route(&again).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
    assert!(netlink.interfaces().is_ok(), "the socket works after an error");
}

fn a_namespace_is_opened_by_its_path_and_nothing_else_is(there: &Netns) {
    let path = format!("/proc/self/fd/{}", there.raw_fd());
    let again = Netns::open(Path::new(&path)).unwrap();
    assert_eq!(again.if_index("far").unwrap(), there.if_index("far").unwrap());
    for wrong in ["/proc/self/ns/user", "/dev/null"] {
        let error = Netns::open(Path::new(wrong)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{wrong}");
    }
    assert_eq!(Netns::open(Path::new("/nowhere")).unwrap_err().kind(), io::ErrorKind::NotFound);
    fulmar_gateway::netns::enter_user_namespace(Path::new("/proc/self/ns/user")).unwrap();
}

fn a_deleted_interface_is_gone_at_both_ends(here: &Netns, there: &Netns) {
    here.netlink().unwrap().delete(here.if_index("near").unwrap()).unwrap();
    assert!(here.if_index("near").is_err() && there.if_index("far").is_err());
}
