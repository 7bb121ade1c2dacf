//! A policy that decides later: what waits meanwhile, and what comes of it.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpStream, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use fulmar_gateway::names::Ranges;
use fulmar_gateway::policy::{Decision, NewFlow, Policy, Protocol, Ruling};
use fulmar_gateway::rules::Rules;
use fulmar_gateway::stat::Refusal;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::relay::Test;
use crate::relay::names::{A, answer_both, answered, client, question};
use crate::relay::udp::{bound, guest_to, receive};
use crate::relay::world::{HOST, PATIENCE, World, ip, listener};

pub const TESTS: &[Test] = &[
    ("a_syn_waits_for_the_policy_and_connects", a_syn_waits),
    ("a_syn_that_waited_is_reset_when_it_is_denied", a_syn_is_denied),
    ("a_policy_that_says_nothing_is_asked_again", a_policy_that_says_nothing),
    ("a_flow_that_was_closed_meanwhile_leaves_nothing", a_flow_that_was_closed),
    ("datagrams_are_dropped_until_the_policy_has_decided", datagrams_are_dropped),
    ("a_name_is_looked_up_when_a_flow_to_it_is_allowed", a_name_is_looked_up),
    ("new_rules_let_what_waits_wait", new_rules_let_what_waits_wait),
];

/// How long something is watched that must not happen.
const MOMENT: Duration = Duration::from_millis(300);

#[derive(Clone)]
struct Later(Arc<Mutex<Decision>>);

impl Later {
    fn world() -> (World, Later) {
        let later = Later(Arc::new(Mutex::new(Decision::Wait)));
        let own = later.clone();
        (World::with(65520, |c| c.policy = Some(Box::new(own))), later)
    }

    fn set(&self, decision: Decision) {
        *self.0.lock().unwrap() = decision;
    }
}

impl Policy for Later {
    fn decide(&mut self, flow: &NewFlow<'_>) -> Ruling {
        let decision = if flow.to.port() == 53 { Decision::Allow } else { *self.0.lock().unwrap() };
        decision.into()
    }

    fn decide_look_up(&mut self, flow: &NewFlow<'_>) -> Ruling {
        assert_eq!((flow.name, flow.to), (Some("good.example"), flow.leads_to));
        self.decide(flow)
    }

    fn decide_name(&mut self, _: &str, _: u16) -> Decision {
        *self.0.lock().unwrap()
    }
}

/// A connection of the guest that has begun: how it ended, if it has within a time.
fn ended(connection: &OwnedFd, within: Duration) -> Option<std::io::Result<()>> {
    let mut ready = [PollFd::new(connection.as_fd(), PollFlags::POLLOUT)];
    let timeout = PollTimeout::try_from(within).unwrap();
    if poll(&mut ready, timeout).unwrap() == 0 {
        return None;
    }
    let stream = TcpStream::from(connection.try_clone().unwrap());
    Some(stream.take_error().unwrap().map_or(Ok(()), Err))
}

fn port_of(listener: &std::net::TcpListener) -> (&'static str, u16) {
    (HOST, listener.local_addr().unwrap().port())
}

fn a_syn_waits() {
    let ((world, later), server) = (Later::world(), listener());
    let all: Vec<OwnedFd> = (0..3).map(|_| world.begin_connection(port_of(&server))).collect();
    assert!(ended(&all[0], MOMENT).is_none(), "it waits");
    server.set_nonblocking(true).unwrap();
    assert_eq!(server.accept().unwrap_err().kind(), ErrorKind::WouldBlock, "nothing left the host");
    server.set_nonblocking(false).unwrap();
    later.set(Decision::Allow);
    world.decide_again();
    // With several queues they come in another order.
    for one in &all {
        ended(one, PATIENCE).unwrap().unwrap();
        TcpStream::from(one.try_clone().unwrap()).write_all(b"x").unwrap();
    }
    for _ in &all {
        let (mut far, _) = server.accept().unwrap();
        far.set_read_timeout(Some(PATIENCE)).unwrap();
        far.read_exact(&mut [0]).unwrap();
    }
}

