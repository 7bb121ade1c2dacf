//! A gateway where `/dev/net/tun` is missing, may not be opened or is another device: a veth pair and packet sockets take
//! its place.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;

use crate::FULMAR;
use crate::guest::Guest;
use crate::support::{PATIENCE, in_sandbox, text};
use fulmar_gateway::netns::Netns;

/// Bytes each way of a connection: many super-frames.
const BYTES: usize = 8 << 20;
/// The device node as a bind mount on which devices may not be opened, no node at all, and another device.
const HIDDEN: [&str; 3] = [
    "mount --bind /dev/net/tun /dev/net/tun && mount -o remount,bind,nodev /dev/net/tun",
    "mount -t tmpfs none /dev/net",
    "mount --bind /dev/null /dev/net/tun",
];
/// Status of the script where mounts are forbidden.
const NO_MOUNTS: i32 = 77;

/// The network namespace of a guest.
fn netns(guest: &Guest) -> Netns {
    Netns::open(Path::new(&format!("/proc/{}/ns/net", guest.pid()))).unwrap()
}

/// A gateway in the foreground, ended with the value.
struct Gateway {
    child: Child,
    /// What it said until its network was up.
    said: String,
}

impl Gateway {
    /// `None`: mounts are forbidden here.
    fn without_node(hide: &str, guest: &Guest, options: &str) -> Option<Gateway> {
        let pid = guest.pid();
        let line = format!("gateway -f -d --config-net -I ns0 -T none -U none {options} {pid}");
        let script = format!("({hide}) || exit {NO_MOUNTS}; exec $0 {line}");
        let mut child = Command::new("unshare")
            .args(["--mount", "--propagation", "private", "sh", "-c", &script, FULMAR])
            .stderr(Stdio::piped())
            .spawn()
            .expect("unshare(1)");
        let mut said = String::new();
        for line in BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok) {
            said = said + &line + "\n";
            if line.contains("the network is up") {
                return Some(Gateway { child, said });
            }
        }
        assert_eq!(child.wait().unwrap().code(), Some(NO_MOUNTS), "{said}");
        None
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn pattern() -> Vec<u8> {
    (0..BYTES).map(|i| (i % 251) as u8 ^ (i >> 16) as u8).collect()
}

/// Both ends send the same at once, and get it whole.
fn exchange(mut near: TcpStream, mut far: TcpStream) {
    for end in [&near, &far] {
        end.set_read_timeout(Some(PATIENCE)).unwrap();
        end.set_write_timeout(Some(PATIENCE)).unwrap();
    }
    let sent = pattern();
    let mut writers = [near.try_clone().unwrap(), far.try_clone().unwrap()];
    thread::scope(|scope| {
        for writer in &mut writers {
            scope.spawn(|| writer.write_all(&sent).unwrap());
        }
        for end in [&mut near, &mut far] {
            let mut got = vec![0; BYTES];
            end.read_exact(&mut got).unwrap();
            assert!(got == sent, "what arrived differs");
        }
    });
}

fn udp(at: SocketAddr) -> UdpSocket {
    let socket = UdpSocket::bind(at).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    socket
}

/// A connection from the guest, one to its published port, and datagrams both ways.
fn assert_carries(guest: &Netns) {
    // The router's address leads to the host's loopback.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = SocketAddr::new(ip("10.9.0.1"), listener.local_addr().unwrap().port());
    let near = guest.run(|| TcpStream::connect_timeout(&to, PATIENCE)).unwrap();
    exchange(near, listener.accept().unwrap().0);
    // From an address that is not the loopback's a client passes the guest's interface.
    let listener = guest.run(|| TcpListener::bind("10.9.0.2:80")).unwrap();
    let client = TcpStream::connect("10.77.0.1:18080").unwrap();
    let (served, from) = listener.accept().unwrap();
    assert_eq!(from, client.local_addr().unwrap());
    exchange(client, served);
    let host = udp("127.0.0.1:0".parse().unwrap());
    let to = SocketAddr::new(ip("10.9.0.1"), host.local_addr().unwrap().port());
    let inside = guest.run(|| Ok(udp("10.9.0.2:0".parse().unwrap()))).unwrap();
    // The longest passes as fragments where the MTU is small.
    for bytes in [0, 1, 1400, 9000, 40_000] {
        let sent = vec![7; bytes];
        let mut got = vec![0; 65_536];
        inside.send_to(&sent, to).unwrap();
        let (n, client) = host.recv_from(&mut got).unwrap();
        assert_eq!(got[..n], sent);
        host.send_to(&sent, client).unwrap();
        let (n, from) = inside.recv_from(&mut got).unwrap();
        assert_eq!((&got[..n], from), (&sent[..], to));
    }
}

/// Runs a gateway for a guest where there is no node, of either kind.
fn for_each_lack(name: &str, options: &str, check: impl Fn(&Guest, &Gateway)) {
    for hide in HIDDEN {
        let guest = Guest::new();
        let line = format!("-a 10.9.0.2 -n 24 -g 10.9.0.1 -t 18080:80 -u none {options}");
        let Some(gateway) = Gateway::without_node(hide, &guest, &line) else {
            return crate::support::skip(name, "no mounts here");
        };
        let device = "the guest's interface is one end of a veth pair, with a packet socket on the other: \
                      cannot open /dev/net/tun";
        assert!(gateway.said.contains(device), "{}", gateway.said);
        check(&guest, &gateway);
    }
}

#[test]
fn traffic_passes_a_veth_where_there_is_no_device_node() {
    in_sandbox(|| {
        let name = "traffic_passes_a_veth_where_there_is_no_device_node";
        for mtu in ["65520", "1500"] {
            for_each_lack(name, &format!("-m {mtu}"), |guest, _| assert_carries(&netns(guest)));
        }
    });
}

#[test]
fn two_queues_are_two_packet_sockets() {
    in_sandbox(|| {
        if thread::available_parallelism().map_or(1, usize::from) > 1 {
            let name = "two_queues_are_two_packet_sockets";
            for_each_lack(name, "--queues 2", |guest, _| assert_carries(&netns(guest)));
        }
    });
}

#[test]
fn the_gateways_end_is_in_no_namespace_that_a_process_is_in() {
    in_sandbox(|| {
        let name = "the_gateways_end_is_in_no_namespace_that_a_process_is_in";
        for_each_lack(name, "", |guest, gateway| {
            let names = |netns: &Netns| {
                let all = netns.netlink().unwrap().interfaces().unwrap().into_iter();
                all.map(|i| i.name).collect::<Vec<_>>()
            };
            assert!(names(&netns(guest)).contains(&"ns0".to_owned()));
            let host = Netns::current().unwrap();
            assert!(!names(&host).contains(&"ns0".to_owned()));
            let own = format!("/proc/{}/task", gateway.child.id());
            let tasks = fs::read_dir(own).unwrap().map(|task| task.unwrap().path());
            let namespace = |path: &Path| fs::read_link(path.join("ns/net")).unwrap();
            let [hosts, guests] = [std::process::id().to_string(), guest.pid()]
                .map(|pid| namespace(Path::new(&format!("/proc/{pid}"))));
            for task in tasks {
                assert!([&hosts, &guests].contains(&&namespace(&task)), "{task:?}");
            }
            // The same of what it holds open: the file of a namespace could be entered.
            let open = fs::read_dir(format!("/proc/{}/fd", gateway.child.id())).unwrap();
            let open = open.filter_map(|fd| fs::read_link(fd.unwrap().path()).ok());
            // The guest's may be open still: it is closed after the message that the test waits for.
            let of_neither = open.filter(|to| {
                to.to_string_lossy().starts_with("net:") && ![&hosts, &guests].contains(&to)
            });
            assert_eq!(of_neither.collect::<Vec<_>>(), Vec::<PathBuf>::new());
        });
    });
}

#[test]
fn a_gateway_ends_when_its_guest_removes_the_veth() {
    in_sandbox(|| {
        let name = "a_gateway_ends_when_its_guest_removes_the_veth";
        let guest = Guest::new();
        let Some(mut gateway) = Gateway::without_node(HIDDEN[1], &guest, "-t none -u none") else {
            return crate::support::skip(name, "no mounts here");
        };
        let netns = netns(&guest);
        let index = netns.if_index("ns0").unwrap();
        netns.netlink().unwrap().delete(index).unwrap();
        let status = gateway.child.wait().unwrap();
        assert_eq!(status.code(), Some(0), "{status}");
    });
}

#[test]
fn a_program_of_run_has_a_network_without_the_device_node() {
    in_sandbox(|| {
        let script =
            format!("({}) || exit {NO_MOUNTS}; exec $0 run -- cat /proc/net/dev", HIDDEN[1]);
        let output = Command::new("unshare")
            .args(["--mount", "--propagation", "private", "sh", "-c", &script, FULMAR])
            .output()
            .expect("unshare(1)");
        if output.status.code() == Some(NO_MOUNTS) {
            let name = "a_program_of_run_has_a_network_without_the_device_node";
            return crate::support::skip(name, &text(&output.stderr));
        }
        assert!(output.status.success(), "{}", text(&output.stderr));
        assert_eq!(text(&output.stdout).lines().filter(|line| line.contains(':')).count(), 2);
        assert_eq!(text(&output.stderr), "", "it has nothing to say");
    });
}

/// Where no network namespace can be made either.
#[test]
fn without_node_and_veth_a_gateway_says_what_to_do() {
    in_sandbox(|| {
        let all = ["chmod 666 /dev/net/tun", "modprobe tun", "mknod /dev/net/tun c 10 200"];
        for (hide, advice) in HIDDEN.into_iter().zip(all) {
            let script = format!(
                "({hide}) || exit {NO_MOUNTS}; unshare --net sleep 1000 & guest=$!
                while [ $(readlink /proc/$guest/ns/net) = $(readlink /proc/self/ns/net) ]; do :; done
                echo 0 > /proc/sys/user/max_net_namespaces || exit {NO_MOUNTS}
                $0 --pasta --config-net $guest; status=$?; kill $guest; exit $status"
            );
            let output = Command::new("unshare")
                .args(["--user", "--map-root-user", "--net", "--mount", "--propagation", "private"])
                .args(["sh", "-c", &script, FULMAR])
                .output()
                .expect("unshare(1)");
            let said = text(&output.stderr);
            if output.status.code() == Some(NO_MOUNTS) {
                return crate::support::skip(
                    "without_node_and_veth_a_gateway_says_what_to_do",
                    &said,
                );
            }
            assert_eq!(output.status.code(), Some(1), "{said}");
            assert!(said.contains("cannot create the guest's interface"), "{said}");
            assert!(
                said.contains(advice) && said.contains("a veth pair instead failed too"),
                "{said}"
            );
        }
    });
}
