//! A gateway as its users see it: attaching, detaching, its end, containment; and programs under `fulmar run`.
//! What the bytes do is tested in gateway.

use std::collections::HashSet;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use crate::FULMAR;
use crate::guest::{Guest, Scratch, detached, is_running, pasta, wait_until};
use crate::support::{PATIENCE, in_sandbox, text};
use fulmar_gateway::netns::Netns;

fn refusal(arguments: &[&str]) -> String {
    let output = pasta(arguments);
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    text(&output.stderr)
}

fn run_program(arguments: &[&str]) -> Output {
    Command::new(FULMAR).arg("run").args(arguments).output().expect("it starts")
}

#[test]
fn a_guest_is_configured_and_the_gateway_ends_with_it() {
    in_sandbox(|| {
        let mut guest = Guest::new();
        let line = ["--config-net", "-I", "ns0", "-a", "10.9.0.2", "-n", "24", "-g", "10.9.0.1"];
        let gateway = detached(&[&line, ["-m", "9000", &guest.pid()].as_slice()].concat());
        let interfaces = guest.see("cat /proc/net/dev");
        assert!(interfaces.contains("ns0:"), "{interfaces}");
        let routes = guest.see("cat /proc/net/route");
        assert!(routes.contains("ns0\t00000000\t0100090A"), "{routes}");
        assert!(is_running(gateway));
        guest.end();
        wait_until("the gateway ends with its guest", || !is_running(gateway));
    });
}

fn tasks(gateway: u32) -> Vec<PathBuf> {
    let all = fs::read_dir(format!("/proc/{gateway}/task")).unwrap();
    all.map(|task| task.unwrap().path()).collect()
}

fn assert_contained(task: &Path) {
    let status = fs::read_to_string(task.join("status")).unwrap();
    for line in
        ["CapEff:\t0000000000000000", "CapPrm:\t0000000000000000", "NoNewPrivs:\t1", "Seccomp:\t2"]
    {
        assert!(status.contains(line), "{line}\n{status}");
    }
    // The root directory may be a thread's own.
    let root: Vec<_> = fs::read_dir(task.join("root/")).unwrap().collect();
    assert!(root.is_empty(), "{root:?}");
}

/// The option for two queues, on a machine where they are allowed.
fn two_queues() -> &'static [&'static str] {
    let cpus = thread::available_parallelism().map_or(1, usize::from);
    if cpus > 1 { &["--queues", "2"] } else { &[] }
}

#[test]
fn every_thread_of_a_gateway_is_contained() {
    in_sandbox(|| {
        let guest = Guest::new();
        let gateway = detached(&["--config-net", &guest.pid()]);
        let own = tasks(gateway);
        assert!(own.len() >= 2, "auto needs the threads that splice");
        own.iter().for_each(|task| assert_contained(task));
        let other = Guest::new();
        let several = detached(&[&["--config-net"], two_queues(), &[&other.pid()]].concat());
        let more = two_queues().len() / 2;
        wait_until("each queue has its thread", || tasks(several).len() >= own.len() + more);
        tasks(several).iter().for_each(|task| assert_contained(task));
        let streams: HashSet<PathBuf> =
            (0..3).map(|n| fs::read_link(format!("/proc/{gateway}/fd/{n}")).unwrap()).collect();
        assert_eq!(streams, HashSet::from(["/dev/null".into()]));
    });
}

#[test]
fn sigterm_ends_a_gateway_and_its_interface() {
    in_sandbox(|| [&[][..], two_queues()].into_iter().for_each(sigterm_ends));
}

