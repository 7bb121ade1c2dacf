//! What NATs break, with the programs that notice: STUN (RFC 5780), TFTP, SIP and the tools that trace a path, under
//! `fulmar run`. A program that is not installed is skipped aloud.
//!
//! ```text
//! [ program ]== fulmar run ==[ host 198.51.100.1 ]-- veth --[ 198.51.100.2 router 203.0.113.1 ]-- veth --[ server, .9 and .10 ]
//! ```

use std::fs;
use std::io::Write;
use std::net::{IpAddr, UdpSocket};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::FULMAR;
use crate::support::{PATIENCE, in_sandbox, text};
use fulmar_gateway::netns::{Netns, VethEnd};

const ROUTER: &str = "198.51.100.2";
const SERVER: &str = "203.0.113.9";
const SERVER_TOO: &str = "203.0.113.10";

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn shell(script: &str) {
    let output = Command::new("sh").args(["-ec", script]).output().expect("sh(1)");
    assert!(output.status.success(), "{script}\n{}", text(&output.stderr));
}

fn join([near, far]: [&Netns; 2], names: [&'static str; 2], addresses: [&str; 2], last: u8) {
    let end = |name, side| VethEnd { name, mac: [2, 0, 0, side, 7, last], mtu: 1500 };
    near.add_veth(&end(names[0], 1), far, &end(names[1], 2)).unwrap();
    for (netns, name, address) in [(near, names[0], addresses[0]), (far, names[1], addresses[1])] {
        netns.set_address(name, ip(address), 24).unwrap();
        netns.set_up(name).unwrap();
    }
}

/// A host behind a router, beyond which the servers are; and the namespaces, which are gone with the value.
struct Path {
    _router: Netns,
    far: Netns,
}

impl Path {
    fn new() -> Path {
        let (host, router, far) =
            (Netns::current().unwrap(), Netns::new().unwrap(), Netns::new().unwrap());
        join([&host, &router], ["out0", "near0"], ["198.51.100.1", ROUTER], 1);
        join([&router, &far], ["far0", "server0"], ["203.0.113.1", SERVER], 2);
        far.set_address("server0", ip(SERVER_TOO), 24).unwrap();
        shell(&format!("ip route add default via {ROUTER}"));
        let in_namespace = |netns: &Netns, script: &'static str| {
            let run = || {
                shell(script);
                Ok(())
            };
            netns.run(run).unwrap();
        };
        in_namespace(&router, "echo 1 > /proc/sys/net/ipv4/ip_forward");
        in_namespace(&far, "ip link set lo up; ip route add default via 203.0.113.1");
        // The gateway pings as the user `nobody`, or as root of a user namespace that maps one id.
        let allow = |range: &str| fs::write("/proc/sys/net/ipv4/ping_group_range", range);
        allow("0 2147483647").or_else(|_| allow("0 0")).unwrap();
        Path { _router: router, far }
    }

    /// Starts a server at the far end.
    fn serve(&self, line: &[&str]) -> Server {
        let mut command = Command::new(line[0]);
        command.args(&line[1..]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        Server(self.far.run(|| command.spawn()).expect("it starts"))
    }
}

/// A process that ends with the value.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn is_installed(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).chain(["/usr/sbin".into(), "/sbin".into()]);
    let is_there = folders.into_iter().any(|folder| folder.join(program).exists());
    if !is_there {
        // Not `eprintln`: the harness hides what a passing test prints by it.
        let _ = writeln!(std::io::stderr(), "SKIPPED {program} under `fulmar run`: not installed");
    }
    is_there
}

/// What a command prints under `fulmar run`.
fn run(options: &[&str], line: &str) -> String {
    let mut command = Command::new(FULMAR);
    command.arg("run").args(options).args(["--", "sh", "-c", &format!("exec 2>&1; {line}")]);
    text(&command.output().expect("it starts").stdout)
}

/// Repeats a command until it prints what is wanted: its server may not be there yet.
fn until(options: &[&str], line: &str, wanted: &[&str]) {
    let started = Instant::now();
    loop {
        let said = run(options, line);
        if wanted.iter().all(|wanted| said.contains(wanted)) {
            return;
        }
        assert!(started.elapsed() < PATIENCE / 2, "`{line}` lacks {wanted:?}:\n{said}");
        thread::sleep(Duration::from_millis(200));
    }
}

