//! Posted receive.

use std::future::Future;
use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::Duration;

use fulmar::stat::Counter;
use fulmar::zero_copy::{RecvBuf, RecvRule, ZeroCopy};
use fulmar::{Ready, TcpStream};

use crate::support::{buffers_come_home, connection, eventually, pattern, stacks, within};

fn connected(a: &fulmar::Stack, b: &fulmar::Stack) -> (TcpStream, TcpStream) {
    connection(a, b, 80)
}

/// A rule by which only bytes count.
const WHOLE: RecvRule = RecvRule { low_water_bytes: usize::MAX, on_push: false, idle: None };

fn write_all_then_close(mut c: TcpStream, total: usize) -> thread::JoinHandle<()> {
    thread::spawn(move || {
        let mut at = 0;
        while at < total {
            let n = (64 << 10).min(total - at);
            c.write_all(&pattern(at, n)).unwrap();
            at += n;
        }
    })
}

#[test]
fn two_buffers_in_turn_receive_a_stream_whole_and_in_order() {
    within(|| {
        const TOTAL: usize = 20_000_003;
        let (a, b) = stacks();
        let (c, s) = connected(&a, &b);
        let writer = write_all_then_close(c, TOTAL);
        let post = |buf: RecvBuf| s.recv_posted(buf).unwrap();
        let mut next = post(RecvBuf::with_capacity(64 << 10));
        let mut at = 0;
        let mut spare = Some(RecvBuf::with_capacity(64 << 10));
        loop {
            let behind = post(spare.take().unwrap());
            let buf = next.wait().unwrap();
            next = behind;
            if buf.is_empty() {
                break;
            }
            assert!(buf[..] == pattern(at, buf.len())[..], "bytes differ after {at}");
            at += buf.len();
            spare = Some(buf);
        }
        assert_eq!(at, TOTAL);
        assert!(next.wait().unwrap().is_empty(), "the end of the stream again");
        writer.join().unwrap();
        drop(s);
        buffers_come_home(&[&a, &b]);
    });
}

#[test]
fn a_ring_receives_a_stream_whole_and_in_order_with_any_number_of_buffers() {
    within(|| {
        const TOTAL: usize = 5_000_003;
        for (port, count) in [(90, 1), (91, 2), (92, 5)] {
            let (a, b) = stacks();
            let (c, s) = connection(&a, &b, port);
            let writer = write_all_then_close(c, TOTAL);
            let buffers = (0..count).map(|_| RecvBuf::with_capacity(48 << 10));
            let mut ring = s.recv_ring(buffers).unwrap();
            let mut at = 0;
            loop {
                let bytes = ring.recv().unwrap();
                if bytes.is_empty() {
                    break;
                }
                assert!(*bytes == pattern(at, bytes.len())[..], "bytes differ after {at}");
                at += bytes.len();
            }
            assert_eq!(at, TOTAL);
            assert!(ring.recv().unwrap().is_empty(), "the end of the stream again");
            writer.join().unwrap();
            drop((ring, s));
            buffers_come_home(&[&a, &b]);
        }
    });
}

#[test]
fn a_ring_that_cannot_wait_says_so_and_what_it_has_goes_back_into_the_stream() {
    within(|| {
        let (a, b) = stacks();
        let (mut c, mut s) = connected(&a, &b);
        assert_eq!(s.recv_ring([] as [RecvBuf; 0]).unwrap_err().kind(), ErrorKind::InvalidInput);
        let buffers = [10, 10].map(RecvBuf::with_capacity);
        let mut ring = s.recv_ring_with(buffers, WHOLE).unwrap();
        s.set_nonblocking(true).unwrap();
        assert_eq!(ring.recv().unwrap_err().kind(), ErrorKind::WouldBlock);
        c.write_all(&pattern(0, 13)).unwrap();
        s.set_nonblocking(false).unwrap();
        assert_eq!(*ring.recv().unwrap(), pattern(0, 10)[..]);
        s.set_nonblocking(true).unwrap();
        assert_eq!(ring.recv().unwrap_err().kind(), ErrorKind::WouldBlock);
        s.set_nonblocking(false).unwrap();
        drop(ring);
        let mut rest = [0; 3];
        s.read_exact(&mut rest).unwrap();
        assert_eq!(rest[..], pattern(10, 3)[..]);
        drop((c, s));
        buffers_come_home(&[&a, &b]);
    });
}

