//! A program in place of every server, between a guest whose packets it carries and servers of the host.

use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use fulmar::stat::{Counter, DropReason};
use fulmar::tcp::TcpConfig;
use fulmar::{Stack, devices};
use fulmar_tokio::{
    Net, PacketReceiver, PacketSender, TcpStream, UdpSocket, channel, forward, forward_udp,
};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener as HostListener;
use tokio::net::TcpStream as HostStream;
use tokio::net::UdpSocket as HostSocket;
use tokio::runtime::Builder;
use tokio::time::timeout;

const PATIENCE: Duration = Duration::from_secs(60);
const FAR: &str = "192.0.2.7:443";
const FAR6: &str = "[2001:db8::7]:443";

/// Runs a test in each flavour of the runtime.
fn in_each<F: Future<Output = ()> + Send + 'static>(test: impl Fn() -> F) {
    let two = Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    for runtime in [Builder::new_current_thread().enable_all().build().unwrap(), two] {
        runtime.block_on(async {
            timeout(PATIENCE, tokio::spawn(test())).await.expect("it hangs").unwrap();
        });
    }
}

/// Carries packets as a tunnel does.
async fn carry(mut from: PacketReceiver, mut to: PacketSender) -> io::Result<()> {
    loop {
        let packet = from.recv().await?;
        to.push(packet).await?;
        while let Ok(packet) = from.get_mut().try_recv() {
            to.push(packet).await?;
        }
        to.flush().await?;
    }
}

/// A guest, and a stack for every address.
fn guest_and_all() -> (Net, Net) {
    let (guest, to_guest, from_guest) = channel(1400).unwrap();
    let (all, to_all, from_all) = channel(1400).unwrap();
    tokio::spawn(carry(from_guest, to_all));
    tokio::spawn(carry(from_all, to_guest));
    let guest = Stack::builder()
        .device(guest)
        .address("10.0.0.2/24".parse().unwrap())
        .address("10.0.0.3/24".parse().unwrap())
        .address("fd00::2/64".parse().unwrap())
        // A host that is unreachable may be reachable soon: `connect` fails when it has tried again.
        .tcp(TcpConfig { syn_retries: 0, ..TcpConfig::default() })
        .gateway("10.0.0.1".parse().unwrap())
        .gateway("fd00::1".parse().unwrap())
        .build();
    let all = Stack::builder().device(all).any_ip(true).build();
    (Net::new(guest.unwrap()).unwrap(), Net::new(all.unwrap()).unwrap())
}

/// Proxies every connection to a server of the host.
fn forward_to(all: &Net, server: SocketAddr) {
    tokio::spawn(forward(all, move |pending| pending.proxy(HostStream::connect(server))));
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i ^ (i >> 8) ^ (i >> 16)) as u8).collect()
}

#[test]
fn connections_to_any_address_reach_a_server_of_the_host() {
    in_each(|| async {
        let (guest, all) = guest_and_all();
        let listener = HostListener::bind("127.0.0.1:0").await.unwrap();
        forward_to(&all, listener.local_addr().unwrap());
        tokio::spawn(async move {
            loop {
                let (mut stream, _) = listener.accept().await.unwrap();
                tokio::spawn(async move {
                    let (mut read, mut write) = stream.split();
                    tokio::io::copy(&mut read, &mut write).await.unwrap();
                });
            }
        });
        for to in [FAR, FAR6] {
            let stream = TcpStream::connect(&guest, to).await.unwrap();
            let (mut read, mut write) = stream.into_split();
            let sender = tokio::spawn(async move {
                write.write_all(&pattern(6 << 20)).await.unwrap();
                write.shutdown().await.unwrap();
            });
            let mut all = Vec::new();
            read.read_to_end(&mut all).await.unwrap();
            assert!(all == pattern(6 << 20));
            sender.await.unwrap();
        }
    });
}

#[test]
fn a_guest_hears_what_the_server_of_the_host_answers() {
    in_each(|| async {
        let (guest, all) = guest_and_all();
        let closed = HostListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
        tokio::spawn(forward(&all, move |pending| async move {
            match pending.local_addr().port() {
                443 => pending.proxy(HostStream::connect(closed)).await,
                _ => {
                    let none = io::Error::from(ErrorKind::HostUnreachable);
                    pending.proxy(async { Err::<HostStream, _>(none) }).await
                }
            }
        }));
        for (to, kind) in [
            (FAR, ErrorKind::ConnectionRefused),
            (FAR6, ErrorKind::ConnectionRefused),
            ("192.0.2.7:80", ErrorKind::HostUnreachable),
            ("[2001:db8::7]:80", ErrorKind::HostUnreachable),
        ] {
            assert_eq!(TcpStream::connect(&guest, to).await.unwrap_err().kind(), kind, "{to}");
        }
    });
}

