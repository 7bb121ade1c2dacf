//! Both ends against each other: over the kernel's loopback, and over two stacks of fulmar joined
//! by a link. Counts and behaviour, no speeds.

use super::client::{Client, Outcome, Test, TestOptions};
use super::confidence::Goal;
use super::message::{Empty, MESSAGE_BYTES, Message, OmniRequest, UNKNOWN_TEST, direction, kind};
use super::pace::Length;
use super::server::{Rules, Server};
use super::socket::{Network, OnFulmar, OnKernel, Stream, Tuning};
use super::{control, tables};
use fulmar::base::{Counter, EtherAddr};
use fulmar::devices;
use fulmar::{Cidr, Stack};
use fulmar_nic as sim;
use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

const TIME: Duration = Duration::from_secs(30);
static GO_ON: AtomicBool = AtomicBool::new(false);

/// A server in a thread, gone with the value.
struct Served {
    at: SocketAddr,
    said: Arc<Mutex<Vec<String>>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<io::Result<()>>>,
}

impl Served {
    fn on(network: Arc<dyn Network>, at: &str, max_clients: usize) -> Served {
        let said = Arc::new(Mutex::new(Vec::new()));
        let hear = said.clone();
        let rules = Rules {
            max_clients,
            may_read_files: false,
            say: Arc::new(move |s: &str| hear.lock().expect("no panic").push(s.to_owned())),
        };
        let server = Server::bind(network, at.parse().expect("an address"), rules).expect("a port");
        let mut at: SocketAddr = at.parse().expect("an address");
        at.set_port(server.local_addr().expect("bound").port());
        let stop = Arc::new(AtomicBool::new(false));
        let flag = stop.clone();
        let thread = Some(std::thread::spawn(move || server.run(&flag)));
        Served { at, said, stop, thread }
    }

    fn on_loopback() -> Served {
        Served::on(Arc::new(OnKernel), "127.0.0.1:0", 8)
    }

    fn said(&self) -> String {
        self.said.lock().expect("no panic").join("\n")
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.join().expect("no panic").expect("it ends well");
        }
    }
}

fn short(test: Test) -> TestOptions {
    let length = match test {
        t if t.is_udp() => Length::Time(Duration::from_millis(100)),
        t if t.is_transactional() => Length::Units(50),
        _ => Length::Units(3_000_000),
    };
    let mut options = TestOptions::new(test);
    (options.measures_local, options.measures_remote, options.length) = (true, true, length);
    options.exchange_bytes = (100, 2000);
    if test.is_udp() {
        options.exchange_bytes = (100, 200);
        options.local.send_bytes = Some(1000);
    }
    options
}

fn check(test: Test, outcome: &Outcome) {
    let (near, far) = (&outcome.local.tally, &outcome.remote.tally);
    match test {
        Test::TcpStream | Test::TcpSendfile => {
            assert!(near.bytes_sent >= 3_000_000, "{outcome:?}");
            assert_eq!(near.bytes_sent, far.bytes_received);
        }
        Test::TcpMaerts => {
            assert!(near.bytes_received >= 3_000_000, "{outcome:?}");
            assert_eq!(near.bytes_received, far.bytes_sent);
        }
        Test::TcpRr | Test::TcpCrr => {
            assert_eq!((near.transactions, far.transactions), (50, 50));
            assert_eq!((near.bytes_sent, near.bytes_received), (50 * 100, 50 * 2000));
            assert_eq!((far.bytes_sent, far.bytes_received), (50 * 2000, 50 * 100));
        }
        Test::TcpCc => assert_eq!((near.transactions, far.transactions), (50, 50)),
        Test::UdpStream => {
            assert!(far.recv_calls > 0 && far.recv_calls <= near.send_calls, "{outcome:?}");
            assert_eq!(far.bytes_received, 1000 * far.recv_calls);
        }
        Test::UdpRr => {
            assert!(near.transactions > 0, "{outcome:?}");
            assert_eq!(near.bytes_received, 200 * near.transactions);
        }
    }
    assert!(outcome.elapsed > 0.0 && outcome.units > 0.0);
    assert!((0.0..=100.0).contains(&outcome.local.usage.cpu_percent), "{outcome:?}");
    assert!((0.0..=100.0).contains(&outcome.remote.usage.cpu_percent), "{outcome:?}");
    assert!(outcome.remote.cpus > 0 && outcome.remote.service_demand >= 0.0);
}

/// All tests after each other over one control connection.
fn every_test_runs(network: &dyn Network, served: &Served) {
    let client = Client::connect(network, served.at, &GO_ON).expect("it listens");
    for test in [Test::TcpStream, Test::TcpSendfile] {
        let options = TestOptions { remote_posted: true, ..short(test) };
        let outcome = client.run(&options, None);
        check(test, &outcome.unwrap_or_else(|e| panic!("-A {test:?}: {e}; {}", served.said())));
    }
    for (test, name, _) in super::client::TESTS {
        let outcome = client.run(&short(test), None);
        check(test, &outcome.unwrap_or_else(|e| panic!("{name}: {e}; {}", served.said())));
    }
    assert_eq!(served.said(), "");
}