fn a_syn_is_denied() {
    let ((world, later), server) = (Later::world(), listener());
    let one = world.begin_connection(port_of(&server));
    assert!(ended(&one, MOMENT).is_none());
    later.set(Decision::Deny);
    world.decide_again();
    let error = ended(&one, PATIENCE).unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
    assert_eq!(world.stat().totals.refusals.value(Refusal::Policy), 1);
}

fn a_policy_that_says_nothing() {
    let ((world, later), server) = (Later::world(), listener());
    let one = world.begin_connection(port_of(&server));
    assert!(ended(&one, MOMENT).is_none());
    later.set(Decision::Allow);
    ended(&one, PATIENCE).unwrap().unwrap();
}

fn a_flow_that_was_closed() {
    let ((world, later), server) = (Later::world(), listener());
    drop(world.begin_connection(port_of(&server)));
    let stays = world.begin_connection(port_of(&server));
    assert!(ended(&stays, MOMENT).is_none());
    later.set(Decision::Allow);
    world.decide_again();
    ended(&stays, PATIENCE).unwrap().unwrap();
    // Linux says nothing of a SYN that it gave up: it resets the answer, and the host's end with it.
    let (mut first, mut second) = (server.accept().unwrap().0, server.accept().unwrap().0);
    let mut one = TcpStream::from(stays);
    one.set_nonblocking(false).unwrap();
    one.write_all(b"x").unwrap();
    for far in [&first, &second] {
        far.set_read_timeout(Some(PATIENCE)).unwrap();
    }
    let heard = [&mut first, &mut second].map(|far| matches!(far.read(&mut [0]), Ok(1)));
    assert_eq!(heard.iter().filter(|heard| **heard).count(), 1);
    drop((one, first, second));
    world.until("no flow is left", |stat| stat.flows.is_empty());
}

fn datagrams_are_dropped() {
    let ((world, later), server) = (Later::world(), bound(HOST));
    let client = guest_to(&world, server.local_addr().unwrap());
    client.send(b"early").unwrap();
    world.until("it is counted", |stat| stat.totals.refusals.value(Refusal::Undecided) == 1);
    later.set(Decision::Allow);
    client.send(b"later").unwrap();
    server.set_read_timeout(Some(PATIENCE)).unwrap();
    assert_eq!(receive(&server).unwrap().0, b"later");
}

fn a_name_is_looked_up() {
    let (resolver, server) = (bound("127.0.0.1"), listener());
    let at = resolver.local_addr().unwrap();
    let later = Later(Arc::new(Mutex::new(Decision::Wait)));
    let world = World::with(65520, |c| {
        c.mapping.dns.push(ip("169.254.1.1"));
        c.mapping.resolvers.push(at);
        c.policy = Some(Box::new(later.clone()));
        c.names = Some(Ranges::of_global_id([7; 5]));
    });
    let dns = client(&world);
    dns.send(&question("good", A)).unwrap();
    let (code, Some(good)) = answered(&dns) else { panic!("an address") };
    assert_eq!(code, 0);
    // Other records would tell the resolvers.
    dns.send(&question("good", 16)).unwrap();
    assert_eq!(answered(&dns), (5, None));
    let to = good.to_string();
    let one = world.begin_connection((&to, server.local_addr().unwrap().port()));
    assert_silent(&resolver);
    later.set(Decision::Allow);
    world.decide_again();
    answer_both(&resolver, &[HOST], 60, 0);
    ended(&one, PATIENCE).unwrap().unwrap();
}

fn assert_silent(resolver: &UdpSocket) {
    resolver.set_read_timeout(Some(MOMENT)).unwrap();
    let begun = Instant::now();
    assert!(receive(resolver).is_err(), "the resolver was asked too early");
    assert!(begun.elapsed() >= MOMENT / 2);
}

fn new_rules_let_what_waits_wait() {
    let ((world, later), server) = (Later::world(), listener());
    let one = world.begin_connection(port_of(&server));
    assert!(ended(&one, MOMENT).is_none());
    world.set_rules(Rules::default());
    assert!(ended(&one, MOMENT).is_none());
    assert_eq!(world.stat().flows.iter().filter(|f| f.protocol == Protocol::Tcp).count(), 0);
    later.set(Decision::Deny);
    world.set_rules(Rules::default());
    assert!(ended(&one, PATIENCE).unwrap().is_err());
}
