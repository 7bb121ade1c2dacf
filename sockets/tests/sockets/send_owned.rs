//! Memory given away to be sent: not copied, let go exactly once, and its fate told.

use std::future::Future;
use std::io::{ErrorKind, Read, Write};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::thread;
use std::time::Duration;

use fulmar::TcpStream;
use fulmar::config::PoolConfig;
use fulmar::device::{Chain, Pool, Purpose};
use fulmar::stat::Counter;
use fulmar::zero_copy::{OwnedBytes, ZeroCopy};

use crate::support::{
    PATIENCE, buffers_come_home, change, connection, eventually, fill, pattern, stacks,
    stacks_with, within,
};

/// Bytes that count how often they were let go.
struct Counted(Vec<u8>, Arc<AtomicUsize>);

impl AsRef<[u8]> for Counted {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.1.fetch_add(1, Ordering::SeqCst);
    }
}

fn counted(bytes: Vec<u8>) -> (OwnedBytes, Arc<AtomicUsize>) {
    let gone = Arc::new(AtomicUsize::new(0));
    (OwnedBytes::from_owner(Counted(bytes, Arc::clone(&gone))), gone)
}

fn reader(mut s: TcpStream, len: usize) -> thread::JoinHandle<(TcpStream, Vec<u8>)> {
    thread::spawn(move || {
        let mut bytes = vec![0; len];
        s.read_exact(&mut bytes).unwrap();
        (s, bytes)
    })
}

#[test]
fn owned_bytes_are_not_copied_and_are_let_go_once_when_they_are_read() {
    within(|| {
        let (a, b) = stacks();
        let (c, s) = connection(&a, &b, 80);
        let expected = pattern(0, 5 << 20);
        let (bytes, gone) = counted(expected.clone());
        let before = a.stat().unwrap().count(Counter::CopiedBytes);
        let reader = reader(s, expected.len());
        let done = c.send_owned(bytes).unwrap();
        let (_s, got) = reader.join().unwrap();
        assert!(got == expected);
        done.wait(Some(PATIENCE)).unwrap();
        assert!(done.is_done() && done.result().unwrap().is_ok());
        assert_eq!(gone.load(Ordering::SeqCst), 1);
        assert_eq!(a.stat().unwrap().count(Counter::CopiedBytes) - before, 0);
        buffers_come_home(&[&a, &b]);
    });
}

#[test]
fn memory_that_the_peer_still_refers_to_is_not_released() {
    within(|| {
        let (a, b) = stacks();
        let (c, s) = connection(&a, &b, 80);
        let done = c.send_owned(pattern(0, 50_000)).unwrap();
        // Device `link` passes references: acknowledged is not yet reaped.
        eventually("all is acknowledged", || c.info().unwrap().send_queue_bytes == 0);
        assert!(!done.is_done());
        let early = done.wait(Some(Duration::from_millis(20)));
        assert_eq!(early.unwrap_err().kind(), ErrorKind::WouldBlock);
        let (_s, got) = reader(s, 50_000).join().unwrap();
        assert!(got == pattern(0, 50_000));
        done.wait(Some(PATIENCE)).unwrap();
    });
}

#[test]
fn every_kind_of_owner_arrives_between_copied_writes() {
    within(|| {
        let (a, b) = stacks();
        let (mut c, s) = connection(&a, &b, 80);
        let mut pool = Pool::new(PoolConfig::with_budget(4 << 20)).unwrap();
        let mut chain = Chain::new();
        for part in pattern(9, 70_000).chunks(3000) {
            let mut m = pool.alloc(part.len(), 0, Purpose::Receive).unwrap();
            m.append(part.len()).unwrap().copy_from_slice(part);
            chain.push_back(m);
        }
        let all: Vec<OwnedBytes> = vec![
            b"static".into(),
            "text".into(),
            String::from("string").into(),
            pattern(1, 3000).into(),
            pattern(2, 100).into_boxed_slice().into(),
            chain.into(),
        ];
        let mut expected = Vec::new();
        for part in [b"static".to_vec(), b"text".to_vec(), b"string".to_vec()] {
            expected.extend([part, b"-".to_vec()].concat());
        }
        for part in [pattern(1, 3000), pattern(2, 100), pattern(9, 70_000)] {
            expected.extend([part, b"-".to_vec()].concat());
        }
        let reader = reader(s, expected.len());
        let mut done = Vec::new();
        for bytes in all {
            done.push(c.send_owned(bytes).unwrap());
            c.write_all(b"-").unwrap();
        }
        let (_s, got) = reader.join().unwrap();
        assert!(got == expected);
        done.iter().for_each(|d| d.wait(Some(PATIENCE)).unwrap());
        buffers_come_home(&[&a, &b]);
        pool.drain_remote();
        assert_eq!(pool.outstanding(), 0);
    });
}

#[test]
fn a_socket_that_does_not_wait_takes_what_fits_and_gives_back_the_rest() {
    within(|| {
        let (a, b) = stacks();
        let (c, s) = connection(&a, &b, 80);
        c.set_nonblocking(true).unwrap();
        let refused = c.send_owned(pattern(0, 40 << 20)).unwrap_err();
        assert_eq!(refused.error.kind(), ErrorKind::WouldBlock);
        assert!(refused.sent > 0 && refused.sent + refused.rest.len() == 40 << 20);
        let mut rest = refused.rest;
        let done = rest.completion();
        let reader = reader(s, 40 << 20);
        while !rest.is_empty() {
            match c.try_send_owned(&mut rest) {
                Ok(n) => assert!(n > 0),
                Err(e) if e.kind() == ErrorKind::WouldBlock => thread::yield_now(),
                Err(e) => panic!("{e}"),
            }
        }
        assert_eq!(c.try_send_owned(&mut rest).unwrap(), 0);
        let (_s, got) = reader.join().unwrap();
        assert!(got == pattern(0, 40 << 20));
        assert!(!done.is_done(), "the handle still holds the memory");
        drop(rest);
        done.wait(Some(PATIENCE)).unwrap();
    });
}

