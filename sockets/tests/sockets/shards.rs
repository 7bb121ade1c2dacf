//! A stack of several shards, each on a queue of its own: two such stacks over two wires between simulated
//! NICs, or queues that take each other's packets.

use std::io::{ErrorKind, Read, Write};
use std::net::SocketAddr;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use crate::support::faulty::{Call, Faulty};
use crate::support::{A, B, PATIENCE, eventually, pattern, within};
use fulmar::device::Device;
use fulmar::stat::Counter;
use fulmar::{Ready, SetupError, Stack, TcpListener, TcpStream, UdpSocket};
use fulmar_nic::{SimConfig, pair};

/// Which queue of one end is joined to which queue of the other.
fn wires(joined: [usize; 2]) -> [Vec<Box<dyn Device>>; 2] {
    let config = |n| SimConfig {
        ether: fulmar::device::EtherAddr([2, 0, 0, 0, 0, n]),
        ..SimConfig::default()
    };
    let mut ends: [Vec<Option<Box<dyn Device>>>; 2] = [vec![], vec![None, None]];
    for there in joined {
        let [(near, _), (far, _)] = pair(config(1), config(2)).unwrap();
        ends[0].push(Some(Box::new(near)));
        ends[1][there] = Some(Box::new(far));
    }
    ends.map(|queues| queues.into_iter().map(Option::unwrap).collect())
}

fn stack(side: u8, queues: Vec<Box<dyn Device>>) -> Stack {
    Stack::builder()
        .devices(queues)
        .address(format!("10.1.0.{side}/24").parse().unwrap())
        .address(format!("fd01::{side}/64").parse().unwrap())
        .exit_drain(PATIENCE)
        .unlisted()
        // The same key in both: a wire joins the queues of the two shards that own a flow.
        .deterministic_for_simulation(1)
        .build()
        .unwrap()
}

/// Two stacks of two shards. `crossed`: what one sends on its queue 0 comes on queue 1 of the other, so
/// that every packet of a flow is on the wrong queue there.
fn stacks(crossed: bool) -> (Stack, Stack) {
    let [a, b] = wires(if crossed { [1, 0] } else { [0, 1] });
    (stack(1, a), stack(2, b))
}

fn wrong(stacks: [&Stack; 2]) -> u64 {
    stacks.iter().map(|s| s.stat().unwrap().count(Counter::WrongQueue)).sum()
}

/// Answers on each connection with what comes.
fn echo(listener: &TcpListener, connections: usize) -> Vec<thread::JoinHandle<()>> {
    let serve = |mut s: TcpStream| {
        move || {
            let mut bytes = Vec::new();
            s.read_to_end(&mut bytes).unwrap();
            s.write_all(&bytes).unwrap();
        }
    };
    (0..connections).map(|_| thread::spawn(serve(listener.accept().unwrap().0))).collect()
}

fn ask(stack: &Stack, to: (&str, u16), n: usize) {
    let mut c = TcpStream::connect(stack, to).unwrap();
    let bytes = pattern(n, 300_000 + n);
    let mut reader = c.try_clone().unwrap();
    let got = thread::spawn(move || {
        let mut got = Vec::new();
        reader.read_to_end(&mut got).unwrap();
        got
    });
    c.write_all(&bytes).unwrap();
    c.shutdown(std::net::Shutdown::Write).unwrap();
    assert!(got.join().unwrap() == bytes, "the bytes differ");
}

/// Twelve connections, of which each shard of both stacks gets some.
fn twelve_connections(crossed: bool) {
    const CONNECTIONS: usize = 12;
    let (a, b) = stacks(crossed);
    let listener = TcpListener::bind(&b, (B, 80)).unwrap();
    assert_eq!(b.stat().unwrap().sockets().len(), 2, "one listener per shard");
    let server = thread::spawn(move || {
        echo(&listener, CONNECTIONS).into_iter().for_each(|t| t.join().unwrap());
    });
    let ask_one = |n: usize| {
        let a = a.on_shard(n as u16 % 2).unwrap();
        thread::spawn(move || ask(&a, (B, 80), n))
    };
    let clients: Vec<_> = (0..CONNECTIONS).map(ask_one).collect();
    clients.into_iter().for_each(|t| t.join().unwrap());
    server.join().unwrap();
    for shard in 0..2 {
        let opened = b.on_shard(shard).unwrap();
        let opened = opened.host().call(|s, _| Ok(s.counters().value(Counter::TcpPassiveOpens)));
        assert_eq!(opened.unwrap(), CONNECTIONS as u64 / 2, "shard {shard}");
    }
    if crossed {
        assert!(wrong([&a, &b]) > 100, "all of them were on the wrong queue");
    } else {
        assert_eq!(wrong([&a, &b]), 0);
    }
}

