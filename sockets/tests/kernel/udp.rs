//! UDP and echo requests.

use std::io::{ErrorKind, IoSliceMut};
use std::net;
use std::os::fd::AsRawFd;

use fulmar::UdpSocket;
use fulmar::udp::{RecvMessage, SendMessage};
use nix::sys::socket::{ControlMessageOwned, MsgFlags, recvmsg};

use crate::support::{PATIENCE, pattern};
use crate::{KERNEL, KERNEL6, OURS, OURS6, in_namespace, stack, sys};

#[test]
fn datagrams_of_all_lengths_pass_both_ways() {
    in_namespace!(|| {
        let stack = stack();
        for (kernel, ours) in [(KERNEL, OURS), (KERNEL6, OURS6)] {
            let k = net::UdpSocket::bind((kernel, 53)).unwrap();
            k.set_read_timeout(Some(PATIENCE)).unwrap();
            let f = UdpSocket::bind(&stack, (ours, 54)).unwrap();
            f.set_read_timeout(Some(PATIENCE)).unwrap();
            let mut buf = vec![0; 70_000];
            let in_fragments = [1453, 1472, 1473, 2960, 8000, 65_506, 65_507];
            for len in [0, 1, 17, 18, 19, 255, 256, 257, 1000, 1452].into_iter().chain(in_fragments)
            {
                let sent = pattern(len, len);
                assert_eq!(f.send_to(&sent, (kernel, 53)).unwrap(), len);
                let (n, from) = k.recv_from(&mut buf).unwrap();
                assert_eq!((&buf[..n], from), (&sent[..], f.local_addr().unwrap()));
                assert_eq!(k.send_to(&sent, from).unwrap(), len);
                let (n, from) = f.recv_from(&mut buf).unwrap();
                assert_eq!((&buf[..n], from), (&sent[..], k.local_addr().unwrap()));
            }
        }
    });
}

#[test]
fn a_super_datagram_of_the_kernels_is_read_one_by_one() {
    in_namespace!(|| {
        let stack = stack();
        for (kernel, ours) in [(KERNEL, OURS), (KERNEL6, OURS6)] {
            let k = net::UdpSocket::bind((kernel, 0)).unwrap();
            let f = UdpSocket::bind(&stack, (ours, 54)).unwrap();
            f.set_read_timeout(Some(PATIENCE)).unwrap();
            for (unit, len) in [(1, 60), (22, 22 * 64), (1000, 4500), (1400, 1401), (500, 500)] {
                sys::set_udp_segment(&k, unit).unwrap();
                let sent = pattern(unit, len);
                assert_eq!(k.send_to(&sent, f.local_addr().unwrap()).unwrap(), len);
                for expected in sent.chunks(unit) {
                    let mut buf = vec![0; 70_000];
                    let (n, from) = f.recv_from(&mut buf).unwrap();
                    assert_eq!((&buf[..n], from), (expected, k.local_addr().unwrap()));
                }
            }
        }
    });
}

#[test]
fn closed_ports_are_reported_in_both_directions() {
    in_namespace!(|| {
        let stack = stack();
        for (kernel, ours) in [(KERNEL, OURS), (KERNEL6, OURS6)] {
            let f = UdpSocket::bind(&stack, (ours, 0)).unwrap();
            f.connect((kernel, 9)).unwrap();
            f.send(b"anybody?").unwrap();
            let e = f.recv(&mut [0; 8]).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::ConnectionRefused);
            let k = net::UdpSocket::bind((kernel, 0)).unwrap();
            k.set_read_timeout(Some(PATIENCE)).unwrap();
            k.connect((ours, 9)).unwrap();
            k.send(b"anybody?").unwrap();
            let e = k.recv(&mut [0; 8]).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::ConnectionRefused);
        }
    });
}

#[test]
fn echoes_come_back_from_the_kernel_and_from_us() {
    in_namespace!(|| {
        let stack = stack();
        for address in [KERNEL, KERNEL6] {
            for len in [0, 56, 1400, 8000, 60_000] {
                let echo = stack.ping(address.parse().unwrap(), len, PATIENCE).unwrap();
                assert_eq!((echo.bytes, echo.from), (len, address.parse().unwrap()));
            }
        }
        // No thread calls our stack meanwhile.
        for len in [0, 56, 1400, 8000, 60_000] {
            let sent = pattern(7, len);
            assert_eq!(sys::kernel_ping(OURS.parse().unwrap(), &sent).unwrap(), sent);
        }
    });
}

#[test]
fn a_broadcast_of_the_kernel_arrives() {
    in_namespace!(|| {
        let stack = stack();
        let f = UdpSocket::bind(&stack, "0.0.0.0:67").unwrap();
        f.set_read_timeout(Some(PATIENCE)).unwrap();
        let k = net::UdpSocket::bind((KERNEL, 68)).unwrap();
        k.set_broadcast(true).unwrap();
        k.send_to(b"to all", "10.77.0.255:67").unwrap();
        let mut buf = [0; 16];
        assert_eq!(f.recv_from(&mut buf).unwrap(), (6, k.local_addr().unwrap()));
    });
}

/// The next datagrams of a kernel socket.
fn heard(socket: &net::UdpSocket, count: usize) -> Vec<Vec<u8>> {
    let mut buf = vec![0; 2000];
    (0..count).map(|_| socket.recv(&mut buf).map(|n| buf[..n].to_vec()).unwrap()).collect()
}

