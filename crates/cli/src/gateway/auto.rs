//! Ports on which programs of a namespace listen: what `auto` publishes.
//!
//! The files of /proc/net are opened before the gateway is contained, and read again each second from the start.
//!
//! Sources: proc_net(5) (`tcp`, `udp`), net/tcp_states.h.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::ops::ControlFlow;
use std::os::fd::OwnedFd;

use fulmar_gateway::attach::proc_net;
use fulmar_gateway::ports::{Bind, Forward};
use fulmar_gateway::splice::Splicer;
use fulmar_gateway::{Attendant, Handle};
use nix::sys::time::TimeSpec;
use nix::sys::timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags};

/// TCP_LISTEN and TCP_CLOSE, which is the state of a UDP socket that is not connected.
const LISTENING: &str = "0A";
const UNCONNECTED: &str = "07";
/// Bytes that are read of a table at most: some 25,000 sockets.
const MAX_TABLE_BYTES: u64 = 4 << 20;
const PERIOD_S: i64 = 1;
/// Ports below are not published: the gateway has no right to bind them any more.
const FIRST_UNPRIVILEGED_PORT: u16 = 1024;

/// The tables of one transport in one namespace.
pub struct Table {
    files: Vec<File>,
    state: &'static str,
}

impl Table {
    /// TCP sockets that listen in the namespace of the calling thread.
    pub fn tcp() -> Table {
        Table { files: open(["tcp", "tcp6"]), state: LISTENING }
    }

    /// UDP sockets that are bound in the namespace of the calling thread.
    pub fn udp() -> Table {
        Table { files: open(["udp", "udp6"]), state: UNCONNECTED }
    }

    fn ports(&mut self) -> BTreeSet<u16> {
        let mut ports = BTreeSet::new();
        for file in &mut self.files {
            let mut text = String::new();
            let read = file
                .seek(SeekFrom::Start(0))
                .and_then(|_| file.take(MAX_TABLE_BYTES).read_to_string(&mut text));
            if read.is_ok() {
                ports.extend(text.lines().filter_map(|line| port_of(line, self.state)));
            }
        }
        ports
    }
}

fn open(names: [&str; 2]) -> Vec<File> {
    names.into_iter().filter_map(|name| proc_net(name).ok()).collect()
}

/// The local port of a line of a table, if the socket is in this state.
fn port_of(line: &str, state: &str) -> Option<u16> {
    let mut fields = line.split_whitespace();
    let local = fields.nth(1)?;
    // After the remote address.
    if fields.nth(1)? != state {
        return None;
    }
    u16::from_str_radix(local.rsplit_once(':')?.1, 16).ok().filter(|p| *p != 0)
}

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
    pub tcp: Option<Table>,
    pub udp: Option<Table>,
    /// Ports of the host that the guest's loopback gets.
    pub tcp_ns: Option<Table>,
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
        if let Some(table) = &mut self.tcp {
            let wanted = publishable(table, &of_host);
            update(&mut self.tcp_published, wanted, |f, on| match on {
                true => handle.publish_tcp(f).is_ok(),
                false => {
                    handle.unpublish_tcp(f);
                    true
                }
            });
        }
        if let Some(table) = &mut self.udp {
            let mut wanted = publishable(table, &BTreeSet::new());
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
        let (Some(table), Some(guest), Some(host)) = (&mut self.tcp_ns, &self.guest, &self.host)
        else {
            return;
        };
        let wanted = publishable(table, &(&self.tcp_published | &self.given_host));
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

fn publishable(table: &mut Table, others: &BTreeSet<u16>) -> BTreeSet<u16> {
    let mut ports = table.ports();
    ports.retain(|p| *p >= FIRST_UNPRIVILEGED_PORT && !others.contains(p));
    ports
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
    fn a_line_of_a_table_names_a_port_and_a_state() {
        let line =
            "   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000 0 0 1 1";
        assert_eq!(port_of(line, LISTENING), Some(8080));
        assert_eq!(port_of(line, UNCONNECTED), None);
        let six =
            " 1: 00000000000000000000000000000000:0035 00000000000000000000000000000000:0000 07 0";
        assert_eq!(port_of(six, UNCONNECTED), Some(53));
        for line in
            ["  sl  local_address rem_address   st tx_queue", "", "0: x:y z 0A", "0: :zz a 0A"]
        {
            assert_eq!(port_of(line, LISTENING), None, "{line}");
        }
    }

    #[test]
    fn a_listener_of_this_namespace_is_found_until_it_is_closed() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let mut table = Table::tcp();
        assert!(table.ports().contains(&port));
        drop(listener);
        assert!(!table.ports().contains(&port));
    }

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
