//! An event loop of one thread, whose tasks use the poll functions of stacks that it drives itself.

use std::future::poll_fn;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Wake, Waker};
use std::thread;
use std::time::{Duration, Instant};

use fulmar::zero_copy::ZeroCopy;
use fulmar::{ConnectOptions, Driver, Stack, TcpListener, TcpStream};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::{PATIENCE, pattern};

#[derive(Default)]
pub struct Flag(pub AtomicBool);

impl Wake for Flag {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// Whether a descriptor becomes readable within a time.
pub fn is_readable(driver: &Driver, within: Duration) -> bool {
    let mut fds = [PollFd::new(driver.as_fd(), PollFlags::POLLIN)];
    poll(&mut fds, PollTimeout::try_from(within).unwrap()).unwrap() > 0
}

/// An event loop of one thread.
pub struct Runtime {
    drivers: Vec<Driver>,
}

/// A task, and whether it was woken.
type Task<'a> = (Pin<Box<dyn Future<Output = ()> + 'a>>, Arc<Flag>);

impl Runtime {
    pub fn new(stacks: &[&Stack]) -> Runtime {
        Runtime { drivers: stacks.iter().map(|s| s.driver().unwrap()).collect() }
    }

    /// Runs tasks to their end.
    pub fn run<'a>(
        &mut self,
        tasks: impl IntoIterator<Item = Pin<Box<dyn Future<Output = ()> + 'a>>>,
    ) {
        let begin = |task| (task, Arc::new(Flag(AtomicBool::new(true))));
        let mut tasks: Vec<Task<'a>> = tasks.into_iter().map(begin).collect();
        while !tasks.is_empty() {
            let mut worked = false;
            for driver in &mut self.drivers {
                worked |= driver.turn().unwrap();
            }
            tasks.retain_mut(|(task, woken)| {
                if !woken.0.swap(false, Ordering::SeqCst) {
                    return true;
                }
                worked = true;
                let waker = Waker::from(Arc::clone(woken));
                task.as_mut().poll(&mut Context::from_waker(&waker)).is_pending()
            });
            let is_idle = |(_, woken): &Task<'_>| !woken.0.load(Ordering::SeqCst);
            if !worked
                && tasks.iter().all(is_idle)
                && self.drivers.iter_mut().all(|driver| driver.rest().unwrap())
            {
                let fds = self.drivers.iter();
                let mut fds: Vec<_> =
                    fds.map(|d| PollFd::new(d.as_fd(), PollFlags::POLLIN)).collect();
                let ready = poll(&mut fds, PollTimeout::try_from(PATIENCE).unwrap()).unwrap();
                assert!(ready > 0, "nobody wakes the loop");
            }
        }
    }
}

pub async fn read_exact(stream: &TcpStream, bytes: usize) -> Vec<u8> {
    let mut all = vec![0; bytes];
    let mut at = 0;
    while at < bytes {
        let n = poll_fn(|cx| stream.poll_read(cx, &mut all[at..])).await.unwrap();
        assert!(n > 0, "the end after {at} bytes");
        at += n;
    }
    all
}

pub async fn write_all(stream: &TcpStream, bytes: &[u8]) {
    let mut at = 0;
    while at < bytes.len() {
        at += poll_fn(|cx| stream.poll_write(cx, &bytes[at..])).await.unwrap();
    }
}

pub async fn connect(stack: &Stack, to: (&str, u16)) -> TcpStream {
    let to = format!("{}:{}", to.0, to.1).parse().unwrap();
    let stream = TcpStream::connect_nonblocking(stack, &to, &ConnectOptions::default()).unwrap();
    poll_fn(|cx| stream.poll_connected(cx)).await.unwrap();
    stream
}

/// Echoes `bytes` of each of `clients` connections, which come one after another.
pub async fn serve(listener: TcpListener, clients: usize, bytes: usize) {
    for _ in 0..clients {
        let (stream, _) = poll_fn(|cx| listener.poll_accept(cx)).await.unwrap();
        let mut left = bytes;
        while left > 0 {
            let loan = poll_fn(|cx| stream.poll_recv_owned(cx, 1 << 16)).await.unwrap();
            left -= loan.len();
            write_all(&stream, &loan.to_vec()).await;
        }
    }
}

/// A task of a loop echoes to peers that call from another thread: in bulk, and after pauses in which the loop sleeps. The
/// device wakes it then, or the service thread does in its place after 100 ms.
pub fn a_loop_serves<S: Read + Write>(
    stack: &Stack,
    address: (&str, u16),
    connect: impl Fn() -> S + Send,
) {
    const BYTES: usize = 1 << 20;
    const CHUNK: usize = 1 << 14;
    let listener = TcpListener::bind(stack, address).unwrap();
    let mut runtime = Runtime::new(&[stack]);
    let client = move || {
        let mut fastest = Duration::MAX;
        for round in 0..2 {
            let mut stream = connect();
            for sent in pattern(round, BYTES).chunks(CHUNK) {
                stream.write_all(sent).unwrap();
                let mut got = vec![0; sent.len()];
                stream.read_exact(&mut got).unwrap();
                assert!(got == sent, "the bytes differ");
            }
        }
        let mut stream = connect();
        for sent in pattern(9, BYTES).chunks(BYTES / 8) {
            thread::sleep(Duration::from_millis(20));
            let begun = Instant::now();
            stream.write_all(sent).unwrap();
            stream.read_exact(&mut vec![0; sent.len()]).unwrap();
            fastest = fastest.min(begun.elapsed());
        }
        assert!(fastest < Duration::from_millis(80), "the loop slept on: {fastest:?}");
    };
    thread::scope(|scope| {
        let client = scope.spawn(client);
        runtime.run([Box::pin(serve(listener, 3, BYTES)) as Pin<Box<dyn Future<Output = ()>>>]);
        client.join().unwrap();
    });
}
