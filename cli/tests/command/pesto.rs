//! `--splice-only`, and `--conf-path` as its clients use it: pesto(1) of passt where `scripts/setup peers` has unpacked it or it is installed,
//! and the bytes that it sends, by which the tests do without it.

use std::fs;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream, UdpSocket};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Output};
use std::thread;
use std::time::{Duration, Instant};

use fulmar_gateway::pesto::{Capabilities, Rule, Specs, Tables, greeting, update};
use fulmar_gateway::policy::Protocol;

use crate::gateway_host::netns_of;
use crate::guest::{Guest, Scratch, detached, is_running, pasta, wait_until};
use crate::support::{PATIENCE, in_sandbox, peer, text};

const ALL: Capabilities = Capabilities { v4: true, v6: true, tcp: true, udp: true, auto: true };

fn rules(protocol: Protocol, spec: &str) -> Vec<Rule> {
    let specs = Specs { capabilities: ALL, ephemeral: 32_768..=60_999 };
    specs.rules(protocol, &spec.parse().unwrap())
}

fn tables(tcp: &str, udp: &str, tcp_ns: &str) -> Tables {
    let host = [rules(Protocol::Tcp, tcp), rules(Protocol::Udp, udp)].concat();
    Tables { host, guest: rules(Protocol::Tcp, tcp_ns) }
}

/// What the gateway sends to a client while these tables are published.
fn greeted(socket: &Path, tables: &Tables) -> UnixStream {
    let mut client = UnixStream::connect(socket).unwrap();
    client.set_read_timeout(Some(PATIENCE)).unwrap();
    let expected = greeting(ALL, tables);
    let mut said = vec![0; expected.len()];
    client.read_exact(&mut said).unwrap();
    assert_eq!(said, expected);
    client
}

/// Sends what pesto sends, which ends then.
fn send(mut client: UnixStream, tables: &Tables) {
    client.write_all(&update(tables)).unwrap();
    client.shutdown(Shutdown::Both).unwrap();
}

/// Starts a gateway of a guest with these published ports only.
fn start(guest: &Guest, socket: &Path, tcp: &str) -> u32 {
    let none = ["-u", "none", "-T", "none", "-U", "none"];
    let socket = socket.to_str().unwrap();
    detached(&[&["--config-net", "-c", socket, "-t", tcp], &none[..], &[&guest.pid()]].concat())
}

/// A UDP server in the guest that sends back what comes.
fn echo_in(guest: &Guest, port: u16) {
    let server = netns_of(guest).run(|| UdpSocket::bind(("0.0.0.0", port))).unwrap();
    thread::spawn(move || {
        let mut word = [0; 16];
        while let Ok((bytes, from)) = server.recv_from(&mut word) {
            let _ = server.send_to(&word[..bytes], from);
        }
    });
}

/// Whether a UDP port of the host leads to a server that answers.
fn is_echoed(port: u16) -> bool {
    let client = UdpSocket::bind("127.0.0.1:0").unwrap();
    client.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
    client.send_to(b"word", ("127.0.0.1", port)).unwrap();
    client.recv(&mut [0; 16]).is_ok()
}

/// A server in the guest, at each address, that greets each client.
fn greet_in(guest: &Guest, port: u16) {
    let server = netns_of(guest).run(|| TcpListener::bind(("::", port))).unwrap();
    thread::spawn(move || {
        for client in server.incoming() {
            let _ = client.and_then(|mut client| client.write_all(b"hello"));
        }
    });
}

fn is_greeted(port: u16) -> bool {
    let mut said = String::new();
    let client = TcpStream::connect(("127.0.0.1", port));
    let read = client.and_then(|mut client| {
        client.set_read_timeout(Some(Duration::from_secs(5)))?;
        client.read_to_string(&mut said)
    });
    read.is_ok() && said == "hello"
}

fn is_closed(port: u16) -> bool {
    TcpStream::connect(("127.0.0.1", port)).is_err()
}

