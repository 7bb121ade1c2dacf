//! Ports on which programs of a namespace listen: what `auto` publishes.
//!
//! The netlink sockets (sock_diag) are opened before the gateway is contained, and queried every second.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, UdpSocket};
use std::ops::{ControlFlow, RangeInclusive};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fulmar_gateway::netns::OpenPorts;
use fulmar_gateway::policy::Protocol;
use fulmar_gateway::ports::{Bind, Forward, PortSpec};
use fulmar_gateway::published::PublishedPort;
use fulmar_gateway::splice::Splicer;
use fulmar_gateway::{FdHandler, Handle};
use nix::sys::time::TimeSpec;
use nix::sys::timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags};

use super::publish::HostPorts;

const PERIOD_S: i64 = 1;
/// Ports below are not published: the gateway has no right to bind them any more.
const FIRST_UNPRIVILEGED_PORT: u16 = 1024;
/// Ports of a transport that are published on the host at most: a guest that listens on more takes no more of them from
/// the host's programs.
const MOST_PORTS: usize = 1024;

/// A port on the loopback interface, of both IP versions.
pub fn loopback(port: u16) -> [SocketAddr; 2] {
    [
        SocketAddr::new(Ipv4Addr::LOCALHOST.into(), port),
        SocketAddr::new(Ipv6Addr::LOCALHOST.into(), port),
    ]
}

/// A port on the loopback interface of one IP version.
pub fn loopback_of(port: u16, is_v4: bool) -> SocketAddr {
    let [v4, v6] = loopback(port);
    if is_v4 { v4 } else { v6 }
}

/// A port of the guest's loopback interface, as `fulmar stat` shows it.
pub fn on_loopback_of_guest(forward: &Forward) -> Arc<PublishedPort> {
    let mut forward = forward.clone();
    if forward.bind.address.is_none() {
        forward.bind.interface = Some("lo".to_owned());
    }
    Arc::new(PublishedPort::new(forward))
}

/// A port that leads to the one of the same number; at both IP versions or not at all: at one of them it would take
/// what the host's programs send to `localhost` where a program of the host has the other one.
fn to_the_same(port: u16) -> Forward {
    Forward::new(Bind::default(), port, port)
}

/// The ports that `auto` publishes and has published.
#[derive(Default)]
pub struct AutoPorts {
    pub tcp: Ports,
    pub udp: Ports,
    /// The thread in the guest's namespace, which makes sockets there.
    pub in_guest: Option<Splicer>,
    /// The thread that connects from the host's namespace.
    pub in_host: Option<Splicer>,
    /// Publishes ports of the host.
    pub ports: HostPorts,
}

/// The ports of a transport that are given: by the options, and by pesto(1) while the gateway runs.
#[derive(Default)]
pub struct Given {
    /// Ports of the host that are published without `auto`: the gateway itself listens there.
    pub host: BTreeSet<u16>,
    /// The same of the guest.
    pub guest: BTreeSet<u16>,
    /// Ports of the host that `auto` may publish.
    pub auto_host: Vec<RangeInclusive<u16>>,
    /// Ports of the guest's loopback that `auto` may publish.
    pub auto_guest: Vec<RangeInclusive<u16>>,
}

impl Given {
    /// By the options for the host and for the guest alone.
    pub fn of(host: &PortSpec, guest: &PortSpec) -> Given {
        let ports = |spec: &PortSpec| spec.forwards().iter().map(|f| f.from).collect();
        let auto = |spec: &PortSpec| match spec {
            PortSpec::Auto => vec![1..=u16::MAX],
            _ => Vec::new(),
        };
        Given {
            host: ports(host),
            guest: ports(guest),
            auto_host: auto(host),
            auto_guest: auto(guest),
        }
    }
}

/// The same, shared with the thread that serves pesto(1).
#[derive(Clone, Default)]
pub struct SharedGiven(Arc<Mutex<Given>>);

impl SharedGiven {
    pub fn set(&self, given: Given) {
        *self.lock() = given;
    }

    /// The ports of the host that `auto` may publish.
    #[cfg(test)]
    pub fn ranges(&self) -> Vec<RangeInclusive<u16>> {
        self.lock().auto_host.clone()
    }

