//! Two shards on two queues of one TAP: the kernel sends to the queue that has last sent of a flow. And on
//! two packet sockets of one interface, among which the kernel deals out frames.

use std::io::{Read, Write};
use std::net;
use std::thread;

use fulmar::device::Device;
use fulmar::devices;
use fulmar::devices::{Tap, TapConfig};
use fulmar::stat::Counter;
use fulmar::{Stack, TcpListener, TcpStream, UdpSocket};

use crate::namespace::ip;
use crate::support::{PATIENCE, pattern};
use crate::tcp::exchange;
use crate::{KERNEL, KERNEL6, OURS, OURS6, in_namespace};

const LEN: usize = 2 << 20;
const CONNECTIONS: usize = 8;

/// Two queues, steered by the kernel's own rule or, if it lets us, by owner.
fn stack(steer: bool) -> Stack {
    let config = TapConfig { name: "fulmar0".to_owned(), steer, ..TapConfig::default() };
    let queues = Tap::open_queues(&config, 2).unwrap();
    let queues = queues.into_iter().map(|q| Box::new(q) as Box<dyn Device>).collect();
    ip(&format!("addr add {KERNEL}/24 dev fulmar0"));
    ip(&format!("addr add {KERNEL6}/64 dev fulmar0 nodad"));
    ip("link set fulmar0 up");
    stack_on(queues)
}

/// Two packet sockets at one end of a veth, the kernel at the other.
fn packet_stack() -> Stack {
    ip("link add v0 type veth peer name v1");
    ip("link set v1 up");
    ip("link set v0 up");
    ip(&format!("addr add {KERNEL}/24 dev v0"));
    ip(&format!("addr add {KERNEL6}/64 dev v0 nodad"));
    stack_on(devices::packet_queues("v1", 2).unwrap())
}

fn stack_on(queues: Vec<Box<dyn Device>>) -> Stack {
    Stack::builder()
        .devices(queues)
        .address(format!("{OURS}/24").parse().unwrap())
        .address(format!("{OURS6}/64").parse().unwrap())
        .exit_drain(PATIENCE)
        .unlisted()
        .build()
        .unwrap()
}

/// Checks the number of packets that came on another queue than their owner's: none if the kernel knows the owners,
/// else at most `most`.
fn check_wrong(stack: &Stack, most: u64) {
    let stat = stack.stat().unwrap();
    let (wrong, frames) = (stat.count(Counter::WrongQueue), stat.count(Counter::RxFrames));
    let path = &stat.shard.device.path;
    println!("{wrong} of {frames} frames came on the wrong queue: {path}");
    let most = if path.contains("to the owner") { 0 } else { most };
    assert!(wrong <= most, "{wrong} of {frames}");
}

fn a_port_is_served_on_both_queues(stack: &Stack, most_wrong: u64) {
    let listener = TcpListener::bind(stack, (OURS, 80)).unwrap();
    let client = |n: usize| {
        thread::spawn(move || {
            let c = net::TcpStream::connect((OURS, 80)).unwrap();
            let mut reader = c.try_clone().unwrap();
            let writer = thread::spawn(move || (&c).write_all(&pattern(n, LEN)).unwrap());
            let mut got = vec![0; LEN];
            reader.read_exact(&mut got).unwrap();
            writer.join().unwrap();
            assert!(got == pattern(n, LEN), "the bytes differ");
        })
    };
    let serve = |mut s: TcpStream| {
        thread::spawn(move || {
            let mut bytes = vec![0; LEN];
            s.read_exact(&mut bytes).unwrap();
            s.write_all(&bytes).unwrap();
        })
    };
    let clients: Vec<_> = (0..CONNECTIONS).map(client).collect();
    let servers: Vec<_> = clients.iter().map(|_| serve(listener.accept().unwrap().0)).collect();
    clients.into_iter().chain(servers).for_each(|t| t.join().unwrap());
    check_wrong(stack, most_wrong);
}

/// The first packets of connections, before the kernel has seen one of ours.
const FIRST: u64 = 8 * CONNECTIONS as u64;

#[test]
fn a_port_is_served_on_both_queues_with_the_kernel_as_client() {
    in_namespace!(|| a_port_is_served_on_both_queues(&stack(true), FIRST));
}

#[test]
fn a_port_is_served_on_both_queues_that_follow_the_sender() {
    in_namespace!(|| a_port_is_served_on_both_queues(&stack(false), FIRST));
}

#[test]
fn a_port_is_served_on_both_sockets_of_a_group() {
    // The kernel's own hash knows no owners: any number may come to the other one.
    in_namespace!(|| a_port_is_served_on_both_queues(&packet_stack(), u64::MAX));
}

#[test]
fn each_frame_comes_to_one_socket_of_a_group() {
    in_namespace!(|| {
        let stack = packet_stack();
        let ours = UdpSocket::bind(&stack, (OURS, 53)).unwrap();
        let mut buf = [0; 100];
        for n in 0..64u8 {
            let kernels = net::UdpSocket::bind((KERNEL, 0)).unwrap();
            kernels.send_to(&[n; 10], (OURS, 53)).unwrap();
            let (len, _) = ours.recv_from(&mut buf).unwrap();
            assert_eq!(buf[..len], [n; 10], "a datagram came twice, or not");
        }
        ours.set_nonblocking(true).unwrap();
        assert!(ours.recv_from(&mut buf).is_err(), "more came than was sent");
    });
}

#[test]
fn connections_of_both_shards_get_their_answers_on_their_own_queues() {
    in_namespace!(|| {
        let stack = stack(true);
        for (address, n) in [(KERNEL, 0), (KERNEL6, 1), (KERNEL, 1), (KERNEL6, 0)] {
            let stack = stack.on_shard(n).unwrap();
            let listener = net::TcpListener::bind((address, 80)).unwrap();
            let c = TcpStream::connect(&stack, (address, 80)).unwrap();
            let (s, _) = listener.accept().unwrap();
            exchange(
                (c.try_clone().unwrap(), c.try_clone().unwrap()),
                (s.try_clone().unwrap(), s.try_clone().unwrap()),
                LEN,
            );
        }
        check_wrong(&stack, 40);
        assert_eq!(stack.ping(KERNEL.parse().unwrap(), 64, PATIENCE).unwrap().bytes, 64);
    });
}

#[test]
fn a_datagram_socket_gets_what_comes_on_either_queue() {
    in_namespace!(|| {
        let stack = stack(false);
        let ours = UdpSocket::bind(&stack, (OURS, 53)).unwrap();
        let mut buf = [0; 100];
        for n in 0..32u8 {
            let kernels = net::UdpSocket::bind((KERNEL, 0)).unwrap();
            kernels.set_read_timeout(Some(PATIENCE)).unwrap();
            for _ in 0..3 {
                kernels.send_to(&[n; 10], (OURS, 53)).unwrap();
                let (len, from) = ours.recv_from(&mut buf).unwrap();
                assert_eq!(buf[..len], [n; 10]);
                ours.send_to(&buf[..len], from).unwrap();
                assert_eq!(kernels.recv(&mut buf).unwrap(), 10);
            }
        }
    });
}
