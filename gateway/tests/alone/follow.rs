//! Changes of a host's network arrive as new states. Runs in namespaces of its own, with an /etc of its own, so it has no
//! harness: a user namespace needs a process of one thread.

use std::fs;
use std::io::{self, PipeReader, Write, pipe};
use std::os::unix::fs::symlink;
use std::process::{Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use fulmar_gateway::follow::follow;
use fulmar_gateway::follow::message::States;
use fulmar_gateway::host::HostNetwork;
use fulmar_gateway::netns::{Changes, Netns, User, VethEnd};
use nix::mount::{MsFlags, mount};

/// No change takes longer to arrive.
const PATIENCE: Duration = Duration::from_secs(60);

pub fn main() {
    let entered = fulmar_gateway::netns::enter_with_mounts(User::Root).and_then(|_| {
        let etc = mount(Some("test"), "/etc", Some("tmpfs"), MsFlags::empty(), None::<&str>);
        Ok(etc?)
    });
    if let Err(e) = entered {
        assert!(
            std::env::var_os("FULMAR_REQUIRE_KERNEL_TESTS").is_none(),
            "must not be skipped: {e}"
        );
        let _ = writeln!(io::stderr(), "SKIPPED follow: {e}");
        return;
    }
    let here = Netns::current().unwrap();
    let near = VethEnd { name: "near", mac: [2, 0, 0, 0, 0, 1], mtu: 1500 };
    let far = VethEnd { name: "far", mac: [2, 0, 0, 0, 0, 2], mtu: 1500 };
    here.add_veth(&near, &here, &far).unwrap();
    here.set_up("far").unwrap();
    here.set_up("near").unwrap();
    resolvers_are_followed_however_their_file_is_replaced();
    addresses_and_routes_are_followed_in_both_directions();
    routes_that_flap_cost_a_few_readings_and_the_last_state_arrives();
    messages_that_the_kernel_drops_are_a_change();
    println!("test result: ok. 4 passed; 0 failed");
}

/// A process that follows, as a thread here; it ends when the value is dropped.
struct Following {
    states: Receiver<HostNetwork>,
    last: HostNetwork,
    count: usize,
}

fn start() -> Following {
    let (reader, writer) = pipe().unwrap();
    thread::spawn(move || follow(None, writer).unwrap());
    let (sender, states) = channel();
    thread::spawn(move || {
        let (mut reader, mut pipe): (_, PipeReader) = (States::default(), reader);
        while let Ok(state) = reader.read(&mut pipe) {
            if state.is_some_and(|state| sender.send(state).is_err()) {
                return;
            }
        }
    });
    Following { states, last: HostNetwork::default(), count: 0 }
}

impl Following {
    fn wait_until(&mut self, what: &str, is_so: impl Fn(&HostNetwork) -> bool) {
        let begin = Instant::now();
        while !is_so(&self.last) {
            let left = PATIENCE.saturating_sub(begin.elapsed());
            let next = self.states.recv_timeout(left);
            self.last = next.unwrap_or_else(|e| panic!("{what}: {e}: {:?}", self.last));
            self.count += 1;
        }
    }

    fn wait_for_server(&mut self, what: &str, server: &str) {
        let server = [server.parse().unwrap()];
        self.wait_until(what, |state| state.nameservers == server);
    }
}

fn write(path: &str, server: &str) {
    fs::write(path, format!("nameserver {server}\n")).unwrap();
}

fn resolvers_are_followed_however_their_file_is_replaced() {
    let file = "/etc/resolv.conf";
    let mut following = start();
    following.wait_for_server("no file at first", "127.0.0.1:53");
    write(file, "192.0.2.1");
    following.wait_for_server("made", "192.0.2.1:53");
    write(file, "192.0.2.2");
    following.wait_for_server("written in place", "192.0.2.2:53");
    write("/etc/new", "192.0.2.3");
    fs::rename("/etc/new", file).unwrap();
    following.wait_for_server("renamed over", "192.0.2.3:53");
    fs::create_dir_all("/etc/run").unwrap();
    write("/etc/run/stub", "192.0.2.4");
    write("/etc/run/other", "192.0.2.5");
    for (to, server) in [("run/stub", "192.0.2.4:53"), ("/etc/run/other", "192.0.2.5:53")] {
        symlink(to, "/etc/new").unwrap();
        fs::rename("/etc/new", file).unwrap();
        following.wait_for_server(to, server);
    }
    write("/etc/run/new", "192.0.2.6");
    fs::rename("/etc/run/new", "/etc/run/other").unwrap();
    following.wait_for_server("behind the link", "192.0.2.6:53");
    fs::remove_file(file).unwrap();
    following.wait_for_server("removed", "127.0.0.1:53");
    write(file, "192.0.2.7");
    following.wait_for_server("made again", "192.0.2.7:53");
    let index = Netns::current().unwrap().if_index("near").unwrap();
    fs::write(file, "nameserver fe80::1%near\nsearch a.example\n").unwrap();
    following.wait_for_server("of a link", &format!("[fe80::1%{index}]:53"));
    assert_eq!(following.last.search, ["a.example"]);
    // A FIFO counts as empty, as at the start of a gateway.
    fs::remove_file(file).unwrap();
    assert!(Command::new("mkfifo").arg(file).status().unwrap().success());
    following.wait_for_server("a FIFO", "127.0.0.1:53");
    fs::remove_file(file).unwrap();
    let long = b"# a line of a comment\n".repeat(500_000);
    fs::write(file, [&long, "nameserver 192.0.2.8\n".as_bytes()].concat()).unwrap();
    following.wait_for_server("11 MB", "192.0.2.8:53");
    write(file, "192.0.2.9");
    following.wait_for_server("short again", "192.0.2.9:53");
}

fn ip(lines: &str) {
    let mut ip = Command::new("ip").args(["-batch", "-"]).stdin(Stdio::piped()).spawn().unwrap();
    ip.stdin.take().unwrap().write_all(lines.as_bytes()).unwrap();
    assert!(ip.wait().unwrap().success(), "{}", &lines[..lines.len().min(200)]);
}

fn addresses_and_routes_are_followed_in_both_directions() {
    let mut following = start();
    following.wait_until("nothing at first", |state| state.v4.is_none() && state.v6.is_none());
    ip("addr add 192.0.2.5/24 dev near\naddr add 2001:db8::5/64 dev near nodad\n");
    let address = |state: &HostNetwork, text: &str| {
        let upstreams = [&state.v4, &state.v6].into_iter().flatten();
        upstreams.flat_map(|u| &u.addresses).any(|a| a.address.to_string() == text)
    };
    following.wait_until("an address", |s| address(s, "192.0.2.5") && address(s, "2001:db8::5"));
    assert_eq!(following.last.v4.as_ref().unwrap().gateway, None);
    ip("route add default via 192.0.2.1\nroute add default via 2001:db8::1\n");
    following.wait_until("a default route", |s| {
        [&s.v4, &s.v6].into_iter().flatten().filter(|u| u.gateway.is_some()).count() == 2
    });
    ip("addr del 192.0.2.5/24 dev near\naddr add 192.0.2.6/24 dev near\n");
    following.wait_until("another address", |s| address(s, "192.0.2.6"));
    ip("route del default via 2001:db8::1\naddr flush dev near\n");
    following.wait_until("none", |state| state.v4.is_none() && state.v6.is_none());
}

/// Lines that add and remove a route `count` times.
fn flaps(count: usize) -> String {
    let once = "route add 203.0.113.0/24 dev near\nroute del 203.0.113.0/24 dev near\n";
    once.repeat(count)
}

fn routes_that_flap_cost_a_few_readings_and_the_last_state_arrives() {
    let mut following = start();
    ip("addr add 192.0.2.5/24 dev near\n");
    following.wait_until("an address", |state| state.v4.is_some());
    let (begin, before) = (Instant::now(), following.count);
    let mut flapped = 0;
    while begin.elapsed() < Duration::from_secs(3) {
        // Each one changes the upstream's router, so that each reading may have something to say.
        ip(&"route replace default via 192.0.2.1\nroute replace default via 192.0.2.2\n"
            .repeat(500));
        flapped += 1000;
    }
    ip("route replace default via 192.0.2.3\n");
    let last = Some("192.0.2.3".parse().unwrap());
    following.wait_until("the last one", |s| s.v4.as_ref().is_some_and(|u| u.gateway == last));
    let (took, states) = (begin.elapsed().as_secs_f64(), following.count - before);
    assert!(flapped >= 3000, "{flapped} in {took} s");
    assert!((states as f64) <= 2.0 + 4.2 * took, "{states} states in {took} s");
    ip("addr flush dev near\n");
}

fn messages_that_the_kernel_drops_are_a_change() {
    let changes = Changes::open().unwrap();
    assert!(!changes.take().unwrap());
    ip(&flaps(5000));
    assert!(changes.take().unwrap());
    while changes.take().unwrap() {}
    ip(&flaps(1));
    assert!(changes.take().unwrap(), "it works after an overrun");
}
