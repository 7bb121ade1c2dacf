//! What segments do that no connection owns: LISTEN and TIME-WAIT (RFC 9293 section 3.10.7).

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use fulmar_base::{Counter, Counters, DropReason, Duration, Instant, Secrets, SlotId};
use fulmar_drivers::link::{Impairments, LinkConfig, SimLink, sim_pair};
use fulmar_ip::IfAddr;
use fulmar_mbuf::{Pool, PoolConfig, Purpose};
use fulmar_netdev::{Burst, Device, forward_device};
use fulmar_shard::{ListenOptions, Reserved, Shard, StackConfig};
use fulmar_socket::Step;
use fulmar_wire::tcp::Flags;

/// Where the flags of a TCP segment are in a frame with IPv4.
const FLAGS_AT: usize = 14 + 20 + 13;

/// A device that receives the next TCP segment with other flags, if any are set here.
struct Tamper {
    inner: SimLink,
    flags: Arc<AtomicU8>,
}

impl Device for Tamper {
    forward_device!(self => self.inner, except rx_burst);
    fn rx_burst(
        &mut self,
        now: Instant,
        pool: &mut Pool,
        out: &mut Burst,
        budget: usize,
        counters: &mut Counters,
    ) -> usize {
        let n = self.inner.rx_burst(now, pool, out, budget, counters);
        for _ in 0..n {
            let mut p = out.pop_front().expect("it has come");
            let mut bytes = p.chain.to_vec();
            let is_tcp = bytes.get(12..14) == Some(&[8, 0][..]) && bytes[23] == 6;
            let flags = if is_tcp { self.flags.swap(0, Ordering::Relaxed) } else { 0 };
            if flags != 0 {
                bytes[FLAGS_AT] = flags;
                let chain = pool.alloc_chain(bytes.len(), 0, Purpose::Receive).expect("buffers");
                pool.free(std::mem::replace(&mut p.chain, chain));
                p.chain.copy_from(0, &bytes);
            }
            out.push(p).unwrap_or_else(|_| panic!("it was in there"));
        }
        n
    }
}

fn at(station: u8, port: u16) -> SocketAddr {
    SocketAddr::from(([10, 0, 0, station + 1], port))
}

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
        let how = Impairments { delay: Duration::from_micros(100), ..Impairments::default() };
        let (a, b) = sim_pair(1, &how, &LinkConfig::default());
        let (now, flags) = (Instant::from_millis(1000), Arc::new(AtomicU8::new(0)));
        let shard = |station: u8, device: Box<dyn Device>| {
            let config = StackConfig {
                addresses: vec![IfAddr { addr: at(station, 0).ip(), prefix_len: 24 }],
                pool: PoolConfig { huge_pages: false, ..PoolConfig::with_budget(32 << 20) },
                secrets: Some(Secrets::for_simulation(u64::from(station))),
                ..StackConfig::default()
            };
            Shard::new(config, device, now).expect("a shard")
        };
        let client = shard(0, Box::new(a));
        let mut server = shard(1, Box::new(Tamper { inner: b, flags: Arc::clone(&flags) }));
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
        let Ok(Step::Done((id, _))) = self.server.tcp_accept(self.listener) else {
            panic!("not accepted");
        };
        id
    }

    fn is_connected(&mut self, id: SlotId) -> bool {
        matches!(self.client.tcp_connected(id), Ok(Step::Done(())))
    }

    /// A connection from `port` that the server closes first after it has sent `bytes`. Returns the
    /// number behind its end.
    fn leave_time_wait(&mut self, port: u16, bytes: usize) -> fulmar_base::SeqNum {
        let client = self.connect(port);
        let server = self.accept();
        let mut got = 0;
        for sent in (0..bytes).step_by(10_000) {
            let piece = vec![7; 10_000.min(bytes - sent)];
            match self.server.tcp_reserve(self.now, server, &piece, piece.len(), false) {
                Ok(Step::Done(Reserved::Sent(n))) => assert_eq!(n, piece.len()),
                Ok(Step::Done(Reserved::Space(mut r))) => {
                    r.chain.copy_from(0, &piece);
                    self.server.tcp_commit(self.now, server, r);
                }
                _ => panic!("no space"),
            }
            self.pass(1);
            while let Ok(Step::Done(chain)) = self.client.tcp_take(client, usize::MAX) {
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
        assert_eq!(self.server.stat().time_wait, 1);
        end
    }
}

#[test]
fn a_listener_drops_a_bare_fin_and_answers_nothing() {
    let mut w = World::new(16);
    w.flags.store(Flags::FIN.0, Ordering::Relaxed);
    let id = w.connect(4000);
    let c = w.server.counters();
    assert_eq!((c.drops(DropReason::TcpBadFlags), c.value(Counter::TcpResetsOut)), (1, 0));
    w.pass(1000);
    assert!(w.is_connected(id), "the next SYN");
}

#[test]
fn syn_with_fin_opens_no_connection() {
    let mut w = World::new(16);
    w.flags.store((Flags::SYN | Flags::FIN).0, Ordering::Relaxed);
    let id = w.connect(4000);
    let c = w.server.counters();
    assert_eq!((c.drops(DropReason::TcpBadFlags), c.value(Counter::TcpResetsOut)), (1, 0));
    assert!(!w.is_connected(id));
    assert_eq!(w.server.stat().sockets.len(), 1, "the listener");
}

#[test]
fn a_connection_after_time_wait_begins_above_the_end_of_the_one_before() {
    let mut w = World::new(16);
    let end = w.leave_time_wait(4000, 1_000_000);
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
