//! Posted buffers over a TAP: where a read lands.

use std::collections::VecDeque;
use std::io::Write;
use std::net;
use std::sync::{Arc, Barrier};
use std::thread::JoinHandle;

use fulmar::stat::Counter;
use fulmar::zero_copy::{RecvBuf, RecvCompletion, ZeroCopy};
use fulmar::{Stack, TcpListener, TcpStream, devices};

use crate::namespace::ip;
use crate::support::buffers_come_home_but;
use crate::{KERNEL, OURS, OURS6, POSTED, in_namespace, stack, stack_on};

/// Bytes after which a stream repeats itself: a prime, so that no block of any size hides a shift.
const PERIOD: usize = 1_000_003;

/// A period of stream `n`. No two bytes that lie less than a period apart and no two streams agree for
/// long.
fn period(n: u64) -> Vec<u8> {
    let mut x = 0x9e37_79b9_7f4a_7c15 ^ (n << 32);
    let mut next = || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        x as u8
    };
    (0..PERIOD).map(|_| next()).collect()
}

/// Sends `total` bytes of stream `n` from the kernel, in writes of `piece` bytes.
fn send(mut stream: net::TcpStream, n: u64, total: usize, piece: usize) -> JoinHandle<()> {
    std::thread::spawn(move || {
        let bytes = period(n).repeat(1 + piece.div_ceil(PERIOD));
        let mut at = 0;
        while at < total {
            let n = piece.min(total - at);
            stream.write_all(&bytes[at % PERIOD..][..n]).unwrap();
            at += n;
        }
    })
}

/// A receiver that keeps buffers posted and looks at every byte.
struct Sink {
    stream: TcpStream,
    posted: VecDeque<RecvCompletion>,
    expected: Vec<u8>,
    received: usize,
}

impl Sink {
    fn new(stream: TcpStream, n: u64, buffers: usize, bytes: usize) -> Sink {
        let expected = period(n).repeat(1 + bytes.div_ceil(PERIOD));
        let mut sink = Sink { stream, posted: VecDeque::new(), expected, received: 0 };
        (0..buffers).for_each(|_| sink.post(RecvBuf::with_capacity(bytes)));
        sink
    }

    fn post(&mut self, buf: RecvBuf) {
        self.posted.push_back(self.stream.recv_posted(buf).unwrap());
    }

    /// Takes a buffer and posts it again; false at the end of the stream, and from then on.
    fn take(&mut self) -> bool {
        let Some(first) = self.posted.pop_front() else { return false };
        let buf = first.wait().unwrap();
        if buf.is_empty() {
            self.posted.clear();
            return false;
        }
        let expected = &self.expected[self.received % PERIOD..][..buf.len()];
        assert!(buf[..] == *expected, "other bytes than were sent behind {}", self.received);
        self.received += buf.len();
        self.post(buf);
        true
    }
}

/// How bytes have come to where they are. How many of them were copied is a matter of scheduling: of how
/// soon a buffer is posted again.
struct Figures {
    /// Frames whose payload landed where it belongs.
    hits: u64,
    placed: usize,
    /// Copied into buffers by the stack, or by the device because they had landed elsewhere.
    copied: usize,
}

impl Figures {
    /// Something was placed, and whatever was not was copied.
    fn account_for(&self, received: usize) {
        assert!(self.hits > 0, "no frame was placed");
        let all = self.placed + self.copied;
        assert!(all >= received, "{} placed, {} copied, of {received}", self.placed, self.copied);
    }
}

fn figures(stack: &Stack, received: usize) -> Figures {
    let counters = stack.stat().unwrap().shard.counters;
    let of = |c| counters.value(c);
    let (hits, misses) = (of(Counter::PlacedFrames), of(Counter::PlaceMisses));
    let copied = of(Counter::CopiedBytes) + of(Counter::PlaceMissBytes);
    println!(
        "{hits} frames placed, {misses} not; {} bytes placed, {} moved, {} copied, of {received}; \
         {} hints, {} registrations",
        of(Counter::PlacedBytes),
        of(Counter::PlaceMissBytes),
        of(Counter::CopiedBytes),
        of(Counter::PlaceHints),
        of(Counter::PlaceRegistrations),
    );
    Figures { hits, placed: of(Counter::PlacedBytes) as usize, copied: copied as usize }
}

