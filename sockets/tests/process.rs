//! What concerns whole processes: their end, their forks, their signal handlers.
//!
//! Without the usual harness, since each case wants a process and a main thread of its own: the
//! program starts itself again for every case, named by its argument.

// The calls of the operating system under test: fork, signals.
#![allow(unsafe_code)]

mod support;

use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::{Duration, Instant};

use fulmar::{Stack, TcpListener, TcpStream, UdpSocket};

use support::pipe::Pipe;
use support::{A, B, PATIENCE, connection, pattern, stack, stacks};

const CASE: &str = "FULMAR_PROCESS_CASE";
const LEN: usize = 1 << 20;

/// A case: what the parent does, and what the process that it starts does in its main thread.
struct Case {
    name: &'static str,
    parent: fn(&str),
    child: fn(),
}

const CASES: &[Case] = &[
    Case {
        name: "a_process_that_returns_from_main_right_after_a_write_delivers_it",
        parent: receive_everything,
        child: || write_as_client().forget(),
    },
    Case {
        name: "a_process_that_drops_everything_right_after_a_write_delivers_it",
        parent: receive_everything,
        child: || drop(write_as_client()),
    },
    Case {
        name: "a_process_that_exits_while_other_threads_are_blocked_delivers_what_it_wrote",
        parent: receive_everything,
        child: exit_beside_blocked_threads,
    },
    Case {
        name: "a_forked_child_gets_clean_errors_and_leaves_its_parent_alone",
        parent: succeed,
        child: fork_beside_traffic,
    },
    Case {
        name: "a_forked_child_cannot_drive_and_the_driver_of_its_parent_goes_on",
        parent: succeed,
        child: fork_beside_a_driver,
    },
    Case {
        name: "a_signal_handler_that_calls_the_interrupted_stack_never_waits_for_itself",
        parent: succeed,
        child: calls_from_a_signal_handler,
    },
];

fn main() -> ExitCode {
    if let Some(name) = std::env::var_os(CASE) {
        let case = CASES.iter().find(|c| Some(c.name) == name.to_str()).expect("a case");
        (case.child)();
        return ExitCode::SUCCESS;
    }
    let filter = std::env::args().skip(1).find(|a| !a.starts_with('-')).unwrap_or_default();
    for case in CASES.iter().filter(|c| c.name.contains(&filter)) {
        (case.parent)(case.name);
        println!("test {} ... ok", case.name);
    }
    ExitCode::SUCCESS
}

fn start(case: &str, stdin: Stdio) -> Child {
    let program = std::env::current_exe().unwrap();
    Command::new(program).env(CASE, case).stdin(stdin).spawn().unwrap()
}

/// Waits for the end of a child; one that hangs is killed, and the case has failed.
fn finish(mut child: Child) {
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return assert!(status.success(), "{status}");
        }
        if start.elapsed() > PATIENCE {
            let _ = child.kill();
            panic!("the process hangs");
        }
        thread::sleep(Duration::from_millis(5));
    }
}

fn succeed(case: &str) {
    finish(start(case, Stdio::null()));
}

/// The parent's side of a device that ends in the child, and a server on it.
fn receive_everything(case: &str) {
    let (near, far) = UnixDatagram::pair().unwrap();
    let b = stack(2, Box::new(Pipe::new(near, 2)), |s| s);
    let listener = TcpListener::bind(&b, (B, 80)).unwrap();
    let child = start(case, Stdio::from(OwnedFd::from(far)));
    listener.set_accept_timeout(Some(PATIENCE)).unwrap();
    let (mut s, _) = listener.accept().unwrap();
    s.set_read_timeout(Some(PATIENCE)).unwrap();
    s.write_all(b"!").unwrap();
    let mut got = Vec::new();
    s.read_to_end(&mut got).unwrap();
    assert!(got == pattern(0, LEN), "{} bytes arrived", got.len());
    // The child ends without a close in the other direction if need be.
    drop(s);
    finish(child);
}

