//! The devices that reach the kernel, against the kernel's own stack, in a network namespace.

mod attach;
mod flows;
mod host;

use std::io::{Read, Write};
use std::net::{TcpStream, UdpSocket};
use std::time::{Duration, Instant};

use fulmar::devices::Spec;
use fulmar::internals::drivers::packet::{PacketConfig, PacketSocket};
use fulmar::internals::drivers::tap::{Tap, TapConfig};
use fulmar_stack::base::{Counter, DropReason};
use fulmar_stack::device::{Device, LinkState};
use fulmar_stack::wire::tcp::Flags;
use fulmar_testbed::namespace::{self, ip};
use host::{Host, KERNEL, OURS, header};

const TUN: Option<&str> = Some("/dev/net/tun");

fn give_addresses(kernel_end: &str, device: &impl Device) {
    ip(&format!("addr add {KERNEL}/24 dev {kernel_end}"));
    ip(&format!("link set {kernel_end} up"));
    ip(&format!("neigh add {OURS} lladdr {} dev {kernel_end}", device.caps().ether));
}

fn tap() -> Host<Tap> {
    let tap = Tap::open(&TapConfig { name: "tap0".into(), ..TapConfig::default() }).unwrap();
    give_addresses("tap0", &tap);
    Host::new(tap, "tap0")
}

fn veth() -> Host<PacketSocket> {
    ip("link add v0 type veth peer name v1");
    ip("link set v1 up");
    ip("link set v0 up");
    let config = PacketConfig { interface: "v1".into(), ..PacketConfig::default() };
    let socket = PacketSocket::open(&config).unwrap();
    give_addresses("v0", &socket);
    Host::new(socket, "v0")
}

/// The kernel tells of a carrier a little after it came or went.
fn link_becomes(device: &impl Device, expected: LinkState) {
    let is_now = || {
        std::thread::sleep(Duration::from_millis(5));
        device.stats().link == expected
    };
    assert!((0..12_000).any(|_| is_now()), "not {expected:?} within a minute");
}

/// Frames that an interface has received and dropped.
fn dropped_before_sockets(interface: &str) -> usize {
    let all = std::fs::read_to_string("/proc/self/net/dev").unwrap();
    let is_it = |l: &&str| l.trim_start().starts_with(&format!("{interface}:"));
    let counts = all.lines().find(is_it).unwrap().split_once(':').unwrap().1;
    // Bytes, packets, errors, drops.
    counts.split_whitespace().nth(3).unwrap().parse().unwrap()
}

fn kernel_socket() -> UdpSocket {
    let socket = UdpSocket::bind((KERNEL, 0)).unwrap();
    socket.set_read_timeout(Some(host::PATIENCE)).unwrap();
    socket
}

fn receive(socket: &UdpSocket) -> Vec<u8> {
    let mut bytes = [0; 65_536];
    let n = socket.recv(&mut bytes).expect("a datagram within a minute");
    bytes[..n].to_vec()
}

fn datagrams_pass_both_ways<D: Device>(mut host: Host<D>) {
    let socket = kernel_socket();
    for bytes in [1, 18, 200, 300, 1400] {
        let payload: Vec<u8> = (0..bytes).map(|i| (i * 3) as u8).collect();
        socket.send_to(&payload, (OURS, 7)).unwrap();
        let (port, got) = host.datagram_in();
        assert_eq!(got, payload);
        let answer = host.datagram(port, &payload, None);
        host.send(answer);
        assert_eq!(receive(&socket), payload);
    }
    assert_eq!(host.counters.value(Counter::TxFrames), 5);
    assert_eq!(host.counters.total_drops(), 0);
}

fn a_burst_arrives_in_order<D: Device>(mut host: Host<D>) -> Host<D> {
    let socket = kernel_socket();
    let port = socket.local_addr().unwrap().port();
    // Each longer than the one before, so that none of them are joined.
    for i in 0..40u8 {
        let p = host.datagram(port, &vec![i; 30 + usize::from(i)], None);
        host.burst.push(p).unwrap();
    }
    host.flush(40);
    for i in 0..40u8 {
        assert_eq!(receive(&socket), vec![i; 30 + usize::from(i)]);
    }
    assert_eq!(host.counters.value(Counter::UsoJoined), 0);
    host
}

