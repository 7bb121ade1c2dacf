//! The socket of `--conf-path`: pesto(1) shows and changes the published ports of the running gateway there.
//!
//! ```text
//!   pesto ◄── greeting: the tables ──── this thread
//!         ─── the tables as wanted ───► read, compared with the greeting ──► the relay's loop: ports of the host
//!                                                                        ──► the splicing threads: ports of the guest
//! ```
//!
//! Only what a client has changed in the tables of its greeting is changed: two clients at the same time do not undo each
//! other's changes, and ports that stay keep their sockets. A rule whose ports cannot be bound stays in the table, as
//! with pasta(1), and is logged: pesto waits for no answer.
//!
//! One thread serves up to [`MOST_CLIENTS`] clients, each for [`PATIENCE`] at most, and waits for none of them: the
//! oldest gives way to the next. Only the caller's user may connect: the socket has mode 0600, and SO_PEERCRED is
//! compared.

mod published;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::ops::RangeInclusive;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use fulmar_gateway::Gateway;
use fulmar_gateway::pesto::{self, Capabilities, Specs, Tables};
use fulmar_gateway::policy::Protocol;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, UnixAddr, connect, getsockopt, socket, sockopt,
};

use super::auto::AutoPorts;
use super::log::Log;
use super::plan::Plan;
use super::publish::{Relay, bind_private, remove_socket};
use crate::failure::{During, Failure, Outcome};
use published::{OnGuest, Published};
pub use published::{Opened, given_by};

/// Clients that are served at the same time at most.
const MOST_CLIENTS: usize = 16;
/// How long a client is served.
const PATIENCE: Duration = Duration::from_secs(30);
/// The pause after a failed accept: descriptors may be missing for a while.
const PAUSE: Duration = Duration::from_millis(100);
/// Bytes of one read.
const READ_BYTES: usize = 16 << 10;

/// The socket, bound and not served yet, and the tables of the options.
pub struct PortControl {
    socket: Socket,
    capabilities: Capabilities,
    pub tables: Tables,
}

/// The listening socket, and whose it is.
struct Socket {
    listener: UnixListener,
    /// A pair of this process: its SO_PEERCRED is this user's, in whichever user namespace it is read.
    own: (UnixStream, UnixStream),
}

impl PortControl {
    /// Binds the socket of the options, in place of one that no process serves. `None`: there is no such option. To be
    /// called while the process has one thread.
    ///
    /// # Errors
    /// A sentence: the path is taken, or the options have more ranges than pesto can show.
    pub fn open(plan: &Plan) -> Outcome<Option<PortControl>> {
        let Some(path) = &plan.conf_path else { return Ok(None) };
        let tables = tables_of(plan, ephemeral_ports());
        if [&tables.host, &tables.guest].iter().any(|rules| rules.len() > pesto::MOST_RULES) {
            return Err(Failure::new(format!(
                "--conf-path supports at most {} ranges of ports in each direction; publish fewer",
                pesto::MOST_RULES
            )));
        }
        let socket = Socket::bind(path)?;
        Ok(Some(PortControl { socket, capabilities: capabilities(plan), tables }))
    }

    /// Lets the threads of a gateway publish what clients ask for.
    ///
    /// # Errors
    /// No descriptor.
    pub fn join(
        self,
        gateway: &mut Gateway,
        opened: Opened,
        auto: &AutoPorts,
    ) -> io::Result<Joined> {
        let PortControl { socket, capabilities, tables } = self;
        let on_guest = auto.in_guest.clone().zip(auto.in_host.clone());
        let on_guest = on_guest.map(|(inside, outside)| OnGuest {
            inside,
            outside,
            is_splice_only: auto.ports.are_spliced(),
        });
        let relay = Relay::of(gateway, auto.ports.clone())?;
        let given = [&auto.tcp, &auto.udp].map(|ports| ports.given.clone());
        let published =
            Published::new(capabilities, tables, opened, Box::new((relay, on_guest)), given);
        Ok(Joined { socket, published })
    }
}

/// What a gateway with these options can do.
fn capabilities(plan: &Plan) -> Capabilities {
    Capabilities {
        v4: !plan.options.without_v4,
        v6: !plan.options.without_v6,
        tcp: plan.carries.tcp,
        udp: plan.carries.udp,
        auto: true,
    }
}

/// The tables of the options.
fn tables_of(plan: &Plan, ephemeral: RangeInclusive<u16>) -> Tables {
    let specs = Specs { capabilities: capabilities(plan), ephemeral };
    let both = |tcp, udp| [specs.rules(Protocol::Tcp, tcp), specs.rules(Protocol::Udp, udp)];
    let ports = &plan.ports;
    Tables {
        host: both(&ports.tcp, &ports.udp).concat(),
        guest: both(&ports.tcp_ns, &ports.udp_ns).concat(),
    }
}

/// The ephemeral ports that pesto leaves out, too; without the file the range of RFC 6335.
fn ephemeral_ports() -> RangeInclusive<u16> {
    let text = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range");
    let mut ports = text.iter().flat_map(|text| text.split_whitespace().map(str::parse));
    match (ports.next(), ports.next()) {
        (Some(Ok(first)), Some(Ok(last))) => first..=last,
        _ => 49_152..=65_535,
    }
}

impl Socket {
    fn bind(path: &Path) -> Outcome<Socket> {
        if is_served(path) {
            return Err(Failure::new(format!(
                "cannot bind the socket of --conf-path {}: another process serves it; choose another path",
                path.display()
            )));
        }
        remove_socket(path);
        let listener = bind_private("socket of --conf-path", path)?;
        listener.set_nonblocking(true).during("cannot prepare the socket of --conf-path")?;
        let own = UnixStream::pair().during("cannot prepare the socket of --conf-path")?;
        Ok(Socket { listener, own })
    }

