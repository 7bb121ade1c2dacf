//! netperf's client: asks a netserver for a test, does its half and puts both accounts together.

mod requests;

use self::requests::{
    connect_request, connect_side, omni_request, omni_side, server_reply, stream_request,
    stream_side,
};
use super::confidence::{Goal, Values, is_enough};
use super::control;
use super::message::{self, Body, ConnectResponse, Message, OmniResponse, StreamResponse, kind};
use super::meter::{self, Usage, service_demand};
use super::pace::{Interim, Length, PAD, Pace};
use super::ring::{self, FileRing, Ring};
use super::socket::{Buffers, LARGEST_DATAGRAM, Network, Stream, Tuning};
use super::transfer::{self, Tally, To};
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

/// How often interim results are shown, and what shows them: it gets the units and the time since
/// it was last called.
pub type Show<'s> = (Duration, &'s mut dyn FnMut(u64, Duration));

/// How long the server may take to answer beyond the test itself.
const ANSWER_TIME: Duration = Duration::from_secs(60);
const CONNECT_TIME: Duration = Duration::from_secs(30);

/// The tests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Test {
    /// We send.
    TcpStream,
    /// The server sends.
    TcpMaerts,
    /// We send a file.
    TcpSendfile,
    /// Request and response.
    TcpRr,
    /// A connection for each.
    TcpCrr,
    /// Connections alone.
    TcpCc,
    /// We send datagrams, faster than they may be taken.
    UdpStream,
    /// Request and response in datagrams.
    UdpRr,
}

/// Every test with its name and the title that its banner has.
pub const TESTS: [(Test, &str, &str); 8] = [
    (Test::TcpStream, "TCP_STREAM", "MIGRATED TCP STREAM TEST"),
    (Test::TcpMaerts, "TCP_MAERTS", "MIGRATED TCP MAERTS TEST"),
    (Test::TcpSendfile, "TCP_SENDFILE", "TCP SENDFILE TEST"),
    (Test::TcpRr, "TCP_RR", "MIGRATED TCP REQUEST/RESPONSE TEST"),
    (Test::TcpCrr, "TCP_CRR", "MIGRATED TCP Connect/Request/Response TEST"),
    (Test::TcpCc, "TCP_CC", "TCP Connect/Close TEST"),
    (Test::UdpStream, "UDP_STREAM", "MIGRATED UDP STREAM TEST"),
    (Test::UdpRr, "UDP_RR", "MIGRATED UDP REQUEST/RESPONSE TEST"),
];

impl Test {
    /// Runs over UDP.
    pub fn is_udp(self) -> bool {
        matches!(self, Test::UdpStream | Test::UdpRr)
    }

    /// Counts transactions, not bytes.
    pub fn is_transactional(self) -> bool {
        matches!(self, Test::TcpRr | Test::TcpCrr | Test::TcpCc | Test::UdpRr)
    }

    /// Each transaction has a connection of its own.
    pub fn is_per_connection(self) -> bool {
        matches!(self, Test::TcpCrr | Test::TcpCc)
    }

    fn exchanges_messages(self) -> bool {
        self.is_transactional() && self != Test::TcpCc
    }
}

/// What the user asks of one side's sockets and messages; `None`: that side decides.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SideOptions {
    /// Socket buffers and Nagle.
    pub tuning: Tuning,
    /// Bytes per send.
    pub send_bytes: Option<usize>,
    /// Bytes per receive.
    pub recv_bytes: Option<usize>,
}

/// What the user asks for.
#[derive(Clone, PartialEq, Debug)]
pub struct TestOptions {
    /// Which test.
    pub test: Test,
    /// How long.
    pub length: Length,
    /// Measure CPU here.
    pub measures_local: bool,
    /// Measure CPU there.
    pub measures_remote: bool,
    /// Our side.
    pub local: SideOptions,
    /// The server's side.
    pub remote: SideOptions,
    /// Bytes of a request and of a response.
    pub exchange_bytes: (usize, usize),
    /// Requests ahead of the answers.
    pub burst: u32,
    /// Buffers in the send and receive ring; 0: as many as needed.
    pub widths: (usize, usize),
    /// The file that our buffers are filled from, or that is sent.
    pub fill: Option<PathBuf>,
    /// The same for the server's buffers.
    pub remote_fill: Option<String>,
    /// The CPU on which the server is to run.
    pub remote_cpu: Option<u32>,
    /// The server receives into posted buffers (`-A`).
    pub remote_posted: bool,
    /// We send memory that is given away (`-a`).
    pub local_given: bool,
}

