//! Neighbours as connections see them: acknowledgements confirm a neighbour, and forged sources do not
//! keep a real one from being found. Two shards on a wire that the test carries frames over; time is
//! virtual, a tick is 10 ms.

use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};

use fulmar_stack::base::{DropReason, Duration, Offload, SeqNum, SlotId};
use fulmar_stack::device::Caps;
use fulmar_stack::device::memory::{Arrival, Frame, MemoryDevice, MemoryPort};
use fulmar_stack::ip::{IfAddr, NeighbourState};
use fulmar_stack::mbuf::Purpose;
use fulmar_stack::shard::{ListenOptions, MoreData, StackConfig};
use fulmar_stack::wire::eth;
use fulmar_stack::wire::tcp::Options;
use fulmar_testbed::listener::{frame_of, syn};
use fulmar_testbed::stations::{self, ether};
use fulmar_testbed::world::World;
use std::task::Poll;

const TICK: Duration = Duration::from_millis(10);
const PORT: u16 = 80;

fn address(n: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 0, 0, n)
}

/// A frame whose checksums the receiving device has verified.
fn trusted(frame: Vec<u8>) -> Frame {
    (frame, Offload { csum_valid: true, ..Offload::default() })
}

fn is_arp(frame: &[u8]) -> bool {
    frame[12..14] == eth::ARP.to_be_bytes()
}

struct Rig {
    world: World,
    wires: [MemoryPort; 2],
    listener: SlotId,
}

impl Rig {
    fn new() -> Rig {
        let ends = [1, 2]
            .map(|n| MemoryDevice::new(Caps { tx_csum: true, ..Caps::plain(1500, ether(n)) }));
        let [(a, to_a), (b, to_b)] = ends;
        let mut world = World::new([Box::new(a), Box::new(b)], |station| StackConfig {
            addresses: vec![IfAddr { addr: address(station + 1).into(), prefix_len: 16 }],
            ..stations::config(station, 16 << 20)
        });
        let local = SocketAddr::new(address(1).into(), PORT);
        let listener = world.shards[0].tcp_listen(local, ListenOptions::default()).unwrap();
        Rig { world, wires: [to_a, to_b], listener }
    }

    /// A tick, in which the frames pass that may. Returns those that may not.
    fn tick(&mut self, may_pass: impl Fn(&[u8]) -> bool) -> Vec<Frame> {
        self.world.step(TICK);
        let mut lost = Vec::new();
        for (from, to) in [(0, 1), (1, 0)] {
            let sent = std::mem::take(&mut self.wires[from].lock().sent);
            let (passing, others): (Vec<_>, Vec<_>) =
                sent.into_iter().partition(|f| may_pass(&f.0));
            let passing = passing.into_iter().map(|f| Arrival::from(trusted(f.0)));
            self.wires[to].lock().arriving.extend(passing);
            lost.extend(others);
        }
        lost
    }

    /// A connection: the server's end and the client's.
    fn connected(&mut self) -> [SlotId; 2] {
        let to = SocketAddr::new(address(1).into(), PORT);
        let client = self.world.shards[1].tcp_connect(self.world.now, to, None).unwrap();
        (0..10).for_each(|_| drop(self.tick(|_| true)));
        match self.world.shards[0].tcp_accept(self.listener) {
            Ok(Poll::Ready((server, _))) => [server, client],
            _ => panic!("not connected"),
        }
    }

    fn write(&mut self, end: usize, id: SlotId, bytes: &[u8]) {
        let shard = &mut self.world.shards[end];
        let mut chain = shard.pool().alloc_chain(bytes.len(), 0, Purpose::Send).unwrap();
        chain.fill([bytes]);
        let step = shard.sosend(id).append(self.world.now, &mut chain, MoreData::None).unwrap();
        assert!(matches!(step, Poll::Ready(())));
    }

    fn state(&mut self, end: usize, of: Ipv4Addr) -> Option<NeighbourState> {
        let mut all = self.world.shards[end].ip().neighbours();
        all.find(|n| n.ip == of).map(|n| n.state)
    }
}

#[test]
fn a_connection_that_makes_progress_does_not_depend_on_answers_to_arp() {
    let mut rig = Rig::new();
    let [server, client] = rig.connected();
    let (mut written, mut read, mut asked) = (0, [0, 0], 0);
    // Two minutes: four times as long as a neighbour stays reachable.
    for n in 0..12_000 {
        if n % 50 == 0 {
            rig.write(0, server, &[1; 100]);
            rig.write(1, client, &[2; 100]);
            written += 100;
        }
        asked += rig.tick(|f| !is_arp(f)).len();
        for (end, id) in [server, client].into_iter().enumerate() {
            let came = stations::read(&mut rig.world.shards[end], rig.world.now, id, usize::MAX);
            read[end] += came.map_or(0, |bytes| bytes.len());
        }
    }
    assert_eq!(asked, 0, "questions");
    assert_eq!(read, [written; 2]);
}

#[test]
fn a_neighbour_that_acknowledges_nothing_is_asked_and_given_up() {
    let mut rig = Rig::new();
    let [server, _] = rig.connected();
    rig.write(0, server, &[1; 100]);
    let mut asked = 0;
    for _ in 0..10_000 {
        // Nothing arrives any more, nor does an answer.
        asked += rig.tick(|_| false).iter().filter(|f| is_arp(&f.0)).count();
    }
    assert!(asked >= 3, "{asked} questions");
    assert_eq!(rig.state(0, address(2)), Some(NeighbourState::Failed));
}

/// A SYN from a host of the network that does not exist.
fn forged_syn(n: u16) -> Vec<u8> {
    let [high, low] = (n + 0x100).to_be_bytes();
    let from = SocketAddrV4::new(Ipv4Addr::new(10, 0, high, low), 1000 + n);
    let header = syn(SeqNum(n.into()), Options::default());
    frame_of(ether(9), 0, [from, SocketAddrV4::new(address(1), PORT)], &header, &[])
}

#[test]
fn forged_syns_from_the_link_do_not_keep_a_new_neighbour_from_being_found() {
    let mut rig = Rig::new();
    let to = SocketAddr::new(address(2).into(), PORT);
    let (mut n, mut connecting) = (0, None);
    for tick in 0..200 {
        for _ in 0..50 {
            rig.wires[0].lock().arriving.push_back(trusted(forged_syn(n)).into());
            n += 1;
        }
        if tick == 100 {
            // The table has been full of hosts that do not exist for a second.
            connecting = Some(rig.world.shards[0].tcp_connect(rig.world.now, to, None).unwrap());
        }
        // The forged hosts answer nothing; the client does.
        let others = rig.tick(|f| {
            let is_for_client = |at: usize| f[at..at + 4] == address(2).octets();
            f[6..12] == ether(2).0 || if is_arp(f) { is_for_client(38) } else { is_for_client(30) }
        });
        assert!(others.iter().all(|f| f.0[6..12] == ether(1).0));
        if tick == 110 {
            assert_eq!(rig.state(0, address(2)), Some(NeighbourState::Reachable));
        }
    }
    let client = &rig.world.shards[1];
    assert_eq!(client.counters().drops(DropReason::TcpNoSocket), 1, "the SYN arrived, once");
    assert!(connecting.is_some());
    let table: Vec<_> = rig.world.shards[0].ip().neighbours().map(|n| n.state).collect();
    let asked = table.iter().filter(|s| **s == NeighbourState::Incomplete).count();
    assert!((200..=256).contains(&asked), "{asked} of {} are asked for", table.len());
}
