//! A TUN: IP packets without Ethernet between fulmar and the kernel.

use std::io::{Read, Write};
use std::net;
use std::os::fd::OwnedFd;
use std::thread;
use std::time::Duration;

use fulmar::device::Device;
use fulmar::stat::{Counter, DropReason};
use fulmar::{Stack, TcpListener, TcpStream, UdpSocket, devices};

use crate::namespace::ip;
use crate::support::{buffers_come_home_but, pattern};
use crate::tcp::exchange;
use crate::{KERNEL, KERNEL6, OURS, OURS6, POSTED, in_namespace, stack_on, sys};

const LEN: usize = 8 << 20;

/// Gives the kernel's end its addresses.
fn set_up() {
    ip(&format!("addr add {KERNEL}/24 dev fulmar0"));
    ip(&format!("addr add {KERNEL6}/64 dev fulmar0 nodad"));
    ip("link set fulmar0 up");
}

fn tun() -> Box<dyn Device> {
    let device = devices::tun("fulmar0").unwrap();
    set_up();
    device
}

fn counter(stack: &Stack, c: Counter) -> u64 {
    stack.stat().unwrap().shard.counters.value(c)
}

fn drops(stack: &Stack, reason: DropReason) -> u64 {
    stack.stat().unwrap().shard.counters.drops(reason)
}

/// A connection to the kernel, and the kernel's end.
fn connect(stack: &Stack, address: &str) -> (TcpStream, net::TcpStream) {
    let listener = net::TcpListener::bind((address, 80)).unwrap();
    let c = TcpStream::connect(stack, (address, 80)).unwrap();
    let (s, from) = listener.accept().unwrap();
    assert_eq!(from, c.local_addr().unwrap());
    (c, s)
}

fn exchange_all(ours: &TcpStream, kernels: &net::TcpStream, len: usize) {
    exchange(
        (ours.try_clone().unwrap(), ours.try_clone().unwrap()),
        (kernels.try_clone().unwrap(), kernels.try_clone().unwrap()),
        len,
    );
}

#[test]
fn every_byte_arrives_in_super_packets_with_the_kernel_as_server() {
    in_namespace!(|| {
        let stack = stack_on(tun());
        for address in [KERNEL, KERNEL6] {
            let (c, s) = connect(&stack, address);
            exchange_all(&c, &s, LEN);
        }
        let frames = counter(&stack, Counter::TxFrames) + counter(&stack, Counter::RxFrames);
        let packets = counter(&stack, Counter::TxPackets) + counter(&stack, Counter::RxPackets);
        assert!(packets > 2 * frames, "{packets} packets in {frames} frames");
        assert!(stack.stat().unwrap().shard.neighbours.is_empty());
        buffers_come_home_but(POSTED, &[&stack]);
    });
}

#[test]
fn every_byte_arrives_with_the_kernel_as_client() {
    in_namespace!(|| {
        let stack = stack_on(tun());
        for address in [OURS, OURS6] {
            let listener = TcpListener::bind(&stack, (address, 80)).unwrap();
            let c = thread::spawn(move || net::TcpStream::connect((address, 80)).unwrap());
            let (s, _) = listener.accept().unwrap();
            exchange_all(&s, &c.join().unwrap(), LEN);
        }
    });
}

#[test]
fn datagrams_pass_both_ways_also_in_fragments_and_bursts() {
    in_namespace!(|| {
        let stack = stack_on(tun());
        for (ours, kernel) in [(OURS, KERNEL), (OURS6, KERNEL6)] {
            let a = UdpSocket::bind(&stack, (ours, 700)).unwrap();
            let b = net::UdpSocket::bind((kernel, 700)).unwrap();
            b.set_read_timeout(Some(crate::support::PATIENCE)).unwrap();
            let mut got = vec![0; 65_536];
            // The first datagram goes the slow path, the others the fast one; the last ones are fragmented.
            for bytes in [1, 2, 1000, 1400, 9000, 60_000] {
                a.send_to(&pattern(bytes, bytes), (kernel, 700)).unwrap();
                let (n, from) = b.recv_from(&mut got).unwrap();
                assert!(got[..n] == pattern(bytes, bytes) && from == a.local_addr().unwrap());
                b.send_to(&pattern(bytes + 1, bytes), (ours, 700)).unwrap();
                let (n, from) = a.recv_from(&mut got).unwrap();
                assert!(got[..n] == pattern(bytes + 1, bytes) && from == b.local_addr().unwrap());
            }
        }
    });
}

