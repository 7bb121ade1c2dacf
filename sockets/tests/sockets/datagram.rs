//! UDP sockets.

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::thread;
use std::time::Duration;

use fulmar::UdpSocket;
use fulmar::udp::{MtuDiscovery, RecvMessage, SendMessage};

use crate::support::{
    A, B, B6, PATIENCE, acquainted_stacks, buffers_come_home, eventually, pattern, within,
};

fn address(ip: &str, port: u16) -> SocketAddr {
    SocketAddr::new(ip.parse().unwrap(), port)
}

#[test]
fn a_connected_socket_receives_only_from_its_peer() {
    within(|| {
        let (a, b) = acquainted_stacks();
        let server = UdpSocket::bind(&b, (B, 53)).unwrap();
        let stranger = UdpSocket::bind(&b, (B, 54)).unwrap();
        let c = UdpSocket::bind(&a, "0.0.0.0:0").unwrap();
        let unconnected = c.send(b"x").unwrap_err();
        assert_eq!(unconnected.raw_os_error(), Some(libc::EDESTADDRREQ));
        assert_eq!(c.peer_addr().unwrap_err().kind(), ErrorKind::NotConnected);
        c.connect((B, 53)).unwrap();
        assert_eq!(c.peer_addr().unwrap(), address(B, 53));
        assert_eq!(c.local_addr().unwrap().ip().to_string(), A);
        c.send(b"hello").unwrap();
        let mut buf = [0; 64];
        let (n, from) = server.recv_from(&mut buf).unwrap();
        assert_eq!((&buf[..n], from), (&b"hello"[..], c.local_addr().unwrap()));
        stranger.send_to(b"spam", from).unwrap();
        server.send_to(b"answer", from).unwrap();
        assert_eq!(c.recv(&mut buf).unwrap(), 6);
        assert_eq!(&buf[..6], b"answer");
        // Another destination may be named all the same.
        c.send_to(b"to you", (B, 54)).unwrap();
        assert_eq!(stranger.recv_from(&mut buf).unwrap(), (6, c.local_addr().unwrap()));
    });
}

#[test]
fn datagrams_keep_their_bounds() {
    within(|| {
        let (a, b) = acquainted_stacks();
        let server = UdpSocket::bind(&b, (B, 53)).unwrap();
        let c = UdpSocket::bind(&a, "0.0.0.0:0").unwrap();
        for len in [0, 1, 100, 1400] {
            assert_eq!(c.send_to(&pattern(0, len), (B, 53)).unwrap(), len);
        }
        let mut buf = [0; 2000];
        assert_eq!(server.peek_from(&mut buf).unwrap().0, 0);
        assert_eq!(server.recv_from(&mut buf).unwrap().0, 0);
        assert_eq!(server.recv_from(&mut buf).unwrap().0, 1);
        assert_eq!(server.peek_from(&mut buf[..10]).unwrap().0, 10);
        assert_eq!(server.recv_from(&mut buf[..10]).unwrap().0, 10, "the rest is lost");
        let (n, _) = server.recv_from(&mut buf).unwrap();
        assert!(buf[..n] == pattern(0, 1400));
        buffers_come_home(&[&a, &b]);
    });
}

#[test]
fn a_closed_port_is_reported_to_a_connected_socket_once() {
    within(|| {
        let (a, _b) = acquainted_stacks();
        let c = UdpSocket::bind(&a, "0.0.0.0:0").unwrap();
        c.connect((B, 9)).unwrap();
        c.send(b"x").unwrap();
        let e = c.recv(&mut [0; 8]).unwrap_err();
        assert_eq!((e.kind(), e.raw_os_error()), (ErrorKind::ConnectionRefused, Some(111)));
        assert!(c.take_error().unwrap().is_none());
        c.send(b"x").unwrap();
        eventually("the answer has come", || {
            c.take_error().unwrap().is_some_and(|e| e.kind() == ErrorKind::ConnectionRefused)
        });
        c.set_read_timeout(Some(Duration::from_millis(10))).unwrap();
        assert_eq!(c.recv(&mut [0; 8]).unwrap_err().kind(), ErrorKind::WouldBlock);
    });
}

#[test]
fn too_long_a_datagram_is_refused() {
    within(|| {
        let (a, _b) = acquainted_stacks();
        let c = UdpSocket::bind(&a, "0.0.0.0:0").unwrap();
        for len in [70_000, 65_536 - 27] {
            let e = c.send_to(&vec![0; len], (B, 9)).unwrap_err();
            assert_eq!(e.raw_os_error(), Some(libc::EMSGSIZE));
        }
    });
}