#[test]
fn a_reset_of_the_server_is_one_for_the_guest() {
    in_each(|| async {
        let (guest, all) = guest_and_all();
        let listener = HostListener::bind("127.0.0.1:0").await.unwrap();
        forward_to(&all, listener.local_addr().unwrap());
        let mut stream = TcpStream::connect(&guest, FAR).await.unwrap();
        let (mut server, _) = listener.accept().await.unwrap();
        server.write_all(b"a part").await.unwrap();
        let mut part = [0; 6];
        stream.read_exact(&mut part).await.unwrap();
        stream.write_all(b"unread").await.unwrap();
        // Closed with unread bytes: the kernel sends a reset.
        assert_eq!(server.peek(&mut [0; 6]).await.unwrap(), 6);
        drop(server);
        let e = stream.read_to_end(&mut Vec::new()).await.unwrap_err();
        assert_eq!(e.kind(), ErrorKind::ConnectionReset);
    });
}

#[test]
fn a_reset_of_the_guest_is_one_for_the_server() {
    in_each(|| async {
        let (guest, all) = guest_and_all();
        let listener = HostListener::bind("127.0.0.1:0").await.unwrap();
        forward_to(&all, listener.local_addr().unwrap());
        let stream = TcpStream::connect(&guest, FAR).await.unwrap();
        let (server, _) = listener.accept().await.unwrap();
        reset_after_a_part(stream, server).await;
    });
}

#[test]
fn a_reset_crosses_from_one_stack_to_another() {
    in_each(|| async {
        let (guest, all) = guest_and_all();
        let (near, far) = devices::link_pair().unwrap();
        let [near, far] = [(near, "10.1.0.2/24"), (far, "10.1.0.1/24")].map(|(device, address)| {
            let stack = Stack::builder().device(device).address(address.parse().unwrap());
            Net::new(stack.build().unwrap()).unwrap()
        });
        let listener = fulmar_tokio::TcpListener::bind(&far, "10.1.0.1:80").await.unwrap();
        tokio::spawn(forward(&all, move |pending| {
            let near = near.clone();
            pending.proxy(async move { TcpStream::connect(&near, "10.1.0.1:80").await })
        }));
        let stream = TcpStream::connect(&guest, FAR).await.unwrap();
        let (server, _) = listener.accept().await.unwrap();
        reset_after_a_part(stream, server).await;
    });
}

/// Sends a part and a reset, which the server sees as such.
async fn reset_after_a_part(mut stream: TcpStream, mut server: impl AsyncRead + Unpin) {
    stream.write_all(b"a part").await.unwrap();
    server.read_exact(&mut [0; 6]).await.unwrap();
    stream.get_ref().set_linger(Some(Duration::ZERO)).unwrap();
    drop(stream);
    let e = server.read_to_end(&mut Vec::new()).await.unwrap_err();
    assert_eq!(e.kind(), ErrorKind::ConnectionReset);
}

#[test]
fn a_relay_that_is_dropped_resets_both_ends() {
    in_each(|| async {
        let (guest, all) = guest_and_all();
        let listener = HostListener::bind("127.0.0.1:0").await.unwrap();
        let server = listener.local_addr().unwrap();
        tokio::spawn(forward(&all, move |pending| async move {
            let relay = pending.proxy(HostStream::connect(server));
            timeout(Duration::from_millis(200), relay).await?
        }));
        let mut stream = TcpStream::connect(&guest, FAR).await.unwrap();
        let (mut server, _) = listener.accept().await.unwrap();
        stream.write_all(b"a part").await.unwrap();
        server.write_all(b"a part").await.unwrap();
        let mut part = Vec::new();
        let e = server.read_to_end(&mut part).await.unwrap_err();
        assert_eq!((part.as_slice(), e.kind()), (&b"a part"[..], ErrorKind::ConnectionReset));
        let e = stream.read_to_end(&mut Vec::new()).await.unwrap_err();
        assert_eq!(e.kind(), ErrorKind::ConnectionReset);
    });
}

