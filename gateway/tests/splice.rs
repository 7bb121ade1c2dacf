//! Connections from one socket to another by `splice`, on the loopback interface.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use fulmar_gateway::policy::Protocol;
use fulmar_gateway::ports::PortSpec;
use fulmar_gateway::published::PublishedPort;
use fulmar_gateway::splice::{Side, Splicer, splicer};
use nix::sys::socket::{MsgFlags, send};

const PATIENCE: Duration = Duration::from_secs(60);

fn listener() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = listener.local_addr().unwrap();
    (listener, address)
}

fn port_of(spec: &str) -> Arc<PublishedPort> {
    let spec: PortSpec = spec.parse().unwrap();
    Arc::new(PublishedPort::new(spec.forwards().remove(0)))
}

/// A splicer with a listener that leads to these destinations.
fn spliced_to(to: Vec<SocketAddr>) -> (Splicer, SocketAddr) {
    let (splicer, run) = splicer().unwrap();
    thread::spawn(move || run.run().unwrap());
    let (near, address) = listener();
    splicer.listen(near, to, port_of("80"));
    (splicer, address)
}

/// Both ends of a spliced connection.
fn pair() -> (Splicer, TcpStream, TcpStream) {
    let (far, to) = listener();
    let (splicer, near) = spliced_to(vec![to]);
    let client = TcpStream::connect(near).unwrap();
    let (server, _) = far.accept().unwrap();
    for end in [&client, &server] {
        end.set_read_timeout(Some(PATIENCE)).unwrap();
        end.set_write_timeout(Some(PATIENCE)).unwrap();
    }
    (splicer, client, server)
}

/// The thread counts what it has moved after the reader may have it.
fn reaches(counter: &AtomicU64, wanted: u64) {
    let begin = std::time::Instant::now();
    while counter.load(Relaxed) != wanted {
        assert!(begin.elapsed() < PATIENCE, "{} of {wanted}", counter.load(Relaxed));
        thread::sleep(Duration::from_millis(1));
    }
}

fn pattern(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|i| (i % 251) as u8 ^ (i >> 16) as u8).collect()
}

#[test]
fn bytes_arrive_in_order_both_ways_at_once() {
    let (splicer, mut client, mut server) = pair();
    let sent = pattern(9 << 20);
    let expected = sent.clone();
    let mut back = client.try_clone().unwrap();
    let echo = thread::spawn(move || {
        let mut reader = server.try_clone().unwrap();
        std::io::copy(&mut reader, &mut server).unwrap();
        server.shutdown(Shutdown::Write).unwrap();
    });
    let writer = thread::spawn(move || {
        client.write_all(&sent).unwrap();
        client.shutdown(Shutdown::Write).unwrap();
    });
    let mut received = Vec::new();
    back.read_to_end(&mut received).unwrap();
    assert!(received == expected, "{} bytes of {}", received.len(), expected.len());
    writer.join().unwrap();
    echo.join().unwrap();
    let counters = splicer.counters();
    assert_eq!(counters.connections.load(Relaxed), 1);
    reaches(&counters.bytes_there, expected.len() as u64);
    reaches(&counters.bytes_back, expected.len() as u64);
}

#[test]
fn urgent_data_is_passed_on_in_the_stream() {
    let (_splicer, mut client, mut server) = pair();
    let mut sent: Vec<u8> = Vec::new();
    for round in 0..200u8 {
        for (bytes, flags) in [
            (&[round; 3][..], MsgFlags::empty()),
            (b"!", MsgFlags::MSG_OOB),
            (&[round; 9], MsgFlags::empty()),
        ] {
            assert_eq!(send(client.as_raw_fd(), bytes, flags), Ok(bytes.len()));
            sent.extend(bytes);
        }
        // At times the thread comes to it alone.
        if round % 8 == 0 {
            let mut bytes = vec![0; sent.len()];
            server.read_exact(&mut bytes).unwrap();
            assert_eq!(bytes, sent);
            sent.clear();
        }
    }
    client.shutdown(Shutdown::Write).unwrap();
    let mut bytes = Vec::new();
    server.read_to_end(&mut bytes).unwrap();
    assert_eq!(bytes, sent);
    // The other direction is open still.
    server.write_all(b"answer").unwrap();
    drop(server);
    bytes.clear();
    client.read_to_end(&mut bytes).unwrap();
    assert_eq!(bytes, b"answer");
}