fn sigterm_ends(queues: &[&str]) {
    let guest = Guest::new();
    let mut gateway = Command::new(FULMAR)
        .args(["gateway", "-f", "-d", "--config-net", "-I", "ns0", "-t", "none", "-u", "none"])
        .args(queues)
        .args(["-T", "none", "-U", "none", &guest.pid()])
        .stderr(Stdio::piped())
        .spawn()
        .expect("it starts");
    let mut said = BufReader::new(gateway.stderr.take().unwrap()).lines();
    let up = said.by_ref().map_while(Result::ok).find(|line| line.contains("the network is up"));
    let contained = "no capabilities, no new privileges, only the system calls of the relay";
    assert!(up.is_some_and(|line| line.contains(contained)));
    assert!(guest.see("cat /proc/net/dev").contains("ns0:"));
    let kill = Command::new("kill").arg(gateway.id().to_string()).status();
    assert!(kill.unwrap().success());
    let status = gateway.wait().unwrap();
    assert_eq!(status.code(), Some(0), "{status}");
    wait_until("nothing is left", || !guest.see("cat /proc/net/dev").contains("ns0:"));
}

#[test]
fn queues_without_cpus_are_refused() {
    for number in ["0", "1000", "two"] {
        let output = run_program(&["--queues", number, "--", "true"]);
        let said = text(&output.stderr);
        assert!(!output.status.success() && said.contains("queue"), "{said}");
        assert!(said.contains("CPU"), "{said}");
    }
}

#[test]
fn the_removal_of_the_namespaces_file_ends_the_gateway() {
    in_sandbox(|| {
        let file = Scratch::new("netns");
        let pid = Scratch::new("netns-pid");
        // A bind mount keeps the namespace; mounts need a mount namespace.
        let script = "set -e; touch $1; unshare --net=$1 true; \
                      $0 --pasta --config-net -P $2 --netns $1; umount $1; rm $1";
        let status = Command::new("unshare")
            .args(["--mount", "--propagation", "private", "sh", "-c", script, FULMAR])
            .args([file.text(), pid.text()])
            .output()
            .unwrap();
        if !status.status.success() && text(&status.stderr).contains("ermitted") {
            return crate::support::skip(
                "the_removal_of_the_namespaces_file_ends_the_gateway",
                "no mounts here",
            );
        }
        assert!(status.status.success(), "{}", text(&status.stderr));
        let gateway: u32 = fs::read_to_string(&pid.0).unwrap().trim().parse().unwrap();
        wait_until("the gateway ends with the file", || !is_running(gateway));
    });
}

#[test]
fn an_impossible_set_up_is_refused_with_a_sentence_and_status_1() {
    in_sandbox(|| {
        let guest = Guest::new();
        let gone = refusal(&["--config-net", "4194999"]);
        assert!(
            gone.starts_with("pasta: cannot attach to process 4194999: no such process"),
            "{gone}"
        );
        let own = refusal(&["--config-net", &std::process::id().to_string()]);
        assert!(own.contains("network namespace of this command"), "{own}");
        let missing = refusal(&["--netns", "/nowhere/at/all"]);
        assert!(missing.contains("no such file"), "{missing}");
        let unknown = refusal(&["--nonsense", &guest.pid()]);
        assert!(unknown.starts_with("pasta: unrecognized option '--nonsense'"), "{unknown}");
        let interface = refusal(&["-i", "no-such-if", &guest.pid()]);
        assert!(interface.contains("no interface no-such-if"), "{interface}");
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = taken.local_addr().unwrap().port();
        let spec = format!("127.0.0.1/{port}");
        let refused = refusal(&["--config-net", "-t", &spec, &guest.pid()]);
        assert!(refused.contains(&port.to_string()), "{refused}");
        let interfaces = guest.see("cat /proc/net/dev");
        assert_eq!(interfaces.lines().count(), 3, "nothing but lo is left: {interfaces}");
        let folder = refusal(&["-p", "/nowhere/at/all", &guest.pid()]);
        assert!(folder.contains("cannot write /nowhere/at/all: the directory"), "{folder}");
    });
}