/// Sends two single frames, a run of equal datagrams with a shorter one at its end, and two datagrams to another
/// destination. All arrive as they were sent, in four crossings.
fn datagrams_of_one_flow_cross_together<D: Device>(mut host: Host<D>) -> Host<D> {
    let sockets = [kernel_socket(), kernel_socket()];
    let ports = sockets.each_ref().map(|s| s.local_addr().unwrap().port());
    let mut sent: [Vec<Vec<u8>>; 2] = Default::default();
    let run = (0..20).map(|i| (0, vec![i; 700])).chain([(0, vec![99; 1])]);
    let all = [(1, vec![1; 22]), (0, vec![2; 22])].into_iter().chain(run);
    for (to, payload) in all.chain([(1, vec![3; 22]), (1, vec![4; 22])]) {
        let p = host.datagram(ports[to], &payload, None);
        host.burst.push(p).unwrap();
        sent[to].push(payload);
    }
    host.flush(25);
    for (socket, sent) in sockets.iter().zip(sent) {
        sent.iter().for_each(|payload| assert_eq!(&receive(socket), payload));
    }
    assert_eq!(host.counters.value(Counter::UsoJoined), 20);
    assert_eq!(host.counters.value(Counter::TxFrames), 25);
    assert_eq!(host.counters.total_drops(), 0);
    host
}

fn a_udp_super_frame_arrives_as_datagrams<D: Device>(mut host: Host<D>) {
    assert!(host.device.caps().udp_gso);
    let socket = kernel_socket();
    let port = socket.local_addr().unwrap().port();
    let payload: Vec<u8> = (0..4500u32).map(|i| (i / 7) as u8).collect();
    let p = host.datagram(port, &payload, Some(1000));
    assert_eq!(p.wire_packets(), 5);
    host.send(p);
    for expected in payload.chunks(1000) {
        assert_eq!(receive(&socket), expected);
    }
}

/// Shakes hands with a kernel client, takes `up` bytes from it and gives it `down` bytes.
fn a_connection_carries_super_frames<D: Device>(mut host: Host<D>) {
    let up: Vec<u8> = (0..300_000u32).map(|i| (i / 3) as u8).collect();
    let down: Vec<u8> = (0..60_000u32).map(|i| (i / 5) as u8).collect();
    let (to_send, expected) = (up.clone(), down.clone());
    let client = std::thread::spawn(move || {
        let mut stream = TcpStream::connect((OURS, 80)).unwrap();
        stream.set_read_timeout(Some(host::PATIENCE)).unwrap();
        stream.write_all(&to_send).unwrap();
        let mut got = vec![0; expected.len()];
        stream.read_exact(&mut got).unwrap();
        assert!(got == expected);
    });
    let syn = host.segment_in().header;
    assert!(syn.flags.contains(Flags::SYN));
    let iss = fulmar_stack::base::SeqNum(1000);
    let mut answer = header(&syn, Flags::SYN.with(Flags::ACK), iss, syn.seq + 1);
    answer.options.mss = Some(1460);
    let p = host.segment(&answer, &[]);
    host.send(p);

    let first = syn.seq + 1;
    let mut got: Vec<u8> = Vec::new();
    let mut longest = 0;
    while got.len() < up.len() {
        let s = host.segment_in();
        if s.header.seq.since(first) as usize != got.len() || s.payload.is_empty() {
            host.pool.free(s.packet.chain);
            continue;
        }
        assert!(s.packet.is_checksum_trusted());
        longest = longest.max(s.packet.wire_packets());
        got.extend(&s.payload);
        host.pool.free(s.packet.chain);
        let ack = header(&syn, Flags::ACK, iss + 1, first + got.len() as u32);
        let p = host.segment(&ack, &[]);
        host.send(p);
    }
    assert!(got == up);
    // How long they are the kernel decides, by how soon it is answered.
    assert!(longest > 1, "the longest super-frame stood for {longest} packets");

    let push = header(&syn, Flags::ACK.with(Flags::PSH), iss + 1, first + got.len() as u32);
    let p = host.segment(&push, &down);
    assert_eq!(p.wire_packets(), 42);
    host.send(p);
    client.join().unwrap();
    assert_eq!(host.counters.total_drops(), 0);
}