    fn lock(&self) -> MutexGuard<'_, Given> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The ports of one transport.
#[derive(Default)]
pub struct Ports {
    /// Lists the listeners of the guest, whose ports are published on the host.
    pub guest: Option<OpenPorts>,
    /// Lists the listeners of the host, whose ports are published on the guest's loopback.
    pub host: Option<OpenPorts>,
    pub given: SharedGiven,
    /// Ports of `guest` that are published.
    on_host: BTreeSet<u16>,
    /// Ports of `host` that are published, with the ids of their sockets in the splicer.
    on_guest: BTreeMap<u16, Vec<u64>>,
}

impl Ports {
    /// The ports on which the guest listens, without the gateway's.
    fn of_guest(&mut self) -> Option<BTreeSet<u16>> {
        let (open, given) = (self.guest.as_mut()?, self.given.lock());
        if given.auto_host.is_empty() && self.on_host.is_empty() {
            return None;
        }
        let mut own = given.guest.clone();
        own.extend(self.on_guest.keys());
        publishable(open, &own, &given.auto_host)
    }

    /// Ports among others that `auto` may publish on the host.
    fn allowed(&self, ports: &BTreeSet<u16>) -> BTreeSet<u16> {
        let given = self.given.lock();
        ports.iter().copied().filter(|port| contains(&given.auto_host, *port)).collect()
    }

    /// The ports on which the host listens, without `of_flows` and the gateway's other ports.
    fn of_host(&mut self, of_flows: &BTreeSet<u16>) -> Option<BTreeSet<u16>> {
        let (open, given) = (self.host.as_mut()?, self.given.lock());
        if given.auto_guest.is_empty() && self.on_guest.is_empty() {
            return None;
        }
        let own = &(&self.on_host | &given.host) | of_flows;
        publishable(open, &own, &given.auto_guest)
    }

    /// Withdraws the ports of the host that are not wanted any more. Returns the new ports.
    fn change_on_guest(&mut self, wanted: &BTreeSet<u16>, host: &Splicer) -> Vec<u16> {
        self.on_guest.retain(|port, sockets| {
            let stays = wanted.contains(port);
            if !stays {
                sockets.iter().for_each(|id| host.unlisten(*id));
            }
            stays
        });
        wanted.iter().copied().filter(|port| !self.on_guest.contains_key(port)).collect()
    }
}

impl AutoPorts {
    /// Whether there is anything to look up.
    pub fn is_needed(&self) -> bool {
        [&self.tcp, &self.udp].iter().any(|ports| ports.guest.is_some() || ports.host.is_some())
    }

    /// The timer and its handler.
    ///
    /// # Errors
    /// Those of timerfd_create.
    pub fn handler(mut self) -> io::Result<(OwnedFd, FdHandler)> {
        let timer = TimerFd::new(
            ClockId::CLOCK_MONOTONIC,
            TimerFlags::TFD_CLOEXEC | TimerFlags::TFD_NONBLOCK,
        )?;
        // The first look is at once: what listens on the host already is not missing in the guest for a second.
        let period = Expiration::IntervalDelayed(TimeSpec::new(0, 1), TimeSpec::new(PERIOD_S, 0));
        timer.set(period, TimerSetTimeFlags::empty())?;
        let handler: FdHandler = Box::new(move |timer, handle| {
            let mut count = [0; 8];
            let _ = nix::unistd::read(timer, &mut count);
            self.rescan(handle);
            ControlFlow::Continue(())
        });
        Ok((timer.into(), handler))
    }

    /// Publishes the ports that are new, and withdraws those that are gone.
    fn rescan(&mut self, handle: &mut Handle<'_>) {
        let ports = self.ports.clone();
        let switch = |handle: &mut Handle<'_>, protocol, f: &Forward, on: bool| {
            if on {
                return ports.publish(handle, protocol, f).is_ok();
            }
            ports.unpublish(handle, protocol, f);
            true
        };
        if let Some(wanted) = self.tcp.of_guest() {
            update(&mut self.tcp.on_host, wanted, |f, on| {
                let may_be = !on || is_free(TcpListener::bind(any(f.from)));
                may_be && switch(handle, Protocol::Tcp, f, on)
            });
        }
        if let Some(mut wanted) = self.udp.of_guest() {
            // As pasta(1): the UDP ports of the numbers of TCP ports, too.
            wanted.extend(self.udp.allowed(&self.tcp.on_host));
            let own = handle.own_udp_ports();
            let is_free = |port| own.contains(&port) || is_free(UdpSocket::bind(any(port)));
            update(&mut self.udp.on_host, wanted, |f, on| {
                (!on || is_free(f.from)) && switch(handle, Protocol::Udp, f, on)
            });
        }
        self.rescan_host(&handle.own_udp_ports());
    }

