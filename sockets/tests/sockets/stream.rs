//! TCP streams and listeners: blocking, time-outs, closing, errors.

use std::io::{ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::net::{Shutdown, SocketAddr};
use std::thread;
use std::time::{Duration, Instant};

use fulmar::tcp::TcpConfig;
use fulmar::{ListenOptions, TcpListener, TcpStream};

use crate::support::{
    A, B, PATIENCE, buffers_come_home, connection, eventually, fill, pattern, stack, stacks, within,
};

/// Short enough for a test, and told from a hang.
const SHORT: Duration = Duration::from_millis(30);

fn errno(e: &std::io::Error) -> i32 {
    e.raw_os_error().unwrap_or_else(|| panic!("{e:?} has no errno"))
}

#[test]
fn a_read_an_accept_and_a_peek_give_up_with_would_block() {
    within(|| {
        let (a, b) = stacks();
        let (c, _s) = connection(&a, &b, 80);
        let listener = TcpListener::bind(&b, (B, 81)).unwrap();
        listener.set_accept_timeout(Some(SHORT)).unwrap();
        c.set_read_timeout(Some(SHORT)).unwrap();
        assert_eq!(c.read_timeout().unwrap(), Some(SHORT));
        let calls: [&mut dyn FnMut() -> std::io::Error; 3] = [
            &mut || (&c).read(&mut [0; 8]).unwrap_err(),
            &mut || c.peek(&mut [0; 8]).unwrap_err(),
            &mut || listener.accept().unwrap_err(),
        ];
        for call in calls {
            let start = Instant::now();
            let e = call();
            assert_eq!((e.kind(), errno(&e)), (ErrorKind::WouldBlock, libc::EAGAIN));
            assert!(start.elapsed() >= SHORT);
        }
        let zero = c.set_read_timeout(Some(Duration::ZERO)).unwrap_err();
        assert_eq!(zero.kind(), ErrorKind::InvalidInput);
    });
}

#[test]
fn a_write_without_a_reader_accepts_what_fits_and_then_times_out() {
    within(|| {
        let (a, b) = stacks();
        let (mut c, mut s) = connection(&a, &b, 80);
        c.set_write_timeout(Some(SHORT)).unwrap();
        let all = pattern(0, 8 << 20);
        // However long the peer's stack takes to run: it takes more meanwhile, but not for ever.
        let mut accepted = 0;
        let e = loop {
            match c.write(&all[accepted..]) {
                Ok(n) => accepted += n,
                Err(e) => break e,
            }
        };
        assert!(accepted >= 1 << 20 && accepted < all.len(), "{accepted}");
        assert_eq!((e.kind(), errno(&e)), (ErrorKind::WouldBlock, libc::EAGAIN));
        let reader = thread::spawn(move || {
            let mut got = vec![0; 8 << 20];
            s.read_exact(&mut got).unwrap();
            (got, s)
        });
        c.set_write_timeout(None).unwrap();
        c.write_all(&all[accepted..]).unwrap();
        assert!(reader.join().unwrap().0 == all, "the bytes differ");
    });
}

#[test]
fn one_time_out_bounds_a_write_that_waits_again_and_again() {
    within(|| {
        let (a, b) = stacks();
        let (mut c, mut s) = connection(&a, &b, 80);
        c.set_write_timeout(Some(Duration::from_millis(300))).unwrap();
        // A reader that takes a little every 20 ms would renew the time-out of each round for ever.
        let reader = thread::spawn(move || {
            let mut buf = vec![0; 600 << 10];
            while s.read(&mut buf).is_ok_and(|n| n > 0) {
                thread::sleep(Duration::from_millis(20));
            }
        });
        // What the reader would need two seconds for.
        let all = vec![7; 64 << 20];
        assert!(c.write(&all).unwrap() < all.len());
        drop(c);
        reader.join().unwrap();
    });
}

#[test]
fn non_blocking_calls_never_wait() {
    within(|| {
        let (a, b) = stacks();
        let listener = TcpListener::bind(&b, (B, 80)).unwrap();
        listener.set_nonblocking(true).unwrap();
        assert_eq!(listener.accept().unwrap_err().kind(), ErrorKind::WouldBlock);
        let mut c = TcpStream::connect(&a, (B, 80)).unwrap();
        let (mut s, _) = listener.accept().unwrap();
        c.set_nonblocking(true).unwrap();
        s.set_nonblocking(true).unwrap();
        assert_eq!(c.read(&mut [0; 8]).unwrap_err().kind(), ErrorKind::WouldBlock);
        assert_eq!(c.peek(&mut [0; 8]).unwrap_err().kind(), ErrorKind::WouldBlock);
        let all = pattern(0, 8 << 20);
        let (mut sent, mut got) = (0, Vec::new());
        let mut buf = vec![0; 100_000];
        // The peer does not read yet.
        eventually("a write is refused", || match c.write(&all[sent..]) {
            Ok(n) => {
                sent += n;
                false
            }
            Err(e) => e.kind() == ErrorKind::WouldBlock,
        });
        while got.len() < all.len() {
            match c.write(&all[sent..]) {
                Ok(n) => sent += n,
                Err(e) => assert_eq!(e.kind(), ErrorKind::WouldBlock),
            }
            match s.read(&mut buf) {
                Ok(n) => got.extend_from_slice(&buf[..n]),
                Err(e) => assert_eq!(e.kind(), ErrorKind::WouldBlock),
            }
        }
        assert!(got == all);
    });
}

#[test]
fn a_closed_port_refuses_and_the_socket_reports_it_once() {
    within(|| {
        let (a, _b) = stacks();
        let e = TcpStream::connect(&a, (B, 9)).unwrap_err();
        assert_eq!((e.kind(), errno(&e)), (ErrorKind::ConnectionRefused, libc::ECONNREFUSED));
        let to: SocketAddr = format!("{B}:9").parse().unwrap();
        let c =
            TcpStream::connect_nonblocking(&a, &to, &fulmar::ConnectOptions::default()).unwrap();
        let set = a.poll_set().unwrap();
        set.add(&c, 0, fulmar::Ready::WRITABLE).unwrap();
        set.wait(&mut Vec::new(), None).unwrap();
        let told = c.take_error().unwrap().unwrap();
        assert_eq!(told.kind(), ErrorKind::ConnectionRefused);
        assert!(c.take_error().unwrap().is_none());
    });
}

#[test]
fn connecting_without_blocking_is_writable_when_done() {
    within(|| {
        let (a, b) = stacks();
        let listener = TcpListener::bind(&b, (B, 80)).unwrap();
        let to: SocketAddr = format!("{B}:80").parse().unwrap();
        let mut c =
            TcpStream::connect_nonblocking(&a, &to, &fulmar::ConnectOptions::default()).unwrap();
        let set = a.poll_set().unwrap();
        set.add(&c, 5, fulmar::Ready::WRITABLE).unwrap();
        let mut events = Vec::new();
        set.wait(&mut events, None).unwrap();
        assert_eq!(events[0].token, 5);
        assert!(c.take_error().unwrap().is_none());
        assert_eq!(c.peer_addr().unwrap(), to);
        c.write_all(b"hello").unwrap();
        let mut buf = [0; 5];
        listener.accept().unwrap().0.read_exact(&mut buf).unwrap();
        assert_eq!(&buf, b"hello");
    });
}

#[test]
fn an_absent_neighbour_is_an_unreachable_host() {
    within(|| {
        let (a, _b) = stacks();
        for to in ["10.1.0.99:80", "[fd01::99]:80"] {
            let e = TcpStream::connect(&a, to).unwrap_err();
            assert_eq!((e.kind(), errno(&e)), (ErrorKind::HostUnreachable, libc::EHOSTUNREACH));
        }
        let e = TcpStream::connect(&a, "192.0.2.1:80").unwrap_err();
        assert_eq!((e.kind(), errno(&e)), (ErrorKind::NetworkUnreachable, libc::ENETUNREACH));
    });
}

#[test]
fn a_connect_time_out_ends_an_unanswered_attempt() {
    within(|| {
        let (a, b) = stacks();
        let options = ListenOptions { backlog: 1, ..ListenOptions::default() };
        let listener = TcpListener::bind_with(&b, (B, 80), options).unwrap();
        let _first = TcpStream::connect(&a, (B, 80)).unwrap();
        let to: SocketAddr = format!("{B}:80").parse().unwrap();
        // The backlog is full: the SYN is dropped.
        let e = TcpStream::connect_timeout(&a, &to, SHORT).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::TimedOut);
        let options = fulmar::ConnectOptions::default();
        for e in [
            TcpStream::connect_timeout(&a, &to, Duration::ZERO).unwrap_err(),
            TcpStream::connect_with(&a, &to, &options, Some(Duration::ZERO)).unwrap_err(),
            a.ping(to.ip(), 8, Duration::ZERO).unwrap_err(),
        ] {
            assert_eq!(e.kind(), ErrorKind::InvalidInput);
        }
        drop(listener);
    });
}

