//! DNS through a gateway: what passes to the host's resolvers, which of their answers come back, and what is learnt.

use std::io::ErrorKind;
use std::net::{SocketAddr, UdpSocket};
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use fulmar_gateway::config::{Config, Limits};
use fulmar_gateway::policy::{Decision, NewClient, NewFlow, Policy, Ruling};
use fulmar_gateway::ports::PortSpec;
use fulmar_gateway::stat::Refusal;
use nix::sys::socket::{setsockopt, sockopt};

use crate::relay::Test;
use crate::relay::udp::{assert_prohibited, bound, guest_to, receive};
use crate::relay::world::{GUEST, HOST, PATIENCE, QUEUES, World, ip};

pub const TESTS: &[Test] = &[
    ("dns_at_the_forward_address_reaches_the_resolver", dns_reaches_the_resolver),
    ("a_resolver_that_is_silent_bounds_nobody_else", a_resolver_that_is_silent),
    ("garbage_of_a_resolver_reaches_nobody", garbage_of_a_resolver),
    ("a_question_with_the_answer_in_it_is_refused_and_teaches_nothing", a_question_with_an_answer),
    ("a_forged_answer_neither_passes_nor_teaches", a_forged_answer),
    ("a_second_answer_neither_passes_nor_teaches", a_second_answer),
    ("many_guesses_at_an_answer_end_the_question", many_guesses),
    ("an_answer_with_an_error_or_of_another_name_teaches_nothing", an_answer_with_an_error),
    ("the_next_resolver_is_asked_after_an_error_at_once", the_next_resolver_after_an_error),
    ("the_next_resolver_is_asked_after_a_silence", the_next_resolver_after_a_silence),
    ("the_next_resolver_is_asked_after_a_failure", the_next_resolver_after_a_failure),
    ("resolvers_that_rotate_are_asked_first_by_turns", resolvers_that_rotate),
    ("where_all_resolvers_fail_the_guest_is_told", where_all_resolvers_fail),
    ("a_flow_of_dns_ends_soon_after_its_answer", a_flow_ends_soon),
    ("a_policy_is_told_the_names_of_addresses_and_refuses_names", a_policy_decides_about_names),
    ("a_client_from_port_53_teaches_no_names", a_client_from_port_53_teaches_no_names),
    ("a_server_of_the_guests_choice_allows_no_name", a_server_of_the_guests_choice_allows_no_name),
    ("a_client_whose_address_is_denied_is_not_admitted", a_client_whose_address_is_denied),
    ("addresses_of_the_host_are_shown_to_the_policy", addresses_of_the_host_are_shown),
];

/// Allows what is named good.example, and DNS.
struct OnlyNamed;

impl Policy for OnlyNamed {
    fn decide(&mut self, flow: &NewFlow<'_>) -> Ruling {
        let is_allowed = flow.to.port() == 53 || flow.names == ["good.example"];
        if is_allowed { Decision::Allow.into() } else { Decision::Deny.into() }
    }

    fn decide_name(&mut self, name: &str, _: u16) -> Decision {
        if name == "good.example" { Decision::Allow } else { Decision::Deny }
    }

    fn decide_hidden_name(&mut self) -> Decision {
        Decision::Deny
    }
}

/// Lets the guest ask these resolvers at 169.254.1.1.
fn forward(c: &mut Config, resolvers: &[SocketAddr]) {
    c.mapping.dns.push(ip("169.254.1.1"));
    c.mapping.resolvers.extend(resolvers);
}

/// A world whose guest asks these resolvers, under a policy.
fn asking(resolvers: &[&UdpSocket], change: impl FnOnce(&mut Config)) -> World {
    let at: Vec<SocketAddr> = resolvers.iter().map(|r| r.local_addr().unwrap()).collect();
    World::with(65520, |c| {
        forward(c, &at);
        c.policy = Some(Box::new(OnlyNamed));
        change(c);
    })
}

fn client(world: &World) -> UdpSocket {
    guest_to(world, "169.254.1.1:53".parse().unwrap())
}

/// The question for the address of a name of two labels.
fn question(first: &str) -> Vec<u8> {
    let mut message = vec![0, 7, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, first.len() as u8];
    message.extend(first.as_bytes());
    message.extend(b"\x07example\0\0\x01\0\x01");
    message
}