fn connect(listener: &TcpListener) -> (net::TcpStream, TcpStream) {
    let kernels = net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (kernels, listener.accept().unwrap().0)
}

fn bulk(stack: Stack, posted: usize, address: &str, buffer: usize) {
    let total = 128 << 20;
    let listener = TcpListener::bind(&stack, (address, 7)).unwrap();
    let (kernels, ours) = connect(&listener);
    let mut sink = Sink::new(ours, 1, 2, buffer);
    let sender = send(kernels, 1, total, 1 << 20);
    while sink.take() {}
    sender.join().unwrap();
    assert_eq!(sink.received, total);
    figures(&stack, total).account_for(total);
    drop((sink, listener));
    buffers_come_home_but(posted, &[&stack]);
}

#[test]
fn bulk_from_the_kernel_lands_in_posted_buffers() {
    in_namespace!(|| {
        for (address, buffer) in [(OURS, 1 << 20), (OURS6, 1 << 16)] {
            bulk(stack(), POSTED, address, buffer);
        }
    });
}

#[test]
fn long_frames_on_a_packet_socket_land_in_posted_buffers() {
    in_namespace!(|| {
        ip("link add v0 type veth peer name v1");
        ip("link set v1 up");
        ip("link set v0 up");
        ip(&format!("addr add {KERNEL}/24 dev v0"));
        let stack = stack_on(devices::packet("v1").unwrap());
        bulk(stack, usize::MAX, OURS, 1 << 20);
    });
}

#[test]
fn two_streams_from_the_kernel_stay_apart_in_their_posted_buffers() {
    in_namespace!(|| {
        const TOTAL: usize = 32 << 20;
        let stack = stack();
        let listener = TcpListener::bind(&stack, (OURS, 7)).unwrap();
        let [(kernel_a, a), (kernel_b, b)] = [connect(&listener), connect(&listener)];
        let mut sinks = [Sink::new(a, 1, 2, 200_000), Sink::new(b, 2, 2, 200_000)];
        let senders = [send(kernel_a, 1, TOTAL, 1 << 20), send(kernel_b, 2, TOTAL, 40_000)];
        while sinks.iter_mut().map(Sink::take).filter(|more| *more).count() > 0 {}
        senders.into_iter().for_each(|s| s.join().unwrap());
        assert!(sinks.iter().all(|s| s.received == TOTAL));
        figures(&stack, 2 * TOTAL).account_for(2 * TOTAL);
    });
}

#[test]
fn two_streams_with_a_reader_each_stay_apart_in_their_posted_buffers() {
    in_namespace!(|| {
        const TOTAL: usize = 64 << 20;
        let stack = stack();
        let listener = TcpListener::bind(&stack, (OURS, 7)).unwrap();
        // Neither is through before the other has begun.
        let start = Arc::new(Barrier::new(2));
        let receive = |n: u64, piece: usize| {
            let (kernels, ours) = connect(&listener);
            let start = Arc::clone(&start);
            let reader = std::thread::spawn(move || {
                let mut sink = Sink::new(ours, n, 2, 1 << 20);
                while sink.take() {}
                assert_eq!(sink.received, TOTAL);
            });
            let sender = std::thread::spawn(move || {
                start.wait();
                send(kernels, n, TOTAL, piece).join().unwrap();
            });
            [sender, reader]
        };
        let threads = [receive(1, 1 << 20), receive(2, 40_000)];
        threads.into_iter().flatten().for_each(|t| t.join().unwrap());
        figures(&stack, 2 * TOTAL).account_for(2 * TOTAL);
    });
}
