//! Gateways and guests that are killed or stopped: what the other sides hear, what goes on, and that nothing is left.

use std::cell::Cell;
use std::fs;
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use crate::FULMAR;
use crate::guest::{Guest, Scratch, detached, is_running, wait_until};
use crate::support::{PATIENCE, in_sandbox, text};
use fulmar_gateway::netns::Netns;

/// An address of the host that is not its loopback.
const HOST: &str = "192.0.2.1";
/// Marks the processes of a test in their environment.
const MARK: &str = "FULMAR_TEST_MARK";

/// A host with a default route and one more address.
fn prepare_host() {
    for line in ["route add default via 10.77.0.2", &format!("addr add {HOST}/32 dev lo")] {
        let status = Command::new("ip").args(line.split(' ')).status().expect("ip(8)");
        assert!(status.success(), "ip {line}");
    }
}

fn listener() -> TcpListener {
    TcpListener::bind((HOST, 0)).unwrap()
}

fn accept(listener: &TcpListener) -> TcpStream {
    let (stream, _) = listener.accept().unwrap();
    patient(stream)
}

fn patient(stream: TcpStream) -> TcpStream {
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.set_write_timeout(Some(PATIENCE)).unwrap();
    stream
}

fn signal(pid: u32, name: &str) {
    let sent = Command::new("kill").args([&format!("-{name}"), &pid.to_string()]).status();
    assert!(sent.unwrap().success(), "kill -{name} {pid}");
}

/// Waits until every thread of a process stands still.
fn stop(pid: u32) {
    signal(pid, "STOP");
    let stands = |stat: String| stat.rsplit(')').next().is_some_and(|s| s.starts_with(" T"));
    wait_until("it is stopped", || {
        let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten();
        tasks.into_iter().all(|t| stands(fs::read_to_string(t.path().join("stat")).unwrap()))
    });
}

/// Processes of this test, by their environment.
fn marked() -> Vec<u32> {
    let mark = format!("{MARK}={}", std::process::id()).into_bytes();
    let is_marked = |pid: &u32| {
        let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environment.split(|b| *b == 0).any(|variable| variable == mark)
    };
    let names = fs::read_dir("/proc").unwrap().flatten().map(|e| e.file_name());
    let pids = names.filter_map(|n| n.to_str()?.parse().ok());
    pids.filter(is_marked).filter(|pid| is_running(*pid)).collect()
}

/// A program under `fulmar run`, the folder of its gateway's control socket, and what it prints.
struct Run {
    child: Child,
    lines: std::io::Lines<BufReader<ChildStdout>>,
    runtime: Scratch,
}