/// The answer to a question: [`HOST`].
fn answer_to(question: &[u8]) -> Vec<u8> {
    let mut answer = question.to_vec();
    (answer[2], answer[7]) = (0x81, 1);
    answer.extend([192, 12, 0, 1, 0, 1, 0, 0, 0, 9, 0, 4, 192, 0, 2, 1]);
    answer
}

/// A message with another identifier.
fn with_id(message: &[u8], id: &[u8]) -> Vec<u8> {
    [id, &message[2..]].concat()
}

/// Whether the guest reaches [`HOST`], whose name is good.example.
fn reaches(world: &World, server: &UdpSocket) -> bool {
    let to_server = guest_to(world, server.local_addr().unwrap());
    to_server.send(b"now").unwrap();
    server.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    to_server.set_read_timeout(Some(PATIENCE)).unwrap();
    match receive(server) {
        Ok((came, _)) => came == b"now",
        Err(_) => {
            assert_prohibited(&to_server);
            false
        }
    }
}

fn nothing_comes(socket: &UdpSocket) {
    socket.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
    assert_eq!(receive(socket).unwrap_err().kind(), ErrorKind::WouldBlock);
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
}

fn dns_reaches_the_resolver() {
    let resolver = bound("127.0.0.1");
    let at = resolver.local_addr().unwrap();
    let world = World::with(65520, |c| {
        c.mapping.dns.push(ip("169.254.1.1"));
        c.mapping.resolvers.push(at);
    });
    let client = guest_to(&world, "169.254.1.1:53".parse().unwrap());
    client.send(b"question").unwrap();
    let (came, from) = receive(&resolver).unwrap();
    assert_eq!(came, b"question");
    resolver.send_to(b"answer", from).unwrap();
    assert_eq!(receive(&client).unwrap().0, b"answer", "without a policy");
    client.send(&question("good")).unwrap();
    let (asked, from) = receive(&resolver).unwrap();
    assert_eq!(asked[2..], question("good")[2..]);
    resolver.send_to(&answer_to(&asked), from).unwrap();
    assert_eq!(
        receive(&client).unwrap().0,
        answer_to(&question("good")),
        "with the guest's own identifier"
    );
}

fn a_resolver_that_is_silent() {
    const FLOWS: usize = 64;
    let (resolver, server) = (bound("127.0.0.1"), bound(HOST));
    let at = resolver.local_addr().unwrap();
    let limits = Limits { udp_flows: FLOWS, ..Limits::default() };
    let world = World::with(65520, |c| {
        c.mapping.dns.push(ip("169.254.1.1"));
        c.mapping.resolvers.push(at);
        c.limits = limits;
    });
    // Each question from a port of its own, as resolvers ask.
    let clients: Vec<_> =
        (0..5 * FLOWS).map(|_| guest_to(&world, "169.254.1.1:53".parse().unwrap())).collect();
    // The guest's kernel keeps few datagrams while it asks for the router's Ethernet address.
    clients[0].send(&question("slow")).unwrap();
    world.until("the router is known", |s| s.totals.datagrams_out == 1);
    for client in &clients[1..] {
        client.send(&question("slow")).unwrap();
    }
    let asked = clients.len() as u64;
    world.until("all are asked", |s| s.totals.datagrams_out == asked);
    let stat = world.stat();
    assert!(stat.flows.len() <= FLOWS, "{}", stat.flows.len());
    assert!(stat.totals.refusals.value(Refusal::Displaced) >= asked - FLOWS as u64);
    let other = guest_to(&world, server.local_addr().unwrap());
    other.send(b"question").unwrap();
    let (_, from) = receive(&server).unwrap();
    server.send_to(b"answer", from).unwrap();
    assert_eq!(receive(&other).unwrap().0, b"answer");
    // Silence is silence: nothing is made up, and the guest's resolver has its own time-out.
    for client in &clients {
        client.set_nonblocking(true).unwrap();
        assert_eq!(receive(client).unwrap_err().kind(), ErrorKind::WouldBlock);
    }
}

