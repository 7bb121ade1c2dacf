//! TCP through a gateway.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use fulmar_gateway::config::Limits;
use fulmar_gateway::policy::{Decision, NewFlow, Policy, Ruling};
use fulmar_gateway::stat::{Direction, Refusal};
use fulmar_stack::base::Counter;
use nix::sys::socket::{MsgFlags, send, setsockopt, sockopt};
use sha2::{Digest, Sha256};

use crate::relay::Test;
use crate::relay::world::{GUEST, GUEST_V6, HOST_V6, PATIENCE, ROUTER, World, ip, listener};

pub const TESTS: &[Test] = &[
    ("a_connection_carries_bytes_both_ways", a_connection_carries_bytes_both_ways),
    (
        "where_the_ends_take_turns_an_answer_is_one_segment",
        where_the_ends_take_turns_an_answer_is_one_segment,
    ),
    ("the_last_bytes_of_the_host_carry_the_fin", the_last_bytes_of_the_host_carry_the_fin),
    ("ipv6_is_carried_as_ipv4_is", ipv6_is_carried_as_ipv4_is),
    ("what_the_host_refuses_the_guest_sees_refused", what_the_host_refuses_the_guest_sees_refused),
    ("without_a_route_the_guest_hears_of_it", without_a_route_the_guest_hears_of_it),
    (
        "the_loopback_of_the_host_is_reached_by_its_name_alone",
        the_loopback_of_the_host_is_reached_by_its_name_alone,
    ),
    (
        "a_hundred_megabytes_arrive_unchanged_both_ways_at_once",
        a_hundred_megabytes_arrive_unchanged_both_ways_at_once,
    ),
    (
        "a_stream_that_ended_leaves_the_other_one_open",
        a_stream_that_ended_leaves_the_other_one_open,
    ),
    ("urgent_data_of_the_host_stays_in_the_stream", urgent_data_of_the_host_stays_in_the_stream),
    (
        "a_half_closed_flow_ends_once_the_guest_has_forgotten_it",
        a_half_closed_flow_ends_once_the_guest_has_forgotten_it,
    ),
    ("a_reset_of_the_guest_reaches_the_host", a_reset_of_the_guest_reaches_the_host),
    ("a_reset_of_the_host_reaches_the_guest", a_reset_of_the_host_reaches_the_guest),
    (
        "a_reader_that_never_reads_stops_its_writer_and_nobody_else",
        a_reader_that_never_reads_stops_its_writer_and_nobody_else,
    ),
    ("two_thousand_idle_flows_cost_little", two_thousand_idle_flows_cost_little),
    ("a_published_port_shows_the_guest_its_client", a_published_port_shows_the_guest_its_client),
    ("a_published_port_where_nobody_listens_resets", a_published_port_where_nobody_listens_resets),
    ("flows_have_a_bound", flows_have_a_bound),
    ("a_policy_decides_before_anything_leaves", a_policy_decides_before_anything_leaves),
    ("the_end_of_the_gateway_resets_what_is_open", the_end_of_the_gateway_resets_what_is_open),
    (
        "what_a_guest_wrote_before_its_end_is_delivered",
        what_a_guest_wrote_before_its_end_is_delivered,
    ),
];

pub fn exchange(from: &mut TcpStream, to: &mut TcpStream) {
    from.write_all(b"ping").unwrap();
    let mut bytes = [0; 4];
    to.read_exact(&mut bytes).unwrap();
    assert_eq!(&bytes, b"ping");
    to.write_all(b"pong").unwrap();
    from.read_exact(&mut bytes).unwrap();
    assert_eq!(&bytes, b"pong");
}

fn a_connection_carries_bytes_both_ways() {
    let (world, listener) = (World::new(), listener());
    let (mut guest, mut host) = world.pair(&listener);
    exchange(&mut guest, &mut host);
    let stat = world.stat();
    let flow = &stat.flows[0];
    assert_eq!((flow.bytes_out, flow.bytes_in, flow.state), (4, 4, "open"));
    assert_eq!((flow.guest, flow.peer), (guest.local_addr().unwrap(), guest.peer_addr().unwrap()));
    drop((guest, host));
    world.until("the flow is over", |s| s.flows.is_empty());
    let summary = world.end();
    assert_eq!((summary.totals.tcp_flows, summary.totals.bytes_out), (1, 4));
}

