//! What connections inherit from their listener.

use std::net::{Ipv4Addr, SocketAddrV4};

use fulmar_base::{Counter, Duration, SeqNum, SlotId};
use fulmar_shard::{ListenOptions, SynCookies};
use fulmar_socket::{SocketError, Step};
use fulmar_tcp::Keepalive;
use fulmar_wire::tcp::{Flags, Header};

use fulmar_testbed::listener::{Rig, ack, syn, syn_options};

const PEER: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::new(203, 0, 113, 5), 4000);
const KEEPALIVE: Keepalive =
    Keepalive { idle: Duration::from_secs(3), interval: Duration::from_secs(1), count: 2 };

fn options(syn_cookies: SynCookies) -> ListenOptions {
    ListenOptions { syn_cookies, ..ListenOptions::default() }
}

/// A connection of a peer that sends nothing from then on.
fn silent_peer(rig: &mut Rig) -> SlotId {
    rig.send_from(PEER, &syn(SeqNum(1), syn_options(7)), &[]);
    rig.pass(1);
    let syn_ack = rig.replies_to(PEER)[0];
    rig.send_from(PEER, &ack(&syn_ack), &[]);
    rig.pass(1);
    rig.replies();
    rig.accept().expect("a connection")
}

fn flags(sent: &[Header]) -> Vec<Flags> {
    sent.iter().map(|h| h.flags).collect()
}

#[test]
fn a_listeners_keepalive_resets_an_accepted_peer_that_has_vanished() {
    for cookies in [SynCookies::Off, SynCookies::Always] {
        let mut rig = Rig::new(ListenOptions { keepalive: Some(KEEPALIVE), ..options(cookies) });
        let id = silent_peer(&mut rig);
        assert_eq!(rig.server.tcp_entry(id).unwrap().tcb.keepalive(), Some(KEEPALIVE));
        rig.pass(2_900);
        assert_eq!(flags(&rig.replies_to(PEER)), []);
        rig.pass(1_900);
        assert_eq!(flags(&rig.replies_to(PEER)), [Flags::ACK, Flags::ACK]);
        assert!(matches!(rig.server.tcp_take(id, 1), Ok(Step::WaitData(_))));
        rig.pass(500);
        assert_eq!(flags(&rig.replies_to(PEER)), [Flags::RST | Flags::ACK]);
        let e = rig.server.tcp_take(id, 1).expect_err("the peer is gone");
        assert_eq!(e, SocketError::TimedOut);
        assert_eq!(rig.count(Counter::TcpKeepaliveTimeouts), 1);
    }
}

#[test]
fn without_it_an_idle_peer_is_left_alone() {
    let mut rig = Rig::new(options(SynCookies::Off));
    silent_peer(&mut rig);
    rig.pass(20_000);
    assert_eq!(flags(&rig.replies_to(PEER)), []);
}

#[test]
fn a_listeners_user_time_out_ends_a_connection_whose_fin_nobody_acknowledges() {
    for cookies in [SynCookies::Off, SynCookies::Always] {
        let user_timeout = Some(Duration::from_secs(2));
        let mut rig = Rig::new(ListenOptions { user_timeout, ..options(cookies) });
        let id = silent_peer(&mut rig);
        assert_eq!(rig.server.tcp_entry(id).unwrap().tcb.user_timeout(), user_timeout);
        assert_eq!(rig.server.tcp_entry(id).unwrap().tcb.keepalive(), None);
        let now = rig.now;
        rig.server.tcp_shutdown(now, id, false, true).unwrap();
        rig.pass(1_900);
        assert!(!flags(&rig.replies_to(PEER)).contains(&(Flags::RST | Flags::ACK)));
        // The FIN is repeated once at least, and then has the least time-out.
        rig.pass(400);
        assert!(flags(&rig.replies_to(PEER)).contains(&(Flags::RST | Flags::ACK)));
        assert_eq!(rig.count(Counter::TcpUserTimeouts), 1);
    }
}
