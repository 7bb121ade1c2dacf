//! The server against clients that speak the protocol by hand, between two stacks of fulmar.
//! Counts and behaviour, no speeds.

use super::control;
use super::message::{
    Body, ConnectRequest, ConnectResponse, ConnectResults, Empty, FAMILY_V4, MESSAGE_BYTES,
    Message, OmniRequest, OmniResponse, OmniResults, SIZE_UNSET, StreamRequest, StreamResponse,
    StreamResults, UNKNOWN_TEST, address_field, direction, flag, kind,
};
use super::server::{Rules, Server};
use fulmar::device::Device;
use fulmar::device::EtherAddr;
use fulmar::stat::Counter;
use fulmar::{Cidr, Stack, TcpStream, UdpSocket, devices};
use fulmar_nic as sim;
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

const TIME: Duration = Duration::from_secs(30);
const BYTES: usize = 3_000_000;
const TRANSACTIONS: usize = 50;
static GO_ON: AtomicBool = AtomicBool::new(false);

/// A server in a thread, gone with the value, and the stack of its clients.
struct Served {
    clients: Stack,
    at: SocketAddr,
    said: Arc<Mutex<Vec<String>>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<io::Result<()>>>,
}

impl Served {
    fn new() -> Served {
        let (a, b) = devices::link_pair().expect("a link");
        Served::on([stack(a, 1), stack(b, 2)], 8)
    }

    fn on([clients, stack]: [Stack; 2], max_clients: usize) -> Served {
        let said = Arc::new(Mutex::new(Vec::new()));
        let hear = said.clone();
        let rules = Rules {
            max_clients,
            may_read_files: false,
            say: Arc::new(move |s: &str| hear.lock().expect("no panic").push(s.to_owned())),
        };
        let at = SocketAddr::from(([10, 9, 0, 2], super::CONTROL_PORT));
        let server = Server::bind(stack, at, rules).expect("a port");
        let stop = Arc::new(AtomicBool::new(false));
        let flag = stop.clone();
        let thread = Some(std::thread::spawn(move || server.run(&flag)));
        Served { clients, at, said, stop, thread }
    }

    fn said(&self) -> String {
        self.said.lock().expect("no panic").join("\n")
    }

    fn connect(&self, port: u16) -> TcpStream {
        let to = SocketAddr::new(self.at.ip(), port);
        let stream = TcpStream::connect(&self.clients, to).expect("it listens");
        stream.set_read_timeout(Some(TIME)).expect("a timeout");
        stream.set_write_timeout(Some(TIME)).expect("a timeout");
        stream
    }

    fn client(&self) -> Client<'_> {
        Client { served: self, control: self.connect(self.at.port()) }
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

fn stack(device: Box<dyn Device>, host: u8) -> Stack {
    let cidr: Cidr = format!("10.9.0.{host}/24").parse().expect("an address");
    Stack::builder().device(device).address(cidr).unlisted().build().expect("a stack")
}

/// A control connection.
struct Client<'a> {
    served: &'a Served,
    control: TcpStream,
}

