//! What a shard does with packets that on_locked on another's queue, and which stages an observer sees.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::task::Poll;

use fulmar::internals::drivers::link::{Impairments, LinkConfig, SimLink, sim_pair};
use fulmar::internals::runtime::{WatchedShard, handoffs};
use fulmar_stack::base::{Counter, Duration, FlowKey, Instant, Observer, Secrets, SlotId, Stage};
use fulmar_stack::ip::IfAddr;
use fulmar_stack::mbuf::PoolConfig;
use fulmar_stack::shard::{Reserved, Shard, StackConfig};
use fulmar_stack::socket::Attempt;

const START: Instant = Instant::from_millis(1000);

fn at(station: u8, port: u16) -> SocketAddr {
    SocketAddr::from(([10, 0, 0, station], port))
}

fn wire(seed: u64) -> (SimLink, SimLink) {
    let how = Impairments { delay: Duration::from_millis(1), ..Impairments::default() };
    sim_pair(seed, &how, &LinkConfig::default())
}

fn shard(station: u8, device: SimLink, id: u16, shards: u16) -> WatchedShard {
    let config = StackConfig {
        addresses: vec![IfAddr { addr: at(station, 0).ip(), prefix_len: 24 }],
        pool: PoolConfig::with_budget(16 << 20),
        secrets: Some(Secrets::for_simulation(u64::from(station))),
        ..StackConfig::default()
    };
    WatchedShard::new(Shard::of_several(config, Box::new(device), START, id, shards).unwrap())
}

fn received(s: &mut WatchedShard, id: SlotId) -> Vec<SocketAddr> {
    let mut from = Vec::new();
    while let Ok(Poll::Ready(d)) = s.udp().receive(id) {
        from.push(d.src);
        s.free(d.payload);
    }
    from
}

#[test]
fn a_packet_on_the_wrong_queue_crosses_once_to_the_owner_of_its_flow() {
    const SENT: u16 = 60;
    let ((near, far), (idle, _other_end)) = (wire(1), wire(2));
    let mut peer = shard(1, near, 0, 1);
    let mut queues = [shard(2, far, 0, 2), shard(2, idle, 1, 2)];
    queues.iter_mut().zip(handoffs(2)).for_each(|(q, end)| q.join(end));
    let sockets = queues.each_mut().map(|q| q.udp().bind(at(2, 53), Default::default()).unwrap());
    for i in 0..SENT {
        let s = peer.udp().bind(at(1, 4000 + i), Default::default()).unwrap();
        peer.udp().send(START, s, &[b"to whom?"], Some(at(2, 53))).unwrap();
    }
    for ms in 1000..1100 {
        let now = Instant::from_millis(ms);
        peer.step(now, 64);
        for q in &mut queues {
            q.step(now, 64);
        }
    }
    let by = Secrets::for_simulation(2).owner();
    let (mut total, mut crossed) = (0, 0);
    for (owner, (q, s)) in queues.iter_mut().zip(sockets).enumerate() {
        for from in received(q, s) {
            let key = FlowKey::new(at(2, 53), from);
            assert_eq!(usize::from(by.owner(&key, 2)), owner, "{from} is another shard's");
            total += 1;
            crossed += owner as u64;
        }
    }
    assert_eq!(total + lost(&peer), u64::from(SENT));
    assert!(crossed > 0 && crossed < u64::from(SENT));
    assert_eq!(queues[0].counters().value(Counter::WrongQueue), crossed);
    assert_eq!(queues[1].counters().value(Counter::WrongQueue), 0);
    for q in &mut queues {
        q.pool().drain_remote();
        assert_eq!(q.pool().outstanding(), 0);
    }
}

/// Datagrams that found the queue of those who wait for the neighbour's address full.
fn lost(peer: &Shard) -> u64 {
    peer.counters().drops(fulmar_stack::base::DropReason::NeighbourQueueFull)
}

/// Notes the stages that it is shown.
#[derive(Clone, Default)]
struct Notes(Arc<Mutex<Vec<Stage>>>);

impl Observer for Notes {
    fn pass(&self, stage: Stage) {
        self.0.lock().unwrap().push(stage);
    }
}

impl Notes {
    fn take(&self) -> Vec<Stage> {
        std::mem::take(&mut self.0.lock().unwrap())
    }
}

#[test]
fn an_observer_sees_the_stages_of_a_write_and_of_a_read_in_their_order() {
    let (near, far) = wire(3);
    let (out, back) = (Notes::default(), Notes::default());
    let (mut a, mut b) = (shard(1, near, 0, 1), shard(2, far, 0, 1));
    a.stages().set_observer(Arc::new(out.clone()));
    b.stages().set_observer(Arc::new(back.clone()));
    let listener = b.tcp_listen(at(2, 80), Default::default()).unwrap();
    let conn = a.tcp_connect(START, at(2, 80), None).unwrap();
    let mut now = START;
    let mut turn = |a: &mut Shard, b: &mut Shard, ms: u64| {
        for _ in 0..ms {
            now = now + Duration::from_millis(1);
            a.step(now, 64);
            b.step(now, 64);
        }
        now
    };
    let now_1 = turn(&mut a, &mut b, 20);
    let Ok(Poll::Ready((child, _))) = b.tcp_accept(listener) else { panic!("not connected") };
    drop((out.take(), back.take()));
    let Ok(Poll::Ready(Reserved::Space(r))) =
        a.sosend(conn).reserve(now_1, &[], 5000, Attempt::First)
    else {
        panic!("no space")
    };
    a.sosend(conn).commit(now_1, r);
    use Stage as S;
    let expected = [
        S::SendChecked,
        S::SendReserved,
        S::SendCommitted,
        S::TransportOutput,
        S::RouteFound,
        S::IpOutput,
        S::EtherOutput,
        S::BurstQueued,
    ];
    let seen = out.take();
    assert_eq!(seen[..8], expected);
    assert!(seen.windows(2).any(|two| two == [S::DeviceTaken, S::Completed]), "{seen:?}");
    turn(&mut a, &mut b, 3);
    let Ok(Poll::Ready(chain)) = b.tcp_take(child, 5000) else { panic!("nothing came") };
    assert!(!chain.is_empty());
    b.tcp_read_done(now_1 + Duration::from_millis(3), child, chain);
    let seen: Vec<Stage> = back.take();
    let up = [S::DeviceReceived, S::EtherInput, S::IpInput, S::Demultiplexed, S::TransportInput];
    assert_eq!(seen[..5], up);
    assert_eq!(seen[5], S::ReaderWoken);
    let read: Vec<_> = seen.iter().filter(|s| **s as u8 > S::TimersRun as u8).collect();
    assert_eq!(read, [&S::ReceiveTaken, &S::ReceiveFreed]);
}