#[test]
fn every_test_runs_on_the_kernels_loopback() {
    every_test_runs(&OnKernel, &Served::on_loopback());
}

fn joined_stacks() -> (OnFulmar, OnFulmar) {
    let (a, b) = devices::link_pair().expect("a link");
    let stack = |device, address: &str| {
        let cidr: Cidr = address.parse().expect("an address");
        let stack = Stack::builder().device(device).address(cidr).unlisted().build();
        OnFulmar::new(stack.expect("a stack"))
    };
    (stack(a, "10.9.0.1/24"), stack(b, "10.9.0.2/24"))
}

#[test]
fn every_test_runs_between_two_stacks_of_fulmar() {
    let (near, far) = joined_stacks();
    every_test_runs(&near, &Served::on(Arc::new(far), "10.9.0.2:12865", 8));
}

/// Two stacks on simulated NICs, which place.
fn stacks_on_nics() -> [Stack; 2] {
    let config =
        |last| sim::SimConfig { ether: EtherAddr([2, 0, 0, 0, 9, last]), ..Default::default() };
    let nics = sim::pair(config(1), config(2)).expect("two NICs");
    let mut host = 0;
    nics.map(|(nic, _)| {
        host += 1;
        let cidr: Cidr = format!("10.9.0.{host}/24").parse().expect("an address");
        Stack::builder().device(Box::new(nic)).address(cidr).unlisted().build().expect("a stack")
    })
}

#[test]
fn asynchronous_reads_and_writes_are_posted_and_by_reference_and_nothing_else_is() {
    let stacks = stacks_on_nics();
    let count = |n: usize, c: Counter| stacks[n].stat().expect("it runs").count(c);
    let network = |n: usize| OnFulmar::new(stacks[n].clone());
    let served = Served::on(Arc::new(network(1)), "10.9.0.2:12865", 8);
    let near = network(0);
    let client = Client::connect(&near, served.at, &GO_ON).expect("it listens");
    let bytes = 3_000_000;
    for (given, posted) in [(false, false), (true, false), (false, true), (true, true)] {
        let counts = || {
            [(0, Counter::CopiedBytes), (1, Counter::PlaceHints), (1, Counter::PlacedBytes)]
                .map(|(n, c)| count(n, c))
        };
        let before = counts();
        let options =
            TestOptions { local_given: given, remote_posted: posted, ..short(Test::TcpStream) };
        check(Test::TcpStream, &client.run(&options, None).expect("a result"));
        let after = counts();
        let [copied, hints, placed] = std::array::from_fn(|i| after[i] - before[i]);
        let told = format!("-a {given}, -A {posted}: {copied} copied here, {placed} placed there");
        // Requests and answers are copied all the same.
        assert_eq!(copied < 100_000, given, "{told}");
        assert!(given || copied >= bytes, "{told}");
        assert_eq!((hints > 0, placed > 0), (posted, posted), "{told}");
    }
    assert_eq!(served.said(), "");
}

#[test]
fn several_clients_are_served_at_once() {
    let served = Served::on_loopback();
    std::thread::scope(|scope| {
        for test in [Test::TcpStream, Test::TcpRr, Test::TcpMaerts, Test::TcpCc] {
            let at = served.at;
            scope.spawn(move || {
                let client = Client::connect(&OnKernel, at, &GO_ON).expect("it listens");
                for _ in 0..3 {
                    check(test, &client.run(&short(test), None).expect("a result"));
                }
            });
        }
    });
    assert_eq!(served.said(), "");
}

#[test]
fn confidence_repeats_the_test_and_its_table_tells_the_means() {
    let served = Served::on_loopback();
    let client = Client::connect(&OnKernel, served.at, &GO_ON).expect("it listens");
    let options =
        TestOptions { measures_local: false, measures_remote: false, ..short(Test::TcpRr) };
    let goal = Goal::from_options(Some((4, 4)), Some((95, Some(0.001)))).expect("a goal");
    let mut interim = 0;
    let mut show = |units, _| interim += units;
    let summary = client.measure(&options, &goal, Some((Duration::ZERO, &mut show))).expect("runs");
    assert_eq!((summary.runs, interim), (4, 200));
    assert!(!summary.is_sure);
    let style =
        tables::Style { unit: tables::Unit::Transactions, has_headings: true, verbosity: 1 };
    let shown = tables::Shown { options: &options, goal: &goal, summary: &summary, style }.text();
    assert!(shown.starts_with("!!! WARNING") && shown.contains("Trans."), "{shown}");
}

fn stranger(served: &Served) -> Box<dyn Stream> {
    OnKernel.connect(served.at, &Tuning::default(), TIME).expect("it listens")
}