/// Segments that went to the guest.
fn segments(world: &World) -> u64 {
    world.stat().stack.counters.value(Counter::TcpSegmentsOut)
}

fn where_the_ends_take_turns_an_answer_is_one_segment() {
    /// Less than the time after which an ACK leaves alone (`TcpConfig::delayed_ack`).
    const QUICK: Duration = Duration::from_millis(20);
    /// As many segments as are acknowledged at once at first, and messages after which the ends are known to take
    /// turns.
    const SETTLED: u32 = 16 + 4;
    let (world, listener) = (World::new(), listener());
    let (mut guest, mut host) = world.pair(&listener);
    let mut quick_in_a_row = 0;
    for _ in 0..500 {
        let before = segments(&world);
        let begun = Instant::now();
        exchange(&mut guest, &mut host);
        let is_quick = begun.elapsed() < QUICK;
        let sent = segments(&world) - before;
        assert!(!is_quick || quick_in_a_row < SETTLED || sent == 1, "{sent} segments");
        quick_in_a_row = if is_quick { quick_in_a_row + 1 } else { 0 };
    }
}

/// Waits until the peer of a host's socket has acknowledged its FIN.
fn until_fin_has_arrived(host: &TcpStream) {
    /// FIN-WAIT-2 as /proc/net/tcp has it (include/net/tcp_states.h).
    const FIN_WAIT_2: &str = "05";
    let port = |at: io::Result<SocketAddr>| format!(":{:04X}", at.unwrap().port());
    let (local, remote) = (port(host.local_addr()), port(host.peer_addr()));
    let has_arrived = || {
        let table = std::fs::read_to_string("/proc/thread-self/net/tcp").unwrap();
        table.lines().any(|line| {
            let fields: Vec<_> = line.split_whitespace().collect();
            fields[1].ends_with(&local) && fields[2].ends_with(&remote) && fields[3] == FIN_WAIT_2
        })
    };
    let begun = Instant::now();
    while !has_arrived() {
        assert!(begun.elapsed() < PATIENCE);
        std::thread::yield_now();
    }
}

fn the_last_bytes_of_the_host_carry_the_fin() {
    let (world, listener) = (World::new(), listener());
    let (mut guest, mut host) = world.pair(&listener);
    let before = segments(&world);
    world.while_held(|| {
        host.write_all(b"pong").unwrap();
        host.shutdown(Shutdown::Write).unwrap();
        until_fin_has_arrived(&host);
    });
    let mut bytes = Vec::new();
    guest.read_to_end(&mut bytes).unwrap();
    assert_eq!((bytes, segments(&world) - before), (b"pong".to_vec(), 1));
}

fn ipv6_is_carried_as_ipv4_is() {
    let (world, listener) = (World::new(), TcpListener::bind((HOST_V6, 0)).unwrap());
    let (mut guest, mut host) = world.pair(&listener);
    exchange(&mut guest, &mut host);
}

fn what_the_host_refuses_the_guest_sees_refused() {
    let (world, listener) = (World::new(), listener());
    let to = listener.local_addr().unwrap();
    drop(listener);
    let error = world.connect(to).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
    assert_eq!(world.stat().totals.refusals.value(Refusal::Refused), 1);
}

fn without_a_route_the_guest_hears_of_it() {
    let world = World::new();
    for to in ["203.0.113.1:80", "[2001:db8:ffff::1]:80"] {
        let error = world.connect(to.parse().unwrap()).unwrap_err();
        let errno = error.raw_os_error();
        assert!(matches!(errno, Some(libc::ENETUNREACH | libc::EHOSTUNREACH)), "{to}: {error}");
    }
    assert_eq!(world.stat().totals.refusals.value(Refusal::Unreachable), 2);
}

fn the_loopback_of_the_host_is_reached_by_its_name_alone() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let named = World::with(65520, |c| c.mapping.host_loopback.push(ip(ROUTER)));
    let mut guest = named.connect(SocketAddr::new(ip(ROUTER), port)).unwrap();
    let (mut host, _) = listener.accept().unwrap();
    exchange(&mut guest, &mut host);
    let unnamed = World::new();
    let error = unnamed.connect(SocketAddr::new(ip(ROUTER), port)).unwrap_err();
    assert!(error.kind() != ErrorKind::TimedOut, "{error}");
}

