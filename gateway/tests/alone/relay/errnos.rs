//! System calls of the host that fail, each with its errnos, and the answers that the guest gets. A filter of system
//! calls (seccomp) on the gateway's threads lets one call fail for as long as the gateway lives.

use std::collections::BTreeMap;
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpStream, UdpSocket};
use std::sync::atomic::Ordering::Relaxed;

use fulmar_gateway::stat::{Refusal, Stat};
use libc::c_long;
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, apply_filter};

use crate::relay::Test;
use crate::relay::tcp::read_some;
use crate::relay::udp::{bound, guest_to, receive};
use crate::relay::world::{HAS_VETH, HOST, HOST_V6, World, listener};

pub const TESTS: &[Test] = &[
    ("each_errno_of_connect_is_told_or_kept_silent", each_errno_of_connect_is_told),
    ("each_errno_of_a_datagram_is_told_or_counted", each_errno_of_a_datagram_is_told),
    ("each_errno_of_send_ends_a_connection_by_a_reset", each_errno_of_send_ends_a_connection),
    ("an_errno_of_recv_ends_a_flow_of_datagrams", an_errno_of_recv_ends_a_flow_of_datagrams),
    ("each_errno_of_recv_ends_a_connection_by_a_reset", each_errno_of_recv_ends_a_connection),
    ("a_shortage_of_the_hosts_kernel_is_waited_for", a_shortage_is_waited_for),
];

/// Lets a call of this thread, and of those that it starts, fail from now on.
fn fail(call: c_long, errno: i32) {
    let rules = BTreeMap::from([(call, Vec::new())]);
    let arch = std::env::consts::ARCH.try_into().unwrap();
    let fails = SeccompAction::Errno(errno as u32);
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, fails, arch).unwrap();
    apply_filter(&BpfProgram::try_from(filter).unwrap()).unwrap();
}

/// A gateway one of whose calls fails.
fn failing(call: c_long, errno: i32) -> World {
    World::with_prepared(65520, |_| (), move || fail(call, errno))
}

/// The answer that a guest gets to a failure.
#[derive(Clone, Copy, Debug)]
enum Told {
    /// The errno of its call over IPv4, and over IPv6.
    Errno(i32, i32),
    /// Nothing.
    Silence,
}

/// The errnos with which a connection to a host fails before it exists.
const CONNECT: [(c_long, i32, Told, Refusal); 18] = {
    use Told::{Errno, Silence};
    let refused = Errno(libc::ECONNREFUSED, libc::ECONNREFUSED);
    let no_network = Errno(libc::ENETUNREACH, libc::ENETUNREACH);
    let no_host = Errno(libc::EHOSTUNREACH, libc::EHOSTUNREACH);
    let prohibited = Errno(libc::EHOSTUNREACH, libc::EACCES);
    let (connect, socket) = (libc::SYS_connect, libc::SYS_socket);
    [
        (connect, libc::ECONNREFUSED, refused, Refusal::Refused),
        (connect, libc::ENETUNREACH, no_network, Refusal::Unreachable),
        (connect, libc::ENETDOWN, no_network, Refusal::Unreachable),
        (connect, libc::EADDRNOTAVAIL, no_network, Refusal::Unreachable),
        (socket, libc::EAFNOSUPPORT, no_network, Refusal::Unreachable),
        (connect, libc::EHOSTUNREACH, no_host, Refusal::Unreachable),
        (connect, libc::EHOSTDOWN, no_host, Refusal::Unreachable),
        (connect, libc::EINVAL, no_host, Refusal::Unreachable),
        (connect, libc::EACCES, prohibited, Refusal::Unreachable),
        (connect, libc::EPERM, prohibited, Refusal::Unreachable),
        (connect, libc::ETIMEDOUT, Silence, Refusal::TimedOut),
        (socket, libc::EMFILE, Silence, Refusal::Descriptors),
        (socket, libc::ENFILE, Silence, Refusal::Descriptors),
        (socket, libc::ENOBUFS, Silence, Refusal::HostSocket),
        (socket, libc::ENOMEM, Silence, Refusal::HostSocket),
        (connect, libc::EAGAIN, Silence, Refusal::HostSocket),
        (connect, libc::EADDRINUSE, Silence, Refusal::HostSocket),
        (connect, libc::ENOBUFS, Silence, Refusal::HostSocket),
    ]
};

