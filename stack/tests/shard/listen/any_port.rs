//! Listeners for every port and every address.

use std::net::{SocketAddr, SocketAddrV4};
use std::task::Poll;

use fulmar_stack::base::{DropReason, SeqNum, SlotId};
use fulmar_stack::shard::{ConditionalAccept, Decision, ListenOptions, StackConfig};
use fulmar_stack::socket::SocketError;
use fulmar_stack::wire::tcp::Flags;

use fulmar_testbed::listener::{Rig, ack, syn, syn_options};

fn any_port() -> ListenOptions {
    ListenOptions { any_port: true, ..ListenOptions::default() }
}

fn gateway() -> Rig {
    let config = StackConfig { any_ip: true, ..StackConfig::default() };
    let mut rig = Rig::with(ListenOptions::default(), config);
    rig.server.close(rig.now, rig.listener);
    rig
}

fn listen(rig: &mut Rig, local: &str, options: ListenOptions) -> SlotId {
    rig.server.tcp_listen(local.parse().unwrap(), options).unwrap()
}

fn v4(address: &str) -> SocketAddrV4 {
    address.parse().unwrap()
}

/// Completes a handshake with an address; the reply's header says who answered.
fn connect(rig: &mut Rig, from: SocketAddrV4, to: SocketAddrV4) {
    rig.send_to(from, to, &syn(SeqNum(77), syn_options(7)), &[]);
    rig.pass(1);
    let reply = rig.replies_to(from)[0];
    assert_eq!((reply.flags, reply.src_port), (Flags::SYN | Flags::ACK, to.port()));
    rig.send_to(from, to, &ack(&reply), b"hello");
    rig.pass(1);
}

fn accepted(rig: &mut Rig, listener: SlotId) -> Option<(Option<SocketAddr>, SlotId)> {
    match rig.server.tcp_accept(listener).unwrap() {
        Poll::Ready((id, _)) => Some((rig.server.addresses(id).unwrap().0, id)),
        _ => None,
    }
}

#[test]
fn the_local_address_of_a_connection_is_where_its_syn_went() {
    let mut rig = gateway();
    let all = listen(&mut rig, "0.0.0.0:0", any_port());
    for (n, to) in ["198.51.100.7:443", "10.0.0.1:80", "10.0.0.77:1"].into_iter().enumerate() {
        connect(&mut rig, v4(&format!("203.0.113.5:{}", 1000 + n)), v4(to));
        let (local, id) = accepted(&mut rig, all).expect("a connection");
        assert_eq!(local, Some(to.parse().unwrap()));
        assert_eq!(rig.read(id), b"hello");
    }
    assert_eq!(rig.server.addresses(all).unwrap().0, Some("0.0.0.0:0".parse().unwrap()));
}

#[test]
fn the_most_specific_listener_takes_the_connection() {
    let mut rig = gateway();
    let all = listen(&mut rig, "[::]:0", any_port());
    let port = listen(&mut rig, "0.0.0.0:80", ListenOptions::default());
    let both = listen(&mut rig, "198.51.100.7:81", ListenOptions::default());
    let cases = [
        ("198.51.100.7:80", port),
        ("10.0.0.1:80", port),
        ("198.51.100.7:81", both),
        ("198.51.100.8:81", all),
        ("198.51.100.7:82", all),
    ];
    for (n, (to, listener)) in cases.into_iter().enumerate() {
        connect(&mut rig, v4(&format!("203.0.113.5:{}", 1000 + n)), v4(to));
        assert!(accepted(&mut rig, listener).is_some(), "{to}");
    }
}

#[test]
fn all_ports_of_one_address_can_be_listened_on() {
    let mut rig = gateway();
    let one = listen(&mut rig, "198.51.100.7:0", any_port());
    connect(&mut rig, v4("203.0.113.5:1000"), v4("198.51.100.7:443"));
    assert!(accepted(&mut rig, one).is_some());
    let (from, to) = (v4("203.0.113.5:1001"), v4("198.51.100.8:443"));
    rig.send_to(from, to, &syn(SeqNum(77), syn_options(7)), &[]);
    rig.pass(1);
    assert_eq!(rig.replies_to(from)[0].flags, Flags::RST | Flags::ACK);
    assert_eq!(rig.drops(DropReason::TcpNoSocket), 1);
}

