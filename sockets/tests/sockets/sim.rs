//! A stack on a simulated NIC that is connected to the modelled peer, through the public API.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::SocketAddr;
use std::time::Duration;

use fulmar::device::Device;
use fulmar::device::EtherAddr;
use fulmar::devices::Impairments;
use fulmar::stat::Counter;
use fulmar::tcp::TcpConfig;
use fulmar::zero_copy::{RecvBuf, ZeroCopy};
use fulmar::{Stack, TcpListener, TcpStream, UdpSocket, devices};
use fulmar_nic::{
    Coalesce, Command, FarEnd, HardwareThread, Service, SimConfig, SimHandle, pattern,
};

fn build(device: Box<dyn Device>, host: u8, tcp: TcpConfig) -> Stack {
    Stack::builder()
        .device(device)
        .address(format!("10.9.0.{host}/24").parse().unwrap())
        .address(format!("fd09::{host}/64").parse().unwrap())
        .tcp(tcp)
        .unlisted()
        .build()
        .unwrap()
}

/// Over a path that loses nothing: no time-out repeats anything, however long a thread is kept from running.
fn stack(config: SimConfig) -> (Stack, SimHandle) {
    let (device, handle) = fulmar_nic::open(config).unwrap();
    let rto = Duration::from_secs(600);
    let tcp = TcpConfig { min_rto: rto, max_rto: rto, ..TcpConfig::default() };
    (build(device, 1, tcp), handle)
}

fn send(stack: &Stack, to: &str, total: usize) {
    let mut c = TcpStream::connect(stack, to).unwrap();
    let mut buf = vec![0; 128 << 10];
    let mut at = 0;
    while at < total {
        let n = buf.len().min(total - at);
        pattern::fill(at as u64, &mut buf[..n]);
        c.write_all(&buf[..n]).unwrap();
        at += n;
    }
    c.shutdown(std::net::Shutdown::Write).unwrap();
    assert_eq!(c.read(&mut [0; 1]).unwrap(), 0);
}

/// Reads to the end; returns how many bytes came, all of them right.
fn receive(c: &mut TcpStream) -> usize {
    let mut buf = vec![0; 256 << 10];
    let mut at = 0;
    loop {
        let n = c.read(&mut buf).unwrap();
        if n == 0 {
            return at;
        }
        assert_eq!(pattern::wrong_bytes(at as u64, &buf[..n]), 0, "after {at}");
        at += n;
    }
}

/// The peer repeats a segment of what is not acknowledged for a while, as when this thread does not run;
/// it would repeat far more if the NIC had dropped frames.
fn assert_nothing_lost(handle: &SimHandle, total: usize) {
    let resent = handle.counts().peer_resent_bytes;
    assert!(resent < total as u64 / 16, "{resent} bytes were sent again");
}

/// Every way in which a NIC can be set up that changes what the stack does.
fn kinds() -> Vec<(&'static str, SimConfig)> {
    let own = HardwareThread::Own { cpu: None };
    let small = SimConfig { tx_descriptors: 128, rx_buffers: 4, ..SimConfig::default() };
    let pages = SimConfig { rx_buffers: 64, rx_buffer_bytes: 2048, ..SimConfig::default() };
    let ten_gigabit = SimConfig { line_rate_bps: 10_000_000_000, ..SimConfig::default() };
    let coalesced = SimConfig {
        rx_coalesce: Coalesce { packets: 16, delay: Duration::from_micros(100) },
        delay: Duration::from_micros(20),
        ..ten_gigabit.clone()
    };
    vec![
        ("plain", SimConfig::default()),
        ("without offloads", SimConfig::default().without_offloads()),
        ("checksums only", SimConfig { tso: None, lro: None, ..SimConfig::default() }),
        ("small rings", small),
        ("pages", pages),
        ("10 Gb/s", ten_gigabit),
        ("coalesced", coalesced),
        ("own thread", SimConfig { hardware: own, ..SimConfig::default() }),
    ]
}

fn with_verify(config: SimConfig) -> SimConfig {
    SimConfig { far_end: FarEnd { verify: true, ..config.far_end }, ..config }
}

#[test]
fn the_peer_takes_every_byte_in_every_mode() {
    const TOTAL: usize = 16 << 20;
    for (name, config) in kinds() {
        println!("{name}");
        let (stack, handle) = stack(with_verify(config));
        send(&stack, "10.9.0.2:9", TOTAL);
        let c = handle.counts();
        assert_eq!((c.peer_bytes_in, c.peer_wrong_bytes), (TOTAL as u64, 0), "{name}");
        // A tail loss probe, as when a thread of the NIC does not run for a while.
        assert!(c.peer_repeated_bytes_in < TOTAL as u64 / 16, "{name}");
        assert_eq!((c.peer_odd_frames, c.rx_missed), (0, 0), "{name}");
    }
}

