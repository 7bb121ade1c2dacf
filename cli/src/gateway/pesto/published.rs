//! The tables of published ports, and what a change of them opens and closes.

use std::collections::BTreeSet;
use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::ops::RangeInclusive;

use fulmar_gateway::pesto::{Capabilities, MOST_RULES, Rule, Tables};
use fulmar_gateway::policy::Protocol;
use fulmar_gateway::ports::Forward;
use fulmar_gateway::splice::Splicer;

use crate::gateway::auto::{Given, SharedGiven, loopback, loopback_of, on_loopback_of_guest};
use crate::gateway::log::Log;
use crate::gateway::publish::{Relay, not_loopback, why_refused};

/// Ports of a table at most: all of both transports.
const MOST_PORTS: usize = 2 * 65_535;

/// Sockets on the guest's loopback of the ports of the options, with their numbers in the splicer.
pub type Opened = Vec<(Protocol, Forward, u64)>;

/// The threads that have the ports.
pub trait Publisher: Send {
    /// Publishes a port of the host.
    fn publish(&self, protocol: Protocol, forward: &Forward) -> io::Result<()>;
    /// Withdraws it.
    fn unpublish(&self, protocol: Protocol, forward: &Forward);
    /// Publishes a port of the guest's loopback. Returns the numbers of its sockets.
    fn publish_on_guest(&self, protocol: Protocol, forward: &Forward) -> io::Result<Vec<u64>>;
    /// Closes sockets of the guest's loopback.
    fn unpublish_on_guest(&self, sockets: &[u64]);
}

/// The threads of the ports of the guest's loopback: one binds in the guest's namespace, one connects in the host's.
pub struct OnGuest {
    pub inside: Splicer,
    pub outside: Splicer,
    /// The ports lead to loopback addresses only.
    pub is_splice_only: bool,
}

impl Publisher for (Relay, Option<OnGuest>) {
    fn publish(&self, protocol: Protocol, forward: &Forward) -> io::Result<()> {
        self.0.publish(protocol, forward)
    }

    fn unpublish(&self, protocol: Protocol, forward: &Forward) {
        // It fails when the gateway is ending: the port ends, too.
        let _ = self.0.unpublish(protocol, forward);
    }

    fn publish_on_guest(&self, protocol: Protocol, forward: &Forward) -> io::Result<Vec<u64>> {
        let Some(OnGuest { inside, outside, is_splice_only }) = &self.1 else {
            return Err(is_not_bound());
        };
        if *is_splice_only && forward.to_address.is_some_and(|to| !to.is_loopback()) {
            return Err(not_loopback());
        }
        let port = on_loopback_of_guest(forward);
        let addresses = match forward.bind.address {
            Some(address) => vec![SocketAddr::new(address, forward.from)],
            None => loopback(forward.from).to_vec(),
        };
        let to_address = |is_v4: bool| {
            let own = loopback_of(forward.to, is_v4);
            forward.to_address.map_or(own, |address| SocketAddr::new(address, forward.to))
        };
        let sockets: Vec<u64> = if protocol == Protocol::Udp {
            let made = inside.bind_datagrams(addresses).unwrap_or_default();
            let is_v4 = |socket: &UdpSocket| socket.local_addr().is_ok_and(|at| at.is_ipv4());
            let carry = |socket: UdpSocket| {
                let to = to_address(is_v4(&socket));
                outside.listen_datagrams(socket, to, port.clone())
            };
            made.into_iter().map(carry).collect()
        } else {
            let made = inside.bind(addresses).unwrap_or_default();
            let to = match forward.to_address {
                Some(_) => vec![to_address(true)],
                None => loopback(forward.to).to_vec(),
            };
            made.into_iter().map(|l| outside.listen(l, to.clone(), port.clone())).collect()
        };
        if sockets.is_empty() { Err(is_not_bound()) } else { Ok(sockets) }
    }

    fn unpublish_on_guest(&self, sockets: &[u64]) {
        if let Some(OnGuest { outside, .. }) = &self.1 {
            sockets.iter().for_each(|id| outside.unlisten(*id));
        }
    }
}

fn is_not_bound() -> io::Error {
    io::Error::other("it cannot be bound on the namespace's loopback")
}

/// A rule of a table, and its sockets on the guest's loopback.
struct Entry {
    rule: Rule,
    sockets: Vec<u64>,
}

/// The tables as they are.
pub struct Published {
    capabilities: Capabilities,
    host: Vec<Entry>,
    guest: Vec<Entry>,
    publisher: Box<dyn Publisher>,
    /// Of TCP and of UDP: what `auto` may publish beside.
    given: [SharedGiven; 2],
}

impl Published {
    /// Of ports that are published already.
    pub fn new(
        capabilities: Capabilities,
        tables: Tables,
        opened: Opened,
        publisher: Box<dyn Publisher>,
        given: [SharedGiven; 2],
    ) -> Published {
        let on_guest = |rule: Rule| {
            let own = opened.iter().filter(|(protocol, forward, _)| {
                *protocol == rule.protocol
                    && rule.from.contains(&forward.from)
                    && rule.bind == forward.bind
            });
            Entry { sockets: own.map(|(.., id)| *id).collect(), rule }
        };
        let on_host = |rule| Entry { rule, sockets: Vec::new() };
        Published {
            capabilities,
            host: tables.host.into_iter().map(on_host).collect(),
            guest: tables.guest.into_iter().map(on_guest).collect(),
            publisher,
            given,
        }
    }

