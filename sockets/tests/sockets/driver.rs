//! The driver and the poll functions: tasks of one thread that runs the stacks itself.

use std::future::poll_fn;
use std::io::{self, Read, Write};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::thread;
use std::time::{Duration, Instant};

use fulmar::devices::{Shm, ShmConfig};
use fulmar::stat::Counter;
use fulmar::udp::SendMessage;
use fulmar::{Driver, TcpListener, TcpStream, UdpSocket, devices};

use crate::support::faulty::{Call, Faulty, quiet};
use crate::support::pipe::Pipe;
use crate::support::tasks::{
    Flag, Runtime, a_loop_serves, connect, is_readable, read_exact, serve, write_all,
};
use crate::support::{A, B, PATIENCE, connection, eventually, pattern, stack, stacks, within};

#[test]
fn tasks_of_one_thread_talk_over_two_stacks() {
    within(|| {
        let (a, b) = stacks();
        let mut runtime = Runtime::new(&[&a, &b]);
        const BYTES: usize = 3 << 20;
        let server = serve(TcpListener::bind(&b, (B, 80)).unwrap(), 3, BYTES);
        let client = async {
            for round in 0..3 {
                let stream = connect(&a, (B, 80)).await;
                let sent = pattern(round, BYTES);
                let mut got = pin!(read_exact(&stream, BYTES));
                let mut put = pin!(write_all(&stream, &sent));
                let mut is_sent = false;
                // Both at once: more is under way than both buffers hold.
                let got = poll_fn(|cx| {
                    is_sent = is_sent || put.as_mut().poll(cx).is_ready();
                    got.as_mut().poll(cx)
                })
                .await;
                assert!(got == sent);
            }
        };
        runtime.run([Box::pin(server) as Pin<Box<dyn Future<Output = ()>>>, Box::pin(client)]);
    });
}

#[test]
fn a_loop_serves_over_each_device_that_needs_no_kernel() {
    type Pair = [Box<dyn fulmar::device::Device>; 2];
    fn both<D: fulmar::device::Device + 'static>((a, b): (D, D)) -> Pair {
        [Box::new(a), Box::new(b)]
    }
    let link = || -> Pair { devices::link_pair().unwrap().into() };
    let shm = || {
        let name = format!("fulmar-driver-{}", std::process::id());
        let open = move || {
            let config = ShmConfig { name, wait: Some(PATIENCE), ..ShmConfig::default() };
            Shm::open(&config).unwrap()
        };
        let other = thread::spawn(open.clone());
        both((open(), other.join().unwrap()))
    };
    let own = || both(Pipe::pair());
    let polled = || {
        let (a, b) = Pipe::pair();
        both((a.without_fd(), b.without_fd()))
    };
    within(move || {
        for [a, b] in [link(), shm(), own(), polled()] {
            let (a, b) = (stack(1, a, |s| s), stack(2, b, |s| s));
            a_loop_serves(&b, (B, 80), || TcpStream::connect(&a, (B, 80)).unwrap());
        }
    });
}

#[test]
fn datagrams_come_and_go() {
    within(|| {
        let (a, b) = stacks();
        let mut runtime = Runtime::new(&[&a, &b]);
        let at_b = UdpSocket::bind(&b, (B, 53)).unwrap();
        let at_a = UdpSocket::connected(&a, (B, 53)).unwrap();
        let answering = async {
            let mut buf = [0; 64];
            let (n, from) = poll_fn(|cx| at_b.poll_recv_from(cx, &mut buf)).await.unwrap();
            poll_fn(|cx| at_b.poll_send_to(cx, &buf[..n], Some(from))).await.unwrap();
        };
        let asking = async {
            let question = [SendMessage::new(b"question")];
            assert_eq!(poll_fn(|cx| at_a.poll_send_many(cx, &question)).await.unwrap(), 1);
            let mut buf = [0; 64];
            let (n, _) = poll_fn(|cx| at_a.poll_recv_from(cx, &mut buf)).await.unwrap();
            assert_eq!(&buf[..n], b"question");
        };
        runtime.run([Box::pin(answering) as Pin<Box<dyn Future<Output = ()>>>, Box::pin(asking)]);
    });
}

#[test]
fn the_descriptor_tells_of_frames_of_timers_and_of_other_threads() {
    within(|| {
        let (a, b) = stacks();
        let (c, s) = connection(&a, &b, 80);
        let mut driver = a.driver().unwrap();
        let rest = |driver: &mut Driver| {
            eventually("nothing is left", || !driver.turn().unwrap() && driver.rest().unwrap());
        };
        rest(&mut driver);
        while is_readable(&driver, Duration::from_millis(20)) {
            rest(&mut driver);
        }
        (&s).write_all(b"frame").unwrap();
        assert!(is_readable(&driver, PATIENCE), "a frame");
        rest(&mut driver);
        (&c).read_exact(&mut [0; 5]).unwrap();
        // No host has the address: the repetition of the question for it is a timer.
        let lost = UdpSocket::bind(&a, (A, 9)).unwrap();
        rest(&mut driver);
        while is_readable(&driver, Duration::from_millis(20)) {
            rest(&mut driver);
        }
        thread::scope(|scope| {
            scope.spawn(|| lost.send_to(b"x", "10.1.0.77:9").unwrap());
        });
        assert!(is_readable(&driver, PATIENCE), "an earlier deadline of another thread");
    });
}