#[test]
fn the_peer_generates_every_byte_in_every_mode() {
    const TOTAL: usize = 16 << 20;
    for (name, config) in kinds() {
        println!("{name}");
        let mut config = with_verify(config);
        config.far_end.services = vec![(0..=65535, Service::Generate { bytes: TOTAL as u64 })];
        let (stack, handle) = stack(config);
        let mut c = TcpStream::connect(&stack, "10.9.0.2:19").unwrap();
        assert_eq!(receive(&mut c), TOTAL, "{name}");
        assert_nothing_lost(&handle, TOTAL);
    }
}

#[test]
fn two_stacks_exchange_data_over_a_wire_in_every_mode() {
    const TOTAL: usize = 8 << 20;
    for (name, config) in kinds() {
        println!("{name}");
        let other = SimConfig { ether: EtherAddr([2, 0, 0, 0, 0, 0x52]), ..config.clone() };
        let [(a, _), (b, _)] = fulmar_nic::pair(config, other).unwrap();
        let (a, b) = (
            build(Box::new(a), 1, TcpConfig::default()),
            build(Box::new(b), 2, TcpConfig::default()),
        );
        let listener = TcpListener::bind(&b, "10.9.0.2:9").unwrap();
        let reader = std::thread::spawn(move || receive(&mut listener.accept().unwrap().0));
        send(&a, "10.9.0.2:9", TOTAL);
        assert_eq!(reader.join().unwrap(), TOTAL, "{name}");
    }
}

#[test]
fn a_bad_path_to_the_peer_costs_time_but_no_byte() {
    const TOTAL: usize = 4 << 20;
    let bad = Impairments {
        loss: 0.01,
        duplicate: 0.005,
        reorder: 0.01,
        reorder_pkts: 4,
        cut: 1.0,
        ..Impairments::default()
    };
    let none = Impairments::default();
    let (device, handle) = fulmar_nic::open(with_verify(SimConfig::default())).unwrap();
    let stack = build(devices::impaired(device, 7, &bad, &none), 1, TcpConfig::default());
    send(&stack, "10.9.0.2:9", TOTAL);
    let c = handle.counts();
    assert_eq!((c.peer_bytes_in, c.peer_wrong_bytes), (TOTAL as u64, 0));
    assert!(c.peer_duplicate_acks_out > 0, "nothing was lost: the test tests nothing");

    let mut config = with_verify(SimConfig::default());
    config.far_end.services = vec![(0..=65535, Service::Generate { bytes: TOTAL as u64 })];
    let (device, handle) = fulmar_nic::open(config).unwrap();
    let stack = build(devices::impaired(device, 8, &bad, &bad), 1, TcpConfig::default());
    let mut c = TcpStream::connect(&stack, "10.9.0.2:19").unwrap();
    assert_eq!(receive(&mut c), TOTAL);
    assert!(handle.counts().peer_resent_bytes > 0, "nothing was lost: the test tests nothing");
}

#[test]
fn the_peer_opens_connections_and_answers_requests() {
    let (stack, handle) = stack(with_verify(SimConfig::default()));
    let listener = TcpListener::bind(&stack, "10.9.0.1:80").unwrap();
    for _ in 0..3 {
        let (from, to) = ("10.9.0.7:5000".parse().unwrap(), "10.9.0.1:80".parse().unwrap());
        let service = Service::Respond { request: 10, response: 1000 };
        handle.ask(Command::Connect { from, to, service }).unwrap();
        let (mut c, who) = listener.accept().unwrap();
        assert_eq!(who, from);
        let mut sent = 0;
        for i in 0..100u64 {
            let mut request = [0; 10];
            pattern::fill(10 * i, &mut request);
            c.write_all(&request).unwrap();
            let mut answer = [0; 1000];
            c.read_exact(&mut answer).unwrap();
            assert_eq!(pattern::wrong_bytes(1000 * i, &answer), 0);
            sent += request.len();
        }
        c.shutdown(std::net::Shutdown::Write).unwrap();
        assert_eq!((c.read(&mut [0; 1]).unwrap(), sent), (0, 1000));
    }
    assert_eq!(handle.counts().peer_wrong_bytes, 0);
    assert_eq!(handle.counts().peer_connections, 3);
}

