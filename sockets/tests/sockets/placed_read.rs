//! Reads that give their buffer to the device while they wait.

use std::io::{ErrorKind, IoSliceMut, Read, Write};
use std::net::Shutdown;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;
use std::time::Duration;

use fulmar::base::Counter;
use fulmar::{RecvBuf, RecvFlags, RecvRule, Stack, TcpStream, UdpSocket, devices};

use crate::support::landing::{Landing, Orders};
use crate::support::{B, buffers_come_home, connection, eventually, pattern, stack, within};

/// A sender's stack, and a receiver's whose device places.
fn stacks() -> (Stack, Stack, Arc<Orders>) {
    let (a, b) = devices::link_pair().unwrap();
    let (b, orders) = Landing::new(b);
    (stack(1, a, |s| s), stack(2, Box::new(b), |s| s), orders)
}

fn placed_reads(s: &Stack) -> u64 {
    s.stat().unwrap().shard.counters.value(Counter::PlacedReads)
}

const LARGE: usize = 1 << 20;

/// A reader in a thread of its own, which is about to wait with its buffer posted; what it read and the
/// buffer come back.
fn reads(
    mut s: TcpStream,
    orders: &Orders,
    flags: RecvFlags,
) -> thread::JoinHandle<(std::io::Result<usize>, Vec<u8>)> {
    let reader = thread::spawn(move || {
        let mut buf = vec![0; LARGE];
        let n = match flags {
            RecvFlags::NONE => s.read(&mut buf),
            _ => s.recv_with(&mut [IoSliceMut::new(&mut buf)], flags),
        };
        (n, buf)
    });
    // One with a time-out may be over before this thread looks.
    eventually("its buffer is with the device", || {
        orders.flows.load(Relaxed) == 1 || reader.is_finished()
    });
    reader
}

#[test]
fn a_read_returns_with_the_first_bytes_placed_and_the_device_has_nothing_left() {
    within(|| {
        let (a, b, orders) = stacks();
        let (mut c, s) = connection(&a, &b, 80);
        let reader = reads(s.try_clone().unwrap(), &orders, RecvFlags::NONE);
        c.write_all(&pattern(0, 30_000)).unwrap();
        let (n, buf) = reader.join().unwrap();
        let n = n.unwrap();
        assert!(n > 0 && buf[..n] == pattern(0, n)[..], "{n}");
        assert_eq!(orders.flows.load(Relaxed), 0);
        assert!(orders.placed.load(Relaxed) > 0 && placed_reads(&b) == 1);
        drop((c, s));
        buffers_come_home(&[&a, &b]);
    });
}

/// Numbers without a pattern.
struct Dice(u64);

impl Dice {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 16) as usize % n
    }
}

/// Takes what comes next in one of the ways there are; at least a byte unless the stream is over.
fn take_somehow(s: &TcpStream, dice: &mut Dice, buf: &mut [u8]) -> usize {
    // Two buffers may be posted, one of the half size.
    let size = 1 + dice.below(buf.len() * 2 / 3);
    let mut reader = s;
    match dice.below(12) {
        0 => reader.read(&mut buf[..1 + size % 5000]).unwrap(),
        1 => {
            let loan = s.recv_owned(size).unwrap();
            let n = loan.len();
            loan.slices().fold(0, |at, part| {
                buf[at..at + part.len()].copy_from_slice(part);
                at + part.len()
            });
            n
        }
        2 => {
            let rule = RecvRule { low_water_bytes: size, ..RecvRule::default() };
            let post = |n: usize| s.recv_posted_with(RecvBuf::with_capacity(n), rule).unwrap();
            let (first, second) = (post(size), post(size / 2));
            let first = first.wait().unwrap();
            let second = second.wait().unwrap();
            let both = [&first[..], &second[..]].concat();
            buf[..both.len()].copy_from_slice(&both);
            both.len()
        }
        3 => {
            let n = s.peek(&mut buf[..size]).unwrap();
            let mut again = vec![0; n];
            reader.read_exact(&mut again).unwrap();
            assert!(again == buf[..n], "other bytes than a peek has shown");
            n
        }
        4 => {
            let (front, back) = buf[..size].split_at_mut(size / 2);
            reader.read_vectored(&mut [IoSliceMut::new(front), IoSliceMut::new(back)]).unwrap()
        }
        5 => {
            s.set_read_timeout(Some(Duration::from_micros(1 + size as u64 % 300))).unwrap();
            let n = reader.read(&mut buf[..size]);
            s.set_read_timeout(None).unwrap();
            match n {
                Err(e) if e.kind() == ErrorKind::WouldBlock => {
                    reader.read(&mut buf[..size]).unwrap()
                }
                n => n.unwrap(),
            }
        }
        6 => {
            let most = size.min(300_000);
            s.recv_with(&mut [IoSliceMut::new(&mut buf[..most])], RecvFlags::WAIT_ALL).unwrap()
        }
        7 => {
            s.set_recv_low_water(1 + size % 100_000).unwrap();
            let n = reader.read(&mut buf[..size]).unwrap();
            s.set_recv_low_water(1).unwrap();
            n
        }
        _ => reader.read(&mut buf[..size]).unwrap(),
    }
}

