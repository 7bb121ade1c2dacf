//! Guests that misbehave, hosts that vanish, descriptors that run out, faults of the gateway itself: what is harmed,
//! and what goes on.

use std::fs::File;
use std::io::{ErrorKind, Write};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsRawFd, OwnedFd};

use caps::{CapSet, Capability};
use fulmar_gateway::attach::Target;
use fulmar_gateway::config::{BindAddresses, Limits};
use fulmar_gateway::policy::{Decision, NewFlow, Policy, Protocol, Ruling};
use fulmar_gateway::ports::{Bind, Forward, PortSpec};
use fulmar_gateway::stat::{Refusal, Stat};
use fulmar_gateway::{Config, Gateway};
use fulmar_stack::base::{Counter, DropReason};
use nix::errno::Errno;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, SockaddrStorage, bind, connect, listen, socket,
};

use crate::relay::Test;
use crate::relay::change::Outside;
use crate::relay::raw::Raw;
use crate::relay::tcp::{exchange, read_some};
use crate::relay::udp::{bound, guest_to, receive};
use crate::relay::world::{GUEST, HOST, HOST_V6, PATIENCE, World, bare_config, ip, listener};

pub const TESTS: &[Test] = &[
    ("a_fault_resets_both_sides_of_what_is_open", a_fault_resets_both_sides_of_what_is_open),
    (
        "without_descriptors_new_flows_wait_and_open_ones_go_on",
        without_descriptors_new_flows_wait_and_open_ones_go_on,
    ),
    (
        "without_descriptors_a_flow_of_datagrams_gives_way_to_the_next",
        without_descriptors_a_flow_of_datagrams_gives_way_to_the_next,
    ),
    (
        "fifty_thousand_connections_that_nobody_finishes_stay_within_the_bounds",
        fifty_thousand_connections_that_nobody_finishes_stay_within_the_bounds,
    ),
    (
        "open_connections_beyond_the_bound_are_refused_and_leave_the_others_alone",
        open_connections_beyond_the_bound_are_refused,
    ),
    ("garbage_of_a_guest_leaves_a_flow_in_peace", garbage_of_a_guest_leaves_a_flow_in_peace),
    ("a_host_that_vanished_is_a_reset_for_the_guest", a_host_that_vanished_is_a_reset),
    ("a_port_that_cannot_be_bound_is_refused", a_port_that_cannot_be_bound_is_refused),
    (
        "a_port_that_one_ip_version_has_is_published_at_the_other_if_it_is_optional",
        a_port_that_one_ip_version_has_is_published_at_the_other_if_it_is_optional,
    ),
    ("a_namespace_of_another_user_is_refused", a_namespace_of_another_user_is_refused),
];

/// Panics when asked about a port.
struct Trap(u16);

impl Policy for Trap {
    fn decide(&mut self, flow: &NewFlow<'_>) -> Ruling {
        assert!(flow.to.port() != self.0, "the trap of this test");
        Decision::Allow.into()
    }
}

fn is_reset(stream: &mut TcpStream) -> bool {
    let error = read_some(stream, &mut [0]).expect_err("no end in order");
    error.kind() == ErrorKind::ConnectionReset
}

pub fn a_fault_resets_both_sides_of_what_is_open() {
    let listener = listener();
    let world = World::with(65520, |c| c.policy = Some(Box::new(Trap(9))));
    let mut flows: Vec<_> = (0..3).map(|_| world.pair(&listener)).collect();
    for (guest, host) in &mut flows {
        exchange(guest, host);
    }
    let trap = world.begin_connection((HOST, 9));
    let fault = world.fault();
    assert!(fault.contains("the trap of this test"), "{fault}");
    for (guest, host) in &mut flows {
        assert!(is_reset(host), "a host must not take half a stream for a whole one");
        assert!(is_reset(guest));
    }
    drop(trap);
}

/// Takes every descriptor that the limit leaves, until it is dropped.
struct NoDescriptors {
    limit: (u64, u64),
    taken: Vec<File>,
}

