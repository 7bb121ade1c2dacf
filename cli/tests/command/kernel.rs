//! The command against the kernel's own sockets, in a sandbox of its own.

use crate::FULMAR;
use crate::support::{
    PATIENCE, assert_success, fulmar, in_sandbox, run, run_with, skip, text, wait,
};
use sha2::{Digest, Sha256};
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream, UdpSocket};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Bytes of the file that the transfer tests move.
const FILE_BYTES: usize = 24 << 20;

/// Bytes that do not repeat, so that a lost or doubled block shows.
fn noise(bytes: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let next = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    std::iter::repeat_with(next).flatten().take(bytes).collect()
}

fn digest(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect()
}

fn scratch(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("fulmar-{}-{name}", std::process::id()))
}

/// A file that is gone with the value.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Scratch {
        Scratch(scratch(name))
    }

    fn holding(name: &str, bytes: &[u8]) -> Scratch {
        let file = Scratch::new(name);
        std::fs::write(&file.0, bytes).expect("it can be written");
        file
    }

    fn path(&self) -> &str {
        self.0.to_str().expect("a readable path")
    }

    fn bytes(&self) -> Vec<u8> {
        std::fs::read(&self.0).expect("it can be read")
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// The kernel accepts one connection and hands it to `work`.
fn kernel_server<T: Send + 'static>(
    address: &str,
    work: impl FnOnce(TcpStream) -> T + Send + 'static,
) -> (u16, JoinHandle<T>) {
    let listener = TcpListener::bind((address, 0)).expect("the kernel listens");
    let port = listener.local_addr().expect("an address").port();
    (port, thread::spawn(move || work(listener.accept().expect("a connection").0)))
}

/// The kernel connects to fulmar, which may need a moment to listen.
fn kernel_client(address: &str, port: u16) -> TcpStream {
    let started = Instant::now();
    loop {
        match TcpStream::connect((address, port)) {
            Ok(stream) => return stream,
            Err(e) if started.elapsed() > PATIENCE => panic!("cannot connect: {e}"),
            Err(_) => thread::sleep(Duration::from_millis(20)),
        }
    }
}

fn echo(mut stream: TcpStream) {
    let mut bytes = vec![0; 1 << 16];
    loop {
        match stream.read(&mut bytes).expect("the kernel reads") {
            0 => return,
            n => stream.write_all(&bytes[..n]).expect("the kernel writes"),
        }
    }
}

fn read_all(mut stream: TcpStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).expect("the kernel reads");
    bytes
}

#[test]
fn ping_reaches_the_kernel_over_both_versions_of_ip() {
    in_sandbox(|| {
        for host in ["10.77.0.1", "fd77::1"] {
            let output = run(&format!("ping -c 3 -i 0.05 -W 60 -s 1000 {host}"));
            assert_success(&output);
            let out = text(&output.stdout);
            assert!(out.contains("3 packets transmitted, 3 received, 0% packet loss"), "{out}");
            assert!(out.contains(&format!("1008 bytes from {host}: icmp_seq=1 ttl=64 time=")));
        }
    });
}

#[test]
fn ping_without_a_reply_exits_with_status_1() {
    in_sandbox(|| {
        let output = run("ping -c 1 -W 0.2 10.77.0.99");
        assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
        assert!(text(&output.stdout).contains("0 received, 100% packet loss"));
    });
}

#[test]
fn nc_sends_its_input_and_prints_the_answer() {
    in_sandbox(|| {
        for host in ["10.77.0.1", "fd77::1"] {
            let (port, server) = kernel_server(host, echo);
            let sent = noise(3_000_001);
            let output = run_with(&format!("nc -w 20 {host} {port}"), &sent);
            assert_success(&output);
            assert!(output.stdout == sent, "{} bytes came back", output.stdout.len());
            server.join().expect("the echo ends");
        }
    });
}

#[test]
fn nc_listens_and_ends_with_both_directions() {
    in_sandbox(|| {
        let mut listener = fulmar("nc -l 8000").spawn().expect("it starts");
        let mut stdin = listener.stdin.take().expect("a pipe");
        let mut stream = kernel_client("10.77.0.2", 8000);
        stream.write_all(b"to fulmar").expect("sent");
        stream.shutdown(Shutdown::Write).expect("half-closed");
        stdin.write_all(b"to the kernel").expect("piped");
        drop(stdin);
        assert_eq!(read_all(stream), b"to the kernel");
        let output = wait(listener);
        assert_success(&output);
        assert_eq!(output.stdout, b"to fulmar");
    });
}

