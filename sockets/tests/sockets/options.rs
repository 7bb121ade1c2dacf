//! Options of sockets, and what they do on the wire.

use std::io::{ErrorKind, Read, Write};
use std::net::SocketAddr;
use std::thread;
use std::time::Duration;

use fulmar::stat::Counter;
use fulmar::tcp::MtuProbing;
use fulmar::{
    CongestionControl, ConnectOptions, Keepalive, ListenOptions, SocketOptions, TcpListener,
    TcpStream, devices,
};

use crate::support::{
    A, B, B6, buffers_come_home, change, connection, pattern, stack, stacks,
    stacks_without_timeouts, within,
};

#[test]
fn without_nagle_every_small_write_is_a_segment() {
    within(|| {
        let (a, b) = stacks_without_timeouts();
        let (mut c, mut s) = connection(&a, &b, 80);
        assert!(!c.nodelay().unwrap());
        c.set_nodelay(true).unwrap();
        let before = a.stat().unwrap().count(Counter::TcpSegmentsOut);
        for i in 0..20u8 {
            c.write_all(&[i]).unwrap();
        }
        let sent = a.stat().unwrap().count(Counter::TcpSegmentsOut) - before;
        assert_eq!(sent, 20);
        s.read_exact(&mut [0; 20]).unwrap();
    });
}

#[test]
fn congestion_control_can_be_chosen_before_and_after_connecting() {
    within(|| {
        let (a, b) = stacks();
        let (c, _s) = connection(&a, &b, 80);
        assert_eq!(c.options().unwrap().congestion, Some(CongestionControl::Cubic));
        change(&c, |o| o.congestion = Some(CongestionControl::NewReno));
        assert_eq!(c.options().unwrap().congestion, Some(CongestionControl::NewReno));
        let socket = SocketOptions {
            congestion: Some(CongestionControl::NewReno),
            max_pacing_rate: Some(1_000_000),
            mtu_probing: Some(MtuProbing::Always),
            ..SocketOptions::default()
        };
        let options = ConnectOptions { socket, ..ConnectOptions::default() };
        let c = TcpStream::connect_nonblocking(&a, &c.peer_addr().unwrap(), &options).unwrap();
        assert_eq!(c.options().unwrap().congestion, Some(CongestionControl::NewReno));
        assert_eq!(c.options().unwrap().max_pacing_rate, Some(1_000_000));
        assert_eq!(c.options().unwrap().mtu_probing, Some(MtuProbing::Always));
        change(&c, |o| o.mtu_probing = Some(MtuProbing::Off));
        assert_eq!(c.options().unwrap().mtu_probing, Some(MtuProbing::Off));
    });
}

#[test]
fn a_limit_of_the_rate_holds_whatever_the_congestion_control() {
    within(|| {
        let (a, b) = stacks();
        for (port, congestion) in (80..).zip(CongestionControl::ALL) {
            let (mut c, mut s) = connection(&a, &b, port);
            change(&c, |o| o.congestion = Some(*congestion));
            change(&c, |o| o.max_pacing_rate = Some(2_000_000));
            assert_eq!(c.options().unwrap().max_pacing_rate, Some(2_000_000));
            let began = std::time::Instant::now();
            let writer = thread::spawn(move || {
                c.write_all(&[7; 200_000]).unwrap();
                c.shutdown(std::net::Shutdown::Write).unwrap();
                let _ = c.read(&mut [0; 1]);
            });
            assert_eq!(s.read_to_end(&mut Vec::new()).unwrap(), 200_000);
            // 100 ms, less the first piece and the credit of two milliseconds.
            assert!(began.elapsed() >= Duration::from_millis(90), "{:?}", began.elapsed());
            drop(s);
            writer.join().unwrap();
        }
    });
}

#[test]
fn a_cork_holds_small_writes_back_until_it_is_pulled() {
    within(|| {
        let (a, b) = stacks_without_timeouts();
        let (mut c, mut s) = connection(&a, &b, 80);
        change(&c, |o| o.cork = true);
        let before = a.stat().unwrap().count(Counter::TcpSegmentsOut);
        (0..20).for_each(|i| c.write_all(&[i]).unwrap());
        change(&c, |o| o.cork = false);
        s.read_exact(&mut [0; 20]).unwrap();
        assert_eq!(a.stat().unwrap().count(Counter::TcpSegmentsOut) - before, 1);
    });
}