impl Client<'_> {
    fn send(&self, message: &Message) {
        control::send(&self.control, message).expect("sent");
    }

    fn receive(&self) -> Message {
        control::receive(&self.control, TIME, &GO_ON).expect("answered").expect("a message")
    }

    fn answer<A: Body>(&self, kind: u32) -> A {
        let message = self.receive();
        assert_eq!((message.kind(), message.second()), (kind, 0), "{}", self.served.said());
        message.body()
    }

    fn ask<A: Body>(&self, kind: u32, body: &impl Body, answer: u32) -> A {
        self.send(&Message::new(kind, u32::MAX, body));
        self.answer(answer)
    }

    fn omni(&self, request: &OmniRequest) -> u16 {
        let r: OmniResponse = self.ask(kind::OMNI, request, kind::OMNI_RESPONSE);
        data_port(r.data_port)
    }

    fn omni_results(&self) -> OmniResults {
        self.answer(kind::OMNI_RESULTS)
    }

    fn sends_a_stream(&self) {
        let port = self.omni(&OmniRequest { direction: direction::RECEIVE, ..omni() });
        send_all(&self.served.connect(port), BYTES);
        let results = self.omni_results();
        assert_eq!((results.bytes_received, results.bytes_sent), (BYTES as u64, 0));
        assert!((0.0..=100.0).contains(&results.cpu_percent) && results.cpus > 0, "{results:?}");
        assert!(results.elapsed > 0.0 && results.recv_calls > 0, "{results:?}");
    }

    fn receives_a_stream(&self) {
        let length = -(BYTES as i32);
        let port = self.omni(&OmniRequest { direction: direction::SEND, length, ..omni() });
        let mut all = Vec::new();
        (&self.served.connect(port)).read_to_end(&mut all).expect("its end");
        assert!(all.len() >= BYTES);
        assert_eq!(self.omni_results().bytes_sent, all.len() as u64);
    }

    /// The classic stream of TCP_SENDFILE.
    fn sends_a_classic_stream(&self, posted: u32) {
        let request = StreamRequest { family: FAMILY_V4, length: 10, posted, ..Default::default() };
        let r: StreamResponse = self.ask(kind::STREAM, &request, kind::STREAM_RESPONSE);
        send_all(&self.served.connect(data_port(r.data_port)), BYTES);
        let results: StreamResults = self.answer(kind::STREAM_RESULTS);
        assert_eq!(results.bytes_received, BYTES as f64);
    }

    fn makes_requests(&self, per_connection: bool) {
        let flags = if per_connection { flag::PER_CONNECTION } else { 0 };
        let length = -(TRANSACTIONS as i32);
        let port = self.omni(&OmniRequest { flags, length, ..exchange() });
        let mut stream = self.served.connect(port);
        for n in 0..TRANSACTIONS {
            if per_connection && n > 0 {
                assert_eq!(stream.read(&mut [0]).expect("the server closes first"), 0);
                stream = self.served.connect(port);
            }
            stream.write_all(&[1; 100]).expect("sent");
            stream.read_exact(&mut [0; 200]).expect("an answer");
        }
        let results = self.omni_results();
        assert_eq!(results.transactions, TRANSACTIONS as u32);
        assert_eq!(results.bytes_received, 100 * TRANSACTIONS as u64);
        assert_eq!(results.bytes_sent, 200 * TRANSACTIONS as u64);
    }

    fn connects_and_closes(&self) {
        let length = -(TRANSACTIONS as i32);
        let request = ConnectRequest { family: FAMILY_V4, length, ..Default::default() };
        let r: ConnectResponse = self.ask(kind::CONNECT, &request, kind::CONNECT_RESPONSE);
        for _ in 0..TRANSACTIONS {
            let mut stream = self.served.connect(data_port(r.data_port));
            assert_eq!(stream.read(&mut [0]).expect("the server closes first"), 0);
        }
        let results: ConnectResults = self.answer(kind::CONNECT_RESULTS);
        assert_eq!(results.transactions, TRANSACTIONS as u32);
    }

    fn datagrams(&self, port: u16) -> UdpSocket {
        let socket = UdpSocket::bind(&self.served.clients, "0.0.0.0:0").expect("a port");
        socket.connect(SocketAddr::new(self.served.at.ip(), port)).expect("a peer");
        socket.set_read_timeout(Some(TIME)).expect("a timeout");
        socket
    }

    fn sends_datagrams(&self) {
        let receives = direction::RECEIVE;
        let port = self.omni(&OmniRequest { protocol: 17, direction: receives, ..omni() });
        let socket = self.datagrams(port);
        for _ in 0..TRANSACTIONS {
            socket.send(&[1; 1000]).expect("sent");
        }
        socket.send(&[]).expect("the end");
        let results = self.omni_results();
        assert_eq!(results.recv_calls, TRANSACTIONS as u32, "a link loses nothing");
        assert_eq!(results.bytes_received, 1000 * TRANSACTIONS as u64);
    }

    fn makes_requests_of_datagrams(&self) {
        let port = self.omni(&OmniRequest { protocol: 17, ..exchange() });
        let socket = self.datagrams(port);
        for _ in 0..TRANSACTIONS {
            socket.send(&[1; 100]).expect("sent");
            assert_eq!(socket.recv(&mut [0; 300]).expect("an answer"), 200);
        }
        socket.send(&[]).expect("the end");
        assert_eq!(self.omni_results().transactions, TRANSACTIONS as u32);
    }
}

fn data_port(port: u32) -> u16 {
    u16::try_from(port).expect("a port")
}

fn send_all(mut stream: &TcpStream, bytes: usize) {
    stream.write_all(&vec![7; bytes]).expect("sent");
    stream.shutdown(Shutdown::Write).expect("ended");
    assert_eq!(stream.read(&mut [0]).expect("the other end"), 0);
}

/// What every request of a stream says.
fn omni() -> OmniRequest {
    OmniRequest {
        protocol: 6,
        send_buffer: -1,
        recv_buffer: -1,
        send_bytes: SIZE_UNSET,
        recv_bytes: SIZE_UNSET,
        request_bytes: -1,
        response_bytes: -1,
        flags: flag::MEASURE_CPU,
        length: 10,
        family: FAMILY_V4,
        ..OmniRequest::default()
    }
}

/// Requests of 100 bytes, responses of 200.
fn exchange() -> OmniRequest {
    OmniRequest {
        direction: direction::SEND | direction::RECEIVE,
        request_bytes: 100,
        response_bytes: 200,
        ..omni()
    }
}

#[test]
fn every_test_runs_over_one_control_connection() {
    let served = Served::new();
    let client = served.client();
    client.sends_a_stream();
    client.receives_a_stream();
    client.sends_a_classic_stream(0);
    client.sends_a_classic_stream(1);
    client.makes_requests(false);
    client.makes_requests(true);
    client.connects_and_closes();
    client.sends_datagrams();
    client.makes_requests_of_datagrams();
    assert_eq!(served.said(), "");
}