#[test]
fn tap_datagrams_pass_both_ways() {
    namespace::run("tap_datagrams_pass_both_ways", TUN, || datagrams_pass_both_ways(tap()));
}

#[test]
fn tap_burst_arrives_in_order_in_few_crossings_where_there_is_io_uring() {
    namespace::run(
        "tap_burst_arrives_in_order_in_few_crossings_where_there_is_io_uring",
        TUN,
        || {
            let host = a_burst_arrives_in_order(tap());
            let stats = host.device.stats();
            let most = if stats.path.starts_with("io_uring") { 1 } else { 40 };
            assert_eq!(stats.tx_crossings, most, "{stats:?}");
        },
    );
}

#[test]
fn tap_burst_arrives_in_order_one_by_one() {
    namespace::run("tap_burst_arrives_in_order_one_by_one", TUN, || {
        let config = TapConfig { name: "tap0".into(), one_by_one: true, ..TapConfig::default() };
        let tap = Tap::open(&config).unwrap();
        give_addresses("tap0", &tap);
        let host = a_burst_arrives_in_order(Host::new(tap, "tap0"));
        assert_eq!(host.device.stats().tx_crossings, 40);
        assert!(host.device.stats().path.contains("as configured"));
    });
}

#[test]
fn tap_reads_bursts_in_order_in_few_crossings_where_there_is_io_uring() {
    namespace::run(
        "tap_reads_bursts_in_order_in_few_crossings_where_there_is_io_uring",
        TUN,
        || {
            let mut host = tap();
            let socket = kernel_socket();
            for round in 0..3u8 {
                for i in 0..40 {
                    socket.send_to(&[i; 30], (OURS, 7)).unwrap();
                }
                let before = host.device.stats().rx_crossings;
                for i in 0..40 {
                    assert_eq!(host.datagram_in().1, [i; 30]);
                }
                let crossings = host.device.stats().rx_crossings - before;
                let is_vector = host.device.stats().path.starts_with("io_uring");
                assert!(round == 0 || !is_vector || crossings < 20, "{crossings} crossings");
            }
            assert_eq!(host.counters.total_drops(), 0);
        },
    );
}

#[test]
fn tap_that_was_dropped_can_be_opened_again_at_once() {
    namespace::run("tap_that_was_dropped_can_be_opened_again_at_once", TUN, || {
        for _ in 0..20 {
            let config = TapConfig { name: "tap0".into(), ..TapConfig::default() };
            let mut host = Host::new(Tap::open(&config).unwrap(), "tap0");
            ip("link set tap0 up");
            for _ in 0..8 {
                let p = host.datagram(9, &[0; 10], None);
                host.burst.push(p).unwrap();
            }
            host.flush(8);
        }
    });
}

#[test]
fn tap_udp_super_frame_arrives_as_datagrams() {
    namespace::run("tap_udp_super_frame_arrives_as_datagrams", TUN, || {
        a_udp_super_frame_arrives_as_datagrams(tap());
    });
}

#[test]
fn tap_datagrams_of_one_flow_cross_together() {
    namespace::run("tap_datagrams_of_one_flow_cross_together", TUN, || {
        let host = datagrams_of_one_flow_cross_together(tap());
        // The run is one; what is around it goes by itself.
        assert_eq!(host.device.stats().tx_crossings, 5);
        assert_eq!(host.pool.outstanding(), 0);
    });
}

#[test]
fn tap_that_is_down_drops_joined_datagrams_and_joins_again_when_it_is_up() {
    let name = "tap_that_is_down_drops_joined_datagrams_and_joins_again_when_it_is_up";
    namespace::run(name, TUN, || {
        let mut host = tap();
        ip("link set tap0 down");
        for _ in 0..10 {
            let p = host.datagram(9, &[7; 22], None);
            host.burst.push(p).unwrap();
        }
        host.flush(10);
        assert_eq!(host.counters.value(Counter::UsoJoined), 0);
        assert_eq!(host.counters.drops(DropReason::DeviceRefused), 10);
        assert_eq!(host.pool.outstanding(), 0);
        ip("link set tap0 up");
        ip(&format!("neigh replace {OURS} lladdr {} dev tap0", host.device.caps().ether));
        let socket = kernel_socket();
        let port = socket.local_addr().unwrap().port();
        for _ in 0..10 {
            let p = host.datagram(port, &[7; 22], None);
            host.burst.push(p).unwrap();
        }
        host.flush(10);
        (0..10).for_each(|_| assert_eq!(receive(&socket), [7; 22]));
        assert_eq!(host.counters.value(Counter::UsoJoined), 9);
    });
}

