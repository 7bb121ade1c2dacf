//! A program in place of every server, between a guest whose packets it carries and servers of the host.

use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::time::Duration;

use fulmar::Stack;
use fulmar::tcp::TcpConfig;
use fulmar_tokio::{
    Net, PacketReceiver, PacketSender, TcpStream, UdpSocket, channel, forward, forward_udp,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
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
