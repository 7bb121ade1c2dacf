//! What cannot be built, and how that is said.

use std::os::unix::net::UnixDatagram;
use std::time::Duration;

use fulmar::{Builder, Stack, TcpStream, devices};

use crate::support::pipe::Pipe;
use crate::support::{B, PATIENCE, stack, within};

/// The sentence with which a stack is refused.
fn refused(describe: impl FnOnce(Builder) -> Builder) -> String {
    let (device, _peer) = devices::link_pair().unwrap();
    let builder = describe(Stack::builder().device(device).unlisted());
    builder.build().expect_err("it makes no sense").to_string()
}

fn address(text: &str) -> fulmar::Cidr {
    text.parse().unwrap()
}

#[test]
fn a_stack_that_makes_no_sense_is_refused_with_a_sentence() {
    let no_device = Stack::builder().address(address("10.0.0.1/24")).build().unwrap_err();
    assert!(no_device.to_string().contains("Builder::device"), "{no_device}");
    assert!(refused(|b| b).contains("Builder::address"));
    let says = |text: String, words: &[&str]| {
        words.iter().for_each(|w| assert!(text.contains(w), "`{text}` does not say `{w}`"));
    };
    says(refused(|b| b.address(address("224.0.0.1/24"))), &["224.0.0.1"]);
    says(refused(|b| b.address(address("0.0.0.0/24"))), &["0.0.0.0"]);
    says(refused(|b| b.address(address("10.0.0.1/24")).mtu(100)), &["MTU", "576"]);
    says(refused(|b| b.address(address("fd00::1/64")).mtu(1000)), &["MTU", "1280"]);
    says(refused(|b| b.address(address("10.0.0.1/24")).budget_bytes(1 << 40)), &["128 GiB"]);
}

#[test]
fn the_smallest_budgets_are_refused_or_work() {
    for budget in [0, 1, 4096, 64 << 10, 1 << 20] {
        let (p, q) = devices::link_pair().unwrap();
        let build = |device, at: &str| {
            let builder = Stack::builder().device(device).address(address(at)).unlisted();
            builder.budget_bytes(budget).exit_drain(Duration::ZERO).build()
        };
        let (Ok(a), Ok(_b)) = (build(p, "10.0.0.1/24"), build(q, "10.0.0.2/24")) else { continue };
        // It need not get through, but it must end.
        let _ = a.ping("10.0.0.2".parse().unwrap(), 8, Duration::from_millis(50));
    }
}

#[test]
fn a_device_that_cannot_be_opened_says_why_and_what_to_do() {
    let e = devices::packet("no-such-if").err().unwrap().to_string();
    assert!(e.contains("no-such-if") && e.contains("ip -o link"), "{e}");
    // With the rights or without, it does not open an interface of another, shorter name.
    let e = devices::tap("a-name-that-is-too-long").err().unwrap().to_string();
    assert!(e.contains("15 bytes") || e.contains("/dev/net/tun"), "{e}");
}

#[test]
fn a_device_without_a_descriptor_is_polled_by_waiting_threads_and_by_the_service_thread() {
    within(|| {
        let (p, q) = Pipe::pair();
        let a = stack(1, Box::new(p.without_fd()), |b| b);
        // Only its service thread takes the request and answers it.
        let _b = stack(2, Box::new(q.without_fd()), |b| b);
        a.ping(B.parse().unwrap(), 8, PATIENCE).unwrap();
    });
}

#[test]
fn two_stations_with_one_ethernet_address_are_named_as_the_reason() {
    within(|| {
        let (p, q) = UnixDatagram::pair().unwrap();
        let a = stack(1, Box::new(Pipe::new(p, 1)), |b| b);
        let _b = stack(2, Box::new(Pipe::new(q, 1)), |b| b);
        for error in [
            TcpStream::connect(&a, (B, 80)).unwrap_err(),
            a.ping(B.parse().unwrap(), 8, PATIENCE).unwrap_err(),
        ] {
            assert_eq!(error.kind(), std::io::ErrorKind::HostUnreachable);
            assert!(error.to_string().contains("the same Ethernet address"), "{error}");
        }
    });
}
