//! Poll sets: level-triggered readiness of many sockets, waited for inside or by any event loop.

use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use fulmar::stat::Counter;
use fulmar::{Event, PollSet, Ready, Stack, TcpListener, TcpStream, UdpSocket};

use crate::support::{B, PATIENCE, connection, eventually, stacks, within};

fn tokens(set: &PollSet, timeout: Option<Duration>) -> Vec<usize> {
    let mut events = Vec::new();
    assert_eq!(set.wait(&mut events, timeout).unwrap(), events.len());
    let mut tokens: Vec<_> = events.iter().map(|e| e.token).collect();
    tokens.sort_unstable();
    tokens
}

/// Whether `poll(2)` finds the descriptor readable within the time.
fn is_readable(set: &PollSet, timeout_ms: i32) -> bool {
    let mut p = libc::pollfd { fd: set.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one pollfd, a local, as the count says.
    unsafe { libc::poll(&mut p, 1, timeout_ms) == 1 }
}

#[test]
fn a_socket_is_reported_as_long_as_it_is_ready() {
    within(|| {
        let (a, b) = stacks();
        let (mut c, mut s) = connection(&a, &b, 80);
        let set = b.poll_set().unwrap();
        set.add(&s, 9, Ready::READABLE).unwrap();
        assert!(tokens(&set, Some(Duration::ZERO)).is_empty());
        c.write_all(b"two").unwrap();
        for _ in 0..3 {
            assert_eq!(tokens(&set, None), [9]);
        }
        s.read_exact(&mut [0; 2]).unwrap();
        assert_eq!(tokens(&set, None), [9]);
        s.read_exact(&mut [0; 1]).unwrap();
        assert!(tokens(&set, Some(Duration::from_millis(10))).is_empty());
        drop(c);
        let mut events = Vec::new();
        set.wait(&mut events, None).unwrap();
        assert!(
            matches!(events[..], [Event { token: 9, ready, .. }]
            if ready.contains(Ready::READABLE)),
            "{events:?}"
        );
    });
}

#[test]
fn interest_token_and_membership_can_change() {
    within(|| {
        let (a, b) = stacks();
        let (c, _s) = connection(&a, &b, 80);
        let set = a.poll_set().unwrap();
        set.add(&c, 1, Ready::READABLE).unwrap();
        assert!(tokens(&set, Some(Duration::ZERO)).is_empty());
        set.add(&c, 2, Ready::READABLE | Ready::WRITABLE).unwrap();
        assert_eq!(tokens(&set, None), [2]);
        set.remove(&c).unwrap();
        assert!(tokens(&set, Some(Duration::ZERO)).is_empty());
        assert_eq!(set.remove(&c).unwrap_err().kind(), std::io::ErrorKind::NotFound);
        set.add(&c, 3, Ready::WRITABLE).unwrap();
        set.remove(&c).unwrap();
        set.add(&c, 4, Ready::WRITABLE).unwrap();
        assert_eq!(tokens(&set, None), [4], "once, not once per joining");
        set.modify(&c, 5, Ready::WRITABLE).unwrap();
        assert_eq!(tokens(&set, None), [5]);
        set.remove(&c).unwrap();
        let e = set.modify(&c, 6, Ready::WRITABLE).unwrap_err();
        assert_eq!(e.kind(), std::io::ErrorKind::NotFound, "it is no member");
        let foreign = b.poll_set().unwrap();
        let e = foreign.add(&c, 0, Ready::READABLE).unwrap_err();
        assert_eq!(e.kind(), std::io::ErrorKind::InvalidInput);
    });
}

#[test]
fn an_edge_triggered_socket_is_reported_when_something_has_come_and_not_again() {
    within(|| {
        let (a, b) = stacks();
        let (mut c, mut s) = connection(&a, &b, 80);
        s.set_nonblocking(true).unwrap();
        let set = b.poll_set().unwrap();
        set.add(&s, 9, Ready::READABLE | Ready::EDGE).unwrap();
        for round in 0..3 {
            c.write_all(b"two").unwrap();
            assert_eq!(tokens(&set, None), [9], "round {round}");
            assert!(tokens(&set, Some(Duration::ZERO)).is_empty(), "round {round}");
            // Drained until there is no more: then the next byte is a change.
            while s.read(&mut [0; 2]).is_ok() {}
        }
        drop(c);
        let mut events = Vec::new();
        set.wait(&mut events, None).unwrap();
        assert!(matches!(events[..], [Event { ready, .. }] if ready.is_readable()), "{events:?}");
    });
}

#[test]
fn the_end_of_a_stream_is_reported_once_all_is_read() {
    within(|| {
        let (a, b) = stacks();
        let (mut c, mut s) = connection(&a, &b, 80);
        let set = b.poll_set().unwrap();
        set.add(&s, 0, Ready::READABLE | Ready::PEER_CLOSED).unwrap();
        c.write_all(b"x").unwrap();
        c.shutdown(std::net::Shutdown::Write).unwrap();
        let mut events = Vec::new();
        set.wait(&mut events, None).unwrap();
        assert!(events[0].ready.is_readable() && !events[0].ready.is_peer_closed(), "{events:?}");
        s.read_exact(&mut [0; 1]).unwrap();
        set.wait(&mut events, None).unwrap();
        assert!(events[0].ready.is_readable() && events[0].ready.is_peer_closed(), "{events:?}");
        assert_eq!(s.read(&mut [0; 1]).unwrap(), 0);
    });
}

#[test]
fn a_waker_ends_a_wait_of_another_thread_and_counts_once() {
    within(|| {
        let (_a, b) = stacks();
        let set = b.poll_set().unwrap();
        let waker = set.waker(7);
        // Before the wait, twice: one event.
        waker.wake();
        waker.clone().wake();
        assert_eq!(tokens(&set, None), [7]);
        assert!(tokens(&set, Some(Duration::ZERO)).is_empty());
        // During the wait, from another thread; as the waker of a future, too.
        for _ in 0..100 {
            let waker: std::task::Waker = waker.clone().into();
            let other = thread::spawn(move || waker.wake());
            assert_eq!(tokens(&set, None), [7]);
            other.join().unwrap();
        }
        drop(set);
        waker.wake();
    });
}

#[test]
fn a_waker_is_seen_on_the_descriptor_of_the_set() {
    within(|| {
        let (_a, b) = stacks();
        let set = b.poll_set().unwrap();
        let waker = set.waker(7);
        assert!(!is_readable(&set, 0));
        waker.wake();
        assert!(is_readable(&set, PATIENCE.as_millis() as i32));
        assert_eq!(tokens(&set, Some(Duration::ZERO)), [7]);
        assert!(!is_readable(&set, 0));
    });
}

#[test]
fn a_descriptor_of_the_host_is_reported_beside_sockets_as_long_as_it_is_ready() {
    within(|| {
        let (a, b) = stacks();
        let (mut c, s) = connection(&a, &b, 80);
        let set = b.poll_set().unwrap();
        set.add(&s, 1, Ready::READABLE).unwrap();
        let (mut near, far) = UnixStream::pair().unwrap();
        set.add_fd(&far, 2, Ready::READABLE | Ready::PEER_CLOSED).unwrap();
        assert!(tokens(&set, Some(Duration::from_millis(5))).is_empty());
        for _ in 0..50 {
            let writer = thread::spawn({
                let mut near = near.try_clone().unwrap();
                move || near.write_all(b"x").unwrap()
            });
            assert_eq!(tokens(&set, None), [2]);
            assert_eq!(tokens(&set, None), [2], "until somebody reads");
            writer.join().unwrap();
            (&far).read_exact(&mut [0; 1]).unwrap();
            assert!(tokens(&set, Some(Duration::ZERO)).is_empty());
        }
        near.write_all(b"x").unwrap();
        c.write_all(b"x").unwrap();
        eventually("both are ready", || tokens(&set, None) == [1, 2]);
        drop(near);
        let mut events = Vec::new();
        eventually("the end is told", || {
            set.wait(&mut events, None).unwrap();
            events.iter().any(|e| e.token == 2 && e.ready.is_peer_closed())
        });
        set.remove_fd(&far).unwrap();
        assert_eq!(tokens(&set, None), [1]);
        assert_eq!(set.remove_fd(&far).unwrap_err().kind(), std::io::ErrorKind::NotFound);
    });
}

#[test]
fn a_descriptor_of_the_host_shows_on_that_of_the_set_and_leaves_it_when_it_is_closed() {
    within(|| {
        let (_a, b) = stacks();
        let set = b.poll_set().unwrap();
        let (mut near, far) = UnixStream::pair().unwrap();
        set.add_fd(&far, 2, Ready::READABLE).unwrap();
        near.write_all(b"x").unwrap();
        assert!(is_readable(&set, PATIENCE.as_millis() as i32));
        assert_eq!(tokens(&set, Some(Duration::ZERO)), [2]);
        assert!(is_readable(&set, PATIENCE.as_millis() as i32), "until somebody reads");
        drop(far);
        eventually("a closed descriptor is forgotten", || {
            tokens(&set, Some(Duration::ZERO)).is_empty() && !is_readable(&set, 0)
        });
    });
}

#[test]
fn a_socket_that_is_dropped_leaves_the_set() {
    within(|| {
        let (a, b) = stacks();
        let set = b.poll_set().unwrap();
        let listener = TcpListener::bind(&b, (B, 80)).unwrap();
        set.add(&listener, 1, Ready::READABLE).unwrap();
        let udp = UdpSocket::bind(&b, (B, 53)).unwrap();
        set.add(&udp, 2, Ready::WRITABLE).unwrap();
        let mut c = TcpStream::connect(&a, (B, 80)).unwrap();
        let (s, _) = listener.accept().unwrap();
        set.add(&s, 3, Ready::READABLE | Ready::WRITABLE).unwrap();
        assert_eq!(tokens(&set, None), [2, 3]);
        // It closes in the background and stays in the table until the peer has closed, too.
        drop(s);
        assert_eq!(tokens(&set, None), [2]);
        assert_eq!(c.read(&mut [0; 1]).unwrap(), 0);
        drop(udp);
        drop(c);
        assert!(tokens(&set, Some(Duration::from_millis(10))).is_empty());
        drop(listener);
        assert!(tokens(&set, Some(Duration::ZERO)).is_empty());
    });
}

#[test]
fn a_wait_returns_what_another_thread_causes() {
    within(|| {
        let (a, b) = stacks();
        let (mut c, mut s) = connection(&a, &b, 80);
        let set = b.poll_set().unwrap();
        set.add(&s, 0, Ready::READABLE).unwrap();
        let writer = thread::spawn(move || {
            for i in 0..500u16 {
                c.write_all(&i.to_ne_bytes()).unwrap();
                let mut answer = [0; 1];
                c.read_exact(&mut answer).unwrap();
            }
        });
        for i in 0..500u16 {
            assert_eq!(tokens(&set, None), [0]);
            let mut buf = [0; 2];
            s.read_exact(&mut buf).unwrap();
            assert_eq!(u16::from_ne_bytes(buf), i);
            s.write_all(b"!").unwrap();
        }
        writer.join().unwrap();
    });
}

#[test]
fn several_threads_may_wait_for_one_set() {
    within(|| {
        let (a, b) = stacks();
        let (mut c, s) = connection(&a, &b, 80);
        let set = Arc::new(b.poll_set().unwrap());
        set.add(&s, 7, Ready::READABLE).unwrap();
        let waiters: Vec<_> = (0..4)
            .map(|_| {
                let set = Arc::clone(&set);
                thread::spawn(move || tokens(&set, None))
            })
            .collect();
        thread::sleep(Duration::from_millis(50));
        c.write_all(b"for all").unwrap();
        for w in waiters {
            assert_eq!(w.join().unwrap(), [7]);
        }
    });
}

#[test]
fn a_wait_without_events_ends_with_its_time() {
    within(|| {
        let (_a, b) = stacks();
        let set = b.poll_set().unwrap();
        let start = Instant::now();
        assert!(tokens(&set, Some(Duration::from_millis(30))).is_empty());
        assert!(start.elapsed() >= Duration::from_millis(30));
    });
}

#[test]
fn more_sockets_than_one_wait_reports_all_have_their_turn() {
    within(|| {
        let (_a, b) = stacks();
        let set = b.poll_set().unwrap();
        let sockets: Vec<_> =
            (0..2500).map(|_| UdpSocket::bind(&b, "0.0.0.0:0").unwrap()).collect();
        for (i, s) in sockets.iter().enumerate() {
            set.add(s, i, Ready::WRITABLE).unwrap();
        }
        let mut seen: Vec<_> = (0..3).flat_map(|_| tokens(&set, None)).collect();
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen, (0..2500).collect::<Vec<_>>());
    });
}