impl NoDescriptors {
    fn new() -> NoDescriptors {
        let limit = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
        let highest = File::open("/dev/null").unwrap().as_raw_fd() as u64;
        setrlimit(Resource::RLIMIT_NOFILE, highest + 64, limit.1).unwrap();
        let mut taken = Vec::new();
        while let Ok(file) = File::open("/dev/null") {
            taken.push(file);
        }
        NoDescriptors { limit, taken }
    }
}

impl Drop for NoDescriptors {
    fn drop(&mut self) {
        self.taken.clear();
        setrlimit(Resource::RLIMIT_NOFILE, self.limit.0, self.limit.1).unwrap();
    }
}

/// A socket that connects later, which takes no descriptor then.
fn unconnected() -> std::io::Result<OwnedFd> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    Ok(socket(AddressFamily::Inet, SockType::Stream, flags, None)?)
}

fn begin(fd: &impl AsRawFd, to: SocketAddr) {
    let begun = connect(fd.as_raw_fd(), &SockaddrStorage::from(to));
    assert!(matches!(begun, Ok(()) | Err(Errno::EINPROGRESS)), "{begun:?}");
}

fn without_descriptors_new_flows_wait_and_open_ones_go_on() {
    let listener = listener();
    let spec: PortSpec = "8082:80".parse().unwrap();
    let world = World::with(65520, |c| c.publish.tcp = spec.forwards());
    let server = world.guest.run(|| TcpListener::bind((GUEST, 80))).unwrap();
    let (mut guest, mut host) = world.pair(&listener);
    let (out, client) = (world.guest.run(unconnected).unwrap(), unconnected().unwrap());
    let none = NoDescriptors::new();
    begin(&out, listener.local_addr().unwrap());
    begin(&client, SocketAddr::new(ip(HOST), 8082));
    // The one at the guest's SYN, the other at the client's.
    world.until("both wait", |s| s.totals.refusals.value(Refusal::Descriptors) >= 2);
    exchange(&mut guest, &mut host);
    drop(none);
    // The guest asks again by itself, and the client waits in the kernel's queue.
    let pairs = [(TcpStream::from(out), &listener), (TcpStream::from(client), &server)];
    for (mut near, listener) in pairs {
        let (mut far, _) = listener.accept().unwrap();
        near.set_nonblocking(false).unwrap();
        far.set_read_timeout(Some(PATIENCE)).unwrap();
        exchange(&mut near, &mut far);
    }
}

fn without_descriptors_a_flow_of_datagrams_gives_way_to_the_next() {
    let spec: PortSpec = "5356:56".parse().unwrap();
    let world = World::with(65520, |c| c.publish.udp = spec.forwards());
    let servers = [bound(HOST), bound(HOST)];
    let clients = servers.each_ref().map(|s| guest_to(&world, s.local_addr().unwrap()));
    // A client of a published port rests for longest, and has no descriptor of its own.
    let inside = world.guest.run(|| UdpSocket::bind((GUEST, 56))).unwrap();
    inside.set_read_timeout(Some(PATIENCE)).unwrap();
    bound(HOST).send_to(b"client", (HOST, 5356)).unwrap();
    assert_eq!(receive(&inside).unwrap().0, b"client");
    clients[0].send(b"first").unwrap();
    assert_eq!(receive(&servers[0]).unwrap().0, b"first");
    let none = NoDescriptors::new();
    clients[1].send(b"second").unwrap();
    assert_eq!(receive(&servers[1]).unwrap().0, b"second");
    drop(none);
    let stat = world.stat();
    assert_eq!((stat.flows.len(), stat.totals.udp_flows), (2, 3));
    assert_eq!(stat.totals.refusals.value(Refusal::Displaced), 1);
}