struct Client {
    stack: Stack,
    stream: TcpStream,
}

impl Client {
    /// Nothing is dropped: only the end of the process is left to deliver.
    fn forget(self) {
        std::mem::forget(self);
    }
}

/// A stack on the device that standard input is, and a write to the parent.
fn write_as_client() -> Client {
    let fd = io::stdin().as_fd().try_clone_to_owned().unwrap();
    let stack = stack(1, Box::new(Pipe::from_fd(fd, 1)), |s| s);
    let mut stream = TcpStream::connect(&stack, (B, 80)).unwrap();
    // The main thread waits once, so that what it keeps for that is gone when the process ends.
    stream.read_exact(&mut [0; 1]).unwrap();
    assert_eq!(stream.write(&pattern(0, LEN)).unwrap(), LEN);
    Client { stack, stream }
}

fn exit_beside_blocked_threads() {
    let client = write_as_client();
    let listener = TcpListener::bind(&client.stack, (A, 81)).unwrap();
    let mut reader = client.stream.try_clone().unwrap();
    thread::spawn(move || listener.accept());
    thread::spawn(move || reader.read(&mut [0; 1]));
    thread::sleep(Duration::from_millis(50));
    let exits = thread::spawn(|| std::process::exit(0));
    exits.join().unwrap();
}

fn is_bad_handle<T: std::fmt::Debug>(r: io::Result<T>) -> bool {
    r.is_err_and(|e| e.raw_os_error() == Some(libc::EBADF))
}

fn fork_beside_traffic() {
    let (a, b) = stacks();
    let (c, s) = connection(&a, &b, 80);
    let listener = TcpListener::bind(&a, (A, 81)).unwrap();
    let udp = UdpSocket::bind(&a, (A, 53)).unwrap();
    let set = a.poll_set().unwrap();
    set.add(&udp, 0, fulmar::Ready::READABLE).unwrap();
    // Traffic on the parent's threads, so that locks are held when it forks.
    let mut echo = s.try_clone().unwrap();
    let server = thread::spawn(move || {
        let mut buf = vec![0; 50_000];
        while let Ok(n @ 1..) = echo.read(&mut buf) {
            echo.write_all(&buf[..n]).unwrap();
        }
    });
    let mut client = c.try_clone().unwrap();
    let rounds = 300;
    let traffic = thread::spawn(move || {
        let message = pattern(0, 50_000);
        let mut answer = vec![0; message.len()];
        for _ in 0..rounds {
            client.write_all(&message).unwrap();
            client.read_exact(&mut answer).unwrap();
            assert!(answer == message);
        }
    });
    for _ in 0..30 {
        // SAFETY: the child only makes calls that are under test, on memory of its own.
        match unsafe { libc::fork() } {
            0 => in_forked_child((a, b, c, s, listener, udp, set)),
            child => wait_for(child),
        }
    }
    traffic.join().unwrap();
    c.shutdown(std::net::Shutdown::Both).unwrap();
    server.join().unwrap();
    assert!(a.ping(B.parse().unwrap(), 56, PATIENCE).is_ok());
}

type Everything = (Stack, Stack, TcpStream, TcpStream, TcpListener, UdpSocket, fulmar::PollSet);

/// Ends with 42 if everything is as it should be.
fn in_forked_child(all: Everything) -> ! {
    let (a, _, c, _, listener, udp, set) = &all;
    let (mut r, mut w) = (c, c);
    let checks = [
        is_bad_handle(r.read(&mut [0; 8])),
        is_bad_handle(w.write(b"x")),
        is_bad_handle(w.write(&[0; 100_000])),
        is_bad_handle(c.peek(&mut [0; 8])),
        is_bad_handle(c.shutdown(std::net::Shutdown::Both)),
        is_bad_handle(c.set_nodelay(true)),
        is_bad_handle(listener.accept()),
        is_bad_handle(udp.recv_from(&mut [0; 8])),
        is_bad_handle(udp.send_to(b"x", (B, 53))),
        is_bad_handle(TcpStream::connect(a, (B, 80))),
        is_bad_handle(TcpListener::bind(a, (A, 99))),
        is_bad_handle(set.wait(&mut Vec::new(), None)),
        is_bad_handle(a.stat().map(drop)),
    ];
    let ok = checks.iter().all(|ok| *ok);
    drop(all);
    // With all that happens at the end of a process.
    std::process::exit(if ok { 42 } else { 1 })
}