#[test]
fn a_writer_waits_while_more_than_the_low_water_mark_is_unsent() {
    within(|| {
        let (a, b) = stacks();
        let (mut c, mut s) = connection(&a, &b, 80);
        // The reader's window is 2 KiB: what is beyond it stays unsent.
        change(&s, |o| o.recv_buffer = Some(2048));
        change(&c, |o| o.notsent_low_water = Some(16 << 10));
        assert_eq!(c.options().unwrap().notsent_low_water, Some(16 << 10));
        const TOTAL: usize = 8 << 20;
        let reader = thread::spawn(move || {
            let mut all = Vec::new();
            s.read_to_end(&mut all).unwrap();
            all.len()
        });
        c.set_nonblocking(true).unwrap();
        let (mut left, mut refused, block) = (TOTAL, 0, [7; 4096]);
        while left > 0 {
            match c.write(&block[..left.min(4096)]) {
                Ok(n) => left -= n,
                Err(e) if e.kind() == ErrorKind::WouldBlock => {
                    refused += 1;
                    let unsent = c.info().unwrap().unsent_bytes;
                    // A write begins below the mark.
                    assert!(unsent < (16 << 10) + 4096, "{unsent}");
                    thread::yield_now();
                }
                Err(e) => panic!("{e}"),
            }
        }
        assert!(refused > 0);
        c.set_nonblocking(false).unwrap();
        c.shutdown(std::net::Shutdown::Write).unwrap();
        assert_eq!(reader.join().unwrap(), TOTAL);
    });
}

#[test]
fn a_blocking_writer_is_woken_when_unsent_bytes_have_gone() {
    within(|| {
        let (a, b) = stacks();
        let (mut c, mut s) = connection(&a, &b, 80);
        change(&s, |o| o.recv_buffer = Some(2048));
        change(&c, |o| o.notsent_low_water = Some(1));
        let reader = thread::spawn(move || {
            let mut all = Vec::new();
            s.read_to_end(&mut all).unwrap();
            all.len()
        });
        for _ in 0..400 {
            c.write_all(&[1; 5000]).unwrap();
            // Each write waits until what was written before is sent.
            assert!(c.info().unwrap().unsent_bytes <= 5000);
        }
        c.shutdown(std::net::Shutdown::Write).unwrap();
        assert_eq!(reader.join().unwrap(), 2_000_000);
    });
}

#[test]
fn a_writer_that_waits_is_woken_when_the_low_water_mark_goes() {
    within(|| {
        let (a, b) = stacks();
        let (mut c, s) = connection(&a, &b, 80);
        // The peer does not read: the window fills, and the rest stays unsent.
        change(&s, |o| o.recv_buffer = Some(2048));
        c.set_nonblocking(true).unwrap();
        change(&c, |o| o.notsent_low_water = Some(1000));
        while c.write(&[1; 4096]).is_ok() {}
        c.set_nonblocking(false).unwrap();
        let other = c.try_clone().unwrap();
        let writer = thread::spawn(move || c.write(&[2; 100]).unwrap());
        thread::sleep(Duration::from_millis(20));
        change(&other, |o| o.notsent_low_water = Some(0));
        assert_eq!(writer.join().unwrap(), 100);
        assert_eq!(other.options().unwrap().notsent_low_water, None);
    });
}

#[test]
fn segments_are_no_larger_than_either_end_asked_for() {
    within(|| {
        let (a, b) = stacks();
        let listener = TcpListener::bind(&b, (B, 81)).unwrap();
        let socket = SocketOptions { max_segment: Some(500), ..SocketOptions::default() };
        let options = ConnectOptions { socket, ..ConnectOptions::default() };
        let c =
            TcpStream::connect_nonblocking(&a, &listener.local_addr().unwrap(), &options).unwrap();
        let (s, _) = listener.accept().unwrap();
        let bad = SocketOptions { max_segment: Some(87), ..c.options().unwrap() };
        assert_eq!(c.set_options(bad).unwrap_err().kind(), ErrorKind::InvalidInput);
        // Timestamps take twelve bytes of each segment.
        let mss = [&c, &s].map(|end| end.info().unwrap().mss_bytes);
        assert!(mss.iter().all(|mss| [488, 500].contains(mss)), "{mss:?}");
    });
}

