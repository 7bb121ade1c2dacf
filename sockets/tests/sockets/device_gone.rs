//! A device that goes away: every call returns ENETDOWN (EPROTO if the process at its other end broke the protocol), no
//! call hangs, the program lives.

use std::io::{self, Read, Write};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use fulmar::stat::Counter;
use fulmar::zero_copy::ZeroCopy;
use fulmar::{Ready, Stack, TcpListener, TcpStream, UdpSocket};

use crate::support::pipe::{Pipe, Plug};
use crate::support::{A, B, PATIENCE, connection, eventually, stack, within};

fn stacks_with_plug() -> (Stack, Stack, Plug) {
    let (a, b) = Pipe::pair();
    let plug = a.plug(&b);
    (stack(1, Box::new(a), |s| s.exit_drain(PATIENCE)), stack(2, Box::new(b), |s| s), plug)
}

fn is_down<T: std::fmt::Debug>(r: io::Result<T>) {
    fails_with(libc::ENETDOWN, r);
}

#[test]
fn a_stack_whose_device_is_gone_says_so() {
    within(|| {
        let (a, _b, plug) = stacks_with_plug();
        assert_eq!(a.failure(), None);
        plug.pull();
        eventually("it has noticed", || a.failure().is_some());
        assert!(a.failure().unwrap().ends_with("is gone"));
    });
}

fn fails_with<T: std::fmt::Debug>(errno: i32, r: io::Result<T>) {
    assert_eq!(r.unwrap_err().raw_os_error(), Some(errno));
}

#[test]
fn blocked_calls_end_and_new_ones_fail() {
    every_call_ends(libc::ENODEV, libc::ENETDOWN);
}

#[test]
fn a_protocol_violation_of_the_link_is_returned_by_every_call() {
    every_call_ends(libc::EPROTO, libc::EPROTO);
}

/// The device is lost with `lost`; blocked calls and new ones fail with `errno`.
fn every_call_ends(lost: i32, errno: i32) {
    within(move || {
        let (a, b, plug) = stacks_with_plug();
        let (c, _s) = connection(&a, &b, 80);
        let listener = TcpListener::bind(&a, (A, 81)).unwrap();
        let udp = UdpSocket::bind(&a, (A, 53)).unwrap();
        let set = a.poll_set().unwrap();
        set.add(&udp, 1, Ready::READABLE).unwrap();
        set.add(&listener, 2, Ready::READABLE).unwrap();
        let (told, tells) = mpsc::channel();
        let mut blocked: Vec<Box<dyn FnMut() -> io::Result<()> + Send>> = Vec::new();
        let mut reader = c.try_clone().unwrap();
        blocked.push(Box::new(move || reader.read(&mut [0; 8]).map(drop)));
        let peeker = c.try_clone().unwrap();
        blocked.push(Box::new(move || peeker.peek(&mut [0; 8]).map(drop)));
        let mut writer = c.try_clone().unwrap();
        blocked.push(Box::new(move || writer.write_all(&vec![0; 64 << 20])));
        let acceptor = listener.try_clone().unwrap();
        blocked.push(Box::new(move || acceptor.accept().map(drop)));
        let receiver = udp.try_clone().unwrap();
        blocked.push(Box::new(move || receiver.recv_from(&mut [0; 8]).map(drop)));
        let peeker = udp.try_clone().unwrap();
        blocked.push(Box::new(move || peeker.peek_from(&mut [0; 8]).map(drop)));
        let other = a.clone();
        blocked.push(Box::new(move || TcpStream::connect(&other, "10.1.0.99:9").map(drop)));
        let count = blocked.len();
        for mut call in blocked {
            let told = told.clone();
            thread::spawn(move || told.send(call()).unwrap());
        }
        let polled = thread::spawn(move || {
            let mut events = Vec::new();
            set.wait(&mut events, None).unwrap();
            assert!(!events.is_empty() && events.iter().all(|e| e.ready.contains(Ready::ERROR)));
        });
        thread::sleep(Duration::from_millis(100));
        plug.pull_with(lost);
        (0..count).for_each(|_| fails_with(errno, tells.recv().unwrap()));
        polled.join().unwrap();

        fails_with(errno, (&c).read(&mut [0; 8]));
        fails_with(errno, (&c).write(b"x"));
        fails_with(errno, c.peek(&mut [0; 8]));
        fails_with(errno, listener.accept());
        fails_with(errno, udp.recv_from(&mut [0; 8]));
        fails_with(errno, udp.send_to(b"x", (B, 53)));
        fails_with(errno, TcpStream::connect(&a, (B, 80)));
        fails_with(errno, TcpListener::bind(&a, (A, 82)));
        fails_with(errno, UdpSocket::bind(&a, (A, 54)));
        // The end waits for nothing that can never come: the drain would last two minutes.
        drop((c, listener, udp, a));
    });
}

#[test]
fn a_wait_after_one_that_no_loss_ends_returns() {
    within(|| {
        let (a, b, plug) = stacks_with_plug();
        let (c, s) = connection(&a, &b, 80);
        let set = a.poll_set().unwrap();
        let set = std::sync::Arc::new(set);
        // It leads, and nothing that it waits for can come.
        let leads = std::sync::Arc::clone(&set);
        let leader = thread::spawn(move || leads.wait(&mut Vec::new(), None).unwrap());
        thread::sleep(Duration::from_millis(100));
        // Bytes that are not all sent.
        c.set_nonblocking(true).unwrap();
        let rest = c.send_owned(vec![7; 64 << 20]).unwrap_err().rest;
        let sent = rest.completion();
        let follower = thread::spawn(move || sent.wait(None));
        thread::sleep(Duration::from_millis(100));
        plug.pull();
        is_down(follower.join().unwrap());
        set.add(&c, 1, Ready::READABLE).unwrap();
        leader.join().unwrap();
        drop((c, s));
    });
}

#[test]
fn a_stack_whose_device_is_gone_is_idle() {
    within(|| {
        let (a, b, plug) = stacks_with_plug();
        let (c, _s) = connection(&a, &b, 80);
        plug.pull();
        is_down((&c).read(&mut [0; 8]));
        let polls = || a.stat().unwrap().count(Counter::RxPolls);
        // What is unfinished may end first.
        eventually("fewer than 50 polls in half a second", || {
            let before = polls();
            thread::sleep(Duration::from_millis(500));
            polls() - before < 50
        });
    });
}
