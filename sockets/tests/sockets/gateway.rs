//! A stack that answers for every address, and a guest that has it as its gateway.

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr};
use std::thread;

use fulmar::icmp::{EchoSocket, IcmpError};
use fulmar::stat::DropReason;
use fulmar::tcp::ConditionalAccept;
use fulmar::udp::{RecvMessage, SendMessage};
use fulmar::{
    ConnectOptions, ListenOptions, PendingConnection, Ready, SocketOptions, Stack, TcpListener,
    TcpStream, UdpBindOptions, UdpSocket, devices,
};

use crate::support::{A, B, PATIENCE, buffers_come_home, eventually, meet, stack, within};

const FAR: &str = "192.0.2.7:443";
const FAR6: &str = "[2001:db8::7]:443";

/// The guest, which knows its gateway, and that.
fn guest_and_gateway() -> (Stack, Stack) {
    let (a, b) = devices::link_pair().unwrap();
    let guest = stack(1, a, |s| s.gateway(B.parse().unwrap()).gateway("fd01::2".parse().unwrap()));
    let gateway = stack(2, b, |s| s.any_ip(true));
    meet(&guest);
    (guest, gateway)
}

fn far(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

/// A listener of the gateway for everything.
fn listen(gateway: &Stack) -> TcpListener {
    let options = ListenOptions {
        any_port: true,
        conditional_accept: Some(ConditionalAccept::default()),
        ..ListenOptions::default()
    };
    TcpListener::bind_with(gateway, "[::]:0", options).unwrap()
}

#[test]
fn a_pending_connection_is_accepted_in_the_name_of_its_destination() {
    within(|| {
        let (guest, gateway) = guest_and_gateway();
        let listener = listen(&gateway);
        for to in [FAR, FAR6] {
            let client =
                TcpStream::connect_nonblocking(&guest, &far(to), &ConnectOptions::default())
                    .unwrap();
            let pending = listener.pending().unwrap();
            assert_eq!(pending.local_addr(), far(to));
            assert_eq!(pending.peer_addr(), client.local_addr().unwrap());
            assert!(pending.syn_options().mss.is_some());
            assert!(client.peer_addr().is_err(), "not connected yet");
            let mut server = pending.accept().unwrap();
            assert_eq!(server.local_addr().unwrap(), far(to));
            server.write_all(b"hello").unwrap();
            client.set_nonblocking(false).unwrap();
            let mut buf = [0; 5];
            (&client).read_exact(&mut buf).unwrap();
            assert_eq!((&buf, client.peer_addr().unwrap()), (b"hello", far(to)));
        }
        let e = listener.accept().unwrap_err();
        assert_eq!(e.kind(), ErrorKind::InvalidInput);
        assert!(e.to_string().contains("TcpListener::pending"), "{e}");
        buffers_come_home(&[&guest, &gateway]);
    });
}

#[test]
fn a_pending_connection_is_refused_or_reported_unreachable() {
    within(|| {
        let (guest, gateway) = guest_and_gateway();
        let listener = listen(&gateway);
        let decide = |decision: fn(PendingConnection)| {
            let connect = thread::spawn({
                let guest = guest.clone();
                move || TcpStream::connect_timeout(&guest, &far(FAR), PATIENCE).unwrap_err()
            });
            decision(listener.pending().unwrap());
            connect.join().unwrap().kind()
        };
        assert_eq!(decide(|p| p.refuse().unwrap()), ErrorKind::ConnectionRefused);
        // Communication administratively prohibited, which a connect does not outlast.
        assert_ne!(decide(|p| p.unreachable(13).unwrap()), ErrorKind::TimedOut);
    });
}

#[test]
fn a_poll_set_reports_a_listener_while_a_connection_is_pending() {
    within(|| {
        let (guest, gateway) = guest_and_gateway();
        let listener = listen(&gateway);
        listener.set_nonblocking(true).unwrap();
        assert_eq!(listener.pending().unwrap_err().kind(), ErrorKind::WouldBlock);
        let set = gateway.poll_set().unwrap();
        set.add(&listener, 7, Ready::READABLE).unwrap();
        let client =
            TcpStream::connect_nonblocking(&guest, &far(FAR), &ConnectOptions::default()).unwrap();
        let mut events = Vec::new();
        set.wait(&mut events, Some(PATIENCE)).unwrap();
        assert_eq!((events[0].token, events[0].ready), (7, Ready::READABLE));
        assert_eq!(listener.stat().unwrap().pending, 1);
        // Forgotten in silence; the SYN comes again and is pending anew.
        drop(listener.pending().unwrap());
        assert_eq!(listener.stat().unwrap().pending, 0);
        set.wait(&mut events, Some(PATIENCE)).unwrap();
        let server = listener.pending().unwrap().accept().unwrap();
        set.add(&server, 8, Ready::WRITABLE).unwrap();
        loop {
            set.wait(&mut events, Some(PATIENCE)).unwrap();
            if events.iter().any(|e| e.token == 8) {
                break;
            }
        }
        assert!(server.take_error().unwrap().is_none());
        assert_eq!(server.peer_addr().unwrap(), client.local_addr().unwrap());
    });
}

#[test]
fn a_decision_after_the_listener_is_gone_is_possible() {
    within(|| {
        let (guest, gateway) = guest_and_gateway();
        let listener = listen(&gateway);
        let client =
            TcpStream::connect_nonblocking(&guest, &far(FAR), &ConnectOptions::default()).unwrap();
        let pending = listener.pending().unwrap();
        drop(listener);
        let server = pending.accept().unwrap();
        client.set_nonblocking(false).unwrap();
        (&client).write_all(b"x").unwrap();
        (&server).read_exact(&mut [0]).unwrap();
    });
}

#[test]
fn datagrams_are_answered_from_where_they_went() {
    within(|| {
        let (guest, gateway) = guest_and_gateway();
        let every = UdpBindOptions { any_port: true, ..UdpBindOptions::default() };
        let all = UdpSocket::bind_with(&gateway, "[::]:0", every).unwrap();
        let client = UdpSocket::bind(&guest, (A, 4000)).unwrap();
        client.connect(far("192.0.2.7:53")).unwrap();
        client.send(b"question").unwrap();
        let mut buffer = [0; 64];
        let mut into = [RecvMessage::new(&mut buffer)];
        assert_eq!(all.recv_many(&mut into).unwrap(), 1);
        let (from, to) = (into[0].from().unwrap(), into[0].to().unwrap());
        assert_eq!((from, to), (client.local_addr().unwrap(), far("192.0.2.7:53")));
        assert_eq!(all.send_many(&[SendMessage::new(b"answer").from(to).to(from)]).unwrap(), 1);
        let mut buf = [0; 64];
        assert_eq!(client.recv(&mut buf).unwrap(), 6);
        assert_eq!(&buf[..6], b"answer");
        // And an error, which a connected socket gets.
        client.send(b"question").unwrap();
        assert_eq!(all.recv_many(&mut into).unwrap(), 1);
        let question = into[0].payload().to_vec();
        all.send_icmp_error(from, to, &question, IcmpError::PortUnreachable, None).unwrap();
        assert_eq!(client.recv(&mut buf).unwrap_err().kind(), ErrorKind::ConnectionRefused);
        all.count_drop(DropReason::ForwardQueueFull).unwrap();
        assert_eq!(gateway.stat().unwrap().drops(DropReason::ForwardQueueFull), 1);
        let sourceless = all.send_to(b"x", from).unwrap_err();
        assert_eq!(sourceless.kind(), ErrorKind::InvalidInput);
    });
}

#[test]
fn pings_of_other_hosts_are_answered_by_the_program() {
    within(|| {
        let (guest, gateway) = guest_and_gateway();
        let echoes = EchoSocket::open(&gateway).unwrap();
        assert_eq!(EchoSocket::open(&gateway).unwrap_err().kind(), ErrorKind::AddrInUse);
        let target: IpAddr = "192.0.2.7".parse().unwrap();
        let ping = thread::spawn({
            let guest = guest.clone();
            move || guest.ping(target, 100, PATIENCE)
        });
        let request = echoes.recv().unwrap();
        assert_eq!((request.to, request.from), (target, A.parse().unwrap()));
        assert_eq!(request.payload.len(), 100);
        echoes.reply(&request).unwrap();
        let echo = ping.join().unwrap().unwrap();
        assert_eq!((echo.from, echo.bytes), (target, 100));
        echoes.set_nonblocking(true).unwrap();
        assert_eq!(echoes.recv().unwrap_err().kind(), ErrorKind::WouldBlock);
        drop(echoes);
        eventually("the place is free again", || EchoSocket::open(&gateway).is_ok());
    });
}

#[test]
fn a_connection_to_the_guest_keeps_the_clients_address() {
    within(|| {
        let (guest, gateway) = guest_and_gateway();
        let listener = TcpListener::bind(&guest, (A, 80)).unwrap();
        let local = far("198.51.100.9:5000");
        let socket = SocketOptions {
            nodelay: true,
            ttl: Some(33),
            recv_buffer: Some(64 << 10),
            ..SocketOptions::default()
        };
        let options = ConnectOptions { local: Some(local), socket };
        let to = SocketAddr::new(A.parse().unwrap(), 80);
        let c = TcpStream::connect_nonblocking(&gateway, &to, &options).unwrap();
        let (server, from) = listener.accept().unwrap();
        assert_eq!((from, c.local_addr().unwrap()), (local, local));
        assert!(c.nodelay().unwrap());
        assert_eq!(c.ttl().unwrap(), 33);
        (&server).write_all(b"hello").unwrap();
        c.set_nonblocking(false).unwrap();
        let mut buf = [0; 5];
        (&c).read_exact(&mut buf).unwrap();
        assert_eq!(&buf, b"hello");
        let again = TcpStream::connect_nonblocking(&gateway, &to, &options).unwrap_err();
        assert_eq!(again.kind(), ErrorKind::AddrInUse);
        let socket = SocketOptions { ttl: Some(0), ..socket };
        let bad = ConnectOptions { socket, ..options };
        let bad = TcpStream::connect_nonblocking(&gateway, &to, &bad).unwrap_err();
        assert_eq!(bad.kind(), ErrorKind::InvalidInput);
        let foreign =
            TcpStream::connect_nonblocking(&guest, &far("10.1.0.2:80"), &options).unwrap_err();
        assert_eq!(
            foreign.kind(),
            ErrorKind::AddrNotAvailable,
            "a guest has its own addresses only"
        );
    });
}