fn wait_for(child: libc::pid_t) {
    let start = Instant::now();
    loop {
        let mut status = 0;
        // SAFETY: `status` is a local that outlives the call.
        if unsafe { libc::waitpid(child, &mut status, libc::WNOHANG) } == child {
            assert!(libc::WIFEXITED(status), "killed by signal {}", libc::WTERMSIG(status));
            return assert_eq!(libc::WEXITSTATUS(status), 42);
        }
        if start.elapsed() > PATIENCE / 2 {
            // SAFETY: the child is ours and not reaped.
            unsafe { libc::kill(child, libc::SIGKILL) };
            panic!("the forked child hangs");
        }
        thread::sleep(Duration::from_millis(1));
    }
}

fn fork_beside_a_driver() {
    let (a, b) = stacks();
    let (c, mut s) = connection(&a, &b, 80);
    let mut driver = a.driver().unwrap();
    let poll_read = || {
        let mut cx = Context::from_waker(Waker::noop());
        match c.poll_read(&mut cx, &mut [0; 1]) {
            Poll::Ready(read) => read,
            Poll::Pending => Err(ErrorKind::WouldBlock.into()),
        }
    };
    for rests in [false, true, true] {
        while driver.turn().unwrap() || rests && !driver.rest().unwrap() {}
        // SAFETY: the child only makes calls that are under test, on memory of its own.
        match unsafe { libc::fork() } {
            0 => {
                let ok = is_bad_handle(driver.turn())
                    && is_bad_handle(driver.rest())
                    && is_bad_handle(a.driver())
                    && is_bad_handle(poll_read());
                drop(driver);
                std::process::exit(if ok { 42 } else { 1 })
            }
            child => wait_for(child),
        }
        assert_eq!(poll_read().unwrap_err().kind(), ErrorKind::WouldBlock);
        s.write_all(b"x").unwrap();
        let begun = Instant::now();
        while poll_read().is_err() {
            driver.turn().unwrap();
            assert!(begun.elapsed() < PATIENCE, "nothing comes");
        }
    }
}

/// What the handler uses: a socket of its own and the busy one, both of the same stack.
static HANDLERS: OnceLock<[TcpStream; 2]> = OnceLock::new();
static SIGNALS: AtomicU64 = AtomicU64::new(0);
static WRITTEN: AtomicU64 = AtomicU64::new(0);
static PUT_OFF: AtomicU64 = AtomicU64::new(0);

extern "C" fn on_alarm(_: libc::c_int) {
    let Some([own, busy]) = HANDLERS.get() else { return };
    let put_off = |e: io::Error| {
        if e.kind() != ErrorKind::WouldBlock {
            std::process::abort();
        }
        PUT_OFF.fetch_add(1, Ordering::Relaxed);
    };
    match (&*own).write(&[7; 40]) {
        Ok(n) => drop(WRITTEN.fetch_add(n as u64, Ordering::Relaxed)),
        Err(e) => put_off(e),
    }
    // Nothing comes here: it waits a moment, or must not.
    if let Err(e) = (&*own).read(&mut [0; 8]) {
        put_off(e);
    }
    if let Err(e) = busy.peek(&mut [0; 8]) {
        put_off(e);
    }
    if SIGNALS.fetch_add(1, Ordering::Relaxed) < ALARMS {
        set_alarm();
    }
}

const ALARMS: u64 = 3000;