#[test]
fn echo_requests_are_answered_and_nothing_is_asked_of_neighbours() {
    in_namespace!(|| {
        let stack = stack_on(tun());
        let shown = ip("-d link show fulmar0");
        assert!(
            shown.contains("link/none") && shown.contains("POINTOPOINT,MULTICAST,NOARP"),
            "{shown}"
        );
        assert_eq!(
            sys::kernel_ping(OURS.parse().unwrap(), b"are you there?").unwrap(),
            b"are you there?"
        );
        // An address of the link without a host: the packet goes to the kernel, which has no answer.
        let a = UdpSocket::bind(&stack, (OURS, 0)).unwrap();
        a.send_to(b"anybody?", "10.77.0.9:7").unwrap();
        assert_eq!(drops(&stack, DropReason::NeighbourUnreachable), 0);
        assert!(stack.stat().unwrap().shard.neighbours.is_empty());
        let shown = ip("neigh show dev fulmar0");
        assert!(!shown.contains("lladdr"), "{shown}");
    });
}

#[test]
fn connections_go_on_when_the_mtu_of_the_interface_changes() {
    in_namespace!(|| {
        let stack = stack_on(tun());
        for address in [KERNEL, KERNEL6] {
            let (c, s) = connect(&stack, address);
            for mtu in [1500, 1280, 4000, 1500] {
                ip(&format!("link set fulmar0 mtu {mtu}"));
                exchange_all(&c, &s, LEN / 8);
            }
        }
    });
}

#[test]
fn an_interface_that_goes_down_comes_back_and_one_that_is_removed_ends_every_call() {
    in_namespace!(|| {
        let stack = stack_on(tun());
        let (mut c, s) = connect(&stack, KERNEL);
        ip("link set fulmar0 down");
        c.write_all(b"before the link is up again").unwrap();
        thread::sleep(Duration::from_millis(20));
        ip("link set fulmar0 up");
        let mut got = [0; 27];
        (&s).read_exact(&mut got).unwrap();
        assert_eq!(&got, b"before the link is up again");
        let reader = thread::spawn(move || c.read(&mut [0; 1]).unwrap_err());
        thread::sleep(Duration::from_millis(50));
        ip("link del fulmar0");
        assert_eq!(reader.join().unwrap().raw_os_error(), Some(libc::ENETDOWN));
        let e = TcpStream::connect(&stack, (KERNEL, 80)).unwrap_err();
        assert_eq!(e.raw_os_error(), Some(libc::ENETDOWN));
    });
}

#[test]
fn several_queues_serve_many_connections() {
    in_namespace!(|| {
        let queues = devices::tun_queues("fulmar0", 2).unwrap();
        set_up();
        let stack = Stack::builder()
            .devices(queues)
            .address(format!("{OURS}/24").parse().unwrap())
            .unlisted()
            .build()
            .unwrap();
        let listener = net::TcpListener::bind((KERNEL, 80)).unwrap();
        for i in 0..20 {
            let c = TcpStream::connect(&stack, (KERNEL, 80)).unwrap();
            let (s, _) = listener.accept().unwrap();
            exchange_all(&c, &s, 10_000 + i);
        }
    });
}

#[test]
fn an_interface_that_exists_is_found_to_be_a_tun_and_the_wrong_kind_is_refused() {
    in_namespace!(|| {
        ip("tuntap add dev fulmar0 mode tun");
        set_up();
        let e = devices::tap("fulmar0").err().expect("it is a TUN").to_string();
        assert!(e.contains("not a TAP"), "{e}");
        let stack = stack_on(devices::open("fulmar0").unwrap());
        let e = devices::tun("fulmar0").err().expect("it has a stack").to_string();
        assert!(e.contains("another program"), "{e}");
        let (c, s) = connect(&stack, KERNEL);
        exchange_all(&c, &s, 100_000);
        ip("tuntap add dev tap1 mode tap");
        let e = devices::open("tun:tap1").err().expect("it is a TAP").to_string();
        assert!(e.contains("not a TUN"), "{e}");
        let other = net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let e = devices::tun_from_fd(OwnedFd::from(other)).err().expect("a socket").to_string();
        assert!(e.contains("IFF_TUN"), "{e}");
    });
}

#[test]
fn a_capture_of_a_tun_has_ip_packets_alone() {
    in_namespace!(|| {
        let path = std::env::temp_dir().join(format!("fulmar-tun-{}.pcapng", std::process::id()));
        let file = std::fs::File::create(&path).unwrap();
        let stack = stack_on(devices::capture(tun(), file));
        let (c, s) = connect(&stack, KERNEL);
        exchange_all(&c, &s, 1000);
        drop((c, s));
        drop(stack);
        let capture = std::fs::read(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        // Section header (28 bytes), then the interface description: LINKTYPE_RAW.
        assert_eq!(capture[36..38], 101u16.to_ne_bytes());
    });
}