#[test]
fn a_program_of_run_is_itself_in_another_network() {
    in_sandbox(|| {
        let here = fs::read_link("/proc/self/ns/net").unwrap();
        let own = Command::new("id").output().unwrap();
        let script = "id; readlink /proc/self/ns/net; cat /etc/resolv.conf; cat /proc/net/dev; pwd";
        let output = run_program(&["--", "sh", "-c", script]);
        let said = text(&output.stdout);
        assert!(output.status.success(), "{said}{}", text(&output.stderr));
        assert!(said.starts_with(text(&own.stdout).split(' ').next().unwrap()), "{said}");
        assert!(!said.contains(here.to_str().unwrap()), "{said}");
        assert!(said.lines().filter(|l| l.contains(": ")).count() >= 2, "lo and another: {said}");
        assert!(said.contains(std::env::current_dir().unwrap().to_str().unwrap()));
        if Path::new("/etc/resolv.conf").exists() {
            assert!(said.contains("nameserver 169.254.1.1"), "{said}");
            assert!(!fs::read_to_string("/etc/resolv.conf").unwrap().contains("169.254.1.1"));
        }
        assert_eq!(text(&output.stderr), "");
    });
}

#[test]
fn run_ends_as_its_program_does() {
    in_sandbox(|| {
        for summary in [&[][..], &["--summary"]] {
            let run = |script: &str| {
                run_program(&[summary, ["--", "sh", "-c", script].as_slice()].concat())
            };
            assert_eq!(run("exit 7").status.code(), Some(7), "{summary:?}");
            let killed = run("kill -TERM $$");
            assert_eq!(killed.status.signal(), Some(15), "{summary:?} {}", text(&killed.stderr));
            let missing = run_program(&[summary, &["--", "/nowhere/program"]].concat());
            assert_eq!(missing.status.code(), Some(127), "{summary:?}");
            assert!(text(&missing.stderr).contains("program not found"));
            let folder = run_program(&[summary, &["--", "/"]].concat());
            assert_eq!(folder.status.code(), Some(126), "{summary:?}");
        }
        let said = text(&run_program(&["--summary", "--", "true"]).stderr);
        assert!(said.starts_with("network: "), "{said}");
    });
}

#[test]
fn signals_and_input_reach_the_program_of_a_run() {
    in_sandbox(|| {
        for summary in [&[][..], &["--summary"]] {
            let script = "trap 'echo term; exit 3' TERM; read line; echo got $line; while :; do sleep 0.01; done";
            let mut child = Command::new(FULMAR)
                .arg("run")
                .args(summary)
                .args(["--", "sh", "-c", script])
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .stderr(Stdio::null())
                .spawn()
                .unwrap();
            writeln!(child.stdin.as_mut().unwrap(), "hello").unwrap();
            let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
            assert_eq!(lines.next().unwrap().unwrap(), "got hello", "{summary:?}");
            let pid = child.id().to_string();
            assert!(Command::new("kill").arg(&pid).status().unwrap().success());
            assert_eq!(lines.next().unwrap().unwrap(), "term", "{summary:?}");
            assert_eq!(child.wait().unwrap().code(), Some(3), "{summary:?}");
        }
    });
}

#[test]
fn a_gateway_of_a_run_ends_with_the_program() {
    in_sandbox(|| {
        let capture = Scratch::new("pcap");
        // The capture is open in the gateway alone, and the program ends with its input.
        let mut run = Command::new(FULMAR)
            .args(["run", "--pcap", &capture.text(), "--", "cat"])
            .stdin(Stdio::piped())
            .spawn()
            .expect("it starts");
        let is_open = || {
            let processes = fs::read_dir("/proc").unwrap().flatten();
            let files = processes
                .flat_map(|p| fs::read_dir(p.path().join("fd")).into_iter().flatten().flatten());
            files.filter_map(|f| fs::read_link(f.path()).ok()).any(|to| to == capture.0)
        };
        wait_until("the gateway runs", is_open);
        let mode = fs::metadata(&capture.0).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "the packets are for their user alone");
        drop(run.stdin.take());
        assert!(run.wait().unwrap().success());
        wait_until("the gateway ends with the program", || !is_open());
    });
}