impl TestOptions {
    /// The test as netperf does it where nothing else is said: ten seconds, messages of one byte in
    /// transactions.
    pub fn new(test: Test) -> TestOptions {
        TestOptions {
            test,
            length: Length::Time(Duration::from_secs(10)),
            measures_local: false,
            measures_remote: false,
            local: SideOptions::default(),
            remote: SideOptions::default(),
            exchange_bytes: (1, 1),
            burst: 0,
            widths: (0, 0),
            fill: None,
            remote_fill: None,
            remote_cpu: None,
            remote_posted: false,
            local_given: false,
        }
    }

    /// The test is asked for in the older message, which alone has a word for posted buffers.
    fn is_classic(&self) -> bool {
        let is_asynchronous = self.remote_posted || self.local_given;
        self.test == Test::TcpSendfile || self.test == Test::TcpStream && is_asynchronous
    }
}

/// One side's account of a run.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Side {
    /// What it moved.
    pub tally: Tally,
    /// The socket buffers at the start and at the end.
    pub buffers: (Buffers, Buffers),
    /// Bytes per send, where it sends.
    pub send_bytes: usize,
    /// Bytes per receive, where it receives.
    pub recv_bytes: usize,
    /// Its CPU; the percentages are -1 where they were not measured.
    pub usage: Usage,
    /// How CPU was measured: a number of netperf's.
    pub cpu_method: u32,
    /// CPUs.
    pub cpus: u32,
    /// CPU time per KB or transaction, µs; -1 where it was not measured.
    pub service_demand: f64,
    /// Segments sent again.
    pub retransmits: Option<u64>,
}

/// What came of one run.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Outcome {
    /// Seconds, by our clock.
    pub elapsed: f64,
    /// Bytes or transactions in that time, as the receiving side counted them.
    pub units: f64,
    /// Ours.
    pub local: Side,
    /// Theirs.
    pub remote: Side,
    /// Payload of a full segment.
    pub segment_bytes: Option<u32>,
}

/// The means of all runs of a test.
#[derive(Clone, PartialEq, Debug)]
pub struct Summary {
    /// The last run: sizes and counts are its.
    pub last: Outcome,
    /// How many there were.
    pub runs: usize,
    /// Seconds.
    pub elapsed: f64,
    /// Bytes or transactions per second.
    pub rate: f64,
    /// Percent of all CPUs, here and there.
    pub cpu_percent: (f64, f64),
    /// Service demand, here and there.
    pub service_demand: (f64, f64),
    /// Full widths of the intervals: throughput, CPU here, CPU there.
    pub widths: [f64; 3],
    /// All of them are as narrow as was asked for.
    pub is_sure: bool,
}

/// What our data loops left behind.
#[derive(Default)]
struct Local {
    tally: Tally,
    usage: Usage,
    buffers: (Buffers, Buffers),
    send_bytes: usize,
    recv_bytes: usize,
    retransmits: Option<u64>,
    segment_bytes: Option<u32>,
}

/// What the server said before the test.
struct ServerReply {
    port: u16,
    buffers: Buffers,
    send_bytes: usize,
    recv_bytes: usize,
}

/// A control connection to a netserver.
pub struct Client<'a> {
    network: &'a dyn Network,
    control: Box<dyn Stream>,
    server: SocketAddr,
    stop: &'a AtomicBool,
}