#[test]
fn earlier_bytes_fill_the_buffer_first_and_a_read_continues_after_it() {
    within(|| {
        let (a, b) = stacks();
        let (mut c, mut s) = connected(&a, &b);
        c.write_all(b"early, then late").unwrap();
        assert_eq!(s.peek(&mut [0; 3]).unwrap(), 3);
        let first = s.recv_posted_with(vec![0; 5], WHOLE).unwrap();
        let second = s.recv_posted_with(vec![0; 7], WHOLE).unwrap();
        assert_eq!(first.wait().unwrap()[..], b"early"[..]);
        assert_eq!(second.wait().unwrap()[..], b", then "[..]);
        let mut rest = [0; 10];
        assert_eq!(s.read(&mut rest).unwrap(), 4);
        assert_eq!(&rest[..4], b"late");
    });
}

#[test]
fn reads_come_behind_posted_buffers() {
    within(|| {
        let (a, b) = stacks();
        let (mut c, mut s) = connected(&a, &b);
        let mut posted = s.recv_posted_with(vec![0; 4], WHOLE).unwrap();
        c.write_all(b"abc").unwrap();
        assert!(posted.wait_timeout(Duration::from_millis(20)).is_none());
        s.set_nonblocking(true).unwrap();
        for e in [s.read(&mut [0; 9]).unwrap_err(), s.peek(&mut [0; 9]).unwrap_err()] {
            assert_eq!(e.kind(), ErrorKind::WouldBlock);
        }
        s.set_nonblocking(false).unwrap();
        let mut reader = s.try_clone().unwrap();
        let read = thread::spawn(move || {
            let mut buf = [0; 9];
            let n = reader.read(&mut buf).unwrap();
            buf[..n].to_vec()
        });
        c.write_all(b"defg").unwrap();
        assert_eq!(posted.wait().unwrap()[..], b"abcd"[..]);
        assert_eq!(read.join().unwrap(), b"efg");
        drop(s);
    });
}

#[test]
fn a_small_message_in_a_large_buffer_comes_back_at_once_and_another_after_a_pause() {
    within(|| {
        let (a, b) = stacks();
        let (mut c, s) = connected(&a, &b);
        let posted = s.recv_posted(RecvBuf::with_capacity(64 << 20)).unwrap();
        c.write_all(b"pushed").unwrap();
        let buf = posted.wait().unwrap();
        assert_eq!((&buf[..], buf.capacity()), (&b"pushed"[..], 64 << 20));
        let idle = RecvRule { on_push: false, ..RecvRule::default() };
        let posted = s.recv_posted_with(buf, idle).unwrap();
        c.write_all(b"quiet").unwrap();
        assert_eq!(posted.wait().unwrap()[..], b"quiet"[..]);
        let mark = RecvRule { low_water_bytes: 3, ..WHOLE };
        let posted = s.recv_posted_with(vec![0; 100], mark).unwrap();
        c.write_all(b"ab").unwrap();
        c.write_all(b"cd").unwrap();
        assert!(posted.wait().unwrap().len() >= 3);
    });
}

#[test]
fn the_end_of_the_stream_and_an_error_reach_every_buffer_that_waits() {
    within(|| {
        let (a, b) = stacks();
        let (mut c, s) = connected(&a, &b);
        let posted: Vec<_> =
            (0..3).map(|_| s.recv_posted_with(vec![0; 9], WHOLE).unwrap()).collect();
        c.write_all(b"tail").unwrap();
        c.shutdown(Shutdown::Write).unwrap();
        let lens: Vec<usize> = posted.into_iter().map(|p| p.wait().unwrap().len()).collect();
        assert_eq!(lens, [4, 0, 0]);

        let (c, s) = connected(&a, &b);
        let posted: Vec<_> = (0..2).map(|_| s.recv_posted(vec![0; 9]).unwrap()).collect();
        c.set_linger(Some(Duration::ZERO)).unwrap();
        drop(c);
        for p in posted {
            let e = p.wait().unwrap_err();
            assert_eq!(
                (e.error.kind(), e.buf.map(|b| b.capacity())),
                (ErrorKind::ConnectionReset, Some(9))
            );
        }
        assert!(s.recv_posted(vec![0; 9]).unwrap().wait().unwrap().is_empty(), "as a read would");
    });
}

