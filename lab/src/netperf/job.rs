//! What a client asked the server to do, whichever of the three requests it came in, and its
//! conduct: open the data socket, run the loops, account.

use super::message::{
    self, ConnectRequest, FAMILY_V6, OmniRequest, SIZE_UNSET, StreamRequest, direction, flag,
};
use super::meter::Usage;
use super::pace::{Length, PAD, Pace};
use super::ring::{self, Ring};
use super::socket::{
    Buffers, LARGEST_DATAGRAM, Posted, Tuning, accept, datagrams, is_tick, listen,
};
use super::transfer::{self, End, Tally};
use fulmar::{Stack, TcpListener, TcpStream, UdpSocket};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How long a client may take to open the data connection that it asked for.
const ACCEPT_TIME: Duration = Duration::from_secs(60);
/// Buffers that are posted at once: one is filled while the program reads the other, as in the published measurements.
/// More buffers do not help, because a device has two ranges per flow.
const POSTED: usize = 2;
const TCP: u32 = 6;
const UDP: u32 = 17;

/// Sizes of one direction of a test.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Sizes {
    /// Bytes of a message; `None`: as large as the socket buffer.
    pub bytes: Option<usize>,
    /// Buffers in the ring; 0: enough for the socket buffer.
    pub width: usize,
}

/// A test, as the server sees it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Job {
    /// Datagrams, not a stream.
    pub is_udp: bool,
    /// A connection per transaction.
    pub per_connection: bool,
    /// Traffic sent by the server, if any.
    pub sends: Option<Sizes>,
    /// Traffic received by the server, if any.
    pub receives: Option<Sizes>,
    /// How the data sockets are to be.
    pub tuning: Tuning,
    /// How long.
    pub length: Length,
    /// Receive into posted buffers.
    pub is_posted: bool,
    /// Whether CPU is to be measured.
    pub measures_cpu: bool,
    /// Where the data socket is to be.
    pub at: SocketAddr,
    /// The client's data port, where the server speaks first.
    pub client_port: u16,
    /// The file that fills the buffers.
    pub fill: Option<PathBuf>,
}

fn refuse(errno: i32) -> io::Error {
    io::Error::from_raw_os_error(errno)
}

fn buffer(bytes: i32) -> Option<usize> {
    usize::try_from(bytes).ok().filter(|b| *b > 0)
}

fn size(bytes: u32) -> Option<usize> {
    (bytes != 0 && bytes != SIZE_UNSET).then_some(bytes as usize)
}

fn port(number: u32) -> io::Result<u16> {
    u16::try_from(number).map_err(|_| refuse(libc::EINVAL))
}

fn unspecified(family: u32) -> IpAddr {
    match family {
        FAMILY_V6 => Ipv6Addr::UNSPECIFIED.into(),
        _ => Ipv4Addr::UNSPECIFIED.into(),
    }
}