/// A thread that says twenty things to an echo server, hears them again and counts itself done.
fn echo_client(a: &Stack, i: u8, done: &Arc<AtomicUsize>) -> thread::JoinHandle<()> {
    let (a, done) = (a.clone(), Arc::clone(done));
    thread::spawn(move || {
        let mut c = TcpStream::connect(&a, (B, 80)).unwrap();
        for _ in 0..20 {
            c.write_all(&[i; 100]).unwrap();
            let mut buf = [0; 100];
            c.read_exact(&mut buf).unwrap();
            assert_eq!(buf, [i; 100]);
        }
        drop(c);
        done.fetch_add(1, Ordering::SeqCst);
    })
}

#[test]
fn the_descriptor_works_in_a_loop_of_another_kind() {
    within(|| {
        let (a, b) = stacks();
        let listener = TcpListener::bind(&b, (B, 80)).unwrap();
        listener.set_nonblocking(true).unwrap();
        let set = b.poll_set().unwrap();
        set.add(&listener, usize::MAX, Ready::READABLE).unwrap();
        let done = Arc::new(AtomicUsize::new(0));
        let clients: Vec<_> = (0..20u8).map(|i| echo_client(&a, i, &done)).collect();
        let mut streams: Vec<Option<TcpStream>> = Vec::new();
        let mut closed = 0;
        while closed < clients.len() {
            // No call is inside the stack meanwhile: the service thread does the work.
            assert!(is_readable(&set, PATIENCE.as_millis() as i32));
            let mut events = Vec::new();
            set.wait(&mut events, Some(Duration::ZERO)).unwrap();
            for e in events {
                if e.token == usize::MAX {
                    while let Ok((s, _)) = listener.accept() {
                        s.set_nonblocking(true).unwrap();
                        set.add(&s, streams.len(), Ready::READABLE).unwrap();
                        streams.push(Some(s));
                    }
                    continue;
                }
                let Some(s) = &mut streams[e.token] else { continue };
                let mut buf = [0; 4096];
                match s.read(&mut buf) {
                    Ok(0) => {
                        streams[e.token] = None;
                        closed += 1;
                    }
                    Ok(n) => s.write_all(&buf[..n]).unwrap(),
                    Err(e) => assert_eq!(e.kind(), std::io::ErrorKind::WouldBlock),
                }
            }
        }
        clients.into_iter().for_each(|c| c.join().unwrap());
        assert_eq!(done.load(Ordering::SeqCst), 20);
        set.wait(&mut Vec::new(), Some(Duration::ZERO)).unwrap();
        eventually("a quiet set is not readable", || {
            set.wait(&mut Vec::new(), Some(Duration::ZERO)).unwrap();
            !is_readable(&set, 0)
        });
    });
}