#[test]
fn a_guest_that_does_not_read_stops_the_server_and_loses_nothing() {
    const BYTES: usize = 24 << 20;
    in_each(|| async {
        let (guest, all) = guest_and_all();
        let listener = HostListener::bind("127.0.0.1:0").await.unwrap();
        forward_to(&all, listener.local_addr().unwrap());
        let mut stream = TcpStream::connect(&guest, FAR).await.unwrap();
        let (mut server, _) = listener.accept().await.unwrap();
        let bytes = pattern(BYTES);
        let mut written = 0;
        while let Ok(n) = timeout(Duration::from_millis(300), server.write(&bytes[written..])).await
        {
            written += n.unwrap();
        }
        assert!(written < BYTES, "nothing stops it");
        let rest = tokio::spawn(async move {
            server.write_all(&bytes[written..]).await.unwrap();
        });
        let mut all = Vec::new();
        stream.read_to_end(&mut all).await.unwrap();
        rest.await.unwrap();
        assert!(all == pattern(BYTES));
    });
}

#[test]
fn datagrams_to_any_address_reach_a_socket_of_the_host() {
    in_each(|| async {
        let (guest, all) = guest_and_all();
        let echo = HostSocket::bind("127.0.0.1:0").await.unwrap();
        let server = echo.local_addr().unwrap();
        tokio::spawn(async move {
            let mut buf = [0; 2000];
            loop {
                let (n, from) = echo.recv_from(&mut buf).await.unwrap();
                echo.send_to(&buf[..n], from).await.unwrap();
            }
        });
        let closed = HostSocket::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
        tokio::spawn(forward_udp(&all, move |flow| async move {
            let host = HostSocket::bind("127.0.0.1:0").await?;
            host.connect(if flow.local_addr().port() == 53 { server } else { closed }).await?;
            flow.relay(host).await
        }));
        let socket = UdpSocket::bind(&guest, "10.0.0.2:7000").await.unwrap();
        let mut buf = [0; 2000];
        for to in ["192.0.2.7:53", "192.0.2.8:53", "192.0.2.7:53"] {
            for payload in [&b"one"[..], &[], &[7; 1300]] {
                socket.send_to(payload, to).await.unwrap();
                let (n, from) = socket.recv_from(&mut buf).await.unwrap();
                assert_eq!((&buf[..n], from), (payload, to.parse().unwrap()));
            }
        }
        let refused = UdpSocket::bind(&guest, "10.0.0.2:7001").await.unwrap();
        refused.connect("192.0.2.7:54").await.unwrap();
        refused.send(b"anybody?").await.unwrap();
        let e = refused.recv(&mut buf).await.unwrap_err();
        assert_eq!(e.kind(), ErrorKind::ConnectionRefused);
    });
}

const STALLED: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 2));
const OTHER: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 3));

/// A destination of its own for each port.
fn far_port(port: u16) -> SocketAddr {
    (Ipv4Addr::new(192, 0, 2, 7), port).into()
}

/// Keeps the flows of one peer and takes nothing of them; returns the datagrams of the others. Counts the flows that it
/// keeps.
fn stall_or_echo(all: &Net) -> Arc<AtomicUsize> {
    let kept = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&kept);
    tokio::spawn(forward_udp(all, move |mut flow| {
        let is_stalled = flow.peer_addr().ip() == STALLED;
        count.fetch_add(is_stalled.into(), Relaxed);
        async move {
            if is_stalled {
                std::future::pending::<()>().await;
            }
            while let Some(datagram) = flow.recv().await {
                flow.send(&datagram).await?;
            }
            io::Result::Ok(())
        }
    }));
    kept
}

/// Sends datagrams to ports, and waits until they have arrived.
async fn send_each(socket: &UdpSocket, all: &Net, datagram: &[u8], ports: &[u16]) {
    let stat = || all.stack().stat().unwrap();
    let arrived = || stat().count(Counter::UdpIn) + stat().drops(DropReason::UdpBufferFull);
    let before = arrived();
    for port in ports {
        socket.send_to(datagram, far_port(*port)).await.unwrap();
    }
    until(|| arrived() >= before + ports.len() as u64).await;
}