impl Job {
    /// From the request of most tests.
    ///
    /// # Errors
    /// EPROTONOSUPPORT, EINVAL: no test of ours.
    pub fn from_omni(r: &OmniRequest) -> io::Result<Job> {
        let is_udp = match r.protocol {
            TCP => false,
            UDP => true,
            _ => return Err(refuse(libc::EPROTONOSUPPORT)),
        };
        let per_connection = r.flags & flag::PER_CONNECTION != 0;
        let (sends, receives) =
            (r.direction & direction::SEND != 0, r.direction & direction::RECEIVE != 0);
        if per_connection && (is_udp || sends != receives) || !(per_connection || sends || receives)
        {
            return Err(refuse(libc::EINVAL));
        }
        let is_rr = sends && receives;
        // A transaction's sizes are the sizes of its two messages, one each in the ring by default.
        let sizes = |message: i32, bytes: u32, width: u32| Sizes {
            bytes: if is_rr { usize::try_from(message).ok() } else { size(bytes) },
            width: if is_rr { width.max(1) } else { width } as usize,
        };
        let send = sizes(r.response_bytes, r.send_bytes, r.send_width);
        let receive = sizes(r.request_bytes, r.recv_bytes, r.recv_width);
        if is_rr && (send.bytes.unwrap_or(0) == 0 || receive.bytes.unwrap_or(0) == 0) {
            return Err(refuse(libc::EINVAL));
        }
        let ip = message::address(&r.server_ip, r.family).unwrap_or(unspecified(r.family));
        Ok(Job {
            is_udp,
            per_connection,
            sends: sends.then_some(send),
            receives: receives.then_some(receive),
            tuning: Tuning {
                send_buffer: buffer(r.send_buffer),
                recv_buffer: buffer(r.recv_buffer),
                nodelay: r.flags & flag::NODELAY != 0,
            },
            length: Length::from_number(r.length.into()),
            is_posted: false,
            measures_cpu: r.flags & flag::MEASURE_CPU != 0,
            at: SocketAddr::new(ip, port(r.data_port)?),
            client_port: port(r.client_port)?,
            fill: r.fill_file.as_str().map(PathBuf::from),
        })
    }

    /// From the request of TCP_SENDFILE.
    ///
    /// # Errors
    /// EINVAL: no port number.
    pub fn from_stream(r: &StreamRequest) -> io::Result<Job> {
        // netperf leaves -1 there without `-A`.
        let is_posted = i32::try_from(r.posted).is_ok_and(|n| n > 0);
        let width = if is_posted { POSTED } else { 0 };
        let sizes = Sizes { bytes: size(r.recv_bytes), width };
        Ok(Job {
            is_udp: false,
            per_connection: false,
            sends: None,
            receives: Some(sizes),
            tuning: Tuning {
                send_buffer: buffer(r.send_buffer),
                recv_buffer: buffer(r.recv_buffer),
                nodelay: r.nodelay == 1,
            },
            // The end of the stream ends it in any case; a number of bytes looks like seconds here.
            length: Length::Endless,
            is_posted,
            measures_cpu: r.measure_cpu == 1,
            at: SocketAddr::new(unspecified(r.family), port(r.data_port)?),
            client_port: 0,
            fill: None,
        })
    }

    /// From the request of TCP_CC.
    ///
    /// # Errors
    /// EINVAL: no port number.
    pub fn from_connect(r: &ConnectRequest) -> io::Result<Job> {
        Ok(Job {
            is_udp: false,
            per_connection: true,
            sends: None,
            receives: None,
            tuning: Tuning {
                send_buffer: buffer(r.send_buffer),
                recv_buffer: buffer(r.recv_buffer),
                nodelay: r.nodelay == 1,
            },
            length: Length::from_number(r.length.into()),
            is_posted: false,
            measures_cpu: r.measure_cpu == 1,
            at: SocketAddr::new(unspecified(r.family), port(r.data_port)?),
            client_port: 0,
            fill: None,
        })
    }

    /// Opens the data socket and takes the memory.
    ///
    /// # Errors
    /// The port is taken; a message is too large; the file to fill from cannot be read.
    pub fn open(&self, stack: &Stack) -> io::Result<Opened> {
        let (socket, buffers) = if self.is_udp {
            let socket = datagrams(stack, self.at, &self.tuning)?;
            (LocalSocket::Datagrams(socket), Buffers::of_datagrams(&self.tuning))
        } else {
            let listener = listen(stack, self.at)?;
            (LocalSocket::Listener(listener), Buffers::of_connections(&self.tuning))
        };
        let most = if self.is_udp { LARGEST_DATAGRAM } else { usize::MAX };
        let make = |sizes: Option<Sizes>, buffer: usize, is_asked_for: bool, most: usize| {
            let Some(sizes) = sizes else { return Ring::new(1, 0, 0) };
            let default = ring::default_bytes(buffer, is_asked_for).min(most);
            Ring::new(sizes.width, sizes.bytes.unwrap_or(default), buffer)
        };
        let sending = make(self.sends, buffers.send, self.tuning.send_buffer.is_some(), most)?;
        let receiving =
            make(self.receives, buffers.recv, self.tuning.recv_buffer.is_some(), usize::MAX)?;
        let sending = match self.sends {
            Some(_) => sending.filled(self.fill.as_deref().map(Path::new))?,
            None => sending,
        };
        Ok(Opened { socket, buffers, sending, receiving })
    }

