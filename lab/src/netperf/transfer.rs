//! The data loops of both ends, over any stack. None of them waits longer than the pace allows, and
//! none allocates.

use super::pace::Pace;
use super::ring::{FileRing, Ring};
use super::socket::{
    Buffers, Datagrams, Given, Listener, Network, Posted, Stream, Tuning, is_tick,
};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

/// How long one connection of a connection test may take to come about.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// What may still arrive after the end of a test.
const MOST_LATE_BYTES: usize = 64 << 20;
/// Empty datagrams that tell the end of a UDP test; any one of them does.
const FAREWELLS: usize = 3;

/// What one end did.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Tally {
    /// Bytes sent.
    pub bytes_sent: u64,
    /// Messages sent.
    pub send_calls: u64,
    /// Sends that were refused for the moment.
    pub failed_sends: u64,
    /// Bytes received.
    pub bytes_received: u64,
    /// Calls that received them.
    pub recv_calls: u64,
    /// Transactions.
    pub transactions: u64,
}

/// How a loop ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum End {
    /// The other side ended it.
    Told,
    /// The time or the units of the test did.
    Over,
}

/// Writes all of a message, or what is possible until the test is over.
fn write_whole(stream: &dyn Stream, bytes: &[u8], pace: &mut Pace<'_>) -> io::Result<usize> {
    let mut done = 0;
    while done < bytes.len() {
        match stream.write(&bytes[done..]) {
            Ok(n) => {
                done += n;
                pace.stir();
            }
            Err(e) if is_tick(&e) => pace.idle()?,
            Err(e) => return Err(e),
        }
        if done < bytes.len() && pace.is_over() {
            break;
        }
    }
    Ok(done)
}

/// Sends messages until the test is over.
pub fn send(
    stream: &dyn Stream,
    ring: &mut Ring,
    pace: &mut Pace<'_>,
    tally: &mut Tally,
) -> io::Result<()> {
    while !pace.is_over() {
        let n = write_whole(stream, ring.advance(), pace)?;
        note_sent(n, pace, tally);
    }
    Ok(())
}

fn note_sent(bytes: usize, pace: &mut Pace<'_>, tally: &mut Tally) {
    tally.bytes_sent += bytes as u64;
    tally.send_calls += 1;
    pace.spend(bytes as u64);
}

/// Sends parts of a file until the test is over.
pub fn send_file(
    stream: &dyn Stream,
    ring: &mut FileRing,
    pace: &mut Pace<'_>,
    tally: &mut Tally,
) -> io::Result<()> {
    let bytes = ring.bytes();
    while !pace.is_over() {
        let (file, offset) = ring.advance();
        let mut done = 0;
        while done < bytes {
            match stream.send_file(file, offset + done as u64, bytes - done) {
                Ok(0) => {
                    let what = "the file was cut while it was sent";
                    return Err(io::Error::new(io::ErrorKind::UnexpectedEof, what));
                }
                Ok(n) => {
                    done += n;
                    pace.stir();
                }
                Err(e) if is_tick(&e) => pace.idle()?,
                Err(e) => return Err(e),
            }
            if done < bytes && pace.is_over() {
                break;
            }
        }
        note_sent(done, pace, tally);
    }
    Ok(())
}

/// Receives until the other side ends its sending, or the time is over.
pub fn receive(
    stream: &dyn Stream,
    ring: &mut Ring,
    pace: &mut Pace<'_>,
    tally: &mut Tally,
) -> io::Result<End> {
    loop {
        match stream.read(ring.advance()) {
            Ok(0) => return Ok(End::Told),
            Ok(n) => {
                tally.bytes_received += n as u64;
                tally.recv_calls += 1;
                pace.spend(n as u64);
            }
            Err(e) if is_tick(&e) => pace.idle()?,
            Err(e) => return Err(e),
        }
        if pace.is_over() {
            return Ok(End::Over);
        }
    }
}