#[test]
fn idle_connections_cost_no_turn() {
    within(|| {
        let (a, b) = stacks();
        let listener = TcpListener::bind(&b, (B, 80)).unwrap();
        let idle: Vec<_> = (0..100)
            .map(|_| {
                let c = TcpStream::connect(&a, (B, 80)).unwrap();
                (c, listener.accept().unwrap())
            })
            .collect();
        let mut driver = a.driver().unwrap();
        let flag = Arc::new(Flag::default());
        let waker = Waker::from(Arc::clone(&flag));
        for (c, _) in &idle {
            let read = c.poll_read(&mut Context::from_waker(&waker), &mut [0; 9]);
            assert!(read.is_pending());
        }
        let mut turns_within = |time: Duration| {
            let (begun, mut turns) = (Instant::now(), 0);
            while begun.elapsed() < time {
                while driver.turn().unwrap() || !driver.rest().unwrap() {}
                turns += 1;
                is_readable(&driver, time);
            }
            turns
        };
        // Timers of the handshakes end.
        turns_within(Duration::from_millis(1500));
        let turns = turns_within(Duration::from_secs(1));
        assert!(turns < 10, "{turns} turns");
        assert!(!flag.0.load(Ordering::SeqCst));
        (&idle[7].1.0).write_all(b"now").unwrap();
        eventually("its task is woken", || {
            let _ = driver.turn().unwrap();
            flag.0.load(Ordering::SeqCst)
        });
    });
}

#[test]
fn a_shard_has_one_driver_and_the_service_thread_after_it() {
    within(|| {
        let (a, b) = stacks();
        let (c, s) = connection(&a, &b, 80);
        let driver = a.driver().unwrap();
        let second = a.driver().unwrap_err();
        assert_eq!(second.kind(), io::ErrorKind::ResourceBusy);
        drop(driver);
        drop(a.driver().unwrap());
        // Without a driver the service thread wakes the task.
        let flag = Arc::new(Flag::default());
        let waker = Waker::from(Arc::clone(&flag));
        let mut buf = [0; 9];
        let mut read = || c.poll_read(&mut Context::from_waker(&waker), &mut buf);
        assert!(read().is_pending());
        (&s).write_all(b"x").unwrap();
        eventually("the task is woken", || flag.0.load(Ordering::SeqCst));
        assert!(matches!(read(), Poll::Ready(Ok(1))));
    });
}

#[test]
fn the_service_thread_stands_in_for_a_driver_that_is_stuck() {
    within(|| {
        let (a, b) = stacks();
        let mut drivers = [a.driver().unwrap(), b.driver().unwrap()];
        let mut turn = || {
            for driver in &mut drivers {
                while driver.turn().unwrap() || !driver.rest().unwrap() {}
            }
        };
        turn();
        // Without turns both service threads stand in; no thread is in a call of the second stack.
        let listener = TcpListener::bind(&b, (B, 80)).unwrap();
        for _ in 0..3 {
            let client = TcpStream::connect(&a, (B, 80)).unwrap();
            let (server, _) = listener.accept().unwrap();
            let begun = Instant::now();
            for _ in 0..100 {
                (&client).write_all(b"x").unwrap();
                (&server).read_exact(&mut [0; 1]).unwrap();
                (&server).write_all(b"y").unwrap();
                (&client).read_exact(&mut [0; 1]).unwrap();
            }
            assert!(begun.elapsed() < Duration::from_secs(3), "{:?}", begun.elapsed());
            // The drivers take the lead back.
            turn();
        }
    });
}

#[test]
fn a_thread_in_a_blocking_call_needs_no_turn_of_a_driver_that_is_stuck() {
    within(|| {
        let (a, b) = stacks();
        let (c, s) = connection(&a, &b, 80);
        let mut driver = a.driver().unwrap();
        while driver.turn().unwrap() || !driver.rest().unwrap() {}
        let begun = Instant::now();
        (&s).write_all(b"x").unwrap();
        (&c).read_exact(&mut [0; 1]).unwrap();
        assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
        // Beside one that turns it waits no time.
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::SeqCst) {
                    while driver.turn().unwrap() || !driver.rest().unwrap() {}
                    is_readable(&driver, Duration::from_millis(10));
                }
            });
            let begun = Instant::now();
            for _ in 0..50 {
                (&s).write_all(b"x").unwrap();
                (&c).read_exact(&mut [0; 1]).unwrap();
                (&c).write_all(b"y").unwrap();
                (&s).read_exact(&mut [0; 1]).unwrap();
            }
            let took = begun.elapsed();
            stop.store(true, Ordering::SeqCst);
            assert!(took < Duration::from_secs(3), "{took:?}");
        });
    });
}

