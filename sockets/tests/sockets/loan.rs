//! Received bytes by reference.

use std::io::{ErrorKind, Read, Write};
use std::thread;
use std::time::Duration;

use fulmar::stat::DropReason;
use fulmar::zero_copy::{Loan, ZeroCopy};
use fulmar::{TcpStream, UdpSocket};

use crate::support::{
    B, acquainted_stacks, buffers_come_home, connection, eventually, fill, pattern, stacks, within,
};

/// Reads loans to the end of the stream; their bytes.
fn drain(s: &TcpStream, max: usize) -> Vec<u8> {
    let mut all = Vec::new();
    loop {
        let loan = s.recv_owned(max).unwrap();
        assert!(loan.len() <= max);
        if loan.is_empty() {
            return all;
        }
        loan.slices().for_each(|part| all.extend_from_slice(part));
    }
}

#[test]
fn a_stream_arrives_whole_in_loans_of_any_size() {
    within(|| {
        const TOTAL: usize = 3 << 20;
        for max in [1000, 70_000, usize::MAX] {
            let (a, b) = stacks();
            let (mut c, s) = connection(&a, &b, 80);
            let writer = thread::spawn(move || c.write_all(&pattern(0, TOTAL)).unwrap());
            assert!(drain(&s, max) == pattern(0, TOTAL), "loans of {max}");
            writer.join().unwrap();
            drop(s);
            buffers_come_home(&[&a, &b]);
        }
    });
}

#[test]
fn a_loan_is_read_split_and_copied_like_its_bytes() {
    within(|| {
        let (a, b) = stacks();
        let (mut c, s) = connection(&a, &b, 80);
        let all = pattern(0, 100_000);
        c.write_all(&all).unwrap();
        let mut left = all.len();
        let mut loans: Vec<Loan> = Vec::new();
        while left > 0 {
            loans.push(s.recv_owned(left).unwrap());
            left -= loans.last().unwrap().len();
        }
        let mut at = 0;
        for mut loan in loans {
            let mine = &all[at..at + loan.len()];
            at += loan.len();
            assert_eq!(loan.to_vec(), mine);
            assert!(loan == *mine);
            let mut some = [0; 777];
            let n = loan.copy_to(5, &mut some);
            assert_eq!(some[..n], mine[5..5 + n]);
            assert_eq!(loan.copy_to(mine.len(), &mut some), 0);
            let third = mine.len() / 3;
            let tail = loan.split_off(third);
            let mut head = loan.split_to(third / 2);
            assert!(head == mine[..third / 2] && loan == mine[third / 2..third]);
            assert!(tail == mine[third..]);
            let copied: Vec<u8> = tail.io_slices().flat_map(|s| s.to_vec()).collect();
            assert_eq!(copied, mine[third..]);
            drop(tail);
            let mut read = Vec::new();
            head.read_to_end(&mut read).unwrap();
            assert_eq!(read, mine[..third / 2]);
            assert!(head.is_empty() && head.slices().next().is_none());
            loan.advance(usize::MAX);
            assert_eq!(loan.len(), 0);
        }
        drop((c, s));
        buffers_come_home(&[&a, &b]);
    });
}

#[test]
fn a_loan_outlives_its_socket_and_its_stack_and_is_freed_from_any_thread() {
    within(|| {
        let (a, b) = stacks();
        let (mut c, s) = connection(&a, &b, 80);
        c.write_all(b"first").unwrap();
        let first = s.recv_owned(100).unwrap();
        c.write_all(&pattern(0, 50_000)).unwrap();
        let second = s.recv_owned(10_000).unwrap();
        drop(s);
        assert!(first == b"first"[..]);
        thread::spawn(move || drop(first)).join().unwrap();
        drop((c, b));
        assert!(second == pattern(0, second.len())[..]);
        thread::spawn(move || drop(second)).join().unwrap();
        buffers_come_home(&[&a]);
    });
}

