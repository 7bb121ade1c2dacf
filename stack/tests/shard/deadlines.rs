//! Two shards over a simulated link, driven by hand and by their own deadlines.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;

use fulmar::internals::drivers::link::{Impairments, LinkConfig, sim_pair};
use fulmar_stack::base::{Counter, DropReason, Duration, Instant, SlotId};
use fulmar_stack::shard::{Reserved, StackConfig};
use fulmar_stack::socket::{Attempt, Shutdown, SocketError};
use fulmar_stack::tcp::State;
use fulmar_testbed::stations::{self, at, config};
use fulmar_testbed::tamper::Tampered;
use fulmar_testbed::world::World;

const MS: Duration = Duration::from_millis(1);

fn world() -> World {
    World::linked(1, &Impairments { delay: MS, ..Impairments::default() }, |n| config(n, 16 << 20))
}

/// A world, and whether the device of station 0 is full.
fn with_valve() -> (World, Arc<AtomicBool>) {
    let how = Impairments { delay: MS, ..Impairments::default() };
    let (near, far) = sim_pair(1, &how, &LinkConfig::default());
    let is_full = Arc::new(AtomicBool::new(false));
    let valve = Arc::clone(&is_full);
    let space = move |_| if valve.load(Ordering::Relaxed) { 0 } else { usize::MAX };
    let devices = [Box::new(Tampered::new(near).takes(space)) as _, Box::new(far) as _];
    // One frame in the burst, so that a full device is felt at once.
    let world = World::new(devices, |n| StackConfig { burst_frames: 1, ..config(n, 16 << 20) });
    (world, is_full)
}

/// A connection from station 0 to station 1: the ends.
fn connected(p: &mut World) -> [SlotId; 2] {
    let listener = p.listen(80);
    let ends = p.connect(listener);
    p.pass(100 * MS);
    ends
}

fn write(p: &mut World, id: SlotId, bytes: &[u8]) {
    let n = stations::write(&mut p.shards[0], p.now, id, bytes);
    assert_eq!(n, Some(bytes.len()), "no space");
}

#[test]
fn an_ack_that_is_held_back_goes_by_its_own_timer() {
    let mut p = world();
    let [client, _] = connected(&mut p);
    for _ in 0..100 {
        write(&mut p, client, b"message");
        p.pass(Duration::from_millis(60));
        assert!(p.shards[0].is_drained(Some(client)), "not acknowledged after 60 ms");
    }
    assert_eq!(p.shards[0].counters().value(Counter::TcpTimeouts), 0);
}

#[test]
fn with_transmit_deferred_a_turn_of_reads_and_writes_leaves_as_one_burst() {
    let mut p = world();
    let [client, server] = connected(&mut p);
    p.shards[0].set_transmit_deferred(Some(Instant::FAR_FUTURE));
    p.shards[0].tcp_entry(client).unwrap().tcb.set_nodelay(true);
    let sent = |p: &World| {
        let counters = p.shards[0].counters();
        (counters.value(Counter::TxFrames), counters.value(Counter::TxBursts))
    };
    let (frames, bursts) = sent(&p);
    (0..3).for_each(|_| write(&mut p, client, b"message"));
    assert_eq!(sent(&p), (frames, bursts));
    p.shards[0].step(p.now, 0);
    assert_eq!(sent(&p), (frames + 3, bursts + 1));

    assert_eq!(stations::write(&mut p.shards[1], p.now, server, b"answer"), Some(6));
    p.now = p.now + Duration::from_millis(2);
    assert_eq!(p.shards[0].step_for_reader(p.now), 1);
    assert_eq!(stations::read(&mut p.shards[0], p.now, client, 100).unwrap(), b"answer");
    write(&mut p, client, b"thanks");
    assert_eq!(sent(&p), (frames + 3, bursts + 1));
    p.shards[0].step(p.now, 0);
    assert_eq!(sent(&p), (frames + 4, bursts + 2), "the ACK travels with the bytes");
}

