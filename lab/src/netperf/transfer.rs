//! The data loops of the server. None of them waits longer than the pace allows, and none allocates.

use super::pace::Pace;
use super::ring::Ring;
use super::socket::{Posted, Tuning, accept, is_tick};
use fulmar::{TcpListener, TcpStream, UdpSocket};
use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr};

/// Empty datagrams that tell the end of a UDP test; any one of them does.
const FAREWELLS: usize = 3;

/// The account of one end.
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

/// Writes a whole message, or as much as possible before the end of the test.
fn write_whole(mut stream: &TcpStream, bytes: &[u8], pace: &mut Pace<'_>) -> io::Result<usize> {
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
    stream: &TcpStream,
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

/// Receives until the other side ends its sending, or the time is over.
pub fn receive(
    mut stream: &TcpStream,
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
    posted: &mut Posted<'_>,
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

/// Reads exactly one message. False: the stream ended before it, or the test did.
fn read_whole(
    mut stream: &TcpStream,
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
    stream: &TcpStream,
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

/// The two messages of a transaction; `None`: connect and close only.
pub type Exchange<'a> = Option<(&'a mut Ring, &'a mut Ring)>;

/// Accepts connections, answers one request on each if that is the test, and closes it first, until
/// the test is over. A connection that fails by itself is not counted.
pub fn accept_each(
    listener: &TcpListener,
    tuning: &Tuning,
    mut exchange: Exchange<'_>,
    pace: &mut Pace<'_>,
    tally: &mut Tally,
) -> io::Result<End> {
    while !pace.is_over() {
        let stream = match accept(listener, tuning) {
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
            let was_asked = read_whole(&stream, requests.advance(), pace, tally);
            let response = responses.advance();
            if !matches!(was_asked, Ok(true)) || write_whole(&stream, response, pace).is_err() {
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

/// A datagram that was refused for the moment: the queue is full, or an earlier one met a closed
/// port (which the next test of the same peer cannot help).
fn is_passing(error: &io::Error) -> bool {
    is_tick(error)
        || error.kind() == io::ErrorKind::ConnectionRefused
        || error.raw_os_error() == Some(libc::ENOBUFS)
}

/// Sends datagrams until the test is over, as fast as they go.
pub fn send_datagrams(
    socket: &UdpSocket,
    to: SocketAddr,
    ring: &mut Ring,
    pace: &mut Pace<'_>,
    tally: &mut Tally,
) -> io::Result<()> {
    while !pace.is_over() {
        match socket.send_to(ring.advance(), to) {
            Ok(n) => note_sent(n, pace, tally),
            Err(e) if is_passing(&e) => tally.failed_sends += 1,
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Tells the end of a test over UDP.
pub fn say_farewell(socket: &UdpSocket, to: SocketAddr) {
    for _ in 0..FAREWELLS {
        let _ = socket.send_to(&[], to);
    }
}

/// Receives datagrams from `peer` until an empty one or silence tells the end.
pub fn receive_datagrams(
    socket: &UdpSocket,
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
    socket: &UdpSocket,
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
    socket: &UdpSocket,
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