#[test]
fn a_datagram_larger_than_the_path_goes_in_fragments_unless_that_is_refused() {
    within(|| {
        let (a, b) = acquainted_stacks();
        for (to, any, header_bytes, most) in
            [(B, "0.0.0.0:0", 28, 65_507), (B6, "[::]:0", 48, 65_527)]
        {
            let s = UdpSocket::bind(&b, (to, 53)).unwrap();
            s.set_read_timeout(Some(PATIENCE)).unwrap();
            let c = UdpSocket::bind(&a, any).unwrap();
            let fits = 1500 - header_bytes;
            let mut buf = vec![0; 70_000];
            for len in [fits, fits + 1, most] {
                let sent = pattern(len, len);
                assert_eq!(c.send_to(&sent, (to, 53)).unwrap(), len);
                assert_eq!(s.recv_from(&mut buf).unwrap().0, len);
                assert!(buf[..len] == sent);
            }
            assert_eq!(c.mtu_discovery().unwrap(), MtuDiscovery::Off);
            c.set_mtu_discovery(MtuDiscovery::On).unwrap();
            assert_eq!(c.mtu_discovery().unwrap(), MtuDiscovery::On);
            assert_eq!(c.send_to(&buf[..fits], (to, 53)).unwrap(), fits);
            let e = c.send_to(&buf[..fits + 1], (to, 53)).unwrap_err();
            assert_eq!(e.raw_os_error(), Some(libc::EMSGSIZE));
            let e = c.send_to(&vec![0; most + 1], (to, 53)).unwrap_err();
            assert_eq!(e.raw_os_error(), Some(libc::EMSGSIZE));
        }
    });
}

#[test]
fn broadcast_needs_permission_and_reaches_everybody() {
    within(|| {
        let (a, b) = acquainted_stacks();
        let server = UdpSocket::bind(&b, "0.0.0.0:67").unwrap();
        let c = UdpSocket::bind(&a, "0.0.0.0:68").unwrap();
        for to in ["255.255.255.255:67", "10.1.0.255:67"] {
            let e = c.send_to(b"hello all", to).unwrap_err();
            assert_eq!(e.raw_os_error(), Some(libc::EACCES));
        }
        assert!(!c.broadcast().unwrap());
        c.set_broadcast(true).unwrap();
        assert!(c.broadcast().unwrap());
        let mut buf = [0; 32];
        for to in ["255.255.255.255:67", "10.1.0.255:67"] {
            c.send_to(b"hello all", to).unwrap();
            assert_eq!(server.recv_from(&mut buf).unwrap(), (9, address(A, 68)));
        }
    });
}

#[test]
fn ports_clash_unless_families_differ() {
    within(|| {
        let (a, b) = acquainted_stacks();
        let _first = UdpSocket::bind(&b, (B, 53)).unwrap();
        let e = UdpSocket::bind(&b, (B, 53)).unwrap_err();
        assert_eq!(e.raw_os_error(), Some(libc::EADDRINUSE));
        let e = UdpSocket::bind(&b, ("10.1.0.77", 53)).unwrap_err();
        assert_eq!(e.raw_os_error(), Some(libc::EADDRNOTAVAIL));
        let v6 = UdpSocket::bind(&b, (B6, 53)).unwrap();
        let c = UdpSocket::bind(&a, "[::]:0").unwrap();
        c.send_to(b"six", (B6, 53)).unwrap();
        assert_eq!(v6.recv_from(&mut [0; 8]).unwrap().0, 3);
        let v4 = UdpSocket::bind(&a, "0.0.0.0:0").unwrap();
        let e = v4.send_to(b"x", (B6, 53)).unwrap_err();
        assert_eq!(e.raw_os_error(), Some(libc::EAFNOSUPPORT));
    });
}

#[test]
fn many_threads_share_one_socket() {
    within(|| {
        const EACH: usize = 500;
        let (a, b) = acquainted_stacks();
        let server = UdpSocket::bind(&b, (B, 53)).unwrap();
        server.set_recv_buffer(64 << 20).unwrap();
        server.set_read_timeout(Some(PATIENCE)).unwrap();
        let c = UdpSocket::bind(&a, "0.0.0.0:0").unwrap();
        let senders: Vec<_> = (0..4)
            .map(|t| {
                let c = c.try_clone().unwrap();
                thread::spawn(move || {
                    for i in 0..EACH {
                        let message = ((t * EACH + i) as u32).to_ne_bytes();
                        // A socket keeps 4096 datagrams; the readers keep up or answer this.
                        c.send_to(&message, (B, 53)).unwrap();
                    }
                })
            })
            .collect();
        let readers: Vec<_> = (0..4)
            .map(|_| {
                let server = server.try_clone().unwrap();
                thread::spawn(move || {
                    let mut buf = [0; 8];
                    (0..EACH)
                        .map(|_| {
                            assert_eq!(server.recv_from(&mut buf).unwrap().0, 4);
                            u32::from_ne_bytes(buf[..4].try_into().unwrap())
                        })
                        .collect::<Vec<_>>()
                })
            })
            .collect();
        senders.into_iter().for_each(|s| s.join().unwrap());
        let mut got: Vec<u32> = readers.into_iter().flat_map(|r| r.join().unwrap()).collect();
        got.sort_unstable();
        assert_eq!(got, (0..4 * EACH as u32).collect::<Vec<_>>());
    });
}