#[test]
fn nc_keeps_listening_with_k() {
    in_sandbox(|| {
        let mut listener = fulmar("nc -lk 8001").stdin(Stdio::null()).spawn().expect("it starts");
        for word in [b"one", b"two"] {
            let mut stream = kernel_client("10.77.0.2", 8001);
            stream.write_all(word).expect("sent");
            stream.shutdown(Shutdown::Write).expect("half-closed");
            assert_eq!(read_all(stream), b"");
        }
        let mut out = listener.stdout.take().expect("a pipe");
        let mut both = [0; 6];
        out.read_exact(&mut both).expect("both words");
        assert_eq!(&both, b"onetwo");
        listener.kill().expect("it still runs");
        listener.wait().expect("it ends");
    });
}

#[test]
fn nc_speaks_udp_both_ways() {
    in_sandbox(|| {
        let socket = UdpSocket::bind("10.77.0.1:0").expect("the kernel binds");
        socket.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        let port = socket.local_addr().expect("an address").port();
        let answer = thread::spawn(move || {
            let mut bytes = [0; 100];
            // With a time-out, a call may fail with EINTR after the thread was stopped (signal(7)).
            let (n, from) = loop {
                match socket.recv_from(&mut bytes) {
                    Err(e) if e.kind() == ErrorKind::Interrupted => {}
                    came => break came.expect("a datagram"),
                }
            };
            socket.send_to(b"pong", from).expect("sent");
            bytes[..n].to_vec()
        });
        let output = run_with(&format!("nc -u -w 5 10.77.0.1 {port}"), b"ping");
        assert_success(&output);
        assert_eq!(output.stdout, b"pong");
        assert_eq!(answer.join().expect("it ends"), b"ping");
    });
}

#[test]
fn a_refused_connection_is_one_clear_sentence() {
    in_sandbox(|| {
        let output = run("nc 10.77.0.1 9");
        assert_eq!(output.status.code(), Some(2));
        assert_eq!(
            text(&output.stderr),
            "fulmar: cannot connect to 10.77.0.1:9: connection refused (ECONNREFUSED); \
             check that a program listens on that port and address\n"
        );
    });
}

fn send_arrives_intact(options: &str) {
    let bytes = noise(FILE_BYTES);
    let file = Scratch::holding("source", &bytes);
    let (port, server) = kernel_server("10.77.0.1", read_all);
    let output = run(&format!("send {options} {} 10.77.0.1:{port}", file.path()));
    assert_success(&output);
    assert!(server.join().expect("it ends") == bytes, "the bytes differ");
    let err = text(&output.stderr);
    assert!(err.contains(&digest(&bytes)), "{err}");
}

/// What the receiver says.
fn recv_arrives_intact(options: &str) -> String {
    let bytes = noise(FILE_BYTES);
    let file = Scratch::new("copy");
    let sha256 = digest(&bytes);
    let arguments = format!("recv {options} --sha256 {sha256} {} -l 5001", file.path());
    let receiver = fulmar(&arguments).spawn().expect("it starts");
    let mut stream = kernel_client("10.77.0.2", 5001);
    stream.write_all(&bytes).expect("sent");
    drop(stream);
    let output = wait(receiver);
    assert_success(&output);
    assert!(file.bytes() == bytes, "the bytes differ");
    text(&output.stderr)
}

#[test]
fn a_sent_file_arrives_intact() {
    in_sandbox(|| send_arrives_intact(""));
}

#[test]
fn a_received_file_arrives_intact() {
    in_sandbox(|| {
        let told = recv_arrives_intact("");
        assert!(told.contains("into posted buffers: ") && !told.contains(": 0 B placed"), "{told}");
        let told = recv_arrives_intact("--no-posted");
        assert!(told.contains("read by copy: ") && !told.contains("placed"), "{told}");
    });
}

const BAD_NETWORK: &str = "--faults loss=1%,reorder=1%,dup=1%,corrupt=0.1%,seed=7";

#[test]
fn a_sent_file_survives_a_bad_network() {
    in_sandbox(|| send_arrives_intact(BAD_NETWORK));
}

#[test]
fn a_received_file_survives_a_bad_network() {
    in_sandbox(|| drop(recv_arrives_intact(BAD_NETWORK)));
}

