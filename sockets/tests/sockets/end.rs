//! The end of stacks and sockets: what was accepted is delivered, what is dropped is gone.

use std::io::{Read, Write};
use std::thread;
use std::time::Duration;

use fulmar::devices::Impairments;
use fulmar::{Stack, TcpListener, TcpStream, UdpSocket};

use crate::support::pipe::Pipe;
use crate::support::{
    A, B, PATIENCE, connection, eventually, fill, pattern, stack, stacks, within,
};

/// The sum is what counts: the reader sees everything and the end.
fn read_all(mut s: TcpStream) -> thread::JoinHandle<Vec<u8>> {
    thread::spawn(move || {
        let mut got = Vec::new();
        s.read_to_end(&mut got).unwrap();
        got
    })
}

#[test]
fn a_stack_lives_as_long_as_its_sockets() {
    within(|| {
        let (a, b) = stacks();
        let (mut c, s) = connection(&a, &b, 80);
        drop((a, b));
        let reader = read_all(s);
        c.write_all(&pattern(0, 1 << 20)).unwrap();
        drop(c);
        assert!(reader.join().unwrap() == pattern(0, 1 << 20));
    });
}

#[test]
fn all_accepted_bytes_are_delivered_over_a_slow_device() {
    within(|| {
        let (p, q) = Pipe::pair();
        let a = stack(1, Box::new(p), |s| s);
        // No peer will acknowledge the FIN of `b`.
        let b = stack(2, Box::new(q), |s| s.exit_drain(Duration::from_millis(10)));
        let (mut c, s) = connection(&a, &b, 80);
        let reader = read_all(s);
        c.write_all(&pattern(0, 3 << 20)).unwrap();
        drop(c);
        drop(a);
        assert!(reader.join().unwrap() == pattern(0, 3 << 20));
        drop(b);
    });
}

#[test]
fn a_reset_at_the_end_leaves_a_device_that_holds_frames_back() {
    within(|| {
        let (d, e) = fulmar::devices::link_pair().unwrap();
        let late = Impairments { delay: Duration::from_millis(30), ..Impairments::default() };
        let d = fulmar::devices::impaired(d, 1, &late, &Impairments::default());
        let (a, b) = (stack(1, d, |s| s), stack(2, e, |s| s));
        let (c, mut s) = connection(&a, &b, 80);
        c.set_linger(Some(Duration::ZERO)).unwrap();
        drop((c, a));
        let gone = s.read(&mut [0]).unwrap_err();
        assert_eq!(gone.kind(), std::io::ErrorKind::ConnectionReset);
    });
}

#[test]
fn the_end_of_a_stack_waits_no_longer_than_it_says() {
    within(|| {
        let (d, e) = fulmar::devices::link_pair().unwrap();
        let a = stack(1, d, |s| s.exit_drain(Duration::from_millis(50)));
        let b = stack(2, e, |s| s);
        let (c, s) = connection(&a, &b, 80);
        fill(&c);
        let start = std::time::Instant::now();
        drop(c);
        drop(a);
        assert!(start.elapsed() >= Duration::from_millis(50), "nobody reads, so it waits in vain");
        drop(s);
    });
}

#[test]
fn closing_a_stack_returns_whether_all_data_was_delivered_and_its_end_does_not_wait() {
    within(|| {
        let (d, e) = fulmar::devices::link_pair().unwrap();
        let (a, b) = (stack(1, d, |s| s.exit_drain(Duration::from_secs(3600))), stack(2, e, |s| s));
        let (c, s) = connection(&a, &b, 80);
        fill(&c);
        let late = a.close(Duration::from_millis(20)).unwrap_err();
        assert_eq!(late.kind(), std::io::ErrorKind::TimedOut);
        let mut refused = &c;
        assert!(refused.write(b"x").is_err());
        let reader = read_all(s);
        a.close(Duration::MAX).unwrap();
        assert!(!reader.join().unwrap().is_empty());
        let (d, e) = fulmar::devices::link_pair().unwrap();
        let (a, b) = (stack(1, d, |s| s.exit_drain(Duration::from_secs(3600))), stack(2, e, |s| s));
        let (c, _s) = connection(&a, &b, 80);
        fill(&c);
        a.close(Duration::from_millis(20)).unwrap_err();
        drop((c, a));
    });
}

#[test]
fn a_call_that_waits_for_a_socket_fails_when_its_stack_is_closed() {
    within(|| {
        let (a, _b) = stacks();
        let listener = TcpListener::bind(&a, (A, 80)).unwrap();
        let udp = UdpSocket::bind(&a, (A, 53)).unwrap();
        let accepts = thread::spawn(move || listener.accept().err());
        let receives = thread::spawn(move || udp.recv_from(&mut [0; 8]).err());
        // Both wait by then, or come to a closed socket: they end either way.
        thread::sleep(Duration::from_millis(50));
        a.close(PATIENCE).unwrap();
        assert!(accepts.join().unwrap().is_some());
        assert!(receives.join().unwrap().is_some());
    });
}

#[test]
fn threads_and_descriptors_end_with_their_stack() {
    within(|| {
        let count = |what: &str| std::fs::read_dir(format!("/proc/self/{what}")).unwrap().count();
        // Other tests run beside this one: only a leak grows with the number of rounds.
        let before = (count("fd"), count("task"));
        for _ in 0..100 {
            let (a, b) = stacks();
            let (c, s) = connection(&a, &b, 80);
            let set = a.poll_set().unwrap();
            drop((set, s, c, a, b));
        }
        eventually("they are gone", || {
            let now = (count("fd"), count("task"));
            now.0 < before.0 + 80 && now.1 < before.1 + 80
        });
    });
}

#[test]
fn ends_of_connections_in_every_state_leave_nothing() {
    within(|| {
        let (a, b) = stacks();
        let gone = |s: &Stack| eventually("no socket", || s.stat().unwrap().sockets().is_empty());
        for port in 1..=40u16 {
            let listener = TcpListener::bind(&b, (B, port)).unwrap();
            let mut c = TcpStream::connect(&a, (B, port)).unwrap();
            let accepted = (port % 2 == 0).then(|| listener.accept().unwrap().0);
            if port % 3 == 0 {
                c.write_all(&pattern(0, 5000)).unwrap();
            }
            if port % 5 == 0 {
                c.shutdown(std::net::Shutdown::Both).unwrap();
            }
            match port % 4 {
                0 => drop((c, listener, accepted)),
                1 => drop((listener, accepted, c)),
                2 => drop((accepted, c, listener)),
                _ => drop((listener, c, accepted)),
            }
        }
        gone(&a);
        gone(&b);
        crate::support::buffers_come_home(&[&a, &b]);
    });
}

#[test]
fn a_stack_reaches_its_own_addresses_until_the_end() {
    within(|| {
        let (a, _b) = stacks();
        assert_eq!(a.ping(A.parse().unwrap(), 56, PATIENCE).unwrap().bytes, 56);
        let listener = TcpListener::bind(&a, (A, 80)).unwrap();
        let mut c = TcpStream::connect(&a, (A, 80)).unwrap();
        let (s, peer) = listener.accept().unwrap();
        assert_eq!(peer.ip().to_string(), A);
        let reader = read_all(s);
        c.write_all(&pattern(0, 5 << 20)).unwrap();
        drop(c);
        assert!(reader.join().unwrap() == pattern(0, 5 << 20));
    });
}