#[test]
fn with_transmit_deferred_a_turn_that_leaves_frames_to_the_next_one_acknowledges_all_the_same() {
    let mut p = world();
    let [client, server] = connected(&mut p);
    p.shards[0].set_transmit_deferred(Some(Instant::FAR_FUTURE));
    let mut most = 0;
    for _ in 0..200 {
        while stations::write(&mut p.shards[1], p.now, server, &[1; 60_000]).is_some() {}
        p.now = p.now + Duration::from_millis(1);
        p.shards[1].step(p.now, 64);
        let sent = p.shards[0].counters().value(Counter::TxFrames);
        let came = p.shards[0].step_for_reader(p.now);
        most = most.max(came);
        while stations::read(&mut p.shards[0], p.now, client, 1 << 20).is_some() {}
        p.shards[0].step(p.now, 0);
        let has_answered = p.shards[0].counters().value(Counter::TxFrames) > sent;
        assert!(came < 2 || has_answered, "{came} frames without an ACK");
    }
    assert!(most >= 2, "no turn filled the cache: {most}");
}

#[test]
fn what_a_full_device_held_back_goes_when_it_has_room() {
    let (mut p, is_full) = with_valve();
    let [client, server] = connected(&mut p);
    p.shards[0].tcp_entry(client).unwrap().tcb.set_nodelay(true);
    is_full.store(true, Ordering::Relaxed);
    write(&mut p, client, &[7; 1000]);
    write(&mut p, client, b"more");
    // Would not return if a full device were a reason to spin.
    p.pass(Duration::from_millis(50));
    is_full.store(false, Ordering::Relaxed);
    p.shards[0].step(p.now, 64);
    p.pass(Duration::from_millis(20));
    let Ok(Poll::Ready(chain)) = p.shards[1].tcp_take(server, usize::MAX) else {
        panic!("nothing arrived");
    };
    assert_eq!(chain.len(), 1004);
    p.shards[1].free(chain);
}

#[test]
fn a_reset_that_a_full_device_held_back_is_not_forgotten() {
    let (mut p, is_full) = with_valve();
    let [client, server] = connected(&mut p);
    is_full.store(true, Ordering::Relaxed);
    // One frame fills the burst, so that the reset finds no room.
    write(&mut p, client, b"x");
    p.shards[0].tcp_entry(client).unwrap().linger = Some(Duration::ZERO);
    p.shards[0].close(p.now, client);
    is_full.store(false, Ordering::Relaxed);
    p.shards[0].step(p.now, 64);
    p.pass(Duration::from_millis(20));
    assert!(p.shards[0].stat().sockets.is_empty());
    let Ok(Poll::Ready(chain)) = p.shards[1].tcp_take(server, 10) else { panic!("no byte") };
    p.shards[1].free(chain);
    assert!(p.shards[1].tcp_take(server, 10).is_err(), "the peer got no reset");
}

#[test]
fn a_connection_does_not_begin_in_its_own_time_wait() {
    let mut p = world();
    let [client, server] = connected(&mut p);
    let from = p.shards[0].addresses(client).unwrap().0;
    // The client closes first, so TIME-WAIT is its.
    p.shards[0].close(p.now, client);
    p.pass(Duration::from_millis(10));
    p.shards[1].close(p.now, server);
    p.pass(Duration::from_millis(100));
    assert_eq!(p.shards[0].stat().time_wait, 1);
    let again = p.shards[0].tcp_connect(p.now, at(1, 80), from);
    assert_eq!(again, Err(SocketError::AddressNotAvailable));
    assert!(p.shards[0].tcp_connect(p.now, at(1, 80), None).is_ok(), "another port will do");
    p.pass(Duration::from_secs(61));
    assert!(p.shards[0].tcp_connect(p.now, at(1, 80), from).is_ok());
}