    fn is_rr(&self) -> bool {
        self.sends.is_some() && self.receives.is_some()
    }
}

/// The data socket of a test.
enum LocalSocket {
    Listener(TcpListener),
    Datagrams(UdpSocket),
}

/// A test that can begin.
pub struct Opened {
    socket: LocalSocket,
    /// Options of the data socket.
    pub buffers: Buffers,
    /// Buffers to send from.
    pub sending: Ring,
    /// Where it is received.
    pub receiving: Ring,
}

/// The result of a test.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Done {
    /// The transferred traffic.
    pub tally: Tally,
    /// The time and CPU that it took.
    pub usage: Usage,
    /// Options of the data socket at the end.
    pub buffers: Buffers,
    /// Segments sent again, where that is known.
    pub retransmits: Option<u64>,
}

impl Opened {
    /// The port of the data socket.
    ///
    /// # Errors
    /// The socket is gone.
    pub fn port(&self) -> io::Result<u16> {
        let local = match &self.socket {
            LocalSocket::Listener(l) => l.local_addr()?,
            LocalSocket::Datagrams(d) => d.local_addr()?,
        };
        Ok(local.port())
    }

    /// Runs the test with the client at `peer`.
    ///
    /// # Errors
    /// The client did not connect, broke its connection or fell silent.
    pub fn run(self, job: &Job, peer: IpAddr, stop: &AtomicBool) -> io::Result<Done> {
        match self.socket {
            LocalSocket::Datagrams(socket) => {
                run_datagrams(&socket, job, peer, self.sending, self.receiving, stop)
            }
            LocalSocket::Listener(listener) if job.per_connection => {
                run_connections(&listener, job, self.sending, self.receiving, stop)
            }
            LocalSocket::Listener(listener) => {
                let stream = accept_from(&listener, &job.tuning, peer, stop)?;
                drop(listener);
                run_stream(&stream, job, self.sending, self.receiving, stop)
            }
        }
    }
}

/// The client's connection; one from another address is closed.
fn accept_from(
    listener: &TcpListener,
    tuning: &Tuning,
    peer: IpAddr,
    stop: &AtomicBool,
) -> io::Result<TcpStream> {
    let started = Instant::now();
    while started.elapsed() < ACCEPT_TIME && !stop.load(Ordering::Relaxed) {
        match accept(listener, tuning) {
            Ok((stream, from)) if from.ip().to_canonical() == peer => return Ok(stream),
            Ok(_) => {}
            Err(e) if is_tick(&e) => {}
            Err(e) => return Err(e),
        }
    }
    let what = format!("no data connection arrived within {} s", ACCEPT_TIME.as_secs());
    Err(io::Error::new(io::ErrorKind::TimedOut, what))
}

fn run_stream(
    stream: &TcpStream,
    job: &Job,
    mut sending: Ring,
    mut receiving: Ring,
    stop: &AtomicBool,
) -> io::Result<Done> {
    let pad = if job.receives.is_some() { PAD } else { Duration::ZERO };
    let length = if job.sends.is_some() { job.length } else { job.length.for_receiver() };
    let mut pace = Pace::start(length, pad, job.measures_cpu, stop)?;
    let mut tally = Tally::default();
    let end = match (&job.sends, &job.receives) {
        (Some(_), Some(_)) => {
            transfer::respond(stream, &mut receiving, &mut sending, &mut pace, &mut tally)?
        }
        (Some(_), None) => {
            transfer::send(stream, &mut sending, &mut pace, &mut tally)?;
            End::Told
        }
        _ if job.is_posted => {
            let mut posted = Posted::new(stream, receiving.width(), receiving.bytes())?;
            transfer::receive_posted(&mut posted, &mut pace, &mut tally)?
        }
        _ => transfer::receive(stream, &mut receiving, &mut pace, &mut tally)?,
    };
    let usage = pace.finish(end == End::Over)?;
    let retransmits = stream.info().ok().map(|i| i.retransmits);
    let done = Done { tally, usage, buffers: Buffers::of(stream), retransmits };
    // A client that is gone meanwhile has had its results' worth.
    let _ = stream.shutdown(Shutdown::Write);
    Ok(done)
}

