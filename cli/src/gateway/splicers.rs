//! The splicing threads of a gateway: their set-up, the ports of the guest's loopback, and their end.

use std::fs::File;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::Duration;

use fulmar_gateway::config::OnLoopback;
use fulmar_gateway::contain::{self, Containment};
use fulmar_gateway::guest::GuestNetwork;
use fulmar_gateway::netns::Netns;
use fulmar_gateway::pesto::Rule;
use fulmar_gateway::policy::Protocol;
use fulmar_gateway::ports::{Forward, PortSpec};
use fulmar_gateway::published::PublishedPort;
use fulmar_gateway::splice::{self, Side, Splicer};

use super::auto::{loopback, loopback_of, on_loopback_of_guest};
use super::pesto::{Opened, PortControl};
use super::plan::Plan;

/// How long loopback connections are delivered after the guest's exit: as long as the relay delivers.
const LONGEST_DELIVERY: Duration = Duration::from_secs(60);

/// The splicing threads: one connects in the guest's namespace, one in the host's.
#[derive(Default)]
pub(super) struct Splicers {
    pub guest: Option<Splicer>,
    pub host: Option<Splicer>,
    pub host_loop: Option<splice::Loop>,
    /// The ports of the guest's loopback, of `host`.
    pub opened: Opened,
    /// Lets the guest's thread contain itself and begin, and receives the result.
    pub begin: Option<(Sender<()>, Receiver<io::Result<Containment>>)>,
}

impl Splicers {
    /// Delivers what the programs of a guest that has exited have sent, for [`LONGEST_DELIVERY`] at most.
    pub fn finish(&self) {
        let ends = [(&self.guest, Side::Connected), (&self.host, Side::Accepted)];
        let finish =
            |(splicer, side): (&Option<Splicer>, Side)| Some(splicer.as_ref()?.finish(side));
        for is_done in ends.into_iter().filter_map(finish).collect::<Vec<_>>() {
            // Nothing is sent: the thread ends, or has ended.
            let _ = is_done.recv_timeout(LONGEST_DELIVERY);
        }
    }

    pub fn both(&self) -> [Option<Splicer>; 2] {
        [self.guest.clone(), self.host.clone()]
    }

    pub fn counters(&self) -> Vec<&splice::Counters> {
        [&self.guest, &self.host].into_iter().flatten().map(Splicer::counters).collect()
    }
}

/// Makes the splicing threads that the ports need. The guest's thread enters the guest's namespace and waits.
pub(super) fn make(
    plan: &Plan,
    control: Option<&PortControl>,
    netns: &Netns,
) -> io::Result<Splicers> {
    let ports = &plan.ports;
    let mut splicers = Splicers::default();
    let leads_out = [&ports.tcp_ns, &ports.udp_ns].into_iter().any(|spec| *spec != PortSpec::None);
    if leads_out || control.is_some() {
        let (host, run) = splice::splicer()?;
        let of =
            |protocol, spec| forwards(spec, control.map(|c| c.tables.guest.as_slice()), protocol);
        let tcp = of(Protocol::Tcp, &ports.tcp_ns);
        for bound in netns.run(|| bind_in_guest(tcp, TcpListener::bind))? {
            let to = match bound.forward.to_address {
                Some(_) => vec![bound.to],
                None => loopback(bound.to.port()).to_vec(),
            };
            let id = host.listen(bound.socket, to, bound.port);
            splicers.opened.push((Protocol::Tcp, bound.forward, id));
        }
        let udp = of(Protocol::Udp, &ports.udp_ns);
        for bound in netns.run(|| bind_in_guest(udp, UdpSocket::bind))? {
            let id = host.listen_datagrams(bound.socket, bound.to, bound.port);
            splicers.opened.push((Protocol::Udp, bound.forward, id));
        }
        (splicers.host, splicers.host_loop) = (Some(host), Some(run));
    }
    let leads_in = ports.has_splice && ports.tcp != PortSpec::None
        || ports.is_splice_only
        || control.is_some();
    if leads_in || [&ports.tcp_ns, &ports.udp_ns].into_iter().any(|spec| *spec == PortSpec::Auto) {
        let (guest, run) = splice::splicer()?;
        let (entered, has_entered) = channel();
        let (begin, begins) = channel();
        let (report, reported) = channel();
        let own = File::from(netns.as_fd().try_clone_to_owned()?);
        thread::Builder::new().name("guest".into()).spawn(move || {
            let done = nix::sched::setns(&own, nix::sched::CloneFlags::CLONE_NEWNET);
            drop(own);
            // The root directory is the thread's own from then on; the main thread empties its own.
            let root = contain::empty_root();
            let _ = entered.send(done);
            if begins.recv().is_ok() {
                let contained = contain::contain_thread();
                let is_contained = contained.is_ok();
                let _ = report.send(contained.and_then(|contained| root.map(|()| contained)));
                if is_contained {
                    run.run().expect("invariant: epoll_wait of its own set cannot fail");
                }
            }
        })?;
        has_entered.recv().map_err(|_| io::Error::other("the guest's thread has ended"))??;
        (splicers.guest, splicers.begin) = (Some(guest), Some((begin, reported)));
    }
    Ok(splicers)
}

