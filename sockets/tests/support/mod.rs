//! What the tests of the crate share: pairs of stacks, patience, and devices of their own.

#![allow(dead_code, reason = "each test program uses its part")]

pub mod faulty;
pub mod file;
pub mod pipe;
pub mod tasks;

use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use fulmar::device::Device;
use fulmar::tcp::TcpConfig;
use fulmar::{Builder, SocketOptions, Stack, TcpListener, TcpStream, devices};

/// Nothing takes so long unless it hangs, on any machine.
pub const PATIENCE: Duration = Duration::from_secs(240);

/// Runs a test's body, and fails instead of waiting for ever.
pub fn within<T: Send + 'static>(body: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, result) = mpsc::channel();
    let worker = thread::spawn(move || drop(done.send(body())));
    // What it waits for speaks first.
    match result.recv_timeout(PATIENCE + Duration::from_secs(60)) {
        Ok(t) => t,
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("it hangs"),
        Err(mpsc::RecvTimeoutError::Disconnected) => {
            std::panic::resume_unwind(worker.join().expect_err("it panicked"))
        }
    }
}

/// Waits until something is so.
pub fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < PATIENCE, "never: {what}");
        thread::sleep(Duration::from_millis(2));
    }
}

/// Changes options of a connection.
pub fn change(stream: &TcpStream, with: impl FnOnce(&mut SocketOptions)) {
    let mut options = stream.options().unwrap();
    with(&mut options);
    stream.set_options(options).unwrap();
}

pub const A: &str = "10.1.0.1";
pub const B: &str = "10.1.0.2";
pub const B6: &str = "fd01::2";

/// A stack with the addresses of side 1 or 2.
pub fn stack(side: u8, device: Box<dyn Device>, more: impl FnOnce(Builder) -> Builder) -> Stack {
    let builder = Stack::builder()
        .device(device)
        .address(format!("10.1.0.{side}/24").parse().unwrap())
        .address(format!("fd01::{side}/64").parse().unwrap())
        .exit_drain(Duration::from_secs(20))
        .unlisted();
    more(builder).build().unwrap()
}

/// Fills the buffers of both ends, so that some bytes cannot be delivered until the peer reads.
pub fn fill(c: &TcpStream) {
    use std::io::Write;
    c.set_nonblocking(true).unwrap();
    let mut accepted = 0;
    // A receive buffer holds 1 MiB.
    eventually("more is accepted than the peer can hold", || {
        accepted += (&*c).write(&pattern(0, 1 << 20)).unwrap_or(0);
        accepted > 3 << 19
    });
}

/// Two stacks joined by `link`, which know each other's station addresses: datagrams that wait for
/// those beyond a few are lost, here as on Linux.
pub fn acquainted_stacks() -> (Stack, Stack) {
    let (a, b) = stacks();
    meet(&a);
    (a, b)
}

/// Lets side 1 find side 2.
pub fn meet(a: &Stack) {
    a.ping(B.parse().unwrap(), 8, PATIENCE).unwrap();
    a.ping(B6.parse().unwrap(), 8, PATIENCE).unwrap();
}

/// Two stacks joined by `link`.
pub fn stacks() -> (Stack, Stack) {
    stacks_with(|b| b)
}

/// Two stacks joined by `link`, both built with `more`.
pub fn stacks_with(more: impl Fn(Builder) -> Builder) -> (Stack, Stack) {
    let (a, b) = devices::link_pair().unwrap();
    (stack(1, a, &more), stack(2, b, &more))
}

/// Two stacks joined by `link` that repeat nothing and hold nothing back for a limited time, so that
/// what they send can be counted however long a thread is kept from running.
pub fn stacks_without_timeouts() -> (Stack, Stack) {
    let tcp = TcpConfig {
        min_rto: PATIENCE,
        initial_rto: PATIENCE,
        max_rto: PATIENCE,
        cork_timeout: PATIENCE,
        ..TcpConfig::default()
    };
    stacks_with(move |b| b.tcp(tcp))
}

/// A connection from `a` to a port of `b`: both ends.
pub fn connection(a: &Stack, b: &Stack, port: u16) -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind(b, (B, port)).unwrap();
    let client = TcpStream::connect(a, (B, port)).unwrap();
    let (server, from) = listener.accept().unwrap();
    assert_eq!(from, client.local_addr().unwrap());
    (client, server)
}

/// Bytes that tell their place.
pub fn pattern(from: usize, len: usize) -> Vec<u8> {
    (from..from + len).map(|i| (i ^ (i >> 8) ^ (i >> 16)) as u8).collect()
}

/// Fails unless every buffer of these stacks comes home.
pub fn buffers_come_home(stacks: &[&Stack]) {
    buffers_come_home_but(0, stacks);
}

/// As [`buffers_come_home`], but for those that a device keeps for what comes next.
pub fn buffers_come_home_but(posted: usize, stacks: &[&Stack]) {
    let out = || stacks.iter().map(|s| s.stat().unwrap().shard.pool.mbufs_in_use).sum::<usize>();
    let mut last = 0;
    let start = Instant::now();
    while out() > posted {
        assert!(start.elapsed() < PATIENCE / 2, "{last} mbufs stay out");
        last = out();
        thread::sleep(Duration::from_millis(5));
    }
}