/// What `fulmar stat --json` says with these arguments.
fn stat(arguments: &[&str]) -> serde_json::Value {
    let output = Command::new(FULMAR).args(["stat", "--json"]).args(arguments).output().unwrap();
    serde_json::from_slice(&output.stdout).unwrap_or_default()
}

/// The metrics on a port of the loopback interface; nothing while all places are taken.
fn metrics(port: u16) -> String {
    let mut client = TcpStream::connect(("127.0.0.1", port)).unwrap();
    let mut answer = String::new();
    let _ = client.write_all(b"GET /metrics HTTP/1.1\r\n\r\n");
    let _ = client.read_to_string(&mut answer);
    answer
}

#[test]
fn a_contained_gateway_shows_its_flows_to_its_user() {
    in_sandbox(|| {
        let mut guest = Guest::new();
        let line = ["--config-net", "-a", "10.9.0.2", "-n", "24", "-g", "10.9.0.1"];
        // The sandbox has its ports for itself.
        let line = [line.as_slice(), &["--metrics", "9177"]].concat();
        let gateway = detached(&[line.as_slice(), &[&guest.pid()]].concat());
        let refused = refusal(&[line.as_slice(), &[&guest.pid()]].concat());
        assert!(
            refused.contains("metrics on 127.0.0.1:9177") && refused.contains("another program")
        );
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        // The router's address leads to the host's loopback.
        let mut client = Command::new("nsenter")
            .args(["-t", &guest.pid(), "-n", "bash", "-c"])
            .arg(format!("exec 3<>/dev/tcp/10.9.0.1/{port}; echo hello >&3; read line <&3"))
            .spawn()
            .unwrap();
        let (mut host, _) = listener.accept().unwrap();
        let mut line = String::new();
        BufReader::new(host.try_clone().unwrap()).read_line(&mut line).unwrap();
        let found = stat(&[&guest.pid()]);
        let document = &found[0];
        assert_eq!(document["pid"], gateway, "{found}");
        let read: fulmar::stat::Document = serde_json::from_value(document.clone()).unwrap();
        assert_eq!(&serde_json::to_value(&read).unwrap(), document, "nothing of it is lost");
        assert_eq!((read.version, read.pid), (fulmar::stat::VERSION, gateway));
        assert_eq!(document["gateway"]["guest"]["interface"], document["device"]["name"]);
        let flows = document["flows"].as_array().unwrap();
        let tcp = flows.iter().find(|f| f["protocol"] == "tcp").expect("the client's flow");
        assert_eq!(tcp["host"], format!("127.0.0.1:{port}"));
        assert_eq!(tcp["peer"], format!("10.9.0.1:{port}"));
        assert!(tcp["guest"].as_str().unwrap().starts_with("10.9.0.2:"), "{tcp}");
        assert_eq!((&tcp["state"], &tcp["bytes_out"]), (&"open".into(), &6.into()));
        assert!(tcp["rtt_us"].is_number() && tcp["host_rtt_us"].is_number(), "{tcp}");
        assert_eq!(stat(&[&gateway.to_string()])[0]["pid"], gateway);
        // Clients that stall keep neither the relay nor the control socket waiting.
        let stalled: Vec<_> =
            (0..8).map(|_| TcpStream::connect("127.0.0.1:9177").unwrap()).collect();
        assert_eq!(stat(&[&gateway.to_string()])[0]["pid"], gateway);
        drop(stalled);
        let line = r#"fulmar_gateway_flows{protocol="tcp",state="open",direction="out"} 1"#;
        wait_until("the metrics have the flow", || metrics(9177).lines().any(|l| l == line));
        host.write_all(b"bye\n").unwrap();
        assert!(client.wait().unwrap().success(), "the relay goes on");
        guest.end();
        wait_until("the gateway ends with its guest", || !is_running(gateway));
        assert!(stat(&[&gateway.to_string()])[0].is_null(), "nothing answers any more");
    });
}

