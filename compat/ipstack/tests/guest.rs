//! A guest, which is a stack of its own, and a program that accepts its traffic by the API.

use std::future::Future;
use std::io::{self, ErrorKind};
use std::net::IpAddr;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use etherparse::{PacketBuilder, SlicedPacket, TcpOptionElement, TransportSlice};
use fulmar::Stack;
use fulmar_tokio::{Net, PacketReceiver, PacketSender, TcpStream, UdpSocket};
use ipstack::{
    IpNumber, IpStack, IpStackConfig, IpStackError, IpStackStream, TcpConfig, TcpOptions,
};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::TcpListener as HostListener;
use tokio::net::TcpStream as HostStream;
use tokio::net::UdpSocket as HostSocket;
use tokio::runtime::Builder;
use tokio::sync::mpsc::{self, Receiver, Sender};
use tokio::time::timeout;

const PATIENCE: Duration = Duration::from_secs(60);
const FAR: &str = "192.0.2.7:443";
const FAR6: &str = "[2001:db8::7]:443";
const MTU: u16 = 1400;

/// A device in memory.
struct Pipe {
    to: Sender<Vec<u8>>,
    from: Receiver<Vec<u8>>,
    /// Most bytes of a write.
    most: usize,
}

impl AsyncRead for Pipe {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let packet = ready!(self.from.poll_recv(cx));
        buf.put_slice(&packet.unwrap_or_default());
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Pipe {
    fn poll_write(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
        packet: &[u8],
    ) -> Poll<io::Result<usize>> {
        let n = packet.len().min(self.most);
        // Full: the network loses it.
        let _ = self.to.try_send(packet[..n].to_vec());
        Poll::Ready(Ok(n))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

/// A device, and its far end.
fn pipe(most: usize) -> (Pipe, Sender<Vec<u8>>, Receiver<Vec<u8>>) {
    let (to_stack, from) = mpsc::channel(512);
    let (to, from_stack) = mpsc::channel(512);
    (Pipe { to, from, most }, to_stack, from_stack)
}

fn config() -> IpStackConfig {
    let mut config = IpStackConfig::default();
    config.mtu(MTU).unwrap();
    config
}

async fn outward(mut from: PacketReceiver, to: Sender<Vec<u8>>) -> io::Result<()> {
    loop {
        let packet = from.recv().await?.to_vec();
        to.send(packet).await.map_err(io::Error::other)?;
    }
}

async fn inward(mut from: Receiver<Vec<u8>>, mut to: PacketSender) -> io::Result<()> {
    while let Some(packet) = from.recv().await {
        to.send(&packet).await?;
    }
    Ok(())
}

/// A guest behind a device.
fn guest_of(to: Sender<Vec<u8>>, from: Receiver<Vec<u8>>) -> Net {
    let (device, sender, receiver) = fulmar_tokio::channel(MTU.into()).unwrap();
    tokio::spawn(outward(receiver, to));
    tokio::spawn(inward(from, sender));
    let guest = Stack::builder()
        .device(device)
        .address("10.0.0.2/24".parse().unwrap())
        .address("fd00::2/64".parse().unwrap())
        .gateway("10.0.0.1".parse().unwrap())
        .gateway("fd00::1".parse().unwrap())
        .exit_drain(Duration::ZERO)
        .build();
    Net::new(guest.unwrap()).unwrap()
}

fn guest_and_stack(config: IpStackConfig) -> (Net, IpStack) {
    let (device, to, from) = pipe(usize::MAX);
    (guest_of(to, from), IpStack::new(config, device))
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

async fn accept_tcp(stack: &mut IpStack) -> ipstack::IpStackTcpStream {
    match stack.accept().await.unwrap() {
        IpStackStream::Tcp(tcp) => tcp,
        other => panic!("not TCP: {} to {}", other.local_addr(), other.peer_addr()),
    }
}

async fn accept_udp(stack: &mut IpStack) -> ipstack::IpStackUdpStream {
    match stack.accept().await.unwrap() {
        IpStackStream::Udp(udp) => udp,
        other => panic!("not UDP: {} to {}", other.local_addr(), other.peer_addr()),
    }
}

/// The program that ipstack's README describes: everything is relayed to servers of the host.
async fn relay(mut stack: IpStack, server: HostListener, udp_server: HostSocket) {
    let (tcp_at, udp_at) = (server.local_addr().unwrap(), udp_server.local_addr().unwrap());
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
        let mut buf = [0; 2000];
        loop {
            let (n, from) = udp_server.recv_from(&mut buf).await.unwrap();
            udp_server.send_to(&buf[..n], from).await.unwrap();
        }
    });
    while let Ok(stream) = stack.accept().await {
        match stream {
            IpStackStream::Tcp(mut tcp) => {
                tokio::spawn(async move {
                    let mut host = HostStream::connect(tcp_at).await.unwrap();
                    let _ = tokio::io::copy_bidirectional(&mut tcp, &mut host).await;
                    let _ = host.shutdown().await;
                    let _ = tcp.shutdown().await;
                });
            }
            IpStackStream::Udp(mut udp) => {
                tokio::spawn(async move {
                    let host = HostSocket::bind("127.0.0.1:0").await.unwrap();
                    host.connect(udp_at).await.unwrap();
                    let (mut from_guest, mut from_host) = ([0; 2000], [0; 2000]);
                    loop {
                        tokio::select! {
                            n = udp.read(&mut from_guest) => {
                                host.send(&from_guest[..n.unwrap()]).await.unwrap();
                            }
                            n = host.recv(&mut from_host) => {
                                udp.write_all(&from_host[..n.unwrap()]).await.unwrap();
                            }
                        }
                    }
                });
            }
            IpStackStream::UnknownTransport(_) | IpStackStream::UnknownNetwork(_) => {}
        }
    }
}

#[test]
fn connections_and_datagrams_to_any_address_are_relayed_both_ways_with_half_closes() {
    in_each(|| async {
        let (guest, stack) = guest_and_stack(config());
        let server = HostListener::bind("127.0.0.1:0").await.unwrap();
        let udp_server = HostSocket::bind("127.0.0.1:0").await.unwrap();
        tokio::spawn(relay(stack, server, udp_server));
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
        let socket = UdpSocket::bind(&guest, "10.0.0.2:7000").await.unwrap();
        let mut buf = [0; 2000];
        for to in ["192.0.2.7:53", "192.0.2.8:53", "192.0.2.7:53"] {
            for payload in [&b"one"[..], &[7; 1300]] {
                socket.send_to(payload, to).await.unwrap();
                let (n, from) = socket.recv_from(&mut buf).await.unwrap();
                assert_eq!((&buf[..n], from), (payload, to.parse().unwrap()));
            }
        }
    });
}

#[test]
fn local_is_the_guest_and_peer_the_server() {
    in_each(|| async {
        let (guest, mut stack) = guest_and_stack(config());
        let (stream, tcp) = tokio::join!(TcpStream::connect(&guest, FAR), accept_tcp(&mut stack));
        assert_eq!(tcp.local_addr(), stream.unwrap().local_addr().unwrap());
        assert_eq!(tcp.peer_addr(), FAR.parse().unwrap());
        let socket = UdpSocket::bind(&guest, "10.0.0.2:7000").await.unwrap();
        socket.send_to(b"x", "192.0.2.7:53").await.unwrap();
        let udp = accept_udp(&mut stack).await;
        assert_eq!(udp.local_addr(), "10.0.0.2:7000".parse().unwrap());
        assert_eq!(udp.peer_addr(), "192.0.2.7:53".parse().unwrap());
    });
}

#[test]
fn a_long_datagram_is_cut_to_the_buffer_and_the_next_one_is_whole() {
    in_each(|| async {
        let (guest, mut stack) = guest_and_stack(config());
        let socket = UdpSocket::bind(&guest, "10.0.0.2:7000").await.unwrap();
        // In fragments.
        socket.send_to(&pattern(4000), "192.0.2.7:53").await.unwrap();
        socket.send_to(b"next", "192.0.2.7:53").await.unwrap();
        let mut udp = accept_udp(&mut stack).await;
        let mut buf = [0; 3000];
        assert_eq!(udp.read(&mut buf).await.unwrap(), 3000);
        assert!(buf[..] == pattern(4000)[..3000]);
        assert_eq!(udp.read(&mut buf).await.unwrap(), 4);
        udp.write_all(&pattern(5000)).await.unwrap();
        let mut buf = [0; 9000];
        assert_eq!(socket.recv(&mut buf).await.unwrap(), 5000);
        assert!(buf[..5000] == pattern(5000));
    });
}

#[test]
fn a_reset_of_the_guest_is_an_error_and_a_dropped_stream_an_end() {
    in_each(|| async {
        let (guest, mut stack) = guest_and_stack(config());
        let (stream, tcp) = tokio::join!(TcpStream::connect(&guest, FAR), accept_tcp(&mut stack));
        let (mut stream, mut tcp) = (stream.unwrap(), tcp);
        // Before the end of the handshake a reset would be a refusal.
        stream.write_all(b"x").await.unwrap();
        assert_eq!(tcp.read(&mut [0; 10]).await.unwrap(), 1);
        stream.get_ref().set_linger(Some(Duration::ZERO)).unwrap();
        drop(stream);
        let e = tcp.read(&mut [0; 10]).await.unwrap_err();
        assert_eq!(e.kind(), ErrorKind::ConnectionReset);

        let (stream, tcp) = tokio::join!(TcpStream::connect(&guest, FAR), accept_tcp(&mut stack));
        let (mut stream, mut tcp) = (stream.unwrap(), tcp);
        tcp.write_all(b"all of it").await.unwrap();
        drop(tcp);
        let mut all = Vec::new();
        stream.read_to_end(&mut all).await.unwrap();
        assert_eq!(all, b"all of it");
    });
}

#[test]
fn idle_streams_time_out_and_busy_ones_do_not() {
    in_each(|| async {
        let limit = Duration::from_millis(200);
        let mut tcp_config = TcpConfig::default();
        tcp_config.timeout = limit;
        let mut config = config();
        config.with_tcp_config(tcp_config).udp_timeout(limit);
        let (guest, mut stack) = guest_and_stack(config);
        let (stream, tcp) = tokio::join!(TcpStream::connect(&guest, FAR), accept_tcp(&mut stack));
        let (mut stream, mut tcp) = (stream.unwrap(), tcp);
        let socket = UdpSocket::bind(&guest, "10.0.0.2:7000").await.unwrap();
        socket.send_to(b"x", "192.0.2.7:53").await.unwrap();
        let mut udp = accept_udp(&mut stack).await;
        assert_eq!(udp.read(&mut [0; 10]).await.unwrap(), 1);
        let began = std::time::Instant::now();
        while began.elapsed() < 2 * limit {
            // A read that waits is woken by the timer of the first wait, and is not over.
            let writing = async {
                tokio::time::sleep(limit / 10).await;
                stream.write_all(b"x").await.unwrap();
            };
            let mut buf = [0; 10];
            let (_, read) = tokio::join!(writing, tcp.read(&mut buf));
            assert_eq!(read.unwrap(), 1);
        }
        assert_eq!(tcp.read(&mut [0; 10]).await.unwrap_err().kind(), ErrorKind::TimedOut);
        assert_eq!(tcp.read(&mut [0; 10]).await.unwrap(), 0);
        assert_eq!(tcp.write(b"x").await.unwrap_err().kind(), ErrorKind::BrokenPipe);
        let e = stream.read(&mut [0; 10]).await.unwrap_err();
        assert_eq!(e.kind(), ErrorKind::ConnectionReset);
        assert_eq!(udp.read(&mut [0; 10]).await.unwrap_err().kind(), ErrorKind::TimedOut);
    });
}

/// An echo request from 10.0.0.2 to 192.0.2.7, whose checksums are of no interest.
fn echo_request(payload: &[u8]) -> Vec<u8> {
    let mut packet = vec![0x45, 0, 0, 0, 0, 0, 0, 0, 64, 1, 0, 0, 10, 0, 0, 2, 192, 0, 2, 7];
    packet.extend_from_slice(&[8, 0, 0, 0, 0, 1, 0, 1]);
    packet.extend_from_slice(payload);
    let len = packet.len() as u16;
    packet[2..4].copy_from_slice(&len.to_be_bytes());
    packet
}

#[test]
fn other_protocols_and_what_is_no_packet_go_to_the_program() {
    in_each(|| async {
        let (device, to, mut from) = pipe(usize::MAX);
        let mut stack = IpStack::new(config(), device);
        to.send(echo_request(b"abc")).await.unwrap();
        let IpStackStream::UnknownTransport(icmp) = stack.accept().await.unwrap() else {
            panic!("not a packet of another protocol");
        };
        assert_eq!(icmp.ip_protocol(), IpNumber::ICMP);
        assert_eq!(icmp.src_addr(), "10.0.0.2".parse::<IpAddr>().unwrap());
        assert_eq!(icmp.dst_addr(), "192.0.2.7".parse::<IpAddr>().unwrap());
        assert_eq!(icmp.payload(), [&[8, 0, 0, 0, 0, 1, 0, 1], &b"abc"[..]].concat());
        icmp.send(pattern(3000)).unwrap();
        let mut answer = Vec::new();
        while answer.len() < 3000 {
            let packet = from.recv().await.unwrap();
            assert!(packet.len() <= usize::from(MTU));
            assert_eq!(packet[9..10], [1]);
            assert_eq!(packet[12..20], [192, 0, 2, 7, 10, 0, 0, 2]);
            answer.extend_from_slice(&packet[20..]);
        }
        assert!(answer == pattern(3000));
        to.send(vec![0x45, 1, 2]).await.unwrap();
        let IpStackStream::UnknownNetwork(bytes) = stack.accept().await.unwrap() else {
            panic!("not bytes");
        };
        assert_eq!(bytes, [0x45, 1, 2]);
        drop(stack);
        while !to.is_closed() {
            tokio::task::yield_now().await;
        }
        assert_eq!(icmp.send(vec![0]).unwrap_err().kind(), ErrorKind::BrokenPipe);
    });
}

#[test]
fn a_syn_is_answered_by_accept_with_the_configured_segment_size() {
    in_each(|| async {
        let mut tcp_config = TcpConfig::default();
        tcp_config.options = Some(vec![TcpOptions::MaximumSegmentSize(1000)]);
        let mut config = config();
        config.with_tcp_config(tcp_config);
        let (device, to, mut from) = pipe(usize::MAX);
        let mut stack = IpStack::new(config, device);
        let mut syn = Vec::new();
        PacketBuilder::ipv4([10, 0, 0, 2], [192, 0, 2, 7], 64)
            .tcp(7000, 443, 1, 60_000)
            .syn()
            .write(&mut syn, &[])
            .unwrap();
        to.send(syn).await.unwrap();
        assert!(timeout(Duration::from_millis(100), from.recv()).await.is_err());
        let _tcp = accept_tcp(&mut stack).await;
        let answer = from.recv().await.unwrap();
        let answer = SlicedPacket::from_ip(&answer).unwrap();
        let Some(TransportSlice::Tcp(tcp)) = answer.transport else { panic!("{answer:?}") };
        assert!(tcp.syn() && tcp.ack());
        let mss = TcpOptionElement::MaximumSegmentSize(1000);
        assert!(tcp.options_iterator().any(|option| option == Ok(mss.clone())));
    });
}

#[test]
fn udp_after_an_extension_header_goes_to_the_stack() {
    in_each(|| async {
        let (device, to, _from) = pipe(usize::MAX);
        let mut stack = IpStack::new(config(), device);
        let mut packet = vec![0x60, 0, 0, 0, 0, 17, 60, 64];
        packet.extend_from_slice(&[0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2]);
        packet.extend_from_slice(&[0x20, 1, 0xd, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 7]);
        // Destination options that consist of padding, then from port 1 to port 53.
        packet.extend_from_slice(&[17, 0, 1, 4, 0, 0, 0, 0]);
        packet.extend_from_slice(&[0, 1, 0, 53, 0, 9, 0, 0, b'x']);
        let words = packet[8..40]
            .chunks(2)
            .chain(packet[48..].chunks(2))
            .map(|two| u32::from(two[0]) << 8 | u32::from(two.get(1).copied().unwrap_or_default()));
        let sum: u32 = words.sum::<u32>() + 9 + 17;
        packet[54..56].copy_from_slice(&(!((sum >> 16) + (sum & 0xffff)) as u16).to_be_bytes());
        to.send(packet).await.unwrap();
        let mut udp = accept_udp(&mut stack).await;
        assert_eq!(udp.peer_addr(), "[2001:db8::7]:53".parse().unwrap());
        assert_eq!(udp.read(&mut [0; 10]).await.unwrap(), 1);
    });
}

#[test]
fn a_device_with_packet_information_that_takes_parts_of_packets_is_served() {
    in_each(|| async {
        let mut config = config();
        config.packet_information(true);
        let (device, to, mut from) = pipe(10);
        let mut stack = IpStack::new(config, device);
        to.send([&[0, 0, 8, 0], &echo_request(b"abc")[..]].concat()).await.unwrap();
        let IpStackStream::UnknownTransport(icmp) = stack.accept().await.unwrap() else {
            panic!("not a packet of another protocol");
        };
        icmp.send(b"0123456789".to_vec()).unwrap();
        let mut all = Vec::new();
        while all.len() < 34 {
            all.extend(from.recv().await.unwrap());
        }
        assert_eq!(all[..5], [0, 0, 8, 0, 0x45]);
        assert_eq!(all[24..], *b"0123456789");
    });
}

#[test]
fn accept_reports_that_the_device_is_gone_or_that_no_stack_has_started() {
    in_each(|| async {
        let (device, to, _from) = pipe(usize::MAX);
        let mut stack = IpStack::new(config(), device);
        drop(to);
        assert!(matches!(stack.accept().await, Err(IpStackError::AcceptError)));
        let mut config = config();
        config.mtu_unchecked(20);
        assert!(matches!(config.mtu(20), Err(IpStackError::InvalidMtuSize(20))));
        let (device, _to, _from) = pipe(usize::MAX);
        let mut stack = IpStack::new(config, device);
        let Err(IpStackError::IoError(e)) = stack.accept().await else { panic!("it has started") };
        assert!(e.to_string().contains("68-65535"), "{e}");
        assert!(matches!(stack.accept().await, Err(IpStackError::AcceptError)));
    });
}

#[test]
fn no_drop_of_a_handle_hangs_in_any_order() {
    for order in 0..4 {
        in_each(move || async move {
            let (guest, mut stack) = guest_and_stack(config());
            let (stream, tcp) =
                tokio::join!(TcpStream::connect(&guest, FAR), accept_tcp(&mut stack));
            let (stream, mut tcp) = (stream.unwrap(), tcp);
            let socket = UdpSocket::bind(&guest, "10.0.0.2:7000").await.unwrap();
            socket.send_to(b"x", "192.0.2.7:53").await.unwrap();
            let udp = accept_udp(&mut stack).await;
            tcp.write_all(b"unread").await.unwrap();
            match order {
                0 => drop((stack, tcp, udp, guest, stream)),
                1 => drop((tcp, udp, stack, stream, guest)),
                2 => {
                    drop(stack);
                    // Its stream fails, and does not wait for ever.
                    while tcp.read(&mut [0; 10]).await.is_ok_and(|n| n > 0) {}
                }
                // The end of the runtime drops a task that waits.
                _ => drop(tokio::spawn(async move {
                    let _ = tcp.read(&mut [0; 10]).await;
                    drop((stack, udp, guest, stream));
                })),
            }
        });
    }
}

#[test]
fn packets_of_any_bytes_leave_the_stack_running() {
    in_each(|| async {
        let (device, to, from) = pipe(usize::MAX);
        let mut stack = IpStack::new(config(), device);
        let inject = to.clone();
        let guest = guest_of(to, from);
        let junk = tokio::spawn(async move {
            let mut state = 1u64;
            let mut random = move || {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (state >> 33) as usize
            };
            for _ in 0..3000 {
                let mut packet = echo_request(&[0; 40]);
                packet[0] = [0x45, 0x46, 0x65, 0x60, 0x4f][random() % 5];
                packet[9] = [1, 6, 17, 58][random() % 4];
                packet[6] = [0, 6, 17, 44, 0x20, 60][random() % 6];
                for _ in 0..random() % 8 {
                    let at = random() % packet.len();
                    packet[at] = random() as u8;
                }
                packet.truncate(1 + random() % packet.len());
                inject.send(packet).await.unwrap();
            }
        });
        let serving = tokio::spawn(async move {
            while let Ok(stream) = stack.accept().await {
                if let IpStackStream::Tcp(mut tcp) = stream {
                    tokio::spawn(async move { tcp.write_all(b"alive").await });
                }
            }
        });
        junk.await.unwrap();
        let mut stream = TcpStream::connect(&guest, FAR).await.unwrap();
        let mut word = [0; 5];
        stream.read_exact(&mut word).await.unwrap();
        assert_eq!(&word, b"alive");
        serving.abort();
    });
}