#[test]
fn options_of_a_listener_and_of_a_connect_hold_from_the_handshake_on() {
    within(|| {
        let (a, b) = stacks();
        let tos = 46 << 2;
        let inherited = SocketOptions {
            congestion: Some(CongestionControl::Bbr),
            max_pacing_rate: Some(1 << 20),
            max_segment: Some(600),
            ..SocketOptions::default()
        };
        let options = ListenOptions { socket: inherited, ..ListenOptions::default() };
        let listener = TcpListener::bind_with(&b, (B, 81), options).unwrap();
        listener.set_options(SocketOptions { tos, ..listener.options().unwrap() }).unwrap();
        let socket = SocketOptions { tos, quickack: Some(false), ..SocketOptions::default() };
        let options = ConnectOptions { socket, ..ConnectOptions::default() };
        let c =
            TcpStream::connect_nonblocking(&a, &listener.local_addr().unwrap(), &options).unwrap();
        let (s, _) = listener.accept().unwrap();
        assert_eq!((c.options().unwrap().tos, s.options().unwrap().tos), (tos, tos));
        assert_eq!(s.options().unwrap().congestion, Some(CongestionControl::Bbr));
        assert_eq!(s.options().unwrap().max_pacing_rate, Some(1 << 20));
        assert_eq!(s.info().unwrap().mss_bytes, 588);
        // The ECN field is not the user's.
        change(&c, |o| o.tos = 0xff);
        assert_eq!(c.options().unwrap().tos, 0xfc);
        let bad = SocketOptions { max_segment: Some(87), ..SocketOptions::default() };
        assert_eq!(listener.set_options(bad).unwrap_err().kind(), ErrorKind::InvalidInput);
    });
}

#[test]
fn buffers_can_be_set_and_bound_what_is_accepted() {
    within(|| {
        let (a, b) = stacks();
        let (mut c, mut s) = connection(&a, &b, 80);
        let tuned = c.options().unwrap();
        assert_eq!((tuned.send_buffer, tuned.recv_buffer), (None, None));
        assert_eq!(c.info().unwrap().recv_buffer_bytes, 1 << 20);
        // A program that sets other options leaves the buffers tuned.
        c.set_options(SocketOptions { cork: true, ..tuned }).unwrap();
        assert_eq!(c.options().unwrap(), SocketOptions { cork: true, ..tuned });
        change(&c, |o| o.cork = false);
        change(&c, |o| o.recv_buffer = Some(3 << 20));
        assert_eq!(c.info().unwrap().recv_buffer_bytes, 3 << 20);
        for (asked, given) in [(64 << 10, 64 << 10), (1, 2048), (1 << 30, 16 << 20)] {
            change(&c, |o| o.send_buffer = Some(asked));
            assert_eq!(c.options().unwrap().send_buffer, Some(given));
            assert_eq!(c.info().unwrap().send_buffer_bytes, given);
        }
        change(&c, |o| o.send_buffer = Some(64 << 10));
        c.set_nonblocking(true).unwrap();
        let accepted = {
            let mut n = 0;
            while let Ok(more) = c.write(&pattern(n, 32 << 10)) {
                n += more;
            }
            n
        };
        // The peer's window and our buffer, not the default megabyte twice.
        assert!(accepted <= (1 << 20) + (192 << 10), "{accepted}");
        let mut got = vec![0; accepted];
        s.read_exact(&mut got).unwrap();
        assert!(got == pattern(0, accepted) || accepted > 32 << 10);
    });
}

