//! A full pool: writers wait or get an error, no accepted byte is lost, and every buffer comes back.

use std::io::{ErrorKind, Read, Write};
use std::thread;
use std::time::Duration;

use fulmar::{Ready, TcpListener, TcpStream};

use crate::support::{
    B, PATIENCE, buffers_come_home, change, connection, pattern, stacks_with, within,
};

/// Room for a few writes only: far less than the send buffers of the connections below.
const TINY: usize = 4 << 20;

#[test]
fn many_writers_of_a_tiny_pool_all_come_through() {
    within(|| {
        const WRITERS: usize = 12;
        const EACH: usize = 3 << 20;
        let (a, b) = stacks_with(|s| s.budget_bytes(TINY));
        let listener = TcpListener::bind(&b, (B, 80)).unwrap();
        let writers: Vec<_> = (0..WRITERS)
            .map(|i| {
                let mut c = TcpStream::connect(&a, (B, 80)).unwrap();
                thread::spawn(move || {
                    c.write_all(&[i as u8]).unwrap();
                    for chunk in pattern(i, EACH).chunks(100_000) {
                        c.write_all(chunk).unwrap();
                    }
                })
            })
            .collect();
        let readers: Vec<_> = (0..WRITERS)
            .map(|_| {
                let (mut s, _) = listener.accept().unwrap();
                thread::spawn(move || {
                    let mut i = [0; 1];
                    s.read_exact(&mut i).unwrap();
                    let mut got = Vec::new();
                    s.read_to_end(&mut got).unwrap();
                    assert!(got == pattern(usize::from(i[0]), EACH), "bytes of {} differ", i[0]);
                })
            })
            .collect();
        writers.into_iter().chain(readers).for_each(|t| t.join().unwrap());
        buffers_come_home(&[&a, &b]);
    });
}

/// Writes until it would have to wait; returns how much went.
fn fill(c: &mut TcpStream) -> usize {
    let mut bytes = 0;
    loop {
        match c.write(&[2; 64 << 10]) {
            Ok(n) => bytes += n,
            Err(e) => {
                assert_eq!(e.kind(), ErrorKind::WouldBlock);
                return bytes;
            }
        }
    }
}

#[test]
fn a_writer_whose_pool_others_have_filled_goes_on_when_they_do() {
    within(|| {
        let (a, b) = stacks_with(|s| s.budget_bytes(TINY));
        let mut greedy = Vec::new();
        for port in 1..20 {
            let (mut c, s) = connection(&a, &b, port);
            c.set_nonblocking(true).unwrap();
            while c.write(&[1; 64 << 10]).is_ok() {}
            greedy.push((c, s));
        }
        let (mut c, mut s) = connection(&a, &b, 80);
        c.set_nonblocking(true).unwrap();
        // Its part it has whatever the others hold; more it has to wait for.
        let part = fill(&mut c);
        assert!(part >= 4096, "{part}");
        // A poll set does not report what a write would not take.
        let set = a.poll_set().unwrap();
        set.add(&c, 0, Ready::WRITABLE).unwrap();
        let mut events = Vec::new();
        let busy = (0..20)
            .filter(|_| {
                let ready = set.wait(&mut events, Some(Duration::ZERO)).unwrap() > 0;
                ready && fill(&mut c) == 0
            })
            .count();
        assert!(busy <= 2, "{busy} times told that it is writable when it was not");
        c.set_nonblocking(false).unwrap();
        c.set_write_timeout(Some(Duration::from_millis(30))).unwrap();
        fill(&mut c);
        c.set_write_timeout(None).unwrap();
        let writer = thread::spawn(move || c.write_all(&pattern(0, 1 << 20)).unwrap());
        thread::sleep(Duration::from_millis(50));
        // The hoarders go: their peers read everything.
        for (c, mut s) in greedy {
            drop(c);
            s.set_read_timeout(Some(PATIENCE)).unwrap();
            s.read_to_end(&mut Vec::new()).unwrap();
        }
        let mut got = Vec::new();
        s.read_to_end(&mut got).unwrap();
        writer.join().unwrap();
        assert!(got.split_off(got.len() - (1 << 20)) == pattern(0, 1 << 20));
        assert!(got.iter().all(|b| *b == 2) && got.len() >= part);
        drop(s);
        buffers_come_home(&[&a, &b]);
    });
}

#[test]
fn a_full_pool_still_takes_datagrams_one_by_one() {
    within(|| {
        let (a, b) = stacks_with(|s| s.budget_bytes(TINY));
        let (mut c, s) = connection(&a, &b, 80);
        change(&c, |o| o.send_buffer = Some(16 << 20));
        c.set_nonblocking(true).unwrap();
        while c.write(&[1; 64 << 10]).is_ok() {}
        let udp = fulmar::UdpSocket::bind(&a, "0.0.0.0:0").unwrap();
        udp.set_write_timeout(Some(Duration::from_millis(20))).unwrap();
        match udp.send_to(&[0; 1000], (B, 53)) {
            Ok(n) => assert_eq!(n, 1000),
            Err(e) => assert_eq!(e.kind(), ErrorKind::WouldBlock),
        }
        udp.set_write_timeout(None).unwrap();
        let sender = thread::spawn(move || udp.send_to(&[0; 1000], (B, 53)).unwrap());
        drop(c);
        let mut s = s;
        s.read_to_end(&mut Vec::new()).unwrap();
        assert_eq!(sender.join().unwrap(), 1000);
        drop(s);
        buffers_come_home(&[&a, &b]);
    });
}