impl Run {
    fn new(options: &[&str], script: &str) -> Run {
        let runtime = Scratch::new("runtime");
        fs::create_dir(&runtime.0).unwrap();
        fs::set_permissions(&runtime.0, fs::Permissions::from_mode(0o700)).unwrap();
        let mut child = Command::new(FULMAR)
            .args(["run", "--quiet", "--allow", HOST])
            .args(options)
            .args(["--", "bash", "-c", script])
            .env("XDG_RUNTIME_DIR", &runtime.0)
            .env(MARK, std::process::id().to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Run { child, lines, runtime }
    }

    fn line(&mut self) -> String {
        self.lines.next().expect("a line").unwrap()
    }

    fn stat(&self, process: u32) -> serde_json::Value {
        let mut command = Command::new(FULMAR);
        command.args(["stat", "--json", &process.to_string()]);
        let output = command.env("XDG_RUNTIME_DIR", &self.runtime.0).output().unwrap();
        serde_json::from_slice(&output.stdout).unwrap_or_default()
    }

    /// The process of the gateway before a process.
    fn gateway(&self, guest: u32) -> u32 {
        let said = self.stat(guest);
        said[0]["pid"].as_u64().unwrap_or_else(|| panic!("{said}")) as u32
    }

    /// The program's exit status, or its signal, and what came on standard error.
    fn end(mut self) -> (Option<i32>, Option<i32>, String) {
        let mut said = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        let status = self.child.wait().unwrap();
        wait_until("no process is left", || marked().is_empty());
        // The next one that looks removes the socket of one that was killed.
        self.stat(0);
        let left = || fs::read_dir(self.runtime.0.join("fulmar")).into_iter().flatten().count();
        wait_until("no socket is left", || left() == 0);
        let _ = fs::remove_dir(self.runtime.0.join("fulmar"));
        (status.code(), status.signal(), said)
    }
}

/// Whether the other side has reset the connection, instead of ending it in order.
fn is_reset(stream: &mut TcpStream) -> bool {
    stream.read(&mut [0]).is_err_and(|e| e.kind() == ErrorKind::ConnectionReset)
}

#[test]
fn a_killed_gateway_is_reported_to_its_program_and_resets_the_host() {
    in_sandbox(|| {
        prepare_host();
        for summary in [&[][..], &["--summary"]] {
            let listener = listener();
            let port = listener.local_addr().unwrap().port();
            let connect = format!("/dev/tcp/{HOST}/{port}");
            let script = format!(
                "echo $$; exec 3<>{connect}; echo hello >&3; read line <&3; echo \"$line\"
                 read line <&3; echo \"status $?\"
                 exec 4<>{connect} || echo refused
                 grep -c : /proc/net/dev; exit 5"
            );
            let mut run = Run::new(summary, &script);
            let program = run.line().parse().unwrap();
            let mut host = accept(&listener);
            let mut greeting = [0; 6];
            host.read_exact(&mut greeting).unwrap();
            host.write_all(b"go\n").unwrap();
            assert_eq!(run.line(), "go");
            signal(run.gateway(program), "KILL");
            assert!(is_reset(&mut host), "half a stream must not pass for a whole one");
            assert_eq!(run.line(), "status 1", "the read ends");
            assert_eq!(run.line(), "refused", "at once");
            assert_eq!(run.line(), "1", "the loopback interface alone");
            let (status, _, said) = run.end();
            assert_eq!(status, Some(5), "{said}");
            let sentence = "fulmar run: the gateway was killed by SIGKILL: bash no longer has a network; \
                            its connections are aborted";
            assert_eq!(said.matches(sentence).count(), 1, "{said}");
            assert!(said.contains("Network is unreachable"), "{said}");
        }
    });
}

#[test]
fn a_killed_gateway_of_an_attached_guest_leaves_nothing() {
    in_sandbox(|| {
        prepare_host();
        let guest = Guest::new();
        let line = ["--config-net", "-I", "ns0", "-a", "10.9.0.2", "-n", "24", "-g", "10.9.0.1"];
        let ports = ["-t", "8087:80", "-u", "8087:80", "-T", "none", "-U", "none"];
        let gateway = detached(&[&line[..], &ports, &[&guest.pid()]].concat());
        let (listener, namespace) = (listener(), namespace(&guest));
        let to = listener.local_addr().unwrap();
        let _inside = namespace.run(|| TcpStream::connect(to)).unwrap();
        let mut outside = accept(&listener);
        signal(gateway, "KILL");
        assert!(is_reset(&mut outside));
        wait_until("it is gone", || !is_running(gateway));
        wait_until("its interface, too", || !guest.see("cat /proc/net/dev").contains("ns0:"));
        TcpListener::bind("0.0.0.0:8087").expect("the port is free");
        std::net::UdpSocket::bind("0.0.0.0:8087").expect("the port is free");
        let refused = namespace.run(|| TcpStream::connect(to)).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::NetworkUnreachable, "{refused}");
        // A second gateway takes its place.
        detached(&[&line[..], &ports, &[&guest.pid()]].concat());
        let inside = namespace.run(|| TcpStream::connect(to)).unwrap();
        exchange(&inside, &accept(&listener));
    });
}

fn namespace(guest: &Guest) -> Netns {
    namespace_of(guest.0.id())
}

fn namespace_of(pid: u32) -> Netns {
    Netns::open(Path::new(&format!("/proc/{pid}/ns/net"))).unwrap()
}

fn exchange(mut near: &TcpStream, mut far: &TcpStream) {
    let mut came = [0; 4];
    near.write_all(b"ping").unwrap();
    far.read_exact(&mut came).unwrap();
    far.write_all(&came).unwrap();
    near.read_exact(&mut came).unwrap();
    assert_eq!(&came, b"ping");
}