#[test]
fn tap_connection_carries_super_frames() {
    namespace::run("tap_connection_carries_super_frames", TUN, || {
        a_connection_carries_super_frames(tap());
    });
}

#[test]
fn tap_that_is_down_or_removed_says_so() {
    namespace::run("tap_that_is_down_or_removed_says_so", TUN, || {
        let mut host = tap();
        link_becomes(&host.device, LinkState::Up);
        ip("link set tap0 down");
        link_becomes(&host.device, LinkState::Down);
        let p = host.datagram(9, &[0; 10], None);
        host.send(p);
        assert_eq!(host.counters.drops(DropReason::DeviceRefused), 1);
        ip("link del tap0");
        let p = host.datagram(9, &[0; 10], None);
        host.send(p);
        assert!(host.device.lost().is_some());
        assert_eq!(host.counters.drops(DropReason::DeviceGone), 1);
    });
}

#[test]
fn tap_held_by_another_is_refused_with_advice() {
    namespace::run("tap_held_by_another_is_refused_with_advice", TUN, || {
        let _first = tap();
        let again = Tap::open(&TapConfig { name: "tap0".into(), ..TapConfig::default() });
        let text = again.expect_err("the interface is taken").to_string();
        assert!(text.contains("tap0") && text.contains("another program is attached"), "{text}");
    });
}

#[test]
fn tap_works_from_a_descriptor_that_was_handed_over() {
    namespace::run("tap_works_from_a_descriptor_that_was_handed_over", TUN, || {
        let opened = tap();
        let ether = opened.device.caps().ether;
        let fd = opened.device.into_fd();
        let tap = Tap::from_fd(fd, &TapConfig::default()).unwrap();
        assert_eq!((tap.name(), tap.caps().ether), ("tap0", ether));
        datagrams_pass_both_ways(Host::new(tap, "tap0"));
        let null = std::fs::File::open("/dev/null").unwrap();
        let text = Tap::from_fd(null.into(), &TapConfig::default()).err().unwrap().to_string();
        assert!(text.contains("IFF_VNET_HDR"), "{text}");
    });
}

#[test]
fn packet_datagrams_pass_both_ways() {
    namespace::run("packet_datagrams_pass_both_ways", None, || datagrams_pass_both_ways(veth()));
}

#[test]
fn packet_burst_arrives_in_order_in_few_crossings() {
    namespace::run("packet_burst_arrives_in_order_in_few_crossings", None, || {
        let host = a_burst_arrives_in_order(veth());
        assert!(host.device.stats().tx_crossings <= 3, "{:?}", host.device.stats());
    });
}

#[test]
fn packet_udp_super_frame_arrives_as_datagrams() {
    namespace::run("packet_udp_super_frame_arrives_as_datagrams", None, || {
        a_udp_super_frame_arrives_as_datagrams(veth());
    });
}

#[test]
fn packet_datagrams_of_one_flow_cross_together() {
    namespace::run("packet_datagrams_of_one_flow_cross_together", None, || {
        let host = datagrams_of_one_flow_cross_together(veth());
        assert_eq!(host.device.stats().tx_crossings, 3);
    });
}

#[test]
fn packet_connection_carries_super_frames() {
    namespace::run("packet_connection_carries_super_frames", None, || {
        a_connection_carries_super_frames(veth());
    });
}

#[test]
fn packet_receives_only_frames_for_its_own_station() {
    namespace::run("packet_receives_only_frames_for_its_own_station", None, || {
        let mut host = veth();
        let socket = kernel_socket();
        ip("neigh add 10.9.0.3 lladdr 02:00:00:00:00:33 dev v0");
        socket.send_to(b"not for us", ("10.9.0.3", 7)).unwrap();
        socket.send_to(b"for us", (OURS, 7)).unwrap();
        let ours = host.device.caps().ether;
        let first = host.wait_for(|p| {
            let dst: [u8; 6] = p.chain.to_vec()[..6].try_into().unwrap();
            (dst[0] & 1 == 0).then_some(dst)
        });
        assert_eq!(first, ours.0);
    });
}