#[test]
fn one_direction_ends_while_the_other_goes_on() {
    let (_splicer, mut client, mut server) = pair();
    client.write_all(b"question").unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    let mut question = String::new();
    server.read_to_string(&mut question).unwrap();
    assert_eq!(question, "question");
    server.write_all(b"answer").unwrap();
    drop(server);
    let mut answer = String::new();
    client.read_to_string(&mut answer).unwrap();
    assert_eq!(answer, "answer");
}

#[test]
fn a_reset_is_passed_on() {
    let (_splicer, mut client, mut server) = pair();
    server.write_all(b"x").unwrap();
    let mut byte = [0; 1];
    client.read_exact(&mut byte).unwrap();
    // Unread bytes make the close a reset.
    client.write_all(b"never read").unwrap();
    server.peek(&mut byte).unwrap();
    drop(server);
    let error = client.read(&mut byte).expect_err("a reset");
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
}

#[test]
fn acceptance_is_bounded_while_the_reader_does_not_read() {
    let (splicer, mut client, mut server) = pair();
    client.set_nonblocking(true).unwrap();
    let block = vec![7u8; 1 << 20];
    let mut accepted_bytes = 0;
    // The sockets' buffers grow for a while; then nothing moves.
    let mut idle = 0;
    while idle < 20 {
        match client.write(&block) {
            Ok(n) => (accepted_bytes, idle) = (accepted_bytes + n, 0),
            Err(e) if e.kind() == ErrorKind::WouldBlock => {
                idle += 1;
                thread::sleep(Duration::from_millis(20));
            }
            Err(e) => panic!("{e}"),
        }
        assert!(accepted_bytes < 256 << 20, "no end");
    }
    client.set_nonblocking(false).unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    let mut received = Vec::new();
    server.read_to_end(&mut received).unwrap();
    assert_eq!(received.len(), accepted_bytes);
    assert_eq!(splicer.counters().bytes_there.load(Relaxed), accepted_bytes as u64);
}

#[test]
fn a_refusal_tries_the_next_destination_and_then_resets() {
    // No listener of these tests is at this address, so that no port of it comes to be used.
    let nothing = SocketAddr::from(([127, 0, 0, 9], 9));
    let (far, to) = listener();
    let (splicer, near) = spliced_to(vec![nothing, to]);
    let mut client = TcpStream::connect(near).unwrap();
    let (mut server, _) = far.accept().unwrap();
    server.write_all(b"here").unwrap();
    let mut word = [0; 4];
    client.set_read_timeout(Some(PATIENCE)).unwrap();
    client.read_exact(&mut word).unwrap();
    assert_eq!(&word, b"here");

    let (refusing, near) = spliced_to(vec![nothing]);
    // The reset may come before connect returns.
    if let Ok(mut client) = TcpStream::connect(near) {
        client.set_read_timeout(Some(PATIENCE)).unwrap();
        let error = client.read(&mut word).expect_err("a reset");
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    }
    while refusing.counters().refused.load(Relaxed) == 0 {
        thread::yield_now();
    }
    assert_eq!(splicer.counters().refused.load(Relaxed), 0);
}

#[test]
fn many_connections_share_the_thread() {
    let (far, to) = listener();
    let (_splicer, near) = spliced_to(vec![to]);
    let server = thread::spawn(move || {
        for _ in 0..200 {
            let (mut stream, _) = far.accept().unwrap();
            thread::spawn(move || {
                let mut reader = stream.try_clone().unwrap();
                let _ = std::io::copy(&mut reader, &mut stream);
            });
        }
    });
    let mut clients: Vec<_> = (0..200).map(|_| TcpStream::connect(near).unwrap()).collect();
    for (n, client) in clients.iter_mut().enumerate() {
        client.set_read_timeout(Some(PATIENCE)).unwrap();
        client.write_all(&[n as u8; 100]).unwrap();
    }
    for (n, client) in clients.iter_mut().enumerate().rev() {
        let mut echo = [0; 100];
        client.read_exact(&mut echo).unwrap();
        assert_eq!(echo, [n as u8; 100]);
    }
    server.join().unwrap();
}

