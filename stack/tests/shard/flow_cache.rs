//! Header prediction: a segment whose headers are predicted gets what one gets whose headers are all read, and
//! what only looks alike is not taken for one.

use std::sync::{Arc, Mutex};
use std::task::Poll;

use std::net::{SocketAddr, SocketAddrV4};

use fulmar::internals::drivers::link::{Impairments, LinkConfig, sim_pair};
use fulmar_stack::base::{DropReason, Duration, SeqNum, SlotId};
use fulmar_stack::ip::IfAddr;
use fulmar_stack::shard::{ListenOptions, Reserved};
use fulmar_stack::socket::Attempt;
use fulmar_stack::wire::tcp::{Flags, Header};
use fulmar_testbed::listener::{PORT, Rig, SERVER, frame_of};
use fulmar_testbed::stations::{self, at, config, ether};
use fulmar_testbed::tamper::Tampered;
use fulmar_testbed::world::World;
use proptest::prelude::*;

/// The time of a step.
const TICK: Duration = Duration::from_micros(100);

/// Which byte of the next frame with payload is to be changed.
type Change = Arc<Mutex<Option<usize>>>;

struct Rigged {
    world: World,
    change: Change,
    listener: SlotId,
    /// False: everything that was derived from the tables is derived anew for each frame.
    predicts: bool,
}

fn rigged() -> Rigged {
    let how = Impairments { delay: TICK, ..Impairments::default() };
    let (near, far) = sim_pair(1, &how, &LinkConfig::default());
    let change = Change::default();
    let change_it = Arc::clone(&change);
    let tampered = Tampered::new(far).changes(move |frame: &mut [u8]| {
        let taken = (frame.len() > 66).then(|| change_it.lock().unwrap().take()).flatten();
        // The next frame may be a shorter one that is retransmitted.
        let last = frame.len() - 1;
        taken.inspect(|at| frame[last.min(*at)] ^= 1).is_some()
    });
    let devices = [Box::new(near) as _, Box::new(tampered) as _];
    let mut world = World::new(devices, |n| config(n, 16 << 20));
    let listener = world.listen(80);
    Rigged { world, change, listener, predicts: true }
}

impl Rigged {
    fn pass(&mut self, steps: usize) {
        let World { now, shards } = &mut self.world;
        for _ in 0..steps {
            *now = *now + TICK;
            for s in &mut *shards {
                loop {
                    if !self.predicts {
                        let passing = IfAddr { addr: at(9, 0).ip(), prefix_len: 32 };
                        s.ip().add_address(passing).unwrap();
                        assert!(s.ip().remove_address(passing.addr));
                    }
                    if s.step(*now, 1) == 0 {
                        break;
                    }
                }
            }
        }
    }

    fn connected(&mut self) -> (SlotId, SlotId) {
        let World { now, shards } = &mut self.world;
        let client = shards[0].tcp_connect(*now, at(1, 80), None).unwrap();
        self.pass(20);
        (client, self.world.accept(self.listener).expect("accepted"))
    }

    fn write(&mut self, id: SlotId, bytes: &[u8]) {
        let World { now, shards } = &mut self.world;
        assert_eq!(stations::write(&mut shards[0], *now, id, bytes), Some(bytes.len()), "no space");
    }

    /// Writes three messages one after the other, so that their stream is known.
    fn talk(&mut self, id: SlotId) {
        for text in [b"one,", b"two,", b"six,"] {
            self.write(id, text);
            self.pass(10);
        }
    }

    fn read(&mut self, id: SlotId) -> Vec<u8> {
        let Ok(Poll::Ready(chain)) = self.world.shards[1].tcp_take(id, usize::MAX) else {
            return Vec::new();
        };
        let bytes = chain.to_vec();
        self.world.shards[1].free(chain);
        bytes
    }
}

#[test]
fn a_frame_that_differs_where_a_stream_does_not_is_judged_by_all_of_its_headers() {
    for (byte, reason) in [
        // To a group of stations.
        (0, DropReason::IpDestination),
        (5, DropReason::NotForUs),
        (12, DropReason::UnknownEtherType),
        (18, DropReason::IpChecksum),
        (22, DropReason::IpChecksum),
        (25, DropReason::IpChecksum),
        (29, DropReason::IpChecksum),
        (37, DropReason::TcpNoSocket),
    ] {
        let mut w = rigged();
        let (client, server) = w.connected();
        w.talk(client);
        *w.change.lock().unwrap() = Some(byte);
        w.write(client, b"ten.");
        w.pass(10);
        assert_eq!(w.read(server), b"one,two,six,", "byte {byte}");
        assert_eq!(w.world.shards[1].counters().drops(reason), 1, "byte {byte}: {reason:?}");
        assert_eq!(w.world.shards[1].counters().total_drops(), 1, "byte {byte}");
        if byte != 37 {
            // Where the connection has not been refused.
            w.pass(10_000);
            assert_eq!(w.read(server), b"ten.", "byte {byte}");
        }
    }
}

#[test]
fn a_connection_in_the_place_of_the_last_one_gets_its_own_bytes() {
    let mut w = rigged();
    let (mut client, mut server) = w.connected();
    for _ in 0..3 {
        w.talk(client);
        assert_eq!(w.read(server), b"one,two,six,");
        // Reset, so that the same addresses and ports and the same slot may serve again.
        w.world.shards[0].tcp_entry(client).unwrap().linger = Some(Duration::ZERO);
        w.world.shards[0].close(w.world.now, client);
        w.pass(20);
        w.world.shards[1].close(w.world.now, server);
        w.pass(20);
        (client, server) = w.connected();
    }
    w.talk(client);
    assert_eq!(w.read(server), b"one,two,six,");
}