#[test]
fn a_listening_port_is_served_by_all_shards_and_every_packet_stays_on_its_queue() {
    within(|| twelve_connections(false));
}

#[test]
fn packets_on_the_wrong_queue_reach_their_flows_all_the_same() {
    within(|| twelve_connections(true));
}

#[test]
fn a_thread_per_shard_has_listeners_and_sockets_of_its_own_on_the_same_ports() {
    within(|| {
        let (a, b) = stacks(false);
        let serve = |n: u16| {
            let b = b.on_shard(n).unwrap();
            let listener = TcpListener::bind(&b, (B, 80)).unwrap();
            let socket = UdpSocket::bind(&b, (B, 53)).unwrap();
            thread::spawn(move || {
                echo(&listener, 2).into_iter().for_each(|t| t.join().unwrap());
                let mut buf = [0; 100];
                for _ in 0..20 {
                    let (n, from) = socket.recv_from(&mut buf).unwrap();
                    socket.send_to(&buf[..n], from).unwrap();
                }
            })
        };
        let servers: Vec<_> = (0..2).map(serve).collect();
        for n in 0..2u16 {
            let a = a.on_shard(n).unwrap();
            (0..2).for_each(|i| ask(&a, (B, 80), i));
            let peer: SocketAddr = (B.parse::<std::net::IpAddr>().unwrap(), 53).into();
            let socket = UdpSocket::connected(&a, peer).unwrap();
            for i in 0..20u8 {
                socket.send(&[i]).unwrap();
                let mut got = [0; 10];
                assert_eq!((socket.recv(&mut got).unwrap(), got[0]), (1, i));
            }
        }
        servers.into_iter().for_each(|t| t.join().unwrap());
        assert_eq!(wrong([&a, &b]), 0);
    });
}

#[test]
fn threads_on_different_shards_take_no_lock_of_each_other() {
    within(|| {
        let (a, b) = stacks(false);
        let work = |n: u16| {
            let (a, b) = (a.on_shard(n).unwrap(), b.on_shard(n).unwrap());
            thread::spawn(move || {
                let peer: SocketAddr = (A.parse::<std::net::IpAddr>().unwrap(), 53).into();
                let here = UdpSocket::bind(&a, peer).unwrap();
                let there = UdpSocket::connected(&b, peer).unwrap();
                let mut buf = [0; 64];
                let mut round = || {
                    there.send(&[7; 18]).unwrap();
                    assert_eq!(here.recv(&mut buf).unwrap(), 18);
                };
                // Neighbours are found, buffers are there.
                (0..100).for_each(|_| round());
                let count = |c| {
                    let value =
                        |s: &Stack| s.host().call(|s, _| Ok(s.counters().value(c))).unwrap();
                    value(&a) + value(&b)
                };
                let before = (count(Counter::SharedLocks), count(Counter::WrongQueue));
                (0..5000).for_each(|_| round());
                assert_eq!((count(Counter::SharedLocks), count(Counter::WrongQueue)), before);
            })
        };
        let threads: Vec<_> = (0..2).map(work).collect();
        threads.into_iter().for_each(|t| t.join().unwrap());
    });
}

#[test]
fn a_lock_that_two_threads_take_in_turn_is_counted_as_shared() {
    within(|| {
        let (a, _b) = stacks(false);
        let socket = Arc::new(UdpSocket::bind(&a, (A, 53)).unwrap());
        let before = a.stat().unwrap().count(Counter::SharedLocks);
        for _ in 0..10 {
            let other = Arc::clone(&socket);
            thread::spawn(move || other.local_addr().unwrap()).join().unwrap();
            socket.local_addr().unwrap();
        }
        assert!(a.stat().unwrap().count(Counter::SharedLocks) >= before + 20);
    });
}