/// Starts `fulmar` with what its standard output is as descriptor 9, too.
fn with_a_descriptor_more(arguments: &[&str]) -> Child {
    let mut command = Command::new("bash");
    command.args(["-c", "exec 9>&1; exec \"$0\" \"$@\"", FULMAR]).args(arguments);
    command.stdout(Stdio::piped()).spawn().unwrap()
}

#[test]
fn a_gateway_holds_nothing_that_its_caller_has_open_and_the_program_does() {
    in_sandbox(|| {
        prepare_host();
        // Read to its end while the gateways run.
        let read = |child: &mut Child| {
            let (mut out, (said, says)) = (child.stdout.take().unwrap(), channel());
            thread::spawn(move || {
                let mut all = String::new();
                out.read_to_string(&mut all).unwrap();
                said.send(all)
            });
            says.recv_timeout(PATIENCE).expect("the pipe is closed")
        };
        let script = "echo up >&9; exec >&- 9>&-; exec sleep 1000";
        let mut program = with_a_descriptor_more(&["run", "--", "bash", "-c", script]);
        assert_eq!(read(&mut program), "up\n");
        program.kill().unwrap();
        program.wait().unwrap();
        let guest = Guest::new();
        let line = ["--pasta", "--config-net", "-a", "10.9.0.2", "-n", "24", "-g", "10.9.0.1"];
        let mut command = with_a_descriptor_more(&[&line[..], &[&guest.pid()]].concat());
        assert_eq!(read(&mut command), "");
        assert!(command.wait().unwrap().success());
    });
}

/// How many descriptors of a process lead to where its standard output leads.
fn outputs_of(pid: u32) -> usize {
    let to = |fd: &Path| fs::read_link(fd).ok();
    let out = to(Path::new(&format!("/proc/{pid}/fd/1")));
    let all = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    all.filter(|fd| to(&fd.path()) == out).count()
}

#[test]
fn a_gateway_in_the_foreground_and_its_program_have_only_what_is_named() {
    in_sandbox(|| {
        prepare_host();
        let line = ["--config-net", "-a", "10.9.0.2", "-n", "24", "-g", "10.9.0.1"];
        for (file, wanted) in [("/dev/null", 1), ("/dev/fd/9", 2)] {
            let guest = Guest::new();
            let options = ["-f", "-P", file, &guest.pid()];
            let mut gateway = with_a_descriptor_more(&[&["gateway"], &line[..], &options].concat());
            wait_until("it is up", || guest.see("ip -o addr").contains("10.9.0.2"));
            wait_until("the others are closed", || outputs_of(gateway.id()) == wanted);
            signal(gateway.id(), "TERM");
            assert!(gateway.wait().unwrap().success());
        }
        // A program of `fulmar run` has what its caller has; of a gateway, what its arguments name.
        let counts = "ls -l /proc/self/fd | grep -c pipe: ; :";
        let seen = |command: &str, arguments: &[&str]| {
            let program = ["--", "bash", "-c", counts];
            let line = [&[command], &line[..], &program, arguments].concat();
            text(&with_a_descriptor_more(&line).wait_with_output().unwrap().stdout)
        };
        let [alone, named] = [seen("gateway", &[]), seen("gateway", &["/dev/fd/9"])];
        let [alone, named] = [alone, named].map(|n| n.trim().parse::<usize>().expect("a count"));
        assert_eq!(named, alone + 1);
    });
}

#[test]
fn a_killed_program_ends_its_gateway_and_frees_its_ports() {
    in_sandbox(|| {
        prepare_host();
        let listener = listener();
        let port = listener.local_addr().unwrap().port();
        let script = format!("exec 3<>/dev/tcp/{HOST}/{port}; echo up; exec sleep 1000");
        let mut run = Run::new(&["--publish", "8088:80", "--publish-udp", "8088:80"], &script);
        let mut host = accept(&listener);
        assert_eq!(run.line(), "up");
        assert!(TcpListener::bind("0.0.0.0:8088").is_err(), "it is published");
        signal(run.child.id(), "KILL");
        // The kernel ends what a killed program had open in order.
        assert_eq!(host.read(&mut [0]).unwrap(), 0);
        let (_, killed, said) = run.end();
        assert_eq!((killed, said.as_str()), (Some(9), ""));
        TcpListener::bind("0.0.0.0:8088").expect("the port is free");
        std::net::UdpSocket::bind("0.0.0.0:8088").expect("the port is free");
    });
}