#[test]
fn a_descriptor_obtained_late_reports_earlier_events() {
    within(|| {
        let (a, b) = stacks();
        let (mut c, s) = connection(&a, &b, 80);
        let set = b.poll_set().unwrap();
        set.add(&s, 0, Ready::READABLE).unwrap();
        c.write_all(b"x").unwrap();
        assert_eq!(tokens(&set, None), [0]);
        assert!(is_readable(&set, PATIENCE.as_millis() as i32));
        assert!(is_readable(&set, 0), "until somebody takes the byte");
    });
}

/// A connection from `a` to `b`, readable there, with the event loop of `b` in its turn.
fn turn(a: &Stack, b: &Stack) -> (TcpStream, TcpStream, PollSet) {
    let (mut c, mut s) = connection(a, b, 80);
    s.set_nodelay(true).unwrap();
    let set = b.poll_set().unwrap();
    set.add(&s, 1, Ready::READABLE).unwrap();
    c.write_all(b"?").unwrap();
    assert_eq!(tokens(&set, None), [1]);
    s.read_exact(&mut [0; 1]).unwrap();
    (c, s, set)
}

#[test]
fn frames_of_a_turn_leave_although_no_wait_follows() {
    within(|| {
        let (a, b) = stacks();
        let (mut c, mut s, _set) = turn(&a, &b);
        s.write_all(b"answer").unwrap();
        c.read_exact(&mut [0; 6]).unwrap();
        // Beyond the limit of the turn.
        thread::sleep(Duration::from_millis(5));
        s.write_all(b"answer").unwrap();
        c.read_exact(&mut [0; 6]).unwrap();
    });
}