fn garbage_of_a_resolver() {
    let (resolver, server) = (bound("127.0.0.1"), bound(HOST));
    let world = asking(&[&resolver], |_| ());
    let client = client(&world);
    let stranger = bound("127.0.0.1");
    let whole = answer_to(&question("good"));
    let record = whole.len() - 16;
    let with = |at: usize, byte: u8| {
        let mut changed = whole.clone();
        changed[at] = byte;
        changed
    };
    // Fewer than are taken for guesses.
    let mut garbage: Vec<Vec<u8>> = (0..record).step_by(4).map(|n| whole[..n].to_vec()).collect();
    garbage.extend((2..record).step_by(3).flat_map(|at| [12, 0xc0].map(|b| with(at, b))));
    garbage.extend([vec![0xc0; 512], vec![0xff; 60_000]]);
    // Of what still answers the question the records are garbage: it passes, and teaches nothing.
    let answers = |message: &Vec<u8>| {
        message.len() >= record
            && message[2] & 0x80 != 0
            && message[4..6] == [0, 1]
            && message[12..record] == whole[12..record]
    };
    for message in &mut garbage {
        client.send(&question("good")).unwrap();
        let (asked, from) = receive(&resolver).unwrap();
        let forged: Vec<u8> = asked.iter().take(2).chain(message.iter().skip(2)).copied().collect();
        // A datagram of a host that was not asked is dropped.
        stranger.send_to(&answer_to(&asked), from).unwrap();
        resolver.send_to(&forged, from).unwrap();
        if !answers(message) {
            resolver.send_to(&answer_to(&asked)[..record], from).unwrap();
        }
        let (came, _) = receive(&client).unwrap();
        assert_eq!(came[..2], [0, 7]);
        assert!(
            came[2..] == forged[2..] && answers(message) || came.len() == record,
            "{message:?}"
        );
    }
    for n in record..whole.len() {
        client.send(&question("good")).unwrap();
        let (asked, from) = receive(&resolver).unwrap();
        resolver.send_to(&answer_to(&asked)[..n], from).unwrap();
        assert_eq!(receive(&client).unwrap().0, whole[..n]);
    }
    let learnt = answers(&with(3, 0));
    assert!(learnt && reaches(&world, &server), "some were whole");
    assert_eq!(world.stat().flows.iter().filter(|f| f.peer.port() == 53).count(), 1);
}

fn a_question_with_an_answer() {
    let (resolver, server) = (bound("127.0.0.1"), bound(HOST));
    let world = asking(&[&resolver], |_| ());
    let client = client(&world);
    let plain = question("good");
    let mut with_answer = answer_to(&plain);
    with_answer[2] = 1;
    let mut with_authority = with_answer.clone();
    (with_authority[7], with_authority[9]) = (0, 1);
    let mut update = plain.clone();
    update[2] = 0x28;
    let mut two = plain.clone();
    two[5] = 2;
    const FORMERR: u8 = 1;
    const NOTIMP: u8 = 4;
    for (message, code) in
        [(with_answer, FORMERR), (with_authority, FORMERR), (update, NOTIMP), (two, FORMERR)]
    {
        client.send(&message).unwrap();
        let (refused, _) = receive(&client).unwrap();
        assert_eq!((refused[2] & 0x80, refused[3] & 15), (0x80, code));
        assert_eq!(refused[6..12], [0; 6]);
    }
    // A response is not answered.
    client.send(&answer_to(&plain)).unwrap();
    nothing_comes(&client);
    nothing_comes(&resolver);
    assert!(!reaches(&world, &server));
}

/// Answers that do not match the question: an attacker that has not seen the question does not know all of it.
fn a_forged_answer() {
    let (resolver, server) = (bound("127.0.0.1"), bound(HOST));
    let world = asking(&[&resolver], |_| ());
    let client = client(&world);
    client.send(&question("good")).unwrap();
    let (asked, from) = receive(&resolver).unwrap();
    let other_id = [asked[0] ^ 1, asked[1]];
    let mut other_letters = answer_to(&asked);
    other_letters[13] = b'G';
    let other_name = answer_to(&with_id(&question("evil"), &asked[..2]));
    for forged in [with_id(&answer_to(&asked), &other_id), other_letters, other_name] {
        resolver.send_to(&forged, from).unwrap();
    }
    bound("127.0.0.1").send_to(&answer_to(&asked), from).unwrap();
    nothing_comes(&client);
    assert!(!reaches(&world, &server));
    assert_eq!(world.stat().totals.refusals.value(Refusal::DnsAnswer), 3);
    resolver.send_to(&answer_to(&asked), from).unwrap();
    assert_eq!(receive(&client).unwrap().0, answer_to(&question("good")));
    assert!(reaches(&world, &server));
}