async fn until(mut is_done: impl FnMut() -> bool) {
    while !is_done() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

async fn assert_echo(guest: &Net) {
    let socket = UdpSocket::bind(guest, (OTHER, 7000)).await.unwrap();
    let mut buf = [0; 2000];
    for len in 0..100 {
        socket.send_to(&pattern(len * 13), far_port(53)).await.unwrap();
        let n = socket.recv(&mut buf).await.unwrap();
        assert_eq!(buf[..n], pattern(len * 13));
    }
}

#[test]
fn a_peer_whose_tasks_stall_leaves_memory_to_another() {
    in_each(|| async {
        let (guest, all) = guest_and_all();
        stall_or_echo(&all);
        let drops = |reason| all.stack().stat().unwrap().drops(reason);
        let stalled = UdpSocket::bind(&guest, (STALLED, 7000)).await.unwrap();
        let mut port = 1;
        // 32 datagrams of each flow wait: 12 MiB are in 289 flows.
        while drops(DropReason::ForwardPeerShare) == 0 {
            send_each(&stalled, &all, &[7; 1300], &[port; 32]).await;
            port += 1;
            assert!(port < 1000, "nothing is refused");
        }
        assert!((280..350).contains(&port), "{port} flows");
        assert_echo(&guest).await;
        assert_eq!(drops(DropReason::ForwardMemoryFull), 0);
    });
}

#[test]
fn a_peer_with_all_its_flows_leaves_some_to_another() {
    in_each(|| async {
        let (guest, all) = guest_and_all();
        let kept = stall_or_echo(&all);
        let drops = || all.stack().stat().unwrap().drops(DropReason::ForwardPeerFlows);
        let stalled = UdpSocket::bind(&guest, (STALLED, 7000)).await.unwrap();
        let mut port = 1;
        while drops() == 0 {
            let ports: Vec<u16> = (port..port + 64).collect();
            send_each(&stalled, &all, b"one more", &ports).await;
            port += 64;
            assert!(port < 10_000, "no flow is refused");
        }
        assert_eq!(kept.load(Relaxed), 6144);
        let refused = UdpSocket::bind(&guest, (STALLED, 7001)).await.unwrap();
        refused.connect(far_port(1)).await.unwrap();
        // The rate of ICMP errors has a limit: one arrives in the end.
        let mut is_reported = false;
        while !is_reported {
            is_reported = refused.send(b"one more").await.is_err() || {
                let received = timeout(Duration::from_millis(20), refused.recv(&mut [0; 9])).await;
                received.is_ok_and(|received| received.is_err())
            };
        }
        assert_echo(&guest).await;
    });
}

#[test]
fn a_datagram_that_is_dropped_has_a_reason() {
    in_each(|| async {
        let (guest, all) = guest_and_all();
        let long = HostSocket::bind((Ipv6Addr::LOCALHOST, 0)).await.unwrap();
        let server = long.local_addr().unwrap();
        tokio::spawn(forward_udp(&all, move |flow| async move {
            match flow.local_addr().port() {
                1 => std::future::pending().await,
                2 => {
                    let host = HostSocket::bind((Ipv6Addr::LOCALHOST, 0)).await?;
                    host.connect(server).await?;
                    flow.relay(host).await
                }
                _ => Ok(()),
            }
        }));
        let drops = |reason| all.stack().stat().unwrap().drops(reason);
        let socket = UdpSocket::bind(&guest, "10.0.0.2:7000").await.unwrap();
        for _ in 0..40 {
            socket.send_to(b"in a row", far_port(1)).await.unwrap();
        }
        until(|| drops(DropReason::ForwardQueueFull) == 8).await;
        socket.send_to(b"a question", far_port(2)).await.unwrap();
        let (_, relay) = long.recv_from(&mut [0; 100]).await.unwrap();
        // Longer than a datagram of IPv4.
        long.send_to(&pattern(65_520), relay).await.unwrap();
        until(|| drops(DropReason::ForwardReturn) == 1).await;
        socket.send_to(b"nothing takes it", far_port(3)).await.unwrap();
        until(|| drops(DropReason::ForwardFlowEnded) == 1).await;
    });
}

#[test]
fn an_end_of_a_channel_waits_until_the_other_is_ready_or_gone() {
    in_each(|| async {
        let (device, mut to, mut from) = channel(1400).unwrap();
        let mut taken = 0usize;
        while let Ok(pushed) = timeout(Duration::from_millis(50), to.push(&[0x45; 1000])).await {
            pushed.unwrap();
            taken += 1;
        }
        let net = Stack::builder().device(device).any_ip(true).build().unwrap();
        let net = Net::new(net).unwrap();
        to.flush().await.unwrap();
        while net.stack().stat().unwrap().shard.device.rx_frames < taken as u64 {
            tokio::task::yield_now().await;
        }
        assert!(timeout(Duration::from_millis(20), from.recv()).await.is_err());
        drop(net);
        assert_eq!(from.recv().await.unwrap_err().kind(), ErrorKind::BrokenPipe);
        assert_eq!(to.send(&[0x45; 20]).await.unwrap_err().kind(), ErrorKind::BrokenPipe);
    });
}
