//! `fulmar --slirp4netns` as its callers use it: what a namespace gets, the descriptors, the API socket. What it answers
//! is held against slirp4netns itself where `scripts/setup peers` has unpacked it.

use std::fs;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream, UdpSocket};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};

use crate::FULMAR;
use crate::gateway_host::{ask, netns_of, own_etc, serve_dns, shell};
use crate::guest::{Guest, Scratch, is_running, wait_until};
use crate::support::{PATIENCE, in_sandbox, peer, text};

/// How fulmar is started as slirp4netns.
const OURS: [&str; 2] = [FULMAR, "--slirp4netns"];

/// A running slirp4netns, whose exit descriptor is the writing end of a pipe of the test.
struct Slirp(Child);

impl Slirp {
    /// Starts it for a guest, and waits until it says that the network is up.
    fn start(program: &[&str], options: &[&str], guest: &Guest) -> Slirp {
        // Its descriptors 7 and 8 are the pipes.
        let script = r#"exec 7>&1 8<&0 >/dev/null </dev/null; exec "$@""#;
        let mut child = Command::new("sh")
            .args(["-c", script, "sh"])
            .args(program)
            .args(["--ready-fd=7", "-e", "8"])
            .args(options)
            .args([&guest.pid(), "tap0"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut ready = String::new();
        child.stdout.take().unwrap().read_to_string(&mut ready).unwrap();
        if ready != "1" {
            let output = child.wait_with_output().unwrap();
            panic!("{options:?}: {ready:?} {}", text(&output.stderr));
        }
        Slirp(child)
    }

    fn ours(options: &[&str], guest: &Guest) -> Slirp {
        Slirp::start(&OURS, options, guest)
    }

    fn has_ended(&mut self) -> bool {
        self.0.try_wait().unwrap().is_some()
    }

    fn pid(&self) -> String {
        self.0.id().to_string()
    }

    /// Closes the exit descriptor; returns what it said.
    fn end(mut self) -> Output {
        drop(self.0.stdin.take());
        let mut err = Vec::new();
        let _ = self.0.stderr.take().unwrap().read_to_end(&mut err);
        let status = self.0.wait().unwrap();
        Output { status, stdout: Vec::new(), stderr: err }
    }
}

impl Drop for Slirp {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The answer of the API to a request.
fn call(api: &Path, request: &str) -> Value {
    let mut client = UnixStream::connect(api).unwrap();
    client.set_read_timeout(Some(PATIENCE)).unwrap();
    client.write_all(request.as_bytes()).unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    let mut answer = String::new();
    client.read_to_string(&mut answer).unwrap();
    serde_json::from_str(&answer).unwrap_or_else(|e| panic!("{request}: {answer:?}: {e}"))
}

fn add(proto: &str, host_addr: &str, host_port: u16, guest_port: u16) -> String {
    let arguments = json!({
        "proto": proto, "host_addr": host_addr, "host_port": host_port, "guest_port": guest_port,
    });
    json!({ "execute": "add_hostfwd", "arguments": arguments }).to_string()
}

/// A server of the host's loopback that greets each client.
fn greet_on_loopback() -> u16 {
    let server = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = server.local_addr().unwrap().port();
    thread::spawn(move || {
        for client in server.incoming() {
            let _ = client.and_then(|mut client| client.write_all(b"hello"));
        }
    });
    port
}

/// What a client in the guest reads from a server, or why it does not.
fn greeting(guest: &Guest, at: (&str, u16)) -> Result<String, std::io::Error> {
    netns_of(guest).run(|| {
        let mut client = TcpStream::connect(at)?;
        client.set_read_timeout(Some(PATIENCE))?;
        let mut said = String::new();
        client.read_to_string(&mut said)?;
        Ok(said)
    })
}

#[test]
fn a_namespace_is_set_up_by_the_options() {
    in_sandbox(|| {
        let guest = Guest::new();
        let mac = "02:00:00:00:00:07";
        let options = ["--configure", "--mtu=1400", "--enable-ipv6", "--macaddress", mac];
        let more = ["--cidr=10.11.12.0/25", "--enable-sandbox", "--enable-seccomp"];
        let slirp = Slirp::ours(&[&options[..], &more].concat(), &guest);
        let link = guest.see("ip link show tap0");
        assert!(link.contains("mtu 1400") && link.contains(mac), "{link}");
        let addresses = guest.see("ip -o addr show tap0");
        assert!(addresses.contains("10.11.12.100/25"), "{addresses}");
        assert!(addresses.contains("fd00::64/64"), "{addresses}");
        let routes = guest.see("ip route; ip -6 route");
        assert!(routes.contains("default via 10.11.12.2 dev tap0"), "{routes}");
        assert!(routes.contains("default via fe80::2 dev tap0"), "{routes}");
        let ended = slirp.end();
        assert_eq!((ended.status.code(), text(&ended.stderr).as_str()), (Some(0), ""));
        wait_until("the interface is gone", || guest.see("ip -o link").lines().count() == 1);
    });
}

#[test]
fn the_loopback_of_the_host_is_at_the_address_2_unless_that_is_disabled() {
    in_sandbox(|| {
        let port = greet_on_loopback();
        let guest = Guest::new();
        let open = Slirp::ours(&["-c", "-6"], &guest);
        assert_eq!(greeting(&guest, ("10.0.2.2", port)).unwrap(), "hello");
        // No server has it at ::1.
        assert!(greeting(&guest, ("fd00::2", port)).is_err());
        drop(open);
        let guest = Guest::new();
        let closed = Slirp::ours(&["-c", "-6", "--disable-host-loopback"], &guest);
        for at in ["10.0.2.2", "10.0.2.3", "10.0.2.50", "fd00::2", "fd00::3"] {
            assert!(greeting(&guest, (at, port)).is_err(), "{at}");
        }
        assert_eq!(closed.end().status.code(), Some(0));
    });
}

#[test]
fn names_are_resolved_at_the_address_3_unless_that_is_disabled() {
    in_sandbox(|| {
        let _etc = own_etc();
        serve_dns("127.0.0.2:53", 2);
        fs::write("/etc/resolv.conf", "nameserver 127.0.0.2\n").unwrap();
        let asked = |options: &[&str]| {
            let guest = Guest::new();
            let _slirp = Slirp::ours(options, &guest);
            let client = netns_of(&guest).run(|| UdpSocket::bind("10.0.2.100:0")).unwrap();
            client.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
            ask(&client, "10.0.2.3:53")
        };
        assert_eq!(asked(&["-c", "--disable-host-loopback"]), Some(2));
        assert_eq!(asked(&["-c", "--disable-dns"]), None);
    });
}

#[test]
fn ports_of_the_host_are_published_and_withdrawn_by_the_api() {
    in_sandbox(|| {
        let (guest, api) = (Guest::new(), Scratch::new("api"));
        // What another gateway has left.
        drop(UnixListener::bind(&api.0).unwrap());
        let options = ["-c", "-6", "--disable-host-loopback", "-a", &api.text()];
        let slirp = Slirp::ours(&options, &guest);
        assert_eq!(fs::metadata(&api.0).unwrap().permissions().mode() & 0o777, 0o600);
        let netns = netns_of(&guest);
        let server = netns.run(|| TcpListener::bind("10.0.2.100:80")).unwrap();
        let server_v6 = netns.run(|| TcpListener::bind("[fd00::64]:80")).unwrap();
        let datagrams = netns.run(|| UdpSocket::bind("10.0.2.100:80")).unwrap();

        assert_eq!(call(&api.0, &add("tcp", "127.0.0.1", 8080, 80)), json!({"return": {"id": 1}}));
        assert_eq!(call(&api.0, &add("udp", "", 8080, 80)), json!({"return": {"id": 2}}));
        assert_eq!(call(&api.0, &add("tcp6", "::1", 8080, 80)), json!({"return": {"id": 3}}));
        let taken = call(&api.0, &add("tcp", "127.0.0.1", 8080, 80));
        assert!(taken["error"]["desc"].as_str().unwrap().contains("slirp_add_hostfwd failed"));

        let mut client = TcpStream::connect("127.0.0.1:8080").unwrap();
        let (mut served, from) = server.accept().unwrap();
        assert_eq!(from.ip().to_string(), "10.0.2.2");
        served.write_all(b"served").unwrap();
        let mut read = [0; 6];
        client.read_exact(&mut read).unwrap();
        assert_eq!(&read, b"served");
        let _client_v6 = TcpStream::connect("[::1]:8080").unwrap();
        server_v6.accept().unwrap();
        let host = UdpSocket::bind("127.0.0.1:0").unwrap();
        host.send_to(b"datagram", "127.0.0.1:8080").unwrap();
        assert_eq!(datagrams.recv(&mut [0; 100]).unwrap(), 8);

        let listed = call(&api.0, r#"{"execute": "list_hostfwd"}"#);
        let ids = |list: &Value| -> Vec<u64> {
            list.as_array().unwrap().iter().map(|entry| entry["id"].as_u64().unwrap()).collect()
        };
        assert_eq!(ids(&listed["return"]["entries"]), [1, 2, 3]);
        assert_eq!(listed["entries"][0]["guest_addr"], "10.0.2.100");
        let remove = r#"{"execute": "remove_hostfwd", "arguments": {"id": 1}}"#;
        assert_eq!(call(&api.0, remove), json!({"return": {}}));
        assert!(TcpStream::connect("127.0.0.1:8080").is_err(), "it is withdrawn");
        served.write_all(b"longer").unwrap();
        client.read_exact(&mut read).unwrap();
        assert_eq!(&read, b"longer", "an open connection stays");
        assert!(call(&api.0, remove)["error"]["desc"].as_str().unwrap().contains("arguments.id"));
        drop(slirp);
    });
}

#[test]
fn a_silent_client_of_the_api_stops_neither_the_relay_nor_other_clients() {
    in_sandbox(|| {
        let (guest, api, port) = (Guest::new(), Scratch::new("api"), greet_on_loopback());
        let _slirp = Slirp::ours(&["-c", "-a", &api.text()], &guest);
        let mut silent = UnixStream::connect(&api.0).unwrap();
        assert_eq!(greeting(&guest, ("10.0.2.2", port)).unwrap(), "hello");
        assert_eq!(call(&api.0, &add("tcp", "", 8080, 80)), json!({"return": {"id": 1}}));
        let mut said = String::new();
        silent.read_to_string(&mut said).unwrap();
        assert!(said.contains("not complete"), "{said}");
    });
}

#[test]
fn it_ends_with_its_exit_descriptor_or_by_a_signal_and_not_with_its_guest() {
    in_sandbox(|| {
        let mut guest = Guest::new();
        let mut slirp = Slirp::ours(&["-c"], &guest);
        slirp.0.stdin.as_mut().unwrap().write_all(b"ignored").unwrap();
        // Its netns lives on by another process.
        let netns = netns_of(&guest);
        guest.end();
        let port = greet_on_loopback();
        netns.run(|| TcpStream::connect(("10.0.2.2", port))).unwrap();
        assert!(!slirp.has_ended());
        assert_eq!(slirp.end().status.code(), Some(0));

        let guest = Guest::new();
        let mut slirp = Slirp::ours(&["-c"], &guest);
        shell(&format!("kill {}", slirp.pid()));
        let pid = slirp.0.id();
        wait_until("a signal ends it", || !is_running(pid));
        assert_eq!(slirp.0.wait().unwrap().code(), Some(0));
    });
}

#[test]
fn without_an_exit_descriptor_it_ends_with_its_guest() {
    in_sandbox(|| {
        let mut guest = Guest::new();
        let mut slirp = Command::new(FULMAR)
            .args(["--slirp4netns", "-c", &guest.pid(), "tap0"])
            .spawn()
            .unwrap();
        wait_until("the network is up", || guest.see("ip route").contains("default"));
        guest.end();
        assert_eq!(slirp.wait().unwrap().code(), Some(0));
    });
}

#[test]
fn an_interface_that_the_caller_has_made_is_used() {
    in_sandbox(|| {
        let (guest, port) = (Guest::new(), greet_on_loopback());
        guest.see("ip tuntap add name tap0 mode tap && ip link set tap0 up");
        let slirp = Slirp::ours(&["--mtu", "65520"], &guest);
        assert!(!guest.see("ip -o -4 addr show tap0").contains("10.0.2."));
        guest.see("ip addr add 10.0.2.100/24 dev tap0 && ip route add default via 10.0.2.2");
        assert_eq!(greeting(&guest, ("10.0.2.2", port)).unwrap(), "hello");
        assert_eq!(slirp.end().status.code(), Some(0));
    });
}

/// What fulmar says about a line that it refuses.
fn refusal(line: &[&str]) -> String {
    let output = Command::new(FULMAR).arg("--slirp4netns").args(line).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{line:?}");
    assert_eq!(text(&output.stdout), "");
    text(&output.stderr)
}

#[test]
fn a_line_that_cannot_work_is_refused_with_a_sentence() {
    in_sandbox(|| {
        let guest = Guest::new();
        let file = Scratch::new("file");
        fs::write(&file.0, "kept").unwrap();
        let long = format!("/tmp/{}", "x".repeat(120));
        for (options, why) in [
            (&["--no-such"][..], "unrecognized option '--no-such'"),
            (&["--target-type=bess"], "does not serve User Mode Linux"),
            (&["--ready-fd", "77"], "--ready-fd: 77 is not an open descriptor"),
            (&["--exit-fd", "77"], "--exit-fd: 77 is not an open descriptor"),
            (&["--api-socket", &file.text()], "cannot bind the API socket"),
            (&["--api-socket", &long], "the path is too long"),
            (&["--userns-path", "/nothing"], "the user namespace /nothing does not exist"),
        ] {
            let said = refusal(&[options, &[&guest.pid(), "tap0"]].concat());
            assert!(said.starts_with("slirp4netns: ") && said.contains(why), "{options:?}: {said}");
        }
        assert_eq!(fs::read_to_string(&file.0).unwrap(), "kept");
        assert!(refusal(&["--netns-type=path", "/nothing", "tap0"]).contains("no such file"));
        assert!(refusal(&["4194999", "tap0"]).contains("no such process"));
        assert!(refusal(&["4194999"]).contains("missing <TAPNAME>"));
    });
}

#[test]
fn help_and_version_are_printed_to_standard_output() {
    for (option, words) in [("--help", "--netns-type"), ("-v", "slirp4netns version 1.3")] {
        let output =
            Command::new(FULMAR).args(["gateway", "--slirp4netns", option]).output().unwrap();
        assert!(output.status.success() && text(&output.stdout).contains(words), "{option}");
    }
}

/// The answers of a program to requests, where errors are cut to the words of slirp4netns, and what a guest gets by it.
fn behaviour(program: &[&str]) -> Vec<String> {
    let (guest, api) = (Guest::new(), Scratch::new("api"));
    let slirp = Slirp::start(program, &["-c", "-m9000", "--api-so", &api.text()], &guest);
    let requests = [
        add("tcp", "127.0.0.1", 8081, 80),
        add("tcp", "127.0.0.1", 8081, 80),
        add("udp", "", 8081, 80),
        add("sctp", "", 8081, 80),
        add("tcp", "x", 8081, 80),
        add("tcp", "192.0.2.77", 8081, 80),
        add("tcp", "", 0, 80),
        add("tcp", "", 8082, 0),
        "bad".to_owned(),
        "[1]".to_owned(),
        r#"{"a": 1}"#.to_owned(),
        r#"{"execute": "x"}"#.to_owned(),
        r#"{"execute": "remove_hostfwd", "arguments": {"id": 2}}"#.to_owned(),
        r#"{"execute": "remove_hostfwd", "arguments": {"id": 2}}"#.to_owned(),
        r#"{"execute": "remove_hostfwd"}"#.to_owned(),
        add("udp", "", 8081, 80),
    ];
    let mut seen: Vec<String> = requests.iter().map(|r| first_words(&call(&api.0, r))).collect();
    seen.push(call(&api.0, r#"{"execute": "list_hostfwd"}"#)["entries"].to_string());
    seen.push(guest.see("ip -o -4 addr | awk '{print $2, $4}'"));
    seen.push(guest.see("ip route | awk '{print $1, $2, $3}'"));
    seen.push(guest.see("ip -o link | awk '{print $2, $5}'"));
    let port = greet_on_loopback();
    seen.push(format!("{:?}", greeting(&guest, ("10.0.2.2", port)).ok()));
    seen.push(format!("{:?}", slirp.end().status.code()));
    seen
}

/// An answer; an error without the reason that fulmar adds to the words of slirp4netns.
fn first_words(answer: &Value) -> String {
    let Some(said) = answer["error"]["desc"].as_str() else { return answer.to_string() };
    let end = said.match_indices(": ").map(|(at, _)| at).nth(2).unwrap_or(said.len());
    said.get(..end).unwrap_or(said).to_owned()
}

#[test]
fn requests_are_answered_as_by_slirp4netns() {
    in_sandbox(|| {
        let Some(peer) = peer("slirp4netns") else {
            let why = "there is no slirp4netns to compare with; `scripts/setup peers` unpacks it";
            return println!("SKIPPED requests_are_answered_as_by_slirp4netns: {why}");
        };
        let ours = behaviour(&OURS);
        let theirs = behaviour(&[peer.to_str().unwrap()]);
        assert_eq!(ours, theirs);
    });
}
