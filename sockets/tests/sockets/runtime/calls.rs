//! Two shards over a link, stepped by hand at times of our choice: what the stack itself decides,
//! beside its engines.

use std::net::SocketAddr;
use std::task::Poll;

use fulmar::internals::drivers::link::{LinkConfig, pair};
use fulmar::internals::runtime::{PollSetCore, WatchedShard};
use fulmar_stack::base::{Counter, Duration, Instant, Secrets, SlotId};
use fulmar_stack::ip::IfAddr;
use fulmar_stack::mbuf::{FairShare, PoolConfig};
use fulmar_stack::shard::{ListenOptions, Shard, StackConfig};
use fulmar_stack::socket::{Attempt, Ready, SocketError};
use fulmar_testbed::stations::{read, write};
use std::sync::Arc;

struct World {
    a: WatchedShard,
    b: WatchedShard,
    now: Instant,
}

fn config(host: u8) -> StackConfig {
    StackConfig {
        addresses: vec![IfAddr { addr: [10, 0, 0, host].into(), prefix_len: 24 }],
        secrets: Some(Secrets::for_simulation(u64::from(host))),
        ..StackConfig::default()
    }
}

fn at_b(port: u16) -> SocketAddr {
    SocketAddr::from(([10, 0, 0, 2], port))
}

impl World {
    fn new() -> World {
        World::with(|c| c)
    }

    fn with(change: impl Fn(StackConfig) -> StackConfig) -> World {
        let now = Instant::from_millis(1000);
        let (p, q) = pair(&LinkConfig::default()).unwrap();
        World {
            a: WatchedShard::new(Shard::new(change(config(1)), Box::new(p), now).unwrap()),
            b: WatchedShard::new(Shard::new(change(config(2)), Box::new(q), now).unwrap()),
            now,
        }
    }

    /// Lets both work until neither has anything to do, without any time passing.
    fn settle(&mut self) {
        while self.a.step(self.now, 1000) + self.b.step(self.now, 1000) > 0 {}
    }

    fn pass(&mut self, time: Duration) {
        let end = self.now + time;
        while self.now < end {
            self.now = self.now + Duration::from_millis(1);
            self.settle();
        }
    }

    fn connection(&mut self, port: u16) -> (SlotId, SlotId, SlotId) {
        let l = self.b.tcp_listen(at_b(port), ListenOptions::default()).unwrap();
        let c = self.a.tcp_connect(self.now, at_b(port), None).unwrap();
        self.settle();
        let Poll::Ready((s, _)) = self.b.tcp_accept(l).unwrap() else { panic!("nobody came") };
        (c, s, l)
    }
}

#[test]
fn the_last_acknowledgement_of_a_close_is_not_left_to_a_timer() {
    // Who closes first; at the same time neither has heard of the other's.
    for order in ["a first", "b first", "both"] {
        let mut w = World::new();
        let (c, s, _) = w.connection(80);
        match order {
            "a first" => {
                w.a.close(w.now, c);
                w.settle();
                w.b.close(w.now, s);
            }
            "b first" => {
                w.b.close(w.now, s);
                w.settle();
                w.a.close(w.now, c);
            }
            _ => {
                w.a.close(w.now, c);
                w.b.close(w.now, s);
            }
        }
        w.settle();
        let left = [w.a.stat(), w.b.stat()]
            .map(|s| s.sockets.iter().filter(|s| s.state != "LISTEN").count());
        assert_eq!(left, [0, 0], "{order}: somebody waits for an answer");
        assert!(w.a.stat().time_wait + w.b.stat().time_wait >= 1, "{order}");
    }
}

#[test]
fn a_reset_peer_is_told_once_and_the_pipe_is_broken_then() {
    let mut w = World::new();
    let (c, s, _) = w.connection(80);
    w.b.tcp_entry(s).unwrap().linger = Some(Duration::ZERO);
    w.b.close(w.now, s);
    w.settle();
    let mut error = || w.a.sosend(c).reserve(w.now, b"x", 1, Attempt::First).map(drop).unwrap_err();
    assert_eq!(error(), SocketError::ConnectionReset);
    assert_eq!(error(), SocketError::BrokenPipe);
    assert_eq!(read(&mut w.a, w.now, c, usize::MAX), Some(vec![]));
}

