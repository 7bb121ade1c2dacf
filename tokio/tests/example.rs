//! The example `proxy_any` as a program, whose guest is the kernel of a namespace.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus};
use std::thread;
use std::time::{Duration, Instant};

use fulmar_testbed::namespace::{self, ip};

const TEST: &str = "the_proxy_of_all_connections_serves_a_guest";
/// Set in the process that is the guest.
const GUEST: &str = "FULMAR_GUEST";
const SERVER: &str = "192.0.2.7:80";
const CLOSED: &str = "192.0.2.7:81";
const BYTES: usize = 1 << 20;
const PATIENCE: Duration = Duration::from_secs(60);

#[test]
fn the_proxy_of_all_connections_serves_a_guest() {
    namespace::run(TEST, Some("/dev/net/tun"), || {
        if std::env::var_os(GUEST).is_some() { guest() } else { host() }
    });
}

/// A program that ends with the test.
struct Program(Child);

impl Program {
    fn end(&mut self, what: &str) -> ExitStatus {
        until(what, || self.0.try_wait().unwrap().is_some());
        self.0.wait().unwrap()
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The program that cargo has built from the example, before it runs all tests of this package.
fn proxy_any() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let path = test.parent().and_then(|deps| deps.parent()).unwrap().join("examples/proxy_any");
    let how = "cargo build -p fulmar-tokio --example proxy_any";
    assert!(path.is_file(), "{} is missing: {how}", path.display());
    path
}

fn pattern(start: usize) -> Vec<u8> {
    (start..start + BYTES).map(|i| (i ^ (i >> 8) ^ (i >> 16)) as u8).collect()
}

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let started = Instant::now();
    while !is_so() {
        assert!(started.elapsed() < PATIENCE, "in vain: {what}");
        thread::sleep(Duration::from_millis(10));
    }
}

fn has_tun() -> bool {
    ip("-o link").contains(" tun0:")
}

fn namespace_of(process: &str) -> Option<PathBuf> {
    std::fs::read_link(format!("/proc/{process}/ns/net")).ok()
}

/// Sends and receives at once, as two threads.
fn exchange(mut stream: TcpStream, sent: Vec<u8>, expected: &[u8]) {
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut writer = stream.try_clone().unwrap();
    let sender = thread::spawn(move || {
        writer.write_all(&sent).unwrap();
        writer.shutdown(Shutdown::Write).unwrap();
    });
    let mut received = Vec::new();
    stream.read_to_end(&mut received).unwrap();
    assert!(received == expected, "{} bytes", received.len());
    sender.join().unwrap();
}

fn host() {
    ip("link set lo up");
    ip("addr add 192.0.2.7/32 dev lo");
    let listener = TcpListener::bind(SERVER).unwrap();
    let server = thread::spawn(move || {
        exchange(listener.accept().unwrap().0, pattern(BYTES), &pattern(0));
    });
    let mut proxy = Program(Command::new(proxy_any()).spawn().unwrap());
    until("the program makes tun0", has_tun);
    let mut guest = Command::new("unshare");
    guest.arg("-n").arg(std::env::current_exe().unwrap()).args(["--exact", TEST, "--nocapture"]);
    let mut guest = Program(guest.env(GUEST, "1").spawn().unwrap());
    let process = guest.0.id().to_string();
    let own = namespace_of("self");
    until("the guest has a namespace", || namespace_of(&process).is_some_and(|n| Some(n) != own));
    ip(&format!("link set tun0 netns {process}"));
    assert!(guest.end("the guest ends").success());
    server.join().unwrap();
    // The device goes with the guest's namespace.
    assert!(!proxy.end("the program ends").success());
}

fn guest() {
    until("tun0 arrives", has_tun);
    ip("addr add 10.9.0.1/24 dev tun0");
    ip("link set tun0 up");
    ip("route add default dev tun0");
    exchange(TcpStream::connect(SERVER).unwrap(), pattern(0), &pattern(BYTES));
    let e = TcpStream::connect(CLOSED).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::ConnectionRefused);
}