/// SIGALRM in a moment, once: whatever the machine, the interrupted thread comes on in between.
fn set_alarm() {
    let now = libc::timeval { tv_sec: 0, tv_usec: 300 };
    let never = libc::timeval { tv_sec: 0, tv_usec: 0 };
    let timer = libc::itimerval { it_interval: never, it_value: now };
    // SAFETY: the timer is a local that outlives the call, which is async-signal-safe in fact (a
    // plain system call), if not on the list of POSIX.
    unsafe { libc::setitimer(libc::ITIMER_REAL, &timer, std::ptr::null_mut()) };
}

fn start_alarms() {
    // SAFETY: the handler has the right signature; the action is a local that outlives the call.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_alarm as *const () as usize;
        action.sa_flags = libc::SA_RESTART;
        libc::sigaction(libc::SIGALRM, &action, std::ptr::null_mut());
    }
    set_alarm();
}

/// Whether this thread takes the alarms; those that it starts inherit it.
fn take_alarms(yes: bool) {
    let how = if yes { libc::SIG_UNBLOCK } else { libc::SIG_BLOCK };
    // SAFETY: the set is a local that outlives the calls.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut set);
        libc::sigaddset(&mut set, libc::SIGALRM);
        libc::pthread_sigmask(how, &set, std::ptr::null_mut());
    }
}

/// Reads to the end of the stream, which is `message` again and again.
fn read_answers(c: &mut TcpStream, answer: &mut [u8], message: &[u8]) {
    loop {
        let mut filled = 0;
        while filled < answer.len() {
            match c.read(&mut answer[filled..]) {
                Ok(0) => break,
                Ok(n) => filled += n,
                Err(e) => panic!("{e}"),
            }
        }
        if filled == 0 {
            return;
        }
        assert!(*answer == *message, "the stream is damaged");
    }
}

fn calls_from_a_signal_handler() {
    // Only for the main thread: a handler on the thread that writes would wait for what it writes.
    take_alarms(false);
    let (a, b) = stacks();
    let (mut c, mut s) = connection(&a, &b, 80);
    let (own, mut counter) = connection(&a, &b, 81);
    own.set_read_timeout(Some(Duration::from_micros(100))).unwrap();
    own.set_write_timeout(Some(Duration::from_micros(100))).unwrap();
    let echo = thread::spawn(move || {
        let mut buf = vec![0; 100_000];
        while let Ok(n @ 1..) = s.read(&mut buf) {
            s.write_all(&buf[..n]).unwrap();
        }
    });
    let counts = thread::spawn(move || {
        let mut got = Vec::new();
        counter.read_to_end(&mut got).unwrap();
        got.len() as u64
    });
    let own_end = own.try_clone().unwrap();
    c.set_read_timeout(Some(PATIENCE)).unwrap();
    let busy = c.try_clone().unwrap();
    HANDLERS.set([own, busy]).unwrap_or_else(|_| panic!("once"));
    let message = pattern(0, 300_000);
    let mut answer = vec![0; message.len()];
    let half = thread::spawn({
        let mut c = c.try_clone().unwrap();
        let message = message.clone();
        move || {
            while SIGNALS.load(Ordering::Relaxed) < ALARMS {
                c.write_all(&message).unwrap();
                thread::yield_now();
            }
            c.shutdown(std::net::Shutdown::Write).unwrap();
        }
    });
    // Not earlier: from here on bytes come for the handler's peek, and this thread, which the handler
    // interrupts, takes no memory from the heap outside the stack.
    start_alarms();
    take_alarms(true);
    read_answers(&mut c, &mut answer, &message);
    take_alarms(false);
    half.join().unwrap();
    echo.join().unwrap();
    own_end.shutdown(std::net::Shutdown::Write).unwrap();
    assert_eq!(counts.join().unwrap(), WRITTEN.load(Ordering::Relaxed));
    assert!(WRITTEN.load(Ordering::Relaxed) > 0, "no handler got through");
    assert!(PUT_OFF.load(Ordering::Relaxed) > 0, "no handler was put off");
}