#[test]
fn a_reset_releases_the_memory_and_is_reported() {
    within(|| {
        let (a, b) = stacks();
        let (c, mut s) = connection(&a, &b, 80);
        fill(&c);
        let (bytes, gone) = counted(pattern(0, 30_000));
        change(&c, |o| o.send_buffer = Some(4 << 20));
        let done = c.send_owned(bytes).unwrap();
        assert!(!done.is_done());
        s.read_exact(&mut [0; 10]).unwrap();
        drop(s);
        let error = done.wait(Some(PATIENCE)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
        assert_eq!(gone.load(Ordering::SeqCst), 1);
        // The connection is over for others too, and nothing is given away for nothing.
        let refused = c.send_owned(pattern(0, 1000)).unwrap_err();
        assert_eq!((refused.sent, refused.rest.len()), (0, 1000));
        drop(c);
        buffers_come_home(&[&a, &b]);
    });
}

#[test]
fn the_end_of_a_connection_or_a_stack_releases_the_memory() {
    within(|| {
        let (a, b) = stacks_with(|s| s.exit_drain(Duration::ZERO));
        let (c, s) = connection(&a, &b, 80);
        fill(&c);
        change(&c, |o| o.send_buffer = Some(4 << 20));
        let done = c.send_owned(pattern(0, 30_000)).unwrap();
        c.set_linger(Some(Duration::ZERO)).unwrap();
        drop(c);
        let error = done.wait(Some(PATIENCE)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionAborted);
        // Over `link` it holds buffers of the other stack.
        drop(s);

        let (c, s) = connection(&a, &b, 81);
        fill(&c);
        change(&c, |o| o.send_buffer = Some(4 << 20));
        let done = c.send_owned(pattern(0, 30_000)).unwrap();
        drop((c, a));
        drop((s, b));
        let error = done.wait(Some(PATIENCE)).unwrap_err();
        assert_eq!((done.is_done(), error.kind()), (true, ErrorKind::ConnectionAborted));
    });
}

#[test]
fn an_empty_owned_send_completes_at_once() {
    within(|| {
        let (a, b) = stacks();
        let (c, _s) = connection(&a, &b, 80);
        let done = c.send_owned(Vec::new()).unwrap();
        assert!(done.result().unwrap().is_ok());
        assert_eq!(c.try_send_owned(&mut Vec::new().into()).unwrap(), 0);
    });
}

#[test]
fn owned_writes_of_a_tiny_pool_wait_and_all_come_through() {
    within(|| {
        let (a, b) = stacks_with(|s| s.budget_bytes(4 << 20));
        let ends: Vec<_> = (1..7).map(|port| connection(&a, &b, port)).collect();
        let work: Vec<_> = ends
            .into_iter()
            .map(|(c, s)| {
                let reader = reader(s, 8 << 20);
                thread::spawn(move || {
                    let (bytes, gone) = counted(pattern(5, 8 << 20));
                    change(&c, |o| o.send_buffer = Some(2 << 20));
                    let done = c.send_owned(bytes).unwrap();
                    let (_s, got) = reader.join().unwrap();
                    assert!(got == pattern(5, 8 << 20));
                    done.wait(Some(PATIENCE)).unwrap();
                    assert_eq!(gone.load(Ordering::SeqCst), 1);
                })
            })
            .collect();
        work.into_iter().for_each(|t| t.join().unwrap());
        buffers_come_home(&[&a, &b]);
    });
}

#[test]
fn owned_and_copied_writes_of_many_threads_are_whole() {
    within(|| {
        const EACH: usize = 300_000;
        let (a, b) = stacks();
        let (c, s) = connection(&a, &b, 80);
        let reader = reader(s, 8 * EACH);
        let writers: Vec<_> = (0..8u8)
            .map(|i| {
                let mut c = c.try_clone().unwrap();
                thread::spawn(move || {
                    if i % 2 == 0 {
                        drop(c.send_owned(vec![i; EACH]).unwrap());
                    } else {
                        c.write_all(&[i; EACH]).unwrap();
                    }
                })
            })
            .collect();
        writers.into_iter().for_each(|t| t.join().unwrap());
        let (_s, got) = reader.join().unwrap();
        let mut seen: Vec<u8> = got.chunks(EACH).map(|part| part[0]).collect();
        assert!(got.chunks(EACH).all(|part| part.iter().all(|b| *b == part[0])));
        seen.sort_unstable();
        assert_eq!(seen, (0..8).collect::<Vec<_>>());
        buffers_come_home(&[&a, &b]);
    });
}

/// Wakes a thread.
struct Unpark(thread::Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

#[test]
fn a_completion_can_be_awaited() {
    within(|| {
        let (a, b) = stacks();
        let (c, s) = connection(&a, &b, 80);
        let mut done = pin!(c.send_owned(pattern(0, 100_000)).unwrap());
        let reader = reader(s, 100_000);
        let waker = Waker::from(Arc::new(Unpark(thread::current())));
        let mut cx = Context::from_waker(&waker);
        let result = loop {
            match done.as_mut().poll(&mut cx) {
                Poll::Ready(r) => break r,
                Poll::Pending => thread::park(),
            }
        };
        result.unwrap();
        assert!(reader.join().unwrap().1 == pattern(0, 100_000));
    });
}
