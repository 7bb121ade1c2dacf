//! Connections take turns when they send: one with a large window is not served whole before the others.

use std::net::{Ipv4Addr, SocketAddrV4};

use fulmar::internals::drivers::link::{Impairments, LinkConfig, sim_pair};
use fulmar_stack::base::{Duration, Instant, SeqNum, SlotId};
use fulmar_stack::shard::ListenOptions;
use fulmar_stack::wire::tcp::{Flags, Header, Options, Timestamps};
use fulmar_testbed::listener::{PORT, Rig, ack, syn, syn_options};
use fulmar_testbed::stations;
use fulmar_testbed::tamper::Tampered;
use fulmar_testbed::world::World;

const ISS: SeqNum = SeqNum(77);

fn peer(n: u16) -> SocketAddrV4 {
    SocketAddrV4::new(Ipv4Addr::new(203, 0, 113, 5), 4000 + n)
}

/// A connection from a peer: its socket, and the sequence number of the server's first byte.
fn connect(rig: &mut Rig, from: SocketAddrV4) -> (SlotId, SeqNum) {
    rig.send_from(from, &syn(ISS, syn_options(7)), &[]);
    rig.pass(1);
    let reply = rig.replies_to(from)[0];
    rig.send_from(from, &ack(&reply), &[]);
    rig.pass(1);
    (rig.accept().expect("accepted"), SeqNum(reply.seq.0.wrapping_add(1)))
}

/// A segment of a peer that acknowledges everything up to `ack`, with the largest window.
fn segment(rig: &Rig, seq: u32, ack: SeqNum) -> Header {
    let clock = rig.now.as_millis_u32();
    let timestamps = Some(Timestamps { value: clock, echo: 0 });
    let options = Options { timestamps, ..Options::default() };
    let seq = SeqNum(ISS.0.wrapping_add(seq));
    Header { seq, ack, flags: Flags::ACK, window: u16::MAX, options, ..Header::default() }
}

#[test]
fn an_answer_does_not_wait_for_all_of_another_connections_window() {
    let mut rig = Rig::new(ListenOptions::default());
    let (bulk, start) = connect(&mut rig, peer(0));
    let (small, its_start) = connect(&mut rig, peer(1));
    // All that is in flight is acknowledged, until an ACK admits much more than a turn sends.
    let info = |rig: &mut Rig| rig.server.tcp_entry(bulk).unwrap().tcb.info();
    let acks_all = |rig: &mut Rig| {
        let info = info(rig);
        let end = info.acked_bytes + info.in_flight_bytes;
        segment(rig, 1, SeqNum(start.0.wrapping_add(end as u32)))
    };
    while info(&mut rig).in_flight_bytes < 400_000 {
        let _ = stations::write(&mut rig.server, rig.now, bulk, &[1; 256 << 10]);
        let acks = acks_all(&mut rig);
        rig.send_from(peer(0), &acks, &[]);
        rig.pass(1);
    }
    rig.frames();
    // Both are heard of in one burst: the bulk connection may send on, and the other one has something to acknowledge.
    let acks = acks_all(&mut rig);
    rig.send_from(peer(0), &acks, &[]);
    for n in 0..3 {
        let data = segment(&rig, 1 + 1460 * n, its_start);
        rig.send_from(peer(1), &data, &[7; 1460]);
    }
    rig.pass(1);
    let frames = rig.frames();
    let port = |frame: &Vec<u8>| u16::from_be_bytes([frame[36], frame[37]]);
    let bulk_frames = frames.iter().filter(|f| port(f) == peer(0).port()).count();
    let ack_at = frames.iter().position(|f| port(f) == peer(1).port()).expect("an ACK");
    assert!(bulk_frames > 200, "{bulk_frames} frames are no test");
    assert!(ack_at <= 70, "it waits for {ack_at} of {} frames to port {PORT}", frames.len());
    assert_eq!(rig.read(small).len(), 3 * 1460);
}

#[test]
fn an_ack_leaves_a_full_device_though_another_connection_writes_all_the_time() {
    let link = LinkConfig { tso: None, ..LinkConfig::default() };
    let (near, far) = sim_pair(1, &Impairments::default(), &link);
    // The server's device takes a few frames at a time and is full for the rest of a millisecond.
    let mut full_until = Instant::ZERO;
    let slow = Tampered::new(far).takes(move |now| {
        let is_full = now < full_until;
        full_until = if is_full { full_until } else { now + Duration::from_millis(1) };
        if is_full { 0 } else { 4 }
    });
    let devices = [Box::new(near) as _, Box::new(slow) as _];
    let mut w = World::new(devices, |n| stations::config(n, 16 << 20));
    let listener = w.listen(80);
    let [bulk, small] = [w.connect(listener), w.connect(listener)];
    let in_flight =
        |w: &mut World| w.shards[0].tcp_entry(small[0]).unwrap().tcb.info().in_flight_bytes;
    for _ in 0..100 {
        stations::write(&mut w.shards[0], w.now, small[0], &[7; 3 * 1460]);
        let mut waited = 0;
        while in_flight(&mut w) > 0 {
            waited += 1;
            assert!(waited < 1000, "an ACK waits for more than 100 ms");
            w.step(Duration::from_micros(100));
            let World { now, shards: [client, server] } = &mut w;
            while stations::read(client, *now, bulk[0], 1 << 20).is_some_and(|b| !b.is_empty()) {}
            stations::write(server, *now, bulk[1], &[1; 4000]);
            stations::read(server, *now, small[1], 1 << 20);
        }
    }
}