/// Sends bytes that its seed makes and ends the stream; their digest.
pub fn send_all(mut stream: &TcpStream, seed: u32, bytes: usize) -> Vec<u8> {
    let (mut digest, mut state) = (Sha256::new(), seed);
    let mut buffer = vec![0; 200_000];
    let mut left = bytes;
    while left > 0 {
        for word in buffer.chunks_exact_mut(4) {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            word.copy_from_slice(&state.to_le_bytes());
        }
        let n = left.min(buffer.len());
        stream.write_all(&buffer[..n]).unwrap();
        digest.update(&buffer[..n]);
        left -= n;
    }
    stream.shutdown(Shutdown::Write).unwrap();
    digest.finalize().to_vec()
}

/// One read, again if a signal ends it.
pub fn read_some(stream: &mut impl Read, buffer: &mut [u8]) -> io::Result<usize> {
    loop {
        match stream.read(buffer) {
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            done => return done,
        }
    }
}

pub fn receive_all(mut stream: &TcpStream) -> (Vec<u8>, usize) {
    let (mut digest, mut bytes) = (Sha256::new(), 0);
    let mut buffer = vec![0; 150_000];
    loop {
        let n = read_some(&mut stream, &mut buffer).unwrap();
        if n == 0 {
            return (digest.finalize().to_vec(), bytes);
        }
        digest.update(&buffer[..n]);
        bytes += n;
    }
}

fn a_hundred_megabytes_arrive_unchanged_both_ways_at_once() {
    const BYTES: usize = 100_000_000;
    for mtu in [1500, 65520] {
        let (world, listener) = (World::with(mtu, |_| ()), listener());
        let (guest, host) = world.pair(&listener);
        std::thread::scope(|scope| {
            let sent = [
                scope.spawn(|| send_all(&guest, 1, BYTES)),
                scope.spawn(|| send_all(&host, 2, BYTES)),
            ];
            let came = [scope.spawn(|| receive_all(&host)), scope.spawn(|| receive_all(&guest))];
            let sent = sent.map(|t| t.join().unwrap());
            let came = came.map(|t| t.join().unwrap());
            for (sent, (came, bytes)) in sent.into_iter().zip(came) {
                assert_eq!((bytes, came), (BYTES, sent));
            }
        });
        world.until("the flow is over", |s| s.flows.is_empty());
    }
}

fn a_stream_that_ended_leaves_the_other_one_open() {
    let (world, listener) = (World::new(), listener());
    let (mut guest, mut host) = world.pair(&listener);
    guest.write_all(b"last").unwrap();
    guest.shutdown(Shutdown::Write).unwrap();
    let mut all = Vec::new();
    host.read_to_end(&mut all).unwrap();
    assert_eq!(all, b"last");
    world.until("half-closed", |s| s.flows[0].state == "half-closed");
    host.write_all(b"answer").unwrap();
    host.shutdown(Shutdown::Write).unwrap();
    all.clear();
    guest.read_to_end(&mut all).unwrap();
    assert_eq!(all, b"answer");
    world.until("the flow is over", |s| s.flows.is_empty());
    let (mut guest, mut host) = world.pair(&listener);
    host.write_all(b"last").unwrap();
    host.shutdown(Shutdown::Write).unwrap();
    let mut all = Vec::new();
    guest.read_to_end(&mut all).unwrap();
    assert_eq!(all, b"last");
    guest.write_all(b"answer").unwrap();
    drop(guest);
    all.clear();
    host.read_to_end(&mut all).unwrap();
    assert_eq!(all, b"answer");
}

fn reset(stream: TcpStream) {
    setsockopt(&stream, sockopt::Linger, &libc::linger { l_onoff: 1, l_linger: 0 }).unwrap();
}

fn urgent_data_of_the_host_stays_in_the_stream() {
    let (world, listener) = (World::new(), listener());
    let (mut guest, host) = world.pair(&listener);
    for round in 0..20 {
        // All of it has come before the gateway reads.
        world.while_held(|| {
            for (bytes, flags) in [("before", 0), ("!", libc::MSG_OOB), ("behind", 0)] {
                let flags = MsgFlags::from_bits_retain(flags);
                assert_eq!(send(host.as_raw_fd(), bytes.as_bytes(), flags), Ok(bytes.len()));
            }
        });
        let mut bytes = [0; 13];
        guest.read_exact(&mut bytes).unwrap();
        assert_eq!(&bytes, b"before!behind", "{round}");
    }
}