impl<'a> Client<'a> {
    /// Connects to the netserver at `server`.
    ///
    /// # Errors
    /// The port is closed.
    pub fn connect(
        network: &'a dyn Network,
        server: SocketAddr,
        stop: &'a AtomicBool,
    ) -> io::Result<Client<'a>> {
        let control = network.connect(server, &Tuning::default(), CONNECT_TIME)?;
        Ok(Client { network, control, server, stop })
    }

    /// Repeats a test until the goal is reached or cannot be.
    ///
    /// # Errors
    /// As [`Client::run`].
    pub fn measure(
        &self,
        options: &TestOptions,
        goal: &Goal,
        mut show: Option<Show<'_>>,
    ) -> io::Result<Summary> {
        let mut figures: [Values; 6] = Default::default();
        loop {
            let interim = show.as_mut().map(|(every, show)| Interim::new(*every, &mut **show));
            let last = self.run(options, interim)?;
            let rate = last.units / last.elapsed;
            let (local, remote) = (&last.local, &last.remote);
            let values = [
                rate,
                local.usage.cpu_percent,
                remote.usage.cpu_percent,
                last.elapsed,
                local.service_demand,
                remote.service_demand,
            ];
            figures.iter_mut().zip(values).for_each(|(f, v)| f.push(v));
            let runs = figures[0].runs();
            let judged = [&figures[0], &figures[1], &figures[2]];
            if is_enough(goal, runs, &judged) {
                let widths = judged.map(|f| f.width(goal));
                return Ok(Summary {
                    last,
                    runs,
                    elapsed: figures[3].mean(),
                    rate: figures[0].mean(),
                    cpu_percent: (figures[1].mean(), figures[2].mean()),
                    service_demand: (figures[4].mean(), figures[5].mean()),
                    widths,
                    is_sure: goal.max == 1 || widths.iter().all(|w| *w <= goal.width),
                });
            }
        }
    }

    /// Does a test once.
    ///
    /// # Errors
    /// The server refuses it, says nonsense, goes away; a socket fails.
    pub fn run(&self, options: &TestOptions, interim: Option<Interim<'_>>) -> io::Result<Outcome> {
        let server_reply = self.ask(options)?;
        let to = SocketAddr::new(self.server.ip(), server_reply.port);
        let local = match options.test {
            t if t.is_udp() => self.run_datagrams(options, to, interim)?,
            t if t.is_per_connection() => self.run_connections(options, to, interim)?,
            _ => self.run_stream(options, to, interim)?,
        };
        let remote = self.results(options, &server_reply)?;
        Ok(account(options, &local, remote))
    }

    fn ask(&self, options: &TestOptions) -> io::Result<ServerReply> {
        match options.test {
            _ if options.is_classic() => {
                let r: StreamResponse = self.exchange(
                    options,
                    kind::STREAM,
                    &stream_request(options, self.server),
                    kind::STREAM_RESPONSE,
                )?;
                server_reply(r.data_port, r.send_buffer, r.recv_buffer, 0, r.recv_bytes)
            }
            Test::TcpCc => {
                let r: ConnectResponse = self.exchange(
                    options,
                    kind::CONNECT,
                    &connect_request(options, self.server),
                    kind::CONNECT_RESPONSE,
                )?;
                server_reply(r.data_port, r.send_buffer, r.recv_buffer, 0, 0)
            }
            _ => {
                let r: OmniResponse = self.exchange(
                    options,
                    kind::OMNI,
                    &omni_request(options, self.server),
                    kind::OMNI_RESPONSE,
                )?;
                server_reply(r.data_port, r.send_buffer, r.recv_buffer, r.send_bytes, r.recv_bytes)
            }
        }
    }

    fn exchange<B: Body>(
        &self,
        options: &TestOptions,
        kind: u32,
        body: &impl Body,
        answer: u32,
    ) -> io::Result<B> {
        let cpu = options.remote_cpu.unwrap_or(u32::MAX);
        control::send(&*self.control, &Message::new(kind, cpu, body))?;
        self.answer(&[answer], ANSWER_TIME)
    }

    fn answer<B: Body>(&self, kinds: &[u32], time: Duration) -> io::Result<B> {
        let message = control::receive(&*self.control, time, self.stop)?.ok_or_else(|| {
            let what = "netserver ended the control connection";
            io::Error::new(io::ErrorKind::UnexpectedEof, what)
        })?;
        match message.second() {
            0 if kinds.contains(&message.kind()) => Ok(message.body()),
            0 => Err(nonsense(&format!("it answered with a message of kind {}", message.kind()))),
            message::UNKNOWN_TEST => Err(nonsense("it does not know this test")),
            errno => {
                let errno = i32::try_from(errno).unwrap_or(0);
                let why = io::Error::from_raw_os_error(errno);
                Err(io::Error::new(why.kind(), format!("netserver could not do the test: {why}")))
            }
        }
    }

    fn results(&self, options: &TestOptions, server_reply: &ServerReply) -> io::Result<Side> {
        let time = match options.length {
            Length::Time(t) => t + 2 * PAD + ANSWER_TIME,
            _ => 2 * PAD + ANSWER_TIME,
        };
        Ok(match options.test {
            _ if options.is_classic() => {
                let kinds = results_kinds(kind::STREAM_RESULTS, kind::STREAM_RESPONSE);
                stream_side(&self.answer(&kinds, time)?, server_reply)
            }
            Test::TcpCc => {
                let kinds = results_kinds(kind::CONNECT_RESULTS, kind::CONNECT_RESPONSE);
                connect_side(&self.answer(&kinds, time)?, server_reply)
            }
            _ => {
                let kinds = results_kinds(kind::OMNI_RESULTS, kind::OMNI_RESPONSE);
                omni_side(&self.answer(&kinds, time)?, server_reply)
            }
        })
    }

    fn pace<'p>(
        &self,
        options: &TestOptions,
        pad: Duration,
        interim: Option<Interim<'p>>,
    ) -> io::Result<Pace<'p>>
    where
        'a: 'p,
    {
        let length = match options.test {
            Test::TcpMaerts => options.length.for_receiver(),
            _ => options.length,
        };
        Pace::start(length, pad, options.measures_local, self.stop, interim)
    }

    fn run_stream(
        &self,
        options: &TestOptions,
        to: SocketAddr,
        interim: Option<Interim<'_>>,
    ) -> io::Result<Local> {
        let stream = self.network.connect(to, &options.local.tuning, CONNECT_TIME)?;
        let at_start = self.network.first_buffers(&options.local.tuning)?;
        let mut rings = Rings::new(options, at_start, usize::MAX)?;
        let is_receiver = options.test == Test::TcpMaerts;
        let mut file = match options.test {
            Test::TcpSendfile => {
                let ring = std::mem::replace(&mut rings.send, Ring::new(1, 0, 0)?);
                Some(FileRing::new(options.fill.as_deref(), ring)?)
            }
            _ => None,
        };
        let send_bytes = file.as_ref().map_or(rings.send.bytes(), FileRing::bytes);
        let pad = if is_receiver { PAD } else { Duration::ZERO };
        let mut pace = self.pace(options, pad, interim)?;
        let mut tally = Tally::default();
        match (&mut file, options.test) {
            (Some(file), _) => transfer::send_file(&*stream, file, &mut pace, &mut tally)?,
            (None, Test::TcpMaerts) => {
                transfer::receive(&*stream, &mut rings.receive, &mut pace, &mut tally)?;
            }
            (None, Test::TcpRr) => transfer::request(
                &*stream,
                &mut rings.send,
                &mut rings.receive,
                options.burst,
                &mut pace,
                &mut tally,
            )?,
            (None, Test::TcpStream) if options.local_given => {
                let mut given = stream.given(&mut rings.send)?;
                transfer::send_given(&mut *given, &mut pace, &mut tally)?;
            }
            _ => transfer::send(&*stream, &mut rings.send, &mut pace, &mut tally)?,
        }
        let (segment_bytes, retransmits) = (stream.segment_bytes(), stream.retransmits());
        let at_end = stream.buffers();
        transfer::hang_up(&*stream, &mut pace)?;
        Ok(Local {
            tally,
            usage: pace.finish(false)?,
            buffers: (at_start, at_end),
            send_bytes,
            recv_bytes: rings.receive.bytes(),
            retransmits,
            segment_bytes,
        })
    }

    fn run_connections(
        &self,
        options: &TestOptions,
        to: SocketAddr,
        interim: Option<Interim<'_>>,
    ) -> io::Result<Local> {
        let mut rings = Rings::new(options, Buffers::default(), usize::MAX)?;
        let mut pace = self.pace(options, Duration::ZERO, interim)?;
        let mut tally = Tally::default();
        let exchange =
            (options.test == Test::TcpCrr).then_some((&mut rings.send, &mut rings.receive));
        let tuning = &options.local.tuning;
        let last =
            transfer::connect_each(self.network, to, tuning, exchange, &mut pace, &mut tally)?;
        let usage = pace.finish(false)?;
        let at_start = self.network.first_buffers(tuning)?;
        let (segment_bytes, at_end) = last.unwrap_or((None, at_start));
        Ok(Local {
            tally,
            usage,
            buffers: (at_start, at_end),
            send_bytes: rings.send.bytes(),
            recv_bytes: rings.receive.bytes(),
            segment_bytes,
            retransmits: None,
        })
    }

    fn run_datagrams(
        &self,
        options: &TestOptions,
        to: SocketAddr,
        interim: Option<Interim<'_>>,
    ) -> io::Result<Local> {
        let any = if to.is_ipv4() {
            SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0))
        } else {
            SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0))
        };
        let socket = self.network.datagrams(any, &options.local.tuning)?;
        socket.connect(to)?;
        let buffers = socket.buffers();
        let mut rings = Rings::new(options, buffers, LARGEST_DATAGRAM)?;
        let mut pace = self.pace(options, Duration::ZERO, interim)?;
        let mut tally = Tally::default();
        if options.test == Test::UdpRr {
            let both = (&mut rings.send, &mut rings.receive);
            let peer = to.ip().to_canonical();
            transfer::request_datagrams(
                &*socket,
                peer,
                both,
                options.burst,
                &mut pace,
                &mut tally,
            )?;
        } else {
            transfer::send_datagrams(&*socket, To::Peer, &mut rings.send, &mut pace, &mut tally)?;
        }
        transfer::say_farewell(&*socket, To::Peer);
        Ok(Local {
            tally,
            usage: pace.finish(false)?,
            buffers: (buffers, buffers),
            send_bytes: rings.send.bytes(),
            recv_bytes: rings.receive.bytes(),
            ..Local::default()
        })
    }
}

