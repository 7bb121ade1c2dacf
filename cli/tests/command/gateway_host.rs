//! Guests of hosts as they are, and of hosts that change: routers beyond the prefix and on the link, resolvers that are
//! replaced, a default route that comes later.

use std::fs;
use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, SocketAddrV6, TcpListener, TcpStream, UdpSocket};
use std::path::Path;
use std::process::{Command, Output};
use std::thread;
use std::time::Duration;

use crate::FULMAR;
use crate::guest::{Guest, Scratch, detached, is_running, wait_until};
use crate::support::{in_sandbox, text};
use fulmar_gateway::netns::{Netns, VethEnd};
use nix::sched::{CloneFlags, unshare};

/// No published ports: there are none to tell of.
const QUIET: [&str; 8] = ["-t", "none", "-u", "none", "-T", "none", "-U", "none"];

pub fn shell(script: &str) -> Output {
    let output = Command::new("sh").args(["-ec", script]).output().expect("sh(1)");
    assert!(output.status.success(), "{script}\n{}", text(&output.stderr));
    output
}

pub fn netns_of(guest: &Guest) -> Netns {
    Netns::open(Path::new(&format!("/proc/{}/ns/net", guest.pid()))).unwrap()
}

/// Gives the calling thread an /etc of its own, with a copy of the host's files.
pub fn own_etc() -> Scratch {
    unshare(CloneFlags::CLONE_NEWNS).unwrap();
    let etc = Scratch::new("etc");
    let at = etc.text();
    shell(&format!("mount --make-rprivate / && cp -a /etc {at} && mount --bind {at} /etc"));
    shell("rm -f /etc/resolv.conf");
    etc
}

#[test]
fn a_host_with_one_address_and_a_router_beyond_it_has_guests() {
    in_sandbox(|| {
        shell(
            "ip addr flush dev kernel0 scope global; ip addr add 198.51.100.2/32 dev kernel0
             ip route add default via 198.51.100.1 dev kernel0 onlink
             ip addr add 2001:db8:f::2/128 dev kernel0 nodad
             ip -6 route add default via 2001:db8::1 dev kernel0 onlink",
        );
        let run = Command::new(FULMAR)
            .args(["run", "--", "sh", "-c", "ip route; ip -6 route"])
            .output()
            .unwrap();
        let said = text(&run.stdout);
        assert_eq!((run.status.code(), text(&run.stderr).as_str()), (Some(0), ""), "{said}");
        for router in ["198.51.100.1", "2001:db8::1"] {
            let line = said.lines().find(|l| l.starts_with(&format!("default via {router} ")));
            assert!(line.is_some_and(|line| line.contains("onlink")), "{said}");
        }
    });
}