fn fifty_thousand_connections_that_nobody_finishes_stay_within_the_bounds() {
    const FLOWS: usize = 300;
    const CONNECTING: usize = 100;
    let limits = Limits {
        tcp_flows: FLOWS,
        connecting: CONNECTING,
        memory_bytes: 32 << 20,
        ..Limits::default()
    };
    let (world, good) = (World::with(65520, |c| c.limits = limits), listener());
    let (mut guest, mut host) = world.pair(&good);
    // Its queue takes some connections, and then it does not answer any more.
    let full = listener();
    let SocketAddr::V4(to) = full.local_addr().unwrap() else { panic!("an IPv4 listener") };
    let mut raw = Raw::new(&world);
    for n in 0..50_000u32 {
        let from = Ipv4Addr::from_bits(Ipv4Addr::new(10, 0, 0, 100).to_bits() + n % 100);
        let port = 1024 + (n / 100) as u16;
        // Every third one is for a host to which there is no route.
        let asked = if n % 3 == 0 { Ipv4Addr::new(203, 0, 113, 1) } else { *to.ip() };
        raw.send(&raw.syn((from, port), (asked, to.port()), n));
        if n % 1000 == 0 {
            exchange(&mut guest, &mut host);
        }
    }
    exchange(&mut guest, &mut host);
    let stat = world.stat();
    assert!(stat.flows.len() <= FLOWS, "{}", stat.flows.len());
    let connecting = stat.flows.iter().filter(|f| f.state == "connecting").count();
    assert!(connecting <= CONNECTING, "{connecting}");
    assert!(stat.totals.refusals.value(Refusal::Unreachable) > 0);
    // The thread of the other queue may be behind. The guest's kernel drops some SYNs before the gateway.
    world.until("all others are counted", |s| {
        let refused = |why| s.totals.refusals.value(why);
        // Each queue has a listener; a ring between two of them that is full drops, too.
        let listeners = s.stack.sockets.iter().filter_map(|s| s.listener.as_ref());
        let syns_dropped: u64 = listeners.map(|listener| listener.syns_dropped).sum();
        let in_rings = s.stack.counters.drops(DropReason::HandOffFull);
        let refusals = [Refusal::FlowLimit, Refusal::ConnectingLimit, Refusal::Unreachable];
        let counted = syns_dropped + in_rings + refusals.map(refused).iter().sum::<u64>();
        let came = s.stack.counters.value(Counter::RxPackets);
        // The packets of `guest` and `host` came, too.
        came > 10_000 && counted + 1_000 > came
    });
    let used: usize = stat.stack.pool.used_bytes.iter().sum();
    assert!(used < 4 << 20, "{used}");
    exchange(&mut guest, &mut host);
    world.end();
}

/// A listener whose queue has the system's default limit (net.core.somaxconn). No program accepts its connections, so
/// they need no descriptor.
pub fn unasked_listener() -> TcpListener {
    let socket = unconnected().unwrap();
    bind(socket.as_raw_fd(), &SockaddrStorage::from(SocketAddr::new(ip(HOST), 0))).unwrap();
    listen(&socket, Backlog::MAXCONN).unwrap();
    socket.into()
}

/// Resident memory of this process in bytes.
pub fn resident_bytes() -> usize {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    pages.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
}