#[test]
fn port_0_is_no_port_and_two_listeners_for_all_ports_clash() {
    let mut rig = gateway();
    listen(&mut rig, "[::]:0", any_port());
    let clash = rig.server.tcp_listen("0.0.0.0:0".parse().unwrap(), any_port());
    assert_eq!(clash.err(), Some(SocketError::AddressInUse));
    let with_port = rig.server.tcp_listen("0.0.0.0:80".parse().unwrap(), any_port());
    assert_eq!(with_port.err(), Some(SocketError::Invalid));
    let (from, to) = (v4("203.0.113.5:1000"), v4("198.51.100.7:0"));
    rig.send_to(from, to, &syn(SeqNum(77), syn_options(7)), &[]);
    rig.pass(1);
    assert_eq!(rig.replies_to(from)[0].flags, Flags::RST | Flags::ACK);
}

#[test]
fn a_port_of_the_stacks_choice_is_still_one_of_its_own() {
    let mut rig = gateway();
    listen(&mut rig, "[::]:0", any_port());
    let one = listen(&mut rig, "0.0.0.0:0", ListenOptions::default());
    assert_ne!(rig.server.addresses(one).unwrap().0.unwrap().port(), 0);
}

#[test]
fn without_any_ip_other_addresses_are_not_ours() {
    let mut rig = Rig::new(ListenOptions::default());
    let local = "198.51.100.7:0".parse().unwrap();
    let refused = rig.server.tcp_listen(local, any_port());
    assert_eq!(refused.err(), Some(SocketError::AddressNotAvailable));
    let connect = rig.server.tcp_connect(
        rig.now,
        "10.0.0.2:9".parse().unwrap(),
        Some("198.51.100.7:5000".parse().unwrap()),
    );
    assert_eq!(connect.err(), Some(SocketError::AddressNotAvailable));
}

#[test]
fn a_pending_connection_to_any_address_is_decided_in_the_name_of_that_address() {
    let mut rig = gateway();
    let options =
        ListenOptions { conditional_accept: Some(ConditionalAccept::default()), ..any_port() };
    let all = listen(&mut rig, "[::]:0", options);
    let to = v4("198.51.100.7:443");
    for (n, decision) in
        [Decision::Accept, Decision::Refuse, Decision::Unreachable(1)].into_iter().enumerate()
    {
        let from = v4(&format!("203.0.113.5:{}", 1000 + n));
        rig.send_to(from, to, &syn(SeqNum(77), syn_options(7)), &[]);
        rig.pass(1);
        let Ok(Poll::Ready(pending)) = rig.server.tcp_pending(all) else { panic!("pending") };
        assert_eq!((pending.local, pending.remote), (to.into(), from.into()));
        rig.server.tcp_decide(rig.now, pending.id, decision).unwrap();
        let frames = rig.frames();
        assert_eq!(frames.len(), 1, "{decision:?}");
        assert_eq!(frames[0][26..30], to.ip().octets(), "{decision:?}");
    }
}

#[test]
fn a_connection_is_opened_from_an_address_of_another_host() {
    let mut rig = gateway();
    let to = "203.0.113.5:80".parse().unwrap();
    let local: SocketAddr = "198.51.100.7:5000".parse().unwrap();
    let id = rig.server.tcp_connect(rig.now, to, Some(local)).unwrap();
    let sent = rig.replies_to(v4("203.0.113.5:80"));
    assert_eq!((sent[0].flags, sent[0].src_port), (Flags::SYN, 5000));
    assert_eq!(rig.server.addresses(id).unwrap().0, Some(local));
}
