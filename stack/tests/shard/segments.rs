//! What segments do that no connection owns: LISTEN and TIME-WAIT (RFC 9293 section 3.10.7).

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use fulmar::internals::drivers::link::{Impairments, LinkConfig, sim_pair};
use fulmar_stack::base::{Counter, DropReason, Duration, SlotId};
use fulmar_stack::shard::{ListenOptions, Shard, StackConfig};
use fulmar_stack::wire::tcp::Flags;
use fulmar_testbed::stations::{self, at, config};
use fulmar_testbed::tamper::Tampered;
use fulmar_testbed::world::World;
use std::task::Poll;

/// Where the flags of a TCP segment are in a frame with IPv4.
const FLAGS_AT: usize = 14 + 20 + 13;

/// A client, station 0, and a server that listens.
struct Pair {
    world: World,
    flags: Arc<AtomicU8>,
    listener: SlotId,
}

impl Pair {
    fn new(backlog: usize) -> Pair {
        Pair::with_time_waits(backlog, 16)
    }

    fn with_time_waits(backlog: usize, max_time_wait: usize) -> Pair {
        let how = Impairments { delay: Duration::from_micros(100), ..Impairments::default() };
        let (near, far) = sim_pair(1, &how, &LinkConfig::default());
        let flags = Arc::new(AtomicU8::new(0));
        let next = Arc::clone(&flags);
        let far = Tampered::new(far).changes(move |frame: &mut [u8]| {
            let is_tcp = frame.get(12..14) == Some(&[8, 0]) && frame[23] == 6;
            let flags = if is_tcp { next.swap(0, Ordering::Relaxed) } else { 0 };
            if flags != 0 {
                frame[FLAGS_AT] = flags;
            }
            flags != 0
        });
        let config = |n| StackConfig { max_time_wait, ..config(n, 32 << 20) };
        let mut world = World::new([Box::new(near), Box::new(far)], config);
        let options = ListenOptions { backlog, ..ListenOptions::default() };
        let listener = world.shards[1].tcp_listen(at(1, 80), options).unwrap();
        Pair { world, flags, listener }
    }

    fn client(&mut self) -> &mut Shard {
        &mut self.world.shards[0]
    }

    fn server(&mut self) -> &mut Shard {
        &mut self.world.shards[1]
    }

    fn pass(&mut self, ms: u64) {
        self.world.pass(Duration::from_millis(ms));
    }

    fn connect(&mut self, port: u16) -> SlotId {
        let now = self.world.now;
        let id = self.client().tcp_connect(now, at(1, 80), Some(at(0, port))).unwrap();
        self.pass(10);
        id
    }

    fn accept(&mut self) -> SlotId {
        self.world.accept(self.listener).expect("accepted")
    }

    fn close(&mut self, station: usize, id: SlotId) {
        self.world.shards[station].close(self.world.now, id);
    }

    fn is_connected(&mut self, id: SlotId) -> bool {
        matches!(self.client().tcp_connected(id), Ok(Poll::Ready(())))
    }

    /// A connection from `port` that the server closes first after it has sent `bytes`. Returns the
    /// number behind its end.
    fn leave_time_wait(&mut self, port: u16, bytes: usize) -> fulmar_stack::base::SeqNum {
        let client = self.connect(port);
        let server = self.accept();
        let mut got = 0;
        for sent in (0..bytes).step_by(10_000) {
            let piece = vec![7; 10_000.min(bytes - sent)];
            let now = self.world.now;
            let n = stations::write(self.server(), now, server, &piece);
            assert_eq!(n, Some(piece.len()), "no space");
            self.pass(1);
            while let Ok(Poll::Ready(chain)) = self.client().tcp_take(client, usize::MAX) {
                got += chain.len();
                self.client().free(chain);
            }
        }
        assert_eq!(got, bytes);
        let end = self.client().tcp_entry(client).unwrap().tcb.recv_seq(bytes as u64) + 1;
        self.close(1, server);
        self.pass(1);
        self.close(0, client);
        self.pass(1);
        end
    }
}

#[test]
fn a_listener_drops_a_bare_fin_and_answers_nothing() {
    let mut w = Pair::new(16);
    w.flags.store(Flags::FIN.0 as u8, Ordering::Relaxed);
    let id = w.connect(4000);
    let c = w.server().counters();
    assert_eq!((c.drops(DropReason::TcpBadFlags), c.value(Counter::TcpResetsOut)), (1, 0));
    w.pass(1000);
    assert!(w.is_connected(id), "the next SYN");
}

#[test]
fn syn_with_fin_opens_no_connection() {
    let mut w = Pair::new(16);
    w.flags.store((Flags::SYN | Flags::FIN).0 as u8, Ordering::Relaxed);
    let id = w.connect(4000);
    let c = w.server().counters();
    assert_eq!((c.drops(DropReason::TcpBadFlags), c.value(Counter::TcpResetsOut)), (1, 0));
    assert!(!w.is_connected(id));
    assert_eq!(w.server().stat().sockets.len(), 1, "the listener");
}

#[test]
fn a_flow_that_was_in_time_wait_before_is_not_taken_for_the_oldest() {
    let mut w = Pair::with_time_waits(16, 2);
    for port in [4000, 4001, 4000] {
        w.leave_time_wait(port, 10);
    }
    assert_eq!(w.server().stat().time_wait, 2);
    w.leave_time_wait(4002, 10);
    assert_eq!(w.server().stat().time_wait, 2);
    w.pass(70_000);
    assert_eq!(w.server().stat().time_wait, 0);
}

#[test]
fn a_connection_after_time_wait_begins_above_the_end_of_the_one_before() {
    let mut w = Pair::new(16);
    let end = w.leave_time_wait(4000, 1_000_000);
    assert_eq!(w.server().stat().time_wait, 1);
    let id = w.connect(4000);
    assert!(w.is_connected(id));
    let begin = w.client().tcp_entry(id).unwrap().tcb.recv_seq(0);
    assert!(begin.after(end), "{begin:?} is not above {end:?}");
    assert_eq!(w.server().stat().time_wait, 0);
}

#[test]
fn a_syn_ends_no_time_wait_where_nobody_listens_any_more() {
    let mut w = Pair::new(16);
    w.leave_time_wait(4000, 10);
    w.close(1, w.listener);
    let id = w.connect(4000);
    assert!(!w.is_connected(id));
    assert_eq!(w.server().stat().time_wait, 1);
}

#[test]
fn a_syn_ends_no_time_wait_if_the_listener_has_no_room_for_it() {
    let mut w = Pair::new(1);
    w.leave_time_wait(4000, 10);
    let first = w.connect(4001);
    assert!(w.is_connected(first));
    let id = w.connect(4000);
    assert!(!w.is_connected(id));
    assert_eq!(w.server().counters().drops(DropReason::AcceptQueueFull), 1);
    assert_eq!(w.server().stat().time_wait, 1);
    // The same SYN again, once there is room.
    w.accept();
    w.pass(1000);
    assert!(w.is_connected(id));
    assert_eq!(w.server().stat().time_wait, 0);
}