#[test]
fn tiny_buffers_move_large_streams() {
    within(|| {
        let (a, b) = stacks();
        let (mut c, mut s) = connection(&a, &b, 80);
        change(&c, |o| o.send_buffer = Some(2048));
        change(&s, |o| o.recv_buffer = Some(2048));
        let all = pattern(0, 1 << 20);
        let expected = all.clone();
        let writer = thread::spawn(move || c.write_all(&all).unwrap());
        let mut got = Vec::new();
        s.read_to_end(&mut got).unwrap();
        writer.join().unwrap();
        assert!(got == expected);
        drop(s);
        buffers_come_home(&[&a, &b]);
    });
}

#[test]
fn a_time_to_live_is_between_1_and_255() {
    within(|| {
        let (a, b) = stacks();
        let (mut c, mut s) = connection(&a, &b, 80);
        assert_eq!(c.ttl().unwrap(), 64);
        c.set_ttl(7).unwrap();
        assert_eq!(c.ttl().unwrap(), 7);
        for wrong in [0, 256, u32::MAX] {
            let e = c.set_ttl(wrong).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::InvalidInput);
            assert!(
                e.to_string().contains(&format!("invalid time to live {wrong}: expected 1-255")),
                "{e}"
            );
        }
        c.write_all(b"x").unwrap();
        s.read_exact(&mut [0; 1]).unwrap();
        let listener = TcpListener::bind(&b, (B, 81)).unwrap();
        assert_eq!(listener.ttl().unwrap(), 64);
        listener.set_ttl(9).unwrap();
        assert_eq!(listener.ttl().unwrap(), 9);
        let _c = TcpStream::connect(&a, (B, 81)).unwrap();
        assert_eq!(listener.accept().unwrap().0.ttl().unwrap(), 9);
    });
}

#[test]
fn a_port_is_listened_on_once() {
    within(|| {
        let (_a, b) = stacks();
        let first = TcpListener::bind(&b, (B, 80)).unwrap();
        let clash = |addr: &str| {
            let e = TcpListener::bind(&b, (addr, 80)).unwrap_err();
            assert_eq!(e.raw_os_error(), Some(libc::EADDRINUSE), "{addr}");
        };
        // As on Linux: a listener on every address clashes with one on one address.
        [B, "0.0.0.0", "::"].into_iter().for_each(clash);
        let v6 = TcpListener::bind(&b, (B6, 80)).unwrap();
        drop(first);
        clash("::");
        drop(v6);
        let any = TcpListener::bind(&b, "[::]:80").unwrap();
        [B, B6, "0.0.0.0", "::"].into_iter().for_each(clash);
        drop(any);
        TcpListener::bind(&b, (B, 80)).unwrap();
        let e = TcpListener::bind(&b, ("10.1.0.77", 80)).unwrap_err();
        assert_eq!(e.raw_os_error(), Some(libc::EADDRNOTAVAIL));
    });
}

#[test]
fn a_v6_only_listener_leaves_ipv4_to_another() {
    within(|| {
        let (a, b) = stacks();
        let only_v6 = ListenOptions { only_v6: true, ..ListenOptions::default() };
        let v6 = TcpListener::bind_with(&b, "[::]:80", only_v6).unwrap();
        let refused = TcpStream::connect(&a, (B, 80)).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
        let v4 = TcpListener::bind(&b, "0.0.0.0:80").unwrap();
        let _c4 = TcpStream::connect(&a, (B, 80)).unwrap();
        let _c6 = TcpStream::connect(&a, (B6, 80)).unwrap();
        assert!(v4.accept().unwrap().1.is_ipv4());
        assert!(v6.accept().unwrap().1.is_ipv6());
    });
}

#[test]
fn a_dual_stack_listener_takes_both_versions() {
    within(|| {
        let (a, b) = stacks();
        let both = TcpListener::bind(&b, "[::]:80").unwrap();
        let mapped: std::net::SocketAddr = format!("[::ffff:{B}]:80").parse().unwrap();
        for to in [format!("{B}:80"), format!("[{B6}]:80"), mapped.to_string()] {
            let mut c = TcpStream::connect(&a, &*to).unwrap();
            let (mut s, from) = both.accept().unwrap();
            assert_eq!(from, c.local_addr().unwrap());
            c.write_all(to.as_bytes()).unwrap();
            drop(c);
            let mut got = String::new();
            s.read_to_string(&mut got).unwrap();
            assert_eq!(got, to);
        }
    });
}