#[test]
fn many_datagrams_and_runs_pass_both_ways() {
    in_namespace!(|| {
        let stack = stack();
        for (kernel, ours) in [(KERNEL, OURS), (KERNEL6, OURS6)] {
            let k = net::UdpSocket::bind((kernel, 53)).unwrap();
            k.set_read_timeout(Some(PATIENCE)).unwrap();
            let f = UdpSocket::bind(&stack, (ours, 54)).unwrap();
            f.set_read_timeout(Some(PATIENCE)).unwrap();
            f.connect((kernel, 53)).unwrap();
            k.connect((ours, 54)).unwrap();
            // The first one waits for the neighbour, the others go by its headers.
            f.send(b"first").unwrap();
            assert_eq!(heard(&k, 1), [b"first"]);
            for lengths in [vec![18; 64], (0..64).map(|n| n % 7).collect(), vec![1452; 32]] {
                let payloads: Vec<_> =
                    lengths.iter().enumerate().map(|(i, n)| pattern(i, *n)).collect();
                let messages: Vec<_> = payloads.iter().map(|p| SendMessage::new(p)).collect();
                assert_eq!(f.send_many(&messages).unwrap(), messages.len());
                assert_eq!(heard(&k, messages.len()), payloads);
            }
            let run = pattern(3, 10_000);
            f.send_segmented(&run, 700).unwrap();
            let pieces: Vec<_> = run.chunks(700).map(<[u8]>::to_vec).collect();
            assert_eq!(heard(&k, pieces.len()), pieces);
            // The kernel's own runs may come to us in one frame.
            sys::set_udp_segment(&k, 700).unwrap();
            assert_eq!(k.send(&run).unwrap(), run.len());
            let mut came = Vec::new();
            while came.len() < pieces.len() {
                let mut buffers = vec![[0u8; 2000]; 32];
                let mut room: Vec<_> = buffers.iter_mut().map(|b| RecvMessage::new(b)).collect();
                let n = f.recv_many(&mut room).unwrap();
                came.extend(room[..n].iter().map(|m| m.payload().to_vec()));
            }
            assert_eq!(came, pieces);
        }
    });
}

/// The next datagram of a kernel socket that asks for the service: its length and its service.
fn heard_service(socket: &net::UdpSocket) -> (usize, u8) {
    let (mut buf, mut control) = (vec![0; 2000], nix::cmsg_space!(i32));
    let mut space = [IoSliceMut::new(&mut buf)];
    let fd = socket.as_raw_fd();
    let came = recvmsg::<()>(fd, &mut space, Some(&mut control), MsgFlags::empty()).unwrap();
    let service = came.cmsgs().unwrap().find_map(|m| match m {
        ControlMessageOwned::Ipv4Tos(tos) => Some(tos),
        ControlMessageOwned::Ipv6TClass(class) => Some(class as u8),
        _ => None,
    });
    (came.bytes, service.expect("the kernel tells the service"))
}

#[test]
fn the_service_of_each_datagram_and_of_runs_passes_both_ways() {
    use libc::{IP_RECVTOS, IP_TOS, IPPROTO_IP, IPPROTO_IPV6, IPV6_RECVTCLASS, IPV6_TCLASS};
    in_namespace!(|| {
        let stack = stack();
        let v4 = (KERNEL, OURS, IPPROTO_IP, IP_RECVTOS, IP_TOS);
        let v6 = (KERNEL6, OURS6, IPPROTO_IPV6, IPV6_RECVTCLASS, IPV6_TCLASS);
        for (kernel, ours, level, receives, sends) in [v4, v6] {
            let k = net::UdpSocket::bind((kernel, 53)).unwrap();
            k.set_read_timeout(Some(PATIENCE)).unwrap();
            sys::set_int(k.as_raw_fd(), level, receives, 1);
            let f = UdpSocket::bind(&stack, (ours, 54)).unwrap();
            f.set_read_timeout(Some(PATIENCE)).unwrap();
            f.connect((kernel, 53)).unwrap();
            k.connect((ours, 54)).unwrap();
            f.set_tos(0x20).unwrap();
            // The first one waits for the neighbour, the others go by its headers.
            f.send(b"first").unwrap();
            assert_eq!(heard_service(&k), (5, 0x20));
            let plain = SendMessage::new(&[7; 700]);
            let run = SendMessage::new(&[7; 1400]).segmented(700).tos(3);
            let sent = [plain, plain.tos(2), plain.tos(2), plain.tos(1), plain.tos(0xb9), run];
            assert_eq!(f.send_many(&sent).unwrap(), sent.len());
            for service in [0x20, 2, 2, 1, 0xb9, 3, 3] {
                assert_eq!(heard_service(&k), (700, service));
            }
            f.set_gro(true).unwrap();
            sys::set_udp_segment(&k, 700).unwrap();
            for service in [2, 3, 0, 0xb8] {
                sys::set_int(k.as_raw_fd(), level, sends, service);
                assert_eq!(k.send(&[7; 2000]).unwrap(), 2000);
                let mut left = 2000;
                while left > 0 {
                    let mut buffer = [0; 4000];
                    let mut room = [RecvMessage::new(&mut buffer)];
                    assert_eq!(f.recv_many(&mut room).unwrap(), 1);
                    assert_eq!(i32::from(room[0].tos()), service);
                    assert_eq!(room[0].to(), Some(f.local_addr().unwrap()));
                    left -= room[0].payload().len();
                }
            }
        }
    });
}
