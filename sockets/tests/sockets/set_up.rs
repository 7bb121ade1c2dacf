//! What cannot be built, and how that is said.

use std::io::{Read, Write};
use std::os::unix::net::UnixDatagram;
use std::time::Duration;

use fulmar::config::MIN_BUDGET_BYTES;
use fulmar::{Builder, Stack, TcpStream, devices};

use crate::support::pipe::Pipe;
use crate::support::{B, PATIENCE, connection, stack, stacks_with, within};

/// The sentence with which a stack is refused.
fn refused(describe: impl FnOnce(Builder) -> Builder) -> String {
    let (device, _peer) = devices::link_pair().unwrap();
    let builder = describe(Stack::builder().device(device).unlisted());
    builder.build().expect_err("it makes no sense").to_string()
}

fn says(text: String, words: &[&str]) {
    words.iter().for_each(|w| assert!(text.contains(w), "`{text}` does not say `{w}`"));
}

fn address(text: &str) -> fulmar::Cidr {
    text.parse().unwrap()
}

#[test]
fn a_stack_that_makes_no_sense_is_refused_with_a_sentence() {
    let no_device = Stack::builder().address(address("10.0.0.1/24")).build().unwrap_err();
    assert!(no_device.to_string().contains("Builder::device"), "{no_device}");
    assert!(refused(|b| b).contains("Builder::address"));
    says(refused(|b| b.address(address("224.0.0.1/24"))), &["224.0.0.1"]);
    says(refused(|b| b.address(address("0.0.0.0/24"))), &["0.0.0.0"]);
    says(refused(|b| b.address(address("10.0.0.1/24")).mtu(100)), &["MTU", "576"]);
    says(refused(|b| b.address(address("fd00::1/64")).mtu(1000)), &["MTU", "1280"]);
    says(refused(|b| b.address(address("10.0.0.1/24")).budget_bytes(1 << 40)), &["128 GiB"]);
}

#[test]
fn an_mtu_above_the_devices_is_refused_with_both_numbers() {
    for mtu in [1501, 9000, 70_000, usize::MAX] {
        let all = ["1500", &mtu.to_string()];
        says(refused(|b| b.address(address("10.0.0.1/24")).mtu(mtu)), &all);
    }
}

#[test]
fn a_budget_below_the_least_is_refused_and_the_least_serves_a_connection() {
    for budget in [0, 1, 1000, 100_000, MIN_BUDGET_BYTES - 1] {
        let all = ["131072", &budget.to_string()];
        says(refused(|b| b.address(address("10.0.0.1/24")).budget_bytes(budget)), &all);
    }
    let (a, b) = stacks_with(|s| s.budget_bytes(MIN_BUDGET_BYTES));
    let (mut c, mut s) = connection(&a, &b, 80);
    let data = vec![7; 256 << 10];
    std::thread::scope(|all| {
        all.spawn(|| c.write_all(&data).unwrap());
        let mut got = vec![0; data.len()];
        s.read_exact(&mut got).unwrap();
        assert!(got == data);
    });
}

#[test]
fn an_error_of_setting_up_is_an_io_error_with_its_sentence() {
    let build = || -> std::io::Result<Stack> {
        let (device, _peer) = devices::link_pair()?;
        Ok(Stack::builder().device(device).address("10.0.0.1/24".parse()?).mtu(9000).build()?)
    };
    let error = build().unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::InvalidInput);
    assert!(error.to_string().contains("9000"), "{error}");
    let open = || -> std::io::Result<_> { Ok(devices::open("nosuch:x")?) };
    assert!(open().is_err_and(|e| e.to_string().contains("packet:INTERFACE")));
}

#[test]
fn two_links_have_different_ethernet_addresses_and_are_not_queues_of_one_interface() {
    let (p, q) = (devices::link_pair().unwrap().0, devices::link_pair().unwrap().0);
    let built = Stack::builder().devices(vec![p, q]).address(address("10.0.0.1/24")).build();
    says(built.unwrap_err().to_string(), &["Ethernet address"]);
}

#[test]
fn the_smallest_budgets_end_what_they_cannot_carry() {
    for budget in [MIN_BUDGET_BYTES, 256 << 10, 1 << 20] {
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