fn a_second_answer() {
    let (resolver, server) = (bound("127.0.0.1"), bound(HOST));
    let world = asking(&[&resolver], |_| ());
    let client = client(&world);
    client.send(&question("good")).unwrap();
    let (asked, from) = receive(&resolver).unwrap();
    let mut first = answer_to(&asked);
    *first.last_mut().unwrap() = 99;
    resolver.send_to(&first, from).unwrap();
    resolver.send_to(&answer_to(&asked), from).unwrap();
    assert_eq!(receive(&client).unwrap().0[2..], first[2..]);
    nothing_comes(&client);
    assert!(!reaches(&world, &server));
}

fn many_guesses() {
    let resolver = bound("127.0.0.1");
    let world = asking(&[&resolver], |_| ());
    let client = client(&world);
    client.send(&question("good")).unwrap();
    let (asked, from) = receive(&resolver).unwrap();
    for n in 1..100 {
        let id = [asked[0], asked[1].wrapping_add(n)];
        resolver.send_to(&with_id(&answer_to(&asked), &id), from).unwrap();
    }
    world.until("all have come", |s| s.totals.refusals.value(Refusal::DnsAnswer) >= 99);
    resolver.send_to(&answer_to(&asked), from).unwrap();
    nothing_comes(&client);
    client.send(&question("good")).unwrap();
    let (again, from) = receive(&resolver).unwrap();
    resolver.send_to(&answer_to(&again), from).unwrap();
    assert_eq!(receive(&client).unwrap().0, answer_to(&question("good")));
}

fn an_answer_with_an_error() {
    let (resolver, server) = (bound("127.0.0.1"), bound(HOST));
    let world = asking(&[&resolver], |_| ());
    let client = client(&world);
    let ask = |change: &dyn Fn(&mut Vec<u8>)| {
        client.send(&question("good")).unwrap();
        let (asked, from) = receive(&resolver).unwrap();
        let mut answer = answer_to(&asked);
        change(&mut answer);
        resolver.send_to(&answer, from).unwrap();
        assert_eq!(receive(&client).unwrap().0[2..], answer[2..], "it passes");
    };
    let end = question("good").len();
    ask(&|answer| answer[3] = 1);
    ask(&|answer| answer[3] = 3);
    // A record of another name, of class CHAOS, in another section.
    ask(&|answer| drop(answer.splice(end..end + 2, *b"\x04evil\0")));
    ask(&|answer| answer[end + 5] = 3);
    ask(&|answer| (answer[7], answer[9]) = (0, 1));
    assert!(!reaches(&world, &server));
    ask(&|_| ());
    assert!(reaches(&world, &server));
}

/// An address of the host where nothing answers.
fn closed() -> SocketAddr {
    bound("127.0.0.1").local_addr().unwrap()
}

fn the_next_resolver_after_an_error() {
    const DEAD: u8 = 70;
    let alive = UdpSocket::bind("[::1]:0").unwrap();
    alive.set_read_timeout(Some(PATIENCE)).unwrap();
    let at = alive.local_addr().unwrap();
    // Nothing listens at the first ones, of which each would take its second of silence, and no route leads to the next.
    // The last one is of another IP version.
    let dead = (1..=DEAD).map(|n| SocketAddr::from(([127, 0, 1, n], closed().port())));
    let unreachable = "203.0.113.1:53".parse().unwrap();
    let servers: Vec<SocketAddr> = dead.chain([unreachable, at]).collect();
    let world = World::with(65520, |c| forward(c, &servers));
    for _ in 0..3 {
        let client = client(&world);
        client.send(&question("good")).unwrap();
        let (asked, from) = receive(&alive).unwrap();
        alive.send_to(&answer_to(&asked), from).unwrap();
        assert_eq!(receive(&client).unwrap().0, answer_to(&question("good")));
        nothing_comes(&client);
    }
    // Those that have failed are asked last: by each queue once, and the later questions were one datagram each.
    let sent = world.stat().totals.datagrams_out;
    let once = u64::from(DEAD) * u64::from(QUEUES.load(Relaxed));
    assert!(sent <= once + 3, "{sent}");
}

