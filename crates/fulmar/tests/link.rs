//! Two stacks in one process, joined by `link`: the API from both ends.

use std::io::{Read, Write};
use std::net::SocketAddr;
use std::thread;
use std::time::Duration;

use fulmar::{Stack, TcpListener, TcpStream, UdpSocket, devices};

fn stacks() -> (Stack, Stack) {
    let (a, b) = devices::link_pair().unwrap();
    let stack = |device, v4: &str, v6: &str| {
        Stack::builder()
            .device(device)
            .address(v4.parse().unwrap())
            .address(v6.parse().unwrap())
            .unlisted()
            .build()
            .unwrap()
    };
    (stack(a, "10.1.0.1/24", "fd01::1/64"), stack(b, "10.1.0.2/24", "fd01::2/64"))
}

/// Bytes that tell their place.
fn pattern(from: usize, len: usize) -> Vec<u8> {
    (from..from + len).map(|i| (i ^ (i >> 8) ^ (i >> 16)) as u8).collect()
}

#[test]
fn an_echo_comes_back_over_both_ip_versions() {
    let (a, b) = stacks();
    for to in ["10.1.0.2:7", "[fd01::2]:7"] {
        let listener = TcpListener::bind(&b, to).unwrap();
        let server = thread::spawn(move || {
            let (mut s, _) = listener.accept().unwrap();
            let mut buf = [0; 100];
            loop {
                let n = s.read(&mut buf).unwrap();
                if n == 0 {
                    return;
                }
                s.write_all(&buf[..n]).unwrap();
            }
        });
        let mut c = TcpStream::connect(&a, to).unwrap();
        assert_eq!(c.peer_addr().unwrap(), to.parse::<SocketAddr>().unwrap());
        for i in 0..100usize {
            let message = pattern(i, i + 1);
            c.write_all(&message).unwrap();
            let mut answer = vec![0; message.len()];
            c.read_exact(&mut answer).unwrap();
            assert_eq!(answer, message);
        }
        c.shutdown(std::net::Shutdown::Write).unwrap();
        assert_eq!(c.read(&mut [0; 1]).unwrap(), 0);
        server.join().unwrap();
    }
}

#[test]
fn bulk_arrives_in_order_and_every_buffer_comes_back() {
    const TOTAL: usize = 64 << 20;
    let (a, b) = stacks();
    let listener = TcpListener::bind(&b, "10.1.0.2:9").unwrap();
    let reader = thread::spawn(move || {
        let (mut s, _) = listener.accept().unwrap();
        let mut buf = vec![0; 256 << 10];
        let mut at = 0;
        loop {
            let n = s.read(&mut buf).unwrap();
            if n == 0 {
                return at;
            }
            assert!(buf[..n] == pattern(at, n), "bytes differ after {at}");
            at += n;
        }
    });
    let mut c = TcpStream::connect(&a, "10.1.0.2:9").unwrap();
    let mut at = 0;
    while at < TOTAL {
        let n = (128 << 10).min(TOTAL - at);
        c.write_all(&pattern(at, n)).unwrap();
        at += n;
    }
    drop(c);
    assert_eq!(reader.join().unwrap(), TOTAL);
    let give_up = std::time::Instant::now() + Duration::from_secs(5);
    loop {
        let out: usize = [&a, &b].map(|s| s.stat().unwrap().shard.pool.mbufs_in_use).iter().sum();
        if out == 0 {
            break;
        }
        assert!(std::time::Instant::now() < give_up, "{out} mbufs are still out");
        thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn datagrams_cross_and_a_closed_port_refuses() {
    let (a, b) = stacks();
    let server = UdpSocket::bind(&b, "0.0.0.0:53").unwrap();
    let client = UdpSocket::bind(&a, "0.0.0.0:0").unwrap();
    client.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    client.connect("10.1.0.2:53").unwrap();
    client.send(b"question").unwrap();
    let mut buf = [0; 64];
    let (n, from) = server.recv_from(&mut buf).unwrap();
    assert_eq!(&buf[..n], b"question");
    server.send_to(b"answer", from).unwrap();
    assert_eq!(client.recv(&mut buf).unwrap(), 6);
    client.connect("10.1.0.2:54").unwrap();
    client.send(b"anybody?").unwrap();
    let e = client.recv(&mut buf).unwrap_err();
    assert_eq!(e.kind(), std::io::ErrorKind::ConnectionRefused);
}

#[test]
fn a_stack_reaches_its_own_address() {
    let (a, _b) = stacks();
    let listener = TcpListener::bind(&a, "10.1.0.1:80").unwrap();
    let server = thread::spawn(move || {
        let (mut s, peer) = listener.accept().unwrap();
        assert_eq!(peer.ip(), "10.1.0.1".parse::<std::net::IpAddr>().unwrap());
        let mut all = Vec::new();
        s.read_to_end(&mut all).unwrap();
        all
    });
    let mut c = TcpStream::connect(&a, "10.1.0.1:80").unwrap();
    c.write_all(&pattern(0, 1 << 20)).unwrap();
    drop(c);
    assert!(server.join().unwrap() == pattern(0, 1 << 20));
    assert!(a.ping("10.1.0.1".parse().unwrap(), 56, Duration::from_secs(1)).is_ok());
}