#[test]
fn a_buffer_comes_back_when_it_is_cancelled_with_what_it_has_or_as_cancelled() {
    within(|| {
        let (a, b) = stacks();
        let (mut c, mut s) = connected(&a, &b);
        let [first, second, third] = [0; 3].map(|_| s.recv_posted_with(vec![0; 9], WHOLE).unwrap());
        second.cancel().unwrap();
        let e = second.wait().unwrap_err();
        assert_eq!((e.error.raw_os_error(), e.buf.is_some()), (Some(libc::ECANCELED), true));
        c.write_all(b"abc").unwrap();
        eventually("the bytes come", || b.stat().unwrap().count(Counter::ReceiveBytes) == 3);
        first.cancel().unwrap();
        assert_eq!(first.wait().unwrap()[..], b"abc"[..]);
        c.write_all(b"de").unwrap();
        // No thread waits for the third buffer any more: the next read gets its bytes.
        drop(third);
        let mut rest = [0; 9];
        s.read_exact(&mut rest[..2]).unwrap();
        assert_eq!(&rest[..2], b"de");
        drop((c, s));
        buffers_come_home(&[&a, &b]);
    });
}

#[test]
fn closing_ends_what_is_posted_and_so_does_the_end_of_the_stack() {
    within(|| {
        let (a, b) = stacks();
        let (_c, s) = connected(&a, &b);
        let posted = s.recv_posted(vec![0; 9]).unwrap();
        drop(s);
        assert_eq!(posted.wait().unwrap_err().error.raw_os_error(), Some(libc::ECANCELED));

        let (_c, s) = connected(&a, &b);
        let posted = s.recv_posted(vec![0; 9]).unwrap();
        drop((s, b));
        assert!(posted.wait().is_err());
    });
}

#[test]
fn too_many_are_refused_and_the_buffer_comes_back() {
    within(|| {
        let (a, b) = stacks();
        let (_c, s) = connected(&a, &b);
        let posted: Vec<_> = (0..256).map(|_| s.recv_posted(vec![0; 9]).unwrap()).collect();
        let e = s.recv_posted(vec![0; 7]).unwrap_err();
        assert_eq!((e.error.kind(), e.buf.map(|b| b.capacity())), (ErrorKind::WouldBlock, Some(7)));
        drop(posted);
        s.recv_posted(vec![0; 7]).unwrap();
    });
}

#[test]
fn a_future_is_woken_and_a_poll_set_sees_the_buffer() {
    within(|| {
        let (a, b) = stacks();
        let (mut c, s) = connected(&a, &b);
        let set = b.poll_set().unwrap();
        set.add(&s, 7, Ready::READABLE).unwrap();
        let mut posted = pin!(s.recv_posted(vec![0; 3]).unwrap());
        let mut cx = Context::from_waker(Waker::noop());
        assert!(posted.as_mut().poll(&mut cx).is_pending());
        c.write_all(b"abcdef").unwrap();
        let mut events = Vec::new();
        assert_eq!(set.wait(&mut events, None).unwrap(), 1);
        let Poll::Ready(buf) = posted.as_mut().poll(&mut cx) else { panic!("it was readable") };
        assert_eq!(buf.unwrap()[..], b"abc"[..]);
        let mut behind = s.recv_posted(RecvBuf::with_capacity(3)).unwrap();
        assert_eq!(behind.try_take().unwrap().unwrap()[..], b"def"[..]);
        assert!(behind.try_take().is_none(), "taken");
    });
}