#[test]
fn a_blocking_sender_waits_for_a_full_device() {
    within(|| {
        let (p, q) = crate::support::pipe::Pipe::pair();
        let a = crate::support::stack(1, Box::new(p), |s| s);
        let b = crate::support::stack(2, Box::new(q), |s| s);
        crate::support::meet(&a);
        let server = UdpSocket::bind(&b, (B, 53)).unwrap();
        server.set_recv_buffer(64 << 20).unwrap();
        let c = UdpSocket::bind(&a, "0.0.0.0:0").unwrap();
        // A Unix socket holds ten datagrams: every burst is refused again and again.
        for i in 0..2000u32 {
            assert_eq!(c.send_to(&i.to_ne_bytes(), (B, 53)).unwrap(), 4);
        }
        server.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut buf = [0; 4];
        for i in 0..2000u32 {
            server.recv_from(&mut buf).unwrap();
            assert_eq!(u32::from_ne_bytes(buf), i);
        }
        buffers_come_home(&[&a, &b]);
    });
}

/// Receives `count` datagrams of up to 64 bytes, many at a time.
fn receive_all(socket: &UdpSocket, count: usize) -> Vec<Vec<u8>> {
    let mut all = Vec::new();
    while all.len() < count {
        let mut buffers = [[0u8; 64]; 50];
        let mut messages = buffers.each_mut().map(|b| RecvMessage::new(b));
        let n = socket.recv_many(&mut messages).unwrap();
        assert!(n > 0);
        all.extend(messages[..n].iter().map(|m| m.payload().to_vec()));
    }
    all
}

#[test]
fn ten_thousand_messages_go_in_one_call_and_none_in_none() {
    within(|| {
        let (a, b) = acquainted_stacks();
        let server = UdpSocket::bind(&b, (B, 53)).unwrap();
        server.set_recv_buffer(64 << 20).unwrap();
        server.set_read_timeout(Some(PATIENCE)).unwrap();
        let c = UdpSocket::bind(&a, "0.0.0.0:0").unwrap();
        assert_eq!(c.send_many(&[]).unwrap(), 0);
        assert_eq!(server.recv_many(&mut []).unwrap(), 0);
        let nowhere = c.send_many(&[SendMessage::new(b"x")]).unwrap_err();
        assert_eq!(nowhere.raw_os_error(), Some(libc::EDESTADDRREQ));
        c.connect((B, 53)).unwrap();
        let payloads: Vec<[u8; 4]> = (0..10_000u32).map(u32::to_ne_bytes).collect();
        // Never more than the receiver's queue holds.
        for part in payloads.chunks(1000) {
            let messages: Vec<_> = part.iter().map(|p| SendMessage::new(p)).collect();
            assert_eq!(c.send_many(&messages).unwrap(), messages.len());
            let sent: Vec<_> = part.iter().map(|p| p.to_vec()).collect();
            assert_eq!(receive_all(&server, part.len()), sent);
        }
        // One call sends all of them. The receiver drops datagrams that it cannot queue, but all are sent.
        let all: Vec<_> = payloads.iter().map(|p| SendMessage::new(p)).collect();
        assert_eq!(c.send_many(&all).unwrap(), 10_000);
        buffers_come_home(&[&a]);
    });
}

#[test]
fn a_run_of_datagrams_comes_apart_at_the_other_end() {
    within(|| {
        let (a, b) = acquainted_stacks();
        let server = UdpSocket::bind(&b, (B, 53)).unwrap();
        server.set_read_timeout(Some(PATIENCE)).unwrap();
        let c = UdpSocket::bind(&a, "0.0.0.0:0").unwrap();
        c.connect((B, 53)).unwrap();
        let sent = pattern(0, 1000);
        for _ in 0..2 {
            assert_eq!(c.send_segmented(&sent, 48).unwrap(), 1000);
            let came = receive_all(&server, 1000usize.div_ceil(48));
            assert_eq!(came, sent.chunks(48).map(<[u8]>::to_vec).collect::<Vec<_>>());
        }
        let of = |r: std::io::Result<usize>| r.unwrap_err().raw_os_error();
        assert_eq!(of(c.send_segmented(&pattern(0, 4000), 1473)), Some(libc::EMSGSIZE));
        assert_eq!(of(c.send_segmented(&sent, 7)), Some(libc::EINVAL));
        assert_eq!(c.send_segmented(&sent, 0).unwrap_err().kind(), ErrorKind::InvalidInput);
        buffers_come_home(&[&a, &b]);
    });
}

#[test]
fn an_icmp_error_is_returned_by_the_next_call_for_many() {
    within(|| {
        let (a, _b) = acquainted_stacks();
        let c = UdpSocket::bind(&a, "0.0.0.0:0").unwrap();
        c.connect((B, 9)).unwrap();
        c.send_many(&[SendMessage::new(b"x"), SendMessage::new(b"y")]).unwrap();
        let mut buf = [0; 8];
        let e = c.recv_many(&mut [RecvMessage::new(&mut buf)]).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::ConnectionRefused);
    });
}