fn open_connections_beyond_the_bound_are_refused() {
    /// Less than the queue of a listener.
    const PER_LISTENER: usize = 4000;
    /// 50,000 need more descriptors than a process may have on most systems: by hand (results/gateway/README.md).
    const COUNT: usize = 2500;
    const BOUND: usize = 2000;
    let before = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, before.1, before.1).unwrap();
    let limits = Limits { tcp_flows: BOUND, ..Limits::default() };
    let (world, good) = (World::with(65520, |c| c.limits = limits), listener());
    let (mut guest, mut host) = world.pair(&good);
    let resident = resident_bytes();
    let full: Vec<_> = (0..COUNT.div_ceil(PER_LISTENER)).map(|_| unasked_listener()).collect();
    let open = || {
        let one = |n: usize| {
            let socket = unconnected()?;
            begin(&socket, full[n / PER_LISTENER].local_addr()?);
            Ok(socket)
        };
        (0..COUNT).map(one).collect::<std::io::Result<Vec<_>>>()
    };
    let opened = world.guest.run(open).unwrap();
    let is_full = |s: &Stat| s.flows.iter().filter(|f| f.state == "open").count() == BOUND;
    world.until("as many are open as may be", is_full);
    world.until("the others are counted", |s| {
        s.totals.refusals.value(Refusal::FlowLimit) >= (COUNT + 1 - BOUND) as u64
    });
    exchange(&mut guest, &mut host);
    let stat = world.stat();
    assert_eq!((stat.flows.len(), stat.totals.tcp_flows), (BOUND, BOUND as u64));
    let used: usize = stat.stack.pool.used_bytes.iter().sum();
    assert!(used < 4 << 20, "{used}");
    let grown = resident_bytes().saturating_sub(resident) / BOUND;
    assert!(grown < 16 << 10, "{grown} bytes each, with those of the snapshot");
    drop((full, opened));
    world.until("all but one are over", |s| s.flows.len() == 1);
    exchange(&mut guest, &mut host);
    let (mut late, mut late_host) = world.pair(&good);
    exchange(&mut late, &mut late_host);
    drop(world);
    let _ = setrlimit(Resource::RLIMIT_NOFILE, before.0, before.1);
}

/// Numbers that their seed makes (xorshift).
struct Numbers(u64);

impl Numbers {
    fn next(&mut self, below: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as usize % below
    }
}

/// A frame of each kind that a gateway looks into.
fn templates(raw: &Raw) -> Vec<Vec<u8>> {
    let (v4, host): (Ipv4Addr, Ipv4Addr) = ("10.0.0.77".parse().unwrap(), HOST.parse().unwrap());
    let v6: Ipv6Addr = "fd00::77".parse().unwrap();
    let host_v6: Ipv6Addr = crate::relay::world::HOST_V6.parse().unwrap();
    let router: Ipv4Addr = crate::relay::world::ROUTER.parse().unwrap();
    let router_v6: Ipv6Addr = "fd00::1".parse().unwrap();
    let mut dhcp = vec![0; 240];
    (dhcp[0], dhcp[1], dhcp[2]) = (1, 1, 6);
    dhcp[236..240].copy_from_slice(&[99, 130, 83, 99]);
    dhcp.extend([53, 1, 1, 50, 4, 10, 0, 0, 2, 255]);
    let solicit =
        [1, 0, 0, 1, 0, 1, 0, 4, 0, 3, 0, 1, 0, 3, 0, 12, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0];
    let question =
        b"\x00\x07\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x04name\x07example\x00\x00\x01\x00\x01";
    let neighbour =
        [&[135, 0, 0, 0, 0, 0, 0, 0][..], &router_v6.octets(), &[1, 1, 2, 0, 0, 0, 0, 9]];
    let advert = [&[136, 0, 0, 0, 0x60, 0, 0, 0][..], &v6.octets(), &[2, 1, 2, 0, 0, 0, 0, 9]];
    let quoted = raw.udp((host, 7), (v4, 9), b"quoted");
    let error = [&[3, 3, 0, 0, 0, 0, 0, 0][..], &quoted[14..]].concat();
    let hop_by_hop = [&[17, 0, 1, 4, 0, 0, 0, 0][..], &[0, 9, 0, 9, 0, 8, 0, 0]].concat();
    let fragment = [17, 0, 0, 1, 0, 0, 0, 7, 0, 9, 0, 9, 0, 8, 0, 0];
    let mut part = raw.udp((v4, 40_000), (host, 7), &[5; 64]);
    part[20..22].copy_from_slice(&[0x20, 0]);
    vec![
        raw.syn((v4, 40_000), (host, 7), 1),
        raw.udp((v4, 40_000), (host, 7), b"datagram"),
        raw.udp((v4, 40_000), (router, 53), question),
        raw.udp((Ipv4Addr::UNSPECIFIED, 68), (Ipv4Addr::BROADCAST, 67), &dhcp),
        raw.udp_v6((v6, 546), ("ff02::1:2".parse().unwrap(), 547), &solicit),
        raw.udp_v6((v6, 40_000), (host_v6, 7), b"datagram"),
        raw.icmp(v4, host, &[8, 0, 0, 0, 1, 2, 0, 1, b'p', b'i', b'n', b'g']),
        raw.icmp(v4, host, &error),
        raw.icmp_v6(v6, host_v6, &[128, 0, 0, 0, 1, 2, 0, 1, b'p', b'i', b'n', b'g']),
        raw.icmp_v6(v6, "ff02::2".parse().unwrap(), &[133, 0, 0, 0, 0, 0, 0, 0]),
        raw.icmp_v6(v6, router_v6, &neighbour.concat()),
        raw.icmp_v6(v6, router_v6, &advert.concat()),
        raw.v6(v6, host_v6, 0, &hop_by_hop),
        raw.v6(v6, host_v6, 44, &fragment),
        part,
        raw.arp(v4, router),
    ]
}

