//! A panic inside a stack: that stack is down for good, every call of it returns ENETDOWN, no call hangs, memory stays
//! sound, and the process can build another stack.

use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use fulmar::config::ModerationConfig;
use fulmar::device::Device;
use fulmar::zero_copy::{Loan, OwnedBytes, RecvBuf, ZeroCopy};
use fulmar::{Event, Ready, Stack, TcpListener, TcpStream, UdpSocket, devices};

use crate::support::faulty::{Bug, CALLS, Call, Faulty, quiet};
use crate::support::pipe::Pipe;
use crate::support::{A, B, PATIENCE, change, connection, eventually, pattern, stack, within};

fn is_down<T>(r: io::Result<T>) {
    assert_eq!(r.err().and_then(|e| e.raw_os_error()), Some(libc::ENETDOWN));
}

fn linked() -> [Box<dyn Device>; 2] {
    let (a, b) = devices::link_pair().unwrap();
    [a, b]
}

fn piped() -> [Box<dyn Device>; 2] {
    let (a, b) = Pipe::pair();
    [Box::new(a), Box::new(b)]
}

/// A stack over a device with a bug, and its peer.
fn stacks(devices: [Box<dyn Device>; 2], config: ModerationConfig) -> (Stack, Stack, Arc<Bug>) {
    let [a, b] = devices;
    let (a, bug) = Faulty::around(a);
    let a = stack(1, a, |s| s.exit_drain(PATIENCE).moderation(config));
    (a, stack(2, b, |s| s.exit_drain(Duration::ZERO)), bug)
}

/// Counts how often it is woken.
struct Count(AtomicUsize);

impl Wake for Count {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// What the program does with the stack when the panic comes.
struct Program {
    stack: Stack,
    stream: TcpStream,
    listener: TcpListener,
    udp: UdpSocket,
    loan: Loan,
    blocked: Vec<JoinHandle<io::Result<()>>>,
}

/// How many bytes are on loan.
const LENT: usize = 5000;

impl Program {
    fn start(a: &Stack, b: &Stack) -> Program {
        let (stream, mut peer) = connection(a, b, 80);
        peer.write_all(&pattern(0, LENT)).unwrap();
        let mut loan = Loan::default();
        while loan.len() < LENT {
            loan.append(stream.recv_owned(LENT - loan.len()).unwrap());
        }
        let listener = TcpListener::bind(a, (A, 81)).unwrap();
        let udp = UdpSocket::bind(a, (A, 53)).unwrap();
        let set = a.poll_set().unwrap();
        set.add(&listener, 1, Ready::READABLE).unwrap();
        let (acceptor, quiet) = (listener.try_clone().unwrap(), connection(a, b, 83));
        let (receiver, idle) = (udp.try_clone().unwrap(), connection(a, b, 82));
        let calls: Vec<Box<dyn FnOnce() -> io::Result<()> + Send>> = vec![
            Box::new(move || {
                let (mut stream, _peer) = quiet;
                stream.read(&mut [0; 8]).map(drop)
            }),
            Box::new(move || acceptor.accept().map(drop)),
            Box::new(move || receiver.recv_from(&mut [0; 8]).map(drop)),
            Box::new(move || set.wait(&mut Vec::new(), None).map(drop)),
            Box::new(move || {
                let (stream, _peer) = idle;
                (&stream).write_all(&vec![7; 64 << 20])
            }),
        ];
        let blocked = calls.into_iter().map(thread::spawn).collect();
        // The echo ends with its stack, or with the connection.
        thread::spawn(move || {
            let mut buf = [0; 1 << 14];
            while let Ok(n) = peer.read(&mut buf)
                && n > 0
                && peer.write_all(&buf[..n]).is_ok()
            {}
        });
        Program { stack: a.clone(), stream, listener, udp, loan, blocked }
    }

    /// Uses the stack until it panics; at most for a while.
    fn use_until(&self, has_struck: impl Fn() -> bool) {
        for i in 0..200u16 {
            if has_struck() {
                return;
            }
            let _ = (&self.stream).write(&pattern(0, 3000));
            let _ = self.udp.send_to(b"datagram", (B, 5000 + i));
            let _ = self.stack.stat();
            thread::sleep(Duration::from_millis(u64::from(i % 4)));
        }
    }