#[test]
fn datagrams_go_both_ways() {
    let (stack, handle) = stack(SimConfig::default());
    for (own, peer) in [("10.9.0.1:53", "10.9.0.2:7"), ("[fd09::1]:53", "[fd09::2]:7")] {
        let socket = UdpSocket::bind(&stack, own).unwrap();
        let peer: SocketAddr = peer.parse().unwrap();
        let before = handle.counts();
        for _ in 0..10 {
            socket.send_to(&[1; 100], peer).unwrap();
        }
        // The first waits until the neighbour is known, and is sent from a later call.
        let to = socket.local_addr().unwrap();
        handle.ask(Command::Datagrams { from: peer, to, bytes: 200, count: 50 }).unwrap();
        let mut buf = [0; 300];
        for _ in 0..50 {
            assert_eq!(socket.recv_from(&mut buf).unwrap(), (200, peer));
        }
        let after = handle.counts();
        assert_eq!(after.peer_datagrams_in - before.peer_datagrams_in, 10);
        assert_eq!(after.peer_datagram_bytes_in - before.peer_datagram_bytes_in, 1000);
    }
}

#[test]
fn a_flow_of_datagrams_bears_marks_and_times() {
    let own = HardwareThread::Own { cpu: None };
    for hardware in [HardwareThread::Inline, own] {
        let (stack, handle) = stack(SimConfig { hardware, ..SimConfig::default() });
        let socket = UdpSocket::bind(&stack, "10.9.0.1:53").unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
        let (from, to) = ("10.9.0.2:7".parse().unwrap(), socket.local_addr().unwrap());
        // More than there are receive buffers: those that were emptied are used again.
        let time = Duration::from_millis(50);
        handle.ask(Command::Flow { from, to, bytes: 64, pps: 10_000, time, mark: 77 }).unwrap();
        let mut before = None;
        for n in 0..500 {
            let mut buf = [0; 100];
            assert_eq!(socket.recv_from(&mut buf).unwrap(), (64, from), "datagram {n}");
            let word = |at: usize| u64::from_ne_bytes(buf[at..at + 8].try_into().unwrap());
            assert_eq!(word(0), 77);
            // Every tenth of a millisecond, whenever they are taken.
            assert_eq!(before.map_or(100_000, |b| word(8) - b), 100_000);
            before = Some(word(8));
        }
        assert_eq!(handle.counts().peer_datagrams_out, 500);
    }
}

/// Requests `total` bytes and receives them into buffers that were posted before.
fn receive_posted(c: &mut TcpStream, total: usize, buffer: usize) {
    let post = |c: &TcpStream, buf: RecvBuf| c.recv_posted(buf).unwrap();
    let mut posted: VecDeque<_> = (0..2).map(|_| post(c, RecvBuf::with_capacity(buffer))).collect();
    let mut request = [0; 10];
    pattern::fill(0, &mut request);
    c.write_all(&request).unwrap();
    let mut at = 0;
    while at < total {
        let buf = posted.pop_front().unwrap().wait().unwrap();
        assert_eq!(pattern::wrong_bytes(at as u64, &buf), 0, "behind byte {at}");
        at += buf.len();
        posted.push_back(post(c, buf));
    }
    assert_eq!(at, total);
}

#[test]
fn the_hardware_places_what_the_peer_sends_with_and_without_aggregation() {
    const TOTAL: usize = 16 << 20;
    for (placement, aggregates) in [(true, true), (true, false), (false, true), (false, false)] {
        for buffer in [64 << 10, 1 << 20] {
            let mut config = with_verify(SimConfig { placement, ..SimConfig::default() });
            config.lro = config.lro.filter(|_| aggregates);
            let service = Service::Respond { request: 10, response: TOTAL as u32 };
            config.far_end.services = vec![(0..=65535, service)];
            let (stack, handle) = stack(config);
            let mut c = TcpStream::connect(&stack, "10.9.0.2:19").unwrap();
            receive_posted(&mut c, TOTAL, buffer);
            let counts = handle.counts();
            let counters = stack.stat().unwrap().shard.counters;
            let placed = counters.value(Counter::PlacedBytes) as usize;
            println!(
                "placement {placement}, aggregation {aggregates}, 2 x {buffer}: {placed} bytes \
                 placed in {} frames, {} frames not, {} bytes copied, {} pods for {} buffers",
                counters.value(Counter::PlacedFrames),
                counters.value(Counter::PlaceMisses),
                counters.value(Counter::CopiedBytes),
                counts.pods,
                counts.registrations,
            );
            assert_nothing_lost(&handle, TOTAL);
            assert!(if placement { placed > 0 } else { placed == 0 });
            assert_eq!(counts.registrations, if placement { 2 } else { 0 });
            let pods = 2 * (buffer as u64 / 4096).div_ceil(4);
            assert!(!placement || counts.pods >= pods, "{} pods", counts.pods);
        }
    }
}
