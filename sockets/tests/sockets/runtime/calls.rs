//! Two shards over a link, stepped by hand at times of our choice: what the stack itself decides,
//! beside its engines.

use std::net::SocketAddr;
use std::sync::Arc;
use std::task::Poll;

use fulmar::internals::drivers::link::Impairments;
use fulmar::internals::runtime::PollSetCore;
use fulmar_stack::base::{Counter, Duration, SlotId};
use fulmar_stack::mbuf::FairShare;
use fulmar_stack::shard::Shard;
use fulmar_stack::socket::{Attempt, Ready, SocketError};
use fulmar_testbed::stations::{at, config, read, write};
use fulmar_testbed::world::World;

fn world(budget_bytes: usize) -> World {
    World::linked(1, &Impairments::default(), |n| config(n, budget_bytes))
}

/// Both stations work until neither has anything to do, without any time passing.
fn settle(w: &mut World) {
    w.pass(Duration::ZERO);
}

/// A connection to a port of station 1: the ends, and the listener.
fn connection(w: &mut World, port: u16) -> (SlotId, SlotId, SlotId) {
    let listener = w.listen(port);
    let client = w.shards[0].tcp_connect(w.now, at(1, port), None).unwrap();
    settle(w);
    (client, w.accept(listener).expect("accepted at once"), listener)
}

#[test]
fn the_last_acknowledgement_of_a_close_is_not_left_to_a_timer() {
    // Who closes first; at the same time neither has heard of the other's.
    for order in ["a first", "b first", "both"] {
        let mut w = world(256 << 20);
        let (c, s, _) = connection(&mut w, 80);
        match order {
            "a first" => {
                w.shards[0].close(w.now, c);
                settle(&mut w);
                w.shards[1].close(w.now, s);
            }
            "b first" => {
                w.shards[1].close(w.now, s);
                settle(&mut w);
                w.shards[0].close(w.now, c);
            }
            _ => {
                w.shards[0].close(w.now, c);
                w.shards[1].close(w.now, s);
            }
        }
        settle(&mut w);
        let left = w
            .shards
            .each_mut()
            .map(|s| s.stat())
            .map(|s| s.sockets.iter().filter(|s| s.state != "LISTEN").count());
        assert_eq!(left, [0, 0], "{order}: somebody waits for an answer");
        assert!(w.shards[0].stat().time_wait + w.shards[1].stat().time_wait >= 1, "{order}");
    }
}

#[test]
fn a_reset_peer_is_told_once_and_the_pipe_is_broken_then() {
    let mut w = world(256 << 20);
    let (c, s, _) = connection(&mut w, 80);
    w.shards[1].tcp_entry(s).unwrap().linger = Some(Duration::ZERO);
    w.shards[1].close(w.now, s);
    settle(&mut w);
    let mut error =
        || w.shards[0].sosend(c).reserve(w.now, b"x", 1, Attempt::First).map(drop).unwrap_err();
    assert_eq!(error(), SocketError::ConnectionReset);
    assert_eq!(error(), SocketError::BrokenPipe);
    assert_eq!(read(&mut w.shards[0], w.now, c, usize::MAX), Some(vec![]));
}

#[test]
fn a_writer_of_a_dry_pool_is_told_when_buffers_are_back() {
    let mut w = world(4 << 20);
    let hoarders: Vec<_> = (1..10).map(|port| connection(&mut w, port)).collect();
    let (c, _, _) = connection(&mut w, 80);
    let set = Arc::new(PollSetCore::new().unwrap());
    w.shards[0].join_set(c, &set, 7, Ready::WRITABLE).unwrap();
    let told = |w: &mut World| {
        let mut tokens = Vec::new();
        w.shards[0].collect_set(&set, 10, |token, _| tokens.push(token));
        !tokens.is_empty()
    };
    assert!(told(&mut w));
    for (h, _, _) in &hoarders {
        while write(&mut w.shards[0], w.now, *h, &[0; 64 << 10]).is_some() {}
    }
    // It has its part, whatever the others hold.
    let first = write(&mut w.shards[0], w.now, c, &[0; 64 << 10]).unwrap();
    assert!(first >= FairShare::MIN_BYTES, "{first}");
    while write(&mut w.shards[0], w.now, c, &[0; 64 << 10]).is_some() {}
    assert!(!told(&mut w), "a write would take nothing");
    // The peer reads, so that buffers come home; some of them unseen, from the peer's pool.
    for _ in 0..200 {
        w.pass(Duration::from_millis(10));
        for (_, s, _) in &hoarders {
            read(&mut w.shards[1], w.now, *s, usize::MAX);
        }
    }
    assert!(told(&mut w), "nobody told the writer");
    assert!(write(&mut w.shards[0], w.now, c, &[0; 64 << 10]).is_some());
}

