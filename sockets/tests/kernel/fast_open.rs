//! TCP Fast Open (RFC 7413) with the kernel, as client and as server.

use std::io::{Read, Write};
use std::net;
use std::os::fd::AsRawFd;
use std::thread;

use fulmar::devices::Impairments;
use fulmar::tcp::{FastOpenOptions, TcpConfig};
use fulmar::{ConnectOptions, ListenOptions, TcpListener, TcpStream};
use fulmar_stack::base::Counter;

use crate::sys::set_int;
use crate::{KERNEL, OURS, in_namespace, stack_with};

/// Both ends of the kernel's Fast Open.
fn kernel_has_fast_open() {
    std::fs::write("/proc/sys/net/ipv4/tcp_fastopen", "3").unwrap();
}

fn request(n: usize) -> Vec<u8> {
    (0..1000).map(|i| (i * 7 + n) as u8).collect()
}

/// Reads the request, answers with the same bytes reversed, and closes.
fn serve(mut stream: impl Read + Write) -> Vec<u8> {
    let mut got = vec![0; 1000];
    stream.read_exact(&mut got).unwrap();
    let answer: Vec<u8> = got.iter().rev().copied().collect();
    stream.write_all(&answer).unwrap();
    got
}

fn check_answer(mut stream: impl Read, request: &[u8]) {
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    answer.reverse();
    assert!(answer == request, "every byte once and in order");
}

#[test]
fn the_kernel_takes_data_with_our_syn_once_it_has_given_a_cookie() {
    in_namespace!(|| {
        kernel_has_fast_open();
        let stack = stack_with(3, &Impairments::default(), TcpConfig::default());
        let listener = net::TcpListener::bind((KERNEL, 80)).unwrap();
        set_int(listener.as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_FASTOPEN, 16);
        let to = format!("{KERNEL}:80").parse().unwrap();
        for n in 0..3 {
            let data = request(n);
            let options = ConnectOptions::default();
            let (c, sent) = TcpStream::connect_first(&stack, &to, &options, &*data).unwrap();
            assert_eq!(sent, data.len());
            let (s, _) = listener.accept().unwrap();
            assert!(serve(s) == data);
            check_answer(&c, &data);
            assert_eq!(c.info().unwrap().syn_data, n > 0, "connection {n}");
        }
        let counters = stack.stat().unwrap().shard.counters;
        assert_eq!(counters.value(Counter::TcpFastOpensActive), 2);
        assert_eq!(counters.value(Counter::TcpFastOpensFailed), 0);
    });
}

#[test]
fn the_kernel_sends_data_with_its_syn_once_we_have_given_a_cookie() {
    in_namespace!(|| {
        kernel_has_fast_open();
        let stack = stack_with(4, &Impairments::default(), TcpConfig::default());
        let options =
            ListenOptions { fast_open: Some(FastOpenOptions::default()), ..Default::default() };
        let listener = TcpListener::bind_with(&stack, (OURS, 80), options).unwrap();
        for n in 0..3 {
            let data = request(n);
            let client = thread::spawn(move || {
                let c = crate::sys::connect_fast_open(format!("{OURS}:80").parse().unwrap());
                let mut c = c.unwrap();
                c.write_all(&request(n)).unwrap();
                check_answer(&c, &request(n));
            });
            let (s, _) = listener.accept().unwrap();
            assert!(serve(&s) == data);
            assert_eq!(s.info().unwrap().syn_data, n > 0, "connection {n}");
            drop(s);
            client.join().unwrap();
        }
        let stats = listener.stat().unwrap();
        assert_eq!((stats.fast_opens, stats.fast_open_invalid, stats.fast_open_pending), (2, 0, 0));
    });
}
