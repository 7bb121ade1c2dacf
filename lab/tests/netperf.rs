//! netperf's two ends on fulmar and on the kernel, in a sandbox.

#[path = "../../cli/tests/support/mod.rs"]
mod support;

use std::io;
use std::process::{Child, Command};
use std::thread;
use std::time::{Duration, Instant};
use support::{PATIENCE, assert_success, fulmar, in_sandbox, run, skip, text, wait};

const FULMAR: &str = env!("CARGO_BIN_EXE_fulmar-lab");

/// A TAP of its own for fulmar's end of a netperf test.
const NETPERF_TAP: &str = "--device tap:fulmar8 --addr 10.79.0.2/24 --peer-addr 10.79.0.1/24";

/// A netserver; it goes with a test that fails.
struct Netserver(Option<Child>);

impl Netserver {
    fn id(&self) -> u32 {
        self.0.as_ref().expect("it runs").id()
    }
}

impl Drop for Netserver {
    fn drop(&mut self) {
        if let Some(mut child) = self.0.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Starts a netserver and waits until it listens.
fn netserver(arguments: &str) -> Netserver {
    let mut child = fulmar(&format!("netserver {arguments}")).spawn().expect("it starts");
    let mut line = String::new();
    let err = child.stderr.as_mut().expect("a pipe");
    io::BufRead::read_line(&mut io::BufReader::with_capacity(1, err), &mut line)
        .expect("it speaks");
    let server = Netserver(Some(child));
    assert!(line.starts_with("netserver: listening on "), "{line}");
    server
}

fn end_netserver(mut server: Netserver) {
    let id = server.id().to_string();
    assert!(Command::new("kill").args(["-INT", &id]).status().expect("kill").success());
    let output = wait(server.0.take().expect("it runs"));
    assert_success(&output);
    assert_eq!(text(&output.stderr), "", "it had nothing to complain about");
}

/// Whether a process takes SIGINT itself: it is blocked, for a thread that waits for it (proc(5)).
fn catches_interrupts(id: &str) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{id}/status")).expect("it runs");
    let blocked = status.lines().find_map(|l| l.strip_prefix("SigBlk:")).expect("a mask");
    u64::from_str_radix(blocked.trim(), 16).expect("hexadecimal") & 2 != 0
}

/// One short run of every test; counts and not speeds are looked at.
fn every_netperf_test(client: &str) {
    for (test, length, units) in [
        ("TCP_STREAM", "-3000000", "10^6bits/s"),
        ("TCP_MAERTS", "-3000000", "10^6bits/s"),
        ("TCP_SENDFILE", "-3000000", "10^6bits/s"),
        ("TCP_RR", "-200", "Trans/s"),
        ("TCP_CRR", "-50", "Trans/s"),
        ("TCP_CC", "-50", "Trans/s"),
        ("UDP_STREAM", "1", "10^6bits/s"),
        ("UDP_RR", "1", "Trans/s"),
    ] {
        let keys = "THROUGHPUT,THROUGHPUT_UNITS,LOCAL_CPU_METHOD";
        let line = format!("netperf {client} -c -C -t {test} -l {length} -- -k {keys}");
        let output = run(&line);
        assert_success(&output);
        let out = text(&output.stdout);
        let of = |key: &str| out.lines().find_map(|l| l.strip_prefix(key)).unwrap_or_default();
        assert!(of("THROUGHPUT=").parse::<f64>().is_ok_and(|n| n > 0.0), "{test}: {out}");
        assert_eq!(of("THROUGHPUT_UNITS="), units, "{test}");
        assert_eq!(of("LOCAL_CPU_METHOD="), "S", "{test}");
    }
}

fn has_tap(name: &str) -> bool {
    match std::fs::OpenOptions::new().read(true).write(true).open("/dev/net/tun") {
        Ok(_) => true,
        Err(e) => {
            skip(name, &format!("/dev/net/tun: {e}"));
            false
        }
    }
}

#[test]
fn netperf_on_the_kernel_measures_fulmar_over_a_tap() {
    in_sandbox(|| {
        if has_tap("netperf_on_the_kernel_measures_fulmar_over_a_tap") {
            let server = netserver(NETPERF_TAP);
            every_netperf_test("--stack kernel -H 10.79.0.2");
            end_netserver(server);
        }
    });
}

/// What the stack of a running program has counted.
fn counted(server: &Netserver, name: &str) -> u64 {
    // A stack whose threads do not run for two seconds is passed over: once more.
    let mut tries = (0..30).flat_map(|_| fulmar_cli::stat::documents());
    let document = tries.find(|d| d["pid"] == server.id()).expect("its stack answers");
    document["counters"][name].as_u64().expect("a count")
}

/// Bytes that came into posted buffers of a running program, and reads that posted theirs.
fn placed(server: &Netserver) -> (u64, u64) {
    (counted(server, "placed_bytes"), counted(server, "placed_reads"))
}

#[test]
fn netserver_receives_into_posted_buffers_if_asked_to_and_only_then() {
    in_sandbox(|| {
        if !has_tap("netserver_receives_into_posted_buffers_if_asked_to_and_only_then") {
            return;
        }
        let server = netserver(NETPERF_TAP);
        for (test, asked) in [("TCP_STREAM", ""), ("TCP_STREAM", "-A"), ("TCP_SENDFILE", "-A")] {
            let before = placed(&server);
            let line = "netperf --stack kernel -H 10.79.0.2 -v 2 -l -10000000 -t";
            let output = run(&format!("{line} {test} -- -m 16K {asked}"));
            assert_success(&output);
            let after = placed(&server);
            // A plain read may post its buffer, too; then none was posted ahead.
            let is_ahead = after.0 > before.0 && after.1 == before.1;
            assert_eq!(is_ahead, asked == "-A", "{test} {asked}: {before:?} {after:?}");
            let out = text(&output.stdout);
            assert_eq!(out.contains("received into posted buffers (-A)"), asked == "-A", "{out}");
        }
        end_netserver(server);
    });
}

#[test]
fn netperf_on_fulmar_measures_the_kernel_over_a_tap() {
    in_sandbox(|| {
        if has_tap("netperf_on_fulmar_measures_the_kernel_over_a_tap") {
            let server = netserver("--stack kernel");
            every_netperf_test(&format!("{NETPERF_TAP} -H 10.79.0.1"));
            end_netserver(server);
        }
    });
}

#[test]
fn netperf_prints_netperfs_table() {
    in_sandbox(|| {
        let server = netserver("--stack kernel -L 127.0.0.1");
        let output = run("netperf --stack kernel -H 127.0.0.1 -t TCP_RR -l -20 -i 3,3 -- -r 5,7");
        assert_success(&output);
        let out = text(&output.stdout);
        assert!(out.starts_with("MIGRATED TCP REQUEST/RESPONSE TEST from 0.0.0.0"), "{out}");
        assert!(out.contains("\nbytes  Bytes  bytes    bytes   secs.    per sec   \n\n"), "{out}");
        assert!(out.contains(" 5        7       "), "{out}");
        end_netserver(server);
    });
}

#[test]
fn netperf_without_a_netserver_says_what_to_do() {
    in_sandbox(|| {
        let output = run("netperf -P 0 -H 10.77.0.1");
        assert_eq!(output.status.code(), Some(2));
        let err = text(&output.stderr);
        assert!(err.contains("cannot reach a netserver at 10.77.0.1:12865"), "{err}");
        assert_eq!(err.lines().count(), 1, "{err}");
    });
}

#[test]
fn an_interrupted_netperf_ends_and_leaves_the_server_in_order() {
    in_sandbox(|| {
        let server = netserver("--stack kernel");
        let client = fulmar("netperf -P 0 -H 10.77.0.1 -l 60").spawn().expect("it starts");
        let id = client.id().to_string();
        let started = Instant::now();
        while !catches_interrupts(&id) {
            assert!(started.elapsed() < PATIENCE, "it never catches the signal");
            thread::sleep(Duration::from_millis(5));
        }
        // Before the test, in its middle: it ends all the same.
        thread::sleep(Duration::from_millis(500));
        assert!(Command::new("kill").args(["-INT", &id]).status().expect("kill").success());
        let output = wait(client);
        assert_eq!(output.status.code(), Some(130), "{}", text(&output.stderr));
        assert_success(&run("netperf -P 0 -H 10.77.0.1 -t TCP_RR -l -5"));
        end_netserver(server);
    });
}