fn the_next_resolver_after_a_silence() {
    let (silent, alive, server) = (bound("127.0.0.1"), bound("127.0.0.1"), bound(HOST));
    let world = asking(&[&silent, &alive], |_| ());
    let client = client(&world);
    client.send(&question("good")).unwrap();
    let (asked, from_silent) = receive(&silent).unwrap();
    let (again, from) = receive(&alive).unwrap();
    assert_eq!(asked, again, "the same question");
    assert_ne!(from, from_silent);
    // The first answer counts, from either server, and the other is late.
    silent.send_to(&answer_to(&asked), from_silent).unwrap();
    assert_eq!(receive(&client).unwrap().0, answer_to(&question("good")));
    alive.send_to(&answer_to(&asked), from).unwrap();
    nothing_comes(&client);
    assert!(reaches(&world, &server));
    // It answers after all, and is asked first again.
    client.send(&question("good")).unwrap();
    receive(&silent).unwrap();
}

fn the_next_resolver_after_a_failure() {
    const SERVFAIL: u8 = 2;
    let (failing, alive, server) = (bound("127.0.0.1"), bound("127.0.0.1"), bound(HOST));
    let world = asking(&[&failing, &alive], |_| ());
    let client = client(&world);
    for code in [SERVFAIL, 4, 5] {
        client.send(&question("good")).unwrap();
        let (asked, from) = receive(&failing).unwrap();
        let mut failure = asked.clone();
        (failure[2], failure[3]) = (0x81, code);
        failing.send_to(&failure, from).unwrap();
        let (asked, from) = receive(&alive).unwrap();
        alive.send_to(&answer_to(&asked), from).unwrap();
        assert_eq!(receive(&client).unwrap().0, answer_to(&question("good")));
    }
    assert!(reaches(&world, &server));
    // There is no such name: that is an answer.
    client.send(&question("good")).unwrap();
    let (mut asked, from) = receive(&failing).unwrap();
    (asked[2], asked[3]) = (0x81, 3);
    failing.send_to(&asked, from).unwrap();
    assert_eq!(receive(&client).unwrap().0[2..], asked[2..]);
    nothing_comes(&alive);
}

fn resolvers_that_rotate() {
    let resolvers = [bound("127.0.0.1"), bound("127.0.0.1")];
    let world = asking(&[&resolvers[0], &resolvers[1]], |c| c.mapping.rotates = true);
    let client = client(&world);
    for n in 0..4 {
        client.send(&question("good")).unwrap();
        let (asked, from) = receive(&resolvers[n % 2]).unwrap();
        resolvers[n % 2].send_to(&answer_to(&asked), from).unwrap();
        assert_eq!(receive(&client).unwrap().0, answer_to(&question("good")), "{n}");
    }
}

fn where_all_resolvers_fail() {
    let failing = bound("127.0.0.1");
    let at = failing.local_addr().unwrap();
    let world = World::with(65520, |c| forward(c, &[at, closed()]));
    let client = client(&world);
    client.send(&question("good")).unwrap();
    let (mut asked, from) = receive(&failing).unwrap();
    (asked[2], asked[3]) = (0x81, 2);
    failing.send_to(&asked, from).unwrap();
    assert_eq!(receive(&client).unwrap().0[2..], asked[2..], "the answer of the one that has one");
    drop(failing);
    client.send(&question("good")).unwrap();
    assert_eq!(receive(&client).unwrap_err().kind(), ErrorKind::ConnectionRefused);
}

fn a_flow_ends_soon() {
    let resolver = bound("127.0.0.1");
    let at = resolver.local_addr().unwrap();
    let world = World::with(65520, |c| forward(c, &[at]));
    let client = client(&world);
    // Two questions and their answers, as glibc asks for both IP versions.
    for name in ["good", "evil"] {
        client.send(&question(name)).unwrap();
        let (asked, from) = receive(&resolver).unwrap();
        resolver.send_to(&answer_to(&asked), from).unwrap();
        receive(&client).unwrap();
    }
    let begun = std::time::Instant::now();
    assert_eq!(world.stat().flows.len(), 1);
    world.until("the flow ends", |s| s.flows.is_empty());
    assert!(begun.elapsed() > Duration::from_secs(3), "the guest may still ask by it");
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
}