#[test]
fn packet_receives_no_vlan_frames() {
    namespace::run("packet_receives_no_vlan_frames", None, || {
        let mut host = veth();
        let config = PacketConfig { interface: "v0".into(), ..PacketConfig::default() };
        let mut far = Host::new(PacketSocket::open(&config).unwrap(), "v1");
        let ours = host.device.caps().ether;
        // VLAN 7, a priority without a VLAN (802.1Q), no tag.
        for (serial, tag) in
            [&[0x81, 0x00, 0x00, 7][..], &[0x81, 0x00, 0xe0, 0], &[]].iter().enumerate()
        {
            let link = [&ours.0[..], &[2, 0, 0, 0, 0, 9], tag, &[0x88, 0xb5]].concat();
            far.send_bytes(&[&link[..], &[serial as u8; 60]].concat());
        }
        let mut came = Vec::new();
        while came.last() != Some(&2) {
            came.push(host.wait_for(|p| {
                let frame = p.chain.to_vec();
                (frame[..6] == ours.0 && frame[12..14] == [0x88, 0xb5]).then_some(frame[14])
            }));
        }
        assert_eq!(came, [1, 2]);
    });
}

#[test]
fn packet_counts_frames_that_overflow_its_socket() {
    namespace::run("packet_counts_frames_that_overflow_its_socket", None, || {
        const SENT: usize = 40_000;
        let mut host = veth();
        let socket = kernel_socket();
        for _ in 0..SENT {
            socket.send_to(&[5; 200], (OURS, 7)).unwrap();
        }
        let missed = |host: &Host<PacketSocket>| host.device.stats().rx_missed as usize;
        let at_first = missed(&host);
        assert!(at_first > 0);
        let (mut received, start) = (0, Instant::now());
        // Where its softirq falls behind, the kernel drops frames before they come to a socket.
        while received + missed(&host) + dropped_before_sockets("v1") < SENT {
            received += host.datagrams_in();
            assert!(start.elapsed() < host::PATIENCE, "{received} came, {} missed", missed(&host));
        }
        assert!(missed(&host) >= at_first, "the kernel counts anew at each look");
    });
}

#[test]
fn packet_link_follows_the_interface() {
    namespace::run("packet_link_follows_the_interface", None, || {
        let mut host = veth();
        link_becomes(&host.device, LinkState::Up);
        ip("link set v1 down");
        link_becomes(&host.device, LinkState::Down);
        let p = host.datagram(9, &[0; 10], None);
        host.send(p);
        assert_eq!(host.counters.drops(DropReason::DeviceRefused), 1);
        host.poll();
        assert_eq!(host.device.lost(), None, "it may come up again");
        ip("link set v1 up");
        link_becomes(&host.device, LinkState::Up);
        ip("link del v0");
        host.poll();
        assert_eq!(host.device.lost(), Some(libc::ENODEV));
        assert_eq!(host.device.stats().link, LinkState::Down);
    });
}

#[test]
fn an_interface_by_its_plain_name_serves_one_program() {
    namespace::run("an_interface_by_its_plain_name_serves_one_program", None, || {
        let _host = veth();
        let open = |name: &str, queues| name.parse::<Spec>().unwrap().open(queues);
        let first = open("v0", 2).unwrap();
        let refused = open("v0", 1).err().expect("it is taken");
        assert_eq!(refused.source.kind(), std::io::ErrorKind::ResourceBusy);
        assert!(refused.to_string().contains("open `packet:v0`"), "{refused}");
        open("packet:v0", 1).unwrap();
        drop(first);
        open("v0", 1).unwrap();
    });
}

#[test]
fn packet_on_a_missing_interface_is_refused_with_advice() {
    namespace::run("packet_on_a_missing_interface_is_refused_with_advice", None, || {
        let config = PacketConfig { interface: "none0".into(), ..PacketConfig::default() };
        let text = PacketSocket::open(&config).expect_err("there is no such interface").to_string();
        assert!(text.contains("none0") && text.contains("ip -o link"), "{text}");
    });
}
