//! SYN cookies with the kernel as the client that brings them back.

use std::net;
use std::thread;

use fulmar::stat::Counter;
use fulmar::tcp::SynCookies;
use fulmar::{ListenOptions, TcpListener};

use crate::in_namespace;
use crate::support::buffers_come_home_but;
use crate::tcp::exchange;
use crate::{OURS, OURS6, POSTED, stack};

const LEN: usize = 4 << 20;

/// Bulk in both directions over both versions, each connection opened by a cookie.
fn exchange_by_cookies(timestamps: bool) {
    let switch = if timestamps { "1" } else { "0" };
    std::fs::write("/proc/sys/net/ipv4/tcp_timestamps", switch).unwrap();
    let stack = stack();
    let options = ListenOptions { syn_cookies: SynCookies::Always, ..ListenOptions::default() };
    for address in [OURS, OURS6] {
        let listener = TcpListener::bind_with(&stack, (address, 80), options).unwrap();
        let client = thread::spawn(move || net::TcpStream::connect((address, 80)).unwrap());
        let (s, from) = listener.accept().unwrap();
        let c = client.join().unwrap();
        assert_eq!(from, c.local_addr().unwrap());
        let info = s.info().unwrap();
        let (ours, theirs) = info.window_scales;
        assert_eq!((info.timestamps, info.sack), (timestamps, timestamps));
        assert_eq!((ours > 0, theirs > 0), (timestamps, timestamps));
        exchange(
            (s.try_clone().unwrap(), s.try_clone().unwrap()),
            (c.try_clone().unwrap(), c.try_clone().unwrap()),
            LEN,
        );
        let stats = listener.stat().unwrap();
        assert_eq!((stats.cookies_valid, stats.cookies_failed, stats.embryos), (1, 0, 0));
    }
    assert_eq!(stack.stat().unwrap().count(Counter::TcpSynCookiesValid), 2);
    buffers_come_home_but(POSTED, &[&stack]);
}

#[test]
fn every_byte_arrives_through_cookies_with_scale_and_sack() {
    in_namespace!(|| exchange_by_cookies(true));
}

#[test]
fn every_byte_arrives_through_cookies_without_timestamps() {
    in_namespace!(|| exchange_by_cookies(false));
}
