//! Whole messages over a control connection, each within a time.

use super::message::{MESSAGE_BYTES, Message};
use super::socket::is_tick;
use fulmar::TcpStream;
use std::io::{self, Read, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How long a message may take to be sent: it fits any socket buffer.
const SEND_TIME: Duration = Duration::from_secs(10);

fn late(what: &str, time: Duration) -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, format!("{what} within {} s", time.as_secs()))
}

/// Sends a message.
pub fn send(mut control: &TcpStream, message: &Message) -> io::Result<()> {
    let started = Instant::now();
    let mut rest = message.as_bytes().as_slice();
    while !rest.is_empty() {
        match control.write(rest) {
            Ok(n) => rest = rest.get(n..).unwrap_or_default(),
            Err(e) if is_tick(&e) && started.elapsed() < SEND_TIME => {}
            Err(e) if is_tick(&e) => return Err(late("the message was not delivered", SEND_TIME)),
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Receives a message within `time`; `None` if the other side ended the connection before it, or
/// this side is to stop.
pub fn receive(
    mut control: &TcpStream,
    time: Duration,
    stop: &AtomicBool,
) -> io::Result<Option<Message>> {
    let started = Instant::now();
    let mut bytes = [0; MESSAGE_BYTES];
    let mut done = 0;
    while done < MESSAGE_BYTES {
        // Before each read and not only after a quiet one: bytes that drip must not buy time.
        if stop.load(Ordering::Relaxed) {
            return Ok(None);
        }
        if started.elapsed() >= time {
            return Err(late("no complete message arrived on the control connection", time));
        }
        match control.read(&mut bytes[done..]) {
            Ok(0) if done == 0 => return Ok(None),
            Ok(0) => {
                let what = "the control connection ended in the middle of a message";
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, what));
            }
            Ok(n) => done += n,
            Err(e) if is_tick(&e) => {}
            // An end in disorder between two messages: a program that was interrupted.
            Err(e) if done == 0 && e.kind() == io::ErrorKind::ConnectionReset => return Ok(None),
            Err(e) => return Err(e),
        }
    }
    Ok(Some(Message::from_bytes(bytes)))
}