#[test]
fn bytes_that_a_program_wrote_before_its_end_arrive() {
    in_sandbox(|| {
        prepare_host();
        for summary in [&[][..], &["--summary"]] {
            let listener = listener();
            let port = listener.local_addr().unwrap().port();
            // More than the buffers of the host's kernel take at once.
            let script = format!("head -c 1000000 /dev/zero >/dev/tcp/{HOST}/{port}; echo written");
            let mut run = Run::new(summary, &script);
            let mut host = accept(&listener);
            assert_eq!(run.line(), "written");
            let mut came = Vec::new();
            host.read_to_end(&mut came).unwrap();
            assert_eq!(came.len(), 1_000_000);
            assert_eq!(run.end().0, Some(0));
        }
    });
}

#[test]
fn the_address_of_the_metrics_is_free_while_the_rest_is_delivered() {
    in_sandbox(|| {
        prepare_host();
        let listener = listener();
        let port = listener.local_addr().unwrap().port();
        let script = format!("exec cat /dev/zero >/dev/tcp/{HOST}/{port}");
        let run = Run::new(&["--metrics", "9188"], &script);
        let mut host = accept(&listener);
        let guest = run.child.id();
        let before = Cell::new(None);
        wait_until("the gateway holds what the host does not take", || {
            let flow = &run.stat(guest)[0]["flows"][0];
            let held = flow["recv_queue_bytes"].as_u64().filter(|n| *n > 0);
            let moved = held.and(flow["bytes_out"].as_u64());
            moved.is_some() && before.replace(moved) == moved
        });
        assert!(TcpListener::bind("127.0.0.1:9188").is_err(), "it is served");
        signal(guest, "KILL");
        wait_until("the address is free", || TcpListener::bind("127.0.0.1:9188").is_ok());
        assert!(!marked().is_empty(), "the gateway has something to deliver");
        assert!(std::io::copy(&mut host, &mut std::io::sink()).unwrap() > 0);
        assert_eq!(run.end().1, Some(9));
    });
}

#[test]
fn answers_that_a_published_server_sent_before_its_end_arrive() {
    in_sandbox(|| {
        prepare_host();
        let server =
            "import os, socket; s = socket.create_server(('0.0.0.0', 80)); print('up', flush=True)
c = s.accept()[0]; c.recv(1); c.sendall(bytes(1000000)); os._exit(5)";
        // From the host's loopback by splicing, from another address by the relay.
        for to in ["127.0.0.1:8089", "192.0.2.1:8089"] {
            let script = format!("exec python3 -c \"{server}\"");
            let mut run = Run::new(&["--publish", "8089:80"], &script);
            assert_eq!(run.line(), "up");
            let mut client = patient(TcpStream::connect(to).unwrap());
            client.write_all(b"?").unwrap();
            let mut came = Vec::new();
            client.read_to_end(&mut came).unwrap();
            assert_eq!(came.len(), 1_000_000, "{to}");
            drop(client);
            assert_eq!(run.end().0, Some(5));
        }
    });
}

/// Bytes of which each says where in the stream it is.
fn pattern(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|n| (n % 251) as u8 ^ (n >> 16) as u8).collect()
}

#[test]
fn flows_go_on_after_a_gateway_was_stopped_and_nothing_is_lost() {
    in_sandbox(|| {
        prepare_host();
        let mut guest = Guest::new();
        let line = ["--config-net", "-a", "10.9.0.2", "-n", "24", "-g", "10.9.0.1"];
        let gateway = detached(&[&line[..], &[&guest.pid()]].concat());
        let (listener, namespace) = (listener(), namespace(&guest));
        let to = listener.local_addr().unwrap();
        let inside = patient(namespace.run(|| TcpStream::connect(to)).unwrap());
        let outside = accept(&listener);
        exchange(&inside, &outside);
        stop(gateway);
        let begun = thread::spawn(move || namespace.run(|| TcpStream::connect(to)));
        let sent = pattern(20_000_000);
        thread::scope(|scope| {
            let ends = [(&inside, &outside), (&outside, &inside)];
            let receivers: Vec<_> = ends
                .into_iter()
                .map(|(mut from, mut to)| {
                    let sent = &sent;
                    scope.spawn(move || {
                        from.write_all(sent).unwrap();
                        from.shutdown(Shutdown::Write).unwrap();
                    });
                    scope.spawn(move || {
                        let mut came = Vec::new();
                        to.read_to_end(&mut came).unwrap();
                        came
                    })
                })
                .collect();
            // Some retransmissions of both sides.
            thread::sleep(Duration::from_secs(3));
            signal(gateway, "CONT");
            for receiver in receivers {
                assert!(receiver.join().unwrap() == sent, "what was accepted arrives");
            }
        });
        let late = begun.join().unwrap().expect("one that was begun meanwhile exists");
        exchange(&late, &accept(&listener));
        guest.end();
        wait_until("the gateway ends with its guest", || !is_running(gateway));
    });
}