    /// The next client. A client of another user is none: who may open every file came by the mode of the file.
    fn accept(&self) -> io::Result<Option<UnixStream>> {
        let (client, _) = self.listener.accept()?;
        client.set_nonblocking(true)?;
        let uid =
            |stream: &UnixStream| getsockopt(stream, sockopt::PeerCredentials).map(|c| c.uid());
        let is_own = uid(&client)? == uid(&self.own.0)?;
        Ok(Some(client).filter(|_| is_own))
    }
}

/// Whether a process listens at a path. A socket whose process has ended refuses.
fn is_served(path: &Path) -> bool {
    let (family, kind) = (AddressFamily::Unix, SockType::Stream);
    let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
    let asked = UnixAddr::new(path).and_then(|address| {
        let probe = socket(family, kind, flags, None)?;
        connect(probe.as_raw_fd(), &address)
    });
    // A queue that is full has a process, too.
    matches!(asked, Ok(()) | Err(Errno::EAGAIN))
}

/// The socket of a gateway that is about to run.
pub struct Joined {
    socket: Socket,
    published: Published,
}

impl Joined {
    /// Starts the thread, as contained as the calling one.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn start(self, log: &Log) -> io::Result<()> {
        let Joined { socket, mut published } = self;
        let log = log.clone();
        let run = move || {
            let mut clients = Clients::default();
            loop {
                clients.turn(&socket, &mut published, &log);
            }
        };
        thread::Builder::new().name("pesto".into()).spawn(run).map(drop)
    }
}

/// The clients that are served, the oldest first.
#[derive(Default)]
struct Clients(VecDeque<Client>);

impl Clients {
    /// Waits until something happens, and does what is to be done.
    fn turn(&mut self, socket: &Socket, published: &mut Published, log: &Log) {
        let next = self.0.front().map(|client| client.until);
        let left = next.map(|at| at.saturating_duration_since(Instant::now()));
        // Rounded up: to wake too early would be to wake twice.
        let left = left.map_or(PollTimeout::NONE, |left| {
            u16::try_from(left.as_millis() + 1).map_or(PollTimeout::MAX, PollTimeout::from)
        });
        let listener = PollFd::new(socket.listener.as_fd(), PollFlags::POLLIN);
        let mut ready: Vec<_> =
            [listener].into_iter().chain(self.0.iter().map(Client::poll_fd)).collect();
        if poll(&mut ready, left).is_err() {
            return;
        }
        let is_ready: Vec<bool> = ready.iter().map(|fd| fd.any() != Some(false)).collect();
        drop(ready);
        let now = Instant::now();
        let mut flags = is_ready.iter().skip(1).copied();
        let mut served = VecDeque::with_capacity(self.0.len());
        for mut client in self.0.drain(..) {
            let is_kept = !flags.next().unwrap_or(false) || client.go_on(published, log);
            if is_kept && client.until > now {
                served.push_back(client);
            }
        }
        self.0 = served;
        if is_ready.first() == Some(&true) {
            self.accept(socket, published, now);
        }
    }

    fn accept(&mut self, socket: &Socket, published: &Published, now: Instant) {
        match socket.accept() {
            Ok(Some(stream)) => {
                if self.0.len() >= MOST_CLIENTS {
                    self.0.pop_front();
                }
                self.0.push_back(Client::new(stream, published, now + PATIENCE));
            }
            Ok(None) => {}
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
            Err(_) => thread::sleep(PAUSE),
        }
    }
}

/// A client: it is sent the tables, and may send them back.
struct Client {
    stream: UnixStream,
    /// The tables that it is sent.
    tables: Tables,
    greeting: Vec<u8>,
    sent: usize,
    received: Vec<u8>,
    until: Instant,
}

impl Client {
    fn new(stream: UnixStream, published: &Published, until: Instant) -> Client {
        let tables = published.tables();
        let greeting = pesto::greeting(published.capabilities(), &tables);
        Client { stream, tables, greeting, sent: 0, received: Vec::new(), until }
    }

    fn poll_fd(&self) -> PollFd<'_> {
        let wants =
            if self.sent < self.greeting.len() { PollFlags::POLLOUT } else { PollFlags::empty() };
        PollFd::new(self.stream.as_fd(), PollFlags::POLLIN | wants)
    }

    /// Sends and receives what can be at once. False: it is served.
    fn go_on(&mut self, published: &mut Published, log: &Log) -> bool {
        let received = match self.send().and_then(|()| self.receive()) {
            Ok(received) => received,
            Err(e) => return e.kind() == io::ErrorKind::WouldBlock,
        };
        match received {
            Ok(None) => return true,
            Ok(Some(wanted)) => published.change(&self.tables, &wanted, log),
            Err(why) => log.fail(&format!("a message of pesto has no meaning: {why}")),
        }
        let _ = self.stream.shutdown(Shutdown::Both);
        false
    }

    fn send(&mut self) -> io::Result<()> {
        while let Some(rest) = self.greeting.get(self.sent..).filter(|rest| !rest.is_empty()) {
            self.sent += self.stream.write(rest)?;
        }
        Ok(())
    }

    fn receive(&mut self) -> io::Result<Result<Option<Tables>, String>> {
        let mut buffer = [0; READ_BYTES];
        let bytes = self.stream.read(&mut buffer)?;
        if bytes == 0 {
            // It has only looked, or has gone.
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.received.extend_from_slice(&buffer[..bytes]);
        Ok(pesto::read(&self.received))
    }
}
