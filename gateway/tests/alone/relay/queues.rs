//! A guest's interface of several queues: what arrives at one and belongs to another, and what holds for all
//! together. The other tests run with several queues, too.

use std::io::Write;
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::thread;

use fulmar_gateway::config::Limits;
use fulmar_gateway::ports::PortSpec;
use fulmar_gateway::stat::Refusal;
use fulmar_stack::base::Counter;

use crate::relay::Test;
use crate::relay::tcp::{receive_all, send_all};
use crate::relay::trouble::a_fault_resets_both_sides_of_what_is_open;
use crate::relay::udp::{bound, payload, receive};
use crate::relay::world::{GUEST, HOST, PATIENCE, World, listener};

pub const TESTS: &[Test] = &[
    (
        "many_flows_out_and_in_arrive_unchanged_whichever_queue_they_come_on",
        many_flows_out_and_in_arrive_unchanged,
    ),
    ("datagrams_of_many_clients_come_back_to_each", datagrams_of_many_clients_come_back_to_each),
    ("the_bound_of_flows_holds_over_all_queues", the_bound_of_flows_holds_over_all_queues),
    ("a_fault_of_any_queues_thread_resets_all", a_fault_of_any_queues_thread_resets_all),
    (
        "the_first_queues_thread_is_there_while_another_one_delivers",
        the_first_queues_thread_is_there_while_another_one_delivers,
    ),
];

fn many_flows_out_and_in_arrive_unchanged() {
    const FLOWS: u32 = 24;
    const BYTES: usize = 700_001;
    let spec: PortSpec = "8090:90".parse().unwrap();
    let (world, outside) = (World::with(1500, |c| c.publish.tcp = spec.forwards()), listener());
    let inside = world.guest.run(|| TcpListener::bind((GUEST, 90))).unwrap();
    let in_pair = || {
        let client = TcpStream::connect((HOST, 8090)).unwrap();
        let (served, from) = inside.accept().unwrap();
        assert_eq!(from, client.local_addr().unwrap());
        served.set_read_timeout(Some(PATIENCE)).unwrap();
        (served, client)
    };
    let out = (0..FLOWS).map(|_| world.pair(&outside));
    let pairs: Vec<_> = out.chain((0..FLOWS).map(|_| in_pair())).collect();
    thread::scope(|scope| {
        let spawn_both = |(n, (guest, host)): (u32, &'_ (TcpStream, TcpStream))| {
            let (guest, host) = (guest.try_clone().unwrap(), host.try_clone().unwrap());
            let near = scope.spawn(move || (send_all(&guest, 2 * n, BYTES), receive_all(&guest)));
            let far = scope.spawn(move || {
                let came = receive_all(&host);
                (send_all(&host, 2 * n + 1, BYTES), came)
            });
            (near, far)
        };
        let all: Vec<_> = (0..).zip(&pairs).map(spawn_both).collect();
        for (n, (near, far)) in all.into_iter().enumerate() {
            let ((out, in_came), (back, out_came)) = (near.join().unwrap(), far.join().unwrap());
            assert!(out_came == (out, BYTES), "{n} out");
            assert!(in_came == (back, BYTES), "{n} in");
        }
    });
    let stat = world.stat();
    assert_eq!((stat.queues, stat.totals.tcp_flows), (2, 2 * u64::from(FLOWS)));
    let bytes = u64::from(2 * FLOWS) * BYTES as u64;
    assert_eq!((stat.totals.bytes_out, stat.totals.bytes_in), (bytes, bytes));
    // Where the kernel takes the program that steers, nothing comes to a wrong queue.
    let is_steered = stat.stack.device.path.contains("to the owner");
    assert!(is_steered || stat.stack.counters.value(Counter::WrongQueue) > 0);
    drop(pairs);
    world.until("all flows are over", |s| s.flows.is_empty());
}

fn datagrams_of_many_clients_come_back_to_each() {
    let spec: PortSpec = "8091:91".parse().unwrap();
    let world = World::with(1500, |c| c.publish.udp = spec.forwards());
    let server = world.guest.run(|| UdpSocket::bind((GUEST, 91))).unwrap();
    server.set_read_timeout(Some(PATIENCE)).unwrap();
    let clients: Vec<_> = (0..24).map(|_| bound(HOST)).collect();
    for bytes in [1, 1400, 8000] {
        for client in &clients {
            client.send_to(&payload(bytes), (HOST, 8091)).unwrap();
            let (came, from) = receive(&server).unwrap();
            assert_eq!(from, client.local_addr().unwrap());
            assert!(came == payload(bytes), "{bytes}");
            server.send_to(&came, from).unwrap();
            assert!(receive(client).unwrap().0 == payload(bytes), "{bytes} back");
        }
    }
    let stat = world.stat();
    assert_eq!((stat.flows.len(), stat.totals.udp_flows), (24, 24));
    assert!(stat.flows.iter().all(|f| f.bytes_in == 9401 && f.bytes_out == 9401));
}

fn the_bound_of_flows_holds_over_all_queues() {
    // Three quarters are the guest's where ports may be published.
    let limits = Limits { tcp_flows: 10, ..Limits::default() };
    let (world, listener) = (World::with(65520, |c| c.limits = limits), listener());
    let port = listener.local_addr().unwrap().port();
    let begun: Vec<_> = (0..64).map(|_| world.begin_connection((HOST, port))).collect();
    world.until("most are refused", |s| s.totals.refusals.value(Refusal::FlowLimit) >= 56);
    // A thread that is busy is left out of a snapshot.
    world.until("as many as may be", |s| {
        assert!(s.flows.len() <= 8, "{}", s.flows.len());
        (s.flows.len(), s.totals.tcp_flows) == (8, 8)
    });
    drop(begun);
}

fn a_fault_of_any_queues_thread_resets_all() {
    // Which thread the fault is in depends on the port of the guest.
    (0..8).for_each(|_| a_fault_resets_both_sides_of_what_is_open());
}

fn the_first_queues_thread_is_there_while_another_one_delivers() {
    // Which thread delivers depends on the port of the guest.
    for _ in 0..8 {
        let (mut world, listener) = (World::new(), listener());
        let (mut guest, host) = world.pair(&listener);
        thread::scope(|scope| {
            // More than the host's kernel takes of what its program does not read.
            let written = scope.spawn(move || guest.write_all(&vec![7; 64 << 20]));
            let mut before = 0;
            world.until("the host's buffers are full", |s| {
                let moved = s.flows.first().map_or(0, |flow| flow.bytes_out);
                moved > 0 && std::mem::replace(&mut before, moved) == moved
            });
            world.end_guest();
            // The first answer may be that of its last turn.
            (0..3).for_each(|_| drop(world.stat()));
            world.end();
            written.join().unwrap().unwrap_err();
        });
        drop(host);
    }
}