#[test]
fn an_unanswered_attempt_ends_by_itself() {
    within(|| {
        let tcp = TcpConfig {
            syn_retries: 2,
            initial_rto: Duration::from_millis(20),
            ..TcpConfig::default()
        };
        let (p, q) = fulmar::devices::link_pair().unwrap();
        let (a, b) = (stack(1, p, |s| s.tcp(tcp)), stack(2, q, |s| s));
        let options = ListenOptions { backlog: 1, ..ListenOptions::default() };
        let listener = TcpListener::bind_with(&b, (B, 80), options).unwrap();
        // From a stack that has the usual patience.
        let _first = TcpStream::connect(&b, (B, 80)).unwrap();
        eventually("it is in the queue", || listener.stat().unwrap().accept_queue == 1);
        let e = TcpStream::connect(&a, (B, 80)).unwrap_err();
        assert_eq!((e.kind(), errno(&e)), (ErrorKind::TimedOut, libc::ETIMEDOUT));
    });
}

#[test]
fn a_listener_reports_its_statistics() {
    within(|| {
        let (a, b) = stacks();
        let options = ListenOptions { backlog: 3, ..ListenOptions::default() };
        let listener = TcpListener::bind_with(&b, (B, 80), options).unwrap();
        let _clients = [(); 2].map(|()| TcpStream::connect(&a, (B, 80)).unwrap());
        eventually("both wait to be accepted", || listener.stat().unwrap().accept_queue == 2);
        let s = listener.stat().unwrap();
        assert_eq!((s.accept_limit, s.embryo_limit, s.embryos, s.cookies_sent), (3, 8, 0, 0));
        let document = b.stat().unwrap().document();
        let told = document.sockets.iter().find_map(|s| s.listener.as_ref()).unwrap();
        assert_eq!((told.accept_queue, told.embryo_limit), (2, 8));
    });
}

