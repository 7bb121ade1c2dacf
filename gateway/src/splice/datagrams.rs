//! Datagrams between loopback interfaces: each client of a port has a socket on the other side, connected to the
//! destination, so that only its answers come back.
//!
//! - **Bounds.** [`MAX_FLOWS`]; at the bound the least recently used flow gives way. What a socket does not
//!   take at once is lost and counted, as datagrams are.
//! - **Time-out.** A flow that is idle for [`IDLE_TIMEOUT`] ends.
//! - **Fairness.** A ready socket moves `DATAGRAMS_PER_TURN` datagrams, then the others have their turn.

use std::collections::{HashMap, VecDeque};
use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use nix::sys::epoll::{Epoll, EpollEvent, EpollFlags};

use super::{Counters, Kind, token};
use crate::published::PublishedPort;
use crate::relay::host_socket::{self, DatagramError};

/// Clients of all ports at most, each with a descriptor.
pub const MAX_FLOWS: usize = 1024;
/// Idle time-out of a flow, as of the relay's flows in both directions.
pub const IDLE_TIMEOUT: Duration = Duration::from_secs(180);
/// Datagrams that a ready socket moves before it is another's turn.
const DATAGRAMS_PER_TURN: usize = 64;
/// The longest datagram.
const LONGEST: usize = 65_536;

/// The ports and their clients.
#[derive(Debug)]
pub struct Datagrams {
    most_flows: usize,
    ports: HashMap<u64, Port>,
    flows: HashMap<u64, Flow>,
    by_client: HashMap<(u64, SocketAddr), u64>,
    /// The queue of the second-chance (clock) algorithm, with the time of each flow's entry.
    order: VecDeque<(Instant, u64)>,
    next_flow: u64,
    /// Room for one datagram, from the first port on.
    buffer: Vec<u8>,
}

/// A bound socket, and where it leads.
#[derive(Debug)]
pub struct Port {
    /// The socket.
    pub socket: UdpSocket,
    /// The destination of what comes to it.
    pub to: SocketAddr,
    /// Counts its clients.
    pub port: Arc<PublishedPort>,
}

#[derive(Debug)]
struct Flow {
    port: u64,
    client: SocketAddr,
    socket: UdpSocket,
    moved: Instant,
}

/// A socket that is connected to a destination, and watched.
fn connected(to: SocketAddr, epoll: &Epoll, token: u64) -> io::Result<UdpSocket> {
    let any: IpAddr = match to {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = UdpSocket::bind((any, 0))?;
    socket.set_nonblocking(true)?;
    socket.connect(to)?;
    epoll.add(&socket, EpollEvent::new(EpollFlags::EPOLLIN, token))?;
    Ok(socket)
}

impl Datagrams {
    /// No ports. `most_flows`: clients of all ports at most.
    pub fn new(most_flows: usize) -> Datagrams {
        Datagrams {
            most_flows,
            ports: HashMap::new(),
            flows: HashMap::new(),
            by_client: HashMap::new(),
            order: VecDeque::new(),
            next_flow: 0,
            buffer: Vec::new(),
        }
    }

    /// Carries what comes to a bound socket. One that cannot be watched is closed.
    pub fn listen(&mut self, id: u64, port: Port, epoll: &Epoll) {
        let watch = EpollEvent::new(EpollFlags::EPOLLIN, token(Kind::Port, id));
        if port.socket.set_nonblocking(true).is_ok() && epoll.add(&port.socket, watch).is_ok() {
            self.buffer.resize(LONGEST, 0);
            self.ports.insert(id, port);
        }
    }

    /// Closes a port and its flows.
    pub fn unlisten(&mut self, id: u64) {
        self.ports.remove(&id);
        self.flows.retain(|_, flow| flow.port != id);
        self.by_client.retain(|(port, _), _| *port != id);
    }

    /// Clients have sent to a port.
    pub(crate) fn port_ready(&mut self, id: u64, epoll: &Epoll, counters: &Counters) {
        let mut buffer = std::mem::take(&mut self.buffer);
        for _ in 0..DATAGRAMS_PER_TURN {
            let Some(port) = self.ports.get(&id) else { break };
            match port.socket.recv_from(&mut buffer) {
                Ok((n, client)) => {
                    let sent = self.send_there(id, client, &buffer[..n], epoll, counters);
                    count(&sent, n, [&counters.datagrams_there, &counters.bytes_there], counters);
                }
                Err(e) => match error_of(&e) {
                    DatagramError::NotReady => break,
                    // Of an earlier answer: the client is gone.
                    DatagramError::Interrupted | DatagramError::Pending => {}
                    DatagramError::Broken => {
                        self.unlisten(id);
                        break;
                    }
                },
            }
        }
        self.buffer = buffer;
    }

    fn send_there(
        &mut self,
        port: u64,
        client: SocketAddr,
        datagram: &[u8],
        epoll: &Epoll,
        counters: &Counters,
    ) -> io::Result<usize> {
        let known = self.by_client.get(&(port, client)).copied();
        let id = match known {
            Some(id) => id,
            None => self.begin(port, client, epoll, counters).inspect_err(|_| {
                self.ports.get(&port).iter().for_each(|port| port.port.count_refused());
            })?,
        };
        let flow = self.flows.get_mut(&id).ok_or(ErrorKind::NotFound)?;
        if known.is_some() {
            flow.moved = Instant::now();
        }
        match flow.socket.send(datagram) {
            // An error of an earlier datagram, which the call has taken away.
            Err(e) if e.kind() == ErrorKind::ConnectionRefused => flow.socket.send(datagram),
            sent => sent,
        }
    }

    fn begin(
        &mut self,
        port: u64,
        client: SocketAddr,
        epoll: &Epoll,
        counters: &Counters,
    ) -> io::Result<u64> {
        let to = self.ports.get(&port).ok_or(ErrorKind::NotFound)?.to;
        if self.flows.len() >= self.most_flows {
            self.displace();
            counters.displaced.fetch_add(1, Relaxed);
        }
        let id = self.next_flow;
        self.next_flow += 1;
        let socket = connected(to, epoll, token(Kind::Flow, id))?;
        let moved = Instant::now();
        self.flows.insert(id, Flow { port, client, socket, moved });
        self.ports.get(&port).iter().for_each(|port| port.port.count_connection());
        self.by_client.insert((port, client), id);
        self.order.push_back((moved, id));
        Ok(id)
    }

    /// The destination has answered.
    pub(crate) fn flow_ready(&mut self, id: u64, counters: &Counters) {
        let Some(flow) = self.flows.get_mut(&id) else { return };
        let Some(port) = self.ports.get(&flow.port) else { return };
        for _ in 0..DATAGRAMS_PER_TURN {
            match flow.socket.recv(&mut self.buffer) {
                Ok(n) => {
                    flow.moved = Instant::now();
                    let sent = port.socket.send_to(&self.buffer[..n], flow.client);
                    count(&sent, n, [&counters.datagrams_back, &counters.bytes_back], counters);
                }
                Err(e) => match error_of(&e) {
                    DatagramError::NotReady => return,
                    // The destination has no listener.
                    DatagramError::Interrupted | DatagramError::Pending => {}
                    DatagramError::Broken => return self.remove(id),
                },
            }
        }
    }

    /// When the next flow may time out.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.order.front().map(|(seen, _)| *seen + IDLE_TIMEOUT)
    }

    /// Ends the flows that have timed out.
    pub fn expire(&mut self, now: Instant) {
        while self.order.front().is_some_and(|(seen, _)| *seen + IDLE_TIMEOUT <= now) {
            let Some((_, id)) = self.order.pop_front() else { return };
            match self.flows.get(&id) {
                Some(flow) if flow.moved + IDLE_TIMEOUT > now => {
                    self.order.push_back((flow.moved, id))
                }
                _ => self.remove(id),
            }
        }
    }

    /// Ends the first flow that was not used since its entry; else the first.
    fn displace(&mut self) {
        for _ in 0..self.order.len() {
            let Some((seen, id)) = self.order.pop_front() else { return };
            match self.flows.get(&id) {
                Some(flow) if flow.moved > seen => self.order.push_back((flow.moved, id)),
                Some(_) => return self.remove(id),
                None => {}
            }
        }
        if let Some((_, id)) = self.order.pop_front() {
            self.remove(id);
        }
    }

    fn remove(&mut self, id: u64) {
        if let Some(flow) = self.flows.remove(&id) {
            self.by_client.remove(&(flow.port, flow.client));
        }
    }
}