    /// All of this is down, and none of it hangs.
    fn check_down(self) {
        let Program { stack, stream, listener, udp, loan, blocked } = self;
        for call in blocked {
            // The panic may have been its own.
            if let Ok(said) = call.join() {
                is_down(said);
            }
        }
        assert!(stack.failure().unwrap().contains("panicked inside the stack"));
        is_down((&stream).read(&mut [0; 8]));
        is_down((&stream).write(b"x"));
        is_down(stream.peek(&mut [0; 8]));
        is_down(stream.recv_owned(8));
        is_down(stream.local_addr());
        is_down(stream.nodelay());
        is_down(stream.send_owned(vec![7; 100_000]).map_err(|e| e.error));
        is_down(stream.recv_posted(RecvBuf::with_capacity(4096)).map_err(|e| e.error));
        is_down(listener.accept());
        is_down(udp.recv_from(&mut [0; 8]));
        is_down(udp.send_to(b"x", (B, 53)));
        is_down(TcpStream::connect(&stack, (B, 80)));
        is_down(TcpListener::bind(&stack, (A, 82)));
        is_down(UdpSocket::bind(&stack, (A, 54)));
        is_down(stack.stat());
        is_down(stack.ping(B.parse().unwrap(), 8, PATIENCE));
        let set = stack.poll_set().unwrap();
        is_down(set.add(&udp, 1, Ready::READABLE));
        is_down(set.wait(&mut Vec::new(), None));
        // What is lent stays readable, beyond the stack's end too. That would last two minutes if it waited.
        assert!(loan == pattern(0, LENT)[..]);
        drop((stack, stream, listener, udp, set));
        assert!(loan == pattern(0, LENT)[..]);
    }
}

fn works() {
    let [a, b] = linked();
    let (a, b) = (stack(1, a, |s| s), stack(2, b, |s| s));
    let (mut c, mut s) = connection(&a, &b, 80);
    c.write_all(b"again").unwrap();
    let mut got = [0; 5];
    s.read_exact(&mut got).unwrap();
    assert_eq!(&got, b"again");
}

/// Whether the driver's n-th call was reached.
fn strike(devices: [Box<dyn Device>; 2], call: Call, n: u32, of_service: bool) -> bool {
    let (a, b, bug) = stacks(devices, ModerationConfig::ADAPTIVE);
    let program = Program::start(&a, &b);
    bug.set(call, n, of_service);
    let used = catch_unwind(AssertUnwindSafe(|| program.use_until(|| bug.has_struck())));
    if !bug.has_struck() {
        return false;
    }
    drop(used);
    drop(a);
    program.check_down();
    assert!(bug.is_dropped(), "the device is still open");
    true
}

#[test]
fn a_panic_of_any_call_of_the_driver_takes_down_its_stack_and_nothing_else() {
    within(|| {
        for call in CALLS {
            let struck = [1, 2, 3, 7, 20].into_iter().filter(|n| strike(linked(), call, *n, false));
            let count = struck.count();
            assert!(count > 2, "{call:?} is hardly called: {count}");
            strike(piped(), call, 4, false);
        }
        works();
    });
}

#[test]
fn a_panic_of_the_driver_in_the_service_thread_takes_down_its_stack_and_nothing_else() {
    within(|| {
        for call in [Call::Tx, Call::Rx, Call::Deadline, Call::Lost] {
            for n in [1, 3] {
                let (a, b, bug) = stacks(linked(), ModerationConfig::ADAPTIVE);
                bug.set(call, n, true);
                // Only the service thread answers.
                eventually("the service thread panics", || {
                    let _ = b.ping(A.parse().unwrap(), 8, Duration::from_millis(20));
                    bug.has_struck()
                });
                eventually("the stack is down", || a.failure().is_some());
                is_down(UdpSocket::bind(&a, (A, 53)));
                eventually("the device is closed", || bug.is_dropped());
            }
        }
        works();
    });
}

#[test]
fn a_thread_that_polls_for_ever_stops() {
    within(|| {
        let (a, b, bug) = stacks(linked(), ModerationConfig::POLLING);
        let program = Program::start(&a, &b);
        bug.set(Call::Tx, 1, false);
        let udp = UdpSocket::bind(&a, (A, 99)).unwrap();
        assert!(catch_unwind(AssertUnwindSafe(|| udp.send_to(b"x", (B, 9)))).is_err());
        drop((a, udp));
        program.check_down();
    });
}

#[test]
fn a_device_that_panics_when_it_is_closed_too_keeps_nothing_from_its_end() {
    within(|| {
        let (a, b, bug) = stacks(linked(), ModerationConfig::ADAPTIVE);
        let program = Program::start(&a, &b);
        bug.set(Call::Rx, 1, false);
        let _ = catch_unwind(AssertUnwindSafe(|| program.use_until(|| bug.has_struck())));
        bug.set(Call::Drop, 1, false);
        drop(a);
        program.check_down();
    });
}

fn is_readable(fd: i32) -> bool {
    let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    // SAFETY: one entry, which lives through the call.
    unsafe { libc::poll(&mut poll, 1, 0) == 1 }
}

#[test]
fn a_thread_that_sleeps_on_the_descriptor_of_a_poll_set_is_woken() {
    within(|| {
        let (a, b, bug) = stacks(linked(), ModerationConfig::ADAPTIVE);
        let udp = UdpSocket::bind(&a, (A, 53)).unwrap();
        let set = a.poll_set().unwrap();
        set.add(&udp, 1, Ready::READABLE).unwrap();
        assert!(!is_readable(set.as_raw_fd()));
        bug.set(Call::Rx, 1, false);
        eventually("the descriptor is readable", || {
            let _ = b.ping(A.parse().unwrap(), 8, Duration::from_millis(20));
            is_readable(set.as_raw_fd())
        });
        let mut events: Vec<Event> = Vec::new();
        is_down(set.wait(&mut events, Some(Duration::ZERO)));
        let late = a.poll_set().unwrap();
        assert!(is_readable(late.as_raw_fd()), "it will not be told again");
    });
}

#[test]
fn futures_end_and_memory_that_was_given_away_comes_back() {
    within(|| {
        let (a, b, bug) = stacks(linked(), ModerationConfig::ADAPTIVE);
        let (c, s) = connection(&a, &b, 80);
        // More than the peer takes in, so that some of it is never acknowledged.
        change(&s, |o| o.recv_buffer = Some(64 << 10));
        change(&c, |o| o.send_buffer = Some(4 << 20));
        let memory: Arc<Vec<u8>> = Arc::new(pattern(0, 2 << 20));
        let sent = c.send_owned(OwnedBytes::from_owner(Owned(Arc::clone(&memory)))).unwrap();
        let received = c.recv_posted(RecvBuf::with_capacity(100_000)).unwrap();
        let count = Arc::new(Count(AtomicUsize::new(0)));
        let waker = Waker::from(Arc::clone(&count));
        let mut received = pin!(received);
        assert!(received.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        bug.set(Call::Rx, 1, false);
        // The service thread or this one meets it.
        let _ = catch_unwind(AssertUnwindSafe(|| {
            eventually("it strikes", || {
                let _ = a.ping(B.parse().unwrap(), 8, Duration::from_millis(20));
                bug.has_struck()
            });
        }));
        eventually("the future is woken", || count.0.load(Ordering::SeqCst) > 0);
        match received.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(Err(e)) => is_down::<()>(Err(e.error)),
            other => panic!("{other:?}"),
        }
        // The peer refers to what it has received and not read.
        drop((s, b));
        eventually("the memory is let go", || sent.is_done() && Arc::strong_count(&memory) == 1);
        assert!(sent.result().unwrap().is_err(), "nobody has acknowledged it");
    });
}

struct Owned(Arc<Vec<u8>>);

impl AsRef<[u8]> for Owned {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

/// Memory whose drop has a bug.
struct Thorn(Vec<u8>);

impl AsRef<[u8]> for Thorn {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl Drop for Thorn {
    fn drop(&mut self) {
        panic!("a bug of the driver");
    }
}

/// A waker with a bug.
struct Bell;

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        panic!("a bug of the driver");
    }
}

#[test]
fn panics_of_the_programs_own_memory_and_wakers_are_not_those_of_the_stack() {
    within(|| {
        quiet();
        let [a, b] = linked();
        let (a, b) = (stack(1, a, |s| s), stack(2, b, |s| s));
        let (c, mut s) = connection(&a, &b, 80);
        let waker = Waker::from(Arc::new(Bell));
        let mut sent: Vec<_> = (0..4)
            .map(|_| c.send_owned(OwnedBytes::from_owner(Thorn(vec![7; 10_000]))).unwrap())
            .collect();
        for sent in &mut sent {
            let _ = pin!(sent).poll(&mut Context::from_waker(&waker));
        }
        let mut got = vec![0; 40_000];
        s.read_exact(&mut got).unwrap();
        for sent in sent {
            sent.wait(Some(PATIENCE)).unwrap();
        }
        assert_eq!((a.failure(), b.failure()), (None, None));
        (&c).write_all(b"x").unwrap();
        s.read_exact(&mut [0; 1]).unwrap();
    });
}

#[test]
fn a_stack_that_was_dropped_while_a_thread_unwound_works_in_its_destructors() {
    within(|| {
        quiet();
        let [a, b] = linked();
        let (a, b) = (stack(1, a, |s| s), stack(2, b, |s| s));
        let (c, mut s) = connection(&a, &b, 80);
        let unwound = catch_unwind(AssertUnwindSafe(move || {
            (&c).write_all(b"last words").unwrap();
            let _dropped_on_the_way = (c, a);
            panic!("a bug of the driver");
        }));
        assert!(unwound.is_err());
        let mut got = Vec::new();
        s.read_to_end(&mut got).unwrap();
        assert_eq!(got, b"last words");
    });
}

#[test]
fn a_driver_that_panics_in_a_destructor_of_a_thread_that_unwinds_does_not_end_the_process() {
    within(|| {
        for linger in [None, Some(Duration::ZERO), Some(PATIENCE)] {
            let (a, b, bug) = stacks(linked(), ModerationConfig::ADAPTIVE);
            let (c, _s) = connection(&a, &b, 80);
            c.set_linger(linger).unwrap();
            let other = a.clone();
            let unwound = catch_unwind(AssertUnwindSafe(move || {
                (&c).write_all(b"last words").unwrap();
                let _dropped_on_the_way = (c, a);
                bug.set(Call::Tx, 1, false);
                panic!("a bug of the driver");
            }));
            assert!(unwound.is_err());
            assert!(other.failure().is_some(), "{linger:?}");
            is_down(UdpSocket::bind(&other, (A, 53)));
        }
    });
}
