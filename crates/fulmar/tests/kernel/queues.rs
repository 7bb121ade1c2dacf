//! Two shards on two queues of one TAP: the kernel sends to the queue that has last sent of a flow.

use std::io::{Read, Write};
use std::net;
use std::thread;

use fulmar::base::Counter;
use fulmar::{Stack, TcpListener, TcpStream, UdpSocket, devices};

use crate::namespace::ip;
use crate::support::{PATIENCE, pattern};
use crate::tcp::exchange;
use crate::{KERNEL, KERNEL6, OURS, OURS6, in_namespace};

const LEN: usize = 2 << 20;
const CONNECTIONS: usize = 8;

fn stack() -> Stack {
    let queues = devices::tap_queues("fulmar0", 2).unwrap();
    ip(&format!("addr add {KERNEL}/24 dev fulmar0"));
    ip(&format!("addr add {KERNEL6}/64 dev fulmar0 nodad"));
    ip("link set fulmar0 up");
    Stack::builder()
        .devices(queues)
        .address(format!("{OURS}/24").parse().unwrap())
        .address(format!("{OURS6}/64").parse().unwrap())
        .exit_drain(PATIENCE)
        .unlisted()
        .build()
        .unwrap()
}

/// Packets that came on another queue than their owner's, and frames received.
fn wrong(stack: &Stack) -> (u64, u64) {
    let stat = stack.stat().unwrap();
    (stat.count(Counter::WrongQueue), stat.count(Counter::RxFrames))
}

#[test]
fn a_port_is_served_on_both_queues_with_the_kernel_as_client() {
    in_namespace!(|| {
        let stack = stack();
        let listener = TcpListener::bind(&stack, (OURS, 80)).unwrap();
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
        let (wrong, frames) = wrong(&stack);
        println!("{wrong} of {frames} frames came on the wrong queue");
        // The first packets of a connection, before the kernel has seen one of ours.
        assert!(wrong <= 8 * CONNECTIONS as u64, "{wrong} of {frames}");
    });
}

#[test]
fn connections_of_both_shards_get_their_answers_on_their_own_queues() {
    in_namespace!(|| {
        let stack = stack();
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
        let (wrong, frames) = wrong(&stack);
        println!("{wrong} of {frames} frames came on the wrong queue");
        assert!(wrong <= 40, "{wrong} of {frames}");
        assert_eq!(stack.ping(KERNEL.parse().unwrap(), 64, PATIENCE).unwrap().bytes, 64);
    });
}

#[test]
fn a_datagram_socket_gets_what_comes_on_either_queue() {
    in_namespace!(|| {
        let stack = stack();
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
