//! TCP in both directions and roles.

use std::io::{ErrorKind, Read, Write};
use std::net::{self, Shutdown};
use std::thread;
use std::time::Duration;

use fulmar::stat::Counter;
use fulmar::{Keepalive, TcpListener, TcpStream};

use crate::namespace::{command, ip};
use crate::support::{buffers_come_home_but, change, eventually, pattern};
use crate::{KERNEL, KERNEL6, OURS, OURS6, POSTED, in_namespace, stack, sys};

const LEN: usize = 8 << 20;

/// Sends one pattern each way at the same time and looks at what comes.
pub fn exchange<S, T>(ours: (S, S), kernels: (T, T), len: usize)
where
    S: Read + Write + Send + 'static,
    T: Read + Write + Send + 'static,
{
    fn send(mut s: impl Write + Send + 'static, seed: usize, len: usize) -> thread::JoinHandle<()> {
        thread::spawn(move || {
            for chunk in pattern(seed, len).chunks(130_001) {
                s.write_all(chunk).unwrap();
            }
        })
    }
    fn receive(
        mut s: impl Read + Send + 'static,
        seed: usize,
        len: usize,
    ) -> thread::JoinHandle<()> {
        thread::spawn(move || {
            let mut got = vec![0; len];
            s.read_exact(&mut got).unwrap();
            assert!(got == pattern(seed, len), "the bytes differ");
        })
    }
    let threads = [
        send(ours.0, 1, len),
        send(kernels.0, 2, len),
        receive(ours.1, 2, len),
        receive(kernels.1, 1, len),
    ];
    threads.into_iter().for_each(|t| t.join().unwrap());
}

#[test]
fn every_byte_arrives_with_the_kernel_as_server() {
    in_namespace!(|| {
        let stack = stack();
        for address in [KERNEL, KERNEL6] {
            let listener = net::TcpListener::bind((address, 80)).unwrap();
            let c = TcpStream::connect(&stack, (address, 80)).unwrap();
            let (s, from) = listener.accept().unwrap();
            assert_eq!(from, c.local_addr().unwrap());
            exchange(
                (c.try_clone().unwrap(), c.try_clone().unwrap()),
                (s.try_clone().unwrap(), s.try_clone().unwrap()),
                LEN,
            );
            drop(c);
            assert_eq!((&s).read(&mut [0; 1]).unwrap(), 0);
        }
        buffers_come_home_but(POSTED, &[&stack]);
    });
}

#[test]
fn every_byte_arrives_with_the_kernel_as_client() {
    in_namespace!(|| {
        let stack = stack();
        for address in [OURS, OURS6] {
            let listener = TcpListener::bind(&stack, (address, 80)).unwrap();
            let c = thread::spawn(move || net::TcpStream::connect((address, 80)).unwrap());
            let (s, from) = listener.accept().unwrap();
            let c = c.join().unwrap();
            assert_eq!(from, c.local_addr().unwrap());
            exchange(
                (s.try_clone().unwrap(), s.try_clone().unwrap()),
                (c.try_clone().unwrap(), c.try_clone().unwrap()),
                LEN,
            );
            drop(c);
            assert_eq!((&s).read(&mut [0; 1]).unwrap(), 0);
        }
        buffers_come_home_but(POSTED, &[&stack]);
    });
}

#[test]
fn a_direction_closes_by_itself_and_the_kernel_shows_sane_states() {
    in_namespace!(|| {
        let stack = stack();
        let listener = net::TcpListener::bind((KERNEL, 80)).unwrap();
        let mut c = TcpStream::connect(&stack, (KERNEL, 80)).unwrap();
        let (mut s, _) = listener.accept().unwrap();
        let port = c.local_addr().unwrap().port();
        let kernel_state = || {
            let all = command("ss", "-Htan");
            let line = all.lines().find(|l| l.contains(&format!("{OURS}:{port}")));
            line.and_then(|l| l.split_whitespace().next()).unwrap_or("none").to_owned()
        };
        assert_eq!(kernel_state(), "ESTAB");
        c.write_all(b"request").unwrap();
        c.shutdown(Shutdown::Write).unwrap();
        let mut request = String::new();
        s.read_to_string(&mut request).unwrap();
        assert_eq!((&*request, &*kernel_state()), ("request", "CLOSE-WAIT"));
        s.write_all(&pattern(0, LEN / 4)).unwrap();
        drop(s);
        let mut answer = Vec::new();
        c.read_to_end(&mut answer).unwrap();
        assert!(answer == pattern(0, LEN / 4));
        drop(c);
        // We closed first, so TIME-WAIT is ours and the kernel forgets the connection.
        eventually("the kernel has forgotten it", || kernel_state() == "none");
        eventually("we wait", || stack.stat().unwrap().shard.time_wait == 1);

        // And the other way round.
        let mut c = TcpStream::connect(&stack, (KERNEL, 80)).unwrap();
        let (s, _) = listener.accept().unwrap();
        let port = c.local_addr().unwrap().port();
        let kernel_state = || {
            let all = command("ss", "-Htan");
            let line = all.lines().find(|l| l.contains(&format!("{OURS}:{port}")));
            line.and_then(|l| l.split_whitespace().next()).unwrap_or("none").to_owned()
        };
        s.shutdown(Shutdown::Write).unwrap();
        assert_eq!(c.read(&mut [0; 1]).unwrap(), 0);
        eventually("our acknowledgement is there", || kernel_state() == "FIN-WAIT-2");
        drop(c);
        eventually("the kernel waits", || kernel_state() == "TIME-WAIT");
        eventually("we have forgotten it", || stack.stat().unwrap().sockets().is_empty());
    });
}