#[test]
fn a_socket_in_time_wait_is_closed_and_leaves_its_addresses_to_a_syn() {
    let mut p = world();
    let [client, server] = connected(&mut p);
    let from = p.shards[0].addresses(client).unwrap().0;
    // The server ends first, and keeps its socket.
    assert_eq!(stations::write(&mut p.shards[0], p.now, client, b"last"), Some(4));
    p.shards[1].tcp_shutdown(p.now, server, Shutdown::Write).unwrap();
    p.pass(Duration::from_millis(10));
    assert!(!p.shards[1].ready(server).unwrap().is_closed());
    p.shards[0].close(p.now, client);
    p.pass(Duration::from_secs(2));
    assert_eq!(p.shards[1].tcp_entry(server).unwrap().tcb.state(), State::TimeWait);
    assert!(p.shards[1].ready(server).unwrap().is_closed());

    let again = p.shards[0].tcp_connect(p.now, at(1, 80), from).unwrap();
    p.pass(Duration::from_millis(10));
    assert_eq!(p.shards[0].tcp_entry(again).unwrap().tcb.state(), State::Established);
    assert_eq!(p.shards[1].tcp_entry(server).unwrap().tcb.state(), State::Closed);
    assert!(p.shards[1].ready(server).unwrap().is_closed());
    // What had come is still read, and to close the old socket leaves the new connection alone.
    assert_eq!(stations::read(&mut p.shards[1], p.now, server, 100).unwrap(), b"last");
    p.shards[1].close(p.now, server);
    write(&mut p, again, b"x");
    p.pass(Duration::from_millis(100));
    assert_eq!(p.shards[0].tcp_entry(again).unwrap().tcb.info().acked_bytes, 1);
}

#[test]
fn without_a_listener_time_wait_goes_on_in_its_entry_for_what_is_left_of_it() {
    let mut p = world();
    let listener = p.listen(80);
    let [client, server] = p.connect(listener);
    p.shards[1].tcp_shutdown(p.now, server, Shutdown::Write).unwrap();
    p.pass(Duration::from_millis(10));
    let key = *p.shards[0].tcp_entry(client).unwrap().tcb.key();
    p.shards[0].close(p.now, client);
    p.pass(Duration::from_secs(2));
    let time_wait = |p: &mut World| p.shards[1].stat().time_wait;
    assert_eq!(time_wait(&mut p), 0, "the socket has it");
    // The listener is gone, so that the SYN opens nothing.
    p.shards[1].close(p.now, listener);
    let again = p.shards[0].tcp_connect(p.now, at(1, 80), Some(key.local())).unwrap();
    p.pass(Duration::from_millis(500));
    assert_eq!(p.shards[0].tcp_entry(again).unwrap().tcb.state(), State::SynSent);
    assert_eq!(time_wait(&mut p), 1);
    p.shards[0].close(p.now, again);
    // It began two and a half seconds ago, and lasts a minute.
    p.pass(Duration::from_millis(57_000));
    assert_eq!(time_wait(&mut p), 1);
    p.pass(Duration::from_secs(1));
    assert_eq!(time_wait(&mut p), 0);
}

#[test]
fn a_connection_that_was_reset_and_is_not_closed_yet_leaves_its_addresses_to_the_next() {
    let mut p = world();
    let [client, server] = connected(&mut p);
    let from = p.shards[0].addresses(client).unwrap().0;
    p.shards[0].tcp_entry(client).unwrap().linger = Some(Duration::ZERO);
    p.shards[0].close(p.now, client);
    p.pass(Duration::from_millis(10));
    assert_eq!(p.shards[1].tcp_entry(server).unwrap().tcb.state(), State::Closed);
    let again = p.shards[0].tcp_connect(p.now, at(1, 80), from).unwrap();
    p.pass(Duration::from_millis(10));
    assert_eq!(p.shards[0].tcp_entry(again).unwrap().tcb.state(), State::Established);
    // To close the old one leaves the new one alone.
    p.shards[1].close(p.now, server);
    write(&mut p, again, b"x");
    p.pass(Duration::from_millis(100));
    assert_eq!(p.shards[0].tcp_entry(again).unwrap().tcb.info().acked_bytes, 1);
}

#[test]
fn a_fin_that_has_waited_behind_room_is_sent_when_the_room_is_given_back() {
    let mut p = world();
    let [client, server] = connected(&mut p);
    let step = p.shards[0].sosend(client).reserve(p.now, &[], 100, Attempt::First);
    let Ok(Poll::Ready(Reserved::Space(room))) = step else { panic!("no room") };
    p.shards[0].tcp_shutdown(p.now, client, Shutdown::Write).unwrap();
    p.pass(Duration::from_secs(1));
    assert!(!matches!(p.shards[1].tcp_take(server, 10), Ok(Poll::Ready(_))));
    p.shards[0].sosend(client).abandon(p.now, room);
    p.pass(Duration::from_secs(1));
    let Ok(Poll::Ready(end)) = p.shards[1].tcp_take(server, 10) else { panic!("no end") };
    assert!(end.is_empty());
}