fn each_errno_of_connect_is_told() {
    for (call, errno, told, why) in CONNECT {
        let world = failing(call, errno);
        match told {
            Told::Errno(v4, v6) => {
                for (at, heard) in [(HOST, v4), (HOST_V6, v6)] {
                    let to = format!("{}:80", bracketed(at)).parse().unwrap();
                    let error = world.connect(to).unwrap_err();
                    assert_eq!(error.raw_os_error(), Some(heard), "{errno} at {at}: {error}");
                }
                assert_eq!(world.stat().totals.refusals.value(why), 2, "{errno}");
            }
            Told::Silence => {
                let begun = TcpStream::from(world.begin_connection((HOST, 80)));
                world.until("it is counted", |s| s.totals.refusals.value(why) > 0);
                assert!(begun.take_error().unwrap().is_none(), "{errno}");
                assert!(begun.peer_addr().is_err(), "{errno}");
            }
        }
        assert!(world.stat().flows.is_empty(), "{errno}");
    }
}

fn bracketed(at: &str) -> String {
    if at.contains(':') { format!("[{at}]") } else { at.to_owned() }
}

/// The errnos with which a datagram does not leave. Linux reports none of those that a kernel without memory has.
const DATAGRAMS: [(i32, Told, Refusal); 8] = [
    (libc::ECONNREFUSED, Told::Silence, Refusal::HostQueueFull),
    (libc::ENETUNREACH, Told::Errno(libc::ENETUNREACH, libc::ENETUNREACH), Refusal::Unreachable),
    (libc::EHOSTUNREACH, Told::Errno(libc::EHOSTUNREACH, libc::EHOSTUNREACH), Refusal::Unreachable),
    (libc::EPERM, Told::Errno(libc::EHOSTUNREACH, libc::EACCES), Refusal::Unreachable),
    (libc::EAGAIN, Told::Silence, Refusal::HostQueueFull),
    (libc::ENOBUFS, Told::Silence, Refusal::HostQueueFull),
    (libc::ENOMEM, Told::Silence, Refusal::HostQueueFull),
    (libc::EMSGSIZE, Told::Silence, Refusal::TooLong),
];

fn each_errno_of_a_datagram_is_told() {
    for (errno, told, why) in DATAGRAMS {
        let world = failing(libc::SYS_sendmsg, errno);
        let Told::Errno(v4, v6) = told else {
            let client = guest_to(&world, bound(HOST).local_addr().unwrap());
            take_all_errors(&client, HOST);
            client.send(b"lost").unwrap();
            world.until("it is counted", |s| s.totals.refusals.value(why) == 1);
            // The turn in which it was counted is over.
            drop(world.stat());
            assert!(client.take_error().unwrap().is_none(), "{errno}");
            continue;
        };
        for (at, heard) in [(HOST, v4), (HOST_V6, v6)] {
            let client = guest_to(&world, bound(at).local_addr().unwrap());
            // An error of a router that is not fatal is one for a program that asks for it (ip(7), IP_RECVERR).
            take_all_errors(&client, at);
            client.send(b"lost").unwrap();
            let error = receive(&client).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(heard), "{errno} at {at}: {error}");
        }
        assert_eq!(world.stat().totals.refusals.value(why), 2, "{errno}");
    }
}

/// Lets a socket receive transient errors, too.
pub fn take_all_errors(client: &UdpSocket, at: &str) {
    use nix::sys::socket::{setsockopt, sockopt};
    if at.contains(':') {
        setsockopt(client, sockopt::Ipv6RecvErr, &true).unwrap();
    } else {
        setsockopt(client, sockopt::Ipv4RecvErr, &true).unwrap();
    }
}

