//! A guest, which is a stack of its own, and a program that accepts its traffic by the API.

use std::future::Future;
use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::time::Duration;

use fulmar::Stack;
use fulmar_tokio::{Net, PacketReceiver, PacketSender, TcpStream, UdpSocket};
use futures_util::{SinkExt, StreamExt, stream};
use netstack_smoltcp::{IpFilters, Runner, StackBuilder, TcpListener};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener as HostListener;
use tokio::net::TcpStream as HostStream;
use tokio::runtime::Builder;
use tokio::task::JoinHandle;
use tokio::time::timeout;

const PATIENCE: Duration = Duration::from_secs(60);
const FAR: &str = "192.0.2.7:443";
const FAR6: &str = "[2001:db8::7]:443";
const MTU: usize = 1400;

type Sink = stream::SplitSink<netstack_smoltcp::Stack, Vec<u8>>;
type Stream = stream::SplitStream<netstack_smoltcp::Stack>;

/// The guest, and the ends of the stack that a program has.
struct World {
    guest: Net,
    runner: Runner,
    listener: TcpListener,
    udp: netstack_smoltcp::UdpSocket,
    carriers: [JoinHandle<io::Result<()>>; 2],
}

fn builder() -> StackBuilder {
    StackBuilder::default().enable_udp(true).enable_tcp(true).enable_icmp(true).mtu(MTU)
}

async fn outward(mut from: PacketReceiver, mut to: Sink) -> io::Result<()> {
    loop {
        let packet = from.recv().await?.to_vec();
        to.send(packet).await?;
    }
}

async fn inward(mut from: Stream, mut to: PacketSender) -> io::Result<()> {
    while let Some(packet) = from.next().await {
        to.send(&packet?).await?;
    }
    Ok(())
}

fn world() -> World {
    let (stack, runner, udp, listener) = builder().build().unwrap();
    let (sink, stream) = stack.split();
    let (device, sender, receiver) = fulmar_tokio::channel(MTU).unwrap();
    let carriers = [tokio::spawn(outward(receiver, sink)), tokio::spawn(inward(stream, sender))];
    let guest = Stack::builder()
        .device(device)
        .address("10.0.0.2/24".parse().unwrap())
        .address("fd00::2/64".parse().unwrap())
        .gateway("10.0.0.1".parse().unwrap())
        .gateway("fd00::1".parse().unwrap())
        .exit_drain(Duration::ZERO)
        .build();
    let guest = Net::new(guest.unwrap()).unwrap();
    let (runner, udp, listener) = (runner.unwrap(), udp.unwrap(), listener.unwrap());
    World { guest, runner, listener, udp, carriers }
}

/// Runs a test in each flavour of the runtime. The end of the runtime drops what the test has spawned.
fn in_each<F: Future<Output = ()> + Send + 'static>(test: impl Fn() -> F) {
    let two = Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    for runtime in [Builder::new_current_thread().enable_all().build().unwrap(), two] {
        runtime.block_on(async {
            timeout(PATIENCE, tokio::spawn(test())).await.expect("it hangs").unwrap();
        });
    }
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i ^ (i >> 8) ^ (i >> 16)) as u8).collect()
}

/// A connection of the guest, and the program's end.
async fn connected(world: &mut World) -> (TcpStream, netstack_smoltcp::TcpStream) {
    let (stream, next) = tokio::join!(TcpStream::connect(&world.guest, FAR), world.listener.next());
    (stream.unwrap(), next.unwrap().0)
}