fn a_policy_decides_about_names() {
    let (resolver, server) = (bound("127.0.0.1"), bound(HOST));
    let at = resolver.local_addr().unwrap();
    let world = World::with(65520, |c| {
        c.mapping.dns.push(ip("169.254.1.1"));
        c.mapping.resolvers.push(at);
        c.policy = Some(Box::new(OnlyNamed));
    });
    let to_server = guest_to(&world, server.local_addr().unwrap());
    to_server.send(b"too early").unwrap();
    assert_prohibited(&to_server);
    let client = guest_to(&world, "169.254.1.1:53".parse().unwrap());
    client.send(&question("bad")).unwrap();
    let (refused, _) = receive(&client).unwrap();
    assert_eq!((refused[2] & 0x80, refused[3] & 15), (0x80, 5));
    assert_eq!(refused[6..12], [0; 6], "no records");
    // With EDNS the answer says why: Extended DNS Error, Blocked (RFC 8914).
    let mut with_edns = question("bad");
    with_edns[11] = 1;
    with_edns.extend([0, 0, 41, 4, 208, 0, 0, 0, 0, 0, 0]);
    client.send(&with_edns).unwrap();
    let (refused, _) = receive(&client).unwrap();
    assert_eq!((refused[3] & 15, refused[11]), (5, 1));
    assert!(refused.ends_with(&[0, 6, 0, 15, 0, 2, 0, 15]), "{refused:?}");
    // Two questions in one message, and a run of messages.
    let mut two = question("good");
    two[5] = 2;
    client.send(&two).unwrap();
    let (refused, _) = receive(&client).unwrap();
    assert_eq!(refused, [0, 7, 0x81, 0x81, 0, 0, 0, 0, 0, 0, 0, 0]);
    let run = [question("good"), question("evil")].concat();
    setsockopt(&client, sockopt::UdpGsoSegment, &(run.len() as i32 / 2)).unwrap();
    client.send(&run).unwrap();
    setsockopt(&client, sockopt::UdpGsoSegment, &0).unwrap();
    assert_eq!(receive(&client).unwrap().0[12..17], *b"\x04evil");
    // The questions that an interface sends one by one are decided one by one.
    resolver.set_nonblocking(true).unwrap();
    while let Ok((asked, _)) = receive(&resolver) {
        assert_eq!(asked[2..], question("good")[2..]);
    }
    resolver.set_nonblocking(false).unwrap();
    client.send(&question("good")).unwrap();
    let (asked, from) = receive(&resolver).unwrap();
    assert_eq!(asked[2..], question("good")[2..], "the resolver has not heard of the other name");
    resolver.send_to(&answer_to(&asked), from).unwrap();
    assert_eq!(receive(&client).unwrap().0, answer_to(&question("good")));
    assert!(reaches(&world, &server));
}

fn a_client_from_port_53_teaches_no_names() {
    let spec: PortSpec = "5356:56".parse().unwrap();
    let server = bound(HOST);
    let world = World::with(65520, |c| {
        c.publish.udp = spec.forwards();
        c.policy = Some(Box::new(OnlyNamed));
    });
    let guest = world.guest.run(|| UdpSocket::bind((GUEST, 56))).unwrap();
    guest.set_read_timeout(Some(PATIENCE)).unwrap();
    // An unsolicited answer: good.example is the server.
    let client = UdpSocket::bind((HOST, 53)).unwrap();
    let mut answer = question("good");
    (answer[2], answer[7]) = (0x81, 1);
    answer.extend([192, 12, 0, 1, 0, 1, 0, 0, 0, 9, 0, 4, 192, 0, 2, 1]);
    client.send_to(&answer, (HOST, 5356)).unwrap();
    assert_eq!(receive(&guest).unwrap().0, answer);
    let to_server = guest_to(&world, server.local_addr().unwrap());
    to_server.send(b"by a stranger's word").unwrap();
    assert_prohibited(&to_server);
}