#[test]
fn a_closed_listener_refuses_and_its_connections_stay() {
    let (far, to) = listener();
    let (splicer, run) = splicer().unwrap();
    let thread = thread::spawn(move || run.run());
    let (near, address) = listener();
    let id = splicer.listen(near, vec![to], port_of("80"));
    let mut client = TcpStream::connect(address).unwrap();
    let (mut server, _) = far.accept().unwrap();
    let published = splicer.published();
    assert_eq!((published.len(), published[0].connections, published[0].refused), (1, 1, 0));
    splicer.unlisten(id);
    assert_eq!(splicer.published(), []);
    while TcpStream::connect(address).is_ok() {
        thread::yield_now();
    }
    client.write_all(b"still").unwrap();
    let mut word = [0; 5];
    server.set_read_timeout(Some(PATIENCE)).unwrap();
    server.read_exact(&mut word).unwrap();
    // A connection that came before the listener was closed waits in the queue of `far` and ends with it.
    drop((client, server, far, splicer));
    thread.join().unwrap().unwrap();
}

fn udp() -> (UdpSocket, SocketAddr) {
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    let address = socket.local_addr().unwrap();
    (socket, address)
}

#[test]
fn datagrams_reach_the_destination_and_each_client_its_own_answers() {
    let (splicer, run) = splicer().unwrap();
    thread::spawn(move || run.run().unwrap());
    let ((server, to), (port, at)) = (udp(), udp());
    let id = splicer.listen_datagrams(port, to, port_of("53"));
    let clients = [udp().0, udp().0];
    let mut buffer = vec![0; 65_536];
    for bytes in [0, 1, 1400, 60_000] {
        for client in &clients {
            client.send_to(&pattern(bytes), at).unwrap();
            let (n, from) = server.recv_from(&mut buffer).unwrap();
            assert_eq!(buffer[..n], pattern(bytes));
            server.send_to(&buffer[..n], from).unwrap();
            let (n, from) = client.recv_from(&mut buffer).unwrap();
            assert_eq!((&buffer[..n], from), (&pattern(bytes)[..], at));
        }
    }
    let counters = splicer.counters();
    reaches(&counters.datagrams_there, 8);
    reaches(&counters.datagrams_back, 8);
    let published = splicer.published();
    assert_eq!((published[0].protocol, published[0].connections), (Protocol::Udp, 2));
    splicer.unlisten(id);
    // The port is free once the loop has heard of it.
    let begin = std::time::Instant::now();
    while UdpSocket::bind(at).is_err() {
        assert!(begin.elapsed() < PATIENCE, "the port stays");
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_closed_destination_does_not_stop_a_port() {
    let (splicer, run) = splicer().unwrap();
    thread::spawn(move || run.run().unwrap());
    let ((server, to), (port, at)) = (udp(), udp());
    drop(server);
    splicer.listen_datagrams(port, to, port_of("53"));
    let (client, _) = udp();
    client.send_to(b"early", at).unwrap();
    let server = UdpSocket::bind(to).unwrap();
    server.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
    // The first datagrams may arrive before the server is bound.
    let begin = std::time::Instant::now();
    loop {
        client.send_to(b"late", at).unwrap();
        match server.recv_from(&mut [0; 8]) {
            Ok((4, _)) => return,
            _ => assert!(begin.elapsed() < PATIENCE, "nothing arrives"),
        }
    }
}

#[test]
fn bytes_that_a_side_sent_before_the_end_are_delivered() {
    let (splicer, mut client, mut server) = pair();
    let sent = pattern(3 << 20);
    let expected = sent.clone();
    let writer = thread::spawn(move || server.write_all(&sent));
    // The server writes and is gone; its client reads when the end is on its way.
    let mut came = vec![0; 1000];
    client.read_exact(&mut came).unwrap();
    let is_done = splicer.finish(Side::Connected);
    client.read_to_end(&mut came).unwrap();
    assert!(came == expected, "{} bytes", came.len());
    writer.join().unwrap().unwrap();
    is_done.recv_timeout(PATIENCE).unwrap_err();
}

#[test]
fn a_connection_that_a_side_has_not_ended_is_reset_at_the_end() {
    let (splicer, mut client, _server) = pair();
    let is_done = splicer.finish(Side::Connected);
    assert_eq!(client.read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);
    is_done.recv_timeout(PATIENCE).unwrap_err();
}