/// A query for the address of a name, and the answer to it, whose last byte is given.
fn query() -> Vec<u8> {
    let header = [0x12, 0x34, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    [&header[..], b"\x01a\x07example\x00", &[0, 1, 0, 1]].concat()
}

fn answer_to(query: &[u8], last: u8) -> Vec<u8> {
    let record = [0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 60, 0, 4, 192, 0, 2, last];
    let mut answer = [query, &record].concat();
    (answer[2], answer[3], answer[7]) = (0x81, 0x80, 1);
    answer
}

/// A DNS server whose answers end with this byte, for as long as the sandbox is there.
pub fn serve_dns(at: &str, last: u8) {
    let socket = UdpSocket::bind(at).unwrap();
    thread::spawn(move || {
        let mut buf = [0; 512];
        while let Ok((n, from)) = socket.recv_from(&mut buf) {
            let _ = socket.send_to(&answer_to(&buf[..n], last), from);
        }
    });
}

/// The last byte of the answer to a query, if one comes.
pub fn ask(client: &UdpSocket, server: &str) -> Option<u8> {
    let mut answer = [0; 512];
    client.send_to(&query(), server).ok()?;
    let n = client.recv(&mut answer).ok()?;
    answer[..n].last().copied()
}

#[test]
fn a_guest_follows_the_resolvers_of_its_host_however_their_file_is_replaced() {
    in_sandbox(|| {
        let _etc = own_etc();
        serve_dns("127.0.0.2:53", 2);
        serve_dns("127.0.0.3:53", 3);
        serve_dns("[::1]:53", 6);
        fs::write("/etc/resolv.conf", "options retrans:3\nnameserver 127.0.0.2 x\n").unwrap();
        let guest = Guest::new();
        let line = ["--config-net", "-a", "10.9.0.2", "-n", "24", "-g", "10.9.0.1"];
        let line = [&line[..], &QUIET, &["--dns-forward", "169.254.1.1"]].concat();
        let gateway = detached(&[&line[..], &[&guest.pid()]].concat());
        let client = netns_of(&guest).run(|| UdpSocket::bind("10.9.0.2:0")).unwrap();
        client.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
        let answers = |last| ask(&client, "169.254.1.1:53") == Some(last);
        wait_until("the first server answers", || answers(2));
        let server = |path: &str, server: &str| {
            fs::write(path, format!("nameserver {server}\n")).unwrap();
        };
        server("/etc/resolv.conf", "127.0.0.3");
        wait_until("written in place", || answers(3));
        server("/etc/new", "127.0.0.2");
        fs::rename("/etc/new", "/etc/resolv.conf").unwrap();
        wait_until("renamed over", || answers(2));
        server("/etc/stub", "::1");
        std::os::unix::fs::symlink("stub", "/etc/new").unwrap();
        fs::rename("/etc/new", "/etc/resolv.conf").unwrap();
        wait_until("a symbolic link, and a server of IPv6", || answers(6));
        fs::remove_file("/etc/resolv.conf").unwrap();
        server("/etc/resolv.conf", "127.0.0.3");
        wait_until("removed and made again", || answers(3));
        assert!(is_running(gateway));
        drop(guest);
        wait_until("the gateway ends with its guest", || !is_running(gateway));
        shell("umount /etc && rm -rf /tmp/fulmar-gateway-*-etc");
    });
}

/// The process that follows the host's network for a gateway.
fn follower_of(gateway: u32) -> Option<u32> {
    let children = format!("/proc/{gateway}/task/{gateway}/children");
    fs::read_to_string(children).ok()?.split_whitespace().next()?.parse().ok()
}

#[test]
fn the_process_that_follows_has_no_rights_and_its_end_is_not_the_gateways() {
    in_sandbox(|| {
        let log = Scratch::new("log");
        let start = |guest: &Guest| {
            let line = ["--config-net", "-a", "10.9.0.2", "-n", "24", "-g", "10.9.0.1", "-l"];
            detached(&[&line[..], &[&log.text()], &QUIET, &[&guest.pid()]].concat())
        };
        let guest = Guest::new();
        let gateway = start(&guest);
        let follower = follower_of(gateway).expect("it has one");
        let status = || fs::read_to_string(format!("/proc/{follower}/status")).unwrap_or_default();
        for line in ["CapEff:\t0000000000000000", "CapPrm:\t0000000000000000", "NoNewPrivs:\t1"] {
            wait_until(line, || status().contains(line));
        }
        shell(&format!("kill -9 {follower}"));
        let said = || fs::read_to_string(&log.0).unwrap_or_default();
        wait_until("it is reported", || {
            said().contains("no longer following changes of the host's network")
        });
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        assert!(reaches(&guest, &format!("10.9.0.1:{port}")), "the gateway goes on");
        let other = Guest::new();
        let killed = start(&other);
        let follower = follower_of(killed).expect("it has one");
        shell(&format!("kill -9 {killed}"));
        wait_until("it ends with its gateway", || !is_running(follower));
    });
}

#[test]
fn a_program_of_run_keeps_its_resolvers_when_the_hosts_file_is_replaced() {
    in_sandbox(|| {
        let _etc = own_etc();
        fs::write("/etc/resolv.conf", "nameserver 127.0.0.2\nsearch a.example\n").unwrap();
        let folder = Scratch::new("seen");
        fs::create_dir(&folder.0).unwrap();
        // What the program sees is written where the test sees it, whole.
        let script = format!(
            "while :; do cat /etc/resolv.conf >{0}/new 2>/dev/null; mv {0}/new {0}/seen; sleep 0.02; done",
            folder.text()
        );
        let mut command = Command::new(FULMAR);
        // Gone with the value, as a guest is.
        let run = Guest(command.args(["run", "--", "sh", "-c", &script]).spawn().unwrap());
        let sees = |search: &str| {
            let text = format!("nameserver 169.254.1.1\nsearch {search}\n");
            fs::read_to_string(folder.0.join("seen")).is_ok_and(|seen| seen == text)
        };
        wait_until("its own file", || sees("a.example"));
        let host = |path: &str, search: &str| {
            fs::write(path, format!("nameserver 127.0.0.3\nsearch {search}\n")).unwrap();
        };
        for search in ["b.example", "c.example"] {
            host("/etc/new", search);
            fs::rename("/etc/new", "/etc/resolv.conf").unwrap();
            wait_until("renamed over", || sees(search));
        }
        host("/etc/resolv.conf", "d.example");
        wait_until("written in place", || sees("d.example"));
        fs::create_dir("/etc/run").unwrap();
        host("/etc/run/stub", "e.example");
        std::os::unix::fs::symlink("run/stub", "/etc/new").unwrap();
        fs::rename("/etc/new", "/etc/resolv.conf").unwrap();
        wait_until("a symbolic link", || sees("e.example"));
        host("/etc/run/new", "f.example");
        fs::rename("/etc/run/new", "/etc/run/stub").unwrap();
        wait_until("behind the link", || sees("f.example"));
        fs::remove_file("/etc/resolv.conf").unwrap();
        host("/etc/resolv.conf", "g.example");
        wait_until("removed and made again", || sees("g.example"));
        drop(run);
        shell(&format!("umount /etc; rm -rf /tmp/fulmar-gateway-*-etc {}", folder.text()));
    });
}

/// Whether a connection from a guest to an address is accepted.
fn reaches(guest: &Guest, to: &str) -> bool {
    let to: SocketAddr = to.parse().unwrap();
    let connect = || TcpStream::connect_timeout(&to, Duration::from_secs(5));
    netns_of(guest).run(connect).is_ok()
}

#[test]
fn a_later_default_route_of_the_host_connects_the_guest() {
    in_sandbox(|| {
        shell("ip -6 addr flush dev kernel0 scope global");
        let (host, far) = (Netns::current().unwrap(), Netns::new().unwrap());
        let up = VethEnd { name: "up0", mac: [2, 0, 0, 0, 9, 1], mtu: 1500 };
        let beyond = VethEnd { name: "far0", mac: [2, 0, 0, 0, 9, 2], mtu: 1500 };
        host.add_veth(&up, &far, &beyond).unwrap();
        let address = |netns: &Netns, name: &str, address: &str, length: u8| {
            netns.set_address(name, address.parse::<IpAddr>().unwrap(), length).unwrap();
        };
        address(&far, "lo", "198.51.100.9", 32);
        address(&far, "lo", "2001:db8:9::9", 128);
        let listen = |at: &str| far.run(|| TcpListener::bind(at)).unwrap();
        let _listeners = [listen("198.51.100.9:80"), listen("[2001:db8:9::9]:80")];
        let guest = Guest::new();
        detached(&[&["--config-net"], &QUIET[..], &[&guest.pid()]].concat());
        assert!(!reaches(&guest, "198.51.100.9:80"));
        address(&far, "far0", "192.0.2.2", 24);
        address(&host, "up0", "192.0.2.1", 24);
        shell("ip route add default via 192.0.2.2");
        assert!(reaches(&guest, "198.51.100.9:80"), "the host's sockets follow its routes");
        assert!(!reaches(&guest, "[2001:db8:9::9]:80"));
        address(&far, "far0", "2001:db8::2", 64);
        address(&host, "up0", "2001:db8::1", 64);
        shell("ip -6 route add default via 2001:db8::2");
        wait_until("the guest has IPv6", || reaches(&guest, "[2001:db8:9::9]:80"));
        let routes = guest.see("ip -6 route");
        assert!(routes.contains("default via fe80::"), "{routes}");
        // Its kernel drops the route to a router that answers its probe as a host.
        let router = *router_of(&guest).unwrap().ip();
        guest.see(&format!("ip -6 neigh change {router} dev kernel0 router nud probe"));
        let state = || guest.see(&format!("ip -6 neigh show {router} dev kernel0"));
        wait_until("the router has answered", || state().contains("REACHABLE"));
        assert!(router_of(&guest).is_some(), "{}", state());
    });
}

/// The router of a guest's IPv6 default route, with the zone that it has there.
fn router_of(guest: &Guest) -> Option<SocketAddrV6> {
    let routes = guest.see("ip -6 route show default");
    let words: Vec<&str> = routes.split_whitespace().collect();
    let after = |word: &str| words.iter().skip_while(|w| **w != word).nth(1).copied();
    let (router, interface) = (after("via")?, after("dev")?);
    let index = netns_of(guest).if_index(interface).ok()?;
    let router: std::net::Ipv6Addr = router.parse().ok()?;
    let zone = if router.is_unicast_link_local() { index } else { 0 };
    Some(SocketAddrV6::new(router, 0, 0, zone))
}

/// Reaches the host's loopback by the router's address, over TCP and UDP.
fn assert_leads_to_host(guest: &Guest, router: SocketAddrV6) {
    let at = |port: u16| SocketAddrV6::new(*router.ip(), port, 0, router.scope_id());
    let listener = TcpListener::bind("[::1]:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let mut client = netns_of(guest).run(|| TcpStream::connect(at(port))).unwrap();
    let (mut host, _) = listener.accept().unwrap();
    host.write_all(b"hello").unwrap();
    let mut said = [0; 5];
    client.read_exact(&mut said).unwrap();
    assert_eq!(&said, b"hello", "{router}");
    let server = UdpSocket::bind("[::1]:0").unwrap();
    let port = server.local_addr().unwrap().port();
    let client = netns_of(guest).run(|| UdpSocket::bind("[::]:0")).unwrap();
    client.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    client.send_to(b"question", SocketAddr::from(at(port))).unwrap();
    let (n, from) = server.recv_from(&mut [0; 16]).unwrap();
    server.send_to(b"answer", from).unwrap();
    let (m, from) = client.recv_from(&mut said).unwrap();
    assert_eq!((n, m.min(5), from.ip()), (8, 5, IpAddr::V6(*router.ip())));
}

#[test]
fn the_routers_address_leads_to_the_host_however_the_guest_is_configured() {
    in_sandbox(|| {
        for (route, is_of_link) in [("fe80::99", true), ("fd77::99", false)] {
            shell(&format!("ip -6 route replace default via {route} dev kernel0"));
            for configures in [true, false] {
                let guest = Guest::new();
                let line = if configures { &["--config-net"][..] } else { &[] };
                detached(&[line, &QUIET, &[&guest.pid()]].concat());
                // By its kernel: a router solicitation, an advertisement, an address of the prefix.
                guest.see("ip link set kernel0 up");
                let has_address = || guest.see("ip -6 addr").contains("inet6 fd77:");
                let is_ready = || !guest.see("ip -6 addr show tentative").contains("inet6");
                wait_until("the guest has a router", || {
                    router_of(&guest).is_some() && has_address() && is_ready()
                });
                let router = router_of(&guest).unwrap();
                let is_hosts = router.ip().to_string() == route;
                assert_eq!(is_hosts, is_of_link || configures, "{router} of {route}");
                assert_leads_to_host(&guest, router);
            }
        }
    });
}