#[test]
fn a_posted_stream_is_placed_and_another_is_not() {
    let config =
        |last| sim::SimConfig { ether: EtherAddr([2, 0, 0, 0, 9, last]), ..Default::default() };
    let [(a, _), (b, _)] = sim::pair(config(1), config(2)).expect("two NICs");
    let receiver = stack(Box::new(b), 2);
    let served = Served::on([stack(Box::new(a), 1), receiver.clone()], 8);
    let client = served.client();
    for posted in [0, 1] {
        let counts = || {
            let stat = receiver.stat().expect("it runs");
            [Counter::PlaceHints, Counter::PlacedBytes].map(|c| stat.count(c))
        };
        let before = counts();
        client.sends_a_classic_stream(posted);
        let after = counts();
        let did = [after[0] > before[0], after[1] > before[1]];
        assert_eq!(did, [posted == 1; 2], "{posted}: {before:?} {after:?}");
    }
    assert_eq!(served.said(), "");
}

#[test]
fn several_clients_are_served_at_once() {
    let served = &Served::new();
    let tests: [fn(&Client<'_>); 4] = [
        |client| client.sends_a_stream(),
        |client| client.receives_a_stream(),
        |client| client.makes_requests(false),
        |client| client.connects_and_closes(),
    ];
    std::thread::scope(|scope| {
        for test in tests {
            scope.spawn(move || {
                let client = served.client();
                (0..3).for_each(|_| test(&client));
            });
        }
    });
    assert_eq!(served.said(), "");
}

#[test]
fn requests_that_cannot_be_met_are_answered_with_an_errno() {
    let served = Served::new();
    let receives = OmniRequest { direction: direction::RECEIVE, ..omni() };
    let huge = OmniRequest { recv_bytes: u32::MAX - 1, ..receives };
    let elsewhere = OmniRequest { server_ip: address_field([192, 0, 2, 1].into()).0, ..receives };
    for (message, errno) in [
        (Message::new(4711, u32::MAX, &Empty), UNKNOWN_TEST),
        (Message::new(kind::OMNI, u32::MAX, &Empty), libc::EPROTONOSUPPORT as u32),
        (Message::new(kind::OMNI, u32::MAX, &huge), libc::EINVAL as u32),
        (Message::new(kind::OMNI, u32::MAX, &elsewhere), libc::EADDRNOTAVAIL as u32),
    ] {
        let client = served.client();
        client.send(&message);
        assert_eq!(client.receive().second(), errno, "{message:?}");
    }
    served.client().makes_requests(false);
}

#[test]
fn a_client_that_breaks_off_ends_nothing_but_itself() {
    let served = Served::new();
    let mut half = served.connect(served.at.port());
    half.write_all(&[0; MESSAGE_BYTES / 2]).expect("sent");
    drop(half);
    let silent = served.client();
    served.client().makes_requests(false);
    drop(silent);
    while !served.said().contains("in the middle of a message") {
        std::thread::yield_now();
    }
}

#[test]
fn clients_beyond_the_limit_are_rejected() {
    let (a, b) = devices::link_pair().expect("a link");
    let served = Served::on([stack(a, 1), stack(b, 2)], 1);
    let first = served.client();
    let _: Empty = first.ask(kind::DEBUG_ON, &Empty, kind::DEBUG_OK);
    let second = served.client();
    assert_eq!(control::receive(&second.control, TIME, &GO_ON).expect("its end"), None);
    assert!(served.said().contains(": 1 clients are connected"), "{}", served.said());
}

#[test]
fn a_server_that_stops_ends_a_running_test() {
    let served = Served::new();
    let client = served.client();
    let port = client.omni(&OmniRequest { direction: direction::SEND, length: 0, ..omni() });
    let mut stream = served.connect(port);
    stream.read_exact(&mut [0; 1000]).expect("it runs");
    served.stop.store(true, Ordering::Relaxed);
    // The end of the data comes in order, and the results after it.
    let rest = stream.read_to_end(&mut Vec::new()).expect("its end");
    assert_eq!(client.omni_results().bytes_sent, 1000 + rest as u64);
}

#[test]
fn datagrams_are_sent_only_to_the_client_itself() {
    let (a, b) = devices::link_pair().expect("a link");
    let [one, other] = ["10.9.0.1/24", "10.9.0.3/24"].map(|a| a.parse().expect("an address"));
    let clients = Stack::builder().device(a).address(one).address(other).unlisted().build();
    let served = Served::on([clients.expect("a stack"), stack(b, 2)], 8);
    let client = served.client();
    let bystander = UdpSocket::bind(&served.clients, "10.9.0.3:0").expect("a socket");
    bystander.set_read_timeout(Some(Duration::from_millis(300))).expect("a timeout");
    let request = OmniRequest {
        protocol: 17,
        direction: direction::SEND,
        send_bytes: 100,
        length: -1000,
        client_port: bystander.local_addr().expect("bound").port().into(),
        client_ip: address_field([10, 9, 0, 3].into()).0,
        ..omni()
    };
    client.omni(&request);
    assert_eq!(client.omni_results().bytes_sent, 1000);
    assert!(bystander.recv(&mut [0; 100]).is_err(), "a stranger got a datagram");
}