#[test]
fn a_stream_is_whole_and_in_order_however_it_is_read() {
    within(|| {
        for seed in 1..9 {
            const TOTAL: usize = 12_000_003;
            let (a, b, orders) = stacks();
            let (mut c, s) = connection(&a, &b, 80);
            // The first read waits for sure; whether another one does is a matter of scheduling.
            let first = reads(s.try_clone().unwrap(), &orders, RecvFlags::NONE);
            let writer = thread::spawn(move || {
                let (mut dice, mut at) = (Dice(seed * 77), 0);
                while at < TOTAL {
                    let n = (1 + dice.below(150_000)).min(TOTAL - at);
                    c.write_all(&pattern(at, n)).unwrap();
                    at += n;
                    if dice.below(20) == 0 {
                        thread::sleep(Duration::from_micros(200));
                    }
                }
            });
            let (n, bytes) = first.join().unwrap();
            let (mut dice, mut at, mut buf) = (Dice(seed), n.unwrap(), vec![0; 3 * LARGE]);
            assert!(bytes[..at] == pattern(0, at)[..], "seed {seed}: the first bytes differ");
            loop {
                let n = take_somehow(&s, &mut dice, &mut buf);
                if n == 0 {
                    break;
                }
                assert!(buf[..n] == pattern(at, n)[..], "seed {seed}: bytes differ after {at}");
                at += n;
            }
            assert_eq!(at, TOTAL, "seed {seed}");
            assert!(placed_reads(&b) > 0 && orders.placed.load(Relaxed) > 0, "seed {seed}");
            writer.join().unwrap();
            drop(s);
            buffers_come_home(&[&a, &b]);
        }
    });
}

#[test]
fn memory_is_the_callers_alone_once_the_read_has_returned_whatever_comes_then() {
    within(|| {
        let (a, b, orders) = stacks();
        let (mut c, s) = connection(&a, &b, 80);
        let (mut at, mut buf, mut other) = (0, vec![0; LARGE], vec![0; LARGE]);
        for round in 0..100 {
            let mut got = 0;
            // Every other read finds nothing, and gives up.
            if round % 2 == 0 {
                s.set_read_timeout(None).unwrap();
                let reader = reads(s.try_clone().unwrap(), &orders, RecvFlags::NONE);
                c.write_all(&pattern(at, 200_000)).unwrap();
                let (n, read) = reader.join().unwrap();
                (got, buf) = (n.unwrap(), read);
            } else {
                s.set_read_timeout(Some(Duration::from_millis(5))).unwrap();
                let e = (&s).read(&mut buf).unwrap_err();
                assert_eq!(e.kind(), ErrorKind::WouldBlock);
            }
            assert!(buf[..got] == pattern(at, got)[..], "round {round}");
            assert_eq!(orders.flows.load(Relaxed), 0, "round {round}");
            buf.fill(0x5a);
            // More of the same flow, for other memory.
            let mut end = at + got;
            let whole = if round % 2 == 0 { at + 200_000 } else { at };
            while end < whole {
                let Ok(n) = (&s).read(&mut other) else { continue };
                assert!(other[..n] == pattern(end, n)[..], "round {round}");
                end += n;
            }
            at = whole;
            assert!(buf.iter().all(|b| *b == 0x5a), "round {round}: somebody wrote to it");
        }
        assert!(placed_reads(&b) >= 50 && orders.placed.load(Relaxed) >= 50);
    });
}

#[test]
fn a_read_that_gives_up_waits_until_a_device_lets_go_of_what_it_placed() {
    within(|| {
        let (a, b, orders) = stacks();
        orders.keeps.store(true, Relaxed);
        let mut ports = 80..;
        let (c, s, reader) = loop {
            let (mut c, s) = connection(&a, &b, ports.next().unwrap());
            s.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
            let reader = reads(s.try_clone().unwrap(), &orders, RecvFlags::NONE);
            c.write_all(&pattern(0, 50_000)).unwrap();
            eventually("the device keeps bytes in the reader's memory", || {
                orders.kept.load(Relaxed) > 0 || reader.is_finished()
            });
            if orders.kept.load(Relaxed) > 0 {
                break (c, s, reader);
            }
            // A thread was held up, and the reader had given up before the bytes came: once more.
            drop(reader.join().unwrap());
        };
        thread::sleep(Duration::from_millis(60));
        assert!(!reader.is_finished(), "it returned while the device referred to its memory");
        orders.keeps.store(false, Relaxed);
        let (n, mut buf) = reader.join().unwrap();
        let mut got =
            n.or_else(|e| if e.kind() == ErrorKind::WouldBlock { Ok(0) } else { Err(e) }).unwrap();
        assert!(buf[..got] == pattern(0, got)[..]);
        while got < 50_000 {
            let Ok(n) = (&s).read(&mut buf) else { continue };
            assert!(buf[..n] == pattern(got, n)[..], "bytes differ after {got}");
            got += n;
        }
        drop((c, s));
        buffers_come_home(&[&a, &b]);
    });
}