/// What the kind of a message with results may be: netserver leaves in it what its response was,
/// converted to network order once more.
fn results_kinds(results: u32, response: u32) -> [u32; 3] {
    [results, response, response.swap_bytes()]
}

fn nonsense(what: &str) -> io::Error {
    let text = format!("the other side speaks netperf's protocol otherwise than expected: {what}");
    io::Error::new(io::ErrorKind::InvalidData, text)
}

/// The rings of our side; one that the test does not use holds nothing.
struct Rings {
    send: Ring,
    receive: Ring,
}

impl Rings {
    fn new(options: &TestOptions, buffers: Buffers, most: usize) -> io::Result<Rings> {
        let empty = || Ring::new(1, 0, 0);
        let (request, response) = options.exchange_bytes;
        let fill = options.fill.as_deref();
        if options.test.exchanges_messages() {
            let send = Ring::new(options.widths.0.max(1), request, 0)?.filled(fill)?;
            return Ok(Rings { send, receive: Ring::new(options.widths.1.max(1), response, 0)? });
        }
        let local = &options.local;
        let default = |buffer, asked: Option<usize>| ring::default_bytes(buffer, asked.is_some());
        match options.test {
            Test::TcpCc => Ok(Rings { send: empty()?, receive: empty()? }),
            Test::TcpMaerts => {
                let bytes = default(buffers.recv, local.tuning.recv_buffer);
                let bytes = local.recv_bytes.unwrap_or(bytes);
                let receive = Ring::new(options.widths.1, bytes, buffers.recv)?;
                Ok(Rings { send: empty()?, receive })
            }
            test => {
                let bytes = default(buffers.send, local.tuning.send_buffer).min(most);
                let bytes = local.send_bytes.unwrap_or(bytes);
                let send = Ring::new(options.widths.0, bytes, buffers.send)?;
                // The file that is sent fills no ring.
                let fill = fill.filter(|_| test != Test::TcpSendfile);
                Ok(Rings { send: send.filled(fill)?, receive: empty()? })
            }
        }
    }
}