/// Sends a request and returns the errno of the answer.
fn errno_for(served: &Served, message: &Message) -> u32 {
    let control = stranger(served);
    control::send(&*control, message).expect("sent");
    control::receive(&*control, TIME, &GO_ON).expect("answered").expect("a message").second()
}

#[test]
fn requests_that_cannot_be_met_are_answered_with_an_errno() {
    let served = Served::on_loopback();
    let huge = OmniRequest {
        protocol: 6,
        direction: direction::RECEIVE,
        recv_bytes: u32::MAX - 1,
        ..OmniRequest::default()
    };
    let elsewhere = OmniRequest {
        protocol: 6,
        direction: direction::RECEIVE,
        family: 4,
        server_ip: super::message::address_field([192, 0, 2, 1].into()).0,
        ..OmniRequest::default()
    };
    for (message, errno) in [
        (Message::new(4711, u32::MAX, &Empty), UNKNOWN_TEST),
        (Message::new(kind::OMNI, u32::MAX, &Empty), libc::EPROTONOSUPPORT as u32),
        (Message::new(kind::OMNI, u32::MAX, &huge), libc::EINVAL as u32),
        (Message::new(kind::OMNI, u32::MAX, &elsewhere), libc::EADDRNOTAVAIL as u32),
    ] {
        assert_eq!(errno_for(&served, &message), errno, "{message:?}");
    }
    every_test_runs_after(&served);
}

/// Earlier clients leave the server as it was.
fn every_test_runs_after(served: &Served) {
    let client = Client::connect(&OnKernel, served.at, &GO_ON).expect("it listens");
    check(Test::TcpRr, &client.run(&short(Test::TcpRr), None).expect("a result"));
}

#[test]
fn a_client_that_breaks_off_ends_nothing_but_itself() {
    let served = Served::on_loopback();
    let half = stranger(&served);
    half.write(&[0; MESSAGE_BYTES / 2]).expect("sent");
    drop(half);
    let silent = stranger(&served);
    every_test_runs_after(&served);
    drop(silent);
    while !served.said().contains("in the middle of a message") {
        std::thread::yield_now();
    }
}

#[test]
fn clients_beyond_the_bound_are_turned_away() {
    let served = Served::on(Arc::new(OnKernel), "127.0.0.1:0", 1);
    let first = stranger(&served);
    control::send(&*first, &Message::new(kind::DEBUG_ON, u32::MAX, &Empty)).expect("sent");
    let answer = control::receive(&*first, TIME, &GO_ON).expect("answered").expect("a message");
    assert_eq!(answer.kind(), kind::DEBUG_OK);
    let second = stranger(&served);
    assert_eq!(control::receive(&*second, TIME, &GO_ON).expect("its end"), None);
    assert!(served.said().contains("turned away: there are 1 clients"), "{}", served.said());
}

#[test]
fn a_server_that_stops_ends_a_running_test() {
    let served = Served::on_loopback();
    let at = served.at;
    let options = TestOptions { length: Length::Endless, ..short(Test::TcpMaerts) };
    let client = std::thread::spawn(move || {
        Client::connect(&OnKernel, at, &GO_ON).and_then(|c| c.run(&options, None))
    });
    std::thread::sleep(Duration::from_millis(100));
    // Joins the server's threads; the client sees the end of the data in order.
    drop(served);
    let _ = client.join().expect("no panic");
}

#[test]
fn datagrams_go_to_nobody_but_the_client_itself() {
    let served = Served::on_loopback();
    let bystander = UdpSocket::bind("127.0.0.2:0").expect("a socket");
    bystander.set_read_timeout(Some(Duration::from_millis(300))).expect("a timeout");
    let port = bystander.local_addr().expect("bound").port();
    let request = OmniRequest {
        protocol: 17,
        direction: direction::SEND,
        send_bytes: 100,
        length: -1000,
        family: 4,
        client_port: port.into(),
        client_ip: super::message::address_field([127, 0, 0, 2].into()).0,
        ..OmniRequest::default()
    };
    assert_eq!(errno_for(&served, &Message::new(kind::OMNI, u32::MAX, &request)), 0);
    assert!(bystander.recv(&mut [0; 100]).is_err(), "a stranger got a datagram");
}

#[test]
fn a_server_that_speaks_something_else_is_told_so() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let at = listener.local_addr().expect("bound");
    let web = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("a client");
        io::Read::read_exact(&mut stream, &mut [0; MESSAGE_BYTES]).expect("a request");
        io::Write::write_all(&mut stream, &[b'H'; 2 * MESSAGE_BYTES]).expect("an answer");
    });
    let client = Client::connect(&OnKernel, at, &GO_ON).expect("it listens");
    let error = client.run(&short(Test::TcpStream), None).expect_err("nonsense").to_string();
    assert!(error.contains("netserver could not") || error.contains("otherwise"), "{error}");
    web.join().expect("no panic");
}