#[test]
fn streams_that_alternate_each_get_their_own_bytes() {
    let mut w = rigged();
    let [a, b] = [w.connected(), w.connected()];
    for round in 0..20u8 {
        for (i, (client, _)) in [a, b, b, a].into_iter().enumerate() {
            w.write(client, &[round * 4 + i as u8; 5]);
            w.pass(10);
        }
    }
    // What Nagle's algorithm holds goes when the last acknowledgement has come.
    w.pass(1000);
    let expected = |turns: [u8; 2]| -> Vec<u8> {
        let of_round = |r: u8| turns.map(|t| [r * 4 + t; 5]).concat();
        (0..20).flat_map(of_round).collect()
    };
    assert_eq!(w.read(a.1), expected([0, 3]));
    assert_eq!(w.read(b.1), expected([1, 2]));
}

/// A frame of the device with the addresses of a frame that the stack sends to itself.
fn forged(from: SocketAddrV4, to: SocketAddrV4, tos: u8) -> Vec<u8> {
    let (flags, seq, ack) = (Flags::ACK, SeqNum(1), SeqNum(1));
    let header = Header { flags, seq, ack, window: 1000, ..Header::default() };
    frame_of(ether(1), tos, [from, to], &header, &[])
}

#[test]
fn a_frame_of_the_device_is_not_taken_for_one_of_the_stack_to_itself() {
    let mut rig = Rig::new(ListenOptions::default());
    let to = SocketAddrV4::new(SERVER, PORT);
    let client = rig.server.tcp_connect(rig.now, SocketAddr::V4(to), None).unwrap();
    rig.pass(20);
    let server = rig.accept().expect("accepted");
    let Ok((Some(SocketAddr::V4(from)), _)) = rig.server.addresses(client) else { panic!() };
    // Both directions, one after the other, with each ECN field.
    for (id, from, to) in [(client, from, to), (server, to, from)] {
        // Several in a row, so that their headers are predicted.
        rig.server.tcp_entry(id).unwrap().tcb.set_nodelay(true);
        for text in [b"one,", b"two,", b"six,", b"ten,"] {
            assert_eq!(stations::write(&mut rig.server, rig.now, id, text), Some(4));
        }
        rig.pass(100);
        let before = rig.drops(DropReason::EtherSource);
        (0..4).for_each(|tos| rig.send_frame(forged(from, to, tos)));
        rig.pass(5);
        assert_eq!(rig.drops(DropReason::EtherSource) - before, 4);
    }
    assert_eq!([rig.read(server), rig.read(client)], [b"one,two,six,ten,"; 2]);
}

/// Something that happens on the two hosts.
#[derive(Clone, Debug)]
enum Event {
    Write { from_server: bool, connection: usize, bytes: usize },
    Read(usize),
    Tamper(usize),
    Pass(usize),
    Finish(usize),
}

fn event() -> impl Strategy<Value = Event> {
    let connection = 0..2usize;
    let write = (prop::bool::weighted(0.2), connection.clone(), 1..=512usize);
    prop_oneof![
        6 => write.prop_map(|(from_server, connection, bytes)| Event::Write { from_server, connection, bytes }),
        2 => connection.clone().prop_map(Event::Read),
        2 => (0..70usize).prop_map(Event::Tamper),
        4 => (1..12usize).prop_map(Event::Pass),
        1 => Just(Event::Pass(3000)),
        1 => connection.prop_map(Event::Finish),
    ]
}

/// What a world has shown after each event: what was read, and what its shards have counted.
fn play(events: &[Event], predicts: bool) -> Vec<String> {
    let mut w = rigged();
    w.predicts = predicts;
    let ids = [w.connected(), w.connected()];
    let mut shown = Vec::new();
    for (serial, event) in events.iter().enumerate() {
        let text = vec![serial as u8; 512];
        let mut seen = String::new();
        match *event {
            Event::Write { from_server, connection, bytes } => {
                let (client, server) = ids[connection];
                let id = if from_server { server } else { client };
                let shard = &mut w.world.shards[usize::from(from_server)];
                let done =
                    shard.sosend(id).reserve(w.world.now, &text[..bytes], bytes, Attempt::First);
                seen = match done {
                    Ok(Poll::Ready(Reserved::Sent(n))) => format!("sent {n}"),
                    Ok(Poll::Ready(Reserved::Space(_))) => "space".into(),
                    Ok(_) => "waits".into(),
                    Err(e) => format!("{e:?}"),
                };
            }
            Event::Read(connection) => seen = format!("{:?}", w.read(ids[connection].1)),
            Event::Tamper(byte) => *w.change.lock().unwrap() = Some(byte),
            Event::Pass(steps) => w.pass(steps),
            Event::Finish(connection) => w.world.shards[0].close(w.world.now, ids[connection].0),
        }
        w.pass(1);
        let counted = w.world.shards.each_ref().map(|s| format!("{:?}", s.counters()));
        shown.push(format!("{event:?}: {seen} {counted:?}"));
    }
    shown
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn with_and_without_prediction_the_same_segments_do_the_same(
        events in prop::collection::vec(event(), 1..60),
    ) {
        let (with, without) = (play(&events, true), play(&events, false));
        for (a, b) in with.iter().zip(&without) {
            prop_assert_eq!(a, b);
        }
    }
}