/// Puts both accounts together. Throughput is what the receiver took by our clock; service demand
/// is per unit that passed our side, as netperf has it.
fn account(options: &TestOptions, local: &Local, mut remote: Side) -> Outcome {
    let elapsed = local.usage.elapsed.as_secs_f64().max(1e-9);
    let transactions = local.tally.transactions as f64;
    let (units, kb_or_transactions) = match options.test {
        t if t.is_transactional() => (transactions, transactions),
        Test::TcpMaerts => {
            (local.tally.bytes_received as f64, local.tally.bytes_received as f64 / 1024.0)
        }
        _ => (remote.tally.bytes_received as f64, local.tally.bytes_sent as f64 / 1024.0),
    };
    let mut ours = Side {
        tally: local.tally,
        buffers: local.buffers,
        send_bytes: local.send_bytes,
        recv_bytes: local.recv_bytes,
        usage: local.usage,
        cpu_method: local.usage.method(),
        cpus: meter::cpus(),
        service_demand: -1.0,
        retransmits: local.retransmits,
    };
    for (side, is_measured) in
        [(&mut ours, options.measures_local), (&mut remote, options.measures_remote)]
    {
        side.service_demand = -1.0;
        if is_measured {
            let percent = side.usage.cpu_percent;
            side.service_demand = service_demand(percent, side.cpus, kb_or_transactions, elapsed);
        } else {
            side.usage.cpu_percent = -1.0;
        }
    }
    Outcome { elapsed, units, local: ours, remote, segment_bytes: local.segment_bytes }
}