/// As [`receive`], into posted buffers.
pub fn receive_posted(
    posted: &mut dyn Posted,
    pace: &mut Pace<'_>,
    tally: &mut Tally,
) -> io::Result<End> {
    loop {
        match posted.next() {
            Ok(0) => return Ok(End::Told),
            Ok(n) => {
                tally.bytes_received += n as u64;
                tally.recv_calls += 1;
                pace.spend(n as u64);
            }
            Err(e) if is_tick(&e) => pace.idle()?,
            Err(e) => return Err(e),
        }
        if pace.is_over() {
            return Ok(End::Over);
        }
    }
}

/// As [`send`], of memory that is given away.
pub fn send_given(given: &mut dyn Given, pace: &mut Pace<'_>, tally: &mut Tally) -> io::Result<()> {
    while !pace.is_over() {
        match given.next() {
            Ok(n) => note_sent(n, pace, tally),
            Err(e) if is_tick(&e) => pace.idle()?,
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Reads exactly one message. False: the stream ended before it, or the test did.
fn read_whole(
    stream: &dyn Stream,
    buffer: &mut [u8],
    pace: &mut Pace<'_>,
    tally: &mut Tally,
) -> io::Result<bool> {
    let mut done = 0;
    while done < buffer.len() {
        match stream.read(&mut buffer[done..]) {
            Ok(0) => return Ok(false),
            Ok(n) => {
                done += n;
                tally.bytes_received += n as u64;
                tally.recv_calls += 1;
                pace.stir();
            }
            Err(e) if is_tick(&e) => {
                pace.idle()?;
                if pace.is_over() {
                    return Ok(false);
                }
            }
            Err(e) => return Err(e),
        }
    }
    Ok(true)
}

/// Answers requests until the other side ends.
pub fn respond(
    stream: &dyn Stream,
    requests: &mut Ring,
    responses: &mut Ring,
    pace: &mut Pace<'_>,
    tally: &mut Tally,
) -> io::Result<End> {
    while !pace.is_over() {
        if !read_whole(stream, requests.advance(), pace, tally)? {
            return Ok(if pace.is_over() { End::Over } else { End::Told });
        }
        let response = responses.advance();
        if write_whole(stream, response, pace)? < response.len() {
            return Ok(End::Over);
        }
        tally.bytes_sent += response.len() as u64;
        tally.send_calls += 1;
        tally.transactions += 1;
        pace.spend(1);
    }
    Ok(End::Over)
}

/// Makes requests until the test is over, `burst` of them ahead of the answers.
pub fn request(
    stream: &dyn Stream,
    requests: &mut Ring,
    responses: &mut Ring,
    burst: u32,
    pace: &mut Pace<'_>,
    tally: &mut Tally,
) -> io::Result<()> {
    for _ in 0..burst {
        ask(stream, requests, pace, tally)?;
    }
    while !pace.is_over() {
        if !ask(stream, requests, pace, tally)? {
            return Ok(());
        }
        if !read_whole(stream, responses.advance(), pace, tally)? {
            return if pace.is_over() { Ok(()) } else { Err(ended_early()) };
        }
        tally.transactions += 1;
        pace.spend(1);
    }
    Ok(())
}

fn ask(
    stream: &dyn Stream,
    requests: &mut Ring,
    pace: &mut Pace<'_>,
    tally: &mut Tally,
) -> io::Result<bool> {
    let request = requests.advance();
    let n = write_whole(stream, request, pace)?;
    tally.bytes_sent += n as u64;
    tally.send_calls += u64::from(n == request.len());
    Ok(n == request.len())
}

fn ended_early() -> io::Error {
    io::Error::new(io::ErrorKind::UnexpectedEof, "the other side ended the test early")
}

/// Ends sending and waits until the other side has taken everything and ended too.
pub fn hang_up(stream: &dyn Stream, pace: &mut Pace<'_>) -> io::Result<()> {
    stream.shutdown_write()?;
    let mut rest = [0; 4096];
    let mut late = 0;
    loop {
        match stream.read(&mut rest) {
            Ok(0) => return Ok(()),
            // Answers to requests that were ahead when the time was over.
            Ok(n) if late < MOST_LATE_BYTES => {
                late += n;
                pace.stir();
            }
            Ok(_) => return Err(io::Error::other("the other side goes on sending after the end")),
            Err(e) if is_tick(&e) => pace.idle()?,
            Err(e) => return Err(e),
        }
    }
}

/// The two messages of a transaction; `None`: connect and close only.
pub type Exchange<'a> = Option<(&'a mut Ring, &'a mut Ring)>;

/// Accepts connections, answers one request on each if that is the test, and closes it first, until
/// the test is over. A connection that fails by itself is not counted.
pub fn accept_each(
    listener: &dyn Listener,
    mut exchange: Exchange<'_>,
    pace: &mut Pace<'_>,
    tally: &mut Tally,
) -> io::Result<End> {
    while !pace.is_over() {
        let stream = match listener.accept() {
            Ok((stream, _)) => stream,
            Err(e) if is_tick(&e) => {
                pace.idle()?;
                if pace.is_silent_end() {
                    return Ok(End::Over);
                }
                continue;
            }
            Err(e) => return Err(e),
        };
        if let Some((requests, responses)) = &mut exchange {
            let was_asked = read_whole(&*stream, requests.advance(), pace, tally);
            let response = responses.advance();
            if !matches!(was_asked, Ok(true)) || write_whole(&*stream, response, pace).is_err() {
                continue;
            }
            tally.bytes_sent += response.len() as u64;
            tally.send_calls += 1;
        }
        drop(stream);
        tally.transactions += 1;
        pace.spend(1);
    }
    Ok(End::Over)
}

/// Connects, makes one request if that is the test, and waits for the other side's close, until the
/// test is over. Returns the first connection's segment size and buffers.
pub fn connect_each(
    network: &dyn Network,
    to: SocketAddr,
    tuning: &Tuning,
    mut exchange: Exchange<'_>,
    pace: &mut Pace<'_>,
    tally: &mut Tally,
) -> io::Result<Option<(Option<u32>, Buffers)>> {
    let mut first = None;
    while !pace.is_over() {
        let stream = network.connect(to, tuning, CONNECT_TIMEOUT)?;
        if let Some((requests, responses)) = &mut exchange {
            let is_done = ask(&*stream, requests, pace, tally)?
                && read_whole(&*stream, responses.advance(), pace, tally)?;
            if !is_done {
                return if pace.is_over() { Ok(first) } else { Err(ended_early()) };
            }
        }
        first.get_or_insert_with(|| (stream.segment_bytes(), stream.buffers()));
        if read_whole(&*stream, &mut [0], pace, tally)? {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "an answer was too long"));
        }
        if !pace.is_over() {
            tally.transactions += 1;
            pace.spend(1);
        }
    }
    Ok(first)
}

/// Where datagrams go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum To {
    /// To the peer that the socket is connected to.
    Peer,
    /// To this address.
    Address(SocketAddr),
}