#[test]
fn loans_that_are_kept_close_the_window_until_they_are_let_go() {
    within(|| {
        let (a, b) = stacks();
        let (mut c, s) = connection(&a, &b, 80);
        s.set_nonblocking(true).unwrap();
        fill(&c);
        let mut kept = Vec::new();
        let mut all = Vec::new();
        eventually("the window closes", || {
            if let Ok(loan) = s.recv_owned(usize::MAX) {
                kept.push(loan);
            }
            s.info().unwrap().rcv_wnd_bytes == 0
        });
        let info = s.info().unwrap();
        let held: usize = kept.iter().map(Loan::len).sum();
        assert_eq!(info.loaned_bytes, held);
        // What was offered before may still come, but no more than the buffer holds.
        eventually("nothing is under way", || {
            let is_quiet = c.info().unwrap().in_flight_bytes == 0;
            while let Ok(loan) = s.recv_owned(usize::MAX) {
                kept.push(loan);
            }
            is_quiet && s.info().unwrap().rcv_wnd_bytes == 0
        });
        let lent = s.info().unwrap().loaned_bytes;
        // The window field counts in steps, and never takes back a part of one.
        let steps = 64 << info.window_scales.0;
        assert!(lent <= info.recv_buffer_bytes + steps, "{lent} bytes of {info:?}");
        assert_eq!(s.recv_owned(1).unwrap_err().kind(), ErrorKind::WouldBlock);
        for loan in kept.drain(..) {
            all.extend(loan.to_vec());
        }
        assert_eq!(s.info().unwrap().loaned_bytes, 0);
        c.set_nonblocking(false).unwrap();
        s.set_nonblocking(false).unwrap();
        let writer = thread::spawn(move || c.write_all(b"the end").unwrap());
        all.extend(drain(&s, usize::MAX));
        writer.join().unwrap();
        assert!(all.ends_with(b"the end"));
        assert!(all[..1 << 20] == pattern(0, 1 << 20));
        drop(s);
        buffers_come_home(&[&a, &b]);
    });
}

#[test]
fn a_loan_without_bytes_returns_the_result_of_a_read() {
    within(|| {
        let (a, b) = stacks();
        let (c, s) = connection(&a, &b, 80);
        assert_eq!(s.try_recv_owned(10).unwrap_err().kind(), ErrorKind::WouldBlock);
        assert!(s.recv_owned(0).unwrap().is_empty());
        s.set_read_timeout(Some(Duration::from_millis(5))).unwrap();
        assert_eq!(s.recv_owned(10).unwrap_err().kind(), ErrorKind::WouldBlock);
        c.shutdown(std::net::Shutdown::Write).unwrap();
        s.set_read_timeout(None).unwrap();
        assert!(s.recv_owned(10).unwrap().is_empty());
        assert!(Loan::default().is_empty());
    });
}

#[test]
fn datagrams_are_lent_whole_and_count_against_the_queue() {
    within(|| {
        let (a, b) = acquainted_stacks();
        let server = UdpSocket::bind(&b, (B, 53)).unwrap();
        let c = UdpSocket::bind(&a, "0.0.0.0:0").unwrap();
        server.set_recv_buffer(8 << 10).unwrap();
        c.connect((B, 53)).unwrap();
        for len in [0, 1, 1400] {
            c.send(&pattern(0, len)).unwrap();
            let (loan, from) = server.recv_owned().unwrap();
            assert!(loan == pattern(0, len)[..]);
            assert_eq!(from, c.local_addr().unwrap());
        }
        assert_eq!(server.try_recv_owned().unwrap_err().kind(), ErrorKind::WouldBlock);
        let is_refused = || b.stat().unwrap().drops(DropReason::UdpBufferFull) > 0;
        let mut kept = Vec::new();
        while !is_refused() {
            c.send(&pattern(0, 1400)).unwrap();
            eventually("it is received or refused", || {
                let came = server.try_recv_owned().map(|(loan, _)| kept.push(loan));
                came.is_ok() || is_refused()
            });
            assert!(kept.len() < 10, "a hoarder of datagrams is not stopped");
        }
        kept.clear();
        c.send(&pattern(7, 1400)).unwrap();
        assert!(server.recv_owned().unwrap().0 == pattern(7, 1400)[..]);
        drop((server, c));
        buffers_come_home(&[&a, &b]);
    });
}
