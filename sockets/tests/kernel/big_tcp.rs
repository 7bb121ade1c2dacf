//! BIG TCP: the kernel sends super-frames above 64 KiB over a veth to a packet socket.

use std::io::{Read, Write};
use std::net;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use fulmar::stat::{Counter, DropReason};
use fulmar::zero_copy::{RecvBuf, ZeroCopy};
use fulmar::{Stack, TcpListener, TcpStream, devices};

use crate::namespace::ip;
use crate::{KERNEL6, OURS6, in_namespace, stack_on};

/// A prime, so that a stream of it hides no shift.
const PERIOD: usize = 1_000_003;

fn period() -> Vec<u8> {
    (0..PERIOD).map(|i| (i * 7 + i / 251) as u8).collect()
}

/// A packet socket at one end of a veth whose ends have super-frames of up to 190,000 bytes.
fn stack() -> Stack {
    ip("link add v0 type veth peer name v1");
    for end in ["v0", "v1"] {
        ip(&format!("link set {end} gso_max_size 190000 gro_max_size 190000"));
        ip(&format!("link set {end} up"));
    }
    ip(&format!("addr add {KERNEL6}/64 dev v0 nodad"));
    std::fs::write("/proc/sys/net/ipv4/tcp_congestion_control", "reno").unwrap();
    stack_on(devices::packet("v1").unwrap())
}

fn count(stack: &Stack, counter: Counter) -> u64 {
    stack.stat().unwrap().count(counter)
}

/// The kernel sends until `stack` has met frames of BIG TCP; `read` reads all and returns how many bytes.
fn kernel_sends(stack: &Stack, read: impl FnOnce(TcpStream, &dyn Fn(usize, &[u8])) -> usize) {
    let listener = TcpListener::bind(stack, (OURS6, 80)).unwrap();
    let is_enough = Arc::new(AtomicBool::new(false));
    let enough = is_enough.clone();
    let sender = std::thread::spawn(move || {
        let mut stream = net::TcpStream::connect((OURS6, 80)).unwrap();
        let (block, mut sent) = (period().repeat(4), 0);
        while !enough.load(Ordering::Relaxed) {
            stream.write_all(&block).unwrap();
            sent += block.len();
        }
        sent
    });
    let expected = period().repeat(3);
    let check = |at: usize, bytes: &[u8]| {
        assert!(bytes == &expected[at % PERIOD..][..bytes.len()], "other bytes behind {at}");
        if count(stack, Counter::BigTcpFrames) > 100 {
            is_enough.store(true, Ordering::Relaxed);
        }
    };
    let received = read(listener.accept().unwrap().0, &check);
    assert_eq!(received, sender.join().unwrap());
    let stat = stack.stat().unwrap();
    assert_eq!(stat.drops(DropReason::FrameTooBig) + stat.drops(DropReason::BadOffload), 0);
}

#[test]
fn super_frames_of_big_tcp_are_taken_whole() {
    in_namespace!(|| {
        kernel_sends(&stack(), |mut stream, check| {
            let (mut buffer, mut received) = (vec![0; 1 << 20], 0);
            loop {
                let n = stream.read(&mut buffer).unwrap();
                if n == 0 {
                    return received;
                }
                check(received, &buffer[..n]);
                received += n;
            }
        });
    });
}

#[test]
fn super_frames_of_big_tcp_come_to_posted_buffers() {
    in_namespace!(|| {
        kernel_sends(&stack(), |stream, check| {
            let post = || stream.recv_posted(RecvBuf::with_capacity(1 << 20)).unwrap();
            let mut posted = std::collections::VecDeque::from([post(), post(), post()]);
            let mut received = 0;
            while let Some(first) = posted.pop_front() {
                let buffer = first.wait().unwrap();
                if buffer.is_empty() {
                    break;
                }
                check(received, &buffer);
                received += buffer.len();
                posted.push_back(post());
            }
            received
        });
    });
}
