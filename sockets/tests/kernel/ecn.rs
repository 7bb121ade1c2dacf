//! Explicit congestion notification with the kernel, over a queue that marks.

use fulmar_stack::base::Duration;
use std::net;
use std::thread;

use fulmar::devices::{Aqm, Impairments};
use fulmar::tcp::{EcnPolicy, TcpConfig};
use fulmar::{TcpListener, TcpStream};
use fulmar_stack::base::Counter;

use crate::tcp::exchange;
use crate::{KERNEL, OURS, in_namespace, stack_with};

const LEN: usize = 2 << 20;

/// A queue that marks what has waited for a millisecond, and drops it if it is not ECN-capable.
fn marking() -> Impairments {
    Impairments {
        rate_bps: Some(100_000_000),
        queue_bytes: 1 << 20,
        aqm: Aqm::Step { above: Duration::from_millis(1) },
        ecn: true,
        delay: Duration::from_millis(1),
        ..Impairments::default()
    }
}

fn kernel_asks(policy: &str) {
    std::fs::write("/proc/sys/net/ipv4/tcp_ecn", policy).unwrap();
}

fn pair(c: &TcpStream, s: &net::TcpStream) {
    exchange(
        (c.try_clone().unwrap(), c.try_clone().unwrap()),
        (s.try_clone().unwrap(), s.try_clone().unwrap()),
        LEN,
    );
}

#[test]
fn marks_are_echoed_and_answered_in_both_directions() {
    in_namespace!(|| {
        let ecn = EcnPolicy::Ask;
        let stack = stack_with(3, &marking(), TcpConfig { ecn, ..TcpConfig::default() });
        let listener = net::TcpListener::bind((KERNEL, 80)).unwrap();
        let c = TcpStream::connect(&stack, (KERNEL, 80)).unwrap();
        let (s, _) = listener.accept().unwrap();
        assert!(c.info().unwrap().ecn, "the kernel agrees by default");
        pair(&c, &s);
        let counters = stack.stat().unwrap().shard.counters;
        for counter in [Counter::TcpEcnMarksIn, Counter::TcpEcnEchoesIn, Counter::TcpEcnReductions]
        {
            assert!(counters.value(counter) > 0, "{counter:?}");
        }
    });
}

#[test]
fn a_kernel_that_asks_is_agreed_with_and_one_that_refuses_is_not() {
    in_namespace!(|| {
        let stack = stack_with(4, &Impairments::default(), TcpConfig::default());
        let listener = TcpListener::bind(&stack, (OURS, 80)).unwrap();
        for (policy, is_on) in [("1", true), ("2", false)] {
            kernel_asks(policy);
            let client = thread::spawn(|| net::TcpStream::connect((OURS, 80)).unwrap());
            let (s, _) = listener.accept().unwrap();
            assert_eq!(s.info().unwrap().ecn, is_on);
            pair(&s, &client.join().unwrap());
        }
        kernel_asks("0");
        let refusing = net::TcpListener::bind((KERNEL, 81)).unwrap();
        let socket = fulmar::SocketOptions { ecn: Some(EcnPolicy::Ask), ..Default::default() };
        let options = fulmar::ConnectOptions { socket, ..Default::default() };
        let c = TcpStream::connect_with(
            &stack,
            &format!("{KERNEL}:81").parse().unwrap(),
            &options,
            None,
        )
        .unwrap();
        let (s, _) = refusing.accept().unwrap();
        pair(&c, &s);
        assert!(!c.info().unwrap().ecn);
    });
}

/// Linux 6.18 and later.
fn kernel_is_accurate(policy: &str) -> bool {
    let is_known = std::fs::write("/proc/sys/net/ipv4/tcp_ecn", policy).is_ok();
    if !is_known {
        eprintln!("skipped: this kernel has no accurate ECN (tcp_ecn = {policy})");
    }
    is_known
}

#[test]
fn feedback_is_accurate_in_both_directions_if_the_kernel_supports_it() {
    in_namespace!(|| {
        if !kernel_is_accurate("3") {
            return;
        }
        let ecn = EcnPolicy::Ask;
        let stack = stack_with(3, &marking(), TcpConfig { ecn, ..TcpConfig::default() });
        let kernel = net::TcpListener::bind((KERNEL, 80)).unwrap();
        let c = TcpStream::connect(&stack, (KERNEL, 80)).unwrap();
        let (s, _) = kernel.accept().unwrap();
        pair(&c, &s);
        let ours = TcpListener::bind(&stack, (OURS, 80)).unwrap();
        let s = net::TcpStream::connect((OURS, 80)).unwrap();
        let (a, _) = ours.accept().unwrap();
        pair(&a, &s);
        for stream in [&c, &a] {
            let info = stream.info().unwrap();
            assert!(info.accurate_ecn && info.ce_received > 0, "{info:?}");
            assert!(info.delivered_ce_bytes > 0, "{info:?}");
        }
        let counters = stack.stat().unwrap().shard.counters;
        assert_eq!(counters.value(Counter::TcpEcnDistrusted), 0);
        assert_eq!(counters.value(Counter::TcpAccurateEcnOpens), 2);
    });
}