#[test]
fn stun_finds_a_mapping_that_does_not_depend_on_the_endpoint() {
    in_sandbox(|| {
        if !is_installed("turnserver") || !is_installed("turnutils_natdiscovery") {
            return;
        }
        let path = Path::new();
        let line = ["turnserver", "--stun-only", "-n", "--no-cli", "--log-file=stdout"];
        let at = ["-L", SERVER, "-L", SERVER_TOO, "--pidfile=/dev/null"];
        let _server = path.serve(&[&line[..], &at].concat());
        let asked = format!("turnutils_natdiscovery -m -f {SERVER}");
        let mapping = "NAT with Endpoint Independent Mapping";
        until(&[], &asked, &[mapping, "NAT with Endpoint Independent Filtering"]);
        until(&["--udp-filter"], &asked, &[mapping, "NAT with Address Dependent Filtering"]);
    });
}

#[test]
fn a_tftp_server_answers_from_another_port() {
    in_sandbox(|| {
        if !is_installed("in.tftpd") || !is_installed("tftp") {
            return;
        }
        let path = Path::new();
        let folder = std::env::temp_dir().join(format!("fulmar-nat-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let bytes: Vec<u8> = (0..100_000u32).map(|n| (n.wrapping_mul(n) / 7) as u8).collect();
        fs::write(folder.join("file"), &bytes).unwrap();
        let at = format!("{SERVER}:69");
        let _server = path.serve(&[
            "/usr/sbin/in.tftpd",
            "-L",
            "-a",
            &at,
            "-u",
            "root",
            "-s",
            folder.to_str().unwrap(),
        ]);
        let copy = folder.join("copy");
        let line = format!(
            "tftp -m binary {SERVER} -c get file {0} && cmp {0} {1}/file && echo same",
            copy.display(),
            folder.display()
        );
        until(&[], &line, &["same"]);
        fs::remove_dir_all(&folder).unwrap();
    });
}

#[test]
fn a_sip_server_answers_to_the_port_of_the_request() {
    in_sandbox(|| {
        if !is_installed("sipsak") {
            return;
        }
        let path = Path::new();
        let socket = path.far.run(|| UdpSocket::bind((SERVER, 5060))).unwrap();
        socket.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        let (stop, stopped) = std::sync::mpsc::channel::<()>();
        // The answer repeats the header lines of its request (RFC 3261 section 8.2.6.2).
        let server = thread::spawn(move || {
            let mut bytes = [0; 4096];
            while stopped.try_recv() == Err(std::sync::mpsc::TryRecvError::Empty) {
                let Ok((n, from)) = socket.recv_from(&mut bytes) else { continue };
                let request = text(&bytes[..n]);
                let kept = ["Via:", "From:", "To:", "Call-ID:", "CSeq:"];
                let lines = request.lines().filter(|l| kept.iter().any(|k| l.starts_with(k)));
                let lines: String = lines.map(|l| format!("{l}\r\n")).collect();
                let answer = format!("SIP/2.0 200 OK\r\n{lines}Content-Length: 0\r\n\r\n");
                socket.send_to(answer.as_bytes(), from).unwrap();
            }
        });
        until(&[], &format!("sipsak -vv -s sip:nobody@{SERVER}"), &["200 OK"]);
        drop(stop);
        server.join().unwrap();
    });
}

#[test]
fn tools_that_trace_a_path_show_the_hosts_routers() {
    in_sandbox(|| {
        let _path = Path::new();
        let hops = [ROUTER, SERVER];
        for (program, line) in [
            ("traceroute", format!("traceroute -n -q 1 -U {SERVER}")),
            ("traceroute", format!("traceroute -n -q 1 -I {SERVER}")),
            ("tracepath", format!("tracepath -n -m 4 {SERVER}")),
            ("mtr", format!("mtr -n -r -c 2 {SERVER}")),
        ] {
            if is_installed(program) {
                until(&[], &line, &hops);
            }
        }
        // The gateway answers a SYN itself.
        if is_installed("traceroute") {
            let said = run(&[], &format!("traceroute -n -q 1 -T -p 9 {SERVER}"));
            assert!(!said.contains(ROUTER), "docs/gateway.md says otherwise: {said}");
        }
    });
}