fn a_half_closed_flow_ends_once_the_guest_has_forgotten_it() {
    let limits = Limits { half_closed_idle: Duration::from_millis(500), ..Limits::default() };
    let (world, listener) = (World::with(65520, |c| c.limits = limits), listener());
    // How long the guest's kernel knows a connection whose program has closed it.
    let timeout = "/proc/sys/net/ipv4/tcp_fin_timeout";
    world.guest.run(|| std::fs::write(timeout, "1")).unwrap();
    let (closed, host) = world.pair(&listener);
    let (mut half_closed, mut other) = world.pair(&listener);
    half_closed.shutdown(Shutdown::Write).unwrap();
    drop(closed);
    world.until("the forgotten flow is over", |s| s.flows.len() == 1);
    // The other one is known, and goes on for as long as its ends want.
    other.write_all(b"late").unwrap();
    let mut bytes = [0; 4];
    half_closed.read_exact(&mut bytes).unwrap();
    assert_eq!(&bytes, b"late");
    drop((host, half_closed));
}

fn a_reset_of_the_guest_reaches_the_host() {
    let (world, listener) = (World::new(), listener());
    let (mut guest, mut host) = world.pair(&listener);
    exchange(&mut guest, &mut host);
    reset(guest);
    let error = read_some(&mut host, &mut [0]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    world.until("the flow is over", |s| s.flows.is_empty());
}

fn a_reset_of_the_host_reaches_the_guest() {
    let (world, listener) = (World::new(), listener());
    let (mut guest, mut host) = world.pair(&listener);
    exchange(&mut guest, &mut host);
    reset(host);
    let error = read_some(&mut guest, &mut [0]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    world.until("the flow is over", |s| s.flows.is_empty());
}

/// Writes until nothing is taken for a while; the bytes.
fn write_until_full(stream: &mut TcpStream) -> io::Result<usize> {
    stream.set_write_timeout(Some(Duration::from_millis(500)))?;
    let (buffer, mut bytes) = (vec![7; 1 << 20], 0);
    loop {
        match stream.write(&buffer) {
            Ok(n) => bytes += n,
            Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(bytes),
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
}

fn read_exactly(stream: &mut TcpStream, bytes: usize) {
    let (mut buffer, mut left) = (vec![0; 1 << 16], bytes);
    while left > 0 {
        let most = left.min(buffer.len());
        let n = read_some(stream, &mut buffer[..most]).unwrap();
        assert!(n > 0 && buffer[..n].iter().all(|b| *b == 7));
        left -= n;
    }
}

fn a_reader_that_never_reads_stops_its_writer_and_nobody_else() {
    let (world, listener) = (World::new(), listener());
    let (mut guest, mut host) = world.pair(&listener);
    let (mut other_guest, mut other_host) = world.pair(&listener);
    let out = write_until_full(&mut guest).unwrap();
    let back = write_until_full(&mut host).unwrap();
    assert!(out < 64 << 20 && back < 64 << 20, "{out} {back}");
    exchange(&mut other_guest, &mut other_host);
    read_exactly(&mut host, out);
    read_exactly(&mut guest, back);
    exchange(&mut guest, &mut host);
}

fn two_thousand_idle_flows_cost_little() {
    const FLOWS: usize = 2000;
    let (world, listener) = (World::new(), listener());
    let mut flows: Vec<_> = (0..FLOWS).map(|_| world.pair(&listener)).collect();
    let stat = world.stat();
    assert_eq!(stat.flows.len(), FLOWS);
    assert!(stat.stack.pool.used_bytes.iter().sum::<usize>() < 1 << 20, "{:?}", stat.stack.pool);
    for (guest, host) in flows.iter_mut().step_by(97) {
        exchange(guest, host);
    }
    drop(flows);
    world.until("all flows are over", |s| s.flows.is_empty());
}

fn a_published_port_shows_the_guest_its_client() {
    let spec: fulmar_gateway::ports::PortSpec = "8080:80".parse().unwrap();
    let world = World::with(65520, |c| c.publish.tcp = spec.forwards());
    for (at, to) in [(GUEST, crate::relay::world::HOST), (GUEST_V6, HOST_V6)] {
        let server = world.guest.run(|| TcpListener::bind((at, 80))).unwrap();
        let mut client = TcpStream::connect((to, 8080)).unwrap();
        let (mut served, from) = server.accept().unwrap();
        assert_eq!(from, client.local_addr().unwrap());
        exchange(&mut client, &mut served);
        let stat = world.stat();
        // The flow before may not be over yet.
        let flow = stat.flows.iter().find(|flow| flow.peer == from);
        assert_eq!(flow.map(|flow| flow.direction), Some(Direction::In));
    }
    // The loopback's own addresses mean nothing in the guest.
    let server = world.guest.run(|| TcpListener::bind((GUEST, 80))).unwrap();
    let _client = TcpStream::connect(("127.0.0.1", 8080)).unwrap();
    assert_eq!(server.accept().unwrap().1.ip(), ip(ROUTER));
    let published = world.stat().published;
    assert_eq!(published.len(), 1, "one for both IP versions");
    let port = &published[0];
    assert_eq!(
        (port.from.clone(), port.to, port.connections, port.refused),
        (8080..=8080, 80, 3, 0)
    );
}

fn a_published_port_where_nobody_listens_resets() {
    let spec: fulmar_gateway::ports::PortSpec = "8081".parse().unwrap();
    let world = World::with(65520, |c| c.publish.tcp = spec.forwards());
    let mut client = TcpStream::connect((crate::relay::world::HOST, 8081)).unwrap();
    assert_eq!(read_some(&mut client, &mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);
    let stat = world.stat();
    assert_eq!(stat.totals.refusals.value(Refusal::GuestRefused), 1);
    assert_eq!((stat.published[0].connections, stat.published[0].refused), (1, 1));
}

fn flows_have_a_bound() {
    let limits = Limits { tcp_flows: 2, ..Limits::default() };
    let (world, listener) = (World::with(65520, |c| c.limits = limits), listener());
    let first = world.pair(&listener);
    let _second = world.pair(&listener);
    let to = listener.local_addr().unwrap();
    let third = world.guest.run(|| TcpStream::connect_timeout(&to, Duration::from_millis(300)));
    assert_eq!(third.unwrap_err().kind(), ErrorKind::TimedOut);
    assert!(world.stat().totals.refusals.value(Refusal::FlowLimit) > 0);
    drop(first);
    world.until("a flow is over", |s| s.flows.len() == 1);
    let (mut guest, mut host) = world.pair(&listener);
    exchange(&mut guest, &mut host);
}

struct OnlyPort(u16);

impl Policy for OnlyPort {
    fn decide(&mut self, flow: &NewFlow<'_>) -> Ruling {
        if flow.to.port() == self.0 { Decision::Allow.into() } else { Decision::Deny.into() }
    }
}

fn a_policy_decides_before_anything_leaves() {
    let (allowed, denied) = (listener(), listener());
    let port = allowed.local_addr().unwrap().port();
    let world = World::with(65520, |c| c.policy = Some(Box::new(OnlyPort(port))));
    let error = world.connect(denied.local_addr().unwrap()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
    denied.set_nonblocking(true).unwrap();
    assert_eq!(denied.accept().unwrap_err().kind(), ErrorKind::WouldBlock);
    let (mut guest, mut host) = world.pair(&allowed);
    exchange(&mut guest, &mut host);
    assert_eq!(world.stat().totals.refusals.value(Refusal::Policy), 1);
}

fn the_end_of_the_gateway_resets_what_is_open() {
    let (world, listener) = (World::new(), listener());
    let (mut guest, mut host) = world.pair(&listener);
    exchange(&mut guest, &mut host);
    world.end();
    for mut stream in [guest, host] {
        assert_eq!(
            read_some(&mut stream, &mut [0]).unwrap_err().kind(),
            ErrorKind::ConnectionReset
        );
    }
}

fn what_a_guest_wrote_before_its_end_is_delivered() {
    const BYTES: usize = 300_000;
    let (mut world, listener) = (World::new(), listener());
    let (mut left, mut left_far) = world.pair(&listener);
    exchange(&mut left, &mut left_far);
    let flows: Vec<_> = (0..8).map(|_| world.pair(&listener)).collect();
    let ends = flows.into_iter().zip(1..).map(|((guest, host), seed)| {
        let sent = std::thread::spawn(move || send_all(&guest, seed, BYTES));
        (sent.join().unwrap(), host)
    });
    let ends: Vec<_> = ends.collect();
    world.end_guest();
    for (sent, host) in ends {
        assert!(receive_all(&host) == (sent, BYTES), "whole, and an end in order");
    }
    // A stream that neither side has ended is reset.
    let error = read_some(&mut left_far, &mut [0]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    world.ended();
}