#[test]
fn connections_to_any_address_are_relayed_both_ways_with_half_closes() {
    in_each(|| async {
        let World { guest, runner, mut listener, .. } = world();
        tokio::spawn(runner);
        let server = HostListener::bind("127.0.0.1:0").await.unwrap();
        let at = server.local_addr().unwrap();
        tokio::spawn(async move {
            loop {
                let (mut stream, _) = server.accept().await.unwrap();
                tokio::spawn(async move {
                    let (mut read, mut write) = stream.split();
                    tokio::io::copy(&mut read, &mut write).await
                });
            }
        });
        tokio::spawn(async move {
            while let Some((mut stream, local, remote)) = listener.next().await {
                assert_eq!((*stream.local_addr(), *stream.remote_addr()), (local, remote));
                assert!([FAR, FAR6].contains(&&*remote.to_string()), "{remote}");
                tokio::spawn(async move {
                    let mut host = HostStream::connect(at).await.unwrap();
                    tokio::io::copy_bidirectional(&mut stream, &mut host).await
                });
            }
        });
        for to in [FAR, FAR6] {
            let (mut read, mut write) = TcpStream::connect(&guest, to).await.unwrap().into_split();
            let sender = tokio::spawn(async move {
                write.write_all(&pattern(3 << 20)).await.unwrap();
                write.shutdown().await.unwrap();
            });
            let mut all = Vec::new();
            read.read_to_end(&mut all).await.unwrap();
            assert!(all == pattern(3 << 20));
            sender.await.unwrap();
        }
    });
}

#[test]
fn datagrams_come_with_both_ends_and_go_from_any_address() {
    in_each(|| async {
        let World { guest, udp, .. } = world();
        let (mut read, mut write) = udp.split();
        tokio::spawn(async move {
            while let Some((payload, local, remote)) = read.next().await {
                write.send((payload, remote, local)).await.unwrap();
            }
        });
        let socket = UdpSocket::bind(&guest, "10.0.0.2:7000").await.unwrap();
        let socket6 = UdpSocket::bind(&guest, "[fd00::2]:7000").await.unwrap();
        let mut buf = [0; 5000];
        for to in ["192.0.2.7:53", "[2001:db8::7]:53", "192.0.2.8:54"] {
            let to: SocketAddr = to.parse().unwrap();
            let socket = if to.is_ipv4() { &socket } else { &socket6 };
            // The last one in fragments.
            for payload in [&b"one"[..], &[7; 1300], &pattern(4000)] {
                socket.send_to(payload, to).await.unwrap();
                let (n, from) = socket.recv_from(&mut buf).await.unwrap();
                assert!(&buf[..n] == payload && from == to, "{n} bytes from {from}");
            }
        }
    });
}

#[test]
fn a_datagram_between_two_versions_is_refused_and_an_empty_one_is_dropped() {
    in_each(|| async {
        let World { guest, udp, .. } = world();
        let (_read, mut write) = udp.split();
        let (v4, v6) = ("192.0.2.7:53".parse().unwrap(), FAR6.parse().unwrap());
        let e = write.send((vec![1], v4, v6)).await.unwrap_err();
        assert_eq!(e.kind(), ErrorKind::InvalidData);
        let socket = UdpSocket::bind(&guest, "10.0.0.2:7000").await.unwrap();
        let to = "10.0.0.2:7000".parse().unwrap();
        write.send((vec![], v4, to)).await.unwrap();
        write.send((vec![1], v4, to)).await.unwrap();
        assert_eq!(socket.recv_from(&mut [0; 10]).await.unwrap(), (1, v4));
    });
}

#[test]
fn a_reset_of_the_guest_is_an_error_and_a_dropped_stream_an_end() {
    in_each(|| async {
        let mut world = world();
        let (mut stream, mut tcp) = connected(&mut world).await;
        stream.write_all(b"x").await.unwrap();
        assert_eq!(tcp.read(&mut [0; 10]).await.unwrap(), 1);
        stream.get_ref().set_linger(Some(Duration::ZERO)).unwrap();
        drop(stream);
        let e = tcp.read(&mut [0; 10]).await.unwrap_err();
        assert_eq!(e.kind(), ErrorKind::ConnectionReset);

        let (mut stream, mut tcp) = connected(&mut world).await;
        tcp.write_all(b"all of it").await.unwrap();
        drop(tcp);
        let mut all = Vec::new();
        stream.read_to_end(&mut all).await.unwrap();
        assert_eq!(all, b"all of it");
    });
}