#[test]
fn a_writer_of_a_dry_pool_is_told_when_buffers_are_back() {
    let budget = PoolConfig { huge_pages: false, ..PoolConfig::with_budget(4 << 20) };
    let mut w = World::with(|c| StackConfig { pool: budget, ..c });
    let hoarders: Vec<_> = (1..10).map(|port| w.connection(port)).collect();
    let (c, _, _) = w.connection(80);
    let set = Arc::new(PollSetCore::new().unwrap());
    w.a.join_set(c, &set, 7, Ready::WRITABLE).unwrap();
    let told = |w: &mut World| {
        let mut tokens = Vec::new();
        w.a.collect_set(&set, 10, |token, _| tokens.push(token));
        !tokens.is_empty()
    };
    assert!(told(&mut w));
    for (h, _, _) in &hoarders {
        while write(&mut w.a, w.now, *h, &[0; 64 << 10]).is_some() {}
    }
    // It has its part, whatever the others hold.
    let first = write(&mut w.a, w.now, c, &[0; 64 << 10]).unwrap();
    assert!(first >= FairShare::MIN_BYTES, "{first}");
    while write(&mut w.a, w.now, c, &[0; 64 << 10]).is_some() {}
    assert!(!told(&mut w), "a write would take nothing");
    // The peer reads, so that buffers come home; some of them unseen, from the peer's pool.
    for _ in 0..200 {
        w.pass(Duration::from_millis(10));
        for (_, s, _) in &hoarders {
            read(&mut w.b, w.now, *s, usize::MAX);
        }
    }
    assert!(told(&mut w), "nobody told the writer");
    assert!(write(&mut w.a, w.now, c, &[0; 64 << 10]).is_some());
}

#[test]
fn writes_of_two_writers_are_not_mixed() {
    let mut w = World::new();
    let (c, _, _) = w.connection(80);
    assert!(matches!(w.a.tcp_entry(c).and_then(|e| e.lock_send(1)), Ok(Poll::Ready(()))));
    assert!(matches!(w.a.tcp_entry(c).and_then(|e| e.lock_send(2)), Ok(Poll::Pending)));
    // The same thread again: a signal handler interrupted it.
    assert_eq!(
        w.a.tcp_entry(c).and_then(|e| e.lock_send(1)).map(drop),
        Err(SocketError::WouldBlock)
    );
    w.a.sosend(c).unlock();
    assert!(matches!(w.a.tcp_entry(c).and_then(|e| e.lock_send(2)), Ok(Poll::Ready(()))));
}

#[test]
fn a_datagram_to_oneself_is_there_when_the_call_returns() {
    let mut w = World::new();
    let udp = |shard: &mut Shard, port| {
        shard.udp().bind(([10, 0, 0, 1], port).into(), Default::default()).unwrap()
    };
    let (sender, receiver) = (udp(&mut w.a, 1), udp(&mut w.a, 2));
    for i in 0..1000u32 {
        let to = SocketAddr::from(([10, 0, 0, 1], 2));
        w.a.udp().send(w.now, sender, &[&i.to_ne_bytes()], Some(to)).unwrap();
        let Poll::Ready(d) = w.a.udp().receive(receiver).unwrap() else {
            panic!("{i} is not there")
        };
        assert_eq!(d.payload.to_vec(), i.to_ne_bytes());
        w.a.free(d.payload);
    }
}

#[test]
fn a_closed_socket_is_in_no_poll_set() {
    let mut w = World::new();
    let (c, s, l) = w.connection(80);
    let set = Arc::new(PollSetCore::new().unwrap());
    for (i, id) in [s, l].into_iter().enumerate() {
        w.b.join_set(id, &set, i, Ready::READABLE | Ready::WRITABLE).unwrap();
    }
    write(&mut w.a, w.now, c, b"x");
    w.settle();
    let mut tokens = Vec::new();
    w.b.collect_set(&set, 10, |t, _| tokens.push(t));
    assert_eq!(tokens, [0]);
    // It lives on until its peer has answered, but its user is gone.
    w.b.close(w.now, s);
    w.b.close(w.now, l);
    assert_eq!(w.b.collect_set(&set, 10, |t, _| panic!("{t} is closed")), 0);
}

#[test]
fn an_absent_neighbour_fails_a_connect_in_about_three_seconds() {
    let mut w = World::new();
    let c = w.a.tcp_connect(w.now, SocketAddr::from(([10, 0, 0, 99], 80)), None).unwrap();
    w.pass(Duration::from_millis(2500));
    assert!(matches!(w.a.tcp_connected(c), Ok(Poll::Pending)));
    w.pass(Duration::from_millis(1000));
    assert_eq!(w.a.tcp_connected(c).map(drop), Err(SocketError::HostUnreachable));
}

#[test]
fn every_buffer_returns_for_every_order_of_closes() {
    let mut w = World::new();
    for i in 0..50u16 {
        let (c, s, l) = w.connection(1000 + i);
        write(&mut w.a, w.now, c, &vec![1; usize::from(i) * 3000]);
        if i % 2 == 0 {
            w.settle();
        }
        match i % 3 {
            0 => w.a.close(w.now, c),
            1 => w.b.close(w.now, s),
            _ => drop(read(&mut w.b, w.now, s, usize::MAX)),
        }
        if i % 5 == 0 {
            w.settle();
        }
        w.a.close(w.now, c);
        w.b.close(w.now, l);
        w.b.close(w.now, s);
    }
    w.pass(Duration::from_millis(1500));
    for shard in [&mut w.a, &mut w.b] {
        let stat = shard.stat();
        assert_eq!(stat.sockets.len(), 0);
        assert_eq!(stat.pool.mbufs_in_use, 0);
        assert_eq!(stat.window.granted_bytes, 0);
        assert_eq!(shard.counters().value(Counter::TcpTimeouts), 0);
    }
}