#[test]
fn a_file_that_arrives_damaged_is_refused() {
    in_sandbox(|| {
        let file = Scratch::new("wrong");
        let (port, server) =
            kernel_server("10.77.0.1", |mut s| s.write_all(b"something else").expect("sent"));
        let sum = "0".repeat(64);
        let output = run(&format!("recv --sha256 {sum} {} 10.77.0.1:{port}", file.path()));
        server.join().expect("it ends");
        assert_eq!(output.status.code(), Some(2));
        assert!(text(&output.stderr).contains("receive it again"));
    });
}

#[test]
fn stat_shows_a_running_connection() {
    in_sandbox(|| {
        let (port, server) = kernel_server("10.77.0.1", echo);
        let mut caller = fulmar(&format!("nc 10.77.0.1 {port}")).spawn().expect("it starts");
        let mut stdin = caller.stdin.take().expect("a pipe");
        stdin.write_all(b"x").expect("piped");
        let mut echoed = [0];
        caller.stdout.take().expect("a pipe").read_exact(&mut echoed).expect("the echo");
        // A stack whose threads do not run for two seconds is passed over: once more.
        let shown = |options: &str| {
            let tries = (0..30).map(|_| run(&format!("stat {options} {}", caller.id())));
            tries.into_iter().find(|o| text(&o.stdout).contains("ESTABLISHED"))
        };
        let json = shown("--json").expect("the connection is shown");
        let table = shown("").expect("the connection is shown");
        drop(stdin);
        assert_success(&json);
        let document: serde_json::Value = serde_json::from_slice(&json.stdout).expect("JSON");
        let socket = &document[0]["sockets"][0];
        assert_eq!(socket["remote"], format!("10.77.0.1:{port}"));
        assert_eq!(socket["state"], "ESTABLISHED");
        assert!(socket["rtt_us"].as_f64().is_some_and(|us| us > 0.0), "{socket}");
        assert_success(&table);
        assert_success(&wait(caller));
        server.join().expect("it ends");
    });
}

#[test]
fn ctrl_c_delivers_what_was_accepted_and_ends_the_listing() {
    in_sandbox(|| {
        let (go_on, told) = mpsc::channel();
        let (port, server) = kernel_server("10.77.0.1", move |mut stream| {
            told.recv().expect("a word");
            let mut bytes = Vec::new();
            let _ = stream.read_to_end(&mut bytes);
            bytes.len()
        });
        let mut caller = fulmar(&format!("nc 10.77.0.1 {port}")).spawn().expect("it starts");
        let mut stdin = caller.stdin.take().expect("a pipe");
        stdin.write_all(&noise(300_000)).expect("piped");
        let id = caller.id().to_string();
        let started = Instant::now();
        let accepted = || {
            let stat = run(&format!("stat --json {id}")).stdout;
            let document: serde_json::Value = serde_json::from_slice(&stat).unwrap_or_default();
            document[0]["counters"]["send_bytes"].as_u64()
        };
        while accepted() != Some(300_000) {
            assert!(started.elapsed() < PATIENCE, "{:?} bytes accepted", accepted());
        }
        assert!(Command::new("kill").args(["-INT", &id]).status().expect("kill").success());
        go_on.send(()).expect("the server waits");
        let output = wait(caller);
        assert_eq!(output.status.code(), Some(130), "{}", text(&output.stderr));
        assert_eq!(text(&output.stderr), "");
        assert_eq!(server.join().expect("it ends"), 300_000);
        assert!(!run(&format!("stat {id}")).status.success());
    });
}

#[test]
fn two_commands_with_one_address_exclude_each_other() {
    in_sandbox(|| {
        let mut first = fulmar("nc --device packet:fulmar0 -l 8002").spawn().expect("it starts");
        drop(kernel_client("10.77.0.2", 8002));
        let ping = "ping --device packet:fulmar0 -c 1 -W 60 10.77.0.1";
        let second = run(ping);
        assert_eq!(second.status.code(), Some(2));
        assert!(text(&second.stderr).contains("10.77.0.2"), "{}", text(&second.stderr));
        assert_success(&run(&format!("{ping} --addr 10.77.0.3/24")));
        let _ = first.kill();
        first.wait().expect("it ends");
    });
}

#[test]
fn a_second_command_in_a_sandbox_has_an_interface_of_its_own_and_reaches_the_first() {
    in_sandbox(|| {
        let first = fulmar("nc -l 8003").stdin(Stdio::null()).spawn().expect("it starts");
        let started = Instant::now();
        // Until the first one listens: the kernel must not be the one that it accepts.
        while !text(&run("stat -f tcp").stdout).contains("LISTEN") {
            assert!(started.elapsed() < PATIENCE, "it never listens");
        }
        let second = run_with("nc -w 20 10.77.0.2 8003", b"from another stack");
        assert_success(&second);
        assert!(text(&second.stderr).contains("10.77.0.3"), "{}", text(&second.stderr));
        let output = wait(first);
        assert_success(&output);
        assert_eq!(output.stdout, b"from another stack");
    });
}