fn send_one(socket: &dyn Datagrams, bytes: &[u8], to: To) -> io::Result<usize> {
    match to {
        To::Peer => socket.send(bytes),
        To::Address(to) => socket.send_to(bytes, to),
    }
}

/// A datagram that was refused for the moment: the queue is full, or an earlier one met a closed
/// port (which the next test of the same peer cannot help).
fn is_passing(error: &io::Error) -> bool {
    is_tick(error)
        || error.kind() == io::ErrorKind::ConnectionRefused
        || error.raw_os_error() == Some(libc::ENOBUFS)
}

/// Sends datagrams until the test is over, as fast as they go.
pub fn send_datagrams(
    socket: &dyn Datagrams,
    to: To,
    ring: &mut Ring,
    pace: &mut Pace<'_>,
    tally: &mut Tally,
) -> io::Result<()> {
    while !pace.is_over() {
        match send_one(socket, ring.advance(), to) {
            Ok(n) => note_sent(n, pace, tally),
            Err(e) if is_passing(&e) => tally.failed_sends += 1,
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Tells the end of a test over UDP.
pub fn say_farewell(socket: &dyn Datagrams, to: To) {
    for _ in 0..FAREWELLS {
        let _ = send_one(socket, &[], to);
    }
}

/// Receives datagrams from `peer` until an empty one or silence tells the end.
pub fn receive_datagrams(
    socket: &dyn Datagrams,
    peer: IpAddr,
    ring: &mut Ring,
    pace: &mut Pace<'_>,
    tally: &mut Tally,
) -> io::Result<End> {
    loop {
        let buffer = ring.advance();
        let Some((n, _)) = receive_from(socket, peer, buffer, pace)? else { return Ok(End::Over) };
        if n == 0 {
            return Ok(End::Told);
        }
        tally.bytes_received += n as u64;
        tally.recv_calls += 1;
        pace.spend(n as u64);
    }
}

/// The next datagram of `peer`; `None` when the test is over.
fn receive_from(
    socket: &dyn Datagrams,
    peer: IpAddr,
    buffer: &mut [u8],
    pace: &mut Pace<'_>,
) -> io::Result<Option<(usize, SocketAddr)>> {
    while !pace.is_over() {
        match socket.recv_from(buffer) {
            Ok((n, from)) if from.ip().to_canonical() == peer => return Ok(Some((n, from))),
            Ok(_) => {}
            Err(e) if is_passing(&e) => {
                pace.idle()?;
                if pace.is_silent_end() {
                    return Ok(None);
                }
            }
            Err(e) => return Err(e),
        }
    }
    Ok(None)
}

/// Answers each datagram of `peer` with one.
pub fn respond_datagrams(
    socket: &dyn Datagrams,
    peer: IpAddr,
    requests: &mut Ring,
    responses: &mut Ring,
    pace: &mut Pace<'_>,
    tally: &mut Tally,
) -> io::Result<End> {
    loop {
        let received = receive_from(socket, peer, requests.advance(), pace)?;
        let Some((n, from)) = received else { return Ok(End::Over) };
        if n == 0 {
            return Ok(End::Told);
        }
        tally.bytes_received += n as u64;
        tally.recv_calls += 1;
        match socket.send_to(responses.advance(), from) {
            Ok(n) => {
                tally.bytes_sent += n as u64;
                tally.send_calls += 1;
                tally.transactions += 1;
                pace.spend(1);
            }
            Err(e) if is_passing(&e) => tally.failed_sends += 1,
            Err(e) => return Err(e),
        }
    }
}

/// Makes requests over UDP until the test is over. As with netperf a datagram that is lost stalls
/// the test, since nothing sends it again.
pub fn request_datagrams(
    socket: &dyn Datagrams,
    peer: IpAddr,
    (requests, responses): (&mut Ring, &mut Ring),
    burst: u32,
    pace: &mut Pace<'_>,
    tally: &mut Tally,
) -> io::Result<()> {
    for _ in 0..burst {
        ask_datagram(socket, requests, tally)?;
    }
    while !pace.is_over() {
        ask_datagram(socket, requests, tally)?;
        let received = receive_from(socket, peer, responses.advance(), pace)?;
        let Some((n, _)) = received.filter(|(n, _)| *n > 0) else { return Ok(()) };
        tally.bytes_received += n as u64;
        tally.recv_calls += 1;
        tally.transactions += 1;
        pace.spend(1);
    }
    Ok(())
}

fn ask_datagram(socket: &dyn Datagrams, requests: &mut Ring, tally: &mut Tally) -> io::Result<()> {
    match socket.send(requests.advance()) {
        Ok(n) => {
            tally.bytes_sent += n as u64;
            tally.send_calls += 1;
            Ok(())
        }
        Err(e) if is_passing(&e) => {
            tally.failed_sends += 1;
            Ok(())
        }
        Err(e) => Err(e),
    }
}
