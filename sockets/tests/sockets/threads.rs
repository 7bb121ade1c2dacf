//! Many threads: on different sockets, on one socket, and all waiting behind one leader.

use std::io::{Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use fulmar::stat::Counter;
use fulmar::{TcpListener, TcpStream};

use crate::support::{B, buffers_come_home, connection, eventually, pattern, stacks, within};

#[test]
fn sixteen_threads_transfer_over_sixteen_sockets() {
    within(|| {
        const EACH: usize = 2 << 20;
        let (a, b) = stacks();
        let listener = TcpListener::bind(&b, (B, 80)).unwrap();
        let clients: Vec<_> = (0..8)
            .map(|_| {
                let a = a.clone();
                thread::spawn(move || {
                    let mut c = TcpStream::connect(&a, (B, 80)).unwrap();
                    let mut half = c.try_clone().unwrap();
                    let writer = thread::spawn(move || {
                        half.write_all(&pattern(0, EACH)).unwrap();
                        half.shutdown(std::net::Shutdown::Write).unwrap();
                    });
                    let mut got = Vec::new();
                    c.read_to_end(&mut got).unwrap();
                    writer.join().unwrap();
                    assert!(got == pattern(0, EACH));
                })
            })
            .collect();
        let servers: Vec<_> = (0..8)
            .map(|_| {
                let (mut s, _) = listener.accept().unwrap();
                thread::spawn(move || {
                    let mut buf = vec![0; 10_000];
                    loop {
                        match s.read(&mut buf).unwrap() {
                            0 => return,
                            n => s.write_all(&buf[..n]).unwrap(),
                        }
                    }
                })
            })
            .collect();
        clients.into_iter().chain(servers).for_each(|t| t.join().unwrap());
        buffers_come_home(&[&a, &b]);
    });
}

#[test]
fn eight_readers_of_one_socket_get_every_byte_once() {
    within(|| {
        const TOTAL: u64 = 4 << 20;
        let (a, b) = stacks();
        let (mut c, s) = connection(&a, &b, 80);
        let readers: Vec<_> = (0..8)
            .map(|_| {
                let mut s = s.try_clone().unwrap();
                thread::spawn(move || {
                    let mut counts = [0u64; 256];
                    let mut buf = [0; 4099];
                    loop {
                        match s.read(&mut buf).unwrap() {
                            0 => return counts,
                            n => buf[..n].iter().for_each(|x| counts[usize::from(*x)] += 1),
                        }
                    }
                })
            })
            .collect();
        let all: Vec<u8> = (0..TOTAL).map(|i| i as u8).collect();
        all.chunks(7001).for_each(|chunk| c.write_all(chunk).unwrap());
        drop(c);
        let mut counts = [0; 256];
        for r in readers {
            r.join().unwrap().iter().zip(&mut counts).for_each(|(n, sum)| *sum += n);
        }
        assert_eq!(counts, [TOTAL / 256; 256]);
    });
}

#[test]
fn writes_of_eight_threads_to_one_socket_are_whole() {
    within(|| {
        // Larger than the send buffer, so that every write waits in its middle.
        const LEN: usize = 3 << 20;
        let (a, b) = stacks();
        let (c, mut s) = connection(&a, &b, 80);
        let writers: Vec<_> = (1..=8u8)
            .map(|i| {
                let mut c = c.try_clone().unwrap();
                thread::spawn(move || assert_eq!(c.write(&vec![i; LEN]).unwrap(), LEN))
            })
            .collect();
        drop(c);
        let mut buf = vec![0; LEN];
        let mut seen = Vec::new();
        for _ in 0..8 {
            s.read_exact(&mut buf).unwrap();
            assert!(buf.iter().all(|x| *x == buf[0]), "two writes are mixed");
            seen.push(buf[0]);
        }
        assert_eq!(s.read(&mut buf).unwrap(), 0);
        writers.into_iter().for_each(|w| w.join().unwrap());
        seen.sort_unstable();
        assert_eq!(seen, [1, 2, 3, 4, 5, 6, 7, 8]);
    });
}

#[test]
fn a_writer_that_waits_for_its_turn_obeys_its_time_out() {
    within(|| {
        let (a, b) = stacks();
        let (c, mut s) = connection(&a, &b, 80);
        let mut first = c.try_clone().unwrap();
        let blocked = thread::spawn(move || first.write_all(&vec![1; 8 << 20]).unwrap());
        eventually("the first is in the middle of its write", || {
            s.peek(&mut vec![0; 1 << 20]).unwrap() > 100_000
        });
        c.set_write_timeout(Some(Duration::from_millis(30))).unwrap();
        let mut second = c.try_clone().unwrap();
        let e = second.write(b"x").unwrap_err();
        assert_eq!(e.kind(), std::io::ErrorKind::WouldBlock);
        c.set_nonblocking(true).unwrap();
        assert_eq!(second.write(b"x").unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
        let mut all = vec![0; 8 << 20];
        s.read_exact(&mut all).unwrap();
        blocked.join().unwrap();
        second.write_all(b"now").unwrap();
        s.read_exact(&mut [0; 3]).unwrap();
    });
}

#[test]
fn every_follower_of_one_leader_is_woken() {
    within(|| {
        const PAIRS: usize = 32;
        const ROUNDS: u32 = 200;
        let (a, b) = stacks();
        let listener = TcpListener::bind(&b, (B, 80)).unwrap();
        let mut threads = Vec::new();
        for _ in 0..PAIRS {
            let mut c = TcpStream::connect(&a, (B, 80)).unwrap();
            let (mut s, _) = listener.accept().unwrap();
            // Time-outs that strike now and then, so that waiters also leave by themselves.
            c.set_read_timeout(Some(Duration::from_micros(300))).unwrap();
            threads.push(thread::spawn(move || {
                for i in 0..ROUNDS {
                    c.write_all(&i.to_ne_bytes()).unwrap();
                    let mut buf = [0; 4];
                    let mut got = 0;
                    while got < 4 {
                        match c.read(&mut buf[got..]) {
                            Ok(n) => got += n,
                            Err(e) => assert_eq!(e.kind(), std::io::ErrorKind::WouldBlock),
                        }
                    }
                    assert_eq!(u32::from_ne_bytes(buf), i);
                }
            }));
            threads.push(thread::spawn(move || {
                let mut buf = [0; 4];
                for _ in 0..ROUNDS {
                    s.read_exact(&mut buf).unwrap();
                    s.write_all(&buf).unwrap();
                }
            }));
        }
        threads.into_iter().for_each(|t| t.join().unwrap());
    });
}

#[test]
fn a_stack_works_for_itself_when_no_caller_does() {
    within(|| {
        let (a, b) = stacks();
        let (c, s) = connection(&a, &b, 80);
        for round in 0..40u64 {
            // A caller takes the lead from the service thread and resigns again.
            s.set_read_timeout(Some(Duration::from_millis(1 + round % 7))).unwrap();
            assert!((&s).read(&mut [0; 1]).is_err());
            // No thread calls b from here on: its service thread must answer, whatever it slept on.
            thread::sleep(Duration::from_millis(round % 5));
            let echo = a.ping(B.parse().unwrap(), 56, Duration::from_secs(60)).unwrap();
            assert!(echo.rtt < Duration::from_secs(30));
        }
        drop(c);
    });
}

#[test]
fn an_idle_stack_sleeps() {
    within(|| {
        let (a, b) = stacks();
        let (_c, s) = connection(&a, &b, 80);
        let is_over = Arc::new(AtomicBool::new(false));
        let bytes = Arc::new(AtomicU64::new(0));
        let (mut reader, counted) = (s.try_clone().unwrap(), Arc::clone(&bytes));
        let over = Arc::clone(&is_over);
        let blocked = thread::spawn(move || {
            while let Ok(n) = reader.read(&mut [0; 8]) {
                counted.fetch_add(n as u64, Ordering::Relaxed);
                if n == 0 || over.load(Ordering::Relaxed) {
                    return;
                }
            }
        });
        let activity = |of: &fulmar::Stack| {
            let stat = of.stat().unwrap();
            stat.count(Counter::Sleeps) + stat.count(Counter::RxPolls)
        };
        // Timers of the connection's start end first. A caller's own look at a stack lets the service
        // thread take a few turns.
        eventually("fewer than 20 polls in a second", || {
            let before = [activity(&a), activity(&b)];
            thread::sleep(Duration::from_secs(1));
            let after = [activity(&a), activity(&b)];
            before.iter().zip(after).all(|(before, after)| after - before < 20)
        });
        is_over.store(true, Ordering::Relaxed);
        s.shutdown(std::net::Shutdown::Both).unwrap();
        blocked.join().unwrap();
    });
}