fn an_errno_of_recv_ends_a_flow_of_datagrams() {
    // The last one is that of an earlier datagram for some time.
    for errno in [libc::ENOMEM, libc::EPERM, libc::EIO, libc::EACCES] {
        let (world, server) = (failing(libc::SYS_recvmsg, errno), bound(HOST));
        let client = guest_to(&world, server.local_addr().unwrap());
        for n in 1..=2 {
            client.send(b"a question").unwrap();
            let (_, from) = receive(&server).unwrap();
            server.send_to(b"an answer", from).unwrap();
            world.until("it is over and counted", |s| {
                s.flows.is_empty() && s.totals.refusals.value(Refusal::HostSocket) == n
            });
            assert_eq!(world.stat().totals.udp_flows, n, "{errno}");
        }
    }
}

fn each_errno_of_recv_ends_a_connection() {
    // A TAP is read by the same call.
    if !HAS_VETH.load(Relaxed) {
        return;
    }
    for errno in [libc::ECONNRESET, libc::ETIMEDOUT, libc::EHOSTUNREACH, libc::EACCES, libc::EIO] {
        let (world, listener) = (failing(libc::SYS_readv, errno), listener());
        let (mut guest, mut host) = world.pair(&listener);
        host.write_all(b"lost").unwrap();
        assert!(is_reset(&mut guest), "{errno}: the stream is not whole");
        assert!(is_reset(&mut host), "{errno}: the gateway has given up");
        world.until("the flow is over", |s| s.flows.is_empty());
    }
    let (world, listener) = (failing(libc::SYS_readv, libc::ENOMEM), listener());
    let (guest, mut host) = world.pair(&listener);
    host.write_all(b"kept").unwrap();
    (&guest).write_all(b"sent").unwrap();
    let mut came = [0; 4];
    host.read_exact(&mut came).unwrap();
    let flow = world.stat().flows.remove(0);
    assert_eq!((flow.bytes_out, flow.bytes_in, flow.state), (4, 0, "open"), "a shortage passes");
}

fn is_reset(stream: &mut TcpStream) -> bool {
    read_some(stream, &mut [0]).is_err_and(|e| e.kind() == ErrorKind::ConnectionReset)
}

fn each_errno_of_send_ends_a_connection() {
    let over = [
        libc::EPIPE,
        libc::ECONNRESET,
        libc::ETIMEDOUT,
        libc::EHOSTUNREACH,
        libc::ENETUNREACH,
        libc::ENETDOWN,
        libc::EMSGSIZE,
        libc::EPERM,
    ];
    for errno in over {
        let (world, listener) = (failing(libc::SYS_sendmsg, errno), listener());
        let (mut guest, mut host) = world.pair(&listener);
        guest.write_all(b"lost").unwrap();
        assert!(is_reset(&mut guest), "{errno}: bytes that the gateway took are lost");
        assert!(is_reset(&mut host), "{errno}: the stream is not whole");
        world.until("the flow is over", |s| s.flows.is_empty());
    }
}

fn a_shortage_is_waited_for() {
    for errno in [libc::ENOBUFS, libc::ENOMEM, libc::EAGAIN] {
        let (world, listener) = (failing(libc::SYS_sendmsg, errno), listener());
        let (guest, mut host) = world.pair(&listener);
        (&guest).write_all(b"kept").unwrap();
        let flow_of = |s: &Stat| {
            let own = guest.local_addr().unwrap();
            s.flows.iter().find(|f| f.guest == own).cloned().expect("its flow")
        };
        let queued = |s: &Stat| flow_of(s).tcp.map_or(0, |tcp| tcp.recv_queue_bytes);
        world.until("the bytes wait", |s| queued(s) == 4);
        // The other direction goes on, and so do others.
        host.write_all(b"back").unwrap();
        let mut came = [0; 4];
        (&guest).read_exact(&mut came).unwrap();
        assert_eq!(&came, b"back");
        world.pair(&listener);
        let flow = flow_of(&world.stat());
        assert_eq!((flow.bytes_out, flow.bytes_in, flow.state), (0, 4, "open"), "{errno}");
    }
}