/// Segments to closed ports in the same moment: how many of them are answered.
fn refusals(p: &mut World, segments: usize) -> (u64, u64) {
    let counts = |p: &World| {
        let c = p.shards[1].counters();
        (c.value(Counter::TcpResetsOut), c.value(Counter::TcpResetsLimited))
    };
    let before = counts(p);
    for _ in 0..segments {
        let id = p.shards[0].tcp_connect(p.now, at(1, 9), None).unwrap();
        p.shards[0].tcp_entry(id).unwrap().linger = Some(Duration::ZERO);
        p.shards[0].close(p.now, id);
    }
    p.pass(Duration::from_millis(20));
    let after = counts(p);
    (after.0 - before.0, after.1 - before.1)
}

#[test]
fn a_flood_to_a_closed_port_is_answered_a_thousand_times_a_second() {
    let mut p = world();
    // Each end knows the other.
    connected(&mut p);
    let mut sum = (0, 0);
    for _ in 0..30 {
        let (out, limited) = refusals(&mut p, 60);
        assert!(out + limited == 60, "{out} answered and {limited} not, of 60");
        sum = (sum.0 + out, sum.1 + limited);
    }
    // 500 to 1,000 at once, and about one for each of the 600 ms that passed.
    assert!((1000..=1750).contains(&sum.0) && sum.1 > 0, "{sum:?}");
    p.pass(Duration::from_secs(2));
    assert_eq!(refusals(&mut p, 60), (60, 0));
    let drops = p.shards[1].counters().drops(DropReason::TcpNoSocket);
    assert_eq!(drops, 31 * 60, "a drop is counted once, answered or not");
}

/// Moves `bytes` from station 0 to station 1 in writes of 64 KiB; returns what arrived.
fn move_bulk(p: &mut World, bytes: &[u8]) -> Vec<u8> {
    let [client, server] = connected(p);
    let (mut sent, mut received) = (0, Vec::new());
    for _ in 0..10_000 {
        let part = &bytes[sent..bytes.len().min(sent + (64 << 10))];
        let s = &mut p.shards[0];
        if !part.is_empty()
            && let Ok(Poll::Ready(Reserved::Space(mut r))) =
                s.sosend(client).reserve(p.now, &[], part.len(), Attempt::First)
        {
            sent += r.len();
            r.chain.copy_from(0, &part[..r.len()]);
            s.sosend(client).commit(p.now, r);
        }
        p.pass(Duration::from_millis(5));
        while let Ok(Poll::Ready(chain)) = p.shards[1].tcp_take(server, 1 << 20) {
            received.extend(chain.to_vec());
            p.shards[1].tcp_read_done(p.now, server, chain);
        }
        if received.len() == bytes.len() {
            return received;
        }
    }
    panic!("only {} of {} bytes arrived", received.len(), bytes.len());
}

#[test]
fn a_bulk_write_is_summed_while_it_is_copied_and_hardly_again_even_when_it_is_sent_again() {
    let bytes: Vec<u8> = (0..3_000_000u32).map(|i| ((i * 7) >> 3) as u8).collect();
    let how = Impairments { delay: MS, loss: 0.02, ..Impairments::default() };
    let link = LinkConfig { csum: false, tso: None, ..LinkConfig::default() };
    let (near, far) = sim_pair(1, &how, &link);
    let devices = [Box::new(near) as _, Box::new(far) as _];
    let mut p = World::new(devices, |n| config(n, 16 << 20));
    assert!(move_bulk(&mut p, &bytes) == bytes);
    let value = |c| p.shards[0].counters().value(c);
    let again = value(Counter::TcpRetransmitBytes);
    assert!(again > 0, "nothing was lost: the test shows nothing");
    // Headers of 32 bytes and half a unit of payload per packet of 1,448 bytes.
    let (summed, sent) = (value(Counter::SummedBytes), bytes.len() as u64 + again);
    assert!(summed < sent / 12, "{summed} bytes read again for {sent} bytes sent");
}

#[test]
fn a_device_that_sums_leaves_nothing_to_sum() {
    let mut p = world();
    let bytes = vec![7; 300_000];
    assert!(move_bulk(&mut p, &bytes) == bytes);
    assert_eq!(p.shards[0].counters().value(Counter::SummedBytes), 0);
}