/// Writes until nothing is taken for a while; the bytes.
fn write_until_full(stream: &mut TcpStream) -> usize {
    stream.set_write_timeout(Some(Duration::from_millis(500))).unwrap();
    let (buffer, mut bytes) = (vec![7; 1 << 20], 0);
    loop {
        match stream.write(&buffer) {
            Ok(n) => bytes += n,
            Err(e) if e.kind() == ErrorKind::WouldBlock => return bytes,
            Err(e) => panic!("{e}"),
        }
    }
}

fn resident_bytes(pid: u32) -> usize {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() << 10
}

#[test]
fn a_stopped_program_stops_only_its_writer() {
    in_sandbox(|| {
        prepare_host();
        let listener = listener();
        let port = listener.local_addr().unwrap().port();
        let script = format!("exec 3<>/dev/tcp/{HOST}/{port}; echo up; exec wc -c <&3");
        let mut run = Run::new(&[], &script);
        let mut host = accept(&listener);
        assert_eq!(run.line(), "up");
        let gateway = run.gateway(run.child.id());
        stop(run.child.id());
        let taken = write_until_full(&mut host);
        assert!(taken > 0 && taken < 64 << 20, "{taken}");
        assert!(resident_bytes(gateway) < 100 << 20, "{}", resident_bytes(gateway));
        let to = SocketAddr::new(HOST.parse().unwrap(), port);
        let other = namespace_of(run.child.id()).run(|| TcpStream::connect(to)).unwrap();
        exchange(&other, &accept(&listener));
        drop(other);
        signal(run.child.id(), "CONT");
        host.shutdown(Shutdown::Write).unwrap();
        assert_eq!(run.line().trim(), taken.to_string(), "all of it arrives");
        let (status, _, said) = run.end();
        assert_eq!((status, said.as_str()), (Some(0), ""));
    });
}

#[test]
fn a_disk_that_fills_ends_the_capture_of_a_run_and_not_the_program() {
    in_sandbox(|| {
        prepare_host();
        let listener = listener();
        let port = listener.local_addr().unwrap().port();
        let folder = Scratch::new("small-disk");
        fs::create_dir(&folder.0).unwrap();
        // It waits for the answer to all.
        let program = format!(
            "exec 3<>/dev/tcp/{HOST}/{port}; head -c 1000000 /dev/zero >&3; read line <&3; exit 5"
        );
        let script = "mount -t tmpfs -o size=64k none $1 || exit 77; \
                      exec $0 run --quiet --allow $3 --pcap $1/pcap -- bash -c \"$2\"";
        let child = Command::new("unshare")
            .args(["--mount", "--propagation", "private", "sh", "-c", script, FULMAR])
            .args([folder.text(), program, HOST.to_owned()])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("unshare(1)");
        let server = thread::spawn(move || {
            let mut client = accept(&listener);
            let mut all = vec![0; 1_000_000];
            client.read_exact(&mut all).expect("far more than the disk takes");
            client.write_all(b"thanks\n").unwrap();
        });
        let output = child.wait_with_output().unwrap();
        let said = text(&output.stderr);
        if output.status.code() == Some(77) {
            return crate::support::skip("a_disk_that_fills_ends_the_capture_of_a_run", &said);
        }
        server.join().unwrap();
        assert_eq!(output.status.code(), Some(5), "the program's own: {said}");
        let sentence = "fulmar run: the capture ended: No space left on device (os error 28); \
                        the traffic is not affected\n";
        assert_eq!(said, sentence);
    });
}
