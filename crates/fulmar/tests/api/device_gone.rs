//! A device that goes away: every call says ENETDOWN, nobody hangs, the program lives.

use std::io::{self, Read, Write};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use fulmar::base::Counter;
use fulmar::{Ready, Stack, TcpListener, TcpStream, UdpSocket};

use crate::support::pipe::{Pipe, Plug};
use crate::support::{A, B, PATIENCE, connection, stack, within};

fn stacks_with_plug() -> (Stack, Stack, Plug) {
    let (a, b) = Pipe::pair();
    let plug = a.plug(&b);
    (stack(1, Box::new(a), |s| s.exit_drain(PATIENCE)), stack(2, Box::new(b), |s| s), plug)
}

fn is_down<T: std::fmt::Debug>(r: io::Result<T>) {
    assert_eq!(r.unwrap_err().raw_os_error(), Some(libc::ENETDOWN));
}

#[test]
fn blocked_calls_end_and_new_ones_fail() {
    within(|| {
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
        plug.pull();
        (0..count).for_each(|_| is_down(tells.recv().unwrap()));
        polled.join().unwrap();

        is_down((&c).read(&mut [0; 8]));
        is_down((&c).write(b"x"));
        is_down(c.peek(&mut [0; 8]));
        is_down(listener.accept());
        is_down(udp.recv_from(&mut [0; 8]));
        is_down(udp.send_to(b"x", (B, 53)));
        is_down(TcpStream::connect(&a, (B, 80)));
        is_down(TcpListener::bind(&a, (A, 82)));
        is_down(UdpSocket::bind(&a, (A, 54)));
        // The end waits for nothing that can never come: the drain would last two minutes.
        drop((c, listener, udp, a));
    });
}

#[test]
fn a_stack_whose_device_is_gone_is_idle() {
    within(|| {
        let (a, b, plug) = stacks_with_plug();
        let (c, _s) = connection(&a, &b, 80);
        plug.pull();
        is_down((&c).read(&mut [0; 8]));
        // What is unfinished may end first.
        thread::sleep(Duration::from_millis(200));
        let before = a.stat().unwrap().count(Counter::RxPolls);
        thread::sleep(Duration::from_millis(500));
        let polls = a.stat().unwrap().count(Counter::RxPolls) - before;
        assert!(polls < 50, "{polls} polls of a device that is gone");
    });
}