#[test]
fn a_datagram_socket_is_reached_from_every_queue() {
    within(|| {
        for crossed in [false, true] {
            let (a, b) = stacks(crossed);
            let server = UdpSocket::bind(&b, (B, 53)).unwrap();
            let taken = UdpSocket::bind(&b.clone(), (B, 53)).unwrap_err();
            assert_eq!(taken.kind(), ErrorKind::AddrInUse);
            for n in 0..2 {
                let client = UdpSocket::bind(&a.on_shard(n).unwrap(), (A, 0)).unwrap();
                for i in 0..10u8 {
                    client.send_to(&[i], (B, 53)).unwrap();
                    let mut buf = [0; 10];
                    let (len, from) = server.recv_from(&mut buf).unwrap();
                    assert_eq!((len, buf[0], from), (1, i, client.local_addr().unwrap()));
                    server.send_to(&buf[..len], from).unwrap();
                    assert_eq!(client.recv(&mut buf).unwrap(), 1);
                }
            }
        }
    });
}

#[test]
fn a_closed_port_is_closed_on_every_queue() {
    within(|| {
        let (a, b) = stacks(true);
        drop(UdpSocket::bind(&b, (B, 99)).unwrap());
        for n in 0..2 {
            let a = a.on_shard(n).unwrap();
            assert_eq!(
                TcpStream::connect(&a, (B, 81)).unwrap_err().kind(),
                ErrorKind::ConnectionRefused
            );
            let socket = UdpSocket::connected(&a, (B, 99)).unwrap();
            socket.send(b"?").unwrap();
            socket.set_read_timeout(Some(PATIENCE)).unwrap();
            let refused = socket.recv(&mut [0; 10]).unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
        }
    });
}

#[test]
fn echoes_and_errors_find_the_shard_that_asked() {
    within(|| {
        for crossed in [false, true] {
            let (a, b) = stacks(crossed);
            for to in [B, crate::support::B6] {
                let echo = a.ping(to.parse().unwrap(), 100, PATIENCE).unwrap();
                assert_eq!(echo.bytes, 100);
            }
            let back = b.ping(A.parse().unwrap(), 8, PATIENCE).unwrap();
            assert_eq!(back.bytes, 8);
        }
    });
}

#[test]
fn a_connection_from_a_port_of_choice_is_opened_by_its_owner() {
    within(|| {
        let (a, b) = stacks(false);
        let listener = TcpListener::bind(&b, (B, 0)).unwrap();
        let to = listener.local_addr().unwrap();
        for port in 7000..7010 {
            let local = Some(([0, 0, 0, 0], port).into());
            let options = fulmar::ConnectOptions { local, ..Default::default() };
            let c = TcpStream::connect_with(&a, &to, &options, Some(PATIENCE)).unwrap();
            let (s, from) = listener.accept().unwrap();
            assert_eq!(from.port(), port);
            drop((c, s));
        }
        assert_eq!(wrong([&a, &b]), 0);
    });
}

#[test]
fn a_poll_set_watches_sockets_of_all_shards() {
    within(|| {
        let (a, b) = stacks(false);
        let set = b.poll_set().unwrap();
        let listener = TcpListener::bind(&b, (B, 80)).unwrap();
        listener.set_nonblocking(true).unwrap();
        set.add(&listener, 99, Ready::READABLE).unwrap();
        let mut events = Vec::new();
        assert_eq!(set.wait(&mut events, Some(Duration::from_millis(5))).unwrap(), 0);
        let mut accepted = Vec::new();
        for n in 0..4u16 {
            let a = a.on_shard(n % 2).unwrap();
            let c = thread::spawn(move || TcpStream::connect(&a, (B, 80)).unwrap());
            let (s, _) = loop {
                set.wait(&mut events, Some(PATIENCE)).unwrap();
                assert!(events.iter().all(|e| e.token == 99));
                match listener.accept() {
                    Ok(s) => break s,
                    Err(e) => assert_eq!(e.kind(), ErrorKind::WouldBlock),
                }
            };
            accepted.push((c.join().unwrap(), s));
        }
        set.remove(&listener).unwrap();
        for (n, (_, s)) in accepted.iter().enumerate() {
            set.add(s, n, Ready::READABLE).unwrap();
        }
        for (n, (c, s)) in accepted.iter().enumerate() {
            let mut c = c;
            c.write_all(b"now").unwrap();
            eventually("its event comes", || {
                set.wait(&mut events, Some(PATIENCE)).unwrap();
                events.iter().any(|e| e.token == n)
            });
            (&*s).read_exact(&mut [0; 3]).unwrap();
        }
        assert_eq!(set.wait(&mut events, Some(Duration::from_millis(5))).unwrap(), 0);
    });
}