#[test]
fn frames_of_a_turn_leave_with_the_call_of_another_thread() {
    within(|| {
        let (a, b) = stacks();
        let bursts = |b: &Stack| b.stat().unwrap().count(Counter::TxBursts);
        // In a round in which the service thread did not come first.
        eventually("a turn that its own thread's calls leave alone", || {
            let (_c, mut s, _set) = turn(&a, &b);
            let before = bursts(&b);
            s.write_all(b"answer").unwrap();
            let stayed = bursts(&b) == before;
            let other = s.try_clone().unwrap();
            thread::spawn(move || other.local_addr().unwrap()).join().unwrap();
            assert!(bursts(&b) > before);
            stayed
        });
    });
}

#[test]
fn a_turn_that_waits_for_the_answer_itself_gets_it() {
    within(|| {
        let (a, b) = stacks();
        let (mut c, mut s, set) = turn(&a, &b);
        s.write_all(b"question").unwrap();
        let peer = thread::spawn(move || {
            c.read_exact(&mut [0; 8]).unwrap();
            c.write_all(b"answer").unwrap();
            c
        });
        s.read_exact(&mut [0; 6]).unwrap();
        let mut c = peer.join().unwrap();
        c.write_all(b"?").unwrap();
        assert_eq!(tokens(&set, None), [1]);
        s.set_nonblocking(true).unwrap();
        s.read_exact(&mut [0; 1]).unwrap();
        let e = s.read(&mut [0; 1]).unwrap_err();
        assert_eq!(e.kind(), std::io::ErrorKind::WouldBlock);
        // Answered without another wait of the set.
        c.write_all(b"!").unwrap();
        eventually("bytes for calls that do not wait", || s.read(&mut [0; 1]).is_ok());
    });
}

#[test]
fn flags_are_written_by_their_names_and_messages_without_their_bytes() {
    let ready = Ready::READABLE | Ready::PEER_CLOSED;
    assert_eq!(format!("{ready:?} {:?}", Ready::NONE), "READABLE | PEER_CLOSED NONE");
    let flags = fulmar::tcp::SendFlags::MORE | fulmar::tcp::SendFlags::DONT_WAIT;
    assert_eq!(format!("{flags:?} {:?}", fulmar::tcp::RecvFlags::PEEK), "MORE | DONT_WAIT PEEK");
    let mut buffer = [7; 1500];
    let message = format!("{:?}", fulmar::udp::RecvMessage::new(&mut buffer));
    assert!(message.contains("buffer_bytes: 1500") && !message.contains("7, 7"), "{message}");
}