#[test]
fn echo_requests_are_answered_if_icmp_is_enabled() {
    in_each(|| async {
        // From 10.0.0.2 to 192.0.2.7, with right checksums.
        let mut request = vec![0x45, 0, 0, 28, 0, 0, 0, 0, 64, 1, 0, 0, 10, 0, 0, 2, 192, 0, 2, 7];
        request.extend_from_slice(&[8, 0, 0xf7, 0xfd, 0, 1, 0, 1]);
        let words = request[..20].chunks(2).map(|two| u32::from(two[0]) << 8 | u32::from(two[1]));
        let sum: u32 = words.sum();
        request[10..12].copy_from_slice(&(!((sum >> 16) + (sum & 0xffff)) as u16).to_be_bytes());
        for icmp in [true, false] {
            let (mut stack, _runner, ..) = builder().enable_icmp(icmp).build().unwrap();
            stack.send(request.clone()).await.unwrap();
            // Nothing else is sent by a stack without connections.
            match timeout(Duration::from_millis(300), stack.next()).await {
                Ok(reply) => assert!(icmp && reply.unwrap().unwrap()[20] == 0),
                Err(_) => assert!(!icmp, "no reply"),
            }
        }
    });
}

#[test]
fn filters_and_disabled_protocols_drop_packets_and_bytes_are_refused() {
    in_each(|| async {
        let mut filters = IpFilters::with_non_broadcast();
        filters.add_fn(|_, dst| *dst != "192.0.2.9".parse::<std::net::IpAddr>().unwrap());
        let builder = StackBuilder::default().enable_udp(true).set_ip_filters(filters);
        let (mut stack, runner, udp, listener) = builder.build().unwrap();
        assert!(runner.is_none() && listener.is_none());
        let (mut read, _write) = udp.unwrap().split();
        let datagram = |last: u8, protocol: u8| {
            let mut packet =
                vec![0x45, 0, 0, 29, 0, 0, 0, 0, 64, protocol, 0, 0, 10, 0, 0, 2, 192, 0, 2, last];
            // Without a checksum.
            packet.extend_from_slice(&[0, 1, 0, 53, 0, 9, 0, 0, last]);
            let words = packet[..20].chunks(2).map(|w| u32::from(w[0]) << 8 | u32::from(w[1]));
            let sum: u32 = words.sum();
            packet[10..12].copy_from_slice(&(!((sum >> 16) + (sum & 0xffff)) as u16).to_be_bytes());
            packet
        };
        let packets = [datagram(9, 17), datagram(8, 6), datagram(8, 99), vec![], datagram(7, 17)];
        stack.send_all(&mut stream::iter(packets.map(Ok))).await.unwrap();
        let (payload, local, remote) = read.next().await.unwrap();
        assert_eq!((payload, local), (vec![7], "10.0.0.2:1".parse().unwrap()));
        assert_eq!(remote, "192.0.2.7:53".parse().unwrap());
        let e = stack.send(vec![0x45, 1, 2]).await.unwrap_err();
        assert_eq!(e.kind(), ErrorKind::InvalidInput);
    });
}

#[test]
fn build_needs_a_runtime_and_icmp_needs_tcp() {
    let e = builder().build().err().unwrap();
    assert!(e.to_string().contains("tokio runtime"), "{e}");
    let e = builder().enable_tcp(false).build().err().unwrap();
    assert_eq!(e.kind(), ErrorKind::InvalidInput);
}