#[test]
fn writes_of_two_writers_are_not_mixed() {
    let mut w = world(256 << 20);
    let (c, _, _) = connection(&mut w, 80);
    assert!(matches!(w.shards[0].tcp_entry(c).and_then(|e| e.lock_send(1)), Ok(Poll::Ready(()))));
    assert!(matches!(w.shards[0].tcp_entry(c).and_then(|e| e.lock_send(2)), Ok(Poll::Pending)));
    // The same thread again: a signal handler interrupted it.
    assert_eq!(
        w.shards[0].tcp_entry(c).and_then(|e| e.lock_send(1)).map(drop),
        Err(SocketError::WouldBlock)
    );
    w.shards[0].sosend(c).unlock();
    assert!(matches!(w.shards[0].tcp_entry(c).and_then(|e| e.lock_send(2)), Ok(Poll::Ready(()))));
}

#[test]
fn a_datagram_to_oneself_is_there_when_the_call_returns() {
    let mut w = world(256 << 20);
    let udp = |shard: &mut Shard, port| {
        shard.udp().bind(([10, 0, 0, 1], port).into(), Default::default()).unwrap()
    };
    let (sender, receiver) = (udp(&mut w.shards[0], 1), udp(&mut w.shards[0], 2));
    for i in 0..1000u32 {
        let to = SocketAddr::from(([10, 0, 0, 1], 2));
        w.shards[0].udp().send(w.now, sender, &[&i.to_ne_bytes()], Some(to)).unwrap();
        let Poll::Ready(d) = w.shards[0].udp().receive(receiver).unwrap() else {
            panic!("{i} is not there")
        };
        assert_eq!(d.payload.to_vec(), i.to_ne_bytes());
        w.shards[0].free(d.payload);
    }
}

#[test]
fn a_closed_socket_is_in_no_poll_set() {
    let mut w = world(256 << 20);
    let (c, s, l) = connection(&mut w, 80);
    let set = Arc::new(PollSetCore::new().unwrap());
    for (i, id) in [s, l].into_iter().enumerate() {
        w.shards[1].join_set(id, &set, i, Ready::READABLE | Ready::WRITABLE).unwrap();
    }
    write(&mut w.shards[0], w.now, c, b"x");
    settle(&mut w);
    let mut tokens = Vec::new();
    w.shards[1].collect_set(&set, 10, |t, _| tokens.push(t));
    assert_eq!(tokens, [0]);
    // It lives on until its peer has answered, but its user is gone.
    w.shards[1].close(w.now, s);
    w.shards[1].close(w.now, l);
    assert_eq!(w.shards[1].collect_set(&set, 10, |t, _| panic!("{t} is closed")), 0);
}

#[test]
fn an_absent_neighbour_fails_a_connect_in_about_three_seconds() {
    let mut w = world(256 << 20);
    let c = w.shards[0].tcp_connect(w.now, SocketAddr::from(([10, 0, 0, 99], 80)), None).unwrap();
    w.pass(Duration::from_millis(2500));
    assert!(matches!(w.shards[0].tcp_connected(c), Ok(Poll::Pending)));
    w.pass(Duration::from_millis(1000));
    assert_eq!(w.shards[0].tcp_connected(c).map(drop), Err(SocketError::HostUnreachable));
}

#[test]
fn every_buffer_returns_for_every_order_of_closes() {
    let mut w = world(256 << 20);
    for i in 0..50u16 {
        let (c, s, l) = connection(&mut w, 1000 + i);
        write(&mut w.shards[0], w.now, c, &vec![1; usize::from(i) * 3000]);
        if i % 2 == 0 {
            settle(&mut w);
        }
        match i % 3 {
            0 => w.shards[0].close(w.now, c),
            1 => w.shards[1].close(w.now, s),
            _ => drop(read(&mut w.shards[1], w.now, s, usize::MAX)),
        }
        if i % 5 == 0 {
            settle(&mut w);
        }
        w.shards[0].close(w.now, c);
        w.shards[1].close(w.now, l);
        w.shards[1].close(w.now, s);
    }
    w.pass(Duration::from_millis(1500));
    for shard in &mut w.shards {
        let stat = shard.stat();
        assert_eq!(stat.sockets.len(), 0);
        assert_eq!(stat.pool.mbufs_in_use, 0);
        assert_eq!(stat.window.granted_bytes, 0);
        assert_eq!(shard.counters().value(Counter::TcpTimeouts), 0);
    }
}
