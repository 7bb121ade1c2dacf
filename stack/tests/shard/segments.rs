//! What segments do that no connection owns: LISTEN and TIME-WAIT (RFC 9293 section 3.10.7).

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use fulmar::internals::drivers::link::{Impairments, LinkConfig, sim_pair};
use fulmar_stack::base::{Counter, DropReason, Duration, Instant, SlotId};
use fulmar_stack::shard::{ListenOptions, Shard, StackConfig};
use fulmar_stack::wire::tcp::Flags;
use fulmar_testbed::stations::{self, at, config};
use fulmar_testbed::tamper::Tamper;
use std::task::Poll;

/// Where the flags of a TCP segment are in a frame with IPv4.
const FLAGS_AT: usize = 14 + 20 + 13;

/// A client and a server that listens.
struct World {
    now: Instant,
    client: Shard,
    server: Shard,
    flags: Arc<AtomicU8>,
    listener: SlotId,
}

impl World {
    fn new(backlog: usize) -> World {
        World::with_time_waits(backlog, 16)
    }

    fn with_time_waits(backlog: usize, most: usize) -> World {
        let how = Impairments { delay: Duration::from_micros(100), ..Impairments::default() };
        let (a, b) = sim_pair(1, &how, &LinkConfig::default());
        let (now, flags) = (Instant::from_millis(1000), Arc::new(AtomicU8::new(0)));
        let next = Arc::clone(&flags);
        let tamper = Tamper {
            inner: b,
            change: move |frame: &mut [u8]| {
                let is_tcp = frame.get(12..14) == Some(&[8, 0]) && frame[23] == 6;
                let flags = if is_tcp { next.swap(0, Ordering::Relaxed) } else { 0 };
                if flags != 0 {
                    frame[FLAGS_AT] = flags;
                }
                flags != 0
            },
        };
        let client = Shard::new(config(0, 32 << 20), Box::new(a), now).unwrap();
        let server = StackConfig { max_time_wait: most, ..config(1, 32 << 20) };
        let mut server = Shard::new(server, Box::new(tamper), now).unwrap();
        let options = ListenOptions { backlog, ..ListenOptions::default() };
        let listener = server.tcp_listen(at(1, 80), options).unwrap();
        World { now, client, server, flags, listener }
    }

    fn pass(&mut self, ms: u64) {
        for _ in 0..ms * 10 {
            self.now = self.now + Duration::from_micros(100);
            self.client.step(self.now, 64);
            self.server.step(self.now, 64);
        }
    }

    fn connect(&mut self, port: u16) -> SlotId {
        let id = self.client.tcp_connect(self.now, at(1, 80), Some(at(0, port))).unwrap();
        self.pass(10);
        id
    }

    fn accept(&mut self) -> SlotId {
        let Ok(Poll::Ready((id, _))) = self.server.tcp_accept(self.listener) else {
            panic!("not accepted");
        };
        id
    }

    fn is_connected(&mut self, id: SlotId) -> bool {
        matches!(self.client.tcp_connected(id), Ok(Poll::Ready(())))
    }

    /// A connection from `port` that the server closes first after it has sent `bytes`. Returns the
    /// number behind its end.
    fn leave_time_wait(&mut self, port: u16, bytes: usize) -> fulmar_stack::base::SeqNum {
        let client = self.connect(port);
        let server = self.accept();
        let mut got = 0;
        for sent in (0..bytes).step_by(10_000) {
            let piece = vec![7; 10_000.min(bytes - sent)];
            let n = stations::write(&mut self.server, self.now, server, &piece);
            assert_eq!(n, Some(piece.len()), "no space");
            self.pass(1);
            while let Ok(Poll::Ready(chain)) = self.client.tcp_take(client, usize::MAX) {
                got += chain.len();
                self.client.free(chain);
            }
        }
        assert_eq!(got, bytes);
        let end = self.client.tcp_entry(client).unwrap().tcb.recv_seq(bytes as u64) + 1;
        self.server.close(self.now, server);
        self.pass(1);
        self.client.close(self.now, client);
        self.pass(1);
        end
    }
}

#[test]
fn a_listener_drops_a_bare_fin_and_answers_nothing() {
    let mut w = World::new(16);
    w.flags.store(Flags::FIN.0 as u8, Ordering::Relaxed);
    let id = w.connect(4000);
    let c = w.server.counters();
    assert_eq!((c.drops(DropReason::TcpBadFlags), c.value(Counter::TcpResetsOut)), (1, 0));
    w.pass(1000);
    assert!(w.is_connected(id), "the next SYN");
}

#[test]
fn syn_with_fin_opens_no_connection() {
    let mut w = World::new(16);
    w.flags.store((Flags::SYN | Flags::FIN).0 as u8, Ordering::Relaxed);
    let id = w.connect(4000);
    let c = w.server.counters();
    assert_eq!((c.drops(DropReason::TcpBadFlags), c.value(Counter::TcpResetsOut)), (1, 0));
    assert!(!w.is_connected(id));
    assert_eq!(w.server.stat().sockets.len(), 1, "the listener");
}

#[test]
fn a_flow_that_was_in_time_wait_before_is_not_taken_for_the_oldest() {
    let mut w = World::with_time_waits(16, 2);
    for port in [4000, 4001, 4000] {
        w.leave_time_wait(port, 10);
    }
    assert_eq!(w.server.stat().time_wait, 2);
    w.leave_time_wait(4002, 10);
    assert_eq!(w.server.stat().time_wait, 2);
    w.pass(70_000);
    assert_eq!(w.server.stat().time_wait, 0);
}

#[test]
fn a_connection_after_time_wait_begins_above_the_end_of_the_one_before() {
    let mut w = World::new(16);
    let end = w.leave_time_wait(4000, 1_000_000);
    assert_eq!(w.server.stat().time_wait, 1);
    let id = w.connect(4000);
    assert!(w.is_connected(id));
    let begin = w.client.tcp_entry(id).unwrap().tcb.recv_seq(0);
    assert!(begin.after(end), "{begin:?} is not above {end:?}");
    assert_eq!(w.server.stat().time_wait, 0);
}

#[test]
fn a_syn_ends_no_time_wait_where_nobody_listens_any_more() {
    let mut w = World::new(16);
    w.leave_time_wait(4000, 10);
    w.server.close(w.now, w.listener);
    let id = w.connect(4000);
    assert!(!w.is_connected(id));
    assert_eq!(w.server.stat().time_wait, 1);
}

#[test]
fn a_syn_ends_no_time_wait_if_the_listener_has_no_room_for_it() {
    let mut w = World::new(1);
    w.leave_time_wait(4000, 10);
    let first = w.connect(4001);
    assert!(w.is_connected(first));
    let id = w.connect(4000);
    assert!(!w.is_connected(id));
    assert_eq!(w.server.counters().drops(DropReason::AcceptQueueFull), 1);
    assert_eq!(w.server.stat().time_wait, 1);
    // The same SYN again, once there is room.
    w.accept();
    w.pass(1000);
    assert!(w.is_connected(id));
    assert_eq!(w.server.stat().time_wait, 0);
}