fn error_of(e: &io::Error) -> DatagramError {
    host_socket::datagram_error_of(host_socket::errno_of(e))
}

/// Counts what became of a datagram of `n` bytes.
fn count(
    sent: &io::Result<usize>,
    n: usize,
    [datagrams, bytes]: [&std::sync::atomic::AtomicU64; 2],
    counters: &Counters,
) {
    match sent {
        Ok(_) => {
            datagrams.fetch_add(1, Relaxed);
            bytes.fetch_add(n as u64, Relaxed);
        }
        Err(_) => {
            counters.datagrams_lost.fetch_add(1, Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::Protocol;
    use crate::ports::PortSpec;
    use nix::sys::epoll::EpollCreateFlags;

    fn bound() -> UdpSocket {
        UdpSocket::bind("127.0.0.1:0").unwrap()
    }

    #[test]
    fn the_client_that_rested_for_longest_gives_way_and_a_rest_has_an_end() {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).unwrap();
        let counters = Counters::default();
        let (server, port) = (bound(), bound());
        let at = port.local_addr().unwrap();
        let mut datagrams = Datagrams::new(2);
        let spec: PortSpec = "53".parse().unwrap();
        let published = Arc::new(PublishedPort::new(spec.forwards().remove(0)));
        let to = server.local_addr().unwrap();
        datagrams.listen(7, Port { socket: port, to, port: Arc::clone(&published) }, &epoll);
        let clients = [bound(), bound(), bound()];
        let mut say = |client: &UdpSocket| {
            client.send_to(b"x", at).unwrap();
            datagrams.port_ready(7, &epoll, &counters);
            server.recv_from(&mut [0]).unwrap().1
        };
        let first = say(&clients[0]);
        let second = say(&clients[1]);
        assert_eq!(say(&clients[0]), first, "it is known");
        say(&clients[2]);
        assert_eq!(say(&clients[0]), first, "it has moved since the second one did");
        assert_ne!(say(&clients[1]), second, "it gave way");
        assert_eq!(counters.displaced.load(Relaxed), 2);
        let stat = crate::published::stat(Protocol::Udp, [published].iter());
        assert_eq!((stat[0].connections, stat[0].refused), (4, 0));
        let now = Instant::now();
        datagrams.expire(now);
        assert_eq!(datagrams.flows.len(), 2);
        datagrams.expire(now + IDLE_TIMEOUT);
        assert!(datagrams.flows.is_empty() && datagrams.by_client.is_empty());
        assert_eq!(datagrams.next_deadline(), None);
    }
}