#[test]
fn a_closed_listener_resets_connections_that_were_not_accepted() {
    within(|| {
        let (a, b) = stacks();
        let listener = TcpListener::bind(&b, (B, 80)).unwrap();
        let mut kept = TcpStream::connect(&a, (B, 80)).unwrap();
        let (mut s, _) = listener.accept().unwrap();
        let mut orphan = TcpStream::connect(&a, (B, 80)).unwrap();
        drop(listener);
        assert_eq!(orphan.read(&mut [0; 1]).unwrap_err().kind(), ErrorKind::ConnectionReset);
        kept.write_all(b"x").unwrap();
        s.read_exact(&mut [0; 1]).unwrap();
        let e = TcpStream::connect(&a, (B, 80)).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::ConnectionRefused);
        assert_eq!(b.stat().unwrap().sockets().len(), 1);
    });
}

#[test]
fn each_direction_closes_by_itself() {
    within(|| {
        let (a, b) = stacks();
        let (mut c, mut s) = connection(&a, &b, 80);
        c.write_all(b"request").unwrap();
        c.shutdown(Shutdown::Write).unwrap();
        let mut request = String::new();
        s.read_to_string(&mut request).unwrap();
        assert_eq!(request, "request");
        let e = c.write(b"more").unwrap_err();
        assert_eq!((e.kind(), errno(&e)), (ErrorKind::BrokenPipe, libc::EPIPE));
        // The other direction lives on, for as much as one likes.
        let answer = pattern(0, 3 << 20);
        let expected = answer.clone();
        let server = thread::spawn(move || {
            s.write_all(&answer).unwrap();
            s.shutdown(Shutdown::Both).unwrap();
            s
        });
        let mut got = Vec::new();
        c.read_to_end(&mut got).unwrap();
        assert!(got == expected);
        for _ in 0..3 {
            assert_eq!(c.read(&mut [0; 8]).unwrap(), 0, "the end stays the end");
        }
        let s = server.join().unwrap();
        eventually("the peer has acknowledged the end", || s.peer_addr().is_err());
        assert_eq!(errno(&s.peer_addr().unwrap_err()), libc::ENOTCONN);
        assert_eq!(errno(&s.shutdown(Shutdown::Both).unwrap_err()), libc::ENOTCONN);
    });
}