fn a_server_of_the_guests_choice_allows_no_name() {
    let server = bound(HOST);
    let accomplice = UdpSocket::bind((HOST, 53)).unwrap();
    accomplice.set_read_timeout(Some(PATIENCE)).unwrap();
    let world = World::with(65520, |c| {
        c.mapping.dns.push(ip("169.254.1.1"));
        c.mapping.resolvers.push("127.0.0.1:53".parse().unwrap());
        c.policy = Some(Box::new(OnlyNamed));
    });
    let client = guest_to(&world, accomplice.local_addr().unwrap());
    client.send(&question("good")).unwrap();
    let (mut answer, from) = receive(&accomplice).unwrap();
    (answer[2], answer[7]) = (0x81, 1);
    answer.extend([192, 12, 0, 1, 0, 1, 0, 0, 0, 9, 0, 4, 192, 0, 2, 1]);
    accomplice.send_to(&answer, from).unwrap();
    assert_eq!(receive(&client).unwrap().0, answer, "as it came");
    let to_server = guest_to(&world, server.local_addr().unwrap());
    to_server.send(b"by an accomplice's word").unwrap();
    assert_prohibited(&to_server);
}

/// Denies clients from one address.
struct NoClient(&'static str);

impl Policy for NoClient {
    fn decide(&mut self, flow: &NewFlow<'_>) -> Ruling {
        let is_own = flow.is_host || flow.to.ip() == ip(self.0);
        if is_own { Decision::Deny.into() } else { Decision::Allow.into() }
    }

    fn decide_client(&mut self, client: &NewClient) -> Decision {
        if client.from.ip() == ip(self.0) { Decision::Deny } else { Decision::Allow }
    }
}

fn a_client_whose_address_is_denied() {
    let [udp, tcp] = ["5359:59", "8083:59"].map(|spec| spec.parse::<PortSpec>().unwrap());
    let world = World::with(65520, |c| {
        c.publish.udp = udp.forwards();
        c.publish.tcp = tcp.forwards();
        c.policy = Some(Box::new(NoClient(HOST)));
    });
    let inside = world.guest.run(|| UdpSocket::bind((GUEST, 59))).unwrap();
    let listener = world.guest.run(|| std::net::TcpListener::bind((GUEST, 59))).unwrap();
    // A sender that forges the address of the first client would make the guest's answers go there.
    let (denied, other) = (bound(HOST), bound("127.0.0.1"));
    denied.send_to(b"denied", (HOST, 5359)).unwrap();
    other.send_to(b"other", ("127.0.0.1", 5359)).unwrap();
    inside.set_read_timeout(Some(PATIENCE)).unwrap();
    assert_eq!(receive(&inside).unwrap().0, b"other");
    nothing_comes(&inside);
    let mut refused = std::net::TcpStream::connect((HOST, 8083)).unwrap();
    refused.set_read_timeout(Some(PATIENCE)).unwrap();
    let end = std::io::Read::read(&mut refused, &mut [0]).map_err(|e| e.kind());
    assert_eq!(end, Err(ErrorKind::ConnectionReset));
    let _other = std::net::TcpStream::connect(("127.0.0.1", 8083)).unwrap();
    listener.accept().unwrap();
    let stat = world.stat();
    assert_eq!(stat.totals.refusals.value(Refusal::Policy), 2);
    assert!(stat.published.iter().all(|p| p.refused <= 1));
}

fn addresses_of_the_host_are_shown() {
    let server = bound(HOST);
    let named = |c: &mut Config| c.mapping.host_address.push((ip("10.9.9.9"), ip(HOST)));
    let world = World::with(65520, |c| {
        c.mapping.host_addresses.push(ip(HOST));
        named(c);
        c.policy = Some(Box::new(NoClient("192.0.2.99")));
    });
    let port = server.local_addr().unwrap().port();
    let to_host = guest_to(&world, server.local_addr().unwrap());
    to_host.send(b"by its address").unwrap();
    assert_prohibited(&to_host);
    let refused = world.connect((ip(HOST), port).into()).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
    let by_mapping = guest_to(&world, (ip("10.9.9.9"), port).into());
    by_mapping.send(b"by a mapping").unwrap();
    assert_eq!(receive(&server).unwrap().0, b"by a mapping");
}