#[test]
fn ports_are_published_and_withdrawn_by_the_messages_of_pesto() {
    in_sandbox(|| {
        let (guest, socket) = (Guest::new(), Scratch::new("conf"));
        start(&guest, &socket.0, "8080:80");
        assert_eq!(fs::metadata(&socket.0).unwrap().permissions().mode() & 0o777, 0o600);
        greet_in(&guest, 80);
        echo_in(&guest, 5353);
        assert!(is_greeted(8080) && is_closed(8081));
        let first = tables("8080:80", "none", "none");
        let more = tables("8080:80,8081:80", "5353", "7000");
        let served = TcpListener::bind("127.0.0.1:7000").unwrap();
        // One that is silent, and one that stops within its message.
        let silent = UnixStream::connect(&socket.0).unwrap();
        let mut half = greeted(&socket.0, &first);
        half.write_all(&update(&more)[..100]).unwrap();
        send(greeted(&socket.0, &first), &more);
        wait_until("the port is published", || is_greeted(8081));
        wait_until("the UDP port is published", || is_echoed(5353));
        wait_until("the guest's port is published", || {
            netns_of(&guest).run(|| TcpStream::connect("127.0.0.1:7000")).is_ok()
        });
        drop((silent, half));
        let client = greeted(&socket.0, &more);
        send(client, &tables("8081:80", "none", "none"));
        wait_until("the first port is withdrawn", || is_closed(8080));
        assert!(is_greeted(8081));
        let withdrawn = Instant::now();
        wait_until("the UDP port is withdrawn", || UdpSocket::bind("0.0.0.0:5353").is_ok());
        assert!(withdrawn.elapsed() < Duration::from_secs(10), "and free, though it had a flow");
        wait_until("the guest's port is withdrawn", || {
            netns_of(&guest).run(|| TcpStream::connect("127.0.0.1:7000")).is_err()
        });
        drop(served);
    });
}

#[test]
fn a_udp_port_with_flows_in_several_queues_is_free_when_it_is_withdrawn() {
    in_sandbox(|| {
        let (guest, socket) = (Guest::new(), Scratch::new("conf-queues"));
        let cpus = thread::available_parallelism().map_or(1, usize::from);
        let queues = if cpus > 1 { "2" } else { "1" };
        let line = ["--config-net", "-t", "none", "-u", "5353", "-T", "none", "-U", "none"];
        let more = ["--queues", queues, "-c", &socket.text(), &guest.pid()];
        detached(&[&line[..], &more].concat());
        echo_in(&guest, 5353);
        assert!((0..20).all(|_| is_echoed(5353)));
        assert!(UdpSocket::bind("0.0.0.0:5353").is_err());
        send(greeted(&socket.0, &tables("none", "5353", "none")), &Tables::default());
        let withdrawn = Instant::now();
        wait_until("the port is free", || UdpSocket::bind("0.0.0.0:5353").is_ok());
        assert!(withdrawn.elapsed() < Duration::from_secs(10));
    });
}

#[test]
fn messages_without_a_meaning_change_nothing() {
    in_sandbox(|| {
        let (guest, socket) = (Guest::new(), Scratch::new("conf-bad"));
        start(&guest, &socket.0, "8080:80");
        greet_in(&guest, 80);
        let first = tables("8080:80", "none", "none");
        let mut flags = update(&tables("9999", "none", "none"));
        flags[5 + 55] = 0xff;
        for bad in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[1, 255, 255, 255, 255], &flags, &[]] {
            let mut client = greeted(&socket.0, &first);
            // The gateway may have closed its end already.
            let _ = client.write_all(bad).and_then(|()| client.shutdown(Shutdown::Write));
            assert_eq!(client.read_to_end(&mut Vec::new()).unwrap_or(0), 0);
        }
        drop(greeted(&socket.0, &first));
        assert!(is_greeted(8080) && is_closed(9999));
        let refused = pasta(&["-c", &socket.text(), "--config-net", &Guest::new().pid()]);
        assert!(text(&refused.stderr).contains("another process serves it"), "{refused:?}");
    });
}

#[test]
fn another_user_is_not_greeted_even_if_the_file_lets_everybody_in() {
    in_sandbox(|| {
        let (guest, socket) = (Guest::new(), Scratch::new("conf-user"));
        start(&guest, &socket.0, "8080:80");
        fs::set_permissions(&socket.0, fs::Permissions::from_mode(0o666)).unwrap();
        let said_to = |user: &str| {
            let script = "import os, socket, sys
if sys.argv[2] != '0': os.setresuid(*[int(sys.argv[2])] * 3)
s = socket.socket(socket.AF_UNIX); s.settimeout(60); s.connect(sys.argv[1])
print(s.recv(5))";
            let output = Command::new("python3")
                .args(["-c", script, &socket.text(), user])
                .output()
                .unwrap();
            output.status.success().then(|| text(&output.stdout))
        };
        assert_eq!(said_to("0").as_deref(), Some("b'basil'\n"));
        match said_to("65534") {
            Some(said) => assert_eq!(said, "b''\n"),
            None => println!("SKIPPED: no other user in this user namespace"),
        }
    });
}

#[test]
fn ports_on_which_the_guest_listens_are_published_when_pesto_asks_for_auto() {
    in_sandbox(|| {
        let (guest, socket) = (Guest::new(), Scratch::new("conf-auto"));
        start(&guest, &socket.0, "none");
        greet_in(&guest, 8090);
        thread::sleep(Duration::from_millis(1500));
        assert!(is_closed(8090));
        let auto = tables("auto", "none", "none");
        send(greeted(&socket.0, &Tables::default()), &auto);
        wait_until("the port is published", || is_greeted(8090));
        send(greeted(&socket.0, &auto), &Tables::default());
        wait_until("the port is withdrawn", || is_closed(8090));
    });
}