#[test]
fn shutting_down_reads_wakes_a_blocked_reader() {
    within(|| {
        let (a, b) = stacks();
        let (c, s) = connection(&a, &b, 80);
        let mut blocked = c.try_clone().unwrap();
        let reader = thread::spawn(move || blocked.read(&mut [0; 8]).unwrap());
        thread::sleep(SHORT);
        c.shutdown(Shutdown::Read).unwrap();
        assert_eq!(reader.join().unwrap(), 0);
        drop(s);
    });
}

#[test]
fn a_peek_does_not_take() {
    within(|| {
        let (a, b) = stacks();
        let (c, mut s) = connection(&a, &b, 80);
        s.write_all(b"abcdef").unwrap();
        let mut buf = [0; 4];
        for _ in 0..3 {
            assert_eq!(c.peek(&mut buf).unwrap(), 4);
            assert_eq!(&buf, b"abcd");
        }
        let mut all = [0; 6];
        (&c).read_exact(&mut all).unwrap();
        assert_eq!(&all, b"abcdef");
        drop(s);
        assert_eq!(c.peek(&mut buf).unwrap(), 0);
        assert_eq!((&c).read(&mut buf).unwrap(), 0);
    });
}

#[test]
fn empty_reads_and_writes_transfer_nothing() {
    within(|| {
        let (a, b) = stacks();
        let (mut c, mut s) = connection(&a, &b, 80);
        assert_eq!(c.read(&mut []).unwrap(), 0);
        assert_eq!(c.write(&[]).unwrap(), 0);
        assert_eq!(c.write_vectored(&[]).unwrap(), 0);
        assert_eq!(c.write_vectored(&[IoSlice::new(&[]), IoSlice::new(&[])]).unwrap(), 0);
        c.write_all(b"x").unwrap();
        assert_eq!(s.read(&mut []).unwrap(), 0);
        assert_eq!(s.read(&mut [0; 2]).unwrap(), 1);
    });
}

#[test]
fn thousands_of_slices_are_one_write_and_one_read() {
    within(|| {
        let (a, b) = stacks();
        let (mut c, mut s) = connection(&a, &b, 80);
        let all = pattern(0, 2000 * 150);
        // Of all lengths from 0 to 299, so that pieces cross every boundary.
        let mut rest = &all[..];
        let mut slices = Vec::new();
        for i in 0..2000 {
            let (piece, more) = rest.split_at((i * 7 % 300).min(rest.len()));
            slices.push(IoSlice::new(piece));
            rest = more;
        }
        slices.push(IoSlice::new(rest));
        assert_eq!(c.write_vectored(&slices).unwrap(), all.len());
        let before = b.stat().unwrap();
        assert_eq!(before.sockets().iter().filter(|s| s.state == "ESTABLISHED").count(), 1);
        let mut pieces: Vec<Vec<u8>> = (0..2000).map(|i| vec![0; i * 11 % 300]).collect();
        let room: usize = pieces.iter().map(Vec::len).sum();
        let mut got = Vec::new();
        while got.len() < all.len() {
            let mut into: Vec<_> = pieces.iter_mut().map(|p| IoSliceMut::new(p)).collect();
            let n = s.read_vectored(&mut into).unwrap();
            assert!(n > 0 && n <= room);
            let filled: Vec<u8> = pieces.iter().flatten().copied().take(n).collect();
            got.extend(filled);
        }
        assert!(got == all);
    });
}

#[test]
fn bytes_that_came_before_a_reset_can_be_read() {
    within(|| {
        let (a, b) = stacks();
        let (mut c, mut s) = connection(&a, &b, 80);
        s.write_all(b"last words").unwrap();
        eventually("they are there", || c.peek(&mut [0; 16]).unwrap() == 10);
        s.set_linger(Some(Duration::ZERO)).unwrap();
        drop(s);
        eventually("the reset has come", || c.peer_addr().is_err());
        let mut buf = [0; 16];
        assert_eq!(c.read(&mut buf).unwrap(), 10);
        assert_eq!(c.read(&mut buf).unwrap_err().kind(), ErrorKind::ConnectionReset);
    });
}

#[test]
fn an_error_in_the_middle_of_a_write_waits_for_the_next_call() {
    within(|| {
        let (a, b) = stacks();
        let (mut c, s) = connection(&a, &b, 80);
        let writer = thread::spawn(move || {
            let accepted = c.write(&pattern(0, 16 << 20)).unwrap();
            assert!(accepted > 0 && accepted < 16 << 20);
            let e = c.write(b"x").unwrap_err();
            assert_eq!(e.kind(), ErrorKind::ConnectionReset);
            assert_eq!(c.write(b"x").unwrap_err().kind(), ErrorKind::BrokenPipe);
        });
        eventually("the window is full", || s.peek(&mut vec![0; 1 << 20]).unwrap() >= 500_000);
        s.set_linger(Some(Duration::ZERO)).unwrap();
        drop(s);
        writer.join().unwrap();
    });
}