#[test]
fn the_last_task_of_a_side_is_woken_and_a_dropped_one_is_not_missed() {
    within(|| {
        let (a, b) = stacks();
        let (c, s) = connection(&a, &b, 80);
        let mut driver = a.driver().unwrap();
        let flags = [(); 2].map(|()| Arc::new(Flag::default()));
        for flag in &flags {
            let waker = Waker::from(Arc::clone(flag));
            assert!(c.poll_read_ready(&mut Context::from_waker(&waker)).is_pending());
        }
        assert_eq!(Arc::strong_count(&flags[0]), 1, "the first waker is gone");
        (&s).write_all(b"x").unwrap();
        eventually("the last is woken", || {
            let _ = driver.turn().unwrap();
            flags[1].0.load(Ordering::SeqCst)
        });
        assert!(!flags[0].0.load(Ordering::SeqCst));
        assert_eq!(Arc::strong_count(&flags[1]), 1, "a waker is used once");
    });
}

/// Panics, or uses the stack, when it is woken or dropped.
struct Rude {
    stream: TcpStream,
    panics: bool,
    woken: Arc<AtomicUsize>,
}

impl Wake for Rude {
    fn wake(self: Arc<Self>) {
        self.woken.fetch_add(1, Ordering::SeqCst);
        let _ = (&self.stream).write(b"from a waker");
        assert!(!self.panics, "of the test");
    }
}

#[test]
fn wakers_may_use_the_stack_and_panic_and_own_its_sockets() {
    within(|| {
        quiet();
        let (a, b) = stacks();
        let woken = Arc::new(AtomicUsize::new(0));
        let pairs: Vec<_> = (0..3).map(|i| connection(&a, &b, 80 + i)).collect();
        for (i, (c, _)) in pairs.iter().enumerate() {
            let (stream, _far) = connection(&a, &b, 90 + i as u16);
            let rude = Rude { stream, panics: i == 0, woken: Arc::clone(&woken) };
            let waker = Waker::from(Arc::new(rude));
            assert!(c.poll_read_ready(&mut Context::from_waker(&waker)).is_pending());
        }
        let mut driver = a.driver().unwrap();
        // All in one turn.
        pairs.iter().for_each(|(_, s)| (&*s).write_all(b"x").unwrap());
        eventually("all are woken", || {
            let _ = driver.turn().unwrap();
            woken.load(Ordering::SeqCst) == 3
        });
        assert_eq!(a.failure(), None);
        let again = Waker::from(Arc::new(Flag::default()));
        for (c, s) in &pairs {
            (&*c).read_exact(&mut [0; 1]).unwrap();
            assert!(c.poll_read_ready(&mut Context::from_waker(&again)).is_pending());
            (&*s).write_all(b"y").unwrap();
        }
    });
}

#[test]
fn tasks_learn_that_their_stack_is_down() {
    within(|| {
        quiet();
        for has_panicked in [false, true] {
            let (p, q) = Pipe::pair();
            let plug = p.plug(&q);
            let (p, bug) = Faulty::around(Box::new(p));
            let (a, b) =
                (stack(1, p, |s| s.exit_drain(Duration::ZERO)), stack(2, Box::new(q), |s| s));
            let (c, _s) = connection(&a, &b, 80);
            let flag = Arc::new(Flag::default());
            let waker = Waker::from(Arc::clone(&flag));
            let read = || c.poll_read(&mut Context::from_waker(&waker), &mut [0; 9]);
            assert!(read().is_pending());
            if has_panicked {
                bug.set(Call::Tx, 1, false);
                let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| (&c).write(b"x")));
            } else {
                plug.pull();
            }
            eventually("the task is woken", || flag.0.load(Ordering::SeqCst));
            let Poll::Ready(Err(e)) = read() else { panic!("it waits") };
            assert_eq!(e.raw_os_error(), Some(libc::ENETDOWN));
            assert!(a.driver().is_err() || !has_panicked);
        }
    });
}

#[test]
fn the_writes_of_a_turn_leave_as_one_burst() {
    within(|| {
        let (a, b) = stacks();
        let pairs: Vec<_> = (0..10).map(|i| connection(&a, &b, 80 + i)).collect();
        let mut driver = a.driver().unwrap();
        while driver.turn().unwrap() || !driver.rest().unwrap() {}
        let bursts = || a.stat().unwrap().shard.counters.value(Counter::TxBursts);
        (&pairs[0].1).write_all(b"x").unwrap();
        eventually("it has come", || driver.turn().unwrap());
        let before = bursts();
        // Of the driver's own thread, in its turn.
        for (c, _) in &pairs {
            (&*c).write_all(b"y").unwrap();
        }
        let _ = driver.turn().unwrap();
        assert!(bursts() - before <= 3, "{} bursts", bursts() - before);
        for (_, s) in &pairs {
            (&*s).read_exact(&mut [0; 1]).unwrap();
        }
    });
}
