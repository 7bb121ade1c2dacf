//! Reads with flags, looks without taking, the low-water mark.

use std::io::{ErrorKind, IoSliceMut, Read, Write};
use std::thread;
use std::time::Duration;

use fulmar::stat::Counter;
use fulmar::tcp::RecvFlags;
use fulmar::zero_copy::ZeroCopy;
use fulmar::{Ready, SocketOptions, TcpStream};

use crate::support::{buffers_come_home, change, connection, eventually, pattern, stacks, within};

const ALL: RecvFlags = RecvFlags::WAIT_ALL;
const PEEK: RecvFlags = RecvFlags::PEEK;

fn recv(s: &TcpStream, buf: &mut [u8], flags: RecvFlags) -> std::io::Result<usize> {
    s.recv_with(&mut [IoSliceMut::new(buf)], flags)
}

/// Writes in small pieces, with pauses now and then.
fn trickle(mut c: TcpStream, total: usize) {
    for (i, part) in pattern(0, total).chunks(997).enumerate() {
        if i % 50 == 0 {
            thread::sleep(Duration::from_millis(1));
        }
        c.write_all(part).unwrap();
    }
}

#[test]
fn wait_all_fills_every_buffer_however_the_bytes_come() {
    within(|| {
        const TOTAL: usize = 3 << 20;
        let (a, b) = stacks();
        let (c, s) = connection(&a, &b, 80);
        let writer = thread::spawn(move || trickle(c, TOTAL));
        let mut bufs = [vec![0; 1], vec![0; TOTAL / 2], vec![], vec![0; TOTAL / 2 - 1]];
        let mut slices = bufs.each_mut().map(|b| IoSliceMut::new(b));
        assert_eq!(s.recv_with(&mut slices, ALL).unwrap(), TOTAL);
        assert!(bufs.concat() == pattern(0, TOTAL));
        // The stream has ended: a second one gets nothing, and says so at once.
        writer.join().unwrap();
        assert_eq!(recv(&s, &mut [0; 10], ALL).unwrap(), 0);
        drop(s);
        buffers_come_home(&[&a, &b]);
    });
}

#[test]
fn wait_all_ends_with_what_there_is_and_the_error_stays_for_the_next_call() {
    within(|| {
        let (a, b) = stacks();
        let (mut c, s) = connection(&a, &b, 80);
        c.write_all(b"half").unwrap();
        c.set_linger(Some(Duration::ZERO)).unwrap();
        let mut buf = [0; 8];
        assert_eq!(s.peek(&mut buf).unwrap(), 4);
        s.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
        assert_eq!(recv(&s, &mut buf, ALL).unwrap(), 4);
        assert_eq!(&buf[..4], b"half");
        assert_eq!(recv(&s, &mut buf, ALL).unwrap_err().kind(), ErrorKind::WouldBlock);
        s.set_read_timeout(None).unwrap();
        c.write_all(b"more").unwrap();
        let reader = thread::spawn(move || {
            let mut buf = [0; 8];
            let first = recv(&s, &mut buf, ALL);
            (first, recv(&s, &mut buf, ALL))
        });
        eventually("the peer has all of it", || c.info().unwrap().send_queue_bytes == 0);
        drop(c);
        let (first, second) = reader.join().unwrap();
        assert_eq!(first.unwrap(), 4);
        assert_eq!(second.unwrap_err().kind(), ErrorKind::ConnectionReset);
    });
}

#[test]
fn a_peek_consumes_nothing_and_may_begin_anywhere() {
    within(|| {
        const TOTAL: usize = 200_000;
        let (a, b) = stacks();
        let (mut c, mut s) = connection(&a, &b, 80);
        c.write_all(&pattern(0, TOTAL)).unwrap();
        let mut buf = vec![0; TOTAL];
        assert_eq!(recv(&s, &mut buf, PEEK | ALL).unwrap(), TOTAL);
        assert!(buf == pattern(0, TOTAL));
        for offset in [0, 1, 65_536, TOTAL - 1] {
            let (mut one, mut two) = ([0; 10], [0; 1000]);
            let mut slices = [IoSliceMut::new(&mut one), IoSliceMut::new(&mut two)];
            let n = s.peek_at(offset, &mut slices).unwrap();
            assert_eq!(n, 1010.min(TOTAL - offset));
            let both = [&one[..], &two[..]].concat();
            assert!(both[..n] == pattern(offset, n));
        }
        c.shutdown(std::net::Shutdown::Write).unwrap();
        assert_eq!(s.peek_at(TOTAL, &mut [IoSliceMut::new(&mut [0; 4])]).unwrap(), 0);
        assert_eq!(recv(&s, &mut [], PEEK).unwrap(), 0);
        s.read_exact(&mut buf).unwrap();
        assert!(buf == pattern(0, TOTAL));
        assert_eq!(recv(&s, &mut buf, PEEK | ALL).unwrap(), 0);
        drop((c, s));
        buffers_come_home(&[&a, &b]);
    });
}