#[test]
fn unread_data_makes_a_close_a_reset() {
    within(|| {
        let (a, b) = stacks();
        let (mut c, s) = connection(&a, &b, 80);
        c.write_all(b"nobody reads this").unwrap();
        eventually("it is there", || s.peek(&mut [0; 32]).unwrap() == 17);
        drop(s);
        assert_eq!(c.read(&mut [0; 1]).unwrap_err().kind(), ErrorKind::ConnectionReset);
    });
}

#[test]
fn the_last_of_several_handles_closes() {
    within(|| {
        let (a, b) = stacks();
        let (c, mut s) = connection(&a, &b, 80);
        let clones: Vec<_> = (0..3).map(|_| c.try_clone().unwrap()).collect();
        drop(c);
        for mut clone in clones {
            s.set_read_timeout(Some(SHORT)).unwrap();
            assert_eq!(s.read(&mut [0; 1]).unwrap_err().kind(), ErrorKind::WouldBlock);
            s.set_read_timeout(None).unwrap();
            clone.write_all(b"x").unwrap();
            s.read_exact(&mut [0; 1]).unwrap();
        }
        assert_eq!(s.read(&mut [0; 1]).unwrap(), 0);
        drop(s);
        buffers_come_home(&[&a, &b]);
    });
}

#[test]
fn options_set_through_one_handle_are_seen_through_another() {
    within(|| {
        let (a, b) = stacks();
        let (c, _s) = connection(&a, &b, 80);
        let other = c.try_clone().unwrap();
        c.set_nodelay(true).unwrap();
        c.set_read_timeout(Some(SHORT)).unwrap();
        c.set_linger(Some(PATIENCE)).unwrap();
        assert!(other.nodelay().unwrap());
        assert_eq!(other.read_timeout().unwrap(), Some(SHORT));
        assert_eq!(other.linger().unwrap(), Some(PATIENCE));
        c.set_linger(None).unwrap();
        assert_eq!(c.local_addr().unwrap().ip().to_string(), A);
    });
}

#[test]
fn a_linger_time_waits_for_delivery_and_no_longer() {
    within(|| {
        let (a, b) = stacks();
        let (mut c, mut s) = connection(&a, &b, 80);
        c.set_linger(Some(PATIENCE)).unwrap();
        let all = pattern(0, 3 << 20);
        let expected = all.clone();
        let reader = thread::spawn(move || {
            let mut got = Vec::new();
            s.read_to_end(&mut got).unwrap();
            got
        });
        c.write_all(&all).unwrap();
        drop(c);
        // Everything is acknowledged, so the stack that read it has it all.
        assert!(a.stat().unwrap().sockets().iter().all(|s| s.send_queue == 0));
        assert!(reader.join().unwrap() == expected);

        let (c, s) = connection(&a, &b, 81);
        fill(&c);
        c.set_linger(Some(SHORT)).unwrap();
        let start = Instant::now();
        drop(c);
        assert!(start.elapsed() >= SHORT, "nobody reads, so it waits in vain");
        drop(s);
    });
}

#[test]
fn a_thousand_short_connections_leave_nothing_behind() {
    within(|| {
        let (a, b) = stacks();
        let listener = TcpListener::bind(&b, (B, 80)).unwrap();
        let server = thread::spawn(move || {
            for _ in 0..1000 {
                let (mut s, _) = listener.accept().unwrap();
                let mut buf = [0; 8];
                s.read_exact(&mut buf).unwrap();
                s.write_all(&buf).unwrap();
                assert_eq!(s.read(&mut buf).unwrap(), 0);
            }
        });
        for i in 0..1000u64 {
            let mut c = TcpStream::connect(&a, (B, 80)).unwrap();
            c.write_all(&i.to_ne_bytes()).unwrap();
            let mut buf = [0; 8];
            c.read_exact(&mut buf).unwrap();
            assert_eq!(u64::from_ne_bytes(buf), i);
        }
        server.join().unwrap();
        for stack in [&a, &b] {
            eventually("every socket is gone", || stack.stat().unwrap().sockets().is_empty());
        }
        buffers_come_home(&[&a, &b]);
    });
}
