//! The API socket of slirp4netns: one request on each connection, one answer.
//!
//! ```text
//!   client ──► socket ──► the API's thread: reads, parses ──► a command, and a wake-up ──► the relay's loop
//!          ◄── answer ◄── Forwards: ids and ports         ◄── done                     ◄── (un)publishes
//! ```
//!
//! The thread serves one client at a time, each for [`PATIENCE`] at most: a client that is silent delays other clients
//! and not the relay. A request has less than [`MOST_BYTES`] bytes. Only the caller's user may connect (mode 0600).

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use fulmar_gateway::Gateway;
use fulmar_gateway::policy::Protocol;
use fulmar_gateway::ports::Forward;
use serde_json::{Deserializer, Value};

use super::forwards::{Forwards, Guest, Publisher, refused};
use crate::failure::Outcome;
use crate::gateway::publish::{HostPorts, Relay, bind_private, remove_socket};

/// A request has fewer bytes than this.
pub(super) const MOST_BYTES: usize = 4096;
/// How long a client is waited for.
const PATIENCE: Duration = Duration::from_secs(5);
/// The pause after a failed accept: descriptors may be missing for a while.
const PAUSE: Duration = Duration::from_millis(100);

/// The socket, bound and not served yet.
pub struct Bound {
    listener: UnixListener,
    guest: Guest,
}

impl Bound {
    /// Binds the socket, in place of one that another process has left. To be called while the process has one thread.
    ///
    /// # Errors
    /// A sentence: a file of another kind is there, the path is too long.
    pub fn new(path: &Path, guest: Guest) -> Outcome<Bound> {
        remove_socket(path);
        Ok(Bound { listener: bind_private("API socket", path)?, guest })
    }

    /// Lets the loop of a gateway publish what clients ask for.
    ///
    /// # Errors
    /// No descriptor.
    pub fn join(self, gateway: &mut Gateway) -> io::Result<Joined> {
        Ok(Joined { relay: Relay::of(gateway, HostPorts::default())?, bound: self })
    }
}

/// The socket of a gateway that is about to run.
pub struct Joined {
    bound: Bound,
    relay: Relay,
}

impl Joined {
    /// Starts the thread, as contained as the calling one.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn start(self) -> io::Result<()> {
        let Joined { bound: Bound { listener, guest }, mut relay } = self;
        let mut forwards = Forwards::new(guest);
        let run = move || {
            for client in listener.incoming() {
                match client {
                    // A client that has gone gets no answer.
                    Ok(client) => drop(serve(client, PATIENCE, &mut forwards, &mut relay)),
                    Err(_) => thread::sleep(PAUSE),
                }
            }
        };
        thread::Builder::new().name("api".into()).spawn(run)?;
        Ok(())
    }
}

impl Publisher for Relay {
    fn publish(&mut self, protocol: Protocol, forward: &Forward) -> io::Result<()> {
        Relay::publish(self, protocol, forward)
    }

    fn unpublish(&mut self, protocol: Protocol, forward: &Forward) -> io::Result<()> {
        Relay::unpublish(self, protocol, forward)
    }
}

/// Reads the request of a client, and answers it.
///
/// # Errors
/// The client has gone.
pub(super) fn serve(
    mut client: UnixStream,
    patience: Duration,
    forwards: &mut Forwards,
    publisher: &mut impl Publisher,
) -> io::Result<()> {
    let until = Instant::now() + patience;
    let answer = match read_request(&mut client, until) {
        Ok(request) => forwards.answer(&request, publisher),
        Err(what) => refused(what),
    };
    write_answer(&mut client, answer.to_string().as_bytes(), Instant::now() + patience)?;
    client.shutdown(Shutdown::Both)
}

fn write_answer(client: &mut UnixStream, mut answer: &[u8], until: Instant) -> io::Result<()> {
    while !answer.is_empty() {
        let left = until.saturating_duration_since(Instant::now());
        // A time-out of zero would be none.
        client.set_write_timeout(Some(left.max(Duration::from_millis(1))))?;
        let written = client.write(answer)?;
        answer = answer.get(written..).unwrap_or_default();
    }
    Ok(())
}

/// Reads one JSON value. It ends where it is whole: not every client closes its end.
fn read_request(client: &mut UnixStream, until: Instant) -> Result<Value, &'static str> {
    let (mut request, mut part) = (Vec::new(), [0; MOST_BYTES]);
    loop {
        match read_part(client, &mut part, until) {
            Ok(n @ 1..) => request.extend_from_slice(&part[..n]),
            Err(e) if e.kind() == io::ErrorKind::TimedOut => {
                return Err("cannot parse JSON: the request is not complete");
            }
            Ok(0) | Err(_) => return Err("cannot parse JSON: the request ends too early"),
        }
        if request.len() >= MOST_BYTES {
            return Err("too large message");
        }
        match Deserializer::from_slice(&request).into_iter::<Value>().next() {
            Some(Ok(value)) => return Ok(value),
            Some(Err(e)) if !e.is_eof() => return Err("cannot parse JSON"),
            Some(Err(_)) | None => {}
        }
    }
}

fn read_part(client: &mut UnixStream, part: &mut [u8], until: Instant) -> io::Result<usize> {
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            // Set on the socket it would be no time-out.
            return Err(io::ErrorKind::TimedOut.into());
        }
        client.set_read_timeout(Some(left))?;
        match client.read(part) {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
            read => return read,
        }
    }
}