/// A socket on the loopback interface of the guest.
struct Bound<S> {
    socket: S,
    /// The address on the host's loopback interface to which it leads.
    to: SocketAddr,
    port: Arc<PublishedPort>,
    /// As it is given.
    forward: Forward,
}

/// Binds the ports of `-T` or `-U` on the loopback interface of the guest.
fn bind_in_guest<S>(
    forwards: Vec<Forward>,
    bind: fn(SocketAddr) -> io::Result<S>,
) -> io::Result<Vec<Bound<S>>> {
    let mut made = Vec::new();
    for forward in forwards {
        let addresses = match forward.bind.address {
            Some(address) => vec![SocketAddr::new(address, forward.from)],
            None => loopback(forward.from).to_vec(),
        };
        let bound: Vec<_> = addresses.iter().map(|at| (bind(*at), at.is_ipv4())).collect();
        let port = on_loopback_of_guest(&forward);
        let is_bound = bound.iter().any(|(bound, _)| bound.is_ok());
        for (socket, is_v4) in bound {
            match socket {
                Ok(socket) => {
                    let own = loopback_of(forward.to, is_v4);
                    let to = forward.to_address.map_or(own, |a| SocketAddr::new(a, forward.to));
                    let (port, forward) = (Arc::clone(&port), forward.clone());
                    made.push(Bound { socket, to, port, forward });
                }
                Err(e) if !is_bound && !forward.is_optional => {
                    let port = forward.from;
                    let what = format!("cannot bind port {port} of the namespace's loopback: {e}");
                    return Err(io::Error::new(e.kind(), what));
                }
                Err(_) => {}
            }
        }
    }
    Ok(made)
}

/// The bindings of a specification, or of the rules that pesto(1) sees of it: what it removes is what was bound.
pub(super) fn forwards(
    spec: &PortSpec,
    rules: Option<&[Rule]>,
    protocol: Protocol,
) -> Vec<Forward> {
    let Some(rules) = rules else { return spec.forwards() };
    rules.iter().filter(|rule| rule.protocol == protocol).flat_map(Rule::forwards).collect()
}

/// Connections from the host's loopback are spliced to the guest's loopback, or to its address: there they come
/// from the guest's own address, so that what listens on loopback inside is not exposed.
pub(super) fn on_loopback(
    plan: &Plan,
    network: &GuestNetwork,
    splicers: &Splicers,
) -> Option<OnLoopback> {
    let splicer = splicers.guest.clone().filter(|_| plan.ports.has_splice)?;
    let own: Vec<IpAddr> = network.addresses.iter().map(|(a, _)| *a).collect();
    let is_to_loopback = plan.ports.is_to_loopback;
    Some(Box::new(move |accepted: TcpStream, published| {
        let port = published.forward.to;
        if let Some(address) = published.forward.to_address {
            splicer.carry(accepted, vec![SocketAddr::new(address, port)], Arc::clone(published));
            return None;
        }
        let is_v4 = accepted.peer_addr().is_ok_and(|a| a.ip().to_canonical().is_ipv4());
        let mut to: Vec<SocketAddr> = if is_to_loopback {
            loopback(port).to_vec()
        } else {
            own.iter().map(|a| SocketAddr::new(*a, port)).collect()
        };
        // The same version first; a server may listen on one only.
        to.sort_by_key(|a| a.is_ipv4() != is_v4);
        if to.is_empty() {
            return Some(accepted);
        }
        splicer.carry(accepted, to, Arc::clone(published));
        None
    }))
}