#[test]
fn a_peek_for_more_than_the_buffer_holds_ends_when_it_is_full() {
    within(|| {
        let (a, b) = stacks();
        let (c, s) = connection(&a, &b, 80);
        crate::support::fill(&c);
        let mut buf = vec![0; 4 << 20];
        let n = recv(&s, &mut buf, PEEK | ALL).unwrap();
        assert!(n > 1 << 19 && buf[..1 << 19] == pattern(0, 1 << 19), "{n} bytes");
    });
}

#[test]
fn dont_wait_does_not_and_a_vectored_read_is_one_call() {
    within(|| {
        let (a, b) = stacks();
        let (mut c, mut s) = connection(&a, &b, 80);
        for flags in [RecvFlags::DONT_WAIT, RecvFlags::DONT_WAIT | ALL | PEEK] {
            assert_eq!(recv(&s, &mut [0; 1], flags).unwrap_err().kind(), ErrorKind::WouldBlock);
        }
        c.write_all(&pattern(0, 30)).unwrap();
        s.peek(&mut [0; 1]).unwrap();
        assert_eq!(recv(&s, &mut [0; 100], RecvFlags::DONT_WAIT | ALL | PEEK).unwrap(), 30);
        let calls = || b.stat().unwrap().shard.counters.value(Counter::Receives);
        let before = calls();
        let mut bufs = [[0; 7]; 5];
        let n = s.read_vectored(&mut bufs.each_mut().map(|b| IoSliceMut::new(b))).unwrap();
        assert_eq!((n, calls() - before), (30, 1));
        assert_eq!(bufs.concat()[..30], pattern(0, 30));
    });
}

#[test]
fn the_low_water_mark_decides_what_is_readable() {
    within(|| {
        let (a, b) = stacks();
        let (mut c, s) = connection(&a, &b, 80);
        assert_eq!(s.options().unwrap().recv_low_water, Some(1));
        let bad = SocketOptions { recv_low_water: Some(0), ..s.options().unwrap() };
        assert_eq!(s.set_options(bad).unwrap_err().kind(), ErrorKind::InvalidInput);
        change(&s, |o| o.recv_low_water = Some(1000));
        let set = b.poll_set().unwrap();
        set.add(&s, 0, Ready::READABLE).unwrap();
        let mut events = Vec::new();
        c.write_all(&[1; 999]).unwrap();
        eventually("it arrives", || s.peek(&mut [0; 2000]).unwrap() == 999);
        assert_eq!(set.wait(&mut events, Some(Duration::from_millis(20))).unwrap(), 0);
        // A patient read waits, an impatient one does not, and a small one has enough.
        s.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
        assert_eq!(recv(&s, &mut [0; 99], RecvFlags::NONE).unwrap(), 99);
        assert_eq!(recv(&s, &mut [0; 2000], RecvFlags::DONT_WAIT).unwrap(), 900);
        s.set_read_timeout(None).unwrap();
        let reader = {
            let s = s.try_clone().unwrap();
            thread::spawn(move || s.recv_owned(2000).unwrap().len())
        };
        for _ in 0..10 {
            c.write_all(&[2; 100]).unwrap();
            thread::sleep(Duration::from_millis(2));
        }
        assert_eq!(reader.join().unwrap(), 1000);
        c.write_all(&[3; 1000]).unwrap();
        assert_eq!(set.wait(&mut events, None).unwrap(), 1);
        assert!(events[0].ready.contains(Ready::READABLE));
        assert_eq!(recv(&s, &mut [0; 2000], RecvFlags::NONE).unwrap(), 1000);
        // The end is always worth a look.
        c.write_all(b"end").unwrap();
        c.shutdown(std::net::Shutdown::Write).unwrap();
        assert_eq!(set.wait(&mut events, None).unwrap(), 1);
        assert_eq!(recv(&s, &mut [0; 2000], RecvFlags::NONE).unwrap(), 3);
        assert_eq!(recv(&s, &mut [0; 2000], RecvFlags::NONE).unwrap(), 0);
    });
}

#[test]
fn a_low_water_mark_beyond_the_buffer_does_not_hang_a_reader() {
    within(|| {
        let (a, b) = stacks();
        let (c, mut s) = connection(&a, &b, 80);
        change(&s, |o| o.recv_low_water = Some(usize::MAX));
        let half = s.info().unwrap().recv_buffer_bytes / 2;
        assert_eq!(s.options().unwrap().recv_low_water, Some(half));
        crate::support::fill(&c);
        let mut buf = vec![0; 4 << 20];
        let n = s.read(&mut buf).unwrap();
        assert!(n >= half && buf[..half] == pattern(0, half));
    });
}