/// A process of the host's that waits in a mount namespace of its own, as a shell sees it.
fn in_mounts(script: &str, arguments: &[String]) -> Output {
    Command::new("unshare")
        .args(["--mount", "--propagation", "private", "sh", "-c", script, FULMAR])
        .args(arguments)
        .output()
        .expect("unshare(1)")
}

#[test]
fn a_disk_that_fills_ends_the_capture_and_not_the_traffic() {
    in_sandbox(|| {
        let guest = Guest::new();
        let (folder, log) = (Scratch::new("small-disk"), Scratch::new("small-disk-log"));
        fs::create_dir(&folder.0).unwrap();
        let pid = Scratch::new("small-disk-pid");
        // The capture stays readable through the gateway's own descriptor after the namespace of its disk is gone.
        let script = "mount -t tmpfs -o size=64k none $1 || exit 77; \
                      exec $0 --pasta --config-net -a 10.9.0.2 -n 24 -g 10.9.0.1 -p $1/pcap -l $2 -P $3 $4";
        let arguments = [folder.text(), log.text(), pid.text(), guest.pid()];
        let output = in_mounts(script, &arguments);
        if output.status.code() == Some(77) {
            return crate::support::skip("a_disk_that_fills", &text(&output.stderr));
        }
        assert!(output.status.success(), "{}", text(&output.stderr));
        let gateway: u32 = fs::read_to_string(&pid.0).unwrap().trim().parse().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let script = format!("exec 3<>/dev/tcp/10.9.0.1/{port}; head -c 1000000 /dev/zero >&3");
        let mut client = Command::new("nsenter")
            .args(["-t", &guest.pid(), "-n", "bash", "-c", &script])
            .spawn()
            .unwrap();
        let (mut host, _) = listener.accept().unwrap();
        let mut all = Vec::new();
        host.read_to_end(&mut all).unwrap();
        assert_eq!(all.len(), 1_000_000, "far more than the disk");
        assert!(client.wait().unwrap().success());
        let said = || fs::read_to_string(&log.0).unwrap_or_default();
        wait_until("it says so", || said().contains("the capture ended: No space left on device"));
        assert_eq!(said().matches("the capture ended").count(), 1, "once");
        assert!(is_running(gateway));
        drop(guest);
        wait_until("the gateway ends with its guest", || !is_running(gateway));
    });
}

/// A bound socket in a guest.
fn udp_in(guest: &Guest, at: &str) -> UdpSocket {
    let netns = Netns::open(Path::new(&format!("/proc/{}/ns/net", guest.pid()))).unwrap();
    let socket = netns.run(|| UdpSocket::bind(at)).unwrap();
    socket.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    socket
}

/// Asks until an answer comes: what `auto` publishes is there after a look of the gateway.
fn ask(client: &UdpSocket, to: SocketAddr) {
    let started = Instant::now();
    let mut answer = [0; 16];
    loop {
        client.send_to(b"question", to).unwrap();
        match client.recv(&mut answer) {
            Ok(n) => return assert_eq!(&answer[..n], b"answer"),
            Err(_) => assert!(started.elapsed() < PATIENCE, "no answer from {to}"),
        }
    }
}

/// Answers what comes until the value is dropped.
struct Answering(Arc<AtomicBool>, Option<thread::JoinHandle<()>>);

fn answer(socket: UdpSocket) -> Answering {
    let ends = Arc::new(AtomicBool::new(false));
    let is_over = Arc::clone(&ends);
    let server = thread::spawn(move || {
        while !is_over.load(Relaxed) {
            if let Ok((_, from)) = socket.recv_from(&mut [0; 16]) {
                let _ = socket.send_to(b"answer", from);
            }
        }
    });
    Answering(ends, Some(server))
}

impl Drop for Answering {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
        let _ = self.1.take().map(thread::JoinHandle::join);
    }
}