    pub fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    pub fn tables(&self) -> Tables {
        let rules = |entries: &[Entry]| entries.iter().map(|entry| entry.rule.clone()).collect();
        Tables { host: rules(&self.host), guest: rules(&self.guest) }
    }

    /// Makes the changes that lead from the tables that a client was sent to those that it wants.
    pub fn change(&mut self, sent: &Tables, wanted: &Tables, log: &Log) {
        let Published { capabilities, host, guest, publisher, .. } = self;
        remove(host, &sent.host, &wanted.host, |entry| {
            let forwards = entry.rule.forwards();
            forwards.for_each(|forward| publisher.unpublish(entry.rule.protocol, &forward));
        });
        remove(guest, &sent.guest, &wanted.guest, |entry| {
            publisher.unpublish_on_guest(&entry.sockets);
        });
        let new_host = add(host, *capabilities, &sent.host, &wanted.host, log);
        let new_guest = add(guest, *capabilities, &sent.guest, &wanted.guest, log);
        // Before the ports are bound: `auto` would take them for ports of a program.
        self.tell_auto();
        for entry in &self.host[new_host..] {
            open(&entry.rule, log, |protocol, f| {
                self.publisher.publish(protocol, f).map(|()| vec![])
            });
        }
        for entry in &mut self.guest[new_guest..] {
            let publish = |protocol, f: &Forward| self.publisher.publish_on_guest(protocol, f);
            entry.sockets = open(&entry.rule, log, publish);
        }
    }

    fn tell_auto(&self) {
        for (given, protocol) in self.given.iter().zip([Protocol::Tcp, Protocol::Udp]) {
            given.set(given_by(&self.tables(), protocol));
        }
    }
}

/// The ports of a transport that rules give.
pub fn given_by(tables: &Tables, protocol: Protocol) -> Given {
    let of = |rules: &[Rule], is_auto: bool| -> Vec<RangeInclusive<u16>> {
        let wanted = rules.iter().filter(|r| r.protocol == protocol && r.is_auto == is_auto);
        wanted.map(|rule| rule.from.clone()).collect()
    };
    let ports =
        |rules: &[Rule]| -> BTreeSet<u16> { of(rules, false).into_iter().flatten().collect() };
    Given {
        host: ports(&tables.host),
        guest: ports(&tables.guest),
        auto_host: of(&tables.host, true),
        auto_guest: of(&tables.guest, true),
    }
}

/// Removes the rules that a client does not want any more.
fn remove(entries: &mut Vec<Entry>, sent: &[Rule], wanted: &[Rule], close: impl Fn(&Entry)) {
    entries.retain(|entry| {
        let is_removed = sent.contains(&entry.rule) && !wanted.contains(&entry.rule);
        if is_removed {
            close(entry);
        }
        !is_removed
    });
}

/// Adds the rules that a client wants anew. Returns the place of the first one.
fn add(
    entries: &mut Vec<Entry>,
    capabilities: Capabilities,
    sent: &[Rule],
    wanted: &[Rule],
    log: &Log,
) -> usize {
    let first = entries.len();
    for rule in wanted.iter().filter(|rule| !sent.contains(rule)) {
        match check(rule, entries, capabilities) {
            Ok(()) => entries.push(Entry { rule: rule.clone(), sockets: Vec::new() }),
            Err(why) => log.fail(&format!("pesto: {rule} is not published: {why}")),
        }
    }
    first
}

fn check(rule: &Rule, entries: &[Entry], capabilities: Capabilities) -> Result<(), String> {
    let ports: usize = entries.iter().map(|e| &e.rule).chain([rule]).map(|r| r.from.len()).sum();
    if entries.len() >= MOST_RULES || ports > MOST_PORTS {
        return Err(format!("the bounds are {MOST_RULES} rules and {MOST_PORTS} ports"));
    }
    rule.check(capabilities, entries.iter().map(|entry| &entry.rule))
}

/// Publishes the ports of a rule. One message tells of all that cannot be.
fn open(
    rule: &Rule,
    log: &Log,
    mut publish: impl FnMut(Protocol, &Forward) -> io::Result<Vec<u64>>,
) -> Vec<u64> {
    let (mut sockets, mut refused, mut first) = (Vec::new(), 0, None);
    for forward in rule.forwards() {
        match publish(rule.protocol, &forward) {
            Ok(made) => sockets.extend(made),
            Err(_) if rule.is_optional => {}
            Err(e) => {
                refused += 1;
                first.get_or_insert_with(|| (forward.from, why_refused(&e, forward.from)));
            }
        }
    }
    match first {
        Some((port, why)) => log.fail(&format!(
            "pesto: port {port} of {rule} is not published: {why}; {refused} of its ports are not"
        )),
        None => log.say(&format!("pesto: {rule} is published")),
    }
    sockets
}