#[test]
fn an_address_is_reused_unless_that_is_refused() {
    within(|| {
        let (a, b) = stacks();
        let listener = TcpListener::bind(&b, (B, 80)).unwrap();
        let mut c = TcpStream::connect(&a, (B, 80)).unwrap();
        let (s, _) = listener.accept().unwrap();
        drop(listener);
        let strict = ListenOptions { reuse_address: false, ..ListenOptions::default() };
        let in_use = || {
            let e = TcpListener::bind_with(&b, (B, 80), strict).unwrap_err();
            assert_eq!(e.raw_os_error(), Some(libc::EADDRINUSE));
            drop(TcpListener::bind(&b, (B, 80)).unwrap());
        };
        in_use();
        // The side that closes first keeps the connection in TIME-WAIT.
        drop(s);
        assert_eq!(c.read(&mut [0; 1]).unwrap(), 0);
        drop(c);
        crate::support::eventually("it is in TIME-WAIT", || {
            let stat = b.stat().unwrap();
            stat.shard.time_wait == 1 && stat.sockets().is_empty()
        });
        in_use();
    });
}

#[test]
fn a_local_port_of_choice_is_used_and_used_once() {
    within(|| {
        let (a, b) = stacks();
        let listener = TcpListener::bind(&b, (B, 80)).unwrap();
        let to = listener.local_addr().unwrap();
        let from = |local: &str| {
            let options =
                ConnectOptions { local: Some(local.parse().unwrap()), ..Default::default() };
            TcpStream::connect_with(&a, &to, &options, Some(crate::support::PATIENCE))
        };
        let c = from("0.0.0.0:1234").unwrap();
        assert_eq!(c.local_addr().unwrap(), format!("{A}:1234").parse().unwrap());
        assert_eq!(from("0.0.0.0:1234").unwrap_err().kind(), ErrorKind::AddrInUse);
    });
}

#[test]
fn a_local_address_of_choice_is_used_with_a_port_of_the_stacks_choice() {
    const SECOND: &str = "10.1.0.7";
    within(|| {
        let (p, q) = devices::link_pair().unwrap();
        let a = stack(1, p, |b| b.address(format!("{SECOND}/24").parse().unwrap()));
        let b = stack(2, q, |b| b);
        let listener = TcpListener::bind(&b, (B, 80)).unwrap();
        let to = listener.local_addr().unwrap();
        let from = |ip: &str| {
            let local = SocketAddr::new(ip.parse().unwrap(), 0);
            let options = ConnectOptions { local: Some(local), ..Default::default() };
            TcpStream::connect_with(&a, &to, &options, Some(crate::support::PATIENCE))
        };
        for ip in [SECOND, A] {
            let local = from(ip).unwrap().local_addr().unwrap();
            assert!(local.ip().to_string() == ip && local.port() != 0, "{local}");
        }
        assert_eq!(from("10.1.0.99").unwrap_err().kind(), ErrorKind::AddrNotAvailable);
    });
}

#[test]
fn keepalive_and_user_time_out_are_inherited_from_the_listener_and_can_be_changed() {
    within(|| {
        let (a, b) = stacks();
        let keepalive = Some(Keepalive { count: 3, ..Keepalive::default() });
        let user_timeout = Some(Duration::from_secs(7));
        let socket = SocketOptions { keepalive, user_timeout, ..SocketOptions::default() };
        let options = ListenOptions { socket, ..ListenOptions::default() };
        let listener = TcpListener::bind_with(&b, (B, 80), options).unwrap();
        let c = TcpStream::connect(&a, (B, 80)).unwrap();
        let (s, _) = listener.accept().unwrap();
        assert_eq!(
            (s.options().unwrap().keepalive, s.options().unwrap().user_timeout),
            (keepalive, user_timeout)
        );
        assert_eq!(
            (c.options().unwrap().keepalive, c.options().unwrap().user_timeout),
            (None, None)
        );
        change(&s, |o| o.keepalive = None);
        assert_eq!(s.options().unwrap().keepalive, None);
        change(&c, |o| o.keepalive = keepalive);
        assert_eq!(c.options().unwrap().keepalive, keepalive);
    });
}