    /// Ports that listen on the host get sockets on the guest's loopback.
    fn rescan_host(&mut self, own_udp: &BTreeSet<u16>) {
        let (Some(guest), Some(host)) = (&self.in_guest, &self.in_host) else { return };
        if let Some(wanted) = self.tcp.of_host(&BTreeSet::new()) {
            for port in self.tcp.change_on_guest(&wanted, host) {
                let made = guest.bind(loopback(port).to_vec()).into_iter().flatten();
                let own = on_loopback_of_guest(&to_the_same(port));
                let serve =
                    |listener| host.listen(listener, loopback(port).to_vec(), Arc::clone(&own));
                let ids = made.map(serve);
                keep(&mut self.tcp.on_guest, port, ids.collect());
            }
        }
        if let Some(wanted) = self.udp.of_host(own_udp) {
            for port in self.udp.change_on_guest(&wanted, host) {
                let made = guest.bind_datagrams(loopback(port).to_vec()).into_iter().flatten();
                let own = on_loopback_of_guest(&to_the_same(port));
                let serve = |socket: UdpSocket| {
                    let is_v4 = socket.local_addr().is_ok_and(|at| at.is_ipv4());
                    host.listen_datagrams(socket, loopback_of(port, is_v4), Arc::clone(&own))
                };
                keep(&mut self.udp.on_guest, port, made.map(serve).collect());
            }
        }
    }
}

/// A port of all addresses of both IP versions.
fn any(port: u16) -> SocketAddr {
    SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), port)
}

/// Whether no program of the host has a port at either IP version: the guest may have one of them alone.
fn is_free<S>(bound: io::Result<S>) -> bool {
    !bound.is_err_and(|e| e.kind() == io::ErrorKind::AddrInUse)
}

/// A port for which no socket could be made is tried again the next time.
fn keep(published: &mut BTreeMap<u16, Vec<u64>>, port: u16, sockets: Vec<u64>) {
    if !sockets.is_empty() {
        published.insert(port, sockets);
    }
}

/// The open ports that may be published; `None` if the kernel does not answer.
fn publishable(
    open: &mut OpenPorts,
    others: &BTreeSet<u16>,
    allowed: &[RangeInclusive<u16>],
) -> Option<BTreeSet<u16>> {
    let mut ports = open.list().ok()?;
    ports.retain(|p| *p >= FIRST_UNPRIVILEGED_PORT && contains(allowed, *p) && !others.contains(p));
    Some(ports)
}

fn contains(ranges: &[RangeInclusive<u16>], port: u16) -> bool {
    ranges.iter().any(|range| range.contains(&port))
}

/// Publishes what is new and withdraws what is gone. What cannot be published is tried again the next time.
fn update(
    published: &mut BTreeSet<u16>,
    wanted: BTreeSet<u16>,
    mut switch: impl FnMut(&Forward, bool) -> bool,
) {
    published.retain(|port| wanted.contains(port) || !switch(&to_the_same(*port), false));
    for port in wanted {
        if published.len() >= MOST_PORTS {
            return;
        }
        if !published.contains(&port) && switch(&to_the_same(port), true) {
            published.insert(port);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_changes_is_published_and_withdrawn() {
        let (mut published, mut calls) = (BTreeSet::new(), Vec::new());
        let mut go = |wanted: &[u16]| {
            calls.clear();
            update(&mut published, wanted.iter().copied().collect(), |f, on| {
                calls.push((f.from, on));
                f.from != 4000
            });
            calls.clone()
        };
        assert_eq!(go(&[2000, 4000]), [(2000, true), (4000, true)]);
        assert_eq!(go(&[2000, 3000, 4000]), [(3000, true), (4000, true)]);
        assert_eq!(go(&[3000]), [(2000, false)]);
    }

    #[test]
    fn a_port_that_a_program_has_at_one_ip_version_is_not_free() {
        for at in ["127.0.0.1:0", "[::1]:0", "0.0.0.0:0"] {
            let taken = TcpListener::bind(at).unwrap();
            let port = taken.local_addr().unwrap().port();
            assert!(!is_free(TcpListener::bind(any(port))), "{at}");
            drop(taken);
            assert!(is_free(TcpListener::bind(any(port))), "{at}");
        }
    }

    #[test]
    fn a_guest_that_listens_on_every_port_gets_some_and_keeps_them() {
        let mut published = BTreeSet::new();
        update(&mut published, (1024..=65_535).collect(), |f, _| {
            assert!(!f.is_optional, "both IP versions or none");
            true
        });
        assert_eq!(published.len(), MOST_PORTS);
        let before = published.clone();
        update(&mut published, (1024..=65_535).rev().collect(), |_, on| on);
        assert_eq!(published, before);
        // One that is withdrawn makes space for another.
        let wanted = (1025..=65_535).collect();
        update(&mut published, wanted, |_, _| true);
        assert!(published.len() == MOST_PORTS && !published.contains(&1024));
    }
}
