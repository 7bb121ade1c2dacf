//! Ports on which programs of a namespace listen: what `auto` publishes.
//!
//! The netlink sockets are opened before the gateway is contained, and asked again each second.

use std::collections::BTreeSet;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::ops::ControlFlow;
use std::os::fd::OwnedFd;

use fulmar_gateway::ports::{Bind, Forward};
use fulmar_gateway::splice::Splicer;
use fulmar_gateway::{Attendant, Handle};
use fulmar_netns::OpenPorts;
use nix::sys::time::TimeSpec;
use nix::sys::timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags};

const PERIOD_S: i64 = 1;
/// Ports below are not published: the gateway has no right to bind them any more.
const FIRST_UNPRIVILEGED_PORT: u16 = 1024;

/// A port on the loopback interface, of both IP versions.
pub fn loopback(port: u16) -> [SocketAddr; 2] {
    [
        SocketAddr::new(Ipv4Addr::LOCALHOST.into(), port),
        SocketAddr::new(Ipv6Addr::LOCALHOST.into(), port),
    ]
}

/// What `auto` has published.
#[derive(Default)]
pub struct Auto {
    /// Ports of the guest that the host gets.
    pub tcp: Option<OpenPorts>,
    pub udp: Option<OpenPorts>,
    /// Ports of the host that the guest's loopback gets.
    pub tcp_ns: Option<OpenPorts>,
    /// Ports of the host and of the guest that the options publish already: what listens there is the gateway.
    pub given_host: BTreeSet<u16>,
    /// See `given_host`.
    pub given_guest: BTreeSet<u16>,
    /// The thread in the guest's namespace, which makes listeners there.
    pub guest: Option<Splicer>,
    /// The thread that connects from the host's namespace.
    pub host: Option<Splicer>,
    tcp_published: BTreeSet<u16>,
    udp_published: BTreeSet<u16>,
    tcp_ns_published: Vec<(u16, Vec<u64>)>,
}

impl Auto {
    /// Whether there is anything to look up.
    pub fn is_needed(&self) -> bool {
        self.tcp.is_some() || self.udp.is_some() || self.tcp_ns.is_some()
    }

    /// The timer and what to do when it expires.
    ///
    /// # Errors
    /// Those of timerfd_create.
    pub fn attendant(mut self) -> io::Result<(OwnedFd, Attendant)> {
        let timer = TimerFd::new(
            ClockId::CLOCK_MONOTONIC,
            TimerFlags::TFD_CLOEXEC | TimerFlags::TFD_NONBLOCK,
        )?;
        let period = Expiration::Interval(TimeSpec::new(PERIOD_S, 0));
        timer.set(period, TimerSetTimeFlags::empty())?;
        let attendant: Attendant = Box::new(move |timer, handle| {
            let mut count = [0; 8];
            let _ = nix::unistd::read(timer, &mut count);
            self.look(handle);
            ControlFlow::Continue(())
        });
        Ok((timer.into(), attendant))
    }

    fn look(&mut self, handle: &mut Handle<'_>) {
        let mut of_host = self.given_guest.clone();
        of_host.extend(self.tcp_ns_published.iter().map(|(port, _)| *port));
        if let Some(open) = &mut self.tcp
            && let Some(wanted) = publishable(open, &of_host)
        {
            update(&mut self.tcp_published, wanted, |f, on| match on {
                true => handle.publish_tcp(f).is_ok(),
                false => {
                    handle.unpublish_tcp(f);
                    true
                }
            });
        }
        if let Some(open) = &mut self.udp
            && let Some(mut wanted) = publishable(open, &BTreeSet::new())
        {
            // As pasta(1): the UDP ports of the numbers of TCP ports, too.
            wanted.extend(&self.tcp_published);
            update(&mut self.udp_published, wanted, |f, on| match on {
                true => handle.publish_udp(f).is_ok(),
                false => {
                    handle.unpublish_udp(f);
                    true
                }
            });
        }
        self.look_at_host();
    }

    /// Ports that listen on the host get listeners on the guest's loopback.
    fn look_at_host(&mut self) {
        let (Some(open), Some(guest), Some(host)) = (&mut self.tcp_ns, &self.guest, &self.host)
        else {
            return;
        };
        let own = &self.tcp_published | &self.given_host;
        let Some(wanted) = publishable(open, &own) else { return };
        self.tcp_ns_published.retain(|(port, listeners)| {
            let stays = wanted.contains(port);
            if !stays {
                listeners.iter().for_each(|id| host.unlisten(*id));
            }
            stays
        });
        for port in wanted {
            if self.tcp_ns_published.iter().all(|(p, _)| *p != port) {
                let made = guest.bind(loopback(port).to_vec());
                let ids: Vec<u64> = made
                    .into_iter()
                    .flatten()
                    .map(|l| host.listen(l, loopback(port).to_vec()))
                    .collect();
                if !ids.is_empty() {
                    self.tcp_ns_published.push((port, ids));
                }
            }
        }
    }
}

/// What is open and may be published; `None` if the kernel fails to say.
fn publishable(open: &mut OpenPorts, others: &BTreeSet<u16>) -> Option<BTreeSet<u16>> {
    let mut ports = open.list().ok()?;
    ports.retain(|p| *p >= FIRST_UNPRIVILEGED_PORT && !others.contains(p));
    Some(ports)
}

/// Publishes what is new and withdraws what is gone. What cannot be published is tried again the next time.
fn update(
    published: &mut BTreeSet<u16>,
    wanted: BTreeSet<u16>,
    mut switch: impl FnMut(&Forward, bool) -> bool,
) {
    let forward =
        |port: u16| Forward { bind: Bind::default(), from: port, to: port, is_optional: true };
    published.retain(|port| wanted.contains(port) || !switch(&forward(*port), false));
    for port in wanted {
        if !published.contains(&port) && switch(&forward(port), true) {
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
}