fn garbage_of_a_guest_leaves_a_flow_in_peace() {
    let lease = crate::relay::udp::lease();
    let limits = Limits {
        tcp_flows: 200,
        connecting: 50,
        udp_flows: 50,
        echo_flows: 8,
        memory_bytes: 32 << 20,
        ..Limits::default()
    };
    let world = World::with(65520, |c| {
        c.limits = limits;
        c.dhcp = Some(lease);
        c.dhcp_v6 = Some(crate::relay::udp::lease_v6());
    });
    let listener = listener();
    let (mut guest, mut host) = world.pair(&listener);
    let mut raw = Raw::new(&world);
    let templates = templates(&raw);
    let mut numbers = Numbers(0x5eed);
    for n in 0..30_000 {
        let mut frame = templates[numbers.next(templates.len())].clone();
        // Every fourth one as it is; the others damaged behind the addresses of the link, cut or lengthened.
        for _ in 0..numbers.next(4) {
            let at = 12 + numbers.next(frame.len() - 12);
            frame[at] = numbers.next(256) as u8;
        }
        match numbers.next(8) {
            0 => frame.truncate(14 + numbers.next(frame.len() - 14)),
            1 => frame.resize(frame.len() + numbers.next(200), numbers.next(256) as u8),
            _ => {}
        }
        raw.send(&frame);
        if n % 500 == 0 {
            exchange(&mut guest, &mut host);
        }
    }
    exchange(&mut guest, &mut host);
    let stat = world.stat();
    assert!(stat.flows.len() <= 200 + 50 + 8, "{}", stat.flows.len());
    let used: usize = stat.stack.pool.used_bytes.iter().sum();
    assert!(used < 8 << 20, "{used}");
    world.end();
}

fn a_host_that_vanished_is_a_reset() {
    let outside = Outside::new();
    // Linux gives up after hours by default. These are of this namespace alone, which the test has for itself.
    let settings = [
        ("tcp_keepalive_time", "1"),
        ("tcp_keepalive_intvl", "1"),
        ("tcp_keepalive_probes", "1"),
        ("tcp_retries2", "1"),
    ];
    let path = |name: &str| format!("/proc/sys/net/ipv4/{name}");
    let before = settings.map(|(name, value)| {
        let before = std::fs::read_to_string(path(name)).unwrap();
        std::fs::write(path(name), value).unwrap();
        (name, before)
    });
    let world = World::new();
    let listener = outside.listener();
    let ([mut idle, mut idle_far], [mut busy, mut busy_far]) =
        (<[_; 2]>::from(world.pair(&listener)), <[_; 2]>::from(world.pair(&listener)));
    exchange(&mut idle, &mut idle_far);
    exchange(&mut busy, &mut busy_far);
    drop(outside);
    busy.write_all(b"into the void").unwrap();
    assert!(is_reset(&mut busy), "by its retransmissions");
    assert!(is_reset(&mut idle), "by its keep-alives");
    world.until("both flows are over", |s| s.flows.is_empty());
    for (name, before) in before {
        std::fs::write(path(name), before).unwrap();
    }
}