#[test]
fn udp_ports_lead_both_ways_listed_and_looked_up() {
    in_sandbox(|| {
        let own = |at: &str| {
            let socket = UdpSocket::bind(at).unwrap();
            socket.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
            socket
        };
        for (options, from_guest, to_guest) in [
            (["-U", "5301:5300", "-u", "5401:5400"], "127.0.0.1:5301", "127.0.0.1:5401"),
            (["-U", "auto", "-u", "auto"], "127.0.0.1:5300", "127.0.0.1:5400"),
        ] {
            let mut guest = Guest::new();
            let line =
                ["--config-net", "-a", "10.9.0.2", "-n", "24", "-g", "10.9.0.1", "-t", "none"];
            let line = [&line[..], &["-T", "none"], &options].concat();
            let gateway = detached(&[&line[..], &[&guest.pid()]].concat());
            let _on_host = answer(own("127.0.0.1:5300"));
            let _in_guest = answer(udp_in(&guest, "0.0.0.0:5400"));
            ask(&udp_in(&guest, "127.0.0.1:0"), from_guest.parse().unwrap());
            ask(&own("127.0.0.1:0"), to_guest.parse().unwrap());
            guest.end();
            wait_until("the gateway ends with its guest", || !is_running(gateway));
        }
    });
}

#[test]
fn tcp_ports_of_the_guests_loopback_lead_to_the_hosts() {
    in_sandbox(|| {
        for (option, port) in [("5303:5302", 5303), ("auto", 5302)] {
            let mut guest = Guest::new();
            let listener = TcpListener::bind("127.0.0.1:5302").unwrap();
            let line = ["--config-net", "-a", "10.9.0.2", "-n", "24", "-g", "10.9.0.1"];
            let line =
                [&line[..], &["-t", "none", "-u", "none", "-U", "none", "-T", option]].concat();
            let gateway = detached(&[&line[..], &[&guest.pid()]].concat());
            // What `auto` publishes is there after a look of the gateway.
            let script = format!(
                "until exec 3<>/dev/tcp/127.0.0.1/{port}; do sleep 0.05; done; echo hello >&3; cat <&3"
            );
            let mut client = Command::new("nsenter")
                .args(["-t", &guest.pid(), "-n", "bash", "-c", &script])
                .stdout(Stdio::piped())
                .stderr(Stdio::null())
                .spawn()
                .unwrap();
            let (mut host, _) = listener.accept().unwrap();
            let mut line = String::new();
            BufReader::new(host.try_clone().unwrap()).read_line(&mut line).unwrap();
            host.write_all(b"bye").unwrap();
            drop(host);
            let mut answer = String::new();
            client.stdout.take().unwrap().read_to_string(&mut answer).unwrap();
            assert_eq!((line.as_str(), answer.as_str()), ("hello\n", "bye"), "{option}");
            assert!(client.wait().unwrap().success());
            let said = stat(&[&gateway.to_string()]);
            let ports = said[0]["gateway"]["host_ports"].as_array().unwrap();
            let used = ports.iter().find(|p| p["connections"] == 1).expect("it is counted");
            let fields = ["interface", "port", "host_port"].map(|field| used[field].to_string());
            assert_eq!(fields, ["\"lo\"", &port.to_string(), "5302"], "{option}");
            guest.end();
            wait_until("the gateway ends with its guest", || !is_running(gateway));
        }
    });
}

#[test]
fn a_port_of_an_address_that_is_not_there_needs_freebind() {
    in_sandbox(|| {
        let mut guest = Guest::new();
        let line = ["--config-net", "-a", "10.9.0.2", "-n", "24", "-g", "10.9.0.1"];
        let line = [&line[..], &["-t", "203.0.113.9/8080", "-u", "none"]].concat();
        let refused = refusal(&[&line[..], &[&guest.pid()]].concat());
        assert!(refused.contains("the address does not belong to the host"), "{refused}");
        let gateway = detached(&[&line[..], &["--freebind", &guest.pid()]].concat());
        guest.end();
        wait_until("the gateway ends with its guest", || !is_running(gateway));
    });
}