#[test]
fn a_read_that_unwinds_has_its_memory_back_and_nobody_writes_to_it() {
    within(|| {
        let (a, b, orders) = stacks();
        let (c, s) = connection(&a, &b, 80);
        let mut buf = vec![0x5a; LARGE];
        *orders.panics.lock().unwrap() = Some(thread::current().id());
        let read = catch_unwind(AssertUnwindSafe(|| (&s).read(&mut buf)));
        assert!(read.is_err());
        assert_eq!(orders.flows.load(Relaxed), 0, "the device has its memory");
        // The stack is down; whatever the peer still sends goes nowhere.
        let _ = (&c).write(&pattern(0, 100_000));
        assert_eq!((&s).read(&mut [0; 8]).unwrap_err().raw_os_error(), Some(libc::ENETDOWN));
        drop(s);
        assert!(buf.iter().all(|b| *b == 0x5a), "somebody wrote to it");
    });
}

#[test]
fn readers_whose_buffers_are_with_the_device_get_them_back_when_another_thread_panics() {
    within(|| {
        let (a, b, orders) = stacks();
        let (c, s) = connection(&a, &b, 80);
        let reader = reads(s.try_clone().unwrap(), &orders, RecvFlags::NONE);
        *orders.panics.lock().unwrap() = Some(thread::current().id());
        let udp = UdpSocket::bind(&b, (B, 53)).unwrap();
        udp.set_nonblocking(true).unwrap();
        assert!(catch_unwind(AssertUnwindSafe(|| udp.recv_from(&mut [0; 8]))).is_err());
        let (n, buf) = reader.join().unwrap();
        assert_eq!(n.unwrap_err().raw_os_error(), Some(libc::ENETDOWN));
        let _ = (&c).write(&pattern(0, 100_000));
        assert!(buf.iter().all(|b| *b == 0), "somebody wrote to it");
    });
}

#[test]
fn a_read_that_waits_ends_with_the_stream_and_with_its_own_direction() {
    within(|| {
        let (a, b, orders) = stacks();
        let (c, s) = connection(&a, &b, 80);
        let reader = reads(s.try_clone().unwrap(), &orders, RecvFlags::NONE);
        s.shutdown(Shutdown::Read).unwrap();
        assert_eq!(reader.join().unwrap().0.unwrap(), 0);
        drop((c, s));
        let (c, s) = connection(&a, &b, 81);
        let reader = reads(s.try_clone().unwrap(), &orders, RecvFlags::NONE);
        drop(c);
        assert_eq!(reader.join().unwrap().0.unwrap(), 0);
        assert_eq!(orders.flows.load(Relaxed), 0);
    });
}

#[test]
fn a_read_of_everything_ends_short_with_the_stream_and_the_error_is_for_the_next() {
    within(|| {
        let (a, b, orders) = stacks();
        for is_reset in [false, true] {
            let (mut c, s) = connection(&a, &b, 80 + u16::from(is_reset));
            c.write_all(&pattern(0, 10_000)).unwrap();
            let mut first = [0; 1000];
            (&s).read_exact(&mut first).unwrap();
            let reader = reads(s.try_clone().unwrap(), &orders, RecvFlags::WAIT_ALL);
            if is_reset {
                c.set_linger(Some(Duration::ZERO)).unwrap();
            }
            drop(c);
            let (n, buf) = reader.join().unwrap();
            assert_eq!(n.unwrap(), 9000);
            assert!(buf[..9000] == pattern(1000, 9000)[..]);
            match (&s).read(&mut first) {
                Ok(n) => assert!(n == 0 && !is_reset),
                Err(e) => assert!(e.kind() == ErrorKind::ConnectionReset && is_reset),
            }
        }
    });
}

#[test]
fn a_read_of_everything_is_filled_in_place() {
    within(|| {
        let (a, b, orders) = stacks();
        let (mut c, s) = connection(&a, &b, 80);
        let reader = reads(s, &orders, RecvFlags::WAIT_ALL);
        c.write_all(&pattern(0, LARGE + 5)).unwrap();
        let (n, buf) = reader.join().unwrap();
        assert_eq!(n.unwrap(), LARGE);
        assert!(buf == pattern(0, LARGE));
        assert_eq!(placed_reads(&b), 1);
    });
}

#[test]
fn small_reads_and_those_that_were_told_not_to_place_nothing() {
    within(|| {
        let (a, b, orders) = stacks();
        let (mut c, s) = connection(&a, &b, 80);
        let read = |bytes: usize| {
            let mut reader = s.try_clone().unwrap();
            thread::spawn(move || reader.read(&mut vec![0; bytes]).unwrap())
        };
        assert!(s.placed_reads().unwrap());
        let reader = read((128 << 10) - 1);
        c.write_all(&pattern(0, 9000)).unwrap();
        assert!(reader.join().unwrap() > 0);
        s.set_placed_reads(false).unwrap();
        let reader = read(LARGE);
        c.write_all(&pattern(0, 9000)).unwrap();
        assert!(reader.join().unwrap() > 0);
        assert_eq!((placed_reads(&b), orders.placed.load(Relaxed)), (0, 0));
    });
}