/// What pesto itself says and does, if it is there.
fn pesto(arguments: &[&str]) -> Option<Output> {
    let program = peer("pesto")?;
    Some(Command::new(program).args(arguments).output().expect("it starts"))
}

#[test]
fn pesto_itself_shows_adds_and_deletes_ports() {
    in_sandbox(|| {
        let (guest, socket) = (Guest::new(), Scratch::new("conf-pesto"));
        start(&guest, &socket.0, "8080:80");
        greet_in(&guest, 80);
        let path = socket.text();
        let Some(shown) = pesto(&[&path]) else {
            let why = "there is no pesto; `scripts/setup peers` unpacks it";
            return println!("SKIPPED pesto_itself_shows_adds_and_deletes_ports: {why}");
        };
        assert!(shown.status.success(), "{}", text(&shown.stderr));
        let shown = text(&shown.stdout);
        assert!(
            shown.contains("HOST\n    TCP [*]:8080  =>  80") && shown.contains("SPLICE"),
            "{shown}"
        );
        let succeeds = |arguments: &[&str]| {
            let output = pesto(arguments).unwrap();
            assert!(output.status.success(), "{arguments:?}: {}", text(&output.stderr));
        };
        succeeds(&["-A", "--tcp-ports=127.0.0.1/8081:80", &path]);
        wait_until("the port is published", || is_greeted(8081));
        succeeds(&["--delete", "-t", "8080:80", "--add", "-T", "7000", &path]);
        wait_until("the port is withdrawn", || is_closed(8080));
        assert!(is_greeted(8081));
        wait_until("the guest's port is published", || {
            guest.see("cat /proc/net/tcp").contains("0100007F:1B58 ")
        });
        succeeds(&["-C", "HOST", &path]);
        wait_until("all ports of the host are withdrawn", || is_closed(8081));
        // Rules that no gateway can have are not sent at all: the table is understood.
        assert!(!pesto(&["-D", "-t", "9999", &path]).unwrap().status.success());
    });
}

#[test]
fn splice_only_leads_from_loopback_to_loopback_and_makes_no_interface() {
    in_sandbox(|| {
        let (guest, socket) = (Guest::new(), Scratch::new("conf-splice"));
        let ports = ["--splice-only", "-t", "8080:80", "-u", "5353", "-T", "7000", "-U", "none"];
        let path = socket.text();
        let gateway = detached(&[&ports[..], &["-c", &path, &guest.pid()]].concat());
        assert!(is_running(gateway));
        assert_eq!(guest.see("ip -o link").lines().count(), 1, "lo alone");
        assert!(guest.see("ip route; ip -6 route show default").trim().is_empty());
        // A server of the guest's loopback alone.
        let server = netns_of(&guest).run(|| TcpListener::bind("127.0.0.1:80")).unwrap();
        thread::spawn(move || {
            for client in server.incoming() {
                let _ = client.and_then(|mut client| client.write_all(b"hello"));
            }
        });
        echo_in(&guest, 5353);
        assert!(is_greeted(8080) && is_echoed(5353));
        assert!(TcpStream::connect("10.77.0.1:8080").is_err(), "another address of the host");
        let _served = TcpListener::bind("127.0.0.1:7000").unwrap();
        netns_of(&guest).run(|| TcpStream::connect("127.0.0.1:7000")).unwrap();
        let mut now = tables("8080:80", "5353", "7000");
        let mut client = UnixStream::connect(&socket.0).unwrap();
        client.read_exact(&mut vec![0; greeting(ALL, &now).len()]).unwrap();
        now.host =
            [rules(Protocol::Tcp, "8081:80"), rules(Protocol::Tcp, "10.77.0.1/8082:80")].concat();
        send(client, &now);
        wait_until("a port is published, and another one withdrawn", || {
            is_closed(8080) && is_greeted(8081)
        });
        wait_until("the UDP port is withdrawn", || UdpSocket::bind("127.0.0.1:5353").is_ok());
        assert!(TcpStream::connect("10.77.0.1:8082").is_err(), "no loopback address");
        let refused = pasta(&["--splice-only", "-t", "10.77.0.1/9000", &Guest::new().pid()]);
        assert!(text(&refused.stderr).contains("loopback addresses only"), "{refused:?}");
    });
}

#[test]
fn auto_leads_from_loopback_to_loopback_under_splice_only() {
    in_sandbox(|| {
        let guest = Guest::new();
        detached(&["--splice-only", &guest.pid()]);
        greet_in(&guest, 8090);
        let _served = TcpListener::bind("127.0.0.1:7000").unwrap();
        wait_until("the guest's port is published", || is_greeted(8090));
        wait_until("the host's port is published", || {
            netns_of(&guest).run(|| TcpStream::connect("127.0.0.1:7000")).is_ok()
        });
        assert!(TcpStream::connect("10.77.0.1:8090").is_err());
    });
}