#[test]
fn another_terminal_joins_the_sandbox_of_a_process() {
    in_sandbox(|| {
        let own = |path| std::fs::read_link(path).expect("a namespace");
        let namespace = own("/proc/self/ns/net");
        let mut inside = Command::new(FULMAR);
        inside.args(["sandbox", "--", "cat"]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut inside = inside.spawn().expect("it starts");
        // It says something only once it is inside.
        inside.stdin.as_mut().expect("a pipe").write_all(b"x").expect("piped");
        inside.stdout.as_mut().expect("a pipe").read_exact(&mut [0]).expect("the sandbox stands");
        let pid = inside.id().to_string();
        let joined = run(&format!("sandbox --join {pid} -- readlink /proc/self/ns/net"));
        assert_success(&joined);
        let theirs = own(format!("/proc/{pid}/ns/net").leak());
        assert_ne!(theirs, namespace);
        assert_eq!(text(&joined.stdout).trim(), theirs.to_str().expect("a name"));
        drop(inside.stdin.take());
        inside.wait().expect("it ends");
        let gone = run(&format!("sandbox --join {pid} -- true"));
        assert_eq!(gone.status.code(), Some(2), "{}", text(&gone.stderr));
    });
}

#[test]
fn a_scan_reports_open_ports_by_its_status_and_output() {
    in_sandbox(|| {
        let listener = TcpListener::bind("10.77.0.1:0").expect("the kernel listens");
        let port = listener.local_addr().expect("an address").port();
        let open = run(&format!("nc -zv 10.77.0.1 {port}"));
        assert_success(&open);
        assert!(
            text(&open.stderr).contains(&format!("port {port}: open")),
            "{}",
            text(&open.stderr)
        );
        drop(listener);
        let closed = run(&format!("nc -z 10.77.0.1 {port}"));
        assert_eq!((closed.status.code(), text(&closed.stderr)), (Some(1), String::new()));
    });
}

#[test]
fn a_closed_pipe_ends_ping_silently() {
    in_sandbox(|| {
        let mut ping = fulmar("ping -i 0.01 10.77.0.1").spawn().expect("it starts");
        drop(ping.stdout.take());
        let output = wait(ping);
        assert_eq!(text(&output.stderr), "");
    });
}

#[test]
fn a_capture_is_readable_by_tshark() {
    in_sandbox(|| {
        if Command::new("tshark").arg("--version").output().is_err() {
            const WHY: &str = "tshark is not installed";
            return match std::env::var_os("FULMAR_WITHOUT_TSHARK") {
                Some(_) => eprintln!("SKIPPED: {WHY}"),
                None => skip("a_capture_is_readable_by_tshark", WHY),
            };
        }
        let file = Scratch::new("capture.pcapng");
        let (port, server) = kernel_server("10.77.0.1", echo);
        let sent = noise(200_000);
        let arguments = format!("nc --pcap {} 10.77.0.1 {port}", file.path());
        assert_success(&run_with(&arguments, &sent));
        server.join().expect("it ends");
        let filter = "(tcp.flags.syn==1 && !tcp.analysis.retransmission) || _ws.malformed";
        let read = Command::new("tshark").args(["-r", file.path(), "-Y", filter]).output();
        let lines = text(&read.expect("tshark runs").stdout);
        assert_eq!(lines.lines().count(), 2, "the two SYNs and nothing malformed: {lines}");
    });
}

#[test]
fn a_capture_on_a_full_disk_is_reported_and_the_traffic_goes_on() {
    in_sandbox(|| {
        let output = run("ping -c 2 -i 0.05 -W 60 --pcap /dev/full 10.77.0.1");
        assert_success(&output);
        let said = text(&output.stderr);
        assert_eq!(said.lines().filter(|l| l.contains("the capture ended")).count(), 1, "{said}");
    });
}

#[test]
fn a_tap_and_a_tun_of_our_own_reach_the_kernel() {
    const NAME: &str = "a_tap_and_a_tun_of_our_own_reach_the_kernel";
    in_sandbox(|| {
        let tun = std::fs::OpenOptions::new().read(true).write(true).open("/dev/net/tun");
        if let Err(e) = tun {
            return skip(NAME, &format!("/dev/net/tun: {e}"));
        }
        for device in ["tap:fulmar7", "tun:fulmar8"] {
            let device = format!("--device {device} --addr 10.78.0.2/24 --peer-addr 10.78.0.1/24");
            let output = run(&format!("ping {device} -c 2 -i 0.05 -W 60 10.78.0.1"));
            assert_success(&output);
            assert!(text(&output.stdout).contains("2 received, 0% packet loss"));
        }
    });
}

/// For a moment the kernel shows the TAP of the command that has ended.
#[test]
fn a_command_right_after_one_that_a_signal_ended_sets_its_own_tap_up() {
    const NAME: &str = "a_command_right_after_one_that_a_signal_ended_sets_its_own_tap_up";
    const SCRIPT: &str = "\
        \"$0\" recv - -l 5001 & \
        until ip link show fulmar0 2>&1 | grep -q LOWER_UP; do sleep .01; done; \
        kill $!; wait $!; echo status $?; \
        \"$0\" ping -q -c 1 -W 60 10.77.0.1";
    in_sandbox(|| {
        let tun = std::fs::OpenOptions::new().read(true).write(true).open("/dev/net/tun");
        if let Err(e) = tun {
            return skip(NAME, &format!("/dev/net/tun: {e}"));
        }
        let mut script = Command::new("unshare");
        script.args(["-n", "sh", "-c", SCRIPT, FULMAR]);
        let output = script.output().expect("unshare(1)");
        assert_success(&output);
        let out = text(&output.stdout);
        assert!(out.contains("status 143") && out.contains("1 received"), "{out}");
        assert_eq!(text(&output.stderr), "");
    });
}

#[test]
fn two_queues_of_a_device_reach_the_kernel() {
    in_sandbox(|| {
        let output = run("ping --queues 2 -c 2 -i 0.05 -W 60 10.77.0.1");
        assert_success(&output);
        assert!(text(&output.stdout).contains("2 received, 0% packet loss"));
    });
}

#[test]
fn queues_that_a_device_cannot_have_are_refused_in_a_sentence() {
    for (options, word) in [
        ("--device shm:fulmar-test-queues --queues 2", "one queue"),
        ("--device tap:t0 --queues 2 --pcap /dev/null", "--pcap"),
        ("--device tap:t0 --queues 33", "1..=32"),
    ] {
        let output = run(&format!("ping -c 1 {options} 10.77.0.1"));
        assert_eq!(output.status.code(), Some(2), "{options}");
        let err = text(&output.stderr);
        assert!(err.contains(word), "{options}: {err}");
    }
}

#[test]
fn missing_arguments_are_named() {
    let recv = run("recv copy");
    assert_eq!(recv.status.code(), Some(2));
    assert!(text(&recv.stderr).contains("-l PORT"), "{}", text(&recv.stderr));
    let device = format!("shm:fulmar-test-nobody-{}", std::process::id());
    let nobody = run(&format!("ping --device {device} --peer-timeout 0.05 -c 1 10.77.0.1"));
    assert_eq!(nobody.status.code(), Some(2));
    assert!(text(&nobody.stderr).contains("start the other process"), "{}", text(&nobody.stderr));
}

#[test]
fn man_pages_and_completions_name_every_command() {
    let directory = scratch("man");
    let path = directory.to_str().expect("a readable path");
    assert_success(&run(&format!("man {path}")));
    let completions = run("completions bash");
    assert_success(&completions);
    for command in ["nc", "ping", "send", "recv", "stat", "sandbox"] {
        let page = std::fs::read_to_string(directory.join(format!("fulmar-{command}.1")));
        let page = page.expect("a page");
        assert!(page.contains(".TH") && !page.contains(".SH EXTRA"), "{command}");
        assert!(
            text(&completions.stdout).contains(&format!("fulmar__subcmd__{command}"))
                || text(&completions.stdout).contains(&format!("fulmar__{command}")),
            "{command}"
        );
    }
    std::fs::remove_dir_all(directory).expect("it can be removed");
}

#[test]
fn an_unknown_interface_is_one_clear_sentence() {
    in_sandbox(|| {
        let output = run("ping -c 1 --device packet:nosuch0 --addr 10.0.0.2/24 10.0.0.1");
        assert_eq!(output.status.code(), Some(2));
        let err = text(&output.stderr);
        assert!(err.starts_with("fulmar: ") && err.contains("nosuch0"), "{err}");
        assert_eq!(err.lines().count(), 1, "{err}");
    });
}