#[test]
fn accepting_obeys_its_time_out_and_does_not_wait_if_it_must_not() {
    within(|| {
        let (_a, b) = stacks(false);
        let listener = TcpListener::bind(&b, (B, 80)).unwrap();
        let again = TcpListener::bind(&b, (B, 80)).unwrap_err();
        assert_eq!(again.kind(), ErrorKind::AddrInUse);
        listener.set_accept_timeout(Some(Duration::from_millis(10))).unwrap();
        assert_eq!(listener.accept().unwrap_err().kind(), ErrorKind::WouldBlock);
        listener.set_nonblocking(true).unwrap();
        assert_eq!(listener.accept().unwrap_err().kind(), ErrorKind::WouldBlock);
        drop(listener);
        TcpListener::bind(&b, (B, 80)).unwrap();
    });
}

#[test]
fn devices_that_do_not_belong_together_are_refused() {
    let [near, far] = wires([0, 1]);
    let mixed: Vec<_> = near.into_iter().zip(far).flat_map(|(a, b)| [a, b]).collect();
    let build = |queues| {
        Stack::builder().devices(queues).address("10.1.0.1/24".parse().unwrap()).unlisted().build()
    };
    assert!(matches!(build(mixed), Err(SetupError::MixedDevices)));
    let (many, _) = fulmar_nic::open_queues(&SimConfig::default(), 33).unwrap();
    let refused = build(many).unwrap_err();
    assert!(matches!(refused, SetupError::TooManyDevices(33)));
    assert!(refused.to_string().contains("at most 32"), "{refused}");
    let (two, _) = fulmar_nic::open_queues(&SimConfig::default(), 2).unwrap();
    assert!(build(two).unwrap().on_shard(2).is_err());
}

#[test]
fn a_panic_in_one_shard_shuts_down_all_shards_of_its_stack_and_wakes_their_waiters() {
    within(|| {
        for call in [Call::Tx, Call::Rx] {
            let [mut near, far] = wires([0, 1]);
            let (faulty, bug) = Faulty::around(near.pop().unwrap());
            near.push(faulty);
            let (a, _b) = (stack(1, near), stack(2, far));
            let [zero, one] = [0, 1].map(|n| a.on_shard(n).unwrap());
            let listener = TcpListener::bind(&a, (A, 80)).unwrap();
            let alone = TcpListener::bind(&zero, (A, 81)).unwrap();
            let set = zero.poll_set().unwrap();
            set.add(&listener, 1, Ready::READABLE).unwrap();
            let calls: [Box<dyn FnOnce() -> std::io::Result<()> + Send>; 3] = [
                Box::new(move || listener.accept().map(drop)),
                Box::new(move || alone.accept().map(drop)),
                Box::new(move || set.wait(&mut Vec::new(), None).map(drop)),
            ];
            let blocked = calls.map(thread::spawn);
            bug.set(call, 1, false);
            let struck = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                let udp = UdpSocket::bind(&one, (A, 0)).unwrap();
                udp.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
                let _ = udp.send_to(b"x", (B, 9));
                let _ = udp.recv_from(&mut [0; 8]);
            }));
            drop(struck);
            eventually("it strikes", || bug.has_struck());
            for call in blocked {
                assert_eq!(call.join().unwrap().unwrap_err().raw_os_error(), Some(libc::ENETDOWN));
            }
            for shard in [&zero, &one] {
                let refused = UdpSocket::bind(shard, (A, 0)).unwrap_err();
                assert_eq!(refused.raw_os_error(), Some(libc::ENETDOWN));
            }
            drop((a, zero, one));
            assert!(bug.is_dropped());
        }
    });
}