fn run_connections(
    listener: &TcpListener,
    job: &Job,
    mut sending: Ring,
    mut receiving: Ring,
    stop: &AtomicBool,
) -> io::Result<Done> {
    let mut pace = Pace::start(job.length, PAD, job.measures_cpu, stop)?;
    let mut tally = Tally::default();
    let exchange = job.is_rr().then_some((&mut receiving, &mut sending));
    let end = transfer::accept_each(listener, &job.tuning, exchange, &mut pace, &mut tally)?;
    let by_time = end == End::Over && matches!(job.length, Length::Time(_));
    let usage = pace.finish(by_time)?;
    let buffers = Buffers::of_connections(&job.tuning);
    Ok(Done { tally, usage, buffers, retransmits: None })
}

fn run_datagrams(
    socket: &UdpSocket,
    job: &Job,
    peer: IpAddr,
    mut sending: Ring,
    mut receiving: Ring,
    stop: &AtomicBool,
) -> io::Result<Done> {
    let pad = if job.receives.is_some() { PAD } else { Duration::ZERO };
    let length = if job.sends.is_some() { job.length } else { job.length.for_receiver() };
    let mut pace = Pace::start(length, pad, job.measures_cpu, stop)?;
    let mut tally = Tally::default();
    let (send, receive) = (&mut sending, &mut receiving);
    let end = match (&job.sends, &job.receives) {
        (Some(_), Some(_)) => {
            transfer::respond_datagrams(socket, peer, receive, send, &mut pace, &mut tally)?
        }
        (Some(_), None) => {
            // Only to the client itself, or this would flood third parties on request.
            let to = SocketAddr::new(peer, job.client_port);
            transfer::send_datagrams(socket, to, send, &mut pace, &mut tally)?;
            transfer::say_farewell(socket, to);
            End::Told
        }
        _ => transfer::receive_datagrams(socket, peer, receive, &mut pace, &mut tally)?,
    };
    let usage = pace.finish(end == End::Over)?;
    let buffers = Buffers::of_datagrams(&job.tuning);
    Ok(Done { tally, usage, buffers, retransmits: None })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netperf::message::{FAMILY_V4, Text, address_field};
    use proptest::prelude::*;

    fn stream_request() -> OmniRequest {
        OmniRequest {
            protocol: TCP,
            direction: direction::RECEIVE,
            send_buffer: -1,
            recv_buffer: -1,
            send_bytes: SIZE_UNSET,
            recv_bytes: SIZE_UNSET,
            request_bytes: -1,
            response_bytes: -1,
            length: 10,
            family: FAMILY_V4,
            ..OmniRequest::default()
        }
    }

    #[test]
    fn a_stream_receives_as_much_as_the_socket_buffer_holds() {
        let job = Job::from_omni(&stream_request()).expect("a stream");
        assert_eq!(job.receives, Some(Sizes { bytes: None, width: 0 }));
        assert_eq!((job.sends, job.is_udp, job.per_connection), (None, false, false));
        assert_eq!(job.tuning, Tuning::default());
        assert_eq!(job.length, Length::Time(Duration::from_secs(10)));
        assert_eq!(job.at, SocketAddr::from(([0, 0, 0, 0], 0)));
    }

    #[test]
    fn a_transaction_has_the_sizes_of_its_messages() {
        let both = direction::SEND | direction::RECEIVE;
        let request = OmniRequest {
            direction: both,
            request_bytes: 3,
            response_bytes: 5,
            flags: flag::NODELAY | flag::MEASURE_CPU,
            length: -7,
            ..stream_request()
        };
        let job = Job::from_omni(&request).expect("transactions");
        assert_eq!(job.receives, Some(Sizes { bytes: Some(3), width: 1 }));
        assert_eq!(job.sends, Some(Sizes { bytes: Some(5), width: 1 }));
        assert!(job.tuning.nodelay && job.measures_cpu && job.is_rr());
        assert_eq!(job.length, Length::Units(7));
        for empty in [
            OmniRequest { request_bytes: 0, ..request },
            OmniRequest { response_bytes: -1, ..request },
        ] {
            assert_eq!(
                Job::from_omni(&empty).expect_err("empty").raw_os_error(),
                Some(libc::EINVAL)
            );
        }
    }

    #[test]
    fn unsupported_tests_are_refused() {
        let r = stream_request();
        for (wrong, errno) in [
            (OmniRequest { protocol: 132, ..r }, libc::EPROTONOSUPPORT),
            (OmniRequest { direction: 0, ..r }, libc::EINVAL),
            (OmniRequest { flags: flag::PER_CONNECTION, ..r }, libc::EINVAL),
            (OmniRequest { data_port: 65_536, ..r }, libc::EINVAL),
            (OmniRequest { client_port: u32::MAX, ..r }, libc::EINVAL),
        ] {
            assert_eq!(Job::from_omni(&wrong).expect_err("wrong").raw_os_error(), Some(errno));
        }
    }

    #[test]
    fn a_data_address_is_the_one_that_was_asked_for() {
        let (server_ip, family) = address_field("fd77::2".parse().expect("an address"));
        let request = OmniRequest { server_ip, family, data_port: 9, ..stream_request() };
        let job = Job::from_omni(&request).expect("a stream");
        assert_eq!(job.at, "[fd77::2]:9".parse().expect("an address"));
    }

    #[test]
    fn the_length_of_a_classic_stream_is_the_streams_own() {
        let request = StreamRequest { length: 10, measure_cpu: 1, family: 6, ..Default::default() };
        let job = Job::from_stream(&request).expect("a stream");
        assert_eq!(job.length, Length::Endless);
        assert!(job.at.is_ipv6() && job.measures_cpu && job.receives.is_some());
    }

    proptest! {
        /// Any request opens with bounded memory or is refused; no number makes it panic.
        #[test]
        fn every_request_makes_a_bounded_job(
            protocol in prop_oneof![Just(TCP), Just(UDP), any::<u32>()],
            direction in 0u32..8,
            flags in any::<u32>(),
            sizes in any::<(u32, u32, u32, u32, i32, i32)>(),
            buffers in any::<(i32, i32)>(),
            length in any::<i32>(),
            fill in any::<[u8; 32]>(),
        ) {
            let request = OmniRequest {
                protocol, direction, flags, length,
                send_bytes: sizes.0, send_width: sizes.1, recv_bytes: sizes.2, recv_width: sizes.3,
                request_bytes: sizes.4, response_bytes: sizes.5,
                send_buffer: buffers.0, recv_buffer: buffers.1,
                fill_file: Text(fill),
                ..OmniRequest::default()
            };
            if let Ok(job) = Job::from_omni(&request) {
                prop_assert!(job.sends.is_some() || job.receives.is_some() || job.per_connection);
                for sizes in [job.sends, job.receives].into_iter().flatten() {
                    let bytes = sizes.bytes.unwrap_or(1);
                    if let Ok(ring) = Ring::new(sizes.width, bytes.min(1 << 20), 0) {
                        prop_assert!(ring.width() * ring.bytes() <= 64 << 20);
                    }
                }
            }
        }
    }
}