/// The message of a gateway that cannot publish.
fn refused(change: impl FnOnce(&mut Config)) -> String {
    let mut config = bare_config();
    change(&mut config);
    Gateway::new(config).map(drop).expect_err("refused").to_string()
}

fn a_port_that_cannot_be_bound_is_refused() {
    let forwards = |spec: &str| spec.parse::<PortSpec>().unwrap().forwards();
    let taken = listener();
    let port = taken.local_addr().unwrap().port();
    let said = refused(|c| c.publish.tcp = forwards(&format!("{HOST}/{port}:80")));
    assert!(said.contains(&format!("{HOST}/{port}")) && said.contains("another program"), "{said}");

    let said = refused(|c| c.publish.tcp = forwards("192.0.2.99/8080"));
    assert!(said.contains("the address does not belong to the host"), "{said}");
    for (spec, is_udp) in [("192.0.2.99/8080", false), ("2001:db8::99/8080", true)] {
        let mut config = bare_config();
        config.publish.addresses = BindAddresses::Any;
        let list = if is_udp { &mut config.publish.udp } else { &mut config.publish.tcp };
        *list = forwards(spec);
        Gateway::new(config).unwrap_or_else(|e| panic!("{spec}: {e}"));
    }

    let right = Capability::CAP_NET_BIND_SERVICE;
    caps::drop(None, CapSet::Effective, right).unwrap();
    std::fs::write("/proc/sys/net/ipv4/ip_unprivileged_port_start", "1024").unwrap();
    let said = refused(|c| c.publish.udp = forwards("53"));
    caps::raise(None, CapSet::Effective, right).unwrap();
    assert!(said.contains("53") && said.contains("ip_unprivileged_port_start"), "{said}");
}

/// A program of the host's that has a port at its IPv6 address alone.
fn taken_v6(protocol: Protocol) -> (Box<dyn std::any::Any>, u16) {
    match protocol {
        Protocol::Udp => {
            let socket = UdpSocket::bind((HOST_V6, 0)).unwrap();
            let port = socket.local_addr().unwrap().port();
            (Box::new(socket), port)
        }
        _ => {
            let listener = TcpListener::bind((HOST_V6, 0)).unwrap();
            let port = listener.local_addr().unwrap().port();
            (Box::new(listener), port)
        }
    }
}

fn is_bound_v4(protocol: Protocol, port: u16) -> bool {
    match protocol {
        Protocol::Udp => UdpSocket::bind((HOST, port)).is_err(),
        _ => TcpListener::bind((HOST, port)).is_err(),
    }
}

fn a_port_that_one_ip_version_has_is_published_at_the_other_if_it_is_optional() {
    let world = World::new();
    for protocol in [Protocol::Tcp, Protocol::Udp] {
        let (taken, from) = taken_v6(protocol);
        let port = |is_optional| Forward { is_optional, ..Forward::new(Bind::default(), from, 80) };
        let refused = world.publish(protocol, port(false)).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::AddrInUse);
        assert!(!is_bound_v4(protocol, from), "nothing of it is left");
        world.publish(protocol, port(true)).unwrap();
        assert!(is_bound_v4(protocol, from));
        drop(taken);
    }
    let published = world.stat().published;
    assert_eq!(published.len(), 2, "one of each transport: {published:?}");
}

fn a_namespace_of_another_user_is_refused() {
    // The first process of the system, without the rights that would make its namespaces anybody's.
    let target = Target::Process { pid: 1, userns: None };
    let rights = [Capability::CAP_SYS_PTRACE, Capability::CAP_SYS_ADMIN];
    for right in rights {
        caps::drop(None, CapSet::Effective, right).unwrap();
    }
    let refused = target.attach().map(drop);
    for right in rights {
        caps::raise(None, CapSet::Effective, right).unwrap();
    }
    let said = refused.expect_err("refused").to_string();
    assert!(said.contains("process 1") && said.contains("belongs to another user"), "{said}");
}