#[test]
fn more_packets_than_there_is_space_for_arrive_all() {
    in_each(|| async {
        const DATAGRAMS: usize = 20_000;
        let (mut stack, runner, udp, _listener) = builder().build().unwrap();
        tokio::spawn(runner.unwrap());
        let (mut read, _write) = udp.unwrap().split();
        let mut packet = vec![0x45, 0, 4, 0, 0, 0, 0, 0, 64, 17, 0, 0, 10, 0, 0, 2, 192, 0, 2, 7];
        packet.extend_from_slice(&[0, 1, 0, 53, 3, 236, 0, 0]);
        packet.resize(1024, 0);
        let words = packet[..20].chunks(2).map(|w| u32::from(w[0]) << 8 | u32::from(w[1]));
        let sum: u32 = words.sum();
        packet[10..12].copy_from_slice(&(!((sum >> 16) + (sum & 0xffff)) as u16).to_be_bytes());
        let sending = async {
            let all = stream::repeat(packet).take(DATAGRAMS).map(Ok);
            stack.send_all(&mut Box::pin(all)).await.unwrap();
        };
        // Those for which the socket has no space are lost, as on a network; the sink never waits for ever.
        let reading = async { while read.next().await.is_some() {} };
        tokio::select! {
            () = sending => {}
            () = reading => panic!("the stack has ended"),
        }
    });
}

#[test]
fn no_drop_of_a_handle_hangs_in_any_order() {
    for order in 0..5 {
        in_each(move || async move {
            let mut world = world();
            let (stream, mut tcp) = connected(&mut world).await;
            tcp.write_all(b"unread").await.unwrap();
            let World { guest, runner, listener, udp, carriers } = world;
            match order {
                0 => drop((listener, udp, runner, tcp, stream, guest)),
                1 => drop((guest, stream, tcp, udp, listener, runner)),
                // Both halves of the `Stack` go: the runner ends.
                2 => {
                    carriers.iter().for_each(JoinHandle::abort);
                    runner.await.unwrap();
                    while tcp.read(&mut [0; 10]).await.is_ok_and(|n| n > 0) {}
                }
                3 => drop(tokio::spawn(async move {
                    let _ = tcp.read(&mut [0; 10]).await;
                    drop((guest, runner, listener, udp, stream));
                })),
                _ => {
                    let (mut stack, runner, udp, listener) = builder().build().unwrap();
                    stack.close().await.unwrap();
                    assert!(stack.next().await.is_none());
                    assert!(listener.unwrap().next().await.is_none());
                    assert!(udp.unwrap().split().0.next().await.is_none());
                    drop(stack);
                    runner.unwrap().await.unwrap();
                }
            }
        });
    }
}

#[test]
fn packets_of_any_bytes_leave_the_stack_running() {
    in_each(|| async {
        let (stack, runner, _udp, listener) = builder().build().unwrap();
        tokio::spawn(runner.unwrap());
        let mut listener = listener.unwrap();
        let (mut sink, stream) = stack.split();
        let mut state = 1u64;
        let mut random = move || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) as usize
        };
        for _ in 0..3000 {
            let mut packet = vec![0; 68];
            packet[0] = [0x45, 0x46, 0x65, 0x60, 0x4f][random() % 5];
            packet[3] = 68;
            packet[9] = [1, 6, 17, 58][random() % 4];
            packet[6] = [0, 6, 17, 44, 0x20, 60][random() % 6];
            for _ in 0..random() % 16 {
                let at = random() % packet.len();
                packet[at] = random() as u8;
            }
            packet.truncate(1 + random() % packet.len());
            match sink.send(packet).await {
                Err(e) if e.kind() != ErrorKind::InvalidInput => panic!("{e}"),
                _ => {}
            }
        }
        let (device, sender, receiver) = fulmar_tokio::channel(MTU).unwrap();
        tokio::spawn(outward(receiver, sink));
        tokio::spawn(inward(stream, sender));
        let guest = Stack::builder().device(device).address("10.0.0.2/0".parse().unwrap());
        let guest = Net::new(guest.exit_drain(Duration::ZERO).build().unwrap()).unwrap();
        let (stream, next) = tokio::join!(TcpStream::connect(&guest, FAR), listener.next());
        next.unwrap().0.write_all(b"alive").await.unwrap();
        let mut word = [0; 5];
        stream.unwrap().read_exact(&mut word).await.unwrap();
        assert_eq!(&word, b"alive");
    });
}