#[test]
fn resets_are_understood_in_both_directions() {
    in_namespace!(|| {
        let stack = stack();
        let listener = net::TcpListener::bind((KERNEL, 80)).unwrap();
        let mut c = TcpStream::connect(&stack, (KERNEL, 80)).unwrap();
        let (s, _) = listener.accept().unwrap();
        sys::reset_on_close(&s);
        drop(s);
        assert_eq!(c.read(&mut [0; 1]).unwrap_err().kind(), ErrorKind::ConnectionReset);
        let c = TcpStream::connect(&stack, (KERNEL, 80)).unwrap();
        let (mut s, _) = listener.accept().unwrap();
        c.set_linger(Some(std::time::Duration::ZERO)).unwrap();
        drop(c);
        assert_eq!(s.read(&mut [0; 1]).unwrap_err().kind(), ErrorKind::ConnectionReset);
        let e = net::TcpStream::connect((OURS, 9)).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::ConnectionRefused);
    });
}

#[test]
fn urgent_bytes_stay_in_line() {
    in_namespace!(|| {
        let stack = stack();
        let listener = TcpListener::bind(&stack, (OURS, 80)).unwrap();
        let c = net::TcpStream::connect((OURS, 80)).unwrap();
        let (mut s, _) = listener.accept().unwrap();
        (&c).write_all(b"before ").unwrap();
        sys::send_urgent(&c, b"now!");
        (&c).write_all(b" after").unwrap();
        drop(c);
        let mut all = String::new();
        s.read_to_string(&mut all).unwrap();
        assert_eq!(all, "before now! after");
    });
}

#[test]
fn an_interface_that_is_removed_ends_every_call() {
    in_namespace!(|| {
        let stack = stack();
        let listener = net::TcpListener::bind((KERNEL, 80)).unwrap();
        let mut c = TcpStream::connect(&stack, (KERNEL, 80)).unwrap();
        let _s = listener.accept().unwrap();
        let ours = TcpListener::bind(&stack, (OURS, 81)).unwrap();
        let reader = thread::spawn(move || c.read(&mut [0; 1]).unwrap_err());
        let acceptor = thread::spawn(move || ours.accept().unwrap_err());
        thread::sleep(std::time::Duration::from_millis(50));
        ip("link del fulmar0");
        for blocked in [reader, acceptor] {
            assert_eq!(blocked.join().unwrap().raw_os_error(), Some(libc::ENETDOWN));
        }
        let e = TcpStream::connect(&stack, (KERNEL, 80)).unwrap_err();
        assert_eq!(e.raw_os_error(), Some(libc::ENETDOWN));
    });
}

#[test]
fn a_hundred_kernel_clients_are_served() {
    in_namespace!(|| {
        let stack = stack();
        let listener = TcpListener::bind(&stack, "[::]:80").unwrap();
        let server = thread::spawn(move || {
            for _ in 0..100 {
                let (mut s, _) = listener.accept().unwrap();
                thread::spawn(move || {
                    let mut all = Vec::new();
                    s.read_to_end(&mut all).unwrap();
                    s.write_all(&all).unwrap();
                });
            }
        });
        let clients: Vec<_> = (0..100usize)
            .map(|i| {
                thread::spawn(move || {
                    let to = if i % 2 == 0 { OURS } else { OURS6 };
                    let mut c = net::TcpStream::connect((to, 80)).unwrap();
                    c.write_all(&pattern(i, 30_000)).unwrap();
                    c.shutdown(Shutdown::Write).unwrap();
                    let mut all = Vec::new();
                    c.read_to_end(&mut all).unwrap();
                    assert!(all == pattern(i, 30_000));
                })
            })
            .collect();
        clients.into_iter().for_each(|c| c.join().unwrap());
        server.join().unwrap();
        eventually("every socket is gone", || stack.stat().unwrap().sockets().is_empty());
        buffers_come_home_but(POSTED, &[&stack]);
    });
}

#[test]
fn a_kernel_peer_answers_keepalive_probes() {
    in_namespace!(|| {
        let stack = stack();
        let listener = net::TcpListener::bind((KERNEL, 80)).unwrap();
        let mut c = TcpStream::connect(&stack, (KERNEL, 80)).unwrap();
        let (mut s, _) = listener.accept().unwrap();
        let keepalive = Keepalive { idle: Duration::ZERO, interval: Duration::ZERO, count: 3 };
        change(&c, |o| o.keepalive = Some(keepalive));
        eventually("more probes than may go unanswered", || {
            stack.stat().unwrap().count(Counter::TcpKeepaliveProbes) > 5
        });
        c.write_all(b"alive").unwrap();
        s.read_exact(&mut [0; 5]).unwrap();
    });
}
